/* The program as a user meets it: exit statuses, messages, records that replay bit for bit, the
 * cache, JUnit. */
#include "gt.h"
#include "ref/vocabulary/problem.h"
#include "sanitized.h"

#include <jansson.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <xxhash.h>

static char out[1 << 20];

static int run(const char *args) {
    char cmd[8192];
    snprintf(cmd, sizeof cmd, "'%s' %s", gt_program(), args);
    return gt_run(cmd, out, sizeof out);
}

static json_t *record(const char *args) {
    char cmd[4096], path[512];
    snprintf(path, sizeof path, "%s/record.json", gt_tmpdir());
    snprintf(cmd, sizeof cmd, "run %s --cases '%s' --cache '%s/cache' --json '%s'", args,
             gt_cases(), gt_tmpdir(), path);
    const int rc = run(cmd);
    if (rc != 0 && rc != 1) {
        gt_fail(__FILE__, __LINE__, args, "exit status %d: %s", rc, out);
        return NULL;
    }
    json_error_t e;
    json_t *j = json_load_file(path, 0, &e);
    if (!j) gt_fail(__FILE__, __LINE__, args, "record is no JSON: %s", e.text);
    return j;
}

/* build/deltaproof finds cases, report and interpreter of its own tree from any folder. */
DP_TEST(program, works_from_any_folder) {
    char cmd[4096];
    snprintf(cmd, sizeof cmd, "test -f \"$(dirname '%s')/../cases/README.md\"", gt_program());
    if (gt_run(cmd, out, sizeof out))
        return; /* built outside of the tree: --cases says where they are */
    snprintf(cmd, sizeof cmd,
             "cd '%s' && mkdir -p elsewhere && cd elsewhere && '%s' list | grep -c . && '%s' run "
             "t1 --cache none --ranks 1 --base fp32 --backend sim --out rep && ls",
             gt_tmpdir(), gt_program(), gt_program());
    const int rc = gt_run(cmd, out, sizeof out);
    CHECK(atoi(out) > 40 && strstr(out, "VERDICT: PASS") && !strstr(out, "can't open") &&
              !strstr(out, "cannot be opened"),
          "status %d: %s", rc, out);
}

/* libgomp shows that its threads do not spin (a policy that nobody set is shown as passive, too).
 * A policy of the environment stays. Programs that it starts have the environment as it was. */
DP_TEST(program, threads_that_wait_sleep) {
    char cmd[2000];
    const char *const said[] = {"", "OMP_WAIT_POLICY=active"};
    for (int i = 0; i < 2; i++) {
        snprintf(cmd, sizeof cmd,
                 "env -u OMP_WAIT_POLICY %s OMP_DISPLAY_ENV=verbose '%s' --version 2>&1 | "
                 "grep GOMP_SPINCOUNT | tail -n 1",
                 said[i], gt_program());
        CHECK(gt_run(cmd, out, sizeof out) == 0 && (strstr(out, "'0'") == NULL) == i, "%s", out);
    }
    snprintf(cmd, sizeof cmd,
             "env -u OMP_WAIT_POLICY -u OMP_NUM_THREADS -u OPENBLAS_NUM_THREADS '%s' run t1 "
             "--cases '%s' --cache none --base fp32 --run "
             "'sh -c \"env | grep -c -e OMP_WAIT -e _THREAD >%s/env; exit 77\"'",
             gt_program(), gt_cases(), gt_tmpdir());
    gt_run(cmd, out, sizeof out);
    snprintf(cmd, sizeof cmd, "cat %s/env", gt_tmpdir());
    CHECK(gt_run(cmd, out, sizeof out) == 0 && !strcmp(out, "0\n"), "%s", out);
}

DP_TEST(program, bad_usage_is_named_and_exits_2) {
    const struct {
        const char *args, *says;
    } bad[] = {{"", "Usage"},
               {"walk", "'walk' is not a command"},
               {"run", "name a case"},
               {"run --chain fp17 smoke-kda", "'fp17' is not known"},
               {"run --ranks 0 smoke-kda", "'0' is not a number from 1 to 4096"},
               {"run --ranks 1, --base fp1 smoke-kda", "'fp1' is not known"},
               {"run --fault sloth smoke-kda", "sloth"},
               {"run --frobnicate", "frobnicate"},
               {"run no-such-case", "no-such-case.case"},
               {"run --id smoke-kda", "NAME:key=value"},
               {"run --id smoke-kda:ranks=x", "'ranks=x' is not known"},
               {"run --id smoke-kda:speed=9", "'speed=9' is not known"},
               {"truth smoke-kda", "output file"},
               {"truth smoke-conv -o /tmp/x.safetensors", "no recurrence"},
               {"report", "name the folder"},
               {"run --out /proc/nowhere/x smoke-kda", "/proc/nowhere/x"},
               {"run --bits 3", "bits"}};
    for (size_t i = 0; i < sizeof bad / sizeof *bad; i++) {
        char args[1024];
        snprintf(args, sizeof args, "%s%s%s", bad[i].args,
                 *bad[i].args && strcmp(bad[i].args, "walk") && strncmp(bad[i].args, "report", 6)
                     ? " --cases "
                     : "",
                 *bad[i].args && strcmp(bad[i].args, "walk") && strncmp(bad[i].args, "report", 6)
                     ? gt_cases()
                     : "");
        const int rc = run(args);
        CHECK(rc == 2, "'%s': exit status %d: %s", args, rc, out);
        CHECK(strstr(out, bad[i].says), "'%s' should say '%s': %s", args, bad[i].says, out);
    }
}

/* An unwritable output is refused before the work, not after it; a device is written to and stays
 * one. */
DP_TEST(program, output_that_cannot_be_written_is_refused_first) {
    static const char *const to[] = {"run smoke-kda --json", "judge --inputs x --outputs y --json",
                                     "check smoke-kda --json", "truth smoke-kda -o",
                                     "inputs smoke-kda -o"};
    char args[1200], dir[600];
    for (size_t i = 0; i < sizeof to / sizeof *to; i++) {
        snprintf(args, sizeof args, "%s %s/no/such/file.case", to[i], gt_tmpdir());
        const int rc = run(args);
        CHECK(rc == 2 && strstr(out, "/no/such/file.case: cannot be written: No such file") &&
                  !strstr(out, "VERDICT") && !strstr(out, "pass"),
              "'%s': status %d: %s", args, rc, out);
    }
    snprintf(args, sizeof args, "run smoke-kda --json %s", gt_tmpdir());
    CHECK(run(args) == 2 && strstr(out, "cannot be written: Is a directory"), "%s", out);
    snprintf(args, sizeof args, "shrink weak-heads --fault merge-scaled -o %s/a.txt", gt_tmpdir());
    CHECK(run(args) == 2 && strstr(out, "a.txt: the name of a case file ends in .case") &&
              !strstr(out, "tried"),
          "%s", out);
    snprintf(dir, sizeof dir,
             "cd '%s' && mkfifo pipe && ({ timeout 200 cat pipe; touch end; } >read 2>&1 &)",
             gt_tmpdir());
    REQUIRE(!gt_run(dir, out, sizeof out), "%s", out);
    snprintf(args, sizeof args, "inputs smoke-kda -o %s/pipe", gt_tmpdir());
    CHECK(run(args) == 0, "%s", out);
    snprintf(dir, sizeof dir,
             "cd '%s'; until test -e end; do sleep 0.05; done; test -p pipe -a -s read",
             gt_tmpdir());
    CHECK(!gt_run(dir, out, sizeof out), "a pipe was replaced by a file, or got nothing");
}

DP_TEST(program, record_and_page_name_the_command_that_made_them) {
    char args[1200];
    snprintf(args, sizeof args,
             "run t1 --ranks 1 --base fp32 --cases %s --cache none --json '%s/it is.json' && cat "
             "%s/it*.json",
             gt_cases(), gt_tmpdir(), gt_tmpdir());
    CHECK(run(args) == 0 &&
              strstr(out, "\"command\":\"deltaproof run t1 --ranks 1 --base fp32 --cases ") &&
              strstr(out, "/it is.json'\""),
          "%s", out);
}

/* Several commands refuse a shared option alike, naming option, value and the allowed values. */
DP_TEST(program, shared_options_are_refused_alike_by_every_command) {
    static const char *const command[] = {"run", "bisect stage", "shrink", "check"};
    static const struct {
        const char *args, *says;
    } bad[] = {{"--ranks 4x", "'4x' is not a number from 1 to 4096"},
               {"--ranks 5000", "'5000' is not a number from 1 to 4096"},
               {"--base fp1", "'fp1' is not known; one of fp64 fp32 bf16"},
               {"--chain fp17", "'fp17' is not known; one of fp64 fp32 tf32x3"},
               {"--exchange tree", "--exchange tree: 'tree' is not known; one of allgather ring"},
               {"--fault sloth", "--fault sloth: not known"},
               {"--design chunk=16", "--design is said of --subject"},
               {"--limit 0", "--limit 0: must be seconds"},
               {"--limit 3s", "--limit 3s: must be seconds"},
               {"--ranks ''", "--ranks: the list is empty"}};
    for (size_t k = 0; k < sizeof command / sizeof *command; k++) {
        char args[200];
        for (size_t i = 0; i < sizeof bad / sizeof *bad; i++) {
            snprintf(args, sizeof args, "%s smoke-kda %s", command[k], bad[i].args);
            const int rc = run(args);
            CHECK(rc == 2 && strstr(out, bad[i].says) && !strncmp(out, "deltaproof ", 11),
                  "'%s': status %d: %s", args, rc, out);
        }
        snprintf(args, sizeof args, "%s smoke-kda --ranks 1,2", command[k]);
        if (k)
            CHECK(run(args) == 2 && strstr(out, "--ranks 1,2: takes one value here"), "'%s': %s",
                  args, out);
        if (k) CHECK(run(command[k]) == 2 && strstr(out, "name a case"), "%s: %s", command[k], out);
    }
}

/* Where ranks cannot own tokens as asked, a row says why: no run is left out in silence. */
DP_TEST(program, owners_that_a_case_cannot_have_are_skipped_with_their_reason) {
    static const struct {
        const char *args, *says;
    } x[] = {{"session-decode --own zigzag", "(ranks of a session, and of a whole step, own T / N"},
             {"smoke-step --own cyclic --ranks 2", "(ranks of a session, and of a whole step, own"},
             {"t1 --own zigzag --ranks 1", "(T = 1: a part of 1 ranks would have no token)"}};
    char args[200];
    for (size_t i = 0; i < sizeof x / sizeof *x; i++) {
        snprintf(args, sizeof args, "run %s --backend sim", x[i].args);
        CHECK(run(args) == 2 && strstr(out, x[i].says) && strstr(out, " 0 failed, 1 skipped"),
              "'%s': %s", args, out);
    }
}

DP_TEST(program, help_and_version_on_each_command) {
    const char *cmd[] = {"list", "run", "judge", "truth", "report"};
    CHECK(run("--help") == 0 && strstr(out, "COMMAND"), "%s", out);
    CHECK(run("--version") == 0 && strstr(out, "deltaproof "), "%s", out);
    for (size_t i = 0; i < sizeof cmd / sizeof *cmd; i++) {
        char a[64];
        snprintf(a, sizeof a, "%s --help", cmd[i]);
        CHECK(run(a) == 0 && strstr(out, "Usage: deltaproof"), "%s: %s", a, out);
        snprintf(a, sizeof a, "%s --version", cmd[i]);
        CHECK(run(a) == 0 && strstr(out, "deltaproof "), "%s: %s", a, out);
    }
}

DP_TEST(program, list_names_every_case_keys_and_faults) {
    char a[1024];
    snprintf(a, sizeof a, "list --cases '%s'", gt_cases());
    CHECK(run(a) == 0 && strstr(out, "kda-long ") && strstr(out, "chain-reflect-k32 "), "%s", out);
    snprintf(a, sizeof a, "list smoke-k --cases '%s'", gt_cases());
    CHECK(run(a) == 0 && !strncmp(out, "smoke-kda ", 10) && !strstr(out, "mkda"), "%s", out);
    snprintf(a, sizeof a, "list smokes --cases '%s'", gt_cases());
    CHECK(run(a) == 2 && strstr(out, "no case has smokes in its name"), "%s", out);
    CHECK(run("list --keys") == 0 && strstr(out, "cu_seqlens"), "%s", out);
    CHECK(run("list --faults") == 0 && strstr(out, "merge-nearest-first"), "%s", out);
}

DP_TEST(program, list_refuses_what_it_would_not_read) {
    static const struct {
        const char *args, *says;
    } row[] = {{"list --keys --json -", "--json -: goes without"},
               {"list --recurrences --json -", "--json -: goes without"},
               {"list --schema --json -", "--json -: goes without"},
               {"list --exchanges --pieces 100", "one list at a time"},
               {"list --keys --faults --json -", "one list at a time"},
               {"list kda --faults", "kda: is part of a case's name"}};
    for (size_t i = 0; i < sizeof row / sizeof *row; i++)
        CHECK(run(row[i].args) == 2 && strstr(out, row[i].says), "%s: %s", row[i].args, out);
}

/* A pipe into another program: the table goes to standard error. */
DP_TEST(program, results_on_standard_output_stand_there_alone) {
    static const char *const args[] = {
        "check t1 --base fp32 --only repeat", "check t1 --base fp32 --only packed",
        "carry t1 --steps 10", "differ t1 --backend sim --base fp32 --backend sim --base bf16"};
    for (size_t i = 0; i < sizeof args / sizeof *args; i++) {
        char a[512];
        snprintf(a, sizeof a, "%s --cases '%s' --json - 2>/dev/null", args[i], gt_cases());
        run(a);
        json_t *list = json_loads(out, 0, NULL);
        CHECK(json_array_size(list) > 0, "%s: %s", a, out);
        json_decref(list);
    }
}

DP_TEST(program, explain_keeps_its_record_below_tmpdir) {
    char cmd[1024];
    snprintf(cmd, sizeof cmd, "TMPDIR=/nowhere '%s' explain smoke-kda:ranks=1", gt_program());
    CHECK(gt_run(cmd, out, sizeof out) == 2 && strstr(out, "/nowhere/deltaproof-explain-"), "%s",
          out);
}

DP_TEST(program, a_record_replays_bit_for_bit) {
    json_t *all = record("smoke-kda");
    REQUIRE(all, "no record");
    json_t *runs = json_object_get(all, "runs");
    const size_t n = json_array_size(runs);
    REQUIRE(n > 10, "%zu runs", n);
    for (size_t i = 3; i < n; i += GT_SANITIZED ? 36 : 9) {
        json_t *r = json_array_get(runs, i);
        char a[512];
        if (strcmp(json_string_value(json_object_get(r, "backend")), "sim")) continue;
        snprintf(a, sizeof a, "--id '%s'", json_string_value(json_object_get(r, "id")));
        json_t *again = record(a);
        REQUIRE(again, "no record");
        json_t *r2 = json_array_get(json_object_get(again, "runs"), 0);
        CHECK(json_array_size(json_object_get(again, "runs")) == 1, "%s gives %zu runs", a,
              json_array_size(json_object_get(again, "runs")));
        CHECK(json_equal(json_object_get(r, "tensors"), json_object_get(r2, "tensors")),
              "%s: tensors differ", a);
        CHECK(json_equal(json_object_get(r, "chain"), json_object_get(r2, "chain")),
              "%s: chain differs", a);
        json_decref(again);
    }
    json_decref(all);
}

DP_TEST(program, the_record_has_what_its_schema_promises) {
    json_t *all = record("smoke-kda smoke-chain smoke-conv");
    REQUIRE(all, "no record");
    CHECK(json_integer_value(json_object_get(all, "schema_version")) == 1, "schema_version");
    CHECK(!strcmp(json_string_value(json_object_get(all, "verdict")), "pass"), "verdict");
    const char *want[] = {"o",  "final_state", "S_in", "M",     "H",      "dq",
                          "dk", "dv",          "dg",   "dbeta", "dA_log", "ddt_bias"};
    size_t i, t;
    json_t *run_, *ten;
    int skipped = 0, counted = 0;
    json_array_foreach(json_object_get(all, "runs"), i, run_) {
        const char *id = json_string_value(json_object_get(run_, "id")),
                   *verdict = json_string_value(json_object_get(run_, "verdict"));
        counted++;
        if (!strcmp(verdict, "skipped")) {
            skipped++;
            CHECK(json_string_length(json_object_get(run_, "why")) > 0,
                  "%s is skipped without a reason", id);
            continue;
        }
        CHECK(json_object_get(json_object_get(run_, "truth"), "radius"), "%s: no radius", id);
        if (!strcmp(json_string_value(json_object_get(run_, "case")), "smoke-kda") &&
            json_integer_value(json_object_get(run_, "ranks")) == 4)
            for (size_t w = 0; w < sizeof want / sizeof *want; w++) {
                int found = 0;
                json_array_foreach(
                    json_object_get(run_, "tensors"), t,
                    ten) if (!strcmp(json_string_value(json_object_get(ten, "name")), want[w])) {
                    found = 1;
                    CHECK(json_array_size(json_object_get(ten, "per_rank")) == 4, "%s: %s", id,
                          want[w]);
                    CHECK(json_object_get(ten, "worst_token") && json_object_get(ten, "bound") &&
                              json_object_get(ten, "ratio"),
                          "%s: %s", id, want[w]);
                }
                CHECK(found, "%s: no tensor %s", id, want[w]);
            }
    }
    json_t *tot = json_object_get(all, "totals");
    CHECK(json_integer_value(json_object_get(tot, "skipped")) == skipped && skipped == 2,
          "skipped: kda and conv on the missing device");
    CHECK(json_integer_value(json_object_get(tot, "pass")) +
                  json_integer_value(json_object_get(tot, "fail")) +
                  json_integer_value(json_object_get(tot, "unjudged")) + skipped ==
              counted,
          "totals");
    json_decref(all);
}

DP_TEST(program, a_fault_makes_it_fail_with_status_1_and_says_where) {
    char a[1024];
    snprintf(a, sizeof a,
             "run --cases '%s' --cache none --id "
             "'smoke-kda:ranks=4,base=fp32,chain=fp32,merge=allgather,fault=merge-half-v'",
             gt_cases());
    const int rc = run(a);
    CHECK(rc == 1, "exit status %d: %s", rc, out);
    CHECK(strstr(out, "VERDICT: FAIL (0 passed, 1 failed, 0 skipped, 0 unjudged)"), "%s", out);
    CHECK(strstr(out, "rank") && strstr(out, "head"), "no place: %s", out);
}

DP_TEST(program, a_case_that_cannot_be_judged_gives_status_2_and_keeps_the_others) {
    char a[2048];
    snprintf(a, sizeof a, "%s/broken.case", gt_tmpdir());
    FILE *f = fopen(a, "w");
    REQUIRE(f, "cannot write");
    fputs("reason = a\nsource = b\nop = kda\nT = 10\nK = 8\nranks = 3\n", f);
    fclose(f);
    snprintf(a, sizeof a, "run --cases '%s' --cache none '%s/broken.case' smoke-conv", gt_cases(),
             gt_tmpdir());
    const int rc = run(a);
    CHECK(rc == 2, "exit status %d: %s", rc, out);
    CHECK(strstr(out, "broken.case:6: ranks = 3") && strstr(out, "pass     smoke-conv"), "%s", out);
}

DP_TEST(program, truth_writes_values_and_radii) {
    char a[2048];
    snprintf(a, sizeof a,
             "truth --cases '%s' --cache none smoke-gdn --bits 128 -o '%s/t.safetensors'",
             gt_cases(), gt_tmpdir());
    CHECK(run(a) == 0, "%s", out);
    snprintf(a, sizeof a, "head -c 4000 '%s/t.safetensors' | tr -d '\\0' | head -c 3500",
             gt_tmpdir());
    gt_run(a, out, sizeof out);
    CHECK(strstr(out, "\"o.lo\"") && strstr(out, "\"o.radius\"") && strstr(out, "\"dq\""), "%s",
          out);
}

/* The truth's own file, in every shape that there is, is what judge reads and passes. */
DP_TEST(program, a_truth_written_as_a_file_passes) {
    static const char *const shape[DP_NMODELS] = {[DP_MKDA] = "R = 2\nHV = 2\n",
                                                  [DP_DELTAPRODUCT] = "R = 3\nHV = 2\n",
                                                  [DP_DPLR] = "H = 2\n",
                                                  [DP_GDN] = "HV = 2\n",
                                                  [DP_KDA] = "HV = 2\nl2norm = yes\n",
                                                  [DP_GDN2] = "HV = 2\n",
                                                  [DP_GLA] = "HV = 2\n",
                                                  [DP_SSD] = "HV = 2\n"};
    for (int i = 0; i < 4 * DP_NMODELS; i += GT_SANITIZED ? 5 : 1) {
        const int model = i / 4, packed = i & 1, backward = i >> 1 & 1;
        char cmd[4096];
        snprintf(cmd, sizeof cmd,
                 "cd '%s' && export OMP_NUM_THREADS=1 && printf 'reason = r\nsource = s\nop = "
                 "%s\nT = 33\nK = 6\nV = 4\n%s"
                 "gate = softplus\ns0_scale = 1\n%s%s' >t.case && "
                 "'%s' inputs t.case -o in.safetensors && "
                 "'%s' truth t.case --cache none -o out.safetensors && "
                 "'%s' judge --inputs in.safetensors --outputs out.safetensors --base fp64 "
                 "--cache none",
                 gt_tmpdir(), dp_models[model].name, shape[model],
                 packed ? "cu_seqlens = 0,12,12,33\n" : "",
                 backward ? "dstate = yes\n" : "backward = no\n", gt_program(), gt_program(),
                 gt_program());
        CHECK(gt_run(cmd, out, sizeof out) == 0 && strstr(out, "VERDICT: PASS (1 passed, 0 failed"),
              "%s, packed %d, backward %d: %s", dp_models[model].name, packed, backward, out);
        CHECK(strstr(out, backward ? "pass     ds0 " : "pass     final_state "), "%s", out);
    }
}

DP_TEST(program, a_damaged_truth_is_recomputed_and_said_so) {
    char a[2048];
    snprintf(a, sizeof a,
             "rm -rf '%s/c2'; '%s' run --cases '%s' --cache '%s/c2' smoke-mkda2 --ranks 3",
             gt_tmpdir(), gt_program(), gt_cases(), gt_tmpdir());
    CHECK(gt_run(a, out, sizeof out) == 0 && !strstr(out, "damaged"), "%s", out);
    snprintf(a, sizeof a,
             "for f in '%s'/c2/*; do printf X | dd of=\"$f\" bs=1 seek=200 conv=notrunc "
             "2>/dev/null; done; '%s' run --cases '%s' --cache '%s/c2' smoke-mkda2 --ranks 3",
             gt_tmpdir(), gt_program(), gt_cases(), gt_tmpdir());
    CHECK(gt_run(a, out, sizeof out) == 0 &&
              strstr(out, ".truth is damaged (checksum does not match; made by commit ") &&
              strstr(out, "): computing it again"),
          "%s", out);
    snprintf(a, sizeof a, "'%s' run --cases '%s' --cache '%s/c2' smoke-mkda2 --ranks 3",
             gt_program(), gt_cases(), gt_tmpdir());
    CHECK(gt_run(a, out, sizeof out) == 0 && !strstr(out, "damaged"), "%s", out);
}

/* Which truth judged is in the record; both give the same verdicts and the same errors to many
 * digits. */
DP_TEST(program, double_double_truth_judges_as_mpfr_does) {
    json_t *a = record("smoke-mkda2 --backend sim --truth mpfr"),
           *b = record("smoke-mkda2 --backend sim --truth dd"), *x, *y;
    size_t i, k;
    REQUIRE(a && b, "no record");
    json_t *p = json_object_get(a, "runs"), *q = json_object_get(b, "runs");
    CHECK(json_array_size(p) == json_array_size(q) && json_array_size(p) > 0, "%zu and %zu runs",
          json_array_size(p), json_array_size(q));
    json_array_foreach(p, i, x) {
        json_t *r = json_array_get(q, i), *t = json_object_get(r, "truth"),
               *audit = json_object_get(t, "audit");
        CHECK(!strcmp(json_string_value(json_object_get(json_object_get(x, "truth"), "kind")),
                      "mpfr"),
              "kind");
        CHECK(!strcmp(json_string_value(json_object_get(t, "kind")), "double-double") &&
                  json_integer_value(json_object_get(t, "bits")) == 98,
              "kind");
        CHECK(json_integer_value(json_object_get(audit, "columns")) == 2 &&
                  json_real_value(json_object_get(audit, "worst")) < 0.01 &&
                  json_string_value(json_object_get(audit, "seed")),
              "audit");
        CHECK(!strcmp(json_string_value(json_object_get(x, "verdict")),
                      json_string_value(json_object_get(r, "verdict"))),
              "verdict");
        json_array_foreach(json_object_get(x, "tensors"), k, y) {
            const double e = json_real_value(json_object_get(y, "rel_fro")),
                         f = json_real_value(json_object_get(
                             json_array_get(json_object_get(r, "tensors"), k), "rel_fro"));
            CHECK(e == f || (e - f < 1e-12 * e && f - e < 1e-12 * e), "%s: %.17g and %.17g",
                  json_string_value(json_object_get(y, "name")), e, f);
        }
    }
    json_decref(a);
    json_decref(b);
    char args[1024];
    snprintf(args, sizeof args, "run nan --truth dd --cache none --cases '%s'", gt_cases());
    CHECK(run(args) == 2 && strstr(out, "nan.case") && strstr(out, "not finite"), "%s", out);
    snprintf(args, sizeof args, "run smoke-kda --truth exact --cases '%s'", gt_cases());
    CHECK(run(args) == 2 && strstr(out, "exact"), "%s", out);
}

/* A sound cache entry whose o is wrong by 2^-40 of it: only the audit can see that. */
DP_TEST(program, a_failed_audit_exits_2_and_names_the_row) {
    enum { HEADER = 152 }; /* of an entry (ref/files/cache.c) */
    static char file[1 << 23];
    char args[2048], dir[512];
    snprintf(dir, sizeof dir, "%s/audit", gt_tmpdir());
    snprintf(args, sizeof args,
             "run smoke-kda --truth dd --backend sim --ranks 1 --base fp32 --chain fp32 --cases "
             "'%s' --cache '%s'",
             gt_cases(), dir);
    REQUIRE(run(args) == 0, "%s", out);
    snprintf(args, sizeof args, "rm '%s'/*.audit && mv '%s'/*.truth '%s/t'", dir, dir, dir);
    char names[512], path[1024];
    snprintf(path, sizeof path, "basename '%s'/*.truth", dir);
    REQUIRE(gt_run(path, names, sizeof names) == 0 && gt_run(args, out, sizeof out) == 0, "%s",
            out);
    names[strcspn(names, "\n")] = 0;
    snprintf(path, sizeof path, "%s/t", dir);
    FILE *f = fopen(path, "rb");
    REQUIRE(f, "%s", path);
    const size_t n = fread(file, 1, sizeof file, f);
    fclose(f);
    REQUIRE(n > HEADER + 8 * 8192 + 16 && n < sizeof file, "%zu bytes", n);
    for (size_t i = 0; i < 8192; i++) { /* o.hi, behind the header */
        double x;
        memcpy(&x, file + HEADER + 8 * i, 8);
        x += ldexp(x, -40);
        memcpy(file + HEADER + 8 * i, &x, 8);
    }
    XXH128_canonical_t sum;
    XXH128_canonicalFromHash(&sum, XXH3_128bits(file, n - sizeof sum));
    memcpy(file + n - sizeof sum, &sum, sizeof sum);
    snprintf(path, sizeof path, "%s/%s", dir, names);
    f = fopen(path, "wb");
    REQUIRE(f && fwrite(file, 1, n, f) == n && !fclose(f), "%s", path);
    snprintf(args, sizeof args,
             "run smoke-kda --truth dd --backend sim --ranks 1 --base fp32 --chain fp32 --cases "
             "'%s' --cache '%s'",
             gt_cases(), dir);
    CHECK(run(args) == 2 &&
              strstr(out, "smoke-kda.case: audit of the double-double truth (seed ") &&
              strstr(out, "): o, head ") && strstr(out, "token"),
          "%s", out);
}

DP_TEST(program, ranks_that_do_not_divide_are_refused_by_file) {
    static const char *const with[] = {"check smoke-kda", "bisect stage smoke-kda",
                                       "bisect precision smoke-kda",
                                       "shrink smoke-kda --fault merge-scaled"};
    char cmd[2048], out[4096];
    for (size_t i = 0; i < sizeof with / sizeof *with; i++) {
        snprintf(cmd, sizeof cmd, "%s %s --cases %s --ranks 7", gt_program(), with[i], gt_cases());
        const int rc = gt_run(cmd, out, sizeof out);
        CHECK(rc == 2 && strstr(out, "smoke-kda.case: T = 160: must be a multiple of --ranks 7"),
              "%s: exit status %d: %s", with[i], rc, out);
    }
    snprintf(cmd, sizeof cmd, "%s check smoke-kda --cases %s --tokens 161", gt_program(),
             gt_cases());
    CHECK(gt_run(cmd, out, sizeof out) == 2 &&
              strstr(out, "smoke-kda.case: --tokens 161: must be a multiple"),
          "%s", out);
}
