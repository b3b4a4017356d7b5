/* harness/device/device_decode.h - a call of a session through the decode kernels of gpu/
 * (gpu/dp_decode.h): up to DPG_DECODE_TOKENS tokens of each sequence, states fp32 [K][V] in slots.
 */
#ifndef DP_DEVICE_DECODE_H
#define DP_DEVICE_DECODE_H
#include "device_run.h"
#include "harness/simulated/calls.h"

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
#endif
