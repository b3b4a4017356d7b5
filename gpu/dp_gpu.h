/* gpu/dp_gpu.h - delta-rule and gated linear attention, forward and backward, on one CUDA device
 * per rank, C11-callable.
 *
 * One plan is one rank's share of one problem. A forward or backward enqueues work on one stream
 * and never allocates. A CUDA graph can capture it, to be replayed while plan and communicator
 * exist. With several ranks a capture needs windows (dpg_plan_connect) and gathers over NCCL. Each
 * rank then captures a graph of its own on a host thread, after a forward and backward without
 * capture. Formulas: math.md b (definition), c (activations), e (chunk form), f (chunk backward),
 * g.1 to g.3 (ranks). Layouts are those of ref/vocabulary/problem.h, restricted to the tokens
 * [a, b) that the rank owns (math.md g.2).
 *
 * Paths
 *   simple  every stage a plain fp32-FMA kernel, all intermediates in fp32 words; base bf16 rounds
 *           what FLA stores in bf16 (w u kg qg Aqk Akk h v_new, and the operands that meet them).
 *           Any K, V (multiples of 16 up to 256), R in {1, 2, 4}; compute capability 7.5.
 *   fast    tensor cores, bf16 storage. Base bf16, K in {64, 128}, V a multiple of 64 (192 and 256
 *           as heads of 64 and 128 that share keys, gates and beta), R in {1, 2, 4} in chunks of
 *           64 / R tokens; compute capability 8.0. fp32 q, k, v are rounded to bf16 as they are
 *           loaded; norms, dbeta and the gradient of the norms use the unrounded inputs. M by
 *           augmented columns, and with it segments, needs 9.0.
 *   token   the recurrence token by token, fp32 FMA, for any rows (ref/vocabulary/recurrence.h);
 *           GDN-2, Gated DeltaProduct, DPLR and a caller's own rows have no other, GLA and SSD none
 *           for a backward or kept stages. Chain fp32: M is the recurrence of the identity.
 *           K as above, V a multiple of 8, R up to 8; compute capability 7.5.
 *
 * The first two paths share the code of the dense M chain; its format is a run-time choice
 * (tensor-core formats: compute capability 8.0). Forward and backward each choose their own path.
 * The backward recomputes its inputs in its own formats, so that any backward fits any forward. The
 * choice depends on the device's properties; dpg_plan_why names the reason.
 *
 * A failure is returned as a status; its message holds file:line, the expression and the rank.
 * No function here ends the program. */
#ifndef DP_GPU_H
#define DP_GPU_H
#include "ref/vocabulary/exchange.h"
#include "ref/vocabulary/formats.h"
#include "ref/vocabulary/recurrence.h"
#include <stddef.h>
#include <stdint.h>
#ifdef __cplusplus
extern "C" {
#endif

typedef enum { DPG_F32, DPG_BF16, DPG_F16 } dpg_dtype; /* fp16: parameters, states of decode */

/* The owners of tokens: rank owner[i] has part i, tokens [cut[i], cut[i+1]), of `parts` parts in
 * their order. Host memory, alike on every rank. A rank may own several parts, or none; its tensors
 * hold the rows of one part after the other. (M, H) is formed and gathered for each part, and a
 * part starts from the merged state of the parts before it. With parts = 0 rank r owns tokens
 * r T / N ..
 *
 * With by_part dA_log and ddt_bias are sums over the parts in their order, not over ranks. The
 * choice of kernels does not depend on a rank's own tokens. So no bit of an output depends on the
 * owners or on the number of ranks. */
typedef struct {
    int parts, by_part;
    const int64_t *cut; /* [parts + 1] */
    const int *owner;   /* [parts] */
} dpg_owners;

/* The whole problem, alike on every rank. Host memory cu [Nseq+1]; sequences may be empty. */
typedef struct {
    int64_t T;
    int H, HV, K, V, R, Kg, Nseq; /* Kg = K (KDA, MKDA) or 1 (GDN) */
    dp_model model;               /* 0: any of GDN, KDA, MKDA, which R and Kg tell apart */
    const int64_t *cu;
    double scale;
    dp_gate gate;
    double lower_bound; /* DP_GATE_LOWER_BOUND only */
    dp_beta beta_form;
    int l2norm;
    dpg_dtype dtype;   /* of q k v, and of erase write lr_a lr_b */
    dpg_dtype gdtype;  /* of g beta */
    dpg_dtype odtype;  /* of o */
    dpg_dtype ddtype;  /* backward: of do, and of gradients of inputs of dtype */
    dpg_dtype dgdtype; /* backward: of dg dbeta */
    /* parameters: of A_log, of dt_bias; backward: of their gradients */
    dpg_dtype A_dtype, bias_dtype, dA_dtype, dbias_dtype;
    dpg_owners own; /* parts = 0: T / N tokens a rank, which must divide */
    /* rows of the caller's own in place of the model's, H = HV; NULL: the model's. Host memory,
     * read when the plan is made */
    const dp_recurrence *rows;
    int pairs; /* that its angles rotate */
} dpg_problem;

typedef enum { DPG_PATH_AUTO, DPG_PATH_SIMPLE, DPG_PATH_FAST, DPG_PATH_TOKEN } dpg_path;
typedef enum {
    DPG_CHAIN_DENSE, /* form M_c in fp32, multiply in `chain` format (math.md j.1) */
    /* the state pass on V+K columns (math.md e), bf16x3 operands, segments side by side; fast path
       only */
    DPG_CHAIN_AUGMENTED
} dpg_chain_how;
typedef enum {
    /* between forward and backward only dpg_tensors.saved stays; the backward recomputes the rest
     */
    DPG_SAVE_STATE,
    /* the workspace stays too, and the backward begins at the gradients of states: nothing is
     * recomputed. Forward and backward use one path. The gradients have the bits of
     * DPG_SAVE_STATE, unless the forward ran in segments or on several ranks. Under DPG_SAVE_STATE
     * a forward may store no w and u (`fast/bare.cuh`); it then rounds o, and the initial states of
     * parts, differently.
     *
     * dpg_kept_bytes tells what stays. At K = V = 128 the fast path keeps 73 KB of a tile with
     * one gate, 113 KB with a gate a channel. With few heads, in segments or on
     * ranks it keeps 121 KB. They lie in the workspace, which DPG_SAVE_STATE releases between both.
     * Forward and backward together take up to 20% less.
     *
     * The backward refuses a workspace in which this plan ran no forward. The caller must pass the
     * inputs of that forward, and must not write to the workspace in between */
    DPG_SAVE_ALL
} dpg_save;

typedef struct {
    dp_base base; /* DP_BASE_FP32 or DP_BASE_BF16 */
    /* DP_FP32 DP_TF32X3 DP_TF32 DP_TF32RZ DP_BF16. An augmented chain in DP_BF16 rounds operands
     * as a pass over the rank's tokens does (design pair=rows); a dense one in its place is fp32.
     * In any other format an augmented M is fp32 */
    dp_format chain;
    dpg_path path;
    dpg_chain_how chain_how;
    /* fast path, augmented: parts that the last local sub-sequence is cut in, all others whole; 0:
     * on several ranks by shape, on one segment_chunks says. 1 on several ranks: the first rank of
     * a sequence sends the state that its pass ends with, and two ranks form no M. Forwards that
     * follow each other then take the time of one rank. A single one takes two passes in a row. */
    int segments;
    int keep;     /* 1: also store h and v_new, and w u kg qg, when a path would not */
    int backward; /* 1: dpg_backward follows */
    dpg_path bwd_path;
    dpg_save save;
    /* dM = M' of the forward's gather (math.md g.1): the backward sends dH alone, half the words */
    int send_dh_only;
    int pair_dg; /* dg by the pair sums of math.md f, free of cancellation (simple path) */
    /* 1: the backward passes over a cut sequence as a whole; 0: over its segments side by side,
     * whose M the forward keeps for it */
    int whole_bwd;
    /* the exchange of states between ranks and its payload; plan/sending.cuh lists what the kernels
     * support.
     *
     * DP_EXCHANGE_HEADS sends no state. The ranks exchange their tokens of all heads for all tokens
     * of HV / N value heads each. Forward and backward run over these as on one rank. The bits are
     * one rank's if both cut segments alike (`segments`, `segment_chunks` or a dense chain say so).
     * If H does not divide by N, dq, dk and dlr_b are sums over ranks, in fp32 in the order of
     * value heads. Their bits then differ. DP_EINPUT if HV does not divide by N (with by_part, if H
     * does not), for payloads that round, and with send_dh_only.
     *
     * With by_part a single rank also packs and unpacks its messages, so that its bits are those of
     * several ranks. Ranks that exchange heads cut no segments then, and have the bits of a single
     * rank with the same exchange */
    dp_exchange exchange;
    dp_payload payload;
    /* one rank, segments = 0: every sequence of more than so many chunks is cut in parts of at most
     * so many. 0: the cut that the rule expects to be fastest (ref/vocabulary/segments.h), which
     * may be none */
    int segment_chunks;
} dpg_options;

/* Device pointers, 16-byte aligned, the rank's own L tokens. A_log [HV], dt_bias [HV][Kg].
 * s0 and final_state are [Nseq][HV][K][V] fp32 on every rank. A rank reads s0 of the
 * sequences that start on it and writes final_state of the sequences that end on it. NULL: s0
 * zeros, final_state not written, A_log and dt_bias 0. If ranks exchange heads, a pointer is NULL
 * on every rank or on none.
 *
 * The forward writes dpg_saved_bytes to `saved`, and the backward reads them (options.backward;
 * NULL if there are 0 bytes). They hold the merged state of the first local sub-sequence (all
 * others start from s0), and the M of later ranks if send_dh_only. A single rank, or a rank that
 * one cut sequence fills, also keeps the initial states of segments and their M. These take 4 HV K
 * (V + K) bytes a segment, 128 KB a head at K = V = 128. */
typedef struct {
    const void *q, *k, *v, *g, *beta;
    const void *A_log, *dt_bias;
    const float *s0;
    void *o;
    float *final_state;
    void *saved;
    /* beside beta, or in its place, as the rows say; else NULL */
#define DPG_INPUT(ID, FIELD, ...) const void *FIELD;
    DP_ALL_ROW_INPUTS(DPG_INPUT)
#undef DPG_INPUT
} dpg_tensors;

/* Gradients of the raw inputs, in the shapes and rows of dpg_tensors: before the gate's and beta's
 * activations and before the L2 norm. Value heads of a group are summed.
 *   dfinal_state        [Nseq][HV][K][V], read for the sequences that end on the rank; NULL: zeros
 *   ds0                 [Nseq][HV][K][V], written for the sequences that start on the rank; NULL:
 *                       not wanted
 *   dA_log, ddt_bias    [HV], [HV][Kg]: sums over all ranks, the same bits on every rank; NULL on
 *                       every rank: not wanted */
typedef struct {
    const void *dout;
    const float *dfinal_state;
    void *dq, *dk, *dv, *dg, *dbeta;
    void *dA_log, *ddt_bias;
    float *ds0;
#define DPG_GRADIENT(ID, FIELD, ...) void *d##FIELD;
    DP_ALL_ROW_INPUTS(DPG_GRADIENT) /* likewise */
#undef DPG_GRADIENT
} dpg_grads;

/* One member of dpg_tensors or dpg_grads, for callers that loop over all of them. */
typedef struct {
    const char *name; /* the member's, but `do` for dout */
    int id;           /* dp_input_id, of an output dp_result_id */
    int of_backward;  /* its pointer is a member of dpg_grads, else of dpg_tensors */
    int is_output;
    int of_tokens; /* its rows are the rank's tokens; else it is as long on every rank */
    dpg_dtype type;
    size_t slot; /* offset of its pointer in the struct, bytes */
} dpg_tensor;
#define DPG_MOST_TENSORS 36
/* The tensors of a problem's recurrence, inputs first; returns their number. */
int dpg_tensors_of(const dpg_problem *p, dpg_tensor list[DPG_MOST_TENSORS]);

/* Floats [at, at + n) of a message. */
typedef struct {
    size_t at, n;
} dpg_piece;

/* Communicator: the only object that ranks share. Every rank calls the four collectives the same
 * number of times, in the same order; `stream` is a cudaStream_t.
 *   all_gather   every rank sends `count` floats; recv [N][count] is in rank order
 *   hand         a rank with send sends `count` floats to rank + by; a rank with recv receives
 *                `count` floats of rank - by. send and recv may be NULL; every rank calls, with the
 *                same by
 *   all_to_all   every rank sends the piece gives[r] of send to rank r, and receives the piece
 *                gets[r] of recv from r, both of one length. gives and gets [N] are read until the
 *                call returns
 *   wait         returns when this rank's stream is idle and every rank has called wait
 * A call of abort makes all peers return an error. If a rank waits for data that no rank sends, all
 * ranks fail with a message that names both (over NCCL: within the limit). If a rank's host thread
 * or device does not reach a call within the limit, that call and all later ones fail on every
 * rank. The message names the rank and the call. Device memory of a rank that hangs may then not be
 * freed (cudaFree waits for the device). The limit does not count time in which this process or the
 * machine was suspended. */
typedef struct dpg_comm dpg_comm;
/* Progress of kernels that make a transfer of their own, for the communicator's watcher, in pinned
 * memory. A kernel increments *count, a word of the device, when it reaches the transfer. It stores
 * the new count at *reached, and at *ended when the transfer is done. Once *stop is not 0 it stops
 * waiting. */
typedef struct {
    volatile int *reached, *ended;
    const volatile int *stop;
    int *count;
} dpg_marks;
struct dpg_comm {
    void *self;
    int rank, N, device;
    /* set by the caller, 0 at first: ranks that share a device use one stream of it, and enqueue
     * each forward in order of rank */
    int in_order;
    dp_status (*all_gather)(dpg_comm *c, const float *send, float *recv, size_t count, void *stream,
                            dp_err *e);
    dp_status (*hand)(dpg_comm *c, const float *send, float *recv, size_t count, int by,
                      void *stream, dp_err *e);
    dp_status (*all_to_all)(dpg_comm *c, const float *send, const dpg_piece *gives, float *recv,
                            const dpg_piece *gets, void *stream, dp_err *e);
    dp_status (*wait)(dpg_comm *c, void *stream, dp_err *e);
    void (*abort)(dpg_comm *c, const char *why);
    void (*destroy)(dpg_comm *c);
    /* Peer memory; NULL where the ranks have none. Every rank calls exchange; processes exchange by
     * CUDA IPC, on one host with a device each.
     *   exchange   mine is device memory of this rank; at[N] gets the memory of all ranks, which
     *              kernels of this rank's device may then read and write. at[0] = NULL on every
     *              rank if some devices do not reach each other, or are shared and not in_order. *m
     *              is for those kernels. mine = NULL: a barrier of all ranks, nothing else
     *   enter      announces that kernels on `stream` make a transfer
     *   close      closes `at` of exchange; NULL if exchange opened nothing */
    dp_status (*exchange)(dpg_comm *c, void *mine, void **at, dpg_marks *m, dp_err *e);
    dp_status (*enter)(dpg_comm *c, void *stream, dp_err *e);
    void (*close)(void **at, int N, int rank);
};
/* N <= 1024 ranks in one process on one device, one host thread each; c[N] is filled. */
dp_status dpg_comm_shared(dpg_comm *c, int N, int device, double limit_s, dp_err *e);
/* The same on any devices, which ranks may share: gathers are copies between them. */
dp_status dpg_comm_devices(dpg_comm *c, int N, const int *devices, double limit_s, dp_err *e);
/* N <= 1024 ranks in one process on N devices, NCCL, one host thread each (libnccl.so.2 is loaded
 * at run time). */
dp_status dpg_comm_nccl(dpg_comm *c, int N, const int *devices, double limit_s, dp_err *e);
/* N ranks over NCCL, a process each, rank r on device r modulo the devices that its process sees.
 * `shared`: dpg_comm_procs_bytes of memory that every process maps MAP_SHARED, from a page on. It
 * is mapped before a fork, or is a file in /dev/shm. One process calls init before any joins. A
 * process that calls CUDA must not come from a fork of one that had. Each process calls join once,
 * which fills c and meets the others. With more ranks than devices ranks r and r' talk over NVLink
 * if r / devices is the same, else through sockets of the loopback. A process that ends without
 * destroy ends all ranks at once. After a failure the memory and its processes cannot be used
 * again. */
size_t dpg_comm_procs_bytes(void);
dp_status dpg_comm_procs_init(void *shared, int N, double limit_s, dp_err *e);
dp_status dpg_comm_procs_join(dpg_comm *c, void *shared, int rank, dp_err *e);
/* One of N ranks over NCCL, each a process with a device, on any hosts. id: bytes that one process
 * makes. The launcher (MPI, a socket) brings them to the others. Fills *c; every rank calls it at
 * the same time. No windows. If a rank does not call it or ends, the others fail within limit_s;
 * the message cannot name the rank. */
#define DPG_COMM_ID 128
dp_status dpg_comm_id(void *id, dp_err *e);
dp_status dpg_comm_apart(dpg_comm *c, const void *id, int rank, int N, int device, double limit_s,
                         dp_err *e);

/* Can the kernels of this library run on the current device: 1, or 0 and the reason in why. */
int dpg_device_runs(char *why, size_t size);

typedef struct dpg_plan dpg_plan;
/* Creates *plan, which dpg_plan_destroy frees. Returns DP_EINPUT for a problem, an option or a
 * split that the kernels do not support; e names it. */
dp_status dpg_plan_create(dpg_plan **plan, const dpg_problem *p, const dpg_options *opt, int rank,
                          int N, dp_err *e);
/* NULL is allowed. */
void dpg_plan_destroy(dpg_plan *plan);
/* Connects the ranks of a problem by windows: device memory of the plan that kernels of the other
 * ranks store into. A window has 3 HV K V floats, with send_dh_only also 3 N HV K K. From then on
 * dpg_forward does not call comm->all_gather and waits for no host thread. Each rank multiplies its
 * initial state by its own M and sends it to the next. Order, products and bits are those of a
 * merge of gathered elements (math.md g.1, farthest rank first).
 *
 * Every rank calls it once, with the communicator of its forwards, while no forward runs. The
 * kernels count forwards: all ranks must make equally many, enqueued or replayed. With
 * dpg_forward_steps each rank makes all steps from PRE to MERGE once a forward. A plan may be
 * destroyed once every rank has returned from a wait, before its communicator. Ranks that are
 * processes all call dpg_plan_destroy, which is then a barrier. After an error the windows are not
 * freed, since kernels of other ranks may still store into them.
 *
 * Windows need the fast path with augmented chains, and ranks that reach each other's memory
 * (NVLink; processes: one host, a device each). Otherwise, and if ranks exchange heads, nothing
 * changes, and dpg_plan_connected is 0. Ranks that share a device must all be in_order (dpg_comm):
 * kernels wait on the device for kernels of earlier ranks, which could otherwise be blocked. Such
 * ranks may not use send_dh_only: a rank waits at the end of its forward for M of later ranks. */
dp_status dpg_plan_connect(dpg_plan *plan, dpg_comm *comm, dp_err *e);
int dpg_plan_connected(const dpg_plan *plan);
dpg_path dpg_plan_path(const dpg_plan *plan); /* which path AUTO chose */
const char *
dpg_plan_why(const dpg_plan *plan); /* the reason: asked for, or why not the fast path */
/* parts of all sub-sequences that are cut, 1: all are whole */
int dpg_plan_segments(const dpg_plan *plan);
/* tokens of a chunk of the forward: 64 / R, or 32 where one kernel is all of it */
int dpg_plan_chunk(const dpg_plan *plan);
/* does the rank make the pair that it sends in bf16 operands (chain DP_BF16, augmented) */
int dpg_plan_pair_rows(const dpg_plan *plan);
dpg_path dpg_plan_bwd_path(const dpg_plan *plan);
size_t dpg_workspace_bytes(const dpg_plan *plan); /* of forward and backward, which share it */
/* of dpg_tensors.saved; 0 without options.backward */
size_t dpg_saved_bytes(const dpg_plan *plan);
/* of all memory that must stay between forward and backward, inputs excluded */
size_t dpg_kept_bytes(const dpg_plan *plan);

/* The whole forward. ws: at least dpg_workspace_bytes, 256-byte aligned device memory. comm may be
 * NULL when N == 1. */
dp_status dpg_forward(dpg_plan *plan, const dpg_tensors *t, void *ws, dpg_comm *comm, void *stream,
                      dp_err *e);
/* The steps of a forward, for timing and for harnesses that stop between stages. dpg_forward runs
 * all, in this order. Where the pass makes the sent H, state comes before gather. A pass may run
 * beside the chunks behind it.
 *   chunks   all work that needs no other rank
 *   pre      M, H
 *   gather
 *   merge    S_in
 *   state    h, v_new, o
 * With an exchange of heads, gather sends inputs to the ranks of their heads, and merge returns
 * results. The backward exchanges do, gradients and, unless DPG_SAVE_ALL, the inputs again. */
typedef enum {
    DPG_STEP_CHUNKS = 1,
    DPG_STEP_PRE = 2,
    DPG_STEP_GATHER = 4,
    DPG_STEP_MERGE = 8,
    DPG_STEP_STATE = 16,
    DPG_STEP_ALL = 31,
    DPG_STEP_COMPOSE = 32 /* the end of pre alone: (M, H) of the rank from those of its segments */
} dpg_step;
dp_status dpg_forward_steps(dpg_plan *plan, const dpg_tensors *t, void *ws, dpg_comm *comm,
                            void *stream, int steps, dp_err *e);

/* The whole backward, after a forward of the same plan (o is not read). Under DPG_SAVE_STATE ws may
 * hold anything, under DPG_SAVE_ALL it is the forward's. dpg_backward runs the steps in this order:
 *   recompute   the merged state first, then w u kg qg Akk Aqk h v_new
 *   dAv         dv_local
 *   pre         dM, dH of the first local sub-sequence
 *   gather
 *   merge       dS_out, from the farthest later rank
 *   state       dh, dv_new, ds0
 *   intra       gradients of activated inputs per value head
 *   gate        groups summed, L2 norm, beta, gate; gathers dA_log and ddt_bias and adds them in
 *               rank order
 * Steps that wait for other ranks run on a second stream of the plan. Gather and merge run beside
 * the recomputation of h and v_new, the last gather beside dq and dk. The bits are those of steps
 * run one after the other. */
typedef enum {
    DPG_BWD_RECOMPUTE = 1,
    DPG_BWD_DAV = 2,
    DPG_BWD_PRE = 4,
    DPG_BWD_GATHER = 8,
    DPG_BWD_MERGE = 16,
    DPG_BWD_STATE = 32,
    DPG_BWD_INTRA = 64,
    DPG_BWD_GATE = 128,
    DPG_BWD_ALL = 255
} dpg_bwd_step;
dp_status dpg_backward(dpg_plan *plan, const dpg_tensors *t, const dpg_grads *g, void *ws,
                       dpg_comm *comm, void *stream, dp_err *e);
dp_status dpg_backward_steps(dpg_plan *plan, const dpg_tensors *t, const dpg_grads *g, void *ws,
                             dpg_comm *comm, void *stream, int steps, dp_err *e);

/* States before every 64 tokens of each sequence to [chunks][HV][K][V], v_first [chunks][HV][V][K];
 * fp32 or bf16. The stream has a forward of this plan, which is one rank's with options.keep. */
dp_status dpg_states(const dpg_plan *plan, const void *ws, dpg_dtype type, int v_first, void *to,
                     void *stream, dp_err *e);
/* Shape (dims, room for 5) and values of a stage by name. After a forward that has finished:
 *   gcum [L][HV][Kg] (natural log)   Akk = (I + B L)^-1 [L][HV][R][C*R]   Aqk [L][HV][C*R] (scaled)
 *   w kg [L][HV][R][K]   qg [L][HV][K]   u v_new [L][HV][R][V]   o [L][HV][V]
 *   M [HV][K][K], H S_in [HV][K][V] (zeros where the rank has none)   h [chunks][HV][K][V]
 * After a backward, which overwrites the stages above:
 *   dv_local dv_new [L][HV][R][V]   dh [chunks][HV][K][V] (gradient of the state AFTER a chunk)
 *   dM [HV][K][K] (none with send_dh_only)   dH dS_out [HV][K][V]
 * With a table of owners M, H, S_in, dM, dH, dS_out have a leading dimension, the parts of the
 * rank. Ranks that exchange heads have no stages. DP_EINPUT: the stage is unknown or not kept. */
dp_status dpg_stage_shape(const dpg_plan *plan, const char *name, int64_t dims[5], int *ndim,
                          dp_err *e);
dp_status dpg_stage_read(const dpg_plan *plan, const dpg_tensors *t, const void *ws,
                         const char *name, double *host, dp_err *e);
extern const char *const dpg_stage_names[]; /* NULL-terminated */

/* M_n ... M_1 of n factors [n][K][K] fp32 on the device, in a format; out [K][K]. The kernel that
 * the pre-process uses. */
dp_status dpg_chain(const float *factors, int64_t n, int K, dp_format f, float *out, void *stream,
                    dp_err *e);

#ifdef __cplusplus
}
#endif
#endif
