/* gpu/fast/ring.cuh - a ring of stages in shared memory that one warp fills from global memory and
 * others read, each chunk of a pass one stage. */
#ifndef DPG_RING_CUH
#define DPG_RING_CUH
#include "instructions.cuh"

#define MOST_STAGES 3

/* `depth` stages lie where the caller says. full: its words have come; empty: all readers are
 * through. */
template <int N> struct RingOf {
    static constexpr int DEPTH = N;
    uint64_t full[N], empty[N];
};
using Ring = RingOf<MOST_STAGES>;

/* Before a __syncthreads(). fulls: what completes a stage. */
template <class R>
__device__ __forceinline__ void ring_init(R &r, int readers, int fulls = FULL_COUNT) {
    if (threadIdx.x == 0) {
        for (int i = 0; i < R::DEPTH; i++) {
            bar_init(&r.full[i], fulls);
            bar_init(&r.empty[i], EMPTY_COUNT(readers));
        }
        bar_init_end();
    }
}

/* Where a reader or the producer stands. */
struct Turn {
    int depth, slot = 0, round = 0;
    __device__ __forceinline__ explicit Turn(int stages) : depth(stages) {}
    __device__ __forceinline__ void next() {
        if (++slot == depth) {
            slot = 0;
            round++;
        }
    }
    /* The stage of chunk i - 1, of the first chunk its own. */
    __device__ __forceinline__ int before(int i) const {
        return i ? (slot + depth - 1) % depth : slot;
    }
    template <class R> __device__ __forceinline__ void wait_full(R &r) const {
        bar_wait(&r.full[slot], round & 1);
    }
    template <class R> __device__ __forceinline__ void wait_empty(R &r) const {
        if (round) bar_wait(&r.empty[slot], (round - 1) & 1);
    }
};

/* A stage of the producer's, once its readers are through with it; bytes: all that will come. */
template <class R>
__device__ __forceinline__ uint64_t *open_stage(R &r, const Turn &turn, int bytes, int lane) {
    uint64_t *full = &r.full[turn.slot];
    turn.wait_empty(r);
    fill_begin(full, bytes, lane);
    return full;
}

/* The producer warp: n chunks from `turn` on, load(number of the stage, i, barrier) of each. */
template <class F>
__device__ __forceinline__ void produce(Ring &r, Turn &turn, int n, int bytes, int lane, F load) {
    for (int i = 0; i < n; i++, turn.next()) {
        uint64_t *full = open_stage(r, turn, bytes, lane);
        load(turn.slot, i, full);
        fill_end(full, lane);
    }
}
#endif
