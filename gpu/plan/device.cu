/* gpu/plan/device.cu - what the current device is, whether this build has code for it, and how much
 * shared memory its kernels may take. */
#include "plan/paths.cuh"
#include "plan/shared.cuh"
#include <map>
#include <mutex>
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

/* One lock a device. A driver that loads a kernel may wait for kernels that run on its device.
 * Such kernels may wait for work that hosts of other devices enqueue (windows). */
cudaError_t allow_shared_of(const void *kernel, int bytes) {
    static struct {
        std::mutex lock;
        std::map<std::pair<const void *, int>, int> most; /* by kernel and device */
    } told[64];
    int device;
    cudaError_t err = cudaGetDevice(&device);
    if (err != cudaSuccess) return err;
    auto &here = told[device % 64];
    std::lock_guard<std::mutex> held(here.lock);
    int &most = here.most[{kernel, device}];
    if (bytes <= most) return cudaSuccess;
    err = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes);
    if (err == cudaSuccess) most = bytes;
    return err;
}
