/* Shrinking the numbers: to zero, to one, to powers of two (shrink_work.h). */
#include "shrink_work.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

/* ---- values ---------------------------------------------------------------------------------- */

static double to_zero(double x) { return x * 0; }
static double to_one(double x) { return x == 0 ? x : copysign(1, x); }

/* The power of two that is nearest on a logarithmic scale. */
static double to_power(double x) {
    int e;
    const double m = frexp(fabs(x), &e);
    return x == 0 || !isfinite(x) ? x : copysign(ldexp(1, m < 0x1.6a09e667f3bcdp-1 ? e - 1 : e), x);
}

/* Sets index list[from .. from+len) of a tensor; what is not finite stays. Nothing changes: 0. */
static int try_values(dp_shrink_work *w, int which, const int64_t *list, int64_t from, int64_t len,
                      double (*f)(double)) {
    dp_shrink_tensor t[DP_CASE_MAX_INPUTS];
    dp_case cand = dp_shrink_copy(w->c);
    int changed = 0;
    dp_shrink_tensors(&cand, t);
    for (int64_t i = from; i < from + len; i++) {
        double *x = &(*t[which].x)[list[i]];
        if (isfinite(*x) && f(*x) != *x) {
            *x = f(*x) + 0.0;
            changed = 1;
        }
    }
    if (changed) return dp_shrink_offer(w, &cand);
    dp_shrink_copy_free(&cand);
    return 0;
}

/* One tensor: all of it, then halves of it, down to single numbers as long as those are few. */
static int64_t simplify(dp_shrink_work *w, int which, double (*f)(double)) {
    dp_shrink_tensor t[DP_CASE_MAX_INPUTS];
    dp_shrink_tensors(w->c, t);
    if (!*t[which].x) return 0;
    const int64_t n = dp_shrink_count(w->c, &t[which]);
    int64_t *list = dp_calloc((size_t)n, sizeof *list), m = 0, taken = 0;
    for (int64_t i = 0; i < n; i++)
        if (isfinite((*t[which].x)[i]) && f((*t[which].x)[i]) != (*t[which].x)[i]) list[m++] = i;
    for (int64_t size = m; size >= 1 && m > 0 && m / size <= 512 && !dp_shrink_spent(w);
         size = size > 1 ? (size + 1) / 2 : 0)
        for (int64_t at = 0; at < m && !dp_shrink_spent(w);) {
            const int64_t len = size < m - at ? size : m - at;
            if (try_values(w, which, list, at, len, f)) {
                taken += len;
                memmove(list + at, list + at + len, sizeof *list * (size_t)(m - at - len));
                m -= len;
            } else
                at += len;
        }
    free(list);
    return taken;
}

int dp_shrink_simplify_all(dp_shrink_work *w) {
    static const struct {
        double (*f)(double);
        const char *what;
    } how[] = {
        {to_zero, "set to zero"}, {to_one, "set to 1 or -1"}, {to_power, "set to powers of two"}};
    dp_shrink_tensor t[DP_CASE_MAX_INPUTS];
    const int n = dp_shrink_tensors(w->c, t);
    int changed = 0;
    for (size_t h = 0; h < sizeof how / sizeof *how; h++)
        for (int i = 0; i < n; i++) {
            if (dp_shrink_spent(w)) return changed;
            const int64_t k = simplify(w, i, how[h].f);
            if (k) {
                dp_shrink_report(w, "%lld numbers of %s %s", (long long)k, t[i].field->name,
                                 how[h].what);
                changed = 1;
            }
        }
    return changed;
}
