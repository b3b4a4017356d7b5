/* harness/expected.h - what error a correct implementation in the declared formats makes on a problem, by trying it: a Monte-Carlo model of rounding
 * beside the bounds of budget.h (ref/math.md, section Expected). From the inputs only, never from the subject.
 *
 * A draw runs the simulated ranks in the declared formats on a nearby problem, every number of the inputs moved at random by about one unit of bf16
 * and rounded to the inputs' type again, and subtracts the fp64 reference of that same nearby problem. All roundings fall out anew, those of
 * correlated operands and of truncation included, while the problem stays what it is. The problem itself is never drawn: a subject that
 * is these simulated ranks is judged by other problems than its own. Base fp64 is drawn in fp32 and scaled by 2^-29 (errors are first order in the
 * unit roundoff).
 *
 * A training step (op step, step.h) is drawn whole: x, w and bias of the convolutions are moved, too, and q, k, v of the subject come out of its own convolution.
 *
 * Errors are kept per cell: a chunk of one head for tensors of tokens (so within one rank and sequence), one state, one (rank, head), one head of
 * dA_log and ddt_bias, one tap and head of dw; stages likewise. e2 holds |got - want|_F^2 of each cell.
 */
#ifndef DP_EXPECTED_H
#define DP_EXPECTED_H
#include "../ref/cache.h"
#include "../ref/conv.h"
#include "ranks.h"
#ifdef __cplusplus
extern "C" {
#endif

/* What stands in front of q, k and v in a training step: convolutions, without dy; NULL: none. A dp_front that is NULL: none of them, no training step. */
typedef struct { const dp_conv *conv[3]; } dp_front;
enum { DP_STEP_Y, DP_STEP_DX, DP_STEP_DW, DP_STEP_DBIAS, DP_STEP_KINDS };

#define DP_MAX_DRAWS 8
typedef struct { int ndraw; int64_t n; double *e2; } dp_draws;   /* e2 [ndraw][n]; NULL: the tensor does not exist here */
#define DP_MAX_STAGES 24
typedef struct {
    dp_draws field[10], rank[6];         /* by dp_result_fields; S_in M H dS_out dM dH [N*HV] */
    dp_draws step[DP_STEP_KINDS][3];     /* of a training step: of the convolutions of q, k, v */
    dp_draws stage[DP_MAX_STAGES];       /* by dp_tap, those of tokens and chunks, if asked for */
} dp_expected;
#define DP_EXPECTED_PARTS (16 + 3 * DP_STEP_KINDS + DP_MAX_STAGES)

/* The nearby problem of draw `draw`, to be freed. dtype: format of the inputs. */
dp_problem dp_expected_nearby(const dp_problem *p, dp_format dtype, int draw);
/* Draws that a problem gets: more where cells are few. */
int dp_expected_count(const dp_problem *p);
/* Cells of row `row` of result field `field`: chunk is the index of the row's chunk among those of all ranks, -1 where rows are no tokens. */
static inline int64_t dp_cell(int chunk, int heads, int head, int64_t row) { return chunk >= 0 ? (int64_t)chunk * heads + head : row; }

/* All of n policies (base, chain) at once (stages: intermediates too): what they share is computed once a draw. With a front, q, k, v of p where it has a convolution are not read. dtype: format of the inputs. out [n] is allocated. */
void dp_expected_run(const dp_problem *p, const dp_front *front, dp_format dtype, int N, int backward, int stages, int n, const dp_base *base, const dp_format *chain, dp_expected *out);
/* Allocated, zeros; chunks: of all ranks (ngroup of dp_sim). */
void dp_expected_alloc(const dp_problem *p, const dp_front *front, int N, int chunks, int backward, int stages, dp_expected *x);
int dp_expected_parts(dp_expected *x, dp_part *parts);           /* at most DP_EXPECTED_PARTS */
void dp_expected_free(dp_expected *x);

#ifdef __cplusplus
}
#endif
#endif
