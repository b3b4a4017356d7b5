/* The simulated ranks: all stages in their order, or one of them (ranks.h). */
#include "ranks_stages.h"
#include "ref/arithmetic/mm.h"
#include "ref/chunk/gate.h"
#include "ref/chunk/payload.h"
#include "ref/chunk/recurrent.h"
#include "ref/vocabulary/recurrence.h"
#include "ref/vocabulary/stored.h"

#include <assert.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

/* ---- halos of the tokens before a rank's own ------------------------------------------------- */

static int64_t length_of_halo(const dp_sim *s, int r) {
    return s->ctx[r].is_first ? 0 : dp_lag(s->p);
}

/* Do tokens here need halos? */
static int needs_halos(const dp_sim *s) { return (s->N > 1 || s->peers) && dp_has_halo(s->p); }

/* ---- halos: the problem ---------------------------------------------------------------------- */

/* n numbers a token, of own tokens to where they lie among halos; back: from there. */
static void move_halo(const dp_sim *s, int64_t n, double *own, double *all, int back) {
    for (int r = 0; r < s->N; r++) {
        if (!dp_sim_has(s, r)) continue;
        double *a = own + s->ctx[r].a * n,
               *b = all + (s->halos->ctx[r].a + length_of_halo(s, r)) * n;
        memcpy(back ? a : b, back ? b : a, sizeof *a * (size_t)(s->ctx[r].L * n));
    }
}

static void add_rank(const dp_sim *s, int r, dp_problem *p, dp_context *c) {
    const int64_t m = length_of_halo(s, r);
    *c = s->ctx[r];
    c->a = p->T;
    c->b = p->T += c->L += m;
    c->local_cu = dp_calloc((size_t)c->nlocal + 1, sizeof *c->local_cu);
    for (int i = 1; i <= c->nlocal; i++) {
        c->local_cu[i] = s->ctx[r].local_cu[i] + m;
        p->cu[++p->Nseq] = c->a + c->local_cu[i];
    }
}

static void new_halos(dp_sim *s) {
    struct dp_sim_halos *h = s->halos = dp_calloc(1, sizeof *h);
    size_t sequences = 1;
    for (int r = 0; r < s->N; r++)
        sequences += (size_t)s->ctx[r].nlocal;
    dp_problem *p = &h->p;
    *p = *s->p;
    p->T = p->Nseq = 0;
    p->cu = dp_calloc(sequences, sizeof *p->cu);
    h->ctx = dp_calloc((size_t)s->N, sizeof *h->ctx);
    for (int r = 0; r < s->N; r++)
        if (dp_sim_has(s, r)) add_rank(s, r, p, &h->ctx[r]);
    unsigned char *halo = dp_calloc((size_t)p->T + 1, 1);
    for (int r = 0; r < s->N; r++)
        memset(halo + h->ctx[r].a, 1, dp_sim_has(s, r) ? (size_t)length_of_halo(s, r) : 0);
    p->halo = halo;
    for (int i = 0; i < DP_NINPUTS; i++) {
        double **x = &p->in[i], *own = *x;
        if (dp_input_fields[i].role != DP_ROLE_REQUIRED || !own) continue;
        *x = dp_doubles(dp_input_count(p, i));
        move_halo(s, dp_input_width(p, i), own, *x, 0);
    }
}

static void free_halos(dp_sim *s) {
    struct dp_sim_halos *h = s->halos;
    if (!h) return;
    for (int i = 0; i < DP_NINPUTS; i++)
        if (dp_input_fields[i].role == DP_ROLE_REQUIRED) free(h->p.in[i]);
    for (int r = 0; r < s->N; r++)
        free(h->ctx[r].local_cu);
    dp_units_free(&h->units);
    DP_FREE(h->p.cu, h->p.halo, h->ctx, h);
    s->halos = NULL;
}

/* ---- halos: messages ------------------------------------------------------------------------- */

enum { TAKE, PUT, ADD };

/* A halo's inputs, or their gradients, of the tokens from t on: to x, from there, or added in a
 * base. Returns how many numbers. */
static int64_t each_number(const dp_problem *p, dp_result *gradients, int64_t t, int how,
                           dp_base base, double *x) {
    int64_t all = 0;
    for (int i = 0; i < DP_NINPUTS; i++) {
        const int64_t width = dp_input_width(p, i), n = width * dp_lag(p);
        if (!dp_in_halo(p, i)) continue;
        double *at = gradients ? gradients->out[dp_gradient_of(i)] : p->in[i];
        for (int64_t z = 0; x && z < n; z++, x++) {
            double *y = at + t * width + z;
            if (how == TAKE)
                *x = *y;
            else
                *y = how == ADD ? dp_round_arith(base, *y + *x) : *x;
        }
        all += n;
    }
    return all;
}

static void send_halo(const dp_sim *s, int to, const double *x, int64_t n) {
    if (!dp_sim_has(s, to))
        s->peers->send(s->peers->who, dp_peers_owner(s->peers, s->p->own, s->N, to), x, n);
}
static void receive_halo(const dp_sim *s, int from, double *x, int64_t n, const char *what) {
    if (!dp_sim_has(s, from))
        s->peers->receive(s->peers->who, dp_peers_owner(s->peers, s->p->own, s->N, from), x, n,
                          what);
}

/* The angles of rank r's token t as the sums over its sequence so far, into the halo x. */
static void sum_so_far(const dp_sim *s, int r, int64_t t, double *x) {
    const dp_problem *p = &s->halos->p;
    const dp_context *c = &s->halos->ctx[r];
    const dp_base b = s->at[DP_STAGE_GATE];
    const int64_t n = p->angle ? dp_input_width(p, DP_INPUT_ANGLE) : 0;
    for (int i = 0; i < DP_INPUT_ANGLE; i++)
        x += dp_in_halo(p, i) ? dp_input_width(p, i) * dp_lag(p) : 0;
    for (int64_t i = 0; i < n; i++) {
        double phi = 0;
        for (int64_t z = c->a + c->local_cu[c->nlocal - 1]; z <= t; z++)
            phi = dp_round_arith(b, phi + dp_round_arith(b, p->angle[z * n + i]));
        x[i] = phi;
    }
}

/* s->halos anew. */
static void fetch_halos(dp_sim *s) {
    free_halos(s);
    new_halos(s);
    dp_problem *p = &s->halos->p;
    const int64_t n = each_number(p, NULL, 0, TAKE, s->base, NULL);
    DP_OWN double *x = dp_doubles(n);
    for (int r = 0; r < s->N; r++) {
        const dp_context *c = &s->halos->ctx[r];
        const int64_t last = c->b - dp_lag(p);
        if (!dp_sim_has(s, r)) continue;
        if (!c->is_first) {
            receive_halo(s, r - 1, x, n, "the tokens before its own");
            each_number(p, NULL, c->a, PUT, s->base, x);
        }
        if (c->is_last) continue;
        each_number(p, NULL, last, TAKE, s->base, x);
        sum_so_far(s, r, last, x);
        send_halo(s, r + 1, x, n);
    }
    dp_sim_after(s, DP_AFTER_HALOS, (dp_sim_place){0});
}

/* Gradients of the angles of rank r's own tokens, then of its halo: sums over all tokens from each
 * one on. */
static void sum_angles(dp_sim *s, int r, dp_base base) {
    const dp_context *c = &s->ctx[r];
    const int64_t n = dp_input_width(s->p, DP_INPUT_ANGLE), m = s->halos ? length_of_halo(s, r) : 0;
    dp_problem own = *s->p;
    double *d = s->out.dangle + (c->a + m) * n;
    DP_OWN int64_t *cu = own.cu = dp_calloc((size_t)c->nlocal + 1, sizeof *cu);
    own.T = c->L - m;
    own.Nseq = c->nlocal;
    for (int i = 1; i <= c->nlocal; i++)
        cu[i] = c->local_cu[i] - m;
    (base == DP_BASE_FP64 ? dp_sum_angles : dp_sum_angles_f32)(&own, d);
    for (int64_t i = 0; i < n && m; i++)
        d[i - n] = dp_round_arith(base, d[i - n] + d[i]);
}

/* From gradients by token to those of all ranks: halos return, angles are summed. */
static void return_halos(dp_sim *s, dp_base base) {
    const dp_problem *p = s->p;
    if (!dp_has_halo(p)) return;
    const int64_t n = each_number(p, &s->out, 0, TAKE, base, NULL);
    DP_OWN double *x = dp_doubles(n);
    for (int r = s->N - 1; r >= 0; r--) {
        const dp_context *c = &s->ctx[r];
        if (!dp_sim_has(s, r)) continue;
        if (!c->is_last) {
            receive_halo(s, r + 1, x, n, "the gradient of its last tokens");
            dp_sim_after(s, DP_AFTER_HALO_BWD, (dp_sim_place){.at = r, .x = x});
            each_number(p, &s->out, c->b - dp_lag(p), ADD, base, x);
        }
        if (p->angle) sum_angles(s, r, base);
        if (c->is_first) continue;
        each_number(p, &s->out, c->a, TAKE, base, x);
        send_halo(s, r - 1, x, n);
    }
}

/* ---- halos: simulations ---------------------------------------------------------------------- */

static int64_t heads_width(const dp_sim *s, int i) {
    return (dp_sim_arrays[i].heads == DP_AXIS_H ? s->p->H : s->p->HV) * dp_sim_array_width(s, i);
}

/* The simulation of own tokens, each rank's behind its halo, where s->halos is: arrays of own, with
 * zeros for halos. Backward it has room for results, else no arrays. */
static dp_sim open_halos(const dp_sim *s, int backward) {
    dp_sim all = *s;
    all.p = &s->halos->p;
    all.ctx = s->halos->ctx;
    all.units = s->halos->units;
    for (int i = 0; i < DP_NSIM_ARRAYS; i++) {
        double **x = dp_sim_array(&all, i), *own = *x;
        const int64_t n = heads_width(s, i);
        *x = backward && own ? dp_doubles(all.p->T * n) : NULL;
        if (*x) move_halo(s, n, own, *x, 0);
    }
    all.out = (dp_result){0};
    if (backward) dp_result_alloc(&all.out, all.p, 1);
    return all;
}

/* Gradients of a token's inputs. */
static void take_gradients(dp_sim *s, dp_sim *all) {
    for (int i = 0; i < DP_NRESULTS; i++) {
        const dp_tensor_field *f = &dp_result_fields[i];
        double *to = s->out.out[i];
        if (to && f->role == DP_ROLE_GRADIENT && f->kind == DP_OF_TOKENS)
            move_halo(s, dp_input_width(s->p, (int)f->of), to, all->out.out[i], 1);
    }
    dp_result_free(&all->out);
}

/* Takes the rows of own tokens from all: arrays of stage gate, or backward results. */
static void close_halos(dp_sim *s, dp_sim *all, int backward) {
    s->halos->units = all->units;
    for (int i = 0; i < DP_NSIM_ARRAYS; i++) {
        double **x = dp_sim_array(all, i);
        const int64_t n = heads_width(s, i);
        if (!backward && dp_sim_arrays[i].made_by == DP_STAGE_GATE) {
            dp_sim_replace(dp_sim_array(s, i), *x ? dp_doubles(s->p->T * n) : NULL);
            if (*x) move_halo(s, n, *dp_sim_array(s, i), *x, 1);
        }
        free(*x);
    }
    if (backward) take_gradients(s, all);
}

/* ---- parts of a simulation ------------------------------------------------------------------- */

int dp_sim_has(const dp_sim *s, int r) { return dp_peers_have(s->peers, s->p->own, s->N, r); }

dp_chunk *dp_sim_chunk(const dp_sim *s, int group, int hv) {
    return &s->ch[(int64_t)group * s->p->HV + hv];
}

void dp_sim_after(dp_sim *s, int event, dp_sim_place place) {
    if (s->acts.after[event]) s->acts.after[event](s, &place);
}

/* ---- stages of a chunk alone ----------------------------------------------------------------- */

/* The design of a stage: the simulation's own, or the default of another base. */
static dp_design sim_design_at(const dp_sim *s, dp_stage stage) {
    return s->at[stage] == s->design.base ? s->design : dp_design_of(s->at[stage]);
}

/* Gives a chunk the formats of a stage. */
static void sim_set_design(const dp_sim *s, dp_chunk *ch, dp_stage stage) {
    const dp_design d = sim_design_at(s, stage);
    dp_chunk_set_design(ch, &d);
}

/* The chunk, with the formats of a stage. */
static dp_chunk *sim_chunk_at(const dp_sim *s, int gi, int hv, dp_stage stage) {
    dp_chunk *ch = dp_sim_chunk(s, gi, hv);
    sim_set_design(s, ch, stage);
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
    for (int64_t j = 0; j < n; j++) {
        if (!is_computed(p, dp_row_of(p, j)->write)) continue;
        for (int64_t i = j; i < p->T * p->H * n; i += n)
            dp_store_all(f, s->k + i * p->K, p->K);
    }
}

/* Erasing keys and values: stored like factors in base bf16, as FLA has them. */
static void activate_writes(dp_sim *s) {
    const dp_problem *p = s->p;
    const dp_base base = s->at[DP_STAGE_GATE];
    const int64_t rows = p->T * p->HV * dp_rows(p);
    dp_sim_replace(&s->erasing, NULL);
    dp_sim_replace(&s->values, NULL);
    dp_writes_new(p, &s->erasing, &s->values);
    if (!s->values) return;
    (base == DP_BASE_FP64 ? dp_activate_writes : dp_activate_writes_f32)(&s->units.p, 0, p->T, s->k,
                                                                         s->erasing, s->values);
    if (base != DP_BASE_BF16) return;
    const dp_format f = sim_design_at(s, DP_STAGE_GATE).factors;
    store_products(s, f);
    if (!dp_by_rows(p)) dp_store_all(f, s->erasing, rows * p->K); /* -lr_a exp(-g) is no operand */
    dp_store_all(f, s->values, rows * p->V);
}

/* Rows over their norms are stored like factors in base bf16, as are those of other recurrences. */
static void divide_by_norms(dp_sim *s) {
    const dp_base base = s->at[DP_STAGE_GATE];
    const dp_design design = sim_design_at(s, DP_STAGE_GATE);
    const dp_format f = dp_design_kept(&design);
    dp_units_free(&s->units);
    s->units = (base == DP_BASE_FP64 ? dp_units_new : dp_units_new_f32)(s->p);
    for (int i = 0; i < DP_NINPUTS; i++)
        if (s->units.rstd[i] && base == DP_BASE_BF16)
            dp_store_all(f, s->units.p.in[i], dp_input_count(s->p, i));
}

/* Zeros for what a stage makes. */
static void fresh(dp_sim *s, dp_stage stage) {
    const dp_problem *p = s->p;
    for (int i = 0; i < DP_NSIM_ARRAYS; i++) {
        const dp_sim_array_info *x = &dp_sim_arrays[i];
        if (x->made_by != stage || (x->writes && !s->values)) continue;
        const int64_t heads = x->heads == DP_AXIS_H ? p->H : p->HV;
        dp_sim_replace(dp_sim_array(s, i), dp_doubles(p->T * heads * dp_sim_array_width(s, i)));
    }
}

/* Activated q, k, gate and beta of all tokens. */
static void activate(dp_sim *s) {
    const dp_problem *p = s->p;
    const int64_t nq = p->T * p->H * p->K;
    const dp_base base = s->at[DP_STAGE_GATE];
    const dp_design design = sim_design_at(s, DP_STAGE_GATE);
    const dp_format f = dp_design_kept(&design);
    fresh(s, DP_STAGE_GATE);
    divide_by_norms(s);
    (base == DP_BASE_FP64 ? dp_activate : dp_activate_f32)(&s->units.p, 0, p->T, s->q, s->k, s->g,
                                                           s->beta, s->rstd_q, s->rstd_k);
    if (s->units.rstd[DP_INPUT_Q])
        memcpy(s->rstd_q, s->units.rstd[DP_INPUT_Q], sizeof(double) * (size_t)(p->T * p->H));
    const int norms_are_stored = base == DP_BASE_BF16 && s->units.p.l2norm;
    if (base == DP_BASE_BF16 && p->angle) dp_store_all(f, s->q, nq);
    if (design.stored_inputs || norms_are_stored) {
        dp_store_all(f, s->q, nq);
        dp_store_all(f, s->k, nq * dp_rows(p));
    }
    activate_writes(s);
}

/* Stage gate. */
static void sim_activate(dp_sim *s) {
    if (!needs_halos(s)) {
        activate(s);
        return;
    }
    fetch_halos(s);
    dp_sim all = open_halos(s, 0);
    activate(&all);
    close_halos(s, &all, 0);
    divide_by_norms(s);
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

/* Cuts every rank's local sub-sequences into chunks: s->group, s->first, s->ngroup. */
static void sim_list_groups(dp_sim *s) {
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

/* Stage intra of one chunk: scores and decays. */
static void sim_intra(dp_sim *s, int gi, int hv) {
    const dp_problem *p = s->p;
    const dp_chunk_in in = chunk_in(s, gi, hv);
    dp_chunk *ch = dp_sim_chunk(s, gi, hv);
    dp_chunk_free(ch);
    dp_chunk_begin(ch, s->at[DP_STAGE_INTRA], s->group[gi].c, dp_rows(p), p->K, p->V, p->scale,
                   &in);
    sim_set_design(s, ch, DP_STAGE_INTRA);
    ch->by_inverse = s->by_inverse;
    ch->linear = s->linear;
    dp_chunk_intra(ch, &in);
}

/* Stage solve of one chunk: the triangular system or its inverse. */
static void sim_solve(dp_sim *s, int gi, int hv) {
    dp_chunk_solve(sim_chunk_at(s, gi, hv, DP_STAGE_SOLVE));
}

/* Stage wy of one chunk: w and u. */
static void sim_wy(dp_sim *s, int gi, int hv) { dp_chunk_wy(sim_chunk_at(s, gi, hv, DP_STAGE_WY)); }

/* Runs a stage on every chunk and value head, in parallel. */
static void sim_each_chunk(dp_sim *s, dp_sim_stage_fn *f) {
#pragma omp parallel for schedule(dynamic, 1)
    for (int64_t i = 0; i < (int64_t)s->ngroup * s->p->HV; i++)
        f(s, (int)(i / s->p->HV), (int)(i % s->p->HV));
}

/* ---- shared by forward and backward ---------------------------------------------------------- */

#define ARRAY(FIELD, STAGE, HEADS, KEYS, WIDTH, WRITES)                             \
    {                                                                               \
        offsetof(dp_sim, FIELD), DP_STAGE_##STAGE, DP_AXIS_##HEADS, DP_AXIS_##KEYS, \
            DP_AXIS_##WIDTH, WRITES                                                 \
    }
const dp_sim_array_info dp_sim_arrays[DP_NSIM_ARRAYS] = {
    ARRAY(q, GATE, H, NONE, K, 0),           ARRAY(k, GATE, H, R, K, 0),
    ARRAY(g, GATE, HV, NONE, KG, 0),         ARRAY(beta, GATE, HV, R, NONE, 0),
    ARRAY(rstd_q, GATE, H, NONE, NONE, 0),   ARRAY(rstd_k, GATE, H, R, NONE, 0),
    ARRAY(erasing, GATE, HV, R, K, 1),       ARRAY(values, GATE, HV, R, V, 1),
    ARRAY(dq, INTRA_BWD, H, NONE, K, 0),     ARRAY(dk, INTRA_BWD, H, R, K, 0),
    ARRAY(dg, INTRA_BWD, HV, NONE, KG, 0),   ARRAY(dbeta, WY_BWD, HV, R, NONE, 0),
    ARRAY(derasing, INTRA_BWD, HV, R, K, 1), ARRAY(dvalues, WY_BWD, HV, R, V, 1),
};

double **dp_sim_array(const dp_sim *s, int i) {
    return (double **)((char *)s + dp_sim_arrays[i].at);
}

int64_t dp_sim_array_width(const dp_sim *s, int i) {
    const dp_sim_array_info *x = &dp_sim_arrays[i];
    const int64_t rows = x->keys ? dp_rows(s->p) : 1;
    return x->width ? rows * dp_problem_dims(s->p).of[x->width] : rows;
}

static const double *factor_at(dp_sim *s, int gi, int hv, dp_stage stage) {
    const int64_t own = s->at[stage] != s->at[DP_STAGE_PRE_FWD];
    double **f = &s->factor[(own * s->ngroup + gi) * s->p->HV + hv];
    if (!*f) {
        *f = dp_doubles((int64_t)s->p->K * s->p->K);
        dp_chunk_M(sim_chunk_at(s, gi, hv, stage), *f);
    }
    return *f;
}

int dp_sim_gets(const dp_sim *s, int back, int r) {
    return back ? !s->ctx[r].is_last : !s->ctx[r].is_first;
}
int dp_sim_starts_here(const dp_sim *s, int r, int sub) { return sub > 0 || s->ctx[r].is_first; }
int dp_sim_ends_here(const dp_sim *s, int r, int sub) {
    return sub < s->ctx[r].nlocal - 1 || s->ctx[r].is_last;
}

const double *dp_sim_start(const dp_sim *s, int r, int sub) {
    if (!s->p->s0 || !dp_sim_starts_here(s, r, sub)) return NULL;
    return s->p->s0 + (int64_t)s->ctx[r].local_seq[sub] * s->p->HV * s->p->K * s->p->V;
}

const double *dp_sim_end_gradient(const dp_sim *s, int r, int sub) {
    if (!s->p->dstate || !dp_sim_ends_here(s, r, sub)) return NULL;
    return s->p->dstate + (int64_t)s->ctx[r].local_seq[sub] * s->p->HV * s->p->K * s->p->V;
}

void dp_sim_gather_do(const dp_sim *s, int gi, int hv, double *dout) {
    const dp_problem *p = s->p;
    const dp_group *g = &s->group[gi];
    for (int t = 0; t < g->c; t++)
        memcpy(dout + (int64_t)t * p->V, p->dout + ((g->t0 + t) * p->HV + hv) * p->V,
               sizeof(double) * p->V);
}

void dp_sim_replace(double **slot, double *x) {
    free(*slot);
    *slot = x;
}

void dp_sim_round_carried(const dp_sim *s, dp_stage stage, double *S) {
    const dp_design d = sim_design_at(s, stage), plain = dp_design_of(d.base);
    const int gradient = stage == DP_STAGE_PRE_BWD || stage == DP_STAGE_STATE_BWD;
    const dp_format f = gradient ? d.dstate : d.state;
    if (f == (gradient ? plain.dstate : plain.state)) return;
    dp_store_state(f, 1, s->p->K, s->p->V, S);
}

void dp_sim_round_arith_all(dp_base b, double *x, int64_t n) {
    if (b != DP_BASE_FP64)
        for (int64_t i = 0; i < n; i++)
            x[i] = dp_round_arith(b, x[i]);
}

/* The chain of the factors of groups [g0, g1), first to last, from P = I (math.md g.1). P <- M_c P
 * in the format, so the first factor is rounded like the others. trans: the adjoint chain dM <-
 * M_c' dM, last to first. */
static double *sim_chain(dp_sim *s, int g0, int g1, int hv, dp_format f, int trans, int record) {
    const int K = s->p->K, n = g1 - g0;
    const int64_t KK = (int64_t)K * K;
    DP_OWN double *Q = dp_doubles(KK), *Mt = dp_doubles(KK);
    double *P = dp_identity(K);
    for (int i = 0; i < n; i++) {
        const double *M = factor_at(s, trans ? g1 - 1 - i : g0 + i, hv,
                                    trans ? DP_STAGE_PRE_BWD : DP_STAGE_PRE_FWD);
        if (trans) {
            for (int a = 0; a < K; a++)
                for (int b = 0; b < K; b++)
                    Mt[(int64_t)a * K + b] = M[(int64_t)b * K + a];
            M = Mt;
        }
        dp_mm_by(s->linear, f, (dp_shape){0, 0, K, K, K}, M, P, Q);
        dp_swap(&P, &Q);
        if (record && (i & (i + 1)) == 0 && s->ntraj < DP_MAX_TRAJ) { /* i + 1 is a power of two */
            dp_sim_replace(&s->traj[(int64_t)s->ntraj * s->p->HV + hv], dp_copy(P, KK));
            s->traj_chunks[s->ntraj++] = i + 1;
        }
    }
    return P;
}

/* S <- M S + H in the accumulator of the base; S == NULL stands for zeros, which no M multiplies.
 */
void dp_sim_merge_step(dp_sim *s, int r, int hv, dp_base b, const double *M, const double *H,
                       double **S) {
    const int K = s->p->K, V = s->p->V;
    const int64_t KV = (int64_t)K * V;
    double *x = dp_doubles(KV);
    if (*S) {
        dp_mm_by(s->linear, b == DP_BASE_FP64 ? DP_FP64 : DP_FP32, (dp_shape){0, 0, K, V, K}, M, *S,
                 x);
        for (int64_t i = 0; i < KV; i++)
            x[i] = dp_round_arith(b, x[i] + H[i]);
        dp_sim_after(
            s, DP_AFTER_MERGING,
            (dp_sim_place){.at = r, .hv = hv, .M = (double *)M, .from = *S, .H = H, .x = x});
    } else
        memcpy(x, H, sizeof(double) * KV);
    dp_sim_replace(S, x);
}

/* ---- pairs and states, forward and backward ----------------------------------------------------
 * Backward they are gradients: dM, dH and dS, from the last chunk to the first. */

/* S through a local sub-sequence. keep: chunks keep S as it enters them (h; dh) and v_new (dv_new).
 */
static void pass(dp_sim *s, int back, int r, int hv, int sub, int keep, double *S) {
    const int first = s->first[r][sub], n = s->first[r][sub + 1] - first;
    const int64_t KV = (int64_t)s->p->K * s->p->V;
    const dp_stage stage = back   ? keep ? DP_STAGE_STATE_BWD : DP_STAGE_PRE_BWD
                           : keep ? DP_STAGE_STATE_FWD
                                  : DP_STAGE_PRE_FWD;
    DP_OWN double *dout = back ? dp_doubles((int64_t)s->design.chunk * s->p->V) : NULL;
    for (int i = 0; i < n; i++) {
        const int g = back ? first + n - 1 - i : first + i;
        dp_chunk *ch = sim_chunk_at(s, g, hv, stage);
        if (back) {
            dp_sim_gather_do(s, g, hv, dout);
            if (keep) dp_sim_replace(&ch->dh, dp_copy(S, KV));
            if (keep && !ch->dv_new) ch->dv_new = dp_doubles((int64_t)ch->n * ch->V);
            dp_chunk_state_bwd(ch, dout, S, keep ? ch->dv_new : NULL);
        } else {
            if (keep) memcpy(ch->h, S, sizeof *S * (size_t)KV);
            dp_chunk_state(ch, S, keep ? ch->v_new : NULL);
        }
        dp_sim_round_carried(s, stage, S);
        if (keep && !back)
            dp_sim_after(s, DP_AFTER_CHUNK, (dp_sim_place){.at = g, .hv = hv, .x = S});
    }
}

void dp_sim_pass(dp_sim *s, int back, int r, int hv, int sub, double *S) {
    pass(s, back, r, hv, sub, 1, S);
}

/* (M, H) of groups [g0, g1) by rows (design pair=rows); trans: M' alone, H NULL. */
static double *pair_by_rows(dp_sim *s, int g0, int g1, int hv, int trans, double *H) {
    const int K = s->p->K;
    const int64_t KV = (int64_t)K * s->p->V;
    DP_OWN double *unread = H ? NULL : dp_doubles(KV);
    double *P = dp_identity(K);
    for (int g = g1 - 1; g >= g0; g--)
        dp_chunk_pair(sim_chunk_at(s, g, hv, trans ? DP_STAGE_PRE_BWD : DP_STAGE_PRE_FWD), P,
                      H ? H : unread);
    for (int a = 0; trans && a < K; a++)
        for (int b = 0; b < a; b++) {
            const double t = P[(int64_t)a * K + b];
            P[(int64_t)a * K + b] = P[(int64_t)b * K + a];
            P[(int64_t)b * K + a] = t;
        }
    return P;
}

void dp_sim_pair(dp_sim *s, int back, int r, int hv, int sub, dp_format chain) {
    const int i = r * s->p->HV + hv, record = !back && r == s->traj_rank && s->p->HV == 1;
    double **M = back ? s->dM : s->M, **H = back ? s->dH : s->H;
    const int g0 = s->first[r][sub], g1 = s->first[r][sub + 1], has_H = H[i] != NULL,
              rows = sim_design_at(s, back ? DP_STAGE_PRE_BWD : DP_STAGE_PRE_FWD).pair_rows;
    if (record) s->ntraj = 0;
    if (!has_H) H[i] = dp_doubles((int64_t)s->p->K * s->p->V);
    dp_sim_replace(&M[i], rows ? pair_by_rows(s, g0, g1, hv, back, back || has_H ? NULL : H[i])
                               : sim_chain(s, g0, g1, hv, chain, back, record));
    if (has_H || (rows && !back)) return; /* H does not depend on the chain's format */
    pass(s, back, r, hv, sub, 0, H[i]);
}

/* One local sub-sequence, from what enters it. again: its last state is there. */
static void state(dp_sim *s, int back, int r, int hv, int sub, int again) {
    const dp_problem *p = s->p;
    const int64_t KV = (int64_t)p->K * p->V;
    const int starts = dp_sim_starts_here(s, r, sub), ends = dp_sim_ends_here(s, r, sub);
    const double *begin = (back ? dp_sim_end_gradient : dp_sim_start)(s, r, sub);
    DP_OWN double *S = begin ? dp_copy(begin + hv * KV, KV) : dp_doubles(KV);
    double *last = back ? s->out.ds0 : s->out.final_state;
    dp_sim_round_arith_all(s->at[back ? DP_STAGE_STATE_BWD : DP_STAGE_STATE_FWD], S, KV);
    if (!(back ? ends : starts))
        memcpy(S, (back ? s->dS_out : s->S_in)[r * p->HV + hv], sizeof *S * (size_t)KV);
    pass(s, back, r, hv, sub, 1, S);
    if ((back ? starts : ends) && !again)
        memcpy(last + (s->ctx[r].local_seq[sub] * (int64_t)p->HV + hv) * KV, S,
               sizeof *S * (size_t)KV);
}

static void states(dp_sim *s, int back, int again) {
    const int HV = s->p->HV;
#pragma omp parallel for schedule(dynamic, 1) if (!s->one_by_one)
    for (int i = 0; i < s->N * HV; i++)
        for (int sub = 0; dp_sim_has(s, i / HV) && sub < s->ctx[i / HV].nlocal; sub++)
            state(s, back, i / HV, i % HV, sub, again);
}

/* The pairs of all ranks that send one. */
static void pairs(dp_sim *s, int back) {
    const int HV = s->p->HV;
    if (!dp_exchanges[s->merge].pairs) return;
#pragma omp parallel for schedule(dynamic, 1)
    for (int i = 0; i < s->N * HV; i++)
        if (dp_sim_has(s, i / HV) && dp_sim_gets(s, !back, i / HV))
            dp_sim_pair(s, back, i / HV, i % HV, back ? 0 : s->ctx[i / HV].nlocal - 1, s->chain);
}

static void sim_pre_fwd(dp_sim *s) {
    s->ntraj = 0;
    pairs(s, 0);
}
static void sim_pre_bwd(dp_sim *s) { pairs(s, 1); }
static void sim_states_fwd(dp_sim *s) { states(s, 0, 0); }
static void sim_recompute(dp_sim *s) { states(s, 0, 1); }
static void sim_states_bwd(dp_sim *s) { states(s, 1, 0); }

/* ---- forward --------------------------------------------------------------------------------- */

/* Stage output of one chunk: its rows of o. */
static void sim_output(dp_sim *s, int gi, int hv) {
    const dp_problem *p = s->p;
    const dp_group *g = &s->group[gi];
    DP_OWN double *o = dp_doubles((int64_t)g->c * p->V);
    dp_chunk_output(sim_chunk_at(s, gi, hv, DP_STAGE_OUTPUT), o);
    for (int t = 0; t < g->c; t++)
        memcpy(s->out.o + ((g->t0 + t) * p->HV + hv) * p->V, o + (int64_t)t * p->V,
               sizeof(double) * p->V);
}

/* ---- backward -------------------------------------------------------------------------------- */

/* Stage dAv of one chunk: dv_local. */
static void sim_dAv(dp_sim *s, int gi, int hv) {
    dp_chunk *ch = sim_chunk_at(s, gi, hv, DP_STAGE_DAV);
    DP_OWN double *dout = dp_doubles((int64_t)ch->c * ch->V);
    dp_sim_gather_do(s, gi, hv, dout);
    dp_chunk_dAv(ch, dout);
}

/* Gradients of the activated inputs of one chunk position, all value heads in order. Heads of a
 * group are summed in dq and dk. The type of dv is the inputs'. */
static void grads(dp_sim *s, int gi) {
    const dp_problem *p = s->p;
    const dp_group *g = &s->group[gi];
    const int Kg = dp_Kg(p);
    DP_OWN double *dout = dp_doubles((int64_t)g->c * p->V);
    for (int i = 0; i < p->HV; i++) {
        const int hv = (i + s->turns * s->runs) % p->HV, h = hv / dp_G(p);
        const dp_base b = s->at[DP_STAGE_INTRA_BWD];
        const dp_format out = sim_design_at(s, DP_STAGE_WY_BWD).out[DP_RESULT_DV];
        dp_chunk *ch = dp_sim_chunk(s, gi, hv);
        dp_chunk_grad x;
        dp_chunk_grad_alloc(&x, ch);
        dp_sim_gather_do(s, gi, hv, dout);
        sim_set_design(s, ch, DP_STAGE_WY_BWD);
        dp_chunk_wy_bwd(ch, &x);
        sim_set_design(s, ch, DP_STAGE_INTRA_BWD);
        dp_chunk_intra_bwd(ch, dout, &x);
        dp_sim_after(s, DP_AFTER_GRADIENTS, (dp_sim_place){.at = gi, .hv = hv, .grad = &x});
        for (int t = 0; t < g->c; t++) {
            const int64_t tok = g->t0 + t;
            for (int k = 0; k < p->K; k++) {
                double *y = s->dq + (tok * p->H + h) * p->K + k;
                *y = dp_round_arith(b, *y + x.dq[t * p->K + k]);
                y = s->dg + (tok * p->HV + hv) * Kg + (Kg == 1 ? 0 : k);
                *y = dp_round_arith(b, *y + x.dg[t * p->K + k]);
            }
            for (int64_t k = 0; k < (int64_t)dp_rows(p) * p->K; k++) {
                double *y = s->dk + (tok * p->H + h) * dp_rows(p) * p->K + k;
                *y = dp_round_arith(b, *y + x.dk[(int64_t)t * dp_rows(p) * p->K + k]);
            }
            memcpy(s->dbeta + (tok * p->HV + hv) * dp_rows(p), x.dbeta + t * dp_rows(p),
                   sizeof(double) * dp_rows(p));
            if (s->values) {
                const int64_t KR = (int64_t)dp_rows(p) * p->K, VR = (int64_t)dp_rows(p) * p->V;
                memcpy(s->derasing + (tok * p->HV + hv) * KR, x.derasing + t * KR,
                       sizeof(double) * KR);
                memcpy(s->dvalues + (tok * p->HV + hv) * VR, x.dv + t * VR, sizeof(double) * VR);
                continue;
            }
            for (int64_t i = 0; i < (int64_t)dp_rows(p) * p->V; i++)
                s->out.dv[(tok * p->HV + hv) * dp_rows(p) * p->V + i] =
                    dp_store(out, x.dv[(int64_t)t * dp_rows(p) * p->V + i]);
        }
        dp_chunk_grad_free(&x);
    }
}

/* Parts of one owner are added to the first of them, which of a rank's only part changes nothing.
 */
static void add_parts(const dp_sim *s, dp_base base, double *sums, int64_t n) {
    const dp_owners o = s->p->own;
    for (int i = 1; o.kind && i < s->N; i++) {
        int first = 0;
        while (dp_own_sum(o, s->N, first) != dp_own_sum(o, s->N, i))
            first++;
        for (int64_t j = 0; first < i && j < n; j++) {
            sums[first * n + j] = dp_round_arith(base, sums[first * n + j] + sums[i * n + j]);
            sums[i * n + j] = 0;
        }
    }
}

/* dA_log and ddt_bias from the sums of all ranks, in rank order. */
static void add_sums(dp_sim *s, dp_base base, double *sums) {
    const dp_problem *p = s->p;
    double *A = s->out.dA_log, *B = s->out.ddt_bias;
    const int64_t nA = A ? p->HV : 0, nB = B ? (int64_t)p->HV * dp_Kg(p) : 0;
    if (s->peers) dp_peers_gather(s->peers, p->own, s->N, sums, nA + nB, "dA_log and ddt_bias");
    add_parts(s, base, sums, nA + nB);
    dp_sim_after(s, DP_AFTER_SUMS, (dp_sim_place){.x = sums});
    if (A) memset(A, 0, sizeof(double) * (size_t)nA);
    if (B) memset(B, 0, sizeof(double) * (size_t)nB);
    for (int i = 0; i < s->N; i++) {
        const double *part = sums + (i + s->turns * s->runs) % s->N * (nA + nB);
        for (int64_t j = 0; j < nA; j++)
            A[j] = dp_round_arith(base, A[j] + part[j]);
        for (int64_t j = 0; j < nB; j++)
            B[j] = dp_round_arith(base, B[j] + part[nA + j]);
    }
}

/* Through erase o k and write o v of a rank's tokens: dk gets its share. */
static void writes_bwd(dp_sim *s, int r, dp_base base, double *dk, double *dg, dp_result *part) {
    const dp_problem *p = s->p;
    const int64_t a = s->ctx[r].a, b = s->ctx[r].b;
    const int64_t R = dp_rows(p), first = a * p->HV * R, keys = a * p->H * R * p->K;
    (base == DP_BASE_FP64 ? dp_activate_writes_bwd : dp_activate_writes_bwd_f32)(
        &s->units.p, a, b, s->k + keys, s->derasing + first * p->K, s->dvalues + first * p->V,
        dk + keys, dg + a * p->HV * dp_Kg(p), part);
    dp_sim_after(s, DP_AFTER_WRITES, (dp_sim_place){.at = r, .x = dk + keys});
}

int64_t dp_sim_numbers_of_sums(const dp_sim *s) {
    const int64_t HV = s->p->HV;
    return (s->out.dA_log ? HV : 0) + (s->out.ddt_bias ? HV * dp_Kg(s->p) : 0);
}

/* Gradients [n] of the rows of q or k as they reach the norm: a copy, for writes_bwd adds to it. */
static double *gradient_of_rows(const dp_sim *s, dp_format stored, const double *x, int64_t n) {
    const int between = sim_design_at(s, DP_STAGE_GATE_BWD).stored_inputs && s->p->l2norm;
    double *copy = dp_copy(x, n);
    if (between) dp_store_all(stored, copy, n);
    return copy;
}

static void activations_bwd(dp_sim *s, double *sums) {
    const dp_problem *p = s->p;
    const dp_base base = s->at[DP_STAGE_GATE_BWD];
    const dp_design leaving = sim_design_at(s, DP_STAGE_GATE_BWD);
    const double *dbeta = s->dbeta;
    const int64_t nq = p->T * p->H * p->K, nk = nq * dp_rows(p);
    DP_OWN double *dq = gradient_of_rows(s, leaving.out[DP_RESULT_DQ], s->dq, nq);
    DP_OWN double *dk = gradient_of_rows(s, leaving.out[DP_RESULT_DK], s->dk, nk);
    DP_OWN double *dg = dp_copy(s->dg, p->T * p->HV * dp_Kg(p)); /* writes_bwd adds to it */
    const int Kg = dp_Kg(p);
    const int64_t nA = s->out.dA_log ? p->HV : 0, n = dp_sim_numbers_of_sums(s);
    dp_sim_after(s, DP_AFTER_NORMS, (dp_sim_place){0});
    const double *q = s->norm_q ? s->norm_q : s->q, *k = s->norm_k ? s->norm_k : s->k;
    for (int r = 0; r < s->N; r++) {
        const int64_t a = s->ctx[r].a, b = s->ctx[r].b;
        if (!dp_sim_has(s, r)) continue;
        dp_result part = s->out;
        part.dA_log = sums && s->out.dA_log ? sums + r * n : NULL;
        part.ddt_bias = sums && s->out.ddt_bias ? sums + r * n + nA : NULL;
        if (s->values) writes_bwd(s, r, base, dk, dg, &part);
        (base == DP_BASE_FP64 ? dp_activate_bwd : dp_activate_bwd_f32)(
            &s->units.p, a, b, q + a * p->H * p->K, k + a * p->H * dp_rows(p) * p->K,
            s->rstd_q + a * p->H, s->rstd_k + a * p->H * dp_rows(p), dq + a * p->H * p->K,
            dk + a * p->H * dp_rows(p) * p->K, dg + a * p->HV * Kg, dbeta + a * p->HV * dp_rows(p),
            &part);
        dp_sim_after(s, DP_AFTER_ACTIVATIONS, (dp_sim_place){.at = r, .part = &part});
    }
    return_halos(s, base);
    (base == DP_BASE_FP64 ? dp_units_bwd : dp_units_bwd_f32)(&s->units, 0, p->T, &s->out);
    dp_sim_replace(&s->norm_q, NULL);
    dp_sim_replace(&s->norm_k, NULL);
    for (int i = 0; i < DP_NRESULTS; i++) /* dv without s->values left before */
        if (dp_leaves(i) && dp_result_fields[i].backward && (i != DP_RESULT_DV || s->values))
            dp_store_all(leaving.out[i], s->out.out[i], dp_result_count(p, i));
}

/* The part of gate_bwd by token. sums [N]: gets dA_log and ddt_bias of each rank's tokens; NULL:
 * without. */
static void all_activations_bwd(dp_sim *s, double *sums) {
    if (!s->halos) {
        activations_bwd(s, sums);
        return;
    }
    dp_sim all = open_halos(s, 1);
    activations_bwd(&all, sums);
    close_halos(s, &all, 1);
}

/* Rank by rank; dA_log and ddt_bias are per-rank partial sums, then all-reduced in rank order. */
static void sim_gate_bwd(dp_sim *s) {
    DP_OWN double *sums = dp_doubles(s->N * dp_sim_numbers_of_sums(s));
    all_activations_bwd(s, sums);
    add_sums(s, s->at[DP_STAGE_GATE_BWD], sums);
}

/* Stages wy_bwd and intra_bwd of all chunks. */
static void sim_all_grads(dp_sim *s) {
    fresh(s, DP_STAGE_WY_BWD);
    fresh(s, DP_STAGE_INTRA_BWD);
#pragma omp parallel for schedule(dynamic, 1)
    for (int g = 0; g < s->ngroup; g++)
        grads(s, g);
}

/* ---- the table of stages --------------------------------------------------------------------- */

static void merge_fwd(dp_sim *s) { dp_sim_exchange(s, 0); }
static void merge_bwd(dp_sim *s) { dp_sim_exchange(s, 1); }

/* A stage runs for each chunk and head, or once for all. */
static const struct {
    dp_sim_stage_fn *chunk;
    void (*all)(dp_sim *s);
} STAGES[DP_NSTAGES] = {
    [DP_STAGE_GATE] = {.all = sim_activate},
    [DP_STAGE_INTRA] = {sim_intra},
    [DP_STAGE_SOLVE] = {sim_solve},
    [DP_STAGE_WY] = {sim_wy},
    [DP_STAGE_PRE_FWD] = {.all = sim_pre_fwd},
    [DP_STAGE_MERGE_FWD] = {.all = merge_fwd},
    [DP_STAGE_STATE_FWD] = {.all = sim_states_fwd},
    [DP_STAGE_OUTPUT] = {sim_output},
    [DP_STAGE_RECOMPUTE] = {.all = sim_recompute},
    [DP_STAGE_DAV] = {sim_dAv},
    [DP_STAGE_PRE_BWD] = {.all = sim_pre_bwd},
    [DP_STAGE_MERGE_BWD] = {.all = merge_bwd},
    [DP_STAGE_STATE_BWD] = {.all = sim_states_bwd},
    [DP_STAGE_WY_BWD] = {.all = sim_all_grads},
    [DP_STAGE_INTRA_BWD] = {0}, /* computed with wy_bwd */
    [DP_STAGE_GATE_BWD] = {.all = sim_gate_bwd},
};

/* One stage, and what comes behind it (DP_AFTER_..). */
static void sim_do(dp_sim *s, dp_stage stage) {
    if (!STAGES[stage].chunk) {
        if (STAGES[stage].all) STAGES[stage].all(s);
        dp_sim_after(s, (int)stage, (dp_sim_place){0});
        return;
    }
    sim_each_chunk(s, STAGES[stage].chunk);
#pragma omp parallel for schedule(dynamic, 1) if (s->acts.after[stage])
    for (int i = 0; i < s->ngroup * s->p->HV; i++)
        dp_sim_after(s, (int)stage, (dp_sim_place){.at = i / s->p->HV, .hv = i % s->p->HV});
}

/* ---- a simulation ---------------------------------------------------------------------------- */

/* Arrays once a rank and head. */
static void alloc_ranks(dp_sim *s) {
    const int64_t n = (int64_t)s->N * s->p->HV;
    for (int i = 0; i < DP_RANK_TENSORS; i++)
        s->rank[i] = dp_calloc((size_t)n, sizeof *s->rank[i]);
    s->traj_rank = s->N >= 3 ? 1 : 0;
    s->traj = dp_calloc((size_t)DP_MAX_TRAJ * s->p->HV, sizeof *s->traj);
    s->hit_kept = dp_calloc((size_t)n, 1);
    memcpy(s->hit_kept, s->hit, (size_t)n);
}

static void free_ranks(dp_sim *s) {
    const int64_t n = (int64_t)s->N * s->p->HV;
    for (int i = 0; i < DP_RANK_TENSORS; i++)
        dp_free_list(s->rank[i], n);
    dp_free_list(s->traj, s->traj ? DP_MAX_TRAJ * s->p->HV : 0);
    if (s->first)
        for (int r = 0; r < s->N; r++)
            free(s->first[r]);
    for (int r = 0; r < s->N; r++)
        dp_context_free(&s->ctx[r]);
    DP_FREE(s->first, s->group, s->ctx, s->hit, s->hit_kept);
}

/* Keeps the rank of this process, whose tokens are all that there are. */
static void keep_own(dp_sim *s) {
    int64_t t = 0;
    for (int r = 0; r < s->N; r++) {
        dp_context *c = &s->ctx[r];
        if (!dp_sim_has(s, r)) continue;
        c->a = t;
        c->b = t += c->L;
    }
}

/* The part that no chain format changes. */
static void begin_chunks(dp_sim *s) {
    const int64_t nch = (int64_t)s->ngroup * s->p->HV;
    s->ch = dp_calloc((size_t)nch, sizeof *s->ch);
    s->factor = dp_calloc((size_t)(2 * nch), sizeof *s->factor);
    sim_do(s, DP_STAGE_INTRA);
    sim_do(s, DP_STAGE_SOLVE);
    sim_do(s, DP_STAGE_WY);
}

/* exp(-g) of a gate has to be a number of every base (ref/chunk/gate.h). */
static dp_status factors_overflow(const dp_sim *s, dp_err *e) {
    const dp_problem *p = s->p;
    for (int64_t i = 0; dp_has_growth(p) && i < p->T * p->HV * dp_Kg(p); i++)
        if (s->g[i] < DP_FACTORS_GATE)
            return dp_fail(e, DP_EINPUT, "g: a log decay of %g: %s is computed down to %g", s->g[i],
                           dp_model_of(p)->name, DP_FACTORS_GATE);
    return DP_OK;
}

dp_status dp_sim_open(dp_sim *s, const dp_problem *p, const dp_design *design, int N,
                      const dp_sim_options *o, dp_err *e) {
    static const dp_sim_options none = {0};
    dp_status st = DP_OK;
    if (!o) o = &none;
    assert(design->chunk > 0 && !design->chunk_backward); /* that is of two runs */
    *s = (dp_sim){.p = p,
                  .base = design->base,
                  .design = *design,
                  .peers = o->peers,
                  .linear = o->linear ? o->linear : &dp_linear_own,
                  .first_of_call = o->first_of_call,
                  .payload = design->sending.payload,
                  .given = p};
    for (int i = 0; i < DP_NSTAGES; i++)
        s->at[i] = o->at ? o->at[i] : design->base;
    s->by_inverse = o->by_inverse || sim_design_at(s, DP_STAGE_SOLVE).product ||
                    sim_design_at(s, DP_STAGE_WY).product;
    s->hit = dp_calloc((size_t)N * p->HV, 1);
    if (o->acts) s->acts = *o->acts;
    s->ctx = dp_calloc((size_t)N, sizeof *s->ctx);
    while (s->N < N && !st)
        if (!(st = dp_context_of(p, N, s->N, &s->ctx[s->N], e))) s->N++;
    if (!st && o->peers) keep_own(s);
    if (!st) dp_sim_after(s, DP_AFTER_OPENING, (dp_sim_place){0});
    if (!st && !o->frame) sim_do(s, DP_STAGE_GATE);
    if (!st && !o->frame) st = factors_overflow(s, e);
    if (st) {
        dp_sim_free(s);
        return st;
    }
    sim_list_groups(s);
    if (!o->frame) begin_chunks(s);
    alloc_ranks(s);
    return DP_OK;
}

dp_status dp_sim_takes(const dp_problem *p, dp_err *e) {
    const dp_design design = dp_design_of(DP_BASE_FP64);
    const dp_sim_options frame = {.frame = 1};
    DP_FREED(dp_sim_free) dp_sim s = {0};
    if (!dp_has_growth(p)) return DP_OK;
    const dp_status st = dp_sim_open(&s, p, &design, 1, &frame, e);
    if (st) return st;
    sim_do(&s, DP_STAGE_GATE);
    return factors_overflow(&s, e);
}

/* The problem of s on one rank, with all of its formats and acts. */
static void sim_open_whole(const dp_sim *s, const dp_problem *p, dp_sim *whole) {
    const dp_sim_options o = {
        .at = s->at, .linear = s->linear, .by_inverse = s->by_inverse, .acts = &s->acts};
    dp_must(dp_sim_open(whole, p, &s->design, 1, &o, NULL)); /* one rank has all tokens */
}

dp_status dp_sim_new_rank(dp_sim *s, const dp_problem *part, dp_base base, const dp_peers *peers,
                          dp_err *e) {
    const dp_design design = dp_design_of(base);
    const dp_sim_options o = {.peers = peers};
    const int64_t T = part->cu[part->Nseq];
    const int N = part->own.kind ? dp_own_parts(part->own.kind, T, part->own.ranks) : peers->N;
    return dp_sim_open(s, part, &design, N, &o, e);
}

void dp_sim_free(dp_sim *s) {
    if (!s->p) return;
    const int64_t nch = (int64_t)s->ngroup * s->p->HV;
    if (s->heads) {
        dp_sim_free(&s->heads->sim);
        if (s->peers) dp_problem_free(&s->heads->p);
        free(s->heads);
    }
    free_halos(s);
    dp_free_list(s->factor, 2 * nch);
    if (s->ch)
        for (int64_t i = 0; i < nch; i++)
            dp_chunk_free(&s->ch[i]);
    free_ranks(s);
    dp_result_free(&s->out);
    dp_units_free(&s->units);
    for (int i = 0; i < DP_NSIM_ARRAYS; i++)
        free(*dp_sim_array(s, i));
    free(s->ch);
    if (s->p != s->given) dp_problem_free(&s->own); /* inputs that a fault replaced */
    *s = (dp_sim){0};
}

static int same_chunks(const dp_sim *a, const dp_sim *b) {
    if (a->ngroup != b->ngroup) return 0;
    for (int i = 0; i < a->ngroup; i++)
        if (a->group[i].t0 != b->group[i].t0 || a->group[i].c != b->group[i].c) return 0;
    return 1;
}

int dp_sim_split(dp_sim *s, int N) {
    dp_sim next = *s;
    assert(!s->acts.after[DP_AFTER_BEGINNING] && s->p == s->given);
    next.N = N;
    next.ntraj = next.have_forward = next.have_backward = 0;
    next.ctx = dp_calloc((size_t)N, sizeof *next.ctx);
    next.hit = dp_calloc((size_t)N * s->p->HV, 1);
    for (int r = 0; r < N; r++) /* the caller has split the problem so already */
        dp_must(dp_context_of(s->p, N, r, &next.ctx[r], NULL));
    sim_list_groups(&next);
    alloc_ranks(&next);
    const int same = same_chunks(s, &next) && !dp_has_halo(s->p);
    if (same) {
        const dp_sim old = *s;
        *s = next;
        next = old;
    }
    free_ranks(&next);
    return same;
}

/* ---- runs ------------------------------------------------------------------------------------ */

static void clear(double **a, int64_t n) {
    for (int64_t i = 0; i < n; i++)
        dp_sim_replace(&a[i], NULL);
}

/* Clears results that an exchange does not make, whatever an earlier run left. */
static void clear_unmade(dp_sim *s) {
    const int64_t nr = (int64_t)s->N * s->p->HV;
    for (int i = 0; i < DP_RANK_TENSORS; i++)
        if (!dp_exchange_makes(s->merge, i)) clear(s->rank[i], nr);
    if (!dp_exchanges[s->merge].pairs) s->ntraj = 0;
}

/* Sequences without tokens pass their initial state through; the gradient of the final state
 * likewise.
 */
static void empty_sequences(dp_sim *s) {
    const dp_problem *p = s->p;
    const int64_t n = (int64_t)p->HV * p->K * p->V;
    for (int i = 0; i < p->Nseq; i++) {
        if (p->cu[i + 1] > p->cu[i]) continue;
        for (int64_t z = 0; z < n; z++) {
            s->out.final_state[i * n + z] = p->s0 ? p->s0[i * n + z] : 0;
            if (s->out.ds0) s->out.ds0[i * n + z] = p->dstate ? p->dstate[i * n + z] : 0;
        }
    }
}

void dp_sim_begin(dp_sim *s, dp_format chain_format, dp_exchange merge, int with_backward) {
    assert(!with_backward || s->p->dout);
    s->chain = dp_chain_format(s->p, s->at[DP_STAGE_PRE_FWD], chain_format);
    s->merge = merge;
    s->sent = (dp_traffic){0, 0};
    dp_sim_after(s, DP_AFTER_BEGINNING, (dp_sim_place){0});
    clear_unmade(s);
    if (!s->out.o || (with_backward && !s->out.dq)) {
        dp_result_free(&s->out);
        dp_result_alloc(&s->out, s->p, with_backward);
        s->have_forward = s->have_backward = 0;
    }
    empty_sequences(s);
}

void dp_sim_stage(dp_sim *s, dp_stage stage) {
    const int64_t nch = (int64_t)s->ngroup * s->p->HV, nr = (int64_t)s->N * s->p->HV;
    if (stage == DP_STAGE_PRE_FWD || stage == DP_STAGE_PRE_BWD) {
        clear(s->factor, 2 * nch);
        clear(stage == DP_STAGE_PRE_FWD ? s->M : s->dM, nr);
        clear(stage == DP_STAGE_PRE_FWD ? s->H : s->dH, nr);
    }
    sim_do(s, stage);
    s->have_forward = s->have_backward = 0;
}

/* Results of an earlier run stay where it left what enters ranks as it is. */
static int known(dp_sim *s, int have, double **before, double **now) {
    const int nr = s->N * s->p->HV;
    const int same = dp_same_list(before, now, nr, (int64_t)s->p->K * s->p->V);
    dp_free_list(before, nr);
    return have && same;
}

static void forward(dp_sim *s) {
    const int64_t KV = (int64_t)s->p->K * s->p->V;
    double **before = dp_copy_list(s->S_in, s->N * s->p->HV, KV);
    sim_do(s, DP_STAGE_PRE_FWD);
    sim_do(s, DP_STAGE_MERGE_FWD);
    if (known(s, s->have_forward, before, s->S_in)) return;
    sim_do(s, DP_STAGE_STATE_FWD);
    sim_do(s, DP_STAGE_OUTPUT);
    dp_leave_states(s->p, &s->design, s->out.final_state);
    s->have_forward = 1;
    s->have_backward = 0;
}

/* Stage dAv, unless the chunk has its result. */
static void dAv_once(dp_sim *s, int gi, int hv) {
    if (!dp_sim_chunk(s, gi, hv)->dv_local) sim_dAv(s, gi, hv);
}

static void backward(dp_sim *s) {
    const int64_t KV = (int64_t)s->p->K * s->p->V;
    double **before = dp_copy_list(s->dS_out, s->N * s->p->HV, KV);
    dp_sim_after(s, DP_STAGE_RECOMPUTE, (dp_sim_place){0}); /* what it makes is there else */
    sim_each_chunk(s, dAv_once);
    sim_do(s, DP_STAGE_PRE_BWD);
    sim_do(s, DP_STAGE_MERGE_BWD);
    if (known(s, s->have_backward, before, s->dS_out) && !s->peers) return; /* who wait for sums */
    sim_do(s, DP_STAGE_STATE_BWD);
    sim_do(s, DP_STAGE_WY_BWD);
    sim_do(s, DP_STAGE_INTRA_BWD);
    sim_do(s, DP_STAGE_GATE_BWD);
    s->have_backward = 1;
}

/* ---- heads ------------------------------------------------------------------------------------
 * Ranks that have all tokens of HV / N value heads. A head's results do not depend on its rank, so
 * one pipeline over all tokens computes all of them. The rank of a head shows in faults alone.
 * Gradients of q and k return a value head each. The rank that owns the token adds them, in the
 * order of heads, as on one rank. A rank that is a process computes its own heads, which come by
 * messages (ranks_exchange.c). */

static int ranks_of(const dp_sim *s) { return s->p->own.kind ? s->p->own.ranks : s->N; }

static void open_heads(dp_sim *s) {
    s->heads = dp_calloc(1, sizeof *s->heads);
    s->heads->p = s->peers ? dp_sim_receive_heads(s) : *s->given;
    s->heads->p.own = (dp_owners){0};
    sim_open_whole(s, &s->heads->p, &s->heads->sim);
    s->heads->sim.sharers = ranks_of(s);
}

/* Which rank has a value head. */
static int rank_of(const dp_sim *s, int hv) { return (int)((int64_t)hv * ranks_of(s) / s->p->HV); }

static void take_results(dp_sim *s, int backward) {
    const dp_sim *one = &s->heads->sim;
    const int HV = s->p->HV;
    for (int i = 0; i < DP_NRESULTS; i++) {
        double *to = s->out.out[i];
        if (to) memcpy(to, one->out.out[i], sizeof *to * (size_t)dp_result_count(s->p, i));
    }
    if (backward) dp_sim_replace(&s->dg, dp_copy(one->dg, s->p->T * HV * dp_Kg(s->p)));
    for (int hv = 0; hv < HV; hv++)
        if (rank_of(s, hv) < s->N) s->hit[rank_of(s, hv) * HV + hv] |= one->hit[hv];
}

static void run_heads(dp_sim *s, int backward) {
    if (!s->heads) open_heads(s);
    dp_sim_run(&s->heads->sim, s->chain, DP_EXCHANGE_ALLGATHER, backward);
    if (s->peers && backward) {
        fresh(s, DP_STAGE_WY_BWD);
        fresh(s, DP_STAGE_INTRA_BWD);
    }
    if (s->peers)
        dp_sim_return_heads(s, &s->heads->sim, backward);
    else
        take_results(s, backward);
    if (s->peers && backward && !dp_by_rows(s->p)) all_activations_bwd(s, NULL);
    s->have_forward = s->have_backward = 0; /* results of other exchanges are no longer there */
    s->runs++;
}

/* ---- runs ------------------------------------------------------------------------------------ */

void dp_sim_run(dp_sim *s, dp_format chain_format, dp_exchange merge, int with_backward) {
    dp_sim_begin(s, chain_format, merge, with_backward);
    if (s->merge == DP_EXCHANGE_HEADS) {
        run_heads(s, with_backward);
        return;
    }
    forward(s);
    if (with_backward) backward(s);
    s->runs++;
    dp_sim_after(s, DP_AFTER_RUN, (dp_sim_place){0});
}

dp_status dp_sim_reference(dp_sim *s, const dp_problem *p, int chunk, int N,
                           const unsigned char *first_of_call, int backward, dp_err *e) {
    const dp_sim_options o = {.first_of_call = first_of_call};
    dp_design exact = dp_design_of(DP_BASE_FP64);
    exact.chunk = chunk;
    const dp_status st = dp_sim_open(s, p, &exact, N, &o, e);
    if (!st) dp_sim_run(s, DP_FP64, DP_EXCHANGE_ALLGATHER, backward);
    return st;
}

void dp_sim_run_ranks(dp_sim *s, dp_format chain_format, dp_exchange merge, int with_backward) {
    dp_sim_begin(s, chain_format, merge, with_backward);
    if (!dp_exchanges[s->merge].states) return;
    sim_do(s, DP_STAGE_PRE_FWD);
    sim_do(s, DP_STAGE_MERGE_FWD);
    if (!with_backward) return;
    sim_each_chunk(s, dAv_once);
    sim_do(s, DP_STAGE_PRE_BWD);
    sim_do(s, DP_STAGE_MERGE_BWD);
}

/* ---- values of stage tensors ----------------------------------------------------------------- */

/* The chunk solver raises steps far below its floor, where exp is 0. The stage tensor gcum must
 * not contain the raised steps: rows after such a step are summed again. */
static void sum_again(const dp_sim *s, int g, int hv, int t, int Kg, double *row) {
    for (int x = 0; x < Kg; x++) {
        double sum = 0, lowest = 0;
        for (int i = 0; i <= t; i++) {
            const double step = s->g[((s->group[g].t0 + i) * s->p->HV + hv) * Kg + x];
            sum = dp_round_arith(s->base, sum + step);
            lowest = fmin(lowest, step);
        }
        if (lowest < dp_gate_floor(s->base)) row[x] = sum;
    }
}

static double *per_token(const dp_sim *s, int stage) {
    const dp_problem *p = s->p;
    int per;
    int64_t width, stride, used;
    dp_stage_tensor_token_row(p, stage, &per, &width);
    double *x = dp_doubles(p->T * p->HV * per * width);
    for (int g = 0; g < s->ngroup; g++)
        for (int hv = 0; hv < p->HV; hv++) {
            dp_chunk *ch = dp_sim_chunk(s, g, hv);
            if (stage == DP_AKK) dp_chunk_inverse(ch);
            for (int t = 0; t < ch->c; t++)
                for (int j = 0; j < per; j++) {
                    dp_stage_tensor_columns(ch, stage, t, width, &stride, &used);
                    double *row = x + (((s->group[g].t0 + t) * p->HV + hv) * per + j) * width;
                    memcpy(row, dp_stage_tensor_in_chunk(ch, stage) + (t * per + j) * stride,
                           sizeof(double) * (size_t)used);
                    if (stage == DP_GCUM) sum_again(s, g, hv, t, (int)width, row);
                }
        }
    return x;
}

double *dp_stage_tensor_value(const dp_sim *s, int stage) {
    const dp_problem *p = s->p;
    int64_t rows, width;
    if (dp_stage_tensors[stage].kind == DP_PER_TOKEN) return per_token(s, stage);
    dp_stage_tensor_rows(p, s->N, stage, &rows, &width);
    const dp_stage_tensor_info *of = &dp_stage_tensors[stage];
    double *x = dp_doubles(rows * width),
           **list = of->kind == DP_PER_RANK ? s->rank[of->rank] : NULL;
    for (int64_t i = 0; i < rows; i++) {
        const double *from = list ? list[i] : dp_stage_tensor_in_chunk(&s->ch[i], stage);
        if (from)
            memcpy(x + i * width, from, sizeof(double) * (size_t)width);
        else
            for (int64_t z = 0; z < width; z++)
                x[i * width + z] = NAN;
    }
    return x;
}
