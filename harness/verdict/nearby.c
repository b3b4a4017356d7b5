/* Nearby problems: every number of the inputs moved at random. */
#include "nearby.h"
#include "ref/inputs/inputs.h"
#include "ref/vocabulary/formats.h"

#include <math.h>
#include <string.h>

/* Uniform in [0, 1) from the bits of |x|: equal numbers have the same. */
static double uniform_of(double x, uint64_t seed, uint64_t stream) {
    const double size = fabs(x);
    dp_rng r;
    uint64_t bits;
    memcpy(&bits, &size, sizeof bits);
    dp_rng_seed(&r, seed ^ bits, stream);
    return dp_rng_uniform(&r);
}

/* x (1 + d), d uniform in +-2^-7, about one unit of bf16 on average, rounded to the format again.
 * Zeros, infinities and NaN stay; in every other draw what was equal stays equal. */
static double *moved(const dp_mover *m, const double *x, int64_t n, dp_format f, uint64_t stream) {
    if (!x) return NULL;
    const uint64_t seed = 0x6472617773ull + m->draw;
    dp_rng r;
    double *y = dp_doubles(n);
    dp_rng_seed(&r, seed, stream);
    for (int64_t i = 0; i < n; i++) {
        const double u = m->draw % 2 ? uniform_of(x[i], seed, stream) : dp_rng_uniform(&r);
        const double z = x[i] * (1 + (2 * u - 1) * 0x1p-7);
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

/* The stream of random numbers of each input: recorded verdicts depend on it. */
static const uint64_t STREAM[DP_NINPUTS] = {
    [DP_INPUT_Q] = 0,       [DP_INPUT_K] = 1,      [DP_INPUT_V] = 2,       [DP_INPUT_G] = 3,
    [DP_INPUT_BETA] = 4,    [DP_INPUT_DO] = 5,     [DP_INPUT_A_LOG] = 6,   [DP_INPUT_DT_BIAS] = 7,
    [DP_INPUT_S0] = 8,      [DP_INPUT_DSTATE] = 9, [DP_INPUT_ERASE] = 20,  [DP_INPUT_WRITE] = 21,
    [DP_INPUT_LR_A] = 22,   [DP_INPUT_LR_B] = 23,  [DP_INPUT_NUMBER] = 24, [DP_INPUT_ANGLE] = 25,
    [DP_INPUT_VALUE3] = 26, [DP_INPUT_VALUE4] = 27};

dp_problem dp_nearby_problem(const dp_problem *p, const dp_mover *m) {
    const dp_format wide = m->dtype == DP_FP64 ? DP_FP64 : DP_FP32;
    dp_problem y = *p;
    y.cu = dp_cu_copy(p);
    for (int i = 0; i < DP_NINPUTS; i++) {
        const dp_format f = dp_input_fields[i].parameter ? wide
                            : i == DP_INPUT_G            ? m->gates
                                                         : m->dtype;
        *dp_input_at(&y, i) = moved(m, dp_input_of(p, i), dp_input_count(p, i), f, STREAM[i]);
    }
    for (int64_t i = 0;
         p->beta && p->beta_form == DP_BETA_PLAIN && i < dp_input_count(p, DP_INPUT_BETA); i++)
        if (p->beta[i] <= 2 && y.beta[i] > 2) y.beta[i] = 2; /* a contraction stays one */
    return y;
}
