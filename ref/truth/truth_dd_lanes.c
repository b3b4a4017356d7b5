/* Which version of the double-double recurrence runs here (truth_dd.h). */
#include "ref/arithmetic/isa.h"
#include "truth_dd.h"

#include <string.h>

const tr_dd_lanes *tr_dd_choose(const char *name) {
    const tr_dd_lanes *all[] = {
#if defined(__x86_64__)
        dp_isa_here(DP_ISA_AVX512) && (name || dp_isa_chosen() >= DP_ISA_AVX512) ? &tr_dd_avx512
                                                                                 : NULL,
        dp_isa_here(DP_ISA_AVX2) && (name || dp_isa_chosen() >= DP_ISA_AVX2) ? &tr_dd_avx2 : NULL,
#endif
        &tr_dd_plain,
        &tr_dd_wide
    };
    for (size_t i = 0; i < sizeof all / sizeof *all; i++)
        if (all[i] && (!name || !strcmp(name, all[i]->name))) return all[i];
    return NULL;
}
