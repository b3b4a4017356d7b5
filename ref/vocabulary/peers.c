/* What every rank hands to every other one (peers.h). */
#include "peers.h"

void dp_peers_gather(const dp_peers *p, double *all, int64_t n, const char *what) {
    for (int i = 1; i < p->N; i++) { /* not all to the same one at once */
        const int to = (p->rank + i) % p->N;
        p->send(p->who, to, all + p->rank * n, n);
    }
    for (int r = 0; r < p->N; r++)
        if (r != p->rank) p->receive(p->who, r, all + r * n, n, what);
}
