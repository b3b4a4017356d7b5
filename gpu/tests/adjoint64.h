/* gpu/tests/adjoint64.h - the gradients in fp64: the adjoint of the step recurrence (math.md d),
 * then through L2 norm, beta and gate. */
#ifndef DPG_ADJOINT64_H
#define DPG_ADJOINT64_H
#include "ref64.h"

typedef std::map<std::string, Vec> Grads;

struct Upstream {
    Vec dout, dstate;
};

static inline Upstream make_upstream(const Case &c) {
    Rng r = {c.seed + 1000};
    Upstream u;
    u.dout.resize(c.T() * c.HV * c.V);
    u.dstate.resize((int64_t)(c.cu.size() - 1) * c.HV * c.K * c.V);
    for (auto &y : u.dout)
        y = as_dtype(r.normal(), c.dtype);
    for (auto &y : u.dstate)
        y = as_dtype(c.s0 ? 0.3 * r.normal() : 0, DPG_F32);
    return u;
}

static inline double sigmoid(double x) { return x < 0 ? exp(x) / (1 + exp(x)) : 1 / (1 + exp(-x)); }

/* Step adjoint of one value head over one sequence, added into g. */
struct Adjoint {
    const Case &c;
    const Inputs &x;
    const Upstream &up;
    Grads &g;
    int hv;
    int64_t first, n; /* tokens */
    Head h;
    std::vector<Vec> S; /* before each token, and at the end */
    Vec G;              /* gradient of the state */

    Adjoint(const Case &c_, const Inputs &x_, const Upstream &up_, Grads &g_, int seq, int hv_)
        : c(c_), x(x_), up(up_), g(g_), hv(hv_), first(c.cu[seq]), n(c.cu[seq + 1] - first),
          h(head_of(c, x, hv, first, first + n)), S(n + 1, Vec(c.K * c.V, 0)) {
        int64_t at = ((int64_t)seq * c.HV + hv) * c.K * c.V;
        if (c.s0) S[0].assign(&x.s0[at], &x.s0[at] + c.K * c.V);
        for (int64_t t = 0; t < n; t++) {
            S[t + 1] = S[t];
            step64(h, t, S[t + 1], NULL);
        }
        G.assign(&up.dstate[at], &up.dstate[at] + c.K * c.V);
        for (int64_t t = n - 1; t >= 0; t--)
            token(t);
        if (n) std::copy(G.begin(), G.end(), g["ds0"].begin() + at);
    }
    /* Row of token t in tensors by value head, by query head. */
    int64_t row(int64_t t) const { return (first + t) * c.HV + hv; }
    int64_t query_row(int64_t t) const { return (first + t) * c.H + hv / (c.HV / c.H); }

    /* G from behind token t to before it. */
    void token(int64_t t) {
        Vec state = S[t], read(c.K * c.V, 0); /* gradient of the state that was read */
        const Token64 y = token64(h, t, state);
        output(t);
        for (int j = h.R - 1; j >= 0; j--)
            key(t, j, y, read);
        if (h.reads == DECAYED64)
            for (int i = 0; i < c.K * c.V; i++)
                G[i] += read[i];
        for (int i = 0; i < c.K; i++)
            gate(t, i, y);
        for (int i = 0; i < c.K * c.V && h.reads == UNDECAYED64; i++)
            G[i] += read[i];
    }
    /* o = scale S' q: into G and dq. */
    void output(int64_t t) {
        const double *q = &h.q[t * c.K], *dO = &up.dout[row(t) * c.V];
        double *dq = &g["dq"][query_row(t) * c.K];
        for (int i = 0; i < c.K; i++)
            for (int v = 0; v < c.V; v++) {
                G[i * c.V + v] += h.scale * q[i] * dO[v];
                dq[i] += h.scale * S[t + 1][i * c.V + v] * dO[v];
            }
    }
    /* S += b k E', E = u - (what it read)' e. */
    void key(int64_t t, int j, const Token64 &y, Vec &read) {
        const int K = c.K, V = c.V;
        const int64_t at = t * h.R + j;
        const double *k = &h.k[at * K], *e = &h.e[at * K], *E = &y.E[j * V], b = h.b[at];
        Vec dk(K, 0), de(K, 0), du(V, 0), less(V);
        double db = 0;
        for (int v = 0; v < V; v++) {
            double dX = 0;
            for (int i = 0; i < K; i++)
                dX += k[i] * G[i * V + v];
            du[v] = b * dX;
            less[v] = -du[v];
            db += E[v] * dX;
        }
        for (int i = 0; i < K; i++)
            for (int v = 0; v < V; v++) {
                dk[i] += b * E[v] * G[i * V + v];
                de[i] -= du[v] * y.read_by(j)[i * V + v];
            }
        add_outer(h.reads == IN_TURN64 ? G : read, e, less.data(), K, V);
        to_inputs(t, j, dk, de, du, db);
    }
    static void add(Vec &to, int64_t row, const Vec &x) {
        for (size_t i = 0; i < x.size(); i++)
            to[row * x.size() + i] += x[i];
    }
    static Vec product(const Vec &of, int64_t row, const Vec &x) {
        Vec y = x;
        for (size_t i = 0; i < x.size(); i++)
            y[i] *= of[row * x.size() + i];
        return y;
    }
    /* Gradients of what key j writes, erases, of its values, of its strength (keys64). */
    void to_inputs(int64_t t, int j, const Vec &dk, const Vec &de, const Vec &du, double db) {
        const bool factor = c.model == DP_DPLR && j == 0;
        const int64_t of = t * h.R + j, given = c.model == DP_DPLR ? 0 : j;
        if (factor) {
            add(g["dlr_b"], query_row(t), dk);
            add(g["dlr_a"], row(t), product(Vec(c.K, -1), 0, de));
            return;
        }
        add(g["dk"], query_row(t) * c.R + given, dk);
        if (c.model != DP_GDN2) add(g["dv"], row(t) * c.R + given, du);
        if (c.by_beta()) {
            double s = sigmoid(x.beta[row(t) * c.R + j]);
            add(g["dk"], query_row(t) * c.R + j, de);
            g["dbeta"][row(t) * c.R + j] =
                db *
                (c.beta == DP_BETA_PLAIN ? 1 : (c.beta == DP_BETA_SIGMOID ? 1 : 2) * s * (1 - s));
        }
        if (c.model != DP_GDN2) return;
        add(g["dv"], row(t), product(x.write, row(t), du));
        add(g["dwrite"], row(t), product(x.v, row(t), du));
        add(g["dk"], query_row(t), product(x.erase, row(t), de));
        add(g["derase"], row(t), product(h.k, of, de));
    }
    /* S decayed by exp(g): into G and dg, through the gate. */
    void gate(int64_t t, int i, const Token64 &y) {
        double d = 0;
        for (int v = 0; v < c.V; v++) {
            d += G[i * c.V + v] * y.decayed[i * c.V + v];
            G[i * c.V + v] *= exp(h.g[t * c.K + i]);
        }
        raw_gate(t, i, d);
    }
    /* d: gradient of the log gate of channel i. */
    void raw_gate(int64_t t, int i, double d) {
        const int Kg = c.Kg(), gi = Kg == 1 ? 0 : i;
        int64_t at = row(t) * Kg + gi;
        double y = x.g[at] + x.dt_bias[hv * Kg + gi], a = exp(x.A_log[hv]), s = sigmoid(a * y);
        double raw = c.gate == DP_GATE_LOG        ? d
                     : c.gate == DP_GATE_SOFTPLUS ? -d * a * sigmoid(y)
                                                  : d * x.lb * s * (1 - s) * a;
        g["dg"][at] += raw;
        if (c.gate == DP_GATE_LOG) return;
        g["ddt_bias"][hv * Kg + gi] += raw;
        g["dA_log"][hv] += c.gate == DP_GATE_SOFTPLUS ? d * h.g[t * c.K + i] : raw * y;
    }
};

/* dx = (dy - y <y, dy>) / norm of every row of K, y the normalised row. */
static inline void norm_bwd(const Vec &x, int K, Vec &dy) {
    for (size_t r = 0; r < x.size(); r += K) {
        double ss = DP_L2_EPS, dot = 0;
        for (int i = 0; i < K; i++) {
            ss += x[r + i] * x[r + i];
            dot += x[r + i] * dy[r + i];
        }
        for (int i = 0; i < K; i++)
            dy[r + i] = (dy[r + i] - x[r + i] * dot / ss) / sqrt(ss);
    }
}

static inline Grads gradients64(const Case &c, const Inputs &x, const Upstream &up) {
    int64_t T = c.T(), HV = c.HV, Kg = c.Kg();
    Grads g;
    g["dq"].assign(T * c.H * c.K, 0);
    g["dk"].assign(T * c.H * c.R * c.K, 0);
    g["dv"].assign(T * HV * c.R * c.V, 0);
    g["dg"].assign(T * HV * Kg, 0);
    if (c.by_beta()) g["dbeta"].assign(T * HV * c.R, 0);
    if (c.model == DP_GDN2) {
        g["derase"].assign(T * HV * c.K, 0);
        g["dwrite"].assign(T * HV * c.V, 0);
    }
    if (c.model == DP_DPLR) {
        g["dlr_a"].assign(T * HV * c.K, 0);
        g["dlr_b"].assign(T * c.H * c.K, 0);
    }
    g["dA_log"].assign(HV, 0);
    g["ddt_bias"].assign(HV * Kg, 0);
    /* sequences without tokens belong to no rank: left out on both sides */
    g["ds0"].assign(up.dstate.size(), 0);
    for (size_t s = 0; s + 1 < c.cu.size(); s++)
        for (int hv = 0; hv < HV; hv++)
            Adjoint(c, x, up, g, (int)s, hv);
    if (c.l2norm) {
        norm_bwd(x.q, c.K, g["dq"]);
        norm_bwd(x.k, c.K, g["dk"]);
        if (c.model == DP_DPLR) norm_bwd(x.lr_b, c.K, g["dlr_b"]);
    }
    return g;
}
#endif
