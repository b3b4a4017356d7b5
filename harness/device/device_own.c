/* Tables of owners for the kernels (device_own.h). */
#ifdef DP_HAVE_CUDA
#include "device_own.h"
#include "ref/vocabulary/problem.h"

#include <stdlib.h>

dp_own_table dp_own_table_of(dp_owners o, int64_t T, int N) {
    dp_own_table t = {.of = o, .parts = dp_own_parts(o.kind, T, N)};
    t.cut = dp_calloc((size_t)t.parts + 1, sizeof *t.cut);
    t.owner = dp_calloc((size_t)t.parts + 1, sizeof *t.owner);
    for (int i = 0; i < t.parts; i++) {
        t.cut[i] = dp_own_cut(o.kind, T, t.parts, i);
        t.owner[i] = dp_own_rank(o, t.parts, i);
    }
    t.cut[t.parts] = t.parts ? T : 0;
    return t;
}

void dp_own_table_free(dp_own_table *t) {
    free(t->cut);
    free(t->owner);
    *t = (dp_own_table){0};
}

dpg_owners dp_own_for_kernels(const dp_own_table *t, dp_owners o) {
    return o.kind ? (dpg_owners){t->parts, o.kind == DP_OWN_GRID, t->cut, t->owner}
                  : (dpg_owners){0};
}

int64_t dp_own_tokens(const dp_own_table *t, int rank) {
    return dp_own_count(t->of, t->cut[t->parts], t->parts, rank);
}

void dp_own_copy(const dp_own_table *t, int rank, int64_t each, double *all, double *own,
                 int back) {
    dp_own_move(t->of, t->cut[t->parts], t->parts, rank, each, all, own, back);
}
#endif
