/* gpu/dp_decode.h - a step of serving: up to DPG_DECODE_TOKENS tokens each of a batch of requests,
 * whose states lie in slots of one array (GDN, KDA, MKDA). One kernel on one CUDA device; for C11.
 *
 * Token by token (math.md b), in fp32 from the first load to the last store; o reads the state
 * before it is rounded to its format. As serving frameworks call such kernels:
 *
 *   slot      [B][kept]. kept = 1: the state is read from slot[b][0], and the one after the last
 *             token goes there. kept = T: the state after token t goes to slot[b][t], so that
 *             drafted tokens can be given up.
 *   accepted  [B], kept = T: how many tokens of the request's window before this one were accepted,
 *             1 .. kept: the state is read from slot[b][accepted[b] - 1]. NULL: 1.
 *   length    [B]: how many of the T tokens are tokens, 0 .. T. NULL: T.
 *
 * A request with a slot below 0 where it would read is padding: nothing of it is read, its o is 0,
 * no state is written. A slot below 0 to be written is left out. No two requests may share a slot
 * that one of them writes; of one request all reads come before all writes. Tokens behind length
 * have o = 0 and write nothing.
 *
 * Nothing is allocated, nothing waited for: a call can be captured in a CUDA graph, and what slot,
 * accepted and length hold may change between its replays. The bits of a request do not depend on
 * the others, on B, or on how its tokens are cut into calls where the state is fp32. */
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
 * K V / 32 scales in fp32. With feedback K V numbers in bf16 follow: what the store left out, which
 * the next one adds (of the slot that is read). The errors that they make in a session are in
 * harness/simulated/carried.h. A state in fp16 has no scales and is rounded by chance (fp16sr
 * there), to the same bits. A scale of a row, a head or all heads needs numbers of other blocks of
 * the kernel: there is none. */
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

/* K in {32, 64, 128, 256}, V a multiple of 32, R in {1, 2, 4}, HV a multiple of H. */
typedef struct {
    int B, T, H, HV, K, V, R, Kg; /* Kg = K (KDA, MKDA) or 1 (GDN) */
    float scale;
    dp_gate gate;
    float lower_bound; /* DP_GATE_LOWER_BOUND only */
    dp_beta beta_form;
    int l2norm;
    dpg_dtype dtype;  /* of q k v */
    dpg_dtype gdtype; /* of g beta */
    dpg_dtype odtype; /* of o */
    dpg_dtype sdtype; /* of states that are not packed */
    dpg_packed packed;
    dpg_state_layout layout;
    int64_t slots;
    int kept; /* 1 or T */
} dpg_decode;

/* Device pointers, 16-byte aligned; q [B][T][H][K], k [B][T][H][R][K], v [B][T][HV][R][V],
 * g [B][T][HV][Kg], beta [B][T][HV][R], o [B][T][HV][V], A_log [HV] and dt_bias [HV][Kg] fp32 or
 * NULL (0), states [slots][HV] of K V numbers, or of DPG_PACKED_BYTES. */
typedef struct {
    const void *q, *k, *v, *g, *beta;
    const float *A_log, *dt_bias;
    void *o, *states;
    const int32_t *slot, *accepted, *length;
} dpg_decode_tensors;

/* Enqueues the kernel on a stream (a cudaStream_t). DP_EINPUT: a shape that it does not take, with
 * field and value. Slots from `slots` on and accepted outside 1 .. kept are taken for padding. */
dp_status dpg_decode_run(const dpg_decode *d, const dpg_decode_tensors *t, void *stream, dp_err *e);

/* The same slots for the causal convolution before q, k or v (dp_conv.h): states
 * [slots][D][W - 1], the last W - 1 rows of x, oldest first; x y [B][T][D] of `dtype`, states of
 * `sdtype`, w [D][W], bias [D] or NULL. 2 <= W <= 8. */
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
