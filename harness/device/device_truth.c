/* The truth on a device, as dp_truth_request.device (device_run.h). */
#ifdef DP_HAVE_CUDA
#include "device_run.h"
#include "gpu/dp_truth_gpu.h"

static dp_status truth_open(void **s, int64_t Kp, int rows, int entries, int64_t W, int64_t len,
                            dp_err *e) {
    return dpg_truth_open((dpg_truth **)s, Kp, rows, entries, W, len, e);
}
static void truth_close(void *s) { dpg_truth_close(s); }
static dp_status truth_set(void *s, const double *S, dp_err *e) { return dpg_truth_set(s, S, e); }
static dp_status truth_get(void *s, double *S, dp_err *e) { return dpg_truth_get(s, S, e); }
static dp_status truth_forward(void *s, const tr_dd_rows *b, const tr_dd_cols *c, dp_err *e) {
    return dpg_truth_forward(s, b, c, e);
}

const dp_truth_device *dp_cuda_truth(const dp_problem *p) {
    static const dp_truth_device device = {truth_open, truth_close, truth_set, truth_get,
                                           truth_forward};
    return dpg_truth_takes((p->K + TR_DD_LANES - 1) / TR_DD_LANES * TR_DD_LANES, dp_rows(p),
                           dp_truth_entries(p)) &&
                   !dp_cuda_unavailable(DP_BACKEND_CUDA, 1)
               ? &device
               : NULL;
}
#endif
