/* harness/mpi/processes.h - the processes of one mpirun, or of one torchrun: this one's rank,
 * messages between them, the name of a lost one. MPI connects them where it is compiled in and
 * mpirun started them. Sockets to the first process do where torchrun started them (RANK,
 * WORLD_SIZE, MASTER_ADDR, MASTER_PORT) and --backend nccl is asked for. Only run, check and differ
 * use them. With DELTAPROOF_ALONE in the environment there is one process, whoever started it.
 *
 * The first process reads options, judges, prints and writes; the others wait for what it asks of
 * them (dp_mpi_serve). Processes with other arguments than the first are no job: each runs alone.
 *
 * A process that ends too early, or lets the others wait for more than the limit, ends them all.
 * The first process prints its rank, process and host, and the finished part, and ends as by
 * SIGTERM. A process that is silent for DELTAPROOF_SILENCE seconds (30), as where it is stopped,
 * ends them too. If it is the first one, the others say so. Calls may come from one thread at a
 * time.
 */
#pragma once
#include <stddef.h>
#include <stdint.h>

/* Once, before any command; ends with the program. */
void dp_mpi_start(int argc, char **argv);
int dp_mpi_rank(void); /* 0 where there is no MPI */
int dp_mpi_size(void); /* 1 there */
/* Why N ranks cannot be processes here; NULL: they can. */
const char *dp_mpi_unavailable(int N);
/* How long one may keep this process waiting: 600 seconds until this is called. */
void dp_mpi_limit(double seconds);
double dp_mpi_limit_s(void);

/* Messages of a kind arrive in the order in which they were sent. */
typedef enum { DP_MPI_JOB = 1, DP_MPI_NUMBERS, DP_MPI_CASE, DP_MPI_NKINDS } dp_mpi_kind;
/* x may be used again at once; does not wait. A long message may continue only in later calls.
 * Before waiting for its receiver by other means, call dp_mpi_flush. */
void dp_mpi_send(int to, dp_mpi_kind kind, const void *x, size_t bytes);
/* Waits until all that was sent has been taken. */
void dp_mpi_flush(void);
/* Waits for a message of exactly so many bytes. what: what it is, for a message. */
void dp_mpi_receive(int from, dp_mpi_kind kind, void *x, size_t bytes, const char *what);
void dp_mpi_send_numbers(int to, const double *x, int64_t n);
void dp_mpi_receive_numbers(int from, double *x, int64_t n, const char *what);
/* cu [n + 1] from the first process to another, which frees it. */
void dp_mpi_send_cu(int to, const int64_t *cu, int n);
int64_t *dp_mpi_receive_cu(int n);
/* Waits for one of least to most bytes from any process; to be freed. No limit. */
void *dp_mpi_receive_any(dp_mpi_kind kind, size_t least, size_t most, int *from, size_t *bytes);
/* Ends the job: process r sent what it should not. what: which field, and its value. */
void dp_mpi_refuse(int r, const char *what, long long value);

/* In every process but the first: serves messages of kind DP_MPI_JOB. They begin with an int that
 * is one of these, and have its bytes. Returns when the first has ended. */
typedef struct {
    int job;
    size_t bytes;
    void (*work)(const void *message, size_t bytes);
} dp_mpi_worker;
void dp_mpi_serve(const dp_mpi_worker *w, int n);

/* Prints a line for each process of this host that is gone, once; 0: none is. */
int dp_mpi_say_gone(void);
