/* gpu/plan/marks.cuh - how a rank's stream tells the watcher of its communicator how far it is: the
 * number of a call that it has come to, and that it has behind it, in pinned memory. The stream
 * counts by itself, so that calls in a CUDA graph that is replayed are seen like all others. By one
 * thread. */
#ifndef DPG_MARKS_CUH
#define DPG_MARKS_CUH
#include "dp_gpu.h"

#ifdef __CUDACC__
__device__ inline void begin_call(const dpg_marks &m) { *m.reached = ++*m.count; }
__device__ inline void end_call(const dpg_marks &m) { *m.ended = *m.count; }
#endif
#endif
