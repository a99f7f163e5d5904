// One row's decision: scan what is hot, or all; filter; draw by inverse CDF with the given uniform.
// No include guard: see lanes.h.

// Greedy: the lowest token among the largest logits.
static int32_t greedy(Scratch& scratch, Reader& read, size_t to) {
    float M = *std::max_element(scratch.maximum.begin(), scratch.maximum.begin() + to);
    gather(scratch, read, to, M);
    return scratch.candidates.front().token;
}

// Takes the penalized tokens beyond `hot` out of the tail's maximum and sum, and puts them in again
// with their penalties. The sum is relative to the maximum, before and after: a token may rise by
// more than the exponential of a double can say. False if the rest would have lost its precision.
static bool corrected_tail(
    const void* row, bool half, const Penalties& penalties, int hot, float T, float& tail_max,
    double& tail_sum) {
    const size_t first = penalties.from(hot), end = penalties.seen.size();
    double without = 0, with = 0;
    float highest = tail_max;
    for (size_t i = first; i < end; i++) {
        const Seen& one = penalties.seen[i];
        const float z = at(row, one.token, half);
        highest = std::max(highest, penalties.applied(z, one));
        without += std::exp((double(z) - tail_max) / T);
    }
    if (!(without <= 0.5 * tail_sum)) return false;
    for (size_t i = first; i < end; i++) {
        const Seen& one = penalties.seen[i];
        const float after = penalties.applied(at(row, one.token, half), one);
        with += std::exp((double(after) - highest) / T);
    }
    tail_sum = (tail_sum - without) * std::exp((double(tail_max) - highest) / T) + with;
    tail_max = highest;  // an upper bound is enough for the filters
    return true;
}

static Decision decide(
    Scratch& scratch, const Ring& ring, int slot, int row, const Penalties* penalties) {
    const int64_t cell = int64_t(slot) * ring.rows + row;
    const int32_t* shape = ring.shape + 3 * slot;
    const int hot = shape[0], present = shape[1];
    const int64_t stride = shape[2];
    const bool half = ring.elements == 1;
    const float T = ring.temperature[cell];
    const double u = ring.uniform[cell];
    const Decision undefined = {UNDEFINED, NAN};
    if (!(T >= 0) || T == INFINITY || !(u > 0 && u < 1)) return undefined;
    const bool sampled = T >= 0x1p-120f;
    const float scale = sampled ? LOG2_E / T : 0;

    // Hot tokens, then the tail; without hot tokens the whole row is the head.
    const int64_t bytes = half ? 2 : 4;
    const char* slot_at = static_cast<const char*>(ring.logits) +
                          slot * ring.rows * int64_t(ring.vocab) * bytes;
    const char* at = slot_at + row * stride * bytes;
    scratch.blocks.clear();
    const int split = hot ? hot : present;
    add_blocks(scratch, at, 0, split, half);
    const size_t head = scratch.blocks.size();
    add_blocks(scratch, at + split * bytes, split, present - split, half);
    const size_t blocks = scratch.blocks.size();
    const bool has_tail = present == ring.vocab;  // on this side of the bus
    if (penalties && !penalties->active()) penalties = nullptr;
    Reader read = {scratch, half, penalties};

    Filters filters = {-INFINITY, ring.top_k[cell], ring.top_p[cell]};
    if (filters.top_k < 0 || filters.top_k >= ring.vocab) filters.top_k = 0;
    const float min_p = ring.min_p[cell];
    const bool filtered =
        sampled && (filters.top_k > 0 || filters.top_p < 1 || min_p > 0);
    // Only top-p alone, and no filter at all, need the normalizer of the whole vocabulary.
    const bool need_sum = sampled && !(filters.top_k > 0 || min_p > 0);

    float tail_max = -INFINITY;
    double tail_sum = 0;  // relative to exp(tail_max / T)
    bool hot_path = hot > 0 && hot < ring.vocab;
    if (hot_path) {
        tail_max = ring.tail_max[cell];
        tail_sum = ring.tail_sum[cell];
        if (tail_max == -INFINITY) tail_sum = 0;
        // Not supplied, or spoiled by a NaN or +inf in the tail: look at the tail itself.
        if (!(tail_sum >= 0) || !(tail_max < INFINITY)) hot_path = false;
        if (hot_path && penalties && penalties->seen.back().token >= hot)
            // Without sums the tail's maximum is all that counts, and a bound of it will do.
            hot_path = (!need_sum && penalties->only_lower()) ||
                       (has_tail && sampled && tail_max > -INFINITY &&
                        corrected_tail(at, half, *penalties, hot, T, tail_max, tail_sum));
        if (!hot_path && !has_tail) return {NEEDS_TAIL, NAN};
    }
    if (!scan(scratch, read, 0, hot_path ? head : blocks, need_sum ? scale : 0)) return undefined;

    if (hot_path) {
        float M = *std::max_element(scratch.maximum.begin(), scratch.maximum.begin() + head);
        if (!sampled) {
            if (M > tail_max) return {greedy(scratch, read, head), NAN};
        } else if (filtered) {
            double total = 0;
            if (M > tail_max) {  // else the threshold of min-p, at least, is the tail's
                if (min_p > 0) filters.min_logit = M + T * std::log(min_p);
                if (need_sum)
                    total = masses(scratch, 0, head, M, scale) +
                            tail_sum * std::exp((double(tail_max) - M) / T);
                if (select(scratch, read, head, filters, M, T, total, tail_max))
                    return {drawn(scratch, u), NAN};
            }
        } else {
            float top = std::max(M, tail_max);
            if (top == -INFINITY) return undefined;
            double hot_mass = masses(scratch, 0, head, top, scale);
            double tail_mass =
                tail_max > -INFINITY ? tail_sum * std::exp((double(tail_max) - top) / T) : 0;
            double r = u * (hot_mass + tail_mass);
            auto logprob = [&](int32_t token, size_t from) {
                double z = logit_at(scratch, read, token, from);
                return float((z - top) / T - std::log(hot_mass + tail_mass));
            };
            if (r < hot_mass) {
                int32_t token = fallen_on(scratch, read, 0, head, r, scale);
                return {token, logprob(token, 0)};
            }
            if (!has_tail) return {NEEDS_TAIL, NAN};
            if (!scan(scratch, read, head, blocks, scale)) return undefined;
            // The same share of the tail's mass as it is found here.
            double share = tail_mass > 0 ? (r - hot_mass) / tail_mass : u;
            double mass = masses(scratch, head, blocks, top, scale);
            int32_t token = fallen_on(scratch, read, head, blocks, share * mass, scale);
            if (token >= 0) return {token, logprob(token, head)};
        }
        if (!has_tail) return {NEEDS_TAIL, NAN};
        // Maxima of the hot blocks are still good; their sums have become masses.
        if (!scan(scratch, read, need_sum ? 0 : head, blocks, need_sum ? scale : 0))
            return undefined;
    }

    float M = *std::max_element(scratch.maximum.begin(), scratch.maximum.begin() + blocks);
    if (M == -INFINITY) return undefined;
    if (!sampled) return {greedy(scratch, read, blocks), NAN};
    double total = need_sum ? masses(scratch, 0, blocks, M, scale) : 0;
    if (filtered) {
        if (min_p > 0) filters.min_logit = M + T * std::log(min_p);
        select(scratch, read, blocks, filters, M, T, total, -INFINITY);
        return {drawn(scratch, u), NAN};
    }
    int32_t token = fallen_on(scratch, read, 0, blocks, u * total, scale);
    float z = logit_at(scratch, read, token, 0);
    return {token, float((double(z) - M) / T - std::log(total))};
}
