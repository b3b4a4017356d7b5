/* ref/bound/drop.h - the loss of a kernel that drops attenuated states. Its claim: at token t it
 * leaves out the state before token c only if at most E = 2^-bits of any state is left.
 *
 * Attenuation. A step is S_t = (I - sum_j beta_j k_j k_j') diag(exp g_t) S_{t-1} + .. It multiplies
 * the 2-norm of a state by at most exp(largest channel gate of the token) times the 2-norm of the
 * first factor. This norm is 1 where sum_j beta_j |k_j|^2 <= 2. If the keys of a token read one
 * after another, the factor is a product over keys, of norm 1 where each beta_j |k_j|^2 <= 2.
 * So from c to t at most
 *     A(t, c) = exp(sum over tokens s = c .. t-1 of max over channels of g_s)
 * is left of a state. The transposed steps leave at most as much of a gradient. The largest
 * channel's SUM is no bound: keys move the state between channels (keys = moved,
 * ref/inputs/inputs_moved.c). If a step of a recurrence with beta is no contraction, no state from
 * before that step may be dropped after the step. GDN-2 erases with keys e that are not along k:
 * its first factor is I - k e', of norm
 *     n_t = (w + sqrt(w^2 + 4 (1 - k' e))) / 2 or 1, the larger one, w = |k||e|,
 * and A has the product of exp(g) n. So A may rise again, while a dropped state stays dropped. The
 * maximum D_t below is therefore over every c with A(s, c) <= E at some s up to t. GLA and SSD
 * erase nothing: n = 1.
 *
 * Loss. A result is linear in each state, so it loses the contribution of the dropped state. At
 * token t the state loses at most D_t, its gradient at most B_t (likewise):
 *     D_t = max over c with A(t, c) <= E of A(t, c) |S_c|_F
 * Norms give the loss of each result (math.md d, R = 1; sums over j else)
 *     o      scale |q| D                    dq     scale |do| D
 *     dv     beta |k| B                     dbeta  |k| (B |r| + |dS| |k| D')
 *     dk     beta (B |r| + |dS| |k| D') + D' |dr| + |S'| beta |k| B
 *     dg     n (|dS| D' + B |S'| + B D')    S' the decayed state, D' = D its lack, r = v - S' k
 * If keys read one after another, S' and r are of the state that the key reads. For a contraction
 * its gradient is no larger. GDN-2 has r = write o v - S' e and loses
 *     e      L = D' |dr| + |S'| |k| B + D' |k| B
 *     erase  |k|_max L                      dk     (B |r| + |dS| |e| D') + |erase|_max L
 *     dv     |write|_max |k| B              dwrite |v|_max |k| B
 * DPLR: nothing may be lost. The sums dA_log and ddt_bias lose the loss of dg times the gate's
 * slopes. Slopes and norms of the activations multiply the losses of raw inputs' gradients. All is
 * computed in fp64 from the inputs alone. A kernel that sums dg from differences over a chunk may
 * lose more of dg than this.
 */
#pragma once
#include "ref/chunk/gate.h"

/* Bound of the 2-norm that each row of a result loses: [rows], as dp_result_shape counts them. NULL
 * where the problem has no such result. */
typedef struct {
    double *row[DP_NRESULTS];
} dp_drop;

/* Allocates and fills *out for a claim of 2^-bits; rows of gradients only where backward. */
void dp_drop_allowance(const dp_problem *p, int bits, int backward, dp_drop *out);
void dp_drop_free(dp_drop *d);

/* log2 of the share of a state that is left.
 *   bound     upper bound: the sum over tokens of the largest channel gate and of log2 n
 *   channel   largest channel's sum of gates, which some kernels use; no bound */
typedef struct {
    double bound, channel;
} dp_attenuation;
/* The state of value head hv, from before token c to before token t; both tokens belong to one
 * sequence, c <= t. */
dp_attenuation dp_attenuation_of(const dp_problem *p, const dp_activated *in, int hv, int64_t c,
                                 int64_t t);
