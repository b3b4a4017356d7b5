/* gpu/decode/packed.cuh - how numbers of a state lie in memory: fp32, bf16, fp16, or packed in 8 or
 * 16 bits a number (dpg_packed of dp_decode.h). Codes of 8 bits have an fp32 scale for each row of
 * 32 columns, as ref/vocabulary/stored.h defines. */
#ifndef DPG_PACKED_CUH
#define DPG_PACKED_CUH
#include "dp_decode.h"
#include "instructions.cuh"
#include "plan/values.cuh"

#ifdef __CUDACC__
#define SCALE_COLUMNS 32

/* As dpg_dtype; packed ones: IN_F16 + dpg_packed. */
enum Form { IN_F32, IN_BF16, IN_F16, IN_E4M3, IN_INT8, IN_INT8_LEFT, IN_E5M2, IN_CHANCE, FORMS };
static_assert(IN_BF16 == (int)DPG_BF16 && IN_F16 == (int)DPG_F16, "order of dpg_dtype");
static_assert(IN_CHANCE == IN_F16 + (int)DPG_FP16_BY_CHANCE, "order of dpg_packed");

/* Bytes of a number's code, numbers of 16 bytes. */
__host__ __device__ constexpr int code_bytes(int form) {
    return form == IN_F32 ? 4 : form <= IN_F16 || form == IN_CHANCE ? 2 : 1;
}
__host__ __device__ constexpr bool is_int8(int form) {
    return form == IN_INT8 || form == IN_INT8_LEFT;
}
__host__ __device__ constexpr bool is_scaled(int form) {
    return form == IN_E4M3 || form == IN_E5M2 || is_int8(form);
}
/* A head of n numbers. */
__host__ __device__ inline int64_t head_bytes(int form, int64_t n) {
    return form <= IN_F16 ? n * code_bytes(form) : DPG_PACKED_BYTES(form - IN_F16, n);
}

/* BYTES in as few accesses as there are. */
template <int BYTES> __device__ __forceinline__ void copy(void *to, const void *from) {
    if constexpr (BYTES >= 16)
        for (int i = 0; i < BYTES / 16; i++)
            ((uint4 *)to)[i] = ((const uint4 *)from)[i];
    else if constexpr (BYTES == 8)
        *(uint2 *)to = *(const uint2 *)from;
    else if constexpr (BYTES == 4)
        *(uint32_t *)to = *(const uint32_t *)from;
    else
        *(uint16_t *)to = *(const uint16_t *)from;
}

/* ---- 8 bits ---------------------------------------------------------------------------------- */

/* 2^n, n from -126 to 127. */
__device__ __forceinline__ float power(int n) { return __uint_as_float((uint32_t)(n + 127) << 23); }

/* Sizes of e4m3 (least normal 2^-6, largest 448), e5m2 (2^-14, 57344), int8 (127). */
template <int FORM> struct Code {
    static constexpr bool E5M2 = FORM == IN_E5M2;
    static constexpr int FRACTION = E5M2 ? 2 : 3, BIAS = E5M2 ? 15 : 7;
    static constexpr uint32_t LAST = E5M2 ? 0x7b : 0x7e;
    static constexpr float MOST = is_int8(FORM) ? 127.f : E5M2 ? 57344.f : 448.f;

    static __device__ float value(uint32_t code) {
        if (is_int8(FORM)) return (float)code;
        return __uint_as_float(code << (23 - FRACTION)) * power(127 - BIAS);
    }
    /* x >= 0 to nearest even. */
    static __device__ uint32_t nearest(float x) {
        const int low = 23 - FRACTION;
        uint32_t bits = __float_as_uint(x);
        if (is_int8(FORM)) return (uint32_t)fminf(rintf(x), MOST);
        if (x < power(1 - BIAS)) return (uint32_t)rintf(x * power(BIAS - 1 + FRACTION));
        bits += (1u << (low - 1)) - 1 + (bits >> low & 1);
        const uint32_t code = (bits >> low) - ((uint32_t)(127 - BIAS) << FRACTION);
        return code > LAST ? LAST : code;
    }
    static __device__ uint32_t with_sign(uint32_t size, float x) {
        const uint32_t sign = __float_as_uint(x) >> 31;
        return is_int8(FORM) ? (sign ? 0 - size : size) & 0xff : sign << 7 | size;
    }

    static __device__ void values(uint32_t codes, float x[4]) {
#pragma unroll
        for (int j = 0; j < 4; j++) {
            if (is_int8(FORM)) { /* 2^23 + 128 + code */
                const uint32_t bits = __byte_perm(codes ^ 0x80808080u, 0x4b000000, 0x7440 + j);
                x[j] = __uint_as_float(bits) - 8388736.f;
                continue;
            }
#if FP8_CONVERSIONS
            if (j % 2) continue;
            const float2 two = j ? of_fp8<E5M2, true>(codes) : of_fp8<E5M2, false>(codes);
            x[j] = two.x;
            x[j + 1] = two.y;
#else
            const float size = value(codes >> 8 * j & 0x7f);
            x[j] = codes >> 8 * j & 0x80 ? -size : size;
#endif
        }
    }
    /* r x times `more` to nearest even, |r x| up to MOST in all but the last bits. */
    static __device__ uint32_t codes(const float x[4], float r, float more) {
        uint32_t of[4];
        float y[4];
        for (int j = 0; j < 4; j++) /* int8: 1.5 * 2^23 + code */
            if (is_int8(FORM))
                of[j] = __float_as_uint(fmaf(x[j], r * more, 12582912.f));
            else
                y[j] = x[j] * r * more;
        if (is_int8(FORM))
            return __byte_perm(__byte_perm(of[0], of[1], 0x40), __byte_perm(of[2], of[3], 0x40),
                               0x5410);
#if FP8_CONVERSIONS
        return to_fp8<E5M2>(y[0], y[1]) | to_fp8<E5M2>(y[2], y[3]) << 16;
#else
        for (int j = 0; j < 4; j++)
            of[j] = with_sign(nearest(fabsf(y[j])), x[j]);
        return of[0] | of[1] << 8 | of[2] << 16 | of[3] << 24;
#endif
    }
};

/* r = rcp(s) is within 2^-23 of 1/s, and three products round. Hence x / s lies between x (r BELOW)
 * and that times ABOVE, and has their code if they have one. */
#define BELOW (1.f - 5 * 0x1p-24f)
#define ABOVE (1.f + 6 * 0x1p-23f)
#define LEAST_SCALE 0x1p-100f

/* x / scale to nearest even: of two codes the remainder at their middle decides. */
template <int FORM> static __device__ uint32_t exact_code(float x, float scale) {
    const float up = scale < LEAST_SCALE ? 1 / LEAST_SCALE : 1.f, s = scale * up, r = rcp(s);
    const float size = fabsf(x) * up;
    const uint32_t low = Code<FORM>::nearest(size * (r * BELOW));
    const uint32_t high = Code<FORM>::nearest(size * (r * BELOW) * ABOVE);
    const float middle = 0.5f * (Code<FORM>::value(low) + Code<FORM>::value(high));
    const float rest = fmaf(-s, middle, size);
    return Code<FORM>::with_sign(rest > 0 || (rest == 0 && low & 1) ? high : low, x);
}

/* x[i] of N, chosen among registers. An array that a loop reads would lie in local memory, and each
 * store to it would go to L2. */
template <int N, class T> static __device__ __forceinline__ T pick(const T *x, int each, int i) {
    T y = x[0];
#pragma unroll
    for (int n = 1; n < N; n++)
        y = i == n ? x[n * each] : y;
    return y;
}

/* N numbers, each four with a scale(i), of which below[i] is rcp times BELOW. tiny: scales may be
 * below LEAST_SCALE. */
template <int FORM, int N, class F>
static __device__ __forceinline__ void all_codes(const float *x, const float below[N / 4], F scale,
                                                 bool tiny, uint32_t *codes) {
    uint32_t above[N / 4], any = 0;
#pragma unroll
    for (int i = 0; i < N / 4; i++) {
        codes[i] = Code<FORM>::codes(x + 4 * i, below[i], 1.f);
        above[i] = Code<FORM>::codes(x + 4 * i, below[i], ABOVE);
        any |= codes[i] ^ above[i];
    }
    if (__builtin_expect(any || tiny, 0))
#pragma unroll 1
        for (int i = 0; i < N / 4; i++) {
            uint32_t exact = 0;
            if (!tiny && pick<N / 4>(codes, 1, i) == pick<N / 4>(above, 1, i)) continue;
#pragma unroll
            for (int n = 0; n < 4; n++)
                exact |= exact_code<FORM>(pick<N / 4>(x + n, 4, i), scale(i)) << 8 * n;
#pragma unroll
            for (int n = 0; n < N / 4; n++)
                codes[n] = i == n ? exact : codes[n];
        }
}

/* a + b; of the two floats about a sum that is none, the one whose last bit is set. A rounding to
 * fewer bits is then that of the sum. */
static __device__ float sticky_sum(float a, float b) {
    const float y = a + b, other = y - a, lost = (a - (y - other)) + (b - other);
    const uint32_t bits = __float_as_uint(y);
    if (lost == 0 || bits & 1) return y;
    return __uint_as_float((lost > 0) == (y > 0) ? bits + 1 : bits - 1);
}
/* x + more to a multiple of scale, up to 127 of them, and what it leaves out. */
static __device__ uint32_t int8_code(float x, float more, float scale, float *rest) {
    const float want = x + more, other = want - x;
    const float lost = (x - (want - other)) + (more - other); /* x + more = want + lost */
    float n = fminf(127.f, fmaxf(-127.f, rintf(want / scale)));
    const float r = 2 * fmaf(-scale, n, want);
    const float above = (r - scale) + 2 * lost, below = (r + scale) + 2 * lost;
    const bool odd = (int)n & 1;
    const float step = above > 0 || (above == 0 && odd)   ? 1.f
                       : below < 0 || (below == 0 && odd) ? -1.f
                                                          : 0.f;
    if (fabsf(n + step) <= 127.f) n += step;
    *rest = sticky_sum(fmaf(-scale, n, want), lost);
    return (uint32_t)(int)n & 0xff;
}

/* ---- fp16 by chance (ref/vocabulary/stored.c) ------------------------------------------------ */

#define PLACE_SALT 0x9e3779b97f4a7c15u
/* Salt of a number's place among those of a slot; that of the next one is PLACE_SALT more. */
static __device__ __forceinline__ uint64_t salt_of(int64_t place) {
    return PLACE_SALT * (uint64_t)(place + 1);
}
/* 64 bits of a number as a double; the first 53 are a chance in [0, 1). */
static __device__ __forceinline__ uint64_t chance(uint64_t z, uint64_t salt) {
    z += salt;
    z = (z ^ z >> 30) * 0xbf58476d1ce4e5b9u;
    z = (z ^ z >> 27) * 0x94d049bb133111ebu;
    return z ^ z >> 31;
}
/* Any x. */
static inline __device__ uint32_t any_fp16_code(float x, uint64_t salt) {
    const uint32_t bits = __float_as_uint(x);
    const int exponent = (int)(bits >> 23 & 0xff) - 127;
    if (exponent > 127) return bits >> 31 << 15 | (bits << 9 ? 0x7e00 : 0x7c00);
    const float spacing = power((exponent < -14 ? -14 : exponent) - 10);
    const float steps = x / spacing, down = floorf(steps);
    const uint64_t by = chance((uint64_t)__double_as_longlong((double)x), salt);
    const bool up = (double)(by >> 11) * 0x1p-53 < (double)(steps - down);
    const float y = (up ? down + 1 : down) * spacing, size = fabsf(y);
    const uint32_t sign = __float_as_uint(y) >> 31 << 15;
    if (size > 65504.f) return sign | 0x7c00;
    if (size < 0x1p-14f) return sign | (uint32_t)(size * 0x1p24f);
    return sign | ((__float_as_uint(size) >> 13) - (112 << 10));
}
/* rare: set where any_fp16_code() must say it. The first 32 bits of the chance decide but for 2^-23
 * of all numbers. Codes below 2^-14 are 2^-24 apart. */
static __device__ __forceinline__ uint32_t fp16_code(float x, uint64_t salt, bool &rare) {
    const uint32_t size = __float_as_uint(x) & 0x7fffffff, sign = __float_as_uint(x) >> 31;
    const uint32_t high = ((size >> 3) + (896u << 20)) | sign << 31;
    const uint32_t by = (uint32_t)(chance((uint64_t)high << 32 | size << 29, salt) >> 32);
    const uint32_t exponent = size >> 23, least = exponent < 113 ? 113 : exponent;
    const uint32_t shift = least - exponent < 31 ? least - exponent : 31;
    const uint64_t digits = (uint64_t)((size & 0x7fffff) | 0x800000) << 19 >> shift;
    const uint32_t whole = (uint32_t)(digits >> 32), lost = (uint32_t)digits;
    const uint32_t sum = by + lost, off = sign ? sum : by - lost;
    const bool further = sign ? sum < lost : by < lost;
    rare |= off + 0x100 < 0x200 || size >= 143u << 23 || size - 1 < (82u << 23) - 1;
    const uint32_t code = ((least - 113) << 10) + whole + further;
    return code || !size ? sign << 15 | code : 0; /* a negative number's step up to 0 is +0 */
}

/* ---- N neighbours in memory ------------------------------------------------------------------ */

/* A head of a state: codes, then scales, then what stores left out (dp_decode.h). */
struct HeadAt {
    char *codes;
    int n;         /* K V */
    int64_t place; /* of its first number among those of the slot */

    __device__ float *scale(int at) const {
        return (float *)(codes + n) + (unsigned)at / SCALE_COLUMNS;
    }
    __device__ bf16 *left(int at) const { return (bf16 *)(codes + n + n / 8) + at; }
};

/* Words of memory that N codes take. */
__host__ __device__ constexpr int words_of(int form, int n) {
    return (n * code_bytes(form) + 3) / 4;
}
/* N numbers of codes, times `scale` where there are scales. */
template <int FORM, int N>
__device__ __forceinline__ void numbers_of(const uint32_t *words, float scale, float *x) {
#pragma unroll
    for (int i = 0; i < N; i++) {
        const uint32_t word = words[i * code_bytes(FORM) / 4];
        if constexpr (FORM == IN_F32) x[i] = __uint_as_float(word);
        if constexpr (FORM == IN_BF16) x[i] = i % 2 ? unpack2(word).y : unpack2(word).x;
        if constexpr (FORM == IN_F16 || FORM == IN_CHANCE)
            x[i] = i % 2 ? of_fp16(word).y : of_fp16(word).x;
        if constexpr (is_scaled(FORM))
            if (i % 4 == 0) Code<FORM>::values(word, x + i);
    }
#pragma unroll
    for (int i = 0; i < N && is_scaled(FORM); i++)
        x[i] *= scale;
}
/* Codes of forms without scales, of fours of numbers `stride` places apart; salt: of the first. */
template <int FORM, int N>
__device__ __forceinline__ void codes_of(const float *x, uint64_t salt, int stride,
                                         uint32_t *words) {
    if constexpr (FORM == IN_F32) copy<4 * N>(words, x);
    if constexpr (FORM == IN_BF16)
        for (int i = 0; i < N; i += 2)
            words[i / 2] = pack2(x[i], i + 1 < N ? x[i + 1] : 0.f);
    if constexpr (FORM == IN_F16)
        for (int i = 0; i < N; i += 2)
            words[i / 2] = to_fp16(x[i], i + 1 < N ? x[i + 1] : 0.f);
    if constexpr (FORM == IN_CHANCE) {
        const auto place = [=](int i) { return salt + PLACE_SALT * (i / 4 * stride + i % 4); };
        bool rare = false;
#pragma unroll
        for (int i = 0; i < N; i += 2)
            words[i / 2] = fp16_code(x[i], place(i), rare) | fp16_code(x[i + 1], place(i + 1), rare)
                                                                 << 16;
        if (__builtin_expect(rare, 0))
#pragma unroll 1
            for (int i = 0; i < N; i += 2) {
                const uint32_t two = any_fp16_code(pick<N / 2>(x, 2, i / 2), place(i)) |
                                     any_fp16_code(pick<N / 2>(x + 1, 2, i / 2), place(i + 1))
                                         << 16;
#pragma unroll
                for (int n = 0; n < N / 2; n++)
                    words[n] = i == 2 * n ? two : words[n];
            }
    }
}

template <int FORM, int N>
__device__ __forceinline__ void get_numbers(const HeadAt &from, int at, float *x) {
    alignas(16) uint32_t words[words_of(FORM, N)];
    copy<N * code_bytes(FORM)>(words, from.codes + (int64_t)at * code_bytes(FORM));
    numbers_of<FORM, N>(words, is_scaled(FORM) ? *from.scale(at) : 1.f, x);
}

/* The same, 16 bits as they lie in memory, so that nothing waits for them; then as numbers. */
template <int FORM, int N>
__device__ __forceinline__ void get_raw(const HeadAt &from, int at, float *x) {
    if constexpr (FORM == IN_BF16 || FORM == IN_F16)
        copy<2 * N>(x, (const bf16 *)from.codes + at);
    else
        get_numbers<FORM, N>(from, at, x);
}
template <int FORM, int N> __device__ __forceinline__ void open_raw(float *x) {
#pragma unroll
    for (int i = N - 1; i >= 0 && (FORM == IN_BF16 || FORM == IN_F16); i--) {
        const uint32_t word = __float_as_uint(x[i / 2]);
        const float2 two = FORM == IN_F16 ? of_fp16(word) : unpack2(word);
        x[i] = i % 2 ? two.y : two.x;
    }
}

/* The scale of 32 numbers up to `most`, NaN if one is. */
template <int FORM> __device__ __forceinline__ float unit_of(float most) {
    /* most / MOST to nearest: one step of Newton's is, where its remainder is exact */
    const float by = 1.f / Code<FORM>::MOST, near = most * by;
    float unit = fmaf(fmaf(-Code<FORM>::MOST, near, most), by, near);
    if (__builtin_expect(unit < LEAST_SCALE, 0)) {
        unit = most / Code<FORM>::MOST;
        if (unit == 0) unit = 1.f;
    }
    return unit;
}

/* The scale of a row of 32 columns, N of them each in 32 / N neighbouring lanes. */
template <int FORM, int N> __device__ __forceinline__ float scale_of(const float *x) {
    float most = 0;
#pragma unroll
    for (int i = 0; i < N; i++)
        most = max_or_nan(most, fabsf(x[i]));
#pragma unroll
    for (int m = 1; m < SCALE_COLUMNS / N; m *= 2)
        most = max_or_nan(most, __shfl_xor_sync(~0u, most, m));
    return unit_of<FORM>(most);
}

/* left: with IN_INT8_LEFT what the last store left out, pairs of bf16. */
template <int FORM, int N>
__device__ __forceinline__ void put_numbers(const HeadAt &to, int at, const float *x,
                                            const uint32_t *left) {
    alignas(16) uint32_t words[words_of(FORM, N)];
    codes_of<FORM, N>(x, salt_of(to.place + at), 4, words);
    if constexpr (is_scaled(FORM)) {
        const float scale = scale_of<FORM, N>(x);
        if constexpr (FORM == IN_INT8_LEFT) {
            alignas(16) uint32_t rests[N / 2];
#pragma unroll
            for (int i = 0; i < N; i += 2) {
                const float2 more = unpack2(left[i / 2]);
                float rest[2];
                const uint32_t two = int8_code(x[i], more.x, scale, &rest[0]) |
                                     int8_code(x[i + 1], more.y, scale, &rest[1]) << 8;
                words[i / 4] = i % 4 ? words[i / 4] | two << 16 : two;
                rests[i / 2] = pack2(rest[0], rest[1]);
            }
            copy<2 * N>(to.left(at), rests);
        } else {
            const float r = rcp(scale) * BELOW;
            float below[N / 4];
            for (int i = 0; i < N / 4; i++)
                below[i] = r;
            all_codes<FORM, N>(
                x, below, [&](int) { return scale; }, scale < LEAST_SCALE, words);
        }
        if (at % SCALE_COLUMNS == 0) *to.scale(at) = scale;
    }
    copy<N * code_bytes(FORM)>(to.codes + (int64_t)at * code_bytes(FORM), words);
}
#endif
#endif
