/* harness/search/precision.h - which stages need a wider format: a search over policies
 * (stage x format) of the simulated ranks.
 *
 * A unit is a stage of the pipeline, or the M chain; its levels are formats from `from` to `to`. A
 * policy is asked whether the run meets the need:
 *   bounds of tensors   |got - ref|_F / |ref|_F <= limit for every tensor that has one, or
 *   verdict             every row within the bound of the policy that has all units at `to`
 *                       (harness/bound/error_bound.h).
 * ref is the fp64 pipeline. The search assumes that raising a unit never hurts: a policy that is
 * nowhere above a failing one is not tried.
 *
 * Cost, for the order of policies: flops of a unit's matrix products, bytes that it writes and the
 * next stage reads. The time of both is at the peak rates of an H200 SXM. Dense: bf16 989, tf32
 * 495, 3xTF32 165, fp32 67, fp64 33.5 Tflop/s; memory: 4.8 TB/s. It orders policies and predicts
 * nothing.
 */
#pragma once
#include "harness/simulated/ranks.h"

#define DP_MAX_UNITS 16
#define DP_MAX_LEVELS 6
typedef struct {
    double flops, bytes, seconds;
} dp_cost;
typedef struct {
    const char *name;
    int stage;                         /* dp_stage, or DP_NSTAGES: the M chain */
    int nlevel, format[DP_MAX_LEVELS]; /* dp_base, chain: dp_format; from first, to last */
    dp_cost cost[DP_MAX_LEVELS];
    /* errors when this unit alone is at `from`, all others at `to` (dp_result_fields; NAN:
     * absent) */
    double alone[DP_NRESULTS];
} dp_unit;
typedef struct {
    int level[DP_MAX_UNITS];
} dp_policy;

typedef struct {
    const dp_problem *p;
    int N, backward;
    dp_base from, to;
    dp_format chain_from, chain_to;
    dp_exchange merge;
    double need[DP_NRESULTS]; /* by dp_result_fields; NAN: not asked for */
    int by_verdict;           /* 1: need is not set */
    int max_tries;
    int progress;
} dp_precision_request;

typedef struct {
    int found, proven, raised, tries;
    dp_policy policy;
    double error[DP_NRESULTS];
    dp_cost cost;
} dp_choice;
typedef struct {
    int nunit, tries;
    dp_unit unit[DP_MAX_UNITS];
    int from_passes, to_passes;
    double from_error[DP_NRESULTS], to_error[DP_NRESULTS];
    dp_cost from_cost, to_cost;
    /* fewest units above `from`; least seconds. proven: no policy before it in that order can
     * pass */
    dp_choice smallest, cheapest;
} dp_precision;
/* Both choices; found is 0 where not even the wide policy will do. */
dp_status dp_precision_search(const dp_precision_request *rq, dp_precision *out, dp_err *e);
