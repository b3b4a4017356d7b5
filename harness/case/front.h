/* `harness/case/front.h` - the convolutions before q, k and v of a case (op step).
 *
 * q, k, v of the recurrence are those of the convolution in MPFR, rounded to double. The rounding
 * is dp_problem.input_error, which the radius of every result carries.
 */
#ifndef DP_FRONT_H
#define DP_FRONT_H
#include "case.h"

/* Puts the convolutions of c->step before c->p: its q, k, v are x on entry and the true outputs on
 * return. DP_EINPUT: an output without value. */
dp_status dp_step_build(dp_case *c, dp_err *e);
void dp_step_free(dp_case *c);

/* |x|_2, rounded up. */
double dp_row_norm(const double *x, int64_t n);
/* That of each row of `width`, to be freed: from bounds of entries those of rows. */
double *dp_row_norms(const double *x, int64_t rows, int width);
#endif
