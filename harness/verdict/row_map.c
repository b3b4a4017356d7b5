/* Windows of tokens, and the rows of each kind of tensor. */
#include "row_map.h"
#include "ref/arithmetic/mm.h"
#include "ref/vocabulary/context.h"

#include <assert.h>
#include <stdlib.h>

/* ---- freedom of rows ------------------------------------------------------------------------- */

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

/* ---- rows and heads -------------------------------------------------------------------------- */

dp_windows dp_windows_of(const dp_problem *p, int N) {
    dp_windows w = {.p = p, .N = N, .window_of = dp_calloc((size_t)p->T, sizeof(int))};
    for (int r = 0; r < N; r++) {
        dp_context c;
        const dp_status st = dp_context_of(p, N, r, &c, NULL);
        assert(!st);
        (void)st;
        for (int s = 0; s < c.nlocal; s++) {
            const int64_t begin = c.local_cu[s];
            const int64_t end = c.local_cu[s + 1];
            for (int64_t t = begin; t < end; t++)
                w.window_of[c.a + t] = w.windows + (int)((t - begin) / DP_CHUNK);
            w.windows += (int)((end - begin + DP_CHUNK - 1) / DP_CHUNK);
        }
        dp_context_free(&c);
    }
    return w;
}

void dp_windows_free(dp_windows *w) {
    free(w->window_of);
    *w = (dp_windows){0};
}

dp_row_map dp_map_tokens(const dp_windows *w, int heads, int per, int width) {
    const int64_t rows = w->p->T * heads * per;
    int32_t *window = dp_calloc((size_t)rows, sizeof *window);
    for (int64_t r = 0; r < rows; r++)
        window[r] = w->window_of[r / (heads * per)] * heads + (int)(r / per % heads);
    return (dp_row_map){rows, (int64_t)w->windows * heads, width, 1, heads, per, window};
}

dp_row_map dp_map_rows(int64_t n, int width) {
    int32_t *window = dp_calloc((size_t)n, sizeof *window);
    for (int64_t r = 0; r < n; r++)
        window[r] = (int32_t)r;
    return (dp_row_map){n, n, width, 1, 0, 1, window};
}

dp_row_map dp_map_states(int64_t n, int K, int V) {
    dp_row_map m = dp_map_rows(n, K * V);
    m.subrows = K;
    m.groups = n;
    return m;
}

void dp_row_map_free(dp_row_map *m) {
    free((void *)m->window);
    *m = (dp_row_map){0};
}

dp_row_map dp_map_field(const dp_windows *w, int field) {
    const dp_problem *p = w->p;
    int64_t rows, width;
    dp_result_shape(p, field, &rows, &width);
    if (!rows) return (dp_row_map){.subrows = 1};
    switch (dp_result_fields[field].kind) {
    case DP_OF_SEQUENCES: return dp_map_states(rows, p->K, p->V);
    case DP_OF_HEADS: return dp_map_rows(rows, (int)width);
    default:
        return dp_map_tokens(w, dp_result_heads(p, field), dp_result_rows_per_token(p, field),
                             (int)width);
    }
}
