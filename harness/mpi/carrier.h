/* harness/mpi/carrier.h - who carries messages between the processes of a job: MPI, or sockets to
 * the first process. For processes.c alone.
 */
#ifndef DP_CARRIER_H
#define DP_CARRIER_H
#include "processes.h"

#include <poll.h>

typedef struct {
    char host[64], build[32]; /* build: a hash of the sources, dp_cache_sources */
    int pid;
    uint64_t arguments; /* a hash of what it was started with */
} dp_process;

typedef struct {
    int rank, size;
    volatile int ending;
    void (*end)(void); /* for a fuzzer: what comes in place of the end, and does not return */
    double limit;
    dp_process *all; /* [size] */
    /* [size] of the first process: what shows when one is gone, and how; descriptor -1: nothing */
    struct pollfd *gone;
    _Atomic unsigned
        *quiet; /* [size]: ticks since its last word; 0 of those that nobody hears here */
} dp_job;
extern dp_job dp_the_job;

typedef struct {
    /* Did this launcher start the process? Then rank, size, all and gone of the job are set. Then
     * rank, size, all and gone of the job are set; a process that does not come ends this one. */
    int (*start)(const dp_process *own);
    void (*send)(int to, int kind, const void *x, size_t bytes);
    void (*receive)(int from, int kind, void *x, size_t bytes, const char *what);
    void *(*receive_any)(int kind, size_t least, size_t most, int *from, size_t *bytes);
    /* Five times a second, from a thread; whole: once in that. Says it is alive, sets quiet. */
    void (*tick)(int whole);
    void (*flush)(void);  /* until the others have all that was sent; NULL: they have it anyway */
    void (*hush)(void);   /* no tick comes any more: waits until none runs; NULL: at once */
    void (*finish)(void); /* behind the last message */
    const char *no_peers; /* why other processes than the first do not reach each other; or NULL */
} dp_carrier;
extern const dp_carrier dp_by_mpi, dp_by_tcp;

/* How long a process may take to come. */
enum { DP_START_S = 120 };

/* "rank 2 (process 4711 on host)" */
void dp_process_name(int rank, char *text, size_t size);
/* Ends the job: `from` was waited for too long, or sent a message of another length; or this
 * process cannot go on. */
void dp_job_too_late(int from, const char *what);
void dp_job_wrong_length(int from, const char *what, size_t came, size_t bytes);
void dp_job_not_between(int from, size_t came, size_t least, size_t most); /* ends it, if so */
void dp_job_end(void);

#endif
