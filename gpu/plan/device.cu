/* gpu/plan/device.cu - what the current device is, and whether this build has code for it. */
#include "plan/paths.cuh"
#include <stdio.h>

__global__ void k_probe() {}

dp_status ask_device(Device *dev, dp_err *e) {
    int shared = 0;
    CK(e, cudaGetDevice(&dev->index));
    CK(e, cudaDeviceGetAttribute(&dev->major, cudaDevAttrComputeCapabilityMajor, dev->index));
    CK(e, cudaDeviceGetAttribute(&dev->minor, cudaDevAttrComputeCapabilityMinor, dev->index));
    CK(e, cudaDeviceGetAttribute(&dev->sms, cudaDevAttrMultiProcessorCount, dev->index));
    CK(e, cudaDeviceGetAttribute(&shared, cudaDevAttrMaxSharedMemoryPerBlockOptin, dev->index));
    dev->shared = (size_t)shared;
    return DP_OK;
}

int dpg_device_runs(char *why, size_t size) {
    Device dev = {};
    dp_err e = {DP_OK, ""};
    cudaFuncAttributes a;
    if (ask_device(&dev, &e) != DP_OK) {
        snprintf(why, size, "%s", e.msg);
        return 0;
    }
    cudaError_t rc = cudaFuncGetAttributes(&a, k_probe);
    if (rc == cudaSuccess) return 1;
    cudaGetLastError();
    snprintf(why, size, "this build has no kernels for compute capability %d.%d (GPU_ARCHS): %s",
             dev.major, dev.minor, cudaGetErrorString(rc));
    return 0;
}
