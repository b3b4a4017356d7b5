/* gpu/tests/ref64.h - plain fp64 on the host: the step recurrence (math.md b) and the chunk stages
 * (math.md e), one head at a time. It is written for clarity and independently of ref/. Also the
 * test inputs. */
#ifndef DPG_REF64_H
#define DPG_REF64_H
#include "../dp_gpu.h"
#include "vec.h"
#include <algorithm>
#include <map>
#include <math.h>
#include <stdint.h>
#include <string.h>
#include <string>
#include <vector>

struct Case {
    const char *name;
    int H, HV, K, V, R, gdn;
    std::vector<int64_t> cu;
    dp_gate gate;
    double decay; /* typical |g| of a step */
    dp_beta beta;
    int l2norm, s0;
    dpg_dtype dtype;
    double key_mix; /* 0: random keys, near 1: adjacent keys alike */
    uint64_t seed;
    const char *tests = "";  /* f, F: of the forward, of its small set too; b, B: of the backward */
    int resets = 0;          /* tokens between resets (g = -inf); 0: none */
    dp_model model = DP_GDN; /* DP_GDN: what R and gdn make it */
    bool by_beta() const { return model <= DP_MKDA || model == DP_DELTAPRODUCT; }
    bool alone() const { return model > DP_MKDA; } /* the token path alone has it */
    int64_t T() const { return cu.back(); }
    int Kg() const { return gdn ? 1 : K; }
};

struct Inputs {
    Vec q, k, v, g, beta, A_log, dt_bias, s0;
    Vec erase, write, lr_a, lr_b; /* [T][HV][K], [T][HV][V], [T][HV][K], [T][H][K] */
    double scale, lb;
};

struct Rng {
    uint64_t s;
    double uni() {
        uint64_t z = s += 0x9e3779b97f4a7c15ull;
        z = (z ^ z >> 30) * 0xbf58476d1ce4e5b9ull;
        z = (z ^ z >> 27) * 0x94d049bb133111ebull;
        return ((z ^ z >> 31) >> 11) * 0x1p-53;
    }
    double normal() {
        double u = uni(), v = uni();
        return sqrt(-2 * log(1 - u)) * cos(2 * M_PI * v);
    }
};

static inline double as_dtype(double x, dpg_dtype t) {
    float f = (float)x;
    if (t == DPG_F32) return f;
    uint32_t b;
    memcpy(&b, &f, 4);
    b = (b + 0x7fff + (b >> 16 & 1)) & 0xffff0000u;
    memcpy(&f, &b, 4);
    return f;
}

/* The tensors in place of beta. GDN-2 erases a part of each channel, and DPLR along half of what it
 * writes, so that no step grows. */
static inline void make_vectors(const Case &c, Rng &r, Inputs &x) {
    const int64_t heads = c.T() * c.HV;
    auto fill = [&](Vec &a, int64_t n, double least, double most) {
        a.resize(n);
        for (auto &y : a)
            y = as_dtype(least + (most - least) * r.uni(), c.dtype);
    };
    if (c.model == DP_GDN2) {
        fill(x.erase, heads * c.K, 0, 1);
        fill(x.write, heads * c.V, 0, 2);
    }
    if (c.model != DP_DPLR) return;
    fill(x.lr_b, c.T() * c.H * c.K, -1, 1);
    fill(x.lr_a, heads * c.K, -1, 1);
    for (int64_t i = 0; i < (int64_t)x.lr_a.size(); i++) {
        const double b =
            x.lr_b[(i / c.K / c.HV * c.H + i / c.K % c.HV / (c.HV / c.H)) * c.K + i % c.K];
        x.lr_a[i] = as_dtype((0.1 * x.lr_a[i] - 0.8 * b) / sqrt(c.K), c.dtype);
    }
}

static inline Inputs make_inputs(const Case &c) {
    Rng r = {c.seed};
    int64_t T = c.T(), Kg = c.Kg();
    int Nseq = (int)c.cu.size() - 1;
    Inputs x;
    x.scale = 1 / sqrt((double)c.K);
    x.lb = -5;
    auto fill = [&](Vec &a, int64_t n, double scale, dpg_dtype t) {
        a.resize(n);
        for (auto &y : a)
            y = as_dtype(scale * r.normal(), t);
    };
    double kw = c.l2norm ? 1 : 1 / sqrt((double)c.K);
    fill(x.q, T * c.H * c.K, kw, c.dtype);
    fill(x.k, T * c.H * c.R * c.K, kw, c.dtype);
    for (int64_t t = 1; t < T && c.key_mix > 0; t++)
        for (int64_t i = 0; i < (int64_t)c.H * c.R * c.K; i++) {
            double &y = x.k[t * c.H * c.R * c.K + i];
            y = as_dtype(c.key_mix * x.k[(t - 1) * c.H * c.R * c.K + i] +
                             sqrt(1 - c.key_mix * c.key_mix) * y,
                         c.dtype);
        }
    fill(x.v, T * c.HV * c.R * c.V, 1, c.dtype);
    fill(x.g, T * c.HV * Kg, 1, c.dtype);
    fill(x.beta, T * c.HV * c.R, 1, c.dtype);
    fill(x.A_log, c.HV, 0.3, DPG_F32);
    fill(x.dt_bias, c.HV * Kg, 0.3, DPG_F32);
    for (int64_t i = 0; i < (int64_t)x.g.size(); i++) {
        double head = 1 + (i / Kg % c.HV); /* every head has its own time scale */
        if (c.gate == DP_GATE_LOG) x.g[i] = as_dtype(-c.decay * head * fabs(x.g[i]), c.dtype);
    }
    /* every other one: a third of the channels only */
    for (int64_t t = c.resets / 2, j = 0; c.resets && t < T; t += c.resets, j++)
        for (int64_t i = 0; i < c.HV * Kg; i++)
            if (j % 2 == 0 || i % 3 == 0) x.g[t * c.HV * Kg + i] = -INFINITY;
    if (c.gate == DP_GATE_SOFTPLUS)
        for (int64_t i = 0; i < (int64_t)x.dt_bias.size(); i++)
            x.dt_bias[i] = (float)(x.dt_bias[i] + log(c.decay * (1 + i / Kg % c.HV)));
    if (c.gate == DP_GATE_LOWER_BOUND)
        for (int64_t i = 0; i < (int64_t)x.dt_bias.size(); i++)
            x.dt_bias[i] = (float)(x.dt_bias[i] + log(c.decay / 5));
    if (c.beta == DP_BETA_PLAIN) /* sum_j beta_j |k_j|^2 <= 2 (math.md b, stability) */
        for (auto &y : x.beta)
            y = as_dtype((c.R > 1 ? 2.0 / c.R : 1) * (0.05 + 0.9 * r.uni()) * 0.9, c.dtype);
    if (c.s0) fill(x.s0, (int64_t)Nseq * c.HV * c.K * c.V, 0.3, DPG_F32);
    make_vectors(c, r, x);
    if (!c.by_beta()) x.beta.clear();
    return x;
}

/* The state that a key of a token reads: the decayed one, the one after the keys before it, or the
 * one before its decay. */
enum Reads64 { DECAYED64, IN_TURN64, UNDECAYED64 };

/* One value head of one sequence, activated: q [T][K], and R keys a token. They write k [T][R][K] u
 * [T][R][V], and erase along e [T][R][K], b [T][R] strongly. g [T][K]. */
struct Head {
    int64_t T;
    int K, V, R;
    double scale;
    Vec q, k, e, u, g, b;
    Reads64 reads;
};

/* Row of the inputs that several heads may share, through the norm. */
static inline Vec unit64(const Case &c, const Vec &x, int64_t row) {
    Vec y(&x[row * c.K], &x[row * c.K] + c.K);
    double s = DP_L2_EPS;
    for (double z : y)
        s += z * z;
    for (double &z : y)
        z /= c.l2norm ? sqrt(s) : 1;
    return y;
}
static inline void append(Vec &to, const Vec &x) { to.insert(to.end(), x.begin(), x.end()); }

static inline double beta64(const Case &c, double b) {
    double s = 1 / (1 + exp(-b));
    return c.beta == DP_BETA_PLAIN ? b : c.beta == DP_BETA_SIGMOID ? s : 2 * s;
}

/* The keys of token t (math.md b, i): what each writes, its values, along what it erases, how
 * strongly. */
static inline void keys64(const Case &c, const Inputs &x, int64_t t, int hv, Head &h) {
    const int64_t th = t * c.HV + hv, tq = t * c.H + hv / (c.HV / c.H);
    const Vec none(c.K, 0);
    if (c.model == DP_DPLR) { /* first: lr_b, which writes lr_a' S */
        Vec a(&x.lr_a[th * c.K], &x.lr_a[th * c.K] + c.K);
        for (double &y : a)
            y = -y;
        append(h.k, unit64(c, x.lr_b, tq));
        append(h.e, a);
        append(h.u, Vec(c.V, 0));
        h.b.push_back(1);
    }
    for (int j = 0; j < c.R; j++) {
        Vec k = unit64(c, x.k, tq * c.R + j), e = c.by_beta() ? k : none;
        Vec u(&x.v[(th * c.R + j) * c.V], &x.v[(th * c.R + j) * c.V] + c.V);
        for (int i = 0; i < c.K && c.model == DP_GDN2; i++)
            e[i] = x.erase[th * c.K + i] * k[i];
        for (int v = 0; v < c.V && c.model == DP_GDN2; v++)
            u[v] *= x.write[th * c.V + v];
        append(h.k, k);
        append(h.e, e);
        append(h.u, u);
        h.b.push_back(c.by_beta() ? beta64(c, x.beta[th * c.R + j]) : 1);
    }
}

static inline Head head_of(const Case &c, const Inputs &x, int hv, int64_t lo, int64_t hi) {
    Head h = {};
    const int hq = hv / (c.HV / c.H), Kg = c.Kg();
    h.T = hi - lo;
    h.K = c.K;
    h.V = c.V;
    h.R = c.model == DP_DPLR ? 2 : c.R;
    h.scale = x.scale;
    h.reads = c.model == DP_DELTAPRODUCT ? IN_TURN64 : c.model == DP_DPLR ? UNDECAYED64 : DECAYED64;
    for (int64_t t = lo; t < hi; t++) {
        append(h.q, unit64(c, x.q, t * c.H + hq));
        keys64(c, x, t, hv, h);
        for (int i = 0; i < c.K; i++) {
            int gi = Kg == 1 ? 0 : i;
            double raw = x.g[(t * c.HV + hv) * Kg + gi], y = raw + x.dt_bias[hv * Kg + gi],
                   a = exp(x.A_log[hv]);
            h.g.push_back(c.gate == DP_GATE_LOG        ? raw
                          : c.gate == DP_GATE_SOFTPLUS ? -a * log1p(exp(y))
                                                       : x.lb / (1 + exp(-a * y)));
        }
    }
    return h;
}

/* A token's step: the state that each key reads, E = u - e' of it, the decayed state. */
struct Token64 {
    Vec decayed, E;        /* [K][V], [R][V] */
    std::vector<Vec> read; /* of each key, where they differ; else of all */
    const Vec &read_by(int j) const { return read[read.size() > 1 ? j : 0]; }
};

/* x += k y', [K][V]. */
static inline void add_outer(Vec &x, const double *k, const double *y, int K, int V) {
    for (int i = 0; i < K; i++)
        for (int v = 0; v < V; v++)
            x[i * V + v] += k[i] * y[v];
}

/* S [K][V] in and out. */
static inline Token64 token64(const Head &h, int64_t t, Vec &S) {
    const int K = h.K, V = h.V, R = h.R;
    Token64 y = {S, Vec(R * V), {}};
    for (int i = 0; i < K; i++)
        for (int v = 0; v < V; v++)
            y.decayed[i * V + v] *= exp(h.g[t * K + i]);
    y.read.push_back(h.reads == UNDECAYED64 ? S : y.decayed);
    S = y.decayed;
    for (int j = 0; j < R; j++) {
        const double *e = &h.e[(t * R + j) * K];
        Vec X(V);
        if (j && h.reads == IN_TURN64) y.read.push_back(S);
        for (int v = 0; v < V; v++) {
            double E = h.u[(t * R + j) * V + v];
            for (int i = 0; i < K; i++)
                E -= e[i] * y.read_by(j)[i * V + v];
            y.E[j * V + v] = E;
            X[v] = h.b[t * R + j] * E;
        }
        add_outer(S, &h.k[(t * R + j) * K], X.data(), K, V);
    }
    return y;
}

/* S [K][V] in and out, o [T][V] appended. */
static inline void step64(const Head &h, int64_t t, Vec &S, Vec *o) {
    token64(h, t, S);
    for (int v = 0; v < h.V && o; v++) {
        double sum = 0;
        for (int i = 0; i < h.K; i++)
            sum += h.q[t * h.K + i] * S[i * h.V + v];
        o->push_back(h.scale * sum);
    }
}

struct Stages {
    Vec gcum, Akk, Aqk, w, u, kg, qg, h, v_new;
};

/* A chunk's tokens [t0, t0+c) of a head: n keys, rows of N. */
struct Chunk64 {
    const Head &hd;
    int c, n, N;
    const double *q, *k, *v, *b, *g;
    Chunk64(const Head &h, int64_t t0, int len)
        : hd(h), c(len), n(len * h.R), N(DP_CHUNK * h.R), q(&h.q[t0 * h.K]),
          k(&h.k[t0 * h.R * h.K]), v(&h.u[t0 * h.R * h.V]), b(&h.b[t0 * h.R]), g(&h.g[t0 * h.K]) {}
    /* x, of token st, times key m, decayed from its token to st. */
    double pair(const Stages &s, const double *x, int st, int m) const {
        double sum = 0;
        for (int i = 0; i < hd.K; i++)
            sum +=
                x[i] * exp(s.gcum[st * hd.K + i] - s.gcum[m / hd.R * hd.K + i]) * k[m * hd.K + i];
        return sum;
    }
};

static inline void gates64(const Chunk64 &x, Stages &s) {
    const int K = x.hd.K;
    s.gcum.assign(x.c * K, 0);
    for (int t = 0; t < x.c; t++)
        for (int i = 0; i < K; i++)
            /* exp(-104) = 7e-46 */
            s.gcum[t * K + i] =
                (t ? s.gcum[(t - 1) * K + i] : 0) + std::max(x.g[t * K + i], -104.0);
}

/* Aqk, and Akk, the inverse of I + A. */
static inline void intra64(const Chunk64 &x, Stages &s) {
    const int K = x.hd.K, R = x.hd.R, n = x.n, N = x.N;
    Vec A(n * n, 0);
    s.Akk.assign(n * N, 0);
    s.Aqk.assign(x.c * N, 0);
    for (int r = 0; r < n; r++)
        for (int m = 0; m < r / R * R; m++)
            A[r * n + m] = x.b[r] * x.pair(s, x.k + r * K, r / R, m);
    for (int t = 0; t < x.c; t++)
        for (int m = 0; m < (t + 1) * R; m++)
            s.Aqk[t * N + m] = x.hd.scale * x.pair(s, x.q + t * K, t, m);
    for (int j = 0; j < n; j++)
        for (int r = j; r < n; r++) {
            double sum = r == j;
            for (int m = j; m < r; m++)
                sum -= A[r * n + m] * s.Akk[m * N + j];
            s.Akk[r * N + j] = sum;
        }
}

/* w, u, kg, qg. */
static inline void wy64(const Chunk64 &x, Stages &s) {
    const int K = x.hd.K, V = x.hd.V, R = x.hd.R;
    s.w.assign(x.n * K, 0);
    s.u.assign(x.n * V, 0);
    s.kg.assign(x.n * K, 0);
    s.qg.assign(x.c * K, 0);
    for (int r = 0; r < x.n; r++)
        for (int m = 0; m <= r; m++) {
            for (int i = 0; i < K; i++)
                s.w[r * K + i] +=
                    s.Akk[r * x.N + m] * x.b[m] * x.k[m * K + i] * exp(s.gcum[m / R * K + i]);
            for (int i = 0; i < V; i++)
                s.u[r * V + i] += s.Akk[r * x.N + m] * x.b[m] * x.v[m * V + i];
        }
    for (int r = 0; r < x.n; r++)
        for (int i = 0; i < K; i++)
            s.kg[r * K + i] =
                x.k[r * K + i] * exp(s.gcum[(x.c - 1) * K + i] - s.gcum[r / R * K + i]);
    for (int t = 0; t < x.c; t++)
        for (int i = 0; i < K; i++)
            s.qg[t * K + i] = x.q[t * K + i] * exp(s.gcum[t * K + i]);
}

/* v_new, and S after the chunk. */
static inline void state64(const Chunk64 &x, Stages &s, Vec &S) {
    const int K = x.hd.K, V = x.hd.V;
    s.h = S;
    s.v_new.assign(x.n * V, 0);
    for (int r = 0; r < x.n; r++)
        for (int v = 0; v < V; v++) {
            double sum = s.u[r * V + v];
            for (int i = 0; i < K; i++)
                sum -= s.w[r * K + i] * S[i * V + v];
            s.v_new[r * V + v] = sum;
        }
    for (int i = 0; i < K; i++)
        for (int v = 0; v < V; v++) {
            double sum = exp(s.gcum[(x.c - 1) * K + i]) * S[i * V + v];
            for (int r = 0; r < x.n; r++)
                sum += s.kg[r * K + i] * s.v_new[r * V + v];
            S[i * V + v] = sum;
        }
}

/* Stages of the chunk of tokens [t0, t0+c) of h with state S before it (updated to the state after
 * it). */
static inline Stages chunk64(const Head &h, int64_t t0, int c, Vec &S) {
    const Chunk64 x(h, t0, c);
    Stages s;
    gates64(x, s);
    intra64(x, s);
    wy64(x, s);
    state64(x, s, S);
    return s;
}
#endif
