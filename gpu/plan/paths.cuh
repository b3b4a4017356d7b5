/* gpu/plan/paths.cuh - the functions of a path (simple/, token/, fast/), and the steps between
 * ranks that all paths share (chain/, exchange/). plan/steps.cu calls them in order. */
#ifndef DPG_PATHS_CUH
#define DPG_PATHS_CUH
#include "plan/plan.cuh"

typedef dp_status (*step_fn)(const Call &c);

struct Path {
    const char *name;
    /* forward */
    step_fn chunks; /* from inputs: w u kg qg Aqk eC, and what is kept */
    step_fn pre;    /* H of the last local sub-sequence into B_HM; H and M of its segments into
                     * B_SEG. With a state `came(c)` it starts from that state: the result is the
                     * state that leaves the rank */
    step_fn state;  /* o and final_state from B_SIN */
    /* backward, p a plan with is_bwd */
    step_fn bwd_chunks; /* from inputs: whatever the rest reads, but the states */
    step_fn bwd_states; /* from that and B_SIN: h, v_new, which nothing reads before bwd_intra */
    step_fn bwd_dv_local;
    step_fn bwd_pre;   /* dH of the first local sub-sequence into columns 0..V-1 of B_DHM, zeroed by
                        * then. With parts: of each into B_SEG; from `came(c)` likewise */
    step_fn bwd_state; /* dh, dv_new, ds0 from B_DSOUT */
    step_fn bwd_intra; /* gradients of activated inputs per value head */
    step_fn bwd_sums;  /* of this rank for dA_log and ddt_bias, to B_GSUM: [HV], [HV][Kg] */
    step_fn bwd_norm;  /* dq and dk: groups summed, L2 norm; reads nothing of bwd_sums */
    int makes_m;       /* pre makes M of the rank, too, bwd_pre dM: no chain of factors */
    /* If dpg_plan.halo is set: words for the next rank, to B_HALO; those of the rank before, to
     * B_HALOIN; their gradient, to B_DHALO. */
    step_fn halo, halo_came, halo_bwd;
};
extern const Path simple_path, fast_path, token_path;

/* The state that the rank received, or backward its gradient, if its pre-process starts from it.
 * NULL: it starts from zeros. */
float *came(const Call &c);

/* Why the fast path does not take a problem on a device, forward or backward: a static text, or
 * NULL where it does. */
const char *fast_refuses(const dpg_problem *p, const dpg_options *o, const Device *dev,
                         int backward);
/* Can the fast path make M of a segment by augmented columns on this device (fast/pre.cu). */
int fast_augments(const Device *dev);

/* Does a plan whose segments are known store no w and u (`fast/bare.cuh`)? May a forward alone,
 * if there are enough states? */
int fast_is_bare(const dpg_plan *pl);
int fast_may_be_bare(const dpg_plan *pl);
/* Value heads of one key head whose triangles a block of the chunk kernel makes (`k_triangles`). */
#define HEADS_OF_BLOCK 4
int fast_heads_of_block(const dpg_plan *pl);
/* Is its pass cut in spans, and in how many? */
#define SPANS 3
int fast_spans(const dpg_plan *pl);
/* Is such a forward one kernel (`fast/forward.cuh`)? */
int fast_is_single(const dpg_plan *pl);
/* Does a backward read do of whole chunks where it lies (`fast/columns.cuh`)? */
int fast_reads_do(const dpg_plan *pl);

/* Does only the token path have the recurrence? How many rows has a token there? */
int token_alone(const dpg_problem *p);
/* Is a step S <- D S + k' v (GLA, SSD). */
int token_adds(const dpg_problem *p);
int token_rows(const dpg_problem *p);
/* Words of a halo of these rows. */
int token_halo(const dpg_plan *pl);

/* chain/: M and dM as chains of chunk factors, in B_HM and in columns of row stride ld. */
dp_status chain_pre_m(const Call &c);
dp_status chain_pre_dm(const Call &c, float *dM, int ld);
/* (H, M) of segments in B_SEG to that of the rank in B_HM; gathered elements to B_SIN. */
dp_status chain_compose(const Call &c);
dp_status chain_merge(const Call &c);
/* dH of the parts in B_SEG to dH of B_DHM; B_DHMALL and B_SEG to B_DSOUT. */
dp_status chain_compose_bwd(const Call &c);
dp_status chain_merge_bwd(const Call &c);
/* M S + H of an element to `to`, or H where S does not matter. later o earlier, of two elements, to
 * a third. */
dp_status chain_hand(const Call &c, const float *element, int applies, const float *S, float *to);
dp_status chain_compose_pair(const Call &c, const float *later, const float *earlier, float *to);
/* For parts: M and dM of each, H and M of B_HMALL to the states in B_SIN, and backward. */
dp_status chain_links_m(const Call &c);
dp_status chain_links_dm(const Call &c);
dp_status chain_fold(const Call &c);
dp_status chain_fold_bwd(const Call &c);
/* Sums of chunks in B_PART to those of each run in B_GSUM: [HV] of dA_log, [HV][Kg] of ddt_bias. */
dp_status sum_over_chunks(const Call &c);
/* `n` sums, or all of `place`, [HV] of dA_log, [HV][Kg] of ddt_bias, to both in their types. */
dp_status add_sums(const Call &c, const Dims &d, int n, const int *place, const float *all);
/* Sums of all ranks in B_GALL (one rank: B_GSUM) to dA_log and ddt_bias, any path. */
dp_status sum_over_ranks(const Call &c);

/* exchange/send.cu: elements of this rank in slot `own`, rows of `row` words, to those of all ranks
 * in slot `all`, as the payload leaves them. */
dp_status gather_elements(const Call &c, dpg_comm *comm, int own, int all, int row);
/* Brings this rank's initial state (backward: gradient) to buffer `to`, from rank to rank, by the
 * elements in buffer `own`. A scan needs buffer `all`. */
dp_status hand_states(const Call &c, dpg_comm *comm, int own, int all, int to);
/* plan/heads.cu, exchange/heads.cu: a plan whose ranks exchange heads. Why not, or NULL. */
const char *heads_refuse(const dpg_problem *p, const dpg_options *o, int N);
dp_status heads_create(dpg_plan **out, const dpg_problem *p, const dpg_options *o, int rank, int N,
                       dp_err *e);
void heads_destroy(Heads *h);
size_t heads_kept_bytes(const Heads *h);
dp_status heads_forward(const Call &c, dpg_comm *comm, int steps);
dp_status heads_backward(const Call &c, dpg_comm *comm, int steps);
/* plan/wide.cu: a plan of values wider than the kernels, which takes over that of the narrower
 * problem. */
dp_status wide_create(dpg_plan **out, dpg_plan *one, const dpg_problem *p, dp_err *e);
void wide_destroy(Wide *w);
dp_status wide_forward(const Call &c, dpg_comm *comm, int steps);
dp_status wide_backward(const Call &c, dpg_comm *comm, int steps);
void wide_join(const Wide *w, int64_t lead, int64_t runs, int64_t each, int is_shared,
               const double *narrow, double *host);
/* fast/maps.cu */
void maps_destroy(RowMaps *m);
/* exchange/window.cu: M of later ranks into `saved`. */
dp_status window_keep(const Call &c);
void window_destroy(dpg_plan *p);

/* plan/create.cu: a plan of one rank that has some of `all_heads` value heads. If qk_are_partial,
 * its dq and dk (and dlr_b) are parts of sums over ranks, in fp32. */
dp_status create_alone(dpg_plan **out, const dpg_problem *p, const dpg_options *opt, int all_heads,
                       int qk_are_partial, dp_err *e);
/* A table of owners, or T / N tokens a rank (of conv/, too). */
dp_status check_owners(const dpg_owners *o, int64_t T, int N, dp_err *e);

/* plan/device.cu */
dp_status ask_device(Device *dev, dp_err *e);

/* plan/layout.cu, plan/split.cu: a rank's share and its workspace. */
dp_status split_tokens(dpg_plan *pl, const dpg_problem *p, dp_err *e);
/* whole: nothing is cut. */
void cut_segments(dpg_plan *pl, int whole);
/* Rows of d.seq and the products of parts, once segments are cut; tables to the device. */
void list_rows(dpg_plan *pl);
dp_status upload_tables(dpg_plan *pl, const dpg_problem *p, dp_err *e);
void layout_workspace(dpg_plan *pl);
#endif
