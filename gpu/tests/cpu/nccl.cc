/* gpu/tests/cpu/nccl.cc - the calls of NCCL that gpu/exchange/ makes, for ranks that are host
 * threads or processes. A gather returns when all ranks have reached it or the communicator is
 * aborted, like the library's kernel. Loaded as libnccl.so.2 by the kernels on the CPU. */
#include <fcntl.h>
#include <nccl.h>
#include <pthread.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

/* A message from one rank to another, threads. */
struct Mail {
    void *words;
    volatile long sent, taken;
};
struct Meeting {
    pthread_mutex_t lock;
    pthread_cond_t all;
    int N, here, round, users;
    const void **send;
    Mail *mail; /* [N, N] of each sender to each receiver */
};
/* Processes: a file of memory that the unique id names, and that ends with them. */
enum { MAX_PROCS = 16, SLOT = 16 << 20 };
/* A message from one rank to another, processes. */
struct Letter {
    volatile long sent, taken;
    char words[SLOT];
};
struct Shared {
    int N;
    volatile long met[MAX_PROCS];
    char slot[MAX_PROCS][SLOT];
    Letter mail[MAX_PROCS][MAX_PROCS]; /* of each sender to each receiver */
};
struct ncclComm {
    Meeting *m;
    Shared *s;
    int rank;
    volatile int aborted;
};

static bool meet_processes(ncclComm_t c) {
    long n = __sync_add_and_fetch(&c->s->met[c->rank], 1);
    for (int r = 0; r < c->s->N; r++)
        while (c->s->met[r] < n) {
            if (c->aborted) return false;
            usleep(20);
        }
    __sync_synchronize();
    return true;
}

static bool meet(ncclComm_t c) {
    if (c->s) return meet_processes(c);
    Meeting *m = c->m;
    pthread_mutex_lock(&m->lock);
    int round = m->round;
    if (++m->here == m->N) {
        m->here = 0;
        m->round++;
        pthread_cond_broadcast(&m->all);
    }
    while (m->round == round && !c->aborted)
        pthread_cond_wait(&m->all, &m->lock);
    bool ok = m->round != round;
    pthread_mutex_unlock(&m->lock);
    return ok;
}

extern "C" {
ncclResult_t ncclCommInitAll(ncclComm_t *comm, int N, const int *) {
    if (getenv("NCCL_DEBUG")) fprintf(stderr, "ncclCommInitAll of %d ranks\n", N);
    Meeting *m = (Meeting *)calloc(1, sizeof *m);
    pthread_mutex_init(&m->lock, NULL);
    pthread_cond_init(&m->all, NULL);
    m->N = m->users = N;
    m->send = (const void **)calloc(N, sizeof *m->send);
    m->mail = (Mail *)calloc(N * N, sizeof *m->mail);
    for (int r = 0; r < N; r++) {
        comm[r] = (ncclComm_t)calloc(1, sizeof **comm);
        comm[r]->m = m;
        comm[r]->rank = r;
    }
    return ncclSuccess;
}

ncclResult_t ncclGetUniqueId(ncclUniqueId *id) {
    int f = memfd_create("nccl", MFD_CLOEXEC);
    snprintf(id->internal, sizeof id->internal, "/proc/%d/fd/%d", (int)getpid(), f);
    return f < 0 || ftruncate(f, sizeof(Shared)) ? ncclSystemError : ncclSuccess;
}

ncclResult_t ncclCommInitRank(ncclComm_t *comm, int N, ncclUniqueId id, int rank) {
    if (rank == 0 && getenv("NCCL_DEBUG")) fprintf(stderr, "ncclCommInitRank of %d ranks\n", N);
    int f = open(id.internal, O_RDWR), own;
    void *s = f < 0 ? MAP_FAILED
                    : mmap(NULL, sizeof(Shared), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_NORESERVE,
                           f, 0);
    if (s == MAP_FAILED || N > MAX_PROCS) return ncclSystemError;
    close(f);
    ncclComm_t c = (ncclComm_t)calloc(1, sizeof **comm);
    c->s = (Shared *)s;
    c->s->N = N;
    c->rank = rank;
    meet(c);
    if (rank == 0 && sscanf(id.internal, "/proc/%*d/fd/%d", &own) == 1) close(own);
    *comm = c;
    return ncclSuccess;
}

ncclResult_t ncclAllGather(const void *send, void *recv, size_t count, ncclDataType_t, ncclComm_t c,
                           void *) {
    if (c->s) {
        static int gathers;
        /* "RANK GATHER SIGNAL": what that process gets in its GATHERth */
        const char *dies = getenv("DP_CPU_NCCL_DIES");
        int rank, gather, with;
        if (count * 4 > SLOT) return ncclSystemError;
        if (dies && sscanf(dies, "%d %d %d", &rank, &gather, &with) == 3 && c->rank == rank &&
            ++gathers == gather)
            raise(with);
        memcpy(c->s->slot[c->rank], send, count * 4);
        bool all = meet(c);
        for (int i = 0; i < c->s->N && all; i++)
            memcpy((char *)recv + i * count * 4, c->s->slot[i], count * 4);
        meet(c);
        return ncclSuccess;
    }
    c->m->send[c->rank] = send;
    if (meet(c))
        for (int r = 0; r < c->m->N; r++)
            memcpy((char *)recv + r * count * 4, c->m->send[r], count * 4);
    meet(c);
    return ncclSuccess;
}

/* Where the next message of rank `from` to rank `to` lies, how many it has sent it, and how many
 * were taken. */
static char *mail_of(ncclComm_t c, int from, int to, size_t bytes, volatile long **sent,
                     volatile long **taken) {
    if (c->s) {
        Letter *x = &c->s->mail[from][to];
        *sent = &x->sent;
        *taken = &x->taken;
        return x->words;
    }
    Mail *x = &c->m->mail[from * c->m->N + to];
    *sent = &x->sent;
    *taken = &x->taken;
    if (from == c->rank && x->taken == x->sent) x->words = realloc(x->words, bytes);
    return (char *)x->words;
}

/* A message is written at once, and taken when the receiver comes: so the two of a group that wait
 * for each other do not. */
ncclResult_t ncclSend(const void *send, size_t count, ncclDataType_t, int to, ncclComm_t c,
                      void *) {
    volatile long *sent, *taken;
    if (c->s && count * 4 > SLOT) return ncclSystemError;
    mail_of(c, c->rank, to, count * 4, &sent, &taken);
    while (*taken < *sent && !c->aborted)
        usleep(20);
    if (c->aborted) return ncclSuccess;
    memcpy(mail_of(c, c->rank, to, count * 4, &sent, &taken), send, count * 4);
    __sync_add_and_fetch(sent, 1);
    return ncclSuccess;
}
ncclResult_t ncclRecv(void *recv, size_t count, ncclDataType_t, int from, ncclComm_t c, void *) {
    volatile long *sent, *taken;
    mail_of(c, from, c->rank, count * 4, &sent, &taken);
    while (*taken >= *sent && !c->aborted)
        usleep(20);
    if (c->aborted) return ncclSuccess;
    memcpy(recv, mail_of(c, from, c->rank, count * 4, &sent, &taken), count * 4);
    __sync_add_and_fetch(taken, 1);
    return ncclSuccess;
}
ncclResult_t ncclGroupStart(void) { return ncclSuccess; }
ncclResult_t ncclGroupEnd(void) { return ncclSuccess; }

ncclResult_t ncclCommAbort(ncclComm_t c) {
    if (c->s) {
        c->aborted = 1;
        return ncclSuccess;
    }
    pthread_mutex_lock(&c->m->lock);
    c->aborted = 1;
    pthread_cond_broadcast(&c->m->all);
    pthread_mutex_unlock(&c->m->lock);
    return ncclSuccess; /* the memory stays: a thread may still be inside a gather */
}

ncclResult_t ncclCommDestroy(ncclComm_t c) {
    if (c->s) {
        munmap(c->s, sizeof *c->s);
        free(c);
        return ncclSuccess;
    }
    Meeting *m = c->m;
    free(c);
    if (__sync_sub_and_fetch(&m->users, 1) == 0) {
        for (int x = 0; x < m->N * m->N; x++)
            free(m->mail[x].words);
        free(m->mail);
        free(m->send);
        free(m);
    }
    return ncclSuccess;
}

ncclResult_t ncclCommGetAsyncError(ncclComm_t, ncclResult_t *e) {
    *e = ncclSuccess;
    return ncclSuccess;
}
const char *ncclGetErrorString(ncclResult_t) { return "none"; }
}
