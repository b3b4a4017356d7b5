/* harness/simulated/ranks_stages.h - the parts of the simulation: its stages, and what they share.
 */
#ifndef DP_RANKS_STAGES_H
#define DP_RANKS_STAGES_H
#include "ranks.h"

typedef void dp_sim_stage_fn(dp_sim *s, int gi, int hv);

/* ranks_stages.c */
/* One stage, and what comes behind it (DP_AFTER_..). */
void dp_sim_do(dp_sim *s, dp_stage stage);

/* ranks_chunks.c */
/* The design of a stage: the simulation's own, or the default of another base. */
dp_design dp_sim_design_at(const dp_sim *s, dp_stage stage);
/* Gives a chunk the formats of a stage. */
void dp_sim_set_design(const dp_sim *s, dp_chunk *ch, dp_stage stage);
/* Chunk gi of a value head, with the formats of a stage. */
dp_chunk *dp_sim_chunk_at(const dp_sim *s, int gi, int hv, dp_stage stage);
/* Stage gate: activated q, k, gate and beta of all tokens. */
void dp_sim_activate(dp_sim *s);
/* Cuts every rank's local sub-sequences into chunks: s->group, s->first, s->ngroup. */
void dp_sim_list_groups(dp_sim *s);
/* Stage intra of one chunk: scores and decays. */
void dp_sim_intra(dp_sim *s, int gi, int hv);
/* Stage solve of one chunk: the triangular system or its inverse. */
void dp_sim_solve(dp_sim *s, int gi, int hv);
/* Stage wy of one chunk: w and u. */
void dp_sim_wy(dp_sim *s, int gi, int hv);
/* Runs a stage on every chunk and value head, in parallel. */
void dp_sim_each_chunk(dp_sim *s, dp_sim_stage_fn *f);

/* ranks_shared.c */
/* The arrays of all tokens that a simulation holds, [T][heads][keys][width] each. */
typedef struct {
    size_t at; /* in dp_sim */
    dp_stage made_by;
    dp_axis heads, keys, width; /* H or HV; R, where each key has a row, or none; none: a number */
    int writes; /* where tokens erase along other keys than they write (dp_sim.values) alone */
} dp_sim_array_info;
#define DP_NSIM_ARRAYS 14
extern const dp_sim_array_info dp_sim_arrays[DP_NSIM_ARRAYS];
static inline double **dp_sim_array(const dp_sim *s, int i) {
    return (double **)((char *)s + dp_sim_arrays[i].at);
}
/* Numbers of a token and head. */
int64_t dp_sim_array_width(const dp_sim *s, int i);
/* Zeros for what a stage makes. */
void dp_sim_fresh(dp_sim *s, dp_stage stage);
/* Does local sub-sequence sub of rank r begin with its sequence's first token? */
int dp_sim_starts_here(const dp_sim *s, int r, int sub);
/* Does it end with its sequence's last token? */
int dp_sim_ends_here(const dp_sim *s, int r, int sub);
/* The final state's gradient [HV][K][V] of a sequence that ends there; NULL: none. */
const double *dp_sim_end_gradient(const dp_sim *s, int r, int sub);
/* Frees what the slot holds and puts x there. */
void dp_sim_replace(double **slot, double *x);
/* The state, or in a backward stage its gradient, as it is carried to the next chunk. */
void dp_sim_round_carried(const dp_sim *s, dp_stage stage, double *S);
/* Rounds n numbers to the arithmetic of a base. */
void dp_sim_round_arith_all(dp_base b, double *x, int64_t n);
/* The product of the factors of groups [g0, g1) in a format, [K][K], to be freed. With trans it is
 * the adjoint chain. With record it stores the product after 1, 2, 4 ... factors. */
double *dp_sim_chain(dp_sim *s, int g0, int g1, int hv, dp_format f, int trans, int record);
/* S <- M S + H in the accumulator of the base, *S NULL standing for zeros, for rank r. */
void dp_sim_merge_step(dp_sim *s, int r, int hv, dp_base b, const double *M, const double *H,
                       double **S);
/* Are n arrays of a size the same, bit for bit, and absent alike? */
int dp_sim_same(double **a, double **b, int n, int64_t size);
/* Copies n arrays of a size, NULL where one is, to be freed with dp_sim_free_list. */
double **dp_sim_copy_list(double **a, int n, int64_t size);
/* Frees n arrays and their list. */
void dp_sim_free_list(double **a, int64_t n);

/* ranks_passes.c */
/* Stage output of one chunk: its rows of o. */
void dp_sim_output(dp_sim *s, int gi, int hv);
/* Stage state_fwd of all ranks; recompute: the same, but for final states. */
void dp_sim_states_fwd(dp_sim *s);
void dp_sim_recompute(dp_sim *s);
/* Stage pre_fwd of all ranks: M and H. */
void dp_sim_pre_fwd(dp_sim *s);
/* M, by a chain of that format, and H, unless it is there, of one sub-sequence, for rank r. */
void dp_sim_pair_fwd(dp_sim *s, int r, int hv, int sub, dp_format chain);
/* The state pass of one local sub-sequence, of S; h and v_new are kept in the chunks. */
void dp_sim_pass_fwd(dp_sim *s, int r, int hv, int sub, double *S);
/* Stage dAv of one chunk: dv_local. */
void dp_sim_dAv(dp_sim *s, int gi, int hv);
/* Stage gate_bwd: gradients of the raw inputs, and sums over ranks for parameters. */
void dp_sim_gate_bwd(dp_sim *s);
/* Its part by token. sums [N]: gets dA_log and ddt_bias of each rank's tokens; NULL: without. */
void dp_sim_activations_bwd(dp_sim *s, double *sums);
/* Stages wy_bwd and intra_bwd of all chunks. */
void dp_sim_all_grads(dp_sim *s);
/* Stage pre_bwd of all ranks: dM and dH. */
void dp_sim_pre_bwd(dp_sim *s);
/* As dp_sim_pair_fwd: dM and dH. */
void dp_sim_pair_bwd(dp_sim *s, int r, int hv, int sub, dp_format chain);
/* dA_log and ddt_bias in a row. */
int64_t dp_sim_numbers_of_sums(const dp_sim *s);
/* The adjoint of dp_sim_pass_fwd: dS; dh and dv_new are kept in the chunks. */
void dp_sim_pass_bwd(dp_sim *s, int r, int hv, int sub, double *dS);
/* Stage state_bwd of all ranks. */
void dp_sim_states_bwd(dp_sim *s);

/* ranks_exchange.c */
/* One direction: its tensors, and the sender and receiver of each state. */
typedef struct dp_sim_way {
    dp_sim *s;
    int back, by; /* rank r sends to rank r + by */
    dp_stage stage;
    double **M, **H, **in;
} dp_sim_way;
/* Does a state come to rank r in that direction? */
static inline int dp_sim_gets(const dp_sim *s, int back, int r) {
    return back ? !s->ctx[r].is_last : !s->ctx[r].is_first;
}
/* Does the sub-sequence whose state rank r sends begin there? */
int dp_sim_begins(const dp_sim_way *w, int r);
/* Stage merge_fwd, or merge_bwd, of all ranks: S_in, or dS_out, by the exchange that was asked for.
 */
void dp_sim_exchange(dp_sim *s, int backward);
/* A pair (M, H) that is merged. Rank r merges n pairs in the order of `part`, which a function may
 * change. With starts the merge begins from a state. */
typedef struct {
    int M, H;
} dp_sim_part;
typedef void dp_sim_order_fn(const dp_sim_way *w, int r, int hv, int n, int starts,
                             dp_sim_part *part);
/* By all-gather; order NULL: that of their tokens. */
void dp_sim_gather(dp_sim *s, int backward, dp_sim_order_fn *order);
/* Composes two runs of ranks at distance d of a scan, for the rank after r: later <- later o
 * earlier. The product of both M is in the format of the chain. */
typedef void dp_sim_compose_fn(const dp_sim_way *w, int d, int r, int hv, double *later,
                               double *earlier);
dp_sim_compose_fn dp_sim_compose;
/* Two flags of a run of ranks precede M and H in a row. The first: a state leaves the run. The
 * second: that state depends on the one that enters. */
#define DP_SIM_ELEMENT_FLAGS 2
static inline int dp_sim_matters(const double *element) { return element[1] != 0; }
void dp_sim_scan(dp_sim *s, int backward, dp_sim_compose_fn *compose);

/* heads_sent.c: where ranks are processes, among which HV divides */
/* All tokens of the value heads that this process's rank has, from their owners, each with a query
 * head of its own; to be freed. */
dp_problem dp_sim_receive_heads(dp_sim *s);
/* Sends the results of those heads to the owners of the tokens; s->out gets those of its own
 * tokens from all. */
void dp_sim_return_heads(dp_sim *s, const dp_sim *heads, int backward);

/* ranks_new.c */
/* The problem of s on one rank, with all of its formats and its fault. */
void dp_sim_open_whole(const dp_sim *s, const dp_problem *p, dp_sim *whole);
/* The pipeline behind the exchange of heads. */
struct dp_sim_heads {
    dp_problem p; /* owned by one rank; where ranks are processes, its own */
    dp_sim sim;
};

#endif
