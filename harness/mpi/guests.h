/* harness/mpi/guests.h - connections to the first process, side by side, until each has proved
 * which rank it is (meet.h), or is sent away.
 */
#pragma once
#include "meet.h"

enum { DP_MOST_GUESTS = 256, DP_CONNECTION_S = 10 };

typedef struct {
    int fd, knows; /* knows: its hello has come */
    double until;
    size_t have;
    dp_party own; /* with a nonce for it */
    dp_hello hello;
    dp_proof proof;
} dp_guest;

typedef struct {
    dp_party party;
    dp_guest guest[DP_MOST_GUESTS];
    int n, here, away; /* guests; processes that are there, with this one; who was sent away */
    char why[200];     /* of the last of those */
    int *socket_of;    /* [size]: of those that are there, else -1 */
} dp_guests;

/* fd, which does not block, is its own from now on. The oldest leaves where there is no room. */
void dp_guests_let_in(dp_guests *h, int fd);
void dp_guests_drop_oldest(dp_guests *h);
/* Reads what guest i has sent. It may become a process of the job (socket_of), or leave; the last
 * guest then takes its place. */
void dp_guests_hear(dp_guests *h, int i);
/* Guests that have stayed too long leave. */
void dp_guests_look(dp_guests *h);
void dp_guests_close(dp_guests *h); /* closes those that are left */
