/* gpu/fast/inverse.cuh - T = (I + A)^-1 of a strictly lower 64 x 64 A, in place in shared memory.
 *
 * Forward substitution in fp32 in the diagonal 16 x 16 blocks. Then T21 = -T22 A21 T11 of 16 and of
 * 32 rows on tensor cores, operands in three bf16 pieces (exact to 2^-24). No powers of A: they
 * grow where keys are nearly parallel and then cancel. */
#ifndef DPG_INVERSE_CUH
#define DPG_INVERSE_CUH
#include "fast/tile.cuh"

#define TS 68 /* row stride of A and T, fp32 words */

/* x = hi + mid + lo, each bf16, of a pair; exact to 2^-24 or better. */
__device__ __forceinline__ void split3(float a, float b, uint32_t &h, uint32_t &m, uint32_t &l) {
    h = pack2(a, b);
    float2 y = unpack2(h);
    a -= y.x;
    b -= y.y;
    m = pack2(a, b);
    y = unpack2(m);
    l = pack2(a - y.x, b - y.y);
}

/* An operand of 16 x 16 in three pieces: A, or two n-tiles of B = [k][n]. */
struct Pieces {
    uint32_t h[4], m[4], l[4];
    __device__ __forceinline__ void set(int i, float a, float b) { split3(a, b, h[i], m[i], l[i]); }
    __device__ __forceinline__ void rows(const float *M, int lane) {
#pragma unroll
        for (int i = 0; i < 4; i++) {
            const float *x = M + (lane / 4 + i % 2 * 8) * TS + lane % 4 * 2 + i / 2 * 8;
            float2 y = *(const float2 *)x;
            set(i, y.x, y.y);
        }
    }
    __device__ __forceinline__ void columns(const float *M, int lane) {
#pragma unroll
        for (int i = 0; i < 4; i++) {
            const float *x = M + (lane % 4 * 2 + i % 2 * 8) * TS + lane / 4 + i / 2 * 8;
            set(i, x[0], x[TS]);
        }
    }
    /* From the accumulators of 16 x 16. */
    __device__ __forceinline__ void sums(const float c[2][4]) {
#pragma unroll
        for (int i = 0; i < 4; i++)
            set(i, c[i / 2][i % 2 * 2], c[i / 2][i % 2 * 2 + 1]);
    }
};

/* A sum of products, the small terms by themselves: two chains of half the length. */
struct Sum {
    float c[2][4] = {}, small[2][4] = {};
    __device__ __forceinline__ void add(const Pieces &a, const Pieces &b) {
        two(small[0], small[1], a.m, b.m);
        two(c[0], c[1], a.h, b.m);
        two(small[0], small[1], a.h, b.l);
        two(c[0], c[1], a.m, b.h);
        two(small[0], small[1], a.l, b.h);
        two(c[0], c[1], a.h, b.h);
    }
    __device__ __forceinline__ void end() {
#pragma unroll
        for (int i = 0; i < 8; i++)
            c[i / 4][i % 4] += small[i / 4][i % 4];
    }
};

__device__ __forceinline__ void store_block(float *M, const float c[2][4], float sign, int lane) {
#pragma unroll
    for (int n = 0; n < 2; n++)
#pragma unroll
        for (int r = 0; r < 2; r++)
            *(float2 *)(M + (lane / 4 + 8 * r) * TS + 8 * n + lane % 4 * 2) =
                make_float2(sign * c[n][2 * r], sign * c[n][2 * r + 1]);
}

/* Half a warp a diagonal block, a lane a column. Four columns of the block at a time go to all
 * rows below: their sums do not wait for each other. */
__device__ __forceinline__ void substitute(float *block, int j) {
    float x[16];
#pragma unroll
    for (int i = 0; i < 16; i++)
        x[i] = j == i ? 1.f : 0.f;
#pragma unroll
    for (int m = 0; m < 16; m += 4)
#pragma unroll
        for (int i = m + 1; i < 16; i++) {
            float4 a = *(const float4 *)(block + i * TS + m);
            x[i] = fmaf(-a.x, x[m], x[i]);
            if (m + 1 < i) x[i] = fmaf(-a.y, x[m + 1], x[i]);
            if (m + 2 < i) x[i] = fmaf(-a.z, x[m + 2], x[i]);
            if (m + 3 < i) x[i] = fmaf(-a.w, x[m + 3], x[i]);
        }
    __syncwarp();
#pragma unroll
    for (int i = 0; i < 16; i++)
        block[i * TS + j] = x[i];
    __syncwarp();
}

/* Warp 0, 1: the diagonal 32 x 32 blocks. */
__device__ __forceinline__ void invert_half(float *A, int half, int lane) {
    float *M = A + half * (32 * TS + 32), *low = M + 16 * TS;
    substitute(M + lane / 16 * (16 * TS + 16), lane % 16);
    Pieces a, b;
    Sum c, z;
    a.rows(low + 16, lane);
    b.columns(low, lane);
    c.add(a, b);
    c.end();
    a.sums(c.c);
    b.columns(M, lane);
    z.add(a, b);
    z.end();
    __syncwarp();
    store_block(low, z.c, -1.f, lane);
}

/* -T22 A21 T11 of 32 rows, block (i, j) of 16 by warp 2 i + j, in two products. A barrier of the
 * block precedes each. The upper triangle holds the result of the first. */
__device__ __forceinline__ void invert_rest_first(float *A, int warp, int lane) {
    int i = warp / 2, j = warp % 2;
    float *low = A + 32 * TS, *up = A + 32;
    Pieces a, b;
    Sum c;
    for (int m = 0; m <= i; m++) {
        a.rows(low + 32 + i * 16 * TS + m * 16, lane);
        b.columns(low + m * 16 * TS + j * 16, lane);
        c.add(a, b);
    }
    c.end();
    store_block(up + i * 16 * TS + j * 16, c.c, -1.f, lane);
}

__device__ __forceinline__ void invert_rest_second(float *A, int warp, int lane) {
    int i = warp / 2, j = warp % 2;
    float *low = A + 32 * TS, *up = A + 32;
    Pieces a, b;
    Sum z;
    for (int m = j; m < 2; m++) {
        a.rows(up + i * 16 * TS + m * 16, lane);
        b.columns(A + m * 16 * TS + j * 16, lane);
        z.add(a, b);
    }
    z.end();
    store_block(low + i * 16 * TS + j * 16, z.c, 1.f, lane);
}
#endif
