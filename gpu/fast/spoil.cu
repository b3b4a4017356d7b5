/* gpu/fast/spoil.cu - carries values that are not finite over the segments of a sequence, for plans
 * without w and u on one rank (`bare.cuh`). For every segment and column the pass has stored
 * whether the state that leaves the segment is finite. A state that is not finite never becomes
 * finite again. So o of every later segment gets NaN in that column, as does final_state. If (M, H)
 * were made of all chunks, they have carried the NaN already. One block a segment and value head, a
 * thread a column. */
#include "fast/fast.cuh"
#include "instructions.cuh"

namespace {

/* A column of a segment's o. */
template <class T>
__device__ __forceinline__ void spoil_o(const Dims &d, T *o, const Seq &seq, int hv, int v) {
    Chunk first = d.chunk[seq.c0], last = d.chunk[seq.c1 - 1];
    for (int64_t t = first.t0; t < last.t0 + last.len; t++)
        o[(t * d.HV + hv) * d.V + v] = (T)__uint_as_float(0x7fffffffu);
}

__global__ void k_spoil(const __grid_constant__ Dims d, const int *spoilt, void *o, float *end,
                        int seq0) {
    int hv = blockIdx.x % d.HV, v = threadIdx.x, row = seq0 + blockIdx.x / d.HV, any = 0;
    await_grid();
    Seq seq = d.seq[row];
    for (Seq at = seq; !at.starts; at = d.seq[row])
        any |= spoilt[((int64_t)--row * d.HV + hv) * d.V + v];
    if (!any) return;
    if (d.o_bf16)
        spoil_o(d, (bf16 *)o, seq, hv, v);
    else
        spoil_o(d, (float *)o, seq, hv, v);
    for (int k = 0; end && seq.ends && k < d.K; k++)
        end[(((int64_t)seq.gseq * d.HV + hv) * d.K + k) * d.V + v] = __uint_as_float(0x7fffffffu);
}

} // namespace

dp_status fast_spoil(const Call &c) {
    const dpg_plan *p = c.p;
    return launch(queue_of(c), "k_spoil", k_spoil, (unsigned)p->nseg * p->d.HV, p->d.V, 0, p->d,
                  at<int>(c, B_SPOILT), c.t->o, c.t->final_state, p->nwhole);
}
