/* One of the ranks that are processes: its communicator, its run, its end (apart_rank.h). */
#ifdef DP_HAVE_CUDA
#include "apart_rank.h"
#include "ref/vocabulary/text.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

/* ---- the communicator of this process -------------------------------------------------------- */

static struct {
    int N; /* 0: none */
    dpg_comm comm;
} joined;

static void leave(void) {
    if (joined.N) joined.comm.destroy(&joined.comm);
    joined.N = 0;
}

/* LOCAL_RANK as torchrun sets it, or as MPI libraries do. Ranks that share a device are hosts of
 * their own for NCCL, which refuses them else. */
static int device_of(int rank) {
    static const char *const names[] = {"LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_RANK",
                                        "MPI_LOCALRANKID", "SLURM_LOCALID"};
    int64_t local = rank;
    int n = 1;
    char host[128];
    for (size_t i = 0; i < sizeof names / sizeof *names; i++)
        if (getenv(names[i]) && dp_number_int(getenv(names[i]), 0, 4096, &local) == DP_NUMBER_OK)
            break;
    if (cudaGetDeviceCount(&n) != cudaSuccess || n < 1) n = 1;
    if (local >= n || getenv("NCCL_HOSTID")) {
        gethostname(host, sizeof host - 1);
        snprintf(host + strnlen(host, 100), 24, "-%lld", (long long)local / n);
        setenv("NCCL_HOSTID", host, 0);
        setenv("NCCL_NET", "Socket", 0);
        setenv("NCCL_MNNVL_ENABLE", "0", 0);
    }
    setenv("NCCL_NVLS_ENABLE", "0", 0);
    return (int)local % n;
}

dp_status dp_ticket_make(dp_ticket *t, int N, dp_err *e) {
    *t = (dp_ticket){.N = N, .fresh = N > 1 && joined.N != N, .limit = dp_cuda_limit_s()};
    return t->fresh ? dpg_comm_id(t->id, e) : DP_OK;
}

static dp_status join(const dp_ticket *t, dp_err *e) {
    dp_cuda_limit(t->limit);
    if (!t->fresh) return DP_OK;
    leave();
    const dp_status st = dpg_comm_apart(&joined.comm, t->id, dp_mpi_rank(), t->N,
                                        device_of(dp_mpi_rank()), t->limit, e);
    if (!st) joined.N = t->N;
    return st;
}

/* ---- its run --------------------------------------------------------------------------------- */

void dp_apart_run_own(const dp_ticket *t, void *job, dp_status (*body)(void *job),
                      void (*end)(void *job)) {
    dp_rank *x = job;
    dp_mpi_flush(); /* ranks are to meet in NCCL's calls, which carry no messages */
    x->dev.rank = dp_mpi_rank();
    x->status = join(t, &x->dev.err);
    x->comm = t->N > 1 ? &joined.comm : NULL;
    if (!x->status) {
        x->status = body(job);
        if (x->status && x->comm) x->comm->abort(x->comm, x->dev.err.msg);
        dp_device_close(&x->dev);
        end(job);
    }
    if (x->status) leave();
}

typedef struct {
    dp_status status;
    char why[sizeof((dp_err *)0)->msg];
} ending;

void dp_apart_say(const dp_rank *x) {
    ending how = {.status = x->status};
    snprintf(how.why, sizeof how.why, "%s", x->dev.err.msg);
    dp_mpi_send(0, DP_MPI_NUMBERS, &how, sizeof how);
}

void dp_apart_hear(int r, dp_rank *x, dp_err *e) {
    ending how;
    dp_mpi_receive(r, DP_MPI_NUMBERS, &how, sizeof how, "the end of its run");
    if (how.status < DP_OK || how.status > DP_EDEVICE) dp_mpi_refuse(r, "a status", how.status);
    x->status = how.status;
    if (how.status) dp_fail(e, how.status, "%.*s", (int)sizeof how.why - 1, how.why);
}

double dp_apart_hurry(const dp_rank *own) {
    const double limit = dp_mpi_limit_s();
    if (own->status) dp_mpi_limit(2 * dp_cuda_limit_s());
    return limit;
}

void dp_apart_done(double limit, int failed) {
    dp_mpi_limit(limit);
    if (failed) leave(); /* and so do those that failed */
}
#endif
