/* The table of fault.cuh, in builds of the kernels whose faults can be switched on. */
#include "../fault.cuh"
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

extern const dpg_fault_info dpg_faults[DPG_NFAULTS] = {{"none", 0, "", ""},
#define DPG_FAULT_ROW(id, name, bug, shows, what) {name, bug, shows, what},
                                                       DPG_FAULTS(DPG_FAULT_ROW)
                                                           DPG_FAST_FAULTS(DPG_FAULT_ROW)};

/* On the CPU those of the path that its capability chooses (cpu/cpu.cc). */
static int of_fast_path() {
#ifdef DPG_FAULTS_OF_DEVICE
    return 1;
#else
    const char *capability = getenv("DP_CPU_CAPABILITY");
    return capability && atoi(capability) >= 80;
#endif
}

/* For reports/kernels.py, those of this path: fast, name, bug, shows, what; tabs between. The
 * program ends: it may start itself once more, which would cut the list and begin it again. */
static void list() {
    const int fast = of_fast_path(), end = fast ? DPG_NFAULTS : DPG_FIRST_FAST_FAULT;
    for (int i = fast ? DPG_FIRST_FAST_FAULT : 1; i < end; i++)
        printf("%d\t%s\t%d\t%s\t%s\n", fast, dpg_faults[i].name, dpg_faults[i].bug,
               dpg_faults[i].shows, dpg_faults[i].what);
    exit(0);
}

static int chosen() {
    const char *s = getenv("DPG_FAULT");
    if (s && !strcmp(s, "list")) list();
    if (!s) return DPG_FAULT_NONE;
    for (int i = 0; i < DPG_NFAULTS; i++)
        if (!strcmp(s, dpg_faults[i].name)) return i;
    fprintf(stderr, "DPG_FAULT=%s: the kernels have no such fault\n", s);
    exit(2);
}
int dpg_fault = chosen();
