/* Ranks that hold their own tokens alone and get the others' data by messages (here between
 * threads). They have the bits of the simulated ranks, in every result and in exchanged data. */
#include "gt.h"
#include "harness/simulated/rank_part.h"
#include "harness/simulated/ranks.h"
#include "oracle.h"
#include "ref/chunk/conv.h"

#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* ---- messages between threads ---------------------------------------------------------------- */

enum { MOST = 8, PARTS = 64, ROOM = 64 }; /* ranks; parts that they own */
typedef struct {
    pthread_mutex_t lock;
    pthread_cond_t came;
    struct {
        double *x;
        int64_t n;
    } box[MOST][MOST][ROOM]; /* [from][to], in order */
    int put[MOST][MOST], got[MOST][MOST];
} post;
typedef struct {
    post *of;
    int rank;
} mailbox;

static void put(void *who, int to, const double *x, int64_t n) {
    mailbox *m = who;
    post *p = m->of;
    pthread_mutex_lock(&p->lock);
    const int i = p->put[m->rank][to]++ % ROOM;
    p->box[m->rank][to][i].x = dp_copy(x, n);
    p->box[m->rank][to][i].n = n;
    pthread_cond_broadcast(&p->came);
    pthread_mutex_unlock(&p->lock);
}

static void get(void *who, int from, double *x, int64_t n, const char *what) {
    mailbox *m = who;
    post *p = m->of;
    pthread_mutex_lock(&p->lock);
    while (p->got[from][m->rank] == p->put[from][m->rank])
        pthread_cond_wait(&p->came, &p->lock);
    const int i = p->got[from][m->rank]++ % ROOM;
    CHECK(p->box[from][m->rank][i].n == n, "%s: %lld numbers from rank %d, want %lld", what,
          (long long)p->box[from][m->rank][i].n, from, (long long)n);
    memcpy(x, p->box[from][m->rank][i].x, sizeof *x * (size_t)n);
    free(p->box[from][m->rank][i].x);
    pthread_mutex_unlock(&p->lock);
}

/* body on N threads, each with its peers. */
typedef struct {
    void (*body)(const dp_peers *p, void *arg);
    void *arg;
    dp_peers peers;
} thread;

static void *run_thread(void *arg) {
    thread *t = arg;
    t->body(&t->peers, t->arg);
    return NULL;
}

static void on_threads(int N, void (*body)(const dp_peers *p, void *arg), void *arg) {
    post *p = dp_calloc(1, sizeof *p);
    pthread_t id[MOST];
    thread t[MOST];
    mailbox m[MOST];
    pthread_mutex_init(&p->lock, NULL);
    pthread_cond_init(&p->came, NULL);
    for (int r = 0; r < N; r++) {
        m[r] = (mailbox){p, r};
        t[r] = (thread){body, arg, {.rank = r, .N = N, .who = &m[r], .send = put, .receive = get}};
        pthread_create(&id[r], NULL, run_thread, &t[r]);
    }
    for (int r = 0; r < N; r++)
        pthread_join(id[r], NULL);
    free(p);
}

/* ---- the pipeline ---------------------------------------------------------------------------- */

static const int64_t CU_PACKED[] = {0, 70, 70, 75, 76, 200, 240}, CU_CROSS[] = {0, 5, 130, 240};
static const oracle_spec SPECS[] = {
    {DP_KDA, 240, 1, 1, 8, 16, 1, 0, NULL, DP_GATE_SOFTPLUS, DP_BETA_SIGMOID2, 1, 1, 1, 0.1, 2},
    {DP_KDA, 240, 1, 4, 12, 8, 1, 6, CU_PACKED, DP_GATE_LOG, DP_BETA_PLAIN, 0, 1, 1, 0.01, 3},
    {DP_GDN, 240, 2, 2, 8, 8, 1, 3, CU_CROSS, DP_GATE_SOFTPLUS, DP_BETA_SIGMOID, 1, 1, 1, 0.02, 4},
    {DP_MKDA, 240, 2, 4, 8, 4, 2, 6, CU_PACKED, DP_GATE_SOFTPLUS, DP_BETA_SIGMOID, 1, 1, 1, 0.01,
     7},
};

typedef struct {
    const dp_problem *p;
    dp_base base;
    dp_format chain;
    dp_exchange merge;
    dp_payload payload;
    int backward;
    double *row[PARTS]; /* of ranks, or of the parts that they own */
    int64_t n[PARTS];
} job;

static void compute_rank(const dp_peers *peers, void *arg) {
    job *x = arg;
    dp_problem part = dp_rank_part(x->p, peers->N, peers->rank);
    dp_sim s;
    REQUIRE(!dp_sim_new_rank(&s, &part, x->base, peers, NULL), "rank %d", peers->rank);
    s.payload = x->payload;
    if (peers->N == 3) dp_sim_run(&s, DP_BF16, x->merge, x->backward); /* leaves nothing behind */
    dp_sim_run(&s, x->chain, x->merge, x->backward);
    for (int i = 0; i < s.N; i++) {
        if (!dp_sim_has(&s, i)) continue;
        x->n[i] = dp_rank_size(&s, i, x->backward);
        x->row[i] = dp_doubles(x->n[i]);
        dp_rank_pack(&s, i, x->backward, x->row[i]);
    }
    dp_sim_free(&s);
    dp_problem_free(&part);
}

static void same_lists(const dp_sim *a, const dp_sim *b, int backward, const char *where) {
    for (int w = 0; w < (backward ? DP_RANK_TENSORS : DP_RANK_DS_OUT); w++)
        for (int i = 0; i < a->N * a->p->HV; i++) {
            const double *x = a->rank[w][i], *y = b->rank[w][i];
            CHECK(!x == !y && (!x || !memcmp(x, y, sizeof *x * (size_t)dp_rank_width(a->p, w))),
                  "%s: %s of rank %d", where, dp_rank_name(w), i / a->p->HV);
        }
    CHECK(a->ntraj == b->ntraj, "%s: %d prefixes, want %d", where, b->ntraj, a->ntraj);
    for (int i = 0; i < a->ntraj && i < b->ntraj; i++)
        CHECK(a->traj_chunks[i] == b->traj_chunks[i] &&
                  !memcmp(a->traj[i], b->traj[i], sizeof(double) * (size_t)(a->p->K * a->p->K)),
              "%s: prefix %d", where, i);
}

/* N ranks; of a problem that says who owns what their parts are compared. */
static void compare(job *x, int ranks, const char *where) {
    const dp_owners o = x->p->own;
    const int N = o.kind ? dp_own_parts(o.kind, x->p->T, ranks) : ranks;
    dp_sim all, frame;
    REQUIRE(!dp_sim_new(&all, x->p, x->base, N, DP_FAULT_NONE, NULL), "%s", where);
    const dp_design design = dp_design_of(x->base);
    const dp_sim_options elsewhere = {.frame = 1};
    REQUIRE(!dp_sim_open(&frame, x->p, &design, N, &elsewhere, NULL), "%s", where);
    all.payload = x->payload;
    dp_sim_run(&all, x->chain, x->merge, x->backward);
    on_threads(ranks, compute_rank, x);
    dp_sim_begin(&frame, x->chain, x->merge, x->backward);
    for (int r = 0; r < N; r++) {
        CHECK(x->n[r] == dp_rank_size(&frame, r, x->backward), "%s: rank %d gives %lld", where, r,
              (long long)x->n[r]);
        dp_rank_unpack(&frame, r, x->backward, x->row[r]);
        free(x->row[r]);
    }
    for (int i = 0; i < DP_NRESULTS; i++) {
        int64_t rows, width;
        const double *a = all.out.out[i], *b = frame.out.out[i];
        dp_result_shape(x->p, i, &rows, &width);
        CHECK(!a == !b && (!a || !memcmp(a, b, sizeof *a * (size_t)(rows * width))), "%s: %s",
              where, dp_result_fields[i].name);
    }
    same_lists(&all, &frame, x->backward, where);
    dp_sim_free(&all);
    dp_sim_free(&frame);
}

DP_TEST(peers, a_rank_with_its_own_tokens_has_the_bits_of_the_simulated_one) {
    static const int ranks[] = {2, 3, 8};
    static const dp_exchange merge[] = {DP_EXCHANGE_ALLGATHER, DP_EXCHANGE_RING, DP_EXCHANGE_SCAN,
                                        DP_EXCHANGE_SERIAL};
    static const dp_payload payload[] = {DP_PAYLOAD_FULL, DP_PAYLOAD_BF16, DP_PAYLOAD_LESS_I,
                                         DP_PAYLOAD_LOWER_RANK};
    for (size_t i = 0; i < sizeof SPECS / sizeof *SPECS; i++)
        for (size_t n = 0; n < sizeof ranks / sizeof *ranks; n++)
            for (int k = 0; k < 8; k++) {
                dp_problem p;
                char where[100];
                oracle_problem(&p, &SPECS[i]);
                job x = {.p = &p,
                         .base = k & 1 ? DP_BASE_BF16 : DP_BASE_FP32,
                         .chain = k & 1 ? DP_TF32RZ : DP_FP32,
                         .merge = merge[k / 2],
                         .payload = payload[(i + n + (size_t)k) % 4],
                         .backward = !(k & 1) || (n & 1)};
                snprintf(where, sizeof where, "problem %zu, %d ranks, %s, %s, %s", i, ranks[n],
                         dp_base_names[x.base], dp_exchange_names[x.merge],
                         dp_payload_names[x.payload]);
                compare(&x, ranks[n], where);
                dp_problem_free(&p);
            }
}

DP_TEST(peers, ranks_that_own_several_parts_or_none_have_those_bits_too) {
    for (int kind = DP_OWN_EVEN + 1; kind < DP_NOWNS; kind++)
        for (int k = 0; k < 8; k++) {
            dp_problem p;
            char where[100];
            const int N = 2 + (kind + k) % 3;
            oracle_problem(&p, &SPECS[k % 4]);
            p.own = (dp_owners){(dp_own)kind, N};
            job x = {.p = &p,
                     .base = k & 1 ? DP_BASE_BF16 : DP_BASE_FP32,
                     .chain = k & 1 ? DP_TF32RZ : DP_FP32,
                     .merge = (dp_exchange[]){DP_EXCHANGE_ALLGATHER, DP_EXCHANGE_RING,
                                              DP_EXCHANGE_SCAN, DP_EXCHANGE_SERIAL}[k / 2],
                     .backward = 1};
            snprintf(where, sizeof where, "%s, problem %d, %d ranks, %s", dp_own_names[kind], k % 4,
                     N, dp_exchange_names[x.merge]);
            compare(&x, N, where);
            dp_problem_free(&p);
        }
}

/* ---- the convolution ------------------------------------------------------------------------- */

typedef struct {
    const dp_conv *c;
    dp_base pol;
    dp_conv_result *of; /* [N] */
} conv_job;

static void convolve(const dp_peers *peers, void *arg) {
    const conv_job *x = arg;
    dp_conv part = dp_conv_part(x->c, peers->N, peers->rank);
    dp_conv_result_alloc(&x->of[peers->rank], &part);
    CHECK(!dp_conv_rank(&part, peers, x->pol, &x->of[peers->rank], NULL), "rank %d", peers->rank);
    dp_conv_part_free(&part);
}

static void compare_conv(const dp_conv *c, int N, dp_base pol, const char *where) {
    const int parts = c->own.kind ? dp_own_parts(c->own.kind, c->T, N) : N;
    dp_conv_result want, got, of[MOST];
    conv_job x = {c, pol, of};
    if (!parts) return;
    dp_conv_result_alloc(&want, c);
    dp_conv_result_alloc(&got, c);
    REQUIRE(!dp_conv_ranks(c, parts, pol, &want, NULL), "%s", where);
    on_threads(N, convolve, &x);
    for (int i = 0; i < DP_CONV_NRESULTS; i++) {
        int64_t rows;
        int width;
        dp_conv_result_shape(c, i, &rows, &width);
        const size_t bytes = sizeof(double) * (size_t)(rows * width);
        const int tokens = dp_conv_result_fields[i].kind == DP_OF_TOKENS;
        double *a = want.out[i], *all = got.out[i];
        for (int r = 0; r < N; r++) {
            const double *b = of[r].out[i];
            CHECK(!a == !b, "%s: %s of rank %d", where, dp_conv_result_fields[i].name, r);
            if (a && tokens) dp_conv_place(c, N, r, b, all);
            CHECK(!a || tokens || !memcmp(a, b, bytes), "%s: %s of rank %d", where,
                  dp_conv_result_fields[i].name, r);
        }
        CHECK(!a || !tokens || !memcmp(a, all, bytes), "%s: %s", where,
              dp_conv_result_fields[i].name);
    }
    dp_conv_result_free(&got);
    for (int r = 0; r < N; r++)
        dp_conv_result_free(&of[r]);
    dp_conv_result_free(&want);
}

DP_TEST(peers, a_convolution_too_with_halos_over_several_ranks) {
    static const int ranks[] = {2, 3, 4, 8}, widths[] = {1, 4, 70};
    oracle_spec s = SPECS[1];
    s.K = s.V = 20; /* channels of two blocks */
    s.H = s.HV = 1;
    dp_problem p;
    oracle_problem(&p, &s);
    double *w = dp_doubles(20 * 70), *bias = dp_copy(p.k, 20);
    for (int i = 0; i < 20 * 70; i++)
        w[i] = p.v[i];
    for (int k = 0; k < 24 * DP_NOWNS; k++) {
        char where[100];
        const int N = ranks[k % 4], W = widths[k / 4 % 3], own = k / 24;
        const dp_conv c = {.T = p.T,
                           .D = 20,
                           .W = W,
                           .Nseq = p.Nseq,
                           .silu = k & 1,
                           .cu = p.cu,
                           .x = p.q,
                           .w = w,
                           .bias = k & 2 ? bias : NULL,
                           .dy = p.dout,
                           .own = {(dp_own)own, own ? N : 0}};
        snprintf(where, sizeof where, "%s, %d ranks, width %d, silu %d", dp_own_names[own], N, W,
                 k & 1);
        compare_conv(&c, N, k % 24 < 12 ? DP_BASE_FP32 : DP_BASE_BF16, where);
    }
    free(w);
    free(bias);
    dp_problem_free(&p);
}
