/* gpu/exchange/nccl.cuh - the calls of NCCL that are made, from libnccl.so.2 loaded at run time
 * (create.cu). */
#ifndef DPG_NCCL_CUH
#define DPG_NCCL_CUH
#include <cuda_runtime.h>
#include <nccl.h>

struct Nccl {
    ncclResult_t (*InitAll)(ncclComm_t *, int, const int *);
    ncclResult_t (*GetUniqueId)(ncclUniqueId *);
    ncclResult_t (*InitRank)(ncclComm_t *, int, ncclUniqueId, int);
    ncclResult_t (*AllGather)(const void *, void *, size_t, ncclDataType_t, ncclComm_t,
                              cudaStream_t);
    ncclResult_t (*Send)(const void *, size_t, ncclDataType_t, int, ncclComm_t, cudaStream_t);
    ncclResult_t (*Recv)(void *, size_t, ncclDataType_t, int, ncclComm_t, cudaStream_t);
    ncclResult_t (*GroupStart)(void);
    ncclResult_t (*GroupEnd)(void);
    ncclResult_t (*AsyncError)(ncclComm_t, ncclResult_t *);
    ncclResult_t (*Abort)(ncclComm_t);
    ncclResult_t (*Destroy)(ncclComm_t);
    const char *(*String)(ncclResult_t);
};
extern Nccl nccl;
#endif
