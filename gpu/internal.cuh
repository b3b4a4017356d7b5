/* gpu/internal.cuh - what the files of gpu/ share: dimensions, the chunk table, buffers of a plan, checked CUDA calls.
 *
 * A tile is one chunk of one value head: tile = chunk * HV + hv. Its buffers are padded to whole chunks (n rows); rows past the
 * chunk's last token hold zeros, so that products over a tile need no mask. */
#ifndef DPG_INTERNAL_CUH
#define DPG_INTERNAL_CUH
#include <cuda_runtime.h>
#include <cuda_bf16.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>
#include "dp_gpu.h"

typedef __nv_bfloat16 bf16;

struct Chunk { int64_t t0; int len, seq; };              /* first local token, tokens, local sub-sequence */
/* Chunks [c0, c1) of a global sequence, does it start / end in them, which part of a local sub-sequence they are. The last local
 * sub-sequence is cut in nseg parts (segments), all others are whole. */
struct Seq { int c0, c1, gseq, starts, ends, part; };

struct Dims {
    int H, HV, G, K, V, R, Kg, NT, nseq;
    int tok, n, lr;                                      /* tokens of a chunk, its rows tok * R, log2 R. Simple: 64 tokens. Fast: 64 rows */
    int64_t L;
    const Chunk *chunk;
    const Seq *seq;
    float scale, lower_bound;
    int gate, beta_form, l2norm, in_bf16, g_bf16, o_bf16, d_bf16, dg_bf16;
    int rb;                                              /* 1: round what FLA stores in bf16 */
};

/* Buffers by slot; float or bf16 according to the path (plan.cu holds the table). */
enum Slot { B_GCUM, B_BETA, B_QN, B_KN, B_L, B_AKK, B_AQK, B_W, B_U, B_KG, B_QG, B_EC, B_H, B_VNEW, B_HM, B_HMALL, B_SEG, B_PREFIX, B_SIN, B_MC,
            /* backward */
            B_DVL, B_DX, B_DH, B_DHM, B_DHMALL, B_DSOUT, B_DZ, B_E, B_DP, B_DL, B_DQ, B_DKR, B_DKW, B_DG, B_DBETA, B_PART, B_GSUM, B_GALL,
            B_DO, B_NORM,                                /* fast: do by columns; 1/norms of the rows of k, then of q */
            B_SLOTS };

/* Element (row, col) of SLICES with another number of rows: [width/16][rows][16]. */
__host__ __device__ static inline int slice_at(int rows, int row, int col) { return ((col / 16 * rows + row) * 2 + (col / 8 % 2 ^ (row >> 2 & 1))) * 8 + col % 8; }

/* Element (row, col) of a tile of rows of `width` elements. ROWS: 16-byte pieces c of bf16 at c ^ (row & 7); SLICES: [width/16][C][16],
 * pieces at c ^ (row >> 2 & 1). Both make bulk copies into shared memory readable without bank conflicts (fast.cu). */
enum Layout { PLAIN, ROWS, SLICES };
__host__ __device__ static inline int tile_at(int layout, int row, int col, int width)
{
    if (layout == ROWS)
        return row * width + ((col / 8) ^ (row & 7)) * 8 + col % 8;
    if (layout == SLICES)
        return slice_at(DP_CHUNK, row, col);
    return row * width + col;
}

/* States from rank to rank by stores into each other's memory (window.cu). A rank's window: the states [SLOTS][HV][K][V] that it starts from and, one number a block of
 * 32 columns, [HV][V/32], the last forward whose words have come; the same of M, [SLOTS][HV][K][K] and [HV][K/32], by sender, if the backward wants those of later ranks; by receiver the
 * last forward whose words it is through with, [N]. */
#define SLOTS 3
struct RankWindow {
    float *mine, **peer;                                 /* mine NULL: none, the communicator gathers; peer: all of them, as this device reaches them */
    int64_t state, m;                                    /* words of the states and of M; m = 0: none are sent */
    int HV, K, V, N, rank, n;                            /* n: the last forward that was entered, from 1 on */
    int later, earlier;                                  /* ranks that follow; M goes to ranks rank - earlier .. rank - 1 */
    __host__ __device__ int64_t round4(int64_t words) const { return (words + 3) / 4 * 4; }      /* float4 */
    __host__ __device__ int64_t states() const { return SLOTS * state + round4(HV * V / 32); }
    __host__ __device__ int64_t ms() const { return m ? SLOTS * m + round4(HV * K / 32) : 0; }
    __host__ __device__ float *s(float *window) const { return window + n % SLOTS * state; }
    __host__ __device__ uint32_t *s_came(float *window) const { return (uint32_t *)(window + SLOTS * state); }
    __host__ __device__ float *ms(float *window, int sender) const { return window + states() + sender * ms() + n % SLOTS * m; }
    __host__ __device__ uint32_t *m_came(float *window, int sender) const { return (uint32_t *)(window + states() + sender * ms() + SLOTS * m); }
    __host__ __device__ uint32_t *used(float *window, int receiver) const { return (uint32_t *)(window + states() + N * ms()) + receiver; }
};
#ifdef __CUDACC__
/* Until *number is n or more; or until the communicator ends, which is asked rarely because the word lies behind the bus. */
__device__ inline void await(const uint32_t *number, int n, const volatile int *stop)
{
    for (int i = 1; (int32_t)(*(const volatile uint32_t *)number - (uint32_t)n) < 0; i++)
        if (i % 1024 == 0 && *stop)
            return;
}
#endif

struct Buf { size_t off, bytes; int is_bf16, layout; };  /* bytes = 0: not kept on this path */

struct dpg_plan {
    Dims d;
    dpg_options opt;
    int rank, N, pre, post, is_first, is_last, device;
    int needs_m;                                         /* this rank's M can matter (math.md g.1) */
    int nseg;                                            /* parts of the last local sub-sequence */
    int whole;                                           /* does the last local sub-sequence start on this rank */
    int mc_batch;                                        /* chunks whose M_c are formed at once */
    struct dpg_plan *bwd;                                /* the backward's own share: path, segments, buffers in the same workspace; or NULL */
    int is_bwd;                                          /* this is such a plan */
    int64_t saved_states, saved_ms, saved_parts;         /* [HV][K][V] states, then [HV][K][K] matrices of ranks rank+1 .., then of parts m_part .. in dpg_tensors.saved */
    int parts, m_part;                                   /* backward: parts of the one local sub-sequence that run side by side, 1: whole; the first whose M is kept */
    cudaStream_t side;                                   /* backward, N > 1: what waits for other ranks */
    cudaEvent_t forked, joined;
    RankWindow window;
    void *window_memory;
    dpg_marks marks;                                     /* of the forward that runs */
    Chunk *chunks_h;
    Seq *seqs_h;
    void *tables;                                        /* device memory behind d.chunk and d.seq */
    Buf buf[B_SLOTS];
    size_t ws_bytes;
};

template <class T> static inline T *at(const dpg_plan *p, void *ws, int slot)
{
    return p->buf[slot].bytes ? (T *)((char *)ws + p->buf[slot].off) : NULL;
}

/* Local sub-sequence i from its first chunk to its last, however it is cut in segments. */
static inline Seq local_sequence(const dpg_plan *p, int i)
{
    Seq q = p->seqs_h[i], z = p->seqs_h[i == p->d.nseq - 1 ? i + p->nseg - 1 : i];
    q.c1 = z.c1, q.ends = z.ends;
    return q;
}

/* The kept M of ranks rank + 1 .., and of the parts from m_part on. */
static inline float *saved_rank_m(const dpg_plan *p, const dpg_tensors *t) { return (float *)t->saved + p->saved_states * p->d.HV * p->d.K * p->d.V; }
static inline float *saved_part_m(const dpg_plan *p, const dpg_tensors *t) { return saved_rank_m(p, t) + p->saved_ms * p->d.HV * p->d.K * p->d.K; }

dp_status dpg_fail(dp_err *e, dp_status code, const char *fmt, ...) __attribute__((format(printf, 3, 4)));

#define CK(e, expr) do { cudaError_t err_ = (expr); if (err_ != cudaSuccess) \
    return dpg_fail(e, DP_EDEVICE, "%s:%d: %s: %s", __FILE__, __LINE__, #expr, cudaGetErrorString(err_)); } while (0)
#define CK_LAUNCH(e, what) do { cudaError_t err_ = cudaGetLastError(); if (err_ != cudaSuccess) \
    return dpg_fail(e, DP_EDEVICE, "%s:%d: launch of %s: %s", __FILE__, __LINE__, what, cudaGetErrorString(err_)); } while (0)
#define TRY(...) do { dp_status st_ = (__VA_ARGS__); if (st_ != DP_OK) return st_; } while (0)

/* simple.cu */
dp_status simple_chunks(dpg_plan *p, const dpg_tensors *t, void *ws, cudaStream_t s, dp_err *e);
dp_status simple_pre_h(dpg_plan *p, const dpg_tensors *t, void *ws, cudaStream_t s, dp_err *e);
dp_status simple_states(dpg_plan *p, const dpg_tensors *t, void *ws, cudaStream_t s, dp_err *e);      /* h, v_new, final_state */
dp_status simple_state(dpg_plan *p, const dpg_tensors *t, void *ws, cudaStream_t s, dp_err *e);       /* and o */
/* fast.cu */
int fast_supports(const dpg_problem *p, const dpg_options *o);
dp_status fast_chunks(dpg_plan *p, const dpg_tensors *t, void *ws, cudaStream_t s, dp_err *e);
dp_status fast_state(dpg_plan *p, const dpg_tensors *t, void *ws, cudaStream_t s, dp_err *e);
/* pre.cu */
dp_status fast_pre(dpg_plan *p, const dpg_tensors *t, void *ws, cudaStream_t s, dp_err *e);
/* chain.cu */
dp_status chain_pre_m(dpg_plan *p, void *ws, cudaStream_t s, dp_err *e);
dp_status chain_pre_dm(dpg_plan *p, float *dM, int ld, void *ws, cudaStream_t s, dp_err *e);      /* adjoint chain of the first local sub-sequence */
dp_status chain_compose(dpg_plan *p, void *ws, cudaStream_t s, dp_err *e);
dp_status chain_merge(dpg_plan *p, void *ws, cudaStream_t s, dp_err *e);
dp_status chain_compose_bwd(dpg_plan *p, const dpg_tensors *t, void *ws, cudaStream_t s, dp_err *e);  /* dH of the parts in B_SEG -> dH of B_DHM */
dp_status chain_merge_bwd(dpg_plan *p, const dpg_tensors *t, void *ws, cudaStream_t s, dp_err *e);    /* B_DHMALL, B_SEG -> B_DSOUT */

/* window.cu */
dp_status window_enter(dpg_plan *p, dpg_comm *comm, dp_err *e);                              /* a forward's states are on their way */
dp_status window_keep(dpg_plan *p, const dpg_tensors *t, cudaStream_t s, dp_err *e);         /* M of later ranks into `saved` */

/* What a path has to offer for the backward; p is a plan with is_bwd. Between them plan.cu gathers and merges. */
typedef dp_status (*bwd_fn)(dpg_plan *p, const dpg_tensors *t, const dpg_grads *g, void *ws, cudaStream_t s, dp_err *e);
struct BwdOps {
    bwd_fn chunks;                                       /* from inputs: whatever the rest reads, but the states */
    bwd_fn states;                                       /* from that and B_SIN, restored by then: h, v_new, which nothing reads before `intra` */
    bwd_fn dAv;
    bwd_fn pre;                                          /* dH of the first local sub-sequence into columns 0..V-1 of B_DHM, zeroed by then; with parts: of each into B_SEG */
    bwd_fn state, intra;
    bwd_fn sums;                                         /* of this rank for dA_log and ddt_bias, to B_GSUM: [HV], [HV][Kg] */
    bwd_fn norm;                                         /* dq and dk: groups summed, L2 norm; reads nothing of `sums` */
};
/* fast_bwd.cu */
int fast_bwd_supports(const dpg_problem *p, const dpg_options *o);
extern const BwdOps fast_bwd;
/* simple_bwd.cu */
extern const BwdOps simple_bwd;
dp_status bwd_reduce(dpg_plan *p, const dpg_grads *g, void *ws, cudaStream_t s, dp_err *e);           /* B_GALL -> dA_log, ddt_bias, any path */
static inline int dh_row(const dpg_plan *p) { return p->d.V + (p->opt.send_dh_only ? 0 : p->d.K); }   /* words in a row of B_DHM */

/* f<K, V>(p, ...) of a plan on the fast path. */
#define BY_WIDTHS(f, p, ...) ((p)->d.K == 64 ? (p)->d.V == 64 ? f<64, 64>(p, __VA_ARGS__) : f<64, 128>(p, __VA_ARGS__) \
    : (p)->d.V == 64 ? f<128, 64>(p, __VA_ARGS__) : f<128, 128>(p, __VA_ARGS__))

#ifdef __CUDACC__
__device__ __forceinline__ float rbf(float x) { return __bfloat162float(__float2bfloat16_rn(x)); }
__device__ __forceinline__ float rif(float x, int rb) { return rb ? rbf(x) : x; }
__device__ __forceinline__ float ldx(const void *p, int64_t i, int is_bf16)
{
    return is_bf16 ? __bfloat162float(((const bf16 *)p)[i]) : ((const float *)p)[i];
}
/* exp of less than this is 0 in fp32 (below half of 2^-149), so that raising a step to it changes no product but keeps the cumulative sum
 * and its differences finite behind a reset, g = -inf. A comparison, not fmaxf: NaN stays NaN. */
#define GATE_FLOOR -104.f
__device__ __forceinline__ float gate_floor(float g) { return g < GATE_FLOOR ? GATE_FLOOR : g; }
/* log2 units. Rows of a diagonal 16 x 16 block further than this below its first row (a factor 2^110, which bf16 holds) are summed pairwise. */
#define NEAR 110.f
__device__ __forceinline__ float near(float x) { return x > NEAR ? -INFINITY : x; }
/* log decay of one step from the raw gate x (math.md c), natural log. log1p: softplus through log(1 + e^x) loses slow gates. */
__device__ __forceinline__ float gate_value(const Dims &d, float graw, float a, float bias)
{
    if (d.gate == DP_GATE_LOG)
        return graw;
    float x = graw + bias;
    if (d.gate == DP_GATE_SOFTPLUS)
        return -a * (fmaxf(x, 0.f) + log1pf(expf(-fabsf(x))));
    return d.lower_bound / (1.f + expf(-a * x));
}
__device__ __forceinline__ float beta_value(const Dims &d, float b)
{
    return d.beta_form == DP_BETA_PLAIN ? b : (d.beta_form == DP_BETA_SIGMOID ? 1.f : 2.f) / (1.f + expf(-b));
}
#endif
#endif
