/* harness/device/device_fill.h - problems of widths that the kernels do not take. Channels of zeros
 * fill them up to a multiple of 16, as in the operators for PyTorch. A key of zeros writes nothing,
 * and a value of zeros is one: no other channel sees them. */
#ifndef DP_DEVICE_FILL_H
#define DP_DEVICE_FILL_H
#include "device_run.h"

/* Have the kernels no such K or V, but the next one? */
int dp_fill_needed(const dp_problem *p);
/* p with K and V of the kernels; arrays and cu of its own. */
dp_problem dp_fill_problem(const dp_problem *p);
void dp_fill_free(dp_problem *wide);
/* Results and tensors of ranks without the channels of zeros; frees those of the wide problem. */
void dp_fill_results(const dp_problem *p, const dp_problem *wide, int backward,
                     dp_cuda_result *from, dp_cuda_result *to);
#endif
