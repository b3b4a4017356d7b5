/* Draws: nearby problems, run by the design and by the fp64 reference (expected.h). */
#include "expected.h"
#include "harness/simulated/ranks_stages.h"
#include "ref/chunk/chunk_gated.h"
#include "ref/chunk/gate.h"
#include "ref/chunk/recurrent.h"
#include "ref/inputs/inputs.h"
#include "ref/vocabulary/context.h"
#include "ref/vocabulary/formats.h"
#include "ref/vocabulary/problem.h"

#include <float.h>
#include <math.h>
#include <omp.h>
#include <stdlib.h>
#include <string.h>

/* ---- every number of the inputs moves at random ---------------------------------------------- */

/* Uniform in [0, 1) from the bits of |x|: equal numbers have the same. */
static double uniform_of(double x, uint64_t seed, uint64_t stream) {
    const double size = fabs(x);
    dp_rng r;
    uint64_t bits;
    memcpy(&bits, &size, sizeof bits);
    dp_rng_seed(&r, seed ^ bits, stream);
    return dp_rng_uniform(&r);
}

/* x (1 + d), d uniform in +-2^-7, about one unit of bf16 on average, rounded to the format again.
 * Zeros, infinities and NaN stay; in every other draw what was equal stays equal. */
static double *moved(const dp_mover *m, const double *x, int64_t n, dp_format f, uint64_t stream) {
    if (!x) return NULL;
    const uint64_t seed = 0x6472617773ull + m->draw;
    dp_rng r;
    double *y = dp_doubles(n);
    dp_rng_seed(&r, seed, stream);
    for (int64_t i = 0; i < n; i++) {
        const double u = m->draw % 2 ? uniform_of(x[i], seed, stream) : dp_rng_uniform(&r);
        const double z = x[i] * (1 + (2 * u - 1) * 0x1p-7);
        y[i] = isfinite(z) ? dp_store(f, z) : x[i];
    }
    return y;
}

/* The narrowest format that holds all of x: weights stay as short as they are. */
static dp_format narrowest(const double *x, int64_t n) {
    dp_format f = DP_BF16;
    for (int64_t i = 0; i < n && f != DP_FP64; i++) {
        if (f == DP_BF16 && dp_store(DP_BF16, x[i]) != x[i]) f = DP_FP32;
        if (f == DP_FP32 && dp_store(DP_FP32, x[i]) != x[i]) f = DP_FP64;
    }
    return f;
}

/* Convolutions of a draw: x, w and bias moved, no dy; each to be freed with dp_conv_free. NULL:
 * none. */
static void nearby_front(const dp_front *front, const dp_mover *m, dp_conv y[3]) {
    for (int i = 0; i < 3; i++) {
        const dp_conv *v = front ? front->conv[i] : NULL;
        const uint64_t stream = 10 + (uint64_t)i;
        y[i] = (dp_conv){0};
        if (!v) continue;
        const int64_t nw = (int64_t)v->D * v->W;
        y[i] = *v;
        y[i].dy = NULL;
        y[i].cu = dp_calloc((size_t)v->Nseq + 1, sizeof *v->cu);
        memcpy(y[i].cu, v->cu, sizeof *v->cu * ((size_t)v->Nseq + 1));
        y[i].x = moved(m, v->x, v->T * v->D, m->dtype, stream);
        y[i].w = moved(m, v->w, nw, narrowest(v->w, nw), stream + 3);
        y[i].bias =
            moved(m, v->bias, v->D, v->bias ? narrowest(v->bias, v->D) : DP_BF16, stream + 6);
    }
}

#define OF_ROWS(ID, ...) [DP_INPUT_##ID] = 20 + DP_INPUT_##ID - DP_INPUT_ERASE,
/* The stream of random numbers of each input: recorded verdicts depend on it. */
static const uint64_t STREAM[DP_NINPUTS] = {
    [DP_INPUT_Q] = 0,    [DP_INPUT_K] = 1,      [DP_INPUT_V] = 2,          [DP_INPUT_G] = 3,
    [DP_INPUT_BETA] = 4, [DP_INPUT_DO] = 5,     [DP_INPUT_A_LOG] = 6,      [DP_INPUT_DT_BIAS] = 7,
    [DP_INPUT_S0] = 8,   [DP_INPUT_DSTATE] = 9, DP_ALL_ROW_INPUTS(OF_ROWS)};

dp_problem dp_nearby_problem(const dp_problem *p, const dp_mover *m) {
    const dp_format wide = m->dtype == DP_FP64 ? DP_FP64 : DP_FP32;
    dp_problem y = *p;
    y.cu = dp_cu_copy(p);
    for (int i = 0; i < DP_NINPUTS; i++) {
        const dp_format f = dp_input_fields[i].parameter             ? wide
                            : i == DP_INPUT_G || i == DP_INPUT_ANGLE ? m->summed
                                                                     : m->dtype;
        y.in[i] = moved(m, dp_input_of(p, i), dp_input_count(p, i), f, STREAM[i]);
    }
    for (int64_t i = 0;
         p->beta && p->beta_form == DP_BETA_PLAIN && i < dp_input_count(p, DP_INPUT_BETA); i++)
        if (p->beta[i] <= 2 && y.beta[i] > 2) y.beta[i] = 2; /* a contraction stays one */
    return y;
}

/* ---- what is sent ---------------------------------------------------------------------------- */

/* The states that ranks of a recurrent design receive where messages are rounded (payload.h). They
 * exchange in fp32, as simulated ranks, the pairs that the token recurrence makes.
 *
 * A rank in which the sequence begins (ends) sends the state (the gradient) that leaves it. In an
 * all-gather of begins=pair it sends its pair, which is applied to the initial state on arrival.
 */

/* Does a payload change what comes. */
static int rounds(dp_sending x) {
    const dp_payload_info *p = &dp_payloads[x.payload];
    return dp_exchanges[x.exchange].states &&
           (p->u > dp_payloads[DP_PAYLOAD_FP32].u || p->tolerance > 0);
}

/* Does a rank in which a sequence begins (back: ends) send its pair, to be applied to a state. */
static int from_pair(const dp_problem *p, dp_sending x, int back) {
    return x.exchange == DP_EXCHANGE_ALLGATHER && rounds(x) && !x.begins &&
           (back ? p->dstate : p->s0);
}

/* ---- pairs ----------------------------------------------------------------------------------- */

/* M, H, dM and dH of ranks as a recurrent design makes them: the
 * token recurrence over a rank's tokens (math.md g.1).
 *
 *   H   from zeros, over the last local sub-sequence    dH   its adjoint from zeros, over the first
 *   M   of the identity without values                  dM   its adjoint of the identity
 *
 * A rank in which a sequence begins has M, too, if it sends its rounded pair and the sequence has
 * an initial state. Likewise dM, for a rank in which a sequence with a gradient of its final state
 * ends.
 */

typedef struct {
    const dp_problem *p;
    const dp_design *design;
    int backward;
    const dp_context *rank;
    dp_drawn_pairs *out;
} work;

/* Local sub-sequence i as a problem of its own that starts from zeros; cu [2] becomes its own. All
 * other pointers are p's. */
static dp_problem sub_sequence(const work *w, int i, int64_t *cu) {
    const int64_t from = w->rank->a + w->rank->local_cu[i];
    const int64_t to = w->rank->a + w->rank->local_cu[i + 1];
    dp_problem q = *w->p;
    for (int k = 0; k < DP_NINPUTS; k++)
        if (dp_input_of(w->p, k) && dp_input_fields[k].kind == DP_OF_TOKENS)
            q.in[k] += from * dp_input_width(w->p, k);
    q.s0 = q.dstate = NULL;
    q.own = (dp_owners){0};
    q.T = cu[1] = to - from;
    q.cu = cu;
    q.Nseq = 1;
    cu[0] = 0;
    return q;
}

static void keep_in(const work *w, double ***list, int64_t each, const double *x) {
    if (!*list) *list = dp_calloc((size_t)w->out->n, sizeof **list);
    for (int hv = 0; hv < w->p->HV; hv++)
        (*list)[w->rank->rank * w->p->HV + hv] = dp_copy(x + hv * each, each);
}
static void keep(const work *w, int tensor, const double *x) {
    keep_in(w, &w->out->of[tensor], dp_rank_width(w->p, tensor), x);
}

static double *identities(const dp_problem *p) {
    double *x = dp_doubles((int64_t)p->HV * p->K * p->K);
    for (int64_t i = 0; i < (int64_t)p->HV * p->K; i++)
        x[i * p->K + i % p->K] = 1;
    return x;
}

/* M of local sub-sequence i, backward dM, too, as final_state and ds0: V = K, no values. */
static dp_result of_identities(const work *w, int i, int backward) {
    int64_t cu[2];
    dp_result got;
    dp_problem q = sub_sequence(w, i, cu);
    q.V = q.K;
    double **const zero[] = {&q.v, &q.write, &q.dout};
    for (int k = 0; k < 3; k++)
        if (*zero[k]) *zero[k] = dp_doubles(q.T * q.HV * q.R * q.K);
    q.s0 = identities(&q);
    if (backward) q.dstate = q.s0;
    dp_recurrent_run(&q, w->design, backward, NULL, &got);
    for (int k = 0; k < 3; k++)
        free(*zero[k]);
    free(q.s0);
    return got;
}

static void products(const work *w) {
    DP_FREED(dp_result_free) dp_result got = of_identities(w, 0, w->backward);
    keep(w, DP_RANK_M, got.final_state);
    if (w->backward) keep(w, DP_RANK_DM, got.ds0);
}

/* The element of a rank that does not pass on what comes to it. */
static void first_products(const work *w) {
    const int64_t each = (int64_t)w->p->K * w->p->K;
    if (from_pair(w->p, w->design->sending, 0) && dp_context_runs_pre_fwd(w->rank)) {
        dp_result got = of_identities(w, w->rank->nlocal - 1, 0);
        keep_in(w, &w->out->begins[0], each, got.final_state);
        dp_result_free(&got);
    }
    if (!w->backward || !from_pair(w->p, w->design->sending, 1)) return;
    if (!dp_context_runs_pre_bwd(w->rank)) return;
    DP_FREED(dp_result_free) dp_result got = of_identities(w, 0, 1);
    keep_in(w, &w->out->begins[1], each, got.ds0);
}

static void sums(const work *w, int i, int tensor) {
    int64_t cu[2];
    DP_FREED(dp_result_free) dp_result got;
    const dp_problem q = sub_sequence(w, i, cu);
    dp_recurrent_run(&q, w->design, tensor == DP_RANK_DH, NULL, &got);
    keep(w, tensor, tensor == DP_RANK_DH ? got.ds0 : got.final_state);
}

static void pair_of(const work *w) {
    dp_context_passes(w->rank) ? products(w) : first_products(w);
    if (dp_context_runs_pre_fwd(w->rank)) sums(w, w->rank->nlocal - 1, DP_RANK_H);
    if (w->backward && dp_context_runs_pre_bwd(w->rank)) sums(w, 0, DP_RANK_DH);
}

/* For N ranks; zeros for one rank. */
static void pairs_make(dp_drawn_pairs *x, const dp_problem *p, const dp_design *design, int N,
                       int backward) {
    *x = (dp_drawn_pairs){.n = N * p->HV};
    for (int r = 0; r < N && N > 1; r++) {
        dp_context c;
        dp_must(dp_context_of(p, N, r, &c, NULL)); /* the caller has split it so */
        pair_of(&(work){p, design, backward, &c, x});
        dp_context_free(&c);
    }
}

/* Frees what it holds, and leaves zeros. */
static void pairs_free(dp_drawn_pairs *x) {
    for (int k = 0; k < DP_RANK_TENSORS; k++)
        dp_free_list(x->of[k], x->n);
    for (int back = 0; back < 2; back++)
        dp_free_list(x->begins[back], x->n);
    *x = (dp_drawn_pairs){0};
}

/* ---- what arrives ---------------------------------------------------------------------------- */

/* The pairs that the ranks of s send in one direction; a rank that sends a state has it as H. */
static void put_pairs(const dp_drawn_run *x, dp_sim *s, int back) {
    const int64_t HV = x->p.HV, KK = (int64_t)x->p.K * x->p.K, KV = (int64_t)x->p.K * x->p.V;
    double *const *M = x->pairs.of[back ? DP_RANK_DM : DP_RANK_M],
                  *const *H = x->pairs.of[back ? DP_RANK_DH : DP_RANK_H],
                  *const *first = x->pairs.begins[back];
    for (int64_t i = 0; i < x->N * HV; i++) {
        const dp_context *c = &s->ctx[i / HV];
        const int begins = c->nlocal > 1 || (back ? c->is_last : c->is_first);
        if (back ? c->is_first : c->is_last) continue; /* it sends nothing */
        const double *leaves = back ? x->dS + i * KV : x->S + (i + HV) * KV;
        double *const *from = begins ? first : M;
        dp_sim_replace(&(back ? s->dM : s->M)[i], from ? dp_copy(from[i], KK) : NULL);
        dp_sim_replace(&(back ? s->dH : s->H)[i], dp_copy(begins && !first ? leaves : H[i], KV));
    }
}

/* S and dS of x, at the boundaries of ranks, become those that come. */
static void arriving_states(dp_drawn_run *x) {
    const dp_sending sending = x->design.sending;
    const int64_t HV = x->p.HV, KV = (int64_t)x->p.K * x->p.V;
    const dp_design fp32 = dp_design_of(DP_BASE_FP32);
    const dp_sim_options frame = {.frame = 1};
    dp_problem p = x->p;
    DP_FREED(dp_sim_free) dp_sim s;
    if (!from_pair(&p, sending, 0)) p.s0 = NULL;
    if (!from_pair(&p, sending, 1)) p.dstate = NULL;
    dp_must(dp_sim_open(&s, &p, &fp32, x->N, &frame, NULL)); /* the caller has split it so */
    s.chain = DP_FP32;
    s.payload = sending.payload;
    s.merge = sending.exchange == DP_EXCHANGE_SERIAL ? DP_EXCHANGE_RING : sending.exchange;
    for (int back = 0; back <= x->backward; back++) {
        put_pairs(x, &s, back);
        dp_sim_exchange(&s, back);
        double *const *in = back ? s.dS_out : s.S_in, *at = back ? x->dS + HV * KV : x->S;
        for (int64_t i = 0; i < x->N * HV; i++)
            if (in[i]) memcpy(at + i * KV, in[i], sizeof *at * (size_t)KV);
    }
}

/* ---- runs ------------------------------------------------------------------------------------ */

/* q, k or v; with dy: the gradients, too. */
static void convolve(dp_drawn_run *x, int i, double *dy) {
    dp_conv_result_free(&x->front[i]);
    x->conv[i].dy = dy;
    dp_conv_result_alloc(&x->front[i], &x->conv[i]);
    dp_must(dp_conv_ranks(&x->conv[i], x->N, x->design.base, &x->front[i],
                          NULL)); /* the caller has split the problem so already */
}

static int has_front(const dp_drawn_run *x) { return x->conv[0].x || x->conv[1].x || x->conv[2].x; }

/* q, k and v that come out of convolutions: of all tokens at once, which have the bits of calls. */
static void open_front(dp_drawn_run *x, const dp_conv conv[3]) {
    for (int i = 0; i < 3; i++) {
        x->conv[i] = conv[i];
        if (!conv[i].x) continue;
        convolve(x, i, NULL);
        x->p.in[dp_qkv_input(i)] = dp_copy(x->front[i].y, conv[i].T * conv[i].D);
    }
}

/* Is there a pipeline that stays between runs? */
static int has_sim(const dp_drawn_run *x) { return x->design.chunk && !x->session; }

void dp_drawn_open(dp_drawn_run *x, const dp_design *design, const dp_problem *p,
                   const dp_conv conv[3], const dp_session *session, int N, int backward) {
    *x = (dp_drawn_run){
        .design = *design, .N = N, .backward = backward, .p = *p, .session = session};
    open_front(x, conv);
    if (has_sim(x)) dp_must(dp_sim_open(&x->sim, &x->p, design, N, NULL, NULL));
}

static void forget_recurrent(dp_drawn_run *x) {
    dp_result_free(&x->out);
    DP_FREE(x->S, x->dS, x->dg);
    pairs_free(&x->pairs);
    x->S = x->dS = x->dg = NULL;
}

void dp_drawn_close(dp_drawn_run *x) {
    if (has_sim(x))
        dp_sim_free(&x->sim);
    else
        forget_recurrent(x);
    for (int i = 0; i < 3; i++) {
        if (!x->conv[i].x) continue;
        free(x->p.in[dp_qkv_input(i)]);
        dp_conv_result_free(&x->front[i]);
    }
}

static void drawn_split(dp_drawn_run *x, int N) {
    const dp_design design = x->design;
    if (N == x->N) return;
    if (design.chunk && !has_front(x) && dp_sim_split(&x->sim, N)) {
        x->N = N;
        return;
    }
    if (!design.chunk && !has_front(x)) {
        forget_recurrent(x);
        x->N = N;
        return;
    }
    const dp_problem p = x->p; /* q, k, v behind a convolution are made anew */
    const dp_conv conv[3] = {x->conv[0], x->conv[1], x->conv[2]};
    const dp_session *session = x->session;
    const int backward = x->backward;
    dp_drawn_close(x);
    dp_drawn_open(x, &design, &p, conv, session, N, backward);
}

static void run_recurrent(dp_drawn_run *x) {
    const dp_problem *p = &x->p;
    const int64_t KV = (int64_t)p->K * p->V;
    const int N = x->N;
    DP_OWN int64_t *cut = dp_calloc((size_t)N, sizeof *cut);
    for (int r = 1; r < N; r++)
        cut[r] = dp_own_cut(p->own.kind, p->T, N, r);
    x->S = dp_doubles(N * p->HV * KV);
    x->dS = dp_doubles(N * p->HV * KV);
    x->dg = dp_doubles(p->T * p->HV * dp_Kg(p));
    const dp_recurrent_keep keep = {N, cut, x->S, x->dS, x->dg, NULL, NULL},
                            sent = {N, cut, NULL, NULL, x->dg, x->S, x->dS};
    dp_recurrent_run(p, &x->design, x->backward, &keep, &x->out);
    pairs_make(&x->pairs, p, &x->design, N, x->backward);
    if (N > 1 && rounds(x->design.sending)) {
        arriving_states(x);
        dp_result_free(&x->out);
        dp_recurrent_run(p, &x->design, x->backward, &sent, &x->out);
    }
}

static dp_status run_call(void *who, const dp_problem *call, DP_UNUSED int states,
                          dp_call_result *out, dp_err *e) {
    const dp_design *design = who;
    dp_sim s;
    if (!design->chunk) {
        dp_recurrent_run(call, design, 0, NULL, &out->out);
        return DP_OK;
    }
    const dp_status st = dp_sim_open(&s, call, design, 1, NULL, e);
    if (!st) dp_calls_of_sim(&s, out);
    return st;
}

static void run_calls(dp_drawn_run *x) {
    const dp_caller by = {.run = run_call, .who = &x->design};
    dp_must(dp_calls_run(&x->p, x->session, DP_FAULT_NONE, &by, &x->out, NULL,
                         NULL)); /* one rank splits any problem */
}

dp_result *dp_drawn_results(dp_drawn_run *x) { return has_sim(x) ? &x->sim.out : &x->out; }

void dp_drawn_all(dp_drawn_run *x, dp_format chain) {
    if (has_sim(x))
        dp_sim_run(&x->sim, chain, x->design.sending.exchange, x->backward);
    else if (!x->out.o)
        x->session ? run_calls(x) : run_recurrent(x);
    const dp_result *r = dp_drawn_results(x);
    for (int i = 0; x->backward && i < 3; i++)
        if (x->conv[i].x) convolve(x, i, r->out[dp_qkv_gradient(i)]);
}

const double *dp_drawn_rank_value(const dp_drawn_run *x, int tensor, int64_t z) {
    const int64_t KV = (int64_t)x->p.K * x->p.V;
    const int64_t HV = x->p.HV;
    if (x->session) return NULL;
    if (x->design.chunk) return x->sim.rank[tensor][z];
    if (tensor == DP_RANK_S_IN) return x->S + z * KV;
    if (tensor == DP_RANK_DS_OUT) return z / HV + 1 < x->N ? x->dS + (z + HV) * KV : NULL;
    return x->pairs.of[tensor] ? x->pairs.of[tensor][z] : NULL;
}

/* [T][HV][Kg] of the log decay. */
static const double *drawn_dg(const dp_drawn_run *x) { return x->design.chunk ? x->sim.dg : x->dg; }

/* ---- draws ----------------------------------------------------------------------------------- */

/* The power of two below |x|, with its sign; 0 for zeros and subnormals. */
static inline double spacing(double x) {
    uint64_t bits;
    memcpy(&bits, &x, sizeof bits);
    bits &= 0xfff0000000000000u;
    memcpy(&x, &bits, sizeof x);
    return x;
}

double dp_direction_entry(dp_direction d, double want) {
    if (d == DP_ALONG_VALUE) return want;
    return d == DP_ALONG_OFFSET ? 1 : spacing(want);
}

void dp_draws_alloc(dp_draws *d, int ndraw, const dp_row_map *map, int64_t parts) {
    *d = (dp_draws){.ndraw = ndraw, .windows = map->windows, .parts = parts};
    d->rows = map->rows * map->subrows;
    d->width = map->width / map->subrows;
    d->columns = map->groups * d->width;
    d->err2 = dp_doubles(ndraw * d->rows);
    d->blank = dp_doubles(ndraw * d->rows);
    if (d->columns) d->column2 = dp_doubles(ndraw * d->columns);
    d->along = dp_doubles(ndraw * DP_NDIRECTIONS * d->windows);
    d->length2 = dp_doubles(ndraw * DP_NDIRECTIONS * d->windows);
    if (parts) d->part = dp_doubles(ndraw * parts * d->rows * d->width);
}

void dp_draws_free(dp_draws *d) {
    DP_FREE(d->err2, d->blank, d->column2, d->along, d->length2, d->part);
    *d = (dp_draws){0};
}

dp_error_sums dp_draws_at(const dp_draws *d, int k) {
    const int64_t directions = (int64_t)k * DP_NDIRECTIONS * d->windows;
    return (dp_error_sums){.err2 = d->err2 + k * d->rows,
                           .blank = d->blank + k * d->rows,
                           .column2 = d->columns ? d->column2 + k * d->columns : NULL,
                           .along = d->along + directions,
                           .length2 = d->length2 + directions};
}

/* Sums in a stated order that vectors of any width make alike: entry i in partial sum i mod LANES,
 * these added in order. A row's end is filled up with entries that count nothing. */
#define LANES 8
typedef struct {
    double dot[DP_NDIRECTIONS][LANES], length2[DP_NDIRECTIONS][LANES];
} partial_sums;

static double total(const double *part) {
    double sum = 0;
    for (int j = 0; j < LANES; j++)
        sum += part[j];
    return sum;
}

static inline int has_value(double x) { return fabs(x) <= DBL_MAX; }

static inline double square_of(double err, double want) {
    return has_value(want) & has_value(err) ? err * err : 0;
}

static inline void add_squares(const double *err, const double *want, double *square) {
#pragma omp simd
    for (int j = 0; j < LANES; j++)
        square[j] += square_of(err[j], want[j]);
}

/* <err, d> and |d|^2 along every direction, from the entries where the truth has a value (and, in
 * the first, the error). */
static inline void add_components(const double *err, const double *want, partial_sums *to) {
    double e[LANES], along[DP_NDIRECTIONS][LANES];
#pragma omp simd
    for (int j = 0; j < LANES; j++) {
        const int known = has_value(want[j]);
        const double w = known ? want[j] : 0;
        e[j] = known & has_value(err[j]) ? err[j] : 0;
        along[DP_ALONG_VALUE][j] = w;
        along[DP_ALONG_OFFSET][j] = known ? 1 : 0;
        along[DP_ALONG_ZERO][j] = spacing(w);
    }
#pragma GCC unroll 3
    for (dp_direction d = 0; d < DP_NDIRECTIONS; d++)
#pragma omp simd
        for (int j = 0; j < LANES; j++) {
            to->dot[d][j] += e[j] * along[d][j];
            to->length2[d][j] += along[d][j] * along[d][j];
        }
}

static double square_sum(const double *err, const double *want, int64_t n) {
    double square[LANES] = {0}, last[LANES] = {0}, known[LANES] = {0};
    const int64_t whole = n / LANES * LANES;
    for (int64_t i = 0; i < whole; i += LANES)
        add_squares(err + i, want + i, square);
    for (int64_t i = whole; i < n; i++) {
        last[i - whole] = err[i];
        known[i - whole] = want[i];
    }
    if (whole < n) add_squares(last, known, square);
    return total(square);
}

static partial_sums components(const double *err, const double *want, int64_t n) {
    partial_sums to = {0};
    double last[LANES], known[LANES];
    const int64_t whole = n / LANES * LANES;
    for (int64_t i = 0; i < whole; i += LANES)
        add_components(err + i, want + i, &to);
    for (int j = 0; whole < n && j < LANES; j++) {
        last[j] = whole + j < n ? err[whole + j] : 0;
        known[j] = whole + j < n ? want[whole + j] : NAN;
    }
    if (whole < n) add_components(last, known, &to);
    return to;
}

/* Adds one row in parts of `part` entries: squares by part, and by column. */
static void add_row(const double *err, const double *want, int part, int parts, double *err2,
                    double *blank, double *column2) {
    for (int s = 0; s < parts; s++) {
        const double *e = err + (int64_t)s * part, *w = want + (int64_t)s * part;
        err2[s] += square_sum(e, w, part);
        if (blank) blank[s] = 0;
        for (int i = 0; blank && i < part; i++)
            blank[s] += !(has_value(w[i]) & has_value(e[i]));
        for (int i = 0; column2 && i < part; i++)
            column2[i] += square_of(e[i], w[i]);
    }
}

static void add_directions(const dp_row_map *map, const double *err, const double *want,
                           const dp_error_sums *to) {
    memset(to->length2, 0, sizeof *to->length2 * (size_t)(DP_NDIRECTIONS * map->windows));
    for (int64_t r = 0; r < map->rows; r++) {
        const int64_t at = r * map->width;
        const partial_sums row = components(err + at, want + at, map->width);
        for (dp_direction d = 0; d < DP_NDIRECTIONS; d++) {
            to->along[d * map->windows + map->window[r]] += total(row.dot[d]);
            to->length2[d * map->windows + map->window[r]] += total(row.length2[d]);
        }
    }
}

void dp_sum_errors(const dp_row_map *map, const double *err, const double *want,
                   const dp_error_sums *to) {
    const int part = map->width / map->subrows;
    for (int64_t r = 0; r < map->rows; r++) {
        const int64_t at = r * map->width, group = map->groups ? r / map->per % map->groups : 0;
        add_row(err + at, want + at, part, map->subrows, to->err2 + r * map->subrows,
                to->blank ? to->blank + r * map->subrows : NULL,
                to->column2 ? to->column2 + group * part : NULL);
    }
    if (to->along) add_directions(map, err, want, to);
}

/* ---- freedom of rows ------------------------------------------------------------------------- */

typedef enum { OTHERWISE, FROM_THE_FIRST, TO_THE_LAST } summed;

static summed tokens_of(const dp_problem *p, dp_result_id field) {
    switch (field) {
    case DP_RESULT_O:
    case DP_RESULT_DQ: return p->s0 ? OTHERWISE : FROM_THE_FIRST;
    case DP_RESULT_DK:
    case DP_RESULT_DV: return p->dstate ? OTHERWISE : TO_THE_LAST;
    default: return OTHERWISE;
    }
}

double *dp_row_freedom_new(const dp_problem *p, dp_result_id field) {
    const summed which = tokens_of(p, field);
    if (which == OTHERWISE) return NULL;
    const int heads = dp_result_heads(p, field), per = dp_result_rows_per_token(p, field);
    const int of_token = dp_rows(p) * (p->HV / heads);
    double *most = dp_doubles(p->T * heads * per);
    for (int s = 0; s < p->Nseq; s++)
        for (int64_t t = p->cu[s]; t < p->cu[s + 1]; t++) {
            const int64_t n = which == FROM_THE_FIRST ? t - p->cu[s] + 1 : p->cu[s + 1] - t;
            for (int64_t i = t * heads * per; i < (t + 1) * heads * per; i++)
                most[i] = (double)(n * of_token);
        }
    return most;
}

/* ---- rows and heads -------------------------------------------------------------------------- */

dp_windows dp_windows_of(const dp_problem *p, int N) {
    dp_windows w = {.p = p, .N = N, .window_of = dp_calloc((size_t)p->T, sizeof(int))};
    for (int r = 0; r < N; r++) {
        dp_context c;
        dp_must(dp_context_of(p, N, r, &c, NULL));
        for (int s = 0; s < c.nlocal; s++) {
            const int64_t begin = c.local_cu[s];
            const int64_t end = c.local_cu[s + 1];
            for (int64_t t = begin; t < end; t++)
                w.window_of[c.a + t] = w.windows + (int)((t - begin) / DP_CHUNK);
            w.windows += (int)((end - begin + DP_CHUNK - 1) / DP_CHUNK);
        }
        dp_context_free(&c);
    }
    return w;
}

void dp_windows_free(dp_windows *w) {
    free(w->window_of);
    *w = (dp_windows){0};
}

/* Rows of tokens: [T][heads][per][width]. To be freed with dp_row_map_free, like the others. */
static dp_row_map map_tokens(const dp_windows *w, int heads, int per, int width) {
    const int64_t rows = w->p->T * heads * per;
    int32_t *window = dp_calloc((size_t)rows, sizeof *window);
    for (int64_t r = 0; r < rows; r++)
        window[r] = w->window_of[r / (heads * per)] * heads + (int)(r / per % heads);
    return (dp_row_map){rows, (int64_t)w->windows * heads, width, 1, heads, per, window};
}

/* n rows that are windows of their own. */
static dp_row_map map_rows(int64_t n, int width) {
    int32_t *window = dp_calloc((size_t)n, sizeof *window);
    for (int64_t r = 0; r < n; r++)
        window[r] = (int32_t)r;
    return (dp_row_map){n, n, width, 1, 0, 1, window};
}

dp_row_map dp_map_states(int64_t n, int K, int V) {
    dp_row_map m = map_rows(n, K * V);
    m.subrows = K;
    m.groups = n;
    return m;
}

void dp_row_map_free(dp_row_map *m) {
    free((void *)m->window);
    *m = (dp_row_map){0};
}

/* The map of result field `field` (dp_result_fields); rows 0: it does not exist here. */
static dp_row_map map_field(const dp_windows *w, int field) {
    const dp_problem *p = w->p;
    int64_t rows, width;
    dp_result_shape(p, field, &rows, &width);
    if (!rows) return (dp_row_map){.subrows = 1};
    switch (dp_result_fields[field].kind) {
    case DP_OF_SEQUENCES: return dp_map_states(rows, p->K, p->V);
    case DP_OF_HEADS: return map_rows(rows, (int)width);
    default:
        return map_tokens(w, dp_result_heads(p, field), dp_result_rows_per_token(p, field),
                          (int)width);
    }
}

/* ---- the arrays of a request: shapes, allocation, cache parts -------------------------------- */

#define FEW_DRAWS 6
#define MANY_DRAWS 8
#define LARGE 2e7 /* entries of states passed through, above which draws are dear */

int dp_expected_count(const dp_problem *p) {
    const double size = (double)p->T * p->HV * p->R * p->K * p->V;
    return size <= LARGE ? MANY_DRAWS : FEW_DRAWS;
}

/* Shapes of a request on N ranks, made once: maps of all tensors. */
typedef struct {
    const dp_expected_request *rq;
    int N;
    dp_windows windows;
    dp_row_map field[DP_NRESULTS], rank[DP_RANK_TENSORS];
    dp_row_map step[DP_CONV_NRESULTS][3], stage[DP_NSTAGE_TENSORS];
} shapes;

static dp_row_map map_step(const shapes *l, int kind, int i) {
    const dp_conv *v = l->rq->front ? l->rq->front->conv[i] : NULL;
    const int heads = dp_qkv_heads(l->rq->p, i);
    if (!v || (kind != DP_CONV_Y && !l->rq->backward)) return (dp_row_map){.subrows = 1};
    if (kind == DP_CONV_DBIAS && !v->bias) return (dp_row_map){.subrows = 1};
    if (kind == DP_CONV_DW) return map_rows((int64_t)v->W * heads, v->D / heads);
    if (kind == DP_CONV_DBIAS) return map_rows(heads, v->D / heads);
    return map_tokens(&l->windows, heads, 1, v->D / heads);
}

static dp_row_map map_stage(const shapes *l, int stage) {
    const dp_problem *p = l->rq->p;
    int64_t rows, width;
    dp_stage_tensor_rows(p, l->N, stage, &rows, &width);
    if (dp_stage_tensors[stage].kind == DP_PER_CHUNK) return dp_map_states(rows, p->K, p->V);
    return map_tokens(&l->windows, p->HV, (int)(rows / (p->T * p->HV)), (int)width);
}

static shapes shapes_of(const dp_expected_request *rq, int N) {
    const dp_problem *p = rq->p;
    const int64_t ranks = (int64_t)N * p->HV;
    shapes l = {.rq = rq, .N = N, .windows = dp_windows_of(p, N)};
    for (int i = 0; i < DP_NRESULTS; i++)
        if (rq->backward || !dp_result_fields[i].backward) l.field[i] = map_field(&l.windows, i);
    for (int i = 0; i < (rq->backward ? DP_RANK_TENSORS : DP_RANK_DS_OUT); i++)
        l.rank[i] = dp_map_states(ranks, p->K, (int)(dp_rank_width(p, i) / p->K));
    for (int k = 0; k < DP_CONV_NRESULTS; k++)
        for (int i = 0; i < 3; i++)
            l.step[k][i] = map_step(&l, k, i);
    for (int i = 0; i < DP_NSTAGE_TENSORS; i++)
        if (dp_stage_tensors[i].kind != DP_PER_RANK &&
            (rq->backward || !dp_stage_tensors[i].backward))
            l.stage[i] = map_stage(&l, i);
    return l;
}

/* The list of tensor i of all: results, ranks, steps, stages; i becomes its number there. */
static int list_of(int *i) {
    static const int n[] = {DP_NRESULTS, DP_RANK_TENSORS, 3 * DP_CONV_NRESULTS, DP_NSTAGE_TENSORS};
    int k = 0;
    while (*i >= n[k])
        *i -= n[k++];
    return k;
}

static dp_draws *tensor_of(dp_expected *x, int i) {
    dp_draws *const list[] = {x->field, x->rank, x->step[0], x->stage};
    const int k = list_of(&i);
    return &list[k][i];
}

static dp_row_map *map_of(shapes *l, int i) {
    dp_row_map *const list[] = {l->field, l->rank, l->step[0], l->stage};
    const int k = list_of(&i);
    return &list[k][i];
}

static void shapes_free(shapes *l) {
    for (int i = 0; i < DP_EXPECTED_TENSORS; i++)
        dp_row_map_free(map_of(l, i));
    dp_windows_free(&l->windows);
}

static void shapes_alloc(shapes *l, const dp_claim *policy, dp_expected *x) {
    const int stages = DP_EXPECTED_TENSORS - DP_NSTAGE_TENSORS;
    *x = (dp_expected){0};
    for (int i = 0; i < (policy->stages ? DP_EXPECTED_TENSORS : stages); i++) {
        const dp_row_map *map = map_of(l, i);
        const int sum = i < DP_NRESULTS && dp_result_fields[i].kind == DP_OF_HEADS;
        if (map->rows)
            dp_draws_alloc(tensor_of(x, i), dp_expected_count(l->rq->p), map,
                           sum ? l->windows.windows : 0);
    }
}

/* Zeros, of the same shapes; and the arrays, for a cache: returns their number. */
static void expected_alloc(const dp_expected_request *rq, const dp_claim *policy, dp_expected *x) {
    DP_FREED(shapes_free) shapes l = shapes_of(rq, policy->N);
    shapes_alloc(&l, policy, x);
}

int dp_expected_parts(dp_expected *x, dp_part *part) {
    int n = 0;
    for (int i = 0; i < DP_EXPECTED_TENSORS; i++) {
        const dp_draws *d = tensor_of(x, i);
        const size_t each = sizeof(double) * (size_t)d->ndraw;
        if (!d->err2) continue;
        part[n++] = (dp_part){d->err2, each * (size_t)d->rows};
        part[n++] = (dp_part){d->blank, each * (size_t)d->rows};
        if (d->columns) part[n++] = (dp_part){d->column2, each * (size_t)d->columns};
        part[n++] = (dp_part){d->along, each * DP_NDIRECTIONS * (size_t)d->windows};
        part[n++] = (dp_part){d->length2, each * DP_NDIRECTIONS * (size_t)d->windows};
        if (d->part)
            part[n++] = (dp_part){d->part, each * (size_t)(d->parts * d->rows) * (size_t)d->width};
    }
    return n;
}

void dp_expected_free(dp_expected *x) {
    for (int i = 0; i < DP_EXPECTED_TENSORS; i++)
        dp_draws_free(tensor_of(x, i));
}

dp_draws dp_draws_of_rows(const dp_draws *d, int n, const int *row) {
    const int64_t subrows = d->rows / d->windows, w = d->width;
    const dp_row_map map = {.rows = n,
                            .windows = n,
                            .width = (int)(subrows * w),
                            .subrows = (int)subrows,
                            .groups = d->columns ? n : 0,
                            .per = 1};
    dp_draws y;
    dp_draws_alloc(&y, d->ndraw, &map, 0);
    for (int k = 0; k < d->ndraw; k++) {
        const dp_error_sums to = dp_draws_at(&y, k), from = dp_draws_at(d, k);
        for (int i = 0; i < n; i++) {
            const size_t each = sizeof(double) * (size_t)subrows;
            memcpy(to.err2 + i * subrows, from.err2 + row[i] * subrows, each);
            memcpy(to.blank + i * subrows, from.blank + row[i] * subrows, each);
            if (d->columns)
                memcpy(to.column2 + i * w, from.column2 + row[i] * w, sizeof(double) * (size_t)w);
            for (int64_t q = 0; q < DP_NDIRECTIONS; q++) {
                to.along[q * n + i] = from.along[q * d->windows + row[i]];
                to.length2[q * n + i] = from.length2[q * d->windows + row[i]];
            }
        }
    }
    return y;
}

/* ---- errors of draws ------------------------------------------------------------------------- */

/* The fp64 reference of a nearby problem. Its results are those on one rank, whatever ranks they
 * are compared on: what N changes in fp64 is no error that is looked at. */
typedef struct {
    dp_drawn_run one;
    dp_sim apart;      /* on N ranks, where those cut other chunks */
    const dp_sim *sim; /* on N ranks: what ranks hold, and intermediates */
    double *slope[2];  /* dg/dx and dg/dA_log */
} reference;

/* One run beside its reference. */
typedef struct {
    const shapes *l;
    dp_drawn_run *one;
    reference *ref;
    double scale;
    int pass[2]; /* does it stand for what the forward makes, for what the backward makes */
    int draw;
    dp_expected *x;
} drawn_pair;

/* err = scale (got - want); where there is no got, nothing is expected. */
static void add(const drawn_pair *a, const dp_row_map *map, const double *got, const double *want,
                dp_draws *d) {
    const int64_t n = map->rows * map->width;
    DP_OWN double *err = dp_doubles(n);
    for (int64_t i = 0; i < n; i++)
        err[i] = a->scale * (got[i] - want[i]);
    const dp_error_sums to = dp_draws_at(d, a->draw);
    dp_sum_errors(map, err, want, &to);
}

static void add_ranks(const drawn_pair *a, int tensor) {
    const dp_row_map *map = &a->l->rank[tensor];
    DP_OWN double *got = dp_doubles(map->rows * map->width);
    DP_OWN double *want = dp_doubles(map->rows * map->width);
    for (int64_t z = 0; z < map->rows; z++) {
        const double *g = dp_drawn_rank_value(a->one, tensor, z);
        const double *w = a->ref->sim->rank[tensor][z];
        if (!g || !w) continue;
        memcpy(got + z * map->width, g, sizeof *got * (size_t)map->width);
        memcpy(want + z * map->width, w, sizeof *want * (size_t)map->width);
    }
    add(a, map, got, want, &a->x->rank[tensor]);
}

static void add_front(const drawn_pair *a, int i) {
    const dp_conv_result *g = &a->one->front[i];
    const dp_conv_result *w = &a->ref->one.front[i];
    const dp_conv *v = &a->one->conv[i];
    if (!v->x) return;
    if (a->pass[0]) add(a, &a->l->step[DP_CONV_Y][i], g->y, w->y, &a->x->step[DP_CONV_Y][i]);
    if (!a->pass[1] || !a->l->rq->backward) return;
    DP_OWN double *dw = dp_conv_by_tap(v, g->dw);
    DP_OWN double *want = dp_conv_by_tap(v, w->dw);
    add(a, &a->l->step[DP_CONV_DX][i], g->dx, w->dx, &a->x->step[DP_CONV_DX][i]);
    add(a, &a->l->step[DP_CONV_DW][i], dw, want, &a->x->step[DP_CONV_DW][i]);
    if (v->bias)
        add(a, &a->l->step[DP_CONV_DBIAS][i], g->dbias, w->dbias, &a->x->step[DP_CONV_DBIAS][i]);
}

/* Each window's share in the errors of dA_log (slope dg/dA_log) or ddt_bias (dg/dx). */
static void add_shares(const drawn_pair *a, const double *slope, dp_draws *d) {
    const dp_problem *p = &a->one->p;
    const double *got = drawn_dg(a->one);
    const double *want = drawn_dg(&a->ref->one);
    const int Kg = dp_Kg(p);
    double *part = d->part + (int64_t)a->draw * d->parts * d->rows * d->width;
    for (int64_t i = 0; i < p->T * p->HV * Kg; i++) {
        const int64_t t = i / (p->HV * Kg);
        const int64_t head = i / Kg % p->HV;
        const int64_t at = (a->l->windows.window_of[t] * d->rows + head) * d->width;
        part[at + (d->width == 1 ? 0 : i % Kg)] += a->scale * (got[i] - want[i]) * slope[i];
    }
}

static void add_sums(const drawn_pair *a) {
    for (int i = 0; i < DP_NRESULTS; i++)
        if (a->x->field[i].part)
            add_shares(a, a->ref->slope[!strcmp(dp_result_fields[i].name, "dA_log")],
                       &a->x->field[i]);
}

static void add_stages(const drawn_pair *a) {
    for (int i = 0; i < DP_NSTAGE_TENSORS; i++) {
        if (!a->x->stage[i].err2 || !a->pass[dp_stage_tensors[i].backward]) continue;
        DP_OWN double *got = dp_stage_tensor_value(&a->one->sim, i);
        DP_OWN double *want = dp_stage_tensor_value(a->ref->sim, i);
        add(a, &a->l->stage[i], got, want, &a->x->stage[i]);
    }
}

/* Adds the errors of a run to the draws of its policy. */
static void add_drawn(const drawn_pair *a) {
    for (int i = 0; i < DP_NRESULTS; i++)
        if (a->x->field[i].err2 && a->pass[dp_result_fields[i].backward])
            add(a, &a->l->field[i], dp_drawn_results(a->one)->out[i],
                dp_drawn_results(&a->ref->one)->out[i], &a->x->field[i]);
    for (int i = 0; i < DP_RANK_TENSORS; i++)
        if (a->x->rank[i].err2 && a->pass[i >= DP_RANK_DS_OUT]) add_ranks(a, i);
    for (int i = 0; i < 3; i++)
        add_front(a, i);
    if (a->pass[1] && a->l->rq->backward) add_sums(a);
    if (a->one->design.chunk == DP_CHUNK && a->one->design.sending.exchange != DP_EXCHANGE_HEADS)
        add_stages(a);
}

/* ---- expected -------------------------------------------------------------------------------- */

#define MEMORY 4e9            /* bytes that draws made at once may hold */
#define FP32_FOR_FP64 0x1p-29 /* fp64's unit roundoff over fp32's */

static void reference_open(reference *r, const dp_problem *y, const dp_conv conv[3], int backward) {
    const dp_design exact = dp_design_of(DP_BASE_FP64);
    const int64_t n = y->T * y->HV * dp_Kg(y);
    *r = (reference){.sim = &r->one.sim};
    dp_drawn_open(&r->one, &exact, y, conv, NULL, 1, backward);
    dp_drawn_all(&r->one, DP_FP64);
    if (!backward) return;
    for (int i = 0; i < 2; i++)
        r->slope[i] = dp_doubles(n);
    dp_gate_slopes(&r->one.p, r->slope[0], r->slope[1]);
}

static void reference_leave(reference *r) {
    if (r->sim == &r->apart) dp_sim_free(&r->apart);
    r->sim = &r->one.sim;
}

static void reference_split(reference *r, int N, int stages) {
    const int backward = r->one.backward;
    reference_leave(r);
    if (dp_sim_split(&r->one.sim, N)) {
        dp_sim_run_ranks(&r->one.sim, DP_FP64, DP_EXCHANGE_ALLGATHER, backward);
        return;
    }
    dp_must(dp_sim_open(&r->apart, &r->one.p, &r->one.design, N, NULL, NULL));
    r->sim = &r->apart;
    if (stages)
        dp_sim_run(&r->apart, DP_FP64, DP_EXCHANGE_ALLGATHER, backward);
    else
        dp_sim_run_ranks(&r->apart, DP_FP64, DP_EXCHANGE_ALLGATHER, backward);
}

static void reference_close(reference *r) {
    reference_leave(r);
    dp_drawn_close(&r->one);
    free(r->slope[0]);
    free(r->slope[1]);
}

/* The same design with fp32 in place of fp64. */
static dp_design in_fp32(dp_design d) {
    d.base = DP_BASE_FP32;
    if (d.factors == DP_FP64) d.factors = DP_FP32;
    if (d.state == DP_FP64) d.state = DP_FP32;
    if (d.dstate == DP_FP64) d.dstate = DP_FP32;
    for (int i = 0; i < DP_NRESULTS; i++)
        if (d.out[i] == DP_FP64) d.out[i] = DP_FP32;
    if (d.decays == DP_FP64) d.decays = DP_FP32;
    return d;
}

/* All that is asked for. Every design of a pass (dp_design_of_pass) runs once a draw and number of
 * ranks for each format of the chain that some policy has. Designs in fp64 also run in fp32. */
typedef struct {
    const dp_expected_request *rq;
    int npolicy, nlayout, ndesign;
    const dp_claim *policy;
    dp_expected *out;
    shapes *layout; /* by number of ranks */
    dp_design *design;
    int *backward; /* of each design: is it that of some backward */
} drawing;

static void add_design(drawing *a, dp_design d, int backward) {
    int i = 0;
    while (i < a->ndesign && !dp_design_same(&a->design[i], &d))
        i++;
    a->design[i] = d;
    a->backward[i] |= backward;
    if (i == a->ndesign) a->ndesign++;
}

static void add_designs(drawing *a, const dp_design *of) {
    for (int back = 0; back <= a->rq->backward; back++) {
        const dp_design d = dp_design_of_pass(of, back);
        add_design(a, d, back);
        if (of->base == DP_BASE_FP64) add_design(a, in_fp32(d), back);
    }
}

static void add_layout(drawing *a, int N) {
    for (int i = 0; i < a->nlayout; i++)
        if (a->layout[i].N == N) return;
    a->layout[a->nlayout++] = shapes_of(a->rq, N);
}

static shapes *layout_at(const drawing *a, int N) {
    int i = 0;
    while (a->layout[i].N != N)
        i++;
    return &a->layout[i];
}

/* Is this run part of what a policy's pass is made of, and how much does its error count? A design
 * in fp64 is its own reference. Its roundings are drawn in fp32 and scaled, and added to those of
 * another format of the chain. 0: no part. */
static double part_of_pass(const dp_claim *y, int back, const dp_design *design, dp_format chain) {
    const dp_design own = dp_design_of_pass(&y->design, back), narrow = in_fp32(own);
    const int exact = own.base == DP_BASE_FP64;
    if (exact && chain == DP_FP32 && dp_design_same(&narrow, design)) return FP32_FOR_FP64;
    if (exact && chain == DP_FP64 && !own.sending.payload) return 0;
    return y->chain == chain && dp_design_same(&own, design);
}

/* Sets pass: which of the policy's passes it is part of, all with one weight. */
static double part_of(const dp_claim *y, const dp_design *design, dp_format chain, int pass[2]) {
    double scale = 0;
    for (int back = 0; back < 2; back++) {
        const double of = part_of_pass(y, back, design, chain);
        pass[back] = of != 0;
        if (of != 0) scale = of;
    }
    return scale;
}

static int is_asked_for(const drawing *a, int N, const dp_design *design, dp_format chain) {
    int pass[2];
    for (int i = 0; i < a->npolicy; i++)
        if (a->policy[i].N == N && part_of(&a->policy[i], design, chain, pass) != 0) return 1;
    return 0;
}

/* Where kernels anchor the decays of a block, and which operand of a state they decay, is nothing
 * that they declare: every draw has another. */
static dp_design of_draw(const dp_problem *p, const dp_design *design, int d) {
    dp_design mine = *design;
    mine.anchor = d % DP_ANCHORS;
    mine.late_do = d % 2 && design->gated != DP_SCORES_FACTORED && dp_Kg(p) == 1;
    mine.late = mine.late_do && !dp_erases(p);
    mine.summed = d / 2 % 2 && design->base == DP_BASE_BF16 && design->product &&
                  !design->fold_beta && design->gated != DP_SCORES_FACTORED;
    return mine;
}

/* One design on N ranks: opens *one when nothing did. The bounds of slopes include 1 - s, too
 * (error_bound.c). */
static void run_design(const drawing *a, const shapes *l, int k, reference *ref,
                       const dp_conv conv[3], int d, dp_drawn_run *one) {
    const dp_design *design = &a->design[k];
    const dp_design mine = of_draw(a->rq->p, design, d);
    dp_problem own = ref->one.p;
    own.rounded_slopes = 1;
    for (int f = 0; f < DP_NFORMATS; f++) {
        if (!is_asked_for(a, l->N, design, (dp_format)f)) continue;
        if (!one->N) dp_drawn_open(one, &mine, &own, conv, a->rq->session, l->N, a->backward[k]);
        drawn_split(one, l->N);
        dp_drawn_all(one, (dp_format)f);
        for (int i = 0; i < a->npolicy; i++) {
            drawn_pair x = {.l = l, .one = one, .ref = ref, .draw = d, .x = &a->out[i]};
            x.scale = part_of(&a->policy[i], design, (dp_format)f, x.pass);
            if (a->policy[i].N == l->N && x.scale != 0) add_drawn(&x);
        }
    }
}

static int wants_stages(const drawing *a, int N) {
    for (int i = 0; i < a->npolicy; i++)
        if (a->policy[i].N == N && a->policy[i].stages) return 1;
    return 0;
}

static void one_draw(const drawing *a, int d) {
    const dp_expected_request *rq = a->rq;
    const int D = dp_expected_count(rq->p);
    const dp_format wide = rq->dtype == DP_FP64 ? DP_FP64 : DP_FP32;
    const dp_mover m = {(uint64_t)(rq->set * D + d), rq->dtype,
                        rq->set == DP_SET_OFF_LATTICE ? wide : rq->dtype};
    DP_FREED(dp_problem_free) dp_problem y = dp_nearby_problem(rq->p, &m);
    DP_OWN dp_drawn_run *one = dp_calloc((size_t)a->ndesign, sizeof *one);
    dp_conv conv[3];
    reference ref;
    nearby_front(rq->front, &m, conv);
    reference_open(&ref, &y, conv, rq->backward);
    for (int i = 0; i < a->nlayout; i++) {
        reference_split(&ref, a->layout[i].N, wants_stages(a, a->layout[i].N));
        for (int k = 0; k < a->ndesign; k++)
            run_design(a, &a->layout[i], k, &ref, conv, d, &one[k]);
    }
    for (int k = 0; k < a->ndesign; k++)
        if (one[k].N) dp_drawn_close(&one[k]);
    reference_close(&ref);
    for (int i = 0; i < 3; i++)
        dp_conv_free(&conv[i]);
}

/* How many draws are made at once: each holds the chunks of its reference and of every design. */
static int draws_at_once(const drawing *a) {
    const dp_problem *p = a->rq->p;
    const double n = (double)DP_CHUNK * dp_rows(p);
    const double chunk = n * (10. * p->K + 8. * p->V + 4 * n) + p->K * (4. * p->V + 2. * p->K);
    const double chunks = ((double)p->T / DP_CHUNK + p->Nseq) * p->HV;
    const double bytes = sizeof(double) * chunk * chunks * (a->ndesign + 1);
    const int threads = omp_get_max_threads();
    const int D = dp_expected_count(p);
    int most = threads < D ? threads : D;
    while (most > 1 && most * bytes > MEMORY)
        most--;
    return most;
}

void dp_expected_run(const dp_expected_request *rq, int n, const dp_claim *policy,
                     dp_expected *out) {
    drawing a = {.rq = rq, .npolicy = n, .policy = policy, .out = out};
    a.layout = dp_calloc((size_t)n, sizeof *a.layout);
    a.design = dp_calloc(4 * (size_t)n, sizeof *a.design);
    a.backward = dp_calloc(4 * (size_t)n, sizeof *a.backward);
    for (int i = 0; i < n; i++) {
        add_layout(&a, policy[i].N);
        add_designs(&a, &policy[i].design);
        shapes_alloc(layout_at(&a, policy[i].N), &policy[i], &out[i]);
    }
    const int D = dp_expected_count(rq->p);
    const int outer = draws_at_once(&a);
    const int inner = omp_get_max_threads() / outer;
#pragma omp parallel num_threads(outer)
    {
        omp_set_num_threads(inner);
#pragma omp for schedule(dynamic, 1)
        for (int d = 0; d < D; d++)
            one_draw(&a, d);
    }
    for (int i = 0; i < a.nlayout; i++)
        shapes_free(&a.layout[i]);
    DP_FREE(a.layout, a.design, a.backward);
}

/* ---- what is the same ------------------------------------------------------------------------ */

/* One rank forms no M, and neither do a recurrent design and some exchanges: its chain's format
 * means nothing. */
static dp_format chain_of(const dp_claim *c) {
    const int pairs = dp_exchanges[c->design.sending.exchange].pairs;
    return c->N == 1 || !c->design.chunk || !pairs ? DP_FP32 : c->chain;
}

static int same(const dp_claim *a, const dp_claim *b) {
    return a->N == b->N && chain_of(a) == chain_of(b) && dp_design_same(&a->design, &b->design);
}

static const dp_expectation *find(const dp_expectations *e, const dp_claim *c, int set,
                                  int stages) {
    for (int i = 0; i < e->n; i++) {
        const dp_expectation *k = &e->known[i];
        if (k->set == set && k->claim.stages >= stages && same(&k->claim, c)) return k;
    }
    return NULL;
}

const dp_expected *dp_expectations_find(const dp_expectations *e, const dp_claim *claim, int set) {
    const dp_expectation *with = find(e, claim, set, 1);
    const dp_expectation *k = with ? with : find(e, claim, set, 0);
    return k ? &k->x : NULL;
}

static dp_expectation *append(dp_expectations *e, const dp_claim *c, int set) {
    e->known = dp_realloc(e->known, sizeof *e->known * (size_t)(e->n + 1));
    dp_expectation *k = &e->known[e->n++];
    *k = (dp_expectation){.claim = *c, .set = set};
    return k;
}

/* ---- the cache ------------------------------------------------------------------------------- */

typedef struct {
    char *bytes;
    size_t size;
} text;

DP_NOT_SO("-Wanalyzer-malloc-leak") /* the text has the bytes */
static void put(text *t, const void *x, size_t size) {
    t->bytes = dp_realloc(t->bytes, t->size + size + 1);
    memcpy(t->bytes + t->size, x, size);
    t->size += size;
}

static void put_conv(text *t, int i, const dp_conv *v) {
    const int32_t form[] = {i, v->silu, v->bias != NULL};
    put(t, form, sizeof form);
    put(t, v->x, sizeof *v->x * (size_t)(v->T * v->D));
    put(t, v->w, sizeof *v->w * (size_t)(v->D * v->W));
    if (v->bias) put(t, v->bias, sizeof *v->bias * (size_t)v->D);
}

/* Inputs of draws besides the problem. */
static dp_key key_of(const dp_expectations *e, const dp_claim *c, int set) {
    const dp_expected_request *rq = &e->request;
    const int32_t what[] = {c->N,
                            rq->backward,
                            (int32_t)rq->dtype,
                            c->stages,
                            set,
                            dp_expected_count(rq->p),
                            (int32_t)chain_of(c)};
    char design[DP_DESIGN_TEXT] = {0};
    text t = {0};
    dp_design_text(&c->design, design);
    put(&t, what, sizeof what);
    put(&t, &c->design.base, sizeof c->design.base);
    put(&t, design, sizeof design);
    if (!c->design.chunk) put(&t, "pairs", 6); /* not in those of older caches */
    if (dp_Kg(rq->p) == 1) put(&t, "do", 3);   /* likewise */
    if (rq->session) put(&t, rq->session->text, strlen(rq->session->text) + 1);
    if (rq->session) put(&t, &rq->session->kept, sizeof rq->session->kept);
    if (rq->session && rq->session->stagger) /* not in those of older caches */
        put(&t, &rq->session->stagger, sizeof rq->session->stagger);
    for (int i = 0; rq->front && i < 3; i++)
        if (rq->front->conv[i]) put_conv(&t, i, rq->front->conv[i]);
    const dp_key key = dp_problem_key(rq->p, t.bytes, t.size);
    free(t.bytes);
    return key;
}

static dp_expected_request request_of(const dp_expectations *e, int set) {
    dp_expected_request rq = e->request;
    rq.set = set;
    return rq;
}

static dp_claim policy_of(const dp_claim *c) {
    dp_claim x = *c;
    x.chain = chain_of(c);
    return x;
}

static int load(dp_expectations *e, const dp_claim *c, int set) {
    const dp_expected_request rq = request_of(e, set);
    const dp_claim policy = policy_of(c);
    dp_part part[DP_EXPECTED_PARTS];
    dp_expected x;
    if (!e->cache) return 0;
    expected_alloc(&rq, &policy, &x);
    const int n = dp_expected_parts(&x, part);
    const dp_key key = key_of(e, c, set);
    if (!dp_cache_load(e->cache, DP_CACHE_EXPECTED, key, part, n)) {
        dp_expected_free(&x);
        return 0;
    }
    append(e, c, set)->x = x;
    return 1;
}

static void save(const dp_expectations *e, dp_expectation *k) {
    dp_part part[DP_EXPECTED_PARTS];
    if (!e->cache) return;
    const int n = dp_expected_parts(&k->x, part);
    const dp_key key = key_of(e, &k->claim, k->set);
    dp_cache_save(e->cache, DP_CACHE_EXPECTED, key, part, n);
}

/* ---- drawing --------------------------------------------------------------------------------- */

void dp_expectations_want(dp_expectations *e, int set, int n, const dp_claim *claim) {
    const dp_expected_request rq = request_of(e, set);
    DP_OWN dp_claim *policy = dp_calloc((size_t)n, sizeof *policy);
    DP_OWN dp_expected *made = dp_calloc((size_t)n, sizeof *made);
    const int first = e->n;
    int missing = 0;
    for (int i = 0; i < n; i++) {
        if (find(e, &claim[i], set, claim[i].stages) || load(e, &claim[i], set)) continue;
        append(e, &claim[i], set);
    }
    for (int i = first; i < e->n; i++) {
        const dp_expectation *k = &e->known[i];
        if (!k->x.field[DP_RESULT_O].err2)
            policy[missing++] = policy_of(&k->claim); /* not cached */
    }
    if (missing) dp_expected_run(&rq, missing, policy, made);
    for (int i = first, m = 0; i < e->n; i++) {
        dp_expectation *k = &e->known[i];
        if (k->x.field[DP_RESULT_O].err2) continue;
        k->x = made[m++];
        save(e, k);
    }
}

void dp_expectations_free(dp_expectations *e) {
    for (int i = 0; i < e->n; i++)
        dp_expected_free(&e->known[i].x);
    free(e->known);
    *e = (dp_expectations){0};
}
