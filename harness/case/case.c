/* A case from its text: settings, shapes, inputs, checks, one after the other (case.h). */
#include "case.h"
#include "case_parts.h"
#include "harness/base/home.h"
#include "operations.h"
#include "ref/chunk/gate.h"
#include "ref/files/input.h"
#include "ref/vocabulary/design.h"
#include "ref/vocabulary/recurrence_text.h"
#include "ref/vocabulary/text.h"

#include <dirent.h>
#include <errno.h>
#include <math.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

/* ---- where case files lie -------------------------------------------------------------------- */

char *dp_case_sibling(const char *path, const char *name) {
    const size_t dir = *name != '/' ? (size_t)(dp_base_name(path) - path) : 0;
    char *out = dp_calloc(dir + strlen(name) + 1, 1);
    memcpy(out, path, dir);
    strcpy(out + dir, name);
    return out;
}

char *dp_case_path(const char *dir, const char *name) {
    struct stat st;
    const int is_file = stat(name, &st) == 0 && S_ISREG(st.st_mode);
    return is_file ? dp_strdup(name) : dp_text_new("%s/%s.case", dir, name);
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
        (*paths)[i] = dp_text_new("%s/%s", dir, name);
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

/* ---- the selected runs of a case ------------------------------------------------------------- */

int dp_case_most_ranks(const dp_case *c, int most) {
    int n = 1;
    for (int i = 0; i < c->nranks; i++)
        if (c->ranks[i] > n && c->ranks[i] <= most) n = c->ranks[i];
    return n;
}

/* ---- settings -------------------------------------------------------------------------------- */

/* The format of the key dtype. */
static dp_format case_dtype(const dp_casefile *f) {
    static const dp_format order[] = {DP_FP64, DP_FP32, DP_BF16}; /* of the key's choices */
    return order[f->dtype];
}

static dp_inputs_spec spec_of(const dp_casefile *f) {
    const int raw_g = f->gate != DP_GATE_LOG, raw_b = f->beta != DP_BETA_PLAIN;
    return (dp_inputs_spec){.seed = (uint64_t)f->seed,
                            .dtype = dp_casefile_has(f, "dtype") ? case_dtype(f) : DP_BF16,
                            .keys = (dp_keys)f->keys,
                            .g_scale = dp_casefile_has(f, "g_scale") ? f->g_scale
                                       : raw_g                       ? 1
                                                                     : 0.1,
                            .g_mean = f->g_mean,
                            .g_least = f->g_least,
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
                                     .k_scale = f->k_scale,
                                     .v_scale = f->v_scale,
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

static void copy_lists(const dp_casefile *f, dp_case *c) {
    for (int i = 0; i < f->ranks.n; i++)
        c->ranks[c->nranks++] = (int)f->ranks.v[i];
    for (int i = 0; i < f->ranks.n; i++)
        c->all_chains[i] = !f->chain_ranks.n || one_of(&f->chain_ranks, f->ranks.v[i]);
    for (int i = 0; i < f->base.n; i++)
        c->base[c->nbase++] = (dp_base)f->base.v[i];
    for (int i = 0; i < f->chain.n; i++)
        c->chain[c->nchain++] = (dp_format)f->chain.v[i];
    for (int i = 0; i < f->merge.n; i++)
        c->merge[c->nmerge++] = (dp_exchange)f->merge.v[i];
    for (int i = 0; i < f->payload.n; i++)
        c->payload[c->npayload++] = (dp_payload)f->payload.v[i];
    for (int i = 0; i < f->own.n; i++)
        c->own[c->nown++] = (dp_own)f->own.v[i];
}

static dp_status check_inputs(const dp_casefile *f, const dp_case *c, dp_err *e) {
    for (int i = 0; i < f->chain_ranks.n; i++)
        if (!one_of(&f->ranks, f->chain_ranks.v[i]))
            return dp_casefile_refuse(f, "chain_ranks", e, "%lld is not one of ranks",
                                      (long long)f->chain_ranks.v[i]);
    if (f->v_ties && c->spec.dtype == DP_BF16)
        return dp_casefile_refuse(
            f, "v_ties", e, "bf16 inputs cannot lie between numbers of bf16: set dtype = fp32");
    if (c->op->has_front && dp_by_rows(&c->p))
        return dp_casefile_refuse(f, "op", e,
                                  "convolutions go before kda alone: no bound carries their "
                                  "errors through the rows of %s",
                                  c->op_name);
    if (!dp_has_beta(&c->p) && f->beta != DP_BETA_PLAIN)
        return dp_casefile_refuse(f, "beta", e, "op = %s has %s in place of beta", c->op_name,
                                  dp_strengths[dp_model_of(&c->p)->strength]);
    for (int i = 0; i < 2 && !dp_erases(&c->p); i++) {
        const char *const unused[] = {"beta_lo", "beta_hi"};
        if (dp_casefile_has(f, unused[i]))
            return dp_casefile_refuse(f, unused[i], e, "op = %s erases nothing", c->op_name);
    }
    if (!dp_has_beta(&c->p) && f->beta_decades > 0)
        return dp_casefile_refuse(f, "beta_decades", e, "op = %s has no beta", c->op_name);
    if (f->beta_decades > 0 && f->beta != DP_BETA_PLAIN)
        return dp_casefile_refuse(f, "beta_decades", e, "goes with beta = plain");
    if (f->g_least != 0 && f->gate != DP_GATE_LOG)
        return dp_casefile_refuse(f, "g_least", e, "goes with gate = log");
    const char *no = f->keys == DP_KEYS_EXACT ? dp_inputs_exact_refuses(&c->p) : NULL;
    if (no) return dp_casefile_refuse(f, "keys", e, "%s has no exact inputs: %s", c->op_name, no);
    if (f->keys == DP_KEYS_MOVED && f->op != DP_KDA)
        return dp_casefile_refuse(f, "keys", e, "moved goes with op = kda");
    if (f->keys == DP_KEYS_MOVED && f->K % 2)
        return dp_casefile_refuse(f, "keys", e, "moved needs two halves of K channels");
    if (dp_casefile_has(f, "A_log") && (f->gate == DP_GATE_LOG || !f->gate_params))
        return dp_casefile_refuse(f, "A_log", e, "goes with a raw gate that has parameters");
    if (f->beta_hi < f->beta_lo && dp_casefile_has(f, "beta_hi") && f->beta == DP_BETA_PLAIN)
        return dp_casefile_refuse(f, "beta_hi", e, "below beta_lo = %g", c->spec.beta_lo);
    return DP_OK;
}

static int is_of_ranks(const char *name) {
    static const char *const names[] = {"M", "H", "S_in", "dM", "dH", "dS_out"};
    for (size_t i = 0; i < sizeof names / sizeof *names; i++)
        if (!strcmp(name, names[i])) return 1;
    return 0;
}

/* Names of tensors, and a reason. */
static dp_status check_unjudged(const dp_casefile *f, dp_err *e) {
    const char *s = f->unjudged, *colon = s ? strchr(s, ':') : NULL;
    if (!s) return DP_OK;
    if (!colon || !colon[1 + strspn(colon + 1, " ")])
        return dp_casefile_refuse(f, "unjudged", e, "must be NAMES: REASON");
    char name[40];
    while ((s = dp_next_name(s, name, sizeof name)))
        if (dp_result_find(name) < 0 && !is_of_ranks(name))
            return dp_casefile_refuse(f, "unjudged", e, "'%s' is no tensor", name);
    return DP_OK;
}

static dp_status check_gate(const dp_casefile *f, dp_err *e) {
    if (dp_gate_has_inside((dp_gate)f->gate) != dp_casefile_has(f, "lower_bound"))
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

static dp_status read_recurrence(const char *name, const char *dir, dp_user_recurrence *y,
                                 dp_err *e);

/* The problem gets the case's own recurrence, or the installed one. */
static dp_status own_recurrence(const dp_casefile *f, dp_case *c, dp_err *e) {
    const dp_user_recurrence *all = dp_user_recurrence_installed();
    if (f->recurrence && !all) {
        DP_OWN char *dir = dp_case_sibling(f->path, ".");
        c->rows = dp_calloc(1, sizeof *c->rows);
        const dp_status s = read_recurrence(f->recurrence, dir, c->rows, e);
        if (s) return s;
        dp_user_recurrence_set(c->rows, &c->p);
        c->op_name = c->rows->name;
    }
    if (all) c->p.model = DP_USER;
    if ((all && all->rows.normed) || (c->rows && c->rows->rows.normed))
        c->p.l2norm = dp_casefile_has(f, "l2norm") ? (int)f->l2norm : 1;
    return DP_OK;
}

static void recurrence_settings(const dp_casefile *f, dp_problem *p) {
    p->model = f->op < DP_NMODELS ? (dp_model)f->op : dp_operations[dp_casefile_op(f)].model;
    p->gate = (dp_gate)f->gate;
    p->lower_bound = f->lower_bound;
    p->beta_form = (dp_beta)f->beta;
    p->l2norm = (int)f->l2norm;
}

static dp_status case_settings(const dp_casefile *f, dp_case *c, dp_err *e) {
    c->reason = dp_strdup(f->reason);
    c->source = dp_strdup(f->source);
    if (f->unjudged) c->unjudged = dp_strdup(f->unjudged);
    c->op = &dp_operations[dp_casefile_op(f)];
    c->op_name = dp_casefile_op_name(f);
    c->smoke = (int)f->smoke;
    c->backward = (int)f->backward;
    c->pair_rows = (int)f->pair;
    c->bits = (int)f->bits;
    c->truth = (dp_truth_pick)f->truth;
    c->allow_nonfinite = (int)f->nonfinite;
    c->spec = spec_of(f);
    c->input_dtype = c->op->has_factors ? DP_FP32 : c->spec.dtype;
    copy_lists(f, c);
    recurrence_settings(f, &c->p);
    dp_status s = own_recurrence(f, c, e);
    if (!s) s = check_inputs(f, c, e);
    if (!s) s = check_unjudged(f, e);
    return s ? s : check_gate(f, e);
}

/* ---- shapes ---------------------------------------------------------------------------------- */

/* Above it also half of the memory here: results and the truth take as much again. */
#define SMALL (1ll << 28)

/* ---- shapes of tensors ----------------------------------------------------------------------- */

int64_t dp_case_dim_from_end(const dp_tensor *t, int i) {
    return t && t->ndim >= i ? t->shape[t->ndim - i] : 0;
}

void dp_case_shape_text(const dp_tensor *t, char *out, size_t size) {
    snprintf(out, size, "[");
    for (int i = 0; i < t->ndim; i++)
        dp_text_add(out, size, "%s%lld", i ? "," : "", (long long)t->shape[i]);
    dp_text_add(out, size, "]");
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

/* Fills shapes and cu of *c; the inputs stay NULL. */
static dp_status case_shapes(const dp_casefile *f, const dp_tensorfile *d, dp_case *c,
                             int64_t *tokens, dp_err *e) {
    const dp_operation *op = c->op;
    const dp_packing x = dp_case_packing(c);
    const dp_tensor *cu = d ? dp_tensor_find(d, "cu_seqlens") : NULL;
    *tokens = 0;
    dp_status s = op->shape(f, d, c, tokens, e);
    if (s || !op->has_ranks) return s;
    s = set_cu(f, *x.T, cu, x.cu, x.Nseq, e);
    if (!s) s = check_ranks(f, *x.T, e);
    return s ? s : check_size(f, c, e);
}

/* ---- names ----------------------------------------------------------------------------------- */

static dp_status unknown_tensor(const dp_case_data *x, const char *name, const dp_case_input *s,
                                int n, dp_err *e) {
    char all[256] = "";
    for (int j = 0; j < n; j++)
        dp_case_input_names(all, sizeof all, s[j].field);
    return dp_casefile_refuse(x->f, x->key, e, "tensor %.60s is no input of op = %s; known:%s",
                              name, dp_casefile_op_name(x->f), all);
}

/* Results that a recording may hold beside its inputs; they are not read. */
static int is_result(const char *name) {
    for (int i = 0; i < DP_CONV_NRESULTS; i++)
        if (dp_field_is(&dp_conv_result_fields[i], name)) return 1;
    return dp_result_find(name) >= 0;
}

/* A name that is written wrong would be an input that is silently absent. */
dp_status dp_case_check_names(const dp_case_data *x, const dp_case_input *s, int n, dp_err *e) {
    const dp_tensorfile *d = x->d;
    for (int i = 0; i < d->ntensor; i++) {
        const char *name = d->tensor[i].name;
        int known = !strcmp(name, "cu_seqlens") || is_result(name);
        for (int j = 0; j < n; j++)
            known |= dp_field_is(s[j].field, name);
        if (!known) return unknown_tensor(x, name, s, n, e);
    }
    for (int j = 0; j < n; j++) {
        const dp_tensor_field *f = s[j].field;
        if (f->alias && dp_tensor_find(d, f->name) && dp_tensor_find(d, f->alias))
            return dp_casefile_refuse(x->f, x->key, e,
                                      "holds the same tensor under two names, %s and %s", f->name,
                                      f->alias);
    }
    return DP_OK;
}

/* ---- values ---------------------------------------------------------------------------------- */

static dp_format format_of(const dp_tensor *t) {
    return !strcmp(t->dtype, "BF16") ? DP_BF16 : !strcmp(t->dtype, "F64") ? DP_FP64 : DP_FP32;
}

static dp_format wider(dp_format a, dp_format b) {
    return a == DP_FP64 || b == DP_FP64   ? DP_FP64
           : a == DP_FP32 || b == DP_FP32 ? DP_FP32
                                          : DP_BF16;
}

static int fits(const dp_tensor *t, const dp_case_input *s, int64_t tokens) {
    int64_t want[4] = {0};
    for (int i = 0; i < s->ndim; i++)
        want[i] = i == 0 && s->field->kind == DP_OF_TOKENS ? tokens : s->shape[i];
    return dp_case_same_shape(t, s->ndim, want, s->field->parameter);
}

static dp_status refuse_shape(const dp_case_data *x, const dp_tensor *t, const dp_case_input *s,
                              dp_err *e) {
    char have[128], want[128] = "", *at = want;
    for (int i = 0; i < s->ndim; i++)
        at += sprintf(
            at, "%s%lld", i ? "," : "",
            (long long)(i == 0 && s->field->kind == DP_OF_TOKENS ? x->tokens : s->shape[i]));
    dp_case_shape_text(t, have, sizeof have);
    return dp_casefile_refuse(x->f, "data", e, "tensor %s: shape %s, the case needs [%s]", t->name,
                              have, want);
}

dp_status dp_case_load_input(dp_case_data *x, dp_case_input *s, dp_err *e) {
    const dp_tensor *t = dp_case_input_find(x->d, s->field);
    if (!t && s->field->role == DP_ROLE_REQUIRED)
        return dp_casefile_refuse(x->f, "data", e, "tensor %s is missing", s->field->name);
    if (!t) return DP_OK;
    if (t->dtype[0] == 'I')
        return dp_casefile_refuse(x->f, "data", e, "tensor %s: dtype %s, must be a floating type",
                                  s->field->name, t->dtype);
    if (!fits(t, s, x->tokens)) return refuse_shape(x, t, s, e);
    free(*s->where);
    *s->where = dp_copy(t->data, dp_case_input_count(s));
    if (!s->field->parameter) x->widest = wider(x->widest, format_of(t));
    return DP_OK;
}

/* All inputs that d has; sets the case's dtype to the widest of them. */
static dp_status case_load_data(const dp_casefile *f, const dp_tensorfile *d, dp_case *c,
                                int64_t tokens, dp_err *e) {
    dp_case_input s[DP_CASE_MAX_INPUTS];
    const int n = dp_case_inputs(c, s);
    dp_case_data x = {.f = f, .key = "data", .d = d, .tokens = tokens, .widest = DP_BF16};
    dp_status st = dp_case_check_names(&x, s, n, e);
    for (int i = 0; i < n && !st; i++)
        if (!s[i].field->backward || c->backward) st = dp_case_load_input(&x, &s[i], e);
    if (st) return st;
    if (f->gate == DP_GATE_LOG && (c->p.A_log || c->p.dt_bias))
        return dp_casefile_refuse(f, "data", e,
                                  "has A_log or dt_bias, so its gate is raw, but gate = log");
    if (dp_casefile_has(f, "dtype") && case_dtype(f) != x.widest)
        return dp_casefile_refuse(f, "dtype", e, "%s has %s tensors", f->data,
                                  dp_formats[x.widest].name);
    c->input_dtype = c->spec.dtype = x.widest;
    return DP_OK;
}

/* ---- inputs by their laws -------------------------------------------------------------------- */

enum { BOTH_PARAMS = 1 }; /* of gate_params: no, yes, rates */

static int wanted(const dp_casefile *f, const dp_case_input *s) {
    switch (s->field->role) {
    case DP_ROLE_REQUIRED: return 1;
    case DP_ROLE_GATE:
        return f->gate != DP_GATE_LOG && f->gate_params &&
               (f->gate_params == BOTH_PARAMS || !strcmp(s->field->name, "A_log"));
    case DP_ROLE_BIAS: return f->bias != 0;
    case DP_ROLE_STATE: return f->s0_scale > 0;
    default: return 0; /* gradients come after, with those that data did not bring */
    }
}

/* Inputs that no data brings, by their laws. */
static void case_generate(const dp_casefile *f, dp_case *c) {
    dp_case_input s[DP_CASE_MAX_INPUTS];
    const int n = dp_case_inputs(c, s);
    for (int i = 0; i < n; i++)
        if (wanted(f, &s[i]) && !*s[i].where) *s[i].where = dp_doubles(dp_case_input_count(&s[i]));
    c->op->fill(c);
}

/* ---- the key override ------------------------------------------------------------------------ */

/* A block of an input: lo <= index < hi on every axis. */
typedef struct {
    const dp_case_input *s;
    int64_t lo[4], hi[4];
} block;

/* One index or * for all of them; *p moves past it. */
static dp_status parse_axis(const dp_casefile *f, const char **p, const char *begin, block *b,
                            int d, dp_err *e) {
    const dp_case_input *s = b->s;
    char *end;
    errno = 0;
    while (**p == ' ')
        ++*p;
    const int all = **p == '*';
    b->lo[d] = strtoll(*p, &end, 10);
    if (all) {
        b->lo[d] = 0;
        end = (char *)*p + 1;
    }
    if (end == *p || errno || b->lo[d] < 0 || b->lo[d] >= s->shape[d])
        return dp_casefile_refuse(f, "override", e, "index %d of %s at '%.40s' is not in 0..%lld",
                                  d, s->field->name, begin, (long long)s->shape[d] - 1);
    b->hi[d] = all ? s->shape[d] : b->lo[d] + 1;
    *p = end;
    return DP_OK;
}

/* `[i,j,..]`; *p moves past it. */
static dp_status parse_block(const dp_casefile *f, const char **p, block *b, dp_err *e) {
    const char *begin = *p;
    int d = 0;
    for (++*p; d < b->s->ndim; d++) {
        const dp_status st = parse_axis(f, p, begin, b, d, e);
        if (st) return st;
        if (d + 1 == b->s->ndim) continue;
        if (**p != ',') break;
        ++*p;
    }
    if (d != b->s->ndim || **p != ']')
        return dp_casefile_refuse(f, "override", e, "%s takes %d indices, at '%.40s'",
                                  b->s->field->name, b->s->ndim, begin);
    ++*p;
    return DP_OK;
}

/* A number that the input's format holds; *p moves past it. begin: of the whole item. */
static dp_status parse_value(const dp_casefile *f, const char **p, const char *begin, dp_format fmt,
                             double *x, dp_err *e) {
    const char *end;
    const dp_number read = dp_number_real_prefix(*p + strspn(*p, " \t"), x, &end);
    if (read == DP_NUMBER_NONE)
        return dp_casefile_refuse(f, "override", e, "no value after the index at '%.40s'", begin);
    if (read == DP_NUMBER_RANGE)
        return dp_casefile_refuse(f, "override", e,
                                  "the value at '%.40s' is not a number that fp64 holds", begin);
    if (!isnan(*x) && dp_store(fmt, *x) != *x)
        return dp_casefile_refuse(f, "override", e, "%a at '%.40s' is not a number of %s", *x,
                                  begin, dp_formats[fmt].name);
    *p = end;
    return DP_OK;
}

static void set_block(const block *b, double x) {
    const dp_case_input *s = b->s;
    int64_t i[4] = {0}, n = 1;
    for (int d = 0; d < s->ndim; d++)
        n *= b->hi[d] - b->lo[d];
    for (int64_t k = 0; k < n; k++) {
        int64_t rest = k, at = 0;
        for (int d = s->ndim; d-- > 0; rest /= b->hi[d] - b->lo[d])
            i[d] = b->lo[d] + rest % (b->hi[d] - b->lo[d]);
        for (int d = 0; d < s->ndim; d++)
            at = at * s->shape[d] + i[d];
        (*s->where)[at] = x;
    }
}

/* One `name[i,j,..] value`; *p moves past it. */
static dp_status override_one(const dp_casefile *f, dp_case *c, const char **p, dp_err *e) {
    dp_case_input s[DP_CASE_MAX_INPUTS];
    block b = {0};
    double x;
    const char *begin = *p;
    const size_t len = strcspn(*p, "[ ,");
    const int n = dp_case_inputs(c, s);
    for (int i = 0; i < n; i++)
        if (strlen(s[i].field->name) == len && !strncmp(s[i].field->name, begin, len)) b.s = &s[i];
    if (!b.s || !*b.s->where)
        return dp_casefile_refuse(f, "override", e, "no tensor of this case at '%.40s'", begin);
    *p += len;
    if (**p != '[')
        return dp_casefile_refuse(f, "override", e, "expected name[index] value at '%.40s'", begin);
    dp_status st = parse_block(f, p, &b, e);
    if (!st) st = parse_value(f, p, begin, dp_case_input_format(b.s->field, c->input_dtype), &x, e);
    if (st) return st;
    while (**p == ' ')
        ++*p;
    if (**p && **p != ',') return dp_casefile_refuse(f, "override", e, "trailing '%.40s'", *p);
    set_block(&b, x);
    return DP_OK;
}

static dp_status case_override(const dp_casefile *f, dp_case *c, dp_err *e) {
    dp_status s = DP_OK;
    for (const char *p = f->override; !s && p && *p;) {
        while (*p == ' ' || *p == '\t')
            p++;
        s = override_one(f, c, &p, e);
        if (!s && *p == ',' && !*++p) s = dp_casefile_refuse(f, "override", e, "ends with a comma");
    }
    return s;
}

/* ---- checks ---------------------------------------------------------------------------------- */

void dp_case_warn(dp_case *c, const char *fmt, ...) {
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

static dp_status check_problem(const dp_casefile *f, const dp_case *c, int allow_nonfinite,
                               dp_err *e) {
    dp_err inner = {0};
    if (!c->op->has_problem || !dp_problem_check(&c->p, allow_nonfinite, &inner)) return DP_OK;
    return dp_fail(e, inner.code, "%s: %s", f->path, inner.msg);
}

static int forgets(const dp_case *c, const dp_tensor_field *field, double x) {
    return field == &dp_input_fields[DP_INPUT_G] && c->p.gate == DP_GATE_LOG && x < 0;
}

static dp_status case_check(const dp_casefile *f, dp_case *c, dp_err *e) {
    dp_case_input s[DP_CASE_MAX_INPUTS];
    const int n = dp_case_inputs(c, s);
    for (int i = 0; i < n && !c->allow_nonfinite; i++)
        for (int64_t j = 0; *s[i].where && j < dp_case_input_count(&s[i]); j++)
            if (!isfinite((*s[i].where)[j])) {
                char at[96];
                dp_case_input_index(&s[i], j, at, sizeof at);
                return dp_casefile_refuse(f, f->data ? "data" : "override", e,
                                          "%s%s = %g: not finite, and this is no case with "
                                          "nonfinite = allow%s",
                                          s[i].field->name, at, (*s[i].where)[j],
                                          forgets(c, s[i].field, (*s[i].where)[j])
                                              ? ": a log decay of -1e4 forgets all, too"
                                              : "");
            }
    if (c->op->has_problem && dp_reads_along(&c->p) && !c->backward)
        return dp_casefile_refuse(f, dp_case_session(c) ? "session" : "backward", e,
                                  "o of %s reads along values, which needs gradients", c->op_name);
    return check_problem(f, c, c->allow_nonfinite, e);
}

/* sum_j beta_j |k_j|^2 as the step sees it. */
static double active_write(const dp_problem *p, int64_t t, int hv) {
    const dp_beta_info *form = &dp_betas[p->beta_form];
    double sum = 0;
    for (int j = 0; j < p->R; j++) {
        const double *k = p->k + ((t * p->H + hv / dp_G(p)) * p->R + j) * p->K;
        const double n = dp_squares(k, p->K);
        sum += form->times * dp_curve_at(form->curve, p->beta[(t * p->HV + hv) * p->R + j]) *
               (p->l2norm ? n / (n + DP_L2_EPS) : n);
    }
    return sum;
}

/* math.md b: sum_j beta_j |k_j|^2 <= 2 makes a step a contraction; of keys that read one after
 * another each of them must be. Above it the eigenvalues of k' diag(beta) k decide. */
static void case_warn_expanding(dp_case *c) {
    const dp_problem *p = &c->p;
    int64_t n = 0, where = 0;
    double worst = 0;
    for (int64_t i = 0; p->R >= 3 && !dp_in_turn(p) && i < p->T * p->HV; i++) {
        const double w = active_write(p, i / p->HV, (int)(i % p->HV));
        n += w > 2;
        if (w > worst) {
            worst = w;
            where = i;
        }
    }
    if (n)
        dp_case_warn(
            c,
            "%s: R = %d: sum of beta |k|^2 = %.3g > 2 at token %lld, head %lld (and at %lld of "
            "%lld): the state may grow without bound",
            c->path, p->R, worst, (long long)(where / p->HV), (long long)(where % p->HV),
            (long long)n, (long long)(p->T * p->HV));
}

/* ---- a case from its text -------------------------------------------------------------------- */

/* data: the tensors; NULL: they are generated. tokens: those of data. */
static dp_status make_inputs(const dp_casefile *f, dp_case *c, const dp_tensorfile *data,
                             int64_t tokens, dp_err *e) {
    dp_status s = check_problem(f, c, 1, e); /* the laws count on the shapes */
    if (!s && data) s = case_load_data(f, data, c, tokens, e);
    if (!s && !data) case_generate(f, c);
    if (!s && c->backward) c->op->fill_gradients(f, c); /* those that data did not bring */
    if (!s) s = case_override(f, c, e);
    if (!s) s = case_check(f, c, e);
    if (!s && c->op->finish) s = c->op->finish(f, c, e);
    if (!s) case_warn_expanding(c);
    return s;
}

/* The tensors, if they are read already. NULL: those of the file that the case names, if any. */
static dp_status open_tensors(const dp_casefile *f, dp_case *c, int load,
                              const dp_tensorfile *given, dp_err *e) {
    DP_FREED(dp_tensorfile_free) dp_tensorfile d = {0};
    const dp_tensorfile *have = given ? given : load && c->data ? &d : NULL;
    int64_t tokens = 0;
    dp_status s = have == &d ? dp_safetensors_read(c->data, &d, e) : DP_OK;
    if (!s) s = case_shapes(f, have, c, &tokens, e);
    if (!s && load && c->op->inputs) s = make_inputs(f, c, have, tokens, e);
    return s;
}

static dp_status build(const dp_casefile *f, dp_case *c, int load, const dp_tensorfile *given,
                       dp_err *e) {
    dp_status s = case_settings(f, c, e);
    if (!s) s = open_tensors(f, c, load, given, e);
    c->p.scale = dp_casefile_has(f, "scale") ? f->scale : dp_usual_scale(&c->p);
    return s;
}

static char *stem(const char *path) {
    char *out = dp_strdup(dp_base_name(path));
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
    c->path = dp_strdup(path);
    c->text = strndup(text, len);
    c->name = stem(path);
    if (f.data) c->data = dp_case_sibling(path, f.data);
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
    f.data = dp_strdup(d->path);
    c->path = dp_strdup(d->path);
    c->name = stem(d->path);
    c->data = dp_strdup(d->path);
    s = build(&f, c, 1, d, e);
    dp_casefile_free(&f);
    if (s) dp_case_free(c);
    return s;
}

dp_status dp_case_open(const char *path, int load, dp_case *c, dp_err *e) {
    memset(c, 0, sizeof *c);
    DP_OWN char *text = NULL;
    size_t n;
    const dp_status s = dp_input_read(path, DP_CASEFILE_MAX_BYTES, &text, &n, e);
    if (s) return s;
    return dp_case_parse(text, n, path, load, c, e);
}

dp_status dp_case_load(const char *path, dp_case *c, dp_err *e) {
    return dp_case_open(path, 1, c, e);
}

/* DIR/NAME.recurrence, to be freed; NULL: there is none. */
static char *kept_recurrence(const char *dir, const char *name) {
    char *path = dp_text_new("%s/%s.recurrence", dir, name);
    if (!access(path, F_OK)) return path;
    free(path);
    return NULL;
}

static dp_status read_recurrence(const char *name, const char *dir, dp_user_recurrence *y,
                                 dp_err *e) {
    const int is_file = strchr(name, '/') || !access(name, F_OK);
    DP_OWN char *kept = is_file || !dir ? NULL : kept_recurrence(dir, name);
    DP_OWN char *text = NULL;
    size_t n;
    if (!is_file && !kept) kept = kept_recurrence(dp_home("cases"), name);
    const dp_status s = dp_input_read(kept ? kept : name, 1 << 16, &text, &n, e);
    return s ? s : dp_user_recurrence_parse(text, kept ? kept : name, y, e);
}

dp_status dp_case_recurrence(const char *name, const char *dir, dp_err *e) {
    dp_user_recurrence y;
    const dp_status s = read_recurrence(name, dir, &y, e);
    if (!s) dp_user_recurrence_install(&y);
    return s;
}

void dp_case_free(dp_case *c) {
    dp_free_list(c->warn, c->nwarn);
    DP_FREE(c->name, c->path, c->text, c->reason, c->source, c->unjudged, c->data, c->rows);
    dp_problem_free(&c->p);
    dp_conv_free(&c->conv);
    for (int i = 0; i < DP_NQKV; i++) {
        dp_conv_free(&c->step.conv[i]);
        dp_conv_result_free(&c->step.rad[i]);
    }
    dp_session_free(&c->session);
    memset(c, 0, sizeof *c);
}
