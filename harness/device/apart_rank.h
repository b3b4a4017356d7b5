/* harness/device/apart_rank.h - what the runs on processes of mpirun or torchrun share
 * (device_apart.h): the communicator of this process, its rank, and how it ended.
 */
#pragma once
#include "device_ranks.h"
#include "harness/mpi/processes.h"

/* How ranks come to a communicator, the same on all: the first process makes it. */
typedef struct {
    int N, fresh; /* fresh: there is none of N ranks yet, id is NCCL's for it */
    double limit;
    char id[DPG_COMM_ID];
} dp_ticket;
dp_status dp_ticket_make(dp_ticket *t, int N, dp_err *e);

/* Runs job, which begins with a dp_rank, as the rank of this process; what it holds is freed. Its
 * status and error are in the dp_rank. */
void dp_apart_run_own(const dp_ticket *t, void *job, dp_status (*body)(void *job),
                      void (*end)(void *job));

/* How a rank ended: to the first process; from rank r, into x and, where it failed, e. */
void dp_apart_say(const dp_rank *x);
void dp_apart_hear(int r, dp_rank *x, dp_err *e);

/* In the first process, around what it hears: one that has failed itself waits less for the others,
 * who end by their own limits. */
double dp_apart_hurry(const dp_rank *own);
void dp_apart_done(double limit, int failed);
