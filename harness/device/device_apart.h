/* harness/device/device_apart.h - ranks over NCCL that are the processes of one mpirun or torchrun,
 * on any hosts, a device each. The first process sends each its tokens and NCCL's unique id, is
 * rank 0 itself, and gets their results (harness/mpi/processes.h).
 */
#pragma once
#include "device_run.h"
#include "harness/mpi/processes.h"

/* Are the ranks of this backend such processes? */
int dp_cuda_apart(dp_backend b);
/* As dp_cuda_run. */
dp_status dp_apart_run(const dp_problem *p, const dp_cuda_how *how, dp_cuda_result *out, dp_err *e);

/* The same of convolutions: dp_cuda_conv, in device_conv.c. */

/* Jobs of the other processes for that (dp_mpi_serve); a build without CUDA kernels never asks. */
enum { DP_MPI_DEVICE = 16, DP_MPI_DEVICE_CONV };
extern const dp_mpi_worker dp_apart_worker, dp_apart_conv_worker;
