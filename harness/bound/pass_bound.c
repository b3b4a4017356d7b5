/* Errors along the state passes, of outputs and of the states at sequence ends. */
#include "error_bound_impl.h"

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

void dp_error_bound_rows(const dp_error_bound_base *w, double **eS, double **edS, int backward,
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
