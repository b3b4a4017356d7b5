/* Which rank owns which tokens (own.h). */
#include "own.h"

#include <string.h>

#define CYCLE 64 /* tokens a part of cyclic */
#define GRID 128 /* of grid */

const char *const dp_own_names[DP_NOWNS] = {"even",   "balanced", "uneven", "empty",
                                            "zigzag", "cyclic",   "grid"};

static int64_t parts_of(dp_own kind, int64_t T, int ranks) {
    switch (kind) {
    case DP_OWN_EMPTY: return (ranks + 1) / 2;
    case DP_OWN_ZIGZAG: return 2 * (int64_t)ranks;
    case DP_OWN_CYCLIC: return (T + CYCLE - 1) / CYCLE;
    case DP_OWN_GRID: return (T + GRID - 1) / GRID;
    default: return ranks;
    }
}

int64_t dp_own_cut(dp_own kind, int64_t T, int parts, int i) {
    const int64_t n = parts;
    if (kind == DP_OWN_UNEVEN) return (int64_t)((__int128)T * i * (i + 1) / (n * (n + 1)));
    if (kind == DP_OWN_CYCLIC) return i < parts ? (int64_t)CYCLE * i : T;
    if (kind == DP_OWN_GRID) return i < parts ? (int64_t)GRID * i : T;
    if (kind == DP_OWN_EVEN) return T / n * i;
    return (int64_t)((__int128)T * i / n);
}

int dp_own_parts(dp_own kind, int64_t T, int ranks) {
    const int64_t n = parts_of(kind, T, ranks);
    if (ranks < 1 || n > T || (kind == DP_OWN_EVEN && T % n)) return 0;
    for (int i = 0; i < n; i++)
        if (dp_own_cut(kind, T, (int)n, i) >= dp_own_cut(kind, T, (int)n, i + 1)) return 0;
    return (int)n;
}

int dp_own_part_of(dp_own kind, int64_t T, int parts, int64_t t) {
    int lo = 0, hi = parts - 1;
    while (lo < hi) {
        const int mid = lo + (hi - lo) / 2;
        if (dp_own_cut(kind, T, parts, mid + 1) > t)
            hi = mid;
        else
            lo = mid + 1;
    }
    return lo;
}

int dp_own_rank(dp_owners o, int parts, int i) {
    switch (o.kind) {
    case DP_OWN_EMPTY: return 2 * i;
    case DP_OWN_ZIGZAG: return i < parts / 2 ? i : parts - 1 - i;
    case DP_OWN_CYCLIC: return i % o.ranks;
    case DP_OWN_GRID: return (int)((int64_t)i * o.ranks / parts);
    default: return i;
    }
}

int dp_own_sum(dp_owners o, int parts, int i) {
    return o.kind == DP_OWN_GRID ? i : dp_own_rank(o, parts, i);
}

int64_t dp_own_count(dp_owners o, int64_t T, int parts, int rank) {
    int64_t n = 0;
    for (int i = 0; i < parts; i++)
        if (dp_own_rank(o, parts, i) == rank)
            n += dp_own_cut(o.kind, T, parts, i + 1) - dp_own_cut(o.kind, T, parts, i);
    return n;
}

void dp_own_move(dp_owners o, int64_t T, int parts, int rank, int64_t each, double *all,
                 double *own, int back) {
    for (int i = 0; i < parts; i++) {
        const int64_t first = dp_own_cut(o.kind, T, parts, i);
        const int64_t n = (dp_own_cut(o.kind, T, parts, i + 1) - first) * each;
        double *at = all + first * each;
        if (dp_own_rank(o, parts, i) != rank) continue;
        memcpy(back ? at : own, back ? own : at, sizeof *all * (size_t)n);
        own += n;
    }
}

/* ---- messages -------------------------------------------------------------------------------- */

void dp_peers_gather(const dp_peers *p, dp_owners o, int parts, double *all, int64_t n,
                     const char *what) {
    for (int k = 1; k < p->N; k++) /* not all to the same one at once */
        for (int i = 0; i < parts; i++)
            if (dp_own_rank(o, parts, i) == p->rank)
                p->send(p->who, (p->rank + k) % p->N, all + i * n, n);
    for (int i = 0; i < parts; i++) {
        const int owner = dp_own_rank(o, parts, i);
        if (owner != p->rank) p->receive(p->who, owner, all + i * n, n, what);
    }
}
