/* Nearby problems: every number of the inputs moved at random. */
#include "nearby.h"
#include "ref/inputs/inputs.h"
#include "ref/vocabulary/formats.h"

#include <math.h>
#include <string.h>

/* x (1 + d), d uniform in +-2^-7, about one unit of bf16 on average, rounded to the format again.
 * Zeros, infinities and NaN stay. */
static double *moved(const dp_mover *m, const double *x, int64_t n, dp_format f, uint64_t stream) {
    if (!x) return NULL;
    dp_rng r;
    double *y = dp_doubles(n);
    dp_rng_seed(&r, 0x6472617773ull + m->draw, stream);
    for (int64_t i = 0; i < n; i++) {
        const double z = x[i] * (1 + (2 * dp_rng_uniform(&r) - 1) * 0x1p-7);
        y[i] = isfinite(z) ? dp_store(f, z) : x[i];
    }
    return y;
}

/* The narrowest format that holds all of x: weights stay as short as they are. */
static dp_format narrowest(const double *x, int64_t n) {
    dp_format f = DP_BF16;
    for (int64_t i = 0; i < n && f != DP_FP64; i++) {
        if (f == DP_BF16 && dp_store(DP_BF16, x[i]) != x[i]) f = DP_FP32;
        if (f == DP_FP32 && dp_store(DP_FP32, x[i]) != x[i]) f = DP_FP64;
    }
    return f;
}

void dp_nearby_front(const dp_front *front, const dp_mover *m, dp_conv y[3]) {
    for (int i = 0; i < 3; i++) {
        const dp_conv *v = front ? front->conv[i] : NULL;
        const uint64_t stream = 10 + (uint64_t)i;
        y[i] = (dp_conv){0};
        if (!v) continue;
        const int64_t nw = (int64_t)v->D * v->W;
        y[i] = *v;
        y[i].dy = NULL;
        y[i].cu = dp_calloc((size_t)v->Nseq + 1, sizeof *v->cu);
        memcpy(y[i].cu, v->cu, sizeof *v->cu * ((size_t)v->Nseq + 1));
        y[i].x = moved(m, v->x, v->T * v->D, m->dtype, stream);
        y[i].w = moved(m, v->w, nw, narrowest(v->w, nw), stream + 3);
        y[i].bias =
            moved(m, v->bias, v->D, v->bias ? narrowest(v->bias, v->D) : DP_BF16, stream + 6);
    }
}

dp_problem dp_nearby_problem(const dp_problem *p, const dp_mover *m) {
    const dp_format dtype = m->dtype;
    const dp_format wide = dtype == DP_FP64 ? DP_FP64 : DP_FP32;
    const int64_t KV = (int64_t)p->Nseq * p->HV * p->K * p->V;
    dp_problem y = *p;
    y.cu = dp_calloc((size_t)p->Nseq + 1, sizeof *y.cu);
    memcpy(y.cu, p->cu, sizeof *y.cu * ((size_t)p->Nseq + 1));
    y.q = moved(m, p->q, p->T * p->H * p->K, dtype, 0);
    y.k = moved(m, p->k, p->T * p->H * p->R * p->K, dtype, 1);
    y.v = moved(m, p->v, p->T * p->HV * p->R * p->V, dtype, 2);
    y.g = moved(m, p->g, p->T * p->HV * dp_Kg(p), dtype, 3);
    y.beta = moved(m, p->beta, p->T * p->HV * p->R, dtype, 4);
    y.dout = moved(m, p->dout, p->T * p->HV * p->V, dtype, 5);
    y.A_log = moved(m, p->A_log, p->HV, wide, 6);
    y.dt_bias = moved(m, p->dt_bias, (int64_t)p->HV * dp_Kg(p), wide, 7);
    y.s0 = moved(m, p->s0, KV, wide, 8);
    y.dstate = moved(m, p->dstate, KV, wide, 9);
    for (int64_t i = 0; p->beta_form == DP_BETA_PLAIN && i < p->T * p->HV * p->R; i++)
        if (p->beta[i] <= 2 && y.beta[i] > 2) y.beta[i] = 2; /* a contraction stays one */
    return y;
}
