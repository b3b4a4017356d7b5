/* Keys that move the state away from the channels that a gate is about to kill.
 *
 * Every channel's log gates sum to four strong ones in any 16 consecutive tokens. Half of the
 * channels are open at every token, and the state is always among those. A kernel may take the
 * largest channel sum for the attenuation of a state (-20 for gates of -5). It then drops a state
 * of which half is still there. The largest channel gate of each token, summed over tokens, bounds
 * the attenuation.
 *
 * a and b are random unit vectors of a head, a in the first half of the channels, b in the second.
 * In 16 tokens, with the state along d = cos(w) a + sin(w) b:
 *   0..3    w = 90 degrees, gates of the first half strong
 *   4..7    w = 67.5, 45, 22.5, 0 degrees, all gates open
 *   8..11   w = 0, gates of the second half strong
 *   12..15  w = 22.5, 45, 67.5, 90 degrees, all gates open
 * The key is the unit vector of the plane that is orthogonal to d, so a step with beta = 1 projects
 * the state onto d. Each of eight tokens keeps cos(22.5 degrees) of the state, all sixteen keep
 * 0.53; with beta < 1 more is left. The write of a token along its key enters the state at the next
 * one. q is d and noise. Head h is 4 h tokens ahead.
 */
#include "inputs.h"

#include <math.h>

#define PERIOD 16
#define STRONG_LOG (-5.0) /* gate = log */
#define RAW 12.0          /* raw gates: far on either side */
#define QUERY_NOISE 0.3

/* cos and sin of multiples of 22.5 degrees up to 90 */
static const double COS[] = {1, 0x1.d906bcf328d46p-1, 0x1.6a09e667f3bcdp-1, 0x1.87de2a6aea963p-2,
                             0};

/* Steps of 22.5 degrees of the state's direction after token t. */
static int angle(int64_t t) {
    static const int of[PERIOD] = {4, 4, 4, 4, 3, 2, 1, 0, 0, 0, 0, 0, 1, 2, 3, 4};
    return of[t % PERIOD];
}

/* -1, 0, 1: gates of the first half, none, the second half are strong at token t. */
static int killed(int64_t t) {
    const int64_t phase = t % PERIOD;
    return phase < 4 ? -1 : phase >= 8 && phase < 12 ? 1 : 0;
}

static void unit_vector(dp_rng *r, double *x, int first, int end) {
    double sum = 0;
    for (int i = first; i < end; i++) {
        x[i] = dp_rng_normal(r);
        sum += x[i] * x[i];
    }
    for (int i = first; i < end; i++)
        x[i] /= sqrt(sum);
}

static void move_head(dp_problem *p, int h, dp_rng *r, const double *plane) {
    const int K = p->K, half = K / 2;
    for (int64_t t = 0; t < p->T; t++) {
        const int w = angle(t + 4 * h);
        double *q = p->q + (t * p->H + h) * K;
        double *k = p->k + (t * p->H + h) * K;
        for (int i = 0; i < K; i++) {
            const double d = i < half ? COS[w] : COS[4 - w];
            const double across = i < half ? -COS[4 - w] : COS[w];
            q[i] = sqrt(K) * d * plane[i] + QUERY_NOISE * dp_rng_normal(r);
            k[i] = across * plane[i];
        }
    }
}

static void gate_head(dp_problem *p, int hv) {
    const int K = p->K, half = K / 2, raw = p->gate != DP_GATE_LOG;
    for (int64_t t = 0; t < p->T; t++) {
        const int side = killed(t + 4 * (hv / dp_G(p)));
        double *g = p->g + (t * p->HV + hv) * K;
        for (int i = 0; i < K; i++) {
            const int strong = side == (i < half ? -1 : 1);
            if (raw)
                g[i] = strong ? RAW : -RAW;
            else
                g[i] = strong ? STRONG_LOG : 0;
        }
    }
}

void dp_inputs_move_state(dp_problem *p, uint64_t seed) {
    DP_OWN double *plane = dp_doubles(p->K);
    for (int h = 0; h < p->H; h++) {
        dp_rng r;
        dp_rng_seed(&r, seed, DP_STREAM_MOVED + 256 * (uint64_t)(h + 1));
        unit_vector(&r, plane, 0, p->K / 2);
        unit_vector(&r, plane, p->K / 2, p->K);
        move_head(p, h, &r, plane);
    }
    for (int hv = 0; hv < p->HV; hv++)
        gate_head(p, hv);
}
