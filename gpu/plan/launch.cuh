/* gpu/plan/launch.cuh - launches of kernels that start while the kernel before ends. */
#ifndef DPG_LAUNCH_CUH
#define DPG_LAUNCH_CUH
#include "plan/plan.cuh"

/* Blocks may start while the kernel before ends: await_grid() waits for its stores. */
template <class... P>
static inline dp_status launch(const Device &dev, void (*kernel)(P...), dim3 blocks, int threads,
                               size_t shared, cudaStream_t stream, dp_err *e, P... args) {
    cudaLaunchAttribute early = {};
    early.id = cudaLaunchAttributeProgrammaticStreamSerialization;
    early.val.programmaticStreamSerializationAllowed = 1;
    const cudaLaunchConfig_t c = {blocks, dim3((unsigned)threads), shared, stream,
                                  &early, dev.major >= 9};
    CK(e, cudaLaunchKernelEx(&c, kernel, args...));
    return DP_OK;
}
#endif
