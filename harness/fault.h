/* harness/fault.h - deliberate faults of the simulated ranks: one row in the table of fault.c each, switched on by name
 * (`deltaproof run --fault NAME`). They exist to prove that verdicts go red; DP_FAULT_NONE is what every other run uses. */
#ifndef DP_FAULT_H
#define DP_FAULT_H
#ifdef __cplusplus
extern "C" {
#endif

typedef enum {
    DP_FAULT_NONE,
    DP_FAULT_MERGE_NEAREST_FIRST,
    DP_FAULT_FWD_FIRST_SUBSEQ,
    DP_FAULT_BWD_LAST_SUBSEQ,
    DP_FAULT_DECAY_BEFORE_USE,
    DP_FAULT_GATE_OF_HEAD0,
    DP_FAULT_LAST_INDEX,
    DP_FAULT_TAIL_UNMASKED,
    DP_FAULT_CHAIN_BF16,
    DP_FAULT_CHAIN_TF32RZ,
    DP_FAULT_STATE_LOST,
    DP_FAULT_STATE_LATE,
    DP_FAULT_MERGE_HALF_V,
    DP_FAULT_STATE_TRANSPOSED,
    DP_FAULT_EXP2_GATE,
    DP_FAULT_MERGE_SCALED,
    DP_FAULT_GATE_GRAD_PARTIAL,
    DP_FAULT_DG_NO_BOUNDARY,
    DP_NFAULTS
} dp_fault;

typedef struct { const char *name, *stage, *what, *source; } dp_fault_info;
extern const dp_fault_info dp_faults[DP_NFAULTS];
int dp_fault_find(const char *name);         /* -1: unknown */

#ifdef __cplusplus
}
#endif
#endif
