#include "stage_tensor.h"

#include <assert.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

const dp_stage_tensor_info dp_stage_tensors[DP_NSTAGE_TENSORS] = {
    [DP_GCUM] = {"gcum", {"g_cumsum", "gk_cumsum"}, DP_PER_TOKEN, 0, "[T,HV,K] GDN [T,HV]", "sum of the log decay from the chunk's first token, natural logarithm"},
    [DP_AKK] = {"Akk", {"A_inv"}, DP_PER_TOKEN, 0, "[T,HV,(R,)64R]", "(I + B L)^-1"},
    [DP_AQK] = {"Aqk", {NULL}, DP_PER_TOKEN, 0, "[T,HV,64R]", "q against keys of its chunk, scale and decay included"},
    [DP_W] = {"w", {NULL}, DP_PER_TOKEN, 0, "[T,HV,(R,)K]", "Akk (beta exp(gcum) k)"},
    [DP_U] = {"u", {NULL}, DP_PER_TOKEN, 0, "[T,HV,(R,)V]", "Akk (beta v)"},
    [DP_KG] = {"kg", {NULL}, DP_PER_TOKEN, 0, "[T,HV,(R,)K]", "k decayed to the chunk's end"},
    [DP_QG] = {"qg", {NULL}, DP_PER_TOKEN, 0, "[T,HV,K]", "q exp(gcum), without scale"},
    [DP_M] = {"M", {NULL}, DP_PER_RANK, 0, "[N,HV,K,K]", "transition over the rank's last sub-sequence"},
    [DP_H] = {"H", {NULL}, DP_PER_RANK, 0, "[N,HV,K,V]", "its state from zeros"},
    [DP_S_IN] = {"S_in", {NULL}, DP_PER_RANK, 0, "[N,HV,K,V]", "state that enters the rank"},
    [DP_STATE] = {"h", {NULL}, DP_PER_CHUNK, 0, "[chunks,HV,K,V]", "state before each chunk"},
    [DP_V_NEW] = {"v_new", {NULL}, DP_PER_TOKEN, 0, "[T,HV,(R,)V]", "u - w h"},
    [DP_DV_LOCAL] = {"dv_local", {"dAv"}, DP_PER_TOKEN, 1, "[T,HV,(R,)V]", "Aqk' do"},
    [DP_DS_OUT] = {"dS_out", {NULL}, DP_PER_RANK, 1, "[N,HV,K,V]", "gradient of the state that leaves the rank"},
    [DP_DM] = {"dM", {NULL}, DP_PER_RANK, 1, "[N,HV,K,K]", "adjoint transition over the rank's first sub-sequence"},
    [DP_DH] = {"dH", {NULL}, DP_PER_RANK, 1, "[N,HV,K,V]", "its gradient from zeros"},
    [DP_DSTATE] = {"dh", {NULL}, DP_PER_CHUNK, 1, "[chunks,HV,K,V]", "gradient of the state after each chunk"},
    [DP_DV_NEW] = {"dv_new", {"du", "dv2"}, DP_PER_TOKEN, 1, "[T,HV,(R,)V]", "dv_local + kg dh"},
};

int dp_stage_tensor_find(const char *name) {
    for (int i = 0; i < DP_NSTAGE_TENSORS; i++) {
        if (!strcmp(name, dp_stage_tensors[i].name)) return i;
        for (int j = 0; j < 3 && dp_stage_tensors[i].alias[j]; j++)
            if (!strcmp(name, dp_stage_tensors[i].alias[j])) return i;
    }
    return -1;
}

/* ---- shapes ---------------------------------------------------------------------------------------------------------------------- */

int dp_stage_tensor_chunks(const dp_problem *p, int N, int rank) {
    int64_t n = 0;
    const int64_t L = p->T / N;
    for (int r = rank < 0 ? 0 : rank; r < (rank < 0 ? N : rank + 1); r++)
        for (int i = 0; i < p->Nseq; i++) {
            const int64_t a = p->cu[i] > r * L ? p->cu[i] : r * L, b = p->cu[i + 1] < (r + 1) * L ? p->cu[i + 1] : (r + 1) * L;
            if (b > a) n += (b - a + DP_CHUNK - 1) / DP_CHUNK;
        }
    return (int)n;
}

/* Rows of a token and head, and their width. */
static void token_row(const dp_problem *p, int stage, int *per, int64_t *width) {
    const int keyed = stage == DP_AKK || stage == DP_W || stage == DP_U || stage == DP_KG || stage == DP_V_NEW || stage == DP_DV_LOCAL || stage == DP_DV_NEW;
    *per = keyed ? p->R : 1;
    *width = stage == DP_GCUM ? dp_Kg(p) : stage == DP_AKK || stage == DP_AQK ? (int64_t)DP_CHUNK * p->R : stage == DP_W || stage == DP_KG || stage == DP_QG ? p->K : p->V;
}

static int64_t last_axis(const dp_problem *p, int stage) { return stage == DP_M || stage == DP_DM ? p->K : p->V; }

int dp_stage_tensor_shape(const dp_problem *p, int N, int stage, int64_t s[5]) {
    int per, n = 0;
    int64_t width;
    if (dp_stage_tensors[stage].kind == DP_PER_TOKEN) {
        token_row(p, stage, &per, &width);
        s[n++] = p->T, s[n++] = p->HV;
        if (per > 1) s[n++] = per;
        s[n++] = width;
        return n;
    }
    s[0] = dp_stage_tensors[stage].kind == DP_PER_RANK ? N : dp_stage_tensor_chunks(p, N, -1), s[1] = p->HV, s[2] = p->K, s[3] = last_axis(p, stage);
    return 4;
}

int64_t dp_stage_tensor_size(const dp_problem *p, int N, int stage) {
    int64_t s[5], n = 1;
    for (int i = dp_stage_tensor_shape(p, N, stage, s); i > 0; i--) n *= s[i - 1];
    return n;
}

void dp_stage_tensor_rows(const dp_problem *p, int N, int stage, int64_t *rows, int64_t *width) {
    int per;
    if (dp_stage_tensors[stage].kind == DP_PER_TOKEN) {
        token_row(p, stage, &per, width);
        *rows = p->T * p->HV * per;
    } else {
        *width = (int64_t)p->K * last_axis(p, stage);
        *rows = dp_stage_tensor_size(p, N, stage) / *width;
    }
}

/* ---- values ----------------------------------------------------------------------------------------------------------------------- */

static const double *in_chunk(const dp_chunk *ch, int stage) {
    switch (stage) {
    case DP_GCUM: return ch->gcum;
    case DP_AKK: return ch->Akk;
    case DP_AQK: return ch->Aqk;
    case DP_W: return ch->w;
    case DP_U: return ch->u;
    case DP_KG: return ch->kg;
    case DP_QG: return ch->qg;
    case DP_STATE: return ch->h;
    case DP_V_NEW: return ch->v_new;
    case DP_DV_LOCAL: return ch->dvl;
    case DP_DSTATE: return ch->dh;
    case DP_DV_NEW: return ch->dX;
    default: return NULL;
    }
}

/* Columns of row (token s of the chunk) in the chunk's own array, and how many of them count: up to the block diagonal. */
static void columns(const dp_chunk *ch, int stage, int s, int64_t width, int64_t *stride, int64_t *used) {
    const int square = stage == DP_AKK || stage == DP_AQK;
    *stride = square ? ch->n : stage == DP_GCUM ? ch->K : width;
    *used = square ? (int64_t)(s + 1) * ch->R : width;
}

/* The chunk solver raises steps below its floor (exp is 0 there all the same), which gcum itself must not show: rows behind one are summed again. */
static void sum_again(const dp_sim *s, int g, int hv, int t, int Kg, double *row) {
    for (int x = 0; x < Kg; x++) {
        double sum = 0, lowest = 0;
        for (int i = 0; i <= t; i++) {
            const double step = s->g[((s->group[g].t0 + i) * s->p->HV + hv) * Kg + x];
            sum = dp_round_arith(s->base, sum + step);
            lowest = fmin(lowest, step);
        }
        if (lowest < dp_gate_floor(s->base)) row[x] = sum;
    }
}

static double *per_token(const dp_sim *s, int stage) {
    const dp_problem *p = s->p;
    int per;
    int64_t width, stride, used;
    token_row(p, stage, &per, &width);
    double *x = dp_doubles(p->T * p->HV * per * width);
    for (int g = 0; g < s->ngroup; g++)
        for (int hv = 0; hv < p->HV; hv++) {
            dp_chunk *ch = dp_sim_chunk(s, g, hv);
            if (stage == DP_AKK) dp_chunk_inverse(ch);
            for (int t = 0; t < ch->c; t++)
                for (int j = 0; j < per; j++) {
                    columns(ch, stage, t, width, &stride, &used);
                    double *row = x + (((s->group[g].t0 + t) * p->HV + hv) * per + j) * width;
                    memcpy(row, in_chunk(ch, stage) + (t * per + j) * stride, sizeof(double) * (size_t)used);
                    if (stage == DP_GCUM) sum_again(s, g, hv, t, (int)width, row);
                }
        }
    return x;
}

double *dp_stage_tensor_value(const dp_sim *s, int stage) {
    const dp_problem *p = s->p;
    int64_t rows, width;
    if (dp_stage_tensors[stage].kind == DP_PER_TOKEN) return per_token(s, stage);
    dp_stage_tensor_rows(p, s->N, stage, &rows, &width);
    double *x = dp_doubles(rows * width), **list = stage == DP_M ? s->M : stage == DP_H ? s->H : stage == DP_S_IN ? s->S_in : stage == DP_DS_OUT ? s->dS_out : stage == DP_DM ? s->dM : s->dH;
    for (int64_t i = 0; i < rows; i++) {
        const double *from = dp_stage_tensors[stage].kind == DP_PER_CHUNK ? in_chunk(&s->ch[i], stage) : list[i];
        if (from) memcpy(x + i * width, from, sizeof(double) * (size_t)width);
        else for (int64_t z = 0; z < width; z++) x[i * width + z] = NAN;
    }
    return x;
}

/* ---- bounds -------------------------------------------------------------------------------------------------------------------------
 * Entrywise powers D of errors as in ref/bound/bound.h, then the 2-norm of a row. gcum, Akk, Aqk, w, u, kg, qg: as ref/bound/bound.c derives them. Akk that the
 * base does not store is a subject's own inverse: Akk = |T| (DA + sum_error(n + 1) |A|) |T|, stored once.
 *   h, dh       the error e that reaches the chunk, carried from the errors that enter the rank; base bf16 may store them in bf16: 2^-8 |h|
 *   v_new       DX + w e          dv_new   DdX + kg e          columns of e by their 2-norms for p = 1
 *   dv_local    DAqk' |do| + (uo |Aqk'||do|, sum_error(c) |Aqk|'|do|) + (u + us) |dv_local| */

static double finish(const dp_rounding *r, const double *D, int64_t n) { return dp_error_fro(r, D, n); }

static double *inverse_error(const dp_chunk_bound *b) {
    const dp_chunk *ch = b->ch;
    const dp_rounding *r = &b->r;
    const int n = ch->n;
    const double gn = dp_sum_error(r, n + 1);
    double *D = dp_doubles((int64_t)n * n), *E = dp_doubles((int64_t)n * n);
    for (int i = 0; i < n; i++)                                  /* E = |T| (DA + ..) */
        for (int k = 0; k <= i; k++) {
            const double t = dp_pw(r, ch->Akk[(int64_t)i * n + k]);
            for (int j = 0; t && j <= k; j++) {
                const int64_t z = (int64_t)k * n + j;
                E[(int64_t)i * n + j] += t * (b->DA[z] + dp_pw(r, gn * (k == j ? 1 : ch->beta[k] * ch->L[z])));
            }
        }
    for (int i = 0; i < n; i++)
        for (int k = 0; k <= i; k++)
            for (int j = 0; j <= k; j++) D[(int64_t)i * n + j] += E[(int64_t)i * n + k] * dp_pw(r, ch->Akk[(int64_t)k * n + j]);
    for (int64_t i = 0; i < (int64_t)n * n; i++) D[i] += dp_pw(r, (r->u + r->us) * ch->Akk[i]);
    free(E);
    return D;
}

/* D [n][V] += what an error e of the state adds to A [n][K] times it. */
static void through(const dp_rounding *r, const double *A, int n, int K, int V, const double *e, double *D) {
    for (int i = 0; i < n; i++)
        for (int x = 0; x < K; x++) {
            const double a = A[(int64_t)i * K + x];
            for (int v = 0; v < V; v++)
                if (r->p == 2) D[(int64_t)i * V + v] += a * a * (e[(int64_t)x * V + v] + e[(int64_t)(K + x) * V + v]);
        }
    for (int i = 0; r->p == 1 && i < n; i++) {                   /* |row of A|_2 times the column's 2-norm */
        const double a = dp_norm_fro(K, A + (int64_t)i * K);
        for (int v = 0; v < V; v++) D[(int64_t)i * V + v] += a * e[v];
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
        for (int v = 0; v < V; v++) D[(int64_t)i * V + v] += dp_pw(r, dp_sum_error(r, ch->c) * sum[v]) + dp_pw(r, (r->u + r->us) * ch->dvl[(int64_t)i * V + v]) + dp_pw(r, ch->c * r->tiny);
    }
    free(sum);
    return D;
}

static void put_rows(const dp_error_bound_base *w, int g, int hv, int stage, const double *D, double *out) {
    const dp_problem *p = w->ref->p;
    const dp_chunk *ch = dp_sim_chunk(w->ref, g, hv);
    int per;
    int64_t width, stride, used;
    token_row(p, stage, &per, &width);
    for (int t = 0; t < ch->c; t++)
        for (int j = 0; j < per; j++) {
            columns(ch, stage, t, width, &stride, &used);
            out[((w->ref->group[g].t0 + t) * p->HV + hv) * per + j] = finish(&w->r, D + (t * per + j) * stride, used);
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
    put_rows(w, g, hv, stage, own ? own : stage == DP_GCUM ? b->Dcum : stage == DP_AKK ? b->DT : stage == DP_AQK ? b->DAqk : stage == DP_W ? b->Dw : stage == DP_U ? b->Du : stage == DP_KG ? b->Dkg : b->Dqg, out);
    free(own), free(dout);
}

/* The state pass of one local sub-sequence, forward or backward, with e carried along. */
static void pass(const dp_error_bound_base *w, int stage, int r, int sub, int hv, double *e, double *out) {
    const dp_sim *s = w->ref;
    const dp_problem *p = s->p;
    const int back = dp_stage_tensors[stage].backward, n = s->first[r][sub + 1] - s->first[r][sub];
    const int64_t size = dp_state_error_size(&w->r, p->K, p->V);
    double *dout = dp_doubles((int64_t)DP_CHUNK * p->V);
    for (int i = 0; i < n; i++) {
        const int g = back ? s->first[r][sub + 1] - 1 - i : s->first[r][sub] + i;
        const dp_chunk *ch = dp_sim_chunk(s, g, hv);
        const dp_chunk_bound *b = &w->b[(int64_t)g * p->HV + hv];
        double *before = dp_copy(e, size), *D = dp_doubles((int64_t)ch->n * p->V);
        if (stage == DP_STATE || stage == DP_DSTATE) out[(int64_t)g * p->HV + hv] = finish(&w->r, e, size) + (w->base == DP_BASE_BF16 ? 0x1p-8 * dp_norm_fro((int64_t)p->K * p->V, in_chunk(ch, stage)) : 0);
        if (back) {
            dp_sim_gather_do(s, g, hv, dout);
            dp_bound_state_bwd(b, dout, ch->dh, e, D);
            through(&w->r, ch->kg, ch->n, p->K, p->V, before, D);
        } else {
            dp_bound_state(b, ch->h, e, D);
            through(&w->r, ch->w, ch->n, p->K, p->V, before, D);
        }
        if (stage == DP_V_NEW || stage == DP_DV_NEW) put_rows(w, g, hv, stage, D, out);
        free(before), free(D);
    }
    free(dout);
}

static void carried_stage(const dp_error_bound_base *w, int stage, int r, int hv, double *out) {
    const dp_sim *s = w->ref;
    const int back = dp_stage_tensors[stage].backward, n = s->ctx[r].nlocal;
    double **enter = back ? w->edS : w->eS, *entering = enter ? enter[r * s->p->HV + hv] : NULL;
    const int64_t size = dp_state_error_size(&w->r, s->p->K, s->p->V);
    for (int sub = 0; sub < n; sub++) {
        double *e = sub == (back ? n - 1 : 0) && entering ? dp_copy(entering, size) : dp_doubles(size);
        pass(w, stage, r, sub, hv, e, out);
        free(e);
    }
}

double *dp_stage_tensor_bound(const dp_error_bound_base *w, int stage) {
    const dp_problem *p = w->ref->p;
    const int carried = stage == DP_STATE || stage == DP_V_NEW || stage == DP_DSTATE || stage == DP_DV_NEW;
    int64_t rows, width;
    assert(dp_stage_tensors[stage].kind != DP_PER_RANK);
    dp_stage_tensor_rows(p, w->ref->N, stage, &rows, &width);
    double *out = dp_doubles(rows);
    if (carried) {
#pragma omp parallel for schedule(dynamic, 1)
        for (int i = 0; i < w->ref->N * p->HV; i++) carried_stage(w, stage, i / p->HV, i % p->HV, out);
        return out;
    }
#pragma omp parallel for schedule(dynamic, 1)
    for (int64_t i = 0; i < (int64_t)w->ref->ngroup * p->HV; i++) intra_stage(w, stage, (int)(i / p->HV), (int)(i % p->HV), out);
    return out;
}

/* ---- judging ---------------------------------------------------------------------------------------------------------------------- */

typedef struct { const dp_sim *s; int *group_of, per, chunk; } places;       /* group_of [T] */

static void place(const void *ctx, int64_t row, dp_place *at) {
    const places *x = ctx;
    const int HV = x->s->p->HV;
    const int64_t t = x->chunk ? x->s->group[row / HV].t0 : row / ((int64_t)HV * x->per);
    const int g = x->chunk ? (int)(row / HV) : x->group_of[t];
    const dp_group *gr = &x->s->group[g];
    *at = (dp_place){.rank = gr->rank, .head = (int)(x->chunk ? row % HV : row / x->per % HV), .sequence = x->s->ctx[gr->rank].local_seq[gr->sub], .chunk = g, .token = t};
}

void dp_stage_tensor_judge(const dp_sim *ref, const dp_stage_tensor_in *t, dp_judgement *out) {
    const dp_problem *p = ref->p;
    const int stage = t->stage;
    const int by_chunk = dp_stage_tensors[stage].kind == DP_PER_CHUNK;
    int64_t rows, width;
    int per = 1;
    if (!by_chunk) token_row(p, stage, &per, &width);
    dp_stage_tensor_rows(p, ref->N, stage, &rows, &width);
    places pl = {.s = ref, .group_of = dp_calloc((size_t)p->T, sizeof(int)), .per = per, .chunk = by_chunk};
    for (int g = 0; g < ref->ngroup; g++)
        for (int i = 0; i < ref->group[g].c; i++) pl.group_of[ref->group[g].t0 + i] = g;
    double *want = dp_stage_tensor_value(ref, stage), *seen = dp_copy(t->got, rows * width);
    if (stage == DP_AKK || stage == DP_AQK)
        for (int64_t r = 0; r < rows; r++) {                     /* what lies above the diagonal means nothing */
            const int64_t token = r / ((int64_t)p->HV * per), used = (token - ref->group[pl.group_of[token]].t0 + 1) * p->R;
            for (int64_t i = used; i < width; i++) seen[r * width + i] = 0;
        }
    const dp_compare_in in = {.name = dp_stage_tensors[stage].name, .N = ref->N, .heads = p->HV, .rows = rows, .width = width, .got = seen, .want = want, .bound = t->bound,
                              .rad = t->rad, .bound_shown = t->bound_shown, .place = place, .ctx = &pl, .tokens = by_chunk ? 0 : p->T, .split = by_chunk ? p->K : 1,
                              .draws = t->draws, .allowance = t->allowance, .unit = t->unit, .tiny = t->tiny};
    dp_compare(&in, out);
    free(want), free(seen), free(pl.group_of);
}
