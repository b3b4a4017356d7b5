/* Two subjects on the same inputs (differ.h). */
#include "differ.h"
#include "harness/run/outputs.h"
#include "invariants_work.h"

#include <math.h>
#include <omp.h>
#include <stdio.h>
#include <stdlib.h>

const char *const dp_differ_names[DP_DIFFER_NKINDS] = {"same", "within", "unbounded", "beyond"};

typedef struct {
    const dp_problem *p;
    const dp_check_subject *s;
    int N, backward;
    dp_check_outcome got[2];
    int bounded;
    dp_error_bound bound[2];
    double *stage[2][DP_NSTAGE_TENSORS]; /* bounds */
    dp_differ *out;
} work;

/* One tensor of both: rows, bounds of each (NULL: none), where they stand. */
typedef struct {
    const work *w;
    int stage, field; /* the other is -1 */
    int64_t rows, width;
    const double *x[2], *bound[2];
} pair;

/* ---- places ---------------------------------------------------------------------------------- */

static dp_place of_token(const work *w, int64_t token, int head) {
    dp_place at = dp_place_of((int)(token / (w->p->T / w->N)), head,
                              dp_sequence_of(w->p->cu, w->p->Nseq, token));
    at.token = token;
    return at;
}

/* The first token of the part of a sequence on a rank that holds this token. */
static int64_t part_begin(const work *w, int64_t token) {
    const int64_t L = w->p->T / w->N, rank = token / L * L,
                  sequence = w->p->cu[dp_sequence_of(w->p->cu, w->p->Nseq, token)];
    return sequence > rank ? sequence : rank;
}

/* The first token of a chunk, as stages count them: rank by rank, part by part. */
static int64_t chunk_begin(const work *w, int64_t chunk) {
    int64_t t = 0;
    for (int64_t left = chunk;; left--) {
        const int64_t L = w->p->T / w->N, rank_end = (t / L + 1) * L,
                      end = w->p->cu[dp_sequence_of(w->p->cu, w->p->Nseq, t) + 1],
                      stop = end < rank_end ? end : rank_end;
        if (!left) return t;
        t = t + DP_CHUNK < stop ? t + DP_CHUNK : stop;
    }
}

static dp_place place_of(const pair *x, int64_t row) {
    const work *w = x->w;
    const int HV = w->p->HV;
    if (x->stage >= 0 && dp_stage_tensors[x->stage].kind == DP_PER_RANK)
        return dp_place_of((int)(row / HV), (int)(row % HV), -1);
    if (x->stage >= 0 && dp_stage_tensors[x->stage].kind == DP_PER_CHUNK) {
        dp_place at = of_token(w, chunk_begin(w, row / HV), (int)(row % HV));
        at.chunk = (int)(row / HV);
        return at;
    }
    if (x->stage >= 0) {
        int per;
        int64_t width;
        dp_stage_tensor_token_row(w->p, x->stage, &per, &width);
        return of_token(w, row / per / HV, (int)(row / per % HV));
    }
    const dp_row_kind kind = dp_result_fields[x->field].kind;
    if (kind != DP_OF_TOKENS)
        return dp_place_of(-1, (int)(row % HV), kind == DP_OF_SEQUENCES ? (int)(row / HV) : -1);
    const int64_t per = dp_result_rows_per_token(w->p, x->field);
    const int heads = dp_result_heads(w->p, x->field);
    return of_token(w, row / per / heads, (int)(row / per % heads));
}

/* ---- one tensor ------------------------------------------------------------------------------ */

/* Entries of the row that mean something. */
static int64_t used(const pair *x, int64_t row) {
    if (x->stage != DP_AKK && x->stage != DP_AQK) return x->width;
    const int64_t token = place_of(x, row).token,
                  in_chunk = (token - part_begin(x->w, token)) % DP_CHUNK;
    return (in_chunk + 1) * dp_rows(x->w->p);
}

/* Tensors that a rank does not have (bound 0), and M where no state passes, may be missing. */
static int left_out(const pair *x, int64_t row) {
    if (x->stage < 0 || dp_stage_tensors[x->stage].kind != DP_PER_RANK) return 0;
    if (x->stage != DP_M && x->stage != DP_DM && x->bound[0] && x->bound[1] &&
        x->bound[0][row] + x->bound[1][row] > 0)
        return 0;
    return dp_is_blank(x->x[0] + row * x->width, x->width) ||
           dp_is_blank(x->x[1] + row * x->width, x->width);
}

/* The largest difference of an entry, and which rows are the worst, of rows so far. */
typedef struct {
    int64_t entries, different, row, index, worst;
    double most, share, off, allowed, sum, size;
} found;

static void note_entry(found *f, double a, double b, int64_t row, int64_t i) {
    const double off = isnan(a - b) ? INFINITY : fabs(a - b);
    f->different++;
    if (off <= f->most) return;
    f->most = off;
    f->row = row;
    f->index = i;
}

static void look_at_row(const pair *x, int64_t row, found *f) {
    const double *a = x->x[0] + row * x->width, *b = x->x[1] + row * x->width;
    const int64_t n = left_out(x, row) ? 0 : used(x, row);
    double off2 = 0;
    for (int64_t i = 0; i < n; i++) {
        f->size += isnan(b[i]) ? 0 : b[i] * b[i];
        if (a[i] == b[i] || (isnan(a[i]) && isnan(b[i]))) continue;
        note_entry(f, a[i], b[i], row, i);
        off2 += (a[i] - b[i]) * (a[i] - b[i]);
    }
    f->entries += n;
    f->sum += off2;
    if (off2 == 0 || !x->bound[0] || !x->bound[1]) return;
    const double allowed = x->bound[0][row] + x->bound[1][row];
    const double share = isnan(off2) ? INFINITY : sqrt(off2) / allowed;
    if (share <= f->share) return;
    f->share = share;
    f->off = sqrt(off2);
    f->allowed = allowed;
    f->worst = row;
}

static void add(const pair *x, const char *name) {
    dp_differ *out = x->w->out;
    dp_differ_tensor *t = &out->t[out->n++];
    const int bounded = x->bound[0] && x->bound[1];
    found f = {.most = -1, .share = -1};
    *t = (dp_differ_tensor){.name = name, .stage = x->stage, .only = !x->x[0] ? 2 : !x->x[1]};
    if (t->only) return;
    for (int64_t r = 0; r < x->rows; r++)
        look_at_row(x, r, &f);
    t->entries = f.entries;
    t->different = f.different;
    out->compared += f.entries;
    t->share = t->off = t->allowed = NAN;
    if (!f.different) return;
    t->kind = !bounded ? DP_DIFFER_UNBOUNDED : f.share <= 1 ? DP_DIFFER_WITHIN : DP_DIFFER_BEYOND;
    t->most = f.most;
    t->at = place_of(x, f.row);
    t->index = f.index;
    t->a = x->x[0][f.row * x->width + f.index];
    t->b = x->x[1][f.row * x->width + f.index];
    t->relative = sqrt(f.sum / f.size);
    if (bounded) {
        t->share = f.share;
        t->off = f.off;
        t->allowed = f.allowed;
        t->worst = place_of(x, f.worst);
    }
    if (t->kind == DP_DIFFER_BEYOND && out->first < 0) out->first = out->n - 1;
}

/* ---- all ------------------------------------------------------------------------------------- */

static void add_result(const work *w, int field) {
    pair x = {.w = w, .field = field, .stage = -1};
    dp_result_shape(w->p, field, &x.rows, &x.width);
    for (int k = 0; k < 2; k++) {
        x.x[k] = w->got[k].r.out[field];
        x.bound[k] = w->bounded ? w->bound[k].row[field] : NULL;
    }
    if (x.rows && (x.x[0] || x.x[1])) add(&x, dp_result_fields[field].name);
}

static void add_stage(const work *w, int stage) {
    pair x = {.w = w, .field = -1, .stage = stage};
    const dp_stage_tensor_info *of = &dp_stage_tensors[stage];
    const int of_rank = of->kind == DP_PER_RANK;
    dp_stage_tensor_rows(w->p, w->N, stage, &x.rows, &x.width);
    for (int k = 0; k < 2; k++) {
        x.x[k] = w->got[k].stage[stage];
        x.bound[k] = !w->bounded ? NULL : of_rank ? w->bound[k].rank[of->rank] : w->stage[k][stage];
    }
    if (x.x[0] && x.x[1]) add(&x, of->name);
}

/* Why there is no bound of the subject; "": there is. */
static void find_why(const work *w, int k, char *why, size_t size) {
    const dp_check_subject *s = &w->s[k];
    *why = 0;
    if (dp_check_drops(s))
        snprintf(why, size, "what it drops is in no bound of two kernels");
    else
        dp_check_bounds_there(s, w->p, why, size);
}

static int has_stages(const work *w, int k) {
    const dp_design d = dp_check_design(&w->s[k], w->p);
    return d.chunk == DP_CHUNK && !d.chunk_backward;
}

/* Stages whose bound is asked for: those that both show, in chunks of 64 tokens. */
static void make_bounds(work *w) {
    const double t0 = omp_get_wtime();
    double *both[DP_NSTAGE_TENSORS];
    for (int k = 0; k < 2; k++)
        find_why(w, k, w->out->unbounded[k], sizeof w->out->unbounded[k]);
    w->bounded = !*w->out->unbounded[0] && !*w->out->unbounded[1];
    const int plain = has_stages(w, 0) && has_stages(w, 1);
    for (int i = 0; i < DP_NSTAGE_TENSORS; i++)
        both[i] = plain && w->got[0].stage[i] ? w->got[1].stage[i] : NULL;
    for (int k = 0; k < 2 && w->bounded; k++)
        dp_check_bounds_make(&w->s[k], w->p, w->N, w->backward, both, &w->bound[k], w->stage[k]);
    w->out->seconds[2] = omp_get_wtime() - t0;
}

static void compare_all(const work *w) {
    for (int back = 0; back < (w->backward ? 2 : 1); back++) {
        for (int i = 0; i < DP_NSTAGE_TENSORS; i++)
            if (dp_stage_tensors[i].backward == back) add_stage(w, i);
        for (int i = 0; i < DP_NRESULTS; i++)
            if (dp_result_fields[i].backward == back) add_result(w, i);
    }
}

/* Stages without a bound decide only where no result is compared. */
static dp_differ_kind worst(const dp_differ *out) {
    dp_differ_kind all = DP_DIFFER_SAME, bounded = DP_DIFFER_SAME;
    int results = 0;
    for (int i = 0; i < out->n; i++) {
        const dp_differ_tensor *t = &out->t[i];
        results += t->stage < 0 && !t->only;
        if (t->kind > all) all = t->kind;
        if (t->kind > bounded && (t->stage < 0 || t->kind != DP_DIFFER_UNBOUNDED))
            bounded = t->kind;
    }
    return results ? bounded : all;
}

static int any_differs(const work *w) {
    for (int i = 0; i < w->out->n; i++)
        if (w->out->t[i].different) return 1;
    return 0;
}

/* One that shows what it likes goes first: the simulated ranks then keep no other stages. */
static dp_status run_both(work *w, int *who, dp_err *e) {
    const int first = !w->s[0].library && w->s[1].library;
    for (int i = 0; i < 2; i++) {
        const int k = i ? !first : first;
        const double t0 = omp_get_wtime();
        dp_check_subject s = w->s[k];
        if (i) s.like = w->got[first].stage;
        *who = k;
        const dp_status st = dp_check_run_problem(&s, w->p, w->N, w->backward, &w->got[k], e);
        if (st) return st;
        w->out->seconds[k] = omp_get_wtime() - t0;
    }
    return DP_OK;
}

dp_status dp_differ_run(const dp_problem *p, const dp_check_subject s[2], int N, int backward,
                        dp_differ *out, int *who, dp_err *e) {
    work w = {.p = p, .s = s, .N = N, .backward = backward && p->dout, .out = out};
    dp_status st = DP_OK;
    *out = (dp_differ){.first = -1};
    st = run_both(&w, who, e);
    if (!st) compare_all(&w);
    if (!st && any_differs(&w)) { /* the same again, with bounds */
        make_bounds(&w);
        out->n = 0;
        out->compared = 0;
        out->first = -1;
        compare_all(&w);
    }
    out->kind = worst(out);
    for (int k = 0; k < 2; k++) {
        if (w.bounded) dp_error_bound_free(&w.bound[k]);
        for (int i = 0; i < DP_NSTAGE_TENSORS; i++)
            free(w.stage[k][i]);
        dp_check_outcome_free(&w.got[k]);
    }
    return st;
}
