/* The error bounds of one chain format, in the order of the pipeline: activated inputs, chunks,
 * gradients through the activations, chains, passes. */
#include "error_bound_impl.h"
#include "ref/arithmetic/elementary.h"
#include "ref/arithmetic/mm.h"
#include "ref/chunk/payload.h"

#include <assert.h>
#include <string.h>

/* ---- arrays of a bound ----------------------------------------------------------------------- */

/* Entries of a result, or its rows alone; 0 where the problem has none. */
static int64_t count_of(const dp_problem *p, int field, int rows_alone) {
    int64_t rows, width;
    dp_result_shape(p, field, &rows, &width);
    return rows_alone ? rows : rows * width;
}

void dp_error_bound_alloc(const dp_problem *p, int N, int backward, int entries,
                          dp_error_bound *out) {
    *out = (dp_error_bound){0};
    for (int i = 0; i < DP_NRESULTS; i++)
        if (count_of(p, i, 1) && (backward || !dp_result_fields[i].backward))
            out->row[i] = dp_doubles(count_of(p, i, 1));
    for (int i = 0; i < DP_RANK_TENSORS; i++)
        out->rank[i] = dp_doubles((int64_t)N * p->HV);
    for (int i = 0; i < DP_NQKV && backward && entries; i++) {
        out->entry[i] = dp_doubles(count_of(p, dp_qkv_gradient(i), 0));
        out->rest[i] = dp_doubles(count_of(p, dp_qkv_gradient(i), 1));
    }
}

#define PARTS 24
/* Its arrays as parts of the cache; returns their number. */
static int parts_of(const dp_problem *p, int N, dp_error_bound *b, dp_part part[PARTS]) {
    int n = 0;
    for (int i = 0; i < DP_NRESULTS; i++)
        if (b->row[i]) part[n++] = (dp_part){b->row[i], sizeof(double) * (size_t)count_of(p, i, 1)};
    for (int i = 0; i < DP_RANK_TENSORS; i++)
        part[n++] = (dp_part){b->rank[i], sizeof(double) * (size_t)N * p->HV};
    part[n++] = (dp_part){b->traj, sizeof b->traj};
    for (int i = 0; i < DP_NQKV && b->entry[i]; i++) {
        part[n++] =
            (dp_part){b->entry[i], sizeof(double) * (size_t)count_of(p, dp_qkv_gradient(i), 0)};
        part[n++] =
            (dp_part){b->rest[i], sizeof(double) * (size_t)count_of(p, dp_qkv_gradient(i), 1)};
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

static void swap(double **a, double **b) {
    double *was = *a;
    *a = *b;
    *b = was;
}

void dp_error_bound_swap_backward(dp_error_bound *a, dp_error_bound *b) {
    for (int i = 0; i < DP_NRESULTS; i++)
        if (dp_result_fields[i].backward) swap(&a->row[i], &b->row[i]);
    for (int i = DP_RANK_DS_OUT; i < DP_RANK_TENSORS; i++)
        swap(&a->rank[i], &b->rank[i]);
    for (int i = 0; i < DP_NQKV; i++) {
        swap(&a->entry[i], &b->entry[i]);
        swap(&a->rest[i], &b->rest[i]);
    }
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
 *       rstd, sum_error(K) / power + 4u. Without the norm us where they are stored as they come in
 *       (design inputs=stored).
 * gate: of the roundings n of F (activations.h) |Dg| <= (n + 2) u |g| + u |x dg/dx|, inside 5 u
 *       (x = raw + bias is rounded once, a = exp(A_log) and the functions are good to 2 u each).
 * erase o k, write o v: both factors on entry, the product u, + us where it is stored short.
 * beta: n u relative. Inputs wider than the base's arithmetic are rounded once on
 *       entry: u. */
dp_slope dp_error_bound_beta(const dp_problem *p, double raw) {
    const dp_beta_info *form = &dp_betas[p->beta_form];
    const double y = dp_curve_at(form->curve, raw), slope = dp_beta_slope(p, raw);
    const int n = dp_curves[form->curve].rounded[0];
    return (dp_slope){slope,
                      n * fabs(dp_curve_ratio(form->curve, y) < 0 ? slope : form->times * y)};
}

dp_gate_error dp_error_bound_gate(const dp_problem *p, int64_t t, int hv, int c, double u) {
    const int Kg = dp_Kg(p);
    const double raw = p->g[(t * p->HV + hv) * Kg + c];
    if (p->gate == DP_GATE_LOG)
        return (dp_gate_error){
            .g = raw, .dx = 1, .Dg = u > 0x1p-53 && (double)(float)raw != raw ? u * fabs(raw) : 0};
    const double x = raw + (p->dt_bias ? p->dt_bias[hv * Kg + c] : 0),
                 a = p->A_log ? dp_exp(p->A_log[hv]) : 1;
    const dp_curve curve = dp_gates[p->gate].curve;
    const dp_curve_info *f = &dp_curves[curve];
    const int inside = dp_gate_inside(p), once = inside ? 5 : 1;
    const double z = inside ? a * x : x, by = inside ? p->lower_bound : -a,
                 y = dp_curve_at(curve, z), left = dp_curve_left(curve, z, y);
    const double slope = left < 0 ? by * dp_curve_slope(curve, z) : by * y * left;
    dp_gate_error e = {.g = by * y, .dx = inside ? slope * a : slope};
    e.dA = inside ? e.dx * x : e.g;
    e.Dg = (f->rounded[0] + 2) * u * fabs(e.g) + once * u * fabs(x * e.dx);
    e.Ddx = (f->rounded[1] + 2) * u + once * u * f->steep * fabs(z) + (left > 0 ? 2 * u / left : 0);
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
    return dp_sum_error(r, p->K) / dp_norm_of(p)->power + 4 * r->u;
}

/* Norms of the rows that a score has at once: one, or those of its entry's factors. */
static int most_norms(const dp_problem *p) {
    const dp_recurrence *a = dp_recurrence_of(p);
    int most = 1;
    for (int i = 0; i < 2 * a->n; i++) {
        const int n = dp_entry_normed(p, i % 2 ? a->row[i / 2].read : a->row[i / 2].write);
        if (n > most) most = n;
    }
    return most;
}

/* Largest relative error of these entries (dp_by_rows). A factor has `entry`, one with a norm 2u
 * and us more. A factor exp(+-g) has the error of its gate and two roundings. Each product has
 * u, one that is stored us. */
static double of_products(const dp_problem *p, entry_kind kind, double entry,
                          const dp_rounding *r) {
    const dp_recurrence *a = dp_recurrence_of(p);
    double most = 0;
    for (int j = 0; j < a->n; j++) {
        const dp_entry e = kind == WRITES  ? a->row[j].write
                           : kind == READS ? dp_chunk_read(p, j)
                                           : a->row[j].value;
        const int gates = dp_entry_gate_factors(e);
        double sum = e.n ? (e.n - gates) * entry + (e.n - 1) * r->u : 0;
        sum += dp_entry_normed(p, e) * (2 * r->u + r->us);
        if (gates) sum += gates * (2 * r->u + most_of_gates(p, r->u));
        if ((e.n > 1 || dp_entry_rotated(a, e) >= 0) && kind != READS) sum += r->us;
        most = fmax(most, sum);
    }
    return most;
}

dp_input_error dp_error_bound_inputs(const dp_problem *p, dp_base base, const dp_rounding *r) {
    const dp_curve_info *form = &dp_curves[dp_betas[p->beta_form].curve];
    const double entry = base == DP_BASE_FP64 ? 0 : r->u, norm = 2 * r->u + r->us;
    const double given = entry + r->input, stored = p->angle ? fmax(r->us, r->input) : r->input;
    const int rows = dp_by_rows(p);
    const double product = dp_by_gates(p) ? entry + r->u + r->us
                           : rows         ? of_products(p, READS, entry, r)
                                          : 0;
    return (dp_input_error){.q = dp_is_normed(p, DP_INPUT_Q) ? norm + (p->angle ? r->us : 0)
                                                             : entry + stored,
                            .k = rows        ? r->input + of_products(p, WRITES, entry, r)
                                 : p->l2norm ? norm
                                             : given,
                            .erasing = product,
                            .qk_row = p->l2norm ? most_norms(p) * of_norm(p, r) : 0,
                            .v = rows ? of_products(p, VALUES, entry, r) : entry + product,
                            .beta = p->beta_form == DP_BETA_PLAIN ? entry : form->rounded[0] * r->u,
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
static void dp_turned_errors(const dp_rounding *r, const dp_problem *p, const double *x,
                             const double *dphi, double *rel) {
    for (int i = 0; i < dp_pairs(p); i++) {
        const dp_pair z = dp_pair_at(p, i);
        const double off = (dphi[i] + 4 * r->u) * dp_hypot(x[z.first], x[z.second]);
        rel[z.first] += relative(off, x[z.first]);
        rel[z.second] += relative(off, x[z.second]);
    }
}

double dp_turned_norm(const dp_problem *p, const double *dphi, int64_t t, int hv, double u) {
    const int P = dp_pairs(p);
    double most = 0;
    for (int i = 0; i < P && dphi && t >= 0; i++)
        most = fmax(most, dphi[(t * p->HV + hv) * P + i]);
    return dphi && t >= 0 ? most + 4 * u : 0;
}

/* Rows of a chunk in a tensor [token][.][R] of that width: the first row, the distance between
 * tokens, R, and the number of rows. */
typedef struct {
    int64_t first, step;
    int R, rows, width;
} dp_chunk_rows;

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

/* |err| / |x| of one row; err NULL: 0. */
static double raw_error_norm(const double *x, const double *err, int64_t row, int width) {
    return err ? relative(dp_norm_fro(width, err + row * width),
                          dp_norm_fro(width, x + row * width))
               : 0;
}

/* ---- what no chain format changes ------------------------------------------------------------ */

/* do [c][V] of a chunk's tokens, to be freed. */
static double *do_of(const dp_error_bound_base *w, int g, int hv) {
    double *dout = dp_doubles((int64_t)w->ref->group[g].c * w->ref->p->V);
    dp_sim_gather_do(w->ref, g, hv, dout);
    return dout;
}

void dp_error_bound_step(const dp_error_bound_base *w, int back, int g, int hv, const double *S,
                         double *e, double *DX) {
    const dp_chunk_bound *b = &w->b[(int64_t)g * w->ref->p->HV + hv];
    const dp_chunk *ch = b->ch;
    if (!back) {
        dp_bound_state(b, S ? S : ch->h, e, DX);
        return;
    }
    DP_OWN double *dout = do_of(w, g, hv);
    dp_bound_state_bwd(b, dout, S ? S : ch->dh, e, DX);
}

int dp_error_bound_turn(const dp_sim *s, int back, int r, int sub, int i) {
    return back ? s->first[r][sub + 1] - 1 - i : s->first[r][sub] + i;
}

/* Errors that pair=rows adds to those of the factors of groups [g0, g1), in M and H. */
static dp_pair_error pair_rows_error(const dp_error_bound_base *w, int g0, int g1, int hv) {
    const dp_problem *p = w->ref->p;
    const int64_t KV = (int64_t)p->K * p->V;
    dp_pair_error x = dp_pair_error_new(&w->r, p->K, p->V);
    double **S = dp_calloc((size_t)(g1 - g0 + 1), sizeof *S);
    S[0] = dp_doubles(KV);
    for (int g = g0; g < g1; g++) {
        S[g - g0 + 1] = dp_copy(S[g - g0], KV);
        dp_chunk_state(&w->ref->ch[(int64_t)g * p->HV + hv], S[g - g0 + 1], NULL);
    }
    for (int g = g1 - 1; g >= g0; g--)
        dp_bound_pair_rows(&w->b[(int64_t)g * p->HV + hv], S[g - g0], &x);
    dp_free_list(S, g1 - g0 + 1);
    return x;
}

double *dp_error_bound_H(const dp_error_bound_base *w, int back, int r, int hv) {
    const dp_sim *s = w->ref;
    const dp_problem *p = s->p;
    const int sub = back ? 0 : s->ctx[r].nlocal - 1, n = s->first[r][sub + 1] - s->first[r][sub],
              rows = w->pair_rows && !back;
    const int64_t size = dp_state_error_size(&w->r, p->K, p->V);
    if (back ? s->ctx[r].is_first : s->ctx[r].is_last) return NULL;
    DP_OWN double *H = dp_doubles((int64_t)p->K * p->V);
    double *e = dp_doubles(size);
    for (int i = 0; i < n; i++) {
        const int g = dp_error_bound_turn(s, back, r, sub, i);
        if (rows) { /* roundings of a pass are none of its */
            dp_chunk_bound b = w->b[(int64_t)g * p->HV + hv];
            b.r.uo = b.r.us = 0;
            dp_bound_state(&b, H, e, NULL);
        } else {
            dp_error_bound_step(w, back, g, hv, H, e, NULL);
        }
        dp_chunk *ch = &s->ch[(int64_t)g * p->HV + hv];
        DP_OWN double *dout = back ? do_of(w, g, hv) : NULL;
        if (back)
            dp_chunk_state_bwd(ch, dout, H, NULL);
        else
            dp_chunk_state(ch, H, NULL);
    }
    if (rows) {
        dp_pair_error x = pair_rows_error(w, s->first[r][sub], s->first[r][sub + 1], hv);
        for (int64_t i = 0; i < size; i++)
            e[i] += x.eH[i];
        dp_pair_error_free(&x);
    }
    return e;
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
    DP_OWN chunk_gate *of = dp_alloc((size_t)n, sizeof *of);
    for (int g = 0; g < n; g++) {
        const dp_chunk *ch = &s->ch[(int64_t)g * HV + hv];
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
            dp_turned_errors(&w->r, p, x, w->Dphi + (at * p->HV + hv) * P,
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
    DP_OWN double *rq = raw_error_rows(&w->r, p->q, w->raw_error.of[DP_QKV_Q], of_q, at),
                  *rk = raw_error_rows(&w->r, p->k, w->raw_error.of[DP_QKV_K], of_k, at),
                  *rv = raw_error_rows(&w->r, p->v, w->raw_error.of[DP_QKV_V], of_v, NULL);
    turned_errors(w, g, hv, &rq, &rk);
    in.g = w->Dg + (t0 * p->HV + hv) * dp_Kg(p);
    in.held = held ? held + i * p->K : NULL;
    in.rq = rq;
    in.rk = rk;
    in.rv = rv;
    in.qk_row += row;
    dp_chunk_inverse(&s->ch[i]);
    dp_bound_intra(&w->b[i], &s->ch[i], w->r, &in);
}

void dp_error_bound_base_init(dp_error_bound_base *w, dp_sim *ref, const dp_design *design,
                              int power, int backward, const dp_raw_error *raw) {
    const dp_problem *p = ref->p;
    const int Kg = dp_Kg(p), nr = ref->N * p->HV;
    *w = (dp_error_bound_base){.ref = ref,
                               .base = design->base,
                               .sending = design->sending,
                               .pair_rows = design->pair_rows,
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
    DP_FREE(w->b, w->Dg, w->Dphi);
    *w = (dp_error_bound_base){0};
}

/* ---- gradients, through the activations to the raw inputs ------------------------------------ */

/* State errors that enter each chunk, forward and backward, and errors of X and dv_new without
 * them: [ngroup*HV]. */
typedef struct {
    double **eS, **edS, **DX, **DdX;
} dp_pass_errors;

/* Through the activations (math.md c):
 *   norm     dx = rstd (dy - w <y, dy>): the projection lengthens by a (dp_norm_across), so
 *              |error| <= a rstd (|error of dy| + (4 e_y + 2 gamma_K + 6u) |dy|), where dy is
 *            stored between two kernels (design inputs=stored) its rounding more;
 *            where the row x was itself computed, its y and rstd are each off by at most
 *              |error of x| / |x| more: 8 times that
 *   gate     entrywise |dg/dx| (D + relative error of dg/dx |dg|), and what underflows (tiny), as
 *            slopes of saturated gates and betas do;
 *   erase o k, write o v   dk gets erase o (its gradient), derase = k o (it); dv, dwrite likewise:
 *              D times the other factor's square, that factor's error and u of the product more
 *   beta     z s(1-s) D + 6 u z s |dbeta|    (1 - s cancels when s ~ 1)
 * sums over tokens for dA_log, ddt_bias: squares add inside a chunk, errors themselves from chunk
 *          to chunk, since an error of the state that enters a rank reaches all its chunks alike;
 *          plus sum_error of the sum of absolute values. */
typedef struct {
    double *A, *Aabs, *B, *Babs;
} gate_sums; /* [HV], [HV][Kg]: p-th powers, and sums of absolute values */

static void raw_gate(const dp_error_bound_base *w, int64_t t, int hv, const double *D,
                     const double *val, dp_error_bound *out, gate_sums *pa) {
    const dp_problem *p = w->ref->p;
    const int K = p->K, Kg = dp_Kg(p);
    const dp_rounding *r = &w->r;
    double row = 0;
    for (int c = 0; c < Kg; c++) {
        double d = D[c], v = val[c];
        if (Kg == 1) {
            double a = 0;
            d = v = 0;
            for (int k = 0; k < K; k++) {
                d += D[k];
                v += val[k];
                a += fabs(val[k]);
            }
            d += dp_pw(r, dp_sum_error(r, K) * a);
        }
        const dp_gate_error ge = dp_error_bound_gate(p, t, hv, c, r->u);
        const double x =
            dp_pw(r, ge.dx) * d + dp_pw(r, ge.dx * (ge.Ddx + r->u) * v) + dp_pw(r, r->tiny);
        const double y = dp_pw(r, ge.dA) * d + dp_pw(r, ge.dA * (ge.Ddx + 3 * r->u) * v) +
                         (dp_gate_inside(p) ? 0 : dp_pw(r, ge.Dg * v)) + dp_pw(r, r->tiny);
        const double z = x + dp_pw(r, r->us * ge.dx * v);
        row += r->p == 2 ? z : z * z;
        pa->A[hv] += y;
        pa->Aabs[hv] += fabs(ge.dA * v);
        pa->B[hv * Kg + c] += x;
        pa->Babs[hv * Kg + c] += fabs(ge.dx * v);
    }
    out->row[DP_RESULT_DG][t * p->HV + hv] = r->p == 2 ? dp_bound_final(r, row) : sqrt(row);
}

/* One row of dq or dk entry by entry, D the errors of the gradient of the activated row. From dx_d
 * = rstd (dy_d - w_d <y, dy>) follow each D_d and w_d times those of the inner product. Errors
 * known for the row as a whole, a and b, stay so. */
static void entries(const dp_error_bound_base *w, const double *x, int64_t row, double rstd,
                    const double *D, double a, double b, double *entry, double *rest) {
    const dp_problem *p = w->ref->p;
    const dp_rounding *r = &w->r;
    const int K = p->K;
    double inner = 0;
    const int normed = dp_is_normed(p, x == p->q ? DP_INPUT_Q : DP_INPUT_K),
              linear = dp_norm_of(p)->power == 2;
    for (int d = 0; normed && d < K; d++)
        inner += dp_pw(r, x[row * K + d] * rstd) * D[d];
    for (int d = 0; d < K; d++) {
        const double w = (linear ? x[row * K + d] * rstd : 1) / dp_norm_mean(p);
        entry[row * K + d] = dp_pw(r, rstd) * (D[d] + (normed ? dp_pw(r, w) * inner : 0));
    }
    if (normed) rstd *= dp_norm_across(p);
    rest[row] = dp_pw(r, rstd) * (dp_pw(r, a) + dp_pw(r, b));
}

/* The rows of dq, or dk, of a group of chunks: what is summed over the value heads of each head. */
typedef struct {
    const double *x, *raw, *rstd; /* raw rows, their input errors, 1/norms */
    int result, qkv, R, rows;
    double *sum;   /* [H][2][rows]: D of the gradient, sums of its norms */
    double *entry; /* [H][rows][K]: D of its entries */
} key_side;

/* Shared by the steps over one group of chunks. */
typedef struct {
    const dp_error_bound_base *w;
    const dp_group *gr;
    dp_error_bound *out;
    int c, n, each; /* each: entries are wanted too */
    key_side q, k;
    dp_grad_bound b; /* of one value head, in buf */
    double *buf;
} group_work;

static key_side side_of(const group_work *x, int qkv, int R) {
    const dp_sim *s = x->w->ref;
    const dp_problem *p = s->p;
    const int is_q = qkv == DP_QKV_Q;
    key_side a = {.x = is_q ? p->q : p->k,
                  .raw = x->w->raw_error.of[qkv],
                  .rstd = is_q ? s->rstd_q : s->rstd_k,
                  .result = dp_qkv_gradient(qkv),
                  .qkv = qkv,
                  .R = R,
                  .rows = x->c * R};
    a.sum = dp_doubles((int64_t)p->H * 2 * a.rows);
    a.entry = dp_doubles(x->each ? (int64_t)p->H * p->K * a.rows : 0);
    return a;
}

static void group_open(group_work *x) {
    const dp_problem *p = x->w->ref->p;
    x->q = side_of(x, DP_QKV_Q, 1);
    x->k = side_of(x, DP_QKV_K, dp_rows(p));
    x->b = dp_grad_bound_new(x->c, x->n, p->K, p->V, x->each, x->w->ref->values != NULL, &x->buf);
}

static void group_close(group_work *x) {
    DP_FREE(x->buf, x->q.sum, x->q.entry, x->k.sum, x->k.entry);
}

/* Adds a value head's rows: errors D, norms, errors of entries (NULL: not wanted). */
static void add_head(const group_work *x, const key_side *a, int hv, const double *D,
                     const double *norm, const double *entry) {
    const dp_problem *p = x->w->ref->p;
    const dp_rounding *r = &x->w->r;
    const int G = dp_G(p), h = hv / G;
    for (int i = 0; i < a->rows; i++) {
        a->sum[(h * 2) * a->rows + i] += D[i] + dp_pw(r, G * r->u * norm[i]);
        a->sum[(h * 2 + 1) * a->rows + i] += norm[i];
    }
    const int64_t size = (int64_t)a->rows * p->K;
    for (int64_t z = 0; entry && z < size; z++)
        a->entry[h * size + z] += entry[z];
}

static void value_row(const group_work *x, int i, int64_t row) {
    const dp_rounding *r = &x->w->r;
    const int V = x->w->ref->p->V;
    const double more = dp_pw(r, (r->u + r->us) * x->b.ndv[i]);
    x->out->row[DP_RESULT_DV][row] = dp_bound_final(r, x->b.dv[i] + more);
    if (!x->each) return;
    x->out->rest[DP_QKV_V][row] = more;
    memcpy(x->out->entry[DP_QKV_V] + row * V, x->b.edv + (int64_t)i * V,
           sizeof(double) * (size_t)V);
}

/* Error of dbeta of one row, through the activation. */
static double beta_error(const group_work *x, int i, int64_t row) {
    const dp_problem *p = x->w->ref->p;
    const dp_rounding *r = &x->w->r;
    double db = x->b.dbeta[i], val = fabs(x->b.vdbeta[i]);
    if (p->beta_form != DP_BETA_PLAIN) {
        const dp_slope s = dp_error_bound_beta(p, p->beta[row]);
        db = dp_pw(r, s.slope) * db + dp_pw(r, s.error * r->u * val) + dp_pw(r, r->tiny);
        val *= s.slope;
    }
    return dp_bound_final(r, db + dp_pw(r, r->us * val));
}

/* dv and dbeta of one value head. */
static void value_rows(const group_work *x, int hv) {
    const dp_problem *p = x->w->ref->p;
    const int R = p->R;
    double squares[DP_CHUNK_MOST] = {0};
    for (int i = 0; i < x->n; i++) {
        const int64_t row = ((x->gr->t0 + i / R) * p->HV + hv) * R + i % R;
        value_row(x, i, row);
        if (!dp_has_beta(p)) continue;
        const double d = beta_error(x, i, row);
        squares[i / R] += d * d;
    }
    for (int t = 0; t < x->c && dp_has_beta(p); t++)
        x->out->row[DP_RESULT_DBETA][(x->gr->t0 + t) * p->HV + hv] = sqrt(squares[t]);
}

/* For one row: the squared error of the products f x, summed. D is the squared error of x. The
 * relative errors of f and of the product are eps together. */
static double product_row(const dp_rounding *r, const double *f, const double *D, const double *x,
                          double eps, int n) {
    double sum = 0;
    for (int i = 0; i < n; i++)
        sum += dp_pw(r, f[i]) * D[i] + dp_pw(r, eps * f[i] * x[i]);
    return sum;
}

/* dv, dwrite and derase of one value head, and what dk gets through erase o k. */
static void erasing_rows(group_work *x, int hv) {
    const dp_sim *s = x->w->ref;
    const dp_problem *p = s->p;
    const dp_rounding *r = &x->w->r;
    const dp_input_error in = x->w->in;
    const int K = p->K, V = p->V;
    const double entry = x->w->base == DP_BASE_FP64 ? 0 : r->u, own = entry + r->u + r->us;
    for (int t = 0; t < x->c; t++) {
        const int64_t row = (x->gr->t0 + t) * p->HV + hv;
        const double *key = s->k + ((x->gr->t0 + t) * p->H + hv / dp_G(p)) * K;
        const double *D = x->b.edv + (int64_t)t * V, *y = x->b.vdv + (int64_t)t * V,
                     *De = x->b.ederasing + (int64_t)t * K, *e = x->b.vderasing + (int64_t)t * K;
        const double *erase = p->erase + row * K;
        double through = 0;
        x->out->row[DP_RESULT_DV][row] =
            dp_bound_final(r, product_row(r, p->write + row * V, D, y, own, V));
        x->out->row[DP_RESULT_DWRITE][row] =
            dp_bound_final(r, product_row(r, p->v + row * V, D, y, own, V));
        x->out->row[DP_RESULT_DERASE][row] =
            dp_bound_final(r, product_row(r, key, De, e, in.k + in.qk_row + r->u + r->us, K));
        for (int i = 0; i < K; i++)
            through += erase[i] * e[i] * erase[i] * e[i];
        x->b.dk[t] += product_row(r, erase, De, e, entry + r->u, K);
        x->b.ndk[t] += sqrt(through);
        x->b.dk[t] += dp_pw(r, dp_G(p) * r->u * x->b.ndk[t]);
    }
}

/* Data for errors and sizes of the gradients of row entries, for a recurrence of a user's rows
 * (dp_by_rows). The token is t of the chunk, row `row` of tokens and heads. */
typedef struct {
    group_work *x;
    dp_input_error in;
    int hv, t;
    int64_t row;
} rows_token;

/* Activated entry of row j, as it stands in the chunk. */
static const double *entry_of(const rows_token *a, int j, int reads) {
    const dp_sim *s = a->x->w->ref;
    return (reads ? s->erasing : s->k) + (a->row * dp_rows(s->p) + j) * s->p->K;
}

/* dp_entry_beside without sign, of an entry that reads or writes: from the entry itself where
 * neither a rotation nor another token is in it. */
static double others(const rows_token *a, dp_entry e, int j, int reads, int of, int x) {
    const dp_sim *s = a->x->w->ref;
    const dp_problem *p = &s->units.p;
    const int itself = dp_entry_rotated(dp_recurrence_of(p), e) < 0 && !dp_entry_looks_back(e);
    const double given = dp_factor_at(p, of, a->row, x);
    if (given != 0 && itself) return fabs(entry_of(a, j, reads)[x] / given);
    return fabs(dp_entry_beside(p, e, of, a->row, x));
}

/* The relative error that row j's gradient gets from its key's rotation, of its 2-norm. */
static double turning(const rows_token *a, int j) {
    const dp_error_bound_base *w = a->x->w;
    const dp_problem *p = w->ref->p;
    const int key = dp_entry_rotated(dp_recurrence_of(p), dp_row_of(p, j)->write);
    const int64_t t = key < 0 ? -1 : dp_factor_token(p, key, a->row / p->HV);
    return dp_turned_norm(p, w->Dphi, t, a->hv, w->r.u);
}

/* Error of the gradient of a factor of K channels through row j. The entry that reads counts by
 * channels, the one that writes by the largest of the others. *size: += its norm. */
static double row_through(const rows_token *a, int j, int of, double *size) {
    const dp_rounding *r = &a->x->w->r;
    const dp_problem *p = a->x->w->ref->p;
    const dp_entry write = dp_row_of(p, j)->write, read = dp_chunk_read(p, j);
    const int64_t i = (int64_t)a->t * dp_rows(p) + j;
    const double *D = a->x->b.ederasing + i * p->K, *d = a->x->b.vderasing + i * p->K;
    const int writes = dp_entry_has(write, of), reads = dp_entry_has(read, of);
    double sum = 0, most = writes && write.n == 1 ? 1 : 0, norm = 0;
    for (int x = 0; x < p->K && reads; x++) {
        const double f = reads * others(a, read, j, 1, of, x);
        norm += f * d[x] * f * d[x];
        sum += dp_pw(r, f) * D[x] + dp_pw(r, (a->in.erasing + 2 * r->u + r->us) * f * d[x]);
    }
    for (int x = 0; x < p->K && writes && write.n > 1; x++)
        most = fmax(most, writes * others(a, write, j, 0, of, x));
    const double own = (write.n > 1 ? a->in.k + 2 * r->u + r->us : r->u + r->us) + turning(a, j);
    *size += sqrt(norm) + most * a->x->b.ndk[i];
    return writes ? sum + dp_pw(r, most) * a->x->b.dk[i] + dp_pw(r, own * most * a->x->b.ndk[i])
                  : sum;
}

/* The same of a number: strengths, and sums over the channels of entries. */
static double number_through(const rows_token *a, int j, int of) {
    const dp_rounding *r = &a->x->w->r;
    const dp_problem *p = a->x->w->ref->p;
    const dp_token_row *row = dp_row_of(p, j);
    const dp_entry read_along = dp_chunk_read(p, j);
    const int64_t i = (int64_t)a->t * dp_rows(p) + j;
    const double *D = a->x->b.ederasing + i * p->K, *d = a->x->b.vderasing + i * p->K;
    const int in_strength = dp_entry_has(row->strength, of);
    const dp_sim *s = a->x->w->ref;
    const double beside =
        in_strength ? dp_entry_beside(&s->units.p, row->strength, of, a->row, 0) : 1;
    double write = 0, read = 0, error = 0, size = 0;
    for (int x = 0; x < p->K; x++) {
        const double w = dp_entry_has(row->write, of) ? others(a, row->write, j, 0, of, x) : 0,
                     e = dp_entry_has(read_along, of) ? others(a, read_along, j, 1, of, x) : 0;
        write += w * w;
        read += e * e;
        error += D[x];
        size += d[x] * d[x];
    }
    const double eps = a->in.k + a->in.erasing + (p->K + 4) * r->u + r->us + turning(a, j);
    double sum = dp_pw(r, sqrt(write)) * a->x->b.dk[i] +
                 dp_pw(r, eps * sqrt(write) * a->x->b.ndk[i]) + dp_pw(r, sqrt(read)) * error +
                 dp_pw(r, eps * sqrt(read * size));
    if (in_strength)
        sum += dp_pw(r, in_strength * beside) * a->x->b.dbeta[i] +
               dp_pw(r, in_strength * beside * (r->u + r->us) * fabs(a->x->b.vdbeta[i]));
    return sum;
}

/* Adds to dg the errors that come through exp(g) and exp(-g) of row j. */
static void gate_through(const rows_token *a, int j) {
    group_work *x = a->x;
    const dp_rounding *r = &x->w->r;
    const dp_problem *p = x->w->ref->p;
    const int64_t i = (int64_t)a->t * dp_rows(p) + j;
    const double *D = x->b.ederasing + i * p->K, *d = x->b.vderasing + i * p->K,
                 *e = entry_of(a, j, 1), *k = entry_of(a, j, 0);
    const double writes = dp_entry_gates(dp_row_of(p, j)->write),
                 reads = dp_entry_gates(dp_chunk_read(p, j));
    for (int c = 0; c < p->K && (reads != 0 || writes != 0); c++) {
        const int64_t at = (int64_t)a->t * p->K + c;
        if (reads != 0) {
            x->b.dg[at] += dp_pw(r, reads * e[c]) * D[c] +
                           dp_pw(r, reads * (a->in.erasing + 3 * r->u) * e[c] * d[c]);
            x->b.vdg[at] += reads * e[c] * d[c];
        }
        if (writes != 0)
            x->b.dg[at] += dp_pw(r, writes * k[c]) * x->b.dk[i] +
                           dp_pw(r, writes * (a->in.k + 4 * r->u) * k[c] * x->b.ndk[i]);
        x->b.dg[at] += dp_pw(r, r->u * x->b.vdg[at]);
    }
}

/* dv and dwrite: what stands beside each in the values of rows. */
static double value_through(const rows_token *a, int j, int of) {
    const dp_rounding *r = &a->x->w->r;
    const dp_problem *p = a->x->w->ref->p;
    const dp_entry e = dp_row_of(p, j)->value;
    const int64_t i = (int64_t)a->t * dp_rows(p) + j;
    const int has = dp_entry_has(e, of);
    double most = 0;
    for (int v = 0; v < p->V && has; v++) {
        double y = has;
        for (int m = 0, own = 1; m < e.n; m++) {
            const int64_t t = dp_factor_token(p, e.of[m], a->row / p->HV);
            if (own && e.of[m] == of)
                own = 0;
            else
                y *= t < 0
                         ? 0
                         : dp_input_of(p, dp_factor_input(e.of[m]))[(t * p->HV + a->hv) * p->V + v];
        }
        most = fmax(most, fabs(y));
    }
    const double own = e.n > 1 ? a->in.v + r->u + r->us : r->u + r->us;
    return has ? dp_pw(r, most) * a->x->b.dv[i] + dp_pw(r, own * most * a->x->b.ndv[i]) : 0;
}

/* The relative error that a key's gradient gets from its norm; y: of entries, row: of 1/norm. */
static double through_norm(const dp_rounding *r, int K, double y, double row) {
    return 4 * (y + row) + 2 * dp_sum_error(r, K) + 6 * r->u + r->input;
}

/* The gradient of one factor: all rows of a token. Through its norm, if it has one, the error is
 * multiplied by 1/norm of its own token, and has that of the norm's gradient more. */
static double of_rows(const rows_token *a, int factor) {
    const dp_sim *s = a->x->w->ref;
    const dp_rounding *r = &a->x->w->r;
    const dp_problem *p = s->p;
    const int of = dp_factor_input(factor);
    const int64_t t = dp_factor_token(p, factor, a->row / p->HV);
    double sum = 0, size = 0;
    for (int j = 0; j < dp_rows(p); j++)
        sum += of == DP_INPUT_BETA || of == DP_INPUT_NUMBER ? number_through(a, j, factor)
               : dp_is_value(of)                            ? value_through(a, j, factor)
                                                            : row_through(a, j, factor, &size);
    if (t < 0 || !s->units.rstd[of]) return sum;
    const double eps = through_norm(r, p->K, 3 * r->u + r->us, of_norm(p, r)) + r->u + r->us;
    return dp_pw(r, dp_norm_across(p) * s->units.rstd[of][t * p->HV + a->hv]) *
           (sum + dp_pw(r, eps * size));
}

/* The gradient of angles through the rotations of a token's queries and keys. An error is |x| times
 * that of its gradient, and the error of x itself. */
static double angles_of(const rows_token *a, int previous) {
    const dp_error_bound_base *w = a->x->w;
    const dp_sim *s = w->ref;
    const dp_problem *p = s->p;
    const dp_rounding *r = &w->r;
    const int K = p->K, n = dp_rows(p);
    double sum = 0;
    for (int j = previous ? 0 : -1; j < n; j++) {
        const int key = j < 0 ? 0 : dp_entry_rotated(dp_recurrence_of(p), dp_row_of(p, j)->write);
        const int64_t i = (int64_t)a->t * n + j;
        if (key < 0 || (j >= 0 && (key & DP_PREVIOUS ? 1 : 0) != previous)) continue;
        const double *b = j < 0 ? a->x->b.dq + a->t : a->x->b.dk + i,
                     *size = j < 0 ? a->x->b.ndq + a->t : a->x->b.ndk + i;
        const double x = dp_norm_fro(K, j < 0 ? s->q + a->row * K : entry_of(a, j, 0)),
                     eps =
                         (j < 0 ? a->in.q : a->in.k) + turning(a, j < 0 ? 0 : j) + 4 * r->u + r->us;
        sum += dp_pw(r, x) * *b + dp_pw(r, eps * x * *size);
    }
    return sum;
}

/* All inputs of a token's rows, of one value head; later: what they say of the token before. */
static void own_rows(group_work *x, int hv, double **later) {
    const dp_problem *p = x->w->ref->p;
    const dp_rounding *r = &x->w->r;
    rows_token a = {.x = x, .in = x->w->in, .hv = hv};
    a.in.k += a.in.qk_row; /* a product has one error for its row, too */
    a.in.erasing += a.in.qk_row;
    for (a.t = 0; a.t < x->c; a.t++) {
        a.row = (x->gr->t0 + a.t) * p->HV + hv;
        for (int f = 0; f < DP_NRESULTS; f++) {
            const int of = (int)dp_result_fields[f].of;
            if (dp_result_fields[f].role != DP_ROLE_GRADIENT || !dp_result_exists(p, f) ||
                of == DP_INPUT_Q || of == DP_INPUT_G || dp_result_fields[f].kind != DP_OF_TOKENS)
                continue;
            const int angle = of == DP_INPUT_ANGLE;
            x->out->row[f][a.row] = dp_bound_final(r, angle ? angles_of(&a, 0) : of_rows(&a, of));
            if (later[f])
                later[f][a.row] =
                    dp_bound_final(r, angle ? angles_of(&a, 1) : of_rows(&a, of | DP_PREVIOUS));
        }
        for (int j = 0; j < dp_rows(p); j++)
            gate_through(&a, j);
    }
}

/* Adds what each token says of the one before it. */
static void add_later(const dp_error_bound_base *w, double *const *later, dp_error_bound *out) {
    const dp_problem *p = w->ref->p;
    for (int f = 0; f < DP_NRESULTS; f++)
        for (int64_t row = 0; later[f] && row < p->T * p->HV; row++) {
            const int64_t t = dp_token_before(p, row / p->HV);
            double *to = &out->row[f][t * p->HV + row % p->HV];
            if (t >= 0) *to = w->r.p == 2 ? dp_hypot(*to, later[f][row]) : *to + later[f][row];
        }
}

/* Errors of angles: those of all tokens from each on, one after another (an error of the state
 * reaches them all), and of their sum. */
static void add_angles(const dp_error_bound_base *w, dp_error_bound *out) {
    const dp_problem *p = w->ref->p;
    double *row = out->row[DP_RESULT_DANGLE];
    for (int s = 0; s < p->Nseq; s++)
        for (int64_t i = p->cu[s + 1] * p->HV - p->HV - 1; i >= p->cu[s] * p->HV; i--)
            row[i] += row[i + p->HV] * (1 + w->r.u);
}

/* Rows of dq or dk of one head, of the raw inputs. */
static void key_rows(const group_work *x, const key_side *a, int h) {
    const dp_error_bound_base *w = x->w;
    const dp_problem *p = w->ref->p;
    const dp_rounding *r = &w->r;
    const int K = p->K;
    const dp_input_error in = w->in;
    const int normed = dp_is_normed(p, a->qkv == DP_QKV_Q ? DP_INPUT_Q : DP_INPUT_K);
    const double eps = (normed ? through_norm(r, K, in.q, in.qk_row) : 0) + r->u + r->us;
    for (int i = 0; i < a->rows; i++) {
        const int64_t row = ((x->gr->t0 + i / a->R) * p->H + h) * a->R + i % a->R;
        const double moved = normed ? 8 * raw_error_norm(a->x, a->raw, row, K) : 0;
        const double D = a->sum[(h * 2) * a->rows + i], norm = a->sum[(h * 2 + 1) * a->rows + i],
                     by = normed ? a->rstd[row] * dp_norm_across(p) : a->rstd[row];
        x->out->row[a->result][row] =
            dp_bound_final(r, dp_pw(r, by) * (D + dp_pw(r, (eps + moved) * norm)));
        if (x->each)
            entries(w, a->x, row, a->rstd[row], a->entry + ((int64_t)h * a->rows + i) * K,
                    dp_G(p) * r->u * norm, (eps + moved) * norm, x->out->entry[a->qkv],
                    x->out->rest[a->qkv]);
    }
}

/* Gradients of activated inputs without errors, but for strengths. */
static void without_errors(const group_work *x) {
    const dp_problem *p = x->w->ref->p;
    const struct {
        double *D;
        int64_t n;
    } part[] = {{x->b.dq, x->c},
                {x->b.dk, x->n},
                {x->b.dv, x->n},
                {x->b.dg, (int64_t)x->c * p->K},
                {x->b.ederasing, (int64_t)x->n * p->K},
                {x->b.edv, (int64_t)x->n * p->V}};
    for (size_t i = 0; i < sizeof part / sizeof *part; i++)
        if (part[i].D) memset(part[i].D, 0, sizeof(double) * (size_t)part[i].n);
}

/* ps NULL: of the activations alone. */
static void gradients(const dp_error_bound_base *w, int g, const dp_pass_errors *ps,
                      dp_error_bound *out, gate_sums *sums, double **later) {
    const dp_sim *s = w->ref;
    const dp_problem *p = s->p;
    const int rows = dp_by_rows(p);
    group_work x = {.w = w,
                    .gr = &s->group[g],
                    .out = out,
                    .c = s->group[g].c,
                    .n = s->group[g].c * dp_rows(p),
                    .each = out->entry[DP_QKV_Q] != NULL};
    group_open(&x);
    DP_OWN double *none =
        dp_doubles(ps ? 0 : dp_state_error_size(&w->r, p->K, p->V) + (int64_t)x.n * p->V);
    for (int hv = 0; hv < p->HV; hv++) {
        const int64_t z = (int64_t)g * p->HV + hv;
        DP_OWN double *dout = do_of(w, g, hv);
        if (ps)
            dp_bound_grads(&w->b[z], dout, ps->eS[z], ps->edS[z], ps->DX[z], ps->DdX[z], &x.b);
        else
            dp_bound_grads(&w->b[z], dout, none, none, none, none, &x.b);
        if (!ps) without_errors(&x);
        if (dp_by_gates(p)) erasing_rows(&x, hv);
        if (rows) own_rows(&x, hv, later);
        add_head(&x, &x.q, hv, x.b.dq, x.b.ndq, x.b.edq);
        if (!rows) add_head(&x, &x.k, hv, x.b.dk, x.b.ndk, x.b.edk);
        for (int t = 0; t < x.c; t++)
            raw_gate(w, x.gr->t0 + t, hv, x.b.dg + (int64_t)t * p->K, x.b.vdg + (int64_t)t * p->K,
                     out, sums);
        if (!s->values) value_rows(&x, hv);
    }
    for (int h = 0; h < p->H; h++) {
        key_rows(&x, &x.q, h);
        if (!rows) key_rows(&x, &x.k, h);
    }
    group_close(&x);
}

/* A sum over tokens of one entry: sums over chunks of errors and of absolute values. */
static double token_sum(const dp_error_bound_base *w, double root, double absolute) {
    const int tokens = (int)fmin((double)w->ref->p->T + dp_Kg(w->ref->p) + w->ref->N, 1 << 22);
    const dp_rounding *r = &w->r;
    return dp_bound_final(r, root * root + dp_pw(r, dp_sum_error(r, tokens) * absolute));
}

/* dA_log and ddt_bias of one value head. */
static void head_sums(const dp_error_bound_base *w, const gate_sums *a, int hv,
                      dp_error_bound *out) {
    const int Kg = dp_Kg(w->ref->p), ng = w->ref->ngroup;
    double A = 0, Aabs = 0, row = 0;
    for (int g = 0; g < ng; g++) {
        A += sqrt(a[g].A[hv]);
        Aabs += a[g].Aabs[hv];
    }
    for (int c = 0; c < Kg; c++) {
        double B = 0, Babs = 0;
        for (int g = 0; g < ng; g++) {
            B += sqrt(a[g].B[hv * Kg + c]);
            Babs += a[g].Babs[hv * Kg + c];
        }
        B = token_sum(w, B, Babs);
        row += B * B;
    }
    if (out->row[DP_RESULT_DA_LOG]) out->row[DP_RESULT_DA_LOG][hv] = token_sum(w, A, Aabs);
    if (out->row[DP_RESULT_DDT_BIAS]) out->row[DP_RESULT_DDT_BIAS][hv] = sqrt(row);
}

/* Bounds of the rows of all gradients; p = 2 alone. */
static void bound_gradients(const dp_error_bound_base *w, const dp_pass_errors *ps,
                            dp_error_bound *out) {
    const dp_problem *p = w->ref->p;
    const int64_t size = (int64_t)p->HV * dp_Kg(p);
    const int ng = w->ref->ngroup;
    DP_OWN gate_sums *a = dp_calloc((size_t)ng, sizeof *a);
    double *later[DP_NRESULTS] = {0};
    for (int f = 0; f < DP_NRESULTS && dp_recurrence_looks_back(dp_recurrence_of(p)); f++)
        if (out->row[f] && dp_result_fields[f].role == DP_ROLE_GRADIENT &&
            dp_result_fields[f].kind == DP_OF_TOKENS)
            later[f] = dp_doubles(p->T * p->HV);
#pragma omp parallel for schedule(dynamic, 1)
    for (int g = 0; g < ng; g++) {
        a[g] =
            (gate_sums){dp_doubles(p->HV), dp_doubles(p->HV), dp_doubles(size), dp_doubles(size)};
        gradients(w, g, ps, out, &a[g], later);
    }
    add_later(w, later, out);
    if (p->angle) add_angles(w, out);
    for (int f = 0; f < DP_NRESULTS; f++)
        free(later[f]);
    for (int hv = 0; hv < p->HV; hv++)
        head_sums(w, a, hv, out);
    for (int g = 0; g < ng; g++) {
        DP_FREE(a[g].A, a[g].Aabs, a[g].B, a[g].Babs);
    }
}

void dp_error_bound_activations(const dp_error_bound_base *w, dp_error_bound *out) {
    dp_error_bound_alloc(w->ref->p, w->ref->N, 1, 0, out);
    bound_gradients(w, NULL, out);
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
    /* the chain starts at I: its first factor is rounded too */
    DP_OWN double *P = dp_identity(K), *Q = dp_doubles(KK), *M = dp_doubles(KK),
                  *D = dp_doubles(KK);
    double bias = 0;
    for (int i = 0; i < n; i++) {
        const int g = span.trans ? span.g1 - 1 - i : span.g0 + i;
        const dp_chunk_bound *cb = &w->b[(int64_t)g * w->ref->p->HV + span.hv];
        chain_factor(cb, K, span.trans, M, D);
        const dp_factor_error x = dp_factor_error_of(cb, span.trans);
        dp_bound_chain_step(&w->r, span.format, K, M, D, &x, cb->mu, P, e.b, &bias);
        dp_mm(DP_FP64, 0, 0, K, K, K, M, P, Q);
        dp_swap(&P, &Q);
        e.fro = dp_chain_error_norm(&w->r, K, e.b) + bias;
        if (traj && (i & (i + 1)) == 0) *traj++ = e.fro;
    }
    e.bias = bias / DP_LAMBDA;
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
        DP_OWN double *e = sub == entered && e_in ? dp_copy(e_in, size) : dp_doubles(size);
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
        if (backward) bound_gradients(w, &ps, out);
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
                                        w->pair_rows ? DP_FP64 : chain};
            dp_chain_error *x = &(back ? bdM : bM)[i];
            if (back ? s->ctx[r].is_first : s->ctx[r].is_last) continue;
            *x = dp_chain_error_of(w, span,
                                   !back && r == s->traj_rank && HV == 1 ? out->traj : NULL);
            if (w->pair_rows) {
                dp_pair_error y = pair_rows_error(w, span.g0, span.g1, span.hv);
                dp_bound_add_pair(&w->r, K, back, &y, x->b);
                x->fro = dp_chain_error_norm(&w->r, K, x->b);
                dp_pair_error_free(&y);
            }
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
        w->row[i] = out->row[i] ? dp_copy(out->row[i], count_of(p, i, 1)) : NULL;
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
                memcpy(out->row[i], w->row[i], sizeof(double) * (size_t)count_of(p, i, 1));
        dp_free_list(eS, nr);
        dp_free_list(edS, nr);
        return;
    }
    rows_of_pass(w, eS, edS, backward, out);
    keep(w, out, eS, edS);
}

/* ---- bounds of stages --------------------------------------------------------------------------
 * Entrywise powers D of errors as in ref/bound/bound.h, then the 2-norm of a row. For gcum, Akk,
 * Aqk, w, u, kg, qg ref/bound/bound.c derives them. Akk that the base does not store is a subject's
 * own inverse: Akk = |T| (DA + sum_error(n + 1) |A|) |T|, stored once.
 *   h, dh       the error e that reaches the chunk, carried from the errors that enter the rank;
 *               base bf16 may store them in bf16: 2^-8 |h|
 *   v_new       DX + w e     dv_new   DdX + kg e     columns of e by their 2-norms for p = 1
 *   dv_local    DAqk' |do| + (uo |Aqk'||do|, sum_error(c) |Aqk|'|do|) + (u + us) |dv_local| */

static double *inverse_error(const dp_chunk_bound *b) {
    const dp_chunk *ch = b->ch;
    const dp_rounding *r = &b->r;
    const int n = ch->n;
    const double gn = dp_sum_error(r, n + 1);
    DP_OWN double *E = dp_doubles((int64_t)n * n);
    double *D = dp_doubles((int64_t)n * n);
    for (int i = 0; i < n; i++) /* E = |T| (DA + ..) */
        for (int k = 0; k <= i; k++) {
            const double t = dp_pw(r, ch->Akk[(int64_t)i * n + k]);
            for (int j = 0; t && j <= k; j++) {
                const int64_t z = (int64_t)k * n + j;
                E[(int64_t)i * n + j] +=
                    t * (b->DA[z] + dp_pw(r, gn * (k == j ? 1 : ch->beta[k] * ch->L[z])));
            }
        }
    for (int i = 0; i < n; i++)
        for (int k = 0; k <= i; k++)
            for (int j = 0; j <= k; j++)
                D[(int64_t)i * n + j] +=
                    E[(int64_t)i * n + k] * dp_pw(r, ch->Akk[(int64_t)k * n + j]);
    for (int64_t i = 0; i < (int64_t)n * n; i++)
        D[i] += dp_pw(r, (r->u + r->us) * ch->Akk[i]);
    return D;
}

/* D [n][V] += what an error e of the state adds to A [n][K] times it. */
static void through(const dp_rounding *r, const double *A, int n, int K, int V, const double *e,
                    double *D) {
    for (int i = 0; i < n; i++)
        for (int x = 0; x < K; x++) {
            const double a = A[(int64_t)i * K + x];
            for (int v = 0; v < V; v++)
                if (r->p == 2)
                    D[(int64_t)i * V + v] +=
                        a * a * (e[(int64_t)x * V + v] + e[(int64_t)(K + x) * V + v]);
        }
    for (int i = 0; r->p == 1 && i < n; i++) { /* |row of A|_2 times the column's 2-norm */
        const double a = dp_norm_fro(K, A + (int64_t)i * K);
        for (int v = 0; v < V; v++)
            D[(int64_t)i * V + v] += a * e[v];
    }
}

static double *local_gradient_error(const dp_chunk_bound *b, const double *dout) {
    const dp_chunk *ch = b->ch;
    const dp_rounding *r = &b->r;
    const int n = ch->n, V = ch->V;
    DP_OWN double *sum = dp_doubles(V);
    double *D = dp_doubles((int64_t)n * V);
    for (int i = 0; i < n; i++) {
        memset(sum, 0, sizeof(double) * (size_t)V);
        for (int t = i / ch->R; t < ch->c; t++)
            for (int v = 0; v < V; v++) {
                const int64_t z = (int64_t)t * n + i;
                const double a = fabs(ch->Aqk[z]), d = fabs(dout[(int64_t)t * V + v]);
                sum[v] += a * d;
                D[(int64_t)i * V + v] += (b->DAqk[z] + dp_pw(r, r->uo * a)) * dp_pw(r, d);
            }
        for (int v = 0; v < V; v++)
            D[(int64_t)i * V + v] += dp_pw(r, dp_sum_error(r, ch->c) * sum[v]) +
                                     dp_pw(r, (r->u + r->us) * ch->dv_local[(int64_t)i * V + v]) +
                                     dp_pw(r, ch->c * r->tiny);
    }
    return D;
}

static void put_rows(const dp_error_bound_base *w, int g, int hv, int stage, const double *D,
                     double *out) {
    const dp_problem *p = w->ref->p;
    const dp_chunk *ch = w->b[(int64_t)g * p->HV + hv].ch;
    int per;
    int64_t width, stride, used;
    dp_stage_tensor_token_row(p, stage, &per, &width);
    for (int t = 0; t < ch->c; t++)
        for (int j = 0; j < per; j++) {
            dp_stage_tensor_columns(ch, stage, t, width, &stride, &used);
            out[((w->ref->group[g].t0 + t) * p->HV + hv) * per + j] =
                dp_error_fro(&w->r, D + (t * per + j) * stride, used);
        }
}

static void intra_stage(const dp_error_bound_base *w, int stage, int g, int hv, double *out) {
    const dp_chunk_bound *b = &w->b[(int64_t)g * w->ref->p->HV + hv];
    DP_OWN double *own = NULL, *dout = NULL;
    if (stage == DP_AKK && !b->DT) own = inverse_error(b);
    if (stage == DP_DV_LOCAL) {
        dout = do_of(w, g, hv);
        own = local_gradient_error(b, dout);
    }
    put_rows(w, g, hv, stage,
             own                ? own
             : stage == DP_GCUM ? b->Dcum
             : stage == DP_AKK  ? b->DT
             : stage == DP_AQK  ? b->DAqk
             : stage == DP_W    ? b->Dw
             : stage == DP_U    ? b->Du
             : stage == DP_KG   ? b->Dkg
                                : b->Dqg,
             out);
}

/* The state pass of one local sub-sequence, forward or backward, with e carried along. */
static void stage_pass(const dp_error_bound_base *w, int stage, int r, int sub, int hv, double *e,
                       double *out) {
    const dp_sim *s = w->ref;
    const dp_problem *p = s->p;
    const int back = dp_stage_tensors[stage].backward, n = s->first[r][sub + 1] - s->first[r][sub];
    const int64_t size = dp_state_error_size(&w->r, p->K, p->V);
    for (int i = 0; i < n; i++) {
        const int g = dp_error_bound_turn(s, back, r, sub, i);
        const dp_chunk *ch = w->b[(int64_t)g * p->HV + hv].ch;
        DP_OWN double *before = dp_copy(e, size), *D = dp_doubles((int64_t)ch->n * p->V);
        if (dp_stage_tensors[stage].kind == DP_PER_CHUNK)
            out[(int64_t)g * p->HV + hv] =
                dp_state_error_norm(&w->r, p->K, p->V, e) +
                (w->base == DP_BASE_BF16 ? 0x1p-8 * dp_norm_fro((int64_t)p->K * p->V,
                                                                dp_stage_tensor_in_chunk(ch, stage))
                                         : 0);
        dp_error_bound_step(w, back, g, hv, NULL, e, D);
        through(&w->r, back ? ch->kg : ch->w, ch->n, p->K, p->V, before, D);
        if (dp_stage_tensors[stage].kind == DP_PER_TOKEN) put_rows(w, g, hv, stage, D, out);
    }
}

static void carried_stage(const dp_error_bound_base *w, int stage, int r, int hv, double *out) {
    const dp_sim *s = w->ref;
    const int back = dp_stage_tensors[stage].backward, n = s->ctx[r].nlocal;
    double **enter = back ? w->edS : w->eS, *entering = enter ? enter[r * s->p->HV + hv] : NULL;
    const int64_t size = dp_state_error_size(&w->r, s->p->K, s->p->V);
    for (int sub = 0; sub < n; sub++) {
        DP_OWN double *e =
            sub == (back ? n - 1 : 0) && entering ? dp_copy(entering, size) : dp_doubles(size);
        stage_pass(w, stage, r, sub, hv, e, out);
    }
}

double *dp_stage_bound(const dp_error_bound_base *w, int stage) {
    const dp_problem *p = w->ref->p;
    int64_t rows, width;
    assert(dp_stage_tensors[stage].kind != DP_PER_RANK);
    dp_stage_tensor_rows(p, w->ref->N, stage, &rows, &width);
    double *out = dp_doubles(rows);
    if (dp_stage_tensors[stage].carried) {
#pragma omp parallel for schedule(dynamic, 1)
        for (int i = 0; i < w->ref->N * p->HV; i++)
            carried_stage(w, stage, i / p->HV, i % p->HV, out);
        return out;
    }
#pragma omp parallel for schedule(dynamic, 1)
    for (int64_t i = 0; i < (int64_t)w->ref->ngroup * p->HV; i++)
        intra_stage(w, stage, (int)(i / p->HV), (int)(i % p->HV), out);
    return out;
}

static double *bound_of_stage(dp_error_bound_base *w, dp_format chain, int backward, int stage) {
    dp_error_bound b;
    if (dp_stage_tensors[stage].carried) { /* errors that enter the ranks */
        dp_error_bound_run(w, chain, backward, &b);
        dp_error_bound_free(&b);
    }
    return dp_stage_bound(w, stage);
}

double *dp_error_bound_of_reference(dp_error_bound_base *w, dp_sim *ref, int backward, int stage) {
    const dp_design exact = dp_design_of(DP_BASE_FP64);
    if (!w->ref) dp_error_bound_base_init(w, ref, &exact, 1, backward, NULL);
    return bound_of_stage(w, DP_FP64, backward, stage);
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
        smaller(a->row[i], b->row[i], count_of(p, i, 1));
    for (int i = 0; i < DP_RANK_TENSORS; i++)
        smaller(a->rank[i], b->rank[i], (int64_t)N * p->HV);
    smaller(a->traj, b->traj, DP_MAX_TRAJ);
}

void dp_error_bounds_init(dp_error_bounds *w, dp_sim *ref, const dp_design *design, int backward,
                          const dp_raw_error *raw) {
    dp_error_bound_base_init(&w->sound, ref, design, 1, backward, raw);
    dp_error_bound_base_init(&w->probable, ref, design, 2, backward, raw);
}

void dp_error_bounds_run(dp_error_bounds *w, dp_format chain, int backward, dp_error_bound *out) {
    DP_FREED(dp_error_bound_free) dp_error_bound worst;
    dp_error_bound_run(&w->probable, chain, backward, out);
    dp_error_bound_run(&w->sound, chain, backward, &worst);
    smaller_of(w->sound.ref->p, w->sound.ref->N, out, &worst);
}

double *dp_error_bounds_stage(dp_error_bounds *w, dp_format chain, int backward, int stage) {
    int64_t rows, width;
    DP_OWN double *sound = bound_of_stage(&w->sound, chain, backward, stage);
    double *bound = bound_of_stage(&w->probable, chain, backward, stage);
    dp_stage_tensor_rows(w->sound.ref->p, w->sound.ref->N, stage, &rows, &width);
    smaller(bound, sound, rows);
    return bound;
}

void dp_error_bounds_free(dp_error_bounds *w) {
    dp_error_bound_base_free(&w->sound);
    dp_error_bound_base_free(&w->probable);
}

void dp_error_bounds_once(dp_sim *ref, const dp_design *design, dp_format chain, int backward,
                          const dp_raw_error *raw, dp_error_bound *out) {
    DP_FREED(dp_error_bounds_free) dp_error_bounds w;
    dp_error_bounds_init(&w, ref, design, backward, raw);
    dp_error_bounds_run(&w, chain, backward, out);
}
