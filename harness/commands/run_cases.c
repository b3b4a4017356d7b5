/* Runs cases, the longest first, on threads of their own and in other processes (run_cases.h). */
#include "run_cases.h"
#include "commands.h"
#include "harness/base/terminal.h"
#include "harness/mpi/processes.h"
#include "harness/record/run_json.h"
#include "harness/record/schema.h"
#include "harness/search/museum.h"
#include "print_run.h"
#include "ref/files/cache.h"
#include "ref/files/input.h"
#include "ref/files/output.h"

#include <math.h>
#include <omp.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>
#include <xxhash.h>

/* Cases that are finished, kept in a folder (run --resume DIR), so
 * that the same command goes on where it was ended.
 *
 * A file a case, named by the inputs of its runs. They are this program's sources, the case with
 * its inputs, the options that choose runs, the bytes of a library, --kernel-commit. The code of a
 * program (--run, --serve) is known by --kernel-commit alone: else its cases are run again. A file
 * is JSON (harness/record/run_json.h), checked by the table of its fields and by rules that hold
 * for every run. A file that fails is named with the field, and its case is run again.
 */

/* ---- what the runs of a case follow from ----------------------------------------------------- */

static void add(XXH3_state_t *s, const void *x, size_t n) { XXH3_128bits_update(s, x, n); }
static void add_text(XXH3_state_t *s, const char *x) { add(s, x ? x : "", x ? strlen(x) + 1 : 1); }
static void add_list(XXH3_state_t *s, int n, const void *x, size_t each) {
    add(s, &n, sizeof n);
    if (n) add(s, x, each * (size_t)n);
}

static void add_file(XXH3_state_t *s, const char *path) {
    char *bytes;
    size_t n;
    dp_err e;
    add_text(s, path);
    if (!path || dp_input_read(path, dp_input_most(), &bytes, &n, &e)) return;
    add(s, bytes, n);
    free(bytes);
}

static void add_conv(XXH3_state_t *s, dp_conv *c) {
    for (int i = 0; i < DP_CONV_NINPUTS; i++) {
        const double *x = *dp_conv_input_at(c, i);
        const int64_t n = dp_conv_count(c, &dp_conv_input_fields[i], c->T);
        if (x) add(s, x, sizeof *x * (size_t)n);
    }
}

static void add_case(XXH3_state_t *s, const dp_case *c) {
    dp_case *x = (dp_case *)c;
    add_text(s, c->name);
    add_file(s, c->path);
    if (c->op->has_problem) {
        const dp_key key = dp_problem_key(&c->p, NULL, 0);
        add(s, &key, sizeof key);
    }
    if (c->op->has_conv) add_conv(s, &x->conv);
    for (int i = 0; c->op->has_front && i < DP_NQKV; i++)
        if (c->step.on[i]) add_conv(s, &x->step.conv[i]);
}

static void add_options(XXH3_state_t *s, const dp_run_options *o) {
    add_list(s, o->nranks, o->ranks, sizeof *o->ranks);
    add_list(s, o->nbase, o->base, sizeof *o->base);
    add_list(s, o->nchain, o->chain, sizeof *o->chain);
    add_list(s, o->nmerge, o->merge, sizeof *o->merge);
    add_list(s, o->npayload, o->payload, sizeof *o->payload);
    add_list(s, o->nown, o->own, sizeof *o->own);
    add_list(s, o->nbackend, o->backend, sizeof *o->backend);
    add_list(s, o->nvariant, o->variant, sizeof *o->variant);
    add_list(s, o->truth != NULL, o->truth, sizeof *o->truth);
    add(s, &o->fault, sizeof o->fault);
    add(s, &o->drop, sizeof o->drop);
    add(s, &o->limit_s, sizeof o->limit_s);
    add_text(s, o->design);
    add_text(s, dp_unavailable(DP_BACKEND_CUDA, 1));
    if (!o->subject) return;
    add_list(s, o->again ? 2 : 0, o->again, sizeof *o->again);
    add_file(s, o->subject->path); /* of a program its command, which is no file */
    add(s, &o->subject->base, sizeof o->subject->base);
    add(s, &o->subject->chain, sizeof o->subject->chain);
}

static dp_key finished_key(const dp_case *c, const dp_batch *b) {
    dp_key key;
    XXH128_canonical_t as;
    XXH3_state_t *s = XXH3_createState();
    XXH3_128bits_reset(s);
    add_text(s, dp_cache_sources(DP_CACHE_EXPECTED));
    add_case(s, c);
    add_options(s, &b->run);
    add_text(s, b->kernel_commit);
    XXH128_canonicalFromHash(&as, XXH3_128bits_digest(s));
    memcpy(key.byte, as.digest, sizeof key.byte);
    XXH3_freeState(s);
    return key;
}

/* ---- files ----------------------------------------------------------------------------------- */

/* A file: its form, its owner, and the number of its runs. So a file that was cut or changed by
 * accident is detected before it is used. */
typedef struct {
    const char *schema, *sources, *key, *case_name, *check;
    int version;
} head;
#define SCHEMA "deltaproof-finished"
#define VERSION 1
#define AT(M) .offset = offsetof(head, M), .size = sizeof(((head *)0)->M)
#define TEXT(NAME, M) \
    { NAME, .kind = DP_KIND_TEXT, .need = DP_FIELD_REQUIRED, AT(M) }
static const dp_record_field HEAD[] = {
    TEXT("schema", schema),
    {"schema_version", .kind = DP_KIND_INTEGER, .need = DP_FIELD_REQUIRED, AT(version)},
    TEXT("sources", sources),
    TEXT("key", key),
    TEXT("case", case_name),
    TEXT("check", check)};
static const dp_object_schema HEAD_OF = {
    .name = "finished", .field = HEAD, .n = sizeof HEAD / sizeof *HEAD, .size = sizeof(head)};

static void hex_of(const unsigned char byte[16], char hex[33]) {
    for (int i = 0; i < 16; i++)
        snprintf(hex + 2 * i, 3, "%02x", byte[i]);
}

static void check_of(const json_t *runs, char hex[33]) {
    char *text = json_dumps(runs, JSON_COMPACT);
    XXH128_canonical_t as;
    XXH128_canonicalFromHash(&as, XXH3_128bits(text ? text : "", text ? strlen(text) : 0));
    hex_of(as.digest, hex);
    free(text);
}

static char *path_of(const char *dir, const char *key) {
    char *path;
    if (asprintf(&path, "%s/%s.json", dir, key) < 0) abort();
    return path;
}

/* The required head of a file. */
static dp_status check_head(const head *h, const char *path, const char *key, const char *case_name,
                            const char *check, dp_err *e) {
    const struct {
        const char *field, *is, *must;
    } rows[] = {{"schema", h->schema, SCHEMA},
                {"sources", h->sources, dp_cache_sources(DP_CACHE_EXPECTED)},
                {"key", h->key, key},
                {"case", h->case_name, case_name},
                {"check", h->check, check}};
    if (h->version != VERSION)
        return dp_fail(e, DP_EINPUT, "%s: schema_version %d, this program reads %d", path,
                       h->version, VERSION);
    for (size_t i = 0; i < sizeof rows / sizeof *rows; i++)
        if (strcmp(rows[i].is, rows[i].must))
            return dp_fail(e, DP_EINPUT, "%s: %s: is '%.60s', must be '%.60s'", path, rows[i].field,
                           rows[i].is, rows[i].must);
    return DP_OK;
}

static dp_status load(const char *path, const char *key, const char *case_name, dp_runs *runs,
                      dp_err *e) {
    char *bytes, check[33];
    size_t n;
    json_error_t je;
    head h = {0};
    dp_status st = dp_input_read(path, dp_input_most(), &bytes, &n, e);
    if (st) return st;
    json_t *all = json_loadb(bytes, n, JSON_REJECT_DUPLICATES, &je);
    free(bytes);
    if (!all) return dp_fail(e, DP_EINPUT, "%s:%d: not JSON: %s", path, je.line, je.text);
    st = dp_schema_read(&HEAD_OF, all, &h, path, "", e);
    check_of(json_object_get(all, "runs"), check);
    if (!st) st = check_head(&h, path, key, case_name, check, e);
    if (!st) st = dp_runs_from_json(json_object_get(all, "runs"), path, case_name, runs, e);
    if (!st && !runs->n) st = dp_fail(e, DP_EINPUT, "%s: runs: there is none", path);
    json_decref(all);
    return st;
}

/* 1: its runs are appended. */
static int finished_load(const char *dir, dp_key key, const char *case_name, dp_runs *runs) {
    char hex[33];
    dp_err e = {0};
    hex_of(key.byte, hex);
    char *path = path_of(dir, hex);
    const int there = !access(path, F_OK);
    if (there && load(path, hex, case_name, runs, &e))
        fprintf(stderr, "deltaproof: --resume: %s; its case is run again\n", e.msg);
    free(path);
    return there && !e.code;
}

/* A failure is said on standard error: it costs the next command its time. */
static void finished_save(const char *dir, dp_key key, const char *case_name, const dp_runs *runs) {
    char hex[33], check[33];
    dp_err e = {0};
    dp_output out;
    hex_of(key.byte, hex);
    char *path = path_of(dir, hex);
    json_t *list = dp_runs_json(runs);
    check_of(list, check);
    const head h = {SCHEMA, dp_cache_sources(DP_CACHE_EXPECTED), hex, case_name, check, VERSION};
    json_t *all = dp_schema_write(&HEAD_OF, &h);
    json_object_set_new(all, "runs", list);
    if (!dp_output_replace(&out, path, &e))
        dp_output_close(&out, json_dumpf(all, out.f, JSON_INDENT(1)) != 0, &e);
    if (e.code) fprintf(stderr, "deltaproof: --resume: %s\n", e.msg);
    json_decref(all);
    free(path);
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
    const double s = dp_now() - so_far.began, share = so_far.cost / so_far.of_cost;
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

/* Whoever prints of a run holds this, so that lines stay whole. */
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
    so_far.began = dp_now();
    progress_unlock();
}

/* `cases` of this total cost are to be run; then each that is finished. On a terminal the status
 * line says how many, for how long, and about how long the rest will take. */
static void progress_finished(double cost) {
    progress_lock();
    so_far.run++;
    so_far.cost += cost;
    progress_unlock();
}

void dp_progress_say(void *file) {
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

void dp_progress_loading(const char *path, int read, int cases) {
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
    return 2;
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

/* 0: run and printed, else 2. */
static int run_case(const dp_batch *b, const dp_case *c, dp_runs *runs) {
    dp_err e = {0};
    dp_tally t = {.case_name = c->name, .table = b->table, .verbose = b->verbose};
    dp_run_options o = b->run;
    const double t0 = dp_now();
    const int before = runs->n;
    o.done = progress_run;
    o.arg = &t;
    print_warnings(c, o.fault);
    progress_begin(&t);
    const dp_status st = dp_case_run(c, &o, runs, &e);
    progress_end(&t);
    if (st) return dp_refuse(&e);
    if (runs->n == before && b->named) return say_no_run(c);
    print_case(c, &t, dp_now() - t0);
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
    if (w->b->resume && !x->error) finished_save(w->b->resume, x->key, x->c->name, &x->runs);
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
    progress_expect(n, cost);
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
