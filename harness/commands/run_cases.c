/* Runs cases, the longest first, on threads of their own and in other processes (run_cases.h). */
#include "run_cases.h"
#include "commands.h"
#include "finished.h"
#include "harness/mpi/processes.h"
#include "harness/record/run_json.h"
#include "harness/search/museum.h"
#include "progress.h"

#include <math.h>
#include <omp.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* ---- one case -------------------------------------------------------------------------------- */

/* The runs that a case offers, if the options left none of them. */
static int say_no_run(const dp_case *c) {
    dp_progress_lock();
    fprintf(stderr, "deltaproof: %s: offers no run with these options; it lists", c->path);
    for (int i = 0; i < c->nranks; i++)
        fprintf(stderr, "%s%d", i ? "," : " ranks = ", c->ranks[i]);
    for (int i = 0; i < c->nbase; i++)
        fprintf(stderr, "%s%s", i ? "," : "; base = ", dp_base_names[c->base[i]]);
    for (int i = 0; i < c->nchain; i++)
        fprintf(stderr, "%s%s", i ? "," : "; chain = ", dp_formats[c->chain[i]].name);
    for (int i = 0; i < c->nmerge; i++)
        fprintf(stderr, "%s%s", i ? "," : "; merge = ", dp_exchange_names[c->merge[i]]);
    fputc('\n', stderr);
    dp_progress_unlock();
    return 2;
}

static void print_case(const dp_case *c, const dp_tally *t, double seconds) {
    dp_progress_lock();
    fprintf(t->table, "%-24s %3d passed, %d failed, %d skipped, %d unjudged  (%.1f s)\n", c->name,
            t->n[DP_PASS], t->n[DP_FAIL], t->n[DP_SKIPPED], t->n[DP_UNJUDGED], seconds);
    fflush(t->table);
    dp_progress_unlock();
}

static void print_warnings(const dp_case *c, dp_fault fault) {
    for (int i = 0; i < c->nwarn; i++)
        fprintf(stderr, "deltaproof: warning: %s\n", c->warn[i]);
    if (fault && !dp_fault_shows(fault, dp_op_of(c)->faults))
        fprintf(stderr, "deltaproof: warning: %s: the fault %s cannot show in op = %s\n", c->path,
                dp_faults[fault].name, c->op_name);
}

/* 0: run and printed, else 2. */
static int run_case(const dp_batch *b, const dp_case *c, dp_runs *runs) {
    dp_err e = {0};
    dp_tally t = {.case_name = c->name, .table = b->table, .verbose = b->verbose};
    dp_run_options o = b->run;
    const double t0 = dp_now();
    const int before = runs->n;
    o.done = dp_progress_run;
    o.arg = &t;
    print_warnings(c, o.fault);
    dp_progress_begin(&t);
    const dp_status st = dp_case_run(c, &o, runs, &e);
    dp_progress_end(&t);
    if (st) return dp_refuse(&e);
    if (runs->n == before && b->named) return say_no_run(c);
    print_case(c, &t, dp_now() - t0);
    return 0;
}

/* Says of a case that ran elsewhere, or earlier, what it would have said here. */
static void print_runs(const dp_batch *b, const dp_case *c, const dp_runs *runs, double seconds) {
    dp_tally t = {.case_name = c->name, .table = b->table, .verbose = b->verbose};
    for (int i = 0; i < runs->n; i++)
        dp_progress_run(&runs->run[i], &t);
    print_case(c, &t, seconds);
}

/* ---- all cases ------------------------------------------------------------------------------- */

/* How long a case takes, in units of its own: what states cost, once for every run. */
static double cost_of(const dp_case *c) {
    const dp_problem *p = &c->p;
    const double state = (double)p->T * p->HV * p->R * p->R * (p->K + p->V + 64.) * (p->K + 64.);
    return state * c->nranks * c->nbase * (1 + c->nchain);
}

typedef struct {
    const dp_case *c;
    dp_runs runs;
    dp_key key; /* of its file, where finished cases are kept */
    int error, done;
    int given; /* the process that runs it; 0: none of the others */
} job;

static int by_cost(const void *a, const void *b) {
    const double x = cost_of((*(job *const *)a)->c), y = cost_of((*(job *const *)b)->c);
    return (x < y) - (x > y);
}

/* Simulated ranks alone run many cases side by side; devices and foreign code are asked one thing
 * at a time. */
static int side_by_side(const dp_run_options *o) {
    int foreign = o->subject != NULL;
    for (int i = 0; i < o->nbackend; i++)
        foreign |= !dp_backends[o->backend[i]].on_cpu;
    if (foreign || (!o->nbackend && !dp_cuda_unavailable(DP_BACKEND_CUDA, 1))) return 1;
    return (int)ceil(sqrt(omp_get_max_threads())); /* the other threads work inside each case */
}

/* The cases of this process and who takes the next one. */
typedef struct {
    const dp_batch *b;
    int n, next;
    job *jobs, **order;
    pthread_mutex_t lock;
} work;

static void open_work(work *w, const dp_batch *b, int n, dp_case *const *cases) {
    *w = (work){.b = b, .n = n, .lock = PTHREAD_MUTEX_INITIALIZER};
    w->jobs = dp_calloc((size_t)n + 1, sizeof *w->jobs);
    w->order = dp_calloc((size_t)n + 1, sizeof *w->order);
    for (int i = 0; i < n; i++) {
        w->jobs[i].c = cases[i];
        w->order[i] = &w->jobs[i];
    }
    if (b->shared || side_by_side(&b->run) > 1)
        qsort(w->order, (size_t)n, sizeof *w->order, by_cost);
}

static void close_work(work *w) {
    free(w->jobs);
    free(w->order);
}

/* The next case, or -1. */
static int take(work *w) {
    pthread_mutex_lock(&w->lock);
    while (w->next < w->n && w->order[w->next]->done)
        w->next++;
    const int i = w->next < w->n ? (int)(w->order[w->next++] - w->jobs) : -1;
    pthread_mutex_unlock(&w->lock);
    return i;
}

static void finish(const work *w, job *x) {
    if (w->b->resume && !x->error) dp_finished_save(w->b->resume, x->key, x->c->name, &x->runs);
    dp_progress_finished(cost_of(x->c));
}

/* Reads the cases that an earlier command has finished. */
static void resume(work *w) {
    for (int i = 0; i < w->n && w->b->resume; i++) {
        job *x = &w->jobs[i];
        x->key = dp_finished_key(x->c, &w->b->run);
        x->done = dp_finished_load(w->b->resume, x->key, x->c->name, &x->runs);
        if (!x->done) continue;
        print_runs(w->b, x->c, &x->runs, 0);
        dp_progress_finished(cost_of(x->c));
    }
}

/* On threads of this process: asks for cases with `next`, which is told of the last one, until
 * there is none. */
typedef int next_fn(work *w, const job *last, double seconds);
static void run_on_threads(work *w, next_fn *next) {
    const int outer = side_by_side(&w->b->run), inner = omp_get_max_threads() / outer;
#pragma omp parallel num_threads(outer)
    {
        omp_set_num_threads(inner > 0 ? inner : 1);
        for (int i = next(w, NULL, 0); i >= 0;) {
            job *x = &w->jobs[i];
            const double from = dp_now();
            x->error = run_case(w->b, x->c, &x->runs);
            i = next(w, x, dp_now() - from);
        }
    }
}

static int next_here(work *w, const job *last, double seconds) {
    (void)seconds;
    if (last) finish(w, (job *)last);
    return take(w);
}

/* ---- over processes -------------------------------------------------------------------------- */

/* Another process's message: the case it has run, and then its runs as bytes. */
typedef struct {
    int index; /* NOTHING: it asks for its first case */
    int error;
    double seconds;
} answer;
enum { NOTHING = -1, LEAVES = -2 };
#define LONGEST_RUNS ((size_t)1 << 30) /* of a case */

static void receive_case(work *w, int from, const answer *a, const char *runs, size_t bytes) {
    if (a->index < 0 || a->index >= w->n || w->jobs[a->index].given != from)
        dp_mpi_refuse(from, "the runs of a case that it was not given, number", a->index);
    job *x = &w->jobs[a->index];
    dp_err e = {0};
    x->given = 0;
    x->error = a->error;
    if (!x->error && dp_runs_unpack(runs, bytes, "another process", x->c->name, &x->runs, &e))
        x->error = dp_refuse(&e);
    if (!x->error) print_runs(w->b, x->c, &x->runs, a->seconds);
    finish(w, x);
}

/* A thread of the first process: gives the others cases, until all have left. */
static void *serve(void *arg) {
    work *w = arg;
    char *has_left = dp_calloc((size_t)dp_mpi_size(), 1);
    for (int left = dp_mpi_size() - 1; left > 0;) {
        int from;
        size_t bytes;
        answer a;
        char *message = dp_mpi_receive_any(DP_MPI_CASE, sizeof a, LONGEST_RUNS, &from, &bytes);
        memcpy(&a, message, sizeof a);
        if (has_left[from]) dp_mpi_refuse(from, "more than its last message, case", a.index);
        if (a.index != NOTHING && a.index != LEAVES)
            receive_case(w, from, &a, message + sizeof a, bytes - sizeof a);
        free(message);
        if (a.index == LEAVES) {
            has_left[from] = 1;
            left--;
            continue;
        }
        const int next = take(w);
        if (next >= 0) w->jobs[next].given = from;
        dp_mpi_send(from, DP_MPI_CASE, &next, sizeof next);
    }
    free(has_left);
    return NULL;
}

DP_NOT_SO("-Wanalyzer-null-argument") /* n is 0 without runs */
static void send_answer(const job *last, answer a) {
    size_t n = 0;
    char *runs = last ? dp_runs_pack(&last->runs, &n) : NULL;
    char *message = dp_alloc(1, sizeof a + n);
    memcpy(message, &a, sizeof a);
    if (n) memcpy(message + sizeof a, runs, n);
    dp_mpi_send(0, DP_MPI_CASE, message, sizeof a + n);
    free(message);
    free(runs);
}

static int next_given(work *w, const job *last, double seconds) {
    int i;
    pthread_mutex_lock(&w->lock);
    send_answer(last,
                (answer){last ? (int)(last - w->jobs) : NOTHING, last ? last->error : 0, seconds});
    dp_mpi_receive(0, DP_MPI_CASE, &i, sizeof i, "the next case");
    if (i < NOTHING || i >= w->n) dp_mpi_refuse(0, "a case that is not there, number", i);
    pthread_mutex_unlock(&w->lock);
    return i;
}

void dp_run_given_cases(const dp_batch *b, int n, dp_case *const *cases) {
    work w;
    open_work(&w, b, n, cases);
    run_on_threads(&w, next_given);
    send_answer(NULL, (answer){LEAVES, 0, 0});
    for (int i = 0; i < n; i++)
        dp_runs_free(&w.jobs[i].runs);
    close_work(&w);
}

/* ---- all of them ----------------------------------------------------------------------------- */

int dp_run_cases(const dp_batch *b, int n, dp_case *const *cases, dp_runs *runs) {
    work w;
    pthread_t server;
    int errors = 0;
    double cost = 0;
    open_work(&w, b, n, cases);
    for (int i = 0; i < n; i++)
        cost += cost_of(cases[i]);
    dp_progress_expect(n, cost);
    resume(&w);
    if (b->shared && pthread_create(&server, NULL, serve, &w)) abort();
    run_on_threads(&w, next_here);
    /* NOLINTNEXTLINE(*CallAndMessage): made where shared */
    if (b->shared) pthread_join(server, NULL);
    for (int i = 0; i < n; i++) {
        errors += w.jobs[i].error != 0;
        dp_runs_move(runs, &w.jobs[i].runs);
    }
    close_work(&w);
    return errors;
}
