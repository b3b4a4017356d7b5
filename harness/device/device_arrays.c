/* Arrays in a device's memory (device_arrays.h). Copies share memory until one of them changes. */
#ifdef DP_HAVE_CUDA
#include "device_arrays.h"
#include "device_fill.h"
#include "device_ranks.h"
#include "gpu/dp_arrays.h"
#include "ref/inputs/inputs_large.h"

#include <stdio.h>
#include <stdlib.h>

typedef struct {
    char *at;
    size_t bytes;
    int uses;
} block;
static struct {
    block *of;
    int n;
    unsigned long long *first; /* of dpg_array_first */
} held;

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

static block *block_of(const void *x) {
    for (int i = 0; i < held.n; i++)
        if ((char *)x >= held.of[i].at && (char *)x < held.of[i].at + held.of[i].bytes)
            return &held.of[i];
    fprintf(stderr, "deltaproof: %p is no array on the device\n", x);
    exit(2);
}

static double *tagged(void *x) {
    /* NOLINTNEXTLINE(performance-no-int-to-ptr): see dp_array_real */
    return (double *)((uintptr_t)x + DP_ARRAY_TAG);
}

/* n numbers that hold anything. */
static double *room(int64_t n) {
    const size_t bytes = sizeof(double) * (size_t)(n ? n : 1);
    block *b = NULL;
    for (int i = 0; i < held.n && !b; i++)
        if (!held.of[i].uses) b = &held.of[i];
    if (!b) {
        held.of = dp_realloc(held.of, sizeof *b * (size_t)(held.n + 1));
        b = &held.of[held.n++];
    }
    void *x;
    must(dp_pool_get(bytes, &x), "an array", bytes);
    *b = (block){x, bytes, 1};
    return tagged(x);
}

static double *make(int64_t n, double value) {
    double *x = room(n);
    dp_err e = {0};
    done(dpg_array_set(dp_array_real(x), n, value, &e), &e);
    return x;
}

static double *copy(const double *x, int64_t n) {
    (void)n;
    if (x) block_of(dp_array_real(x))->uses++;
    return (double *)x;
}

static void let_go(double *x) {
    if (!x) return;
    block *b = block_of(dp_array_real(x));
    if (--b->uses) return;
    dp_pool_put(b->at);
    *b = (block){0};
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
    if (!x || block_of(dp_array_real(x))->uses == 1) return x;
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
    void *kept = NULL;
    int64_t entry = -1;
    const size_t rows = (size_t)x->rows;
    if (!held.first)
        must(cudaMalloc((void **)&held.first, sizeof *held.first), "a number", sizeof(double));
    if (x->kept) {
        must(cudaMalloc(&kept, rows), "rows", rows);
        must(cudaMemcpy(kept, x->kept, rows, cudaMemcpyHostToDevice), "rows", rows);
    }
    y.kept = kept;
    y.got = dp_array_real(x->got);
    y.want = dp_array_real(x->want);
    done(dpg_array_first(&y, held.first, &entry, &e), &e);
    cudaFree(kept);
    return entry;
}

const dp_memory *dp_cuda_memory(const dp_problem *p, dp_backend b, int N) {
    static const dp_memory device = {make, copy,  let_go, own,   put, get,
                                     move, times, edit,   first, fill};
    int n = 0;
    if (b != DP_BACKEND_CUDA || dp_fill_needed(p) || dp_cuda_processes(b, N)) return NULL;
    return cudaGetDeviceCount(&n) == cudaSuccess && n == 1 ? &device : NULL;
}
#endif
