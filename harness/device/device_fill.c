/* Channels of zeros up to a width that the kernels take (device_fill.h). */
#include "device_fill.h"

#include <stdlib.h>
#include <string.h>

#ifdef DP_HAVE_CUDA
#define MOST 256

static int up(int width, int to) { return (width + to - 1) / to * to; }

int dp_fill_needed(const dp_problem *p) {
    const int by = dp_cuda_by_tokens(p) ? 8 : 16;
    return (p->K % 16 || p->V % by) && p->K <= MOST && p->V <= MOST;
}

/* Entries of the smaller array, of axes a, from or to their places in the larger one, of axes b. */
static void move(const int64_t a[DP_MAX_AXES], const int64_t b[DP_MAX_AXES], double *small,
                 double *large, int back) {
    const int64_t line = a[3];
    for (int64_t i = 0; i < a[0]; i++)
        for (int64_t j = 0; j < a[1]; j++)
            for (int64_t k = 0; k < a[2]; k++) {
                double *x = small + ((i * a[1] + j) * a[2] + k) * line;
                double *y = large + ((i * b[1] + j) * b[2] + k) * b[3];
                memcpy(back ? x : y, back ? y : x, (size_t)line * sizeof *x);
            }
}

/* Four axes: those of length 1 come first. */
static void all_axes(const dp_tensor_field *f, const dp_problem *p, int64_t shape[DP_MAX_AXES]) {
    const dp_dims d = dp_problem_dims(p);
    int64_t own[DP_MAX_AXES];
    const int n = dp_field_axes(f, &d, own);
    for (int i = 0; i < DP_MAX_AXES; i++)
        shape[i] = i < DP_MAX_AXES - n ? 1 : own[i - (DP_MAX_AXES - n)];
}

static void move_field(const dp_tensor_field *f, const dp_problem *p, const dp_problem *wide,
                       double *small, double *large, int back) {
    int64_t a[DP_MAX_AXES], b[DP_MAX_AXES];
    all_axes(f, p, a);
    all_axes(f, wide, b);
    move(a, b, small, large, back);
}

dp_problem dp_fill_problem(const dp_problem *p) {
    dp_problem wide = *p;
    wide.K = up(p->K, 16);
    wide.V = up(p->V, 16);
    wide.pairs = dp_pairs(p);
    wide.cu = dp_cu_copy(p);
    for (int i = 0; i < DP_NINPUTS; i++) {
        double *x = *dp_input_at((dp_problem *)p, i);
        if (!x) continue;
        double *y = *dp_input_at(&wide, i) = dp_doubles(dp_input_count(&wide, i));
        move_field(&dp_input_fields[i], p, &wide, x, y, 0);
    }
    return wide;
}

void dp_fill_free(dp_problem *wide) {
    for (int i = 0; i < DP_NINPUTS; i++)
        free(*dp_input_at(wide, i));
    free((void *)wide->cu);
}

/* [K,K] or [K,V] of a rank and head. */
static void move_rank(const dp_problem *p, const dp_problem *wide, int which, const double *large,
                      double *small) {
    const int is_M = which == DP_RANK_M || which == DP_RANK_DM;
    const int64_t a[] = {1, 1, p->K, is_M ? p->K : p->V};
    const int64_t b[] = {1, 1, wide->K, is_M ? wide->K : wide->V};
    move(a, b, small, (double *)large, 1);
}

void dp_fill_results(const dp_problem *p, const dp_problem *wide, int backward,
                     dp_cuda_result *from, dp_cuda_result *to) {
    *to = *from;
    dp_result_alloc(&to->out, p, backward);
    for (int i = 0; i < DP_NRESULTS; i++) {
        double *x = *dp_result_at(&to->out, i), *y = *dp_result_at(&from->out, i);
        if (x && y) move_field(&dp_result_fields[i], p, wide, x, y, 1);
    }
    for (int i = 0; i < DP_RANK_TENSORS; i++) {
        to->rank[i] = dp_calloc((size_t)from->N * p->HV, sizeof(double *));
        for (int x = 0; x < from->N * p->HV; x++) {
            if (!from->rank[i][x]) continue;
            to->rank[i][x] = dp_doubles(dp_rank_width(p, i));
            move_rank(p, wide, i, from->rank[i][x], to->rank[i][x]);
        }
    }
    dp_cuda_result_free(from, p->HV);
}
#endif
