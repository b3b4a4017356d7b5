/* deltaproof run CASE...: cases on simulated ranks, kernels and libraries, judged against the
 * truth. Exit status 0 pass, 1 a verdict failed, 2 could not judge. */
#include "commands.h"
#include "harness/base/startup.h"
#include "harness/base/terminal.h"
#include "harness/device/device_run.h"
#include "harness/mpi/mpi_ranks.h"
#include "harness/mpi/processes.h"
#include "harness/record/record.h"
#include "harness/record/run.h"
#include "harness/record/run_id.h"
#include "harness/record/run_pack.h"
#include "harness/run/subjects.h"
#include "options.h"
#include "print_failures.h"
#include "print_run.h"
#include "ref/files/cache.h"
#include "ref/files/input.h"
#include "ref/files/output.h"
#include "write_record.h"

#include <argp.h>
#include <errno.h>
#include <math.h>
#include <omp.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

typedef struct {
    dp_run_options run;        /* of every case; done and arg are set for each */
    int named;                 /* cases were named: one that offers no run is an error */
    int verbose;               /* a line for every run */
    FILE *table;               /* where lines go */
    const char *resume;        /* folder of finished cases (below); NULL: none */
    const char *kernel_commit; /* NULL: not said */
    int shared;                /* the other processes take cases, too */
} dp_batch;

/* Counts of one case while it runs. */
typedef struct dp_tally {
    const char *case_name;
    FILE *table; /* where its lines go */
    int verbose; /* 1: a line for every run, 0: for those that fail */
    int n[DP_NVERDICTS], runs;
    struct dp_tally *next; /* of those that run beside it */
} dp_tally;

/* Cases that are finished, kept in a folder (run --resume DIR), so
 * that the same command goes on where it was ended.
 *
 * A file a case, named by the inputs of its runs. They are this program's sources, the case with
 * its inputs, the options that choose runs, the bytes of a library, --kernel-commit. The code of a
 * program (--run, --serve) is known by --kernel-commit alone: else its cases are run again. A file
 * that its hash does not fit is named, and its case is run again.
 */

/* ---- what the runs of a case follow from ----------------------------------------------------- */

static void add_text(dp_hash *s, const char *x) {
    dp_hash_add(s, x ? x : "", x ? strlen(x) + 1 : 1);
}
static void add_list(dp_hash *s, int n, const void *x, size_t each) {
    dp_hash_add(s, &n, sizeof n);
    if (n) dp_hash_add(s, x, each * (size_t)n);
}

static void add_file(dp_hash *s, const char *path) {
    char *bytes;
    size_t n;
    dp_err e;
    add_text(s, path);
    if (!path || dp_input_read(path, dp_input_most(), &bytes, &n, &e)) return;
    dp_hash_add(s, bytes, n);
    free(bytes);
}

static void add_conv(dp_hash *s, dp_conv *c) {
    for (int i = 0; i < DP_CONV_NINPUTS; i++) {
        const double *x = c->in[i];
        const int64_t n = dp_conv_count(c, &dp_conv_input_fields[i], c->T);
        if (x) dp_hash_add(s, x, sizeof *x * (size_t)n);
    }
}

static void add_case(dp_hash *s, const dp_case *c) {
    dp_case *x = (dp_case *)c;
    add_text(s, c->name);
    add_file(s, c->path);
    if (c->op->has_problem) {
        const dp_key key = dp_problem_key(&c->p, NULL, 0);
        dp_hash_add(s, &key, sizeof key);
    }
    if (c->op->has_conv) add_conv(s, &x->conv);
    for (int i = 0; c->op->has_front && i < DP_NQKV; i++)
        if (c->step.on[i]) add_conv(s, &x->step.conv[i]);
}

static void add_options(dp_hash *s, const dp_run_options *o) {
    for (int k = 0; k < DP_ID_FAULT; k++)
        add_list(s, o->only[k].n, o->only[k].of, sizeof *o->only[k].of);
    add_list(s, o->truth != NULL, o->truth, sizeof *o->truth);
    dp_hash_add(s, &o->fault, sizeof o->fault);
    dp_hash_add(s, &o->drop, sizeof o->drop);
    dp_hash_add(s, &o->limit_s, sizeof o->limit_s);
    add_text(s, o->design);
    add_text(s, dp_unavailable(DP_BACKEND_CUDA, 1));
    if (!o->subject) return;
    add_list(s, o->again ? 2 : 0, o->again, sizeof *o->again);
    add_file(s, o->subject->path); /* of a program its command, which is no file */
    dp_hash_add(s, &o->subject->base, sizeof o->subject->base);
    dp_hash_add(s, &o->subject->chain, sizeof o->subject->chain);
}

static dp_key finished_key(const dp_case *c, const dp_batch *b) {
    dp_hash *s = dp_hash_new();
    add_text(s, dp_cache_sources(DP_CACHE_EXPECTED));
    add_case(s, c);
    add_options(s, &b->run);
    add_text(s, b->kernel_commit);
    return dp_hash_end(s);
}

/* ---- files ----------------------------------------------------------------------------------- */

/* A file begins with this; its runs follow (run_pack.h), and the hash of all before it. */
typedef struct {
    char magic[8], sources[32];
    dp_key key;
} head;

static dp_key hash_of(const void *x, size_t n) {
    dp_hash *h = dp_hash_new();
    dp_hash_add(h, x, n);
    return dp_hash_end(h);
}

static head head_of(dp_key key) {
    head h = {.magic = {'D', 'P', 'R', 'U', 'N', 'S', '0', '2'}, .key = key};
    memcpy(h.sources, dp_cache_sources(DP_CACHE_EXPECTED), sizeof h.sources);
    return h;
}

static char *path_of(const char *dir, dp_key key) {
    char hex[33];
    dp_key_hex(key, hex);
    return dp_text_new("%s/%s.runs", dir, hex);
}

static dp_status load(const char *path, dp_key key, const char *case_name, dp_runs *runs,
                      dp_err *e) {
    DP_OWN char *bytes = NULL;
    const head h = head_of(key);
    dp_err why;
    size_t n;
    dp_status st = dp_input_read(path, dp_input_most(), &bytes, &n, e);
    if (st) return st;
    if (n < sizeof h + sizeof key || memcmp(bytes, &h, sizeof h))
        return dp_fail(e, DP_EINPUT, "%s: is no file of this case and this program", path);
    n -= sizeof key;
    const dp_key hash = hash_of(bytes, n);
    if (memcmp(bytes + n, &hash, sizeof hash))
        return dp_fail(e, DP_EINPUT, "%s: is damaged: its hash is another", path);
    if (dp_runs_unpack(bytes + sizeof h, n - sizeof h, case_name, runs, &why))
        return dp_fail(e, DP_EINPUT, "%s: %s", path, why.msg);
    return runs->n ? DP_OK : dp_fail(e, DP_EINPUT, "%s: has no run", path);
}

/* 1: its runs are appended. */
static int finished_load(const char *dir, dp_key key, const char *case_name, dp_runs *runs) {
    dp_err e = {0};
    DP_OWN char *path = path_of(dir, key);
    const int there = !access(path, F_OK);
    if (there && load(path, key, case_name, runs, &e))
        fprintf(stderr, "deltaproof: --resume: %s; its case is run again\n", e.msg);
    return there && !e.code;
}

/* A failure is said on standard error: it costs the next command its time. */
static void finished_save(const char *dir, dp_key key, const dp_runs *runs) {
    const head h = head_of(key);
    dp_err e = {0};
    dp_output out;
    size_t n;
    DP_OWN char *path = path_of(dir, key), *packed = dp_runs_pack(runs, &n);
    DP_OWN char *all = dp_alloc(1, sizeof h + n);
    memcpy(all, &h, sizeof h);
    memcpy(all + sizeof h, packed, n);
    const dp_key hash = hash_of(all, sizeof h + n);
    if (!dp_output_replace(&out, path, &e)) {
        fwrite(all, 1, sizeof h + n, out.f);
        dp_output_close(&out, fwrite(&hash, sizeof hash, 1, out.f) != 1, &e);
    }
    if (e.code) fprintf(stderr, "deltaproof: --resume: %s\n", e.msg);
}

/* ---- progress -------------------------------------------------------------------------------- */

static struct {
    pthread_mutex_t lock;
    dp_tally *running;
    int n[DP_NVERDICTS];         /* runs of all cases so far */
    const char *loading;         /* the case that is read or made; NULL: none */
    int read, cases;             /* cases that were read before it, of those asked for */
    int run, to_run;             /* cases that are finished, of those that are run */
    double cost, of_cost, began; /* of those finished, of all; when they began */
} so_far = {.lock = PTHREAD_MUTEX_INITIALIZER};

static void duration(double s, char *out, size_t size) {
    if (s < 90)
        snprintf(out, size, "%.0f s", s);
    else
        snprintf(out, size, "%.0f min", s / 60);
}

static void show(void) {
    char text[120], spent[20], left[20];
    if (so_far.to_run < 2 || so_far.run == so_far.to_run) return;
    const double s = omp_get_wtime() - so_far.began, share = so_far.cost / so_far.of_cost;
    duration(s, spent, sizeof spent);
    duration(share > 0 ? s * (1 - share) / share : 0, left, sizeof left);
    snprintf(text, sizeof text, "%d of %d cases, %s%s%s%s", so_far.run, so_far.to_run, spent,
             so_far.run ? ", about " : "", so_far.run ? left : "", so_far.run ? " left" : "");
    dp_status_line(text);
}

/* Whoever prints of a run holds this, so that lines stay whole. */
static void progress_lock(void) {
    pthread_mutex_lock(&so_far.lock);
    dp_status_line("");
}

static void progress_unlock(void) {
    show();
    pthread_mutex_unlock(&so_far.lock);
}

/* `cases` of this total cost are to be run; then each that is finished. On a terminal the status
 * line says how many, for how long, and about how long the rest will take. */
static void progress_expect(int cases, double cost) {
    progress_lock();
    so_far.to_run = cases;
    so_far.of_cost = cost;
    so_far.began = omp_get_wtime();
    progress_unlock();
}

static void progress_finished(double cost) {
    progress_lock();
    so_far.run++;
    so_far.cost += cost;
    progress_unlock();
}

/* For dp_on_interrupt; arg: the FILE. */
static void progress_say(void *file) {
    const int *n = so_far.n;
    progress_lock();
    if (so_far.loading)
        fprintf(file, "%s: interrupted while the case was loaded: %d of %d loaded, none run\n",
                so_far.loading, so_far.read, so_far.cases);
    for (const dp_tally *t = so_far.running; t; t = t->next)
        fprintf(file, "%-24s interrupted after %d runs\n", t->case_name, t->runs);
    fprintf(file, "VERDICT: INTERRUPTED (%d passed, %d failed, %d skipped, %d unjudged so far)\n",
            n[DP_PASS], n[DP_FAIL], n[DP_SKIPPED], n[DP_UNJUDGED]);
    fflush(file);
    progress_unlock();
}

/* How far `run` has come, for what a signal that ends the program finds finished. After `read` of
 * `cases` the case at this path is loaded; NULL: none any more. */
static void progress_loading(const char *path, int read, int cases) {
    progress_lock();
    so_far.loading = path;
    so_far.read = read;
    so_far.cases = cases;
    progress_unlock();
}

/* The case runs, until progress_end. */
static void progress_begin(dp_tally *t) {
    progress_lock();
    t->next = so_far.running;
    so_far.running = t;
    progress_unlock();
}

/* Takes the case from those that run. */
static void progress_end(dp_tally *t) {
    progress_lock();
    for (dp_tally **p = &so_far.running; *p; p = &(*p)->next)
        if (*p == t) {
            *p = t->next;
            break;
        }
    progress_unlock();
}

/* dp_run_options.done; arg: the tally. */
static void progress_run(const dp_run *r, void *arg) {
    dp_tally *t = arg;
    t->n[r->verdict]++;
    progress_lock();
    t->runs++;
    so_far.n[r->verdict]++;
    /* the others stand among the failures at the end */
    if (t->verbose || (r->verdict == DP_FAIL && t->n[DP_FAIL] <= 3)) dp_print_run(r, t->table);
    progress_unlock();
}

/* ---- one case -------------------------------------------------------------------------------- */

enum { EMPTY = 3 }; /* run_case: the case offers no run with these options */

/* The runs that a case offers, if the options left none of them. */
static int say_no_run(const dp_case *c) {
    progress_lock();
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
    progress_unlock();
    return EMPTY;
}

static void print_case(const dp_case *c, const dp_tally *t, double seconds) {
    progress_lock();
    fprintf(t->table, "%-24s %3d passed, %d failed, %d skipped, %d unjudged  (%.1f s)\n", c->name,
            t->n[DP_PASS], t->n[DP_FAIL], t->n[DP_SKIPPED], t->n[DP_UNJUDGED], seconds);
    fflush(t->table);
    progress_unlock();
}

static void print_warnings(const dp_case *c, dp_fault fault) {
    for (int i = 0; i < c->nwarn; i++)
        fprintf(stderr, "deltaproof: warning: %s\n", c->warn[i]);
    if (fault && !dp_fault_shows(fault, c->op->faults))
        fprintf(stderr, "deltaproof: warning: %s: the fault %s cannot show in op = %s\n", c->path,
                dp_faults[fault].name, c->op_name);
}

/* 0: run and printed, else 2 or EMPTY. */
static int run_case(const dp_batch *b, const dp_case *c, dp_runs *runs) {
    dp_err e = {0};
    dp_tally t = {.case_name = c->name, .table = b->table, .verbose = b->verbose};
    dp_run_options o = b->run;
    const double t0 = omp_get_wtime();
    const int before = runs->n;
    o.done = progress_run;
    o.arg = &t;
    print_warnings(c, o.fault);
    progress_begin(&t);
    const dp_status st = dp_case_run(c, &o, runs, &e);
    progress_end(&t);
    if (st) return dp_refuse(&e);
    if (runs->n == before && b->named) return say_no_run(c);
    print_case(c, &t, omp_get_wtime() - t0);
    return 0;
}

/* Says of a case that ran elsewhere, or earlier, what it would have said here. */
static void print_runs(const dp_batch *b, const dp_case *c, const dp_runs *runs, double seconds) {
    dp_tally t = {.case_name = c->name, .table = b->table, .verbose = b->verbose};
    for (int i = 0; i < runs->n; i++)
        progress_run(&runs->run[i], &t);
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
    for (int i = 0; i < o->only[DP_ID_BACKEND].n; i++)
        foreign |= !dp_backends[o->only[DP_ID_BACKEND].of[i]].on_cpu;
    if (foreign || (!o->only[DP_ID_BACKEND].n && !dp_cuda_unavailable(DP_BACKEND_CUDA, 1)))
        return 1;
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
    if (w->b->resume && !x->error) finished_save(w->b->resume, x->key, &x->runs);
    progress_finished(cost_of(x->c));
}

/* Reads the cases that an earlier command has finished. */
static void resume(work *w) {
    const dp_subject *of = w->b->run.subject;
    const int known = !of || !of->command || w->b->kernel_commit;
    if (w->b->resume && !known)
        fprintf(stderr, "deltaproof: --resume: the program may have changed: without "
                        "--kernel-commit all cases are run\n");
    for (int i = 0; i < w->n && w->b->resume; i++) {
        job *x = &w->jobs[i];
        x->key = finished_key(x->c, w->b);
        x->done = known && finished_load(w->b->resume, x->key, x->c->name, &x->runs);
        if (!x->done) continue;
        print_runs(w->b, x->c, &x->runs, 0);
        progress_finished(cost_of(x->c));
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
            const double from = omp_get_wtime();
            x->error = run_case(w->b, x->c, &x->runs);
            i = next(w, x, omp_get_wtime() - from);
        }
    }
}

static int next_here(work *w, const job *last, DP_UNUSED double seconds) {
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
    if (!x->error && dp_runs_unpack(runs, bytes, x->c->name, &x->runs, &e))
        x->error = dp_refuse(&e);
    if (!x->error) print_runs(w->b, x->c, &x->runs, a->seconds);
    finish(w, x);
}

/* A thread of the first process: gives the others cases, until all have left. */
static void *serve(void *arg) {
    work *w = arg;
    DP_OWN char *has_left = dp_calloc((size_t)dp_mpi_size(), 1);
    for (int left = dp_mpi_size() - 1; left > 0;) {
        int from;
        size_t bytes;
        answer a;
        DP_OWN char *message =
            dp_mpi_receive_any(DP_MPI_CASE, sizeof a, LONGEST_RUNS, &from, &bytes);
        memcpy(&a, message, sizeof a);
        if (has_left[from]) dp_mpi_refuse(from, "more than its last message, case", a.index);
        if (a.index != NOTHING && a.index != LEAVES)
            receive_case(w, from, &a, message + sizeof a, bytes - sizeof a);
        if (a.index == LEAVES) {
            has_left[from] = 1;
            left--;
            continue;
        }
        const int next = take(w);
        if (next >= 0) w->jobs[next].given = from;
        dp_mpi_send(from, DP_MPI_CASE, &next, sizeof next);
    }
    return NULL;
}

DP_NOT_SO("-Wanalyzer-null-argument") /* n is 0 without runs */
static void send_answer(const job *last, answer a) {
    size_t n = 0;
    DP_OWN char *runs = last ? dp_runs_pack(&last->runs, &n) : NULL;
    DP_OWN char *message = dp_alloc(1, sizeof a + n);
    memcpy(message, &a, sizeof a);
    if (n) memcpy(message + sizeof a, runs, n);
    dp_mpi_send(0, DP_MPI_CASE, message, sizeof a + n);
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

/* In another process than the first, which has the same cases: runs those that the first one
 * assigns. */
static void run_given_cases(const dp_batch *b, int n, dp_case *const *cases) {
    work w;
    open_work(&w, b, n, cases);
    run_on_threads(&w, next_given);
    send_answer(NULL, (answer){LEAVES, 0, 0});
    for (int i = 0; i < n; i++)
        dp_runs_free(&w.jobs[i].runs);
    close_work(&w);
}

/* ---- all of them ----------------------------------------------------------------------------- */

/* Appends the runs in the order of rec's cases, and counts those that could not be judged, each
 * with its reason on standard error. */
static void run_cases(const dp_batch *b, dp_record *rec, dp_runs *runs) {
    dp_case *const *cases = rec->cases;
    const int n = rec->ncase;
    work w;
    pthread_t server;
    double cost = 0;
    open_work(&w, b, n, cases);
    for (int i = 0; i < n; i++)
        cost += cost_of(cases[i]);
    progress_expect(n, cost);
    resume(&w);
    if (b->shared && pthread_create(&server, NULL, serve, &w)) abort();
    run_on_threads(&w, next_here);
    /* NOLINTNEXTLINE(*CallAndMessage): made where shared */
    if (b->shared) pthread_join(server, NULL);
    for (int i = 0; i < n; i++) {
        rec->errors += w.jobs[i].error != 0;
        rec->empty += w.jobs[i].error == EMPTY;
        dp_runs_move(runs, &w.jobs[i].runs);
    }
    close_work(&w);
}

typedef struct {
    dp_options of;
    const char *id, *resume, *limits;
    int all, smoke, verbose;
    int *again; /* runs of a subject still to be called again: of one sequence, of packed ones */
    dp_subject subject; /* open where of.subject names one */
} options;

enum { OPT_VARIANT = 256, OPT_AGAIN };

static const struct argp_option OPTIONS[] = {
    DP_ROW_CASES,
    DP_FLAG("all", all, "run every case"),
    DP_FLAG("smoke", smoke, "run the smoke cases"),
    DP_TEXT("id", id, "ID", "reproduce one run of a record, bit for bit"),
    DP_TEXT("limits", limits, "FILE",
            "write results, truth and limits of the last run as safetensors "
            "(harness/verdict/compare.h)"),
    DP_ROW("ranks", DP_OPT_RANKS, "LIST", "only these rank counts, e.g. 1,2,4"),
    DP_ROW("chain", DP_OPT_CHAIN, "LIST", "only these formats of the M chain: " DP_FORMAT_WORDS),
    DP_ROW("base", DP_OPT_BASE, "LIST", "only these base policies: " DP_BASE_WORDS),
    DP_ROW("exchange", DP_OPT_MERGE, "LIST",
           "exchange of states between ranks, in place of the case's: " DP_EXCHANGE_WORDS
           " (ref/vocabulary/exchange.h)"),
    {"merge", 0, 0, OPTION_ALIAS, 0, 0},
    DP_ROW("payload", DP_OPT_PAYLOAD, "LIST",
           "format in which pairs and states are sent, in place of the case's: " DP_PAYLOAD_WORDS),
    DP_ROW("own", DP_OPT_OWN, "LIST",
           "which rank owns which tokens, in place of the case's: " DP_OWN_WORDS),
    DP_ROW("exact-cp", DP_OPT_EXACT_CP, 0,
           "--own grid: the bits do not depend on the number of ranks"),
    DP_ROW(
        "backend", DP_OPT_BACKEND, "LIST",
        "sim: simulated ranks; lapack: the same over CBLAS and LAPACKE, in bases fp64 and fp32, "
        "also with --design scores=factored or chunk=N; cuda: the CUDA kernels, ranks sharing one "
        "device; nccl: a device a rank, processes that share devices, or processes of torchrun or "
        "mpirun on any hosts; mpi: simulated ranks, processes of `mpirun -np N deltaproof run ..` "
        "(default: sim, lapack, and cuda where it can run)"),
    DP_ROW_SUBJECT("judge " DP_LIBRARY
                   " instead of the simulated ranks; beside them with --backend "
                   "sim"),
    DP_ROWS_PROGRAM_OF(
        "judge any program, started for each call: the words IN and OUT (appended if missing) are "
        "the safetensors files that it reads and writes; no shell; needs --base, unless its OUT "
        "states one (harness/library/command.h)",
        "the same, started once: for each call it reads a line `IN OUT` on standard input and "
        "answers `ok`, `unsupported WHY` or `failed WHY` on standard output"),
    DP_ROW_DESIGN_OF(DP_DESIGN),
    DP_ROW_CLAIM_DROP,
    DP_ROW_UNJUDGED,
    DP_ROW_LIMIT,
    DP_ROW_MEMORY,
    DP_ROW("variant", OPT_VARIANT, "LIST",
           "how the CUDA kernels make gradients: plain, dh-only (M of the forward reused), pair-dg "
           "(dg without cancellation), save-all (nothing recomputed), segments (M by the state "
           "pass, a rank's sequence cut in parts), windows (the same, ranks store states into each "
           "other's memory); both also with -dh-only or -save-all"),
    {"way", 0, 0, OPTION_ALIAS, 0, 0},
    DP_ROW_FAULT,
    DP_ROW_OUT,
    DP_ROW_JSON,
    DP_ROW(
        "again", OPT_AGAIN, "N",
        "for --subject, --run, --serve: call the first N runs (default 2) again, and N of packed "
        "sequences, with the same inputs and with other values at the same addresses; failing "
        "runs, too; 0: none"),
    DP_TEXT("resume", resume, "DIR", "keep finished cases there; the same command then skips them"),
    DP_ROW_TRUTH,
    DP_ROW_CACHE,
    DP_ROWS_PROVENANCE,
    DP_ROW("verbose", 'v', 0, "print every run"),
    {0}};

/* It takes designs, too (run/subject_lapack.c). */
static int solver_alone(const dp_options *o) {
    const dp_values *b = &o->only[DP_ID_BACKEND];
    return b->n == 1 && b->of[0] == DP_BACKEND_LAPACK;
}

static error_t parse(int key, char *arg, struct argp_state *st) {
    options *o = st->input;
    switch (key) {
    case OPT_VARIANT:
        dp_option_list(st, "variant", arg, dp_cuda_variant_names, DP_NCUDA_VARIANTS,
                       DP_NCUDA_VARIANTS, &o->of.only[DP_ID_VARIANT]);
        break;
    case OPT_AGAIN:
        o->again[0] = o->again[1] = (int)dp_option_number(st, "again", arg, 0, 1 << 20);
        break;
    case 'v': o->verbose = 1; break;
    case ARGP_KEY_END:
        if (dp_options_idle_design(&o->of) && !solver_alone(&o->of)) argp_error(st, DP_IDLE_DESIGN);
        break;
    default: return dp_option(key, arg, st, &o->of);
    }
    return 0;
}

/* ---- what to run ----------------------------------------------------------------------------- */

/* The ID's values replace the options. */
static void select_by_id(options *o, const dp_id *id) {
    const int *v = id->value;
    dp_options *of = &o->of;
    of->name[0] = id->case_name;
    const int backend = v[DP_ID_BACKEND] < 0 ? DP_BACKEND_SIM : v[DP_ID_BACKEND];
    of->nname = 1;
    for (int k = 0; k < DP_ID_FAULT; k++)
        if (v[k] >= 0) of->only[k] = (dp_values){1, {v[k]}};
    of->only[DP_ID_BACKEND] = (dp_values){1, {backend}};
    if (v[DP_ID_PAYLOAD] < 0) /* unsaid: full, whatever else the case lists */
        of->only[DP_ID_PAYLOAD] = (dp_values){1, {DP_PAYLOAD_FULL}};
    if (v[DP_ID_MERGE] < 0 && dp_backends[backend].on_device) /* unsaid: an all-gather */
        of->only[DP_ID_MERGE] = (dp_values){1, {DP_EXCHANGE_ALLGATHER}};
    if (v[DP_ID_FAULT] >= 0) of->fault = (dp_fault)v[DP_ID_FAULT];
}

static int open_subject(options *o) {
    dp_err e = {0};
    if (!dp_options_foreign(&o->of)) return 0;
    if (o->of.fault) {
        fprintf(stderr, "deltaproof: --fault goes with the simulated ranks, not with --subject, "
                        "--run and --serve\n");
        return 2;
    }
    if (dp_options_open(&o->of, &o->subject, &e)) return dp_refuse(&e);
    if (!o->of.only[DP_ID_BACKEND].n)
        o->of.only[DP_ID_BACKEND] = (dp_values){1, {DP_BACKEND_SUBJECT}};
    return 0;
}

/* Do the processes of one mpirun share the cases? Not where they are its ranks. */
static int is_shared(const options *o) {
    int ranks = dp_mpi_size() == 1;
    const dp_values *b = &o->of.only[DP_ID_BACKEND];
    for (int i = 0; i < b->n; i++)
        ranks |= dp_backends[b->of[i]].peers || dp_backends[b->of[i]].processes;
    return !ranks;
}

static dp_batch batch_of(const options *o) {
    const dp_options *of = &o->of;
    dp_batch b = {.run = {.fault = of->fault,
                          .subject = dp_options_foreign(of) ? &o->subject : NULL,
                          .design = of->design,
                          .drop = of->drop,
                          .unjudged = of->unjudged,
                          .limit_s = of->limit_s,
                          .again = *o->again ? o->again : NULL,
                          .cache = of->cache,
                          .truth = dp_options_truth(of),
                          .progress = isatty(2)},
                  .named = !o->all && !o->smoke,
                  .verbose = o->verbose || of->nname,
                  .table = dp_options_table(of),
                  .resume = o->resume,
                  .kernel_commit = of->provenance.kernel_commit,
                  .shared = is_shared(o)};
    memcpy(b.run.only, of->only, sizeof b.run.only);
    return b;
}

/* ---- running --------------------------------------------------------------------------------- */

/* NULL: not wanted, or, counted in *errors, it cannot be loaded. */
static dp_case *load_case(const options *o, const char *path, int *errors) {
    dp_case *c = dp_calloc(1, sizeof *c);
    dp_err e = {0};
    int skip = 0;
    if (o->smoke && !dp_case_open(path, 0, c, &e)) {
        skip = !c->smoke && !o->all && !o->of.nname;
        dp_case_free(c);
    }
    if (!skip && !e.code && !dp_case_load(path, c, &e)) return c;
    if (e.code) {
        ++*errors;
        if (!dp_mpi_rank()) dp_refuse(&e); /* which says it once */
    }
    free(c);
    return NULL;
}

static void free_cases(dp_case **cases, int n) {
    for (int i = 0; i < n; i++) {
        dp_case_free(cases[i]);
        free(cases[i]);
    }
    free(cases);
}

/* The other processes load the same cases (dp_run_shared). */
typedef struct {
    int what, n;
} sweep;
_Static_assert(sizeof(sweep) == DP_SWEEP_BYTES, "commands.h says how long it is");
static void call_others(int n) {
    const sweep s = {DP_MPI_SWEEP, n};
    for (int r = 1; r < dp_mpi_size(); r++)
        dp_mpi_send(r, DP_MPI_JOB, &s, sizeof s);
}

/* Few runs say the rest in their own lines; the first failed one is explained. */
static void print_begins(const options *o, const dp_runs *runs, FILE *table) {
    DP_OWN char *record = dp_options_record(&o->of);
    int explained = 0;
    for (int i = 0; i < runs->n; i++) {
        const dp_run *r = &runs->run[i];
        if (r->ntensor && r->speaks >= 0) dp_print_begins(&r->tensor[r->speaks], 4, table);
        if (r->verdict != DP_FAIL || !r->ntensor || explained++) continue;
        DP_OWN char *again = dp_options_again_text(&o->of, r->backend == DP_BACKEND_SUBJECT);
        fputs("    ", table);
        dp_print_explain(r->id, record, again, table);
    }
}

static void print_failures(const options *o, const dp_runs *runs, FILE *table) {
    DP_OWN char *own = dp_options_again_text(&o->of, 0),
                *subject = dp_options_again_text(&o->of, 1);
    DP_OWN char *record = dp_options_record(&o->of);
    const dp_again again = {own, subject, record, dp_provenance_note(&o->of.provenance, "again")};
    dp_print_failures(runs, &again, table);
}

/* Loads, runs and judges the cases of these files, and writes the record. */
static int run_files(const options *o, char *const *paths, int n, dp_record *rec, double t0) {
    const dp_batch batch = batch_of(o);
    DP_FREED(dp_runs_free) dp_runs runs = {0};
    dp_case **cases = dp_calloc((size_t)n, sizeof *cases);
    rec->runs = &runs;
    rec->cases = cases;
    for (int i = 0; i < n; i++) {
        progress_loading(paths[i], i, n);
        dp_case *c = load_case(o, paths[i], &rec->errors);
        if (c) cases[rec->ncase++] = c;
    }
    progress_loading(NULL, n, n);
    if (batch.shared) call_others(rec->ncase);
    run_cases(&batch, rec, &runs);
    rec->seconds = omp_get_wtime() - t0;
    dp_over_cases(rec);
    if (n > 1 || runs.n > 5)
        print_failures(o, &runs, batch.table);
    else
        print_begins(o, &runs, batch.table);
    dp_print_pooled(rec, batch.table);
    const int rc = dp_record_finish(&o->of, rec);
    dp_over_cases_free(rec);
    free_cases(cases, rec->ncase);
    return rc;
}

/* The state that a signal finds which ends the program, also because a rank has ended. */
typedef struct {
    FILE *table;
    const char *resume;
} interrupted;
static void say_interrupted(void *arg) {
    const interrupted *x = arg;
    dp_mpi_say_gone();
    progress_say(x->table);
    if (x->resume)
        fprintf(x->table, "finished cases are in %s: the same command goes on\n", x->resume);
}

/* From options that are complete. */
static int run(options *o, const char *command, double t0) {
    dp_err e = {0};
    dp_record rec = {.command = command, .provenance = &o->of.provenance};
    char **paths = NULL;
    int n = 0;
    for (int i = 0; i < o->of.only[DP_ID_BACKEND].n; i++)
        if (dp_backends[o->of.only[DP_ID_BACKEND].of[i]].processes) dp_procs_start();
    static interrupted at;
    at = (interrupted){dp_options_table(&o->of), o->resume};
    dp_on_interrupt(say_interrupted, &at);
    if (o->of.limit_s > 0) dp_mpi_limit(o->of.limit_s);
    if (open_subject(o)) return 2;
    dp_provenance_file(&o->of.provenance, "subject", o->of.subject);
    const int rc =
        dp_options_cases(&o->of, &paths, &n, &e) ? dp_refuse(&e) : run_files(o, paths, n, &rec, t0);
    dp_free_list(paths, n);
    dp_subject_close(&o->subject);
    return rc;
}

static int run_options(options *o, const char *command) {
    dp_err e = {0};
    dp_id id = {0};
    if (dp_outputs_check(&o->of)) return 2;
    if (o->resume && dp_make_dirs(o->resume)) {
        fprintf(stderr, "deltaproof: --resume %s: %s\n", o->resume, strerror(errno));
        return 2;
    }
    const double t0 = omp_get_wtime();
    if (!o->all && !o->smoke && !o->of.nname && !o->id) {
        fprintf(stderr, "deltaproof: run: name a case, or --all, --smoke or --id ID\n");
        return 2;
    }
    if (o->id && !dp_id_parse(o->id, dp_options_foreign(&o->of), &id, &e)) select_by_id(o, &id);
    if (o->limits) dp_limits_keep(1);
    const int rc = e.code ? dp_refuse(&e) : run(o, command, t0);
    free(id.case_name);
    return !e.code && o->limits && dp_limits_write(o->limits, &e) ? dp_refuse(&e) : rc;
}

static const struct argp ARGP = {
    .options = OPTIONS,
    .parser = parse,
    .args_doc = "[CASE...]",
    .doc = "Run cases on simulated ranks and judge them against the truth."
           "\vExit status 0 pass, 1 a verdict failed, 2 could not judge."};

int dp_cmd_run(int argc, char **argv) {
    int again[2] = {DP_RUNS_CALLED_AGAIN, DP_RUNS_CALLED_AGAIN};
    options o = {.of = dp_options_new(0, 256), .again = again};
    DP_OWN char *command = dp_command_line(argc, argv);
    dp_parse_writing(&ARGP, argc, argv, &o);
    return run_options(&o, command);
}

/* ---- in another process than the first ------------------------------------------------------- */

/* The first has understood the same arguments; cases that it could not load are left out here. */
void dp_run_shared(int argc, char **argv, const void *message) {
    int again[2] = {DP_RUNS_CALLED_AGAIN, DP_RUNS_CALLED_AGAIN};
    options o = {.of = dp_options_new(0, 256), .again = again};
    dp_err e = {0};
    dp_id id = {0};
    DP_OWN char **paths = NULL;
    int n = 0, ncase = 0, errors = 0;
    sweep s;
    memcpy(&s, message, sizeof s);
    dp_parse(&ARGP, argc, argv, &o);
    if (o.id && !dp_id_parse(o.id, dp_options_foreign(&o.of), &id, &e)) select_by_id(&o, &id);
    if (open_subject(&o) || dp_options_cases(&o.of, &paths, &n, &e)) exit(dp_refuse(&e));
    dp_case **cases = dp_calloc((size_t)n, sizeof *cases);
    for (int i = 0; i < n; i++) {
        dp_case *c = load_case(&o, paths[i], &errors);
        if (c) cases[ncase++] = c;
        free(paths[i]);
    }
    if (ncase != s.n) {
        fprintf(stderr, "deltaproof: rank %d loads %d cases, rank 0 %d: not the same files\n",
                dp_mpi_rank(), ncase, s.n);
        exit(2);
    }
    dp_batch b = batch_of(&o);
    b.table = fopen("/dev/null", "w");
    b.run.progress = 0;
    run_given_cases(&b, ncase, cases);
    fclose(b.table);
    free_cases(cases, ncase);
    free(id.case_name);
    dp_subject_close(&o.subject);
}
