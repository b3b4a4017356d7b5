/* harness/record/record.h - the record of a run: JSON, and JUnit XML for CI systems (properties, a
 * timestamp, and for a failure every tensor that failed and its command). Versioned schema.
 *
 * What it holds, field by field: record_schema.c, or `deltaproof list --schema`. Readers must
 * ignore fields they do not know; a field never changes its meaning within one schema_version.
 * Non-finite numbers are the strings "nan", "inf", "-inf". Errors are relative to the truth's norm
 * unless said otherwise.
 */
#ifndef DP_RECORD_H
#define DP_RECORD_H
#include "provenance.h"
#include "run.h"
#ifdef __cplusplus
extern "C" {
#endif

typedef struct {
    const dp_runs *runs;
    int ncase;
    dp_case *const *cases;
    double seconds;
    int errors;                      /* cases that could not be judged at all */
    const char *command;             /* what made it; NULL: not said */
    const dp_provenance *provenance; /* NULL: not said */
} dp_record;

void dp_record_totals(const dp_record *r, int n[DP_NVERDICTS]);
/* "pass", "fail", or "error" when a case could not be judged. */
const char *dp_record_verdict(const dp_record *r);
/* "-": stdout; else by rename */
dp_status dp_record_write_json(const dp_record *r, const char *path, dp_err *e);
dp_status dp_record_write_junit(const dp_record *r, const char *path, dp_err *e);

#ifdef __cplusplus
}
#endif
#endif
