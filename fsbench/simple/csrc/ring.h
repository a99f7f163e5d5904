// What a producer and the samplers share: a ring of steps in memory that both can see.
//
// Every array has one entry per slot, then per row. The memory is the caller's, so that it can be
// pinned, or shared between processes; nothing here allocates.
#pragma once

#include <time.h>

#include <atomic>
#include <chrono>
#include <cstdint>
#include <thread>

#if defined(__linux__)
#include <linux/futex.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif

extern "C" {

// Mirrored by fsbench/simple/native.py, field by field.
struct Ring {
    int32_t slots, rows, vocab;          // rows and vocab are the largest
    int32_t elements;                    // 0: fp32, 1: bf16
    const void* logits;                  // [slots, rows, vocab]
    const double* uniform;               // [slots, rows], in (0, 1)
    const float* temperature;            // [slots, rows]
    const float* top_p;                  // 1: off
    const float* min_p;                  // 0: off
    const int32_t* top_k;                // 0: off
    const float* tail_max;               // largest logit beyond the hot ones
    const float* tail_sum;               // of exp((z - tail_max) / T) beyond them; NaN: not supplied
    const int32_t* request;              // row of the penalties; -1: none
    const int32_t* shape;                // [slots, 3]: hot (0: off), present, stride (elements)
    int64_t* tokens;                     // -1: undefined row, -2: needs the tail
    float* logprob;                      // log p of the token before filters, NaN with filters
    uint64_t* work;                      // [slots]: step, rows and next row, packed
    uint32_t* done;                      // [slots]: rows finished
    uint32_t* state;                     // [4]: steps published, sleepers, stop, unused
};
}

// A step's rows are handed out one by one, from one word, so that a sampler that wakes up late
// can never take a row of a later step that happens to lie in the same slot.
inline uint64_t packed(uint32_t step, uint32_t rows, uint32_t next) {
    return uint64_t(step) << 32 | uint64_t(rows) << 16 | next;
}

template <class T>
std::atomic<T>& shared(T* word) {
    static_assert(sizeof(std::atomic<T>) == sizeof(T) && std::atomic<T>::is_always_lock_free);
    return *reinterpret_cast<std::atomic<T>*>(word);
}

inline int64_t now_ns() {
    timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return t.tv_sec * 1000000000LL + t.tv_nsec;
}

inline void relax() {
#if defined(__x86_64__) || defined(__i386__)
    __builtin_ia32_pause();
#else
    std::this_thread::yield();
#endif
}

// Sleeps until `word` is no longer `old` or `timeout_ns` have passed; may return early.
inline void sleep_while(uint32_t* word, uint32_t old, int64_t timeout_ns) {
#if defined(__linux__)
    timespec limit = {timeout_ns / 1000000000LL, timeout_ns % 1000000000LL};
    syscall(SYS_futex, word, FUTEX_WAIT, old, &limit, nullptr, 0);
#else
    (void)word, (void)old, (void)timeout_ns;
    std::this_thread::sleep_for(std::chrono::microseconds(20));
#endif
}

inline void wake(uint32_t* word) {
#if defined(__linux__)
    syscall(SYS_futex, word, FUTEX_WAKE, INT32_MAX, nullptr, nullptr, 0);
#else
    (void)word;
#endif
}
