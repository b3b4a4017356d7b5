/* The condition of a chunk's triangular system (condition.h). */
#include "condition.h"

#include <math.h>
#include <stdlib.h>

dp_condition dp_chunk_condition(const dp_chunk *ch) {
    const int n = ch->n;
    DP_OWN double *T = dp_calloc((size_t)n * n, sizeof *T);
    dp_condition s = {1, 1, 1, -1, -1, -1};
    double A1 = 1;
    for (int i = 0; i < n; i++)
        T[(int64_t)i * n + i] = 1; /* T by rows: T_i = e_i - sum over k < i of A_ik T_k */
    for (int i = 0; i < n; i++)
        for (int k = 0; dp_chunk_reads(ch, i, k); k++) {
            const double a = ch->beta[i] * ch->L[(int64_t)i * n + k];
            for (int j = 0; a != 0 && j <= k; j++)
                T[(int64_t)i * n + j] -= a * T[(int64_t)k * n + j];
        }
    for (int j = 0; j < n; j++) {
        double a = 1, t = 0;
        for (int i = 0; i < n; i++) {
            if (dp_chunk_reads(ch, i, j)) a += fabs(ch->beta[i] * ch->L[(int64_t)i * n + j]);
            t += fabs(T[(int64_t)i * n + j]);
            s.entry = fmax(s.entry, fabs(T[(int64_t)i * n + j]));
        }
        A1 = fmax(A1, a);
        s.inverse = fmax(s.inverse, t);
    }
    s.condition = A1 * s.inverse;
    return s;
}
