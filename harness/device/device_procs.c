/* One process a rank over NCCL: start, feed, watch and end them (device_procs.h). */
#ifdef DP_HAVE_CUDA
#include "device_procs.h"
#include "harness/base/startup.h"
#include "harness/mpi/processes.h"

#include <fcntl.h>
#include <limits.h>
#include <linux/futex.h>
#include <omp.h>
#include <poll.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#define LEAVE_S 2.0               /* once a rank has failed, the others end within this time */
#define END_S 20.0                /* processes that were killed */
#define LARGEST ((size_t)1 << 38) /* bytes of a run; reserved, not used */

/* Memory shared by this process, the server that forks ranks, and the ranks. A process that is gone
 * has pid 0: the server looks. */
typedef struct {
    int turn; /* runs so far * 128 + ranks of this one: what ranks wait for */
    dp_procs_body body;
    void *jobs;
    volatile int ranks; /* that there are processes for */
    volatile pid_t pid[DP_PROCS_MOST];
    volatile int done[DP_PROCS_MOST]; /* the last job that a rank has ended */
    size_t used;
} board;
static board *b;
static char *data, *groups; /* groups: memory of the communicators of 0 .. DP_PROCS_MOST ranks */
static size_t size, group_size;
static int made[DP_PROCS_MOST + 1];
static int to_server = -1, broken;

static void *map_shared(size_t n) {
    void *p =
        mmap(NULL, n, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    return p == MAP_FAILED ? NULL : p;
}
static void *group_of(int N) { return groups + (size_t)N * group_size; }

/* ---- a rank ---------------------------------------------------------------------------------- */

static void be_rank(int rank, int last) {
    static dpg_comm comm[DP_PROCS_MOST + 1];
    static int joined[DP_PROCS_MOST + 1];
    prctl(PR_SET_PDEATHSIG, SIGKILL);
    for (;;) {
        const int turn = __atomic_load_n(&b->turn, __ATOMIC_SEQ_CST), N = turn % 128;
        if (turn == last) {
            syscall(SYS_futex, &b->turn, FUTEX_WAIT, last, NULL, NULL, 0);
            continue;
        }
        last = turn;
        if (rank >= N) continue;
        dp_err e = {0};
        if (!joined[N]) joined[N] = dpg_comm_procs_join(&comm[N], group_of(N), rank, &e) == DP_OK;
        omp_set_num_threads(omp_get_num_procs() > N ? omp_get_num_procs() / N : 1);
        b->body(b->jobs, rank, joined[N] ? &comm[N] : NULL, &e);
        __atomic_store_n(&b->done[rank], turn, __ATOMIC_SEQ_CST);
    }
}

/* ---- the server: a process without CUDA ------------------------------------------------------ */

static void reap(int flags) {
    for (pid_t p; (p = waitpid(-1, NULL, flags)) > 0;)
        for (int r = 0; r < b->ranks; r++)
            if (b->pid[r] == p) b->pid[r] = 0;
}

static void end_ranks(void) {
    for (int r = 0; r < b->ranks; r++)
        if (b->pid[r] > 0) kill(b->pid[r], SIGKILL);
    reap(0);
    b->ranks = 0;
}

/* Commands: n > 0: processes for n ranks; 0: end all. */
static void serve(int from) {
    int n;
    prctl(PR_SET_PDEATHSIG, SIGKILL);
    dp_interrupt_default();
    for (;;) {
        struct pollfd f = {.fd = from, .events = POLLIN};
        const int ready = poll(&f, 1, 50);
        reap(WNOHANG);
        if (ready <= 0) continue;
        if (read(from, &n, sizeof n) != sizeof n) break;
        if (!n) end_ranks();
        for (int r = b->ranks, turn = b->turn; r < n; r++) {
            const pid_t p = fork();
            if (!p) be_rank(r, turn);
            b->pid[r] = p > 0 ? p : 0;
        }
        b->ranks = n;
    }
    end_ranks();
    _exit(0);
}

static int command(int n) {
    if (write(to_server, &n, sizeof n) != sizeof n) return 0;
    for (const double t0 = omp_get_wtime(); b->ranks != n && omp_get_wtime() - t0 < END_S;)
        usleep(100);
    return b->ranks == n;
}

/* ---- this process ---------------------------------------------------------------------------- */

void dp_procs_start(void) {
    int fd[2];
    if (b || dp_mpi_size() > 1) return; /* ranks are processes already (device_apart.h) */
    group_size = dpg_comm_procs_bytes();
    b = map_shared(sizeof *b);
    groups = map_shared((DP_PROCS_MOST + 1) * group_size);
    for (size = LARGEST; size > 1 << 20 && !(data = map_shared(size));)
        size /= 2;
    broken = !b || !groups || !data || pipe2(fd, O_CLOEXEC);
    if (broken) return;
    fflush(NULL);
    const pid_t p = fork();
    if (!p) {
        close(fd[1]);
        serve(fd[0]);
    }
    close(fd[0]);
    to_server = fd[1];
    broken = p < 0;
}

int dp_procs_started(void) { return b && !broken; }

void *dp_procs_alloc(size_t n) {
    const size_t at = __atomic_fetch_add(&b->used, (n + 63) / 64 * 64, __ATOMIC_SEQ_CST);
    if (at + n > size) {
        fprintf(stderr, "deltaproof: %zu bytes are too many for ranks that are processes\n",
                at + n);
        _exit(2);
    }
    return data + at;
}

double *dp_procs_copy(const double *x, int64_t n) {
    return x ? memcpy(dp_procs_alloc((size_t)n * sizeof *x), x, (size_t)n * sizeof *x) : NULL;
}

static void end_all(void) {
    broken |= !command(0);
    memset(made, 0, sizeof made);
}

static dp_status prepare(int N, double limit_s, dp_err *e) {
    for (int r = 0; r < b->ranks && !broken; r++)
        if (!b->pid[r]) end_all();
    if (broken || (b->ranks < N && !command(N)))
        return dp_fail(e, DP_EDEVICE, "%s:%d: the processes of %d ranks cannot be started",
                       __FILE__, __LINE__, N);
    if (made[N]) return DP_OK;
    made[N] = 1;
    return dpg_comm_procs_init(group_of(N), N, limit_s, e);
}

dp_status dp_procs_run(int N, dp_procs_body body, void *jobs, volatile dp_rank_state *const *state,
                       double limit_s, int *left, dp_err *e) {
    const dp_status st = prepare(N, limit_s, e);
    *left = -1;
    if (st) return st;
    const int turn = (b->turn / 128 + 1) % (1 << 23) * 128 + N;
    b->body = body;
    b->jobs = jobs;
    __atomic_store_n(&b->turn, turn, __ATOMIC_SEQ_CST);
    syscall(SYS_futex, &b->turn, FUTEX_WAKE, INT_MAX, NULL, NULL, 0);
    for (double since = 0;; usleep(100)) {
        int wrong = 0, busy = -1, gone = -1;
        for (int r = 0; r < N; r++) {
            if (*state[r] == DP_RANK_FAILED) wrong = 1;
            if (__atomic_load_n(&b->done[r], __ATOMIC_SEQ_CST) == turn) continue;
            if (b->pid[r])
                busy = r;
            else
                gone = r;
        }
        *left = gone >= 0 ? gone : busy;
        if ((wrong || gone >= 0) && !since) since = omp_get_wtime();
        if (busy < 0 || (since && omp_get_wtime() - since > LEAVE_S)) break;
    }
    return DP_OK;
}

void dp_procs_end(int failed) {
    if (failed) end_all();
    madvise(data, (b->used + 4095) / 4096 * 4096, MADV_REMOVE);
    b->used = 0;
}

#endif
