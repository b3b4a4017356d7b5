/* Inputs and outputs of one call in files (tensor_files.h). */
#include "tensor_files.h"
#include "harness/case/case_inputs.h"
#include "ref/vocabulary/design.h"
#include "ref/vocabulary/recurrence_text.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* ---- inputs ---------------------------------------------------------------------------------- */

int dp_file_shape(const dp_problem *p, const dp_tensor_field *f, int64_t shape[DP_MAX_AXES]) {
    int64_t all[DP_MAX_AXES];
    const dp_dims d = dp_problem_dims(p);
    const int axes = dp_field_axes(f, &d, all);
    int n = 0;
    for (int i = 0; i < axes; i++) {
        const int one_key = f->axis[i] == DP_AXIS_R && p->R == 1;
        const int one_gate = f->axis[i] == DP_AXIS_KG && f->kind == DP_OF_TOKENS && all[i] == 1;
        if (!one_key && (!one_gate || p->K == 1)) shape[n++] = all[i];
    }
    return n;
}

static int holds(dp_format format, const double *x, int64_t n) {
    for (int64_t i = 0; i < n && format != DP_FP64; i++)
        if (dp_store(format, x[i]) != x[i] && !isnan(x[i])) return 0;
    return 1;
}

/* The format, or the next wider one of a file that holds every number as it is. */
static dp_format holding(dp_format format, const double *x, int64_t n) {
    if (holds(format, x, n)) return format;
    return format == DP_BF16 && holds(DP_FP32, x, n) ? DP_FP32 : DP_FP64;
}

static void add_rows(dp_tensorfile *f, const char *name, int64_t rows, int64_t n,
                     const int64_t *x) {
    const int64_t shape[] = {rows, n};
    DP_OWN double *as = dp_doubles(rows * n);
    for (int64_t i = 0; i < rows * n; i++)
        as[i] = (double)x[i];
    dp_tensorfile_add(f, name, "I64", n > 1 ? 2 : 1, shape, as);
}

void dp_pool_add(dp_tensorfile *f, const dp_problem *p, const dp_state_pool *pool) {
    const int64_t shape[] = {pool->slots, p->HV, p->K, p->V};
    const int64_t n = shape[0] * shape[1] * shape[2] * shape[3];
    dp_pool_list list[DP_POOL_LISTS];
    const int lists = dp_pool_lists(pool, p, list);
    dp_tensorfile_add_format(f, "pool", holding(DP_FP32, pool->state, n), 4, shape, pool->state);
    for (int i = 0; i < lists; i++)
        add_rows(f, list[i].name, list[i].shape[0], list[i].shape[1] ? list[i].shape[1] : 1,
                 list[i].x);
}

/* x in `format` or a wider one. */
static void add_of(dp_tensorfile *f, const char *what, int i, dp_format format, int ndim,
                   const int64_t *shape, const double *x) {
    char name[24];
    int64_t n = 1;
    for (int a = 0; a < ndim; a++)
        n *= shape[a];
    snprintf(name, sizeof name, "%s_%s", what, dp_qkv_name(i));
    if (n && x) dp_tensorfile_add_format(f, name, holding(format, x, n), ndim, shape, x);
}

double *dp_conv_pool(const dp_state_pool *pool, int Nseq, int64_t n, const double *states) {
    double *all = dp_doubles(pool->slots * n);
    for (int64_t i = 0; i < pool->slots * n; i++)
        all[i] = NAN;
    for (int i = 0; i < Nseq; i++)
        if (pool->read[i] >= 0)
            memcpy(all + pool->read[i] * n, states + i * n, sizeof *all * (size_t)n);
    return all;
}

void dp_front_add(dp_tensorfile *f, const dp_problem *p, const dp_conv_front *front,
                  const dp_state_pool *pool, dp_format input_dtype) {
    int silu = 0;
    for (int i = 0; i < DP_NQKV; i++) {
        const dp_conv *v = front->conv[i];
        if (!v) continue;
        const int64_t x[] = {p->T, v->D}, w[] = {v->D, v->W},
                      state[] = {pool ? pool->slots : p->Nseq, v->W - 1, v->D};
        add_of(f, "x", i, input_dtype, 2, x, dp_input_of(p, dp_qkv_input(i)));
        add_of(f, "w", i, DP_FP32, 2, w, v->w);
        add_of(f, "bias", i, DP_FP32, 1, w, v->bias);
        DP_OWN double *slots = pool && v->W > 1 ? dp_conv_pool(pool, p->Nseq, dp_conv_state_size(v),
                                                               front->before->of[i])
                                                : NULL;
        add_of(f, pool ? "conv_pool" : "conv_state", i, input_dtype, 3, state,
               pool ? slots : front->before->of[i]);
        silu = v->silu;
    }
    dp_tensorfile_add_meta(f, "activation", silu ? "silu" : "none");
}

static void add_number(dp_tensorfile *f, const char *key, double x) {
    char text[64];
    snprintf(text, sizeof text, "%.17g", x);
    dp_tensorfile_add_meta(f, key, text);
}

void dp_inputs_add(dp_tensorfile *f, const dp_problem *p, dp_format input_dtype, int backward) {
    for (int i = 0; i < DP_NINPUTS; i++) {
        int64_t shape[DP_MAX_AXES];
        const dp_tensor_field *x = &dp_input_fields[i];
        const double *data = dp_input_of(p, i);
        const int ndim = dp_file_shape(p, x, shape);
        if (!data || (x->backward && !backward)) continue;
        dp_tensorfile_add_format(
            f, dp_field_file_name(x),
            holding(dp_case_input_format(x, input_dtype), data, dp_input_count(p, i)), ndim, shape,
            data);
    }
    for (int i = 0; i < DP_NINPUTS; i++) {
        int64_t shape[DP_MAX_AXES];
        char name[64];
        const double *data = dp_halo_of(p, i);
        if (!data) continue;
        const int ndim = dp_file_shape(p->before, &dp_input_fields[i], shape);
        snprintf(name, sizeof name, "previous_%s", dp_field_file_name(&dp_input_fields[i]));
        dp_tensorfile_add_format(f, name, holding(input_dtype, data, dp_input_count(p->before, i)),
                                 ndim, shape, data);
    }
    dp_tensorfile_add_meta(f, "recurrence", dp_model_of(p)->name);
    dp_tensorfile_add_meta(f, "gate", dp_gates[p->gate].word);
    dp_tensorfile_add_meta(f, "beta", dp_erases(p) ? dp_betas[p->beta_form].word : "none");
    dp_tensorfile_add_meta(f, "l2norm", p->l2norm ? "1" : "0");
    add_number(f, "scale", p->scale);
    if (dp_gate_inside(p)) add_number(f, "lower_bound", p->lower_bound);
    if (p->Nseq > 1) add_rows(f, "cu_seqlens", p->Nseq + 1, 1, p->cu);
}

/* ---- names and layouts of other programs ----------------------------------------------------- */

/* The row whose inner name this is; NULL: none. db is dbeta, but that of b where there is one. */
static const dp_tensor_field *by_inner_name(const char *name, int by_gates) {
    if (by_gates && dp_result_find(name) >= 0) return NULL;
    for (int i = 0; i < DP_NINPUTS + DP_NRESULTS; i++) {
        const dp_tensor_field *f =
            i < DP_NINPUTS ? &dp_input_fields[i] : &dp_result_fields[i - DP_NINPUTS];
        if (f->inner && !strcmp(name, f->inner)) return f;
    }
    return NULL;
}

void dp_tensors_rename(dp_tensorfile *f, int by_gates) {
    for (int i = 0; i < f->ntensor; i++) {
        const dp_tensor_field *row = by_inner_name(f->tensor[i].name, by_gates);
        if (!row) continue;
        free(f->tensor[i].name);
        f->tensor[i].name = dp_strdup(dp_field_file_name(row));
    }
}

static void rename_one(dp_tensorfile *f, const char *from, const char *to) {
    dp_tensor *t = (dp_tensor *)dp_tensor_find(f, from);
    if (!t) return;
    free(t->name);
    t->name = dp_strdup(to);
}

void dp_factors_rename(dp_tensorfile *in, dp_tensorfile *out) {
    if (!dp_tensor_find(in, "a") || !dp_tensor_find(in, "b")) return;
    rename_one(in, "a", dp_input_fields[DP_INPUT_LR_A].name);
    rename_one(in, "b", dp_input_fields[DP_INPUT_LR_B].name);
    rename_one(out, "da", dp_result_fields[DP_RESULT_DLR_A].name);
    rename_one(out, "db", dp_result_fields[DP_RESULT_DLR_B].name);
}

void dp_states_transpose(dp_tensor *t, int64_t K, int64_t V) {
    int64_t *a = t->ndim >= 2 ? &t->shape[t->ndim - 2] : NULL;
    if (K < 1 || V < 1 || t->n % (K * V)) return;
    DP_OWN double *x = dp_doubles(t->n);
    for (int64_t m = 0; m < t->n / (K * V); m++)
        for (int64_t v = 0; v < V; v++)
            for (int64_t k = 0; k < K; k++)
                x[m * K * V + k * V + v] = t->data[m * K * V + v * K + k];
    memcpy(t->data, x, sizeof *x * (size_t)t->n);
    if (a && a[0] == V && a[1] == K) {
        a[0] = K;
        a[1] = V;
    }
}

/* The row of an input or a result by this name; NULL: neither. */
static const dp_tensor_field *field_of(const char *name) {
    const int input = dp_input_find(name), result = dp_result_find(name);
    return input >= 0 ? &dp_input_fields[input] : result >= 0 ? &dp_result_fields[result] : NULL;
}

/* Axis `at` counts R keys a token; R becomes the axis behind the next one. */
static void move_keys(dp_tensor *t, int at, int64_t R) {
    const int64_t heads = t->shape[at + 1], width = at + 2 < t->ndim ? t->shape[at + 2] : 1;
    DP_OWN double *x = dp_doubles(t->n);
    for (int64_t i = 0; i < t->n; i++) {
        const int64_t h = i / width % heads, key = i / width / heads;
        x[((key / R * heads + h) * R + key % R) * width + i % width] = t->data[i];
    }
    memcpy(t->data, x, sizeof *x * (size_t)t->n);
    t->shape[at] /= R;
    if (at + 2 < t->ndim) t->shape[at + 3] = width;
    t->shape[at + 2] = R;
    t->ndim++;
}

void dp_keys_of_tokens(dp_tensorfile *f, const dp_tensor *q, int64_t R) {
    const int most = sizeof q->shape / sizeof *q->shape;
    for (int i = 0; i < f->ntensor && q && q->ndim >= 3 && R > 1; i++) {
        dp_tensor *t = &f->tensor[i];
        const dp_tensor_field *row = field_of(t->name);
        const int at = q->ndim - 3, wide = row && row->axis[3] != DP_AXIS_NONE;
        if (row && row->axis[2] == DP_AXIS_R && t->ndim == q->ndim - !wide && t->ndim < most &&
            t->shape[at] == R * q->shape[at])
            move_keys(t, at, R);
    }
}

/* ---- outputs --------------------------------------------------------------------------------- */

static int is_of_truth(const dp_tensorfile *out, const char *name) {
    const char *dot = strchr(name, '.');
    return dot && (!strcmp(dot, DP_TRUTH_LOW) || !strcmp(dot, DP_TRUTH_RADIUS)) &&
           dp_tensorfile_meta(out, "truth");
}

static void unknown_name(const dp_tensorfile *out, const dp_tensor *t, dp_complaints *complaints) {
    char all[512] = "";
    for (int i = 0; i < DP_NRESULTS; i++)
        dp_case_input_names(all, sizeof all, &dp_result_fields[i]);
    dp_text_add(all, sizeof all, ", and stages");
    for (int i = 0; i < DP_NSTAGE_TENSORS; i++)
        dp_text_add(all, sizeof all, " %s", dp_stage_tensors[i].name);
    dp_complain(complaints, "%s: tensor %s is not known; known:%s", out->path, t->name, all);
}

int dp_outputs_check_names(const dp_tensorfile *in, const dp_tensorfile *out, dp_complaints *all) {
    int seen[DP_NRESULTS + DP_NSTAGE_TENSORS] = {0}, backward = 0;
    for (int i = 0; i < out->ntensor; i++) {
        const dp_tensor *t = &out->tensor[i];
        const int f = dp_result_find(t->name), stage = f < 0 ? dp_stage_tensor_find(t->name) : -1,
                  back = f >= 0 ? dp_result_fields[f].said == DP_ROLE_GRADIENT
                                : stage >= 0 && dp_stage_tensors[stage].backward;
        if (is_of_truth(out, t->name)) continue;
        if (f < 0 && stage < 0) {
            unknown_name(out, t, all);
            continue;
        }
        if (seen[f >= 0 ? f : DP_NRESULTS + stage]++)
            dp_complain(all, "%s: tensor %s is there twice, under another name too", out->path,
                        f >= 0 ? dp_result_fields[f].name : dp_stage_tensors[stage].name);
        if (t->dtype[0] == 'I')
            dp_complain(all, "%s: tensor %s: dtype %s, must be a floating type", out->path, t->name,
                        t->dtype);
        if (back && !dp_tensor_find(in, "do"))
            dp_complain(all, "%s: tensor %s is a gradient, but %s has no tensor do", out->path,
                        t->name, in->path);
        backward |= back;
    }
    if (!out->ntensor) dp_complain(all, "%s: has no tensors", out->path);
    return backward || dp_user_reads_along();
}

static dp_status wrong_shape(const dp_tensorfile *out, const dp_tensorfile *in, const dp_tensor *t,
                             int ndim, const int64_t *want, const char *hint, dp_err *e) {
    char have[200], need[200];
    dp_tensor w = {.ndim = ndim};
    memcpy(w.shape, want, sizeof *want * (size_t)ndim);
    dp_case_shape_text(t, have, sizeof have);
    dp_case_shape_text(&w, need, sizeof need);
    return dp_fail(e, DP_EINPUT, "%s: tensor %s: shape %s, but %s calls for %s%s", out->path,
                   t->name, have, in->path, need, hint);
}

static void storage(const char *dtype, double *u, double *tiny) {
    const struct {
        const char *name;
        double u, tiny;
    } d[] = {{"BF16", 0x1p-8, 0x1p-134}, {"F16", 0x1p-11, 0x1p-25}, {"F32", 0x1p-24, 0x1p-150}};
    *u = *tiny = 0;
    for (size_t i = 0; i < sizeof d / sizeof *d; i++)
        if (!strcmp(dtype, d[i].name)) {
            *u = d[i].u;
            *tiny = d[i].tiny;
        }
}

/* A stage; M, H and their adjoints are [K,..] in either layout of states. */
static dp_status load_stage(const dp_tensorfile *in, const dp_tensorfile *out, dp_tensor *t,
                            const dp_problem *p, int N, int vk, dp_stored_results *g, dp_err *e) {
    const int stage = dp_stage_tensor_find(t->name), state = dp_stage_tensors[stage].state;
    int64_t want[DP_MAX_AXES], chunks = dp_stage_tensor_chunks(p, N, -1);
    char hint[200] = "";
    const int ndim = dp_stage_tensor_shape(p, N, stage, want);
    if (state && vk) {
        const int64_t k = want[2];
        want[2] = want[3];
        want[3] = k;
    }
    if (dp_stage_tensors[stage].kind == DP_PER_CHUNK)
        snprintf(hint, sizeof hint,
                 " (%lld chunks: they restart at every sequence and at each of %d ranks)",
                 (long long)chunks, N);
    if (dp_stage_tensors[stage].kind == DP_PER_RANK)
        snprintf(hint, sizeof hint, " (first axis: %d ranks)", N);
    if (!dp_case_same_shape(t, ndim, want, 0)) return wrong_shape(out, in, t, ndim, want, hint, e);
    if (state && vk) dp_states_transpose(t, p->K, p->V);
    g->stage[stage] = t->data;
    storage(t->dtype, &g->stage_u[stage], &g->stage_tiny[stage]);
    return DP_OK;
}

dp_status dp_outputs_load(const dp_tensorfile *in, dp_tensorfile *out, const dp_problem *p, int N,
                          int vk, dp_stored_results *g, dp_err *e) {
    for (int i = 0; i < out->ntensor; i++) {
        dp_tensor *t = &out->tensor[i];
        const int f = dp_result_find(t->name);
        if (is_of_truth(out, t->name)) continue;
        if (f < 0) {
            const dp_status st = load_stage(in, out, t, p, N, vk, g, e);
            if (st) return st;
            continue;
        }
        int64_t want[DP_MAX_AXES];
        const int state = dp_result_fields[f].kind == DP_OF_SEQUENCES;
        const int ndim = dp_result_axes(p, f, want);
        if (!dp_result_exists(p, f))
            return dp_fail(
                e, DP_EINPUT, "%s: tensor %s: %s has no tensor %s that it could be the gradient of",
                out->path, t->name, in->path, dp_input_fields[dp_result_fields[f].of].name);
        const int64_t turned[4] = {want[0], want[1], want[3], want[2]};
        if (!dp_case_same_shape(t, ndim, state && vk ? turned : want, f == DP_RESULT_DDT_BIAS)) {
            const int other = state && dp_case_same_shape(t, ndim, vk ? want : turned, 0);
            return wrong_shape(
                out, in, t, ndim, state && vk ? turned : want,
                !other ? ""
                : vk   ? " (give --state-layout kv, or that metadata, if K comes first)"
                       : " (give --state-layout vk, or that metadata, if V comes first)",
                e);
        }
        if (state && vk) dp_states_transpose(t, p->K, p->V);
        g->r.out[f] = t->data;
        storage(t->dtype, &g->u[f], &g->tiny[f]);
    }
    return DP_OK;
}
