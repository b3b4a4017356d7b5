/* The report (reports/report.py) on a small record, harness/tests/data/record-small.json, and on
 * damaged copies of it. */
#include "gt.h"
#include "ref/vocabulary/formats.h"
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>

#define RECORD "harness/tests/data/record-small.json"

static const char *python(void) {
    const char *p = getenv("DP_PYTHON");
    return p && *p ? p : "python3";
}

static int have_matplotlib(char *why, int size) {
    char cmd[512];
    snprintf(cmd, sizeof cmd, "%s -I -c 'import matplotlib, numpy, jinja2'", python());
    return gt_run(cmd, why, size) == 0;
}
#define NEED_MATPLOTLIB()                                                              \
    do {                                                                               \
        char why_[1024];                                                               \
        if (!have_matplotlib(why_, sizeof why_))                                       \
            SKIP("%s cannot import matplotlib, numpy and jinja2: %s", python(), why_); \
    } while (0)

/* Whole file, NUL at its end; NULL if it cannot be read. */
static char *slurp(const char *path) {
    FILE *f = fopen(path, "rb");
    if (!f) return NULL;
    fseek(f, 0, SEEK_END);
    long n = ftell(f);
    rewind(f);
    char *s = malloc(n + 1);
    size_t got = fread(s, 1, n, f);
    fclose(f);
    s[got] = 0;
    return s;
}

static int spill(const char *path, const char *text) {
    FILE *f = fopen(path, "wb");
    if (!f) return 0;
    int ok = fputs(text, f) >= 0;
    return fclose(f) == 0 && ok;
}

/* Writes `record` into a folder below the test run's own and runs the report on it. */
static int report_on(const char *folder, const char *record, char *dir, int dir_size, char *out,
                     int out_size) {
    char path[600], cmd[1600];
    snprintf(dir, dir_size, "%s/%s", gt_tmpdir(), folder);
    mkdir(dir, 0700);
    snprintf(path, sizeof path, "%s/results.json", dir);
    if (!spill(path, record)) return -1;
    snprintf(cmd, sizeof cmd, "PYTHONDONTWRITEBYTECODE=1 %s reports/report.py '%s'", python(), dir);
    return gt_run(cmd, out, out_size);
}

/* The page of the undamaged record, made once for all tests. */
static char page_dir[512], page_out[4096];
static char *page(void) {
    static char *text;
    if (text) return text;
    char path[600], *record = slurp(RECORD);
    if (!record) return NULL;
    int rc = report_on("report", record, page_dir, sizeof page_dir, page_out, sizeof page_out);
    free(record);
    snprintf(path, sizeof path, "%s/report.html", page_dir);
    return rc == 0 ? text = slurp(path) : NULL;
}
#define NEED_PAGE()            \
    NEED_MATPLOTLIB();         \
    const char *html = page(); \
    REQUIRE(html, "no page: %s", page_out)

/* A script of harness/tests/data on the page of a folder; its exit status. */
static int page_script(const char *script, const char *dir, const char *more, char *out, int size) {
    char cmd[2000];
    snprintf(cmd, sizeof cmd,
             "PYTHONDONTWRITEBYTECODE=1 %s harness/tests/data/%s '%s/report.html' %s", python(),
             script, dir, more);
    return gt_run(cmd, out, size);
}

/* The text that a reader sees, and the texts of the table of all results. */
static const char *page_text(void) {
    static char text[1 << 18];
    if (!*text) page_script("page_text.py", page_dir, "", text, sizeof text);
    return text;
}

DP_TEST(report, what_fails_over_all_cases_together_is_told) {
    NEED_PAGE();
    CHECK(strstr(html, "; 1 tensor over all cases together)"), "not in the verdict");
    const char *table = strstr(html, "<h2 id=\"together\">");
    REQUIRE(table, "no section");
    const char *dk =
        strstr(table, "<th scope=\"row\">dk</th><td>subject, base bf16, undeclared</td>");
    const char *o = strstr(table, "<th scope=\"row\">o</th><td>sim, base bf16</td>");
    CHECK(dk && o && dk < o, "failures first");
    CHECK(dk && strstr(dk, "FAIL") && strstr(dk, "<td class=\"n\">1,200</td>"), "dk");
}

DP_TEST(report, page_stands_alone) {
    NEED_PAGE();
    char said[4096];
    CHECK(page_script("check_page.py", page_dir, "", said, sizeof said) == 0, "%s", said);
    static const char *const forbidden[] = {"http://", "https://",    "<link",  "<iframe",
                                            "@import", "javascript:", "unsafe-"};
    for (unsigned i = 0; i < sizeof forbidden / sizeof *forbidden; i++)
        CHECK(!strstr(html, forbidden[i]), "the page contains %s", forbidden[i]);
    for (const char *s = html; (s = strstr(s, "url(")); s += 4)
        CHECK(!strncmp(s + 4, "%23", 3), "a reference to elsewhere: %.40s", s); /* #, in an image */
    int images = 0;
    for (const char *s = html; (s = strstr(s, "src=\"")); s += 5)
        images++;
    CHECK(images == 3, "%d images in the page, expected chain, state and tokens", images);
    CHECK(strstr(html, "<td class=\"hf\"><a href=\"#run-10\">1.25</a>") &&
              strstr(html, "<td class=\"he\">") && strstr(html, "<td class=\"hh\">") &&
              strstr(html, ".h10 {"),
          "the maps are tables, a failed cell leads to its run");
}

DP_TEST(report, a_failure_stands_first_with_tensor_reason_picture_and_commands) {
    NEED_PAGE();
    const char *card = strstr(html, "<article class=\"card\"");
    REQUIRE(card && card < strstr(html, "id=\"findings\""), "the failure does not stand first");
    static const char *const holds[] = {
        "<h3><b>S_in</b> of kda-long: rank 3</h3>",
        "error of <b>S_in</b> is 1.25 times its bound at rank 3 (relative error 5.0e-3)",
        "<path class=\"out\" d=\"M3.08",
        "deltaproof run --id &#39;kda-long:ranks=4,base=bf16,chain=bf16,merge=allgather&#39;",
        "deltaproof bisect stage kda-long --ranks 4 --base bf16 --chain bf16 --merge allgather"};
    for (unsigned i = 0; i < sizeof holds / sizeof *holds; i++)
        CHECK(strstr(card, holds[i]), "the card lacks %s", holds[i]);
}

DP_TEST(report, page_says_which_truth_judged_and_what_its_audit_found) {
    NEED_PAGE();
    const char *text = page_text();
    CHECK(strstr(text, "double-double 98 bits") && strstr(text, "on NVIDIA H200"),
          "which truth, where");
    const char *a = strstr(text, "audited by MPFR: 2 columns, 1,024 tokens, seed "
                                 "7512983489596063537, largest difference 2.1e-6 of both radii");
    CHECK(a, "audit: %.200s", strstr(text, "audited") ? strstr(text, "audited") : "none");
}

DP_TEST(report, findings_state_case_policy_and_numbers) {
    NEED_PAGE();
    static const char *const said[] = {
        "VERDICT: FAIL (13 passed, 1 failed, 1 skipped, 1 unjudged; 1 tensor over all cases "
        "together)",
        "kda-long:ranks=4,base=bf16,chain=bf16,merge=allgather: error of S_in is 1.25 times its "
        "bound at rank 3 (relative error 5.0e-3).",
        "reflect, K = 32: tf32 with truncated operands overtakes bf16 operands at 16 chunks "
        "(1.1e-2 against 9.3e-3; at 8 still 4.9e-3 against 6.3e-3), "
        "and reaches 0.16 against 3.7e-2 at 256.",
        "chainreflect, K = 32: slopebitsroundedfp320.5224.1accumulate",
        "tf32 trunc.bias 0.9911.0truncated operands, biased",
        "bf16 op.0.50",
        "kda-long, 2 ranks: M is never used: all 3 chain formats give the same S_in (base bf16 "
        "3.10e-3).",
        "kda-long, 4 ranks, base bf16: against the fp32 chain, tf32 with truncated operands costs "
        "S_in 2.1 times, o +10.0% (4.0e-3 to 4.4e-3)",
        "kda-long, base bf16, fp32 chain, from 1 rank to 4: o 3.9e-3 to 4.0e-3 (+2.6%)",
        "kda-long, 4 ranks, allgather: 12 messages of "
        "1,572,864 bytes in one direction, a buffer of 524,288 bytes a rank, 65,536 bytes of "
        "entering state kept for the backward; predicted, it takes 12.5 times what",
        "All fp64, 2 ranks, 1 case: the largest relative error is 2.0e-16",
        "Where the state forgets, the format of M does not matter: strong, K = 32 (|M|_F = 0 after "
        "16 chunks).",
        "Nearest to a bound, of those that pass: y at 0.50 of it, rank 0 "
        "(kconv:ranks=4,base=bf16); S_in at 0.32 of it, rank 1 "
        "(kda-long:ranks=4,base=bf16,chain=tf32rz,merge=allgather)",
        "2 of 65 judged tensors pass under a bound larger than the tensor itself, which proves "
        "nothing; bound over norm in brackets: nan-in base fp32: o (up to inf); "
        "packed base fp64: H (up to 7.0).",
        "1 run skipped: no CUDA device.",
        "dg unjudged in 7 runs: the bound exceeds 1."};
    const char *text = page_text();
    for (unsigned i = 0; i < sizeof said / sizeof *said; i++)
        CHECK(strstr(text, said[i]), "not said: %s", said[i]);
    CHECK(!strstr(text, "disagree"), "the page claims a contradiction in a consistent record");
    CHECK(!strstr(text, "Merging by ring"),
          "a sentence without data: no pair of merge orders is in the record");
}

DP_TEST(report, every_run_has_its_replay_id_and_every_link_a_target) {
    NEED_PAGE();
    static const char *const ids[] = {"reflect-k32:chain=fp32",
                                      "reflect-k32:chain=tf32rz",
                                      "reflect-k32:chain=bf16",
                                      "strong-k32:chain=fp32",
                                      "kda-long:ranks=1,base=bf16,chain=fp32,merge=allgather",
                                      "kda-long:ranks=2,base=bf16,chain=tf32rz,merge=allgather",
                                      "kda-long:ranks=4,base=bf16,chain=bf16,merge=allgather",
                                      "kda-long:ranks=4,backend=nccl",
                                      "packed:ranks=2,base=fp64,chain=fp64,merge=ring",
                                      "mkda-r2:ranks=1,base=fp32,chain=fp32,merge=allgather",
                                      "nan-in:ranks=2,base=fp32,chain=fp32,merge=allgather",
                                      "kconv:ranks=4,base=bf16"};
    char want[300];
    for (unsigned i = 0; i < sizeof ids / sizeof *ids; i++) {
        snprintf(want, sizeof want, "\n%s\n", ids[i]);
        CHECK(strstr(page_text(), want), "no run %s among all results", ids[i]);
    }
    for (const char *s = html; (s = strstr(s, "href=\"#")); s += 7) {
        const int n = (int)strcspn(s + 7, "\"");
        int run = -1;
        if (sscanf(s + 7, "run-%d\"", &run) == 1 || sscanf(s + 7, "case-%d\"", &run) == 1) {
            CHECK(run >= 0 && run < 16, "a link to no run or case: #%.*s", n, s + 7);
            continue;
        }
        snprintf(want, sizeof want, "id=\"%.*s\"", n, s + 7);
        CHECK(strstr(html, want), "a link without target: #%.*s", n, s + 7);
    }
}

DP_TEST(report, details_keep_hex_nan_and_warnings_and_escape_text) {
    NEED_PAGE();
    static const char *const said[] = {"r1 s0 t130 h0 [7]",
                                       "0x1.8p-3",
                                       "0x1.81p-3",
                                       "1.2e-2",
                                       "r1 t130 [7]",
                                       "nan inf",
                                       "<script>alert(1)</script> & \"quotes\"",
                                       "sum of beta |k|^2 is 2.3 at token 17",
                                       "commit 0123abc"};
    for (unsigned i = 0; i < sizeof said / sizeof *said; i++)
        CHECK(strstr(page_text(), said[i]), "%s is missing", said[i]);
    CHECK(!strstr(html, "<script>alert"), "text of the record is not escaped");
}

static int begins(const char *path, const char *magic) {
    char *s = slurp(path);
    int ok = s && !strncmp(s, magic, strlen(magic));
    free(s);
    return ok;
}

DP_TEST(report, figures_exist_as_png_and_pdf) {
    NEED_PAGE();
    static const char *const names[] = {"chain-k32", "state-over-ranks", "tokens-kda-long-bf16",
                                        "bounds-cases", "bounds-ranks"};
    char path[700];
    for (unsigned i = 0; i < sizeof names / sizeof *names; i++) {
        snprintf(path, sizeof path, "%s/figures/%s.png", page_dir, names[i]);
        CHECK(begins(path, "\x89PNG"), "%s", path);
        snprintf(path, sizeof path, "%s/figures/%s.pdf", page_dir, names[i]);
        CHECK(begins(path, "%PDF"), "%s", path);
        snprintf(path, sizeof path, "id=\"%s\"", names[i]);
        CHECK(strstr(html, path), "the page lacks figure %s", names[i]);
    }
}

/* The record with the first `from` at or behind the first `after` replaced; NULL if it is not
 * there. The caller frees. */
static char *edited(const char *record, const char *after, const char *from, const char *to) {
    const char *at = strstr(record, after);
    at = at ? strstr(at, from) : NULL;
    if (!at) return NULL;
    char *out = malloc(strlen(record) + strlen(to) + 1);
    sprintf(out, "%.*s%s%s", (int)(at - record), record, to, at + strlen(from));
    return out;
}

/* An edit by edited(), and words that tell of it. */
typedef struct {
    const char *after, *from, *to, *says;
} edit;

DP_TEST(report, malformed_records_are_refused_by_file_and_field) {
    NEED_MATPLOTLIB();
    static const edit bad[] = {
        {"{", "\"schema_version\": 1", "\"schema_version\": 2",
         "schema_version: this program reads version 1, found 2"},
        {"{", "\"schema_version\": 1", "\"schema_version\": true",
         "schema_version: this program reads version 1, found true"},
        {"{", "deltaproof-record", "other",
         "schema: expected \"deltaproof-record\", found \"other\""},
        {"\"runs\"", "\"rel_fro\": 1.5e-06", "\"rel_fro\": \"lots\"",
         "runs[0].tensors[0].rel_fro: expected a number, \"nan\", \"inf\" or \"-inf\", found "
         "\"lots\""},
        {"\"runs\"", "\"per_rank\": [1.5e-06]", "\"per_rank\": [[1]]",
         "runs[0].tensors[0].per_rank[0]: expected a number"},
        {"\"runs\"", "\"chunks\": 8", "\"chunks\": -8",
         "runs[0].chain[1].chunks: expected an integer >= 0, found -8"},
        {"\"runs\"", "\"verdict\": \"pass\"", "\"verdict\": \"fine\"",
         "runs[0].verdict: expected one of pass, fail, skipped, unjudged, found \"fine\""},
        {"\"runs\"", "\"case\": \"reflect-k32\", ", "", "runs[0].case: missing"},
        {"\"runs\"", "\"policy\": {\"chain\": \"fp32\"}", "\"policy\": {\"chain\": 32}",
         "runs[0].policy.chain: expected a string, found 32"},
        {"\"runs\"", "\"tensors\": [", "\"tensors\": [17, ",
         "runs[0].tensors[0]: expected an object, found 17"},
        {"\"cases\"", "\"K\": 32", "\"K\": 3.5", "cases[0].K: expected an integer >= 0, found 3.5"},
        {"\"totals\"", "\"skipped\": 1", "\"skipped\": null", "totals.skipped: missing"},
        {"\"cases\"", "\"K\": 32", "\"K\": null",
         "cases[0].K: expected an integer >= 0, found null"},
        {"\"runs\"", "\"policy\": {\"chain\": \"fp32\"}", "\"policy\": null",
         "runs[0].policy: expected an object, found null"},
        {"\"runs\"", "\"tensors\": [", "\"tensors\": null, \"later\": [",
         "runs[0].tensors: missing"},
        {"{", "\"seconds\": 6.5", "\"seconds\": NaN", "not JSON: NaN is not JSON"},
        {"{", "\"cases\": [", "\"cases\": ", "not JSON"}};
    char *record = slurp(RECORD), dir[512], out[4096];
    REQUIRE(record, "%s cannot be read", RECORD);
    for (unsigned i = 0; i < sizeof bad / sizeof *bad; i++) {
        char *text = edited(record, bad[i].after, bad[i].from, bad[i].to);
        REQUIRE(text, "%s is not in the record", bad[i].from);
        int rc = report_on("bad", text, dir, sizeof dir, out, sizeof out);
        CHECK(rc == 2, "%s: exit status %d", bad[i].to, rc);
        CHECK(strstr(out, "/bad/results.json: ") && strstr(out, bad[i].says), "%s: said: %s",
              bad[i].says, out);
        CHECK(!strstr(out, "Traceback"), "%s", out);
        free(text);
    }
    free(record);
}

DP_TEST(report, missing_and_empty_files_are_refused) {
    NEED_MATPLOTLIB();
    char cmd[800], dir[512], out[4096];
    snprintf(cmd, sizeof cmd, "%s reports/report.py '%s/none'", python(), gt_tmpdir());
    CHECK(gt_run(cmd, out, sizeof out) == 2 && strstr(out, "/none/results.json: No such file"),
          "%s", out);
    CHECK(report_on("empty", "", dir, sizeof dir, out, sizeof out) == 2 &&
              strstr(out, "/empty/results.json: not JSON"),
          "%s", out);
    CHECK(report_on("list", "[]", dir, sizeof dir, out, sizeof out) == 2 &&
              strstr(out, "/list/results.json: schema: "),
          "%s", out);
}

DP_TEST(report, contradictions_in_a_record_are_said) {
    NEED_MATPLOTLIB();
    static const edit t[] = {
        {"\"totals\"", "\"pass\": 13", "\"pass\": 14",
         "The record&#39;s totals (pass 14, fail 1, skipped 1, unjudged 1) disagree with its runs"},
        {"\"totals\"", "\"verdict\": \"fail\"", "\"verdict\": \"pass\"",
         "The record&#39;s verdict is pass although results fail."},
        {"merge=allgather\", \"case\": \"kda-long\"", "\"verdict\": \"fail\"",
         "\"verdict\": \"pass\"", "VERDICT: FAIL (13 passed, 1 failed"},
    };
    char *record = slurp(RECORD), dir[512], path[600], out[4096];
    REQUIRE(record, "%s cannot be read", RECORD);
    for (unsigned i = 0; i < sizeof t / sizeof *t; i++) {
        char *text = edited(record, t[i].after, t[i].from, t[i].to);
        REQUIRE(text, "%s is not where the test looks", t[i].from);
        CHECK(report_on("edited", text, dir, sizeof dir, out, sizeof out) == 0, "%s", out);
        snprintf(path, sizeof path, "%s/report.html", dir);
        char *html = slurp(path);
        CHECK(html && strstr(html, t[i].says), "not said: %s", t[i].says);
        CHECK(html && strstr(html, "VERDICT: FAIL"), "%s: %s passes", t[i].from, t[i].says);
        free(html);
        free(text);
    }
    free(record);
}

DP_TEST(report, a_pass_of_no_run_is_none) {
    NEED_MATPLOTLIB();
    char *html, dir[512], path[600], out[4096];
    report_on(
        "nothing",
        "{\"schema\": \"deltaproof-record\", \"schema_version\": 1, \"totals\": {\"pass\": 3, "
        "\"fail\": 0, \"skipped\": 0, \"unjudged\": 0}, \"errors\": 0, \"verdict\": \"pass\", "
        "\"cases\": [], \"runs\": []}",
        dir, sizeof dir, out, sizeof out);
    snprintf(path, sizeof path, "%s/report.html", dir);
    html = slurp(path);
    CHECK(html && strstr(html, "VERDICT: COULD NOT JUDGE (0 passed"), "the page says pass");
    CHECK(html && strstr(html, "verdict is pass although nothing is judged"), "not said");
    free(html);
}

DP_TEST(report, cases_that_could_not_be_judged_are_said) {
    NEED_MATPLOTLIB();
    char *html, dir[512], path[600], out[4096];
    int rc = report_on("error",
                       "{\"schema\": \"deltaproof-record\", \"schema_version\": 1, \"totals\": "
                       "{\"pass\": 0, \"fail\": 0, \"skipped\": 0, \"unjudged\": 0}, "
                       "\"errors\": 2, \"verdict\": \"error\", \"cases\": [], \"runs\": []}",
                       dir, sizeof dir, out, sizeof out);
    CHECK(rc == 0, "exit status %d: %s", rc, out);
    snprintf(path, sizeof path, "%s/report.html", dir);
    html = slurp(path);
    CHECK(html && strstr(html, "VERDICT: COULD NOT JUDGE (0 passed") &&
              strstr(html, "2 cases could not be judged at all"),
          "not said");
    free(html);
}

/* -S: a Python without site-packages stands for one that has no matplotlib. */
DP_TEST(report, a_python_without_matplotlib_is_told_what_to_do) {
    char cmd[1400], dir[512], out[4096], *record = slurp(RECORD);
    REQUIRE(record, "%s cannot be read", RECORD);
    report_on("bare-python", record, dir, sizeof dir, out, sizeof out);
    free(record);
    snprintf(cmd, sizeof cmd, "PYTHONPATH= PYTHONDONTWRITEBYTECODE=1 %s -S reports/report.py '%s'",
             python(), dir);
    CHECK(gt_run(cmd, out, sizeof out) == 2 && strstr(out, "make setup") &&
              !strstr(out, "Traceback"),
          "%s", out);
}

/* 77: no Chromium. */
static void in_browser(const char *dir, const char *limits) {
    char said[8192];
    const int rc = page_script("report_browser.py", dir, limits, said, sizeof said);
    if (rc == 77) SKIP("%s", said);
    CHECK(rc == 0, "%s", said);
}

DP_TEST(report, works_in_a_browser) {
    NEED_PAGE();
    (void)html;
    in_browser(page_dir, "2000 200000");
}

/* 10,000 rows: the page keeps its size, and its table is there at once. */
DP_TEST(report, ten_thousand_rows_stay_a_small_page) {
    NEED_MATPLOTLIB();
    char dir[512], cmd[2600], said[4096];
    snprintf(dir, sizeof dir, "%s/many", gt_tmpdir());
    mkdir(dir, 0700);
    snprintf(cmd, sizeof cmd,
             "export PYTHONDONTWRITEBYTECODE=1; %s harness/tests/data/many_rows.py " RECORD
             " '%s/results.json' 10000 && %s reports/report.py '%s'",
             python(), dir, python(), dir);
    REQUIRE(gt_run(cmd, said, sizeof said) == 0, "%s", said);
    in_browser(dir, "3000 2000000");
}

/* The commands of a card, which follow its words, run as they stand. */
static int card_command(const char *html, const char *words, char *out, int size) {
    char line[2000], cmd[4400];
    const char *at = strstr(html, words);
    at = at ? strstr(at, "<code class=\"id\">deltaproof ") : NULL;
    if (!at) return -1;
    at += strlen("<code class=\"id\">deltaproof ");
    snprintf(line, sizeof line, "%.*s", (int)(strstr(at, "</code>") - at), at);
    for (char *q; (q = strstr(line, "&#39;"));) {
        *q = '\'';
        memmove(q + 1, q + 5, strlen(q + 5) + 1);
    }
    snprintf(cmd, sizeof cmd, "'%s' %s", gt_program(), line);
    return gt_run(cmd, out, size);
}

static char *failing_page(const char *cmd) {
    char said[1 << 14], path[700];
    const int rc = gt_run(cmd, said, sizeof said);
    snprintf(path, sizeof path, "%s/failing/report.html", gt_tmpdir());
    if (rc != 1) fprintf(stderr, "%s: exit status %d: %s\n", cmd, rc, said);
    return rc == 1 ? slurp(path) : NULL;
}

DP_TEST(report, commands_after_a_failed_run_work) {
    NEED_MATPLOTLIB();
    char cmd[2000], said[1 << 14];
    snprintf(cmd, sizeof cmd,
             "'%s' run smoke-kda --backend sim --ranks 2 --base fp32 --chain fp32 --fault "
             "gate-of-head0 --out '%s/failing'",
             gt_program(), gt_tmpdir());
    char *html = failing_page(cmd);
    REQUIRE(html, "no page of a failed run");
    static const char *const holds[] = {"<h3><b>dS_out</b> of smoke-kda: rank 0, head 1, entry ",
                                        "<dt>got</dt><dd>", "0x1.", "<dt>its bound</dt>",
                                        "<path class=\"at\""};
    for (unsigned i = 0; i < sizeof holds / sizeof *holds; i++)
        CHECK(strstr(html, holds[i]), "the card lacks %s", holds[i]);
    CHECK(card_command(html, "The same bits again", said, sizeof said) == 1, "%s", said);
    CHECK(card_command(html, "The stage that is wrong", said, sizeof said) == 1, "%s", said);
    free(html);
}

DP_TEST(report, command_after_a_failed_judgement_works) {
    NEED_MATPLOTLIB();
    char cmd[4000], said[1 << 14];
    snprintf(
        cmd, sizeof cmd,
        "cd '%s' && '%s' inputs smoke-kda -o in.safetensors && "
        "PYTHONDONTWRITEBYTECODE=1 %s '%s/../harness/tests/data/zero_output.py' in.safetensors "
        "out.safetensors && '%s' judge --inputs %s/in.safetensors --outputs %s/out.safetensors "
        "--base fp32 --out %s/failing",
        gt_tmpdir(), gt_program(), python(), gt_cases(), gt_program(), gt_tmpdir(), gt_tmpdir(),
        gt_tmpdir());
    char *html = failing_page(cmd);
    REQUIRE(html, "no page of a failed judgement");
    CHECK(card_command(html, "The same bits again", said, sizeof said) == 1, "%s", said);
    free(html);
}

/* The report has words for every format of the chain, and for no other (say/names.py). */
DP_TEST(report, names_every_format) {
    char cmd[600], said[1024], want[1024] = "";
    for (int i = 0; i < DP_NFORMATS; i++)
        strcat(strcat(want, i ? " " : ""), dp_formats[i].name);
    snprintf(cmd, sizeof cmd,
             "cd reports && PYTHONDONTWRITEBYTECODE=1 %s -c 'from say.names import FORMATS; "
             "print(*FORMATS)'",
             python());
    CHECK(gt_run(cmd, said, sizeof said) == 0, "%s", said);
    said[strcspn(said, "\n")] = 0;
    CHECK(!strcmp(said, want), "the report names %s, the program %s", said, want);
}

/* ---- the page of the field ------------------------------------------------------------------- */

static int field_page(const char *json, const char *to, char *out, int size) {
    char cmd[1600];
    snprintf(cmd, sizeof cmd, "PYTHONDONTWRITEBYTECODE=1 %s -I reports/field.py '%s' '%s'",
             python(), json, to);
    return gt_run(cmd, out, size);
}

DP_TEST(report, the_field_is_a_page_with_its_failures_and_escaped_texts) {
    NEED_MATPLOTLIB();
    char out[4096], json[600], page[600];
    snprintf(json, sizeof json, "%s/field.json", gt_tmpdir());
    snprintf(page, sizeof page, "%s/field.html", gt_tmpdir());
    CHECK(field_page("reports/field.json", page, out, sizeof out) == 0, "%s", out);
    char *html = slurp(page);
    REQUIRE(html, "no page");
    CHECK(strstr(html, "<th scope=\"row\">cudnn-hopper-forward</th>") &&
              strstr(html, "href=\"#cudnn-hopper-forward-field-least-moved\">FAIL</a> ") &&
              strstr(html, "id=\"cudnn-hopper-forward-field-least-moved\"") &&
              strstr(html, "lacks the state before token"),
          "no failure of a published kernel");
    free(html);
    static const char WORDS[] =
        "{\"schema\": \"deltaproof-field\", \"schema_version\": 1, \"speed\": {}, \"left_out\": {},"
        " \"notes\": {}, \"kernels\": [{\"kernel\": \"<img src=x>\", \"version\": \"1\","
        " \"declared\": \"bf16\", \"served\": 1, \"reasons\": \"-\", \"speed\": {}, \"judged\":"
        " [{\"case\": \"c\", \"verdict\": \"fail\", \"tensors\": [{\"name\": \"o\","
        " \"verdict\": \"fail\"}]}]}]}";
    REQUIRE(spill(json, WORDS), "%s", json);
    CHECK(field_page(json, page, out, sizeof out) == 0, "%s", out);
    html = slurp(page);
    CHECK(html && strstr(html, "&lt;img src=x&gt;") && !strstr(html, "<img"), "not escaped");
    free(html);
    REQUIRE(spill(json, "{\"schema\": \"deltaproof-field\", \"schema_version\": 1, \"speed\": {},"
                        " \"left_out\": {}, \"notes\": {}, \"kernels\": [{\"kernel\": 3}]}"),
            "%s", json);
    CHECK(field_page(json, page, out, sizeof out) == 2 &&
              strstr(out, "kernels[0].version: missing"),
          "%s", out);
}
