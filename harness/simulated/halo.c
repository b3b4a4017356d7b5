/* Halos of the tokens before a rank's own (ranks_stages.h). Activations run on a problem in which a
 * rank's tokens stand behind its halo, and every local sub-sequence is a sequence. A halo neither
 * decays nor writes (dp_problem.halo). Its angles are their sums so far, so that those of all
 * ranks have one order of summation, from rank to rank. Gradients are sent in the arithmetic of
 * the base, before their norm. */
#include "ranks_stages.h"
#include "ref/vocabulary/recurrence.h"

#include <stdlib.h>
#include <string.h>

struct dp_sim_halos {
    dp_problem p;    /* its inputs of tokens, cu and halo are its own */
    dp_context *ctx; /* [N]: where ranks that are here lie in it */
    dp_units units;
};

static int64_t length(const dp_sim *s, int r) { return s->ctx[r].is_first ? 0 : dp_lag(s->p); }

int dp_sim_needs_halos(const dp_sim *s) { return (s->N > 1 || s->peers) && dp_has_halo(s->p); }

/* ---- the problem ----------------------------------------------------------------------------- */

/* n numbers a token, of own tokens to where they lie among halos; back: from there. */
static void move(const dp_sim *s, int64_t n, double *own, double *all, int back) {
    for (int r = 0; r < s->N; r++) {
        if (!dp_sim_has(s, r)) continue;
        double *a = own + s->ctx[r].a * n, *b = all + (s->halos->ctx[r].a + length(s, r)) * n;
        memcpy(back ? a : b, back ? b : a, sizeof *a * (size_t)(s->ctx[r].L * n));
    }
}

static void add_rank(const dp_sim *s, int r, dp_problem *p, dp_context *c) {
    const int64_t m = length(s, r);
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
        memset(halo + h->ctx[r].a, 1, dp_sim_has(s, r) ? (size_t)length(s, r) : 0);
    p->halo = halo;
    for (int i = 0; i < DP_NINPUTS; i++) {
        double **x = dp_input_at(p, i), *own = *x;
        if (dp_input_fields[i].role != DP_ROLE_REQUIRED || !own) continue;
        *x = dp_doubles(dp_input_count(p, i));
        move(s, dp_input_width(p, i), own, *x, 0);
    }
}

void dp_sim_free_halos(dp_sim *s) {
    struct dp_sim_halos *h = s->halos;
    if (!h) return;
    for (int i = 0; i < DP_NINPUTS; i++)
        if (dp_input_fields[i].role == DP_ROLE_REQUIRED) free(*dp_input_at(&h->p, i));
    for (int r = 0; r < s->N; r++)
        free(h->ctx[r].local_cu);
    dp_units_free(&h->units);
    free(h->p.cu);
    free((unsigned char *)h->p.halo);
    free(h->ctx);
    free(h);
    s->halos = NULL;
}

/* ---- messages -------------------------------------------------------------------------------- */

enum { TAKE, PUT, ADD };

static int gradient_of(int input) {
    int f = 0;
    while (dp_result_fields[f].role != DP_ROLE_GRADIENT || (int)dp_result_fields[f].of != input)
        f++;
    return f;
}

/* A halo's inputs, or their gradients, of the tokens from t on: to x, from there, or added in a
 * base. Returns how many numbers. */
static int64_t each_number(const dp_problem *p, dp_result *gradients, int64_t t, int how,
                           dp_base base, double *x) {
    int64_t all = 0;
    for (int i = 0; i < DP_NINPUTS; i++) {
        const int64_t width = dp_input_width(p, i), n = width * dp_lag(p);
        if (!dp_in_halo(p, i)) continue;
        double *at =
            gradients ? *dp_result_at(gradients, gradient_of(i)) : *dp_input_at((dp_problem *)p, i);
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

static void put(const dp_sim *s, int to, const double *x, int64_t n) {
    if (!dp_sim_has(s, to))
        s->peers->send(s->peers->who, dp_peers_owner(s->peers, s->p->own, s->N, to), x, n);
}
static void get(const dp_sim *s, int from, double *x, int64_t n, const char *what) {
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

void dp_sim_fetch_halos(dp_sim *s) {
    dp_sim_free_halos(s);
    new_halos(s);
    dp_problem *p = &s->halos->p;
    const int64_t n = each_number(p, NULL, 0, TAKE, s->base, NULL);
    double *x = dp_doubles(n);
    for (int r = 0; r < s->N; r++) {
        const dp_context *c = &s->halos->ctx[r];
        const int64_t last = c->b - dp_lag(p);
        if (!dp_sim_has(s, r)) continue;
        if (!c->is_first) {
            get(s, r - 1, x, n, "the tokens before its own");
            each_number(p, NULL, c->a, PUT, s->base, x);
        }
        if (c->is_last) continue;
        each_number(p, NULL, last, TAKE, s->base, x);
        sum_so_far(s, r, last, x);
        put(s, r + 1, x, n);
    }
    free(x);
}

/* Gradients of the angles of rank r's own tokens, then of its halo: sums over all tokens from each
 * one on. */
static void sum_angles(dp_sim *s, int r, dp_base base) {
    const dp_context *c = &s->ctx[r];
    const int64_t n = dp_input_width(s->p, DP_INPUT_ANGLE), m = s->halos ? length(s, r) : 0;
    dp_problem own = *s->p;
    double *d = s->out.dangle + (c->a + m) * n;
    int64_t *cu = own.cu = dp_calloc((size_t)c->nlocal + 1, sizeof *cu);
    own.T = c->L - m;
    own.Nseq = c->nlocal;
    for (int i = 1; i <= c->nlocal; i++)
        cu[i] = c->local_cu[i] - m;
    (base == DP_BASE_FP64 ? dp_sum_angles : dp_sum_angles_f32)(&own, d);
    for (int64_t i = 0; i < n && m; i++)
        d[i - n] = dp_round_arith(base, d[i - n] + d[i]);
    free(cu);
}

void dp_sim_return_halos(dp_sim *s, dp_base base) {
    const dp_problem *p = s->p;
    if (!dp_has_halo(p)) return;
    const int64_t n = each_number(p, &s->out, 0, TAKE, base, NULL);
    double *x = dp_doubles(n);
    for (int r = s->N - 1; r >= 0; r--) {
        const dp_context *c = &s->ctx[r];
        if (!dp_sim_has(s, r)) continue;
        if (!c->is_last) {
            get(s, r + 1, x, n, "the gradient of its last tokens");
            each_number(p, &s->out, c->b - dp_lag(p), ADD, base, x);
        }
        if (p->angle) sum_angles(s, r, base);
        if (c->is_first) continue;
        each_number(p, &s->out, c->a, TAKE, base, x);
        put(s, r - 1, x, n);
    }
    free(x);
}

/* ---- simulations ----------------------------------------------------------------------------- */

static int64_t heads_width(const dp_sim *s, int i) {
    return (dp_sim_arrays[i].heads == DP_AXIS_H ? s->p->H : s->p->HV) * dp_sim_array_width(s, i);
}

dp_sim dp_sim_open_halos(const dp_sim *s, int backward) {
    dp_sim all = *s;
    all.p = &s->halos->p;
    all.ctx = s->halos->ctx;
    all.units = s->halos->units;
    for (int i = 0; i < DP_NSIM_ARRAYS; i++) {
        double **x = dp_sim_array(&all, i), *own = *x;
        const int64_t n = heads_width(s, i);
        *x = backward && own ? dp_doubles(all.p->T * n) : NULL;
        if (*x) move(s, n, own, *x, 0);
    }
    all.out = (dp_result){0};
    if (backward) dp_result_alloc(&all.out, all.p, 1);
    return all;
}

/* Gradients of a token's inputs. */
static void take_results(dp_sim *s, dp_sim *all) {
    for (int i = 0; i < DP_NRESULTS; i++) {
        const dp_tensor_field *f = &dp_result_fields[i];
        double *to = *dp_result_at(&s->out, i);
        if (to && f->role == DP_ROLE_GRADIENT && f->kind == DP_OF_TOKENS)
            move(s, dp_input_width(s->p, (int)f->of), to, *dp_result_at(&all->out, i), 1);
    }
    dp_result_free(&all->out);
}

void dp_sim_close_halos(dp_sim *s, dp_sim *all, int backward) {
    s->halos->units = all->units;
    for (int i = 0; i < DP_NSIM_ARRAYS; i++) {
        double **x = dp_sim_array(all, i);
        const int64_t n = heads_width(s, i);
        if (!backward && dp_sim_arrays[i].made_by == DP_STAGE_GATE) {
            dp_sim_replace(dp_sim_array(s, i), *x ? dp_doubles(s->p->T * n) : NULL);
            if (*x) move(s, n, *dp_sim_array(s, i), *x, 1);
        }
        free(*x);
    }
    if (backward) take_results(s, all);
}
