/* The guards of a split inside one card, and the purpose of each. They are compared with 28 rows
 * that cuLA published for 152 multiprocessors (predicate, pieces). */
#include "gt.h"
#include "ref/vocabulary/pieces.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { K = 1024, SMS = 152 };

/* 14 layouts; of each, for 4 and 8 heads: does the predicate hold, and how many pieces. */
static const struct {
    const char *name;
    int n;
    int64_t length[8];
    int64_t total[2]; /* 0: the predicate does not hold */
    int fires[2];     /* and they run side by side */
} ROWS[] = {
    {"4K", 1, {4 * K}, {0, 0}, {0, 0}},
    {"8K", 1, {8 * K}, {0, 0}, {0, 0}},
    {"32K", 1, {32 * K}, {16, 8}, {1, 1}},
    {"64K", 1, {64 * K}, {16, 8}, {1, 1}},
    {"128K", 1, {128 * K}, {16, 8}, {1, 1}},
    {"8x4K", 8, {4 * K, 4 * K, 4 * K, 4 * K, 4 * K, 4 * K, 4 * K, 4 * K}, {0, 0}, {0, 0}},
    {"4x8K", 4, {8 * K, 8 * K, 8 * K, 8 * K}, {0, 0}, {0, 0}},
    {"2x16K", 2, {16 * K, 16 * K}, {32, 0}, {0, 0}},
    {"24K+8K", 2, {24 * K, 8 * K}, {32, 0}, {0, 0}},
    {"28K+4K", 2, {28 * K, 4 * K}, {15, 8}, {1, 1}},
    {"32K+256+256", 3, {32 * K, 256, 256}, {18, 10}, {1, 0}},
    {"40K+1K+8K", 3, {40 * K, K, 8 * K}, {25, 12}, {0, 0}},
    {"64K+512+256+128", 4, {64 * K, 512, 256, 128}, {19, 11}, {1, 0}},
    {"128K+1K", 2, {128 * K, K}, {17, 9}, {1, 1}},
};

DP_TEST(pieces, guards_are_those_that_were_published) {
    for (int i = 0; i < (int)(sizeof ROWS / sizeof *ROWS); i++)
        for (int h = 0; h < 2; h++) {
            const int H = h ? 8 : 4;
            const dp_pieces p = dp_pieces_of(ROWS[i].length, ROWS[i].n, H, SMS, 64);
            CHECK(p.total == ROWS[i].total[h], "%s, %d heads: %lld pieces, published %lld (%s)",
                  ROWS[i].name, H, (long long)p.total, (long long)ROWS[i].total[h],
                  dp_pieces_words[p.why]);
            CHECK((p.why == DP_PIECES_CUT) == ROWS[i].fires[h], "%s, %d heads: %s", ROWS[i].name, H,
                  dp_pieces_words[p.why]);
        }
}

DP_TEST(pieces, each_guard_says_which_it_is) {
    const int64_t one[] = {64 * K}, four[] = {64 * K, 64 * K, 64 * K, 64 * K}, brief[] = {8 * K},
                  excess[] = {32 * K, 256, 256};
    CHECK(dp_pieces_of(four, 4, 19, SMS, 64).why == DP_PIECES_FULL, "2 * 19 * 4 = 152 blocks");
    CHECK(dp_pieces_of(brief, 1, 4, SMS, 64).why == DP_PIECES_SHORT, "128 chunks");
    CHECK(dp_pieces_of(four, 4, 4, SMS, 64).why == DP_PIECES_MANY, "16 long heads");
    CHECK(dp_pieces_of(excess, 3, 8, SMS, 64).why == DP_PIECES_EXCESS, "10 pieces of 16 blocks");
    CHECK(dp_pieces_of(one, 1, 4, SMS, 64).why == DP_PIECES_CUT, "16 pieces of 8 blocks");
    CHECK(dp_pieces_of(one, 1, 4, 64, 64).chunks == 128, "8 pieces where 64 SMs are");
}

/* Nothing is cut into pieces of less than 16 chunks, and no sequence below 3 pieces at all. */
DP_TEST(pieces, none_is_shorter_than_allowed) {
    for (int64_t chunks = 1; chunks < 4096; chunks++)
        for (int64_t piece = DP_PIECES_LEAST; piece <= 1024; piece *= 2) {
            const int64_t n = dp_pieces_of_sequence(chunks, piece);
            CHECK(n == 1 || (n >= 3 && (n - 1) * piece < chunks && n * piece >= chunks),
                  "%lld chunks in pieces of %lld: %lld", (long long)chunks, (long long)piece,
                  (long long)n);
        }
    for (int64_t tokens = 64; tokens < 1 << 21; tokens += 6400) {
        const dp_pieces p = dp_pieces_of(&tokens, 1, 1, SMS, 64);
        CHECK(!p.total || p.chunks >= DP_PIECES_LEAST, "%lld tokens: pieces of %lld chunks",
              (long long)tokens, (long long)p.chunks);
    }
}

/* Both rules side by side: a layout that a guard refuses and our kernels cut, one that both cut. */
DP_TEST(pieces, the_program_says_what_guards_and_rule_decide_and_why) {
    static const struct {
        const char *options, *says;
    } rows[] = {
        {"15000 --heads 4", "whole: the longest has fewer than 256 chunks (guard 1)"},
        {"15000 --heads 4", "forward:       cut in 16 segments of at most 15 chunks"},
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
    snprintf(cmd, sizeof cmd, "'%s' list --pieces 16384 --heads 4", gt_program());
    CHECK(!gt_run(cmd, out, sizeof out) && !strstr(out, "Guard") && !strstr(out, "The guards"),
          "both cut it in 16: %s", out);
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
