/* How the state and its gradient are kept from token to token or from chunk to chunk. */
#include "adversary.h"

static uint64_t seed;

void state_begin(uint64_t of) { seed = of; }

static float kept(const design *d, uint64_t at, float x) {
    return d->stochastic ? stochastic_to(d->state, x, uniform01(seed, at)) : round_to(d->state, x);
}

void keep_state(const design *d, keeping at, float *S, int64_t n) {
    const uint64_t first = (uint64_t)(at.place * n);
    for (int64_t i = 0; d->state && at.rounds && i < n; i++)
        S[i] = kept(d, first + (uint64_t)i, S[i]);
    for (int64_t i = 0; knob.rounded_state != 0 && at.end && i < n; i++)
        S[i] = share(knob.rounded_state, S[i], round_to(BF16, S[i]));
}

void keep_gradient(const design *d, keeping at, float *dS, int64_t n) {
    at.rounds = at.rounds && d->both_states;
    keep_state(d, at, dS, n);
}

int64_t carry_token(const design *d, int64_t T) {
    const int64_t C = d->chunk ? d->chunk : 64;
    const int64_t t = C * ((T / C + 1) / 2);
    return t < T ? t : -1;
}
