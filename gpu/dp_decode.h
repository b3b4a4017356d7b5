/* gpu/dp_decode.h - a decode step of a batch of requests (GDN, KDA, MKDA): up to DPG_DECODE_TOKENS
 * tokens a request. The states lie in slots of one array. One kernel on one CUDA device; for C11.
 *
 * The kernel computes token by token (math.md b), in fp32 from the first load to the last store.
 * The output o reads the state before the state is rounded to its format. The index arrays are
 * those of serving frameworks:
 *
 *   slot      [B][kept]. kept = 1: the state is read from slot[b][0], and the state after the last
 *             token is written there. kept = T: the state after token t is written to slot[b][t],
 *             so that drafted tokens can be rejected.
 *   accepted  [B], kept = T: number of accepted tokens of the request's previous window, 1 .. kept.
 *             The state is read from slot[b][accepted[b] - 1]. NULL: 1.
 *   length    [B]: number of the request's tokens in this call, 0 .. T. NULL: T.
 *
 * A request is padding if the slot that it reads is below 0. Its inputs may hold anything, its o is
 * 0, no state is written. A state is not written if its slot is below 0. No two requests may share
 * a slot that one of them writes. All reads of a request precede its writes. Tokens behind length
 * have o = 0 and write nothing.
 *
 * A call allocates nothing and waits for nothing. A CUDA graph can capture the call; the contents
 * of slot, accepted and length may change between replays. The bits of a request do not depend on
 * the other requests or on B. If the state is fp32, they do not depend either on how its tokens are
 * cut into calls. */
#ifndef DP_DECODE_H
#define DP_DECODE_H
#include "dp_gpu.h"
#ifdef __cplusplus
extern "C" {
#endif

#define DPG_DECODE_TOKENS 8

typedef enum { DPG_STATE_KV, DPG_STATE_VK } dpg_state_layout; /* [K][V] or [V][K] */

/* States of 8 or 16 bits a number, layout [K][V]. With 8 bits each row of 32 columns has a scale:
 * its largest number over 448 (fp8 e4m3), 57344 (e5m2) or 127 (int8). These are e4m3-block,
 * e5m2-block and int8-block of ref/vocabulary/stored.h. A head of a slot is K V codes, then
 * K V / 32 scales in fp32; a NaN makes its row NaN. With feedback K V numbers in bf16 follow, the
 * rounding error of the store. The next call that reads the slot adds them to the state. The errors
 * of these formats in a session are in ref/bound/carried.h. fp16 by chance has no scales, and
 * the bits of fp16sr (stored.h). Scales of a whole row, head or
 * tensor are not offered: they need numbers of other blocks of the kernel. */
typedef enum {
    DPG_UNPACKED,
    DPG_E4M3,
    DPG_INT8,
    DPG_INT8_FEEDBACK,
    DPG_E5M2,
    DPG_FP16_BY_CHANCE
} dpg_packed;
/* Bytes of n numbers. */
#define DPG_PACKED_BYTES(packed, n) \
    ((packed) == DPG_FP16_BY_CHANCE \
         ? 2 * (n)                  \
         : (n) + (n) / 8 + ((packed) == DPG_INT8_FEEDBACK ? 2 * (n) : 0))

/* K in {32, 64, 128, 256}, V a multiple of 32, R in {1, 2, 4}, HV a multiple of H. B and HV are at
 * most 65,535. */
typedef struct {
    int B, T, H, HV, K, V, R, Kg; /* Kg = K (KDA, MKDA) or 1 (GDN) */
    float scale;
    dp_gate gate;
    float lower_bound; /* DP_GATE_LOWER_BOUND only */
    dp_beta beta_form;
    int l2norm;
    dpg_dtype dtype;               /* of q k v */
    dpg_dtype gdtype;              /* of g beta */
    dpg_dtype odtype;              /* of o */
    dpg_dtype sdtype;              /* of states that are not packed; fp16 to nearest even */
    dpg_dtype A_dtype, bias_dtype; /* of A_log, of dt_bias */
    dpg_packed packed;
    dpg_state_layout layout;
    int64_t slots;
    int kept; /* 1 or T */
} dpg_decode;

/* Device pointers, 16-byte aligned:
 *   q [B][T][H][K]   k [B][T][H][R][K]   v [B][T][HV][R][V]   g [B][T][HV][Kg]
 *   beta [B][T][HV][R]   o [B][T][HV][V]
 *   A_log [HV], dt_bias [HV][Kg]   NULL: zeros
 *   states [slots][HV]             of K V numbers, or of DPG_PACKED_BYTES
 *   start  as states               read in place of it, never written; NULL: states */
typedef struct {
    const void *q, *k, *v, *g, *beta;
    const void *A_log, *dt_bias;
    void *o, *states;
    const int32_t *slot, *accepted, *length;
    const void *start;
} dpg_decode_tensors;

/* Enqueues the kernel on a stream (a cudaStream_t). Returns DP_EINPUT for a shape that the kernel
 * does not support; e names field and value. A request with a slot of `slots` or more, or with
 * accepted outside 1 .. kept, is padding. */
dp_status dpg_decode_run(const dpg_decode *d, const dpg_decode_tensors *t, void *stream, dp_err *e);

/* The causal convolution before q, k or v (dp_conv.h), its states in slots likewise. 2 <= W <= 8.
 *   states [slots][D][W - 1]   of sdtype: the last W - 1 rows of x, oldest first
 *   x, y [B][T][D]             of dtype
 *   w [D][W], bias [D]         bias NULL: none */
typedef struct {
    int B, T, D, W, silu;
    dpg_dtype dtype, sdtype;
    int64_t slots;
    int kept;
    const void *x;
    const float *w, *bias;
    void *y, *states;
    const int32_t *slot, *accepted, *length;
} dpg_decode_conv;
dp_status dpg_decode_conv_run(const dpg_decode_conv *c, void *stream, dp_err *e);

#ifdef __cplusplus
}
#endif
#endif
