/* The table of fault.cuh, in builds of the kernels whose faults can be switched on. */
#include "../fault.cuh"
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

extern const dpg_fault_info dpg_faults[DPG_NFAULTS] = {{"none", 0, "", ""},
#define DPG_FAULT_ROW(id, name, bug, shows, what) {name, bug, shows, what},
                                                       DPG_FAULTS(DPG_FAULT_ROW)
                                                           DPG_FAST_FAULTS(DPG_FAULT_ROW)};

static int chosen() {
    const char *s = getenv("DPG_FAULT");
    for (int i = 0; s && i < DPG_NFAULTS; i++)
        if (!strcmp(s, dpg_faults[i].name)) return i;
    if (s) {
        fprintf(stderr, "DPG_FAULT=%s: the kernels have no such fault\n", s);
        exit(2);
    }
    return DPG_FAULT_NONE;
}
int dpg_fault = chosen();
/* On the CPU those of the path that its capability chooses (cpu/cpu.cc). */
static int of_fast_path() {
#ifdef DPG_FAULTS_OF_DEVICE
    return 1;
#else
    const char *capability = getenv("DP_CPU_CAPABILITY");
    return capability && atoi(capability) >= 80;
#endif
}
extern const int dpg_faults_fast = of_fast_path();
