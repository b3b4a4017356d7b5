/* harness/device/device_arrays.h - arrays of problems and results in a device's memory
 * (ref/vocabulary/memory.h). Such an address is none of this process: an access
 * from the host ends the program, on the CPU translation too. */
#ifndef DP_DEVICE_ARRAYS_H
#define DP_DEVICE_ARRAYS_H
#include "device_run.h"
#include "ref/vocabulary/memory.h"

#define DP_ARRAY_TAG ((uintptr_t)1 << 62)
/* The kernels take this address. */
static inline double *dp_array_real(const double *x) {
    /* NOLINTNEXTLINE(performance-no-int-to-ptr): a tag comes off */
    return x ? (double *)((uintptr_t)x - DP_ARRAY_TAG) : NULL;
}
#endif
