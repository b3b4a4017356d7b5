/* gpu/tests/device.h - shared by the test programs and benchmarks of a device: calls that must
 * succeed, checks and their count. Also device memory, communicators, a host thread a rank. */
#ifndef DPG_TESTS_DEVICE_H
#define DPG_TESTS_DEVICE_H
#include "../dp_gpu.h"
#include "vec.h"
#include <cuda_runtime.h>
#include <math.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <string>
#include <thread>
#include <time.h>
#include <unistd.h>
#include <vector>

/* Ends the process with status 2. Not by exit(): a process that was forked has handlers of its
 * parent. */
[[noreturn]] static inline void give_up() {
    fflush(stdout);
    _exit(2);
}
#define CUDA(x)                                                                                 \
    do {                                                                                        \
        cudaError_t e_ = (x);                                                                   \
        if (e_ != cudaSuccess) {                                                                \
            fprintf(stderr, "%s:%d: %s: %s\n", __FILE__, __LINE__, #x, cudaGetErrorString(e_)); \
            give_up();                                                                          \
        }                                                                                       \
    } while (0)
#define DP(e, x)                                                                 \
    do {                                                                         \
        if ((x) != DP_OK) {                                                      \
            fprintf(stderr, "%s:%d: %s: %s\n", __FILE__, __LINE__, #x, (e).msg); \
            give_up();                                                           \
        }                                                                        \
    } while (0)

static inline double seconds() {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return t.tv_sec + 1e-9 * t.tv_nsec;
}

/* How many devices there are, the first of which it names; none: says so for `program` and ends. */
static inline int devices(const char *program) {
    int n = 0, driver = 0;
    cudaDeviceProp first;
    if (cudaGetDeviceCount(&n) != cudaSuccess || !n) {
        fprintf(stderr, "%s: no CUDA device\n", program);
        give_up();
    }
    CUDA(cudaGetDeviceProperties(&first, 0));
    CUDA(cudaDriverGetVersion(&driver));
    printf("device %s x%d, driver API %d\n", first.name, n, driver);
    return n;
}

/* ---- checks ---------------------------------------------------------------------------------- */

enum { FAILURES_SHOWN = 200 };
static int failures, checks;

/* One check, by the thread of any rank; format and what follows: what to say when it fails. */
__attribute__((format(printf, 2, 3))) static inline void fact(bool ok, const char *format, ...) {
    __atomic_add_fetch(&checks, 1, __ATOMIC_RELAXED);
    if (ok || __atomic_add_fetch(&failures, 1, __ATOMIC_RELAXED) > FAILURES_SHOWN) return;
    va_list a;
    va_start(a, format);
    printf("FAIL ");
    vprintf(format, a);
    printf("\n");
    va_end(a);
}

/* As printf. */
__attribute__((format(printf, 1, 2))) static inline std::string text(const char *format, ...) {
    char s[1024];
    va_list a;
    va_start(a, format);
    vsnprintf(s, sizeof s, format, a);
    va_end(a);
    return s;
}

/* The last line of a test program, and its exit status. */
static inline int verdict() {
    printf("%d checks, %d failed\n", checks, failures);
    return failures ? 1 : 0;
}

/* ---- memory ---------------------------------------------------------------------------------- */

static inline size_t word_bytes(dpg_dtype t) { return t == DPG_F32 ? 4 : 2; }

/* fp16 codes of numbers that it has, and back. */
static inline uint32_t fp16_code(float x, uint32_t bits) {
    const uint32_t sign = bits >> 31 << 15, size = bits & 0x7fffffff;
    if (size >= 0x7f800000) return sign | 0x7c00 | (size > 0x7f800000);
    return sign |
           (fabsf(x) < 0x1p-14f ? (uint32_t)(fabsf(x) * 0x1p24f) : (size >> 13) - (112 << 10));
}
static inline float fp16_number(uint16_t code) {
    const int size = code & 0x7fff, e = size >> 10, m = size & 1023;
    const double x = e == 31 ? (m ? NAN : INFINITY) : ldexp(e ? 1024 + m : m, (e ? e : 1) - 25);
    return (float)(code & 0x8000 ? -x : x);
}

/* Device memory that is freed together. */
struct Memory {
    std::vector<void *> all;

    void *room(size_t bytes) {
        void *p = NULL;
        if (!bytes) return p;
        CUDA(cudaMalloc(&p, bytes));
        all.push_back(p);
        return p;
    }
    void *filled(size_t bytes, int byte) {
        void *p = room(bytes);
        if (bytes) CUDA(cudaMemset(p, byte, bytes));
        return p;
    }
    /* Words x[from .. from + n - 1], which `type` must hold exactly. */
    void *copy(const Vec &x, int64_t from, int64_t n, dpg_dtype type) {
        std::vector<char> words(n * word_bytes(type));
        for (int64_t i = 0; i < n; i++) {
            float y = (float)x[from + i];
            uint32_t bits;
            memcpy(&bits, &y, 4);
            if (type == DPG_BF16) bits >>= 16;
            if (type == DPG_F16) bits = fp16_code(y, bits);
            memcpy(&words[i * word_bytes(type)], &bits, word_bytes(type));
        }
        void *p = room(words.size());
        if (n) CUDA(cudaMemcpy(p, words.data(), words.size(), cudaMemcpyHostToDevice));
        return p;
    }
    void release() {
        for (void *p : all)
            cudaFree(p);
        all.clear();
    }
};

static inline Vec from_device(const void *d, int64_t n, dpg_dtype type) {
    std::vector<char> words(n * word_bytes(type));
    if (n) CUDA(cudaMemcpy(words.data(), d, words.size(), cudaMemcpyDeviceToHost));
    Vec x(n);
    for (int64_t i = 0; i < n; i++) {
        uint32_t bits = 0;
        float y;
        memcpy((char *)&bits + 4 - word_bytes(type), &words[i * word_bytes(type)],
               word_bytes(type));
        memcpy(&y, &bits, 4);
        x[i] = type == DPG_F16 ? fp16_number((uint16_t)(bits >> 16)) : y;
    }
    return x;
}

/* ---- ranks ----------------------------------------------------------------------------------- */

/* Communicators of N ranks: SHARED on device 0, DEVICES rank r on device r modulo ndev, NCCL a
 * device each. */
struct Comms {
    enum Kind { SHARED, DEVICES, NCCL };
    std::vector<dpg_comm> c;

    Comms(Kind kind, int N, double limit_s, int ndev = 0) : c(N) {
        std::vector<int> device(N);
        dp_err e = {DP_OK, ""};
        for (int i = 0; i < N; i++)
            device[i] = kind == DEVICES ? i % ndev : i;
        DP(e, kind == SHARED    ? dpg_comm_shared(c.data(), N, 0, limit_s, &e)
              : kind == DEVICES ? dpg_comm_devices(c.data(), N, device.data(), limit_s, &e)
                                : dpg_comm_nccl(c.data(), N, device.data(), limit_s, &e));
    }
    Comms(const Comms &) = delete;
    ~Comms() {
        for (auto &x : c)
            x.destroy(&x);
    }
    dpg_comm &operator[](int rank) { return c[rank]; }
    dpg_comm *data() { return c.data(); }
};

/* body(rank) on a host thread each. */
template <class F> static void on_ranks(int N, F body) {
    std::vector<std::thread> threads;
    for (int r = 0; r < N; r++)
        threads.emplace_back(body, r);
    for (auto &t : threads)
        t.join();
}
#endif
