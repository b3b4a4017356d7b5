/* Which stage of the simulated ranks is wrong: each on true inputs, by its own bound
 * (cmd_bisect.h). */
#include "cmd_bisect.h"
#include "harness/run/step.h"
#include "harness/search/bisect.h"
#include "harness/search/step_bisect.h"

#include <stdio.h>
#include <stdlib.h>

static void print_list(const char *what, const unsigned char *set, int n, int count) {
    int printed = 0;
    printf("; %s", what);
    for (int i = 0; i < n && printed < 12; i++)
        if (set[i]) {
            printf(" %d", i);
            printed++;
        }
    if (count > printed) printf(" ... (%d)", count);
}

static void print_stage(const dp_bisect *b, const char *name, const dp_bisect_row *x) {
    if (!x->tensor[0]) {
        printf("  %-16s -     nothing to judge\n", name);
        return;
    }
    printf("  %-16s %-5s %-11s ", name, x->fails ? "WRONG" : "ok", x->tensor);
    if (x->expected)
        printf("within its bound, but %.3g times what these formats make of nearby inputs (at "
               "most %.3g times is theirs)",
               x->ratio, x->limit);
    else
        printf("%.2g of its bound, %lld rows", x->ratio, (long long)x->judged);
    if (x->skipped) printf(", %lld skipped (not finite)", (long long)x->skipped);
    if (x->fails > x->unsteady && !x->expected) printf(", %d over", x->fails - x->unsteady);
    if (x->unsteady) printf(", %d not as in the first run", x->unsteady);
    if (x->nrank) print_list("ranks", x->rank, b->N, x->nrank);
    if (x->nhead) print_list("heads", x->head, b->HV, x->nhead);
    putchar('\n');
}

static void print_place(const dp_bisect_row *x) {
    const dp_place *a = &x->at;
    printf(x->expected ? "  where most: %s" : "  first wrong row: %s", x->tensor);
    if (a->rank >= 0) printf(", rank %d", a->rank);
    if (a->sequence >= 0) printf(", sequence %d", a->sequence);
    if (a->head >= 0) printf(", head %d", a->head);
    if (a->chunk >= 0) printf(", chunk %d", a->chunk);
    if (a->token >= 0) printf(", token %lld", (long long)a->token);
    if (x->row >= 0) printf(", row %d", x->row);
    printf(", entry %d", x->index);
    if (x->run) printf(", in run %d of the same inputs", x->run + 1);
    putchar('\n');
    printf("  got   %-24a %.9g\n  truth %-24a %.9g\n  error of the row %.3g", x->got, x->got,
           x->want, x->want, x->err);
    if (!x->expected) printf(", its bound %.3g", x->limit);
    putchar('\n');
}

static void print_id(const dp_case *c, const dp_one_run *r, dp_own own, dp_fault fault) {
    char *id = dp_run_id(&(dp_run){.case_name = c->name,
                                   .backend = DP_BACKEND_SIM,
                                   .ranks = r->ranks,
                                   .own = own,
                                   .has_base = 1,
                                   .base = r->base,
                                   .has_chain = 1,
                                   .chain = r->chain,
                                   .has_merge = 1,
                                   .merge = r->merge,
                                   .payload = r->payload,
                                   .fault = fault});
    printf("%s: every stage on true inputs\n", id);
    free(id);
}

/* In the order of the pipeline, up to the first wrong one, all with --verbose. Op step: between the
 * convolutions. */
static void print_stages(const dp_bisect_options *o, const dp_case *c, const dp_bisect *b,
                         const dp_bisect_row *wrong) {
    const int step = dp_op_of(c)->has_front;
    int go = 1;
    if (step) {
        print_stage(b, dp_bisect_conv_names[0], &b->conv[0]);
        go = o->verbose || wrong != &b->conv[0];
    }
    for (int i = 0; go && i < (c->backward ? DP_NSTAGES : DP_STAGE_RECOMPUTE); i++)
        if (o->verbose || b->first < 0 || i <= b->first)
            print_stage(b, dp_stage_names[i], &b->stage[i]);
    if (step && c->backward && (o->verbose || !wrong || wrong == &b->conv[1]))
        print_stage(b, dp_bisect_conv_names[1], &b->conv[1]);
}

/* Ranks that cannot own the tokens so, or a fault that is of none that do. */
static int refuses(const dp_case *c, dp_own own, const dp_one_run *r, int parts, dp_fault fault,
                   dp_err *e) {
    if (own && dp_faults[fault].even)
        return dp_fail(
            e, DP_EINPUT,
            "bisect stage: --own %s: the fault %s is of ranks that own T / N tokens each",
            dp_own_names[own], dp_faults[fault].name);
    if (!parts)
        return dp_fail(e, DP_EINPUT, "%s: T = %lld tokens are too few for --own %s, --ranks %d",
                       c->path, (long long)dp_case_tokens(c), dp_own_names[own], r->ranks);
    return 0;
}

int dp_bisect_ranks(const dp_bisect_options *o, const dp_case *c, dp_err *e) {
    dp_bisect b;
    const char *name;
    const dp_one_run r = dp_options_one(&o->of, c, NULL);
    const dp_fault fault = o->of.fault;
    const dp_own own = dp_fault_own(fault, o->of.nown ? o->of.own[0] : DP_OWN_EVEN);
    dp_sim_policy how = {r.ranks, r.base, r.chain, r.merge, fault, c->backward, r.payload};
    dp_case owned = *c;
    owned.p = dp_bisect_owned(&c->p, own, r.ranks, &how.N);
    if (refuses(c, own, &r, how.N, fault, e)) return 2;
    if (dp_step_bisect(&owned, &how, o->runs, o->verbose, &b, e)) return 2;
    print_id(c, &r, own, fault);
    if (!dp_bisect_first(&b, &name) && dp_bisect_expected(&owned.p, &how, c->input_dtype, &b, e)) {
        dp_bisect_free(&b);
        return 2;
    }
    const dp_bisect_row *wrong = dp_bisect_first(&b, &name);
    print_stages(o, c, &b, wrong);
    if (wrong) {
        printf("WRONG STAGE: %s\n", name);
        print_place(wrong);
    } else
        printf("every stage keeps to its own bound%s\n",
               r.base == DP_BASE_FP64 ? "" : ", and to what its formats make of nearby inputs");
    dp_bisect_free(&b);
    return wrong != NULL;
}
