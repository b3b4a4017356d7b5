/* gpu/tests/cpu/include/instructions.cuh - the instructions of gpu/instructions.cuh on the CPU.
 * Copies are done at once, by the thread that starts them. */
#ifndef DPG_INSTRUCTIONS_CUH
#define DPG_INSTRUCTIONS_CUH
#define ROOMY_BLOCKS 0
#define TOGETHER(n)
static inline void compiler_fence() {}
#include "../machine.h"
#include <cuda.h>
#include <cuda_bf16.h>
#include <cuda_runtime.h>

static inline const char *made_address(const char *p) { return p; }
static inline unsigned made_number(unsigned x) { return x; }
static inline int kept_warp() { return threadIdx.x / 32; }
static inline int kept_lane() { return threadIdx.x % 32; }
/* Errs as an H200's does (reports/device/decode.txt). Whole x are exact. Elsewhere the error is
 * -0.3 units of the last place in the mean, at most 1.1 before the rounding. */
static inline float ex2(float x) {
    const double exact = exp2((double)x);
    const float y = (float)exact;
    if (!(fabsf(x) < 126) || x == rintf(x)) return y < 0x1p-126f ? 0.f : y;
    const unsigned mixed = (__float_as_uint(x) + 1) * 0x9e3779b1u;
    const float off = (float)(mixed >> 8) * 0x1.9999ap-24f - 1.1f; /* in -1.1 .. 0.5 */
    const float unit = __uint_as_float(__float_as_uint(y) & 0x7f800000) * 0x1p-23f;
    return (float)(exact + (double)(off * unit));
}
static inline float rcp(float x) { return 1.f / x; }
static inline float max_or_nan(float a, float b) { return a < b || b != b ? b : a; }
static inline float fma_ftz(float a, float b, float c) {
    float y = fmaf(a, b, c);
    return fabsf(y) < 0x1p-126f ? 0.f : y;
}
#define FP8_CONVERSIONS 0
static inline float2 of_fp16(uint32_t halves) {
    auto value = [](uint32_t code) {
        const uint32_t size = (code & 0x7fff) << 13;
        const float x = (code & 0x7c00) == 0x7c00 ? __uint_as_float(0x70000000 + size)
                                                  : __uint_as_float(size) * 0x1p112f;
        return code & 0x8000 ? -x : x;
    };
    return make_float2(value(halves & 0xffff), value(halves >> 16));
}
static inline uint32_t to_fp16(float x, float y) {
    auto code = [](float x) -> uint32_t {
        const uint32_t bits = __float_as_uint(x), sign = bits >> 31 << 15;
        const int exponent = std::max((int)(bits >> 23 & 0xff) - 127, -14);
        if (x != x) return 0x7fff;
        if (fabsf(x) >= 65520.f) return sign | 0x7c00;
        const float size = fabsf(ldexpf(rintf(ldexpf(x, 10 - exponent)), exponent - 10));
        if (size < 0x1p-14f) return sign | (uint32_t)(size * 0x1p24f);
        return sign | ((__float_as_uint(size) >> 13) - (112 << 10));
    };
    return code(x) | code(y) << 16;
}
static inline void await_grid() {}
static inline void let_next_start() {}
static inline void bulk_fence() {}
static inline void add_release(unsigned *x, unsigned n) { *x += n; }
static inline void await_acquire(const unsigned *x, unsigned n) { cpu::has_come(*x, n); }
static inline float tf32_rna(float x) { return cpu::tf32_rna(x); }

static inline void mma(float c[4], const uint32_t a[4], uint32_t b0, uint32_t b1) {
    uint32_t b[2] = {b0, b1};
    cpu::Mma x = {c, a, b};
    cpu::warp(cpu::mma_bf16, &x);
}
static inline void mma_tf32(float c[4], const float a[4], const float b[2]) {
    cpu::Mma x = {c, (const uint32_t *)a, (const uint32_t *)b};
    cpu::warp(cpu::mma_tf32, &x);
}
static inline uint32_t saddr(const void *p) { return cpu::shared_address(p); }
static inline void ldsm4(uint32_t r[4], uint32_t addr) {
    cpu::Matrices x = {r, addr};
    cpu::warp(cpu::load_matrices, &x);
}
static inline void ldsm4t(uint32_t r[4], uint32_t addr) {
    cpu::Matrices x = {r, addr};
    cpu::warp(cpu::load_transposed, &x);
}
static inline void stsm4(uint32_t addr, const uint32_t r[4]) {
    cpu::Matrices x = {(uint32_t *)r, addr};
    cpu::warp(cpu::store_matrices, &x);
}
static inline void stsm4t(uint32_t addr, const uint32_t r[4]) {
    cpu::Matrices x = {(uint32_t *)r, addr};
    cpu::warp(cpu::store_transposed, &x);
}

static inline void cp16(void *dst, const void *src, bool valid) {
    if (valid)
        memcpy(dst, src, 16);
    else
        memset(dst, 0, 16);
}
static inline void cp_commit() {}
template <int N> static inline void cp_wait() {}

#define FULL_COUNT 1
#define EMPTY_COUNT(warps) (warps)
static inline void bar_init(uint64_t *b, int n) {
    *(cpu::Barrier *)b = cpu::Barrier{(uint16_t)n, (uint16_t)n, 0};
}
static inline void bar_init_end() {}
static inline void bar_arrive(uint64_t *b) {
    cpu::Barrier *x = (cpu::Barrier *)b;
    if (--x->left == 0) {
        x->left = x->count;
        x->phase++;
    }
}
static inline void bar_wait(uint64_t *b, int parity) { cpu::await_barrier(b, parity); }
static inline void bar_arrive_warp(uint64_t *b, int lane) {
    if (lane == 0) bar_arrive(b);
}
static inline void sync_part(int id, int n) { cpu::sync_part(id, n); }

static inline void fill_begin(uint64_t *, int, int) {}
static inline void fill(void *dst, const void *src, int bytes, uint64_t *, int lane) {
    if (lane == 0) memcpy(dst, src, bytes);
}
static inline void fill_end(uint64_t *b, int lane) {
    if (lane == 0) bar_arrive(b);
}
#define FULL_COUNT_16(warps) (warps)
static inline void fill16(void *dst, const void *src, bool valid) { cp16(dst, src, valid); }
static inline void fill16_end(uint64_t *b, int lane) {
    __syncwarp();
    fill_end(b, lane);
}
static inline void fill16_end_for_products(uint64_t *b, int lane) { fill16_end(b, lane); }
static inline void drain_fence() {}
static inline void fetch_to_L2(const void *, int) {}
static inline void drain(void *dst, const void *src, int bytes, int lane) {
    if (lane == 0) memcpy(dst, src, bytes);
}
static inline void fill_pieces(void *dst, int each, const void *src, int bytes, int n, uint64_t *,
                               int lane) {
    for (int i = 0; i < n && lane == 0; i++)
        memcpy((char *)dst + i * each, (const char *)src + i * bytes, bytes);
}
static inline void drain_pieces(void *dst, int bytes, const void *src, int each, int n, int lane) {
    for (int i = 0; i < n && lane == 0; i++)
        memcpy((char *)dst + i * bytes, (const char *)src + i * each, bytes);
}
static inline void drain_commit(int) {}
static inline void drain_wait(int) {}
template <int N> static inline void drain_done(int) {}

/* Pieces p of 16 bytes of row r as the swizzles lay them. In rows of 128 bytes they are at
 * p ^ (r & 7), in rows of 32 at p ^ (r >> 2 & 1). */
#define MAPPED_TILES 1
template <class F>
static inline void by_pieces(const CUtensorMap &map, int column, int head, int64_t token, F f) {
    const cuuint64_t pieces = map.box[0] / 8;
    for (cuuint64_t r = 0; r < map.box[2]; r++)
        for (cuuint64_t p = 0; p < pieces; p++)
            f(map.at + (token + r) * map.stride[1] + head * map.stride[0] + column * 2 + p * 16,
              (r * pieces + (p ^ (pieces == 8 ? r & 7 : r >> 2 & 1))) * 16);
}
static inline void ask_for_map(const CUtensorMap &) {}
static inline bool elected(int lane) { return lane == 0; }
static inline void fill_tile(__nv_bfloat16 *dst, const CUtensorMap &map, int column, int head,
                             int64_t token, uint64_t *, int lane) {
    if (lane) return;
    by_pieces(map, column, head, token,
              [&](const char *x, size_t at) { memcpy((char *)dst + at, x, 16); });
}
static inline void drain_tile(const CUtensorMap &map, int column, int head, int64_t token,
                              const __nv_bfloat16 *src, int lane) {
    if (lane) return;
    by_pieces(map, column, head, token,
              [&](char *x, size_t at) { memcpy(x, (const char *)src + at, 16); });
}

static inline void wg_fence() {}
static inline void wg_commit() {}
template <int N> static inline void wg_wait() {}
template <int N> static inline void wg_wait(float (*)[4]) {}
static inline void wg_done(float (*)[4]) {}
template <int N> static inline void take_registers() {}
template <int N> static inline void give_registers() {}
static inline bool has_warpgroups() { return cpu::has_warpgroups(); }
template <int T, int SIGN = 1>
static inline void wg_mul(float (*d)[4], const uint32_t a[4], uint64_t b, bool first,
                          int columns = 64) {
    uint32_t signed_a[4];
    for (int i = 0; i < 4; i++)
        signed_a[i] = SIGN < 0 ? a[i] ^ 0x80008000u : a[i];
    cpu::Wgmma x = {d, signed_a, 0, b, columns, 0, T, first};
    cpu::warp(cpu::warpgroup, &x);
}
template <int T, int SIGN = 1>
static inline void wg_mul_128(float (*d)[4], const uint32_t a[4], uint64_t b, bool first) {
    wg_mul<T, SIGN>(d, a, b, first, 128);
}
template <int T>
static inline void wg_mul_16(float (*d)[4], const uint32_t a[4], uint64_t b, bool first) {
    cpu::Wgmma x = {d, a, 0, b, 16, 0, T, first};
    cpu::warp(cpu::warpgroup, &x);
}
template <int T>
static inline void wg_mul_32(float (*d)[4], const uint32_t a[4], uint64_t b, bool first) {
    cpu::Wgmma x = {d, a, 0, b, 32, 0, T, first};
    cpu::warp(cpu::warpgroup, &x);
}
template <int T> static inline void wg_mul_32(float (*d)[4], uint64_t a, uint64_t b, bool first) {
    cpu::Wgmma x = {d, NULL, a, b, 32, (int)(threadIdx.x / 32 % 4 * 16), T, first};
    cpu::warp(cpu::warpgroup, &x);
}
#endif
