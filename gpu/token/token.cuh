/* gpu/token/token.cuh - what a token does to the state of a value head, in one form for every
 * recurrence (math.md b, i):
 *
 *     E_j = u_j - e_j' S_j             [V]   S_j: the state that row j reads
 *     S  <- D S + sum_j k_j (b_j E_j)'       D = diag(decay), once a token
 *     o   = scale q' S
 *
 * so that the transition of a token is its decay plus a term of rank one for each of its rows. M of
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
 * A warp has 32 / LANES columns of a state, or of G, side by side. A token's keys are read once for
 * all of them, and a sum over K takes log2(LANES) shuffles. Sums over V are sums over a warp's
 * columns, then over its rounds: no shared memory, no barrier. */
#ifndef DPG_TOKEN_CUH
#define DPG_TOKEN_CUH
#include "fault.cuh"
#include "plan/paths.cuh"
#include "plan/values.cuh"

#define WARPS 4
#define THREADS (32 * WARPS)

struct Token {
    float *q, *k, *e, *u, *b, *decay; /* e NULL: nothing is erased */
    float *cos_sin; /* of sums of angles [L][HV][pairs][2]; NULL: nothing is rotated */
    int n, pairs, looks_back;
    dp_recurrence rows;
    dp_norm_info norm;          /* that of its rows */
    const void *in[DP_NINPUTS]; /* raw */
    /* of the token before the first one of each of the rank's parts, NULL: none; its gradients, of
     * all parts. Words [HV][numbers of a head] of an input lie from halo_at on, -1: none do */
    const float *halo, *dhalo;
    int halo_at[DP_NINPUTS], halo_words;
    const Link *link; /* the rank's parts */
    const int *place; /* of a part among the gathered */
};
/* Where the plan keeps what is activated. */
Token token_of(const Call &c);
/* Gradients of what is activated, in its shapes, but by value head: dq [L][HV][K], dk
 * [L][HV][n][K]; dg of the log gate. */
struct TokenGrads {
    float *q, *k, *e, *u, *b, *g, *angle; /* angle [L][HV][pairs]: of a token's own sum */
    void *in[DP_NINPUTS];                 /* of raw inputs; NULL: not wanted */
};
TokenGrads token_grads_of(const Call &c);

/* activate.cu */
dp_status token_inputs(const Call &c);
/* forward.cu */
dp_status token_pre(const Call &c);
dp_status token_state(const Call &c); /* backward: h alone */
/* halo.cu */
void set_halo(const Call &c, Token *a);
dp_status halo_give(const Call &c);
dp_status halo_take(const Call &c);
/* gradients.cu */
dp_status halo_grads(const Call &c);
dp_status token_sums(const Call &c);
dp_status token_norm(const Call &c);

/* Blocks for n warps. */
static inline unsigned blocks_of(int64_t n) { return (unsigned)((n + WARPS - 1) / WARPS); }
/* Lanes of a column: 16 rows each. V is a multiple of the columns of a warp, so that all of them
 * are of a state, or of M. */
static inline int lanes_of(const dpg_plan *p) { return p->d.K <= 128 ? 8 : 16; }
static inline unsigned columns_of(const dpg_plan *p) { return 32 / lanes_of(p); }
/* The instance of a kernel for the lanes of a plan's columns and `keys` of a token. */
#define OF_KEYS(k, lanes, keys) (keys == 1 ? k<lanes, 1> : keys == 2 ? k<lanes, 2> : k<lanes, 0>)
#define INSTANCE_OF(k, plan, keys) \
    (lanes_of(plan) == 8 ? OF_KEYS(k, 8, keys) : OF_KEYS(k, 16, keys))

#ifdef __CUDACC__
/* Rows of a column, or of a key, that a lane has, in fours LANES apart; 0 behind row K. A warp has
 * 32 / LANES of them side by side. */
template <int LANES> struct Column {
    static const int ROWS = LANES == 32 ? 8 : 16, COUNT = 32 / LANES; /* columns of a warp */
    float x[ROWS];
    __device__ __forceinline__ static int lane() { return threadIdx.x % LANES; }
    __device__ __forceinline__ static int row(int i) {
        return 4 * lane() + i / 4 * 4 * LANES + i % 4;
    }
    /* f(i, row) for each row of this lane; of a multiple of 4 rows. */
    template <class F> __device__ __forceinline__ static void rows(int K, F f) {
#pragma unroll
        for (int i = 0; i < ROWS; i += 4)
            if (row(i) < K)
#pragma unroll
                for (int j = i; j < i + 4; j++)
                    f(j, row(j));
    }
    /* Loads consecutive words, on a multiple of 16 bytes. */
    __device__ __forceinline__ static Column load(const float *p, int K) {
        Column y = {};
#pragma unroll
        for (int i = 0; i < ROWS; i += 4)
            if (row(i) < K) *(float4 *)(y.x + i) = *(const float4 *)(p + row(i));
        return y;
    }
    __device__ __forceinline__ void store(float *p, int K) const {
#pragma unroll
        for (int i = 0; i < ROWS; i += 4)
            if (row(i) < K) *(float4 *)(p + row(i)) = *(const float4 *)(x + i);
    }
    /* Loads words `stride` apart. */
    __device__ __forceinline__ static Column load(const float *p, int K, int stride) {
        Column y = {};
        rows(K, [&](int i, int row) { y.x[i] = p[(int64_t)row * stride]; });
        return y;
    }
    __device__ __forceinline__ void store(float *p, int K, int stride) const {
        rows(K, [&](int i, int row) { p[(int64_t)row * stride] = x[i]; });
    }
    /* Row r, another one in each lane; all lanes of the warp ask. */
    __device__ __forceinline__ float at(int r) const {
        float y = 0.f;
#pragma unroll
        for (int i = 0; i < ROWS; i++) {
            float z = __shfl_sync(~0u, x[i], threadIdx.x % 32 / LANES * LANES + r / 4 % LANES);
            if (i == r / 4 / LANES * 4 + r % 4) y = z;
        }
        return y;
    }
    /* Over the rows; the same in all lanes of a column. */
    __device__ __forceinline__ float dot(const Column &b) const {
        float part[4] = {}; /* short chains: a warp waits for nothing else */
#pragma unroll
        for (int i = 0; i < ROWS; i++)
            part[i % 4] = fmaf(x[i], b.x[i], part[i % 4]);
        float sum = (part[0] + part[1]) + (part[2] + part[3]);
#pragma unroll
        for (int m = LANES / 2; m; m /= 2)
            sum += __shfl_xor_sync(~0u, sum, m);
        return sum;
    }
    __device__ __forceinline__ void add(const Column &k, float y) {
#pragma unroll
        for (int i = 0; i < ROWS; i++)
            x[i] = fmaf(k.x[i], y, x[i]);
    }
    __device__ __forceinline__ void times(const Column &k) {
#pragma unroll
        for (int i = 0; i < ROWS; i++)
            x[i] *= k.x[i];
    }
    /* Over the columns of the warp: of ROWS / COUNT rows from i = first() on, which other lanes
     * have not, to x from 0 on. */
    __device__ __forceinline__ static int first() {
        return (threadIdx.x % 32) / LANES * (ROWS / COUNT);
    }
    __device__ __forceinline__ Column over_columns() const {
        Column y = *this;
#pragma unroll
        for (int m = 16, n = ROWS / 2; m >= LANES; m /= 2, n /= 2) {
            bool upper = threadIdx.x & m;
#pragma unroll
            for (int i = 0; i < n; i++) {
                float mine = upper ? y.x[n + i] : y.x[i], other = upper ? y.x[i] : y.x[n + i];
                y.x[i] = mine + __shfl_xor_sync(~0u, other, m);
            }
        }
        return y;
    }
};

/* A row of a token, a warp. */
typedef Column<32> Row;

/* Column `col` of a state [K][V] among `states`, NULL: zeros; behind V of the identity. */
template <int LANES>
__device__ __forceinline__ Column<LANES> first_column(const Dims &d, const float *states,
                                                      int64_t state, int col) {
    Column<LANES> s = {};
    if (col >= d.V)
        s.rows(d.K, [&](int i, int row) { s.x[i] = row == col - d.V; });
    else if (states)
        s = Column<LANES>::load(states + state * d.K * d.V + col, d.K, d.V);
    return s;
}

/* A token's data for one value head: its decay, its query, its keys; N = 0: the first of them. */
template <int LANES, int N> struct Words {
    static const int KEYS = N ? N : 1;
    Column<LANES> decay, q, k[KEYS], e[KEYS];
    float u[KEYS], b[KEYS];
};

/* Columns of one value head: v the number of a lane's among the values, -1: of M. N: keys of a
 * token; 0: any number. */
template <int LANES, int N> struct Walk {
    typedef Column<LANES> Part;
    typedef Words<LANES, N> Now;
    const Dims &d;
    const Token &a;
    int hv, v;

    __device__ __forceinline__ int keys() const { return N ? N : a.n; }
    __device__ __forceinline__ int64_t head(int64_t t) const { return t * d.HV + hv; }
    __device__ __forceinline__ int64_t query_head(int64_t t) const { return t * d.H + hv / d.G; }
    __device__ __forceinline__ int64_t key_row(int64_t t, int j) const {
        return head(t) * keys() + j;
    }
    __device__ __forceinline__ Part load_key(int64_t t, int j) const {
        return Part::load(a.k + (query_head(t) * keys() + j) * d.K, d.K);
    }
    __device__ __forceinline__ Part load_erasing(int64_t t, int j) const {
        return Part::load(a.e + key_row(t, j) * d.K, d.K);
    }
    __device__ __forceinline__ float load_value(int64_t t, int j) const {
        int col = v < 0 && FAULT(TOKEN_M_VALUES) ? 0 : v;
        return col < 0 ? 0.f : a.u[key_row(t, j) * d.V + col];
    }
    /* Words of a token; asked for one token ahead where a warp waits for nothing else. */
    __device__ __forceinline__ Now words(int64_t t) const {
        Now w = {};
        const float *g = a.decay + head(t) * d.Kg;
        if (d.Kg == 1)
            Part::rows(d.K, [&](int i, int) { w.decay.x[i] = *g; });
        else
            w.decay = Part::load(g, d.K);
        w.q = Part::load(a.q + query_head(t) * d.K, d.K);
#pragma unroll
        for (int j = 0; j < Now::KEYS; j++) {
            w.k[j] = load_key(t, j);
            if (a.e) w.e[j] = load_erasing(t, j);
            w.u[j] = load_value(t, j);
            w.b[j] = a.b[key_row(t, j)];
        }
        return w;
    }
    /* The part of key j. */
    __device__ __forceinline__ Part key(const Now &w, int64_t t, int j) const {
        return j < Now::KEYS ? w.k[N ? j : 0] : load_key(t, j);
    }
    __device__ __forceinline__ Part erasing(const Now &w, int64_t t, int j) const {
        return j < Now::KEYS ? w.e[N ? j : 0] : load_erasing(t, j);
    }
    __device__ __forceinline__ float value(const Now &w, int64_t t, int j) const {
        return j < Now::KEYS ? w.u[N ? j : 0] : load_value(t, j);
    }
    __device__ __forceinline__ float strength(const Now &w, int64_t t, int j) const {
        return j < Now::KEYS ? w.b[N ? j : 0] : a.b[key_row(t, j)];
    }
    /* E of key j, which reads s. */
    __device__ __forceinline__ float error(const Now &w, int64_t t, int j, const Part &s) const {
        return value(w, t, j) - (a.e ? erasing(w, t, j).dot(s) : 0.f);
    }
    __device__ __forceinline__ bool in_turn() const { return a.rows.in_turn; }
    __device__ __forceinline__ bool undecayed(int j) const { return dp_row_undecayed(&a.rows, j); }

    /* S from before token t to after it; E [n]. */
    __device__ __forceinline__ void step(const Now &w, int64_t t, Part &s, float *E) const {
        bool late = a.rows.before && !FAULT(TOKEN_DECAYED);
        if (!late) s.times(w.decay);
        if (in_turn() && !FAULT(TOKEN_AT_ONCE)) {
#pragma unroll
            for (int j = 0; j < keys(); j++) {
                E[j] = error(w, t, j, s);
                if (late && !j) s.times(w.decay);
                s.add(key(w, t, j), strength(w, t, j) * E[j]);
            }
            return;
        }
#pragma unroll
        for (int j = 0; j < keys(); j++)
            E[j] = error(w, t, j, s);
        if (late) s.times(w.decay);
#pragma unroll
        for (int j = 0; j < keys(); j++)
            s.add(key(w, t, j), strength(w, t, j) * E[j]);
    }

    /* Takes G, which already contains do, from after token t to before it. Calls seen(j, dX) for
     * each key before its own term is subtracted, and decays() before G decays. */
    template <class F, class D>
    __device__ __forceinline__ void back(const Now &w, int64_t t, Part &g, F seen, D decays) const {
        bool late = a.rows.before;
        float dE[N ? N : DP_MAX_ROWS];
#pragma unroll
        for (int j = keys() - 1; j >= 0; j--) {
            float dX = key(w, t, j).dot(g);
            dE[j] = strength(w, t, j) * dX;
            seen(j, dX);
            if (in_turn() && a.e && !undecayed(j)) g.add(erasing(w, t, j), -dE[j]);
        }
        if (late) decays();
        if (late && !FAULT(TOKEN_ADJOINT)) g.times(w.decay);
        if (a.e)
#pragma unroll
            for (int j = 0; j < keys(); j++)
                if (!in_turn() || undecayed(j)) g.add(erasing(w, t, j), -dE[j]);
        if (!late) decays();
        if (!late || FAULT(TOKEN_ADJOINT)) g.times(w.decay);
    }
};
#endif
#endif
