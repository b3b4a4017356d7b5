/* harness/verdict/levels.h - is an error more than its design makes of these inputs? The statistics
 * of the expected tier (reports/verdicts.md: what they were measured to do).
 *
 * A tensor's error is compared on several levels, so that each fault is plain on one of them. A
 * fault may lie in one row, one window, one head of one rank, or thinly everywhere:
 *
 *   row     one row of one token                   every   all windows alike: the power mean
 *   window  the rows of one window                         of |err| / E, exponent 2/3
 *   rank    one head on one rank                   factor, offset, truncation
 *   tensor  all of it                                      the error along a direction, with sign
 *   position  one place in the windows of a head   sum     one head's sum over tokens, by shares
 *   channel   one channel of a head over its rows, one column of a state
 *
 * Quadratic levels (row to tensor, position, channel). Units of one head on one rank are a family
 * (positions and channels: of one head). A family whose draws scatter DP_ERRATIC times more than
 * those of the median family is erratic: its draws set no limit of another family. A unit has the
 * error e, D draws d_k, the size w and a floor f. The floor is one rounding of the result,
 * one of terms that cancel, and the radius of the truth.
 *
 *   nu     degrees of freedom of |e|^2: 2 mean^2 / variance of the draws, pooled over units, less
 *          the uncertainty of that estimate. A unit has fewer if its own draws differ more. Upper
 *          limits: for a rank the sum over its windows (Welch and Satterthwaite), for a row at the
 *          end of a sequence its count (draws.h), for a window the sum over its rows, for any
 *          unit its number of entries
 *
 *   d0     prior degrees of freedom: the weight of the family's mean error for a size in the
 *          estimate of a unit's error, at most DP_PRIOR_MOST. It is estimated from the scatter of
 *          the draws about that mean (Smyth 2004, moderated variances). Families of one unit each
 *          share the geometric mean over them.
 *
 *   E^2    (D nu mean d_k^2 + d0 prior w^2) / (D nu + d0) + f^2, d0 = 0 where w = 0
 *
 *   limit  factor max(largest |d_k| / E from the other draws, sqrt F(p; nu, D nu + d0)),
 *          p = DP_ALARM / units; the largest over its family and over all that are not erratic
 *
 * Power. A tensor that is c times the right one has the error |c - 1| w in every unit. It exceeds
 * the unit's limit from |c - 1| = limit E / w on. The least of these over all units, by head, is
 * the factor that a verdict detects.
 *
 * Directions. The summed component has mean m and variance s^2 over draws. The variance pools the
 * draws' totals with DP_INDEPENDENT degrees of freedom of windows taken as independent, doubled:
 *   limit factor (|m| + s sqrt((1 + 1/D) F(p; 1, freedom))), + lean E.
 * Sums. E^2 of a head pools its draws' totals with their shares taken as independent, doubled.
 *
 * The allowances factor, local and lean cover effects that draws do not contain, as other orders of
 * summation (dp_allowance).
 */
#pragma once
#include "draws.h"

#define DP_ALARM 1e-7 /* share of right tensors that one level may fail */
#define DP_PRIOR_MOST 64.0
#define DP_INDEPENDENT 16.0
#define DP_LIMIT_MOST 60.0 /* few draws do not say how rare 10 times is; 60 is no rounding */
#define DP_ROW_NUMBERS 8   /* rows of fewer numbers are left to their windows */
#define DP_POSITIONS 64    /* places in a window */
#define DP_ERRATIC 6.0

/* The allowed difference of a right subject from the pipeline that was drawn, by kind of
 * subject. */
typedef struct {
    double factor; /* on limits of ranks, tensors, channels and sums */
    double local; /* on those of rows, windows and places, where errors gather, and of directions */
    double lean;  /* component of the error along a direction, in units of E */
    /* factor and local of a unit whose E is at least this share of its truth. There a state's short
     * format makes the error. 0: no unit */
    double stored, stored_factor, stored_local;
} dp_allowance;

typedef enum {
    DP_LEVEL_ROW,
    DP_LEVEL_WINDOW,
    DP_LEVEL_RANK,
    DP_LEVEL_TENSOR,
    DP_LEVEL_POSITION,
    DP_LEVEL_CHANNEL,
    DP_LEVEL_EVERY,
    DP_LEVEL_SUM,
    DP_LEVEL_FACTOR,
    DP_LEVEL_OFFSET,
    DP_LEVEL_TRUNCATION,
    DP_NLEVELS
} dp_level;
extern const char *const dp_level_names[DP_NLEVELS];
extern const char *const dp_level_what[DP_NLEVELS]; /* "over one rank and head" */

/* The subject's side: [rows] sums of squares, and where each row belongs. */
typedef struct {
    const dp_draws *draws;
    const double *err2, *want2, *floor2; /* [rows] */
    const double *rows;                  /* [rows] how many rows each stands for; NULL: 1 */
    const double *freedom;               /* [rows] nu at most, by count; NULL: no limit */
    const double *column2, *want_column2, *floor_column2; /* [draws->columns]; NULL: none */
    const double *column_rows;     /* [groups] rows that are looked at; 0: its columns are not */
    const int32_t *column_head;    /* [groups] */
    const int32_t *position;       /* [rows] its place in its window; NULL: none */
    const int32_t *window;         /* [rows] its window; -1: not looked at (no truth, no number) */
    const int32_t *unit;           /* [windows] rank * heads + head; -1: no rows */
    int heads, units;              /* units: ranks * heads */
    int by_token;                  /* rows are smaller than windows */
    double along[DP_NDIRECTIONS];  /* <err, d> over the tensor, d of unit length */
    double stored[DP_NDIRECTIONS]; /* what rounding to the file's format adds at most */
    dp_allowance allowance;
    /* [rows], [windows]: the least |c - 1| that is seen in each; NULL: nobody asks */
    double *seen[DP_LEVEL_WINDOW + 1];
    double *head_seen; /* [heads] lowered to what a level would have seen of that head; NULL: no */
} dp_levels_in;

typedef struct {
    double ratio;  /* |err| / E, the largest of its kind for its limit; NAN: none */
    double median; /* over units */
    double limit;
    double freedom;    /* nu of that unit */
    double draw;       /* largest ratio of a draw to the others */
    double seen;       /* power: the least |c - 1| over its limit; INFINITY: none */
    int64_t units, at; /* at: the unit */
} dp_level_result;

/* The whole tensor's error as one F: the mean square of error over E, of `top` degrees of freedom
 * over `bottom`. Sums over tokens use their shares, where that has more. The share that dp_pool
 * adds up.
 */
typedef struct {
    double square; /* NAN: none */
    double top, bottom;
} dp_share;

typedef struct {
    double expected; /* E of the whole tensor over |want|_F; NAN: none */
    double excess;   /* largest ratio / limit over the levels; NAN: nothing to judge */
    double seen;     /* power: the least of the levels */
    dp_level level;  /* where */
    int64_t row;     /* of the unit there, the row with the largest error for its E */
    dp_level_result at[DP_NLEVELS];
    dp_share share;
} dp_levels_result;

/* Every level; excess is NAN where the draws judge nothing. */
void dp_levels_judge(const dp_levels_in *in, dp_levels_result *out);

/* ---- many cases together --------------------------------------------------------------------- */

/* One tensor of many cases together: an error that is too large in all of them, but fails in none.
 *
 * Case c has the share (x, top, bottom). The probability of that error or more is
 *   p_c = P(F(top, bottom) > x / factor^2)
 * for a kernel whose errors are `factor` times the draws', which is allowed (dp_allowance). Then
 * -2 sum log p_c is chi squared with 2 n degrees of freedom (Fisher 1932), or less where errors are
 * smaller. A p_c below DP_POOLED_LEAST counts as DP_POOLED_LEAST, since one case alone is judged by
 * its own levels. Cases are taken as independent, as their inputs differ. Several runs of one case
 * are one share (dp_share_of_runs).
 *
 * Measured power and false alarms: reports/verdicts.md.
 */
#define DP_POOLED_CASES 3    /* fewer are not pooled */
#define DP_POOLED_LEAST 1e-4 /* of p_c */

typedef struct {
    int cases;
    double ratio;   /* root mean square of error / expected, by degrees of freedom */
    double freedom; /* of all cases */
    double chance;  /* of a right kernel's showing as much; at most DP_ALARM fails */
    double detects; /* factor on every error of these runs at which chance is DP_ALARM */
} dp_pooled;

/* Runs of one case: their mean square, with the least degrees of freedom of one of them. */
dp_share dp_share_of_runs(int n, const dp_share *run);

/* n >= 1 cases, each with the factor that it is allowed. */
dp_pooled dp_pool(int n, const dp_share *of_case, const double *factor);

/* Fisher's F distribution. A mean of `top` squares of a normal variable over a mean of `bottom`
 * others follows F(top, bottom). With bottom infinite it is chi squared over its degrees of
 * freedom; with top = 1 the square of Student's t. Degrees of freedom may be any positive real
 * numbers. */

/* P(F > x) for x >= 0, to about 1e-10 relative. */
double dp_f_tail(double x, double top, double bottom);

/* The x with P(F > x) = p, 1e-300 < p < 1, to 1e-9 relative; INFINITY when no x below 1e30 has it.
 */
double dp_f_quantile(double p, double top, double bottom);
