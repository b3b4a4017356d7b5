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
        DP_OWN double *S = NULL;
        for (int i = 0; i < s->N; i++)
            step(s, backward, backward ? s->N - 1 - i : i, hv, &S);
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
        DP_OWN double *S = comes ? dp_copy(all + hv * KV, KV) : NULL;
        step(s, backward, r, hv, &S);
        /* NOLINTNEXTLINE(*NonNullParamChecker): a step leaves a state */
        if (goes) memcpy(all + hv * KV, S, sizeof(double) * (size_t)KV);
    }
    if (goes && !dp_sim_has(s, r + by))
        s->peers->send(s->peers->who, process_of(s, r + by), all, HV * KV);
}

static void ring_by_messages(dp_sim *s, int backward, dp_sim_ring_fn *step) {
    DP_OWN double *all = dp_doubles((int64_t)s->p->HV * s->p->K * s->p->V);
    for (int i = 0; i < s->N; i++) {
        const int r = backward ? s->N - 1 - i : i;
        if (dp_sim_has(s, r)) ring_message(s, backward, r, all, step);
    }
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
    DP_OWN double *all = dp_doubles(s->N * n); /* zeros of a rank that has none (math.md g.3) */
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
    DP_OWN dp_sim_part *part = dp_calloc((size_t)w->s->N, sizeof *part);
    for (int i = 0; i < n; i++)
        part[i].H = part[i].M = far + i * w->by;
    double *S = w->s->design.sending.begins ? NULL : start_of(w, far, hv, w->stage);
    if (order) order(w, r, hv, n, S != NULL, part);
    for (int i = 0; i < n; i++)
        step(w, part[i].M, part[i].H, r, hv, &S);
    arrives(w, r, hv, S);
}

/* M = 0 and the state that leaves rank r, where the sequence begins in it. */
static void send_state(const way *w, int r, int hv, double *M, double *H) {
    const int64_t K = w->s->p->K;
    DP_OWN double *S = start_of(w, r, hv, w->stage);
    step(w, r, r, r + w->by, hv, &S);
    memcpy(H, S, sizeof *S * (size_t)state_size(w));
    memset(M, 0, sizeof *M * (size_t)(K * K));
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
    DP_OWN double *S = start_of(w, r, hv, w->stage);
    step(w, r, r, r + w->by, hv, &S);
    memcpy(H_of(w, e), S, sizeof *e * (size_t)KV);
}

void dp_sim_compose(const way *w, DP_UNUSED int d, int r, int hv, double *later, double *earlier) {
    const int K = w->s->p->K;
    const int64_t KK = (int64_t)K * K, KV = state_size(w);
    DP_OWN double *S = dp_copy(H_of(w, earlier), KV), *M = dp_doubles(KK);
    dp_sim_merge_step(w->s, r + w->by, hv, w->s->at[w->stage], M_of(later), H_of(w, later), &S);
    memcpy(H_of(w, later), S, sizeof *S * (size_t)KV);
    later[MATTERS] = earlier[MATTERS];
    if (later[MATTERS]) {
        dp_mm_by(w->s->linear, w->s->chain, (dp_shape){0, 0, K, K, K}, M_of(later), M_of(earlier),
                 M);
        memcpy(M_of(later), M, sizeof *M * (size_t)KK);
    }
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

/* ---- the exchange of heads ------------------------------------------------------------------- */

/* Where ranks are processes: two all-to-alls. Tokens go from their owners to the ranks that have
 * their value heads, each with its query head, what those make comes back. Gradients of activated q
 * and k return a value head each. Their owner adds them, in the order of heads, and computes the
 * activations' backward, as one rank does. So the bits are one rank's, whatever divides. */

/* Rows of n numbers, from rows of one width to rows of another. */
static void copy_columns(double *to, int64_t to_width, const double *from, int64_t from_width,
                         int64_t rows, int64_t n) {
    for (int64_t r = 0; r < rows; r++)
        memcpy(to + r * to_width, from + r * from_width, sizeof *to * (size_t)n);
}

/* ---- which tokens a rank has ----------------------------------------------------------------- */

static int64_t tokens_of(const dp_sim *s, int rank) {
    return dp_own_count(s->p->own, s->p->cu[s->p->Nseq], s->N, rank);
}

/* One tensor of all tokens, in their order, and of a rank's alone, in that of its parts. */
static void move_tokens(const dp_sim *s, int rank, int64_t width, double *all, double *own,
                        int back) {
    dp_own_move(s->p->own, s->p->cu[s->p->Nseq], s->N, rank, width, all, own, back);
}

/* ---- inputs ---------------------------------------------------------------------------------- */

/* The value heads of a rank, n of them from `first` on. */
typedef struct {
    int first, n;
} heads_of_rank;

static heads_of_rank heads_of(const dp_sim *s, int rank) {
    const int n = s->p->HV / s->peers->N;
    return (heads_of_rank){rank * n, n};
}

/* The columns of an input that a rank's value heads read, side by side: [rows][n][numbers of a
 * head]. Returns how many numbers. */
static int64_t pack_columns(const dp_sim *s, int input, int64_t rows, heads_of_rank of,
                            double *to) {
    const dp_problem *p = s->given;
    const int64_t width = dp_input_width(p, input), each = width / dp_input_heads(p, input);
    const int share = dp_input_heads(p, input) == p->HV ? 1 : dp_G(p);
    for (int i = 0; i < of.n; i++)
        copy_columns(to + i * each, of.n * each,
                     dp_input_of(p, input) + (of.first + i) / share * each, width, rows, each);
    return rows * of.n * each;
}

static int is_sent(const dp_sim *s, int input) {
    return dp_input_of(s->given, input) && dp_input_fields[input].kind == DP_OF_TOKENS;
}

/* This rank's tokens for the heads of rank `to`, one input behind the other. */
static void pack_inputs(const dp_sim *s, int to, double *message) {
    const int64_t T = tokens_of(s, s->peers->rank);
    for (int i = 0; i < DP_NINPUTS; i++)
        if (is_sent(s, i)) message += pack_columns(s, i, T, heads_of(s, to), message);
}

/* The tokens of rank `from`, for this rank's heads, to where they lie among all. */
static void unpack_inputs(const dp_sim *s, int from, double *message, dp_problem *heads) {
    const int64_t T = tokens_of(s, from);
    for (int i = 0; i < DP_NINPUTS; i++) {
        if (!is_sent(s, i)) continue;
        const int64_t width = dp_input_width(heads, i);
        move_tokens(s, from, width, heads->in[i], message, 1);
        message += T * width;
    }
}

/* Room for tokens, and of states and parameters, which every rank has, those of its heads. */
static void open_inputs(const dp_sim *s, dp_problem *heads) {
    for (int i = 0; i < DP_NINPUTS; i++) {
        const int64_t rows = dp_input_fields[i].kind == DP_OF_SEQUENCES ? heads->Nseq : 1;
        if (!dp_input_of(s->given, i)) continue;
        double *x = heads->in[i] = dp_doubles(dp_input_count(heads, i));
        if (!is_sent(s, i)) pack_columns(s, i, rows, heads_of(s, s->peers->rank), x);
    }
}

static int64_t numbers_of_token(const dp_problem *heads) {
    int64_t n = 0;
    for (int i = 0; i < DP_NINPUTS; i++)
        if (dp_input_of(heads, i) && dp_input_fields[i].kind == DP_OF_TOKENS)
            n += dp_input_width(heads, i);
    return n;
}

dp_problem dp_sim_receive_heads(dp_sim *s) {
    const dp_peers *peers = s->peers;
    const int me = peers->rank;
    dp_problem heads = *s->given;
    heads.T = heads.cu[heads.Nseq];
    heads.H = heads.HV = s->p->HV / peers->N;
    heads.own = (dp_owners){0};
    heads.cu = dp_cu_copy(&heads);
    open_inputs(s, &heads);
    const int64_t each = numbers_of_token(&heads);
    DP_OWN double *message = dp_doubles(heads.T * each);
    for (int k = 1; k < peers->N; k++) { /* not all to the same one at once */
        const int to = (me + k) % peers->N;
        pack_inputs(s, to, message);
        peers->send(peers->who, to, message, tokens_of(s, me) * each);
    }
    for (int from = 0; from < peers->N; from++) {
        if (from == me)
            pack_inputs(s, me, message);
        else
            peers->receive(peers->who, from, message, tokens_of(s, from) * each,
                           "its tokens of these heads");
        unpack_inputs(s, from, message, &heads);
    }
    return heads;
}

/* ---- what heads make ------------------------------------------------------------------------- */

/* One tensor of a simulation: `width` numbers a row, of its tokens or of `rows` others. */
typedef struct {
    double *x;
    int64_t rows, width;
    int of_query; /* value heads of a query head are added */
} made;
enum { OF_TOKENS = -1, MOST_MADE = DP_NRESULTS };

/* All results. */
static int list_results(const dp_sim *s, int backward, made list[MOST_MADE]) {
    int n = 0;
    for (int i = 0; i < DP_NRESULTS; i++) {
        const dp_tensor_field *f = &dp_result_fields[i];
        int64_t shape[DP_MAX_AXES], width = f->kind == DP_OF_HEADS ? s->p->HV : 1;
        double *x = s->out.out[i];
        for (int axis = dp_result_axes(s->p, i, shape) - 1; axis > 0; axis--)
            width *= shape[axis];
        if (x && (backward || !f->backward))
            list[n++] = (made){x,
                               f->kind == DP_OF_TOKENS      ? OF_TOKENS
                               : f->kind == DP_OF_SEQUENCES ? s->p->Nseq
                                                            : 1,
                               width, 0};
    }
    return n;
}

/* All of them, in one order: results where every value head has a query head. Elsewhere gradients
 * stand after o and final_state. They are of activated inputs, from which their owner continues,
 * and sums over tokens. */
static int list_made(const dp_sim *s, int backward, made list[MOST_MADE]) {
    if (dp_by_rows(s->p)) return list_results(s, backward, list);
    const dp_problem *p = s->p;
    const dp_result *out = &s->out;
    const int R = dp_rows(p), HV = p->HV;
    const int64_t state = (int64_t)HV * p->K * p->V;
    const made all[] = {{out->o, OF_TOKENS, (int64_t)HV * p->V, 0},
                        {out->final_state, p->Nseq, state, 0},
                        {s->dq, OF_TOKENS, (int64_t)p->H * p->K, 1},
                        {s->dk, OF_TOKENS, (int64_t)p->H * R * p->K, 1},
                        {s->dg, OF_TOKENS, (int64_t)HV * dp_Kg(p), 0},
                        {s->dbeta, OF_TOKENS, (int64_t)HV * R, 0},
                        {s->values ? s->derasing : out->dv, OF_TOKENS,
                         (int64_t)HV * R * (s->values ? p->K : p->V), 0},
                        {s->dvalues, OF_TOKENS, s->values ? (int64_t)HV * R * p->V : 0, 0},
                        {out->ds0, p->Nseq, state, 0},
                        {out->dA_log, 1, p->A_log ? HV : 0, 0},
                        {out->ddt_bias, 1, p->dt_bias ? (int64_t)HV * dp_Kg(p) : 0, 0}};
    int n = 0;
    for (int i = 0; i < (backward ? (int)(sizeof all / sizeof *all) : 2); i++)
        if (all[i].width) list[n++] = all[i];
    return n;
}

static int64_t rows_of(const made *m, int64_t T) { return m->rows == OF_TOKENS ? T : m->rows; }

/* Numbers that a rank's heads make for a rank of T tokens. */
static int64_t numbers_made(const dp_sim *heads, int backward, int64_t T) {
    made list[MOST_MADE];
    int64_t n = 0;
    for (int i = list_made(heads, backward, list) - 1; i >= 0; i--)
        n += rows_of(&list[i], T) * list[i].width;
    return n;
}

static void pack_made(const dp_sim *s, const dp_sim *heads, int backward, int to, double *message) {
    const int64_t T = tokens_of(s, to);
    made list[MOST_MADE];
    const int n = list_made(heads, backward, list);
    for (int i = 0; i < n; i++) {
        const made *m = &list[i];
        if (m->rows == OF_TOKENS)
            move_tokens(s, to, m->width, m->x, message, 0);
        else
            memcpy(message, m->x, sizeof *message * (size_t)(m->rows * m->width));
        message += rows_of(m, T) * m->width;
    }
}

/* Gradients [T][n][each] of value heads to those of their query heads, [T][H][each]. */
static void add_heads(const dp_sim *s, const made *to, heads_of_rank of, int64_t T,
                      const double *from) {
    const int64_t each = to->width / s->p->H;
    const dp_base b = s->at[DP_STAGE_INTRA_BWD];
    for (int64_t i = 0; i < T * of.n * each; i++) {
        const int64_t t = i / (of.n * each), hv = of.first + i / each % of.n;
        double *y = to->x + t * to->width + hv / dp_G(s->p) * each + i % each;
        *y = dp_round_arith(b, *y + from[i]);
    }
}

/* Results of the heads of rank `from` for this rank's tokens. */
static void unpack_made(dp_sim *s, int backward, int from, const double *message) {
    const heads_of_rank of = heads_of(s, from);
    const int64_t T = tokens_of(s, s->peers->rank);
    made list[MOST_MADE];
    const int n = list_made(s, backward, list);
    for (int i = 0; i < n; i++) {
        const made *m = &list[i];
        const int64_t rows = rows_of(m, T);
        const int64_t width = m->width / (m->of_query ? s->p->H : s->p->HV) * of.n;
        if (m->of_query)
            add_heads(s, m, of, T, message);
        else
            copy_columns(m->x + from * width, m->width, message, width, rows, width);
        message += rows * width;
    }
}

void dp_sim_return_heads(dp_sim *s, const dp_sim *heads, int backward) {
    const dp_peers *peers = s->peers;
    const int me = peers->rank;
    for (int k = 1; k < peers->N; k++) {
        const int to = (me + k) % peers->N;
        const int64_t n = numbers_made(heads, backward, tokens_of(s, to));
        DP_OWN double *message = dp_doubles(n);
        pack_made(s, heads, backward, to, message);
        peers->send(peers->who, to, message, n);
    }
    const int64_t n = numbers_made(heads, backward, tokens_of(s, me));
    DP_OWN double *message = dp_doubles(n);
    for (int from = 0; from < peers->N; from++) {
        if (from == me)
            pack_made(s, heads, backward, me, message);
        else
            peers->receive(peers->who, from, message, n, "what its heads made");
        unpack_made(s, backward, from, message);
    }
}
