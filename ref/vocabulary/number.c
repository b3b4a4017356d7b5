/* ref/vocabulary/number.c - parses numbers that users write (number.h). */
#include "number.h"

#include <ctype.h>
#include <errno.h>
#include <math.h>
#include <stdlib.h>

dp_number dp_number_int(const char *text, int64_t least, int64_t most, int64_t *x) {
    char *end;
    if (isspace((unsigned char)*text)) return DP_NUMBER_NONE;
    errno = 0;
    const long long n = strtoll(text, &end, 10);
    if (end == text || *end) return DP_NUMBER_NONE;
    *x = n;
    return errno || n < least || n > most ? DP_NUMBER_RANGE : DP_NUMBER_OK;
}

dp_number dp_number_real_prefix(const char *text, double *x, const char **end) {
    char *after;
    if (isspace((unsigned char)*text)) return DP_NUMBER_NONE;
    errno = 0;
    *x = strtod(text, &after);
    *end = after;
    if (after == text) return DP_NUMBER_NONE;
    /* ERANGE is also said of subnormal numbers, which are fine. */
    return errno == ERANGE && (*x == 0 || isinf(*x)) ? DP_NUMBER_RANGE : DP_NUMBER_OK;
}

dp_number dp_number_real(const char *text, double least, double most, double *x) {
    const char *end;
    const dp_number n = dp_number_real_prefix(text, x, &end);
    if (n == DP_NUMBER_NONE || *end || isnan(*x)) return DP_NUMBER_NONE;
    if (n == DP_NUMBER_OK && isinf(*x)) return DP_NUMBER_NONE; /* written as inf */
    return n == DP_NUMBER_OK && *x >= least && *x <= most ? DP_NUMBER_OK : DP_NUMBER_RANGE;
}
