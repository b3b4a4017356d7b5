/* ref/truth/truth_gate.c - activations in MPFR with their relative errors, and the chain rule back
 * to the raw inputs (math.md c).
 *
 * Relative errors, u = 2^-prec, every operation rounded to nearest (relative error <= u unless it
 * underflows). An underflow of MPFR is below 2^-2^29, absorbed by tiny in truth_bound.c. Inputs are
 * exact but for dp_problem.input_error, in < 2^-20, of the rows of q, k and v (power 2). Such an
 * error moves rstd by at most in / (1 - in) <= 2 in. It moves y = x rstd by at most in + 2 in + ..
 * <= 4 in of the norm of y. Define rho(x) := x / (1 - x) >= exp(x) - 1.
 *
 *   rstd        K squares, K adds (all terms positive), 1/sqrt:
 *               relative error <= (K+1) u / 2 + u + second order <= gamma_(K+4);
 *               a mean: u / 2 more; of |x| (no squares, no root): (K+2) u
 *   y = x rstd                                                           gamma_(K+6)
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
 * rotation       phi of n angles, added one by one: gamma_n sum |angle|; sin and cos: u more;
 *                two products and a sum: an entry of a pair is off by at most
 *                (gamma_n sum |angle| + 4u) |pair|, a row by sqrt(2) of that       turn
 * The softplus sum for x > 0: x itself carries dx_abs absolute <= u |x| relative, inside gamma_6.
 */
#define DP_OWN_OPERATIONS
#include "truth_impl.h"

#include <assert.h>
#include <math.h>

static inline double get_up(mpfr_srcptr x) {
    return fabs(mpfr_get_d(x, MPFR_RNDA));
} /* >= |x|, finite or not */
ld tr_rho(ld x) { return x < 0.5 ? x / (1 - x) : INFINITY; }
ld tr_exact_up(ld x, ld rel) { return rel <= 0.5 ? x * (1 + 2 * rel) : INFINITY; }

ld tr_gamma(const tr_run *r, ld n) { return tr_rho(n * r->u); }

/* The largest sum of |angle| over a sequence. */
static ld most_turned(const dp_problem *p) {
    const int64_t width = (int64_t)p->HV * dp_pairs(p);
    ld most = 0;
    for (int64_t i = 0; i < p->Nseq * width; i++) {
        ld sum = 0;
        for (int64_t t = p->cu[i / width]; t < p->cu[i / width + 1]; t++)
            sum += tr_abs(p->angle[t * width + i % width]);
        if (!(sum <= most)) most = sum != sum ? INFINITY : sum;
    }
    return most;
}

tr_rel tr_rel_errors(const tr_run *r) {
    const dp_problem *p = r->p;
    const ld turn =
        p->angle ? 2 * (tr_gamma(r, (ld)p->T + 1) * most_turned(p) + tr_gamma(r, 8)) : 0;
    const dp_curve_info *f = &dp_curves[dp_betas[p->beta_form].curve];
    const ld in = p->input_error;
    return (tr_rel){.qk = (p->l2norm ? tr_gamma(r, p->K + 6) + 4 * in : in) + turn,
                    .turn = turn,
                    .rstd = p->l2norm ? tr_gamma(r, p->K + 4) + 2 * in : 0,
                    .beta = tr_gamma(r, f->exact[0]),
                    .db = tr_gamma(r, f->exact[1])};
}

/* The slope w of the norm by y; of x itself <w, x> is its power without eps. */
static void norm_slope(const dp_problem *p, mpfr_srcptr y, mpfr_ptr w) {
    if (dp_norm_of(p)->power == 2)
        mpfr_set(w, y, MPFR_RNDN);
    else
        mpfr_set_si(w, mpfr_sgn(y), MPFR_RNDN);
    mpfr_div_si(w, w, dp_norm_mean(p), MPFR_RNDN);
}

ld tr_activate_row(const tr_run *r, const double *x, int normed, mp_array y, mpfr_ptr rstd,
                   mpfr_ptr tmp) {
    const dp_problem *p = r->p;
    double size[p->K];
    mpfr_set_d(rstd, dp_norm_eps(p), MPFR_RNDN);
    for (int i = 0; i < p->K; i++) {
        mpfr_set_d(mp_at(y, i), x[i], MPFR_RNDN);
        if (!normed) continue;
        norm_slope(p, mp_at(y, i), tmp);
        mpfr_mul(tmp, tmp, mp_at(y, i), MPFR_RNDN);
        mpfr_add(rstd, rstd, tmp, MPFR_RNDN);
    }
    if (dp_norm_of(p)->power == 2)
        mpfr_rec_sqrt(rstd, rstd, MPFR_RNDN);
    else
        mpfr_ui_div(rstd, 1, rstd, MPFR_RNDN);
    for (int i = 0; i < p->K; i++) {
        if (normed) mpfr_mul(mp_at(y, i), mp_at(y, i), rstd, MPFR_RNDN);
        size[i] = get_up(mp_at(y, i));
    }
    return tr_exact_up(tr_norm_up(size, p->K), r->rel.qk);
}

ld tr_rstd_up(const tr_run *r, mpfr_srcptr rstd) { return get_up(rstd) * (1 + 2 * r->rel.rstd); }

static ld *lds(int64_t n) { return dp_calloc((size_t)n, sizeof(ld)); }

void tr_norms_alloc(const tr_run *r, tr_qk *qk, tr_head *a) {
    const int64_t T = r->p->T, TR = T * r->p->R;
    if (qk) {
        qk->q_norm = lds(T);
        qk->k_norm = lds(TR);
        qk->rstd_q_up = dp_is_normed(r->p, DP_INPUT_Q) ? lds(T) : NULL;
        qk->rstd_k_up = dp_is_normed(r->p, DP_INPUT_K) ? lds(TR) : NULL;
    }
    if (!a) return;
    const int64_t n = T * dp_rows(r->p);
    a->norms = dp_calloc((size_t)T, sizeof *a->norms);
    a->beta_up = lds(TR);
    a->db_up = lds(TR);
    a->nu = lds(n);
    a->v_norm = lds(n);
    a->do_norm = r->p->dout ? lds(T) : NULL;
}

void tr_turn(const tr_run *r, const tr_qk *qk, int64_t t, int back, mp_array row, mp_array tmp) {
    const int64_t P = dp_pairs(r->p);
    mpfr_ptr a = mp_at(tmp, 0), b = mp_at(tmp, 1);
    for (int64_t i = 0; i < P; i++) {
        const dp_pair z = dp_pair_at(r->p, i);
        mpfr_ptr x = mp_at(row, z.first), y = mp_at(row, z.second);
        mpfr_srcptr c = mp_at(qk->cos, t * P + i), s = mp_at(qk->sin, t * P + i);
        mpfr_mul(a, x, s, MPFR_RNDN);
        mpfr_mul(b, y, s, MPFR_RNDN);
        mpfr_mul(x, x, c, MPFR_RNDN);
        mpfr_mul(y, y, c, MPFR_RNDN);
        (back ? mpfr_add : mpfr_sub)(x, x, b, MPFR_RNDN);
        (back ? mpfr_sub : mpfr_add)(y, y, a, MPFR_RNDN);
    }
}

void tr_add_turning(const tr_run *r, mp_array x, mp_array d, mp_array dphi, mp_array tmp) {
    for (int64_t i = 0; i < dp_pairs(r->p); i++) {
        const dp_pair z = dp_pair_at(r->p, i);
        mpfr_mul(mp_at(tmp, 0), mp_at(x, z.first), mp_at(d, z.second), MPFR_RNDN);
        mpfr_mul(mp_at(tmp, 1), mp_at(x, z.second), mp_at(d, z.first), MPFR_RNDN);
        mpfr_sub(mp_at(tmp, 0), mp_at(tmp, 0), mp_at(tmp, 1), MPFR_RNDN);
        mpfr_add(mp_at(dphi, i), mp_at(dphi, i), mp_at(tmp, 0), MPFR_RNDN);
    }
}

static void store_pair(mpfr_ptr x, double *to) {
    to[0] = mpfr_get_d(x, MPFR_RNDN);
    mpfr_sub_d(x, x, to[0], MPFR_RNDN);
    to[1] = mpfr_get_d(x, MPFR_RNDN);
}

void tr_sum_angles(const tr_run *r, int h, tr_qk *a, double *dd) {
    const dp_problem *p = r->p;
    const int64_t P = dp_pairs(p);
    const mpfr_prec_t prec = a ? r->prec : 192;
    if (a) {
        a->cos = mp_alloc(p->T * P, prec);
        a->sin = mp_alloc(p->T * P, prec);
    }
#pragma omp parallel for schedule(static) num_threads(r->threads)
    for (int64_t i = 0; i < P; i++) {
        mp_array tmp = mp_alloc(3, prec);
        mpfr_ptr phi = mp_at(tmp, 0);
        for (int64_t t = 0, seq = 0; t < p->T; t++) {
            for (; t == p->cu[seq]; seq++)
                mpfr_set_zero(phi, 1);
            mpfr_ptr s = a ? mp_at(a->sin, t * P + i) : mp_at(tmp, 1),
                     c = a ? mp_at(a->cos, t * P + i) : mp_at(tmp, 2);
            mpfr_add_d(phi, phi, p->angle[(t * p->HV + h) * P + i], MPFR_RNDN);
            mpfr_sin_cos(s, c, phi, MPFR_RNDN);
            if (!dd) continue;
            store_pair(c, dd + (t * P + i) * 4);
            store_pair(s, dd + (t * P + i) * 4 + 2);
        }
        mp_free(&tmp);
        mpfr_free_cache();
    }
}

void tr_activate_qk(const tr_run *r, int h, tr_qk *a) {
    const dp_problem *p = r->p;
    const int64_t T = p->T, K = p->K, R = p->R;
    const int norm_q = dp_is_normed(p, DP_INPUT_Q), norm_k = dp_is_normed(p, DP_INPUT_K);
    *a = (tr_qk){.q = mp_alloc(T * K, r->prec),
                 .k = mp_alloc(T * R * K, r->prec),
                 .rstd_q = mp_alloc(T, r->prec),
                 .rstd_k = mp_alloc(T * R, r->prec)};
    if (p->angle) tr_sum_angles(r, h, a, NULL);
    tr_norms_alloc(r, a, NULL);
#pragma omp parallel num_threads(r->threads)
    {
        mp_array tmp = mp_alloc(2, r->prec);
#pragma omp for schedule(static)
        for (int64_t t = 0; t < T; t++) {
            a->q_norm[t] =
                tr_activate_row(r, p->q + (t * p->H + h) * K, norm_q, mp_from(a->q, t * K),
                                mp_at(a->rstd_q, t), mp_at(tmp, 0));
            if (p->angle) tr_turn(r, a, t, 0, mp_from(a->q, t * K), tmp);
            if (norm_q) a->rstd_q_up[t] = tr_rstd_up(r, mp_at(a->rstd_q, t));
            for (int64_t i = t * R; i < (t + 1) * R; i++)
                a->k_norm[i] =
                    tr_activate_row(r, p->k + ((t * p->H + h) * R + i - t * R) * K, norm_k,
                                    mp_from(a->k, i * K), mp_at(a->rstd_k, i), mp_at(tmp, 0));
            for (int64_t i = t * R; i < (t + 1) * R && norm_k; i++)
                a->rstd_k_up[i] = tr_rstd_up(r, mp_at(a->rstd_k, i));
        }
        mp_free(&tmp);
    }
}

/* ---- operations of activations.h ------------------------------------------------------------- */

typedef struct {
    mp_array tmp; /* each operation takes the n-th number of it */
    int n;
    mpfr_srcptr of, e, one_e; /* exp(-|x|) and 1 + it of x = *of; NULL: of none yet */
} curve;
enum { CURVE_ROOM = 32 };

static mpfr_ptr next(curve *w) {
    assert(w->n < CURVE_ROOM);
    return mp_at(w->tmp, w->n++);
}
static void exponentials(curve *w, mpfr_srcptr x) {
    if (w->of == x) return;
    mpfr_ptr e = next(w), one_e = next(w);
    mpfr_abs(e, x, MPFR_RNDN);
    mpfr_neg(e, e, MPFR_RNDN);
    mpfr_exp(e, e, MPFR_RNDN);
    mpfr_add_ui(one_e, e, 1, MPFR_RNDN);
    w->of = x;
    w->e = e;
    w->one_e = one_e;
}
static mpfr_srcptr sigmoid(curve *w, mpfr_srcptr x) {
    mpfr_ptr y = next(w);
    exponentials(w, x);
    if (mpfr_sgn(x) < 0)
        mpfr_div(y, w->e, w->one_e, MPFR_RNDN);
    else
        mpfr_ui_div(y, 1, w->one_e, MPFR_RNDN);
    return y;
}
static mpfr_srcptr dsigmoid(curve *w, mpfr_srcptr x) {
    mpfr_ptr y = next(w);
    exponentials(w, x);
    mpfr_div(y, w->e, w->one_e, MPFR_RNDN);
    mpfr_div(y, y, w->one_e, MPFR_RNDN);
    return y;
}
static mpfr_srcptr softplus(curve *w, mpfr_srcptr x) {
    mpfr_ptr y = next(w);
    exponentials(w, x);
    mpfr_log1p(y, w->e, MPFR_RNDN);
    if (mpfr_sgn(x) > 0) mpfr_add(y, y, x, MPFR_RNDN);
    return y;
}
static mpfr_srcptr constant(curve *w, double x) {
    mpfr_ptr y = next(w);
    mpfr_set_d(y, x, MPFR_RNDN);
    return y;
}
static inline mpfr_srcptr of_one(curve *w, int (*f)(mpfr_ptr, mpfr_srcptr, mpfr_rnd_t),
                                 mpfr_srcptr x) {
    mpfr_ptr y = next(w);
    f(y, x, MPFR_RNDN);
    return y;
}
static inline mpfr_srcptr of_two(curve *w, int (*f)(mpfr_ptr, mpfr_srcptr, mpfr_srcptr, mpfr_rnd_t),
                                 mpfr_srcptr a, mpfr_srcptr b) {
    mpfr_ptr y = next(w);
    f(y, a, b, MPFR_RNDN);
    return y;
}
#define DP_SIGMOID(x) sigmoid(w, x)
#define DP_DSIGMOID(x) dsigmoid(w, x)
#define DP_SOFTPLUS(x) softplus(w, x)
#define DP_CONST(x) constant(w, x)
#define DP_ABS(x) of_one(w, mpfr_abs, x)
#define DP_NEG(x) of_one(w, mpfr_neg, x)
#define DP_ADD(a, b) of_two(w, mpfr_add, a, b)
#define DP_SUB(a, b) of_two(w, mpfr_sub, a, b)
#define DP_MUL(a, b) of_two(w, mpfr_mul, a, b)
#define DP_DIV(a, b) of_two(w, mpfr_div, a, b)

/* y = F(x), dy = F'(x). tmp: CURVE_ROOM numbers, of which x is none. */
static void curve_at(dp_curve of, mpfr_srcptr x, mpfr_ptr y, mpfr_ptr dy, mp_array tmp) {
    curve at = {.tmp = tmp}, *w = &at;
    switch (of) {
#define CASE(ID, F, SLOPE, ...)         \
    case ID:                            \
        mpfr_set(y, F, MPFR_RNDN);      \
        mpfr_set(dy, SLOPE, MPFR_RNDN); \
        break;
        DP_CURVES(CASE)
#undef CASE
    default: assert(0);
    }
}

typedef struct {
    ld g, x, a;
} gate_rel; /* relative errors of g, dg/dx, dg/dA_log */

/* g (left in d), dg/dx, dg/dA_log of one raw gate. a = exp(A_log). tmp: CURVE_ROOM + 2 numbers. */
static gate_rel gate_value(const tr_run *r, double raw, double bias, mpfr_srcptr a, mpfr_ptr d,
                           mpfr_ptr dx, mpfr_ptr dA, mp_array tmp) {
    const dp_problem *p = r->p;
    const dp_curve of = dp_gates[p->gate].curve;
    const dp_curve_info *f = &dp_curves[of];
    mpfr_ptr x = mp_at(tmp, CURVE_ROOM), y = mp_at(tmp, CURVE_ROOM + 1);
    mpfr_set_d(x, raw, MPFR_RNDN);
    if (p->gate == DP_GATE_LOG) {
        mpfr_set(d, x, MPFR_RNDN);
        mpfr_set_ui(dx, 1, MPFR_RNDN);
        mpfr_set_zero(dA, 1);
        return (gate_rel){0, 0, 0};
    }
    const int inexact = mpfr_add_d(x, x, bias, MPFR_RNDN);
    const ld dx_rel = inexact ? r->u : 0, dx_abs = inexact ? f->steep * r->u * get_up(x) : 0;
    if (!dp_gate_inside(p)) {
        curve_at(of, x, d, dx, tmp);
        mpfr_mul(d, d, a, MPFR_RNDN);
        mpfr_neg(d, d, MPFR_RNDN);
        mpfr_mul(dx, dx, a, MPFR_RNDN);
        mpfr_neg(dx, dx, MPFR_RNDN);
        mpfr_set(dA, d, MPFR_RNDN);
        const ld e = tr_rho(dx_abs) + tr_gamma(r, f->exact[0] + 4);
        return (gate_rel){e, tr_rho(dx_abs) + tr_gamma(r, f->exact[1] + 4), e};
    }
    mpfr_mul(y, x, a, MPFR_RNDN);
    curve_at(of, y, d, dx, tmp);
    mpfr_mul_d(d, d, p->lower_bound, MPFR_RNDN);
    mpfr_mul_d(dx, dx, p->lower_bound, MPFR_RNDN);
    mpfr_mul(dx, dx, a, MPFR_RNDN);
    mpfr_mul(dA, dx, x, MPFR_RNDN);
    const ld dy = tr_rho(f->steep * get_up(y) * (tr_gamma(r, 3) + 2 * dx_rel));
    return (gate_rel){dy + tr_gamma(r, f->exact[0] + 4), dy + tr_gamma(r, f->exact[1] + 2),
                      dy + tr_gamma(r, f->exact[1] + 4) + 2 * dx_rel};
}

/* d = exp(g) and the norms of one channel merged into n. */
static void gate_channel(const tr_run *r, gate_rel e, mpfr_ptr d, mpfr_srcptr dx, mpfr_srcptr dA,
                         tr_gate_norms *n) {
    const ld d_rel = tr_rho(get_up(d) * tr_rho(e.g)) + tr_gamma(r, 2);
    if (!(d_rel <= n->rel)) n->rel = d_rel != d_rel ? INFINITY : d_rel;
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
    const tr_rel rel = r->rel;
    const dp_beta_info *form = &dp_betas[p->beta_form];
    mpfr_ptr x = mp_at(tmp, CURVE_ROOM);
    mpfr_set_d(x, b, MPFR_RNDN);
    curve_at(form->curve, x, beta, db, tmp);
    mpfr_mul_d(beta, beta, form->times, MPFR_RNDN);
    mpfr_mul_d(db, db, form->times, MPFR_RNDN);
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
    for (int c = 0; c < Kg; c++) {
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
        if (!p->beta) {
            mpfr_set_ui(mp_at(a->beta, i), 1, MPFR_RNDN);
            a->beta_up[i] = 1;
            continue;
        }
        activate_beta(r, p->beta[(t * p->HV + hv) * R + j], mp_at(a->beta, i), mp_at(a->db, i),
                      &a->beta_up[i], &a->db_up[i], tmp);
    }
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
    if (p->angle) a->sum_angle = mp_alloc(dp_pairs(p), b);
    tr_norms_alloc(r, NULL, a);
    tr_rows_alloc(r, a);
#pragma omp parallel num_threads(r->threads)
    {
        mp_array tmp = mp_alloc(CURVE_ROOM + 3, b);
        mpfr_ptr A = mp_at(tmp, CURVE_ROOM + 2);
        double *x = dp_doubles(tr_rows_room(r));
        mpfr_set_d(A, p->A_log ? p->A_log[hv] : 0, MPFR_RNDN);
        mpfr_exp(A, A, MPFR_RNDN);
#pragma omp for schedule(static)
        for (int64_t t = 0; t < T; t++) {
            activate_token(r, hv, t, A, a, tmp);
            tr_rows_units(r, hv, t, a, mp_at(tmp, 0));
        }
#pragma omp for schedule(static)
        for (int64_t t = 0; t < T; t++) {
            tr_row_norms(r, hv, t, a);
            tr_rows_token(r, hv, t, qk, a, tmp);
            tr_rows_step_norm(r, t, qk, a, x);
        }
        free(x);
        mp_free(&tmp);
        mpfr_free_cache();
    }
}

void tr_free_qk(tr_qk *a) {
    mp_array *m[] = {&a->q, &a->k, &a->rstd_q, &a->rstd_k, &a->cos, &a->sin};
    for (size_t i = 0; i < sizeof m / sizeof *m; i++)
        mp_free(m[i]);
    ld *x[] = {a->q_norm, a->k_norm, a->rstd_q_up, a->rstd_k_up};
    for (size_t i = 0; i < sizeof x / sizeof *x; i++)
        free(x[i]);
}

void tr_free_head(tr_head *a) {
    mp_array *m[] = {&a->d,      &a->dx,    &a->dA,     &a->beta,     &a->db,
                     &a->sum_dt, &a->sum_A, &a->values, &a->strength, &a->sum_angle};
    for (size_t i = 0; i < sizeof m / sizeof *m; i++)
        mp_free(m[i]);
    free(a->norms);
    ld *x[] = {a->beta_up, a->db_up, a->nu,   a->v_norm,
               a->do_norm, a->S_up,  a->G_up, a->strength_up};
    for (size_t i = 0; i < sizeof x / sizeof *x; i++)
        free(x[i]);
    for (int f = 0; f < DP_NFACTORS; f++)
        mp_free(&a->factor[f]);
    for (int e = 0; e < DP_MAX_ENTRIES; e++) {
        mp_free(&a->entry[e]);
        free(a->entry_norm[e]);
    }
    for (int i = 0; i < DP_NINPUTS; i++) {
        mp_free(&a->unit[i].y);
        mp_free(&a->unit[i].rstd);
        free(a->unit[i].rstd_up);
    }
}

static void add_rows(mp_array into, mp_array from, int64_t n) {
    for (int64_t i = 0; i < n; i++)
        mpfr_add(mp_at(into, i), mp_at(into, i), mp_at(from, i), MPFR_RNDN);
}

void tr_chain_norm(const dp_problem *p, mp_array y, mpfr_srcptr rstd, mp_array dy, mp_array tmp) {
    mpfr_ptr dot = mp_at(tmp, 0), x = mp_at(tmp, 1);
    mpfr_set_zero(dot, 1);
    for (int i = 0; i < p->K; i++) {
        mpfr_mul(x, mp_at(y, i), mp_at(dy, i), MPFR_RNDN);
        mpfr_add(dot, dot, x, MPFR_RNDN);
    }
    for (int i = 0; i < p->K; i++) {
        norm_slope(p, mp_at(y, i), x);
        mpfr_mul(x, x, dot, MPFR_RNDN);
        mpfr_sub(x, mp_at(dy, i), x, MPFR_RNDN);
        mpfr_mul(mp_at(dy, i), x, rstd, MPFR_RNDN);
    }
}

void tr_store_row(int K, mp_array x, dp_ball *out, int64_t row, mpfr_ptr tmp) {
    for (int i = 0; i < K; i++)
        tr_store(out, row * K + i, mp_at(x, i), tmp);
}

static void chain_product(dp_ball *out, int64_t at, mpfr_srcptr d, mpfr_srcptr slope,
                          mp_array tmp) {
    mpfr_mul(mp_at(tmp, 0), d, slope, MPFR_RNDN);
    tr_store(out, at, mp_at(tmp, 0), mp_at(tmp, 1));
}

void tr_sum_tasks(const tr_run *r, tr_task *tasks, int64_t i) {
    const dp_problem *p = r->p;
    const int64_t K = p->K, R = p->R, Kg = dp_Kg(p), n = dp_rows(p);
    for (int gv = 0; gv < dp_G(p); gv++) {
        tr_task *c = tasks + gv * r->ncb;
        for (int b = 1; b < r->ncb; b++) {
            add_rows(mp_from(c->dq, i * K), mp_from(c[b].dq, i * K), K);
            add_rows(mp_from(c->dg, i * Kg), mp_from(c[b].dg, i * Kg), Kg);
            add_rows(mp_from(c->dstrength, i * n), mp_from(c[b].dstrength, i * n), n);
            for (int e = 0; e < r->rows.n; e++)
                add_rows(mp_from(c->dentry[e], i * R * K), mp_from(c[b].dentry[e], i * R * K),
                         R * K);
        }
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
        tr_rows_chain(r, hv, qk, &heads[gv], c, t, i, tmp);
        for (int64_t x = 0; x < Kg; x++)
            chain_product(&f[DP_RESULT_DG], (t * p->HV + hv) * Kg + x, mp_at(c->dg, i * Kg + x),
                          mp_at(heads[gv].dx, t * Kg + x), tmp);
        for (int64_t j = 0; j < R && p->beta; j++)
            chain_product(&f[DP_RESULT_DBETA], (t * p->HV + hv) * R + j, mp_at(c->dbeta, i * R + j),
                          mp_at(heads[gv].db, t * R + j), tmp);
        if (!gv) continue;
        add_rows(mp_from(tasks->dq, i * K), mp_from(c->dq, i * K), K);
        add_rows(mp_from(tasks->dk, i * R * K), mp_from(c->dk, i * R * K), R * K);
    }
    const mp_array dq = mp_from(tasks->dq, i * K), unit = mp_from(tmp, 6);
    if (p->angle) /* a query head for each value head */
        tr_add_turning(r, mp_from(qk->q, t * K), dq, mp_from(tasks->dphi, i * dp_pairs(p)), tmp);
    if (p->angle) tr_turn(r, qk, t, 1, dq, tmp);
    if (qk->rstd_q_up) { /* from q itself: rotated back, a zero of it would have a sign */
        for (int64_t x = 0; x < K; x++)
            mpfr_mul_d(mp_at(unit, x), mp_at(qk->rstd_q, t), p->q[(t * p->H + h) * K + x],
                       MPFR_RNDN);
        tr_chain_norm(p, unit, mp_at(qk->rstd_q, t), dq, tmp);
    }
    tr_store_row(p->K, dq, &f[DP_RESULT_DQ], t * p->H + h, mp_at(tmp, 0));
    for (int64_t j = 0; j < R; j++) {
        const mp_array dk = mp_from(tasks->dk, (i * R + j) * K);
        if (qk->rstd_k_up)
            tr_chain_norm(p, mp_from(qk->k, (t * R + j) * K), mp_at(qk->rstd_k, t * R + j), dk,
                          tmp);
        tr_store_row(p->K, dk, &f[DP_RESULT_DK], (t * p->H + h) * R + j, mp_at(tmp, 0));
    }
}

void tr_accumulate_gate(const tr_run *r, const tr_head *head, const tr_task *task,
                        const tr_block *b) {
    const int64_t Kg = dp_Kg(r->p);
    mpfr_ptr x = mp_at(task->tmp, 0);
    const int64_t P = dp_pairs(r->p);
    if (b->last_of_seq && r->p->angle) mp_zero(head->sum_angle, P);
    for (int64_t t = b->t1 - 1; t >= b->t0 && r->p->angle; t--)
        for (int64_t i = 0; i < P; i++) {
            mpfr_ptr sum = mp_at(head->sum_angle, i);
            mpfr_add(sum, sum, mp_at(task->dphi, (t - b->t0) * P + i), MPFR_RNDN);
            mpfr_set(mp_at(task->tmp, 1), sum, MPFR_RNDN);
            if (t % dp_lag(r->p)) mpfr_set_zero(mp_at(task->tmp, 1), 1); /* it only reads */
            tr_store(&r->t->field[DP_RESULT_DANGLE], (t * r->p->HV + task->hv) * P + i,
                     mp_at(task->tmp, 1), x);
        }
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
