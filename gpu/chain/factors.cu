/* gpu/chain/factors.cu - M of a rank as a chain of chunk factors in a chosen number format (math.md
 * j.1), to be judged, not to be fast. Also the M of two elements, of a scan, in that format.
 *
 * Products on tensor cores follow the operands' format exactly:
 *   tf32     cvt.rna (nearest, ties away)
 *   tf32rz   passes the raw fp32 words to the mma, which drops the low 13 bits
 *   tf32x3   adds lo*hi + hi*lo + hi*hi
 *   fp32     IEEE FMA on the CUDA cores
 * The accumulator inside a tensor core rounds toward zero. Every k-step therefore starts from zero
 * and is added on the CUDA cores, so that only a step's own 8 or 16 products are truncated.
 *
 * k_factor has one phase and no shared memory. k_chain, 32 columns of M a block: P <- F_j P for one
 * factor after the other. Shared memory holds P and, after a barrier, the product that replaces it
 * (Q). */
#include "chain/chain.cuh"
#include "fault.cuh"
#include "instructions.cuh"
#include "plan/paths.cuh"
#include "plan/shared.cuh"
#include "plan/values.cuh"

/* The words that an mma returns are rounded toward zero. The mean relative loss per product shrinks
 * a 3xTF32 chain linearly. Measured on an H200, reflect K = 32 and 128: 3.5e-8 a factor (3.6e-5
 * after 1,024), where IEEE FMA keeps 3.2e-6 and 6.5e-6. (Truncation of a 24-bit word loses 0.67 *
 * 2^-24 = 4.0e-8 in the mean; the hardware does slightly better.) Giving the mean back removes the
 * drift.
 */
#define RZ_LOSS 3.5e-8f
#define CB 32 /* columns of M per block */
#define THREADS 256

/* One k-step of 8: fragments of A = M_c (global, row stride K) and of P (shared, row stride ps),
 * added to c. */
template <int F>
__device__ __forceinline__ void step8(float c[4], const float ra[4], const float rb[2]) {
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

/* Out (16 rows from r0, 8 columns from n0) of M_c * P for one warp; M_c in rows of ld words, P of
 * ps. */
template <int F>
__device__ void tile_product(const float *Mc, int ld, const float *P, int ps, int K, int r0, int n0,
                             float c[4]) {
    int lane = threadIdx.x % 32, gr = lane / 4, tc = lane % 4;
    const float *A0 = Mc + (int64_t)(r0 + gr) * ld, *A1 = A0 + 8 * ld;
    c[0] = c[1] = c[2] = c[3] = 0;
    if (F == DP_BF16) {
        for (int k = 2 * tc; k < K; k += 16) {
            uint32_t a[4] = {pack2(A0[k], A0[k + 1]), pack2(A1[k], A1[k + 1]),
                             pack2(A0[k + 8], A0[k + 9]), pack2(A1[k + 8], A1[k + 9])};
            const float *p = P + k * ps + n0 + gr;
            uint32_t b[2] = {pack2(p[0], p[ps]), pack2(p[8 * ps], p[9 * ps])};
            float x[4] = {0, 0, 0, 0};
            mma(x, a, b[0], b[1]);
            add4(c, x);
        }
    } else {
        for (int k = tc; k < K; k += 8) {
            float a[4] = {A0[k], A1[k], A0[k + 4], A1[k + 4]};
            float b[2] = {P[k * ps + n0 + gr], P[(k + 4) * ps + n0 + gr]};
            step8<F>(c, a, b);
        }
    }
}

/* Words of a column of M_c P by IEEE FMA, in the order of k. Rows wait for M_c together. */
#define ROWS_AT_ONCE 16
__device__ __forceinline__ void rows_of_product(const float *Mc, int ld, const float *P, int ps,
                                                int K, float *Q) {
    float sum[ROWS_AT_ONCE] = {};
#pragma unroll 2
    for (int k = 0; k < K; k += 4) {
        float m[ROWS_AT_ONCE][4];
#pragma unroll
        for (int i = 0; i < ROWS_AT_ONCE; i++)
            *(float4 *)m[i] = *(const float4 *)(Mc + (int64_t)i * ld + k);
#pragma unroll
        for (int j = 0; j < 4; j++) {
            const float p = P[(k + j) * ps];
#pragma unroll
            for (int i = 0; i < ROWS_AT_ONCE; i++)
                sum[i] = fmaf(m[i][j], p, sum[i]);
        }
    }
#pragma unroll
    for (int i = 0; i < ROWS_AT_ONCE; i++)
        Q[i * ps] = sum[i];
}

/* Does a product of F_0 with I leave F_0: then it is taken as it is. (By 3xTF32 it loses nothing
 * that a mean could give back.) Formats of fewer bits round it. */
template <int F> __device__ constexpr bool keeps_first() { return F == DP_FP32 || F == DP_TF32X3; }

/* K x K matrices of one head after the other. */
struct Heads {
    const float *p;
    int ld;         /* words in a row */
    int64_t stride; /* to the next head */
};

/* n factors of all heads, `step` apart, and the M that they are multiplied into. */
struct Chain {
    dp_format format;
    int heads, K, n;
    Heads factors;
    int64_t step;
    Heads from; /* what they are multiplied by; NULL: the identity */
    float *M;   /* may be `from` */
    int ld;
    int64_t stride;
    int ps; /* row stride of P in shared memory */
};

/* CB columns of M = F_(n-1) ... F_0 from. Two buffers of P in shared memory. */
template <int F> __global__ void __launch_bounds__(THREADS) k_chain(Chain a) {
    extern __shared__ float smem[];
    int K = a.K, ps = a.ps, blocks = (K + CB - 1) / CB, col0 = blockIdx.x % blocks * CB,
        hv = blockIdx.x / blocks, cols = min(CB, K - col0);
    int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    float *P = smem, *Q = smem + K * ps;
    bool taken = !a.from.p && keeps_first<F>(), identity = !a.from.p && !taken;
    Heads first = taken ? a.factors : a.from;
    const float *from = first.p + hv * first.stride + col0;
    for (int x = threadIdx.x; x < K * CB; x += THREADS) {
        int r = x / CB, c = x % CB;
        P[r * ps + c] = identity   ? (float)(r == col0 + c)
                        : c < cols ? from[(int64_t)r * first.ld + c]
                                   : 0.f;
    }
    __syncthreads();
    int ld = a.factors.ld;
    for (int j = taken; j < a.n; j++) {
        const float *Mc = a.factors.p + j * a.step + hv * a.factors.stride;
        if (F == DP_FP32) {
            for (int r = warp * ROWS_AT_ONCE; r < K; r += THREADS / 32 * ROWS_AT_ONCE)
                rows_of_product(Mc + (int64_t)r * ld, ld, P + lane, ps, K, Q + r * ps + lane);
        } else {
            for (int m = warp; m < K / 16 * (CB / 8); m += THREADS / 32) {
                float c[4];
                int r = m / (CB / 8) * 16 + lane / 4, col = m % (CB / 8) * 8 + lane % 4 * 2;
                tile_product<F>(Mc, ld, P, ps, K, m / (CB / 8) * 16, m % (CB / 8) * 8, c);
                Q[r * ps + col] = c[0];
                Q[r * ps + col + 1] = c[1];
                Q[(r + 8) * ps + col] = c[2];
                Q[(r + 8) * ps + col + 1] = c[3];
            }
        }
        __syncthreads();
        float *swap = P;
        P = Q;
        Q = swap;
    }
    float *to = a.M + hv * a.stride + col0;
    for (int x = threadIdx.x; x < K * cols; x += THREADS)
        to[(int64_t)(x / cols) * a.ld + x % cols] = P[x / cols * ps + x % cols];
}

/* Rows of CB + 8 words, whose fragments hit 32 banks, where a device of 64 KB has room for two
 * buffers of them. */
static int row_stride(int K) { return 2 * K * (CB + 8) * 4 <= 64 << 10 ? CB + 8 : CB; }

static dp_status launch_chain(Chain x, cudaStream_t s, dp_err *e) {
    dp_format f = x.format;
    void (*kernel)(Chain) = f == DP_FP32     ? k_chain<DP_FP32>
                            : f == DP_TF32X3 ? k_chain<DP_TF32X3>
                            : f == DP_TF32   ? k_chain<DP_TF32>
                            : f == DP_TF32RZ ? k_chain<DP_TF32RZ>
                                             : k_chain<DP_BF16>;
    x.ps = row_stride(x.K);
    size_t bytes = 2 * (size_t)x.K * x.ps * 4;
    CK(e, allow_shared(kernel, (int)bytes));
    kernel<<<(unsigned)x.heads *((x.K + CB - 1) / CB), THREADS, bytes, s>>>(x);
    CK_LAUNCH(e, "k_chain");
    return DP_OK;
}

/* M_c = diag(eC) - kg' w of chunks c0, c0 + step .. (one block per chunk, head and 16 rows), fp32
 * sums over exact operands. With kg and w exchanged it makes M_c', the adjoint's factors. */
template <class T, int LAYOUT>
__global__ void k_factor(Dims d, int c0, int step, const T *kg, const T *w, const float *eC,
                         float *Mc) {
    int strips = d.K / 16, strip = blockIdx.x % strips, hv = blockIdx.x / strips % d.HV,
        j = blockIdx.x / strips / d.HV;
    int64_t tile = (int64_t)(c0 + step * j) * d.HV + hv;
    for (int x = threadIdx.x; x < 16 * d.K; x += blockDim.x) {
        int row = strip * 16 + x / d.K, col = x % d.K;
        float sum = 0.f;
        for (int i = 0; i < d.n; i++)
            sum = fmaf((float)kg[tile * d.n * d.K + tile_at(LAYOUT, i, row, d.K)],
                       (float)w[tile * d.n * d.K + tile_at(LAYOUT, i, col, d.K)], sum);
        Mc[((int64_t)(j * d.HV + hv) * d.K + row) * d.K + col] =
            (row == col ? eC[tile * d.K + row] : 0.f) - sum;
    }
}

/* The product of the factors of n chunks from c0 on, `step` apart; trans: of their transposes. */
struct Run {
    int c0, n, step, trans;
};

/* That product into columns of row stride ld. */
static dp_status chain_of(const Call &c, Run r, float *M, int ld) {
    dpg_plan *p = c.p;
    const Dims &d = p->d;
    int left = r.trans ? B_W : B_KG, right = r.trans ? B_KG : B_W;
    float *Mc = at<float>(c, B_MC), *eC = at<float>(c, B_EC);
    int64_t stride = (int64_t)d.HV * d.K * d.K;
    for (int i = 0; i < r.n; i += p->mc_batch) {
        int m = r.n - i < p->mc_batch ? r.n - i : p->mc_batch, c0 = r.c0 + r.step * i;
        unsigned grid = (unsigned)m * d.HV * (d.K / 16);
        if (p->buf[B_W].is_bf16)
            k_factor<bf16, ROWS><<<grid, THREADS, 0, c.s>>>(d, c0, r.step, at<bf16>(c, left),
                                                            at<bf16>(c, right), eC, Mc);
        else
            k_factor<float, PLAIN><<<grid, THREADS, 0, c.s>>>(d, c0, r.step, at<float>(c, left),
                                                              at<float>(c, right), eC, Mc);
        CK_LAUNCH(c.e, "k_factor");
        Heads into = {i ? M : NULL, ld, (int64_t)d.K * ld};
        /* a dM beside a rounded M: no factor is rounded once more */
        const dp_format f = pre_is_rounded(p) ? DP_FP32 : p->opt.chain;
        Chain x = {f,      d.HV, d.K, m,  {Mc, d.K, (int64_t)d.K * d.K},
                   stride, into, M,   ld, into.stride};
        TRY(launch_chain(x, c.s, c.e));
    }
    return DP_OK;
}

dp_status chain_product(const Call &c, dp_format f, const float *later, const float *earlier,
                        float *to, int row) {
    const Dims &d = c.p->d;
    const int64_t stride = (int64_t)d.K * row;
    Chain x = {
        f,        d.HV, d.K,   1, {later + d.V, row, stride}, 0, {earlier + d.V, row, stride},
        to + d.V, row,  stride};
    return launch_chain(x, c.s, c.e);
}

dp_status chain_pre_m(const Call &c) {
    const Dims &d = c.p->d;
    Seq q = local_sequence(c.p, d.nseq - 1);
    return chain_of(c, Run{q.c0, q.c1 - q.c0, 1, 0}, at<float>(c, B_HM) + d.V, d.V + d.K);
}

dp_status chain_pre_dm(const Call &c, float *dM, int ld) {
    Seq q = local_sequence(c.p, 0);
    return chain_of(c, Run{q.c1 - 1, q.c1 - q.c0, -1, 1}, dM, ld);
}

/* The parts whose M can matter. */
dp_status chain_links_m(const Call &c) {
    const dpg_plan *p = c.p;
    const Dims &d = p->d;
    for (int i = 0; i < p->nlink; i++) {
        Seq q = p->seqs_h[p->links_h[i].last];
        float *hm = at<float>(c, B_HM) + (int64_t)i * d.HV * d.K * (d.V + d.K);
        if (link_needs_m(p->links_h[i]))
            TRY(chain_of(c, Run{q.c0, q.c1 - q.c0, 1, 0}, hm + d.V, d.V + d.K));
    }
    return DP_OK;
}

dp_status chain_links_dm(const Call &c) {
    const dpg_plan *p = c.p;
    const Dims &d = p->d;
    int row = dh_row(p);
    for (int i = 0; i < p->nlink; i++) {
        Seq q = p->seqs_h[p->links_h[i].first];
        float *dhm = at<float>(c, B_DHM) + (int64_t)i * d.HV * d.K * row;
        if (link_needs_m(p->links_h[i]))
            TRY(chain_of(c, Run{q.c1 - 1, q.c1 - q.c0, -1, 1}, dhm + d.V, row));
    }
    return DP_OK;
}

dp_status dpg_chain(const float *factors, int64_t n, int K, dp_format f, float *out, void *stream,
                    dp_err *e) {
    if (K < 16 || K > 256 || K % 16 || n < 1 || n > INT32_MAX)
        return dpg_fail(e, DP_EINPUT, "dpg_chain: K = %d, n = %lld", K, (long long)n);
    Chain x = {f, 1, K, (int)n, {factors, K, 0}, (int64_t)K * K, {NULL, K, 0}, out, K, 0};
    return launch_chain(x, (cudaStream_t)stream, e);
}
