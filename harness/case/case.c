#define _GNU_SOURCE
#include "case.h"
#include "casefile.h"
#include "front.h"
#include "ref/arithmetic/elementary.h"
#include "ref/files/input.h"
#include "ref/files/safetensors.h"
#include "ref/vocabulary/number.h"
#include "ref/vocabulary/text.h"

#include <dirent.h>
#include <errno.h>
#include <math.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

/* Of all tensors of a case together: 1M tokens of a head of K = V = 128 with its gradients
 * are 6.7e8. Above SMALL also half of the memory here: results and the truth take as much again. */
#define MAX_NUMBERS (1ll << 30)
#define SMALL (1ll << 28)

/* ---- the tensors of a case as a table -------------------------------------------------------- */

/* where: the array in dp_problem or dp_conv. tokens: the first axis is T. param: fp32 (A_log,
 * states, weights). */
typedef struct {
    const char *name, *alias;
    double **where;
    int tokens, param, ndim;
    int64_t shape[4];
} slot;
#define MAX_SLOTS 10
#define MAX_WIDTH 64 /* of a convolution, as the key W */

static int recurrence_slots(dp_problem *p, slot *s) {
    const int64_t T = p->T, H = p->H, HV = p->HV, K = p->K, V = p->V, R = p->R, Kg = dp_Kg(p),
                  N = p->Nseq;
    const slot all[] = {{"q", NULL, &p->q, 1, 0, 3, {T, H, K}},
                        {"k", NULL, &p->k, 1, 0, 4, {T, H, R, K}},
                        {"v", NULL, &p->v, 1, 0, 4, {T, HV, R, V}},
                        {"g", NULL, &p->g, 1, 0, 3, {T, HV, Kg}},
                        {"beta", NULL, &p->beta, 1, 0, 3, {T, HV, R}},
                        {"A_log", NULL, &p->A_log, 0, 1, 1, {HV}},
                        {"dt_bias", NULL, &p->dt_bias, 0, 1, 2, {HV, Kg}},
                        {"s0", "initial_state", &p->s0, 0, 1, 4, {N, HV, K, V}},
                        {"do", NULL, &p->dout, 1, 0, 3, {T, HV, V}},
                        {"dstate", "dht", &p->dstate, 0, 1, 4, {N, HV, K, V}}};
    memcpy(s, all, sizeof all);
    return sizeof all / sizeof *all;
}

static int conv_slots(dp_conv *c, slot *s) {
    const slot all[] = {{"x", NULL, &c->x, 1, 0, 2, {c->T, c->D}},
                        {"w", "weight", &c->w, 0, 1, 2, {c->D, c->W}},
                        {"bias", NULL, &c->bias, 0, 1, 1, {c->D}},
                        {"dy", NULL, &c->dy, 1, 0, 2, {c->T, c->D}}};
    memcpy(s, all, sizeof all);
    return sizeof all / sizeof *all;
}

static int slots(dp_case *c, slot *s) {
    return c->op == DP_OP_CONV ? conv_slots(&c->conv, s) : recurrence_slots(&c->p, s);
}

static int64_t count(const slot *s) {
    int64_t n = 1;
    for (int i = 0; i < s->ndim; i++)
        n *= s->shape[i];
    return n;
}

static void index_text(const slot *s, int64_t i, char *out, size_t size) { /* "[5,0,0,3]" */
    int64_t rest = count(s);
    size_t at = 0;
    for (int d = 0; d < s->ndim && at < size; d++) {
        rest /= s->shape[d];
        at += (size_t)snprintf(out + at, size - at, "%c%lld", d ? ',' : '[', (long long)(i / rest));
        i %= rest;
    }
    if (at < size) snprintf(out + at, size - at, "]");
}

static void warn(dp_case *c, const char *fmt, ...) __attribute__((format(printf, 2, 3)));
static void warn(dp_case *c, const char *fmt, ...) {
    char *msg = dp_calloc(1, 600);
    va_list ap;
    va_start(ap, fmt);
    vsnprintf(msg, 600, fmt, ap);
    va_end(ap);
    char **more = dp_calloc((size_t)c->nwarn + 1, sizeof *more);
    if (c->nwarn) memcpy(more, c->warn, (size_t)c->nwarn * sizeof *more);
    free(c->warn);
    c->warn = more;
    c->warn[c->nwarn++] = msg;
}

/* ---- settings -------------------------------------------------------------------------------- */

static const dp_format FLOATS[] = {DP_FP64, DP_FP32, DP_BF16}; /* in the order of the key dtype */

static dp_inputs_spec spec_of(const dp_casefile *f) {
    const int raw_g = f->gate != DP_GATE_LOG, raw_b = f->beta != DP_BETA_PLAIN;
    return (dp_inputs_spec){.seed = (uint64_t)f->seed,
                            .dtype = dp_casefile_has(f, "dtype") ? FLOATS[f->dtype] : DP_BF16,
                            .keys = (dp_keys)f->keys,
                            .g_scale = dp_casefile_has(f, "g_scale") ? f->g_scale
                                       : raw_g                       ? 1
                                                                     : 0.1,
                            .g_mean = f->g_mean,
                            .g_uniform = f->g_uniform,
                            .g_head_spread = f->g_head_spread,
                            .g_channel_spread = f->g_channel_spread,
                            .beta_lo = dp_casefile_has(f, "beta_lo") ? f->beta_lo
                                       : raw_b                       ? 0
                                                                     : 0.2,
                            .beta_hi = dp_casefile_has(f, "beta_hi") ? f->beta_hi
                                       : raw_b                       ? 1
                                                                     : 0.9,
                            .s0_scale = f->s0_scale,
                            .laws = {.qk_decades = f->qk_decades,
                                     .beta_decades = f->beta_decades,
                                     .v_from_k = f->v_from_k,
                                     .g_hold = (int)f->g_hold,
                                     .repeat = (int)f->repeat,
                                     .v_ties = (int)f->v_ties,
                                     .has_A_log = dp_casefile_has(f, "A_log"),
                                     .A_log = f->A_log}};
}

static int one_of(const dp_ints *list, int64_t x) {
    for (int i = 0; i < list->n; i++)
        if (list->v[i] == x) return 1;
    return 0;
}

int dp_case_chains(const dp_case *c, int N, int nwant, const int *want, int out[DP_NFORMATS]) {
    const int n = dp_select(c->nchain, (const int *)c->chain, nwant, want, out);
    int all = nwant > 0; /* who asks for one gets it */
    for (int i = 0; i < c->nranks; i++)
        all |= c->ranks[i] == N && c->all_chains[i];
    return n > 1 && (N == 1 || !all) ? 1 : n;
}

static dp_status settings(const dp_casefile *f, dp_case *c, dp_err *e) {
    c->reason = strdup(f->reason);
    c->source = strdup(f->source);
    c->op = f->op <= DP_MKDA ? DP_OP_RECURRENCE
            : f->op == 3     ? DP_OP_CHAIN
            : f->op == 4     ? DP_OP_CONV
                             : DP_OP_STEP;
    c->op_name = dp_casefile_op_name(f);
    c->smoke = (int)f->smoke;
    c->backward = (int)f->backward;
    c->bits = (int)f->bits;
    c->truth = (dp_truth_pick)f->truth;
    c->allow_nonfinite = (int)f->nonfinite;
    c->spec = spec_of(f);
    c->input_dtype = c->op == DP_OP_CHAIN ? DP_FP32 : c->spec.dtype;
    for (int i = 0; i < f->ranks.n; i++)
        c->ranks[c->nranks++] = (int)f->ranks.v[i];
    for (int i = 0; i < f->chain_ranks.n; i++)
        if (!one_of(&f->ranks, f->chain_ranks.v[i]))
            return dp_casefile_refuse(f, "chain_ranks", e, "%lld is not one of ranks",
                                      (long long)f->chain_ranks.v[i]);
    for (int i = 0; i < f->ranks.n; i++)
        c->all_chains[i] = !f->chain_ranks.n || one_of(&f->chain_ranks, f->ranks.v[i]);
    for (int i = 0; i < f->base.n; i++)
        c->base[c->nbase++] = (dp_base)f->base.v[i];
    for (int i = 0; i < f->chain.n; i++)
        c->chain[c->nchain++] = (dp_format)f->chain.v[i];
    for (int i = 0; i < f->merge.n; i++)
        c->merge[c->nmerge++] = (dp_merge)f->merge.v[i];
    if (f->v_ties && c->spec.dtype == DP_BF16)
        return dp_casefile_refuse(
            f, "v_ties", e, "bf16 inputs cannot lie between numbers of bf16: set dtype = fp32");
    if (f->beta_decades > 0 && f->beta != DP_BETA_PLAIN)
        return dp_casefile_refuse(f, "beta_decades", e, "goes with beta = plain");
    if (dp_casefile_has(f, "A_log") && (f->gate == DP_GATE_LOG || !f->gate_params))
        return dp_casefile_refuse(f, "A_log", e, "goes with a raw gate that has parameters");
    if (f->beta_hi < f->beta_lo && dp_casefile_has(f, "beta_hi") && f->beta == DP_BETA_PLAIN)
        return dp_casefile_refuse(f, "beta_hi", e, "below beta_lo = %g", c->spec.beta_lo);
    if ((f->gate == DP_GATE_LOWER_BOUND) != dp_casefile_has(f, "lower_bound"))
        return dp_casefile_refuse(f, "lower_bound", e,
                                  dp_casefile_has(f, "lower_bound")
                                      ? "goes with gate = lower_bound only"
                                      : "missing; gate = lower_bound needs it");
    if (f->dstate && !f->backward)
        return dp_casefile_refuse(f, "dstate", e, "goes with backward = yes");
    if (dp_casefile_has(f, "gate_params") && f->gate == DP_GATE_LOG)
        return dp_casefile_refuse(f, "gate_params", e, "gate = log has no parameters");
    return DP_OK;
}

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

static dp_status set_cu(const dp_casefile *f, int64_t T, const dp_tensor *from_data, int64_t **cu,
                        int *Nseq, dp_err *e) {
    int64_t whole[2] = {0, T};
    dp_ints list = dp_casefile_has(f, "cu_seqlens") ? f->cu_seqlens : (dp_ints){2, whole};
    if (from_data && !dp_casefile_has(f, "cu_seqlens")) list = (dp_ints){(int)from_data->n, NULL};
    if (!list.v && from_data->dtype[0] != 'I')
        return dp_casefile_refuse(
            f, "data", e, "tensor cu_seqlens: dtype %s, must be an integer type", from_data->dtype);
    *Nseq = list.n - 1;
    *cu = dp_calloc((size_t)list.n, sizeof **cu);
    for (int i = 0; i < list.n; i++)
        (*cu)[i] = list.v ? list.v[i] : (int64_t)from_data->data[i];
    if (list.n < 2)
        return dp_casefile_refuse(f, "cu_seqlens", e, "has %d entries, at least 0,T", list.n);
    if ((*cu)[0])
        return dp_casefile_refuse(f, "cu_seqlens", e, "must begin with 0, not %lld",
                                  (long long)(*cu)[0]);
    for (int i = 1; i < list.n; i++)
        if ((*cu)[i] < (*cu)[i - 1])
            return dp_casefile_refuse(f, "cu_seqlens", e,
                                      "entry %d, %lld, is below the one before it, %lld", i,
                                      (long long)(*cu)[i], (long long)(*cu)[i - 1]);
    if (T && (*cu)[list.n - 1] != T)
        return dp_casefile_refuse(f, "cu_seqlens", e, "must end at T = %lld, not %lld",
                                  (long long)T, (long long)(*cu)[list.n - 1]);
    return DP_OK;
}

static dp_status check_ranks(const dp_casefile *f, int64_t T, dp_err *e) {
    for (int i = 0; T && i < f->ranks.n; i++)
        if (T % f->ranks.v[i])
            return dp_casefile_refuse(f, "ranks", e, "T = %lld is not divisible by %lld",
                                      (long long)T, (long long)f->ranks.v[i]);
    return DP_OK;
}

/* ---- shapes of data -------------------------------------------------------------------------- */

static int64_t dim_from_end(const dp_tensor *t, int i) {
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

static int same_shape(const dp_tensor *t, const slot *s, int64_t T) {
    int64_t want[4] = {0};
    for (int i = 0; i < s->ndim; i++)
        want[i] = i == 0 && s->tokens ? T : s->shape[i];
    return dp_case_same_shape(t, s->ndim, want, s->param);
}

static const dp_tensor *find_slot(const dp_tensorfile *d, const slot *s) {
    const dp_tensor *t = dp_tensor_find(d, s->name);
    return t || !s->alias ? t : dp_tensor_find(d, s->alias);
}

/* 0 (absent) unless the tensors are there and not degenerate: load_data refuses those by name. */
static dp_status recurrence_shape(const dp_casefile *f, const dp_tensorfile *d, dp_problem *p,
                                  int64_t *Tdata, dp_err *e) {
    const dp_tensor *q = d ? dp_tensor_find(d, "q") : NULL, *v = d ? dp_tensor_find(d, "v") : NULL;
    int64_t H = 0, HV = 0, K = 0, V = 0,
            Hq = q && q->ndim >= 3 ? dim_from_end(q, 2)
                 : q               ? 1
                                   : 0,
            Vaxes = f->R > 1 ? 4 : 3;
    int64_t HVv = v && v->ndim >= Vaxes ? dim_from_end(v, (int)Vaxes - 1) : v ? 1 : 0;
    dp_status s = agree(f, "K", f->K, dim_from_end(q, 1), 0, &K, e);
    if (!s) s = agree(f, "H", f->H, Hq, 1, &H, e);
    if (!s) s = agree(f, "HV", f->HV, HVv, H, &HV, e);
    if (!s) s = agree(f, "V", f->V, dim_from_end(v, 1), K, &V, e);
    if (s) return s;
    if (d &&
        (!q || !v || !q->n || !v->n || !K || !V || K > 4096 || V > 4096 || H > 4096 || HV > 4096))
        return dp_casefile_refuse(
            f, "data", e,
            "tensors q and v must be there, not empty, with head counts and widths up to 4096");
    if (q && q->ndim < 2) {
        char shape[128];
        dp_case_shape_text(q, shape, sizeof shape);
        return dp_casefile_refuse(f, "data", e, "tensor q: shape %s, must be [T,H,K]", shape);
    }
    *Tdata = q ? q->n / (H * K) : 0;
    p->K = (int)K;
    p->H = (int)H;
    p->HV = (int)HV;
    p->V = (int)V;
    p->R = (int)f->R;
    if (HV % H)
        return dp_casefile_refuse(f, "HV", e, "must be a multiple of H = %lld", (long long)H);
    if (f->R > 1 && f->op != DP_MKDA)
        return dp_casefile_refuse(f, "R", e, "only mkda has more than one key a token");
    return set_tokens(f, *Tdata, &p->T, e);
}

static dp_status conv_shape(const dp_casefile *f, const dp_tensorfile *d, dp_conv *c,
                            int64_t *Tdata, dp_err *e) {
    const slot ws = {.name = "w", .alias = "weight"};
    const dp_tensor *x = d ? dp_tensor_find(d, "x") : NULL, *w = d ? find_slot(d, &ws) : NULL;
    int64_t D = 0, W = 0;
    dp_status s = agree(f, "D", f->D, dim_from_end(x, 1), 0, &D, e);
    if (!s) s = agree(f, "W", f->W, dim_from_end(w, 1), 0, &W, e);
    if (s) return s;
    if (d && (!x || !w || !x->n || !w->n || !D || !W || D > 65536 || W > MAX_WIDTH))
        return dp_casefile_refuse(
            f, "data", e,
            "tensors x and w must be there, not empty, with D up to 65536 and W up to %d",
            MAX_WIDTH);
    *Tdata = x ? x->n / D : 0;
    c->D = (int)D;
    c->W = (int)W;
    c->silu = (int)f->activation;
    return set_tokens(f, *Tdata, &c->T, e);
}

/* ---- loading --------------------------------------------------------------------------------- */

static dp_format format_of(const dp_tensor *t) {
    return !strcmp(t->dtype, "BF16") ? DP_BF16 : !strcmp(t->dtype, "F64") ? DP_FP64 : DP_FP32;
}
static dp_format wider(dp_format a, dp_format b) {
    return a == DP_FP64 || b == DP_FP64   ? DP_FP64
           : a == DP_FP32 || b == DP_FP32 ? DP_FP32
                                          : DP_BF16;
}

static int required(const char *name) {
    return !strcmp(name, "q") || !strcmp(name, "k") || !strcmp(name, "v") || !strcmp(name, "g") ||
           !strcmp(name, "beta") || !strcmp(name, "x") || !strcmp(name, "w");
}

static dp_status load_slot(const dp_casefile *f, const dp_tensorfile *d, slot *s, int64_t Tdata,
                           dp_format *widest, dp_err *e) {
    char have[128], want[128] = "", *at = want;
    const dp_tensor *t = find_slot(d, s);
    if (!t && required(s->name))
        return dp_casefile_refuse(f, "data", e, "tensor %s is missing", s->name);
    if (!t) return DP_OK;
    if (t->dtype[0] == 'I')
        return dp_casefile_refuse(f, "data", e, "tensor %s: dtype %s, must be a floating type",
                                  s->name, t->dtype);
    if (!same_shape(t, s, Tdata)) {
        for (int i = 0; i < s->ndim; i++)
            at += sprintf(at, "%s%lld", i ? "," : "",
                          (long long)(i == 0 && s->tokens ? Tdata : s->shape[i]));
        dp_case_shape_text(t, have, sizeof have);
        return dp_casefile_refuse(f, "data", e, "tensor %s: shape %s, the case needs [%s]", t->name,
                                  have, want);
    }
    free(*s->where);
    *s->where = dp_copy(t->data, count(s));
    if (!s->param) *widest = wider(*widest, format_of(t));
    return DP_OK;
}

static dp_status unknown_tensor(const dp_casefile *f, const char *key, const char *name,
                                const slot *s, int n, dp_err *e) {
    char all[256] = "";
    for (int j = 0, at = 0; j < n; j++)
        at += snprintf(all + at, sizeof all - (size_t)at, " %s%s%s", s[j].name,
                       s[j].alias ? " or " : "", s[j].alias ? s[j].alias : "");
    return dp_casefile_refuse(f, key, e, "tensor %.60s is no input of op = %s; known:%s", name,
                              dp_casefile_op_name(f), all);
}

/* Results that a recording may hold beside its inputs; they are not read. */
static int is_result(const char *name) {
    static const char *const more[] = {"y", "dx", "dw", "dbias"};
    if (dp_result_find(name) >= 0) return 1;
    for (size_t i = 0; i < sizeof more / sizeof *more; i++)
        if (!strcmp(name, more[i])) return 1;
    return 0;
}

/* Every tensor is an input of this op, once: a name that is written wrong would be an input that is
 * silently absent. key: data or conv_data. */
static dp_status check_names(const dp_casefile *f, const char *key, const dp_tensorfile *d,
                             const slot *s, int n, dp_err *e) {
    for (int i = 0; i < d->ntensor; i++) {
        const char *name = d->tensor[i].name;
        int known = !strcmp(name, "cu_seqlens") || is_result(name);
        for (int j = 0; j < n; j++)
            known |= !strcmp(name, s[j].name) || (s[j].alias && !strcmp(name, s[j].alias));
        if (!known) return unknown_tensor(f, key, name, s, n, e);
    }
    for (int j = 0; j < n; j++)
        if (s[j].alias && dp_tensor_find(d, s[j].name) && dp_tensor_find(d, s[j].alias))
            return dp_casefile_refuse(f, key, e, "holds the same tensor under two names, %s and %s",
                                      s[j].name, s[j].alias);
    return DP_OK;
}

static dp_status load_data(const dp_casefile *f, const dp_tensorfile *d, dp_case *c, int64_t Tdata,
                           dp_err *e) {
    slot s[MAX_SLOTS];
    const int n = slots(c, s), gradients = c->backward;
    dp_format widest = DP_BF16;
    const dp_status known = check_names(f, "data", d, s, n, e);
    if (known) return known;
    for (int i = 0; i < n; i++) {
        const int gradient =
            !strcmp(s[i].name, "do") || !strcmp(s[i].name, "dy") || !strcmp(s[i].name, "dstate");
        if (gradient && !gradients) continue;
        dp_status st = load_slot(f, d, &s[i], Tdata, &widest, e);
        if (st) return st;
    }
    if (c->op != DP_OP_CONV && f->gate == DP_GATE_LOG && (c->p.A_log || c->p.dt_bias))
        return dp_casefile_refuse(f, "data", e,
                                  "has A_log or dt_bias, so its gate is raw, but gate = log");
    if (dp_casefile_has(f, "dtype") && FLOATS[f->dtype] != widest)
        return dp_casefile_refuse(f, "dtype", e, "%s has %s tensors", f->data,
                                  dp_formats[widest].name);
    c->input_dtype = c->spec.dtype = widest;
    return DP_OK;
}

static void alloc_slot(slot *s, int wanted) {
    if (wanted && !*s->where) *s->where = dp_doubles(count(s));
}

/* Gradients of the outputs: those that data did not bring are generated. */
static void fill_missing_gradients(dp_case *c, int dstate) {
    if (!c->backward) return;
    if (c->op == DP_OP_CONV) {
        if (c->conv.dy) return;
        c->conv.dy = dp_doubles(c->conv.T * c->conv.D);
        dp_inputs_fill_conv_dy(&c->conv, &c->spec);
        return;
    }
    dp_problem made = c->p;
    made.dout = c->p.dout ? NULL : dp_doubles(c->p.T * c->p.HV * c->p.V);
    made.dstate =
        c->p.dstate || !dstate ? NULL : dp_doubles((int64_t)c->p.Nseq * c->p.HV * c->p.K * c->p.V);
    dp_inputs_fill_gradients(&made, &c->spec);
    if (made.dout) c->p.dout = made.dout;
    if (made.dstate) c->p.dstate = made.dstate;
}

static void generate(const dp_casefile *f, dp_case *c) {
    slot s[MAX_SLOTS];
    const int n = slots(c, s), raw = f->gate != DP_GATE_LOG && f->gate_params;
    for (int i = 0; i < n; i++) {
        const char *name = s[i].name;
        const int gate = !strcmp(name, "A_log") || !strcmp(name, "dt_bias"),
                  bias = !strcmp(name, "bias");
        alloc_slot(&s[i], required(name) || (gate && raw) || (bias && f->bias) ||
                              (!strcmp(name, "s0") && f->s0_scale > 0));
    }
    if (c->op == DP_OP_CONV)
        dp_inputs_fill_conv(&c->conv, &c->spec);
    else
        dp_inputs_fill(&c->p, &c->spec);
}

/* ---- poke ------------------------------------------------------------------------------------ */

static dp_status poke_index(const dp_casefile *f, const char **p, const slot *s, int64_t *lo,
                            int64_t *hi, dp_err *e) {
    const char *begin = *p;
    int d = 0;
    for (++*p; d < s->ndim; d++) {
        char *end;
        errno = 0;
        while (**p == ' ')
            ++*p;
        lo[d] = strtoll(*p, &end, 10);
        const int all = **p == '*';
        if (all) {
            lo[d] = 0;
            end = (char *)*p + 1;
        }

        if (end == *p || errno || lo[d] < 0 || lo[d] >= s->shape[d])
            return dp_casefile_refuse(f, "poke", e, "index %d of %s at '%.40s' is not in 0..%lld",
                                      d, s->name, begin, (long long)s->shape[d] - 1);
        hi[d] = all ? s->shape[d] : lo[d] + 1;
        *p = end;
        if (d + 1 == s->ndim) continue;
        if (**p != ',') break;
        ++*p;
    }
    if (d != s->ndim || **p != ']')
        return dp_casefile_refuse(f, "poke", e, "%s takes %d indices, at '%.40s'", s->name, s->ndim,
                                  begin);
    ++*p;
    return DP_OK;
}

static int representable(double x, dp_format f) {
    const double y = f == DP_BF16 ? dp_bf16d(x) : f == DP_FP32 ? dp_fp32(x) : x;
    return isnan(x) ? 1 : y == x;
}

static void poke_range(slot *s, const int64_t *lo, const int64_t *hi, double x) {
    int64_t i[4] = {0}, n = 1;
    for (int d = 0; d < 4; d++)
        n *= d < s->ndim ? hi[d] - lo[d] : 1;
    for (int64_t k = 0; k < n; k++) {
        int64_t rest = k, at = 0;
        for (int d = s->ndim; d-- > 0; rest /= hi[d] - lo[d])
            i[d] = lo[d] + rest % (hi[d] - lo[d]);
        for (int d = 0; d < s->ndim; d++)
            at = at * s->shape[d] + i[d];
        (*s->where)[at] = x;
    }
}

/* One `name[i,j,..] value`; *p moves past it. */
static dp_status poke_one(const dp_casefile *f, dp_case *c, const char **p, dp_err *e) {
    slot s[MAX_SLOTS], *hit = NULL;
    const char *begin = *p;
    const size_t len = strcspn(*p, "[ ,");
    int64_t lo[4], hi[4];
    const int n = slots(c, s);
    for (int i = 0; i < n; i++)
        if (strlen(s[i].name) == len && !strncmp(s[i].name, begin, len)) hit = &s[i];
    if (!hit || !*hit->where)
        return dp_casefile_refuse(f, "poke", e, "no tensor of this case at '%.40s'", begin);
    *p += len;
    if (**p != '[')
        return dp_casefile_refuse(f, "poke", e, "expected name[index] value at '%.40s'", begin);
    dp_status st = poke_index(f, p, hit, lo, hi, e);
    if (st) return st;
    const char *end;
    double x;
    const dp_number read = dp_number_real_prefix(*p + strspn(*p, " \t"), &x, &end);
    if (read == DP_NUMBER_NONE)
        return dp_casefile_refuse(f, "poke", e, "no value after the index at '%.40s'", begin);
    if (read == DP_NUMBER_RANGE)
        return dp_casefile_refuse(f, "poke", e,
                                  "the value at '%.40s' is not a number that fp64 holds", begin);
    const dp_format fmt = !hit->param                 ? c->input_dtype
                          : c->input_dtype == DP_FP64 ? DP_FP64
                                                      : DP_FP32;
    if (!representable(x, fmt))
        return dp_casefile_refuse(f, "poke", e, "%a at '%.40s' is not a number of %s", x, begin,
                                  dp_formats[fmt].name);
    for (*p = end; **p == ' ';)
        ++*p;
    if (**p && **p != ',') return dp_casefile_refuse(f, "poke", e, "trailing '%.40s'", *p);
    poke_range(hit, lo, hi, x);
    return DP_OK;
}

static dp_status poke(const dp_casefile *f, dp_case *c, dp_err *e) {
    dp_status s = DP_OK;
    for (const char *p = f->poke; !s && p && *p;) {
        while (*p == ' ' || *p == '\t')
            p++;
        s = poke_one(f, c, &p, e);
        if (!s && *p == ',' && !*++p) s = dp_casefile_refuse(f, "poke", e, "ends with a comma");
    }
    return s;
}

/* ---- checks of values ------------------------------------------------------------------------ */

static dp_status check_values(const dp_casefile *f, dp_case *c, dp_err *e) {
    slot s[MAX_SLOTS];
    const int n = slots(c, s);
    for (int i = 0; i < n && !c->allow_nonfinite; i++)
        for (int64_t j = 0; *s[i].where && j < count(&s[i]); j++)
            if (!isfinite((*s[i].where)[j])) {
                char at[96];
                index_text(&s[i], j, at, sizeof at);
                return dp_casefile_refuse(f, f->data ? "data" : "poke", e,
                                          "%s%s = %g: not finite, and nonfinite = allow is not set",
                                          s[i].name, at, (*s[i].where)[j]);
            }
    if (c->op == DP_OP_CONV) return DP_OK;
    dp_err inner = {0};
    if (dp_problem_check(&c->p, c->allow_nonfinite, &inner))
        return dp_fail(e, inner.code, "%s: %s", f->path, inner.msg);
    return DP_OK;
}

static double active_beta(const dp_problem *p, double b) {
    return p->beta_form == DP_BETA_PLAIN
               ? b
               : (p->beta_form == DP_BETA_SIGMOID2 ? 2 : 1) / (1 + dp_exp(-b));
}

static double active_write(const dp_problem *p, int64_t t,
                           int hv) { /* sum_j beta_j |k_j|^2 as the step sees it */
    double sum = 0;
    for (int j = 0; j < p->R; j++) {
        const double *k = p->k + ((t * p->H + hv / dp_G(p)) * p->R + j) * p->K;
        double n = 0;
        for (int i = 0; i < p->K; i++)
            n += k[i] * k[i];
        sum += active_beta(p, p->beta[(t * p->HV + hv) * p->R + j]) *
               (p->l2norm ? n / (n + DP_L2_EPS) : n);
    }
    return sum;
}

/* math.md b: sum_j beta_j |k_j|^2 <= 2 makes a step a contraction. Above it the eigenvalues of k'
 * diag(beta) k decide. */
static void warn_expanding(dp_case *c) {
    const dp_problem *p = &c->p;
    int64_t n = 0, where = 0;
    double worst = 0;
    for (int64_t i = 0; p->R >= 3 && i < p->T * p->HV; i++) {
        const double w = active_write(p, i / p->HV, (int)(i % p->HV));
        n += w > 2;
        if (w > worst) {
            worst = w;
            where = i;
        }
    }
    if (n)
        warn(c,
             "%s: R = %d: sum of beta |k|^2 = %.3g > 2 at token %lld, head %lld (and at %lld of "
             "%lld): the state may grow without bound",
             c->path, p->R, worst, (long long)(where / p->HV), (long long)(where % p->HV),
             (long long)n, (long long)(p->T * p->HV));
}

/* ---- opening --------------------------------------------------------------------------------- */

static dp_status check_size(const dp_casefile *f, dp_case *c, dp_err *e) {
    slot s[MAX_SLOTS];
    const int n = slots(c, s);
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

static char *sibling(const char *path, const char *name) { /* name relative to the folder of path */
    const char *slash = strrchr(path, '/');
    const size_t dir = slash && *name != '/' ? (size_t)(slash - path) + 1 : 0;
    char *out = dp_calloc(dir + strlen(name) + 1, 1);
    memcpy(out, path, dir);
    strcpy(out + dir, name);
    return out;
}

/* ---- op step --------------------------------------------------------------------------------- */

/* x and w of the one convolution, in place of what stands for its output. */
static dp_status step_data(const dp_casefile *f, dp_case *c, double **x, int D, dp_conv *v,
                           dp_err *e) {
    dp_tensorfile d;
    dp_conv shape = {.T = c->p.T, .D = D};
    slot s[MAX_SLOTS] = {0};
    char *path = sibling(c->path, f->conv_data);
    dp_status st = dp_safetensors_read(path, &d, e);
    free(path);
    if (st) return st;
    const slot ws = {.name = "w", .alias = "weight"};
    const dp_tensor *tx = dp_tensor_find(&d, "x"), *tw = find_slot(&d, &ws);
    if (!tx || !tw || dim_from_end(tx, 1) != D || tx->n / D < c->p.T || dim_from_end(tw, 1) < 1 ||
        tw->n != D * dim_from_end(tw, 1))
        st = dp_casefile_refuse(f, "conv_data", e, "needs x [%lld or more,%d] and w [%d,W]",
                                (long long)c->p.T, D, D);
    if (!st && dim_from_end(tw, 1) > MAX_WIDTH)
        st = dp_casefile_refuse(f, "conv_data", e, "tensor %s: width %lld, at most %d", tw->name,
                                (long long)dim_from_end(tw, 1), MAX_WIDTH);
    if (!st && f->W && f->W != dim_from_end(tw, 1))
        st = dp_casefile_refuse(f, "W", e, "%s has %lld", f->conv_data,
                                (long long)dim_from_end(tw, 1));
    dp_format widest = c->input_dtype;
    if (!st) {
        shape.W = (int)dim_from_end(tw, 1);
        const int n = conv_slots(&shape, s);
        st = check_names(f, "conv_data", &d, s, n, e);
        for (int i = 0; i < n && !st; i++)
            if (strcmp(s[i].name, "dy")) st = load_slot(f, &d, &s[i], tx->n / D, &widest, e);
    }
    if (st)
        dp_conv_free(&shape);
    else {
        free(*x);
        *x = shape.x;
        v->w = shape.w;
        v->bias = shape.bias;
        v->W = shape.W;
    }

    c->input_dtype = widest;
    dp_tensorfile_free(&d);
    return st;
}

static dp_status step(const dp_casefile *f, dp_case *c, dp_err *e) {
    dp_problem *p = &c->p;
    double **const x[] = {&p->q, &p->k, &p->v};
    if (f->conv_data && f->conv.n != 1)
        return dp_casefile_refuse(f, "conv_data", e,
                                  "goes with one convolution, conv = q, k or v, not %d", f->conv.n);
    if (!f->conv_data && !f->W)
        return dp_casefile_refuse(f, "W", e, "missing; required unless conv_data gives it");
    for (int n = 0; n < f->conv.n; n++) {
        const int i = (int)f->conv.v[n], D = dp_qkv_heads(p, i) * dp_qkv_width(p, i);
        dp_conv *v = &c->step.conv[i];
        dp_inputs_spec law = c->spec;
        law.seed += 1 + (uint64_t)i;
        v->T = p->T;
        v->D = D;
        v->W = (int)f->W;
        v->silu = (int)f->activation;
        c->step.on[i] = 1;
        if (f->conv_data) {
            const dp_status st = step_data(f, c, x[i], D, v, e);
            if (st) return st;
            continue;
        }
        v->w = dp_doubles((int64_t)D * v->W);
        v->bias = f->bias ? dp_doubles(D) : NULL;
        dp_inputs_fill_conv(v, &law);
    }
    return dp_step_build(c, e);
}

/* given: the tensors, already read; NULL: those of the file that the case names, if any. */
static dp_status open_tensors(const dp_casefile *f, dp_case *c, int load,
                              const dp_tensorfile *given, dp_err *e) {
    dp_tensorfile d = {0};
    const dp_tensorfile *have = given ? given : load && c->data ? &d : NULL;
    const int conv = c->op == DP_OP_CONV;
    int64_t Tdata = 0;
    dp_status s = have == &d ? dp_safetensors_read(c->data, &d, e) : DP_OK;
    if (!s)
        s = conv ? conv_shape(f, have, &c->conv, &Tdata, e)
                 : recurrence_shape(f, have, &c->p, &Tdata, e);
    const int64_t T = conv ? c->conv.T : c->p.T;
    if (!s)
        s = set_cu(f, T, have ? dp_tensor_find(have, "cu_seqlens") : NULL,
                   conv ? &c->conv.cu : &c->p.cu, conv ? &c->conv.Nseq : &c->p.Nseq, e);
    if (!s) s = check_ranks(f, T, e);
    if (!s) s = check_size(f, c, e);
    if (!s && load) {
        if (have)
            s = load_data(f, have, c, Tdata, e);
        else
            generate(f, c);
        if (!s) fill_missing_gradients(c, (int)f->dstate);
        if (!s) s = poke(f, c, e);
        if (!s) s = check_values(f, c, e);
        if (!s && c->op == DP_OP_STEP) s = step(f, c, e);
        if (!s && !conv) warn_expanding(c);
    }
    dp_tensorfile_free(&d);
    return s;
}

static void recurrence_settings(const dp_casefile *f, dp_problem *p) {
    p->model = f->op <= DP_MKDA ? (dp_model)f->op : DP_KDA;
    p->gate = (dp_gate)f->gate;
    p->lower_bound = f->lower_bound;
    p->beta_form = (dp_beta)f->beta;
    p->l2norm = (int)f->l2norm;
}

static dp_status build(const dp_casefile *f, dp_case *c, int load, const dp_tensorfile *given,
                       dp_err *e) {
    dp_status s = settings(f, c, e);
    if (s) return s;
    if (c->op == DP_OP_CHAIN) {
        c->ch.regime = (dp_regime)f->regime;
        c->ch.n = (int)f->chunks;
        c->ch.K = (int)f->K;
        if (!f->K) return dp_casefile_refuse(f, "K", e, "missing; key width");
        if ((double)f->chunks * f->K * f->K > (double)MAX_NUMBERS)
            return dp_casefile_refuse(f, "chunks", e, "the factors hold more than %lld numbers",
                                      MAX_NUMBERS);
        return DP_OK;
    }
    recurrence_settings(f, &c->p);
    s = open_tensors(f, c, load, given, e);
    c->p.scale = dp_casefile_has(f, "scale") ? f->scale : c->p.K ? 1 / sqrt(c->p.K) : 0;
    return s;
}

static char *stem(const char *path) {
    const char *slash = strrchr(path, '/');
    char *out = strdup(slash ? slash + 1 : path);
    const size_t n = strlen(out);
    if (n > 5 && !strcmp(out + n - 5, ".case")) out[n - 5] = 0;
    return out;
}

dp_status dp_case_parse(const char *text, size_t len, const char *path, int load, dp_case *c,
                        dp_err *e) {
    dp_casefile f;
    memset(c, 0, sizeof *c);
    dp_status s = dp_casefile_parse(text, len, path, &f, e);
    if (s) return s;
    c->path = strdup(path);
    c->name = stem(path);
    if (f.data) c->data = sibling(path, f.data);
    s = build(&f, c, load, NULL, e);
    dp_casefile_free(&f);
    if (s) dp_case_free(c);
    return s;
}

dp_status dp_case_from_tensors(const char *text, const dp_tensorfile *d, dp_case *c, dp_err *e) {
    dp_casefile f;
    memset(c, 0, sizeof *c);
    dp_status s = dp_casefile_parse(text, strlen(text), d->path, &f, e);
    if (s) return s;
    memset(f.line, 0, sizeof f.line); /* the text is no file that a message could point into */
    f.data = strdup(d->path);
    c->path = strdup(d->path);
    c->name = stem(d->path);
    c->data = strdup(d->path);
    s = build(&f, c, 1, d, e);
    dp_casefile_free(&f);
    if (s) dp_case_free(c);
    return s;
}

dp_status dp_case_open(const char *path, int load, dp_case *c, dp_err *e) {
    memset(c, 0, sizeof *c);
    char *text;
    size_t n;
    dp_status s = dp_input_read(path, DP_CASEFILE_MAX_BYTES, &text, &n, e);
    if (s) return s;
    s = dp_case_parse(text, n, path, load, c, e);
    free(text);
    return s;
}

dp_status dp_case_load(const char *path, dp_case *c, dp_err *e) {
    return dp_case_open(path, 1, c, e);
}

void dp_case_free(dp_case *c) {
    for (int i = 0; i < c->nwarn; i++)
        free(c->warn[i]);
    free(c->warn);
    free(c->name);
    free(c->path);
    free(c->reason);
    free(c->source);
    free(c->data);
    dp_problem_free(&c->p);
    dp_conv_free(&c->conv);
    dp_step_free(c);
    memset(c, 0, sizeof *c);
}

/* ---- folders --------------------------------------------------------------------------------- */

char *dp_case_path(const char *dir, const char *name) {
    char *p;
    struct stat st;
    if (stat(name, &st) == 0 && S_ISREG(st.st_mode)) return strdup(name);
    if (asprintf(&p, "%s/%s.case", dir, name) < 0) abort();
    return p;
}

int dp_case_most_ranks(const dp_case *c, int most) {
    int n = 1;
    for (int i = 0; i < c->nranks; i++)
        if (c->ranks[i] > n && c->ranks[i] <= most) n = c->ranks[i];
    return n;
}

static int is_case(const struct dirent *d) {
    const size_t n = strlen(d->d_name);
    return n > 5 && !strcmp(d->d_name + n - 5, ".case");
}

static int by_bytes(const struct dirent **a, const struct dirent **b) {
    return strcmp((*a)->d_name, (*b)->d_name);
}

dp_status dp_case_find_all(const char *dir, char ***paths, int *n, dp_err *e) {
    struct dirent **d;
    *paths = NULL;
    *n = 0;
    const int found = scandir(dir, &d, is_case, by_bytes);
    if (found < 0) return dp_fail(e, DP_EIO, "%s: cannot be listed: %s", dir, strerror(errno));
    *paths = dp_calloc((size_t)found, sizeof **paths);
    for (int i = 0; i < found; i++) {
        const char *name = d[i]->d_name;
        if (dp_text_good(name, strlen(name), 0) < strlen(name))
            dp_fail(e, DP_EINPUT, "%s/%s: the name is not UTF-8 text: give the case another", dir,
                    name);
        if (asprintf(&(*paths)[i], "%s/%s", dir, name) < 0) abort();
        free(d[i]);
    }
    free(d);
    if (!found) dp_fail(e, DP_EINPUT, "%s: no *.case file here", dir);
    *n = found;
    if (!e->code) return DP_OK;
    for (; *n; --*n)
        free((*paths)[*n - 1]);
    free(*paths);
    *paths = NULL;
    return e->code;
}

int dp_select(int ncase, const int *in_case, int nwant, const int *want, int *out) {
    int n = 0;
    for (int i = 0; i < ncase; i++) {
        int keep = nwant == 0;
        for (int j = 0; j < nwant; j++)
            keep |= want[j] == in_case[i];
        if (keep) out[n++] = in_case[i];
    }
    return n;
}
