/* harness/base/supervisor.h - a group of processes that ends as a whole, whatever they started.
 *
 * This program starts its own file again as a supervisor, which starts the processes of the group.
 * The kernel makes orphans its children (PR_SET_CHILD_SUBREAPER). So a process that forks, leaves
 * its session or its parent stays below it. The supervisor ends them all when it is told to. It
 * also does when this program is gone, by any signal: it then reads the end of their socket. It has
 * a session of its own, so that Ctrl-C does not reach the group.
 *
 * This contains mistakes and their consequences. It is no sandbox: a process that wants to can end
 * its supervisor; that is noticed, and what is left in the session is ended.
 */
#pragma once
#include "ref/vocabulary/problem.h"
#include <sys/types.h>

/* The processes of a group get the descriptors 3 .. 3+n-1, standard input of /dev/null, and
 * standard error as both outputs; every other descriptor is closed. */
#define DP_PROCESSES_FIRST_FD 3
#define DP_PROCESSES_MOST_FDS 4

typedef struct {
    pid_t supervisor;
    int socket;
} dp_processes;

/* Process i of n is a copy of the supervisor before main. Its constructors get this argc and argv =
 * {name, "i"}; one that knows the name takes it over. DP_EIO: no process could be had. */
#define DP_PROCESSES_ARGC 5
dp_status dp_processes_start(dp_processes *g, const char *name, int n, const int *fd, int nfd,
                             dp_err *e);

/* Waits until one has ended, at most so long. 1: process *which, with *status of waitpid; 0: none;
 * -1: the supervisor itself is gone, *status says how it ended. */
int dp_processes_wait(dp_processes *g, double seconds, int *which, int *status);

/* Ends all that is left of it, and returns when it is gone. */
void dp_processes_end(dp_processes *g);
