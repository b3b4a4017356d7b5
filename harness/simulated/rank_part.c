/* A rank's share of a problem, and its results as one row of numbers (rank_part.h). */
#include "rank_part.h"

#include <string.h>

dp_problem dp_rank_part(const dp_problem *p, int N, int rank) {
    const int parts = p->own.kind ? dp_own_parts(p->own.kind, p->T, N) : N;
    dp_problem part = *p;
    part.T = dp_own_count(p->own, p->T, parts, rank);
    for (int i = 0; i < DP_NINPUTS; i++) {
        const double *x = dp_input_of(p, i);
        if (!x) continue;
        const int64_t n = dp_input_count(&part, i);
        const int tokens = dp_input_fields[i].kind == DP_OF_TOKENS;
        double *own = part.in[i] = tokens ? dp_doubles(n) : dp_copy(x, n);
        if (tokens)
            dp_own_move(p->own, p->T, parts, rank, dp_input_width(p, i), (double *)x, own, 0);
    }
    part.cu = dp_cu_copy(p);
    return part;
}

/* ---- results --------------------------------------------------------------------------------- */

static void each_of_tokens(const dp_problem *p, dp_result *out, const dp_context *c,
                           dp_rank_list_fn *f, void *arg) {
    for (int i = 0; i < DP_NRESULTS; i++) {
        double *x = out->out[i];
        if (!x || dp_result_fields[i].kind != DP_OF_TOKENS) continue;
        const int64_t each = dp_result_count(p, i) / p->T;
        f(x + c->a * each, c->L * each, arg);
    }
}

void dp_rank_each_result(const dp_problem *p, dp_result *out, const dp_context *c, int backward,
                         dp_rank_list_fn *f, void *arg) {
    const int64_t n = (int64_t)p->HV * p->K * p->V;
    each_of_tokens(p, out, c, f, arg);
    for (int sub = 0; sub < c->nlocal; sub++) {
        const int64_t at = c->local_seq[sub] * n;
        if (sub < c->nlocal - 1 || c->is_last) f(out->final_state + at, n, arg);
        if (backward && (sub || c->is_first)) f(out->ds0 + at, n, arg);
    }
}

/* Does the rank have this one of the tensors that ranks exchange? */
static int has(const dp_sim *s, int rank, int which) {
    const dp_context *c = &s->ctx[rank];
    const dp_exchange_info *x = &dp_exchanges[s->merge];
    const int first = which == DP_RANK_S_IN || which == DP_RANK_DM || which == DP_RANK_DH;
    if (!(dp_rank_is_state(which) ? x->states : x->pairs)) return 0;
    return first ? !c->is_first : !c->is_last;
}

static void each_of_rank(dp_sim *s, int rank, int backward, dp_rank_list_fn *f, void *arg) {
    for (int which = 0; which < (backward ? DP_RANK_TENSORS : DP_RANK_DS_OUT); which++) {
        double **list = s->rank[which];
        const int64_t n = dp_rank_width(s->p, which);
        for (int hv = 0; has(s, rank, which) && hv < s->p->HV; hv++) {
            double **x = &list[rank * s->p->HV + hv];
            if (!*x) *x = dp_doubles(n);
            f(*x, n, arg);
        }
    }
}

/* M of the recorded rank after 1, 2, 4 .. chunks. */
static void each_of_prefixes(dp_sim *s, int rank, dp_rank_list_fn *f, void *arg) {
    const int n = s->first[rank][s->ctx[rank].nlocal] - s->first[rank][s->ctx[rank].nlocal - 1];
    const int64_t KK = (int64_t)s->p->K * s->p->K;
    if (rank != s->traj_rank || s->p->HV != 1 || s->ctx[rank].is_last) return;
    if (!dp_exchanges[s->merge].pairs || s->design.pair_rows) return;
    s->ntraj = 0;
    for (int chunks = 1; chunks <= n && s->ntraj < DP_MAX_TRAJ; chunks *= 2) {
        double **x = &s->traj[s->ntraj];
        if (!*x) *x = dp_doubles(KK);
        s->traj_chunks[s->ntraj++] = chunks;
        f(*x, KK, arg);
    }
}

/* The lists of a rank's results, in the same order in its own process (dp_sim_new_rank) and in the
 * frame of all ranks (dp_sim_options). Both must have called dp_sim_begin with the same backward.
 * Makes room in a frame that has none yet. */
static void rank_each_list(dp_sim *s, int rank, int backward, dp_rank_list_fn *f, void *arg) {
    dp_rank_each_result(s->p, &s->out, &s->ctx[rank], backward, f, arg);
    each_of_rank(s, rank, backward, f, arg);
    each_of_prefixes(s, rank, f, arg);
    if (s->out.dA_log) f(s->out.dA_log, s->p->HV, arg);
    if (s->out.ddt_bias) f(s->out.ddt_bias, (int64_t)s->p->HV * dp_Kg(s->p), arg);
}

/* ---- as a row -------------------------------------------------------------------------------- */

static void count(DP_UNUSED double *x, int64_t n, void *arg) { *(int64_t *)arg += n; }
static void take(double *x, int64_t n, void *arg) {
    double **to = arg;
    memcpy(*to, x, sizeof *x * (size_t)n);
    *to += n;
}
static void give(double *x, int64_t n, void *arg) {
    const double **from = arg;
    memcpy(x, *from, sizeof *x * (size_t)n);
    *from += n;
}

int64_t dp_rank_size(dp_sim *s, int rank, int backward) {
    int64_t n = 0;
    rank_each_list(s, rank, backward, count, &n);
    return n;
}
void dp_rank_pack(dp_sim *s, int rank, int backward, double *all) {
    rank_each_list(s, rank, backward, take, &all);
}
void dp_rank_unpack(dp_sim *s, int rank, int backward, const double *all) {
    rank_each_list(s, rank, backward, give, &all);
}
