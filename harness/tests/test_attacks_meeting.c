/* Attacks on the meeting of ranks (harness/mpi/by_tcp.c): strangers who connect, ranks that send
 * what is not expected, addresses, environments that mean somebody else. */
#include "attack.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

/* Two ranks share two cases; $M is the port of whoever stands between them, $L the first one's. */
#define CASES "t1 smoke-step --base fp32 --chain fp32 --ranks 1 --backend sim --cache none"
#define RANK(r, port)                                                                        \
    "RANK=" #r " WORLD_SIZE=2 MASTER_ADDR=127.0.0.1 MASTER_PORT=1 DELTAPROOF_PORT=" port " " \
    "OMP_NUM_THREADS=1 timeout 40 $P run " CASES " --cases $C"

static const char *python(void) {
    const char *p = getenv("DP_PYTHON");
    return p && *p ? p : "python3";
}

static int attack(int seconds, const char *script) {
    static int next;
    const int port = 20000 + (int)getpid() % 6000 * 4 + next++ % 2 * 2;
    return at_sh(at_dir("meeting"), seconds, "L=%d M=%d PY='%s' D='%s/../harness/tests/data'\n%s",
                 port, port + 1, python(), gt_cases(), script);
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

/* $A: MASTER_ADDR; the listening sockets of the port are printed, as the kernel lists them. */
static void listens(const char *host, const char *at) {
    const int rc = attack(
        20,
        at_text("RANK=0 WORLD_SIZE=2 MASTER_ADDR=%s MASTER_PORT=1 DELTAPROOF_PORT=$L timeout 10 "
                "$P run " CASES " --cases $C & p=$!\n"
                "for i in $(seq 90); do grep -h \":$(printf %%04X $L) [0-9A-F]*:0000 0A\" "
                "/proc/net/tcp /proc/net/tcp6 && break; sleep 0.1; done\nkill $p; exit 0",
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
                               "10 $P run " CASES " --cases $C %s",
                               options[i])),
            0, "VERDICT: PASS");
    /* and what is one, cut short, is */
    EXPECT(attack(20, "RANK=2 WORLD_SIZE=2 MASTER_ADDR=127.0.0.1 MASTER_PORT=$L $P run t1 --backen "
                      "sim,nccl"),
           2, "RANK=2: must be 0 to 1");
}
