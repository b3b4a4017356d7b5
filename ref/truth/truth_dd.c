/* ref/truth/truth_dd.c - the truth in double-double arithmetic (ref/truth/truth_dd.h): blocks of
 * tokens, heads, columns.
 *
 * The order is as in truth.c: the forward runs block by block, the adjoint from the checkpoints at
 * block starts. A task has TR_DD_COLS columns; the sums of tasks are added in task order. Activated
 * rows are made block by block and never kept for a whole sequence. truth_bound.c proves the radii,
 * with u = TR_DD_U. */
#include "truth_dd_impl.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

const char *tr_dd_only;

static tr_dd_rows rows_of(const tr_dd_batch *b, int i, const tr_block *k) {
    const tr_dd_qk *q = &b->qk[i / dp_G(b->r->p)];
    const tr_dd_head *a = &b->head[i];
    return (tr_dd_rows){b->Kp, b->r->p->R, k->t1 - k->t0, q->q, q->k, a->d, a->beta};
}

static tr_dd_cols cols_of(const tr_dd_batch *b, const tr_dd_task *c, const tr_block *k) {
    const dp_problem *p = b->r->p;
    const dp_ball *o = &b->r->t->field[DP_RESULT_O];
    const int64_t hv = b->h0 * dp_G(p) + c->head, at = (k->t0 * p->HV + hv) * p->V + c->v0;
    tr_dd_cols y = {.w = c->w,
                    .scale = p->scale,
                    .S = c->S,
                    .V = p->V,
                    .ldv = (int64_t)p->HV * p->R * p->V,
                    .ldo = (int64_t)p->HV * p->V};
    if (!c->is_M) {
        y.v = p->v + (k->t0 * p->HV + hv) * p->R * p->V + c->v0;
        y.oh = o->hi + at;
        y.ol = o->lo + at;
    }
    return y;
}

/* The first failure ends up in the run; what follows it is thrown away. */
static void on_device(const tr_dd_batch *b, dp_status st) {
    if (st && !b->r->status) b->r->status = st;
}

static void load_state(const tr_dd_batch *b, const tr_dd_task *c, const double *x, int64_t row) {
    const dp_problem *p = b->r->p;
    memset(c->S, 0, sizeof(double) * (size_t)(c->w * b->row));
    for (int v = 0; v < c->w && x; v++)
        for (int64_t k = 0; k < p->K; k++)
            c->S[v * b->row + k] = x[(row * p->K + k) * p->V + c->v0 + v];
    on_device(b, c->device ? b->r->device->set(c->device, c->S, &b->r->err) : DP_OK);
}

static void store_state(const tr_dd_batch *b, const tr_dd_task *c, dp_ball *to, int64_t row) {
    on_device(b, c->device ? b->r->device->get(c->device, c->S, &b->r->err) : DP_OK);
    const int64_t K = b->r->p->K, width = to->width / K;
    for (int64_t k = 0; k < K; k++)
        for (int v = 0; v < c->w; v++)
            tr_dd_put(to, (row * K + k) * width + c->v0 + v, c->S[v * b->row + k],
                      c->S[v * b->row + b->Kp + k]);
}

static void advance(const tr_dd_batch *b, tr_dd_task *c, const tr_dd_rows *rows,
                    const tr_dd_cols *cols) {
    if (c->device)
        on_device(b, b->r->device->forward(c->device, rows, cols, &b->r->err));
    else if (!b->r->device)
        b->op->forward(rows, cols);
}

static void forward_task(const tr_dd_batch *b, tr_dd_task *c, int at) {
    const tr_run *r = b->r;
    const dp_problem *p = r->p;
    const tr_block *k = &r->block[at];
    const int64_t hv = b->h0 * dp_G(p) + c->head, state_row = (int64_t)k->seq * p->HV + hv;
    const tr_dd_rows rows = rows_of(b, c->head, k);
    const tr_dd_cols cols = cols_of(b, c, k);
    if (c->is_M) {
        int seg = 0;
        while (r->t->mark[seg + 1] <= k->t0)
            seg++;
        if (r->t->mark[seg] == k->t0) {
            load_state(b, c, NULL, 0);
            for (int v = 0; v < c->w; v++)
                c->S[v * b->row + c->v0 + v] = 1;
            on_device(b, c->device ? r->device->set(c->device, c->S, &b->r->err) : DP_OK);
        }
        advance(b, c, &rows, &cols);
        if (r->t->mark[seg + 1] == k->t1)
            store_state(b, c, &r->t->M_seg, (int64_t)seg * p->HV + hv);
        return;
    }
    if (k->first_of_seq) load_state(b, c, p->s0, state_row);
    if (c->ckpt)
        memcpy(c->ckpt + at * TR_DD_COLS * b->row, c->S,
               sizeof(double) * (size_t)(TR_DD_COLS * b->row));
    if (k->cut >= 0) store_state(b, c, &r->t->S_cut, (int64_t)k->cut * p->HV + hv);
    advance(b, c, &rows, &cols);
    if (k->last_of_seq) store_state(b, c, &r->t->field[DP_RESULT_FINAL_STATE], state_row);
}

static void backward_task(const tr_dd_batch *b, tr_dd_task *c, int at) {
    const tr_run *r = b->r;
    const dp_problem *p = r->p;
    const tr_block *k = &r->block[at];
    const int64_t hv = b->h0 * dp_G(p) + c->head, state_row = (int64_t)k->seq * p->HV + hv,
                  size = TR_DD_COLS * b->row;
    const int64_t at_v = (k->t0 * p->HV + hv) * p->R * p->V + c->v0;
    const tr_dd_rows rows = rows_of(b, c->head, k);
    const tr_dd_cols cols = cols_of(b, c, k);
    memcpy(c->tape, c->ckpt + at * size, sizeof(double) * (size_t)size);
    b->op->rebuild(&rows, &cols, c->tape, c->E);
    for (int64_t i = 0; i < rows.n; i++)
        c->S2[k->t0 + i] = b->op->squares(b->Kp, c->w, c->tape + (i + 1) * size);
    c->y.G2 = c->G2 + k->t0;
    if (k->last_of_seq) load_state(b, c, p->dstate, state_row);
    c->y.dv_hi = r->t->field[DP_RESULT_DV].hi + at_v;
    c->y.dv_lo = r->t->field[DP_RESULT_DV].lo + at_v;
    b->op->backward(&rows, &cols, c->tape, c->E, p->dout + (k->t0 * p->HV + hv) * p->V + c->v0,
                    &c->y);
    if (k->cut >= 0) store_state(b, c, &r->t->dS_cut, (int64_t)k->cut * p->HV + hv);
    if (k->first_of_seq) store_state(b, c, &r->t->field[DP_RESULT_DS0], state_row);
}

static void run_batch(tr_run *r, const tr_dd_lanes *op, int h0, int n) {
    const int G = dp_G(r->p);
    tr_dd_batch b = tr_dd_batch_open(r, op, h0, n);
#pragma omp parallel num_threads(r->threads)
    {
        for (int k = 0; k < r->nblock; k++) {
            tr_dd_activate_block(&b, &r->block[k]);
#pragma omp for schedule(dynamic, 1)
            for (int i = 0; i < b.ntask + b.nM; i++) {
                forward_task(&b, &b.task[i], k);
                tr_progress(r, (double)(r->block[k].t1 - r->block[k].t0) * b.task[i].w);
            }
        }
        for (int k = r->nblock - 1; k >= 0 && r->t->backward; k--) {
            const int64_t len = r->block[k].t1 - r->block[k].t0;
            if (k < r->nblock - 1) tr_dd_activate_block(&b, &r->block[k]);
#pragma omp for schedule(dynamic, 1)
            for (int i = 0; i < b.ntask; i++) {
                backward_task(&b, &b.task[i], k);
                tr_progress(r, 3.0 * (double)len * b.task[i].w);
            }
#pragma omp for schedule(static)
            for (int64_t i = 0; i < len * n; i++)
                tr_dd_chain_token(&b, (int)(i / len), &r->block[k], i % len);
#pragma omp for schedule(static)
            for (int i = 0; i < n * G; i++)
                tr_dd_accumulate_gate(&b, i, &r->block[k]);
        }
    }
    if (r->t->backward) tr_dd_store_gate_sums(&b);
#pragma omp parallel for schedule(dynamic, 1) num_threads(r->threads)
    for (int i = 0; i < n; i++) {
        tr_head heads[G];
        for (int g = 0; g < G && r->t->backward; g++)
            tr_dd_measured_norms(&b, i * G + g);
        for (int g = 0; g < G; g++)
            heads[g] = b.head[i * G + g].norms;
        tr_bound_group(r, h0 + i, &b.qk[i].norms, heads);
    }
    tr_dd_batch_close(&b);
}

void tr_run_dd(tr_run *r) {
    const dp_problem *p = r->p;
    const tr_dd_lanes *op = tr_dd_choose(tr_dd_only);
    const int tasks = dp_G(p) * r->ncb, n = (2 * r->threads + tasks - 1) / tasks;
    for (int h = 0; h < p->H && !r->status; h += n)
        run_batch(r, op, h, p->H - h < n ? p->H - h : n);
    for (int i = 0; i < DP_NRESULTS + 3; i++) {
        dp_ball *b = i < DP_NRESULTS        ? &r->t->field[i]
                     : i == DP_NRESULTS     ? &r->t->S_cut
                     : i == DP_NRESULTS + 1 ? &r->t->dS_cut
                                            : &r->t->M_seg;
        for (int64_t j = 0; j < b->rows; j++)
            b->rad[j] += TR_DD_FLOOR;
    }
}

static int too_large(const double *x, int64_t n) {
    for (int64_t i = 0; x && i < n; i++)
        if (!(fabs(x[i]) <= TR_DD_MAX)) return 1;
    return 0;
}

const char *dp_truth_dd_refuses(const dp_problem *p) {
    static const char LARGE[] = "a number is not finite or above 2^30";
    if (dp_by_gates(p)) return "erase and write stand in place of beta";
    if (dp_by_rows(p))
        return p->model == DP_DPLR ? "lr_a and lr_b stand in place of beta"
                                   : "a token has rows of its own in place of keys";
    if (!dp_erases(p)) return "nothing is erased";
    if (p->K > TR_DD_MAX_K || (int64_t)p->K * p->V > 1 << 20) return "K or V is too large for it";
    for (int i = 0; i < DP_NINPUTS; i++) /* A_log has a limit of its own */
        if (i != DP_INPUT_A_LOG && too_large(dp_input_of(p, i), dp_input_count(p, i))) return LARGE;
    if (too_large(&p->scale, 1) || too_large(&p->lower_bound, 1)) return LARGE;
    for (int64_t i = 0; p->gate == DP_GATE_LOG && i < dp_input_count(p, DP_INPUT_G); i++)
        if (p->g[i] > 20) return "a log decay is above 20";
    for (int h = 0; p->A_log && h < p->HV; h++)
        if (!(p->A_log[h] <= 20)) return "A_log is not finite or above 20";
    return NULL;
}
