/* Bounds of a chunk alone: gate, scores, solve, w and u (bound.h). */
#include "bound_pair.h"
#include "bound_parts.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

/* ---- intra --------------------------------------------------------------------------------------
 * gcum is a running sum. A step adds the error of g_t, which depends on g_t alone and is added in
 * absolute value (equal gates have equal errors). It also adds the rounding u |gcum_t|, in absolute
 * value too. A repeated gate is added with the same rounding as before, as long as the sum keeps
 * its exponent. The error of gcum_s - gcum_i is what the steps in between added (the common prefix
 * cancels). An exponent d computed with error Dd gives exp a relative error Dd + u |d| (the
 * subtraction)
 * + 2 u (the function). Hence
 *   relative error of pair[s,i] : (D_s - D_i) + u |d| + 2u;
 *   of exp(gcum_s): D_s + 2u;   of exp(gcum_last - gcum_s) likewise.
 * L and Aqk are sums over K of three factors. Each term has the relative error 2 ek + eps_pair. The
 * sum has sum_error(K + 2) and, as a whole, the row errors 2 er. Aqk has the same with eq + ek, and
 * us if stored.
 *   A = I + B L:  DA = beta (DL + (eb + u) |L|).
 * Solve: the computed X satisfies (A + dA) X = rhs, |dA| <= sum_error(n) |A| (Higham 8.5),
 *   so DX = |T| (Drhs + (DA + ..|A|) |X|).
 * Inverse: DT = |T| (DA + sum_error(n + 1) |A|) |T| (Higham 14.2) + us |T| stored;
 *   then w = T rhs with rhs rounded by uo. */
static void intra_pairs(dp_chunk_bound *b) {
    const dp_chunk *ch = b->ch;
    const dp_rounding *r = &b->r;
    const int c = ch->c, R = ch->R, K = ch->K, n = ch->n;
    const double gK = dp_sum_error(r, K + 2), tiny = dp_pw(r, K * r->tiny);
    DP_OWN double *e = dp_doubles(2 * K);
    double *ee = e + K;
    for (int s = 0; s < c; s++)
        for (int i = 0; i <= s; i++) {
            dp_bound_pair(b, s, i, e, ee);
            for (int m = 0; m < R; m++) {
                const double *ki = ch->k + (int64_t)(i * R + m) * K;
                const int64_t z = (int64_t)s * n + i * R + m;
                double D = 0, sum = 0;
                for (int x = 0; x < K; x++) {
                    const double t = fabs(ch->q[s * K + x] * ki[x]) * e[x];
                    sum += t;
                    D += dp_pw(
                        r, t * (b->eq[s * K + x] + b->ek[(int64_t)(i * R + m) * K + x] + ee[x]));
                }
                b->DAqk[z] = dp_pw(r, ch->scale) * (D + dp_pw(r, (gK + r->u) * sum)) +
                             dp_pw(r, 2 * b->er * ch->Aqk[z]) + dp_pw(r, r->us * ch->Aqk[z]) + tiny;
                for (int j = dp_chunk_reader(ch, s, i, m); j < R; j++) {
                    const double *ks = dp_chunk_erasing(ch) + (int64_t)(s * R + j) * K;
                    const int64_t y = (int64_t)(s * R + j) * n + i * R + m;
                    D = sum = 0;
                    for (int x = 0; x < K; x++) {
                        const double t = fabs(ks[x] * ki[x]) * e[x];
                        sum += t;
                        D += dp_pw(r, t * (b->ee[(int64_t)(s * R + j) * K + x] +
                                           b->ek[(int64_t)(i * R + m) * K + x] + ee[x]));
                    }
                    b->DL[y] = D + dp_pw(r, gK * sum) + dp_pw(r, 2 * b->er * ch->L[y]) + tiny;
                }
            }
        }
}

/* Shared by the steps of the solve: |A|, |T|, |T|^p, the right sides and their errors. */
typedef struct {
    int64_t nn, nK, nV;
    double gn;                   /* sum_error(n + 1) */
    double *A, *pT, *aT;         /* [n][n] */
    double *rw, *ru, *Drw, *Dru; /* of w [n][K] and u [n][V] */
} solve_work;

static solve_work solve_open(const dp_chunk_bound *b) {
    const dp_chunk *ch = b->ch;
    const int64_t n = ch->n;
    solve_work s = {
        .nn = n * n, .nK = n * ch->K, .nV = n * ch->V, .gn = dp_sum_error(&b->r, ch->n + 1)};
    s.A = dp_doubles(s.nn);
    s.pT = dp_bound_pwof(&b->r, ch->Akk, s.nn);
    s.aT = dp_bound_absof(ch->Akk, s.nn);
    s.rw = dp_doubles(s.nK);
    s.ru = dp_doubles(s.nV);
    s.Drw = dp_doubles(s.nK);
    s.Dru = dp_doubles(s.nV);
    return s;
}

static void solve_close(solve_work *s) {
    DP_FREE(s->A, s->pT, s->aT, s->rw, s->ru, s->Drw, s->Dru);
}

static void matrix_error(dp_chunk_bound *b, solve_work *s) {
    const dp_chunk *ch = b->ch;
    const dp_rounding *r = &b->r;
    const int n = ch->n;
    for (int i = 0; i < n; i++)
        for (int j = 0; j < n; j++) {
            const int64_t z = (int64_t)i * n + j;
            b->DA[z] = dp_pw(r, ch->beta[i]) * (b->DL[z] + dp_pw(r, (b->eb + r->u) * ch->L[z]));
            s->A[z] = i == j ? 1 : fabs(ch->beta[i] * ch->L[z]);
        }
}

static void right_hand_sides(const dp_chunk_bound *b, solve_work *s) {
    const dp_chunk *ch = b->ch;
    const dp_rounding *r = &b->r;
    for (int i = 0; i < ch->n; i++) {
        for (int x = 0; x < ch->K; x++) {
            const int64_t z = (int64_t)i * ch->K + x;
            s->rw[z] = fabs(ch->beta[i] * ch->kgam[z]);
            s->Drw[z] = dp_pw(r, s->rw[z] * (b->Dexp[(i / ch->R) * ch->K + x] + b->ee[z] + b->er +
                                             b->eb + 2 * r->u)) +
                        dp_pw(r, r->tiny);
        }
        for (int x = 0; x < ch->V; x++) {
            const int64_t z = (int64_t)i * ch->V + x;
            s->ru[z] = fabs(ch->beta[i] * ch->v[z]);
            s->Dru[z] = dp_pw(r, s->ru[z] * (b->ev[z] + b->eb + r->u)) + dp_pw(r, r->tiny);
        }
    }
}

/* own: the stored inverse that w and u come from is exact. */
static void inverse_error(dp_chunk_bound *b, solve_work *s, int own) {
    const dp_chunk *ch = b->ch;
    const dp_rounding *r = &b->r;
    const int n = ch->n, K = ch->K, V = ch->V;
    DP_OWN double *prw = dp_bound_pwof(r, s->rw, s->nK), *pru = dp_bound_pwof(r, s->ru, s->nV);
    DP_OWN double *E = dp_copy(b->DA, s->nn);
    dp_bound_add_scaled(r, s->gn, s->A, s->nn, E);
    DP_OWN double *TE = dp_bound_product(0, 0, n, n, n, s->pT, E);
    b->DT = dp_bound_product(0, 0, n, n, n, TE, s->pT);
    dp_bound_add_scaled(r, r->us, ch->Akk, s->nn, b->DT);
    dp_bound_add_scaled(r, r->uo, s->rw, s->nK, s->Drw);
    dp_bound_add_scaled(r, r->uo, s->ru, s->nV, s->Dru);
    if (!own) {
        dp_bound_addmm(1, 0, 0, n, K, n, b->DT, prw, b->Dw);
        dp_bound_addmm(1, 0, 0, n, V, n, b->DT, pru, b->Du);
    }
    dp_bound_add_sum(r, s->gn, 0, 0, n, K, n, s->aT, s->rw, b->Dw);
    dp_bound_add_sum(r, s->gn, 0, 0, n, V, n, s->aT, s->ru, b->Du);
}

static void substitution_error(const dp_chunk_bound *b, solve_work *s) {
    const dp_chunk *ch = b->ch;
    const dp_rounding *r = &b->r;
    const int n = ch->n, K = ch->K, V = ch->V;
    dp_bound_add_product(r, 1, (dp_shape){0, 0, n, K, n}, s->A, b->DA, ch->w, NULL, -1, s->gn,
                         s->Drw);
    dp_bound_add_product(r, 1, (dp_shape){0, 0, n, V, n}, s->A, b->DA, ch->u, NULL, -1, s->gn,
                         s->Dru);
}

static void intra_solve(dp_chunk_bound *b, int own) {
    const dp_chunk *ch = b->ch;
    const dp_rounding *r = &b->r;
    const int n = ch->n, K = ch->K, V = ch->V;
    DP_FREED(solve_close) solve_work s = solve_open(b);
    matrix_error(b, &s);
    right_hand_sides(b, &s);
    if (r->inverse)
        inverse_error(b, &s, own);
    else
        substitution_error(b, &s);
    dp_bound_addmm(1, 0, 0, n, K, n, s.pT, s.Drw, b->Dw);
    dp_bound_addmm(1, 0, 0, n, V, n, s.pT, s.Dru, b->Du);
    dp_bound_add_scaled(r, r->us, ch->w, s.nK, b->Dw);
    dp_bound_add_scaled(r, r->us, ch->u, s.nV, b->Du);
}

/* M_c = diag(eC) - kg' w:  DM = DeC + Dkg'|w| + |kg|'Dw + sum_error(n) |kg|'|w| + u |M_c|; DF
 * is DM without what comes through Dkg and Dw */
static void intra_factor(dp_chunk_bound *b) {
    const dp_chunk *ch = b->ch;
    const dp_rounding *r = &b->r;
    const int n = ch->n, K = ch->K;
    DP_OWN double *pwv = dp_bound_pwof(r, ch->w, (int64_t)n * K),
                  *pkg = dp_bound_pwof(r, ch->kg, (int64_t)n * K),
                  *aw = dp_bound_absof(ch->w, (int64_t)n * K),
                  *akg = dp_bound_absof(ch->kg, (int64_t)n * K);
    dp_chunk_M(ch, b->M);
    b->mu = dp_norm2_up(K, K, b->M);
    dp_bound_add_sum(r, dp_sum_error(r, n), 1, 0, K, K, n, akg, aw, b->DF);
    dp_bound_add_scaled(r, r->u, b->M, (int64_t)K * K, b->DF);
    for (int x = 0; x < K; x++)
        b->DF[(int64_t)x * K + x] += b->DeC_held[x];
    dp_bound_add_const(dp_pw(r, n * r->tiny), (int64_t)K * K, b->DF);
    for (int64_t i = 0; i < (int64_t)K * K; i++)
        b->DM[i] += b->DF[i];
    dp_bound_addmm(1, 1, 0, K, K, n, b->Dkg, pwv, b->DM);
    dp_bound_addmm(1, 1, 0, K, K, n, pkg, b->Dw, b->DM);
}

static void bound_alloc(dp_chunk_bound *b, const dp_chunk *ch, dp_rounding rounding,
                        const dp_input_error *in) {
    const int c = ch->c, K = ch->K, V = ch->V, n = ch->n;
    const int64_t cK = (int64_t)c * K, nK = (int64_t)n * K, nV = (int64_t)n * V,
                  nn = (int64_t)n * n, KK = (int64_t)K * K;
    *b = (dp_chunk_bound){.r = rounding, .ch = ch, .eb = in->beta, .er = in->qk_row};
    const struct {
        double **p;
        int64_t n;
    } a[] = {{&b->eq, cK},      {&b->ek, nK},   {&b->ee, nK},   {&b->ev, nV},
             {&b->Dcum, cK},    {&b->Dexp, cK}, {&b->Dend, cK}, {&b->DeC, K},
             {&b->DeC_held, K}, {&b->DL, nn},   {&b->DA, nn},   {&b->DAqk, (int64_t)c * n},
             {&b->Dw, nK},      {&b->Du, nV},   {&b->Dkg, nK},  {&b->Dqg, cK},
             {&b->DM, KK},      {&b->DF, KK},   {&b->M, KK}};
    for (size_t i = 0; i < sizeof a / sizeof *a; i++)
        *a[i].p = dp_doubles(a[i].n);
    for (int64_t i = 0; i < cK; i++)
        b->eq[i] = in->q + (in->rq ? in->rq[i] : 0);
    for (int64_t i = 0; i < nK; i++)
        b->ek[i] = in->k + (in->rk ? in->rk[i] : 0);
    for (int64_t i = 0; i < nK; i++)
        b->ee[i] = b->ek[i] + in->erasing;
    for (int64_t i = 0; i < nV; i++)
        b->ev[i] = in->v + (in->rv ? in->rv[i] : 0);
}

static void intra_cumsum(dp_chunk_bound *b, const dp_input_error *in) {
    const dp_chunk *ch = b->ch;
    const dp_rounding *r = &b->r;
    const int c = ch->c, K = ch->K;
    for (int x = 0; x < K; x++) {
        double sums = 0;
        for (int t = 0; t < c; t++) {
            sums += in->g ? in->g[t * in->sg + (in->Kg == 1 ? 0 : x)] : 0;
            sums += t ? r->u * fabs(ch->gcum[t * K + x]) : 0;
            /* they add up before the power: D_s - D_i >= (sums_s - sums_i)^p */
            b->Dcum[t * K + x] = dp_pw(r, sums);
        }
    }
}

/* kg, qg, eC */
static void intra_decay(dp_chunk_bound *b) {
    const dp_chunk *ch = b->ch;
    const dp_rounding *r = &b->r;
    const int c = ch->c, R = ch->R, K = ch->K;
    for (int t = 0; t < c; t++)
        for (int x = 0; x < K; x++) {
            const int z = t * K + x, last = (c - 1) * K + x;
            const double span = fabs(ch->gcum[last] - ch->gcum[z]);
            const double of_exp = dp_bound_root(r, b->Dcum[z]) + 2 * r->u;
            b->Dexp[z] = of_exp + r->decay;
            b->Dend[z] = dp_bound_root(r, fmax(0, b->Dcum[last] - b->Dcum[z])) + r->u * span +
                         2 * r->u + r->decay;
            b->Dqg[z] = dp_pw(r, ch->qg[z] * (b->Dexp[z] + b->eq[z] + b->er + r->u + r->us)) +
                        dp_pw(r, r->tiny);
            for (int j = 0; j < R; j++) {
                const int64_t i = (int64_t)(t * R + j) * K + x;
                const double of_key = b->Dend[z] + r->key + b->ek[i] + b->er + r->u + r->us;
                b->Dkg[i] = dp_pw(r, ch->kg[i] * of_key) + dp_pw(r, r->tiny);
            }
            if (t == c - 1) b->DeC[x] = dp_pw(r, ch->eC[x] * of_exp) + dp_pw(r, r->tiny);
        }
}

void dp_bound_intra(dp_chunk_bound *b, const dp_chunk *ch, dp_rounding r,
                    const dp_input_error *in) {
    bound_alloc(b, ch, r, in);
    intra_cumsum(b, in);
    intra_decay(b);
    for (int x = 0; x < ch->K; x++)
        b->DeC_held[x] = b->DeC[x] * (r.p == 2 && in->held ? in->held[x] : 1);
    intra_pairs(b);
    intra_solve(b, 0);
    intra_factor(b);
}

void dp_bound_own(dp_chunk_bound *b, const dp_chunk *ch, dp_rounding r) {
    bound_alloc(b, ch, r, &(dp_input_error){0});
    intra_decay(b);
    memcpy(b->DeC_held, b->DeC, sizeof(double) * (size_t)ch->K);
    intra_solve(b, 1);
}

void dp_bound_exact(dp_chunk_bound *b) {
    const int64_t cK = (int64_t)b->ch->c * b->ch->K, nK = (int64_t)b->ch->n * b->ch->K,
                  nn = (int64_t)b->ch->n * b->ch->n;
    const struct {
        double *p;
        int64_t n;
    } a[] = {{b->DT, nn},  {b->DA, nn},  {b->Dw, nK},        {b->Du, (int64_t)b->ch->n * b->ch->V},
             {b->Dkg, nK}, {b->Dqg, cK}, {b->DeC, b->ch->K}, {b->DeC_held, b->ch->K}};
    for (size_t i = 0; i < sizeof a / sizeof *a; i++)
        if (a[i].p) memset(a[i].p, 0, sizeof(double) * (size_t)a[i].n);
    intra_factor(b);
}

void dp_bound_free(dp_chunk_bound *b) {
    DP_FREE(b->eq, b->ek, b->ee, b->ev, b->Dcum, b->Dexp, b->Dend, b->DeC, b->DeC_held, b->DL,
            b->DA, b->DT, b->DAqk, b->Dw, b->Du, b->Dkg, b->Dqg, b->DM, b->DF, b->M);
    *b = (dp_chunk_bound){0};
}
