/* gpu/simple/product.cuh - out(i, j, sum over k of A(i, k) B(k, j)) for i < m, j < n by one block.
 * It makes 64 x 64 entries at a time, 4 x 4 a thread, k in order. */
#ifndef DPG_PRODUCT_CUH
#define DPG_PRODUCT_CUH
#include "simple/simple.cuh"

#define BT 64
#define KT 16 /* divides every inner length: K, V, C, n */
struct Stage {
    float a[KT][BT + 4], b[KT][BT + 4];
};

/* AK: consecutive k of A lie side by side in memory; BJ: consecutive j of B do. They choose who
 * loads what, not the result. */
template <bool AK, bool BJ, class LA, class LB, class OUT>
__device__ __forceinline__ void product(Stage &sm, int m, int n, int inner, LA A, LB B, OUT out) {
    int tx = threadIdx.x % 16 * 4, ty = threadIdx.x / 16 * 4;
    for (int i0 = 0; i0 < m; i0 += BT)
        for (int j0 = 0; j0 < n; j0 += BT) {
            float c[4][4] = {};
            for (int k0 = 0; k0 < inner; k0 += KT) {
                __syncthreads();
                for (int x = threadIdx.x; x < BT * KT; x += THREADS) {
                    int i = AK ? x / KT : x % BT, ka = AK ? x % KT : x / BT,
                        j = BJ ? x % BT : x / KT, kb = BJ ? x / BT : x % KT;
                    sm.a[ka][i] = i0 + i < m ? A(i0 + i, k0 + ka) : 0.f;
                    sm.b[kb][j] = j0 + j < n ? B(k0 + kb, j0 + j) : 0.f;
                }
                __syncthreads();
#pragma unroll
                for (int k = 0; k < KT; k++)
#pragma unroll
                    for (int i = 0; i < 4; i++)
#pragma unroll
                        for (int j = 0; j < 4; j++)
                            c[i][j] = fmaf(sm.a[k][ty + i], sm.b[k][tx + j], c[i][j]);
            }
            for (int i = 0; i < 4; i++)
                for (int j = 0; j < 4; j++)
                    if (i0 + ty + i < m && j0 + tx + j < n) out(i0 + ty + i, j0 + tx + j, c[i][j]);
        }
}

#endif
