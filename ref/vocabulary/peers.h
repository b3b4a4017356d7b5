/* ref/vocabulary/peers.h - ranks that are processes: how one of them sends numbers to another. Who
 * carries them (harness/mpi/) ends the program where they cannot be carried.
 */
#ifndef DP_PEERS_H
#define DP_PEERS_H
#include "own.h"
#include <stddef.h>
#ifdef __cplusplus
extern "C" {
#endif

typedef struct {
    int rank, N; /* of this process, of all */
    void *who;
    /* x may be used again at once; does not wait until the other has received it. */
    void (*send)(void *who, int to, const double *x, int64_t n);
    /* Waits for n numbers of that rank, in the order in which it sent them. what: what they are,
     * for a message. */
    void (*receive)(void *who, int from, double *x, int64_t n, const char *what);
} dp_peers;

/* The process that has part i of so many; does this one have it? p NULL: all parts are here. */
static inline int dp_peers_owner(const dp_peers *p, dp_owners o, int parts, int i) {
    return p ? dp_own_rank(o, parts, i) : 0;
}
static inline int dp_peers_have(const dp_peers *p, dp_owners o, int parts, int i) {
    return !p || dp_own_rank(o, parts, i) == p->rank;
}

/* all: a block of n numbers for every part, those of this rank's set before, all of them after. */
void dp_peers_gather(const dp_peers *p, dp_owners o, int parts, double *all, int64_t n,
                     const char *what);

#ifdef __cplusplus
}
#endif
#endif
