/* gpu/tests/truth64.h - the forward in fp64: results of the whole problem, stages of every rank. */
#ifndef DPG_TRUTH64_H
#define DPG_TRUTH64_H
#include "ref64.h"

typedef std::map<std::string, Vec> StageMap;

struct Truth {
    Vec o, final_state;          /* [T][HV][V], [Nseq][HV][K][V] */
    std::vector<StageMap> stage; /* of a rank; chunk grids restart at rank cuts */
};

static inline Vec identity(int K) {
    Vec m(K * K, 0);
    for (int i = 0; i < K; i++)
        m[i * K + i] = 1;
    return m;
}

/* M of a head: the recurrence on K columns started from I with v = 0. */
static inline Vec m64(Head h) {
    Vec M = identity(h.K);
    h.u.assign(h.T * h.R * h.K, 0);
    h.V = h.K;
    for (int64_t t = 0; t < h.T; t++)
        step64(h, t, M, NULL);
    return M;
}

/* State that a sequence starts from. */
static inline Vec initial64(const Case &c, const Inputs &x, int seq, int hv) {
    int64_t n = (int64_t)c.K * c.V, at = ((int64_t)seq * c.HV + hv) * n;
    return c.s0 ? Vec(&x.s0[at], &x.s0[at] + n) : Vec(n, 0);
}

/* Stages of L tokens in `chunks` chunks, zeros. */
static inline StageMap no_stages(const Case &c, int64_t L, int chunks) {
    const int64_t rows = L * c.HV, keys = rows * c.R, n = DP_CHUNK * c.R, KV = (int64_t)c.K * c.V;
    const struct {
        const char *name;
        int64_t words;
    } stages[] = {{"gcum", rows * c.Kg()}, {"Akk", keys * n},     {"Aqk", rows * n},
                  {"w", keys * c.K},       {"u", keys * c.V},     {"kg", keys * c.K},
                  {"qg", rows * c.K},      {"v_new", keys * c.V}, {"h", chunks * c.HV * KV},
                  {"M", c.HV * c.K * c.K}, {"H", c.HV * KV},      {"S_in", c.HV * KV}};
    StageMap out;
    for (auto &s : stages)
        out[s.name].assign(s.words, 0);
    if (!c.alone()) return out;
    StageMap links; /* chunks of another kind, whose stages are not these */
    for (const char *name : {"M", "H", "S_in"})
        links[name] = out[name];
    return links;
}

/* Stages of `len` tokens of head hv from the rank's token `at` on, to their rows. */
static inline void put_chunk(const Case &c, const Stages &g, int64_t at, int len, int hv,
                             StageMap &out) {
    const int64_t n = DP_CHUNK * c.R;
    const struct {
        const char *name;
        const Vec &x;
        int64_t words, taken; /* of a token in x; of those: what the stage has */
    } rows[] = {{"gcum", g.gcum, c.K, c.Kg()},
                {"Akk", g.Akk, c.R * n, c.R * n},
                {"Aqk", g.Aqk, n, n},
                {"w", g.w, c.R * c.K, c.R * c.K},
                {"u", g.u, c.R * c.V, c.R * c.V},
                {"kg", g.kg, c.R * c.K, c.R * c.K},
                {"qg", g.qg, c.K, c.K},
                {"v_new", g.v_new, c.R * c.V, c.R * c.V}};
    for (auto &r : rows)
        for (int i = 0; i < len; i++)
            std::copy_n(r.x.begin() + i * r.words, r.taken,
                        out[r.name].begin() + ((at + i) * c.HV + hv) * r.taken);
}

/* Tokens [lo, hi) of a sequence that lie on a rank. */
struct Part {
    int seq;
    int64_t lo, hi;
    bool goes_on; /* on the next rank */
    bool came;    /* from a rank before */
    int chunks() const { return (int)((hi - lo + DP_CHUNK - 1) / DP_CHUNK); }
};
static inline std::vector<Part> parts_of(const Case &c, int64_t begin, int64_t end) {
    std::vector<Part> parts;
    for (int s = 0; s + 1 < (int)c.cu.size(); s++) {
        int64_t lo = std::max(c.cu[s], begin), hi = std::min(c.cu[s + 1], end);
        if (lo < hi) parts.push_back({s, lo, hi, c.cu[s + 1] > end, c.cu[s] < begin});
    }
    return parts;
}

/* The element (M, H) of a part that goes on, from state S. M: of a rank that one sequence fills. */
static inline void put_element(const Case &c, const Head &h, const Part &p, bool fills,
                               const Vec &S, int hv, StageMap &out) {
    Vec H = p.came ? Vec(c.K * c.V, 0) : S;
    if (p.came && fills) put(out["M"], (int64_t)hv * c.K * c.K, m64(h));
    for (int64_t t = 0; t < h.T; t++)
        step64(h, t, H, NULL);
    put(out["H"], (int64_t)hv * c.K * c.V, H);
}

/* S_in: the state of each head before the rank's first token. */
static inline StageMap stages64(const Case &c, const Inputs &x, int rank, int N,
                                const std::vector<Vec> &S_in) {
    const int64_t L = c.T() / N, begin = rank * L, KV = (int64_t)c.K * c.V;
    std::vector<Part> parts = parts_of(c, begin, begin + L);
    int chunks = 0;
    for (const Part &p : parts)
        chunks += p.chunks();
    StageMap out = no_stages(c, L, chunks);
    for (int hv = 0; hv < c.HV; hv++) {
        int chunk = 0;
        for (const Part &p : parts) {
            Head h = head_of(c, x, hv, p.lo, p.hi);
            Vec S = p.came ? S_in[hv] : initial64(c, x, p.seq, hv);
            if (p.came) put(out["S_in"], hv * KV, S);
            if (p.goes_on) put_element(c, h, p, parts.size() == 1, S, hv, out);
            for (int64_t t = 0; t < h.T && !c.alone(); t += DP_CHUNK, chunk++) {
                int len = (int)std::min<int64_t>(DP_CHUNK, h.T - t);
                Stages g = chunk64(h, t, len, S);
                put(out["h"], ((int64_t)chunk * c.HV + hv) * KV, g.h);
                put_chunk(c, g, p.lo - begin + t, len, hv, out);
            }
        }
    }
    return out;
}

static inline Truth truth64(const Case &c, const Inputs &x, int N, bool stages) {
    const int64_t L = c.T() / N, KV = (int64_t)c.K * c.V;
    const int sequences = (int)c.cu.size() - 1;
    Truth t;
    t.o.assign(c.T() * c.HV * c.V, 0);
    t.final_state.assign(sequences * c.HV * KV, 0);
    std::vector<std::vector<Vec>> S_in(N, std::vector<Vec>(c.HV));
    for (int hv = 0; hv < c.HV; hv++)
        for (int s = 0; s < sequences; s++) {
            Vec S = initial64(c, x, s, hv), o;
            Head h = head_of(c, x, hv, c.cu[s], c.cu[s + 1]);
            for (int64_t i = 0; i < h.T; i++) {
                int64_t token = c.cu[s] + i;
                if (token % L == 0) S_in[token / L][hv] = S;
                o.clear();
                step64(h, i, S, &o);
                put(t.o, (token * c.HV + hv) * c.V, o);
            }
            put(t.final_state, ((int64_t)s * c.HV + hv) * KV, S);
        }
    t.stage.resize(N);
    for (int r = 0; r < N && stages; r++)
        t.stage[r] = stages64(c, x, r, N, S_in[r]);
    return t;
}
#endif
