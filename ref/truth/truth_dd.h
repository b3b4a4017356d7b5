/* ref/truth/truth_dd.h - the truth in double-double arithmetic; shared by the files of the truth
 * and its tests, nobody else includes it.
 *
 * A number is an unevaluated sum h + l of two doubles. Rows of K numbers are stored as [2][Kp]: all
 * h, then all l, Kp = K rounded up to TR_DD_LANES, zeros behind K. Lane i of a vector of 8 holds
 * the rows k = i mod 8. A sum over k is 8 sums, then i + 4, i + 2, i + 1. That order is part of the
 * definition, so the bits do not depend on the instruction set, the number of threads or
 * (gpu/truth.cu) the device.
 *
 * ERRORS. Let u = 2^-53. An operation errs by at most TR_DD_U = 2^-98 = 256 u^2, as
 * ref/truth/truth_bound.c assumes. It uses no more than
 *     product                  |ab (1 + e)|, |e| <= TR_DD_U
 *     sum                      a (1 + e) + b (1 + e')
 *     sum of m products        error <= gamma_(m+1) sum |a||b|
 *     exp, log1p, sigmoid, 1/sqrt of truth_gate.c    at most as many TR_DD_U as it counts roundings
 * two_sum and two_prod are exact. Barring underflow, to first order with the slack of at least 2
 * left below covering the rest:
 *     mul      dropped al bl: u^2; cross terms, their sum and its addition to an error <= 3u |ab|:
 *              7 u^2; fast: 1 u^2.                                                        <= 9 u^2
 *     add      l parts <= u |a| + u |b|,
 *              two additions on quantities <= 3u (|a| + |b|), fast          <= 8 u^2 (|a| + |b|)
 *              (fast on a cancelled sum loses at most 6 u^2 (|a| + |b|):
 *              its second argument is below 3u (|a| + |b|))
 *     dot      one lane, m terms, A = sum |a||b|: terms 8 u^2 A;
 *              acc.l after i terms <= (i + 3) u A,
 *              so its m additions lose at most (m^2/2 + 4m + 4) u^2 A;
 *              three joins 2 u (m + 6) u A each.
 *              In all <= (m^2/2 + 10m + 48) u^2 A with m = K/8 <= 128:
 *              below 256 (K + 1) u^2 A for every K <= 1024; over 8 columns in lanes: m = 1
 *              over w <= 8 columns of up to 8 rows of a token, which share an entry: m <= 8 w, no
 *              joins: <= (32 w^2 + 80 w + 48) u^2 A, below 256 (w + 5) u^2 A
 *     div      q + correction, correction <= 2u |q| with relative error 4u               <= 10 u^2
 *     expm1(s 2^n), |s| <= 0.0014, n <= 9:
 *              Taylor to s^10/10! leaves 2^-120 of s, the part in double is below 2^-57 of s
 *              (so 2^-108), the last additions 12 u^2; each doubling q -> 2q + q^2 adds at most
 *              (8 + 9 q) u^2 + its factor <= 1 + q/2, sum of q <= 1, so
 *              <= (12 + 9 * 8 + 9) * 1.5 u^2                                             <= 140 u^2
 *     exp      argument reduced with an error of 2^-120 + 2 u^2 |x| (x.l; 0 for an exact x), expm1
 *              weighs 0.6: <= 90 u^2, and 2 u^2 |x|, which is inside |x| eps_x of truth_gate.c
 *              (eps_x >= 10 TR_DD_U wherever x is not an exact double)
 *     log1p    y0 good to 2^-49: z^3 < 2^-147 e;
 *              z: 80 u^2 |m| (n = 9, arguments negative: factors <= 1) + 26 u^2 e,
 *              |m| <= e, e <= 1.45 log1p(e), last addition 8 u^2                         <= 170 u^2
 *     1/sqrt   r good to 2^-51.5: one correction leaves 3/8 (2^-50.5)^2 = 23 u^2, its own rounding
 *              4 u^2, sum of squares as dot
 * Tests measure each against MPFR (harness/tests/test_truth_dd.c): exp 2^-102. Underflow: an
 * operation loses at most 2^-1072 more. Inputs are refused above TR_DD_MAX = 2^30. A step therefore
 * loses less than 2^-868. A loss of 2^-1072 meets K V <= 2^20 numbers, 2^4 rows and two products of
 * three factors below 2^30 each. (A radius is infinite where exp(-g) is above it.)
 * TR_DD_TINY = 2^-860 is added in every step, TR_DD_FLOOR = 2^-900 to every row.
 */
#pragma once
#define DP_OWN_OPERATIONS /* of ref/vocabulary/activations.h */
#include "ref/vocabulary/problem.h"
#include <stdint.h>
DP_C_BEGIN

#define TR_DD_LANES 8
#define TR_DD_COLS 8 /* state columns of a task */
#define TR_DD_BITS 98
#define TR_DD_U 0x1p-98
#define TR_DD_MAX 0x1p30
#define TR_DD_MAX_K 1024
#define TR_DD_MAX_ROWS 64 /* of a token; of its entries, too */
#define TR_DD_TINY 0x1p-860
#define TR_DD_FLOOR 0x1p-900

/* One token's gates: raw, bias, in (1 for a channel, 0 for padding) [Kp] doubles; d = exp(g), dx =
 * dg/dx, dA = dg/dA_log rows, dx NULL: neither. */
typedef struct {
    int64_t Kp;
    dp_gate form;
    double a[2], lower_bound; /* exp(A_log) */
    const double *raw, *bias, *in;
    double *d, *dx, *dA;
    /* out, over the channels: max d, max d |g|, max |dg/dx|, sum of squares of dg/dA_log; good to
     * 2^-40 */
    double top[4];
} tr_dd_gate;

/* A norm of rows (recurrence.h). */
typedef struct {
    int power;
    double mean, eps; /* mean: its number m */
} tr_dd_norm;

/* n tokens of one head, of `rows` rows each (recurrence.h): q, d [n] rows of K numbers; strength
 * [n][rows][2]. Row j writes along entry write[j] and reads along read[j] (-1: nothing), entry e of
 * token i is the row entry[e] + i ld. Rows read and write together in groups of at_once. */
typedef struct tr_dd_rows {
    int64_t Kp, n, ld;
    int rows, entries, at_once, before;
    int write[TR_DD_MAX_ROWS], read[TR_DD_MAX_ROWS];
    const double *q, *d, *strength, *entry[TR_DD_MAX_ROWS];
} tr_dd_rows;

/* Values of a row, ld from token to token. h NULL: zeros. l NULL: doubles. */
typedef struct {
    const double *h, *l;
    int64_t ld;
} tr_dd_value;

/* w <= TR_DD_COLS columns. S: their state (later the adjoint), TR_DD_COLS rows. oh, ol: the first
 * column of the first token, ldo from token to token. NULL: no output. */
typedef struct tr_dd_cols {
    int w;
    double scale, *S;
    tr_dd_value value[TR_DD_MAX_ROWS];
    double *oh, *ol;
    int64_t ldo;
} tr_dd_cols;

/* Sums over the task's columns: dq, dg [n] rows, dentry [n][entries] rows, dstrength [n][rows][2].
 * Columns of the values' gradients: dvalue [n][rows][2][TR_DD_COLS]. */
typedef struct {
    double *dq, *dg, *dentry, *dstrength, *dvalue, *G2;
} tr_dd_grads; /* G2: squares (below) of the adjoint before each group of rows */

typedef struct {
    const char *name; /* avx512, avx2, plain; wide: plain, as wide as avx512 */
    void (*over_norm)(int64_t Kp, const tr_dd_norm *n, const double *x, double *y, double *rstd);
    void (*gate)(tr_dd_gate *a);
    void (*power)(const tr_dd_gate *a, double rate, double *out); /* exp(rate g) */
    void (*curve8)(dp_curve curve, const double *x, double *y, double *slope);
    void (*forward)(const tr_dd_rows *b, const tr_dd_cols *c);
    /* tape [n G + 1][COLS] rows, states before each of a token's G groups; E [n][rows][2][COLS] */
    void (*rebuild)(const tr_dd_rows *b, const tr_dd_cols *c, double *tape, double *E);
    void (*backward)(const tr_dd_rows *b, const tr_dd_cols *c, const double *tape, const double *E,
                     const double *dout, const tr_dd_grads *y);
    void (*add_rows)(int64_t Kp, double *into, const double *from);
    void (*mul_rows)(int64_t Kp, double *out, const double *a, const double *b);
    void (*chain_norm)(int64_t Kp, const tr_dd_norm *n, const double *y, const double *rstd,
                       double *dy);
    /* of the leading parts of w rows, summed in a fixed order */
    double (*squares)(int64_t Kp, int w, const double *x);
} tr_dd_lanes;

/* truth_dd_avx512.c and _avx2.c (x86-64 alone), _plain.c, _wide.c. */
extern const tr_dd_lanes tr_dd_avx512, tr_dd_avx2, tr_dd_plain, tr_dd_wide;
/* NULL: that of dp_isa_chosen, else the one of that name; NULL: not here. */
const tr_dd_lanes *tr_dd_choose(const char *name);
extern const char *tr_dd_only; /* tests: the name that every run chooses */

DP_C_END
