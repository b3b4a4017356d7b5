/* The recurrence with its state stored in a short format between calls (carried.h). */
#include "carried.h"
#include "ref/arithmetic/elementary.h"
#include "ref/bound/bound.h"
#include "ref/chunk/state.h"
#include "ref/inputs/inputs.h"
#include "ref/vocabulary/stored.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

enum { FP32, BF16, FP16, BF16_RZ, BF16_SR, FP8, INT8, INT8_FEEDBACK };

const dp_carried_format dp_carried_formats[DP_NCARRIED] = {
    [FP32] = {"fp32", "fp32, to nearest", 4},
    [BF16] = {"bf16", "bf16, to nearest", 2},
    [FP16] = {"fp16", "fp16, to nearest", 2},
    [BF16_RZ] = {"bf16rz", "bf16, truncated", 2},
    [BF16_SR] = {"bf16sr", "bf16, stochastic", 2},
    [FP8] = {"fp8", "fp8 e4m3, an fp32 scale a row", 1 + 4. / 128},
    [INT8] = {"int8", "int8, an fp32 scale a row", 1 + 4. / 128},
    [INT8_FEEDBACK] = {"int8ef", "int8 with what it leaves out, in bf16, fed back", 3 + 4. / 128},
};

typedef dp_carried_head session;

typedef struct {
    double *S, *o, *left, *zero; /* [K][V] state, [V] output, [K][V] what stores left out, zeros */
    dp_rng rng;
} carrier;

/* |a - b|, in eight sums side by side: the same bits whatever vectors the machine has. */
static double distance(const double *a, const double *b, int64_t n) {
    double sum[8] = {0}, rest = 0;
    const int64_t whole = n / 8 * 8;
    for (int64_t i = 0; i < whole; i += 8)
        for (int l = 0; l < 8; l++)
            sum[l] += (a[i + l] - b[i + l]) * (a[i + l] - b[i + l]);
    for (int64_t i = whole; i < n; i++)
        rest += (a[i] - b[i]) * (a[i] - b[i]);
    for (int l = 0; l < 8; l++)
        rest += sum[l];
    return sqrt(rest);
}

/* ---- formats -------------------------------------------------------------------------------- */

/* x to a multiple of spacing: to nearest even, toward zero, or up or down by chance. */
static double to_spacing(double x, double spacing) { return nearbyint(x / spacing) * spacing; }

static double bf16_drawn(double x, dp_rng *r) {
    const double near = dp_bf16d(x);
    if (near == x) return x;
    int exponent;
    frexp(x, &exponent);
    const double spacing = ldexp(1, exponent - 8), down = floor(x / spacing) * spacing;
    return dp_rng_uniform(r) < (x - down) / spacing ? down + spacing : down;
}

static double bf16_truncated(double x) {
    int exponent;
    frexp(x, &exponent);
    const double spacing = ldexp(1, exponent - 8);
    return trunc(x / spacing) * spacing;
}

/* e4m3: 3 stored fraction bits, least normal 2^-6, largest 448. */
static double e4m3(double x) {
    int exponent;
    frexp(x, &exponent);
    const double spacing = ldexp(1, exponent - 4 < -9 ? -9 : exponent - 4);
    const double y = to_spacing(x, spacing);
    return fabs(y) > 448 ? copysign(448, y) : y;
}

/* One row of the state as it is stored; the square of what that can be off by is returned. */
static double store_row(int format, double *x, double *left, const double *zero, int n, dp_rng *r) {
    const double most = dp_norm_max(n, x);
    const double norm = distance(x, zero, n);
    const double scale = dp_stored_scale(most, format == FP8 ? 448 : 127);
    double u = 0, spacing = 0;
    for (int i = 0; i < n; i++)
        switch (format) {
        case FP32: x[i] = dp_fp32(x[i]); break;
        case BF16: x[i] = dp_bf16d(x[i]); break;
        case FP16: x[i] = dp_fp16_from_bits(dp_fp16_bits(x[i])); break;
        case BF16_RZ: x[i] = bf16_truncated(x[i]); break;
        case BF16_SR: x[i] = bf16_drawn(x[i], r); break;
        case FP8: x[i] = scale * e4m3(x[i] / scale); break;
        case INT8: x[i] = scale * fmax(-127, fmin(127, nearbyint(x[i] / scale))); break;
        default: {
            const double want = x[i] + left[i];
            x[i] = scale * fmax(-127, fmin(127, nearbyint(want / scale)));
            left[i] = dp_bf16d(want - x[i]);
        }
        }
    switch (format) {
    case FP32: u = 0x1p-24; break;
    case BF16: u = 0x1p-8; break;
    case FP16:
        u = dp_fp16_from_bits(dp_fp16_bits(most)) < INFINITY ? 0x1p-11 : INFINITY;
        spacing = 0x1p-24;
        break;
    case BF16_RZ:
    case BF16_SR: u = 0x1p-7; break;
    case FP8:
        u = 0x1p-4;
        spacing = scale * 0x1p-9;
        break;
    default: spacing = scale;
    }
    const double d = (u + 0x1p-23) * norm + sqrt(n) * spacing / 2;
    return d * d;
}

void dp_carried_store_row(int format, int n, double *x, double *left) {
    DP_OWN double *zero = dp_doubles(n);
    dp_rng none;
    dp_rng_seed(&none, 1, 0);
    store_row(format, x, left, zero, n, &none);
}

/* Stores the state; returns |d|, for feedback an upper bound of |r|. */
static double store(int format, const dp_problem *p, carrier *c) {
    double d2 = 0;
    for (int x = 0; x < p->K; x++)
        d2 += store_row(format, c->S + (int64_t)x * p->V, c->left + (int64_t)x * p->V, c->zero,
                        p->V, &c->rng);
    return sqrt(d2);
}

/* ---- one step ------------------------------------------------------------------------------- */

static const double *erasing_of(const session *s, int64_t t, int j) {
    return dp_erasing_at(s->p, s->in.k, s->in.erasing, s->first + t, s->hv) + (int64_t)j * s->p->K;
}

static const double *key_of(const session *s, int64_t t, int j) {
    const dp_problem *p = s->p;
    return s->in.k + (((s->first + t) * p->H + s->hv / dp_G(p)) * dp_rows(p) + j) * p->K;
}

void dp_carried_advance(const session *s, int64_t t, double *S, double *o, double *write) {
    const dp_problem *p = s->p;
    const int64_t at = (s->first + t) * p->HV + s->hv;
    const double *values = dp_values_at(p, s->in.values, s->first + t, s->hv);
    dp_state_decay(p, s->in.g + at * dp_Kg(p), S);
    for (int first = 0, n = dp_keys_at_once(p); first < dp_rows(p); first += n) {
        for (int j = first; j < first + n; j++) {
            double *y = write + (int64_t)j * p->V;
            dp_state_read(p, S, erasing_of(s, t, j), y);
            for (int v = 0; v < p->V; v++)
                y[v] = s->in.beta[at * dp_rows(p) + j] * (values[(int64_t)j * p->V + v] - y[v]);
        }
        for (int j = first; j < first + n; j++)
            dp_state_write(p, 1, key_of(s, t, j), write + (int64_t)j * p->V, S);
    }
    dp_state_read(p, S, s->in.q + ((s->first + t) * p->H + s->hv / dp_G(p)) * p->K, o);
    for (int v = 0; v < p->V; v++)
        o[v] *= p->scale;
}

/* |k| |e| - sign k e, from the norms nk and ne. The sum is one of squares, since the difference of
 * the two is rounding where keys are parallel. */
static double apart(int K, const double *k, const double *e, double nk, double ne, double sign) {
    const double by = sqrt(ne) / sqrt(nk);
    double sum = 0;
    for (int x = 0; x < K; x++) {
        const double y = k[x] * by - sign * e[x] / by;
        sum += y * y;
    }
    return sum / 2;
}

/* A row I - beta k e' has the norm (w + sqrt(w^2 + 4 - 4 d)) / 2 of w = |beta| |k| |e| and
 * d = beta k e. The number under the root is (w - 2)^2 + 4 (w - d). */
dp_step_norms dp_step_norms_of(const dp_problem *p, const dp_activated *in, int64_t t, int hv) {
    const int rows = dp_rows(p), turns = dp_in_turn(p);
    const double *k = in->k + (t * p->H + hv / dp_G(p)) * rows * p->K,
                 *e = dp_erasing_at(p, in->k, in->erasing, t, hv);
    dp_step_norms a = {1, 0};
    int reading = 0, symmetric = !in->erasing, along = symmetric;
    for (int j = 0; j < rows; j++, k += p->K, e += p->K) {
        const double beta = in->beta[(t * p->HV + hv) * rows + j], nk = dp_norm_fro(p->K, k),
                     ne = dp_norm_fro(p->K, e), w = fabs(beta) * nk * ne;
        double own = beta < 0 ? 1 + w : w - 1;
        if (!symmetric && w > 0) {
            const double d = fabs(beta) * apart(p->K, k, e, nk, ne, copysign(1, beta));
            own = (w + sqrt((w - 2) * (w - 2) + 4 * d)) / 2 * (1 + 0x1p-40);
        }
        reading += w > 0;
        along &= beta >= 0;
        a.moves += w * (turns ? a.grows : 1);
        a.grows *= fmax(1, own);
    }
    if (!symmetric) a.moves *= 1 + 0x1p-40;
    if (reading > 1 && !turns) a.grows = along ? fmax(1, a.moves - 1) : 1 + a.moves;
    return a;
}

static dp_step_norms norms_of(const session *s, int64_t t) {
    const int64_t at = (s->first + t) * s->p->HV + s->hv;
    const int Kg = dp_Kg(s->p);
    double most = -INFINITY, least = INFINITY;
    for (int x = 0; x < Kg; x++) {
        most = fmax(most, s->in.g[at * Kg + x]);
        least = fmin(least, s->in.g[at * Kg + x]);
    }
    const double decay = dp_exp(most), turned = fmax(fabs(1 - dp_exp(least)), fabs(1 - decay));
    const dp_step_norms a = dp_step_norms_of(s->p, &s->in, s->first + t, s->hv);
    return (dp_step_norms){decay * a.grows, turned + decay * a.moves};
}

double dp_carried_grows(const session *s, int64_t t) { return norms_of(s, t).grows; }

/* ---- a state that grows ---------------------------------------------------------------------- */

dp_growth dp_growth_of(const dp_problem *p) {
    DP_FREED(dp_activated_free) dp_activated a = dp_activated_new(p);
    dp_growth of = {0};
    const int keys = dp_has_beta(p) || dp_by_gates(p);
    for (int64_t t = 0; t < p->T && keys; t++)
        for (int hv = 0; hv < p->HV; hv++) {
            const double x = dp_step_norms_of(p, &a, t, hv).moves;
            if (!(x > of.strength)) continue;
            of.strength = x;
            of.token = t;
        }
    for (int h = 0; h < p->HV; h++) {
        double grown = 0;
        for (int64_t t = 0; t < p->T; t++)
            grown += fmax(0, dp_largest_gate(p, a.g + (t * p->HV + h) * dp_Kg(p)));
        if (!(grown > of.gates)) continue;
        of.gates = grown;
        of.head = h;
    }
    return of;
}

/* ---- a session ------------------------------------------------------------------------------ */

/* Bounds of the error of a carried state. */
typedef struct {
    double sound, variance, left, left2; /* left: what feedback holds back */
} bounds;

static void step_bounds(bounds *b, dp_step_norms a, double stored, int format) {
    const double feedback = format == INT8_FEEDBACK ? b->left * a.moves : 0;
    b->sound = a.grows * b->sound + feedback;
    b->variance = a.grows * a.grows * b->variance + feedback * feedback;
    if (stored < 0) return;
    if (format == INT8_FEEDBACK) {
        b->left = stored;
    } else {
        b->sound += stored;
        b->variance += stored * stored;
    }
}

static int is_point(int64_t step, int64_t steps) {
    int64_t decade = 1;
    while (decade * 10 <= step)
        decade *= 10;
    static const double marks[] = {1, 1.333, 1.778, 2.371, 3.162, 4.217, 5.623, 7.499};
    for (int i = 0; i < 8; i++)
        if ((int64_t)(marks[i] * (double)decade) == step) return 1;
    return step == steps;
}

/* Least squares over the points of the last two decades. */
static double slope_of(const dp_carried *r) {
    double n = 0, sx = 0, sy = 0, sxx = 0, sxy = 0;
    for (int i = 0; i < r->n; i++) {
        if (r->step[i] * 100 < r->step[r->n - 1] || !(r->error[i] > 0)) continue;
        const double x = dp_log((double)r->step[i]), y = dp_log(r->error[i]);
        n++;
        sx += x;
        sy += y;
        sxx += x * x;
        sxy += x * y;
    }
    const double det = n * sxx - sx * sx;
    return n > 2 && det > 0 ? (n * sxy - sx * sy) / det : NAN;
}

static void note_point(dp_carried *r, int64_t step, double size, double error, const bounds *b) {
    if (r->n == DP_CARRIED_POINTS) return;
    r->step[r->n] = step;
    r->error[r->n] = error / size;
    r->sound[r->n] = (b->sound + b->left) / size;
    r->probable[r->n++] = (DP_LAMBDA * sqrt(b->variance) + b->left) / size;
}

static void note_step(dp_carried *r, double error, const bounds *b) {
    const double sound = b->sound + b->left, probable = DP_LAMBDA * sqrt(b->variance) + b->left;
    if (isinf(sound)) return; /* the format overflowed, and says so */
    if (error > r->of_sound * sound) r->of_sound = error / sound;
    if (error > r->of_probable * probable) r->of_probable = error / probable;
}

static void note_output(dp_carried *r, int64_t step, double off, double rms, double need) {
    if (!(rms > 0)) return;
    r->largest_o = isnan(off) ? INFINITY : fmax(r->largest_o, off / rms);
    if (!r->exceeded && !(off <= need * rms)) r->exceeded = step;
}

static void run(const session *s, const dp_carried_options *o, carrier *exact, carrier *kept,
                dp_carried *r) {
    const dp_problem *p = s->p;
    const int64_t KV = (int64_t)p->K * p->V;
    DP_OWN double *write = dp_doubles((int64_t)dp_rows(p) * p->V);
    double o2 = 0;
    bounds b = {0};
    for (int64_t i = 1; i <= o->steps; i++) {
        const int64_t t = (i - 1) % s->n;
        dp_carried_advance(s, t, exact->S, exact->o, write);
        dp_carried_advance(s, t, kept->S, kept->o, write);
        const double o_norm = distance(exact->o, exact->zero, p->V);
        o2 += o_norm * o_norm;
        note_output(r, i, distance(kept->o, exact->o, p->V), sqrt(o2 / (double)i), o->need);
        const double stored = i % o->every ? -1 : store(r->format, p, kept);
        step_bounds(&b, norms_of(s, t), stored, r->format);
        const double off = distance(kept->S, exact->S, KV),
                     size = distance(exact->S, exact->zero, KV);
        const double error = isnan(off) ? INFINITY : off; /* it overflowed */
        note_step(r, error, &b);
        if (is_point(i, o->steps) && size > 0) note_point(r, i, size, error, &b);
    }
    double dot = 0;
    for (int64_t i = 0; i < KV; i++)
        dot += (kept->S[i] - exact->S[i]) * exact->S[i];
    const double error = distance(kept->S, exact->S, KV);
    r->bias = error > 0 ? dot / (error * dp_norm_fro(KV, exact->S)) : 0;
    r->slope = slope_of(r);
}

static carrier carrier_new(const dp_problem *p, int hv, int format) {
    const int64_t KV = (int64_t)p->K * p->V;
    carrier c = {
        .S = dp_doubles(KV), .o = dp_doubles(p->V), .left = dp_doubles(KV), .zero = dp_doubles(KV)};
    if (p->s0) memcpy(c.S, p->s0 + hv * KV, sizeof *c.S * (size_t)KV);
    dp_rng_seed(&c.rng, 0x5e5510, (uint64_t)(hv * DP_NCARRIED + format));
    return c;
}

static void carrier_free(carrier *c) { DP_FREE(c->S, c->o, c->left, c->zero); }

dp_status dp_carried_run(const dp_problem *p, int hv, int format, const dp_carried_options *o,
                         dp_carried *out, dp_err *e) {
    session s = {.p = p, .hv = hv, .first = p->cu[0], .n = p->cu[1] - p->cu[0]};
    *out = (dp_carried){.format = format, .head = hv};
    if (s.n < 1) return dp_fail(e, DP_EINPUT, "cu_seqlens: the first sequence is empty");
    s.in = dp_activated_new(p);
    DP_FREED(carrier_free) carrier exact = carrier_new(p, hv, format);
    DP_FREED(carrier_free) carrier kept = carrier_new(p, hv, format);
    run(&s, o, &exact, &kept, out);
    dp_activated_free(&s.in);
    return DP_OK;
}
