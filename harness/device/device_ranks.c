/* Ranks on devices as threads or processes, their communicators and tokens (device_ranks.h). */
#include "device_run.h"

static double limit_s = 8;
void dp_cuda_limit(double seconds) { limit_s = seconds; }

#ifdef DP_HAVE_CUDA
#include "device_procs.h"
#include "device_ranks.h"
#include "ref/vocabulary/problem.h"

#include <errno.h>
#include <omp.h>
#include <pthread.h>
#include <stdlib.h>
#include <unistd.h>

/* once a rank has failed, the others end within this time or are left behind */
#define LEAVE_S 5.0

/* ---- communicators --------------------------------------------------------------------------- */

static dpg_comm *kept[DP_PROCS_MOST + 1];
static pid_t keeper;

static void destroy(int N, dpg_comm *c) {
    for (int r = 0; r < N && c; r++)
        c[r].destroy(&c[r]);
    free(c);
}
static void destroy_kept(void) {
    for (int N = 0; N <= DP_PROCS_MOST && getpid() == keeper; N++)
        destroy(N, kept[N]);
}

/* c[N], or NULL with one rank. NCCL's take 1.5 s to make. Every later call of as many ranks returns
 * the same ones, unless a run on them failed. */
static dp_status cuda_comms(dp_backend b, int N, dpg_comm **c, dp_err *e) {
    const int nccl = b == DP_BACKEND_NCCL;
    int devices[DP_PROCS_MOST];
    *c = NULL;
    if (N == 1) return DP_OK;
    int there = 1;
    if (!nccl && (cudaGetDeviceCount(&there) != cudaSuccess || there < 1)) there = 1;
    if (nccl && N > DP_PROCS_MOST)
        return dp_fail(e, DP_EINPUT, "%d ranks over NCCL: at most %d here", N, DP_PROCS_MOST);
    if (nccl && kept[N]) {
        *c = kept[N];
        kept[N] = NULL;
        return DP_OK;
    }
    *c = dp_calloc((size_t)N, sizeof **c);
    for (int i = 0; i < N && i < DP_PROCS_MOST; i++)
        devices[i] = nccl ? i : i % there;
    const dp_status st = nccl                ? dpg_comm_nccl(*c, N, devices, limit_s, e)
                         : N > DP_PROCS_MOST ? dpg_comm_shared(*c, N, 0, limit_s, e)
                                             : dpg_comm_devices(*c, N, devices, limit_s, e);
    if (st) {
        free(*c);
        *c = NULL;
    }
    return st;
}

static void cuda_comms_end(dp_backend b, int N, dpg_comm *c, int failed) {
    if (!c || b != DP_BACKEND_NCCL || failed) {
        destroy(N, c);
        return;
    }
    if (!keeper) {
        keeper = getpid();
        atexit(destroy_kept);
    }
    kept[N] = c;
}

double dp_cuda_limit_s(void) { return limit_s; }

int dp_cuda_processes(dp_backend b, int N) {
    int n = 0;
    return dp_backends[b].processes && dp_procs_started() && N <= DP_PROCS_MOST &&
           cudaGetDeviceCount(&n) == cudaSuccess && n < N;
}

/* ---- which rank owns which tokens ------------------------------------------------------------ */

dp_own_table dp_own_table_of(dp_owners o, int64_t T, int N) {
    dp_own_table t = {.of = o, .parts = dp_own_parts(o.kind, T, N)};
    t.cut = dp_calloc((size_t)t.parts + 1, sizeof *t.cut);
    t.owner = dp_calloc((size_t)t.parts + 1, sizeof *t.owner);
    for (int i = 0; i < t.parts; i++) {
        t.cut[i] = dp_own_cut(o.kind, T, t.parts, i);
        t.owner[i] = dp_own_rank(o, t.parts, i);
    }
    t.cut[t.parts] = t.parts ? T : 0;
    return t;
}

void dp_own_table_free(dp_own_table *t) {
    free(t->cut);
    free(t->owner);
    *t = (dp_own_table){0};
}

dpg_owners dp_own_for_kernels(const dp_own_table *t, dp_owners o) {
    return o.kind ? (dpg_owners){t->parts, o.kind == DP_OWN_GRID, t->cut, t->owner}
                  : (dpg_owners){0};
}

int64_t dp_own_tokens(const dp_own_table *t, int rank) {
    return dp_own_count(t->of, t->cut[t->parts], t->parts, rank);
}

void dp_own_copy(const dp_own_table *t, int rank, int64_t each, double *all, double *own,
                 int back) {
    dp_own_move(t->of, t->cut[t->parts], t->parts, rank, each, all, own, back);
}

/* ---- ranks ----------------------------------------------------------------------------------- */

static dp_rank *rank_of(const dp_ranks *r, int i) {
    return (dp_rank *)((char *)r->jobs + (size_t)i * r->size);
}

/* ---- one rank -------------------------------------------------------------------------------- */

static void run_rank(const dp_ranks *r, dp_rank *x) {
    x->status = r->body(x);
    x->state = x->status ? DP_RANK_FAILED : DP_RANK_ENDED;
    if (x->status && x->comm) x->comm->abort(x->comm, x->dev.err.msg);
    dp_device_close(&x->dev);
    r->end(x);
}

typedef struct {
    const dp_ranks *r;
    int rank;
} thread_start;

static void *in_thread(void *arg) {
    const thread_start s = *(thread_start *)arg;
    run_rank(s.r, rank_of(s.r, s.rank));
    return NULL;
}

static void in_process(void *ranks, int rank, dpg_comm *c, const dp_err *why) {
    dp_rank *x = rank_of(ranks, rank);
    x->comm = c;
    if (c) {
        run_rank(ranks, x);
        return;
    }
    x->dev.err = *why;
    x->status = why->code;
    x->state = DP_RANK_FAILED;
}

/* ---- all of them ----------------------------------------------------------------------------- */

/* -1, or a rank that has not returned some seconds after another one failed. Its device hangs, and
 * all memory that it may still touch must stay. */
static int join(const pthread_t *thread, volatile dp_rank_state *const *state, int N) {
    double since = 0;
    for (int r = 0; r < N; r++)
        while (pthread_tryjoin_np(thread[r], NULL) == EBUSY) {
            for (int i = 0; i < N && !since; i++)
                if (*state[i] == DP_RANK_FAILED) since = omp_get_wtime();
            if (since && omp_get_wtime() - since > LEAVE_S) return r;
            usleep(100);
        }
    return -1;
}

static int run_threads(const dp_ranks *r, volatile dp_rank_state *const *state) {
    pthread_t *thread = dp_calloc((size_t)r->N, sizeof *thread);
    thread_start *start = dp_calloc((size_t)r->N, sizeof *start);
    for (int i = 0; i < r->N; i++) {
        start[i] = (thread_start){r, i};
        pthread_create(&thread[i], NULL, in_thread, &start[i]);
    }
    const int left = join(thread, state, r->N);
    free(thread);
    if (left < 0) free(start);
    return left;
}

/* Processes see only what lies in their memory. */
static dp_status run_processes(const dp_ranks *r, volatile dp_rank_state *const *state, int *left,
                               dp_err *e) {
    dp_ranks *shared = dp_procs_alloc(sizeof *shared);
    *shared = *r;
    return dp_procs_run(r->N, in_process, shared, state, dp_cuda_limit_s(), left, e);
}

static dp_status first_failure(const dp_ranks *r, dp_err *e) {
    for (int i = 0; i < r->N; i++) {
        const dp_rank *x = rank_of(r, i);
        if (x->state == DP_RANK_FAILED) return dp_fail(e, x->status, "%s", x->dev.err.msg);
    }
    return DP_OK;
}

dp_status dp_ranks_run(const dp_ranks *r, int *left, dp_err *e) {
    dpg_comm *comm = NULL;
    dp_status st = r->procs ? DP_OK : cuda_comms(r->backend, r->N, &comm, e);
    *left = -1;
    if (st) return st;
    dp_ranks *own = dp_calloc(1, sizeof *own); /* outlives this call where a thread does */
    volatile dp_rank_state **state = dp_calloc((size_t)r->N, sizeof *state);
    *own = *r;
    for (int i = 0; i < r->N; i++) {
        dp_rank *x = rank_of(r, i);
        x->dev.rank = i;
        x->comm = comm ? &comm[i] : NULL;
        state[i] = &x->state;
    }
    if (r->procs)
        st = run_processes(r, state, left, e);
    else
        *left = run_threads(own, state);
    if (!st) st = first_failure(r, e);
    if (*left >= 0 && !r->procs) return st; /* its thread still uses what would be freed below */
    if (*left >= 0 && !st) st = dp_fail(e, DP_EDEVICE, "rank %d: its process has ended", *left);
    cuda_comms_end(r->backend, r->N, comm, st != DP_OK);
    free(state);
    free(own);
    return st;
}

void *dp_ranks_alloc(int procs, int N, size_t size) {
    return procs ? dp_procs_alloc((size_t)N * size) : dp_calloc((size_t)N, size);
}

void dp_ranks_free(int procs, void *jobs, int failed) {
    if (procs)
        dp_procs_end(failed);
    else
        free(jobs);
}
#endif
