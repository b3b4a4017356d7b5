/* The error bounds of one chain format: chains, merges, passes, in the pipeline's order. */
#include "error_bound_impl.h"
#include "ref/chunk/affine.h"

#include <string.h>

static int same(double **a, double **b, int n, int64_t size) {
    if (!a || !b) return a == b;
    for (int i = 0; i < n; i++)
        if (!a[i] != !b[i] || (a[i] && memcmp(a[i], b[i], sizeof(double) * (size_t)size))) return 0;
    return 1;
}

/* Errors of the chains of all ranks, forward and backward [N*HV], and bounds of M, H, dM, dH. */
static void chain_errors(const dp_error_bound_base *w, dp_format chain, int backward,
                         dp_chain_error *bM, dp_chain_error *bdM, dp_error_bound *out) {
    const dp_sim *s = w->ref;
    const int HV = s->p->HV;
    chain = dp_chain_format(s->p, w->base, chain);
#pragma omp parallel for schedule(dynamic, 1)
    for (int i = 0; i < s->N * HV; i++) {
        const int r = i / HV, hv = i % HV, last = s->ctx[r].nlocal - 1;
        const dp_chain_span fwd = {s->first[r][last], s->first[r][last + 1], hv, 0, chain},
                            bwd = {s->first[r][0], s->first[r][1], hv, 1, chain};
        if (!s->ctx[r].is_last) {
            bM[i] = dp_chain_error_of(w, fwd, r == s->traj_rank && HV == 1 ? out->traj : NULL);
            out->M[i] = bM[i].fro;
            out->H[i] = dp_state_error_fro(w, w->eH[i]);
        }
        if (backward && !s->ctx[r].is_first) {
            bdM[i] = dp_chain_error_of(w, bwd, NULL);
            out->dM[i] = bdM[i].fro;
            out->dH[i] = dp_state_error_fro(w, w->edH[i]);
        }
    }
}

static void chain_errors_free(dp_chain_error *a, int n) {
    for (int i = 0; i < n; i++)
        free(a[i].b);
    free(a);
}

/* A sound bound of the rows that are not states is far above the tensors: it is left out. */
static void drop_rows(dp_error_bound *out) {
    for (int i = 0; i < DP_NRESULTS; i++)
        if (dp_result_fields[i].kind != DP_OF_SEQUENCES) {
            free(out->row[i]);
            out->row[i] = NULL;
        }
}

/* Do the errors that enter the ranks equal those of the last run, whose row bounds are kept? */
static int as_before(const dp_error_bound_base *w, const dp_error_bound *out, double **eS,
                     double **edS) {
    const int n = w->ref->N * w->ref->p->HV;
    const int64_t size = dp_state_error_size(&w->r, w->ref->p->K, w->ref->p->V);
    return w->eS && !out->entry[DP_QKV_Q] && same(eS, w->eS, n, size) && same(edS, w->edS, n, size);
}

/* Keeps what entered the ranks and the row bounds for the next format. */
static void keep(dp_error_bound_base *w, const dp_error_bound *out, double **eS, double **edS) {
    const dp_problem *p = w->ref->p;
    dp_error_lists_free(w->eS, w->ref->N * p->HV);
    dp_error_lists_free(w->edS, w->ref->N * p->HV);
    w->eS = eS;
    w->edS = edS;
    for (int i = 0; i < DP_NRESULTS; i++) {
        free(w->row[i]);
        w->row[i] = out->row[i] ? dp_copy(out->row[i], dp_error_bound_row_count(p, i)) : NULL;
    }
}

void dp_error_bound_run(dp_error_bound_base *w, dp_format chain, int backward,
                        dp_error_bound *out) {
    const dp_problem *p = w->ref->p;
    const int nr = w->ref->N * p->HV;
    dp_chain_error *bM = dp_calloc((size_t)nr, sizeof *bM),
                   *bdM = dp_calloc((size_t)nr, sizeof *bdM);
    dp_error_bound_alloc(p, w->ref->N, backward, w->entries, out);
    if (w->r.p == 1) drop_rows(out);
    chain_errors(w, chain, backward, bM, bdM, out);
    double **eS = dp_exchange_errors(w, 1, chain, bM, w->eH, out->S_in),
           **edS = backward ? dp_exchange_errors(w, -1, chain, bdM, w->edH, out->dS_out) : NULL;
    chain_errors_free(bM, nr);
    chain_errors_free(bdM, nr);
    if (as_before(w, out, eS, edS)) {
        for (int i = 0; i < DP_NRESULTS; i++)
            if (out->row[i])
                memcpy(out->row[i], w->row[i],
                       sizeof(double) * (size_t)dp_error_bound_row_count(p, i));
        dp_error_lists_free(eS, nr);
        dp_error_lists_free(edS, nr);
        return;
    }
    dp_error_bound_rows(w, eS, edS, backward, out);
    keep(w, out, eS, edS);
}
