/* harness/search/step_bisect.h - bisect.h for recurrences and steps. The convolutions of a step are
 * stages, too, with x and the true gradients of their outputs. */
#ifndef DP_STEP_BISECT_H
#define DP_STEP_BISECT_H
#include "bisect.h"
#include "harness/case/case.h"

/* As dp_bisect_sim; *out is to be freed by dp_bisect_free where DP_OK. */
dp_status dp_step_bisect(const dp_case *c, const dp_sim_policy *how, int runs, int all,
                         dp_bisect *out, dp_err *e);
#endif
