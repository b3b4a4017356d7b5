/* gpu/tests/test_decode.cu - the decode kernels (dp_decode.h) against an fp64 recurrence and the
 * worst that fp32 may make of it, slot by slot, number by number.
 *
 *   [small]      random shapes, batches, windows, accepted counts, padding and lengths over many
 *                steps; both layouts; fp32 and bf16 states; the same bits however tokens and
 *                requests are cut into calls; eight wrong calls, each of which must be seen.
 *                small: few, for compute-sanitizer and the CPU
 *   drift N      N steps (100,000) of one token from one state, weak and typical gates, states in
 *                fp32 and bf16: error of the state by decade, against the bound
 *
 * Bound of a column of a state, err its 2-norm, first order in u = 2^-24, times 1.02:
 *   decay    err <- max exp(g) err + (e_g + u) |S|, e_g of expf (2 ulp) and of the gate's formula
 *   write    err <- max(1, sum beta |k|^2 - 1) err + sum_r |k_r| dw_r + u |S|, where
 *            dw_r = beta ((n + e_k) |k||S| + u (|v| + |kS|)) + (e_beta + u + e_k) |w|,
 *            n = (K/8 + 8) u of a sum; I - sum beta k k' has that norm
 *   store    err <- err + u_s |S|
 *   o        scale (|q| err + (n + e_q) |q||S|) + (u_o + 2u) |o|
 *
 * Exit status 0, 1, or 2 (no device). */
#include "../dp_decode.h"
#include "device.h"
#include "ref/inputs/inputs.h"
#include <algorithm>

static const double U = 0x1p-24, SAFETY = 1.02;

/* ---- a batch and what it holds --------------------------------------------------------------- */

struct Shape {
    int B, T, H, HV, K, V, R, Kg;
    dp_gate gate;
    dp_beta beta;
    int l2norm;
    dpg_dtype dtype, sdtype;
    dpg_state_layout layout;
    int kept;
};

static const char *const TYPES[] = {"fp32", "bf16", "fp16"};
static std::string name_of(const Shape &s) {
    return text("B %d T %d H %d HV %d K %d V %d R %d Kg %d gate %d beta %d norm %d %s states %s %s "
                "kept %d",
                s.B, s.T, s.H, s.HV, s.K, s.V, s.R, s.Kg, (int)s.gate, (int)s.beta, s.l2norm,
                TYPES[s.dtype], TYPES[s.sdtype], s.layout == DPG_STATE_VK ? "vk" : "kv", s.kept);
}

static double rounded(double x, dpg_dtype t) {
    return t == DPG_BF16  ? dp_bf16d(x)
           : t == DPG_F16 ? dp_fp16_from_bits(dp_fp16_bits(x))
                          : (double)(float)x;
}
static double roundoff(dpg_dtype t) { return t == DPG_BF16 ? 0x1p-8 : t == DPG_F16 ? 0x1p-11 : U; }
/* Norm of the rounding errors of n numbers below the least normal one. */
static double least(dpg_dtype t, int n) { return t == DPG_F16 ? 0x1p-25 * sqrt(n) : 0; }

/* The inputs of one call. */
struct Step {
    Vec q, k, v, g, beta;
    std::vector<int32_t> slot, accepted, length;
};

/* Shared by all calls. */
struct Batch {
    Shape s;
    int slots;
    double scale, lower_bound = -5;
    Vec A_log, dt_bias;
    dp_rng g;

    Batch(const Shape &shape, uint64_t seed) : s(shape) {
        slots = s.B * s.kept + 2;
        scale = (float)(1 / sqrt(s.K));
        dp_rng_seed(&g, seed, 0);
        fill(A_log, s.HV, 0.3, DPG_F32);
        fill(dt_bias, s.HV * s.Kg, 0.5, DPG_F32);
    }
    void fill(Vec &x, int64_t n, double size, dpg_dtype t) {
        x.resize(n);
        for (double &y : x)
            y = rounded(size * dp_rng_normal(&g), t);
    }
    int below(int n) { return (int)(dp_rng_uniform(&g) * n); }

    Step step() {
        const int64_t tokens = (int64_t)s.B * s.T;
        const bool whole = below(2); /* all tokens of all requests */
        Step x;
        fill(x.q, tokens * s.H * s.K, 1, s.dtype);
        fill(x.k, tokens * s.H * s.R * s.K, s.l2norm ? 1 : 1 / sqrt(s.K), s.dtype);
        fill(x.v, tokens * s.HV * s.R * s.V, 1, s.dtype);
        fill(x.g, tokens * s.HV * s.Kg, 1, s.dtype);
        fill(x.beta, tokens * s.HV * s.R, 1, s.dtype);
        for (double &y : x.g)
            if (s.gate == DP_GATE_LOG) y = -fabs(rounded(y * (below(2) ? 1 : 0x1p-8), s.dtype));
        for (double &y : x.beta)
            if (s.beta == DP_BETA_PLAIN) y = rounded(fmin(fabs(y), 1) / s.R, s.dtype);
        for (int b = 0; b < s.B; b++) {
            const bool padding = below(8) == 0;
            const int turn = below(s.kept);
            for (int i = 0; i < s.kept; i++)
                x.slot.push_back(padding ? -1 : b * s.kept + (i + turn) % s.kept);
            x.accepted.push_back(1 + below(s.kept));
            x.length.push_back(whole || below(3) ? s.T : below(s.T + 1));
        }
        return x;
    }
};

/* ---- the reference --------------------------------------------------------------------------- */

/* One head's state of a slot: numbers [K][V], and what each column may be off by. */
struct Head {
    Vec S, err;
};

static double norm2(const double *x, int n, int stride = 1) {
    double sum = 0;
    for (int i = 0; i < n; i++)
        sum += x[(int64_t)i * stride] * x[(int64_t)i * stride];
    return sqrt(sum);
}

/* A value, and its error (absolute). */
struct Off {
    double x, err;
};

static Off log_gate(const Batch &b, double raw, int hv, int kg) {
    const Shape &s = b.s;
    if (s.gate == DP_GATE_LOG) return {raw, 0};
    const double A = exp(b.A_log[hv]), x = raw + b.dt_bias[hv * s.Kg + kg];
    if (s.gate == DP_GATE_SOFTPLUS) {
        const double sp = fmax(x, 0) + log1p(exp(-fabs(x)));
        return {-A * sp, A * U * (fabs(x) + 4 + 6 * sp) + 6 * U * A * sp};
    }
    const double g = b.lower_bound / (1 + exp(-A * x));
    return {g, fabs(b.lower_bound) * (A * U * fabs(x) + 6 * U * fabs(A * x)) / 4 + 8 * U * fabs(g)};
}

/* q or a key [K] as the recurrence takes it, and its relative error. */
static double activated(const Shape &s, const double *raw, Vec &x) {
    x.assign(raw, raw + s.K);
    if (!s.l2norm) return 0;
    const double norm = sqrt(pow(norm2(raw, s.K), 2) + 1e-6);
    for (double &y : x)
        y /= norm;
    return ((s.K / 32 + 8) / 2.0 + 2) * U;
}

/* One token of one head: S and its errors go on; o and its bound. */
struct Token {
    const Batch &b;
    const Step &x;
    int request, t, hv;

    int64_t at() const { return (int64_t)request * b.s.T + t; }
    void decay(Head &h) const {
        const Shape &s = b.s;
        double largest = 0, off = 0;
        for (int k = 0; k < s.K; k++) {
            const int kg = s.Kg == 1 ? 0 : k;
            const Off g = log_gate(b, x.g[(at() * s.HV + hv) * s.Kg + kg], hv, kg);
            const double d = exp(g.x);
            largest = fmax(largest, d);
            off = fmax(off, g.err + 4 * U);
            for (int v = 0; v < s.V; v++)
                h.S[k * s.V + v] *= d;
        }
        for (int v = 0; v < s.V; v++)
            h.err[v] = largest * h.err[v] + (off + U) * norm2(&h.S[v], s.K, s.V);
    }
    void write(Head &h) const {
        const Shape &s = b.s;
        const int head = hv / (s.HV / s.H);
        const double sum = (s.K / 8 + 8) * U;
        double weight = 0;
        std::vector<Vec> key(s.R), w(s.R);
        Vec more(s.V, 0);
        for (int r = 0; r < s.R; r++) {
            const double e_k = activated(s, &x.k[((at() * s.H + head) * s.R + r) * s.K], key[r]);
            const double raw = x.beta[(at() * s.HV + hv) * s.R + r], size = norm2(&key[r][0], s.K);
            const double beta = s.beta == DP_BETA_PLAIN
                                    ? raw
                                    : (s.beta == DP_BETA_SIGMOID ? 1 : 2) / (1 + exp(-raw));
            const double e_beta = s.beta == DP_BETA_PLAIN ? 0 : 6 * U;
            weight += beta * size * size;
            w[r].resize(s.V);
            for (int v = 0; v < s.V; v++) {
                const double value = x.v[((at() * s.HV + hv) * s.R + r) * s.V + v];
                double read = 0;
                for (int k = 0; k < s.K; k++)
                    read += key[r][k] * h.S[k * s.V + v];
                w[r][v] = beta * (value - read);
                const double of_sum = (sum + e_k) * size * norm2(&h.S[v], s.K, s.V);
                more[v] += size * (beta * (of_sum + U * (fabs(value) + fabs(read))) +
                                   (e_beta + U + e_k) * fabs(w[r][v]));
            }
        }
        for (int r = 0; r < s.R; r++)
            for (int k = 0; k < s.K; k++)
                for (int v = 0; v < s.V; v++)
                    h.S[k * s.V + v] += key[r][k] * w[r][v];
        for (int v = 0; v < s.V; v++)
            h.err[v] =
                fmax(1, weight - 1) * h.err[v] + more[v] + s.R * U * norm2(&h.S[v], s.K, s.V);
    }
    void read(const Head &h, double *o, double *bound) const {
        const Shape &s = b.s;
        Vec q;
        const double e_q = activated(s, &x.q[(at() * s.H + hv / (s.HV / s.H)) * s.K], q);
        const double size = norm2(&q[0], s.K);
        for (int v = 0; v < s.V; v++) {
            double sum = 0;
            for (int k = 0; k < s.K; k++)
                sum += q[k] * h.S[k * s.V + v];
            const double of_sum = ((s.K / 8 + 8) * U + e_q) * norm2(&h.S[v], s.K, s.V);
            o[v] = b.scale * sum;
            bound[v] = SAFETY * (b.scale * size * (h.err[v] + of_sum) +
                                 (roundoff(s.dtype) + 2 * U) * fabs(o[v]));
        }
    }
    void store(const Head &h, Head &to) const {
        to = h;
        for (int v = 0; v < b.s.V; v++)
            to.err[v] +=
                roundoff(b.s.sdtype) * norm2(&h.S[v], b.s.K, b.s.V) + least(b.s.sdtype, b.s.K);
    }
};

/* All slots [slots][HV]. */
struct Reference {
    const Batch &b;
    std::vector<Head> state;

    explicit Reference(Batch &batch) : b(batch), state(batch.slots * batch.s.HV) {
        for (Head &h : state) {
            batch.fill(h.S, (int64_t)b.s.K * b.s.V, 0.5, b.s.sdtype);
            h.err.assign(b.s.V, 0);
        }
    }
    Head &at(int slot, int hv) { return state[slot * b.s.HV + hv]; }

    /* o and bound [B][T][HV][V]. */
    void run(const Step &x, Vec &o, Vec &bound) {
        const Shape &s = b.s;
        o.assign((int64_t)s.B * s.T * s.HV * s.V, 0);
        bound = o;
        for (int request = 0; request < s.B; request++) {
            const int32_t *slot = &x.slot[request * s.kept];
            const int from = slot[s.kept > 1 ? x.accepted[request] - 1 : 0];
            for (int hv = 0; hv < s.HV && from >= 0; hv++) {
                Head h = at(from, hv);
                for (int t = 0; t < x.length[request]; t++) {
                    const Token token = {b, x, request, t, hv};
                    const int64_t row = (token.at() * s.HV + hv) * s.V;
                    token.decay(h);
                    token.write(h);
                    token.read(h, &o[row], &bound[row]);
                    if (s.kept > 1)
                        token.store(h, at(slot[t], hv));
                    else if (t == x.length[request] - 1)
                        token.store(h, at(slot[0], hv));
                }
            }
        }
    }
};

/* ---- on the device --------------------------------------------------------------------------- */

/* A wrong call: what a server may do wrong, and a kernel. */
enum Wrong {
    RIGHT,
    ACCEPTED_ONE_LESS,
    SLOT_OF_ANOTHER,
    OTHER_LAYOUT,
    GATES_OF_NEXT,
    PADDING_UPDATES,
    TOKEN_LOST,
    REJECTED_LEFT,
    NO_NORM,
    WRONGS
};
static const char *const wrong_names[WRONGS] = {
    "right",
    "accepted, one less",
    "the slot of another request",
    "the other layout",
    "the gates of the next token",
    "padding updates a state",
    "the last token is lost",
    "rejected tokens are left in the state",
    "keys and queries without their norm",
};

struct Device {
    const Batch &b;
    Memory kept;
    void *states;

    explicit Device(Reference &ref) : b(ref.b) {
        const Shape &s = b.s;
        const int64_t each = (int64_t)s.K * s.V;
        Vec all(b.slots * s.HV * each);
        for (int i = 0; i < b.slots * s.HV; i++)
            for (int64_t x = 0; x < each; x++)
                all[i * each + place(x)] = ref.state[i].S[x];
        states = kept.copy(all, 0, (int64_t)all.size(), s.sdtype);
    }
    ~Device() { kept.release(); }
    Device(const Device &) = delete;
    /* Where number [k][v] of a state lies. */
    int64_t place(int64_t x) const {
        const int K = b.s.K, V = b.s.V;
        return b.s.layout == DPG_STATE_VK ? x % V * K + x / V : x;
    }
    Vec state_of(int i) const {
        const int64_t each = (int64_t)b.s.K * b.s.V;
        const Vec x =
            from_device((char *)states + i * each * word_bytes(b.s.sdtype), each, b.s.sdtype);
        Vec y(each);
        for (int64_t at = 0; at < each; at++)
            y[at] = x[place(at)];
        return y;
    }

    static void spoil(Step &x, dpg_decode &d, Wrong wrong) {
        for (size_t b = 0; b < x.length.size(); b++) {
            if (wrong == ACCEPTED_ONE_LESS) x.accepted[b] = std::max(1, x.accepted[b] - 1);
            if (wrong == REJECTED_LEFT) x.accepted[b] = d.kept;
            if (wrong == TOKEN_LOST && x.length[b] > 0) x.length[b]--;
            for (int i = 0; i < d.kept; i++) {
                int32_t &slot = x.slot[b * d.kept + i];
                if (wrong == PADDING_UPDATES && slot < 0) slot = (int32_t)b * d.kept + i;
                if (wrong == SLOT_OF_ANOTHER && slot >= 0) slot = (slot + 1) % (d.B * d.kept);
            }
        }
        if (wrong == GATES_OF_NEXT) std::rotate(x.g.begin(), x.g.begin() + d.HV * d.Kg, x.g.end());
        if (wrong == OTHER_LAYOUT)
            d.layout = d.layout == DPG_STATE_VK ? DPG_STATE_KV : DPG_STATE_VK;
        if (wrong == NO_NORM) d.l2norm = !d.l2norm;
    }
    static int32_t *indices(Memory &m, const std::vector<int32_t> &x) {
        void *p = m.room(x.size() * 4);
        CUDA(cudaMemcpy(p, x.data(), x.size() * 4, cudaMemcpyHostToDevice));
        return (int32_t *)p;
    }
    dpg_decode call() const {
        const Shape &s = b.s;
        dpg_decode d = {};
        d.B = s.B;
        d.T = s.T;
        d.H = s.H;
        d.HV = s.HV;
        d.K = s.K;
        d.V = s.V;
        d.R = s.R;
        d.Kg = s.Kg;
        d.scale = (float)b.scale;
        d.gate = s.gate;
        d.lower_bound = (float)b.lower_bound;
        d.beta_form = s.beta;
        d.l2norm = s.l2norm;
        d.dtype = d.gdtype = d.odtype = s.dtype;
        d.sdtype = s.sdtype;
        d.layout = s.layout;
        d.slots = b.slots;
        d.kept = s.kept;
        return d;
    }
    Vec run(Step x, Wrong wrong = RIGHT) {
        const Shape &s = b.s;
        const int64_t n = (int64_t)s.B * s.T * s.HV * s.V;
        Memory m;
        dpg_decode d = call();
        dp_err e = {DP_OK, ""};
        spoil(x, d, wrong);
        const bool whole = std::all_of(x.length.begin(), x.length.end(),
                                       [&](int32_t length) { return length == d.T; });
        auto in = [&](const Vec &y, dpg_dtype t) { return m.copy(y, 0, (int64_t)y.size(), t); };
        const dpg_decode_tensors t = {in(x.q, s.dtype),
                                      in(x.k, s.dtype),
                                      in(x.v, s.dtype),
                                      in(x.g, s.dtype),
                                      in(x.beta, s.dtype),
                                      (float *)in(b.A_log, DPG_F32),
                                      (float *)in(b.dt_bias, DPG_F32),
                                      m.filled(n * word_bytes(s.dtype), 0xff),
                                      states,
                                      indices(m, x.slot),
                                      indices(m, x.accepted),
                                      whole ? NULL : indices(m, x.length)};
        DP(e, dpg_decode_run(&d, &t, NULL, &e));
        CUDA(cudaDeviceSynchronize());
        const Vec o = from_device(t.o, n, s.dtype);
        m.release();
        return o;
    }
};

/* ---- checks ---------------------------------------------------------------------------------- */

/* How far the numbers are from their bounds. */
struct Margin {
    double largest = 0; /* error over bound */
    int64_t beyond = 0;
    void add(double got, double want, double bound) {
        const double off = fabs(got - want);
        if (!(off <= bound)) beyond++;
        if (bound > 0) largest = fmax(largest, off / bound);
    }
};

/* `steps` calls; what the outputs and, at the end, all slots are off by. */
static Margin serve(const Shape &s, int steps, uint64_t seed, Wrong wrong) {
    Batch b(s, seed);
    Reference ref(b);
    Device dev(ref);
    Margin m;
    for (int i = 0; i < steps; i++) {
        const Step x = b.step();
        Vec want, bound;
        ref.run(x, want, bound);
        const Vec o = dev.run(x, wrong);
        for (size_t at = 0; at < o.size(); at++)
            m.add(o[at], want[at], bound[at]);
    }
    for (size_t i = 0; i < ref.state.size(); i++) {
        const Head &h = ref.state[i];
        const Vec got = dev.state_of((int)i);
        for (int v = 0; v < s.V; v++) {
            double off = 0;
            for (int k = 0; k < s.K; k++)
                off += pow(got[k * s.V + v] - h.S[k * s.V + v], 2);
            m.add(sqrt(off), 0, SAFETY * h.err[v]);
        }
    }
    return m;
}

static Shape shape_of(dp_rng *g, int small) {
    auto pick = [&](std::initializer_list<int> x) {
        return x.begin()[(size_t)(dp_rng_uniform(g) * (double)x.size())];
    };
    Shape s = {};
    s.B = pick({1, 2, 5});
    s.T = pick({1, 2, 3, 8});
    s.H = pick({1, 2});
    s.HV = s.H * pick({1, 2});
    s.K = small ? pick({32, 64}) : pick({32, 64, 128, 256});
    s.V = small ? pick({32, 64}) : pick({32, 64, 96, 128});
    s.R = pick({1, 1, 2, 4});
    s.Kg = pick({1, s.K});
    s.gate = (dp_gate)pick({DP_GATE_LOG, DP_GATE_SOFTPLUS, DP_GATE_LOWER_BOUND});
    s.beta = (dp_beta)pick({DP_BETA_PLAIN, DP_BETA_SIGMOID, DP_BETA_SIGMOID2});
    s.l2norm = s.beta == DP_BETA_PLAIN ? pick({0, 1}) : 1;
    s.dtype = pick({0, 1}) ? DPG_BF16 : DPG_F32;
    s.sdtype = (dpg_dtype)pick({DPG_F32, DPG_BF16, DPG_F16});
    s.layout = pick({0, 1}) ? DPG_STATE_VK : DPG_STATE_KV;
    s.kept = pick({1, s.T});
    return s;
}

static void test_shapes(int small) {
    const int shapes = small ? 8 : 120, steps = small ? 3 : 6;
    double largest = 0;
    dp_rng g;
    dp_rng_seed(&g, 4, 0);
    for (int i = 0; i < shapes; i++) {
        const Shape s = shape_of(&g, small);
        const Margin m = serve(s, steps, 100 + i, RIGHT);
        fact(m.beyond == 0, "%s: %lld numbers beyond their bounds, the worst %.3g times",
             name_of(s).c_str(), (long long)m.beyond, m.largest);
        largest = fmax(largest, m.largest);
    }
    printf("%d shapes, %d steps each: largest error %.3f of its bound\n", shapes, steps, largest);
}

/* Heads of 128 x 128, several for each block that a device runs at a time; value heads that share a
 * key. */
static void test_many_heads(int small) {
    int fill = 0;
    double largest = 0;
    dp_rng g;
    CUDA(cudaDeviceGetAttribute(&fill, cudaDevAttrMultiProcessorCount, 0));
    dp_rng_seed(&g, 6, 0);
    for (int i = 0; i < (small ? 4 : 8); i++) {
        Shape s = shape_of(&g, 0);
        s.H = 2;
        s.HV = 2 << i % 2;
        s.K = s.V = 128;
        s.Kg = s.Kg > 1 ? 128 : 1;
        s.R = 1;
        s.B = 6 * fill / s.HV + 1;
        s.T = 1 + i % 4;
        s.kept = i / 2 % 2 ? s.T : 1;
        const Margin m = serve(s, 2, 300 + i, RIGHT);
        fact(m.beyond == 0, "%s: %lld numbers beyond their bounds, the worst %.3g times",
             name_of(s).c_str(), (long long)m.beyond, m.largest);
        largest = fmax(largest, m.largest);
    }
    printf("many heads: largest error %.3f of its bound\n", largest);
}

static const Shape WINDOWS = {
    4, 4, 1, 2, 64, 64, 1, 64, DP_GATE_LOG, DP_BETA_PLAIN, 1, DPG_F32, DPG_F32, DPG_STATE_KV, 4};

static void test_wrong_calls() {
    for (int w = RIGHT; w < WRONGS; w++) {
        const Margin m = serve(WINDOWS, 6, 7, (Wrong)w);
        fact((m.beyond > 0) == (w != RIGHT), "%s: %lld numbers beyond their bounds", wrong_names[w],
             (long long)m.beyond);
        printf("%-40s %6lld numbers beyond their bounds, the worst %.2g times\n", wrong_names[w],
               (long long)m.beyond, m.largest);
    }
}

/* Rows of one request at token t0 on, n of them. */
template <class X> static X part(const X &x, int T, int t0, int n) {
    const int64_t row = (int64_t)x.size() / T;
    return X(x.begin() + t0 * row, x.begin() + (t0 + n) * row);
}

/* Four tokens in one call, and in four: the same bits of o and of the state. */
static void test_cuts(dpg_state_layout layout, int V, int R, int Kg, dp_gate gate) {
    Shape whole = {1, 4,        2,       4,      128, V, R, Kg, gate, DP_BETA_SIGMOID,
                   1, DPG_BF16, DPG_F32, layout, 1};
    Shape one = whole;
    one.T = 1;
    Batch b(whole, 9), c(one, 9);
    Reference ref(b);
    Device all(ref);
    Step x = b.step();
    x.slot[0] = 0;
    x.length[0] = 4;
    const Vec o = all.run(x);
    c.A_log = b.A_log;
    c.dt_bias = b.dt_bias;
    Reference again(c);
    again.state = ref.state;
    Device single(again);
    for (int t = 0; t < 4; t++) {
        const Step y = {part(x.q, 4, t, 1),
                        part(x.k, 4, t, 1),
                        part(x.v, 4, t, 1),
                        part(x.g, 4, t, 1),
                        part(x.beta, 4, t, 1),
                        {0},
                        {1},
                        {1}};
        fact(same_bits(single.run(y), part(o, 4, t, 1)), "o of token %d depends on the cut", t);
    }
    for (int hv = 0; hv < whole.HV; hv++)
        fact(same_bits(single.state_of(hv), all.state_of(hv)), "the state depends on the cut");
}

/* Two requests a multiprocessor, in one call and in parts, one of one request: the same bits. */
static void test_batches(int T, int HV, int Kg, int kept, dpg_dtype dtype, dpg_dtype sdtype,
                         dpg_state_layout layout) {
    int fill = 0;
    CUDA(cudaDeviceGetAttribute(&fill, cudaDevAttrMultiProcessorCount, 0));
    const int B = 2 * fill + 2, cuts[] = {0, 1, fill + 1, B};
    Shape all = {B, T,     1,      HV,     128, 128, 1, Kg, DP_GATE_LOWER_BOUND, DP_BETA_SIGMOID,
                 1, dtype, sdtype, layout, kept};
    Batch b(all, 13), c(all, 13);
    Reference ref(b), again(c);
    again.state = ref.state;
    Device whole(ref), parts(again);
    Step x = b.step();
    if (T == 1) x.length.assign(B, 1);
    const Vec o = whole.run(x);
    for (int i = 0; i < 3; i++) {
        const int at = cuts[i], n = cuts[i + 1] - at;
        auto rows = [&](const auto &y) { return part(y, B, at, n); };
        const Step y = {rows(x.q),    rows(x.k),    rows(x.v),        rows(x.g),
                        rows(x.beta), rows(x.slot), rows(x.accepted), rows(x.length)};
        c.s.B = n;
        fact(same_bits(parts.run(y), rows(o)), "o of part %d depends on the batch", i);
    }
    for (int i = 0; i < b.slots * HV; i++)
        fact(same_bits(parts.state_of(i), whole.state_of(i)), "state %d depends on the batch", i);
    fact(serve(all, 1, 14, RIGHT).beyond == 0, "%s: beyond its bounds", name_of(all).c_str());
}

/* Slots that the pool has not and counts outside their range: padding, or the nearest length. */
static void test_odd_requests(int B, int K) {
    Shape s = {
        B, 3, 1, 2, K, K, 1, K, DP_GATE_LOG, DP_BETA_PLAIN, 1, DPG_F32, DPG_F32, DPG_STATE_KV, 3};
    Batch b(s, 21);
    Reference ref(b);
    const int32_t none[] = {-1, (int32_t)b.slots, INT32_MAX}, accepted[] = {0, 4, -7},
                  length[][2] = {{-3, 0}, {9, 3}};
    for (int i = 0; i < 8; i++) {
        Device odd(ref), plain(ref);
        Step x = b.step();
        for (int t = 0; t < 3; t++)
            x.slot[t] = t;
        Step y = x;
        if (i < 6) y.slot[0] = y.slot[1] = y.slot[2] = -1;
        if (i < 3) x.slot[0] = x.slot[1] = x.slot[2] = none[i];
        if (i < 3) x.accepted[0] = y.accepted[0] = 1;
        if (i >= 3 && i < 6) x.accepted[0] = accepted[i - 3];
        if (i >= 6) x.length[0] = length[i - 6][0];
        if (i >= 6) y.length[0] = length[i - 6][1];
        fact(same_bits(odd.run(x), plain.run(y)), "%d requests, odd one %d: o", B, i);
        for (int h = 0; h < b.slots * s.HV; h++)
            fact(same_bits(odd.state_of(h), plain.state_of(h)), "%d requests, odd one %d: head %d",
                 B, i, h);
    }
}

/* ---- the convolution ------------------------------------------------------------------------- */

/* The convolution of three requests of four tokens, in plain C++: its rows are kept behind every
 * token. */
struct Conv {
    enum { B = 3, T = 4, D = 70, KEPT = 4, SLOTS = B * KEPT };
    int W, silu;
    dpg_dtype type;
    Vec w, bias, states;

    Conv(Batch &b, int W, int silu, dpg_dtype type) : W(W), silu(silu), type(type) {
        b.fill(w, D * W, 0.7, DPG_F32);
        b.fill(bias, D, 0.5, DPG_F32);
        b.fill(states, (int64_t)SLOTS * D * (W - 1), 1, type);
    }
    dpg_decode_conv call(Memory &m) const {
        dpg_decode_conv c = {};
        c.B = B;
        c.T = T;
        c.D = D;
        c.W = W;
        c.silu = silu;
        c.dtype = c.sdtype = type;
        c.slots = SLOTS;
        c.kept = KEPT;
        c.w = (float *)m.copy(w, 0, (int64_t)w.size(), DPG_F32);
        c.bias = (float *)m.copy(bias, 0, D, DPG_F32);
        c.states = m.copy(states, 0, (int64_t)states.size(), type);
        c.y = m.room((size_t)B * T * D * 4);
        return c;
    }
    double *kept(int slot, int channel) { return &states[((int64_t)slot * D + channel) * (W - 1)]; }
    /* From the last W rows: the right y, and fp32's allowance. */
    double output(const Vec &rows, int channel, double *bound) const {
        double sum = bias[channel], size = fabs(sum);
        for (int j = 0; j < W; j++) {
            sum += w[channel * W + j] * rows[j];
            size += fabs(w[channel * W + j] * rows[j]);
        }
        const double y = silu ? sum / (1 + exp(-sum)) : sum;
        *bound = SAFETY * (1.1 * (W + 1) * U * size + (8 * U + roundoff(type)) * fabs(y));
        return y;
    }
    /* One channel of a request: y against that, then its rows to their slots. */
    void follow(const Step &at, const Vec &x, const Vec &y, int request, int channel, Margin &m) {
        const int from = at.slot[request * KEPT + at.accepted[request] - 1];
        Vec rows(W, 0);
        if (from >= 0) std::copy_n(kept(from, channel), W - 1, rows.begin());
        for (int t = 0; t < T; t++) {
            const int64_t place = ((int64_t)request * T + t) * D + channel;
            if (from < 0 || t >= at.length[request]) {
                m.add(y[place], 0, 0);
                continue;
            }
            double bound;
            rows[W - 1] = x[place];
            const double want = output(rows, channel, &bound);
            m.add(y[place], want, bound);
            rows.erase(rows.begin());
            rows.push_back(0);
            std::copy_n(rows.begin(), W - 1, kept(at.slot[request * KEPT + t], channel));
        }
    }
};

static void test_conv(uint64_t seed, int W, int silu, dpg_dtype type) {
    Batch b(WINDOWS, seed);
    Conv conv(b, W, silu, type);
    Memory m;
    Vec x;
    dp_err e = {DP_OK, ""};
    dpg_decode_conv c = conv.call(m);
    for (int step = 0; step < 5; step++) {
        Step at = b.step();
        b.fill(x, (int64_t)conv.B * conv.T * conv.D, 1, type);
        at.slot.resize(conv.B * conv.KEPT);
        at.accepted.resize(conv.B);
        at.length.resize(conv.B);
        c.x = m.copy(x, 0, (int64_t)x.size(), type);
        c.slot = Device::indices(m, at.slot);
        c.accepted = Device::indices(m, at.accepted);
        c.length = Device::indices(m, at.length);
        DP(e, dpg_decode_conv_run(&c, NULL, &e));
        CUDA(cudaDeviceSynchronize());
        const Vec y = from_device(c.y, (int64_t)x.size(), type);
        Margin margin;
        for (int i = 0; i < conv.B * conv.D; i++)
            conv.follow(at, x, y, i / conv.D, i % conv.D, margin);
        fact(margin.beyond == 0, "conv W %d silu %d: %lld numbers beyond, the worst %.2g times", W,
             silu, (long long)margin.beyond, margin.largest);
        fact(same_bits(from_device(c.states, (int64_t)conv.states.size(), type), conv.states),
             "conv W %d: the rows kept are not those of x", W);
    }
    m.release();
}

/* The call is refused, and the message says `says`. */
static void refused(const dpg_decode &d, const char *says) {
    const dpg_decode_tensors none = {};
    dp_err e = {DP_OK, ""};
    const dp_status st = dpg_decode_run(&d, &none, NULL, &e);
    fact(st == DP_EINPUT && strstr(e.msg, says), "%s: status %d: %s", says, (int)st, e.msg);
}

static void test_refusals() {
    dpg_decode d = {};
    d.B = d.H = d.HV = d.R = d.Kg = d.kept = d.T = 1;
    d.K = d.V = 64;
    refused(d, "NULL");
    d.T = 9;
    refused(d, "T = 9");
    d.T = 1;
    d.K = 48;
    refused(d, "K = 48");
    d.K = 64;
    d.B = 65536;
    refused(d, "B = 65536");
}

/* ---- many steps ------------------------------------------------------------------------------ */

/* Inputs repeat after PERIOD tokens, which stay on the device: 3 heads, K = V = 128. */
enum { PERIOD = 256, HEADS = 3 };

struct Long {
    Shape s;
    std::vector<Step> inputs;
    std::vector<int64_t> mark; /* steps after which the state is looked at */
    Batch b;

    Long(dpg_dtype sdtype, double forget, int64_t steps)
        : s{1, 1,        1,      HEADS,        128, 128, 1, 128, DP_GATE_LOG, DP_BETA_PLAIN,
            1, DPG_BF16, sdtype, DPG_STATE_KV, 1},
          b(s, 11) {
        for (int i = 0; i < PERIOD; i++) {
            Step x = b.step();
            x.slot = {0};
            x.accepted = {1};
            x.length = {1};
            for (double &y : x.g)
                y = rounded(-forget * (b.below(1 << 20) + 1) / (1 << 20), DPG_BF16);
            inputs.push_back(x);
        }
        for (int64_t n = 10; n < steps; n *= 10)
            mark.push_back(n);
        mark.push_back(steps);
    }
};

/* The states of a head at the marks, and their bounds over their norms. */
static void follow(const Long &l, Head h, int hv, std::vector<Vec> &S, Vec &bound) {
    Vec o(l.s.V), unused(l.s.V);
    int64_t done = 0;
    for (int64_t stop : l.mark) {
        for (; done < stop; done++) {
            const Token t = {l.b, l.inputs[done % PERIOD], 0, 0, hv};
            t.decay(h);
            t.write(h);
            t.store(Head(h), h);
        }
        S.push_back(h.S);
        bound.push_back(SAFETY * norm2(&h.err[0], l.s.V) / norm2(&h.S[0], (int)h.S.size()));
    }
}

static void drift(dpg_dtype sdtype, double forget, int64_t steps) {
    Long l(sdtype, forget, steps);
    Reference ref(l.b);
    Device dev(ref);
    std::vector<std::vector<Vec>> S(HEADS);
    std::vector<Vec> bound(HEADS), got[HEADS];
    std::thread reference(
        [&] { on_ranks(HEADS, [&](int hv) { follow(l, ref.at(0, hv), hv, S[hv], bound[hv]); }); });
    Memory m;
    dp_err e = {DP_OK, ""};
    const dpg_decode d = dev.call();
    std::vector<dpg_decode_tensors> t;
    void *o = m.room(l.s.HV * l.s.V * 2);
    const int32_t zero_one[] = {0, 1, 1};
    int32_t *index = Device::indices(m, std::vector<int32_t>(zero_one, zero_one + 3));
    for (const Step &x : l.inputs) {
        auto in = [&](const Vec &y) { return m.copy(y, 0, (int64_t)y.size(), DPG_BF16); };
        t.push_back({in(x.q), in(x.k), in(x.v), in(x.g), in(x.beta), NULL, NULL, o, dev.states,
                     index, index + 1, index + 2});
    }
    int64_t done = 0;
    for (int64_t stop : l.mark) {
        for (; done < stop; done++)
            DP(e, dpg_decode_run(&d, &t[done % PERIOD], NULL, &e));
        CUDA(cudaDeviceSynchronize());
        for (int hv = 0; hv < HEADS; hv++)
            got[hv].push_back(dev.state_of(hv));
    }
    reference.join();
    for (size_t i = 0; i < l.mark.size(); i++) {
        double worst = 0, of_bound = 0;
        for (int hv = 0; hv < HEADS; hv++) {
            const double off = rel_fro(got[hv][i], S[hv][i]);
            worst = fmax(worst, off);
            of_bound = fmax(of_bound, off / bound[hv][i]);
        }
        fact(of_bound <= 1, "drift: %.3g of the bound after %lld steps", of_bound,
             (long long)l.mark[i]);
        printf(
            "states %s, gates in [-%g, 0]: after %6lld steps error of the state %.2e, %.3f of its "
            "bound\n",
            TYPES[sdtype], forget, (long long)l.mark[i], worst, of_bound);
    }
    m.release();
}

int main(int argc, char **argv) {
    const std::string what = argc > 1 ? argv[1] : "";
    devices("test_decode");
    if (what == "drift") {
        const int64_t steps = argc > 2 ? atoll(argv[2]) : 100000;
        for (double forget : {1e-3, 0.1})
            for (dpg_dtype t : {DPG_F32, DPG_BF16, DPG_F16})
                drift(t, forget, steps);
        return verdict();
    }
    test_shapes(what == "small");
    test_many_heads(what == "small");
    test_wrong_calls();
    for (dpg_state_layout layout : {DPG_STATE_KV, DPG_STATE_VK}) {
        test_cuts(layout, 96, 2, 128, DP_GATE_SOFTPLUS);
        test_cuts(layout, 128, 1, 1, DP_GATE_SOFTPLUS);
        test_cuts(layout, 128, 1, 128, DP_GATE_LOWER_BOUND);
    }
    test_batches(3, 1, 128, 3, DPG_F32, DPG_F32, DPG_STATE_KV);
    test_batches(3, 1, 128, 1, DPG_BF16, DPG_F32, DPG_STATE_VK);
    test_batches(3, 1, 128, 3, DPG_F32, DPG_BF16, DPG_STATE_VK);
    for (dpg_dtype states : {DPG_F32, DPG_BF16, DPG_F16}) {
        test_batches(3, 1, 1, 1, DPG_BF16, states, DPG_STATE_KV);
        /* enough states for blocks to ask L2 for later ones */
        for (dpg_state_layout layout : {DPG_STATE_KV, DPG_STATE_VK})
            test_batches(1, 4, 1, 1, DPG_BF16, states, layout);
    }
    int fill = 0;
    CUDA(cudaDeviceGetAttribute(&fill, cudaDevAttrMultiProcessorCount, 0));
    test_odd_requests(2, 64);
    test_odd_requests(fill, 128);
    for (int W : {2, 4, 8})
        for (int silu : {0, 1})
            test_conv(20 + W, W, silu, silu ? DPG_BF16 : DPG_F32);
    test_refusals();
    return verdict();
}
