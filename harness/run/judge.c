#define _GNU_SOURCE
#include "judge.h"
#include "ref/files/safetensors.h"
#include "ref/vocabulary/number.h"

#include <ctype.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* ---- settings: option, else metadata, else a refusal that names the option ------------------- */

typedef struct {
    const char *text, *value;
} word; /* how metadata may say it; value as a case file has it */
static const word GATES[] = {{"log", "log"},
                             {"softplus", "softplus"},
                             {"-exp(A_log)*softplus(g+dt_bias)", "softplus"},
                             {"lower_bound", "lower_bound"},
                             {"lower_bound*sigmoid(exp(A_log)*(g+dt_bias))", "lower_bound"},
                             {0}};
static const word BETAS[] = {{"plain", "plain"},
                             {"beta", "plain"},
                             {"sigmoid", "sigmoid"},
                             {"sigmoid(beta)", "sigmoid"},
                             {"sigmoid2", "sigmoid2"},
                             {"2*sigmoid(beta)", "sigmoid2"},
                             {0}};
static const word NORMS[] = {
    {"0", "no"}, {"1", "yes"}, {"no", "no"}, {"yes", "yes"}, {"l2norm inside kernel", "yes"}, {0}};
static const word LAYOUTS[] = {{"kv", "kv"}, {"vk", "vk"}, {0}};

static int same_text(const char *a, const char *b) { /* blanks do not count */
    for (;; a++, b++) {
        while (isspace((unsigned char)*a))
            a++;
        while (isspace((unsigned char)*b))
            b++;
        if (*a != *b) return 0;
        if (!*a) return 1;
    }
}

/* key, key2 (may be NULL): metadata; option: its name and values, as in the message. dflt NULL:
 * required. */
static const char *choose(const dp_tensorfile *f, const char *given, const char *key,
                          const char *key2, const char *option, const word *words, const char *dflt,
                          dp_err *e) {
    const char *meta = dp_tensorfile_meta(f, key), *text = given  ? given
                                                           : meta ? meta
                                                           : key2 ? dp_tensorfile_meta(f, key2)
                                                                  : NULL;
    if (!text && !dflt)
        dp_fail(e, DP_EINPUT, "%s: its metadata does not say `%s`: give %s", f->path, key, option);
    if (!text) return dflt ? dflt : "";
    for (const word *w = words; w->text; w++)
        if (same_text(text, w->text)) return w->value;
    if (given)
        dp_fail(e, DP_EINPUT, "'%.80s' is not known: give %s", text, option);
    else
        dp_fail(e, DP_EINPUT, "%s: metadata `%s` = '%.80s' is not understood: give %s", f->path,
                key, text, option);
    return "";
}

typedef struct {
    const char *gate, *beta, *l2norm, *base, *claim, *cu;
    double scale, lower_bound; /* NAN: not given */
    int ranks, in_vk, out_vk;
} settings;

static const char *choose_name(const dp_tensorfile *f, const char *given, const char *key,
                               const char *option, const char *const *names, int n,
                               const char *dflt, dp_err *e) {
    word w[16] = {{0}};
    for (int i = 0; i < n; i++)
        w[i] = (word){names[i], names[i]};
    return choose(f, given, key, NULL, option, w, dflt, e);
}

static int ranks_of(const dp_tensorfile *out, int given, dp_err *e) {
    const char *text = dp_tensorfile_meta(out, "ranks");
    int64_t n = 1;
    if (given || !text) return given ? given : 1;
    if (dp_number_int(text, 1, 4096, &n) != DP_NUMBER_OK)
        dp_fail(e, DP_EINPUT, "%s: metadata `ranks` = '%.80s' is not understood: give --ranks N",
                out->path, text);
    return (int)n;
}

static double number(const dp_tensorfile *f, const char *given, const char *key, const char *option,
                     dp_err *e) {
    const char *text = given ? given : dp_tensorfile_meta(f, key);
    double x = NAN;
    if (!text) return NAN;
    const dp_number n = dp_number_real(text, -1e300, 1e300, &x);
    const char *why = n == DP_NUMBER_RANGE ? "is out of range, must be -1e300 to 1e300"
                                           : "is not a finite number";
    if (n && given)
        dp_fail(e, DP_EINPUT, "%s: '%.80s' %s", option, text, why);
    else if (n)
        dp_fail(e, DP_EINPUT, "%s: metadata `%s` = '%.80s' %s: give %s", f->path, key, text, why,
                option);
    return x;
}

static dp_status read_settings(const dp_judge_options *o, const dp_tensorfile *in,
                               const dp_tensorfile *out, settings *s, dp_err *e) {
    const char *formats[DP_NFORMATS];
    for (int i = 0; i < DP_NFORMATS; i++)
        formats[i] = dp_formats[i].name;
    s->gate = choose(in, o->gate, "gate", NULL, "--gate log|softplus|lower_bound", GATES, NULL, e);
    s->beta = choose(in, o->beta, "beta", NULL, "--beta plain|sigmoid|sigmoid2", BETAS, NULL, e);
    s->l2norm = choose(in, o->l2norm, "l2norm", "qk", "--l2norm 0|1", NORMS, NULL, e);
    s->lower_bound = strcmp(s->gate, "lower_bound")
                         ? NAN
                         : number(in, o->lower_bound, "lower_bound", "--lower-bound X", e);
    if (!strcmp(s->gate, "lower_bound") && isnan(s->lower_bound))
        dp_fail(e, DP_EINPUT, "%s: its metadata does not say `lower_bound`: give --lower-bound X",
                in->path);
    if (o->lower_bound && strcmp(s->gate, "lower_bound"))
        dp_fail(e, DP_EINPUT, "--lower-bound goes with --gate lower_bound");
    s->scale = number(in, o->scale, "scale", "--scale X", e);
    s->cu = o->cu_seqlens                      ? o->cu_seqlens
            : dp_tensor_find(in, "cu_seqlens") ? NULL
                                               : dp_tensorfile_meta(in, "cu_seqlens");
    if (s->cu && (!*s->cu || s->cu[strspn(s->cu, "0123456789, ")]))
        dp_fail(e, DP_EINPUT, "%s: '%.80s' is no list of tokens: give --cu-seqlens 0,..,T",
                o->cu_seqlens ? "--cu-seqlens" : in->path, s->cu);
    s->in_vk = !strcmp(
        choose(in, o->state_layout, "state_layout", NULL, "--state-layout kv|vk", LAYOUTS, "kv", e),
        "vk");
    s->out_vk = !strcmp(choose(out, o->state_layout, "state_layout", NULL, "--state-layout kv|vk",
                               LAYOUTS, "kv", e),
                        "vk");
    s->ranks = ranks_of(out, o->ranks, e);
    s->base = choose_name(out, o->base, "base", "--base bf16|fp32|fp64", dp_base_names, DP_NBASES,
                          NULL, e);
    s->claim = choose_name(out, o->claim, "claim",
                           "--claim fp32|tf32x3|tf32|tf32rz|bf16|bf16st (format of the M chain)",
                           formats, DP_NFORMATS, s->ranks < 3 ? "fp32" : NULL, e);
    return e->code; /* below 3 ranks no M is used and the chain's format is nothing to claim */
}

/* What the option or OUT's metadata `design` declares; nothing: undeclared. */
static dp_status read_design(const dp_judge_options *o, const dp_tensorfile *out, dp_base base,
                             dp_design *design, dp_given *g, dp_err *e) {
    const char *meta = dp_tensorfile_meta(out, "design"), *text = o->design ? o->design : meta;
    dp_err why = {0};
    if (!text) return DP_OK;
    g->design = design;
    if (!dp_design_parse(text, base, design, &why)) return DP_OK;
    return o->design ? dp_fail(e, DP_EINPUT, "--design: %s", why.msg)
                     : dp_fail(e, DP_EINPUT, "%s: metadata: %s", out->path, why.msg);
}

/* ---- inputs ---------------------------------------------------------------------------------- */

static const char *const INPUTS[] = {
    "q",  "k",  "v",   "g",      "beta",      "A_log", "dt_bias", "initial_state",
    "s0", "do", "dht", "dstate", "cu_seqlens"};
#define NINPUTS ((int)(sizeof INPUTS / sizeof *INPUTS))

static dp_status check_inputs(const dp_tensorfile *in, int64_t tokens, dp_err *e) {
    for (int i = 0; i < in->ntensor; i++) {
        int known = 0;
        for (int j = 0; j < NINPUTS; j++)
            known |= !strcmp(in->tensor[i].name, INPUTS[j]);
        if (!known)
            return dp_fail(e, DP_EINPUT,
                           "%s: tensor %s is not an input; known: q k v g beta A_log dt_bias "
                           "initial_state (or s0) do dht (or dstate) cu_seqlens",
                           in->path, in->tensor[i].name);
    }
    for (int j = 0; j < 5; j++)
        if (!dp_tensor_find(in, INPUTS[j]))
            return dp_fail(e, DP_EINPUT, "%s: tensor %s is missing", in->path, INPUTS[j]);
    if ((dp_tensor_find(in, "s0") && dp_tensor_find(in, "initial_state")) ||
        (dp_tensor_find(in, "dstate") && dp_tensor_find(in, "dht")))
        return dp_fail(
            e, DP_EINPUT,
            "%s: has the same state under two names (s0 and initial_state, or dstate and dht)",
            in->path);
    const dp_tensor *q = dp_tensor_find(in, "q");
    if (q->ndim == 3 && q->shape[0] == 1 && q->shape[1] > 1 && tokens != 1)
        return dp_fail(e, DP_EINPUT,
                       "%s: tensor q: shape [1,%lld,%lld] is one token of %lld heads, or %lld "
                       "tokens of one head: write it as [1,T,H,K], or give --tokens 1",
                       in->path, (long long)q->shape[1], (long long)q->shape[2],
                       (long long)q->shape[1], (long long)q->shape[1]);
    return DP_OK;
}

/* R from k, the model from g. What does not fit is left to the loader, which refuses it by name and
 * shape. */
static const char *model(const dp_tensorfile *in, int *R) {
    const dp_tensor *q = dp_tensor_find(in, "q"), *k = dp_tensor_find(in, "k"),
                    *v = dp_tensor_find(in, "v"), *g = dp_tensor_find(in, "g");
    const int64_t K = q->ndim ? q->shape[q->ndim - 1] : 0,
                  H = q->ndim >= 3 ? q->shape[q->ndim - 2] : 1;
    *R = q->n && k->n % q->n == 0 && k->n / q->n >= 1 && k->n / q->n <= 64 ? (int)(k->n / q->n) : 1;
    if (*R > 1) return "mkda";
    const int64_t HV = v->ndim >= 3 ? v->shape[v->ndim - 2] : 1;
    return K > 1 && H && (__int128)g->n * K * H == (__int128)q->n * HV ? "gdn" : "kda";
}

/* [..,V,K] -> [..,K,V]; the shape follows when it ends in those two axes. What is no whole number
 * of states is left to the check of shapes. */
static void transpose_states(dp_tensor *t, int64_t K, int64_t V) {
    int64_t *a = t->ndim >= 2 ? &t->shape[t->ndim - 2] : NULL;
    if (K < 1 || V < 1 || t->n % (K * V)) return;
    double *x = dp_doubles(t->n);
    for (int64_t m = 0; m < t->n / (K * V); m++)
        for (int64_t v = 0; v < V; v++)
            for (int64_t k = 0; k < K; k++)
                x[m * K * V + k * V + v] = t->data[m * K * V + v * K + k];
    memcpy(t->data, x, sizeof *x * (size_t)t->n);
    free(x);
    if (a && a[0] == V && a[1] == K) {
        a[0] = K;
        a[1] = V;
    }
}

static dp_status load_case(const dp_judge_options *o, dp_tensorfile *in, const settings *s,
                           int backward, dp_case *c, dp_err *e) {
    const char *states[] = {"s0", "initial_state", "dstate", "dht"};
    int R, n;
    const char *op = model(in, &R);
    const dp_tensor *q = dp_tensor_find(in, "q"), *v = dp_tensor_find(in, "v");
    for (int i = 0; s->in_vk && i < 4; i++) {
        dp_tensor *t = (dp_tensor *)dp_tensor_find(in, states[i]);
        if (t && q->ndim && v->ndim)
            transpose_states(t, q->shape[q->ndim - 1], v->shape[v->ndim - 1]);
    }
    const size_t size = 1024 + (s->cu ? strlen(s->cu) : 0);
    char *text = dp_calloc(size, 1);
    n = snprintf(
        text, size,
        "reason = Tensors that another program wrote.\nsource = two files\nop = %s\nR = %d\ngate = "
        "%s\nbeta = %s\nl2norm = %s\nranks = %d\nbase = %s\nchain = %s\nbackward = %s\n",
        op, R, s->gate, s->beta, s->l2norm, s->ranks, s->base, s->claim, backward ? "yes" : "no");
    if (o->tokens) n += snprintf(text + n, size - (size_t)n, "T = %lld\n", (long long)o->tokens);
    if (!isnan(s->scale))
        n += snprintf(text + n, size - (size_t)n, "scale = %.17g\n",
                      s->scale); /* 17 digits give the same double again */
    if (!isnan(s->lower_bound))
        n += snprintf(text + n, size - (size_t)n, "lower_bound = %.17g\n", s->lower_bound);
    if (s->cu) snprintf(text + n, size - (size_t)n, "cu_seqlens = %s\n", s->cu);
    const dp_status st = dp_case_from_tensors(text, in, c, e);
    free(text);
    return st;
}

/* ---- outputs --------------------------------------------------------------------------------- */

static dp_status unknown_name(const dp_tensorfile *out, const dp_tensor *t, dp_err *e) {
    char taps[256];
    int n = 0;
    for (int i = 0; i < DP_NSTAGE_TENSORS; i++)
        n += snprintf(taps + n, sizeof taps - (size_t)n, " %s", dp_stage_tensors[i].name);
    return dp_fail(e, DP_EINPUT,
                   "%s: tensor %s is not known; known: o final_state (or ht) dq dk dv dg dbeta "
                   "dA_log ddt_bias ds0 (or dh0), and stages%s",
                   out->path, t->name, taps);
}

/* Names, once each, of floating types; *backward: some are gradients. */
static dp_status check_outputs(const dp_tensorfile *in, const dp_tensorfile *out, int *backward,
                               dp_err *e) {
    int seen[DP_NRESULTS + DP_NSTAGE_TENSORS] = {0};
    *backward = 0;
    for (int i = 0; i < out->ntensor; i++) {
        const dp_tensor *t = &out->tensor[i];
        const int f = dp_result_find(t->name), tap = f < 0 ? dp_stage_tensor_find(t->name) : -1,
                  back = f >= 0 ? dp_result_fields[f].backward
                                : tap >= 0 && dp_stage_tensors[tap].backward;
        if (f < 0 && tap < 0) return unknown_name(out, t, e);
        if (seen[f >= 0 ? f : DP_NRESULTS + tap]++)
            return dp_fail(e, DP_EINPUT, "%s: tensor %s is there twice, under another name too",
                           out->path,
                           f >= 0 ? dp_result_fields[f].name : dp_stage_tensors[tap].name);
        if (t->dtype[0] == 'I')
            return dp_fail(e, DP_EINPUT, "%s: tensor %s: dtype %s, must be a floating type",
                           out->path, t->name, t->dtype);
        if (back && !dp_tensor_find(in, "do"))
            return dp_fail(e, DP_EINPUT, "%s: tensor %s is a gradient, but %s has no tensor do",
                           out->path, t->name, in->path);
        *backward |= back;
    }
    return out->ntensor ? DP_OK : dp_fail(e, DP_EINPUT, "%s: has no tensors", out->path);
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
static dp_status load_tap(const dp_tensorfile *in, const dp_tensorfile *out, dp_tensor *t,
                          const dp_problem *p, int N, int vk, dp_given *g, dp_err *e) {
    const int tap = dp_stage_tensor_find(t->name),
              state = tap == DP_STATE || tap == DP_DSTATE || tap == DP_S_IN || tap == DP_DS_OUT;
    int64_t want[5], chunks = dp_stage_tensor_chunks(p, N, -1);
    char hint[200] = "";
    const int ndim = dp_stage_tensor_shape(p, N, tap, want);
    if (state && vk) {
        const int64_t k = want[2];
        want[2] = want[3];
        want[3] = k;
    }
    if (dp_stage_tensors[tap].kind == DP_PER_CHUNK)
        snprintf(hint, sizeof hint,
                 " (%lld chunks: they restart at every sequence and at each of %d ranks)",
                 (long long)chunks, N);
    if (dp_stage_tensors[tap].kind == DP_PER_RANK)
        snprintf(hint, sizeof hint, " (first axis: %d ranks)", N);
    if (!dp_case_same_shape(t, ndim, want, 0)) return wrong_shape(out, in, t, ndim, want, hint, e);
    if (state && vk) transpose_states(t, p->K, p->V);
    g->stage[tap] = t->data;
    storage(t->dtype, &g->stage_u[tap], &g->stage_tiny[tap]);
    return DP_OK;
}

static dp_status load_results(const dp_tensorfile *in, dp_tensorfile *out, const dp_problem *p,
                              int N, int vk, dp_given *g, dp_err *e) {
    for (int i = 0; i < out->ntensor; i++) {
        dp_tensor *t = &out->tensor[i];
        const int f = dp_result_find(t->name);
        if (f < 0) {
            const dp_status st = load_tap(in, out, t, p, N, vk, g, e);
            if (st) return st;
            continue;
        }
        int64_t want[DP_RESULT_MAX_AXES];
        const int state = dp_result_fields[f].kind == DP_OF_SEQUENCES;
        const int ndim = dp_result_axes(p, f, want);
        if (!dp_result_exists(p, f))
            return dp_fail(e, DP_EINPUT,
                           "%s: tensor %s: %s has no tensor %s that it could be the gradient of",
                           out->path, t->name, in->path, dp_result_fields[f].of);
        const int64_t turned[4] = {want[0], want[1], want[3], want[2]};
        if (!dp_case_same_shape(t, ndim, state && vk ? turned : want, f == DP_RESULT_DDT_BIAS)) {
            const int other = state && dp_case_same_shape(t, ndim, vk ? want : turned, 0);
            return wrong_shape(out, in, t, ndim, state && vk ? turned : want,
                               !other ? ""
                               : vk   ? " (give --state-layout kv if K comes first)"
                                      : " (give --state-layout vk if V comes first)",
                               e);
        }
        if (state && vk) transpose_states(t, p->K, p->V);
        *dp_result_at(&g->r, f) = t->data;
        storage(t->dtype, &g->u[f], &g->tiny[f]);
    }
    return DP_OK;
}

/* ---- judging --------------------------------------------------------------------------------- */

static const char *base_name(const char *path) {
    return strrchr(path, '/') ? strrchr(path, '/') + 1 : path;
}

static void name_case(const dp_judge_options *o, dp_case *c) {
    free(c->name);
    free(c->source);
    c->name = strdup(base_name(o->outputs));
    if (asprintf(&c->source, "%s, computed from %s", base_name(o->outputs), base_name(o->inputs)) <
        0)
        abort();
}

dp_status dp_judge_case(const dp_judge_options *o, dp_case *c, dp_runs *runs, dp_err *e) {
    dp_tensorfile in = {.path = c->path}, out = {0};
    dp_tensor dout = {.name = (char *)"do"};
    dp_given g = {0};
    dp_design design;
    dp_err own = {0};
    const char *formats[DP_NFORMATS];
    int backward;
    if (!e) e = &own;
    if (c->p.dout) {
        in.ntensor = 1;
        in.tensor = &dout;
    }
    for (int i = 0; i < DP_NFORMATS; i++)
        formats[i] = dp_formats[i].name;
    dp_status st = dp_safetensors_read(o->outputs, &out, e);
    if (!st) st = check_outputs(&in, &out, &backward, e);
    if (!st) {
        const int vk = !strcmp(choose(&out, o->state_layout, "state_layout", NULL,
                                      "--state-layout kv|vk", LAYOUTS, "kv", e),
                               "vk");
        const char *base = choose_name(&out, o->base, "base", "--base bf16|fp32|fp64",
                                       dp_base_names, DP_NBASES, dp_base_names[c->base[0]], e);
        const char *chain = choose_name(&out, o->claim, "claim", "--chain FORMAT (of the M chain)",
                                        formats, DP_NFORMATS, dp_formats[c->chain[0]].name, e);
        c->ranks[0] = ranks_of(&out, o->ranks, e);
        if (!(st = e->code)) {
            for (int i = 0; i < DP_NBASES; i++)
                if (!strcmp(base, dp_base_names[i])) c->base[0] = (dp_base)i;
            c->chain[0] = (dp_format)dp_format_find(chain);
            c->nranks = c->nbase = c->nchain = 1;
            c->backward &= backward;
            if (c->p.T % c->ranks[0])
                st = dp_fail(e, DP_EINPUT, "%s: T = %lld is not divisible by %d ranks", c->path,
                             (long long)c->p.T, c->ranks[0]);
        }
        if (!st) st = load_results(&in, &out, &c->p, c->ranks[0], vk, &g, e);
    }
    const dp_run_options ro = {.cache = o->cache, .progress = o->progress};
    if (!st) st = read_design(o, &out, c->base[0], &design, &g, e);
    if (!st) st = dp_run_given(c, &ro, &g, runs, e);
    dp_tensorfile_free(&out);
    return st;
}

dp_status dp_judge_write_inputs(const dp_case *c, const char *path, dp_err *e) {
    static const char *const gate[] = {"log", "softplus", "lower_bound"}, *const beta[] = {
                                                                              "plain", "sigmoid",
                                                                              "sigmoid2"};
    const dp_problem *p = &c->p;
    const int64_t T = p->T, H = p->H, HV = p->HV, K = p->K, V = p->V, R = p->R, N = p->Nseq,
                  Kg = dp_Kg(p);
    const struct {
        const char *name;
        const double *x;
        int param, ndim;
        int64_t shape[4];
    } all[] = {{"q", p->q, 0, 3, {T, H, K}},
               {"k", p->k, 0, R > 1 ? 4 : 3, {T, H, R > 1 ? R : K, K}},
               {"v", p->v, 0, R > 1 ? 4 : 3, {T, HV, R > 1 ? R : V, V}},
               {"g", p->g, 0, Kg > 1 || K == 1 ? 3 : 2, {T, HV, Kg}},
               {"beta", p->beta, 0, R > 1 ? 3 : 2, {T, HV, R}},
               {"A_log", p->A_log, 1, 1, {HV}},
               {"dt_bias", p->dt_bias, 1, 2, {HV, Kg}},
               {"initial_state", p->s0, 1, 4, {N, HV, K, V}},
               {"do", p->dout, 0, 3, {T, HV, V}},
               {"dht", p->dstate, 1, 4, {N, HV, K, V}}};
    dp_tensorfile f = {0};
    char b[64];
    for (size_t i = 0; i < sizeof all / sizeof *all; i++) {
        const dp_format fmt = all[i].param && c->input_dtype == DP_BF16 ? DP_FP32 : c->input_dtype;
        if (all[i].x)
            dp_tensorfile_add(&f, all[i].name,
                              fmt == DP_BF16   ? "BF16"
                              : fmt == DP_FP32 ? "F32"
                                               : "F64",
                              all[i].ndim, all[i].shape, all[i].x);
    }
    dp_tensorfile_add_meta(&f, "case", c->name);
    dp_tensorfile_add_meta(&f, "gate", gate[p->gate]);
    dp_tensorfile_add_meta(&f, "beta", beta[p->beta_form]);
    dp_tensorfile_add_meta(&f, "l2norm", p->l2norm ? "1" : "0");
    snprintf(b, sizeof b, "%.17g", p->scale);
    dp_tensorfile_add_meta(&f, "scale", b);
    if (p->gate == DP_GATE_LOWER_BOUND) {
        snprintf(b, sizeof b, "%.17g", p->lower_bound);
        dp_tensorfile_add_meta(&f, "lower_bound", b);
    }
    if (N > 1) {
        const int64_t n[1] = {N + 1};
        double *cu = dp_doubles(N + 1);
        for (int64_t i = 0; i <= N; i++)
            cu[i] = (double)p->cu[i];
        dp_tensorfile_add(&f, "cu_seqlens", "I64", 1, n, cu);
        free(cu);
    }
    const dp_status st = dp_safetensors_write(path, &f, e);
    dp_tensorfile_free(&f);
    return st;
}

static dp_status load_chain(const dp_judge_options *o, dp_tensorfile *in, dp_tensorfile *out,
                            dp_case *c, dp_judge_loaded *l, dp_err *e) {
    const dp_tensor *f = dp_tensor_find(in, "factors"), *m = dp_tensor_find(out, "M");
    const char *formats[DP_NFORMATS];
    char want[200], have[200] = "none";
    for (int i = 0; i < DP_NFORMATS; i++)
        formats[i] = dp_formats[i].name;
    if (in->ntensor != 1)
        return dp_fail(e, DP_EINPUT,
                       "%s: a chain of M has one input, factors, but there are %d tensors",
                       in->path, in->ntensor);
    if (f->ndim != 3 || f->shape[1] != f->shape[2] || f->shape[0] < 1 || f->shape[1] < 1 ||
        f->shape[0] > 1 << 20 || f->shape[1] > 256) {
        dp_case_shape_text(f, have, sizeof have);
        return dp_fail(e, DP_EINPUT,
                       "%s: tensor factors: shape %s, must be [n,K,K] with K up to 256", in->path,
                       have);
    }
    dp_case_shape_text(f, want, sizeof want);
    if (m) dp_case_shape_text(m, have, sizeof have);
    if (!m || out->ntensor != 1 || strcmp(want, have))
        return dp_fail(
            e, DP_EINPUT,
            "%s: must hold one tensor, M %s, the product after each factor; it holds %d, M %s",
            out->path, want, out->ntensor, have);
    for (int64_t i = 0; i < f->n; i++)
        if (!isfinite(f->data[i]))
            return dp_fail(e, DP_EINPUT, "%s: tensor factors: entry %lld is not finite", in->path,
                           (long long)i);
    const char *claim =
        choose_name(out, o->claim, "claim",
                    "--claim fp32|tf32x3|tf32|tf32rz|bf16|bf16st (format of the M chain)", formats,
                    DP_NFORMATS, NULL, e);
    if (e->code) return e->code;
    *c = (dp_case){.op = DP_OP_CHAIN,
                   .op_name = "chain",
                   .reason = strdup("A chain of M that another program multiplied."),
                   .path = strdup(o->outputs),
                   .data = strdup(o->inputs)};
    c->ch.n = (int)f->shape[0];
    c->ch.K = (int)f->shape[1];
    name_case(o, c);
    l->factors = f->data;
    l->products = m->data;
    l->claimed = dp_format_find(claim);
    return DP_OK;
}

static dp_status load_files(const dp_judge_options *o, dp_tensorfile *in, dp_tensorfile *out,
                            dp_case *c, dp_judge_loaded *l, dp_err *e) {
    settings s = {0};
    int backward;
    dp_status st = check_inputs(in, o->tokens, e);
    if (!st) st = check_outputs(in, out, &backward, e);
    if (!st) st = read_settings(o, in, out, &s, e);
    if (!st) st = load_case(o, in, &s, backward, c, e);
    if (st) return st;
    name_case(o, c);
    st = load_results(in, out, &c->p, s.ranks, s.out_vk, &l->given, e);
    if (!st) st = read_design(o, out, c->base[0], &l->design, &l->given, e);
    if (st) dp_case_free(c);
    return st;
}

dp_status dp_judge_load(const dp_judge_options *o, dp_tensorfile *in, dp_tensorfile *out,
                        dp_case *c, dp_judge_loaded *l, dp_err *e) {
    *l = (dp_judge_loaded){.factors = NULL};
    memset(c, 0, sizeof *c);
    return (dp_tensor_find(in, "factors") ? load_chain : load_files)(o, in, out, c, l, e);
}

dp_status dp_judge(const dp_judge_options *o, dp_case *c, dp_runs *runs, dp_err *e) {
    dp_tensorfile in = {0}, out = {0};
    dp_judge_loaded l;
    dp_err own = {0};
    const dp_run_options ro = {.cache = o->cache, .truth = o->truth, .progress = o->progress};
    if (!e) e = &own;
    memset(c, 0, sizeof *c);
    dp_status st = dp_safetensors_read(o->inputs, &in, e);
    if (!st) st = dp_safetensors_read(o->outputs, &out, e);
    if (!st) st = dp_judge_load(o, &in, &out, c, &l, e);
    if (!st && l.factors)
        dp_run_chain_given(c, l.factors, l.products, l.claimed, runs);
    else if (!st && (st = dp_run_given(c, &ro, &l.given, runs, e)))
        dp_case_free(c);
    dp_tensorfile_free(&in);
    dp_tensorfile_free(&out);
    return st;
}
