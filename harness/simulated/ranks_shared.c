/* Shared by forward and backward: factors, starts, the chain of M (ranks_stages.h). */
#include "ranks_stages.h"
#include "ref/arithmetic/mm.h"
#include "ref/vocabulary/stored.h"

#include <stdlib.h>
#include <string.h>

#define ARRAY(FIELD, STAGE, HEADS, KEYS, WIDTH, WRITES)                             \
    {                                                                               \
        offsetof(dp_sim, FIELD), DP_STAGE_##STAGE, DP_AXIS_##HEADS, DP_AXIS_##KEYS, \
            DP_AXIS_##WIDTH, WRITES                                                 \
    }
const dp_sim_array_info dp_sim_arrays[DP_NSIM_ARRAYS] = {
    ARRAY(q, GATE, H, NONE, K, 0),           ARRAY(k, GATE, H, R, K, 0),
    ARRAY(g, GATE, HV, NONE, KG, 0),         ARRAY(beta, GATE, HV, R, NONE, 0),
    ARRAY(rstd_q, GATE, H, NONE, NONE, 0),   ARRAY(rstd_k, GATE, H, R, NONE, 0),
    ARRAY(erasing, GATE, HV, R, K, 1),       ARRAY(values, GATE, HV, R, V, 1),
    ARRAY(dq, INTRA_BWD, H, NONE, K, 0),     ARRAY(dk, INTRA_BWD, H, R, K, 0),
    ARRAY(dg, INTRA_BWD, HV, NONE, KG, 0),   ARRAY(dbeta, WY_BWD, HV, R, NONE, 0),
    ARRAY(derasing, INTRA_BWD, HV, R, K, 1), ARRAY(dvalues, WY_BWD, HV, R, V, 1),
};

int64_t dp_sim_array_width(const dp_sim *s, int i) {
    const dp_sim_array_info *x = &dp_sim_arrays[i];
    const int64_t rows = x->keys ? dp_rows(s->p) : 1;
    return x->width ? rows * dp_problem_dims(s->p).of[x->width] : rows;
}

void dp_sim_fresh(dp_sim *s, dp_stage stage) {
    const dp_problem *p = s->p;
    for (int i = 0; i < DP_NSIM_ARRAYS; i++) {
        const dp_sim_array_info *x = &dp_sim_arrays[i];
        if (x->made_by != stage || (x->writes && !s->values)) continue;
        const int64_t heads = x->heads == DP_AXIS_H ? p->H : p->HV;
        dp_sim_replace(dp_sim_array(s, i), dp_doubles(p->T * heads * dp_sim_array_width(s, i)));
    }
}

static const double *factor_at(dp_sim *s, int gi, int hv, dp_stage stage) {
    const int64_t own = s->at[stage] != s->at[DP_STAGE_PRE_FWD];
    double **f = &s->factor[(own * s->ngroup + gi) * s->p->HV + hv];
    if (!*f) {
        *f = dp_doubles((int64_t)s->p->K * s->p->K);
        dp_chunk_M(dp_sim_chunk_at(s, gi, hv, stage), *f);
    }
    return *f;
}

int dp_sim_starts_here(const dp_sim *s, int r, int sub) { return sub > 0 || s->ctx[r].is_first; }
int dp_sim_ends_here(const dp_sim *s, int r, int sub) {
    return sub < s->ctx[r].nlocal - 1 || s->ctx[r].is_last;
}

const double *dp_sim_start(const dp_sim *s, int r, int sub) {
    if (!s->p->s0 || !dp_sim_starts_here(s, r, sub)) return NULL;
    return s->p->s0 + (int64_t)s->ctx[r].local_seq[sub] * s->p->HV * s->p->K * s->p->V;
}

const double *dp_sim_end_gradient(const dp_sim *s, int r, int sub) {
    if (!s->p->dstate || !dp_sim_ends_here(s, r, sub)) return NULL;
    return s->p->dstate + (int64_t)s->ctx[r].local_seq[sub] * s->p->HV * s->p->K * s->p->V;
}

void dp_sim_gather_do(const dp_sim *s, int gi, int hv, double *dout) {
    const dp_problem *p = s->p;
    const dp_group *g = &s->group[gi];
    for (int t = 0; t < g->c; t++)
        memcpy(dout + (int64_t)t * p->V, p->dout + ((g->t0 + t) * p->HV + hv) * p->V,
               sizeof(double) * p->V);
}

void dp_sim_replace(double **slot, double *x) {
    free(*slot);
    *slot = x;
}

void dp_sim_round_carried(const dp_sim *s, dp_stage stage, double *S) {
    const dp_design d = dp_sim_design_at(s, stage), plain = dp_design_of(d.base);
    const int gradient = stage == DP_STAGE_PRE_BWD || stage == DP_STAGE_STATE_BWD;
    const dp_format f = gradient ? d.dstate : d.state;
    if (f == (gradient ? plain.dstate : plain.state)) return;
    dp_store_state(f, 1, s->p->K, s->p->V, S);
}

void dp_sim_round_arith_all(dp_base b, double *x, int64_t n) {
    if (b != DP_BASE_FP64)
        for (int64_t i = 0; i < n; i++)
            x[i] = dp_round_arith(b, x[i]);
}

/* The chain of the factors of groups [g0, g1), first to last, from P = I (math.md g.1). P <- M_c P
 * in the format, so the first factor is rounded like the others. trans: the adjoint chain dM <-
 * M_c' dM, last to first. */
double *dp_sim_chain(dp_sim *s, int g0, int g1, int hv, dp_format f, int trans, int record) {
    const int K = s->p->K, n = g1 - g0;
    const int64_t KK = (int64_t)K * K;
    double *P = dp_doubles(KK), *Q = dp_doubles(KK), *Mt = dp_doubles(KK);
    for (int x = 0; x < K; x++)
        P[(int64_t)x * K + x] = 1;
    for (int i = 0; i < n; i++) {
        const double *M = factor_at(s, trans ? g1 - 1 - i : g0 + i, hv,
                                    trans ? DP_STAGE_PRE_BWD : DP_STAGE_PRE_FWD);
        if (trans) {
            for (int a = 0; a < K; a++)
                for (int b = 0; b < K; b++)
                    Mt[(int64_t)a * K + b] = M[(int64_t)b * K + a];
            M = Mt;
        }
        dp_mm_by(s->linear, f, (dp_shape){0, 0, K, K, K}, M, P, Q);
        double *t = P;
        P = Q;
        Q = t;
        if (record && (i & (i + 1)) == 0 && s->ntraj < DP_MAX_TRAJ) { /* i + 1 is a power of two */
            dp_sim_replace(&s->traj[(int64_t)s->ntraj * s->p->HV + hv], dp_copy(P, KK));
            s->traj_chunks[s->ntraj++] = i + 1;
        }
    }
    free(Q);
    free(Mt);
    return P;
}

/* S <- M S + H in the accumulator of the base; S == NULL stands for zeros, which no M multiplies.
 */
void dp_sim_merge_step(dp_sim *s, int r, int hv, dp_base b, const double *M, const double *H,
                       double **S) {
    const int K = s->p->K, V = s->p->V;
    const int64_t KV = (int64_t)K * V;
    double *x = dp_doubles(KV);
    if (*S) {
        dp_mm_by(s->linear, b == DP_BASE_FP64 ? DP_FP64 : DP_FP32, (dp_shape){0, 0, K, V, K}, M, *S,
                 x);
        for (int64_t i = 0; i < KV; i++)
            x[i] = dp_round_arith(b, x[i] + H[i]);
        dp_sim_after(
            s, DP_AFTER_MERGING,
            (dp_sim_place){.at = r, .hv = hv, .M = (double *)M, .from = *S, .H = H, .x = x});
    } else
        memcpy(x, H, sizeof(double) * KV);
    dp_sim_replace(S, x);
}

int dp_sim_same(double **a, double **b, int n, int64_t size) {
    for (int i = 0; i < n; i++) {
        if (!a[i] != !b[i]) return 0;
        if (a[i] && memcmp(a[i], b[i], sizeof(double) * (size_t)size)) return 0;
    }
    return 1;
}

double **dp_sim_copy_list(double **a, int n, int64_t size) {
    double **b = dp_calloc((size_t)n, sizeof *b);
    for (int i = 0; i < n; i++)
        b[i] = dp_copy(a[i], size);
    return b;
}

void dp_sim_free_list(double **a, int64_t n) {
    if (a)
        for (int64_t i = 0; i < n; i++)
            free(a[i]);
    free(a);
}
