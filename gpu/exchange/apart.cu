/* gpu/exchange/apart.cu - a rank whose others are other processes, on this host or another, which
 * NCCL alone reaches (group.cuh). Who is missing this rank does not know: it ends within the limit,
 * and whoever started the processes sees which of them is gone. */
#include "exchange/group.cuh"
#include <string.h>

static_assert(sizeof(ncclUniqueId) == DPG_COMM_ID, "size of NCCL's unique id");

dp_status dpg_comm_id(void *id, dp_err *e) {
    ncclUniqueId own;
    TRY(nccl_load(e));
    ncclResult_t r = nccl.GetUniqueId(&own);
    if (r != ncclSuccess)
        return dpg_fail(e, DP_EDEVICE, "%s:%d: ncclGetUniqueId: %s", __FILE__, __LINE__,
                        nccl.String(r));
    memcpy(id, &own, sizeof own);
    return DP_OK;
}

dp_status dpg_comm_apart(dpg_comm *c, const void *id, int rank, int N, int device, double limit_s,
                         dp_err *e) {
    if (N < 2 || rank < 0 || rank >= N)
        return dpg_fail(e, DP_EINPUT, "%s:%d: rank %d of %d", __FILE__, __LINE__, rank, N);
    TRY(nccl_load(e));
    Home *h = home_of_all(1, &device, limit_s, "ncclAllGather", e);
    if (!h) return e ? e->code : DP_EDEVICE;
    h->g->first_rank = rank;
    h->g->ranks = N;
    memcpy(&h->g->id, id, sizeof h->g->id);
    TRY(nccl_create(h, e));
    TRY(home_watch(h, e));
    home_comms(h, c);
    return DP_OK;
}
