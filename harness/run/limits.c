/* A run's limits by its design (limits.h): claim and allowance, then bounds and their cache. Bounds
 * of chunks of one token hold for kernels that have no chunks. */
#include "limits.h"
#include "harness/bound/store_bound.h"
#include "ref/arithmetic/elementary.h"
#include "ref/arithmetic/norms.h"
#include "ref/vocabulary/stored.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

/* ---- claim, allowance, whether bounds are derived -------------------------------------------- */

/* The kind of subject, and its allowance for errors that draws cannot show (reports/verdicts.md).
 * Kinds: the pipeline that was drawn; the same with other orders of summation; kernels that declare
 * their design; others. */
typedef enum { DRAWN, OTHER_SUMS, DECLARED, UNDECLARED, NWHO } who;
static const dp_allowance ALLOWANCE[NWHO][2] = {
    /* arithmetic fp32 or fp64; bf16 */
    [DRAWN] = {{1.2, 1.2, 0.1}, {1.2, 1.2, 0.1}},
    [OTHER_SUMS] = {{1.5, 1.5, 0.15}, {1.4, 1.4, 0.1}},
    [DECLARED] = {{2.1, 2.1, 0.3}, {1.25, 1.4, 0.15}},
    [UNDECLARED] = {{2.1, 4, 0.6}, {1.25, 2, 0.3}},
};

static who who_computes(const dp_run *r) {
    /* one that names a format of its own for factors (fp16) says how it rounds, if not in what
     * order */
    const int says_factors = r->design.factors != dp_design_of(r->base).factors;
    if (r->undeclared && !says_factors) return UNDECLARED;
    if (r->other_design || r->backend == DP_BACKEND_LAPACK)
        return DECLARED; /* its solves, too, have another order */
    return dp_backends[r->backend].simulated && r->base != DP_BASE_FP64 ? DRAWN : OTHER_SUMS;
}

/* Powers that make an inverse cancel, in fp32 by more than they do in another order. */
#define PRODUCT_MORE 1.15

dp_allowance dp_run_allowance(const dp_run *r) {
    dp_allowance a = ALLOWANCE[who_computes(r)][r->base == DP_BASE_BF16];
    if (r->design.product && r->base != DP_BASE_BF16) {
        a.factor *= PRODUCT_MORE;
        a.local *= PRODUCT_MORE;
    }
    return a;
}

/* A short state makes errors from this share of its unit roundoff on. Measured: e4m3 2.3% of a
 * state, bf16 0.17%, fp16 0.02%. */
#define FROM 0.125

/* Adds to a the allowance of units whose error a short state makes. kept: the format in which a
 * session keeps its state. */
static void allow_stored(const dp_run *r, dp_format kept, int field, dp_allowance *a) {
    const dp_format f[] = {kept, r->design.final_state, r->design.state};
    const int has_part = field != DP_RESULT_DV && field != DP_RESULT_DWRITE &&
                         field != DP_RESULT_DVALUE3 && field != DP_RESULT_DVALUE4 &&
                         field != DP_RESULT_DS0; /* store_bound.h */
    double u = 0;
    for (int i = 0; i < 3; i++)
        if (dp_formats[f[i]].bits <= 11) u = fmax(u, ldexp(1, -(int)dp_formats[f[i]].bits));
    if (!u || !has_part || r->base == DP_BASE_BF16) return;
    const dp_allowance *as_bf16 = &ALLOWANCE[who_computes(r)][1];
    a->stored = FROM * u;
    a->stored_factor = fmin(a->factor, as_bf16->factor);
    a->stored_local = fmin(a->local, as_bf16->local);
}

double dp_state_far(const dp_design *d) {
    const dp_format f[] = {d->final_state, d->state};
    double far = dp_formats[d->factors].bits < 24 ? 0.05 : 0.005;
    for (int i = 0; i < 2; i++)
        far = fmax(far, ldexp(2, -(int)dp_formats[f[i]].bits));
    return far;
}

/* The words of a design that bounds read, all else the default of its base. Designs that agree in
 * them have the same bounds. */
static dp_design bound_design(const dp_design *design) {
    dp_design d = dp_design_of(design->base);
    d.chunk = design->chunk;
    d.sending = design->sending;
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

int dp_run_results_bounded(const dp_run *r, const dp_problem *p) {
    return chunks_are_bounded(&r->design, p) || dp_tokens_are_bounded(&r->design, p);
}

double dp_base_roundoff(dp_base b) { return b == DP_BASE_FP64 ? 0x1p-53 : 0x1p-24; }

/* The smallest normal number of the base's arithmetic, times K. */
static double smallest(dp_base b, int K) { return K * (b == DP_BASE_FP64 ? 0x1p-1022 : 0x1p-126); }

double dp_own_storage(const dp_design *d, dp_result_id field) {
    if (dp_leaves(field)) return ldexp(1, -(int)dp_formats[d->out[field]].bits);
    return dp_base_roundoff(d->base);
}

#define ROUNDING_RMS 0.42466 /* sqrt(1/(8 ln 2)), over u, of log-uniform significands (bits.h) */
double dp_run_storing(const dp_run *r, double u) {
    return ROUNDING_RMS * u * ALLOWANCE[DRAWN][0].factor / dp_run_allowance(r).factor;
}

dp_compare_in dp_run_comparing(const dp_run *r, const dp_sharding *sp, int field, double u,
                               double tiny) {
    const dp_session *session = &sp->c->session;
    dp_compare_in in = {.N = sp->N,
                        .allowance = dp_run_allowance(r),
                        .unit = dp_base_roundoff(r->base),
                        .store = dp_run_storing(r, u),
                        .tiny = dp_hypot(smallest(r->base, sp->c->p.K), tiny)};
    if (field >= 0) allow_stored(r, session->text ? session->kept : DP_FP64, field, &in.allowance);
    return in;
}

double dp_run_chain_rounding(const dp_run *r) {
    const dp_format_info *f = &dp_formats[r->chain];
    return r->has_chain ? fmax(f->u_op, f->u_store) / sqrt(12) : 0;
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
    double *more = dp_doubles(p->HV);
    for (int i = 0; S && bound && f != DP_FP64 && i < p->Nseq; i++) {
        double *off = bound + (int64_t)i * p->HV;
        for (int h = 0; h < p->HV; h++)
            more[h] = dp_stored_error(f, p->HV, p->K, p->V, S + i * n, off, h);
        for (int h = 0; h < p->HV; h++)
            off[h] += more[h];
    }
    free(more);
}

static void no_bound_where_it_overflowed(const dp_problem *p, dp_error_bound *b) {
    for (int i = 0; i < DP_NRESULTS; i++) {
        int64_t rows, width;
        dp_result_shape(p, i, &rows, &width);
        for (int64_t r = 0; b->row[i] && r < rows; r++)
            if (isnan(b->row[i][r])) b->row[i][r] = INFINITY;
    }
}

/* x stored is off by u |x|, |x| <= |want| + bound, or by half the spacing of its subnormals.
 * Results in a longer format than `bounded` get no addition. */
void dp_bounds_store(const dp_problem *p, const dp_design *bounded, const dp_design *design,
                     const double *const want[DP_NRESULTS], dp_error_bound *b) {
    for (int i = 0; i < DP_NRESULTS; i++) {
        const dp_format f = design->out[i];
        const double u = ldexp(1, -(int)dp_formats[f].bits),
                     tiny = f == DP_BF16 ? 0x1p-134 : 0x1p-150;
        int64_t rows, width;
        dp_result_shape(p, i, &rows, &width);
        if (!dp_leaves(i) || dp_formats[f].bits >= dp_formats[bounded->out[i]].bits) continue;
        for (int64_t r = 0; b->row[i] && want[i] && r < rows; r++)
            b->row[i][r] += u * (dp_norm_fro(width, want[i] + r * width) + b->row[i][r]) +
                            sqrt((double)width) * tiny;
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

/* ---- bounds of all results, and their cache -------------------------------------------------- */

void dp_bound_bases_free(dp_bound_bases *w) {
    if (w->ready) dp_error_bounds_free(&w->of);
    if (w->bounded) dp_error_bound_free(&w->bound);
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
    const dp_design bounded = bound_design(design);
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

/* ---- making them ----------------------------------------------------------------------------- */

/* From a reference that serves no other design; freed here. */
static void of_reference(dp_sim *ref, const dp_design *design, dp_format chain,
                         const dp_raw_error *raw, int backward, dp_error_bound *out) {
    dp_error_bounds_once(ref, design, chain, backward, raw, out);
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
    p.own = (dp_owners){0};
    exact.chunk = design->chunk;
    alone.sending = exact.sending;
    dp_must(dp_sim_open(&ref, &p, &exact, 1, NULL, NULL));
    dp_sim_run(&ref, DP_FP64, DP_EXCHANGE_ALLGATHER, backward);
    of_reference(&ref, &alone, chain, raw, backward, out);
    dp_error_bound_spread(&p, sp->N, out);
}

static void of_plain_chunks(dp_sharding *sp, const dp_design *design, dp_format chain,
                            const dp_raw_error *raw, dp_bound_bases *w, dp_error_bound *out) {
    const int backward = sp->c->backward;
    if (!w->ready) dp_error_bounds_init(&w->of, dp_sharding_reference(sp), design, backward, raw);
    w->ready = 1;
    w->of.sound.sending = w->of.probable.sending = design->sending;
    dp_error_bounds_run(&w->of, chain, backward, out);
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
    if (design->sending.exchange == DP_EXCHANGE_HEADS)
        of_one_rank(sp, design, chain, raw, out);
    else if (!is_plain(design))
        of_other_chunks(sp, design, chain, raw, out);
    else
        of_plain_chunks(sp, design, chain, raw, w, out);
    if (cache) dp_error_bound_save(cache, key, p, sp->N, out);
}

void dp_run_bounds(dp_sharding *sp, const dp_design *design, dp_format chain, dp_bound_bases *w,
                   dp_error_bound *out) {
    const dp_design plain = dp_design_of(design->base);
    if (dp_tokens_are_bounded(design, &sp->c->p)) {
        of_tokens(sp, design, chain, w, out);
        return;
    }
    of_chunks(sp, chunks_are_bounded(design, &sp->c->p) ? design : &plain, chain, w, out);
    store(sp, &plain, design, out);
}
