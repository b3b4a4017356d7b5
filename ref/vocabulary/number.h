/* ref/vocabulary/number.h - numbers that users write: the whole text is one, within a stated range.
 *
 * Decimal, or hex floats (0x1.8p-3) for reals. Blanks, "nan", "inf", and values that a double does
 * not hold are refused, never cut or rounded to another value. Such values are 1e400, or 1e-400,
 * which would become 0.
 */
#ifndef DP_NUMBER_H
#define DP_NUMBER_H
#include <stdint.h>

typedef enum { DP_NUMBER_OK, DP_NUMBER_NONE, DP_NUMBER_RANGE } dp_number;

/* DP_NUMBER_NONE: no number; DP_NUMBER_RANGE: one outside of [least, most]. *x is set but for
 * DP_NUMBER_NONE. */
dp_number dp_number_int(const char *text, int64_t least, int64_t most, int64_t *x);
dp_number dp_number_real(const char *text, double least, double most, double *x);

/* The same for the number that text begins with; *end: behind it. */
dp_number dp_number_real_prefix(const char *text, double *x, const char **end);
#endif
