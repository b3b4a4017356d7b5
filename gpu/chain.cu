/* gpu/chain.cu - M of a rank as a chain of chunk factors in a chosen number format (math.md j.1), and the merge over ranks (g.1)
 * and segments.
 *
 * Products on tensor cores follow the operands' format exactly: tf32 through cvt.rna (nearest, ties away), tf32rz hands the raw fp32
 * words to the mma, which drops the low 13 bits; tf32x3 adds lo*hi + hi*lo + hi*hi. fp32 is IEEE FMA on the CUDA cores.
 * The accumulator inside a tensor core rounds toward zero; every k-step therefore starts from zero and is added on the CUDA cores,
 * so that only a step's own 8 or 16 products see it. */
#include "fault.cuh"
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

/* ---- elements (M, H) merged over ranks ------------------------------------------------------------------ */

/* A K x K matrix of row stride ld, or (flip) its transpose. */
struct Matrix { const float *p; int ld, flip; };

/* A chain of products over MV columns: P <- M P + add for one M after the other, fp32 FMA, sums in the order of k. M (K x K, row stride ld) comes in panels
 * of PK columns, the next one on its way through registers while this one is used. A thread makes 4 columns of NR rows, APART apart. */
template <int MV, int KMAX> struct Columns {
    static const int PK = KMAX == 256 || MV == 32 ? 32 : 64, PKS = PK + 4, APART = THREADS * 4 / MV, NR = KMAX / APART, LOADS = KMAX * PK / 4 / THREADS;
    static const int BYTES = (2 * KMAX * PKS + KMAX * MV) * 4;
    float *panels, *P;
    int K, ld, col, r0, now, flipped;                    /* now: 0 or 1, the panel to fill; flipped: how `ahead` was fetched */
    float4 ahead[LOADS];

    __device__ __forceinline__ Columns(float *smem, int K_, int ld_)
        : panels(smem), P(smem + 2 * KMAX * PKS), K(K_), ld(ld_), col(threadIdx.x % (MV / 4) * 4), r0(threadIdx.x / (MV / 4)), now(0), flipped(0)
    {
    }
    /* The thread's part of P: f(i, row, 4 columns). */
    template <class F> __device__ __forceinline__ void rows(F f)
    {
#pragma unroll
        for (int i = 0; i < NR; i++)
            if (r0 + i * APART < K)
                f(i, r0 + i * APART, *(float4 *)(P + (r0 + i * APART) * MV + col));
    }
    /* Load x of a panel: 4 words of a row r from column k on; of a transpose, 4 rows of a column, so that a warp reads 8 x 16 words and writes them apart. */
    __device__ __forceinline__ void place(int x, int &r, int &k)
    {
        r = flipped ? x / 32 % (KMAX / 16) * 16 + x % 4 * 4 : x / (PK / 4);
        k = flipped ? x / 32 / (KMAX / 16) * 8 + x / 4 % 8 : x % (PK / 4) * 4;
    }
    __device__ __forceinline__ void fetch(Matrix M, int k0)
    {
        flipped = M.flip;
#pragma unroll
        for (int i = 0; i < LOADS; i++) {
            int r, k;
            place(threadIdx.x + i * THREADS, r, k);
            if (r < K && k0 + k < K)
                ahead[i] = *(const float4 *)(M.p + (flipped ? (int64_t)(k0 + k) * M.ld + r : (int64_t)r * M.ld + k0 + k));
        }
    }
    __device__ __forceinline__ void fetch(const float *M, int k0) { fetch(Matrix{M, ld, 0}, k0); }
    __device__ __forceinline__ void put()
    {
#pragma unroll
        for (int i = 0; i < LOADS; i++) {
            int r, k;
            place(threadIdx.x + i * THREADS, r, k);
            float *to = panels + now * KMAX * PKS + r * PKS + k;
            if (r < K && flipped)
                to[0] = ahead[i].x, to[PKS] = ahead[i].y, to[2 * PKS] = ahead[i].z, to[3 * PKS] = ahead[i].w;
            else if (r < K)
                *(float4 *)to = ahead[i];
        }
    }
    /* P <- M P + add; the first panel of M has been fetched, on return that of `next` is (NULL: none follows). Begins and ends with a barrier. */
    __device__ __forceinline__ void apply(const float *M, const float *add, const float *next) { apply(Matrix{M, ld, 0}, add, ld, Matrix{next, ld, 0}); }
    __device__ __forceinline__ void apply(Matrix M, const float *add, int lda, Matrix next)
    {
        float sum[NR][4] = {};
        float4 h[NR] = {};
        if (add)
            rows([&](int i, int r, float4 &) { h[i] = *(const float4 *)(add + (int64_t)r * lda + col); });
        for (int k0 = 0; k0 < K; k0 += PK) {
            put();
            if (!FAULT(MERGE_NO_SYNC))
                __syncthreads();
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
        rows([&](int i, int, float4 &q) { q = make_float4(sum[i][0] + h[i].x, sum[i][1] + h[i].y, sum[i][2] + h[i].z, sum[i][3] + h[i].w); });
        __syncthreads();
    }
    __device__ __forceinline__ void from(const float *E) { from(E, ld); }
    __device__ __forceinline__ void from(const float *E, int lde)
    {
        rows([&](int, int r, float4 &q) { q = *(const float4 *)(E + (int64_t)r * lde + col); });
    }
    __device__ __forceinline__ void to(float *E, int lde)
    {
        rows([&](int, int r, float4 &q) { *(float4 *)(E + (int64_t)r * lde + col) = q; });
    }
};

struct MergeArgs {
    const float *hm;                                     /* elements of the ranks */
    int from, to;                                        /* ranks [from, to) precede */
    float *sin;                                          /* [HV][K][V] */
};

/* S = 0; for ranks from .. to-1, farthest first: S <- M_j S + H_j; S is S_in. Block: one head, MV columns; fp32 FMA whatever the chain. The first product,
 * of zero, is left out. */
template <int MV, int KMAX> __global__ void __launch_bounds__(THREADS, MV == 32 && KMAX == 128 ? 2 : 1) k_merge(int HV, int K, int V, MergeArgs a)
{
    extern __shared__ float smem[];
    int hv = blockIdx.x / (V / MV), v0 = blockIdx.x % (V / MV) * MV, row = V + K, ranks = a.to - a.from;
    Columns<MV, KMAX> c(smem, K, row);
    auto element = [&](int j) { return a.hm + ((int64_t)(FAULT(MERGE_NEAREST) ? a.to - 1 - j : a.from + j) * HV + hv) * K * row; };
    auto matrix = [&](int j) { return j < ranks ? element(j) + V : NULL; };
    c.rows([](int, int, float4 &q) { q = make_float4(0.f, 0.f, 0.f, 0.f); });
    if (ranks > 0)
        c.from(element(0) + v0);
    if (ranks > 1)
        c.fetch(matrix(1), 0);
    for (int j = 1; j < ranks; j++)
        c.apply(element(j) + V, element(j) + v0, matrix(j + 1));
    if (!(FAULT(MERGE_HALF) && v0 + c.col >= V / 2))
        c.to(a.sin + (int64_t)hv * K * V + v0, V);
}

/* Columns per block: as many as there are if every multiprocessor still gets a block, because what a block reads of M serves all of its columns. */
static int columns(int HV, int width)
{
    return width % 32 == 0 && HV * (width / 32) >= 100 ? 32 : width % 16 == 0 && HV * (width / 16) >= 100 ? 16 : 8;
}

template <int MV, int KMAX> static dp_status merge(dpg_plan *p, void *ws, cudaStream_t s, dp_err *e)
{
    const Dims &d = p->d;
    MergeArgs a = {at<float>(p, ws, B_HMALL), p->rank - p->pre, p->rank, at<float>(p, ws, B_SIN)};
    int bytes = Columns<MV, KMAX>::BYTES;
    CK(e, cudaFuncSetAttribute(k_merge<MV, KMAX>, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes));
    k_merge<MV, KMAX><<<(unsigned)d.HV * (d.V / MV), THREADS, bytes, s>>>(d.HV, d.K, d.V, a);
    CK_LAUNCH(e, "k_merge");
    return DP_OK;
}

template <int KMAX> static dp_status merge_by(dpg_plan *p, void *ws, cudaStream_t s, dp_err *e)
{
    int mv = columns(p->d.HV, p->d.V);
    return mv == 32 ? merge<32, KMAX>(p, ws, s, e) : mv == 16 ? merge<16, KMAX>(p, ws, s, e) : merge<8, KMAX>(p, ws, s, e);
}

/* ---- segments (augmented chain, K and V in {64, 128}) ------------------------------------------------------------------------------------------- */

struct SegArgs {
    const float *seg, *hm;                               /* elements of this rank's segments; of the ranks */
    float *pre, *own, *sin;                              /* elements of the segments up to i, i >= 1, of all of them; initial states */
    int HV, V, nseg, steps, whole;
    int from, to, groups;                                /* ranks [from, to) precede */
    RankWindow w;                                        /* states come by it, or merges are made of gathered elements */
    dpg_marks marks;
    int pass, kept;                                      /* w: the state goes on to the next rank; M of so many later ranks lie in the window */
};

/* A product of K x K by K x 32 after the other, in 3xTF32: P <- M P + add. A warp owns 16 rows of M, which nobody else reads, so that they come straight into
 * its registers, those of the next product behind this one's; P is kept split, (hi, lo) of rows 2 k and 2 k + 1 side by side. The k-steps
 * take channels in the order in which a lane's float4 holds them. The leading products of 16 channels add up in the tensor core and are then added in fp32 (of
 * 64: 6.6e-7 from fp64 after 6 products where this is 2.7e-7); the mean loss is not given back: over so few products it does not matter, and exact sums stay exact. */
template <int K> struct Panel {
    static const int PITCH = 33, AHEAD = 2;              /* 16 columns of M each */
    float4 *P;
    int row, lane, gr, tc, r0;                           /* words in a row of an element, V + K */
    float4 ahead[2][AHEAD];

    __device__ __forceinline__ Panel(float4 *P_, int row_) : P(P_), row(row_), lane(threadIdx.x % 32), gr(lane / 4), tc(lane % 4), r0(threadIdx.x / 32 * 16 + gr) {}
    /* The lane's words of a panel, row stride ld: f(n-tile, row half, 2 columns). */
    template <class F> static __device__ __forceinline__ void words(F f)
    {
#pragma unroll
        for (int n = 0; n < 4; n++)
#pragma unroll
            for (int h = 0; h < 2; h++)
                f(n, h);
    }
    __device__ __forceinline__ int64_t place(int n, int h, int ld) { return (int64_t)(r0 + 8 * h) * ld + n * 8 + 2 * tc; }
    __device__ __forceinline__ void load(float c[4][4], const float *E, int ld)
    {
        words([&](int n, int h) {
            float2 x = *(const float2 *)(E + place(n, h, ld));
            c[n][2 * h] = x.x, c[n][2 * h + 1] = x.y;
        });
    }
    __device__ __forceinline__ void store(const float c[4][4], float *E, int ld)
    {
        words([&](int n, int h) { *(float2 *)(E + place(n, h, ld)) = make_float2(c[n][2 * h], c[n][2 * h + 1]); });
    }
    __device__ __forceinline__ void fetch(const float *M, int j, int slot)
    {
#pragma unroll
        for (int h = 0; h < 2; h++)
            ahead[h][slot] = *(const float4 *)(M + (int64_t)(r0 + 8 * h) * row + 16 * j + 4 * tc);
    }
    /* The first columns of the warp's rows of M. */
    __device__ __forceinline__ void begin(const float *M)
    {
#pragma unroll
        for (int j = 0; j < AHEAD; j++)
            fetch(M, j, j);
    }
    /* P <- c, between barriers. */
    __device__ __forceinline__ void put(const float c[4][4])
    {
        if (!FAULT(MERGE_NO_SYNC))
            __syncthreads();
        words([&](int n, int h) {
            int r = r0 + 8 * h;
#pragma unroll
            for (int e = 0; e < 2; e++) {
                float x = c[n][2 * h + e], hi = tf32_rna(x);
                ((float2 *)(P + r / 2 * PITCH + n * 8 + 2 * tc + e))[r % 2] = make_float2(hi, tf32_rna(x - hi));
            }
        });
        __syncthreads();
    }
    /* One k-step into z and lo; products that wait for each other lie as far apart as they can. */
    __device__ __forceinline__ void step(float z[4][4], float lo[4][4], const float x[2][4], int s, const float4 *p0)
    {
        float a[4], al[4];
        float4 p[4];
#pragma unroll
        for (int n = 0; n < 4; n++)
            p[n] = p0[n * 8];
#pragma unroll
        for (int i = 0; i < 4; i++) {
            float y = x[i % 2][2 * s + i / 2];
            a[i] = tf32_rna(y), al[i] = tf32_rna(y - a[i]);
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
    /* c = M P + add; M has been begun, on return `next` has (NULL: none follows). */
    __device__ __forceinline__ void product(float c[4][4], const float *M, const float *add, const float *next)
    {
        float lo[4][4] = {};
        if (add)
            load(c, add, row);
        else
            words([&](int n, int h) { c[n][2 * h] = c[n][2 * h + 1] = 0.f; });
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

/* A block's K x 32 words into the windows of ranks [first, last]: 128 bytes a row of ld words, from a tile in shared memory, then the forward's number. to, number: (window) of head and columns. */
template <int K, class To, class Number> __device__ __forceinline__ void push(const RankWindow &w, int first, int last, float *tile, Panel<K> &p, const float c[4][4], int ld, To to, Number number)
{
    const int LD = 36;
    __syncthreads();
    p.store(c, tile, LD);
    __syncthreads();
    for (int r = first; r <= last; r++)
        for (int x = threadIdx.x; x < K * 8; x += 2 * K)
            *(float4 *)(to(w.peer[r]) + (int64_t)(x / 8) * ld + x % 8 * 4) = *(const float4 *)(tile + x / 8 * LD + x % 8 * 4);
    __syncthreads();
    if (threadIdx.x == 0) {
        __threadfence_system();
        for (int r = first; r <= last; r++)
            *(volatile uint32_t *)number(w.peer[r]) = w.n;
    }
}

/* States into the window of the next rank. */
template <int K> __device__ __forceinline__ void push_state(const RankWindow &w, float *tile, Panel<K> &p, const float c[4][4], int hv, int c0)
{
    push<K>(w, w.rank + 1, w.rank + 1, tile, p, c, w.V, [&](float *x) { return w.s(x) + (int64_t)hv * K * w.V + c0; }, [&](float *x) { return w.s_came(x) + (hv * w.V + c0) / 32; });
}

/* The element of segments 0 .. i, for i = 1 .. steps: where the states of the segments need it, and of all of them, the rank's element. Block: one head, 32
 * columns, of H alone if the segments start from H_0 alone: with windows it goes to the next rank, and M to the earlier ones that keep it for their backward. */
template <int K> __global__ void __launch_bounds__(2 * K, 2) k_compose(SegArgs a)
{
    __shared__ float4 P[K / 2 * Panel<K>::PITCH];
    int V = a.V, row = V + K, blocks = (a.whole ? V : row) / 32, hv = blockIdx.x / blocks, c0 = blockIdx.x % blocks * 32;
    auto at = [&](int i) { return ((int64_t)i * a.HV + hv) * K * row; };
    Panel<K> p(P, row);
    float c[4][4];
    if (a.steps > 0)
        p.begin(a.seg + at(1) + V);
    p.load(c, a.seg + at(0) + c0, row);
    for (int i = 1; i <= a.steps; i++) {
        p.put(c);
        p.product(c, a.seg + at(i) + V, c0 < V ? a.seg + at(i) + c0 : NULL, i < a.steps ? a.seg + at(i + 1) + V : NULL);
        p.store(c, (i < a.nseg - 1 ? a.pre + at(i) : a.own + at(0)) + c0, row);
    }
    if (!a.w.mine || a.steps < a.nseg - 1)
        return;
    if (a.whole && c0 < V && a.w.later) {
        if (threadIdx.x == 0)
            await(a.w.used(a.w.mine, a.w.rank + 1), a.w.n - SLOTS, a.marks.stop);
        push_state<K>(a.w, (float *)P, p, c, hv, c0);
    } else if (c0 >= V && a.w.earlier) {
        for (int r = a.w.rank - a.w.earlier + (int)threadIdx.x; r < a.w.rank; r += 2 * K)
            await(a.w.used(a.w.mine, r), a.w.n - SLOTS, a.marks.stop);
        push<K>(a.w, a.w.rank - a.w.earlier, a.w.rank - 1, (float *)P, p, c, K, [&](float *x) { return a.w.ms(x, a.w.rank) + (int64_t)hv * K * K + c0 - V; },
                [&](float *x) { return a.w.m_came(x, a.w.rank) + (hv * K + c0 - V) / 32; });
    }
}

/* With windows: until the rank's states have come; readers and writers of the watcher's marks and of `used`. */
template <int K> __device__ __forceinline__ void receive(const SegArgs &a, int hv, int c0)
{
    const RankWindow &w = a.w;
    if (blockIdx.x == 0) {
        if (threadIdx.x == 0)
            *a.marks.reached = a.marks.n;
        for (int r = w.rank - 1 + (int)threadIdx.x; r <= w.rank + a.kept; r += 2 * K)
            if (r != w.rank && (r > w.rank || a.from < a.to))
                *(volatile uint32_t *)w.used(w.peer[r], w.rank) = w.n - 1;
    }
    if (threadIdx.x == 0 && a.from < a.to)
        await(w.s_came(w.mine) + (hv * w.V + c0) / 32, w.n, a.marks.stop);
    if (threadIdx.x == 32 && a.pass)
        await(w.used(w.mine, w.rank + 1), w.n - SLOTS, a.marks.stop);
    __threadfence_system();
    __syncthreads();
    if (blockIdx.x == 0 && threadIdx.x == 0)
        *a.marks.ended = a.marks.n;
}

/* S = S_in: for ranks from .. to-1, farthest first, S <- M_j S + H_j; with windows it comes, and M S + H of the rank goes on. The initial state of segment 0 is S, of segment i > 0 M S + H with
 * the element of segments 0 .. i-1. Block: one head, 32 columns, every groups-th segment. */
template <int K> __global__ void __launch_bounds__(2 * K, 2) k_states(SegArgs a)
{
    extern __shared__ float smem[];
    float4 *P = (float4 *)smem;
    float *tile = smem + K / 2 * Panel<K>::PITCH * 4;
    int V = a.V, row = V + K, hv = blockIdx.x / a.groups / (V / 32), c0 = blockIdx.x / a.groups % (V / 32) * 32, first = blockIdx.x % a.groups;
    auto rank = [&](int j) { return a.hm + ((int64_t)(FAULT(MERGE_NEAREST) ? a.to - 1 - (j - a.from) : j) * a.HV + hv) * K * row; };
    auto before = [&](int i) { return (i == 1 ? a.seg : a.pre + (int64_t)(i - 1) * a.HV * K * row) + (int64_t)hv * K * row; };
    auto out = [&](int i) { return a.sin + ((int64_t)i * a.HV + hv) * K * V + c0; };
    int start = first ? first : a.groups, pass = a.pass && !first, merges = a.w.mine ? 0 : max(a.to - a.from - 1, 0);
    int n = merges + pass + (a.whole || start >= a.nseg ? 0 : (a.nseg - 1 - start) / a.groups + 1);
    auto segment = [&](int j) { return start + (j - merges - pass) * a.groups; };
    auto element = [&](int j) { return j < merges ? rank(a.from + 1 + j) : j < merges + pass ? a.own + (int64_t)hv * K * row : before(segment(j)); };
    Panel<K> p(P, row);
    float c[4][4] = {};
    if (n)
        p.begin(element(0) + V);
    if (a.w.mine)
        receive<K>(a, hv, c0);
    if (a.from < a.to && a.w.mine)
        p.load(c, a.w.s(a.w.mine) + (int64_t)hv * K * V + c0, V);
    else if (a.from < a.to)
        p.load(c, rank(a.from) + c0, row);
    for (int j = 0; j <= n; j++) {
        if (j == merges && !first && !(FAULT(MERGE_HALF) && c0 >= V / 2))
            p.store(c, out(0), V);
        if (j == n)
            break;
        if (j <= merges)
            p.put(c);
        p.product(c, element(j) + V, element(j) + c0, j + 1 < n ? element(j + 1) + V : NULL);
        if (j >= merges + pass)
            p.store(c, out(segment(j)), V);
        else if (j >= merges)
            push_state<K>(a.w, tile, p, c, hv, c0);
    }
    for (int i = start; a.whole && i < a.nseg; i += a.groups) {
        p.load(c, before(i) + c0, row);
        p.store(c, out(i), V);
    }
}

static SegArgs seg_args(dpg_plan *p, void *ws)
{
    const Dims &d = p->d;
    SegArgs a = {at<float>(p, ws, p->nseg > 1 ? B_SEG : B_HM), at<float>(p, ws, B_HMALL), at<float>(p, ws, B_PREFIX), at<float>(p, ws, B_HM), at<float>(p, ws, B_SIN), d.HV, d.V, p->nseg,
                 p->nseg - 1 - p->is_last, p->whole, p->rank - p->pre, p->rank, 1, p->window, p->marks, p->window.mine && p->post && !p->whole, (int)p->saved_ms};
    while (a.groups < 4 && a.groups < p->nseg && d.HV * (d.V / 32) * a.groups < (a.w.mine ? 256 : 128))
        a.groups *= 2;
    return a;
}

dp_status chain_compose(dpg_plan *p, void *ws, cudaStream_t s, dp_err *e)
{
    SegArgs a = seg_args(p, ws);
    unsigned grid = (unsigned)p->d.HV * (p->d.V + (a.whole ? 0 : p->d.K)) / 32;
    a.w.n++;                                             /* the forward that has not been entered yet */
    if (a.steps < (a.w.mine && !p->is_last ? 0 : 1))
        return DP_OK;
    if (p->d.K == 64)
        k_compose<64><<<grid, 128, 0, s>>>(a);
    else
        k_compose<128><<<grid, 256, 0, s>>>(a);
    CK_LAUNCH(e, "k_compose");
    return DP_OK;
}

dp_status chain_merge(dpg_plan *p, void *ws, cudaStream_t s, dp_err *e)
{
    if (p->opt.chain_how == DPG_CHAIN_DENSE)
        return p->d.K <= 128 ? merge_by<128>(p, ws, s, e) : merge_by<256>(p, ws, s, e);
    SegArgs a = seg_args(p, ws);
    unsigned grid = (unsigned)p->d.HV * (p->d.V / 32) * a.groups;
    int bytes = p->d.K / 2 * Panel<64>::PITCH * 16 + p->d.K * 36 * 4;
    CK(e, cudaFuncSetAttribute(k_states<128>, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes));
    if (p->d.K == 64)
        k_states<64><<<grid, 128, bytes, s>>>(a);
    else
        k_states<128><<<grid, 256, bytes, s>>>(a);
    CK_LAUNCH(e, "k_states");
    return DP_OK;
}

/* ---- the same for gradients, from the farthest later rank and the last part down ---------------------------------------------------------- */

struct MergeBwdArgs {
    const float *all, *m;                                /* gathered elements; M of ranks rank + 1 .. of the forward, dM = M', or NULL: dM lies in columns V .. of `all` */
    const float *dh, *part_m;                            /* of this rank's parts: dH [parts][HV][K][V]; M from part m_part on */
    int row, rank, far, last_part, m_part, sum;          /* words in a row of `all`; ranks far .. rank + 1 follow; sum: their element alone is wanted */
    float *out;                                          /* [last_part + 1][HV][K][V], the last part first; sum: dH in rows of `row` words */
};

/* dS = 0; for ranks far .. rank+1: dS <- dM_j dS + dH_j; then over the parts: each one's gradient at its end. Block: one head, MV columns; fp32 FMA. The first
 * product of a sum that starts from zero is left out: where nothing follows the rank, dH of its last part starts from the final state's gradient. */
template <int MV, int KMAX> __global__ void __launch_bounds__(THREADS, MV == 32 && KMAX == 128 ? 2 : 1) k_merge_bwd(int HV, int K, int V, MergeBwdArgs a)
{
    extern __shared__ float smem[];
    int hv = blockIdx.x / (V / MV), v0 = blockIdx.x % (V / MV) * MV, ranks = a.far - a.rank, last = ranks + a.last_part + a.sum;
    Columns<MV, KMAX> c(smem, K, a.row);
    auto rank = [&](int j) { return FAULT(MERGE_BWD_NEAREST) ? a.rank + 1 + j : a.far - j; };
    auto part = [&](int j) { return a.last_part - (j - ranks); };
    auto stride = [&](int j) { return j < ranks ? a.row : V; };
    auto dh = [&](int j) { return (j < ranks ? a.all + ((int64_t)rank(j) * HV + hv) * K * a.row : a.dh + ((int64_t)part(j) * HV + hv) * K * V) + v0; };
    auto matrix = [&](int j) {
        if (j >= last)
            return Matrix{NULL, 0, 0};
        if (j >= ranks)
            return Matrix{a.part_m + ((int64_t)(part(j) - a.m_part) * HV + hv) * K * K, K, 1};
        return a.m ? Matrix{a.m + ((int64_t)(rank(j) - a.rank - 1) * HV + hv) * K * K, K, 1} : Matrix{dh(j) - v0 + V, a.row, 0};
    };
    c.rows([](int, int, float4 &q) { q = make_float4(0.f, 0.f, 0.f, 0.f); });
    for (int j = 0; j <= last; j++) {
        if (j >= ranks && !a.sum)
            c.to(a.out + ((int64_t)(j - ranks) * HV + hv) * K * V + v0, V);
        if (j == last)
            break;
        if (j) {
            c.apply(matrix(j), dh(j), stride(j), matrix(j + 1));
        } else {
            c.from(dh(0), stride(0));
            if (matrix(1).p)
                c.fetch(matrix(1), 0);
        }
    }
    if (a.sum)
        c.to(a.out + (int64_t)hv * K * a.row + v0, a.row);
}

template <int MV, int KMAX> static dp_status merge_bwd(const dpg_plan *p, MergeBwdArgs a, cudaStream_t s, dp_err *e)
{
    const Dims &d = p->d;
    int bytes = Columns<MV, KMAX>::BYTES;
    CK(e, cudaFuncSetAttribute(k_merge_bwd<MV, KMAX>, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes));
    k_merge_bwd<MV, KMAX><<<(unsigned)d.HV * (d.V / MV), THREADS, bytes, s>>>(d.HV, d.K, d.V, a);
    CK_LAUNCH(e, "k_merge_bwd");
    return DP_OK;
}

template <int KMAX> static dp_status merge_bwd_by(const dpg_plan *p, MergeBwdArgs a, cudaStream_t s, dp_err *e)
{
    int mv = columns(p->d.HV, p->d.V);
    return mv == 32 ? merge_bwd<32, KMAX>(p, a, s, e) : mv == 16 ? merge_bwd<16, KMAX>(p, a, s, e) : merge_bwd<8, KMAX>(p, a, s, e);
}

static dp_status over_parts(dpg_plan *p, const dpg_tensors *t, int sum, float *out, void *ws, cudaStream_t s, dp_err *e)
{
    MergeBwdArgs a = {at<float>(p, ws, B_DHMALL), p->opt.send_dh_only ? saved_rank_m(p, t) : NULL, at<float>(p, ws, B_SEG), saved_part_m(p, t), dh_row(p), p->rank,
                      sum ? p->rank : p->rank + p->post, p->parts - 1, p->m_part, sum, out};
    return p->d.K <= 128 ? merge_bwd_by<128>(p, a, s, e) : merge_bwd_by<256>(p, a, s, e);
}

dp_status chain_compose_bwd(dpg_plan *p, const dpg_tensors *t, void *ws, cudaStream_t s, dp_err *e) { return over_parts(p, t, 1, at<float>(p, ws, B_DHM), ws, s, e); }
dp_status chain_merge_bwd(dpg_plan *p, const dpg_tensors *t, void *ws, cudaStream_t s, dp_err *e) { return over_parts(p, t, 0, at<float>(p, ws, B_DSOUT), ws, s, e); }
