/* harness/simulated/fault.h - deliberate faults of the simulated ranks: one row of faults.inc each,
 * switched on by name (`deltaproof run --fault NAME`, `deltaproof museum`). They exist to prove
 * that verdicts go red; DP_FAULT_NONE is what every other run uses. Most stand for a fault that
 * reached users of such kernels: `bug` is its number in the list of those (reports/say/bugs.py).
 * Effects on stages are functions in fault_effect.c that dp_sim_new adds to the simulation, which
 * calls them after its stages (ranks.h: DP_AFTER_..). Where one acts, dp_sim.hit is set for that
 * rank and head. Effects between the calls of a session are in calls.c. */
#pragma once
#include "ref/vocabulary/exchange.h"
#include "ref/vocabulary/own.h"

typedef enum {
#define ROW(ID, ...) DP_FAULT_##ID,
#include "faults.inc"
#undef ROW
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
int dp_fault_by_run(dp_fault f);   /* shows between runs of the same inputs alone */
int dp_fault_of_calls(dp_fault f); /* of data that the calls of a session pass on */
