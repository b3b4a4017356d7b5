/* gpu/plan/launch.cuh - launches of kernels that start while the kernel before ends. */
#ifndef DPG_LAUNCH_CUH
#define DPG_LAUNCH_CUH
#include "plan/plan.cuh"
#include "plan/shared.cuh"

struct Queue {
    const Device &device;
    cudaStream_t stream;
    dp_err *e;
    bool waits; /* no block starts before the kernel before has ended */
};

/* Blocks may start while the kernel before ends: all threads of `kernel` come to await_grid(),
 * which waits for its stores. `bytes` of shared memory a block. */
template <class... P, class... A>
static inline dp_status launch(const Queue &q, const char *name, void (*kernel)(P...), dim3 blocks,
                               int threads, size_t bytes, const A &...args) {
    cudaLaunchAttribute early = {};
    early.id = cudaLaunchAttributeProgrammaticStreamSerialization;
    early.val.programmaticStreamSerializationAllowed = 1;
    const cudaLaunchConfig_t c = {blocks, dim3((unsigned)threads),        bytes, q.stream,
                                  &early, q.device.major >= 9 && !q.waits};
    if (bytes > 48 << 10) CK(q.e, allow_shared(kernel, (int)bytes));
    const cudaError_t err = cudaLaunchKernelEx(&c, kernel, P(args)...);
    if (err == cudaSuccess) return DP_OK;
    return dpg_fail(q.e, DP_EDEVICE, "launch of %s: %s", name, cudaGetErrorString(err));
}
#endif
