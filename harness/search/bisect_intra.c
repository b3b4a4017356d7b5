/* Stages of a chunk alone: gate, intra, solve, wy, and the gate's backward (bisect_work.h). */
#include "bisect_work.h"
#include "harness/bound/error_bound_impl.h"
#include "ref/vocabulary/recurrence.h"

#include <math.h>
#include <stdlib.h>

/* ---- gate ------------------------------------------------------------------------------------ */

/* erase o k and write o v of one token and value head; of factors, -lr_a exp(-g) and v of both of
 * its keys. */
static void judge_writes(dp_bisect_work *w, dp_place at, int64_t token, const dp_input_error *in,
                         double tiny) {
    const int K = w->p->K, V = w->p->V, R = dp_rows(w->p);
    const char *const names[2] = {dp_by_gates(w->p) ? "erase k" : "-lr_a / decay",
                                  dp_by_gates(w->p) ? "write v" : "v"};
    for (int j = 0; j < R; j++) {
        const int64_t row = token * R + j;
        const double *e = w->t.erasing + row * K, *v = w->t.values + row * V;
        dp_bisect_judge(w, names[0], at, R > 1 ? j : -1, K, w->s.erasing + row * K, e, NULL,
                        (in->k + in->qk_row + in->erasing) * dp_norm_fro(K, e) + K * tiny);
        dp_bisect_judge(w, names[1], at, R > 1 ? j : -1, V, w->s.values + row * V, v, NULL,
                        in->v * dp_norm_fro(V, v) + V * tiny);
    }
}

/* The error that the rotation of row j's key adds at token t. */
static double turned_key(const dp_problem *p, const double *dphi, int64_t t, int hv, int j,
                         double u) {
    const int key = dp_entry_rotated(dp_recurrence_of(p), dp_row_of(p, j)->write);
    return dp_turned_norm(p, dphi, key < 0 ? -1 : dp_factor_token(p, key, t), hv, u);
}

void dp_bisect_stage_gate(dp_bisect_work *w) {
    const dp_problem *p = w->p;
    const dp_rounding r = dp_rounding_of(w->base, 1);
    const dp_input_error in = dp_error_bound_inputs(p, w->base, &r);
    const int Kg = dp_Kg(p), R = dp_rows(p),
              store = p->l2norm && w->base == DP_BASE_BF16 ? DP_BISECT_STORE : DP_BISECT_ARITH;
    const int64_t L = p->T / w->ref.N;
    double *bound = dp_doubles(Kg), *dphi = dp_error_bound_angles(p, w->base, &r);
    for (int r_ = 0, g = 0; r_ < w->ref.N; r_++)
        for (int64_t t = r_ * L; t < (r_ + 1) * L; t++) {
            while (g + 1 < w->ref.ngroup && w->ref.group[g + 1].t0 <= t)
                g++;
            dp_place at = dp_bisect_chunk_place(w, g, 0);
            at.token = t;
            for (int h = 0; h < p->H; h++) {
                const int64_t iq = (t * p->H + h) * p->K;
                at.head = h;
                const double turned = dp_turned_norm(p, dphi, t, h, r.u);
                dp_bisect_judge(w, "q", at, -1, p->K, w->s.q + iq, w->t.q + iq, NULL,
                                (in.q + in.qk_row + turned) * dp_norm_fro(p->K, w->t.q + iq) +
                                    p->K * r.tiny);
                for (int j = 0; j < R; j++) {
                    const int64_t ik = iq * R + (int64_t)j * p->K;
                    const double of_row = turned > 0 ? turned_key(p, dphi, t, h, j, r.u) : 0;
                    dp_bisect_judge(w, "k", at, R > 1 ? j : -1, p->K, w->s.k + ik, w->t.k + ik,
                                    NULL,
                                    (in.k + in.qk_row + of_row) * dp_norm_fro(p->K, w->t.k + ik) +
                                        p->K * r.tiny);
                }
            }
            for (int hv = 0; hv < p->HV; hv++) {
                const int64_t ig = (t * p->HV + hv) * Kg, ib = (t * p->HV + hv) * p->R;
                at.head = hv;
                for (int c = 0; c < Kg; c++)
                    bound[c] = dp_error_bound_gate(p, t, hv, c, r.u).Dg + r.tiny;
                dp_bisect_judge(w, "g", at, -1, Kg, w->s.g + ig, w->t.g + ig, NULL,
                                dp_norm_fro(Kg, bound));
                if (w->ref.values) {
                    judge_writes(w, at, t * p->HV + hv, &in, r.tiny);
                    continue;
                }
                if (!p->beta) continue;
                dp_bisect_judge(w, "beta", at, -1, p->R, w->s.beta + ib, w->t.beta + ib, NULL,
                                in.beta * dp_norm_fro(p->R, w->t.beta + ib) + p->R * r.tiny);
            }
        }
    free(bound);
    free(dphi);
    if (w->ref.values) {
        const int how = w->base == DP_BASE_BF16 ? DP_BISECT_STORE : DP_BISECT_ARITH;
        const int64_t rows = p->T * p->HV * R;
        dp_bisect_give(w, w->s.erasing, w->t.erasing, w->ref.erasing, rows * p->K,
                       dp_by_rows(p) ? DP_BISECT_ARITH : how);
        dp_bisect_give(w, w->s.values, w->t.values, w->ref.values, rows * p->V, how);
    }
    dp_bisect_give(w, w->s.q, w->t.q, w->ref.q, p->T * p->H * p->K, store);
    dp_bisect_give(w, w->s.k, w->t.k, w->ref.k, p->T * p->H * R * p->K, store);
    dp_bisect_give(w, w->s.g, w->t.g, w->ref.g, p->T * p->HV * Kg, DP_BISECT_ARITH);
    dp_bisect_give(w, w->s.beta, w->t.beta, w->ref.beta, p->T * p->HV * R, DP_BISECT_ARITH);
    dp_bisect_give(w, w->s.rstd_q, w->t.rstd_q, w->ref.rstd_q, p->T * p->H, DP_BISECT_ARITH);
    dp_bisect_give(w, w->s.rstd_k, w->t.rstd_k, w->ref.rstd_k, p->T * p->H * R, DP_BISECT_ARITH);
}

/* ---- intra, solve, wy ------------------------------------------------------------------------ */

/* A decay below the smallest number of the format is 0 whatever its exponent: exponents are
 * compared down to there. */
static void judge_gcum(dp_bisect_work *w, const dp_bisect_chunk *c) {
    const double floor = dp_gate_floor(w->base);
    const int K = w->p->K;
    double *a = dp_doubles(2 * K), *b = a + K;
    for (int t = 0; t < c->ref->c; t++) {
        dp_place at = c->at;
        at.token += t;
        for (int x = 0; x < K; x++) {
            const double got = c->s->gcum[t * K + x], want = c->t->gcum[t * K + x];
            a[x] = got < floor ? floor : got;
            b[x] = want < floor ? floor : want;
        }
        dp_bisect_judge(w, "gcum", at, -1, K, a, b, c->intra->Dcum + t * K, 0);
    }
    free(a);
}

void dp_bisect_stage_intra(dp_bisect_work *w) {
    const int K = w->p->K, R = dp_rows(w->p);
    FOR_CHUNKS(c) judge_gcum(w, &c);
    FOR_CHUNKS(c)
    dp_bisect_judge_rows(w, "L", c.at, R, c.ref->n, c.ref->n, c.s->L, c.t->L, c.intra->DL);
    FOR_CHUNKS(c)
    dp_bisect_judge_rows(w, "Aqk", c.at, 1, c.ref->c, c.ref->n, c.s->Aqk, c.t->Aqk, c.intra->DAqk);
    FOR_CHUNKS(c) {
        dp_bisect_give(w, c.s->gcum, c.t->gcum, c.ref->gcum, (int64_t)c.ref->c * K,
                       DP_BISECT_ARITH);
        dp_bisect_give(w, c.s->L, c.t->L, c.ref->L, (int64_t)c.ref->n * c.ref->n, DP_BISECT_ARITH);
        dp_bisect_give(w, c.s->Aqk, c.t->Aqk, c.ref->Aqk, (int64_t)c.ref->c * c.ref->n,
                       DP_BISECT_STORE);
    }
}

void dp_bisect_stage_solve(dp_bisect_work *w) {
    if (!w->s.by_inverse) return;
    FOR_CHUNKS(c)
    dp_bisect_judge_rows(w, "Akk", c.at, dp_rows(w->p), c.ref->n, c.ref->n, c.s->Akk, c.t->Akk,
                         c.own->DT);
    FOR_CHUNKS(c)
    dp_bisect_give(w, c.s->Akk, c.t->Akk, c.ref->Akk, (int64_t)c.ref->n * c.ref->n,
                   DP_BISECT_STORE);
}

void dp_bisect_stage_wy(dp_bisect_work *w) {
    const int K = w->p->K, V = w->p->V, R = dp_rows(w->p);
    FOR_CHUNKS(c) dp_bisect_judge(w, "eC", c.at, -1, K, c.s->eC, c.t->eC, c.own->DeC, 0);
    FOR_CHUNKS(c) dp_bisect_judge_rows(w, "kg", c.at, R, c.ref->n, K, c.s->kg, c.t->kg, c.own->Dkg);
    FOR_CHUNKS(c) dp_bisect_judge_rows(w, "qg", c.at, 1, c.ref->c, K, c.s->qg, c.t->qg, c.own->Dqg);
    FOR_CHUNKS(c) dp_bisect_judge_rows(w, "w", c.at, R, c.ref->n, K, c.s->w, c.t->w, c.own->Dw);
    FOR_CHUNKS(c) dp_bisect_judge_rows(w, "u", c.at, R, c.ref->n, V, c.s->u, c.t->u, c.own->Du);
    FOR_CHUNKS(c) {
        const int64_t nK = (int64_t)c.ref->n * K;
        dp_bisect_give(w, c.s->eC, c.t->eC, c.ref->eC, K, DP_BISECT_ARITH);
        dp_bisect_give(w, c.s->kgam, c.t->kgam, c.ref->kgam, nK, DP_BISECT_ARITH);
        dp_bisect_give(w, c.s->kg, c.t->kg, c.ref->kg, nK, DP_BISECT_STORE);
        dp_bisect_give(w, c.s->qg, c.t->qg, c.ref->qg, (int64_t)c.ref->c * K, DP_BISECT_STORE);
        dp_bisect_give(w, c.s->w, c.t->w, c.ref->w, nK, DP_BISECT_STORE);
        dp_bisect_give(w, c.s->u, c.t->u, c.ref->u, (int64_t)c.ref->n * V, DP_BISECT_STORE);
    }
}

/* dv, dwrite and derase: one product, rounded and stored. To k, the bounds of dk, it adds the part
 * through the erasing keys: G products and sums. */
static void judge_writes_bwd(dp_bisect_work *w, const dp_rounding *r, double eps, double *k) {
    const dp_problem *p = w->p;
    const int HV = p->HV, G = dp_G(p);
    const struct {
        dp_result_id id;
        int n;
        double *got, *want;
    } a[] = {{DP_RESULT_DV, p->V, w->s.out.dv, w->t.out.dv},
             {DP_RESULT_DWRITE, p->V, w->s.out.dwrite, w->t.out.dwrite},
             {DP_RESULT_DERASE, p->K, w->s.out.derase, w->t.out.derase}};
    double *bound = dp_doubles(p->T * HV);
    for (int z = 0; z < 3; z++) {
        for (int64_t i = 0; i < p->T * HV; i++)
            bound[i] =
                dp_pw(&w->r, ((2 * r->u + r->us) * dp_norm_fro(a[z].n, a[z].want + i * a[z].n) +
                              a[z].n * r->tiny) /
                                 DP_LAMBDA);
        dp_bisect_judge_tokens(w, (dp_bisect_rows){dp_result_fields[a[z].id].name, HV, 1, a[z].n},
                               a[z].got, a[z].want, bound);
    }
    for (int64_t i = 0; i < p->T * HV; i++) {
        const int64_t key = i / HV * p->H + i % HV / G;
        double size = 0;
        for (int x = 0; x < p->K; x++)
            size += fabs(p->erase[i * p->K + x] * w->ref.derasing[i * p->K + x]);
        size += dp_norm_fro(p->K, w->ref.dk + key * p->K);
        k[key] += dp_pw(&w->r, w->ref.rstd_k[key] * (eps + (G + 3) * r->u) * size / DP_LAMBDA);
    }
    free(bound);
}

/* dv, dlr_b and dk: stored without a change. dlr_a = -exp(-g) times the erasing key's gradient:
 * exp(-g) has the error of its gate and 3 roundings. */
static void judge_factors_bwd(dp_bisect_work *w, const dp_rounding *r) {
    const dp_problem *p = w->p;
    const int64_t n = p->T * p->HV;
    const int K = p->K;
    const dp_input_error in = dp_error_bound_inputs(p, w->base, r);
    const struct {
        dp_result_id id;
        int n;
        double *got, *want, eps;
    } a[] = {{DP_RESULT_DV, p->V, w->s.out.dv, w->t.out.dv, r->u + r->us},
             {DP_RESULT_DLR_B, K, w->s.out.dlr_b, w->t.out.dlr_b, r->u + r->us},
             {DP_RESULT_DK, K, w->s.out.dk, w->t.out.dk, r->u + r->us},
             {DP_RESULT_DLR_A, K, w->s.out.dlr_a, w->t.out.dlr_a, in.erasing + 3 * r->u + r->us}};
    double *bound = dp_doubles(n);
    for (size_t z = 0; z < sizeof a / sizeof *a; z++) {
        for (int64_t i = 0; i < n; i++)
            bound[i] = dp_pw(
                &w->r, (a[z].eps * dp_norm_fro(a[z].n, a[z].want + i * a[z].n) + a[z].n * r->tiny) /
                           DP_LAMBDA);
        dp_bisect_judge_tokens(w,
                               (dp_bisect_rows){dp_result_fields[a[z].id].name, p->HV, 1, a[z].n},
                               a[z].got, a[z].want, bound);
    }
    free(bound);
}

/* The gradient of a gate after the activation. With factors it has the part through exp(-g): lr_a
 * exp(-g) times the erasing key's gradient, with its roundings and that of the sum in D. */
static double gate_gradient(const dp_bisect_work *w, int64_t i, const dp_rounding *r,
                            double erasing, double *D) {
    const dp_problem *p = w->p;
    *D = 0;
    if (!dp_by_rows(p)) return w->ref.dg[i];
    const int64_t first = i / p->K * 2 * p->K + i % p->K;
    const double through = -w->ref.erasing[first] * w->ref.derasing[first];
    *D = (erasing + 3 * r->u) * fabs(through) + r->u * fabs(w->ref.dg[i] + through);
    return w->ref.dg[i] + through;
}

static void judge_beta_bwd(dp_bisect_work *w, const dp_rounding *r) {
    const dp_problem *p = w->p;
    const double eps = p->beta_form == DP_BETA_PLAIN ? r->u + r->us : 8 * r->u + r->us;
    const dp_bisect_rows rows = {"dbeta", p->HV, p->R, 1};
    double *bound = dp_doubles(p->T * p->HV * p->R);
    for (int64_t i = 0; i < p->T * p->HV * p->R; i++)
        bound[i] = dp_pw(&w->r, (eps * fabs(w->t.out.dbeta[i]) + r->tiny) / DP_LAMBDA);
    dp_bisect_judge_tokens(w, rows, w->s.out.dbeta, w->t.out.dbeta, bound);
    free(bound);
}

/* Through the activations, as in grad_bound.c with exact inputs (worst case). From dx = rstd (dy -
 * y <y, dy>): rstd (2 gamma_K + 6u) |dy|. Raw gate |dg/dx| (relative error of the derivative + u)
 * |dg|; beta 6u z s (1 - s) |dbeta|. Sums over tokens: gamma_T of the sum of absolute values. Each
 * is stored with u + us. */
void dp_bisect_stage_gate_bwd(dp_bisect_work *w) {
    const dp_problem *p = w->p;
    if (p->model == DP_USER) return; /* grad_bound.c alone bounds the gradients of its inputs */
    const dp_rounding r = dp_rounding_of(w->base, 1);
    const int Kg = dp_Kg(p), H = p->H, HV = p->HV, R = p->R, K = p->K;
    const double eps = (p->l2norm ? 2 * dp_gamma(K, r.u) + 6 * r.u : 0) + r.u + r.us,
                 sums = dp_gamma((int)fmin((double)p->T + Kg + w->ref.N, 1 << 22), r.u),
                 erasing = dp_error_bound_inputs(p, w->base, &r).erasing;
    double *q = dp_doubles(p->T * H), *k = dp_doubles(p->T * H * R), *g = dp_doubles(p->T * HV),
           *A = dp_doubles(HV), *B = dp_doubles((int64_t)HV * Kg);
    for (int64_t i = 0; i < p->T * H; i++)
        q[i] =
            dp_pw(&w->r, (eps * w->ref.rstd_q[i] * dp_norm_fro(K, w->ref.dq + i * K) + K * r.tiny) /
                             DP_LAMBDA);
    for (int64_t i = 0; i < p->T * H * R; i++)
        k[i] =
            dp_pw(&w->r, (eps * w->ref.rstd_k[i] * dp_norm_fro(K, w->ref.dk + i * K) + K * r.tiny) /
                             DP_LAMBDA);
    for (int64_t i = 0; i < p->T * HV; i++) {
        double row = 0, D;
        for (int c = 0; c < Kg; c++) {
            const dp_gate_error ge = dp_error_bound_gate(p, i / HV, (int)(i % HV), c, r.u);
            const double v = fabs(gate_gradient(w, i * Kg + c, &r, erasing, &D));
            const double x = fabs(ge.dx) * v, y = fabs(ge.dA) * v;
            const double d = (ge.Ddx + 2 * r.u + r.us) * x + fabs(ge.dx) * D + r.tiny;
            row += d * d;
            B[(i % HV) * Kg + c] += (ge.Ddx + r.u + sums) * x + fabs(ge.dx) * D + r.tiny;
            A[i % HV] += (ge.Ddx + 3 * r.u + sums) * y + fabs(ge.dA) * D +
                         (p->gate == DP_GATE_SOFTPLUS ? ge.Dg * v : 0) + r.tiny;
        }
        g[i] = row / (DP_LAMBDA * DP_LAMBDA);
    }
    if (dp_by_gates(p)) judge_writes_bwd(w, &r, eps, k);
    if (dp_by_rows(p)) judge_factors_bwd(w, &r);
    dp_bisect_judge_tokens(w, (dp_bisect_rows){"dq", H, 1, K}, w->s.out.dq, w->t.out.dq, q);
    if (!dp_by_rows(p))
        dp_bisect_judge_tokens(w, (dp_bisect_rows){"dk", H, R, K}, w->s.out.dk, w->t.out.dk, k);
    dp_bisect_judge_tokens(w, (dp_bisect_rows){"dg", HV, 1, Kg}, w->s.out.dg, w->t.out.dg, g);
    if (p->beta) judge_beta_bwd(w, &r);
    for (int hv = 0; hv < HV; hv++) {
        const dp_place at = {.rank = -1, .head = hv, .sequence = -1, .chunk = -1, .token = -1};
        if (w->s.out.dA_log)
            dp_bisect_judge(w, "dA_log", at, -1, 1, w->s.out.dA_log + hv, w->t.out.dA_log + hv,
                            NULL, A[hv]);
        if (w->s.out.ddt_bias)
            dp_bisect_judge(w, "ddt_bias", at, -1, Kg, w->s.out.ddt_bias + hv * Kg,
                            w->t.out.ddt_bias + hv * Kg, NULL, dp_norm_fro(Kg, B + hv * Kg));
    }
    free(q);
    free(k);
    free(g);
    free(A);
    free(B);
}
