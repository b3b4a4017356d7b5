/* Memory of a rank on its device (device_memory.h). */
#ifdef DP_HAVE_CUDA
#include "device_memory.h"
#include "device_arrays.h"
#include "gpu/dp_arrays.h"

#include <pthread.h>
#include <stdlib.h>

#define LARGE (1 << 20) /* entries from which conversions use all cores */

/* ---- memory that is used again --------------------------------------------------------------- */

typedef struct {
    char *at;
    size_t bytes;
    int uses;
} dp_block;
static struct {
    pthread_mutex_t lock;
    dp_block *of;
    int n;
} pool = {.lock = PTHREAD_MUTEX_INITIALIZER};

/* A block of the pool: a free one of so many bytes, or a new one in `at`. */
static void *take(size_t bytes, void *at) {
    dp_block *b = NULL;
    pthread_mutex_lock(&pool.lock);
    for (int i = 0; i < pool.n && !b; i++)
        if (at ? !pool.of[i].at : pool.of[i].at && !pool.of[i].uses && pool.of[i].bytes == bytes)
            b = &pool.of[i];
    if (!b && at) {
        pool.of = dp_realloc(pool.of, sizeof *b * (size_t)(pool.n + 1));
        b = &pool.of[pool.n++];
    }
    if (b) *b = (dp_block){at ? at : b->at, bytes, 1};
    void *x = b ? b->at : NULL;
    pthread_mutex_unlock(&pool.lock);
    return x;
}

/* Gives what nobody uses back to the device. */
static void drain(void) {
    pthread_mutex_lock(&pool.lock);
    for (int i = 0; i < pool.n; i++)
        if (pool.of[i].at && !pool.of[i].uses) {
            cudaFree(pool.of[i].at);
            pool.of[i] = (dp_block){0};
        }
    pthread_mutex_unlock(&pool.lock);
}

cudaError_t dp_pool_get(size_t bytes, void **x) {
    *x = take(bytes, NULL);
    if (*x) return cudaSuccess;
    cudaError_t rc = cudaMalloc(x, bytes);
    if (rc != cudaSuccess) {
        cudaGetLastError();
        drain();
        rc = cudaMalloc(x, bytes);
    }
    if (rc == cudaSuccess) take(bytes, *x);
    return rc;
}

int dp_pool_use(const void *x, int more) {
    int before = 0;
    pthread_mutex_lock(&pool.lock);
    for (int i = 0; i < pool.n && !before; i++) {
        dp_block *b = &pool.of[i];
        if (!b->uses || (const char *)x < b->at || (const char *)x >= b->at + b->bytes) continue;
        before = b->uses;
        b->uses += more;
    }
    pthread_mutex_unlock(&pool.lock);
    return before;
}

/* ---- a rank's -------------------------------------------------------------------------------- */

dp_status dp_device_room(dp_device *d, int64_t n, dpg_dtype t, void **x) {
    const size_t bytes = n ? dp_device_bytes(n, t) : 1;
    if (d->nheld == sizeof d->held / sizeof *d->held)
        return dp_fail(&d->err, DP_EDEVICE, "rank %d: too many arrays on its device", d->rank);
    if (d->there)
        DP_CUDA(d, dp_pool_get(bytes, x));
    else
        DP_CUDA(d, cudaMalloc(x, bytes));
    d->held[d->nheld++] = *x;
    return DP_OK;
}

dp_status dp_device_blank(dp_device *d, int64_t n, dpg_dtype t, void **x) {
    const dp_status st = dp_device_room(d, n, t, x);
    if (!st) DP_CUDA(d, cudaMemset(*x, 0xff, dp_device_bytes(n, t)));
    return st;
}

dp_status dp_device_send(dp_device *d, const double *x, int64_t n, dpg_dtype t, void *to) {
    if (d->there) return dpg_array_narrow(dp_array_real(x), n, t, to, &d->err);
    const size_t bytes = dp_device_bytes(n, t);
    void *host = dp_alloc(bytes, 1);
#pragma omp parallel for if (n > LARGE)
    for (int64_t i = 0; i < n; i++) {
        if (t == DPG_BF16)
            ((uint16_t *)host)[i] = dp_bf16_bits((float)x[i]);
        else
            ((float *)host)[i] = (float)x[i];
    }
    const cudaError_t rc = cudaMemcpy(to, host, bytes, cudaMemcpyHostToDevice);
    free(host);
    DP_CUDA(d, rc);
    return DP_OK;
}

dp_status dp_device_upload(dp_device *d, const double *x, int64_t n, dpg_dtype t,
                           const void **dev) {
    void *to = NULL;
    *dev = NULL;
    if (!x) return DP_OK;
    const dp_status st = dp_device_room(d, n, t, &to);
    *dev = to;
    return st ? st : dp_device_send(d, x, n, t, to);
}

dp_status dp_device_download(dp_device *d, const void *dev, int64_t n, dpg_dtype t, double *to) {
    if (d->there) return dpg_array_widen(dev, n, t, dp_array_real(to), &d->err);
    const size_t bytes = dp_device_bytes(n, t);
    void *host = dp_alloc(bytes, 1);
    const cudaError_t rc = cudaMemcpy(host, dev, bytes, cudaMemcpyDeviceToHost);
#pragma omp parallel for if (n > LARGE)
    for (int64_t i = 0; i < (rc == cudaSuccess ? n : 0); i++)
        to[i] = t == DPG_BF16 ? dp_bf16_from_bits(((uint16_t *)host)[i]) : ((float *)host)[i];
    free(host);
    DP_CUDA(d, rc);
    return DP_OK;
}

void dp_device_close(dp_device *d) {
    if (d->there) cudaDeviceSynchronize(); /* as cudaFree would */
    for (int i = 0; i < d->nheld; i++)
        if (!dp_pool_use(d->held[i], -1)) cudaFree(d->held[i]);
    if (d->stream) cudaStreamDestroy(d->stream);
    d->nheld = 0;
    d->stream = NULL;
}
#endif
