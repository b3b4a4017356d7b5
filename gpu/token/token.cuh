/* gpu/token/token.cuh - what a token does to the state of a value head, in one form for every
 * recurrence (math.md b, i):
 *
 *     E_j = u_j - e_j' S_j             [V]   S_j: the state that key j reads (Reads)
 *     S  <- D S + sum_j k_j (b_j E_j)'       D = diag(decay), once a token
 *     o   = scale q' S
 *
 * so that the transition of a token is its decay plus a term of rank one for each of its keys. M of
 * a rank is what becomes of the identity if all u are 0, H what becomes of zeros.
 *
 * Activated inputs of a rank's L tokens, fp32, n keys a token:
 *
 *     q [L][H][K]   k [L][H][n][K]   u [L][HV][n][V]   e [L][HV][n][K]   b [L][HV][n]
 *     decay [L][HV][Kg]
 *
 * The adjoint of a token (math.md d), keys last to first, G the gradient of the state behind it:
 *
 *     G  <- G + scale q do'     dq = scale S do
 *     dX_j = k_j' G     dE_j = du_j = b_j dX_j     db_j = E_j dX_j'
 *     dk_j = G (b_j E_j)'     de_j = - S_j dE_j'     G <- G - e_j dE_j'
 *     dg   = rowsum(G o D S)     G <- D G     (where keys read S itself: before their e_j dE_j')
 *
 * A warp has one column of a state, or of G: lane l rows l, l + 32, .. of it. Sums over K go
 * through the warp, sums over V from column to column of one warp: no shared memory, no barrier. */
#ifndef DPG_TOKEN_CUH
#define DPG_TOKEN_CUH
#include "fault.cuh"
#include "plan/paths.cuh"
#include "plan/values.cuh"

#define WARPS 4
#define THREADS (32 * WARPS)
#define COLUMN_ROWS 8 /* of a lane: K <= 256 */
#define MOST_KEYS 8   /* of a token */

/* What a key of a token reads. */
enum Reads {
    DECAYED,  /* D S, whatever other keys of the token write */
    IN_TURN,  /* D S and what the keys before it wrote */
    UNDECAYED /* S: the decay of the token comes between what it reads and what it writes */
};

/* A recurrence: how strongly it erases and writes, what its keys read, how many a token has (0: R).
 *
 *                  k           e                       u               b
 *   DP_BY_BETA     k           k                       v               beta
 *   DP_BY_GATES    k           erase o k               write o v       1
 *   DP_BY_NOTHING  k           none                    v               1
 *   DP_BY_FACTORS  lr_b, k     -lr_a, 0                0, v            1 */
struct Rule {
    dp_strength strength;
    Reads reads;
    int keys;
};
Rule token_rule(dp_model m);

struct Token {
    float *q, *k, *e, *u, *b, *decay; /* e NULL: nothing is erased */
    Rule rule;                        /* keys: n */
};
/* Where the plan keeps what is activated. */
Token token_of(const Call &c);
/* Gradients of what is activated, in its shapes, but by value head: dq [L][HV][K], dk
 * [L][HV][n][K]; dg of the log gate. */
struct TokenGrads {
    float *q, *k, *e, *u, *b, *g;
};
TokenGrads token_grads_of(const Call &c);

/* activate.cu */
dp_status token_inputs(const Call &c);
/* forward.cu */
dp_status token_pre(const Call &c);
dp_status token_state(const Call &c); /* backward: h alone */
/* gradients.cu */
dp_status token_sums(const Call &c);
dp_status token_norm(const Call &c);

/* Warps for n columns. */
static inline unsigned blocks_of(int64_t n) { return (unsigned)((n + WARPS - 1) / WARPS); }

#ifdef __CUDACC__
/* Rows of a column, or of a key, that a lane has; 0 behind row K. */
struct Column {
    float x[COLUMN_ROWS];
};
/* f(i, row) for each row of this lane. */
template <class F> __device__ __forceinline__ void rows_of_lane(int K, F f) {
#pragma unroll
    for (int i = 0; i < COLUMN_ROWS; i++)
        if ((int)threadIdx.x % 32 + 32 * i < K) f(i, (int)threadIdx.x % 32 + 32 * i);
}
__device__ __forceinline__ Column column(const float *p, int K, int stride = 1) {
    Column y = {};
    if (p) rows_of_lane(K, [&](int i, int row) { y.x[i] = p[(int64_t)row * stride]; });
    return y;
}
__device__ __forceinline__ void store(const Column &s, float *p, int K, int stride = 1) {
    rows_of_lane(K, [&](int i, int row) { p[(int64_t)row * stride] = s.x[i]; });
}
/* The same in all lanes. */
__device__ __forceinline__ float dot(const Column &a, const Column &b) {
    float sum = 0.f;
#pragma unroll
    for (int i = 0; i < COLUMN_ROWS; i++)
        sum = fmaf(a.x[i], b.x[i], sum);
    for (int m = 16; m; m /= 2)
        sum += __shfl_xor_sync(~0u, sum, m);
    return sum;
}
__device__ __forceinline__ void add(Column &s, const Column &k, float x) {
#pragma unroll
    for (int i = 0; i < COLUMN_ROWS; i++)
        s.x[i] = fmaf(k.x[i], x, s.x[i]);
}

/* One column of one value head: v its number among the values, -1: of M. */
struct Walk {
    const Dims &d;
    const Token &a;
    int hv, v;

    __device__ __forceinline__ int64_t head(int64_t t) const { return t * d.HV + hv; }
    __device__ __forceinline__ Column query(int64_t t) const {
        return column(a.q + (t * d.H + hv / d.G) * d.K, d.K);
    }
    __device__ __forceinline__ Column key(int64_t t, int j) const {
        return column(a.k + ((t * d.H + hv / d.G) * a.rule.keys + j) * d.K, d.K);
    }
    __device__ __forceinline__ Column erasing(int64_t t, int j) const {
        return column(a.e + (head(t) * a.rule.keys + j) * d.K, d.K);
    }
    __device__ __forceinline__ float value(int64_t t, int j) const {
        int col = v < 0 && FAULT(TOKEN_M_VALUES) ? 0 : v;
        return col < 0 ? 0.f : a.u[(head(t) * a.rule.keys + j) * d.V + col];
    }
    __device__ __forceinline__ float strength(int64_t t, int j) const {
        return a.b[head(t) * a.rule.keys + j];
    }
    __device__ __forceinline__ void decay(int64_t t, Column &s) const {
        const float *g = a.decay + head(t) * d.Kg;
        rows_of_lane(d.K, [&](int i, int row) { s.x[i] *= g[d.Kg == 1 ? 0 : row]; });
    }
    /* Keys that read one state: all of a token, or one. */
    __device__ __forceinline__ int at_once() const {
        return a.rule.reads == IN_TURN && !FAULT(TOKEN_AT_ONCE) ? 1 : a.rule.keys;
    }

    /* S from before token t to after it; E [n]. */
    __device__ __forceinline__ void step(int64_t t, Column &s, float *E) const {
        int late = a.rule.reads == UNDECAYED && !FAULT(TOKEN_DECAYED), n = at_once();
        if (!late) decay(t, s);
        for (int first = 0; first < a.rule.keys; first += n) {
            for (int j = first; j < first + n; j++)
                E[j] = value(t, j) - (a.e ? dot(erasing(t, j), s) : 0.f);
            if (late) decay(t, s);
            for (int j = first; j < first + n; j++)
                add(s, key(t, j), strength(t, j) * E[j]);
        }
    }

    /* G, do already in it, from after token t to before it. seen(j, first, dX): of each key, the
     * first of those that read with it, before their own terms are taken off; decays(): G before
     * its decay. */
    template <class F, class D>
    __device__ __forceinline__ void back(int64_t t, Column &g, F seen, D decays) const {
        int late = a.rule.reads == UNDECAYED, n = at_once();
        float dE[MOST_KEYS];
        for (int first = a.rule.keys - n; first >= 0; first -= n) {
            for (int j = first; j < first + n; j++) {
                float dX = dot(key(t, j), g);
                dE[j] = strength(t, j) * dX;
                seen(j, first, dX);
            }
            if (late) decays();
            if (late && !FAULT(TOKEN_ADJOINT)) decay(t, g);
            for (int j = first; a.e && j < first + n; j++)
                add(g, erasing(t, j), -dE[j]);
        }
        if (!late) decays();
        if (!late || FAULT(TOKEN_ADJOINT)) decay(t, g);
    }
};
#endif
#endif
