/* Sessions with states in a pool of slots: slots that are read, written or must keep their bits,
 * faults, libraries and programs. */
#include "harness/case/case.h"
#include "harness/record/run.h"
#include "harness/simulated/calls.h"
#include "ref/chunk/recurrent.h"
#include "runs.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define HEAD "reason = r\nsource = s\n"
#define SMALL "op = kda\nT = 90\ncu_seqlens = 0,50,50,90\nK = 8\nHV = 2\ns0_scale = 0.5\n"

DP_TEST(slots, a_number_of_slots_that_means_nothing_is_refused) {
    static const char *const BAD[][2] = {
        {"session_slots = 4\n", "no such setting"},
        {"session = 8\nsession_slots = 3\n", "session_slots = 3: 3 sequences must have at least 4"},
        {"session = 8\nsession_slots = -1\n", "out of range"},
        {"session = 8\nsession_slots = 1048577\n", "out of range"},
        {"V = 4096\nsession = 8\nsession_slots = 1048576\n", "the pool would hold"}};
    for (size_t i = 0; i < sizeof BAD / sizeof *BAD; i++) {
        char text[512];
        dp_case c;
        dp_err e = {0};
        snprintf(text, sizeof text, HEAD SMALL "%s", BAD[i][0]);
        const dp_status st = dp_case_parse(text, strlen(text), "x.case", 1, &c, &e);
        CHECK(st == DP_EINPUT && strstr(e.msg, BAD[i][1]), "%s: %s", BAD[i][0], e.msg);
        if (!st) dp_case_free(&c);
    }
}

/* ---- who reads and writes what --------------------------------------------------------------- */

/* A recurrence that takes the pool, shows its states or not, and looks at what it is told. */
typedef struct {
    int shows, calls, moved, padded, wrong;
} pooled;

static int64_t state_of(const dp_problem *p) { return (int64_t)p->HV * p->K * p->V; }

static void look(pooled *w, const dp_problem *p, const dp_state_pool *pool) {
    w->calls++;
    for (int i = 0; i < p->Nseq; i++) {
        const int64_t r = pool->read[i], x = pool->write[i];
        w->wrong += (r < 0) != (x < 0) || r >= pool->slots || x >= pool->slots;
        w->moved += r != x;
        w->padded += r < 0 && p->cu[i + 1] > p->cu[i];
        for (int j = 0; j < p->Nseq && x >= 0; j++)
            w->wrong += j != i && (pool->write[j] == x || pool->read[j] == x);
    }
}

/* The state after every token, from the runs of all prefixes. */
static double *states_after(const dp_problem *p, const dp_design *design) {
    double *all = dp_doubles(p->T * state_of(p));
    for (int i = 0; i < p->Nseq; i++)
        for (int64_t t = p->cu[i]; t < p->cu[i + 1]; t++) {
            dp_problem y = *p;
            dp_result r = {0};
            int64_t cu[] = {0, t + 1 - p->cu[i]};
            y.cu = cu;
            y.T = cu[1];
            y.Nseq = 1;
            y.s0 += i * state_of(p);
            for (int f = 0; f <= DP_INPUT_BETA; f++)
                y.in[f] += p->cu[i] * dp_input_width(p, f);
            dp_recurrent_run(&y, design, 0, NULL, &r);
            memcpy(all + t * state_of(p), r.final_state, sizeof *all * (size_t)state_of(p));
            dp_result_free(&r);
        }
    return all;
}

static dp_status in_pool(void *who, const dp_problem *call, const dp_state_pool *pool, int states,
                         dp_call_result *out, dp_err *e) {
    const dp_design design = dp_design_of(DP_BASE_FP32);
    const int64_t n = state_of(call);
    pooled *w = who;
    dp_problem y = *call;
    (void)e;
    look(w, call, pool);
    y.s0 = dp_doubles(call->Nseq * n);
    for (int i = 0; i < call->Nseq; i++)
        if (pool->read[i] >= 0)
            memcpy(y.s0 + i * n, pool->state + pool->read[i] * n, sizeof *y.s0 * (size_t)n);
    dp_recurrent_run(&y, &design, 0, NULL, &out->out);
    if (states && w->shows) out->states = states_after(&y, &design);
    for (int i = 0; i < call->Nseq; i++)
        if (pool->write[i] >= 0)
            memcpy(pool->state + pool->write[i] * n, out->out.final_state + i * n,
                   sizeof *y.s0 * (size_t)n);
    free(y.s0);
    free(out->out.final_state);
    out->out.final_state = NULL;
    return DP_OK;
}

static dp_status without(void *who, const dp_problem *call, int states, dp_call_result *out,
                         dp_err *e) {
    const dp_design design = dp_design_of(DP_BASE_FP32);
    (void)who;
    (void)e;
    (void)states;
    dp_recurrent_run(call, &design, 0, NULL, &out->out);
    return DP_OK;
}

static int same_results(const dp_problem *p, const dp_result *a, const dp_result *b) {
    return !memcmp(a->o, b->o, sizeof *a->o * (size_t)(p->T * p->HV * p->V)) &&
           !memcmp(a->final_state, b->final_state, sizeof *a->o * (size_t)(p->Nseq * state_of(p)));
}

/* A pool changes no bit, with states returned or accepted tokens run again: the bits are those of
 * one call with all tokens. Only the slots to write are written. */
DP_TEST(slots, a_pool_changes_no_bit_of_a_session) {
    static const char *const AS[] = {
        "session = 1\nsession_slots = 4\n", "session = 17,4-0,3-2,5,1\nsession_slots = 9\n",
        "session = 20,4-0,2x1,5-3\nsession_slots = 5\n", "session = 3-0,8-7\nsession_slots = 64\n"};
    const dp_design design = dp_design_of(DP_BASE_FP32);
    for (size_t k = 0; k < sizeof AS / sizeof *AS; k++)
        for (int how = 0; how < 3; how++) { /* how 2: without the pool */
            char text[512];
            dp_case c;
            dp_result want = {0}, got;
            dp_pool_seen seen = {0};
            pooled w = {.shows = how};
            const dp_caller by = {
                .run = without, .who = &w, .pool = &seen, .run_in = how < 2 ? in_pool : NULL};
            snprintf(text, sizeof text, HEAD SMALL "%s", AS[k]);
            if (!gt_parse_case(text, &c)) return;
            dp_recurrent_run(&c.p, &design, 0, NULL, &want);
            REQUIRE(!dp_calls_run(&c.p, &c.session, DP_FAULT_NONE, &by, &got, NULL, NULL), "calls");
            CHECK(same_results(&c.p, &got, &want), "%s, way %d: other bits", AS[k], how);
            CHECK(seen.slots == c.session.slots && !seen.overwritten,
                  "%s, way %d: %lld slots, %lld", AS[k], how, (long long)seen.slots,
                  (long long)seen.overwritten);
            CHECK(how == 2 || (w.calls && w.moved && w.padded && !w.wrong),
                  "%s: %d calls, %d moved, %d padded, %d wrong", AS[k], w.calls, w.moved, w.padded,
                  w.wrong);
            dp_pool_seen_free(&seen);
            dp_result_free(&want);
            dp_result_free(&got);
            dp_case_free(&c);
        }
}

/* All continuations read the slot of the prefix in one call, and none writes it after. */
typedef struct {
    pooled w;
    int shared;
    int64_t prefix, written; /* calls that wrote the slot of the prefix after it was shared */
} sharing;

static dp_status from_prefix(void *who, const dp_problem *call, const dp_state_pool *pool,
                             int states, dp_call_result *out, dp_err *e) {
    sharing *x = who;
    const int all = pool->read[0] >= 0 && pool->read[0] == pool->read[1];
    for (int i = 0; i < call->Nseq && x->shared; i++)
        x->written += pool->write[i] == x->prefix;
    if (all) x->prefix = pool->read[0];
    x->shared += all;
    for (int i = 0; i < call->Nseq && all; i++)
        x->written += pool->write[i] == x->prefix;
    return in_pool(&x->w, call, pool, states, out, e);
}

DP_TEST(slots, the_slot_of_a_prefix_is_read_by_all_and_written_by_none) {
    dp_case c;
    dp_result got;
    sharing x = {.prefix = -1};
    const dp_caller by = {.run = without, .who = &x, .run_in = from_prefix};
    if (!gt_parse_case(HEAD "op = kda\nT = 60\ncu_seqlens = 0,24,60\nK = 8\nsession = 4,4,1\n"
                            "session_prefix = 8\nsession_slots = 3\n",
                       &c))
        return;
    REQUIRE(!dp_calls_run(&c.p, &c.session, DP_FAULT_NONE, &by, &got, NULL, NULL), "calls");
    CHECK(x.shared == 1 && !x.written, "read by all in %d calls, written in %lld", x.shared,
          (long long)x.written);
    dp_result_free(&got);
    dp_case_free(&c);
}

/* ---- verdicts -------------------------------------------------------------------------------- */

#define POOL                                                                              \
    HEAD "op = kda\nT = 60\ncu_seqlens = 0,20,20,38,60\nK = 16\nHV = 2\ng_scale = 0.05\n" \
         "s0_scale = 1\nbase = bf16,fp32,fp64\nsession = 6,4-2,3-0,2,1\nsession_slots = 6\n"

/* pool: it is the slots that show it; else the numbers of the sequences do. */
static const struct {
    dp_fault fault;
    int pool;
} FAULTS[] = {
    {DP_FAULT_PADDING_WRITES, 1}, {DP_FAULT_PADDING_LAST_SLOT, 1}, {DP_FAULT_SLOT_IN_PLACE, 1},
    {DP_FAULT_SLOT_NEIGHBOUR, 0}, {DP_FAULT_SLOT_OF_OTHER, 0},     {DP_FAULT_SLOT_TRANSPOSED, 0},
    {DP_FAULT_SLOT_UNWRITTEN, 0}, {DP_FAULT_REJECTED_STAY, 0},     {DP_FAULT_ROLLBACK_EARLY, 0},
    {DP_FAULT_ROLLBACK_LATE, 0},  {DP_FAULT_PREFIX_OVERWRITTEN, 1}};

DP_TEST(slots, every_fault_is_red_in_a_pool_and_the_right_session_green) {
    for (size_t f = 0; f <= sizeof FAULTS / sizeof *FAULTS; f++) {
        const dp_fault fault = f ? FAULTS[f - 1].fault : DP_FAULT_NONE;
        const int prefix = fault == DP_FAULT_PREFIX_OVERWRITTEN;
        dp_case c;
        dp_runs runs;
        const char *text = prefix ? HEAD "op = kda\nT = 50\ncu_seqlens = 0,20,50\nK = 16\n"
                                         "base = fp32\ng_scale = 0.05\nsession = 8,4,2\n"
                                         "session_prefix = 12\nsession_slots = 4\n"
                                  : POOL;
        if (!gt_judge_case(text, fault, NULL, &c, &runs)) return;
        CHECK(runs.n == (prefix ? 1 : 3), "%d runs", runs.n);
        for (int i = 0; i < runs.n; i++) {
            const dp_run *r = &runs.run[i];
            const dp_judgement *t = gt_tensor(r, "pool");
            REQUIRE(t, "%s: no pool", r->id);
            CHECK(!gt_acted(r) == !f && r->verdict == (f ? DP_FAIL : DP_PASS), "%s: %s, %s", r->id,
                  gt_acted(r) ? "acted" : "did not act", r->why);
            CHECK((t->verdict == DP_FAIL) == (f && FAULTS[f - 1].pool), "%s: %s", r->id, t->why);
            CHECK(t->verdict == DP_PASS || !strncmp(r->why, "pool: slot ", 11), "%s: %s", r->id,
                  r->why);
        }
        dp_runs_free(&runs);
        dp_case_free(&c);
    }
}

/* The solver over LAPACKE has no slots: that nobody judged them is a run that was skipped. */
DP_TEST(slots, a_solver_without_slots_says_so) {
    const dp_run_options o = {.only[DP_ID_BACKEND] = {1, {DP_BACKEND_LAPACK}},
                              .cache = gt_tmpdir()};
    static const char *const SLOTS[] = {"session_slots = 4\n", ""};
    for (int k = 0; k < 2; k++) {
        char text[512];
        dp_case c;
        dp_runs runs = {0};
        dp_err e = {0};
        snprintf(text, sizeof text, HEAD SMALL "base = fp32\nsession = 20,2\n%s", SLOTS[k]);
        if (!gt_parse_case(text, &c)) return;
        REQUIRE(!dp_case_run(&c, &o, &runs, &e), "%s", e.msg);
        CHECK(runs.n == 2 - k && runs.run[0].verdict == DP_PASS, "%d runs", runs.n);
        CHECK(k || (runs.run[1].verdict == DP_SKIPPED && !strncmp(runs.run[1].why, "pool: ", 6) &&
                    strcmp(runs.run[0].id, runs.run[1].id)),
              "%s: %s", runs.run[runs.n - 1].id, runs.run[runs.n - 1].why);
        dp_runs_free(&runs);
        dp_case_free(&c);
    }
}

/* Without a pool there is nothing for them to do. */
DP_TEST(slots, faults_of_slots_do_not_act_without_a_pool) {
    static const dp_fault F[] = {DP_FAULT_SLOT_NEIGHBOUR, DP_FAULT_SLOT_IN_PLACE,
                                 DP_FAULT_PADDING_LAST_SLOT};
    for (int f = 0; f < 3; f++) {
        dp_case c;
        dp_runs runs;
        if (!gt_judge_case(HEAD SMALL "session = 40,8\nbase = fp32\n", F[f], NULL, &c, &runs))
            return;
        CHECK(!gt_acted(&runs.run[0]) && runs.run[0].verdict == DP_PASS &&
                  !gt_tensor(runs.run, "pool"),
              "%s: %s", runs.run[0].id, runs.run[0].why);
        dp_runs_free(&runs);
        dp_case_free(&c);
    }
}

/* ---- libraries and programs ------------------------------------------------------------------ */

#define CALLS                                                                   \
    HEAD "op = kda\nT = 30\ncu_seqlens = 0,10,30\nK = 8\nHV = 2\nbase = fp32\n" \
         "session = 6,4-2,4-0,1\nsession_slots = 4\n"

/* The one takes the pool, the other one, built as ever, initial states. */
DP_TEST(slots, libraries_run_with_a_pool_and_without) {
    static const char *const LIB[][2] = {{"subject/example_subject.c", "pool.so"},
                                         {"subject/example_ranks.c", "no-pool.so"}};
    for (int i = 0; i < 2; i++) {
        dp_subject s;
        dp_case c;
        dp_runs runs;
        dp_err e = {0};
        REQUIRE(!dp_subject_open(gt_library(LIB[i][0], LIB[i][1]), 0, 0, &s, &e), "%s", e.msg);
        if (!gt_judge_case(CALLS, DP_FAULT_NONE, &s, &c, &runs)) return;
        const dp_judgement *t = gt_tensor(&runs.run[0], "pool");
        CHECK(runs.n == 1 && runs.run[0].verdict == DP_PASS, "%s: %s", LIB[i][1], runs.run[0].why);
        CHECK((t == NULL) == i && (!t || t->verdict == DP_PASS), "%s: %s pool", LIB[i][1],
              t ? "a" : "no");
        dp_runs_free(&runs);
        dp_case_free(&c);
        dp_subject_close(&s);
    }
}

DP_TEST(slots, a_library_that_writes_what_is_not_its_own_fails_with_the_slot) {
    static const char *const ROWS[][2] = {
        {"free", "pool: slot 1, which no sequence owns, was overwritten in call 1: entry 63 of "
                 "head 1 was "},
        {"read", "pool: slot 2, which sequence 1 owns, was overwritten in call 1: "},
        {"padding", "pool: slot 3, which "},
        {"batch", "o: 480 of 480 entries are NaN"}};
    dp_subject s;
    dp_err e = {0};
    REQUIRE(!dp_subject_open(gt_library("tests/data/bad_slots.c", "bad-slots.so"), 0, 0, &s, &e),
            "%s", e.msg);
    for (size_t i = 0; i < sizeof ROWS / sizeof *ROWS; i++) {
        dp_case c;
        dp_runs runs;
        setenv("BAD", ROWS[i][0], 1);
        const int ran = gt_judge_case(CALLS, DP_FAULT_NONE, &s, &c, &runs);
        unsetenv("BAD");
        if (!ran) return;
        const dp_run *r = &runs.run[0];
        CHECK(r->verdict == DP_FAIL && !strncmp(r->why, ROWS[i][1], strlen(ROWS[i][1])), "%s: %s",
              ROWS[i][0], r->why);
        const int reads = !strcmp(ROWS[i][0], "batch");
        CHECK(reads ? strstr(r->why, "one was read") != NULL
                    : !strcmp(r->tier, "exact") && r->speaks == r->ntensor - 1,
              "%s: tier %s: %s", ROWS[i][0], r->tier, r->why);
        dp_runs_free(&runs);
        dp_case_free(&c);
    }
    dp_subject_close(&s);
}

#define RINGS                                                                                     \
    HEAD "op = %s\nT = 70\ncu_seqlens = 0,26,44,70\nH = 1\nHV = 2\nK = 16\nV = 16\nbase = fp32\n" \
         "g_scale = 0.02\ns0_scale = 0.5\nsession = 3,2,4x1,3,1\nsession_slots = 5\n"             \
         "session_ring = 5\n%s"

/* Also behind a prefix, whose slot stays while continuations replay their tokens from it. */
DP_TEST(slots, a_library_replays_tokens_from_rings) {
    static const char *const OP[] = {"gdn", "kda"}, *const PREFIX[] = {"", "session_prefix = 7\n"};
    dp_subject s;
    dp_err e = {0};
    REQUIRE(!dp_subject_open(gt_library("tests/data/ring_subject.c", "rings.so"), 0, 0, &s, &e),
            "%s", e.msg);
    for (int i = 0; i < 8; i++) {
        char text[1024];
        dp_case c;
        dp_runs runs;
        snprintf(text, sizeof text, RINGS, OP[i & 1], PREFIX[i / 2 & 1]);
        if (i & 4) setenv("BAD", "late", 1);
        const int ran = gt_judge_case(text, DP_FAULT_NONE, &s, &c, &runs);
        unsetenv("BAD");
        if (!ran) return;
        CHECK(runs.run[0].verdict == (i & 4 ? DP_FAIL : DP_PASS), "%d: %s", i, runs.run[0].why);
        dp_runs_free(&runs);
        dp_case_free(&c);
    }
    dp_subject_close(&s);
}

/* A program that declares `pool` gets pool, read_slot and write_slot as tensors. It fails if it
 * does not write the pool, or writes slots that are not its own. */
DP_TEST(slots, a_program_runs_with_a_pool) {
    static const char *const ASK[][3] = {
        {"", "--writes o,pool", "VERDICT: PASS"},
        {"", "--writes o,final_state", "VERDICT: PASS"},
        {"'pool'", "--writes o,pool", "OUT: tensor pool is missing"},
        {"other shape", "--writes o,pool", "OUT: tensor pool: F32 [4,2,8], must be the floating"},
        {"all slots", "--writes o,pool", "pool: slot "}};
    char path[1024], cmd[4096], out[1 << 14];
    snprintf(path, sizeof path, "%s/slots.case", gt_tmpdir());
    FILE *f = fopen(path, "w");
    REQUIRE(f, "%s", path);
    fputs(CALLS, f);
    fclose(f);
    for (size_t i = 0; i < sizeof ASK / sizeof *ASK; i++) {
        snprintf(cmd, sizeof cmd,
                 "SLOTS=\"%s\" %s run %s --cache '%s' --base fp32 %s --serve \"$DP_PYTHON "
                 "%s/../harness/tests/data/slots_program.py\" 2>&1",
                 ASK[i][0], gt_program(), path, gt_tmpdir(), ASK[i][1], gt_cases());
        const int rc = gt_run(cmd, out, sizeof out);
        CHECK(rc == (i > 1) && strstr(out, ASK[i][2]), "%s: status %d: %s", ASK[i][0], rc, out);
    }
}
