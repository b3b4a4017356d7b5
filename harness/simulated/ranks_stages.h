/* harness/simulated/ranks_stages.h - the parts of the simulation: its stages, and what they share.
 */
#pragma once
#include "ranks.h"

typedef void dp_sim_stage_fn(dp_sim *s, int gi, int hv);

/* ranks.c */
/* Beside the state, ranks need of the tokens before theirs inputs that rows look back to, and sums
 * of angles. Activations run on a problem in which a rank's tokens stand behind its halo, and
 * every local sub-sequence is a sequence. A halo neither decays nor writes (dp_problem.halo). Its
 * angles are their sums so far, so that those of all ranks have one order of summation, from rank
 * to rank. Gradients are sent in the arithmetic of the base, before their norm. */
struct dp_sim_halos {
    dp_problem p;    /* its inputs of tokens, cu and halo are its own */
    dp_context *ctx; /* [N]: where ranks that are here lie in it */
    dp_units units;
};
/* The arrays of all tokens that a simulation holds, [T][heads][keys][width] each. */
typedef struct {
    size_t at; /* in dp_sim */
    dp_stage made_by;
    dp_axis heads, keys, width; /* H or HV; R, where each key has a row, or none; none: a number */
    int writes; /* where tokens erase along other keys than they write (dp_sim.values) alone */
} dp_sim_array_info;
#define DP_NSIM_ARRAYS 14
extern const dp_sim_array_info dp_sim_arrays[DP_NSIM_ARRAYS];
double **dp_sim_array(const dp_sim *s, int i);
/* Numbers of a token and head. */
int64_t dp_sim_array_width(const dp_sim *s, int i);
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
/* S <- M S + H in the accumulator of the base, *S NULL standing for zeros, for rank r. */
void dp_sim_merge_step(dp_sim *s, int r, int hv, dp_base b, const double *M, const double *H,
                       double **S);

/* M, by a chain of that format, and H, unless it is there, of one sub-sequence, for rank r.
 * Backward: dM and dH. */
void dp_sim_pair(dp_sim *s, int back, int r, int hv, int sub, dp_format chain);
/* The state pass of one local sub-sequence, of S; h and v_new are kept in the chunks. Backward its
 * adjoint, of dS; dh and dv_new are kept. */
void dp_sim_pass(dp_sim *s, int back, int r, int hv, int sub, double *S);
/* dA_log and ddt_bias in a row. */
int64_t dp_sim_numbers_of_sums(const dp_sim *s);

/* ranks_exchange.c */
/* One direction: its tensors, and the sender and receiver of each state. */
typedef struct dp_sim_way {
    dp_sim *s;
    int back, by; /* rank r sends to rank r + by */
    dp_stage stage;
    double **M, **H, **in;
} dp_sim_way;
/* Does a state come to rank r in that direction? */
int dp_sim_gets(const dp_sim *s, int back, int r);
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

/* ranks_exchange.c: where ranks are processes, among which HV divides */
/* All tokens of the value heads that this process's rank has, from their owners, each with a query
 * head of its own; to be freed. */
dp_problem dp_sim_receive_heads(dp_sim *s);
/* Sends the results of those heads to the owners of the tokens; s->out gets those of its own
 * tokens from all. */
void dp_sim_return_heads(dp_sim *s, const dp_sim *heads, int backward);

/* ranks.c */
/* The pipeline behind the exchange of heads. */
struct dp_sim_heads {
    dp_problem p; /* owned by one rank; where ranks are processes, its own */
    dp_sim sim;
};
