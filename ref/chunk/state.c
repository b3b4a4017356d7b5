/* Decay, read and write of a state (state.h). */
#include "state.h"
#include "ref/arithmetic/elementary.h"

#include <string.h>

void dp_state_decay(const dp_problem *p, const double *g, double *S) {
    const int Kg = dp_Kg(p);
    for (int x = 0; x < p->K; x++) {
        const double d = dp_exp(g[Kg == 1 ? 0 : x]);
        for (int v = 0; v < p->V; v++)
            S[(int64_t)x * p->V + v] *= d;
    }
}

void dp_state_read(const dp_problem *p, const double *S, const double *k, double *y) {
    memset(y, 0, sizeof *y * (size_t)p->V);
    for (int x = 0; x < p->K; x++)
        for (int v = 0; v < p->V; v++)
            y[v] += k[x] * S[(int64_t)x * p->V + v];
}

void dp_state_write(const dp_problem *p, double a, const double *k, const double *y, double *S) {
    for (int x = 0; x < p->K; x++)
        for (int v = 0; v < p->V; v++)
            S[(int64_t)x * p->V + v] += a * k[x] * y[v];
}
