/* harness/device/device_memory.h - what one rank holds on its device, and tensors to and from it.
 *
 * Tensors go as fp32 or bf16 (each value is representable, or is rounded once). Errors are kept in
 * the rank's err and returned.
 */
#pragma once
#include "gpu/dp_gpu.h"
#include "ref/vocabulary/formats.h"
#include "ref/vocabulary/problem.h"

#include <cuda_runtime_api.h>

typedef struct {
    int rank;
    dp_err err;
    cudaStream_t stream;
    int there;      /* arrays of doubles are the device's (device_arrays.h) */
    void *held[64]; /* device memory */
    int nheld;
} dp_device;

/* Returns from the caller with DP_EDEVICE that names file, line, rank and call. */
#define DP_CUDA(d, call)                                                                        \
    do {                                                                                        \
        const cudaError_t rc_ = (call);                                                         \
        if (rc_ != cudaSuccess)                                                                 \
            return dp_fail(&(d)->err, DP_EDEVICE, "%s:%d: rank %d: %s: %s", __FILE__, __LINE__, \
                           (d)->rank, #call, cudaGetErrorString(rc_));                          \
    } while (0)

/* Memory of device 0 for problems whose arrays are there, by any thread. A block that nobody uses
 * is kept for the next array of as many bytes. */
cudaError_t dp_pool_get(size_t bytes, void **x);
/* Adds `more` to the uses of the block that x lies in; their number before. 0: it is none of the
 * pool's. */
int dp_pool_use(const void *x, int more);

/* Bytes of n numbers. */
static inline size_t dp_device_bytes(int64_t n, dpg_dtype t) {
    return (size_t)n * (t == DPG_BF16 ? 2 : 4);
}
/* n numbers that hold anything. */
dp_status dp_device_room(dp_device *d, int64_t n, dpg_dtype t, void **x);
/* n numbers whose bits are NaN in both formats: what is not written shows. */
dp_status dp_device_blank(dp_device *d, int64_t n, dpg_dtype t, void **x);
/* To memory that is there. */
dp_status dp_device_send(dp_device *d, const double *x, int64_t n, dpg_dtype t, void *to);
/* NULL stays NULL. */
dp_status dp_device_upload(dp_device *d, const double *x, int64_t n, dpg_dtype t, const void **dev);
dp_status dp_device_download(dp_device *d, const void *dev, int64_t n, dpg_dtype t, double *to);
/* Gives memory and stream back. */
void dp_device_close(dp_device *d);
