/* gpu/token/gradients.cu - gradients of the raw inputs from gradients of the activated ones
 * (math.md b, c, i): groups of value heads, L2 norm, factors, beta, gate. No shared memory.
 *
 *   k_token_rows_bwd     a warp a token and query head     dq, dk, dlr_b
 *   k_token_values_bwd   a warp a token and value head     dv, dbeta, derase, dwrite, dlr_a
 *   k_token_gate_bwd     a block a chunk and value head    dg; its sums for dA_log and ddt_bias */
#include "token/token.cuh"

/* dy of a row of q or of a key, through the norm of its input x, to dx: (dy - y <y, dy>) / norm. */
__device__ __forceinline__ void through_norm(const Dims &d, const Row &dy, const float *y,
                                             const void *x, void *dx, int64_t at) {
    Row given = {}, unit = Row::load(y, d.K);
    Row::rows(d.K, [&](int i, int row) { given.x[i] = ldx(x, at + row, d.in_bf16); });
    float norm = d.l2norm ? sqrtf(given.dot(given) + (float)DP_L2_EPS) : 1.f,
          along = d.l2norm ? unit.dot(dy) : 0.f;
    Row::rows(d.K, [&](int i, int row) {
        stx(dx, at + row, d.qk_bf16, (dy.x[i] - unit.x[i] * along) / norm);
    });
}

/* Key j over the value heads from th on: the part of the write, and of the erasing key where that
 * is made of it. */
__device__ __forceinline__ Row of_key(const Dims &d, const dpg_tensors &t, const Token &a,
                                      const TokenGrads &y, int64_t th, int j) {
    Row sum = {};
    for (int m = 0; m < d.G; m++) {
        int64_t row = ((th + m) * a.rule.keys + j) * d.K;
        sum.add(Row::load(y.k + row, d.K), 1.f);
        if (a.rule.strength == DP_BY_BETA) sum.add(Row::load(y.e + row, d.K), 1.f);
        if (a.rule.strength == DP_BY_GATES)
            Row::rows(d.K, [&](int i, int x) {
                float e = ldx(t.erase, (th + m) * d.K + x, d.in_bf16);
                sum.x[i] = fmaf(e, y.e[row + x], sum.x[i]);
            });
    }
    return sum;
}

__global__ void k_token_rows_bwd(Dims d, dpg_tensors t, dpg_grads g, Token a, TokenGrads y) {
    int64_t tq = (int64_t)blockIdx.x * WARPS + threadIdx.x / 32,
            th = tq / d.H * d.HV + tq % d.H * d.G;
    if (tq >= d.L * d.H) return;
    int n = a.rule.keys;
    Row dq = {};
    for (int m = 0; m < d.G; m++)
        dq.add(Row::load(y.q + (th + m) * d.K, d.K), 1.f);
    through_norm(d, dq, a.q + tq * d.K, t.q, g.dq, tq * d.K);
    for (int j = 0; j < n; j++) {
        Row dk = of_key(d, t, a, y, th, j);
        const float *k = a.k + (tq * n + j) * d.K;
        if (a.rule.strength != DP_BY_FACTORS)
            through_norm(d, dk, k, t.k, g.dk, (tq * n + j) * d.K);
        else
            through_norm(d, dk, k, j ? t.k : t.lr_b, j ? g.dk : g.dlr_b, tq * d.K);
    }
}

__global__ void k_token_values_bwd(Dims d, dpg_tensors t, dpg_grads g, Token a, TokenGrads y) {
    int64_t th = (int64_t)blockIdx.x * WARPS + threadIdx.x / 32;
    if (th >= d.L * d.HV) return;
    int n = a.rule.keys, lane = threadIdx.x % 32, factors = a.rule.strength == DP_BY_FACTORS;
    int64_t tq = th / d.HV * d.H + th % d.HV / d.G;
    const float *du = y.u + (th * n + factors) * d.V, *de = y.e + th * n * d.K;
    for (int i = lane; i < (n - factors) * d.V; i += 32) {
        int64_t at = th * (n - factors) * d.V + i;
        float w = a.rule.strength == DP_BY_GATES ? ldx(t.write, at, d.in_bf16) : 1.f;
        stx(g.dv, at, d.d_bf16, w * du[i]);
        if (g.dwrite) stx(g.dwrite, at, d.d_bf16, ldx(t.v, at, d.in_bf16) * du[i]);
    }
    for (int x = lane; x < d.K; x += 32) {
        if (g.derase) stx(g.derase, th * d.K + x, d.d_bf16, a.k[tq * d.K + x] * de[x]);
        if (g.dlr_a) stx(g.dlr_a, th * d.K + x, d.d_bf16, -de[x]);
    }
    if (g.dbeta && lane < n) {
        float slope = beta_slope(d, ldx(t.beta, th * n + lane, d.g_bf16));
        stx(g.dbeta, th * n + lane, d.dg_bf16, y.b[th * n + lane] * slope);
    }
}

__global__ void k_token_gate_bwd(Dims d, dpg_tensors t, dpg_grads g, const float *dg, float *part) {
    int64_t tile = blockIdx.x;
    Chunk c = d.chunk[tile / d.HV];
    gate_grads_of_tile(d, t, g, tile, part, [&](int s, int k) {
        return dg[((c.t0 + s) * d.HV + tile % d.HV) * d.Kg + k];
    });
}

dp_status token_norm(const Call &c) {
    const Dims &d = c.p->d;
    Token a = token_of(c);
    TokenGrads y = token_grads_of(c);
    k_token_rows_bwd<<<blocks_of(d.L * d.H), THREADS, 0, c.s>>>(d, *c.t, *c.g, a, y);
    CK_LAUNCH(c.e, "k_token_rows_bwd");
    k_token_values_bwd<<<blocks_of(d.L * d.HV), THREADS, 0, c.s>>>(d, *c.t, *c.g, a, y);
    CK_LAUNCH(c.e, "k_token_values_bwd");
    return DP_OK;
}

dp_status token_sums(const Call &c) {
    k_token_gate_bwd<<<tile_count(c.p), THREADS, 0, c.s>>>(c.p->d, *c.t, *c.g, token_grads_of(c).g,
                                                           at<float>(c, B_PART));
    CK_LAUNCH(c.e, "k_token_gate_bwd");
    return sum_over_chunks(c);
}
