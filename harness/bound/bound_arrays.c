/* The arrays of an error bound: allocation, cache parts, the smaller of two, release. */
#include "error_bound_impl.h"

int64_t dp_error_bound_row_count(const dp_problem *p, int field) {
    int64_t rows, width;
    dp_result_shape(p, field, &rows, &width);
    return rows;
}

static int64_t size_of(const dp_problem *p, int field) {
    int64_t rows, width;
    dp_result_shape(p, field, &rows, &width);
    return rows * width;
}

static double **rank_arrays(dp_error_bound *b, int i) {
    double **a[] = {&b->S_in, &b->M, &b->H, &b->dS_out, &b->dM, &b->dH};
    return a[i];
}

void dp_error_bound_alloc(const dp_problem *p, int N, int backward, int entries,
                          dp_error_bound *out) {
    *out = (dp_error_bound){0};
    for (int i = 0; i < DP_NRESULTS; i++)
        if (dp_error_bound_row_count(p, i) && (backward || !dp_result_fields[i].backward))
            out->row[i] = dp_doubles(dp_error_bound_row_count(p, i));
    for (int i = 0; i < 6; i++)
        *rank_arrays(out, i) = dp_doubles((int64_t)N * p->HV);
    for (int i = 0; i < DP_NQKV && backward && entries; i++) {
        out->entry[i] = dp_doubles(size_of(p, dp_qkv_gradient(i)));
        out->rest[i] = dp_doubles(dp_error_bound_row_count(p, dp_qkv_gradient(i)));
    }
}

int dp_error_bound_parts(const dp_problem *p, int N, dp_error_bound *b, dp_part *part) {
    int n = 0;
    for (int i = 0; i < DP_NRESULTS; i++)
        if (b->row[i])
            part[n++] =
                (dp_part){b->row[i], sizeof(double) * (size_t)dp_error_bound_row_count(p, i)};
    for (int i = 0; i < 6; i++)
        part[n++] = (dp_part){*rank_arrays(b, i), sizeof(double) * (size_t)N * p->HV};
    part[n++] = (dp_part){b->traj, sizeof b->traj};
    for (int i = 0; i < DP_NQKV && b->entry[i]; i++) {
        part[n++] = (dp_part){b->entry[i], sizeof(double) * (size_t)size_of(p, dp_qkv_gradient(i))};
        part[n++] = (dp_part){
            b->rest[i], sizeof(double) * (size_t)dp_error_bound_row_count(p, dp_qkv_gradient(i))};
    }
    return n;
}

static void smaller(double *a, const double *b, int64_t n) {
    if (a && b)
        for (int64_t i = 0; i < n; i++)
            a[i] = fmin(a[i], b[i]);
}

void dp_error_bound_min(const dp_problem *p, int N, dp_error_bound *a, const dp_error_bound *b) {
    dp_error_bound copy = *b;
    for (int i = 0; i < DP_NRESULTS; i++)
        smaller(a->row[i], b->row[i], dp_error_bound_row_count(p, i));
    for (int i = 0; i < 6; i++)
        smaller(*rank_arrays(a, i), *rank_arrays(&copy, i), (int64_t)N * p->HV);
    smaller(a->traj, b->traj, DP_MAX_TRAJ);
}

static void swap(double **a, double **b) {
    double *was = *a;
    *a = *b;
    *b = was;
}

void dp_error_bound_swap_rows(dp_error_bound *a, dp_error_bound *b) {
    for (int i = 0; i < DP_NRESULTS; i++)
        swap(&a->row[i], &b->row[i]);
    for (int i = 0; i < DP_NQKV; i++) {
        swap(&a->entry[i], &b->entry[i]);
        swap(&a->rest[i], &b->rest[i]);
    }
}

void dp_error_bound_free(dp_error_bound *b) {
    for (int i = 0; i < DP_NRESULTS; i++)
        free(b->row[i]);
    for (int i = 0; i < DP_NQKV; i++) {
        free(b->entry[i]);
        free(b->rest[i]);
    }
    free(b->S_in);
    free(b->M);
    free(b->H);
    free(b->dS_out);
    free(b->dM);
    free(b->dH);
    *b = (dp_error_bound){0};
}
