/* gpu/decode/packed.cuh - states of 8 or 16 bits a number (dpg_packed of dp_decode.h). They are
 * codes and, of 8 bits, an fp32 scale for each row of 32 columns. harness/simulated/carried.h
 * stores a head of 32 columns so. */
#ifndef DPG_PACKED_CUH
#define DPG_PACKED_CUH
#include "dp_decode.h"
#include "plan/values.cuh"

#ifdef __CUDACC__
#define PACKED_COLUMNS 32
#define INT8_MOST 127.f

/* Floats of 8 bits: a sign, an exponent, so many bits of fraction. */
struct Fp8 {
    int fraction, bias;
    uint32_t most; /* the largest code */

    /* e4m3: least normal 2^-6, largest 448; e5m2: 2^-14, 57344. */
    __device__ explicit Fp8(int e5m2)
        : fraction(e5m2 ? 2 : 3), bias(e5m2 ? 15 : 7), most(e5m2 ? 0x7b : 0x7e) {}
    /* 2^n, n from -126 to 127. */
    static __device__ float power(int n) { return __uint_as_float((uint32_t)(n + 127) << 23); }

    __device__ float value(uint32_t code) const {
        const float size = __uint_as_float((code & 0x7f) << (23 - fraction)) * power(127 - bias);
        return code & 0x80 ? -size : size;
    }
    /* x >= 0 to nearest even. */
    __device__ uint32_t nearest(float x) const {
        const int low = 23 - fraction;
        uint32_t bits = __float_as_uint(x);
        if (x < power(1 - bias)) return (uint32_t)rintf(x * power(bias - 1 + fraction));
        bits += (1u << (low - 1)) - 1 + (bits >> low & 1);
        const uint32_t code = (bits >> low) - ((uint32_t)(127 - bias) << fraction);
        return code > most ? most : code;
    }
    /* The quotient's own rounding can make a half of what is none: the remainder, which fp32 holds,
     * tells. */
    __device__ uint32_t code(float x, float scale) const {
        const float size = fabsf(x);
        const uint32_t near = nearest(size / scale);
        const float rest = fmaf(-scale, value(near), size);
        const uint32_t other = rest > 0 ? (near < most ? near + 1 : near) : near ? near - 1 : 0;
        const float closer = fmaf(-scale, value(other), size);
        return (fabsf(closer) < fabsf(rest) ? other : near) | __float_as_uint(x) >> 31 << 7;
    }
};

/* ---- fp16 by chance (ref/vocabulary/stored.c) ------------------------------------------------ */

/* In [0, 1), of a number and its place. */
static __device__ double chance(float x, int64_t at) {
    uint64_t z = (uint64_t)__double_as_longlong((double)x);
    z += 0x9e3779b97f4a7c15u * (uint64_t)(at + 1);
    z = (z ^ z >> 30) * 0xbf58476d1ce4e5b9u;
    z = (z ^ z >> 27) * 0x94d049bb133111ebu;
    return (double)((z ^ z >> 31) >> 11) * 0x1p-53;
}
static __device__ uint32_t fp16_code(float x, int64_t at) {
    const uint32_t bits = __float_as_uint(x);
    const int exponent = (int)(bits >> 23 & 0xff) - 127;
    if (exponent > 127) return bits >> 31 << 15 | (bits << 9 ? 0x7e00 : 0x7c00);
    const float spacing = Fp8::power((exponent < -14 ? -14 : exponent) - 10);
    const float steps = x / spacing, down = floorf(steps);
    const float y = (chance(x, at) < (double)(steps - down) ? down + 1 : down) * spacing;
    const uint32_t sign = __float_as_uint(y) >> 31 << 15;
    const float size = fabsf(y);
    if (size > 65504.f) return sign | 0x7c00;
    if (size < 0x1p-14f) return sign | (uint32_t)(size * 0x1p24f);
    return sign | ((__float_as_uint(size) >> 13) - (112 << 10));
}
static __device__ float fp16_value(uint32_t code) {
    const float size = (code & 0x7fff) < 0x7c00
                           ? __uint_as_float((code & 0x7fff) << 13) * 0x1p112f
                           : __uint_as_float(0x7f800000 | (code & 0x3ff) << 13);
    return code & 0x8000 ? -size : size;
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
    char *codes;   /* [K][V] */
    float *scale;  /* [K][V/32] */
    bf16 *left;    /* [K][V], with feedback: what the store left out */
    int64_t place; /* of its first number among those of the slot */

    __device__ PackedHead(void *states, int64_t head, const dpg_decode &d) {
        const int64_t n = (int64_t)d.K * d.V;
        codes = (char *)states + head * DPG_PACKED_BYTES(d.packed, n);
        scale = (float *)(codes + n);
        left = (bf16 *)(scale + n / PACKED_COLUMNS);
        place = head % d.HV * n;
    }
};

/* Rounding errors stored beside a block's tile (layout [K][V], 4 columns a thread, 8 threads a
 * row), bf16; zeros without feedback. */
template <int ROWS> struct LeftOut { uint2 x[ROWS]; };

static __device__ int is_int8(const dpg_decode &d) {
    return d.packed == DPG_INT8 || d.packed == DPG_INT8_FEEDBACK;
}

template <class Tile>
static __device__ void load_packed(Tile &S, LeftOut<Tile::ROWS> &left, const PackedHead &from,
                                   const dpg_decode &d, int first) {
    const Fp8 f(d.packed == DPG_E5M2);
#pragma unroll
    for (int i = 0; i < Tile::ROWS; i++) {
        const int64_t at = (int64_t)S.row(i) * d.V + first + S.col(0);
        left.x[i] = make_uint2(0, 0);
        if (d.packed == DPG_FP16_BY_CHANCE) {
            const uint2 two = *(const uint2 *)(from.codes + 2 * at);
            for (int j = 0; j < Tile::COLS; j++)
                S.s[i][j] = fp16_value((j < 2 ? two.x : two.y) >> 16 * (j % 2) & 0xffff);
            continue;
        }
        const float scale = from.scale[at / PACKED_COLUMNS];
        const uint32_t codes = *(const uint32_t *)(from.codes + at);
        for (int j = 0; j < Tile::COLS; j++) {
            const uint32_t code = codes >> 8 * j & 0xff;
            S.s[i][j] = scale * (is_int8(d) ? (float)(int8_t)code : f.value(code));
        }
        if (d.packed == DPG_INT8_FEEDBACK) left.x[i] = *(const uint2 *)(from.left + at);
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
    const Fp8 f(d.packed == DPG_E5M2);
    const float largest = is_int8(d) ? INT8_MOST : f.value(f.most);
#pragma unroll
    for (int i = 0; i < Tile::ROWS; i++) {
        const int64_t at = (int64_t)S.row(i) * d.V + first + S.col(0);
        if (d.packed == DPG_FP16_BY_CHANCE) {
            uint32_t two[2] = {0, 0};
            for (int j = 0; j < Tile::COLS; j++)
                two[j / 2] |= fp16_code(S.s[i][j], to.place + at + j) << 16 * (j % 2);
            *(uint2 *)(to.codes + 2 * at) = make_uint2(two[0], two[1]);
            continue;
        }
        const float unit = largest_of_row(S.s[i]) / largest;
        const float scale = unit > 0 ? unit : 1.f;
        const float2 low = unpack2(left.x[i].x), high = unpack2(left.x[i].y);
        const float more[4] = {low.x, low.y, high.x, high.y};
        float rest[4];
        uint32_t codes = 0;
        for (int j = 0; j < Tile::COLS; j++) {
            codes |= (is_int8(d) ? int8_code(S.s[i][j], more[j], scale, &rest[j])
                                 : f.code(S.s[i][j], scale))
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
