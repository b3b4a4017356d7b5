/* A run's limits by its design (limits.h). */
#include "limits.h"
#include "harness/bound/store_bound.h"
#include "token_bounds.h"

#include <math.h>

/* The kind of subject, and its allowance for errors that draws cannot show (reports/verdicts.md).
 * Kinds: the pipeline that was drawn; the same with other orders of summation; kernels that declare
 * their design; others. */
typedef enum { DRAWN, OTHER_SUMS, DECLARED, UNDECLARED, NWHO } who;
static const dp_allowance ALLOWANCE[NWHO][2] = {
    /* arithmetic fp32 or fp64; bf16 */
    [DRAWN] = {{1.2, 1.2, 0.1}, {1.2, 1.2, 0.1}},
    [OTHER_SUMS] = {{1.5, 1.5, 0.15}, {1.4, 1.4, 0.1}},
    [DECLARED] = {{2.1, 2.1, 0.3}, {1.25, 1.4, 0.15}},
    [UNDECLARED] = {{2.1, 4, 0.6}, {1.25, 2, 0.3}},
};

dp_claim dp_run_claim(const dp_run *r) {
    dp_claim c = {r->parts ? r->parts : r->ranks, r->design, r->chain, 0};
    c.design.drop = 0; /* draws drop nothing */
    return c;
}

static who who_computes(const dp_run *r) {
    /* one that names a format of its own for factors (fp16) says how it rounds, if not in what
     * order */
    const int says_factors = r->design.factors != dp_design_of(r->base).factors;
    if (r->undeclared && !says_factors) return UNDECLARED;
    if (r->other_design || r->backend == DP_BACKEND_LAPACK)
        return DECLARED; /* its solves, too, have another order */
    return dp_backends[r->backend].simulated && r->base != DP_BASE_FP64 ? DRAWN : OTHER_SUMS;
}

/* Powers that make an inverse cancel, in fp32 by more than they do in another order. */
#define PRODUCT_MORE 1.15

dp_allowance dp_run_allowance(const dp_run *r) {
    dp_allowance a = ALLOWANCE[who_computes(r)][r->base == DP_BASE_BF16];
    if (r->design.product && r->base != DP_BASE_BF16) {
        a.factor *= PRODUCT_MORE;
        a.local *= PRODUCT_MORE;
    }
    return a;
}

/* A short state makes errors from this share of its unit roundoff on. Measured: e4m3 2.3% of a
 * state, bf16 0.17%, fp16 0.02%. */
#define FROM 0.125

void dp_allow_stored(const dp_run *r, dp_format kept, dp_result_id field, dp_allowance *a) {
    const dp_format f[] = {kept, r->design.final_state, r->design.state};
    const int has_part = field != DP_RESULT_DV && field != DP_RESULT_DWRITE &&
                         field != DP_RESULT_DVALUE3 && field != DP_RESULT_DVALUE4 &&
                         field != DP_RESULT_DS0; /* store_bound.h */
    double u = 0;
    for (int i = 0; i < 3; i++)
        if (dp_formats[f[i]].bits <= 11) u = fmax(u, ldexp(1, -(int)dp_formats[f[i]].bits));
    if (!u || !has_part || r->base == DP_BASE_BF16) return;
    const dp_allowance *as_bf16 = &ALLOWANCE[who_computes(r)][1];
    a->stored = FROM * u;
    a->stored_factor = fmin(a->factor, as_bf16->factor);
    a->stored_local = fmin(a->local, as_bf16->local);
}

double dp_state_far(const dp_design *d) {
    const dp_format f[] = {d->final_state, d->state};
    double far = dp_formats[d->factors].bits < 24 ? 0.05 : 0.005;
    for (int i = 0; i < 2; i++)
        far = fmax(far, ldexp(2, -(int)dp_formats[f[i]].bits));
    return far;
}

dp_design dp_bound_design(const dp_design *design) {
    dp_design d = dp_design_of(design->base);
    d.chunk = design->chunk;
    d.sending = design->sending;
    if (design->gated == DP_SCORES_FACTORED) d.gated = design->gated;
    if (design->base == DP_BASE_BF16) {
        d.stored_inputs = design->stored_inputs;
        d.gated = design->gated;
        d.scored = design->scored;
        d.decays = design->decays;
    }
    return d;
}

int dp_bounds_are_derived(const dp_design *design) {
    const dp_design bounded = dp_bound_design(design);
    dp_design d = *design;
    d.fast_decays = bounded.fast_decays;
    d.final_state = bounded.final_state; /* dp_bounds_store, dp_bounds_keep */
    if (design->base == DP_BASE_BF16) d.fold_beta = bounded.fold_beta;
    for (int i = 0; i < DP_NRESULTS; i++) /* dp_bounds_store adds them */
        if (d.out[i] != DP_FP16) d.out[i] = bounded.out[i];
    return design->chunk && dp_design_same(&d, &bounded);
}

int dp_run_bounded(const dp_run *r) { return dp_bounds_are_derived(&r->design); }

#define AFFORDABLE 20 /* seconds */

/* The design with a state in the base's format: dp_bounds_keep adds the errors of a short one. */
static dp_design long_state(const dp_design *d, const dp_problem *p) {
    dp_design x = *d;
    if (!p->dout || dp_store_has_gradients(p)) x.state = dp_design_of(d->base).state;
    return x;
}

int dp_tokens_are_bounded(const dp_design *d, const dp_problem *p) {
    const dp_design x = long_state(d, p);
    return dp_token_design_is_bounded(&x) && dp_token_bounds_seconds(p) <= AFFORDABLE;
}

int dp_chunks_are_bounded(const dp_design *d, const dp_problem *p) {
    const dp_design x = long_state(d, p);
    return dp_bounds_are_derived(&x);
}

int dp_run_results_bounded(const dp_run *r, const dp_problem *p) {
    return dp_chunks_are_bounded(&r->design, p) || dp_tokens_are_bounded(&r->design, p);
}

double dp_base_roundoff(dp_base b) { return b == DP_BASE_FP64 ? 0x1p-53 : 0x1p-24; }

double dp_base_smallest(dp_base b, int K) { return K * (b == DP_BASE_FP64 ? 0x1p-1022 : 0x1p-126); }

double dp_own_storage(const dp_design *d, dp_result_id field) {
    if (dp_leaves(field)) return ldexp(1, -(int)dp_formats[d->out[field]].bits);
    return dp_base_roundoff(d->base);
}

#define ROUNDING_RMS 0.42466 /* sqrt(1/(8 ln 2)), over u, of log-uniform significands (bits.h) */
double dp_run_storing(const dp_run *r, double u) {
    return ROUNDING_RMS * u * ALLOWANCE[DRAWN][0].factor / dp_run_allowance(r).factor;
}

double dp_run_chain_rounding(const dp_run *r) {
    const dp_format_info *f = &dp_formats[r->chain];
    return r->has_chain ? fmax(f->u_op, f->u_store) / sqrt(12) : 0;
}
