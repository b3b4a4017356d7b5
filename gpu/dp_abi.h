/* gpu/dp_abi.h - what a caller that loads the kernels as a shared library (`make ops`) needs beside
 * dp_gpu.h, dp_decode.h and dp_conv.h, C11-callable.
 *
 * libdeltaproof_cuda.so has all functions of those headers and of this one, and no other symbol. It
 * includes the CUDA runtime, and loads with any driver that its code runs on. libdeltaproof_cpu.so
 * has the same functions, whose device pointers are the host's. Each of them ends before it
 * returns, whatever the stream. */
#ifndef DP_ABI_H
#define DP_ABI_H
#include "dp_conv.h"
#include "dp_decode.h"
#ifdef __cplusplus
extern "C" {
#endif

/* sizeof the struct of that name, for callers that declare it themselves; 0: no such name. */
size_t dpg_size_of(const char *name);
/* The device of all that this host thread calls from now on. */
dp_status dpg_use_device(int device, dp_err *e);

#ifdef __cplusplus
}
#endif
#endif
