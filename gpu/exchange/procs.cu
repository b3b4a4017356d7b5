/* gpu/exchange/procs.cu - a process a rank over NCCL (group.cuh). */
#include "exchange/group.cuh"
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

size_t dpg_comm_procs_bytes(void) { return sizeof(Group); }

dp_status dpg_comm_procs_init(void *shared, int N, double limit_s, dp_err *e) {
    Group *g = (Group *)shared;
    TRY(check_ranks(N, e));
    if ((uintptr_t)shared % 4096)
        return dpg_fail(e, DP_EINPUT, "%s:%d: memory of a communicator must start at a page",
                        __FILE__, __LINE__);
    memset(g, 0, sizeof *g);
    group_init(g, N, limit_s, "ncclAllGather");
    g->procs = g->is_nccl = 1;
    g->creator = getpid();
    return DP_OK;
}

/* NCCL refuses two ranks of one host on a device: those that would collide are hosts of their own,
 * which talk through sockets. */
static void describe_host(const Group *g, int rank, int ndev) {
    char host[64];
    snprintf(host, sizeof host, "deltaproof-%ld-%d", (long)g->creator, rank / ndev);
    setenv("NCCL_NVLS_ENABLE", "0", 0);
    setenv("NCCL_HOSTID", host, 1);
    if (g->N > ndev) {
        setenv("NCCL_SOCKET_IFNAME", "lo", 0);
        setenv("NCCL_NET", "Socket", 0);
        setenv("NCCL_MNNVL_ENABLE", "0", 0);
    }
}

static dp_status join_steps(Home *h, int rank, dp_err *e) {
    Group *g = h->g;
    int ndev = 0;
    void *marks = NULL;
    TRY(nccl_load(e));
    CK(e, cudaGetDeviceCount(&ndev));
    g->device[rank] = rank % (ndev > 0 ? ndev : 1);
    describe_host(g, rank, ndev > 0 ? ndev : 1);
    CK(e, cudaSetDevice(g->device[rank]));
    CK(e, cudaHostRegister((void *)g->marks, sizeof g->marks,
                           cudaHostRegisterPortable | cudaHostRegisterMapped));
    CK(e, cudaHostGetDevicePointer(&marks, (void *)g->marks, 0));
    h->marks = (int *)marks;
    TRY(home_counter(h, rank, e));
    if (rank == 0) {
        ncclResult_t r = nccl.GetUniqueId(&g->id);
        if (r != ncclSuccess)
            return dpg_fail(e, DP_EDEVICE, "%s:%d: rank 0: ncclGetUniqueId: %s", __FILE__, __LINE__,
                            nccl.String(r));
    }
    return meet(g, rank, "ncclCommInitRank", CREATE_S, e);
}

dp_status dpg_comm_procs_join(dpg_comm *c, void *shared, int rank, dp_err *e) {
    Group *g = (Group *)shared;
    dp_err own = {DP_OK, ""};
    if (rank < 0 || rank >= g->N)
        return dpg_fail(e, DP_EINPUT, "%s:%d: rank %d of %d", __FILE__, __LINE__, rank, g->N);
    Home *h = home_new(g, rank, 1, e);
    if (!h) return DP_ENOMEM;
    TRY(home_watch(h, e));
    dp_status st = join_steps(h, rank, &own);
    if (st == DP_OK) st = nccl_create(h, &own);
    if (st == DP_OK) st = meet(g, rank, "the end of ncclCommInitRank", CREATE_S, &own);
    home_comms(h, c);
    if (st != DP_OK) { /* what is left stays to the end of the process */
        group_fail(g, "rank %d: %s", rank, own.msg);
        return dpg_fail(e, st, "%s", own.msg);
    }
    return st;
}
