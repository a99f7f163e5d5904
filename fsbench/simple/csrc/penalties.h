// Penalties of one request, kept from step to step: a list of the tokens seen, in their order.
#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

struct Seen {
    int32_t token;
    int32_t output;  // how often it was drawn; 0: in the prompt only
    float subtract;  // for that, from the logit
};

struct Penalties {
    float repetition = 1, presence = 0, frequency = 0, shrink = 1;  // shrink = 1 / repetition
    std::vector<Seen> seen;

    bool active() const {
        return !seen.empty() && (repetition != 1 || presence != 0 || frequency != 0);
    }

    // Index of the first token seen that is not below `token`.
    size_t from(int32_t token) const {
        auto before = [](const Seen& one, int32_t other) { return one.token < other; };
        return size_t(std::lower_bound(seen.begin(), seen.end(), token, before) - seen.begin());
    }

    // Whether no logit can rise.
    bool only_lower() const { return repetition >= 1 && presence >= 0 && frequency >= 0; }

    // A token that was drawn. A new one costs an insertion; counts [V, B] would need O(V) memory.
    void count(int32_t token) {
        auto entry = seen.begin() + from(token);
        if (entry == seen.end() || entry->token != token)
            entry = seen.insert(entry, Seen{token, 0, 0});
        entry->output++;
        entry->subtract = frequency * float(entry->output) + presence;
    }

    // Repetition by the sign of the logit, then frequency and presence of drawn tokens only.
    // No branch: signs are unpredictable.
    float applied(float z, const Seen& one) const {
        const float factor[2] = {repetition, shrink};
        return z * factor[z > 0] - one.subtract;
    }
};
