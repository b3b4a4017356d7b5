/* Other values of a problem, and where results differ (calls_again.h). */
#include "calls_again.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* ---- other values ---------------------------------------------------------------------------- */

/* x [outer][heads][each]: head h takes the place of h + by, and all change sign. */
static void turn(double *x, int64_t outer, int heads, int64_t each, int by, double sign) {
    double *row = dp_doubles(heads * each);
    for (int64_t i = 0; i < outer; i++) {
        double *at = x + i * heads * each;
        for (int h = 0; h < heads; h++)
            for (int64_t z = 0; z < each; z++)
                row[(h + by + heads) % heads * each + z] = sign * at[h * each + z];
        memcpy(at, row, sizeof *row * (size_t)(heads * each));
    }
    free(row);
}

static int64_t outer_of(const dp_problem *p, dp_row_kind kind) {
    return kind == DP_OF_TOKENS ? p->T : kind == DP_OF_SEQUENCES ? p->Nseq : 1;
}

/* By how many of its own heads a tensor moves where query and key heads move by one. */
static int step(const dp_problem *p, int heads) { return heads == p->HV ? dp_G(p) : 1; }

/* q and do change sign, and k and v, of which a user's own rows may need others to do so, too. */
static int turns_input(const dp_problem *p, int i) {
    return i == DP_INPUT_Q || i == DP_INPUT_DO ||
           ((i == DP_INPUT_K || i == DP_INPUT_V) && p->model != DP_USER);
}
static int turns_result(const dp_problem *p, int f) {
    return f == DP_RESULT_O || f == DP_RESULT_DQ ||
           ((f == DP_RESULT_DK || f == DP_RESULT_DV) && p->model != DP_USER);
}

dp_problem dp_other_values(const dp_problem *p) {
    dp_problem c = *p;
    dp_inputs_copy(&c, p, dp_copy);
    c.cu = dp_cu_copy(p);
    for (int i = 0; i < DP_NINPUTS; i++) {
        double *x = *dp_input_at(&c, i);
        const int heads = dp_input_heads(p, i);
        const int64_t outer = outer_of(p, dp_input_fields[i].kind);
        if (x && outer)
            turn(x, outer, heads, dp_input_count(p, i) / outer / heads, step(p, heads),
                 turns_input(p, i) ? -1 : 1);
    }
    return c;
}

void dp_other_values_undo(const dp_problem *p, dp_result *r) {
    for (int f = 0; f < DP_NRESULTS; f++) {
        double *x = *dp_result_at(r, f);
        const int heads = dp_result_heads(p, f);
        const int64_t outer = outer_of(p, dp_result_fields[f].kind);
        int64_t rows, width;
        dp_result_shape(p, f, &rows, &width);
        if (x && outer && rows)
            turn(x, outer, heads, rows * width / outer / heads, -step(p, heads),
                 turns_result(p, f) ? -1 : 1);
    }
}

/* ---- where results differ -------------------------------------------------------------------- */

static void row_text(const dp_problem *p, int f, int64_t row, char *text, size_t size) {
    const int heads = dp_result_heads(p, f), per = dp_result_rows_per_token(p, f);
    const dp_row_kind kind = dp_result_fields[f].kind;
    if (kind == DP_OF_HEADS)
        snprintf(text, size, "head %lld", (long long)row);
    else if (kind == DP_OF_SEQUENCES)
        snprintf(text, size, "sequence %lld, head %lld", (long long)(row / p->HV),
                 (long long)(row % p->HV));
    else
        snprintf(text, size, "token %lld, head %lld", (long long)(row / per / heads),
                 (long long)(row / per % heads));
}

int dp_results_differ(const dp_problem *p, const dp_result *a, const dp_result *b, char *text,
                      size_t size) {
    int differ = 0;
    for (int f = 0; f < DP_NRESULTS; f++) {
        const double *x = *dp_result_at((dp_result *)a, f), *y = *dp_result_at((dp_result *)b, f);
        int64_t rows, width, n = 0, first = 0, from = INT64_MAX, to = -1;
        char at[64], columns[100] = "";
        dp_result_shape(p, f, &rows, &width);
        for (int64_t i = 0; x && y && i < rows * width; i++) {
            if (x[i] == y[i] || (isnan(x[i]) && isnan(y[i]))) continue;
            if (!n++) first = i;
            if (i % width < from) from = i % width;
            if (i % width > to) to = i % width;
        }
        if (!n || differ++) continue;
        row_text(p, f, first / width, at, sizeof at);
        if (to - from + 1 < width && n > 1)
            snprintf(columns, sizeof columns, ", all in columns %lld to %lld of 0 to %lld",
                     (long long)from, (long long)to, (long long)width - 1);
        snprintf(text, size, "%lld of %lld entries of %s%s, the first at %s: %.9g, then %.9g",
                 (long long)n, (long long)(rows * width), dp_result_fields[f].name, columns, at,
                 x[first], y[first]);
    }
    return differ;
}
