/* Arrays in a device's memory (device_arrays.h). Copies share memory until one of them changes. */
#ifdef DP_HAVE_CUDA
#include "device_arrays.h"
#include "device_ranks.h"
#include "gpu/dp_arrays.h"
#include "ref/inputs/inputs_exact.h"
#include "ref/inputs/inputs_large.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* ---- channels of zeros up to a width that the kernels take ----------------------------------- */

#define MOST_WIDTH 256

static int up(int width, int to) { return (width + to - 1) / to * to; }

int dp_fill_needed(const dp_problem *p) {
    const int by = dp_cuda_by_tokens(p) ? 8 : 16;
    return (p->K % 16 || p->V % by) && p->K <= MOST_WIDTH && p->V <= MOST_WIDTH;
}

/* Entries of the smaller array, of axes a, from or to their places in the larger one, of axes b. */
static void move_entries(const int64_t a[DP_MAX_AXES], const int64_t b[DP_MAX_AXES], double *small,
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
    move_entries(a, b, small, large, back);
}

dp_problem dp_fill_problem(const dp_problem *p) {
    dp_problem wide = *p;
    wide.K = up(p->K, 16);
    wide.V = up(p->V, 16);
    wide.pairs = dp_pairs(p);
    wide.cu = dp_cu_copy(p);
    for (int i = 0; i < DP_NINPUTS; i++) {
        double *x = p->in[i];
        if (!x) continue;
        double *y = wide.in[i] = dp_doubles(dp_input_count(&wide, i));
        move_field(&dp_input_fields[i], p, &wide, x, y, 0);
    }
    return wide;
}

void dp_fill_free(dp_problem *wide) {
    for (int i = 0; i < DP_NINPUTS; i++)
        free(wide->in[i]);
    free((void *)wide->cu);
}

/* [K,K] or [K,V] of a rank and head. */
static void move_rank(const dp_problem *p, const dp_problem *wide, int which, const double *large,
                      double *small) {
    const int is_M = which == DP_RANK_M || which == DP_RANK_DM;
    const int64_t a[] = {1, 1, p->K, is_M ? p->K : p->V};
    const int64_t b[] = {1, 1, wide->K, is_M ? wide->K : wide->V};
    move_entries(a, b, small, (double *)large, 1);
}

void dp_fill_results(const dp_problem *p, const dp_problem *wide, int backward,
                     dp_cuda_result *from, dp_cuda_result *to) {
    *to = *from;
    dp_result_alloc(&to->out, p, backward);
    for (int i = 0; i < DP_NRESULTS; i++) {
        double *x = to->out.out[i], *y = from->out.out[i];
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

/* ---- arrays ---------------------------------------------------------------------------------- */

static void must(cudaError_t rc, const char *what, size_t bytes) {
    if (rc == cudaSuccess) return;
    fprintf(stderr, "deltaproof: %s of %zu bytes on the device: %s\n", what, bytes,
            cudaGetErrorString(rc));
    exit(2);
}

static void done(dp_status st, const dp_err *e) {
    if (!st) return;
    fprintf(stderr, "deltaproof: %s\n", e->msg);
    exit(2);
}

/* Adds to the uses of x; their number before. */
static int use(const double *x, int more) {
    const int before = dp_pool_use(dp_array_real(x), more);
    if (before) return before;
    fprintf(stderr, "deltaproof: %p is no array on the device\n", (const void *)x);
    exit(2);
}

static double *tagged(void *x) {
    /* NOLINTNEXTLINE(performance-no-int-to-ptr): see dp_array_real */
    return (double *)((uintptr_t)x + DP_ARRAY_TAG);
}

/* n numbers that hold anything. */
static double *room(int64_t n) {
    const size_t bytes = sizeof(double) * (size_t)(n ? n : 1);
    void *x;
    must(dp_pool_get(bytes, &x), "an array", bytes);
    return tagged(x);
}

static double *make(int64_t n, double value) {
    double *x = room(n);
    dp_err e = {0};
    done(dpg_array_set(dp_array_real(x), n, value, &e), &e);
    return x;
}

static double *copy(const double *x, DP_UNUSED int64_t n) {
    if (x) use(x, 1);
    return (double *)x;
}

static void let_go(double *x) {
    if (x) use(x, -1);
}

static void copy_bytes(void *to, const void *from, int64_t n, enum cudaMemcpyKind kind) {
    const size_t bytes = sizeof(double) * (size_t)n;
    must(cudaMemcpy(to, from, bytes, kind), "a copy", bytes);
}
static void put(double *to, const double *host, int64_t n) {
    copy_bytes(dp_array_real(to), host, n, cudaMemcpyHostToDevice);
}
static void get(double *host, const double *from, int64_t n) {
    copy_bytes(host, dp_array_real(from), n, cudaMemcpyDeviceToHost);
}
static void move(double *to, const double *from, int64_t n) {
    copy_bytes(dp_array_real(to), dp_array_real(from), n, cudaMemcpyDeviceToDevice);
}

static double *own(double *x, int64_t n) {
    if (!x || use(x, 0) == 1) return x;
    double *y = room(n);
    move(y, x, n);
    let_go(x);
    return y;
}

static void times(double *x, int64_t n, double c) {
    dp_err e = {0};
    done(dpg_array_times(dp_array_real(x), n, c, &e), &e);
}

static void edit(const dp_memory_edit *x) {
    dp_memory_edit y = *x;
    dp_err e = {0};
    y.into = dp_array_real(x->into);
    y.of = dp_array_real(x->of);
    done(dpg_array_edit(&y, &e), &e);
}

static int fill(double *x, const dp_large_law *law, int64_t rows) {
    dp_err e = {0};
    if (law->kind == DP_LARGE_LOG) return 0;
    done(dpg_array_fill(dp_array_real(x), law, rows, &e), &e);
    return 1;
}

static int64_t first(const dp_memory_pair *x) {
    dp_memory_pair y = *x;
    dp_err e = {0};
    int64_t entry = -1;
    const size_t rows = (size_t)x->rows, at = (rows + 7) / 8; /* kept, then a number */
    double *both = room((int64_t)at + 1);
    uint8_t *kept = (uint8_t *)dp_array_real(both);
    if (x->kept) must(cudaMemcpy(kept, x->kept, rows, cudaMemcpyHostToDevice), "rows", rows);
    y.kept = x->kept ? kept : NULL;
    y.got = dp_array_real(x->got);
    y.want = dp_array_real(x->want);
    done(dpg_array_first(&y, (unsigned long long *)(kept + 8 * at), &entry, &e), &e);
    let_go(both);
    return entry;
}

/* Bytes of the host in memory of the device, as doubles; let_go frees them. */
static double *sent(const void *host, size_t bytes) {
    double *x = room((int64_t)(bytes + 7) / 8);
    must(cudaMemcpy(dp_array_real(x), host, bytes, cudaMemcpyHostToDevice), "a copy", bytes);
    return x;
}

static void exact(const dp_exact *x) {
    const size_t T = (size_t)x->T, HV = (size_t)x->HV;
    dp_exact y = *x;
    dp_err e = {0};
    double *token = sent(x->token, T * sizeof *x->token),
           *old = sent(x->old, T * HV * sizeof *x->old);
    double **const array[] = {&y.q, &y.k, &y.v, &y.g, &y.beta, &y.erase, &y.write};
    y.token = (const dp_exact_token *)dp_array_real(token);
    y.old = (const uint16_t *)dp_array_real(old);
    for (int i = 0; i < 7; i++)
        *array[i] = dp_array_real(*array[i]);
    done(dpg_array_exact(&y, &e), &e);
    let_go(token);
    let_go(old);
}

static void set(double *x, const int64_t *at, const double *value, int64_t n) {
    const size_t bytes = sizeof(double) * (size_t)n;
    dp_err e = {0};
    if (!n) return;
    double *places = sent(at, bytes), *values = sent(value, bytes);
    done(dpg_array_put(dp_array_real(x), (const int64_t *)dp_array_real(places),
                       dp_array_real(values), n, &e),
         &e);
    let_go(places);
    let_go(values);
}

const dp_memory *dp_cuda_memory(const dp_problem *p, dp_backend b, int N) {
    static const dp_memory device = {make,  copy, let_go, own,  put,   get, move,
                                     times, edit, first,  fill, exact, set};
    int n = 0;
    if (b != DP_BACKEND_CUDA || dp_fill_needed(p) || dp_cuda_processes(b, N)) return NULL;
    return cudaGetDeviceCount(&n) == cudaSuccess && n == 1 ? &device : NULL;
}
#endif
