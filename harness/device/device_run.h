/* harness/device/device_run.h - the CUDA kernels of gpu/ as a subject: forward and backward of a
 * problem on N ranks. Backend cuda has one host thread a rank, on devices that they share. Backend
 * nccl has one device per rank over NCCL; with fewer devices, processes that share them
 * (device_procs.h). Compiled without CUDA, every call says so.
 */
#pragma once
#include "harness/base/backends.h"
#include "harness/simulated/calls.h"
#include "ref/chunk/conv.h"
#include "ref/chunk/stages.h"
#include "ref/truth/truth.h"
#include "ref/vocabulary/exchange.h"
#include "ref/vocabulary/formats.h"
#include "ref/vocabulary/problem.h"

/* Variants that compute the same gradients, by name in a run's ID (gpu/dp_gpu.h describes each). */
typedef enum {
    DP_CUDA_PLAIN,
    DP_CUDA_DH_ONLY,
    DP_CUDA_PAIR_DG,
    DP_CUDA_SAVE_ALL,
    DP_CUDA_SEGMENTS,
    DP_CUDA_SEGMENTS_DH_ONLY,
    DP_CUDA_SEGMENTS_SAVE_ALL,
    DP_CUDA_WINDOWS,
    DP_CUDA_WINDOWS_DH_ONLY,
    DP_CUDA_WINDOWS_SAVE_ALL,
    DP_NCUDA_VARIANTS
} dp_cuda_variant;
extern const char *const dp_cuda_variant_names[DP_NCUDA_VARIANTS];

/* One run of the kernels. */
typedef struct {
    dp_backend backend;
    int N; /* ranks; parts, where p->own says which rank has them */
    dp_base base;
    dp_format chain;
    dp_cuda_variant variant;
    dp_sending sending; /* as it is asked for; of no meaning on one rank */
    int bf16_inputs, backward;
    int results_only; /* 1: nothing of dp_cuda_result.rank is read */
    dp_format kept;   /* of a session's states between its calls; DP_FP64: not rounded */
} dp_cuda_how;

typedef struct {
    int N;         /* as above */
    dp_result out; /* NaN where nothing was written; no gradients without backward */
    /* by DP_RANK_S_IN ..: [N*HV], NULL where the kernels form none (math.md g.3) */
    double **rank[DP_RANK_TENSORS];
    const char
        *path;     /* for the record: "simple", "fast" or "token", with a backward "fast/simple" */
    int fast;      /* 1: gpu/fast, forward or backward */
    int tokens;    /* 1: gpu/token */
    int segments;  /* most that a rank cut its sub-sequences in, 1: none */
    int chunk;     /* tokens of a chunk of the forward */
    int pair_rows; /* 1: design pair=rows */
    size_t saved, kept; /* largest of a rank: bytes of dpg_tensors.saved, and all that stays between
                           forward and backward */
} dp_cuda_result;

/* Why this backend cannot run here with N ranks, or NULL if it can. */
const char *dp_cuda_unavailable(dp_backend b, int N);
/* Ranks of a run with that N. */
static inline int dp_cuda_ranks(const dp_problem *p, int N) {
    return p->own.kind ? p->own.ranks : N;
}
/* "NVIDIA H200, driver 13.0" */
const char *dp_cuda_device(void);
/* Seconds that a rank on a device may keep the others waiting before all end with a message that
 * names it. Default: 8. */
void dp_cuda_limit(double seconds);
/* Starts processes for more ranks over NCCL than there are devices (device_procs.h). It must
 * precede the first call of CUDA, which does not outlive a fork. Without it ranks over NCCL need a
 * device each. Once. */
void dp_procs_start(void);
/* bf16_inputs: q, k, v, o (and, base bf16, do and gradients of inputs) are bf16 in device memory.
 * backward: needs p->dout. Between forward and backward everything that the kernels do not claim to
 * keep is overwritten with NaN. DP_EINPUT: the kernels do not take this problem (the message says
 * why). */
dp_status dp_cuda_run(const dp_problem *p, const dp_cuda_how *how, dp_cuda_result *out, dp_err *e);
/* Have the kernels it token by token alone (gpu/token)? Then its chain is fp32. */
int dp_cuda_by_tokens(const dp_problem *p);
/* How the kernels send on N ranks, as a design says it: of a rank in which a sequence begins the
 * state that leaves it. */
dp_sending dp_cuda_sending(dp_sending asked, int N);
void dp_cuda_result_free(dp_cuda_result *r, int HV);
/* The device as dp_truth_request.device, or NULL where there is none or it does not take these
 * shapes. */
const dp_truth_device *dp_cuda_truth(const dp_problem *p);
/* The device's memory for problems of this shape on N ranks: dp_cuda_run takes arrays that lie
 * there, and leaves its results there. NULL without the backend, with processes or several devices,
 * and for widths that are filled up (device_arrays.h). */
const dp_memory *dp_cuda_memory(const dp_problem *p, dp_backend b, int N);

/* The convolution of gpu/ as a subject: forward and backward on N
 * ranks, one host thread each (device_run.h). */

/* `parts` convolutions (at most 4) over the same tokens, alike but for their channels and data,
 * which share every message (gpu/dp_conv.h).
 *   N      ranks; parts, where c->own says which rank has them
 *   base   bf16: x, dy, y and dx are bf16 in device memory, else fp32
 * Fills y and, with dy, dx, dw, dbias of r (allocated by the caller). DP_EINPUT: the kernels do not
 * take this problem (the message says why). */
dp_status dp_cuda_conv(const dp_conv *const *c, int parts, dp_base base, int N, dp_backend b,
                       dp_conv_result *const *r, dp_err *e);

/* A call of a session through the decode kernels of gpu/
 * (gpu/dp_decode.h): up to DPG_DECODE_TOKENS tokens of each sequence, states fp32 [K][V] in slots.
 */

/* Do the kernels take a call like this one? Each sequence is a request of the batch, one without
 * tokens a request of length 0. */
int dp_cuda_decodes(const dp_problem *call, const dp_cuda_how *how, const dp_state_pool *pool);

/* Do the kernels keep the states of a call in the format how->kept of its session? They have e4m3,
 * e5m2 and int8 by blocks, and fp16 by chance. The states that come in must be numbers of the
 * format. A pool and the states of all tokens stay in fp32. */
int dp_cuda_keeps(const dp_problem *call, const dp_cuda_how *how, const dp_state_pool *pool,
                  int states);

/* Forward of that call on device 0.
 *   out      o and final_state, to be freed
 *   states   NULL, or gets the state after every token [T][HV][K][V], to be freed; each state is
 *            then written to a slot of its own
 *   pool     NULL, or the pool of states. The kernel gets the whole pool, with the slots to read
 *            and write, and updates it; out then has no final_state. A call in a pool has one token
 *            less, as the kernel reads and writes the slots of one list */
dp_status dp_cuda_decode(const dp_problem *call, const dp_cuda_how *how, const dp_state_pool *pool,
                         dp_result *out, double **states, dp_err *e);
