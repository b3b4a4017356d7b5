/* Ops gdn, kda, mkda, and the recurrence behind the convolutions of op step (operations.h). */
#include "case_parts.h"
#include "ref/chunk/recurrent.h"
#include "ref/vocabulary/recurrence.h"

#include <stdlib.h>

#define MAX_HEADS 4096
#define MAX_KEYS 4096 /* K and V */

dp_dims dp_recurrence_dims(const dp_case *c) { return dp_problem_dims(&c->p); }

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

dp_status dp_recurrence_shape(const dp_casefile *f, const dp_tensorfile *d, dp_case *c,
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

void dp_recurrence_fill(dp_case *c) { dp_inputs_fill(&c->p, &c->spec); }

enum { MOST_EXACT = 1 << 26 };
/* Rows that only write add up: is every state of an exact case a number of bf16? */
static int states_are_short(const dp_problem *p) {
    const int64_t n = p->T * p->HV * p->K * p->V;
    const dp_design design = dp_design_of(DP_BASE_FP64);
    int64_t *t = dp_calloc((size_t)p->T, sizeof *t);
    const dp_recurrent_keep keep = {.n = (int)p->T, .t = t, .S = dp_doubles(n)};
    dp_result r;
    int all = 1;
    for (int64_t i = 0; i < p->T; i++)
        t[i] = i;
    dp_recurrent_run_f64(p, &design, 0, &keep, &r);
    for (int64_t i = 0; i < n && all; i++)
        all = dp_bf16d(keep.S[i]) == keep.S[i];
    dp_result_free(&r);
    free(t);
    free(keep.S);
    return all;
}

dp_status dp_recurrence_finish(const dp_casefile *f, dp_case *c, dp_err *e) {
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

void dp_recurrence_fill_gradients(const dp_casefile *f, dp_case *c) {
    dp_problem made = c->p;
    made.dout = c->p.dout ? NULL : dp_doubles(dp_input_count(&c->p, DP_INPUT_DO));
    made.dstate =
        c->p.dstate || !f->dstate ? NULL : dp_doubles(dp_input_count(&c->p, DP_INPUT_DSTATE));
    dp_inputs_fill_gradients(&made, &c->spec);
    if (made.dout) c->p.dout = made.dout;
    if (made.dstate) c->p.dstate = made.dstate;
}

void dp_recurrence_describe(const dp_case *c, int ranks, char *out, size_t size) {
    const dp_problem *p = &c->p;
    snprintf(out, size, "T %lld on %d ranks, H %d, HV %d, K %d, V %d, R %d, %d sequences",
             (long long)p->T, ranks, p->H, p->HV, p->K, p->V, p->R, p->Nseq);
}

void dp_recurrence_write(const dp_case *c, FILE *f) {
    static const char *const gates[] = {"log", "softplus", "lower_bound"};
    static const char *const betas[] = {"plain", "sigmoid", "sigmoid2"};
    const dp_problem *p = &c->p;
    fprintf(f,
            "H = %d\nHV = %d\nK = %d\nV = %d\nR = %d\nscale = %.17g\ngate = %s\nbeta = "
            "%s\nl2norm = %s\n",
            p->H, p->HV, p->K, p->V, p->R, p->scale, gates[p->gate], betas[p->beta_form],
            p->l2norm ? "yes" : "no");
    if (p->gate == DP_GATE_LOWER_BOUND) fprintf(f, "lower_bound = %.17g\n", p->lower_bound);
    fprintf(f, "chain = %s\nmerge = %s\n", dp_formats[c->chain[0]].name,
            dp_exchange_names[c->merge[0]]);
    if (c->payload[0]) fprintf(f, "payload = %s\n", dp_payload_names[c->payload[0]]);
    if (c->own[0]) fprintf(f, "own = %s\n", dp_own_names[c->own[0]]);
    if (p->dstate) fputs("dstate = yes\n", f);
}
