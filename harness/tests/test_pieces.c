/* Sequences cut inside one card: what guards and rule say, and the table of errors. */
#include "gt.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* Both rules side by side: a layout that a guard refuses and our kernels cut, one that both cut. */
DP_TEST(pieces, the_program_says_what_guards_and_rule_decide_and_why) {
    static const struct {
        const char *options, *says;
    } rows[] = {
        {"15000 --heads 4", "whole: the longest has fewer than 256 chunks (guard 1)"},
        {"15000 --heads 4", "forward:       cut in 14 segments of at most 17 chunks"},
        {"15000 --heads 4", "\nGuard 1 is a length"},
        {"65536 --heads 4 --device gb200", "cut in 16 pieces of at most 64 chunks"},
        {"16384,16384 --heads 8 --device 152", "(guard 2)"},
        {"4096 --heads 76 --device gb200", "(guard 0)"},
        {"32768,256,256 --heads 8 --device gb200", "(guard 3)"},
        {"1024 --device none", "must be one of a100 h100"},
        {"1024,x", "'x': must be tokens"},
        {"1024 --K 80", "the rule knows 64, 128"},
    };
    char cmd[600], out[8192];
    for (size_t i = 0; i < sizeof rows / sizeof *rows; i++) {
        snprintf(cmd, sizeof cmd, "'%s' list --pieces %s", gt_program(), rows[i].options);
        const int rc = gt_run(cmd, out, sizeof out);
        CHECK((rc == 2) == (i > 6) && strstr(out, rows[i].says), "%s: status %d, nothing of %s: %s",
              rows[i].options, rc, rows[i].says, out);
    }
    snprintf(cmd, sizeof cmd, "'%s' list --pieces 32768 --heads 8 --one-gate", gt_program());
    CHECK(!gt_run(cmd, out, sizeof out) && !strstr(out, "Guard") && !strstr(out, "The guards"),
          "both cut it in 8: %s", out);
}

/* A column a number of ranks; below 3 of them no M is used, and the first format stands for all. */
DP_TEST(pieces, the_table_of_a_record_has_each_number_of_pieces) {
    const char *given = getenv("DP_PYTHON"), *py = given && *given ? given : "python3";
    char cmd[2400], out[8192];
    snprintf(cmd, sizeof cmd,
             "cd '%s' && '%s' run --cases '%s' smoke-kda --backend sim --base fp32 "
             "--chain fp64,tf32rz --out pieces >/dev/null && "
             "'%s' -I '%s/../reports/pieces.py' pieces/results.json",
             gt_tmpdir(), gt_program(), gt_cases(), py, gt_cases());
    CHECK(gt_run(cmd, out, sizeof out) == 0 && strstr(out, "smoke-kda, base fp32, pieces:") &&
              strstr(out, "| chain | 1 | 2 | 4 |\n|---|---|---|---|\n| fp64 | ") &&
              strstr(out, "\n| tf32rz | "),
          "%s", out);
    const char *first = strstr(out, "| fp64 |"), *other = strstr(out, "| tf32rz |");
    CHECK(first && other && !strncmp(first + 8, other + 10, 21), "one and two pieces: %s", out);
    snprintf(cmd, sizeof cmd,
             "cd '%s' && echo '[]' >b.json && '%s' -I '%s/../reports/pieces.py' b.json",
             gt_tmpdir(), py, gt_cases());
    CHECK(gt_run(cmd, out, sizeof out) == 2 && strstr(out, "pieces.py: b.json"), "%s", out);
}
