/* Sessions. Schedules are read or refused. Each call gets the tokens of its schedule and the state
 * of the call before. Right sessions pass; every fault of calls fails at several schedules and
 * sizes. Libraries run in calls. */
#include "harness/run/judge.h"
#include "harness/simulated/calls.h"
#include "ref/chunk/recurrent.h"
#include "runs.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define HEAD "reason = r\nsource = s\n"
#define SMALL "op = kda\nT = 90\ncu_seqlens = 0,50,50,90\nK = 8\nHV = 2\ns0_scale = 0.5\n"

/* ---- schedules ------------------------------------------------------------------------------- */

DP_TEST(session, what_is_no_schedule_is_refused_with_its_key) {
    static const char *const BAD[][2] = {
        {"op = kda\nT = 8\nK = 4\nsession = 4,\n", "'' is no call"},
        {"op = kda\nT = 8\nK = 4\nsession = 4-4,4\n", "'4-4' is no call"},
        {"op = kda\nT = 8\nK = 4\nsession = 4--1\n", "'4--1' is no call"},
        {"op = kda\nT = 8\nK = 4\nsession = 0x4\n", "'0x4' is no call"},
        {"op = kda\nT = 8\nK = 4\nsession = 0\n", "'0' is no call"},
        {"op = kda\nT = 8\nK = 4\nsession = 2x\n", "'2x' is no call"},
        {"op = kda\nT = 8\nK = 4\nsession = 1,65536x1\n", "more than 65536 calls"},
        {"op = kda\nT = 8\nK = 4\nsession = 1025-1\n", "a window has at most 1024 tokens"},
        {"op = kda\nT = 8\nK = 4\nsession = 4,4,1\n", "no token is left for call 3 of 3"},
        {"op = kda\nT = 8\nK = 4\nsession = 4,3-0\n", "4 of 8 tokens are left"},
        {"op = kda\nT = 8\nK = 4\nsession = 4\nranks = 2\n", "run on one rank"},
        {"op = kda\nT = 8\nK = 4\nsession = 4\nbackward = yes\n", "no gradients"},
        {"op = kda\nT = 8\nK = 4\nsession = 4\nmerge = allgather,ring\n", "merges nothing"},
        {"op = kda\nT = 8\nK = 4\nsession_state = bf16\n", "no such setting"},
        {"op = kda\nT = 8\ncu_seqlens = 0,4,8\nK = 4\nsession = 2\nsession_prefix = 2\n"
         "session_stagger = 1\n",
         "beside session_prefix: all wait there"},
        {"op = kda\nT = 8\nK = 4\nsession = 2\nsession_prefix = 4\n", "shares it with none"},
        {"op = kda\nT = 8\ncu_seqlens = 0,4,8\nK = 4\nsession = 2\nsession_prefix = 4\n",
         "sequence 0 has 4 tokens, and must go on behind it"},
        {"op = kda\nT = 8\ncu_seqlens = 0,4,8\nK = 4\nsession = 2\nsession_prefix = 3\n",
         "no call ends behind token 3"},
        {"op = step\nT = 8\nK = 4\nW = 2\nsession = 4\nbackward = yes\n", "no gradients"},
        {"op = step\nT = 8\nK = 4\nsession = 4\n", "W: missing"},
        {"op = chain\nregime = corr\nK = 4\nchunks = 9\nsession = 4\n", "no such setting"},
        {"op = conv\nT = 8\nD = 4\nW = 2\nsession = 4\n", "no such setting"}};
    for (size_t i = 0; i < sizeof BAD / sizeof *BAD; i++) {
        char text[512];
        dp_case c;
        dp_err e = {0};
        snprintf(text, sizeof text, HEAD "%s", BAD[i][0]);
        const dp_status st = dp_case_parse(text, strlen(text), "x.case", 1, &c, &e);
        CHECK(st == DP_EINPUT && strstr(e.msg, BAD[i][1]), "%s: %s", BAD[i][0], e.msg);
        if (!st) dp_case_free(&c);
    }
}

DP_TEST(session, a_schedule_says_where_calls_begin) {
    static const unsigned char FIRST[20] = {1, 0, 0, 0, 1, 0, 1, 0, 1, 0, 1, 1, 0, 0, 0, 1};
    const int64_t cu[] = {0, 11, 11, 17};
    unsigned char first[20] = {0};
    dp_session s;
    dp_err e = {0};
    REQUIRE(!dp_session_parse("4, 3-0 ,5-2,2x2,1", &s, &e), "%s", e.msg);
    dp_session_firsts(&s, cu, 3, first);
    CHECK(!memcmp(first, FIRST, 17), "calls begin elsewhere");
    CHECK(s.n == 6 && s.rolls_back && dp_session_call_of(&s, 3, NULL) == 0 &&
              dp_session_call_of(&s, 4, NULL) == 2 && dp_session_call_of(&s, 10, NULL) == 5,
          "%d calls", s.n);
    CHECK(!dp_session_fits(&s, cu, 3, &e), "%s", e.msg);
    dp_session_free(&s);
}

/* ---- calls ----------------------------------------------------------------------------------- */

/* The recurrence token by token, which shows its states or not, and what it was called with. */
typedef struct {
    const dp_problem *all;
    int shows, calls, wrong, drafts, alike;
    int64_t at[3]; /* of each sequence: the token that comes next */
} watch;

/* Token t of a as token z of b: 1: what it writes is the same, by key and value. */
static int same_token(const dp_problem *a, int64_t t, const dp_problem *b, int64_t z) {
    for (int i = DP_INPUT_K; i <= DP_INPUT_V; i++) {
        const int64_t n = dp_input_width(a, i);
        if (memcmp(dp_input_of(a, i) + t * n, dp_input_of(b, i) + z * n, sizeof(double) * n))
            return 0;
    }
    return 1;
}

/* States after every token: what is left of the call's problem behind each. */
static double *states_of(const dp_problem *p, const dp_design *design) {
    const int64_t n = (int64_t)p->HV * p->K * p->V;
    double *all = dp_doubles(p->T * n);
    for (int i = 0; i < p->Nseq; i++)
        for (int64_t t = p->cu[i]; t < p->cu[i + 1]; t++) {
            dp_result r = {0};
            dp_problem y = *p;
            int64_t *cu = dp_calloc((size_t)p->Nseq + 1, sizeof *cu);
            for (int j = i; j < p->Nseq; j++)
                cu[j + 1] = t + 1 - p->cu[i];
            y.cu = cu;
            y.T = cu[p->Nseq];
            for (int f = 0; f <= DP_INPUT_BETA; f++)
                y.in[f] += p->cu[i] * dp_input_width(p, f);
            dp_recurrent_run(&y, design, 0, NULL, &r);
            memcpy(all + t * n, r.final_state + i * n, sizeof *all * n);
            dp_result_free(&r);
            free(cu);
        }
    return all;
}

static dp_status watched(void *who, const dp_problem *call, int states, dp_call_result *out,
                         dp_err *e) {
    const dp_design design = dp_design_of(DP_BASE_FP32);
    watch *w = who;
    (void)e;
    dp_recurrent_run(call, &design, 0, NULL, &out->out);
    if (states && w->shows) out->states = states_of(call, &design);
    w->calls++;
    return DP_OK;
}

static dp_session schedule(const char *text, dp_format kept) {
    dp_session s = {0};
    dp_err e = {0};
    if (dp_session_parse(text, &s, &e)) gt_fail(__FILE__, __LINE__, text, "%s", e.msg);
    s.kept = kept;
    return s;
}

static int same_results(const dp_problem *p, const dp_result *a, const dp_result *b) {
    const size_t o = sizeof(double) * (size_t)(p->T * p->HV * p->V),
                 S = sizeof(double) * (size_t)((int64_t)p->Nseq * p->HV * p->K * p->V);
    return !memcmp(a->o, b->o, o) && !memcmp(a->final_state, b->final_state, S);
}

static const char *const SCHEDULES[] = {
    "64,1",          "17,5,1", "1",         "3x7,2-1,4-0,8-7,5",  "5-2",
    "8-3,3-0,2x1,4", "90",     "50-49,1,1", "7-0,20,2-0,2-0,6-5", "2-0,1"};

/* A recurrence does not round between calls. So its bits are those of one call with all tokens,
 * whether states after accepted tokens are returned or computed again. */
DP_TEST(session, a_recurrence_in_calls_has_the_bits_of_all_tokens_at_once) {
    const dp_design design = dp_design_of(DP_BASE_FP32);
    dp_case c;
    if (!gt_parse_case(HEAD SMALL "backward = no\n", &c)) return;
    dp_result want = {0};
    dp_recurrent_run(&c.p, &design, 0, NULL, &want);
    for (size_t i = 0; i < sizeof SCHEDULES / sizeof *SCHEDULES; i++)
        for (int how = 0; how < 6; how++) {
            dp_session s = schedule(SCHEDULES[i], DP_FP64);
            watch w = {.shows = how % 2};
            dp_result got;
            const dp_caller by = {.run = watched, .who = &w};
            s.stagger = how / 2; /* sequences that begin later: the same bits */
            REQUIRE(!dp_calls_run(&c.p, &s, DP_FAULT_NONE, &by, &got, NULL, NULL), "%s", s.text);
            CHECK(same_results(&c.p, &got, &want), "session %s by %d, states %s: other bits",
                  s.text, (int)s.stagger, w.shows ? "shown" : "computed again");
            dp_result_free(&got);
            dp_session_free(&s);
        }
    dp_result_free(&want);
    dp_case_free(&c);
}

/* The chunk pipeline in calls has, in every base, the bits of a pipeline whose chunks begin anew
 * where calls do. The bounds are made of the latter. */
static dp_status piped(void *who, const dp_problem *call, int states, dp_call_result *out,
                       dp_err *e) {
    dp_sim s;
    (void)states;
    const dp_status st = dp_sim_new(&s, call, *(const dp_base *)who, 1, DP_FAULT_NONE, e);
    if (!st) dp_calls_of_sim(&s, out);
    return st;
}

DP_TEST(session, the_pipeline_of_the_bounds_has_the_bits_of_the_calls) {
    static const char *const OPS[] = {
        "op = kda\nH = 2\nHV = 4\nK = 16\nV = 8\ngate = softplus\nbeta = sigmoid\nl2norm = yes\n",
        "op = gdn\nK = 8\nV = 24\ns0_scale = 1\n", "op = mkda\nR = 2\nK = 16\nbeta_hi = 0.5\n"};
    for (int k = 0; k < 3; k++)
        for (size_t i = 0; i < sizeof SCHEDULES / sizeof *SCHEDULES; i++)
            for (dp_base b = 0; b < DP_NBASES; b++) {
                char text[512];
                dp_case c;
                dp_sim ref;
                dp_result got;
                dp_session s = schedule(SCHEDULES[i], DP_FP64);
                const dp_caller by = {.run = piped, .who = &b};
                const dp_design design = dp_design_of(b);
                snprintf(text, sizeof text,
                         HEAD "T = 180\ncu_seqlens = 0,100,100,180\nbackward = no\n%s", OPS[k]);
                if (!gt_parse_case(text, &c)) return;
                unsigned char *first = dp_calloc((size_t)c.p.T, 1);
                const dp_sim_options calls = {.first_of_call = first};
                dp_session_firsts(&s, c.p.cu, c.p.Nseq, first);
                REQUIRE(!dp_sim_open(&ref, &c.p, &design, 1, &calls, NULL), "ref");
                dp_sim_run(&ref, DP_FP32, DP_EXCHANGE_ALLGATHER, 0);
                REQUIRE(!dp_calls_run(&c.p, &s, DP_FAULT_NONE, &by, &got, NULL, NULL), "calls");
                CHECK(same_results(&c.p, &got, &ref.out), "%s, session %s, base %s: other bits",
                      c.op_name, s.text, dp_base_names[b]);
                dp_result_free(&got);
                dp_sim_free(&ref);
                dp_session_free(&s);
                dp_case_free(&c);
                free(first);
            }
}

/* The first token of each sequence counts, those behind it are drafted in vain. */
static dp_status noted(void *who, const dp_problem *call, int states, dp_call_result *out,
                       dp_err *e) {
    watch *w = who;
    for (int i = 0; i < call->Nseq; i++) {
        const int64_t n = call->cu[i + 1] - call->cu[i];
        for (int64_t j = 0; j < n; j++) {
            const int64_t right = w->at[i] + j;
            const int same =
                right < w->all->cu[i + 1] && same_token(w->all, right, call, call->cu[i] + j);
            w->wrong += !j && !same;
            w->drafts += j > 0;
            w->alike += j > 0 && same;
        }
        w->at[i] += n > 0;
    }
    return watched(who, call, states, out, e);
}

/* Windows of four tokens at every place; one key and one value for all tokens. */
DP_TEST(session, rejected_tokens_are_never_those_that_stand_there) {
    dp_case c;
    if (!gt_parse_case(HEAD SMALL "backward = no\nrepeat = 90\n", &c)) return;
    dp_session s = schedule("4-1", DP_FP64);
    watch w = {.all = &c.p, .shows = 1};
    dp_result got;
    const dp_caller by = {.run = noted, .who = &w};
    memcpy(w.at, c.p.cu, sizeof *w.at * 3);
    REQUIRE(!dp_calls_run(&c.p, &s, DP_FAULT_NONE, &by, &got, NULL, NULL), "calls");
    CHECK(w.calls == 50 && !w.wrong, "%d calls, %d accepted tokens are others", w.calls, w.wrong);
    CHECK(w.drafts == 3 * 90 && !w.alike, "%d drafted, %d of them right", w.drafts, w.alike);
    dp_result_free(&got);
    dp_session_free(&s);
    dp_case_free(&c);
}

/* Windows as problems of their own: a recurrence makes of them, bit for bit, what calls made. */
DP_TEST(session, windows_are_problems_that_begin_from_the_state_they_were_handed) {
    const dp_design design = dp_design_of(DP_BASE_FP32);
    dp_case c;
    if (!gt_parse_case(HEAD SMALL "backward = no\n", &c)) return;
    dp_session s = schedule("7,4-2,3-0,8-7,2", DP_FP64);
    watch w = {.shows = 1};
    dp_drafts d = {0};
    dp_result got, again = {0};
    const dp_caller by = {.run = watched, .who = &w, .drafts = &d};
    REQUIRE(!dp_calls_run(&c.p, &s, DP_FAULT_NONE, &by, &got, NULL, NULL), "calls");
    const dp_draft_set *sets[] = {&d.window, &d.within};
    CHECK(d.windows == 6 && d.window.p.Nseq == 6 && d.window.p.T == 2 * (4 + 3 + 8), "%d windows",
          d.windows);
    CHECK(d.within.p.Nseq == 2 * (3 + 2 + 7) && d.within.p.T == 2 * (6 + 3 + 28), "%d states",
          d.within.p.Nseq);
    for (int i = 0; i < 2; i++) {
        const dp_problem *p = &sets[i]->p;
        dp_recurrent_run(p, &design, 0, NULL, &again);
        CHECK(!memcmp(again.final_state, sets[i]->out.final_state,
                      sizeof(double) * (size_t)((int64_t)p->Nseq * p->HV * p->K * p->V)),
              "set %d: other states", i);
        CHECK(i || !memcmp(again.o, sets[i]->out.o, sizeof(double) * (size_t)(p->T * p->HV * p->V)),
              "other o");
        dp_result_free(&again);
    }
    CHECK(d.window.place[3].slot == 2 && d.window.place[3].from == c.p.cu[2] + 9 &&
              d.window.place[3].call == 2 && d.window.place[3].passed == 0,
          "slot %d, from %lld", d.window.place[3].slot, (long long)d.window.place[3].from);
    dp_calls_seen_free(&(dp_calls_seen){.drafts = d});
    dp_result_free(&got);
    dp_session_free(&s);
    dp_case_free(&c);
}

/* ---- verdicts -------------------------------------------------------------------------------- */

/* Problems of several sizes; in all of them some sequence ends before another, so that there is
 * padding, and every schedule rolls back. */
static const char *const PROBLEMS[] = {
    "op = kda\nT = 200\ncu_seqlens = 0,130,200\nH = 2\nHV = 4\nK = 32\ng_scale = 0.05\n"
    "session = 64,4-2,4-0,3,8-1,8,5-4,6-3\n",
    "op = gdn\nT = 75\ncu_seqlens = 0,15,60,75\nK = 16\ns0_scale = 1\ngate = softplus\n"
    "g_mean = -3\nbeta = sigmoid\nl2norm = yes\nsession = 8-1,1,2-1,3-2\n",
    "op = mkda\nR = 2\nT = 60\ncu_seqlens = 0,44,60\nK = 16\nbeta_hi = 0.5\ng_scale = 0.05\n"
    "session = 8,4-3,1\n",
    "op = kda\nT = 40\ncu_seqlens = 0,7,40\nK = 8\ng_scale = 0.05\nsession = 2-1\n"
    "session_state = bf16\n",
    "op = kda\nT = 130\ncu_seqlens = 0,50,130\nK = 16\nHV = 2\nkeys = exact\ns0_scale = 1\n"
    "session = 30,6-2,5-4,3\n"};

static const dp_fault FAULTS[] = {
    DP_FAULT_REJECTED_STAY,  DP_FAULT_ROLLBACK_EARLY, DP_FAULT_ROLLBACK_LATE,
    DP_FAULT_ROLLBACK_SKIPS, DP_FAULT_SLOT_OF_OTHER,  DP_FAULT_SLOT_TRANSPOSED,
    DP_FAULT_CALL_GATE,      DP_FAULT_PADDING_WRITES, DP_FAULT_SLOT_UNWRITTEN};

DP_TEST(session, every_fault_of_calls_is_red_and_the_right_session_green) {
    for (size_t k = 0; k < sizeof PROBLEMS / sizeof *PROBLEMS; k++) {
        char text[512];
        dp_case c;
        dp_runs runs;
        snprintf(text, sizeof text, HEAD "base = bf16,fp32,fp64\n%s", PROBLEMS[k]);
        if (!gt_judge_case(text, DP_FAULT_NONE, NULL, &c, &runs)) return;
        CHECK(runs.n == 3, "%d runs", runs.n);
        for (int i = 0; i < runs.n; i++)
            CHECK(runs.run[i].verdict == DP_PASS, "problem %zu, %s: %s", k, runs.run[i].id,
                  runs.run[i].why);
        dp_runs_free(&runs);
        dp_case_free(&c);
        for (size_t f = 0; f < sizeof FAULTS / sizeof *FAULTS; f++) {
            if (!gt_judge_case(text, FAULTS[f], NULL, &c, &runs)) return;
            for (int i = 0; i < runs.n; i++)
                CHECK(gt_acted(&runs.run[i]) && runs.run[i].verdict == DP_FAIL,
                      "problem %zu, %s: %s, %s", k, runs.run[i].id,
                      gt_acted(&runs.run[i]) ? "acted" : "did not act",
                      dp_verdict_names[runs.run[i].verdict]);
            dp_runs_free(&runs);
            dp_case_free(&c);
        }
    }
}

/* Where there is nothing for a fault to do, it says so and nothing is red. */
DP_TEST(session, a_fault_that_finds_nothing_does_not_act) {
    static const char *const FLAT =
        HEAD "op = kda\nT = 40\ncu_seqlens = 0,20,40\nK = 8\nV = 4\nsession = 8,1\nbase = fp32\n";
    for (size_t f = 0; f < sizeof FAULTS / sizeof *FAULTS; f++) {
        const int acts = FAULTS[f] == DP_FAULT_SLOT_OF_OTHER || FAULTS[f] == DP_FAULT_CALL_GATE ||
                         FAULTS[f] == DP_FAULT_SLOT_UNWRITTEN;
        dp_case c;
        dp_runs runs;
        if (!gt_judge_case(FLAT, FAULTS[f], NULL, &c, &runs)) return;
        CHECK(!gt_acted(&runs.run[0]) == !acts && runs.run[0].verdict == (acts ? DP_FAIL : DP_PASS),
              "%s: %s", runs.run[0].id, dp_verdict_names[runs.run[0].verdict]);
        dp_runs_free(&runs);
        dp_case_free(&c);
    }
}

#define SHARED                                                                         \
    HEAD "op = kda\nT = 78\ncu_seqlens = 0,30,48,78\nK = 16\nHV = 2\ng_scale = 0.05\n" \
         "s0_scale = 1\n"                                                              \
         "base = bf16,fp32,fp64\nsession = 8,4-2,3,1\n"

/* Three continuations of one prefix. The results of a shared prefix equal the results of three
 * copies. If the first continuation overwrites the prefix's state, the next call shows it; without
 * sharing this is no fault. */
DP_TEST(session, every_continuation_begins_from_the_prefix) {
    static const dp_fault F[] = {DP_FAULT_NONE, DP_FAULT_PREFIX_OVERWRITTEN};
    for (int shared = 0; shared < 2; shared++)
        for (int f = 0; f < 2; f++) {
            dp_case c;
            dp_runs runs;
            const int red = shared && f;
            if (!gt_judge_case(shared ? SHARED "session_prefix = 10\n" : SHARED, F[f], NULL, &c,
                               &runs))
                return;
            const int64_t n = (int64_t)c.p.H * c.p.K;
            const int same = !memcmp(c.p.k + 30 * n, c.p.k, sizeof(double) * (size_t)(10 * n));
            CHECK(same == shared, "keys of the second sequence");
            for (int i = 0; i < runs.n; i++) {
                const dp_run *r = &runs.run[i];
                CHECK(gt_acted(r) == red && r->verdict == (red ? DP_FAIL : DP_PASS), "%s: %s, %s",
                      r->id, gt_acted(r) ? "acted" : "did not act", r->why);
                CHECK(!red || r->tensor[0].failed.at.sequence > 0, "%s: %s", r->id, r->why);
                CHECK(!red || strstr(r->tensor[0].why, "call 3 of its sequence: 3 drafted, 3 "
                                                       "accepted, the first behind the shared"),
                      "%s: %s", r->id, r->tensor[0].why);
            }
            dp_runs_free(&runs);
            dp_case_free(&c);
        }
}

/* The calls of the prefix bring the tokens of the first sequence alone. */
typedef struct {
    dp_base base;
    int64_t tokens;
} counted;

static dp_status count_tokens(void *who, const dp_problem *call, int states, dp_call_result *out,
                              dp_err *e) {
    counted *x = who;
    x->tokens += call->T;
    return piped(&x->base, call, states, out, e);
}

DP_TEST(session, a_prefix_is_computed_once) {
    for (int shared = 0; shared < 2; shared++) {
        dp_case c;
        dp_result out;
        counted x = {.base = DP_BASE_FP32};
        const dp_caller by = {.run = count_tokens, .who = &x};
        if (!gt_parse_case(shared ? SHARED "session_prefix = 8\n" : SHARED, &c)) return;
        REQUIRE(!dp_calls_run(&c.p, &c.session, DP_FAULT_NONE, &by, &out, NULL, NULL), "calls");
        const int64_t rejected = 3 * 2, again = 3 * 2, saved = shared ? 2 * 8 : 0;
        CHECK(x.tokens == 78 - saved + rejected + again, "%lld tokens in calls",
              (long long)x.tokens);
        dp_result_free(&out);
        dp_case_free(&c);
    }
}

/* Faults of stages do not act between calls; the failing call is named. */
DP_TEST(session, a_failure_names_its_call) {
    dp_case c;
    dp_runs runs;
    char text[512];
    snprintf(text, sizeof text, HEAD "op = kda\nT = 30\nK = 8\nbase = fp32\nsession = 20,4-1,1\n");
    if (!gt_judge_case(text, DP_FAULT_REJECTED_STAY, NULL, &c, &runs)) return;
    const char *at = strstr(runs.run[0].why, "; in call ");
    int call = 0, drafted = 0, accepted = 0;
    CHECK(at &&
              sscanf(at, "; in call %d of its sequence: %d drafted, %d accepted", &call, &drafted,
                     &accepted) == 3 &&
              call >= 3 && drafted == 1 && accepted == 1,
          "%s", runs.run[0].why);
    dp_runs_free(&runs);
    dp_case_free(&c);
}

/* The cached results of one schedule serve no other: a cache changes no number. */
DP_TEST(session, what_is_cached_belongs_to_the_schedule) {
    static const char *const AS[] = {"backward = no\n", "session = 20,3-1,4\n", "session = 5\n",
                                     "session = 5\nsession_state = fp16\n"};
    for (size_t i = 0; i < sizeof AS / sizeof *AS; i++) {
        dp_judgement t[2];
        for (int cached = 0; cached < 2; cached++) {
            dp_case c;
            dp_err e = {0};
            dp_runs runs = {0};
            char text[512];
            const dp_run_options o = {.only[DP_ID_BACKEND] = {1, {DP_BACKEND_SIM}},
                                      .cache = cached ? gt_tmpdir() : NULL};
            snprintf(text, sizeof text, HEAD "op = kda\nT = 41\nK = 16\nbase = bf16\n%s", AS[i]);
            if (!gt_parse_case(text, &c)) return;
            REQUIRE(!dp_case_run(&c, &o, &runs, &e), "%s", e.msg);
            t[cached] = runs.run[0].tensor[0];
            dp_runs_free(&runs);
            dp_case_free(&c);
        }
        CHECK((t[0].ratio == t[1].ratio || (isnan(t[0].ratio) && isnan(t[1].ratio))) &&
                  t[0].expected.expected == t[1].expected.expected,
              "%s: %.17g of its bound, cached %.17g; expected %.17g, cached %.17g", AS[i],
              t[0].ratio, t[1].ratio, t[0].expected.expected, t[1].expected.expected);
    }
}

/* If the case says that states are rounded between calls, the error of this rounding is allowed,
 * and no more. If the case says that states are kept exactly, these numbers fail. */
static dp_status in_bf16(void *who, const dp_problem *call, int states, dp_call_result *out,
                         dp_err *e) {
    const dp_status st = piped(who, call, states, out, e);
    const int64_t n = (int64_t)call->Nseq * call->HV * call->K * call->V;
    for (int64_t i = 0; !st && i < n; i++)
        out->out.final_state[i] = dp_store(DP_BF16, out->out.final_state[i]);
    return st;
}

DP_TEST(session, a_rounded_state_is_allowed_what_it_makes_and_only_where_the_case_says_so) {
    static const char *const KEPT[] = {"returned", "bf16", "fp16"};
    for (int k = 0; k < 3; k++) {
        dp_case c;
        dp_err e = {0};
        dp_runs runs = {0};
        dp_stored_results g = {.same_design = 1};
        const dp_run_options o = {.cache = gt_tmpdir()};
        dp_base b = DP_BASE_FP32;
        const dp_caller by = {.run = in_bf16, .who = &b};
        char text[512];
        snprintf(text, sizeof text,
                 HEAD "op = kda\nT = 60\nK = 16\nbase = fp32\nsession = 20,4-2,1\n"
                      "session_state = %s\n",
                 KEPT[k]);
        if (!gt_parse_case(text, &c)) return;
        REQUIRE(!dp_calls_run(&c.p, &c.session, DP_FAULT_NONE, &by, &g.r, NULL, NULL), "calls");
        REQUIRE(!dp_run_stored(&c, &o, &g, &runs, &e), "%s", e.msg);
        CHECK(runs.run[0].verdict == (k == 1 ? DP_PASS : DP_FAIL), "kept as %s: %s, %s", KEPT[k],
              dp_verdict_names[runs.run[0].verdict], runs.run[0].why);
        dp_runs_free(&runs);
        dp_result_free(&g.r);
        dp_case_free(&c);
    }
}

/* ---- libraries ------------------------------------------------------------------------------- */

#define CALLS HEAD "op = kda\nT = 30\nK = 8\nHV = 2\nbase = fp32\nsession = 12,4-2,4-0,3-1\n"

/* Rollback by the states that a library writes, or by running it again. */
DP_TEST(session, libraries_run_in_calls) {
    static const char *const LIB[][3] = {
        {"subject/example_subject.c", "states.so", "states of every token"},
        {"subject/example_ranks.c", "again.so", "accepted tokens run again"}};
    for (int i = 0; i < 2; i++) {
        dp_subject s;
        dp_case c;
        dp_runs runs;
        dp_err e = {0};
        REQUIRE(!dp_subject_open(gt_library(LIB[i][0], LIB[i][1]), 0, 0, &s, &e), "%s", e.msg);
        if (!gt_judge_case(CALLS, DP_FAULT_NONE, &s, &c, &runs)) return;
        const dp_run *r = &runs.run[0];
        CHECK(runs.n == 1 && r->verdict == DP_PASS && r->ntensor == 5 - i, "%s: %s", LIB[i][1],
              r->why);
        CHECK(r->windows == 18 && r->windows_judged == 18, "%d of %d windows", r->windows_judged,
              r->windows);
        CHECK(r->rollback && !strcmp(r->rollback, LIB[i][2]), "%s: %s", LIB[i][1], r->rollback);
        dp_runs_free(&runs);
        dp_case_free(&c);
        dp_subject_close(&s);
    }
}

/* A state that no window goes back to, 1% off: neither o nor the last state depend on it. */
DP_TEST(session, a_state_within_a_window_is_judged_though_nothing_depends_on_it) {
    dp_subject s;
    dp_case c;
    dp_runs runs;
    dp_err e = {0};
    REQUIRE(!dp_subject_open(gt_library("tests/data/third_state.c", "third.so"), 0, 0, &s, &e),
            "%s", e.msg);
    if (!gt_judge_case(CALLS, DP_FAULT_NONE, &s, &c, &runs)) return;
    const dp_run *r = &runs.run[0];
    CHECK(r->verdict == DP_FAIL && !strncmp(r->why, "state_within: ", 14) &&
              strstr(r->why, "; token 3 of the window in call "),
          "%s", r->why);
    for (int i = 0; i < r->ntensor; i++)
        CHECK((r->tensor[i].verdict == DP_FAIL) == !strcmp(r->tensor[i].name, "state_within"),
              "%s: %s", r->tensor[i].name, dp_verdict_names[r->tensor[i].verdict]);
    dp_runs_free(&runs);
    dp_case_free(&c);
    dp_subject_close(&s);
}

/* A crash of a library in one call is the outcome of the session. */
DP_TEST(session, a_library_that_dies_in_a_call_fails_with_it) {
    static const struct {
        const char *bad;
        dp_verdict verdict;
        const char *why;
    } ROWS[] = {{"crash", DP_FAIL, "(call 1)"},
                {"fails", DP_FAIL, "(call 1)"},
                {"past-by-one", DP_FAIL, "(call 1)"},
                {"unwritten", DP_FAIL, "never written"}};
    dp_subject s;
    dp_err e = {0};
    REQUIRE(!dp_subject_open(gt_library("tests/data/bad_subject.c", "bad.so"), 0, 0, &s, &e), "%s",
            e.msg);
    for (size_t i = 0; i < sizeof ROWS / sizeof *ROWS; i++) {
        dp_case c;
        dp_runs runs;
        setenv("BAD", ROWS[i].bad, 1);
        const int ran = gt_judge_case(CALLS, DP_FAULT_NONE, &s, &c, &runs);
        unsetenv("BAD");
        if (!ran) return;
        CHECK(runs.run[0].verdict == ROWS[i].verdict && strstr(runs.run[0].why, ROWS[i].why),
              "%s: %s, %s", ROWS[i].bad, dp_verdict_names[runs.run[0].verdict], runs.run[0].why);
        dp_runs_free(&runs);
        dp_case_free(&c);
    }
    dp_subject_close(&s);
}

/* ---- the program ----------------------------------------------------------------------------- */

DP_TEST(session, the_program_runs_a_session_and_its_ID_runs_it_again) {
    char cmd[2048], out[1 << 14], digest[2][40] = {"", "x"};
    static const char *const ASK[] = {"session-verify --base fp32 --backend sim",
                                      "--id 'session-verify:ranks=1,base=fp32,chain=fp32,"
                                      "merge=allgather'"};
    for (int i = 0; i < 2; i++) {
        snprintf(cmd, sizeof cmd, "%s run %s --cases '%s' --cache '%s'", gt_program(), ASK[i],
                 gt_cases(), gt_tmpdir());
        const int rc = gt_run(cmd, out, sizeof out);
        const char *at = strstr(out, "digest: ");
        CHECK(!rc && at && sscanf(at, "digest: %39s", digest[i]) == 1, "status %d: %s", rc, out);
    }
    CHECK(!strcmp(digest[0], digest[1]), "%s, again %s", digest[0], digest[1]);
    snprintf(cmd, sizeof cmd,
             "%s explain 'session-decode:ranks=1,base=fp32,chain=fp32,"
             "merge=allgather'",
             gt_program());
    CHECK(!gt_run(cmd, out, sizeof out) &&
              strstr(out, "session      96,24x1,4,1; state between calls: bf16\n") &&
              strstr(out, "power        the tensor times 1"),
          "explain: %s", out);
    static const char *const REFUSED[][2] = {
        {"bisect stage session-verify", "op = session has no stages"},
        {"shrink session-verify", "op = session cannot be shrunk"},
        {"run session-verify --backend nccl", "a session is computed by"}};
    for (int i = 0; i < 3; i++) {
        snprintf(cmd, sizeof cmd, "%s %s --cases '%s' 2>&1", gt_program(), REFUSED[i][0],
                 gt_cases());
        const int rc = gt_run(cmd, out, sizeof out);
        CHECK(rc == 2 && strstr(out, REFUSED[i][1]), "%s: status %d: %s", REFUSED[i][0], rc, out);
    }
}

/* A program that is called with files: once a call, without states of every token. */
DP_TEST(session, a_program_runs_in_calls) {
    static const char *const ASK[][2] = {{"--writes o,final_state", "VERDICT: PASS"},
                                         {"--writes o,final_state,states", "--writes: states"}};
    char cmd[2048], out[1 << 14];
    snprintf(cmd, sizeof cmd, "%s/program.case", gt_tmpdir());
    FILE *f = fopen(cmd, "w");
    REQUIRE(f, "%s", cmd);
    fputs(CALLS, f);
    fclose(f);
    for (int i = 0; i < 2; i++) {
        snprintf(cmd, sizeof cmd,
                 "%s run %s/program.case --cache '%s' --base fp32 %s --serve \"$DP_PYTHON "
                 "%s/../harness/subject/example_program.py\" 2>&1",
                 gt_program(), gt_tmpdir(), gt_tmpdir(), ASK[i][0], gt_cases());
        const int rc = gt_run(cmd, out, sizeof out);
        CHECK(rc == 2 * i && strstr(out, ASK[i][1]), "status %d: %s", rc, out);
    }
}
