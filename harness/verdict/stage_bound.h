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

/* One stage of a subject, DP_PER_TOKEN or DP_PER_CHUNK, against the reference run. bound, rad:
 * [rows]; the rest as in dp_compare_in. */
typedef struct {
    int stage;
    const double *got, *bound, *rad;
    int bound_shown;
    const dp_draws *draws;
    dp_allowance allowance;
    double unit, store, tiny;
} dp_stage_judge_in;
/* Fills *out with the judgement of one stage tensor against its bound on true inputs. */
void dp_stage_judge(const dp_sim *ref, const dp_stage_judge_in *in, dp_judgement *out);
#endif
