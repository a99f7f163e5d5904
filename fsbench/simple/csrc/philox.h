// Philox 4x32-10 (Salmon et al., SC'11), as in fsbench/reference/philox.py.
#pragma once

#include <cstdint>

struct Words {
    uint32_t at[4];
};

inline Words philox(Words c, uint32_t k0, uint32_t k1) {
    for (int round = 0; round < 10; round++) {
        uint64_t a = uint64_t(0xD2511F53u) * c.at[0], b = uint64_t(0xCD9E8D57u) * c.at[2];
        c = {{uint32_t(b >> 32) ^ c.at[1] ^ k0, uint32_t(b), uint32_t(a >> 32) ^ c.at[3] ^ k1,
              uint32_t(a)}};
        k0 += 0x9E3779B9u;
        k1 += 0xBB67AE85u;
    }
    return c;
}

// In (0, 1), 53 bits: neither end can be reached, so no token without mass is ever hit.
inline double uniform(uint64_t seed, uint32_t row, uint32_t step, uint32_t stream) {
    Words w = philox({{0, row, step, stream}}, uint32_t(seed), uint32_t(seed >> 32));
    uint64_t bits = (uint64_t(w.at[0]) << 32 | w.at[1]) >> 12;  // 52 bits, then a half
    return (double(bits) + 0.5) * 0x1p-52;
}
