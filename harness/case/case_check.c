/* Values of a case that no run could use, and those worth a warning (case_parts.h). */
#define _GNU_SOURCE
#include "case_parts.h"
#include "operations.h"
#include "ref/arithmetic/elementary.h"

#include <math.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>

void dp_case_warn(dp_case *c, const char *fmt, ...) {
    char *msg = dp_calloc(1, 600);
    va_list ap;
    va_start(ap, fmt);
    vsnprintf(msg, 600, fmt, ap);
    va_end(ap);
    char **more = dp_calloc((size_t)c->nwarn + 1, sizeof *more);
    if (c->nwarn) memcpy(more, c->warn, (size_t)c->nwarn * sizeof *more);
    free(c->warn);
    c->warn = more;
    c->warn[c->nwarn++] = msg;
}

dp_status dp_case_check(const dp_casefile *f, dp_case *c, dp_err *e) {
    dp_case_input s[DP_CASE_MAX_INPUTS];
    const int n = dp_case_inputs(c, s);
    for (int i = 0; i < n && !c->allow_nonfinite; i++)
        for (int64_t j = 0; *s[i].where && j < dp_case_input_count(&s[i]); j++)
            if (!isfinite((*s[i].where)[j])) {
                char at[96];
                dp_case_input_index(&s[i], j, at, sizeof at);
                return dp_casefile_refuse(f, f->data ? "data" : "override", e,
                                          "%s%s = %g: not finite, and nonfinite = allow is not set",
                                          s[i].field->name, at, (*s[i].where)[j]);
            }
    if (!dp_op_of(c)->has_problem) return DP_OK;
    dp_err inner = {0};
    if (dp_problem_check(&c->p, c->allow_nonfinite, &inner))
        return dp_fail(e, inner.code, "%s: %s", f->path, inner.msg);
    return DP_OK;
}

static double active_beta(const dp_problem *p, double b) {
    return p->beta_form == DP_BETA_PLAIN
               ? b
               : (p->beta_form == DP_BETA_SIGMOID2 ? 2 : 1) / (1 + dp_exp(-b));
}

/* sum_j beta_j |k_j|^2 as the step sees it. */
static double active_write(const dp_problem *p, int64_t t, int hv) {
    double sum = 0;
    for (int j = 0; j < p->R; j++) {
        const double *k = p->k + ((t * p->H + hv / dp_G(p)) * p->R + j) * p->K;
        double n = 0;
        for (int i = 0; i < p->K; i++)
            n += k[i] * k[i];
        sum += active_beta(p, p->beta[(t * p->HV + hv) * p->R + j]) *
               (p->l2norm ? n / (n + DP_L2_EPS) : n);
    }
    return sum;
}

/* math.md b: sum_j beta_j |k_j|^2 <= 2 makes a step a contraction; of keys that read one after
 * another each of them must be. Above it the eigenvalues of k' diag(beta) k decide. */
void dp_case_warn_expanding(dp_case *c) {
    const dp_problem *p = &c->p;
    int64_t n = 0, where = 0;
    double worst = 0;
    for (int64_t i = 0; p->R >= 3 && !dp_in_turn(p) && i < p->T * p->HV; i++) {
        const double w = active_write(p, i / p->HV, (int)(i % p->HV));
        n += w > 2;
        if (w > worst) {
            worst = w;
            where = i;
        }
    }
    if (n)
        dp_case_warn(
            c,
            "%s: R = %d: sum of beta |k|^2 = %.3g > 2 at token %lld, head %lld (and at %lld of "
            "%lld): the state may grow without bound",
            c->path, p->R, worst, (long long)(where / p->HV), (long long)(where % p->HV),
            (long long)n, (long long)(p->T * p->HV));
}
