/* gpu/truth/truth.cu - ref/truth/truth_dd_lanes.inc for one thread a lane: 8 threads hold a column
 * of the state in registers, row k in lane k mod 8. Products are written __dmul_rn, so that the
 * compiler cannot fuse them into additions.
 *
 * Phases of a token, and what shared memory holds (two buffers of a token's rows q, d, k):
 *
 *   fetch     the next token's rows on their way to registers     this token's rows
 *   keys      U_j = beta_j (v_j - k_j' D S), 3 shuffles each      this token's rows
 *   output    S += k_j U_j, o = scale q' S                        this token's rows
 *   keep      the next token's rows, then a barrier               both buffers */
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
    int R;
    double scale;
    const double *q, *k, *d, *beta;
    const double *v; /* [n][R][W] or NULL */
    double *S;       /* [W][2][8 NK] */
    double *oh, *ol; /* [n][W] or NULL */
};

/* A lane of a column. A token's rows pass through shared memory. The next token's are loaded into
 * registers meanwhile: a warp has an SM to itself and nothing else to hide the latency. R <=
 * MAX_R. */
template <int NK, int MAX_R> struct Lane {
    static const int K = 8 * NK, ROW = 2 * K, SIZE = (2 + MAX_R) * ROW, EACH = (SIZE + 31) / 32;
    const Args &a;
    int lane;
    int64_t col;
    bool in;
    dd s[NK];
    double next[EACH], v_next[MAX_R] = {};
    dd b_next[MAX_R] = {};

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
            if (x < (2 + a.R) * ROW)
                next[u] = x < ROW       ? a.q[i * ROW + x]
                          : x < 2 * ROW ? a.d[i * ROW + x - ROW]
                                        : a.k[i * a.R * ROW + x - 2 * ROW];
        }
#pragma unroll
        for (int j = 0; j < MAX_R; j++)
            if (j < a.R) {
                v_next[j] = in && a.v ? a.v[(i * a.R + j) * a.W + col] : 0.;
                b_next[j] = {a.beta[(i * a.R + j) * 2], a.beta[(i * a.R + j) * 2 + 1]};
            }
    }
    __device__ __forceinline__ void keep(double *rows) const {
#pragma unroll
        for (int u = 0; u < EACH; u++)
            if (threadIdx.x + 32 * u < (unsigned)((2 + a.R) * ROW))
                rows[threadIdx.x + 32 * u] = next[u];
        __syncthreads();
    }
    /* The state decays; U_j, which key j writes. d, k: the lane's entries of the rows. */
    __device__ __forceinline__ void keys(const double *d, const double *k, const double *v,
                                         const dd *b, dd *U) {
#pragma unroll
        for (int j = 0; j < MAX_R; j++) {
            if (j >= a.R) break;
            dd acc = {0, 0};
#pragma unroll
            for (int x = 0; x < NK; x++) {
                if (j == 0) s[x] = mul({d[8 * x], d[K + 8 * x]}, s[x]);
                acc = dot(acc, {k[j * ROW + 8 * x], k[j * ROW + K + 8 * x]}, s[x]);
            }
            dd D = reduce(acc), e = two_sum(v[j], -D.h);
            U[j] = mul(quick(e.h, e.l - D.l), b[j]);
        }
    }
    __device__ __forceinline__ void output(const double *q, const double *k, const dd *U,
                                           int64_t i) {
        dd acc = {0, 0};
#pragma unroll
        for (int x = 0; x < NK; x++) {
#pragma unroll
            for (int j = 0; j < MAX_R; j++)
                if (j < a.R)
                    s[x] = fma_dd(s[x], {k[j * ROW + 8 * x], k[j * ROW + K + 8 * x]}, U[j]);
            acc = dot(acc, {q[8 * x], q[K + 8 * x]}, s[x]);
        }
        dd o = reduce(acc), p = two_prod(o.h, a.scale);
        o = quick(p.h, p.l + __dmul_rn(o.l, a.scale));
        if (a.oh && in && lane == 0) {
            a.oh[i * a.W + col] = o.h;
            a.ol[i * a.W + col] = o.l;
        }
    }
    __device__ __forceinline__ void token(int64_t i, const double *rows) {
        const double *q = rows + lane, *d = q + ROW, *k = d + ROW;
        double v[MAX_R];
        dd b[MAX_R], U[MAX_R] = {};
#pragma unroll
        for (int j = 0; j < MAX_R; j++) {
            v[j] = v_next[j];
            b[j] = b_next[j];
        }
        if (i + 1 < a.n) fetch(i + 1);
        keys(d, k, v, b, U);
        output(q, k, U, i);
    }
};

template <int NK, int MAX_R>
__global__ void __launch_bounds__(32) truth_forward(const __grid_constant__ Args a) {
    typedef Lane<NK, MAX_R> Own;
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
    int64_t Kp, R, W, len;
    cudaStream_t stream;
    double *q, *k, *d, *beta, *v, *S, *oh, *ol;
};

static dp_status allocate(dpg_truth *t, dp_err *e) {
    struct {
        double **at;
        int64_t n;
    } a[] = {{&t->q, t->len * 2 * t->Kp},   {&t->k, t->len * t->R * 2 * t->Kp},
             {&t->d, t->len * 2 * t->Kp},   {&t->beta, t->len * t->R * 2},
             {&t->v, t->len * t->R * t->W}, {&t->S, t->W * 2 * t->Kp},
             {&t->oh, t->len * t->W},       {&t->ol, t->len * t->W}};
    CK(e, cudaStreamCreate(&t->stream));
    for (auto &x : a)
        CK(e, cudaMalloc(x.at, (size_t)x.n * sizeof(double)));
    return DP_OK;
}

extern "C" int dpg_truth_takes(int64_t Kp, int64_t R) {
    return Kp % 8 == 0 && ((Kp >= 8 && Kp <= 32) || Kp == 64 || Kp == 128) && R <= DPG_TRUTH_MAX_R;
}

extern "C" dp_status dpg_truth_open(dpg_truth **out, int64_t Kp, int64_t R, int64_t W, int64_t len,
                                    dp_err *e) {
    if (!dpg_truth_takes(Kp, R))
        return dpg_fail(e, DP_EINPUT, "the truth on a device has no kernel for K = %d, R = %d",
                        (int)Kp, (int)R);
    dpg_truth *t = (dpg_truth *)calloc(1, sizeof *t);
    t->Kp = Kp;
    t->R = R;
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
    double *x[] = {t->q, t->k, t->d, t->beta, t->v, t->S, t->oh, t->ol};
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
    if (t->R == 1)
        truth_forward<NK, 1><<<blocks, 32, 0, t->stream>>>(a);
    else
        truth_forward<NK, DPG_TRUTH_MAX_R><<<blocks, 32, 0, t->stream>>>(a);
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

extern "C" dp_status dpg_truth_forward(dpg_truth *t, const tr_dd_rows *b, const tr_dd_cols *c,
                                       dp_err *e) {
    const size_t D = sizeof(double), row = (size_t)(2 * t->Kp) * D, n = (size_t)b->n,
                 R = (size_t)t->R, W = (size_t)t->W;
    CK(e, cudaMemcpyAsync(t->q, b->q, n * row, cudaMemcpyHostToDevice, t->stream));
    CK(e, cudaMemcpyAsync(t->k, b->k, n * R * row, cudaMemcpyHostToDevice, t->stream));
    CK(e, cudaMemcpyAsync(t->d, b->d, n * row, cudaMemcpyHostToDevice, t->stream));
    CK(e, cudaMemcpyAsync(t->beta, b->beta, n * R * 2 * D, cudaMemcpyHostToDevice, t->stream));
    if (c->v) /* rows of one token lie together: keys are V apart, and V = W */
        CK(e, cudaMemcpy2DAsync(t->v, R * W * D, c->v, (size_t)c->ldv * D, R * W * D, n,
                                cudaMemcpyHostToDevice, t->stream));
    launch(t, {b->n, t->W, (int)t->R, c->scale, t->q, t->k, t->d, t->beta, c->v ? t->v : NULL, t->S,
               c->oh ? t->oh : NULL, c->oh ? t->ol : NULL});
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
