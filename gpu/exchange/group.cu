/* gpu/exchange/group.cu - ranks that fail, meet and end together (group.cuh). */
#include "exchange/group.cuh"
#include <errno.h>
#include <limits.h>
#include <linux/futex.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/syscall.h>
#include <unistd.h>

/* A rank may be killed while it holds the lock. */
static void lock(Group *g) {
    if (pthread_mutex_lock(&g->lock) == EOWNERDEAD) pthread_mutex_consistent(&g->lock);
}

static void ring(Group *g) {
    __atomic_add_fetch(&g->bell, 1, __ATOMIC_SEQ_CST);
    syscall(SYS_futex, &g->bell, FUTEX_WAKE, INT_MAX, NULL, NULL, 0);
}

/* The first reason stays. */
void __attribute__((format(printf, 2, 3))) group_fail(Group *g, const char *fmt, ...) {
    va_list ap;
    va_start(ap, fmt);
    lock(g);
    if (!g->aborted) vsnprintf(g->why, sizeof g->why, fmt, ap);
    g->aborted = 1;
    if (reached(g)) *halt(g) = 1;
    pthread_mutex_unlock(&g->lock);
    ring(g);
    va_end(ap);
}

dp_status failed(const Group *g, int rank, const char *call, dp_err *e) {
    return dpg_fail(e, DP_EDEVICE, "%s:%d: rank %d: %s: %s", __FILE__, __LINE__,
                    g->first_rank + rank, call, g->why);
}

/* The first gather that has not ended everywhere, and the least advanced rank of those whose device
 * has not reached it. Ranks that wait within an earlier one are not to blame. */
static int late_device(const Group *g, int *gather) {
    int late = -1;
    *gather = INT_MAX;
    for (int r = 0; r < g->N; r++)
        if (ended(g)[r] < begun(g, r) && ended(g)[r] < *gather) *gather = ended(g)[r] + 1;
    for (int r = 0; r < g->N; r++)
        if (*gather < INT_MAX && reached(g)[r] < *gather &&
            (late < 0 || reached(g)[r] < reached(g)[late]))
            late = r;
    return late;
}

/* A process that is stopped moves no words of NCCL's either: the marks alone would name those that
 * wait for it. Windows make no host thread wait for another, so that it may be one that has not
 * come. */
void fail_slow_gather(Group *g) {
    int n, late = late_device(g, &n);
    int still = 0; /* the longest: a busy host may keep others for a while too */
    for (int r = 1; r < g->N && g->procs; r++)
        if (g->beat[r] < g->beat[still]) still = r;
    const double idle_s = g->procs ? now_s() - g->beat[still] : 0;
    if (idle_s > g->limit_s / 2)
        group_fail(g, "the process of rank %d has not run for %.1f s", still, idle_s);
    if (late >= 0)
        group_fail(g,
                   g->entered[late] < n
                       ? "rank %d did not reach %s %d within %.1f s"
                       : "the device of rank %d did not come to %s %d within %.1f s",
                   g->first_rank + late, call_of(g, n), n, g->limit_s);
    for (int r = 0; r < g->N; r++)
        if (ended(g)[r] < begun(g, r))
            group_fail(g, "%s %d did not end on rank %d within %.1f s, although %s had come to it",
                       call_of(g, ended(g)[r] + 1), ended(g)[r] + 1, g->first_rank + r, g->limit_s,
                       is_apart(g) ? "its device" : "all devices");
}

/* The first rank that has not come to meeting n, or -1. */
static int behind(const Group *g, int64_t n) {
    for (int r = 0; r < g->N; r++)
        if (__atomic_load_n(&g->met[r], __ATOMIC_SEQ_CST) < n) return r;
    return -1;
}

/* No condition variable: one that a killed process waited for may block its next broadcast. */
dp_status meet(Group *g, int rank, const char *call, double limit_s, dp_err *e) {
    int64_t n = __atomic_add_fetch(&g->met[rank], 1, __ATOMIC_SEQ_CST);
    Patience patience = {limit_s};
    const struct timespec look = {0, (long)(LOOK_S / 2 * 1e9)};
    int bell = __atomic_load_n(&g->bell, __ATOMIC_SEQ_CST), missing = behind(g, n);
    if (missing < 0) ring(g);
    for (; missing >= 0 && !g->aborted;
         bell = __atomic_load_n(&g->bell, __ATOMIC_SEQ_CST), missing = behind(g, n)) {
        if (patience.is_over())
            group_fail(g, "rank %d did not reach %s within %.1f s", missing, call, limit_s);
        syscall(SYS_futex, &g->bell, FUTEX_WAIT, bell, &look, NULL, 0);
    }
    return g->aborted ? failed(g, rank, call, e) : DP_OK;
}

/* ---- the end of a group ---------------------------------------------------------------------- */

typedef struct {
    Home *h;
    int rank, abort;
} Reclaim;

static void *reclaim_rank(void *arg) {
    Reclaim *x = (Reclaim *)arg;
    Group *g = x->h->g;
    cudaSetDevice(g->device[x->rank]);
    x->abort ? nccl.Abort(g->comm[x->rank]) : nccl.Destroy(g->comm[x->rank]);
    __sync_fetch_and_add(&x->h->reclaimed, 1);
    free(x);
    return NULL;
}

/* All ranks at once, as NCCL wants it. A device that hangs keeps its call from returning: the
 * communicator is left behind then. */
static void reclaim(Home *h, int abort) {
    for (int r = h->first; r < h->first + h->count; r++) {
        pthread_t t;
        if (!h->g->comm[r]) { /* its creation has not ended */
            __sync_fetch_and_add(&h->reclaimed, 1);
            continue;
        }
        Reclaim *x = (Reclaim *)malloc(sizeof *x);
        x->h = h;
        x->rank = r;
        x->abort = abort;
        if (pthread_create(&t, NULL, reclaim_rank, x) == 0) pthread_detach(t);
    }
    for (double t0 = now_s(); h->reclaimed < h->count && now_s() - t0 < RECLAIM_S;)
        usleep(1000);
}

/* A lock whose holder is dead is that of a process that was killed. */
static void find_dead(Group *g) {
    for (int r = 0; r < g->N && g->procs && !g->aborted; r++) {
        int got = g->watched[r] ? pthread_mutex_trylock(&g->alive[r]) : EBUSY;
        if (got == EOWNERDEAD)
            group_fail(g,
                       g->entered[r] ? "the process of rank %d has ended; its last call was %s %d"
                                     : "the process of rank %d has ended before its first %s",
                       r, call_of(g, g->entered[r]), g->entered[r]);
        if (got == 0) pthread_mutex_unlock(&g->alive[r]);
    }
}

/* Ends the group when a gather is begun and no mark moves for limit_s, or a process is gone; tells
 * NCCL when anybody ended it. */
static void *watch(void *arg) {
    Home *h = (Home *)arg;
    Group *g = h->g;
    Patience patience = {g->limit_s};
    int64_t last = -1;
    if (g->procs) {
        pthread_mutex_lock(&g->alive[h->first]);
        g->watched[h->first] = 1;
    }
    for (; !h->stop && !g->aborted; usleep(5000)) {
        int64_t sum = 0;
        int pending = 0;
        for (int r = 0; r < g->N; r++) {
            sum += reached(g)[r] + ended(g)[r];
            pending |= ended(g)[r] < begun(g, r);
        }
        find_dead(g);
        g->beat[h->first] = now_s();
        if (sum != last || !pending) {
            patience = Patience{g->limit_s};
            last = sum;
        } else if (patience.is_over())
            fail_slow_gather(g);
    }
    if (g->procs) {
        g->watched[h->first] = 0;
        pthread_mutex_unlock(&g->alive[h->first]);
    }
    if (g->aborted && g->is_nccl) reclaim(h, 1);
    return NULL;
}

/* Called by the last rank of a process, or for a group that did not come about. */
void home_free(Home *h) {
    Group *g = h->g;
    h->stop = 1;
    if (h->watched) pthread_join(h->watcher, NULL);
    if (h->watched && g->is_nccl && !g->aborted) reclaim(h, 0);
    if (h->watched && g->is_nccl && h->reclaimed < h->count)
        return; /* a thread that was left behind still reads it */
    for (int r = 0; r < g->N && !g->is_nccl; r++) {
        if (g->ready[r]) cudaEventDestroy(g->ready[r]);
        if (g->copied[r]) cudaEventDestroy(g->copied[r]);
    }
    if (!g->aborted && h->marks) { /* else a device may still hang, and this would wait for it */
        g->procs ? cudaHostUnregister((void *)g->marks) : cudaFreeHost(h->marks);
        for (int r = h->first; r < h->first + h->count; r++)
            cudaFree(h->calls[r]);
    }
    if (!g->procs) {
        pthread_mutex_destroy(&g->lock);
        free(g);
    }
    free(h);
}

void group_abort(dpg_comm *c, const char *why) {
    group_fail(((Home *)c->self)->g, "rank %d aborted: %s", c->rank, why);
}

void group_destroy(dpg_comm *c) {
    Home *h = (Home *)c->self;
    c->self = NULL;
    if (__sync_sub_and_fetch(&h->users, 1) == 0) home_free(h);
}

dp_status home_watch(Home *h, dp_err *e) {
    h->watched = pthread_create(&h->watcher, NULL, watch, h) == 0;
    if (h->watched) return DP_OK;
    home_free(h);
    return dpg_fail(e, DP_ENOMEM, "%s:%d: thread of the communicator", __FILE__, __LINE__);
}
