/* Totals and verdict of a record, and the record as JSON (record.h). */
#include "record.h"
#include "record_schema.h"
#include "ref/files/output.h"

#include <string.h>

void dp_record_totals(const dp_record *r, int n[DP_NVERDICTS]) {
    memset(n, 0, sizeof(int) * DP_NVERDICTS);
    for (int i = 0; i < r->runs->n; i++)
        n[r->runs->run[i].verdict]++;
}

const char *dp_record_verdict(const dp_record *r) {
    int n[DP_NVERDICTS];
    dp_record_totals(r, n);
    return r->errors || !(n[DP_PASS] + n[DP_FAIL]) ? (n[DP_FAIL] ? "fail" : "error")
           : n[DP_FAIL]                            ? "fail"
                                                   : "pass";
}

dp_status dp_record_write_json(const dp_record *r, const char *path, dp_err *e) {
    return dp_json_write(dp_schema_write(&dp_record_schema, r), path, 17, e);
}
