/* Failures, memory, and the checks of a problem (problem.h). */
#define _DEFAULT_SOURCE
#include "problem.h"
#include "context.h"
#include "recurrence.h"
#include "tensors.h"
#include "text.h"

#include <assert.h>
#include <math.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

dp_model_info dp_models[DP_NMODELS + 1] = {
#define ROW(ID, ...) [ID] = {__VA_ARGS__},
    DP_RECURRENCES(ROW)[DP_DPLR].rows = 2};

const dp_curve_info dp_curves[DP_NCURVES] = {
#define CURVE(ID, F, SLOPE, RATIO, EF, ES, RF, RS, STEEP) [ID] = {{EF, ES}, {RF, RS}, STEEP},
    DP_CURVES(CURVE)};
#define GATE(ID, WORD, SAID, CURVE, INSIDE, ...) [ID] = {WORD, SAID, CURVE, __VA_ARGS__},
const dp_gate_info dp_gates[DP_NGATES] = {DP_GATES(GATE)};
#define INFO(ID, ...) [ID] = {__VA_ARGS__},
const dp_beta_info dp_betas[DP_NBETAS] = {DP_BETAS(INFO)};

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
        sizeof e->msg); /* values come from files: control characters must not reach the terminal */
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

char *dp_strdup(const char *s) {
    const size_t n = strlen(s) + 1;
    return memcpy(dp_alloc(n, 1), s, n);
}

char *dp_text_new(const char *fmt, ...) {
    char *text;
    va_list ap;
    va_start(ap, fmt);
    if (vasprintf(&text, fmt, ap) < 0) abort();
    va_end(ap);
    return text;
}

void dp_text_add(char *to, size_t size, const char *fmt, ...) {
    const size_t n = strnlen(to, size);
    va_list ap;
    va_start(ap, fmt);
    vsnprintf(to + n, size - n, fmt, ap);
    va_end(ap);
}

void *dp_realloc(void *x, size_t bytes) { return or_die(realloc(x, bytes), bytes, 1); }

void *dp_calloc(size_t n, size_t size) {
    const size_t large = 1 << 26, page = 1 << 21;
    void *x = or_die(calloc(n ? n : 1, size ? size : 1), n, size);
    if (n * size >= large) { /* gigabytes in pages of 4 KiB take longer to get than to fill; where
                                refused, nothing is lost */
        const uintptr_t from = ((uintptr_t)x + page - 1) / page * page,
                        to = ((uintptr_t)x + n * size) / page * page;
        /* NOLINTNEXTLINE(performance-no-int-to-ptr): whole pages */
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

double *dp_identity(int n) {
    double *I = dp_doubles((int64_t)n * n);
    for (int i = 0; i < n; i++)
        I[(int64_t)i * n + i] = 1;
    return I;
}

void dp_swap(double **a, double **b) {
    double *was = *a;
    *a = *b;
    *b = was;
}

double **dp_copy_list(double *const *a, int64_t n, int64_t size) {
    double **b = dp_calloc((size_t)n, sizeof *b);
    for (int64_t i = 0; i < n; i++)
        b[i] = dp_copy(a[i], size);
    return b;
}

int dp_same_list(double *const *a, double *const *b, int64_t n, int64_t size) {
    if (!a || !b) return a == b;
    for (int64_t i = 0; i < n; i++)
        if (!a[i] != !b[i] || (a[i] && memcmp(a[i], b[i], sizeof(double) * (size_t)size))) return 0;
    return 1;
}

double dp_squares(const double *x, int64_t n) {
    double sum = 0;
    for (int64_t i = 0; i < n; i++)
        sum += x[i] * x[i];
    return sum;
}

void dp_free_each(const void *const *pointers, size_t bytes) {
    for (size_t i = 0; i < bytes / sizeof *pointers; i++)
        dp_free_at(&pointers[i]);
}

void dp_free_list(void *list, int64_t n) {
    if (list) dp_free_each(list, sizeof list * (size_t)n);
    free(list);
}

double *dp_doubles_of(const dp_problem *p, int64_t n) {
    return p->memory ? p->memory->make(n, 0) : dp_doubles(n);
}

double *dp_copy_of(const dp_problem *p, const double *x, int64_t n) {
    return (p->memory ? p->memory->copy : dp_copy)(x, n);
}

static void free_doubles(double *x) { free(x); }

void dp_free_of(const dp_problem *p, double *x) { (p->memory ? p->memory->free : free_doubles)(x); }

DP_NOT_SO("-Wanalyzer-malloc-leak") /* arrays lie in the problem */
void dp_problem_alloc(dp_problem *p) {
    for (int i = 0; i < DP_NINPUTS; i++)
        if (dp_input_fields[i].role == DP_ROLE_REQUIRED && dp_input_belongs(p, i))
            p->in[i] = dp_doubles_of(p, dp_input_count(p, i));
    if (!p->cu) {
        p->Nseq = 1;
        p->cu = dp_calloc(2, sizeof *p->cu);
        p->cu[1] = p->T;
    }
}

int64_t dp_token_before(const dp_problem *p, int64_t t) {
    return t - dp_lag(p) >= p->cu[dp_sequence_of(p->cu, p->Nseq, t)] ? t - dp_lag(p) : -1;
}

int64_t dp_token_after(const dp_problem *p, int64_t t) {
    return t + dp_lag(p) < p->cu[dp_sequence_of(p->cu, p->Nseq, t) + 1] ? t + dp_lag(p) : -1;
}

void dp_problem_free(dp_problem *p) {
    for (int i = 0; i < DP_NINPUTS; i++) {
        dp_free_of(p, p->in[i]);
        p->in[i] = NULL;
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

const char *const dp_strengths[] = {[DP_BY_BETA] = "beta",
                                    [DP_BY_GATES] = "erase and write",
                                    [DP_BY_NOTHING] = "nothing",
                                    [DP_BY_FACTORS] = "rows of its own",
                                    [DP_BY_ROWS] = "rows of its own"};

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
    if (!dp_model_of(p)->many_keys && p->R != 1)
        return dp_fail(e, DP_EINPUT, "R = %d: %s has one key a token", p->R, dp_model_of(p)->name);
    for (int i = 0; i < DP_NINPUTS; i++)
        if (dp_input_of(p, i) && !dp_input_belongs(p, i))
            return dp_fail(e, DP_EINPUT, "%s: %s has no such input", dp_input_fields[i].name,
                           dp_model_of(p)->name);
    if (!dp_has_beta(p) && p->beta_form != DP_BETA_PLAIN)
        return dp_fail(e, DP_EINPUT, "beta: %s has %s in its place", dp_model_of(p)->name,
                       dp_strengths[dp_model_of(p)->strength]);
    if (dp_by_rows(p) && p->HV != p->H)
        return dp_fail(e, DP_EINPUT, "HV = %d: %s has a query head for each value head, H = %d",
                       p->HV, dp_model_of(p)->name, p->H);
    if (p->l2norm && !dp_recurrence_of(p)->normed)
        return dp_fail(e, DP_EINPUT, "l2norm: %s takes q and k as given", dp_model_of(p)->name);
    if (p->pairs < 0 || 2 * dp_pairs(p) > p->K)
        return dp_fail(e, DP_EINPUT, "P = %d: an angle rotates up to K / 2 = %d pairs", p->pairs,
                       p->K / 2);
    if (p->angle && !dp_pairs(p))
        return dp_fail(e, DP_EINPUT, "K = %d: an angle rotates pairs of channels", p->K);
    if (!isfinite(p->scale)) return dp_fail(e, DP_EINPUT, "scale = %g: must be finite", p->scale);
    if (dp_gate_inside(p) && !(p->lower_bound < 0 && isfinite(p->lower_bound)))
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
    for (int i = 0; i < DP_NINPUTS; i++) {
        const dp_status s =
            check_finite(dp_input_fields[i].name, dp_input_of(p, i), dp_input_count(p, i), e);
        if (s) return s;
    }
    return DP_OK;
}
