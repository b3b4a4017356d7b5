/* Bounds of the errors of stage tensors, and their judgement (stage_bound.h). */
#include "stage_bound.h"
#include "harness/bound/error_bound_impl.h"

#include <assert.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

/* ---- bounds -------------------------------------------------------------------------------------
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
    double *D = dp_doubles((int64_t)n * n), *E = dp_doubles((int64_t)n * n);
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
    free(E);
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
    double *D = dp_doubles((int64_t)n * V), *sum = dp_doubles(V);
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
    free(sum);
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
    double *own = NULL, *dout = NULL;
    if (stage == DP_AKK && !b->DT) own = inverse_error(b);
    if (stage == DP_DV_LOCAL) {
        dout = dp_doubles((int64_t)b->ch->c * b->ch->V);
        dp_sim_gather_do(w->ref, g, hv, dout);
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
    free(own);
    free(dout);
}

/* The state pass of one local sub-sequence, forward or backward, with e carried along. */
static void pass(const dp_error_bound_base *w, int stage, int r, int sub, int hv, double *e,
                 double *out) {
    const dp_sim *s = w->ref;
    const dp_problem *p = s->p;
    const int back = dp_stage_tensors[stage].backward, n = s->first[r][sub + 1] - s->first[r][sub];
    const int64_t size = dp_state_error_size(&w->r, p->K, p->V);
    for (int i = 0; i < n; i++) {
        const int g = dp_error_bound_turn(s, back, r, sub, i);
        const dp_chunk *ch = w->b[(int64_t)g * p->HV + hv].ch;
        double *before = dp_copy(e, size), *D = dp_doubles((int64_t)ch->n * p->V);
        if (dp_stage_tensors[stage].kind == DP_PER_CHUNK)
            out[(int64_t)g * p->HV + hv] =
                dp_state_error_norm(&w->r, p->K, p->V, e) +
                (w->base == DP_BASE_BF16 ? 0x1p-8 * dp_norm_fro((int64_t)p->K * p->V,
                                                                dp_stage_tensor_in_chunk(ch, stage))
                                         : 0);
        dp_error_bound_step(w, back, g, hv, NULL, e, D);
        through(&w->r, back ? ch->kg : ch->w, ch->n, p->K, p->V, before, D);
        if (dp_stage_tensors[stage].kind == DP_PER_TOKEN) put_rows(w, g, hv, stage, D, out);
        free(before);
        free(D);
    }
}

static void carried_stage(const dp_error_bound_base *w, int stage, int r, int hv, double *out) {
    const dp_sim *s = w->ref;
    const int back = dp_stage_tensors[stage].backward, n = s->ctx[r].nlocal;
    double **enter = back ? w->edS : w->eS, *entering = enter ? enter[r * s->p->HV + hv] : NULL;
    const int64_t size = dp_state_error_size(&w->r, s->p->K, s->p->V);
    for (int sub = 0; sub < n; sub++) {
        double *e =
            sub == (back ? n - 1 : 0) && entering ? dp_copy(entering, size) : dp_doubles(size);
        pass(w, stage, r, sub, hv, e, out);
        free(e);
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

/* ---- judging --------------------------------------------------------------------------------- */

typedef struct {
    const dp_sim *s;
    int *group_of, per, chunk;
} places; /* group_of [T] */

static void place(const void *ctx, int64_t row, dp_place *at) {
    const places *x = ctx;
    const int HV = x->s->p->HV;
    const int64_t t = x->chunk ? x->s->group[row / HV].t0 : row / ((int64_t)HV * x->per);
    const int g = x->chunk ? (int)(row / HV) : x->group_of[t];
    const dp_group *gr = &x->s->group[g];
    *at = (dp_place){.rank = gr->rank,
                     .head = (int)(x->chunk ? row % HV : row / x->per % HV),
                     .sequence = x->s->ctx[gr->rank].local_seq[gr->sub],
                     .chunk = g,
                     .token = t};
}

void dp_stage_judge(const dp_sim *ref, int stage, dp_compare_in in, dp_judgement *out) {
    const dp_problem *p = ref->p;
    const int by_chunk = dp_stage_tensors[stage].kind == DP_PER_CHUNK;
    int64_t rows, width;
    dp_stage_tensor_rows(p, ref->N, stage, &rows, &width);
    const int per = by_chunk ? 1 : (int)(rows / (p->T * p->HV));
    places pl = {
        .s = ref, .group_of = dp_calloc((size_t)p->T, sizeof(int)), .per = per, .chunk = by_chunk};
    for (int g = 0; g < ref->ngroup; g++)
        for (int i = 0; i < ref->group[g].c; i++)
            pl.group_of[ref->group[g].t0 + i] = g;
    double *want = dp_stage_tensor_value(ref, stage), *seen = dp_copy(in.got, rows * width);
    if (stage == DP_AKK || stage == DP_AQK)
        for (int64_t r = 0; r < rows; r++) { /* what lies above the diagonal means nothing */
            const int64_t token = r / ((int64_t)p->HV * per),
                          used = (token - ref->group[pl.group_of[token]].t0 + 1) * dp_rows(p);
            for (int64_t i = used; i < width; i++)
                seen[r * width + i] = 0;
        }
    in.name = dp_stage_tensors[stage].name;
    in.heads = p->HV;
    in.rows = rows;
    in.width = width;
    in.got = seen;
    in.want = want;
    in.place = place;
    in.ctx = &pl;
    in.tokens = by_chunk ? 0 : p->T;
    in.subrows = by_chunk ? p->K : 1;
    dp_compare(&in, out);
    free(want);
    free(seen);
    free(pl.group_of);
}
