/* gpu/token/backward.cu - the adjoint recurrence token by token in fp32 FMA (token.cuh).
 *
 *   k_token_adjoint   a warp a few columns of G, from each sub-sequence's end: (dH, dM) of the
 *                     first local one; then G after each chunk, and ds0
 *   k_token_grads     a warp a chunk and value head, a few columns after the others: states of its
 *                     tokens again from the one before it, then back from G behind it; gradients of
 *                     what is activated, summed over columns in their order */
#include "plan/tensors.cuh"
#include "token/token.cuh"

/* scale do of token t */
template <int LANES, int N>
__device__ __forceinline__ float scaled_do(const Walk<LANES, N> &w, const dpg_grads &g, int64_t t) {
    return w.v < 0 ? 0.f : w.d.scale * ldx(g.dout, w.head(t) * w.d.V + w.v, w.d.d_bf16);
}

struct AdjointArgs {
    /* [Nseq][HV][K][V] by global sequence, [parts][HV][K][V] from the last on; NULL: zeros */
    const float *dfinal, *dsout;
    float *dh, *ds0, *dhm;      /* each may be NULL; dhm: rows of `row` words */
    int row, seq0, nseq, links; /* local sub-sequences of the launch */
    int columns;                /* V, or V + K with those of dM */
};

template <int LANES, int N>
__global__ void __launch_bounds__(THREADS)
    k_token_adjoint(Dims d, dpg_grads out, Token a, AdjointArgs z) {
    typedef Column<LANES> Part;
    const int groups = z.columns / Part::COUNT;
    int64_t i = (int64_t)blockIdx.x * WARPS + threadIdx.x / 32;
    if (i >= (int64_t)z.nseq * d.HV * groups) return;
    int col = i % groups * Part::COUNT + threadIdx.x % 32 / LANES, hv = i / groups % d.HV;
    Seq seq = d.seq[z.seq0 + i / groups / d.HV];
    Walk<LANES, N> w = {d, a, hv, col < d.V ? col : -1};
    int64_t end = (int64_t)(seq.ends ? seq.gseq : z.links - 1 - seq.part) * d.HV + hv;
    Part g = first_column<LANES>(d, seq.ends ? z.dfinal : z.dsout, end, col);
    int64_t first = d.chunk[seq.c0].t0;
    int64_t last = d.chunk[seq.c1 - 1].t0 + d.chunk[seq.c1 - 1].len - 1;
    Words<LANES, N> next = w.words(last);
    float next_do = scaled_do(w, out, last);
    for (int c = seq.c1 - 1; c >= seq.c0; c--) {
        Chunk chunk = d.chunk[c];
        if (z.dh) g.store(z.dh + ((int64_t)c * d.HV + hv) * d.K * d.V + col, d.K, d.V);
        for (int64_t t = chunk.t0 + chunk.len - 1; t >= chunk.t0; t--) {
            Words<LANES, N> now = next;
            float now_do = next_do;
            next = w.words(t > first ? t - 1 : t);
            next_do = scaled_do(w, out, t > first ? t - 1 : t);
            g.add(now.q, now_do);
            w.back(
                now, t, g, [](int, float) {}, [] {});
        }
    }
    if (z.ds0 && seq.starts)
        g.store(z.ds0 + ((int64_t)seq.gseq * d.HV + hv) * d.K * d.V + col, d.K, d.V);
    int64_t link = (int64_t)seq.part * d.HV + hv;
    if (z.dhm) g.store(z.dhm + link * d.K * z.row + col, d.K, z.row);
}

/* One column's terms of the sums over columns. */
template <int LANES, int N>
__device__ __forceinline__ float share(const Walk<LANES, N> &w, float x) {
    return FAULT(TOKEN_COLUMN) && w.v == w.d.V - 1 ? 0.f : x;
}
/* Is it the first round of the warp, which finds nothing there? */
template <int LANES, int N> __device__ __forceinline__ bool begins(const Walk<LANES, N> &w) {
    return w.v < Column<LANES>::COUNT;
}
/* Sums over the warp's columns of x times s to p [K], or of x to *p. */
template <int LANES, int N>
__device__ __forceinline__ void add_row(const Walk<LANES, N> &w, float *p, Column<LANES> s,
                                        float x) {
    typedef Column<LANES> Part;
    x = share(w, x);
#pragma unroll
    for (int i = 0; i < Part::ROWS; i++)
        s.x[i] *= x;
    s = s.over_columns();
#pragma unroll
    for (int i = 0; i < Part::ROWS / Part::COUNT; i += 4) {
        int row = Part::row(Part::first() + i);
        if (row >= w.d.K) continue;
        float4 y = begins(w) ? make_float4(0.f, 0.f, 0.f, 0.f) : *(const float4 *)(p + row);
        *(float4 *)(p + row) =
            make_float4(y.x + s.x[i], y.y + s.x[i + 1], y.z + s.x[i + 2], y.w + s.x[i + 3]);
    }
}
template <int LANES, int N>
__device__ __forceinline__ void add_word(const Walk<LANES, N> &w, float *p, float x) {
    x = share(w, x);
#pragma unroll
    for (int m = 16; m >= LANES; m /= 2)
        x += __shfl_xor_sync(~0u, x, m);
    if (threadIdx.x % 32 == 0) *p = x + (begins(w) ? 0.f : *p);
}

/* The state that key j read. */
template <int LANES, int N>
__device__ __forceinline__ Column<LANES>
state_read(const Walk<LANES, N> &w, const Words<LANES, N> &now, int64_t t, int j,
           const Column<LANES> &before, const Column<LANES> &decayed, const float *E) {
    if (w.undecayed(j)) return before;
    Column<LANES> s = decayed;
    for (int i = 0; w.in_turn() && i < j; i++)
        s.add(w.key(now, t, i), w.strength(now, t, i) * E[i]);
    return s;
}

/* The gradients of token t in some columns, from the state before it; G from behind it to before.
 */
template <int LANES, int N>
__device__ __forceinline__ void grads_of_token(const Walk<LANES, N> &w, const dpg_grads &out,
                                               const TokenGrads &y, int64_t t,
                                               const Column<LANES> &before, Column<LANES> &g) {
    const Dims &d = w.d;
    int64_t th = w.head(t);
    float E[N ? N : DP_MAX_ROWS], dout = scaled_do(w, out, t);
    Words<LANES, N> now = w.words(t);
    Column<LANES> s = before, decayed = before;
    w.step(now, t, s, E);
    decayed.times(now.decay);
    add_row(w, y.q + th * d.K, s, dout);
    g.add(now.q, dout);
    auto seen = [&](int j, float dX) {
        int64_t at = w.key_row(t, j);
        float b = w.strength(now, t, j);
        if (!Column<LANES>::lane()) y.u[at * d.V + w.v] = b * dX;
        add_word(w, y.b + at, E[j] * dX);
        add_row(w, y.k + at * d.K, g, b * E[j]);
        if (w.a.e)
            add_row(w, y.e + at * d.K, state_read(w, now, t, j, before, decayed, E), -b * dX);
    };
    auto decays = [&] {
        if (d.Kg == 1) return add_word(w, y.g + th, g.dot(decayed));
        Column<LANES> own = g;
        own.times(decayed);
        add_row(w, y.g + th * d.K, own, 1.f);
    };
    w.back(now, t, g, seen, decays);
}

template <int LANES, int N>
__global__ void __launch_bounds__(THREADS)
    k_token_grads(Dims d, dpg_grads out, Token a, TokenGrads y, const float *h, const float *dh) {
    typedef Column<LANES> Part;
    int64_t tile = (int64_t)blockIdx.x * WARPS + threadIdx.x / 32;
    if (tile >= (int64_t)d.NT * d.HV) return;
    Chunk chunk = d.chunk[tile / d.HV];
    Part before[TOKEN_PATH_CHUNK];
    float E[N ? N : DP_MAX_ROWS];
    for (int v = threadIdx.x % 32 / LANES; v < d.V; v += Part::COUNT) {
        Walk<LANES, N> w = {d, a, (int)(tile % d.HV), v};
        Part s =
            Part::load(h + (FAULT(TOKEN_CHUNK) ? tile % d.HV : tile) * d.K * d.V + v, d.K, d.V);
        for (int i = 0; i < chunk.len; i++) {
            before[i] = s;
            w.step(w.words(chunk.t0 + i), chunk.t0 + i, s, E);
        }
        Part g = Part::load(dh + tile * d.K * d.V + v, d.K, d.V);
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
    y.angle = at<float>(c, B_DANGLE);
    for (const Input *x = inputs_of_tokens; x->id >= 0; x++)
        y.in[x->id] = *(void **)((char *)c.g + x->grad_slot);
    return y;
}

static dp_status adjoint(const Call &c, const AdjointArgs &z) {
    const Dims &d = c.p->d;
    int n = token_of(c).n;
    auto kernel = INSTANCE_OF(k_token_adjoint, c.p, n);
    unsigned blocks = blocks_of((int64_t)z.nseq * d.HV * (z.columns / columns_of(c.p)));
    kernel<<<blocks, THREADS, 0, c.s>>>(d, *c.g, token_of(c), z);
    CK_LAUNCH(c.e, "k_token_adjoint");
    return DP_OK;
}

static dp_status pre(const Call &c) {
    const Dims &d = c.p->d;
    AdjointArgs z = {};
    z.dfinal = c.g->dfinal_state;
    z.dsout = came(c);
    z.links = state_parts(c.p);
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
    int n = token_of(c).n;
    auto kernel = INSTANCE_OF(k_token_grads, c.p, n);
    kernel<<<blocks_of(tile_count(c.p)), THREADS, 0, c.s>>>(
        c.p->d, *c.g, token_of(c), token_grads_of(c), at<float>(c, B_H), at<float>(c, B_DH));
    CK_LAUNCH(c.e, "k_token_grads");
    return DP_OK;
}

extern const Path token_path = {"token",     token_inputs, token_pre, token_state, token_inputs,
                                token_state, nothing,      pre,       state,       grads,
                                token_sums,  token_norm,   1,         halo_give,   halo_take,
                                halo_grads};
