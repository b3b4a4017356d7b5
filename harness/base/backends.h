/* harness/base/backends.h - who can compute a run, and what the rest of the program asks of it: a
 * row each. Who runs it: harness/run/driver.c. */
#pragma once

/* The backend computes the outputs:
 *   sim       the simulated ranks
 *   cuda      the kernels of gpu/, ranks as threads that share devices
 *   nccl      the kernels of gpu/ over NCCL, a device for each rank, or processes that share them
 *   lapack    the simulated ranks over CBLAS and LAPACKE
 *   mpi       the simulated ranks, each a process, with messages between them
 *   file      tensors that another program wrote (judge.h)
 *   subject   a shared library (subject.h) */
typedef enum {
    DP_BACKEND_SIM,
    DP_BACKEND_CUDA,
    DP_BACKEND_NCCL,
    DP_BACKEND_LAPACK,
    DP_BACKEND_MPI,
    DP_NCHOSEN_BACKENDS, /* those that --backend and a run ID name; the others are not ours */
    DP_BACKEND_FILE = DP_NCHOSEN_BACKENDS,
    DP_BACKEND_SUBJECT,
    DP_NBACKENDS
} dp_backend;
extern const char *const dp_backend_names[DP_NBACKENDS];

typedef struct {
    unsigned simulated : 1;  /* what the simulated ranks compute: the same bits everywhere */
    unsigned faulty : 1;     /* deliberate faults can be switched on */
    unsigned peers : 1;      /* ranks are the processes of one mpirun */
    unsigned on_device : 1;  /* on CUDA devices: no fp64, no chain of bf16 states, variants */
    unsigned processes : 1;  /* may need processes that are started before anything else */
    unsigned by_default : 1; /* runs without --backend */
    unsigned unsaid : 1;     /* an ID does not say it */
    unsigned on_cpu : 1;     /* many cases may run side by side */
    unsigned owns : 1;       /* ranks may own tokens by any table (ref/vocabulary/own.h) */
} dp_backend_traits;
extern const dp_backend_traits dp_backends[DP_NBACKENDS];
