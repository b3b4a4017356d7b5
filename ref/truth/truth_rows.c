/* ref/truth/truth_rows.c - the entries of a token's rows in MPFR (ref/vocabulary/recurrence.h),
 * their bounds, and the chain rule from them to the inputs.
 *
 * A product of m factors whose relative errors are e_i has sum e_i + gamma_(2 (m - 1)), as every
 * e_i is below 2^-60. Inputs are exact but for dp_problem.input_error, which inputs without an
 * activation may have. A key with a norm has rel.qk, and rows up to dp_norm_most. beta has
 * rel.beta, exp(+-g) that of its token.
 *
 * Step norm, nu >= |A_t|_2 (truth_bound.c):
 *   nothing reads                       1, times the largest decay
 *   (k, k, value, beta) each            of the keys that read together: of_itself
 *   one row, after the decay            I - k'e: of_another
 *   else                                the largest singular value of the whole K x K step, with
 *                                       its decay, by dp_eigenvalue_up of its square
 *
 * From E = +- x y z to x: the gradient of E times y z. With its error and size (e, s) that is
 * |yz|_max e + (rel(yz) + 2u (m - 1)) |yz|_max s. A number is a sum over channels: the 2-norm
 * replaces the largest entry, with gamma_(K + C + 4) more. exp(+-g): E itself.
 *
 * A rotated entry E = R(phi) x keeps the 2-norm of x. E and R' dE, the gradient of x, have the
 * additional error `rel.turn` relative to that norm. Other factors of a rotated key are numbers,
 * which commute with R. An input of the previous token gets its gradient from the token after.
 */
#include "ref/arithmetic/product.h"
#include "ref/arithmetic/spectral.h"
#include "truth_impl.h"

#include <math.h>

static inline double get_up(mpfr_srcptr x) { return fabs(mpfr_get_d(x, MPFR_RNDA)); }

static int intern(tr_rows *y, dp_entry e) {
    int i = 0;
    if (!e.sign) return -1;
    while (i < y->n && !dp_entry_same(y->of[i], e))
        i++;
    if (i == y->n) y->of[y->n++] = e;
    y->uses[i]++;
    return i;
}

tr_rows tr_rows_of(const dp_problem *p) {
    const dp_recurrence *a = dp_recurrence_of(p);
    tr_rows y = {0};
    for (int j = 0; j < a->n; j++) {
        y.write[j] = intern(&y, a->row[j].write);
        y.read[j] = intern(&y, a->row[j].read);
    }
    return y;
}

int dp_truth_entries(const dp_problem *p) { return tr_rows_of(p).n * p->R; }

/* ---- values ---------------------------------------------------------------------------------- */

/* An input of which each value head has its own: [T][HV], K channels but for beta. */
static const double *given(const dp_problem *p, int input, int hv, int64_t t) {
    return dp_input_of(p, input) + (t * p->HV + hv) * dp_input_width(p, input) / p->HV;
}

/* Is it a key with a norm? */
static int has_unit(const tr_head *a, int of) {
    return of < DP_NINPUTS && a->unit[of].rstd_up != NULL;
}

/* y *= factor `of` of an entry of token t at channel k of key `key`. */
static void multiply(const tr_run *r, int hv, const tr_qk *qk, const tr_head *a, int factor,
                     int64_t now, int64_t key, int64_t k, mpfr_ptr y) {
    const dp_problem *p = r->p;
    const int64_t t = dp_factor_token(p, factor, now);
    const int of = dp_factor_input(factor);
    if (t < 0) {
        mpfr_set_zero(y, 1);
        return;
    }
    const int64_t gate = t * dp_Kg(p) + (dp_Kg(p) > 1 ? k : 0), row = t * p->R + key;
    if (of >= DP_NINPUTS)
        mpfr_mul(y, y,
                 mp_at(a->factor[of - DP_NINPUTS].mem ? a->factor[of - DP_NINPUTS] : a->d, gate),
                 MPFR_RNDN);
    else if (of == DP_INPUT_K)
        mpfr_mul(y, y, mp_at(qk->k, row * p->K + k), MPFR_RNDN);
    else if (of == DP_INPUT_BETA)
        mpfr_mul(y, y, mp_at(a->beta, row), MPFR_RNDN);
    else if (has_unit(a, of))
        mpfr_mul(y, y, mp_at(a->unit[of].y, t * p->K + k), MPFR_RNDN);
    else
        mpfr_mul_d(y, y, given(p, of, hv, t)[of == DP_INPUT_NUMBER ? 0 : k], MPFR_RNDN);
}

/* y = the entry, without its factor number `but` (-1: with all) */
static void product(const tr_run *r, int hv, const tr_qk *qk, const tr_head *a, dp_entry e, int but,
                    int64_t t, int64_t key, int64_t k, mpfr_ptr y) {
    mpfr_set_si(y, e.sign, MPFR_RNDN);
    for (int m = 0; m < e.n; m++)
        if (m != but) multiply(r, hv, qk, a, e.of[m], t, key, k, y);
}

int tr_values_look_back(const dp_problem *p) {
    const dp_recurrence *a = dp_recurrence_of(p);
    int any = 0;
    for (int j = 0; j < a->n; j++)
        any |= dp_entry_looks_back(a->row[j].value);
    return any;
}

int tr_has_products(const dp_problem *p) {
    const dp_recurrence *a = dp_recurrence_of(p);
    int any = 0;
    for (int j = 0; j < a->n; j++)
        any |= a->row[j].value.sign && !dp_entry_is(a->row[j].value, DP_INPUT_V);
    return any;
}

static int is_rotated(const dp_problem *p, dp_entry e) {
    return dp_entry_rotated(dp_recurrence_of(p), e) >= 0;
}
/* The token of the angles that rotate an entry of token t. */
static int64_t turned_at(const dp_problem *p, dp_entry e, int64_t t) {
    return dp_factor_token(p, dp_entry_rotated(dp_recurrence_of(p), e), t);
}

static ld *lds(int64_t n) { return dp_calloc((size_t)n, sizeof(ld)); }

void tr_rows_alloc(const tr_run *r, tr_head *a) {
    const dp_problem *p = r->p;
    const int64_t n = p->T * dp_rows(p);
    for (int f = 0; f < DP_NFACTORS; f++)
        if (tr_has_factor(p, f)) a->factor[f] = mp_alloc(p->T * dp_Kg(p), r->prec);
    if (tr_has_products(p)) a->values = mp_alloc(n * p->V, r->prec);
    a->strength = mp_alloc(n, r->prec);
    a->strength_up = lds(n);
    for (int i = 0; i < DP_NINPUTS; i++) {
        if (!tr_is_given(i) || !dp_is_normed(p, i) || !dp_input_of(p, i)) continue;
        a->unit[i].y = mp_alloc(p->T * p->K, r->prec);
        a->unit[i].rstd = mp_alloc(p->T, r->prec);
        a->unit[i].rstd_up = lds(p->T);
    }
    for (int e = 0; e < r->rows.n; e++) {
        if (dp_entry_is(r->rows.of[e], DP_INPUT_K) && !is_rotated(p, r->rows.of[e])) continue;
        a->entry[e] = mp_alloc(p->T * p->R * p->K, r->prec);
        a->entry_norm[e] = lds(p->T * p->R);
    }
}

static void entry_token(const tr_run *r, int hv, int64_t t, const tr_qk *qk, tr_head *a, int e,
                        mp_array tmp) {
    const dp_problem *p = r->p;
    const int64_t turned = is_rotated(p, r->rows.of[e]) ? turned_at(p, r->rows.of[e], t) : -1;
    /* NOLINTNEXTLINE(*VLASize): K is 1 to 65,536 */
    double size[p->K];
    for (int64_t key = 0; key < p->R; key++) {
        for (int64_t k = 0; k < p->K; k++) {
            mpfr_ptr y = mp_at(a->entry[e], ((t * p->R) + key) * p->K + k);
            product(r, hv, qk, a, r->rows.of[e], -1, t, key, k, y);
            size[k] = get_up(y);
        }
        a->entry_norm[e][t * p->R + key] =
            tr_exact_up(tr_norm_up(size, p->K), tr_entry_rel(r, a, r->rows.of[e], -1, t));
        if (turned >= 0) tr_turn(r, qk, turned, 0, mp_from(a->entry[e], t * p->K), tmp);
    }
}

double tr_value_of(const dp_problem *p, int hv, int64_t now, int64_t j, int of, int64_t v) {
    const int64_t t = dp_factor_token(p, of, now);
    if (t < 0) return 0;
    return dp_input_of(
        p, dp_factor_input(of))[((t * p->HV + hv) * p->R + dp_row_key(p, j)) * p->V + v];
}

static void value_token(const tr_run *r, int hv, int64_t t, tr_head *a, int64_t j) {
    const dp_problem *p = r->p;
    const dp_entry e = dp_row_of(p, j)->value;
    const int64_t n = dp_rows(p);
    for (int v = 0; v < p->V && a->values.mem; v++) {
        mpfr_ptr y = mp_at(a->values, (t * n + j) * p->V + v);
        mpfr_set_si(y, e.sign, MPFR_RNDN);
        for (int m = 0; m < e.n; m++)
            mpfr_mul_d(y, y, tr_value_of(p, hv, t, j, e.of[m], v), MPFR_RNDN);
    }
}

/* Each product of a value is within 2^-53 of it, or 2^-1075. */
void tr_row_norms(const tr_run *r, int hv, int64_t t, tr_head *a) {
    const dp_problem *p = r->p;
    const int64_t n = dp_rows(p);
    /* NOLINTNEXTLINE(*VLASize): V is 1 to 65,536 */
    double size[p->V];
    for (int64_t j = 0; j < n; j++) {
        const dp_entry e = dp_row_of(p, j)->value;
        ld *norm = &a->v_norm[t * n + j];
        for (int v = 0; v < p->V; v++) {
            size[v] = e.sign;
            for (int m = 0; m < e.n; m++)
                size[v] *= tr_value_of(p, hv, t, j, e.of[m], v);
        }
        *norm = tr_norm_up(size, p->V);
        if (e.n > 1) *norm = *norm * (ld)(1 + 0x1p-50) + p->V * 0x1p-1074;
    }
    if (p->dout) a->do_norm[t] = tr_norm_up(p->dout + (t * p->HV + hv) * p->V, p->V);
}

void tr_rows_units(const tr_run *r, int hv, int64_t t, tr_head *a, mpfr_ptr tmp) {
    for (int i = 0; i < DP_NINPUTS; i++) {
        if (!has_unit(a, i)) continue;
        tr_activate_row(r, given(r->p, i, hv, t), 1, mp_from(a->unit[i].y, t * r->p->K),
                        mp_at(a->unit[i].rstd, t), tmp);
        a->unit[i].rstd_up[t] = tr_rstd_up(r, mp_at(a->unit[i].rstd, t));
    }
}

void tr_rows_token(const tr_run *r, int hv, int64_t t, const tr_qk *qk, tr_head *a, mp_array tmp) {
    const dp_problem *p = r->p;
    const int64_t n = dp_rows(p), Kg = dp_Kg(p);
    tr_gate_norms *g = &a->norms[t];
    const int gates = dp_recurrence_has_gates(dp_recurrence_of(p)) ? DP_NFACTORS : 0;
    for (int64_t i = 0; i < gates * Kg; i++) {
        const int f = (int)(i / Kg), of = DP_NINPUTS + f;
        const int64_t at = t * Kg + i % Kg;
        mpfr_srcptr y = mp_at(a->d, at);
        if (a->factor[f].mem) {
            mpfr_set_d(mp_at(tmp, 0), DP_FACTOR_RATE(of), MPFR_RNDN);
            mpfr_pow(mp_at(a->factor[f], at), y, mp_at(tmp, 0), MPFR_RNDN);
            y = mp_at(a->factor[f], at);
        }
        const ld up = tr_exact_up(get_up(y), tr_factor_rel(r, of, g->rel));
        const int finite = isfinite(p->g[(t * p->HV + hv) * Kg + i % Kg]);
        if (!(up <= g->factor[f])) g->factor[f] = up != up || !finite ? INFINITY : up;
    }
    for (int e = 0; e < r->rows.n; e++)
        if (a->entry[e].mem) entry_token(r, hv, t, qk, a, e, tmp);
    for (int64_t j = 0; j < n; j++) {
        const dp_entry s = dp_row_of(p, j)->strength;
        mpfr_ptr y = mp_at(a->strength, t * n + j);
        product(r, hv, qk, a, s, -1, t, dp_row_key(p, j), 0, y);
        a->strength_up[t * n + j] = dp_entry_is(s, DP_INPUT_BETA)
                                        ? a->beta_up[t * p->R + dp_row_key(p, j)]
                                        : tr_exact_up(get_up(y), tr_entry_rel(r, a, s, -1, t));
        value_token(r, hv, t, a, j);
    }
}

/* ---- bounds ---------------------------------------------------------------------------------- */

ld tr_entry_rel(const tr_run *r, const tr_head *a, dp_entry e, int but, int64_t t) {
    const tr_rel rel = r->rel;
    const int left = e.n - (but >= 0);
    ld sum = left > 1 ? tr_gamma(r, 2 * (left - 1)) : 0;
    if (is_rotated(r->p, e)) sum += rel.turn;
    for (int m = 0; m < e.n; m++) {
        const int of = dp_factor_input(e.of[m]);
        if (m == but) continue;
        if (of >= DP_NINPUTS)
            sum += tr_factor_rel(r, of, a->norms[t].rel);
        else
            sum += of == DP_INPUT_K || has_unit(a, of) ? rel.qk
                   : of == DP_INPUT_BETA               ? rel.beta
                                                       : (ld)r->p->input_error;
    }
    return sum;
}

double tr_largest(const double *x, int64_t n) {
    double most = 0;
    for (int64_t i = 0; i < n; i++)
        if (!(fabs(x[i]) <= most)) most = isnan(x[i]) ? INFINITY : fabs(x[i]);
    return most;
}

ld tr_others_up(const tr_run *r, int hv, const tr_qk *qk, const tr_head *a, dp_entry x, int m,
                int64_t now, int64_t key, int norm) {
    const dp_problem *p = r->p;
    ld up = 1;
    for (int i = 0; i < x.n; i++) {
        const int of = dp_factor_input(x.of[i]);
        const int64_t t = dp_factor_token(p, x.of[i], now), n = of == DP_INPUT_NUMBER ? 1 : p->K;
        if (i == m) continue;
        if (t < 0)
            up = 0;
        else if (of >= DP_NINPUTS)
            up *= a->norms[t].factor[of - DP_NINPUTS];
        else if (of == DP_INPUT_K)
            up *= qk->k_norm[t * p->R + key];
        else if (of == DP_INPUT_BETA)
            up *= a->beta_up[t * p->R + key];
        else if (has_unit(a, of))
            up *= tr_exact_up(dp_norm_most(p), r->rel.qk);
        else
            up *= norm ? tr_norm_up(given(p, of, hv, t), n) : tr_largest(given(p, of, hv, t), n);
    }
    return up;
}

/* ---- the norm of a step ---------------------------------------------------------------------- */

typedef enum { READS_NOTHING, READS_ITSELF, READS_ANOTHER, READS_ANY } reads_kind;

static reads_kind reads_of(const dp_problem *p) {
    const dp_recurrence *a = dp_recurrence_of(p);
    int reads = 0, itself = !a->before;
    for (int j = 0; j < a->n; j++) {
        reads |= a->row[j].read.sign;
        itself &= dp_entry_is(a->row[j].write, DP_INPUT_K) &&
                  dp_entry_is(a->row[j].read, DP_INPUT_K) &&
                  dp_entry_is(a->row[j].strength, DP_INPUT_BETA);
    }
    if (!reads) return READS_NOTHING;
    if (itself && a->n == 1) return READS_ITSELF;
    return !a->before && a->n == 1 && p->R == 1 && dp_entry_is_one(a->row[0].strength)
               ? READS_ANOTHER
               : READS_ANY;
}

int tr_step_has_decay(const dp_problem *p) { return reads_of(p) == READS_ANY; }

int tr_is_given(int input) {
#define OR_IT(ID, ...) || input == DP_INPUT_##ID
    return 0 DP_ROW_KEYS(OR_IT);
}

/* lambda_max(k'Bk), beta >= 0, is at most the trace. Above 2 it is at most that of the scaled Gram
 * matrix G_ij = sqrt(b_i b_j) <x_i, x_j>, proven by dp_eigenvalue_up. G comes from keys x and betas
 * rounded to double, K products and sums and two roundings. Its error is below (K + 16) 2^-52 trace
 * in norm; `rel` covers computed against exact activations. */
static ld lambda_up(int64_t K, int64_t R, const double *x, int64_t ld_k, const ld *kap,
                    const ld *be, ld rel) {
    ld trace = 0;
    for (int64_t j = 0; j < R; j++)
        trace += be[j] * kap[j] * kap[j];
    if (R == 1 || trace <= 2) return trace;
    DP_OWN double *G = dp_alloc((size_t)(R * R), sizeof *G);
    for (int64_t i = 0; i < R * R; i++) {
        const double *a = x + i / R * ld_k, *b = x + i % R * ld_k;
        for (int64_t k = 0; k < K; k++)
            G[i] = (k ? G[i] : 0) + a[k] * b[k];
        G[i] *= sqrt((double)be[i / R]) * sqrt((double)be[i % R]);
    }
    const ld top = dp_eigenvalue_up((int)R, G);
    return (top < trace ? top : trace) + ((K + 16) * 0x1p-52 + rel) * trace;
}

/* nu of group g of keys that erase along themselves. */
static ld of_itself(const tr_run *r, int64_t t, int64_t g, const tr_qk *qk, const tr_head *a,
                    const tr_step *s) {
    const int64_t R = dp_keys_at_once(r->p), first = g * R, key = t * r->p->R + first;
    const ld *kap = qk->k_norm + key, *be = a->beta_up + key;
    int negative = 0;
    ld any_sign = 1;
    for (int64_t j = 0; j < R; j++) {
        negative |= s->strength[first + j] < 0;
        any_sign += be[j] * kap[j] * kap[j];
    }
    if (negative || !(any_sign < INFINITY)) return any_sign;
    const ld lambda = lambda_up(r->p->K, R, s->entry[0] + first * s->ld, s->ld, kap, be,
                                4 * r->rel.qk + 4 * r->rel.beta) *
                      (1 + 0x1p-40);
    return lambda > 2 ? lambda - 1 : 1;
}

/* nu of one row that writes along k and erases along e. The sum d of K products is computed in
 * double, of numbers within 2^-50, within K 2^-52. */
static ld of_another(const tr_run *r, int64_t t, const tr_qk *qk, const tr_head *a,
                     const tr_step *s) {
    const int K = r->p->K, read = r->rows.read[0], write = r->rows.write[0];
    const double *k = s->entry[write], *e = s->entry[read];
    const ld k_norm = tr_entry_norms(qk, a, write)[t], e_norm = tr_entry_norms(qk, a, read)[t],
             rel = tr_entry_rel(r, a, r->rows.of[read], -1, t) +
                   tr_entry_rel(r, a, r->rows.of[write], -1, t);
    double d = 0, size = 0;
    for (int i = 0; i < K; i++) {
        d += e[i] * k[i];
        size += fabs(e[i] * k[i]);
    }
    const ld off = ((K + 16) * 0x1p-51 + 4 * rel) * (ld)size + K * 0x1p-1000,
             ac = k_norm * k_norm * e_norm * e_norm, rest = ac + 4 * (1 - (ld)d + off);
    return (tr_sqrt(ac) + tr_sqrt(rest > 0 ? rest : 0)) / 2 * (1 + 0x1p-40);
}

/* >= the 2-norm of a whole step; of keys one after another that of `group`, of which the first
 * alone has the decay. Entries are within 2^-48 of the sums of their terms, squares within (K + 16)
 * 2^-52 of theirs. */
static ld whole_step_norm(const tr_run *r, int64_t t, int64_t group, const tr_qk *qk,
                          const tr_head *a, const tr_step *step, double *M) {
    const dp_problem *p = r->p;
    const int64_t K = p->K, each = dp_keys_at_once(p);
    const int before = dp_row_undecayed(dp_recurrence_of(p), group);
    double *G = M + K * K, square = 0;
    const ld d_most = group ? 1 : a->norms[t].d, d_err = group ? 0 : a->norms[t].d_err;
    ld off = d_most;
    for (int64_t i = 0; i < K * K; i++)
        M[i] = i % (K + 1) ? 0 : before ? step->d[i % K] : 1;
    for (int64_t j = group * each; j < (group + 1) * each; j++) {
        const int read = tr_read_of(r, j), write = tr_write_of(r, j);
        const int64_t row = t * p->R + dp_row_key(p, j), key = dp_row_key(p, j) * step->ld;
        if (read < 0) continue;
        const double *w = step->entry[write] + key, *e = step->entry[read] + key;
        for (int64_t i = 0; i < K; i++)
            for (int64_t k = 0; k < K; k++)
                M[i * K + k] -= step->strength[j] * w[i] * e[k];
        off += (before ? 1 : d_most) * tr_strength_up(r, a, t, j) *
               tr_entry_norms(qk, a, write)[row] * tr_entry_norms(qk, a, read)[row] *
               (1 + (tr_entry_rel(r, a, r->rows.of[read], -1, t) +
                     tr_entry_rel(r, a, r->rows.of[write], -1, t)) *
                        0x1p48);
    }
    for (int64_t i = 0; i < K * K; i++) {
        if (!before && !group) M[i] *= step->d[i % K];
        square += M[i] * M[i];
    }
    if (!isfinite(square)) return INFINITY;
    dp_mul_f64((dp_shape){1, 0, (int)K, (int)K, (int)K}, M, M, G);
    const ld top = dp_eigenvalue_up((int)K, G) + (K + 16) * 0x1p-51 * (ld)square,
             fine = p->model == DP_DPLR ? 0x1p-50 : 0x1p-48; /* one product a term, or three */
    return tr_sqrt(top) * (1 + 0x1p-40) + K * fine * off + d_err + K * 0x1p-1000;
}

int64_t tr_step_room(const tr_run *r) {
    return tr_step_has_decay(r->p) ? 2 * (int64_t)r->p->K * r->p->K : 0;
}

void tr_step_norms(const tr_run *r, int64_t t, const tr_qk *qk, tr_head *a, const tr_step *s,
                   double *room) {
    const dp_problem *p = r->p;
    const int64_t n = dp_rows(p) / dp_keys_at_once(p);
    const reads_kind kind = reads_of(p);
    for (int64_t g = 0; g < n; g++)
        a->nu[t * n + g] = kind == READS_ANY       ? whole_step_norm(r, t, g, qk, a, s, room)
                           : kind == READS_ANOTHER ? of_another(r, t, qk, a, s)
                           : kind == READS_ITSELF  ? of_itself(r, t, g, qk, a, s)
                                                   : 1;
}

int64_t tr_rows_room(const tr_run *r) {
    const int64_t K = r->p->K;
    return tr_step_room(r) + ((int64_t)r->rows.n * r->p->R + 1) * K + dp_rows(r->p);
}

static const double *to_doubles(mp_array x, int64_t at, int64_t n, double **room) {
    double *y = *room;
    for (int64_t i = 0; i < n; i++)
        y[i] = mpfr_get_d(mp_at(x, at + i), MPFR_RNDN);
    *room += n;
    return y;
}

void tr_rows_step_norm(const tr_run *r, int64_t t, const tr_qk *qk, tr_head *a, double *room) {
    const dp_problem *p = r->p;
    const int64_t K = p->K, Kg = dp_Kg(p), n = dp_rows(p);
    double *at = room + tr_step_room(r), *d = at;
    tr_step s = {.ld = K, .d = d};
    for (int64_t k = 0; k < K; k++)
        d[k] = mpfr_get_d(mp_at(a->d, t * Kg + (Kg > 1 ? k : 0)), MPFR_RNDN);
    at += K;
    s.strength = to_doubles(a->strength, t * n, n, &at);
    for (int e = 0; e < r->rows.n; e++)
        s.entry[e] = to_doubles(tr_entry_rows(r, qk, a, e), t * p->R * K, p->R * K, &at);
    tr_step_norms(r, t, qk, a, &s, room);
}

/* ---- chain rule ------------------------------------------------------------------------------ */

/* += d times the others of factor m of e */
static void add_through(const tr_run *r, int hv, const tr_qk *qk, const tr_head *a, dp_entry e,
                        int m, int64_t t, int64_t key, int64_t k, mpfr_srcptr d, mpfr_ptr into,
                        mp_array tmp) {
    mpfr_ptr x = mp_at(tmp, 0);
    mpfr_mul_si(x, d, e.sign, MPFR_RNDN);
    for (int i = 0; i < e.n; i++)
        if (i != m) multiply(r, hv, qk, a, e.of[i], t, key, k, x);
    mpfr_add(into, into, x, MPFR_RNDN);
}

/* The gradient of entry e of token t (row i of the block) at channel k before it was rotated. */
static mpfr_srcptr unturned(const tr_run *r, const tr_qk *qk, const tr_task *c, int e, int64_t t,
                            int64_t i, int64_t key, int64_t k, mp_array tmp) {
    const dp_problem *p = r->p;
    mp_array d = mp_from(c->dentry[e], (i * p->R + key) * p->K);
    const int64_t P = dp_pairs(p);
    const int64_t at =
        is_rotated(p, r->rows.of[e]) && k < 2 * P ? turned_at(p, r->rows.of[e], t) : -1;
    if (at < 0) return mp_at(d, k);
    const dp_pair z = dp_pair_with(p, k);
    mpfr_ptr x = mp_at(tmp, 2), y = mp_at(tmp, 3);
    mpfr_mul(x, mp_at(d, k), mp_at(qk->cos, at * P + z.i), MPFR_RNDN);
    mpfr_mul(y, mp_at(d, z.first + z.second - k), mp_at(qk->sin, at * P + z.i), MPFR_RNDN);
    (k == z.second ? mpfr_sub : mpfr_add)(x, x, y, MPFR_RNDN);
    return x;
}

/* A token of a block: what the chain rule of its inputs asks. */
typedef struct {
    const tr_run *r;
    int hv;
    const tr_qk *qk;
    const tr_head *a;
    const tr_task *c;
    int64_t t, i;
    mp_array tmp;
} chain;

/* += what the entries of token t, row i of the block, say of factor `of` at channel k of a key. */
static void add_entries(const chain *x, int of, int64_t t, int64_t i, int64_t key, int64_t k,
                        mpfr_ptr into) {
    const tr_run *r = x->r;
    for (int e = 0; e < r->rows.n; e++)
        for (int m = 0; m < r->rows.of[e].n; m++)
            if (r->rows.of[e].of[m] == of)
                add_through(r, x->hv, x->qk, x->a, r->rows.of[e], m, t, key, k,
                            unturned(r, x->qk, x->c, e, t, i, key, k, x->tmp), into, x->tmp);
}

/* Gradient of `input` at channel k (a number: 0) of a key, all that the entries say of it, those of
 * the token after too. */
static void sum_of(const chain *x, int input, int64_t key, int64_t k, mpfr_ptr into) {
    const int64_t after = dp_token_after(x->r->p, x->t);
    add_entries(x, input, x->t, x->i, key, k, into);
    if (after >= 0) add_entries(x, input | DP_PREVIOUS, after, x->i + after - x->t, key, k, into);
}

/* The gradients of a key, all channels. */
static void sum_of_row(const chain *x, int input, int64_t key, mp_array into) {
    for (int64_t k = 0; k < x->r->p->K; k++) {
        mpfr_set_zero(mp_at(into, k), 1);
        sum_of(x, input, key, k, mp_at(into, k));
    }
}

/* += the same of strengths */
static void add_strengths(const chain *x, int of, int64_t t, int64_t i, int64_t key,
                          mpfr_ptr into) {
    const dp_problem *p = x->r->p;
    for (int64_t j = 0; j < dp_rows(p); j++) {
        const dp_entry s = dp_row_of(p, j)->strength;
        for (int m = 0; m < s.n && dp_row_key(p, j) == key; m++)
            if (s.of[m] == of)
                add_through(x->r, x->hv, x->qk, x->a, s, m, t, key, 0,
                            mp_at(x->c->dstrength, i * dp_rows(p) + j), into, x->tmp);
    }
}

/* The gradient of a number of key `key`. */
static void chain_number(const chain *x, int input, int64_t key, mpfr_ptr into) {
    const dp_problem *p = x->r->p;
    const int64_t after = dp_token_after(p, x->t);
    mpfr_set_zero(into, 1);
    add_strengths(x, input, x->t, x->i, key, into);
    if (after >= 0) add_strengths(x, input | DP_PREVIOUS, after, x->i + after - x->t, key, into);
    for (int64_t k = 0; k < p->K; k++)
        sum_of(x, input, key, k, into);
}

/* += rate E dE of an entry, for each factor of the gate */
static void add_gate(dp_entry e, mpfr_srcptr value, mpfr_srcptr d, mpfr_ptr dg, mp_array tmp) {
    const double n = dp_entry_gates(e);
    if (n == 0) return;
    mpfr_mul(mp_at(tmp, 0), value, d, MPFR_RNDN);
    mpfr_mul_d(mp_at(tmp, 0), mp_at(tmp, 0), n, MPFR_RNDN);
    mpfr_add(dg, dg, mp_at(tmp, 0), MPFR_RNDN);
}

static void chain_gate(const chain *x) {
    const tr_run *r = x->r;
    const dp_problem *p = r->p;
    const int64_t K = p->K, Kg = dp_Kg(p), n = dp_rows(p), i = x->i;
    for (int e = 0; e < r->rows.n; e++)
        for (int64_t z = 0; z < p->R * K; z++)
            add_gate(r->rows.of[e], mp_at(tr_entry_rows(r, x->qk, x->a, e), x->t * p->R * K + z),
                     mp_at(x->c->dentry[e], i * p->R * K + z),
                     mp_at(x->c->dg, i * Kg + (Kg > 1 ? z % K : 0)), x->tmp);
    for (int64_t j = 0; j < n; j++)
        add_gate(dp_row_of(p, j)->strength, mp_at(x->a->strength, x->t * n + j),
                 mp_at(x->c->dstrength, i * n + j), mp_at(x->c->dg, i * Kg), x->tmp);
}

/* The gradient of the angles of this token, through its own rotated entries and those of the token
 * after. */
static void chain_angles(const chain *x) {
    const tr_run *r = x->r;
    const dp_problem *p = r->p;
    const int64_t after = dp_token_after(p, x->t), P = dp_pairs(p);
    mp_array to = mp_from(x->c->dphi, x->i * P);
    mp_zero(to, P);
    for (int e = 0; e < r->rows.n; e++) {
        const int key = dp_entry_rotated(dp_recurrence_of(p), r->rows.of[e]);
        const int64_t t = key >= 0 && key & DP_PREVIOUS ? after : x->t;
        if (key >= 0 && t >= 0)
            tr_add_turning(r, mp_from(x->a->entry[e], t * p->K),
                           mp_from(x->c->dentry[e], (x->i + t - x->t) * p->K), to, x->tmp);
    }
}

void tr_rows_chain(const tr_run *r, int hv, const tr_qk *qk, const tr_head *a, tr_task *c,
                   int64_t t, int64_t i, mp_array tmp) {
    const dp_problem *p = r->p;
    const int64_t K = p->K;
    const chain x = {r, hv, qk, a, c, t, i, tmp};
    for (int field = 0; field < DP_NRESULTS; field++) {
        const dp_tensor_field *f = &dp_result_fields[field];
        if (f->role != DP_ROLE_GRADIENT || !dp_result_exists(p, field) || !tr_is_given(f->of))
            continue;
        const mp_array d = mp_from(c->dk, i * p->R * K); /* dk itself comes later */
        sum_of_row(&x, f->of, 0, d);
        if (has_unit(a, f->of))
            tr_chain_norm(p, mp_from(a->unit[f->of].y, t * K), mp_at(a->unit[f->of].rstd, t), d,
                          tmp);
        tr_store_row(p->K, d, &r->t->field[field], t * p->HV + hv, mp_at(tmp, 0));
    }
    for (int64_t key = 0; key < p->R; key++)
        sum_of_row(&x, DP_INPUT_K, key, mp_from(c->dk, (i * p->R + key) * K));
    for (int64_t key = 0; key < p->R; key++)
        chain_number(&x, DP_INPUT_BETA, key, mp_at(c->dbeta, i * p->R + key));
    if (p->number) {
        chain_number(&x, DP_INPUT_NUMBER, 0, mp_at(tmp, 1));
        tr_store(&r->t->field[DP_RESULT_DNUMBER], t * p->HV + hv, mp_at(tmp, 1), mp_at(tmp, 0));
    }
    if (p->angle) chain_angles(&x);
    chain_gate(&x);
}
