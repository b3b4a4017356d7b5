/* gpu/token/backward.cu - the adjoint recurrence token by token in fp32 FMA (token.cuh).
 *
 *   k_token_adjoint   a warp a column of G, from each sub-sequence's end: (dH, dM) of the first
 *                     local one; then G after each chunk, and ds0
 *   k_token_grads     a warp a chunk and value head, one column after the other: states of its
 *                     tokens again from the one before it, then back from G behind it; gradients of
 *                     what is activated, summed over columns in their order */
#include "token/token.cuh"

/* scale do of token t */
__device__ __forceinline__ float scaled_do(const Walk &w, const dpg_grads &g, int64_t t) {
    return w.v < 0 ? 0.f : w.d.scale * ldx(g.dout, w.head(t) * w.d.V + w.v, w.d.d_bf16);
}

struct AdjointArgs {
    /* [Nseq][HV][K][V] by global sequence, [links][HV][K][V] from the last on; NULL: zeros */
    const float *dfinal, *dsout;
    float *dh, *ds0, *dhm;      /* each may be NULL; dhm: rows of `row` words */
    int row, seq0, nseq, links; /* local sub-sequences of the launch */
    int columns;                /* V, or V + K with those of dM */
};

/* What column `col` starts from, at the end of a sub-sequence. */
__device__ __forceinline__ Column last_gradient(const Dims &d, const AdjointArgs &z, const Seq &seq,
                                                int hv, int col) {
    Column g = {};
    if (col >= d.V) {
        rows_of_lane(d.K, [&](int i, int row) { g.x[i] = row == col - d.V; });
        return g;
    }
    const float *from = seq.ends ? z.dfinal : z.dsout;
    int64_t state = (int64_t)(seq.ends ? seq.gseq : z.links - 1 - seq.part) * d.HV + hv;
    return from ? column(from + state * d.K * d.V + col, d.K, d.V) : g;
}

__global__ void k_token_adjoint(Dims d, dpg_grads out, Token a, AdjointArgs z) {
    int64_t i = (int64_t)blockIdx.x * WARPS + threadIdx.x / 32;
    if (i >= (int64_t)z.nseq * d.HV * z.columns) return;
    int col = i % z.columns, hv = i / z.columns % d.HV;
    Seq seq = d.seq[z.seq0 + i / z.columns / d.HV];
    Walk w = {d, a, hv, col < d.V ? col : -1};
    Column g = last_gradient(d, z, seq, hv, col);
    for (int c = seq.c1 - 1; c >= seq.c0; c--) {
        Chunk chunk = d.chunk[c];
        if (z.dh) store(g, z.dh + ((int64_t)c * d.HV + hv) * d.K * d.V + col, d.K, d.V);
        for (int64_t t = chunk.t0 + chunk.len - 1; t >= chunk.t0; t--) {
            add(g, w.query(t), scaled_do(w, out, t));
            w.back(
                t, g, [](int, int, float) {}, [] {});
        }
    }
    if (z.ds0 && seq.starts)
        store(g, z.ds0 + ((int64_t)seq.gseq * d.HV + hv) * d.K * d.V + col, d.K, d.V);
    int64_t link = (int64_t)seq.part * d.HV + hv;
    if (z.dhm) store(g, z.dhm + link * d.K * z.row + col, d.K, z.row);
}

/* x times s to p [K], or x to *p; the first column finds nothing there. */
__device__ __forceinline__ void add_row(const Walk &w, float *p, const Column &s, float x) {
    if (FAULT(TOKEN_COLUMN) && w.v == w.d.V - 1) return;
    rows_of_lane(w.d.K, [&](int i, int row) { p[row] = fmaf(s.x[i], x, w.v ? p[row] : 0.f); });
}
__device__ __forceinline__ void add_word(const Walk &w, float *p, float x) {
    if (FAULT(TOKEN_COLUMN) && w.v == w.d.V - 1) return;
    if (threadIdx.x % 32 == 0) *p = x + (w.v ? *p : 0.f);
}

/* What a key read: of all that read with it `first` is the first. */
__device__ __forceinline__ Column state_read(const Walk &w, int64_t t, int first,
                                             const Column &before, const Column &decayed,
                                             const float *E) {
    if (w.a.rule.reads == UNDECAYED) return before;
    Column s = decayed;
    for (int j = 0; j < first; j++)
        add(s, w.key(t, j), w.strength(t, j) * E[j]);
    return s;
}

/* The gradients of token t in one column, from the state before it; G from behind it to before. */
__device__ void grads_of_token(const Walk &w, const dpg_grads &out, const TokenGrads &y, int64_t t,
                               const Column &before, Column &g) {
    const Dims &d = w.d;
    int64_t th = w.head(t);
    int n = w.a.rule.keys;
    float E[MOST_KEYS], dout = scaled_do(w, out, t);
    Column s = before, decayed = before;
    w.step(t, s, E);
    w.decay(t, decayed);
    add_row(w, y.q + th * d.K, s, dout);
    add(g, w.query(t), dout);
    auto seen = [&](int j, int first, float dX) {
        int64_t at = th * n + j;
        float b = w.strength(t, j);
        if (threadIdx.x % 32 == 0) y.u[at * d.V + w.v] = b * dX;
        add_word(w, y.b + at, E[j] * dX);
        add_row(w, y.k + at * d.K, g, b * E[j]);
        if (w.a.e) add_row(w, y.e + at * d.K, state_read(w, t, first, before, decayed, E), -b * dX);
    };
    auto decays = [&] {
        if (d.Kg == 1) return add_word(w, y.g + th, dot(g, decayed));
        Column own;
        for (int i = 0; i < COLUMN_ROWS; i++)
            own.x[i] = g.x[i] * decayed.x[i];
        add_row(w, y.g + th * d.K, own, 1.f);
    };
    w.back(t, g, seen, decays);
}

__global__ void k_token_grads(Dims d, dpg_grads out, Token a, TokenGrads y, const float *h,
                              const float *dh) {
    int64_t tile = (int64_t)blockIdx.x * WARPS + threadIdx.x / 32;
    if (tile >= (int64_t)d.NT * d.HV) return;
    Chunk chunk = d.chunk[tile / d.HV];
    Column before[TOKEN_PATH_CHUNK];
    float E[MOST_KEYS];
    for (int v = 0; v < d.V; v++) {
        Walk w = {d, a, (int)(tile % d.HV), v};
        Column s = column(h + (FAULT(TOKEN_CHUNK) ? tile % d.HV : tile) * d.K * d.V + v, d.K, d.V);
        for (int i = 0; i < chunk.len; i++) {
            before[i] = s;
            w.step(chunk.t0 + i, s, E);
        }
        Column g = column(dh + tile * d.K * d.V + v, d.K, d.V);
        for (int i = chunk.len - 1; i >= 0; i--)
            grads_of_token(w, out, y, chunk.t0 + i, before[i], g);
    }
}

TokenGrads token_grads_of(const Call &c) {
    TokenGrads y = {};
    y.q = at<float>(c, B_DQ);
    y.k = at<float>(c, B_DKW);
    y.e = at<float>(c, B_DKR);
    y.u = at<float>(c, B_DV_NEW);
    y.b = at<float>(c, B_DBETA);
    y.g = at<float>(c, B_DG);
    return y;
}

static dp_status adjoint(const Call &c, const AdjointArgs &z) {
    const Dims &d = c.p->d;
    unsigned blocks = blocks_of((int64_t)z.nseq * d.HV * z.columns);
    k_token_adjoint<<<blocks, THREADS, 0, c.s>>>(d, *c.g, token_of(c), z);
    CK_LAUNCH(c.e, "k_token_adjoint");
    return DP_OK;
}

static dp_status pre(const Call &c) {
    const Dims &d = c.p->d;
    AdjointArgs z = {};
    z.dfinal = c.g->dfinal_state;
    z.dhm = at<float>(c, B_DHM);
    z.row = dh_row(c.p);
    z.seq0 = c.p->bwd0;
    z.nseq = c.p->nbwd;
    z.columns = d.V + (c.p->needs_m && z.row > d.V ? d.K : 0);
    return adjoint(c, z);
}

static dp_status state(const Call &c) {
    AdjointArgs z = {};
    z.dfinal = c.g->dfinal_state;
    z.dsout = at<float>(c, B_DSOUT);
    z.dh = at<float>(c, B_DH);
    z.ds0 = c.g->ds0;
    z.nseq = c.p->d.nseq;
    z.links = state_parts(c.p);
    z.columns = c.p->d.V;
    return adjoint(c, z);
}

static dp_status nothing(const Call &) { return DP_OK; }

static dp_status grads(const Call &c) {
    k_token_grads<<<blocks_of(tile_count(c.p)), THREADS, 0, c.s>>>(
        c.p->d, *c.g, token_of(c), token_grads_of(c), at<float>(c, B_H), at<float>(c, B_DH));
    CK_LAUNCH(c.e, "k_token_grads");
    return DP_OK;
}

extern const Path token_path = {"token",     token_inputs, token_pre, token_state, token_inputs,
                                token_state, nothing,      pre,       state,       grads,
                                token_sums,  token_norm,   1};
