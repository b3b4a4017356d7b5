/* gpu/plan/sending.cuh - what the kernels do for each exchange and payload
 * (ref/vocabulary/exchange.h). */
#ifndef DPG_SENDING_CUH
#define DPG_SENDING_CUH
#include "dp_gpu.h"

struct Exchange {
    int hops;   /* states go from rank to rank, in N - 1 messages; else pairs are gathered */
    int passes; /* a pass from the received state makes the sent one: no M is formed */
    int levels; /* pairs are multiplied over distances 1, 2, 4 ..; then each state is sent once */
    int heads;  /* no states: tokens of all heads against heads of all tokens */
};
static const Exchange exchanges[DP_NRUN_EXCHANGES] = {
    {0, 0, 0, 0}, /* allgather */
    {1, 0, 0, 0}, /* ring */
    {1, 0, 1, 0}, /* scan */
    {1, 1, 0, 0}, /* serial */
    {0, 0, 0, 1}, /* heads */
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

/* Is anything sent: between ranks; or from part to part of a grid, to one rank itself, so that its
 * bits are those of many. */
static inline int sends(const dpg_problem *p, int N) { return N > 1 || p->own.by_part; }

/* Does a sending plan send states from rank to rank? */
static inline int hands_on(const dpg_options *o, int sends) {
    return sends && exchanges[o->exchange].hops;
}

/* Do ranks exchange heads: no states, whatever the parts of a grid. */
static inline int exchanges_heads(const dpg_options *o, int N) {
    return N > 1 && exchanges[o->exchange].heads;
}

/* Does a pass make the sent state? */
static inline int passes_on(const dpg_options *o, int sends) {
    return sends && exchanges[o->exchange].passes;
}

/* The payload: for states alone that of states. */
static inline dp_payload sent_as(const dpg_options *o, int sends) {
    int states = hands_on(o, sends) && !exchanges[o->exchange].levels;
    return states ? dp_payloads[o->payload].state : o->payload;
}

/* Words of a message of so many numbers, which are even; 0: it is not packed. */
static inline int64_t packed_words(dp_payload p, int64_t numbers) {
    return payloads[p].per_word ? numbers / payloads[p].per_word : 0;
}
#endif
