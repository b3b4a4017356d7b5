/* Common mistakes, each as a change of what is judged (hypotheses.h). */
#include "hypotheses.h"
#include "harness/case/case_inputs.h"
#include "harness/library/tensor_files.h"
#include "harness/simulated/ranks.h"
#include "judge.h"
#include "ref/arithmetic/elementary.h"
#include "ref/chunk/gate.h"
#include "ref/files/safetensors.h"
#include "ref/vocabulary/design.h"
#include "ref/vocabulary/recurrence_text.h"

#include <math.h>
#include <omp.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* ---- misreadings of inputs ------------------------------------------------------------------- */

typedef struct {
    const char *text;                    /* what goes behind "fits: " */
    int forward;                         /* concerns o and final_state alone */
    int activated;                       /* judged with gate = log: `change` activates g */
    int plain_beta;                      /* with beta = plain: `change` activates beta */
    int one_sequence;                    /* with cu_seqlens = 0,T */
    const char *explains;                /* a result that it explains whatever it is; or NULL */
    double gates;                        /* g becomes so many times the activated one, */
    dp_format kept;                      /* in this format (with `activated`) */
    int bias_step;                       /* dt_bias of head h: entry h times this; -1: times K */
    int (*applies)(const dp_problem *p); /* can it show in this problem? */
    const char *input;                   /* each number of it goes through `map` */
    double (*map)(double x);
    double (*divisor)(double sum, int K); /* q and k are normalised so; judged with l2norm = 0 */
    void (*change)(dp_tensorfile *in, dp_tensorfile *out, const dp_problem *p); /* or NULL */
} mistake;

/* ---- tensors of files ------------------------------------------------------------------------ */

/* The input under its name or alias, NULL: absent; and taken out of the file. */
static dp_tensor *file_input(dp_tensorfile *f, const char *name) {
    const int input = dp_input_find(name);
    return (dp_tensor *)(input >= 0 ? dp_case_input_find(f, &dp_input_fields[input])
                                    : dp_tensor_find(f, name));
}

static void drop_input(dp_tensorfile *in, dp_input_id input) {
    for (int i = in->ntensor - 1; i >= 0; i--)
        if (dp_input_find(in->tensor[i].name) == (int)input) dp_tensorfile_drop(in, i);
}

static dp_tensor *result(dp_tensorfile *out, dp_result_id id) {
    for (int i = 0; i < out->ntensor; i++)
        if (dp_result_find(out->tensor[i].name) == (int)id) return &out->tensor[i];
    return NULL;
}

/* Keeps the first of its sequences; axes of length 1 may stand anywhere. */
static void first_sequence(dp_tensor *t, int Nseq) {
    for (int a = 0; t && a < t->ndim; a++) {
        if (t->shape[a] != Nseq) continue;
        t->shape[a] = 1;
        t->n /= Nseq;
        return;
    }
}

/* ---- heads ----------------------------------------------------------------------------------- */

/* Heads of a tensor in another order, those of values or of q and k: new head p is old head
 * from[p]. Its axes in the file hold the same numbers in the same order as those of the field,
 * whatever axes of 1 there are. */
static void reorder(dp_tensor *t, const dp_tensor_field *f, const dp_problem *p, dp_axis heads,
                    const int *from) {
    int64_t shape[DP_MAX_AXES], outer = 1, inner = 1;
    const dp_dims d = dp_problem_dims(p);
    const int n = dp_field_axes(f, &d, shape), H = heads == DP_AXIS_HV ? p->HV : p->H;
    int at = 0;
    while (at < n && f->axis[at] != heads)
        outer *= shape[at++];
    for (int i = at + 1; i < n; i++)
        inner *= shape[i];
    if (at == n || t->n != outer * H * inner) return;
    DP_OWN double *x = dp_copy(t->data, t->n);
    for (int64_t i = 0; i < outer; i++)
        for (int h = 0; h < H; h++)
            memcpy(t->data + (i * H + h) * inner, x + (i * H + from[h]) * inner,
                   sizeof *x * (size_t)inner);
}

/* So that head p / G of q and k meets the value heads that it meets where they are tiled. */
static void tile_heads(dp_tensorfile *in, dp_tensorfile *out, const dp_problem *p) {
    const int G = dp_G(p);
    DP_OWN int *from = dp_calloc((size_t)p->HV, sizeof *from);
    for (int h = 0; h < p->HV; h++)
        from[h] = h / G + p->H * (h % G);
    for (int i = 0; i < in->ntensor; i++) {
        const int f = dp_input_find(in->tensor[i].name);
        if (f >= 0) reorder(&in->tensor[i], &dp_input_fields[f], p, DP_AXIS_HV, from);
    }
    for (int i = 0; i < out->ntensor; i++) {
        const int f = dp_result_find(out->tensor[i].name);
        if (f >= 0) reorder(&out->tensor[i], &dp_result_fields[f], p, DP_AXIS_HV, from);
    }
}

static int has_groups(const dp_problem *p) { return p->H > 1 && p->HV > p->H && p->R == 1; }

/* ---- sequences and states -------------------------------------------------------------------- */

static int has_sequences(const dp_problem *p) { return p->Nseq > 1; }
static int has_state(const dp_problem *p) { return p->s0 != NULL; }
static int is_square(const dp_problem *p) { return p->s0 && p->K == p->V; }
static int has_empty(const dp_problem *p) {
    int n = 0;
    for (int i = 0; i < p->Nseq && p->s0; i++)
        n += p->cu[i] == p->cu[i + 1];
    return n > 0;
}

static void one_sequence(dp_tensorfile *in, dp_tensorfile *out, const dp_problem *p) {
    first_sequence(file_input(in, "initial_state"), p->Nseq);
    first_sequence(file_input(in, "dht"), p->Nseq);
    first_sequence(result(out, DP_RESULT_FINAL_STATE), p->Nseq);
}

static void no_state(dp_tensorfile *in, DP_UNUSED dp_tensorfile *out,
                     DP_UNUSED const dp_problem *p) {
    drop_input(in, DP_INPUT_S0);
}

static void state_turned(dp_tensorfile *in, DP_UNUSED dp_tensorfile *out, const dp_problem *p) {
    dp_tensor *s0 = file_input(in, "initial_state");
    if (s0) dp_states_transpose(s0, p->K, p->V);
}

static void final_turned(DP_UNUSED dp_tensorfile *in, dp_tensorfile *out, const dp_problem *p) {
    dp_tensor *s = result(out, DP_RESULT_FINAL_STATE);
    if (s) dp_states_transpose(s, p->K, p->V);
}

/* Zeros in place of the state of a sequence without tokens become its initial state. */
static void empty_kept(dp_tensorfile *in, dp_tensorfile *out, const dp_problem *p) {
    const dp_tensor *s0 = file_input(in, "initial_state");
    dp_tensor *s = result(out, DP_RESULT_FINAL_STATE);
    const int64_t w = (int64_t)p->HV * p->K * p->V;
    if (!s0 || !s || s->n != w * p->Nseq || s0->n != s->n) return;
    for (int i = 0; i < p->Nseq; i++) {
        int64_t zeros = 0;
        for (int64_t j = 0; j < w; j++)
            zeros += s->data[i * w + j] == 0;
        if (p->cu[i] == p->cu[i + 1] && zeros == w)
            memcpy(s->data + i * w, s0->data + i * w, sizeof *s->data * (size_t)w);
    }
}

/* ---- parameters of gates --------------------------------------------------------------------- */

static int has_A_log(const dp_problem *p) { return p->gate != DP_GATE_LOG && p->A_log; }
static int has_bias(const dp_problem *p) { return p->gate != DP_GATE_LOG && p->dt_bias; }
static int has_biases(const dp_problem *p) { return has_bias(p) && dp_Kg(p) > 1; }
static int has_positive_A_log(const dp_problem *p) {
    for (int h = 0; h < p->HV && has_A_log(p); h++)
        if (!(p->A_log[h] > 0)) return 0;
    return has_A_log(p);
}

static double minus_exp(double x) { return -dp_exp(x); }
static double nought(double x) { return 0 * x; }

/* Channel c of head h gets entry h * step of what lay in memory. */
static void bias_of_heads(dp_tensorfile *in, const dp_problem *p, int step) {
    dp_tensor *t = file_input(in, "dt_bias");
    if (!t || t->n != (int64_t)p->HV * p->K) return;
    DP_OWN double *x = dp_copy(t->data, t->n);
    for (int h = 0; h < p->HV; h++)
        for (int c = 0; c < p->K; c++)
            t->data[h * p->K + c] = x[h * step];
}

/* ---- gates, betas, norms --------------------------------------------------------------------- */

static int has_gate(const dp_problem *p) { return p->g != NULL; }
static int has_raw_gate(const dp_problem *p) { return p->gate != DP_GATE_LOG; }
static int has_beta(const dp_problem *p) { return p->beta != NULL; }
static int has_norm(const dp_problem *p) { return p->l2norm; }

static void activate_gates(dp_tensorfile *in, const dp_problem *p, double factor, dp_format f) {
    dp_tensor *g = file_input(in, "g");
    DP_FREED(dp_activated_free) dp_activated a = dp_activated_new(p);
    for (int64_t i = 0; g && i < g->n; i++)
        g->data[i] = dp_store(f, factor * a.g[i]);
    drop_input(in, DP_INPUT_A_LOG);
    drop_input(in, DP_INPUT_DT_BIAS);
}

static void betas_bf16(dp_tensorfile *in, DP_UNUSED dp_tensorfile *out, const dp_problem *p) {
    dp_tensor *b = file_input(in, "beta");
    DP_FREED(dp_activated_free) dp_activated a = dp_activated_new(p);
    for (int64_t i = 0; b && i < b->n; i++)
        b->data[i] = dp_store(DP_BF16, a.beta[i]);
}

/* The divisor of a row of K numbers, from the sum of their squares. */
static double norm_1e5(double sum, int K) { return (void)K, sqrt(sum + 1e-5); }
static double norm_1e12(double sum, int K) { return (void)K, sqrt(sum + 1e-12); }
static double norm_bare(double sum, int K) { return (void)K, sqrt(sum); }
static double norm_mean(double sum, int K) { return sqrt(sum + K * 1e-6); }
static double norm_outside(double sum, int K) { return (void)K, sqrt(sum) + 1e-6; }
static double norm_clamped(double sum, int K) { return (void)K, fmax(sqrt(sum), 1e-6); }

static void normalise(dp_tensor *t, int K, double (*divisor)(double sum, int K)) {
    for (int64_t r = 0; t && r < t->n / K; r++) {
        double *x = t->data + r * K;
        const double by = divisor(dp_squares(x, K), K);
        for (int j = 0; j < K && by > 0; j++)
            x[j] /= by;
    }
}

/* ---- the table ------------------------------------------------------------------------------- */

#define FORWARD .forward = 1
#define ACTIVATED .activated = 1
#define ROW(TEXT, ...) \
    { .text = TEXT, __VA_ARGS__ }
static const mistake MISTAKES[] = {
    ROW("as if cu_seqlens were ignored: all tokens are one sequence", FORWARD, .one_sequence = 1,
        .applies = has_sequences, .change = one_sequence),
    ROW("as if heads of q and k were tiled, not repeated: value head h reads head h mod H",
        .applies = has_groups, .change = tile_heads),
    ROW("as if the initial state were ignored", .explains = "ds0", .applies = has_state,
        .change = no_state),
    ROW("as if the initial state were read transposed", .explains = "ds0", .applies = is_square,
        .change = state_turned),
    ROW("final_state is transposed", .applies = is_square, .change = final_turned),
    ROW("final_state of sequences without tokens is zero, not their initial state",
        .applies = has_empty, .change = empty_kept),
    ROW("as if A_log were -exp(A_log) already: it is exponentiated twice", .explains = "dA_log",
        .applies = has_A_log, .input = "A_log", .map = minus_exp),
    ROW("as if A_log were exponentiated twice", .explains = "dA_log", .applies = has_A_log,
        .input = "A_log", .map = dp_exp),
    ROW("as if A_log were exponentiated already: it is taken for the rate", .explains = "dA_log",
        .applies = has_positive_A_log, .input = "A_log", .map = dp_log),
    ROW("as if A_log were not read", .explains = "dA_log", .applies = has_A_log, .input = "A_log",
        .map = nought),
    ROW("as if dt_bias were not read", .explains = "ddt_bias", .applies = has_bias,
        .input = "dt_bias", .map = nought),
    ROW("as if dt_bias were one number a head: entry h for every channel of head h",
        .explains = "ddt_bias", .applies = has_biases, .bias_step = 1),
    ROW("as if dt_bias were one number a head: that of its first channel", .explains = "ddt_bias",
        .applies = has_biases, .bias_step = -1),
    ROW("as if gates were powers of 2, exp2(g) for exp(g)", FORWARD, ACTIVATED, .applies = has_gate,
        .gates = M_LN2),
    ROW("as if gates were divided by ln 2 and then raised from e", FORWARD, ACTIVATED,
        .applies = has_gate, .gates = 1 / M_LN2),
    ROW("as if the activated gate were kept in bf16", FORWARD, ACTIVATED, .applies = has_raw_gate,
        .gates = 1, .kept = DP_BF16),
    ROW("as if beta were rounded to bf16", FORWARD, .plain_beta = 1, .applies = has_beta,
        .change = betas_bf16),
    ROW("matches eps = 1e-5 in the norm of q and k, not 1e-6", FORWARD, .applies = has_norm,
        .divisor = norm_1e5),
    ROW("matches eps = 1e-12 in the norm of q and k, not 1e-6", FORWARD, .applies = has_norm,
        .divisor = norm_1e12),
    ROW("matches a norm of q and k without eps", FORWARD, .applies = has_norm,
        .divisor = norm_bare),
    ROW("matches eps = 1e-6 on the mean of squares in the norm of q and k, not their sum", FORWARD,
        .applies = has_norm, .divisor = norm_mean),
    ROW("matches eps = 1e-6 outside the root in the norm of q and k, not inside", FORWARD,
        .applies = has_norm, .divisor = norm_outside),
    ROW("matches a norm of q and k clamped at 1e-6, with no eps inside the root", FORWARD,
        .applies = has_norm, .divisor = norm_clamped),
};
enum { NMISTAKES = sizeof MISTAKES / sizeof *MISTAKES };

/* Changes the files as the row says. */
static void mistake_change(const mistake *m, dp_tensorfile *in, dp_tensorfile *out,
                           const dp_problem *p) {
    dp_tensor *t = m->map ? file_input(in, m->input) : NULL;
    for (int64_t i = 0; t && i < t->n; i++)
        t->data[i] = m->map(t->data[i]);
    for (int i = 0; i < 2 && m->divisor; i++)
        normalise(file_input(in, i ? "k" : "q"), p->K, m->divisor);
    if (m->gates > 0) activate_gates(in, p, m->gates, m->kept);
    if (m->bias_step) bias_of_heads(in, p, m->bias_step > 0 ? m->bias_step : p->K);
    if (m->change) m->change(in, out, p);
}

/* The change of the files by one hypothesis. */
typedef struct {
    const dp_problem *p;
    const char *only;       /* of OUT this tensor alone; NULL: forward, or all */
    int forward;            /* of OUT o and final_state alone */
    double factor;          /* of `only` */
    int late;               /* `only` is one token late */
    const int *from;        /* head h of `only` is its head from[h]; NULL: it is */
    const mistake *mistake; /* of reading inputs; NULL: none */
    dp_fault fault;         /* what it changes of o and final_state in fp64 is taken off them */
    const char *layout;     /* layout of states, as the caller set it */
    const char *earlier;    /* this input is that of the token before */
    int rank;               /* starts from zero */
} change;

/* A hypothesis is a mistake, operands of another format, or a base whose errors hide them all. */
typedef enum { MISTAKE, OPERANDS, COARSER, NKINDS } kind;

/* One that fits, and which of the failed tensors it explains: a bit each. */
typedef struct {
    char text[512];
    kind kind;
    uint64_t explains;
} fitting;
#define MOST_FITTING 64

typedef struct {
    const dp_judge_options *o;
    const dp_case *c;
    const dp_run *failed;
    double until;
    kind kind; /* of what is tried */
    dp_hypotheses_count count;
    int n;
    fitting fits[MOST_FITTING];
} search;

/* ---- changes of files ------------------------------------------------------------------------ */

/* The mistake leaves nothing of this tensor to compare, and explains it without a look at it. */
static int explained_unseen(const change *h, const char *name) {
    return h->mistake && h->mistake->explains && !strcmp(name, h->mistake->explains);
}

static int kept(const change *h, const char *name) {
    const int field = dp_result_find(name);
    if (h->only) return !strcmp(name, h->only) || (field >= 0 && field == dp_result_find(h->only));
    if (h->rank) return field == DP_RESULT_O;
    if (explained_unseen(h, name)) return 0;
    return !h->forward || field == DP_RESULT_O || field == DP_RESULT_FINAL_STATE;
}

static void scale(dp_tensor *t, double factor) {
    for (int64_t i = 0; t && i < t->n; i++)
        t->data[i] *= factor;
}

/* Row t becomes row t - 1 of T, the first one 0; by -1: row t + 1, the last one stays. */
static void shift(dp_tensor *t, int64_t T, int by) {
    if (!t || t->n % T) return;
    const int64_t w = t->n / T;
    const size_t size = sizeof *t->data * (size_t)(w * (T - 1));
    if (by < 0) {
        memmove(t->data, t->data + w, size);
        return;
    }
    memmove(t->data + w, t->data, size);
    memset(t->data, 0, sizeof *t->data * (size_t)w);
}

/* The first T - 1 tokens of what they were one token later. */
static void advance(dp_tensor *t, int64_t T) {
    for (int a = 0; t && a < t->ndim; a++) {
        if (t->shape[a] != T) continue;
        shift(t, T, -1);
        t->shape[a]--;
        t->n -= t->n / T;
        return;
    }
}

static void subtract(dp_tensor *t, int64_t n, const double *x, const double *y) {
    for (int64_t i = 0; t && t->n == n && i < n; i++)
        t->data[i] -= x[i] - y[i];
}

/* The problem in fp64 with that fault; to be freed. */
static dp_sim with_fault(const dp_problem *p, dp_fault fault) {
    dp_sim s;
    dp_must(dp_sim_new(&s, p, DP_BASE_FP64, 1, fault, NULL)); /* one rank splits */
    dp_sim_run(&s, DP_FP64, DP_EXCHANGE_ALLGATHER, 0);
    return s;
}

static void take_fault_off(dp_tensorfile *out, const change *h) {
    const dp_problem *p = h->p;
    const int64_t states = p->Nseq * (int64_t)p->HV * p->K * p->V;
    dp_tensor *state = file_input(out, "final_state");
    dp_complaints none = {0}; /* it was read before */
    const int vk = dp_judge_state_vk(out, h->layout, &none);
    DP_FREED(dp_sim_free) dp_sim wrong = with_fault(p, h->fault);
    DP_FREED(dp_sim_free) dp_sim right = with_fault(p, DP_FAULT_NONE);
    if (state && vk) dp_states_transpose(state, p->K, p->V);
    subtract(file_input(out, "o"), dp_input_count(p, DP_INPUT_DO), wrong.out.o, right.out.o);
    subtract(state, states, wrong.out.final_state, right.out.final_state);
    if (state && vk) dp_states_transpose(state, p->V, p->K);
}

static void apply(dp_tensorfile *in, dp_tensorfile *out, void *arg) {
    const change *h = arg;
    for (int i = out->ntensor - 1; i >= 0; i--)
        if (!kept(h, out->tensor[i].name)) dp_tensorfile_drop(out, i);
    dp_tensor *only = h->only && out->ntensor ? out->tensor : NULL;
    if (h->factor != 1) scale(only, 1 / h->factor);
    if (h->late) advance(only, h->p->T);
    for (dp_axis heads = DP_AXIS_H; heads <= DP_AXIS_HV && only && h->from; heads++)
        reorder(only, &dp_result_fields[dp_result_find(only->name)], h->p, heads, h->from);
    if (h->mistake) mistake_change(h->mistake, in, out, h->p);
    if (h->fault) take_fault_off(out, h);
    if (h->earlier) shift(file_input(in, h->earlier), h->p->T, 1);
    for (int i = in->ntensor - 1; i >= 0 && h->rank; i--) {
        const int f = dp_input_find(in->tensor[i].name);
        if (f == DP_INPUT_S0 || f == DP_INPUT_DSTATE) dp_tensorfile_drop(in, i);
    }
}

/* ---- trying one ------------------------------------------------------------------------------ */

static change nothing(const search *s) { return (change){.p = &s->c->p, .factor = 1}; }

/* How far the failing run's tensor is from what must be, and about how far it may be; NAN: not
 * known. */
static void distances(const search *s, const char *name, double *failed, double *limit) {
    *failed = *limit = NAN;
    for (int i = 0; i < s->failed->ntensor; i++) {
        const dp_judgement *t = &s->failed->tensor[i];
        if (strcmp(t->name, name)) continue;
        *failed = t->rel_fro;
        *limit = t->rel_fro / t->expected.at[DP_LEVEL_TENSOR].ratio;
    }
}

static double distance(const double *x, const double *y, int64_t n) {
    double off = 0, all = 0;
    for (int64_t i = 0; i < n; i++) {
        off += (x[i] - y[i]) * (x[i] - y[i]);
        all += y[i] * y[i];
    }
    return sqrt(off / all);
}

/* Could what is judged pass? No, if fp64 of the changed problem is no nearer to it than a tenth of
 * the failure, and ten times its limit. A truth would only agree. */
static int could_pass(const search *s, const dp_case *c, const dp_stored_results *g) {
    const double nearer = 0.1, above = 10;
    DP_FREED(dp_sim_free) dp_sim sim;
    dp_err e = {0};
    int could = 1, backward = 0;
    for (int f = 0; f < DP_NRESULTS; f++)
        backward |= g->r.out[f] && dp_result_fields[f].backward;
    if (dp_sim_reference(&sim, &c->p, DP_CHUNK, 1, NULL, backward, &e)) return 1;
    for (int f = 0; f < DP_NRESULTS && could; f++) {
        const double *x = g->r.out[f], *y = sim.out.out[f];
        double failed, limit;
        if (!x || !y) continue;
        distances(s, dp_result_fields[f].name, &failed, &limit);
        could = !(distance(x, y, dp_result_count(&c->p, f)) > fmax(nearer * failed, above * limit));
    }
    return could;
}

static int passes(const search *s, dp_judge_options *q, change *h) {
    DP_FREED(dp_tensorfile_free) dp_tensorfile in = {0}, out = {0};
    dp_judge_loaded l;
    dp_case c;
    dp_runs runs = {0};
    dp_err e = {0};
    int good = 0;
    const dp_run_options ro = {.cache = q->cache, .truth = q->truth, .unjudged = q->unjudged};
    q->change = apply;
    q->change_arg = h;
    q->note = NULL;
    if (!dp_safetensors_read(q->inputs, &in, &e) && !dp_safetensors_read(q->outputs, &out, &e) &&
        !dp_judge_load(q, &in, &out, &c, &l, &e)) {
        const int asks = s->kind != MISTAKE || could_pass(s, &c, &l.stored);
        if (asks && !dp_run_stored(&c, &ro, &l.stored, &runs, &e))
            good = runs.n == 1 && runs.run[0].verdict == DP_PASS;
        dp_runs_free(&runs);
        dp_case_free(&c);
    }
    return good;
}

/* The failed tensors that it concerns. */
static uint64_t explained_by(const search *s, const change *h) {
    uint64_t all = 0;
    for (int i = 0; i < s->failed->ntensor && i < 64; i++) {
        const dp_judgement *t = &s->failed->tensor[i];
        if (t->verdict == DP_FAIL && (kept(h, t->name) || explained_unseen(h, t->name)))
            all |= (uint64_t)1 << i;
    }
    return all;
}

static void attempt(search *s, dp_judge_options q, change h, const char *text) {
    const uint64_t explains = explained_by(s, &h);
    if (!explains || s->n == MOST_FITTING) return;
    if (omp_get_wtime() > s->until) {
        s->count.left++;
        return;
    }
    s->count.tried++;
    if (!passes(s, &q, &h)) return;
    s->count.fit++;
    fitting *f = &s->fits[s->n++];
    f->kind = s->kind;
    f->explains = explains;
    snprintf(f->text, sizeof f->text, "%s", text);
}

static int failed_tensor(const search *s, const char *name) {
    for (int i = 0; i < s->failed->ntensor; i++) {
        const dp_judgement *t = &s->failed->tensor[i];
        if (t->verdict == DP_FAIL && (!name || !strcmp(t->name, name))) return 1;
    }
    return 0;
}

static int forward_failed(const search *s) {
    return failed_tensor(s, "o") || failed_tensor(s, "final_state");
}

/* ---- settings -------------------------------------------------------------------------------- */

static void other_setting(search *s, size_t option, const char *name, const char *value,
                          const char *meaning) {
    dp_judge_options q = *s->o;
    char text[512];
    *(const char **)((char *)&q + option) = value;
    snprintf(text, sizeof text, "passes with --%s %s%s%s", name, value, *meaning ? ": " : "",
             meaning);
    attempt(s, q, nothing(s), text);
}
#define OTHER(field, name, value, meaning) \
    other_setting(s, offsetof(dp_judge_options, field), name, value, meaning)

static void try_layout(search *s) {
    const int given = s->o->state_layout && !strcmp(s->o->state_layout, "vk");
    if (s->c->p.s0 || s->c->p.dstate || failed_tensor(s, "final_state") || failed_tensor(s, "ds0"))
        OTHER(state_layout, "state-layout", given ? "kv" : "vk", "");
}

static void try_forms(search *s) {
    const dp_problem *p = &s->c->p;
    static const char *const meaning[DP_NBETAS] = {"as if beta were not sigmoided",
                                                   "as if beta were sigmoided once"};
    for (int i = 0; i < DP_NBETAS && p->beta; i++)
        if (i != (int)p->beta_form)
            OTHER(beta, "beta", dp_betas[i].word, meaning[i] ? meaning[i] : "");
    OTHER(l2norm, "l2norm", p->l2norm ? "0" : "1",
          p->l2norm ? "as if q and k were not normalised" : "as if q and k were normalised");
    if (p->gate != DP_GATE_LOG) {
        dp_judge_options q = *s->o;
        q.gate = "log";
        q.lower_bound = NULL;
        attempt(s, q, nothing(s), "passes with --gate log: as if the gate were not activated");
    } else {
        OTHER(gate, "gate", "softplus", "");
        if (dp_gates_above_0(p)) OTHER(gate, "gate", "exp", "g is the decay itself");
    }
}

static void try_scale(search *s) {
    char usual[40], twice[40];
    const double own = s->c->p.scale, standard = dp_usual_scale(&s->c->p);
    snprintf(usual, sizeof usual, "%.17g", standard);
    if (own != 1) OTHER(scale, "scale", "1", "q is not multiplied by the scale");
    snprintf(twice, sizeof twice, "%.17g", own * own);
    if (own != 1) OTHER(scale, "scale", twice, "q is multiplied by the scale twice");
    if (fabs(own / standard - 1) > 1e-12) OTHER(scale, "scale", usual, "K^-1/2");
}

/* Does the error of o lie along what a residual that reads the state before its decay would make?
 * A rounding of n numbers lies along it by chance alone, n^-1/2. */
#define ALONG 0.1
static int follows_the_decay(const search *s) {
    dp_judge_options q = *s->o;
    DP_FREED(dp_tensorfile_free) dp_tensorfile in = {0}, out = {0};
    dp_judge_loaded l;
    dp_case c;
    dp_err e = {0};
    double both = 0, error = 0, fault = 0;
    if (!dp_has_beta(&s->c->p) || dp_in_turn(&s->c->p) || !failed_tensor(s, "o")) return 0;
    q.note = NULL;
    if (!dp_safetensors_read(q.inputs, &in, &e) && !dp_safetensors_read(q.outputs, &out, &e) &&
        !dp_judge_load(&q, &in, &out, &c, &l, &e)) {
        DP_FREED(dp_sim_free) dp_sim right = with_fault(&c.p, DP_FAULT_NONE);
        DP_FREED(dp_sim_free) dp_sim wrong = with_fault(&c.p, DP_FAULT_READ_UNDECAYED);
        for (int64_t i = 0; i < dp_input_count(&c.p, DP_INPUT_DO); i++) {
            const double x = l.stored.r.o[i] - right.out.o[i], y = wrong.out.o[i] - right.out.o[i];
            both += x * y;
            error += x * x;
            fault += y * y;
        }
        dp_case_free(&c);
    }
    return both > ALONG * sqrt(error * fault);
}

static void try_base(search *s) {
    const dp_base base = s->c->base[0];
    if (base == DP_BASE_FP64)
        OTHER(base, "base", "fp32", "its errors are no larger than those of that base");
    if (base != DP_BASE_BF16 && !s->count.fit)
        OTHER(base, "base", "bf16", "its errors are no larger than those of that base");
}

/* The words of a design that stores in f what failed; "": an output that failed has other numbers,
 * or leaves as it was computed. */
static void stored_words(const search *s, dp_tensorfile *out, dp_format f, char words[64]) {
    int leave = 0, state = 0;
    *words = 0;
    for (int i = 0; i < s->failed->ntensor; i++) {
        const dp_judgement *t = &s->failed->tensor[i];
        const int field = dp_result_find(t->name), is_state = field == DP_RESULT_FINAL_STATE;
        const dp_tensor *x = file_input(out, t->name);
        if (t->verdict != DP_FAIL) continue;
        if (!x || field < 0 || !(dp_leaves(field) || is_state)) return;
        for (int64_t n = 0; n < x->n; n++)
            if (x->data[n] != dp_store(f, x->data[n])) return;
        *(is_state ? &state : &leave) = 1;
    }
    const char *name = dp_formats[f].name;
    if (leave)
        snprintf(words, 64, "out=%s%s%s", name, state ? ",final_state=" : "", state ? name : "");
    if (state && !leave) snprintf(words, 64, "final_state=%s", name);
}

/* Outputs that were stored in a coarser format, whatever holds them now: the coarsest. */
static void try_stored(search *s) {
    static const dp_format formats[] = {DP_BF16, DP_FP16, DP_FP32};
    const size_t n = s->c->base[0] == DP_BASE_FP64 ? 3 : 2;
    DP_FREED(dp_tensorfile_free) dp_tensorfile out = {0};
    dp_err e = {0};
    char words[64] = "";
    if (dp_safetensors_read(s->o->outputs, &out, &e)) return;
    for (size_t i = 0; i < n && !*words; i++)
        stored_words(s, &out, formats[i], words);
    if (*words) OTHER(design, "design", words, "what failed holds numbers of that format alone");
}

/* Design d, without chunks and with its state kept in f, which o reads before or after it is
 * rounded. Returns whether one fits. */
static int try_kept(search *s, dp_design d, dp_format f) {
    const dp_design *is = &s->failed->design;
    const int before = s->count.fit;
    char words[DP_DESIGN_TEXT], meaning[80];
    d.chunk = 0;
    d.state = f;
    for (d.read_kept = 0; d.read_kept < 2; d.read_kept++) {
        if (!s->failed->undeclared && dp_design_same(&d, is)) continue;
        dp_design_text(&d, words);
        snprintf(meaning, sizeof meaning, "its state is kept in %s, and o reads it %s",
                 dp_formats[f].name, d.read_kept ? "as kept" : "before that");
        OTHER(design, "design", words, meaning);
    }
    return s->count.fit > before;
}

/* A declared recurrent kernel, whose state is in another format or is read before or after its
 * rounding. */
static void try_state(search *s) {
    const dp_design *d = &s->failed->design;
    if (s->failed->undeclared || d->chunk) return;
    if (d->state != dp_design_of(d->base).state)
        try_kept(s, *d, d->state);
    else if (!try_kept(s, *d, DP_FP16))
        try_kept(s, *d, DP_BF16);
}

/* For a kernel that does not declare its design, but for formats: those of its parts that make the
 * smallest errors, of those that pass. */
static void try_operands(search *s) {
    const dp_base base = s->c->base[0];
    const int before = s->count.fit;
    dp_design d = dp_design_formats(&s->failed->design);
    char words[DP_DESIGN_TEXT];
    if (!s->failed->undeclared) return;
    d.undeclared = 0;
    if (base != DP_BASE_BF16) try_stored(s);
    if (s->count.fit > before || base == DP_BASE_FP64) return;
    if (base == DP_BASE_FP32) {
        OTHER(design, "design", "factors=tf32,scores=gated",
              "its products round their operands to tf32");
        OTHER(design, "design", "factors=tf32rz,scores=gated",
              "its products truncate their operands to tf32");
        try_kept(s, d, DP_FP16);
    }
    if (s->count.fit > before) return;
    try_kept(s, d, DP_BF16);
    d.state = DP_BF16;
    dp_design_text(&d, words);
    OTHER(design, "design", words, "its state is kept in bf16 from chunk to chunk");
}

/* Rows of one's own read another state. */
static void try_rows(search *s) {
    const dp_user_recurrence is = *dp_user_recurrence_installed();
    char text[200];
    int reads = 0;
    for (int i = 0; i < is.rows.n; i++)
        reads |= is.rows.row[i].read.sign;
    for (int i = 0; i < DP_NREADINGS && reads; i++) {
        dp_user_recurrence other = is;
        if (i == is.rows.reading) continue;
        dp_recurrence_reads(&other.rows, (dp_reading)i);
        dp_user_recurrence_install(&other);
        snprintf(text, sizeof text, "passes with `reads %s`: %s", dp_readings[i].word,
                 dp_readings[i].state);
        attempt(s, *s->o, nothing(s), text);
    }
    dp_user_recurrence_install(&is);
}

/* Passes with these norms? The rows that are installed stay. */
static void try_norms_of(search *s, signed char norm, unsigned normed, double eps) {
    const dp_user_recurrence is = *dp_user_recurrence_installed();
    dp_user_recurrence other = is;
    char text[200] = "passes without norms";
    other.rows.norm = norm;
    other.rows.normed = normed;
    other.rows.eps = eps;
    if (normed)
        snprintf(text, sizeof text, norm ? "passes with `norm %s" : "passes with `norm",
                 dp_norms[norm].word);
    for (int i = 0; i < DP_NINPUTS; i++)
        if (normed >> i & 1) dp_text_add(text, sizeof text, " %s", is.input[i]);
    if (normed) dp_text_add(text, sizeof text, eps > 0 ? " eps %g`" : "`", eps);
    dp_user_recurrence_install(&other);
    attempt(s, *s->o, nothing(s), text);
    dp_user_recurrence_install(&is);
}

/* Norms of one's own rows: none, those of one input more or less, another norm, another eps. */
static void try_norms(search *s) {
    static const double EPS[] = {1e-12, 1e-6, 1e-5};
    const dp_recurrence is = dp_user_recurrence_installed()->rows;
    if (is.normed) try_norms_of(s, is.norm, 0, 0);
    for (int i = -1; i < DP_KEYS_MOST; i++) {
        const dp_input_id of = i < 0 ? DP_INPUT_Q : dp_row_keys[i];
        if (dp_input_of(&s->c->p, of) && !(is.along && i < 0))
            try_norms_of(s, is.norm, is.normed ^ 1U << of, is.eps);
    }
    for (signed char norm = 0; norm < DP_NNORMS && is.normed; norm++)
        if (norm != is.norm) try_norms_of(s, norm, is.normed, is.eps);
    for (size_t i = 0; i < sizeof EPS / sizeof *EPS; i++)
        if (is.normed && EPS[i] != dp_norm_eps(&s->c->p))
            try_norms_of(s, is.norm, is.normed, EPS[i]);
}

static int fits_format(const dp_problem *p, dp_format f) {
    const int64_t n = dp_input_count(p, DP_INPUT_G);
    for (int64_t i = 0; i < n; i++)
        if (p->g[i] != dp_store(f, p->g[i])) return 0;
    return 1;
}

static void try_gate_dtype(search *s) {
    static const dp_format formats[] = {DP_FP32, DP_BF16, DP_FP16};
    const char *given = s->o->gate_dtype;
    const int before = s->count.fit;
    if (given) {
        if (strcmp(given, "fp32")) OTHER(gate_dtype, "gate-dtype", "fp32", "");
        if (s->count.fit == before) OTHER(gate_dtype, "gate-dtype", "fp64", "as the file holds g");
        return;
    }
    for (size_t i = 0; i < sizeof formats / sizeof *formats; i++)
        if (!fits_format(&s->c->p, formats[i]))
            OTHER(gate_dtype, "gate-dtype", dp_formats[formats[i]].name, "");
}

/* ---- inputs ---------------------------------------------------------------------------------- */

static void try_mistakes(search *s) {
    for (int i = 0; i < NMISTAKES; i++) {
        const mistake *m = &MISTAKES[i];
        dp_judge_options q = *s->o;
        change h = nothing(s);
        if (!m->applies(&s->c->p)) continue;
        h.mistake = m;
        h.forward = m->forward;
        h.layout = s->o->state_layout;
        if (m->activated) {
            q.gate = "log";
            q.lower_bound = q.gate_dtype = NULL;
        }
        if (m->plain_beta) q.beta = "plain";
        if (m->divisor) q.l2norm = "0";
        char cu[32];
        snprintf(cu, sizeof cu, "0,%lld", (long long)s->c->p.T);
        if (m->one_sequence) q.cu_seqlens = cu;
        attempt(s, q, h, m->text);
    }
}

static void try_gates(search *s) {
    const dp_problem *p = &s->c->p;
    static const struct {
        int id;
        const char *input, *said;
    } each[] = {{DP_INPUT_G, "g", "gate"},
                {DP_INPUT_LR_A, "lr_a", "lr_a"},
                {DP_INPUT_BETA, "beta", "beta"},
                {DP_INPUT_ERASE, "erase", "erase"},
                {DP_INPUT_WRITE, "write", "write"}};
    for (size_t i = 0; i < sizeof each / sizeof *each; i++) {
        change h = nothing(s);
        char text[80];
        h.forward = 1;
        h.earlier = each[i].input;
        snprintf(text, sizeof text, "as if every %s were that of the token before", each[i].said);
        if (each[i].id == DP_INPUT_G || dp_recurrence_uses(dp_recurrence_of(p), each[i].id))
            attempt(s, *s->o, h, text);
    }
}

static void try_undecayed(search *s) {
    change h = nothing(s);
    if (!dp_has_beta(&s->c->p) || dp_in_turn(&s->c->p)) return;
    h.forward = 1;
    h.fault = DP_FAULT_READ_UNDECAYED;
    h.layout = s->o->state_layout;
    attempt(s, *s->o, h, "as if the residual read the state before its decay: v - k S(t-1)");
}

static void try_ranks(search *s) {
    const int N = s->failed->ranks;
    const int64_t T = s->c->p.T;
    for (int r = 1; r < N && s->c->p.Nseq == 1 && !s->c->p.s0 && failed_tensor(s, "o"); r++) {
        dp_judge_options q = *s->o;
        change h = nothing(s);
        char cu[64], text[100];
        snprintf(cu, sizeof cu, "0,%lld,%lld", (long long)(r * (T / N)), (long long)T);
        snprintf(text, sizeof text, "o is as if rank %d started from zero", r);
        q.cu_seqlens = cu;
        h.rank = r;
        attempt(s, q, h, text);
    }
}

/* ---- outputs --------------------------------------------------------------------------------- */

static void try_factors(search *s, const char *name) {
    const double K = s->c->p.K;
    const struct {
        double factor;
        const char *text;
    } factors[] = {{sqrt(K), "exactly sqrt(K) too large"},
                   {1 / sqrt(K), "exactly sqrt(K) too small"},
                   {2, "exactly 2 times too large"},
                   {0.5, "exactly half of what it must be"},
                   {-1, "right but for its sign"},
                   {1 / M_LN2, "exactly 1/ln 2 times too large"},
                   {M_LN2, "exactly ln 2 of what it must be"}};
    for (size_t i = 0; i < sizeof factors / sizeof *factors; i++) {
        change h = nothing(s);
        char text[100];
        const double scale = s->c->p.scale, f = factors[i].factor;
        if (!strcmp(name, "o") && (f == scale || f * scale == 1)) continue; /* as try_scale says */
        h.only = name;
        h.factor = f;
        snprintf(text, sizeof text, "%s is %s", name, factors[i].text);
        attempt(s, *s->o, h, text);
    }
}

/* The first T - 1 tokens know nothing of the last one: with o one token late they are all there. */
static void try_late(search *s) {
    dp_judge_options q = *s->o;
    change h = nothing(s);
    if (s->c->p.Nseq > 1 || s->c->p.T < 2 || s->failed->ranks > 1 || s->o->tokens) return;
    if (!failed_tensor(s, "o")) return;
    h.only = "o";
    h.late = 1;
    q.tokens = s->c->p.T - 1;
    attempt(s, q, h, "o is one token late");
}

/* Two heads of the tensor in each other's place, or all of them one place on. */
static void try_heads(search *s, const dp_judgement *t) {
    const int n = t->heads;
    int wrong[2] = {0}, count = 0;
    char text[100];
    change h = nothing(s);
    if (s->failed->ranks > 1 || n < 2 || dp_result_find(t->name) < 0) return;
    DP_OWN int *from = dp_calloc((size_t)n, sizeof *from);
    h.only = t->name;
    h.from = from;
    for (int i = 0; i < n; i++)
        if (t->per_head[i] > 0x1p-3 && count++ < 2) wrong[count - 1] = i;
    for (int i = 0; i < n; i++)
        from[i] = i == wrong[0] ? wrong[1] : i == wrong[1] ? wrong[0] : i;
    snprintf(text, sizeof text, "heads %d and %d of %s are in each other's place", wrong[0],
             wrong[1], t->name);
    if (count == 2) attempt(s, *s->o, h, text);
    for (int by = 1; by < n && count == n && n > 2; by += n - 2) {
        for (int i = 0; i < n; i++)
            from[i] = (i + by) % n;
        snprintf(text, sizeof text, "every head of %s is the one %s it", t->name,
                 by == 1 ? "before" : "behind");
        attempt(s, *s->o, h, text);
    }
}

/* ---- a claim that passes and says more ------------------------------------------------------- */

/* By how much is what a claim expects of a tensor above what another does, at most over tensors? */
static double expects_less(const dp_run *wide, const dp_run *tight, const char **name) {
    double most = 0;
    for (int i = 0; i < wide->ntensor && i < tight->ntensor; i++) {
        const dp_judgement *a = &wide->tensor[i], *b = &tight->tensor[i];
        const double times = b->expected.at[DP_LEVEL_TENSOR].ratio /
                             a->expected.at[DP_LEVEL_TENSOR].ratio; /* of the same error */
        if (isnan(a->expected.excess) || isnan(b->expected.excess) || !(times > most)) continue;
        most = times;
        *name = a->name;
    }
    return most;
}

static int is_far_below(const dp_run *r) {
    const double thousandth = 1e-3;
    for (int i = 0; i < r->ntensor; i++)
        if (!isnan(r->tensor[i].expected.excess) && r->tensor[i].rel_fro > 0 &&
            r->tensor[i].expected.at[DP_LEVEL_TENSOR].ratio < thousandth)
            return 1;
    return 0;
}

int dp_tighter_claim(const dp_judge_options *o, const dp_run *passed, char *text, size_t size) {
    static const struct {
        const char *base, *design, *option;
    } claims[] = {{"fp32", NULL, ""}, {"fp32", "out=bf16", " --design out=bf16"}};
    if (passed->verdict != DP_PASS || passed->base != DP_BASE_BF16 || !is_far_below(passed))
        return 0;
    for (size_t i = 0; i < sizeof claims / sizeof *claims; i++) {
        dp_judge_options q = *o;
        dp_case c;
        dp_runs runs = {0};
        dp_err e = {0};
        const char *name = "";
        q.base = claims[i].base;
        q.design = claims[i].design;
        q.note = NULL;
        if (dp_judge(&q, &c, &runs, &e)) continue;
        const double times = expects_less(passed, &runs.run[0], &name);
        const int good = runs.run[0].verdict == DP_PASS && times > 1;
        if (good)
            snprintf(text, size,
                     "passes with --base %s%s, too: claim that, it sees errors of %s that are %.2g "
                     "times smaller",
                     q.base, claims[i].option, name, times);
        dp_runs_free(&runs);
        dp_case_free(&c);
        if (good) return 1;
    }
    return 0;
}

static int all_finite(const search *s) {
    for (int i = 0; i < s->failed->ntensor; i++)
        if (!isfinite(s->failed->tensor[i].rel_fro)) return 0;
    return 1;
}

/* Does the truth overflow, and no output? Some setting is another then. */
static int only_truth_overflows(const search *s) {
    DP_FREED(dp_tensorfile_free) dp_tensorfile out = {0};
    dp_err e = {0};
    int finite = !dp_safetensors_read(s->o->outputs, &out, &e);
    for (int i = 0; i < out.ntensor; i++)
        for (int64_t n = 0; n < out.tensor[i].n && finite; n++)
            finite = isfinite(out.tensor[i].data[n]);
    return finite;
}

/* ---- which of them to say -------------------------------------------------------------------- */

/* Says the one of least kind that explains all of `tensors` (exact: these and no others), or that
 * several do. Returns whether there was one. */
static int say(const search *s, uint64_t tensors, int exact, void (*fits)(const char *, void *),
               void *arg) {
    char all[1400] = "";
    int n = 0;
    for (kind k = MISTAKE; k < NKINDS && !n; k++)
        for (int i = 0; i < s->n; i++) {
            const fitting *f = &s->fits[i];
            const uint64_t common = f->explains & tensors;
            if (f->kind != k || common != tensors || (exact && f->explains != tensors)) continue;
            dp_text_add(all, sizeof all, "%s%s", n++ ? "; " : "", f->text);
        }
    char text[1440];
    snprintf(text, sizeof text, "%s%s", n > 1 ? "several would fit: " : "", all);
    if (n) fits(text, arg);
    return n > 0;
}

/* The tensors that the widest of the hypotheses explains, of those that are left; 0: none. */
static uint64_t widest(const search *s, uint64_t left) {
    uint64_t most = 0;
    for (int i = 0; i < s->n; i++) {
        const uint64_t x = s->fits[i].explains;
        if (!(x & ~left) && __builtin_popcountll(x) > __builtin_popcountll(most)) most = x;
    }
    return most;
}

/* One that explains all failures; else those that explain parts of them, the widest first. */
static void say_fits(const search *s, void (*fits)(const char *, void *), void *arg) {
    uint64_t failed = 0;
    for (int i = 0; i < s->failed->ntensor && i < 64; i++)
        if (s->failed->tensor[i].verdict == DP_FAIL) failed |= (uint64_t)1 << i;
    if (!failed || say(s, failed, 0, fits, arg)) return;
    for (uint64_t part = widest(s, failed); part; part = widest(s, failed &= ~part))
        say(s, part, 1, fits, arg);
}

dp_hypotheses_count dp_hypotheses(const dp_judge_options *o, const dp_case *c, const dp_run *failed,
                                  double seconds, void (*fits)(const char *text, void *arg),
                                  void *arg) {
    search s = {.o = o, .c = c, .failed = failed, .until = omp_get_wtime() + seconds};
    const int own =
        dp_user_recurrence_installed() != NULL; /* mistakes know inputs by other names */
    if (!c->op->is_recurrence) return s.count;
    if (!all_finite(&s)) {
        if (!own && only_truth_overflows(&s)) try_forms(&s);
        say_fits(&s, fits, arg);
        return s.count;
    }
    if (forward_failed(&s)) try_undecayed(&s);
    try_layout(&s);
    for (int i = 0; i < failed->ntensor; i++)
        if (failed->tensor[i].verdict == DP_FAIL) {
            try_factors(&s, failed->tensor[i].name);
            try_heads(&s, &failed->tensor[i]);
        }
    if (own) {
        try_scale(&s);
        try_rows(&s);
        try_norms(&s);
        say_fits(&s, fits, arg);
        return s.count;
    }
    try_gate_dtype(&s);
    try_late(&s);
    try_mistakes(&s);
    try_forms(&s);
    try_scale(&s);
    if (forward_failed(&s)) try_gates(&s);
    try_ranks(&s);
    s.kind = OPERANDS;
    if (!s.count.fit && follows_the_decay(&s)) return s.count; /* no rounding, whatever hides it */
    if (!s.count.fit) try_state(&s);
    if (!s.count.fit) try_operands(&s); /* which would hide smaller mistakes, too */
    s.kind = COARSER;
    if (!s.count.fit) try_base(&s);
    say_fits(&s, fits, arg);
    return s.count;
}
