/* ref/truth/truth_bound.c - the error radii of the truth.
 *
 * Rounding of the bound itself. Every quantity below is a sum of products and square roots of
 * non-negative numbers in binary128 (113-bit significand) evaluated to nearest, so after n
 * operations on its longest path it is low by at most (1 - 2^-113)^n, where a square root (2^-104)
 * counts as 2^9 operations. The longest path has fewer than T (K + R + 2000) + K V < 2^43
 * operations (asserted), hence INFLATE = 1 + 2^-60 at the end makes it an upper bound. The only
 * subtraction (lambda - 1) is done on an inflated lambda. tiny (MPFR: 2^-10000) in every step
 * covers underflow: of binary128 (below 2^-16400 an operation), of MPFR (below 2^-2^29), for
 * operands up to 2^5000; larger ones overflow in the end and give inf. NaN becomes inf.
 *
 * Notation. Exact quantities are plain, computed ones carry ~, u = 2^-prec (double-double: 2^-98,
 * tiny = 2^-960; truth_dd.h says why), gamma_n = n u / (1 - n u). Norms: 2-norm of vectors,
 * Frobenius of matrices, spectral for the step maps. Each bound on a size (n_, e_, ..) holds for
 * the exact and the computed value alike. Inner products of m terms, rounded product and rounded
 * additions in any order:  |fl(sum) - sum| <= gamma_(m+1) sum |a||b|, and Cauchy-Schwarz turns the
 * right side into norms. kappa_j >= |k_j|, b_j >= |beta_j|, eps_k, eps_b relative errors of the
 * activated rows, d >= exp(g) with error d_err (truth_gate.c).
 *
 * FORWARD. With A_t = (I - k'Bk) D:
 *     S_t = A_t S + k'Bv, S = S_(t-1), and S~_t = A_t S~ + k'Bv + l_t, hence
 *     |S~_t - S_t| <= mu |S~ - S| + |l_t|          |S_t| <= mu |S| + sum_j kappa_j b_j |v_j|
 *     mu = nu max(d),
 *     nu >= |I - k'Bk|_2:  beta >= 0: max(1, lambda - 1), lambda >= lambda_max(k'Bk),
 *                          see lambda_up;
 *                          any sign:  1 + sum_j |beta_j| kappa_j^2
 * Local error l_t, with n = |S~| (bounded by N + b, the bounds of |S| and of the error):
 *     Sbar~ = D S~ + F1             |F1| <= (d_err + 2u d) n,   sigma = d (1+2u) n >= |Sbar~|
 *     E~_j = v_j - k_j D S~ + F2_j  |F2_j| <= gamma_(K+2) (|v_j| + kappa_j sigma)
 *                                             + eps_k kappa_j sigma + kappa_j |F1|
 *                                             (+ 2 input_error |v_j|)
 *                                   e_j = |v_j| + kappa_j sigma + |F2_j|
 *     U~_j = beta_j E_j + F3_j      |F3_j| <= b_j ((2u + eps_b) e_j + |F2_j|)
 *                                   |U~_j| <= w_j = b_j e_j (1+2u)
 *     |l_t| <= |F1| + sum_j (eps_k kappa_j w_j + kappa_j |F3_j|)
 *              + gamma_(R+2) (sigma + sum_j kappa_j w_j) + tiny
 * Where |S~_t| was measured (double-double with gradients) |S_t| <= |S~_t| + b_t, too: by then b_t
 * is known, and the smaller bound goes on. Without it the bound of |S_t| adds up the norms of all
 * tokens that a slow head remembers, thousands of times |S_t|, and that of dg squares it.
 * Likewise |G|.
 * Against the exact trajectory E~_j differs by dE_j <= kappa_j d b_prev + |F2_j|.
 *     o = scale S_t' q:            |o~ - o| <= |scale| |q| (b_t + (eps_q + gamma_(K+3)) n_t)
 *
 * BACKWARD. G (bounds N, error b) is the adjoint of S_t from the future. With s >= |scale| |do| :
 *     G1 = G + q (scale do)'       N1 = N + |q| s,
 *                                  b1 = b + gamma_3 (N + b + |q| s) + (eps_q + 2u) |q| s,
 *                                  n1 = N1 + b1
 *     dq = S_t (scale do)          error s b_t + gamma_(V+C+3) s n_t
 *                                  C column blocks, added one by one
 *     dU_j = k_j G1                f_j = (gamma_(K+1) + eps_k) kappa_j n1 local,
 *                                  f_j + kappa_j b1 in all; tau_j = kappa_j n1 + f_j
 *     dbeta_j = <E_j, dU_j>        error e_j (f_j + kappa_j b1) + dE_j tau_j
 *                                        + gamma_(V+C+2) e_j tau_j
 *     dE_j = beta_j dU_j = dv_j    h_j = b_j ((2u + eps_b) tau_j + f_j) local,
 *                                  h_j + b_j kappa_j b1 in all; eta_j = b_j tau_j (1+2u)
 *     dk_j = U_j G1' - d o (dE_j S')
 *                                  w_j b1 + dUj n1 + gamma w_j n1
 *                                  + d (eta_j b_prev + (h_j + b_j kappa_j b1) n + gamma eta_j n)
 *                                  + (d_err + 2u d) eta_j n,
 *                                  gamma = gamma_(V+C+4), dUj = b_j dE_j + (2u + eps_b) b_j e_j
 *     dSbar = G1 - k' dE           l = sum_j (eps_k kappa_j eta_j + kappa_j h_j) + gamma_(R+2) n2,
 *                                  n2 = n1 + sum_j kappa_j eta_j
 *     G_new = d o dSbar            N_new = mu N1,
 *                                  b_new = mu b1 + d l + (d_err + 2u d)(n2 + l) + tiny
 *                                  |D (I - k'Bk)| <= mu
 *     dg = rowsum(G_new o S)       error n_new b_prev + b_new n + gamma_(V+C+2+K) n_new n
 *                                  (K: GDN adds over channels)
 *
 * ERASING KEYS (GDN-2: one key, beta = 1, v stands for write o v). What reads the state,
 * e = erase o k with eps_e = eps_k + gamma_2, is not what writes it, so A_t = (I - k'e) D, and
 * kappa becomes kappa_e >= |e| wherever a state is read or G1 passes the read: in F2, in dE
 * (forward), in the second part of dk, which is the gradient de of e, in dSbar = G1 - e'dE with
 * eps_e in l. A product with beta = 1 is exact and counted all the same.
 *     nu           I - k'e is the identity but on the plane of k and e; the two singular values
 *                  there have the product |1 - d|, d = <k, e>, and squares that add up to
 *                  2 - 2d + ac, a = |k|^2, c = |e|^2, so the larger one is
 *                  (sqrt(ac) + sqrt(ac + 4 (1 - d))) / 2, for either sign of 1 - d
 *     v            write o v: u |v| more in F2
 *     dv, dwrite   write o dE, v o dE: the largest |write|, |v| times the error of dE, and 2u eta
 *     derase       k o de: the error of de and (eps_k + 2u) |de|, times kappa >= every |k_i|
 *     dk           erase o de is added: times the largest |erase|, 2u |de| and gamma_3 of it more
 *
 * CHAIN. delta, m: error and size of the gradient of the activated value, value heads of a group
 * summed (gamma_G sum m more).
 *     L2     f = rstd (I - y y') dy with |y| <= 1, so |I - y y'| <= 1:
 *            error rstd (delta + 9 gamma_(K+8) m):
 *            y~ in <y,dy> and in y<y,dy> 2.1 eps_y m, rstd 2.1 (eps_r + 2u) m, inner product
 *            1.1 gamma_(K+2) m, last two operations 4.2u m; eps_y and eps_r hold 4 and 2
 *            input_error, 13 of them in all
 *     slope  raw = x dact:         x delta + (x_err + 2u x) m
 *     sums   over tokens: errors add, gamma_(terms) sum of sizes more;
 *            dA_log: <dg, a> per token: a delta + a_err m + gamma a m
 */
#include "ref/arithmetic/spectral.h"
#include "truth_impl.h"

#include <assert.h>
#include <float.h>
#include <math.h>
#include <string.h>

#define INFLATE ((ld)1 + 0x1p-60)

ld tr_two_to(int n) {
    ld x = 1;
    for (; n > 0; n--)
        x *= 2;
    for (; n < 0; n++)
        x *= 0.5;
    return x;
}

/* One step of Newton from the root in double: half the square of 2^-53, and three roundings. */
ld tr_sqrt(ld x) {
    int e = 0;
    if (!(x > 0)) return x == 0 ? x : (ld)NAN;
    if (x == (ld)INFINITY) return x;
    for (; x < 0x1p-1000; e--)
        x *= 0x1p1000;
    for (; x > 0x1p1000; e++)
        x *= 0x1p-1000;
    ld y = sqrt((double)x);
    y = (y + x / y) / 2;
    for (; e > 0; e--)
        y *= 0x1p500;
    for (; e < 0; e++)
        y *= 0x1p-500;
    return y;
}

/* Scaled by a power of two where squares could overflow, or lose what counts. */
double tr_norm_up(const double *x, int64_t n) {
    double top = 0, s = 0;
    int e = 0;
    for (int64_t i = 0; i < n; i++) {
        if (!isfinite(x[i])) return fabs(x[i]);
        top = fmax(top, fabs(x[i]));
    }
    if (top == 0) return 0;
    if (!(top > 0x1p-400 && top < 0x1p400)) frexp(top, &e);
    for (int64_t i = 0; i < n; i++) {
        const double y = e ? ldexp(x[i], -e) : x[i];
        s += y * y;
    }
    const double up = sqrt(s) * (1 + (double)(n + 4) * 0x1p-52);
    return e ? ldexp(up, e) + 0x1p-1074 : up;
}

double tr_up(ld x) {
    x *= INFLATE;
    if (!(x <= DBL_MAX)) return INFINITY;
    const double d = (double)x;
    return d >= x ? d : nextafter(d, INFINITY);
}

/* Rounding to hi + lo: |x - hi - lo| <= 2^-53 |lo| + 2^-1074 an entry. */
void tr_ball_finish(dp_ball *b) {
    for (int64_t r = 0; r < b->rows; r++) {
        int finite = 1;
        for (int64_t i = r * b->width; i < (r + 1) * b->width; i++)
            finite &= isfinite(b->hi[i]) != 0;
        const ld lost = 0x1p-53 * (ld)tr_norm_up(b->lo + r * b->width, b->width),
                 least = 0x1p-1074 * tr_sqrt(b->width);
        b->rad[r] = finite ? tr_up(b->rad[r] + lost + least) : INFINITY;
    }
}

/* lambda_max(k'Bk), beta >= 0: at most the trace and, above 2, at most that of the scaled Gram
 * matrix G_ij = sqrt(b_i b_j) <x_i, x_j>, proven by dp_eigenvalue_up. G comes from keys and betas
 * rounded to double, K products and sums and two roundings: its error is below (K + 16) 2^-52 trace
 * in norm; `rel` covers computed against exact activations. */
static ld lambda_up(const tr_run *r, const double *x, int64_t ld_k, const ld *kap, const ld *be,
                    ld rel) {
    const int R = r->p->R, K = r->p->K;
    ld trace = 0;
    for (int j = 0; j < R; j++)
        trace += be[j] * kap[j] * kap[j];
    if (R == 1 || trace <= 2) return trace;
    double *G = dp_alloc((size_t)(R * R), sizeof *G);
    for (int i = 0; i < R; i++)
        for (int j = 0; j < R; j++) {
            double s = 0;
            for (int k = 0; k < K; k++)
                s += x[i * ld_k + k] * x[j * ld_k + k];
            G[i * R + j] = s * (sqrt((double)be[i]) * sqrt((double)be[j]));
        }
    const ld top = dp_eigenvalue_up(R, G);
    free(G);
    return (top < trace ? top : trace) + ((K + 16) * 0x1p-52 + rel) * trace;
}

ld tr_step_norm(const tr_run *r, const double *k, int64_t ld_k, const ld *kap, const double *beta,
                const ld *be) {
    const int R = r->p->R;
    const tr_rel rel = tr_rel_errors(r);
    int negative = 0;
    ld any_sign = 1;
    for (int j = 0; j < R; j++) {
        negative |= beta[j] < 0;
        any_sign += be[j] * kap[j] * kap[j];
    }
    if (negative || !(any_sign < INFINITY)) return any_sign;
    const ld lambda = lambda_up(r, k, ld_k, kap, be, 4 * rel.qk + 4 * rel.beta) * (1 + 0x1p-40);
    return lambda > 2 ? lambda - 1 : 1;
}

/* d and its parts in double: K products of three numbers within 2^-50, summed within K 2^-52; k is
 * rounded and off by rel.qk. */
ld tr_gated_step_norm(const tr_run *r, const double *k, const double *erase, ld k_norm,
                      ld erasing_norm) {
    const int K = r->p->K;
    double d = 0, size = 0;
    for (int i = 0; i < K; i++) {
        d += erase[i] * k[i] * k[i];
        size += fabs(erase[i]) * k[i] * k[i];
    }
    const ld off = ((K + 16) * 0x1p-51 + 4 * tr_rel_errors(r).qk) * (ld)size + K * 0x1p-1000,
             ac = k_norm * k_norm * erasing_norm * erasing_norm, rest = ac + 4 * (1 - (ld)d + off);
    return (tr_sqrt(ac) + tr_sqrt(rest > 0 ? rest : 0)) / 2 * (1 + 0x1p-40);
}

/* The bounds of one token: what the forward and the adjoint share. Arrays [R]; era: of the keys
 * that erase, kap where those are the keys. */
typedef struct {
    ld mu, sigma, F1, s, q, push; /* push = sum kappa b |v| */
    tr_gate_norms g;
    const ld *kap, *era, *be;
    ld *v, *F2, *e, *w;
} token;

typedef struct {
    ld N, b;
} norm_error; /* bound of the exact norm, bound of the error */

typedef struct {
    const tr_run *r;
    const tr_qk *qk;
    const tr_head *hd;
    int hv, is_M;
    tr_rel rel;
    token k;
    ld *scratch;
} bounder;

static bounder bounder_for(const tr_run *r, int hv, const tr_qk *qk, const tr_head *hd) {
    const int R = r->p->R;
    bounder b = {.r = r,
                 .qk = qk,
                 .hd = hd,
                 .hv = hv,
                 .rel = tr_rel_errors(r),
                 .scratch = dp_calloc((size_t)(4 * R), sizeof(ld))};
    ld **to[4] = {&b.k.v, &b.k.F2, &b.k.e, &b.k.w};
    for (int i = 0; i < 4; i++)
        *to[i] = b.scratch + i * R;
    return b;
}

/* Fills c->k for token t and a state of norm and error `in` entering it. */
static void token_bounds(bounder *c, int64_t t, norm_error in) {
    const tr_run *r = c->r;
    const dp_problem *p = r->p;
    const ld u = r->u, n = in.N + in.b;
    token *k = &c->k;
    k->g = c->hd->norms[t];
    k->kap = c->qk->k_norm + t * p->R;
    const int before = dp_by_factors(p); /* read before the decay */
    k->era = c->hd->erasing_norm ? c->hd->erasing_norm + t * p->R : k->kap;
    k->be = c->hd->beta_up + t * p->R;
    k->q = c->qk->q_norm[t];
    k->mu = c->hd->nu[t] * (before ? 1 : k->g.d);
    k->F1 = (k->g.d_err + 2 * u * k->g.d) * n;
    k->sigma = k->g.d * (1 + 2 * u) * n;
    k->s = p->dout ? tr_abs(p->scale) * c->hd->do_norm[t] : 0;
    k->push = 0;
    for (int j = 0; j < p->R; j++) {
        const ld ks = k->era[j] * (before ? n : k->sigma);
        k->v[j] = c->is_M ? 0 : c->hd->v_norm[t * p->R + j] * (1 + 2 * (ld)p->input_error);
        k->F2[j] = tr_gamma(r, p->K + 2) * (k->v[j] + ks) + 2 * (ld)p->input_error * k->v[j] +
                   c->rel.erasing * ks + (before ? 0 : k->era[j] * k->F1);
        if (c->hd->erasing_norm) k->F2[j] += u * k->v[j];
        k->e[j] = k->v[j] + ks + k->F2[j];
        k->w[j] = k->be[j] * k->e[j] * (1 + 2 * u);
        k->push += k->kap[j] * k->be[j] * k->v[j];
    }
}

static norm_error measured(const ld *up, int64_t t, norm_error x) {
    if (up && up[t] + x.b < x.N) x.N = up[t] + x.b;
    return x;
}

/* The state after token t. */
static norm_error forward_bound(bounder *c, int64_t t, norm_error in) {
    token_bounds(c, t, in);
    const token *k = &c->k;
    ld l = k->F1 + c->r->tiny, sum = k->sigma;
    for (int j = 0; j < c->r->p->R; j++) {
        const ld F3 = k->be[j] * ((2 * c->r->u + c->rel.beta) * k->e[j] + k->F2[j]);
        l += c->rel.qk * k->kap[j] * k->w[j] + k->kap[j] * F3;
        sum += k->kap[j] * k->w[j];
    }
    return measured(c->is_M ? NULL : c->hd->S_up, t,
                    (norm_error){k->mu * in.N + k->push,
                                 k->mu * in.b + l + tr_gamma(c->r, c->r->p->R + 2) * sum});
}

typedef struct {
    ld err, size;
} grad; /* of one row of the gradient of an activated value */
typedef struct {
    grad q, g, *k, *beta, erasing, values;
    ld *v;
} token_grads; /* k, beta [R]; v [R] errors; erasing, values: of erase o k and write o v */

static ld largest(const double *x, int n) {
    double most = 0;
    for (int i = 0; i < n; i++)
        if (!(fabs(x[i]) <= most)) most = isnan(x[i]) ? INFINITY : fabs(x[i]);
    return most;
}

/* The gradient of a key whose reads are those of erase o k, from y->k of one that erases itself:
 * its second part is that of erase o k, and times erase where that is above 1. dE: error and size;
 * in: the state before. */
static void through_erasing(const bounder *c, int64_t t, grad dE, norm_error in, token_grads *y) {
    const dp_problem *p = c->r->p;
    const token *k = &c->k;
    const ld u = c->r->u, d = k->g.d, n = in.N + in.b, gam = tr_gamma(c->r, p->V + c->r->ncb + 4),
             top = largest(p->erase + (t * p->HV + c->hv) * p->K, p->K), more = top > 1 ? top : 1;
    const grad read = {d * (dE.size * in.b + dE.err * n + gam * dE.size * n) +
                           (k->g.d_err + 2 * u * d) * dE.size * n,
                       d * dE.size * n * (1 + 2 * gam)};
    y->erasing = read;
    y->k[0].err = more * y->k[0].err + (2 * u + tr_gamma(c->r, 3)) * more * y->k[0].size;
    y->k[0].size = more * y->k[0].size * (1 + 4 * gam);
}

/* The same where the state is read before its decay (truth_factors.c): G1, after the output,
 * becomes d o G1, which dg is of, and that + lr_a' dE, dE of the first key; the state before is
 * that of the reads. */
static norm_error undecayed_bound(const bounder *c, norm_error in, norm_error G1, token_grads *y) {
    const tr_run *r = c->r;
    const dp_problem *p = r->p;
    const token *k = &c->k;
    const ld u = r->u, n = in.N + in.b, n1 = G1.N + G1.b, gam = tr_gamma(r, p->V + r->ncb + 4),
             gam_g = tr_gamma(r, p->V + r->ncb + 2 + p->K);
    const ld G_size = k->g.d * (1 + 2 * u) * n1,
             G_err = k->g.d * G1.b + (k->g.d_err + 2 * u * k->g.d) * n1 + r->tiny;
    ld l = (k->g.d_err + 2 * u * k->g.d) * n1, n2 = G_size;
    for (int j = 0; j < p->R; j++) {
        const ld f = (tr_gamma(r, p->K + 1) + c->rel.qk) * k->kap[j] * n1, tau = k->kap[j] * n1 + f,
                 h = 2 * u * tau + f, h_all = h + k->kap[j] * G1.b, eta = tau * (1 + 2 * u),
                 dU = k->era[j] * in.b + k->F2[j] + 2 * u * k->e[j];
        y->v[j] = h_all;
        y->k[j].err = k->w[j] * G1.b + dU * n1 + gam * k->w[j] * n1;
        y->k[j].size = k->w[j] * n1 * (1 + 2 * gam);
        if (!j)
            y->erasing = (grad){eta * in.b + h_all * n + gam * eta * n, eta * n * (1 + 2 * gam)};
        l += k->era[j] * h;
        n2 += k->era[j] * eta;
    }
    y->g = (grad){G_err * n + G_size * in.b + gam_g * G_size * n, G_size * n * (1 + gam_g)};
    return (norm_error){k->mu * G1.N, k->mu * G1.b + l + tr_gamma(r, p->R + 2) * n2 + r->tiny};
}

/* The adjoint before token t from the adjoint G after it, and the rows of the token's gradients. */
static norm_error backward_bound(bounder *c, int64_t t, norm_error in, norm_error out, norm_error G,
                                 token_grads *y) {
    const tr_run *r = c->r;
    const dp_problem *p = r->p;
    const ld u = r->u, eb = 2 * u + c->rel.beta, n = in.N + in.b,
             gam = tr_gamma(r, p->V + r->ncb + 4);
    token_bounds(c, t, in);
    const token *k = &c->k;
    const ld d = k->g.d, qs = k->q * k->s, N1 = G.N + qs;
    const ld b1 = G.b + tr_gamma(r, 3) * (G.N + G.b + qs) + (c->rel.qk + 2 * u) * qs + r->tiny,
             n1 = N1 + b1;
    y->q =
        (grad){k->s * out.b + gam * k->s * (out.N + out.b), k->s * (1 + 2 * u) * (out.N + out.b)};
    if (dp_by_factors(p)) return undecayed_bound(c, in, (norm_error){N1, b1}, y);
    ld l = 0, n2 = n1;
    for (int j = 0; j < p->R; j++) {
        const ld kap = k->kap[j], era = k->era[j], b = k->be[j], e = k->e[j];
        const ld f = (tr_gamma(r, p->K + 1) + c->rel.qk) * kap * n1, tau = kap * n1 + f,
                 f_all = f + kap * b1;
        const ld dE = era * d * in.b + k->F2[j], h = b * (eb * tau + f), h_all = h + b * kap * b1,
                 eta = b * tau * (1 + 2 * u);
        const ld dU = b * dE + eb * b * e;
        y->beta[j] = (grad){e * f_all + dE * tau + gam * e * tau, e * tau * (1 + gam)};
        y->v[j] = h_all;
        y->k[j].err = k->w[j] * b1 + dU * n1 + gam * k->w[j] * n1 +
                      d * (eta * in.b + h_all * n + gam * eta * n) +
                      (k->g.d_err + 2 * u * d) * eta * n;
        y->k[j].size = (k->w[j] * n1 + d * eta * n) * (1 + 2 * gam);
        if (dp_by_gates(p)) through_erasing(c, t, (grad){h_all, eta}, in, y);
        y->values = (grad){h_all, eta};
        l += c->rel.erasing * era * eta + era * h;
        n2 += era * eta;
    }
    l += tr_gamma(r, p->R + 2) * n2;
    const norm_error to =
        measured(c->hd->G_up, t,
                 (norm_error){k->mu * N1,
                              k->mu * b1 + d * l + (k->g.d_err + 2 * u * d) * (n2 + l) + r->tiny});
    const ld gam_g = tr_gamma(r, p->V + r->ncb + 2 + p->K), nn = (to.N + to.b) * n;
    y->g = (grad){(to.N + to.b) * in.b + to.b * n + gam_g * nn, nn * (1 + gam_g)};
    return to;
}

/* Sums over tokens of one head: error and size of ddt_bias and dA_log. */
typedef struct {
    grad dt, A;
} gate_sums;

/* derase, dwrite and dv. */
static void erasing_rows(const bounder *c, int64_t t, const token_grads *y) {
    const dp_problem *p = c->r->p;
    const int64_t row = t * p->HV + c->hv;
    const ld u2 = 2 * c->r->u, kap = c->qk->k_norm[t], dE = y->values.err + u2 * y->values.size;
    dp_ball *f = c->r->t->field;
    f[DP_RESULT_DERASE].rad[row] =
        tr_up(kap * (y->erasing.err + (c->rel.qk + u2) * y->erasing.size) + c->r->tiny);
    f[DP_RESULT_DWRITE].rad[row] = tr_up(largest(p->v + row * p->V, p->V) * dE + c->r->tiny);
    f[DP_RESULT_DV].rad[row] = tr_up(largest(p->write + row * p->V, p->V) * dE + c->r->tiny);
}

static void head_rows(bounder *c, int64_t t, const token_grads *y, gate_sums *s) {
    const tr_run *r = c->r;
    const dp_problem *p = r->p;
    const ld u2 = 2 * r->u;
    const tr_gate_norms g = c->hd->norms[t];
    dp_ball *f = r->t->field;
    const grad raw = {g.x * y->g.err + (g.x_err + u2 * g.x) * y->g.size,
                      g.x * (1 + u2) * y->g.size};
    f[DP_RESULT_DG].rad[t * p->HV + c->hv] = tr_up(raw.err);
    s->dt.err += raw.err;
    s->dt.size += raw.size;
    s->A.err += g.a * y->g.err + g.a_err * y->g.size;
    s->A.size += g.a * y->g.size;
    if (dp_by_gates(p)) {
        erasing_rows(c, t, y);
        return;
    }
    ld ss = 0;
    for (int j = 0; j < p->R; j++) {
        const ld x = c->hd->db_up[t * p->R + j],
                 e = x * y->beta[j].err + (c->rel.db + u2) * x * y->beta[j].size;
        ss += e * e;
        f[DP_RESULT_DV].rad[(t * p->HV + c->hv) * p->R + j] = tr_up(y->v[j]);
    }
    if (dp_by_factors(p))
        f[DP_RESULT_DLR_A].rad[t * p->HV + c->hv] = tr_up(y->erasing.err + r->tiny);
    if (!dp_has_beta(p)) return;
    f[DP_RESULT_DBETA].rad[t * p->HV + c->hv] = tr_up(tr_sqrt(ss) + r->tiny);
}

static double l2_chain(const tr_run *r, grad dy, const ld *rstd_up, int64_t i) {
    if (!r->p->l2norm) return tr_up(dy.err);
    return tr_up(rstd_up[i] *
                 (dy.err + (9 * tr_gamma(r, r->p->K + 8) + 13 * (ld)r->p->input_error) * dy.size));
}

/* The states of one head: in[t] entering, out[t] leaving token t, over all sequences; radii of o,
 * final_state, S_cut. */
static void forward_radii(bounder *c, norm_error *in, norm_error *out) {
    const tr_run *r = c->r;
    const dp_problem *p = r->p;
    const int64_t KV = (int64_t)p->K * p->V;
    norm_error S = {0, 0};
    for (int b = 0; b < r->nblock; b++) {
        const tr_block *k = &r->block[b];
        const int64_t row = (int64_t)k->seq * p->HV + c->hv;
        if (k->first_of_seq) S = (norm_error){p->s0 ? tr_norm_up(p->s0 + row * KV, KV) : 0, 0};
        if (k->cut >= 0) r->t->S_cut.rad[(int64_t)k->cut * p->HV + c->hv] = tr_up(S.b);
        for (int64_t t = k->t0; t < k->t1; t++) {
            in[t] = S;
            out[t] = S = forward_bound(c, t, S);
            const ld sq = tr_abs(p->scale) * c->k.q;
            r->t->field[DP_RESULT_O].rad[t * p->HV + c->hv] =
                tr_up(sq * (S.b + (c->rel.qk + tr_gamma(r, p->K + 3)) * (S.N + S.b)));
        }
        if (k->last_of_seq) r->t->field[DP_RESULT_FINAL_STATE].rad[row] = tr_up(S.b);
    }
}

static void M_radii(bounder *c) {
    const tr_run *r = c->r;
    c->is_M = 1;
    for (int s = 0; s + 1 < r->t->nmark; s++) {
        norm_error M = {tr_sqrt(r->p->K), 0};
        for (int64_t t = r->t->mark[s]; t < r->t->mark[s + 1]; t++)
            M = forward_bound(c, t, M);
        r->t->M_seg.rad[(int64_t)s * r->p->HV + c->hv] = tr_up(M.b);
    }
    c->is_M = 0;
}

/* dq[t], dk[t][R] of this head are added to the group's. */
static void backward_radii(bounder *c, const norm_error *in, const norm_error *out, grad *dq,
                           grad *dk) {
    const tr_run *r = c->r;
    const dp_problem *p = r->p;
    const int64_t KV = (int64_t)p->K * p->V, R = p->R;
    token_grads y = {.k = dp_calloc((size_t)R, sizeof(grad)),
                     .beta = dp_calloc((size_t)R, sizeof(grad)),
                     .v = dp_calloc((size_t)R, sizeof(ld))};
    gate_sums s = {{0, 0}, {0, 0}};
    norm_error G = {0, 0};
    for (int b = r->nblock - 1; b >= 0; b--) {
        const tr_block *k = &r->block[b];
        const int64_t row = (int64_t)k->seq * p->HV + c->hv;
        if (k->last_of_seq)
            G = (norm_error){p->dstate ? tr_norm_up(p->dstate + row * KV, KV) : 0, 0};
        for (int64_t t = k->t1 - 1; t >= k->t0; t--) {
            G = backward_bound(c, t, in[t], out[t], G, &y);
            head_rows(c, t, &y, &s);
            dq[t].err += y.q.err;
            dq[t].size += y.q.size;
            for (int64_t j = 0; j < R; j++) {
                dk[t * R + j].err += y.k[j].err;
                dk[t * R + j].size += y.k[j].size;
            }
        }
        if (k->cut >= 0) r->t->dS_cut.rad[(int64_t)k->cut * p->HV + c->hv] = tr_up(G.b);
        if (k->first_of_seq) r->t->field[DP_RESULT_DS0].rad[row] = tr_up(G.b);
    }
    const ld terms = tr_gamma(r, (ld)p->T * dp_Kg(p) + 3);
    const int log_gate = p->gate == DP_GATE_LOG;
    if (p->dt_bias)
        r->t->field[DP_RESULT_DDT_BIAS].rad[c->hv] =
            log_gate ? 0 : tr_up(s.dt.err + terms * s.dt.size);
    if (p->A_log)
        r->t->field[DP_RESULT_DA_LOG].rad[c->hv] = log_gate ? 0 : tr_up(s.A.err + terms * s.A.size);
    free(y.k);
    free(y.beta);
    free(y.v);
}

void tr_bound_group(const tr_run *r, int h, const tr_qk *qk, const tr_head *heads) {
    const dp_problem *p = r->p;
    const int G = dp_G(p);
    assert((double)p->T * (p->K + p->R + 2000.0) + (double)p->K * p->V < 0x1p43);
    norm_error *in = dp_calloc((size_t)p->T, sizeof *in),
               *out = dp_calloc((size_t)p->T, sizeof *out);
    grad *dq = dp_calloc((size_t)p->T, sizeof *dq),
         *dk = dp_calloc((size_t)(p->T * p->R), sizeof *dk);
    for (int gv = 0; gv < G; gv++) {
        bounder c = bounder_for(r, h * G + gv, qk, &heads[gv]);
        forward_radii(&c, in, out);
        if (r->want_M) M_radii(&c);
        if (r->t->backward) backward_radii(&c, in, out, dq, dk);
        free(c.scratch);
    }
    for (int64_t i = 0; i < p->T * p->R && r->t->backward; i++) {
        const int64_t t = i / p->R;
        const ld gam = tr_gamma(r, G);
        if (i % p->R == 0)
            r->t->field[DP_RESULT_DQ].rad[t * p->H + h] =
                l2_chain(r, (grad){dq[t].err + gam * dq[t].size, dq[t].size}, qk->rstd_q_up, t);
        r->t->field[DP_RESULT_DK].rad[(t * p->H + h) * p->R + i % p->R] =
            l2_chain(r, (grad){dk[i].err + gam * dk[i].size, dk[i].size}, qk->rstd_k_up, i);
    }
    free(in);
    free(out);
    free(dq);
    free(dk);
}
