/* Common mistakes of reading inputs (mistakes.h). */
#include "harness/case/case_inputs.h"
#include "harness/library/tensor_files.h"
#include "hypotheses.h"
#include "ref/arithmetic/elementary.h"
#include "ref/chunk/gate.h"
#include "ref/vocabulary/design.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

/* ---- tensors of files ------------------------------------------------------------------------ */

dp_tensor *dp_file_input(dp_tensorfile *f, const char *name) {
    const int input = dp_input_find(name);
    return (dp_tensor *)(input >= 0 ? dp_case_input_find(f, &dp_input_fields[input])
                                    : dp_tensor_find(f, name));
}

void dp_file_drop(dp_tensorfile *f, int i) {
    dp_tensor *last = &f->tensor[--f->ntensor], gone = f->tensor[i];
    f->tensor[i] = *last;
    free(gone.name);
    free(gone.data);
}

static void drop_input(dp_tensorfile *in, dp_input_id input) {
    for (int i = in->ntensor - 1; i >= 0; i--)
        if (dp_input_find(in->tensor[i].name) == (int)input) dp_file_drop(in, i);
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

/* Value heads of a tensor in another order: new head p is old head from[p]. Its axes in the file
 * hold the same numbers in the same order as those of the field, whatever axes of 1 there are. */
static void reorder(dp_tensor *t, const dp_tensor_field *f, const dp_problem *p, const int *from) {
    int64_t shape[DP_MAX_AXES], outer = 1, inner = 1;
    const dp_dims d = dp_problem_dims(p);
    const int n = dp_field_axes(f, &d, shape);
    int at = 0;
    while (at < n && f->axis[at] != DP_AXIS_HV)
        outer *= shape[at++];
    for (int i = at + 1; i < n; i++)
        inner *= shape[i];
    if (at == n || t->n != outer * p->HV * inner) return;
    double *x = dp_copy(t->data, t->n);
    for (int64_t i = 0; i < outer; i++)
        for (int h = 0; h < p->HV; h++)
            memcpy(t->data + (i * p->HV + h) * inner, x + (i * p->HV + from[h]) * inner,
                   sizeof *x * (size_t)inner);
    free(x);
}

/* So that head p / G of q and k meets the value heads that it meets where they are tiled. */
static void tile_heads(dp_tensorfile *in, dp_tensorfile *out, const dp_problem *p) {
    const int G = dp_G(p);
    int *from = dp_calloc((size_t)p->HV, sizeof *from);
    for (int h = 0; h < p->HV; h++)
        from[h] = h / G + p->H * (h % G);
    for (int i = 0; i < in->ntensor; i++) {
        const int f = dp_input_find(in->tensor[i].name);
        if (f >= 0) reorder(&in->tensor[i], &dp_input_fields[f], p, from);
    }
    for (int i = 0; i < out->ntensor; i++) {
        const int f = dp_result_find(out->tensor[i].name);
        if (f >= 0) reorder(&out->tensor[i], &dp_result_fields[f], p, from);
    }
    free(from);
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
    first_sequence(dp_file_input(in, "initial_state"), p->Nseq);
    first_sequence(dp_file_input(in, "dht"), p->Nseq);
    first_sequence(result(out, DP_RESULT_FINAL_STATE), p->Nseq);
}

static void no_state(dp_tensorfile *in, dp_tensorfile *out, const dp_problem *p) {
    (void)out, (void)p;
    drop_input(in, DP_INPUT_S0);
}

static void state_turned(dp_tensorfile *in, dp_tensorfile *out, const dp_problem *p) {
    (void)out;
    dp_tensor *s0 = dp_file_input(in, "initial_state");
    if (s0) dp_states_transpose(s0, p->K, p->V);
}

static void final_turned(dp_tensorfile *in, dp_tensorfile *out, const dp_problem *p) {
    (void)in;
    dp_tensor *s = result(out, DP_RESULT_FINAL_STATE);
    if (s) dp_states_transpose(s, p->K, p->V);
}

/* Zeros in place of the state of a sequence without tokens become its initial state. */
static void empty_kept(dp_tensorfile *in, dp_tensorfile *out, const dp_problem *p) {
    const dp_tensor *s0 = dp_file_input(in, "initial_state");
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
    dp_tensor *t = dp_file_input(in, "dt_bias");
    if (!t || t->n != (int64_t)p->HV * p->K) return;
    double *x = dp_copy(t->data, t->n);
    for (int h = 0; h < p->HV; h++)
        for (int c = 0; c < p->K; c++)
            t->data[h * p->K + c] = x[h * step];
    free(x);
}
static void bias_by_head(dp_tensorfile *in, dp_tensorfile *out, const dp_problem *p) {
    (void)out;
    bias_of_heads(in, p, 1);
}
static void bias_of_first_channel(dp_tensorfile *in, dp_tensorfile *out, const dp_problem *p) {
    (void)out;
    bias_of_heads(in, p, p->K);
}

/* ---- gates, betas, norms --------------------------------------------------------------------- */

static int has_gate(const dp_problem *p) { return p->g != NULL; }
static int has_raw_gate(const dp_problem *p) { return p->gate != DP_GATE_LOG; }
static int has_beta(const dp_problem *p) { return p->beta != NULL; }
static int has_norm(const dp_problem *p) { return p->l2norm; }

static void activate_gates(dp_tensorfile *in, const dp_problem *p, double factor, dp_format f) {
    dp_tensor *g = dp_file_input(in, "g");
    dp_activated a = dp_activated_new(p);
    for (int64_t i = 0; g && i < g->n; i++)
        g->data[i] = dp_store(f, factor * a.g[i]);
    dp_activated_free(&a);
    drop_input(in, DP_INPUT_A_LOG);
    drop_input(in, DP_INPUT_DT_BIAS);
}
static void gates_of_two(dp_tensorfile *in, dp_tensorfile *out, const dp_problem *p) {
    (void)out;
    activate_gates(in, p, M_LN2, DP_FP64);
}
static void gates_per_ln2(dp_tensorfile *in, dp_tensorfile *out, const dp_problem *p) {
    (void)out;
    activate_gates(in, p, 1 / M_LN2, DP_FP64);
}
static void gates_bf16(dp_tensorfile *in, dp_tensorfile *out, const dp_problem *p) {
    (void)out;
    activate_gates(in, p, 1, DP_BF16);
}

static void betas_bf16(dp_tensorfile *in, dp_tensorfile *out, const dp_problem *p) {
    (void)out;
    dp_tensor *b = dp_file_input(in, "beta");
    dp_activated a = dp_activated_new(p);
    for (int64_t i = 0; b && i < b->n; i++)
        b->data[i] = dp_store(DP_BF16, a.beta[i]);
    dp_activated_free(&a);
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
        double *x = t->data + r * K, sum = 0;
        for (int j = 0; j < K; j++)
            sum += x[j] * x[j];
        const double by = divisor(sum, K);
        for (int j = 0; j < K && by > 0; j++)
            x[j] /= by;
    }
}

/* ---- the table ------------------------------------------------------------------------------- */

#define FORWARD .forward = 1
#define ACTIVATED .activated = 1
#define ROW(TEXT, ...) \
    { .text = TEXT, __VA_ARGS__ }
const dp_mistake dp_mistakes[] = {
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
        .explains = "ddt_bias", .applies = has_biases, .change = bias_by_head),
    ROW("as if dt_bias were one number a head: that of its first channel", .explains = "ddt_bias",
        .applies = has_biases, .change = bias_of_first_channel),
    ROW("as if gates were powers of 2, exp2(g) for exp(g)", FORWARD, ACTIVATED, .applies = has_gate,
        .change = gates_of_two),
    ROW("as if gates were divided by ln 2 and then raised from e", FORWARD, ACTIVATED,
        .applies = has_gate, .change = gates_per_ln2),
    ROW("as if the activated gate were kept in bf16", FORWARD, ACTIVATED, .applies = has_raw_gate,
        .change = gates_bf16),
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
const int dp_nmistakes = sizeof dp_mistakes / sizeof *dp_mistakes;

void dp_mistake_change(const dp_mistake *m, dp_tensorfile *in, dp_tensorfile *out,
                       const dp_problem *p) {
    dp_tensor *t = m->map ? dp_file_input(in, m->input) : NULL;
    for (int64_t i = 0; t && i < t->n; i++)
        t->data[i] = m->map(t->data[i]);
    for (int i = 0; i < 2 && m->divisor; i++)
        normalise(dp_file_input(in, i ? "k" : "q"), p->K, m->divisor);
    if (m->change) m->change(in, out, p);
}
