/* The verdict on one tensor: rows are measured once, then held against their bounds, then against
 * draws of the design.
 */
#include "compare_impl.h"
#include "limits_out.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define WINDOW 64

const char *const dp_verdict_names[DP_NVERDICTS] = {"pass", "fail", "skipped", "unjudged"};

/* ---- rows ------------------------------------------------------------------------------------ */

static void measure_entry(dp_measured *r, int i, double got, double want, double d) {
    const int known = isfinite(want) != 0, given = isfinite(got) != 0;
    r->known += known;
    r->wrong += !known && given;
    r->lost += known && !given;
    if (known) r->want2 += want * want;
    if (known && isfinite(d)) r->err2 += d * d;
    const double size = known && isfinite(d) ? fabs(d) : known || given ? INFINITY : -1;
    if (size <= r->worst_err) return;
    r->worst_err = size;
    r->worst = i;
}

static void allow_loss(dp_comparison *c, int64_t z, double lost) {
    dp_measured *r = &c->row[z];
    if (!(lost > 0) || r->err == 0) return;
    const double left = r->err > lost ? 1 - lost / r->err : 0;
    for (int i = 0; i < c->in->width; i++)
        c->err[z * c->in->width + i] *= left;
    r->err2 *= left * left;
    r->err = r->err2 > DP_SQUARE_LEAST && isfinite(r->err2) ? sqrt(r->err2) : r->err * left;
}

/* The power of two of a number that is not 0. */
static double power_of(double x) {
    int e;
    frexp(x, &e);
    return ldexp(1, e < 1000 ? e : 1000);
}

/* The root of a sum of squares, from the n entries where those left the range of fp64. Entries
 * without a value count nothing. */
static double norm_of(double square, const double *x, const double *want, int64_t n) {
    if (square > DP_SQUARE_LEAST && isfinite(square)) return sqrt(square);
    double top = 0, sum = 0;
    for (int64_t i = 0; i < n; i++)
        if (isfinite(want[i]) && isfinite(x[i])) top = fmax(top, fabs(x[i]));
    if (top == 0) return 0;
    const double unit = power_of(top);
    for (int64_t i = 0; i < n; i++)
        if (isfinite(want[i]) && isfinite(x[i])) sum += x[i] / unit * (x[i] / unit);
    return sqrt(sum) * unit;
}

/* The size of a row that may underflow. */
static double smallest(const dp_compare_in *in) { return in->tiny * sqrt((double)in->width); }

static void measure(dp_comparison *c, int64_t z) {
    const dp_compare_in *in = c->in;
    dp_measured *r = &c->row[z];
    r->worst_err = -1;
    in->place(in->ctx, z, &r->at);
    for (int i = 0; i < in->width; i++) {
        const int64_t at = z * in->width + i;
        const double low = in->want_lo ? in->want_lo[at] : 0;
        c->err[at] = (in->got[at] - in->want[at]) - low;
        measure_entry(r, i, in->got[at], in->want[at], c->err[at]);
    }
    r->raw2 = r->err2;
    const double *want = in->want + z * in->width;
    r->size = norm_of(r->want2, want, want, in->width);
    r->raw = r->err = norm_of(r->err2, c->err + z * in->width, want, in->width);
    if (in->lost) allow_loss(c, z, in->lost[z]);
    r->radius = in->rad && isfinite(in->rad[z]) ? in->rad[z] : 0;
    r->bound = in->bound ? in->bound[z] : 0;
    r->limit = r->bound + r->radius;
    if (r->size < DP_NORM_LEAST) r->limit += r->size > 0 ? DP_NORM_LEAST : 0x1p-1022;
}

/* Chunks and heads in which the truth is not finite: [chunks][heads], to be freed. */
static unsigned char *poisoned_chunks(const dp_comparison *c) {
    int chunks = 0;
    for (int64_t z = 0; z < c->in->rows; z++)
        if (c->row[z].at.chunk >= chunks) chunks = c->row[z].at.chunk + 1;
    unsigned char *poison = dp_calloc((size_t)chunks * c->in->heads, 1);
    for (int64_t z = 0; z < c->in->rows; z++) {
        const dp_measured *r = &c->row[z];
        if (r->at.chunk >= 0 && r->known < c->in->width)
            poison[r->at.chunk * c->in->heads + r->at.head] = 1;
    }
    return poison;
}

/* Without a bound: has the row no value, or, as its squares overflow, is it as wrong as zeros? */
static int is_beyond_all(const dp_measured *r) {
    return isinf(r->err) || (isinf(r->err2) && r->err >= r->size);
}

static void classify(dp_comparison *c) {
    unsigned char *poison = poisoned_chunks(c);
    for (int64_t z = 0; z < c->in->rows; z++) {
        dp_measured *r = &c->row[z];
        const int beside = r->at.chunk >= 0 && poison[r->at.chunk * c->in->heads + r->at.head];
        if (r->wrong)
            r->kind = ROW_WRONG_CLASS;
        else if (!r->known)
            r->kind = ROW_WITHOUT_TRUTH;
        else if (beside && r->lost == r->known)
            r->kind = ROW_BESIDE;
        else if (!beside && r->lost)
            r->err2 = r->raw2 = r->err = r->raw = INFINITY;
        if (!isfinite(r->limit)) r->limit = INFINITY;
        if (r->kind == ROW_OPEN && c->in->bound && (isfinite(r->limit) || is_beyond_all(r)))
            r->kind = ROW_BOUND;
    }
    free(poison);
}

/* The square of a norm in units of the comparison's scale. */
static double square(const dp_comparison *c, double norm, double norm2) {
    return c->scale == 1 ? norm2 : norm / c->scale * (norm / c->scale);
}

static void scale_of_heads(dp_comparison *c) {
    double *n = dp_doubles(c->in->heads), top = 0;
    for (int64_t z = 0; z < c->in->rows; z++)
        top = fmax(top, c->row[z].size);
    c->scale = top <= smallest(c->in) || (top > DP_NORM_LEAST && top < 0x1p400) ? 1 : power_of(top);
    for (int64_t z = 0; z < c->in->rows; z++) {
        c->rms[c->row[z].at.head] += square(c, c->row[z].size, c->row[z].want2);
        n[c->row[z].at.head]++;
    }
    for (int h = 0; h < c->in->heads; h++)
        c->rms[h] = n[h] > 0 ? c->scale * sqrt(c->rms[h] / n[h]) : 0;
    free(n);
}

static double quotient(double err, double size) {
    return err == 0 ? 0 : size > 0 && isfinite(err) ? err / size : INFINITY;
}

static dp_row row_at(const dp_comparison *c, int64_t z) {
    const dp_measured *r = &c->row[z];
    const int64_t at = z * c->in->width + r->worst;
    return (dp_row){.at = r->at,
                    .index = r->worst,
                    .got = c->in->got[at],
                    .want = c->in->want[at],
                    .err = r->raw,
                    .bound = c->in->bound ? r->limit + (c->in->lost ? c->in->lost[z] : 0) : NAN,
                    .size = r->size};
}

static void note_over(dp_comparison *c, int64_t z) {
    c->j->last = row_at(c, z);
    if (!c->j->nover++) c->j->first = c->j->last;
}

/* ---- what is said of the whole tensor -------------------------------------------------------- */

/* Errors of ranks and heads, and of the tensor. */
static void sum_up(dp_comparison *c) {
    const dp_compare_in *in = c->in;
    dp_judgement *j = c->j;
    const int n = in->N * in->heads;
    double *err = dp_doubles(n + in->N + 1);
    double *want = dp_doubles(n + in->N + 1);
    int *seen = dp_calloc((size_t)(n + in->N + 1), sizeof *seen);
    for (int64_t z = 0; z < in->rows; z++) {
        const dp_measured *r = &c->row[z];
        if (r->kind > ROW_BOUND) continue;
        const int unit[] = {r->at.rank * in->heads + r->at.head, n + r->at.rank, n + in->N};
        for (int i = 0; i < 3; i++) {
            err[unit[i]] += square(c, r->raw, r->raw2);
            want[unit[i]] += square(c, r->size, r->want2);
            seen[unit[i]] = 1;
        }
    }
    j->per_head = dp_doubles(n);
    j->per_rank = dp_doubles(in->N);
    for (int i = 0; i < n; i++)
        j->per_head[i] = seen[i] ? quotient(sqrt(err[i]), sqrt(want[i])) : NAN;
    for (int r = 0; r < in->N; r++)
        j->per_rank[r] = seen[n + r] ? quotient(sqrt(err[n + r]), sqrt(want[n + r])) : NAN;
    j->rel_fro = quotient(sqrt(err[n + in->N]), sqrt(want[n + in->N]));
    free(err);
    free(want);
    free(seen);
}

/* Is the row 0, and the truth about as large as rows of its head, or beyond the bound? */
static int is_blank(const dp_comparison *c, int64_t z) {
    const dp_measured *r = &c->row[z];
    for (int64_t i = 0; i < c->in->width; i++)
        if (c->in->got[z * c->in->width + i] != 0) return 0;
    return r->size > 1e-3 * c->rms[r->at.head] || (r->kind == ROW_BOUND && r->err > r->limit);
}

static void worst_rows(dp_comparison *c) {
    dp_judgement *j = c->j;
    double top = -1;
    j->per_rank_ratio = dp_doubles(c->in->N);
    for (int r = 0; r < c->in->N; r++)
        j->per_rank_ratio[r] = NAN;
    for (int64_t z = 0; z < c->in->rows; z++) {
        const dp_measured *r = &c->row[z];
        if (r->kind == ROW_WRONG_CLASS) note_over(c, z);
        if (r->kind > ROW_BOUND && r->kind != ROW_WRONG_CLASS) continue;
        j->nblank += is_blank(c, z);
        const double rel = r->kind <= ROW_BOUND ? quotient(r->err, c->rms[r->at.head]) : INFINITY;
        if (rel > top) {
            top = j->worst_rel = rel;
            j->worst = row_at(c, z);
        }
        if (r->kind != ROW_BOUND) continue;
        const double ratio = isfinite(r->limit) ? quotient(r->err, r->limit) : INFINITY;
        if (!(ratio <= j->ratio)) {
            j->ratio = ratio;
            j->over = row_at(c, z);
        }
        if (!(ratio <= j->per_rank_ratio[r->at.rank])) j->per_rank_ratio[r->at.rank] = ratio;
        if (!(ratio <= 1)) note_over(c, z);
    }
}

/* Largest over heads of |error|_F / |truth|_F in each window of 64 tokens. */
static void windows(dp_comparison *c) {
    const dp_compare_in *in = c->in;
    const int n = (int)((in->tokens + WINDOW - 1) / WINDOW);
    double *err = dp_doubles((int64_t)n * in->heads);
    double *want = dp_doubles((int64_t)n * in->heads);
    for (int64_t z = 0; z < in->rows; z++) {
        const dp_measured *r = &c->row[z];
        err[r->at.token / WINDOW * in->heads + r->at.head] += r->raw2;
        want[r->at.token / WINDOW * in->heads + r->at.head] += r->want2;
    }
    c->j->nwindow = n;
    c->j->window = dp_doubles(n);
    for (int64_t z = 0; z < (int64_t)n * in->heads; z++) {
        const double x = want[z] > 0 ? sqrt(err[z] / want[z]) : 0;
        if (x > c->j->window[z / in->heads]) c->j->window[z / in->heads] = x;
    }
    free(err);
    free(want);
}

/* ---- the bound tier -------------------------------------------------------------------------- */

typedef struct {
    int64_t bound, beside, wrong, open; /* rows of each kind */
    double bound2, want2;               /* of those with a bound */
} counts;

static counts count_rows(const dp_comparison *c) {
    counts n = {0};
    for (int64_t z = 0; z < c->in->rows; z++) {
        const dp_measured *r = &c->row[z];
        n.beside += r->kind == ROW_BESIDE;
        n.wrong += r->kind == ROW_WRONG_CLASS;
        n.open += r->kind == ROW_OPEN;
        if (r->kind != ROW_BOUND) continue;
        n.bound++;
        n.bound2 += square(c, r->limit, r->limit * r->limit);
        n.want2 += square(c, r->size, r->want2);
    }
    return n;
}

static void decide(dp_judgement *j, dp_verdict verdict, const char *tier) {
    j->verdict = verdict;
    j->tier = tier;
}

typedef struct {
    char text[24];
} times_text;

/* Three digits: 6.38, 638, 6,380; beyond a million 6.38e+06. */
static times_text times_of(double x) {
    times_text t;
    const long long n = x >= 999.5 && x < 1e6 ? 10 * llround(x / 10) : 0;
    if (n)
        snprintf(t.text, sizeof t.text, "%lld,%03lld", n / 1000, n % 1000);
    else
        snprintf(t.text, sizeof t.text, "%.3g", x);
    return t;
}

static void fail_by_bound(dp_comparison *c) {
    dp_judgement *j = c->j;
    decide(j, DP_FAIL, "bound");
    j->failed = j->over;
    j->times = j->ratio;
    snprintf(j->why, sizeof j->why,
             "error is %s times its bound (|error| %.3g, bound %.3g, |truth| %.3g of the row; "
             "rows of the head %.3g)",
             times_of(j->ratio).text, j->over.err, j->over.bound, j->over.size,
             c->rms[j->over.at.head]);
}

static void judge_bounds(dp_comparison *c, const counts *n) {
    dp_judgement *j = c->j;
    const dp_compare_in *in = c->in;
    if (n->wrong) {
        decide(j, DP_FAIL, "bound");
        j->failed = j->first;
        snprintf(j->why, sizeof j->why,
                 "%lld rows have entries that are finite where the truth is not",
                 (long long)n->wrong);
    } else if (!in->bound) {
        j->verdict = DP_UNJUDGED;
        snprintf(j->why, sizeof j->why, "%s",
                 in->why_unjudged ? in->why_unjudged : "no bound is derived for this tensor");
    } else if (!n->bound) {
        decide(j, n->beside + n->open ? DP_UNJUDGED : DP_PASS, n->beside + n->open ? "" : "bound");
        if (j->verdict == DP_UNJUDGED) snprintf(j->why, sizeof j->why, "no row has a useful bound");
    } else if (j->ratio > 1 && (!in->bound_shown || isinf(j->over.err) || isinf(j->over.bound))) {
        fail_by_bound(c);
    } else if (j->ratio <= 1 && j->bound >= 1 && n->want2 > 0) {
        j->verdict = DP_UNJUDGED;
        snprintf(j->why, sizeof j->why, "within its bound, but the bound is %.2g times the tensor",
                 j->bound);
    } else if (in->bound_shown) {
        j->verdict = DP_UNJUDGED;
        snprintf(j->why, sizeof j->why, "no bound is derived for this design");
    } else {
        decide(j, DP_PASS, "bound");
        if (n->beside + n->open)
            snprintf(j->why, sizeof j->why,
                     "%lld of %lld rows not judged: %lld beside a non-finite input, %lld without a "
                     "useful bound",
                     (long long)(n->beside + n->open), (long long)in->rows, (long long)n->beside,
                     (long long)n->open);
    }
}

/* ---- the expected tier ----------------------------------------------------------------------- */

/* Which of a head's places or channels, where one decided. */
static void name_unit(const dp_comparison *c, char *text, size_t size) {
    const dp_levels_result *e = &c->j->expected;
    const int64_t at = e->at[e->level].at;
    *text = 0;
    if (e->level == DP_LEVEL_POSITION)
        snprintf(text, size, ": place %lld of each", (long long)(at % DP_POSITIONS));
    if (e->level == DP_LEVEL_CHANNEL)
        snprintf(text, size, ": %lld", (long long)(at % c->in->draws->width));
}

static void fail_by_draws(dp_comparison *c) {
    dp_judgement *j = c->j;
    const dp_levels_result *e = &j->expected;
    const dp_level_result *l = &e->at[e->level];
    char unit[60];
    name_unit(c, unit, sizeof unit);
    decide(j, DP_FAIL, "expected");
    j->failed = row_at(c, e->row / (c->in->subrows ? c->in->subrows : 1));
    j->times = e->excess;
    if (e->level < DP_LEVEL_FACTOR)
        snprintf(j->why, sizeof j->why,
                 "error is %s times the rounding error expected for this design (limit %.3g), %s%s",
                 times_of(l->ratio).text, l->limit, dp_level_what[e->level], unit);
    else
        snprintf(j->why, sizeof j->why,
                 "%s times the rounding error expected for this design (limit %.3g) lies %s",
                 times_of(l->ratio).text, l->limit, dp_level_what[e->level]);
}

/* <err, d> over what is looked at, d of unit length. */
static double component_along(const dp_subject_errors *x, int64_t windows, int d) {
    double sum = 0;
    double length2 = 0;
    for (int64_t w = 0; w < windows; w++) {
        if (x->unit[w] < 0) continue;
        sum += x->along[d * windows + w];
        length2 += x->length2[d * windows + w];
    }
    return length2 > 0 ? sum / sqrt(length2) : 0;
}

/* The power of both tiers: by head the least |c - 1| of the tensor times c. And which
 * rows lie under a limit. */
typedef struct {
    double tensor, *head;   /* [heads] INFINITY: nothing */
    unsigned char *covered; /* [rows] */
} power;

static power power_new(const dp_comparison *c) {
    power p = {INFINITY, dp_doubles(c->in->heads), dp_calloc((size_t)c->in->rows, 1)};
    for (int h = 0; h < c->in->heads; h++)
        p.head[h] = INFINITY;
    return p;
}

static void power_free(power *p) {
    free(p->head);
    free(p->covered);
}

static void see_by_bounds(const dp_comparison *c, power *p) {
    for (int64_t z = 0; z < c->in->rows && !c->in->bound_shown; z++) {
        const dp_measured *r = &c->row[z];
        if (r->kind != ROW_BOUND) continue;
        p->covered[z] = 1;
        if (!(r->size > 0)) continue;
        const double seen = r->limit / r->size;
        p->tensor = fmin(p->tensor, seen);
        p->head[r->at.head] = fmin(p->head[r->at.head], seen);
    }
}

static void keep_limits(const dp_comparison *c, const dp_levels_in *l) {
    double *bound = malloc((size_t)c->in->rows * sizeof *bound);
    for (int64_t z = 0; bound && z < c->in->rows; z++)
        bound[z] = c->row[z].kind == ROW_BOUND ? c->row[z].limit : INFINITY;
    if (bound) dp_limits_add(c->in, bound, l);
    free(bound);
}

static void judge_levels(const dp_comparison *c, const dp_subject_errors *x, power *p) {
    const dp_compare_in *in = c->in;
    dp_levels_in l = {.draws = in->draws,
                      .err2 = x->err2,
                      .want2 = x->want2,
                      .floor2 = x->floor2,
                      .freedom = in->freedom,
                      .column2 = x->column2,
                      .want_column2 = x->want_column2,
                      .floor_column2 = x->floor_column2,
                      .column_rows = x->column_rows,
                      .column_head = x->column_head,
                      .position = x->position,
                      .window = x->window_of_part,
                      .unit = x->unit,
                      .heads = in->heads,
                      .units = in->N * in->heads,
                      .by_token = in->tokens > 0 || in->subrows > 1,
                      .allowance = in->allowance,
                      .head_seen = p->head};
    for (int d = 0; d < DP_NDIRECTIONS; d++) {
        l.along[d] = component_along(x, in->draws->windows, d);
        l.stored[d] = x->stored[d];
    }
    dp_levels_judge(&l, &c->j->expected);
    keep_limits(c, &l);
}

static void judge_draws(dp_comparison *c, power *p) {
    dp_judgement *j = c->j;
    dp_subject_errors x = dp_subject_errors_of(c);
    judge_levels(c, &x, p);
    const int judged = isfinite(j->expected.expected) && !isnan(j->expected.excess);
    if (judged) p->tensor = fmin(p->tensor, j->expected.seen);
    for (int64_t z = 0; z < c->in->rows && judged; z++)
        p->covered[z] |= x.window_of_part[z * x.map.subrows] >= 0;
    dp_subject_errors_free(&x);
    if (j->verdict == DP_FAIL || isnan(j->expected.excess)) return;
    if (j->expected.excess > 1) {
        fail_by_draws(c);
    } else if (judged) {
        if (j->verdict == DP_UNJUDGED) j->why[0] = 0;
        decide(j, DP_PASS, "expected");
    }
}

/* ---- what no limit covers -------------------------------------------------------------------- */

/* Is the truth of a row known to no better than 2^-10 of it and of a typical row of its head?
 * Inputs that are not finite make infinite radii, which do not count. */
static int is_vague(const dp_comparison *c, const dp_measured *r, double *over) {
    const double rms = c->rms[r->at.head],
                 size = c->scale == 1 ? sqrt(r->want2 + rms * rms) : fmax(r->size, rms);
    if (r->kind > ROW_BOUND || !(r->radius > fmax(0x1p-10 * size, c->in->tiny))) return 0;
    if (r->size == 0 && r->raw == 0) return 0;
    *over = fmax(*over, r->radius / size);
    return 1;
}

static int64_t count_vague(const dp_comparison *c, double *over) {
    int64_t n = 0;
    for (int64_t z = 0; z < c->in->rows; z++)
        n += is_vague(c, &c->row[z], over);
    return n;
}

/* Rows with values that lie under no limit. Zeros where the truth is zero are right. */
static int64_t uncovered(const dp_comparison *c, const power *p) {
    int64_t n = 0;
    for (int64_t z = 0; z < c->in->rows; z++) {
        const dp_measured *r = &c->row[z];
        n += r->kind <= ROW_BOUND && !p->covered[z] && !(r->size == 0 && r->raw == 0);
    }
    return n;
}

/* The power over the tensor, and over the head of which it is least. */
static void set_power(dp_comparison *c, const power *p) {
    dp_judgement *j = c->j;
    j->seen = 1 + p->tensor;
    for (int h = 0; h < c->in->heads; h++) {
        if (!(c->rms[h] > smallest(c->in)) || 1 + p->head[h] <= j->seen_head) continue;
        j->seen_head = 1 + p->head[h];
        j->blind_head = h;
    }
}

static int wants_zero(const dp_comparison *c) {
    for (int64_t z = 0; z < c->in->rows; z++)
        if (c->row[z].size > 0) return 0;
    return 1;
}

static int all_zero(const dp_comparison *c) {
    for (int64_t z = 0; z < c->in->rows; z++)
        if (c->row[z].known < c->in->width || c->row[z].raw > 0) return 0;
    return wants_zero(c);
}

static void leave_unjudged(dp_comparison *c, const power *p) {
    dp_judgement *j = c->j;
    set_power(c, p);
    if (j->verdict == DP_UNJUDGED && all_zero(c)) {
        decide(j, DP_PASS, "exact");
        j->why[0] = 0;
    }
    if (j->verdict != DP_PASS) return;
    double radius = 0;
    const int64_t open = uncovered(c, p), vague = count_vague(c, &radius);
    const int sums = c->in->of_heads && !wants_zero(c);
    const double seen = sums ? j->seen : j->seen_head;
    const int nothing = isnan(j->seen_head); /* the truth is 0, or near it, in every head */
    const int below = nothing && !c->in->may_vanish && j->seen > 2 && !wants_zero(c);
    const int whole = c->in->seen_most > 0 && !nothing && j->seen > c->in->seen_most;
    if (!open && !vague && !(seen > 2) && !whole && !below) return;
    decide(j, DP_UNJUDGED, "");
    if (open)
        snprintf(j->why, sizeof j->why, "%lld of %lld rows lie under no limit", (long long)open,
                 (long long)c->in->rows);
    else if (below)
        snprintf(j->why, sizeof j->why,
                 "zeros would pass: the truth is no larger than what may underflow");
    else if (whole && !(seen > 2))
        snprintf(j->why, sizeof j->why, "the tensor times %.3g would pass", j->seen);
    else if (!(seen > 2))
        snprintf(j->why, sizeof j->why,
                 "the truth's radius is up to %.2g times the truth in %lld of %lld rows", radius,
                 (long long)vague, (long long)c->in->rows);
    else if (isfinite(seen))
        snprintf(j->why, sizeof j->why,
                 "zeros in head %d would pass: limits there are %.3g times the truth",
                 j->blind_head, seen - 1);
    else
        snprintf(j->why, sizeof j->why, "zeros in head %d would pass: no limit is finite there",
                 j->blind_head);
}

/* ---- all of it ------------------------------------------------------------------------------- */

static const dp_row NOWHERE = {.at = {-1, -1, -1, -1, -1}};

void dp_compare(const dp_compare_in *in, dp_judgement *j) {
    *j = (dp_judgement){.N = in->N,
                        .heads = in->heads,
                        .bound = NAN,
                        .ratio = NAN,
                        .times = NAN,
                        .expected = {.excess = NAN, .expected = NAN},
                        .before = {.excess = NAN},
                        .tier = "",
                        .worst = NOWHERE,
                        .over = NOWHERE,
                        .failed = NOWHERE,
                        .seen = INFINITY,
                        .seen_head = NAN,
                        .blind_head = -1};
    dp_comparison c = {.in = in, .j = j};
    c.err = dp_doubles(in->rows * in->width);
    c.row = dp_calloc((size_t)in->rows, sizeof *c.row);
    c.rms = dp_doubles(in->heads);
    snprintf(j->name, sizeof j->name, "%s", in->name);
    for (int64_t z = 0; z < in->rows; z++)
        measure(&c, z);
    scale_of_heads(&c);
    classify(&c);
    sum_up(&c);
    worst_rows(&c);
    const counts n = count_rows(&c);
    power p = power_new(&c);
    if (in->bound) j->bound = !n.bound ? INFINITY : n.want2 > 0 ? sqrt(n.bound2 / n.want2) : 0;
    judge_bounds(&c, &n);
    see_by_bounds(&c, &p);
    if (in->draws && c.scale == 1)
        judge_draws(&c, &p);
    else
        keep_limits(&c, NULL);
    leave_unjudged(&c, &p);
    power_free(&p);
    if (in->tokens > 0) windows(&c);
    j->scale = dp_judgement_row(j)->at.rank >= 0 ? c.rms[dp_judgement_row(j)->at.head] : 0;
    free(c.err);
    free(c.row);
    free(c.rms);
}

int dp_judgement_marginal(const dp_judgement *j) {
    return j->times > 1 / DP_MARGIN && j->times <= DP_MARGIN;
}

int dp_judgement_says_more(const dp_judgement *a, const dp_judgement *b) {
    if (!a) return 1;
    if (!a->flaw != !b->flaw) return !a->flaw;
    const int x = !strcmp(a->tier, "expected");
    const int y = !strcmp(b->tier, "expected");
    return x == y ? b->times > a->times : x;
}

const dp_row *dp_judgement_row(const dp_judgement *j) {
    return j->failed.at.rank >= 0 ? &j->failed : &j->worst;
}

void dp_judgement_free(dp_judgement *j) {
    free(j->per_rank);
    free(j->per_head);
    free(j->per_rank_ratio);
    free(j->window);
    j->per_rank = j->per_head = j->per_rank_ratio = j->window = NULL;
}
