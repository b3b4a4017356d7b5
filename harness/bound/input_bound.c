/* Errors of what enters the chunks: activated inputs, and rows that the subject computed itself. */
#include "error_bound_impl.h"
#include "ref/arithmetic/elementary.h"
#include "ref/arithmetic/mm.h"
#include "ref/vocabulary/recurrence.h"

/* Errors of the activated inputs; of rotated rows entry by entry (dp_turned_errors). For q, k: y =
 * x rstd, each entry has 2u, and us where the normalised vector is stored short; the row its
 *       rstd, sum_error(K) / 2 + 4u. Without the norm us where they are stored as they come in
 *       (design inputs=stored).
 * gate: softplus form  |Dg| <= 10 u |g| + u |x| a dp_error_bound_sigmoid(x);
 *       lower bound  |Dg| <= 8 u |g| + 5 u |a x| |lb| s (1 - s)
 *       (x = raw + bias is rounded once, a = exp(A_log) and the functions are good to 2 u each).
 * erase o k, write o v: both factors on entry, the product u, + us where it is stored short.
 * beta: sigmoid, 6 u relative. Inputs wider than the base's arithmetic are rounded once on
 *       entry: u. */
double dp_error_bound_sigmoid(double x) {
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
    const double s =
        p->gate == DP_GATE_SOFTPLUS ? dp_error_bound_sigmoid(x) : dp_error_bound_sigmoid(a * x);
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

/* Largest error of a gate, which is the relative error that exp(-g) has of it. */
static double most_of_gates(const dp_problem *p, double u) {
    const int Kg = dp_Kg(p);
    double most = 0;
    for (int64_t i = 0; i < p->T * p->HV * Kg; i++)
        most = fmax(
            most,
            dp_error_bound_gate(p, i / Kg / p->HV, (int)(i / Kg % p->HV), (int)(i % Kg), u).Dg);
    return most;
}

typedef enum { WRITES, READS, VALUES } entry_kind;

/* 2-norm error of a row's 1/norm, relative. */
static double of_norm(const dp_problem *p, const dp_rounding *r) {
    return dp_sum_error(r, p->K) / 2 + 4 * r->u;
}

/* Norms of the rows that a score has at once: one, or those of its entry's factors. */
static int most_norms(const dp_problem *p) {
    const dp_recurrence *a = dp_recurrence_of(p);
    int most = 1;
    for (int i = 0; i < 2 * a->n && dp_by_rows(p); i++) {
        const int n = dp_entry_normed(p, i % 2 ? a->row[i / 2].read : a->row[i / 2].write);
        if (n > most) most = n;
    }
    return most;
}

/* Largest relative error of these entries (dp_by_rows). Each factor has `entry`, one with a norm 2u
 * and us. exp(+-g) has the error of its gate and one rounding more. Each product has u, a stored
 * one us. */
static double of_products(const dp_problem *p, entry_kind kind, double entry,
                          const dp_rounding *r) {
    const dp_recurrence *a = dp_recurrence_of(p);
    double most = 0;
    for (int j = 0; j < a->n; j++) {
        const dp_entry e = kind == WRITES  ? a->row[j].write
                           : kind == READS ? a->row[j].read
                                           : a->row[j].value;
        const int gates = dp_entry_has(e, DP_FACTOR_DECAY) + dp_entry_has(e, DP_FACTOR_GROWTH) +
                          (kind == READS && a->before && e.sign);
        double sum = e.n ? e.n * entry + (e.n - 1) * r->u : 0;
        sum += dp_entry_normed(p, e) * (2 * r->u + r->us);
        if (gates) sum += gates * (2 * r->u + most_of_gates(p, r->u)) + r->u;
        if ((e.n > 1 || dp_entry_rotated(a, e) >= 0) && kind != READS) sum += r->us;
        most = fmax(most, sum);
    }
    return most;
}

dp_input_error dp_error_bound_inputs(const dp_problem *p, dp_base base, const dp_rounding *r) {
    const double entry = base == DP_BASE_FP64 ? 0 : r->u, norm = 2 * r->u + r->us;
    const double given = entry + r->input, stored = p->angle ? fmax(r->us, r->input) : r->input;
    const double product = dp_by_gates(p)  ? entry + r->u + r->us
                           : dp_by_rows(p) ? of_products(p, READS, entry, r)
                                           : 0;
    return (dp_input_error){.q = dp_is_normed(p, DP_INPUT_Q) ? norm + (p->angle ? r->us : 0)
                                                             : entry + stored,
                            .k = dp_by_rows(p) ? r->input + of_products(p, WRITES, entry, r)
                                 : p->l2norm   ? norm
                                               : given,
                            .erasing = product,
                            .qk_row = p->l2norm ? most_norms(p) * of_norm(p, r) : 0,
                            .v = dp_by_rows(p) ? of_products(p, VALUES, entry, r)
                                               : entry + (dp_by_gates(p) ? product : 0),
                            .beta = p->beta_form == DP_BETA_PLAIN ? entry : 6 * r->u,
                            .sg = (int64_t)p->HV * dp_Kg(p),
                            .Kg = dp_Kg(p)};
}

dp_input_error dp_error_bound_inputs_of(const dp_error_bound_base *w) {
    return dp_error_bound_inputs(w->ref->p, w->base, &w->r);
}

static double relative(double err, double x) { return err > 0 ? err / fabs(x) : 0; }

double *dp_error_bound_angles(const dp_problem *p, dp_base base, const dp_rounding *r) {
    const int64_t width = (int64_t)p->HV * dp_pairs(p);
    const double entry = base == DP_BASE_FP64 ? 0 : r->u;
    double *y = p->angle ? dp_doubles(p->T * width) : NULL;
    for (int s = 0; s < p->Nseq && y; s++)
        for (int64_t x = 0; x < width; x++) {
            double sum = 0;
            for (int64_t t = p->cu[s]; t < p->cu[s + 1]; t++) {
                sum += fabs(p->angle[t * width + x]);
                y[t * width + x] = (dp_sum_error(r, (int)(t + 1 - p->cu[s])) + entry) * sum;
            }
        }
    return y;
}

void dp_turned_errors(const dp_rounding *r, int P, const double *x, const double *dphi,
                      double *rel) {
    for (int i = 0; i < 2 * P; i++)
        rel[i] += relative((dphi[i / 2] + 4 * r->u) * dp_hypot(x[i & ~1], x[i | 1]), x[i]);
}

double dp_turned_norm(const dp_problem *p, const double *dphi, int64_t t, int hv, double u) {
    const int P = dp_pairs(p);
    double most = 0;
    for (int i = 0; i < P && dphi && t >= 0; i++)
        most = fmax(most, dphi[(t * p->HV + hv) * P + i]);
    return dphi && t >= 0 ? most + 4 * u : 0;
}

/* Error of 1/norm of a normalised row: <y, err> / |x| with |y| = 1, by squares for a probable
 * bound. */
double *dp_raw_error_rows(const dp_rounding *r, const double *x, const double *err,
                          dp_chunk_rows at, double *row) {
    if (!err) return NULL;
    double *rel = dp_doubles((int64_t)at.rows * at.width);
    for (int i = 0; i < at.rows; i++) {
        const int64_t z = (at.first + i / at.R * at.step + i % at.R) * at.width;
        const double n = dp_norm_fro(at.width, x + z);
        double s = 0;
        for (int j = 0; j < at.width; j++) {
            rel[(int64_t)i * at.width + j] = relative(err[z + j], x[z + j]);
            s += err[z + j] > 0 ? dp_pw(r, x[z + j] / n * err[z + j] / n) : 0;
        }
        if (row) *row = fmax(*row, r->p == 2 ? sqrt(s) : s);
    }
    return rel;
}

double dp_raw_error_norm(const double *x, const double *err, int64_t row, int width) {
    return err ? relative(dp_norm_fro(width, err + row * width),
                          dp_norm_fro(width, x + row * width))
               : 0;
}
