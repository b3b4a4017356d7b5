/* The museum's counting: what is red, where it points, what is not seen, what FLA's thresholds see.
 */
#include "gt.h"
#include "harness/search/bisect.h"
#include "harness/search/museum.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static int run(dp_fault only, const char *name, dp_museum *m) {
    char path[512], *p = path;
    dp_err e = {0};
    const dp_museum_options o = {.only = only, .nlocate = 3, .cache = gt_cache(), .quiet = 1};
    snprintf(path, sizeof path, "%s/%s.case", gt_cases(), name);
    if (!dp_museum_run(&p, 1, &o, m, &e)) return 1;
    gt_fail(__FILE__, __LINE__, name, "%s", e.msg);
    return 0;
}

DP_TEST(museum, counts_red_runs_and_says_where) {
    dp_museum m;
    if (!run(DP_FAULT_MERGE_NEAREST_FIRST, "smoke-kda", &m)) return;
    const dp_museum_row *r = &m.row[DP_FAULT_MERGE_NEAREST_FIRST];
    CHECK(m.clean_runs == 6 && !m.clean_red, "%d clean runs, %d red: %s", m.clean_runs, m.clean_red,
          m.clean_why);
    CHECK(r->runs == 6 && r->acted == 2 && r->red == 2 && r->ranks == 4 && r->T == 160,
          "%d runs, %d acted, %d red, %d ranks, T = %lld", r->runs, r->acted, r->red, r->ranks,
          (long long)r->T);
    CHECK(r->located == 1 && r->right == 1 && !strcmp(r->place.by, "bisect stage") &&
              r->place.stage && !strcmp(r->place.stage, "merge_fwd") && r->place.rank >= 2,
          "located at %s, rank %d", r->place.stage, r->place.rank);
    CHECK(r->fla_red == 2 && r->fla_of == 2, "FLA sees %d of %d", r->fla_red, r->fla_of);
    for (int f = 1; f < DP_NFAULTS; f++)
        CHECK(f == DP_FAULT_MERGE_NEAREST_FIRST || !m.row[f].runs, "%s ran", dp_faults[f].name);
}

/* One sequence has no first sub-sequence other than its last: the fault changes nothing, and
 * nothing may be red. */
DP_TEST(museum, a_fault_that_does_not_act_is_not_seen) {
    dp_museum m;
    if (!run(DP_FAULT_FWD_FIRST_SUBSEQ, "smoke-kda", &m)) return;
    const dp_museum_row *r = &m.row[DP_FAULT_FWD_FIRST_SUBSEQ];
    CHECK(r->runs == 6 && !r->acted && !r->red && !r->located, "%d acted, %d red", r->acted,
          r->red);
}

/* Below every threshold of FLA's tests, and red here. */
DP_TEST(museum, thresholds_of_whole_tensors_miss_what_bounds_see) {
    dp_museum m;
    if (!run(DP_FAULT_STATE_BF16, "smoke-kda", &m)) return;
    const dp_museum_row *r = &m.row[DP_FAULT_STATE_BF16];
    CHECK(r->red > 0 && r->fla_of > 0 && !r->fla_red, "%d red, FLA sees %d of %d", r->red,
          r->fla_red, r->fla_of);
    CHECK(dp_fla_sees("o", 5.1e-3) && !dp_fla_sees("o", 4.9e-3) && dp_fla_sees("dg", NAN) &&
              !dp_fla_sees("dg", 1.9e-2) && !dp_fla_sees("M", 1),
          "thresholds");
}

/* FLA's tests compare every result of every recurrence: of DPLR da and db, of GDN-2 db and dw. */
DP_TEST(museum, every_result_of_every_recurrence_has_a_threshold) {
    for (int i = 0; i < DP_NRESULTS; i++) {
        const dp_tensor_field *f = &dp_result_fields[i];
        const int of_gate =
            !strcmp(f->name, "dg") || !strcmp(f->name, "dA_log") || !strcmp(f->name, "ddt_bias");
        const double limit = !f->backward ? 5e-3 : of_gate ? 2e-2 : 8e-3;
        CHECK(dp_fla_sees(f->name, 1.01 * limit) && !dp_fla_sees(f->name, 0.99 * limit), "%s",
              f->name);
    }
    CHECK(!dp_fla_sees("dw", 1) && !dp_fla_sees("dw_k", 1), "gradients of a convolution");
}

/* No output shows it: what a session made of drafted tokens does. */
DP_TEST(museum, a_fault_of_drafted_tokens_is_one_of_the_calls) {
    dp_museum m;
    if (!run(DP_FAULT_DRAFT_GATE, "session-verify", &m)) return;
    const dp_museum_row *r = &m.row[DP_FAULT_DRAFT_GATE];
    CHECK(r->red == 2 && r->right == 1 && r->place.stage && !strcmp(r->place.stage, "calls"),
          "%d red, located at %s", r->red, r->place.stage ? r->place.stage : "no stage");
}

DP_TEST(museum, repeated_runs_tell_a_race_from_a_stable_run) {
    char path[512];
    dp_case c;
    dp_err e = {0};
    dp_repeat x;
    dp_sim_policy how = {4, DP_BASE_FP32,   DP_FP32, DP_EXCHANGE_RING, DP_FAULT_NONE,
                         1, DP_PAYLOAD_FULL};
    snprintf(path, sizeof path, "%s/smoke-kda.case", gt_cases());
    REQUIRE(!dp_case_load(path, &c, &e), "%s", e.msg);
    REQUIRE(!dp_repeat_sim(&c.p, &how, 3, &x, &e), "%s", e.msg);
    CHECK(!x.differ, "%d runs differ at %s", x.differ, dp_stage_names[x.stage]);
    free(x.hit);
    how.fault = DP_FAULT_RACE;
    REQUIRE(!dp_repeat_sim(&c.p, &how, 3, &x, &e), "%s", e.msg);
    CHECK(x.differ == 1 && x.stage == DP_STAGE_STATE_FWD && x.rank == 3 && x.head == 1,
          "%d runs differ, stage %d, rank %d, head %d", x.differ, x.stage, x.rank, x.head);
    CHECK(x.hit[3 * c.p.HV + 1] && !x.hit[0], "recorded elsewhere");
    free(x.hit);
    dp_case_free(&c);
}

DP_TEST(museum, the_program_exits_with_one_when_a_fault_goes_unseen) {
    char cmd[2048], out[8192];
    snprintf(cmd, sizeof cmd, "%s museum --cases %s --cache %s --fault fwd-first-subseq smoke-kda",
             gt_program(), gt_cases(), gt_cache());
    int rc = gt_run(cmd, out, sizeof out);
    CHECK(rc == 1 && strstr(out, "NOT SEEN") && strstr(out, "0 of 1 faults seen"),
          "exit status %d: %s", rc, out);
    snprintf(cmd, sizeof cmd,
             "%s museum --cases %s --cache %s --fault halo-leak smoke-conv --out %s/museum",
             gt_program(), gt_cases(), gt_cache(), gt_tmpdir());
    rc = gt_run(cmd, out, sizeof out);
    CHECK(rc == 0 && strstr(out, "1 of 1 faults seen"), "exit status %d: %s", rc, out);
    snprintf(cmd, sizeof cmd,
             "cp harness/tests/data/record-small.json %s/museum/results.json && %s report "
             "%s/museum && grep -c 'Museum of faults' %s/museum/report.html",
             gt_tmpdir(), gt_program(), gt_tmpdir(), gt_tmpdir());
    rc = gt_run(cmd, out, sizeof out);
    CHECK(rc == 0 || strstr(out, "No module named"), "exit status %d: %s", rc, out);
    snprintf(cmd, sizeof cmd,
             "sed -i 's/\"red\": [0-9]*/\"red\": \"lots\"/' %s/museum/museum.json && %s report "
             "%s/museum",
             gt_tmpdir(), gt_program(), gt_tmpdir());
    rc = gt_run(cmd, out, sizeof out);
    CHECK((rc == 2 && strstr(out, "museum.json: clean.red: expected an integer")) ||
              strstr(out, "No module named"),
          "exit status %d: %s", rc, out);
    snprintf(cmd, sizeof cmd, "%s museum --fault no-such-fault", gt_program());
    CHECK(gt_run(cmd, out, sizeof out) == 2 && strstr(out, "no-such-fault"), "%s", out);
}
