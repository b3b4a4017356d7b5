/* Degrees of freedom of rows at the ends of sequences, by count (row_freedom.h). */
#include "row_freedom.h"
#include "ref/arithmetic/mm.h"

typedef enum { OTHERWISE, FROM_THE_FIRST, TO_THE_LAST } summed;

static summed tokens_of(const dp_problem *p, dp_result_id field) {
    switch (field) {
    case DP_RESULT_O:
    case DP_RESULT_DQ: return p->s0 ? OTHERWISE : FROM_THE_FIRST;
    case DP_RESULT_DK:
    case DP_RESULT_DV: return p->dstate ? OTHERWISE : TO_THE_LAST;
    default: return OTHERWISE;
    }
}

double *dp_row_freedom_new(const dp_problem *p, dp_result_id field) {
    const summed which = tokens_of(p, field);
    if (which == OTHERWISE) return NULL;
    const int heads = dp_result_heads(p, field), per = dp_result_rows_per_token(p, field);
    const int of_token = dp_rows(p) * (p->HV / heads);
    double *most = dp_doubles(p->T * heads * per);
    for (int s = 0; s < p->Nseq; s++)
        for (int64_t t = p->cu[s]; t < p->cu[s + 1]; t++) {
            const int64_t n = which == FROM_THE_FIRST ? t - p->cu[s] + 1 : p->cu[s + 1] - t;
            for (int64_t i = t * heads * per; i < (t + 1) * heads * per; i++)
                most[i] = (double)(n * of_token);
        }
    return most;
}
