/* Gradients of a chunk: wy_bwd and intra_bwd (bisect_work.h). */
#include "bisect_work.h"

#include <math.h>
#include <stdlib.h>

/* Gradients of the activated inputs in the order of judgement: dv, dbeta (wy_bwd), then dq, dk, dg
 * (intra_bwd). Value heads of a group are summed in dq and dk, channels in dg of GDN. With erase
 * and write in place of beta: the gradients of write o v and of erase o k. With lr_a and lr_b: of
 * the values and of the erasing parts of both keys of a token. */
typedef struct {
    dp_result_id id;
    dp_stage stage;
    size_t offset; /* of its array in dp_sim */
    int by_key;    /* 1: each key is a row, though the tensor holds a token's keys side by side */
    int given;     /* 1: gate_bwd starts from it */
    unsigned only; /* as of an input */
} grad_row;
#define GRAD(ID, STAGE, FIELD) .id = ID, .stage = STAGE, .offset = offsetof(dp_sim, FIELD)
#define OWN_WRITES (1u << DP_BY_GATES | 1u << DP_BY_FACTORS | 1u << DP_BY_ROWS)
static const grad_row GRADS[] = {
    {GRAD(DP_RESULT_DV, DP_STAGE_WY_BWD, out.dv), .only = 1u << DP_BY_BETA | 1u << DP_BY_NOTHING},
    {GRAD(DP_RESULT_DBETA, DP_STAGE_WY_BWD, dbeta), .by_key = 1, .given = 1,
     .only = 1u << DP_BY_BETA},
    {GRAD(DP_RESULT_DWRITE, DP_STAGE_WY_BWD, dvalues), .given = 1, .only = OWN_WRITES},
    {GRAD(DP_RESULT_DERASE, DP_STAGE_INTRA_BWD, derasing), .given = 1, .only = OWN_WRITES},
    {GRAD(DP_RESULT_DQ, DP_STAGE_INTRA_BWD, dq), .given = 1},
    {GRAD(DP_RESULT_DK, DP_STAGE_INTRA_BWD, dk), .given = 1},
    {GRAD(DP_RESULT_DG, DP_STAGE_INTRA_BWD, dg), .given = 1}};
#define NGRADS ((int)(sizeof GRADS / sizeof *GRADS))

static double *array_of(const dp_sim *s, const grad_row *g) {
    return *(double *const *)((const char *)s + g->offset);
}

static int is_of(const dp_problem *p, const grad_row *g) {
    return !g->only || g->only >> dp_models[p->model].strength & 1;
}

/* rows of [T][heads][per][n] */
static dp_bisect_rows rows_of(const dp_problem *p, const grad_row *g) {
    const dp_tensor_field *f = &dp_result_fields[g->id];
    int64_t rows, width;
    if (dp_by_rows(p) && g->id != DP_RESULT_DQ && g->id != DP_RESULT_DG)
        return (dp_bisect_rows){f->name, p->HV, dp_rows(p),
                                g->id == DP_RESULT_DWRITE ? p->V : p->K};
    dp_result_shape(p, g->id, &rows, &width);
    if (g->by_key) return (dp_bisect_rows){f->name, dp_result_heads(p, g->id), p->R, 1};
    return (dp_bisect_rows){f->name, dp_result_heads(p, g->id), dp_result_rows_per_token(p, g->id),
                            (int)width};
}

/* The bounds of one chunk, as dp_bound_grads fills them; *all: to be freed. */
static dp_grad_bound grad_bound_new(int m, int n, int K, int own_writes, double **all) {
    dp_grad_bound b = {0};
    const struct {
        double **x;
        int64_t n;
    } part[] = {{&b.dq, m},
                {&b.ndq, m},
                {&b.dk, n},
                {&b.ndk, n},
                {&b.dv, n},
                {&b.ndv, n},
                {&b.dbeta, n},
                {&b.vdbeta, n},
                {&b.dg, (int64_t)m * K},
                {&b.vdg, (int64_t)m * K},
                {&b.ederasing, (int64_t)n * K}};
    int64_t at = 0;
    *all = dp_doubles(2 * m + 6 * (int64_t)n + 2 * (int64_t)m * K + (int64_t)n * K);
    for (size_t i = 0; i < sizeof part / sizeof *part; i++) {
        *part[i].x = *all + at;
        at += part[i].n;
    }
    if (!own_writes) b.ederasing = NULL;
    return b;
}

/* dg of one token, from its channels. */
static double dg_bound(const dp_bisect_work *w, const double *dg, const double *vdg) {
    const dp_rounding *r = &w->r;
    const int K = w->p->K;
    double sum = 0, abs = 0, each = 0;
    for (int k = 0; k < K; k++) {
        sum += dg[k];
        abs += fabs(vdg[k]);
        each += dp_pw(r, r->u * vdg[k]);
    }
    return sum + each + (dp_Kg(w->p) == 1 ? dp_pw(r, dp_sum_error(r, K) * abs) : 0);
}

/* Adds a chunk's to the bounds [by result] of all rows. */
static void add_chunk(const dp_bisect_work *w, const dp_bisect_chunk *c, const dp_grad_bound *b,
                      double *const *o) {
    const dp_problem *p = w->p;
    const dp_rounding *r = &w->r;
    const int R = dp_rows(p), G = dp_G(p), h = c->hv / G;
    for (int t = 0; t < c->ref->c; t++) {
        const int64_t tok = c->at.token + t;
        o[DP_RESULT_DQ][tok * p->H + h] += b->dq[t] + dp_pw(r, G * r->u * b->ndq[t]);
        o[DP_RESULT_DG][tok * p->HV + c->hv] = dg_bound(w, b->dg + t * p->K, b->vdg + t * p->K);
    }
    for (int i = 0; i < c->ref->n; i++) {
        const int64_t tok = c->at.token + i / R, row = (tok * p->HV + c->hv) * R + i % R;
        o[DP_RESULT_DK][(tok * p->H + h) * R + i % R] += b->dk[i] + dp_pw(r, G * r->u * b->ndk[i]);
        if (b->ederasing) {
            o[DP_RESULT_DWRITE][row] = b->dv[i];
            for (int x = 0; x < p->K; x++)
                o[DP_RESULT_DERASE][row] += b->ederasing[(int64_t)i * p->K + x];
            continue;
        }
        o[DP_RESULT_DV][row] = b->dv[i] + dp_pw(r, (r->u + r->us) * b->ndv[i]);
        if (dp_has_beta(p)) o[DP_RESULT_DBETA][row] = b->dbeta[i];
    }
}

static void grad_bounds(dp_bisect_work *w, double *const *o) {
    const dp_problem *p = w->p;
    double *e = dp_bisect_zeros_state(w), *DX = dp_doubles((int64_t)DP_CHUNK * dp_rows(p) * p->V),
           *dout = dp_doubles((int64_t)DP_CHUNK * p->V);
    FOR_CHUNKS(c) {
        double *all;
        dp_grad_bound b = grad_bound_new(c.ref->c, c.ref->n, p->K, w->ref.values != NULL, &all);
        dp_sim_gather_do(&w->ref, c.g, c.hv, dout);
        dp_bound_grads(c.own, dout, e, e, DX, DX, &b);
        add_chunk(w, &c, &b, o);
        free(all);
    }
    free(e);
    free(DX);
    free(dout);
}

/* Backwards in time. */
void dp_bisect_judge_tokens(dp_bisect_work *w, dp_bisect_rows x, const double *got,
                            const double *want, const double *bound) {
    for (int g = w->ref.ngroup - 1; g >= 0; g--)
        for (int h = 0; h < x.heads; h++)
            for (int t = w->ref.group[g].c - 1; t >= 0; t--)
                for (int j = 0; j < x.per; j++) {
                    dp_place at = dp_bisect_chunk_place(w, g, h);
                    at.token += t;
                    const int64_t row = (at.token * x.heads + h) * x.per + j;
                    dp_bisect_judge(w, x.name, at, x.per > 1 ? j : -1, x.n, got + row * x.n,
                                    want + row * x.n, NULL, DP_LAMBDA * sqrt(bound[row]));
                }
}

void dp_bisect_stage_grads(dp_bisect_work *w) {
    const dp_problem *p = w->p;
    double *bound[DP_NRESULTS] = {NULL};
    for (int i = 0; i < NGRADS; i++) {
        const dp_bisect_rows x = rows_of(p, &GRADS[i]);
        if (is_of(p, &GRADS[i])) bound[GRADS[i].id] = dp_doubles(p->T * x.heads * x.per);
    }
    grad_bounds(w, bound);
    for (int i = 0; i < NGRADS; i++) {
        if (!is_of(p, &GRADS[i])) continue;
        w->stage = GRADS[i].stage;
        dp_bisect_judge_tokens(w, rows_of(p, &GRADS[i]), array_of(&w->s, &GRADS[i]),
                               array_of(&w->t, &GRADS[i]), bound[GRADS[i].id]);
    }
    for (int i = 0; i < NGRADS; i++) {
        const dp_bisect_rows x = rows_of(p, &GRADS[i]);
        if (GRADS[i].given && is_of(p, &GRADS[i]))
            dp_bisect_give(w, array_of(&w->s, &GRADS[i]), array_of(&w->t, &GRADS[i]),
                           array_of(&w->ref, &GRADS[i]), p->T * x.heads * x.per * x.n,
                           DP_BISECT_ARITH);
        free(bound[GRADS[i].id]);
    }
}
