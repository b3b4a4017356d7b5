/* gpu/chain/panel.cuh - a chain of products of K x K by K x 32 in 3xTF32. */
#ifndef DPG_PANEL_CUH
#define DPG_PANEL_CUH
#include "chain/chain.cuh"
#include "fault.cuh"
#include "instructions.cuh"
#include "plan/values.cuh"

/* A product of K x K by K x 32 after the other, in 3xTF32: P <- M P + add. A warp owns 16 rows of
 * M, which are loaded straight into its registers; the next product's rows follow. P is kept split,
 * (hi, lo) of rows 2 k and 2 k + 1 side by side. The k-steps take channels in the order in which a
 * lane's float4 holds them. The leading products of 16 channels are added in the tensor core and
 * then in fp32. That is 2.7e-7 from fp64 after 6 products, where sums of 64 channels are 6.6e-7
 * off. The mean loss is not corrected: over so few products it does not matter, and exact sums stay
 * exact. */
template <int K> struct Panel {
    static const int PITCH = 33, AHEAD = 2; /* 16 columns of M each */
    float4 *P;
    int row, lane, gr, tc, r0; /* words in a row of an element, V + K */
    float4 ahead[2][AHEAD];

    __device__ __forceinline__ Panel(float4 *P_, int row_)
        : P(P_), row(row_), lane(threadIdx.x % 32), gr(lane / 4), tc(lane % 4),
          r0(threadIdx.x / 32 * 16 + gr) {}
    /* The lane's words of a panel, row stride ld: f(n-tile, row half, 2 columns). */
    template <class F> static __device__ __forceinline__ void words(F f) {
#pragma unroll
        for (int n = 0; n < 4; n++)
#pragma unroll
            for (int h = 0; h < 2; h++)
                f(n, h);
    }
    __device__ __forceinline__ int64_t place(int n, int h, int ld) {
        return (int64_t)(r0 + 8 * h) * ld + n * 8 + 2 * tc;
    }
    __device__ __forceinline__ void load(float c[4][4], const float *E, int ld) {
        words([&](int n, int h) {
            float2 x = *(const float2 *)(E + place(n, h, ld));
            c[n][2 * h] = x.x;
            c[n][2 * h + 1] = x.y;
        });
    }
    __device__ __forceinline__ void store(const float c[4][4], float *E, int ld) {
        words([&](int n, int h) {
            *(float2 *)(E + place(n, h, ld)) = make_float2(c[n][2 * h], c[n][2 * h + 1]);
        });
    }
    __device__ __forceinline__ void fetch(const float *M, int j, int slot) {
#pragma unroll
        for (int h = 0; h < 2; h++)
            ahead[h][slot] = *(const float4 *)(M + (int64_t)(r0 + 8 * h) * row + 16 * j + 4 * tc);
    }
    /* Is a block's panel finite? Called by the whole block. */
    __device__ __forceinline__ bool is_finite(const float c[4][4]) {
        Finite all;
#pragma unroll
        for (int i = 0; i < 16; i++)
            all.see(c[i / 4][i % 4]);
        return all.by_block();
    }
    /* The first columns of the warp's rows of M. */
    __device__ __forceinline__ void begin(const float *M) {
#pragma unroll
        for (int j = 0; j < AHEAD; j++)
            fetch(M, j, j);
    }
    /* P <- c, between barriers. */
    __device__ __forceinline__ void put(const float c[4][4]) {
        if (!FAULT(MERGE_NO_SYNC)) __syncthreads();
        words([&](int n, int h) {
            int r = r0 + 8 * h;
#pragma unroll
            for (int e = 0; e < 2; e++) {
                float x = c[n][2 * h + e], hi = tf32_rna(x);
                ((float2 *)(P + r / 2 * PITCH + n * 8 + 2 * tc + e))[r % 2] =
                    make_float2(hi, tf32_rna(x - hi));
            }
        });
        __syncthreads();
    }
    /* One k-step into z and lo; products that wait for each other lie as far apart as they can. */
    __device__ __forceinline__ void step(float z[4][4], float lo[4][4], const float x[2][4], int s,
                                         const float4 *p0) {
        float a[4], al[4];
        float4 p[4];
#pragma unroll
        for (int n = 0; n < 4; n++)
            p[n] = p0[n * 8];
#pragma unroll
        for (int i = 0; i < 4; i++) {
            float y = x[i % 2][2 * s + i / 2];
            a[i] = tf32_rna(y);
            al[i] = tf32_rna(y - a[i]);
        }
#pragma unroll
        for (int n = 0; n < 4; n++) {
            float b[2] = {p[n].x, p[n].z};
            mma_tf32(z[n], a, b);
        }
#pragma unroll
        for (int n = 0; n < 4; n++) {
            float b[2] = {p[n].x, p[n].z};
            mma_tf32(lo[n], al, b);
        }
#pragma unroll
        for (int n = 0; n < 4; n++) {
            float b[2] = {p[n].y, p[n].w};
            mma_tf32(lo[n], a, b);
        }
    }
    /* c = add, rows of an element; NULL: zeros. */
    __device__ __forceinline__ void only(float c[4][4], const float *add) {
        if (add)
            load(c, add, row);
        else
            words([&](int n, int h) { c[n][2 * h] = c[n][2 * h + 1] = 0.f; });
    }
    /* c = M P + add; M has been begun, on return `next` has (NULL: none follows). */
    __device__ __forceinline__ void product(float c[4][4], const float *M, const float *add,
                                            const float *next) {
        float lo[4][4] = {};
        only(c, add);
#pragma unroll 1
        for (int j0 = 0; j0 < K / 16; j0 += AHEAD)
#pragma unroll
            for (int q = 0; q < AHEAD; q++) {
                int j = j0 + q;
                float x[2][4], z[4][4] = {};
#pragma unroll
                for (int h = 0; h < 2; h++)
                    *(float4 *)x[h] = ahead[h][q];
                if (j + AHEAD < K / 16)
                    fetch(M, j + AHEAD, q);
                else if (next)
                    fetch(next, j + AHEAD - K / 16, q);
#pragma unroll
                for (int s = 0; s < 2; s++)
                    step(z, lo, x, s, P + (8 * j + 2 * tc + s) * PITCH + gr);
#pragma unroll
                for (int n = 0; n < 4; n++)
                    add4(c[n], z[n]);
            }
#pragma unroll
        for (int n = 0; n < 4; n++)
            add4(c[n], lo[n]);
    }
};

#endif
