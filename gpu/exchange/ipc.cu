/* gpu/exchange/ipc.cu - peer memory of ranks that are processes (group.cuh). Each opens the memory
 * that others exchange, by CUDA IPC, where all run under one kernel and on a device each. Ranks
 * that share a device would wait for kernels of processes that do not run beside theirs.
 *
 * Cards tell the place of each rank and how to open its memory. A second gather tells whether all
 * could, so that all have peer memory or none. Both are calls like any other: a rank that is gone
 * ends them within the limit. */
#include "exchange/group.cuh"
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

struct Card {
    cudaIpcMemHandle_t memory;
    char kernel[40], device[24]; /* the boot of the host's kernel; the device's place on its bus */
    int64_t can;                 /* the rest is there */
};

static Card card_of(const Group *g, int rank, void *mine) {
    Card x = {};
    FILE *f = fopen("/proc/sys/kernel/random/boot_id", "r");
    x.can = f && fscanf(f, "%39s", x.kernel) == 1 &&
            cudaDeviceGetPCIBusId(x.device, sizeof x.device, g->device[rank]) == cudaSuccess &&
            cudaIpcGetMemHandle(&x.memory, mine) == cudaSuccess;
    if (f) fclose(f);
    cudaGetLastError();
    return x;
}

/* all [N]: own of every rank. */
static dp_status gather_through(dpg_comm *c, cudaStream_t s, float *dev, const void *own, void *all,
                                size_t bytes, dp_err *e) {
    CK(e, cudaMemcpyAsync(dev, own, bytes, cudaMemcpyHostToDevice, s));
    TRY(c->all_gather(c, dev, dev + bytes / 4, bytes / 4, s, e));
    TRY(c->wait(c, s, e));
    CK(e, cudaMemcpy(all, dev + bytes / 4, c->N * bytes, cudaMemcpyDeviceToHost));
    return DP_OK;
}
static dp_status gather(dpg_comm *c, const void *own, void *all, size_t bytes, dp_err *e) {
    cudaStream_t s;
    float *dev = NULL;
    CK(e, cudaStreamCreateWithFlags(&s, cudaStreamNonBlocking));
    cudaError_t err = cudaMalloc(&dev, (c->N + 1) * bytes);
    dp_status st = err == cudaSuccess ? gather_through(c, s, dev, own, all, bytes, e)
                                      : dpg_fail(e, DP_EDEVICE, "%s:%d: rank %d: %s", __FILE__,
                                                 __LINE__, c->rank, cudaGetErrorString(err));
    cudaFree(dev);
    cudaStreamDestroy(s);
    return st;
}

/* One kernel, and no device twice. */
static int are_apart(const Card *card, int N) {
    for (int r = 0; r < N; r++) {
        if (!card[r].can || strcmp(card[r].kernel, card[0].kernel)) return 1;
        for (int other = 0; other < r; other++)
            if (!strcmp(card[r].device, card[other].device)) return 1;
    }
    return 0;
}

void ipc_close(void **at, int N, int rank) {
    for (int r = 0; r < N; r++) {
        if (r != rank && at[r]) cudaIpcCloseMemHandle(at[r]);
        at[r] = NULL;
    }
    cudaGetLastError();
}
static int open_all(const Card *card, int N, int rank, void *mine, void **at) {
    int opened = 1;
    for (int r = 0; r < N; r++) {
        at[r] = r == rank ? mine : NULL;
        if (r != rank && opened)
            opened = cudaIpcOpenMemHandle(&at[r], card[r].memory, cudaIpcMemLazyEnablePeerAccess) ==
                     cudaSuccess;
    }
    cudaGetLastError();
    return opened;
}

dp_status ipc_exchange(dpg_comm *c, void *mine, void **at, dp_err *e) {
    const Group *g = ((Home *)c->self)->g;
    Card own = mine ? card_of(g, c->rank - g->first_rank, mine) : Card{};
    Card *card = (Card *)calloc(c->N, sizeof *card);
    int64_t *can = (int64_t *)calloc(c->N, sizeof *can);
    dp_status st = card && can ? gather(c, &own, card, sizeof own, e)
                               : dpg_fail(e, DP_ENOMEM, "%s:%d: cards", __FILE__, __LINE__);
    if (st == DP_OK && mine) {
        int apart = are_apart(card, c->N);
        own.can = !apart && open_all(card, c->N, c->rank, mine, at);
        st = gather(c, &own.can, can, sizeof *can, e);
        for (int r = 0; r < c->N; r++)
            apart |= !can[r];
        if (st != DP_OK || apart) ipc_close(at, c->N, c->rank);
    }
    free(card);
    free(can);
    return st;
}
