/* The operations of a case: a row each, and the functions that it names (operations.h). */
#include "operations.h"
#include "case_parts.h"
#include "ref/arithmetic/norms.h"
#include "ref/chunk/recurrent.h"
#include "ref/vocabulary/recurrence.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

/* ---- one recurrence -------------------------------------------------------------------------- */

#define MAX_HEADS 4096
#define MAX_KEYS 4096 /* K and V */

static dp_dims recurrence_dims(const dp_case *c) { return dp_problem_dims(&c->p); }

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

/* The width of its angles, which the data says; a width that does not fit is refused as a shape. */
static void set_pairs(const dp_tensorfile *d, dp_problem *p) {
    const char *name = dp_input_fields[DP_INPUT_ANGLE].name;
    const dp_tensor *angle = d && *name ? dp_tensor_find(d, name) : NULL;
    const int64_t width = angle && angle->ndim > 1 ? dp_case_dim_from_end(angle, 1) : 0;
    if (width && 2 * width <= p->K) p->pairs = (int)width;
}

static dp_status recurrence_shape(const dp_casefile *f, const dp_tensorfile *d, dp_case *c,
                                  int64_t *tokens, dp_err *e) {
    dp_problem *p = &c->p;
    const dp_tensor *q = d ? dp_tensor_find(d, dp_qkv_name(DP_QKV_Q)) : NULL,
                    *v = d ? dp_tensor_find(d, dp_qkv_name(DP_QKV_V)) : NULL;
    const widths found = widths_of(q, v, f->R);
    widths w = {0};
    dp_status s = dp_case_agree(f, "K", f->K, found.K, 0, &w.K, e);
    if (!s) s = dp_case_agree(f, "H", f->H, found.H, 1, &w.H, e);
    if (!s) s = dp_case_agree(f, "HV", f->HV, found.HV, w.H, &w.HV, e);
    if (!s) s = dp_case_agree(f, "V", f->V, found.V, w.K, &w.V, e);
    if (!s && d) s = check_q_v(f, q, v, &w, e);
    if (s) return s;
    *tokens = q ? q->n / (w.H * w.K) : 0;
    p->K = (int)w.K;
    p->H = (int)w.H;
    p->HV = (int)w.HV;
    p->V = (int)w.V;
    p->R = (int)f->R;
    set_pairs(d, p);
    if (w.HV % w.H)
        return dp_casefile_refuse(f, "HV", e, "must be a multiple of H = %lld", (long long)w.H);
    if (f->R > 1 && !(f->op < DP_NMODELS && dp_models[f->op].many_keys))
        return dp_casefile_refuse(
            f, "R", e, "only mkda and gated-deltaproduct have more than one key a token");
    return dp_case_set_tokens(f, *tokens, &p->T, e);
}

static void recurrence_fill(dp_case *c) { dp_inputs_fill(&c->p, &c->spec); }

enum { MOST_EXACT = 1 << 26 };
/* Rows that only write add up: is every state of an exact case a number of bf16? */
static int states_are_short(const dp_problem *p) {
    const int64_t n = p->T * p->HV * p->K * p->V;
    const dp_design design = dp_design_of(DP_BASE_FP64);
    DP_OWN int64_t *t = dp_calloc((size_t)p->T, sizeof *t);
    const dp_recurrent_keep keep = {.n = (int)p->T, .t = t, .S = dp_doubles(n)};
    DP_FREED(dp_result_free) dp_result r;
    int all = 1;
    for (int64_t i = 0; i < p->T; i++)
        t[i] = i;
    dp_recurrent_run_f64(p, &design, 0, &keep, &r);
    for (int64_t i = 0; i < n && all; i++)
        all = dp_bf16d(keep.S[i]) == keep.S[i];
    free(keep.S);
    return all;
}

static dp_status recurrence_finish(const dp_casefile *f, dp_case *c, dp_err *e) {
    const dp_problem *p = &c->p;
    if (f->keys != DP_KEYS_EXACT || f->data || !dp_by_rows(p)) return DP_OK;
    if ((double)p->T * p->HV * p->K * p->V > MOST_EXACT)
        return dp_casefile_refuse(f, "keys", e, "exact goes with states of %d numbers in all",
                                  MOST_EXACT);
    return states_are_short(p) ? DP_OK
                               : dp_casefile_refuse(f, "keys", e,
                                                    "the states of %s need more than the 8 bits of "
                                                    "bf16: fewer tokens, or a larger K",
                                                    c->op_name);
}

static void recurrence_fill_gradients(const dp_casefile *f, dp_case *c) {
    dp_problem made = c->p;
    made.dout = c->p.dout ? NULL : dp_doubles(dp_input_count(&c->p, DP_INPUT_DO));
    made.dstate =
        c->p.dstate || !f->dstate ? NULL : dp_doubles(dp_input_count(&c->p, DP_INPUT_DSTATE));
    dp_inputs_fill_gradients(&made, &c->spec);
    if (made.dout) c->p.dout = made.dout;
    if (made.dstate) c->p.dstate = made.dstate;
}

static void recurrence_describe(const dp_case *c, int ranks, char *out, size_t size) {
    const dp_problem *p = &c->p;
    snprintf(out, size, "T %lld on %d ranks, H %d, HV %d, K %d, V %d, R %d, %d sequences",
             (long long)p->T, ranks, p->H, p->HV, p->K, p->V, p->R, p->Nseq);
}

static void recurrence_write(const dp_case *c, FILE *f) {
    const dp_problem *p = &c->p;
    fprintf(f,
            "H = %d\nHV = %d\nK = %d\nV = %d\nR = %d\nscale = %.17g\ngate = %s\nbeta = "
            "%s\nl2norm = %s\n",
            p->H, p->HV, p->K, p->V, p->R, p->scale, dp_gates[p->gate].word,
            dp_betas[p->beta_form].word, p->l2norm ? "yes" : "no");
    if (dp_gate_inside(p)) fprintf(f, "lower_bound = %.17g\n", p->lower_bound);
    fprintf(f, "chain = %s\nmerge = %s\n", dp_formats[c->chain[0]].name,
            dp_exchange_names[c->merge[0]]);
    if (c->payload[0]) fprintf(f, "payload = %s\n", dp_payload_names[c->payload[0]]);
    if (c->own[0]) fprintf(f, "own = %s\n", dp_own_names[c->own[0]]);
    if (p->dstate) fputs("dstate = yes\n", f);
}

/* ---- a product of M factors ------------------------------------------------------------------ */

/* The factors are drawn where they are used. */

static dp_dims chain_dims(const dp_case *c) {
    return (dp_dims){{[DP_AXIS_CHUNKS] = c->ch.n, [DP_AXIS_K] = c->ch.K}};
}

static dp_status chain_shape(const dp_casefile *f, DP_UNUSED const dp_tensorfile *d, dp_case *c,
                             int64_t *tokens, dp_err *e) {
    *tokens = 0;
    c->ch.regime = (dp_regime)f->regime;
    c->ch.n = (int)f->chunks;
    c->ch.K = (int)f->K;
    if (!f->K) return dp_casefile_refuse(f, "K", e, "missing; key width");
    if ((double)f->chunks * f->K * f->K > (double)DP_CASE_MAX_NUMBERS)
        return dp_casefile_refuse(f, "chunks", e, "the factors hold more than %lld numbers",
                                  DP_CASE_MAX_NUMBERS);
    return DP_OK;
}

static void chain_describe(const dp_case *c, DP_UNUSED int ranks, char *out, size_t size) {
    snprintf(out, size, "%d factors, K %d", c->ch.n, c->ch.K);
}

static void chain_write(const dp_case *c, FILE *f) {
    fprintf(f, "regime = %s\nchunks = %d\nK = %d\nseed = %llu\nchain = %s\n",
            dp_regime_names[c->ch.regime], c->ch.n, c->ch.K, (unsigned long long)c->spec.seed,
            dp_formats[c->chain[0]].name);
}

/* ---- a causal convolution -------------------------------------------------------------------- */

#define MAX_CHANNELS 65536

static dp_dims convolution_dims(const dp_case *c) { return dp_conv_dims(&c->conv); }

static dp_status convolution_shape(const dp_casefile *f, const dp_tensorfile *d, dp_case *c,
                                   int64_t *tokens, dp_err *e) {
    dp_conv *v = &c->conv;
    const dp_tensor *x = d ? dp_tensor_find(d, "x") : NULL,
                    *w = d ? dp_case_input_find(d, &dp_conv_input_fields[DP_CONV_WEIGHT]) : NULL;
    int64_t D = 0, W = 0;
    dp_status s = dp_case_agree(f, "D", f->D, dp_case_dim_from_end(x, 1), 0, &D, e);
    if (!s) s = dp_case_agree(f, "W", f->W, dp_case_dim_from_end(w, 1), 0, &W, e);
    if (s) return s;
    if (d && (!x || !w || !x->n || !w->n || !D || !W || D > MAX_CHANNELS || W > DP_CONV_MAX_WIDTH))
        return dp_casefile_refuse(
            f, "data", e,
            "tensors x and w must be there, not empty, with D up to 65536 and W up to %d",
            DP_CONV_MAX_WIDTH);
    *tokens = x ? x->n / D : 0;
    v->D = (int)D;
    v->W = (int)W;
    v->silu = (int)f->activation;
    return dp_case_set_tokens(f, *tokens, &v->T, e);
}

static void convolution_fill(dp_case *c) { dp_inputs_fill_conv(&c->conv, &c->spec); }

static void convolution_fill_gradients(DP_UNUSED const dp_casefile *f, dp_case *c) {
    if (c->conv.dy) return;
    c->conv.dy = dp_doubles(c->conv.T * c->conv.D);
    dp_inputs_fill_conv_dy(&c->conv, &c->spec);
}

static void convolution_describe(const dp_case *c, int ranks, char *out, size_t size) {
    snprintf(out, size, "T %lld on %d ranks, D %d, W %d, %d sequences", (long long)c->conv.T, ranks,
             c->conv.D, c->conv.W, c->conv.Nseq);
}

static void convolution_write(const dp_case *c, FILE *f) {
    fprintf(f, "D = %d\nW = %d\nactivation = %s\n", c->conv.D, c->conv.W,
            c->conv.silu ? "silu" : "none");
}

/* ---- convolutions before q, k and v ---------------------------------------------------------- */

/* Drawn, or from conv_data. */

/* The data's x is [tokens or more, D], its w [D, W] with the W that the case file states, if any.
 */
static dp_status check_shapes(const dp_case_data *x, const dp_conv *v, dp_err *e) {
    const dp_casefile *f = x->f;
    const dp_tensor *tx = dp_tensor_find(x->d, "x"),
                    *tw = dp_case_input_find(x->d, &dp_conv_input_fields[DP_CONV_WEIGHT]);
    const int64_t W = dp_case_dim_from_end(tw, 1);
    if (!tx || !tw || dp_case_dim_from_end(tx, 1) != v->D || tx->n / v->D < v->T || W < 1 ||
        tw->n != v->D * W)
        return dp_casefile_refuse(f, "conv_data", e, "needs x [%lld or more,%d] and w [%d,W]",
                                  (long long)v->T, v->D, v->D);
    if (W > DP_CONV_MAX_WIDTH)
        return dp_casefile_refuse(f, "conv_data", e, "tensor %s: width %lld, at most %d", tw->name,
                                  (long long)W, DP_CONV_MAX_WIDTH);
    if (f->W && f->W != W)
        return dp_casefile_refuse(f, "W", e, "%s has %lld", f->conv_data, (long long)W);
    return DP_OK;
}

/* x, w and bias from tensors; v has T and D. */
static dp_status load_conv(dp_case_data *x, dp_conv *v, dp_err *e) {
    dp_case_input s[DP_CASE_MAX_INPUTS] = {0};
    dp_status st = check_shapes(x, v, e);
    if (st) return st;
    v->W = (int)dp_case_dim_from_end(
        dp_case_input_find(x->d, &dp_conv_input_fields[DP_CONV_WEIGHT]), 1);
    x->tokens = dp_tensor_find(x->d, "x")->n / v->D;
    const int n = dp_conv_inputs(v, s);
    st = dp_case_check_names(x, s, n, e);
    for (int i = 0; i < n && !st; i++)
        if (!s[i].field->backward) st = dp_case_load_input(x, &s[i], e);
    return st;
}

/* w and bias of the one convolution, and its x in place of what stands for its output. */
static dp_status step_data(const dp_casefile *f, dp_case *c, double **x, dp_conv *v, dp_err *e) {
    DP_FREED(dp_tensorfile_free) dp_tensorfile d = {0};
    dp_conv read = {.T = v->T, .D = v->D};
    DP_OWN char *path = dp_case_sibling(c->path, f->conv_data);
    dp_status st = dp_safetensors_read(path, &d, e);
    if (st) return st;
    dp_case_data data = {.f = f, .key = "conv_data", .d = &d, .widest = c->input_dtype};
    st = load_conv(&data, &read, e);
    if (st)
        dp_conv_free(&read);
    else {
        free(*x);
        *x = read.x;
        v->w = read.w;
        v->bias = read.bias;
        v->W = read.W;
    }
    c->input_dtype = data.widest;
    return st;
}

/* Convolution i, before q, k or v. */
static dp_status one_conv(const dp_casefile *f, dp_case *c, int i, dp_err *e) {
    dp_problem *p = &c->p;
    dp_conv *v = &c->step.conv[i];
    dp_inputs_spec law = c->spec;
    law.seed += 1 + (uint64_t)i;
    v->T = p->T;
    v->D = dp_qkv_heads(p, i) * dp_qkv_width(p, i);
    v->W = (int)f->W;
    v->silu = (int)f->activation;
    c->step.on[i] = 1;
    if (f->conv_data) return step_data(f, c, &p->in[dp_qkv_input(i)], v, e);
    v->w = dp_doubles((int64_t)v->D * v->W);
    v->bias = f->bias ? dp_doubles(v->D) : NULL;
    dp_inputs_fill_conv(v, &law);
    return DP_OK;
}

/* Finite x and w may convolve to what is not. */
static dp_status check_outputs(const dp_casefile *f, const dp_case *c, dp_err *e) {
    dp_err inner = {0};
    if (!dp_problem_check(&c->p, c->allow_nonfinite, &inner)) return DP_OK;
    return dp_casefile_refuse(f, f->conv_data ? "conv_data" : "conv", e,
                              "after the convolution, %s", inner.msg);
}

/* Puts the convolutions of c->step before c->p: its q, k, v are x on entry and the true outputs on
 * return. The latter are in MPFR, rounded to double. The rounding is dp_problem.input_error, which
 * the radius of every result carries. DP_EINPUT: an output without value. */
static dp_status step_build(dp_case *c, dp_err *e) {
    dp_problem *p = &c->p;
    double worst = 0;
    for (int i = 0; i < DP_NQKV; i++) {
        dp_conv *v = &c->step.conv[i];
        if (!c->step.on[i]) continue;
        const int width = dp_qkv_width(p, i);
        dp_conv_result y;
        v->x = p->in[dp_qkv_input(i)];
        v->T = p->T;
        v->D = dp_qkv_heads(p, i) * width;
        v->Nseq = p->Nseq;
        v->cu = dp_calloc((size_t)p->Nseq + 1, sizeof *v->cu);
        memcpy(v->cu, p->cu, sizeof *p->cu * ((size_t)p->Nseq + 1));
        dp_conv_result_alloc(&y, v);
        dp_conv_result_alloc(&c->step.rad[i], v);
        dp_conv_truth(v, c->bits, &y, &c->step.rad[i]);
        p->in[dp_qkv_input(i)] = y.y;
        for (int64_t r = 0; r < p->T * dp_qkv_heads(p, i); r++) {
            const double n = dp_norm_up(width, y.y + r * width),
                         off = dp_norm_up(width, c->step.rad[i].y + r * width);
            if (!(off <= 0x1p-40 * n))
                return dp_fail(e, DP_EINPUT,
                               "%s: the convolution's %s of token %lld, head %lld has no radius, "
                               "or one that is large: %g of %g",
                               c->path, dp_qkv_name(i), (long long)(r / dp_qkv_heads(p, i)),
                               (long long)(r % dp_qkv_heads(p, i)), off, n);
            if (n > 0)
                worst = fmax(worst, off / n); /* a row of zeros (off <= 0 too) is known exactly */
        }
    }
    p->input_error = worst * (1 + 0x1p-30);
    return DP_OK;
}

static dp_status step_finish(const dp_casefile *f, dp_case *c, dp_err *e) {
    dp_status st = DP_OK;
    if (f->conv_data && f->conv.n != 1)
        return dp_casefile_refuse(f, "conv_data", e,
                                  "goes with one convolution, conv = q, k or v, not %d", f->conv.n);
    if (!f->conv_data && !f->W)
        return dp_casefile_refuse(f, "W", e, "missing; required unless conv_data gives it");
    for (int n = 0; n < f->conv.n && !st; n++)
        st = one_conv(f, c, (int)f->conv.v[n], e);
    if (!st) st = step_build(c, e);
    return st ? st : check_outputs(f, c, e);
}

/* ---- a recurrence in calls ------------------------------------------------------------------- */

/* The same case, computed in calls (session.h). */

/* Calls run forward on one device; the state after each call is judged. */
static dp_status check_keys(const dp_casefile *f, dp_err *e) {
    if (f->ranks.n != 1 || f->ranks.v[0] != 1)
        return dp_casefile_refuse(f, "ranks", e, "the calls of a session run on one rank");
    if (f->merge.n != 1)
        return dp_casefile_refuse(f, "merge", e, "one rank merges nothing: name one order");
    if (f->backward && dp_casefile_has(f, "backward"))
        return dp_casefile_refuse(f, "backward", e, "a session has no gradients");
    if (f->dstate) return dp_casefile_refuse(f, "dstate", e, "a session has no gradients");
    return DP_OK;
}

static dp_status session_shape(const dp_casefile *f, const dp_tensorfile *d, dp_case *c,
                               int64_t *tokens, dp_err *e) {
    static const dp_format kept[] = {DP_FP64, DP_FP32, DP_BF16}; /* of session_state */
    dp_err why = {0};
    dp_status s = check_keys(f, e);
    if (!s) s = recurrence_shape(f, d, c, tokens, e);
    if (s) return s;
    if (dp_session_parse(f->session, &c->session, &why))
        return dp_casefile_refuse(f, "session", e, "%s", why.msg);
    if (dp_has_halo(&c->p) && c->session.rolls_back)
        return dp_casefile_refuse(f, "session", e,
                                  "drafted tokens of %s need more of the calls before than a state",
                                  dp_model_of(&c->p)->name);
    c->session.kept =
        f->session_state < 3 ? kept[f->session_state] : (dp_format)(DP_FP16 + f->session_state - 3);
    c->session.prefix = f->session_prefix;
    c->session.slots = f->session_slots;
    c->session.stagger = f->session_stagger;
    c->session.ring = f->session_ring;
    c->backward = 0;
    return DP_OK;
}

/* Copies the first tokens and the initial state of the first sequence to all sequences. */
static void share_prefix(dp_problem *p, int64_t tokens) {
    for (int i = 0; i < DP_NINPUTS; i++) {
        const dp_row_kind kind = dp_input_fields[i].kind;
        double *x = p->in[i];
        const int64_t n = kind == DP_OF_TOKENS      ? dp_input_width(p, i)
                          : kind == DP_OF_SEQUENCES ? dp_input_count(p, i) / p->Nseq
                                                    : 0,
                      rows = kind == DP_OF_TOKENS ? tokens : 1;
        for (int s = 1; x && n && s < p->Nseq; s++)
            memcpy(x + (kind == DP_OF_TOKENS ? p->cu[s] : s) * n,
                   x + (kind == DP_OF_TOKENS ? p->cu[0] : 0) * n,
                   sizeof(double) * (size_t)(rows * n));
    }
}

static dp_status check_pool(const dp_casefile *f, const dp_case *c, dp_err *e) {
    dp_err why = {0};
    const double state = (double)c->p.HV * c->p.K * c->p.V;
    if (dp_session_slots_fit(&c->session, c->p.Nseq, &why))
        return dp_casefile_refuse(f, "session_slots", e, "%s", why.msg);
    if ((double)c->session.slots * state > (double)DP_CASE_MAX_NUMBERS)
        return dp_casefile_refuse(f, "session_slots", e,
                                  "the pool would hold %.3g numbers, at most %lld fit",
                                  (double)c->session.slots * state, DP_CASE_MAX_NUMBERS);
    return DP_OK;
}

static dp_status check_ring(const dp_casefile *f, const dp_case *c, dp_err *e) {
    const dp_session *s = &c->session;
    if (s->ring && !s->slots)
        return dp_casefile_refuse(f, "session_ring", e,
                                  "session_slots is missing: rings lie there");
    if (s->ring && s->rolls_back)
        return dp_casefile_refuse(f, "session_ring", e, "beside drafted tokens");
    return DP_OK;
}

static dp_status session_finish(const dp_casefile *f, dp_case *c, dp_err *e) {
    dp_err why = {0};
    if (check_ring(f, c, e) || recurrence_finish(f, c, e)) return DP_EINPUT;
    if (dp_session_fits(&c->session, c->p.cu, c->p.Nseq, &why))
        return dp_casefile_refuse(f, "session", e, "%s", why.msg);
    if (dp_session_prefix_fits(&c->session, c->p.cu, c->p.Nseq, &why))
        return dp_casefile_refuse(f, "session_prefix", e, "%s", why.msg);
    if (c->session.stagger && c->session.prefix)
        return dp_casefile_refuse(f, "session_stagger", e, "beside session_prefix: all wait there");
    const dp_status st = check_pool(f, c, e);
    if (!st && c->session.prefix) share_prefix(&c->p, c->session.prefix);
    return st;
}

static dp_status step_session_finish(const dp_casefile *f, dp_case *c, dp_err *e) {
    const dp_status st = session_finish(f, c, e);
    return st ? st : step_finish(f, c, e);
}

static void session_describe(const dp_case *c, int ranks, char *out, size_t size) {
    recurrence_describe(c, ranks, out, size);
    const dp_session *s = &c->session;
    dp_text_add(out, size, ", session %s", s->text);
    if (s->prefix) dp_text_add(out, size, ", prefix of %lld shared", (long long)s->prefix);
    if (s->stagger) dp_text_add(out, size, ", staggered by %lld", (long long)s->stagger);
    if (s->slots) dp_text_add(out, size, ", pool of %lld slots", (long long)s->slots);
    if (s->ring) dp_text_add(out, size, ", rings of %lld", (long long)s->ring);
}

static void session_write(const dp_case *c, FILE *f) {
    recurrence_write(c, f);
    fprintf(f, "session = %s\n", c->session.text);
    if (c->session.kept != DP_FP64)
        fprintf(f, "session_state = %s\n", dp_session_kept(&c->session));
    if (c->session.prefix) fprintf(f, "session_prefix = %lld\n", (long long)c->session.prefix);
    if (c->session.stagger) fprintf(f, "session_stagger = %lld\n", (long long)c->session.stagger);
    if (c->session.slots) fprintf(f, "session_slots = %lld\n", (long long)c->session.slots);
    if (c->session.ring) fprintf(f, "session_ring = %lld\n", (long long)c->session.ring);
}

/* ---- the table ------------------------------------------------------------------------------- */

#define ON(B) (1u << DP_BACKEND_##B)
#define ON_RANKS (ON(SIM) | ON(MPI) | ON(CUDA) | ON(NCCL))
#define TENSORS(FIELDS, N, PART)                                                    \
    .inputs = FIELDS, .ninputs = N, .has_ranks = 1, .T = offsetof(dp_case, PART.T), \
    .Nseq = offsetof(dp_case, PART.Nseq), .cu = offsetof(dp_case, PART.cu)
#define PROBLEM                                                                         \
    .has_problem = 1, TENSORS(dp_input_fields, DP_NINPUTS, p), .dims = recurrence_dims, \
    .fill = recurrence_fill, .fill_gradients = recurrence_fill_gradients
#define AT_ONCE                                                                  \
    .has_stages = 1, .shape = recurrence_shape, .describe = recurrence_describe, \
    .write = recurrence_write

#define ROW(ID, NAME, ...) [DP_OP_##ID] = {.name = NAME, __VA_ARGS__}

const dp_operation dp_operations[DP_NOPS] = {
    ROW(RECURRENCE, "recurrence", .what = "recurrence", .bit = DP_CF_REC, .keys = DP_CF_REC,
        .backends = ON_RANKS | ON(LAPACK) | ON(FILE) | ON(SUBJECT),
        .faults = DP_FAULTS_OF_STAGES | DP_FAULTS_OF_CHAIN | DP_FAULTS_OF_REPEATS,
        .is_recurrence = 1, .shrinks = 1, PROBLEM, AT_ONCE, .finish = recurrence_finish),
    ROW(CHAIN, "chain", .what = "product of M factors alone", .bit = DP_CF_CHAIN,
        .keys = DP_CF_CHAIN, .backends = ON(SIM) | ON(FILE),
        .why_none = "op = chain multiplies its factors on the CPU: it has no ranks "
                    "and no kernels",
        .faults = DP_FAULTS_OF_CHAIN, .has_factors = 1, .shrinks = 1, .dims = chain_dims,
        .shape = chain_shape, .describe = chain_describe, .write = chain_write),
    ROW(CONV, "conv", .what = "causal convolution", .bit = DP_CF_CONV, .keys = DP_CF_CONV,
        .backends = ON_RANKS, .faults = DP_FAULTS_OF_CONV, .has_conv = 1, .shrinks = 1,
        TENSORS(dp_conv_input_fields, DP_CONV_NINPUTS, conv), .dims = convolution_dims,
        .shape = convolution_shape, .fill = convolution_fill,
        .fill_gradients = convolution_fill_gradients, .describe = convolution_describe,
        .write = convolution_write),
    /* Repeated runs are of the recurrence behind it, which has cases of its own. */
    ROW(STEP, "step", .what = "a training step: convolutions, then KDA", .bit = DP_CF_STEP,
        .keys = DP_CF_REC | DP_CF_STEP, .model = DP_KDA, .backends = ON_RANKS,
        .faults = DP_FAULTS_OF_STAGES | DP_FAULTS_OF_CHAIN | DP_FAULTS_OF_CONV, .has_front = 1,
        PROBLEM, AT_ONCE, .finish = step_finish),
    /* Faults of stages have cases of their own; so has what can be shrunk. */
    ROW(SESSION, "session", .what = "with the key session in calls that hand the state on",
        .bit = DP_CF_SESSION, .keys = DP_CF_REC | DP_CF_SESSION,
        .backends = ON(SIM) | ON(LAPACK) | ON(CUDA) | ON(SUBJECT),
        .why_none = "a session is computed by the simulated ranks, the chunk solver "
                    "over LAPACKE, a library or the CUDA kernels on one device",
        .faults = DP_FAULTS_OF_CALLS, .is_recurrence = 1, PROBLEM, .shape = session_shape,
        .describe = session_describe, .write = session_write, .finish = session_finish),
    ROW(STEP_SESSION, "step session",
        .what = "with the key session in calls that hand the state on", .bit = DP_CF_STEP_SESSION,
        .keys = DP_CF_REC | DP_CF_STEP | DP_CF_SESSION | DP_CF_STEP_SESSION, .model = DP_KDA,
        .backends = ON(SIM) | ON(SUBJECT),
        .why_none =
            "a session with convolutions in front is computed by the simulated ranks or a program",
        .faults = DP_FAULTS_OF_CALLS, .has_front = 1, PROBLEM, .shape = session_shape,
        .describe = session_describe, .write = session_write, .finish = step_session_finish),
};

dp_packing dp_case_packing(dp_case *c) {
    const dp_operation *op = c->op;
    char *at = (char *)c;
    if (!op->has_ranks) return (dp_packing){0};
    return (dp_packing){.T = (int64_t *)(at + op->T),
                        .cu = (int64_t **)(at + op->cu),
                        .Nseq = (int *)(at + op->Nseq)};
}

int64_t dp_case_tokens(const dp_case *c) {
    const dp_dims d = c->op->dims(c);
    return c->op->has_ranks ? d.of[DP_AXIS_T] : d.of[DP_AXIS_CHUNKS] * DP_CHUNK;
}
