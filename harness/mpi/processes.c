/* The processes of one job: who they are, and the end of one that ends all (processes.h). */
#include "carrier.h"
#include "harness/base/startup.h"
#include "ref/files/cache.h"
#include "ref/vocabulary/problem.h"
#include "ref/vocabulary/text.h"

#include <omp.h>
#include <pthread.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>
#include <xxhash.h>

dp_job dp_the_job = {.size = 1, .limit = 600};
static dp_job *const job = &dp_the_job;
static const dp_carrier *by; /* NULL: one process */
static pid_t self;

int dp_mpi_rank(void) { return job->rank; }
int dp_mpi_size(void) { return job->size; }
void dp_mpi_limit(double seconds) { job->limit = seconds; }
double dp_mpi_limit_s(void) { return job->limit; }

const char *dp_mpi_unavailable(int N) {
    static char why[160];
    if (by && by->no_peers) return by->no_peers;
#ifndef DP_HAVE_MPI
    if (!by) return "this build has no MPI: make MPI=1";
#endif
    if (!by) return "not started by mpirun: mpirun -np N deltaproof run ..";
    if (N <= job->size) return NULL;
    snprintf(why, sizeof why, "%d ranks need as many processes, %d were started", N, job->size);
    return why;
}

/* ---- the end of one is the end of all -------------------------------------------------------- */

void dp_process_name(int r, char *text, size_t size) {
    const dp_process *p = &job->all[r];
    snprintf(text, size, "rank %d (process %d on %s)", r, p->pid, p->host);
}

/* The first process prints the finished part, as the program does; the others leave that to it. */
void dp_job_end(void) {
    if (job->end) job->end();
    if (job->rank) _exit(2);
    raise(SIGTERM);
    sleep(5); /* somebody may ignore it */
    _exit(2);
}

/* Processes that wait themselves are heard; the others wait for those that are not. */
static void name_silent(void) {
    char who[160];
    usleep(3200000);
    for (int r = 0; r < job->size; r++) {
        if (job->quiet[r] < 3) continue;
        dp_process_name(r, who, sizeof who);
        fprintf(stderr, "deltaproof: %s does not answer\n", who);
    }
}

void dp_job_too_late(int from, const char *what) {
    char me[160], who[160];
    dp_process_name(job->rank, me, sizeof me);
    dp_process_name(from, who, sizeof who);
    fprintf(stderr, "deltaproof: %s waited %.0f s for %s of %s: all end\n", me, job->limit, what,
            who);
    if (!job->rank) name_silent();
    dp_job_end();
}

void dp_job_wrong_length(int from, const char *what, size_t came, size_t bytes) {
    fprintf(stderr, "deltaproof: rank %d sends %zu bytes of %s, not %zu\n", from, came, what,
            bytes);
    dp_job_end();
}

void dp_job_not_between(int from, size_t came, size_t least, size_t most) {
    if (came >= least && came <= most) return;
    fprintf(stderr, "deltaproof: rank %d sends a message of %zu bytes, not %zu to %zu\n", from,
            came, least, most);
    dp_job_end();
}

void dp_mpi_refuse(int r, const char *what, long long value) {
    fprintf(stderr, "deltaproof: rank %d sends %s %lld\n", r, what, value);
    dp_job_end();
}

int dp_mpi_say_gone(void) {
    static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
    static char *told;
    char who[160];
    int n = 0;
    if (!by || job->rank || job->ending) return 0;
    pthread_mutex_lock(&lock);
    if (!told) told = dp_calloc((size_t)job->size, 1);
    if (poll(job->gone, (nfds_t)job->size, 0) > 0)
        for (int r = 1; r < job->size; r++) {
            if (!job->gone[r].revents) continue;
            n++;
            if (told[r]) continue;
            told[r] = 1;
            dp_process_name(r, who, sizeof who);
            fprintf(stderr, "deltaproof: %s has ended: all end\n", who);
        }
    pthread_mutex_unlock(&lock);
    return n;
}

/* How many seconds a process may be quiet: one that is stopped, or whose host is, says nothing. */
static unsigned patience(void) {
    const char *name = "DELTAPROOF_SILENCE", *text = getenv(name);
    int64_t n = 30;
    if (!text || dp_number_int(text, 3, 1 << 30, &n) == DP_NUMBER_OK) return (unsigned)n;
    fprintf(stderr, "deltaproof: %s=%s: must be a number of seconds, at least 3\n", name, text);
    _exit(2);
}

/* Seconds are those of this thread: a job that is stopped and goes on as a whole has missed none.
 */
static void end_with_silent(unsigned most) {
    char who[160];
    for (int r = 0; r < job->size && !job->ending; r++) {
        if (job->quiet[r] < most) continue;
        dp_process_name(r, who, sizeof who);
        fprintf(stderr, "deltaproof: %s has been silent for %u s (stopped?): all end\n", who, most);
        dp_job_end();
    }
}

static pthread_mutex_t ticking = PTHREAD_MUTEX_INITIALIZER;
static void *watch(void *arg) {
    const unsigned most = *(unsigned *)arg;
    for (double last = omp_get_wtime(); !job->ending;) {
        const int some = job->rank ? poll(NULL, 0, 200) : poll(job->gone, (nfds_t)job->size, 200);
        if (some > 0 && dp_mpi_say_gone()) {
            raise(SIGTERM);
            break;
        }
        const int whole = omp_get_wtime() - last >= 1;
        if (whole) last = omp_get_wtime();
        pthread_mutex_lock(&ticking);
        if (!job->ending) by->tick(whole);
        pthread_mutex_unlock(&ticking);
        end_with_silent(most);
    }
    return NULL;
}

/* ---- messages -------------------------------------------------------------------------------- */

/* Nobody is there to send to or to wait for where there is one process: dp_mpi_unavailable says so.
 */
void dp_mpi_send(int to, dp_mpi_kind kind, const void *x, size_t bytes) {
    if (!by) abort();
    by->send(to, kind, x, bytes);
}
void dp_mpi_flush(void) {
    if (by && by->flush) by->flush();
}
void dp_mpi_receive(int from, dp_mpi_kind kind, void *x, size_t bytes, const char *what) {
    if (!by) abort();
    by->receive(from, kind, x, bytes, what);
}
void *dp_mpi_receive_any(dp_mpi_kind kind, size_t least, size_t most, int *from, size_t *bytes) {
    if (!by) abort();
    return by->receive_any(kind, least, most, from, bytes);
}

void dp_mpi_send_numbers(int to, const double *x, int64_t n) {
    dp_mpi_send(to, DP_MPI_NUMBERS, x, sizeof *x * (size_t)n);
}
void dp_mpi_receive_numbers(int from, double *x, int64_t n, const char *what) {
    dp_mpi_receive(from, DP_MPI_NUMBERS, x, sizeof *x * (size_t)n, what);
}

void dp_mpi_send_cu(int to, const int64_t *cu, int n) {
    dp_mpi_send(to, DP_MPI_NUMBERS, cu, sizeof *cu * ((size_t)n + 1));
}
int64_t *dp_mpi_receive_cu(int n) {
    int64_t *cu = dp_calloc((size_t)n + 1, sizeof *cu);
    dp_mpi_receive(0, DP_MPI_NUMBERS, cu, sizeof *cu * ((size_t)n + 1), "cu");
    return cu;
}

enum { END = 0, LONGEST_JOB = 1 << 16 };
static void work_end(const void *message, size_t bytes) { (void)message, (void)bytes; }

static const dp_mpi_worker *worker_of(const dp_mpi_worker *w, int n, int what) {
    static const dp_mpi_worker end = {END, sizeof(int), work_end};
    for (int i = 0; i < n; i++)
        if (w[i].job == what) return &w[i];
    return what == END ? &end : NULL;
}

void dp_mpi_serve(const dp_mpi_worker *w, int n) {
    for (int what = -1, from; what != END;) {
        size_t bytes;
        DP_OWN char *message =
            dp_mpi_receive_any(DP_MPI_JOB, sizeof what, LONGEST_JOB, &from, &bytes);
        memcpy(&what, message, sizeof what);
        const dp_mpi_worker *x = worker_of(w, n, what);
        if (!x || from) dp_mpi_refuse(from, "a job that nobody does here, number", what);
        if (bytes != x->bytes) dp_job_wrong_length(from, "a job", bytes, x->bytes);
        x->work(message, bytes);
    }
}

/* ---- begin and end --------------------------------------------------------------------------- */

/* A first process that ends tells the others; those that were forked from it are not it. */
static void finish(void) {
    const int end = END;
    if (getpid() != self) return;
    pthread_mutex_lock(&ticking); /* for ever */
    job->ending = 1;
    if (by->hush) by->hush();
    for (int r = 1; r < job->size && !job->rank; r++)
        dp_mpi_send(r, DP_MPI_JOB, &end, sizeof end);
    by->finish();
}

static dp_process this_process(int argc, char **argv) {
    dp_process own = {.pid = (int)getpid()};
    gethostname(own.host, sizeof own.host - 1);
    memcpy(own.build, dp_cache_sources(DP_CACHE_EXPECTED), sizeof own.build);
    for (int i = 1; i < argc; i++)
        own.arguments = XXH3_64bits_withSeed(argv[i], strlen(argv[i]), own.arguments + 1);
    return own;
}

/* Threads of this process's share of the cores that processes of this host have. */
static void share_cores(void) {
    int here = 0;
    for (int r = 0; r < job->size; r++)
        here += !strcmp(job->all[r].host, job->all[job->rank].host);
    /* NOLINTNEXTLINE(clang-analyzer-core.DivideZero): this rank is one of all */
    const int own = (int)sysconf(_SC_NPROCESSORS_ONLN) / here;
    if (own < omp_get_max_threads()) omp_set_num_threads(own > 0 ? own : 1);
}

static void refuse_other_builds(void) {
    char who[160];
    for (int r = 0; r < job->size; r++) {
        if (!memcmp(job->all[r].build, job->all[0].build, sizeof job->all[r].build)) continue;
        dp_process_name(r, who, sizeof who);
        fprintf(stderr, "deltaproof: %s is another build than rank 0\n", who);
        _exit(2);
    }
}

static int same_arguments(void) {
    for (int r = 0; r < job->size; r++)
        if (job->all[r].arguments != job->all[0].arguments) return 0;
    return 1;
}

/* Commands that take more than one process. A command that a rank of a training starts by itself is
 * not one of its processes. */
static int is_asked_for(int argc, char **argv) {
    static const char *const commands[] = {"run", "check", "differ"};
    if (argc < 2 || getenv("DELTAPROOF_ALONE")) return 0;
    for (size_t i = 0; i < sizeof commands / sizeof *commands; i++)
        if (!strcmp(argv[1], commands[i])) return 1;
    return 0;
}

/* The value of --backend, which may be abbreviated: after `=`, or the next argument; else NULL. */
static const char *backend_of(const char *arg, const char *next) {
    static const char name[] = "--backend", shortest[] = "--bac";
    const size_t n = strcspn(arg, "=");
    if (n < strlen(shortest) || n > strlen(name) || strncmp(arg, name, n)) return NULL;
    return arg[n] ? arg + n + 1 : next;
}

/* torchrun's environment reaches whatever its processes start: only --backend nccl means it, or a
 * port of this program's own. */
static const dp_carrier *carrier(int argc, char **argv) {
#ifdef DP_HAVE_MPI
    if (dp_under_mpirun()) return &dp_by_mpi;
#endif
    if (getenv("DELTAPROOF_PORT")) return &dp_by_tcp;
    for (int i = 2; i < argc; i++) {
        const char *value = backend_of(argv[i], i + 1 < argc ? argv[i + 1] : "");
        if (value && dp_is_listed("nccl", value, ',')) return &dp_by_tcp;
    }
    return NULL;
}

void dp_mpi_start(int argc, char **argv) {
    const dp_process own = this_process(argc, argv);
    const dp_carrier *c = is_asked_for(argc, argv) ? carrier(argc, argv) : NULL;
    if (!c || !c->start(&own)) return;
    static unsigned most;
    pthread_t thread;
    most = patience();
    by = c;
    self = getpid();
    refuse_other_builds();
    share_cores();
    atexit(finish);
    if (!same_arguments()) { /* each on its own */
        job->rank = 0;
        job->size = 1;
    } else if (job->rank) {
        /* the first process says what is finished; the others end with it */
        signal(SIGTERM, SIG_IGN);
        signal(SIGINT, SIG_IGN);
        signal(SIGHUP, SIG_IGN);
    }
    if (job->size > 1) {
        if (pthread_create(&thread, NULL, watch, &most)) abort();
        pthread_detach(thread);
    }
}
