/* harness/verdict/expected_impl.h - what the files of the draws share (expected.h):
 *   expected_arrays.c  shapes, allocation, cache parts;
 *   expected.c         the errors of one run beside its reference, which runs a draw makes, all
 *                      draws. */
#ifndef DP_EXPECTED_IMPL_H
#define DP_EXPECTED_IMPL_H
#include "expected.h"
#include "row_map.h"

/* Shapes of a request on N ranks, made once: maps of all tensors. */
typedef struct {
    const dp_expected_request *rq;
    int N;
    dp_windows windows;
    dp_row_map field[DP_NRESULTS], rank[DP_RANK_TENSORS];
    dp_row_map step[DP_CONV_NRESULTS][3], stage[DP_NSTAGE_TENSORS];
} dp_expected_layout;
/* Makes the maps of a request on N ranks, to be freed with dp_expected_layout_free. */
dp_expected_layout dp_expected_layout_of(const dp_expected_request *rq, int N);
/* Frees a layout's maps. */
void dp_expected_layout_free(dp_expected_layout *l);
/* Allocates zeros for a policy on these ranks. */
void dp_expected_alloc_layout(const dp_expected_layout *l, const dp_expected_policy *policy,
                              dp_expected *x);

/* The fp64 reference of a nearby problem. Its results are those on one rank, whatever ranks they
 * are compared on: what N changes in fp64 is no error that is looked at. */
typedef struct {
    dp_drawn_run one;
    dp_sim apart;      /* on N ranks, where those cut other chunks */
    const dp_sim *sim; /* on N ranks: what ranks hold, and intermediates */
    double *slope[2];  /* dg/dx and dg/dA_log */
} dp_drawn_reference;

/* One run beside its reference. */
typedef struct {
    const dp_expected_layout *l;
    dp_drawn_run *one;
    dp_drawn_reference *ref;
    double scale;
    int draw;
    dp_expected *x;
} dp_drawn_pair;
#endif
