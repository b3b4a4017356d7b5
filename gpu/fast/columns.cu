/* gpu/fast/columns.cu - do of a tile by columns (SLICES), as the passes over states and the
 * gradients read it. It serves where no chunk kernel of the backward writes it. The shared memory
 * of 3 blocks of k_chunks has no room for it, and under DPG_SAVE_ALL no chunk kernel runs. One
 * block a tile; shared memory holds the tile. */
#include "fast/chunks.cuh"
#include "fast/fast.cuh"

namespace {

template <int V>
__global__ void __launch_bounds__(CHUNK_THREADS)
    k_columns(const __grid_constant__ Dims d, const void *dout,
              const __grid_constant__ ChunkOut o) {
    extern __shared__ __align__(128) char raw[];
    bf16 *tile = (bf16 *)raw;
    await_grid();
    if (blockIdx.x == 0) clear_ready(o.ready, d.NT);
    Place p = place_of(d, blockIdx.x);
    int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    fetch_do<V>(tile, d, dout, p);
    cp_wait<0>();
    drain_fence();
    __syncthreads();
    if (warp == 0) send_do<V>(o, tile, p, lane);
    look_at_do<V>(o.odd, tile, p.tile);
    drain_wait(lane);
}

template <int K, int V> struct Columns {
    static dp_status run(const Call &c) {
        return launch(queue_of(c), "k_columns", k_columns<V>, tile_count(c.p), CHUNK_THREADS,
                      C * V * sizeof(bf16), c.p->d, c.g->dout, chunk_out(c));
    }
};

} // namespace

dp_status fast_columns(const Call &c) {
    FAULT_TO_DEVICE(c.e, c.s);
    return c.p->d.Kg == 1 && !saves_all(c.p) ? DP_OK : by_widths<Columns>(c);
}
