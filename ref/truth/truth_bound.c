/* ref/truth/truth_bound.c - the error radii of the truth.
 *
 * Rounding of the bound itself. Every quantity below is a sum of products and square roots of
 * non-negative numbers in binary128 (113-bit significand), evaluated to nearest. After n operations
 * on its longest path it is low by at most (1 - 2^-113)^n. A square root (2^-104) counts as 2^9
 * operations. The longest path has fewer than T (K + R + 2000) + K V < 2^43 operations (asserted).
 * Hence INFLATE = 1 + 2^-60 at the end makes it an upper bound. The only subtraction (lambda - 1)
 * is done on an inflated lambda. A tiny (MPFR: 2^-10000) in every step covers underflow: of
 * binary128 (below 2^-16400 an operation), of MPFR (below 2^-2^29), for operands up to 2^5000.
 * Larger ones overflow in the end and give inf. NaN becomes inf.
 *
 * Notation. Exact quantities are plain, computed ones carry ~, u = 2^-prec (double-double: 2^-98,
 * tiny = 2^-860; truth_dd.h says why), gamma_n = n u / (1 - n u). Norms: 2-norm of vectors,
 * Frobenius of matrices, spectral for the step maps. Each bound on a size (n_, e_, ..) holds for
 * the exact and the computed value alike. Inner products of m terms, with rounded products and
 * rounded additions in any order, satisfy
 *     |fl(sum) - sum| <= gamma_(m+1) sum |a||b|
 * and Cauchy-Schwarz bounds the right side by norms. Bounds: kappa_j >= |k_j|, b_j >= |beta_j|, d
 * >= exp(g) with error d_err (truth_gate.c). The activated rows have relative errors eps_k, eps_b.
 *
 * FORWARD. With A_t = (I - k'Bk) D:
 *     S_t = A_t S + k'Bv, S = S_(t-1), and S~_t = A_t S~ + k'Bv + l_t, hence
 *     |S~_t - S_t| <= mu |S~ - S| + |l_t|          |S_t| <= mu |S| + sum_j kappa_j b_j |v_j|
 *     mu = nu max(d),
 *     nu >= |I - k'Bk|_2:  beta >= 0: max(1, lambda - 1), lambda >= lambda_max(k'Bk),
 *                          lambda_up (truth_rows.c);
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
 * is known, and the smaller bound goes on. Without it the bound of |S_t| adds the norms of all
 * tokens that a slow head remembers, thousands of times |S_t|. That of dg squares it. Likewise |G|.
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
 * ROWS (recurrence.h). A row writes along one entry and reads along another. The written entry, of
 * kappa_j and eps_k, is k_j wherever a state is written or dU is formed. The read entry has kappa_r
 * and eps_r (0: it reads nothing). It is k_j in E, in dE (forward), in dSbar, and in dread, the
 * second part of dk. The row's strength is beta_j, its value v_j. A product of m numbers puts (m -
 * 1) u |v| into F2. An entry that does both has the sum of both gradients; each goes on to its
 * factors by the product rule (truth_rows.c). If n > 4 rows use an entry, gamma is gamma_(V+C+n).
 *     nu           of a row that erases along e and writes along k: I - k'e is the identity but on
 *                  the plane of k and e; the two singular values there have the product |1 - d|,
 *                  d = <k, e>, and squares that add up to 2 - 2d + ac, a = |k|^2, c = |e|^2, so the
 *                  larger one is (sqrt(ac) + sqrt(ac + 4 (1 - d))) / 2, for either sign of 1 - d
 *     values       of a product, dE times the others: the largest of these times the error of dE,
 *                  and 2u eta
 *     in turn      each key is a step of its own, of which the first alone decays and the last
 *                  alone is read
 *     before       rows that read the undecayed state: n in place of sigma in E and F2 (no F1), and
 *                  backwards G1 decays first, dg = rowsum(d o G1 o S), and then gains read' dE:
 *                  error d b1 + (d_err + 2u d) n1, size d (1 + 2u) n1 of d o G1
 *
 * CHAIN. delta, m: error and size of the gradient of the activated value, value heads of a group
 * summed (gamma_G sum m more).
 *     norm   f = rstd (I - w y') dy with |w||y| and |I - w y'| up to a (dp_norm_across; L2: 1):
 *            error rstd a (delta + 9 gamma_(K+8) m):
 *            y~ in <y,dy> and in w<y,dy> 2.1 eps_y m, rstd 2.1 (eps_r + 2u) m, inner product
 *            1.1 gamma_(K+2) m, last two operations 4.2u m; eps_y and eps_r hold 4 and 2
 *            input_error, 13 of them in all
 *     slope  raw = x dact:         x delta + (x_err + 2u x) m
 *     sums   over tokens: errors add, gamma_(terms) sum of sizes more;
 *            dA_log: <dg, a> per token: a delta + a_err m + gamma a m
 */
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

/* Bounds of one row: of what writes, reads (0: nothing), its strength and value, their relative
 * errors; F2, e, w as above. */
typedef struct {
    ld kap, era, be, v, rel_w, rel_r, rel_s, F2, e, w;
} row_bounds;

/* One step, rows first .. end - 1 of a token: numbers that the forward and the adjoint share. */
typedef struct {
    int64_t first, end;
    ld mu, sigma, F1, s, q, push; /* push = sum kappa b |v| */
    tr_gate_norms g;
    row_bounds *row; /* [n] of the token */
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
    int64_t steps; /* of a token */
} bounder;

static bounder bounder_for(const tr_run *r, int hv, const tr_qk *qk, const tr_head *hd) {
    const dp_problem *p = r->p;
    return (bounder){.r = r,
                     .qk = qk,
                     .hd = hd,
                     .hv = hv,
                     .rel = r->rel,
                     .k.row = dp_calloc((size_t)dp_rows(p), sizeof(row_bounds)),
                     .steps = dp_rows(p) / dp_keys_at_once(p)};
}

/* Row j of token t, for a state of size n that it reads and error F1 of it. */
static row_bounds bounds_of_row(const bounder *c, int64_t t, int64_t j, ld n, ld F1) {
    const tr_run *r = c->r;
    const dp_problem *p = r->p;
    const dp_token_row *row = dp_row_of(p, j);
    const int64_t at = t * dp_rows(p) + j, key = t * p->R + dp_row_key(p, j);
    const int write = tr_write_of(r, j), read = tr_read_of(r, j);
    const ld in = p->input_error;
    row_bounds y = {.kap = tr_entry_norms(c->qk, c->hd, write)[key],
                    .be = tr_strength_up(r, c->hd, t, j),
                    .v = c->is_M ? 0 : c->hd->v_norm[at] * (1 + 2 * in),
                    .rel_w = tr_entry_rel(r, c->hd, row->write, -1, t),
                    .rel_s = tr_entry_rel(r, c->hd, row->strength, -1, t)};
    if (read >= 0) {
        y.era = tr_entry_norms(c->qk, c->hd, read)[key];
        y.rel_r = tr_entry_rel(r, c->hd, row->read, -1, t);
    }
    const ld ks = y.era * n;
    y.F2 = tr_gamma(r, p->K + 2) * (y.v + ks) + 2 * in * y.v + y.rel_r * ks + y.era * F1;
    if (row->value.n > 1) y.F2 += (row->value.n == 2 ? r->u : tr_gamma(r, row->value.n)) * y.v;
    y.e = y.v + ks + y.F2;
    y.w = y.be * y.e * (1 + 2 * r->u);
    return y;
}

/* Fills c->k for step i of token t and a state of norm and error `in` entering it. */
static void token_bounds(bounder *c, int64_t t, int64_t i, norm_error in) {
    const tr_run *r = c->r;
    const dp_problem *p = r->p;
    const ld u = r->u, n = in.N + in.b;
    const int before = dp_recurrence_of(p)->before, last = i == c->steps - 1;
    token *k = &c->k;
    k->g = i ? (tr_gate_norms){.d = 1} : c->hd->norms[t];
    k->q = last ? c->qk->q_norm[t] : 0;
    k->mu = c->hd->nu[t * c->steps + i] * (tr_step_has_decay(p) ? 1 : k->g.d);
    k->F1 = (k->g.d_err + 2 * u * k->g.d) * n;
    k->sigma = k->g.d * (1 + 2 * u) * n;
    k->s = p->dout && last ? tr_abs(p->scale) * c->hd->do_norm[t] : 0;
    k->push = 0;
    k->first = i * dp_keys_at_once(p);
    k->end = k->first + dp_keys_at_once(p);
    for (int64_t j = k->first; j < k->end; j++) {
        k->row[j] = bounds_of_row(c, t, j, before ? n : k->sigma, before ? 0 : k->F1);
        k->push += k->row[j].kap * k->row[j].be * k->row[j].v;
    }
}

static norm_error measured(const ld *up, int64_t t, norm_error x) {
    if (up && up[t] + x.b < x.N) x.N = up[t] + x.b;
    return x;
}

/* The state after step i of token t. */
static norm_error forward_bound(bounder *c, int64_t t, int64_t i, norm_error in) {
    token_bounds(c, t, i, in);
    const token *k = &c->k;
    ld l = k->F1 + c->r->tiny, sum = k->sigma;
    for (int64_t j = k->first; j < k->end; j++) {
        const row_bounds *x = &k->row[j];
        const ld F3 = x->be * ((2 * c->r->u + x->rel_s) * x->e + x->F2);
        l += x->rel_w * x->kap * x->w + x->kap * F3;
        sum += x->kap * x->w;
    }
    const int64_t rows = k->end - k->first;
    return measured(
        c->is_M ? NULL : c->hd->S_up, t * c->steps + i,
        (norm_error){k->mu * in.N + k->push, k->mu * in.b + l + tr_gamma(c->r, rows + 2) * sum});
}

typedef struct {
    ld err, size;
} grad; /* of one row of the gradient of an activated value */
/* entry [entries][R], strength and values [n] */
typedef struct {
    grad q, g, *entry, *strength, *values;
} token_grads;

static void add_grad(grad *to, ld err, ld size) {
    to->err += err;
    to->size += size;
}

/* The gradient of entry e sums V terms, C column blocks and all rows that use the entry. */
static ld sum_gamma(const bounder *c, int e) {
    const tr_run *r = c->r;
    const int uses = r->rows.uses[e];
    return tr_gamma(r, r->p->V + r->ncb + (uses > 4 ? uses : 4));
}

/* Adds the gradients of row j to *y, and the row's error and size to l and n2 of dSbar. G1 has
 * n1, b1; `in` is the state before. */
static void row_backward(const bounder *c, int64_t j, norm_error in, ld n1, ld b1, ld *l, ld *n2,
                         token_grads *y) {
    const tr_run *r = c->r;
    const dp_problem *p = r->p;
    const int before = dp_recurrence_of(p)->before, read = tr_read_of(r, j);
    const token *k = &c->k;
    const row_bounds *x = &k->row[j];
    const ld u = r->u, n = in.N + in.b, gam = tr_gamma(r, p->V + r->ncb + 4),
             d = before ? 1 : k->g.d, eb = 2 * u + x->rel_s;
    const ld f = (tr_gamma(r, p->K + 1) + x->rel_w) * x->kap * n1, tau = x->kap * n1 + f,
             f_all = f + x->kap * b1;
    const ld dE = x->era * d * in.b + x->F2, h = x->be * (eb * tau + f),
             h_all = h + x->be * x->kap * b1, eta = x->be * tau * (1 + 2 * u),
             dU = x->be * dE + eb * x->be * x->e;
    y->strength[j] = (grad){x->e * f_all + dE * tau + gam * x->e * tau, x->e * tau * (1 + gam)};
    y->values[j] = (grad){h_all, eta};
    const int w = tr_write_of(r, j), key = (int)dp_row_key(p, j);
    const ld gw = sum_gamma(c, w);
    add_grad(&y->entry[w * p->R + key], x->w * b1 + dU * n1 + gw * x->w * n1,
             x->w * n1 * (1 + 2 * gw));
    if (read < 0) return;
    const ld gr = sum_gamma(c, read), lost = before ? 0 : (k->g.d_err + 2 * u * d) * eta * n;
    add_grad(&y->entry[read * p->R + key], d * (eta * in.b + h_all * n + gr * eta * n) + lost,
             d * eta * n * (1 + 2 * gr));
    *l += x->rel_r * x->era * eta + x->era * h;
    *n2 += x->era * eta;
}

/* The adjoint before step i of token t from G, the one after it, and the rows of its gradients. */
static norm_error backward_bound(bounder *c, int64_t t, int64_t i, norm_error in, norm_error out,
                                 norm_error G, token_grads *y) {
    const tr_run *r = c->r;
    const dp_problem *p = r->p;
    const int before = dp_recurrence_of(p)->before;
    const ld u = r->u, n = in.N + in.b, gam = tr_gamma(r, p->V + r->ncb + 4),
             gam_g = tr_gamma(r, p->V + r->ncb + 2 + p->K);
    token_bounds(c, t, i, in);
    const token *k = &c->k;
    const ld d = k->g.d, qs = k->q * k->s, N1 = G.N + qs;
    const ld b1 = G.b + tr_gamma(r, 3) * (G.N + G.b + qs) + (c->rel.qk + 2 * u) * qs + r->tiny,
             n1 = N1 + b1, off = k->g.d_err + 2 * u * d;
    if (i == c->steps - 1)
        y->q = (grad){k->s * out.b + gam * k->s * (out.N + out.b),
                      k->s * (1 + 2 * u) * (out.N + out.b)};
    ld l = 0, n2 = before ? d * (1 + 2 * u) * n1 : n1;
    for (int64_t j = k->first; j < k->end; j++)
        row_backward(c, j, in, n1, b1, &l, &n2, y);
    if (before) l += off * n1;
    l += tr_gamma(r, k->end - k->first + 2) * n2;
    const ld b = before ? k->mu * b1 + l + r->tiny : k->mu * b1 + d * l + off * (n2 + l) + r->tiny;
    const norm_error to = measured(c->hd->G_up, t * c->steps + i, (norm_error){k->mu * N1, b});
    const norm_error decayed = before
                                   ? (norm_error){d * (1 + 2 * u) * n1, d * b1 + off * n1 + r->tiny}
                                   : (norm_error){to.N + to.b, to.b};
    if (!i)
        y->g = (grad){decayed.N * in.b + decayed.b * n + gam_g * (decayed.N * n),
                      decayed.N * n * (1 + gam_g)};
    return to;
}

/* ---- to the inputs --------------------------------------------------------------------------- */

/* The relative error that a row's gradient gets from a rotation back. */
static ld through_rotation(const bounder *c, dp_entry x) {
    return dp_entry_rotated(dp_recurrence_of(c->r->p), x) < 0 ? 0 : c->rel.turn;
}

/* += g times what stands beside factor m of x; norm: summed over channels. */
static void add_through(const bounder *c, int64_t t, int64_t key, dp_entry x, int m, int norm,
                        grad g, grad *sum) {
    const tr_run *r = c->r;
    const ld up = tr_others_up(r, c->hv, c->qk, c->hd, x, m, t, key, norm),
             rel = x.n == 1 ? through_rotation(c, x)
                            : tr_entry_rel(r, c->hd, x, m, t) + 2 * (x.n - 1) * r->u +
                                  (norm ? tr_gamma(r, r->p->K + r->ncb + 4) : 0);
    add_grad(sum, up * (g.err + rel * g.size), up * g.size * (1 + 4 * rel));
}

/* The gradients of a token and of the one after it, whose entries may look back (t < 0: there is
 * none). */
typedef struct {
    int64_t t[2];
    const token_grads *y[2];
} seen_grads;

/* The gradient of `input` through entries at key `key`; of numbers the sum over channels. */
static grad through_entries(const bounder *c, int64_t key, int input, const seen_grads *s) {
    const tr_run *r = c->r;
    const int number = input == DP_INPUT_BETA || input == DP_INPUT_NUMBER;
    grad sum = {0, 0};
    int terms = 0;
    for (int back = 0; back < 2; back++)
        for (int e = 0; e < r->rows.n && s->t[back] >= 0; e++)
            for (int m = 0; m < r->rows.of[e].n; m++) {
                if (r->rows.of[e].of[m] != (back ? input | DP_PREVIOUS : input)) continue;
                add_through(c, s->t[back], key, r->rows.of[e], m, number,
                            s->y[back]->entry[e * r->p->R + key], &sum);
                terms++;
            }
    if (terms > 1) sum.err += tr_gamma(r, terms) * sum.size;
    return sum;
}

/* The gradient of a number, through its strengths and the entries that have it. */
static grad number_grad(const bounder *c, int64_t key, int input, const seen_grads *s) {
    const tr_run *r = c->r;
    const dp_problem *p = r->p;
    grad sum = through_entries(c, key, input, s);
    int terms = sum.size > 0;
    for (int64_t j = 0; j < 2 * (int64_t)dp_rows(p); j++) {
        const int back = j >= dp_rows(p);
        const int64_t row = j % dp_rows(p);
        const dp_entry x = dp_row_of(p, row)->strength;
        for (int m = 0; m < x.n && dp_row_key(p, row) == key && s->t[back] >= 0; m++) {
            if (x.of[m] != (back ? input | DP_PREVIOUS : input)) continue;
            add_through(c, s->t[back], key, x, m, 0, s->y[back]->strength[row], &sum);
            terms++;
        }
    }
    if (terms > 1) sum.err += tr_gamma(r, terms) * sum.size;
    return sum;
}

/* dg of exp(+-g) in entries and strengths. */
static void add_gates(const bounder *c, int64_t t, token_grads *y) {
    const tr_run *r = c->r;
    const dp_problem *p = r->p;
    const ld more = 2 * r->u + tr_gamma(r, p->K + 4);
    for (int e = 0; e < r->rows.n; e++) {
        const dp_entry x = r->rows.of[e];
        const ld times = dp_entry_gate_sizes(x);
        for (int64_t key = 0; key < p->R && times > 0; key++) {
            const grad g = y->entry[e * p->R + key];
            const ld up = times * tr_entry_norms(c->qk, c->hd, e)[t * p->R + key],
                     rel = tr_entry_rel(r, c->hd, x, -1, t) + more;
            add_grad(&y->g, up * (g.err + rel * g.size), up * g.size * (1 + rel));
        }
    }
    for (int64_t j = 0; j < dp_rows(p); j++) {
        const dp_entry x = dp_row_of(p, j)->strength;
        const ld times = dp_entry_gate_sizes(x);
        if (times == 0) continue;
        const ld up = times * tr_strength_up(r, c->hd, t, j),
                 rel = tr_entry_rel(r, c->hd, x, -1, t) + more;
        add_grad(&y->g, up * (y->strength[j].err + rel * y->strength[j].size),
                 up * y->strength[j].size * (1 + rel));
    }
    if (dp_recurrence_has_gates(dp_recurrence_of(p))) y->g.err += more * y->g.size;
}

/* Sums over tokens of one head: error and size of ddt_bias and dA_log. */
typedef struct {
    grad dt, A;
} gate_sums;

/* Row `row` of the gradient of v or write: through rows whose values have it, times the factors
 * beside it. */
static void value_rows(const bounder *c, int64_t key, int input, const seen_grads *s) {
    const tr_run *r = c->r;
    const dp_problem *p = r->p;
    const ld u2 = 2 * r->u;
    ld err = 0, size = 0;
    int terms = 0, products = 0;
    for (int64_t z = 0; z < 2 * (int64_t)dp_rows(p); z++) {
        const int back = z >= dp_rows(p), of = back ? input | DP_PREVIOUS : input;
        const int64_t j = z % dp_rows(p), now = s->t[back];
        const dp_entry e = dp_row_of(p, j)->value;
        const int left = dp_entry_has(e, of);
        ld up = left;
        if (!left || dp_row_key(p, j) != key || now < 0) continue;
        for (int m = 0, own = 1; m < e.n; m++) {
            const int64_t at = dp_factor_token(p, e.of[m], now);
            if (own && e.of[m] == of)
                own = 0;
            else
                up *= at < 0 ? 0
                             : tr_largest(dp_input_of(p, dp_factor_input(e.of[m])) +
                                              ((at * p->HV + c->hv) * p->R + key) * p->V,
                                          p->V);
        }
        const grad y = s->y[back]->values[j];
        products |= e.n > 1;
        err += e.n > 1 ? up * (y.err + (e.n - 1) * u2 * y.size) : up * y.err;
        size += up * y.size * (1 + 4 * u2);
        terms++;
    }
    if (terms > 1) err += tr_gamma(r, terms) * size;
    r->t->field[dp_gradient_of(input)].rad[(s->t[0] * p->HV + c->hv) * p->R + key] =
        tr_up(err + (products ? r->tiny : 0));
}

/* Rows of the angles of a token. Their gradient is a sum over the rotations of this token and all
 * after it in the sequence. Each is |x| |d| in 2-norm, two products and a difference. */
static void angle_row(const bounder *c, const seen_grads *z, grad *sum) {
    const tr_run *r = c->r;
    const int64_t t = z->t[0];
    const ld u4 = 4 * r->u + c->rel.turn;
    grad y = z->y[0]->q;
    add_grad(sum, c->qk->q_norm[t] * (y.err + u4 * y.size), c->qk->q_norm[t] * y.size * (1 + u4));
    for (int e = 0; e < r->rows.n; e++) {
        const int key = dp_entry_rotated(dp_recurrence_of(r->p), r->rows.of[e]),
                  back = key >= 0 && key & DP_PREVIOUS;
        if (key < 0 || z->t[back] < 0) continue;
        const ld norm = c->hd->entry_norm[e][z->t[back]],
                 rel = u4 + tr_entry_rel(r, c->hd, r->rows.of[e], -1, z->t[back]);
        y = z->y[back]->entry[e];
        add_grad(sum, norm * (y.err + rel * y.size), norm * y.size * (1 + rel));
    }
    const ld terms = tr_gamma(r, ((ld)r->p->T + 1) * (r->rows.n + 1));
    r->t->field[DP_RESULT_DANGLE].rad[t * r->p->HV + c->hv] =
        tr_up(sum->err + terms * sum->size + r->tiny);
}

/* rstd_up: NULL without a norm */
static double norm_chain(const tr_run *r, grad dy, const ld *rstd_up, int64_t i) {
    if (!rstd_up) return tr_up(dy.err);
    return tr_up(rstd_up[i] * dp_norm_across(r->p) *
                 (dy.err + (9 * tr_gamma(r, r->p->K + 8) + 13 * (ld)r->p->input_error) * dy.size));
}

static void head_rows(bounder *c, const seen_grads *z, gate_sums *s) {
    const tr_run *r = c->r;
    const dp_problem *p = r->p;
    const int64_t t = z->t[0];
    const token_grads *y = z->y[0];
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
    ld ss = 0;
    for (int64_t key = 0; key < p->R; key++) {
        for (int i = 0; i < DP_VALUES_MOST; i++)
            if (dp_input_of(p, dp_row_values[i])) value_rows(c, key, dp_row_values[i], z);
        if (!p->beta) continue;
        const grad b = number_grad(c, key, DP_INPUT_BETA, z);
        const ld x = c->hd->db_up[t * p->R + key], e = x * b.err + (c->rel.db + u2) * x * b.size;
        ss += e * e;
    }
    if (p->beta) f[DP_RESULT_DBETA].rad[t * p->HV + c->hv] = tr_up(tr_sqrt(ss) + r->tiny);
    if (p->number)
        f[DP_RESULT_DNUMBER].rad[t * p->HV + c->hv] =
            tr_up(number_grad(c, 0, DP_INPUT_NUMBER, z).err + r->tiny);
    for (int i = 0; i < DP_NRESULTS; i++)
        if (dp_result_exists(p, i) && dp_result_fields[i].role == DP_ROLE_GRADIENT &&
            tr_is_given(dp_result_fields[i].of)) {
            const dp_input_id of = dp_result_fields[i].of;
            grad y = through_entries(c, 0, of, z);
            y.err += r->tiny;
            f[i].rad[t * p->HV + c->hv] = norm_chain(r, y, c->hd->unit[of].rstd_up, t);
        }
}

/* The states of one head: in[t] entering each step of token t, out[t] leaving it, over all
 * sequences; radii of o, final_state, S_cut. */
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
            for (int64_t i = 0; i < c->steps; i++) {
                in[t * c->steps + i] = S;
                S = forward_bound(c, t, i, S);
            }
            out[t] = S;
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
            for (int64_t i = 0; i < c->steps; i++)
                M = forward_bound(c, t, i, M);
        r->t->M_seg.rad[(int64_t)s * r->p->HV + c->hv] = tr_up(M.b);
    }
    c->is_M = 0;
}

static token_grads grads_new(const tr_run *r) {
    const size_t n = (size_t)dp_rows(r->p), entries = (size_t)r->rows.n * (size_t)r->p->R;
    return (token_grads){.entry = dp_calloc(entries, sizeof(grad)),
                         .strength = dp_calloc(n, sizeof(grad)),
                         .values = dp_calloc(n, sizeof(grad))};
}

/* dq[t], dk[t][R] of this head are added to the group's. */
static void backward_radii(bounder *c, const norm_error *in, const norm_error *out, grad *dq,
                           grad *dk) {
    const tr_run *r = c->r;
    const dp_problem *p = r->p;
    const int64_t KV = (int64_t)p->K * p->V, R = p->R, kept = dp_lag(p) + 1;
    const int back = dp_recurrence_looks_back(dp_recurrence_of(p));
    const size_t entries = (size_t)r->rows.n * (size_t)R;
    DP_OWN token_grads *of = dp_calloc((size_t)kept, sizeof *of); /* of token t: t % kept */
    gate_sums s = {{0, 0}, {0, 0}};
    norm_error G = {0, 0};
    grad angles = {0, 0};
    for (int64_t i = 0; i < kept; i++)
        of[i] = grads_new(r);
    for (int b = r->nblock - 1; b >= 0; b--) {
        const tr_block *k = &r->block[b];
        const int64_t row = (int64_t)k->seq * p->HV + c->hv;
        if (k->last_of_seq)
            G = (norm_error){p->dstate ? tr_norm_up(p->dstate + row * KV, KV) : 0, 0};
        if (k->last_of_seq) angles = (grad){0, 0};
        for (int64_t t = k->t1 - 1; t >= k->t0; t--) {
            token_grads *y = &of[t % kept];
            const int64_t after = back ? dp_token_after(p, t) : -1;
            const seen_grads z = {{t, after}, {y, &of[(t + dp_lag(p)) % kept]}};
            memset(y->entry, 0, entries * sizeof *y->entry);
            for (int64_t i = c->steps - 1; i >= 0; i--)
                G = backward_bound(c, t, i, in[t * c->steps + i], out[t], G, y);
            add_gates(c, t, y);
            if (p->angle) angle_row(c, &z, &angles);
            head_rows(c, &z, &s);
            dq[t].err += y->q.err + c->rel.turn * y->q.size;
            dq[t].size += y->q.size;
            for (int64_t j = 0; j < R; j++) {
                const grad k = through_entries(c, j, DP_INPUT_K, &z);
                add_grad(&dk[t * R + j], k.err, k.size);
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
    for (int64_t i = 0; i < kept; i++) {
        DP_FREE(of[i].entry, of[i].strength, of[i].values);
    }
}

void tr_bound_group(const tr_run *r, int h, const tr_qk *qk, const tr_head *heads) {
    const dp_problem *p = r->p;
    const int G = dp_G(p);
    assert((double)p->T * (p->K + p->R + 2000.0) + (double)p->K * p->V < 0x1p43);
    DP_OWN norm_error *in = dp_calloc((size_t)(p->T * dp_rows(p)), sizeof *in),
                      *out = dp_calloc((size_t)p->T, sizeof *out);
    DP_OWN grad *dq = dp_calloc((size_t)p->T, sizeof *dq),
                *dk = dp_calloc((size_t)(p->T * p->R), sizeof *dk);
    for (int gv = 0; gv < G; gv++) {
        bounder c = bounder_for(r, h * G + gv, qk, &heads[gv]);
        forward_radii(&c, in, out);
        if (r->want_M) M_radii(&c);
        if (r->t->backward) backward_radii(&c, in, out, dq, dk);
        free(c.k.row);
    }
    for (int64_t i = 0; i < p->T * p->R && r->t->backward; i++) {
        const int64_t t = i / p->R;
        const ld gam = tr_gamma(r, G);
        if (i % p->R == 0)
            r->t->field[DP_RESULT_DQ].rad[t * p->H + h] =
                norm_chain(r, (grad){dq[t].err + gam * dq[t].size, dq[t].size}, qk->rstd_q_up, t);
        r->t->field[DP_RESULT_DK].rad[(t * p->H + h) * p->R + i % p->R] =
            norm_chain(r, (grad){dk[i].err + gam * dk[i].size, dk[i].size}, qk->rstd_k_up, i);
    }
}
