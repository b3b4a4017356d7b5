/* The Python package as its users have it. The wheel is built and installed into a fresh virtual
 * environment, and the tests of python/tests run there, in no source tree. */
#include "gt.h"
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static char out[1 << 16];

/* Runs the command; its exit status. */
static int sh(const char *command) { return gt_run(command, out, sizeof out); }

DP_TEST(python, wheel_installs_into_a_fresh_environment_and_its_tests_pass) {
    const char *program = getenv("DP_WHEEL_PROGRAM"), *tmp = gt_tmpdir();
    char cmd[4000], dir[600];
    snprintf(dir, sizeof dir, "%s/python", tmp);
    snprintf(cmd, sizeof cmd, "mkdir -p '%s'", dir);
    REQUIRE(sh(cmd) == 0, "%s", out);
    if (strstr(gt_program(), "/san/")) SKIP("a program with sanitizers is no part of a wheel");
    snprintf(cmd, sizeof cmd, "cd '%s/..' && DELTAPROOF_PROGRAM='%s' scripts/wheel '%s/wheel'",
             gt_cases(), program ? program : "", dir);
    const int built = sh(cmd);
    if (built == 2 && strstr(out, "wheel: no tools")) SKIP("pip reaches no index: %.300s", out);
    REQUIRE(built == 0, "%s", out);
    CHECK(strstr(out, "manylinux_2_"), "%s", out);
    snprintf(cmd, sizeof cmd,
             "cd '%s' && base=python3 && { $base -c 'import ensurepip, venv' || "
             "base=/usr/bin/python3; } 2>/dev/null; $base -m venv --without-pip env && "
             "wheel/pack/bin/pip --python env/bin/python install -q --no-compile wheel/dist/*.whl "
             "pytest pytest-xdist && env -u PYTHONDONTWRITEBYTECODE env/bin/python -c "
             "'import deltaproof, jinja2, matplotlib.figure as m\n" /* compiled: what pages take */
             "for x in \"png\", \"pdf\", \"svg\": m.Figure().savefig(\"/dev/null\", format=x)'",
             dir);
    REQUIRE(sh(cmd) == 0, "%s", out);
    snprintf(cmd, sizeof cmd,
             "cp -r '%s/../python/tests' '%s/tests' && cp '%s/../README.md' '%s/tests' && cd "
             "'%s/tests' && env -u DELTAPROOF -u PYTHONDONTWRITEBYTECODE "
             "-u PYTHONPATH XDG_CACHE_HOME='%s/cache' PATH=/usr/bin:/bin "
             "OPENBLAS_NUM_THREADS=1 " /* a second thread spins between small products */
             "DELTAPROOF_TREE='%s/..' "
             "../env/bin/python -m pytest -q -n auto --dist loadfile -p no:cacheprovider >log; "
             "s=$?; grep -E '^(FAILED|ERROR)' log | head -c 2000; tail -n 1 log; "
             "exit $s",
             gt_cases(), dir, gt_cases(), dir, dir, dir, gt_cases());
    CHECK(sh(cmd) == 0 && strstr(out, " passed"), "%s", out);
    snprintf(cmd, sizeof cmd, "cd / && '%s/env/bin/deltaproof' --version", dir);
    CHECK(sh(cmd) == 0 && strstr(out, "deltaproof "), "%s", out);
}

/* scripts/campaigns/peers/fla_dump.py on modules that keep to the contract of PyTorch and
 * safetensors and no more: a file that is open has names by keys() alone. */
DP_TEST(python, a_dump_is_read_by_the_names_of_its_tensors) {
    char cmd[2000];
    snprintf(cmd, sizeof cmd,
             "cd '%s/../scripts/campaigns/peers' && python3 -B -c \"\n"
             "import contextlib, sys, types\n"
             "class Open(contextlib.nullcontext):\n"
             "    def __enter__(self): return self\n"
             "    def keys(self): return ['o', 'dq']\n"
             "    def get_tensor(self, name): return 'tensor ' + name\n"
             "    def metadata(self): return None\n"
             "st = types.ModuleType('safetensors')\n"
             "st.safe_open = lambda path, framework: Open()\n"
             "st.torch = types.ModuleType('safetensors.torch')\n"
             "st.torch.save_file = None\n"
             "torch = types.ModuleType('torch')\n"
             "sys.modules |= {'torch': torch, 'safetensors': st, 'safetensors.torch': st.torch}\n"
             "import fla_dump\n"
             "print(fla_dump.load('x'))\"",
             gt_cases());
    CHECK(sh(cmd) == 0 && strstr(out, "({'o': 'tensor o', 'dq': 'tensor dq'}, {})"), "%s", out);
}
