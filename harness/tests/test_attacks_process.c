/* Attacks through the process: environment, limits, closed and full outputs, signals. */
#include "attack.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define TINY "reason = r\nsource = s\nop = kda\nT = 3\nK = 2\nV = 2\n"
#define RUN "$P run tiny.case --cache none "

static const char *set_up(const char *name) {
    const char *dir = strdup(at_dir(name));
    at_write(at_text("%s/tiny.case", dir), TINY);
    return dir;
}

/* Status 1 says "a verdict failed" and nothing else. */
DP_TEST(attacks_process, what_the_environment_lacks_is_said_with_status_2) {
    static const struct {
        const char *before, *says;
    } what[] = {
        {"OMP_NUM_THREADS=100000", "100000 threads: at most 4096 (OMP_NUM_THREADS)"},
        {"OMP_STACKSIZE=64K", "OMP_STACKSIZE = 64K: threads need a stack of at least 1024 KiB"},
        {"OMP_STACKSIZE=900", "OMP_STACKSIZE = 900"},
        {"GOMP_STACKSIZE=64K", "GOMP_STACKSIZE = 64K"},
        {"ulimit -s 256;", "ulimit -s 256"},
        {"OMP_STACKSIZE=1000G OMP_NUM_THREADS=4", "a library ended the program: no verdict"},
        {"ulimit -v 500000;", "MiB of address space are needed"},
        {"ulimit -d 100000;", "MiB of address space are needed"}};
    const char *dir = set_up("environment");
#ifdef __SANITIZE_ADDRESS__
    const size_t n = 6; /* the sanitizer itself needs terabytes of address space */
#else
    const size_t n = sizeof what / sizeof *what;
#endif
    for (size_t i = 0; i < n; i++)
        EXPECT(at_sh(dir, 10, "%s " RUN, what[i].before), 2, what[i].says);
    free((char *)dir);
}

DP_TEST(attacks_process, variables_of_other_programs_change_nothing) {
    static const char *const set[] = {"POSIXLY_CORRECT=1",
                                      "ARGP_HELP_FMT=rmargin=1",
                                      "LC_ALL=de_DE.UTF-8 LC_NUMERIC=de_DE.UTF-8",
                                      "MALLOC_PERTURB_=165",
                                      "TMPDIR=/nowhere",
                                      "env -i PATH=\"$PATH\""};
    const char *dir = set_up("variables");
    EXPECT(at_sh(dir, 10, RUN "--backend sim --ranks 1"), 0, "VERDICT: PASS (1 passed");
    char *want = strdup(at_out);
    strchr(want, '\n')[1] = 0; /* the run's own line: the others have a time */
    for (size_t i = 0; i < sizeof set / sizeof *set; i++)
        EXPECT(at_sh(dir, 10, "%s " RUN "--backend sim --ranks 1", set[i]), 0, want);
    free(want);
    at_write(at_text("%s/results.json", dir), AT_RECORD);
    EXPECT(at_sh(dir, 30, "PYTHONHOME=/nowhere PYTHONPATH=/nowhere $P report ."), 0,
           "report: ./report.html");
    free((char *)dir);
}

DP_TEST(attacks_process, output_that_does_not_arrive_is_no_success) {
    const char *dir = set_up("full");
    EXPECT(at_sh(dir, 10, "$P list --cases $C >/dev/full"), 2,
           "standard output: cannot be written");
    EXPECT(at_sh(dir, 10, RUN ">/dev/full"), 2, "standard output: cannot be written");
    EXPECT(at_sh(dir, 10, "$P run --help >/dev/full"), 2, "standard output: cannot be written");
    EXPECT(at_sh(dir, 10, "$P --version >/dev/full"), 2, "standard output: cannot be written");
    EXPECT(at_sh(dir, 10, RUN "--json - >/dev/full"), 2, "cannot be written: No space left");
    EXPECT(at_sh(dir, 10, RUN "--json /dev/full"), 2, "but not all its files were written");
    EXPECT(at_sh(dir, 10, "echo tensors >x; " RUN "--json x; s=$?; cat x; exit $s"), 2,
           "--json x: holds something else than JSON, which would be lost\ntensors");
    EXPECT(at_sh(dir, 10, "$P list --cases $C >&-"), 2, "standard output: cannot be written");
    EXPECT(
        at_sh(dir, 10,
              "exec 0<&- 1>&- ; $P run tiny.case --cache none --json r.json; head -c 1 r.json >&2"),
        0, "{");
    EXPECT(
        at_sh(
            dir, 10,
            "ulimit -f 4; $P run t1 --cases $C --ranks 1 --base fp32 --cache none --json big.json"),
        2, "big.json: cannot be written: File too large");
    EXPECT(at_sh(dir, 10, "ls -A"), 0, "tiny.case");
    CHECK(!strstr(at_out, "tmp") && !strstr(at_out, "big.json"), "left behind: %s", at_out);
    free((char *)dir);
}

DP_TEST(attacks_process, an_output_folder_that_cannot_be_written_is_refused_before_the_run) {
    static const char *const make[] = {"mkdir -p o/results.json",
                                       "mkdir -p o/junit.xml",
                                       "mkdir -p o/report.html",
                                       "mkdir -p o; touch o/figures",
                                       "touch o",
                                       "mkdir -p o; ln -s /proc/1 o/figures"};
    const char *dir = set_up("out");
    for (size_t i = 0; i < sizeof make / sizeof *make; i++) {
        EXPECT(at_sh(dir, 20, "%s; " RUN "--out o; s=$?; rm -rf o; exit $s", make[i]), 2, "o");
        CHECK(!strstr(at_out, "pass ") && !strstr(at_out, "VERDICT"), "%s: it ran: %s", make[i],
              at_out);
    }
    EXPECT(at_sh(dir, 20, RUN "--out $(printf 'x%%.0s' $(seq 300))"), 2, "File name too long");
    EXPECT(at_sh(dir, 20,
                 "mkdir -p m/museum.json; $P museum tiny.case --fault merge-scaled --out m --cache "
                 "none"),
           2, "museum.json: cannot be written");
    EXPECT(at_sh(dir, 20, "$P compare tiny.case tiny.case --json no/such/c.json"), 2,
           "no/such/c.json: cannot be written");
    free((char *)dir);
}

DP_TEST(attacks_process, an_interrupted_run_says_what_is_finished) {
    static const struct {
        const char *sig;
        int status;
    } what[] = {{"INT", 130}, {"TERM", 143}, {"HUP", 129}};
    const char *dir = set_up("interrupt");
    at_write(at_text("%s/long.case", dir),
             "reason = r\nsource = s\nop = kda\nT = 8192\nK = 64\nHV = 4\ntruth = mpfr\n");
    for (int i = 0; i < 3; i++) {
        const int s =
            at_sh(dir, 30,
                  ">out; env --default-signal $P run tiny.case long.case --backend sim "
                  "--cache none --json r.json >out 2>&1 & until grep -q '^tiny  ' out; do "
                  "sleep 0.1; done; sleep 0.3; "
                  "kill -%s $!; wait $!; s=$?; cat out; exit $s",
                  what[i].sig);
        EXPECT(s, what[i].status, "pass     tiny:ranks=1", "interrupted after 0 runs",
               "VERDICT: INTERRUPTED (1 passed", "interrupted by SIG", what[i].sig);
        EXPECT(at_sh(dir, 10, "ls -A | grep -c 'json\\|tmp'"), 1, "0\n");
    }
    free((char *)dir);
}

/* One signal to each command. scripts/campaigns/attack has 20 moments of each signal, and Python's
 * run, which python/tests end, too. */
DP_TEST(attacks_process, a_signal_at_any_moment_leaves_nothing_and_nothing_torn) {
    const char *dir = at_dir("moments");
    const int s = at_sh(dir, 600,
                        "python3 $C/../scripts/campaigns/attack --program $P --only signals "
                        "--points 0 --seed 7 --python /none | tail -12");
    CHECK(s == 0 && strstr(at_out, "ATTACKS: 7 tried, 0 found"), "%s", at_out);
}

/* The convolutions of a step are made by MPFR while its case is loaded: minutes at this size. A
 * second of its own time tells that it is there. */
DP_TEST(attacks_process, an_interrupted_load_says_how_far_it_came) {
    const char *dir = set_up("load");
    at_write(at_text("%s/slow.case", dir),
             "reason = r\nsource = s\nop = step\nT = 65536\nK = 64\nHV = 4\nW = 4\n");
    const int s = at_sh(dir, 30,
                        "env --default-signal $P run tiny.case slow.case --backend sim --cache "
                        "none --json r.json >out 2>&1 & until read -ra x </proc/$!/stat && "
                        "[ ${x[13]} -ge $(getconf CLK_TCK) ]; do sleep 0.1; done; "
                        "kill -INT $!; wait $!; s=$?; cat out; exit $s");
    EXPECT(s, 130, "slow.case: interrupted while the case was loaded: 1 of 2 loaded, none run",
           "VERDICT: INTERRUPTED (0 passed", "interrupted by SIGINT");
    CHECK(!strstr(at_out, "after 0 runs"), "a case that was not begun has no runs: %s", at_out);
    EXPECT(at_sh(dir, 10, "ls -A | grep -c 'json\\|tmp'"), 1, "0\n");
    free((char *)dir);
}
