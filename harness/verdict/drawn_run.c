/* One nearby problem, and its run in one design: convolutions, then the pipeline or the token
 * recurrence (drawn_run.h). */
#include "drawn_run.h"
#include "harness/simulated/ranks_stages.h"
#include "ref/chunk/recurrent.h"
#include "ref/inputs/inputs.h"
#include "ref/vocabulary/context.h"
#include "ref/vocabulary/formats.h"

#include <math.h>
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

void dp_nearby_front(const dp_front *front, const dp_mover *m, dp_conv y[3]) {
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

/* The stream of random numbers of each input: recorded verdicts depend on it. */
static const uint64_t STREAM[DP_NINPUTS] = {
    [DP_INPUT_Q] = 0,       [DP_INPUT_K] = 1,      [DP_INPUT_V] = 2,       [DP_INPUT_G] = 3,
    [DP_INPUT_BETA] = 4,    [DP_INPUT_DO] = 5,     [DP_INPUT_A_LOG] = 6,   [DP_INPUT_DT_BIAS] = 7,
    [DP_INPUT_S0] = 8,      [DP_INPUT_DSTATE] = 9, [DP_INPUT_ERASE] = 20,  [DP_INPUT_WRITE] = 21,
    [DP_INPUT_LR_A] = 22,   [DP_INPUT_LR_B] = 23,  [DP_INPUT_NUMBER] = 24, [DP_INPUT_ANGLE] = 25,
    [DP_INPUT_VALUE3] = 26, [DP_INPUT_VALUE4] = 27};

dp_problem dp_nearby_problem(const dp_problem *p, const dp_mover *m) {
    const dp_format wide = m->dtype == DP_FP64 ? DP_FP64 : DP_FP32;
    dp_problem y = *p;
    y.cu = dp_cu_copy(p);
    for (int i = 0; i < DP_NINPUTS; i++) {
        const dp_format f = dp_input_fields[i].parameter             ? wide
                            : i == DP_INPUT_G || i == DP_INPUT_ANGLE ? m->summed
                                                                     : m->dtype;
        *dp_input_at(&y, i) = moved(m, dp_input_of(p, i), dp_input_count(p, i), f, STREAM[i]);
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
            *dp_input_at(&q, k) += from * dp_input_width(w->p, k);
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
    dp_result got = of_identities(w, 0, w->backward);
    keep(w, DP_RANK_M, got.final_state);
    if (w->backward) keep(w, DP_RANK_DM, got.ds0);
    dp_result_free(&got);
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
    dp_result got = of_identities(w, 0, 1);
    keep_in(w, &w->out->begins[1], each, got.ds0);
    dp_result_free(&got);
}

static void sums(const work *w, int i, int tensor) {
    int64_t cu[2];
    dp_result got;
    const dp_problem q = sub_sequence(w, i, cu);
    dp_recurrent_run(&q, w->design, tensor == DP_RANK_DH, NULL, &got);
    keep(w, tensor, tensor == DP_RANK_DH ? got.ds0 : got.final_state);
    dp_result_free(&got);
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
        const int r = (int)(i / HV);
        const int begins =
            back ? dp_sim_ends_here(s, r, 0) : dp_sim_starts_here(s, r, s->ctx[r].nlocal - 1);
        if (!dp_sim_gets(s, !back, r)) continue; /* it sends nothing */
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
    dp_sim s;
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
    dp_sim_free(&s);
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
    double **const input[3] = {&x->p.q, &x->p.k, &x->p.v};
    for (int i = 0; i < 3; i++) {
        x->conv[i] = conv[i];
        if (!conv[i].x) continue;
        convolve(x, i, NULL);
        *input[i] = dp_copy(x->front[i].y, conv[i].T * conv[i].D);
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
    free(x->S);
    free(x->dS);
    free(x->dg);
    pairs_free(&x->pairs);
    x->S = x->dS = x->dg = NULL;
}

void dp_drawn_close(dp_drawn_run *x) {
    double *const input[3] = {x->p.q, x->p.k, x->p.v};
    if (has_sim(x))
        dp_sim_free(&x->sim);
    else
        forget_recurrent(x);
    for (int i = 0; i < 3; i++) {
        if (!x->conv[i].x) continue;
        free(input[i]);
        dp_conv_result_free(&x->front[i]);
    }
}

void dp_drawn_split(dp_drawn_run *x, int N) {
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
    int64_t *cut = dp_calloc((size_t)N, sizeof *cut);
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
    free(cut);
}

static dp_status run_call(void *who, const dp_problem *call, int states, dp_call_result *out,
                          dp_err *e) {
    const dp_design *design = who;
    (void)states;
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
    double *const dy[3] = {r->dq, r->dk, r->dv};
    for (int i = 0; x->backward && i < 3; i++)
        if (x->conv[i].x) convolve(x, i, dy[i]);
}

const double *dp_drawn_rank_value(const dp_drawn_run *x, int tensor, int64_t z) {
    const int64_t KV = (int64_t)x->p.K * x->p.V;
    const int64_t HV = x->p.HV;
    if (x->session) return NULL;
    if (x->design.chunk) return dp_sim_rank_list(&x->sim, tensor)[z];
    if (tensor == DP_RANK_S_IN) return x->S + z * KV;
    if (tensor == DP_RANK_DS_OUT) return z / HV + 1 < x->N ? x->dS + (z + HV) * KV : NULL;
    return x->pairs.of[tensor] ? x->pairs.of[tensor][z] : NULL;
}

const double *dp_drawn_dg(const dp_drawn_run *x) { return x->design.chunk ? x->sim.dg : x->dg; }
