/* gpu/tests/test_gpu_conv.cu - the convolution on the device against ref/conv and its rigorous
 * bounds, entry by entry.
 *
 *   [small]   random layouts, W 2 .. 8, silu or none, bias or none, bf16 and fp32, three parts of
 *             different widths, every rank count that divides T; y and dx the same bits for any
 *             number of ranks, parts together as one by one, 20 runs bitwise equal; no leak between
 *             sequences; the sigmoid on every float. small: few, for compute-sanitizer
 *   nccl N    N devices: the same bits as N ranks on one
 *
 * Exit status 0, 1, or 2 (no device). */
#include "../conv/sigmoid.cuh"
#include "../dp_conv.h"
#include "ref/chunk/conv.h"
#include "ref/inputs/inputs.h"
#include <cuda_bf16.h>
#include <cuda_runtime.h>
#include <float.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <string>
#include <thread>
#include <vector>

static int failures, checks;
#define CUDA(x)                                                                                 \
    do {                                                                                        \
        cudaError_t e_ = (x);                                                                   \
        if (e_ != cudaSuccess) {                                                                \
            fprintf(stderr, "%s:%d: %s: %s\n", __FILE__, __LINE__, #x, cudaGetErrorString(e_)); \
            exit(2);                                                                            \
        }                                                                                       \
    } while (0)
#define CHECK(cond, ...)             \
    do {                             \
        checks++;                    \
        if (!(cond)) {               \
            if (failures++ < 40) {   \
                printf("FAIL ");     \
                printf(__VA_ARGS__); \
                printf("\n");        \
            }                        \
        }                            \
    } while (0)

typedef std::vector<double> Vec;
struct Conv {
    dp_conv c;
    Vec x, w, bias, dy;
}; /* c points into the vectors */
struct Shape {
    int64_t T;
    int W, silu, bias;
    std::vector<int64_t> cu;
    std::vector<int> D;
    dpg_dtype dtype;
};
struct Out {
    Vec y, dx, dw, dbias;
};

static double value(dp_rng *g, dpg_dtype t, double scale) {
    double x = scale * dp_rng_normal(g);
    return t == DPG_BF16 ? dp_bf16d(x) : (double)(float)x;
}

static std::vector<Conv> make(const Shape &s, uint64_t seed) {
    std::vector<Conv> v(s.D.size());
    dp_rng g;
    dp_rng_seed(&g, seed, 0);
    for (size_t i = 0; i < v.size(); i++) {
        Conv &k = v[i];
        int D = s.D[i];
        k.x.resize(s.T * D);
        k.dy.resize(s.T * D);
        k.w.resize((size_t)D * s.W);
        for (double &x : k.x)
            x = value(&g, s.dtype, 1);
        for (double &x : k.dy)
            x = value(&g, s.dtype, 1);
        for (double &x : k.w)
            x = value(&g, DPG_F32, 0.7);
        if (s.bias) k.bias.resize(D);
        for (double &x : k.bias)
            x = value(&g, DPG_F32, 0.5);
        k.c = dp_conv{s.T,
                      D,
                      s.W,
                      (int)s.cu.size() - 1,
                      s.silu,
                      (int64_t *)s.cu.data(),
                      k.x.data(),
                      k.w.data(),
                      s.bias ? k.bias.data() : NULL,
                      k.dy.data()};
    }
    return v;
}

static void *up(const double *x, int64_t n, dpg_dtype t) {
    std::vector<char> h(n * (t == DPG_BF16 ? 2 : 4));
    for (int64_t i = 0; i < n; i++)
        if (t == DPG_BF16)
            ((uint16_t *)h.data())[i] = dp_bf16_bits((float)x[i]);
        else
            ((float *)h.data())[i] = (float)x[i];
    void *d;
    CUDA(cudaMalloc(&d, h.size()));
    CUDA(cudaMemcpy(d, h.data(), h.size(), cudaMemcpyHostToDevice));
    return d;
}
static void *room(int64_t n, dpg_dtype t) {
    void *d;
    CUDA(cudaMalloc(&d, n * (t == DPG_BF16 ? 2 : 4)));
    CUDA(cudaMemset(d, 0xff, n * (t == DPG_BF16 ? 2 : 4)));
    return d;
}
static void down(const void *d, int64_t n, dpg_dtype t, double *x) {
    std::vector<char> h(n * (t == DPG_BF16 ? 2 : 4));
    CUDA(cudaMemcpy(h.data(), d, h.size(), cudaMemcpyDeviceToHost));
    for (int64_t i = 0; i < n; i++)
        x[i] =
            t == DPG_BF16 ? dp_bf16_from_bits(((uint16_t *)h.data())[i]) : ((float *)h.data())[i];
}

static void rank_run(const Shape &s, const std::vector<Conv> &v, int rank, int N, dpg_comm *comm,
                     std::vector<Out> *out, dp_status *st, dp_err *e) {
    dpg_conv_problem p = {s.T,         s.W,    s.silu, (int)v.size(), {0}, (int)s.cu.size() - 1,
                          s.cu.data(), s.dtype};
    dpg_conv_tensors t[DPG_CONV_PARTS] = {};
    dpg_conv *plan;
    cudaStream_t stream;
    std::vector<void *> mem;
    int64_t L = s.T / N;
    for (size_t i = 0; i < v.size(); i++)
        p.D[i] = s.D[i];
    if (comm) CUDA(cudaSetDevice(comm->device));
    CUDA(cudaStreamCreate(&stream));
    if ((*st = dpg_conv_create(&plan, &p, rank, N, e)) != DP_OK) return;
    for (size_t i = 0; i < v.size(); i++) {
        int64_t n = L * s.D[i], at = rank * n;
        t[i].x = up(v[i].x.data() + at, n, s.dtype);
        t[i].dy = up(v[i].dy.data() + at, n, s.dtype);
        t[i].w = (float *)up(v[i].w.data(), v[i].w.size(), DPG_F32);
        t[i].bias = s.bias ? (float *)up(v[i].bias.data(), s.D[i], DPG_F32) : NULL;
        t[i].y = room(n, s.dtype);
        t[i].dx = room(n, s.dtype);
        t[i].dw = (float *)room(v[i].w.size(), DPG_F32);
        t[i].dbias = (float *)room(s.D[i], DPG_F32);
        for (const void *m :
             {t[i].x, t[i].dy, (const void *)t[i].w, (const void *)t[i].bias, (const void *)t[i].y,
              (const void *)t[i].dx, (const void *)t[i].dw, (const void *)t[i].dbias})
            mem.push_back((void *)m);
    }
    size_t bytes = dpg_conv_workspace_bytes(plan);
    void *ws = room(bytes / 4, DPG_F32);
    mem.push_back(ws);
    CUDA(cudaDeviceSynchronize());
    *st = dpg_conv_forward(plan, t, ws, comm, stream, e);
    if (*st == DP_OK) *st = dpg_conv_backward(plan, t, ws, comm, stream, e);
    if (*st == DP_OK && comm) *st = comm->wait(comm, stream, e);
    if (*st != DP_OK && comm) comm->abort(comm, e->msg);
    CUDA(cudaStreamSynchronize(stream));
    for (size_t i = 0; i < v.size() && *st == DP_OK; i++) {
        int64_t n = L * s.D[i], at = rank * n;
        Out &o = (*out)[i];
        down(t[i].y, n, s.dtype, o.y.data() + at);
        down(t[i].dx, n, s.dtype, o.dx.data() + at);
        Vec dw(v[i].w.size()), db(s.D[i]);
        down(t[i].dw, dw.size(), DPG_F32, dw.data());
        down(t[i].dbias, db.size(), DPG_F32, db.data());
        if (rank == 0) {
            o.dw = dw;
            o.dbias = db;
        }
    }
    for (void *m : mem)
        cudaFree(m);
    cudaStreamDestroy(stream);
    dpg_conv_destroy(plan);
}

static std::vector<Out> run(const Shape &s, const std::vector<Conv> &v, int N, int nccl = 0) {
    std::vector<Out> out(v.size());
    std::vector<dp_status> st(N, DP_OK);
    std::vector<dp_err> e(N);
    std::vector<dpg_comm> comm(N);
    std::vector<std::thread> th;
    std::vector<int> dev(N);
    for (int i = 0; i < N; i++)
        dev[i] = i;
    for (size_t i = 0; i < v.size(); i++) {
        out[i].y.assign(s.T * s.D[i], NAN);
        out[i].dx = out[i].y;
    }
    dp_err ce = {DP_OK, ""};
    if (N > 1 && (nccl ? dpg_comm_nccl(comm.data(), N, dev.data(), 20, &ce)
                       : dpg_comm_shared(comm.data(), N, 0, 20, &ce)) != DP_OK) {
        CHECK(false, "%s", ce.msg);
        return out;
    }
    for (int r = 0; r < N; r++) {
        e[r].code = DP_OK;
        th.emplace_back(rank_run, std::cref(s), std::cref(v), r, N,
                        N > 1 ? &comm[r] : (dpg_comm *)NULL, &out, &st[r], &e[r]);
    }
    for (std::thread &x : th)
        x.join();
    for (int r = 0; r < N; r++)
        CHECK(st[r] == DP_OK, "rank %d of %d: %s", r, N, e[r].msg);
    for (int r = 0; r < N && N > 1; r++)
        comm[r].destroy(&comm[r]);
    return out;
}

static double worst[4]; /* error / bound: y dx dw dbias */
static const char *const tensor[4] = {"y", "dx", "dw", "dbias"};

static void within(const std::string &what, const Shape &s, const std::vector<Conv> &v,
                   const std::vector<Out> &o, int N) {
    for (size_t i = 0; i < v.size(); i++) {
        dp_conv_result ref, b1, b;
        dp_conv_result_alloc(&ref, &v[i].c);
        dp_conv_result_alloc(&b1, &v[i].c);
        dp_conv_result_alloc(&b, &v[i].c);
        dp_conv_run(&v[i].c, &ref);
        dp_conv_bound(&v[i].c, DP_CONV_FP64, 1, &b1);
        dp_conv_bound_sigmoid32(&v[i].c, s.dtype == DPG_BF16 ? DP_CONV_BF16 : DP_CONV_FP32, N, &b);
        const struct {
            const Vec &got;
            const double *want, *e1, *e;
        } x[4] = {{o[i].y, ref.y, b1.y, b.y},
                  {o[i].dx, ref.dx, b1.dx, b.dx},
                  {o[i].dw, ref.dw, b1.dw, b.dw},
                  {o[i].dbias, ref.dbias, b1.dbias, b.dbias}};
        for (int k = 0; k < (s.bias ? 4 : 3); k++)
            for (size_t j = 0; j < x[k].got.size(); j++) {
                double err = fabs(x[k].got[j] - x[k].want[j]), lim = x[k].e[j] + x[k].e1[j];
                worst[k] = fmax(worst[k], lim > 0 ? err / lim : err > 0 ? INFINITY : 0);
                CHECK(err <= lim,
                      "%s N %d part %zu: %s[%zu] = %.9g, want %.9g, error %.3g, bound %.3g",
                      what.c_str(), N, i, tensor[k], j, x[k].got[j], x[k].want[j], err, lim);
            }
        dp_conv_result_free(&ref);
        dp_conv_result_free(&b1);
        dp_conv_result_free(&b);
    }
}

static bool same(const Vec &a, const Vec &b) {
    return a.size() == b.size() && !memcmp(a.data(), b.data(), a.size() * sizeof(double));
}

static std::string text(const Shape &s) {
    char b[200];
    int n = snprintf(b, sizeof b, "T %lld W %d silu %d bias %d %s D", (long long)s.T, s.W, s.silu,
                     s.bias, s.dtype == DPG_BF16 ? "bf16" : "fp32");
    for (int d : s.D)
        n += snprintf(b + n, sizeof b - n, " %d", d);
    n += snprintf(b + n, sizeof b - n, " cu");
    for (int64_t t : s.cu)
        if (n < 190) n += snprintf(b + n, sizeof b - n, " %lld", (long long)t);
    return b;
}

static void test_shape(const Shape &s, uint64_t seed, int most_ranks) {
    std::vector<Conv> v = make(s, seed);
    std::vector<Out> one = run(s, v, 1);
    within(text(s), s, v, one, 1);
    for (int N = 2; N <= most_ranks && N <= s.T; N++) {
        if (s.T % N) continue;
        std::vector<Out> many = run(s, v, N);
        within(text(s), s, v, many, N);
        for (size_t i = 0; i < v.size(); i++)
            CHECK(same(one[i].y, many[i].y) && same(one[i].dx, many[i].dx),
                  "%s: y or dx of part %zu depends on the split in %d ranks", text(s).c_str(), i,
                  N);
    }
}

static void test_layouts(bool small) {
    dp_rng g;
    dp_rng_seed(&g, 5, 0);
    auto pick = [&](int64_t n) { return (int64_t)(dp_rng_uniform(&g) * (double)n); };
    for (int k = 0; k < (small ? 6 : 60); k++) {
        Shape s;
        const int64_t Ts[] = {24, 48, 120, 130, 192, 360};
        s.T = small ? 24 : Ts[k % 6];
        s.W = 2 + k % 7;
        s.silu = k / 2 % 2;
        s.bias = k / 3 % 2;
        s.dtype = k / 4 % 2 ? DPG_F32 : DPG_BF16;
        s.D = k % 3 == 0   ? std::vector<int>{16}
              : k % 3 == 1 ? std::vector<int>{8, 4, 132}
                           : std::vector<int>{5, 3, 7};
        int n = 1 + (int)pick(6);
        s.cu.assign(n + 1, 0);
        for (int i = 1; i <= n; i++)
            s.cu[i] = i == n ? s.T : s.cu[i - 1] + pick(s.T + 1 - s.cu[i - 1]);
        test_shape(s, 100 + k, small ? 12 : 24);
    }
    if (small) return;
    /* several blocks of strips, boundaries of strips and blocks */
    for (dpg_dtype t : {DPG_BF16, DPG_F32})
        test_shape(Shape{4160,
                         4,
                         1,
                         1,
                         {0, 63, 64, 65, 512, 515, 1024, 2047, 2049, 4160},
                         {128, 128, 256},
                         t},
                   7, 8);
    /* one token a rank: a halo from seven */
    test_shape(Shape{130, 8, 1, 0, {0, 64, 130}, {4}, DPG_F32}, 8, 130);
    printf("error / bound at most: y %.3f  dx %.3f  dw %.3f  dbias %.3f\n", worst[0], worst[1],
           worst[2], worst[3]);
}

static void test_equalities() {
    Shape s = {2048, 4, 1, 1, {0, 700, 701, 2048}, {128, 64, 256}, DPG_BF16};
    std::vector<Conv> v = make(s, 9);
    std::vector<Out> all = run(s, v, 4);
    for (int k = 0; k < 20; k++) {
        std::vector<Out> again = run(s, v, 4);
        for (size_t i = 0; i < v.size(); i++)
            CHECK(same(all[i].y, again[i].y) && same(all[i].dx, again[i].dx) &&
                      same(all[i].dw, again[i].dw) && same(all[i].dbias, again[i].dbias),
                  "run %d differs in part %zu", k, i);
    }
    for (size_t i = 0; i < v.size(); i++) {
        Shape one = s;
        one.D = {s.D[i]};
        std::vector<Out> alone = run(one, std::vector<Conv>{v[i]}, 4);
        CHECK(same(all[i].y, alone[0].y) && same(all[i].dx, alone[0].dx) &&
                  same(all[i].dw, alone[0].dw) && same(all[i].dbias, alone[0].dbias),
              "part %zu alone differs", i);
    }
    for (int q = 0; q < 3; q++) { /* NaN everywhere else: a sequence keeps its bits */
        std::vector<Conv> w = make(s, 9);
        for (size_t i = 0; i < w.size(); i++)
            for (int64_t j = 0; j < s.T * s.D[i]; j++)
                if (j / s.D[i] < s.cu[q] || j / s.D[i] >= s.cu[q + 1]) w[i].x[j] = w[i].dy[j] = NAN;
        std::vector<Out> o = run(s, w, 4);
        for (size_t i = 0; i < w.size(); i++) {
            size_t from = s.cu[q] * s.D[i], n = (s.cu[q + 1] - s.cu[q]) * s.D[i] * sizeof(double);
            CHECK(!memcmp(&all[i].y[from], &o[i].y[from], n) &&
                      !memcmp(&all[i].dx[from], &o[i].dx[from], n),
                  "sequence %d, part %zu reads another", q, i);
        }
    }
}

__global__ void k_sigmoid(double *rel, double *low) {
    double r = 0, a = 0;
    for (uint64_t i = blockIdx.x * (uint64_t)blockDim.x + threadIdx.x; i < (uint64_t)1 << 32;
         i += (uint64_t)gridDim.x * blockDim.x) {
        float p = __uint_as_float((uint32_t)i);
        if (!isfinite(p)) continue;
        double s = 1 / (1 + exp(-(double)p)), err = fabs((double)sigmoid_f32(p) - s);
        if (s >= FLT_MIN)
            r = fmax(r, err / s);
        else
            a = fmax(a, err);
    }
    for (int m = 16; m; m /= 2) {
        r = fmax(r, __shfl_xor_sync(~0u, r, m));
        a = fmax(a, __shfl_xor_sync(~0u, a, m));
    }
    if (threadIdx.x % 32 == 0) {
        atomicMax((unsigned long long *)rel, (unsigned long long)__double_as_longlong(r));
        atomicMax((unsigned long long *)low, (unsigned long long)__double_as_longlong(a));
    }
}

static void test_sigmoid() {
    double *d, h[2];
    CUDA(cudaMalloc(&d, 16));
    CUDA(cudaMemset(d, 0, 16));
    k_sigmoid<<<2048, 256>>>(d, d + 1);
    CUDA(cudaMemcpy(h, d, 16, cudaMemcpyDeviceToHost));
    CUDA(cudaFree(d));
    printf(
        "sigmoid on every finite float: at most %.3f x 2^-24 relative, below 2^-126 at most %.3g\n",
        h[0] * 0x1p24, h[1]);
    CHECK(h[0] <= 4 * 0x1p-24 && h[1] <= FLT_MIN && h[0] > 0,
          "the bound's assumption about the sigmoid fails");
}

static void test_refusals() {
    const int64_t cu[] = {0, 24}, bad_cu[] = {0, 25};
    const struct {
        dpg_conv_problem p;
        int rank, N;
        const char *says;
    } bad[] = {{{24, 1, 0, 1, {4}, 1, cu, DPG_F32}, 0, 1, "W = 1"},
               {{24, 9, 0, 1, {4}, 1, cu, DPG_F32}, 0, 1, "W = 9"},
               {{24, 4, 0, 1, {0}, 1, cu, DPG_F32}, 0, 1, "D[0] = 0"},
               {{24, 4, 0, 5, {4, 4, 4, 4}, 1, cu, DPG_F32}, 0, 1, "5 parts"},
               {{24, 4, 0, 1, {4}, 1, cu, DPG_F32}, 0, 5, "not a multiple of 5"},
               {{24, 4, 0, 1, {4}, 1, bad_cu, DPG_F32}, 0, 1, "cu"}};
    for (auto &b : bad) {
        dpg_conv *c;
        dp_err e = {DP_OK, ""};
        CHECK(dpg_conv_create(&c, &b.p, b.rank, b.N, &e) == DP_EINPUT && strstr(e.msg, b.says),
              "'%s' should say '%s'", e.msg, b.says);
    }
}

int main(int argc, char **argv) {
    std::string mode = argc > 1 ? argv[1] : "all";
    int n = 0;
    if (cudaGetDeviceCount(&n) != cudaSuccess || !n) {
        fprintf(stderr, "test_gpu_conv: no CUDA device\n");
        return 2;
    }
    if (mode == "nccl") {
        int N = argc > 2 ? atoi(argv[2]) : n;
        Shape s = {2048, 4, 1, 1, {0, 700, 701, 2048}, {128, 64, 256}, DPG_BF16};
        std::vector<Conv> v = make(s, 9);
        std::vector<Out> a = run(s, v, N), b = run(s, v, N, 1);
        for (size_t i = 0; i < v.size(); i++)
            CHECK(same(a[i].y, b[i].y) && same(a[i].dx, b[i].dx) && same(a[i].dw, b[i].dw) &&
                      same(a[i].dbias, b[i].dbias),
                  "NCCL differs from ranks on one device in part %zu", i);
    } else {
        test_refusals();
        test_layouts(mode == "small");
        if (mode != "small") {
            test_equalities();
            test_sigmoid();
        }
    }
    printf("%d checks, %d failed\n", checks, failures);
    return failures ? 1 : 0;
}
