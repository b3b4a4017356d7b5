/* Which stages need a wider format: the smallest set and the cheapest policy (cmd_bisect.h). */
#include "cmd_bisect.h"
#include "harness/search/precision.h"

#include <math.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

static const char *level_name(const dp_unit *u, int level) {
    return u->stage == DP_NSTAGES ? dp_formats[u->format[level]].name
                                  : dp_base_names[u->format[level]];
}

static void print_errors(const double *x, const double *need) {
    for (int i = 0; i < DP_NRESULTS; i++)
        if (!isnan(x[i]) && (!need || !isnan(need[i])))
            printf("  %s %.2e", dp_result_fields[i].name, x[i]);
}

static void print_cost(const dp_cost *c) {
    printf("%.4g Gflop, %.4g MB, %.3g us", c->flops / 1e9, c->bytes / 1e6, c->seconds * 1e6);
}

static void print_choice(const char *what, const dp_precision *r, const dp_choice *c,
                         const double *need) {
    printf("%s: %d of %d raised:", what, c->raised, r->nunit);
    for (int u = 0; u < r->nunit; u++)
        if (c->policy.level[u])
            printf(" %s=%s", r->unit[u].name, level_name(&r->unit[u], c->policy.level[u]));
    printf("\n ");
    print_errors(c->error, need);
    printf("\n  ");
    print_cost(&c->cost);
    printf(c->proven
               ? "  (no policy before it in that order will do, if raising a stage never hurts)\n"
               : "  (none of its stages can be lowered; --tries ran out before all policies before "
                 "it were excluded)\n");
}

/* Errors and costs of the whole policy at one end. */
static void print_end(const char *name, int passes, const double *error, const dp_cost *cost,
                      const double *need) {
    printf("\n%-28s %s ", name, passes ? "will do " : "will not");
    print_errors(error, need);
    printf("   ");
    print_cost(cost);
}

static void print_question(const dp_case *c, const dp_precision_request *q, const double *need) {
    printf("%s:ranks=%d, from base %s, chain %s to base %s, chain %s; needed:", c->name, q->N,
           dp_base_names[q->from], dp_formats[q->chain_from].name, dp_base_names[q->to],
           dp_formats[q->chain_to].name);
    if (!need) printf(" every row within the bounds of the second");
    for (int i = 0; need && i < DP_NRESULTS; i++)
        if (!isnan(need[i])) printf("  %s <= %.3g", dp_result_fields[i].name, need[i]);
}

static void print_units(const dp_precision *r, const double *need) {
    printf("\nwhat each costs at both ends, and the errors when it alone stays as --from:\n");
    for (int u = 0; u < r->nunit; u++) {
        const dp_unit *x = &r->unit[u];
        const dp_cost *a = &x->cost[0], *b = &x->cost[x->nlevel - 1];
        printf("  %-16s %-5s %8.4g Gflop %8.4g MB %7.3g us   %-5s %8.4g MB %7.3g us ", x->name,
               level_name(x, 0), a->flops / 1e9, a->bytes / 1e6, a->seconds * 1e6,
               level_name(x, x->nlevel - 1), b->bytes / 1e6, b->seconds * 1e6);
        print_errors(x->alone, need);
        putchar('\n');
    }
}

static void print_answer(const dp_precision_request *q, const dp_precision *r, const double *need) {
    if (r->from_passes)
        printf("nothing needs to be raised\n");
    else if (!r->to_passes)
        printf("NOT EVEN base %s with chain %s will do\n", dp_base_names[q->to],
               dp_formats[q->chain_to].name);
    else {
        print_choice("SMALLEST SET", r, &r->smallest, need);
        print_choice("CHEAPEST POLICY", r, &r->cheapest, need);
    }
    printf("%d policies tried\n", r->tries);
}

static dp_format chain_of(dp_base b) {
    return b == DP_BASE_FP64 ? DP_FP64 : b == DP_BASE_FP32 ? DP_FP32 : DP_BF16;
}

static dp_precision_request request(const dp_bisect_options *o, const dp_case *c) {
    const dp_one_run one = dp_options_one(&o->of, c, NULL);
    dp_precision_request q = {.p = &c->p,
                              .N = one.ranks,
                              .backward = c->backward,
                              .from = o->from,
                              .to = o->to,
                              .merge = one.merge,
                              .by_verdict = !o->have_need,
                              .max_tries = o->of.tries ? o->of.tries : 2000,
                              .progress = isatty(2)};
    q.chain_from = o->chain_from >= 0 ? (dp_format)o->chain_from : chain_of(q.from);
    q.chain_to = o->chain_to >= 0 ? (dp_format)o->chain_to : chain_of(q.to);
    memcpy(q.need, o->need, sizeof q.need);
    return q;
}

static dp_status check(const dp_precision_request *q, const dp_case *c, const double *need,
                       dp_err *e) {
    if (q->from < q->to)
        return dp_fail(e, DP_EINPUT,
                       "bisect precision: --from %s --to %s: from must be the coarser one",
                       dp_base_names[q->from], dp_base_names[q->to]);
    if (dp_formats[q->chain_from].u_acc < dp_formats[q->chain_to].u_acc)
        return dp_fail(
            e, DP_EINPUT,
            "bisect precision: --chain-from %s --chain-to %s: from must be the coarser one",
            dp_formats[q->chain_from].name, dp_formats[q->chain_to].name);
    for (int i = 0; need && i < DP_NRESULTS; i++) {
        int64_t rows, width;
        dp_result_shape(&c->p, i, &rows, &width);
        if (!isnan(need[i]) && (!rows || (dp_result_fields[i].backward && !c->backward)))
            return dp_fail(e, DP_EINPUT, "bisect precision: --need %s: %s has no such tensor",
                           dp_result_fields[i].name, c->name);
    }
    return DP_OK;
}

int dp_bisect_precision(const dp_bisect_options *o, const dp_case *c, dp_err *e) {
    dp_precision r;
    const dp_precision_request q = request(o, c);
    const double *need = o->have_need ? o->need : NULL;
    if (check(&q, c, need, e) || dp_precision_search(&q, &r, e)) return 2;
    print_question(c, &q, need);
    print_end("all as --from", r.from_passes, r.from_error, &r.from_cost, need);
    print_end("all as --to", r.to_passes, r.to_error, &r.to_cost, need);
    print_units(&r, need);
    print_answer(&q, &r, need);
    return !r.to_passes && !r.from_passes;
}
