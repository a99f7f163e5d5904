// A row of logits in blocks of BLOCK, scanned from the nearest cache: the largest logit of each
// block, and its sum of exponentials relative to that. The only passes over the vocabulary.
// No include guard: see lanes.h.

struct Block {
    const void* z;
    int32_t first, count;  // tokens
};

// Everything a thread needs for a row, kept from row to row.
struct Scratch {
    std::vector<Block> blocks;
    std::vector<float> maximum, sum;  // of each block; sum of exp((z - maximum) / T)
    std::vector<float> order;
    std::vector<Candidate> candidates, sorted;
    alignas(64) float view[BLOCK];
    alignas(64) float weight[BLOCK];
};

static inline float at(const void* z, int64_t token, bool half) {
    if (!half) return static_cast<const float*>(z)[token];
    uint32_t bits = uint32_t(static_cast<const uint16_t*>(z)[token]) << 16;
    float value;
    std::memcpy(&value, &bits, 4);
    return value;
}

struct Reader {
    Scratch& scratch;
    bool half;                   // bf16
    const Penalties* penalties;  // nullptr: none
    size_t next = 0;             // of what was seen: where the last block's tokens ended

    // The block's logits as fp32, penalties applied, padded with -inf to whole vectors.
    const float* operator()(const Block& block) {
        const Seen *one = nullptr, *end = nullptr;
        if (penalties) {
            const Seen* list = penalties->seen.data();
            const Seen* last = list + penalties->seen.size();
            // Blocks mostly come in order; a search of each would take longer than a scan.
            if (next > 0 && list[next - 1].token >= block.first) next = 0;
            for (one = list + next; one != last && one->token < block.first;) one++;
            for (end = one; end != last && end->token < block.first + block.count;) end++;
            next = size_t(end - list);
        }
        if (!half && one == end && block.count % WIDTH == 0)
            return static_cast<const float*>(block.z);
        float* view = scratch.view;
        int whole = block.count / WIDTH * WIDTH, i = 0;
        // Not memcpy for fp32, which takes the slow start of `rep movsb` for these sizes.
        for (; half && i < whole; i += WIDTH)
            store(view + i, load(static_cast<const uint16_t*>(block.z) + i));
        for (; i < whole; i += WIDTH) store(view + i, load(static_cast<const float*>(block.z) + i));
        for (; i < block.count; i++) view[i] = at(block.z, i, half);
        for (; i % WIDTH; i++) view[i] = -INFINITY;
        for (; one != end; one++) {
            float& z = view[one->token - block.first];
            z = penalties->applied(z, *one);
        }
        return view;
    }
};

static int padded(const Block& block) { return (block.count + WIDTH - 1) / WIDTH * WIDTH; }

// Blocks of `count` logits at `z`, whose first is at `first` in the row.
static void add_blocks(Scratch& scratch, const void* z, int first, int count, bool half) {
    for (int at = 0; at < count; at += BLOCK) {
        const char* byte = static_cast<const char*>(z) + int64_t(at) * (half ? 2 : 4);
        scratch.blocks.push_back({byte, first + at, std::min(BLOCK, count - at)});
    }
}

// The largest of n logits; clears lanes of `fine` where one is NaN or +inf.
static inline float maximum_of(const float* z, int n, Ints& fine) {
    Floats best = all(-INFINITY);
    for (int i = 0; i < n; i += WIDTH) {
        Floats x = load(z + i);
        fine &= x < INFINITY;
        best = larger(x, best);
    }
    return largest(best);
}

// Scans blocks [from, to); `scale` is log2(e) / T, or 0 if no sum is wanted. False if a logit is
// NaN or +inf.
static bool scan(Scratch& scratch, Reader& read, size_t from, size_t to, float scale) {
    scratch.maximum.resize(to);
    scratch.sum.resize(to);
    Ints fine = ~Ints{};
    for (size_t b = from; b < to; b++) {
        const Block& block = scratch.blocks[b];
        const int n = padded(block);
        const float* z = static_cast<const float*>(block.z);
        // Logits in memory are always read by one and the same loop, also those of a block that is
        // then copied because of its penalties: a prefetcher that follows instructions loses the
        // stream if two loops take turns at it (seen on Zen 4: 80 us a row instead of 59).
        const bool direct = !read.half && n == block.count;
        float m = direct ? maximum_of(z, n, fine) : -INFINITY;
        const float* view = read(block);
        if (!direct || view != z) m = maximum_of(z = view, n, fine);
        Floats sum = {};
        if (scale > 0 && m > -INFINITY)
            for (int i = 0; i < n; i += WIDTH) sum += power_of_two((load(z + i) - m) * scale);
        scratch.maximum[b] = m;
        float total = 0;
        for (int lane = 0; lane < WIDTH; lane++) total += sum[lane];
        scratch.sum[b] = total;
    }
    bool ok = true;
    for (int lane = 0; lane < WIDTH; lane++) ok &= fine[lane] != 0;
    return ok;
}

// Turns the sums of blocks [from, to) into masses relative to exp(M / T); returns their total.
static double masses(Scratch& scratch, size_t from, size_t to, float M, float scale) {
    double total = 0;
    for (size_t b = from; b < to; b++) {
        float t = (scratch.maximum[b] - M) * scale;
        scratch.sum[b] *= t < -126 ? 0.0f : std::exp2(t);
        total += scratch.sum[b];
    }
    return total;
}

// The token on which a mass `r` in [0, total of blocks [from, to)) falls: inverse CDF by blocks,
// then inside one. Inside, r is rescaled to the block's mass summed in double, so that rounding
// of a block's sum moves no mass to its last token.
static int32_t fallen_on(
    Scratch& scratch, Reader& read, size_t from, size_t to, double r, float scale) {
    size_t chosen = to;
    for (size_t b = from; b < to; b++) {
        if (scratch.sum[b] > 0) chosen = b;
        if (r < scratch.sum[b]) break;
        r -= scratch.sum[b];
    }
    if (chosen == to) return -1;  // no mass anywhere
    const Block& block = scratch.blocks[chosen];
    const float* z = read(block);
    float* weight = scratch.weight;
    float m = scratch.maximum[chosen];
    for (int i = 0; i < padded(block); i += WIDTH)
        store(weight + i, power_of_two((load(z + i) - m) * scale));
    double total = 0;
    for (int i = 0; i < block.count; i++) total += weight[i];
    double rest = std::min(r / scratch.sum[chosen], 1.0) * total;
    int last = 0;
    for (int i = 0; i < block.count; i++) {
        if (weight[i] > 0) last = i;
        rest -= weight[i];
        if (rest < 0) break;
    }
    return block.first + last;
}

// The logit of a token, which lies in one of the blocks from `from` on.
static float logit_at(Scratch& scratch, Reader& read, int32_t token, size_t from) {
    size_t b = from;
    while (token - scratch.blocks[b].first >= scratch.blocks[b].count) b++;
    return read(scratch.blocks[b])[token - scratch.blocks[b].first];
}
