/* Which instruction set hot loops run on. */
#include "isa.h"

#include <string.h>

const char *const dp_isa_names[DP_NISAS] = {"plain", "avx2", "avx512"};

static int chosen = -1; /* -1: the widest */

int dp_isa_here(dp_isa isa) {
    if (isa == DP_ISA_PLAIN) return 1;
#if defined(__x86_64__)
    if (isa == DP_ISA_AVX2) return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
    if (isa == DP_ISA_AVX512)
        return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512dq") &&
               __builtin_cpu_supports("avx512vl") && dp_isa_here(DP_ISA_AVX2);
#endif
    return 0;
}

dp_isa dp_isa_chosen(void) {
    if (chosen >= 0) return (dp_isa)chosen;
    int isa = DP_NISAS - 1;
    while (!dp_isa_here((dp_isa)isa))
        isa--;
    return (dp_isa)isa;
}

dp_status dp_isa_choose(const char *name, dp_err *e) {
    chosen = -1;
    for (int i = 0; name && i < DP_NISAS; i++)
        if (!strcmp(name, dp_isa_names[i]) && dp_isa_here((dp_isa)i)) chosen = i;
    if (!name || chosen >= 0) return DP_OK;
    return dp_fail(e, DP_EINPUT,
                   "DP_ISA = %s: not an instruction set of this program on this CPU (plain%s%s)",
                   name, dp_isa_here(DP_ISA_AVX2) ? ", avx2" : "",
                   dp_isa_here(DP_ISA_AVX512) ? ", avx512" : "");
}
