/* ref/arithmetic/isa.h - the instruction sets that hot loops are compiled for, and which of them
 * runs.
 *
 * Every version of a loop makes the same bits: operations on one entry have a stated order. Vectors
 * only decide how many entries are computed at once. The widest version that the CPU has runs.
 * DP_ISA=plain, avx2 or avx512 in the environment of the program narrows it, to see that nothing
 * changes.
 *
 * A file gets its versions from isa_each.inc, which includes DP_ISA_BODY once for each.
 */
#pragma once
#include "ref/vocabulary/problem.h"

typedef enum { DP_ISA_PLAIN, DP_ISA_AVX2, DP_ISA_AVX512, DP_NISAS } dp_isa;
extern const char *const dp_isa_names[DP_NISAS];

int dp_isa_here(dp_isa isa); /* compiled in, and this CPU has it */
/* The one that loops run in now. */
dp_isa dp_isa_chosen(void);
/* From now on the one of that name; NULL: the widest. DP_EINPUT when there is none such here. */
dp_status dp_isa_choose(const char *name, dp_err *e);
