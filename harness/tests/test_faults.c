/* Every deliberate fault must make a verdict red at its stage, and the same runs without it must be
 * green. */
#include "harness/case/case.h"
#include "harness/record/run.h"
#include "harness/simulated/fault.h"
#include "harness/simulated/ranks.h"
#include "runs.h"
#include "sanitized.h"

#include <omp.h>
#include <stdio.h>
#include <string.h>
#include <xxhash.h>

typedef struct {
    dp_fault fault;
    const char *case_name;
    int ranks;
    dp_base base;
    dp_format chain;
    const char *tensor;  /* must fail */
    const char *healthy; /* must still pass: the fault is where it should be (NULL: nothing said) */
    int not_head;        /* head that must not be the worst one (-1: any) */
} expectation;

static const expectation EXPECT[] = {
    {DP_FAULT_MERGE_NEAREST_FIRST, "weak-heads", 4, DP_BASE_FP32, DP_FP32, "S_in", "M", -1},
    {DP_FAULT_BEFORE_FIRST, "museum/halo", 4, DP_BASE_FP32, DP_FP32, "o", NULL, -1},
    {DP_FAULT_BEFORE_PACKED, "museum/halo", 2, DP_BASE_BF16, DP_FP32, "o", NULL, -1},
    {DP_FAULT_BEFORE_GRAD_LOST, "museum/halo", 4, DP_BASE_FP32, DP_FP32, "dk", "o", -1},
    {DP_FAULT_MERGE_NEAREST_FIRST, "weak-heads", 4, DP_BASE_BF16, DP_BF16ST, "dS_out", "dH", -1},
    {DP_FAULT_FWD_FIRST_SUBSEQ, "packed-across", 4, DP_BASE_FP32, DP_FP32, "H", "dH", -1},
    {DP_FAULT_BWD_LAST_SUBSEQ, "packed-across", 4, DP_BASE_FP32, DP_FP32, "dH", "o", -1},
    {DP_FAULT_DECAY_BEFORE_USE, "weak-heads", 4, DP_BASE_FP32, DP_FP32, "o", "H", -1},
    {DP_FAULT_GATE_OF_HEAD0, "weak-heads", 4, DP_BASE_BF16, DP_FP32, "dH", "o", 0},
    {DP_FAULT_GATE_OF_HEAD0, "weak-heads", 4, DP_BASE_FP32, DP_FP32, "dk", "o", -1},
    {DP_FAULT_LAST_INDEX, "weak-heads", 4, DP_BASE_FP32, DP_FP32, "final_state", NULL, -1},
    {DP_FAULT_TAIL_UNMASKED, "packed-inside", 2, DP_BASE_FP32, DP_FP32, "final_state", NULL, -1},
    {DP_FAULT_CHAIN_BF16, "smoke-chain", 1, DP_BASE_FP32, DP_FP32, "M", NULL, -1},
    {DP_FAULT_CHAIN_TF32RZ, "smoke-chain", 1, DP_BASE_FP32, DP_TF32X3, "M", NULL, -1},
    {DP_FAULT_CHAIN_TF32RZ, "kda-reflect", 4, DP_BASE_FP64, DP_FP32, "M", "H", -1},
    {DP_FAULT_STATE_LOST, "weak-heads", 4, DP_BASE_BF16, DP_FP32, "dq", "o", -1},
    {DP_FAULT_STATE_LATE, "packed-across", 4, DP_BASE_FP32, DP_FP32, "dq", "o", -1},
    {DP_FAULT_MERGE_HALF_V, "weak-heads", 4, DP_BASE_BF16, DP_FP32, "S_in", "H", -1},
    {DP_FAULT_STATE_TRANSPOSED, "weak-heads", 4, DP_BASE_BF16, DP_FP32, "S_in", "H", -1},
    {DP_FAULT_EXP2_GATE, "weak-heads", 1, DP_BASE_FP32, DP_FP32, "o", NULL, -1},
    {DP_FAULT_MERGE_SCALED, "weak-heads", 4, DP_BASE_FP32, DP_FP32, "S_in", "M", -1},
    {DP_FAULT_GATE_GRAD_PARTIAL, "smoke-kda", 4, DP_BASE_FP32, DP_FP32, "dA_log", "dg", -1},
    {DP_FAULT_GATE_GRAD_PARTIAL, "smoke-kda", 4, DP_BASE_BF16, DP_FP32, "ddt_bias", "dg", -1},
    {DP_FAULT_DG_NO_BOUNDARY, "weak-heads", 4, DP_BASE_FP32, DP_FP32, "dg", "dk", -1},
    {DP_FAULT_GATE_NO_OFFSET, "weak-heads", 4, DP_BASE_FP32, DP_FP32, "dH", "o", -1},
    {DP_FAULT_MERGE_TF32RZ, "kda-reflect", 4, DP_BASE_FP32, DP_FP32, "S_in", "M", -1},
    {DP_FAULT_CU_DIVIDED, "packed-inside", 4, DP_BASE_FP32, DP_FP32, "o", NULL, -1},
    {DP_FAULT_ZIGZAG, "weak-heads", 4, DP_BASE_BF16, DP_FP32, "o", NULL, -1},
    {DP_FAULT_LINEAR_GATE, "weak-heads", 4, DP_BASE_FP32, DP_FP32, "o", NULL, -1},
    {DP_FAULT_NEUMANN_INVERSE, "kda-corr", 1, DP_BASE_FP32, DP_FP32, "o", NULL, -1},
    {DP_FAULT_DOUBLING_INVERSE, "kda-corr", 1, DP_BASE_BF16, DP_FP32, "o", NULL, -1},
    {DP_FAULT_FACTORED_EXP, "lower-bound", 2, DP_BASE_FP32, DP_FP32, "o", NULL, -1},
    {DP_FAULT_FACTORED_EXP_CLAMPED, "lower-bound-wide", 2, DP_BASE_FP32, DP_FP32, "o", NULL, -1},
    {DP_FAULT_STALE_LANES, "weak-heads", 4, DP_BASE_FP32, DP_FP32, "dbeta", "dk", -1},
    {DP_FAULT_HALF_CHUNK, "weak-heads", 4, DP_BASE_FP32, DP_FP32, "dk", "dv", -1},
    {DP_FAULT_OFFSET_WRAPS, "weak-heads", 4, DP_BASE_BF16, DP_FP32, "o", "M", -1},
    {DP_FAULT_GRID_AXIS, "weak-heads", 4, DP_BASE_FP32, DP_FP32, "o", "final_state", 0},
    {DP_FAULT_STALE_ACCUMULATOR, "no-decay", 2, DP_BASE_FP32, DP_FP32, "dbeta", "dv", -1},
    {DP_FAULT_DIAGONAL_TF32, "smoke-kda", 2, DP_BASE_FP32, DP_FP32, "dg", "dk", -1},
    {DP_FAULT_L2_ROUNDED, "smoke-kda", 2, DP_BASE_FP32, DP_FP32, "dq", "dv", -1},
    {DP_FAULT_DECAY_BF16, "weak-heads", 4, DP_BASE_FP32, DP_FP32, "o", NULL, -1},
    {DP_FAULT_STATE_BF16, "weak-heads", 4, DP_BASE_FP32, DP_FP32, "final_state", "S_in", -1},
    {DP_FAULT_DROP_CHANNEL_SUM, "dropped-moved", 2, DP_BASE_FP32, DP_FP32, "o", "S_in", -1},
    {DP_FAULT_DROP_HORIZON, "dropped-gdn", 2, DP_BASE_FP32, DP_FP32, "final_state", "S_in", -1},
    {DP_FAULT_ANCHOR_LEAK, "lower-bound", 2, DP_BASE_FP32, DP_FP32, "o", NULL, -1},
    {DP_FAULT_DIAGONAL_TF32, "strong-raw", 2, DP_BASE_FP32, DP_FP32, "dA_log", "dk", -1},
    {DP_FAULT_KEYS_NORMED, "key-norms", 2, DP_BASE_BF16, DP_FP32, "o", NULL, -1},
    {DP_FAULT_GATE_BF16, "smoke-kda", 2, DP_BASE_FP32, DP_FP32, "o", NULL, -1},
    {DP_FAULT_GATE_BF16, "strong-raw", 1, DP_BASE_FP32, DP_FP32, "dg", NULL, -1},
    {DP_FAULT_BETA_BF16, "smoke-kda", 2, DP_BASE_FP32, DP_FP32, "dv", NULL, -1},
    {DP_FAULT_SHORT_NAN, "t63", 1, DP_BASE_BF16, DP_FP32, "o", "final_state", -1},
    {DP_FAULT_BLOCKS_NAN, "weak-heads", 1, DP_BASE_BF16, DP_FP32, "o", "final_state", -1},
    {DP_FAULT_STRIDE_IGNORED, "weak-heads", 4, DP_BASE_BF16, DP_FP32, "o", "M", -1},
    {DP_FAULT_CONTEXT_LOST, "weak-heads", 4, DP_BASE_BF16, DP_FP32, "S_in", "H", -1},
    {DP_FAULT_RESIDUAL_BF16, "weak-heads", 4, DP_BASE_FP32, DP_FP32, "o", "M", -1},
    {DP_FAULT_RESIDUAL_BF16, "exact-residual", 1, DP_BASE_BF16, DP_FP32, "o", NULL, -1},
    {DP_FAULT_STATE_FP16, "weak-heads", 4, DP_BASE_FP32, DP_FP32, "final_state", "M", -1},
    {DP_FAULT_STATE_FP16, "large-state", 1, DP_BASE_BF16, DP_FP32, "o", NULL, -1},
    {DP_FAULT_OUTPUT_FP16, "weak-heads", 4, DP_BASE_FP32, DP_FP32, "o", "final_state", -1},
    {DP_FAULT_OUTPUT_FP16, "large-state", 2, DP_BASE_BF16, DP_FP32, "o", "final_state", -1},
    {DP_FAULT_DBETA_DIVIDED, "beta-zero", 2, DP_BASE_BF16, DP_FP32, "dbeta", "dk", -1},
    {DP_FAULT_SATURATED_NAN, "gate-saturated", 2, DP_BASE_BF16, DP_FP32, "dg", "dbeta", -1},
    {DP_FAULT_SATURATED_NAN, "gate-saturated", 1, DP_BASE_FP32, DP_FP32, "dA_log", "o", -1},
    {DP_FAULT_ERASE_MEAN, "smoke-gdn2", 2, DP_BASE_BF16, DP_FP32, "dwrite", NULL, -1},
    {DP_FAULT_ERASE_WRITES, "smoke-gdn2", 2, DP_BASE_FP32, DP_FP32, "S_in", NULL, -1},
    {DP_FAULT_DK_UNERASED, "gdn2-weak", 3, DP_BASE_FP32, DP_FP32, "dk", "derase", -1},
    {DP_FAULT_TURNS_MISTAKEN, "smoke-deltaproduct", 2, DP_BASE_BF16, DP_FP32, "o", NULL, -1},
    {DP_FAULT_TURNS_MISTAKEN, "smoke-mkda2", 3, DP_BASE_FP32, DP_FP32, "S_in", NULL, -1},
    {DP_FAULT_READ_DECAYED, "smoke-dplr", 2, DP_BASE_BF16, DP_FP32, "o", NULL, -1},
    {DP_FAULT_READ_UNDECAYED, "undecayed-kda", 3, DP_BASE_BF16, DP_FP32, "o", NULL, -1},
    {DP_FAULT_READ_UNDECAYED, "undecayed-gdn", 3, DP_BASE_FP32, DP_FP32, "dg", NULL, -1},
    {DP_FAULT_READ_UNDECAYED, "undecayed-mkda", 1, DP_BASE_BF16, DP_FP32, "o", NULL, -1},
    {DP_FAULT_HALO_GRAD_SHIFTED, "conv-halo", 12, DP_BASE_FP32, DP_FP32, "dx", "dw", -1},
    {DP_FAULT_HALO_LEAK, "smoke-conv", 3, DP_BASE_FP32, DP_FP32, "y", NULL, -1},
    {DP_FAULT_HALO_LEAK, "smoke-step", 4, DP_BASE_BF16, DP_FP32, "k", NULL, -1},
    {DP_FAULT_HALO_GRAD_LOST, "smoke-conv", 3, DP_BASE_FP32, DP_FP32, "dx", "dw", -1},
    {DP_FAULT_HALO_GRAD_LOST, "smoke-step", 4, DP_BASE_BF16, DP_FP32, "dx_v", "dv", -1},
    {DP_FAULT_REJECTED_STAY, "session-verify", 1, DP_BASE_FP32, DP_FP32, "o", NULL, -1},
    {DP_FAULT_ROLLBACK_EARLY, "session-verify", 1, DP_BASE_BF16, DP_FP32, "o", NULL, -1},
    {DP_FAULT_ROLLBACK_LATE, "session-verify", 1, DP_BASE_FP32, DP_FP32, "final_state", NULL, -1},
    {DP_FAULT_ROLLBACK_SKIPS, "session-verify", 1, DP_BASE_BF16, DP_FP32, "final_state", NULL, -1},
    {DP_FAULT_SLOT_OF_OTHER, "session-decode", 1, DP_BASE_FP32, DP_FP32, "o", NULL, -1},
    {DP_FAULT_SLOT_TRANSPOSED, "session-prefill", 1, DP_BASE_BF16, DP_FP32, "o", NULL, -1},
    {DP_FAULT_CALL_GATE, "session-prefill", 1, DP_BASE_BF16, DP_FP32, "o", NULL, -1},
    {DP_FAULT_CALL_GATE, "session-decode", 1, DP_BASE_FP32, DP_FP32, "final_state", NULL, -1},
    {DP_FAULT_DRAFT_GATE, "session-verify", 1, DP_BASE_BF16, DP_FP32, "state_drafted", "o", -1},
    {DP_FAULT_DRAFT_GATE, "session-verify", 1, DP_BASE_FP32, DP_FP32, "o_drafted", "o", -1},
    {DP_FAULT_PADDING_WRITES, "session-decode", 1, DP_BASE_BF16, DP_FP32, "final_state", "o", -1},
    {DP_FAULT_PADDING_WRITES, "session-prefill", 1, DP_BASE_FP32, DP_FP32, "final_state", "o", -1},
    {DP_FAULT_SLOT_UNWRITTEN, "session-decode", 1, DP_BASE_BF16, DP_FP32, "final_state", NULL, -1},
    {DP_FAULT_PADDING_WRITES, "session-slots", 1, DP_BASE_BF16, DP_FP32, "pool", "o", -1},
    {DP_FAULT_SLOT_NEIGHBOUR, "session-slots", 1, DP_BASE_BF16, DP_FP32, "o", "pool", -1},
    {DP_FAULT_SLOT_NEIGHBOUR, "session-slots-prefix", 1, DP_BASE_FP32, DP_FP32, "o", "pool", -1},
    {DP_FAULT_SLOT_IN_PLACE, "session-slots", 1, DP_BASE_FP32, DP_FP32, "pool", NULL, -1},
    {DP_FAULT_SLOT_IN_PLACE, "session-slots-prefix", 1, DP_BASE_BF16, DP_FP32, "pool", NULL, -1},
    {DP_FAULT_PADDING_LAST_SLOT, "session-slots", 1, DP_BASE_BF16, DP_FP32, "pool", NULL, -1},
    {DP_FAULT_PREFIX_OVERWRITTEN, "session-slots-prefix", 1, DP_BASE_BF16, DP_FP32, "pool", NULL,
     -1},
    {DP_FAULT_CONV_OF_OTHER, "session-step", 1, DP_BASE_BF16, DP_FP32, "conv_state_k", NULL, -1},
    {DP_FAULT_CONV_ZEROED, "session-step", 1, DP_BASE_BF16, DP_FP32, "k", NULL, -1},
    {DP_FAULT_CONV_ZEROED, "session-step", 1, DP_BASE_FP32, DP_FP32, "conv_state_v", NULL, -1},
    {DP_FAULT_CONV_LATE, "session-step", 1, DP_BASE_FP32, DP_FP32, "q", NULL, -1},
    {DP_FAULT_PREFIX_OVERWRITTEN, "session-prefix", 1, DP_BASE_FP32, DP_FP32, "o", NULL, -1},
    {DP_FAULT_PREFIX_OVERWRITTEN, "session-prefix", 1, DP_BASE_BF16, DP_FP32, "o", NULL, -1},
    {DP_FAULT_KEPT_BF16, "session-verify", 1, DP_BASE_FP32, DP_FP32, "final_state", NULL, -1},
    {DP_FAULT_KEPT_BF16, "session-prefill", 1, DP_BASE_FP32, DP_FP32, "o", NULL, -1},
    {DP_FAULT_KEPT_INT8, "session-verify", 1, DP_BASE_BF16, DP_FP32, "final_state", NULL, -1},
    {DP_FAULT_KEPT_INT8, "session-decode", 1, DP_BASE_BF16, DP_FP32, "final_state", NULL, -1},
    {DP_FAULT_SCAN_MISSES_LEVEL, "weak-heads", 4, DP_BASE_FP32, DP_FP32, "S_in", "M", -1},
    {DP_FAULT_SCAN_MISSES_LEVEL, "exchange-kda", 4, DP_BASE_BF16, DP_FP32, "dS_out", "dM", -1},
    {DP_FAULT_SCAN_SWAPPED, "weak-heads", 4, DP_BASE_FP32, DP_TF32, "S_in", "M", -1},
    {DP_FAULT_SCAN_SWAPPED, "exchange-packed", 6, DP_BASE_BF16, DP_FP32, "dS_out", "dM", -1},
    {DP_FAULT_SERIAL_LATE, "weak-heads", 4, DP_BASE_BF16, DP_FP32, "S_in", NULL, -1},
    {DP_FAULT_SERIAL_LATE, "weak-heads", 4, DP_BASE_FP32, DP_FP32, "dS_out", NULL, -1},
    {DP_FAULT_HEADS_SWAPPED, "weak-heads", 4, DP_BASE_FP32, DP_FP32, "o", "final_state", 3},
    {DP_FAULT_HEADS_SWAPPED, "exchange-packed", 3, DP_BASE_BF16, DP_FP32, "o", "dq", 5},
    {DP_FAULT_PAYLOAD_TRUNCATED, "weak-heads", 4, DP_BASE_FP32, DP_FP32, "S_in", "M", -1},
    {DP_FAULT_PAYLOAD_TRUNCATED, "exchange-slow", 4, DP_BASE_BF16, DP_FP32, "S_in", "dM", -1},
    {DP_FAULT_PAYLOAD_LOW_LOST, "weak-heads", 4, DP_BASE_FP32, DP_FP32, "S_in", "M", -1},
    {DP_FAULT_PAYLOAD_LOW_LOST, "exchange-kda", 4, DP_BASE_BF16, DP_FP32, "dS_out", "M", -1},
    {DP_FAULT_PAYLOAD_TWICE, "exchange-slow", 4, DP_BASE_FP32, DP_FP32, "o", "M", -1},
    {DP_FAULT_PAYLOAD_TWICE, "exchange-slow", 4, DP_BASE_BF16, DP_FP32, "S_in", "M", -1},
    {DP_FAULT_RANK_LARGEST, "weak-heads", 4, DP_BASE_FP32, DP_FP32, "S_in", "M", -1},
    {DP_FAULT_RANK_LARGEST, "exchange-kda", 4, DP_BASE_BF16, DP_FP32, "dS_out", "dM", -1},
    {DP_FAULT_PARTS_BY_RANK, "weak-heads", 4, DP_BASE_FP32, DP_FP32, "S_in", "M", -1},
    {DP_FAULT_PARTS_BY_RANK, "weak-heads", 4, DP_BASE_BF16, DP_FP32, "dS_out", "dM", -1},
    {DP_FAULT_PART_FIRST_M, "weak-heads", 4, DP_BASE_FP32, DP_FP32, "S_in", "M", -1},
    {DP_FAULT_PART_FIRST_M, "exchange-packed", 3, DP_BASE_BF16, DP_FP32, "dS_out", "dM", -1},
};

/* Faults of stages where ranks own several parts of the tokens, uneven ones, or none. */
static const struct {
    dp_own own;
    expectation x;
} OWNED[] = {
    {DP_OWN_ZIGZAG,
     {DP_FAULT_MERGE_NEAREST_FIRST, "weak-heads", 4, DP_BASE_FP32, DP_FP32, "S_in", "M", -1}},
    {DP_OWN_CYCLIC,
     {DP_FAULT_PARTS_BY_RANK, "weak-heads", 4, DP_BASE_FP32, DP_FP32, "S_in", "M", -1}},
    {DP_OWN_CYCLIC,
     {DP_FAULT_PART_FIRST_M, "weak-heads", 4, DP_BASE_BF16, DP_FP32, "S_in", "M", -1}},
    {DP_OWN_EMPTY,
     {DP_FAULT_MERGE_SCALED, "weak-heads", 4, DP_BASE_FP32, DP_FP32, "S_in", "M", -1}},
    {DP_OWN_UNEVEN,
     {DP_FAULT_FWD_FIRST_SUBSEQ, "packed-across", 4, DP_BASE_FP32, DP_FP32, "H", "dH", -1}},
    {DP_OWN_ZIGZAG, {DP_FAULT_STATE_LOST, "weak-heads", 4, DP_BASE_BF16, DP_FP32, "dq", "o", -1}},
    {DP_OWN_GRID, {DP_FAULT_GATE_NO_OFFSET, "weak-heads", 4, DP_BASE_FP32, DP_FP32, "dH", "o", -1}},
    {DP_OWN_ZIGZAG,
     {DP_FAULT_GATE_GRAD_PARTIAL, "smoke-kda", 2, DP_BASE_FP32, DP_FP32, "dA_log", "dg", -1}},
};

/* Within every bound in a first run: seen when runs are repeated. */
static const struct {
    dp_fault fault;
    const char *case_name;
    int ranks;
} REPEAT[] = {{DP_FAULT_RACE, "weak-heads", 3}, {DP_FAULT_ORDER_BY_RUN, "weak-heads", 3}};

static int run_by(const char *name, dp_fault fault, int ranks, dp_base base, dp_format chain,
                  const dp_sending *way, dp_own own, dp_runs *out) {
    dp_case c;
    dp_err e = {0};
    if (!gt_open_case(name, &c)) return 0;
    if (c.op->has_ranks) { /* also what the case file does not list */
        c.nranks = 1;
        c.ranks[0] = ranks;
        c.nbase = 1;
        c.base[0] = base;
        c.nchain = 1;
        c.chain[0] = chain;
        c.nmerge = 1;
        c.merge[0] = way->exchange;
        c.npayload = 1;
        c.payload[0] = way->payload;
    }
    const dp_run_options o = {
        .only = {[DP_ID_CHAIN] = {1, {(int)chain}}, [DP_ID_OWN] = {own != DP_OWN_EVEN, {(int)own}}},
        .fault = fault,
        .cache = gt_cache()};
    const int ok = dp_case_run(&c, &o, out, &e) == DP_OK && out->n > 0;
    if (!ok) gt_fail(__FILE__, __LINE__, name, "%s", e.msg);
    dp_case_free(&c);
    return ok;
}

static int run_case(const char *name, dp_fault fault, int ranks, dp_base base, dp_format chain,
                    dp_runs *out) {
    const dp_sending plain = {0};
    return run_by(name, fault, ranks, base, chain, &plain, DP_OWN_EVEN, out);
}

static void check_red(const expectation *x, const dp_run *bad) {
    const dp_judgement *t = gt_tensor(bad, x->tensor),
                       *h = x->healthy ? gt_tensor(bad, x->healthy) : NULL;
    CHECK(bad->verdict == DP_FAIL, "%s: %s (%s)", bad->id, dp_verdict_names[bad->verdict],
          bad->why);
    CHECK(t && t->verdict == DP_FAIL, "%s: %s is %s at %.3g of its bound", bad->id, x->tensor,
          t ? dp_verdict_names[t->verdict] : "absent", t ? t->ratio : 0);
    if (x->healthy)
        CHECK(h && h->verdict != DP_FAIL, "%s: %s should not suffer, but is at %.3g of its bound",
              bad->id, x->healthy, h ? h->ratio : 0);
    if (x->not_head >= 0 && t)
        CHECK(t->worst.at.head != x->not_head, "%s: worst head is %d", bad->id, t->worst.at.head);
}

/* again: the run without the fault was seen before. */
static void check_both(const expectation *x, dp_own own, int again) {
    const dp_fault_info *f = &dp_faults[x->fault];
    const dp_sending way = {f->exchange, f->payload, 0};
    const dp_own owners = dp_fault_own(x->fault, own);
    dp_runs bad = {0}, good = {0};
    if (run_by(x->case_name, x->fault, x->ranks, x->base, x->chain, &(dp_sending){0}, own, &bad)) {
        CHECK(bad.run[0].own == owners, "%s: not run with own = %s", bad.run[0].id,
              dp_own_names[owners]);
        check_red(x, &bad.run[0]);
    }
    if (!again &&
        run_by(x->case_name, DP_FAULT_NONE, x->ranks, x->base, x->chain, &way, owners, &good))
        CHECK(good.run[0].verdict == DP_PASS, "%s without %s: %s", good.run[0].id, f->name,
              good.run[0].why);
    dp_runs_free(&bad);
    dp_runs_free(&good);
}

DP_TEST(faults, each_one_turns_its_tensor_red_and_is_green_without) {
    const int threads = omp_get_max_threads();
    omp_set_num_threads(1); /* hundreds of loops of microseconds each */
    for (size_t i = 0; i < sizeof EXPECT / sizeof *EXPECT; i++) {
        const expectation *x = &EXPECT[i];
        const dp_fault_info *f = &dp_faults[x->fault];
        int again = 0;
        for (size_t k = 0; k < i; k++) {
            const dp_fault_info *g = &dp_faults[EXPECT[k].fault];
            again |= !strcmp(EXPECT[k].case_name, x->case_name) && EXPECT[k].ranks == x->ranks &&
                     EXPECT[k].base == x->base && EXPECT[k].chain == x->chain &&
                     g->exchange == f->exchange && g->payload == f->payload && g->own == f->own;
        }
        check_both(x, DP_OWN_EVEN, again);
    }
    omp_set_num_threads(threads);
}

DP_TEST(faults, ranks_that_own_parts_of_any_kind_show_them) {
    const int threads = omp_get_max_threads();
    omp_set_num_threads(1);
    for (size_t i = 0; i < sizeof OWNED / sizeof *OWNED; i++)
        check_both(&OWNED[i].x, OWNED[i].own, 0);
    omp_set_num_threads(threads);
}

/* A fault that needs ranks of T / N tokens each says so elsewhere. */
DP_TEST(faults, a_fault_of_even_ranks_is_skipped_elsewhere_with_the_reason) {
    int n = 0;
    for (int f = 1; f < DP_NFAULTS; f++) {
        dp_runs r = {0};
        if (!dp_faults[f].even) continue;
        n++;
        const int of_conv = dp_fault_kind((dp_fault)f) == DP_FAULTS_OF_CONV;
        if (!run_by(of_conv ? "owned-conv" : "weak-heads", (dp_fault)f, 2, DP_BASE_FP32, DP_FP32,
                    &(dp_sending){0}, DP_OWN_ZIGZAG, &r))
            continue;
        CHECK(r.n == 1 && r.run[0].verdict == DP_SKIPPED &&
                  strstr(r.run[0].why, "is of ranks that own T / N tokens each"),
              "%s: %d runs, %s", r.run[0].id, r.n, r.run[0].why);
        dp_runs_free(&r);
    }
    CHECK(n == 6, "%d faults", n);
}

DP_TEST(faults, every_fault_of_the_table_is_tested) {
    for (int f = 1; f < DP_NFAULTS; f++) {
        int n = 0;
        for (size_t i = 0; i < sizeof EXPECT / sizeof *EXPECT; i++)
            n += (int)EXPECT[i].fault == f;
        for (size_t i = 0; i < sizeof REPEAT / sizeof *REPEAT; i++)
            n += (int)REPEAT[i].fault == f;
        CHECK(n > 0, "%s", dp_faults[f].name);
    }
}

/* With 2 ranks M is never used (architecture.md): a wrong chain must not show in o, and must show
 * with 3. */
DP_TEST(faults, two_ranks_cannot_see_the_chain_in_o_and_three_can) {
    double err[2];
    for (int i = 0; i < 2; i++) {
        dp_runs r = {0};
        if (!run_case("kda-reflect", DP_FAULT_CHAIN_BF16, i ? 4 : 2, DP_BASE_FP64, DP_FP64, &r))
            return;
        const dp_judgement *o = gt_tensor(&r.run[0], "o");
        REQUIRE(o, "no o");
        err[i] = o->rel_fro;
        CHECK(gt_tensor(&r.run[0], "M")->verdict == DP_FAIL, "M passes");
        dp_runs_free(&r);
    }
    CHECK(err[0] < 1e-13 && err[1] > 1e-6, "o with 2 ranks %.2e, with 4 ranks %.2e", err[0],
          err[1]);
}

DP_TEST(faults, no_name_stands_twice) {
    for (int f = 1; f < DP_NFAULTS; f++)
        for (int o = 1; o < f; o++)
            CHECK(strcmp(dp_faults[f].name, dp_faults[o].name), "%s", dp_faults[f].name);
}

DP_TEST(faults, a_fault_of_some_runs_shows_when_runs_are_repeated) {
    for (size_t i = 0; i < sizeof REPEAT / sizeof *REPEAT; i++)
        for (int bad = 0; bad < 2; bad++) {
            char path[512];
            dp_case c;
            dp_sim s;
            dp_err e = {0};
            snprintf(path, sizeof path, "%s/%s.case", gt_cases(), REPEAT[i].case_name);
            REQUIRE(!dp_case_load(path, &c, &e), "%s", e.msg);
            REQUIRE(!dp_sim_new(&s, &c.p, DP_BASE_FP32, REPEAT[i].ranks,
                                bad ? REPEAT[i].fault : DP_FAULT_NONE, &e),
                    "%s", e.msg);
            uint64_t first[DP_NRESULTS];
            int differ = 0, hits = 0;
            for (int run = 0; run < 3; run++) {
                s.have_forward = s.have_backward = 0; /* everything again */
                dp_sim_run(&s, DP_FP32, DP_EXCHANGE_ALLGATHER, 1);
                for (int f = 0; f < DP_NRESULTS; f++) {
                    int64_t rows, width;
                    dp_result_shape(&c.p, f, &rows, &width);
                    const double *x = s.out.out[f];
                    const uint64_t h =
                        rows && x ? XXH3_64bits(x, sizeof(double) * (size_t)(rows * width)) : 0;
                    if (run)
                        differ += h != first[f];
                    else
                        first[f] = h;
                }
            }
            for (int r = 0; r < s.N * c.p.HV; r++)
                hits += s.hit[r];
            CHECK((differ > 0) == bad, "%s: %d tensors differ between runs",
                  bad ? dp_faults[REPEAT[i].fault].name : "none", differ);
            if (bad && REPEAT[i].fault == DP_FAULT_RACE)
                CHECK(hits == 1 && s.hit[s.N * c.p.HV - 1], "%d places hit", hits);
            dp_sim_free(&s);
            dp_case_free(&c);
        }
}

/* A run records only its own fault. A repeated fault has one place, and no fault of an earlier run
 * remains (a ring has no order of merges). */
DP_TEST(faults, where_a_fault_acted_belongs_to_the_run) {
    static const dp_exchange MERGE[] = {DP_EXCHANGE_ALLGATHER, DP_EXCHANGE_RING,
                                        DP_EXCHANGE_ALLGATHER};
    dp_case c;
    if (!gt_open_case("weak-heads", &c)) return;
    const int n = 4 * c.p.HV;
    for (int f = 1; f < DP_NFAULTS; f += GT_SANITIZED ? 4 : 1) {
        dp_sim s;
        dp_err e = {0};
        unsigned char *first = NULL;
        if (f == DP_FAULT_RACE || f == DP_FAULT_ORDER_BY_RUN) continue;
        REQUIRE(!dp_sim_new(&s, &c.p, DP_BASE_FP32, 4, (dp_fault)f, &e), "%s", e.msg);
        for (int run = 0; run < 3; run++) {
            dp_sim_run(&s, DP_FP32, MERGE[run], 1);
            if (!run) first = memcpy(dp_calloc((size_t)n, 1), s.hit, (size_t)n);
            if (run == 1 && f == DP_FAULT_MERGE_NEAREST_FIRST)
                CHECK(memchr(first, 1, (size_t)n) && !memchr(s.hit, 1, (size_t)n),
                      "a ring's run has the places of the all-gather");
            if (run == 2)
                CHECK(!memcmp(first, s.hit, (size_t)n), "%s: acts elsewhere when it runs again",
                      dp_faults[f].name);
        }
        free(first);
        dp_sim_free(&s);
    }
    dp_case_free(&c);
}
