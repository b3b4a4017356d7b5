/* The part that gpu/exchange uses; nccl.cc is the library. */
#ifndef CPU_NCCL_H
#define CPU_NCCL_H
typedef enum { ncclSuccess, ncclSystemError = 2 } ncclResult_t;
typedef enum { ncclFloat = 7 } ncclDataType_t;
typedef struct ncclComm *ncclComm_t;
typedef struct {
    char internal[128];
} ncclUniqueId;
#endif
