// Vectors of WIDTH floats, for whatever instruction set the including file is compiled for.
// No include guard: native.cpp includes this once per instruction set, in a namespace of its own.

typedef float Floats __attribute__((vector_size(4 * WIDTH)));
typedef int32_t Ints __attribute__((vector_size(4 * WIDTH)));
typedef float Loaded __attribute__((vector_size(4 * WIDTH), aligned(4), may_alias));
typedef uint16_t Halves __attribute__((vector_size(2 * WIDTH), aligned(2), may_alias));

static inline Floats load(const float* at) { return *reinterpret_cast<const Loaded*>(at); }

static inline void store(float* at, Floats value) { *reinterpret_cast<Loaded*>(at) = value; }

// bf16 is the upper half of an fp32.
static inline Floats load(const uint16_t* at) {
    Ints wide = __builtin_convertvector(*reinterpret_cast<const Halves*>(at), Ints);
    return reinterpret_cast<Floats>(wide << 16);
}

static inline Floats all(float value) { return value - Floats{}; }

static inline Floats larger(Floats a, Floats b) { return a > b ? a : b; }

static inline bool any(Ints mask) {
    int64_t words[WIDTH / 2], found = 0;
    std::memcpy(words, &mask, sizeof words);
    for (int64_t word : words) found |= word;
    return found != 0;
}

static inline float largest(Floats lanes) {
    float best = lanes[0];
    for (int lane = 1; lane < WIDTH; lane++) best = lanes[lane] > best ? lanes[lane] : best;
    return best;
}

// 2^t for t <= 0, relative error 2e-7; below 2^-126 exactly 0, so that -inf has no mass.
static inline Floats power_of_two(Floats t) {
    const Floats magic = all(12582912.0f);  // 1.5 * 2^23: adding it rounds to an integer
    Floats safe = larger(t, all(-126.0f));
    Floats shifted = safe + magic;
    Floats f = safe - (shifted - magic);  // in [-1/2, 1/2]
    // Least relative error (7.5e-8) of degree 5, fitted by weighted least squares.
    Floats p = all(0.001327647129073739f);
    p = p * f + 0.009675541892647743f;
    p = p * f + 0.05550713464617729f;
    p = p * f + 0.24022120237350464f;
    p = p * f + 0.6931469440460205f;
    p = p * f + 1.0000001192092896f;
    Ints bits = reinterpret_cast<Ints>(p) + (reinterpret_cast<Ints>(shifted) << 23);
    return reinterpret_cast<Floats>((t >= -126.0f) & bits);
}
