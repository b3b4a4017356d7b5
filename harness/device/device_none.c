/* The devices of a build without CUDA kernels: why there are none. */
#include "device_run.h"

#ifndef DP_HAVE_CUDA

const char *dp_cuda_unavailable(dp_backend b, DP_UNUSED int N) {
    return dp_backends[b].on_device ? "this build has no CUDA kernels: nvcc was not found" : NULL;
}
const char *dp_cuda_device(void) { return "none"; }
void dp_procs_start(void) {}
dp_status dp_cuda_run(DP_UNUSED const dp_problem *p, const dp_cuda_how *how,
                      DP_UNUSED dp_cuda_result *out, dp_err *e) {
    return dp_fail(e, DP_EDEVICE, "%s", dp_cuda_unavailable(how->backend, how->N));
}
void dp_cuda_result_free(dp_cuda_result *r, int HV) { (void)r, (void)HV; }
const dp_truth_device *dp_cuda_truth(DP_UNUSED const dp_problem *p) { return NULL; }
const dp_memory *dp_cuda_memory(DP_UNUSED const dp_problem *p, DP_UNUSED dp_backend b,
                                DP_UNUSED int N) {
    return NULL;
}
dp_status dp_cuda_conv(DP_UNUSED const dp_conv *const *c, DP_UNUSED int parts,
                       DP_UNUSED dp_base base, int N, dp_backend b,
                       DP_UNUSED dp_conv_result *const *r, dp_err *e) {
    return dp_fail(e, DP_EDEVICE, "%s", dp_cuda_unavailable(b, N));
}
/* Never asked where nothing decodes. */
int dp_cuda_decodes(DP_UNUSED const dp_problem *p, DP_UNUSED const dp_cuda_how *how,
                    DP_UNUSED const dp_state_pool *pool) {
    return 0;
}
int dp_cuda_keeps(const dp_problem *p, const dp_cuda_how *how, const dp_state_pool *pool,
                  DP_UNUSED int states) {
    return dp_cuda_decodes(p, how, pool);
}
dp_status dp_cuda_decode(DP_UNUSED const dp_problem *p, const dp_cuda_how *how,
                         DP_UNUSED const dp_state_pool *pool, DP_UNUSED dp_result *out,
                         DP_UNUSED double **states, dp_err *e) {
    return dp_fail(e, DP_EDEVICE, "%s", dp_cuda_unavailable(how->backend, how->N));
}

#endif
