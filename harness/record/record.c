/* Totals and verdict of a record, and the record as JSON (record.h). */
#include "record.h"
#include "record_schema.h"
#include "ref/files/output.h"

#include <stdio.h>
#include <string.h>

void dp_record_totals(const dp_record *r, int n[DP_NVERDICTS]) {
    memset(n, 0, sizeof(int) * DP_NVERDICTS);
    for (int i = 0; i < r->runs->n; i++)
        n[r->runs->run[i].verdict]++;
}

int dp_record_pooled_failures(const dp_record *r) {
    int n = 0;
    for (int i = 0; i < r->npooled; i++)
        n += r->pooled[i].verdict == DP_FAIL;
    return n;
}

int dp_record_cases_run(const dp_record *r) {
    int n = 0;
    for (int i = 0; i < r->ncase; i++) {
        int any = 0;
        for (int k = 0; k < r->runs->n && !any; k++)
            any = r->runs->run[k].verdict != DP_SKIPPED &&
                  !strcmp(r->runs->run[k].case_name, r->cases[i]->name);
        n += any;
    }
    return n;
}

int dp_record_unjudged(const dp_record *r) {
    int n = 0;
    for (int i = 0; i < r->runs->n; i++)
        for (int k = 0; k < r->runs->run[i].ntensor; k++)
            n += r->runs->run[i].tensor[k].verdict == DP_UNJUDGED;
    return n;
}

/* Runs that are unjudged by a tensor that may not be. */
static int runs_unjudged(const dp_record *r) {
    int n = 0;
    for (int i = 0; i < r->runs->n; i++) {
        const dp_run *x = &r->runs->run[i];
        int open = x->ntensor == 0;
        for (int k = 0; k < x->ntensor; k++)
            open |= x->tensor[k].verdict == DP_UNJUDGED && !x->tensor[k].allowed;
        n += x->verdict == DP_UNJUDGED && open;
    }
    return n;
}

const char *dp_record_verdict(const dp_record *r) {
    int n[DP_NVERDICTS];
    dp_record_totals(r, n);
    if (n[DP_FAIL] || dp_record_pooled_failures(r)) return "fail";
    if (r->errors || runs_unjudged(r) || !n[DP_PASS]) return "error";
    return 2 * dp_record_cases_run(r) < r->ncase ? "error" : "pass";
}

void dp_pooled_text(const dp_pooled_row *row, char *text, size_t size) {
    const char *variant = row->variant ? dp_cuda_variant_names[row->variant] : "";
    const char *fault = row->fault ? dp_faults[row->fault].name : "";
    snprintf(text, size,
             "%s of %s%s%s, base %s%s%s%s: %.2f times what its design makes, over %d cases "
             "together (by chance: %.0e; a factor of %.2f on their errors would be at the limit)",
             row->tensor, dp_backend_names[row->backend], *variant ? " " : "", variant,
             dp_base_names[row->base], row->undeclared ? ", undeclared" : "",
             *fault ? ", fault " : "", fault, row->is.ratio, row->is.cases, row->is.chance,
             row->is.detects);
}

dp_status dp_record_write_json(const dp_record *r, const char *path, dp_err *e) {
    return dp_json_write_compact(dp_schema_write(&dp_record_schema, r), path, e);
}
