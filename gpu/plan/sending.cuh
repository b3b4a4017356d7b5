/* gpu/plan/sending.cuh - what the kernels do for each exchange and payload
 * (ref/vocabulary/exchange.h). */
#ifndef DPG_SENDING_CUH
#define DPG_SENDING_CUH
#include "dp_gpu.h"

struct Exchange {
    int hops; /* states are handed from rank to rank, in N - 1 hops; else pairs are gathered */
    const char *refuses;
};
static const Exchange exchanges[DP_NRUN_EXCHANGES] = {
    {0, NULL},                                                        /* allgather */
    {1, NULL},                                                        /* ring */
    {1, "no kernel multiplies pairs of ranks with each other"},       /* scan */
    {1, "no state pass writes the state that leaves a rank in fp32"}, /* serial */
    {0, "the kernels have no all-to-all"},                            /* heads */
};

struct Payload {
    int per_word; /* numbers in a word of 32 bits; 0: sent as they are, fp32 */
    int split;    /* that one number is a sum of two bf16, the larger in the upper half */
    const char *refuses;
};
static const char no_low_rank[] = "the kernels make no singular values of M",
                  no_diagonal[] = "a price alone: the kernels send all of M";
static const Payload payloads[DP_NPAYLOADS] = {
    {0, 0, NULL},        /* full */
    {0, 0, NULL},        /* fp32, in which they were computed */
    {2, 0, NULL},        /* bf16 */
    {1, 1, NULL},        /* bf16x2 */
    {2, 0, NULL},        /* m-i */
    {0, 0, no_low_rank}, /* svd-1e-4 */
    {0, 0, no_low_rank}, /* svd-1e-2 */
    {0, 0, no_diagonal}, /* diagonal */
};

/* Does a rank hand states on, N > 1. */
static inline int hands_on(const dpg_options *o, int N) {
    return N > 1 && exchanges[o->exchange].hops;
}

/* Words of a message of so many numbers, which are even; 0: it is not packed. */
static inline int64_t packed_words(dp_payload p, int64_t numbers) {
    return payloads[p].per_word ? numbers / payloads[p].per_word : 0;
}
#endif
