#include "compare.h"
#include "../ref/problem.h"

#include <assert.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

const char *const dp_verdict_names[DP_NVERDICTS] = {"pass", "fail", "skipped", "unjudged"};

dp_verdict dp_verdict_worse(dp_verdict a, dp_verdict b) {
    const int order[DP_NVERDICTS] = {0, 3, 1, 2};
    return order[a] >= order[b] ? a : b;
}

typedef struct {
    double err2, want2, bound2;
    int finite_want, finite_got, worst;
    double worst_err;
} row_error;

static row_error measure(const dp_compare_in *in, int64_t row) {
    row_error e = {.finite_want = 1, .finite_got = 1};
    for (int64_t i = 0; i < in->width; i++) {
        const int64_t z = row * in->width + i;
        const double g = in->got[z], w = in->want[z], d = fabs((g - w) - (in->want_lo ? in->want_lo[z] : 0));
        e.finite_got &= isfinite(g) != 0;
        e.finite_want &= isfinite(w) != 0;
        if (isfinite(w)) e.want2 += w * w;
        if (isfinite(d)) e.err2 += d * d;
        if ((isfinite(d) && d > e.worst_err) || (!isfinite(g) && isfinite(w) && e.worst_err < INFINITY)) e.worst_err = isfinite(d) ? d : INFINITY, e.worst = (int)i;
    }
    const double b = (in->bound ? in->bound[row] : 0) + (in->rad && isfinite(in->rad[row]) ? in->rad[row] : 0);
    e.bound2 = b * b;
    if (e.finite_want && !e.finite_got) e.err2 = INFINITY;
    return e;
}

/* Chunks (per head) in which the truth is not finite: [nchunk][heads] flags. */
static unsigned char *poisoned_chunks(const dp_compare_in *in, int *nchunk) {
    dp_place at;
    int top = 0;
    for (int64_t r = 0; r < in->rows; r++) {
        in->place(in->ctx, r, &at);
        if (at.chunk >= top) top = at.chunk + 1;
    }
    unsigned char *f = dp_calloc((size_t)(top ? top : 1) * in->heads, 1);
    for (int64_t r = 0; r < in->rows; r++) {
        in->place(in->ctx, r, &at);
        if (at.chunk >= 0 && !measure(in, r).finite_want) f[at.chunk * in->heads + at.head] = 1;
    }
    *nchunk = top;
    return f;
}

static void note_worst(const dp_compare_in *in, dp_judgement *j, int64_t row, const row_error *e, const dp_place *at, double rel) {
    j->worst = *at;
    j->worst_index = e->worst;
    j->worst_got = in->got[row * in->width + e->worst];
    j->worst_want = in->want[row * in->width + e->worst];
    j->worst_rel = rel;
}

static void note_over(const dp_compare_in *in, dp_judgement *j, int64_t row, const row_error *e, const dp_place *at) {
    const int64_t z = row * in->width + e->worst;
    j->last = (dp_row){*at, e->worst, in->got[z], in->want[z], sqrt(e->err2), sqrt(e->bound2)};
    if (!j->nover++) j->first = j->last;
}

/* Largest over heads of |err|_F / |want|_F in each window of 64 tokens. */
static void windows(const dp_compare_in *in, dp_judgement *j) {
    const int n = (int)((in->tokens + 63) / 64);
    double *e = dp_doubles((int64_t)n * in->heads), *w = dp_doubles((int64_t)n * in->heads);
    for (int64_t r = 0; r < in->rows; r++) {
        dp_place at;
        in->place(in->ctx, r, &at);
        const row_error x = measure(in, r);
        const int64_t z = at.token / 64 * in->heads + at.head;
        e[z] += x.err2, w[z] += x.want2;
    }
    j->nwindow = n;
    j->window = dp_doubles(n);
    for (int i = 0; i < n; i++)
        for (int h = 0; h < in->heads; h++) {
            const int64_t z = (int64_t)i * in->heads + h;
            if (w[z] > 0 && !(sqrt(e[z] / w[z]) <= j->window[i])) j->window[i] = sqrt(e[z] / w[z]);
        }
    free(e), free(w);
}

/* Sums of squares by cell, for the expected tier. */
typedef struct { double *err2, *want2, *floor2, *rows; int *belong; dp_place *at; } cells;

static cells cells_new(const dp_compare_in *in) {
    const int64_t n = in->ndraw ? in->ncell : 0;
    cells c = {dp_doubles(n), dp_doubles(n), dp_doubles(n), dp_doubles(n), dp_calloc((size_t)n, sizeof(int)), dp_calloc((size_t)n, sizeof(dp_place))};
    for (int64_t i = 0; i < n; i++) c.belong[i] = -1;
    return c;
}

/* rms: root mean square of the 2-norms of the head's rows: where a row cancels to nothing beside the others, one rounding of their size is no error. */
static void cells_add(const dp_compare_in *in, cells *c, int64_t row, const dp_place *at, const row_error *e, double rms) {
    const int64_t i = at->chunk >= 0 ? (int64_t)at->chunk * in->heads + at->head : row;
    const double rad = in->rad && isfinite(in->rad[row]) ? in->rad[row] : 0;
    if (!in->ndraw) return;
    assert(i < in->ncell);
    if (c->belong[i] < 0) c->at[i] = *at;                        /* the first row of a cell stands for it */
    c->belong[i] = at->rank * in->heads + at->head;
    c->rows[i]++, c->err2[i] += e->err2, c->want2[i] += e->want2, c->floor2[i] += in->unit * in->unit * (e->want2 + rms * rms) + in->tiny * in->tiny * (double)in->width + rad * rad;
}

/* The expected tier, after the bounds: it fails what they let pass, and judges what they leave unjudged. */
static void judge_expected(const dp_compare_in *in, const cells *c, dp_judgement *j) {
    const dp_excess_in x = {.ndraw = in->ndraw, .n = in->ncell, .e2 = in->e2, .err2 = c->err2, .want2 = c->want2, .floor2 = c->floor2, .rows = c->rows, .belong = c->belong, .nbelong = in->N * in->heads,
                            .safety = in->safety};
    if (!in->ndraw) return;
    dp_excess_judge(&x, &j->expected);
    const dp_excess *e = &j->expected;
    if (j->verdict == DP_FAIL || isnan(e->excess)) return;
    if (e->excess > 1) {
        const dp_excess_level *l = &e->at[e->level];
        j->verdict = DP_FAIL, j->tier = "expected", j->over = c->at[e->cell];
        snprintf(j->why, sizeof j->why, "error is %.3g times what these formats make of these inputs (%s; at most %.3g times is theirs)", l->ratio, dp_level_what[e->level], l->limit);
    } else if (isfinite(e->expected)) {
        if (j->verdict == DP_UNJUDGED) j->why[0] = 0;
        j->verdict = DP_PASS, j->tier = "expected";
    }
}

void dp_compare(const dp_compare_in *in, dp_judgement *j) {
    *j = (dp_judgement){.N = in->N, .heads = in->heads, .bound = NAN, .ratio = NAN, .expected = {.excess = NAN, .expected = NAN}, .tier = "", .worst = {-1, -1, -1, -1, -1}, .over = {-1, -1, -1, -1, -1}};
    snprintf(j->name, sizeof j->name, "%s", in->name);
    const int nh = in->N * in->heads;
    double *err = dp_doubles(nh), *want = dp_doubles(nh), *rat = dp_doubles(in->N), *head_w = dp_doubles(in->heads), E = 0, W = 0, B = 0, BW = 0, top = -1;   /* B, BW: judged rows */
    int64_t *head_n = dp_calloc((size_t)in->heads, sizeof *head_n), judged = 0, contaminated = 0, unbounded = 0, wrong_class = 0;
    int *seen = dp_calloc((size_t)nh, sizeof *seen), nchunk;
    unsigned char *poison = poisoned_chunks(in, &nchunk);
    cells cell = cells_new(in);
    for (int r = 0; r < in->N; r++) rat[r] = NAN;
    for (int64_t row = 0; row < in->rows; row++) {               /* scale of each head, for worst_rel */
        dp_place at;
        in->place(in->ctx, row, &at);
        head_w[at.head] += measure(in, row).want2, head_n[at.head]++;
    }
    for (int64_t row = 0; row < in->rows; row++) {
        dp_place at;
        in->place(in->ctx, row, &at);
        const row_error e = measure(in, row);
        const int z = at.rank * in->heads + at.head;
        const double rms = head_n[at.head] ? sqrt(head_w[at.head] / head_n[at.head]) : 0;
        const int in_poison = at.chunk >= 0 && poison[at.chunk * in->heads + at.head];
        if (!e.finite_want || (in_poison && !e.finite_got)) {
            if (!e.finite_want && e.finite_got) wrong_class++, note_over(in, j, row, &e, &at), note_worst(in, j, row, &e, &at, INFINITY), top = INFINITY;
            else if (e.finite_want) contaminated++;
            continue;
        }
        seen[z] = 1, err[z] += e.err2, want[z] += e.want2;
        E += e.err2, W += e.want2;
        cells_add(in, &cell, row, &at, &e, rms);
        const double rel = e.err2 == 0 ? 0 : rms > 0 ? sqrt(e.err2) / rms : INFINITY;
        if (rel > top) top = rel, note_worst(in, j, row, &e, &at, rel);
        if (!in->bound) continue;
        if (!isfinite(e.bound2) && isfinite(e.err2)) {
            unbounded++;
            continue;
        }
        judged++;
        B += e.bound2, BW += e.want2;
        const double ratio = e.err2 == 0 ? 0 : e.bound2 > 0 && isfinite(e.err2) ? sqrt(e.err2 / e.bound2) : INFINITY;
        if (!(ratio <= j->ratio)) j->ratio = ratio, j->over = at;
        if (!(ratio <= rat[at.rank])) rat[at.rank] = ratio;
        if (!(ratio <= 1)) note_over(in, j, row, &e, &at);
    }
    j->rel_fro = E == 0 ? 0 : W > 0 ? sqrt(E / W) : INFINITY;
    j->per_rank = dp_doubles(in->N), j->per_head = dp_doubles(nh), j->per_rank_ratio = rat;
    for (int r = 0; r < in->N; r++) {
        double e = 0, w = 0;
        int any = 0;
        for (int h = 0; h < in->heads; h++) {
            const int z = r * in->heads + h;
            j->per_head[z] = !seen[z] ? NAN : err[z] == 0 ? 0 : want[z] > 0 ? sqrt(err[z] / want[z]) : INFINITY;
            any |= seen[z], e += err[z], w += want[z];
        }
        j->per_rank[r] = !any ? NAN : e == 0 ? 0 : w > 0 ? sqrt(e / w) : INFINITY;
    }
    if (in->bound) j->bound = !judged ? INFINITY : BW > 0 ? sqrt(B / BW) : 0;
    if (wrong_class) {
        j->verdict = DP_FAIL;
        snprintf(j->why, sizeof j->why, "%lld rows are finite where the truth is not", (long long)wrong_class);
    } else if (!in->bound) {
        j->verdict = DP_UNJUDGED;
        snprintf(j->why, sizeof j->why, "%s", in->why_unjudged ? in->why_unjudged : "no bound is derived for this tensor");
    } else if (!judged) {
        j->verdict = contaminated || unbounded ? DP_UNJUDGED : DP_PASS;
        if (j->verdict == DP_UNJUDGED) snprintf(j->why, sizeof j->why, "no row has a useful bound");
    } else if (j->ratio <= 1 && j->bound >= 1 && BW > 0) {
        j->verdict = DP_UNJUDGED;
        snprintf(j->why, sizeof j->why, "within its bound, but the bound is %.2g times the tensor itself", j->bound);
    } else if (j->ratio <= 1) {
        j->verdict = DP_PASS;
        if (contaminated + unbounded)
            snprintf(j->why, sizeof j->why, "%lld of %lld rows not judged: %lld beside a non-finite input, %lld without a useful bound", (long long)(contaminated + unbounded),
                     (long long)in->rows, (long long)contaminated, (long long)unbounded);
    } else {
        j->verdict = DP_FAIL;
        snprintf(j->why, sizeof j->why, "error is %.3g times its bound", j->ratio);
    }
    if (j->verdict == DP_PASS || j->verdict == DP_FAIL) j->tier = "bound";
    judge_expected(in, &cell, j);
    if (in->tokens > 0) windows(in, j);
    free(cell.err2), free(cell.want2), free(cell.floor2), free(cell.rows), free(cell.belong), free(cell.at);
    free(err), free(want), free(head_w), free(head_n), free(seen), free(poison);
}

double dp_judgement_times(const dp_judgement *j) { return j->tier && !strcmp(j->tier, "expected") ? j->expected.excess : j->ratio; }

int dp_judgement_says_more(const dp_judgement *a, const dp_judgement *b) {
    const int x = a && !strcmp(a->tier, "expected"), y = !strcmp(b->tier, "expected");
    return !a || (x == y ? dp_judgement_times(b) > dp_judgement_times(a) : x);
}

const dp_place *dp_judgement_place(const dp_judgement *j) {
    const int known = j->over.rank >= 0 && (j->ratio > 1 || (j->verdict == DP_FAIL && !strcmp(j->tier, "expected")));
    return known ? &j->over : &j->worst;
}

void dp_judgement_free(dp_judgement *j) {
    free(j->per_rank), free(j->per_head), free(j->per_rank_ratio), free(j->window);
    j->per_rank = j->per_head = j->per_rank_ratio = j->window = NULL;
}
