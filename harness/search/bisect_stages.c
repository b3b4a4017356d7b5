/* The stages of the pipeline, each on true inputs (bisect_work.h). */
#include "bisect_work.h"
#include "harness/bound/error_bound_impl.h"
#include "harness/simulated/ranks_stages.h"
#include "ref/vocabulary/recurrence.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

/* Backwards in time. */
static void bisect_judge_tokens(dp_bisect_work *w, dp_bisect_rows x, const double *got,
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

/* A state error of zeros, to be freed. */
static double *bisect_zeros_state(const dp_bisect_work *w) {
    return dp_doubles(dp_state_error_size(&w->r, w->p->K, w->p->V));
}

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
        bisect_judge_tokens(w, (dp_bisect_rows){dp_result_fields[a[z].id].name, HV, 1, a[z].n},
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
        bisect_judge_tokens(w, (dp_bisect_rows){dp_result_fields[a[z].id].name, p->HV, 1, a[z].n},
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
    bisect_judge_tokens(w, rows, w->s.out.dbeta, w->t.out.dbeta, bound);
    free(bound);
}

/* Through the activations, as in error_bound.c with exact inputs (worst case). From dx = rstd (dy -
 * y <y, dy>): rstd (2 gamma_K + 6u) |dy|. Raw gate |dg/dx| (relative error of the derivative + u)
 * |dg|; beta 6u z s (1 - s) |dbeta|. Sums over tokens: gamma_T of the sum of absolute values. Each
 * is stored with u + us. */
void dp_bisect_stage_gate_bwd(dp_bisect_work *w) {
    const dp_problem *p = w->p;
    if (p->model == DP_USER) return; /* error_bound.c alone bounds the gradients of its inputs */
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
    bisect_judge_tokens(w, (dp_bisect_rows){"dq", H, 1, K}, w->s.out.dq, w->t.out.dq, q);
    if (!dp_by_rows(p))
        bisect_judge_tokens(w, (dp_bisect_rows){"dk", H, R, K}, w->s.out.dk, w->t.out.dk, k);
    bisect_judge_tokens(w, (dp_bisect_rows){"dg", HV, 1, Kg}, w->s.out.dg, w->t.out.dg, g);
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

/* ---- gradients of a chunk -------------------------------------------------------------------- */

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
    double *e = bisect_zeros_state(w), *DX = dp_doubles((int64_t)DP_CHUNK * dp_rows(p) * p->V),
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
        bisect_judge_tokens(w, rows_of(p, &GRADS[i]), array_of(&w->s, &GRADS[i]),
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

/* ---- pre-process and merge ------------------------------------------------------------------- */

/* The two parts of a state's error as one [K][V] of squares, in place. */
static const double *entries(const dp_bisect_work *w, double *e) {
    const int64_t KV = (int64_t)w->p->K * w->p->V;
    for (int64_t i = 0; i < KV; i++) {
        e[i] += e[KV + i];
        e[KV + i] = 0;
    }
    return e;
}

/* Bounds of single stages, whose inputs are without error. */
static dp_error_bound_base own_bounds(const dp_bisect_work *w) {
    return (dp_error_bound_base){.ref = (dp_sim *)&w->ref,
                                 .base = w->base,
                                 .sending = {w->s.merge, w->s.payload},
                                 .r = w->r,
                                 .b = w->own};
}

static void judge_M(dp_bisect_work *w, int back, int r, int hv, int sub, const double *got,
                    const double *want) {
    const int K = w->p->K, *first = w->ref.first[r];
    const dp_error_bound_base own = own_bounds(w);
    const dp_chain_span span = {first[sub], first[sub + 1], hv, back, w->s.chain};
    const dp_chain_error e = dp_chain_error_of(&own, span, NULL);
    for (int x = 0; x < K; x++)
        dp_bisect_judge(w, back ? "dM" : "M", dp_bisect_rank_place(w, r, hv, sub), x, K,
                        got + (int64_t)x * K, want + (int64_t)x * K, e.b + (int64_t)x * K,
                        e.bias * DP_LAMBDA);
    free(e.b);
}

static void judge_H(dp_bisect_work *w, int back, int r, int hv, int sub, const double *got,
                    const double *want) {
    const dp_error_bound_base own = own_bounds(w);
    double *e = dp_error_bound_H(&own, back, r, hv);
    dp_bisect_judge_rows(w, back ? "dH" : "H", dp_bisect_rank_place(w, r, hv, sub), 0, w->p->K,
                         w->p->V, got, want, entries(w, e));
    free(e);
}

void dp_bisect_stage_pre(dp_bisect_work *w, int backward) {
    const dp_problem *p = w->p;
    const int HV = p->HV, N = w->ref.N;
    dp_sim *s = &w->s, *t = &w->t, *ref = &w->ref;
    double **sM = backward ? s->dM : s->M, **tM = backward ? t->dM : t->M,
           **sH = backward ? s->dH : s->H, **tH = backward ? t->dH : t->H;
    for (int what = 0; what < 2; what++)
        for (int k = 0; k < N; k++)
            for (int hv = 0; hv < HV; hv++) {
                const int r = backward ? N - 1 - k : k, i = r * HV + hv,
                          sub = backward ? 0 : ref->ctx[r].nlocal - 1;
                if (!tM[i]) continue;
                if (what)
                    judge_H(w, backward, r, hv, sub, sH[i], tH[i]);
                else
                    judge_M(w, backward, r, hv, sub, sM[i], tM[i]);
            }
    dp_bisect_give_list(w, sM, tM, backward ? ref->dM : ref->M, (int64_t)p->K * p->K);
    dp_bisect_give_list(w, sH, tH, backward ? ref->dH : ref->H, (int64_t)p->K * p->V);
}

/* The roundings of the exchange itself: pairs, and the inputs of passes, are without error. */
static double **exchange_errors(const dp_bisect_work *w, int dir) {
    const int64_t n = (int64_t)w->ref.N * w->p->HV;
    dp_chain_error *bM = dp_calloc((size_t)n, sizeof *bM);
    double **eH = dp_calloc((size_t)n, sizeof *eH);
    const dp_error_bound_base own = own_bounds(w);
    for (int64_t i = 0; i < n; i++) {
        bM[i].b = dp_doubles(dp_chain_error_size(&w->r, w->p->K));
        eH[i] = bisect_zeros_state(w);
    }
    double **e = dp_exchange_errors(&own, dir, w->s.chain, bM, eH, NULL);
    for (int64_t i = 0; i < n; i++)
        free(bM[i].b);
    free(bM);
    dp_free_list(eH, n);
    return e;
}

void dp_bisect_stage_merge(dp_bisect_work *w, int backward) {
    const dp_problem *p = w->p;
    const int HV = p->HV, K = p->K, V = p->V, N = w->ref.N;
    dp_sim *ref = &w->ref;
    double **e = exchange_errors(w, backward ? -1 : 1), **s = backward ? w->s.dS_out : w->s.S_in,
           **t = backward ? w->t.dS_out : w->t.S_in;
    for (int k = 0; k < N; k++)
        for (int hv = 0; hv < HV; hv++) {
            const int r = backward ? N - 1 - k : k, i = r * HV + hv;
            if (!e[i]) continue;
            dp_bisect_judge_rows(
                w, backward ? "dS_out" : "S_in",
                dp_bisect_rank_place(w, r, hv, backward ? ref->ctx[r].nlocal - 1 : 0), 0, K, V,
                s[i], t[i], entries(w, e[i]));
        }
    dp_bisect_give_list(w, s, t, backward ? ref->dS_out : ref->S_in, (int64_t)K * V);
    dp_free_list(e, (int64_t)N * HV);
}

/* ---- state, output --------------------------------------------------------------------------- */

/* D [n][V] += squares of (a [n][K]) (error e of a state) */
static void through(const dp_bisect_work *w, const double *a, int n, const double *e, double *D) {
    const int K = w->p->K, V = w->p->V;
    for (int i = 0; i < n; i++)
        for (int x = 0; x < K; x++) {
            const double a2 = a[(int64_t)i * K + x] * a[(int64_t)i * K + x];
            for (int v = 0; a2 > 0 && v < V; v++)
                D[(int64_t)i * V + v] += a2 * (e[(int64_t)x * V + v] + e[((int64_t)K + x) * V + v]);
        }
}

void dp_bisect_stage_state(dp_bisect_work *w, int back, int recompute) {
    const dp_problem *p = w->p;
    const int K = p->K, V = p->V;
    const int64_t KV = (int64_t)K * V, size = dp_state_error_size(&w->r, K, V);
    const dp_error_bound_base own = own_bounds(w);
    const double *last_s = back ? w->s.out.ds0 : w->s.out.final_state,
                 *last_t = back ? w->t.out.ds0 : w->t.out.final_state;
    double *all = dp_doubles((int64_t)w->ref.ngroup * p->HV * size);
    FOR_CHUNKS_IN(c, back) { /* the error that enters each chunk, and behind the last one */
        const int r = c.at.rank, sub = w->ref.group[c.g].sub, next_g = c.g + (back ? -1 : 1);
        const int inside = next_g >= w->ref.first[r][sub] && next_g < w->ref.first[r][sub + 1];
        double *e = all + ((int64_t)c.g * p->HV + c.hv) * size, *next = dp_copy(e, size),
               *DX = dp_doubles((int64_t)c.ref->n * V);
        dp_bisect_judge_rows(w, back ? "dh" : "h", c.at, 0, K, V, back ? c.s->dh : c.s->h,
                             back ? c.t->dh : c.t->h, entries(w, e));
        dp_error_bound_step(&own, back, c.g, c.hv, NULL, next, DX);
        through(w, back ? c.ref->kg : c.ref->w, c.ref->n, e, DX);
        dp_bisect_judge_rows(w, back ? "dv_new" : "v_new", c.at, dp_rows(p), c.ref->n, V,
                             back ? c.s->dv_new : c.s->v_new, back ? c.t->dv_new : c.t->v_new, DX);
        if (inside)
            memcpy(all + ((int64_t)next_g * p->HV + c.hv) * size, next,
                   sizeof(double) * (size_t)size);
        else if (!recompute && last_s &&
                 (back ? dp_sim_starts_here : dp_sim_ends_here)(&w->ref, r, sub)) {
            const int64_t z = (c.at.sequence * (int64_t)p->HV + c.hv) * KV;
            dp_bisect_judge_rows(w, back ? "ds0" : "final_state", c.at, 0, K, V, last_s + z,
                                 last_t + z, entries(w, next));
        }
        free(next);
        free(DX);
    }
    FOR_CHUNKS(c) {
        dp_bisect_give(w, back ? c.s->dh : c.s->h, back ? c.t->dh : c.t->h,
                       back ? c.ref->dh : c.ref->h, KV, DP_BISECT_ARITH);
        dp_bisect_give(w, back ? c.s->dv_new : c.s->v_new, back ? c.t->dv_new : c.t->v_new,
                       back ? c.ref->dv_new : c.ref->v_new, (int64_t)c.ref->n * V, DP_BISECT_STORE);
    }
    free(all);
}

void dp_bisect_stage_output(dp_bisect_work *w) {
    const dp_problem *p = w->p;
    double *e = bisect_zeros_state(w), *DX = dp_doubles((int64_t)DP_CHUNK * dp_rows(p) * p->V),
           row[DP_CHUNK];
    FOR_CHUNKS(c) {
        dp_bound_output(c.own, e, DX, row);
        for (int t = 0; t < c.ref->c; t++) {
            const int64_t z = ((c.at.token + t) * p->HV + c.hv) * p->V;
            dp_place at = c.at;
            at.token += t;
            dp_bisect_judge(w, "o", at, -1, p->V, w->s.out.o + z, w->t.out.o + z, NULL,
                            DP_LAMBDA * sqrt(row[t]));
        }
    }
    free(e);
    free(DX);
}

/* ---- backward -------------------------------------------------------------------------------- */

/* dv_local = Aqk' do: (uo |Aqk|)^2 |do|^2 + (sum_error |Aqk|'|do|)^2 + (us dv_local)^2 */
void dp_bisect_stage_dAv(dp_bisect_work *w) {
    const dp_problem *p = w->p;
    const int V = p->V;
    double *dout = dp_doubles((int64_t)DP_CHUNK * V);
    FOR_CHUNKS(c) {
        const int n = c.ref->n, m = c.ref->c;
        double *D = dp_doubles((int64_t)n * V);
        dp_sim_gather_do(&w->ref, c.g, c.hv, dout);
        for (int i = 0; i < n; i++)
            for (int v = 0; v < V; v++) {
                double abs = 0, sq = 0;
                for (int t = 0; t < m; t++) {
                    const double x =
                        fabs(c.ref->Aqk[(int64_t)t * n + i] * dout[(int64_t)t * V + v]);
                    abs += x;
                    sq += x * x;
                }
                const double sum = dp_sum_error(&w->r, m) * abs,
                             store = (w->r.us + w->r.u) * c.ref->dv_local[(int64_t)i * V + v],
                             tiny = (m + 1) * w->r.tiny;
                D[(int64_t)i * V + v] =
                    w->r.uo * w->r.uo * sq + sum * sum + store * store + tiny * tiny;
            }
        dp_bisect_judge_rows(w, "dv_local", c.at, dp_rows(p), n, V, c.s->dv_local, c.t->dv_local,
                             D);
        free(D);
    }
    FOR_CHUNKS(c)
    dp_bisect_give(w, c.s->dv_local, c.t->dv_local, c.ref->dv_local, (int64_t)c.ref->n * V,
                   DP_BISECT_STORE);
    free(dout);
}
