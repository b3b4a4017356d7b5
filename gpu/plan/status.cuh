/* gpu/plan/status.cuh - failures as statuses whose message holds file:line and the expression. */
#ifndef DPG_STATUS_CUH
#define DPG_STATUS_CUH
#include "dp_gpu.h"
#include <cuda_runtime.h>

/* Sets *e unless it is set, and returns code (dp_fail of ref/). */
dp_status dpg_fail(dp_err *e, dp_status code, const char *fmt, ...)
    __attribute__((format(printf, 3, 4)));

#define CK(e, expr)                                                                    \
    do {                                                                               \
        cudaError_t err_ = (expr);                                                     \
        if (err_ != cudaSuccess)                                                       \
            return dpg_fail(e, DP_EDEVICE, "%s:%d: %s: %s", __FILE__, __LINE__, #expr, \
                            cudaGetErrorString(err_));                                 \
    } while (0)
#define CK_LAUNCH(e, what)                                                                      \
    do {                                                                                        \
        cudaError_t err_ = cudaGetLastError();                                                  \
        if (err_ != cudaSuccess)                                                                \
            return dpg_fail(e, DP_EDEVICE, "%s:%d: launch of %s: %s", __FILE__, __LINE__, what, \
                            cudaGetErrorString(err_));                                          \
    } while (0)
#define TRY(...)                       \
    do {                               \
        dp_status st_ = (__VA_ARGS__); \
        if (st_ != DP_OK) return st_;  \
    } while (0)
#endif
