/* gpu/arrays/arrays.cu - arrays of doubles on a device (dp_arrays.h). Compiled without contraction:
 * the bits of the host. */
#include "dp_arrays.h"
#include "plan/status.cuh"
#include "plan/values.cuh"
#include "ref/inputs/inputs_exact.h"
#include "ref/inputs/inputs_large.h"

#define THREADS 256
#define NONE 0xffffffffffffffffull

/* Threads that n entries are spread over, in strides of all. */
static unsigned blocks_of(int64_t n) {
    const int64_t b = (n + THREADS - 1) / THREADS;
    return b < 1 ? 1u : b > 4096 ? 4096u : (unsigned)b;
}
#define EACH(i, n)                                                            \
    for (int64_t i = (int64_t)blockIdx.x * blockDim.x + threadIdx.x; i < (n); \
         i += (int64_t)gridDim.x * blockDim.x)

static __global__ void set_kernel(double *x, int64_t n, double value) {
    EACH(i, n)
    x[i] = value;
}
static __global__ void times_kernel(double *x, int64_t n, double c) {
    EACH(i, n)
    x[i] *= c;
}
static __global__ void narrow_kernel(const double *x, int64_t n, int bf16, void *to) {
    EACH(i, n)
    stx(to, i, bf16, (float)x[i]);
}
static __global__ void widen_kernel(const void *x, int64_t n, int bf16, double *to) {
    EACH(i, n)
    to[i] = ldx(x, i, bf16);
}
/* A block makes THREADS rows: a thread the norm of one, then all of them entry by entry. */
static __global__ void fill_kernel(double *x, dp_large_law law, int64_t rows) {
    __shared__ double norm[THREADS];
    for (int64_t r = (int64_t)blockIdx.x * THREADS; r < rows; r += (int64_t)gridDim.x * THREADS) {
        const int64_t n = rows - r < THREADS ? rows - r : THREADS;
        if (threadIdx.x < n) norm[threadIdx.x] = dp_large_norm(&law, r + threadIdx.x);
        __syncthreads();
        for (int64_t i = threadIdx.x; i < n * law.width; i += THREADS)
            x[r * law.width + i] = dp_large_entry(&law, r * law.width + i, norm[i / law.width]);
        __syncthreads();
    }
}
static __global__ void exact_kernel(dp_exact x) {
    EACH(t, x.T)
    dp_exact_make(&x, t);
}
static __global__ void put_kernel(double *x, const int64_t *at, const double *value, int64_t n) {
    EACH(i, n)
    x[at[i]] = value[i];
}
static __global__ void edit_kernel(dp_memory_edit e) {
    const int64_t n = e.to - e.from;
    EACH(i, e.rows * n) {
        const int64_t row = i / n, at = e.from + i % n;
        e.into[row * e.width + at] =
            dp_edited(e.edit, e.of[row * e.width + at], e.of[(e.rows - 1 - row) * e.width + at]);
    }
}
static __global__ void first_kernel(dp_memory_pair x, unsigned long long *first) {
    unsigned long long least = NONE;
    EACH(i, x.rows * x.width) {
        const double u = x.got[i], v = x.factor * x.want[i];
        if (u == v || (u != u && v != v) || fabs(u - v) <= x.small) continue;
        if (x.kept && !x.kept[i / x.width]) continue;
        if ((unsigned long long)i < least) least = (unsigned long long)i;
    }
    if (least != NONE) atomicMin(first, least);
}

dp_status dpg_array_set(double *x, int64_t n, double value, dp_err *e) {
    set_kernel<<<blocks_of(n), THREADS>>>(x, n, value);
    CK_LAUNCH(e, "set_kernel");
    return DP_OK;
}

dp_status dpg_array_times(double *x, int64_t n, double c, dp_err *e) {
    times_kernel<<<blocks_of(n), THREADS>>>(x, n, c);
    CK_LAUNCH(e, "times_kernel");
    return DP_OK;
}

dp_status dpg_array_narrow(const double *x, int64_t n, dpg_dtype t, void *to, dp_err *e) {
    narrow_kernel<<<blocks_of(n), THREADS>>>(x, n, t == DPG_BF16, to);
    CK_LAUNCH(e, "narrow_kernel");
    return DP_OK;
}

dp_status dpg_array_widen(const void *x, int64_t n, dpg_dtype t, double *to, dp_err *e) {
    widen_kernel<<<blocks_of(n), THREADS>>>(x, n, t == DPG_BF16, to);
    CK_LAUNCH(e, "widen_kernel");
    return DP_OK;
}

dp_status dpg_array_fill(double *x, const dp_large_law *law, int64_t rows, dp_err *e) {
    fill_kernel<<<blocks_of(rows), THREADS>>>(x, *law, rows);
    CK_LAUNCH(e, "fill_kernel");
    return DP_OK;
}

dp_status dpg_array_exact(const dp_exact *x, dp_err *e) {
    exact_kernel<<<blocks_of(x->T), THREADS>>>(*x);
    CK_LAUNCH(e, "exact_kernel");
    return DP_OK;
}

dp_status dpg_array_put(double *x, const int64_t *at, const double *value, int64_t n, dp_err *e) {
    put_kernel<<<blocks_of(n), THREADS>>>(x, at, value, n);
    CK_LAUNCH(e, "put_kernel");
    return DP_OK;
}

dp_status dpg_array_edit(const dp_memory_edit *edit, dp_err *e) {
    edit_kernel<<<blocks_of(edit->rows * (edit->to - edit->from)), THREADS>>>(*edit);
    CK_LAUNCH(e, "edit_kernel");
    return DP_OK;
}

dp_status dpg_array_first(const dp_memory_pair *x, unsigned long long *first, int64_t *entry,
                          dp_err *e) {
    unsigned long long found = NONE;
    CK(e, cudaMemset(first, 0xff, sizeof *first));
    first_kernel<<<blocks_of(x->rows * x->width), THREADS>>>(*x, first);
    CK_LAUNCH(e, "first_kernel");
    CK(e, cudaMemcpy(&found, first, sizeof found, cudaMemcpyDeviceToHost));
    *entry = found == NONE ? -1 : (int64_t)found;
    return DP_OK;
}
