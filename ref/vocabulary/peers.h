/* ref/vocabulary/peers.h - messages of numbers between ranks that are processes. If a message
 * cannot be delivered, the transport (harness/mpi/) ends the program.
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
    /* Sends n numbers. Returns before they are received; x may then be changed. */
    void (*send)(void *who, int to, const double *x, int64_t n);
    /* Waits for n numbers of rank `from`, in the order in which it sent them. An error message
     * calls them `what`. */
    void (*receive)(void *who, int from, double *x, int64_t n, const char *what);
} dp_peers;

/* The process that has part i of `parts`, and whether this process has it. p NULL: all parts are
 * here. */
static inline int dp_peers_owner(const dp_peers *p, dp_owners o, int parts, int i) {
    return p ? dp_own_rank(o, parts, i) : 0;
}
static inline int dp_peers_have(const dp_peers *p, dp_owners o, int parts, int i) {
    return !p || dp_own_rank(o, parts, i) == p->rank;
}

/* Gathers `all`, a block of n numbers for every part. The blocks of this rank are set on entry, all
 * blocks on return. */
void dp_peers_gather(const dp_peers *p, dp_owners o, int parts, double *all, int64_t n,
                     const char *what);

#ifdef __cplusplus
}
#endif
#endif
