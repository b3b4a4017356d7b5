/* harness/simulated/fault.h - deliberate faults of the simulated ranks: one row in the table of
 * fault.c each, switched on by name (`deltaproof run --fault NAME`, `deltaproof museum`). They
 * exist to prove that verdicts go red; DP_FAULT_NONE is what every other run uses. Most stand for a
 * fault that reached users of such kernels: `bug` is its number in the museum of those faults
 * (dp_bugs). Effects on stages are in fault_effect.c, those between the calls of a session in
 * calls.c. */
#ifndef DP_FAULT_H
#define DP_FAULT_H
#include "ref/chunk/conv.h"
#include "ref/vocabulary/exchange.h"
#include "ref/vocabulary/own.h"

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
    DP_FAULT_GATE_NO_OFFSET,
    DP_FAULT_MERGE_TF32RZ,
    DP_FAULT_CU_DIVIDED,
    DP_FAULT_ZIGZAG,
    DP_FAULT_LINEAR_GATE,
    DP_FAULT_NEUMANN_INVERSE,
    DP_FAULT_DOUBLING_INVERSE,
    DP_FAULT_FACTORED_EXP,
    DP_FAULT_FACTORED_EXP_CLAMPED,
    DP_FAULT_STALE_LANES,
    DP_FAULT_HALF_CHUNK,
    DP_FAULT_OFFSET_WRAPS,
    DP_FAULT_GRID_AXIS,
    DP_FAULT_STALE_ACCUMULATOR,
    DP_FAULT_DIAGONAL_TF32,
    DP_FAULT_L2_ROUNDED,
    DP_FAULT_DECAY_BF16,
    DP_FAULT_RACE,
    DP_FAULT_ORDER_BY_RUN,
    DP_FAULT_STATE_BF16,
    DP_FAULT_DROP_CHANNEL_SUM,
    DP_FAULT_DROP_HORIZON,
    DP_FAULT_ANCHOR_LEAK,
    DP_FAULT_GATE_BF16,
    DP_FAULT_BETA_BF16,
    DP_FAULT_SHORT_NAN,
    DP_FAULT_BLOCKS_NAN,
    DP_FAULT_STRIDE_IGNORED,
    DP_FAULT_CONTEXT_LOST,
    DP_FAULT_RESIDUAL_BF16,
    DP_FAULT_STATE_FP16,
    DP_FAULT_OUTPUT_FP16,
    DP_FAULT_DBETA_DIVIDED,
    DP_FAULT_SATURATED_NAN,
    DP_FAULT_ERASE_MEAN,
    DP_FAULT_ERASE_WRITES,
    DP_FAULT_DK_UNERASED,
    DP_FAULT_TURNS_MISTAKEN,
    DP_FAULT_READ_DECAYED,
    DP_FAULT_READ_UNDECAYED,
    DP_FAULT_HALO_LEAK,
    DP_FAULT_HALO_GRAD_LOST,
    DP_FAULT_HALO_GRAD_SHIFTED,
    DP_FAULT_REJECTED_STAY,
    DP_FAULT_ROLLBACK_EARLY,
    DP_FAULT_ROLLBACK_LATE,
    DP_FAULT_ROLLBACK_SKIPS,
    DP_FAULT_SLOT_OF_OTHER,
    DP_FAULT_SLOT_TRANSPOSED,
    DP_FAULT_CALL_GATE,
    DP_FAULT_DRAFT_GATE,
    DP_FAULT_PADDING_WRITES,
    DP_FAULT_SLOT_UNWRITTEN,
    DP_FAULT_SLOT_NEIGHBOUR,
    DP_FAULT_SLOT_IN_PLACE,
    DP_FAULT_PADDING_LAST_SLOT,
    DP_FAULT_PREFIX_OVERWRITTEN,
    DP_FAULT_CONV_OF_OTHER,
    DP_FAULT_CONV_ZEROED,
    DP_FAULT_CONV_LATE,
    DP_FAULT_KEPT_BF16,
    DP_FAULT_KEPT_INT8,
    DP_FAULT_SCAN_MISSES_LEVEL,
    DP_FAULT_SCAN_SWAPPED,
    DP_FAULT_SERIAL_LATE,
    DP_FAULT_HEADS_SWAPPED,
    DP_FAULT_PAYLOAD_TRUNCATED,
    DP_FAULT_PAYLOAD_LOW_LOST,
    DP_FAULT_PAYLOAD_TWICE,
    DP_FAULT_RANK_LARGEST,
    DP_FAULT_PARTS_BY_RANK,
    DP_FAULT_PART_FIRST_M,
    DP_NFAULTS
} dp_fault;

typedef struct {
    const char *name;
    int bug;
    const char *stage, *what, *source;
    /* that alone have it, taken whatever is asked for; allgather, full: it is of none */
    dp_exchange exchange;
    dp_payload payload;
    dp_own own;    /* likewise, unless another one than even is asked for */
    int even;      /* 1: means something only where each rank owns T / N tokens */
    unsigned kind; /* 0: what the stage says */
} dp_fault_info;   /* bug 0: none of the list */
extern const dp_fault_info dp_faults[DP_NFAULTS];
/* The exchange, the payload and the owners of a run with that fault. */
dp_exchange dp_fault_exchange(dp_fault f, dp_exchange asked);
dp_payload dp_fault_payload(dp_fault f, dp_payload asked);
dp_own dp_fault_own(dp_fault f, dp_own asked);
int dp_fault_find(const char *name); /* -1: unknown */
/* Its kind, one of DP_FAULTS_OF_.. (harness/case/operations.h). */
unsigned dp_fault_kind(dp_fault f);
/* Can it show where faults of these kinds can? */
static inline int dp_fault_shows(dp_fault f, unsigned kinds) {
    return (kinds & dp_fault_kind(f)) != 0;
}
int dp_fault_of_conv(dp_fault f);  /* of a convolution, not of the recurrence */
int dp_fault_by_run(dp_fault f);   /* shows between runs of the same inputs alone */
int dp_fault_of_calls(dp_fault f); /* of data that the calls of a session pass on */
int dp_fault_lives_in(
    dp_fault f,
    const char *stage); /* is it the fault's stage, or one of several? 0 for "" and NULL */

/* The museum: faults that reached users, numbered from 1. From DP_BUGS_OF_THREADS on they are
 * threads of 2026 in the order of their discovery. The note says how a fault reproduces the bug, or
 * which check shows it instead (then no fault has its number). */
typedef struct {
    const char *what, *note;
} dp_bug;
#define DP_BUGS_OF_THREADS 37
#define DP_NBUGS 60
extern const dp_bug dp_bugs[DP_NBUGS + 1];

/* fault_effect.c: what a fault does to a convolution, after its run. Effects on simulated ranks are
 * functions there that dp_sim_new adds to the simulation, which calls them after its stages
 * (ranks.h: DP_AFTER_..). Where one acts, dp_sim.hit is set for that rank and head. */
void dp_effect_conv(dp_fault fault, const dp_conv *c, int N, dp_base pol, dp_conv_result *r);
#endif
