/* harness/run/over_cases.h - what the runs of a kernel over many cases say together
 * (harness/verdict/pooled.h). */
#ifndef DP_OVER_CASES_H
#define DP_OVER_CASES_H
#include "harness/record/record.h"

/* A row for every backend, variant, base and tensor that draws expect an error of in
 * DP_POOLED_CASES cases or more. Undeclared runs and those with a fault count apart. Sets
 * r->pooled, which dp_over_cases_free frees; r->runs must be set. */
void dp_over_cases(dp_record *r);
/* Frees what it holds; the struct is the caller's. */
void dp_over_cases_free(dp_record *r);

#endif
