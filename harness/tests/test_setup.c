/* scripts/setup in worlds made of a PATH: basic tools, a pretended user, a pretended apt-get, no
 * compiler. Nothing is installed. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "gt.h"

/* A folder of symlinks to basic tools, plus `id` that prints uid and an `apt-get` that runs the
 * argument. */
static const char *world(const char *name, int uid, const char *apt_get) {
    static char dir[512];
    char cmd[4096], out[1024];
    snprintf(dir, sizeof dir, "%s/%s", gt_tmpdir(), name);
    snprintf(cmd, sizeof cmd,
             "set -e; mkdir -p '%s'; for t in bash env cat dirname awk grep sed tail head tr mkdir "
             "mv rm; do ln -s \"$(command -v $t)\" '%s'/$t; done\n"
             "printf '#!/bin/sh\\necho %d\\n' >'%s'/id; chmod +x '%s'/id\n"
             "if [ -n '%s' ]; then printf '#!/bin/sh\\n%%s\\n' '%s' >'%s'/apt-get; chmod +x "
             "'%s'/apt-get; fi",
             dir, dir, uid, dir, dir, apt_get, apt_get, dir, dir);
    CHECK(gt_run(cmd, out, sizeof out) == 0, "cannot make %s: %s", dir, out);
    return dir;
}

static int setup(const char *path, const char *env, char *out, int size) {
    char cmd[2048];
    snprintf(cmd, sizeof cmd, "env -u CC -u CXX -u DP_PYTHON PATH='%s' %s scripts/setup '%s/b'",
             path, env, path);
    return gt_run(cmd, out, size);
}

DP_TEST(setup, without_root_names_what_is_missing_and_the_command) {
    char out[8192];
    const int status =
        setup(world("user", 1000, "echo apt-get must not run; exit 0"), "", out, sizeof out);
    CHECK(status == 2, "exit %d: %s", status, out);
    CHECK(strstr(out, "missing: make gcc g++ python3 libmpfr-dev"), "%s", out);
    CHECK(strstr(out, "apt-get install -y --no-install-recommends make gcc g++ python3 libmpfr-dev "
                      "libgmp-dev liblapacke-dev libopenblas-dev "
                      "libgtest-dev libjansson-dev libxxhash-dev libsodium-dev"),
          "%s", out);
    CHECK(!strstr(out, "must not run") && !strstr(out, "installing"), "%s", out);
}

DP_TEST(setup, without_apt_says_so) {
    char out[8192];
    const int status = setup(world("noapt", 0, ""), "", out, sizeof out);
    CHECK(status == 2 && strstr(out, "missing: ") && strstr(out, "on this system"), "exit %d: %s",
          status, out);
}

DP_TEST(setup, a_failing_apt_is_reported) {
    char out[8192];
    const int status = setup(world("broken", 0, "echo E: no network in this world; exit 100"), "",
                             out, sizeof out);
    CHECK(status == 2, "exit %d: %s", status, out);
    CHECK(strstr(out, "E: no network in this world") && strstr(out, "could not install"), "%s",
          out);
}

DP_TEST(setup, an_apt_that_installs_nothing_is_noticed) {
    char out[8192];
    const int status = setup(world("liar", 0, "exit 0"), "", out, sizeof out);
    CHECK(status == 2 && strstr(out, "still does not find: make gcc"), "exit %d: %s", status, out);
}

DP_TEST(setup, a_compiler_of_ones_own_must_exist) {
    char out[8192];
    const int status = setup(world("clang", 0, "exit 0"), "CC=clang-99", out, sizeof out);
    CHECK(status == 2 && strstr(out, "CC=clang-99: not found"), "exit %d: %s", status, out);
}

/* Here, where the tests were built: ready at once, one line, and an interpreter that imports what
 * the report needs. */
DP_TEST(setup, is_quiet_and_quick_when_nothing_is_missing) {
    char cmd[1024], out[8192];
    snprintf(cmd, sizeof cmd, "DP_PYTHON=\"${DP_PYTHON:-}\" scripts/setup '%s/ready'", gt_tmpdir());
    REQUIRE(gt_run(cmd, out, sizeof out) == 0, "%s", out);
    CHECK(!strncmp(out, "setup: nvcc: ", 13) && strchr(out, '\n') == out + strlen(out) - 1,
          "more than one line: %s", out);
    snprintf(cmd, sizeof cmd,
             "\"$(cat '%s/ready/python')\" -I -c 'import matplotlib, numpy, jinja2'", gt_tmpdir());
    CHECK(gt_run(cmd, out, sizeof out) == 0, "%s", out);
}

/* Everything is installed but MPI, which cannot be had: no reason to stop. */
DP_TEST(setup, without_mpi_the_rest_is_ready) {
    char cmd[2048], out[8192];
    snprintf(cmd, sizeof cmd,
             "mkdir '%s/nompi' && cp -s /usr/bin/* '%s/nompi' 2>/dev/null; cd '%s/nompi' && "
             "rm -f mpi* apt-get && cd - >/dev/null && "
             "env -u CC -u CXX PATH='%s/nompi' DP_PYTHON=\"${DP_PYTHON:-}\" scripts/setup "
             "'%s/nompi/b' packages python mpi",
             gt_tmpdir(), gt_tmpdir(), gt_tmpdir(), gt_tmpdir(), gt_tmpdir());
    REQUIRE(gt_run(cmd, out, sizeof out) == 0, "%s", out);
    CHECK(strstr(out, "setup: no MPI (optional: libopenmpi-dev openmpi-bin )"), "%s", out);
}
