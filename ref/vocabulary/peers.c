/* The messages of every rank to every other one (peers.h). */
#include "peers.h"

void dp_peers_gather(const dp_peers *p, dp_owners o, int parts, double *all, int64_t n,
                     const char *what) {
    for (int k = 1; k < p->N; k++) /* not all to the same one at once */
        for (int i = 0; i < parts; i++)
            if (dp_own_rank(o, parts, i) == p->rank)
                p->send(p->who, (p->rank + k) % p->N, all + i * n, n);
    for (int i = 0; i < parts; i++) {
        const int owner = dp_own_rank(o, parts, i);
        if (owner != p->rank) p->receive(p->who, owner, all + i * n, n, what);
    }
}
