/* Shapes of a case, from its file's keys and from its data (case_parts.h). */
#define _GNU_SOURCE
#include "case_parts.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

/* Of all tensors of a case together: 1M tokens of a head of K = V = 128 with its gradients
 * are 6.7e8. Above SMALL also half of the memory here: results and the truth take as much again. */
#define MAX_NUMBERS (1ll << 30)
#define SMALL (1ll << 28)
#define MAX_HEADS 4096
#define MAX_KEYS 4096 /* K and V */
#define MAX_CHANNELS 65536

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

/* What the case says about a dimension against what the data has; 0 from either side: it does not
 * say. */
static dp_status agree(const dp_casefile *f, const char *key, int64_t stated, int64_t found,
                       int64_t dflt, int64_t *out, dp_err *e) {
    if (dp_casefile_has(f, key) && found && stated != found)
        return dp_casefile_refuse(f, key, e, "%s has %lld", f->data, (long long)found);
    *out = dp_casefile_has(f, key) ? stated : found ? found : dflt;
    if (!*out && !f->data)
        return dp_casefile_refuse(f, key, e, "missing; required unless data gives it");
    return DP_OK;
}

static dp_status set_tokens(const dp_casefile *f, int64_t found, int64_t *T, dp_err *e) {
    if (found && f->T > found)
        return dp_casefile_refuse(f, "T", e, "%s has only %lld tokens", f->data, (long long)found);
    *T = f->T ? f->T : found;
    return *T || f->data ? DP_OK
                         : dp_casefile_refuse(f, "T", e, "missing; required unless data gives it");
}

/* Head counts and widths of the data's q and v; 0: they are not there. */
typedef struct {
    int64_t H, HV, K, V;
} widths;

static widths widths_of(const dp_tensor *q, const dp_tensor *v, int64_t R) {
    const int axes = R > 1 ? 4 : 3; /* of v */
    widths w = {.K = dp_case_dim_from_end(q, 1), .V = dp_case_dim_from_end(v, 1)};
    if (q) w.H = q->ndim >= 3 ? dp_case_dim_from_end(q, 2) : 1;
    if (v) w.HV = v->ndim >= axes ? dp_case_dim_from_end(v, axes - 1) : 1;
    return w;
}

/* q and v of the data, where there is any. */
static dp_status check_q_v(const dp_casefile *f, const dp_tensor *q, const dp_tensor *v,
                           const widths *w, dp_err *e) {
    if (!q || !v || !q->n || !v->n || !w->K || !w->V || w->K > MAX_KEYS || w->V > MAX_KEYS ||
        w->H > MAX_HEADS || w->HV > MAX_HEADS)
        return dp_casefile_refuse(
            f, "data", e,
            "tensors q and v must be there, not empty, with head counts and widths up to 4096");
    if (q->ndim >= 2) return DP_OK;
    char shape[128];
    dp_case_shape_text(q, shape, sizeof shape);
    return dp_casefile_refuse(f, "data", e, "tensor q: shape %s, must be [T,H,K]", shape);
}

static dp_status recurrence_shape(const dp_casefile *f, const dp_tensorfile *d, dp_problem *p,
                                  int64_t *tokens, dp_err *e) {
    const dp_tensor *q = d ? dp_tensor_find(d, "q") : NULL, *v = d ? dp_tensor_find(d, "v") : NULL;
    const widths found = widths_of(q, v, f->R);
    widths w = {0};
    dp_status s = agree(f, "K", f->K, found.K, 0, &w.K, e);
    if (!s) s = agree(f, "H", f->H, found.H, 1, &w.H, e);
    if (!s) s = agree(f, "HV", f->HV, found.HV, w.H, &w.HV, e);
    if (!s) s = agree(f, "V", f->V, found.V, w.K, &w.V, e);
    if (!s && d) s = check_q_v(f, q, v, &w, e);
    if (s) return s;
    *tokens = q ? q->n / (w.H * w.K) : 0;
    p->K = (int)w.K;
    p->H = (int)w.H;
    p->HV = (int)w.HV;
    p->V = (int)w.V;
    p->R = (int)f->R;
    if (w.HV % w.H)
        return dp_casefile_refuse(f, "HV", e, "must be a multiple of H = %lld", (long long)w.H);
    if (f->R > 1 && !(f->op < DP_NMODELS && dp_models[f->op].many_keys))
        return dp_casefile_refuse(f, "R", e, "only mkda has more than one key a token");
    return set_tokens(f, *tokens, &p->T, e);
}

static dp_status conv_shape(const dp_casefile *f, const dp_tensorfile *d, dp_conv *c,
                            int64_t *tokens, dp_err *e) {
    const dp_tensor *x = d ? dp_tensor_find(d, "x") : NULL,
                    *w = d ? dp_case_input_find(d, &dp_conv_input_fields[DP_CONV_WEIGHT]) : NULL;
    int64_t D = 0, W = 0;
    dp_status s = agree(f, "D", f->D, dp_case_dim_from_end(x, 1), 0, &D, e);
    if (!s) s = agree(f, "W", f->W, dp_case_dim_from_end(w, 1), 0, &W, e);
    if (s) return s;
    if (d && (!x || !w || !x->n || !w->n || !D || !W || D > MAX_CHANNELS || W > DP_CONV_MAX_WIDTH))
        return dp_casefile_refuse(
            f, "data", e,
            "tensors x and w must be there, not empty, with D up to 65536 and W up to %d",
            DP_CONV_MAX_WIDTH);
    *tokens = x ? x->n / D : 0;
    c->D = (int)D;
    c->W = (int)W;
    c->silu = (int)f->activation;
    return set_tokens(f, *tokens, &c->T, e);
}

dp_status dp_case_chain_shape(const dp_casefile *f, dp_case *c, dp_err *e) {
    c->ch.regime = (dp_regime)f->regime;
    c->ch.n = (int)f->chunks;
    c->ch.K = (int)f->K;
    if (!f->K) return dp_casefile_refuse(f, "K", e, "missing; key width");
    if ((double)f->chunks * f->K * f->K > (double)MAX_NUMBERS)
        return dp_casefile_refuse(f, "chunks", e, "the factors hold more than %lld numbers",
                                  MAX_NUMBERS);
    return DP_OK;
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
    for (int i = 0; T && i < f->ranks.n; i++)
        if (T % f->ranks.v[i])
            return dp_casefile_refuse(f, "ranks", e, "T = %lld is not divisible by %lld",
                                      (long long)T, (long long)f->ranks.v[i]);
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
    if (total > (double)MAX_NUMBERS)
        return dp_casefile_refuse(f, "T", e, "the tensors hold %.3g numbers, at most %lld", total,
                                  MAX_NUMBERS);
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
    const int conv = c->op == DP_OP_CONV;
    const dp_tensor *cu = d ? dp_tensor_find(d, "cu_seqlens") : NULL;
    *tokens = 0;
    dp_status s =
        conv ? conv_shape(f, d, &c->conv, tokens, e) : recurrence_shape(f, d, &c->p, tokens, e);
    const int64_t T = conv ? c->conv.T : c->p.T;
    if (!s && conv) s = set_cu(f, T, cu, &c->conv.cu, &c->conv.Nseq, e);
    if (!s && !conv) s = set_cu(f, T, cu, &c->p.cu, &c->p.Nseq, e);
    if (!s) s = check_ranks(f, T, e);
    return s ? s : check_size(f, c, e);
}
