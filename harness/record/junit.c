/* A record as JUnit XML, for CI systems (record.h). */
#include "record.h"
#include "ref/files/output.h"

#include <stdio.h>
#include <time.h>

#ifndef DP_COMMIT
#define DP_COMMIT "unknown"
#endif

static void xml(FILE *f, const char *s) {
    for (; *s; s++) {
        if (*s == '&')
            fputs("&amp;", f);
        else if (*s == '<')
            fputs("&lt;", f);
        else if (*s == '>')
            fputs("&gt;", f);
        else if (*s == '"')
            fputs("&quot;", f);
        else if ((unsigned char)*s >= 32)
            fputc(*s, f);
    }
}

static void property(FILE *f, const char *name, const char *value) {
    if (!value || !*value) return;
    fprintf(f, "    <property name=\"%s\" value=\"", name);
    xml(f, value);
    fputs("\"/>\n", f);
}

static void junit_properties(FILE *f, const dp_record *r) {
    const dp_provenance *p = r->provenance;
    fputs("  <properties>\n", f);
    property(f, "version", DP_VERSION);
    property(f, "commit", DP_COMMIT);
    property(f, "device", dp_cuda_device());
    property(f, "command", r->command);
    property(f, "verdict", dp_record_verdict(r));
    property(f, "label", p ? p->label : NULL);
    property(f, "kernel_commit", p ? p->kernel_commit : NULL);
    fputs("  </properties>\n", f);
}

/* The text that a CI system shows of a failure: every failed tensor, and the command. */
static void junit_body(FILE *f, const dp_run *x) {
    for (int i = 0; i < x->ntensor; i++) {
        const dp_judgement *t = &x->tensor[i];
        if (t->verdict != DP_FAIL) continue;
        xml(f, t->name);
        fputs(": ", f);
        xml(f, t->why);
        fputc('\n', f);
    }
    fputs("deltaproof run --id &apos;", f);
    xml(f, x->id);
    fputs("&apos;\n", f);
}

static void junit_case(FILE *f, const dp_run *x) {
    fputs("  <testcase classname=\"", f);
    xml(f, x->case_name);
    fputs("\" name=\"", f);
    xml(f, x->id);
    fprintf(f, "\" time=\"%.3f\"", x->seconds);
    if (x->verdict == DP_PASS) {
        fputs("/>\n", f);
        return;
    }
    fprintf(f, "><%s", x->verdict == DP_FAIL ? "failure" : "skipped");
    if (x->verdict == DP_FAIL && x->tier && *x->tier) fprintf(f, " type=\"%s\"", x->tier);
    fputs(" message=\"", f);
    if (x->verdict == DP_UNJUDGED) fputs("unjudged: ", f);
    xml(f, x->why);
    if (x->verdict != DP_FAIL) {
        fputs("\"/></testcase>\n", f);
        return;
    }
    fputs("\">", f);
    junit_body(f, x);
    fputs("</failure></testcase>\n", f);
}

static void junit_pooled(FILE *f, const dp_pooled_row *row) {
    char text[400];
    dp_pooled_text(row, text, sizeof text);
    fprintf(f, "  <testcase classname=\"all cases together\" name=\"%s %s %s\"><failure message=\"",
            row->tensor, dp_backend_names[row->backend], dp_base_names[row->base]);
    xml(f, text);
    fputs("\"/></testcase>\n", f);
}

dp_status dp_record_write_junit(const dp_record *r, const char *path, dp_err *e) {
    dp_output out;
    int n[DP_NVERDICTS];
    char when[40];
    const time_t now = time(NULL);
    dp_status st = dp_output_open(&out, path, e);
    if (st) return st;
    FILE *const f = out.f;
    dp_record_totals(r, n);
    const int together = dp_record_pooled_failures(r);
    strftime(when, sizeof when, "%Y-%m-%dT%H:%M:%S", gmtime(&now));
    fprintf(f,
            "<?xml version=\"1.0\" encoding=\"UTF-8\"?>\n<testsuite name=\"deltaproof\" "
            "tests=\"%d\" failures=\"%d\" errors=\"%d\" skipped=\"%d\" time=\"%.3f\" "
            "timestamp=\"%s\">\n",
            r->runs->n + together + !!r->errors, n[DP_FAIL] + together, !!r->errors,
            n[DP_SKIPPED] + n[DP_UNJUDGED], r->seconds, when);
    junit_properties(f, r);
    for (int i = 0; i < r->runs->n; i++)
        junit_case(f, &r->runs->run[i]);
    for (int i = 0; i < r->npooled; i++)
        if (r->pooled[i].verdict == DP_FAIL) junit_pooled(f, &r->pooled[i]);
    if (r->errors)
        fprintf(f,
                "  <testcase classname=\"deltaproof\" name=\"all can be judged\"><error "
                "message=\"%d could not be judged: see the log\"/></testcase>\n",
                r->errors);
    fputs("</testsuite>\n", f);
    return dp_output_close(&out, 0, e);
}
