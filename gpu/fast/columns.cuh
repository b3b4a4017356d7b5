/* gpu/fast/columns.cuh - do by columns (SLICES) in shared memory, as the passes over states and the
 * gradients of a tile take it. */
#ifndef DPG_COLUMNS_CUH
#define DPG_COLUMNS_CUH
#include "fast/maps.cuh"
#include "fast/tile.cuh"

/* Where kernels find it. */
struct DoRows {
    CUtensorMap map;  /* do where it lies, of whole chunks */
    const bf16 *left; /* tiles by columns.cu or a chunk kernel, of the other chunks */
    bool reads;       /* the plan's reads_do; else all chunks are others */
};
dp_status do_rows(const Call &c, DoRows *rows);
/* The same for dE of a plan without w and u, which is dv: whole chunks lie there. */
dp_status dE_rows(const Call &c, DoRows *rows);

__device__ __forceinline__ bool lies_there(const DoRows &x, const Chunk &c) {
    return x.reads && c.len == C;
}
/* By a producer warp: N slices of a tile of V columns, from `slice` on; of `b`'s bytes. */
template <int V, int N>
__device__ __forceinline__ void fill_do(bf16 *to, const DoRows &x, const Chunk &c, int hv,
                                        int64_t tile, int slice, uint64_t *b, int lane) {
    if (lies_there(x, c))
        for (int i = 0; i < N; i++)
            fill_tile(to + i * C * 16, x.map, (slice + i) * 16, hv, c.t0, b, lane);
    else
        fill(to, x.left + (tile * (V / 16) + slice) * C * 16, N * C * 32, b, lane);
}
#endif
