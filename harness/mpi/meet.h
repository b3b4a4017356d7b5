/* harness/mpi/meet.h - the processes of a job meet by sockets: each other one connects to the
 * first, and both prove who they are (meeting.h).
 *
 * The first listens at MASTER_ADDR where that is an address of this host, else, or where a name
 * stands for this host's loopback alone, at 127.0.0.1; with a secret (DELTAPROOF_SECRET, or the
 * file DELTAPROOF_SECRET_FILE) at every interface in its place. Connections are heard side by side
 * (guests.h): each has DP_CONNECTION_S, all have DP_START_S.
 */
#ifndef DP_MEET_H
#define DP_MEET_H
#include "carrier.h"

/* Fills all of the job, and socket_of [size]: the first's of the others, else that of the first.
 * Ends the process, with the reason, where they do not meet. */
void dp_meet(const dp_process *own, const char *host, const char *port, int *socket_of);

/* Moves them all, out or in. 0: the other has gone, or it took longer than `limit` seconds (*late):
 * for each piece that moves, which are counted; or, where they are not, for all of them. */
int dp_socket_move(int fd, void *x, size_t n, int out, double limit, _Atomic unsigned *pieces,
                   int *late);
#endif
