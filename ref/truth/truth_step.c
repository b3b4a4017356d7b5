/* ref/truth/truth_step.c - the step recurrence and its adjoint (math.md b, d) in MPFR, on the
 * columns v0..v0+w-1 of one value head.
 *
 * The adjoint recomputes the states of one block from its checkpoint by the same operations in the
 * same order as the forward pass, so they are the same bits. It never needs Sbar_t itself: with
 * S = S_(t-1) and d = exp(g_t),
 *     dE Sbar'              = d o (dE S')
 *     rowsum(dSbar o Sbar)  = rowsum((d o dSbar) o S) = rowsum(G_new o S).
 */
#include "truth_impl.h"

#include <math.h>

static inline mpfr_srcptr decay_at(const tr_task *c, int64_t t, int64_t k) {
    const int64_t Kg = dp_Kg(c->run->p);
    return mp_at(c->head->d, t * Kg + (Kg > 1 ? k : 0));
}
static inline mpfr_srcptr key_at(const tr_task *c, int64_t t, int64_t j, int64_t k) {
    return mp_at(c->qk->k, (t * c->run->p->R + j) * c->run->p->K + k);
}

/* What erases; the key itself but for dp_by_gates, which has one key a token, and dp_by_factors,
 * whose first key reads along -lr_a and whose second does not. */
static inline mpfr_srcptr erasing_at(const tr_task *c, int64_t t, int64_t j, int64_t k) {
    return c->head->erasing.mem ? mp_at(c->head->erasing, t * c->run->p->K + k)
                                : key_at(c, t, j, k);
}

static inline void mul_add(mpfr_ptr acc, mpfr_srcptr a, mpfr_srcptr b, mpfr_ptr tmp) {
    mpfr_mul(tmp, a, b, MPFR_RNDN);
    mpfr_add(acc, acc, tmp, MPFR_RNDN);
}
static inline void mul_sub(mpfr_ptr acc, mpfr_srcptr a, mpfr_srcptr b, mpfr_ptr tmp) {
    mpfr_mul(tmp, a, b, MPFR_RNDN);
    mpfr_sub(acc, acc, tmp, MPFR_RNDN);
}

/* dst = diag(exp g_t) src */
static void decay(const tr_task *c, int64_t t, mp_array dst, mp_array src) {
    for (int64_t k = 0; k < c->run->p->K; k++) {
        mpfr_srcptr d = decay_at(c, t, k);
        for (int64_t i = k * c->w; i < (k + 1) * c->w; i++)
            mpfr_mul(mp_at(dst, i), mp_at(src, i), d, MPFR_RNDN);
    }
}

/* Does key j of a token read the state? */
static int reads(const dp_problem *p, int64_t j) {
    return dp_erases(p) && !(dp_by_factors(p) && j);
}

/* E = v_t - k_t Sbar, or v_t where nothing is erased */
static void residual(const tr_task *c, int64_t t, mp_array Sbar, mp_array E) {
    const dp_problem *p = c->run->p;
    mpfr_ptr tmp = mp_at(c->tmp, 0);
    for (int64_t j = 0; j < p->R; j++) {
        mp_array Ej = mp_from(E, j * c->w);
        if (c->head->values.mem && !c->is_M)
            mp_copy(Ej, mp_from(c->head->values, t * p->V + c->v0), c->w);
        else
            mp_set_doubles(Ej,
                           c->is_M ? NULL : p->v + ((t * p->HV + c->hv) * p->R + j) * p->V + c->v0,
                           1, c->w);
        for (int64_t k = 0; k < p->K && reads(p, j); k++)
            for (int64_t v = 0; v < c->w; v++)
                mul_sub(mp_at(Ej, v), erasing_at(c, t, j, k), mp_at(Sbar, k * c->w + v), tmp);
    }
}

static void scale_rows(const tr_task *c, int64_t t, mp_array out,
                       mp_array in) { /* out = diag(beta_t) in */
    for (int64_t j = 0; j < c->run->p->R; j++)
        for (int64_t i = j * c->w; i < (j + 1) * c->w; i++)
            mpfr_mul(mp_at(out, i), mp_at(in, i), mp_at(c->head->beta, t * c->run->p->R + j),
                     MPFR_RNDN);
}

/* S += k_t' U */
static void write_state(const tr_task *c, int64_t t, mp_array U, mp_array S) {
    const dp_problem *p = c->run->p;
    mpfr_ptr tmp = mp_at(c->tmp, 0);
    for (int64_t k = 0; k < p->K; k++)
        for (int64_t j = 0; j < p->R; j++)
            for (int64_t v = 0; v < c->w; v++)
                mul_add(mp_at(S, k * c->w + v), key_at(c, t, j, k), mp_at(U, j * c->w + v), tmp);
}

static void output(const tr_task *c, int64_t t, mp_array S) {
    const dp_problem *p = c->run->p;
    mpfr_ptr tmp = mp_at(c->tmp, 0);
    mp_zero(c->row, c->w);
    for (int64_t k = 0; k < p->K; k++)
        for (int64_t v = 0; v < c->w; v++)
            mul_add(mp_at(c->row, v), mp_at(c->qk->q, t * p->K + k), mp_at(S, k * c->w + v), tmp);
    for (int64_t v = 0; v < c->w; v++) {
        mpfr_mul_d(mp_at(c->row, v), mp_at(c->row, v), p->scale, MPFR_RNDN);
        tr_store(&c->run->t->field[DP_RESULT_O], (t * p->HV + c->hv) * p->V + c->v0 + v,
                 mp_at(c->row, v), tmp);
    }
}

static void forward_token(const tr_task *c, int64_t t, mp_array S, mp_array E) {
    if (dp_by_factors(c->run->p)) residual(c, t, S, E);
    decay(c, t, S, S);
    if (!dp_by_factors(c->run->p)) residual(c, t, S, E);
    scale_rows(c, t, c->U, E);
    write_state(c, t, c->U, S);
}

/* The task's columns of a [K][width] matrix, from or to row `row` of it. */
static void load_state(const tr_task *c, mp_array S, const double *x, int64_t row) {
    const dp_problem *p = c->run->p;
    for (int64_t k = 0; k < p->K; k++)
        mp_set_doubles(mp_from(S, k * c->w), x ? x + (row * p->K + k) * p->V + c->v0 : NULL, 1,
                       c->w);
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
    const int64_t Kw = (int64_t)p->K * c->w, Rw = (int64_t)p->R * c->w;
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

/* tape[i] = state entering token t0 + i, tape[n] = state after the block. */
static void rebuild_tape(const tr_task *c, int b) {
    const tr_block *k = &c->run->block[b];
    const int64_t Kw = (int64_t)c->run->p->K * c->w, Rw = (int64_t)c->run->p->R * c->w;
    mp_copy(c->tape, mp_from(c->ckpt, b * Kw), Kw);
    for (int64_t t = k->t0; t < k->t1; t++) {
        mp_array to = mp_from(c->tape, (t - k->t0 + 1) * Kw);
        decay(c, t, to, mp_from(c->tape, (t - k->t0) * Kw));
        scale_rows(c, t, c->U, mp_from(c->E, t * Rw));
        write_state(c, t, c->U, to);
    }
}

/* acc = sum over the task's columns of a_v b_v */
static void dot(mpfr_ptr acc, mp_array a, mp_array b, int w, mpfr_ptr tmp) {
    mpfr_mul(acc, mp_at(a, 0), mp_at(b, 0), MPFR_RNDN);
    for (int v = 1; v < w; v++)
        mul_add(acc, mp_at(a, v), mp_at(b, v), tmp);
}

/* G += q_t (scale do_t)';  dq_t = S_t (scale do_t) */
static void backward_output(const tr_task *c, int64_t t, int64_t i, mp_array S) {
    const dp_problem *p = c->run->p;
    mpfr_ptr tmp = mp_at(c->tmp, 0);
    mp_set_doubles(c->row, p->dout + (t * p->HV + c->hv) * p->V + c->v0, 1, c->w);
    for (int v = 0; v < c->w; v++)
        mpfr_mul_d(mp_at(c->row, v), mp_at(c->row, v), p->scale, MPFR_RNDN);
    for (int64_t k = 0; k < p->K; k++) {
        for (int v = 0; v < c->w; v++)
            mul_add(mp_at(c->S, k * c->w + v), mp_at(c->qk->q, t * p->K + k), mp_at(c->row, v),
                    tmp);
        dot(mp_at(c->dq, i * p->K + k), mp_from(S, k * c->w), c->row, c->w, tmp);
    }
}

/* dv = dE or, of write o v, dv = write o dE and dwrite = v o dE: row `row` of either. */
static void store_value_gradients(const tr_task *c, int64_t row, mp_array dE) {
    const dp_problem *p = c->run->p;
    dp_ball *f = c->run->t->field;
    mpfr_ptr tmp = mp_at(c->tmp, 0), x = mp_at(c->tmp, 1);
    for (int v = 0; v < c->w; v++) {
        const int64_t at = row * p->V + c->v0 + v;
        if (!c->head->values.mem) {
            tr_store(&f[DP_RESULT_DV], at, mp_at(dE, v), tmp);
            continue;
        }
        mpfr_mul_d(x, mp_at(dE, v), p->write[at], MPFR_RNDN);
        tr_store(&f[DP_RESULT_DV], at, x, tmp);
        mpfr_mul_d(x, mp_at(dE, v), p->v[at], MPFR_RNDN);
        tr_store(&f[DP_RESULT_DWRITE], at, x, tmp);
    }
}

/* dU = k_t G, dbeta_t = sum_v E o dU, dE = diag(beta_t) dU = dv_t, U = diag(beta_t) E */
static void backward_residual(const tr_task *c, int64_t t, int64_t i, mp_array E) {
    const dp_problem *p = c->run->p;
    mpfr_ptr tmp = mp_at(c->tmp, 0);
    mp_zero(c->dU, (int64_t)p->R * c->w);
    for (int64_t j = 0; j < p->R; j++) {
        for (int64_t k = 0; k < p->K; k++)
            for (int v = 0; v < c->w; v++)
                mul_add(mp_at(c->dU, j * c->w + v), key_at(c, t, j, k), mp_at(c->S, k * c->w + v),
                        tmp);
        dot(mp_at(c->dbeta, i * p->R + j), mp_from(E, j * c->w), mp_from(c->dU, j * c->w), c->w,
            tmp);
    }
    scale_rows(c, t, c->dE, c->dU);
    scale_rows(c, t, c->U, E);
    for (int64_t j = 0; j < p->R; j++)
        store_value_gradients(c, (t * p->HV + c->hv) * p->R + j, mp_from(c->dE, j * c->w));
}

/* dk_t = U G' - d o (dE S');  G <- d o (G - k_t' dE);  dg_t = rowsum(G o S), S = S_(t-1). Of
 * erasing keys the second part of dk is their gradient, and G loses theirs; where nothing is erased
 * neither second part is there. */
static void backward_state(const tr_task *c, int64_t t, int64_t i, mp_array S) {
    const dp_problem *p = c->run->p;
    const int64_t Kg = dp_Kg(p);
    mpfr_ptr tmp = mp_at(c->tmp, 0), sum = mp_at(c->tmp, 1);
    for (int64_t k = 0; k < p->K; k++) {
        mp_array Gk = mp_from(c->S, k * c->w), Sk = mp_from(S, k * c->w);
        mpfr_srcptr d = decay_at(c, t, k);
        for (int64_t j = 0; j < p->R; j++) {
            mpfr_ptr dk = mp_at(c->dk, (i * p->R + j) * p->K + k);
            dot(dk, mp_from(c->U, j * c->w), Gk, c->w, tmp);
            if (!dp_erases(p)) continue;
            dot(sum, mp_from(c->dE, j * c->w), Sk, c->w, tmp);
            if (c->derasing.mem) {
                dk = mp_at(c->derasing, i * p->K + k);
                mpfr_set_zero(dk, 1);
            }
            mul_sub(dk, d, sum, tmp);
        }
        for (int64_t j = 0; j < p->R && dp_erases(p); j++)
            for (int v = 0; v < c->w; v++)
                mul_sub(mp_at(Gk, v), erasing_at(c, t, j, k), mp_at(c->dE, j * c->w + v), tmp);
        for (int v = 0; v < c->w; v++)
            mpfr_mul(mp_at(Gk, v), mp_at(Gk, v), d, MPFR_RNDN);
        dot(sum, Gk, Sk, c->w, tmp);
        mpfr_ptr dg = mp_at(c->dg, i * Kg + (Kg > 1 ? k : 0));
        if (Kg > 1 || k == 0)
            mpfr_set(dg, sum, MPFR_RNDN);
        else
            mpfr_add(dg, dg, sum, MPFR_RNDN);
    }
}

/* The same where the state is read before its decay: dk_t = U G';  dlr_a = dE S';  G <- d o G;
 * dg_t = rowsum(G o S);  G += lr_a' dE, dE of the key that reads. */
static void backward_undecayed(const tr_task *c, int64_t t, int64_t i, mp_array S) {
    const dp_problem *p = c->run->p;
    mpfr_ptr tmp = mp_at(c->tmp, 0);
    for (int64_t k = 0; k < p->K; k++) {
        mp_array Gk = mp_from(c->S, k * c->w), Sk = mp_from(S, k * c->w);
        for (int64_t j = 0; j < p->R; j++)
            dot(mp_at(c->dk, (i * p->R + j) * p->K + k), mp_from(c->U, j * c->w), Gk, c->w, tmp);
        dot(mp_at(c->derasing, i * p->K + k), c->dE, Sk, c->w, tmp);
        for (int v = 0; v < c->w; v++)
            mpfr_mul(mp_at(Gk, v), mp_at(Gk, v), decay_at(c, t, k), MPFR_RNDN);
        dot(mp_at(c->dg, i * p->K + k), Gk, Sk, c->w, tmp);
        for (int v = 0; v < c->w; v++)
            mul_sub(mp_at(Gk, v), erasing_at(c, t, 0, k), mp_at(c->dE, v), tmp);
    }
}

void tr_backward_block(tr_task *c, int b) {
    const tr_run *r = c->run;
    const dp_problem *p = r->p;
    const tr_block *k = &r->block[b];
    const int64_t Kw = (int64_t)p->K * c->w, Rw = (int64_t)p->R * c->w;
    const int64_t state_row = (int64_t)k->seq * p->HV + c->hv;
    rebuild_tape(c, b);
    if (k->last_of_seq) load_state(c, c->S, p->dstate, state_row);
    for (int64_t t = k->t1 - 1; t >= k->t0; t--) {
        const int64_t i = t - k->t0;
        backward_output(c, t, i, mp_from(c->tape, (i + 1) * Kw));
        backward_residual(c, t, i, mp_from(c->E, t * Rw));
        (dp_by_factors(p) ? backward_undecayed : backward_state)(c, t, i, mp_from(c->tape, i * Kw));
    }
    if (k->cut >= 0) store_state(c, c->S, &r->t->dS_cut, (int64_t)k->cut * p->HV + c->hv);
    if (k->first_of_seq) store_state(c, c->S, &r->t->field[DP_RESULT_DS0], state_row);
}

void tr_task_alloc(tr_task *c, int backward) {
    const tr_run *r = c->run;
    const int64_t K = r->p->K, R = r->p->R, Kw = K * c->w, Rw = R * c->w, len = r->len;
    c->S = mp_alloc(Kw, r->prec);
    c->U = mp_alloc(Rw, r->prec);
    c->row = mp_alloc(c->w, r->prec);
    c->tmp = mp_alloc(4, r->prec);
    c->E = mp_alloc(backward ? r->p->T * Rw : Rw, r->prec);
    if (!backward) return;
    c->ckpt = mp_alloc(r->nblock * Kw, r->prec);
    c->tape = mp_alloc((len + 1) * Kw, r->prec);
    c->dU = mp_alloc(Rw, r->prec);
    c->dE = mp_alloc(Rw, r->prec);
    c->dq = mp_alloc(len * K, r->prec);
    c->dk = mp_alloc(len * R * K, r->prec);
    c->dg = mp_alloc(len * dp_Kg(r->p), r->prec);
    c->dbeta = mp_alloc(len * R, r->prec);
    if (dp_by_gates(r->p) || dp_by_factors(r->p)) c->derasing = mp_alloc(len * K, r->prec);
}

void tr_task_free(tr_task *c) {
    mp_array *m[] = {&c->S,   &c->ckpt, &c->E,  &c->tape, &c->U,  &c->dU,    &c->dE,
                     &c->row, &c->tmp,  &c->dq, &c->dk,   &c->dg, &c->dbeta, &c->derasing};
    for (size_t i = 0; i < sizeof m / sizeof *m; i++)
        mp_free(m[i]);
}

void tr_store(dp_ball *b, int64_t i, mpfr_srcptr x, mpfr_ptr tmp) {
    b->hi[i] = mpfr_get_d(x, MPFR_RNDN);
    b->lo[i] = 0;
    if (!isfinite(b->hi[i])) return;
    mpfr_sub_d(tmp, x, b->hi[i], MPFR_RNDN); /* exact: hi holds the leading bits of x */
    b->lo[i] = mpfr_get_d(tmp, MPFR_RNDN);
}
