/* A matrix as the singular values above a tolerance (low_rank.h). */
#include "low_rank.h"
#include "ref/vocabulary/problem.h"

#include <math.h>

/* One-sided Jacobi: columns of A [K][K] are rotated until they are orthogonal, and Q' gets the same
 * rotations of I. So M = A Q with orthogonal rows in Q. */
static void orthogonalise(double *A, double *Q, int K) {
    int turned = 1;
    for (int sweep = 0; sweep < 60 && turned; sweep++) {
        turned = 0;
        for (int a = 0; a < K; a++)
            for (int b = a + 1; b < K; b++) {
                double aa = 0, bb = 0, ab = 0;
                for (int i = 0; i < K; i++) {
                    aa += A[i * K + a] * A[i * K + a];
                    bb += A[i * K + b] * A[i * K + b];
                    ab += A[i * K + a] * A[i * K + b];
                }
                if (fabs(ab) <= 0x1p-50 * sqrt(aa * bb) || ab == 0) continue;
                turned = 1;
                const double z = (bb - aa) / (2 * ab),
                             t = (z >= 0 ? 1 : -1) / (fabs(z) + sqrt(1 + z * z)),
                             c = 1 / sqrt(1 + t * t), s = c * t;
                for (int i = 0; i < K; i++) {
                    const double x = A[i * K + a], y = A[i * K + b], u = Q[a * K + i],
                                 v = Q[b * K + i];
                    A[i * K + a] = c * x - s * y;
                    A[i * K + b] = s * x + c * y;
                    Q[a * K + i] = c * u - s * v;
                    Q[b * K + i] = s * u + c * v;
                }
            }
    }
}

int dp_low_rank(const double *M, int K, double tolerance, double **U, double **W) {
    DP_OWN double *A = dp_copy(M, (int64_t)K * K), *Q = dp_identity(K);
    int keep[K], r = 0;
    orthogonalise(A, Q, K);
    for (int a = 0; a < K; a++) {
        double s = 0;
        for (int i = 0; i < K; i++)
            s += A[i * K + a] * A[i * K + a];
        if (sqrt(s) > tolerance) keep[r++] = a;
    }
    *U = dp_doubles((int64_t)K * r);
    *W = dp_doubles((int64_t)r * K);
    for (int z = 0; z < r; z++)
        for (int i = 0; i < K; i++) {
            (*U)[i * r + z] = A[i * K + keep[z]];
            (*W)[z * K + i] = Q[keep[z] * K + i];
        }
    return r;
}
