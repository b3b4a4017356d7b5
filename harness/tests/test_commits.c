/* Script scripts/bisect-commits on a synthetic repository of 64 commits (data/commits.sh). It has a
 * jump of the metric, a small change, commits that do not build, and flaky ones. */
#include "gt.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

static int have_tools(void) {
    char out[256];
    return gt_run("git --version && python3 -c 'import fcntl' 2>&1", out, sizeof out) == 0;
}

static char DIR[256];
static int make_repo(const char *name) {
    char cmd[1024], out[4096];
    snprintf(DIR, sizeof DIR, "%s/%s", gt_tmpdir(), name);
    snprintf(cmd, sizeof cmd,
             "mkdir -p %s && sh %s/../harness/tests/data/commits.sh %s 2>&1 && cd %s/repo && echo "
             "mine >>metric && echo new >note",
             DIR, gt_cases(), DIR, DIR);
    const int rc = gt_run(cmd, out, sizeof out);
    if (rc) gt_fail(__FILE__, __LINE__, "repository", "%s", out);
    return !rc;
}

/* Runs the script in the repository; before: shell text that precedes it. */
static int script(const char *before, const char *args, char *out, int size) {
    char cmd[2048];
    snprintf(cmd, sizeof cmd,
             "S=$(realpath %s/../scripts/bisect-commits); cd %s/repo && export COUNT=%s/count && "
             "%s \"$S\" --good HEAD~63 --bad HEAD --build 'test ! -e broken' %s 2>&1",
             gt_cases(), DIR, DIR, before, args);
    return gt_run(cmd, out, size);
}

static const char STATE[] =
    "git status --porcelain; git rev-parse HEAD; git symbolic-ref HEAD; git for-each-ref; git "
    "stash list; git worktree list; md5sum metric note check; git ls-files -s";
static void snapshot(char *out, int size) {
    char cmd[1024];
    snprintf(cmd, sizeof cmd, "cd %s/repo && (%s)", DIR, STATE);
    gt_run(cmd, out, size);
}

DP_TEST(commits, found_in_spite_of_kill_9_a_broken_build_and_flaky_results) {
    static char before[16384], after[16384], out[65536];
    char cmd[1024];
    if (!have_tools()) SKIP("no git or no python3");
    if (!make_repo("verdict")) return;
    snapshot(before, sizeof before);
    /* killed with -9 as soon as four commits are known */
    snprintf(cmd, sizeof cmd,
             "{ (for i in $(seq 500); do [ $(cat .git/bisect-commits/results.jsonl 2>/dev/null | "
             "wc -l) -ge 4 ] && break; sleep 0.02; done; kill -9 $(cat %s/pid)) >/dev/null 2>&1 & "
             "echo $$ >%s/pid; } && exec",
             DIR, DIR);
    const int killed = script(cmd, "--test ./check", out, sizeof out);
    CHECK(killed != 0 && !strstr(out, "FIRST BAD"), "status %d: %s", killed, out);
    /* as a crash may leave it, and a process that goes on for a moment; it may write behind this */
    snprintf(cmd, sizeof cmd,
             "cd %s/repo && wc -l <.git/bisect-commits/results.jsonl && printf '{\"commit\": \"cut "
             "o{\"commit\": \"x\"}\\n{\"commit\": \"cut o' >>.git/bisect-commits/results.jsonl",
             DIR);
    CHECK(gt_run(cmd, out, sizeof out) == 0 && atoi(out) >= 4, "%s", out);
    const int rc = script("", "--test ./check", out, sizeof out);
    CHECK(rc == 0, "status %d: %s", rc, out);
    CHECK(strstr(out, " are known from before") && strstr(out, " lines of no result"), "%s", out);
    CHECK(strstr(out, "FIRST BAD COMMIT") && strstr(out, "\n    change 50\n") &&
              strstr(out, "3 files changed, 2 insertions(+), 3 deletions(-)"),
          "%s", out);
    CHECK(strstr(out, "skipped: ") && strstr(out, "build: exit status 1"), "%s", out);
    CHECK(strstr(out, "flaky: bad in 3 of 9 runs"), "%s", out);
    snapshot(after, sizeof after);
    CHECK(!strcmp(before, after), "before:\n%s\nafter:\n%s", before, after);
    const int other = script("", "--test ./other", out, sizeof out);
    CHECK(other == 2 && strstr(out, "holds another search (test differ)"), "status %d: %s", other,
          out);
}

DP_TEST(commits, every_move_of_a_metric_is_named_with_its_size) {
    static char out[65536];
    if (!have_tools()) SKIP("no git or no python3");
    if (!make_repo("metric")) return;
    const int rc = script("", "--metric './check || true'", out, sizeof out);
    const char *big = strstr(out, "MOVED AT"), *small = big ? strstr(big + 1, "MOVED AT") : NULL;
    CHECK(rc == 0 && big && small && !strstr(small + 1, "MOVED AT"), "status %d: %s", rc, out);
    CHECK(big && strstr(big, "change 50") && (!small || strstr(big, "change 50") < small) &&
              strstr(big, "1.6e-06 -> 0.0003 (+0.000298"),
          "%s", out);
    CHECK(small && strstr(small, "change 12") && strstr(small, "1e-06 -> 1.6e-06 (+6e-07") &&
              strstr(small, "times the noise"),
          "%s", out);
}
