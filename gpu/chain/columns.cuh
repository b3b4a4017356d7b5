/* gpu/chain/columns.cuh - a chain of products by K x K matrices over some columns, fp32 FMA. */
#ifndef DPG_COLUMNS_CUH
#define DPG_COLUMNS_CUH
#include "chain/chain.cuh"
#include "fault.cuh"
#include "plan/shared.cuh"

#define THREADS 256

/* A K x K matrix of row stride ld, or (flip) its transpose. */
struct Matrix {
    const float *p;
    int ld, flip;
};

/* A chain of products over MV columns: P <- M P + add for one M after the other, fp32 FMA, sums in
 * the order of k. M (K x K, row stride ld) is read in panels of PK columns. The next panel is
 * loaded into registers while this one is used. A thread makes 4 columns of NR rows, APART
 * apart. */
template <int MV, int KMAX> struct Columns {
    static const int PK = KMAX == 256 ? 16 : 32, PKS = PK + 4, APART = THREADS * 4 / MV,
                     NR = KMAX / APART, LOADS = KMAX * PK / 4 / THREADS;
    static const int BYTES = (2 * KMAX * PKS + KMAX * MV) * 4;
    static_assert(BYTES <= 64 << 10, "what a block has at capability 7.5");
    float *panels, *P;
    /* now: 0 or 1, the panel to fill; flipped: how `ahead` was fetched */
    int K, ld, col, r0, now, flipped;
    float4 ahead[LOADS];

    __device__ __forceinline__ Columns(float *smem, int K_, int ld_)
        : panels(smem), P(smem + 2 * KMAX * PKS), K(K_), ld(ld_), col(threadIdx.x % (MV / 4) * 4),
          r0(threadIdx.x / (MV / 4)), now(0), flipped(0) {}
    /* The thread's part of P: f(i, row, 4 columns). */
    template <class F> __device__ __forceinline__ void rows(F f) {
#pragma unroll
        for (int i = 0; i < NR; i++)
            if (r0 + i * APART < K)
                f(i, r0 + i * APART, *(float4 *)(P + (r0 + i * APART) * MV + col));
    }
    /* Load x of a panel: 4 words of a row r from column k on. For a transpose: 4 rows of a column,
     * so that a warp reads 8 x 16 words and writes them apart. */
    __device__ __forceinline__ void place(int x, int &r, int &k) {
        r = flipped ? x / 32 % (KMAX / 16) * 16 + x % 4 * 4 : x / (PK / 4);
        k = flipped ? x / 32 / (KMAX / 16) * 8 + x / 4 % 8 : x % (PK / 4) * 4;
    }
    __device__ __forceinline__ void fetch(Matrix M, int k0) {
        flipped = M.flip;
#pragma unroll
        for (int i = 0; i < LOADS; i++) {
            int r, k;
            place(threadIdx.x + i * THREADS, r, k);
            if (r < K && k0 + k < K)
                ahead[i] = *(const float4 *)(M.p + (flipped ? (int64_t)(k0 + k) * M.ld + r
                                                            : (int64_t)r * M.ld + k0 + k));
        }
    }
    __device__ __forceinline__ void put() {
#pragma unroll
        for (int i = 0; i < LOADS; i++) {
            int r, k;
            place(threadIdx.x + i * THREADS, r, k);
            float *to = panels + now * KMAX * PKS + r * PKS + k;
            if (r < K && flipped) {
                to[0] = ahead[i].x;
                to[PKS] = ahead[i].y;
                to[2 * PKS] = ahead[i].z;
                to[3 * PKS] = ahead[i].w;
            } else if (r < K)
                *(float4 *)to = ahead[i];
        }
    }
    /* P <- M P + add; the first panel of M has been fetched, on return that of `next` is (NULL:
     * none follows). Begins and ends with a barrier. */
    __device__ __forceinline__ void apply(Matrix M, const float *add, int lda, Matrix next) {
        float sum[NR][4] = {};
        float4 h[NR] = {};
        if (add)
            rows([&](int i, int r, float4 &) {
                h[i] = *(const float4 *)(add + (int64_t)r * lda + col);
            });
        for (int k0 = 0; k0 < K; k0 += PK) {
            put();
            if (!FAULT(MERGE_NO_SYNC)) __syncthreads();
            if (k0 + PK < K)
                fetch(M, k0 + PK);
            else if (next.p)
                fetch(next, 0);
            const float *m = panels + (now * KMAX + r0) * PKS, *p = P + k0 * MV + col;
            int n = K - k0 < PK ? K - k0 : PK;
#pragma unroll 2
            for (int k = 0; k < n; k += 4) {
                float x[NR][4], y[4][4];
#pragma unroll
                for (int i = 0; i < NR; i++)
                    *(float4 *)x[i] = *(const float4 *)(m + i * APART * PKS + k);
#pragma unroll
                for (int j = 0; j < 4; j++)
                    *(float4 *)y[j] = *(const float4 *)(p + (k + j) * MV);
#pragma unroll
                for (int j = 0; j < 4; j++)
#pragma unroll
                    for (int i = 0; i < NR; i++)
#pragma unroll
                        for (int c = 0; c < 4; c++)
                            sum[i][c] = fmaf(x[i][j], y[j][c], sum[i][c]);
            }
            now ^= 1;
        }
        __syncthreads();
        rows([&](int i, int, float4 &q) {
            q = make_float4(sum[i][0] + h[i].x, sum[i][1] + h[i].y, sum[i][2] + h[i].z,
                            sum[i][3] + h[i].w);
        });
        __syncthreads();
    }
    /* Is all of P finite? Called by the whole block. */
    __device__ __forceinline__ bool is_finite() {
        Finite all;
        rows([&](int, int, float4 &q) { all.see(q.x), all.see(q.y), all.see(q.z), all.see(q.w); });
        return all.by_block();
    }
    __device__ __forceinline__ void from(const float *E) { from(E, ld); }
    __device__ __forceinline__ void from(const float *E, int lde) {
        rows([&](int, int r, float4 &q) { q = *(const float4 *)(E + (int64_t)r * lde + col); });
    }
    __device__ __forceinline__ void to(float *E, int lde) {
        rows([&](int, int r, float4 &q) { *(float4 *)(E + (int64_t)r * lde + col) = q; });
    }
};

/* Columns per block: the most for which every multiprocessor still gets a block, because a block
 * reads M once for all of its columns. K > 128 has at most 16: 32 columns need more than 64 KB. */
static inline int block_columns(int chains, int K, int width) {
    return width % 32 == 0 && K <= 128 && chains * (width / 32) >= 100 ? 32
           : width % 16 == 0 && chains * (width / 16) >= 100           ? 16
                                                                       : 8;
}

/* A kernel of such chains, by columns of a block and most rows. */
template <class A> struct ByColumns { void (*of[5])(int HV, int K, int V, A a); };
#define BY_COLUMNS(k)                                                \
    {                                                                \
        { k<32, 128>, k<16, 128>, k<8, 128>, k<16, 256>, k<8, 256> } \
    }

/* So many chains over `width` columns, mv of them a block. */
template <class A>
static dp_status over_columns(const Call &c, const char *name, const ByColumns<A> &kernels,
                              int chains, int width, int mv, const A &a) {
    static const int bytes[] = {Columns<32, 128>::BYTES, Columns<16, 128>::BYTES,
                                Columns<8, 128>::BYTES, Columns<16, 256>::BYTES,
                                Columns<8, 256>::BYTES};
    const Dims &d = c.p->d;
    const int i = (mv == 32 ? 0 : mv == 16 ? 1 : 2) + (d.K > 128 ? 2 : 0);
    auto kernel = kernels.of[i];
    CK(c.e, allow_shared(kernel, bytes[i]));
    const cudaLaunchConfig_t blocks = {dim3((unsigned)chains * (width / mv)), dim3(THREADS),
                                       (size_t)bytes[i], c.s};
    cudaLaunchKernelEx(&blocks, kernel, d.HV, d.K, d.V, a);
    CK_LAUNCH(c.e, name);
    return DP_OK;
}

#endif
