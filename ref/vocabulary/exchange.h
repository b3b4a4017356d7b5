/* ref/vocabulary/exchange.h - how the state that leaves a rank reaches the ranks behind it
 * (math.md g.3).
 *
 *   allgather  every rank gets every pair (M, H) and folds those before it, farthest first
 *   ring       the state is handed from rank to rank, each puts M S + H in its place: the very
 *              products of an all-gather, so the same bits
 *   scan       Hillis-Steele: pairs are combined over distances 1, 2, 4 .., then one is handed on.
 *              Products of M with M are part of it: they run in the format of the chain
 *   serial     no M: a rank runs its own state pass when the state has come
 *   heads      all-to-all before and after: a rank has all tokens of HV / N heads, and no state is
 *              exchanged at all (what Megatron does by default): the bits of one rank
 *
 * These run on simulated ranks and on the CUDA kernels (gpu/plan/sending.cuh). Two more have a
 * price alone (ref/chunk/exchange_price.h), since they compute the same as one of these:
 *   windows    the all-gather's pairs, read where they lie, all at once
 *   grid       ring over the parts of --exact-cp: a rank folds each of its parts of 128 tokens
 */
#ifndef DP_EXCHANGE_H
#define DP_EXCHANGE_H
#ifdef __cplusplus
extern "C" {
#endif

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
#define DP_EXCHANGE_WORDS "allgather|ring|scan|serial|heads" /* those that run, in their order */

extern const char *const dp_exchange_names[DP_NEXCHANGES];

typedef struct {
    int pairs;  /* 1: ranks form (M, H) */
    int states; /* 1: a state comes to a rank */
} dp_exchange_info;
extern const dp_exchange_info dp_exchanges[DP_NEXCHANGES];

/* The format in which the numbers of pairs and states are sent:
 *   full      as they were computed
 *   fp32; bf16; bf16x2 (a sum of two bf16, 16 bits)
 *   m-i       H in bf16, M as M - I in bf16: the small part of an M that is nearly I
 *   svd-1e-4, svd-1e-2
 *             H in fp32, M as the singular values above that, two factors in fp32 (low_rank.h)
 *   diagonal  K numbers of M, in fp32: what there is where nothing is erased (GLA, SSD); a price
 *             alone (ref/chunk/exchange_price.h)
 * Heads sends tokens, and knows full alone. */
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
    double u;         /* unit roundoff of a number that is sent */
    int bytes;        /* of such a number */
    int less_i;       /* 1: M - I in place of M */
    double tolerance; /* singular values of M up to this one are not sent; 0: all are */
    dp_payload state; /* what a state alone is sent as */
} dp_payload_info;
extern const dp_payload_info dp_payloads[DP_NPAYLOADS];

/* The exchange of states, as far as it changes roundings. It is all zeros on one rank, and where a
 * ring makes the bits of an all-gather. Parts of the payload that are not sent do not count. */
typedef struct {
    dp_exchange exchange;
    dp_payload payload;
    /* all-gather, in a rank where the sequence that leaves it begins. 0: it sends its pair, which
     * every rank applies to the initial state. 1: it sends the state that leaves it, as ring, scan
     * and serial do. The same unless there is an initial state and a payload that rounds */
    int begins;
} dp_sending;
#define DP_SENDERS 2 /* where it is not known how many ranks there are */
dp_sending dp_sending_of(dp_exchange x, dp_payload p, int N);

/* Why N ranks of HV value heads cannot exchange so; NULL: they can. */
const char *dp_exchange_refuses(dp_exchange x, int N, int HV);

#ifdef __cplusplus
}
#endif
#endif
