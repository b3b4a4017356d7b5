/* harness/tests/complex_step.h - for oracles in quadruple precision: an input with an imaginary
 * step in one entry, and the gate of math.md c. The derivative d loss / dx is Im loss(x + i h) /
 * h. */
#pragma once
#include "ref/vocabulary/problem.h"

#include <quadmath.h>

typedef __float128 f128;
typedef __complex128 c128;

typedef struct {
    const double *at;
    f128 h;
} bump; /* the input entry that gets the imaginary step */

static inline c128 in(const bump *b, const double *x) {
    c128 z = (f128)*x;
    if (x == b->at) __imag__ z = b->h;
    return z;
}

static inline c128 c_sigmoid(c128 x) { return 1 / (1 + cexpq(-x)); }

/* Log decay of channel c at row t HV + hv of the gates; dt_bias NULL: 0, A_log NULL: 0. */
static inline c128 c_gate(const dp_problem *p, const bump *b, int64_t row, int c) {
    const int64_t Kg = dp_Kg(p), ch = Kg > 1 ? c : 0, hv = row % p->HV;
    const c128 raw = in(b, &p->g[row * Kg + ch]);
    if (p->gate == DP_GATE_LOG) return raw;
    const c128 x = raw + (p->dt_bias ? in(b, &p->dt_bias[hv * Kg + ch]) : 0),
               a = p->A_log ? cexpq(in(b, &p->A_log[hv])) : 1;
    return p->gate == DP_GATE_SOFTPLUS ? -a * clogq(1 + cexpq(x))
                                       : (f128)p->lower_bound * c_sigmoid(a * x);
}
