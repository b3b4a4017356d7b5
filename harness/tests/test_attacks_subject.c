/* Attacks by libraries: whatever one does, the program goes on, in time, says so, and leaves no
 * process behind. */
#include "attack.h"

#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#define SMALL                                                                                      \
    "reason = r\nsource = s\nop = kda\nT = 96\nHV = 2\nK = 16\ng_scale = 0.02\nranks = 2\nbase = " \
    "fp32\n"
#define FLAGS "-ffp-contract=off -pthread"
#define RUN "$P run small.case --cache ../cache-of-attacks --limit 3 --subject "

static const char *dir, *lib;

static void set_up(const char *name) {
    dir = strdup(at_dir(name));
    at_write(at_text("%s/small.case", dir), SMALL);
    if (!lib) lib = strdup(at_library("hostile_subject", FLAGS));
}

static int attack(const char *hostile, int seconds, const char *more) {
    return at_sh(dir, seconds, "HOSTILE=%s HOSTILE_PIDS=$PWD/pids " RUN "'%s' %s", hostile, lib,
                 more);
}

/* A first run makes three calls, each of which may take so long. */
#define WITHIN_LIMIT "did not return within 3 s"

DP_TEST(attacks_subject, nothing_that_a_library_started_outlives_its_run) {
    static const char *const how[] = {"daemon-before", "daemon-about", "daemon-constructor",
                                      "runners-before", "daemon-after"};
    set_up("daemons");
    for (int i = 0; i < 5; i++) {
        int noted;
        const int s = attack(how[i], 60, "");
        const int alive = at_survivors(dir, "pids", &noted);
        CHECK(s == 0 && strstr(at_out, "VERDICT: PASS"), "%s: status %d: %.500s", how[i], s,
              at_out);
        CHECK(noted > 0 && !alive, "%s: %d of %d processes are still there", how[i], alive, noted);
    }
    free((char *)dir);
}

DP_TEST(attacks_subject, nothing_outlives_the_program_when_a_signal_ends_it) {
    static const char *const sig[] = {"INT", "TERM", "KILL"};
    set_up("signals");
    for (int i = 0; i < 3; i++) {
        int noted;
        at_sh(dir, 30,
              "export HOSTILE=daemon-constructor HOSTILE_PIDS=$PWD/pids; (%s'%s' --limit 60 >out "
              "2>&1; echo status $? >>out) & until test -s pids; do sleep 0.1; done; "
              "pkill -%s -P $! deltaproof; wait; cat out; " AT_WAIT_FOR("pids"),
              RUN, lib, sig[i]);
        const int alive = at_survivors(dir, "pids", &noted);
        CHECK(noted > 0 && !alive, "SIG%s: %d of %d processes are still there: %.300s", sig[i],
              alive, noted, at_out);
    }
    free((char *)dir);
}

DP_TEST(attacks_subject, what_is_shared_can_be_neither_cut_nor_turned_against_the_program) {
    static const char *const how[] = {"truncate-before", "truncate-after",   "truncate-about",
                                      "ones-before",     "zeros-before",     "ones-after",
                                      "zeros-about",     "ones-about",       "close-before",
                                      "exit0-before",    "exit0-constructor"};
    set_up("shared");
    for (size_t i = 0; i < sizeof how / sizeof *how; i++) {
        const int s = attack(how[i], 30, "");
        CHECK(s >= 0 && s <= 2 && strlen(at_out) > 20, "%s: status %d: %.500s", how[i], s, at_out);
        CHECK(!strstr(at_out, "hostile: truncated"), "%s: %.500s", how[i], at_out);
        if (!strncmp(how[i], "truncate", 8))
            CHECK(s == 0, "%s: status %d: %.500s", how[i], s, at_out);
    }
    free((char *)dir);
}

DP_TEST(attacks_subject, loading_and_about_keep_to_the_limit) {
    static const char *const how[] = {"hang-constructor", "hang-about", "hang-before"};
    set_up("limits");
    for (int i = 0; i < 3; i++) {
        const int s = attack(how[i], 15, "");
        EXPECT(s, i < 2 ? 2 : 1, WITHIN_LIMIT);
    }
    free((char *)dir);
}

DP_TEST(attacks_subject, memory_is_limited) {
#ifdef __SANITIZE_ADDRESS__
    SKIP("the sanitizer's own memory is what a limit would count");
#endif
    static const char *const how[] = {"eat-before", "threads-before", "eat-constructor"};
    set_up("memory");
    for (int i = 0; i < 3; i++) {
        const int s = attack(how[i], 30, "--memory 0.5");
        EXPECT(s, i < 2 ? 1 : 2, "crashed: SIGABRT");
    }
    EXPECT(attack("none", 30, "--memory 0.5"), 0, "VERDICT: PASS");
    EXPECT(attack("none", 30, "--memory 0"), 2, "--memory 0: must be GiB");
    free((char *)dir);
}

DP_TEST(attacks_subject, a_library_that_attacks_its_parent_is_what_fails) {
    set_up("parent");
    EXPECT(attack("kill-parent-before", 20, ""), 1, "ended the process that watches it: SIGKILL");
    EXPECT(attack("kill-parent-about", 20, ""), 2, "ended the process that watches it: SIGKILL");
    EXPECT(attack("stop-parent-before", 20, ""), 1, WITHIN_LIMIT);
    EXPECT(attack("stop-before", 20, ""), 1, WITHIN_LIMIT);
    free((char *)dir);
}

DP_TEST(attacks_subject, what_a_library_says_is_shown_as_text) {
    set_up("says");
    EXPECT(attack("why", 20, "--json r.json"), 1,
           "failed: returned 3: \\x1b[2J\\xff\\x0aVERDICT: PASS");
    EXPECT(attack("name", 20, "--json r.json; grep -ao '\"path\":.*name\"' r.json"), 0,
           "\"path\":\"\\\\x1b[2J\\\\xff name\"");
    free((char *)dir);
}
