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

/* The states of all heads in one message. */
static void ring_by_messages(dp_sim *s, int backward, dp_sim_ring_fn *step) {
    const int r = s->peers->rank, HV = s->p->HV, by = backward ? -1 : 1;
    const dp_context *c = &s->ctx[r];
    const int64_t KV = (int64_t)s->p->K * s->p->V;
    const int comes = backward ? !c->is_last : !c->is_first;
    const int goes = backward ? !c->is_first : !c->is_last;
    double *all = dp_doubles(HV * KV);
    if (comes)
        s->peers->receive(s->peers->who, r - by, all, HV * KV,
                          backward ? "the gradient of its state" : "its state");
    for (int hv = 0; hv < HV; hv++) {
        double *S = comes ? dp_copy(all + hv * KV, KV) : NULL;
        step(s, backward, r, hv, &S);
        if (goes) memcpy(all + hv * KV, S, sizeof(double) * (size_t)KV);
        free(S);
    }
    if (goes) s->peers->send(s->peers->who, r + by, all, HV * KV);
    free(all);
}

void dp_sim_ring(dp_sim *s, int backward, dp_sim_ring_fn *step) {
    (s->peers ? ring_by_messages : ring_here)(s, backward, step);
}

/* ---- over a distance ------------------------------------------------------------------------- */

void dp_sim_hand(dp_sim *s, int d, int64_t n, double *const *out, double **got) {
    for (int r = s->from; r < s->to && s->peers; r++)
        if (r + d >= 0 && r + d < s->N) s->peers->send(s->peers->who, r + d, out[r], n);
    for (int r = s->from; r < s->to; r++) {
        const int source = r - d;
        if (source < 0 || source >= s->N) continue;
        got[r] = s->peers ? dp_doubles(n) : dp_copy(out[source], n);
        if (s->peers) s->peers->receive(s->peers->who, source, got[r], n, "a scan's element");
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
    for (int i = s->peers->rank * HV; i < (s->peers->rank + 1) * HV; i++) {
        if (!M[i]) continue;
        memcpy(all + i * pair, M[i], sizeof(double) * (size_t)KK);
        memcpy(all + i * pair + KK, H[i], sizeof(double) * (size_t)KV);
    }
    dp_peers_gather(s->peers, all, n, backward ? "dM and dH" : "M and H");
    for (int i = 0; i < s->N * HV; i++) {
        const dp_context *c = &s->ctx[i / HV];
        if (i / HV == s->peers->rank || (backward ? c->is_first : c->is_last)) continue;
        dp_sim_replace(&M[i], dp_copy(all + i * pair, KK));
        dp_sim_replace(&H[i], dp_copy(all + i * pair + KK, KV));
    }
    free(all);
}
