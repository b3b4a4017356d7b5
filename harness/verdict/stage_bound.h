/* harness/verdict/stage_bound.h - bounds of the error that a base policy may make of a stage tensor
 * (simulated/stage_tensor.h), all stages before it included. Beside each stands the exact value
 * (fp64 chunk solver).
 */
#ifndef DP_STAGE_BOUND_H
#define DP_STAGE_BOUND_H
#include "compare.h"
#include "draws.h"
#include "harness/bound/error_bound.h"
#include "harness/simulated/stage_tensor.h"

/* Not DP_PER_RANK. [rows] bounds of the 2-norm of each row's error, from a bound that has been run
 * (dp_error_bound_run). */
double *dp_stage_bound(const dp_error_bound_base *w, int stage);

/* Judges one stage of a subject, DP_PER_TOKEN or DP_PER_CHUNK, against the reference run. `in` has
 * got, bound, rad, draws, and what the run decides. */
void dp_stage_judge(const dp_sim *ref, int stage, dp_compare_in in, dp_judgement *out);
#endif
