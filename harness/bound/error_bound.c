#include "error_bound.h"
#include "ref/arithmetic/elementary.h"
#include "ref/arithmetic/mm.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

/* From a p-th power to the bound itself. */
static double final(const dp_rounding *r, double x) { return r->p == 2 ? DP_LAMBDA * sqrt(x) : x; }

static double *state_error(const dp_error_bound_base *w) {
    return dp_doubles(dp_state_error_size(&w->r, w->ref->p->K, w->ref->p->V));
}
static double state_fro(const dp_error_bound_base *w, const double *e) {
    return dp_error_fro(&w->r, e, dp_state_error_size(&w->r, w->ref->p->K, w->ref->p->V));
}

/* ---- errors of the activated inputs -------------------------------------------------------------
 * q, k: y = x rstd: each entry 2u, + us where the normalised vector is stored short; the row its
 *       rstd, sum_error(K) / 2 + 4u.
 * gate: softplus form  |Dg| <= 10 u |g| + u |x| a sigmoid(x);
 *       lower bound  |Dg| <= 8 u |g| + 5 u |a x| |lb| s (1 - s)
 *       (x = raw + bias is rounded once, a = exp(A_log) and the functions are good to 2 u each).
 * beta: sigmoid, 6 u relative. Inputs wider than the base's arithmetic are rounded once on
 *       entry: u. */
static double sigmoid(double x) {
    return x >= 0 ? 1 / (1 + dp_exp(-x)) : dp_exp(x) / (1 + dp_exp(x));
}

dp_gate_error dp_error_bound_gate(const dp_problem *p, int64_t t, int hv, int c, double u) {
    const int Kg = dp_Kg(p);
    const double raw = p->g[(t * p->HV + hv) * Kg + c];
    if (p->gate == DP_GATE_LOG)
        return (dp_gate_error){
            .g = raw, .dx = 1, .Dg = u > 0x1p-53 && (double)(float)raw != raw ? u * fabs(raw) : 0};
    const double x = raw + (p->dt_bias ? p->dt_bias[hv * Kg + c] : 0),
                 a = p->A_log ? dp_exp(p->A_log[hv]) : 1;
    const double s = p->gate == DP_GATE_SOFTPLUS ? sigmoid(x) : sigmoid(a * x);
    dp_gate_error e;
    if (p->gate == DP_GATE_SOFTPLUS) {
        e.g = -a * (x > 0 ? x + dp_log1p(dp_exp(-x)) : dp_log1p(dp_exp(x)));
        e.dx = -a * s;
        e.dA = e.g;
        e.Dg = 10 * u * fabs(e.g) + u * fabs(x * e.dx);
        e.Ddx = 10 * u + u * fabs(x);
    } else {
        e.g = p->lower_bound * s;
        e.dx = p->lower_bound * s * (1 - s) * a;
        e.dA = e.dx * x;
        e.Dg = 8 * u * fabs(e.g) + 5 * u * fabs(x * e.dx);
        e.Ddx = 12 * u + 5 * u * fabs(a * x) + (s < 1 ? 2 * u / (1 - s) : 0);
    }
    return e;
}

dp_input_error dp_error_bound_inputs(const dp_problem *p, dp_base base, const dp_rounding *r) {
    const double entry = base == DP_BASE_FP64 ? 0 : r->u, norm = 2 * r->u + r->us;
    return (dp_input_error){.q = p->l2norm ? norm : entry,
                            .k = p->l2norm ? norm : entry,
                            .qk_row = p->l2norm ? dp_sum_error(r, p->K) / 2 + 4 * r->u : 0,
                            .v = entry,
                            .beta = p->beta_form == DP_BETA_PLAIN ? entry : 6 * r->u,
                            .sg = (int64_t)p->HV * dp_Kg(p),
                            .Kg = dp_Kg(p)};
}

static dp_input_error input_error(const dp_error_bound_base *w) {
    return dp_error_bound_inputs(w->ref->p, w->base, &w->r);
}

static double relative(double err, double x) { return err > 0 ? err / fabs(x) : 0; }

/* Relative errors of the entries of a chunk's rows (width n, one a token and key) and, normalised,
 * the largest one of a row's 1/norm: <y, err> / |x| with |y| = 1, by squares for a probable bound.
 * rows: first row, their distance. */
static double *given_rows(const dp_rounding *r, const double *x, const double *err, int64_t first,
                          int64_t step, int R, int rows, int width, double *row) {
    if (!err) return NULL;
    double *rel = dp_doubles((int64_t)rows * width);
    for (int i = 0; i < rows; i++) {
        const int64_t at = (first + i / R * step + i % R) * width;
        const double n = dp_norm_fro(width, x + at);
        double s = 0;
        for (int j = 0; j < width; j++) {
            rel[(int64_t)i * width + j] = relative(err[at + j], x[at + j]);
            s += err[at + j] > 0 ? dp_pw(r, x[at + j] / n * err[at + j] / n) : 0;
        }
        if (row) *row = fmax(*row, r->p == 2 ? sqrt(s) : s);
    }
    return rel;
}

/* |err| / |x| of one row. */
static double given_norm(const double *x, const double *err, int64_t row, int width) {
    return err ? relative(dp_norm_fro(width, err + row * width),
                          dp_norm_fro(width, x + row * width))
               : 0;
}

/* ---- chain-independent part ------------------------------------------------------------------ */

static const dp_chunk_bound *bound_at(const dp_error_bound_base *w, int g, int hv) {
    return &w->b[(int64_t)g * w->ref->p->HV + hv];
}

static void errors_of_H(dp_error_bound_base *w, int r, int hv) {
    const dp_sim *s = w->ref;
    const dp_problem *p = s->p;
    const dp_context *c = &s->ctx[r];
    const int i = r * p->HV + hv, sub = c->nlocal - 1;
    if (c->is_last) return;
    double *H = dp_doubles((int64_t)p->K * p->V);
    w->eH[i] = state_error(w);
    for (int g = s->first[r][sub]; g < s->first[r][sub + 1]; g++) {
        dp_bound_state(bound_at(w, g, hv), H, w->eH[i], NULL);
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
    w->edH[i] = state_error(w);
    for (int g = s->first[r][1] - 1; g >= s->first[r][0]; g--) {
        dp_sim_gather_do(s, g, hv, dout);
        dp_bound_state_bwd(bound_at(w, g, hv), dout, H, w->edH[i], NULL);
        dp_chunk_state_bwd(dp_sim_chunk(s, g, hv), dout, H, NULL);
    }
    free(H);
    free(dout);
}

void dp_error_bound_base_init(dp_error_bound_base *w, dp_sim *ref, dp_base base, int power,
                              int backward) {
    const dp_design design = dp_design_of(base);
    dp_error_bound_base_given(w, ref, &design, power, backward, NULL);
}

void dp_error_bound_base_given(dp_error_bound_base *w, dp_sim *ref, const dp_design *design,
                               int power, int backward, const dp_given_error *given) {
    const dp_problem *p = ref->p;
    const int Kg = dp_Kg(p), nr = ref->N * p->HV;
    *w = (dp_error_bound_base){.ref = ref,
                               .base = design->base,
                               .r = dp_rounding_of_design(design, power),
                               .entries = given != NULL};
    if (given) w->given = *given;
    w->Dg = dp_doubles(p->T * p->HV * Kg);
    for (int64_t t = 0; t < p->T; t++)
        for (int hv = 0; hv < p->HV; hv++)
            for (int c = 0; c < Kg; c++)
                w->Dg[(t * p->HV + hv) * Kg + c] = dp_error_bound_gate(p, t, hv, c, w->r.u).Dg;
    const int64_t n = (int64_t)ref->ngroup * p->HV;
    w->b = dp_calloc((size_t)n, sizeof *w->b);
    w->eH = dp_calloc((size_t)nr, sizeof *w->eH);
    w->edH = dp_calloc((size_t)nr, sizeof *w->edH);
#pragma omp parallel for schedule(dynamic, 1)
    for (int64_t i = 0; i < n; i++) {
        const int g = (int)(i / p->HV), hv = (int)(i % p->HV);
        dp_input_error in = input_error(w);
        const int64_t t0 = ref->group[g].t0, h = hv / dp_G(p);
        const int c = ref->group[g].c;
        double row = 0, *at = p->l2norm ? &row : NULL;
        in.g = w->Dg + (t0 * p->HV + hv) * Kg;
        double *rq = given_rows(&w->r, p->q, w->given.q, t0 * p->H + h, p->H, 1, c, p->K, at),
               *rv = given_rows(&w->r, p->v, w->given.v, (t0 * p->HV + hv) * p->R,
                                (int64_t)p->HV * p->R, p->R, c * p->R, p->V, NULL);
        double *rk = given_rows(&w->r, p->k, w->given.k, (t0 * p->H + h) * p->R,
                                (int64_t)p->H * p->R, p->R, c * p->R, p->K, at);
        in.rq = rq;
        in.rk = rk;
        in.rv = rv;
        in.qk_row += row;
        dp_chunk_inverse(&ref->ch[i]);
        dp_bound_intra(&w->b[i], &ref->ch[i], w->r, &in);
        free(rq);
        free(rk);
        free(rv);
    }
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
    free(w->eS);
    free(w->edS);
    *w = (dp_error_bound_base){0};
}

/* ---- chain and merges ------------------------------------------------------------------------ */

/* Error of M after the chain over groups [g0, g1); the adjoint chain runs over the transposed
 * factors, last to first. What truncation adds to a probable bound is a worst case: bias is divided
 * by lambda here, since everything is multiplied by it at the end. */
typedef struct {
    double *b, bias, fro;
} chain_error;

static chain_error chain_bound(const dp_error_bound_base *w, int g0, int g1, int hv, dp_format f,
                               int trans, double *traj) {
    dp_sim *s = w->ref;
    const int K = s->p->K, n = g1 - g0;
    const int64_t KK = (int64_t)K * K, size = dp_chain_error_size(&w->r, K);
    chain_error e = {.b = dp_doubles(size)};
    double *P = dp_doubles(KK), *Q = dp_doubles(KK), *M = dp_doubles(KK), *D = dp_doubles(KK),
           bias = 0;
    /* the chain starts at I: its first factor is rounded too */
    for (int x = 0; x < K; x++)
        P[(int64_t)x * K + x] = 1;
    for (int i = 0; i < n; i++) {
        const dp_chunk_bound *cb = bound_at(w, trans ? g1 - 1 - i : g0 + i, hv);
        for (int x = 0; x < K; x++)
            for (int y = 0; y < K; y++) {
                const int64_t from = trans ? (int64_t)y * K + x : (int64_t)x * K + y;
                M[(int64_t)x * K + y] = cb->M[from];
                D[(int64_t)x * K + y] = cb->DM[from];
            }
        dp_bound_chain_step(&w->r, f, K, M, D, cb->mu, P, e.b, &bias);
        dp_mm(DP_FP64, 0, 0, K, K, K, M, P, Q);
        double *t = P;
        P = Q;
        Q = t;
        e.fro = dp_error_fro(&w->r, e.b, size) + bias;
        if (traj && (i & (i + 1)) == 0) *traj++ = e.fro;
    }
    e.bias = bias / DP_LAMBDA;
    free(P);
    free(Q);
    free(M);
    free(D);
    return e;
}

/* Errors of S_in of every rank (dir = +1) or dS_out (dir = -1). start: error-free. Returns [N*HV]
 * -> state error. */
static double **merge_errors(const dp_error_bound_base *w, int dir, const chain_error *bM,
                             double **eH, double *fro) {
    dp_sim *s = w->ref;
    const dp_problem *p = s->p;
    const int HV = p->HV, K = p->K, V = p->V;
    const int64_t KV = (int64_t)K * V;
    double **e = dp_calloc((size_t)s->N * HV, sizeof *e), *mu = dp_doubles((int64_t)s->N * HV);
    for (int i = 0; i < s->N * HV; i++) {
        const double *M = (dir > 0 ? s->M : s->dM)[i];
        if (M) mu[i] = dp_norm2_up(K, K, M);
    }
    for (int i = 0; i < s->N * HV; i++) {
        const int r = i / HV, hv = i % HV;
        const dp_context *c = &s->ctx[r];
        if (dir > 0 ? c->is_first : c->is_last) continue;
        const int far = dir > 0 ? r - c->pre_num_ranks : r + c->post_num_ranks;
        e[i] = state_error(w);
        for (int j = far; j != r; j += dir) {
            const int z = j * HV + hv;
            const double *H = (dir > 0 ? s->H : s->dH)[z],
                         *S = j != far ? (dir > 0 ? s->S_in : s->dS_out)[z] : NULL;
            const int seq =
                dir > 0 ? s->ctx[far].local_seq[s->ctx[far].nlocal - 1] : s->ctx[far].local_seq[0];
            const double *start = dir > 0 ? p->s0 : p->dstate;
            if (!S && start) S = start + ((int64_t)seq * HV + hv) * KV;
            /* zeros times M: only H arrives, as it is */
            if (!S)
                memcpy(e[i], eH[z], sizeof(double) * dp_state_error_size(&w->r, K, V));
            else
                dp_bound_merge_step(&w->r, K, V, (dir > 0 ? s->M : s->dM)[z], mu[z], bM[z].b,
                                    bM[z].bias, S, H, eH[z], e[i]);
        }
        fro[i] = state_fro(w, e[i]);
    }
    free(mu);
    return e;
}

/* ---- state passes, outputs, gradients -------------------------------------------------------- */

typedef struct {
    double **eS, **edS, **DX, **DdX;
} passes; /* [ngroup*HV] */

static void pass_fwd(const dp_error_bound_base *w, int r, int hv, const double *e_in, passes *ps,
                     dp_error_bound *out) {
    const dp_sim *s = w->ref;
    const dp_problem *p = s->p;
    const dp_context *c = &s->ctx[r];
    const int64_t size = dp_state_error_size(&w->r, p->K, p->V);
    double *e = state_error(w);
    for (int sub = 0; sub < c->nlocal; sub++) {
        for (int64_t i = 0; i < size; i++)
            e[i] = sub == 0 && e_in ? e_in[i] : 0;
        for (int g = s->first[r][sub]; g < s->first[r][sub + 1]; g++) {
            const int64_t z = (int64_t)g * p->HV + hv;
            const dp_chunk *ch = dp_sim_chunk(s, g, hv);
            ps->eS[z] = dp_copy(e, size);
            ps->DX[z] = dp_doubles((int64_t)ch->n * p->V);
            dp_bound_state(bound_at(w, g, hv), ch->h, e, ps->DX[z]);
        }
        if (sub < c->nlocal - 1 || c->is_last)
            out->row[DP_RESULT_FINAL_STATE][(int64_t)c->local_seq[sub] * p->HV + hv] =
                state_fro(w, e);
    }
    free(e);
}

static void pass_bwd(const dp_error_bound_base *w, int r, int hv, const double *e_in, passes *ps,
                     dp_error_bound *out) {
    const dp_sim *s = w->ref;
    const dp_problem *p = s->p;
    const dp_context *c = &s->ctx[r];
    const int64_t size = dp_state_error_size(&w->r, p->K, p->V);
    double *e = state_error(w), *dout = dp_doubles((int64_t)DP_CHUNK_MOST * p->V);
    for (int sub = 0; sub < c->nlocal; sub++) {
        for (int64_t i = 0; i < size; i++)
            e[i] = sub == c->nlocal - 1 && e_in ? e_in[i] : 0;
        for (int g = s->first[r][sub + 1] - 1; g >= s->first[r][sub]; g--) {
            const int64_t z = (int64_t)g * p->HV + hv;
            const dp_chunk *ch = dp_sim_chunk(s, g, hv);
            ps->edS[z] = dp_copy(e, size);
            ps->DdX[z] = dp_doubles((int64_t)ch->n * p->V);
            dp_sim_gather_do(s, g, hv, dout);
            dp_bound_state_bwd(bound_at(w, g, hv), dout, ch->dh, e, ps->DdX[z]);
        }
        if (sub > 0 || c->is_first)
            out->row[DP_RESULT_DS0][(int64_t)c->local_seq[sub] * p->HV + hv] = state_fro(w, e);
    }
    free(e);
    free(dout);
}

static void outputs(const dp_error_bound_base *w, int g, int hv, const passes *ps,
                    dp_error_bound *out) {
    const dp_problem *p = w->ref->p;
    const dp_group *gr = &w->ref->group[g];
    const int64_t z = (int64_t)g * p->HV + hv;
    double row[DP_CHUNK_MOST];
    dp_bound_output(bound_at(w, g, hv), ps->eS[z], ps->DX[z], row);
    for (int t = 0; t < gr->c; t++)
        out->row[DP_RESULT_O][(gr->t0 + t) * p->HV + hv] = final(&w->r, row[t]);
}

/* Through the activations (math.md c):
 *   L2 norm  dx = rstd (dy - y <y, dy>): the projection does not lengthen, so
 *              |error| <= rstd (|error of dy| + (4 e_y + 2 gamma_K + 6u) |dy|);
 *            where the row x was itself computed, its y and rstd are each off by at most
 *              |error of x| / |x| more: 8 times that
 *   gate     entrywise |dg/dx| (D + relative error of dg/dx |dg|);
 *   beta     z s(1-s) D + 6 u z s |dbeta|    (1 - s cancels when s ~ 1)
 * sums over tokens for dA_log, ddt_bias: squares add inside a chunk, errors themselves from chunk
 *          to chunk, since an error of the state that enters a rank reaches all its chunks alike;
 *          plus sum_error of the sum of absolute values. */
typedef struct {
    double *A, *Aabs, *B, *Babs;
} partial; /* [HV], [HV][Kg]: p-th powers, and sums of absolute values */

static void raw_gate(const dp_error_bound_base *w, int64_t t, int hv, const double *D,
                     const double *val, dp_error_bound *out, partial *pa) {
    const dp_problem *p = w->ref->p;
    const int K = p->K, Kg = dp_Kg(p);
    const dp_rounding *r = &w->r;
    double row = 0;
    for (int c = 0; c < Kg; c++) {
        double d = D[c], v = val[c];
        if (Kg == 1) {
            double a = 0;
            d = v = 0;
            for (int k = 0; k < K; k++) {
                d += D[k];
                v += val[k];
                a += fabs(val[k]);
            }
            d += dp_pw(r, dp_sum_error(r, K) * a);
        }
        const dp_gate_error ge = dp_error_bound_gate(p, t, hv, c, r->u);
        const double x = dp_pw(r, ge.dx) * d + dp_pw(r, ge.dx * (ge.Ddx + r->u) * v);
        const double y = dp_pw(r, ge.dA) * d + dp_pw(r, ge.dA * (ge.Ddx + 3 * r->u) * v) +
                         (p->gate == DP_GATE_SOFTPLUS ? dp_pw(r, ge.Dg * v) : 0);
        const double z = x + dp_pw(r, r->us * ge.dx * v);
        row += r->p == 2 ? z : z * z;
        pa->A[hv] += y;
        pa->Aabs[hv] += fabs(ge.dA * v);
        pa->B[hv * Kg + c] += x;
        pa->Babs[hv * Kg + c] += fabs(ge.dx * v);
    }
    out->row[DP_RESULT_DG][t * p->HV + hv] = r->p == 2 ? final(r, row) : sqrt(row);
}

/* One row of dq or dk entry by entry, D the errors of the gradient of the activated row: dx_d =
 * rstd (dy_d - y_d <y, dy>), so each D_d and y_d times those of the inner product. What is known of
 * the row as a whole, a and b, stays so. */
static void entries(const dp_error_bound_base *w, const double *x, int64_t row, double rstd,
                    const double *D, double a, double b, double *entry, double *rest) {
    const dp_problem *p = w->ref->p;
    const dp_rounding *r = &w->r;
    const int K = p->K;
    double inner = 0;
    for (int d = 0; p->l2norm && d < K; d++)
        inner += dp_pw(r, x[row * K + d] * rstd) * D[d];
    for (int d = 0; d < K; d++)
        entry[row * K + d] =
            dp_pw(r, rstd) * (D[d] + (p->l2norm ? dp_pw(r, x[row * K + d] * rstd) * inner : 0));
    rest[row] = dp_pw(r, rstd) * (dp_pw(r, a) + dp_pw(r, b));
}

static void gradients(const dp_error_bound_base *w, int g, const passes *ps, dp_error_bound *out,
                      partial *pa) {
    const dp_sim *s = w->ref;
    const dp_problem *p = s->p;
    const dp_group *gr = &s->group[g];
    const dp_rounding *r = &w->r;
    const int K = p->K, R = p->R, c = gr->c, n = c * R, G = dp_G(p);
    const dp_input_error in = input_error(w);
    const int64_t len = 2 * c + 6 * n + 2 * (int64_t)c * K;
    const int each = out->entry[DP_QKV_Q] != NULL;
    const int64_t eK = each ? (int64_t)p->H * K : 0;
    double *eq = dp_doubles(eK * c), *ek = dp_doubles(eK * n),
           *one = dp_doubles(each ? (int64_t)c * K + (int64_t)n * (K + p->V) : 0);
    double *buf = dp_doubles(len), *dout = dp_doubles((int64_t)c * p->V),
           *sq = dp_doubles((int64_t)p->H * 2 * c), *sk = dp_doubles((int64_t)p->H * 2 * n),
           *sb = dp_doubles((int64_t)p->HV * c);
    dp_grad_bound b = {.dq = buf,
                       .ndq = buf + c,
                       .dk = buf + 2 * c,
                       .ndk = buf + 2 * c + n,
                       .dv = buf + 2 * c + 2 * n,
                       .ndv = buf + 2 * c + 3 * n,
                       .dbeta = buf + 2 * c + 4 * n,
                       .vdbeta = buf + 2 * c + 5 * n,
                       .dg = buf + 2 * c + 6 * n,
                       .vdg = buf + 2 * c + 6 * n + (int64_t)c * K};
    if (each) {
        b.edq = one;
        b.edk = one + (int64_t)c * K;
        b.edv = one + (int64_t)(c + n) * K;
    }
    for (int hv = 0; hv < p->HV; hv++) {
        const int64_t z = (int64_t)g * p->HV + hv;
        const int h = hv / G;
        dp_sim_gather_do(s, g, hv, dout);
        dp_bound_grads(bound_at(w, g, hv), dout, ps->eS[z], ps->edS[z], ps->DX[z], ps->DdX[z], &b);
        for (int t = 0; t < c; t++) {
            sq[(h * 2) * c + t] += b.dq[t] + dp_pw(r, G * r->u * b.ndq[t]);
            sq[(h * 2 + 1) * c + t] += b.ndq[t];
            raw_gate(w, gr->t0 + t, hv, b.dg + (int64_t)t * K, b.vdg + (int64_t)t * K, out, pa);
        }
        for (int64_t x = 0; each && x < (int64_t)c * K; x++)
            eq[(int64_t)h * c * K + x] += b.edq[x];
        for (int64_t x = 0; each && x < (int64_t)n * K; x++)
            ek[(int64_t)h * n * K + x] += b.edk[x];
        for (int i = 0; i < n; i++) {
            const int64_t tok = gr->t0 + i / R, row = (tok * p->HV + hv) * R + i % R;
            sk[(h * 2) * n + i] += b.dk[i] + dp_pw(r, G * r->u * b.ndk[i]);
            sk[(h * 2 + 1) * n + i] += b.ndk[i];
            out->row[DP_RESULT_DV][row] = final(r, b.dv[i] + dp_pw(r, (r->u + r->us) * b.ndv[i]));
            if (each) {
                out->rest[DP_QKV_V][row] = dp_pw(r, (r->u + r->us) * b.ndv[i]);
                memcpy(out->entry[DP_QKV_V] + row * p->V, b.edv + (int64_t)i * p->V,
                       sizeof(double) * (size_t)p->V);
            }
            double db = b.dbeta[i], val = fabs(b.vdbeta[i]);
            if (p->beta_form != DP_BETA_PLAIN) {
                const double zf = p->beta_form == DP_BETA_SIGMOID2 ? 2 : 1,
                             sg = sigmoid(p->beta[row]);
                db = dp_pw(r, zf * sg * (1 - sg)) * db + dp_pw(r, 6 * r->u * zf * sg * val);
                val *= zf * sg * (1 - sg);
            }
            const double d = final(r, db + dp_pw(r, r->us * val));
            sb[hv * c + i / R] += d * d;
        }
        for (int t = 0; t < c; t++)
            out->row[DP_RESULT_DBETA][(gr->t0 + t) * p->HV + hv] = sqrt(sb[hv * c + t]);
    }
    const double eps =
        (p->l2norm ? 4 * (in.q + in.qk_row) + 2 * dp_sum_error(r, K) + 6 * r->u : 0) + r->u + r->us;
    for (int h = 0; h < p->H; h++) {
        for (int t = 0; t < c; t++) {
            const int64_t row = (gr->t0 + t) * p->H + h;
            const double moved = p->l2norm ? 8 * given_norm(p->q, w->given.q, row, K) : 0;
            out->row[DP_RESULT_DQ][row] = final(
                r, dp_pw(r, s->rstd_q[row]) *
                       (sq[(h * 2) * c + t] + dp_pw(r, (eps + moved) * sq[(h * 2 + 1) * c + t])));
            if (each)
                entries(w, p->q, row, s->rstd_q[row], eq + ((int64_t)h * c + t) * K,
                        G * r->u * sq[(h * 2 + 1) * c + t], (eps + moved) * sq[(h * 2 + 1) * c + t],
                        out->entry[DP_QKV_Q], out->rest[DP_QKV_Q]);
        }
        for (int i = 0; i < n; i++) {
            const int64_t row = ((gr->t0 + i / R) * p->H + h) * R + i % R;
            const double moved = p->l2norm ? 8 * given_norm(p->k, w->given.k, row, K) : 0;
            out->row[DP_RESULT_DK][row] = final(
                r, dp_pw(r, s->rstd_k[row]) *
                       (sk[(h * 2) * n + i] + dp_pw(r, (eps + moved) * sk[(h * 2 + 1) * n + i])));
            if (each)
                entries(w, p->k, row, s->rstd_k[row], ek + ((int64_t)h * n + i) * K,
                        G * r->u * sk[(h * 2 + 1) * n + i], (eps + moved) * sk[(h * 2 + 1) * n + i],
                        out->entry[DP_QKV_K], out->rest[DP_QKV_K]);
        }
    }
    free(buf);
    free(dout);
    free(sq);
    free(sk);
    free(sb);
    free(eq);
    free(ek);
    free(one);
}

static void all_gradients(const dp_error_bound_base *w, const passes *ps, dp_error_bound *out) {
    const dp_problem *p = w->ref->p;
    const dp_rounding *r = &w->r;
    const int Kg = dp_Kg(p), ng = w->ref->ngroup,
              tokens = (int)fmin((double)p->T + Kg + w->ref->N, 1 << 22);
    partial *pa = dp_calloc((size_t)ng, sizeof *pa);
#pragma omp parallel for schedule(dynamic, 1)
    for (int g = 0; g < ng; g++) {
        pa[g] = (partial){dp_doubles(p->HV), dp_doubles(p->HV), dp_doubles((int64_t)p->HV * Kg),
                          dp_doubles((int64_t)p->HV * Kg)};
        gradients(w, g, ps, out, &pa[g]);
    }
    for (int hv = 0; hv < p->HV; hv++) {
        double A = 0, Aabs = 0, row = 0;
        for (int g = 0; g < ng; g++) {
            A += sqrt(pa[g].A[hv]);
            Aabs += pa[g].Aabs[hv];
        }
        A *= A;
        for (int c = 0; c < Kg; c++) {
            double B = 0, Babs = 0;
            for (int g = 0; g < ng; g++) {
                B += sqrt(pa[g].B[hv * Kg + c]);
                Babs += pa[g].Babs[hv * Kg + c];
            }
            B = final(r, B * B + dp_pw(r, dp_sum_error(r, tokens) * Babs));
            row += B * B;
        }
        if (out->row[DP_RESULT_DA_LOG])
            out->row[DP_RESULT_DA_LOG][hv] = final(r, A + dp_pw(r, dp_sum_error(r, tokens) * Aabs));
        if (out->row[DP_RESULT_DDT_BIAS]) out->row[DP_RESULT_DDT_BIAS][hv] = sqrt(row);
    }
    for (int g = 0; g < ng; g++) {
        free(pa[g].A);
        free(pa[g].Aabs);
        free(pa[g].B);
        free(pa[g].Babs);
    }
    free(pa);
}

static void free_list(double **a, int64_t n) {
    for (int64_t i = 0; a && i < n; i++)
        free(a[i]);
    free(a);
}

static int64_t rows_of(const dp_problem *p, int field) {
    int64_t rows, width;
    dp_result_shape(p, field, &rows, &width);
    return rows;
}

static int64_t size_of(const dp_problem *p, int field) {
    int64_t rows, width;
    dp_result_shape(p, field, &rows, &width);
    return rows * width;
}

static int same(double **a, double **b, int n, int64_t size) {
    if (!a || !b) return a == b;
    for (int i = 0; i < n; i++)
        if (!a[i] != !b[i] || (a[i] && memcmp(a[i], b[i], sizeof(double) * (size_t)size))) return 0;
    return 1;
}

/* The state passes, outputs and gradients, from the errors that enter each rank. */
static void rows(const dp_error_bound_base *w, double **eS, double **edS, int backward,
                 dp_error_bound *out) {
    const dp_sim *s = w->ref;
    const dp_problem *p = s->p;
    const int nr = s->N * p->HV;
    const int64_t ng = (int64_t)s->ngroup * p->HV;
    passes ps = {dp_calloc((size_t)ng, sizeof(double *)), dp_calloc((size_t)ng, sizeof(double *)),
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
        if (backward) all_gradients(w, &ps, out);
    }
    free_list(ps.eS, ng);
    free_list(ps.edS, ng);
    free_list(ps.DX, ng);
    free_list(ps.DdX, ng);
}

static double **rank_arrays(dp_error_bound *b, int i) {
    double **a[] = {&b->S_in, &b->M, &b->H, &b->dS_out, &b->dM, &b->dH};
    return a[i];
}

void dp_error_bound_alloc(const dp_problem *p, int N, int backward, int entries,
                          dp_error_bound *out) {
    *out = (dp_error_bound){0};
    for (int i = 0; i < DP_NRESULTS; i++)
        if (rows_of(p, i) && (backward || !dp_result_fields[i].backward))
            out->row[i] = dp_doubles(rows_of(p, i));
    for (int i = 0; i < 6; i++)
        *rank_arrays(out, i) = dp_doubles((int64_t)N * p->HV);
    for (int i = 0; i < DP_NQKV && backward && entries; i++) {
        out->entry[i] = dp_doubles(size_of(p, dp_qkv_gradient(i)));
        out->rest[i] = dp_doubles(rows_of(p, dp_qkv_gradient(i)));
    }
}

int dp_error_bound_parts(const dp_problem *p, int N, dp_error_bound *b, dp_part *part) {
    int n = 0;
    for (int i = 0; i < DP_NRESULTS; i++)
        if (b->row[i]) part[n++] = (dp_part){b->row[i], sizeof(double) * (size_t)rows_of(p, i)};
    for (int i = 0; i < 6; i++)
        part[n++] = (dp_part){*rank_arrays(b, i), sizeof(double) * (size_t)N * p->HV};
    part[n++] = (dp_part){b->traj, sizeof b->traj};
    for (int i = 0; i < DP_NQKV && b->entry[i]; i++) {
        part[n++] = (dp_part){b->entry[i], sizeof(double) * (size_t)size_of(p, dp_qkv_gradient(i))};
        part[n++] = (dp_part){b->rest[i], sizeof(double) * (size_t)rows_of(p, dp_qkv_gradient(i))};
    }
    return n;
}

void dp_error_bound_run(dp_error_bound_base *w, dp_format chain, int backward,
                        dp_error_bound *out) {
    dp_sim *s = w->ref;
    const dp_problem *p = s->p;
    const int nr = s->N * p->HV;
    chain_error *bM = dp_calloc((size_t)nr, sizeof *bM), *bdM = dp_calloc((size_t)nr, sizeof *bdM);
    dp_error_bound_alloc(p, s->N, backward, w->entries, out);
    for (int i = 0; i < DP_NRESULTS; i++)
        if (w->r.p == 1 && dp_result_fields[i].kind != DP_OF_SEQUENCES) {
            free(out->row[i]);
            out->row[i] = NULL;
        }
#pragma omp parallel for schedule(dynamic, 1)
    for (int i = 0; i < nr; i++) {
        const int r = i / p->HV, hv = i % p->HV, last = s->ctx[r].nlocal - 1;
        if (!s->ctx[r].is_last) {
            bM[i] = chain_bound(w, s->first[r][last], s->first[r][last + 1], hv, chain, 0,
                                r == s->traj_rank && p->HV == 1 ? out->traj : NULL);
            out->M[i] = bM[i].fro;
            out->H[i] = state_fro(w, w->eH[i]);
        }
        if (backward && !s->ctx[r].is_first) {
            bdM[i] = chain_bound(w, s->first[r][0], s->first[r][1], hv, chain, 1, NULL);
            out->dM[i] = bdM[i].fro;
            out->dH[i] = state_fro(w, w->edH[i]);
        }
    }
    double **eS = merge_errors(w, 1, bM, w->eH, out->S_in),
           **edS = backward ? merge_errors(w, -1, bdM, w->edH, out->dS_out) : NULL;
    for (int i = 0; i < nr; i++) {
        free(bM[i].b);
        free(bdM[i].b);
    }
    free(bM);
    free(bdM);
    const int64_t size = dp_state_error_size(&w->r, p->K, p->V);
    if (w->eS && !out->entry[DP_QKV_Q] && same(eS, w->eS, nr, size) &&
        same(edS, w->edS, nr, size)) {
        for (int i = 0; i < DP_NRESULTS; i++)
            if (out->row[i]) memcpy(out->row[i], w->row[i], sizeof(double) * (size_t)rows_of(p, i));
        free_list(eS, nr);
        free_list(edS, nr);
        return;
    }
    rows(w, eS, edS, backward, out);
    free_list(w->eS, nr);
    free_list(w->edS, nr);
    w->eS = eS;
    w->edS = edS;
    for (int i = 0; i < DP_NRESULTS; i++) {
        free(w->row[i]);
        w->row[i] = out->row[i] ? dp_copy(out->row[i], rows_of(p, i)) : NULL;
    }
}

static void smaller(double *a, const double *b, int64_t n) {
    if (a && b)
        for (int64_t i = 0; i < n; i++)
            a[i] = fmin(a[i], b[i]);
}

void dp_error_bound_min(const dp_problem *p, int N, dp_error_bound *a, const dp_error_bound *b) {
    dp_error_bound copy = *b;
    for (int i = 0; i < DP_NRESULTS; i++)
        smaller(a->row[i], b->row[i], rows_of(p, i));
    for (int i = 0; i < 6; i++)
        smaller(*rank_arrays(a, i), *rank_arrays(&copy, i), (int64_t)N * p->HV);
    smaller(a->traj, b->traj, DP_MAX_TRAJ);
}

void dp_error_bound_free(dp_error_bound *b) {
    for (int i = 0; i < DP_NRESULTS; i++)
        free(b->row[i]);
    for (int i = 0; i < DP_NQKV; i++) {
        free(b->entry[i]);
        free(b->rest[i]);
    }
    free(b->S_in);
    free(b->M);
    free(b->H);
    free(b->dS_out);
    free(b->dM);
    free(b->dH);
    *b = (dp_error_bound){0};
}
