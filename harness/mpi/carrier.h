/* harness/mpi/carrier.h - transport of messages between the processes of a job: MPI, or sockets to
 * the first process. For processes.c alone.
 */
#pragma once
#include "processes.h"

#include <poll.h>

typedef struct {
    char host[64], build[32]; /* build: a hash of the sources, dp_cache_sources */
    int pid;
    uint64_t arguments; /* a hash of its command line */
} dp_process;

typedef struct {
    int rank, size;
    volatile int ending;
    void (*end)(void); /* for a fuzzer: called instead of ending the process; does not return */
    double limit;
    dp_process *all; /* [size] */
    /* [size] of the first process: descriptors that show when a process is gone; -1: none */
    struct pollfd *gone;
    _Atomic unsigned
        *quiet; /* [size]: ticks since a process's last message; 0 if none is received here */
} dp_job;
extern dp_job dp_the_job;

typedef struct {
    /* Did this launcher start the process? Then rank, size, all and gone of the job are set. If a
     * process does not connect, this one ends. */
    int (*start)(const dp_process *own);
    void (*send)(int to, int kind, const void *x, size_t bytes);
    void (*receive)(int from, int kind, void *x, size_t bytes, const char *what);
    void *(*receive_any)(int kind, size_t least, size_t most, int *from, size_t *bytes);
    /* Called by a thread five times a second, once of these with whole = 1. Sends a sign of life,
     * sets quiet. */
    void (*tick)(int whole);
    void (*flush)(void);  /* waits until all sent messages have arrived; NULL: no need */
    void (*hush)(void);   /* after the last tick: waits until none runs; NULL: no need */
    void (*finish)(void); /* after the last message */
    const char *no_peers; /* the reason why only the first process reaches others; or NULL */
} dp_carrier;
extern const dp_carrier dp_by_mpi, dp_by_tcp;

/* Seconds within which every process must connect. */
enum { DP_START_S = 120 };

/* "rank 2 (process 4711 on host)" */
void dp_process_name(int rank, char *text, size_t size);
/* Ends the job: `from` was waited for too long, or sent a message of another length; or this
 * process cannot go on. */
void dp_job_too_late(int from, const char *what);
void dp_job_wrong_length(int from, const char *what, size_t came, size_t bytes);
void dp_job_not_between(int from, size_t came, size_t least, size_t most); /* ends it, if so */
void dp_job_end(void);
