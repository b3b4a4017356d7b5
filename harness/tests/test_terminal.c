/* The program's texts for people: help, suggestions, explanations, causes, colour, streams. */
#include "gt.h"
#include "harness/base/terminal.h"
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static char out[1 << 18];

static int run(const char *arguments) {
    char cmd[3000];
    snprintf(cmd, sizeof cmd, "'%s' %s", gt_program(), arguments);
    return gt_run(cmd, out, sizeof out);
}

static int count(const char *what) {
    int n = 0;
    for (const char *s = out; (s = strstr(s, what)); s++)
        n++;
    return n;
}

DP_TEST(terminal, near_names_are_suggested_and_far_ones_are_not) {
    static const char *const names[] = {"smoke-kda", "smoke-gdn", "judge", "t1"};
    const struct {
        const char *word, *near;
    } t[] = {{"smok-kda", "smoke-kda"}, {"smoke-gnd", "smoke-gdn"},
             {"jugde", "judge"},        {"jud", "judge"},
             {"zebra", NULL},           {"t2", "t1"},
             {"SMOKE-KDA", "smoke-kda"}};
    for (size_t i = 0; i < sizeof t / sizeof *t; i++) {
        const char *got = dp_suggest(t[i].word, names, 4);
        CHECK(t[i].near ? got && !strcmp(got, t[i].near) : !got, "%s: %s", t[i].word,
              got ? got : "none");
    }
}

DP_TEST(terminal, mistyped_words_are_answered_with_what_was_meant) {
    CHECK(run("jduge 2>&1") == 2 && strstr(out, "did you mean 'judge'?"), "%s", out);
    CHECK(run("run smok-kda 2>&1") == 2 && strstr(out, "did you mean smoke-kda?"), "%s", out);
    CHECK(run("judge --ouptuts x 2>&1") == 2 && strstr(out, "did you mean --outputs?"), "%s", out);
    CHECK(run("run smoke-kda --verb 2>&1 | tail -n 1") == 0 && strstr(out, "VERDICT: PASS"),
          "a beginning of an option no longer does: %s", out);
    CHECK(run("run t1 t1 cases/t1.case --ranks 1 2>&1 | grep -c '^t1 '") == 0 && *out == '1',
          "a case is run once: %s", out);
}

DP_TEST(terminal, every_command_has_help_with_an_example_in_80_columns) {
    CHECK(run("help") == 0, "%s", out);
    char commands[20][16];
    int n = 0;
    for (const char *s = out; (s = strstr(s, "\n  ")) && n < 20; s++)
        if (sscanf(s, "\n  %15[a-z]", commands[n]) == 1) n++;
    CHECK(n > 10, "%d commands", n);
    for (int i = 0; i < n; i++) {
        char arguments[400];
        snprintf(arguments, sizeof arguments, "help %s 2>&1", commands[i]);
        CHECK(run(arguments) == 0 && strstr(out, "Examples:\n  deltaproof ") &&
                  !strstr(out, "Mandatory or optional"),
              "%s: %s", commands[i], out);
        for (const char *line = out; *line; line += strcspn(line, "\n") + 1)
            CHECK(strcspn(line, "\n") <= 80, "%s: %.*s", commands[i], (int)strcspn(line, "\n"),
                  line);
        snprintf(arguments, sizeof arguments, "%s -h 2>&1", commands[i]);
        CHECK(run(arguments) == 0 && strstr(out, "Usage:"), "%s -h: %s", commands[i], out);
    }
}

/* The first line of more than 80 columns that does not end with the ID of a run; NULL: none. */
static const char *too_wide(const char *text) {
    static char line[2000];
    for (; *text; text += strcspn(text, "\n") + (strchr(text, '\n') != NULL)) {
        snprintf(line, sizeof line, "%.*s", (int)strcspn(text, "\n"), text);
        const char *last = strrchr(line, ' ');
        if (strlen(line) > 80 && !strstr(last ? last : line, ",merge=")) return line;
    }
    return NULL;
}

DP_TEST(terminal, failures_stand_at_the_end_by_cause_with_commands_that_work) {
    CHECK(run("run weak-heads --base fp32 --ranks 4 --fault merge-scaled 2>&1") == 1, "%s", out);
    const char *end = strstr(out, "FAILURES by cause: 1\n");
    REQUIRE(end, "%s", out);
    CHECK(strstr(end, "weak-heads: ") && strstr(end, "    shape:   T ") &&
              strstr(end, " in 8 of 8 runs") && count("again:") == 1,
          "%s", end);
    CHECK(!too_wide(end), "%s", too_wide(end));
    const char *id = strstr(end, "deltaproof explain '");
    char arguments[400];
    REQUIRE(id, "%s", end);
    snprintf(arguments, sizeof arguments, "%.*s 2>/dev/null", (int)strcspn(id, "\n") - 11, id + 11);
    CHECK(run(arguments) == 0 && strstr(out, "decided by ") && strstr(out, "derived in ") &&
              strstr(out, "truth        the step recurrence in mpfr at 192 bits") &&
              strstr(out, "place        rank ") && !strstr(out, "power "),
          "%s: %s", arguments, out);
    CHECK(!too_wide(out), "%s", too_wide(out));
}

/* Runs the command behind `word` in what was said, as it stands, by the program in place of its
 * name; -1: there is none. */
static int run_said(const char *word, const char *more) {
    char line[2000];
    const char *at = strstr(out, word);
    if (!at || !(at = strstr(at, "deltaproof "))) return -1;
    at += strlen("deltaproof ");
    snprintf(line, sizeof line, "%.*s %s", (int)strcspn(at, "\n"), at, more);
    return run(line);
}

DP_TEST(terminal, the_lines_below_a_failure_work_where_cases_lie_elsewhere_and_in_a_record) {
    static const struct {
        const char *options, *word, *says;
        int status;
    } rows[] = {
        {"", "again:   ", "VERDICT: FAIL", 1},
        {"", "explain: ", "decided by ", 0},
        {"--json %s/own.json", "explain: ", "decided by ", 0},
    };
    const char *tmp = gt_tmpdir();
    char line[2000], options[600];
    snprintf(line, sizeof line,
             "mkdir -p '%s/own'; for n in one two; do { echo 'reason = r'; echo 'source = s'; echo "
             "'op = kda'; echo 'T = 64'; echo 'K = 8'; echo 'V = 4'; echo 'g_scale = 0.02'; echo "
             "'ranks = 2'; echo 'base = fp32'; } >'%s/own'/own-$n.case; done",
             tmp, tmp);
    REQUIRE(gt_run(line, out, sizeof out) == 0, "%s", out);
    for (size_t i = 0; i < sizeof rows / sizeof *rows; i++) {
        snprintf(options, sizeof options, rows[i].options, tmp);
        snprintf(line, sizeof line,
                 "run own-one own-two -c '%s/own' --fault merge-scaled --backend sim %s 2>&1", tmp,
                 options);
        REQUIRE(run(line) == 1, "%s", out);
        CHECK(run_said(rows[i].word, "2>&1") == rows[i].status && strstr(out, rows[i].says),
              "%s%s: %s", rows[i].word, options, out);
    }
}

DP_TEST(terminal, a_run_is_explained_from_its_record_too) {
    char arguments[1000];
    snprintf(arguments, sizeof arguments,
             "run smoke-gdn --backend sim --base fp32 --json '%s/r.json' >/dev/null", gt_tmpdir());
    REQUIRE(run(arguments) == 0, "%s", out);
    const char *id = "smoke-gdn:ranks=2,base=fp32,chain=fp32,merge=allgather";
    snprintf(arguments, sizeof arguments, "explain --record '%s/r.json' %s --tensor dk",
             gt_tmpdir(), id);
    CHECK(run(arguments) == 0 && strstr(out, "\ndk pass\n") &&
              strstr(out, "power        the tensor times 1 + "),
          "%s", out);
    snprintf(arguments, sizeof arguments, "explain --record '%s/r.json' %s --tensor z 2>&1",
             gt_tmpdir(), id);
    CHECK(run(arguments) == 2 && strstr(out, "the run has no tensor z"), "%s", out);
    snprintf(arguments, sizeof arguments, "explain --record '%s/r.json' nothing 2>&1", gt_tmpdir());
    CHECK(run(arguments) == 2 && strstr(out, "has no run nothing"), "%s", out);
    CHECK(run("explain chain-reflect-k32:chain=tf32 2>/dev/null") == 0 &&
              strstr(out, "\nunjudged: "),
          "a run without a verdict: %s", out);
    CHECK(run("explain judge:o.safetensors:ranks=1,base=fp32,chain=fp32 2>&1") == 2 &&
              strstr(out, "give --record FILE"),
          "%s", out);
}

DP_TEST(terminal, colour_and_progress_are_for_terminals_alone) {
    CHECK(run("run t1 t63 2>&1") == 0 && !strchr(out, 27) && !strchr(out, 13), "%s", out);
    if (gt_run("command -v script", out, sizeof out)) SKIP("script is not installed");
    char cmd[2000];
    const char *shown[] = {"", "NO_COLOR=1 ", "TERM=dumb "};
    for (int i = 0; i < 3; i++) {
        snprintf(cmd, sizeof cmd, "TERM=xterm script -qec \"env %s'%s' run t1 t63\" /dev/null",
                 shown[i], gt_program());
        CHECK(gt_run(cmd, out, sizeof out) == 0, "%s", out);
        CHECK(!strstr(out, "\033[32m") == (i > 0), "%s: %s", shown[i], out);
        CHECK(!strstr(out, "of 2 cases") == (i > 1), "%s: %s", shown[i], out);
        CHECK(strstr(out, "pass"), "%s", out);
    }
    snprintf(
        cmd, sizeof cmd,
        "TERM=xterm script -qec \"NO_COLOR=1 '%s' run weak-heads --base fp32 --ranks 4 --fault "
        "merge-scaled\" /dev/null | tr -d '\\r' | sed 's/\033\\[K//g; s/^[0-9]* of [0-9]* "
        "cases.*//'",
        gt_program());
    CHECK(gt_run(cmd, out, sizeof out) == 0 && strstr(out, "\n  weak-heads: o (bound)"), "%s", out);
    CHECK(!too_wide(out), "%s", too_wide(out));
}

DP_TEST(terminal, what_could_not_be_judged_is_said_beside_its_reason) {
    CHECK(run("judge --inputs /nowhere --outputs /nowhere 2>/dev/null") == 2 && !*out, "%s", out);
    CHECK(run("judge --inputs /nowhere --outputs /nowhere 2>&1 >/dev/null") == 2 &&
              strstr(out, "/nowhere") && strstr(out, "VERDICT: COULD NOT JUDGE"),
          "%s", out);
}
