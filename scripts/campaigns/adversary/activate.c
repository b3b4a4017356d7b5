/* Gate, beta and L2 norm of math.md c, in fp32, for one head of one sequence, and their gradients.
 */
#include "adversary.h"
#include <math.h>

static float sigmoid(float x) {
    const float e = expf(-fabsf(x));
    return x >= 0 ? 1 / (1 + e) : e / (1 + e);
}

static float softplus(float x) {
    const float right = fmaxf(x, 0) + log1pf(expf(-fabsf(x)));
    if (knob.naive_softplus == 0) return right;
    const float wrong = logf(1 + expf(x));
    return isfinite(wrong) ? share(knob.naive_softplus, right, wrong) : right;
}

/* Raw gate of a token and channel with its parameters. */
typedef struct {
    float x, a;
} gate_raw;

static gate_raw raw_gate(const problem *p, int64_t t, int hv, int c) {
    const float raw = (float)p->g[(t * p->HV + hv) * p->Kg + c];
    const float bias = p->dt_bias ? (float)p->dt_bias[hv * p->Kg + c] : 0;
    const float A = p->A_log ? (float)p->A_log[hv] : 0;
    const float a = p->A_log ? expf(share(knob.rounded_A_log, A, round_to(BF16, A))) : 1;
    return (gate_raw){raw + knob.bias_gain * bias, a};
}

static float log_gate(const problem *p, int64_t t, int hv, int c) {
    const gate_raw r = raw_gate(p, t, hv, c);
    if (p->gate_form == DP_SUBJECT_GATE_SOFTPLUS) return -r.a * softplus(r.x);
    if (p->gate_form == DP_SUBJECT_GATE_LOWER_BOUND)
        return (float)p->lower_bound * sigmoid(r.a * r.x);
    return (float)p->g[(t * p->HV + hv) * p->Kg + c];
}

static float faulty_gate(float g) {
    if (!isfinite(g)) return g;
    g = knob.gate_gain * g;
    g = share(knob.rounded_gate, g, round_to(BF16, g));
    if (knob.rounded_decay == 0) return g;
    const float decay = round_to(BF16, expf(g));
    return decay > 0 ? share(knob.rounded_decay, g, logf(decay)) : g;
}

/* A token's gate is that of its first key. */
static void activate_gates(const problem *p, int64_t t0, int hv, head_in *in) {
    for (int64_t t = 0; t < in->T / in->turns; t++)
        for (int x = 0; x < in->K; x++) {
            const int c = p->Kg == 1 ? 0 : x;
            float g = log_gate(p, t0 + t, hv, c);
            if (t > 0 && knob.neighbour_gate != 0)
                g = share(knob.neighbour_gate, g, log_gate(p, t0 + t - 1, hv, c));
            in->g[t * in->turns * in->K + x] = faulty_gate(g);
        }
}

static float activate_beta(const problem *p, float b) {
    if (p->beta_form == DP_SUBJECT_BETA_SIGMOID) b = sigmoid(b);
    if (p->beta_form == DP_SUBJECT_BETA_SIGMOID2) b = 2 * sigmoid(b);
    return knob.beta_gain * b;
}

/* 1 / sqrt(sum x^2 + eps). */
static float reciprocal_norm(const design *d, const float *x, int n) {
    float squares[MAX_K];
    for (int i = 0; i < n; i++)
        squares[i] = x[i] * x[i];
    return 1 / sqrtf(sum_of(d->sums, n, squares) + knob.l2_eps);
}

static void vector_of(const design *d, const problem *p, const double *from, float *x) {
    for (int i = 0; i < p->K; i++)
        x[i] = (float)from[i];
    if (d->inputs) round_all(d->inputs, x, p->K);
    if (!p->l2norm) return;
    const float r = reciprocal_norm(d, x, p->K);
    for (int i = 0; i < p->K; i++)
        x[i] *= r;
    if (d->stored) round_all(d->values, x, p->K);
}

/* q or k of the value head's group; a share of those of head hv % H. */
static void activate_vector(const design *d, const problem *p, const double *all, int64_t t, int hv,
                            int j, float *x) {
    const int h = hv / (p->HV / p->H), rows = all == p->q ? 1 : p->R;
    vector_of(d, p, all + ((t * p->H + h) * rows + j) * p->K, x);
    if (knob.swapped_heads == 0) return;
    float other[MAX_K];
    vector_of(d, p, all + ((t * p->H + hv % p->H) * rows + j) * p->K, other);
    for (int i = 0; i < p->K; i++)
        x[i] = share(knob.swapped_heads, x[i], other[i]);
}

static void activate_state(const problem *p, int seq, int hv, head_in *in) {
    const int64_t KV = (int64_t)p->K * p->V, at = ((int64_t)seq * p->HV + hv) * KV;
    for (int64_t i = 0; i < KV; i++) {
        in->s0[i] = p->initial_state ? knob.s0_gain * (float)p->initial_state[at + i] : 0;
        in->dstate[i] = p->dfinal_state ? knob.dstate_gain * (float)p->dfinal_state[at + i] : 0;
    }
    if (knob.transposed_state == 0 || p->K != p->V) return;
    for (int x = 0; x < p->K; x++)
        for (int y = 0; y < x; y++) {
            float *a = in->s0 + x * p->V + y, *b = in->s0 + y * p->V + x;
            const float old = *a;
            *a = share(knob.transposed_state, *a, *b);
            *b = share(knob.transposed_state, *b, old);
        }
}

static head_in head_new(const problem *p, int64_t tokens) {
    const int turns = p->in_turn ? p->R : 1;
    const int64_t K = p->K, V = p->V, R = p->in_turn ? 1 : p->lr_a ? 2 : p->R, T = tokens * turns;
    return (head_in){.T = T,
                     .K = p->K,
                     .V = p->V,
                     .R = (int)R,
                     .turns = turns,
                     .undecayed = p->lr_a != NULL,
                     .one_gate = p->Kg == 1 && K > 1,
                     .backward = p->backward,
                     .scale = knob.scale_gain * (float)p->scale,
                     .q = floats(T * K),
                     .k = floats(T * R * K),
                     .v = floats(T * R * V),
                     .g = floats(T * K),
                     .beta = floats(T * R),
                     .s0 = floats(K * V),
                     .dout = floats(T * V),
                     .dstate = floats(K * V)};
}

/* e, and what is written, of row `at` of the head, which is row `row` of the problem. */
static void activate_writes(const problem *p, int64_t row, int64_t at, head_in *in) {
    const int K = p->K, V = p->V;
    float *e = in->e + at * K, *k = in->k + at * K, *v = in->v + at * V;
    for (int i = 0; p->erase && i < K; i++)
        e[i] = (float)p->erase[row * K + i] * k[i];
    for (int i = 0; p->write && i < V; i++)
        v[i] *= (float)p->write[row * V + i];
    for (int i = 0; p->lr_a && i < K; i++) {
        k[i - K] = (float)p->lr_b[row * K + i];
        e[i - K] = -(float)p->lr_a[row * K + i];
    }
}

static void activate_keys(const design *d, const problem *p, int64_t t0, int64_t t, int hv,
                          head_in *in) {
    const int K = p->K, V = p->V, R = p->R, last = p->lr_a ? 1 : 0;
    const int64_t row = (t0 + t) * p->HV + hv;
    for (int j = 0; j < R; j++) {
        const int64_t at = (t * R + j) * (1 + last) + last;
        activate_vector(d, p, p->k, t0 + t, hv, j, in->k + at * K);
        for (int i = 0; i < V; i++)
            in->v[at * V + i] = (float)p->v[(row * R + j) * V + i];
        in->beta[at] = p->beta ? activate_beta(p, (float)p->beta[row * R + j]) : 1;
        in->beta[at - last] = in->beta[at];
        if (t + 1 == in->T / in->turns && (t + 1) % 64) in->beta[at] *= knob.tail_gain;
        if (!p->beta) activate_writes(p, row, at, in);
    }
}

void activate_head(const design *d, const problem *p, int seq, int hv, head_in *in) {
    const int64_t t0 = p->cu[seq], T = p->cu[seq + 1] - t0;
    const int K = p->K, V = p->V;
    *in = head_new(p, T);
    in->e = p->beta ? in->k : floats(in->T * in->R * K);
    in->first = t0 * in->turns;
    in->rank_tokens = p->T / (p->ranks > 1 ? p->ranks : 1) * in->turns;
    activate_gates(p, t0, hv, in);
    activate_state(p, seq, hv, in);
    for (int64_t t = 0; t < T; t++) {
        const int64_t last = (t + 1) * in->turns - 1;
        activate_vector(d, p, p->q, t0 + t, hv, 0, in->q + last * K);
        activate_keys(d, p, t0, t, hv, in);
        for (int i = 0; p->dout && i < V; i++)
            in->dout[last * V + i] = (float)p->dout[((t0 + t) * p->HV + hv) * V + i];
    }
}

void last_keys(const head_in *in, int64_t T, int width, float *x) {
    for (int64_t t = 0; in->turns > 1 && t < T; t++)
        memmove(x + t * width, x + ((t + 1) * in->turns - 1) * width, sizeof *x * (size_t)width);
}

static void through_gates(const problem *p, int64_t row, int64_t at, const head_in *in,
                          const head_out *out, key_gradients *to) {
    const int K = p->K, V = p->V;
    for (int i = 0; i < K; i++) {
        const float de = out->de[at * K + i];
        to->derase[row * K + i] = in->k[at * K + i] * de;
        to->dk[at * K + i] += (float)p->erase[row * K + i] * de;
    }
    for (int i = 0; i < V; i++) {
        const float dv = out->dv[at * V + i];
        to->dwrite[row * V + i] = (float)p->v[row * V + i] * dv;
        to->dv[at * V + i] = (float)p->write[row * V + i] * dv;
    }
}

void keys_back(const problem *p, int seq, int hv, const head_in *in, const head_out *out,
               key_gradients *to) {
    const int K = p->K, V = p->V, R = p->R, last = p->lr_a ? 1 : 0;
    const int64_t t0 = p->cu[seq], T = p->cu[seq + 1] - t0;
    for (int64_t r = 0; r < T * R; r++) {
        const int64_t at = r * (1 + last) + last, row = (t0 + r) * p->HV + hv;
        memcpy(to->dk + r * K, out->dk + at * K, sizeof(float) * (size_t)K);
        memcpy(to->dv + r * V, out->dv + at * V, sizeof(float) * (size_t)V);
        for (int i = 0; p->beta && i < K; i++)
            to->dk[r * K + i] = out->de[at * K + i] + to->dk[r * K + i];
        if (p->erase) through_gates(p, row, at, in, out, to);
        for (int i = 0; last && i < K; i++) {
            to->dlr_a[row * K + i] = -out->de[(at - 1) * K + i];
            to->dlr_b[row * K + i] = out->dk[(at - 1) * K + i];
        }
    }
}

/* d of the log gate by its argument, and by A_log. */
typedef struct {
    float x, A;
} gate_slope;

static gate_slope slope_of(const problem *p, int64_t t, int hv, int c) {
    const gate_raw r = raw_gate(p, t, hv, c);
    if (p->gate_form == DP_SUBJECT_GATE_SOFTPLUS)
        return (gate_slope){-r.a * sigmoid(r.x), -r.a * softplus(r.x)};
    if (p->gate_form == DP_SUBJECT_GATE_LOWER_BOUND) {
        const float s = sigmoid(r.a * r.x);
        const float by_x = (float)p->lower_bound * s * sigmoid(-r.a * r.x) * r.a;
        return (gate_slope){by_x, by_x * r.x};
    }
    return (gate_slope){1, 0};
}

static float beta_slope(const problem *p, float raw) {
    if (p->beta_form == DP_SUBJECT_BETA_PLAIN) return 1;
    const float z = p->beta_form == DP_SUBJECT_BETA_SIGMOID2 ? 2 : 1;
    return z * share(knob.plain_dbeta, sigmoid(raw) * sigmoid(-raw), 1);
}

void activate_back(const problem *p, int seq, int hv, const head_in *in, const head_out *out,
                   raw_gradients *raw) {
    const int64_t t0 = p->cu[seq];
    for (int64_t t = 0; t < in->T / in->turns; t++) {
        const int64_t row = (t0 + t) * p->HV + hv;
        float dA = 0;
        for (int c = 0; c < p->Kg; c++) {
            const gate_slope slope = slope_of(p, t0 + t, hv, c);
            const float dg = out->dg[t * in->turns * in->K + c];
            raw->dg[row * p->Kg + c] = dg * slope.x;
            dA += dg * slope.A;
        }
        raw->dA[row] = dA;
        for (int j = 0; p->beta && j < p->R; j++)
            raw->dbeta[row * p->R + j] = out->dbeta[t * p->R + j] * knob.beta_gain *
                                         beta_slope(p, (float)p->beta[row * p->R + j]);
    }
}

void norm_back(const design *d, const double *x, int n, float *dy) {
    float y[MAX_K] = {0}, terms[MAX_K];
    for (int i = 0; i < n; i++)
        y[i] = (float)x[i];
    const float r = reciprocal_norm(d, y, n);
    for (int i = 0; i < n; i++) {
        y[i] *= r;
        y[i] = share(knob.rounded_y, y[i], round_to(BF16, y[i]));
        terms[i] = y[i] * dy[i];
    }
    const float radial = sum_of(d->sums, n, terms);
    for (int i = 0; i < n; i++)
        dy[i] = r * (dy[i] - y[i] * radial);
}
