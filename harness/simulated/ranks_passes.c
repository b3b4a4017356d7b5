/* Passes over the ranks: pairs, states, outputs, and the backward (ranks_stages.h). */
#include "ranks_stages.h"
#include "ref/chunk/gate.h"

#include <stdlib.h>
#include <string.h>

/* ---- forward --------------------------------------------------------------------------------- */

void dp_sim_pair_fwd(dp_sim *s, int r, int hv, int sub, dp_format chain) {
    const int i = r * s->p->HV + hv, record = r == s->traj_rank && s->p->HV == 1;
    if (record) s->ntraj = 0;
    dp_sim_replace(&s->M[i],
                   dp_sim_chain(s, s->first[r][sub], s->first[r][sub + 1], hv, chain, 0, record));
    if (s->H[i]) return; /* does not depend on the chain's format */
    s->H[i] = dp_doubles((int64_t)s->p->K * s->p->V);
    for (int g = s->first[r][sub]; g < s->first[r][sub + 1]; g++) {
        dp_chunk_state(dp_sim_chunk_at(s, g, hv, DP_STAGE_PRE_FWD), s->H[i], NULL);
        dp_sim_round_carried(s, DP_STAGE_PRE_FWD, s->H[i]);
    }
}

void dp_sim_pass_fwd(dp_sim *s, int r, int hv, int sub, double *S) {
    const dp_problem *p = s->p;
    const int64_t KV = (int64_t)p->K * p->V;
    for (int g = s->first[r][sub]; g < s->first[r][sub + 1]; g++) {
        dp_chunk *ch = dp_sim_chunk_at(s, g, hv, DP_STAGE_STATE_FWD);
        memcpy(ch->h, S, sizeof(double) * KV);
        dp_chunk_state(ch, S, ch->v_new);
        dp_sim_round_carried(s, DP_STAGE_STATE_FWD, S);
        dp_sim_after(s, DP_AFTER_CHUNK, (dp_sim_place){.at = g, .hv = hv, .x = S});
    }
}

/* One local sub-sequence, from its initial state; h and v_new are kept in the chunks. */
static void state_fwd(dp_sim *s, int r, int hv, int sub, int again) {
    const dp_problem *p = s->p;
    const int64_t KV = (int64_t)p->K * p->V;
    const double *start = dp_sim_start(s, r, sub);
    double *S = start ? dp_copy(start + hv * KV, KV) : dp_doubles(KV);
    dp_sim_round_arith_all(s->at[DP_STAGE_STATE_FWD], S, KV);
    if (!dp_sim_starts_here(s, r, sub)) memcpy(S, s->S_in[r * p->HV + hv], sizeof(double) * KV);
    dp_sim_pass_fwd(s, r, hv, sub, S);
    if (dp_sim_ends_here(s, r, sub) && !again)
        memcpy(s->out.final_state + (s->ctx[r].local_seq[sub] * (int64_t)p->HV + hv) * KV, S,
               sizeof(double) * KV);
    free(S);
}

void dp_sim_output(dp_sim *s, int gi, int hv) {
    const dp_problem *p = s->p;
    const dp_group *g = &s->group[gi];
    double *o = dp_doubles((int64_t)g->c * p->V);
    dp_chunk_output(dp_sim_chunk_at(s, gi, hv, DP_STAGE_OUTPUT), o);
    for (int t = 0; t < g->c; t++)
        memcpy(s->out.o + ((g->t0 + t) * p->HV + hv) * p->V, o + (int64_t)t * p->V,
               sizeof(double) * p->V);
    free(o);
}

static void states_fwd(dp_sim *s, int again) {
    const int HV = s->p->HV;
#pragma omp parallel for schedule(dynamic, 1) if (!s->one_by_one)
    for (int i = 0; i < s->N * HV; i++)
        for (int sub = 0; dp_sim_has(s, i / HV) && sub < s->ctx[i / HV].nlocal; sub++)
            state_fwd(s, i / HV, i % HV, sub, again);
}

void dp_sim_states_fwd(dp_sim *s) { states_fwd(s, 0); }
void dp_sim_recompute(dp_sim *s) { states_fwd(s, 1); }

void dp_sim_pre_fwd(dp_sim *s) {
    s->ntraj = 0;
    if (!dp_exchanges[s->merge].pairs) return;
#pragma omp parallel for schedule(dynamic, 1)
    for (int i = 0; i < s->N * s->p->HV; i++)
        if (dp_sim_has(s, i / s->p->HV) && !s->ctx[i / s->p->HV].is_last)
            dp_sim_pair_fwd(s, i / s->p->HV, i % s->p->HV, s->ctx[i / s->p->HV].nlocal - 1,
                            s->chain);
}

/* ---- backward -------------------------------------------------------------------------------- */

void dp_sim_dAv(dp_sim *s, int gi, int hv) {
    dp_chunk *ch = dp_sim_chunk_at(s, gi, hv, DP_STAGE_DAV);
    double *dout = dp_doubles((int64_t)ch->c * ch->V);
    dp_sim_gather_do(s, gi, hv, dout);
    dp_chunk_dAv(ch, dout);
    free(dout);
}

/* dS over groups [g0, g1), last to first; keeps dh and dv_new in the chunks when keep. */
static void scan_bwd(dp_sim *s, int g0, int g1, int hv, int keep, double *dS) {
    const int64_t KV = (int64_t)s->p->K * s->p->V;
    double *dout = dp_doubles((int64_t)s->design.chunk * s->p->V);
    const dp_stage stage = keep ? DP_STAGE_STATE_BWD : DP_STAGE_PRE_BWD;
    for (int g = g1 - 1; g >= g0; g--) {
        dp_chunk *ch = dp_sim_chunk_at(s, g, hv, stage);
        dp_sim_gather_do(s, g, hv, dout);
        if (keep) {
            dp_sim_replace(&ch->dh, dp_copy(dS, KV));
            if (!ch->dv_new) ch->dv_new = dp_doubles((int64_t)ch->n * ch->V);
        }
        dp_chunk_state_bwd(ch, dout, dS, keep ? ch->dv_new : NULL);
        dp_sim_round_carried(s, stage, dS);
    }
    free(dout);
}

void dp_sim_pair_bwd(dp_sim *s, int r, int hv, int sub, dp_format chain) {
    const int i = r * s->p->HV + hv;
    dp_sim_replace(&s->dM[i],
                   dp_sim_chain(s, s->first[r][sub], s->first[r][sub + 1], hv, chain, 1, 0));
    if (s->dH[i]) return;
    s->dH[i] = dp_doubles((int64_t)s->p->K * s->p->V);
    scan_bwd(s, s->first[r][sub], s->first[r][sub + 1], hv, 0, s->dH[i]);
}

void dp_sim_pass_bwd(dp_sim *s, int r, int hv, int sub, double *dS) {
    scan_bwd(s, s->first[r][sub], s->first[r][sub + 1], hv, 1, dS);
}

static void state_bwd(dp_sim *s, int r, int hv, int sub) {
    const dp_problem *p = s->p;
    const int64_t KV = (int64_t)p->K * p->V;
    const double *end = dp_sim_end_gradient(s, r, sub);
    double *dS = end ? dp_copy(end + hv * KV, KV) : dp_doubles(KV);
    dp_sim_round_arith_all(s->at[DP_STAGE_STATE_BWD], dS, KV);
    if (!dp_sim_ends_here(s, r, sub)) memcpy(dS, s->dS_out[r * p->HV + hv], sizeof(double) * KV);
    dp_sim_pass_bwd(s, r, hv, sub, dS);
    if (dp_sim_starts_here(s, r, sub))
        memcpy(s->out.ds0 + (s->ctx[r].local_seq[sub] * (int64_t)p->HV + hv) * KV, dS,
               sizeof(double) * KV);
    free(dS);
}

/* Gradients of the activated inputs of one chunk position, all value heads in order. Heads of a
 * group are summed in dq and dk. The type of dv is the inputs'. */
static void grads(dp_sim *s, int gi) {
    const dp_problem *p = s->p;
    const dp_group *g = &s->group[gi];
    const int Kg = dp_Kg(p);
    double *dout = dp_doubles((int64_t)g->c * p->V);
    for (int i = 0; i < p->HV; i++) {
        const int hv = (i + s->turns * s->runs) % p->HV, h = hv / dp_G(p);
        const dp_base b = s->at[DP_STAGE_INTRA_BWD];
        const dp_format out = dp_sim_design_at(s, DP_STAGE_WY_BWD).out[DP_RESULT_DV];
        dp_chunk *ch = dp_sim_chunk(s, gi, hv);
        dp_chunk_grad x;
        dp_chunk_grad_alloc(&x, ch);
        dp_sim_gather_do(s, gi, hv, dout);
        dp_sim_set_design(s, ch, DP_STAGE_WY_BWD);
        dp_chunk_wy_bwd(ch, &x);
        dp_sim_set_design(s, ch, DP_STAGE_INTRA_BWD);
        dp_chunk_intra_bwd(ch, dout, 0, &x);
        dp_sim_after(s, DP_AFTER_GRADIENTS, (dp_sim_place){.at = gi, .hv = hv, .grad = &x});
        for (int t = 0; t < g->c; t++) {
            const int64_t tok = g->t0 + t;
            for (int k = 0; k < p->K; k++) {
                double *y = s->dq + (tok * p->H + h) * p->K + k;
                *y = dp_round_arith(b, *y + x.dq[t * p->K + k]);
                y = s->dg + (tok * p->HV + hv) * Kg + (Kg == 1 ? 0 : k);
                *y = dp_round_arith(b, *y + x.dg[t * p->K + k]);
            }
            for (int64_t k = 0; k < (int64_t)dp_rows(p) * p->K; k++) {
                double *y = s->dk + (tok * p->H + h) * dp_rows(p) * p->K + k;
                *y = dp_round_arith(b, *y + x.dk[(int64_t)t * dp_rows(p) * p->K + k]);
            }
            memcpy(s->dbeta + (tok * p->HV + hv) * dp_rows(p), x.dbeta + t * dp_rows(p),
                   sizeof(double) * dp_rows(p));
            if (s->values) {
                const int64_t KR = (int64_t)dp_rows(p) * p->K, VR = (int64_t)dp_rows(p) * p->V;
                memcpy(s->derasing + (tok * p->HV + hv) * KR, x.derasing + t * KR,
                       sizeof(double) * KR);
                memcpy(s->dvalues + (tok * p->HV + hv) * VR, x.dv + t * VR, sizeof(double) * VR);
                continue;
            }
            for (int64_t i = 0; i < (int64_t)dp_rows(p) * p->V; i++)
                s->out.dv[(tok * p->HV + hv) * dp_rows(p) * p->V + i] =
                    dp_store(out, x.dv[(int64_t)t * dp_rows(p) * p->V + i]);
        }
        dp_chunk_grad_free(&x);
    }
    free(dout);
}

/* Parts of one owner are added to the first of them, which of a rank's only part changes nothing.
 */
static void add_parts(const dp_sim *s, dp_base base, double *sums, int64_t n) {
    const dp_owners o = s->p->own;
    for (int i = 1; o.kind && i < s->N; i++) {
        int first = 0;
        while (dp_own_sum(o, s->N, first) != dp_own_sum(o, s->N, i))
            first++;
        for (int64_t j = 0; first < i && j < n; j++) {
            sums[first * n + j] = dp_round_arith(base, sums[first * n + j] + sums[i * n + j]);
            sums[i * n + j] = 0;
        }
    }
}

/* dA_log and ddt_bias from the sums of all ranks, in rank order. */
static void add_sums(dp_sim *s, dp_base base, double *sums) {
    const dp_problem *p = s->p;
    double *A = s->out.dA_log, *B = s->out.ddt_bias;
    const int64_t nA = A ? p->HV : 0, nB = B ? (int64_t)p->HV * dp_Kg(p) : 0;
    if (s->peers) dp_peers_gather(s->peers, p->own, s->N, sums, nA + nB, "dA_log and ddt_bias");
    add_parts(s, base, sums, nA + nB);
    dp_sim_after(s, DP_AFTER_SUMS, (dp_sim_place){.x = sums});
    if (A) memset(A, 0, sizeof(double) * (size_t)nA);
    if (B) memset(B, 0, sizeof(double) * (size_t)nB);
    for (int i = 0; i < s->N; i++) {
        const double *part = sums + (i + s->turns * s->runs) % s->N * (nA + nB);
        for (int64_t j = 0; j < nA; j++)
            A[j] = dp_round_arith(base, A[j] + part[j]);
        for (int64_t j = 0; j < nB; j++)
            B[j] = dp_round_arith(base, B[j] + part[nA + j]);
    }
}

/* Through erase o k and write o v of a rank's tokens: dk gets its share. */
static void writes_bwd(dp_sim *s, int r, dp_base base, double *dk, double *dg, dp_result *part) {
    const dp_problem *p = s->p;
    const int64_t a = s->ctx[r].a, b = s->ctx[r].b;
    const int64_t R = dp_rows(p), first = a * p->HV * R, keys = a * p->H * R * p->K;
    (base == DP_BASE_FP64 ? dp_activate_writes_bwd : dp_activate_writes_bwd_f32)(
        &s->units.p, a, b, s->k + keys, s->derasing + first * p->K, s->dvalues + first * p->V,
        dk + keys, dg + a * p->HV * dp_Kg(p), part);
    dp_sim_after(s, DP_AFTER_WRITES, (dp_sim_place){.at = r, .x = dk + keys});
}

int64_t dp_sim_numbers_of_sums(const dp_sim *s) {
    const int64_t HV = s->p->HV;
    return (s->out.dA_log ? HV : 0) + (s->out.ddt_bias ? HV * dp_Kg(s->p) : 0);
}

static void store_all(const dp_problem *p, int result, dp_format f, double *x) {
    int64_t rows, width;
    dp_result_shape(p, result, &rows, &width);
    for (int64_t i = 0; x && i < rows * width; i++)
        x[i] = dp_store(f, x[i]);
}

/* Gradients [n] of the rows of q or k as they reach the norm: a copy, for writes_bwd adds to it. */
static double *gradient_of_rows(const dp_sim *s, dp_format stored, const double *x, int64_t n) {
    const int between = dp_sim_design_at(s, DP_STAGE_GATE_BWD).stored_inputs && s->p->l2norm;
    double *copy = dp_copy(x, n);
    for (int64_t i = 0; between && i < n; i++)
        copy[i] = dp_store(stored, copy[i]);
    return copy;
}

void dp_sim_activations_bwd(dp_sim *s, double *sums) {
    const dp_problem *p = s->p;
    const dp_base base = s->at[DP_STAGE_GATE_BWD];
    const dp_design leaving = dp_sim_design_at(s, DP_STAGE_GATE_BWD);
    const double *dbeta = s->dbeta;
    const int64_t nq = p->T * p->H * p->K, nk = nq * dp_rows(p);
    double *dq = gradient_of_rows(s, leaving.out[DP_RESULT_DQ], s->dq, nq);
    double *dk = gradient_of_rows(s, leaving.out[DP_RESULT_DK], s->dk, nk);
    double *dg = dp_by_rows(p) ? dp_copy(s->dg, p->T * p->HV * dp_Kg(p)) : s->dg;
    const int Kg = dp_Kg(p);
    const int64_t nA = s->out.dA_log ? p->HV : 0, n = dp_sim_numbers_of_sums(s);
    dp_sim_after(s, DP_AFTER_NORMS, (dp_sim_place){0});
    const double *q = s->norm_q ? s->norm_q : s->q, *k = s->norm_k ? s->norm_k : s->k;
    for (int r = 0; r < s->N; r++) {
        const int64_t a = s->ctx[r].a, b = s->ctx[r].b;
        if (!dp_sim_has(s, r)) continue;
        dp_result part = s->out;
        part.dA_log = sums && s->out.dA_log ? sums + r * n : NULL;
        part.ddt_bias = sums && s->out.ddt_bias ? sums + r * n + nA : NULL;
        if (s->values) writes_bwd(s, r, base, dk, dg, &part);
        (base == DP_BASE_FP64 ? dp_activate_bwd : dp_activate_bwd_f32)(
            &s->units.p, a, b, q + a * p->H * p->K, k + a * p->H * dp_rows(p) * p->K,
            s->rstd_q + a * p->H, s->rstd_k + a * p->H * dp_rows(p), dq + a * p->H * p->K,
            dk + a * p->H * dp_rows(p) * p->K, dg + a * p->HV * Kg, dbeta + a * p->HV * dp_rows(p),
            &part);
        (base == DP_BASE_FP64 ? dp_units_bwd : dp_units_bwd_f32)(&s->units, a, b, &part);
        dp_sim_after(s, DP_AFTER_ACTIVATIONS, (dp_sim_place){.at = r, .part = &part});
    }
    if (p->angle) (base == DP_BASE_FP64 ? dp_sum_angles : dp_sum_angles_f32)(p, s->out.dangle);
    dp_sim_replace(&s->norm_q, NULL);
    dp_sim_replace(&s->norm_k, NULL);
    free(dq);
    free(dk);
    if (dg != s->dg) free(dg);
    for (int i = 0; i < DP_NRESULTS; i++) /* dv without s->values left before */
        if (dp_leaves(i) && dp_result_fields[i].backward && (i != DP_RESULT_DV || s->values))
            store_all(p, i, leaving.out[i], *dp_result_at(&s->out, i));
}

/* Rank by rank; dA_log and ddt_bias are per-rank partial sums, then all-reduced in rank order. */
void dp_sim_gate_bwd(dp_sim *s) {
    double *sums = dp_doubles(s->N * dp_sim_numbers_of_sums(s));
    dp_sim_activations_bwd(s, sums);
    add_sums(s, s->at[DP_STAGE_GATE_BWD], sums);
    free(sums);
}

void dp_sim_all_grads(dp_sim *s) {
    dp_sim_fresh(s, DP_STAGE_WY_BWD);
    dp_sim_fresh(s, DP_STAGE_INTRA_BWD);
#pragma omp parallel for schedule(dynamic, 1)
    for (int g = 0; g < s->ngroup; g++)
        grads(s, g);
}

void dp_sim_pre_bwd(dp_sim *s) {
    if (!dp_exchanges[s->merge].pairs) return;
#pragma omp parallel for schedule(dynamic, 1)
    for (int i = 0; i < s->N * s->p->HV; i++)
        if (dp_sim_has(s, i / s->p->HV) && !s->ctx[i / s->p->HV].is_first)
            dp_sim_pair_bwd(s, i / s->p->HV, i % s->p->HV, 0, s->chain);
}

void dp_sim_states_bwd(dp_sim *s) {
    const int HV = s->p->HV;
#pragma omp parallel for schedule(dynamic, 1) if (!s->one_by_one)
    for (int i = 0; i < s->N * HV; i++)
        for (int sub = 0; dp_sim_has(s, i / HV) && sub < s->ctx[i / HV].nlocal; sub++)
            state_bwd(s, i / HV, i % HV, sub);
}
