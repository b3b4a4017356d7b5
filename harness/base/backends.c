/* The table of backends (backends.h). */
#include "backends.h"

const char *const dp_backend_names[DP_NBACKENDS] = {"sim", "cuda", "nccl",   "lapack",
                                                    "mpi", "file", "subject"};

const dp_backend_traits dp_backends[DP_NBACKENDS] = {
    [DP_BACKEND_SIM] =
        {.simulated = 1, .faulty = 1, .by_default = 1, .unsaid = 1, .on_cpu = 1, .owns = 1},
    [DP_BACKEND_CUDA] = {.on_device = 1, .by_default = 1, .owns = 1},
    [DP_BACKEND_NCCL] = {.on_device = 1, .processes = 1, .owns = 1},
    [DP_BACKEND_LAPACK] = {.by_default = 1, .on_cpu = 1},
    [DP_BACKEND_MPI] = {.simulated = 1, .peers = 1, .owns = 1},
    [DP_BACKEND_FILE] = {.unsaid = 1},
};
