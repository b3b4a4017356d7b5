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
#include "device.h"
#include "ref/chunk/conv.h"
#include "ref/inputs/inputs.h"
#include <float.h>

/* One part; c points into the vectors. */
struct Conv {
    dp_conv c;
    Vec x, w, bias, dy;
};
struct Shape {
    int64_t T;
    int W, silu, bias;
    std::vector<int64_t> cu;
    std::vector<int> D; /* channels of each part */
    dpg_dtype dtype;
};
/* Results of one part, in the order of `tensor`. */
enum { Y, DX, DW, DBIAS, RESULTS };
static const char *const tensor[RESULTS] = {"y", "dx", "dw", "dbias"};
struct Out {
    Vec r[RESULTS];
};

static void fill(Vec &x, size_t n, dp_rng *g, dpg_dtype t, double scale) {
    x.resize(n);
    for (double &y : x) {
        double z = scale * dp_rng_normal(g);
        y = t == DPG_BF16 ? dp_bf16d(z) : (double)(float)z;
    }
}

static std::vector<Conv> make(const Shape &s, uint64_t seed) {
    std::vector<Conv> v(s.D.size());
    dp_rng g;
    dp_rng_seed(&g, seed, 0);
    for (size_t i = 0; i < v.size(); i++) {
        Conv &k = v[i];
        int D = s.D[i];
        fill(k.x, s.T * D, &g, s.dtype, 1);
        fill(k.dy, s.T * D, &g, s.dtype, 1);
        fill(k.w, (size_t)D * s.W, &g, DPG_F32, 0.7);
        fill(k.bias, s.bias ? D : 0, &g, DPG_F32, 0.5);
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

/* ---- on the device --------------------------------------------------------------------------- */

/* One rank's data, and how its run ended. */
struct ConvRank {
    dpg_conv *plan = NULL;
    dpg_conv_tensors t[DPG_CONV_PARTS] = {};
    Memory memory;
    dp_status st = DP_OK;
    dp_err err = {DP_OK, ""};

    /* Outputs hold NaN. */
    void setup(const Shape &s, const std::vector<Conv> &v, int rank, int N) {
        dpg_conv_problem p = {s.T,         s.W,    s.silu, (int)v.size(), {0}, (int)s.cu.size() - 1,
                              s.cu.data(), s.dtype};
        std::copy(s.D.begin(), s.D.end(), p.D);
        DP(err, dpg_conv_create(&plan, &p, rank, N, &err));
        for (size_t i = 0; i < v.size(); i++) {
            int64_t n = s.T / N * s.D[i], each = n * word_bytes(s.dtype);
            auto whole = [&](const Vec &x) {
                return (float *)memory.copy(x, 0, x.size(), DPG_F32);
            };
            t[i].x = memory.copy(v[i].x, rank * n, n, s.dtype);
            t[i].dy = memory.copy(v[i].dy, rank * n, n, s.dtype);
            t[i].w = whole(v[i].w);
            t[i].bias = whole(v[i].bias);
            t[i].y = memory.filled(each, 0xff);
            t[i].dx = memory.filled(each, 0xff);
            t[i].dw = (float *)memory.filled(v[i].w.size() * 4, 0xff);
            t[i].dbias = (float *)memory.filled(s.D[i] * 4, 0xff);
        }
    }
    void both_ways(dpg_comm *comm) {
        cudaStream_t stream;
        void *ws = memory.filled(dpg_conv_workspace_bytes(plan), 0xff);
        CUDA(cudaStreamCreate(&stream));
        CUDA(cudaDeviceSynchronize());
        st = dpg_conv_forward(plan, t, ws, comm, stream, &err);
        if (st == DP_OK) st = dpg_conv_backward(plan, t, ws, comm, stream, &err);
        if (st == DP_OK && comm) st = comm->wait(comm, stream, &err);
        if (st != DP_OK && comm) comm->abort(comm, err.msg);
        CUDA(cudaStreamSynchronize(stream));
        cudaStreamDestroy(stream);
    }
    /* The rank's rows of y and dx; dw and dbias, the same on all ranks, of rank 0. */
    void collect(const Shape &s, int rank, int N, std::vector<Out> &out) const {
        for (size_t i = 0; i < out.size() && st == DP_OK; i++) {
            int64_t n = s.T / N * s.D[i];
            put(out[i].r[Y], rank * n, from_device(t[i].y, n, s.dtype));
            put(out[i].r[DX], rank * n, from_device(t[i].dx, n, s.dtype));
            if (rank) continue;
            out[i].r[DW] = from_device(t[i].dw, (int64_t)s.D[i] * s.W, DPG_F32);
            out[i].r[DBIAS] = from_device(t[i].dbias, s.D[i], DPG_F32);
        }
    }
    void run(const Shape &s, const std::vector<Conv> &v, int rank, int N, dpg_comm *comm,
             std::vector<Out> &out) {
        if (comm) CUDA(cudaSetDevice(comm->device));
        setup(s, v, rank, N);
        both_ways(comm);
        collect(s, rank, N, out);
        memory.release();
        dpg_conv_destroy(plan);
    }
};

static std::vector<Out> run(const Shape &s, const std::vector<Conv> &v, int N,
                            Comms::Kind kind = Comms::SHARED) {
    std::vector<Out> out(v.size());
    std::vector<ConvRank> ranks(N);
    for (size_t i = 0; i < v.size(); i++)
        for (int x : {Y, DX})
            out[i].r[x].assign(s.T * s.D[i], NAN);
    if (N == 1) {
        ranks[0].run(s, v, 0, 1, NULL, out);
    } else {
        Comms comm(kind, N, 20);
        on_ranks(N, [&](int r) { ranks[r].run(s, v, r, N, &comm[r], out); });
    }
    for (int r = 0; r < N; r++)
        fact(ranks[r].st == DP_OK, "rank %d of %d: %s", r, N, ranks[r].err.msg);
    return out;
}

/* ---- against ref/conv ------------------------------------------------------------------------ */

static double worst[RESULTS]; /* error / bound */

struct Results {
    dp_conv_result r;
    explicit Results(const dp_conv *c) { dp_conv_result_alloc(&r, c); }
    Results(const Results &) = delete;
    ~Results() { dp_conv_result_free(&r); }
    const double *of(int x) const {
        const double *all[RESULTS] = {r.y, r.dx, r.dw, r.dbias};
        return all[x];
    }
};

static void within(const std::string &what, const Shape &s, const std::vector<Conv> &v,
                   const std::vector<Out> &o, int N) {
    for (size_t i = 0; i < v.size(); i++) {
        Results ref(&v[i].c), of_ref(&v[i].c), bound(&v[i].c);
        dp_conv_run(&v[i].c, &ref.r);
        dp_conv_bound(&v[i].c, DP_BASE_FP64, 1, &of_ref.r);
        dp_conv_bound_sigmoid32(&v[i].c, s.dtype == DPG_BF16 ? DP_BASE_BF16 : DP_BASE_FP32, N,
                                &bound.r);
        for (int k = 0; k < (s.bias ? RESULTS : DBIAS); k++)
            for (size_t j = 0; j < o[i].r[k].size(); j++) {
                double got = o[i].r[k][j], want = ref.of(k)[j], err = fabs(got - want);
                double most = bound.of(k)[j] + of_ref.of(k)[j];
                worst[k] = fmax(worst[k], most > 0 ? err / most : err > 0 ? INFINITY : 0);
                fact(err <= most,
                     "%s N %d part %zu: %s[%zu] = %.9g, want %.9g, error %.3g, bound %.3g",
                     what.c_str(), N, i, tensor[k], j, got, want, err, most);
            }
    }
}

/* The first result that differs, "" where none does. */
static std::string differs(const Out &a, const Out &b) {
    for (int x = 0; x < RESULTS; x++)
        if (!same_bits(a.r[x], b.r[x])) return tensor[x];
    return "";
}

static std::string name_of(const Shape &s) {
    std::string name = text("T %lld W %d silu %d bias %d %s D", (long long)s.T, s.W, s.silu, s.bias,
                            s.dtype == DPG_BF16 ? "bf16" : "fp32");
    for (int d : s.D)
        name += text(" %d", d);
    name += " cu";
    for (int64_t t : s.cu)
        name += text(" %lld", (long long)t);
    return name;
}

static void test_shape(const Shape &s, uint64_t seed, int most_ranks) {
    std::vector<Conv> v = make(s, seed);
    std::vector<Out> one = run(s, v, 1);
    std::string name = name_of(s);
    within(name, s, v, one, 1);
    for (int N = 2; N <= most_ranks && N <= s.T; N++) {
        if (s.T % N) continue;
        std::vector<Out> many = run(s, v, N);
        within(name, s, v, many, N);
        for (size_t i = 0; i < v.size(); i++)
            for (int x : {Y, DX})
                fact(same_bits(one[i].r[x], many[i].r[x]),
                     "%s: %s of part %zu depends on the split in %d ranks", name.c_str(), tensor[x],
                     i, N);
    }
}

/* ---- tests ----------------------------------------------------------------------------------- */

/* The k-th layout, sequences at random. */
static Shape layout(int k, bool small, dp_rng *g) {
    const int64_t lengths[] = {24, 48, 120, 130, 192, 360};
    const std::vector<int> widths[] = {{16}, {8, 4, 132}, {5, 3, 7}};
    auto pick = [&](int64_t n) { return (int64_t)(dp_rng_uniform(g) * (double)n); };
    Shape s;
    s.T = small ? 24 : lengths[k % 6];
    s.W = 2 + k % 7;
    s.silu = k / 2 % 2;
    s.bias = k / 3 % 2;
    s.dtype = k / 4 % 2 ? DPG_F32 : DPG_BF16;
    s.D = widths[k % 3];
    int n = 1 + (int)pick(6);
    s.cu.assign(n + 1, 0);
    for (int i = 1; i <= n; i++)
        s.cu[i] = i == n ? s.T : s.cu[i - 1] + pick(s.T + 1 - s.cu[i - 1]);
    return s;
}

static void test_layouts(bool small) {
    dp_rng g;
    dp_rng_seed(&g, 5, 0);
    for (int k = 0; k < (small ? 6 : 60); k++)
        test_shape(layout(k, small, &g), 100 + k, small ? 12 : 24);
    if (small) return;
    /* several blocks of strips, boundaries of strips and blocks */
    const std::vector<int64_t> boundaries = {0, 63, 64, 65, 512, 515, 1024, 2047, 2049, 4160};
    for (dpg_dtype t : {DPG_BF16, DPG_F32})
        test_shape(Shape{4160, 4, 1, 1, boundaries, {128, 128, 256}, t}, 7, 8);
    /* one token a rank: a halo from seven */
    test_shape(Shape{130, 8, 1, 0, {0, 64, 130}, {4}, DPG_F32}, 8, 130);
    printf("error / bound at most: y %.3f  dx %.3f  dw %.3f  dbias %.3f\n", worst[Y], worst[DX],
           worst[DW], worst[DBIAS]);
}

/* NaN everywhere but in sequence q: it keeps its bits. */
static void reads_no_other(const Shape &s, int q, const std::vector<Out> &all) {
    std::vector<Conv> w = make(s, 9);
    for (size_t i = 0; i < w.size(); i++)
        for (int64_t j = 0; j < s.T * s.D[i]; j++)
            if (j / s.D[i] < s.cu[q] || j / s.D[i] >= s.cu[q + 1]) w[i].x[j] = w[i].dy[j] = NAN;
    std::vector<Out> o = run(s, w, 4);
    for (size_t i = 0; i < w.size(); i++) {
        size_t from = s.cu[q] * s.D[i], n = (s.cu[q + 1] - s.cu[q]) * s.D[i] * sizeof(double);
        for (int x : {Y, DX})
            fact(!memcmp(&all[i].r[x][from], &o[i].r[x][from], n),
                 "sequence %d, %s of part %zu reads another", q, tensor[x], i);
    }
}

/* Three parts of different widths, three sequences, the second of one token. */
static Shape three_parts() {
    return Shape{2048, 4, 1, 1, {0, 700, 701, 2048}, {128, 64, 256}, DPG_BF16};
}

static void test_equalities() {
    Shape s = three_parts();
    std::vector<Conv> v = make(s, 9);
    std::vector<Out> all = run(s, v, 4);
    for (int k = 0; k < 20; k++) {
        std::vector<Out> again = run(s, v, 4);
        for (size_t i = 0; i < v.size(); i++)
            fact(differs(all[i], again[i]) == "", "run %d: %s of part %zu differs", k,
                 differs(all[i], again[i]).c_str(), i);
    }
    for (size_t i = 0; i < v.size(); i++) {
        Shape one = s;
        one.D = {s.D[i]};
        std::vector<Out> alone = run(one, std::vector<Conv>{v[i]}, 4);
        fact(differs(all[i], alone[0]) == "", "part %zu alone: %s differs", i,
             differs(all[i], alone[0]).c_str());
    }
    for (int q = 0; q < 3; q++)
        reads_no_other(s, q, all);
}

static void test_nccl(int N) {
    Shape s = three_parts();
    std::vector<Conv> v = make(s, 9);
    std::vector<Out> a = run(s, v, N), b = run(s, v, N, Comms::NCCL);
    for (size_t i = 0; i < v.size(); i++)
        fact(differs(a[i], b[i]) == "", "NCCL: %s of part %zu differs from ranks on one device",
             differs(a[i], b[i]).c_str(), i);
}

/* Largest errors of sigmoid_f32: relative, and absolute where the result is subnormal. */
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

/* The count of ref/bound/conv_bound.c (rule_sigmoid32) for a sigmoid in fp32: exp 2 u, sum and
 * quotient 1 u each. Where exp overflows the result was below 2^-126. */
enum { SIGMOID_U = 4 };
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
    fact(h[0] <= SIGMOID_U * 0x1p-24 && h[1] <= FLT_MIN && h[0] > 0,
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
        dp_status st = dpg_conv_create(&c, &b.p, b.rank, b.N, &e);
        fact(st == DP_EINPUT && strstr(e.msg, b.says), "'%s' should say '%s'", e.msg, b.says);
    }
}

int main(int argc, char **argv) {
    std::string mode = argc > 1 ? argv[1] : "all";
    setvbuf(stdout, NULL, _IOLBF, 0);
    int n = devices("test_gpu_conv");
    if (mode == "nccl") {
        test_nccl(argc > 2 ? atoi(argv[2]) : n);
        return verdict();
    }
    test_refusals();
    test_layouts(mode == "small");
    if (mode != "small") {
        test_equalities();
        test_sigmoid();
    }
    return verdict();
}
