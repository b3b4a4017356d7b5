#include "limits_out.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { MOST = 64 };
typedef enum {
    BOUND,
    ROW,
    WINDOW,
    WINDOW_MOST,
    UNIT,
    UNIT_MOST,
    TENSOR_MOST,
    RESULT,
    TRUTH,
    TRUTH_LO,
    NARRAYS
} array;
static const char *const SUFFIX[NARRAYS] = {"bound", "row",       "window",      "window_most",
                                            "unit",  "unit_most", "tensor_most", "result",
                                            "truth", "truth_lo"};

typedef struct {
    char name[24];
    int64_t n[NARRAYS];
    double *x[NARRAYS];
} limits;

static struct {
    int keeps, results, n;
    limits of[MOST];
} kept;

void dp_limits_keep(int results) {
    kept.keeps = 1;
    kept.results = results;
}

static void limits_free(limits *t) {
    for (int k = 0; k < NARRAYS; k++)
        free(t->x[k]);
    memset(t, 0, sizeof *t);
}

static double *filled(limits *t, array k, int64_t n, double x) {
    t->n[k] = n;
    t->x[k] = malloc((size_t)(n > 0 ? n : 1) * sizeof(double));
    for (int64_t i = 0; t->x[k] && i < n; i++)
        t->x[k][i] = x;
    return t->x[k];
}

/* The largest |error| of a unit of that level: an error there alone says its E and its limit. */
static double most(dp_levels_in *l, dp_level level, const double *err2) {
    dp_levels_result out;
    l->err2 = err2;
    dp_levels_judge(l, &out);
    const dp_level_result *r = &out.at[level];
    return r->ratio > 0 && isfinite(r->limit) ? r->limit / r->ratio : INFINITY;
}

/* Parts of group `at` share an error of length 1. */
static double most_of(dp_levels_in *l, dp_level level, const double *group, int64_t at, double *e) {
    const int64_t parts = l->draws->rows;
    int64_t n = 0;
    for (int64_t i = 0; i < parts; i++)
        n += group[i] == (double)at;
    for (int64_t i = 0; i < parts; i++)
        e[i] = group[i] == (double)at ? 1.0 / (double)n : 0;
    return n ? most(l, level, e) : INFINITY;
}

static void add_levels(limits *t, const dp_levels_in *given) {
    dp_levels_in l = *given;
    const int64_t parts = l.draws->rows, windows = l.draws->windows;
    double *e = calloc((size_t)parts, sizeof *e), *head_seen = l.head_seen;
    l.head_seen = NULL;
    memset(l.along, 0, sizeof l.along);
    double *row = filled(t, ROW, parts, INFINITY), *window = filled(t, WINDOW, parts, -1);
    double *unit = filled(t, UNIT, parts, -1), *of = filled(t, WINDOW_MOST, windows, INFINITY);
    double *of_unit = filled(t, UNIT_MOST, l.units, INFINITY), *all = filled(t, TENSOR_MOST, 1, 0);
    for (int64_t i = 0; i < parts; i++) {
        if (l.window[i] < 0) continue;
        window[i] = l.window[i];
        unit[i] = l.unit[l.window[i]];
    }
    for (int64_t i = 0; i < parts && l.by_token; i++) {
        e[i] = 1;
        if (window[i] >= 0) row[i] = most(&l, DP_LEVEL_ROW, e);
        e[i] = 0;
    }
    for (int64_t w = 0; w < windows; w++)
        of[w] = most_of(&l, DP_LEVEL_WINDOW, window, w, e);
    for (int64_t u = 0; u < l.units; u++)
        of_unit[u] = most_of(&l, DP_LEVEL_RANK, unit, u, e);
    for (int64_t i = 0; i < parts; i++)
        e[i] = window[i] >= 0 ? 1.0 / (double)parts : 0;
    const double whole = most(&l, DP_LEVEL_TENSOR, e);
    double length2 = 0;
    for (int64_t i = 0; i < parts; i++)
        length2 += e[i];
    all[0] = whole * sqrt(length2);
    l.head_seen = head_seen;
    free(e);
}

static limits *place_of(const char *name) {
    for (int i = 0; i < kept.n; i++)
        if (!strcmp(kept.of[i].name, name)) return &kept.of[i];
    return kept.n < MOST ? &kept.of[kept.n++] : NULL;
}

static void add_results(limits *t, const dp_compare_in *in) {
    const int64_t n = in->rows * in->width;
    double *to[3] = {filled(t, RESULT, n, 0), filled(t, TRUTH, n, 0), filled(t, TRUTH_LO, n, 0)};
    const double *from[3] = {in->got, in->want, in->want_lo};
    for (int k = 0; k < 3; k++)
        if (to[k] && from[k] && n) memcpy(to[k], from[k], (size_t)n * sizeof *to[k]);
}

void dp_limits_add(const dp_compare_in *in, const double *bound, const dp_levels_in *l) {
    limits *t = kept.keeps ? place_of(in->name) : NULL;
    if (!t) return;
    limits_free(t);
    snprintf(t->name, sizeof t->name, "%s", in->name);
    double *b = filled(t, BOUND, in->rows, INFINITY);
    for (int64_t z = 0; z < in->rows && !in->bound_shown; z++)
        b[z] = bound[z];
    if (l) add_levels(t, l);
    if (kept.results) add_results(t, in);
}

static void drop(void) {
    for (int i = 0; i < kept.n; i++)
        limits_free(&kept.of[i]);
    memset(&kept, 0, sizeof kept);
}

dp_status dp_limits_write(const char *path, dp_err *e) {
    dp_tensorfile f = {0};
    for (int i = 0; i < kept.n; i++)
        for (int k = 0; k < NARRAYS; k++) {
            limits *t = &kept.of[i];
            char name[48];
            snprintf(name, sizeof name, "%s.%s", t->name, SUFFIX[k]);
            if (t->x[k]) dp_tensorfile_add(&f, name, "F64", 1, &t->n[k], t->x[k]);
        }
    const dp_status st = dp_safetensors_write(path, &f, e);
    dp_tensorfile_free(&f);
    drop();
    return st;
}
