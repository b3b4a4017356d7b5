/* gpu/fault.cuh - faults of indexing and synchronisation that can be switched on in the kernels, in test builds alone: with -DDP_KERNEL_FAULTS the variable
 * dpg_fault chooses one (gpu/tests/cpu, `deltaproof museum --kernels`); a device test build may fix one, -DDP_KERNEL_FAULT=DPG_FAULT_TAIL. In every other
 * build FAULT(x) is the constant 0. */
#ifndef DPG_FAULT_CUH
#define DPG_FAULT_CUH

/* ID, name, number in the museum's list of bugs (0: none), the first tensors that can show it, what */
#define DPG_FAULTS(X) \
    X(TAIL, "tail-one-more", 21, "H M S_in final_state o", "the gate's cumulative sum of a ragged chunk takes in the token behind its end") \
    X(GATE_HEAD0, "gate-head0", 1, "H M S_in final_state o", "every value head reads the gate of head 0") \
    X(LAST_TOKEN, "last-token", 12, "H M S_in final_state o", "the decay to the chunk's end is taken to the token before the last") \
    X(OFFSET, "offset-wraps", 19, "H S_in final_state o", "offsets into v wrap at 2^13 entries, which stands for 2^31") \
    X(BETA_KEY, "beta-key", 0, "H M S_in final_state o", "all keys of a token read the beta of its first") \
    X(DECAY_FIRST, "decay-before-use", 33, "H S_in final_state o", "the state is decayed before it is used in u - w S") \
    X(NO_SYNC, "no-sync-state", 27, "H S_in final_state o", "no barrier between X = u - w S and its use") \
    X(FIRST_SUBSEQ, "fwd-first-subseq", 32, "H S_in o", "the forward pre-process runs on the first local sub-sequence") \
    X(GRID, "grid-cut", 20, "o", "the grid ends at 3 tiles, which stands for 65,535: the rest of o is never written") \
    X(MERGE_NEAREST, "merge-nearest-first", 31, "S_in", "the merge starts at the nearest rank") \
    X(MERGE_HALF, "merge-half-v", 6, "S_in", "the upper half of the V columns of the merge is never written") \
    X(MERGE_NO_SYNC, "no-sync-merge", 27, "S_in", "no barrier between the products of the merge") \
    X(GATHER_SLOT, "gather-slot", 0, "S_in", "rank 1 puts the words of ranks 0 and 1 into each other's slots") \
    X(STATE_LOST, "state-lost", 4, "dH dM dS_out dv dbeta dq dk dg", "the recomputation of the backward starts from zeros instead of S_in") \
    X(BWD_HEAD0, "bwd-gate-head0", 1, "dH dS_out", "the backward pre-process decays every head as head 0") \
    X(BWD_NEXT_HEAD, "bwd-next-head", 1, "dv dbeta dq dk dg", "the gradients of all ranks but the last read the gates of the next head") \
    X(LAST_SUBSEQ, "bwd-last-subseq", 0, "dH dS_out", "the backward pre-process runs on the last local sub-sequence") \
    X(BWD_NO_SYNC, "no-sync-bwd", 27, "dH dS_out ds0 dv", "no barrier between dX and its use") \
    X(MERGE_BWD_NEAREST, "merge-bwd-nearest", 31, "dS_out", "the backward merge starts at the nearest rank") \
    X(NO_BOUNDARY, "dg-no-boundary", 23, "dg", "the term of dg at the chunk's end is missing") \
    X(GROUP, "group-one-short", 0, "dq dk", "dq and dk leave out the last value head of a group") \
    X(HALO_LEAK, "halo-leak", 34, "y", "the convolution goes on over a sequence's start inside the rank") \
    X(HALO_ROW, "halo-row", 0, "y", "rows of the halo are read one row late") \
    X(DHALO, "halo-bwd-lost", 0, "dx", "the rows of dpre behind the rank are taken for zeros")

#ifdef __cplusplus
extern "C" {
#endif
typedef enum {
    DPG_FAULT_NONE,
#define DPG_FAULT_ID(id, name, bug, shows, what) DPG_FAULT_##id,
    DPG_FAULTS(DPG_FAULT_ID)
#undef DPG_FAULT_ID
    DPG_NFAULTS
} dpg_fault_id;
typedef struct { const char *name; int bug; const char *shows, *what; } dpg_fault_info;
/* Only in such test builds: harness/museum_kernels.c looks whether they are there. */
extern int dpg_fault __attribute__((weak));
extern const dpg_fault_info dpg_faults[DPG_NFAULTS] __attribute__((weak));
#ifdef __cplusplus
}
#endif

#if defined(DP_KERNEL_FAULT)
#define FAULT(id) (DP_KERNEL_FAULT == DPG_FAULT_##id)
#elif defined(DP_KERNEL_FAULTS)
#define FAULT(id) (dpg_fault == DPG_FAULT_##id)
#else
#define FAULT(id) 0
#endif
#endif
