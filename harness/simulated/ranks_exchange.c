/* Stages merge_fwd and merge_bwd: what each exchange makes of the ranks' pairs, or of their passes
 * (ranks_stages.h, ref/vocabulary/exchange.h). Forward and backward are one code: the gradient of a
 * state runs from the last rank to the first through the adjoint pairs. */
#include "ranks_stages.h"
#include "ref/arithmetic/mm.h"
#include "ref/chunk/exchange_price.h"
#include "ref/chunk/payload.h"

#include <assert.h>
#include <stdlib.h>
#include <string.h>

/* ---- messages -------------------------------------------------------------------------------- */

/* Rank r takes *S, the received state of one head (NULL: none), and leaves in *S the state that it
 * sends. */
typedef void dp_sim_ring_fn(dp_sim *s, int backward, int r, int hv, double **S);

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

/* Rank r: the states of all heads in one message. all: those of the rank before it, if that is
 * here, then its own. */
static void ring_message(dp_sim *s, int backward, int r, double *all, dp_sim_ring_fn *step) {
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
        /* NOLINTNEXTLINE(*NonNullParamChecker): a step leaves a state */
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
        if (dp_sim_has(s, r)) ring_message(s, backward, r, all, step);
    }
    free(all);
}

/* Sends states from rank to rank, forward or backward. */
static void ring_of(dp_sim *s, int backward, dp_sim_ring_fn *step) {
    (s->peers ? ring_by_messages : ring_here)(s, backward, step);
}

/* ---- over a distance ------------------------------------------------------------------------- */

/* Every rank of this process sends n numbers, out[r], to rank r + d. It allocates got[r], NULL
 * where nothing arrives. */
static void hand_over(dp_sim *s, int d, int64_t n, double *const *out, double **got) {
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

/* Every rank gets M and H, backward dM and dH, of all; where all ranks are here they have them. */
static void share_pairs(dp_sim *s, int backward) {
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

/* ---- exchanges ------------------------------------------------------------------------------- */

typedef dp_sim_way way;

static way way_of(dp_sim *s, int back) {
    return back ? (way){s, 1, -1, DP_STAGE_MERGE_BWD, s->dM, s->dH, s->dS_out}
                : (way){s, 0, 1, DP_STAGE_MERGE_FWD, s->M, s->H, s->S_in};
}

/* Does rank r receive a state; does it send one? */
static int gets(const way *w, int r) { return dp_sim_gets(w->s, w->back, r); }
static int gives(const way *w, int r) { return dp_sim_gets(w->s, !w->back, r); }

/* The sub-sequence whose state rank r sends. */
static int passed(const way *w, int r) { return w->back ? 0 : w->s->ctx[r].nlocal - 1; }

/* Does that one begin in rank r, so that what comes to the rank does not matter to it? */
int dp_sim_begins(const way *w, int r) {
    return (w->back ? dp_sim_ends_here : dp_sim_starts_here)(w->s, r, passed(w, r));
}

static int64_t state_size(const way *w) { return (int64_t)w->s->p->K * w->s->p->V; }

/* Its initial state, to be freed; NULL: zeros. */
static double *start_of(const way *w, int r, int hv, dp_stage stage) {
    const int64_t KV = state_size(w);
    const double *x = (w->back ? dp_sim_end_gradient : dp_sim_start)(w->s, r, passed(w, r));
    double *S = x ? dp_copy(x + hv * KV, KV) : NULL;
    if (S) dp_sim_round_arith_all(w->s->at[stage], S, KV);
    return S;
}

/* S, which is handed over, is what enters rank r. */
static void arrives(const way *w, int r, int hv, double *S) {
    dp_sim_replace(&w->in[r * w->s->p->HV + hv], S);
}

/* *S <- M S + H for rank r, M that of rank m, H that of rank j. */
static void step(const way *w, int m, int j, int r, int hv, double **S) {
    const int HV = w->s->p->HV;
    dp_sim_merge_step(w->s, r, hv, w->s->at[w->stage], w->M[m * HV + hv], w->H[j * HV + hv], S);
}

/* ---- what is sent ---------------------------------------------------------------------------- */

/* The heads of a rank share a message. */
static void count(dp_sim *s, int hv, int to, int64_t bytes) {
#pragma omp atomic
    s->sent.messages += hv ? 0 : to;
#pragma omp atomic
    s->sent.bytes += to * bytes;
}

/* One head's state, and with M the pair, that rank r sends: the data as they arrive, in place. to:
 * number of receiving ranks. */
static void send_one(const way *w, int r, int hv, int to, double *M, double *H) {
    dp_sim *s = w->s;
    const int K = s->p->K, V = s->p->V;
    const dp_payload p = s->payload;
    int64_t bytes = dp_payload_H_bytes(p, K, V);
    dp_sim_after(s, DP_AFTER_SENDING, (dp_sim_place){.at = r, .hv = hv, .way = w, .M = M, .x = H});
    dp_payload_state(p, (int64_t)K * V, H);
    if (M) bytes += dp_payload_M_bytes(p, K, dp_payload_M(p, s->at[w->stage], K, M));
    count(s, hv, to, bytes);
}

/* ---- all-gather ------------------------------------------------------------------------------ */

/* Rank r merges the gathered pairs before it, farthest rank first; part: in that order instead. */
static void fold(const way *w, int r, int hv, dp_sim_order_fn *order) {
    const dp_context *c = &w->s->ctx[r];
    const int far = w->back ? r + c->post_num_ranks : r - c->pre_num_ranks, n = abs(r - far);
    if (!gets(w, r)) return;
    dp_sim_part *part = dp_calloc((size_t)w->s->N, sizeof *part);
    for (int i = 0; i < n; i++)
        part[i].H = part[i].M = far + i * w->by;
    double *S = w->s->design.sending.begins ? NULL : start_of(w, far, hv, w->stage);
    if (order) order(w, r, hv, n, S != NULL, part);
    for (int i = 0; i < n; i++)
        step(w, part[i].M, part[i].H, r, hv, &S);
    arrives(w, r, hv, S);
    free(part);
}

/* M = 0 and the state that leaves rank r, where the sequence begins in it. */
static void send_state(const way *w, int r, int hv, double *M, double *H) {
    const int64_t K = w->s->p->K;
    double *S = start_of(w, r, hv, w->stage);
    step(w, r, r, r + w->by, hv, &S);
    memcpy(H, S, sizeof *S * (size_t)state_size(w));
    memset(M, 0, sizeof *M * (size_t)(K * K));
    free(S);
}

/* All pairs as they arrive, in place of those of w; a rank that has none sends zeros. */
static void send_all(way *w) {
    const int HV = w->s->p->HV, n = w->s->N * HV;
    const int64_t K = w->s->p->K, KV = state_size(w);
    w->M = dp_copy_list(w->M, n, K * K);
    w->H = dp_copy_list(w->H, n, KV);
#pragma omp parallel for schedule(dynamic, 1)
    for (int i = 0; i < n; i++) {
        if (!w->M[i]) w->M[i] = dp_doubles(K * K);
        if (!w->H[i]) w->H[i] = dp_doubles(KV);
        if (w->s->design.sending.begins && gives(w, i / HV) && dp_sim_begins(w, i / HV))
            send_state(w, i / HV, i % HV, w->M[i], w->H[i]);
        send_one(w, i / HV, i % HV, w->s->N - 1, w->M[i], w->H[i]);
    }
}

void dp_sim_gather(dp_sim *s, int back, dp_sim_order_fn *order) {
    way w = way_of(s, back);
    const int HV = s->p->HV;
    share_pairs(s, back);
    send_all(&w);
    for (int i = 0; i < s->N * HV; i++)
        if (dp_sim_has(s, i / HV)) fold(&w, i / HV, i % HV, order);
    dp_free_list(w.M, (int64_t)s->N * HV);
    dp_free_list(w.H, (int64_t)s->N * HV);
}

static void allgather(dp_sim *s, int back) { dp_sim_gather(s, back, NULL); }

/* ---- from rank to rank ----------------------------------------------------------------------- */

/* Rank r got S and sends m_r S + h_r (math.md g.3). A rank where the passed sequence begins
 * continues from its own start state. */
static void ring_step(dp_sim *s, int back, int r, int hv, double **S) {
    const way w = way_of(s, back);
    if (gets(&w, r)) arrives(&w, r, hv, dp_copy(*S, state_size(&w)));
    if (!gives(&w, r)) return;
    if (dp_sim_begins(&w, r)) dp_sim_replace(S, start_of(&w, r, hv, w.stage));
    step(&w, r, r, r + w.by, hv, S);
    send_one(&w, r, hv, 1, NULL, *S);
}

/* The same by the state pass itself. */
static void serial_step(dp_sim *s, int back, int r, int hv, double **S) {
    const way w = way_of(s, back);
    const dp_stage pass = back ? DP_STAGE_STATE_BWD : DP_STAGE_STATE_FWD;
    if (gets(&w, r)) arrives(&w, r, hv, dp_copy(*S, state_size(&w)));
    if (!gives(&w, r)) return;
    if (dp_sim_begins(&w, r)) {
        double *start = start_of(&w, r, hv, pass);
        dp_sim_replace(S, start ? start : dp_doubles(state_size(&w)));
    }
    dp_sim_pass(s, back, r, hv, passed(&w, r), *S);
    send_one(&w, r, hv, 1, NULL, *S);
}

static void ring(dp_sim *s, int back) { ring_of(s, back, ring_step); }
static void serial(dp_sim *s, int back) { ring_of(s, back, serial_step); }

/* ---- scan ------------------------------------------------------------------------------------ */

/* An element of a scan: for one head, the map of a run of ranks from the state that enters to the
 * state that leaves. Its numbers are in a row, as they are sent. */
enum {
    LEAVES,
    MATTERS,
    NFLAGS = DP_SIM_ELEMENT_FLAGS
}; /* a state leaves the rank; it depends on the one that entered */

static int64_t element_size(const way *w) {
    return NFLAGS + (int64_t)w->s->p->K * w->s->p->K + state_size(w);
}
static double *M_of(double *e) { return e + NFLAGS; }
static double *H_of(const way *w, double *e) {
    return e + NFLAGS + (int64_t)w->s->p->K * w->s->p->K;
}

static void begin_element(const way *w, int r, int hv, double *e) {
    const int i = r * w->s->p->HV + hv;
    const int64_t K = w->s->p->K, KV = state_size(w);
    if (!gives(w, r)) return;
    e[LEAVES] = 1;
    e[MATTERS] = !dp_sim_begins(w, r);
    if (e[MATTERS]) {
        memcpy(M_of(e), w->M[i], sizeof *e * (size_t)(K * K));
        memcpy(H_of(w, e), w->H[i], sizeof *e * (size_t)KV);
        return;
    }
    double *S = start_of(w, r, hv, w->stage);
    step(w, r, r, r + w->by, hv, &S);
    memcpy(H_of(w, e), S, sizeof *e * (size_t)KV);
    free(S);
}

void dp_sim_compose(const way *w, int d, int r, int hv, double *later, double *earlier) {
    (void)d;
    const int K = w->s->p->K;
    const int64_t KK = (int64_t)K * K, KV = state_size(w);
    double *S = dp_copy(H_of(w, earlier), KV), *M = dp_doubles(KK);
    dp_sim_merge_step(w->s, r + w->by, hv, w->s->at[w->stage], M_of(later), H_of(w, later), &S);
    memcpy(H_of(w, later), S, sizeof *S * (size_t)KV);
    later[MATTERS] = earlier[MATTERS];
    if (later[MATTERS]) {
        dp_mm_by(w->s->linear, w->s->chain, (dp_shape){0, 0, K, K, K}, M_of(later), M_of(earlier),
                 M);
        memcpy(M_of(later), M, sizeof *M * (size_t)KK);
    }
    free(S);
    free(M);
}

/* Every rank combines with what ends distance d before it; e [N]: of the ranks that are here. */
static void level(const way *w, int d, double **e, dp_sim_compose_fn *compose) {
    const int HV = w->s->p->HV;
    const int64_t n = element_size(w);
    double **got = dp_calloc((size_t)w->s->N, sizeof *got);
    hand_over(w->s, w->by * d, HV * n, e, got);
#pragma omp parallel for schedule(dynamic, 1)
    for (int i = 0; i < w->s->N * HV; i++) {
        const int r = i / HV, hv = i % HV;
        if (!dp_sim_has(w->s, r)) continue;
        if (got[r])
            send_one(w, r - d * w->by, hv, 1, M_of(got[r] + hv * n), H_of(w, got[r] + hv * n));
        if (got[r] && e[r][hv * n + MATTERS]) compose(w, d, r, hv, e[r] + hv * n, got[r] + hv * n);
    }
    dp_free_list(got, w->s->N);
}

/* The state that ends in a rank enters the next one. */
static void hand_on(const way *w, double **e) {
    const int HV = w->s->p->HV;
    const int64_t n = element_size(w), KV = state_size(w);
    double **out = dp_calloc((size_t)w->s->N, sizeof *out),
           **got = dp_calloc((size_t)w->s->N, sizeof *got);
    for (int r = 0; r < w->s->N; r++) {
        if (!dp_sim_has(w->s, r)) continue;
        out[r] = dp_doubles(HV * KV);
        for (int hv = 0; hv < HV; hv++)
            memcpy(out[r] + hv * KV, H_of(w, e[r] + hv * n), sizeof **out * (size_t)KV);
    }
    hand_over(w->s, w->by, HV * KV, out, got);
    for (int i = 0; i < w->s->N * HV; i++) {
        const int r = i / HV, hv = i % HV;
        if (!dp_sim_has(w->s, r) || !gets(w, r)) continue;
        double *S = dp_copy(got[r] + hv * KV, KV);
        send_one(w, r - w->by, hv, 1, NULL, S);
        arrives(w, r, hv, S);
    }
    dp_free_list(out, w->s->N);
    dp_free_list(got, w->s->N);
}

void dp_sim_scan(dp_sim *s, int back, dp_sim_compose_fn *compose) {
    const way w = way_of(s, back);
    const int HV = s->p->HV;
    const int64_t n = element_size(&w);
    double **e = dp_calloc((size_t)s->N, sizeof *e);
    for (int r = 0; r < s->N; r++)
        if (dp_sim_has(s, r)) e[r] = dp_doubles(HV * n);
    for (int i = 0; i < s->N * HV; i++)
        if (e[i / HV]) begin_element(&w, i / HV, i % HV, e[i / HV] + i % HV * n);
    for (int d = 1; d < s->N; d *= 2)
        level(&w, d, e, compose);
    hand_on(&w, e);
    dp_free_list(e, s->N);
}

static void scan(dp_sim *s, int back) { dp_sim_scan(s, back, dp_sim_compose); }

/* ---- all of them ----------------------------------------------------------------------------- */

void dp_sim_exchange(dp_sim *s, int back) {
    static void (*const RUN[DP_NRUN_EXCHANGES])(dp_sim * s,
                                                int back) = {[DP_EXCHANGE_ALLGATHER] = allgather,
                                                             [DP_EXCHANGE_RING] = ring,
                                                             [DP_EXCHANGE_SCAN] = scan,
                                                             [DP_EXCHANGE_SERIAL] = serial};
    assert(RUN[s->merge]); /* heads: ranks.c */
    RUN[s->merge](s, back);
}
