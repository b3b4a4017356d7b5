#define _DEFAULT_SOURCE
#include "problem.h"
#include "text.h"

#include <assert.h>
#include <math.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

dp_status dp_fail(dp_err *e, dp_status code, const char *fmt, ...) {
    if (!e || e->code != DP_OK) return code;
    char text[sizeof e->msg];
    e->code = code;
    va_list ap;
    va_start(ap, fmt);
    vsnprintf(text, sizeof text, fmt, ap);
    va_end(ap);
    dp_text_printable(
        text, e->msg,
        sizeof e->msg); /* values come from files: they must not speak to the terminal */
    return code;
}

static void *or_die(void *x, size_t n, size_t size) {
    if (x) return x;
    fprintf(stderr, "deltaproof: out of memory: %zu x %zu bytes\n", n, size);
    exit(2);
}

void *dp_alloc(size_t n, size_t size) {
    return or_die(n > SIZE_MAX / (size ? size : 1) ? NULL : malloc(n && size ? n * size : 1), n,
                  size);
}

void *dp_calloc(size_t n, size_t size) {
    const size_t large = 1 << 26, page = 1 << 21;
    void *x = or_die(calloc(n ? n : 1, size ? size : 1), n, size);
    if (n * size >= large) { /* gigabytes in pages of 4 KiB take longer to get than to fill; where
                                refused, nothing is lost */
        const uintptr_t from = ((uintptr_t)x + page - 1) / page * page,
                        to = ((uintptr_t)x + n * size) / page * page;
        madvise((void *)from, to - from, MADV_HUGEPAGE);
    }
    return x;
}

int64_t dp_memory_bytes(void) { return (int64_t)sysconf(_SC_PHYS_PAGES) * sysconf(_SC_PAGESIZE); }

double *dp_doubles(int64_t n) {
    assert(n >= 0);
    return dp_calloc((size_t)n, sizeof(double));
}

double *dp_copy(const double *x, int64_t n) {
    if (!x) return NULL;
    double *y = dp_doubles(n);
    const int64_t part = 1 << 20; /* gigabytes are copied by all cores */
#pragma omp parallel for if (n > 8 * part)
    for (int64_t i = 0; i < n; i += part)
        memcpy(y + i, x + i, (size_t)(n - i < part ? n - i : part) * sizeof *y);
    return y;
}

void dp_problem_alloc(dp_problem *p) {
    p->q = dp_doubles(p->T * p->H * p->K);
    p->k = dp_doubles(p->T * p->H * p->R * p->K);
    p->v = dp_doubles(p->T * p->HV * p->R * p->V);
    p->g = dp_doubles(p->T * p->HV * dp_Kg(p));
    p->beta = dp_doubles(p->T * p->HV * p->R);
    if (!p->cu) {
        p->Nseq = 1;
        p->cu = dp_calloc(2, sizeof *p->cu);
        p->cu[1] = p->T;
    }
}

void dp_problem_free(dp_problem *p) {
    double **a[] = {&p->q,     &p->k,       &p->v,  &p->g,    &p->beta,
                    &p->A_log, &p->dt_bias, &p->s0, &p->dout, &p->dstate};
    for (size_t i = 0; i < sizeof a / sizeof *a; i++) {
        free(*a[i]);
        *a[i] = NULL;
    }
    free(p->cu);
    p->cu = NULL;
}

static dp_status check_finite(const char *name, const double *x, int64_t n, dp_err *e) {
    if (!x) return DP_OK;
    for (int64_t i = 0; i < n; i++)
        if (!isfinite(x[i]))
            return dp_fail(e, DP_EINPUT, "%s[%lld]: value %g is not finite", name, (long long)i,
                           x[i]);
    return DP_OK;
}

dp_status dp_problem_check(const dp_problem *p, int allow_nonfinite, dp_err *e) {
    const struct {
        const char *name;
        int64_t v;
    } dims[] = {{"T", p->T}, {"H", p->H}, {"HV", p->HV},    {"K", p->K},
                {"V", p->V}, {"R", p->R}, {"Nseq", p->Nseq}};
    for (size_t i = 0; i < sizeof dims / sizeof *dims; i++)
        if (dims[i].v < 1)
            return dp_fail(e, DP_EINPUT, "%s = %lld: must be at least 1", dims[i].name,
                           (long long)dims[i].v);
    if (p->HV % p->H)
        return dp_fail(e, DP_EINPUT, "HV = %d: must be a multiple of H = %d", p->HV, p->H);
    if (p->model != DP_MKDA && p->R != 1)
        return dp_fail(e, DP_EINPUT, "R = %d: only mkda has more than one key a token", p->R);
    if (!isfinite(p->scale)) return dp_fail(e, DP_EINPUT, "scale = %g: must be finite", p->scale);
    if (p->gate == DP_GATE_LOWER_BOUND && !(p->lower_bound < 0 && isfinite(p->lower_bound)))
        return dp_fail(e, DP_EINPUT, "lower_bound = %g: must be finite and below 0",
                       p->lower_bound);
    if (p->cu[0] != 0)
        return dp_fail(e, DP_EINPUT, "cu_seqlens[0] = %lld: must be 0", (long long)p->cu[0]);
    for (int i = 0; i < p->Nseq; i++)
        if (p->cu[i + 1] < p->cu[i])
            return dp_fail(e, DP_EINPUT,
                           "cu_seqlens[%d] = %lld: must not be below cu_seqlens[%d] = %lld", i + 1,
                           (long long)p->cu[i + 1], i, (long long)p->cu[i]);
    if (p->cu[p->Nseq] != p->T)
        return dp_fail(e, DP_EINPUT, "cu_seqlens[%d] = %lld: the last one must be T = %lld",
                       p->Nseq, (long long)p->cu[p->Nseq], (long long)p->T);
    if (allow_nonfinite) return DP_OK;
    const int64_t T = p->T, KV = (int64_t)p->K * p->V;
    const struct {
        const char *name;
        const double *x;
        int64_t n;
    } ten[] = {{"q", p->q, T * p->H * p->K},
               {"k", p->k, T * p->H * p->R * p->K},
               {"v", p->v, T * p->HV * p->R * p->V},
               {"g", p->g, T * p->HV * dp_Kg(p)},
               {"beta", p->beta, T * p->HV * p->R},
               {"A_log", p->A_log, p->HV},
               {"dt_bias", p->dt_bias, (int64_t)p->HV * dp_Kg(p)},
               {"s0", p->s0, p->Nseq * p->HV * KV},
               {"do", p->dout, T * p->HV * p->V},
               {"dstate", p->dstate, p->Nseq * p->HV * KV}};
    for (size_t i = 0; i < sizeof ten / sizeof *ten; i++) {
        dp_status s = check_finite(ten[i].name, ten[i].x, ten[i].n, e);
        if (s) return s;
    }
    if (p->gate == DP_GATE_LOG)
        for (int64_t i = 0; i < T * p->HV * dp_Kg(p); i++)
            if (p->g[i] > 0) {
                const long long Kg = dp_Kg(p), channel = i % Kg, head = i / Kg % p->HV,
                                token = i / Kg / p->HV;
                return dp_fail(e, DP_EINPUT,
                               "g[%lld,%lld,%lld] = %g: a log decay must be <= 0 (a linear gate, "
                               "or a raw one with gate = log?)",
                               token, head, channel, p->g[i]);
            }
    return DP_OK;
}

/* ---- results --------------------------------------------------------------------------------- */

#define NAMED(NAME) .name = #NAME, .offset = offsetof(dp_result, NAME)
#define TOKENS(...) .kind = DP_OF_TOKENS, .axis = {DP_AXIS_T, __VA_ARGS__}
#define STATES .kind = DP_OF_SEQUENCES, .axis = {DP_AXIS_NSEQ, DP_AXIS_HV, DP_AXIS_K, DP_AXIS_V}
#define HEADS(...) .kind = DP_OF_HEADS, .axis = {DP_AXIS_HV, __VA_ARGS__}
#define GRADIENT_OF(INPUT) .backward = 1, .of = INPUT
#define NEEDS(INPUT) .needs = offsetof(dp_problem, INPUT)

const dp_result_field dp_result_fields[DP_NRESULTS] = {
    [DP_RESULT_O] = {NAMED(o), TOKENS(DP_AXIS_HV, DP_AXIS_V), .stored_short = 1},
    [DP_RESULT_FINAL_STATE] = {NAMED(final_state), STATES, .alias = "ht"},
    [DP_RESULT_DQ] = {NAMED(dq), TOKENS(DP_AXIS_H, DP_AXIS_K), GRADIENT_OF("q"), .stored_short = 1},
    [DP_RESULT_DK] = {NAMED(dk), TOKENS(DP_AXIS_H, DP_AXIS_R, DP_AXIS_K), GRADIENT_OF("k"),
                      .stored_short = 1},
    [DP_RESULT_DV] = {NAMED(dv), TOKENS(DP_AXIS_HV, DP_AXIS_R, DP_AXIS_V), GRADIENT_OF("v"),
                      .stored_short = 1},
    [DP_RESULT_DG] = {NAMED(dg), TOKENS(DP_AXIS_HV, DP_AXIS_KG), GRADIENT_OF("g"),
                      .stored_short = 1},
    [DP_RESULT_DBETA] = {NAMED(dbeta), TOKENS(DP_AXIS_HV, DP_AXIS_R), GRADIENT_OF("beta"),
                         .stored_short = 1},
    [DP_RESULT_DA_LOG] = {NAMED(dA_log), HEADS(DP_AXIS_NONE), GRADIENT_OF("A_log"), NEEDS(A_log)},
    [DP_RESULT_DDT_BIAS] = {NAMED(ddt_bias), HEADS(DP_AXIS_KG), GRADIENT_OF("dt_bias"),
                            NEEDS(dt_bias)},
    [DP_RESULT_DS0] = {NAMED(ds0), STATES, GRADIENT_OF("initial_state"), .alias = "dh0"},
};

int dp_result_find(const char *name) {
    for (int i = 0; i < DP_NRESULTS; i++) {
        const dp_result_field *f = &dp_result_fields[i];
        if (!strcmp(name, f->name) || (f->alias && !strcmp(name, f->alias))) return i;
    }
    return -1;
}

int dp_result_exists(const dp_problem *p, int field) {
    const size_t needs = dp_result_fields[field].needs;
    return !needs || *(double *const *)((const char *)p + needs) != NULL;
}

int dp_result_axes(const dp_problem *p, int field, int64_t shape[DP_RESULT_MAX_AXES]) {
    const int64_t length[DP_NAXES] = {
        [DP_AXIS_T] = p->T, [DP_AXIS_NSEQ] = p->Nseq, [DP_AXIS_H] = p->H, [DP_AXIS_HV] = p->HV,
        [DP_AXIS_R] = p->R, [DP_AXIS_K] = p->K,       [DP_AXIS_V] = p->V, [DP_AXIS_KG] = dp_Kg(p)};
    int n = 0;
    for (int i = 0; i < DP_RESULT_MAX_AXES; i++) {
        const dp_axis axis = dp_result_fields[field].axis[i];
        shape[i] = length[axis];
        n += axis != DP_AXIS_NONE;
    }
    return n;
}

void dp_result_shape(const dp_problem *p, int field, int64_t *rows, int64_t *width) {
    const dp_result_kind kind = dp_result_fields[field].kind;
    int64_t shape[DP_RESULT_MAX_AXES];
    const int n = dp_result_axes(p, field, shape);
    const int row_axes = kind == DP_OF_HEADS ? 1 : kind == DP_OF_SEQUENCES ? 2 : n - 1;
    *rows = dp_result_exists(p, field);
    *width = 1;
    for (int i = 0; i < n; i++)
        *(i < row_axes ? rows : width) *= shape[i];
}

int dp_result_heads(const dp_problem *p, int field) {
    for (int i = 0; i < DP_RESULT_MAX_AXES; i++)
        if (dp_result_fields[field].axis[i] == DP_AXIS_H) return p->H;
    return p->HV;
}

int dp_result_rows_per_token(const dp_problem *p, int field) {
    int64_t rows, width;
    if (dp_result_fields[field].kind != DP_OF_TOKENS) return 1;
    dp_result_shape(p, field, &rows, &width);
    return (int)(rows / (p->T * dp_result_heads(p, field)));
}

double **dp_qkv_at(dp_problem *p, int i) {
    double **const at[DP_NQKV] = {[DP_QKV_Q] = &p->q, [DP_QKV_K] = &p->k, [DP_QKV_V] = &p->v};
    return at[i];
}

int dp_qkv_heads(const dp_problem *p, int i) { return dp_result_heads(p, dp_qkv_gradient(i)); }

int dp_qkv_width(const dp_problem *p, int i) { return i == DP_QKV_V ? p->V : p->K; }

void dp_result_alloc(dp_result *r, const dp_problem *p, int backward) {
    memset(r, 0, sizeof *r);
    for (int i = 0; i < DP_NRESULTS; i++) {
        int64_t rows, width;
        dp_result_shape(p, i, &rows, &width);
        if (!rows || (dp_result_fields[i].backward && !backward)) continue;
        double *x = *dp_result_at(r, i) = dp_doubles(rows * width);
#pragma omp parallel for if (rows * width > 1 << 22)
        for (int64_t j = 0; j < rows * width; j++)
            x[j] = NAN;
    }
}

void dp_result_free(dp_result *r) {
    for (int i = 0; i < DP_NRESULTS; i++) {
        free(*dp_result_at(r, i));
        *dp_result_at(r, i) = NULL;
    }
}
