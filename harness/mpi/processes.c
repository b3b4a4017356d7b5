/* The processes of one mpirun (processes.h). */
#define _GNU_SOURCE
#include "processes.h"

#ifndef DP_HAVE_MPI

#include <stdlib.h>

void dp_mpi_start(int argc, char **argv) { (void)argc, (void)argv; }
int dp_mpi_rank(void) { return 0; }
int dp_mpi_size(void) { return 1; }
const char *dp_mpi_unavailable(int N) {
    (void)N;
    return "this build has no MPI: make MPI=1";
}
void dp_mpi_limit(double seconds) { (void)seconds; }
double dp_mpi_limit_s(void) { return 0; }
int dp_mpi_say_gone(void) { return 0; }
/* There is nobody to send to or to wait for: dp_mpi_unavailable says so. */
void dp_mpi_send(int to, dp_mpi_kind kind, const void *x, size_t bytes) {
    (void)to, (void)kind, (void)x, (void)bytes;
    abort();
}
void dp_mpi_receive(int from, dp_mpi_kind kind, void *x, size_t bytes, const char *what) {
    (void)from, (void)kind, (void)x, (void)bytes, (void)what;
    abort();
}
void *dp_mpi_receive_any(dp_mpi_kind kind, int *from, size_t *bytes) {
    (void)kind, (void)from, (void)bytes;
    abort();
}
void dp_mpi_serve(const dp_mpi_worker *w, int n) { (void)w, (void)n; }

#else

#include "harness/base/clock.h"
#include "ref/vocabulary/problem.h"

#include <mpi.h>
#include <omp.h>
#include <poll.h>
#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/syscall.h>
#include <unistd.h>
#include <xxhash.h>

enum { END = 0, PIECE = 1 << 30, PING = DP_MPI_NKINDS, PONG };

typedef struct {
    char host[64];
    int pid;
    uint64_t arguments;
} process;

static struct {
    int on, rank, size, ending;
    pid_t self;
    double limit;
    process *all;      /* [size] */
    struct pollfd *fd; /* [size] of the first process: readable when one of this host is gone */
    char *told;        /* [size] */
    pthread_mutex_t lock;
} job = {.size = 1, .limit = 600, .lock = PTHREAD_MUTEX_INITIALIZER};

int dp_mpi_rank(void) { return job.rank; }
int dp_mpi_size(void) { return job.size; }
void dp_mpi_limit(double seconds) { job.limit = seconds; }
double dp_mpi_limit_s(void) { return job.limit; }

const char *dp_mpi_unavailable(int N) {
    static char why[160];
    if (!job.on) return "not started by mpirun: mpirun -np N deltaproof run ..";
    if (N <= job.size) return NULL;
    snprintf(why, sizeof why, "%d ranks need as many processes, mpirun started %d", N, job.size);
    return why;
}

/* ---- the end of one is the end of all -------------------------------------------------------- */

static int name_of(int r, char *text, size_t size) {
    const process *p = &job.all[r];
    return snprintf(text, size, "rank %d (process %d on %s)", r, p->pid, p->host);
}

/* The program's own way to end: it says what is finished. Others leave that to the first. */
static void end_all(void) {
    if (job.rank) MPI_Abort(MPI_COMM_WORLD, 2);
    raise(SIGTERM);
    sleep(5); /* somebody may ignore it */
    _exit(2);
}

int dp_mpi_say_gone(void) {
    char who[160];
    int n = 0;
    if (!job.on || job.rank || job.ending) return 0;
    pthread_mutex_lock(&job.lock);
    if (poll(job.fd, (nfds_t)job.size, 0) > 0)
        for (int r = 1; r < job.size; r++) {
            if (!job.fd[r].revents) continue;
            n++;
            if (job.told[r]) continue;
            job.told[r] = 1;
            name_of(r, who, sizeof who);
            fprintf(stderr, "deltaproof: %s has ended: all end\n", who);
        }
    pthread_mutex_unlock(&job.lock);
    return n;
}

static void *watch(void *arg) {
    (void)arg;
    while (!job.ending) {
        if (poll(job.fd, (nfds_t)job.size, 200) > 0 && dp_mpi_say_gone()) {
            raise(SIGTERM);
            break;
        }
    }
    return NULL;
}

/* What becomes of the first process of this host; else mpirun sees it. */
static void watch_others(void) {
    pthread_t thread;
    job.fd = dp_calloc((size_t)job.size, sizeof *job.fd);
    job.told = dp_calloc((size_t)job.size, 1);
    for (int r = 0; r < job.size; r++) {
        const int here = r && !strcmp(job.all[r].host, job.all[0].host);
        job.fd[r].fd = here ? (int)syscall(SYS_pidfd_open, job.all[r].pid, 0) : -1;
        job.fd[r].events = POLLIN;
    }
    if (!pthread_create(&thread, NULL, watch, NULL)) pthread_detach(thread);
}

/* ---- waiting --------------------------------------------------------------------------------- */

static void answer_ping(void) {
    int asked;
    MPI_Iprobe(0, PING, MPI_COMM_WORLD, &asked, MPI_STATUS_IGNORE);
    if (!asked) return;
    MPI_Request q;
    MPI_Recv(NULL, 0, MPI_BYTE, 0, PING, MPI_COMM_WORLD, MPI_STATUS_IGNORE);
    MPI_Isend(NULL, 0, MPI_BYTE, 0, PONG, MPI_COMM_WORLD, &q);
    MPI_Request_free(&q);
}

/* A while longer each time: processes that share a core leave it to each other. */
static void rest(int *turns) {
    if (++*turns < 200)
        sched_yield();
    else
        usleep(*turns < 2000 ? 50 : 1000);
    if (job.rank && *turns % 64 == 0) answer_ping();
}

/* Those that wait themselves answer; who does not is why they wait. */
static void name_silent(void) {
    char who[160];
    int *answered = dp_calloc((size_t)job.size, sizeof *answered);
    MPI_Request q;
    for (int r = 1; r < job.size; r++) {
        MPI_Isend(NULL, 0, MPI_BYTE, r, PING, MPI_COMM_WORLD, &q);
        MPI_Request_free(&q);
    }
    for (const double t0 = dp_now(); dp_now() - t0 < 2; usleep(1000))
        for (int r = 1, came; r < job.size; r++) {
            MPI_Iprobe(r, PONG, MPI_COMM_WORLD, &came, MPI_STATUS_IGNORE);
            answered[r] |= came;
        }
    for (int r = 1; r < job.size; r++) {
        if (answered[r]) continue;
        name_of(r, who, sizeof who);
        fprintf(stderr, "deltaproof: %s does not answer\n", who);
    }
    free(answered);
}

static void too_late(int from, const char *what) {
    char me[160], who[160];
    name_of(job.rank, me, sizeof me);
    name_of(from, who, sizeof who);
    fprintf(stderr, "deltaproof: %s waited %.0f s for %s of %s: all end\n", me, job.limit, what,
            who);
    if (!job.rank) name_silent();
    end_all();
}

static void wait_for(MPI_Request *q, int from, const char *what) {
    const double limit =
        job.rank ? job.limit + 5 : job.limit; /* the first one knows who is silent */
    const double t0 = dp_now();
    for (int done = 0, turns = 0; !done; rest(&turns)) {
        MPI_Test(q, &done, MPI_STATUS_IGNORE);
        if (!done && dp_now() - t0 > limit) too_late(from, what);
    }
}

/* ---- messages -------------------------------------------------------------------------------- */

typedef struct sending {
    MPI_Request request;
    struct sending *next;
    char bytes[];
} sending;
static sending *under_way;

/* Frees what has arrived. */
static void tidy(void) {
    for (sending **s = &under_way; *s;) {
        int done;
        MPI_Test(&(*s)->request, &done, MPI_STATUS_IGNORE);
        if (done) {
            sending *old = *s;
            *s = old->next;
            free(old);
        } else {
            s = &(*s)->next;
        }
    }
}

void dp_mpi_send(int to, dp_mpi_kind kind, const void *x, size_t bytes) {
    tidy();
    for (size_t at = 0; at == 0 || at < bytes; at += PIECE) {
        const size_t n = bytes - at < PIECE ? bytes - at : PIECE;
        sending *s = dp_alloc(1, sizeof *s + n);
        if (n) memcpy(s->bytes, (const char *)x + at, n);
        MPI_Isend(s->bytes, (int)n, MPI_BYTE, to, kind, MPI_COMM_WORLD, &s->request);
        s->next = under_way;
        under_way = s;
    }
}

void dp_mpi_receive(int from, dp_mpi_kind kind, void *x, size_t bytes, const char *what) {
    for (size_t at = 0; at == 0 || at < bytes; at += PIECE) {
        const size_t n = bytes - at < PIECE ? bytes - at : PIECE;
        MPI_Request q;
        MPI_Irecv((char *)x + at, (int)n, MPI_BYTE, from, kind, MPI_COMM_WORLD, &q);
        wait_for(&q, from, what);
    }
}

void *dp_mpi_receive_any(dp_mpi_kind kind, int *from, size_t *bytes) {
    MPI_Status st;
    int came = 0, n;
    for (int turns = 0; !came; rest(&turns)) {
        MPI_Iprobe(MPI_ANY_SOURCE, kind, MPI_COMM_WORLD, &came, &st);
        tidy();
    }
    MPI_Get_count(&st, MPI_BYTE, &n);
    char *x = dp_alloc((size_t)n + 1, 1);
    MPI_Recv(x, n, MPI_BYTE, st.MPI_SOURCE, kind, MPI_COMM_WORLD, MPI_STATUS_IGNORE);
    *from = st.MPI_SOURCE;
    *bytes = (size_t)n;
    return x;
}

void dp_mpi_serve(const dp_mpi_worker *w, int n) {
    for (int what = -1, from; what != END;) {
        size_t bytes;
        char *message = dp_mpi_receive_any(DP_MPI_JOB, &from, &bytes);
        memcpy(&what, message, sizeof what);
        for (int i = 0; i < n; i++)
            if (w[i].job == what) w[i].work(message, bytes);
        free(message);
    }
}

/* ---- begin and end --------------------------------------------------------------------------- */

static int by_mpirun(void) {
    static const char *const says[] = {"OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "PMIX_RANK"};
    for (size_t i = 0; i < sizeof says / sizeof *says; i++)
        if (getenv(says[i])) return 1;
    return 0;
}

/* A first process that ends tells the others; those that were forked from it are not it. */
static void finish(void) {
    const int end = END;
    if (getpid() != job.self) return;
    job.ending = 1;
    for (int r = 1; r < job.size && !job.rank; r++)
        dp_mpi_send(r, DP_MPI_JOB, &end, sizeof end);
    while (under_way) {
        tidy();
        usleep(100);
    }
    MPI_Finalize();
}

static void exchange_names(int argc, char **argv) {
    process own = {.pid = (int)getpid()};
    gethostname(own.host, sizeof own.host - 1);
    for (int i = 1; i < argc; i++)
        own.arguments = XXH3_64bits_withSeed(argv[i], strlen(argv[i]), own.arguments + 1);
    job.all = dp_calloc((size_t)job.size, sizeof own);
    MPI_Allgather(&own, sizeof own, MPI_BYTE, job.all, sizeof own, MPI_BYTE, MPI_COMM_WORLD);
}

/* Threads of this process's share of the cores that processes of this host have. */
static void share_cores(void) {
    int here = 0;
    for (int r = 0; r < job.size; r++)
        here += !strcmp(job.all[r].host, job.all[job.rank].host);
    const int cores = (int)sysconf(_SC_NPROCESSORS_ONLN), own = cores / here;
    if (own < omp_get_max_threads()) omp_set_num_threads(own > 0 ? own : 1);
}

enum { START_S = 120 };
static void not_started(int sig) {
    static const char text[] = "deltaproof: MPI_Init: a process of this mpirun does not come\n";
    (void)sig;
    if (write(2, text, sizeof text - 1) < 0) _exit(3);
    _exit(2);
}

void dp_mpi_start(int argc, char **argv) {
    int given;
    if (!by_mpirun()) return;
    signal(SIGALRM, not_started);
    alarm(START_S);
    MPI_Init_thread(NULL, NULL, MPI_THREAD_SERIALIZED, &given);
    MPI_Comm_rank(MPI_COMM_WORLD, &job.rank);
    MPI_Comm_size(MPI_COMM_WORLD, &job.size);
    exchange_names(argc, argv);
    alarm(0);
    share_cores();
    job.self = getpid();
    job.on = 1;
    atexit(finish);
    int others = given < MPI_THREAD_SERIALIZED;
    for (int r = 0; r < job.size; r++)
        others |= job.all[r].arguments != job.all[0].arguments;
    if (others) { /* each on its own */
        job.rank = 0;
        job.size = 1;
        return;
    }
    if (!job.rank) {
        watch_others();
        return;
    }
    signal(SIGTERM, SIG_IGN); /* the first process says what is finished; the others end with it */
    signal(SIGINT, SIG_IGN);
    signal(SIGHUP, SIG_IGN);
}

#endif
