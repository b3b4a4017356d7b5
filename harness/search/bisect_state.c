/* Stages that pass a state on: pre-process, merge, state passes, output (bisect_work.h). */
#include "bisect_work.h"
#include "harness/bound/error_bound_impl.h"
#include "ref/arithmetic/mm.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

/* ---- pre-process and merge ------------------------------------------------------------------- */

double *dp_bisect_zeros_state(const dp_bisect_work *w) {
    return dp_doubles(dp_state_error_size(&w->r, w->p->K, w->p->V));
}

/* The two parts of a state's error as one [K][V] of squares, in place. */
static const double *entries(const dp_bisect_work *w, double *e) {
    const int64_t KV = (int64_t)w->p->K * w->p->V;
    for (int64_t i = 0; i < KV; i++) {
        e[i] += e[KV + i];
        e[KV + i] = 0;
    }
    return e;
}

static void judge_M(dp_bisect_work *w, const char *name, int r, int hv, int sub, int trans,
                    const double *got, const double *want) {
    dp_sim *ref = &w->ref;
    const int K = w->p->K, g0 = ref->first[r][sub], g1 = ref->first[r][sub + 1];
    const int64_t KK = (int64_t)K * K;
    double *P = dp_doubles(KK), *Q = dp_doubles(KK), *M = dp_doubles(KK), *D = dp_doubles(KK),
           *b = dp_doubles(dp_chain_error_size(&w->r, K)), bias = 0;
    for (int x = 0; x < K; x++)
        P[(int64_t)x * K + x] = 1;
    for (int i = 0; i < g1 - g0; i++) {
        const dp_chunk_bound *cb = &w->own[(int64_t)(trans ? g1 - 1 - i : g0 + i) * w->p->HV + hv];
        for (int x = 0; x < K; x++)
            for (int y = 0; y < K; y++) {
                const int64_t from = trans ? (int64_t)y * K + x : (int64_t)x * K + y;
                M[(int64_t)x * K + y] = cb->M[from];
                D[(int64_t)x * K + y] = cb->DM[from];
            }
        const dp_factor_error x = dp_factor_error_of(cb, trans);
        dp_bound_chain_step(&w->r, w->s.chain, K, M, D, &x, cb->mu, P, b, &bias);
        dp_mm(DP_FP64, 0, 0, K, K, K, M, P, Q);
        double *swap = P;
        P = Q;
        Q = swap;
    }
    for (int x = 0; x < K; x++)
        dp_bisect_judge(w, name, dp_bisect_rank_place(w, r, hv, sub), x, K, got + (int64_t)x * K,
                        want + (int64_t)x * K, b + (int64_t)x * K, bias);
    free(P);
    free(Q);
    free(M);
    free(D);
    free(b);
}

static void judge_H(dp_bisect_work *w, int r, int hv, int sub, const double *got,
                    const double *want) {
    const dp_problem *p = w->p;
    double *H = dp_doubles((int64_t)p->K * p->V), *e = dp_bisect_zeros_state(w);
    for (int g = w->ref.first[r][sub]; g < w->ref.first[r][sub + 1]; g++) {
        dp_bound_state(&w->own[(int64_t)g * p->HV + hv], H, e, NULL);
        dp_chunk_state(dp_sim_chunk(&w->ref, g, hv), H, NULL);
    }
    dp_bisect_judge_rows(w, "H", dp_bisect_rank_place(w, r, hv, sub), 0, p->K, p->V, got, want,
                         entries(w, e));
    free(H);
    free(e);
}

static void judge_dH(dp_bisect_work *w, int r, int hv, const double *got, const double *want) {
    const dp_problem *p = w->p;
    double *H = dp_doubles((int64_t)p->K * p->V), *e = dp_bisect_zeros_state(w),
           *dout = dp_doubles((int64_t)DP_CHUNK * p->V);
    for (int g = w->ref.first[r][1] - 1; g >= w->ref.first[r][0]; g--) {
        dp_sim_gather_do(&w->ref, g, hv, dout);
        dp_bound_state_bwd(&w->own[(int64_t)g * p->HV + hv], dout, H, e, NULL);
        dp_chunk_state_bwd(dp_sim_chunk(&w->ref, g, hv), dout, H, NULL);
    }
    dp_bisect_judge_rows(w, "dH", dp_bisect_rank_place(w, r, hv, 0), 0, p->K, p->V, got, want,
                         entries(w, e));
    free(H);
    free(e);
    free(dout);
}

void dp_bisect_stage_pre(dp_bisect_work *w, int backward) {
    const dp_problem *p = w->p;
    const int HV = p->HV, N = w->ref.N;
    dp_sim *s = &w->s, *t = &w->t, *ref = &w->ref;
    double **sM = backward ? s->dM : s->M, **tM = backward ? t->dM : t->M,
           **sH = backward ? s->dH : s->H, **tH = backward ? t->dH : t->H;
    for (int what = 0; what < 2; what++)
        for (int k = 0; k < N; k++)
            for (int hv = 0; hv < HV; hv++) {
                const int r = backward ? N - 1 - k : k, i = r * HV + hv,
                          sub = backward ? 0 : ref->ctx[r].nlocal - 1;
                if (!tM[i]) continue;
                if (!what)
                    judge_M(w, backward ? "dM" : "M", r, hv, sub, backward, sM[i], tM[i]);
                else if (backward)
                    judge_dH(w, r, hv, sH[i], tH[i]);
                else
                    judge_H(w, r, hv, sub, sH[i], tH[i]);
            }
    dp_bisect_give_list(w, sM, tM, backward ? ref->dM : ref->M, (int64_t)p->K * p->K);
    dp_bisect_give_list(w, sH, tH, backward ? ref->dH : ref->H, (int64_t)p->K * p->V);
}

/* The roundings of the exchange itself: pairs, and the inputs of passes, are without error. */
static double **exchange_errors(const dp_bisect_work *w, int dir) {
    const int64_t n = (int64_t)w->ref.N * w->p->HV;
    dp_chain_error *bM = dp_calloc((size_t)n, sizeof *bM);
    double **eH = dp_calloc((size_t)n, sizeof *eH);
    dp_error_bound_base own = {.ref = (dp_sim *)&w->ref,
                               .base = w->base,
                               .sending = {w->s.merge, w->s.payload},
                               .r = w->r,
                               .b = w->own};
    for (int64_t i = 0; i < n; i++) {
        bM[i].b = dp_doubles(dp_chain_error_size(&w->r, w->p->K));
        eH[i] = dp_bisect_zeros_state(w);
    }
    double **e = dp_exchange_errors(&own, dir, w->s.chain, bM, eH, NULL);
    for (int64_t i = 0; i < n; i++)
        free(bM[i].b);
    free(bM);
    dp_error_lists_free(eH, n);
    return e;
}

void dp_bisect_stage_merge(dp_bisect_work *w, int backward) {
    const dp_problem *p = w->p;
    const int HV = p->HV, K = p->K, V = p->V, N = w->ref.N;
    dp_sim *s = &w->s, *t = &w->t, *ref = &w->ref;
    double **e = exchange_errors(w, backward ? -1 : 1);
    for (int k = 0; k < N; k++)
        for (int hv = 0; hv < HV; hv++) {
            const int r = backward ? N - 1 - k : k, i = r * HV + hv;
            if (!e[i]) continue;
            dp_bisect_judge_rows(
                w, backward ? "dS_out" : "S_in",
                dp_bisect_rank_place(w, r, hv, backward ? ref->ctx[r].nlocal - 1 : 0), 0, K, V,
                (backward ? s->dS_out : s->S_in)[i], (backward ? t->dS_out : t->S_in)[i],
                entries(w, e[i]));
        }
    if (backward)
        dp_bisect_give_list(w, s->dS_out, t->dS_out, ref->dS_out, (int64_t)K * V);
    else
        dp_bisect_give_list(w, s->S_in, t->S_in, ref->S_in, (int64_t)K * V);
    dp_error_lists_free(e, (int64_t)N * HV);
}

/* ---- state, output --------------------------------------------------------------------------- */

/* D [n][V] += squares of (a [n][K]) (error e of a state) */
static void through(const dp_bisect_work *w, const double *a, int n, const double *e, double *D) {
    const int K = w->p->K, V = w->p->V;
    for (int i = 0; i < n; i++)
        for (int x = 0; x < K; x++) {
            const double a2 = a[(int64_t)i * K + x] * a[(int64_t)i * K + x];
            for (int v = 0; a2 > 0 && v < V; v++)
                D[(int64_t)i * V + v] += a2 * (e[(int64_t)x * V + v] + e[((int64_t)K + x) * V + v]);
        }
}

void dp_bisect_stage_state(dp_bisect_work *w, int recompute) {
    const dp_problem *p = w->p;
    const int K = p->K, V = p->V;
    const int64_t KV = (int64_t)K * V, size = dp_state_error_size(&w->r, K, V);
    double *all = dp_doubles((int64_t)w->ref.ngroup * p->HV * size);
    FOR_CHUNKS(c) { /* the error before each chunk, and after the last one */
        const int r = c.at.rank, sub = w->ref.group[c.g].sub;
        double *e = all + ((int64_t)c.g * p->HV + c.hv) * size, *next = dp_copy(e, size),
               *DX = dp_doubles((int64_t)c.ref->n * V);
        dp_bisect_judge_rows(w, "h", c.at, 0, K, V, c.s->h, c.t->h, entries(w, e));
        dp_bound_state(c.own, c.ref->h, next, DX);
        through(w, c.ref->w, c.ref->n, e, DX);
        dp_bisect_judge_rows(w, "v_new", c.at, dp_rows(p), c.ref->n, V, c.s->v_new, c.t->v_new, DX);
        if (c.g + 1 < w->ref.first[r][sub + 1])
            memcpy(all + ((int64_t)(c.g + 1) * p->HV + c.hv) * size, next,
                   sizeof(double) * (size_t)size);
        else if (!recompute && (sub < w->ref.ctx[r].nlocal - 1 || w->ref.ctx[r].is_last)) {
            const int64_t z = (c.at.sequence * (int64_t)p->HV + c.hv) * KV;
            dp_bisect_judge_rows(w, "final_state", c.at, 0, K, V, w->s.out.final_state + z,
                                 w->t.out.final_state + z, entries(w, next));
        }
        free(next);
        free(DX);
    }
    FOR_CHUNKS(c) {
        dp_bisect_give(w, c.s->h, c.t->h, c.ref->h, KV, DP_BISECT_ARITH);
        dp_bisect_give(w, c.s->v_new, c.t->v_new, c.ref->v_new, (int64_t)c.ref->n * V,
                       DP_BISECT_STORE);
    }
    free(all);
}

void dp_bisect_stage_output(dp_bisect_work *w) {
    const dp_problem *p = w->p;
    double *e = dp_bisect_zeros_state(w), *DX = dp_doubles((int64_t)DP_CHUNK * dp_rows(p) * p->V),
           row[DP_CHUNK];
    FOR_CHUNKS(c) {
        dp_bound_output(c.own, e, DX, row);
        for (int t = 0; t < c.ref->c; t++) {
            const int64_t z = ((c.at.token + t) * p->HV + c.hv) * p->V;
            dp_place at = c.at;
            at.token += t;
            dp_bisect_judge(w, "o", at, -1, p->V, w->s.out.o + z, w->t.out.o + z, NULL,
                            DP_LAMBDA * sqrt(row[t]));
        }
    }
    free(e);
    free(DX);
}

/* ---- backward -------------------------------------------------------------------------------- */

/* dv_local = Aqk' do: (uo |Aqk|)^2 |do|^2 + (sum_error |Aqk|'|do|)^2 + (us dv_local)^2 */
void dp_bisect_stage_dAv(dp_bisect_work *w) {
    const dp_problem *p = w->p;
    const int V = p->V;
    double *dout = dp_doubles((int64_t)DP_CHUNK * V);
    FOR_CHUNKS(c) {
        const int n = c.ref->n, m = c.ref->c;
        double *D = dp_doubles((int64_t)n * V);
        dp_sim_gather_do(&w->ref, c.g, c.hv, dout);
        for (int i = 0; i < n; i++)
            for (int v = 0; v < V; v++) {
                double abs = 0, sq = 0;
                for (int t = 0; t < m; t++) {
                    const double x =
                        fabs(c.ref->Aqk[(int64_t)t * n + i] * dout[(int64_t)t * V + v]);
                    abs += x;
                    sq += x * x;
                }
                const double sum = dp_sum_error(&w->r, m) * abs,
                             store = (w->r.us + w->r.u) * c.ref->dv_local[(int64_t)i * V + v],
                             tiny = (m + 1) * w->r.tiny;
                D[(int64_t)i * V + v] =
                    w->r.uo * w->r.uo * sq + sum * sum + store * store + tiny * tiny;
            }
        dp_bisect_judge_rows(w, "dv_local", c.at, dp_rows(p), n, V, c.s->dv_local, c.t->dv_local,
                             D);
        free(D);
    }
    FOR_CHUNKS(c)
    dp_bisect_give(w, c.s->dv_local, c.t->dv_local, c.ref->dv_local, (int64_t)c.ref->n * V,
                   DP_BISECT_STORE);
    free(dout);
}

void dp_bisect_stage_state_bwd(dp_bisect_work *w) {
    const dp_problem *p = w->p;
    const int K = p->K, V = p->V;
    const int64_t KV = (int64_t)K * V, size = dp_state_error_size(&w->r, K, V);
    double *all = dp_doubles((int64_t)w->ref.ngroup * p->HV * size),
           *dout = dp_doubles((int64_t)DP_CHUNK * V);
    FOR_CHUNKS_BACK(c) {
        const int r = c.at.rank, sub = w->ref.group[c.g].sub;
        double *e = all + ((int64_t)c.g * p->HV + c.hv) * size, *next = dp_copy(e, size),
               *DdX = dp_doubles((int64_t)c.ref->n * V);
        dp_bisect_judge_rows(w, "dh", c.at, 0, K, V, c.s->dh, c.t->dh, entries(w, e));
        dp_sim_gather_do(&w->ref, c.g, c.hv, dout);
        dp_bound_state_bwd(c.own, dout, c.ref->dh, next, DdX);
        through(w, c.ref->kg, c.ref->n, e, DdX);
        dp_bisect_judge_rows(w, "dv_new", c.at, dp_rows(p), c.ref->n, V, c.s->dv_new, c.t->dv_new,
                             DdX);
        if (c.g > w->ref.first[r][sub])
            memcpy(all + ((int64_t)(c.g - 1) * p->HV + c.hv) * size, next,
                   sizeof(double) * (size_t)size);
        else if (sub > 0 || w->ref.ctx[r].is_first) {
            const int64_t z = (c.at.sequence * (int64_t)p->HV + c.hv) * KV;
            if (w->s.out.ds0)
                dp_bisect_judge_rows(w, "ds0", c.at, 0, K, V, w->s.out.ds0 + z, w->t.out.ds0 + z,
                                     entries(w, next));
        }
        free(next);
        free(DdX);
    }
    FOR_CHUNKS(c) {
        dp_bisect_give(w, c.s->dh, c.t->dh, c.ref->dh, KV, DP_BISECT_ARITH);
        dp_bisect_give(w, c.s->dv_new, c.t->dv_new, c.ref->dv_new, (int64_t)c.ref->n * V,
                       DP_BISECT_STORE);
    }
    free(all);
    free(dout);
}
