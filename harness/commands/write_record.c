/* Removes what an earlier command left, writes the record and says its verdict (write_record.h). */
#include "write_record.h"
#include "commands.h"
#include "harness/base/terminal.h"
#include "harness/record/record.h"
#include "print_failures.h"
#include "ref/files/input.h"
#include "ref/files/output.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

static char *in_folder(const char *dir, const char *name) {
    return dp_text_new("%s/%s", dir, name);
}

/* ---- outputs of an earlier command ----------------------------------------------------------- */

enum { LONGEST_PAGE = 1 << 28 };

static void remove_file(const char *folder, const char *name) {
    DP_OWN char *path = in_folder(folder, name);
    unlink(path);
}

/* NULL: there is none, or not of this program. */
static char *read_page(const char *path) {
    char *text;
    size_t n;
    dp_err e;
    if (dp_input_read(path, LONGEST_PAGE, &text, &n, &e)) return NULL;
    if (strstr(text, "<title>deltaproof")) return text;
    free(text);
    return NULL;
}

/* The figures that the page names (reports/report.py, own_figures). */
static void remove_figures(const char *folder, char *page) {
    static const char link[] = "href=\"figures/";
    for (char *at = page; (at = strstr(at, link));) {
        char *path = at + strlen("href=\""), *name = at += sizeof link - 1, *end = strchr(at, '"');
        const size_t n = end ? (size_t)(end - name) : 0;
        if (n < 5 || n > 200 || memchr(name, '/', n)) continue;
        *end = 0;
        if (!strcmp(end - 4, ".png") || !strcmp(end - 4, ".pdf")) remove_file(folder, path);
        at = end + 1;
    }
}

static void remove_folder(const char *folder) {
    static const char *const name[] = {"results.json", "results.json.gz", "junit.xml", "summary.md",
                                       "report.html"};
    DP_OWN char *path = in_folder(folder, "report.html"), *page = read_page(path);
    if (page) remove_figures(folder, page);
    for (size_t i = 0; i < sizeof name / sizeof *name; i++)
        remove_file(folder, name[i]);
}

/* A record, a comparison, or the list of check, differ or carry. */
static int is_own(const char *path) {
    static const char *const begin[] = {"{\"schema\":\"deltaproof-record\"",
                                        "{\n \"schema\": \"deltaproof-comparison\"",
                                        "[\n {\n  \"case\": "};
    char got[64] = "";
    struct stat s;
    FILE *f = !stat(path, &s) && S_ISREG(s.st_mode) ? fopen(path, "re") : NULL;
    if (!f) return 0;
    const size_t n = fread(got, 1, sizeof got - 1, f);
    fclose(f);
    for (size_t i = 0; i < sizeof begin / sizeof *begin; i++)
        if (n >= strlen(begin[i]) && !strncmp(got, begin[i], strlen(begin[i]))) return 1;
    return 0;
}

void dp_old_outputs_remove(const char *folder, const char *json) {
    if (folder) remove_folder(folder);
    if (json && strcmp(json, "-") && is_own(json)) unlink(json);
}

/* ---- arguments that are refused -------------------------------------------------------------- */

static const char *expected_folder, *expected_json, *expected_page;

static void at_end(int status, DP_UNUSED void *arg) {
    DP_OWN char *page = status && expected_page ? read_page(expected_page) : NULL;
    if (page) unlink(expected_page);
    if (status) dp_old_outputs_remove(expected_folder, expected_json);
}

const char *dp_argument(const char *name, int argc, char **argv) {
    const char *value = NULL;
    for (int i = 1; i < argc && strcmp(argv[i], "--"); i++) {
        const size_t n = strcspn(argv[i], "=");
        if (n < strlen("--x") || strncmp(argv[i], name, n)) continue;
        if (argv[i][n])
            value = argv[i] + n + 1;
        else if (i + 1 < argc)
            value = argv[i + 1];
    }
    return value;
}

void dp_old_outputs_expect(int argc, char **argv) {
    expected_folder = dp_argument("--out", argc, argv);
    expected_json = dp_argument("--json", argc, argv);
    expected_page = dp_argument("--history", argc, argv);
    if (expected_folder || expected_json || expected_page) on_exit(at_end, NULL);
}

void dp_parse_writing(const struct argp *a, int argc, char **argv, void *input) {
    dp_old_outputs_expect(argc, argv);
    dp_parse(a, argc, argv, input);
    expected_folder = expected_json = expected_page = NULL;
}

/* ---- what a command writes ------------------------------------------------------------------- */

/* Does a regular file hold something else than JSON, such as the tensors that are judged? */
static int holds_else(const char *path) {
    struct stat s;
    FILE *f =
        path && !lstat(path, &s) && S_ISREG(s.st_mode) && s.st_size ? fopen(path, "re") : NULL;
    if (!f) return 0;
    const int first = getc(f);
    fclose(f);
    return first != '{' && first != '[' && first != 0x1f; /* gzip */
}

int dp_outputs_check(const dp_options *o) {
    static const char *const files[] = {"results.json", "junit.xml", "summary.md", "report.html",
                                        "figures/any.png"};
    dp_err e = {0};
    if (holds_else(o->json))
        dp_fail(&e, DP_EINPUT, "--json %s: holds something else than JSON, which would be lost",
                o->json);
    if (e.code || dp_output_check(o->json, &e)) return dp_refuse(&e);
    if (!o->out_dir) return dp_old_outputs_remove(NULL, o->json), 0;
    DP_OWN char *figures = in_folder(o->out_dir, "figures");
    if (dp_make_dirs(o->out_dir))
        dp_fail(&e, DP_EIO, "--out %s: %s", o->out_dir, strerror(errno));
    else if (dp_make_dirs(figures))
        dp_fail(&e, DP_EIO, "--out %s: %s: %s", o->out_dir, figures, strerror(errno));
    for (size_t i = 0; i < sizeof files / sizeof *files && !e.code; i++) {
        DP_OWN char *path = in_folder(o->out_dir, files[i]);
        dp_output_check(path, &e);
    }
    if (e.code) return dp_refuse(&e);
    dp_old_outputs_remove(o->out_dir, o->json);
    return 0;
}

/* The record, and what reports/report.py makes of it; 0, or 2 after a message. */
static int write_folder(const char *dir, const dp_record *rec) {
    dp_err e = {0};
    DP_OWN char *json = in_folder(dir, "results.json");
    if (dp_record_write_json(rec, json, &e)) return dp_refuse(&e);
    if (dp_report_page(dir)) {
        fprintf(stderr, "deltaproof: %s/report.html could not be made; the record is complete\n",
                dir);
        return 2;
    }
    printf("report: %s/report.html\n", dir);
    return 0;
}

/* One that says that nothing could be judged goes where its reason went. */
static void print_verdict(const dp_record *rec, const int n[DP_NVERDICTS], int written, FILE *f) {
    const char *v = dp_record_verdict(rec);
    const int pass = !strcmp(v, "pass"), fail = !strcmp(v, "fail");
    const int unjudged = dp_record_unjudged(rec), ran = dp_record_cases_run(rec);
    fprintf(f, "VERDICT: ");
    dp_put(f,
           pass   ? DP_GOOD
           : fail ? DP_BAD
                  : DP_DOUBTFUL,
           pass   ? "PASS"
           : fail ? "FAIL"
                  : "COULD NOT JUDGE",
           0);
    fprintf(f, " (%d passed, %d failed, %d skipped, %d unjudged", n[DP_PASS], n[DP_FAIL],
            n[DP_SKIPPED], n[DP_UNJUDGED]);
    if (unjudged) fprintf(f, "; %d tensor%s unjudged", unjudged, unjudged > 1 ? "s" : "");
    if (!pass && !fail && n[DP_PASS] && 2 * ran < rec->ncase)
        fprintf(f, "; only %d of %d cases ran", ran, rec->ncase);
    fprintf(f, ")%s\n", written ? "" : ", but not all its files were written");
}

int dp_record_finish(const dp_options *o, const dp_record *rec) {
    dp_err e = {0};
    int n[DP_NVERDICTS], rc = 0;
    FILE *table = dp_options_table(o);
    if (o->json && dp_record_write_json(rec, o->json, &e)) rc = dp_refuse(&e);
    if (o->out_dir && !rc) rc = write_folder(o->out_dir, rec);
    dp_record_totals(rec, n);
    const dp_digest d = dp_digest_of(rec->runs);
    if (d.runs) fprintf(table, "digest: %s (%d runs of simulated ranks)\n", d.hex, d.runs);
    const char *v = dp_record_verdict(rec);
    print_verdict(rec, n, !rc, !strcmp(v, "error") ? stderr : table);
    if (!strcmp(v, "fail")) return 1;
    return rc || !strcmp(v, "error") ? 2 : 0;
}
