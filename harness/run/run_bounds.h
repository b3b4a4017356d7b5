/* harness/run/run_bounds.h - bounds of a design's errors in results and stages, from the fp64
 * reference of a sharding. They are read from the cache where they are known.
 */
#ifndef DP_RUN_BOUNDS_H
#define DP_RUN_BOUNDS_H
#include "standard.h"

/* The part of one base on one sharding that no chain format changes. The first bound that is not
 * cached fills it. Starts as zeros. */
typedef struct {
    int ready;
    dp_error_bound_base sound, probable;
} dp_bound_bases;
/* Frees what it holds; the struct is the caller's. */
void dp_bound_bases_free(dp_bound_bases *w);

/* Bounds of all results and of what ranks exchange, into *out, to be freed. A design without bounds
 * of its own gets those of the plain one of its base: they are shown, and do not decide
 * (dp_run_results_bounded). */
void dp_run_bounds(dp_sharding *sp, const dp_design *design, dp_format chain, dp_bound_bases *w,
                   dp_error_bound *out);

/* [rows] of every stage of tokens and chunks that is there, else NULL: bounds of the subject's
 * errors, and of those of the fp64 reference. */
typedef struct {
    double *bound[DP_NSTAGE_TENSORS], *rad[DP_NSTAGE_TENSORS];
} dp_stage_errors;

/* Is stage i there, and not one that ranks exchange? */
int dp_stage_is_inner(double *const *stage, int i);

#endif
