/* Ranks as processes of mpirun, with the program that was built with MPI. They have the digest of
 * the simulated ranks. If one is gone or silent, all end. Without MPI there is a message. */
#include "gt.h"

#include <jansson.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static const char *program(void) {
    const char *p = getenv("DP_MPI_PROGRAM");
    return p && *p ? p : NULL;
}

#define NEEDS_MPI \
    if (!program()) SKIP("no mpicc was found, or SAN=1: there is no program with MPI")

/* As root, more processes than cores: Open MPI wants to be told. */
#define ALLOW                                                          \
    "OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1 "       \
    "OMPI_MCA_rmaps_base_oversubscribe=1 OMPI_MCA_btl=self,vader,tcp " \
    "OMPI_MCA_btl_vader_single_copy_mechanism=none OMP_NUM_THREADS=1 "

/* `program run args` in n processes (0: without mpirun); its exit status. */
static int run(const char *with, int n, const char *args, char *out, int size) {
    char cmd[4096], start[256] = "";
    if (n) snprintf(start, sizeof start, ALLOW "mpirun -np %d", n);
    snprintf(cmd, sizeof cmd, "%s '%s' %s --cases '%s'", start, with, args, gt_cases());
    return gt_run(cmd, out, size);
}

static void digest(const char *out, char hex[40]) {
    const char *at = strstr(out, "digest: ");
    *hex = 0;
    if (at) sscanf(at, "digest: %32s", hex);
    CHECK(strlen(hex) == 32, "no digest: %.2000s", out);
}

/* With truths and draws from a folder that the first run fills. */
static int run_hard(const char *with, int n, const char *backend, char *out, int size) {
    char args[1024];
    snprintf(args, sizeof args,
             "run packed-across initial-state smoke-step --base bf16,fp32 --chain fp32,tf32rz "
             "--ranks 1,4 --cache '%s' --backend %s",
             gt_cache(), backend);
    return run(with, n, args, out, size);
}

DP_TEST(mpi, four_processes_have_the_digest_of_the_simulated_ranks) {
    NEEDS_MPI;
    char out[1 << 16], sim[40], mpi[40], both[40];
    REQUIRE(run_hard(gt_program(), 0, "sim", out, sizeof out) == 0, "%.4000s", out);
    digest(out, sim);
    REQUIRE(run_hard(program(), 4, "mpi", out, sizeof out) == 0, "%.4000s", out);
    digest(out, mpi);
    CHECK(!strcmp(sim, mpi), "%s, processes have %s", sim, mpi);
    CHECK(strstr(out, " 0 failed, 0 skipped, 0 unjudged)"), "%.4000s", out);
    REQUIRE(run_hard(program(), 4, "mpi,sim", out, sizeof out) == 0, "%.4000s", out);
    digest(out, both);
    CHECK(!strcmp(sim, both), "%s, both together have %s", sim, both);
}

/* Parts of any length, several of a process or none. */
DP_TEST(mpi, processes_that_own_several_parts_have_that_digest_too) {
    NEEDS_MPI;
    char out[1 << 16], args[1024], sim[40], mpi[40];
    const char *const owned = "run packed-across owned-conv --own zigzag,empty,cyclic,grid --base "
                              "fp32 --chain fp32 --ranks 2,3 --cache '%s' --backend %s";
    snprintf(args, sizeof args, owned, gt_cache(), "sim");
    REQUIRE(run(gt_program(), 0, args, out, sizeof out) == 0, "%.4000s", out);
    digest(out, sim);
    snprintf(args, sizeof args, owned, gt_cache(), "mpi");
    REQUIRE(run(program(), 3, args, out, sizeof out) == 0, "%.4000s", out);
    digest(out, mpi);
    CHECK(!strcmp(sim, mpi), "%s, processes have %s", sim, mpi);
    CHECK(strstr(out, "(24 passed, 0 failed, 0 skipped, 0 unjudged)"), "%.4000s", out);
}

/* Heads in place of tokens: query heads of two ranks, tokens owned in parts, ranks without any,
 * gradients that are made where the token is. Rows that look back, and rotate. */
DP_TEST(mpi, processes_that_share_heads_or_hand_on_halos_have_that_digest_too) {
    NEEDS_MPI;
    static const char *const runs[] = {
        "exchange-kda exchange-heads --own even,cyclic --ranks 2,4 --exchange heads",
        "smoke-gdn2 smoke-dplr --ranks 2 --exchange allgather,heads,ring", /* one by one */
        "smoke-dplr --recurrence mamba3 --own even,empty,cyclic --ranks 2 --exchange scan,heads",
        "smoke-dplr --recurrence mamba3 --own even,uneven --ranks 3,4"}; /* with halos */
    char out[1 << 16], args[1024], sim[40], mpi[40];
    for (int i = 0; i < 4; i++) {
        const char *const heads = "run %s --base bf16 --chain fp32 --cache '%s' --backend %s";
        snprintf(args, sizeof args, heads, runs[i], gt_cache(), "sim");
        REQUIRE(run(gt_program(), 0, args, out, sizeof out) == 0, "%.4000s", out);
        digest(out, sim);
        snprintf(args, sizeof args, heads, runs[i], gt_cache(), "mpi");
        REQUIRE(run(program(), 4, args, out, sizeof out) == 0, "%.4000s", out);
        digest(out, mpi);
        CHECK(!strcmp(sim, mpi), "%s, processes have %s", sim, mpi);
        CHECK(strstr(out, " 0 failed, 0 skipped, 0 unjudged)"), "%.4000s", out);
    }
}

/* Four heads do not divide among five ranks, simulated or not. */
DP_TEST(mpi, refused_heads_count_in_both_digests) {
    NEEDS_MPI;
    char out[1 << 16], args[1024], hex[2][40];
    for (int i = 0; i < 2; i++) {
        snprintf(args, sizeof args,
                 "run exchange-kda --ranks 2,5 --exchange heads --base bf16 --chain fp32 "
                 "--cache '%s' --backend %s",
                 gt_cache(), i ? "mpi" : "sim");
        REQUIRE(run(i ? program() : gt_program(), i ? 5 : 0, args, out, sizeof out) == 0, "%.4000s",
                out);
        digest(out, hex[i]);
        CHECK(strstr(out, "(1 passed, 0 failed, 1 skipped, 0 unjudged)"), "%.4000s", out);
    }
    CHECK(!strcmp(hex[0], hex[1]), "%s, processes have %s", hex[0], hex[1]);
}

DP_TEST(mpi, kernels_and_processes_are_compared_and_checked) {
    NEEDS_MPI;
    char out[1 << 16];
    const char *const differ =
        "differ smoke-kda --cache none --ranks 4 --bitwise --backend sim --base bf16 --merge ring "
        "--backend mpi --base bf16 --merge ring";
    CHECK(run(program(), 4, differ, out, sizeof out) == 0 && strstr(out, "S_in"), "%.4000s", out);
    const char *const scan =
        "differ smoke-kda --cache none --ranks 4 --bitwise --backend sim --base "
        "bf16 --merge scan --payload m-i --backend mpi --base bf16 --merge "
        "scan --payload m-i";
    CHECK(run(program(), 4, scan, out, sizeof out) == 0 && strstr(out, "S_in"), "%.4000s", out);
    char cmd[4096];
    snprintf(cmd, sizeof cmd,
             ALLOW "mpirun -np 2 '%s' check smoke-kda --cases '%s' --ranks 2 --base fp32 --chain "
                   "fp32 --backend mpi",
             program(), gt_cases());
    CHECK(gt_run(cmd, out, sizeof out) == 0 && strstr(out, "CHECK: PASS"), "%.4000s", out);
}

/* The output of a run of which one process gets a signal after the first result. */
static int disturbed(int who, const char *signal, const char *args, char *out, int size) {
    char cmd[4096];
    snprintf(cmd, sizeof cmd,
             "cd '%s'; export DELTAPROOF_SILENCE=%d\n" ALLOW
             "mpirun -np 3 '%s' run smoke-step packed-across initial-state --cases '%s' --cache "
             "none --backend mpi --ranks 3 --json mpi.json %s >said 2>&1 & m=$!\n"
             "for i in $(seq 1200); do grep -q ranks=3 said && break; sleep 0.05; done\n"
             "set -- $(pgrep -P $m | sort -n); kill -%s $%d || exit 99\n"
             "wait $m; rc=$?; cat said; exit $rc",
             gt_tmpdir(), who ? 30 : 4, program(), gt_cases(), args, signal, who + 1);
    return gt_run(cmd, out, size);
}

/* 1: the file holds this text, and nothing stands beside it. */
static int untouched(const char *name, const char *text) {
    char cmd[2048], out[4096], want[256];
    snprintf(want, sizeof want, "%s\n1\n", text);
    snprintf(cmd, sizeof cmd, "cat '%s/%s'; ls -d '%s/%s'* | wc -l", gt_tmpdir(), name, gt_tmpdir(),
             name);
    return gt_run(cmd, out, sizeof out) == 0 && !strcmp(out, want);
}

DP_TEST(mpi, a_rank_that_is_killed_ends_all_by_its_name) {
    NEEDS_MPI;
    char out[1 << 16];
    snprintf(out, sizeof out, "echo '[earlier]' >'%s/mpi.json'", gt_tmpdir());
    REQUIRE(gt_run(out, out, sizeof out) == 0, "%s", out);
    const int rc = disturbed(2, "KILL", "", out, sizeof out);
    CHECK(rc != 0 && rc != 99, "exit %d: %.4000s", rc, out);
    CHECK(strstr(out, "deltaproof: rank 2 (process ") && strstr(out, "has ended: all end"),
          "%.4000s", out);
    CHECK(strstr(out, "VERDICT: INTERRUPTED"), "%.4000s", out);
    CHECK(untouched("mpi.json", "[earlier]"), "an earlier record is lost: %.4000s", out);
}

DP_TEST(mpi, a_rank_that_is_silent_ends_all_by_its_name) {
    NEEDS_MPI;
    char out[1 << 16];
    const int rc = disturbed(2, "STOP", "--limit 1", out, sizeof out);
    CHECK(rc != 0 && rc != 99, "exit %d: %.4000s", rc, out);
    CHECK(strstr(out, "waited 1 s for ") && strstr(out, "deltaproof: rank 2 (process ") &&
              strstr(out, "does not answer"),
          "%.4000s", out);
    CHECK(!strstr(out, "rank 1 (process") || !strstr(strstr(out, "rank 1 (process"), "does not") ||
              strstr(out, "rank 1 (process") < strstr(out, ": all end"),
          "the wrong one is blamed: %.4000s", out);
}

DP_TEST(mpi, a_first_process_that_is_stopped_ends_all_by_its_name) {
    NEEDS_MPI;
    char out[1 << 16];
    const int rc = disturbed(0, "STOP", "", out, sizeof out);
    CHECK(rc != 0 && rc != 99 && strstr(out, "deltaproof: rank 0 (process ") &&
              strstr(out, "has been silent for 4 s (stopped?): all end"),
          "exit %d: %.4000s", rc, out);
}

/* Cases over processes, one of which is killed after the first of them; then the same command once
 * more. */
DP_TEST(mpi, cases_are_shared_out_and_outlive_a_process) {
    NEEDS_MPI;
    char cmd[4096], out[1 << 16], want[40], got[40];
    const char *const cases = "run smoke-mkda2 packed-across initial-state smoke-step --base fp32 "
                              "--chain fp32 --ranks 1 --cache none --backend sim";
    REQUIRE(run(gt_program(), 0, cases, out, sizeof out) == 0, "%.4000s", out);
    digest(out, want);
    snprintf(cmd, sizeof cmd,
             "cd '%s'\n" ALLOW "mpirun -np 3 '%s' %s --cases '%s' --resume kept >said 2>&1 & m=$!\n"
             "for i in $(seq 2400); do ls kept/*.runs >/dev/null 2>&1 && break; sleep 0.02; done\n"
             "set -- $(pgrep -P $m | sort -n); kill -KILL $2; wait $m; rc=$?; cat said; exit $rc",
             gt_tmpdir(), program(), cases, gt_cases());
    const int rc = gt_run(cmd, out, sizeof out);
    CHECK(rc != 0 && strstr(out, "deltaproof: rank 1 (process ") &&
              strstr(out, "finished cases are in kept: the same command goes on"),
          "exit %d: %.4000s", rc, out);
    snprintf(cmd, sizeof cmd,
             "cd '%s' && before=$(ls kept/*.runs | wc -l) && [ $before -ge 1 ] && " ALLOW
             "mpirun -np 3 '%s' %s --cases '%s' --resume kept && ls kept/*.runs | wc -l",
             gt_tmpdir(), program(), cases, gt_cases());
    REQUIRE(gt_run(cmd, out, sizeof out) == 0, "%.4000s", out);
    digest(out, got);
    CHECK(!strcmp(want, got), "%s, gathered %s", want, got);
    CHECK(strstr(out, "\n4\n"), "not four cases are kept: %.4000s", out);
}

DP_TEST(mpi, what_is_missing_is_said_and_counted) {
    char out[1 << 16];
    CHECK(run(gt_program(), 0, "run smoke-kda --cache none --backend mpi", out, sizeof out) == 2 &&
              (strstr(out, "(this build has no MPI: make MPI=1)") ||
               strstr(out, "(not started by mpirun: ")) &&
              strstr(out, "0 failed, 1 skipped, 0 unjudged"),
          "%.4000s", out);
    NEEDS_MPI;
    CHECK(run(program(), 0, "run smoke-kda --cache none --backend mpi", out, sizeof out) == 2 &&
              strstr(out, "(not started by mpirun: ") &&
              strstr(out, "0 failed, 1 skipped, 0 unjudged"),
          "%.4000s", out);
    CHECK(run(program(), 2,
              "run smoke-kda --cache none --backend mpi --base fp32 --chain fp32 --ranks 2,4", out,
              sizeof out) == 0 &&
              strstr(out, "(4 ranks need as many processes, 2 were started)") &&
              strstr(out, "1 passed, 0 failed, 1 skipped, 0 unjudged") && !strchr(out, '\033'),
          "%.4000s", out);
}
