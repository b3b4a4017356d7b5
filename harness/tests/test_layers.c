/* The folders of ref/, harness/ and gpu/ use only those before them (scripts/layers). Lines are at
 * most 100 columns wide (scripts/width), sentences within a budget (scripts/prose). */
#include "gt.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static char out[1 << 14];

static int layers(const char *root) {
    char cmd[2100];
    snprintf(cmd, sizeof cmd, "python3 '%s/scripts/layers'", root);
    return gt_run(cmd, out, sizeof out);
}

DP_TEST(layers, no_folder_uses_one_that_comes_after_it) {
    char root[512];
    snprintf(root, sizeof root, "%s/..", gt_cases());
    CHECK(layers(root) == 0, "%s", out);
}

DP_TEST(layers, what_goes_up_or_round_is_not_there_or_empty_is_named) {
    char cmd[2048];
    snprintf(cmd, sizeof cmd,
             "cd '%s' && mkdir -p tree/scripts && cp -r '%s/../Makefile' '%s/../ref' "
             "'%s/../harness' '%s/../gpu' tree && cp '%s/../scripts/layers' tree/scripts && "
             "echo '#include \"harness/base/home.h\"' >>tree/ref/chunk/gate.h && "
             "echo '#include \"exchange/group.cuh\"' >>tree/gpu/plan/plan.cuh && "
             ": >tree/harness/tests/test_own.c && "
             "echo '#include \"problem.h\"' >>tree/ref/vocabulary/tensors.h && "
             "echo 'see `chunk/no_such_file.c`' >>tree/ref/README.md",
             gt_tmpdir(), gt_cases(), gt_cases(), gt_cases(), gt_cases(), gt_cases());
    REQUIRE(gt_run(cmd, out, sizeof out) == 0, "%s", out);
    snprintf(cmd, sizeof cmd, "%s/tree", gt_tmpdir());
    CHECK(layers(cmd) == 1, "%s", out);
    CHECK(strstr(out, "ref/chunk/gate.h includes harness/base/home.h, which comes after it") &&
              strstr(out, "ref/README.md names chunk/no_such_file.c, which is not there") &&
              strstr(out, "gpu/plan/plan.cuh includes gpu/exchange/group.cuh, which comes") &&
              strstr(out, "ref/vocabulary/problem.h includes ref/vocabulary/tensors.h includes "
                          "ref/vocabulary/problem.h\n") &&
              strstr(out, "harness/tests/test_own.c has no DP_TEST") && strstr(out, " 5 wrong"),
          "%s", out);
}

/* A machine of a new user has neither header; this one may. */
DP_TEST(layers, without_a_device_nothing_includes_cuda_or_mpi) {
    char cmd[2100];
    snprintf(cmd, sizeof cmd,
             "D='%s/none'; mkdir -p \"$D\"; : >\"$D/cuda_runtime_api.h\"; : >\"$D/mpi.h\"; cd "
             "'%s/..' && gcc -std=gnu11 -I. -isystem \"$D\" -M $(find ref harness python -name "
             "'*.c' | grep -v '/tests/\\|/fuzz/\\|/bench/\\|/subject/') >\"$D/deps\" && grep -c "
             "home.h \"$D/deps\" && ! grep \"$D\" \"$D/deps\"",
             gt_tmpdir(), gt_cases());
    CHECK(gt_run(cmd, out, sizeof out) == 0 && atoi(out) > 0, "%s", out);
}

/* ---- lines ----------------------------------------------------------------------------------- */

DP_TEST(layers, no_line_is_wider_than_100_columns) {
    char cmd[2100];
    snprintf(cmd, sizeof cmd, "python3 '%s/../scripts/width'", gt_cases());
    CHECK(gt_run(cmd, out, sizeof out) == 0, "%s", out);
}

DP_TEST(layers, sentences_stay_within_their_budget) {
    char cmd[2100];
    snprintf(cmd, sizeof cmd, "DELTAPROOF='%s' python3 '%s/../scripts/prose'", gt_program(),
             gt_cases());
    CHECK(gt_run(cmd, out, sizeof out) == 0 && strstr(out, "are help texts"), "%s", out);
}

/* Words of: Markdown, --help of commands and of commands within them, argparse, scripts/man. */
DP_TEST(layers, words_of_help_texts_count) {
    char root[600], cmd[3000];
    snprintf(root, sizeof root, "%s/helps", gt_tmpdir());
    snprintf(
        cmd, sizeof cmd,
        "mkdir -p '%s/scripts' '%s/python/deltaproof' && cd '%s' && "
        "cp '%s/../scripts/width' '%s/../scripts/prose' scripts && echo one two >a.md && "
        "printf \"page 'three four' x\\n\" >scripts/man && "
        "echo \"a.add_argument('--x', help='five six', type='seven')\" >python/deltaproof/a.py && "
        "printf '#!/bin/sh\\ncase \"$*\" in\\nhelp) echo \"eight\\n  run nine\\n\\nten\";;\\n"
        "help\\\\ run) echo \"deltaproof run stage CASE [OPTION...]\";;\\n"
        "run*) echo 16;;\\nesac\\n' >program && chmod +x program && "
        "echo '{\"documents words\": %%d}' >scripts/prose.json && "
        "DELTAPROOF=%%s python3 scripts/prose",
        root, root, root, gt_cases(), gt_cases());
    char with[3100];
    static const struct {
        int most;
        const char *program, *says;
        int status;
    } R[] = {{16, "./program", "14 of the words", 0},
             {15, "./program", "MORE", 1},
             {2, "no", "not counted", 0}};
    for (size_t i = 0; i < sizeof R / sizeof *R; i++) {
        snprintf(with, sizeof with, cmd, R[i].most, R[i].program);
        CHECK(gt_run(with, out, sizeof out) == R[i].status && strstr(out, R[i].says), "%s", out);
    }
}

/* Each kind of text is read, and what is none is not. */
DP_TEST(layers, a_sentence_beyond_the_budget_is_named) {
    static const struct {
        const char *file, *text;
        int counts;
    } F[] = {{"a.md", "Of a kernel the larger error counts.\n", 1},
             {"a.md", "|Of|\n\n    Of code\n\n# Of\n", 0},
             {"b.c", "\57* Whose bare hand came? */\n", 4},
             {"b.c", "int Whose; /* x\n *   Of a table\n */\n", 0},
             {"c.py", "def f():\n    \"\"\"Those of f.\"\"\"\n", 1},
             {"c.py", "x = 'Of'\n", 0},
             {"d.md", "a b c d e f g h i j k l m n o p q r s t u v w x y z.\n", 1},
             {"d.md", "a b c d e f g h i j k l m n o p q r s t u v `w x y z`.\n", 0}};
    char root[600], cmd[2000];
    snprintf(root, sizeof root, "%s/prose", gt_tmpdir());
    snprintf(cmd, sizeof cmd,
             "mkdir -p '%s/scripts' && cp '%s/../scripts/width' '%s/../scripts/prose' '%s/scripts'",
             root, gt_cases(), gt_cases(), root);
    REQUIRE(gt_run(cmd, out, sizeof out) == 0, "%s", out);
    for (size_t i = 0; i < sizeof F / sizeof *F; i++) {
        snprintf(cmd, sizeof cmd, "%s/%s", root, F[i].file);
        FILE *f = fopen(cmd, "w");
        REQUIRE(f, "%s", cmd);
        fputs(F[i].text, f);
        fclose(f);
        snprintf(cmd, sizeof cmd, "cd '%s' && python3 scripts/prose %s", root, F[i].file);
        REQUIRE(gt_run(cmd, out, sizeof out) == 0, "%s", out);
        int lines = 0;
        for (const char *c = out; *c; c++)
            lines += *c == '\n';
        CHECK(lines == F[i].counts, "%s: %s: %s", F[i].file, F[i].text, out);
        snprintf(cmd, sizeof cmd,
                 "cd '%s' && echo '{\"documents words\": 99}' >scripts/prose.json && "
                 "DELTAPROOF=no python3 scripts/prose",
                 root);
        CHECK((gt_run(cmd, out, sizeof out) != 0) == (F[i].counts > 0), "%s", out);
        snprintf(cmd, sizeof cmd, "%s/%s", root, F[i].file);
        remove(cmd);
    }
}

/* Each kind of file is looked at, and what may be wide is not. */
DP_TEST(layers, a_line_that_is_too_wide_is_named) {
    static const struct {
        const char *file, *begins, *line;
        int wide;
    } F[] = {{"a.sh", "", "# %s", 1},
             {"b", "#!/bin/sh\n", "echo %s", 1},
             {"c.mk", "", "%s:", 1},
             {"Makefile", "", "X := %s", 1},
             {"d.yml", "", "a: %s", 1},
             {"e.h", "", "/* %s */", 1},
             {"f.py", "", "# %s", 1},
             {"g.md", "Prose.\n\n", "and %s", 1},
             {"h.md", "- an item\n", "  with %s", 1},
             {"i.md", "", "| %s |", 0},
             {"j.md", "# A\n\n", "    %s", 0},
             {"k.md", "```\n", "%s", 0},
             {"l.md", "", "# %s", 0},
             {"m.txt", "", "%s", 0}};
    char root[600], path[700], text[120], says[80], cmd[1400];
    snprintf(root, sizeof root, "%s/wide", gt_tmpdir());
    snprintf(cmd, sizeof cmd, "mkdir -p '%s/scripts' && cp '%s/../scripts/width' '%s/scripts'",
             root, gt_cases(), root);
    REQUIRE(gt_run(cmd, out, sizeof out) == 0, "%s", out);
    memset(text, 'x', 101);
    text[101] = 0;
    for (size_t i = 0; i < sizeof F / sizeof *F; i++) {
        snprintf(path, sizeof path, "%s/%s", root, F[i].file);
        FILE *f = fopen(path, "w");
        REQUIRE(f, "%s", path);
        fputs(F[i].begins, f);
        fprintf(f, F[i].line, text);
        fputc('\n', f);
        fclose(f);
    }
    snprintf(cmd, sizeof cmd, "python3 '%s/scripts/width'", root);
    CHECK(gt_run(cmd, out, sizeof out) == 1, "%s", out);
    for (size_t i = 0; i < sizeof F / sizeof *F; i++) {
        snprintf(says, sizeof says, "%s:", F[i].file);
        CHECK(!strstr(out, says) == !F[i].wide, "%s: %s", F[i].file, out);
    }
    CHECK(strstr(out, "g.md:3: 105 columns") && strstr(out, "9 lines wider"), "%s", out);
}
