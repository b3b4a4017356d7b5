/* gpu/fast/columns.cu - do of a tile by columns (SLICES), as the passes over states and the
 * gradients read it. It serves where no chunk kernel of the backward writes it. Where they read do
 * of whole chunks where it lies, it serves the others, and looks at all where that is asked for.
 * The shared memory of 3 blocks of k_chunks has no room for do, and under DPG_SAVE_ALL no chunk
 * kernel runs. One block a tile; shared memory holds the tile. */
#include "fast/chunks.cuh"
#include "fast/columns.cuh"
#include "fast/fast.cuh"

namespace {

template <int V>
__global__ void __launch_bounds__(CHUNK_THREADS)
    k_columns(const __grid_constant__ Dims d, const void *dout, const __grid_constant__ ChunkOut o,
              bool only_short) {
    extern __shared__ __align__(128) char raw[];
    bf16 *tile = (bf16 *)raw;
    await_grid();
    Place p = place_of(d, blockIdx.x);
    const bool stores = !only_short || p.c.len < C;
    if (!stores && !o.odd) return;
    int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    fetch_do<V>(tile, d, dout, p);
    cp_wait<0>();
    drain_fence();
    __syncthreads();
    if (stores && warp == 0) send_do<V>(o, tile, p, lane);
    look_at_do<V>(o.odd, tile, p.tile);
    drain_wait(lane);
}

template <int K, int V> struct Columns {
    static dp_status run(const Call &c) {
        ChunkOut o = chunk_out(c);
        o.dos = at<bf16>(c, B_DO);
        return launch(queue_of(c), "k_columns", k_columns<V>, tile_count(c.p), CHUNK_THREADS,
                      C * V * sizeof(bf16), c.p->d, c.g->dout, o, c.p->reads_do != 0);
    }
};

} // namespace

dp_status fast_columns(const Call &c) {
    FAULT_TO_DEVICE(c.e, c.s);
    const Buf *buf = c.p->buf;
    const bool made = c.p->d.Kg == 1 && !saves_all(c.p);
    const bool idle = c.p->reads_do ? !buf[B_DO].bytes && !buf[B_ODD].bytes : made;
    return idle ? DP_OK : by_widths<Columns>(c);
}

int fast_reads_do(const dpg_plan *pl) {
    const Dims &d = pl->d;
    return pl->is_bwd && pl->opt.path == DPG_PATH_FAST && fast_augments(&pl->device) &&
           !pl->owned && d.R == 1 && d.d_bf16;
}

dp_status do_rows(const Call &c, DoRows *x) {
    const Dims &d = c.p->d;
    x->left = at<bf16>(c, B_DO);
    x->reads = c.p->reads_do;
    if (!x->reads) return DP_OK;
    return map_rows(c, &x->map, ROWS_OF_DO, c.g->dout, d.HV, d.V, DP_CHUNK, 16);
}

dp_status dE_rows(const Call &c, DoRows *x) {
    const Dims &d = c.p->d;
    x->left = at<bf16>(c, B_DV_NEW);
    x->reads = c.p->bare && d.Kg > 1;
    return x->reads ? map_rows(c, &x->map, ROWS_OF_DV, c.g->dv, d.HV, d.V, DP_CHUNK, 16) : DP_OK;
}
