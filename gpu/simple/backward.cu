/* gpu/simple/backward.cu - the backward as plainly as CUDA allows (math.md f for a chunk, c for the
 * activations, g.1 for the ranks), any K, V, R.
 *
 * One block per tile (or per state slice), fp32 FMA, every sum in a fixed order, no atomics:
 * bitwise repeatable. With base bf16 rif() rounds the numbers that FLA stores (dv_local, dv_new) or
 * multiplies (do, h, dh, kgam, L, dE) in bf16. All gradients accumulate in fp32. Names are those of
 * ref/chunk/chunk.c. Rows past a chunk's last token hold zeros in every buffer.
 *
 *   k_dv_local    dv_local                                   16 rows and columns of factors
 *   k_state_bwd   a chunk: do, dv_new; barrier; dS           16 columns of S, dv_new (X), do (D)
 *   k_wy_bwd      dZ, dv; Kgam S_0; E; barrier; dbeta        16 rows and columns of factors
 *   k_outer       one of five products                       16 rows and columns of factors
 *   k_intra_bwd   z; dq, dk, dgam; barrier; dg; its sum      z, a word a channel */
#include "fault.cuh"
#include "plan/values.cuh"
#include "simple/product.cuh"

/* do at token s of a chunk, an operand of every product that it enters */
__device__ __forceinline__ float do_at(const Dims &d, const dpg_grads &g, const Chunk &c, int hv,
                                       int s, int v) {
    return s < c.len ? rif(ldx(g.dout, ((c.t0 + s) * d.HV + hv) * d.V + v, d.d_bf16), d.rb) : 0.f;
}

/* ---- dv_local = Aqk' do ---------------------------------------------------------------------- */

__global__ void k_dv_local(Dims d, dpg_grads g, BwdArgs a) {
    __shared__ Stage sm;
    int64_t tile = blockIdx.x;
    int hv = tile % d.HV;
    Chunk c = d.chunk[tile / d.HV];
    const float *P = a.Aqk + tile * DP_CHUNK * d.n;
    float *dv_local = a.dv_local + tile * d.n * d.V;
    product<false, true>(
        sm, d.n, d.V, DP_CHUNK, [&](int i, int s) { return P[s * d.n + i]; },
        [&](int s, int v) { return do_at(d, g, c, hv, s, v); },
        [&](int i, int v, float x) { dv_local[i * d.V + v] = rif(x, d.rb); });
}

/* ---- dv_new = dv_local + kg dS, dS <- eC dS + scale qg' do - w' dv_new, chunks last to first;
 * reads the undecayed dS ---- */

struct StateBwdArgs {
    /* [Nseq][HV][K][V] by global sequence, [parts][HV][K][V] from the last on; NULL: zeros */
    const float *dfinal, *dsout;
    /* each may be NULL; dhm: columns 0..V-1 of rows of `row` words */
    float *dh, *dv_new, *ds0, *dhm;
    int row, seq0, links;
};

#define VB 16
/* One block runs VB columns of the gradient of the state of one (sub-sequence, head). */
__global__ void k_state_bwd(Dims d, dpg_grads g, BwdArgs b, StateBwdArgs a) {
    extern __shared__ float smem[];
    float *S = smem, *X = S + d.K * VB, *D = X + d.n * VB;
    int v0 = blockIdx.x % (d.V / VB) * VB, hv = blockIdx.x / (d.V / VB) % d.HV,
        sq = a.seq0 + blockIdx.x / (d.V / VB) / d.HV +
             (FAULT(LAST_SUBSEQ) && a.dhm ? d.nseq - 1 : 0);
    Seq seq = d.seq[sq];
    const float *init =
        seq.ends  ? (a.dfinal ? a.dfinal + ((int64_t)seq.gseq * d.HV + hv) * d.K * d.V : NULL)
        : a.dsout ? a.dsout + ((int64_t)(a.links - 1 - seq.part) * d.HV + hv) * d.K * d.V
                  : NULL;
    for (int x = threadIdx.x; x < d.K * VB; x += THREADS)
        S[x] = init ? init[x / VB * d.V + v0 + x % VB] : 0.f;
    for (int ch = seq.c1 - 1; ch >= seq.c0; ch--) {
        int64_t tile = (int64_t)ch * d.HV + hv;
        Chunk c = d.chunk[ch];
        const float *kg = b.kg + tile * d.n * d.K, *w = b.w + tile * d.n * d.K,
                    *qg = b.qg + tile * DP_CHUNK * d.K;
        __syncthreads();
        for (int x = threadIdx.x; a.dh && x < d.K * VB; x += THREADS)
            a.dh[(tile * d.K + x / VB) * d.V + v0 + x % VB] = S[x];
        for (int x = threadIdx.x; x < DP_CHUNK * VB; x += THREADS)
            D[x] = do_at(d, g, c, hv, x / VB, v0 + x % VB);
        for (int x = threadIdx.x; x < d.n * VB; x += THREADS) {
            int row = x / VB, col = x % VB;
            float sum = 0.f;
            for (int k = 0; k < d.K; k++)
                sum = fmaf(kg[row * d.K + k], rif(S[k * VB + col], d.rb), sum);
            int64_t at = (tile * d.n + row) * d.V + v0 + col;
            X[x] = rif(b.dv_local[at] + sum, d.rb);
            if (a.dv_new) a.dv_new[at] = X[x];
        }
        if (!FAULT(BWD_NO_SYNC)) __syncthreads();
        for (int x = threadIdx.x; x < d.K * VB; x += THREADS) {
            int k = x / VB, col = x % VB;
            float in = 0.f, out = 0.f;
            for (int s = 0; s < DP_CHUNK; s++)
                in = fmaf(qg[s * d.K + k], D[s * VB + col], in);
            for (int row = 0; row < d.n; row++)
                out = fmaf(w[row * d.K + k], X[row * VB + col], out);
            S[x] = fmaf(b.eC[(FAULT(BWD_HEAD0) && a.dhm ? (int64_t)ch * d.HV : tile) * d.K + k],
                        S[x], d.scale * in) -
                   out;
        }
    }
    __syncthreads();
    for (int x = threadIdx.x; x < d.K * VB; x += THREADS) {
        int k = x / VB, v = v0 + x % VB;
        if (a.ds0 && seq.starts)
            a.ds0[(((int64_t)seq.gseq * d.HV + hv) * d.K + k) * d.V + v] = S[x];
        if (a.dhm) a.dhm[(((int64_t)seq.part * d.HV + hv) * d.K + k) * a.row + v] = S[x];
    }
}

/* ---- gradients of a chunk's activated inputs ------------------------------------------------- */

/* dZ = T' dv_new, dv = dE = B dZ, E = V - Kgam S_0 - L X, dbeta = sum over V of dZ o E. */
__global__ void k_wy_bwd(Dims d, dpg_tensors t, dpg_grads g, BwdArgs a) {
    __shared__ Stage sm;
    int64_t tile = blockIdx.x;
    int hv = tile % d.HV, warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    Chunk c = d.chunk[tile / d.HV];
    const float *T = a.T + tile * d.n * d.n, *dv_new = a.dv_new + tile * d.n * d.V,
                *b = a.beta + tile * d.n, *k = a.kn + tile * d.n * d.K;
    const float *gc = a.gcum + tile * DP_CHUNK * d.Kg, *h = a.h + tile * d.K * d.V,
                *L = a.L + tile * d.n * d.n, *X = a.v_new + tile * d.n * d.V;
    float *dZ = a.dZ + tile * d.n * d.V, *E = a.E + tile * d.n * d.V;
    auto at = [&](int i, int v) {
        return (((c.t0 + i / d.R) * d.HV + hv) * d.R + i % d.R) * d.V + v;
    };
    product<false, true>(
        sm, d.n, d.V, d.n, [&](int i, int m) { return T[m * d.n + i]; },
        [&](int m, int v) { return dv_new[m * d.V + v]; },
        [&](int i, int v, float x) {
            dZ[i * d.V + v] = x;
            if (i / d.R < c.len) stx(g.dv, at(i, v), d.d_bf16, b[i] * x);
        });
    product<true, true>(
        sm, d.n, d.V, d.K,
        [&](int i, int x) {
            return rif(k[i * d.K + x] * expf(gc[i / d.R * d.Kg + (d.Kg == 1 ? 0 : x)]), d.rb);
        },
        [&](int x, int v) { return h[x * d.V + v]; },
        [&](int i, int v, float x) { E[i * d.V + v] = x; });
    product<true, true>(
        sm, d.n, d.V, d.n, [&](int i, int m) { return rif(L[i * d.n + m], d.rb); },
        [&](int m, int v) { return X[m * d.V + v]; },
        [&](int i, int v, float x) {
            E[i * d.V + v] =
                (i / d.R < c.len ? ldx(t.v, at(i, v), d.in_bf16) : 0.f) - E[i * d.V + v] - x;
        });
    __syncthreads();
    for (int i = warp; i < d.n; i += THREADS / 32) {
        float sum = 0.f;
        for (int v = lane; v < d.V; v += 32)
            sum = fmaf(dZ[i * d.V + v], E[i * d.V + v], sum);
        sum = warp_sum(sum);
        if (lane == 0) a.dbeta[tile * d.n + i] = sum;
    }
}

/* The five products over V, chosen by blockIdx.y: dP = scale do X', dL = -dE X'. Further, without
 * decay or scale, dq = S_0 do, dk = S_0 dE, dkw = dS_c X. */
__global__ void k_outer(Dims d, dpg_grads g, BwdArgs a) {
    __shared__ Stage sm;
    int64_t tile = blockIdx.x;
    int hv = tile % d.HV;
    Chunk c = d.chunk[tile / d.HV];
    const float *X = a.v_new + tile * d.n * d.V, *dZ = a.dZ + tile * d.n * d.V,
                *b = a.beta + tile * d.n, *h = a.h + tile * d.K * d.V,
                *dh = a.dh + tile * d.K * d.V;
    float *dP = a.dP + tile * DP_CHUNK * d.n, *dL = a.dL + tile * d.n * d.n,
          *dq = a.dq + tile * DP_CHUNK * d.K, *dk = a.dk + tile * d.n * d.K,
          *dkw = a.dkw + tile * d.n * d.K;
    auto dO = [&](int s, int v) { return do_at(d, g, c, hv, s, v); };
    auto dE = [&](int i, int v) { return rif(b[i] * dZ[i * d.V + v], d.rb); };
    auto x = [&](int i, int v) { return X[i * d.V + v]; };
    auto xt = [&](int v, int i) { return X[i * d.V + v]; };
    auto ht = [&](int v, int k) { return h[k * d.V + v]; };
    auto dht = [&](int v, int k) { return rif(dh[k * d.V + v], d.rb); };
    switch (blockIdx.y) {
    case 0:
        product<true, false>(sm, DP_CHUNK, d.n, d.V, dO, xt,
                             [&](int s, int i, float y) { dP[s * d.n + i] = d.scale * y; });
        break;
    case 1:
        product<true, false>(sm, d.n, d.n, d.V, dE, xt,
                             [&](int r, int i, float y) { dL[r * d.n + i] = -y; });
        break;
    case 2:
        product<true, false>(sm, DP_CHUNK, d.K, d.V, dO, ht,
                             [&](int s, int k, float y) { dq[s * d.K + k] = y; });
        break;
    case 3:
        product<true, false>(sm, d.n, d.K, d.V, dE, ht,
                             [&](int i, int k, float y) { dk[i * d.K + k] = y; });
        break;
    case 4:
        product<true, false>(sm, d.n, d.K, d.V, x, dht,
                             [&](int i, int k, float y) { dkw[i * d.K + k] = y; });
        break;
    }
}

/* Pair sums of math.md f in place of the reverse cumsum: what lies between i < t <= s, channel x.
 * dg holds r_s on entry. */
template <int R>
__device__ void pair_sums(const Dims &d, int len, int x, const float *gc, const float *q,
                          const float *k, const float *dP, const float *dL, const float *SX,
                          float z, float *dg) {
    float acc[DP_CHUNK], from = 0.f, below = 0.f; /* acc[i]: sum over s' >= s of c[s', i] */
    int cg = d.Kg == 1 ? 0 : x;
    for (int i = 0; i < len; i++)
        acc[i] = 0.f;
    for (int s = len - 1; s >= 0; s--) {
        float pair = 0.f;
        for (int i = 0; i < s; i++) {
            float e = expf(gc[s * d.Kg + cg] - gc[i * d.Kg + cg]), c = 0.f;
            for (int m = 0; m < R; m++) {
                int im = i * R + m;
                float p = dP[s * d.n + im] * q[s * d.K + x];
                for (int j = 0; j < R; j++)
                    p = fmaf(dL[(s * R + j) * d.n + im], k[(s * R + j) * d.K + x], p);
                c = fmaf(p, e * k[im * d.K + x], c);
            }
            acc[i] += c;
            pair += acc[i];
        }
        from += dg[s * d.K + x];
        dg[s * d.K + x] = from + pair + z;
    }
    for (int t = 0; t < len; t++) {
        dg[t * d.K + x] += below;
        for (int m = 0; m < R; m++)
            below = fmaf(k[(t * R + m) * d.K + x],
                         expf(gc[(len - 1) * d.Kg + cg] - gc[t * d.Kg + cg]) *
                             SX[(t * R + m) * d.K + x],
                         below);
    }
}

/* A tile's rows of what k_intra_bwd reads and writes. */
struct IntraRows {
    const float *gc, *q, *k, *dP, *dL, *h, *dh, *SX;
    float *dq, *dk, *dg;
};

/* z = eC o rowsum(S_0 o dS_c), a warp a channel. */
static __device__ void boundary_rows(const Dims &d, const float *h, const float *dh,
                                     const float *eC, float *z) {
    int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    for (int x = warp; x < d.K; x += THREADS / 32) {
        float sum = 0.f;
        for (int v = lane; v < d.V; v += 32)
            sum = fmaf(h[x * d.V + v], dh[x * d.V + v], sum);
        sum = warp_sum(sum);
        if (lane == 0) z[x] = FAULT(NO_BOUNDARY) ? 0.f : eC[x] * sum;
    }
}

/* dq and dk of entry `at` of the tile, complete; dg: its share of them, before the sum behind it.
 */
template <int R>
static __device__ void intra_entry(const Dims &d, const IntraRows &w, int len, int at,
                                   int pair_dg) {
    int s = at / d.K, x = at % d.K, cg = d.Kg == 1 ? 0 : x;
    float gs = w.gc[s * d.Kg + cg], qs = w.q[at], es = expf(gs),
          end = expf(w.gc[(len - 1) * d.Kg + cg] - gs), aq = 0.f, ar[R], aw[R], ks[R];
    for (int j = 0; j < R; j++) {
        ar[j] = aw[j] = 0.f;
        ks[j] = w.k[(s * R + j) * d.K + x];
    }
    for (int i = 0; i < s; i++) {
        float e = expf(gs - w.gc[i * d.Kg + cg]);
        for (int m = 0; m < R; m++) {
            float ek = e * w.k[(i * R + m) * d.K + x];
            aq = fmaf(w.dP[s * d.n + i * R + m], ek, aq);
            for (int j = 0; j < R; j++)
                ar[j] = fmaf(w.dL[(s * R + j) * d.n + i * R + m], ek, ar[j]);
        }
    }
    for (int i = s + 1; i < len; i++) {
        float e = expf(w.gc[i * d.Kg + cg] - gs), eq = e * w.q[i * d.K + x], ek[R];
        for (int j = 0; j < R; j++)
            ek[j] = e * w.k[(i * R + j) * d.K + x];
        for (int m = 0; m < R; m++) {
            aw[m] = fmaf(w.dP[i * d.n + s * R + m], eq, aw[m]);
            for (int j = 0; j < R; j++)
                aw[m] = fmaf(w.dL[(i * R + j) * d.n + s * R + m], ek[j], aw[m]);
        }
    }
    float dqs = d.scale * es * w.dq[at], dgam, diag = 0.f, r = qs * dqs;
    dgam = qs * (dqs + aq);
    for (int m = 0; m < R; m++) {
        int im = (s * R + m) * d.K + x;
        float read = -es * w.dk[im], write = end * w.SX[im], p = w.dP[s * d.n + s * R + m];
        diag = fmaf(p, ks[m], diag);
        r = fmaf(ks[m], read, r);
        dgam = fmaf(ks[m], (read + ar[m]) - (write + aw[m]), dgam);
        w.dk[im] = (read + ar[m]) + (write + fmaf(p, qs, aw[m]));
    }
    w.dq[at] = dqs + (aq + diag);
    w.dg[at] = pair_dg ? r : dgam;
}

/* Channel x of dg: sums over the entries behind each. rowsum(dS_c o S_c) = z + sum of k o (write
 * part). */
template <int R>
static __device__ void sums_behind(const Dims &d, const IntraRows &w, int len, int x, float z) {
    float sum = z;
    int cg = d.Kg == 1 ? 0 : x;
    for (int i = 0; i < len * R; i++)
        sum = fmaf(w.k[i * d.K + x],
                   expf(w.gc[(len - 1) * d.Kg + cg] - w.gc[i / R * d.Kg + cg]) * w.SX[i * d.K + x],
                   sum);
    for (int s = len - 1; s >= 0; s--)
        w.dg[s * d.K + x] = sum += w.dg[s * d.K + x];
}

/* GDN: the sum over channels, into channel 0. */
static __device__ void sum_channels(const Dims &d, int len, float *dg) {
    int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    for (int s = warp; d.Kg == 1 && s < len; s += THREADS / 32) {
        float sum = 0.f;
        for (int x = lane; x < d.K; x += 32)
            sum += dg[s * d.K + x];
        sum = warp_sum(sum);
        if (lane == 0) dg[s * d.K] = sum;
    }
}

/* dq, dk and dg of the activated inputs. Exponents pairwise, i <= s before exp. The terms i = s
 * enter q o dq and k o dk alike and are left out of dgam (math.md f). On entry dq, dk, dkw hold the
 * plain products of k_outer; on return dq and dk are complete, dkw is unchanged. */
template <int R> __global__ void k_intra_bwd(Dims d, int pair_dg, BwdArgs a) {
    __shared__ float z[256];
    int64_t tile = blockIdx.x;
    int len = d.chunk[tile / d.HV].len;
    const IntraRows w = {
        a.gcum + tile * DP_CHUNK * d.Kg, a.qn + tile * DP_CHUNK * d.K, a.kn + tile * d.n * d.K,
        a.dP + tile * DP_CHUNK * d.n,    a.dL + tile * d.n * d.n,      a.h + tile * d.K * d.V,
        a.dh + tile * d.K * d.V,         a.dkw + tile * d.n * d.K,     a.dq + tile * DP_CHUNK * d.K,
        a.dk + tile * d.n * d.K,         a.dg + tile * DP_CHUNK * d.K};
    boundary_rows(d, w.h, w.dh, a.eC + tile * d.K, z);
    for (int at = threadIdx.x; at < len * d.K; at += THREADS)
        intra_entry<R>(d, w, len, at, pair_dg);
    __syncthreads();
    for (int x = threadIdx.x; x < d.K; x += THREADS)
        if (pair_dg)
            pair_sums<R>(d, len, x, w.gc, w.q, w.k, w.dP, w.dL, w.SX, z[x], w.dg);
        else
            sums_behind<R>(d, w, len, x, z[x]);
    __syncthreads();
    sum_channels(d, len, w.dg);
}

/* ---- host ------------------------------------------------------------------------------------ */

BwdArgs bwd_args(const Call &c) {
    auto f = [&](int slot) { return at<float>(c, slot); };
    BwdArgs a = {f(B_GCUM),   f(B_BETA), f(B_QN), f(B_KN),    f(B_L),   f(B_AKK),  f(B_AQK),
                 f(B_W),      f(B_KG),   f(B_QG), f(B_EC),    f(B_H),   f(B_VNEW), f(B_DV_LOCAL),
                 f(B_DV_NEW), f(B_DH),   f(B_DZ), f(B_DE),    f(B_DP),  f(B_DL),   f(B_DQ),
                 f(B_DKR),    f(B_DKW),  f(B_DG), f(B_DBETA), f(B_PART)};
    return a;
}

static dp_status dv_local(const Call &c) {
    k_dv_local<<<tile_count(c.p), THREADS, 0, c.s>>>(c.p->d, *c.g, bwd_args(c));
    CK_LAUNCH(c.e, "k_dv_local");
    return DP_OK;
}

static dp_status launch_state(const Call &c, StateBwdArgs a, int nseq) {
    const Dims &d = c.p->d;
    unsigned blocks = (unsigned)nseq * d.HV * (d.V / VB);
    size_t bytes = (size_t)(d.K + d.n + DP_CHUNK) * VB * 4;
    k_state_bwd<<<blocks, THREADS, bytes, c.s>>>(d, *c.g, bwd_args(c), a);
    CK_LAUNCH(c.e, "k_state_bwd");
    return DP_OK;
}

static dp_status pre(const Call &c) {
    StateBwdArgs a = {};
    a.dfinal = c.g->dfinal_state;
    a.dsout = came(c);
    a.links = state_parts(c.p);
    a.dhm = at<float>(c, B_DHM);
    a.row = dh_row(c.p);
    a.seq0 = c.p->bwd0;
    return launch_state(c, a, c.p->nbwd);
}

static dp_status state(const Call &c) {
    StateBwdArgs a = {};
    a.dfinal = c.g->dfinal_state;
    a.dsout = at<float>(c, B_DSOUT);
    a.links = state_parts(c.p);
    a.dh = at<float>(c, B_DH);
    a.dv_new = at<float>(c, B_DV_NEW);
    a.ds0 = c.g->ds0;
    return launch_state(c, a, c.p->d.nseq);
}

static dp_status intra(const Call &c) {
    const Dims &d = c.p->d;
    BwdArgs a = bwd_args(c);
    unsigned tiles = tile_count(c.p);
    if (FAULT(BWD_NEXT_HEAD) && !c.p->is_last) a.gcum += DP_CHUNK * d.Kg;
    k_wy_bwd<<<tiles, THREADS, 0, c.s>>>(d, *c.t, *c.g, a);
    CK_LAUNCH(c.e, "k_wy_bwd");
    k_outer<<<dim3(tiles, 5), THREADS, 0, c.s>>>(d, *c.g, a);
    CK_LAUNCH(c.e, "k_outer");
    void (*kernel)(Dims, int, BwdArgs) = d.R == 1   ? k_intra_bwd<1>
                                         : d.R == 2 ? k_intra_bwd<2>
                                                    : k_intra_bwd<4>;
    kernel<<<tiles, THREADS, 0, c.s>>>(d, c.p->opt.pair_dg, a);
    CK_LAUNCH(c.e, "k_intra_bwd");
    return DP_OK;
}

extern const Path simple_path = {"simple",      simple_chunks, simple_pre_h, simple_state,
                                 simple_chunks, simple_states, dv_local,     pre,
                                 state,         intra,         simple_sums,  simple_norm};
