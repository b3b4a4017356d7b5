/* The error bounds of one chain format: chains, merges, passes, in the pipeline's order. */
#include "error_bound_impl.h"
#include "ref/arithmetic/mm.h"
#include "ref/chunk/payload.h"

#include <string.h>

/* ---- chains of M ----------------------------------------------------------------------------- */

/* M and DM of a chunk, transposed where the adjoint chain wants them. */
static void chain_factor(const dp_chunk_bound *cb, int K, int trans, double *M, double *D) {
    for (int x = 0; x < K; x++)
        for (int y = 0; y < K; y++) {
            const int64_t from = trans ? (int64_t)y * K + x : (int64_t)x * K + y;
            M[(int64_t)x * K + y] = cb->M[from];
            D[(int64_t)x * K + y] = cb->DM[from];
        }
}

/* Error of the chain's product; traj (NULL: not wanted): Frobenius bounds after 1, 2, 4 ...
 * factors. */
static dp_chain_error chain_error_of(const dp_error_bound_base *w, dp_chain_span span,
                                     double *traj) {
    const int K = w->ref->p->K, n = span.g1 - span.g0;
    const int64_t KK = (int64_t)K * K;
    dp_chain_error e = {.b = dp_doubles(dp_chain_error_size(&w->r, K))};
    double *P = dp_doubles(KK), *Q = dp_doubles(KK), *M = dp_doubles(KK), *D = dp_doubles(KK),
           bias = 0;
    /* the chain starts at I: its first factor is rounded too */
    for (int x = 0; x < K; x++)
        P[(int64_t)x * K + x] = 1;
    for (int i = 0; i < n; i++) {
        const dp_chunk_bound *cb =
            dp_error_bound_chunk(w, span.trans ? span.g1 - 1 - i : span.g0 + i, span.hv);
        chain_factor(cb, K, span.trans, M, D);
        const dp_factor_error x = dp_factor_error_of(cb, span.trans);
        dp_bound_chain_step(&w->r, span.format, K, M, D, &x, cb->mu, P, e.b, &bias);
        dp_mm(DP_FP64, 0, 0, K, K, K, M, P, Q);
        double *t = P;
        P = Q;
        Q = t;
        e.fro = dp_chain_error_norm(&w->r, K, e.b) + bias;
        if (traj && (i & (i + 1)) == 0) *traj++ = e.fro;
    }
    e.bias = bias / DP_LAMBDA;
    free(P);
    free(Q);
    free(M);
    free(D);
    return e;
}

/* ---- passes ---------------------------------------------------------------------------------- */

static void pass_fwd(const dp_error_bound_base *w, int r, int hv, const double *e_in,
                     dp_pass_errors *ps, dp_error_bound *out) {
    const dp_sim *s = w->ref;
    const dp_problem *p = s->p;
    const dp_context *c = &s->ctx[r];
    const int64_t size = dp_state_error_size(&w->r, p->K, p->V);
    double *e = dp_state_error_new(w);
    for (int sub = 0; sub < c->nlocal; sub++) {
        for (int64_t i = 0; i < size; i++)
            e[i] = sub == 0 && e_in ? e_in[i] : 0;
        for (int g = s->first[r][sub]; g < s->first[r][sub + 1]; g++) {
            const int64_t z = (int64_t)g * p->HV + hv;
            const dp_chunk *ch = dp_sim_chunk(s, g, hv);
            ps->eS[z] = dp_copy(e, size);
            ps->DX[z] = dp_doubles((int64_t)ch->n * p->V);
            dp_bound_state(dp_error_bound_chunk(w, g, hv), ch->h, e, ps->DX[z]);
        }
        if (sub < c->nlocal - 1 || c->is_last)
            out->row[DP_RESULT_FINAL_STATE][(int64_t)c->local_seq[sub] * p->HV + hv] =
                dp_state_error_fro(w, e);
    }
    free(e);
}

static void pass_bwd(const dp_error_bound_base *w, int r, int hv, const double *e_in,
                     dp_pass_errors *ps, dp_error_bound *out) {
    const dp_sim *s = w->ref;
    const dp_problem *p = s->p;
    const dp_context *c = &s->ctx[r];
    const int64_t size = dp_state_error_size(&w->r, p->K, p->V);
    double *e = dp_state_error_new(w), *dout = dp_doubles((int64_t)DP_CHUNK_MOST * p->V);
    for (int sub = 0; sub < c->nlocal; sub++) {
        for (int64_t i = 0; i < size; i++)
            e[i] = sub == c->nlocal - 1 && e_in ? e_in[i] : 0;
        for (int g = s->first[r][sub + 1] - 1; g >= s->first[r][sub]; g--) {
            const int64_t z = (int64_t)g * p->HV + hv;
            const dp_chunk *ch = dp_sim_chunk(s, g, hv);
            ps->edS[z] = dp_copy(e, size);
            ps->DdX[z] = dp_doubles((int64_t)ch->n * p->V);
            dp_sim_gather_do(s, g, hv, dout);
            dp_bound_state_bwd(dp_error_bound_chunk(w, g, hv), dout, ch->dh, e, ps->DdX[z]);
        }
        if (sub > 0 || c->is_first)
            out->row[DP_RESULT_DS0][(int64_t)c->local_seq[sub] * p->HV + hv] =
                dp_state_error_fro(w, e);
    }
    free(e);
    free(dout);
}

static void outputs(const dp_error_bound_base *w, int g, int hv, const dp_pass_errors *ps,
                    dp_error_bound *out) {
    const dp_problem *p = w->ref->p;
    const dp_group *gr = &w->ref->group[g];
    const int64_t z = (int64_t)g * p->HV + hv;
    double row[DP_CHUNK_MOST];
    dp_bound_output(dp_error_bound_chunk(w, g, hv), ps->eS[z], ps->DX[z], row);
    for (int t = 0; t < gr->c; t++)
        out->row[DP_RESULT_O][(gr->t0 + t) * p->HV + hv] = dp_error_bound_final(&w->r, row[t]);
}

/* Bounds of the rows of all results, from the errors that enter each rank. */
static void rows_of_pass(const dp_error_bound_base *w, double **eS, double **edS, int backward,
                         dp_error_bound *out) {
    const dp_sim *s = w->ref;
    const dp_problem *p = s->p;
    const int nr = s->N * p->HV;
    const int64_t ng = (int64_t)s->ngroup * p->HV;
    dp_pass_errors ps = {
        dp_calloc((size_t)ng, sizeof(double *)), dp_calloc((size_t)ng, sizeof(double *)),
        dp_calloc((size_t)ng, sizeof(double *)), dp_calloc((size_t)ng, sizeof(double *))};
#pragma omp parallel for schedule(dynamic, 1)
    for (int i = 0; i < nr; i++) {
        pass_fwd(w, i / p->HV, i % p->HV, eS[i], &ps, out);
        if (backward) pass_bwd(w, i / p->HV, i % p->HV, edS[i], &ps, out);
    }
    if (w->r.p == 2) {
#pragma omp parallel for schedule(dynamic, 1)
        for (int64_t i = 0; i < ng; i++)
            outputs(w, (int)(i / p->HV), (int)(i % p->HV), &ps, out);
        if (backward) dp_error_bound_gradients(w, &ps, out);
    }
    dp_error_lists_free(ps.eS, ng);
    dp_error_lists_free(ps.edS, ng);
    dp_error_lists_free(ps.DX, ng);
    dp_error_lists_free(ps.DdX, ng);
}

/* ---- all of it ------------------------------------------------------------------------------- */

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
            bM[i] = chain_error_of(w, fwd, r == s->traj_rank && HV == 1 ? out->traj : NULL);
            out->M[i] = bM[i].fro;
            out->H[i] = dp_state_error_fro(w, w->eH[i]);
        }
        if (backward && !s->ctx[r].is_first) {
            bdM[i] = chain_error_of(w, bwd, NULL);
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
    rows_of_pass(w, eS, edS, backward, out);
    keep(w, out, eS, edS);
}
