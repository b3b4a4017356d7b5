/* harness/mpi/mpi_ranks.h - the pipeline on N ranks that are the first N processes of one mpirun.
 *
 * The first process sends each rank its tokens, and the cu, states and parameters of all; it is
 * rank 0 itself. A rank computes the same as a simulated one (dp_sim_new_rank, dp_conv_rank). M and
 * H, states, their gradients, halos and sums are messages between ranks; results return to the
 * first. The bits are those of the simulated ranks. Only the first process calls this, for N that
 * dp_mpi_unavailable lets pass.
 */
#pragma once
#include "harness/simulated/ranks.h"
#include "processes.h"
#include "ref/chunk/conv.h"
#include "ref/vocabulary/recurrence_text.h"

/* The rows of a user's own recurrence in a job; there 0: none are installed. */
typedef struct {
    int there;
    dp_user_recurrence rows;
} dp_mpi_rows;
dp_mpi_rows dp_mpi_rows_here(const dp_problem *p);
/* In the process that got the job. */
void dp_mpi_install(const dp_mpi_rows *x);

/* *s: a frame (dp_sim_options) that dp_mpi_sim_run fills as dp_sim_run would. One at a time. */
dp_status dp_mpi_sim_open(dp_sim *s, const dp_problem *p, dp_base base, int N, dp_err *e);
void dp_mpi_sim_run(dp_sim *s, dp_format chain, dp_exchange merge, int backward);
/* Frees what it and the processes hold; the struct is the caller's. */
void dp_mpi_sim_close(dp_sim *s);

/* As dp_conv_ranks. */
dp_status dp_mpi_conv(const dp_conv *c, int N, dp_base pol, dp_conv_result *r, dp_err *e);

/* Jobs of the other processes for that (dp_mpi_serve). */
enum { DP_MPI_OPEN = 1, DP_MPI_RUN, DP_MPI_CLOSE, DP_MPI_CONV, DP_MPI_SWEEP };
#define DP_MPI_NRANK_WORKERS 4
extern const dp_mpi_worker dp_mpi_rank_workers[DP_MPI_NRANK_WORKERS];
