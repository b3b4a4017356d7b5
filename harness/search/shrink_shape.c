/* Shrinking the shape: axes, ranks, optional parts (shrink_work.h). */
#include "shrink_work.h"

static const char *const AXIS_NAMES[] = {[DP_SHRINK_TOK] = "chunks",
                                         [DP_SHRINK_SEQ] = "sequences",
                                         [DP_SHRINK_HEAD] = "key heads",
                                         [DP_SHRINK_GROUP] = "value heads a key head",
                                         [DP_SHRINK_KEY] = "keys a token",
                                         [DP_SHRINK_CHAN] = "K",
                                         [DP_SHRINK_COL] = "V",
                                         [DP_SHRINK_DIM] = "D",
                                         [DP_SHRINK_TAP] = "W",
                                         [DP_SHRINK_RANK] = "ranks",
                                         [DP_SHRINK_LOCAL] = "tokens a rank"};

static int dp_shrink_axis(dp_shrink_work *w, int ax) {
    const int64_t before = dp_shrink_length(w->c, ax),
                  least = dp_op_of(w->c)->has_factors && ax == DP_SHRINK_TOK ? 2 : 1;
    const int blind = dp_op_of(w->c)->has_factors; /* indices of what is drawn are all alike */
    for (int64_t size = before / 2; size >= 1 && !dp_shrink_spent(w); size /= 2)
        for (int64_t at = 0; at < dp_shrink_length(w->c, ax) && !dp_shrink_spent(w);) {
            const int64_t n = dp_shrink_length(w->c, ax), len = size < n - at ? size : n - at;
            if (n - len < least) break;
            dp_case cand = dp_shrink_copy(w->c);
            dp_shrink_drop(&cand, ax, at, len);
            if (!dp_shrink_offer(w, &cand)) {
                if (blind) break;
                at += len;
            }
        }
    const int64_t now = dp_shrink_length(w->c, ax);
    if (now < before)
        dp_shrink_report(w, "%s %lld -> %lld", AXIS_NAMES[ax], (long long)before, (long long)now);
    return now < before;
}

/* The same tokens over fewer ranks. */
static int fewer_ranks(dp_shrink_work *w) {
    const int before = w->c->ranks[0];
    for (int n = 1;
         n < before && dp_op_of(w->c)->has_ranks && w->c->ranks[0] == before && !dp_shrink_spent(w);
         n++) {
        if (dp_shrink_length(w->c, DP_SHRINK_TOK) % n) continue;
        dp_case cand = dp_shrink_copy(w->c);
        cand.ranks[0] = n;
        dp_shrink_offer(w, &cand);
    }
    if (w->c->ranks[0] < before)
        dp_shrink_report(w, "the same tokens on %d ranks instead of %d", w->c->ranks[0], before);
    return w->c->ranks[0] < before;
}

static int optional_parts(dp_shrink_work *w) {
    int n = 0;
    if (!dp_op_of(w->c)->inputs) return 0;
    for (int i = 0; i < DP_SHRINK_NPARTS && !dp_shrink_spent(w); i++) {
        const dp_shrink_part *part = &dp_shrink_parts[i];
        if (!part->leave_out || !part->has(w->c)) continue;
        dp_case cand = dp_shrink_copy(w->c);
        part->leave_out(&cand);
        if (!dp_shrink_offer(w, &cand)) continue;
        dp_shrink_report(w, "%s", part->what);
        n++;
    }
    return n;
}

int dp_shrink_shape(dp_shrink_work *w) {
    static const int order[] = {DP_SHRINK_HEAD, DP_SHRINK_GROUP, DP_SHRINK_COL, DP_SHRINK_CHAN,
                                DP_SHRINK_RANK, DP_SHRINK_LOCAL, DP_SHRINK_SEQ, DP_SHRINK_KEY,
                                DP_SHRINK_DIM,  DP_SHRINK_TAP};
    int changed = optional_parts(w);
    if (!dp_op_of(w->c)->has_ranks) {
        changed |= dp_shrink_axis(w, DP_SHRINK_TOK);
        return changed;
    }
    for (size_t i = 0; i < sizeof order / sizeof *order; i++)
        changed |= dp_shrink_axis(w, order[i]);
    return changed | fewer_ranks(w);
}
