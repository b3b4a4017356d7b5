/* harness/mpi/meet.h - the processes of a job meet by sockets: each other one connects to the
 * first, and both prove who they are (meeting.h).
 *
 * The first listens at MASTER_ADDR if this is an address of this host. Else, or where a name means
 * this host's loopback alone, it listens at 127.0.0.1. With a secret (DELTAPROOF_SECRET, or the
 * file DELTAPROOF_SECRET_FILE) it listens at every interface. Connections are heard side by side
 * (guests.h): each has DP_CONNECTION_S, all have DP_START_S.
 */
#ifndef DP_MEET_H
#define DP_MEET_H
#include "carrier.h"

/* Fills all of the job, and socket_of [size]: the first's of the others, else that of the first.
 * Ends the process, with the reason, where they do not meet. */
void dp_meet(const dp_process *own, const char *host, const char *port, int *socket_of);

/* Moves them all, out or in. 0: the other has gone, or it took longer than `limit` seconds (*late).
 * The limit holds for each piece that moves, if they are counted, else for all of them. */
int dp_socket_move(int fd, void *x, size_t n, int out, double limit, _Atomic unsigned *pieces,
                   int *late);
#endif
