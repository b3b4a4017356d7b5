/* Bounds of all results of a design, and their cache. */
#include "run_bounds.h"
#include "limits.h"
#include "token_bounds.h"

#include <assert.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

void dp_bound_bases_free(dp_bound_bases *w) {
    if (w->ready) {
        dp_error_bound_base_free(&w->sound);
        dp_error_bound_base_free(&w->probable);
    }
}

/* ---- their cache ----------------------------------------------------------------------------- */

/* n bytes of `what`, then the input errors: all that bounds depend on besides the problem. */
static void *with_raw_error(const void *what, size_t n, const dp_problem *p, const dp_raw_error *g,
                            size_t *size) {
    const double *part[] = {g ? g->q : NULL, g ? g->k : NULL, g ? g->v : NULL};
    const size_t len[] = {sizeof(double) * (size_t)(p->T * p->H * p->K),
                          sizeof(double) * (size_t)(p->T * p->H * p->R * p->K),
                          sizeof(double) * (size_t)(p->T * p->HV * p->R * p->V)};
    char *all = dp_calloc(n + len[0] + len[1] + len[2] + 3, 1);
    memcpy(all, what, n);
    *size = n;
    for (int i = 0; g && i < 3; i++) {
        all[(*size)++] = part[i] != NULL;
        if (part[i]) {
            memcpy(all + *size, part[i], len[i]);
            *size += len[i];
        }
    }
    return all;
}

static dp_key key_of(const dp_sharding *sp, const dp_design *design, dp_format chain,
                     const dp_raw_error *raw) {
    const dp_design bounded = dp_bound_design(design);
    struct {
        int32_t N, base, chain, backward;
        char design[DP_DESIGN_TEXT];
    } what = {sp->N, (int32_t)design->base, (int32_t)chain, sp->c->backward, ""};
    dp_design_text(&bounded, what.design);
    size_t size;
    char *all = with_raw_error(&what, sizeof what, &sp->c->p, raw, &size);
    if (sp->first_of_call) { /* cuts chunks */
        const size_t T = (size_t)sp->c->p.T;
        all = dp_realloc(all, size + T);
        memcpy(all + size, sp->first_of_call, T);
        size += T;
    }
    const dp_key key = dp_problem_key(&sp->c->p, all, size);
    free(all);
    return key;
}

/* 1: *out holds what the cache has. */
static int load(const dp_sharding *sp, dp_key key, int entries, dp_error_bound *out) {
    dp_part part[DP_ERROR_BOUND_PARTS];
    const dp_problem *p = &sp->c->p;
    dp_error_bound_alloc(p, sp->N, sp->c->backward, entries, out);
    const int n = dp_error_bound_parts(p, sp->N, out, part);
    if (dp_cache_load(sp->std->o->cache, DP_CACHE_BOUND, key, part, n)) return 1;
    dp_error_bound_free(out);
    return 0;
}

static void save(const dp_sharding *sp, dp_key key, dp_error_bound *b) {
    dp_part part[DP_ERROR_BOUND_PARTS];
    const int n = dp_error_bound_parts(&sp->c->p, sp->N, b, part);
    dp_cache_save(sp->std->o->cache, DP_CACHE_BOUND, key, part, n);
}

/* ---- making them ----------------------------------------------------------------------------- */

/* From a reference that serves no other design; freed here. */
static void of_reference(dp_sim *ref, const dp_design *design, dp_format chain,
                         const dp_raw_error *raw, int backward, dp_error_bound *out) {
    dp_error_bound worst;
    for (int p = 2; p >= 1; p--) {
        dp_error_bound_base w;
        dp_error_bound_base_inexact(&w, ref, design, p, backward, raw);
        dp_error_bound_run(&w, chain, backward, p == 2 ? out : &worst);
        dp_error_bound_base_free(&w);
    }
    dp_error_bound_min(ref->p, ref->N, out, &worst);
    dp_error_bound_free(&worst);
    dp_sim_free(ref);
}

/* The same pipeline in chunks of another length. */
static void of_other_chunks(const dp_sharding *sp, const dp_design *design, dp_format chain,
                            const dp_raw_error *raw, dp_error_bound *out) {
    dp_sim ref;
    dp_sharding_reference_of(sp, design->chunk, &ref);
    of_reference(&ref, design, chain, raw, sp->c->backward, out);
}

/* A rank that has all tokens of its heads computes as one rank does. */
static void of_one_rank(const dp_sharding *sp, const dp_design *design, dp_format chain,
                        const dp_raw_error *raw, dp_error_bound *out) {
    const int backward = sp->c->backward;
    dp_problem p = sp->c->p;
    dp_design exact = dp_design_of(DP_BASE_FP64), alone = *design;
    dp_sim ref;
    dp_error_bound one;
    p.own = (dp_owners){0};
    exact.chunk = design->chunk;
    alone.sending = exact.sending;
    const dp_status st = dp_sim_new_design(&ref, &p, &exact, 1, NULL);
    assert(!st);
    (void)st;
    dp_sim_run(&ref, DP_FP64, DP_EXCHANGE_ALLGATHER, backward);
    of_reference(&ref, &alone, chain, raw, backward, &one);
    dp_error_bound_alloc(&p, sp->N, backward, raw != NULL, out);
    dp_error_bound_swap_rows(out, &one);
    dp_error_bound_free(&one);
}

static void of_plain_chunks(dp_sharding *sp, const dp_design *design, dp_format chain,
                            const dp_raw_error *raw, dp_bound_bases *w, dp_error_bound *out) {
    const int backward = sp->c->backward;
    dp_error_bound worst;
    dp_sim *ref = dp_sharding_reference(sp);
    if (!w->ready) {
        dp_error_bound_base_inexact(&w->sound, ref, design, 1, backward, raw);
        dp_error_bound_base_inexact(&w->probable, ref, design, 2, backward, raw);
        w->ready = 1;
    }
    w->sound.sending = w->probable.sending = design->sending;
    dp_error_bound_run(&w->probable, chain, backward, out);
    dp_error_bound_run(&w->sound, chain, backward, &worst);
    dp_error_bound_min(&sp->c->p, sp->N, out, &worst);
    dp_error_bound_free(&worst);
}

/* Adds one store of each result in the format that it leaves in. */
static void store(const dp_sharding *sp, const dp_design *bounded, const dp_design *design,
                  dp_error_bound *out) {
    const double *want[DP_NRESULTS];
    dp_bounds_keep(&sp->c->p, sp->N, sp->first_of_call, &sp->c->session, design, out);
    for (int i = 0; i < DP_NRESULTS; i++)
        want[i] = sp->truth->field[i].rows ? sp->truth->field[i].hi : NULL;
    dp_bounds_store(&sp->c->p, bounded, design, want, out);
}

static void of_tokens(dp_sharding *sp, const dp_design *design, dp_format chain, dp_bound_bases *w,
                      dp_error_bound *out) {
    const dp_design tokens = dp_token_design(design);
    dp_run_bounds(sp, &tokens, chain, w, out);
    store(sp, &tokens, design, out);
}

/* Are its bounds those of the base's default but for what it sends? */
static int is_plain(const dp_design *design) {
    const dp_design plain = dp_design_of(design->base);
    dp_design d = dp_bound_design(design);
    d.sending = plain.sending;
    return dp_design_same(&d, &plain);
}

static void of_chunks(dp_sharding *sp, const dp_design *design, dp_format chain, dp_bound_bases *w,
                      dp_error_bound *out) {
    const dp_raw_error *raw = sp->step ? &sp->step->err : NULL;
    const int cached = sp->std->o->cache != NULL;
    const dp_key key = cached ? key_of(sp, design, chain, raw) : (dp_key){{0}};
    if (cached && load(sp, key, raw != NULL, out)) return;
    if (design->sending.exchange == DP_EXCHANGE_HEADS)
        of_one_rank(sp, design, chain, raw, out);
    else if (!is_plain(design))
        of_other_chunks(sp, design, chain, raw, out);
    else
        of_plain_chunks(sp, design, chain, raw, w, out);
    if (cached) save(sp, key, out);
}

void dp_run_bounds(dp_sharding *sp, const dp_design *design, dp_format chain, dp_bound_bases *w,
                   dp_error_bound *out) {
    const dp_design plain = dp_design_of(design->base);
    if (dp_tokens_are_bounded(design, &sp->c->p)) {
        of_tokens(sp, design, chain, w, out);
        return;
    }
    of_chunks(sp, dp_chunks_are_bounded(design, &sp->c->p) ? design : &plain, chain, w, out);
    store(sp, &plain, design, out);
}
