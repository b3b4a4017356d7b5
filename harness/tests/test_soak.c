/* scripts/soak: what it counts, what it keeps, and what it says of problems that failed. */
#include "gt.h"
#include <stdio.h>
#include <string.h>

static char out[1 << 16];

/* scripts/soak of this program with these arguments, its problems in this test run's own folder;
 * returns its exit status. */
static int soak_of(const char *program, const char *arguments) {
    char cmd[2048];
    snprintf(cmd, sizeof cmd,
             "mkdir -p '%s/soaked' && ln -sf '%s' '%s/soaked/deltaproof' && cd '%s' && "
             "BUILD='%s/soaked' '%s/../scripts/soak' %s",
             gt_tmpdir(), program, gt_tmpdir(), gt_tmpdir(), gt_tmpdir(), gt_cases(), arguments);
    return gt_run(cmd, out, sizeof out);
}
static int soak(const char *arguments) { return soak_of(gt_program(), arguments); }

static int says(const char *text) { return strstr(out, text) != NULL; }

/* The number of problems that stay. */
static int kept(void) {
    char cmd[512], text[64];
    int n = -1;
    snprintf(cmd, sizeof cmd, "ls '%s/soaked/soak' | grep -c '[.]case$'", gt_tmpdir());
    gt_run(cmd, text, sizeof text);
    sscanf(text, "%d", &n);
    return n;
}

DP_TEST(soak, right_ranks_pass_and_leave_nothing) {
    CHECK(soak("2 1 --small --op kda") == 0 && says("2 problems, "), "%s", out);
    CHECK(says(", 0 false alarms\n"), "%s", out);
    CHECK(kept() == 0, "%d problems stay", kept());
    CHECK(soak("1 1 --wide --op gdn") == 0 && says("1 problems, 2 runs"), "%s", out);
}

DP_TEST(soak, what_failed_is_named_and_stays) {
    const char *faulty = "2 1 --small --op kda -- --backend sim --base fp32 --fault merge-scaled";
    const int status = soak(faulty);
    CHECK(status == 1 && says("failure: soak-") && says("base=fp32"), "%d: %s", status, out);
    CHECK(kept() > 0, "no problem stays");
}

/* A problem of which every run is skipped is said to be; one that could not be run is lost. */
DP_TEST(soak, what_could_not_be_judged_is_counted) {
    CHECK(soak("1 1 --small --op kda -- --backend mpi") == 0 &&
              says("1 problems skipped, which nothing here can run"),
          "%s", out);
    CHECK(soak("1 1 --small --op kda -- --base fp128") == 2 &&
              says("1 problems could not be run: they stay in "),
          "%s", out);
    CHECK(kept() == 1, "%d problems stay", kept());
    CHECK(soak("1 1 --steep --wide") == 2 && says("no --cases, --small or --wide with it"), "%s",
          out);
}

DP_TEST(soak, what_is_kept_is_not_judged_again) {
    const char *two = "2 1 --small --op ssd --keep soak-kept";
    char first[1 << 12];
    CHECK(soak(two) == 0 && says("2 problems, "), "%s", out);
    const char *sums = strstr(out, "judged by: ");
    REQUIRE(sums, "%s", out);
    snprintf(first, sizeof first, "%.*s", (int)strcspn(sums, "\n"), sums);
    CHECK(soak_of("/bin/false", two) == 0 && says(first), "judged again: %s", out);
    CHECK(says("2 problems, "), "%s", out);
    CHECK(soak("1 1 --small --keep .") == 2 && says("--keep .: ") && !says("Traceback"), "%s", out);
}
