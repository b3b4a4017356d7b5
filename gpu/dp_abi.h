/* gpu/dp_abi.h - what a caller that loads the kernels as a shared library (`make ops`) needs beside
 * dp_gpu.h, dp_decode.h and dp_conv.h, C11-callable.
 *
 * The library libdeltaproof_cuda.so exports the functions of those headers and of this one, and no
 * other symbol. It includes the CUDA runtime, and loads with any driver that its code runs on. The
 * library libdeltaproof_cpu.so exports the same functions; their device pointers are host pointers.
 * Each of them finishes its work before it returns and ignores the stream. */
#ifndef DP_ABI_H
#define DP_ABI_H
#include "dp_conv.h"
#include "dp_decode.h"
#ifdef __cplusplus
extern "C" {
#endif

/* sizeof the struct of that name, for callers that declare it themselves; 0: no such name. */
size_t dpg_size_of(const char *name);
/* Selects the device for all later calls of this host thread. */
dp_status dpg_use_device(int device, dp_err *e);

#ifdef __cplusplus
}
#endif
#endif
