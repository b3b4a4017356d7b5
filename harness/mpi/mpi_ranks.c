/* Ranks that are processes: their tokens go out, their results come back (mpi_ranks.h). */
#include "mpi_ranks.h"
#include "harness/simulated/rank_part.h"

#include <stdlib.h>
#include <string.h>

/* ---- peers ----------------------------------------------------------------------------------- */

static void send_to_peer(DP_UNUSED void *who, int to, const double *x, int64_t n) {
    dp_mpi_send_numbers(to, x, n);
}

static void receive_from_peer(DP_UNUSED void *who, int from, double *x, int64_t n,
                              const char *what) {
    dp_mpi_receive_numbers(from, x, n, what);
}

static dp_peers peers_of(int N) {
    return (dp_peers){
        .rank = dp_mpi_rank(), .N = N, .send = send_to_peer, .receive = receive_from_peer};
}

/* Processes of N ranks, or of N parts that they own. */
static int ranks_of(dp_owners o, int N) { return o.kind ? o.ranks : N; }

/* ---- a user's own rows ----------------------------------------------------------------------- */

dp_mpi_rows dp_mpi_rows_here(const dp_problem *p) {
    if (p->user) return (dp_mpi_rows){1, dp_user_recurrence_of(p)};
    const dp_user_recurrence *y = dp_user_recurrence_installed();
    return y ? (dp_mpi_rows){1, *y} : (dp_mpi_rows){0};
}

void dp_mpi_install(const dp_mpi_rows *x) {
    const int n = x->rows.rows.n;
    if (x->there && (n < 1 || n > DP_MAX_ROWS)) dp_mpi_refuse(0, "a recurrence of rows", n);
    dp_user_recurrence_install(x->there ? &x->rows : NULL);
}

/* ---- the rank of this process ---------------------------------------------------------------- */

typedef struct {
    int what, N;
    double limit; /* dp_mpi_limit */
    dp_base base;
    dp_format chain;
    dp_exchange merge;
    dp_payload payload;
    int backward, pair_rows;
    dp_problem p; /* shapes, T of the rank; which arrays there are */
    dp_mpi_rows rows;
} sim_job;

static struct {
    dp_problem part;
    dp_peers peers;
    dp_sim sim;
} own;

static void open_own(dp_base base, int N) {
    own.peers = peers_of(N);
    dp_sim_new_rank(&own.sim, &own.part, base, &own.peers, NULL); /* the first one has checked it */
}

/* Results of the rank that this process is, of its parts in their order, to the first. */
static void return_own(int backward) {
    for (int r = 0; r < own.sim.N; r++) {
        if (!dp_sim_has(&own.sim, r)) continue;
        const int64_t n = dp_rank_size(&own.sim, r, backward);
        DP_OWN double *all = dp_doubles(n);
        dp_rank_pack(&own.sim, r, backward, all);
        dp_mpi_send_numbers(0, all, n);
    }
}

/* ---- the pipeline: the other processes ------------------------------------------------------- */

static void work_open(const void *message, size_t bytes) {
    sim_job j;
    memcpy(&j, message, bytes);
    dp_problem *p = &own.part;
    dp_mpi_limit(j.limit);
    dp_mpi_install(&j.rows);
    *p = j.p;
    p->user = NULL; /* it is the installed one here */
    p->cu = dp_mpi_receive_cu(p->Nseq);
    for (int i = 0; i < DP_NINPUTS; i++) {
        if (!dp_input_of(p, i)) continue;
        const int64_t n = dp_input_count(p, i);
        p->in[i] = dp_doubles(n);
        dp_mpi_receive_numbers(0, p->in[i], n, dp_input_fields[i].name);
    }
    open_own(j.base, j.N);
}

static void work_run(const void *message, size_t bytes) {
    sim_job j;
    memcpy(&j, message, bytes);
    own.sim.payload = j.payload;
    own.sim.design.pair_rows = j.pair_rows;
    dp_sim_run(&own.sim, j.chain, j.merge, j.backward);
    return_own(j.backward);
}

static void work_close(DP_UNUSED const void *message, DP_UNUSED size_t bytes) {
    dp_sim_free(&own.sim);
    dp_problem_free(&own.part);
}

/* ---- the pipeline: the first process --------------------------------------------------------- */

static void send_part(int to, const dp_problem *part, sim_job *j) {
    j->p = *part;
    dp_mpi_send(to, DP_MPI_JOB, j, sizeof *j);
    dp_mpi_send_cu(to, part->cu, part->Nseq);
    for (int i = 0; i < DP_NINPUTS; i++)
        if (dp_input_of(part, i))
            dp_mpi_send_numbers(to, dp_input_of(part, i), dp_input_count(part, i));
}

dp_status dp_mpi_sim_open(dp_sim *s, const dp_problem *p, dp_base base, int N, dp_err *e) {
    const dp_design design = dp_design_of(base);
    const dp_sim_options frame = {.frame = 1};
    const dp_status st = dp_sim_open(s, p, &design, N, &frame, e);
    if (st) return st;
    const int ranks = ranks_of(p->own, N);
    sim_job j = {.what = DP_MPI_OPEN,
                 .N = ranks,
                 .limit = dp_mpi_limit_s(),
                 .base = base,
                 .rows = dp_mpi_rows_here(p)};
    for (int r = 1; r < ranks; r++) {
        dp_problem part = dp_rank_part(p, ranks, r);
        send_part(r, &part, &j);
        dp_problem_free(&part);
    }
    own.part = dp_rank_part(p, ranks, 0);
    open_own(base, ranks);
    return DP_OK;
}

void dp_mpi_sim_run(dp_sim *s, dp_format chain, dp_exchange merge, int backward) {
    const sim_job j = {.what = DP_MPI_RUN,
                       .chain = chain,
                       .merge = merge,
                       .payload = s->payload,
                       .pair_rows = s->design.pair_rows,
                       .backward = backward};
    for (int r = 1; r < ranks_of(s->p->own, s->N); r++)
        dp_mpi_send(r, DP_MPI_JOB, &j, sizeof j);
    own.sim.payload = s->payload;
    own.sim.design.pair_rows = s->design.pair_rows;
    dp_sim_run(&own.sim, chain, merge, backward);
    dp_sim_begin(s, chain, merge, backward);
    for (int r = 0; r < s->N; r++) {
        const int64_t n = dp_rank_size(s, r, backward);
        DP_OWN double *all = dp_doubles(n);
        if (dp_sim_has(&own.sim, r))
            dp_rank_pack(&own.sim, r, backward, all);
        else
            dp_mpi_receive_numbers(dp_own_rank(s->p->own, s->N, r), all, n, "the results");
        dp_rank_unpack(s, r, backward, all);
    }
}

void dp_mpi_sim_close(dp_sim *s) {
    const sim_job j = {.what = DP_MPI_CLOSE};
    for (int r = 1; r < ranks_of(s->p->own, s->N); r++)
        dp_mpi_send(r, DP_MPI_JOB, &j, sizeof j);
    dp_sim_free(&own.sim);
    dp_problem_free(&own.part);
    dp_sim_free(s);
}

/* ---- the convolution ------------------------------------------------------------------------- */

typedef struct {
    int what, N;
    double limit; /* dp_mpi_limit */
    dp_base pol;
    dp_conv c; /* shapes, T of the rank; which arrays there are */
} conv_job;

static int64_t conv_count(const dp_conv *c, int input) {
    return dp_conv_count(c, &dp_conv_input_fields[input], c->T);
}

static int64_t result_count(const dp_conv *c, int result) {
    return dp_conv_result_exists(c, result) ? dp_conv_count(c, &dp_conv_result_fields[result], c->T)
                                            : 0;
}

static int of_tokens(int result) { return dp_conv_result_fields[result].kind == DP_OF_TOKENS; }

static void work_conv(const void *message, size_t bytes) {
    conv_job j;
    memcpy(&j, message, bytes);
    dp_conv *c = &j.c;
    DP_FREED(dp_conv_result_free) dp_conv_result r;
    const dp_peers peers = peers_of(j.N);
    dp_mpi_limit(j.limit);
    c->cu = dp_mpi_receive_cu(c->Nseq);
    for (int i = 0; i < DP_CONV_NINPUTS; i++) {
        if (!c->in[i]) continue;
        c->in[i] = dp_doubles(conv_count(c, i));
        dp_mpi_receive_numbers(0, c->in[i], conv_count(c, i), dp_conv_input_fields[i].name);
    }
    dp_conv_result_alloc(&r, c);
    dp_conv_rank(c, &peers, j.pol, &r, NULL);
    for (int i = 0; i < DP_CONV_NRESULTS; i++)
        if (of_tokens(i) && result_count(c, i))
            dp_mpi_send_numbers(0, r.out[i], result_count(c, i));
    dp_conv_free(c);
}

static void send_conv(int to, const dp_conv *part, conv_job *j) {
    j->c = *part;
    dp_mpi_send(to, DP_MPI_JOB, j, sizeof *j);
    dp_mpi_send_cu(to, part->cu, part->Nseq);
    for (int i = 0; i < DP_CONV_NINPUTS; i++)
        if (j->c.in[i]) dp_mpi_send_numbers(to, j->c.in[i], conv_count(part, i));
}

DP_NOT_SO("-Wanalyzer-null-argument") /* x is of tokens, or of this process */
/* Results of rank `from`, or (from = 0) of this process. */
static void take_results(const dp_conv *c, int N, int from, const dp_conv *part,
                         dp_conv_result *own, dp_conv_result *r) {
    for (int i = 0; i < DP_CONV_NRESULTS; i++) {
        const int64_t n = result_count(part, i);
        double *to = r->out[i], *x = from ? NULL : own->out[i];
        if (!to || (from && !of_tokens(i))) continue;
        if (!of_tokens(i)) {
            memcpy(to, x, sizeof *to * (size_t)n);
            continue;
        }
        double *got = from ? dp_doubles(n) : x;
        if (from && n) dp_mpi_receive_numbers(from, got, n, "the results");
        dp_conv_place(c, N, from, got, to);
        if (from) free(got);
    }
}

dp_status dp_mpi_conv(const dp_conv *c, int N, dp_base pol, dp_conv_result *r, dp_err *e) {
    const int ranks = ranks_of(c->own, N);
    const dp_peers peers = peers_of(ranks);
    conv_job j = {.what = DP_MPI_CONV, .N = ranks, .limit = dp_mpi_limit_s(), .pol = pol};
    dp_conv_result own;
    if (N < 1 || (!c->own.kind && c->T % N) || c->T < N)
        return dp_fail(e, DP_EINPUT, "T = %lld: must be a multiple of ranks = %d", (long long)c->T,
                       N);
    for (int i = 1; i < ranks; i++) {
        dp_conv part = dp_conv_part(c, ranks, i);
        send_conv(i, &part, &j);
        dp_conv_part_free(&part);
    }
    dp_conv part = dp_conv_part(c, ranks, 0);
    dp_conv_result_alloc(&own, &part);
    const dp_status st = dp_conv_rank(&part, &peers, pol, &own, e);
    take_results(c, ranks, 0, &part, &own, r);
    dp_conv_result_free(&own);
    dp_conv_part_free(&part);
    for (int from = 1; from < ranks; from++) {
        dp_conv other = dp_conv_part(c, ranks, from);
        take_results(c, ranks, from, &other, NULL, r);
        dp_conv_part_free(&other);
    }
    return st;
}

const dp_mpi_worker dp_mpi_rank_workers[DP_MPI_NRANK_WORKERS] = {
    {DP_MPI_OPEN, sizeof(sim_job), work_open},
    {DP_MPI_RUN, sizeof(sim_job), work_run},
    {DP_MPI_CLOSE, sizeof(sim_job), work_close},
    {DP_MPI_CONV, sizeof(conv_job), work_conv}};
