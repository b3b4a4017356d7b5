/* ref/truth/truth_step.c - the step recurrence and its adjoint (math.md b, d) in MPFR, on the
 * columns v0..v0+w-1 of one value head.
 *
 * The adjoint recomputes the states of one block from its checkpoint by the same operations in the
 * same order as the forward pass. So they are the same bits. It never needs Sbar_t itself: with S =
 * S_(t-1) and d = exp(g_t),
 *     dE Sbar'              = d o (dE S')
 *     rowsum(dSbar o Sbar)  = rowsum((d o dSbar) o S) = rowsum(G_new o S).
 */
#include "ref/arithmetic/mp_three.h"
#include "truth_impl.h"

#include <math.h>

static inline mpfr_srcptr decay_at(const tr_task *c, int64_t t, int64_t k) {
    const int64_t Kg = dp_Kg(c->run->p);
    return mp_at(c->head->d, t * Kg + (Kg > 1 ? k : 0));
}

/* The K numbers of entry e that key j of token t has. */
static inline mp_array entry_at(const tr_task *c, int e, int64_t t, int64_t j) {
    const dp_problem *p = c->run->p;
    return mp_from(tr_entry_rows(c->run, c->qk, c->head, e), (t * p->R + dp_row_key(p, j)) * p->K);
}

/* dst = diag(exp g_t) src */
static void decay(const tr_task *c, int64_t t, mp_array dst, mp_array src) {
    for (int64_t k = 0; k < c->run->p->K; k++) {
        mpfr_srcptr d = decay_at(c, t, k);
        for (int64_t i = k * c->w; i < (k + 1) * c->w; i++)
            mp_mul(mp_at(dst, i), mp_at(src, i), d);
    }
}

/* Keys of a token that read one state and then write to it. */
typedef struct {
    int64_t first, end;
} together;

static together group_of(const dp_problem *p, int64_t i) {
    const int64_t n = dp_keys_at_once(p);
    return (together){i * n, (i + 1) * n};
}
static int64_t groups(const dp_problem *p) { return dp_rows(p) / dp_keys_at_once(p); }

/* Row j of a token and head among the rows of an input or a result that may have an axis R. */
static int64_t value_row(const tr_task *c, int64_t t, int64_t j) {
    const dp_problem *p = c->run->p;
    return (t * p->HV + c->hv) * p->R + dp_row_key(p, j);
}

static void set_value(const tr_task *c, int64_t t, int64_t j, mp_array E) {
    const dp_problem *p = c->run->p;
    const dp_entry value = dp_row_of(p, j)->value;
    if (c->is_M || !value.sign)
        mp_zero(E, c->w);
    else if (dp_entry_is(value, DP_INPUT_V))
        mp_set_doubles(E, p->v + value_row(c, t, j) * p->V + c->v0, c->w);
    else
        mp_copy(E, mp_from(c->head->values, (t * dp_rows(p) + j) * p->V + c->v0), c->w);
}

/* E = value - read S */
static void residual(const tr_task *c, int64_t t, together g, mp_array S, mp_array E) {
    const dp_problem *p = c->run->p;
    mpfr_ptr tmp = mp_at(c->tmp, 0);
    for (int64_t j = g.first; j < g.end; j++) {
        mp_array Ej = mp_from(E, j * c->w);
        const int read = tr_read_of(c->run, j);
        set_value(c, t, j, Ej);
        if (read < 0) continue;
        mp_array key = entry_at(c, read, t, j);
        for (int64_t k = 0; k < p->K; k++)
            for (int64_t v = 0; v < c->w; v++)
                mp_sub_product(mp_at(Ej, v), mp_at(key, k), mp_at(S, k * c->w + v), tmp);
    }
}

/* out = diag(strength) in */
static void scale_rows(const tr_task *c, int64_t t, together g, mp_array out, mp_array in) {
    for (int64_t j = g.first; j < g.end; j++)
        for (int64_t i = j * c->w; i < (j + 1) * c->w; i++)
            mp_mul(mp_at(out, i), mp_at(in, i),
                   mp_at(c->head->strength, t * dp_rows(c->run->p) + j));
}

/* S += write' U */
static void write_state(const tr_task *c, int64_t t, together g, mp_array U, mp_array S) {
    const dp_problem *p = c->run->p;
    mpfr_ptr tmp = mp_at(c->tmp, 0);
    for (int64_t k = 0; k < p->K; k++)
        for (int64_t j = g.first; j < g.end; j++) {
            mpfr_srcptr key = mp_at(entry_at(c, tr_write_of(c->run, j), t, j), k);
            for (int64_t v = 0; v < c->w; v++)
                mp_add_product(mp_at(S, k * c->w + v), key, mp_at(U, j * c->w + v), tmp);
        }
}

static void output(const tr_task *c, int64_t t, mp_array S) {
    const dp_problem *p = c->run->p;
    mpfr_ptr tmp = mp_at(c->tmp, 0);
    mp_zero(c->row, c->w);
    for (int64_t k = 0; k < p->K; k++)
        for (int64_t v = 0; v < c->w; v++)
            mp_add_product(mp_at(c->row, v), mp_at(c->qk->q, t * p->K + k), mp_at(S, k * c->w + v),
                           tmp);
    for (int64_t v = 0; v < c->w; v++) {
        mpfr_mul_d(mp_at(c->row, v), mp_at(c->row, v), p->scale, MPFR_RNDN);
        tr_store(&c->run->t->field[DP_RESULT_O], (t * p->HV + c->hv) * p->V + c->v0 + v,
                 mp_at(c->row, v), tmp);
    }
}

static void forward_token(const tr_task *c, int64_t t, mp_array S, mp_array E) {
    const dp_problem *p = c->run->p;
    const int before = dp_recurrence_of(p)->before;
    for (int64_t i = 0; i < groups(p); i++) {
        const together g = group_of(p, i);
        if (before) residual(c, t, g, S, E);
        if (!i) decay(c, t, S, S);
        if (!before) residual(c, t, g, S, E);
        scale_rows(c, t, g, c->U, E);
        write_state(c, t, g, c->U, S);
    }
}

/* The task's columns of a [K][width] matrix, from or to row `row` of it. */
static void load_state(const tr_task *c, mp_array S, const double *x, int64_t row) {
    const dp_problem *p = c->run->p;
    for (int64_t k = 0; k < p->K; k++)
        mp_set_doubles(mp_from(S, k * c->w), x ? x + (row * p->K + k) * p->V + c->v0 : NULL, c->w);
}
static void store_state(const tr_task *c, mp_array S, dp_ball *b, int64_t row) {
    const int64_t K = c->run->p->K, width = b->width / K;
    for (int64_t k = 0; k < K; k++)
        for (int64_t v = 0; v < c->w; v++)
            tr_store(b, (row * K + k) * width + c->v0 + v, mp_at(S, k * c->w + v),
                     mp_at(c->tmp, 0));
}

void tr_forward_block(tr_task *c, int b, int backward) {
    const tr_run *r = c->run;
    const dp_problem *p = r->p;
    const tr_block *k = &r->block[b];
    const int64_t Kw = (int64_t)p->K * c->w, Rw = (int64_t)dp_rows(p) * c->w;
    const int64_t state_row = (int64_t)k->seq * p->HV + c->hv;
    if (k->first_of_seq) load_state(c, c->S, p->s0, state_row);
    if (backward) mp_copy(mp_from(c->ckpt, b * Kw), c->S, Kw);
    if (k->cut >= 0) store_state(c, c->S, &r->t->S_cut, (int64_t)k->cut * p->HV + c->hv);
    for (int64_t t = k->t0; t < k->t1; t++) {
        forward_token(c, t, c->S, backward ? mp_from(c->E, t * Rw) : c->E);
        output(c, t, c->S);
    }
    if (k->last_of_seq) store_state(c, c->S, &r->t->field[DP_RESULT_FINAL_STATE], state_row);
}

void tr_M_segment(tr_task *c, int seg) {
    const tr_run *r = c->run;
    mp_zero(c->S, (int64_t)r->p->K * c->w);
    for (int v = 0; v < c->w; v++)
        mpfr_set_ui(mp_at(c->S, (int64_t)(c->v0 + v) * c->w + v), 1, MPFR_RNDN);
    for (int64_t t = r->t->mark[seg]; t < r->t->mark[seg + 1]; t++)
        forward_token(c, t, c->S, c->E);
    store_state(c, c->S, &r->t->M_seg, (int64_t)seg * r->p->HV + c->hv);
}

/* tape[i G + j] = the state before keys j of the G groups of token t0 + i, the last one that after
 * the block. */
static void rebuild_tape(const tr_task *c, int b) {
    const tr_block *k = &c->run->block[b];
    const dp_problem *p = c->run->p;
    const int64_t Kw = (int64_t)p->K * c->w, Rw = (int64_t)dp_rows(p) * c->w, G = groups(p);
    mp_copy(c->tape, mp_from(c->ckpt, b * Kw), Kw);
    for (int64_t i = 0; i < (k->t1 - k->t0) * G; i++) {
        const int64_t t = k->t0 + i / G;
        mp_array from = mp_from(c->tape, i * Kw), to = mp_from(c->tape, (i + 1) * Kw);
        if (i % G)
            mp_copy(to, from, Kw);
        else
            decay(c, t, to, from);
        scale_rows(c, t, group_of(p, i % G), c->U, mp_from(c->E, t * Rw));
        write_state(c, t, group_of(p, i % G), c->U, to);
    }
}

/* acc = sum over the task's columns of a_v b_v */
static void dot(mpfr_ptr acc, mp_array a, mp_array b, int w, mpfr_ptr tmp) {
    mp_mul(acc, mp_at(a, 0), mp_at(b, 0));
    for (int v = 1; v < w; v++)
        mp_add_product(acc, mp_at(a, v), mp_at(b, v), tmp);
}

/* G += q_t (scale do_t)';  dq_t = S_t (scale do_t) */
static void backward_output(const tr_task *c, int64_t t, int64_t i, mp_array S) {
    const dp_problem *p = c->run->p;
    mpfr_ptr tmp = mp_at(c->tmp, 0);
    mp_set_doubles(c->row, p->dout + (t * p->HV + c->hv) * p->V + c->v0, c->w);
    for (int v = 0; v < c->w; v++)
        mpfr_mul_d(mp_at(c->row, v), mp_at(c->row, v), p->scale, MPFR_RNDN);
    for (int64_t k = 0; k < p->K; k++) {
        for (int v = 0; v < c->w; v++)
            mp_add_product(mp_at(c->S, k * c->w + v), mp_at(c->qk->q, t * p->K + k),
                           mp_at(c->row, v), tmp);
        dot(mp_at(c->dq, i * p->K + k), mp_from(S, k * c->w), c->row, c->w, tmp);
    }
}

/* += the gradient of column v of factor `of` through row j of token t, its own dE [w]. x is
 * overwritten. */
static void add_value_gradient(const tr_task *c, int64_t t, int64_t j, int of, int v, mp_array dE,
                               mpfr_ptr x, mpfr_ptr sum) {
    const dp_problem *p = c->run->p;
    const dp_entry e = dp_row_of(p, j)->value;
    const int left = dp_entry_has(e, of);
    if (!left) return;
    mpfr_mul_si(x, mp_at(dE, j * c->w + v), e.sign * left, MPFR_RNDN);
    for (int m = 0, own = 1; m < e.n; m++) {
        const int64_t at = dp_factor_token(p, e.of[m], t);
        if (own && e.of[m] == of)
            own = 0;
        else
            mpfr_mul_d(x, x,
                       at < 0
                           ? 0
                           : dp_input_of(p, dp_factor_input(
                                                e.of[m]))[value_row(c, at, j) * p->V + c->v0 + v],
                       MPFR_RNDN);
    }
    mpfr_add(sum, sum, x, MPFR_RNDN);
}

/* Gradients of what the values of a token are products of, each summed over its rows, and those of
 * the token after that look back. */
static void store_value_gradients(const tr_task *c, int64_t t) {
    const dp_problem *p = c->run->p;
    mpfr_ptr tmp = mp_at(c->tmp, 0), sum = mp_at(c->tmp, 1), x = mp_at(c->tmp, 2);
    const int64_t nw = dp_rows(p) * (int64_t)c->w, after = c->later.mem ? dp_token_after(p, t) : -1;
    mp_array later = c->later;
    if (later.mem) later = mp_from(later, t % dp_lag(p) * nw);
    for (int i = 0; i < DP_VALUES_MOST; i++)
        for (int64_t key = 0; key < p->R && dp_input_of(p, dp_row_values[i]); key++)
            for (int v = 0; v < c->w; v++) {
                const int64_t at = value_row(c, t, key) * p->V + c->v0 + v;
                mpfr_set_zero(sum, 1);
                for (int64_t j = 0; j < dp_rows(p); j++) {
                    if (dp_row_key(p, j) != key) continue;
                    add_value_gradient(c, t, j, dp_row_values[i], v, c->dE, x, sum);
                    if (after >= 0)
                        add_value_gradient(c, after, j, dp_row_values[i] | DP_PREVIOUS, v, later, x,
                                           sum);
                }
                tr_store(&c->run->t->field[dp_gradient_of(dp_row_values[i])], at, sum, tmp);
            }
    if (c->later.mem) mp_copy(later, c->dE, nw);
}

/* Gradients of entries and strengths of the tokens after the block, from where the block after left
 * them. */
static void keep_later(const tr_task *c, const tr_block *k) {
    const dp_problem *p = c->run->p;
    const int64_t n = k->t1 - k->t0, RK = (int64_t)p->R * p->K, rows = dp_rows(p);
    for (int64_t i = dp_lag(p) - 1; i >= 0; i--) {
        for (int e = 0; e < c->run->rows.n; e++)
            mp_copy(mp_from(c->dentry[e], (n + i) * RK), mp_from(c->dentry[e], i * RK), RK);
        mp_copy(mp_from(c->dstrength, (n + i) * rows), mp_from(c->dstrength, i * rows), rows);
    }
}

/* dU = write G, dstrength = sum_v E o dU, dE = diag(strength) dU, U = diag(strength) E */
static void backward_residual(const tr_task *c, int64_t t, int64_t i, together g, mp_array E) {
    const dp_problem *p = c->run->p;
    mpfr_ptr tmp = mp_at(c->tmp, 0);
    for (int64_t j = g.first; j < g.end; j++) {
        mp_array key = entry_at(c, tr_write_of(c->run, j), t, j);
        mp_zero(mp_from(c->dU, j * c->w), c->w);
        for (int64_t k = 0; k < p->K; k++)
            for (int v = 0; v < c->w; v++)
                mp_add_product(mp_at(c->dU, j * c->w + v), mp_at(key, k), mp_at(c->S, k * c->w + v),
                               tmp);
        if (!dp_entry_is_one(dp_row_of(p, j)->strength))
            dot(mp_at(c->dstrength, i * dp_rows(p) + j), mp_from(E, j * c->w),
                mp_from(c->dU, j * c->w), c->w, tmp);
    }
    scale_rows(c, t, g, c->dE, c->dU);
    scale_rows(c, t, g, c->U, E);
}

/* Where the gradient of entry e's channel k is summed, that of key j of token t0 + i. */
static mpfr_ptr gradient_at(const tr_task *c, int e, int64_t i, int64_t j, int64_t k) {
    const dp_problem *p = c->run->p;
    return mp_at(c->dentry[e], (i * p->R + dp_row_key(p, j)) * p->K + k);
}

/* dg = rowsum(G o S);  of one gate a head the sum over channels. */
static void add_gate(const tr_task *c, int64_t i, int64_t k, mpfr_srcptr own) {
    const int64_t Kg = dp_Kg(c->run->p);
    mpfr_ptr dg = mp_at(c->dg, i * Kg + (Kg > 1 ? k : 0));
    if (Kg > 1 || k == 0)
        mpfr_set(dg, own, MPFR_RNDN);
    else
        mpfr_add(dg, dg, own, MPFR_RNDN);
}

/* dwrite = U G'; dread = - d o (dE S'), G <- d o (G - read' dE), dg = rowsum(G o S). S is the state
 * before, d the decay of a token's first keys, else 1. `before`: dread = - dE S', G <- d o G, dg =
 * rowsum(G o S), G <- G - read' dE. An entry that reads and writes has one gradient. */
static void backward_state(const tr_task *c, int64_t t, int64_t i, together g, mp_array S) {
    const dp_problem *p = c->run->p;
    const int before = dp_recurrence_of(p)->before, decays = !g.first;
    mpfr_ptr tmp = mp_at(c->tmp, 0), sum = mp_at(c->tmp, 1);
    for (int64_t k = 0; k < p->K; k++) {
        mp_array Gk = mp_from(c->S, k * c->w), Sk = mp_from(S, k * c->w);
        mpfr_srcptr d = decay_at(c, t, k);
        for (int64_t j = g.first; j < g.end; j++) {
            mpfr_ptr to = gradient_at(c, tr_write_of(c->run, j), i, j, k);
            dot(sum, mp_from(c->U, j * c->w), Gk, c->w, tmp);
            mpfr_add(to, to, sum, MPFR_RNDN);
        }
        for (int64_t j = g.first; j < g.end; j++) {
            const int read = tr_read_of(c->run, j);
            if (read < 0) continue;
            mpfr_ptr to = gradient_at(c, read, i, j, k);
            dot(sum, mp_from(c->dE, j * c->w), Sk, c->w, tmp);
            if (decays && !before) mp_mul(sum, sum, d);
            mpfr_sub(to, to, sum, MPFR_RNDN);
        }
        for (int pass = 0; pass < 2; pass++) {
            for (int64_t j = g.first; j < g.end && pass == before; j++) {
                const int read = tr_read_of(c->run, j);
                if (read < 0) continue;
                mpfr_srcptr key = mp_at(entry_at(c, read, t, j), k);
                for (int v = 0; v < c->w; v++)
                    mp_sub_product(mp_at(Gk, v), key, mp_at(c->dE, j * c->w + v), tmp);
            }
            if (pass || !decays) continue;
            for (int v = 0; v < c->w; v++)
                mp_mul(mp_at(Gk, v), mp_at(Gk, v), d);
            dot(sum, Gk, Sk, c->w, tmp);
            add_gate(c, i, k, sum);
        }
    }
}

void tr_backward_block(tr_task *c, int b) {
    const tr_run *r = c->run;
    const dp_problem *p = r->p;
    const tr_block *k = &r->block[b];
    const int64_t Kw = (int64_t)p->K * c->w, Rw = (int64_t)dp_rows(p) * c->w;
    const int64_t state_row = (int64_t)k->seq * p->HV + c->hv;
    rebuild_tape(c, b);
    if (dp_recurrence_looks_back(dp_recurrence_of(p))) keep_later(c, k);
    if (k->last_of_seq) load_state(c, c->S, p->dstate, state_row);
    for (int64_t t = k->t1 - 1; t >= k->t0; t--) {
        const int64_t i = t - k->t0, G = groups(p);
        backward_output(c, t, i, mp_from(c->tape, (i + 1) * G * Kw));
        for (int e = 0; e < r->rows.n; e++)
            mp_zero(mp_from(c->dentry[e], i * p->R * p->K), p->R * p->K);
        for (int64_t j = G - 1; j >= 0; j--) {
            backward_residual(c, t, i, group_of(p, j), mp_from(c->E, t * Rw));
            backward_state(c, t, i, group_of(p, j), mp_from(c->tape, (i * G + j) * Kw));
        }
        store_value_gradients(c, t);
    }
    if (k->cut >= 0) store_state(c, c->S, &r->t->dS_cut, (int64_t)k->cut * p->HV + c->hv);
    if (k->first_of_seq) store_state(c, c->S, &r->t->field[DP_RESULT_DS0], state_row);
}

void tr_task_alloc(tr_task *c, int backward) {
    const tr_run *r = c->run;
    const dp_problem *p = r->p;
    const int64_t K = p->K, n = dp_rows(p), Kw = K * c->w, Rw = n * c->w, len = r->len;
    c->S = mp_alloc(Kw, r->prec);
    c->U = mp_alloc(Rw, r->prec);
    c->row = mp_alloc(c->w, r->prec);
    c->tmp = mp_alloc(4, r->prec);
    c->E = mp_alloc(backward ? p->T * Rw : Rw, r->prec);
    if (!backward) return;
    c->ckpt = mp_alloc(r->nblock * Kw, r->prec);
    c->tape = mp_alloc((len * groups(p) + 1) * Kw, r->prec);
    c->dU = mp_alloc(Rw, r->prec);
    c->dE = mp_alloc(Rw, r->prec);
    c->dq = mp_alloc(len * K, r->prec);
    c->dk = mp_alloc(len * p->R * K, r->prec);
    c->dg = mp_alloc(len * dp_Kg(p), r->prec);
    c->dbeta = mp_alloc(len * p->R, r->prec);
    c->dstrength = mp_alloc((len + dp_lag(p)) * n, r->prec);
    for (int e = 0; e < r->rows.n; e++)
        c->dentry[e] = mp_alloc((len + dp_lag(p)) * p->R * K, r->prec);
    if (tr_values_look_back(p)) c->later = mp_alloc(dp_lag(p) * Rw, r->prec);
    if (p->angle) c->dphi = mp_alloc(len * dp_pairs(p), r->prec);
}

void tr_task_free(tr_task *c) {
    mp_array *m[] = {&c->S,     &c->ckpt,      &c->E,     &c->tape, &c->U,  &c->dU,
                     &c->dE,    &c->row,       &c->tmp,   &c->dq,   &c->dk, &c->dg,
                     &c->dbeta, &c->dstrength, &c->later, &c->dphi};
    for (size_t i = 0; i < sizeof m / sizeof *m; i++)
        mp_free(m[i]);
    for (int e = 0; e < DP_MAX_ENTRIES; e++)
        mp_free(&c->dentry[e]);
}

void tr_store(dp_ball *b, int64_t i, mpfr_srcptr x, mpfr_ptr tmp) {
    b->hi[i] = mpfr_get_d(x, MPFR_RNDN);
    b->lo[i] = 0;
    if (!isfinite(b->hi[i])) return;
    mpfr_sub_d(tmp, x, b->hi[i], MPFR_RNDN); /* exact: hi holds the leading bits of x */
    b->lo[i] = mpfr_get_d(tmp, MPFR_RNDN);
}
