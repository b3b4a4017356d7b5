/* ref/vocabulary/peers.h - ranks that are processes of their own: how one of them hands numbers to
 * another. Who carries them (harness/mpi/) ends the program where they cannot be carried.
 */
#ifndef DP_PEERS_H
#define DP_PEERS_H
#include <stdint.h>
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

/* all: a block of n numbers for every rank, this rank's set before, all of them after. */
void dp_peers_gather(const dp_peers *p, double *all, int64_t n, const char *what);

#ifdef __cplusplus
}
#endif
#endif
