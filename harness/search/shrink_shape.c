/* Shrinking the shape: axes, ranks, optional parts (shrink_work.h). */
#include "shrink_work.h"

#include <stdlib.h>

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

static int without(dp_shrink_work *w, const char *what, void (*change)(dp_case *)) {
    dp_case cand = dp_shrink_copy(w->c);
    change(&cand);
    if (!dp_shrink_offer(w, &cand)) return 0;
    dp_shrink_report(w, "%s", what);
    return 1;
}

static void release(double **x) { free(*x), *x = NULL; }
static void no_backward(dp_case *c) {
    c->backward = 0;
    release(&c->p.dout);
    release(&c->p.dstate);
    release(&c->conv.dy);
}
static void no_dstate(dp_case *c) { release(&c->p.dstate); }
static void no_s0(dp_case *c) { release(&c->p.s0); }
static void no_bias(dp_case *c) { release(&c->conv.bias); }
static void no_params(dp_case *c) { release(&c->p.A_log), release(&c->p.dt_bias); }
static void no_norm(dp_case *c) { c->p.l2norm = 0; }
static void unit_scale(dp_case *c) { c->p.scale = 1; }

static int optional_parts(dp_shrink_work *w) {
    const dp_case *c = w->c;
    int n = 0;
    if (!dp_op_of(c)->inputs) return 0;
    if (c->backward && !dp_shrink_spent(w)) n += without(w, "forward alone", no_backward);
    if (c->p.dstate && !dp_shrink_spent(w))
        n += without(w, "no gradient of the final state", no_dstate);
    if (c->p.s0 && !dp_shrink_spent(w)) n += without(w, "no initial state", no_s0);
    if (c->conv.bias && !dp_shrink_spent(w)) n += without(w, "no bias", no_bias);
    if ((c->p.A_log || c->p.dt_bias) && !dp_shrink_spent(w))
        n += without(w, "no A_log, dt_bias", no_params);
    if (c->p.l2norm && !dp_shrink_spent(w)) n += without(w, "no L2 norm", no_norm);
    if (dp_op_of(c)->has_problem && c->p.scale != 1 && !dp_shrink_spent(w))
        n += without(w, "scale = 1", unit_scale);
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
