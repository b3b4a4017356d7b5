/* gpu/tests/steps.h - forward and backward of a small rank step by step, for tests in which a rank
 * goes wrong before one of them. */
#ifndef DPG_TESTS_STEPS_H
#define DPG_TESTS_STEPS_H
#include "rank.h"

enum { FORWARD = 5, STEPS = 13 }; /* steps of the forward; in all */
static const char *const phases[STEPS + 1] = {"chunks",
                                              "pre",
                                              "gather",
                                              "merge",
                                              "state",
                                              "recompute",
                                              "dAv",
                                              "pre (backward)",
                                              "gather (backward)",
                                              "merge (backward)",
                                              "state (backward)",
                                              "intra",
                                              "gate",
                                              "the end"};

/* Step i, or the wait behind the last one. */
static inline dp_status take_step(Rank &r, int i, dpg_comm *c) {
    if (i == STEPS) return r.wait(c);
    if (i >= FORWARD) return r.backward(c, 1 << (i - FORWARD));
    r.st = dpg_forward_steps(r.plan, &r.t, r.ws, c, r.stream, 1 << i, &r.err);
    return r.st;
}

/* Does an error name rank 1. */
static inline bool names_rank_1(const char *message) {
    return strstr(message, "rank 1 ") || strstr(message, "of rank 1");
}

/* Two heads, K = V = 64. */
static inline dpg_problem small_problem(const std::vector<int64_t> &cu, dp_gate gate,
                                        dpg_dtype type) {
    dpg_problem p = sized(cu, 2, 2, 64, 64, 1, 64, type);
    p.gate = gate;
    return p;
}

/* Keeps a stream busy until the flag is set. */
static __global__ void k_spin(volatile int *flag) {
    while (!*flag) {
    }
}
#endif
