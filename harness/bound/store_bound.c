/* Errors of stored states, forward, between ranks and backward (store_bound.h). */
#include "store_bound.h"
#include "error_bound_impl.h"
#include "ref/bound/carried.h"
#include "ref/chunk/state.h"
#include "ref/vocabulary/stored.h"

#include <string.h>

/* ---- gradients of a row's factors ------------------------------------------------------------ */

/* A row of a token and value head. */
typedef struct {
    const dp_problem *p;
    const dp_activated *in;
    int64_t at;
} row_place;

/* |the product of an entry's factors but one `of`| at channel x. A read before the decay reads the
 * decayed state by exp(-g) more. */
static double beside(const row_place *a, dp_entry e, int reads, int of, int x) {
    double y = 1;
    for (int m = 0, own = 1; m < e.n; m++) {
        if (own && e.of[m] == of)
            own = 0;
        else
            y *= dp_error_bound_factor(a->p, a->in->g, a->at, e.of[m], x);
    }
    if (reads && dp_recurrence_of(a->p)->before)
        y *= dp_error_bound_factor(a->p, a->in->g, a->at, DP_FACTOR_GROWTH, x);
    return fabs(y);
}

/* The error of an entry's factor `of`: of K channels, or of a number, which adds channels up. */
static double through(const row_place *a, dp_entry e, int reads, int of, double error) {
    const int has = e.sign ? dp_entry_has(e, of) : 0,
              number = of == DP_INPUT_BETA || of == DP_INPUT_NUMBER;
    double most = 0, sum = 0;
    for (int x = 0; x < a->p->K && has; x++) {
        const double y = beside(a, e, reads, of, x);
        most = fmax(most, y);
        sum += y * y;
    }
    return has ? has * (number ? sqrt(sum) : most) * error : 0;
}

static double of_strength(const row_place *a, dp_entry e, int of, double error) {
    const int has = dp_entry_has(e, of);
    return has ? has * beside(a, e, 0, of, 0) * error : 0;
}

/* Adds those of row j to the bounds of gradients of its factors; at: of tokens and heads. Returns
 * the error that log gates get through exp(+-g). */
static double store_row(const dp_problem *p, const dp_activated *in, int64_t at, int j,
                        dp_row_errors of, double *const *row) {
    const row_place a = {&in->units.p, in, at};
    const dp_token_row *r = dp_row_of(p, j);
    const double *k = in->k + (at * dp_rows(p) + j) * p->K,
                 *e = in->erasing + (at * dp_rows(p) + j) * p->K;
    for (int f = 0; f < DP_NRESULTS; f++) {
        const int x = (int)dp_result_fields[f].of;
        if (!row[f] || dp_result_fields[f].role != DP_ROLE_GRADIENT || dp_is_value(x) ||
            x == DP_INPUT_Q || x == DP_INPUT_G || dp_result_fields[f].kind != DP_OF_TOKENS)
            continue;
        const double rstd = in->units.rstd[x] ? in->units.rstd[x][at] : 1;
        row[f][at] +=
            rstd * (through(&a, r->write, 0, x, of.write) + through(&a, r->read, 1, x, of.read));
        if (x == DP_INPUT_BETA || x == DP_INPUT_NUMBER)
            row[f][at] += of_strength(&a, r->strength, x, of.strength);
    }
    const double reads = r->read.sign ? dp_entry_gates(r->read) - dp_recurrence_of(p)->before : 0;
    return fabs(dp_entry_gates(r->write)) * dp_norm_fro(p->K, k) * of.write +
           fabs(reads) * dp_norm_fro(p->K, e) * of.read;
}

/* ---- states ---------------------------------------------------------------------------------- */

/* A state, or H or M of a rank. All heads stand side by side, since they may share a scale. off
 * [HV]: bound of the error. */
typedef struct {
    const dp_problem *p; /* V columns of it */
    dp_activated in;
    double *S, *off;
} carried;

typedef struct {
    const dp_problem *p;
    int N, n;
    const dp_stores *at;
    dp_carried_head s;
    carried state, H, M;
    dp_problem square; /* M as a state: V = K, no values */
    double *o, *write, *more;
    /* [HV] of one rank: bound of |M|; |S| and off at its first token */
    double *grown, *size, *entered;
    double *behind, *read; /* [T][HV] off behind each token, and as o and dq read the state */
    int pairs;
    dp_error_bound *b;
} work;

static carried carried_new(const dp_problem *p, dp_activated in, const double *S) {
    const int64_t n = (int64_t)p->HV * p->K * p->V;
    return (carried){p, in, S ? dp_copy(S, n) : dp_doubles(n), dp_doubles(p->HV)};
}

static void carried_free(carried *x) {
    free(x->S);
    free(x->off);
    *x = (carried){0};
}

static void store(const work *w, dp_format f, carried *x) {
    const dp_problem *p = x->p;
    for (int h = 0; h < p->HV; h++)
        w->more[h] = dp_stored_error(f, p->HV, p->K, p->V, x->S, x->off, h);
    for (int h = 0; h < p->HV; h++)
        x->off[h] += w->more[h];
}

/* Before token t. */
static void store_all(work *w, int64_t t) {
    for (int i = 0; i < w->n; i++) {
        const dp_stores *at = &w->at[i];
        if (!at->before[t]) continue;
        store(w, at->format, &w->state);
        if (w->H.S && at->of_pairs) store(w, at->format, &w->H);
        if (w->M.S && at->of_M) store(w, at->format, &w->M);
    }
}

static void step(const work *w, carried *x, int64_t t, int hv) {
    dp_carried_head s = {x->p, x->in, hv, 0, x->p->T};
    dp_carried_advance(&s, t, x->S + (int64_t)hv * x->p->K * x->p->V, w->o, w->write);
    x->off[hv] *= dp_carried_grows(&s, t);
    if (!(x->off[hv] < INFINITY)) x->off[hv] = INFINITY;
}

/* ---- ranks ----------------------------------------------------------------------------------- */

static void rank_begins(work *w) {
    const dp_problem *p = w->p;
    const int64_t KV = (int64_t)p->K * p->V;
    for (int h = 0; h < p->HV; h++) {
        w->grown[h] = 1;
        w->size[h] = dp_norm_fro(KV, w->state.S + h * KV);
        w->entered[h] = w->state.off[h];
    }
    if (!w->pairs) return;
    carried_free(&w->H);
    carried_free(&w->M);
    w->H = carried_new(p, w->state.in, NULL);
    dp_activated none = w->state.in;
    none.values = w->square.v;
    w->M = carried_new(&w->square, none, NULL);
    for (int64_t i = 0; i < (int64_t)p->HV * p->K; i++)
        w->M.S[i * p->K + i % p->K] = 1;
}

/* The state goes from rank r to the next. */
static void rank_ends(work *w, int r) {
    const int HV = w->p->HV;
    for (int h = 0; h < HV; h++) {
        double *off = &w->state.off[h];
        if (w->pairs) {
            const double M = w->M.off[h], H = w->H.off[h];
            *off = fmax(*off, (w->grown[h] + M) * w->entered[h] + M * w->size[h] + H);
            w->b->rank[DP_RANK_H][r * HV + h] += H;
            w->b->rank[DP_RANK_M][r * HV + h] += M;
        }
        w->b->rank[DP_RANK_S_IN][(r + 1) * HV + h] += *off;
    }
}

static int rank_of(const work *w, int64_t t) {
    return w->N == 1 ? 0 : dp_own_part_of(w->p->own.kind, w->p->T, w->N, t);
}

/* ---- forward --------------------------------------------------------------------------------- */

/* off [HV] of the state that o and dq of a token read. */
static void read_errors(const work *w, double *read) {
    const dp_problem *p = w->p;
    memcpy(read, w->state.off, sizeof *read * (size_t)p->HV);
    for (int i = 0; i < w->n; i++)
        for (int h = 0; h < p->HV && w->at[i].read; h++)
            read[h] +=
                dp_stored_error(w->at[i].format, p->HV, p->K, p->V, w->state.S, w->state.off, h);
}

static void token(work *w, int64_t t) {
    const dp_problem *p = w->p;
    for (int hv = 0; hv < p->HV; hv++) {
        step(w, &w->state, t, hv);
        if (w->H.S) step(w, &w->H, t, hv);
        if (w->M.S) step(w, &w->M, t, hv);
        const dp_carried_head s = {p, w->s.in, hv, 0, p->T};
        w->grown[hv] *= dp_carried_grows(&s, t);
        w->behind[t * p->HV + hv] = w->state.off[hv];
    }
    read_errors(w, w->read + t * p->HV);
    for (int hv = 0; hv < p->HV; hv++) {
        const double *q = w->s.in.q + (t * p->H + hv / dp_G(p)) * p->K;
        const double off = w->read[t * p->HV + hv];
        if (off > 0 && w->b->row[DP_RESULT_O])
            w->b->row[DP_RESULT_O][t * p->HV + hv] += fabs(p->scale) * dp_norm_fro(p->K, q) * off;
    }
}

static void sequence(work *w, int i) {
    const dp_problem *p = w->p;
    const int64_t first = p->cu[i], end = p->cu[i + 1];
    w->state = carried_new(p, w->s.in, p->s0 ? p->s0 + i * (int64_t)p->HV * p->K * p->V : NULL);
    for (int64_t t = first; t < end; t++) {
        const int r = rank_of(w, t), begins = t > first && r != rank_of(w, t - 1);
        if (t > first || p->s0) store_all(w, t);
        if (begins) rank_ends(w, rank_of(w, t - 1));
        if (begins || t == first) rank_begins(w);
        token(w, t);
    }
    for (int k = 0; k < w->n; k++)
        if (w->at[k].behind[i]) store(w, w->at[k].format, &w->state);
    for (int h = 0; h < p->HV; h++)
        w->b->row[DP_RESULT_FINAL_STATE][i * p->HV + h] += w->state.off[h];
    carried_free(&w->state);
    carried_free(&w->H);
    carried_free(&w->M);
}

/* ---- backward -------------------------------------------------------------------------------- */

/* One head at token t; G [K][V]: the gradient of its state. */
typedef struct {
    const work *w;
    int hv;
    int64_t t;
    double *G, *dU;
    const double *dx, *dA; /* slopes of gates [T][HV][Kg] */
    double gate;           /* of the log gates, through exp(+-g) in rows of their own */
} adjoint;

static double *row_of(const adjoint *a, int field) { return a->w->b->row[field]; }
static void add(const adjoint *a, int field, int64_t row, double error) {
    if (row_of(a, field)) row_of(a, field)[row] += error;
}
static void of_query(const adjoint *a, double off) {
    const dp_problem *p = a->w->p;
    const double *q = a->w->s.in.q + (a->t * p->H + a->hv / dp_G(p)) * p->K,
                 *dout = p->dout + (a->t * p->HV + a->hv) * p->V;
    const int64_t row = a->t * p->H + a->hv / dp_G(p);
    add(a, DP_RESULT_DQ, row,
        a->w->s.in.rstd_q[row] * fabs(p->scale) * dp_norm_fro(p->V, dout) * off);
    dp_state_write(p, p->scale, q, dout, a->G);
}

/* Adds the errors of key j and its dU [V]; returns the square of dbeta's error. */
static double of_key(adjoint *a, int j, const double *dU, double off) {
    const dp_problem *p = a->w->p;
    const dp_activated *in = &a->w->s.in;
    const int64_t at = a->t * p->HV + a->hv, key = a->t * p->H + a->hv / dp_G(p);
    const double *e = dp_erasing_at(p, in->k, in->erasing, a->t, a->hv) + (int64_t)j * p->K;
    const double beta = in->beta[at * dp_rows(p) + j], ne = dp_norm_fro(p->K, e) * off;
    const double read = fabs(beta) * dp_norm_fro(p->V, dU) * (dp_erases(p) ? off : 0),
                 write = dp_norm_fro((int64_t)p->K * p->V, a->G) * fabs(beta) * ne;
    const double *erase = dp_by_gates(p) ? p->erase + at * p->K : NULL;
    if (dp_by_rows(p)) {
        const dp_row_errors row = {write, read, dp_norm_fro(p->V, dU) * ne};
        a->gate += store_row(p, in, at, j, row, a->w->b->row);
        return 0;
    }
    add(a, DP_RESULT_DK, key * dp_rows(p) + j,
        in->rstd_k[key * dp_rows(p) + j] * (write + read * (erase ? dp_norm_max(p->K, erase) : 1)));
    if (erase) add(a, DP_RESULT_DERASE, at, dp_norm_max(p->K, in->k + key * p->K) * read);
    if (!dp_has_beta(p)) return 0;
    double slope = 1;
    if (p->beta_form != DP_BETA_PLAIN) {
        const double s = dp_error_bound_sigmoid(p->beta[at * p->R + j]);
        slope = (p->beta_form == DP_BETA_SIGMOID2 ? 2 : 1) * s * (1 - s);
    }
    const double d = slope * dp_norm_fro(p->V, dU) * ne;
    return d * d;
}

static void of_keys(adjoint *a, double off) {
    const dp_problem *p = a->w->p;
    const dp_activated *in = &a->w->s.in;
    const int64_t at = a->t * p->HV + a->hv;
    const double *k = in->k + (a->t * p->H + a->hv / dp_G(p)) * dp_rows(p) * p->K,
                 *e = dp_erasing_at(p, in->k, in->erasing, a->t, a->hv);
    double dbeta = 0;
    a->gate = 0;
    for (int n = dp_keys_at_once(p), first = dp_rows(p) - n; first >= 0; first -= n) {
        for (int j = first; j < first + n; j++) {
            dp_state_read(p, a->G, k + (int64_t)j * p->K, a->dU + (int64_t)j * p->V);
            dbeta += of_key(a, j, a->dU + (int64_t)j * p->V, off);
        }
        for (int j = first; j < first + n; j++)
            dp_state_write(p, -in->beta[at * dp_rows(p) + j], e + (int64_t)j * p->K,
                           a->dU + (int64_t)j * p->V, a->G);
    }
    if (dp_has_beta(p)) add(a, DP_RESULT_DBETA, at, sqrt(dbeta));
}

static void of_gate(const adjoint *a, double off) {
    const dp_problem *p = a->w->p;
    const int Kg = dp_Kg(p);
    const int64_t at = (a->t * p->HV + a->hv) * Kg, n = (int64_t)p->K * p->V / Kg;
    const double dx = dp_norm_max(Kg, a->dx + at) * a->gate,
                 dA = dp_norm_max(Kg, a->dA + at) * a->gate;
    double most = 0, sum = 0;
    for (int x = 0; x < Kg; x++) {
        const double G = dp_norm_fro(n, a->G + x * n);
        most = fmax(most, fabs(a->dx[at + x]) * G);
        sum += pow(a->dA[at + x] * G, 2);
    }
    add(a, DP_RESULT_DG, a->t * p->HV + a->hv, most * off + dx);
    add(a, DP_RESULT_DA_LOG, a->hv, sqrt(sum) * off + dA);
    add(a, DP_RESULT_DDT_BIAS, a->hv, most * off + dx);
    dp_state_decay(p, a->w->s.in.g + at, a->G);
}

static void head_back(const work *w, int i, int hv, const double *dx, const double *dA) {
    const dp_problem *p = w->p;
    const int64_t KV = (int64_t)p->K * p->V, state = ((int64_t)i * p->HV + hv) * KV;
    adjoint a = {.w = w, .hv = hv, .dx = dx, .dA = dA};
    a.G = p->dstate ? dp_copy(p->dstate + state, KV) : dp_doubles(KV);
    a.dU = dp_doubles((int64_t)dp_rows(p) * p->V);
    for (a.t = p->cu[i + 1] - 1; a.t >= p->cu[i]; a.t--) {
        const double off = w->behind[a.t * p->HV + hv];
        of_query(&a, w->read[a.t * p->HV + hv]);
        of_keys(&a, off);
        of_gate(&a, off);
    }
    free(a.G);
    free(a.dU);
}

static void backward_pass(const work *w) {
    const dp_problem *p = w->p;
    const int64_t n = p->T * p->HV * dp_Kg(p);
    double *dx = dp_doubles(n), *dA = dp_doubles(n);
    dp_gate_slopes(p, dx, dA);
    for (int i = 0; i < p->Nseq; i++)
        for (int hv = 0; hv < p->HV; hv++)
            head_back(w, i, hv, dx, dA);
    free(dx);
    free(dA);
}

/* ---- all of it ------------------------------------------------------------------------------- */

int dp_store_has_gradients(const dp_problem *p) { return !dp_by_rows(p) || !dp_has_halo(p); }

void dp_store_bounds(const dp_problem *p, int N, dp_sending sending, int n, const dp_stores *at,
                     int backward, dp_error_bound *b) {
    const int64_t widest = (int64_t)dp_rows(p) * (p->K > p->V ? p->K : p->V);
    work w = {.p = p, .N = N, .n = n, .at = at, .square = *p, .b = b};
    if (sending.exchange == DP_EXCHANGE_HEADS) w.N = 1;
    w.pairs = w.N > 1 && dp_exchanges[sending.exchange].pairs;
    w.s = (dp_carried_head){.p = p, .in = dp_activated_new(p)};
    w.square.V = p->K;
    w.square.v = dp_doubles(p->T * p->HV * dp_rows(p) * p->K);
    w.o = dp_doubles(widest);
    w.write = dp_doubles(widest);
    w.behind = dp_doubles(p->T * p->HV);
    w.read = dp_doubles(p->T * p->HV);
    double **const of_heads[] = {&w.more, &w.grown, &w.size, &w.entered};
    for (int i = 0; i < 4; i++)
        *of_heads[i] = dp_doubles(p->HV);
    for (int i = 0; i < p->Nseq; i++)
        sequence(&w, i);
    if (backward && dp_store_has_gradients(p)) backward_pass(&w);
    for (int i = 0; i < 4; i++)
        free(*of_heads[i]);
    free(w.square.v);
    free(w.o);
    free(w.write);
    free(w.behind);
    free(w.read);
    dp_activated_free(&w.s.in);
}
