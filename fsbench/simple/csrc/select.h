// Truncation first: which tokens min-p, top-k and top-p keep, found from the blocks' maxima, before
// any softmax. In this order, as vLLM applies them. Ties go to the lowest token.
// No include guard: see lanes.h.

struct Filters {
    float min_logit;  // min-p as a threshold on logits, -inf: off
    int32_t top_k;    // 0: off
    float top_p;      // 1: off
};

// Candidates: all logits >= threshold, in the order of their tokens.
static void gather(Scratch& scratch, Reader& read, size_t to, float threshold) {
    scratch.candidates.clear();
    const int step = 4 * WIDTH;
    for (size_t b = 0; b < to; b++) {
        if (scratch.maximum[b] < threshold || scratch.maximum[b] == -INFINITY) continue;
        const Block& block = scratch.blocks[b];
        const float* z = read(block);
        int n = padded(block);
        for (int i = 0; i < n; i += step) {
            Ints hit = load(z + i) >= threshold;
            for (int j = i + WIDTH; j < std::min(i + step, n); j += WIDTH)
                hit |= load(z + j) >= threshold;
            if (!any(hit)) continue;
            for (int j = i; j < std::min(i + step, block.count); j++)
                if (z[j] >= threshold && z[j] > -INFINITY)
                    scratch.candidates.push_back({z[j], block.first + j, 0});
        }
    }
}

// The largest threshold known from the blocks' maxima to leave at least k candidates.
static float top_k_bound(Scratch& scratch, size_t to, int k) {
    if (size_t(k) > to) return -INFINITY;
    scratch.order.assign(scratch.maximum.begin(), scratch.maximum.begin() + to);
    std::nth_element(
        scratch.order.begin(), scratch.order.begin() + (k - 1), scratch.order.end(),
        std::greater<float>());
    return scratch.order[k - 1];
}

static bool before(const Candidate& a, const Candidate& b) {
    return a.z > b.z || (a.z == b.z && a.token < b.token);
}

// Keeps the first `k` candidates in the order of `before`; tokens stay ascending.
static void keep_top_k(Scratch& scratch, size_t k) {
    auto& all = scratch.candidates;
    if (k == 0 || all.size() <= k) return;
    scratch.sorted = all;
    std::nth_element(
        scratch.sorted.begin(), scratch.sorted.begin() + (k - 1), scratch.sorted.end(), before);
    Candidate last = scratch.sorted[k - 1];
    all.erase(
        std::remove_if(all.begin(), all.end(), [&](const Candidate& c) { return before(last, c); }),
        all.end());
}

// Keeps the shortest head, in the order of `before`, whose mass reaches `wanted`; the token that
// crosses is kept. Quickselect by mass. False if all candidates together do not reach it.
static bool keep_mass(Scratch& scratch, double wanted) {
    auto& all = scratch.candidates;
    double total = 0;
    for (const Candidate& c : all) total += c.weight;
    if (total < wanted) return false;
    scratch.sorted = all;
    auto from = scratch.sorted.begin(), to = scratch.sorted.end();
    while (to - from > 1) {
        auto half = from + (to - from) / 2;
        std::nth_element(from, half, to, before);
        double mass = 0;
        for (auto c = from; c != half; c++) mass += c->weight;
        if (mass >= wanted) {
            to = half;
        } else {
            wanted -= mass;
            from = half;
        }
    }
    Candidate last = *from;
    all.erase(
        std::remove_if(all.begin(), all.end(), [&](const Candidate& c) { return before(last, c); }),
        all.end());
    return true;
}

// Weighs all candidates by exp((z - M) / T); returns the sum.
static double weigh(Scratch& scratch, float M, float T) {
    auto& all = scratch.candidates;
    auto& z = scratch.order;
    z.assign((all.size() + WIDTH - 1) / WIDTH * WIDTH, -INFINITY);
    for (size_t i = 0; i < all.size(); i++) z[i] = all[i].z;
    const float scale = LOG2_E / T;
    for (size_t i = 0; i < z.size(); i += WIDTH)
        store(&z[i], power_of_two((load(&z[i]) - M) * scale));
    double total = 0;
    for (size_t i = 0; i < all.size(); i++) total += all[i].weight = z[i];
    return total;
}

// How far below M, in units of T, the logits reach that together have the mass `wanted`: from a
// histogram of mass by depth, to 1 / 16. An estimate; the caller goes deeper if it is too small.
static float depth_of_mass(
    Scratch& scratch, Reader& read, size_t to, float M, float T, double wanted) {
    constexpr int BINS = 512, PER_T = 16;
    const float scale = LOG2_E / T;
    double mass[BINS] = {};
    alignas(64) int32_t bin[BLOCK];
    for (size_t b = 0; b < to; b++) {
        const float lowest = M - T * (BINS / PER_T);
        if (!(scratch.maximum[b] > lowest)) continue;
        const float* z = read(scratch.blocks[b]);
        const int n = padded(scratch.blocks[b]);
        for (int i = 0; i < n; i += WIDTH) {
            Floats t = (load(z + i) - M) * scale;
            store(scratch.weight + i, power_of_two(t));
            Floats depth = larger(t * (-PER_T / LOG2_E), Floats{});
            depth = depth > BINS - 1.0f ? all(BINS - 1.0f) : depth;
            Ints index = __builtin_convertvector(depth, Ints);
            std::memcpy(bin + i, &index, sizeof index);
        }
        for (int i = 0; i < n; i++) mass[bin[i]] += scratch.weight[i];
    }
    int deepest = 0;
    for (double sum = 0; deepest < BINS; deepest++)
        if ((sum += mass[deepest]) >= wanted) break;
    return float(deepest + 1) / PER_T + 1e-3f;
}

// The kept tokens of blocks [0, to), as candidates, given that all kept tokens of the row lie
// there if they are above `beyond` (-inf: there is nothing beyond). False if that is not settled.
//
// M: largest logit of the row. total: mass of the row relative to exp(M / T), needed for top-p
// without top-k and min-p only.
static bool select(
    Scratch& scratch, Reader& read, size_t to, const Filters& filters,
    float M, float T, double total, float beyond) {
    const int k = filters.top_k;
    const bool by_mass = filters.top_p < 1;
    const bool all_inside = filters.min_logit > beyond || beyond == -INFINITY;
    float threshold = std::max(filters.min_logit, k ? top_k_bound(scratch, to, k) : -INFINITY);
    if (k || filters.min_logit > -INFINITY) {
        gather(scratch, read, to, threshold);
        keep_top_k(scratch, k);
        if (!all_inside) {
            // Then k tokens above everything beyond settle it; min-p alone does not.
            if (!k || scratch.candidates.size() < size_t(k)) return false;
            for (const Candidate& c : scratch.candidates)
                if (c.z <= beyond) return false;
        }
        double mass = weigh(scratch, M, T);
        if (by_mass) keep_mass(scratch, std::min(double(filters.top_p) * mass, mass));
        return true;
    }
    // Top-p alone: lower the threshold until what is above has the mass.
    double wanted = double(filters.top_p) * total;
    float depth = depth_of_mass(scratch, read, to, M, T, wanted);
    for (;; depth *= 2) {
        threshold = M - depth * T;
        bool everything = depth > 256;
        if (!everything && threshold <= beyond) threshold = std::nextafter(beyond, INFINITY);
        gather(scratch, read, to, everything ? -INFINITY : threshold);
        double mass = weigh(scratch, M, T);
        if (everything && beyond == -INFINITY) wanted = std::min(wanted, mass);
        if (keep_mass(scratch, wanted)) {
            if (beyond == -INFINITY) return true;
            for (const Candidate& c : scratch.candidates)
                if (c.z <= beyond) return false;
            return true;
        }
        if (everything || (beyond > -INFINITY && threshold <= std::nextafter(beyond, INFINITY)))
            return beyond == -INFINITY;
    }
}

// The candidate on which the uniform falls, in the order of tokens.
static int32_t drawn(const Scratch& scratch, double u) {
    double total = 0;
    for (const Candidate& c : scratch.candidates) total += c.weight;
    double rest = u * total;
    int32_t last = -1;
    for (const Candidate& c : scratch.candidates) {
        if (c.weight > 0) last = c.token;
        rest -= c.weight;
        if (rest < 0) break;
    }
    return last;
}
