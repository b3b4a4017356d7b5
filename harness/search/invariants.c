/* The list of invariants, and all of them on one problem (invariants.h). */
#include "invariants_work.h"

#include <stdio.h>
#include <string.h>

const char *const dp_check_names[DP_NCHECKS] = {
    "repeat",  "causality", "causality-chunk", "anticausality", "heads",
    "packed",  "prefix",    "scale-v",         "scale-do",      "sign-q",
    "sign-kv", "ranks",     "transpose",       "ranks-bound"};
static const char *const PROMISE[DP_NCHECKS] = {"bitwise",
                                                "bitwise",
                                                "bitwise",
                                                "bitwise",
                                                "bitwise",
                                                "bitwise",
                                                "bitwise",
                                                "bitwise but for underflow",
                                                "bitwise but for underflow",
                                                "bitwise",
                                                "bitwise",
                                                "bitwise: nothing rounds",
                                                "bitwise: nothing rounds",
                                                "sum of both bounds"};

static dp_status one_check(dp_check_work *w, int i) {
    static const int v_s0[] = {DP_INPUT_V, DP_INPUT_S0}, do_ds[] = {DP_INPUT_DO, DP_INPUT_DSTATE},
                     q[] = {DP_INPUT_Q}, kv[] = {DP_INPUT_K, DP_INPUT_V};
    /* o final dq dk dv dg dbeta dA_log ddt_bias ds0; 0: not compared */
    static const double by_v[] = {8, 8, 8, 8, 1, 8, 8, 8, 8, 1},
                        by_do[] = {1, 1, 8, 8, 8, 8, 8, 8, 8, 8},
                        by_q[] = {-1, 1, 1, -1, -1, -1, -1, -1, -1, -1},
                        by_q_dstate[] = {-1, 1, 1, 0, 0, 0, 0, 0, 0, 0},
                        by_kv[] = {1, 1, 1, -1, -1, 1, 1, 1, 1, 1};
    const int grads = w->backward && (dp_backends[w->s->backend].simulated || w->base->r.dq);
    switch (i) {
    case 0: return dp_check_repeat(w);
    case 1: return dp_check_edits(w, DP_INPUT_Q, DP_INPUT_BETA, dp_check_keep_before);
    case 2: return dp_check_chunk(w);
    case 3:
        return grads ? dp_check_edits(w, DP_INPUT_DO, DP_INPUT_DO, dp_check_keep_behind)
                     : (dp_check_skip(w, "no gradients"), DP_OK);
    case 4: return dp_check_heads(w);
    case 5: return dp_check_packed(w);
    case 6: return dp_check_prefix(w);
    case 7: return dp_check_factor(w, v_s0, 2, 8, by_v, dp_check_underflow(w, 8));
    case 8:
        return grads ? dp_check_factor(w, do_ds, 2, 8, by_do, dp_check_underflow(w, 8))
                     : (dp_check_skip(w, "no gradients"), DP_OK);
    case 9: return dp_check_factor(w, q, 1, -1, w->p->dstate ? by_q_dstate : by_q, 0);
    case 10: return dp_check_factor(w, kv, 2, -1, by_kv, 0);
    case 11: return dp_check_ranks(w, 0);
    case 12: return dp_check_ranks(w, 1);
    default: return dp_check_ranks_bound(w);
    }
}

/* Is the name one of a list with commas? */
static int listed(const char *list, const char *name) {
    const size_t n = strlen(name);
    for (const char *at = strstr(list, name); at; at = strstr(at + 1, name))
        if ((at == list || at[-1] == ',') && (at[n] == 0 || at[n] == ',')) return 1;
    return 0;
}

/* A library's refusal skips a check, its death fails it; what else goes wrong ends the checks. */
static dp_status settle(dp_status st, const dp_check_subject *s, dp_check *c, dp_err *e) {
    if (!s->library || (st != DP_EINPUT && st != DP_EDEVICE)) return st;
    c->verdict = st == DP_EINPUT ? DP_SKIPPED : DP_FAIL;
    snprintf(c->why, sizeof c->why, "%.300s", e->msg);
    *e = (dp_err){0};
    return DP_OK;
}

dp_status dp_checks_run(const dp_problem *p, const dp_check_subject *s, int N, int backward,
                        const char *only, dp_checks *out, dp_err *e) {
    dp_check_outcome base;
    dp_check_bounds bounds = {0};
    *out = (dp_checks){0};
    dp_status st = dp_check_run_problem(s, p, N, backward, &base, e);
    if (st == DP_EDEVICE && s->library) { /* died on the problem itself: no check is needed */
        out->c[out->n++] = (dp_check){.name = dp_check_names[0], .promise = PROMISE[0]};
        return settle(st, s, &out->c[0], e);
    }
    for (int i = 0; i < DP_NCHECKS && !st; i++) {
        const double t0 = dp_now();
        if (only && !listed(only, dp_check_names[i])) continue;
        dp_check *c = &out->c[out->n++];
        *c = (dp_check){.name = dp_check_names[i], .promise = PROMISE[i], .verdict = DP_PASS};
        dp_check_work w = {.p = p,
                           .whole = p,
                           .s = s,
                           .N = N,
                           .backward = backward && p->dout,
                           .c = c,
                           .base = &base,
                           .bounds = &bounds,
                           .e = e};
        if (!strcmp(c->name, "prefix") && !dp_backends[s->backend].simulated) w.backward = 0;
        st = settle(one_check(&w, i), s, c, e);
        if (!st && c->verdict == DP_PASS && !c->compared)
            dp_check_skip(&w, "nothing of this problem could be compared");
        c->seconds = dp_now() - t0;
        if (s->progress)
            fprintf(stderr, "  %s: %s, %.2f s\n", c->name,
                    st ? "cannot be run" : dp_verdict_names[c->verdict], c->seconds);
    }
    dp_check_bounds_free(&bounds);
    dp_check_outcome_free(&base);
    return st;
}
