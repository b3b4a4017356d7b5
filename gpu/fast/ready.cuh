/* gpu/fast/ready.cuh - gradients of tiles beside the pass over states that they read (backward). A
 * pass of few heads leaves multiprocessors free. There a launch of its own takes the last tiles of
 * one sequence in one piece, and waits for the states of their chunks. The pass counts which of its
 * warps have stored a group of READY chunks, from the last one on. */
#ifndef DPG_READY_CUH
#define DPG_READY_CUH
#include "instructions.cuh"
#include "plan/plan.cuh"

#define READY 8

/* Tiles of a launch of gradients, and its blocks. */
struct TileRange {
    unsigned from, to, blocks;
    const unsigned *ready; /* NULL: the pass has ended; else the number to wait for.. */
    unsigned writers;      /* .. until it is this one */
};

#ifdef __CUDACC__
/* By a warp of the pass that has committed the drains of `done` chunks of n, chunk by chunk. */
__device__ __forceinline__ void count_ready(unsigned *ready, int done, int n, int lane) {
    const bool ends = done == n, behind = done > 1 && done % READY == 1; /* a whole group */
    if (!ready || (!ends && !behind)) return;
    if (ends)
        drain_done<0>(lane);
    else
        drain_done<1>(lane);
    if (lane) return;
    if (behind) add_release(ready + done / READY - 1, 1);
    if (ends) add_release(ready + (n - 1) / READY, 1);
}
/* All threads of a kernel, first and last: is it beside the kernel before, of which it reads
 * nothing? Whoever waits for it then waits for both. */
__device__ __forceinline__ void begin_beside(bool is) {
    if (is)
        let_next_start();
    else
        await_grid();
}
__device__ __forceinline__ void end_beside(bool is) {
    if (is) await_grid();
}
/* The same for gradients of tiles. */
__device__ __forceinline__ void begin_tiles(const TileRange &x) {
    begin_beside(x.ready);
    if (!x.ready) return;
    if (threadIdx.x == 0) await_acquire(x.ready, x.writers);
    __syncthreads();
    bulk_fence();
}
#endif
#endif
