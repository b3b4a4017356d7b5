/* Messages by MPI (carrier.h). */
#ifdef DP_HAVE_MPI
#include "carrier.h"
#include "ref/vocabulary/problem.h"

#include <mpi.h>
#include <omp.h>
#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/syscall.h>
#include <unistd.h>

enum { PIECE = 1 << 30, PING = DP_MPI_NKINDS, PONG };
static dp_job *const job = &dp_the_job;

/* ---- waiting --------------------------------------------------------------------------------- */

/* MPI is called from one thread at a time: the one that ticks, or another. */
static pthread_mutex_t calls = PTHREAD_MUTEX_INITIALIZER;
static void lock(void) { pthread_mutex_lock(&calls); }
static void unlock(void) { pthread_mutex_unlock(&calls); }

/* A while longer each time: processes that share a core leave it to each other. */
static void rest(int *turns) {
    if (++*turns < 200)
        sched_yield();
    else
        usleep(*turns < 2000 ? 50 : 1000);
}

static MPI_Status wait_for(MPI_Request *q, int from, const char *what) {
    const double limit = job->limit + (job->rank ? 5 : 0); /* the first one asks who is silent */
    const double t0 = omp_get_wtime();
    MPI_Status st;
    for (int done = 0, turns = 0; !done; rest(&turns)) {
        lock();
        MPI_Test(q, &done, &st);
        unlock();
        if (!done && omp_get_wtime() - t0 > limit) dp_job_too_late(from, what);
    }
    return st;
}

/* ---- messages -------------------------------------------------------------------------------- */

typedef struct sending {
    MPI_Request request;
    struct sending *next;
    int to;
    char bytes[];
} sending;
static sending *under_way;

/* Frees what has arrived. */
static void tidy(void) {
    lock();
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
    unlock();
}

static void send_bytes(int to, int kind, const void *x, size_t bytes) {
    tidy();
    for (size_t at = 0; at == 0 || at < bytes; at += PIECE) {
        const size_t n = bytes - at < PIECE ? bytes - at : PIECE;
        sending *s = dp_alloc(1, sizeof *s + n);
        s->to = to;
        if (n) memcpy(s->bytes, (const char *)x + at, n);
        lock();
        MPI_Isend(s->bytes, (int)n, MPI_BYTE, to, kind, MPI_COMM_WORLD, &s->request);
        unlock();
        s->next = under_way;
        under_way = s;
    }
}

static void flush(void) {
    while (under_way) {
        wait_for(&under_way->request, under_way->to, "room for a message");
        tidy();
    }
}

static void receive_bytes(int from, int kind, void *x, size_t bytes, const char *what) {
    for (size_t at = 0; at == 0 || at < bytes; at += PIECE) {
        const size_t n = bytes - at < PIECE ? bytes - at : PIECE;
        MPI_Request q;
        lock();
        MPI_Irecv((char *)x + at, (int)n, MPI_BYTE, from, kind, MPI_COMM_WORLD, &q);
        unlock();
        const MPI_Status st = wait_for(&q, from, what);
        int came;
        MPI_Get_count(&st, MPI_BYTE, &came);
        if ((size_t)came != n) dp_job_wrong_length(from, what, at + (size_t)came, bytes);
    }
}

static void *receive_any(int kind, size_t least, size_t most, int *from, size_t *bytes) {
    MPI_Status st;
    int came = 0, n;
    for (int turns = 0; !came; rest(&turns)) {
        lock();
        MPI_Iprobe(MPI_ANY_SOURCE, kind, MPI_COMM_WORLD, &came, &st);
        unlock();
        tidy();
    }
    MPI_Get_count(&st, MPI_BYTE, &n);
    dp_job_not_between(st.MPI_SOURCE, (size_t)n, least, most);
    char *x = dp_alloc((size_t)n + 1, 1);
    lock();
    MPI_Recv(x, n, MPI_BYTE, st.MPI_SOURCE, kind, MPI_COMM_WORLD, MPI_STATUS_IGNORE);
    unlock();
    *from = st.MPI_SOURCE;
    *bytes = (size_t)n;
    return x;
}

/* ---- signs of life --------------------------------------------------------------------------- */

static int *asked; /* [size] of the first process: PING is sent, and not answered yet */

static int took(int from, int tag) {
    int came;
    MPI_Iprobe(from, tag, MPI_COMM_WORLD, &came, MPI_STATUS_IGNORE);
    if (came) MPI_Recv(NULL, 0, MPI_BYTE, from, tag, MPI_COMM_WORLD, MPI_STATUS_IGNORE);
    return came;
}

static void say(int to, int tag) {
    MPI_Request q;
    MPI_Isend(NULL, 0, MPI_BYTE, to, tag, MPI_COMM_WORLD, &q);
    MPI_Request_free(&q);
}

/* The first one asks, once a second, and the others answer; one question to each at a time. */
static void tick(int whole) {
    lock();
    for (int r = 1; r < job->size && !job->rank; r++) {
        if (took(r, PONG)) job->quiet[r] = asked[r] = 0;
        if (!whole) continue;
        job->quiet[r] += (unsigned)asked[r];
        if (!asked[r]) say(r, PING);
        asked[r] = 1;
    }
    if (job->rank) {
        const int heard = took(0, PING);
        if (heard) say(0, PONG);
        job->quiet[0] = heard ? 0 : job->quiet[0] + (unsigned)whole;
    }
    unlock();
}

/* Nobody is asked any more: what was asked is answered within a tick of theirs. */
static void hush(void) {
    for (const double t0 = omp_get_wtime(); omp_get_wtime() - t0 < 3; usleep(1000)) {
        int left = 0;
        lock();
        for (int r = 1; r < job->size && !job->rank; r++) {
            if (asked[r] && took(r, PONG)) asked[r] = 0;
            left += asked[r];
        }
        unlock();
        if (!left) return;
    }
}

/* ---- begin and end --------------------------------------------------------------------------- */

static void not_started(DP_UNUSED int sig) {
    static const char text[] = "deltaproof: MPI_Init: a process of this mpirun does not come\n";
    if (write(2, text, sizeof text - 1) < 0) _exit(3);
    _exit(2);
}

/* Watches the processes of this host; mpirun watches those of others. */
static void watch_this_host(void) {
    job->gone = dp_calloc((size_t)job->size, sizeof *job->gone);
    for (int r = 0; r < job->size; r++) {
        const int here = r && !strcmp(job->all[r].host, job->all[0].host);
        job->gone[r].fd = here ? (int)syscall(SYS_pidfd_open, job->all[r].pid, 0) : -1;
        job->gone[r].events = POLLIN;
    }
}

static int start(const dp_process *own) {
    int given;
    signal(SIGALRM, not_started);
    alarm(DP_START_S);
    MPI_Init_thread(NULL, NULL, MPI_THREAD_SERIALIZED, &given);
    MPI_Comm_rank(MPI_COMM_WORLD, &job->rank);
    MPI_Comm_size(MPI_COMM_WORLD, &job->size);
    job->all = dp_calloc((size_t)job->size, sizeof *own);
    job->quiet = dp_calloc((size_t)job->size, sizeof *job->quiet);
    asked = dp_calloc((size_t)job->size, sizeof *asked);
    MPI_Allgather(own, sizeof *own, MPI_BYTE, job->all, sizeof *own, MPI_BYTE, MPI_COMM_WORLD);
    alarm(0);
    if (given < MPI_THREAD_SERIALIZED) {
        fprintf(stderr, "deltaproof: this MPI has no threads (MPI_THREAD_SERIALIZED)\n");
        MPI_Abort(MPI_COMM_WORLD, 2);
    }
    watch_this_host();
    return 1;
}

static void finish(void) {
    flush();
    MPI_Finalize();
}

const dp_carrier dp_by_mpi = {.start = start,
                              .send = send_bytes,
                              .receive = receive_bytes,
                              .receive_any = receive_any,
                              .tick = tick,
                              .flush = flush,
                              .hush = hush,
                              .finish = finish};
#endif
