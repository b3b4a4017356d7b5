/* bisect: every fault is found in its stage, rank and head; without faults every stage keeps to its
 * bound. */
#include "cases.h"
#include "harness/search/bisect.h"
#include "ref/vocabulary/text.h"
#include "sanitized.h"

#include <omp.h>
#include <stdio.h>
#include <string.h>

typedef struct {
    dp_fault fault;
    const char *case_name;
    int ranks;
    dp_base base;
    dp_format chain;
    const char *tensor;
} found;
/* One of several: "intra_bwd/gate_bwd". */
static int lives_in(dp_fault f, const char *stage) {
    return dp_is_listed(stage, dp_faults[f].stage, '/');
}

static const found STAGE[] = {
    {DP_FAULT_MERGE_NEAREST_FIRST, "weak-heads", 4, DP_BASE_BF16, DP_BF16ST, "S_in"},
    {DP_FAULT_BEFORE_FIRST, "museum/halo", 4, DP_BASE_FP32, DP_FP32, "q"},
    {DP_FAULT_BEFORE_PACKED, "museum/halo", 2, DP_BASE_FP32, DP_FP32, "q"},
    {DP_FAULT_BEFORE_GRAD_LOST, "museum/halo", 2, DP_BASE_FP32, DP_FP32, "dk"},
    {DP_FAULT_FWD_FIRST_SUBSEQ, "packed-across", 4, DP_BASE_FP32, DP_FP32, "M"},
    {DP_FAULT_BWD_LAST_SUBSEQ, "packed-across", 4, DP_BASE_FP32, DP_FP32, "dM"},
    {DP_FAULT_DECAY_BEFORE_USE, "weak-heads", 3, DP_BASE_BF16, DP_FP32, "v_new"},
    {DP_FAULT_GATE_OF_HEAD0, "weak-heads", 4, DP_BASE_BF16, DP_FP32, "dH"},
    {DP_FAULT_LAST_INDEX, "weak-heads", 3, DP_BASE_FP32, DP_FP32, "kg"},
    {DP_FAULT_TAIL_UNMASKED, "packed-inside", 2, DP_BASE_FP32, DP_FP32, "eC"},
    {DP_FAULT_CHAIN_BF16, "kda-reflect", 4, DP_BASE_FP32, DP_FP32, "M"},
    {DP_FAULT_CHAIN_TF32RZ, "kda-reflect", 4, DP_BASE_FP64, DP_FP32, "M"},
    {DP_FAULT_STATE_LOST, "weak-heads", 3, DP_BASE_BF16, DP_FP32, "h"},
    {DP_FAULT_STATE_LATE, "packed-across", 4, DP_BASE_FP32, DP_FP32, "h"},
    {DP_FAULT_MERGE_HALF_V, "weak-heads", 2, DP_BASE_BF16, DP_FP32, "S_in"},
    {DP_FAULT_STATE_TRANSPOSED, "weak-heads", 2, DP_BASE_BF16, DP_FP32, "S_in"},
    {DP_FAULT_EXP2_GATE, "weak-heads", 1, DP_BASE_FP32, DP_FP32, "g"},
    {DP_FAULT_MERGE_SCALED, "weak-heads", 4, DP_BASE_FP32, DP_FP32, "S_in"},
    {DP_FAULT_GATE_GRAD_PARTIAL, "smoke-kda", 4, DP_BASE_BF16, DP_FP32, "dA_log"},
    {DP_FAULT_DG_NO_BOUNDARY, "weak-heads", 2, DP_BASE_FP32, DP_FP32, "dg"},
    {DP_FAULT_GATE_NO_OFFSET, "weak-heads", 4, DP_BASE_FP32, DP_FP32, "dH"},
    {DP_FAULT_MERGE_TF32RZ, "kda-reflect", 4, DP_BASE_FP32, DP_FP32, "S_in"},
    {DP_FAULT_CU_DIVIDED, "packed-inside", 4, DP_BASE_FP32, DP_FP32, "chunks"},
    {DP_FAULT_ZIGZAG, "weak-heads", 4, DP_BASE_BF16, DP_FP32, "q"},
    {DP_FAULT_LINEAR_GATE, "weak-heads", 3, DP_BASE_FP32, DP_FP32, "g"},
    {DP_FAULT_NEUMANN_INVERSE, "kda-corr", 1, DP_BASE_FP32, DP_FP32, "Akk"},
    {DP_FAULT_DOUBLING_INVERSE, "kda-corr", 1, DP_BASE_BF16, DP_FP32, "Akk"},
    {DP_FAULT_FACTORED_EXP, "lower-bound", 2, DP_BASE_FP32, DP_FP32, "L"},
    {DP_FAULT_FACTORED_EXP_CLAMPED, "lower-bound-wide", 2, DP_BASE_FP32, DP_FP32, "L"},
    {DP_FAULT_STALE_LANES, "weak-heads", 3, DP_BASE_FP32, DP_FP32, "dbeta"},
    {DP_FAULT_HALF_CHUNK, "weak-heads", 3, DP_BASE_FP32, DP_FP32, "dbeta"},
    {DP_FAULT_OFFSET_WRAPS, "weak-heads", 3, DP_BASE_BF16, DP_FP32, "u"},
    {DP_FAULT_GRID_AXIS, "weak-heads", 2, DP_BASE_FP32, DP_FP32, "o"},
    {DP_FAULT_STALE_ACCUMULATOR, "no-decay", 2, DP_BASE_FP32, DP_FP32, "dbeta"},
    {DP_FAULT_DIAGONAL_TF32, "smoke-kda", 2, DP_BASE_FP32, DP_FP32, "dg"},
    {DP_FAULT_L2_ROUNDED, "smoke-kda", 2, DP_BASE_FP32, DP_FP32, "dq"},
    {DP_FAULT_DECAY_BF16, "weak-heads", 3, DP_BASE_FP32, DP_FP32, "g"},
    {DP_FAULT_RACE, "weak-heads", 3, DP_BASE_FP32, DP_FP32, "v_new"},
    {DP_FAULT_ORDER_BY_RUN, "weak-heads", 3, DP_BASE_FP32, DP_FP32, "dq"},
    {DP_FAULT_STATE_BF16, "weak-heads", 3, DP_BASE_FP32, DP_FP32, "h"},
    {DP_FAULT_DROP_CHANNEL_SUM, "dropped-moved", 2, DP_BASE_FP32, DP_FP32, "h"},
    {DP_FAULT_DROP_HORIZON, "dropped-gdn", 2, DP_BASE_FP32, DP_FP32, "h"},
    {DP_FAULT_ANCHOR_LEAK, "lower-bound", 2, DP_BASE_FP32, DP_FP32, "L"},
    {DP_FAULT_KEYS_NORMED, "key-norms", 2, DP_BASE_BF16, DP_FP32, "k"},
    {DP_FAULT_GATE_BF16, "smoke-kda", 2, DP_BASE_FP32, DP_FP32, "g"},
    {DP_FAULT_BETA_BF16, "smoke-kda", 2, DP_BASE_FP32, DP_FP32, "beta"},
    {DP_FAULT_SHORT_NAN, "t63", 1, DP_BASE_BF16, DP_FP32, "Aqk"},
    {DP_FAULT_BLOCKS_NAN, "weak-heads", 1, DP_BASE_BF16, DP_FP32, "Aqk"},
    {DP_FAULT_STRIDE_IGNORED, "weak-heads", 2, DP_BASE_BF16, DP_FP32, "u"},
    {DP_FAULT_CONTEXT_LOST, "weak-heads", 2, DP_BASE_BF16, DP_FP32, "S_in"},
    {DP_FAULT_RESIDUAL_BF16, "weak-heads", 2, DP_BASE_FP32, DP_FP32, "v_new"},
    {DP_FAULT_STATE_FP16, "weak-heads", 2, DP_BASE_FP32, DP_FP32, "h"},
    {DP_FAULT_OUTPUT_FP16, "weak-heads", 2, DP_BASE_FP32, DP_FP32, "o"},
    {DP_FAULT_DBETA_DIVIDED, "beta-zero", 2, DP_BASE_BF16, DP_FP32, "dbeta"},
    {DP_FAULT_SATURATED_NAN, "gate-saturated", 2, DP_BASE_FP32, DP_FP32, "dg"},
    {DP_FAULT_ERASE_MEAN, "smoke-gdn2", 2, DP_BASE_BF16, DP_FP32, "erase k"},
    {DP_FAULT_ERASE_WRITES, "smoke-gdn2", 2, DP_BASE_BF16, DP_FP32, "kg"},
    {DP_FAULT_DK_UNERASED, "smoke-gdn2", 2, DP_BASE_FP32, DP_FP32, "dk"},
    {DP_FAULT_READ_DECAYED, "smoke-dplr", 2, DP_BASE_BF16, DP_FP32, "-lr_a / decay"},
    {DP_FAULT_READ_UNDECAYED, "undecayed-kda", 1, DP_BASE_BF16, DP_FP32, "L"},
    {DP_FAULT_EXP2_GATE, "smoke-dplr", 2, DP_BASE_FP32, DP_FP32, "g"},
    {DP_FAULT_LAST_INDEX, "dplr-weak", 2, DP_BASE_BF16, DP_FP32, "kg"},
    {DP_FAULT_MERGE_SCALED, "dplr-weak", 3, DP_BASE_FP32, DP_FP32, "S_in"},
    {DP_FAULT_DECAY_BEFORE_USE, "dplr-weak", 3, DP_BASE_BF16, DP_FP32, "v_new"},
    {DP_FAULT_GATE_NO_OFFSET, "dplr-weak", 2, DP_BASE_FP32, DP_FP32, "dH"},
    {DP_FAULT_DG_NO_BOUNDARY, "dplr-weak", 2, DP_BASE_FP32, DP_FP32, "dg"},
    {DP_FAULT_GATE_GRAD_PARTIAL, "smoke-dplr", 4, DP_BASE_BF16, DP_FP32, "dA_log"},
    {DP_FAULT_TURNS_MISTAKEN, "smoke-deltaproduct", 2, DP_BASE_BF16, DP_FP32, "L"},
    {DP_FAULT_TURNS_MISTAKEN, "smoke-mkda2", 3, DP_BASE_FP32, DP_FP32, "L"},
    {DP_FAULT_SCAN_MISSES_LEVEL, "exchange-kda", 4, DP_BASE_BF16, DP_FP32, "S_in"},
    {DP_FAULT_SCAN_SWAPPED, "exchange-packed", 6, DP_BASE_FP32, DP_FP32, "S_in"},
    {DP_FAULT_SERIAL_LATE, "exchange-kda", 4, DP_BASE_BF16, DP_FP32, "S_in"},
    {DP_FAULT_HEADS_SWAPPED, "exchange-packed", 3, DP_BASE_FP32, DP_FP32, "o"},
    {DP_FAULT_PAYLOAD_LOW_LOST, "exchange-kda", 4, DP_BASE_BF16, DP_FP32, "S_in"},
    {DP_FAULT_PAYLOAD_TWICE, "exchange-slow", 4, DP_BASE_FP32, DP_FP32, "S_in"},
    {DP_FAULT_RANK_LARGEST, "exchange-slow", 4, DP_BASE_BF16, DP_FP32, "S_in"},
    {DP_FAULT_PARTS_BY_RANK, "weak-heads", 3, DP_BASE_FP32, DP_FP32, "S_in"},
    {DP_FAULT_PART_FIRST_M, "weak-heads", 2, DP_BASE_BF16, DP_FP32, "S_in"},
};

/* Cases where ranks have another ownership of tokens. */
static const struct {
    dp_own own;
    found x;
} OWNED[] = {
    {DP_OWN_CYCLIC, {DP_FAULT_PARTS_BY_RANK, "weak-heads", 3, DP_BASE_BF16, DP_FP32, "S_in"}},
    {DP_OWN_UNEVEN, {DP_FAULT_MERGE_SCALED, "weak-heads", 4, DP_BASE_FP32, DP_FP32, "S_in"}},
    {DP_OWN_GRID, {DP_FAULT_GATE_NO_OFFSET, "weak-heads", 3, DP_BASE_FP32, DP_FP32, "dH"}},
    {DP_OWN_EMPTY, {DP_FAULT_LAST_INDEX, "weak-heads", 3, DP_BASE_FP32, DP_FP32, "kg"}},
};

/* Was the fault marked there in some run? */
static int acts(const dp_problem *p, const dp_sim_policy *how, const dp_place *at) {
    dp_sim s;
    dp_err e = {0};
    int any = at->rank < 0 || how->fault == DP_FAULT_CU_DIVIDED ||
              how->fault == DP_FAULT_ORDER_BY_RUN; /* a sum over ranks; cuts; nothing to mark */
    if (dp_sim_new(&s, p, how->base, how->N, how->fault, &e)) return 0;
    for (int k = 0; k < 3; k++)
        dp_sim_run(&s, how->chain, how->merge, how->backward);
    for (int hv = 0; !any && hv < p->HV;
         hv++) /* q, k and their gradients have heads of their own */
        any = s.hit[at->rank * p->HV + hv] &&
              (at->head == hv || (p->H != p->HV && at->head == hv / (p->HV / p->H)));
    dp_sim_free(&s);
    return any;
}

static void check_found(const found *f, dp_own own) {
    const char *name = dp_faults[f->fault].name;
    dp_case c;
    dp_bisect b;
    dp_err e = {0};
    if (!gt_open_case(f->case_name, &c)) return;
    dp_sim_policy how = {f->ranks, f->base,    f->chain,       c.merge[0],
                         f->fault, c.backward, DP_PAYLOAD_FULL};
    const dp_problem p = dp_bisect_owned(&c.p, dp_fault_own(f->fault, own), f->ranks, &how.N);
    if (dp_bisect_sim(&p, &how, dp_fault_by_run(f->fault) ? DP_BISECT_RUNS : 1, 0, &b, &e))
        gt_fail(__FILE__, __LINE__, name, "%s", e.msg);
    else if (b.first < 0)
        gt_fail(__FILE__, __LINE__, name, "on %s: no stage is wrong", c.name);
    else {
        const dp_bisect_row *x = &b.stage[b.first];
        CHECK(lives_in(f->fault, dp_stage_names[b.first]), "%s on %s: found in %s, lives in %s",
              name, c.name, dp_stage_names[b.first], dp_faults[f->fault].stage);
        CHECK(!strcmp(x->tensor, f->tensor), "%s on %s: %s, not %s", name, c.name, x->tensor,
              f->tensor);
        CHECK(acts(&p, &how, &x->first.at),
              "%s on %s: reported at rank %d head %d, where it does not act", name, c.name,
              x->first.at.rank, x->first.at.head);
    }
    dp_bisect_free(&b);
    dp_case_free(&c);
}

DP_TEST(bisect, every_fault_is_found_in_its_stage_and_where_it_acts) {
    const int threads = omp_get_max_threads();
    omp_set_num_threads(1); /* thousands of loops of microseconds each */
    for (size_t i = 0; i < sizeof STAGE / sizeof *STAGE; i += GT_SANITIZED ? 8 : 1)
        check_found(&STAGE[i], DP_OWN_EVEN);
    for (size_t i = 0; i < sizeof OWNED / sizeof *OWNED; i++)
        check_found(&OWNED[i].x, OWNED[i].own);
    omp_set_num_threads(threads);
}

DP_TEST(bisect, every_fault_of_the_pipeline_is_tested) {
    for (int f = 1; f < DP_NFAULTS; f++) {
        int n = !strncmp(dp_faults[f].stage, "conv_", 5); /* test_step.c */
        n += dp_fault_of_calls((dp_fault)f);              /* test_session.c */
        n += f == DP_FAULT_PAYLOAD_TRUNCATED;             /* within every bound, below */
        for (size_t i = 0; i < sizeof STAGE / sizeof *STAGE; i++)
            n += (int)STAGE[i].fault == f;
        CHECK(n > 0, "%s", dp_faults[f].name);
    }
}

DP_TEST(bisect, no_stage_is_blamed_without_a_fault) {
    static const char *const NAME[] = {"weak-heads",
                                       "packed-across",
                                       "packed-ones",
                                       "smoke-gdn",
                                       "smoke-mkda4",
                                       "kda-reflect",
                                       "lower-bound-wide",
                                       "gate-minus-inf",
                                       "denormal",
                                       "gdn2-packed",
                                       "smoke-ssd",
                                       "initial-state",
                                       "negative-eigenvalues",
                                       "inf",
                                       "nan",
                                       "smoke-deltaproduct",
                                       "smoke-dplr",
                                       "dplr-weak",
                                       "dplr-strong",
                                       "museum/halo"};
    static const dp_format CHAIN[] = {DP_FP64, DP_TF32RZ, DP_BF16ST};
    static const dp_payload PAYLOAD[] = {DP_PAYLOAD_FULL, DP_PAYLOAD_BF16X2, DP_PAYLOAD_LESS_I,
                                         DP_PAYLOAD_LOW_RANK, DP_PAYLOAD_BF16};
    static const dp_exchange MERGE[] = {DP_EXCHANGE_ALLGATHER, DP_EXCHANGE_RING, DP_EXCHANGE_SCAN,
                                        DP_EXCHANGE_SERIAL};
    const int threads = omp_get_max_threads();
    omp_set_num_threads(1);
    for (size_t i = 0; i < sizeof NAME / sizeof *NAME; i++) {
        dp_case c;
        if (GT_SANITIZED && i % 4 != 2) continue; /* packed-ones, lower-bound-wide, initial-state */
        if (!gt_open_case(NAME[i], &c)) continue;
        for (int base = 0; base < DP_NBASES; base++) {
            dp_bisect b;
            dp_err e = {0};
            dp_sim_policy how = {c.ranks[c.nranks - 1],          base,          CHAIN[base],
                                 MERGE[(i + (size_t)base) % 4],  DP_FAULT_NONE, c.backward,
                                 PAYLOAD[(i + (size_t)base) % 5]};
            REQUIRE(!dp_bisect_sim(&c.p, &how, 1, 1, &b, &e), "%s", e.msg);
            const int pairs = dp_exchanges[how.merge].pairs;
            how.merge = DP_EXCHANGE_ALLGATHER;
            for (int s = 0; s < DP_NSTAGES; s++) {
                const dp_bisect_row *x = &b.stage[s];
                CHECK(!x->fails,
                      "%s, base %s: %s: %s is at %.3g of its bound (rank %d, head %d, token %lld)",
                      c.name, dp_base_names[base], dp_stage_names[s], x->tensor, x->ratio,
                      x->first.at.rank, x->first.at.head, (long long)x->first.at.token);
                CHECK(x->judged || s == DP_STAGE_SOLVE ||
                          (c.ranks[c.nranks - 1] == 1 &&
                           (s == DP_STAGE_PRE_FWD || s == DP_STAGE_MERGE_FWD ||
                            s == DP_STAGE_PRE_BWD || s == DP_STAGE_MERGE_BWD)) ||
                          (!pairs && (s == DP_STAGE_PRE_FWD || s == DP_STAGE_PRE_BWD)) ||
                          (!c.backward && s >= DP_STAGE_RECOMPUTE),
                      "%s: nothing was judged in %s", c.name, dp_stage_names[s]);
            }
            const int draws = !strcmp(c.name, "packed-across") || !strcmp(c.name, "smoke-gdn") ||
                              !strcmp(c.name, "denormal") || !strcmp(c.name, "nan");
            if (draws) REQUIRE(!dp_bisect_expected(&c.p, &how, c.input_dtype, &b, &e), "%s", e.msg);
            CHECK(b.first < 0, "%s, base %s: %s %s is %.3g times what is expected", c.name,
                  dp_base_names[base], dp_stage_names[b.first], b.stage[b.first].tensor,
                  b.stage[b.first].ratio);
            dp_bisect_free(&b);
        }
        dp_case_free(&c);
    }
    omp_set_num_threads(threads);
}

/* Within every bound, and more than the formats make of such inputs: found by draws of single
 * stages. */
DP_TEST(bisect, a_fault_within_every_bound_is_found_by_draws) {
    static const struct {
        dp_fault fault;
        const char *name;
        dp_base base;
        int ranks;
        const char *stage;
    } F[] = {{DP_FAULT_NEUMANN_INVERSE, "negative-eigenvalues", DP_BASE_FP32, 4, "solve"},
             {DP_FAULT_DECAY_BEFORE_USE, "segments", DP_BASE_BF16, 3, "state_fwd"},
             {DP_FAULT_PAYLOAD_TRUNCATED, "exchange-slow", DP_BASE_FP32, 4, "merge_fwd"}};
    for (size_t i = 0; i < sizeof F / sizeof *F; i++) {
        dp_case c;
        dp_bisect b;
        dp_err e = {0};
        if (!gt_open_case(F[i].name, &c)) continue;
        const dp_sim_policy how = {F[i].ranks, F[i].base, DP_FP32,        DP_EXCHANGE_ALLGATHER,
                                   F[i].fault, 0,         DP_PAYLOAD_FULL};
        REQUIRE(!dp_bisect_sim(&c.p, &how, 1, 1, &b, &e), "%s", e.msg);
        CHECK(b.first < 0, "%s: %s is over its bound", c.name, dp_stage_names[b.first]);
        REQUIRE(!dp_bisect_expected(&c.p, &how, c.input_dtype, &b, &e), "%s", e.msg);
        CHECK(b.first >= 0 && !strcmp(dp_stage_names[b.first], F[i].stage) &&
                  b.stage[b.first].expected,
              "%s: %s", c.name, b.first >= 0 ? dp_stage_names[b.first] : "no stage");
        dp_bisect_free(&b);
        dp_case_free(&c);
    }
}

/* Later stages run on true inputs, not on what the faulty stage left: they are not blamed. */
DP_TEST(bisect, one_fault_one_wrong_stage) {
    static const dp_fault F[] = {DP_FAULT_EXP2_GATE, DP_FAULT_LAST_INDEX, DP_FAULT_MERGE_SCALED,
                                 DP_FAULT_GATE_OF_HEAD0, DP_FAULT_HALF_CHUNK};
    dp_case c;
    if (!gt_open_case("weak-heads", &c)) return;
    const int threads = omp_get_max_threads();
    omp_set_num_threads(1);
    for (size_t i = 0; i < sizeof F / sizeof *F; i++) {
        dp_bisect b;
        dp_err e = {0};
        const dp_sim_policy how = {4, DP_BASE_FP32,   DP_FP32, DP_EXCHANGE_ALLGATHER, F[i],
                                   1, DP_PAYLOAD_FULL};
        REQUIRE(!dp_bisect_sim(&c.p, &how, 1, 1, &b, &e), "%s", e.msg);
        for (int s = 0; s < DP_NSTAGES; s++) {
            const int here = lives_in(F[i], dp_stage_names[s]),
                      with = F[i] == DP_FAULT_HALF_CHUNK &&
                             s == DP_STAGE_INTRA_BWD; /* damages dk too */
            CHECK(with || !b.stage[s].fails == !here, "%s: %s %s at %.3g of its bound",
                  dp_faults[F[i]].name, dp_stage_names[s], b.stage[s].tensor, b.stage[s].ratio);
        }
        dp_bisect_free(&b);
    }
    omp_set_num_threads(threads);
    dp_case_free(&c);
}
