/* ref/chunk/chunk_gated.h - pair scores from operands that carry their decay, as matrix kernels
 * form them.
 *
 * A decay exp(gcum_s - gcum_i) of a pair of tokens is split at an anchor a (math.md e.1):
 *     a(s, i) = first token of the 16-token block of s, or one inside the block that holds both:
 *               its middle (design.anchor 0), its first (1), after a quarter (2), three
 *               quarters (3)
 *     score   = sum_k round(q_s exp(gcum_s - gcum_a)) round(k_i exp(gcum_a - gcum_i))
 * with operands rounded to its factors (scores=tf32: to tf32), products and sums in fp32. The
 * backward uses the same operands, and dP and dL rounded as they are. A channel in which one of the
 * two decays lies beyond 2^110 is formed pair by pair in fp32. Kernels whose gates have no lower
 * bound do so. The field ch->base must not be fp64.
 */
#pragma once
#include "chunk.h"

#define DP_ANCHORS 4

/* Returns channel x of a key k of token t as an operand of the scores, rounded with its decay from
 * the block's anchor. The decay from the anchor to the end of the chunk goes to *left.
 * If the decay lies beyond 2^110 (above), the function returns k and leaves *left. */
double dp_gated_key(const dp_chunk *ch, int t, int x, double k, double *left);

/* ch->L and ch->Aqk (before it is stored). */
void dp_gated_forward(dp_chunk *ch);

/* Input: dL [n][n], dP [c][n]. Output: the in-chunk parts of dq [c][K], dk_read and dk_write
 * [n][K], and dgam [c][K], the adjoint of gcum. An adjoint is multiplied by the row itself, so one
 * rounding of a pair stays in the reverse sum of dg (math.md f). With scores=paired the adjoint is
 * multiplied by the rounded operand, so that a pair of tokens cancels (k_grad of gpu/). */
typedef struct {
    const double *dL, *dP;
    double *dq, *dk_read, *dk_write, *dgam;
} dp_gated_gradients;
/* Adds to the four output arrays. */
void dp_gated_backward(const dp_chunk *ch, const dp_gated_gradients *g);
