/* gpu/chain.cu - M of a rank as a chain of chunk factors in a chosen number format (math.md j.1), and the merge over ranks (g.1).
 *
 * Products on tensor cores follow the operands' format exactly: tf32 through cvt.rna (nearest, ties away), tf32rz hands the raw fp32
 * words to the mma, which drops the low 13 bits; tf32x3 adds lo*hi + hi*lo + hi*hi. fp32 is IEEE FMA on the CUDA cores.
 * The accumulator inside a tensor core rounds toward zero; every k-step therefore starts from zero and is added on the CUDA cores,
 * so that only a step's own 8 or 16 products see it. */
#include "internal.cuh"

/* The words an mma returns are rounded toward zero, a mean relative loss per product that shrinks a 3xTF32 chain linearly: measured
 * on an H200, reflect K = 32 and 128, 3.5e-8 a factor (3.6e-5 after 1,024), where IEEE FMA keeps 3.2e-6 and 6.5e-6. (Truncation of a
 * 24-bit word loses 0.67 * 2^-24 = 4.0e-8 in the mean; the hardware does slightly better.) Giving the mean back removes the drift. */
#define RZ_LOSS 3.5e-8f
#define CB 32                                            /* columns of M per block */
#define THREADS 256

__device__ __forceinline__ float tf32_rna(float x)
{
    uint32_t r;
    asm("cvt.rna.tf32.f32 %0, %1;" : "=r"(r) : "f"(x));
    return __uint_as_float(r);
}
__device__ __forceinline__ void mma_tf32(float c[4], const float a[4], const float b[2])
{
    const uint32_t *A = (const uint32_t *)a, *B = (const uint32_t *)b;
    asm("mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3]) : "r"(A[0]), "r"(A[1]), "r"(A[2]), "r"(A[3]), "r"(B[0]), "r"(B[1]));
}
__device__ __forceinline__ void mma_bf16(float c[4], const uint32_t a[4], const uint32_t b[2])
{
    asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3]) : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}
__device__ __forceinline__ uint32_t pack(float lo, float hi)
{
    __nv_bfloat162 x = __floats2bfloat162_rn(lo, hi);
    return *(uint32_t *)&x;
}
__device__ __forceinline__ void add4(float c[4], const float x[4])
{
    for (int i = 0; i < 4; i++)
        c[i] += x[i];
}

/* One k-step of 8: fragments of A = M_c (global, row stride K) and of P (shared, row stride PS), added to c. */
template <int F> __device__ __forceinline__ void step8(float c[4], const float ra[4], const float rb[2])
{
    float a[4], b[2], x[4] = {0, 0, 0, 0};
    for (int i = 0; i < 4; i++)
        a[i] = F == DP_TF32RZ ? ra[i] : tf32_rna(ra[i]);
    for (int i = 0; i < 2; i++)
        b[i] = F == DP_TF32RZ ? rb[i] : tf32_rna(rb[i]);
    mma_tf32(x, a, b);
    if (F == DP_TF32X3) {
        float al[4], bl[2], lo[4] = {0, 0, 0, 0};
        for (int i = 0; i < 4; i++)
            al[i] = tf32_rna(ra[i] - a[i]);
        for (int i = 0; i < 2; i++)
            bl[i] = tf32_rna(rb[i] - b[i]);
        mma_tf32(lo, al, b);
        mma_tf32(lo, a, bl);
        for (int i = 0; i < 4; i++)
            lo[i] = fmaf(x[i], RZ_LOSS, lo[i]);
        add4(c, lo);
    }
    add4(c, x);
}

#define PS (CB + 8)                                      /* row stride of P in shared memory: fragment reads hit 32 banks */

/* Out (16 rows from r0, 8 columns from n0) of M_c * P for one warp. */
template <int F> __device__ void tile_product(const float *Mc, const float *P, int K, int r0, int n0, float c[4])
{
    int lane = threadIdx.x % 32, gr = lane / 4, tc = lane % 4;
    const float *A0 = Mc + (int64_t)(r0 + gr) * K, *A1 = A0 + 8 * K;
    c[0] = c[1] = c[2] = c[3] = 0;
    if (F == DP_BF16) {
        for (int k = 2 * tc; k < K; k += 16) {
            uint32_t a[4] = {pack(A0[k], A0[k + 1]), pack(A1[k], A1[k + 1]), pack(A0[k + 8], A0[k + 9]), pack(A1[k + 8], A1[k + 9])};
            const float *p = P + k * PS + n0 + gr;
            uint32_t b[2] = {pack(p[0], p[PS]), pack(p[8 * PS], p[9 * PS])};
            float x[4] = {0, 0, 0, 0};
            mma_bf16(x, a, b);
            add4(c, x);
        }
    } else {
        for (int k = tc; k < K; k += 8) {
            float a[4] = {A0[k], A1[k], A0[k + 4], A1[k + 4]};
            float b[2] = {P[k * PS + n0 + gr], P[(k + 4) * PS + n0 + gr]};
            step8<F>(c, a, b);
        }
    }
}

/* Multiplies n factors into CB columns of M: M <- F_(n-1) ... F_0 M. Factors: chunk stride `fstride`, head stride K*K.
 * M: row stride ldm, head stride hstride. first: start from the identity. Two buffers of P in shared memory. */
template <int F> __global__ void __launch_bounds__(THREADS) k_chain(int K, int n, const float *factors, int64_t fstride, float *M, int ldm,
                                                                    int64_t hstride, int first)
{
    extern __shared__ float smem[];
    int blocks = (K + CB - 1) / CB, col0 = blockIdx.x % blocks * CB, hv = blockIdx.x / blocks, cols = min(CB, K - col0);
    int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    float *Mh = M + hv * hstride + col0, *P = smem, *Q = smem + K * PS;
    for (int x = threadIdx.x; x < K * CB; x += THREADS) {
        int r = x / CB, c = x % CB;
        P[r * PS + c] = first ? (float)(r == col0 + c) : c < cols ? Mh[(int64_t)r * ldm + c] : 0.f;
    }
    __syncthreads();
    for (int j = 0; j < n; j++) {
        const float *Mc = factors + j * fstride + (int64_t)hv * K * K;
        if (F == DP_FP32) {
            for (int r = warp; r < K; r += THREADS / 32) {
                float sum = 0.f;
                for (int k = 0; k < K; k++)
                    sum = fmaf(Mc[(int64_t)r * K + k], P[k * PS + lane], sum);
                Q[r * PS + lane] = sum;
            }
        } else {
            for (int m = warp; m < K / 16 * (CB / 8); m += THREADS / 32) {
                float c[4];
                int r = m / (CB / 8) * 16 + lane / 4, col = m % (CB / 8) * 8 + lane % 4 * 2;
                tile_product<F>(Mc, P, K, m / (CB / 8) * 16, m % (CB / 8) * 8, c);
                Q[r * PS + col] = c[0];
                Q[r * PS + col + 1] = c[1];
                Q[(r + 8) * PS + col] = c[2];
                Q[(r + 8) * PS + col + 1] = c[3];
            }
        }
        __syncthreads();
        float *swap = P;
        P = Q;
        Q = swap;
    }
    for (int x = threadIdx.x; x < K * cols; x += THREADS)
        Mh[(int64_t)(x / cols) * ldm + x % cols] = P[x / cols * PS + x % cols];
}

static dp_status launch_chain(dp_format f, int heads, int K, int n, const float *factors, int64_t fstride, float *M, int ldm,
                              int64_t hstride, int first, cudaStream_t s, dp_err *e)
{
    void (*kernel)(int, int, const float *, int64_t, float *, int, int64_t, int) =
        f == DP_FP32 ? k_chain<DP_FP32> : f == DP_TF32X3 ? k_chain<DP_TF32X3> : f == DP_TF32 ? k_chain<DP_TF32>
        : f == DP_TF32RZ ? k_chain<DP_TF32RZ> : k_chain<DP_BF16>;
    size_t bytes = 2 * (size_t)K * PS * 4;
    CK(e, cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, (int)bytes));
    kernel<<<(unsigned)heads * ((K + CB - 1) / CB), THREADS, bytes, s>>>(K, n, factors, fstride, M, ldm, hstride, first);
    CK_LAUNCH(e, "k_chain");
    return DP_OK;
}

/* M_c = diag(eC) - kg' w of chunks c0, c0 + step .. (one block per chunk, head and 16 rows), fp32 sums over exact operands. With kg and w
 * exchanged it makes M_c', the adjoint's factors. */
template <class T, int LAYOUT> __global__ void k_factor(Dims d, int c0, int step, const T *kg, const T *w, const float *eC, float *Mc)
{
    int strips = d.K / 16, strip = blockIdx.x % strips, hv = blockIdx.x / strips % d.HV, j = blockIdx.x / strips / d.HV;
    int64_t tile = (int64_t)(c0 + step * j) * d.HV + hv;
    for (int x = threadIdx.x; x < 16 * d.K; x += blockDim.x) {
        int row = strip * 16 + x / d.K, col = x % d.K;
        float sum = 0.f;
        for (int i = 0; i < d.n; i++)
            sum = fmaf((float)kg[tile * d.n * d.K + tile_at(LAYOUT, i, row, d.K)], (float)w[tile * d.n * d.K + tile_at(LAYOUT, i, col, d.K)], sum);
        Mc[((int64_t)(j * d.HV + hv) * d.K + row) * d.K + col] = (row == col ? eC[tile * d.K + row] : 0.f) - sum;
    }
}

/* The product of the factors of chunks c0, c0 + step, .. (n of them) into columns of row stride ld; trans: of their transposes. */
static dp_status chain_of(dpg_plan *p, int c0, int n, int step, int trans, float *M, int ld, void *ws, cudaStream_t s, dp_err *e)
{
    const Dims &d = p->d;
    int left = trans ? B_W : B_KG, right = trans ? B_KG : B_W;
    float *Mc = at<float>(p, ws, B_MC), *eC = at<float>(p, ws, B_EC);
    for (int i = 0; i < n; i += p->mc_batch) {
        int m = n - i < p->mc_batch ? n - i : p->mc_batch;
        unsigned grid = (unsigned)m * d.HV * (d.K / 16);
        if (p->buf[B_W].is_bf16)
            k_factor<bf16, ROWS><<<grid, THREADS, 0, s>>>(d, c0 + step * i, step, at<bf16>(p, ws, left), at<bf16>(p, ws, right), eC, Mc);
        else
            k_factor<float, PLAIN><<<grid, THREADS, 0, s>>>(d, c0 + step * i, step, at<float>(p, ws, left), at<float>(p, ws, right), eC, Mc);
        CK_LAUNCH(e, "k_factor");
        TRY(launch_chain(p->opt.chain, d.HV, d.K, m, Mc, (int64_t)d.HV * d.K * d.K, M, ld, (int64_t)d.K * ld, i == 0, s, e));
    }
    return DP_OK;
}

dp_status chain_pre_m(dpg_plan *p, void *ws, cudaStream_t s, dp_err *e)
{
    Seq q = local_sequence(p, p->d.nseq - 1);
    return chain_of(p, q.c0, q.c1 - q.c0, 1, 0, at<float>(p, ws, B_HM) + p->d.V, p->d.V + p->d.K, ws, s, e);
}

dp_status chain_pre_dm(dpg_plan *p, float *dM, int ld, void *ws, cudaStream_t s, dp_err *e)
{
    Seq q = local_sequence(p, 0);
    return chain_of(p, q.c1 - 1, q.c1 - q.c0, -1, 1, dM, ld, ws, s, e);
}

dp_status dpg_chain(const float *factors, int64_t n, int K, dp_format f, float *out, void *stream, dp_err *e)
{
    if (K < 16 || K > 256 || K % 16 || n < 1 || n > INT32_MAX)
        return dpg_fail(e, DP_EINPUT, "dpg_chain: K = %d, n = %lld", K, (long long)n);
    return launch_chain(f, 1, K, (int)n, factors, (int64_t)K * K, out, K, 0, 1, (cudaStream_t)stream, e);
}

/* ---- elements (M, H): composed over segments, merged over ranks ------------------------------------------------------------------ */

#define MV 16                                            /* columns per block */
#define ROWS_APART 64

/* Q = M P + add: K rows of MV columns; M K x K with row stride ld, add (same stride) may be NULL. fp32 FMA. A thread makes 4 columns of two rows. */
__device__ void apply(const float *M, const float *add, int ld, int K, const float *P, float *Q)
{
    int col = threadIdx.x % 4 * 4;
    for (int r = threadIdx.x / 4; r < K; r += 2 * ROWS_APART) {
        int r1 = r + ROWS_APART < K ? r + ROWS_APART : r;
        const float *m0 = M + (int64_t)r * ld, *m1 = M + (int64_t)r1 * ld;
        float a[4] = {0, 0, 0, 0}, b[4] = {0, 0, 0, 0};
#pragma unroll 4
        for (int k = 0; k < K; k += 4) {
            float x[4], y[4], p[4];
            *(float4 *)x = *(const float4 *)(m0 + k), *(float4 *)y = *(const float4 *)(m1 + k);
#pragma unroll
            for (int i = 0; i < 4; i++) {
                *(float4 *)p = *(const float4 *)(P + (k + i) * MV + col);
#pragma unroll
                for (int j = 0; j < 4; j++)
                    a[j] = fmaf(x[i], p[j], a[j]), b[j] = fmaf(y[i], p[j], b[j]);
            }
        }
#pragma unroll
        for (int j = 0; j < 4; j++) {
            Q[r * MV + col + j] = a[j] + (add ? add[(int64_t)r * ld + col + j] : 0.f);
            Q[r1 * MV + col + j] = b[j] + (add ? add[(int64_t)r1 * ld + col + j] : 0.f);
        }
    }
}

__device__ void columns_in(float *P, const float *from, int ld, int K)
{
    for (int x = threadIdx.x; x < K * MV; x += THREADS)
        P[x] = from[(int64_t)(x / MV) * ld + x % MV];
}

__device__ void columns_out(float *to, int ld, const float *P, int K)
{
    for (int x = threadIdx.x; x < K * MV; x += THREADS)
        to[(int64_t)(x / MV) * ld + x % MV] = P[x];
}

__device__ __forceinline__ void swap(float *&P, float *&Q)
{
    float *p = P;
    P = Q;
    Q = p;
}

/* Elements of nseg consecutive segments to one: columns of H, then of M if `blocks` reaches them. Block: one head, MV columns. */
__global__ void __launch_bounds__(THREADS) k_compose(int HV, int K, int V, const float *seg, int nseg, int blocks, float *hm)
{
    extern __shared__ float smem[];
    int hv = blockIdx.x / blocks, c0 = blockIdx.x % blocks * MV, row = V + K;
    float *P = smem, *Q = smem + K * MV;
    columns_in(P, seg + (int64_t)hv * K * row + c0, row, K);
    for (int s = 1; s < nseg; s++) {
        const float *E = seg + ((int64_t)s * HV + hv) * K * row;
        __syncthreads();
        apply(E + V, c0 < V ? E + c0 : NULL, row, K, P, Q);
        swap(P, Q);
    }
    __syncthreads();
    columns_out(hm + (int64_t)hv * K * row + c0, row, P, K);
}

dp_status chain_compose(dpg_plan *p, void *ws, cudaStream_t s, dp_err *e)
{
    const Dims &d = p->d;
    int blocks = (d.V + (p->needs_m ? d.K : 0)) / MV;
    k_compose<<<(unsigned)d.HV * blocks, THREADS, 2 * (size_t)d.K * MV * 4, s>>>(d.HV, d.K, d.V, at<float>(p, ws, B_SEG), p->nseg, blocks,
                                                                               at<float>(p, ws, B_HM));
    CK_LAUNCH(e, "k_compose");
    return DP_OK;
}

struct MergeArgs {
    const float *hm, *seg;                               /* elements of the ranks, of this rank's segments */
    int from, to, nseg, whole;                           /* ranks [from, to) precede; whole: the segments start from H_0 alone */
    float *sin;                                          /* [nseg][HV][K][V] */
};

/* S = 0; for ranks from .. to-1, farthest first: S <- M_j S + H_j; S is S_in. Then the same over the segments: each one's initial state.
 * Block: one head, MV columns; fp32 FMA whatever the chain. The first product of a sum that starts from zero is left out. */
__global__ void __launch_bounds__(THREADS) k_merge(int HV, int K, int V, MergeArgs a)
{
    extern __shared__ float smem[];
    int hv = blockIdx.x / (V / MV), v0 = blockIdx.x % (V / MV) * MV, row = V + K, ranks = a.to - a.from;
    float *P = smem, *Q = smem + K * MV;
    for (int x = threadIdx.x; x < K * MV; x += THREADS)
        P[x] = 0.f;
    for (int j = 0; j < ranks + a.nseg; j++) {
        int s = j - ranks;
        const float *E = s < 0 ? a.hm + ((int64_t)(a.from + j) * HV + hv) * K * row : a.seg + ((int64_t)s * HV + hv) * K * row;
        bool zero = j == 0 || (s == 0 && a.whole);
        __syncthreads();
        if (s >= 0)
            columns_out(a.sin + ((int64_t)s * HV + hv) * K * V + v0, V, P, K);
        if (s == a.nseg - 1)
            return;
        if (zero)
            columns_in(Q, E + v0, row, K);
        else
            apply(E + V, E + v0, row, K, P, Q);
        swap(P, Q);
    }
}

dp_status chain_merge(dpg_plan *p, void *ws, cudaStream_t s, dp_err *e)
{
    const Dims &d = p->d;
    MergeArgs a = {at<float>(p, ws, B_HMALL), at<float>(p, ws, B_SEG), p->rank - p->pre, p->rank, p->nseg, p->whole, at<float>(p, ws, B_SIN)};
    k_merge<<<(unsigned)d.HV * (d.V / MV), THREADS, 2 * (size_t)d.K * MV * 4, s>>>(d.HV, d.K, d.V, a);
    CK_LAUNCH(e, "k_merge");
    return DP_OK;
}
