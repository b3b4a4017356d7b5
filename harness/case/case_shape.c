/* Shapes of a case, from its file's keys and from its data (case_parts.h). */
#define _GNU_SOURCE
#include "case_parts.h"
#include "operations.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

/* Above it also half of the memory here: results and the truth take as much again. */
#define SMALL (1ll << 28)

/* ---- shapes of tensors ----------------------------------------------------------------------- */

int64_t dp_case_dim_from_end(const dp_tensor *t, int i) {
    return t && t->ndim >= i ? t->shape[t->ndim - i] : 0;
}

void dp_case_shape_text(const dp_tensor *t, char *out, size_t size) {
    size_t at = (size_t)snprintf(out, size, "[");
    for (int i = 0; i < t->ndim && at < size; i++)
        at += (size_t)snprintf(out + at, size - at, "%s%lld", i ? "," : "", (long long)t->shape[i]);
    if (at < size) snprintf(out + at, size - at, "]");
}

int dp_case_same_shape(const dp_tensor *t, int ndim, const int64_t *want, int flat) {
    int j = 0;
    int64_t n = 1;
    for (int i = 0; i < ndim; i++)
        n *= want[i];
    if (flat && t->ndim == 1 && t->n == n) return 1;
    for (int i = 0; i < t->ndim; i++) {
        if (t->shape[i] == 1) continue;
        while (j < ndim && want[j] == 1)
            j++;
        if (j == ndim || want[j++] != t->shape[i]) return 0;
    }
    while (j < ndim && want[j] == 1)
        j++;
    return j == ndim;
}

/* ---- dimensions ------------------------------------------------------------------------------ */

dp_status dp_case_agree(const dp_casefile *f, const char *key, int64_t stated, int64_t found,
                        int64_t dflt, int64_t *out, dp_err *e) {
    if (dp_casefile_has(f, key) && found && stated != found)
        return dp_casefile_refuse(f, key, e, "%s has %lld", f->data, (long long)found);
    *out = dp_casefile_has(f, key) ? stated : found ? found : dflt;
    if (!*out && !f->data)
        return dp_casefile_refuse(f, key, e, "missing; required unless data gives it");
    return DP_OK;
}

dp_status dp_case_set_tokens(const dp_casefile *f, int64_t found, int64_t *T, dp_err *e) {
    if (found && f->T > found)
        return dp_casefile_refuse(f, "T", e, "%s has only %lld tokens", f->data, (long long)found);
    *T = f->T ? f->T : found;
    return *T || f->data ? DP_OK
                         : dp_casefile_refuse(f, "T", e, "missing; required unless data gives it");
}

/* ---- tokens: sequences, ranks, memory -------------------------------------------------------- */

static dp_status check_cu(const dp_casefile *f, const int64_t *cu, int n, int64_t T, dp_err *e) {
    if (n < 2) return dp_casefile_refuse(f, "cu_seqlens", e, "has %d entries, at least 0,T", n);
    if (cu[0])
        return dp_casefile_refuse(f, "cu_seqlens", e, "must begin with 0, not %lld",
                                  (long long)cu[0]);
    for (int i = 1; i < n; i++)
        if (cu[i] < cu[i - 1])
            return dp_casefile_refuse(f, "cu_seqlens", e,
                                      "entry %d, %lld, is below the one before it, %lld", i,
                                      (long long)cu[i], (long long)cu[i - 1]);
    if (T && cu[n - 1] != T)
        return dp_casefile_refuse(f, "cu_seqlens", e, "must end at T = %lld, not %lld",
                                  (long long)T, (long long)cu[n - 1]);
    return DP_OK;
}

/* From the key, else from the data, else one sequence. */
static dp_status set_cu(const dp_casefile *f, int64_t T, const dp_tensor *data, int64_t **cu,
                        int *Nseq, dp_err *e) {
    int64_t whole[2] = {0, T};
    const int stated = dp_casefile_has(f, "cu_seqlens"), read = !stated && data;
    const dp_ints list = stated ? f->cu_seqlens : (dp_ints){2, whole};
    const int n = read ? (int)data->n : list.n;
    if (read && data->dtype[0] != 'I')
        return dp_casefile_refuse(
            f, "data", e, "tensor cu_seqlens: dtype %s, must be an integer type", data->dtype);
    *Nseq = n - 1;
    *cu = dp_calloc((size_t)n, sizeof **cu);
    for (int i = 0; i < n; i++)
        (*cu)[i] = read ? (int64_t)data->data[i] : list.v[i];
    return check_cu(f, *cu, n, T, e);
}

static dp_status check_ranks(const dp_casefile *f, int64_t T, dp_err *e) {
    for (int i = 0; T && i < f->ranks.n * f->own.n; i++) {
        const long long N = (long long)f->ranks.v[i / f->own.n];
        const dp_own own = (dp_own)f->own.v[i % f->own.n];
        if (dp_own_parts(own, T, (int)N)) continue;
        if (own == DP_OWN_EVEN)
            return dp_casefile_refuse(f, "ranks", e, "T = %lld is not divisible by %lld",
                                      (long long)T, N);
        return dp_casefile_refuse(f, "own", e, "%s: T = %lld tokens are too few for %lld ranks",
                                  dp_own_names[own], (long long)T, N);
    }
    return DP_OK;
}

static dp_status check_size(const dp_casefile *f, dp_case *c, dp_err *e) {
    dp_case_input s[DP_CASE_MAX_INPUTS];
    const int n = dp_case_inputs(c, s);
    double total = 0;
    for (int i = 0; i < n; i++) {
        double x = 1;
        for (int d = 0; d < s[i].ndim; d++)
            x *= (double)s[i].shape[d];
        total += x;
    }
    if (total > (double)DP_CASE_MAX_NUMBERS)
        return dp_casefile_refuse(f, "T", e, "the tensors hold %.3g numbers, at most %lld", total,
                                  DP_CASE_MAX_NUMBERS);
    const double memory = (double)dp_memory_bytes();
    if (total > (double)SMALL && 16 * total > memory)
        return dp_casefile_refuse(f, "T", e,
                                  "the tensors hold %.3g numbers, %.1f GiB: more than half of the "
                                  "%.1f GiB of memory here",
                                  total, 8 * total / 0x1p30, memory / 0x1p30);
    return DP_OK;
}

dp_status dp_case_shapes(const dp_casefile *f, const dp_tensorfile *d, dp_case *c, int64_t *tokens,
                         dp_err *e) {
    const dp_operation *op = dp_op_of(c);
    const dp_packing x = dp_case_packing(c);
    const dp_tensor *cu = d ? dp_tensor_find(d, "cu_seqlens") : NULL;
    *tokens = 0;
    dp_status s = op->shape(f, d, c, tokens, e);
    if (s || !op->has_ranks) return s;
    s = set_cu(f, *x.T, cu, x.cu, x.Nseq, e);
    if (!s) s = check_ranks(f, *x.T, e);
    return s ? s : check_size(f, c, e);
}
