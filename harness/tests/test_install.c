/* `make install` into a folder of its own. The installed program judges a library built with
 * nothing but pkg-config, from another folder and by a user who may write nowhere in it. Completion
 * and man pages are there; uninstall leaves nothing. */
#include "gt.h"
#include "ref/vocabulary/problem.h"
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static char out[1 << 15];

/* Runs a shell line in which $D is the folder installed into, $T the tree, $B the build folder. */
static int sh(const char *line) {
    char cmd[4000];
    snprintf(cmd, sizeof cmd,
             "mkdir -p '%s/install'; D='%s/install/root'; P=$(realpath '%s'); T=$(realpath "
             "'%s/..'); B=${P%%/*}; export D T B; "
             "export XDG_CACHE_HOME=\"$D/../cache\"; unset MAKEFLAGS MAKELEVEL; %s",
             gt_tmpdir(), gt_tmpdir(), gt_program(), gt_cases(), line);
    return gt_run(cmd, out, sizeof out);
}

static int has(const char *name) {
    char line[200];
    snprintf(line, sizeof line, "command -v %s >/dev/null", name);
    return sh(line) == 0;
}

DP_TEST(install, a_library_built_by_pkg_config_alone_is_judged_by_the_installed_program) {
    if (strstr(gt_program(), "/san/")) SKIP("a program with sanitizers is not installed");
    REQUIRE(
        sh("make -C \"$T\" --no-print-directory install BUILD=\"$B\" PREFIX=/usr DESTDIR=\"$D\"") ==
            0,
        "%s", out);
    CHECK(sh("cd / && \"$D/usr/bin/deltaproof\" list | grep -c .") == 0 && atoi(out) > 50, "%s",
          out);
    CHECK(sh("find \"$D\" -type f -perm /022 | grep . && exit 1; test -s "
             "\"$D/usr/lib/pkgconfig/deltaproof.pc\"") == 0,
          "%s", out);
    CHECK(sh("grep Version: \"$D/usr/lib/pkgconfig/deltaproof.pc\"") == 0 &&
              !strcmp(out, "Version: " DP_VERSION "\n"),
          "%s", out);
    CHECK(sh("cd / && cmp \"$(\"$D/usr/bin/deltaproof\" --include-dir)/deltaproof_subject.h\" "
             "\"$D/usr/include/deltaproof_subject.h\"") == 0,
          "%s", out);
    if (!has("pkg-config")) SKIP("pkg-config is not installed");
    REQUIRE(sh("cd \"$D/..\" && export PKG_CONFIG_PATH=\"$D/usr/lib/pkgconfig\" && cc -O2 -fPIC "
               "-shared "
               "-ffp-contract=off $(pkg-config --define-prefix --cflags deltaproof) "
               "\"$D/usr/share/doc/deltaproof/example_subject.c\" -o libexample.so -lm") == 0,
            "%s", out);
    CHECK(sh("cd \"$D/..\" && root/usr/bin/deltaproof run smoke-kda --subject ./libexample.so") ==
                  0 &&
              strstr(out, "VERDICT: PASS (1 passed"),
          "%s", out);
    CHECK(sh("ls \"$XDG_CACHE_HOME/deltaproof\" | grep -c .") == 0 && atoi(out) > 0,
          "truths are not kept in the user's folder: %s", out);
}

DP_TEST(install, runs_for_a_user_who_may_write_nowhere) {
    if (strstr(gt_program(), "/san/")) SKIP("a program with sanitizers is not installed");
    if (sh("test \"$(id -u)\" = 0") || !has("setpriv")) SKIP("needs root and setpriv");
    REQUIRE(
        sh("make -C \"$T\" --no-print-directory install BUILD=\"$B\" PREFIX=/usr DESTDIR=\"$D\" && "
           "chmod 755 \"$D/../..\" \"$D/..\" \"$D\"") == 0,
        "%s", out);
    CHECK(sh("cd / && setpriv --reuid 65534 --regid 65534 --clear-groups env -u XDG_CACHE_HOME "
             "HOME=/nonexistent \"$D/usr/bin/deltaproof\" run t1 2>&1") == 0 &&
              strstr(out, "VERDICT: PASS"),
          "%s", out);
}

DP_TEST(install, completion_and_man_pages_follow_the_program) {
    if (strstr(gt_program(), "/san/")) SKIP("a program with sanitizers is not installed");
    REQUIRE(
        sh("make -C \"$T\" --no-print-directory install BUILD=\"$B\" PREFIX=/usr DESTDIR=\"$D\"") ==
            0,
        "%s", out);
    static const struct {
        const char *words, *finds;
    } ask[] = {{"deltaproof ju", "judge"},
               {"deltaproof judge --inp", "--inputs="},
               {"deltaproof run smoke-g", "smoke-gdn"},
               {"deltaproof carry smoke-g", "smoke-gdn"}};
    for (size_t i = 0; i < sizeof ask / sizeof *ask; i++) {
        char line[700];
        snprintf(line, sizeof line,
                 "PATH=\"$D/usr/bin:$PATH\"; source "
                 "\"$D/usr/share/bash-completion/completions/deltaproof\"; COMP_WORDS=(%s); "
                 "COMP_CWORD=$((${#COMP_WORDS[@]} - 1)); _deltaproof; echo \"${COMPREPLY[@]}\"",
                 ask[i].words);
        char cmd[900];
        snprintf(cmd, sizeof cmd, "cat >\"$D/../ask\" <<'E'\n%s\nE\nbash \"$D/../ask\"", line);
        CHECK(sh(cmd) == 0 && !strncmp(out, ask[i].finds, strlen(ask[i].finds)), "%s: %s",
              ask[i].words, out);
    }
    for (size_t i = 0; i < sizeof ask / sizeof *ask && has("fish"); i++) {
        char line[700];
        snprintf(
            line, sizeof line,
            "PATH=\"$D/usr/bin:$PATH\" HOME=\"$D/..\" fish -c \"source "
            "$D/usr/share/fish/vendor_completions.d/deltaproof.fish; complete -C '%s'\" | head "
            "-n 1",
            ask[i].words);
        CHECK(sh(line) == 0 && !strncmp(out, ask[i].finds, strcspn(ask[i].finds, "=")),
              "fish: %s: %s", ask[i].words, out);
    }
    if (has("help2man"))
        CHECK(sh("grep -c 'state.*layout' \"$D/usr/share/man/man1/deltaproof-judge.1\"") == 0, "%s",
              out);
    CHECK(sh("make -C \"$T\" --no-print-directory uninstall PREFIX=/usr DESTDIR=\"$D\" && ! find "
             "\"$D\" -type f | grep .") == 0,
          "left behind: %s", out);
}
