/* Laws of inputs: from a spec and a seed to exact bits (inputs.h). */
#include "inputs.h"
#include "ref/vocabulary/design.h"
#include "ref/vocabulary/recurrence.h"

#include <assert.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

/* ---- generator ------------------------------------------------------------------------------- */

static uint64_t splitmix64(uint64_t *x) {
    uint64_t z = *x += 0x9e3779b97f4a7c15u;
    z = (z ^ z >> 30) * 0xbf58476d1ce4e5b9u;
    z = (z ^ z >> 27) * 0x94d049bb133111ebu;
    return z ^ z >> 31;
}

void dp_rng_seed(dp_rng *r, uint64_t seed, uint64_t stream) {
    uint64_t x = seed;
    x = splitmix64(&x) ^ stream * 0xd1342543de82ef95u;
    for (int i = 0; i < 4; i++)
        r->s[i] = splitmix64(&x);
}

/* The sum of 12 uniforms has variance 1. Each is (i + 1/2) 2^-32: the sum is an integer below 2^36,
 * so nothing is rounded. */
double dp_rng_normal(dp_rng *r) {
    uint64_t sum = 6;
    for (int i = 0; i < 6; i++) {
        const uint64_t x = dp_rng_next(r);
        sum += (x & 0xffffffffu) + (x >> 32);
    }
    return (double)(int64_t)(sum - 6 * 0x100000000u) * 0x1p-32;
}

double dp_rng_exponential(dp_rng *r) { return 0 - dp_log_exact_bits(1 - dp_rng_uniform(r)); }

/* ---- exp and log from IEEE operations -------------------------------------------------------- */

#define LN2_HI 0x1.62e42fee00000p-1 /* 32 bits, so that n * LN2_HI is exact for |n| < 2^21 */
#define LN2_LO 0x1.a39ef35793c76p-33

/* x = n ln 2 + r, |r| <= 0.3466; Taylor to r^13 leaves 0.3466^14/14! = 4e-18. */
double dp_exp_exact_bits(double x) {
    static const double c[] = {1.0 / 6227020800, 1.0 / 479001600, 1.0 / 39916800, 1.0 / 3628800,
                               1.0 / 362880,     1.0 / 40320,     1.0 / 5040,     1.0 / 720,
                               1.0 / 120,        1.0 / 24,        1.0 / 6,        0.5};
    if (x < -700) return 0;
    assert(x <= 700);
    const double n = floor(x * 0x1.71547652b82fep0 + 0.5), r = (x - n * LN2_HI) - n * LN2_LO;
    double p = c[0];
    for (int i = 1; i < 12; i++)
        p = p * r + c[i];
    return ldexp(1 + (r + r * r * p), (int)n);
}

/* x = 2^e m, m in [sqrt(1/2), sqrt(2)); log m = 2 artanh(s), s = (m-1)/(m+1), |s| <= 0.1716, series
 * to s^21 (0.1716^22/23 = 6e-19). */
double dp_log_exact_bits(double x) {
    int e;
    double m = frexp(x, &e);
    if (m < 0x1.6a09e667f3bcdp-1) {
        m *= 2;
        e--;
    }
    const double s = (m - 1) / (m + 1), z = s * s;
    double p = 0;
    for (int k = 21; k >= 3; k -= 2)
        p = p * z + 1.0 / k;
    return e * LN2_HI + (2 * s + (2 * s * (z * p) + e * LN2_LO));
}

/* ---- vectors --------------------------------------------------------------------------------- */

static void normalise(double *x, int n) {
    const double r = sqrt(dp_squares(x, n));
    if (r > 0)
        for (int i = 0; i < n; i++)
            x[i] /= r;
}

static void normals(dp_rng *r, double *x, int n) {
    for (int i = 0; i < n; i++)
        x[i] = dp_rng_normal(r);
}

/* Orthonormal rows Q [d][K] of a random subspace: modified Gram-Schmidt, run twice (orthogonal to a
 * few units in the last place). */
static void random_subspace(dp_rng *r, double *Q, int d, int K) {
    normals(r, Q, d * K);
    for (int i = 0; i < d; i++)
        for (int pass = 0; pass < 2; pass++) {
            for (int j = 0; j < i; j++) {
                double dot = 0;
                for (int l = 0; l < K; l++)
                    dot += Q[j * K + l] * Q[i * K + l];
                for (int l = 0; l < K; l++)
                    Q[i * K + l] -= dot * Q[j * K + l];
            }
            normalise(Q + i * K, K);
        }
}

static int subspace_dim(int K) { return K > 1 ? K / 2 : 1; }

/* Shared by the keys of one head. basis: [subspace_dim][K] or NULL; common: unit vector [K] or
 * NULL. */
typedef struct {
    int K;
    double *basis, *common;
} key_law;

static void key_law_init(key_law *l, dp_keys kind, int K, dp_rng *r) {
    *l = (key_law){K, NULL, NULL};
    if (kind == DP_KEYS_SUBSPACE)
        random_subspace(r, l->basis = dp_doubles((int64_t)subspace_dim(K) * K), subspace_dim(K), K);
    if (kind == DP_KEYS_CORRELATED) {
        normals(r, l->common = dp_doubles(K), K);
        normalise(l->common, K);
    }
}

static void key_law_free(key_law *l) {
    free(l->basis);
    free(l->common);
}

static void draw_key(const key_law *l, dp_rng *r, double *k) {
    const int K = l->K;
    if (l->basis) {
        memset(k, 0, (size_t)K * sizeof *k);
        for (int j = 0; j < subspace_dim(K); j++) {
            const double c = dp_rng_normal(r);
            for (int i = 0; i < K; i++)
                k[i] += c * l->basis[j * K + i];
        }
        return;
    }
    normals(r, k, K);
    if (l->common)
        for (int i = 0; i < K; i++)
            k[i] = sqrt(K) * l->common[i] + 0.1 * k[i];
}

/* ---- one problem ----------------------------------------------------------------------------- */

enum stream {
    ST_Q = 1,
    ST_K,
    ST_V,
    ST_G,
    ST_BETA,
    ST_S0,
    ST_DO,
    ST_DSTATE,
    ST_A_LOG,
    ST_DT_BIAS,
    ST_LAW,
    ST_RATE,
    ST_X,
    ST_W,
    ST_BIAS,
    ST_DY,
    ST_ERASE,
    ST_WRITE,
    ST_LR_A,
    ST_LR_B,
    ST_OWN
};

static dp_format param_dtype(const dp_inputs_spec *s) {
    return s->dtype == DP_FP64 ? DP_FP64 : DP_FP32;
}

static void fill_normal(double *x, int64_t n, const dp_inputs_spec *s, enum stream st, double mean,
                        double scale, dp_format dtype) {
    if (!x) return;
    dp_rng r;
    dp_rng_seed(&r, s->seed, st);
    for (int64_t i = 0; i < n; i++)
        x[i] = dp_store(dtype, mean + scale * dp_rng_normal(&r));
}

static void fill_uniform(double *x, int64_t n, const dp_inputs_spec *s, enum stream st, double lo,
                         double hi) {
    dp_rng r;
    dp_rng_seed(&r, s->seed, st);
    for (int64_t i = 0; i < n; i++)
        x[i] = lo + (hi - lo) * dp_rng_uniform(&r);
}

static void fill_keys(dp_problem *p, const dp_inputs_spec *s) {
    const int K = p->K, R = p->R;
    for (int h = 0; h < p->H; h++) {
        dp_rng r;
        key_law law;
        dp_rng_seed(&r, s->seed, ST_LAW + 256 * (uint64_t)(h + 1));
        key_law_init(&law, s->keys, K, &r);
        dp_rng_seed(&r, s->seed, ST_K + 256 * (uint64_t)(h + 1));
        for (int64_t t = 0; t < p->T; t++)
            for (int j = 0; j < R; j++) {
                double *k = p->k + ((t * p->H + h) * R + j) * K;
                draw_key(&law, &r, k);
                if (!dp_is_normed(p, DP_INPUT_K)) normalise(k, K);
                dp_store_all(s->dtype, k, K);
            }
        key_law_free(&law);
    }
}

static double head_rate(const dp_inputs_spec *s, int h) {
    double r = 1;
    for (int i = 0; i < h && s->g_head_spread > 0; i++)
        r *= s->g_head_spread;
    return r;
}

static void fill_log_gate(dp_problem *p, const dp_inputs_spec *s) {
    const int Kg = dp_Kg(p);
    const int64_t row = (int64_t)p->HV * Kg;
    dp_rng r;
    DP_OWN double *rate = dp_doubles(row);
    dp_rng_seed(&r, s->seed, ST_RATE);
    for (int64_t i = 0; i < row; i++)
        rate[i] = head_rate(s, (int)(i / Kg)) *
                  dp_exp_exact_bits(-s->g_channel_spread * 0x1.26bb1bbb55516p1 *
                                    dp_rng_uniform(&r)); /* ln 10 */
    dp_rng_seed(&r, s->seed, ST_G);
    for (int64_t i = 0; i < p->T * row; i++) {
        const double x = s->g_uniform > 0 ? s->g_uniform * dp_rng_uniform(&r)
                                          : s->g_scale * dp_rng_exponential(&r);
        p->g[i] = dp_store(s->dtype, 0 - s->g_least - rate[i % row] * x);
    }
}

static void fill_raw_gate(dp_problem *p, const dp_inputs_spec *s) {
    const dp_gate_info *law = &dp_gates[p->gate];
    const int64_t row = (int64_t)p->HV * dp_Kg(p);
    fill_normal(p->g, p->T * row, s, ST_G, s->g_mean, s->g_scale, s->dtype);
    if (p->A_log) {
        fill_uniform(p->A_log, p->HV, s, ST_A_LOG, law->a_lo, law->a_hi);
        for (int h = 0; h < p->HV; h++)
            p->A_log[h] = dp_log_exact_bits(p->A_log[h] * head_rate(s, h));
        dp_store_all(param_dtype(s), p->A_log, p->HV);
    }
    if (p->dt_bias) {
        fill_uniform(p->dt_bias, row, s, ST_DT_BIAS, law->bias_lo, law->bias_hi);
        dp_store_all(param_dtype(s), p->dt_bias, row);
    }
}

/* As RWKV-7 has them: lr_a = -u, a unit vector, and lr_b = u o r, r of the law of beta. */
static void fill_factors(dp_problem *p, const dp_inputs_spec *s) {
    const int64_t rows = p->T * p->HV, n = rows * p->K;
    fill_normal(p->lr_a, n, s, ST_LR_A, 0, 1, DP_FP64);
    fill_uniform(p->lr_b, n, s, ST_LR_B, s->beta_lo, s->beta_hi);
    for (int64_t i = 0; i < rows; i++)
        normalise(p->lr_a + i * p->K, p->K);
    dp_store_all(s->dtype, p->lr_a, n);
    for (int64_t i = 0; i < n; i++) {
        p->lr_b[i] = dp_store(s->dtype, p->lr_a[i] * p->lr_b[i]);
        p->lr_a[i] = 0 - p->lr_a[i];
    }
}

/* ---- a user's own rows ----------------------------------------------------------------------- */

/* lag: that of the token before */
static int has_key(dp_entry e, int key, int lag) {
    return dp_entry_has(e, (int)dp_row_keys[key] | (lag ? DP_PREVIOUS : 0));
}

static void find_vectors(const dp_recurrence *a, dp_key_roles *y) {
    for (int alone = 1; alone >= 0; alone--)
        for (int j = 0; j < 2 * a->n; j++) {
            const dp_entry e = j % 2 ? a->row[j / 2].read : a->row[j / 2].write;
            int n = 0, vectors = 0, first = -1;
            for (int i = DP_KEYS_MOST - 1; i >= 0; i--) {
                if (!has_key(e, i, 0) && !has_key(e, i, 1)) continue;
                n++;
                first = i;
                vectors += y->vector[i];
            }
            if (alone ? n == 1 : n > 0 && !vectors) y->vector[first] = 1;
        }
}

static int in_row(const dp_token_row *r, int key, int lag) {
    return has_key(r->write, key, lag) + has_key(r->read, key, lag);
}

static int both_in_row(const dp_token_row *r, int i, int k) {
    return (in_row(r, i, 0) && in_row(r, k, 0)) || (in_row(r, i, 1) && in_row(r, k, 1));
}

dp_key_roles dp_key_roles_of(const dp_recurrence *a) {
    dp_key_roles y = {.like = {0, 1, 2, 3}};
    int most = -1;
    find_vectors(a, &y);
    for (int again = 0; again < DP_KEYS_MOST; again++)
        for (int j = 0; j < a->n; j++)
            for (int i = 0; i < DP_KEYS_MOST * DP_KEYS_MOST && a->row[j].read.sign; i++) {
                int *x = &y.like[i / DP_KEYS_MOST], *z = &y.like[i % DP_KEYS_MOST];
                if (y.vector[i / DP_KEYS_MOST] && y.vector[i % DP_KEYS_MOST] &&
                    both_in_row(&a->row[j], i / DP_KEYS_MOST, i % DP_KEYS_MOST))
                    *x = *z = *x < *z ? *x : *z;
            }
    for (int turned = 0; turned < 1 << DP_KEYS_MOST; turned += 2) { /* the first never is */
        int contracting = 0;
        for (int j = 0; j < a->n; j++) {
            const dp_token_row *r = &a->row[j];
            int sign = r->write.sign * r->read.sign * r->strength.sign;
            for (int i = 0; i < DP_KEYS_MOST; i++)
                if (y.vector[i] && turned >> i & (in_row(r, i, 0) + in_row(r, i, 1)) & 1)
                    sign = -sign;
            contracting += sign > 0;
        }
        if (contracting <= most) continue;
        most = contracting;
        for (int i = 0; i < DP_KEYS_MOST; i++)
            y.sign[i] = y.vector[i] && turned >> i & 1 ? -1 : 1;
    }
    return y;
}

int dp_is_whole_value(const dp_recurrence *a, int input) {
    for (int j = 0; j < a->n; j++)
        if (a->row[j].value.n == 1 && dp_factor_input(a->row[j].value.of[0]) == input) return 1;
    return 0;
}

/* A second number as beta; steps of an angle from -0.1 to 0.3, which add up to many times 2 pi. */
static void fill_numbers_of_rows(dp_problem *p, const dp_inputs_spec *s) {
    const int64_t n = p->T * p->HV, angles = n * dp_pairs(p);
    if (p->number) {
        fill_uniform(p->number, n, s, ST_OWN + DP_KEYS_MOST, s->beta_lo, s->beta_hi);
        dp_store_all(s->dtype, p->number, n);
    }
    if (!p->angle) return;
    fill_uniform(p->angle, angles, s, ST_OWN + DP_KEYS_MOST + 1, -0.1, 0.3);
    dp_store_all(s->dtype, p->angle, angles);
}

/* A value beside v: as v where it stands alone, else a number as beta. */
static void fill_value_of_rows(dp_problem *p, const dp_inputs_spec *s, int input, enum stream st) {
    double *x = p->in[input];
    const int64_t n = p->T * p->HV * p->V;
    if (!x) return;
    if (dp_is_whole_value(dp_recurrence_of(p), input))
        fill_normal(x, n, s, st, 0, 1, s->dtype);
    else
        fill_uniform(x, n, s, st, s->beta_lo, s->beta_hi);
    dp_store_all(s->dtype, x, n);
}

/* The first key is that of other recurrences (fill_keys). */
static void fill_own_rows(dp_problem *p, const dp_inputs_spec *s) {
    const dp_recurrence *a = dp_recurrence_of(p);
    const dp_key_roles roles = dp_key_roles_of(a);
    const int64_t rows = p->T * p->HV, n = rows * p->K;
    for (int i = 0; i < DP_KEYS_MOST; i++) {
        double *x = p->in[dp_row_keys[i]];
        const double *like = dp_input_of(p, dp_row_keys[roles.like[i]]);
        dp_rng r;
        dp_rng_seed(&r, s->seed, ST_OWN + (uint64_t)i);
        for (int64_t j = 0; j < rows && x; j++) {
            double *y = x + j * p->K;
            const double share = s->beta_lo + (s->beta_hi - s->beta_lo) * dp_rng_uniform(&r);
            if (roles.vector[i] && roles.like[i] == i && i) {
                normals(&r, y, p->K);
                if (!dp_is_normed(p, dp_row_keys[i])) normalise(y, p->K);
            }
            for (int k = 0; k < p->K; k++)
                if (!roles.vector[i])
                    y[k] = s->beta_lo + (s->beta_hi - s->beta_lo) * dp_rng_uniform(&r);
                else if (roles.like[i] != i)
                    y[k] = like[j * p->K + k];
            if (!roles.vector[i] || roles.like[i] == i) continue;
            if (dp_is_normed(p, dp_row_keys[roles.like[i]])) normalise(y, p->K);
            for (int k = 0; k < p->K; k++)
                y[k] = share * y[k];
        }
    }
    for (int i = 0; i < DP_KEYS_MOST; i++) {
        double *x = p->in[dp_row_keys[i]];
        for (int64_t j = 0; j < n && x; j++)
            x[j] = dp_store(s->dtype, roles.sign[i] * x[j]);
    }
    fill_numbers_of_rows(p, s);
    fill_value_of_rows(p, s, DP_INPUT_WRITE, ST_WRITE);
    for (int i = 2; i < DP_VALUES_MOST; i++)
        fill_value_of_rows(p, s, dp_row_values[i], ST_OWN + DP_KEYS_MOST + i);
}

static void fill_beta(dp_problem *p, const dp_inputs_spec *s) {
    const int64_t n = p->T * p->HV * p->R;
    if (p->model == DP_USER) {
        fill_own_rows(p, s);
    } else if (p->lr_a) {
        fill_factors(p, s);
    } else if (p->erase) {
        const int64_t ne = p->T * p->HV * p->K, nw = p->T * p->HV * p->V;
        fill_uniform(p->erase, ne, s, ST_ERASE, s->beta_lo, s->beta_hi);
        fill_uniform(p->write, nw, s, ST_WRITE, s->beta_lo, s->beta_hi);
        dp_store_all(s->dtype, p->erase, ne);
        dp_store_all(s->dtype, p->write, nw);
    }
    if (!p->beta) return;
    if (p->beta_form != DP_BETA_PLAIN) {
        fill_normal(p->beta, n, s, ST_BETA, s->beta_lo, s->beta_hi, s->dtype);
        return;
    }
    fill_uniform(p->beta, n, s, ST_BETA, s->beta_lo, s->beta_hi);
    dp_store_all(s->dtype, p->beta, n);
}

/* The scale of v, s0, do and dstate. */
static double value_scale(const dp_inputs_spec *s) {
    return s->laws.v_scale > 0 ? s->laws.v_scale : 1;
}

void dp_inputs_fill_gradients(dp_problem *p, const dp_inputs_spec *s) {
    if (s->keys == DP_KEYS_EXACT) {
        dp_inputs_fill_exact_gradients(p, s);
        return;
    }
    fill_normal(p->dout, p->T * p->HV * p->V, s, ST_DO, 0, value_scale(s), s->dtype);
    fill_normal(p->dstate, (int64_t)p->Nseq * p->HV * p->K * p->V, s, ST_DSTATE, 0, value_scale(s),
                param_dtype(s));
}

static void fill_moved(dp_problem *p, const dp_inputs_spec *s) {
    dp_inputs_move_state(p, s->seed);
    dp_store_all(s->dtype, p->q, p->T * p->H * p->K);
    dp_store_all(s->dtype, p->k, p->T * p->H * p->K);
    dp_store_all(s->dtype, p->g, p->T * p->HV * p->K);
}

void dp_inputs_fill(dp_problem *p, const dp_inputs_spec *s) {
    if (s->keys == DP_KEYS_EXACT) {
        dp_inputs_fill_exact(p, s);
        dp_inputs_fill_gradients(p, s);
        return;
    }
    fill_normal(p->q, p->T * p->H * p->K, s, ST_Q, 0, 1, s->dtype);
    fill_keys(p, s);
    fill_normal(p->v, p->T * p->HV * p->R * p->V, s, ST_V, 0, value_scale(s), s->dtype);
    if (p->gate == DP_GATE_LOG)
        fill_log_gate(p, s);
    else
        fill_raw_gate(p, s);
    fill_beta(p, s);
    fill_normal(p->s0, (int64_t)p->Nseq * p->HV * p->K * p->V, s, ST_S0, 0,
                s->s0_scale * value_scale(s), param_dtype(s));
    if (s->keys == DP_KEYS_MOVED) fill_moved(p, s);
    dp_inputs_apply_laws(p, &s->laws, s->dtype, s->seed);
    dp_inputs_fill_gradients(p, s);
}

void dp_inputs_fill_conv_dy(dp_conv *c, const dp_inputs_spec *s) {
    fill_normal(c->dy, c->T * c->D, s, ST_DY, 0, 1, s->dtype);
}

void dp_inputs_fill_conv(dp_conv *c, const dp_inputs_spec *s) {
    fill_normal(c->x, c->T * c->D, s, ST_X, 0, 1, s->dtype);
    fill_normal(c->w, (int64_t)c->D * c->W, s, ST_W, 0, 1 / sqrt(c->W), param_dtype(s));
    fill_normal(c->bias, c->D, s, ST_BIAS, 0, 0.5, param_dtype(s));
    dp_inputs_fill_conv_dy(c, s);
}

/* ---- factors of the M chain ------------------------------------------------------------------ */

const char *const dp_regime_names[DP_NREGIMES] = {"subspace", "reflect", "slow",  "mixed",
                                                  "corr",     "mild",    "strong"};

/* Tokens of one factor: e = exp(g), k unit, beta. Row 64 is the closing row of build_columns: no
 * decay, no key. */
typedef struct {
    int K;
    double *e, *k, *beta;
} tokens;

static void draw_decay(dp_regime regime, const double *rate, int K, dp_rng *r, double *e) {
    for (int i = 0; i < K; i++) {
        double g = 0;
        if (regime == DP_REGIME_SLOW) g = -1e-5 * dp_rng_exponential(r);
        if (regime == DP_REGIME_MIXED) g = -rate[i] * dp_rng_exponential(r);
        if (regime == DP_REGIME_MILD) g = -0.01 * dp_rng_exponential(r);
        if (regime == DP_REGIME_STRONG) g = -5 * dp_rng_uniform(r);
        e[i] = g == 0 ? 1 : dp_exp_exact_bits(g);
    }
}

static double draw_beta(dp_regime regime, dp_rng *r) {
    const double u = dp_rng_uniform(r), b = 0.2 + 0.7 * u;
    if (regime == DP_REGIME_REFLECT) return 2;
    if (regime == DP_REGIME_SLOW) return 2e-3 * b;
    if (regime == DP_REGIME_MIXED) return 1e-2 * b;
    if (regime == DP_REGIME_CORR) return 0.95 + 0.05 * u;
    return b;
}

static void draw_tokens(dp_regime regime, const key_law *law, const double *rate, dp_rng *r,
                        tokens *t) {
    const int K = t->K;
    for (int s = 0; s < DP_CHUNK; s++) {
        draw_key(law, r, t->k + s * K);
        normalise(t->k + s * K, K);
        draw_decay(regime, rate, K, r, t->e + s * K);
        t->beta[s] = draw_beta(regime, r);
    }
    for (int i = 0; i < K; i++) {
        t->e[DP_CHUNK * K + i] = 1;
        t->k[DP_CHUNK * K + i] = 0;
    }
}

#define COLS 16 /* of a transition matrix are built together */
#define DP_ISA_BODY "ref/inputs/chain_columns_body.inc"
#include "ref/arithmetic/isa.h"
#include "ref/arithmetic/isa_each.inc"

/* Upper bound of |M|_2 for the computed factor before its rounding to fp32.
 *
 * Take the computed doubles e, k, beta as exact: step S = (I - beta k k') diag(e), n = |k|^2. Its
 * spectral norm is at most
 *     nu = max(1, beta n - 1) max e
 *         (eigenvalues of I - beta k k' are 1 and 1 - beta n, beta n >= 0)
 * which is the closed form of math.md j.2 when n = 1, beta <= 2. One computed step on a matrix X,
 * with A = e o X:
 *     fl(A)            errs by u |A|,
 *                      carried through I - beta k k'     u max(1, beta n - 1) |A|_F
 *     y = fl(k' A)     errs by gamma_K |k|'|A|           beta n gamma_K |A|_F
 *     fl(fl(beta k) y) errs by (2u + u^2) beta |k||y|    (2u + u^2) beta n (1 + gamma_K) |A|_F
 *     the subtraction  errs by u times its result        u (1 + beta n)(1 + O(K u)) |A|_F
 * together delta <= (1 + beta n)(K + 8) u |A|_F (the O(K^2 u^2) terms are below u for K < 2^20),
 * |A|_F <= max e (1 + u) |X|_F. With P bounding the exact product of norms and E the construction
 * error, |X|_F <= sqrt(K) P + E, so
 *     P <- nu P,     E <- nu E + delta + 2^-1000
 *         (underflow: less than 4 K^2 roundings of 2^-1074 each, times norms below 2^40)
 * The computed sum n lies within K u of the exact one relatively; c = 1 + (K + 4) 2^-52 covers
 * that, and UP every evaluation here. */
#define UP (1 + 0x1p-49)
static double built_norm_up(const tokens *t) {
    const int K = t->K;
    const double c = 1 + (K + 4) * 0x1p-52;
    double P = 1, E = 0;
    for (int s = 0; s < DP_CHUNK; s++) {
        const double bn = t->beta[s] * dp_squares(t->k + s * K, K) * c;
        double emax = 0;
        for (int i = 0; i < K; i++)
            emax = t->e[s * K + i] > emax ? t->e[s * K + i] : emax;
        const double nu = (bn > 2 ? (bn - 1) * (1 + 0x1p-52) : 1) * emax,
                     A = emax * (sqrt(K) * P + E) * UP;
        E = (nu * E + (1 + bn) * (K + 8) * 0x1p-53 * A) * UP + 0x1p-1000;
        P = P * nu * (1 + 0x1p-51);
    }
    return (P + E) * UP;
}

/* Rounds A to fp32 columns of M; returns the sum of squares of the rounding errors (each difference
 * is exact in double). */
static double store_columns(const double *A, int K, int j0, float *M) {
    double s = 0;
    for (int i = 0; i < K; i++)
        for (int j = 0; j < COLS && j0 + j < K; j++) {
            const double x = A[i * COLS + j];
            const float f = M[(int64_t)i * K + j0 + j] = dp_fp32(x);
            s += (f - x) * (f - x);
        }
    return s;
}

/* The sum above has K^2 terms, each within 3u, so it is low by less than (K^2 + 4) u relatively;
 * squares that underflow lose 2^-1074. */
static double factor(dp_regime regime, const key_law *law, const double *rate, dp_rng *r,
                     float *M) {
    const int K = law->K;
    tokens t = {K, dp_doubles((DP_CHUNK + 1) * K), dp_doubles((DP_CHUNK + 1) * K),
                dp_doubles(DP_CHUNK)};
    DP_OWN double *A = dp_doubles((int64_t)K * COLS);
    double lost = 0;
    draw_tokens(regime, law, rate, r, &t);
    for (int j0 = 0; j0 < K; j0 += COLS) {
        DP_ISA_OF(build_columns)(&t, j0, A);
        lost += store_columns(A, K, j0, M);
    }
    const double mu =
        (built_norm_up(&t) + sqrt(lost * (1 + ((double)K * K + 64) * 0x1p-52) + 0x1p-1000)) * UP;
    DP_FREE(t.e, t.k, t.beta);
    return mu;
}

void dp_inputs_chain(dp_regime regime, int n, int K, uint64_t seed, float *M, double *mu) {
    assert(n >= 0 && K >= 1 && K <= 4096);
    const uint64_t base = (uint64_t)(regime + 1) << 40;
    const dp_keys kind = regime == DP_REGIME_SUBSPACE ? DP_KEYS_SUBSPACE
                         : regime == DP_REGIME_CORR   ? DP_KEYS_CORRELATED
                                                      : DP_KEYS_RANDOM;
    dp_rng shared;
    key_law law;
    DP_OWN double *rate = dp_doubles(K);
    dp_rng_seed(&shared, seed, base);
    key_law_init(&law, kind, K, &shared);
    for (int i = 0; i < K; i++)
        rate[i] =
            dp_exp_exact_bits(-6 * 0x1.26bb1bbb55516p1 * dp_rng_uniform(&shared)); /* 10^U(-6,0) */
#pragma omp parallel for schedule(dynamic, 4)
    for (int c = 0; c < n; c++) {
        dp_rng r;
        dp_rng_seed(&r, seed, base + 1 + (uint64_t)c);
        mu[c] = factor(regime, &law, rate, &r, M + (int64_t)c * K * K);
    }
    key_law_free(&law);
}
