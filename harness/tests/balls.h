/* harness/tests/balls.h - two truths of the same numbers agree within their radii. */
#pragma once
#include "gt.h"
#include "ref/truth/truth.h"
#include <math.h>

/* Row by row; what: their name. The radius of the one that is `held` is small beside its row. */
static inline void balls_meet(const char *what, const dp_ball *x, const dp_ball *y,
                              const dp_ball *held) {
    for (int64_t r = 0; r < x->rows; r++) {
        double off = 0, size = 0;
        for (int64_t i = r * x->width; i < (r + 1) * x->width; i++) {
            const double d = (x->hi[i] - y->hi[i]) + (x->lo[i] - y->lo[i]);
            off += d * d;
            size += x->hi[i] * x->hi[i];
        }
        CHECK(sqrt(off) <= x->rad[r] + y->rad[r], "%s, row %lld: %.3g apart, radii %.3g", what,
              (long long)r, sqrt(off), x->rad[r] + y->rad[r]);
        CHECK(held->rad[r] <= 0x1p-80 * (1 + sqrt(size)), "%s, row %lld: radius %.3g", what,
              (long long)r, held->rad[r]);
    }
}
