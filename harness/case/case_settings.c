/* Settings of a case file as those of a case: op, lists of ranks and policies, law of the inputs
 * (case_parts.h). */
#define _GNU_SOURCE
#include "case_parts.h"
#include "operations.h"
#include "ref/vocabulary/recurrence_text.h"
#include "ref/vocabulary/text.h"

#include <string.h>

dp_format dp_case_dtype(const dp_casefile *f) {
    static const dp_format order[] = {DP_FP64, DP_FP32, DP_BF16}; /* of the key's choices */
    return order[f->dtype];
}

static dp_inputs_spec spec_of(const dp_casefile *f) {
    const int raw_g = f->gate != DP_GATE_LOG, raw_b = f->beta != DP_BETA_PLAIN;
    return (dp_inputs_spec){.seed = (uint64_t)f->seed,
                            .dtype = dp_casefile_has(f, "dtype") ? dp_case_dtype(f) : DP_BF16,
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
    if (!dp_has_beta(&c->p) && f->beta != DP_BETA_PLAIN)
        return dp_casefile_refuse(f, "beta", e, "op = %s has %s", c->op_name,
                                  dp_by_gates(&c->p)  ? "erase and write in place of beta"
                                  : dp_by_rows(&c->p) ? "rows of its own in place of beta"
                                                      : "no beta");
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
    if (f->keys == DP_KEYS_EXACT && dp_by_rows(&c->p))
        return dp_casefile_refuse(f, "keys", e, "exact goes with other recurrences than dplr");
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

static void recurrence_settings(const dp_casefile *f, dp_problem *p) {
    p->model = f->op < DP_NMODELS ? (dp_model)f->op : dp_operations[dp_casefile_op(f)].model;
    p->gate = (dp_gate)f->gate;
    p->lower_bound = f->lower_bound;
    p->beta_form = (dp_beta)f->beta;
    p->l2norm = (int)f->l2norm;
    const dp_user_recurrence *own = dp_user_recurrence_installed(); /* of this call */
    if (!own) return;
    p->model = DP_USER;
    if (own->rows.normed && !dp_casefile_has(f, "l2norm")) p->l2norm = 1;
}

dp_status dp_case_settings(const dp_casefile *f, dp_case *c, dp_err *e) {
    c->reason = dp_strdup(f->reason);
    c->source = dp_strdup(f->source);
    if (f->unjudged) c->unjudged = dp_strdup(f->unjudged);
    c->op = dp_casefile_op(f);
    c->op_name = dp_casefile_op_name(f);
    c->smoke = (int)f->smoke;
    c->backward = (int)f->backward;
    c->bits = (int)f->bits;
    c->truth = (dp_truth_pick)f->truth;
    c->allow_nonfinite = (int)f->nonfinite;
    c->spec = spec_of(f);
    c->input_dtype = dp_op_of(c)->has_factors ? DP_FP32 : c->spec.dtype;
    copy_lists(f, c);
    recurrence_settings(f, &c->p);
    dp_status s = check_inputs(f, c, e);
    if (!s) s = check_unjudged(f, e);
    return s ? s : check_gate(f, e);
}
