/* The step recurrence of math.md b and its adjoint d in fp64, with the activations of c: all
 * outputs of a problem. It keeps every state of a head, so it is for short problems. */
#include "adversary.h"
#include <math.h>
#include <stdlib.h>

typedef struct {
    const problem *p;
    reference *r;
    int seq, hv, h;
    int64_t t0, T;
    int R, turns;             /* as in head_in */
    double *q, *k, *g, *beta; /* of the sequence: [T][K] [T][R][K] [T][K] [T][R] */
    double *e, *v;            /* [T][R][K] [T][R][V] */
    double *states;           /* [T + 1][K][V] */
    double *dq, *dk;          /* of the norms, summed over value heads: [tokens][H][..] */
} head;

static double logistic(double x) { return 1 / (1 + exp(-x)); }

static double gate_at(const problem *p, int64_t t, int hv, int c, double *slope, double *dA) {
    const double raw = p->g[(t * p->HV + hv) * p->Kg + c];
    const double x = raw + (p->dt_bias ? p->dt_bias[hv * p->Kg + c] : 0);
    const double a = p->A_log ? exp(p->A_log[hv]) : 1;
    double g = raw;
    *slope = 1;
    *dA = 0;
    if (p->gate_form == DP_SUBJECT_GATE_SOFTPLUS) {
        g = -a * (fmax(x, 0) + log1p(exp(-fabs(x))));
        *slope = -a * logistic(x);
        *dA = g;
    } else if (p->gate_form == DP_SUBJECT_GATE_LOWER_BOUND) {
        g = p->lower_bound * logistic(a * x);
        *slope = g * logistic(-a * x) * a;
        *dA = *slope * x;
    }
    return g;
}

static double beta_at(const problem *p, double raw, double *slope) {
    const double z = p->beta_form == DP_SUBJECT_BETA_SIGMOID2 ? 2 : 1;
    *slope = 1;
    if (p->beta_form == DP_SUBJECT_BETA_PLAIN) return raw;
    *slope = z * logistic(raw) * logistic(-raw);
    return z * logistic(raw);
}

static double factor_of(const problem *p, const double *x) {
    double s = 1e-6;
    for (int i = 0; i < p->K; i++)
        s += x[i] * x[i];
    return p->l2norm ? 1 / sqrt(s) : 1;
}

/* Row `at` of the sequence: key j of its token t. */
static void fill_key(head *a, int64_t t, int j) {
    const problem *p = a->p;
    const int K = p->K, V = p->V, late = p->lr_a ? 1 : 0;
    const int64_t key = ((a->t0 + t) * p->H + a->h) * p->R + j,
                  row = ((a->t0 + t) * p->HV + a->hv) * p->R + j,
                  at = (t * p->R + j) * (1 + late) + late;
    double unused;
    a->beta[at] = p->beta ? beta_at(p, p->beta[row], &unused) : 1;
    for (int i = 0; i < K; i++) {
        const double k = p->k[key * K + i] * factor_of(p, p->k + key * K);
        a->k[at * K + i] = k;
        a->e[at * K + i] = p->beta ? k : p->erase ? p->erase[row * K + i] * k : 0;
    }
    for (int i = 0; i < V; i++)
        a->v[at * V + i] = p->v[row * V + i] * (p->write ? p->write[row * V + i] : 1);
    if (!late) return;
    a->beta[at - 1] = 1;
    memcpy(a->k + (at - 1) * K, p->lr_b + row * K, sizeof(double) * (size_t)K);
    for (int i = 0; i < K; i++)
        a->e[(at - 1) * K + i] = -p->lr_a[row * K + i];
}

static void fill(head *a) {
    const problem *p = a->p;
    const int K = p->K, turns = a->turns;
    double unused[2];
    for (int64_t t = 0; t < a->T / turns; t++) {
        const double *q = p->q + ((a->t0 + t) * p->H + a->h) * K;
        for (int i = 0; i < K; i++) {
            a->q[((t + 1) * turns - 1) * K + i] = q[i] * factor_of(p, q);
            a->g[t * turns * K + i] =
                gate_at(p, a->t0 + t, a->hv, p->Kg == 1 ? 0 : i, unused, unused + 1);
        }
        for (int j = 0; j < p->R; j++)
            fill_key(a, t, j);
    }
}

/* Sbar [K][V] and E [R][V] of token t. */
static void residual(const head *a, int64_t t, double *Sbar, double *E) {
    const int K = a->p->K, V = a->p->V, R = a->R;
    const double *S = a->states + t * K * V, *read = a->p->lr_a ? S : Sbar;
    for (int x = 0; x < K; x++)
        for (int i = 0; i < V; i++)
            Sbar[x * V + i] = exp(a->g[t * K + x]) * S[x * V + i];
    for (int j = 0; j < R; j++)
        for (int i = 0; i < V; i++) {
            double s = a->v[(t * R + j) * V + i];
            for (int x = 0; x < K; x++)
                s -= a->e[(t * R + j) * K + x] * read[x * V + i];
            E[j * V + i] = s;
        }
}

static void forward(head *a) {
    const int K = a->p->K, V = a->p->V, R = a->R;
    double *E = doubles_of(R * V);
    for (int64_t t = 0; t < a->T; t++) {
        double *S = a->states + (t + 1) * K * V;
        residual(a, t, S, E);
        for (int j = 0; j < R; j++)
            for (int x = 0; x < K; x++)
                for (int i = 0; i < V; i++)
                    S[x * V + i] += a->k[(t * R + j) * K + x] * a->beta[t * R + j] * E[j * V + i];
        if ((t + 1) % a->turns) continue;
        double *o = a->r->x[T_O] + ((a->t0 + t / a->turns) * a->p->HV + a->hv) * V;
        for (int i = 0; i < V; i++) {
            o[i] = 0;
            for (int x = 0; x < K; x++)
                o[i] += a->p->scale * a->q[t * K + x] * S[x * V + i];
        }
    }
    free(E);
}

/* From the gradients of e, of k as it writes and of v of row j of token t: those of the inputs. */
static void input_back(head *a, int64_t t, int j, const double *de, const double *dk,
                       const double *dv) {
    const problem *p = a->p;
    const int K = p->K, V = p->V;
    const int64_t at = t * a->R + j, r = p->lr_a ? t : at; /* keys of the sequence before it */
    const int64_t row = (a->t0 * p->HV + a->hv) * p->R + r / p->R * p->HV * p->R + r % p->R;
    double *sum = a->dk + ((a->t0 * p->H + a->h) * p->R + r / p->R * p->H * p->R + r % p->R) * K;
    for (int x = 0; x < K; x++) {
        if (p->lr_a && j == 0) {
            a->r->x[T_DLR_A][row * K + x] = -de[x];
            a->r->x[T_DLR_B][row * K + x] = dk[x];
            continue;
        }
        sum[x] += dk[x] + (p->beta ? de[x] : p->erase ? p->erase[row * K + x] * de[x] : 0);
        if (p->erase) a->r->x[T_DERASE][row * K + x] = a->k[at * K + x] * de[x];
    }
    for (int i = 0; i < V && !(p->lr_a && j == 0); i++) {
        a->r->x[T_DV][row * V + i] = dv[i] * (p->write ? p->write[row * V + i] : 1);
        if (p->write) a->r->x[T_DWRITE][row * V + i] = dv[i] * p->v[row * V + i];
    }
}

/* dE of key j of token t from G, and gradients of inputs. */
static void key_back(head *a, int64_t t, int j, const double *Sbar, const double *G,
                     const double *E, double *dE) {
    const problem *p = a->p;
    const int K = p->K, V = p->V;
    const int64_t at = t * a->R + j;
    const double beta = a->beta[at], *read = p->lr_a ? a->states + t * K * V : Sbar;
    double dbeta = 0, slope, de[MAX_K], dk[MAX_K];
    for (int i = 0; i < V; i++) {
        double dU = 0;
        for (int x = 0; x < K; x++)
            dU += a->k[at * K + x] * G[x * V + i];
        dbeta += dU * E[j * V + i];
        dE[j * V + i] = beta * dU;
    }
    for (int x = 0; x < K; x++) {
        de[x] = dk[x] = 0;
        for (int i = 0; i < V; i++) {
            dk[x] += beta * E[j * V + i] * G[x * V + i];
            de[x] -= dE[j * V + i] * read[x * V + i];
        }
    }
    input_back(a, t, j, de, dk, dE + j * V);
    if (!p->beta) return;
    const int64_t row = (a->t0 * p->HV + a->hv) * p->R + at / p->R * p->HV * p->R + at % p->R;
    beta_at(p, p->beta[row], &slope);
    a->r->x[T_DBETA][row] = dbeta * slope;
}

static void gate_back(head *a, int64_t t, int x, double dlog) {
    const problem *p = a->p;
    const int c = p->Kg == 1 ? 0 : x;
    double slope, dA;
    gate_at(p, a->t0 + t, a->hv, c, &slope, &dA);
    a->r->x[T_DG][((a->t0 + t) * p->HV + a->hv) * p->Kg + c] += dlog * slope;
    a->r->x[T_DBIAS][a->hv * p->Kg + c] += dlog * slope;
    a->r->x[T_DA][a->hv] += dlog * dA;
}

static void backward(head *a, double *G) {
    const problem *p = a->p;
    const int K = p->K, V = p->V, R = a->R, turns = a->turns;
    double *Sbar = doubles_of(K * V), *E = doubles_of(2 * R * V), *dE = E + R * V;
    for (int64_t t = a->T - 1; t >= 0; t--) {
        const double *S = a->states + (t + 1) * K * V;
        const int64_t token = a->t0 + t / turns;
        const int last = (t + 1) % turns == 0;
        const double *dout = p->dout && last ? p->dout + (token * p->HV + a->hv) * V : NULL;
        double *dq = a->dq + (token * p->H + a->h) * K;
        residual(a, t, Sbar, E);
        for (int x = 0; dout && x < K; x++)
            for (int i = 0; i < V; i++) {
                G[x * V + i] += p->scale * a->q[t * K + x] * dout[i];
                dq[x] += p->scale * S[x * V + i] * dout[i];
            }
        for (int j = 0; j < R; j++)
            key_back(a, t, j, Sbar, G, E, dE);
        for (int x = 0; x < K; x++) {
            double dlog = 0;
            for (int i = 0; i < V; i++) {
                const double decay = exp(a->g[t * K + x]);
                double *to = G + x * V + i, erased = 0;
                for (int j = 0; j < R; j++)
                    erased += a->e[(t * R + j) * K + x] * dE[j * V + i];
                *to -= p->lr_a ? 0 : erased;
                dlog += *to * Sbar[x * V + i];
                *to = *to * decay - (p->lr_a ? erased : 0);
            }
            if (t % turns == 0) gate_back(a, t / turns, x, dlog);
        }
    }
    free(Sbar);
    free(E);
}

static void one_head(const problem *p, int seq, int hv, double *dq, double *dk, reference *r) {
    const int turns = p->in_turn ? p->R : 1, R = p->in_turn ? 1 : p->lr_a ? 2 : p->R;
    const int64_t K = p->K, V = p->V, at = ((int64_t)seq * p->HV + hv) * K * V;
    head a = {.p = p,
              .r = r,
              .seq = seq,
              .hv = hv,
              .h = hv / (p->HV / p->H),
              .t0 = p->cu[seq],
              .T = (p->cu[seq + 1] - p->cu[seq]) * turns,
              .R = R,
              .turns = turns,
              .dq = dq,
              .dk = dk};
    a.q = doubles_of(a.T * K);
    a.k = doubles_of(a.T * R * K);
    a.e = doubles_of(a.T * R * K);
    a.v = doubles_of(a.T * R * V);
    a.g = doubles_of(a.T * K);
    a.beta = doubles_of(a.T * R);
    a.states = doubles_of((a.T + 1) * K * V);
    const size_t bytes = sizeof(double) * (size_t)(K * V);
    if (p->initial_state) memcpy(a.states, p->initial_state + at, bytes);
    fill(&a);
    forward(&a);
    memcpy(r->x[T_FINAL] + at, a.states + a.T * K * V, bytes);
    double *G = r->x[T_DS0] + at;
    if (p->dfinal_state) memcpy(G, p->dfinal_state + at, bytes);
    if (p->backward) backward(&a, G);
    free(a.q);
    free(a.k);
    free(a.e);
    free(a.v);
    free(a.g);
    free(a.beta);
    free(a.states);
}

static void norms_back(const problem *p, const double *raw, int64_t rows, const double *dy,
                       double *dx) {
    for (int64_t r = 0; r < rows; r++) {
        const double *x = raw + r * p->K;
        const double f = factor_of(p, x);
        double radial = 0;
        for (int i = 0; p->l2norm && i < p->K; i++)
            radial += f * x[i] * dy[r * p->K + i];
        for (int i = 0; i < p->K; i++)
            dx[r * p->K + i] = f * (dy[r * p->K + i] - f * x[i] * radial);
    }
}

void reference_run(const problem *p, reference *r) {
    const int64_t rows = p->tokens * p->H;
    double *dq = doubles_of(rows * p->K), *dk = doubles_of(rows * p->R * p->K);
    for (int seq = 0; seq < p->Nseq; seq++)
        for (int hv = 0; hv < p->HV; hv++)
            one_head(p, seq, hv, dq, dk, r);
    norms_back(p, p->q, rows, dq, r->x[T_DQ]);
    norms_back(p, p->k, rows * p->R, dk, r->x[T_DK]);
    free(dq);
    free(dk);
}
