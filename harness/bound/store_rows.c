/* Errors of stored states in the gradients of a row's factors (store_bound.h). */
#include "error_bound_impl.h"
#include "store_bound.h"

/* A row of a token and value head. */
typedef struct {
    const dp_problem *p;
    const dp_activated *in;
    int64_t at;
} row_place;

/* |the product of an entry's factors but one `of`| at channel x. A read before the decay reads the
 * decayed state by exp(-g) more. */
static double beside(const row_place *a, dp_entry e, int reads, int of, int x) {
    double y = 1;
    for (int m = 0, own = 1; m < e.n; m++) {
        if (own && e.of[m] == of)
            own = 0;
        else
            y *= dp_error_bound_factor(a->p, a->in->g, a->at, e.of[m], x);
    }
    if (reads && dp_recurrence_of(a->p)->before)
        y *= dp_error_bound_factor(a->p, a->in->g, a->at, DP_FACTOR_GROWTH, x);
    return fabs(y);
}

/* The error of an entry's factor `of`: of K channels, or of a number, which adds channels up. */
static double through(const row_place *a, dp_entry e, int reads, int of, double error) {
    const int has = e.sign ? dp_entry_has(e, of) : 0,
              number = of == DP_INPUT_BETA || of == DP_INPUT_NUMBER;
    double most = 0, sum = 0;
    for (int x = 0; x < a->p->K && has; x++) {
        const double y = beside(a, e, reads, of, x);
        most = fmax(most, y);
        sum += y * y;
    }
    return has ? has * (number ? sqrt(sum) : most) * error : 0;
}

static double of_strength(const row_place *a, dp_entry e, int of, double error) {
    const int has = dp_entry_has(e, of);
    return has ? has * beside(a, e, 0, of, 0) * error : 0;
}

double dp_store_row(const dp_problem *p, const dp_activated *in, int64_t at, int j,
                    dp_row_errors of, double *const *row) {
    const row_place a = {&in->units.p, in, at};
    const dp_token_row *r = dp_row_of(p, j);
    const double *k = in->k + (at * dp_rows(p) + j) * p->K,
                 *e = in->erasing + (at * dp_rows(p) + j) * p->K;
    for (int f = 0; f < DP_NRESULTS; f++) {
        const int x = (int)dp_result_fields[f].of;
        if (!row[f] || dp_result_fields[f].role != DP_ROLE_GRADIENT || dp_is_value(x) ||
            x == DP_INPUT_Q || x == DP_INPUT_G || dp_result_fields[f].kind != DP_OF_TOKENS)
            continue;
        const double rstd = in->units.rstd[x] ? in->units.rstd[x][at] : 1;
        row[f][at] +=
            rstd * (through(&a, r->write, 0, x, of.write) + through(&a, r->read, 1, x, of.read));
        if (x == DP_INPUT_BETA || x == DP_INPUT_NUMBER)
            row[f][at] += of_strength(&a, r->strength, x, of.strength);
    }
    const int reads = r->read.sign ? dp_entry_gates(r->read) - dp_recurrence_of(p)->before : 0;
    return abs(dp_entry_gates(r->write)) * dp_norm_fro(p->K, k) * of.write +
           abs(reads) * dp_norm_fro(p->K, e) * of.read;
}
