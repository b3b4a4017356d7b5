/* The devices of a build without CUDA kernels: why there are none. */
#include "device_run.h"

#ifndef DP_HAVE_CUDA

const char *dp_cuda_unavailable(dp_backend b, int N) {
    (void)N;
    return dp_backends[b].on_device ? "this build has no CUDA kernels: nvcc was not found" : NULL;
}
const char *dp_cuda_device(void) { return "none"; }
void dp_procs_start(void) {}
dp_status dp_cuda_run(const dp_problem *p, const dp_cuda_how *how, dp_cuda_result *out, dp_err *e) {
    (void)p, (void)out;
    return dp_fail(e, DP_EDEVICE, "%s", dp_cuda_unavailable(how->backend, how->N));
}
void dp_cuda_result_free(dp_cuda_result *r, int HV) { (void)r, (void)HV; }
const dp_truth_device *dp_cuda_truth(const dp_problem *p) {
    (void)p;
    return NULL;
}
const dp_memory *dp_cuda_memory(const dp_problem *p, dp_backend b, int N) {
    (void)p, (void)b, (void)N;
    return NULL;
}
dp_status dp_cuda_conv(const dp_conv *const *c, int parts, dp_base base, int N, dp_backend b,
                       dp_conv_result *const *r, dp_err *e) {
    (void)c, (void)parts, (void)base, (void)r;
    return dp_fail(e, DP_EDEVICE, "%s", dp_cuda_unavailable(b, N));
}
/* Never asked where nothing decodes. */
int dp_cuda_decodes(const dp_problem *p, const dp_cuda_how *how, const dp_state_pool *pool) {
    (void)p, (void)how, (void)pool;
    return 0;
}
int dp_cuda_keeps(const dp_problem *p, const dp_cuda_how *how, const dp_state_pool *pool,
                  int states) {
    (void)states;
    return dp_cuda_decodes(p, how, pool);
}
dp_status dp_cuda_decode(const dp_problem *p, const dp_cuda_how *how, const dp_state_pool *pool,
                         dp_result *out, double **states, dp_err *e) {
    (void)p, (void)pool, (void)out, (void)states;
    return dp_fail(e, DP_EDEVICE, "%s", dp_cuda_unavailable(how->backend, how->N));
}

#endif
