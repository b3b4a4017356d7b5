/* What ranks bring each other: from memory where all are here, else by messages
 * (ranks_stages.h). */
#include "ranks_stages.h"

#include <stdlib.h>
#include <string.h>

/* ---- ring ------------------------------------------------------------------------------------ */

static void ring_here(dp_sim *s, int backward, dp_sim_ring_fn *step) {
#pragma omp parallel for schedule(dynamic, 1)
    for (int hv = 0; hv < s->p->HV; hv++) {
        double *S = NULL;
        for (int i = 0; i < s->N; i++)
            step(s, backward, backward ? s->N - 1 - i : i, hv, &S);
        free(S);
    }
}

static int process_of(const dp_sim *s, int r) {
    return dp_peers_owner(s->peers, s->p->own, s->N, r);
}

/* Rank r: the states of all heads in one message; all: those that the rank before it left, if it is
 * here, then those that it leaves. */
static void ring_step(dp_sim *s, int backward, int r, double *all, dp_sim_ring_fn *step) {
    const int HV = s->p->HV, by = backward ? -1 : 1;
    const dp_context *c = &s->ctx[r];
    const int64_t KV = (int64_t)s->p->K * s->p->V;
    const int comes = backward ? !c->is_last : !c->is_first;
    const int goes = backward ? !c->is_first : !c->is_last;
    if (comes && !dp_sim_has(s, r - by))
        s->peers->receive(s->peers->who, process_of(s, r - by), all, HV * KV,
                          backward ? "the gradient of its state" : "its state");
    for (int hv = 0; hv < HV; hv++) {
        double *S = comes ? dp_copy(all + hv * KV, KV) : NULL;
        step(s, backward, r, hv, &S);
        if (goes) memcpy(all + hv * KV, S, sizeof(double) * (size_t)KV);
        free(S);
    }
    if (goes && !dp_sim_has(s, r + by))
        s->peers->send(s->peers->who, process_of(s, r + by), all, HV * KV);
}

static void ring_by_messages(dp_sim *s, int backward, dp_sim_ring_fn *step) {
    double *all = dp_doubles((int64_t)s->p->HV * s->p->K * s->p->V);
    for (int i = 0; i < s->N; i++) {
        const int r = backward ? s->N - 1 - i : i;
        if (dp_sim_has(s, r)) ring_step(s, backward, r, all, step);
    }
    free(all);
}

void dp_sim_ring(dp_sim *s, int backward, dp_sim_ring_fn *step) {
    (s->peers ? ring_by_messages : ring_here)(s, backward, step);
}

/* ---- over a distance ------------------------------------------------------------------------- */

void dp_sim_hand(dp_sim *s, int d, int64_t n, double *const *out, double **got) {
    for (int r = 0; r < s->N; r++) {
        const int to = r + d;
        if (to >= 0 && to < s->N && dp_sim_has(s, r) && !dp_sim_has(s, to))
            s->peers->send(s->peers->who, process_of(s, to), out[r], n);
    }
    for (int r = 0; r < s->N; r++) {
        const int source = r - d;
        if (source < 0 || source >= s->N || !dp_sim_has(s, r)) continue;
        const int here = dp_sim_has(s, source);
        got[r] = here ? dp_copy(out[source], n) : dp_doubles(n);
        if (!here)
            s->peers->receive(s->peers->who, process_of(s, source), got[r], n, "a scan's element");
    }
}

/* ---- all-gather ------------------------------------------------------------------------------ */

void dp_sim_share_pairs(dp_sim *s, int backward) {
    const int HV = s->p->HV;
    const int64_t KK = (int64_t)s->p->K * s->p->K, KV = (int64_t)s->p->K * s->p->V;
    const int64_t pair = KK + KV, n = HV * pair;
    double **M = backward ? s->dM : s->M, **H = backward ? s->dH : s->H;
    if (!s->peers) return;
    double *all = dp_doubles(s->N * n); /* zeros of a rank that has none (math.md g.3) */
    for (int i = 0; i < s->N * HV; i++) {
        if (!dp_sim_has(s, i / HV) || !M[i]) continue;
        memcpy(all + i * pair, M[i], sizeof(double) * (size_t)KK);
        memcpy(all + i * pair + KK, H[i], sizeof(double) * (size_t)KV);
    }
    dp_peers_gather(s->peers, s->p->own, s->N, all, n, backward ? "dM and dH" : "M and H");
    for (int i = 0; i < s->N * HV; i++) {
        const dp_context *c = &s->ctx[i / HV];
        if (dp_sim_has(s, i / HV) || (backward ? c->is_first : c->is_last)) continue;
        dp_sim_replace(&M[i], dp_copy(all + i * pair, KK));
        dp_sim_replace(&H[i], dp_copy(all + i * pair + KK, KV));
    }
    free(all);
}
