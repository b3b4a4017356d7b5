/* Attacks on the meeting of ranks (harness/mpi/by_tcp.c): strangers who connect, ranks that send
 * what is not expected, addresses, environments that mean somebody else. */
#include "attack.h"
#include "ref/vocabulary/problem.h"

#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

/* Two ranks share two cases; $M is the port of whoever stands between them, $L the first one's. */
#define CASES "t1 smoke-step" HOW
#define HOW " --base fp32 --chain fp32 --ranks 1 --backend sim --cache none"
#define NCCL "smoke-kda --base fp32 --chain fp32 --ranks 2 --backend nccl --cache none"
#define RANK(r, port) RANK_OF(r, port, CASES)
#define RANK_OF(r, port, cases)                                                              \
    "RANK=" #r " WORLD_SIZE=2 MASTER_ADDR=127.0.0.1 MASTER_PORT=1 DELTAPROOF_PORT=" port " " \
    "OMP_NUM_THREADS=1 timeout 400 $P run " cases " --cases $C"

static const char *python(void) {
    const char *p = getenv("DP_PYTHON");
    return p && *p ? p : "python3";
}

/* `listener PORT` waits for its listening sockets and prints them, as the kernel lists them. */
#define LISTENER                                                                               \
    "listener() { until grep -h \":$(printf %%04X $1) [0-9A-F]*:0000 0A\" /proc/net/tcp*; do " \
    "sleep 0.1; done; }\n"
static int attack(int seconds, const char *script) {
    const int port = gt_port();
    return at_sh(at_dir("meeting"), seconds,
                 "L=%d M=%d PY='%s' D='%s/../harness/tests/data'\n" LISTENER "%s", port, port + 1,
                 python(), gt_cases(), script);
}

/* `first` and `second` are what the two ranks say where a message has been changed. */
static void meddle(const char *how, const char *first, const char *second) {
    const int rc = attack(
        60, at_text("$PY $D/meddler.py $M $L %s & m=$!\n" RANK(
                        1, "$M") " >said 2>&1 &\n"
                                 "o=$!\n" RANK(0, "$L") "; rc=$?; wait $o; echo \"rank 1: $?\"\n"
                                                        "cat said; kill $m; exit $rc",
                    how));
    CHECK(rc != 0 && rc != 124 && !strstr(at_out, "rank 1: 124"), "exit %d: %.2000s", rc, at_out);
    CHECK(strstr(at_out, first) && strstr(at_out, second), "%s: %.2000s", how, at_out);
}

DP_TEST(attacks_meeting, lengths_and_numbers_of_cases_are_checked) {
    const char *const ended = "has ended";
    meddle("up 3 16 18446744073709551615 -",
           "rank 1 sends a message of 18446744073709551615 bytes, not 16 to 1073741824", ended);
    meddle("up 3 16 - 1073741824",
           "rank 1 sends the runs of a case that it was not given, number "
           "1073741824",
           ended);
    meddle("up 3 16 - 1", "rank 1 sends the runs of a case that it was not given, number 1", ended);
    meddle("up 3 16 0 -", "rank 1 sends a message of 0 bytes, not 16 to 1073741824", ended);
    meddle("down 3 4 - 1073741824", "rank 1 (process ",
           "rank 0 sends a case that is not there, number 1073741824");
    meddle("down 1 8 0 -", "rank 1 (process ", "rank 0 sends a message of 0 bytes, not 4 to 65536");
    meddle("down 1 8 - 77", "rank 1 (process ",
           "rank 0 sends a job that nobody does here, number 77");
}

/* Shapes of a job over NCCL: messages between ranks are changed in between. */
static void reshape(const char *kernels, size_t member, int to, const char *says) {
    EXPECT(
        attack(60,
               at_text("P='%s'; export LD_LIBRARY_PATH=${P%%/*}\n"
                       "$PY $D/meddler.py $M $L order %zu %d & m=$!\n" RANK_OF(0, "$L", NCCL) //
                       " >said 2>&1 & o=$!\n" RANK_OF(1, "$M", NCCL) "; rc=$?; wait $o\n"
                                                                     "cat said; kill $m; exit $rc",
                       kernels, sizeof(dp_problem) - member, to)),
        2, says);
}

DP_TEST(attacks_meeting, shapes_of_a_job_are_checked) {
    const char *kernels = getenv("DP_KERNELS");
    if (!kernels || !*kernels) SKIP("the kernels on the CPU are not built under SAN=1");
    reshape(kernels, offsetof(dp_problem, model), 77, "rank 0 sends a recurrence 77");
    reshape(kernels, offsetof(dp_problem, Nseq), -5, "rank 0 sends a number of sequences -5");
    reshape(kernels, offsetof(dp_problem, T), 3, "rank 0 sends shapes that do not fit, T = 3");
    reshape(kernels, offsetof(dp_problem, K), -1, "K = -1: must be at least 1");
}

static void listens(const char *host, const char *at) { /* host, and more variables */
    const int rc = attack(
        20,
        at_text("RANK=0 WORLD_SIZE=2 MASTER_ADDR=%s MASTER_PORT=1 DELTAPROOF_PORT=$L timeout 200 "
                "$P run " CASES " --cases $C & p=$!\nlistener $L; kill $p; exit 0",
                host));
    CHECK(rc == 0 && strstr(at_out, at), "%s: wanted %s: %.1000s", host, at, at_out);
}

DP_TEST(attacks_meeting, nobody_listens_at_every_interface) {
    listens("127.0.0.1", " 0100007F:");
    listens("127.0.0.2", " 0200007F:");
    listens("192.0.2.1", " 0100007F:"); /* of no host */
    listens("0.0.0.0", " 0100007F:");
    listens("::", " 0100007F:");
}

DP_TEST(attacks_meeting, a_label_is_no_backend) {
    static const char *const options[] = {"--label nccl", "--label=nccl", "--label cuda,nccl"};
    for (int i = 0; i < 3; i++)
        EXPECT(
            attack(20, at_text("RANK=1 WORLD_SIZE=2 MASTER_ADDR=127.0.0.1 MASTER_PORT=$L timeout "
                               "200 $P run " CASES " --cases $C %s",
                               options[i])),
            0, "VERDICT: PASS");
    /* and what is one, cut short, is */
    EXPECT(attack(20, "RANK=2 WORLD_SIZE=2 MASTER_ADDR=127.0.0.1 MASTER_PORT=$L $P run t1 --backen "
                      "sim,nccl"),
           2, "RANK=2: must be 0 to 1");
}

/* Two ranks in spite of whoever else connects. */
static void among(const char *strangers) {
    const int rc = attack(
        90, at_text(RANK(0, "$L") " & p=$!\n$PY $D/strangers.py $L %s >there & s=$!\n"
                                  "until grep -q there there; do sleep 0.1; "
                                  "done\n" RANK(1, "$L") "; wait $p; rc=$?; kill $s; exit $rc",
                    strangers));
    EXPECT(rc, 0, "VERDICT: PASS (2 passed, 0 failed, 0 skipped, 0 unjudged)");
}

DP_TEST(attacks_meeting, strangers_keep_no_rank_out) {
    among("30 0 0");
    among("0 30 30");
    among("400 0 0"); /* more than there is room for */
}

/* The output of rank 1, started as `second` says, where the first one is as `first` says. */
static int second(const char *begin, const char *first, const char *second) {
    return attack(
        30, at_text("%s\nexport DELTAPROOF_SILENCE=5\n%s " RANK(
                        0, "$L") " >said 2>&1 & p=$!\n"
                                 "%s " RANK(1, "${N:-$L}") "; rc=$?; kill $p; cat said; exit $rc",
                    begin, first, second));
}

#define LONG "DELTAPROOF_SECRET=0123456789abcdef"
DP_TEST(attacks_meeting, version_build_and_secret_are_compared_before_all_else) {
    const char *const meddler = "N=$M; $PY $D/meddler.py $M $L hello %d & trap \"kill $!\" EXIT";
    EXPECT(second(at_text(meddler, 0), "", ""), 2, "rank 0 has another program");
    EXPECT(second(at_text(meddler, 16), "", ""), 2, "rank 0 has another version");
    EXPECT(second(at_text(meddler, 32), "", ""), 2, "rank 0 has another build");
    EXPECT(second(at_text(meddler, 120), "", ""), 2, "rank 0 has a proof that does not fit");
    EXPECT(second(at_text(meddler, 120), LONG, LONG), 2, "rank 0 has another secret");
    EXPECT(second("", LONG, LONG "g"), 2, "rank 0 has another secret");
    EXPECT(second("", LONG, ""), 2, "rank 0 has a secret (DELTAPROOF_SECRET)");
    EXPECT(second("", "", LONG), 2, "rank 0 has no secret");
    EXPECT(second("", "", "DELTAPROOF_SECRET=short"), 2, "DELTAPROOF_SECRET: shorter than 16");
    EXPECT(second("", "", "DELTAPROOF_SECRET_FILE=/nowhere"), 2,
           "DELTAPROOF_SECRET_FILE: /nowhere: ");
    EXPECT(second("echo 0123456789abcdef >key", LONG, "DELTAPROOF_SECRET_FILE=key"), 0, NULL);
    /* which nothing that is started later sees */
    EXPECT(attack(20, LONG " " RANK(0, "$L") " & p=$!; listener $L >/dev/null; c=$(pgrep -P $p)\n"
                                             "grep -c 0123456789abcdef /proc/$c/environ; kill $p"),
           0, "0\n");
}

DP_TEST(attacks_meeting, every_interface_is_open_with_a_secret_alone) {
    listens("192.0.2.1 " LONG, " 00000000000000000000000000000000:");
    listens("0.0.0.0 " LONG, " 00000000000000000000000000000000:");
    listens("127.0.0.1 " LONG, " 0100007F:");
}

/* Who is there already is not afraid of a first process that waits for others without a word. */
DP_TEST(attacks_meeting, a_rank_may_come_later_than_silence_may_last) {
    EXPECT(attack(40, "export WORLD_SIZE=3 MASTER_ADDR=127.0.0.1 MASTER_PORT=1 DELTAPROOF_PORT=$L\n"
                      "export DELTAPROOF_SILENCE=6 OMP_NUM_THREADS=1\n"
                      "for r in 1 2; do [ $r = 1 ] || sleep 9; RANK=$r timeout 400 $P run " CASES
                      " --cases $C & [ $r = 2 ] || RANK=0 timeout 400 $P run " CASES
                      " --cases $C & done\nwait"),
           0, "VERDICT: PASS (2 passed, 0 failed, 0 skipped, 0 unjudged)");
}

/* Two processes come as rank 1: one is sent away, the other one is there when rank 0 ends. */
DP_TEST(attacks_meeting, a_rank_comes_once_and_does_not_outlive_the_first) {
    EXPECT(attack(30,
                  "export WORLD_SIZE=3 MASTER_ADDR=127.0.0.1 MASTER_PORT=1 DELTAPROOF_PORT=$L\n"
                  "for r in 0 1 1; do RANK=$r timeout 200 $P run " CASES
                  " --cases $C & p=\"$p $!\"; done\nset -- $p; wait -n $2 $3; kill $1; wait $2 $3; "
                  "exit 0"),
           0, "rank 1 of 3, 127.0.0.1: rank 0 has this rank already",
           "rank 1 of 3, 127.0.0.1: rank 0 has ended before all others came");
}

#define MANY "smoke-kda smoke-gdn smoke-mkda2 smoke-gdn2 smoke-step t1" HOW
/* Who is stopped when the first case is finished; the other names it. */
static void stopped(int who, const char *says) {
    const int rc = attack(
        60,
        at_text("export DELTAPROOF_SILENCE=4\n" RANK_OF(0, "$L", MANY) " >said.0 2>&1 & a=$!\n" //
                RANK_OF(1, "$L",
                        MANY) " >said.1 2>&1 & b=$!\nset -- $a $b\n"
                              "until grep -q passed said.0; do sleep 0.02; done\n"
                              "s=$(pgrep -P $%d); kill -STOP $s; wait $%d; rc=$?; kill -KILL $s\n"
                              "cat said.0 said.1; exit $rc",
                who + 1, 2 - who));
    CHECK(rc && rc != 124 && strstr(at_out, says) &&
              strstr(at_out, "has been silent for 4 s (stopped?): all end"),
          "exit %d: %.2000s", rc, at_out);
}

DP_TEST(attacks_meeting, a_process_that_is_stopped_ends_all_by_its_name) {
    stopped(0, "deltaproof: rank 0 (process ");
    stopped(1, "deltaproof: rank 1 (process ");
}
