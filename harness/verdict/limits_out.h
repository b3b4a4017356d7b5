/* harness/verdict/limits_out.h - the limits of comparisons as numbers that others can hold an error
 * against, for truth packs (python/deltaproof/packs.py).
 *
 * Limits of a tensor: rows, their bound and radius together, [rows]; and the parts that draws see,
 * subrows of a row each. For these it has the largest |error|_2 that passes: of each part, each
 * window of parts, each head on a rank, and the whole tensor. Infinity: no limit. Limits of other
 * levels (levels.h) are along directions or over places, and are left out.
 */
#ifndef DP_LIMITS_OUT_H
#define DP_LIMITS_OUT_H
#include "compare.h"
#include "ref/files/safetensors.h"

/* From here on dp_compare keeps limits, the last ones of each tensor by name. With results it
 * keeps also what it compared, NAME.result, .truth and .truth_lo, in the order of the rows. One
 * thread. */
void dp_limits_keep(int results);
/* dp_compare's: nothing where nobody asked. bound [rows]. l NULL: no draws. */
void dp_limits_add(const dp_compare_in *in, const double *bound, const dp_levels_in *l);
/* Writes and frees them: NAME.bound, .row, .window, .window_most, .unit, .unit_most, .tensor_most,
 * all F64. */
dp_status dp_limits_write(const char *path, dp_err *e);
#endif
