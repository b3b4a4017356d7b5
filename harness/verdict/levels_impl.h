/* harness/verdict/levels_impl.h - what the files of the levels' statistics share (levels.h):
 *   level_units.c  units of a level, their draws and degrees of freedom; quadratic levels (rows,
 *                  windows, ranks, the tensor, all windows alike); quantiles;
 *   levels.c       which levels are judged, and the worst of them; levels with sign; many cases. */
#ifndef DP_LEVELS_IMPL_H
#define DP_LEVELS_IMPL_H
#include "levels.h"
#include "ref/vocabulary/problem.h"

/* The expectation that units of a finer level give for a coarser one: that of independent units,
 * times three, since they are not quite independent. (Over the windows of a head that remembers up
 * to 3.6 was measured, mostly 1.) Where one unit outweighs the others they tell nothing that its
 * own draws do not. */
#define DP_NOT_INDEPENDENT 3.0
#define DP_FROM_FINER 10.0

/* A level's prior knowledge of the variation of its units. */
typedef struct {
    double cv2;     /* squared coefficient of variation of |d|^2 */
    double draws;   /* that it counts as */
    double unknown; /* draws among them that stand for numbers of which nothing is known */
} dp_presumption;

/* Units of a level: rows, windows, ranks or the tensor. */
typedef struct {
    int ndraw;
    int64_t n;
    dp_presumption presumed;
    double *draw2;                                  /* [ndraw][n] */
    double *err2, *want2, *floor2, *numbers, *rows; /* [n]; rows 0: nothing there */
    int32_t *family; /* [n] below families; its head is family % heads */
    int families, heads;
    double most_rows;
    const double *most_freedom; /* [n]; NULL: no limit but numbers */
} dp_unit_list;

/* The prior where nothing is known. */
extern const dp_presumption DP_NOTHING_KNOWN;

/* Frees a list's arrays. */
void dp_unit_list_free(dp_unit_list *u);
/* The units of a level: sums over their rows. */
dp_unit_list dp_unit_list_of(const dp_levels_in *in, dp_level level);
/* The unit of a row on a level, -1: it is not looked at. */
int64_t dp_level_unit_of(const dp_levels_in *in, dp_level level, int64_t row);
/* How many units a level has. */
int64_t dp_level_units(const dp_levels_in *in, dp_level level);

/* Mean |d|^2 of a unit over the draws, all but one of them when without >= 0. */
double dp_mean_draw(const dp_unit_list *u, int64_t i, int without);
/* The expectation that units of a finer level give for the n units of the next coarser one. */
dp_presumption dp_presume(const dp_levels_in *in, dp_level fine, const dp_unit_list *u, int64_t n);
/* The most degrees of freedom of a rank and head, from its windows: [units], to be freed. */
double *dp_freedom_of_windows(const dp_levels_in *in, const dp_unit_list *windows);

/* |err| over the expected error; 0 without error, INFINITY where none is expected. */
double dp_error_over(double err2, double e2);
/* The result of a level that has nothing to judge. */
dp_level_result dp_level_none(void);
/* Does a exceed its limit by more than b? */
int dp_level_worse(const dp_level_result *a, const dp_level_result *b);

/* The allowance of one level: `stored` for units whose E is at least `from` times the truth. */
typedef struct {
    double usual, stored, from;
} dp_level_factor;
/* Every unit against the limit of its own freedom. head_seen: as in dp_levels_in. */
dp_level_result dp_judge_quadratic(const dp_unit_list *u, dp_level_factor factor,
                                   double *head_seen);
/* The power mean over all units. */
dp_level_result dp_judge_every(const dp_unit_list *u, dp_level_factor factor);

/* Fisher's F distribution. A mean of `top` squares of a normal variable over a mean of `bottom`
 * others follows F(top, bottom). With bottom infinite it is chi squared over its degrees of
 * freedom; with top = 1 the square of Student's t. Degrees of freedom may be any positive real
 * numbers. */

/* P(F > x) for x >= 0, to about 1e-10 relative. */
double dp_f_tail(double x, double top, double bottom);

/* The x with P(F > x) = p, 1e-300 < p < 1, to 1e-9 relative; INFINITY when no x below 1e30 has it.
 */
double dp_f_quantile(double p, double top, double bottom);

#endif
