/* harness/simulated/ranks.h - the whole context-parallel pipeline on N simulated ranks in one
 * process, forward and backward.
 *
 * The M chain is computed in the format `chain`, all else in the formats of `base`
 * (ref/vocabulary/formats.h). A rank reads only its own tokens and the data of the exchange. It
 * gets these data from memory or, if each process has one rank, by messages (peers). Stages, in
 * order:
 *   gate -> intra, wy -> pre_process_fwd -> all_gather, merge_fwd -> state_fwd -> output
 *   (recompute) -> dAv -> pre_process_bwd -> all_gather, merge_bwd -> state_bwd
 *               -> wy_bwd, intra_bwd -> gate_bwd
 * The merge accumulates in the base's accumulator format (fp32 for bf16). Chunks restart at every
 * local sub-sequence.
 * Results are bitwise the same for any number of threads, and, but for dp_linear_lapack, on every
 * machine.
 */
#pragma once
#include "fault.h"
#include "ref/chunk/chunk.h"
#include "ref/chunk/conv.h"
#include "ref/chunk/gate.h"
#include "ref/chunk/stages.h"
#include "ref/vocabulary/context.h"
#include "ref/vocabulary/design.h"
#include "ref/vocabulary/own.h"
#include "ref/vocabulary/problem.h"

#define DP_MAX_TRAJ 16

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

/* Events: acts.after[..] is called after each stage (of chunks: after each chunk), and after parts
 * of a stage that are used at once. Only deliberate faults set it (fault_effect.c). */
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
    DP_AFTER_HALOS,       /* dp_sim.halos are there */
    DP_AFTER_HALO_BWD,    /* x is the gradient of the tokens that rank `at` gave */
    DP_AFTER_CONV,        /* of input `at` of p (NULL: of none), conv: convolved */
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
    const dp_conv *conv;
    dp_conv_result *convolved;
} dp_sim_place;
struct dp_sim;
typedef void dp_sim_after_fn(struct dp_sim *s, const dp_sim_place *place);
typedef struct {
    dp_fault fault; /* read by its functions alone */
    dp_sim_after_fn *after[DP_NAFTER];
} dp_sim_acts;

typedef struct dp_sim {
    const dp_problem *p;
    dp_base base;
    /* of the simulation; bases of stages that differ from its own use their defaults */
    dp_design design;
    /* the base policy of each stage: all `base`, unless dp_sim_options has others */
    dp_base at[DP_NSTAGES];
    /* [T] 1: a chunk begins at this token whatever was before; NULL: chunks are cut by length */
    const unsigned char *first_of_call;
    int by_inverse;          /* as in dp_chunk */
    const dp_linear *linear; /* products and solves */
    int N;
    const dp_peers *peers; /* processes of other ranks; NULL: all ranks are here */
    dp_sim_acts acts;
    /* [N*HV]: 1 where the fault acted in the last run (faults between runs: in all runs so far).
     * Likewise hit_kept, where it acted on data that later runs keep */
    unsigned char *hit, *hit_kept;
    int one_by_one; /* ranks in their order: several end one sequence */
    int turns;      /* heads and ranks are added from number `runs` on, and round */
    int runs;       /* dp_sim_run calls that have ended */
    /* the problem of dp_sim_new; p is &own when a fault reads other inputs */
    const dp_problem *given;
    dp_problem own;
    dp_context *ctx;                            /* [N] */
    dp_units units;                             /* of p, its norms stored as the design says */
    double *q, *k, *g, *beta, *rstd_q, *rstd_k; /* activated, all tokens */
    double *norm_q, *norm_k;                    /* inputs of the norms' backward; NULL: q and k */
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
    dp_payload payload; /* of later runs; the design's until it is set */
    dp_traffic sent;    /* by all ranks in the last run, where all are here */
    dp_result out;
    union {
        struct {
            double **S_in, **M, **H, **dS_out, **dM, **dH;
        };
        double **rank[DP_RANK_TENSORS]; /* by DP_RANK_S_IN .. */
    };
    int traj_rank, ntraj, traj_chunks[DP_MAX_TRAJ];
    double **traj; /* [ntraj*HV]: M of traj_rank after that many chunks */
    int have_forward, have_backward;
    int sharers; /* number of ranks that have all tokens of some heads; 0: ranks split tokens */
    struct dp_sim_heads *heads; /* of the exchange heads: ranks.c */
    struct dp_sim_halos *halos; /* of rows that look back, and of angles: ranks.c; NULL: none */
} dp_sim;

/* Base policy everywhere, its default design. DP_EINPUT: T does not split over N ranks. */
dp_status dp_sim_new(dp_sim *s, const dp_problem *p, dp_base base, int N, dp_fault fault,
                     dp_err *e);
/* Likewise with chunks of `chunk` tokens. */
dp_status dp_sim_new_chunks(dp_sim *s, const dp_problem *p, dp_base base, int chunk, int N,
                            dp_fault fault, dp_err *e);
/* The options of a simulation beside its design; NULL and 0: none. */
typedef struct {
    const dp_base *at;       /* [DP_NSTAGES]: a base of its own for every stage */
    const dp_linear *linear; /* dp_linear_lapack: with the machine's orders of summation */
    int by_inverse;          /* as in dp_chunk, even if no design asks for it */
    /* [T], borrowed: chunks begin anew at every marked token. On one rank this is the computation
     * of a session's calls with exact states between them. */
    const unsigned char *first_of_call;
    const dp_peers *peers;
    int frame; /* 1: nothing is computed here, ranks are elsewhere. There are contexts, places of
                  chunks and, by dp_sim_begin, arrays for results */
    const dp_sim_acts *acts; /* a fault's (fault_effect.c) */
} dp_sim_options;
/* A chunk design (chunk > 0) on N ranks; o NULL: nothing beside it. */
dp_status dp_sim_open(dp_sim *s, const dp_problem *p, const dp_design *design, int N,
                      const dp_sim_options *o, dp_err *e);
/* The fp64 reference in chunks of that many tokens: opened, and run by all-gather. first_of_call:
 * as above, NULL: none. */
dp_status dp_sim_reference(dp_sim *s, const dp_problem *p, int chunk, int N,
                           const unsigned char *first_of_call, int backward, dp_err *e);
/* DP_EINPUT where a gate is so strong that simulated ranks, and with them limits, overflow. */
dp_status dp_sim_takes(const dp_problem *p, dp_err *e);
/* One rank of N alone, the rank of peers. `part` has the rank's T tokens (its parts one after the
 * other) and cu and states of the whole problem. Results are of its tokens and of the sequences
 * that begin or end in them, in arrays of all ranks. Sums dA_log and ddt_bias are over all ranks.
 * Borrows part and peers. */
dp_status dp_sim_new_rank(dp_sim *s, const dp_problem *part, dp_base base, const dp_peers *peers,
                          dp_err *e);
/* Splits the problem over another number of ranks, without faults. Returns 1 if the chunks do not
 * change: their results are kept, and s->out until the next run. Returns 0 if they do; *s is then
 * unchanged. */
int dp_sim_split(dp_sim *s, int N);
/* Computes only the data that ranks exchange and receive (M, H, S_in and their gradients); s->out
 * stays. Gradients need an earlier run with backward. */
void dp_sim_run_ranks(dp_sim *s, dp_format chain, dp_exchange merge, int backward);
void dp_sim_free(dp_sim *s);
/* Runs all stages. Results that no chain format changes are computed once, and kept between
 * calls. */
void dp_sim_run(dp_sim *s, dp_format chain, dp_exchange merge, int backward);
/* Runs single stages: dp_sim_begin, then the stages in order. A stage reads the present contents of
 * *s; nothing of earlier runs is kept. */
void dp_sim_begin(dp_sim *s, dp_format chain, dp_exchange merge, int backward);
void dp_sim_stage(dp_sim *s, dp_stage stage);

/* Calls the function of an event, if there is one. */
void dp_sim_after(dp_sim *s, int event, dp_sim_place place);
/* DP_AFTER_CONV, outside of a simulation. hit: as above, or NULL. */
void dp_sim_convolved(dp_fault fault, const dp_problem *p, dp_base base, int N, unsigned char *hit,
                      dp_sim_place place);
/* Is rank r (part r) computed here? */
int dp_sim_has(const dp_sim *s, int r);
/* The value of a stage tensor, in its shape (ref/chunk/stages.h), to be freed; NAN where a rank has
 * none. Backward stages need a backward run. */
double *dp_stage_tensor_value(const dp_sim *s, int stage);
/* The chunk of a group of tokens and a value head. */
dp_chunk *dp_sim_chunk(const dp_sim *s, int group, int hv);
/* State before local sub-sequence sub of a rank without the merge: s0 if the sequence starts here,
 * else zeros. */
const double *dp_sim_start(const dp_sim *s, int rank, int sub); /* [HV][K][V], or NULL for zeros */
/* do at a token for head hv: row stride HV*V in the problem; gathered into [c][V]. */
void dp_sim_gather_do(const dp_sim *s, int group, int hv, double *dout);
