/* Triangular systems in a stated order (ref/arithmetic/triangle.h): column panels two vectors wide,
 * blocks of rows in registers. */
#include "triangle.h"
#include "isa.h"

#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#define DP_ISA_BODY "ref/arithmetic/isa_real.inc"
#define DP_ISA_REAL "ref/arithmetic/triangle_real.inc"
#include "isa_each.inc"

void dp_solve_f64(int n, int cols, int trans, const double *L, double *X) {
    DP_ISA_OF(solve_f64)(n, cols, trans, L, X);
}

void dp_solve_f32(int n, int cols, int trans, const float *L, float *X) {
    DP_ISA_OF(solve_f32)(n, cols, trans, L, X);
}

/* With a NaN or an infinity in L, 0 times it reaches above the diagonal as well: that is not part
 * of the inverse. */
#define INVERT(name, solve, real)                      \
    void name(int n, const real *L, real *T) {         \
        memset(T, 0, sizeof *T *(size_t)n *(size_t)n); \
        for (int i = 0; i < n; i++)                    \
            T[(int64_t)i * n + i] = 1;                 \
        solve(n, n, 0, L, T);                          \
        for (int i = 0; i < n; i++)                    \
            for (int j = i + 1; j < n; j++)            \
                T[(int64_t)i * n + j] = 0;             \
    }
INVERT(dp_invert_f64, dp_solve_f64, double)
INVERT(dp_invert_f32, dp_solve_f32, float)
