/* Comparison of two runs, bit by bit or within rounding (invariants_work.h). */
#include "invariants_work.h"

#include <math.h>
#include <stdio.h>

/* ---- comparing ------------------------------------------------------------------------------- */

static void differ(dp_check_work *w, const char *name, int64_t token, int head, int seq,
                   int64_t entry, double got, double want) {
    const int64_t L = w->p->T / w->N;
    char at[96];
    w->c->verdict = DP_FAIL;
    if (token >= 0)
        snprintf(at, sizeof at, "rank %d, head %d, token %lld", (int)(token / L), head,
                 (long long)token);
    else
        snprintf(at, sizeof at, "head %d, sequence %d", head, seq);
    snprintf(w->c->why, sizeof w->c->why, "%.16s: %s, entry %lld: got %.9g (%a), want %.9g (%a)",
             name, at, (long long)entry, got, got, want, want);
}

/* got = want * factor for every row that keep() takes (NULL: all). Token row t of got stands for
 * token t + shift, state i for sequence i + seq_shift. */
void dp_check_same_field(dp_check_work *w, const dp_problem *p, int f, dp_result *got,
                         dp_result *want, int64_t t0, int seq0, double factor, double small,
                         dp_check_keep *keep, const void *ctx) {
    int64_t rows, width;
    const double *a = *dp_result_at(got, f), *b = *dp_result_at(want, f);
    dp_result_shape(p, f, &rows, &width);
    if (!rows || !a || !b || w->c->verdict == DP_FAIL) return;
    const dp_row_kind kind = dp_result_fields[f].kind;
    const int state = kind == DP_OF_SEQUENCES, param = kind == DP_OF_HEADS;
    const int heads = dp_result_heads(p, f);
    const int64_t per = dp_result_rows_per_token(p, f);
    const int64_t skip = state ? (int64_t)seq0 * p->HV : param ? 0 : t0 * heads * per;
    int64_t first = INT64_MAX, compared = 0;
#pragma omp parallel for reduction(min : first) reduction(+ : compared) if (rows * width > 1 << 22)
    for (int64_t r = 0; r < rows; r++) {
        const int64_t token = state || param ? -1 : r / per / heads + t0;
        const int head = state || param ? (int)(r % p->HV) : (int)(r / per % heads),
                  seq = state   ? (int)(r / p->HV) + seq0
                        : param ? -1
                                : dp_check_sequence_at(w->p, token);
        if (first < r * width || (keep && !keep(ctx, f, token, head, seq))) continue;
        compared += width;
        for (int64_t i = 0; i < width; i++) {
            const double x = a[r * width + i], y = factor * b[(r + skip) * width + i];
            if (x == y || (isnan(x) && isnan(y)) || fabs(x - y) <= small) continue;
            if (r * width + i < first) first = r * width + i;
            break;
        }
    }
    w->c->compared += compared;
    if (first == INT64_MAX) return;
    const int64_t r = first / width, token = state || param ? -1 : r / per / heads + t0;
    differ(w, dp_result_fields[f].name, token,
           state || param ? (int)(r % p->HV) : (int)(r / per % heads),
           state   ? (int)(r / p->HV) + seq0
           : param ? -1
                   : dp_check_sequence_at(w->p, token),
           first % width, a[first], factor * b[first + skip * width]);
}

void dp_check_same(dp_check_work *w, dp_check_outcome *got, const double factor[DP_NRESULTS],
                   double small, dp_check_keep *keep, const void *ctx) {
    for (int f = 0; f < DP_NRESULTS; f++)
        if (!factor || factor[f])
            dp_check_same_field(w, w->p, f, &got->r, (dp_result *)&w->base->r, 0, 0,
                                factor ? factor[f] : 1, small, keep, ctx);
}

void dp_check_skip(dp_check_work *w, const char *why) {
    w->c->verdict = DP_SKIPPED;
    snprintf(w->c->why, sizeof w->c->why, "%s", why);
}

/* Kernels that cut a long sequence in segments by its length cut its parts elsewhere: then both are
 * right and their bits differ. */
int dp_check_cut(const dp_check_outcome *a, const dp_check_outcome *b) {
    return a->segments > 1 || b->segments > 1;
}

/* The tensor-core kernels anchor decays, and what underflows there (2^-150, of 16 pairs) is
 * multiplied by up to 2^110 again. */
double dp_check_underflow(const dp_check_work *w, double scale) {
    return scale * (!dp_backends[w->s->backend].simulated ? 0x1p-36
                    : w->s->base == DP_BASE_FP64          ? 0x1p-960
                                                          : 0x1p-100);
}
