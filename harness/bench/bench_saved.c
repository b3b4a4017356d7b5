/* harness/bench/bench_saved.c - formats for the state that enters a rank, if the rank keeps it for
 * its backward, which recomputes from it. It prints bytes, the error of that state beside its
 * bound, the largest error of each gradient, and |M - I| of a rank. All else is fp64, so that the
 * store alone rounds. Errors are relative, Frobenius, the largest over ranks.
 *
 *   the bound of a state: ref/vocabulary/stored.h; the bound of r singular values, or of rows, is
 *   the root of the sum of squares left out: the error itself. The bound of dq: scale |do_t|
 *   |dS|_2, as no step of these inputs expands (bound of a row, worst |error| / bound).
 *
 * usage: bench_saved [CASE.case [ranks]]
 *            default cases/kda-long.case 8; K = V
 */
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "harness/case/case.h"
#include "harness/search/invariants_work.h"
#include "ref/arithmetic/low_rank.h"
#include "ref/vocabulary/stored.h"

typedef struct {
    const char *name;
    dp_format format; /* that numbers are stored in */
    double tolerance; /* above 0: singular values above this times |S|, in fp32, in its place */
    int rows;         /* above 0: so many percent of the rows, the largest */
} form;

static double norm(const double *x, int64_t n) {
    double sum = 0;
    for (int64_t i = 0; i < n; i++)
        sum += x[i] * x[i];
    return sqrt(sum);
}
static double apart(const double *x, const double *y, int64_t n) {
    double sum = 0;
    for (int64_t i = 0; i < n; i++)
        sum += (x[i] - y[i]) * (x[i] - y[i]);
    return sqrt(sum);
}

static int falling(const void *a, const void *b) {
    const double x = *(const double *)a, y = *(const double *)b;
    return x < y ? 1 : x > y ? -1 : 0;
}

/* S as the form keeps it; adds the bytes that this takes. */
static void keep(const form *f, int K, double *S, double *bytes) {
    const int n = K * K;
    if (f->tolerance > 0) {
        double *U, *W;
        const int r = dp_low_rank(S, K, f->tolerance * norm(S, n), &U, &W);
        for (int i = 0; i < n; i++)
            S[i] = 0;
        for (int i = 0; i < K; i++)
            for (int z = 0; z < r; z++)
                for (int j = 0; j < K; j++)
                    S[i * K + j] += U[i * r + z] * W[z * K + j];
        free(U);
        free(W);
        *bytes += 4. * 2 * K * r;
        return;
    }
    if (f->rows) {
        double size[K], sorted[K];
        for (int i = 0; i < K; i++)
            sorted[i] = size[i] = norm(S + i * K, K);
        qsort(sorted, (size_t)K, sizeof *sorted, falling);
        const double least = sorted[K * f->rows / 100 - 1];
        for (int i = 0; i < K; i++)
            if (size[i] < least) memset(S + i * K, 0, sizeof *S * (size_t)K);
        *bytes += 4. * K * K * f->rows / 100;
        return;
    }
    dp_store_state(f->format, 1, K, K, S);
    *bytes += (double)n * (f->format == DP_FP32 ? 4 : f->format == DP_BF16 ? 2 : 1);
}

/* The backward of a rank's tokens from the state S0 [HV][K][V]. */
static dp_result backward(const dp_problem *rank, const double *S0) {
    dp_problem p = *rank;
    dp_sim s;
    dp_err e = {0};
    p.s0 = (double *)S0;
    if (dp_sim_new(&s, &p, DP_BASE_FP64, 1, DP_FAULT_NONE, &e)) {
        fprintf(stderr, "bench_saved: %s\n", e.msg);
        exit(2);
    }
    dp_sim_run(&s, DP_FP64, DP_EXCHANGE_ALLGATHER, 1);
    const dp_result r = s.out;
    s.out = (dp_result){0};
    dp_sim_free(&s);
    return r;
}

/* The largest |error of dq| over scale |do| |dS|_F of a row. */
static double of_bound(const dp_problem *p, const dp_result *got, const dp_result *want,
                       const double *off) {
    double most = 0;
    for (int64_t t = 0; t < p->T; t++)
        for (int h = 0; h < p->HV; h++) {
            const int64_t q = (t * p->H + h / dp_G(p)) * p->K, o = (t * p->HV + h) * p->V;
            const double limit = p->scale * norm(p->dout + o, p->V) * off[h];
            if (limit > 0 && p->H == p->HV)
                most = fmax(most, apart(got->dq + q, want->dq + q, p->K) / limit);
        }
    return most;
}

/* Percent of the entries of D [K][K] above `least` of the largest. */
static double entries(const double *D, int K, double least) {
    double top = 0;
    int n = 0;
    for (int k = 0; k < K * K; k++)
        top = fmax(top, fabs(D[k]));
    for (int k = 0; k < K * K; k++)
        n += fabs(D[k]) > least * top;
    return 100. * n / (K * K);
}
static int rank_of(const double *D, int K, double least) {
    double *U, *W;
    const int r = dp_low_rank(D, K, least * norm(D, (int64_t)K * K), &U, &W);
    free(U);
    free(W);
    return r;
}

static void print_maps(const dp_sim *s, int K) {
    const int64_t n = (int64_t)K * K;
    printf("\nM - I of ranks 0, 1, .., head 0: |M - I| / |M|; entries above 1e-2 and 1e-4 of the "
           "largest;\nsingular values above 1e-2 and 1e-4 of |M - I|, of M itself\n");
    for (int i = 0; i < (s->N - 1) * s->p->HV; i += s->p->HV) {
        DP_OWN double *D = dp_copy(s->M[i], n);
        const int own[] = {rank_of(D, K, 1e-2), rank_of(D, K, 1e-4)};
        for (int k = 0; k < K; k++)
            D[k * K + k] -= 1;
        printf("  %.2e  %3.0f%% %3.0f%%  %d %d, %d %d of %d\n", norm(D, n) / norm(s->M[i], n),
               entries(D, K, 1e-2), entries(D, K, 1e-4), rank_of(D, K, 1e-2), rank_of(D, K, 1e-4),
               own[0], own[1], K);
    }
}

typedef struct {
    double bytes, off, limit, most[DP_NRESULTS], dq;
} kept;

/* Rank r of s with its entering states kept so. */
static void add_rank(const dp_sim *s, const form *f, int r, kept *x) {
    const dp_problem *p = s->p;
    const int K = p->K, HV = p->HV;
    const int64_t n = (int64_t)K * K, L = p->T / s->N;
    DP_OWN double *S0 = dp_doubles(n * HV), *S1 = dp_doubles(n * HV), *dS = dp_doubles(n * HV);
    double away[HV];
    for (int h = 0; h < HV; h++) {
        const int i = r * HV + h;
        const double none = 0;
        memcpy(S0 + h * n, s->S_in[i], sizeof *S0 * (size_t)n);
        memcpy(S1 + h * n, s->S_in[i], sizeof *S0 * (size_t)n);
        if (s->dS_out[i]) memcpy(dS + h * n, s->dS_out[i], sizeof *S0 * (size_t)n);
        const double size = norm(S0 + h * n, n);
        keep(f, K, S1 + h * n, &x->bytes);
        away[h] = apart(S1 + h * n, S0 + h * n, n);
        x->off = fmax(x->off, away[h] / size);
        const double limit = f->tolerance > 0 || f->rows
                                 ? away[h]
                                 : dp_stored_error(f->format, 1, K, K, S0 + h * n, &none, 0);
        x->limit = fmax(x->limit, limit / size);
    }
    dp_problem rank = dp_check_slice(p, r * L, (r + 1) * L, S0, dS, 1);
    dp_result want = backward(&rank, S0), got = backward(&rank, S1);
    for (int k = DP_RESULT_DQ; k <= DP_RESULT_DBETA; k++) {
        int64_t rows, width;
        dp_result_shape(&rank, k, &rows, &width);
        const double *a = *dp_result_at(&got, k), *b = *dp_result_at(&want, k);
        x->most[k] = fmax(x->most[k], apart(a, b, rows * width) / norm(b, rows * width));
    }
    x->dq = fmax(x->dq, of_bound(&rank, &got, &want, away));
    dp_result_free(&want);
    dp_result_free(&got);
    dp_problem_free(&rank);
}

int main(int argc, char **argv) {
    static const form FORMS[] = {
        {"fp32", DP_FP32, 0, 0},          {"bf16", DP_BF16, 0, 0},
        {"int8-row", DP_INT8_ROW, 0, 0},  {"e4m3-block", DP_E4M3_BLOCK, 0, 0},
        {"svd 1e-4", DP_FP64, 1e-4, 0},   {"svd 1e-2", DP_FP64, 1e-2, 0},
        {"half the rows", DP_FP64, 0, 50}};
    const char *path = argc > 1 ? argv[1] : "cases/kda-long.case";
    const int N = argc > 2 ? atoi(argv[2]) : 8;
    dp_case c;
    dp_sim s;
    dp_err e = {0};
    if (dp_case_open(path, 1, &c, &e) || dp_sim_new(&s, &c.p, DP_BASE_FP64, N, DP_FAULT_NONE, &e)) {
        fprintf(stderr, "bench_saved: %s\n", e.msg);
        return 2;
    }
    if (c.p.K != c.p.V || !c.p.dout || N < 3) {
        fprintf(stderr, "bench_saved: %s: wants K = V, gradients, 3 ranks\n", path);
        return 2;
    }
    dp_sim_run(&s, DP_FP64, DP_EXCHANGE_ALLGATHER, 1);
    printf("%s, %d ranks, %d heads, K = V = %d\n", c.name, N, c.p.HV, c.p.K);
    print_maps(&s, c.p.K);
    printf("\n%-14s %8s %9s %9s", "state kept as", "bytes", "dS", "dS bound");
    for (int f = DP_RESULT_DQ; f <= DP_RESULT_DBETA; f++)
        printf(" %9s", dp_result_fields[f].name);
    printf(" %9s\n", "dq bound");
    for (size_t z = 0; z < sizeof FORMS / sizeof *FORMS; z++) {
        kept x = {0};
        for (int r = 1; r < N; r++)
            add_rank(&s, &FORMS[z], r, &x);
        printf("%-14s %8.0f %9.1e %9.1e", FORMS[z].name, x.bytes / (N - 1) / c.p.HV, x.off,
               x.limit);
        for (int k = DP_RESULT_DQ; k <= DP_RESULT_DBETA; k++)
            printf(" %9.1e", x.most[k]);
        printf(" %9.2f\n", x.dq);
    }
    dp_sim_free(&s);
    dp_case_free(&c);
    return 0;
}
