/* ref/inputs/inputs_exact.h - one token of the inputs on which nothing rounds (inputs_exact.c), for
 * the host and for kernels (gpu/arrays). A token follows from the generator before its draws, and
 * from the bits that the tokens before it left. */
#pragma once
#include "ref/vocabulary/memory.h"
#include "rng.h"

#include <math.h>

typedef struct {
    dp_rng r;      /* before its draws */
    int64_t at;    /* its number in its sequence */
    int64_t scale; /* its sequence modulo 3 */
} dp_exact_token;

struct dp_exact {
    int64_t T;
    int H, HV, K, V, R, Kg;
    const dp_exact_token *token;                  /* [T] */
    const uint16_t *old;                          /* [T][HV], bits of dp_exact_old */
    double *q, *k, *v, *g, *beta, *erase, *write; /* zeros before; NULL: none */
};
/* The reset of two channels is left out; key j replaces halves (shifted by j). */
enum dp_exact_old { DP_EXACT_NO_RESET = 1, DP_EXACT_HALVES = 2 };

#define DP_EXACT_RESET (-1024.0)
typedef enum { DP_EXACT_KEEPS, DP_EXACT_HEAD, DP_EXACT_PAIR, DP_EXACT_CHANNEL } dp_exact_gate;

DP_BOTH int dp_exact_draw(dp_rng *r, int n) { return (int)(dp_rng_uniform(r) * n); }
DP_BOTH double dp_exact_sign(dp_rng *r) { return dp_exact_draw(r, 2) ? 1 : -1; }
DP_BOTH int dp_exact_rotated(int K, int a) { return a / 4 % 2 == 1 && a / 4 * 4 + 4 <= K; }

/* Basis vector a: entry x. Row a of the 4 x 4 Hadamard matrix has the signs (-1)^popcount(a & x).
 */
DP_BOTH double dp_exact_basis(int K, int a, int x) {
    const int common = a & x & 3;
    if (!dp_exact_rotated(K, a)) return x == a;
    return x / 4 != a / 4 ? 0 : common == 1 || common == 2 ? -0.5 : 0.5;
}

/* The basis vector of key j of token `at` of a sequence in head h. Heads step through the basis by
 * different steps, each prime to K, so that a head visits every vector. */
DP_BOTH int dp_exact_vector(const dp_exact *x, int64_t at, int h, int j) {
    int d = h % 4 == 0 ? 1 : h % 4 == 1 ? 5 : h % 4 == 2 ? 3 : 7;
    while (d > 1 && x->K % d == 0)
        d -= 2;
    return (int)((at * d + h + (int64_t)j * (x->K / x->R)) % x->K);
}

/* Neighbours in a group of value heads differ by one power of two (dq and dk add up over a group),
 * all else by more. */
DP_BOTH int dp_exact_log2(int group, int sequence, int hv) {
    return hv % group + 3 * (hv / group % 3) + 9 * (sequence % 3);
}

DP_BOTH dp_exact_gate dp_exact_gate_of(const dp_exact *x, int channel, int roll) {
    if (x->Kg == 1) return roll ? DP_EXACT_KEEPS : DP_EXACT_HEAD;
    if (roll >= 6) return DP_EXACT_KEEPS;
    return dp_exact_rotated(x->K, channel) ? DP_EXACT_PAIR : DP_EXACT_CHANNEL;
}

/* halves: the row of that key may hold some. */
DP_BOTH double dp_exact_beta(int halves, int roll, int rotated) {
    return halves ? 1 : roll == 0 ? 0 : roll <= 2 && !rotated ? 0.5 : 1;
}

/* at: its number in its sequence */
DP_BOTH void dp_exact_keys(const dp_exact *x, dp_rng *r, int64_t t, int64_t at) {
    for (int h = 0; h < x->H; h++) {
        double *q = x->q + (t * x->H + h) * x->K;
        for (int i = 0; i < 2; i++) {
            const int channel = dp_exact_draw(r, x->K);
            q[channel] = dp_exact_sign(r);
        }
        for (int j = 0; j < x->R; j++) {
            const int a = dp_exact_vector(x, at, h, j);
            double *k = x->k + ((t * x->H + h) * x->R + j) * x->K;
            const double s = dp_exact_sign(r);
            for (int i = 0; i < x->K; i++)
                k[i] = s * dp_exact_basis(x->K, a, i);
        }
    }
}

DP_BOTH void dp_exact_gates(const dp_exact *x, dp_rng *r, int64_t row) {
    const int channel = dp_exact_draw(r, x->K), roll = dp_exact_draw(r, 48);
    const dp_exact_gate kind = dp_exact_gate_of(x, channel, roll);
    double *g = x->g + row * x->Kg;
    if (kind == DP_EXACT_HEAD) g[0] = DP_EXACT_RESET;
    if (kind == DP_EXACT_CHANNEL) g[channel] = DP_EXACT_RESET;
    if (kind != DP_EXACT_PAIR || x->old[row] & DP_EXACT_NO_RESET) return;
    const int pair = channel / 4 * 4 + (channel & 2); /* the projector mixes s_a and s_(a^2) only */
    g[pair] = g[pair + 1] = DP_EXACT_RESET;
}

/* erase and write of key a. */
DP_BOTH void dp_exact_erase_write(const dp_exact *x, dp_rng *r, int64_t at, int a, double beta) {
    const int rotated = dp_exact_rotated(x->K, a);
    for (int i = 0; i < x->K; i++) {
        const int one = i == a || rotated, n = one ? 0 : dp_exact_draw(r, 4);
        x->erase[at * x->K + i] = one ? beta : n == 0 ? 0 : n == 1 ? 0.5 : n - 1;
    }
    for (int i = 0; i < x->V; i++)
        x->write[at * x->V + i] = beta;
}

DP_BOTH void dp_exact_writes(const dp_exact *x, dp_rng *r, int64_t t, int hv) {
    const dp_exact_token *o = &x->token[t];
    const int group = x->HV / x->H;
    const double unit = ldexp(1.0, dp_exact_log2(group, (int)o->scale, hv));
    const int64_t row = t * x->HV + hv;
    for (int j = 0; j < x->R; j++) {
        const int a = dp_exact_vector(x, o->at, hv / group, j), roll = dp_exact_draw(r, 8);
        const int64_t i = row * x->R + j;
        const double beta =
            dp_exact_beta(x->old[row] & DP_EXACT_HALVES << j, roll, dp_exact_rotated(x->K, a));
        if (x->erase)
            dp_exact_erase_write(x, r, i, a, beta);
        else if (x->beta)
            x->beta[i] = beta;
        for (int c = 0; c < x->V; c++)
            x->v[i * x->V + c] = dp_exact_sign(r) * unit * (double)(1 + (t >> c % 8 & 1));
    }
}

DP_BOTH void dp_exact_make(const dp_exact *x, int64_t t) {
    dp_rng r = x->token[t].r;
    dp_exact_keys(x, &r, t, x->token[t].at);
    for (int hv = 0; hv < x->HV; hv++) {
        dp_exact_gates(x, &r, t * x->HV + hv);
        dp_exact_writes(x, &r, t, hv);
    }
}
