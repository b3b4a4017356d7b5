/* The table of fault.cuh, in the build of the kernels whose faults can be switched on. */
#include "fault.cuh"

int dpg_fault = DPG_FAULT_NONE;
extern const dpg_fault_info dpg_faults[DPG_NFAULTS] = {
    {"none", 0, "", ""},
#define DPG_FAULT_ROW(id, name, bug, shows, what) {name, bug, shows, what},
    DPG_FAULTS(DPG_FAULT_ROW)
};
