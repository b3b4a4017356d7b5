/* Two kernels on the same inputs (harness/search/differ.h): the same bits, within both bounds, or
 * beyond them, with the first such stage and the broken bound. Every kind of subject on either
 * side; bad use. */
#include "attack.h"
#include "cases.h"
#include "gt.h"
#include "harness/simulated/ranks.h"

#include <jansson.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define SMALL                                                                           \
    "reason = r\nsource = s\nop = kda\nT = 96\nH = 1\nHV = 2\nK = 8\nV = 4\ng_scale = " \
    "0.02\ns0_scale = 1\nranks = 1,4\nbase = fp32\nchain = fp32\n"
#define PACKED                                                                                    \
    "reason = r\nsource = s\nop = kda\nT = 480\nHV = 2\nK = 8\nV = 4\ncu_seqlens = 0,7,7,300,480" \
    "\ng_scale = 0.01\ns0_scale = 1\nranks = 3\nbase = fp32\nchain = fp32\n"
#define SIM " --backend sim --base fp32"

static char dir[512];

static void set_up(const char *name) {
    snprintf(dir, sizeof dir, "%s", at_dir(name));
    at_write(at_text("%s/small.case", dir), SMALL);
    at_write(at_text("%s/packed.case", dir), PACKED);
}

static int differ(const char *args) {
    return at_sh(dir, 120,
                 "S=$(realpath $C/../harness); export EXAMPLE=$S/subject NOTED=$PWD/noted; "
                 "B=\"${DP_PYTHON:-python3} $S/tests/data/bad_program.py\"; "
                 "$P differ --cases $C --cache ../cache-of-differ %s",
                 args);
}

#define EXPECT_SAYS(status, want, says)                                                       \
    do {                                                                                      \
        const int got_ = (status);                                                            \
        CHECK(got_ == (want) && strstr(at_out, says), "status %d, not %d with '%s': %.1500s", \
              got_, want, says, at_out);                                                      \
    } while (0)

DP_TEST(differ, simulated_ranks_have_the_same_bits_or_keep_within_both_bounds) {
    set_up("differ");
    EXPECT_SAYS(differ("small.case packed.case" SIM SIM), 0, "DIFFER: SAME BITS");
    CHECK(!strstr(at_out, "differ,") && strstr(at_out, "same        dh "), "%s", at_out);
    EXPECT_SAYS(differ("small.case --ranks 4" SIM SIM), 0, "same        Akk         2400 entries");
    EXPECT_SAYS(differ("small.case packed.case" SIM " --backend sim --base bf16"), 0,
                "DIFFER: WITHIN BOTH BOUNDS");
    CHECK(!strstr(at_out, "beyond") && !strstr(at_out, "unbounded") &&
              !strstr(at_out, "against the truth"),
          "%s", at_out);
    EXPECT_SAYS(differ("--bitwise small.case" SIM " --backend sim --base bf16"), 1,
                "DIFFER: WITHIN BOTH BOUNDS");
    EXPECT_SAYS(differ("small.case --tokens 256 --heads 3" SIM " --backend sim --base bf16"), 0,
                "T = 256, HV = 3");
    EXPECT_SAYS(differ("small.case --ranks 2" SIM " --merge heads" SIM " --merge heads"), 0,
                "same        o ");
    EXPECT_SAYS(differ("small.case --ranks 2" SIM " --merge heads" SIM), 0,
                "DIFFER: WITHIN BOTH BOUNDS");
}

DP_TEST(differ, the_first_stage_beyond_both_bounds_is_named_and_whose_bound_is_broken) {
    set_up("differ-fault");
    EXPECT_SAYS(differ("small.case --ranks 4" SIM " --fault merge-scaled" SIM), 1,
                "first beyond: S_in, made by merge_fwd");
    CHECK(strstr(at_out, "DIFFER: BEYOND BOTH BOUNDS: A breaks its own") &&
              strstr(at_out, "same        H ") && strstr(at_out, "B against the truth: pass"),
          "%s", at_out);
    EXPECT_SAYS(differ("small.case --ranks 4" SIM SIM " --fault merge-scaled"), 1,
                "BOUNDS: B breaks its own");
    EXPECT_SAYS(differ("small.case --ranks 4" SIM " --fault merge-scaled" SIM
                       " --fault merge-nearest-first"),
                1, "BOUNDS: both break their own");
    EXPECT_SAYS(differ("small.case --no-truth --ranks 4" SIM SIM " --fault merge-scaled"), 1,
                "not held against the truth: --no-truth");
}

DP_TEST(differ, a_truth_that_takes_minutes_is_asked_for_by_name_alone) {
    set_up("differ-minutes");
    EXPECT_SAYS(
        differ("model-head --tokens 4096 --heads 1 --ranks 4" SIM " --fault merge-scaled" SIM), 1,
        "not held against the truth: it would take some 1.3 minutes");
}

/* The row of a difference, from the record; NULL: the tensor is not there. */
static json_t *worst_row(json_t *answer, const char *name) {
    size_t i;
    json_t *t;
    json_array_foreach(json_object_get(answer, "tensors"), i,
                       t) if (!strcmp(json_string_value(json_object_get(t, "name")),
                                      name)) return json_object_get(t, "worst_row");
    return NULL;
}

DP_TEST(differ, chunks_and_tokens_of_packed_sequences_are_those_of_the_pipeline) {
    dp_case c;
    dp_sim s;
    set_up("differ-places");
    EXPECT_SAYS(differ("packed.case --json d.json" SIM " --fault merge-scaled" SIM), 1, "beyond");
    json_t *all = json_load_file(at_text("%s/d.json", dir), 0, NULL);
    json_t *row = worst_row(json_array_get(all, 0), "h");
    REQUIRE(row && gt_parse_case(PACKED, &c) && !dp_sim_new(&s, &c.p, DP_BASE_FP32, 3, 0, NULL),
            "%s", at_out);
    const int64_t chunk = json_integer_value(json_object_get(row, "chunk")),
                  token = json_integer_value(json_object_get(row, "token")),
                  rank = json_integer_value(json_object_get(row, "rank"));
    REQUIRE(chunk > 2 && chunk < s.ngroup, "chunk %lld of %d", (long long)chunk, s.ngroup);
    const dp_group *g = &s.group[chunk];
    CHECK(g->t0 == token && g->rank == rank, "chunk %lld: token %lld of rank %lld, not %lld of %d",
          (long long)chunk, (long long)token, (long long)rank, (long long)g->t0, g->rank);
    CHECK(
        !strcmp(json_string_value(json_object_get(json_array_get(all, 0), "first_beyond")), "S_in"),
        "%s", at_out);
    json_decref(all);
    dp_sim_free(&s);
    dp_case_free(&c);
}

DP_TEST(differ, a_library_is_held_against_the_simulated_ranks) {
    static const struct {
        const char *bad;
        int status;
        const char *says[2];
    } rows[] = {
        {"", 0, {"DIFFER: WITHIN BOTH BOUNDS", "design not declared"}},
        {"wrong-head", 1, {"first beyond: o", "(rank 1, sequence 0, token 29, head 1)"}},
        {"wrong-stage", 1, {"first beyond: H, made by pre_process_fwd", "A breaks its own"}},
        {"crash", 1, {"DIFFER: ONE HAS NO RESULT", "A, example-ranks: rank 3 crashed: SIGSEGV"}},
        {"nan", 1, {"first beyond: o", "A against the truth: fail"}},
        {"refuses-packed", 0, {"DIFFER: WITHIN BOTH BOUNDS", "within      o"}},
    };
    set_up("differ-library");
    char lib[512];
    snprintf(lib, sizeof lib, "%s", at_library("bad_subject", "-ffp-contract=off"));
    for (size_t i = 0; i < sizeof rows / sizeof *rows; i++) {
        char args[1200];
        snprintf(args, sizeof args, "small.case --ranks 4 --forward --subject %s" SIM, lib);
        setenv("BAD", rows[i].bad, 1);
        for (int k = 0; k < 2; k++)
            EXPECT_SAYS(k ? rows[i].status : differ(args), rows[i].status, rows[i].says[k]);
    }
    unsetenv("BAD");
}

DP_TEST(differ, programs_and_designs_without_a_bound_are_judged_by_the_truth) {
    set_up("differ-program");
    if (at_sh(dir, 30, "\"${DP_PYTHON:-python3}\" -c 'import numpy'"))
        SKIP("numpy is not installed");
#define SERVE " --serve \"$B\" --base fp32"
    EXPECT_SAYS(differ("small.case" SERVE " --run \"$B\" --base fp32"), 0, "DIFFER: SAME BITS");
    EXPECT_SAYS(differ("small.case" SERVE " --writes o,final_state" SIM), 0,
                "dq          made by B alone");
    EXPECT_SAYS(differ("--no-truth small.case" SERVE " --design recurrent" SIM), 0,
                "DIFFER: WITHIN BOTH BOUNDS");
#define KEPT_SHORT " --design recurrent,state=bf16"
    EXPECT_SAYS(differ("small.case" SERVE KEPT_SHORT SIM), 0, "DIFFER: EACH WITHIN ITS OWN LIMITS");
    CHECK(strstr(at_out, "no bounds of A: no bound is derived for the design") &&
              strstr(at_out, "unbounded   o ") && strstr(at_out, "A against the truth: pass"),
          "%s", at_out);
    EXPECT_SAYS(differ("--no-truth small.case" SERVE KEPT_SHORT SIM), 2, "DIFFER: COULD NOT JUDGE");
    EXPECT_SAYS(differ("--no-truth small.case" SERVE " --design drop=20" SIM), 2,
                "what it drops is in no bound of two kernels");
    setenv("BAD", "late", 1);
    EXPECT_SAYS(differ("--no-truth small.case" SIM SERVE " --design recurrent"), 1, "BEYOND");
    EXPECT_SAYS(differ("small.case" SIM SERVE KEPT_SHORT), 1,
                "NOT BOTH WITHIN THEIR LIMITS: B breaks its own");
    setenv("BAD", "unsupported", 1);
    EXPECT_SAYS(differ("small.case" SIM SERVE), 2, "bad_program.py refuses it: not on a Monday");
    setenv("BAD", "hang", 1);
    EXPECT_SAYS(differ("--limit 2 --json d.json small.case" SIM SERVE "; cat d.json"), 0,
                "\"verdict\": \"no result\"");
    CHECK(strstr(at_out, "did not answer within 2 s"), "%s", at_out);
    unsetenv("BAD");
}

DP_TEST(differ, inputs_in_a_file_are_the_case_that_they_came_from) {
    set_up("differ-file");
    REQUIRE(
        at_sh(dir, 30,
              "$P inputs packed.case -o in.safetensors; $P inputs small.case -o x.safetensors") ==
            0,
        "%s", at_out);
    EXPECT_SAYS(differ("in.safetensors --json file.json" SIM " --backend sim --base bf16"), 0,
                "DIFFER: WITHIN BOTH BOUNDS");
    EXPECT_SAYS(differ("packed.case --json case.json --ranks 1" SIM " --backend sim --base bf16"),
                0, "DIFFER: WITHIN BOTH BOUNDS");
    EXPECT_SAYS(at_sh(dir, 10,
                      "for f in file case; do grep -v 'seconds\\|\"case\"' $f.json >$f; done; "
                      "cmp file case && grep -c share file"),
                0, "");
    CHECK(atoi(at_out) > 10, "%s", at_out);
}

DP_TEST(differ, bad_use_ends_with_2) {
    static const struct {
        const char *args, *says;
    } rows[] = {
        {"small.case" SIM, "name two subjects"},
        {SIM SIM, "name a case"},
        {"small.case" SIM SIM SIM, "a third subject"},
        {"small.case --base fp32" SIM SIM, "behind the subject that it is true of"},
        {"small.case --backend lapack" SIM, "differ knows sim, mpi, cuda and nccl"},
        {"small.case --backend sim --design recurrent" SIM, "--design"},
        {"small.case --run true" SIM, "--run: give --base"},
        {"small.case --run 'touch noted' --base fp32 --fault merge-scaled" SIM, "of --backend sim"},
        {"small.case --subject nowhere.so" SIM, "nowhere.so: No such file"},
        {"smoke-conv" SIM SIM, "op = conv"},
        {"smoke-step" SIM SIM, "op = step"},
        {"nowhere.safetensors" SIM SIM, "nowhere.safetensors: cannot be opened: No such file"},
        {"small.case --tokens 255 --ranks 2" SIM SIM, "is not divisible by 2 ranks"},
        {"small.case --json /nowhere/x.json" SIM SIM, "cannot be written"},
    };
    set_up("differ-use");
    for (size_t i = 0; i < sizeof rows / sizeof *rows; i++)
        EXPECT_SAYS(differ(rows[i].args), 2, rows[i].says);
    CHECK(!at_exists(at_text("%s/noted", dir)), "a program was started");
}
