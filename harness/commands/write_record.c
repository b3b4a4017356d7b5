/* Writes the record of a command and says its verdict (write_record.h). */
#include "write_record.h"
#include "commands.h"
#include "harness/base/terminal.h"
#include "harness/record/digest.h"
#include "old_outputs.h"
#include "print_failures.h"
#include "ref/files/output.h"
#include "report_page.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static char *in_folder(const char *dir, const char *name) {
    char *path;
    if (asprintf(&path, "%s/%s", dir, name) < 0) abort();
    return path;
}

int dp_outputs_check(const dp_options *o) {
    static const char *const files[] = {"results.json", "junit.xml", "summary.md", "report.html",
                                        "figures/any.png"};
    dp_err e = {0};
    if (dp_output_check(o->json, &e)) return dp_refuse(&e);
    if (!o->out_dir) return dp_old_outputs_remove(NULL, o->json), 0;
    char *figures = in_folder(o->out_dir, "figures");
    if (dp_make_dirs(o->out_dir))
        dp_fail(&e, DP_EIO, "--out %s: %s", o->out_dir, strerror(errno));
    else if (dp_make_dirs(figures))
        dp_fail(&e, DP_EIO, "--out %s: %s: %s", o->out_dir, figures, strerror(errno));
    free(figures);
    for (size_t i = 0; i < sizeof files / sizeof *files && !e.code; i++) {
        char *path = in_folder(o->out_dir, files[i]);
        dp_output_check(path, &e);
        free(path);
    }
    if (e.code) return dp_refuse(&e);
    dp_old_outputs_remove(o->out_dir, o->json);
    return 0;
}

static void write_summary(const dp_record *rec, const char *dir, dp_err *e) {
    dp_output out;
    char *path = in_folder(dir, "summary.md");
    if (!dp_output_open(&out, path, e)) {
        dp_write_summary(rec, out.f);
        dp_output_close(&out, 0, e);
    }
    free(path);
}

/* Record, junit.xml, summary.md, page and figures; 0, or 2 after a message. */
static int write_folder(const char *dir, const dp_record *rec) {
    dp_err e = {0};
    char *json = in_folder(dir, "results.json"), *junit = in_folder(dir, "junit.xml");
    if (!dp_record_write_json(rec, json, &e)) dp_record_write_junit(rec, junit, &e);
    if (!e.code) write_summary(rec, dir, &e);
    free(json);
    free(junit);
    if (e.code) return dp_refuse(&e);
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
