/* gpu/fast/fast.cuh - steps of the fast path that its files share, and launches by width. */
#ifndef DPG_FAST_CUH
#define DPG_FAST_CUH
#include "plan/launch.cuh"
#include "plan/paths.cuh"

struct ChunkOut;
/* Where the plan keeps the tile's tensors. */
ChunkOut chunk_out(const Call &c);
/* chunks.cu: a gate a channel; chunks_one.cu: one a head. */
dp_status fast_chunks_channels(const Call &c);
dp_status fast_chunks_one(const Call &c);
/* state.cu */
dp_status fast_state(const Call &c);
/* state_bare.cu: one gate a head, or one a channel */
dp_status fast_state_bare(const Call &c);
/* forward_one.cu, forward_gated.cu: all of it, where the plan is `single` */
dp_status fast_forward_one(const Call &c);
dp_status fast_forward_gated(const Call &c);
/* spoil.cu; behind either of both, where B_SPOILT is */
dp_status fast_spoil(const Call &c);
dp_status fast_pre_states(const Call &c); /* H of a whole sub-sequence, where pre.cu cannot */
/* state_kept.cu: of a backward without w and u */
struct StateArgs;
dp_status fast_kept_states(const Call &c, StateArgs a);
dp_status fast_kept_bwd(const Call &c, StateArgs a, int nseq);
/* columns.cu */
dp_status fast_columns(const Call &c);
/* state_bwd.cu */
dp_status fast_bwd_states(const Call &c);
dp_status fast_bwd_pre(const Call &c);
dp_status fast_bwd_state(const Call &c);
/* grad.cu, grad_one.cu */
dp_status fast_grad_channels(const Call &c);
dp_status fast_grad_one(const Call &c);
size_t fast_grad_bytes(int K, int V); /* least shared memory of a block */
size_t fast_grad_one_bytes(int K, int V);
/* sums.cu */
dp_status fast_sums(const Call &c);
dp_status fast_norm(const Call &c);
/* pre.cu */
dp_status fast_pre(const Call &c);
dp_status fast_reach(const Call &c, int *reach);

/* Formats that a kernel is compiled for. BF16: one key a token, everything in bf16. WIDE_GATES: but
 * gates, beta and their gradients in fp32. ANY: it reads keys and formats from the plan. */
enum Formats { ANY, BF16, WIDE_GATES };
static inline Formats formats_of(const Dims &d) {
    return d.R > 1 || !d.in_bf16 ? ANY : d.g_bf16 ? BF16 : WIDE_GATES;
}
static inline Formats formats_of_bwd(const Dims &d) {
    return d.d_bf16 && d.dg_bf16 == d.g_bf16 ? formats_of(d) : ANY;
}
#ifdef __CUDACC__
template <Formats F> __device__ __forceinline__ Dims known(const Dims &d) {
    Dims x = d;
    if (F == ANY) return x;
    x.R = 1;
    x.lr = 0;
    x.in_bf16 = 1;
    x.g_bf16 = F == BF16;
    return x;
}
template <Formats F> __device__ __forceinline__ Dims known_bwd(const Dims &d) {
    Dims x = known<F>(d);
    if (F == ANY) return x;
    x.d_bf16 = 1;
    x.dg_bf16 = F == BF16;
    return x;
}
#endif

/* Blocks that wait would keep multiprocessors from kernels of the plan's other stream. */
static inline Queue queue_of(const Call &c) { return {c.p->device, c.s, c.e, c.p->side != NULL}; }
/* A pass of state.cu or state_bwd.cu whose blocks come early, one by one, is slower by 40 us
 * (reports/device/speed.txt). */
static inline Queue queue_of_pass(const Call &c) { return {c.p->device, c.s, c.e, true}; }

/* The instance of a kernel for formats. */
#define OF_FORMATS(f, kernel, ...)            \
    ((f) == BF16  ? kernel<__VA_ARGS__, BF16> \
     : (f) == ANY ? kernel<__VA_ARGS__, ANY>  \
                  : kernel<__VA_ARGS__, WIDE_GATES>)

/* S<K, V>::run(c, ...) of a plan on the fast path. */
template <template <int, int> class S, class... A>
/* The instance for the plan's K and V; DP_EINPUT: there is none. */
static inline dp_status by_widths(const Call &c, A... a) {
    const Dims &d = c.p->d;
    if (d.K == 64) return d.V == 64 ? S<64, 64>::run(c, a...) : S<64, 128>::run(c, a...);
    return d.V == 64 ? S<128, 64>::run(c, a...) : S<128, 128>::run(c, a...);
}
#endif
