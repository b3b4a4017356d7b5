/* harness/simulated/ranks.h - the whole context-parallel pipeline on N simulated ranks in one
 * process, forward and backward.
 *
 * Each stage is computed in the formats that the policy names: the M chain in `chain`, everything
 * else as `base` says (ref/vocabulary/formats.h). A rank touches only its own tokens and the data
 * of the all-gather (or the ring). It gets these from memory or, where a process has one rank
 * alone, by messages (peers). Stages, in order:
 *   gate -> intra, wy -> pre_process_fwd -> all_gather, merge_fwd -> state_fwd -> output
 *   (recompute) -> dAv -> pre_process_bwd -> all_gather, merge_bwd -> state_bwd
 *               -> wy_bwd, intra_bwd -> gate_bwd
 * The merge accumulates in the base's accumulator format (fp32 for bf16). Chunks restart at every
 * local sub-sequence.
 * Results are bitwise the same for any number of threads, and, but for dp_sim_new_lapack, on every
 * machine.
 */
#ifndef DP_RANKS_H
#define DP_RANKS_H
#include "fault.h"
#include "ref/chunk/chunk.h"
#include "ref/vocabulary/context.h"
#include "ref/vocabulary/design.h"
#include "ref/vocabulary/peers.h"
#include "ref/vocabulary/problem.h"
#ifdef __cplusplus
extern "C" {
#endif

#define DP_MAX_TRAJ 16

/* The stages in the order in which they run. Stage all_gather has no code of its own here: the
 * merges read the pairs of other ranks. Stage recompute repeats state_fwd for the backward (only
 * where a fault makes that differ). Stages wy_bwd and intra_bwd run together. */
typedef enum {
    DP_STAGE_GATE,
    DP_STAGE_INTRA,
    DP_STAGE_SOLVE,
    DP_STAGE_WY,
    DP_STAGE_PRE_FWD,
    DP_STAGE_MERGE_FWD,
    DP_STAGE_STATE_FWD,
    DP_STAGE_OUTPUT,
    DP_STAGE_RECOMPUTE,
    DP_STAGE_DAV,
    DP_STAGE_PRE_BWD,
    DP_STAGE_MERGE_BWD,
    DP_STAGE_STATE_BWD,
    DP_STAGE_WY_BWD,
    DP_STAGE_INTRA_BWD,
    DP_STAGE_GATE_BWD,
    DP_NSTAGES
} dp_stage;
extern const char *const dp_stage_names[DP_NSTAGES];

typedef struct {
    int64_t messages, bytes;
} dp_traffic;

/* One run of the simulated ranks. */
typedef struct {
    int N;
    dp_base base;
    dp_format chain;
    dp_exchange merge;
    dp_fault fault;
    int backward;
    dp_payload payload;
} dp_sim_policy;

typedef struct { /* one chunk position: HV consecutive dp_chunk share it */
    int rank, sub, c;
    int64_t t0;
} dp_group;

/* Calls of s->after[..], which deliberate faults alone set (fault_effect.c). They follow each stage
 * (of chunks: for each of them), and each part of a stage that is used at once. */
enum {
    DP_AFTER_OPENING = DP_NSTAGES, /* contexts are known, nothing is computed */
    DP_AFTER_BEGINNING,            /* of a run: exchange and payload are known */
    DP_AFTER_CHUNK,                /* of the state pass: x is its state */
    DP_AFTER_SENDING,     /* M (or NULL) and x, H or a state, of a message before it leaves */
    DP_AFTER_MERGING,     /* x is M from + H */
    DP_AFTER_GRADIENTS,   /* of a chunk: grad */
    DP_AFTER_NORMS,       /* norm_q and norm_k may be set, for the backward through them */
    DP_AFTER_WRITES,      /* of a rank's gradients through erase o k and write o v: dk in x */
    DP_AFTER_ACTIVATIONS, /* of a rank's gradients through activations: part */
    DP_AFTER_SUMS,        /* of parameters' gradients by rank, before they are added: x */
    DP_AFTER_RUN,
    DP_NAFTER
};
typedef struct {
    int at, hv; /* chunk (of dp_sim.group) or rank, and value head */
    const struct dp_sim_way *way;
    double *x, *M;
    const double *from, *H;
    dp_chunk_grad *grad;
    dp_result *part;
} dp_sim_place;
struct dp_sim;
typedef void dp_sim_after_fn(struct dp_sim *s, const dp_sim_place *place);

typedef struct dp_sim {
    const dp_problem *p;
    dp_base base;
    /* of the simulation; bases of stages that differ from its own use their defaults */
    dp_design design;
    /* the base policy of each stage: all `base`, unless made by dp_sim_new_policy */
    dp_base at[DP_NSTAGES];
    /* [T] 1: a chunk begins at this token whatever was before; NULL: chunks are cut by length */
    const unsigned char *first_of_call;
    int by_inverse;          /* as in dp_chunk */
    const dp_linear *linear; /* who multiplies and solves */
    int N;
    const dp_peers *peers; /* who computes other ranks; NULL: all are here */
    dp_fault fault;        /* its functions below alone look at it */
    dp_sim_after_fn *after[DP_NAFTER];
    /* [N*HV]: where the fault acted in the last run (faults that show between runs: in all so far);
     * in what later runs keep */
    unsigned char *hit, *hit_kept;
    int one_by_one; /* ranks in their order: several end one sequence */
    int turns;      /* heads and ranks are added from number `runs` on, and round */
    int runs;       /* dp_sim_run calls that have ended */
    /* the problem of dp_sim_new; p is &own when a fault reads other inputs */
    const dp_problem *given;
    dp_problem own;
    dp_context *ctx;                            /* [N] */
    double *q, *k, *g, *beta, *rstd_q, *rstd_k; /* activated, all tokens */
    double *norm_q, *norm_k;                    /* what the norms' backward reads; NULL: q and k */
    double *erasing, *values; /* erase o k (or zeros), write o v; NULL: k erases, v is written */
    int ngroup;
    dp_group *group;
    int **first;  /* [N][nlocal+1]: group range of a local sub-sequence */
    dp_chunk *ch; /* [ngroup][HV] */
    /* [2][ngroup][HV]: M_c, formed on first use; second half: for the backward, where its base
     * differs */
    double **factor;
    double *dq, *dk, *dg, *dbeta; /* gradients of the activated inputs, from intra_bwd and wy_bwd */
    double *derasing, *dvalues;

    /* results of the last dp_sim_run; [N*HV] pointers, NULL where the rank has none (math.md g.2)
     */
    dp_format chain;
    dp_exchange merge;
    dp_payload payload; /* of runs to come; that of the design until it is set */
    dp_traffic sent;    /* by all ranks in the last run, where all are here */
    dp_result out;
    double **S_in, **M, **H, **dS_out, **dM, **dH;
    int traj_rank, ntraj, traj_chunks[DP_MAX_TRAJ];
    double **traj; /* [ntraj*HV]: M of traj_rank after that many chunks */
    int have_forward, have_backward;
    int sharers; /* ranks that have all tokens of some heads each; 0: of the tokens that they own */
    struct dp_sim_heads *heads; /* of the exchange of that name: ranks.c */
} dp_sim;

/* Base policy everywhere, its default design. DP_EINPUT: T does not split over N ranks. */
dp_status dp_sim_new(dp_sim *s, const dp_problem *p, dp_base base, int N, dp_fault fault,
                     dp_err *e);
/* The same with chunks of that many tokens. */
dp_status dp_sim_new_chunks(dp_sim *s, const dp_problem *p, dp_base base, int chunk, int N,
                            dp_fault fault, dp_err *e);
/* A chunk design (chunk > 0) without faults. */
dp_status dp_sim_new_design(dp_sim *s, const dp_problem *p, const dp_design *design, int N,
                            dp_err *e);
/* The same on one rank; chunks begin anew at every marked token [T], which is borrowed. It is the
 * computation of a session's calls with exact states between them. */
dp_status dp_sim_new_calls(dp_sim *s, const dp_problem *p, const dp_design *design,
                           const unsigned char *first_of_call, dp_err *e);
/* The same over CBLAS and LAPACKE: other orders of summation, those of the machine. */
dp_status dp_sim_new_lapack(dp_sim *s, const dp_problem *p, const dp_design *design, int N,
                            dp_err *e);
/* One rank of N, that of peers, alone. `part` has its tokens (T of them; parts one behind the
 * other) and the cu and states of all. Results are those of its tokens and of the sequences that
 * begin or end in them. They lie in lists of all ranks; dA_log and ddt_bias are the sums. Borrows
 * part and peers. */
dp_status dp_sim_new_rank(dp_sim *s, const dp_problem *part, dp_base base, const dp_peers *peers,
                          dp_err *e);
/* The frame of a simulation whose ranks are computed elsewhere: contexts, chunks' places, room for
 * results with dp_sim_begin; nothing is computed. */
dp_status dp_sim_new_frame(dp_sim *s, const dp_problem *p, dp_base base, int N, dp_err *e);
/* With a base of its own for every stage. */
dp_status dp_sim_new_policy(dp_sim *s, const dp_problem *p, const dp_base at[DP_NSTAGES], int N,
                            dp_err *e);
/* A chunk design, with a fault's functions: what dp_sim_new and dp_sim_new_chunks, which stand in
 * fault_effect.c, call. */
dp_status dp_sim_new_faulty(dp_sim *s, const dp_problem *p, const dp_design *design, int N,
                            dp_fault fault, dp_sim_after_fn *const after[DP_NAFTER], dp_err *e);
/* The same problem on another number of ranks, without faults. 1: its chunks are the same ones, so
 * their own results are kept, and s->out as it is until the next run. 0: they are not, and *s stays
 * as it was. */
int dp_sim_split(dp_sim *s, int N);
/* Only the data that ranks exchange and receive (M, H, S_in and their gradients); s->out stays.
 * Gradients need a run with backward before it. */
void dp_sim_run_ranks(dp_sim *s, dp_format chain, dp_exchange merge, int backward);
/* Frees what it holds; the struct is the caller's. */
void dp_sim_free(dp_sim *s);
/* Work that no chain format changes is done once and kept between calls. */
void dp_sim_run(dp_sim *s, dp_format chain, dp_exchange merge, int backward);
/* One stage at a time, from whatever *s holds at that moment, keeping nothing of earlier runs:
 * dp_sim_begin, then the stages in order. */
void dp_sim_begin(dp_sim *s, dp_format chain, dp_exchange merge, int backward);
void dp_sim_stage(dp_sim *s, dp_stage stage);

/* Calls who was put there, if anybody was. */
static inline void dp_sim_after(dp_sim *s, int event, dp_sim_place place) {
    if (s->after[event]) s->after[event](s, &place);
}
/* Is rank r (part r) computed here? */
static inline int dp_sim_has(const dp_sim *s, int r) {
    return dp_peers_have(s->peers, s->p->own, s->N, r);
}
/* The chunk of a group of tokens and a value head. */
static inline dp_chunk *dp_sim_chunk(const dp_sim *s, int group, int hv) {
    return &s->ch[(int64_t)group * s->p->HV + hv];
}
/* State before local sub-sequence sub of rank r without what the merge brings: s0 where the
 * sequence starts here, else zeros. */
const double *dp_sim_start(const dp_sim *s, int rank, int sub); /* [HV][K][V], or NULL for zeros */
/* do at a token for head hv: row stride HV*V in the problem; gathered into [c][V]. */
void dp_sim_gather_do(const dp_sim *s, int group, int hv, double *dout);

#ifdef __cplusplus
}
#endif
#endif
