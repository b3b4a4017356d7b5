/* Every recurrence, and op step: one truth, then every subject on every number of ranks. */
#include "subjects.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* A backend is one row here and one file. */
const dp_subject_kind dp_subjects[DP_NSUBJECTS] = {
    {.backend = DP_BACKEND_SIM,
     .offers = dp_simulated_offers,
     .claims = dp_simulated_claims,
     .run = dp_simulated_run},
    {.backend = DP_BACKEND_MPI,
     .offers = dp_simulated_offers,
     .claims = dp_simulated_claims,
     .run = dp_simulated_run,
     .absent = dp_subject_absent},
    {.backend = DP_BACKEND_LAPACK,
     .offers = dp_lapack_offers,
     .claims = dp_lapack_claims,
     .run = dp_lapack_run},
    {.backend = DP_BACKEND_SUBJECT, .offers = dp_library_offers, .run = dp_library_run},
    {.backend = DP_BACKEND_CUDA,
     .offers = dp_devices_offer,
     .run = dp_devices_run,
     .absent = dp_subject_absent},
    {.backend = DP_BACKEND_NCCL,
     .offers = dp_devices_offer,
     .run = dp_devices_run,
     .absent = dp_subject_absent}};

void dp_subject_absent(const dp_subject_kind *k, const dp_case *c, const dp_run_options *o,
                       dp_runs *out) {
    const char *no = dp_options_absent(o, k->backend);
    if (!no) return;
    dp_run *r = dp_runs_add(out, c);
    r->backend = k->backend;
    r->ranks = 0;
    r->design = dp_design_of(r->base);
    dp_run_skip(r, no, o);
}

int dp_bases_of(const dp_case *c, const dp_run_options *o, int bases[DP_NBASES]) {
    return dp_select(c->nbase, (const int *)c->base, o->nbase, (const int *)o->base, bases);
}

dp_ways dp_ways_of(const dp_case *c, const dp_run_options *o, int which) {
    const dp_fault_info *f = &dp_faults[o->fault];
    const dp_exchange *merge = f->exchange ? &f->exchange : o->nmerge ? o->merge : c->merge;
    const dp_payload *payload = f->payload ? &f->payload : o->npayload ? o->payload : c->payload;
    const int nm = f->exchange ? 1
                   : o->nmerge ? o->nmerge
                               : c->nmerge,
              np = f->payload    ? 1
                   : o->npayload ? o->npayload
                                 : c->npayload;
    dp_ways w = {0};
    for (int i = 0; i < nm * np; i++) {
        const dp_sending x = {.exchange = merge[i / np], .payload = payload[i % np]};
        const dp_exchange_info *info = &dp_exchanges[x.exchange];
        if ((which && !info->pairs) || (i % np && !info->states)) continue;
        w.way[w.n++] = info->states ? x : (dp_sending){.exchange = x.exchange};
    }
    return w;
}

int dp_owns_of(const dp_case *c, const dp_run_options *o, int own[DP_NOWNS]) {
    const int asked = o->nown ? o->nown : c->nown;
    int n = 0;
    for (int i = 0; i < asked; i++) {
        own[n] = (int)dp_fault_own(o->fault, o->nown ? o->own[i] : c->own[i]);
        if (!n || own[n] != own[n - 1]) n++;
    }
    return n;
}

int dp_ranks_of(const dp_case *c, const dp_run_options *o, int ranks[DP_MAX_RANK_COUNTS]) {
    return dp_select(c->nranks, c->ranks, o->nranks, o->ranks, ranks);
}

void dp_claims_add(dp_claims *list, const dp_claim *claim) {
    int i = 0;
    for (; i < list->n; i++) {
        const dp_claim *x = &list->claim[i];
        if (x->N == claim->N && x->design.base == claim->design.base &&
            !memcmp(&x->design.sending, &claim->design.sending, sizeof x->design.sending) &&
            (claim->N == 1 || x->chain == claim->chain))
            break;
    }
    list->claim[i] = *claim;
    list->n += i == list->n;
}

/* ---- one case -------------------------------------------------------------------------------- */

/* A case with the numbers of ranks that are asked for. */
typedef struct {
    const dp_case *c;
    const dp_run_options *o;
    int n, ranks[DP_MAX_RANK_COUNTS];
} selection;

/* Is there anything to judge; else no truth is made. */
static int any_offer(const selection *x) {
    for (int i = 0; i < x->n; i++)
        for (int k = 0; k < DP_NSUBJECTS; k++)
            if (dp_subjects[k].offers(&dp_subjects[k], x->c, x->o, x->ranks[i])) return 1;
    return 0;
}

static dp_status can_be_sharded(const selection *x, dp_err *e) {
    const dp_problem *p = &x->c->p;
    for (int i = 0; i < x->n; i++) {
        dp_context context;
        const dp_status st = dp_context_of(p, x->ranks[i], 0, &context, e);
        if (st) return st;
        dp_context_free(&context);
    }
    return DP_OK;
}

static void expect_all(const selection *x, dp_standard *std) {
    dp_claims *list = dp_calloc(1, sizeof *list);
    for (int i = 0; i < x->n; i++)
        for (int k = 0; k < DP_NSUBJECTS; k++)
            if (dp_subjects[k].claims &&
                dp_subjects[k].offers(&dp_subjects[k], x->c, x->o, x->ranks[i]))
                dp_subjects[k].claims(x->c, x->o, x->ranks[i], list);
    dp_standard_expect(std, 0, list->n, list->claim);
    free(list);
}

static dp_status run_on(dp_standard *std, int N, dp_runs *out, dp_err *e) {
    dp_sharding sp;
    dp_status st = dp_sharding_open(&sp, std, N, 1, e);
    for (int k = 0; k < DP_NSUBJECTS && !st; k++) {
        const dp_subject_kind *s = &dp_subjects[k];
        if (s->offers(s, std->c, std->o, N)) st = s->run(s, &sp, out, e);
    }
    dp_sharding_close(&sp);
    return st;
}

/* Does the subject alone compute here? */
static int is_alone(const selection *x) {
    int others = 0;
    for (int i = 0; i < x->n; i++)
        for (int k = 0; k < DP_NSUBJECTS; k++)
            others |= dp_subjects[k].backend != DP_BACKEND_SUBJECT &&
                      dp_subjects[k].offers(&dp_subjects[k], x->c, x->o, x->ranks[i]);
    return x->o->subject && !others;
}

static dp_status run_selection(const selection *x, dp_runs *out, dp_err *e) {
    dp_standard std = {.c = x->c, .o = x->o};
    dp_status st = DP_OK;
    if (is_alone(x) && dp_library_refuses(&std, x->n, x->ranks, out, &st, e)) return st;
    struct dp_asked *asked = std.asked;
    st = dp_standard_open(&std, x->c, x->o, 1, e);
    std.asked = asked;
    if (!st) st = can_be_sharded(x, e);
    if (!st) expect_all(x, &std);
    for (int i = 0; i < x->n && !st; i++)
        st = run_on(&std, x->ranks[i], out, e);
    dp_library_forget(&std);
    dp_standard_close(&std);
    return st;
}

void dp_skip_owned(const dp_case *c, const dp_run_options *o, dp_own kind, const char *why,
                   dp_runs *out) {
    dp_run *r = dp_runs_add(out, c);
    r->backend = DP_BACKEND_SIM;
    r->own = kind;
    r->fault = o->fault;
    r->design = dp_design_of(r->base);
    dp_run_skip(r, why, o);
}

int dp_owns_nothing(const dp_case *c, const dp_run_options *o, dp_own kind, int64_t T, int ranks,
                    dp_runs *out) {
    char why[120];
    if (dp_own_parts(kind, T, ranks)) return 0;
    snprintf(why, sizeof why, "T = %lld: a part of %d ranks would have no token", (long long)T,
             ranks);
    dp_skip_owned(c, o, kind, why, out);
    return 1;
}

/* Each number of ranks is a case of its own, whose ranks are the parts that those own: the truth
 * keeps the states between them. */
static dp_status run_owned(const selection *x, dp_own kind, dp_runs *out, dp_err *e) {
    dp_backend owns[DP_NBACKENDS];
    dp_run_options o = *x->o;
    dp_status st = DP_OK;
    o.nbackend = 0;
    for (int b = 0; b < DP_NBACKENDS; b++)
        if (dp_backends[b].owns && dp_options_want(x->o, b)) owns[o.nbackend++] = (dp_backend)b;
    const char *why = dp_faults[o.fault].even ? DP_FAULT_IS_EVEN
                      : dp_case_session(x->c) || dp_op_of(x->c)->has_front
                          ? "ranks of a session, and of a whole step, own T / N tokens each"
                          : NULL;
    if (!o.nbackend) return DP_OK;
    if (why) {
        dp_skip_owned(x->c, &o, kind, why, out);
        return DP_OK;
    }
    o.backend = owns;
    o.nranks = 0;
    for (int i = 0; i < x->n && !st; i++) {
        if (dp_owns_nothing(x->c, &o, kind, x->c->p.T, x->ranks[i], out)) continue;
        const int parts = dp_own_parts(kind, x->c->p.T, x->ranks[i]);
        dp_case c = *x->c;
        c.p.own = (dp_owners){kind, x->ranks[i]};
        c.nranks = 1;
        c.ranks[0] = parts;
        c.all_chains[0] = 1;
        const selection one = {.c = &c, .o = &o, .n = 1, .ranks = {parts}};
        if (any_offer(&one)) st = run_selection(&one, out, e);
    }
    return st;
}

dp_status dp_run_recurrence(const dp_case *c, const dp_run_options *o, dp_runs *out, dp_err *e) {
    int own[DP_NOWNS];
    const int nown = dp_owns_of(c, o, own);
    selection x = {.c = c, .o = o};
    x.n = dp_ranks_of(c, o, x.ranks);
    dp_status st = DP_OK;
    for (int i = 0; i < nown && !st; i++)
        if (own[i])
            st = run_owned(&x, (dp_own)own[i], out, e);
        else if (any_offer(&x))
            st = run_selection(&x, out, e);
    for (int k = 0; k < DP_NSUBJECTS && !st; k++)
        if (dp_subjects[k].absent) dp_subjects[k].absent(&dp_subjects[k], c, o, out);
    return st;
}
