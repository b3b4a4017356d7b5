/* ref/vocabulary/exchange.h - exchanges of states between the ranks of context parallelism
 * (math.md g.3).
 *
 *   allgather  every rank receives every pair (M, H) and merges the pairs before it, farthest first
 *   ring       each rank receives the state S of the rank before it and sends M S + H. The products
 *              are an all-gather's, so the bits are equal
 *   scan       Hillis-Steele: pairs are combined over distances 1, 2, 4 .., then each rank sends
 *              one state. It multiplies M by M, in the format of the chain
 *   serial     no M: a rank runs its own state pass when the state has arrived
 *   heads      all-to-all before and after: a rank has all tokens of HV / N heads, and no state is
 *              exchanged (Megatron's default). The bits are one rank's
 *
 * These run on simulated ranks and on the CUDA kernels (gpu/plan/sending.cuh). Two more have a
 * price alone (ref/chunk/exchange_price.h), since their results equal one of the above:
 *   windows    the all-gather's pairs, read in the peers' memory, all at once
 *   grid       ring over the parts of --exact-cp: a rank merges each of its parts of 128 tokens
 */
#pragma once
#include "linkage.h"
DP_C_BEGIN

typedef enum {
    DP_EXCHANGE_ALLGATHER,
    DP_EXCHANGE_RING,
    DP_EXCHANGE_SCAN,
    DP_EXCHANGE_SERIAL,
    DP_EXCHANGE_HEADS,
    DP_NRUN_EXCHANGES,
    DP_EXCHANGE_WINDOWS = DP_NRUN_EXCHANGES,
    DP_EXCHANGE_GRID,
    DP_NEXCHANGES
} dp_exchange;
#define DP_EXCHANGE_WORDS "allgather|ring|scan|serial|heads" /* exchanges that run, in this order */

extern const char *const dp_exchange_names[DP_NEXCHANGES];

typedef struct {
    int pairs;  /* 1: ranks form (M, H) */
    int states; /* 1: a rank receives a state */
} dp_exchange_info;
extern const dp_exchange_info dp_exchanges[DP_NEXCHANGES];

/* The format in which the numbers of pairs and states are sent:
 *   full      as they were computed
 *   fp32; bf16; bf16x2 (a sum of two bf16, 16 bits)
 *   m-i       H in bf16, M as M - I in bf16: the small part of an M that is nearly I
 *   svd-1e-4, svd-1e-2
 *             H in fp32; M as two factors in fp32 with the singular values above this share
 *             (low_rank.h)
 *   diagonal  K numbers of M, in fp32, if nothing is erased (GLA, SSD); has a price alone
 *             (ref/chunk/exchange_price.h)
 * The exchange heads sends tokens, and supports full only. */
typedef enum {
    DP_PAYLOAD_FULL,
    DP_PAYLOAD_FP32,
    DP_PAYLOAD_BF16,
    DP_PAYLOAD_BF16X2,
    DP_PAYLOAD_LESS_I,
    DP_PAYLOAD_LOW_RANK,
    DP_PAYLOAD_LOWER_RANK,
    DP_NRUN_PAYLOADS,
    DP_PAYLOAD_DIAGONAL = DP_NRUN_PAYLOADS,
    DP_NPAYLOADS
} dp_payload;
#define DP_PAYLOAD_WORDS "full|fp32|bf16|bf16x2|m-i|svd-1e-4|svd-1e-2"
extern const char *const dp_payload_names[DP_NPAYLOADS];

typedef struct {
    double u;         /* unit roundoff of a sent number */
    int bytes;        /* of a sent number */
    int less_i;       /* 1: M - I instead of M */
    double tolerance; /* singular values of M up to this one are not sent; 0: all are */
    dp_payload state; /* the payload of a state without M */
} dp_payload_info;
extern const dp_payload_info dp_payloads[DP_NPAYLOADS];

/* The exchange of states, as far as it changes roundings. All fields are 0 for one rank, and for a
 * ring with the bits of an all-gather. Parts of the payload that are not sent do not count. */
typedef struct {
    dp_exchange exchange;
    dp_payload payload;
    /* In an all-gather, the message of a rank on which the sequence that leaves it begins. 0: the
     * pair, which every rank applies to the initial state. 1: the state that leaves the rank, as in
     * ring, scan and serial. Both give equal results unless there is an initial state and a payload
     * that rounds */
    int begins;
} dp_sending;
#define DP_SENDERS 2 /* the number of ranks where it is unknown */
dp_sending dp_sending_of(dp_exchange x, dp_payload p, int N);

/* Why N ranks of HV value heads cannot exchange so; NULL: they can. */
const char *dp_exchange_refuses(dp_exchange x, int N, int HV);

DP_C_END
