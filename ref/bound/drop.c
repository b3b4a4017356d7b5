/* The loss of a kernel that drops attenuated states: derivation in drop.h. */
#include "drop.h"
#include "bound.h"
#include "carried.h"
#include "ref/arithmetic/elementary.h"
#include "ref/chunk/gate.h"
#include "ref/chunk/state.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

/* Inputs after their activations, slopes of the raw gate, and the rows that are filled. */
typedef struct {
    const dp_problem *p;
    double floor; /* log E */
    int backward;
    dp_activated in;
    double *slope, *slope_A;
    dp_drop *out;
} work;

/* One head of one sequence; arrays are indexed by token from the sequence's first:
 *   cum       natural logarithm of the share of a state left before the token
 *   grow      logarithm of the largest growth of a state by the first factor of the token's step
 *   S, dS     norm of the state before the token, and of its gradient after the token
 *   r, dr     norm of the residual, and of its gradient
 *   lackS, lackdS   loss of state and gradient */
typedef struct {
    const work *a;
    int hv;
    int64_t begin, n;
    double *cum, *grow, *S, *dS, *r, *dr, *lackS, *lackdS, *wall;
    double *read; /* norms of the states that a token's later keys read, in their order */
} head;

#define FORGOTTEN (-1e4) /* a log gate below it: so that differences of sums are numbers */

static double norm(const double *x, int64_t n) { return dp_norm_fro(n, x); }

static int64_t at_head(const head *h, int64_t i) { return (h->begin + i) * h->a->p->HV + h->hv; }
static const double *key(const head *h, int64_t i) {
    const dp_problem *p = h->a->p;
    return h->a->in.k + ((h->begin + i) * p->H + h->hv / dp_G(p)) * p->R * p->K;
}
/* The erasing key, and the written value. */
static const double *erasing(const head *h, int64_t i) {
    return dp_erasing_at(h->a->p, h->a->in.k, h->a->in.erasing, h->begin + i, h->hv);
}
static const double *values(const head *h, int64_t i) {
    return dp_values_at(h->a->p, h->a->in.values, h->begin + i, h->hv);
}
static const double *query(const head *h, int64_t i) {
    const dp_problem *p = h->a->p;
    return h->a->in.q + ((h->begin + i) * p->H + h->hv / dp_G(p)) * p->K;
}

/* log |I - k e'|, 0 or more. */
static double growth(const dp_problem *p, const dp_activated *in, int64_t t, int hv) {
    return dp_has_beta(p) ? 0 : dp_log(dp_step_norms_of(p, in, t, hv).grows);
}
/* Does a step with beta contract, up to fp64's rounding? Else its growth is counted */
static int contracts(const head *h, int64_t i) {
    const dp_problem *p = h->a->p;
    return !dp_has_beta(p) ||
           dp_step_norms_of(p, &h->a->in, h->begin + i, h->hv).grows <= 1 + 0x1p-39;
}

/* ---- the recurrence and its adjoint, of which norms are kept -------------------------------- */

static const double *gates(const head *h, int64_t i) {
    return h->a->in.g + at_head(h, i) * dp_Kg(h->a->p);
}

static double *state_of(const head *h, const double *states, int seq) {
    const dp_problem *p = h->a->p;
    const int64_t KV = (int64_t)p->K * p->V;
    return states ? dp_copy(states + ((int64_t)seq * p->HV + h->hv) * KV, KV) : dp_doubles(KV);
}

static void forward(const head *h, int seq) {
    const dp_problem *p = h->a->p;
    const int64_t KV = (int64_t)p->K * p->V;
    DP_OWN double *S = state_of(h, p->s0, seq), *r = dp_doubles((int64_t)p->R * p->V);
    for (int64_t i = 0; i < h->n; i++) {
        const int64_t at = at_head(h, i) * p->R;
        h->S[i] = norm(S, KV);
        dp_state_decay(p, gates(h, i), S);
        for (int first = 0, n = dp_keys_at_once(p); first < p->R; first += n) {
            h->read[i * p->R + first] = norm(S, KV);
            for (int j = first; j < first + n; j++) {
                double *e = r + (int64_t)j * p->V;
                dp_state_read(p, S, erasing(h, i) + (int64_t)j * p->K, e);
                for (int v = 0; v < p->V; v++)
                    e[v] = values(h, i)[(int64_t)j * p->V + v] - e[v];
                h->r[i * p->R + j] = norm(e, p->V);
            }
            for (int j = first; j < first + n; j++)
                dp_state_write(p, h->a->in.beta[at + j], key(h, i) + (int64_t)j * p->K,
                               r + (int64_t)j * p->V, S);
        }
    }
    h->S[h->n] = norm(S, KV);
}

static void adjoint(const head *h, int seq) {
    const dp_problem *p = h->a->p;
    const int64_t KV = (int64_t)p->K * p->V;
    DP_OWN double *dS = state_of(h, p->dstate, seq);
    DP_OWN double *dr = dp_doubles((int64_t)p->R * p->V);
    for (int64_t i = h->n - 1; i >= 0; i--) {
        const int64_t at = at_head(h, i) * p->R;
        dp_state_write(p, p->scale, query(h, i), p->dout + at_head(h, i) * p->V, dS);
        h->dS[i] = norm(dS, KV);
        for (int n = dp_keys_at_once(p), first = p->R - n; first >= 0; first -= n) {
            for (int j = first; j < first + n; j++) {
                double *e = dr + (int64_t)j * p->V;
                dp_state_read(p, dS, key(h, i) + (int64_t)j * p->K, e);
                for (int v = 0; v < p->V; v++)
                    e[v] *= h->a->in.beta[at + j];
                h->dr[i * p->R + j] = norm(e, p->V);
            }
            for (int j = first; j < first + n; j++)
                dp_state_write(p, -1, erasing(h, i) + (int64_t)j * p->K, dr + (int64_t)j * p->V,
                               dS);
        }
        dp_state_decay(p, gates(h, i), dS);
    }
}

/* ---- what may be dropped -------------------------------------------------------------------- */

/* cum[i]: sum over tokens before i; wall[i]: the first token from which i can be reached. */
static void attenuate(const head *h) {
    const dp_problem *p = h->a->p;
    for (int64_t i = 0; i < h->n; i++) {
        const double g = dp_largest_gate(p, gates(h, i));
        h->grow[i] = growth(p, &h->a->in, h->begin + i, h->hv);
        h->cum[i + 1] = h->cum[i] + (g < 0 ? fmax(g, FORGOTTEN) : 0) + h->grow[i];
        h->wall[i + 1] = contracts(h, i) && g <= 0 ? h->wall[i] : (double)(i + 1);
    }
}

/* log x, -INFINITY for 0 */
static double log_size(double x) { return x > 0 ? dp_log(x) : -INFINITY; }

/* Cuts that nothing may be dropped at yet, the one that is nearest to it first. */
typedef struct {
    double *near; /* heap: larger is nearer */
    int64_t *cut, n;
} waiting;

static waiting waiting_new(int64_t n) {
    return (waiting){dp_doubles(n), dp_calloc((size_t)n, sizeof(int64_t)), 0};
}
static void waiting_free(waiting *w) {
    free(w->near);
    free(w->cut);
}
static void put(waiting *w, int64_t at, double near, int64_t cut) {
    w->near[at] = near;
    w->cut[at] = cut;
}
static void wait_for(waiting *w, double near, int64_t cut) {
    int64_t at = w->n++;
    for (; at && w->near[(at - 1) / 2] < near; at = (at - 1) / 2)
        put(w, at, w->near[(at - 1) / 2], w->cut[(at - 1) / 2]);
    put(w, at, near, cut);
}
static int64_t nearest(waiting *w) {
    const int64_t cut = w->cut[0], n = --w->n;
    int64_t at = 0;
    for (int64_t to = 1; to < n; to = 2 * at + 1) {
        to += to + 1 < n && w->near[to + 1] > w->near[to];
        if (w->near[to] <= w->near[n]) break;
        put(w, at, w->near[to], w->cut[to]);
        at = to;
    }
    put(w, at, w->near[n], w->cut[n]);
    return cut;
}

/* The largest exp(cum[t] - cum[c]) S[c] over c from `wall` on from which E or less is left at t, or
 * was before. A dropped state stays so where steps grow. */
static void lacking_states(const head *h) {
    double most = -INFINITY; /* of log size[c] - cum[c] */
    DP_FREED(waiting_free) waiting w = waiting_new(h->n + 1);
    for (int64_t t = 0; t <= h->n; t++) {
        if ((int64_t)h->wall[t] == t) {
            w.n = 0;
            most = -INFINITY;
        }
        while (w.n && h->cum[t] - w.near[0] <= h->a->floor) {
            const int64_t c = nearest(&w);
            most = fmax(most, log_size(h->S[c]) - h->cum[c]);
        }
        h->lackS[t] = most > -INFINITY ? dp_exp(h->cum[t] + most) : 0;
        wait_for(&w, h->cum[t], t);
    }
}

/* The same backwards: dS after token c, which is the state before token c + 1, is what later tokens
 * made of it. */
static void lacking_gradients(const head *h) {
    double most = -INFINITY; /* of log dS[c - 1] + cum[c] */
    DP_FREED(waiting_free) waiting w = waiting_new(h->n + 1);
    for (int64_t t = h->n; t >= 0; t--) {
        if (t == h->n || (int64_t)h->wall[t + 1] == t + 1) {
            w.n = 0;
            most = -INFINITY;
        }
        while (w.n && -w.near[0] - h->cum[t] <= h->a->floor) {
            const int64_t c = nearest(&w);
            most = fmax(most, log_size(h->dS[c - 1]) + h->cum[c]);
        }
        h->lackdS[t] = most > -INFINITY ? dp_exp(most - h->cum[t]) : 0;
        if (t) wait_for(&w, -h->cum[t], t);
    }
}

/* ---- rows of results ------------------------------------------------------------------------ */

static void add(const head *h, dp_result_id field, int64_t row, double x) {
    if (h->a->out->row[field]) h->a->out->row[field][row] += x;
}

static void token_forward(const head *h, int64_t i) {
    const dp_problem *p = h->a->p;
    add(h, DP_RESULT_O, at_head(h, i), fabs(p->scale) * norm(query(h, i), p->K) * h->lackS[i + 1]);
}

/* dg of a token, to dA_log and ddt_bias too. */
static void token_gate(const head *h, int64_t i, double lost) {
    const dp_problem *p = h->a->p;
    const int Kg = dp_Kg(p);
    const double *slope = h->a->slope + at_head(h, i) * Kg;
    const double *slope_A = h->a->slope_A + at_head(h, i) * Kg;
    double most = 0;
    for (int x = 0; x < Kg; x++)
        most = fmax(most, fabs(slope[x]));
    add(h, DP_RESULT_DG, at_head(h, i), lost * most);
    add(h, DP_RESULT_DDT_BIAS, h->hv, lost * most);
    add(h, DP_RESULT_DA_LOG, h->hv, lost * norm(slope_A, Kg));
}

/* GDN-2: the loss of the written values and of both gates, where dS k and the gradient of the
 * erasing key may lose that. */
static void token_gates(const head *h, int64_t i, double lost_write, double lost_erase) {
    const dp_problem *p = h->a->p;
    const int64_t at = at_head(h, i);
    add(h, DP_RESULT_DV, at, dp_norm_max(p->V, p->write + at * p->V) * lost_write);
    add(h, DP_RESULT_DWRITE, at, dp_norm_max(p->V, p->v + at * p->V) * lost_write);
    add(h, DP_RESULT_DERASE, at, dp_norm_max(p->K, key(h, i)) * lost_erase);
}

static void token_backward(const head *h, int64_t i) {
    const dp_problem *p = h->a->p;
    const int64_t at = at_head(h, i), t = h->begin + i, qk = t * p->H + h->hv / dp_G(p);
    const double open = dp_exp(h->cum[i + 1] - h->cum[i] - h->grow[i]);
    const double B = h->lackdS[i + 1], D = h->lackS[i + 1], S = open * h->S[i], dS = h->dS[i];
    const double norm_q = p->l2norm ? h->a->in.rstd_q[qk] : 1;
    add(h, DP_RESULT_DQ, qk,
        norm_q * fabs(p->scale) * norm(p->dout + at * p->V, p->V) * h->lackS[i + 1]);
    for (int j = 0; j < p->R; j++) {
        const double k = norm(key(h, i) + (int64_t)j * p->K, p->K);
        const double beta = h->a->in.beta[at * p->R + j], r = h->r[i * p->R + j];
        const double before = dp_in_turn(p) && j ? h->read[i * p->R + j] : S;
        const double e = norm(erasing(h, i) + (int64_t)j * p->K, p->K);
        const double norm_k = p->l2norm ? h->a->in.rstd_k[qk * p->R + j] : 1;
        const double through = B * (r + e * D) + dS * e * D;                        /* of dS r */
        double read = D * h->dr[i * p->R + j], again = (before + D) * beta * k * B; /* of S' dr */
        if (p->erase) {
            const double gate = dp_norm_max(p->K, p->erase + at * p->K);
            token_gates(h, i, k * B, read + again);
            read *= gate;
            again *= gate;
        } else {
            add(h, DP_RESULT_DV, at * p->R + j, beta * k * B);
            if (p->beta)
                add(h, DP_RESULT_DBETA, at,
                    k * through * fabs(dp_beta_slope(p, p->beta[at * p->R + j])));
        }
        if (!dp_erases(p)) read = again = 0;
        add(h, DP_RESULT_DK, qk * p->R + j, norm_k * (beta * through + read + again));
    }
    token_gate(h, i, dp_exp(h->grow[i]) * (dS * D + B * S + B * D));
}

static void head_of_sequence(const work *a, int seq, int hv) {
    const dp_problem *p = a->p;
    head h = {.a = a, .hv = hv, .begin = p->cu[seq], .n = p->cu[seq + 1] - p->cu[seq]};
    double **one[] = {&h.cum, &h.grow, &h.S, &h.dS, &h.lackS, &h.lackdS, &h.wall};
    const int arrays = sizeof one / sizeof *one;
    for (int i = 0; i < arrays; i++)
        *one[i] = dp_doubles(h.n + 1);
    h.r = dp_doubles((h.n + 1) * p->R);
    h.dr = dp_doubles((h.n + 1) * p->R);
    h.read = dp_doubles((h.n + 1) * p->R);
    forward(&h, seq);
    attenuate(&h);
    lacking_states(&h);
    for (int64_t i = 0; i < h.n; i++)
        token_forward(&h, i);
    add(&h, DP_RESULT_FINAL_STATE, (int64_t)seq * p->HV + hv, h.lackS[h.n]);
    if (a->backward) {
        adjoint(&h, seq);
        lacking_gradients(&h);
        for (int64_t i = 0; i < h.n; i++)
            token_backward(&h, i);
        add(&h, DP_RESULT_DS0, (int64_t)seq * p->HV + hv, h.lackdS[0]);
    }
    for (int i = 0; i < arrays; i++)
        free(*one[i]);
    DP_FREE(h.r, h.dr, h.read);
}

/* ---- all of it ------------------------------------------------------------------------------ */

static work begin(const dp_problem *p) {
    const int64_t g = p->T * p->HV * dp_Kg(p);
    work a = {.p = p, .in = dp_activated_new(p)};
    a.slope = dp_doubles(g);
    a.slope_A = dp_doubles(g);
    if (p->gate != DP_GATE_LOG) dp_gate_slopes(p, a.slope, a.slope_A);
    for (int64_t i = 0; p->gate == DP_GATE_LOG && i < g; i++)
        a.slope[i] = 1;
    return a;
}

void dp_drop_allowance(const dp_problem *p, int bits, int backward, dp_drop *out) {
    *out = (dp_drop){{NULL}};
    for (int i = 0; i < DP_NRESULTS; i++) {
        int64_t rows, width;
        dp_result_shape(p, i, &rows, &width);
        if (rows && (backward || !dp_result_fields[i].backward)) out->row[i] = dp_doubles(rows);
    }
    work a = begin(p);
    a.floor = -bits * 0x1.62e42fefa39efp-1; /* ln 2 */
    a.backward = backward && p->dout;
    a.out = out;
    for (int seq = 0; seq < p->Nseq && !dp_by_rows(p); seq++)
        for (int hv = 0; hv < p->HV; hv++)
            head_of_sequence(&a, seq, hv);
    dp_activated_free(&a.in);
    free(a.slope);
    free(a.slope_A);
}

void dp_drop_free(dp_drop *d) {
    for (int i = 0; i < DP_NRESULTS; i++)
        free(d->row[i]);
    *d = (dp_drop){{NULL}};
}

dp_attenuation dp_attenuation_of(const dp_problem *p, const dp_activated *in, int hv, int64_t c,
                                 int64_t t) {
    const int Kg = dp_Kg(p);
    DP_OWN double *sum = dp_doubles(Kg);
    dp_attenuation a = {0, 0};
    for (int64_t s = c; s < t; s++) {
        const double *row = in->g + (s * p->HV + hv) * Kg;
        a.bound += dp_largest_gate(p, row) + growth(p, in, s, hv);
        for (int x = 0; x < Kg; x++)
            sum[x] += row[x];
    }
    a.channel = dp_largest_gate(p, sum);
    a.bound = a.bound * 0x1.71547652b82fep0 + 0; /* log2 e; no -0 */
    a.channel = a.channel * 0x1.71547652b82fep0 + 0;
    return a;
}
