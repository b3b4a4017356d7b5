/* Which arithmetic makes the truth, and the audit of one by the other (truth.h). */
#include "truth_impl.h"

#include <math.h>
#include <omp.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

const char *const dp_truth_kind_names[DP_NTRUTHS] = {"mpfr", "double-double"};

/* Allocates zeros of that shape; rows = 0: no arrays. */
static void ball_alloc(dp_ball *b, int64_t rows, int64_t width) {
    *b = (dp_ball){rows, width, dp_doubles(rows * width), dp_doubles(rows * width),
                   dp_doubles(rows)};
    for (int64_t i = 0; i < rows * width; i++)
        b->hi[i] = NAN;
    for (int64_t i = 0; i < rows; i++)
        b->rad[i] = INFINITY;
}

static void ball_free(dp_ball *b) {
    DP_FREE(b->hi, b->lo, b->rad);
    *b = (dp_ball){0};
}

void dp_truth_free(dp_truth *t) {
    for (int i = 0; i < DP_NRESULTS; i++)
        ball_free(&t->field[i]);
    ball_free(&t->S_cut);
    ball_free(&t->dS_cut);
    ball_free(&t->M_seg);
    free(t->mark);
    free(t->cut);
    *t = (dp_truth){0};
}

static dp_status check_request(const dp_problem *p, const dp_truth_request *rq, dp_err *e) {
    const char *no = rq->kind == DP_TRUTH_DD ? dp_truth_dd_refuses(p) : NULL;
    if (no) return dp_fail(e, DP_EINPUT, "truth = dd: %s", no);
    if (rq->kind == DP_TRUTH_MPFR && (rq->bits < TR_MIN_BITS || rq->bits > TR_MAX_BITS))
        return dp_fail(e, DP_EINPUT, "bits = %d: the truth takes %d to %d", rq->bits, TR_MIN_BITS,
                       TR_MAX_BITS);
    for (int i = 0; i < rq->ncut; i++)
        if (rq->cut[i] < 1 || rq->cut[i] >= p->T || (i && rq->cut[i] <= rq->cut[i - 1]))
            return dp_fail(e, DP_EINPUT,
                           "cut[%d] = %lld: cuts must increase and lie in 1..T-1, T = %lld", i,
                           (long long)rq->cut[i], (long long)p->T);
    return DP_OK;
}

static int compare_int64(const void *a, const void *b) {
    const int64_t x = *(const int64_t *)a, y = *(const int64_t *)b;
    return (x > y) - (x < y);
}

/* Cuts and sequence boundaries, sorted, each once. cu holds 0 and T. */
static void set_marks(const dp_problem *p, dp_truth *t) {
    const int n = p->Nseq + 1 + t->ncut;
    t->mark = dp_calloc((size_t)n, sizeof *t->mark);
    memcpy(t->mark, p->cu, sizeof *t->mark * (size_t)(p->Nseq + 1));
    if (t->ncut) memcpy(t->mark + p->Nseq + 1, t->cut, sizeof *t->mark * (size_t)t->ncut);
    qsort(t->mark, (size_t)n, sizeof *t->mark, compare_int64);
    t->nmark = 1;
    for (int i = 1; i < n; i++)
        if (t->mark[i] > t->mark[t->nmark - 1]) t->mark[t->nmark++] = t->mark[i];
}

dp_status tr_truth_alloc(const dp_problem *p, const dp_truth_request *rq, dp_truth *t, dp_err *e) {
    *t = (dp_truth){0};
    const dp_status s = check_request(p, rq, e);
    if (s) return s;
    t->kind = rq->kind;
    t->bits = rq->kind == DP_TRUTH_DD ? TR_DD_BITS : rq->bits;
    t->backward = rq->backward && p->dout;
    t->ncut = rq->ncut;
    t->cut = dp_calloc((size_t)rq->ncut, sizeof *t->cut);
    if (rq->ncut) memcpy(t->cut, rq->cut, sizeof *t->cut * (size_t)rq->ncut);
    set_marks(p, t);
    for (int i = 0; i < DP_NRESULTS; i++) {
        int64_t rows, width;
        dp_result_shape(p, i, &rows, &width);
        if (rows && (t->backward || !dp_result_fields[i].backward))
            ball_alloc(&t->field[i], rows, width);
    }
    const int64_t KV = (int64_t)p->K * p->V, states = (int64_t)t->ncut * p->HV;
    if (states) ball_alloc(&t->S_cut, states, KV);
    if (states && t->backward) ball_alloc(&t->dS_cut, states, KV);
    if (rq->want_M) ball_alloc(&t->M_seg, (int64_t)(t->nmark - 1) * p->HV, (int64_t)p->K * p->K);
    return DP_OK;
}

static int find(const int64_t *x, int n, int64_t v) {
    for (int i = 0; i < n; i++)
        if (x[i] == v) return i;
    return -1;
}

/* Cuts every sequence at the marks and into pieces of at most run->len tokens; checkpoints and tape
 * then need about 2 sqrt(T) states. */
static void set_blocks(tr_run *r) {
    const dp_problem *p = r->p;
    const dp_truth *t = r->t;
    r->len = r->device ? 4096 : 64;
    while (!r->device && r->len < 256 && r->len * r->len < p->T / 4)
        r->len *= 2;
    r->block = dp_calloc((size_t)(p->T / r->len + t->nmark), sizeof *r->block);
    for (int m = 0, seq = 0; m + 1 < t->nmark; m++) {
        while (p->cu[seq + 1] <= t->mark[m])
            seq++;
        for (int64_t a = t->mark[m]; a < t->mark[m + 1]; a += r->len) {
            const int64_t b = a + r->len < t->mark[m + 1] ? a + r->len : t->mark[m + 1];
            r->block[r->nblock++] = (tr_block){
                a, b, seq, a == p->cu[seq], b == p->cu[seq + 1], find(t->cut, t->ncut, a)};
        }
    }
}

void tr_progress(tr_run *r, double token_columns) {
#pragma omp atomic
    r->done += token_columns;
    if (!r->progress || omp_get_thread_num()) return;
    const double now = omp_get_wtime();
    if (now - r->shown < 0.5) return;
    r->shown = now;
    fprintf(stderr, "\rtruth: %3.0f %%", 100 * r->done / r->total);
}

/* A batch: n consecutive q/k heads with their value heads and tasks. */
typedef struct {
    int h0, n, ntask, nM;
    tr_qk *qk;     /* [n] */
    tr_head *head; /* [n][G] */
    tr_task *task; /* [n][G][ncb] */
    tr_task *M;    /* [n*G][column blocks of K], one state each, used for all segments one after
                    * another */
} batch;

static batch batch_open(const tr_run *r, int h0, int n) {
    const dp_problem *p = r->p;
    const int G = dp_G(p), nMcb = (p->K + TR_W - 1) / TR_W;
    batch b = {.h0 = h0, .n = n, .ntask = n * G * r->ncb, .nM = r->want_M ? n * G * nMcb : 0};
    b.qk = dp_calloc((size_t)n, sizeof *b.qk);
    b.head = dp_calloc((size_t)(n * G), sizeof *b.head);
    b.task = dp_calloc((size_t)b.ntask, sizeof *b.task);
    b.M = dp_calloc((size_t)b.nM, sizeof *b.M);
    for (int i = 0; i < n; i++)
        tr_activate_qk(r, h0 + i, &b.qk[i]);
    for (int i = 0; i < n * G; i++)
        tr_activate_head(r, h0 * G + i, &b.qk[i / G], &b.head[i]);
    for (int i = 0; i < b.ntask + b.nM; i++) {
        const int is_M = i >= b.ntask, j = is_M ? i - b.ntask : i, ncb = is_M ? nMcb : r->ncb,
                  hv = j / ncb, v0 = j % ncb * TR_W;
        const int width = is_M ? p->K : p->V;
        tr_task *c = is_M ? &b.M[j] : &b.task[j];
        *c = (tr_task){.run = r,
                       .qk = &b.qk[hv / G],
                       .head = &b.head[hv],
                       .hv = h0 * G + hv,
                       .v0 = v0,
                       .w = width - v0 < TR_W ? width - v0 : TR_W,
                       .is_M = is_M};
        tr_task_alloc(c, !is_M && r->t->backward);
    }
    return b;
}

static void batch_close(const tr_run *r, batch *b) {
    for (int i = 0; i < b->ntask; i++)
        tr_task_free(&b->task[i]);
    for (int i = 0; i < b->nM; i++)
        tr_task_free(&b->M[i]);
    for (int i = 0; i < b->n; i++)
        tr_free_qk(&b->qk[i]);
    for (int i = 0; i < b->n * dp_G(r->p); i++)
        tr_free_head(&b->head[i]);
    DP_FREE(b->task, b->M, b->qk, b->head);
}

static void batch_forward(tr_run *r, batch *b) {
#pragma omp parallel for schedule(dynamic, 1) num_threads(r->threads)
    for (int i = 0; i < b->ntask + b->nM; i++) {
        if (i < b->ntask)
            for (int k = 0; k < r->nblock; k++) {
                tr_forward_block(&b->task[i], k, r->t->backward);
                tr_progress(r, (double)(r->block[k].t1 - r->block[k].t0) * b->task[i].w);
            }
        else
            for (int s = 0; s + 1 < r->t->nmark; s++) {
                tr_M_segment(&b->M[i - b->ntask], s);
                tr_progress(r, (double)(r->t->mark[s + 1] - r->t->mark[s]) * b->M[i - b->ntask].w);
            }
    }
}

/* Blocks last to first; in each: columns, then the chain rule token by token, then the sums over
 * tokens in a fixed order. */
static void batch_backward(tr_run *r, batch *b) {
    const int G = dp_G(r->p);
#pragma omp parallel num_threads(r->threads)
    {
        mp_array tmp = mp_alloc(6 + r->p->K, r->prec);
        for (int k = r->nblock - 1; k >= 0; k--) {
            const int64_t t0 = r->block[k].t0, n = r->block[k].t1 - t0;
#pragma omp for schedule(dynamic, 1)
            for (int i = 0; i < b->ntask; i++) {
                tr_backward_block(&b->task[i], k);
                tr_progress(r, 3.0 * (double)n * b->task[i].w);
            }
#pragma omp for schedule(static)
            for (int64_t i = 0; i < n * b->n; i++)
                tr_sum_tasks(r, b->task + i / n * G * r->ncb, i % n);
#pragma omp for schedule(static)
            for (int64_t i = 0; i < n * b->n; i++) {
                const int h = (int)(i / n);
                tr_chain_token(r, b->h0 + h, &b->qk[h], b->head + h * G, b->task + h * G * r->ncb,
                               t0 + i % n, i % n, tmp);
            }
#pragma omp for schedule(static)
            for (int i = 0; i < b->n * G; i++)
                tr_accumulate_gate(r, &b->head[i], &b->task[i * r->ncb], &r->block[k]);
        }
        mp_free(&tmp);
    }
}

static void store_gate_sums(tr_run *r, batch *b) {
    const int64_t Kg = dp_Kg(r->p);
    for (int i = 0; i < b->n * dp_G(r->p); i++) {
        const int64_t hv = (int64_t)b->h0 * dp_G(r->p) + i;
        mpfr_ptr tmp = mp_at(b->task[0].tmp, 0);
        if (r->p->A_log)
            tr_store(&r->t->field[DP_RESULT_DA_LOG], hv, mp_at(b->head[i].sum_A, 0), tmp);
        for (int64_t c = 0; c < Kg && r->p->dt_bias; c++)
            tr_store(&r->t->field[DP_RESULT_DDT_BIAS], hv * Kg + c, mp_at(b->head[i].sum_dt, c),
                     tmp);
    }
}

static void run_batch(tr_run *r, int h0, int n) {
    batch b = batch_open(r, h0, n);
    batch_forward(r, &b);
    if (r->t->backward) {
        batch_backward(r, &b);
        store_gate_sums(r, &b);
    }
#pragma omp parallel for schedule(dynamic, 1) num_threads(r->threads)
    for (int i = 0; i < n; i++)
        tr_bound_group(r, h0 + i, &b.qk[i], b.head + i * dp_G(r->p));
    batch_close(r, &b);
}

/* A sequence without tokens: final_state = s0, ds0 = dstate, exactly. */
static void pass_empty_sequences(const dp_problem *p, dp_truth *t) {
    const int64_t KV = (int64_t)p->K * p->V;
    for (int64_t row = 0; row < (int64_t)p->Nseq * p->HV; row++) {
        const int64_t seq = row / p->HV;
        if (p->cu[seq + 1] > p->cu[seq]) continue;
        for (int i = 0; i < 2; i++) {
            dp_ball *b = &t->field[i ? DP_RESULT_DS0 : DP_RESULT_FINAL_STATE];
            const double *from = i ? p->dstate : p->s0;
            if (!b->rows) continue;
            for (int64_t x = row * KV; x < (row + 1) * KV; x++)
                b->hi[x] = from ? from[x] : 0;
            b->rad[row] = 0;
        }
    }
}

dp_status dp_truth_run(const dp_problem *p, const dp_truth_request *rq, dp_truth *t, dp_err *e) {
    const dp_status s = tr_truth_alloc(p, rq, t, e);
    if (s) return s;
    const int is_dd = rq->kind == DP_TRUTH_DD, on_device = is_dd && rq->device && !t->backward,
              w = on_device ? p->V
                  : is_dd   ? TR_DD_COLS
                            : TR_W;
    tr_run r = {.p = p,
                .rows = tr_rows_of(p),
                .t = t,
                .prec = rq->bits,
                .u = tr_two_to(-(t->bits < 16000 ? t->bits : 16000)),
                .tiny = is_dd ? TR_DD_TINY : tr_two_to(-10000),
                .want_M = rq->want_M,
                .ncb = (p->V + w - 1) / w};
    r.rel = tr_rel_errors(&r);
    r.device = on_device ? rq->device : NULL;
    r.threads = rq->threads > 0 ? rq->threads : omp_get_max_threads();
    const double steps =
        (double)p->T * p->HV * p->K * p->V; /* a thread is worth waking for about 1 ms of them */
    const double worth = is_dd ? 1e6 : 1e4;
    if (rq->threads <= 0 && r.threads > 1 + steps / worth) r.threads = 1 + (int)(steps / worth);
    r.progress = rq->progress && isatty(STDERR_FILENO);
    r.total = (double)p->T * p->HV * (p->V * (t->backward ? 4.0 : 1.0) + (rq->want_M ? p->K : 0));
    set_blocks(&r);
    if (is_dd) tr_run_dd(&r);
    const int tasks = dp_G(p) * r.ncb,
              n = (2 * r.threads + tasks - 1) /
                  tasks; /* q/k heads at a time: about two tasks a thread */
    for (int h = 0; h < p->H && !is_dd; h += n)
        run_batch(&r, h, p->H - h < n ? p->H - h : n);
    pass_empty_sequences(p, t);
    for (int i = 0; i < DP_NRESULTS; i++)
        tr_ball_finish(&t->field[i]);
    tr_ball_finish(&t->S_cut);
    tr_ball_finish(&t->dS_cut);
    tr_ball_finish(&t->M_seg);
    free(r.block);
    if (r.progress) fprintf(stderr, "\r%16s\r", "");
    if (r.status) dp_truth_free(t);
    return r.status ? dp_fail(e, r.status, "%s", r.err.msg) : DP_OK;
}
