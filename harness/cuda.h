/* harness/cuda.h - the CUDA kernels of gpu/ as a subject: the forward of a problem on N ranks, one host thread each, on one device
 * (backend cuda) or one device per rank over NCCL (backend nccl). Compiled without CUDA, every call says so.
 */
#ifndef DP_CUDA_H
#define DP_CUDA_H
#include "../ref/formats.h"
#include "../ref/problem.h"
#ifdef __cplusplus
extern "C" {
#endif

/* file: tensors that another program wrote (judge.h); subject: a shared library (subject.h). --backend names neither, so they come last. */
typedef enum { DP_BACKEND_SIM, DP_BACKEND_CUDA, DP_BACKEND_NCCL, DP_BACKEND_FILE, DP_BACKEND_SUBJECT, DP_NBACKENDS } dp_backend;
extern const char *const dp_backend_names[DP_NBACKENDS];

typedef struct {
    int N;
    double *o, *final_state;             /* as in dp_result; NaN where nothing was written */
    double **S_in, **M, **H;             /* [N*HV], NULL where the kernels form none (math.md g.3) */
    const char *path;                    /* "simple" or "fast" */
} dp_cuda_result;

/* Why this backend cannot run here with N ranks, or NULL if it can. */
const char *dp_cuda_unavailable(dp_backend b, int N);
/* "NVIDIA H200, driver 13.0" */
const char *dp_cuda_device(void);
/* bf16_inputs: q, k, v, o are bf16 in device memory. DP_EINPUT: the kernels do not take this problem (the message says why). */
dp_status dp_cuda_run(const dp_problem *p, int bf16_inputs, dp_base base, dp_format chain, int N, dp_backend b, dp_cuda_result *out, dp_err *e);
void dp_cuda_result_free(dp_cuda_result *r, int HV);

#ifdef __cplusplus
}
#endif
#endif
