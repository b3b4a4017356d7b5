/* Messages by MPI (carrier.h). */
#ifdef DP_HAVE_MPI
#define _GNU_SOURCE
#include "carrier.h"
#include "harness/base/clock.h"
#include "ref/vocabulary/problem.h"

#include <mpi.h>
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
    if (job->rank && *turns % 64 == 0) answer_ping();
}

/* Those that wait themselves answer; who does not is why they wait. */
static void name_silent(void) {
    char who[160];
    int *answered = dp_calloc((size_t)job->size, sizeof *answered);
    MPI_Request q;
    for (int r = 1; r < job->size; r++) {
        MPI_Isend(NULL, 0, MPI_BYTE, r, PING, MPI_COMM_WORLD, &q);
        MPI_Request_free(&q);
    }
    for (const double t0 = dp_now(); dp_now() - t0 < 2; usleep(1000))
        for (int r = 1, came; r < job->size; r++) {
            MPI_Iprobe(r, PONG, MPI_COMM_WORLD, &came, MPI_STATUS_IGNORE);
            answered[r] |= came;
        }
    for (int r = 1; r < job->size; r++) {
        if (answered[r]) continue;
        dp_process_name(r, who, sizeof who);
        fprintf(stderr, "deltaproof: %s does not answer\n", who);
    }
    free(answered);
}

static MPI_Status wait_for(MPI_Request *q, int from, const char *what) {
    const double limit = job->limit + (job->rank ? 5 : 0); /* the first one asks who is silent */
    const double t0 = dp_now();
    MPI_Status st;
    for (int done = 0, turns = 0; !done; rest(&turns)) {
        MPI_Test(q, &done, &st);
        if (!done && dp_now() - t0 > limit) dp_job_too_late(from, what, name_silent);
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

static void send_bytes(int to, int kind, const void *x, size_t bytes) {
    tidy();
    for (size_t at = 0; at == 0 || at < bytes; at += PIECE) {
        const size_t n = bytes - at < PIECE ? bytes - at : PIECE;
        sending *s = dp_alloc(1, sizeof *s + n);
        s->to = to;
        if (n) memcpy(s->bytes, (const char *)x + at, n);
        MPI_Isend(s->bytes, (int)n, MPI_BYTE, to, kind, MPI_COMM_WORLD, &s->request);
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
        MPI_Irecv((char *)x + at, (int)n, MPI_BYTE, from, kind, MPI_COMM_WORLD, &q);
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
        MPI_Iprobe(MPI_ANY_SOURCE, kind, MPI_COMM_WORLD, &came, &st);
        tidy();
    }
    MPI_Get_count(&st, MPI_BYTE, &n);
    dp_job_not_between(st.MPI_SOURCE, (size_t)n, least, most);
    char *x = dp_alloc((size_t)n + 1, 1);
    MPI_Recv(x, n, MPI_BYTE, st.MPI_SOURCE, kind, MPI_COMM_WORLD, MPI_STATUS_IGNORE);
    *from = st.MPI_SOURCE;
    *bytes = (size_t)n;
    return x;
}

/* ---- begin and end --------------------------------------------------------------------------- */

static void not_started(int sig) {
    static const char text[] = "deltaproof: MPI_Init: a process of this mpirun does not come\n";
    (void)sig;
    if (write(2, text, sizeof text - 1) < 0) _exit(3);
    _exit(2);
}

/* What becomes of the processes of this host; of others mpirun sees it. */
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
                              .flush = flush,
                              .finish = finish};
#endif
