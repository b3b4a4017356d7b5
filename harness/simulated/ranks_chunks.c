/* Stages of a chunk alone: gate, intra, solve, wy (ranks_stages.h). */
#include "ranks_stages.h"
#include "ref/chunk/gate.h"
#include "ref/vocabulary/recurrence.h"

#include <stdlib.h>
#include <string.h>

/* The design of a stage: the simulation's own, or the default of another base. */
dp_design dp_sim_design_at(const dp_sim *s, dp_stage stage) {
    return s->at[stage] == s->design.base ? s->design : dp_design_of(s->at[stage]);
}

void dp_sim_set_design(const dp_sim *s, dp_chunk *ch, dp_stage stage) {
    const dp_design d = dp_sim_design_at(s, stage);
    dp_chunk_set_design(ch, &d);
}

/* The chunk, with the formats of a stage. */
dp_chunk *dp_sim_chunk_at(const dp_sim *s, int gi, int hv, dp_stage stage) {
    dp_chunk *ch = dp_sim_chunk(s, gi, hv);
    dp_sim_set_design(s, ch, stage);
    return ch;
}

/* ---- gate, intra, wy ------------------------------------------------------------------------- */

static int is_computed(const dp_problem *p, dp_entry e) {
    return e.n > 1 || dp_entry_rotated(dp_recurrence_of(p), e) >= 0;
}

/* Stores the keys that rows write along, where they are products: operands like others. */
static void store_products(dp_sim *s, dp_format f) {
    const dp_problem *p = s->p;
    const int64_t n = dp_rows(p);
    for (int64_t i = 0; dp_by_rows(p) && i < p->T * p->H * n * p->K; i++)
        if (is_computed(p, dp_row_of(p, i / p->K % n)->write)) s->k[i] = dp_store(f, s->k[i]);
}

/* Erasing keys and values: stored like factors in base bf16, as FLA has them. */
static void activate_writes(dp_sim *s) {
    const dp_problem *p = s->p;
    const dp_base base = s->at[DP_STAGE_GATE];
    const int64_t rows = p->T * p->HV * dp_rows(p), ne = rows * p->K, nv = rows * p->V;
    dp_sim_replace(&s->erasing, NULL);
    dp_sim_replace(&s->values, NULL);
    dp_writes_new(p, &s->erasing, &s->values);
    if (!s->values) return;
    (base == DP_BASE_FP64 ? dp_activate_writes : dp_activate_writes_f32)(&s->units.p, 0, p->T, s->k,
                                                                         s->erasing, s->values);
    if (base != DP_BASE_BF16) return;
    const dp_format f = dp_sim_design_at(s, DP_STAGE_GATE).factors;
    store_products(s, f);
    for (int64_t i = 0; i < ne && !dp_by_rows(p); i++) /* -lr_a exp(-g) is no operand */
        s->erasing[i] = dp_store(f, s->erasing[i]);
    for (int64_t i = 0; i < nv; i++)
        s->values[i] = dp_store(f, s->values[i]);
}

/* Rows over their norms are stored like factors in base bf16, as are those of other recurrences. */
static void divide_by_norms(dp_sim *s, dp_base base, dp_format f) {
    dp_units_free(&s->units);
    s->units = (base == DP_BASE_FP64 ? dp_units_new : dp_units_new_f32)(s->p);
    for (int i = 0; i < DP_NINPUTS; i++)
        for (int64_t x = 0; s->units.rstd[i] && base == DP_BASE_BF16 && x < dp_input_count(s->p, i);
             x++)
            (*dp_input_at(&s->units.p, i))[x] = dp_store(f, dp_input_of(&s->units.p, i)[x]);
}

void dp_sim_activate(dp_sim *s) {
    const dp_problem *p = s->p;
    const int64_t nq = p->T * p->H * p->K, nk = nq * dp_rows(p);
    const dp_base base = s->at[DP_STAGE_GATE];
    const dp_design design = dp_sim_design_at(s, DP_STAGE_GATE);
    const dp_format f = dp_design_kept(&design);
    dp_sim_fresh(s, DP_STAGE_GATE);
    divide_by_norms(s, base, f);
    (base == DP_BASE_FP64 ? dp_activate : dp_activate_f32)(&s->units.p, 0, p->T, s->q, s->k, s->g,
                                                           s->beta, s->rstd_q, s->rstd_k);
    if (s->units.rstd[DP_INPUT_Q])
        memcpy(s->rstd_q, s->units.rstd[DP_INPUT_Q], sizeof(double) * (size_t)(p->T * p->H));
    const int norms_are_stored = base == DP_BASE_BF16 && s->units.p.l2norm;
    for (int64_t i = 0; base == DP_BASE_BF16 && p->angle && i < nq; i++)
        s->q[i] = dp_store(f, s->q[i]);
    if (design.stored_inputs || norms_are_stored) {
        for (int64_t i = 0; i < nq; i++)
            s->q[i] = dp_store(f, s->q[i]);
        for (int64_t i = 0; i < nk; i++)
            s->k[i] = dp_store(f, s->k[i]);
    }
    activate_writes(s);
}

/* Tokens of the chunk that begins at t. */
static int chunk_at(const dp_sim *s, int64_t t, int64_t end) {
    int c = 1;
    if (end - t > s->design.chunk) end = t + s->design.chunk;
    if (!s->first_of_call) return (int)(end - t);
    while (t + c < end && !s->first_of_call[t + c])
        c++;
    return c;
}

void dp_sim_list_groups(dp_sim *s) {
    int64_t cap = 0;
    s->ngroup = 0;
    s->first = dp_calloc((size_t)s->N, sizeof *s->first);
    for (int r = 0; r < s->N; r++)
        cap += s->ctx[r].L / s->design.chunk + s->ctx[r].nlocal + 1;
    for (int64_t t = 0; s->first_of_call && t < s->p->T; t++)
        cap += s->first_of_call[t];
    s->group = dp_calloc((size_t)cap, sizeof *s->group);
    for (int r = 0; r < s->N; r++) {
        const dp_context *c = &s->ctx[r];
        if (!dp_sim_has(s, r)) continue;
        s->first[r] = dp_calloc((size_t)c->nlocal + 1, sizeof **s->first);
        for (int sub = 0; sub < c->nlocal; sub++) {
            s->first[r][sub] = s->ngroup;
            for (int64_t t = c->a + c->local_cu[sub], end = c->a + c->local_cu[sub + 1]; t < end;
                 t += s->group[s->ngroup++].c)
                s->group[s->ngroup] =
                    (dp_group){.rank = r, .sub = sub, .c = chunk_at(s, t, end), .t0 = t};
        }
        s->first[r][c->nlocal] = s->ngroup;
    }
}

static dp_chunk_in chunk_in(const dp_sim *s, int gi, int hv) {
    const dp_problem *p = s->p;
    const int h = hv / dp_G(p), Kg = dp_Kg(p);
    const int64_t t = s->group[gi].t0;
    return (dp_chunk_in){.q = s->q + (t * p->H + h) * p->K,
                         .k = s->k + (t * p->H + h) * dp_rows(p) * p->K,
                         .v = dp_values_at(p, s->values, t, hv),
                         .g = s->g + (t * p->HV + hv) * Kg,
                         .beta = s->beta + (t * p->HV + hv) * dp_rows(p),
                         .erasing =
                             s->erasing ? s->erasing + (t * p->HV + hv) * dp_rows(p) * p->K : NULL,
                         .sq = (int64_t)p->H * p->K,
                         .sk = (int64_t)p->H * dp_rows(p) * p->K,
                         .sv = (int64_t)p->HV * dp_rows(p) * p->V,
                         .sg = (int64_t)p->HV * Kg,
                         .sb = (int64_t)p->HV * dp_rows(p),
                         .se = (int64_t)p->HV * dp_rows(p) * p->K,
                         .Kg = Kg,
                         .in_turn = dp_in_turn(p)};
}

void dp_sim_intra(dp_sim *s, int gi, int hv) {
    const dp_problem *p = s->p;
    const dp_chunk_in in = chunk_in(s, gi, hv);
    dp_chunk *ch = dp_sim_chunk(s, gi, hv);
    dp_chunk_free(ch);
    dp_chunk_begin(ch, s->at[DP_STAGE_INTRA], s->group[gi].c, dp_rows(p), p->K, p->V, p->scale,
                   &in);
    dp_sim_set_design(s, ch, DP_STAGE_INTRA);
    ch->by_inverse = s->by_inverse;
    ch->linear = s->linear;
    dp_chunk_intra(ch, &in);
}

void dp_sim_solve(dp_sim *s, int gi, int hv) {
    dp_chunk_solve(dp_sim_chunk_at(s, gi, hv, DP_STAGE_SOLVE));
}

void dp_sim_wy(dp_sim *s, int gi, int hv) { dp_chunk_wy(dp_sim_chunk_at(s, gi, hv, DP_STAGE_WY)); }

void dp_sim_each_chunk(dp_sim *s, dp_sim_stage_fn *f) {
#pragma omp parallel for schedule(dynamic, 1)
    for (int64_t i = 0; i < (int64_t)s->ngroup * s->p->HV; i++)
        f(s, (int)(i / s->p->HV), (int)(i % s->p->HV));
}
