/* gpu/plan/plan.cuh - types that the folders of gpu/ share: dimensions, tables of chunks and
 * sequences, buffers of a plan, the arguments of a step.
 *
 * A tile is one chunk of one value head: tile = chunk * HV + head. Its buffers are padded to whole
 * chunks (n rows). Rows past the chunk's last token hold zeros, so that products over a tile need
 * no mask. */
#ifndef DPG_PLAN_CUH
#define DPG_PLAN_CUH
#include "dp_gpu.h"
#include "plan/status.cuh"
#include "plan/window.cuh"
#include <cuda_bf16.h>
#include <string.h>

typedef __nv_bfloat16 bf16;

#define TOKEN_PATH_CHUNK 16 /* tokens of a chunk on the token path */

/* One chunk of a rank. */
struct Chunk {
    int64_t t0;   /* first local token */
    int len, seq; /* tokens; local sub-sequence */
};

/* Chunks [c0, c1) of a global sequence: a local sub-sequence that is whole, or a part (segment) of
 * one that is cut. */
struct Seq {
    int c0, c1, gseq;
    int starts, ends; /* does the sequence start, end in these chunks */
    int part; /* its number among the parts of cut sub-sequences, 0: whole; with a table of owners
               * its number among the rank's parts */
};
/* A local sub-sequence that is cut: parts [first, first + n). */
struct Cut {
    int first, n;
};

/* A part of the tokens (dpg_owners) that the rank owns, one element of the chain of all parts. */
struct Link {
    int part;        /* its number among all parts */
    int first, last; /* its local sub-sequences */
    int pre, post;   /* numbers of earlier and later parts that share a sequence with it */
};
static inline int link_needs_m(const Link &l) { return l.first == l.last && l.pre && l.post; }

/* A merge: consecutive parts whose elements are multiplied for the rank's parts among them. It goes
 * from the first part of a sequence up to the rank's last, or from the last part down to its
 * first. */
struct Fold {
    int from, to;
};
/* All merges of a plan, and their tables. */
struct Folds {
    int n;
    const Fold *fold;
    /* [parts] place of an element among the gathered; its number among this rank's parts, or -1 */
    const int *place, *link;
};

/* One message between parts: a state, or backward its gradient; in a scan a pair over a distance.
 *   from, to   sending and receiving rank
 *   out, in    index of the part among the sender's and the receiver's parts */
struct Hop {
    int from, to, out, in;
};

/* Values that kernels take as arguments. */
struct Dims {
    int H, HV, G, K, V, R, Kg, NT, nseq; /* G = HV / H; NT chunks; nseq local sub-sequences */
    int tok, n, lr; /* tokens of a chunk; its rows tok * R; log2 R. Simple: 64 tokens. Fast: 64
                     * rows. Token: 16 tokens, a row for each of their keys */
    int64_t L;      /* local tokens */
    const Chunk *chunk;
    const Seq *seq;
    float scale, lower_bound;
    int gate, beta_form, l2norm;
    int erases; /* does any row of a token read the state */
    int in_bf16, g_bf16, o_bf16, d_bf16, qk_bf16,
        dg_bf16; /* types of q k v, g beta, o, do dv, dq dk, dg dbeta */
    int A_type, bias_type, dA_type, dbias_type; /* dpg_dtype of parameters, of their gradients */
    int rb;                                     /* 1: round what FLA stores in bf16 */
};

/* Buffers of a plan by slot, float or bf16 according to the path (plan/layout.cu). */
enum Slot {
    B_GCUM, /* cumulative sum of the gate; simple: natural log, fast: log2 units */
    B_BETA, /* activated beta, simple and token */
    B_QN,   /* normalised q and k, likewise */
    B_KN,
    B_DECAY, /* token: decay of each token; erasing keys; values */
    B_ERASE,
    B_VALUE,
    B_COS_SIN, /* of sums of angles */
    B_HALO,    /* token: what the next rank needs of this one's last token; gathered; what this one
                * got (token/halo.cu). Backward their gradients, gathered */
    B_HALOALL,
    B_HALOIN,
    B_DHALO,
    B_DHALOALL,
    B_L,   /* k k' with decay, strictly lower */
    B_AKK, /* T = (I + B L)^-1 */
    B_AQK, /* scale q k' with decay, lower */
    B_W,
    B_U,
    B_KG,
    B_QG,
    B_EC,      /* decay of a whole chunk */
    B_TB,      /* plans without w and u (`fast/bare.cuh`): T B, or U */
    B_FACTORS, /* one gate a head: factors of rows; else, kept: beta */
    B_KGAM,    /* others: k with the decay from the chunk's start */
    B_ODD,     /* fast, on more than one rank or segment: is a number not finite: in w; in u, q; in
                * do? Three words a tile */
    B_SPOILT,  /* plans without w and u in segments on one rank: is the state after a segment not
                * finite, [nrow][HV][V] */
    B_H,       /* state before each chunk */
    B_VNEW,    /* X = u - w S; without w and u: E */
    B_HM, /* (H, M) of the rank, rows of V + K words; gathered; of its segments; composed up to each
           */
    B_HMALL,
    B_PACK, /* B_HM, or B_DHM, in a payload of another format; gathered */
    B_PACKALL,
    B_HAND, /* state, or its gradient, for the next rank */
    B_SEG,
    B_PREFIX,
    B_SIN,      /* state that the last local sub-sequence, its segments or a span start from */
    B_MC,       /* factors M_c of the dense chain */
    B_DV_LOCAL, /* backward: Aqk' do */
    B_DV_NEW,   /* gradient of v_new; without w and u: dE */
    B_DH,       /* gradient of the state after each chunk */
    B_READY,    /* fast: of how many chunks it is there (fast/ready.cuh) */
    B_DHM,      /* (dH, dM) of the rank; gathered */
    B_DHMALL,
    B_REACH, /* fast: chunks of each segment that its H depends on, from the last on; backward: its
              * dH, from the first on; by head */
    B_DSOUT, /* gradient of the state that leaves the rank, or each of its segments */
    B_DZ,    /* simple: T' dv_new; fast, one gate a head: dg summed over 64 channels */
    B_DE,    /* simple: E = V - Kgam S_0 - L X; fast: dE = B T' dv_new */
    B_DP,    /* gradients of Aqk and L */
    B_DL,
    B_DQ, /* gradients of activated q and k by value head; DKW: its part from the writes */
    B_DKR,
    B_DKW,
    B_DG,     /* simple: gradient of the log gate; fast: terms of dA_log by channel */
    B_DBETA,  /* simple: gradient of activated beta; fast: the diagonal of dP, in fp32 */
    B_DANGLE, /* token: gradient of the sum of angles */
    B_PART,   /* terms of dA_log and ddt_bias by tile; by rank; gathered */
    B_GSUM,
    B_GALL,
    B_DO,   /* fast: do by columns; where the plan's reads_do, of chunks that are not whole */
    B_NORM, /* fast: 1/norms of the rows of k, then of q */
    B_SLOTS
};

/* How a tile of C rows lies in memory:
 *   PLAIN   row by row
 *   ROWS    bf16, [width/64][C][64], 16-byte pieces p of a row of 64 at p ^ (row & 7): the 128-byte
 *           swizzle of the tensor cores
 *   SLICES  bf16, [width/16][C][16], pieces at p ^ (row >> 2 & 1): an owner of 16 columns finds
 *           them together
 * Both swizzles make plain copies into shared memory readable without bank conflicts, by rows and
 * transposed (fast/tile.cuh). */
enum Layout { PLAIN, ROWS, SLICES };
/* Element (row, col) of SLICES with another number of rows. */
__host__ __device__ static inline int slice_at(int rows, int row, int col) {
    return ((col / 16 * rows + row) * 2 + (col / 8 % 2 ^ (row >> 2 & 1))) * 8 + col % 8;
}
__host__ __device__ static inline int tile_at(int layout, int row, int col, int width) {
    if (layout == ROWS)
        return ((col / 64 * DP_CHUNK + row) * 8 + (col / 8 % 8 ^ (row & 7))) * 8 + col % 8;
    if (layout == SLICES) return slice_at(DP_CHUNK, row, col);
    return row * width + col;
}

/* bytes = 0: not kept on this path. */
struct Buf {
    size_t off, bytes;
    int is_bf16, layout;
};

/* Properties of the current device, asked when a plan is made. */
struct Device {
    int index, major, minor, sms;
    size_t shared; /* most shared memory that a block may ask for */
};

struct Path;
struct Heads;
struct Wide;
struct RowMaps;

struct dpg_plan {
    Dims d;
    dpg_options opt;
    Device device;
    const Path *path;
    char why[160];          /* the reason for the path */
    dp_recurrence rows;     /* of a token; normed: what has a norm in this problem */
    int pairs;              /* that angles rotate, 0: none */
    int halo;               /* words of a halo of a part, 0: parts need none */
    int rank, N, pre, post; /* ranks before and behind that share a sequence with this one */
    int is_first, is_last;
    int needs_m; /* this rank's M can matter (math.md g.1) */
    /* With a table of owners: `all` parts, of which this rank owns `nlink` and any rank at most
     * `slots`. The fields pre, post, is_first, is_last and whole are then unused. Without a table
     * each rank owns one part. */
    int owned, by_part, all, nlink, slots;
    int sends; /* plan/sending.cuh */
    Link *links_h;
    const Link *links;
    Folds folds, folds_bwd;
    Hop *hops_h; /* all messages, in the plan's direction */
    int nhop;
    Hop *pairs_h; /* a scan: messages level by level; each level ends before level_end */
    int nlevel, level_end[32];
    /* further rows of d.seq: sub-sequences whose (M, H), and (dM, dH), other ranks may need, and
     * runs of chunks with sums of their own */
    int pre0, npre, bwd0, nbwd, run0, nrun;
    /* rows of d.seq for a pass over whole sub-sequences and parts, nwhole whole ones first; from
     * whole0 on the local sub-sequences, each whole */
    int nrow, nwhole, whole0;
    /* Number of cut sub-sequences, and of their parts. One of several ranks cuts at most its last
     * local sub-sequence, a single rank any. If none is cut, the last one counts as one part */
    int ncut, nseg;
    Cut *cuts_h;
    const Cut *cuts;
    int bare;     /* fast: chunks make no w and u */
    int reads_do; /* fast/columns.cuh */
    int leads;    /* H of the rank comes from its ordinary pass, which waits for no rank */
    /* The pass over a span runs beside the chunk kernel of the next; 0: behind it. Rows of d.seq
     * from span0 on are spans. span: of a copy of the plan, 1 the first. */
    int spans, span0, span;
    int pass_blocks;      /* of its pass, 0: none ran */
    int whole;            /* does the last local sub-sequence start on this rank */
    int mc_batch;         /* chunks whose M_c are formed at once */
    struct dpg_plan *bwd; /* the backward's own share: path, segments, buffers in the same
                           * workspace; or NULL */
    int is_bwd;           /* this is such a plan */
    int all_heads; /* value heads of all ranks that exchange heads; this number chooses the kernels,
                    * so that a rank uses the kernels of one rank */
    Heads *heads;  /* ranks exchange heads (plan/heads.cuh), all work is there; or NULL */
    /* dpg_tensors.saved: states [HV][K][V], then matrices [HV][K][K] of ranks rank + 1 .., then of
     * parts m_part .. */
    int64_t saved_states, saved_ms, saved_parts;
    int parts, m_part; /* backward: parts that run side by side, 1: sub-sequences are whole; the
                        * first whose M is kept */
    cudaStream_t side; /* of steps that wait for other ranks, of a pass in spans; or NULL */
    cudaEvent_t forked, joined;
    RankWindow window;
    void *window_memory, **windows_at; /* of all ranks, as this process has them */
    dpg_comm *opened; /* of windows that other ranks must close before they are freed; or NULL */
    dpg_marks marks;  /* with windows */
    Chunk *chunks_h;
    Seq *seqs_h;
    void *tables; /* device memory behind d.chunk and d.seq */
    Buf buf[B_SLOTS];
    size_t ws_bytes;
    RowMaps *maps;       /* of the last calls' tensors (fast/maps.cuh); or NULL */
    const void *left_in; /* the workspace of the last whole forward */
    Wide *wide;          /* values are wider than the kernels (plan/wide.cuh): another plan does all
                          * work; or NULL */
    int single;          /* one kernel (fast/forward.cuh) is the forward, in the step of states; 2:
                          * of two blocks a head */
};

/* Arguments of one step of a plan. g is NULL in the forward. */
struct Call {
    dpg_plan *p;
    const dpg_tensors *t;
    const dpg_grads *g;
    void *ws;
    cudaStream_t s;
    dp_err *e;
    bool overlaps = false; /* one call does all steps of the backward, on one stream */
};

template <class T> static inline T *at(const dpg_plan *p, void *ws, int slot) {
    return p->buf[slot].bytes ? (T *)((char *)ws + p->buf[slot].off) : NULL;
}
template <class T> static inline T *at(const Call &c, int slot) { return at<T>(c.p, c.ws, slot); }

/* Does the backward read the forward's results from the workspace that both share? */
static inline int saves_all(const dpg_plan *p) {
    return p->opt.backward && p->opt.save == DPG_SAVE_ALL;
}

/* fast: if every query head has one value head and a token one key, nothing is summed after a tile.
 * The tile writes dq and dk itself, in the type of dv. */
static inline int grads_are_whole(const Dims &d) {
    return d.G == 1 && d.R == 1 && d.qk_bf16 == d.d_bf16;
}

/* Chunks times value heads. */
static inline unsigned tile_count(const dpg_plan *p) {
    return (unsigned)((int64_t)p->d.NT * p->d.HV);
}

/* Parts of one sequence that start from states of their own: segments, or owned parts. */
static inline int state_parts(const dpg_plan *p) {
    return !p->owned ? p->nseg : p->nlink ? p->nlink : 1;
}
/* Elements of a message. */
static inline int message_parts(const dpg_plan *p) { return p->owned ? p->slots : 1; }
/* Elements that all ranks gave, as they arrived. */
static inline float *gathered(const Call &c, int own, int all) {
    return at<float>(c, c.p->buf[all].bytes ? all : own);
}

/* Local sub-sequence i from its first chunk to its last, however it is cut in segments. */
static inline Seq local_sequence(const dpg_plan *p, int i) { return p->seqs_h[p->whole0 + i]; }

/* Chunks of each segment that its H or dH depends on, or NULL. Where some are left out, M is 0. */
#define HALVES_OF_M 2 /* 64 rows each: the forward's B_REACH has a number of either */
static inline const int *reaches(const dpg_plan *p, void *ws) {
    return (p->is_bwd ? p->parts : p->nseg) > 1 ? at<int>(p, ws, B_REACH) : NULL;
}
#ifdef __CUDACC__
/* halves: numbers of a part and head. */
__device__ __forceinline__ bool is_gone(const int *reach, int halves, int part, int HV, int hv,
                                        const Seq &s) {
    if (!reach) return false;
    const int *r = reach + (part * HV + hv) * halves;
    return max(r[0], r[halves - 1]) < s.c1 - s.c0;
}
#endif

static inline int rounds_as_pass(const dpg_options *o) {
    return o->chain == DP_BF16 && o->chain_how == DPG_CHAIN_AUGMENTED;
}
/* fast: has (M, H) of segments the rounding of a pass (pre_own.cu)? That of one rank always. */
static inline int pre_is_rounded(const dpg_plan *p) {
    return (p->N == 1 && !p->owned) || rounds_as_pass(&p->opt);
}

/* Words in a row of B_DHM. */
static inline int dh_row(const dpg_plan *p) { return p->d.V + (p->opt.send_dh_only ? 0 : p->d.K); }

/* The kept M of ranks rank + 1 .., and of the parts from m_part on. */
static inline float *saved_rank_m(const dpg_plan *p, const dpg_tensors *t) {
    return (float *)t->saved + p->saved_states * p->d.HV * p->d.K * p->d.V;
}
static inline float *saved_part_m(const dpg_plan *p, const dpg_tensors *t) {
    return saved_rank_m(p, t) + p->saved_ms * p->d.HV * p->d.K * p->d.K;
}
#endif
