/* gpu/token/activate.cu - the table of recurrences, and from inputs to what their tokens do
 * (math.md b, c, i). One warp a token and value head, no shared memory; what value heads share the
 * first of them writes. */
#include "token/token.cuh"

#define ROW(ID, NAME, ONE_GATE, MANY_KEYS, TURNS, BY) {BY, TURNS},
static const struct {
    dp_strength by;
    int in_turn;
} rows[DP_NMODELS] = {DP_RECURRENCES(ROW)};

Rule token_rule(dp_model m) {
    dp_strength by = rows[m].by;
    Reads reads = by == DP_BY_FACTORS ? UNDECAYED : rows[m].in_turn ? IN_TURN : DECAYED;
    return {by, reads, by == DP_BY_BETA ? 0 : by == DP_BY_FACTORS ? 2 : 1};
}
int token_keys(const dpg_problem *p) {
    int n = token_rule(p->model).keys;
    return n ? n : p->R;
}
int token_erases(dp_model m) { return rows[m].by != DP_BY_NOTHING; }
int token_alone(dp_model m) { return rows[m].by != DP_BY_BETA || rows[m].in_turn; }

Token token_of(const Call &c) {
    Token a = {};
    a.q = at<float>(c, B_QN);
    a.k = at<float>(c, B_KN);
    a.e = at<float>(c, B_ERASE);
    a.u = at<float>(c, B_VALUE);
    a.b = at<float>(c, B_BETA);
    a.decay = at<float>(c, B_DECAY);
    a.rule = token_rule(c.p->d.model);
    a.rule.keys = c.p->d.n / c.p->d.tok;
    return a;
}

/* A row of q or of a key, divided by its norm if the problem says so. */
__device__ __forceinline__ Row unit_row(const Dims &d, const void *x, int64_t at) {
    Row y = {};
    Row::rows(d.K, [&](int i, int row) { y.x[i] = ldx(x, at + row, d.in_bf16); });
    if (!d.l2norm) return y;
    float norm = sqrtf(y.dot(y) + (float)DP_L2_EPS);
    Row::rows(d.K, [&](int i, int) { y.x[i] /= norm; });
    return y;
}
/* s times a row of an input of value heads; NULL: s itself. */
__device__ __forceinline__ Row times(const Dims &d, Row s, const void *x, int64_t at) {
    if (x) Row::rows(d.K, [&](int i, int row) { s.x[i] *= ldx(x, at + row, d.in_bf16); });
    return s;
}

/* Key j of token t in value head hv: what writes, what erases, its values, its strength. */
__device__ void activate_key(const Dims &d, const dpg_tensors &t, const Token &a, int64_t th,
                             int64_t tq, int j, int is_first) {
    int n = a.rule.keys, lane = threadIdx.x % 32;
    dp_strength by = a.rule.strength;
    int factor = by == DP_BY_FACTORS && j == 0; /* lr_b, before the key itself */
    int64_t row = (th * n + j) * d.K, given = by == DP_BY_FACTORS ? th : th * n + j;
    Row k = unit_row(d, factor ? t.lr_b : t.k, by == DP_BY_FACTORS ? tq * d.K : (tq * n + j) * d.K);
    if (is_first) k.store(a.k + (tq * n + j) * d.K, d.K);
    if (by == DP_BY_BETA) k.store(a.e + row, d.K);
    if (by == DP_BY_GATES)
        times(d, k, FAULT(TOKEN_ERASE) ? NULL : t.erase, th * d.K).store(a.e + row, d.K);
    if (by == DP_BY_FACTORS)
        Row::rows(d.K, [&](int, int x) {
            a.e[row + x] = factor ? -ldx(t.lr_a, th * d.K + x, d.in_bf16) : 0.f;
        });
    for (int v = lane; v < d.V; v += 32) {
        float w = by == DP_BY_GATES ? ldx(t.write, th * d.V + v, d.in_bf16) : 1.f;
        a.u[(th * n + j) * d.V + v] = factor ? 0.f : w * ldx(t.v, given * d.V + v, d.in_bf16);
    }
    if (!lane) a.b[th * n + j] = t.beta ? beta_value(d, ldx(t.beta, th * n + j, d.g_bf16)) : 1.f;
}

__global__ void k_token_inputs(Dims d, dpg_tensors t, Token a) {
    int64_t th = (int64_t)blockIdx.x * WARPS + threadIdx.x / 32;
    if (th >= d.L * d.HV) return;
    int hv = th % d.HV, is_first = hv % d.G == 0;
    int64_t tq = th / d.HV * d.H + hv / d.G;
    float A = expf(param(t.A_log, hv, d.A_type));
    for (int x = threadIdx.x % 32; x < d.Kg; x += 32)
        a.decay[th * d.Kg + x] = expf(gate_value(d, ldx(t.g, th * d.Kg + x, d.g_bf16), A,
                                                 param(t.dt_bias, hv * d.Kg + x, d.bias_type)));
    if (is_first) unit_row(d, t.q, tq * d.K).store(a.q + tq * d.K, d.K);
    for (int j = 0; j < a.rule.keys; j++)
        activate_key(d, t, a, th, tq, j, is_first);
}

dp_status token_inputs(const Call &c) {
    const Dims &d = c.p->d;
    k_token_inputs<<<blocks_of(d.L * d.HV), THREADS, 0, c.s>>>(d, *c.t, token_of(c));
    CK_LAUNCH(c.e, "k_token_inputs");
    return DP_OK;
}
