/* gpu/simple/forward.cu - the forward as plainly as CUDA allows: one block per tile (or per state
 * slice), fp32 FMA, no tensor cores.
 *
 * The readable second witness for the fast path, and the only path for general K, V, R. With base
 * fp32 nothing is rounded below fp32; with base bf16 rif() rounds exactly what FLA stores in bf16
 * (math.md f, last paragraph). Sums run in a fixed order.
 *
 *   k_prepare   gates, beta; norms of q and k        no shared memory, nor in the next three
 *   k_pairs     A, L, Aqk
 *   k_solve     columns of T; then to their place
 *   k_wy        w, u; kg, qg
 *   k_state     a chunk: X; barrier; S; barrier      16 columns of S and X
 *   k_output    o                                    none */
#include "fault.cuh"
#include "plan/paths.cuh"
#include "plan/values.cuh"
#include "simple/simple.cuh"

#define THREADS 256

/* gcum, beta, L2-normalised q and k of a tile, eC = exp(gcum at the last valid token). The sum over
 * a chunk runs in fp64 so that only its rounding to fp32 remains (math.md l.12). */
__global__ void k_prepare(Dims d, dpg_tensors t, float *gcum, float *beta, float *qn, float *kn,
                          float *eC) {
    int64_t tile = blockIdx.x;
    int hv = tile % d.HV, h = hv / d.G, warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    Chunk c = d.chunk[tile / d.HV];
    float a = expf(param(t.A_log, hv, d.A_type));
    for (int k = threadIdx.x; k < d.K; k += blockDim.x) {
        int kk = d.Kg == 1 ? 0 : k;
        float bias = param(t.dt_bias, hv * d.Kg + kk, d.bias_type);
        double sum = 0;
        for (int s = 0; s < DP_CHUNK; s++) {
            if (s < c.len + FAULT(TAIL))
                sum += gate_floor(gate_value(
                    d,
                    ldx(t.g, ((c.t0 + s) * d.HV + (FAULT(GATE_HEAD0) ? 0 : hv)) * d.Kg + kk,
                        d.g_bf16),
                    a, bias));
            if (k < d.Kg) gcum[(tile * DP_CHUNK + s) * d.Kg + k] = (float)sum;
        }
        eC[tile * d.K + k] = expf((float)sum);
    }
    for (int row = threadIdx.x; row < d.n; row += blockDim.x)
        beta[tile * d.n + row] = row / d.R < c.len
                                     ? beta_value(d, ldx(t.beta,
                                                         ((c.t0 + row / d.R) * d.HV + hv) * d.R +
                                                             (FAULT(BETA_KEY) ? 0 : row % d.R),
                                                         d.g_bf16))
                                     : 0.f;
    for (int row = warp; row < d.n + DP_CHUNK; row += THREADS / 32) {
        int isq = row >= d.n, r = isq ? row - d.n : row, s = isq ? r : r / d.R;
        int64_t src =
            isq ? ((c.t0 + s) * d.H + h) * d.K : (((c.t0 + s) * d.H + h) * d.R + r % d.R) * d.K;
        float *dst = isq ? qn + (tile * DP_CHUNK + r) * d.K : kn + (tile * d.n + r) * d.K, ss = 0.f;
        const void *x = isq ? t.q : t.k;
        for (int k = lane; k < d.K && s < c.len; k += 32)
            ss = fmaf(ldx(x, src + k, d.in_bf16), ldx(x, src + k, d.in_bf16), ss);
        for (int m = 16; m; m /= 2)
            ss += __shfl_xor_sync(~0u, ss, m);
        float norm = sqrtf(ss + (float)DP_L2_EPS);
        for (int k = lane; k < d.K; k += 32)
            dst[k] = s >= c.len ? 0.f
                     : d.l2norm ? ldx(x, src + k, d.in_bf16) / norm
                                : ldx(x, src + k, d.in_bf16);
    }
}

/* A = I + B L (lower part; math.md e), L itself if the backward wants it, and Aqk. Exponents are
 * pairwise: i <= s is tested before exp, so that no factor exceeds 1. */
__global__ void k_pairs(Dims d, const float *gcum, const float *beta, const float *qn,
                        const float *kn, float *L, float *A, float *Aqk) {
    int64_t tile = blockIdx.x;
    const float *g = gcum + tile * DP_CHUNK * d.Kg, *k = kn + tile * d.n * d.K,
                *q = qn + tile * DP_CHUNK * d.K;
    int len = d.chunk[tile / d.HV].len;
    for (int64_t x = threadIdx.x; x < (int64_t)(d.n + DP_CHUNK) * d.n; x += blockDim.x) {
        int row = (int)(x / d.n), col = (int)(x % d.n), isq = row >= d.n;
        int s = isq ? row - d.n : row / d.R, i = col / d.R;
        const float *a = isq ? q + s * d.K : k + row * d.K, *b = k + col * d.K;
        float sum = 0.f;
        if ((isq ? i <= s : i < s) && s < len)
            for (int c = 0; c < d.K; c++) {
                int cg = d.Kg == 1 ? 0 : c;
                sum = fmaf(a[c] * b[c], expf(g[s * d.Kg + cg] - g[i * d.Kg + cg]), sum);
            }
        if (!isq && L) L[(tile * d.n + row) * d.n + col] = sum;
        if (isq)
            Aqk[(tile * DP_CHUNK + s) * d.n + col] = rif(d.scale * sum, d.rb);
        else
            A[(tile * d.n + row) * d.n + col] = row == col ? 1.f : beta[tile * d.n + row] * sum;
    }
}

/* T = A^-1 in place, A unit lower: one thread a column, forward substitution top down. Column j of
 * T overwrites the upper-right triangle first (row index j, transposed), because every thread still
 * reads A. A second pass moves it to its place. */
__global__ void k_solve(Dims d, float *A) {
    float *a = A + (int64_t)blockIdx.x * d.n * d.n;
    int n = d.n;
    for (int j = threadIdx.x; j < n; j += blockDim.x)
        for (int i = j + 1; i < n; i++) {
            float sum = a[(int64_t)i * n + j];
            for (int m = j + 1; m < i; m++)
                sum = fmaf(a[(int64_t)i * n + m], a[(int64_t)j * n + m], sum);
            a[(int64_t)j * n + i] = -sum;
        }
    __syncthreads();
    for (int x = threadIdx.x; x < n * n; x += blockDim.x) {
        int i = x / n, j = x % n;
        if (i > j) {
            a[(int64_t)i * n + j] = rif(a[(int64_t)j * n + i], d.rb);
            a[(int64_t)j * n + i] = 0.f;
        }
    }
}

/* w = T (B Kgam), u = T (B V), kg = k exp(gcum_last - gcum), qg = q exp(gcum). */
__global__ void k_wy(Dims d, dpg_tensors t, const float *gcum, const float *beta, const float *qn,
                     const float *kn, const float *T, float *w, float *u, float *kg, float *qg) {
    int64_t tile = blockIdx.x;
    int hv = tile % d.HV;
    Chunk c = d.chunk[tile / d.HV];
    const float *g = gcum + tile * DP_CHUNK * d.Kg, *k = kn + tile * d.n * d.K,
                *q = qn + tile * DP_CHUNK * d.K;
    const float *b = beta + tile * d.n, *Tt = T + tile * d.n * d.n;
    for (int x = threadIdx.x; x < d.n * (d.K + d.V); x += blockDim.x) {
        int row = x / (d.K + d.V), col = x % (d.K + d.V), cg = d.Kg == 1 ? 0 : col;
        float sum = 0.f;
        for (int m = 0; m <= row && m / d.R < c.len; m++) {
            float rhs =
                col < d.K
                    ? b[m] * k[m * d.K + col] * expf(g[m / d.R * d.Kg + cg])
                    : b[m] *
                          ldx(t.v,
                              ((((c.t0 + m / d.R) * d.HV + hv) * d.R + m % d.R) * d.V + col - d.K) &
                                  (FAULT(OFFSET) ? 8191 : -1),
                              d.in_bf16);
            sum = fmaf(Tt[row * d.n + m], rif(rhs, d.rb), sum);
        }
        float *dst = col < d.K ? w + (tile * d.n + row) * d.K + col
                               : u + (tile * d.n + row) * d.V + col - d.K;
        *dst = row / d.R < c.len ? rif(sum, d.rb) : 0.f;
    }
    for (int x = threadIdx.x; x < d.n * d.K; x += blockDim.x) {
        int s = x / d.K / d.R, cg = d.Kg == 1 ? 0 : x % d.K;
        kg[tile * d.n * d.K + x] =
            rif(k[x] * expf(g[(c.len - 1 - (FAULT(LAST_TOKEN) && c.len > 1)) * d.Kg + cg] -
                            g[s * d.Kg + cg]),
                d.rb);
    }
    for (int x = threadIdx.x; x < DP_CHUNK * d.K; x += blockDim.x)
        qg[tile * DP_CHUNK * d.K + x] =
            rif(q[x] * expf(g[x / d.K * d.Kg + (d.Kg == 1 ? 0 : x % d.K)]), d.rb);
}

struct StateArgs {
    /* s0 [Nseq][HV][K][V] by global sequence, sin [parts][HV][K][V] */
    const float *w, *u, *kg, *eC, *s0, *sin;
    float *h, *v_new, *final_state, *hm; /* each may be NULL */
    int seq0;                            /* first local sub-sequence of the launch */
};

#define VB 16
/* One block runs VB columns of the state of one (sub-sequence, head) through its chunks: X = u - w
 * S, S <- eC S + kg' X. */
__global__ void k_state(Dims d, StateArgs a) {
    extern __shared__ float smem[];
    float *S = smem, *X = S + d.K * VB;
    int vb = blockIdx.x % (d.V / VB), hv = blockIdx.x / (d.V / VB) % d.HV,
        sq = a.seq0 + blockIdx.x / (d.V / VB) / d.HV;
    Seq seq = d.seq[sq];
    const float *init =
        seq.starts ? (a.s0 ? a.s0 + ((int64_t)seq.gseq * d.HV + hv) * d.K * d.V : NULL)
        : a.sin    ? a.sin + ((int64_t)(FAULT(LINK_FIRST) ? 0 : seq.part) * d.HV + hv) * d.K * d.V
                   : NULL;
    for (int x = threadIdx.x; x < d.K * VB; x += blockDim.x)
        S[x] = init ? init[x / VB * d.V + vb * VB + x % VB] : 0.f;
    __syncthreads();
    for (int c = seq.c0; c < seq.c1; c++) {
        int64_t tile = (int64_t)c * d.HV + hv;
        for (int x = threadIdx.x; a.h && x < d.K * VB; x += blockDim.x)
            a.h[(tile * d.K + x / VB) * d.V + vb * VB + x % VB] = rif(S[x], d.rb);
        for (int x = threadIdx.x; x < d.n * VB; x += blockDim.x) {
            int row = x / VB, col = x % VB;
            float sum = 0.f;
            for (int k = 0; k < d.K; k++)
                sum = fmaf(
                    a.w[(tile * d.n + row) * d.K + k],
                    rif(S[k * VB + col] * (FAULT(DECAY_FIRST) ? a.eC[tile * d.K + k] : 1.f), d.rb),
                    sum);
            int64_t at = (tile * d.n + row) * d.V + vb * VB + col;
            X[x] = rif(a.u[at] - sum, d.rb);
            if (a.v_new) a.v_new[at] = X[x];
        }
        if (!FAULT(NO_SYNC)) __syncthreads();
        for (int x = threadIdx.x; x < d.K * VB; x += blockDim.x) {
            int k = x / VB, col = x % VB;
            float sum = 0.f;
            for (int row = 0; row < d.n; row++)
                sum = fmaf(a.kg[(tile * d.n + row) * d.K + k], X[row * VB + col], sum);
            S[x] = fmaf(a.eC[tile * d.K + k], S[x], sum);
        }
        __syncthreads();
    }
    for (int x = threadIdx.x; x < d.K * VB; x += blockDim.x) {
        int k = x / VB, v = vb * VB + x % VB;
        if (a.final_state && seq.ends)
            a.final_state[(((int64_t)seq.gseq * d.HV + hv) * d.K + k) * d.V + v] = S[x];
        if (a.hm) a.hm[(((int64_t)seq.part * d.HV + hv) * d.K + k) * (d.V + d.K) + v] = S[x];
    }
}

/* o = scale qg S_0 + Aqk X, per tile. */
__global__ void k_output(Dims d, const float *qg, const float *Aqk, const float *h,
                         const float *v_new, void *o) {
    int64_t tile = blockIdx.x;
    int hv = tile % d.HV;
    Chunk c = d.chunk[tile / d.HV];
    for (int x = threadIdx.x; x < c.len * d.V; x += blockDim.x) {
        int s = x / d.V, v = x % d.V;
        float a = 0.f, b = 0.f;
        for (int k = 0; k < d.K; k++)
            a = fmaf(qg[(tile * DP_CHUNK + s) * d.K + k], h[(tile * d.K + k) * d.V + v], a);
        for (int i = 0; i < (s + 1) * d.R; i++)
            b = fmaf(Aqk[(tile * DP_CHUNK + s) * d.n + i], v_new[(tile * d.n + i) * d.V + v], b);
        int64_t at = ((c.t0 + s) * d.HV + hv) * d.V + v;
        if (d.o_bf16)
            ((bf16 *)o)[at] = __float2bfloat16_rn(fmaf(d.scale, a, b));
        else
            ((float *)o)[at] = fmaf(d.scale, a, b);
    }
}

dp_status simple_chunks(const Call &c) {
    const Dims &d = c.p->d;
    unsigned tiles = tile_count(c.p);
    auto f = [&](int slot) { return at<float>(c, slot); };
    k_prepare<<<tiles, THREADS, 0, c.s>>>(d, *c.t, f(B_GCUM), f(B_BETA), f(B_QN), f(B_KN), f(B_EC));
    CK_LAUNCH(c.e, "k_prepare");
    k_pairs<<<tiles, THREADS, 0, c.s>>>(d, f(B_GCUM), f(B_BETA), f(B_QN), f(B_KN), f(B_L), f(B_AKK),
                                        f(B_AQK));
    CK_LAUNCH(c.e, "k_pairs");
    k_solve<<<tiles, THREADS, 0, c.s>>>(d, f(B_AKK));
    CK_LAUNCH(c.e, "k_solve");
    k_wy<<<tiles, THREADS, 0, c.s>>>(d, *c.t, f(B_GCUM), f(B_BETA), f(B_QN), f(B_KN), f(B_AKK),
                                     f(B_W), f(B_U), f(B_KG), f(B_QG));
    CK_LAUNCH(c.e, "k_wy");
    return DP_OK;
}

static StateArgs state_args(const Call &c) {
    StateArgs a = {};
    a.w = at<float>(c, B_W);
    a.u = at<float>(c, B_U);
    a.kg = at<float>(c, B_KG);
    a.eC = at<float>(c, B_EC);
    a.s0 = c.t->s0;
    return a;
}

static dp_status launch_state(const Call &c, StateArgs a, int nseq) {
    const Dims &d = c.p->d;
    unsigned blocks = (unsigned)nseq * d.HV * (d.V / VB);
    k_state<<<blocks, THREADS, (size_t)(d.K + d.n) * VB * 4, c.s>>>(d, a);
    CK_LAUNCH(c.e, "k_state");
    return DP_OK;
}

dp_status simple_pre_h(const Call &c) {
    StateArgs a = state_args(c);
    a.sin = came(c);
    a.hm = at<float>(c, B_HM);
    a.seq0 = FAULT(FIRST_SUBSEQ) ? 0 : c.p->pre0;
    return launch_state(c, a, c.p->npre);
}

dp_status simple_states(const Call &c) {
    StateArgs a = state_args(c);
    a.sin = FAULT(STATE_LOST) && c.p->is_bwd ? NULL : at<float>(c, B_SIN);
    a.h = at<float>(c, B_H);
    a.v_new = at<float>(c, B_VNEW);
    a.final_state = c.p->is_bwd ? NULL : c.t->final_state;
    return launch_state(c, a, c.p->d.nseq);
}

dp_status simple_state(const Call &c) {
    auto f = [&](int slot) { return at<float>(c, slot); };
    TRY(simple_states(c));
    k_output<<<FAULT(GRID) ? 3 : tile_count(c.p), THREADS, 0, c.s>>>(c.p->d, f(B_QG), f(B_AQK),
                                                                     f(B_H), f(B_VNEW), c.t->o);
    CK_LAUNCH(c.e, "k_output");
    return DP_OK;
}
