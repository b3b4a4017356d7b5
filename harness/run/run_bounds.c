/* The bounds of a run by its design (run_bounds.h): who has them, of chunks or of single tokens,
 * stores, their cache. */
#include "run_bounds.h"
#include "harness/bound/state_bound.h"
#include "ref/arithmetic/norms.h"
#include "ref/vocabulary/stored.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

/* ---- which designs have bounds --------------------------------------------------------------- */

/* The words of a design that bounds read, all else the default of its base. Designs that agree in
 * them have the same bounds. */
static dp_design bound_design(const dp_design *design) {
    dp_design d = dp_design_of(design->base);
    d.chunk = design->chunk;
    d.chunk_backward = design->chunk_backward;
    d.sending = design->sending;
    d.pair_rows = design->pair_rows;
    if (design->gated == DP_SCORES_FACTORED) d.gated = design->gated;
    if (design->base == DP_BASE_BF16) {
        d.stored_inputs = design->stored_inputs;
        d.gated = design->gated;
        d.scored = design->scored;
        d.decays = design->decays;
    }
    return d;
}

int dp_bounds_are_derived(const dp_design *design) {
    const dp_design bounded = bound_design(design);
    dp_design d = *design;
    d.fast_decays = bounded.fast_decays;
    d.final_state = bounded.final_state; /* dp_bounds_store, dp_bounds_keep */
    if (design->base == DP_BASE_BF16) d.fold_beta = bounded.fold_beta;
    for (int i = 0; i < DP_NRESULTS; i++) /* dp_bounds_store adds them */
        if (d.out[i] != DP_FP16) d.out[i] = bounded.out[i];
    return design->chunk && dp_design_same(&d, &bounded);
}

#define AFFORDABLE 20 /* seconds */

/* The design with a state in the base's format: dp_bounds_keep adds the errors of a short one. */
static dp_design long_state(const dp_design *d, const dp_problem *p) {
    dp_design x = *d;
    if (!p->dout || dp_store_has_gradients(p)) x.state = dp_design_of(d->base).state;
    return x;
}

int dp_tokens_are_bounded(const dp_design *d, const dp_problem *p) {
    const dp_design x = long_state(d, p);
    return dp_token_design_is_bounded(&x) && dp_token_bounds_seconds(p) <= AFFORDABLE;
}

/* Has it bounds of chunks? */
static int chunks_are_bounded(const dp_design *d, const dp_problem *p) {
    const dp_design x = long_state(d, p);
    return dp_bounds_are_derived(&x);
}

/* ---- kernels that go token by token ---------------------------------------------------------- */

int dp_token_design_is_bounded(const dp_design *d) {
    int fp16 = 0;
    for (int i = 0; i < DP_NRESULTS; i++)
        fp16 |= d->out[i] == DP_FP16; /* it may leave its range */
    return !d->chunk && d->base != DP_BASE_FP64 && !d->stored_inputs && d->state == DP_FP32 &&
           d->dstate == DP_FP32 && !fp16;
}

/* Every token squares the entries of its transition into those of a state and of a product. */
double dp_token_bounds_seconds(const dp_problem *p) {
    return 4e-9 * (double)p->T * p->HV * p->K * p->K * (p->K + p->V);
}

/* A recurrent kernel is the chunk machine in fp32 with one token a chunk. There gcum = g, e the
 * keys that erase,
 *
 *     w = b e exp(g)   u = b v   X = u - w S   S <- exp(g) S + k X   o = (scale q exp(g)) S + Aqk X
 *
 * with Aqk = scale q k', and for several keys that read one after another the solve with their
 * mask. Token by token (math.md b, i) it is E = v - e (exp(g) S), X = b E, S <- exp(g) S + k X, o =
 * scale q S. Each rounding of the latter has one of the former beside it, of no smaller absolute
 * value:
 *
 *     exp(g), b, norms of q, k   the same
 *     exp(g) S                   u |exp(g) S|           w: e exp(g), and S's own term of its sum
 *     e (exp(g) S), v - ..       gamma_K |e||exp(g) S|  w S, a sum of K terms, taken from u
 *     b E                        u |b E|                b in w and u
 *     exp(g) S + k X             2 u                    a sum of n + 1 products
 *     q S, S as rounded          gamma_K |q||S|         both sums of o: |S| is at most
 *                                                       |exp(g) S| + |k||X|
 *
 * gamma_n holds for sums in any order, fused or not. DPLR reads S before its decay; there e is its
 * factor over exp(g), which adds a rounding. M is the recurrence of the identity. The bound has the
 * product of factors exp(g) - k w. Their diagonal may cancel; there the rounding of k w stands for
 * that of products. The adjoint makes the same operations backwards. The row sum of dS o exp(g) S
 * in dg is that of dS, scale q do' and e dE, in three sums there. Ranks round the sent M, H and
 * states as the payload says, and multiply, as there. Results in a shorter format are rounded once
 * more. */
dp_design dp_token_design(const dp_design *recurrent) {
    dp_design d = dp_design_of(DP_BASE_FP32);
    d.chunk = 1;
    d.sending = recurrent->sending;
    return d;
}

/* Adds the last store of each sequence's state. */
static void store_states(const dp_problem *p, dp_format f, const double *S, double *bound) {
    const int64_t n = (int64_t)p->HV * p->K * p->V;
    DP_OWN double *more = dp_doubles(p->HV);
    for (int i = 0; S && bound && f != DP_FP64 && i < p->Nseq; i++) {
        double *off = bound + (int64_t)i * p->HV;
        for (int h = 0; h < p->HV; h++)
            more[h] = dp_stored_error(f, p->HV, p->K, p->V, S + i * n, off, h);
        for (int h = 0; h < p->HV; h++)
            off[h] += more[h];
    }
}

static void no_bound_where_it_overflowed(const dp_problem *p, dp_error_bound *b) {
    for (int i = 0; i < DP_NRESULTS; i++) {
        int64_t rows, width;
        dp_result_shape(p, i, &rows, &width);
        for (int64_t r = 0; b->row[i] && r < rows; r++)
            if (isnan(b->row[i][r])) b->row[i][r] = INFINITY;
    }
}

void dp_bound_widen(double *bound, const double *want, int64_t rows, int64_t width, double u,
                    double tiny) {
    for (int64_t r = 0; r < rows; r++)
        bound[r] +=
            u * (dp_norm_fro(width, want + r * width) + bound[r]) + sqrt((double)width) * tiny;
}

/* Results in a longer format than `bounded` get no addition. */
void dp_bounds_store(const dp_problem *p, const dp_design *bounded, const dp_design *design,
                     const double *const want[DP_NRESULTS], dp_error_bound *b) {
    for (int i = 0; i < DP_NRESULTS; i++) {
        const dp_format f = design->out[i];
        const double u = ldexp(1, -(int)dp_formats[f].bits),
                     tiny = f == DP_BF16 ? 0x1p-134 : 0x1p-150;
        int64_t rows, width;
        dp_result_shape(p, i, &rows, &width);
        if (!dp_leaves(i) || dp_formats[f].bits >= dp_formats[bounded->out[i]].bits) continue;
        if (b->row[i] && want[i]) dp_bound_widen(b->row[i], want[i], rows, width, u, tiny);
    }
    store_states(p, design->final_state, want[DP_RESULT_FINAL_STATE],
                 b->row[DP_RESULT_FINAL_STATE]);
    no_bound_where_it_overflowed(p, b);
}

/* Marks in first [T] with 1 every token that a chunk of `chunk` tokens begins with. */
static void mark_chunks(const dp_problem *p, int N, const unsigned char *first_of_call, int chunk,
                        unsigned char *first) {
    for (int i = 0; i < p->Nseq; i++)
        for (int64_t t = p->cu[i], n = 0; t < p->cu[i + 1]; t++, n++) {
            const int other_rank = N > 1 && t &&
                                   dp_own_part_of(p->own.kind, p->T, N, t) !=
                                       dp_own_part_of(p->own.kind, p->T, N, t - 1);
            if (other_rank || (first_of_call && first_of_call[t])) n = 0;
            first[t] = n % chunk == 0;
        }
}

void dp_bounds_keep(const dp_problem *p, int N, const unsigned char *first_of_call,
                    const dp_session *session, const dp_design *design, dp_error_bound *b) {
    const int own = design->state != dp_design_of(design->base).state;
    unsigned char *mark[3] = {dp_calloc((size_t)p->T + 1, 1), dp_calloc((size_t)p->Nseq, 1),
                              dp_calloc((size_t)p->Nseq, 1)};
    dp_stores at[3];
    int n = 0;
    if (first_of_call) dp_session_ended(session, p->cu, p->Nseq, mark[1]);
    const dp_format of_calls[2] = {session->kept, design->final_state};
    for (int i = 0; i < 2 && first_of_call; i++)
        if (of_calls[i] != DP_FP64)
            at[n++] = (dp_stores){of_calls[i], first_of_call, mark[1], 0, 0, 0};
    if (own) {
        mark_chunks(p, N, first_of_call, design->chunk ? design->chunk : 1, mark[0]);
        memset(mark[2], 1, (size_t)p->Nseq);
        at[n++] =
            (dp_stores){design->state, mark[0], mark[2], 1, !design->chunk, design->read_kept};
    }
    if (n) dp_store_bounds(p, N, design->sending, n, at, p->dout != NULL, b);
    for (int i = 0; i < 3; i++)
        free(mark[i]);
}

/* ---- bounds of all results: their cache ------------------------------------------------------ */

void dp_bound_bases_free(dp_bound_bases *w) {
    if (w->ready) dp_error_bounds_free(&w->of);
    for (int i = 0; i < w->n; i++) {
        dp_error_bound_free(&w->known[i]->bound);
        free(w->known[i]);
    }
    free(w->known);
}

/* n bytes of `what`, then the input errors: all that bounds depend on besides the problem. */
static void *with_raw_error(const void *what, size_t n, const dp_problem *p, const dp_raw_error *g,
                            size_t *size) {
    char *all = dp_alloc(1, n);
    memcpy(all, what, n);
    *size = n;
    for (int i = 0; g && i < DP_NQKV; i++) {
        const size_t each = sizeof(double), len = (size_t)dp_input_count(p, dp_qkv_input(i));
        const size_t own = g->of[i] ? len * each : 0;
        all = dp_realloc(all, *size + 1 + own);
        all[(*size)++] = g->of[i] != NULL;
        if (own) memcpy(all + *size, g->of[i], own);
        *size += own;
    }
    return all;
}

static dp_key key_of(const dp_sharding *sp, const dp_design *design, dp_format chain,
                     const dp_raw_error *raw) {
    const dp_design bounded = bound_design(design);
    struct {
        int32_t N, base, chain, backward;
        char design[DP_DESIGN_TEXT];
    } what = {sp->N, (int32_t)design->base, (int32_t)chain, sp->c->backward, ""};
    dp_design_text(&bounded, what.design);
    size_t size;
    DP_OWN char *all = with_raw_error(&what, sizeof what, &sp->c->p, raw, &size);
    if (sp->first_of_call) { /* cuts chunks */
        const size_t T = (size_t)sp->c->p.T;
        all = dp_realloc(all, size + T);
        memcpy(all + size, sp->first_of_call, T);
        size += T;
    }
    return dp_problem_key(&sp->c->p, all, size);
}

/* ---- making them ----------------------------------------------------------------------------- */

/* From a reference that serves no other design, in chunks of its length. A rank that has all tokens
 * of its heads computes as one rank does. */
static void of_own_reference(const dp_sharding *sp, const dp_design *design, dp_format chain,
                             const dp_raw_error *raw, dp_error_bound *out) {
    const int heads = design->sending.exchange == DP_EXCHANGE_HEADS, backward = sp->c->backward;
    const unsigned char *first_of_call = heads ? NULL : sp->first_of_call;
    dp_problem p = sp->c->p;
    dp_design d = *design;
    DP_FREED(dp_sim_free) dp_sim ref;
    if (heads) {
        p.own = (dp_owners){0};
        d.sending = (dp_sending){0};
    }
    dp_must(dp_sim_reference(&ref, &p, d.chunk, heads || first_of_call ? 1 : sp->N, first_of_call,
                             backward, NULL));
    dp_error_bounds_once(&ref, &d, chain, backward, raw, out);
    if (heads) dp_error_bound_spread(&p, sp->N, out);
}

/* The part that no chain format changes, of a plain design. */
static dp_error_bounds *ready(dp_sharding *sp, const dp_design *design, const dp_raw_error *raw,
                              dp_bound_bases *w) {
    if (!w->ready)
        dp_error_bounds_init(&w->of, dp_sharding_reference(sp), design, sp->c->backward, raw);
    w->ready = 1;
    return &w->of;
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

/* Are its bounds those of the base's default but for what it sends? */
static int is_plain(const dp_design *design) {
    const dp_design plain = dp_design_of(design->base);
    dp_design d = bound_design(design);
    d.sending = plain.sending;
    return dp_design_same(&d, &plain);
}

static void of_chunks(dp_sharding *sp, const dp_design *design, dp_format chain, dp_bound_bases *w,
                      dp_error_bound *out) {
    const dp_raw_error *raw = sp->step ? &sp->step->err : NULL;
    const dp_problem *p = &sp->c->p;
    const char *cache = sp->std->o->cache;
    const dp_key key = cache ? key_of(sp, design, chain, raw) : (dp_key){{0}};
    if (cache && dp_error_bound_load(cache, key, p, sp->N, sp->c->backward, raw != NULL, out))
        return;
    if (design->sending.exchange == DP_EXCHANGE_HEADS || !is_plain(design))
        of_own_reference(sp, design, chain, raw, out);
    else {
        dp_error_bounds *of = ready(sp, design, raw, w);
        of->sound.sending = of->probable.sending = design->sending;
        dp_error_bounds_run(of, chain, sp->c->backward, out);
    }
    if (cache) dp_error_bound_save(cache, key, p, sp->N, out);
}

static void of_pass(dp_sharding *sp, const dp_design *design, dp_format chain, dp_bound_bases *w,
                    dp_error_bound *out) {
    const int tokens = dp_tokens_are_bounded(design, &sp->c->p);
    const dp_design plain = tokens ? dp_token_design(design) : dp_design_of(design->base);
    if (tokens)
        dp_run_bounds(sp, &plain, chain, w, out);
    else
        of_chunks(sp, chunks_are_bounded(design, &sp->c->p) ? design : &plain, chain, w, out);
    store(sp, &plain, design, out);
}

void dp_run_bounds(dp_sharding *sp, const dp_design *design, dp_format chain, dp_bound_bases *w,
                   dp_error_bound *out) {
    const dp_design pass[2] = {dp_design_of_pass(design, 0), dp_design_of_pass(design, 1)};
    DP_FREED(dp_error_bound_free) dp_error_bound back = {0};
    of_pass(sp, &pass[0], chain, w, out);
    if (!sp->c->backward || dp_design_same(&pass[0], &pass[1])) return;
    of_pass(sp, &pass[1], chain, w, &back);
    dp_error_bound_swap_backward(out, &back);
}

/* ---- bounds of a run ------------------------------------------------------------------------- */

/* Unit roundoff of the design's own store of a result, which its bounds and draws have. For others
 * than o and the gradients of inputs: of its arithmetic. */
static double own_storage(const dp_design *d, dp_result_id field) {
    if (dp_leaves(field)) return ldexp(1, -(int)dp_formats[d->out[field]].bits);
    return d->base == DP_BASE_FP64 ? 0x1p-53 : 0x1p-24;
}

/* Only a format coarser than the base's own adds to bounds. */
static void widen_for_storage(const dp_sharding *sp, dp_known_bound *k,
                              const dp_stored_results *g) {
    for (int i = 0; i < DP_NRESULTS; i++) {
        const double u = g->u[i] > k->storage[i] ? g->u[i] : 0;
        int64_t rows, width;
        dp_result_shape(&sp->c->p, i, &rows, &width);
        if (k->bound.row[i] && g->r.out[i])
            dp_bound_widen(k->bound.row[i], sp->truth->field[i].hi, rows, width, u, g->tiny[i]);
    }
}

const dp_known_bound *dp_bounds_of_run(dp_sharding *sp, dp_bound_bases *w, const dp_run *r,
                                       const dp_stored_results *stored) {
    const dp_problem *p = &sp->c->p;
    for (int i = 0; i < w->n; i++)
        if (w->known[i]->chain == r->chain && dp_design_same(&w->known[i]->design, &r->design))
            return w->known[i];
    dp_known_bound *k = dp_alloc(1, sizeof *k);
    *k = (dp_known_bound){.design = r->design,
                          .chain = r->chain,
                          .derived = dp_bounds_are_derived(&r->design),
                          .by_tokens = dp_tokens_are_bounded(&r->design, p)};
    k->decides = k->by_tokens || chunks_are_bounded(&r->design, p);
    for (int i = 0; i < DP_NRESULTS; i++)
        k->storage[i] = own_storage(&r->design, i);
    dp_run_bounds(sp, &r->design, r->chain, w, &k->bound);
    if (stored) widen_for_storage(sp, k, stored);
    w->known = dp_realloc(w->known, sizeof *w->known * (size_t)(w->n + 1));
    return w->known[w->n++] = k;
}

/* ---- bounds of stages ------------------------------------------------------------------------ */

/* Is stage i there, and not one that ranks exchange? */
static int is_inner(double *const *stage, int i) {
    return stage[i] && dp_stage_tensors[i].kind != DP_PER_RANK;
}

static void make_one(dp_sharding *sp, dp_format chain, dp_bound_bases *w, int stage,
                     dp_stage_errors *x) {
    const size_t size = sizeof(double) * (size_t)x->rows[stage];
    DP_OWN double *bound = dp_error_bounds_stage(&w->of, chain, sp->c->backward, stage);
    DP_OWN double *rad =
        dp_error_bound_of_reference(&sp->fp64, w->of.sound.ref, sp->c->backward, stage);
    memcpy(x->bound[stage], bound, size);
    memcpy(x->rad[stage], rad, size);
}

void dp_stage_errors_make(dp_sharding *sp, const dp_run *run, double *const *stage,
                          dp_bound_bases *w, dp_stage_errors *x) {
    enum { SETTINGS = 5, STAGE_ERRORS = 0x73746167 /* no other key of this length has it */ };
    const char *cache = sp->std->o->cache;
    int32_t what[SETTINGS + DP_NSTAGE_TENSORS] = {sp->N, run->base, run->chain, sp->c->backward,
                                                  STAGE_ERRORS};
    dp_part part[2 * DP_NSTAGE_TENSORS];
    int n = 0;
    *x = (dp_stage_errors){.rows = {0}};
    for (int i = 0; i < DP_NSTAGE_TENSORS; i++) {
        if (!is_inner(stage, i)) continue;
        dp_stage_tensor_rows(&sp->c->p, sp->N, i, &x->rows[i], &x->width[i]);
        what[SETTINGS + i] = 1;
        x->bound[i] = dp_doubles(x->rows[i]);
        x->rad[i] = dp_doubles(x->rows[i]);
        part[n++] = (dp_part){x->bound[i], sizeof(double) * (size_t)x->rows[i]};
        part[n++] = (dp_part){x->rad[i], sizeof(double) * (size_t)x->rows[i]};
    }
    const dp_key key = cache ? dp_problem_key(&sp->c->p, what, sizeof what) : (dp_key){{0}};
    if (!n || (cache && dp_cache_load(cache, DP_CACHE_STAGES, key, part, n))) return;
    const dp_design plain = dp_design_of(run->base);
    ready(sp, &plain, NULL, w);
    for (int i = 0; i < DP_NSTAGE_TENSORS; i++)
        if (is_inner(stage, i)) make_one(sp, run->chain, w, i, x);
    if (cache) dp_cache_save(cache, DP_CACHE_STAGES, key, part, n);
}

void dp_stage_errors_free(dp_stage_errors *x) {
    for (int i = 0; i < DP_NSTAGE_TENSORS; i++) {
        free(x->bound[i]);
        free(x->rad[i]);
    }
}
