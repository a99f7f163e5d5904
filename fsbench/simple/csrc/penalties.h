// Penalties of one request, kept from step to step: a list of the tokens seen, in their order.
#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

struct Seen {
    int32_t place;   // where the token lies in the row of logits
    int32_t output;  // how often it was drawn
    bool prompt;     // whether the prompt has it
};

struct Penalties {
    float repetition = 1, presence = 0, frequency = 0;
    std::vector<Seen> seen;

    bool active() const {
        return !seen.empty() && (repetition != 1 || presence != 0 || frequency != 0);
    }

    // A new token costs one insertion; SIMPLE's counts [V, B] would need O(V) memory per row.
    Seen& at(int32_t place) {
        auto found = std::lower_bound(
            seen.begin(), seen.end(), place,
            [](const Seen& one, int32_t other) { return one.place < other; });
        if (found == seen.end() || found->place != place)
            found = seen.insert(found, Seen{place, 0, false});
        return *found;
    }

    // Repetition by the sign of the logit, then frequency and presence of drawn tokens only.
    float applied(float z, const Seen& one) const {
        z = z > 0 ? z / repetition : z * repetition;
        return z - frequency * float(one.output) - (one.output ? presence : 0.0f);
    }
};
