/* harness/device/device_conv.h - the convolution of gpu/ as a subject: forward and backward on N
 * ranks, one host thread each (device_run.h). */
#ifndef DP_CUDA_CONV_H
#define DP_CUDA_CONV_H
#include "device_run.h"
#include "ref/chunk/conv.h"

/* `parts` convolutions (at most 4) over the same tokens, alike but for their channels and data,
 * which share every message (gpu/dp_conv.h).
 *   N      ranks; parts, where c->own says which rank has them
 *   base   bf16: x, dy, y and dx are bf16 in device memory, else fp32
 * Fills y and, with dy, dx, dw, dbias of r (allocated by the caller). DP_EINPUT: the kernels do not
 * take this problem (the message says why). */
dp_status dp_cuda_conv(const dp_conv *const *c, int parts, dp_base base, int N, dp_backend b,
                       dp_conv_result *const *r, dp_err *e);
#endif
