/* gpu/tests/cpu/nccl.cc - the calls of NCCL that gpu/comm.cu makes, for ranks that are host threads: a gather returns when all ranks have
 * come to it or the communicator is aborted, like the kernel of the library. Loaded as libnccl.so.2 by the kernels on the CPU. */
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <nccl.h>

struct Meeting { pthread_mutex_t lock; pthread_cond_t all; int N, here, round, users; const void **send; };
struct ncclComm { Meeting *m; int rank; volatile int aborted; };

static bool meet(ncclComm_t c)
{
    Meeting *m = c->m;
    pthread_mutex_lock(&m->lock);
    int round = m->round;
    if (++m->here == m->N)
        m->here = 0, m->round++, pthread_cond_broadcast(&m->all);
    while (m->round == round && !c->aborted)
        pthread_cond_wait(&m->all, &m->lock);
    bool ok = m->round != round;
    pthread_mutex_unlock(&m->lock);
    return ok;
}

extern "C" {
ncclResult_t ncclCommInitAll(ncclComm_t *comm, int N, const int *)
{
    if (getenv("NCCL_DEBUG"))
        fprintf(stderr, "ncclCommInitAll of %d ranks\n", N);
    Meeting *m = (Meeting *)calloc(1, sizeof *m);
    pthread_mutex_init(&m->lock, NULL);
    pthread_cond_init(&m->all, NULL);
    m->N = m->users = N, m->send = (const void **)calloc(N, sizeof *m->send);
    for (int r = 0; r < N; r++) {
        comm[r] = (ncclComm_t)calloc(1, sizeof **comm);
        comm[r]->m = m, comm[r]->rank = r;
    }
    return ncclSuccess;
}

ncclResult_t ncclAllGather(const void *send, void *recv, size_t count, ncclDataType_t, ncclComm_t c, void *)
{
    c->m->send[c->rank] = send;
    if (meet(c))
        for (int r = 0; r < c->m->N; r++)
            memcpy((char *)recv + r * count * 4, c->m->send[r], count * 4);
    meet(c);
    return ncclSuccess;
}

ncclResult_t ncclCommAbort(ncclComm_t c)
{
    pthread_mutex_lock(&c->m->lock);
    c->aborted = 1;
    pthread_cond_broadcast(&c->m->all);
    pthread_mutex_unlock(&c->m->lock);
    return ncclSuccess;                                  /* the memory stays: a thread may still be inside a gather */
}

ncclResult_t ncclCommDestroy(ncclComm_t c)
{
    Meeting *m = c->m;
    free(c);
    if (__sync_sub_and_fetch(&m->users, 1) == 0)
        free(m->send), free(m);
    return ncclSuccess;
}

ncclResult_t ncclCommGetAsyncError(ncclComm_t, ncclResult_t *e)
{
    *e = ncclSuccess;
    return ncclSuccess;
}
const char *ncclGetErrorString(ncclResult_t) { return "none"; }
}
