/* Every command that README.md, python/README.md and the help texts print runs as it stands, in a
 * folder that has what they name: none is refused. One that takes longer than LIMIT seconds is
 * ended, and has not been refused. */
#include "attack.h"
#include "gt.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define LIMIT "2"

static char dir[512];

/* mine.c, mine.py, inputs, outputs and records, under the names that the commands have for them.
 * Commands of the Python module are left out where their packages are not installed. */
static int set_up(void) {
    snprintf(dir, sizeof dir, "%s", at_dir("lines"));
    if (!getenv("DP_PYTHON")) setenv("DP_PYTHON", "python3", 1);
    if (at_sh(dir, 30, "\"$DP_PYTHON\" -c 'import numpy'")) return 0;
    const int s = at_sh(
        dir, 60,
        "S=$(realpath $C/..); mkdir -p bin records before after build && "
        "cat >bin/deltaproof <<E\n#!/bin/sh\ncase \\$1 in score | pack | cp-check | capture-path)\n"
        "  python3 -c 'import ml_dtypes, safetensors' 2>/dev/null || exit 0\n"
        "  export PYTHONPATH='$S/python' DELTAPROOF='$(realpath $P)'\n"
        "  exec python3 -m deltaproof \"\\$@\";;\nesac\nexec '$(realpath $P)' \"\\$@\"\nE\n"
        "printf 'def kda(q, k, v, g, beta):\\n    return v\\n' >kernel.py && "
        "printf '#!/bin/sh\\nexec \"%%s\" \"$@\"\\n' \"$DP_PYTHON\" >bin/python3 && chmod +x bin/* "
        "&& ln -s $S/scripts $S/reports . && cp $S/harness/subject/example_subject.c mine.c && "
        "cp $S/harness/subject/example_program.py mine.py && cp mine.py prefill.py && "
        "cp mine.py decode.py && export PATH=$PWD/bin:$PATH EXAMPLE=$S/harness/subject && "
        "cc -O2 -fPIC -shared -ffp-contract=off -I$S/harness mine.c -o libmine.so -lm && "
        "deltaproof inputs beta-zero -o in.safetensors && "
        "python3 mine.py in.safetensors out.safetensors && "
        "deltaproof run smoke-kda --backend sim --ranks 4 --out build/verify && "
        "cp build/verify/results.json before && cp build/verify/results.json after && "
        "cp -r build/verify records/1 && cp -r build/verify records/2");
    CHECK(s == 0, "%s", at_out);
    return s == 0;
}

static void runs(const char *where, const char *command) {
    const int s = at_sh(
        dir, 60,
        "export PATH=$PWD/bin:$PATH; mkdir -p build/verify; cp before/results.json build/verify; "
        "cat >line <<'E'\n%s\nE\n"
        "%s bash line", /* a compiler that is stopped leaves half a library */
        command, strncmp(command, "cc ", 3) ? "timeout " LIMIT : "");
    const int idle = strstr(at_out, "there is nothing to shrink") != NULL; /* mine is right */
    CHECK(s == 0 || s == 1 || s == 124 || idle, "%s: %s: status %d: %.600s", where, command, s,
          at_out);
}

/* The commands of a text: lines indented by `indent` that begin with one of the words, and their
 * continuations after a backslash. */
static int run_commands(const char *where, const char *text, const char *indent) {
    static const char *const words[] = {"deltaproof ", "cc "};
    const size_t in = strlen(indent);
    int n = 0;
    for (const char *at = text; *at; at += strcspn(at, "\n") + (strchr(at, '\n') != NULL)) {
        for (size_t i = 0; i < sizeof words / sizeof *words; i++) {
            if (strncmp(at, indent, in) || strncmp(at + in, words[i], strlen(words[i]))) continue;
            const char *end = at + strcspn(at, "\n");
            while (*end && end[-1] == '\\')
                end += 1 + strcspn(end + 1, "\n");
            char *command = strndup(at + in, (size_t)(end - at) - in);
            runs(where, command);
            free(command);
            n++;
        }
    }
    return n;
}

DP_TEST(lines, every_command_of_the_readmes_runs_as_it_stands) {
    static const char *const files[] = {"README.md", "python/README.md"};
    if (!set_up()) SKIP("numpy is not installed");
    int n = 0;
    for (size_t i = 0; i < sizeof files / sizeof *files; i++) {
        REQUIRE(at_sh(dir, 10, "cat $C/../%s", files[i]) == 0, "%s", files[i]);
        char *text = strdup(at_out);
        n += run_commands(files[i], text, "    ");
        free(text);
    }
    CHECK(n >= 5, "%d commands found", n);
}

DP_TEST(lines, every_example_of_a_help_text_runs_as_it_stands) {
    char names[20][16];
    int n = 0, found = 0;
    if (!set_up()) SKIP("numpy is not installed");
    REQUIRE(at_sh(dir, 10, "$P help") == 0, "%s", at_out);
    for (const char *s = at_out; (s = strstr(s, "\n  ")) && n < 20; s++)
        if (sscanf(s, "\n  %15[a-z]", names[n]) == 1) n++;
    for (int i = 0; i < n; i++) {
        REQUIRE(at_sh(dir, 10, "$P help %s", names[i]) == 0, "%s", at_out);
        char *text = strdup(at_out), *examples = strstr(text, "\nExamples:\n");
        if (examples) found += run_commands(names[i], examples, "  ");
        free(text);
    }
    CHECK(found >= 20, "%d examples found", found);
}
