/* gpu/tests/test_packed.cu - states of 8 or 16 bits a number (dpg_packed of dp_decode.h) in the
 * decode kernel. They are compared with the same kernel on fp32 states and with the formats of
 * ref/bound/carried.h and ref/vocabulary/stored.h.
 *
 *   [small]      random windows, slots, accepted counts and padding: o has the bits of fp32 states
 *                that hold the same numbers, and every slot the codes and scales that the simulated
 *                format makes of the fp32 state; what it leaves out, within one rounding. small:
 *                for compute-sanitizer and the CPU
 *   drift N      N steps (100,000) of one token: error of the state by decade, beside that of the
 *                simulated format and within its sound bound
 *
 * Exit status 0, 1, or 2 (no device). */
#include "../dp_decode.h"
#include "decode/packed.cuh"
#include "device.h"
#include "ref/bound/carried.h"
#include "ref/inputs/inputs.h"
#include "ref/vocabulary/stored.h"

enum { TILE = 32 };

struct Format {
    dpg_packed packed;
    const char *name;   /* of dp_carried_formats, or of dp_formats */
    dp_format of_state; /* DP_FP64: the former */
    int number() const {
        int i = 0;
        while (strcmp(dp_carried_formats[i].name, name))
            i++;
        return i;
    }
};
static const Format FORMATS[] = {{DPG_E4M3, "fp8", DP_FP64},
                                 {DPG_INT8, "int8", DP_FP64},
                                 {DPG_INT8_FEEDBACK, "int8ef", DP_FP64},
                                 {DPG_E4M3, "e4m3-block", DP_E4M3_BLOCK},
                                 {DPG_INT8, "int8-block", DP_INT8_BLOCK},
                                 {DPG_E5M2, "e5m2-block", DP_E5M2_BLOCK},
                                 {DPG_FP16_BY_CHANCE, "fp16sr", DP_FP16SR}};

/* ---- a call ---------------------------------------------------------------------------------- */

struct Serving {
    dpg_decode d = {};
    dp_rng g;
    Vec q, k, v, gate, beta;
    std::vector<int32_t> slot, accepted, length;
    double size = 1; /* of values */

    Serving(int B, int T, int HV, int K, int V, int R, int kept, uint64_t seed) {
        d.B = B;
        d.T = T;
        d.H = 1;
        d.HV = HV;
        d.K = d.Kg = K;
        d.V = V;
        d.R = R;
        d.scale = 0.125f;
        d.gate = DP_GATE_LOG;
        d.beta_form = DP_BETA_PLAIN;
        d.l2norm = 1;
        d.dtype = d.gdtype = DPG_BF16;
        d.odtype = d.sdtype = DPG_F32;
        d.layout = DPG_STATE_KV;
        d.slots = (int64_t)B * kept + 1;
        d.kept = kept;
        dp_rng_seed(&g, seed, 0);
    }
    void fill(Vec &x, int64_t n) {
        x.resize(n);
        for (double &y : x)
            y = dp_bf16d(dp_rng_normal(&g));
    }
    int below(int n) { return (int)(dp_rng_uniform(&g) * n); }
    void next(double forget) {
        const int64_t tokens = (int64_t)d.B * d.T;
        fill(q, tokens * d.K);
        fill(k, tokens * d.R * d.K);
        fill(v, tokens * d.HV * d.R * d.V);
        fill(gate, tokens * d.HV * d.K);
        fill(beta, tokens * d.HV * d.R);
        for (double &x : gate)
            x = dp_bf16d(-forget * fabs(x));
        for (double &x : v)
            x *= size;
        for (double &x : beta)
            x = dp_bf16d(fmin(fabs(x), 1) / d.R);
        slot.clear();
        accepted.clear();
        length.clear();
        for (int b = 0; b < d.B; b++) {
            const int turn = below(d.kept), padding = d.B > 1 && below(6) == 0;
            for (int i = 0; i < d.kept; i++)
                slot.push_back(padding ? -1 : b * d.kept + (i + turn) % d.kept);
            accepted.push_back(1 + below(d.kept));
            length.push_back(below(3) || d.B == 1 ? d.T : below(d.T + 1));
        }
    }
    int64_t head() const { return (int64_t)d.K * d.V; }
    /* The slot that a request reads, and that it writes after token t; -1: none. */
    int from(int b) const { return slot[b * d.kept + (d.kept > 1 ? accepted[b] - 1 : 0)]; }
    int to(int b, int t) const {
        if (from(b) < 0 || t >= length[b]) return -1;
        return d.kept > 1 ? slot[b * d.kept + t] : t == length[b] - 1 ? slot[b] : -1;
    }
};

static int32_t *indices(Memory &m, const std::vector<int32_t> &x) {
    void *p = m.room(x.size() * 4);
    CUDA(cudaMemcpy(p, x.data(), x.size() * 4, cudaMemcpyHostToDevice));
    return (int32_t *)p;
}

static dpg_decode_tensors tensors(Memory &m, const Serving &x, void *states) {
    const dpg_decode &d = x.d;
    auto in = [&](const Vec &y) { return m.copy(y, 0, (int64_t)y.size(), DPG_BF16); };
    return {in(x.q),
            in(x.k),
            in(x.v),
            in(x.gate),
            in(x.beta),
            NULL,
            NULL,
            m.filled((int64_t)d.B * d.T * d.HV * d.V * 4, 0),
            states,
            indices(m, x.slot),
            indices(m, x.accepted),
            indices(m, x.length)};
}

static Vec run(const Serving &x, dpg_packed packed, void *states, const void *start = NULL) {
    dpg_decode d = x.d;
    dp_err e = {DP_OK, ""};
    Memory m;
    d.packed = packed;
    dpg_decode_tensors t = tensors(m, x, states);
    t.start = start;
    DP(e, dpg_decode_run(&d, &t, NULL, &e));
    CUDA(cudaDeviceSynchronize());
    const Vec o = from_device(t.o, (int64_t)d.B * d.T * d.HV * d.V, DPG_F32);
    m.release();
    return o;
}

/* ---- what a slot holds ----------------------------------------------------------------------- */

/* The number that a code has: a sign, an exponent and so many bits of fraction. */
static double float_of(int code, int bits, int fraction, int bias) {
    const int low = 1 << fraction, exponent = (code & ((1 << (bits - 1)) - 1)) >> fraction;
    const double size = exponent ? ldexp(low + code % low, exponent - bias - fraction)
                                 : ldexp(code % low, 1 - bias - fraction);
    return code >> (bits - 1) & 1 ? -size : size;
}
static double value_of(dpg_packed packed, const char *raw, int64_t i) {
    const int code = raw[i] & 0xff;
    if (packed == DPG_FP16_BY_CHANCE) {
        const int half = (raw[2 * i] & 0xff) | (raw[2 * i + 1] & 0xff) << 8, size = half & 0x7fff;
        if (size >= 0x7c00) return size > 0x7c00 ? NAN : half >> 15 ? -INFINITY : INFINITY;
        return float_of(half, 16, 10, 15);
    }
    if (packed == DPG_E4M3) return float_of(code, 8, 3, 7);
    return packed == DPG_E5M2 ? float_of(code, 8, 2, 15) : (signed char)raw[i];
}

/* A head of a slot, read as the layout says, apart from the kernel's own reading. */
struct Stored {
    Vec x, left;

    Stored(const dpg_decode &d, dpg_packed packed, const void *states, int64_t head) {
        const int64_t n = (int64_t)d.K * d.V, bytes = DPG_PACKED_BYTES(packed, n);
        std::vector<char> raw(bytes);
        CUDA(cudaMemcpy(raw.data(), (const char *)states + head * bytes, bytes,
                        cudaMemcpyDeviceToHost));
        const float *scale = (const float *)&raw[n];
        const uint16_t *rest = (const uint16_t *)&raw[n + n / 8];
        x.resize(n);
        left.assign(n, 0);
        for (int64_t i = 0; i < n; i++) {
            const double value = value_of(packed, raw.data(), i);
            x[i] = packed == DPG_FP16_BY_CHANCE ? value : (float)(scale[i / TILE] * value);
            if (packed != DPG_INT8_FEEDBACK) continue;
            const uint32_t bits = (uint32_t)rest[i] << 16;
            float f;
            memcpy(&f, &bits, 4);
            left[i] = f;
        }
    }
};

static Vec plain_state(const Serving &x, const void *states, int64_t head) {
    return from_device((const char *)states + head * x.head() * 4, x.head(), DPG_F32);
}

/* Head hv of a slot's state, as the format stores it. */
static void store(const Format &f, const dpg_decode &d, int hv, Vec &S, Vec &left) {
    const bool is_int8 = f.packed == DPG_INT8 || f.packed == DPG_INT8_FEEDBACK;
    if (f.of_state != DP_FP64) {
        Vec all(S.size() * d.HV, 0);
        std::copy(S.begin(), S.end(), all.begin() + hv * (int64_t)S.size());
        dp_store_state(f.of_state, d.HV, d.K, d.V, all.data());
        std::copy_n(all.begin() + hv * (int64_t)S.size(), S.size(), S.begin());
    }
    for (size_t i = 0; i < S.size() && f.of_state == DP_FP64; i += TILE)
        dp_carried_store_row(f.number(), TILE, &S[i], &left[i]);
    for (double &x : S)
        x = (float)x + (is_int8 ? 0. : -0.); /* a code of int8 has no sign of zero */
}

/* ---- checks ---------------------------------------------------------------------------------- */

/* The slots that a call has written: as the format stores what stands in those of fp32, which get
 * those numbers, too. */
static int64_t compare_slots(const Serving &x, const Format &f, void *plain, const void *packed,
                             const std::vector<Stored> &before) {
    int64_t wrong = 0;
    for (int b = 0; b < x.d.B; b++)
        for (int t = 0; t < x.d.T; t++)
            for (int hv = 0; hv < x.d.HV && x.to(b, t) >= 0; hv++) {
                const int64_t head = (int64_t)x.to(b, t) * x.d.HV + hv;
                Vec S = plain_state(x, plain, head);
                Vec left = before[(int64_t)x.from(b) * x.d.HV + hv].left;
                store(f, x.d, hv, S, left);
                const Stored got(x.d, f.packed, packed, head);
                wrong += !same_bits(got.x, S);
                for (size_t i = 0; i < left.size() && f.packed == DPG_INT8_FEEDBACK; i++)
                    wrong += fabs(got.left[i] - left[i]) > 0x1p-8 * fabs(left[i]);
                const std::vector<float> words(S.begin(), S.end());
                CUDA(cudaMemcpy((char *)plain + head * x.head() * 4, words.data(), words.size() * 4,
                                cudaMemcpyHostToDevice));
            }
    return wrong;
}

static void test_format(const Format &f, Serving x, int steps) {
    const int64_t heads = x.d.slots * x.d.HV, bytes = DPG_PACKED_BYTES(f.packed, x.head());
    Memory m;
    void *plain = m.filled(heads * x.head() * 4, 0), *packed = m.filled(heads * bytes, 0);
    int64_t wrong = 0;
    for (int i = 0; i < steps; i++) {
        std::vector<Stored> before;
        for (int64_t h = 0; h < heads; h++)
            before.emplace_back(x.d, f.packed, packed, h);
        x.next(i % 2 ? 0.01 : 1);
        fact(same_bits(run(x, DPG_UNPACKED, plain), run(x, f.packed, packed)),
             "%s, K %d V %d R %d T %d: o of call %d is not that of fp32 states", f.name, x.d.K,
             x.d.V, x.d.R, x.d.T, i);
        wrong += compare_slots(x, f, plain, packed, before);
    }
    fact(wrong == 0, "%s, K %d V %d R %d T %d: %lld slots hold others than the format makes",
         f.name, x.d.K, x.d.V, x.d.R, x.d.T, (long long)wrong);
    m.release();
}

static void test_formats(int small) {
    int fill = 0;
    CUDA(cudaDeviceGetAttribute(&fill, cudaDevAttrMultiProcessorCount, 0));
    for (const Format &f : FORMATS) {
        /* more heads than the device takes at a time */
        if (f.of_state != DP_FP64) {
            test_format(f, Serving(2 * fill + 3, 1, 1, 128, 128, 1, 1, 5), 2);
            test_format(f, Serving(2 * fill, 3, 2, 128, 128, 1, 3, 6), 2);
        }
        test_format(f, Serving(3, 4, 2, 32, 64, 1, 4, 1), small ? 3 : 8);
        test_format(f, Serving(2, 1, 1, 64, 96, 2, 1, 2), small ? 3 : 8);
        if (small) continue;
        test_format(f, Serving(5, 8, 2, 128, 128, 1, 8, 3), 6);
        test_format(f, Serving(3, 3, 1, 256, 32, 4, 3, 4), 6);
    }
}

/* Scales that have no reciprocal, numbers beyond and below those of fp16, in both kernels. */
static void test_sizes() {
    int fill = 0;
    CUDA(cudaDeviceGetAttribute(&fill, cudaDevAttrMultiProcessorCount, 0));
    for (const Format &f : FORMATS)
        for (int exponent : {-96, -16, 20}) {
            if (f.of_state == DP_FP64) continue;
            Serving few(1, 1, 1, 64, 32, 1, 1, 15), many(fill, 1, 1, 128, 128, 1, 1, 16);
            few.size = many.size = ldexp(1, exponent);
            test_format(f, few, exponent > 0 ? 1 : 2);
            test_format(f, many, exponent > 0 ? 1 : 2);
        }
}

/* A number that is none makes its row of 32 columns none, and no other. */
static void test_nan(dpg_packed packed, Serving x) {
    const int64_t heads = x.d.slots * x.d.HV;
    Memory m;
    void *states = m.filled(heads * DPG_PACKED_BYTES(packed, x.head()), 0);
    x.next(0.01);
    x.v[37] = NAN;
    run(x, packed, states);
    int64_t wrong = 0;
    const int64_t bad = x.to(0, 0), columns = packed == DPG_FP16_BY_CHANCE ? 1 : TILE;
    for (int64_t h = 0; h < heads; h++) {
        const Vec S = Stored(x.d, packed, states, h).x;
        for (size_t i = 0; i < S.size(); i++)
            wrong +=
                std::isnan(S[i]) != (h == bad && (int64_t)(i % x.d.V) / columns == 37 / columns);
    }
    fact(wrong == 0, "format %d, K %d V %d: a NaN in %lld numbers too many or too few", packed,
         x.d.K, x.d.V, (long long)wrong);
    m.release();
}

/* x + more in steps of scale. x: the code, more: what it leaves out. */
static __global__ void k_feedback(float *x, float *more, const float *scale, int n) {
    const int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) x[i] = (signed char)int8_code(x[i], more[i], scale[i], &more[i]);
}

/* States that are read in place of the slots': the same o and slots, and they keep their bits. */
static void test_start(dpg_packed packed, Serving x) {
    const int64_t n = x.d.slots * x.d.HV * DPG_PACKED_BYTES(packed, x.head());
    const int64_t bytes = packed ? n : x.d.slots * x.d.HV * x.head() * 4, each = bytes / x.d.slots;
    Memory m;
    void *states = m.filled(bytes, 0), *start = m.room(bytes), *to = m.filled(bytes, 0);
    std::vector<char> was(bytes), kept(bytes), got(bytes), want(bytes);
    auto read = [&](std::vector<char> &y, const void *from) {
        CUDA(cudaMemcpy(y.data(), from, bytes, cudaMemcpyDeviceToHost));
    };
    x.next(1);
    run(x, packed, states);
    read(was, states);
    CUDA(cudaMemcpy(start, was.data(), bytes, cudaMemcpyHostToDevice));
    x.next(0.01);
    fact(same_bits(run(x, packed, to, start), run(x, packed, states)), "o from a start");
    read(kept, start);
    read(got, to);
    read(want, states);
    int wrong = 0;
    for (int b = 0; b < x.d.B; b++)
        for (int t = 0; t < x.d.T; t++)
            if (const int64_t s = x.to(b, t); s >= 0)
                wrong += memcmp(&got[s * each], &want[s * each], each) != 0;
    fact(wrong == 0 && kept == was, "%d slots from a start, start %s", wrong,
         kept == was ? "kept" : "written");
    m.release();
}

/* Sums beside the middle of two codes. */
static void test_feedback() {
    enum { N = 1 << 17 };
    dp_rng g;
    Memory m;
    Vec x(N), more(N), scale(N);
    int wrong = 0;
    dp_rng_seed(&g, 7, 0);
    for (int i = 0; i < N; i++) {
        scale[i] = (float)(1 + dp_rng_uniform(&g));
        x[i] = (float)(scale[i] * (floor(253 * dp_rng_uniform(&g)) - 126 + (i % 4 ? 0.5 : 0.25)));
        more[i] = dp_bf16d(ldexp(scale[i] * (dp_rng_uniform(&g) - 0.5), -(i % 26)));
    }
    float *dx = (float *)m.copy(x, 0, N, DPG_F32), *dmore = (float *)m.copy(more, 0, N, DPG_F32);
    k_feedback<<<N / 256, 256>>>(dx, dmore, (float *)m.copy(scale, 0, N, DPG_F32), N);
    CUDA(cudaDeviceSynchronize());
    const Vec code = from_device(dx, N, DPG_F32), rest = from_device(dmore, N, DPG_F32);
    for (int i = 0; i < N; i++) {
        const double want = x[i] + more[i];
        const double right = fmax(-127, fmin(127, nearbyint(want / scale[i])));
        wrong += code[i] != right || dp_bf16d(rest[i]) != dp_bf16d(want - scale[i] * right);
    }
    fact(wrong == 0, "int8 with feedback: %d of %d codes or what they leave out are wrong", wrong,
         N);
    m.release();
}

static void test_refusal() {
    Serving x(1, 1, 1, 32, 32, 1, 1, 1);
    const dpg_decode_tensors none = {};
    dp_err e = {DP_OK, ""};
    x.d.packed = DPG_INT8;
    x.d.layout = DPG_STATE_VK;
    fact(dpg_decode_run(&x.d, &none, NULL, &e) == DP_EINPUT && strstr(e.msg, "packed states"),
         "packed states [V][K]: %s", e.msg);
}

/* ---- many steps ------------------------------------------------------------------------------ */

/* One head of 32 columns, whose inputs repeat after PERIOD tokens. */
enum { PERIOD = 256, K = 128 };

struct Long {
    std::vector<Serving> step;
    Vec q, k, v, g, beta; /* of all steps */
    dp_problem p = {};
    int64_t cu[2] = {0, PERIOD};

    explicit Long(double forget) {
        Serving x(1, 1, 1, K, TILE, 1, 1, 11);
        for (int i = 0; i < PERIOD; i++) {
            x.next(forget);
            step.push_back(x);
            q.insert(q.end(), x.q.begin(), x.q.end());
            k.insert(k.end(), x.k.begin(), x.k.end());
            v.insert(v.end(), x.v.begin(), x.v.end());
            g.insert(g.end(), x.gate.begin(), x.gate.end());
            beta.insert(beta.end(), x.beta.begin(), x.beta.end());
        }
        p.model = DP_KDA;
        p.T = PERIOD;
        p.H = p.HV = p.R = p.Nseq = 1;
        p.K = K;
        p.V = TILE;
        p.cu = cu;
        p.scale = 0.125;
        p.gate = DP_GATE_LOG;
        p.beta_form = DP_BETA_PLAIN;
        p.l2norm = 1;
        p.q = q.data();
        p.k = k.data();
        p.v = v.data();
        p.g = g.data();
        p.beta = beta.data();
    }
    /* One token in fp64. */
    void advance(int t, Vec &S) const {
        const double *key = &k[(int64_t)t * K];
        double squares = 1e-6;
        for (int i = 0; i < K; i++)
            squares += key[i] * key[i];
        const double norm = sqrt(squares);
        Vec read(TILE, 0);
        for (int i = 0; i < K; i++) {
            const double decay = exp(g[(int64_t)t * K + i]);
            for (int j = 0; j < TILE; j++) {
                S[i * TILE + j] *= decay;
                read[j] += key[i] / norm * S[i * TILE + j];
            }
        }
        for (int i = 0; i < K; i++)
            for (int j = 0; j < TILE; j++)
                S[i * TILE + j] += key[i] / norm * beta[t] * (v[(int64_t)t * TILE + j] - read[j]);
    }
};

/* The device's states at the marks of the simulated run. */
static std::vector<Vec> on_device(const Long &l, const Format &f,
                                  const std::vector<int64_t> &mark) {
    dpg_decode d = l.step[0].d;
    dp_err e = {DP_OK, ""};
    Memory m;
    std::vector<dpg_decode_tensors> t;
    std::vector<Vec> S;
    d.packed = f.packed;
    void *states = m.filled(d.slots * DPG_PACKED_BYTES(f.packed, K * TILE), 0);
    for (Serving x : l.step) {
        x.slot = {0};
        t.push_back(tensors(m, x, states));
    }
    int64_t done = 0;
    for (int64_t stop : mark) {
        for (; done < stop; done++)
            DP(e, dpg_decode_run(&d, &t[done % PERIOD], NULL, &e));
        CUDA(cudaDeviceSynchronize());
        S.push_back(Stored(d, f.packed, states, 0).x);
    }
    m.release();
    return S;
}

static void drift(const Format &f, double forget, int64_t steps) {
    const Long l(forget);
    const dp_carried_options o = {.steps = steps, .every = 1, .need = 0.01};
    dp_carried r;
    dp_err e = {DP_OK, ""};
    std::thread simulated([&] { DP(e, dp_carried_run(&l.p, 0, f.number(), &o, &r, &e)); });
    std::vector<int64_t> mark;
    for (int64_t n = 10; n < steps; n *= 10)
        mark.push_back(n);
    mark.push_back(steps);
    const std::vector<Vec> got = on_device(l, f, mark);
    Vec S(K * TILE, 0);
    std::vector<double> error;
    int64_t done = 0;
    for (size_t i = 0; i < mark.size(); i++) {
        for (; done < mark[i]; done++)
            l.advance((int)(done % PERIOD), S);
        error.push_back(rel_fro(got[i], S));
    }
    simulated.join();
    for (size_t i = 0; i < mark.size(); i++) {
        int at = 0;
        while (at < r.n - 1 && r.step[at] < mark[i])
            at++;
        fact(error[i] <= r.sound[at] + 1e-5, "%s: %.3g after %lld steps, the bound is %.3g", f.name,
             error[i], (long long)mark[i], r.sound[at]);
        printf(
            "%-6s gates in [-%g, 0]: after %6lld steps error of the state %.2e, of the simulated "
            "format %.2e, %.3f of its bound\n",
            f.name, 4 * forget, (long long)mark[i], error[i], r.error[at], error[i] / r.sound[at]);
    }
}

int main(int argc, char **argv) {
    const std::string what = argc > 1 ? argv[1] : "";
    devices("test_packed");
    if (what == "drift") {
        const int64_t steps = argc > 2 ? atoll(argv[2]) : 100000;
        for (double forget : {1e-3, 0.1})
            for (const Format &f : FORMATS)
                if (f.of_state == DP_FP64) drift(f, forget, steps);
        return verdict();
    }
    test_formats(what == "small");
    test_feedback();
    test_sizes();
    for (const Format &f : FORMATS) {
        int fill = 0;
        CUDA(cudaDeviceGetAttribute(&fill, cudaDevAttrMultiProcessorCount, 0));
        test_nan(f.packed, Serving(1, 1, 1, 64, 64, 1, 1, 17));
        test_nan(f.packed, Serving(fill, 1, 1, 128, 128, 1, 1, 18));
    }
    for (dpg_packed packed : {DPG_UNPACKED, DPG_INT8, DPG_INT8_FEEDBACK}) {
        int fill = 0;
        CUDA(cudaDeviceGetAttribute(&fill, cudaDevAttrMultiProcessorCount, 0));
        test_start(packed, Serving(3, 2, 2, 64, 96, 1, 2, 8));
        test_start(packed, Serving(fill, 1, 1, 128, 128, 1, 1, 9));
    }
    test_refusal();
    return verdict();
}
