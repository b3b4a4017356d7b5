/* gpu/decode/packed.cuh - states of 8 bits a number (dpg_packed of dp_decode.h): codes, and an fp32
 * scale for each row of 32 columns, as harness/simulated/carried.h stores a head of 32 columns. */
#ifndef DPG_PACKED_CUH
#define DPG_PACKED_CUH
#include "dp_decode.h"
#include "plan/values.cuh"

#ifdef __CUDACC__
#define PACKED_COLUMNS 32
#define E4M3_MOST 448.f
#define INT8_MOST 127.f

/* Sign, 4 bits of exponent, 3 of fraction; least normal 2^-6, largest 448. */
static __device__ float e4m3_value(uint32_t code) {
    const float size = __uint_as_float((code & 0x7f) << 20) * 0x1p120f;
    return code & 0x80 ? -size : size;
}
/* x >= 0 to nearest even. */
static __device__ uint32_t e4m3_nearest(float x) {
    uint32_t bits = __float_as_uint(x);
    if (x < 0x1p-6f) return (uint32_t)rintf(x * 512.f);
    bits += 0x7ffff + (bits >> 20 & 1);
    const uint32_t code = (bits >> 20) - (120 << 3);
    return code > 0x7e ? 0x7e : code;
}
/* The quotient's own rounding can make a half of what is none: the remainder, which fp32 holds,
 * tells. */
static __device__ uint32_t e4m3_code(float x, float scale) {
    const float size = fabsf(x);
    const uint32_t code = e4m3_nearest(size / scale);
    const float rest = fmaf(-scale, e4m3_value(code), size);
    const uint32_t other = rest > 0 ? (code < 0x7e ? code + 1 : code) : code ? code - 1 : 0;
    const float closer = fmaf(-scale, e4m3_value(other), size);
    return (fabsf(closer) < fabsf(rest) ? other : code) | __float_as_uint(x) >> 31 << 7;
}

static __device__ float value_of(uint32_t code, int e4m3) {
    return e4m3 ? e4m3_value(code) : (float)(int8_t)code;
}

/* x + more to a multiple of scale, up to 127 of them, likewise. */
static __device__ uint32_t int8_code(float x, float more, float scale, float *rest) {
    const float want = x + more, other = want - x;
    const float lost = (x - (want - other)) + (more - other); /* x + more = want + lost */
    float n = fminf(INT8_MOST, fmaxf(-INT8_MOST, rintf(want / scale)));
    float r = fmaf(-scale, n, want) + lost;
    const float step = 2 * r > scale ? 1.f : -2 * r > scale ? -1.f : 0.f;
    if (fabsf(n + step) <= INT8_MOST) n += step;
    *rest = fmaf(-scale, n, want) + lost;
    return (uint32_t)(int)n & 0xff;
}

/* One head of one slot. */
struct PackedHead {
    char *codes;  /* [K][V] */
    float *scale; /* [K][V/32] */
    bf16 *left;   /* [K][V], with feedback: what the store left out */

    __device__ PackedHead(void *states, int64_t head, const dpg_decode &d) {
        const int64_t n = (int64_t)d.K * d.V;
        codes = (char *)states + head * DPG_PACKED_BYTES(d.packed, n);
        scale = (float *)(codes + n);
        left = (bf16 *)(scale + n / PACKED_COLUMNS);
    }
};

/* What a block's tile (of [K][V], 4 columns a thread, 8 threads a row) left out where it was read;
 * zeros without feedback. */
template <int ROWS> struct LeftOut { uint2 x[ROWS]; };

template <class Tile>
static __device__ void load_packed(Tile &S, LeftOut<Tile::ROWS> &left, const PackedHead &from,
                                   const dpg_decode &d, int first) {
    for (int i = 0; i < Tile::ROWS; i++) {
        const int64_t at = (int64_t)S.row(i) * d.V + first + S.col(0);
        const float scale = from.scale[at / PACKED_COLUMNS];
        const uint32_t codes = *(const uint32_t *)(from.codes + at);
        for (int j = 0; j < Tile::COLS; j++)
            S.s[i][j] = scale * value_of(codes >> 8 * j & 0xff, d.packed == DPG_E4M3);
        left.x[i] =
            d.packed == DPG_INT8_FEEDBACK ? *(const uint2 *)(from.left + at) : make_uint2(0, 0);
    }
}

/* The largest number of a row, in all of its threads. */
static __device__ float largest_of_row(const float *x) {
    float most = fmaxf(fmaxf(fabsf(x[0]), fabsf(x[1])), fmaxf(fabsf(x[2]), fabsf(x[3])));
    for (int m = 1; m < 8; m *= 2)
        most = fmaxf(most, __shfl_xor_sync(~0u, most, m));
    return most;
}

template <class Tile>
static __device__ void store_packed(const Tile &S, const LeftOut<Tile::ROWS> &left, PackedHead to,
                                    const dpg_decode &d, int first) {
    const int e4m3 = d.packed == DPG_E4M3;
    for (int i = 0; i < Tile::ROWS; i++) {
        const int64_t at = (int64_t)S.row(i) * d.V + first + S.col(0);
        const float unit = largest_of_row(S.s[i]) / (e4m3 ? E4M3_MOST : INT8_MOST);
        const float scale = unit > 0 ? unit : 1.f;
        const float2 low = unpack2(left.x[i].x), high = unpack2(left.x[i].y);
        const float more[4] = {low.x, low.y, high.x, high.y};
        float rest[4];
        uint32_t codes = 0;
        for (int j = 0; j < Tile::COLS; j++) {
            codes |= (e4m3 ? e4m3_code(S.s[i][j], scale)
                           : int8_code(S.s[i][j], more[j], scale, &rest[j]))
                     << 8 * j;
        }
        *(uint32_t *)(to.codes + at) = codes;
        if (S.col(0) == 0) to.scale[at / PACKED_COLUMNS] = scale;
        if (d.packed == DPG_INT8_FEEDBACK)
            *(uint2 *)(to.left + at) = make_uint2(pack2(rest[0], rest[1]), pack2(rest[2], rest[3]));
    }
}
#endif
#endif
