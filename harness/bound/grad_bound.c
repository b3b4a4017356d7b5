/* Errors of the gradients of all tokens and heads, through the activations to the raw inputs. */
#include "error_bound_impl.h"
#include "ref/arithmetic/elementary.h"
#include "ref/vocabulary/recurrence.h"

#include <string.h>

/* Through the activations (math.md c):
 *   L2 norm  dx = rstd (dy - y <y, dy>): the projection does not lengthen, so
 *              |error| <= rstd (|error of dy| + (4 e_y + 2 gamma_K + 6u) |dy|), where dy is
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
                         (p->gate == DP_GATE_SOFTPLUS ? dp_pw(r, ge.Dg * v) : 0) +
                         dp_pw(r, r->tiny);
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
 * = rstd (dy_d - y_d <y, dy>) follow each D_d and y_d times those of the inner product. Errors
 * known for the row as a whole, a and b, stay so. */
static void entries(const dp_error_bound_base *w, const double *x, int64_t row, double rstd,
                    const double *D, double a, double b, double *entry, double *rest) {
    const dp_problem *p = w->ref->p;
    const dp_rounding *r = &w->r;
    const int K = p->K;
    double inner = 0;
    const int normed = dp_is_normed(p, x == p->q ? DP_INPUT_Q : DP_INPUT_K);
    for (int d = 0; normed && d < K; d++)
        inner += dp_pw(r, x[row * K + d] * rstd) * D[d];
    for (int d = 0; d < K; d++)
        entry[row * K + d] =
            dp_pw(r, rstd) * (D[d] + (normed ? dp_pw(r, x[row * K + d] * rstd) * inner : 0));
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
    dp_grad_bound b;         /* of one value head, in buf and one */
    double *buf, *one, *two; /* two: of erasing keys */
} group_work;

static key_side side_of(const group_work *x, int qkv, int R) {
    const dp_sim *s = x->w->ref;
    const dp_problem *p = s->p;
    const int is_q = qkv == DP_QKV_Q;
    key_side a = {.x = is_q ? p->q : p->k,
                  .raw = is_q ? x->w->raw_error.q : x->w->raw_error.k,
                  .rstd = is_q ? s->rstd_q : s->rstd_k,
                  .result = is_q ? DP_RESULT_DQ : DP_RESULT_DK,
                  .qkv = qkv,
                  .R = R,
                  .rows = x->c * R};
    a.sum = dp_doubles((int64_t)p->H * 2 * a.rows);
    a.entry = dp_doubles(x->each ? (int64_t)p->H * p->K * a.rows : 0);
    return a;
}

static void group_open(group_work *x) {
    const dp_problem *p = x->w->ref->p;
    const int64_t c = x->c, n = x->n, K = p->K;
    x->q = side_of(x, DP_QKV_Q, 1);
    x->k = side_of(x, DP_QKV_K, dp_rows(p));
    double *buf = x->buf = dp_doubles(2 * c + 6 * n + 2 * c * K);
    x->b = (dp_grad_bound){.dq = buf,
                           .ndq = buf + c,
                           .dk = buf + 2 * c,
                           .ndk = buf + 2 * c + n,
                           .dv = buf + 2 * c + 2 * n,
                           .ndv = buf + 2 * c + 3 * n,
                           .dbeta = buf + 2 * c + 4 * n,
                           .vdbeta = buf + 2 * c + 5 * n,
                           .dg = buf + 2 * c + 6 * n,
                           .vdg = buf + 2 * c + 6 * n + c * K};
    if (dp_by_gates(p) || dp_by_rows(p)) {
        x->two = dp_doubles(2 * n * K + 2 * n * p->V);
        x->b.ederasing = x->two;
        x->b.vderasing = x->two + n * K;
        x->b.edv = x->two + 2 * n * K;
        x->b.vdv = x->two + 2 * n * K + n * p->V;
    }
    x->one = dp_doubles(x->each ? c * K + n * (K + p->V) : 0);
    if (!x->each) return;
    x->b.edq = x->one;
    x->b.edk = x->one + c * K;
    x->b.edv = x->one + (c + n) * K;
}

static void group_close(group_work *x) {
    double *a[] = {x->buf, x->one, x->two, x->q.sum, x->q.entry, x->k.sum, x->k.entry};
    for (size_t i = 0; i < sizeof a / sizeof *a; i++)
        free(a[i]);
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
        const double zf = p->beta_form == DP_BETA_SIGMOID2 ? 2 : 1,
                     sg = dp_error_bound_sigmoid(p->beta[row]);
        db = dp_pw(r, zf * sg * (1 - sg)) * db + dp_pw(r, 6 * r->u * zf * sg * val) +
             dp_pw(r, r->tiny);
        val *= zf * sg * (1 - sg);
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

double dp_error_bound_factor(const dp_problem *p, const double *gates, int64_t row, int of, int x) {
    const int hv = (int)(row % p->HV);
    const int64_t t = dp_factor_token(p, of, row / p->HV), at = t * p->HV + hv;
    const double g = gates[row * dp_Kg(p) + (dp_Kg(p) > 1 ? x : 0)];
    if (DP_FACTOR_RATE(of) != 0) return dp_exp(DP_FACTOR_RATE(of) * g);
    if (t < 0) return 0;
    of = dp_factor_input(of);
    return of == DP_INPUT_BETA     ? p->beta[at]
           : of == DP_INPUT_NUMBER ? p->number[at]
                                   : dp_input_of(p, of)[at * p->K + x];
}

static double factor_of(const rows_token *a, int of, int x) {
    const dp_sim *s = a->x->w->ref;
    return dp_error_bound_factor(&s->units.p, s->g, a->row, of, x);
}

/* |the product of an entry's factors but `of`| at channel x: from the entry itself where neither a
 * rotation nor another token is in it. */
static double others(const rows_token *a, dp_entry e, int j, int reads, int of, int x) {
    const dp_problem *p = a->x->w->ref->p;
    const int itself = dp_entry_rotated(dp_recurrence_of(p), e) < 0 && !dp_entry_looks_back(e);
    const double given = factor_of(a, of, x);
    double y = 1;
    if (given != 0 && itself) return fabs(entry_of(a, j, reads)[x] / given);
    for (int m = 0, own = 1; m < e.n; m++) {
        if (own && e.of[m] == of)
            own = 0;
        else
            y *= factor_of(a, e.of[m], x);
    }
    return fabs(reads && dp_recurrence_of(p)->before ? y * factor_of(a, DP_FACTOR_GROWTH, x) : y);
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
    const dp_token_row *row = dp_row_of(p, j);
    const int64_t i = (int64_t)a->t * dp_rows(p) + j;
    const double *D = a->x->b.ederasing + i * p->K, *d = a->x->b.vderasing + i * p->K;
    const int writes = dp_entry_has(row->write, of), reads = dp_entry_has(row->read, of);
    double sum = 0, most = writes && row->write.n == 1 ? 1 : 0, norm = 0;
    for (int x = 0; x < p->K && reads; x++) {
        const double f = reads * others(a, row->read, j, 1, of, x);
        norm += f * d[x] * f * d[x];
        sum += dp_pw(r, f) * D[x] + dp_pw(r, (a->in.erasing + 2 * r->u + r->us) * f * d[x]);
    }
    for (int x = 0; x < p->K && writes && row->write.n > 1; x++)
        most = fmax(most, writes * others(a, row->write, j, 0, of, x));
    const double own =
        (row->write.n > 1 ? a->in.k + 2 * r->u + r->us : r->u + r->us) + turning(a, j);
    *size += sqrt(norm) + most * a->x->b.ndk[i];
    return writes ? sum + dp_pw(r, most) * a->x->b.dk[i] + dp_pw(r, own * most * a->x->b.ndk[i])
                  : sum;
}

/* The same of a number: strengths, and sums over the channels of entries. */
static double number_through(const rows_token *a, int j, int of) {
    const dp_rounding *r = &a->x->w->r;
    const dp_problem *p = a->x->w->ref->p;
    const dp_token_row *row = dp_row_of(p, j);
    const int64_t i = (int64_t)a->t * dp_rows(p) + j;
    const double *D = a->x->b.ederasing + i * p->K, *d = a->x->b.vderasing + i * p->K;
    const int in_strength = dp_entry_has(row->strength, of);
    double write = 0, read = 0, error = 0, size = 0, beside = 1;
    for (int x = 0; x < p->K; x++) {
        const double w = dp_entry_has(row->write, of) ? others(a, row->write, j, 0, of, x) : 0,
                     e = dp_entry_has(row->read, of) ? others(a, row->read, j, 1, of, x) : 0;
        write += w * w;
        read += e * e;
        error += D[x];
        size += d[x] * d[x];
    }
    for (int m = 0, own = 1; m < row->strength.n && in_strength; m++) {
        if (own && row->strength.of[m] == of)
            own = 0;
        else
            beside *= factor_of(a, row->strength.of[m], 0);
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
    const dp_token_row *row = dp_row_of(p, j);
    const int64_t i = (int64_t)a->t * dp_rows(p) + j;
    const double *D = x->b.ederasing + i * p->K, *d = x->b.vderasing + i * p->K,
                 *e = entry_of(a, j, 1), *k = entry_of(a, j, 0);
    const double writes = dp_entry_gates(row->write),
                 reads =
                     row->read.sign ? dp_entry_gates(row->read) - dp_recurrence_of(p)->before : 0;
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
    const double row = dp_sum_error(r, p->K) / 2 + 4 * r->u,
                 eps = through_norm(r, p->K, 3 * r->u + r->us, row) + r->u + r->us;
    return dp_pw(r, s->units.rstd[of][t * p->HV + a->hv]) * (sum + dp_pw(r, eps * size));
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
        const double moved = normed ? 8 * dp_raw_error_norm(a->x, a->raw, row, K) : 0;
        const double D = a->sum[(h * 2) * a->rows + i], norm = a->sum[(h * 2 + 1) * a->rows + i];
        x->out->row[a->result][row] =
            dp_bound_final(r, dp_pw(r, a->rstd[row]) * (D + dp_pw(r, (eps + moved) * norm)));
        if (x->each)
            entries(w, a->x, row, a->rstd[row], a->entry + ((int64_t)h * a->rows + i) * K,
                    dp_G(p) * r->u * norm, (eps + moved) * norm, x->out->entry[a->qkv],
                    x->out->rest[a->qkv]);
    }
}

static void gradients(const dp_error_bound_base *w, int g, const dp_pass_errors *ps,
                      dp_error_bound *out, gate_sums *sums, double **later) {
    const dp_sim *s = w->ref;
    const dp_problem *p = s->p;
    group_work x = {.w = w,
                    .gr = &s->group[g],
                    .out = out,
                    .c = s->group[g].c,
                    .n = s->group[g].c * dp_rows(p),
                    .each = out->entry[DP_QKV_Q] != NULL};
    double *dout = dp_doubles((int64_t)x.c * p->V);
    group_open(&x);
    for (int hv = 0; hv < p->HV; hv++) {
        const int64_t z = (int64_t)g * p->HV + hv;
        dp_sim_gather_do(s, g, hv, dout);
        dp_bound_grads(&w->b[z], dout, ps->eS[z], ps->edS[z], ps->DX[z], ps->DdX[z], &x.b);
        if (dp_by_gates(p)) erasing_rows(&x, hv);
        if (dp_by_rows(p)) own_rows(&x, hv, later);
        add_head(&x, &x.q, hv, x.b.dq, x.b.ndq, x.b.edq);
        if (!dp_by_rows(p)) add_head(&x, &x.k, hv, x.b.dk, x.b.ndk, x.b.edk);
        for (int t = 0; t < x.c; t++)
            raw_gate(w, x.gr->t0 + t, hv, x.b.dg + (int64_t)t * p->K, x.b.vdg + (int64_t)t * p->K,
                     out, sums);
        if (!dp_by_gates(p) && !dp_by_rows(p)) value_rows(&x, hv);
    }
    for (int h = 0; h < p->H; h++) {
        key_rows(&x, &x.q, h);
        if (!dp_by_rows(p)) key_rows(&x, &x.k, h);
    }
    group_close(&x);
    free(dout);
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

void dp_error_bound_gradients(const dp_error_bound_base *w, const dp_pass_errors *ps,
                              dp_error_bound *out) {
    const dp_problem *p = w->ref->p;
    const int64_t size = (int64_t)p->HV * dp_Kg(p);
    const int ng = w->ref->ngroup;
    gate_sums *a = dp_calloc((size_t)ng, sizeof *a);
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
        free(a[g].A);
        free(a[g].Aabs);
        free(a[g].B);
        free(a[g].Babs);
    }
    free(a);
}
