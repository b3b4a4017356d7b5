/* ref/truth/truth_gate.c - activations in MPFR with their relative errors, and the chain rule back
 * to the raw inputs (math.md c).
 *
 * Relative errors, u = 2^-prec, every operation rounded to nearest (relative error <= u unless it
 * underflows, and an underflow of MPFR is below 2^-2^29, absorbed by tiny in truth_bound.c). Inputs
 * are exact but for dp_problem.input_error, in < 2^-20, of the rows of q, k and v: rstd then moves
 * by at most in / (1 - in) <= 2 in, y = x rstd by at most in + 2 in + .. <= 4 in of its norm.
 * rho(x) := x / (1 - x) >= exp(x) - 1.
 *
 *   rstd        K squares, K adds (all terms positive), 1/sqrt:
 *               relative error <= (K+1) u / 2 + u + second order <= gamma_(K+4)
 *   y = x rstd                                                           gamma_(K+6)
 *   erase o k   one product of an exact number                           eps_y + u, inside gamma_2
 *                                                                        more; write o v: u
 *   beta        e = exp(-|b|): u;  1 + e: 2u;
 *               quotient: 4u (second order included); z exact            gamma_6
 *   dbeta/db    e / (1+e)^2 z                                            gamma_10
 *   x = raw + dt_bias
 *               dx_abs = 0 when MPFR reports the sum as exact (it nearly always is), else u |x|
 *   softplus    max(x,0) + log1p(exp(-|x|)): exp has rho(dx_abs) + u,
 *               log1p and the sum have condition number <= 1 here:       dx_abs-part + gamma_6
 *   a = exp(A_log)                      u.
 *   g = -(a softplus)                   eps_g = rho(dx_abs) + gamma_10
 *   d = exp(g)                          eps_d = rho(|g| eps_g) + gamma_2
 *   dg/dx = -a sigmoid(x)               |d log sigmoid / dx| <= 1        rho(dx_abs) + gamma_10
 *   lower bound: y = a x                dy_abs = |y| gamma_3 + a dx_abs;
 *                g = lb sigmoid(y):                                      rho(dy_abs) + gamma_10
 *                dg/dx = lb s(1-s) a    |d log(s (1-s)) / dy| <= 1       rho(dy_abs) + gamma_12
 *                dg/dA = dg/dx x        adds dx_abs/|x| + u:             rho(dy_abs) + gamma_14
 *                                                                        + dx_abs/|x|
 * The softplus sum for x > 0: x itself carries dx_abs absolute <= u |x| relative, inside gamma_6.
 */
#include "ref/arithmetic/spectral.h"
#include "truth_impl.h"

#include <math.h>

static inline double get_up(mpfr_srcptr x) {
    return fabs(mpfr_get_d(x, MPFR_RNDA));
} /* >= |x|, finite or not */
ld tr_rho(ld x) { return x < 0.5 ? x / (1 - x) : INFINITY; }
ld tr_exact_up(ld x, ld rel) { return rel <= 0.5 ? x * (1 + 2 * rel) : INFINITY; }

ld tr_gamma(const tr_run *r, ld n) { return tr_rho(n * r->u); }

tr_rel tr_rel_errors(const tr_run *r) {
    const dp_problem *p = r->p;
    const int plain = p->beta_form == DP_BETA_PLAIN;
    const ld in = p->input_error;
    const ld qk = p->l2norm ? tr_gamma(r, p->K + 6) + 4 * in : in;
    return (tr_rel){.qk = qk,
                    .erasing = dp_by_gates(p) ? qk + tr_gamma(r, 2) : qk,
                    .rstd = p->l2norm ? tr_gamma(r, p->K + 4) + 2 * in : 0,
                    .beta = plain ? 0 : tr_gamma(r, 6),
                    .db = plain ? 0 : tr_gamma(r, 10)};
}

/* y = x rstd (or x), its upward norm returned. tmp: 1 number. */
static ld activate_row(const dp_problem *p, const double *x, mp_array y, mpfr_ptr rstd,
                       mpfr_ptr tmp, ld rel) {
    double size[p->K];
    mpfr_set_d(rstd, DP_L2_EPS, MPFR_RNDN);
    for (int i = 0; i < p->K; i++) {
        mpfr_set_d(mp_at(y, i), x[i], MPFR_RNDN);
        if (!p->l2norm) continue;
        mpfr_sqr(tmp, mp_at(y, i), MPFR_RNDN);
        mpfr_add(rstd, rstd, tmp, MPFR_RNDN);
    }
    mpfr_rec_sqrt(rstd, rstd, MPFR_RNDN);
    for (int i = 0; i < p->K; i++) {
        if (p->l2norm) mpfr_mul(mp_at(y, i), mp_at(y, i), rstd, MPFR_RNDN);
        size[i] = get_up(mp_at(y, i));
    }
    return tr_exact_up(tr_norm_up(size, p->K), rel);
}

static ld *lds(int64_t n) { return dp_calloc((size_t)n, sizeof(ld)); }

void tr_norms_alloc(const tr_run *r, tr_qk *qk, tr_head *a) {
    const int64_t T = r->p->T, TR = T * r->p->R;
    if (qk) {
        qk->q_norm = lds(T);
        qk->k_norm = lds(TR);
        qk->rstd_q_up = r->p->l2norm ? lds(T) : NULL;
        qk->rstd_k_up = r->p->l2norm ? lds(TR) : NULL;
    }
    if (!a) return;
    a->norms = dp_calloc((size_t)T, sizeof *a->norms);
    a->beta_up = lds(TR);
    a->db_up = lds(TR);
    a->nu = lds(T);
    a->v_norm = lds(TR);
    a->do_norm = r->p->dout ? lds(T) : NULL;
    a->erasing_norm = dp_has_beta(r->p) ? NULL : lds(TR);
}

/* >= |a o b|_2: each product of doubles is within 2^-53 of it, or 2^-1075 */
static ld product_norm_up(const double *a, const double *b, int n) {
    double row[n];
    for (int i = 0; i < n; i++)
        row[i] = a[i] * b[i];
    return tr_norm_up(row, n) * (ld)(1 + 0x1p-50) + n * 0x1p-1074;
}

void tr_row_norms(const tr_run *r, int hv, int64_t t, tr_head *a) {
    const dp_problem *p = r->p;
    for (int64_t j = 0; j < p->R; j++) {
        const int64_t row = ((t * p->HV + hv) * p->R + j) * p->V;
        a->v_norm[t * p->R + j] = dp_by_gates(p) ? product_norm_up(p->write + row, p->v + row, p->V)
                                                 : tr_norm_up(p->v + row, p->V);
    }
    if (p->dout) a->do_norm[t] = tr_norm_up(p->dout + (t * p->HV + hv) * p->V, p->V);
}

void tr_activate_qk(const tr_run *r, int h, tr_qk *a) {
    const dp_problem *p = r->p;
    const int64_t T = p->T, K = p->K, R = p->R;
    const ld rel = tr_rel_errors(r).qk;
    *a = (tr_qk){mp_alloc(T * K, r->prec),
                 mp_alloc(T * R * K, r->prec),
                 mp_alloc(T, r->prec),
                 mp_alloc(T * R, r->prec),
                 NULL,
                 NULL,
                 NULL,
                 NULL};
    tr_norms_alloc(r, a, NULL);
#pragma omp parallel num_threads(r->threads)
    {
        mp_array tmp = mp_alloc(1, r->prec);
#pragma omp for schedule(static)
        for (int64_t t = 0; t < T; t++) {
            a->q_norm[t] = activate_row(p, p->q + (t * p->H + h) * K, mp_from(a->q, t * K),
                                        mp_at(a->rstd_q, t), mp_at(tmp, 0), rel);
            if (p->l2norm)
                a->rstd_q_up[t] = get_up(mp_at(a->rstd_q, t)) * (1 + 2 * tr_rel_errors(r).rstd);
            for (int64_t i = t * R; i < (t + 1) * R; i++)
                a->k_norm[i] =
                    activate_row(p, p->k + ((t * p->H + h) * R + i - t * R) * K,
                                 mp_from(a->k, i * K), mp_at(a->rstd_k, i), mp_at(tmp, 0), rel);
            for (int64_t i = t * R; i < (t + 1) * R && p->l2norm; i++)
                a->rstd_k_up[i] = get_up(mp_at(a->rstd_k, i)) * (1 + 2 * tr_rel_errors(r).rstd);
        }
        mp_free(&tmp);
    }
}

/* sig = sigmoid(x), dsig = sigmoid'(x), soft = softplus(x); any may be NULL. tmp: 2 numbers. */
static void unary(mpfr_srcptr x, mpfr_ptr sig, mpfr_ptr dsig, mpfr_ptr soft, mp_array tmp) {
    mpfr_ptr e = mp_at(tmp, 0), one_e = mp_at(tmp, 1);
    mpfr_abs(e, x, MPFR_RNDN);
    mpfr_neg(e, e, MPFR_RNDN);
    mpfr_exp(e, e, MPFR_RNDN);
    mpfr_add_ui(one_e, e, 1, MPFR_RNDN);
    if (soft) {
        mpfr_log1p(soft, e, MPFR_RNDN);
        if (mpfr_sgn(x) > 0) mpfr_add(soft, soft, x, MPFR_RNDN);
    }
    if (sig && mpfr_sgn(x) < 0)
        mpfr_div(sig, e, one_e, MPFR_RNDN);
    else if (sig)
        mpfr_ui_div(sig, 1, one_e, MPFR_RNDN);
    if (!dsig) return;
    mpfr_div(dsig, e, one_e, MPFR_RNDN);
    mpfr_div(dsig, dsig, one_e, MPFR_RNDN);
}

typedef struct {
    ld g, x, a;
} gate_rel; /* relative errors of g, dg/dx, dg/dA_log */

/* g (left in d), dg/dx, dg/dA_log of one raw gate. a = exp(A_log). tmp: 4 numbers. */
static gate_rel gate_value(const tr_run *r, double raw, double bias, mpfr_srcptr a, mpfr_ptr d,
                           mpfr_ptr dx, mpfr_ptr dA, mp_array tmp) {
    const dp_problem *p = r->p;
    mpfr_ptr x = mp_at(tmp, 2), y = mp_at(tmp, 3);
    mpfr_set_d(x, raw, MPFR_RNDN);
    if (p->gate == DP_GATE_LOG) {
        mpfr_set(d, x, MPFR_RNDN);
        mpfr_set_ui(dx, 1, MPFR_RNDN);
        mpfr_set_zero(dA, 1);
        return (gate_rel){0, 0, 0};
    }
    const int inexact = mpfr_add_d(x, x, bias, MPFR_RNDN);
    const ld dx_rel = inexact ? r->u : 0, dx_abs = inexact ? r->u * get_up(x) : 0;
    if (p->gate == DP_GATE_SOFTPLUS) {
        unary(x, dx, NULL, d, tmp);
        mpfr_mul(d, d, a, MPFR_RNDN);
        mpfr_neg(d, d, MPFR_RNDN);
        mpfr_mul(dx, dx, a, MPFR_RNDN);
        mpfr_neg(dx, dx, MPFR_RNDN);
        mpfr_set(dA, d, MPFR_RNDN);
        const ld e = tr_rho(dx_abs) + tr_gamma(r, 10);
        return (gate_rel){e, e, e};
    }
    mpfr_mul(y, x, a, MPFR_RNDN);
    unary(y, d, dx, NULL, tmp);
    mpfr_mul_d(d, d, p->lower_bound, MPFR_RNDN);
    mpfr_mul_d(dx, dx, p->lower_bound, MPFR_RNDN);
    mpfr_mul(dx, dx, a, MPFR_RNDN);
    mpfr_mul(dA, dx, x, MPFR_RNDN);
    const ld dy = tr_rho(get_up(y) * (tr_gamma(r, 3) + 2 * dx_rel));
    return (gate_rel){dy + tr_gamma(r, 10), dy + tr_gamma(r, 12),
                      dy + tr_gamma(r, 14) + 2 * dx_rel};
}

/* d = exp(g) and the norms of one channel merged into n. */
static void gate_channel(const tr_run *r, gate_rel e, mpfr_ptr d, mpfr_srcptr dx, mpfr_srcptr dA,
                         tr_gate_norms *n) {
    const ld d_rel = tr_rho(get_up(d) * tr_rho(e.g)) + tr_gamma(r, 2);
    mpfr_exp(d, d, MPFR_RNDN);
    const ld dv = tr_exact_up(get_up(d), d_rel), x = tr_exact_up(get_up(dx), e.x),
             a = tr_exact_up(get_up(dA), e.a);
    const ld v[4] = {dv, dv * d_rel, x, x * e.x};
    ld *to[4] = {&n->d, &n->d_err, &n->x, &n->x_err};
    for (int i = 0; i < 4; i++)
        if (!(v[i] <= *to[i])) *to[i] = v[i] != v[i] ? INFINITY : v[i];
    n->a += a * a;
    n->a_err += a * a * e.a * e.a;
}

static void activate_beta(const tr_run *r, double b, mpfr_ptr beta, mpfr_ptr db, ld *beta_up,
                          ld *db_up, mp_array tmp) {
    const dp_problem *p = r->p;
    const tr_rel rel = tr_rel_errors(r);
    mpfr_ptr x = mp_at(tmp, 2);
    mpfr_set_d(x, b, MPFR_RNDN);
    if (p->beta_form == DP_BETA_PLAIN) {
        mpfr_set(beta, x, MPFR_RNDN);
        mpfr_set_ui(db, 1, MPFR_RNDN);
    } else {
        unary(x, beta, db, NULL, tmp);
    }
    if (p->beta_form == DP_BETA_SIGMOID2) {
        mpfr_mul_2ui(beta, beta, 1, MPFR_RNDN);
        mpfr_mul_2ui(db, db, 1, MPFR_RNDN);
    }
    if (!isfinite(b)) { /* sigmoid(inf) = 1 is a limit, not a value: nothing is proven about it */
        *beta_up = *db_up = INFINITY;
        return;
    }
    *beta_up = tr_exact_up(get_up(beta), rel.beta);
    *db_up = tr_exact_up(get_up(db), rel.db);
}

static void activate_token(const tr_run *r, int hv, int64_t t, mpfr_srcptr A, tr_head *a,
                           mp_array tmp) {
    const dp_problem *p = r->p;
    const int64_t Kg = dp_Kg(p), R = p->R;
    tr_gate_norms *n = &a->norms[t];
    const int decays = tr_decays(p, t);
    for (int c = 0; c < Kg && !decays; c++) /* dx and dA are zeros */
        mpfr_set_ui(mp_at(a->d, t * Kg + c), 1, MPFR_RNDN);
    if (!decays) n->d = 1;
    for (int c = 0; c < Kg && decays; c++) {
        const int64_t i = t * Kg + c;
        const double bias = p->dt_bias ? p->dt_bias[hv * Kg + c] : 0;
        const gate_rel e = gate_value(r, p->g[(t * p->HV + hv) * Kg + c], bias, A, mp_at(a->d, i),
                                      mp_at(a->dx, i), mp_at(a->dA, i), tmp);
        gate_channel(r, e, mp_at(a->d, i), mp_at(a->dx, i), mp_at(a->dA, i), n);
        if (!isfinite(p->g[(t * p->HV + hv) * Kg + c])) n->d = n->x = n->a = INFINITY;
    }
    n->a = tr_sqrt(n->a);
    n->a_err = tr_sqrt(n->a_err);
    for (int64_t j = 0; j < R; j++) {
        const int64_t i = t * R + j;
        if (!dp_has_beta(p)) {
            mpfr_set_ui(mp_at(a->beta, i), 1, MPFR_RNDN);
            a->beta_up[i] = 1;
            continue;
        }
        activate_beta(r, p->beta[(t * p->HV + hv) * R + j], mp_at(a->beta, i), mp_at(a->db, i),
                      &a->beta_up[i], &a->db_up[i], tmp);
    }
}

/* erase o k and write o v of one token, with the norm of the first. */
static void activate_writes(const tr_run *r, int hv, int64_t t, const tr_qk *qk, tr_head *a) {
    const dp_problem *p = r->p;
    const int64_t at = t * p->HV + hv;
    /* NOLINTNEXTLINE(*VLASize): K is 1 to 65,536 */
    double size[p->K];
    for (int i = 0; i < p->K; i++) {
        mpfr_ptr e = mp_at(a->erasing, t * p->K + i);
        mpfr_mul_d(e, mp_at(qk->k, t * p->K + i), p->erase[at * p->K + i], MPFR_RNDN);
        size[i] = get_up(e);
    }
    a->erasing_norm[t] = tr_exact_up(tr_norm_up(size, p->K), tr_rel_errors(r).erasing);
    for (int i = 0; i < p->V; i++) {
        mpfr_ptr y = mp_at(a->values, t * p->V + i);
        mpfr_set_d(y, p->v[at * p->V + i], MPFR_RNDN);
        mpfr_mul_d(y, y, p->write[at * p->V + i], MPFR_RNDN);
    }
}

/* What the first key of a token reads along, with its norm; the second reads nothing. */
static void negate_reads(const tr_run *r, int hv, int64_t t, tr_head *a) {
    const int64_t K = r->p->K;
    const double *lr_a = r->p->lr_a + (t * r->p->HV + hv) * K;
    for (int64_t i = 0; i < K; i++)
        mpfr_set_d(mp_at(a->erasing, t * K + i), -lr_a[i], MPFR_RNDN);
    /* NOLINTNEXTLINE(*NullDereference): of DPLR, which has them */
    a->erasing_norm[t * r->p->R] = tr_norm_up(lr_a, K);
}

/* >= |diag(exp g) + lr_b' lr_a|_2, computed in double: entries within 2^-51 of their terms, squares
 * within (K + 16) 2^-52 of theirs. x: 2 K K doubles */
static ld undecayed_step_norm(const tr_run *r, int hv, int64_t t, const tr_qk *qk, const tr_head *a,
                              double *x) {
    const int64_t K = r->p->K;
    const double *lr_a = r->p->lr_a + (t * r->p->HV + hv) * K;
    double *M = x, *G = x + K * K, square = 0;
    for (int64_t i = 0; i < K; i++)
        for (int64_t j = 0; j < K; j++) {
            M[i * K + j] = mpfr_get_d(mp_at(qk->k, t * r->p->R * K + i), MPFR_RNDN) * lr_a[j];
            if (i == j) M[i * K + j] += mpfr_get_d(mp_at(a->d, t * K + i), MPFR_RNDN);
            square += M[i * K + j] * M[i * K + j];
        }
    if (!isfinite(square)) return INFINITY;
    for (int64_t i = 0; i < K; i++)
        for (int64_t j = 0; j <= i; j++) {
            double s = 0;
            for (int64_t m = 0; m < K; m++)
                s += M[m * K + i] * M[m * K + j];
            G[i * K + j] = G[j * K + i] = s;
        }
    const ld top = dp_eigenvalue_up((int)K, G) + (K + 16) * 0x1p-51 * (ld)square;
    const ld off = a->norms[t].d + qk->k_norm[t * r->p->R] * a->erasing_norm[t * r->p->R];
    return tr_sqrt(top) * (1 + 0x1p-40) + K * 0x1p-50 * off + a->norms[t].d_err + K * 0x1p-1000;
}

/* x: R K + R doubles; dp_by_factors: 2 K K */
static ld step_norm(const tr_run *r, int hv, int64_t t, const tr_qk *qk, const tr_head *a,
                    double *x) {
    const int64_t R = r->p->R, K = r->p->K;
    const int gated = dp_by_gates(r->p);
    if (!dp_erases(r->p)) return 1;
    if (dp_by_factors(r->p)) return undecayed_step_norm(r, hv, t, qk, a, x);
    for (int64_t i = 0; i < R * K && (R > 1 || gated); i++)
        x[i] = mpfr_get_d(mp_at(qk->k, t * R * K + i), MPFR_RNDN);
    if (gated)
        return tr_gated_step_norm(r, x, r->p->erase + (t * r->p->HV + hv) * K, qk->k_norm[t],
                                  a->erasing_norm[t]);
    for (int64_t j = 0; j < R; j++)
        x[R * K + j] = mpfr_get_d(mp_at(a->beta, t * R + j), MPFR_RNDN);
    return tr_step_norm(r, x, K, qk->k_norm + t * R, x + R * K, a->beta_up + t * R);
}

void tr_activate_head(const tr_run *r, int hv, const tr_qk *qk, tr_head *a) {
    const dp_problem *p = r->p;
    const int64_t T = p->T, Kg = dp_Kg(p), R = p->R;
    const mpfr_prec_t b = r->prec;
    *a = (tr_head){.d = mp_alloc(T * Kg, b),
                   .dx = mp_alloc(T * Kg, b),
                   .dA = mp_alloc(T * Kg, b),
                   .beta = mp_alloc(T * R, b),
                   .db = mp_alloc(T * R, b),
                   .sum_dt = mp_alloc(Kg, b),
                   .sum_A = mp_alloc(1, b)};
    if (dp_by_factors(p)) a->erasing = mp_alloc(T * p->K, b);
    if (dp_by_gates(p)) {
        a->erasing = mp_alloc(T * p->K, b);
        a->values = mp_alloc(T * p->V, b);
    }
    tr_norms_alloc(r, NULL, a);
#pragma omp parallel num_threads(r->threads)
    {
        mp_array tmp = mp_alloc(5, b);
        mpfr_ptr A = mp_at(tmp, 4);
        double *x = dp_doubles(dp_by_factors(p) ? 2 * p->K * p->K : R * (p->K + 1));
        mpfr_set_d(A, p->A_log ? p->A_log[hv] : 0, MPFR_RNDN);
        mpfr_exp(A, A, MPFR_RNDN);
#pragma omp for schedule(static)
        for (int64_t t = 0; t < T; t++) {
            activate_token(r, hv, t, A, a, tmp);
            tr_row_norms(r, hv, t, a);
            if (dp_by_gates(p)) activate_writes(r, hv, t, qk, a);
            if (dp_by_factors(p)) negate_reads(r, hv, t, a);
            a->nu[t] = step_norm(r, hv, t, qk, a, x);
        }
        free(x);
        mp_free(&tmp);
        mpfr_free_cache();
    }
}

void tr_free_qk(tr_qk *a) {
    mp_array *m[] = {&a->q, &a->k, &a->rstd_q, &a->rstd_k};
    for (size_t i = 0; i < sizeof m / sizeof *m; i++)
        mp_free(m[i]);
    ld *x[] = {a->q_norm, a->k_norm, a->rstd_q_up, a->rstd_k_up};
    for (size_t i = 0; i < sizeof x / sizeof *x; i++)
        free(x[i]);
}

void tr_free_head(tr_head *a) {
    mp_array *m[] = {&a->d,      &a->dx,    &a->dA,      &a->beta,  &a->db,
                     &a->sum_dt, &a->sum_A, &a->erasing, &a->values};
    for (size_t i = 0; i < sizeof m / sizeof *m; i++)
        mp_free(m[i]);
    free(a->norms);
    ld *x[] = {a->beta_up, a->db_up, a->nu,   a->v_norm,
               a->do_norm, a->S_up,  a->G_up, a->erasing_norm};
    for (size_t i = 0; i < sizeof x / sizeof *x; i++)
        free(x[i]);
}

static void add_rows(mp_array into, mp_array from, int64_t n) {
    for (int64_t i = 0; i < n; i++)
        mpfr_add(mp_at(into, i), mp_at(into, i), mp_at(from, i), MPFR_RNDN);
}

/* dx = rstd (dy - y <y, dy>), or dy without l2norm, stored as row `row`. */
static void chain_l2(const dp_problem *p, mp_array y, mpfr_srcptr rstd, mp_array dy, dp_ball *out,
                     int64_t row, mp_array tmp) {
    mpfr_ptr dot = mp_at(tmp, 0), x = mp_at(tmp, 1), rest = mp_at(tmp, 2);
    mpfr_set_zero(dot, 1);
    for (int i = 0; i < p->K && p->l2norm; i++) {
        mpfr_mul(x, mp_at(y, i), mp_at(dy, i), MPFR_RNDN);
        mpfr_add(dot, dot, x, MPFR_RNDN);
    }
    for (int i = 0; i < p->K; i++) {
        mpfr_set(x, mp_at(dy, i), MPFR_RNDN);
        if (p->l2norm) {
            mpfr_mul(rest, mp_at(y, i), dot, MPFR_RNDN);
            mpfr_sub(x, x, rest, MPFR_RNDN);
            mpfr_mul(x, x, rstd, MPFR_RNDN);
        }
        tr_store(out, row * p->K + i, x, rest);
    }
}

static void chain_product(dp_ball *out, int64_t at, mpfr_srcptr d, mpfr_srcptr slope,
                          mp_array tmp) {
    mpfr_mul(mp_at(tmp, 0), d, slope, MPFR_RNDN);
    tr_store(out, at, mp_at(tmp, 0), mp_at(tmp, 1));
}

/* Of a head whose keys do not erase: derase = k o derasing, and erase o derasing goes to the key.
 */
static void chain_erasing(const tr_run *r, int hv, const tr_qk *qk, tr_task *c, int64_t t,
                          int64_t i, mp_array tmp) {
    const dp_problem *p = r->p;
    const int64_t row = (t * p->HV + hv) * p->K;
    for (int x = 0; x < p->K; x++) {
        mpfr_srcptr d = mp_at(c->derasing, i * p->K + x);
        mpfr_ptr dk = mp_at(c->dk, i * p->K + x);
        chain_product(&r->t->field[DP_RESULT_DERASE], row + x, d, mp_at(qk->k, t * p->K + x), tmp);
        mpfr_mul_d(mp_at(tmp, 0), d, p->erase[row + x], MPFR_RNDN);
        mpfr_add(dk, dk, mp_at(tmp, 0), MPFR_RNDN);
    }
}

void tr_chain_token(const tr_run *r, int h, const tr_qk *qk, const tr_head *heads, tr_task *tasks,
                    int64_t t, int64_t i, mp_array tmp) {
    const dp_problem *p = r->p;
    const int64_t K = p->K, R = p->R, Kg = dp_Kg(p);
    const int G = dp_G(p);
    dp_ball *f = r->t->field;
    for (int gv = 0; gv < G; gv++) {
        const int hv = h * G + gv;
        tr_task *c = tasks + gv * r->ncb;
        for (int b = 1; b < r->ncb; b++) {
            add_rows(mp_from(c->dq, i * K), mp_from(c[b].dq, i * K), K);
            add_rows(mp_from(c->dk, i * R * K), mp_from(c[b].dk, i * R * K), R * K);
            add_rows(mp_from(c->dg, i * Kg), mp_from(c[b].dg, i * Kg), Kg);
            add_rows(mp_from(c->dbeta, i * R), mp_from(c[b].dbeta, i * R), R);
            if (c->derasing.mem)
                add_rows(mp_from(c->derasing, i * K), mp_from(c[b].derasing, i * K), K);
        }
        if (dp_by_gates(p)) chain_erasing(r, hv, qk, c, t, i, tmp);
        for (int64_t x = 0; x < K && dp_by_factors(p); x++) /* of -lr_a, that is: of E = lr_a S */
            tr_store(&f[DP_RESULT_DLR_A], (t * p->HV + hv) * K + x, mp_at(c->derasing, i * K + x),
                     mp_at(tmp, 0));
        for (int64_t x = 0; x < Kg; x++)
            chain_product(&f[DP_RESULT_DG], (t * p->HV + hv) * Kg + x, mp_at(c->dg, i * Kg + x),
                          mp_at(heads[gv].dx, t * Kg + x), tmp);
        for (int64_t j = 0; j < R && dp_has_beta(p); j++)
            chain_product(&f[DP_RESULT_DBETA], (t * p->HV + hv) * R + j, mp_at(c->dbeta, i * R + j),
                          mp_at(heads[gv].db, t * R + j), tmp);
        if (!gv) continue;
        add_rows(mp_from(tasks->dq, i * K), mp_from(c->dq, i * K), K);
        add_rows(mp_from(tasks->dk, i * R * K), mp_from(c->dk, i * R * K), R * K);
    }
    chain_l2(p, mp_from(qk->q, t * K), mp_at(qk->rstd_q, t), mp_from(tasks->dq, i * K),
             &f[DP_RESULT_DQ], t * p->H + h, tmp);
    for (int64_t j = 0; j < R; j++)
        chain_l2(p, mp_from(qk->k, (t * R + j) * K), mp_at(qk->rstd_k, t * R + j),
                 mp_from(tasks->dk, (i * R + j) * K), &f[DP_RESULT_DK], (t * p->H + h) * R + j,
                 tmp);
}

void tr_accumulate_gate(const tr_run *r, const tr_head *head, const tr_task *task,
                        const tr_block *b) {
    const int64_t Kg = dp_Kg(r->p);
    mpfr_ptr x = mp_at(task->tmp, 0);
    if (r->p->gate == DP_GATE_LOG) return;
    for (int64_t t = b->t1 - 1; t >= b->t0; t--)
        for (int64_t c = 0; c < Kg; c++) {
            mpfr_srcptr dg = mp_at(task->dg, (t - b->t0) * Kg + c);
            mpfr_mul(x, dg, mp_at(head->dx, t * Kg + c), MPFR_RNDN);
            mpfr_add(mp_at(head->sum_dt, c), mp_at(head->sum_dt, c), x, MPFR_RNDN);
            mpfr_mul(x, dg, mp_at(head->dA, t * Kg + c), MPFR_RNDN);
            mpfr_add(mp_at(head->sum_A, 0), mp_at(head->sum_A, 0), x, MPFR_RNDN);
        }
}
