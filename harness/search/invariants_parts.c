/* Checks by other packings, factors and numbers of ranks (invariants_work.h). */
#include "invariants_work.h"
#include "ref/inputs/inputs.h"
#include "ref/vocabulary/recurrence.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* The problem itself when it is packed, else cut in three. */
static dp_problem packed_of(const dp_problem *p, int backward) {
    dp_problem c = dp_check_copy(p, backward);
    if (p->Nseq > 1 || p->T < 8) return c;
    const int64_t n = (int64_t)p->HV * p->K * p->V;
    free(c.cu);
    c.Nseq = 3;
    c.cu = dp_calloc(4, sizeof *c.cu);
    c.cu[1] = p->T / 3;
    c.cu[2] = p->T / 3 + p->T / 8;
    c.cu[3] = p->T;
    for (int i = 0; i < DP_NINPUTS; i++) {
        if (dp_input_fields[i].kind != DP_OF_SEQUENCES) continue;
        double *x = c.in[i], *y = x ? dp_doubles_of(p, 3 * n) : NULL;
        for (int s = 0; x && s < 3; s++)
            dp_memory_move(p->memory, y + s * n, x, n);
        dp_free_of(p, x);
        c.in[i] = y;
    }
    return c;
}

static int not_sums(DP_UNUSED const void *ctx, int f, DP_UNUSED int64_t token, DP_UNUSED int head,
                    DP_UNUSED int seq) {
    return dp_result_fields[f].kind != DP_OF_HEADS;
}

/* At most so many tokens of a sequence, with its states, as a problem of their own. */
static dp_problem first_tokens(const dp_problem *p, int seq, int64_t most, int backward) {
    const int64_t a = p->cu[seq], b = p->cu[seq + 1], state = (int64_t)seq * p->HV * p->K * p->V;
    return dp_check_slice(p, a, b - a < most ? b : a + most, p->s0 ? p->s0 + state : NULL,
                          p->dstate ? p->dstate + state : NULL, backward);
}

dp_status dp_check_packed(dp_check_work *w) {
    DP_FREED(dp_problem_free) dp_problem all = packed_of(w->p, w->backward);
    DP_FREED(dp_check_outcome_free) dp_check_outcome whole;
    dp_check_work v = *w;
    int elsewhere = 0;
    v.p = &all;
    v.N = 1;
    dp_status st = dp_check_run_problem(w->s, &all, 1, w->backward, &whole, w->e);
    for (int i = 0; i < all.Nseq && !st && w->c->verdict == DP_PASS; i++) {
        if (all.cu[i + 1] == all.cu[i]) continue;
        dp_problem one = first_tokens(&all, i, all.T, w->backward);
        dp_check_outcome o;
        st = dp_check_run_problem(w->s, &one, 1, w->backward, &o, w->e);
        if (!st && dp_check_cut(&o, &whole))
            elsewhere = 1;
        else if (!st)
            dp_check_same(&v, &(dp_check_pair){.p = &one,
                                               .got = &o.r,
                                               .want = &whole.r,
                                               .t0 = all.cu[i],
                                               .seq0 = i,
                                               .factor = 1,
                                               .keep = not_sums});
        if (!st) dp_check_outcome_free(&o);
        dp_problem_free(&one);
    }
    if (elsewhere && w->c->verdict == DP_PASS && !w->c->compared) dp_check_skip(w, DP_CHECK_CUT);
    return st;
}

/* ---- another order --------------------------------------------------------------------------- */

/* The sequence that comes to stand at place i. */
static int before(const dp_problem *p, int i) { return (i + p->Nseq - 1) % p->Nseq; }

/* The last sequence of p before all others: each has another place, and other tokens before it. */
static dp_problem turned_round(const dp_problem *p, int backward) {
    dp_problem c = dp_check_copy(p, backward);
    for (int i = 0; i < p->Nseq; i++)
        c.cu[i + 1] = c.cu[i] + p->cu[before(p, i) + 1] - p->cu[before(p, i)];
    for (int i = 0; i < DP_NINPUTS; i++) {
        const dp_row_kind kind = dp_input_fields[i].kind;
        const double *from = dp_input_of(p, i);
        const int64_t width = kind == DP_OF_TOKENS      ? dp_input_width(p, i)
                              : kind == DP_OF_SEQUENCES ? dp_input_count(p, i) / p->Nseq
                                                        : 0;
        double *to = from && width ? dp_check_own(&c, i) : NULL;
        for (int n = 0; to && n < p->Nseq; n++) {
            const int m = before(p, n), tokens = kind == DP_OF_TOKENS;
            const int64_t at = tokens ? c.cu[n] : n, was = tokens ? p->cu[m] : m,
                          rows = tokens ? p->cu[m + 1] - p->cu[m] : 1;
            dp_memory_move(p->memory, to + at * width, from + was * width, rows * width);
        }
    }
    return c;
}

/* Results of one sequence of a run, as they lie in those of all. */
static dp_result results_of(const dp_problem *p, dp_result *r, int seq) {
    dp_result part = *r;
    for (int f = 0; f < DP_NRESULTS; f++) {
        const dp_row_kind kind = dp_result_fields[f].kind;
        double **x = &part.out[f];
        const int64_t n = dp_result_count(p, f);
        if (*x && kind == DP_OF_TOKENS) *x += n / p->T * p->cu[seq];
        if (*x && kind == DP_OF_SEQUENCES) *x += n / p->Nseq * seq;
    }
    return part;
}

/* Sequence i of `all`, whose run is `whole`, and the same one in its other place. */
static void hold_sequence(dp_check_work *w, int i, dp_result *whole, const dp_problem *turned,
                          dp_result *got) {
    const dp_problem *all = w->p;
    int64_t cu[] = {0, all->cu[i + 1] - all->cu[i]};
    dp_problem one = *all;
    one.T = cu[1];
    one.Nseq = 1;
    one.cu = cu;
    const dp_result part = results_of(turned, got, (i + 1) % all->Nseq);
    dp_check_same(w, &(dp_check_pair){.p = &one,
                                      .got = &part,
                                      .want = whole,
                                      .t0 = all->cu[i],
                                      .seq0 = i,
                                      .factor = 1,
                                      .keep = not_sums});
}

dp_status dp_check_sequence_order(dp_check_work *w) {
    dp_problem all = packed_of(w->p, w->backward), turned = turned_round(&all, w->backward);
    dp_check_outcome whole, other = {0};
    dp_check_work v = *w;
    v.p = &all;
    v.N = 1;
    dp_status st = DP_OK;
    if (all.Nseq < 2)
        dp_check_skip(w, "too few tokens for two sequences");
    else if (!(st = dp_check_run_problem(w->s, &all, 1, w->backward, &whole, w->e))) {
        st = dp_check_run_problem(w->s, &turned, 1, w->backward, &other, w->e);
        if (!st && dp_check_cut(&whole, &other)) dp_check_skip(w, DP_CHECK_CUT);
        for (int i = 0; i < all.Nseq && !st; i++)
            hold_sequence(&v, i, &whole.r, &turned, &other.r);
        dp_check_outcome_free(&whole);
        dp_check_outcome_free(&other);
    }
    dp_problem_free(&turned);
    dp_problem_free(&all);
    return st;
}

/* ---- heads elsewhere ------------------------------------------------------------------------- */

/* `count` heads of [outer][heads][inner] from the one at `first` on; the first follows the last. */
typedef struct {
    int64_t outer, inner;
    int heads, first, count;
} heads_taken;

enum { PIECE_TAKEN = 1 << 22 }; /* numbers that pass through this process at a time */

static double *take(const dp_problem *p, const double *x, heads_taken h) {
    const int64_t from = h.heads * h.inner, to = h.count * h.inner,
                  most = from < PIECE_TAKEN ? PIECE_TAKEN / from : 1;
    double *y = dp_doubles_of(p, h.outer * to);
    DP_OWN double *all = dp_doubles(most * from), *some = dp_doubles(most * to);
    for (int64_t at = 0; at < h.outer; at += most) {
        const int64_t n = h.outer - at < most ? h.outer - at : most;
        dp_memory_get(p->memory, all, x + at * from, n * from);
        for (int64_t i = 0; i < n * h.count; i++)
            memcpy(some + i * h.inner,
                   all + i / h.count * from + (h.first + i % h.count) % h.heads * h.inner,
                   sizeof *some * (size_t)h.inner);
        dp_memory_put(p->memory, y + at * to, some, n * to);
    }
    return y;
}

/* Heads of an array that belong to the last key head. If there is one key head: to the last value
 * head, 0 where the array has one for all value heads. */
static int of_last(const dp_problem *p, int heads) {
    return (p->H > 1 ? dp_G(p) : 1) * heads / p->HV;
}

/* The last ones before all others, or alone. */
static dp_problem last_heads_first(const dp_problem *p, int alone, int backward) {
    dp_problem c = *p;
    if (alone) {
        c.HV = of_last(p, p->HV);
        c.H = 1;
    }
    for (int i = 0; i < DP_NINPUTS; i++) {
        const double *x = dp_input_of(p, i);
        const int n = dp_input_heads(p, i), last = of_last(p, n);
        const int64_t width = dp_input_width(p, i);
        const heads_taken h = {dp_input_count(p, i) / width, width / n, n, n - last,
                               alone && last ? last : n};
        c.in[i] = x && (backward || !dp_input_fields[i].backward) ? take(p, x, h) : NULL;
    }
    c.cu = dp_cu_copy(p);
    return c;
}

/* Results, in the order of p, of a run in which the last heads are first. alone: those that p has
 * of the last heads. Without sums over value heads, whose order is another. */
static dp_result results_of_heads(const dp_problem *p, const dp_result *r, int alone) {
    dp_result out = {.memory = r->memory};
    for (int f = 0; f < DP_NRESULTS; f++) {
        const double *x = r->out[f];
        const int n = dp_result_heads(p, f), last = of_last(p, n);
        const dp_row_kind kind = dp_result_fields[f].kind;
        const int64_t outer = kind == DP_OF_TOKENS ? p->T : kind == DP_OF_SEQUENCES ? p->Nseq : 1;
        int64_t rows, width;
        dp_result_shape(p, f, &rows, &width);
        const heads_taken h = {outer, rows * width / outer / n, n, alone ? n - last : last,
                               alone ? last : n};
        out.out[f] = x && last ? take(p, x, h) : NULL;
    }
    return out;
}

static dp_status check_alone(dp_check_work *w) {
    DP_FREED(dp_problem_free) dp_problem one = last_heads_first(w->p, 1, w->backward);
    DP_FREED(dp_check_outcome_free) dp_check_outcome o = {0};
    dp_check_subject s = *w->s;
    dp_check_work v = *w;
    s.bitwise = 0;
    v.s = &s;
    v.p = &one;
    const dp_status st = dp_check_run_problem(&s, &one, w->N, w->backward, &o, w->e);
    if ((st == DP_EINPUT || st == DP_EDEVICE) && s.library) { /* nobody said that it takes these */
        snprintf(w->c->why, sizeof w->c->why, "not alone: %.300s", w->e->msg);
        *w->e = (dp_err){0};
        return DP_OK;
    }
    if (st) return st;
    DP_FREED(dp_result_free) dp_result want = results_of_heads(w->p, &w->base->r, 1);
    dp_check_same(&v, &(dp_check_pair){.p = &one, .got = &o.r, .want = &want, .factor = 1});
    dp_check_say(w, ", where the last of %d is alone", w->p->HV);
    return DP_OK;
}

dp_status dp_check_head_order(dp_check_work *w) {
    const int device = !w->s->library && !dp_backends[w->s->backend].simulated;
    if (w->p->HV < 2) return dp_check_skip(w, "one head");
    DP_FREED(dp_problem_free) dp_problem p = last_heads_first(w->p, 0, w->backward);
    DP_FREED(dp_check_outcome_free) dp_check_outcome o = {0};
    const dp_status st = dp_check_run_problem(w->s, &p, w->N, w->backward, &o, w->e);
    if (st) return st;
    DP_FREED(dp_result_free) dp_result got = results_of_heads(w->p, &o.r, 0);
    dp_check_same(w, &(dp_check_pair){.p = w->p, .got = &got, .want = &w->base->r, .factor = 1});
    dp_check_say(w, ", where the last of %d comes first", w->p->HV);
    const int more = !device && w->s->run.merge != DP_EXCHANGE_HEADS && w->c->verdict == DP_PASS;
    return more ? check_alone(w) : DP_OK;
}

/* ---- a prefix -------------------------------------------------------------------------------- */

/* All results but one are those of the whole, from its token t0 on. */
static void same_but(dp_check_work *w, const dp_problem *p, const dp_result *got,
                     const dp_result *want, int64_t t0, int except) {
    for (int f = 0; f < DP_NRESULTS; f++)
        if (f != except)
            dp_check_same_field(
                w, f,
                &(dp_check_pair){
                    .p = p, .got = got, .want = want, .t0 = t0, .factor = 1, .keep = not_sums});
}

/* A sequence, its tokens before `mid` and those from there on. */
typedef struct {
    const dp_problem *p;
    int64_t a, mid, b;
    const double *s0, *dstate;
} cut_sequence;

/* The first sequence with more than one chunk, cut at a chunk in its middle; 0: there is none. */
static int cut_in_the_middle(const dp_problem *p, cut_sequence *x) {
    const int64_t n = (int64_t)p->HV * p->K * p->V;
    for (int i = 0; i < p->Nseq; i++) {
        const int64_t a = p->cu[i], b = p->cu[i + 1];
        if (b - a <= DP_CHUNK) continue;
        *x = (cut_sequence){.p = p,
                            .a = a,
                            .mid = a + ((b - a - 1) / DP_CHUNK + 1) / 2 * DP_CHUNK,
                            .b = b,
                            .s0 = p->s0 ? p->s0 + i * n : NULL,
                            .dstate = p->dstate ? p->dstate + i * n : NULL};
        return 1;
    }
    return 0;
}

/* The later part from the final state of the earlier one. Then the earlier one from the gradient of
 * the later one's initial state. */
static dp_status check_parts(dp_check_work *w, const cut_sequence *x, dp_problem *early,
                             const double *state, const dp_result *whole) {
    dp_problem late = dp_check_slice(x->p, x->mid, x->b, state, x->dstate, w->backward);
    dp_check_outcome second, back;
    dp_status st = dp_check_run_problem(w->s, &late, 1, w->backward, &second, w->e);
    if (!st) {
        same_but(w, &late, &second.r, whole, x->mid - x->a, DP_RESULT_DS0);
        if (second.r.ds0 && w->backward) {
            early->dstate = dp_copy_of(early, second.r.ds0, (int64_t)late.HV * late.K * late.V);
            st = dp_check_run_problem(w->s, early, 1, 1, &back, w->e);
            if (!st) same_but(w, early, &back.r, whole, 0, DP_RESULT_FINAL_STATE);
            if (!st) dp_check_outcome_free(&back);
        }
        dp_check_outcome_free(&second);
    }
    dp_problem_free(&late);
    return st;
}

dp_status dp_check_prefix(dp_check_work *w) {
    cut_sequence x;
    if (!cut_in_the_middle(w->p, &x)) return dp_check_skip(w, "no sequence of more than one chunk");
    if (dp_has_halo(w->p))
        return dp_check_skip(w, "its tokens need more of those before them than the state");
    const int along = dp_reads_along(w->p); /* then o needs gradients */
    if (!dp_backends[w->s->backend].simulated && !along) w->backward = 0;
    DP_FREED(dp_problem_free)
    dp_problem all = dp_check_slice(x.p, x.a, x.b, x.s0, x.dstate, w->backward),
               early = dp_check_slice(x.p, x.a, x.mid, x.s0, NULL, w->backward);
    DP_FREED(dp_check_outcome_free) dp_check_outcome whole = {0}, first = {0};
    dp_check_work v = *w;
    v.p = &all;
    v.N = 1;
    dp_status st = dp_check_run_problem(w->s, &all, 1, w->backward, &whole, w->e);
    if (!st) st = dp_check_run_problem(w->s, &early, 1, along, &first, w->e);
    if (st) return st;
    if (dp_check_cut(&whole, &first)) return dp_check_skip(w, DP_CHECK_CUT);
    if (!first.r.final_state) return dp_check_skip(w, "it does not write final_state");
    return check_parts(&v, &x, &early, first.r.final_state, &whole.r);
}

static void times(dp_problem *p, int i, double c) {
    double *x = dp_check_own(p, i);
    const int64_t n = dp_input_count(p, i);
    if (x && p->memory) {
        p->memory->times(x, n, c);
        return;
    }
#pragma omp parallel for if (n > 1 << 22)
    for (int64_t z = 0; z < (x ? n : 0); z++)
        x[z] *= c;
}

/* Inputs [n] times c: results times factor. */
dp_status dp_check_factor(dp_check_work *w, const int *input, int n, double c,
                          const double factor[DP_NRESULTS], double small) {
    dp_problem p = dp_check_copy(w->p, w->backward);
    for (int i = 0; i < n; i++)
        times(&p, input[i], c);
    const dp_check_subject s = dp_check_called_before(w);
    const dp_status st = dp_check_changed(w, &s, &p, factor, small, NULL, NULL);
    if (s.before) dp_check_say(w, ", called with the problem itself before");
    return st;
}

/* The shape and packing of the problem with inputs on which nothing rounds; why it has none, or
 * NULL. */
static const char *exact_inputs(const dp_problem *p, int backward, dp_problem *x) {
    if (p->K % p->R || p->K % 4) return "K is no multiple of 4 and of R: no exact inputs";
    if (dp_inputs_exact_refuses(p)) return "these rows have no exact inputs";
    *x = *p;
    x->gate = DP_GATE_LOG;
    x->beta_form = DP_BETA_PLAIN;
    x->l2norm = 0;
    x->scale = 0.25;
    x->A_log = x->dt_bias = x->s0 = x->dout = x->dstate = NULL;
    x->cu = dp_cu_copy(p);
    dp_problem_alloc(x);
    if (p->s0) x->s0 = dp_doubles_of(p, dp_input_count(p, DP_INPUT_S0));
    if (backward) x->dout = dp_doubles_of(p, dp_input_count(p, DP_INPUT_DO));
    const dp_inputs_spec s = {
        .seed = 2, .dtype = DP_BF16, .keys = DP_KEYS_EXACT, .s0_scale = p->s0 ? 1 : 0};
    dp_inputs_fill_exact(x, &s);
    if (backward) dp_inputs_fill_exact_gradients(x, &s);
    return NULL;
}

dp_status dp_check_ranks(dp_check_work *w, int transpose) {
    dp_problem p;
    DP_FREED(dp_check_outcome_free) dp_check_outcome one = {0}, many = {0};
    if (w->N < 2) return dp_check_skip(w, "one rank");
    const char *none = exact_inputs(w->p, w->backward, &p);
    if (none) return dp_check_skip(w, none);
    dp_check_work v = *w;
    v.p = &p;
    dp_status st = dp_check_run_problem(w->s, &p, w->N, w->backward, &many, w->e);
    if (!st && !transpose) st = dp_check_run_problem(w->s, &p, 1, w->backward, &one, w->e);
    if (!st && !transpose)
        dp_check_same(&v, &(dp_check_pair){.p = &p, .got = &many.r, .want = &one.r, .factor = 1});
    for (int i = 0; transpose && !st && i < many.n; i++) {
        const int K = p.K;
        dp_context c; /* M is of the last local sub-sequence, dM of the first */
        if ((st = dp_context_build(p.cu, p.Nseq, w->N, i / p.HV, &c, w->e))) break;
        const int parts = c.nlocal;
        dp_context_free(&c);
        if (parts > 1) continue;
        for (int x = 0;
             many.M && many.dM && many.M[i] && many.dM[i] && x < K * K && w->c->verdict != DP_FAIL;
             x++) {
            const double a = many.dM[i][x], b = many.M[i][(int64_t)(x % K) * K + x / K];
            w->c->compared++;
            if (a == b) continue;
            w->c->verdict = DP_FAIL;
            snprintf(w->c->why, sizeof w->c->why,
                     "dM: rank %d, head %d, entry (%d, %d): %.9g, M' has %.9g", i / p.HV, i % p.HV,
                     x / K, x % K, a, b);
        }
    }
    if (!st && transpose && !w->c->compared)
        dp_check_skip(w, dp_backends[w->s->backend].simulated && w->backward
                             ? "no rank has both M and dM"
                             : "the subject gives no M and dM");
    dp_problem_free(&p);
    return st;
}

dp_status dp_check_exact_cp(dp_check_work *w) {
    dp_problem one = *w->p, many = *w->p;
    DP_FREED(dp_check_outcome_free) dp_check_outcome want = {0}, got = {0};
    if (w->s->library || !dp_backends[w->s->backend].owns)
        return dp_check_skip(w, "it cannot be told who owns which tokens");
    if (w->N < 2) return dp_check_skip(w, "one rank");
    one.own = (dp_owners){DP_OWN_GRID, 1};
    many.own = (dp_owners){DP_OWN_GRID, w->N};
    const int parts = dp_own_parts(DP_OWN_GRID, one.T, 1);
    dp_check_work v = *w;
    v.p = &many;
    dp_status st = dp_check_run_problem(w->s, &one, parts, w->backward, &want, w->e);
    if (st == DP_EINPUT && dp_has_halo(w->p)) { /* a backend's parts may not take such rows */
        st = dp_check_skip(w, w->e->msg);
        *w->e = (dp_err){0};
        return st;
    }
    if (!st) st = dp_check_run_problem(w->s, &many, parts, w->backward, &got, w->e);
    if (!st)
        dp_check_same(&v,
                      &(dp_check_pair){.p = &many, .got = &got.r, .want = &want.r, .factor = 1});
    return st;
}

/* ---- within both bounds ---------------------------------------------------------------------- */

/* A result in memory of this process, to be freed. */
static double *at_hand(const dp_result *r, int f, int64_t n) {
    const double *x = r->out[f];
    double *y = x ? dp_doubles(n) : NULL;
    if (x) dp_memory_get(r->memory, y, x, n);
    return y;
}

typedef struct {
    double top;   /* largest difference over the sum of both bounds */
    int64_t left; /* rows whose bound overflowed, which are not compared */
} held;

/* Each row of the problem itself and of another run of it within the sum of both bounds; who: what
 * differs between them. */
static void hold_rows(dp_check_work *w, int f, const dp_result *one, const double *bound_one,
                      const double *bound_many, const char *who, held *all) {
    int64_t rows, width;
    dp_result_shape(w->p, f, &rows, &width);
    DP_OWN double *x = at_hand(one, f, rows * width), *y = at_hand(&w->base->r, f, rows * width);
    for (int64_t r = 0; x && y && bound_one && bound_many && r < rows; r++) {
        double d2 = 0;
        for (int64_t i = r * width; i < (r + 1) * width; i++)
            d2 += (x[i] - y[i]) * (x[i] - y[i]);
        const double limit = bound_one[r] + bound_many[r];
        if (!isfinite(limit)) {
            all->left++;
            continue;
        }
        w->c->compared += width;
        if (sqrt(d2) <= limit || w->c->verdict == DP_FAIL) {
            if (sqrt(d2) > all->top * limit) all->top = sqrt(d2) / limit;
            continue;
        }
        char at[96];
        dp_check_row_text(w, f, r, at, sizeof at);
        w->c->verdict = DP_FAIL;
        snprintf(w->c->why, sizeof w->c->why, "%s: %s: %s differ by %.3g, both bounds allow %.3g",
                 dp_result_fields[f].name, at, who, sqrt(d2), limit);
    }
}

static void say_held(dp_check_work *w, const held *all) {
    char left[64] = "";
    if (w->c->verdict != DP_PASS) return;
    if (all->left)
        snprintf(left, sizeof left, "%lld rows have no bound: it overflowed", (long long)all->left);
    if (!w->c->compared && all->left) {
        dp_check_skip(w, left);
        return;
    }
    w->c->within_bounds = all->top > 0;
    snprintf(w->c->why, sizeof w->c->why, "largest difference %.2g of the sum of both bounds%s%s",
             all->top, *left ? "; " : "", left);
}

dp_status dp_check_ranks_bound(dp_check_work *w) {
    DP_FREED(dp_check_outcome_free) dp_check_outcome one = {0};
    char why[160], who[32];
    held all = {0};
    if (w->N < 2) return dp_check_skip(w, "one rank");
    if (!dp_check_bounded(w, why, sizeof why)) return dp_check_skip(w, why);
    const dp_status st = dp_check_run_problem(w->s, w->p, 1, w->backward, &one, w->e);
    if (st) return st;
    dp_check_work v = *w;
    v.N = 1;
    v.whole = NULL; /* bounds of the same problem on one rank */
    const dp_error_bound *a = dp_check_bounds_of(&v), *b = dp_check_bounds_of(w);
    snprintf(who, sizeof who, "%d ranks and one", w->N);
    for (int f = 0; f < DP_NRESULTS; f++)
        hold_rows(w, f, &one.r, a->row[f], b->row[f], who, &all);
    say_held(w, &all);
    return DP_OK;
}

enum { REFERENCE_TOKENS = 128 };

static int longest_of(const dp_problem *p) {
    int i = 0;
    for (int s = 1; s < p->Nseq; s++)
        if (p->cu[s + 1] - p->cu[s] > p->cu[i + 1] - p->cu[i]) i = s;
    return i;
}

dp_status dp_check_reference(dp_check_work *w) {
    DP_FREED(dp_problem_free)
    dp_problem p = first_tokens(w->p, longest_of(w->p), REFERENCE_TOKENS, w->backward);
    DP_FREED(dp_problem_free) dp_problem here = dp_check_at_hand(&p);
    DP_FREED(dp_check_outcome_free) dp_check_outcome o = {0};
    DP_FREED(dp_sim_free) dp_sim ref = {0};
    DP_FREED(dp_error_bound_free) dp_error_bound bound = {0};
    char why[160];
    held all = {0};
    dp_check_work v = *w;
    v.p = &here;
    v.base = &o;
    if (dp_check_drops(w->s)) return dp_check_skip(w, "what it drops is in no bound");
    if (!dp_check_bounded(&v, why, sizeof why)) return dp_check_skip(w, why);
    dp_status st = dp_check_run_problem(w->s, &p, 1, w->backward, &o, w->e);
    if (st) return st;
    st = dp_sim_reference(&ref, &here, DP_CHUNK, 1, NULL, w->backward, w->e);
    if (st) return st;
    dp_check_bounds_make(w->s, &here, 1, w->backward, NULL, &bound, NULL);
    for (int f = 0; f < DP_NRESULTS; f++)
        hold_rows(&v, f, &ref.out, bound.row[f], bound.row[f], "the fp64 reference and it", &all);
    say_held(w, &all);
    return DP_OK;
}

/* Lengths of chunks that the subject can be asked for, as their sum; 0: none, why says so. */
static int other_lengths(const dp_check_work *w, char *why, size_t size) {
    const dp_design own = dp_check_design(w->s, w->p);
    if (dp_backends[w->s->backend].faulty) return 16 | 128;
    if (!w->s->library)
        snprintf(why, size, "these kernels take chunks of %d tokens alone", DP_CHUNK);
    else if (!(own.chunks & ~own.chunk))
        snprintf(why, size, "its design names no other length of chunks (chunks=16:32)");
    return w->s->library ? own.chunks & ~own.chunk : 0;
}

/* The problem itself beside a run with chunks of that length. */
static dp_status hold_length(dp_check_work *w, int length, held *all) {
    dp_check_subject s = *w->s;
    DP_FREED(dp_check_outcome_free) dp_check_outcome other = {0};
    DP_FREED(dp_error_bound_free) dp_error_bound bound = {0};
    char who[64];
    s.chunk = length;
    const dp_status st = dp_check_run_problem(&s, w->p, w->N, w->backward, &other, w->e);
    if (st) return st;
    const dp_error_bound *own = dp_check_bounds_of(w);
    dp_check_bounds_make(&s, w->p, w->N, w->backward, NULL, &bound, NULL);
    snprintf(who, sizeof who, "chunks of %d and of %d", length, dp_check_design(w->s, w->p).chunk);
    for (int f = 0; f < DP_NRESULTS; f++)
        hold_rows(w, f, &other.r, bound.row[f], own->row[f], who, all);
    return DP_OK;
}

dp_status dp_check_chunk_size(dp_check_work *w) {
    char why[160];
    held all = {0};
    dp_status st = DP_OK;
    const int lengths =
        dp_check_bounded(w, why, sizeof why) ? other_lengths(w, why, sizeof why) : 0;
    if (!lengths) dp_check_skip(w, why);
    for (int n = 8; n <= DP_CHUNK_MOST && !st && w->c->verdict == DP_PASS; n *= 2)
        if (lengths & n) st = hold_length(w, n, &all);
    if (!st && lengths) say_held(w, &all);
    return st;
}
