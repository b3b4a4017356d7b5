/* Ranks over NCCL as the processes of one torchrun, or one mpirun. The kernels run on the CPU; a
 * library replaces NCCL. They have the numbers of ranks that are threads. Hosts are network
 * namespaces; lost processes are named. */
#include "gt.h"

#include <jansson.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static const char *kernels(void) {
    const char *p = getenv("DP_KERNELS");
    return p && *p ? p : NULL;
}

#define NEEDS_KERNELS \
    if (!kernels()) SKIP("the kernels on the CPU are not built under SAN=1")

/* `with` starts the processes; one that lets others wait does so for ten minutes at most. */
static int run(const char *with, const char *args, char *out, int size) {
    static char cmd[8192];
    snprintf(cmd, sizeof cmd,
             "K='%s'; C='%s'; cd '%s'; export LD_LIBRARY_PATH=${K%%/*} OMP_NUM_THREADS=1 P=%d "
             "MASTER_ADDR=127.0.0.1\n"
             "export MASTER_PORT=$P A=\"%s --cases $C --cache %s\"\n%s",
             kernels(), gt_cases(), gt_tmpdir(), gt_port(), args, gt_cache(), with);
    return gt_run(cmd, out, size);
}

/* As torchrun starts three, the first last. */
#define TORCHRUN                                                                          \
    "export WORLD_SIZE=3\n"                                                               \
    "for r in 2 1; do RANK=$r LOCAL_RANK=$r timeout 600 $K run $A >said.$r 2>&1 & done\n" \
    "RANK=0 LOCAL_RANK=0 timeout 600 $K run $A; rc=$?; wait; cat said.1 said.2; exit $rc"

/* Two hosts: each sees its own end of a cable alone. */
#define HOSTS                                                                            \
    "a=dpa$P b=dpb$P; trap 'ip netns del $a; ip netns del $b' EXIT\n"                    \
    "ip netns add $a && ip netns add $b || exit 98\n"                                    \
    "ip link add x$P netns $a type veth peer name y$P netns $b || exit 98\n"             \
    "ip -n $a addr add 10.213.7.1/24 dev x$P; ip -n $b addr add 10.213.7.2/24 dev y$P\n" \
    "ip -n $a link set x$P up; ip -n $b link set y$P up\n"                               \
    "export MASTER_ADDR=10.213.7.1 WORLD_SIZE=2 LOCAL_RANK=0\n"                          \
    "RANK=1 timeout 600 ip netns exec $b $K run $A >said.1 2>&1 & p=$!\n"                \
    "RANK=0 timeout 600 ip netns exec $a $K run $A; rc=$?; wait $p; cat said.1; exit $rc"

static json_t *runs_of(const char *name) {
    char path[600];
    json_error_t e;
    snprintf(path, sizeof path, "%s/%s", gt_tmpdir(), name);
    json_t *j = json_load_file(path, 0, &e), *runs = json_incref(json_object_get(j, "runs"));
    json_decref(j);
    return runs;
}

static const char *word(const json_t *run, const char *key) {
    const char *s = json_string_value(json_object_get(run, key));
    return s ? s : "";
}

/* The same tensors with the same errors, up to the last bit of each that the record holds. */
static void same_numbers(const char *a, const char *b, size_t n) {
    json_t *x = runs_of(a), *y = runs_of(b);
    CHECK(json_array_size(x) == n && json_array_size(y) == n, "%zu and %zu runs, want %zu",
          json_array_size(x), json_array_size(y), n);
    for (size_t i = 0; i < json_array_size(x) && i < json_array_size(y); i++) {
        json_t *r = json_array_get(x, i), *s = json_array_get(y, i);
        CHECK(!strcmp(word(s, "verdict"), "pass"), "%s: %s", word(s, "id"), word(s, "why"));
        CHECK(json_equal(json_object_get(r, "tensors"), json_object_get(s, "tensors")) &&
                  json_array_size(json_object_get(s, "tensors")),
              "%s and %s are not the same", word(r, "id"), word(s, "id"));
    }
    json_decref(x);
    json_decref(y);
}

#define CASES "packed-across smoke-step smoke-conv --base fp32,bf16 --chain fp32 "

#define OWN "dplr-weak --recurrence mamba3 --ranks 2,3 --base fp32 --chain fp32 --backend "

DP_TEST(apart, processes_of_torchrun_have_the_numbers_of_threads) {
    NEEDS_KERNELS;
    char out[1 << 14];
    REQUIRE(
        run("$K run $A", CASES "--ranks 1,2,3 --backend cuda --json threads", out, sizeof out) == 0,
        "%.4000s", out);
    REQUIRE(run(TORCHRUN, CASES "--ranks 1,2,3 --backend nccl --json apart", out, sizeof out) == 0,
            "%.4000s", out);
    same_numbers("threads", "apart", 17);
    REQUIRE(run("$K run $A",
                "packed-across --ranks 3 --base fp32 --chain fp32 --exchange allgather,ring "
                "--payload full,bf16 --backend cuda --json threads",
                out, sizeof out) == 0,
            "%.4000s", out);
    REQUIRE(run(TORCHRUN,
                "packed-across --ranks 3 --base fp32 --chain fp32 --exchange allgather,ring "
                "--payload full,bf16 --backend nccl --json apart",
                out, sizeof out) == 0,
            "%.4000s", out);
    same_numbers("threads", "apart", 4);
    REQUIRE(run("$K run $A",
                "exchange-heads --ranks 3 --base fp32 --exchange heads --backend cuda --json "
                "threads",
                out, sizeof out) == 0,
            "%.4000s", out);
    REQUIRE(run(TORCHRUN,
                "exchange-heads --ranks 3 --base fp32 --exchange heads --backend nccl --json apart",
                out, sizeof out) == 0,
            "%.4000s", out);
    same_numbers("threads", "apart", 1);
    REQUIRE(run("$K run $A", OWN "cuda --json threads", out, sizeof out) == 0, "%.4000s", out);
    REQUIRE(run(TORCHRUN, OWN "nccl --json apart", out, sizeof out) == 0, "%.4000s", out);
    same_numbers("threads", "apart", 2);
    REQUIRE(run(TORCHRUN,
                "packed-across --ranks 3,8 --base fp32 --chain fp32 --backend nccl --way "
                "plain,windows --exchange allgather",
                out, sizeof out) == 0,
            "%.4000s", out);
    CHECK(strstr(out, "(8 ranks over NCCL: 3 processes were started)") &&
              strstr(out, "way=windows  (dpg_plan: the fast path does not take this problem") &&
              strstr(out, "VERDICT: PASS (1 passed, 0 failed, 3 skipped, 0 unjudged)"),
          "%.4000s", out);
}

/* Each opens the memory of the others. Two that share a device have no windows, and no rank has any
 * if one may not open the others'. */
DP_TEST(apart, processes_have_windows) {
    NEEDS_KERNELS;
    char out[1 << 14];
    const char *const all = "k128-v64 --ranks 3 --base bf16 --chain fp32 --backend nccl --way ";
    char ways[200];
    snprintf(ways, sizeof ways, "%splain,windows,windows-dh-only,windows-save-all", all);
    REQUIRE(run("export DP_CPU_CAPABILITY=90\n" TORCHRUN, ways, out, sizeof out) == 0, "%.4000s",
            out);
    CHECK(strstr(out, "VERDICT: PASS (4 passed, 0 failed, 0 skipped, 0 unjudged)"), "%.4000s", out);
    snprintf(ways, sizeof ways, "%splain,windows", all);
    REQUIRE(run("export DP_CPU_CAPABILITY=90 DP_CPU_DEVICES=2\n" TORCHRUN, ways, out, sizeof out) ==
                0,
            "%.4000s", out);
    CHECK(strstr(out, "(windows: processes need the fast path and a device each, of one host, "
                      "whose memory all may open)") &&
              strstr(out, "VERDICT: PASS (1 passed, 0 failed, 1 skipped, 0 unjudged)"),
          "%.4000s", out);
    REQUIRE(run("export DP_CPU_CAPABILITY=90 DP_CPU_IPC_DENIED=1\n" TORCHRUN, ways, out,
                sizeof out) == 0,
            "%.4000s", out);
    CHECK(strstr(out, "(windows: processes need the fast path and a device each, of one host, "
                      "whose memory all may open)") &&
              strstr(out, "VERDICT: PASS (1 passed, 0 failed, 1 skipped, 0 unjudged)"),
          "%.4000s", out);
}

DP_TEST(apart, two_hosts_are_two_network_namespaces) {
    NEEDS_KERNELS;
    char out[1 << 14];
    const char *const small = "packed-across --base fp32 --chain fp32 --ranks 2 ";
    char threads[400], hosts[400];
    snprintf(threads, sizeof threads, "%s--backend cuda --json one-host", small);
    snprintf(hosts, sizeof hosts, "%s--backend nccl --json two-hosts", small);
    REQUIRE(run("$K run $A", threads, out, sizeof out) == 0, "%.4000s", out);
    const int rc = run(HOSTS, hosts, out, sizeof out);
    if (rc == 98) SKIP("no network namespaces here: %.200s", out);
    REQUIRE(rc == 0, "%.4000s", out);
    same_numbers("one-host", "two-hosts", 2);
}

DP_TEST(apart, a_rank_that_is_killed_within_a_gather_ends_all_by_its_name) {
    NEEDS_KERNELS;
    char out[1 << 14];
    const int rc =
        run("export DP_CPU_NCCL_DIES='2 2 9'\n" TORCHRUN,
            "packed-across --ranks 3 --base fp32 --chain fp32 --backend nccl", out, sizeof out);
    CHECK(rc && rc != 124 && strstr(out, "deltaproof: rank 2 (process ") &&
              strstr(out, "has ended: all end") && strstr(out, "VERDICT: INTERRUPTED"),
          "exit %d: %.4000s", rc, out);
}

/* Kernels of the others wait for what it would have stored. */
DP_TEST(apart, a_rank_that_is_killed_behind_its_windows_ends_all_by_its_name) {
    NEEDS_KERNELS;
    char out[1 << 14];
    const int rc = run("export DP_CPU_CAPABILITY=90 DP_CPU_IPC_DIES=1\n" TORCHRUN,
                       "k128-v64 --ranks 3 --base bf16 --chain fp32 --backend nccl --way windows",
                       out, sizeof out);
    CHECK(rc && rc != 124 && strstr(out, "deltaproof: rank 1 (process ") &&
              strstr(out, "has ended: all end") && strstr(out, "VERDICT: INTERRUPTED"),
          "exit %d: %.4000s", rc, out);
}

DP_TEST(apart, who_does_not_belong_is_sent_away) {
    NEEDS_KERNELS;
    char out[1 << 14];
    int rc = run("export WORLD_SIZE=2\nRANK=0 timeout 600 $K run $A >said.0 2>&1 & p=$!\n"
                 "RANK=1 timeout 600 $K run $A --ranks 2; rc=$?; kill $p; wait; exit $rc",
                 "packed-across --backend nccl", out, sizeof out);
    CHECK(rc == 2 && strstr(out, "rank 1 of 2, 127.0.0.1: rank 0 has other arguments"),
          "exit %d: %s", rc, out);
    rc = run("RANK=3 WORLD_SIZE=3 $K run $A", "packed-across --backend nccl", out, sizeof out);
    CHECK(rc == 2 && strstr(out, "RANK=3: must be 0 to 2"), "exit %d: %s", rc, out);
    /* A training's own environment is nothing to a command that did not ask for NCCL. */
    rc = run("RANK=1 WORLD_SIZE=3 timeout 600 $K run $A",
             "packed-across --ranks 1 --base fp32 --backend cuda --json no-nccl", out, sizeof out);
    CHECK(rc == 0 && strstr(out, "VERDICT: PASS"), "exit %d: %s", rc, out);
}

/* Where processes may not read each other's memory, a long message needs its sender until it
 * arrives. The sender must not wait for the receiver elsewhere. */
DP_TEST(apart, mpirun_starts_them_too) {
    const char *with = getenv("DP_MPI_KERNELS");
    NEEDS_KERNELS;
    if (!with || !*with) SKIP("no mpicc was found: there is no program with MPI");
    char out[1 << 14], start[1024];
    REQUIRE(run("$K run $A", "packed-across --base fp32 --ranks 2,3 --backend cuda --json threads3",
                out, sizeof out) == 0,
            "%.4000s", out);
    snprintf(start, sizeof start,
             "export OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1 "
             "OMPI_MCA_rmaps_base_oversubscribe=1 OMPI_MCA_btl=self,vader "
             "OMPI_MCA_btl_vader_single_copy_mechanism=none\nmpirun -np 3 '%s' run $A",
             with);
    REQUIRE(run(start, "packed-across --base fp32 --ranks 2,3 --backend nccl --json apart3", out,
                sizeof out) == 0,
            "%.4000s", out);
    same_numbers("threads3", "apart3", 8);
    /* and own tokens in parts */
    const char *const owned = "packed-across --base fp32 --chain fp32 --ranks 3 --own zigzag,empty "
                              "--exchange allgather";
    char args[256];
    snprintf(args, sizeof args, "%s --backend cuda --json owned3", owned);
    REQUIRE(run("$K run $A", args, out, sizeof out) == 0, "%.4000s", out);
    snprintf(args, sizeof args, "%s --backend nccl --json ownedapart3", owned);
    REQUIRE(run(start, args, out, sizeof out) == 0, "%.4000s", out);
    same_numbers("owned3", "ownedapart3", 2);
}

/* The data that scripts/slurm asks of Slurm: the nodes of the job, and its tasks, the first of them
 * last. */
#define SLURM                                                                               \
    "mkdir -p bin && export PATH=$PWD/bin:$PATH SLURM_JOB_ID=$P SLURM_JOB_NODELIST=nodes\n" \
    "export SLURM_NTASKS=3 SLURM_SUBMIT_DIR=$PWD DELTAPROOF\n"                              \
    "printf '#!/bin/sh\\necho localhost; echo other\\n' >bin/scontrol\n"                    \
    "cat >bin/srun <<'END'\n"                                                               \
    "#!/bin/bash\n"                                                                         \
    "[ \"$1\" = --kill-on-bad-exit=1 ] && shift || exit 97\n"                               \
    "for r in 2 1 0; do SLURM_PROCID=$r SLURM_LOCALID=$r timeout 600 \"$@\" & done\n"       \
    "wait -n; rc=$?; wait; exit $rc\n"                                                      \
    "END\n"                                                                                 \
    "chmod +x bin/*\n"

static void digest_of(const char *out, char hex[33]) {
    const char *at = strstr(out, "digest: ");
    hex[0] = 0;
    if (at) sscanf(at, "digest: %32s", hex);
    CHECK(strlen(hex) == 32, "no digest: %.2000s", out);
}

DP_TEST(apart, tasks_of_a_slurm_job_share_the_cases) {
    char out[1 << 14], with[2048], alone[33], shared[33];
    const char *args = "smoke-kda smoke-gdn smoke-conv --base fp32 --backend sim --ranks 2";
    snprintf(with, sizeof with, "'%s' run $A", gt_program());
    REQUIRE(run(with, args, out, sizeof out) == 0, "%.4000s", out);
    digest_of(out, alone);
    snprintf(with, sizeof with, SLURM "DELTAPROOF='%s' '%s/../scripts/slurm' run $A --resume done",
             gt_program(), gt_cases());
    REQUIRE(run(with, args, out, sizeof out) == 0, "%.4000s", out);
    digest_of(out, shared);
    CHECK(!strcmp(alone, shared) && strstr(out, "VERDICT: PASS"), "%s, %s: %.4000s", alone, shared,
          out);
    CHECK(strstr(out, "VERDICT") == strrchr(out, 'V'), "more than one verdict: %.4000s", out);
    snprintf(with, sizeof with, "'%s/../scripts/slurm' run $A", gt_cases());
    CHECK(run(with, args, out, sizeof out) == 2 && strstr(out, "slurm: runs in a job"), "%.4000s",
          out);
    snprintf(with, sizeof with, SLURM "'%s/../scripts/slurm' run $A", gt_cases());
    CHECK(run(with, args, out, sizeof out) == 2 &&
              strstr(out, "/build/deltaproof: no such program"),
          "%.4000s", out);
}
