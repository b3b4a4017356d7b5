/* gpu/plan/states.cu - states between chunks, as a caller asks for them (dpg_states). One phase. */
#include "plan/paths.cuh"
#include "plan/values.cuh"
#include "plan/wide.cuh"

#define THREADS 256

struct States {
    const void *from;
    int is_bf16, layout, cols; /* cols: heads of the plan's for one of the caller's */
    int first, step;           /* the chunk of block 0, of the next one */
    int v_first;
    dpg_dtype type;
    void *to;
};

/* blockIdx: a state of one of the caller's heads, [K][cols V]. */
__global__ void k_states(Dims d, States s) {
    const int V = d.V * s.cols, heads = d.HV / s.cols, n = d.K * V;
    const int64_t chunk = s.first + (int64_t)blockIdx.x * s.step;
    const int64_t to = ((int64_t)blockIdx.x * heads + blockIdx.y) * n;
    for (int i = threadIdx.x; i < n; i += THREADS) {
        const int k = s.v_first ? i % d.K : i / V, v = s.v_first ? i / d.K : i % V;
        const int64_t head = chunk * d.HV + (int64_t)blockIdx.y * s.cols + v / d.V;
        const int col = v % d.V;
        const int at = s.layout == SLICES ? slice_at(d.K, k, col) : k * d.V + col;
        put_param(s.to, to + i, s.type, ldx(s.from, head * d.K * d.V + at, s.is_bf16));
    }
}

dp_status dpg_states(const dpg_plan *pl, const void *ws, dpg_dtype type, int v_first, void *to,
                     void *stream, dp_err *e) {
    const int cols = pl->wide ? pl->wide->cols : 1;
    const dpg_plan *one = pl->wide ? pl->wide->one : pl;
    const Buf &h = one->buf[B_H];
    const Dims &d = one->d;
    if (pl->heads || pl->N > 1 || pl->owned || !h.bytes)
        return dpg_fail(e, DP_EINPUT, "dpg_states: of one rank, with options.keep");
    States s = {(const char *)ws + h.off, h.is_bf16, h.layout, cols, 0,
                DP_CHUNK / d.tok,         v_first,   type,     to};
    const size_t bytes = (size_t)d.HV * d.K * d.V * bytes_of(type);
    const int alone = s.step == 1; /* chunks of all sequences are those wanted */
    for (int i = 0; i < (alone ? 1 : d.nseq); i++) {
        const Seq seq = alone ? Seq{0, d.NT} : local_sequence(one, i);
        const int n = (seq.c1 - seq.c0 + s.step - 1) / s.step;
        s.first = seq.c0;
        k_states<<<dim3(n, d.HV / cols), THREADS, 0, (cudaStream_t)stream>>>(d, s);
        CK_LAUNCH(e, "k_states");
        s.to = (char *)s.to + n * bytes;
    }
    return DP_OK;
}
