// The CPU decision plane's core: persistent samplers, the ring they read, and the C functions that
// fsbench/simple/native.py calls. Plain C ABI: it depends on neither torch's ABI nor Python's.

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <functional>
#include <limits>
#include <memory>
#include <thread>
#include <vector>

#include "penalties.h"
#include "philox.h"
#include "ring.h"

namespace {

constexpr int BLOCK = 512;  // logits; small enough to prune by maxima, large enough to amortise
constexpr float LOG2_E = 1.4426950408889634f;
constexpr int64_t UNDEFINED = -1, NEEDS_TAIL = -2;

struct Candidate {
    float z;
    int32_t token;
    double weight;
};

struct Decision {
    int64_t token;  // or UNDEFINED, NEEDS_TAIL
    float logprob;
};

// The same source for three instruction sets; which one runs is asked of the CPU, so that one
// build serves every x86-64 machine and nothing is compiled for the builder's.
#if defined(__x86_64__)
#define WIDTH 16
#if defined(__clang__)
#pragma clang attribute push(__attribute__((target("avx512f,avx512bw,avx512dq,avx512vl,avx2,fma"))), apply_to = function)
#else
#pragma GCC push_options
#pragma GCC target("avx512f,avx512bw,avx512dq,avx512vl,avx2,fma,prefer-vector-width=512")
#endif
namespace avx512 {
#include "lanes.h"
#include "blocks.h"
#include "select.h"
#include "decide.h"
}  // namespace avx512
#if defined(__clang__)
#pragma clang attribute pop
#else
#pragma GCC pop_options
#endif
#undef WIDTH

#define WIDTH 8
#if defined(__clang__)
#pragma clang attribute push(__attribute__((target("avx2,fma"))), apply_to = function)
#else
#pragma GCC push_options
#pragma GCC target("avx2,fma")
#endif
namespace avx2 {
#include "lanes.h"
#include "blocks.h"
#include "select.h"
#include "decide.h"
}  // namespace avx2
#if defined(__clang__)
#pragma clang attribute pop
#else
#pragma GCC pop_options
#endif
#undef WIDTH
#endif

#define WIDTH 4
namespace portable {
#include "lanes.h"
#include "blocks.h"
#include "select.h"
#include "decide.h"
}  // namespace portable
#undef WIDTH

enum Isa { PORTABLE, AVX2, AVX512 };
constexpr const char* ISA_NAMES[] = {"portable", "avx2", "avx512"};

Isa best_isa() {
#if defined(__x86_64__)
    __builtin_cpu_init();
    if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
        __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl"))
        return AVX512;
    if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma")) return AVX2;
#endif
    return PORTABLE;
}

Isa& isa() {
    static Isa chosen = best_isa();
    return chosen;
}

// One thread's state: what each instruction set's code keeps from row to row.
struct Sampler {
#if defined(__x86_64__)
    std::unique_ptr<avx512::Scratch> wide{new avx512::Scratch};
    std::unique_ptr<avx2::Scratch> middle{new avx2::Scratch};
#endif
    std::unique_ptr<portable::Scratch> narrow{new portable::Scratch};

    Decision decided(const Ring& ring, int slot, int row, const Penalties* penalties) {
#if defined(__x86_64__)
        if (isa() == AVX512) return avx512::decide(*wide, ring, slot, row, penalties);
        if (isa() == AVX2) return avx2::decide(*middle, ring, slot, row, penalties);
#endif
        return portable::decide(*narrow, ring, slot, row, penalties);
    }

    void row(const Ring& ring, int slot, int row, std::vector<Penalties>* requests) {
        const int64_t cell = int64_t(slot) * ring.rows + row;
        const int32_t request = requests ? ring.request[cell] : -1;
        const int32_t* shape = ring.shape + 3 * slot;
        const int32_t hot = shape[0], present = shape[1], stride = shape[2];
        // What a producer writes by mistake must not make us read or write beyond: no token then.
        const bool sound = (request < 0 || size_t(request) < requests->size()) && hot >= 0 &&
                           hot <= present && present <= stride && stride <= ring.vocab;
        Penalties* penalties = sound && request >= 0 ? &(*requests)[request] : nullptr;
        Decision out = {UNDEFINED, NAN};
        if (sound) out = decided(ring, slot, row, penalties);
        if (penalties && out.token >= 0) penalties->count(int32_t(out.token));
        ring.tokens[cell] = out.token;
        ring.logprob[cell] = out.logprob;
    }
};

constexpr int64_t SPIN_NS = 20000;  // how long to poll before sleeping
constexpr int PUBLISHED = 0, SLEEPERS = 1, STOP = 2;

class Plane {
   public:
    Plane(const Ring& ring, int workers, int requests) : ring_(ring), requests_(requests) {
        const uint32_t next = shared(&ring_.state[PUBLISHED]).load();
        for (int w = 0; w < workers; w++) threads_.emplace_back([this, next] { serve(next); });
    }

    ~Plane() {
        shared(&ring_.state[STOP]).store(1);
        wake(&ring_.state[PUBLISHED]);  // who falls asleep just now wakes up by itself
        for (std::thread& thread : threads_) thread.join();
        shared(&ring_.state[STOP]).store(0);
    }

    void begin(int row, const int64_t* prompt, int64_t n, float rep, float pres, float freq) {
        Penalties& penalties = requests_[row];
        auto& seen = penalties.seen;
        seen.clear();
        penalties.repetition = rep, penalties.shrink = 1 / rep;
        penalties.presence = pres, penalties.frequency = freq;
        for (int64_t i = 0; i < n; i++) seen.push_back({int32_t(prompt[i]), 0, 0});
        auto by_token = [](const Seen& a, const Seen& b) { return a.token < b.token; };
        std::sort(seen.begin(), seen.end(), by_token);
        auto same = [](const Seen& a, const Seen& b) { return a.token == b.token; };
        seen.erase(std::unique(seen.begin(), seen.end(), same), seen.end());
    }

    void output(int row, int64_t token) { requests_[row].count(int32_t(token)); }

   private:
    void serve(uint32_t step) {
        Sampler sampler;
        while (wait_for(step)) {
            const int slot = int(step % uint32_t(ring_.slots));
            auto& work = shared(&ring_.work[slot]);
            uint64_t now = work.load(std::memory_order_acquire);
            while (uint32_t(now >> 32) == step) {
                const uint32_t rows = uint32_t(now >> 16) & 0xFFFF, next = uint32_t(now) & 0xFFFF;
                if (next >= rows) break;
                if (!work.compare_exchange_weak(now, packed(step, rows, next + 1))) continue;
                sampler.row(ring_, slot, int(next), &requests_);
                if (shared(&ring_.done[slot]).fetch_add(1) + 1 == rows) wake(&ring_.done[slot]);
                now = work.load(std::memory_order_acquire);
            }
            step++;
        }
    }

    // True when `step` has been published; false when the plane is told to stop.
    bool wait_for(uint32_t step) {
        auto& published = shared(&ring_.state[PUBLISHED]);
        auto& stop = shared(&ring_.state[STOP]);
        auto& sleepers = shared(&ring_.state[SLEEPERS]);
        const int64_t until = now_ns() + SPIN_NS;
        for (;;) {
            const uint32_t now = published.load();
            if (int32_t(now - step) > 0) return true;
            if (stop.load()) return false;
            if (now_ns() < until) {
                relax();
                continue;
            }
            sleepers.fetch_add(1);
            if (published.load() == now && !stop.load())
                sleep_while(&ring_.state[PUBLISHED], now, 50000000);
            sleepers.fetch_sub(1);
        }
    }

    Ring ring_;
    std::vector<Penalties> requests_;
    std::vector<std::thread> threads_;
};

}  // namespace

extern "C" {

int fsb_ring_size() { return int(sizeof(Ring)); }

const char* fsb_isa() { return ISA_NAMES[isa()]; }

// For tests: another instruction set than the best. 0 if the CPU has it.
int fsb_use_isa(const char* name) {
    for (int i = 0; i <= int(best_isa()); i++)
        if (!std::strcmp(name, ISA_NAMES[i])) {
            isa() = Isa(i);
            return 0;
        }
    return 1;
}

// out[rows]: one number in (0, 1) per row. `seeds` has 1 (then the row counts) or `rows` entries.
void fsb_uniforms(double* out, int64_t rows, const int64_t* seeds, int64_t n, int64_t step) {
    constexpr uint32_t STREAM = 1u << 17;  // apart from token and group noise (docs/design/noise.md)
    for (int64_t row = 0; row < rows; row++)
        out[row] = uniform(
            uint64_t(seeds[n == 1 ? 0 : row]), n == 1 ? uint32_t(row) : 0, uint32_t(step), STREAM);
}

// Rows [first, last) of a slot, on the calling thread, without ring and penalties.
void fsb_rows(const Ring* ring, int slot, int first, int last) {
    thread_local Sampler sampler;
    for (int row = first; row < last; row++) sampler.row(*ring, slot, row, nullptr);
}

// Hands the next slot's first `rows` rows to the samplers; returns the step's number. The caller
// has filled the slot and has collected what was in it.
uint32_t fsb_publish(const Ring* ring, int rows) {
    auto& published = shared(&ring->state[PUBLISHED]);
    const uint32_t step = published.load();
    const int slot = int(step % uint32_t(ring->slots));
    shared(&ring->done[slot]).store(0);
    shared(&ring->work[slot]).store(packed(step, uint32_t(rows), 0), std::memory_order_release);
    published.fetch_add(1);
    if (shared(&ring->state[SLEEPERS]).load()) wake(&ring->state[PUBLISHED]);
    return step;
}

// Waits until all rows of a step are decided. 0, or 1 after `timeout_ms`.
int fsb_wait(const Ring* ring, uint32_t step, int rows, int64_t timeout_ms) {
    const int slot = int(step % uint32_t(ring->slots));
    auto& done = shared(&ring->done[slot]);
    const int64_t begin = now_ns(), spin = begin + SPIN_NS;
    for (;;) {
        const uint32_t now = done.load(std::memory_order_acquire);
        if (now >= uint32_t(rows)) return 0;
        const int64_t time = now_ns();
        if (time < spin) {
            relax();
        } else {
            if (time - begin > timeout_ms * 1000000) return 1;
            sleep_while(&ring->done[slot], now, 10000000);
        }
    }
}

void* fsb_plane_new(const Ring* ring, int workers, int requests) {
    try {
        return new Plane(*ring, workers, requests);
    } catch (...) {
        return nullptr;  // no threads, or no memory
    }
}

void fsb_plane_delete(void* plane) { delete static_cast<Plane*>(plane); }

// A new request in row `row` of the penalties: its prompt and its three penalties.
void fsb_plane_begin(
    void* plane, int row, const int64_t* prompt, int64_t n, float rep, float pres, float freq) {
    static_cast<Plane*>(plane)->begin(row, prompt, n, rep, pres, freq);
}

// Counts a token as drawn, as the samplers do with their own.
void fsb_plane_output(void* plane, int row, int64_t token) {
    static_cast<Plane*>(plane)->output(row, token);
}
}
