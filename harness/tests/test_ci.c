/* The files of a CI system: the job's script, JUnit with body, time and properties, a Markdown
 * summary, a compressed record, an index of records. */
#include "gt.h"
#include "ref/vocabulary/problem.h"
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static char out[1 << 16];

static const char *python(void) {
    const char *p = getenv("DP_PYTHON");
    return p && *p ? p : "python3";
}

/* Runs a shell line in which $D is a folder of this test, $T the tree, $PY a Python. */
static int sh(const char *line) {
    static char cmd[6000];
    snprintf(cmd, sizeof cmd,
             "export D='%s/ci' T=\"$(realpath '%s/..')\" PY='%s' DELTAPROOF='%s' "
             "PYTHONDONTWRITEBYTECODE=1; mkdir -p \"$D\"; %s",
             gt_tmpdir(), gt_cases(), python(), gt_program(), line);
    return gt_run(cmd, out, sizeof out);
}

static int needs_page(void) { return sh("$PY -c 'import matplotlib, jinja2'") == 0; }

DP_TEST(ci, a_job_leaves_summary_junit_and_a_compressed_record) {
    if (!needs_page()) SKIP("%s has no matplotlib and Jinja2", python());
    CHECK(
        sh("GITHUB_SHA=abc123 GITHUB_STEP_SUMMARY=\"$D/page.md\" \"$T/scripts/ci-judge\" \"$D/r\" "
           "run weak-heads --ranks 4 --base fp32 --fault merge-scaled --label 'a <trial>' "
           ">/dev/null 2>&1") == 1,
        "%s", out);
    CHECK(sh("cat \"$D/page.md\"") == 0 && strstr(out, "## deltaproof: fail\n") &&
              strstr(out, "| weak-heads | o | 8 of 8 | weak-heads:ranks=4") &&
              strstr(out, "(\\|error\\| "),
          "%s", out);
    static const char check[] =
        "import sys, xml.etree.ElementTree as E\n"
        "s = E.parse(sys.argv[1]).getroot()\n"
        "p = {x.get('name'): x.get('value') for x in s.find('properties')}\n"
        "assert p['kernel_commit'] == 'abc123' and p['label'] == 'a <trial>', p\n"
        "assert p['verdict'] == 'fail' and len(s.get('timestamp')) == 19, s.attrib\n"
        "cases = s.findall('testcase')\n"
        "assert len(cases) == int(s.get('tests')) == 8 and s.get('failures') == '8', s.attrib\n"
        "body = cases[0].find('failure').text\n"
        "assert 'o: error is' in body and 'deltaproof run --id' in body, body\n";
    char line[3000];
    snprintf(line, sizeof line,
             "cat >\"$D/check.py\" <<'E'\n%sE\n$PY \"$D/check.py\" \"$D/r/junit.xml\"", check);
    CHECK(sh(line) == 0, "%s", out);
    CHECK(sh("test ! -e \"$D/r/results.json\" && gzip -t \"$D/r/results.json.gz\"") == 0, "%s",
          out);
}

DP_TEST(ci, what_could_not_be_judged_is_an_error_in_junit) {
    if (!needs_page()) SKIP("%s has no matplotlib and Jinja2", python());
    CHECK(sh("\"$DELTAPROOF\" judge --inputs /nowhere --outputs /nowhere --out \"$D/r\" >/dev/null "
             "2>&1; "
             "cat \"$D/r/junit.xml\"") == 0 &&
              strstr(out, "errors=\"1\"") && strstr(out, "<error message=\"1 could not be judged"),
          "%s", out);
}

DP_TEST(ci, an_index_shows_records_by_kernel_newest_first_compressed_ones_too) {
    if (!needs_page()) SKIP("%s has no matplotlib and Jinja2", python());
    CHECK(sh("for n in 1 2; do mkdir -p \"$D/all/$n\"; \"$DELTAPROOF\" run t1 --base fp32 --json "
             "\"$D/all/$n/results.json\" --label 'mine & <yours>' --kernel-commit c0ffee$n "
             ">/dev/null "
             "|| exit 1; sleep 1; done; gzip \"$D/all/1/results.json\"; echo broken "
             ">\"$D/all/results.json\"; \"$DELTAPROOF\" index \"$D/all\" 2>&1") == 0 &&
              strstr(out, "index.html: 2 records") && strstr(out, "left out: "),
          "%s", out);
    CHECK(sh("cat \"$D/all/index.html\"") == 0, "%s", out);
    const char *second = strstr(out, "c0ffee2"), *first = strstr(out, "c0ffee1");
    CHECK(first && second && second < first, "order: %s", out);
    CHECK(strstr(out, "<h2>mine &amp; &lt;yours&gt;</h2>") && !strstr(out, "<yours>") &&
              strstr(out, "href=\"1/results.json.gz\"") && strstr(out, "+0%"),
          "%s", out);
    CHECK(sh("mkdir \"$D/none\"; \"$DELTAPROOF\" index \"$D/none\" 2>&1") == 2 &&
              strstr(out, "no results.json below it"),
          "%s", out);
}

DP_TEST(ci, the_action_and_the_template_are_what_they_say) {
    if (sh("/usr/bin/python3 -c 'import yaml'")) SKIP("no Python here has PyYAML");
    CHECK(sh("cd \"$T\" && /usr/bin/python3 -c \"import yaml; a = "
             "yaml.safe_load(open('action.yml')); s = "
             "a['runs']['steps']; assert a['runs']['using'] == 'composite' and 'ci-judge' in "
             "s[2]['run'], s; g = yaml.safe_load(open('scripts/ci/gitlab.yml'))['.deltaproof']; "
             "assert g['artifacts']['reports']['junit'].endswith('junit.xml'); "
             "yaml.safe_load(open('.pre-commit-config.yaml'))\"") == 0,
          "%s", out);
}

/* The steps that their systems would run, but for the installation: scripts/ci/steps. */
DP_TEST(ci, steps_of_the_action_and_of_the_template_judge_as_written) {
    if (sh("/usr/bin/python3 -c 'import yaml'")) SKIP("no Python here has PyYAML");
    if (!needs_page()) SKIP("%s has no matplotlib and Jinja2", python());
    static const char steps[] =
        "mkdir -p \"$D/opt/deltaproof/bin\" && cd \"$D\" && rm -rf deltaproof-report && ln -sf "
        "\"$DELTAPROOF\" opt/deltaproof/bin/deltaproof && /usr/bin/python3 \"$T/scripts/ci/steps\" "
        "%s=\"run t1 --base fp32 --label 'two words'%s\" | env -u DELTAPROOF %s "
        "PATH=\"$D/opt/deltaproof/bin:$PATH\" RUNNER_TEMP=\"$D/opt\" GITHUB_SHA=c0ffee "
        "GITHUB_STEP_SUMMARY=\"$D/job.md\" CI_COMMIT_SHA=c0ffee CI_PROJECT_DIR=\"$D\" bash 2>&1";
    static const struct {
        const char *system, *more, *page; /* page: none, where it costs most of the time */
        int status;
    } rows[] = {{"action --only judge run", "", "DP_REPORT=\"$T/reports/ci.py\"", 0},
                {"action --only judge run", " --ranks 1 --fault decay-before-use", "", 1},
                {"gitlab --only script DELTAPROOF_RUN", "", "", 0},
                {"gitlab --only script DELTAPROOF_RUN", " --ranks 1 --fault decay-before-use",
                 "DP_REPORT=\"$T/reports/ci.py\"", 1}};
    for (size_t i = 0; i < sizeof rows / sizeof *rows; i++) {
        char line[2000];
        snprintf(line, sizeof line, steps, rows[i].system, rows[i].more, rows[i].page);
        CHECK(sh(line) == rows[i].status, "%s%s: %s", rows[i].system, rows[i].more, out);
        const int action = rows[i].system[0] == 'a';
        CHECK(sh(action ? "cat \"$D/job.md\" && rm \"$D/job.md\""
                        : "cd \"$D\" && export CI_PROJECT_DIR=\"$D\" && /usr/bin/python3 "
                          "\"$T/scripts/ci/steps\" gitlab --only after_script | bash") == 0 &&
                  strstr(out, rows[i].status ? "deltaproof: fail" : "deltaproof: pass"),
              "%s", out);
        snprintf(
            line, sizeof line,
            "cd \"$D/deltaproof-report\" && test -s junit.xml && test %s -s report.html && gzip "
            "-dc results.json.gz",
            *rows[i].page ? "!" : "");
        CHECK(sh(line) == 0 && strstr(out, "\"two words\"") && strstr(out, "\"c0ffee\""),
              "%s: %.2000s", rows[i].system, out);
    }
}

/* An input of the action is a value: a shell that reads it as words would make the file. */
DP_TEST(ci, no_input_of_the_action_is_a_command) {
    if (sh("/usr/bin/python3 -c 'import yaml'")) SKIP("no Python here has PyYAML");
    CHECK(sh("mkdir -p \"$D/stub\" && cd \"$D\" && for p in apt-get sudo; do printf "
             "'#!/bin/sh\\n' >stub/$p && chmod +x stub/$p; done && /usr/bin/python3 "
             "\"$T/scripts/ci/steps\" action --only 'libraries and program' "
             "python=\"false'; touch pasted; '\" | PATH=\"$D/stub:$PATH\" RUNNER_TEMP=\"$D/opt\" "
             "bash 2>&1; test ! -e pasted") == 0 &&
              strstr(out, "touch pasted"),
          "%s", out);
}

/* scripts/ci/check: that this tree keeps its rules, and that a tree which breaks one is told. */
DP_TEST(ci, jobs_make_every_target_and_take_others_work_by_hash) {
    if (sh("/usr/bin/python3 -c 'import yaml'")) SKIP("no Python here has PyYAML");
    CHECK(sh("/usr/bin/python3 \"$T/scripts/ci/check\" 2>&1") == 0, "%s", out);
    static const char *const says[] = {
        "make -n fuzz: make: *** No rule to make target 'harness/base/terminal.c'",
        "make tsan: no job makes it",
        "action.yml: in a shell line: ${{ inputs.python }}",
        "action.yml: not a commit with its tag: actions/cache/restore@v4",
        "Containerfile: an image without tag and digest: nvidia/cuda",
    };
    CHECK(sh("rm -rf \"$D/tree\" && mkdir \"$D/tree\" && cd \"$D/tree\" && for x in \"$T\"/* "
             "\"$T\"/.github \"$T\"/.ci \"$T\"/.devcontainer; do case $x in */build) ;; *) cp -rs "
             "\"$x\" .;; esac; done && rm harness/base/terminal.c && sed -i 's/make tsan/true/' "
             ".github/workflows/weekly.yml && sed -i 's/\"$PYTHON\"/${{ inputs.python }}/; "
             "s/@[0-9a-f]* "
             "# v/@v/' action.yml && sed -i 's/@sha256:.*//' Containerfile && env -u MAKELEVEL "
             "/usr/bin/python3 \"$T/scripts/ci/check\" . 2>&1") == 1,
          "%s", out);
    for (size_t i = 0; i < sizeof says / sizeof *says; i++)
        CHECK(strstr(out, says[i]), "no '%s': %s", says[i], out);
}

DP_TEST(ci, whoever_installs_packages_names_all_that_the_program_needs) {
    CHECK(
        sh("cd \"$T\" && for p in $(sed -n 's/^\\(lib[a-z0-9-]*-dev\\) .*/\\1/p' scripts/setup | "
           "grep -v gtest); do for f in action.yml scripts/ci/gitlab.yml .github/workflows/ci.yml "
           "scripts/newcomer Containerfile; do grep -qw -- \"$p\" $f || echo \"$f: no $p\"; done; "
           "echo seen; done") == 0 &&
            strstr(out, "seen") && !strstr(out, ": no "),
        "%s", out);
}

/* The counts of `make verify` in README and harness/README. If its record is of this commit, it has
 * the same counts, and is below 20 MB. */
DP_TEST(ci, documents_count_what_make_verify_counts) {
    CHECK(sh("grep -ho 'VERDICT: PASS ([0-9a-z,; ]*)' \"$T/README.md\" "
             "\"$T/harness/README.md\" | sort | uniq -c | awk '{print $1}'") == 0 &&
              !strcmp(out, "2\n"),
          "README and harness/README differ: %s", out);
    const int judged =
        sh("cd \"$T\" && /usr/bin/python3 - <<'E'\n"
           "import json, pathlib, subprocess, sys\n"
           "path = pathlib.Path('build/verify/results.json')\n"
           "record = json.loads(path.read_text()) if path.exists() else {'program': {}}\n"
           "git = ['git', 'describe', '--always', '--dirty', '--abbrev=12']\n"
           "here = subprocess.run(git, capture_output=True, text=True).stdout.strip()\n"
           "if not here or here != record['program'].get('commit'): sys.exit(3)\n"
           "n = record['totals']\n"
           "said = f\"{n['pass']} passed, {n['fail']} failed, {n['skipped']} skipped, \" \\\n"
           "    f\"{n['unjudged']} unjudged\"\n"
           "print(said, path.stat().st_size, 'bytes')\n"
           "sys.exit(said not in pathlib.Path('README.md').read_text()\n"
           "         or path.stat().st_size > 20e6)\n"
           "E");
    if (judged != 3) CHECK(judged == 0, "build/verify counts %s", out);
}

/* pyproject.toml, the wheel and deltaproof.pc read ref/vocabulary/problem.h themselves. */
DP_TEST(ci, the_version_is_the_same_wherever_it_is_said) {
    CHECK(sh("\"$DELTAPROOF\" --version") == 0 && strstr(out, "deltaproof " DP_VERSION " ("), "%s",
          out);
    CHECK(sh("cat \"$T/CITATION.cff\"") == 0 && strstr(out, "\nversion: " DP_VERSION "\n"), "%s",
          out);
    CHECK(sh("sed -n 's/^## //p' \"$T/CHANGELOG.md\" | grep -v Unreleased | head -n 1") == 0 &&
              !strcmp(out, DP_VERSION "\n"),
          "the newest entry of CHANGELOG.md is of %s", out);
}

/* scripts/shards adds the counts of the parts of a test program and shows failures. A part that
 * died does not count as passed. */
DP_TEST(ci, parts_of_the_tests_are_summed_and_a_part_that_died_is_no_pass) {
    static const char part[] =
        "cat >\"$D/part\" <<'E'\n#!/bin/sh\n"
        "if [ $2 = --gtest_list_tests ]; then\n"
        "    for i in 0 1 2 3 4 5; do echo \"s$i.\"; echo '  b'; echo '  c'; done; exit; fi\n"
        "s=${2#*=}; [ \"$s\" = ${s%%.*}.b:${s%%.*}.c ] || exit 3; s=${s%%.*}\n"
        "echo \"[ RUN      ] $s.b\"; echo 'x.c:1: Failure said'\n"
        "case $1$s in\n"
        "fails1) echo '[  FAILED  ] s1.b (1 ms)'; echo '0 passed, 1 failed, 2 skipped'; exit 1;;\n"
        "dies1) kill -9 $$;;\n"
        "leaks1) echo '[       OK ] s1.b (1 ms)'; echo '3 passed, 0 failed, 0 skipped'; "
        "echo 'ERROR: leak'; exit 1;;\n"
        "*) echo \"[       OK ] $s.b (1 ms)\"; echo '3 passed, 0 failed, 0 skipped';;\n"
        "esac\nE\nchmod +x \"$D/part\"; \"$T/scripts/shards\" ${N:-2} \"$D/part\" ";
    static const struct {
        const char *how, *last, *says, *hides;
        int status;
    } rows[] = {
        {"pass", "18 passed, 0 failed, 0 skipped\n", "[       OK ] s1.b", "Failure said", 0},
        {"fail", "15 passed, 1 failed, 2 skipped\n", "[ RUN      ] s1.b\nx.c:1: Failure said\n",
         "part 1", 1},
        {"leak", "18 passed, 0 failed, 0 skipped\n", "ERROR: leak", "Failure said", 1},
        {"die", "15 passed, 0 failed, 0 skipped\n", "part 1 did not come to its end", "s1.b (1", 1},
    };
    char line[2000];
    snprintf(line, sizeof line, "export N=1 FIRST='s4 none s2'; %spass", part);
    CHECK(sh(line) == 0 &&
              strstr(out, "OK ] s4.b (1 ms)\n[       OK ] s2.b (1 ms)\n[       OK ] s0.b"),
          "%s", out);
    for (size_t i = 0; i < sizeof rows / sizeof *rows; i++) {
        snprintf(line, sizeof line, "%s%s", part, rows[i].how);
        CHECK(sh(line) == rows[i].status, "%s: %s", rows[i].how, out);
        const size_t n = strlen(out), m = strlen(rows[i].last);
        CHECK(n > m && !strcmp(out + n - m, rows[i].last) && strstr(out, rows[i].says) &&
                  !strstr(out, rows[i].hides),
              "%s: %s", rows[i].how, out);
    }
}
