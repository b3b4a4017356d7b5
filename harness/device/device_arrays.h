/* harness/device/device_arrays.h - arrays of problems and results in a device's memory
 * (ref/vocabulary/memory.h). Such an address is none of this process: an access
 * from the host ends the program, on the CPU translation too. */
#pragma once
#include "device_run.h"
#include "ref/vocabulary/memory.h"

#define DP_ARRAY_TAG ((uintptr_t)1 << 62)
/* The kernels take this address. */
static inline double *dp_array_real(const double *x) {
    /* NOLINTNEXTLINE(performance-no-int-to-ptr): a tag comes off */
    return x ? (double *)((uintptr_t)x - DP_ARRAY_TAG) : NULL;
}

/* Problems of widths that the kernels do not take. Channels of zeros
 * fill them up to a multiple of 16, as in the operators for PyTorch. A key of zeros writes nothing,
 * and a value of zeros is one: no other channel sees them. */

/* Have the kernels no such K or V, but the next one? */
int dp_fill_needed(const dp_problem *p);
/* p with K and V of the kernels; arrays and cu of its own. */
dp_problem dp_fill_problem(const dp_problem *p);
void dp_fill_free(dp_problem *wide);
/* Results and tensors of ranks without the channels of zeros; frees those of the wide problem. */
void dp_fill_results(const dp_problem *p, const dp_problem *wide, int backward,
                     dp_cuda_result *from, dp_cuda_result *to);
