/* The table of named tensors, and what follows from its rows (tensors.h). */
#include "problem.h"
#include "recurrence.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* ---- axes ------------------------------------------------------------------------------------ */

static const char *const AXES[DP_NAXES] = {[DP_AXIS_T] = "T",           [DP_AXIS_NSEQ] = "Nseq",
                                           [DP_AXIS_H] = "H",           [DP_AXIS_HV] = "HV",
                                           [DP_AXIS_R] = "R",           [DP_AXIS_K] = "K",
                                           [DP_AXIS_V] = "V",           [DP_AXIS_KG] = "Kg",
                                           [DP_AXIS_RANKS] = "ranks",   [DP_AXIS_KEYS] = "64R",
                                           [DP_AXIS_CHUNKS] = "chunks", [DP_AXIS_D] = "D",
                                           [DP_AXIS_W] = "W",           [DP_AXIS_P] = "P"};

dp_dims dp_problem_dims(const dp_problem *p) {
    return (dp_dims){{[DP_AXIS_T] = p->T,
                      [DP_AXIS_NSEQ] = p->Nseq,
                      [DP_AXIS_H] = p->H,
                      [DP_AXIS_HV] = p->HV,
                      [DP_AXIS_R] = p->R,
                      [DP_AXIS_K] = p->K,
                      [DP_AXIS_V] = p->V,
                      [DP_AXIS_KG] = dp_Kg(p),
                      [DP_AXIS_P] = dp_pairs(p),
                      [DP_AXIS_KEYS] = (int64_t)DP_CHUNK * p->R}};
}

void dp_axes_text(const dp_axis axis[DP_MAX_AXES], char *out, size_t size) {
    *out = 0;
    for (int i = 0; i < DP_MAX_AXES && axis[i]; i++)
        dp_text_add(out, size, "%s%s", i ? "," : "", AXES[axis[i]]);
}

/* ---- the table ------------------------------------------------------------------------------- */

#define AXES_OF(...) .axis = {__VA_ARGS__}
#define TOKENS(...) .kind = DP_OF_TOKENS, AXES_OF(DP_AXIS_T, __VA_ARGS__)
#define STATES .kind = DP_OF_SEQUENCES, AXES_OF(DP_AXIS_NSEQ, DP_AXIS_HV, DP_AXIS_K, DP_AXIS_V)
#define HEADS(...) .kind = DP_OF_HEADS, AXES_OF(DP_AXIS_HV, __VA_ARGS__)

#define QUERY TOKENS(DP_AXIS_H, DP_AXIS_K)
#define KEY TOKENS(DP_AXIS_H, DP_AXIS_R, DP_AXIS_K)
#define VALUE TOKENS(DP_AXIS_HV, DP_AXIS_R, DP_AXIS_V)
#define GATE TOKENS(DP_AXIS_HV, DP_AXIS_KG)
#define BETA TOKENS(DP_AXIS_HV, DP_AXIS_R)
#define ROW_KEY TOKENS(DP_AXIS_HV, DP_AXIS_K)
#define ROW_VALUE TOKENS(DP_AXIS_HV, DP_AXIS_V)
#define ROW_ANGLE TOKENS(DP_AXIS_HV, DP_AXIS_P)
#define OUTPUT TOKENS(DP_AXIS_HV, DP_AXIS_V)

#define INPUT(NAME, ROLE) .name = NAME, .role = ROLE, .said = ROLE
#define REQUIRED(FIELD) INPUT(#FIELD, DP_ROLE_REQUIRED)
#define PARAMETER(FIELD) INPUT(#FIELD, DP_ROLE_GATE), .parameter = 1
#define IN_ROWS(ID, FIELD, ALIAS, ...) \
    [DP_INPUT_##ID] = {REQUIRED(FIELD), .alias = sizeof ALIAS > 1 ? ALIAS : NULL, __VA_ARGS__},
#define KEY_IN(...) IN_ROWS(__VA_ARGS__, ROW_KEY)
#define VALUE_IN(...) IN_ROWS(__VA_ARGS__, ROW_VALUE)
#define NUMBER_IN(...) IN_ROWS(__VA_ARGS__, BETA)
#define ANGLE_IN(...) IN_ROWS(__VA_ARGS__, ROW_ANGLE)
#define INCOMING(NAME) INPUT(NAME, DP_ROLE_INCOMING), .backward = 1

dp_tensor_field dp_input_fields[DP_NINPUTS] = {
    [DP_INPUT_Q] = {REQUIRED(q), QUERY},
    [DP_INPUT_K] = {REQUIRED(k), KEY},
    [DP_INPUT_V] = {REQUIRED(v), VALUE},
    [DP_INPUT_G] = {REQUIRED(g), GATE},
    [DP_INPUT_BETA] = {REQUIRED(beta), BETA},
    [DP_INPUT_A_LOG] = {PARAMETER(A_log), HEADS(DP_AXIS_NONE)},
    [DP_INPUT_DT_BIAS] = {PARAMETER(dt_bias), HEADS(DP_AXIS_KG)},
    [DP_INPUT_S0] = {INPUT("s0", DP_ROLE_STATE), STATES, .parameter = 1, .alias = "initial_state",
                     .inner = "h0"},
    [DP_INPUT_DO] = {INCOMING("do"), OUTPUT},
    [DP_INPUT_DSTATE] = {INCOMING("dstate"), STATES, .parameter = 1, .alias = "dht"},
    DP_ROW_INPUTS(KEY_IN, VALUE_IN, NUMBER_IN, ANGLE_IN)};

#define RESULT(FIELD, ROLE) .name = #FIELD, .role = ROLE, .said = ROLE
#define MADE(FIELD) RESULT(FIELD, DP_ROLE_OUTPUT)
#define GRADIENT(FIELD, OF) RESULT(FIELD, DP_ROLE_GRADIENT), .backward = 1, .of = DP_INPUT_##OF
#define SHORT .stored_short = 1
#define OUT_OF_ROWS(ID, FIELD, ALIAS, ...)              \
    [DP_RESULT_D##ID] = {GRADIENT(d##FIELD, ID), SHORT, \
                         .alias = sizeof ALIAS > 1 ? "d" ALIAS : NULL, __VA_ARGS__},
#define KEY_OUT(...) OUT_OF_ROWS(__VA_ARGS__, ROW_KEY)
#define VALUE_OUT(...) OUT_OF_ROWS(__VA_ARGS__, ROW_VALUE)
#define NUMBER_OUT(...) OUT_OF_ROWS(__VA_ARGS__, BETA)
#define ANGLE_OUT(...) OUT_OF_ROWS(__VA_ARGS__, ROW_ANGLE)

dp_tensor_field dp_result_fields[DP_NRESULTS] = {
    [DP_RESULT_O] = {MADE(o), OUTPUT, SHORT},
    [DP_RESULT_FINAL_STATE] = {MADE(final_state), STATES, .alias = "ht"},
    [DP_RESULT_DQ] = {GRADIENT(dq, Q), QUERY, SHORT},
    [DP_RESULT_DK] = {GRADIENT(dk, K), KEY, SHORT},
    [DP_RESULT_DV] = {GRADIENT(dv, V), VALUE, SHORT},
    [DP_RESULT_DG] = {GRADIENT(dg, G), GATE, SHORT},
    [DP_RESULT_DBETA] = {GRADIENT(dbeta, BETA), BETA, SHORT, .inner = "db"},
    [DP_RESULT_DA_LOG] = {GRADIENT(dA_log, A_LOG), HEADS(DP_AXIS_NONE), .inner = "dA"},
    [DP_RESULT_DDT_BIAS] = {GRADIENT(ddt_bias, DT_BIAS), HEADS(DP_AXIS_KG), .inner = "dbias"},
    [DP_RESULT_DS0] = {GRADIENT(ds0, S0), STATES, .alias = "dh0"},
    DP_ROW_INPUTS(KEY_OUT, VALUE_OUT, NUMBER_OUT, ANGLE_OUT)};

int dp_field_is(const dp_tensor_field *f, const char *name) {
    return !strcmp(name, f->name) || (f->alias && !strcmp(name, f->alias));
}

static int find(const dp_tensor_field *f, int n, const char *name) {
    for (int i = 0; i < n; i++)
        if (dp_field_is(&f[i], name)) return i;
    return -1;
}

int dp_field_axes(const dp_tensor_field *f, const dp_dims *d, int64_t shape[DP_MAX_AXES]) {
    int n = 0;
    for (int i = 0; i < DP_MAX_AXES; i++) {
        shape[i] = d->of[f->axis[i]];
        n += f->axis[i] != DP_AXIS_NONE;
    }
    return n;
}

static int heads_of(const dp_tensor_field *f, const dp_problem *p) {
    for (int i = 0; i < DP_MAX_AXES; i++)
        if (f->axis[i] == DP_AXIS_H) return p->H;
    return p->HV;
}

/* ---- inputs ---------------------------------------------------------------------------------- */

int dp_input_find(const char *name) { return find(dp_input_fields, DP_NINPUTS, name); }

int dp_input_belongs(const dp_problem *p, int input) {
    if (dp_input_fields[input].role != DP_ROLE_REQUIRED) return 1;
    return input == DP_INPUT_Q || input == DP_INPUT_G ||
           dp_recurrence_uses(dp_recurrence_of(p), input);
}

int dp_model_has(dp_model m, int input) {
    return dp_input_belongs(&(dp_problem){.model = m}, input);
}

/* Product of the axes from the one at `from` on. */
static int64_t entries(const dp_problem *p, int input, int from) {
    int64_t shape[DP_MAX_AXES], n = 1;
    const dp_dims d = dp_problem_dims(p);
    const int axes = dp_field_axes(&dp_input_fields[input], &d, shape);
    for (int i = from; i < axes; i++)
        n *= shape[i];
    return n;
}

int64_t dp_input_count(const dp_problem *p, int input) { return entries(p, input, 0); }

int64_t dp_input_width(const dp_problem *p, int input) {
    return entries(p, input, dp_input_fields[input].kind != DP_OF_HEADS);
}

int dp_input_heads(const dp_problem *p, int input) { return heads_of(&dp_input_fields[input], p); }

void dp_inputs_copy(dp_problem *to, const dp_problem *p,
                    double *(*copy)(const double *x, int64_t n)) {
    for (int i = 0; i < DP_NINPUTS; i++)
        to->in[i] = copy(dp_input_of(p, i), dp_input_count(p, i));
}

int64_t *dp_cu_copy(const dp_problem *p) {
    int64_t *cu = dp_alloc((size_t)p->Nseq + 1, sizeof *cu);
    return memcpy(cu, p->cu, sizeof *cu * ((size_t)p->Nseq + 1));
}

/* ---- results --------------------------------------------------------------------------------- */

int dp_result_find(const char *name) { return find(dp_result_fields, DP_NRESULTS, name); }

/* Without parameters of the gate there is no gradient of them. */
int dp_result_exists(const dp_problem *p, int field) {
    const dp_tensor_field *f = &dp_result_fields[field];
    if (f->role != DP_ROLE_GRADIENT) return 1;
    if (dp_input_fields[f->of].role == DP_ROLE_GATE) return dp_input_of(p, f->of) != NULL;
    return dp_input_belongs(p, f->of);
}

int dp_result_axes(const dp_problem *p, int field, int64_t shape[DP_MAX_AXES]) {
    const dp_dims d = dp_problem_dims(p);
    return dp_field_axes(&dp_result_fields[field], &d, shape);
}

void dp_result_shape(const dp_problem *p, int field, int64_t *rows, int64_t *width) {
    const dp_row_kind kind = dp_result_fields[field].kind;
    int64_t shape[DP_MAX_AXES];
    const int n = dp_result_axes(p, field, shape);
    const int row_axes = kind == DP_OF_HEADS ? 1 : kind == DP_OF_SEQUENCES ? 2 : n - 1;
    *rows = dp_result_exists(p, field);
    *width = 1;
    for (int i = 0; i < n; i++)
        *(i < row_axes ? rows : width) *= shape[i];
}

int64_t dp_result_count(const dp_problem *p, int field) {
    int64_t rows, width;
    dp_result_shape(p, field, &rows, &width);
    return rows * width;
}

int dp_gradient_of(int input) {
    for (int i = 0; i < DP_NRESULTS; i++)
        if (dp_result_fields[i].role == DP_ROLE_GRADIENT && (int)dp_result_fields[i].of == input)
            return i;
    return -1;
}

int dp_result_heads(const dp_problem *p, int field) {
    return heads_of(&dp_result_fields[field], p);
}

int dp_result_rows_per_token(const dp_problem *p, int field) {
    int64_t shape[DP_MAX_AXES], each = 1;
    if (dp_result_fields[field].kind != DP_OF_TOKENS || !dp_result_exists(p, field)) return 1;
    const int n = dp_result_axes(p, field, shape);
    for (int i = 1; i < n - 1; i++) /* neither T, which may be 0, nor what a row holds */
        each *= shape[i];
    return (int)(each / dp_result_heads(p, field));
}

int dp_qkv_heads(const dp_problem *p, int i) { return dp_input_heads(p, dp_qkv_input(i)); }

int dp_qkv_width(const dp_problem *p, int i) { return i == DP_QKV_V ? p->V : p->K; }

void dp_result_alloc(dp_result *r, const dp_problem *p, int backward) {
    *r = (dp_result){.memory = p->memory};
    for (int i = 0; i < DP_NRESULTS; i++) {
        const int64_t n = dp_result_count(p, i);
        if (!dp_result_exists(p, i) || (dp_result_fields[i].backward && !backward)) continue;
        double *x = r->out[i] = p->memory ? p->memory->make(n, NAN) : dp_doubles(n);
#pragma omp parallel for if (n > 1 << 22)
        for (int64_t j = 0; j < (p->memory ? 0 : n); j++)
            x[j] = NAN;
    }
}

void dp_result_free(dp_result *r) {
    for (int i = 0; i < DP_NRESULTS; i++) {
        if (r->memory)
            r->memory->free(r->out[i]);
        else
            free(r->out[i]);
        r->out[i] = NULL;
    }
}
