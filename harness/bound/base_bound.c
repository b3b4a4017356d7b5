/* The part that no chain format changes: bounds of every chunk, and the errors of each rank's H and
 * dH. */
#include "error_bound_impl.h"
#include "ref/vocabulary/recurrence.h"

static void errors_of_H(dp_error_bound_base *w, int r, int hv) {
    const dp_sim *s = w->ref;
    const dp_problem *p = s->p;
    const dp_context *c = &s->ctx[r];
    const int i = r * p->HV + hv, sub = c->nlocal - 1;
    if (c->is_last) return;
    double *H = dp_doubles((int64_t)p->K * p->V);
    w->eH[i] = dp_state_error_new(w);
    for (int g = s->first[r][sub]; g < s->first[r][sub + 1]; g++) {
        dp_bound_state(dp_error_bound_chunk(w, g, hv), H, w->eH[i], NULL);
        dp_chunk_state(dp_sim_chunk(s, g, hv), H, NULL);
    }
    free(H);
}

static void errors_of_dH(dp_error_bound_base *w, int r, int hv) {
    const dp_sim *s = w->ref;
    const dp_problem *p = s->p;
    const int i = r * p->HV + hv;
    if (s->ctx[r].is_first) return;
    double *H = dp_doubles((int64_t)p->K * p->V), *dout = dp_doubles((int64_t)DP_CHUNK_MOST * p->V);
    w->edH[i] = dp_state_error_new(w);
    for (int g = s->first[r][1] - 1; g >= s->first[r][0]; g--) {
        dp_sim_gather_do(s, g, hv, dout);
        dp_bound_state_bwd(dp_error_bound_chunk(w, g, hv), dout, H, w->edH[i], NULL);
        dp_chunk_state_bwd(dp_sim_chunk(s, g, hv), dout, H, NULL);
    }
    free(H);
    free(dout);
}

void dp_error_bound_base_init(dp_error_bound_base *w, dp_sim *ref, dp_base base, int power,
                              int backward) {
    const dp_design design = dp_design_of(base);
    dp_error_bound_base_inexact(w, ref, &design, power, backward, NULL);
}

typedef struct {
    double gate;
    int group;
} chunk_gate;

static int by_gate(const void *a, const void *b) {
    const double x = ((const chunk_gate *)a)->gate, y = ((const chunk_gate *)b)->gate;
    return (x > y) - (x < y);
}

/* held [group][HV][K]: number of chunks with the same gate as this one, of one head and channel. If
 * the head has one gate: of all channels. A gate of 0 is exact. */
static void count_held(dp_sim *s, int hv, int x, double *held) {
    const int HV = s->p->HV, K = s->p->K, n = s->ngroup, alike = dp_Kg(s->p) == 1 ? K : 1;
    chunk_gate *of = dp_alloc((size_t)n, sizeof *of);
    for (int g = 0; g < n; g++) {
        const dp_chunk *ch = dp_sim_chunk(s, g, hv);
        const double gate = ch->gcum[(int64_t)(ch->c - 1) * K + x];
        of[g] = (chunk_gate){isnan(gate) ? 0 : gate, g}; /* what is no number is judged by nobody */
    }
    qsort(of, (size_t)n, sizeof *of, by_gate);
    for (int g = 0, end; g < n; g = end) {
        for (end = g + 1; end < n && of[end].gate == of[g].gate;)
            end++;
        for (int i = g * alike; i < end * alike; i++)
            held[((int64_t)of[i / alike].group * HV + hv) * K + x + i % alike] =
                of[g].gate == 0 ? 1 : end - g;
    }
    free(of);
}

/* Relative errors of a chunk's rotated queries and keys, [c][K], [c][n][K]; NULL: nothing
 * is rotated. */
static void turned_errors(const dp_error_bound_base *w, int g, int hv, double **rq, double **rk) {
    const dp_sim *s = w->ref;
    const dp_problem *p = s->p;
    const int P = dp_pairs(p), K = p->K, n = dp_rows(p), c = s->group[g].c;
    if (!p->angle) return;
    *rq = dp_doubles((int64_t)c * K);
    *rk = dp_doubles((int64_t)c * n * K);
    for (int i = 0; i < c * (n + 1); i++) {
        const int64_t t = s->group[g].t0 + i / (n + 1), row = t * p->HV + hv;
        const int j = i % (n + 1) - 1;
        const int key = j < 0 ? 0 : dp_entry_rotated(dp_recurrence_of(p), dp_row_of(p, j)->write);
        const int64_t at = key < 0 ? -1 : dp_factor_token(p, j < 0 ? 0 : key, t);
        const double *x = j < 0 ? s->q + row * K : s->k + (row * n + j) * K;
        if (at >= 0)
            dp_turned_errors(&w->r, P, x, w->Dphi + (at * p->HV + hv) * P,
                             j < 0 ? *rq + (int64_t)i / (n + 1) * K
                                   : *rk + ((int64_t)i / (n + 1) * n + j) * K);
    }
}

static void bound_chunk(dp_error_bound_base *w, int g, int hv, const double *held) {
    dp_sim *s = w->ref;
    const dp_problem *p = s->p;
    const int64_t i = (int64_t)g * p->HV + hv, t0 = s->group[g].t0, h = hv / dp_G(p);
    const int c = s->group[g].c, R = dp_rows(p);
    const dp_chunk_rows of_q = {t0 * p->H + h, p->H, 1, c, p->K},
                        of_k = {(t0 * p->H + h) * R, (int64_t)p->H * R, R, c * R, p->K},
                        of_v = {(t0 * p->HV + hv) * R, (int64_t)p->HV * R, R, c * R, p->V};
    dp_input_error in = dp_error_bound_inputs_of(w);
    double row = 0, *at = p->l2norm ? &row : NULL;
    double *rq = dp_raw_error_rows(&w->r, p->q, w->raw_error.q, of_q, at),
           *rk = dp_raw_error_rows(&w->r, p->k, w->raw_error.k, of_k, at),
           *rv = dp_raw_error_rows(&w->r, p->v, w->raw_error.v, of_v, NULL);
    turned_errors(w, g, hv, &rq, &rk);
    in.g = w->Dg + (t0 * p->HV + hv) * dp_Kg(p);
    in.held = held ? held + i * p->K : NULL;
    in.rq = rq;
    in.rk = rk;
    in.rv = rv;
    in.qk_row += row;
    dp_chunk_inverse(&s->ch[i]);
    dp_bound_intra(&w->b[i], &s->ch[i], w->r, &in);
    free(rq);
    free(rk);
    free(rv);
}

void dp_error_bound_base_inexact(dp_error_bound_base *w, dp_sim *ref, const dp_design *design,
                                 int power, int backward, const dp_raw_error *raw) {
    const dp_problem *p = ref->p;
    const int Kg = dp_Kg(p), nr = ref->N * p->HV;
    *w = (dp_error_bound_base){.ref = ref,
                               .base = design->base,
                               .sending = design->sending,
                               .r = dp_rounding_of_design(design, power),
                               .entries = raw != NULL};
    if (raw) w->raw_error = *raw;
    w->Dg = dp_doubles(p->T * p->HV * Kg);
    w->Dphi = dp_error_bound_angles(p, w->base, &w->r);
    for (int64_t t = 0; t < p->T; t++)
        for (int hv = 0; hv < p->HV; hv++)
            for (int c = 0; c < Kg; c++)
                w->Dg[(t * p->HV + hv) * Kg + c] = dp_error_bound_gate(p, t, hv, c, w->r.u).Dg;
    const int64_t n = (int64_t)ref->ngroup * p->HV;
    w->b = dp_calloc((size_t)n, sizeof *w->b);
    w->eH = dp_calloc((size_t)nr, sizeof *w->eH);
    w->edH = dp_calloc((size_t)nr, sizeof *w->edH);
    double *held = power == 2 ? dp_doubles(n * p->K) : NULL; /* sums of squares alone count them */
#pragma omp parallel for schedule(dynamic, 1)
    for (int z = 0; z < (held ? p->HV * Kg : 0); z++)
        count_held(ref, z / Kg, z % Kg, held);
#pragma omp parallel for schedule(dynamic, 1)
    for (int64_t i = 0; i < n; i++)
        bound_chunk(w, (int)(i / p->HV), (int)(i % p->HV), held);
    free(held);
#pragma omp parallel for schedule(dynamic, 1)
    for (int i = 0; i < nr; i++) {
        errors_of_H(w, i / p->HV, i % p->HV);
        if (backward) errors_of_dH(w, i / p->HV, i % p->HV);
    }
}

void dp_error_bound_base_free(dp_error_bound_base *w) {
    const dp_problem *p = w->ref->p;
    for (int64_t i = 0; i < (int64_t)w->ref->ngroup * p->HV; i++)
        dp_bound_free(&w->b[i]);
    for (int i = 0; i < w->ref->N * p->HV; i++) {
        free(w->eH[i]);
        free(w->edH[i]);
    }
    for (int i = 0; i < DP_NRESULTS; i++)
        free(w->row[i]);
    const int nr = w->ref->N * p->HV;
    for (int i = 0; i < nr; i++) {
        if (w->eS) free(w->eS[i]);
        if (w->edS) free(w->edS[i]);
    }
    free(w->b);
    free(w->eH);
    free(w->edH);
    free(w->Dg);
    free(w->Dphi);
    free(w->eS);
    free(w->edS);
    *w = (dp_error_bound_base){0};
}
