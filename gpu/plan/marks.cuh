/* gpu/plan/marks.cuh - progress of a rank's stream for the watcher of its communicator. Pinned
 * memory holds the number of the call that it has reached, and of the last finished one. The stream
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
