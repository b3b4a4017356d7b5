/* gpu/truth/truth.cu - ref/truth/truth_dd_lanes.inc for one thread a lane: 8 threads hold a column
 * of the state in registers, row k in lane k mod 8. Products are written __dmul_rn, so that the
 * compiler cannot fuse them into additions.
 *
 * Phases of a token, and what shared memory holds (two buffers of q, d, entries of a token):
 *
 *   fetch     the next token's rows on their way to registers         this token's rows
 *   rows      of a group, U_j = strength_j (value_j - read_j D S),    this token's rows
 *             3 shuffles each, then S += write_j U_j
 *   output    o = scale q' S                                          this token's rows
 *   keep      the next token's rows, then a barrier                   both buffers */
#include "dp_truth_gpu.h"
#include "plan/status.cuh"

#define COLUMNS 4 /* of a block of one warp */

struct dd {
    double h, l;
};

static __device__ __forceinline__ dd quick(double a, double b) {
    double s = a + b;
    return {s, b - (s - a)};
}
static __device__ __forceinline__ dd two_sum(double a, double b) {
    double s = a + b, z = s - a;
    return {s, (a - (s - z)) + (b - z)};
}
static __device__ __forceinline__ dd two_prod(double a, double b) {
    double p = __dmul_rn(a, b);
    return {p, __fma_rn(a, b, -p)};
}
static __device__ __forceinline__ dd raw_mul(dd a, dd b) {
    dd p = two_prod(a.h, b.h);
    p.l += __dmul_rn(a.h, b.l) + __dmul_rn(a.l, b.h);
    return p;
}
static __device__ __forceinline__ dd mul(dd a, dd b) {
    dd p = raw_mul(a, b);
    return quick(p.h, p.l);
}
static __device__ __forceinline__ dd fma_dd(dd acc, dd a, dd b) {
    dd p = raw_mul(a, b), s = two_sum(acc.h, p.h);
    return quick(s.h, s.l + (acc.l + p.l));
}
static __device__ __forceinline__ dd dot(dd acc, dd a, dd b) {
    dd p = raw_mul(a, b), s = two_sum(acc.h, p.h);
    return {s.h, acc.l + (s.l + p.l)};
}
/* The sum of the 8 lanes of a column, in all of them: symmetric in its operands, so every lane gets
 * the same bits. */
static __device__ __forceinline__ dd reduce(dd a) {
#pragma unroll
    for (int mask = 4; mask; mask /= 2) {
        double h = __shfl_xor_sync(0xffffffffu, a.h, mask),
               l = __shfl_xor_sync(0xffffffffu, a.l, mask);
        dd s = two_sum(a.h, h);
        a = {s.h, (a.l + l) + s.l};
    }
    return two_sum(a.h, a.l);
}

struct Args {
    int64_t n, W;
    int rows, entries, at_once, before, write[DPG_TRUTH_MAX], read[DPG_TRUTH_MAX];
    double scale;
    const double *q, *k, *d, *strength; /* k [n][entries] rows, strength [n][rows][2] */
    const double *v;                    /* [n][rows][2][W] or NULL */
    double *S;                          /* [W][2][8 NK] */
    double *oh, *ol;                    /* [n][W] or NULL */
};

/* A lane of a column. A token's rows pass through shared memory. The next token's are loaded into
 * registers meanwhile: a warp has an SM to itself and nothing else to hide the latency. Rows and
 * entries <= MAX. */
template <int NK, int MAX> struct Lane {
    static const int K = 8 * NK, ROW = 2 * K, SIZE = (2 + MAX) * ROW, EACH = (SIZE + 31) / 32;
    const Args &a;
    int lane;
    int64_t col;
    bool in;
    dd s[NK];
    double next[EACH];
    dd v_next[MAX] = {}, b_next[MAX] = {};

    __device__ __forceinline__ Lane(const Args &a)
        : a(a), lane(threadIdx.x % 8), col((int64_t)blockIdx.x * COLUMNS + threadIdx.x / 8),
          in(col < a.W) {
#pragma unroll
        for (int x = 0; x < NK; x++)
            s[x] = in ? dd{a.S[place(x)], a.S[place(x) + K]} : dd{0, 0};
    }
    __device__ __forceinline__ int64_t place(int x) const { return col * ROW + 8 * x + lane; }
    __device__ __forceinline__ void store_state() const {
#pragma unroll
        for (int x = 0; x < NK; x++)
            if (in) {
                a.S[place(x)] = s[x].h;
                a.S[place(x) + K] = s[x].l;
            }
    }
    __device__ __forceinline__ void fetch(int64_t i) {
#pragma unroll
        for (int u = 0; u < EACH; u++) {
            int x = threadIdx.x + 32 * u;
            if (x < (2 + a.entries) * ROW)
                next[u] = x < ROW       ? a.q[i * ROW + x]
                          : x < 2 * ROW ? a.d[i * ROW + x - ROW]
                                        : a.k[i * a.entries * ROW + x - 2 * ROW];
        }
#pragma unroll
        for (int j = 0; j < MAX; j++)
            if (j < a.rows) {
                const int64_t at = (i * a.rows + j) * 2;
                if (in && a.v) v_next[j] = {a.v[at * a.W + col], a.v[(at + 1) * a.W + col]};
                b_next[j] = {a.strength[at], a.strength[at + 1]};
            }
    }
    __device__ __forceinline__ void keep(double *rows) const {
#pragma unroll
        for (int u = 0; u < EACH; u++)
            if (threadIdx.x + 32 * u < (unsigned)((2 + a.entries) * ROW))
                rows[threadIdx.x + 32 * u] = next[u];
        __syncthreads();
    }
    __device__ __forceinline__ void decay(const double *d) {
#pragma unroll
        for (int x = 0; x < NK; x++)
            s[x] = mul({d[8 * x], d[K + 8 * x]}, s[x]);
    }
    __device__ __forceinline__ dd read(const double *k) const {
        dd acc = {0, 0};
#pragma unroll
        for (int x = 0; x < NK; x++)
            acc = dot(acc, {k[8 * x], k[K + 8 * x]}, s[x]);
        return reduce(acc);
    }
    __device__ __forceinline__ void write(const double *k, dd U) {
#pragma unroll
        for (int x = 0; x < NK; x++)
            s[x] = fma_dd(s[x], {k[8 * x], k[K + 8 * x]}, U);
    }
    /* A token's rows, group by group: it reads, then it writes. The state decays first, or
     * (`before`) after the first group has read. d, k: the lane's numbers. */
    __device__ __forceinline__ void all_rows(const double *d, const double *k, const dd *v,
                                             const dd *b) {
        dd U[MAX] = {};
        if (!a.before) decay(d);
#pragma unroll
        for (int j = 0; j < MAX; j++) {
            if (j >= a.rows) break;
            dd D = {0, 0};
            if (a.read[j] >= 0) D = read(k + a.read[j] * ROW);
            dd e = two_sum(v[j].h, -D.h);
            U[j] = mul(quick(e.h, e.l + (v[j].l - D.l)), b[j]);
            if ((j + 1) % a.at_once) continue;
            if (a.before && j < a.at_once) decay(d);
#pragma unroll
            for (int i = 0; i <= j; i++)
                if (i > j - a.at_once) write(k + a.write[i] * ROW, U[i]);
        }
    }
    __device__ __forceinline__ void output(const double *q, int64_t i) {
        dd o = read(q), p = two_prod(o.h, a.scale);
        o = quick(p.h, p.l + __dmul_rn(o.l, a.scale));
        if (a.oh && in && lane == 0) {
            a.oh[i * a.W + col] = o.h;
            a.ol[i * a.W + col] = o.l;
        }
    }
    __device__ __forceinline__ void token(int64_t i, const double *rows) {
        const double *q = rows + lane, *d = q + ROW, *k = d + ROW;
        dd v[MAX], b[MAX];
#pragma unroll
        for (int j = 0; j < MAX; j++) {
            v[j] = v_next[j];
            b[j] = b_next[j];
        }
        if (i + 1 < a.n) fetch(i + 1);
        all_rows(d, k, v, b);
        output(q, i);
    }
};

template <int NK, int MAX>
__global__ void __launch_bounds__(32) truth_forward(const __grid_constant__ Args a) {
    typedef Lane<NK, MAX> Own;
    __shared__ double rows[2][Own::SIZE];
    Own own(a);
    own.fetch(0);
    own.keep(rows[0]);
    for (int64_t i = 0; i < a.n; i++) {
        own.token(i, rows[i & 1]);
        own.keep(rows[(i + 1) & 1]);
    }
    own.store_state();
}

struct dpg_truth {
    int64_t Kp, rows, entries, W, len;
    cudaStream_t stream;
    double *q, *k, *d, *strength, *v, *S, *oh, *ol;
};

static dp_status allocate(dpg_truth *t, dp_err *e) {
    struct {
        double **at;
        int64_t n;
    } a[] = {{&t->q, t->len * 2 * t->Kp},
             {&t->k, t->len * t->entries * 2 * t->Kp},
             {&t->d, t->len * 2 * t->Kp},
             {&t->strength, t->len * t->rows * 2},
             {&t->v, t->len * t->rows * 2 * t->W},
             {&t->S, t->W * 2 * t->Kp},
             {&t->oh, t->len * t->W},
             {&t->ol, t->len * t->W}};
    CK(e, cudaStreamCreate(&t->stream));
    for (auto &x : a)
        CK(e, cudaMalloc(x.at, (size_t)x.n * sizeof(double)));
    CK(e, cudaMemset(t->v, 0, (size_t)(t->len * t->rows * 2 * t->W) * sizeof(double)));
    return DP_OK;
}

extern "C" int dpg_truth_takes(int64_t Kp, int rows, int entries) {
    return Kp % 8 == 0 && ((Kp >= 8 && Kp <= 32) || Kp == 64 || Kp == 128) &&
           rows <= DPG_TRUTH_MAX && entries <= DPG_TRUTH_MAX;
}

extern "C" dp_status dpg_truth_open(dpg_truth **out, int64_t Kp, int rows, int entries, int64_t W,
                                    int64_t len, dp_err *e) {
    if (!dpg_truth_takes(Kp, rows, entries))
        return dpg_fail(e, DP_EINPUT,
                        "the truth on a device has no kernel for K = %d, %d rows, %d entries",
                        (int)Kp, rows, entries);
    dpg_truth *t = (dpg_truth *)calloc(1, sizeof *t);
    t->Kp = Kp;
    t->rows = rows;
    t->entries = entries;
    t->W = W;
    t->len = len;
    dp_status st = allocate(t, e);
    if (st != DP_OK) {
        dpg_truth_close(t);
        t = NULL;
    }
    *out = t;
    return st;
}

extern "C" void dpg_truth_close(dpg_truth *t) {
    if (!t) return;
    double *x[] = {t->q, t->k, t->d, t->strength, t->v, t->S, t->oh, t->ol};
    for (double *p : x)
        cudaFree(p);
    cudaStreamDestroy(t->stream);
    free(t);
}

extern "C" dp_status dpg_truth_set(dpg_truth *t, const double *S, dp_err *e) {
    CK(e, cudaMemcpy(t->S, S, (size_t)(t->W * 2 * t->Kp) * sizeof(double), cudaMemcpyHostToDevice));
    return DP_OK;
}

extern "C" dp_status dpg_truth_get(dpg_truth *t, double *S, dp_err *e) {
    CK(e, cudaMemcpy(S, t->S, (size_t)(t->W * 2 * t->Kp) * sizeof(double), cudaMemcpyDeviceToHost));
    return DP_OK;
}

template <int NK> static void launch_width(const dpg_truth *t, const Args &a) {
    const unsigned blocks = (unsigned)((t->W + COLUMNS - 1) / COLUMNS);
    if (t->rows == 1 && t->entries == 1)
        truth_forward<NK, 1><<<blocks, 32, 0, t->stream>>>(a);
    else
        truth_forward<NK, DPG_TRUTH_MAX><<<blocks, 32, 0, t->stream>>>(a);
}

static void launch(const dpg_truth *t, const Args &a) {
    switch (t->Kp / 8) {
    case 1: launch_width<1>(t, a); break;
    case 2: launch_width<2>(t, a); break;
    case 3: launch_width<3>(t, a); break;
    case 4: launch_width<4>(t, a); break;
    case 8: launch_width<8>(t, a); break;
    case 16: launch_width<16>(t, a); break;
    }
}

/* n rows of `width` doubles, ld apart, to rows that are step apart. NULL: they stay zeros. */
static cudaError_t copy_rows(const dpg_truth *t, double *to, int64_t step, const double *from,
                             int64_t ld, int64_t width, int64_t n) {
    const size_t D = sizeof(double);
    if (!from) return cudaSuccess;
    return cudaMemcpy2DAsync(to, (size_t)step * D, from, (size_t)ld * D, (size_t)width * D,
                             (size_t)n, cudaMemcpyHostToDevice, t->stream);
}

extern "C" dp_status dpg_truth_forward(dpg_truth *t, const tr_dd_rows *b, const tr_dd_cols *c,
                                       dp_err *e) {
    const size_t D = sizeof(double), W = (size_t)t->W, n = (size_t)b->n;
    const int64_t row = 2 * t->Kp, wide = t->rows * 2 * t->W;
    Args a = {b->n,
              t->W,
              b->rows,
              b->entries,
              b->at_once,
              b->before,
              {},
              {},
              c->scale,
              t->q,
              t->k,
              t->d,
              t->strength,
              c->oh ? t->v : NULL,
              t->S,
              c->oh ? t->oh : NULL,
              c->oh ? t->ol : NULL};
    CK(e, copy_rows(t, t->q, row, b->q, row, row, b->n));
    CK(e, copy_rows(t, t->d, row, b->d, row, row, b->n));
    CK(e, copy_rows(t, t->strength, t->rows * 2, b->strength, t->rows * 2, t->rows * 2, b->n));
    for (int i = 0; i < b->entries; i++)
        CK(e, copy_rows(t, t->k + i * row, t->entries * row, b->entry[i], b->ld, row, b->n));
    for (int j = 0; j < b->rows; j++) {
        const tr_dd_value *v = &c->value[j];
        double *to = t->v + j * 2 * t->W;
        a.write[j] = b->write[j];
        a.read[j] = b->read[j];
        if (!c->oh) continue;
        CK(e, copy_rows(t, to, wide, v->h, v->ld, t->W, b->n));
        CK(e, copy_rows(t, to + t->W, wide, v->l, v->ld, t->W, b->n));
    }
    launch(t, a);
    CK_LAUNCH(e, "truth_forward");
    if (c->oh) {
        CK(e, cudaMemcpy2DAsync(c->oh, (size_t)c->ldo * D, t->oh, W * D, W * D, n,
                                cudaMemcpyDeviceToHost, t->stream));
        CK(e, cudaMemcpy2DAsync(c->ol, (size_t)c->ldo * D, t->ol, W * D, W * D, n,
                                cudaMemcpyDeviceToHost, t->stream));
    }
    CK(e, cudaStreamSynchronize(t->stream));
    return DP_OK;
}
