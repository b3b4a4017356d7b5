/* The error bounds of one chain format: chains, merges, passes, in the pipeline's order. */
#include "error_bound_impl.h"
#include "ref/arithmetic/elementary.h"
#include "ref/arithmetic/mm.h"
#include "ref/chunk/payload.h"
#include "ref/vocabulary/recurrence.h"

#include <string.h>

/* ---- arrays of a bound ----------------------------------------------------------------------- */

/* Rows of a result, 0 where the problem has none. */
static int64_t error_bound_row_count(const dp_problem *p, int field) {
    int64_t rows, width;
    dp_result_shape(p, field, &rows, &width);
    return rows;
}

static int64_t size_of(const dp_problem *p, int field) {
    int64_t rows, width;
    dp_result_shape(p, field, &rows, &width);
    return rows * width;
}

void dp_error_bound_alloc(const dp_problem *p, int N, int backward, int entries,
                          dp_error_bound *out) {
    *out = (dp_error_bound){0};
    for (int i = 0; i < DP_NRESULTS; i++)
        if (error_bound_row_count(p, i) && (backward || !dp_result_fields[i].backward))
            out->row[i] = dp_doubles(error_bound_row_count(p, i));
    for (int i = 0; i < DP_RANK_TENSORS; i++)
        out->rank[i] = dp_doubles((int64_t)N * p->HV);
    for (int i = 0; i < DP_NQKV && backward && entries; i++) {
        out->entry[i] = dp_doubles(size_of(p, dp_qkv_gradient(i)));
        out->rest[i] = dp_doubles(error_bound_row_count(p, dp_qkv_gradient(i)));
    }
}

#define PARTS 24
/* Its arrays as parts of the cache; returns their number. */
static int parts_of(const dp_problem *p, int N, dp_error_bound *b, dp_part part[PARTS]) {
    int n = 0;
    for (int i = 0; i < DP_NRESULTS; i++)
        if (b->row[i])
            part[n++] = (dp_part){b->row[i], sizeof(double) * (size_t)error_bound_row_count(p, i)};
    for (int i = 0; i < DP_RANK_TENSORS; i++)
        part[n++] = (dp_part){b->rank[i], sizeof(double) * (size_t)N * p->HV};
    part[n++] = (dp_part){b->traj, sizeof b->traj};
    for (int i = 0; i < DP_NQKV && b->entry[i]; i++) {
        part[n++] = (dp_part){b->entry[i], sizeof(double) * (size_t)size_of(p, dp_qkv_gradient(i))};
        part[n++] = (dp_part){b->rest[i], sizeof(double) *
                                              (size_t)error_bound_row_count(p, dp_qkv_gradient(i))};
    }
    return n;
}

void dp_error_bound_free(dp_error_bound *b) {
    for (int i = 0; i < DP_NRESULTS; i++)
        free(b->row[i]);
    for (int i = 0; i < DP_NQKV; i++) {
        free(b->entry[i]);
        free(b->rest[i]);
    }
    for (int i = 0; i < DP_RANK_TENSORS; i++)
        free(b->rank[i]);
    *b = (dp_error_bound){0};
}

int dp_error_bound_load(const char *cache, dp_key key, const dp_problem *p, int N, int backward,
                        int entries, dp_error_bound *out) {
    dp_part part[PARTS];
    dp_error_bound_alloc(p, N, backward, entries, out);
    const int n = parts_of(p, N, out, part);
    if (dp_cache_load(cache, DP_CACHE_BOUND, key, part, n)) return 1;
    dp_error_bound_free(out);
    return 0;
}

void dp_error_bound_save(const char *cache, dp_key key, const dp_problem *p, int N,
                         dp_error_bound *b) {
    dp_part part[PARTS];
    const int n = parts_of(p, N, b, part);
    dp_cache_save(cache, DP_CACHE_BOUND, key, part, n);
}

void dp_error_bound_spread(const dp_problem *p, int N, dp_error_bound *one) {
    for (int i = 0; i < DP_RANK_TENSORS; i++) {
        free(one->rank[i]);
        one->rank[i] = dp_doubles((int64_t)N * p->HV);
    }
    memset(one->traj, 0, sizeof one->traj);
}

/* ---- errors of what enters the chunks -------------------------------------------------------- */

/* Errors of the activated inputs; of rotated rows entry by entry (dp_turned_errors). For q, k: y =
 * x rstd, each entry has 2u, and us where the normalised vector is stored short; the row its
 *       rstd, sum_error(K) / 2 + 4u. Without the norm us where they are stored as they come in
 *       (design inputs=stored).
 * gate: softplus form  |Dg| <= 10 u |g| + u |x| a dp_error_bound_sigmoid(x);
 *       lower bound  |Dg| <= 8 u |g| + 5 u |a x| |lb| s (1 - s)
 *       (x = raw + bias is rounded once, a = exp(A_log) and the functions are good to 2 u each).
 * erase o k, write o v: both factors on entry, the product u, + us where it is stored short.
 * beta: sigmoid, 6 u relative. Inputs wider than the base's arithmetic are rounded once on
 *       entry: u. */
double dp_error_bound_sigmoid(double x) {
    return x >= 0 ? 1 / (1 + dp_exp(-x)) : dp_exp(x) / (1 + dp_exp(x));
}

dp_gate_error dp_error_bound_gate(const dp_problem *p, int64_t t, int hv, int c, double u) {
    const int Kg = dp_Kg(p);
    const double raw = p->g[(t * p->HV + hv) * Kg + c];
    if (p->gate == DP_GATE_LOG)
        return (dp_gate_error){
            .g = raw, .dx = 1, .Dg = u > 0x1p-53 && (double)(float)raw != raw ? u * fabs(raw) : 0};
    const double x = raw + (p->dt_bias ? p->dt_bias[hv * Kg + c] : 0),
                 a = p->A_log ? dp_exp(p->A_log[hv]) : 1;
    const double s =
        p->gate == DP_GATE_SOFTPLUS ? dp_error_bound_sigmoid(x) : dp_error_bound_sigmoid(a * x);
    dp_gate_error e;
    if (p->gate == DP_GATE_SOFTPLUS) {
        e.g = -a * (x > 0 ? x + dp_log1p(dp_exp(-x)) : dp_log1p(dp_exp(x)));
        e.dx = -a * s;
        e.dA = e.g;
        e.Dg = 10 * u * fabs(e.g) + u * fabs(x * e.dx);
        e.Ddx = 10 * u + u * fabs(x);
    } else {
        e.g = p->lower_bound * s;
        e.dx = p->lower_bound * s * (1 - s) * a;
        e.dA = e.dx * x;
        e.Dg = 8 * u * fabs(e.g) + 5 * u * fabs(x * e.dx);
        e.Ddx = 12 * u + 5 * u * fabs(a * x) + (s < 1 ? 2 * u / (1 - s) : 0);
    }
    return e;
}

/* Largest error of a gate, which is the relative error that exp(-g) has of it. */
static double most_of_gates(const dp_problem *p, double u) {
    const int Kg = dp_Kg(p);
    double most = 0;
    for (int64_t i = 0; i < p->T * p->HV * Kg; i++)
        most = fmax(
            most,
            dp_error_bound_gate(p, i / Kg / p->HV, (int)(i / Kg % p->HV), (int)(i % Kg), u).Dg);
    return most;
}

typedef enum { WRITES, READS, VALUES } entry_kind;

/* 2-norm error of a row's 1/norm, relative. */
static double of_norm(const dp_problem *p, const dp_rounding *r) {
    return dp_sum_error(r, p->K) / 2 + 4 * r->u;
}

/* Norms of the rows that a score has at once: one, or those of its entry's factors. */
static int most_norms(const dp_problem *p) {
    const dp_recurrence *a = dp_recurrence_of(p);
    int most = 1;
    for (int i = 0; i < 2 * a->n && dp_by_rows(p); i++) {
        const int n = dp_entry_normed(p, i % 2 ? a->row[i / 2].read : a->row[i / 2].write);
        if (n > most) most = n;
    }
    return most;
}

/* Largest relative error of these entries (dp_by_rows). A factor has `entry`, one with a norm 2u
 * and us more. A factor exp(+-g) has the error of its gate and one rounding more. Each product has
 * u, one that is stored us. */
static double of_products(const dp_problem *p, entry_kind kind, double entry,
                          const dp_rounding *r) {
    const dp_recurrence *a = dp_recurrence_of(p);
    double most = 0;
    for (int j = 0; j < a->n; j++) {
        const dp_entry e = kind == WRITES  ? a->row[j].write
                           : kind == READS ? a->row[j].read
                                           : a->row[j].value;
        const int gates = dp_entry_gate_factors(e) + (kind == READS && a->before && e.sign);
        double sum = e.n ? e.n * entry + (e.n - 1) * r->u : 0;
        sum += dp_entry_normed(p, e) * (2 * r->u + r->us);
        if (gates) sum += gates * (2 * r->u + most_of_gates(p, r->u)) + r->u;
        if ((e.n > 1 || dp_entry_rotated(a, e) >= 0) && kind != READS) sum += r->us;
        most = fmax(most, sum);
    }
    return most;
}

dp_input_error dp_error_bound_inputs(const dp_problem *p, dp_base base, const dp_rounding *r) {
    const double entry = base == DP_BASE_FP64 ? 0 : r->u, norm = 2 * r->u + r->us;
    const double given = entry + r->input, stored = p->angle ? fmax(r->us, r->input) : r->input;
    const double product = dp_by_gates(p)  ? entry + r->u + r->us
                           : dp_by_rows(p) ? of_products(p, READS, entry, r)
                                           : 0;
    return (dp_input_error){.q = dp_is_normed(p, DP_INPUT_Q) ? norm + (p->angle ? r->us : 0)
                                                             : entry + stored,
                            .k = dp_by_rows(p) ? r->input + of_products(p, WRITES, entry, r)
                                 : p->l2norm   ? norm
                                               : given,
                            .erasing = product,
                            .qk_row = p->l2norm ? most_norms(p) * of_norm(p, r) : 0,
                            .v = dp_by_rows(p) ? of_products(p, VALUES, entry, r)
                                               : entry + (dp_by_gates(p) ? product : 0),
                            .beta = p->beta_form == DP_BETA_PLAIN ? entry : 6 * r->u,
                            .sg = (int64_t)p->HV * dp_Kg(p),
                            .Kg = dp_Kg(p)};
}

static double relative(double err, double x) { return err > 0 ? err / fabs(x) : 0; }

double *dp_error_bound_angles(const dp_problem *p, dp_base base, const dp_rounding *r) {
    const int64_t width = (int64_t)p->HV * dp_pairs(p);
    const double entry = base == DP_BASE_FP64 ? 0 : r->u;
    double *y = p->angle ? dp_doubles(p->T * width) : NULL;
    for (int s = 0; s < p->Nseq && y; s++)
        for (int64_t x = 0; x < width; x++) {
            double sum = 0;
            for (int64_t t = p->cu[s]; t < p->cu[s + 1]; t++) {
                sum += fabs(p->angle[t * width + x]);
                y[t * width + x] = (dp_sum_error(r, (int)(t + 1 - p->cu[s])) + entry) * sum;
            }
        }
    return y;
}

/* Adds to the relative errors of a row's entries x those of a rotation, its angles off by dphi. An
 * entry is off by its pair's size times dphi + 4 u (products and sum, cos and sin). */
static void dp_turned_errors(const dp_rounding *r, int P, const double *x, const double *dphi,
                             double *rel) {
    for (int i = 0; i < 2 * P; i++)
        rel[i] += relative((dphi[i / 2] + 4 * r->u) * dp_hypot(x[i & ~1], x[i | 1]), x[i]);
}

double dp_turned_norm(const dp_problem *p, const double *dphi, int64_t t, int hv, double u) {
    const int P = dp_pairs(p);
    double most = 0;
    for (int i = 0; i < P && dphi && t >= 0; i++)
        most = fmax(most, dphi[(t * p->HV + hv) * P + i]);
    return dphi && t >= 0 ? most + 4 * u : 0;
}

/* Error of 1/norm of a normalised row: <y, err> / |x| with |y| = 1, by squares for a probable
 * bound. */
static double *raw_error_rows(const dp_rounding *r, const double *x, const double *err,
                              dp_chunk_rows at, double *row) {
    if (!err) return NULL;
    double *rel = dp_doubles((int64_t)at.rows * at.width);
    for (int i = 0; i < at.rows; i++) {
        const int64_t z = (at.first + i / at.R * at.step + i % at.R) * at.width;
        const double n = dp_norm_fro(at.width, x + z);
        double s = 0;
        for (int j = 0; j < at.width; j++) {
            rel[(int64_t)i * at.width + j] = relative(err[z + j], x[z + j]);
            s += err[z + j] > 0 ? dp_pw(r, x[z + j] / n * err[z + j] / n) : 0;
        }
        if (row) *row = fmax(*row, r->p == 2 ? sqrt(s) : s);
    }
    return rel;
}

double dp_raw_error_norm(const double *x, const double *err, int64_t row, int width) {
    return err ? relative(dp_norm_fro(width, err + row * width),
                          dp_norm_fro(width, x + row * width))
               : 0;
}

/* ---- what no chain format changes ------------------------------------------------------------ */

void dp_error_bound_step(const dp_error_bound_base *w, int back, int g, int hv, const double *S,
                         double *e, double *DX) {
    const dp_chunk_bound *b = &w->b[(int64_t)g * w->ref->p->HV + hv];
    const dp_chunk *ch = b->ch;
    if (!back) {
        dp_bound_state(b, S ? S : ch->h, e, DX);
        return;
    }
    double *dout = dp_doubles((int64_t)ch->c * ch->V);
    dp_sim_gather_do(w->ref, g, hv, dout);
    dp_bound_state_bwd(b, dout, S ? S : ch->dh, e, DX);
    free(dout);
}

int dp_error_bound_turn(const dp_sim *s, int back, int r, int sub, int i) {
    return back ? s->first[r][sub + 1] - 1 - i : s->first[r][sub] + i;
}

double *dp_error_bound_H(const dp_error_bound_base *w, int back, int r, int hv) {
    const dp_sim *s = w->ref;
    const dp_problem *p = s->p;
    const int sub = back ? 0 : s->ctx[r].nlocal - 1, n = s->first[r][sub + 1] - s->first[r][sub];
    if (back ? s->ctx[r].is_first : s->ctx[r].is_last) return NULL;
    double *H = dp_doubles((int64_t)p->K * p->V), *dout = dp_doubles((int64_t)DP_CHUNK_MOST * p->V);
    double *e = dp_doubles(dp_state_error_size(&w->r, p->K, p->V));
    for (int i = 0; i < n; i++) {
        const int g = dp_error_bound_turn(s, back, r, sub, i);
        dp_error_bound_step(w, back, g, hv, H, e, NULL);
        if (back) dp_sim_gather_do(s, g, hv, dout);
        if (back)
            dp_chunk_state_bwd(dp_sim_chunk(s, g, hv), dout, H, NULL);
        else
            dp_chunk_state(dp_sim_chunk(s, g, hv), H, NULL);
    }
    free(H);
    free(dout);
    return e;
}

void dp_error_bound_base_init(dp_error_bound_base *w, dp_sim *ref, dp_base base, int power,
                              int backward) {
    const dp_design design = dp_design_of(base);
    dp_error_bound_base_inexact(w, ref, &design, power, backward, NULL);
}

typedef struct {
    double gate;
    int group;
} chunk_gate;

static int by_gate(const void *a, const void *b) {
    const double x = ((const chunk_gate *)a)->gate, y = ((const chunk_gate *)b)->gate;
    return (x > y) - (x < y);
}

/* held [group][HV][K]: number of chunks with the same gate as this one, of one head and channel. If
 * the head has one gate: of all channels. A gate of 0 is exact. */
static void count_held(dp_sim *s, int hv, int x, double *held) {
    const int HV = s->p->HV, K = s->p->K, n = s->ngroup, alike = dp_Kg(s->p) == 1 ? K : 1;
    chunk_gate *of = dp_alloc((size_t)n, sizeof *of);
    for (int g = 0; g < n; g++) {
        const dp_chunk *ch = dp_sim_chunk(s, g, hv);
        const double gate = ch->gcum[(int64_t)(ch->c - 1) * K + x];
        of[g] = (chunk_gate){isnan(gate) ? 0 : gate, g}; /* what is no number is judged by nobody */
    }
    qsort(of, (size_t)n, sizeof *of, by_gate);
    for (int g = 0, end; g < n; g = end) {
        for (end = g + 1; end < n && of[end].gate == of[g].gate;)
            end++;
        for (int i = g * alike; i < end * alike; i++)
            held[((int64_t)of[i / alike].group * HV + hv) * K + x + i % alike] =
                of[g].gate == 0 ? 1 : end - g;
    }
    free(of);
}

/* Relative errors of a chunk's rotated queries and keys, [c][K], [c][n][K]; NULL: nothing
 * is rotated. */
static void turned_errors(const dp_error_bound_base *w, int g, int hv, double **rq, double **rk) {
    const dp_sim *s = w->ref;
    const dp_problem *p = s->p;
    const int P = dp_pairs(p), K = p->K, n = dp_rows(p), c = s->group[g].c;
    if (!p->angle) return;
    *rq = dp_doubles((int64_t)c * K);
    *rk = dp_doubles((int64_t)c * n * K);
    for (int i = 0; i < c * (n + 1); i++) {
        const int64_t t = s->group[g].t0 + i / (n + 1), row = t * p->HV + hv;
        const int j = i % (n + 1) - 1;
        const int key = j < 0 ? 0 : dp_entry_rotated(dp_recurrence_of(p), dp_row_of(p, j)->write);
        const int64_t at = key < 0 ? -1 : dp_factor_token(p, j < 0 ? 0 : key, t);
        const double *x = j < 0 ? s->q + row * K : s->k + (row * n + j) * K;
        if (at >= 0)
            dp_turned_errors(&w->r, P, x, w->Dphi + (at * p->HV + hv) * P,
                             j < 0 ? *rq + (int64_t)i / (n + 1) * K
                                   : *rk + ((int64_t)i / (n + 1) * n + j) * K);
    }
}

static void bound_chunk(dp_error_bound_base *w, int g, int hv, const double *held) {
    dp_sim *s = w->ref;
    const dp_problem *p = s->p;
    const int64_t i = (int64_t)g * p->HV + hv, t0 = s->group[g].t0, h = hv / dp_G(p);
    const int c = s->group[g].c, R = dp_rows(p);
    const dp_chunk_rows of_q = {t0 * p->H + h, p->H, 1, c, p->K},
                        of_k = {(t0 * p->H + h) * R, (int64_t)p->H * R, R, c * R, p->K},
                        of_v = {(t0 * p->HV + hv) * R, (int64_t)p->HV * R, R, c * R, p->V};
    dp_input_error in = w->in;
    double row = 0, *at = p->l2norm ? &row : NULL;
    double *rq = raw_error_rows(&w->r, p->q, w->raw_error.q, of_q, at),
           *rk = raw_error_rows(&w->r, p->k, w->raw_error.k, of_k, at),
           *rv = raw_error_rows(&w->r, p->v, w->raw_error.v, of_v, NULL);
    turned_errors(w, g, hv, &rq, &rk);
    in.g = w->Dg + (t0 * p->HV + hv) * dp_Kg(p);
    in.held = held ? held + i * p->K : NULL;
    in.rq = rq;
    in.rk = rk;
    in.rv = rv;
    in.qk_row += row;
    dp_chunk_inverse(&s->ch[i]);
    dp_bound_intra(&w->b[i], &s->ch[i], w->r, &in);
    free(rq);
    free(rk);
    free(rv);
}

void dp_error_bound_base_inexact(dp_error_bound_base *w, dp_sim *ref, const dp_design *design,
                                 int power, int backward, const dp_raw_error *raw) {
    const dp_problem *p = ref->p;
    const int Kg = dp_Kg(p), nr = ref->N * p->HV;
    *w = (dp_error_bound_base){.ref = ref,
                               .base = design->base,
                               .sending = design->sending,
                               .r = dp_rounding_of_design(design, power),
                               .entries = raw != NULL};
    if (raw) w->raw_error = *raw;
    w->in = dp_error_bound_inputs(p, w->base, &w->r);
    w->Dg = dp_doubles(p->T * p->HV * Kg);
    w->Dphi = dp_error_bound_angles(p, w->base, &w->r);
    for (int64_t t = 0; t < p->T; t++)
        for (int hv = 0; hv < p->HV; hv++)
            for (int c = 0; c < Kg; c++)
                w->Dg[(t * p->HV + hv) * Kg + c] = dp_error_bound_gate(p, t, hv, c, w->r.u).Dg;
    const int64_t n = (int64_t)ref->ngroup * p->HV;
    w->b = dp_calloc((size_t)n, sizeof *w->b);
    w->eH = dp_calloc((size_t)nr, sizeof *w->eH);
    w->edH = dp_calloc((size_t)nr, sizeof *w->edH);
    double *held = power == 2 ? dp_doubles(n * p->K) : NULL; /* sums of squares alone count them */
#pragma omp parallel for schedule(dynamic, 1)
    for (int z = 0; z < (held ? p->HV * Kg : 0); z++)
        count_held(ref, z / Kg, z % Kg, held);
#pragma omp parallel for schedule(dynamic, 1)
    for (int64_t i = 0; i < n; i++)
        bound_chunk(w, (int)(i / p->HV), (int)(i % p->HV), held);
    free(held);
#pragma omp parallel for schedule(dynamic, 1)
    for (int i = 0; i < nr; i++) {
        w->eH[i] = dp_error_bound_H(w, 0, i / p->HV, i % p->HV);
        if (backward) w->edH[i] = dp_error_bound_H(w, 1, i / p->HV, i % p->HV);
    }
}

void dp_error_bound_base_free(dp_error_bound_base *w) {
    const int64_t HV = w->ref->p->HV, nr = w->ref->N * HV;
    for (int64_t i = 0; i < w->ref->ngroup * HV; i++)
        dp_bound_free(&w->b[i]);
    for (int i = 0; i < DP_NRESULTS; i++)
        free(w->row[i]);
    double **const lists[] = {w->eH, w->edH, w->eS, w->edS};
    for (int i = 0; i < 4; i++)
        dp_free_list(lists[i], nr);
    free(w->b);
    free(w->Dg);
    free(w->Dphi);
    *w = (dp_error_bound_base){0};
}

/* ---- chains of M ----------------------------------------------------------------------------- */

/* M and DM of a chunk, transposed where the adjoint chain wants them. */
static void chain_factor(const dp_chunk_bound *cb, int K, int trans, double *M, double *D) {
    for (int x = 0; x < K; x++)
        for (int y = 0; y < K; y++) {
            const int64_t from = trans ? (int64_t)y * K + x : (int64_t)x * K + y;
            M[(int64_t)x * K + y] = cb->M[from];
            D[(int64_t)x * K + y] = cb->DM[from];
        }
}

dp_chain_error dp_chain_error_of(const dp_error_bound_base *w, dp_chain_span span, double *traj) {
    const int K = w->ref->p->K, n = span.g1 - span.g0;
    const int64_t KK = (int64_t)K * K;
    dp_chain_error e = {.b = dp_doubles(dp_chain_error_size(&w->r, K))};
    double *P = dp_doubles(KK), *Q = dp_doubles(KK), *M = dp_doubles(KK), *D = dp_doubles(KK),
           bias = 0;
    /* the chain starts at I: its first factor is rounded too */
    for (int x = 0; x < K; x++)
        P[(int64_t)x * K + x] = 1;
    for (int i = 0; i < n; i++) {
        const int g = span.trans ? span.g1 - 1 - i : span.g0 + i;
        const dp_chunk_bound *cb = &w->b[(int64_t)g * w->ref->p->HV + span.hv];
        chain_factor(cb, K, span.trans, M, D);
        const dp_factor_error x = dp_factor_error_of(cb, span.trans);
        dp_bound_chain_step(&w->r, span.format, K, M, D, &x, cb->mu, P, e.b, &bias);
        dp_mm(DP_FP64, 0, 0, K, K, K, M, P, Q);
        double *t = P;
        P = Q;
        Q = t;
        e.fro = dp_chain_error_norm(&w->r, K, e.b) + bias;
        if (traj && (i & (i + 1)) == 0) *traj++ = e.fro;
    }
    e.bias = bias / DP_LAMBDA;
    free(P);
    free(Q);
    free(M);
    free(D);
    return e;
}

/* ---- passes ---------------------------------------------------------------------------------- */

/* From the error e_in of the state that enters the rank, backward of its gradient; NULL: none. */
static void pass(const dp_error_bound_base *w, int back, int r, int hv, const double *e_in,
                 dp_pass_errors *ps, dp_error_bound *out) {
    const dp_sim *s = w->ref;
    const dp_problem *p = s->p;
    const dp_context *c = &s->ctx[r];
    const int64_t size = dp_state_error_size(&w->r, p->K, p->V);
    const int entered = back ? c->nlocal - 1 : 0;
    double **enters = back ? ps->edS : ps->eS, **DX = back ? ps->DdX : ps->DX;
    double *row = out->row[back ? DP_RESULT_DS0 : DP_RESULT_FINAL_STATE];
    for (int sub = 0; sub < c->nlocal; sub++) {
        double *e = sub == entered && e_in ? dp_copy(e_in, size) : dp_doubles(size);
        for (int i = 0; i < s->first[r][sub + 1] - s->first[r][sub]; i++) {
            const int g = dp_error_bound_turn(s, back, r, sub, i);
            const int64_t z = (int64_t)g * p->HV + hv;
            enters[z] = dp_copy(e, size);
            DX[z] = dp_doubles((int64_t)w->b[z].ch->n * p->V);
            dp_error_bound_step(w, back, g, hv, NULL, e, DX[z]);
        }
        if (back ? sub > 0 || c->is_first : sub < c->nlocal - 1 || c->is_last)
            row[(int64_t)c->local_seq[sub] * p->HV + hv] =
                dp_state_error_norm(&w->r, p->K, p->V, e);
        free(e);
    }
}

static void outputs(const dp_error_bound_base *w, int g, int hv, const dp_pass_errors *ps,
                    dp_error_bound *out) {
    const dp_problem *p = w->ref->p;
    const dp_group *gr = &w->ref->group[g];
    const int64_t z = (int64_t)g * p->HV + hv;
    double row[DP_CHUNK_MOST];
    dp_bound_output(&w->b[z], ps->eS[z], ps->DX[z], row);
    for (int t = 0; t < gr->c; t++)
        out->row[DP_RESULT_O][(gr->t0 + t) * p->HV + hv] = dp_bound_final(&w->r, row[t]);
}

/* Bounds of the rows of all results, from the errors that enter each rank. */
static void rows_of_pass(const dp_error_bound_base *w, double **eS, double **edS, int backward,
                         dp_error_bound *out) {
    const dp_sim *s = w->ref;
    const dp_problem *p = s->p;
    const int nr = s->N * p->HV;
    const int64_t ng = (int64_t)s->ngroup * p->HV;
    dp_pass_errors ps = {
        dp_calloc((size_t)ng, sizeof(double *)), dp_calloc((size_t)ng, sizeof(double *)),
        dp_calloc((size_t)ng, sizeof(double *)), dp_calloc((size_t)ng, sizeof(double *))};
#pragma omp parallel for schedule(dynamic, 1)
    for (int i = 0; i < nr; i++) {
        pass(w, 0, i / p->HV, i % p->HV, eS[i], &ps, out);
        if (backward) pass(w, 1, i / p->HV, i % p->HV, edS[i], &ps, out);
    }
    if (w->r.p == 2) {
#pragma omp parallel for schedule(dynamic, 1)
        for (int64_t i = 0; i < ng; i++)
            outputs(w, (int)(i / p->HV), (int)(i % p->HV), &ps, out);
        if (backward) dp_error_bound_gradients(w, &ps, out);
    }
    dp_free_list(ps.eS, ng);
    dp_free_list(ps.edS, ng);
    dp_free_list(ps.DX, ng);
    dp_free_list(ps.DdX, ng);
}

/* ---- all of it ------------------------------------------------------------------------------- */

/* Errors of the chains of all ranks, forward and backward [N*HV], and bounds of M, H, dM, dH. */
static void chain_errors(const dp_error_bound_base *w, dp_format chain, int backward,
                         dp_chain_error *bM, dp_chain_error *bdM, dp_error_bound *out) {
    const dp_sim *s = w->ref;
    const int HV = s->p->HV, K = s->p->K, V = s->p->V;
    chain = dp_chain_format(s->p, w->base, chain);
#pragma omp parallel for schedule(dynamic, 1)
    for (int i = 0; i < s->N * HV; i++)
        for (int back = 0; back <= (backward != 0); back++) {
            const int r = i / HV, sub = back ? 0 : s->ctx[r].nlocal - 1;
            const dp_chain_span span = {s->first[r][sub], s->first[r][sub + 1], i % HV, back,
                                        chain};
            dp_chain_error *x = &(back ? bdM : bM)[i];
            if (back ? s->ctx[r].is_first : s->ctx[r].is_last) continue;
            *x = dp_chain_error_of(w, span,
                                   !back && r == s->traj_rank && HV == 1 ? out->traj : NULL);
            out->rank[back ? DP_RANK_DM : DP_RANK_M][i] = x->fro;
            out->rank[back ? DP_RANK_DH : DP_RANK_H][i] =
                dp_state_error_norm(&w->r, K, V, (back ? w->edH : w->eH)[i]);
        }
}

static void chain_errors_free(dp_chain_error *a, int n) {
    for (int i = 0; i < n; i++)
        free(a[i].b);
    free(a);
}

/* A sound bound of the rows that are not states is far above the tensors: it is left out. */
static void drop_rows(dp_error_bound *out) {
    for (int i = 0; i < DP_NRESULTS; i++)
        if (dp_result_fields[i].kind != DP_OF_SEQUENCES) {
            free(out->row[i]);
            out->row[i] = NULL;
        }
}

/* Do the errors that enter the ranks equal those of the last run, whose row bounds are kept? */
static int as_before(const dp_error_bound_base *w, const dp_error_bound *out, double **eS,
                     double **edS) {
    const int n = w->ref->N * w->ref->p->HV;
    const int64_t size = dp_state_error_size(&w->r, w->ref->p->K, w->ref->p->V);
    return w->eS && !out->entry[DP_QKV_Q] && dp_same_list(eS, w->eS, n, size) &&
           dp_same_list(edS, w->edS, n, size);
}

/* Keeps what entered the ranks and the row bounds for the next format. */
static void keep(dp_error_bound_base *w, const dp_error_bound *out, double **eS, double **edS) {
    const dp_problem *p = w->ref->p;
    dp_free_list(w->eS, w->ref->N * p->HV);
    dp_free_list(w->edS, w->ref->N * p->HV);
    w->eS = eS;
    w->edS = edS;
    for (int i = 0; i < DP_NRESULTS; i++) {
        free(w->row[i]);
        w->row[i] = out->row[i] ? dp_copy(out->row[i], error_bound_row_count(p, i)) : NULL;
    }
}

void dp_error_bound_run(dp_error_bound_base *w, dp_format chain, int backward,
                        dp_error_bound *out) {
    const dp_problem *p = w->ref->p;
    const int nr = w->ref->N * p->HV;
    dp_chain_error *bM = dp_calloc((size_t)nr, sizeof *bM),
                   *bdM = dp_calloc((size_t)nr, sizeof *bdM);
    dp_error_bound_alloc(p, w->ref->N, backward, w->entries, out);
    if (w->r.p == 1) drop_rows(out);
    chain_errors(w, chain, backward, bM, bdM, out);
    double **eS = dp_exchange_errors(w, 1, chain, bM, w->eH, out->rank[DP_RANK_S_IN]),
           **edS = backward
                       ? dp_exchange_errors(w, -1, chain, bdM, w->edH, out->rank[DP_RANK_DS_OUT])
                       : NULL;
    chain_errors_free(bM, nr);
    chain_errors_free(bdM, nr);
    if (as_before(w, out, eS, edS)) {
        for (int i = 0; i < DP_NRESULTS; i++)
            if (out->row[i])
                memcpy(out->row[i], w->row[i],
                       sizeof(double) * (size_t)error_bound_row_count(p, i));
        dp_free_list(eS, nr);
        dp_free_list(edS, nr);
        return;
    }
    rows_of_pass(w, eS, edS, backward, out);
    keep(w, out, eS, edS);
}

/* ---- the smaller of two ---------------------------------------------------------------------- */

static void smaller(double *a, const double *b, int64_t n) {
    if (a && b)
        for (int64_t i = 0; i < n; i++)
            a[i] = fmin(a[i], b[i]);
}

/* The smaller of the two bounds, entry by entry, into a. */
static void smaller_of(const dp_problem *p, int N, dp_error_bound *a, dp_error_bound *b) {
    for (int i = 0; i < DP_NRESULTS; i++)
        smaller(a->row[i], b->row[i], error_bound_row_count(p, i));
    for (int i = 0; i < DP_RANK_TENSORS; i++)
        smaller(a->rank[i], b->rank[i], (int64_t)N * p->HV);
    smaller(a->traj, b->traj, DP_MAX_TRAJ);
}

void dp_error_bounds_init(dp_error_bounds *w, dp_sim *ref, const dp_design *design, int backward,
                          const dp_raw_error *raw) {
    dp_error_bound_base_inexact(&w->sound, ref, design, 1, backward, raw);
    dp_error_bound_base_inexact(&w->probable, ref, design, 2, backward, raw);
}

void dp_error_bounds_run(dp_error_bounds *w, dp_format chain, int backward, dp_error_bound *out) {
    dp_error_bound worst;
    dp_error_bound_run(&w->probable, chain, backward, out);
    dp_error_bound_run(&w->sound, chain, backward, &worst);
    smaller_of(w->sound.ref->p, w->sound.ref->N, out, &worst);
    dp_error_bound_free(&worst);
}

void dp_error_bounds_free(dp_error_bounds *w) {
    dp_error_bound_base_free(&w->sound);
    dp_error_bound_base_free(&w->probable);
}

void dp_error_bounds_once(dp_sim *ref, const dp_design *design, dp_format chain, int backward,
                          const dp_raw_error *raw, dp_error_bound *out) {
    dp_error_bounds w;
    dp_error_bounds_init(&w, ref, design, backward, raw);
    dp_error_bounds_run(&w, chain, backward, out);
    dp_error_bounds_free(&w);
}
