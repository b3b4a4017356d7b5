/* harness/verdict/drawn_pairs.h - M, H, dM and dH of ranks as a recurrent design makes them: the
 * token recurrence over a rank's tokens (math.md g.1).
 *
 *   H   from zeros, over the last local sub-sequence    dH   its adjoint from zeros, over the first
 *   M   of the identity without values                  dM   its adjoint of the identity
 *
 * A rank in which a sequence begins (ends) has M (dM) too where it sends its pair, rounded, and the
 * sequence an initial state (a gradient of the final one).
 */
#ifndef DP_DRAWN_PAIRS_H
#define DP_DRAWN_PAIRS_H
#include "harness/simulated/stage_tensor.h"
#include "ref/vocabulary/design.h"
#ifdef __cplusplus
extern "C" {
#endif

typedef struct {
    int n;
    double **of[DP_RANK_TENSORS]; /* [n] by rank * HV + head, an entry NULL where the rank forms
                                     none; NULL: no rank does */
    double **begins[2];           /* M of ranks in which a sequence begins; dM of those in which
                                     one ends; NULL as above */
} dp_drawn_pairs;

/* Of N ranks; zeros for one rank. */
void dp_drawn_pairs_make(dp_drawn_pairs *x, const dp_problem *p, const dp_design *design, int N,
                         int backward);
/* Frees what it holds, and leaves zeros. */
void dp_drawn_pairs_free(dp_drawn_pairs *x);

#ifdef __cplusplus
}
#endif
#endif
