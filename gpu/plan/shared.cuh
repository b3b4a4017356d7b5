/* gpu/plan/shared.cuh - dynamic shared memory beyond the 48 KB that every launch may ask for. */
#ifndef DPG_SHARED_CUH
#define DPG_SHARED_CUH
#include <cuda_runtime.h>

/* From now on launches of `kernel` on the current device may ask for `bytes`. The driver is told
 * where they are more than it was told before: once a kernel and device, as a rule. By any thread,
 * also while its stream is captured; not behind cudaDeviceReset. */
cudaError_t allow_shared_of(const void *kernel, int bytes);
template <class... P> static inline cudaError_t allow_shared(void (*kernel)(P...), int bytes) {
    return allow_shared_of((const void *)kernel, bytes);
}
#endif
