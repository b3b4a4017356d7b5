/* gpu/tests/test_send.cu - messages between ranks (dpg_options.exchange, payload). The pairs of all
 * ranks are rounded by ref/chunk/payload.h and merged in fp32; states received by an all-gather or
 * a ring have these bits. States of scan and serial are near. A scan multiplies M by M in the
 * format of the chain. The number of sent words is the payload's. A ring has the bits of an
 * all-gather, even if ranks own several parts. A table of one part a rank changes no bit of a scan.
 * Ranks that exchange heads have the bits of one rank. The calls `hand` and all-to-all are also
 * tested by themselves.
 *
 *   test_send [small]      small: one problem, 3 ranks, every second kind of heads, most ranks
 *
 * Exit status 0, 1, or 2 (no device). */
#include "rank.h"
#include "ref/arithmetic/mm.h"
#include "ref/chunk/payload.h"
#include <algorithm>
#include <map>
#include <mutex>

/* ---- words that are sent --------------------------------------------------------------------- */

/* By rank; the communicator's own calls, which count first. */
static std::vector<int64_t> words;
static dpg_comm called;

static dp_status counted_gather(dpg_comm *c, const float *send, float *recv, size_t count,
                                void *stream, dp_err *e) {
    words[c->rank] += count;
    return called.all_gather(c, send, recv, count, stream, e);
}
static dp_status counted_hand(dpg_comm *c, const float *send, float *recv, size_t count, int by,
                              void *stream, dp_err *e) {
    if (send) words[c->rank] += count;
    return called.hand(c, send, recv, count, by, stream, e);
}
static dp_status counted_all_to_all(dpg_comm *c, const float *send, const dpg_piece *gives,
                                    float *recv, const dpg_piece *gets, void *stream, dp_err *e) {
    for (int r = 0; r < c->N; r++)
        words[c->rank] += r == c->rank ? 0 : gives[r].n;
    return called.all_to_all(c, send, gives, recv, gets, stream, e);
}
static void count_words(Comms &comm, int N) {
    called = comm[0];
    for (int r = 0; r < N; r++) {
        comm[r].all_gather = counted_gather;
        comm[r].hand = counted_hand;
        comm[r].all_to_all = counted_all_to_all;
    }
}

/* ---- a run ----------------------------------------------------------------------------------- */

struct Way {
    dp_exchange exchange;
    dp_payload payload;
    bool hops() const { return exchange == DP_EXCHANGE_RING || exchange == DP_EXCHANGE_SERIAL; }
    std::string name() const {
        return text("%s, %s", dp_exchange_names[exchange], dp_payload_names[payload]);
    }
};

/* A run's results, by rank. */
struct Left {
    std::vector<Vec> M, H, S_in, dM, dH, dS_out, outputs;
    std::vector<int64_t> forward, backward; /* words sent */
    explicit Left(int N)
        : M(N), H(N), S_in(N), dM(N), dH(N), dS_out(N), outputs(N), forward(N), backward(N) {}
};

/* Which rank owns which tokens; where sequences begin and end. */
struct Table {
    const char *name;
    std::vector<int64_t> cu, cut;
    std::vector<int> owner;
};

struct Sizes {
    int HV, K, V;
    int64_t tokens; /* of a rank */
    dpg_path path;
    const Table *own; /* NULL: T / N each, one sequence */
    dp_format chain = DP_FP32;
    int64_t state() const { return (int64_t)HV * K * V; }
    int64_t pair() const { return (int64_t)HV * K * (V + K); }
};

/* Numbers of a tensor, the same for whoever asks. */
static Vec numbers_of(const Share &x, int rank) {
    Vec v(x.n);
    uint32_t s = 12345u + 77u * (uint32_t)strlen(x.name) + (unsigned char)x.name[0] +
                 1000u * (x.per_token ? rank : 0);
    bool gate = !strcmp(x.name, "g");
    for (auto &y : v) {
        s = s * 1664525u + 1013904223u;
        double u = (s >> 20) / 4096.;
        y = gate ? -0.0078125 * (1 + (s >> 20) % 4) : (int)(u * 64 - 32) / 32.;
    }
    return v;
}

/* seed: of another problem. */
static void open_rank(Rank &r, const Sizes &z, const Way &w, int rank, int N, int seed = 0) {
    const std::vector<int64_t> cu = z.own ? z.own->cu : std::vector<int64_t>{0, N * z.tokens};
    dpg_problem p = sized(cu, 1, z.HV, z.K, z.V, 1, z.K, DPG_F32);
    p.gate = DP_GATE_LOG;
    if (z.own) p.own = {(int)z.own->owner.size(), 0, z.own->cut.data(), z.own->owner.data()};
    dpg_options o = {};
    o.base = z.path == DPG_PATH_FAST ? DP_BASE_BF16 : DP_BASE_FP32;
    o.chain = z.chain;
    o.path = o.bwd_path = z.path;
    o.backward = 1;
    o.exchange = w.exchange;
    o.payload = w.payload;
    r.open(p, o, rank, N, [&](const Share &x) {
        return r.memory.copy(numbers_of(x, rank + 100 * seed), 0, x.n, x.type);
    });
}

static Vec outputs_of(const Rank &r) {
    Vec all;
    for (const Share &x : r.shares)
        if (x.is_output)
            for (double y : x.per_token ? r.read(x) : Vec())
                all.push_back(y);
    return all;
}

static void run_rank(const Sizes &z, const Way &w, int rank, int N, dpg_comm *c, Left *left) {
    Rank r;
    open_rank(r, z, w, rank, N);
    DP(r.err, r.forward(c));
    DP(r.err, r.wait(c));
    left->forward[rank] = words[rank];
    left->M[rank] = r.stage("M");
    left->H[rank] = r.stage("H");
    left->S_in[rank] = r.stage("S_in");
    words[rank] = 0;
    DP(r.err, r.backward(c));
    DP(r.err, r.wait(c));
    left->backward[rank] = words[rank];
    left->dM[rank] = r.stage("dM");
    left->dH[rank] = r.stage("dH");
    left->dS_out[rank] = r.stage("dS_out");
    left->outputs[rank] = outputs_of(r);
    r.close();
}

static Left run(const Sizes &z, const Way &w, int N) {
    Comms comm(Comms::SHARED, N, 20);
    Left left(N);
    words.assign(N, 0);
    count_words(comm, N);
    on_ranks(N, [&](int r) { run_rank(z, w, r, N, &comm[r], &left); });
    return left;
}

/* ---- micro-batches --------------------------------------------------------------------------- */

/* Problems behind each other: outputs of each on each rank. waits: for each pass, not at the end of
 * all. */
static std::vector<Vec> in_a_row(const Sizes &z, const Way &w, int N, int count, bool waits) {
    Comms comm(Comms::SHARED, N, 20);
    std::vector<Vec> left(N * count);
    on_ranks(N, [&](int rank) {
        std::vector<Rank> r(count);
        dpg_comm *c = &comm[rank];
        for (int i = 0; i < count; i++)
            open_rank(r[i], z, w, rank, N, i);
        for (int i = 0; i < 2 * count; i++) {
            Rank &x = r[i < count ? i : 2 * count - 1 - i];
            DP(x.err, i < count ? x.forward(c) : x.backward(c));
            if (waits || i == 2 * count - 1) DP(x.err, x.wait(c));
        }
        for (int i = 0; i < count; i++)
            DP(r[i].err, r[i].wait(c));
        for (int i = 0; i < count; i++) {
            left[rank * count + i] = outputs_of(r[i]);
            r[i].close();
        }
    });
    return left;
}

/* A rank goes on to the next while others are at this one: the bits of each alone. */
static void micro_batches(const Sizes &z) {
    for (dp_exchange exchange : {DP_EXCHANGE_SERIAL, DP_EXCHANGE_ALLGATHER}) {
        const Way w = {exchange, DP_PAYLOAD_FULL};
        const std::vector<Vec> row = in_a_row(z, w, 3, 3, false), each = in_a_row(z, w, 3, 3, true);
        for (size_t i = 0; i < row.size(); i++)
            fact(!row[i].empty() && same_bits(row[i], each[i]),
                 "%s: rank %zu, micro-batch %zu has other bits behind others",
                 dp_exchange_names[exchange], i / 3, i % 3);
        fact(!same_bits(row[0], row[1]), "micro-batches differ");
    }
    printf("micro-batches behind each other have the bits of each\n");
}

/* ---- what must come -------------------------------------------------------------------------- */

/* S <- M S + H of one head as the kernels add: over k in order, then H. */
static Vec applied(const Sizes &z, const double *M, const double *H, const Vec &S) {
    Vec y(z.K * z.V);
    for (int i = 0; i < z.K; i++)
        for (int v = 0; v < z.V; v++) {
            float sum = 0;
            for (int k = 0; k < z.K; k++)
                sum = fmaf((float)M[i * z.K + k], (float)S[k * z.V + v], sum);
            y[i * z.V + v] = sum + (float)H[i * z.V + v];
        }
    return y;
}

/* The states of a head that the ranks receive, dir 1 forward, -1 backward: of pairs as they arrive,
 * or of states as they do. */
static std::vector<Vec> states_of(const Sizes &z, const Way &w, int N, int dir, int hv,
                                  const std::vector<Vec> &M, const std::vector<Vec> &H) {
    const dp_payload state = dp_payloads[w.payload].state;
    const int64_t KK = (int64_t)z.K * z.K, KV = (int64_t)z.K * z.V;
    std::vector<Vec> in(N);
    Vec S;
    for (int i = 0, r = dir > 0 ? 0 : N - 1; i + 1 < N; i++, r += dir) {
        Vec m(M[r].begin() + hv * KK, M[r].begin() + (hv + 1) * KK);
        Vec h(H[r].begin() + hv * KV, H[r].begin() + (hv + 1) * KV);
        if (!w.hops()) {
            dp_payload_M(w.payload, DP_BASE_FP32, z.K, m.data());
            dp_payload_state(state, KV, h.data());
        }
        S = i ? applied(z, m.data(), h.data(), S) : h;
        if (w.hops()) dp_payload_state(state, KV, S.data());
        in[r + dir] = S;
    }
    return in;
}

static void judge_states(const Sizes &z, const Way &w, int N, int dir, const Left &x) {
    const int64_t KV = (int64_t)z.K * z.V;
    const std::vector<Vec> &got = dir > 0 ? x.S_in : x.dS_out;
    for (int hv = 0; hv < z.HV; hv++) {
        std::vector<Vec> want =
            states_of(z, w, N, dir, hv, dir > 0 ? x.M : x.dM, dir > 0 ? x.H : x.dH);
        for (int r = 0; r < N; r++)
            for (size_t i = 0; i < want[r].size(); i++)
                if (got[r][hv * KV + i] != want[r][i]) {
                    fact(false, "%s, K %d, %d ranks: %s of rank %d, head %d, entry %zu: %a, not %a",
                         w.name().c_str(), z.K, N, dir > 0 ? "S_in" : "dS_out", r, hv, i,
                         got[r][hv * KV + i], want[r][i]);
                    break;
                }
    }
    fact(true, "states");
}

/* Pairs that a rank with so many behind it gives in a scan. */
static int levels_of(int behind) {
    int n = 0;
    for (int d = 1; d < behind; d *= 2)
        n++;
    return n;
}

/* Words of 32 bits that a rank sends of `numbers`. */
static int64_t words_of(const Way &w, int64_t numbers) {
    const dp_payload p = w.hops() ? dp_payloads[w.payload].state : w.payload;
    return numbers * dp_payloads[p].bytes / 4;
}

static void judge_words(const Sizes &z, const Way &w, int N, const Left &x) {
    for (int r = 0; r < N; r++) {
        const int64_t pair = words_of(w, z.pair()), state = words_of(w, z.state()),
                      gates = (int64_t)z.HV * (1 + z.K); /* dA_log, ddt_bias: always fp32 */
        auto sends = [&](int behind) {
            if (w.exchange == DP_EXCHANGE_ALLGATHER) return pair;
            return behind ? (w.hops() ? 0 : levels_of(behind) * pair) + state : 0;
        };
        const int64_t forward = sends(N - 1 - r), backward = gates + sends(r);
        fact(x.forward[r] == forward && x.backward[r] == backward,
             "%s, %d ranks: rank %d sent %lld words forward, %lld backward, not %lld and %lld",
             w.name().c_str(), N, r, (long long)x.forward[r], (long long)x.backward[r],
             (long long)forward, (long long)backward);
    }
}

static void every_way(const Sizes &z, int N) {
    const Left plain = run(z, {DP_EXCHANGE_ALLGATHER, DP_PAYLOAD_FULL}, N);
    for (dp_exchange x : {DP_EXCHANGE_ALLGATHER, DP_EXCHANGE_RING})
        for (int p = 0; p <= DP_PAYLOAD_LESS_I; p++) {
            const Way w = {x, (dp_payload)p};
            const Left y = run(z, w, N);
            judge_states(z, w, N, 1, y);
            judge_states(z, w, N, -1, y);
            judge_words(z, w, N, y);
            const bool same = y.outputs == plain.outputs;
            fact(same == (p <= DP_PAYLOAD_FP32), "%s, K %d, %d ranks: %s bits", w.name().c_str(),
                 z.K, N, same ? "the same" : "other");
        }
    for (dp_exchange x : {DP_EXCHANGE_SCAN, DP_EXCHANGE_SERIAL})
        for (int p = 0; p <= DP_PAYLOAD_LESS_I; p++) {
            const Way w = {x, (dp_payload)p};
            const Left y = run(z, w, N);
            const double off = 16 * N * fmax(0x1p-22, dp_payloads[p].u);
            judge_words(z, w, N, y);
            for (int r = 0; r < N; r++) {
                const Vec &S = y.S_in[r], &dS = y.dS_out[r];
                fact(!r || rel_fro(S, plain.S_in[r]) < off, "%s, %d ranks: S_in of rank %d off %g",
                     w.name().c_str(), N, r, rel_fro(S, plain.S_in[r]));
                fact(r == N - 1 || rel_fro(dS, plain.dS_out[r]) < off,
                     "%s, %d ranks: dS_out of rank %d off %g", w.name().c_str(), N, r,
                     rel_fro(dS, plain.dS_out[r]));
            }
        }
    printf("HV %d K %d V %d, %d ranks: 10 ways compared bit for bit\n", z.HV, z.K, z.V, N);
}

/* ---- M by M in the format of the chain ------------------------------------------------------- */

/* The state of a head that the last of 4 ranks receives. The product of both middle ranks' M is in
 * format f, all else in fp64. Forward: dir = 1, backward: -1. */
static Vec scanned(const Sizes &z, const Left &x, int dir, int hv, dp_format f) {
    const int K = z.K, V = z.V, first = dir > 0 ? 0 : 3, near = first + 2 * dir, far = first + dir;
    const std::vector<Vec> &M = dir > 0 ? x.M : x.dM, &H = dir > 0 ? x.H : x.dH;
    auto m = [&](int r) { return M[r].data() + (int64_t)hv * K * K; };
    auto h = [&](int r) { return H[r].data() + (int64_t)hv * K * V; };
    Vec MM(K * K), S(K * V), T(K * V);
    dp_mm(f, 0, 0, K, K, K, m(near), m(far), MM.data());
    dp_mm(DP_FP64, 0, 0, K, V, K, MM.data(), h(first), S.data());
    dp_mm(DP_FP64, 0, 0, K, V, K, m(near), h(far), T.data());
    for (int i = 0; i < K * V; i++)
        S[i] += T[i] + h(near)[i];
    return S;
}

/* Both directions: the distance of the received states from scanned() in format f. */
static double off_scanned(const Sizes &z, const Left &x, dp_format f) {
    double off = 0;
    for (int dir : {1, -1})
        for (int hv = 0; hv < z.HV; hv++) {
            const Vec &all = dir > 0 ? x.S_in[3] : x.dS_out[0];
            const int64_t n = (int64_t)z.K * z.V;
            const Vec got(all.begin() + hv * n, all.begin() + (hv + 1) * n);
            off = fmax(off, rel_fro(got, scanned(z, x, dir, hv, f)));
        }
    return off;
}

/* Near that of its own format, and not of another of fewer or more bits. */
static void scan_formats() {
    /* two chunks: M of one is rounded to the format as it is. So few that it is not nothing */
    Sizes z = {1, 128, 16, DP_CHUNK + 8, DPG_PATH_SIMPLE};
    const double near = 4e-7; /* sums in another order */
    for (dp_format f : {DP_FP32, DP_TF32X3, DP_TF32, DP_TF32RZ, DP_BF16}) {
        z.chain = f;
        const Left x = run(z, {DP_EXCHANGE_SCAN, DP_PAYLOAD_FULL}, 4);
        for (dp_format g : {DP_FP32, DP_TF32, DP_TF32RZ, DP_BF16}) {
            const bool alike = g == f || (g == DP_FP32 && f == DP_TF32X3);
            const double off = off_scanned(z, x, g);
            fact(alike ? off < near : off > 10 * near,
                 "a scan, chain %s, K %d: %g from products in %s", dp_formats[f].name, z.K, off,
                 dp_formats[g].name);
        }
    }
    printf("HV %d K %d V %d, 4 ranks: a scan multiplies M by M in 5 formats\n", z.HV, z.K, z.V);
}

/* ---- ranks that own several parts ------------------------------------------------------------ */

/* Number of states that rank r sends to others. A part's state is sent if its sequence continues in
 * the next part (dir = 1), or began in the part before. */
static int64_t given(const Table &t, int r, int dir) {
    int64_t n = 0;
    for (size_t i = 0; i + 1 < t.owner.size(); i++) {
        bool inside = true;
        for (int64_t end : t.cu)
            inside &= end != t.cut[i + 1];
        const int from = t.owner[dir > 0 ? i : i + 1], to = t.owner[dir > 0 ? i + 1 : i];
        n += inside && from == r && to != r;
    }
    return n;
}

/* Pairs that rank r gives to others in a scan: at every distance to parts whose sequence goes on,
 * and so far back. */
static int64_t paired(const Table &t, int r, int dir) {
    const int parts = (int)t.owner.size();
    int64_t n = 0;
    for (int d = 1; d < parts; d *= 2)
        for (int i = 0; i < parts; i++) {
            const int from = i - dir * d, first = std::min(from, i), last = std::max(from, i);
            if (from < 0 || from >= parts || t.owner[from] != r || t.owner[i] == r) continue;
            bool one = true; /* no sequence ends from one to the other, nor in the part */
            for (int64_t end : t.cu)
                one &= !(end >= t.cut[first + 1] && end <= t.cut[last]) &&
                       !(end >= t.cut[i] && end <= t.cut[i + 1]);
            n += one;
        }
    return n;
}

static void judge_table(const Sizes &z, const Way &w, int N, const Left &x, const Left &gathered) {
    const bool ring = w.exchange == DP_EXCHANGE_RING, full = w.payload <= DP_PAYLOAD_FP32;
    const double off = 64 * fmax(0x1p-22, dp_payloads[w.payload].u);
    const int64_t gates = (int64_t)z.HV * (1 + z.K), state = words_of(w, z.state()),
                  pairs = w.exchange == DP_EXCHANGE_SCAN ? words_of(w, z.pair()) : 0;
    bool same = true;
    for (int r = 0; r < N; r++) {
        const Vec &a = x.outputs[r], &b = gathered.outputs[r];
        const int64_t forward = given(*z.own, r, 1) * state + pairs * paired(*z.own, r, 1),
                      backward =
                          gates + given(*z.own, r, -1) * state + pairs * paired(*z.own, r, -1);
        same &= a == b;
        fact(a.size() == b.size() && (a.empty() || rel_fro(a, b) < off),
             "%s, %s: outputs of rank %d off", z.own->name, w.name().c_str(), r);
        fact(x.forward[r] == forward && x.backward[r] == backward,
             "%s, %s: rank %d sent %lld words forward, %lld backward, not %lld and %lld",
             z.own->name, w.name().c_str(), r, (long long)x.forward[r], (long long)x.backward[r],
             (long long)forward, (long long)backward);
    }
    if (ring || !full)
        fact(same == full, "%s, %s: %s bits", z.own->name, w.name().c_str(),
             same ? "the same" : "other");
}

static void parts_of_ranks() {
    static const Table tables[] = {
        {"zigzag", {0, 192}, {0, 32, 64, 96, 128, 160, 192}, {0, 1, 2, 2, 1, 0}},
        {"cyclic", {0, 70, 192}, {0, 48, 70, 120, 150, 192}, {0, 1, 2, 0, 1}},
        {"rank 1 has none", {0, 20, 192}, {0, 10, 100, 140, 192}, {2, 2, 0, 2}}};
    for (const Table &t : tables) {
        const Sizes z = {2, 32, 48, 0, DPG_PATH_SIMPLE, &t};
        const Left gathered = run(z, {DP_EXCHANGE_ALLGATHER, DP_PAYLOAD_FULL}, 3);
        for (dp_exchange x : {DP_EXCHANGE_RING, DP_EXCHANGE_SCAN, DP_EXCHANGE_SERIAL})
            for (int p = 0; p <= DP_PAYLOAD_LESS_I; p++) {
                const Way w = {x, (dp_payload)p};
                judge_table(z, w, 3, run(z, w, 3), gathered);
            }
        printf("%s: a ring has the bits of an all-gather\n", t.name);
    }
}

/* A table that says what is so without one: bits and words of a scan are the same. */
static void scan_of_one_part_each() {
    static const Table t = {"one each", {0, 200}, {0, 40, 80, 120, 160, 200}, {0, 1, 2, 3, 4}};
    Sizes z = {2, 32, 48, 40, DPG_PATH_SIMPLE};
    for (dp_payload p : {DP_PAYLOAD_FULL, DP_PAYLOAD_LESS_I}) {
        const Way w = {DP_EXCHANGE_SCAN, p};
        z.own = NULL;
        const Left plain = run(z, w, 5);
        z.own = &t;
        const Left listed = run(z, w, 5);
        fact(listed.outputs == plain.outputs && listed.forward == plain.forward &&
                 listed.backward == plain.backward,
             "%s, one part a rank: other bits or words than without a table", w.name().c_str());
    }
}

/* ---- tokens of all heads against heads of all tokens ----------------------------------------- */

/* A problem whose heads ranks share. */
struct HeadCase {
    const char *name;
    dp_model model;
    int H, HV, R, one_gate, V;
    dpg_dtype type;
    dpg_path path;
    dpg_save save;
    std::vector<int64_t> cu;
    const Table *own; /* NULL: T / N each */
    int grid;         /* its sums are by parts */
};

static dpg_problem problem_of(const HeadCase &x) {
    const int K = x.path == DPG_PATH_FAST ? 64 : 32;
    dpg_problem p = sized(x.cu, x.H, x.HV, K, x.V, x.R, x.one_gate ? 1 : K, x.type);
    p.model = x.model;
    p.gate = DP_GATE_SOFTPLUS;
    p.A_dtype = p.bias_dtype = p.dA_dtype = p.dbias_dtype = x.type;
    if (x.own) p.own = {(int)x.own->owner.size(), x.grid, x.own->cut.data(), x.own->owner.data()};
    return p;
}

static dpg_options options_of(const HeadCase &x) {
    dpg_options o = {};
    o.base = x.path == DPG_PATH_FAST ? DP_BASE_BF16 : DP_BASE_FP32;
    o.chain = DP_FP32;
    o.path = o.bwd_path = x.path;
    o.backward = 1;
    o.save = x.save;
    o.exchange = DP_EXCHANGE_HEADS;
    return o;
}

/* Tokens of a rank, in its order. */
static std::vector<int64_t> tokens_in_order(const dpg_problem &p, int rank, int N) {
    const bool table = p.own.parts;
    std::vector<int64_t> t;
    for (int i = 0; i < (table ? p.own.parts : N); i++)
        for (int64_t x = table ? p.own.cut[i] : p.T / N * i;
             x < (table ? p.own.cut[i + 1] : p.T / N * (i + 1)); x++)
            if ((table ? p.own.owner[i] : i) == rank) t.push_back(x);
    return t;
}

/* Rows of a tensor on a rank: which of all each is, and where it lies there. States are those of
 * sequences that start, or end, on the rank. */
struct Rows {
    std::vector<std::pair<int64_t, int64_t>> at;
    int64_t width; /* words of a row */

    Rows(const dpg_problem &p, const Share &x, const std::vector<int64_t> &tokens) {
        const bool ends = strstr(x.name, "final_state"), states = ends || strstr(x.name, "s0");
        width = x.per_token ? x.per_token : states ? x.n / p.Nseq : x.n;
        for (size_t i = 0; x.per_token && i < tokens.size(); i++)
            at.push_back({tokens[i], i});
        for (int s = 0; states && s < p.Nseq; s++)
            if (p.cu[s] < p.cu[s + 1] &&
                std::count(tokens.begin(), tokens.end(), ends ? p.cu[s + 1] - 1 : p.cu[s]))
                at.push_back({s, s});
        if (!x.per_token && !states) at.push_back({0, 0});
    }
    void take(const Vec &all, Vec *own) const {
        for (auto &row : at)
            std::copy_n(&all[row.first * width], width, &(*own)[row.second * width]);
    }
    void put(const Vec &own, Vec *all) const {
        for (auto &row : at)
            std::copy_n(&own[row.second * width], width, &(*all)[row.first * width]);
    }
};

/* Outputs by name, as one rank has them. */
typedef std::map<std::string, Vec> Outputs;

/* Parts of an input that a rank need not have are NaN. */
static void run_heads(const HeadCase &h, int rank, int N, dpg_comm *c, std::mutex *m,
                      Outputs *out) {
    const dpg_problem p = problem_of(h);
    const std::vector<int64_t> tokens = tokens_in_order(p, rank, N);
    auto whole = [&](const Share &x) { return x.per_token ? p.T * x.per_token : x.n; };
    Rank r;
    r.open(p, options_of(h), rank, N, [&](const Share &x) {
        Share all = x;
        Vec own(x.n, NAN);
        all.n = whole(x);
        Rows(p, x, tokens).take(numbers_of(all, 0), &own);
        return r.memory.copy(own, 0, x.n, x.type);
    });
    DP(r.err, r.forward(c));
    DP(r.err, r.wait(c));
    if (h.save == DPG_SAVE_STATE) r.clear_workspace();
    DP(r.err, r.backward(c));
    DP(r.err, r.wait(c));
    CUDA(cudaStreamSynchronize(r.stream));
    std::lock_guard<std::mutex> lock(*m);
    for (const Share &x : r.shares) {
        if (!x.is_output) continue;
        Vec &all = (*out)[x.name];
        all.resize(whole(x), 0);
        Rows(p, x, tokens).put(r.read(x), &all);
    }
    r.close();
}

static Outputs outputs_of(const HeadCase &h, int N) {
    Outputs out;
    std::mutex m;
    Comms comm(Comms::SHARED, N, 20);
    on_ranks(N, [&](int r) { run_heads(h, r, N, &comm[r], &m, &out); });
    return out;
}

/* The bits of one rank, but of what is added over ranks behind the norm: near, and where it is
 * rounded to bf16, that once. */
static void judge_heads(const HeadCase &h, int N, const Outputs &want) {
    const Outputs got = outputs_of(h, N);
    const double near = h.type == DPG_BF16 ? 2e-4 : 5e-7;
    fact(got.size() > 1, "heads, %s, %d ranks: no outputs", h.name, N);
    for (auto &x : got) {
        const bool added = h.H % N && (x.first == "dq" || x.first == "dk" || x.first == "dlr_b");
        const Vec &one = want.at(x.first);
        fact((added ? rel_fro(x.second, one) < near : x.second == one) && !std::isnan(x.second[0]),
             "heads, %s, %d ranks: %s has other bits than one rank's, by %g", h.name, N,
             x.first.c_str(), rel_fro(x.second, one));
    }
}

/* small: the most ranks of each row alone. */
static void judge_heads(const HeadCase &h, bool small) {
    const Table all_mine = {"", {}, {0, h.cu.back()}, {0}};
    HeadCase alone = h;
    alone.own = h.grid ? &all_mine : NULL;
    const Outputs want = outputs_of(alone, 1);
    for (int N : {4, 3, 2}) {
        if ((h.own ? N != 3 : h.cu.back() % N) || h.HV % N) continue;
        judge_heads(h, N, want);
        if (small) return;
    }
}

/* Every path. */
static void heads_of_ranks(bool small) {
    static const Table zigzag = {"zigzag", {}, {0, 33, 60, 97, 128, 131, 192}, {0, 1, 2, 2, 1, 0}},
                       none = {"rank 1 has none", {}, {0, 10, 101, 140, 192}, {2, 2, 0, 2}},
                       grid = {"grid", {}, {0, 64, 128, 192}, {0, 1, 2}};
    const std::vector<int64_t> whole = {0, 192}, packed = {0, 20, 20, 75, 129, 192},
                               odd = {0, 22, 63};
    const dpg_path simple = DPG_PATH_SIMPLE, fast = DPG_PATH_FAST, token = DPG_PATH_TOKEN;
    const dpg_save state = DPG_SAVE_STATE, all = DPG_SAVE_ALL;
    cudaDeviceProp device;
    CUDA(cudaGetDeviceProperties(&device, 0));
    /* too many for one rank to cut segments (ref/vocabulary/segments.h), few enough for one of 3 */
    const int many = (50 * device.multiProcessorCount / 132 + 3) / 3 * 3;
    const HeadCase rows[] = {
        {"kda", DP_GDN, 12, 12, 1, 0, 32, DPG_F32, simple, state, packed, NULL},
        {"gdn, grouped, bf16", DP_GDN, 12, 24, 1, 1, 32, DPG_BF16, simple, all, packed, NULL},
        {"gdn, a gate of bf16 on odd tokens", DP_GDN, 3, 3, 1, 1, 32, DPG_BF16, simple, state, odd,
         NULL},
        {"mkda, 2 keys", DP_GDN, 12, 12, 2, 0, 32, DPG_F32, simple, state, whole, NULL},
        {"kda, fast", DP_GDN, 6, 12, 1, 0, 64, DPG_BF16, fast, state, packed, NULL},
        {"gdn, fast, all saved", DP_GDN, 6, 6, 1, 1, 128, DPG_BF16, fast, all, packed, NULL},
        {"gdn-2", DP_GDN2, 6, 12, 1, 0, 32, DPG_F32, token, state, packed, NULL},
        {"dplr", DP_DPLR, 6, 6, 1, 0, 32, DPG_F32, token, state, packed, NULL},
        {"one query head", DP_GDN, 1, 12, 1, 0, 32, DPG_F32, simple, state, packed, NULL},
        {"3 query heads, 4 value heads each, 2 keys", DP_GDN, 3, 12, 2, 0, 32, DPG_BF16, simple,
         all, packed, NULL},
        {"a query head, 2 value heads, fast", DP_GDN, 1, 2, 1, 0, 64, DPG_BF16, fast, state, packed,
         NULL},
        {"2 query heads, 3 value heads each, fast", DP_GDN, 2, 6, 1, 1, 64, DPG_BF16, fast, all,
         packed, NULL},
        {"dplr, one query head", DP_DPLR, 1, 6, 1, 0, 32, DPG_BF16, token, state, packed, NULL},
        {"zigzag, one query head", DP_GDN, 1, 6, 1, 0, 32, DPG_F32, simple, state, packed, &zigzag},
        {"zigzag", DP_GDN, 3, 6, 1, 0, 32, DPG_F32, simple, state, packed, &zigzag},
        {"rank 1 has none", DP_GDN, 3, 6, 1, 1, 32, DPG_BF16, simple, state, packed, &none},
        {"a grid", DP_GDN, 3, 6, 1, 0, 32, DPG_F32, simple, state, packed, &grid, 1},
        {"a grid, gdn-2", DP_GDN2, 6, 12, 1, 0, 32, DPG_F32, token, all, packed, &grid, 1},
        {"a grid, many heads, few of a rank", DP_GDN, many, many, 1, 0, 128, DPG_BF16, fast, state,
         whole, &grid, 1}};
    for (const HeadCase &h : rows) {
        const bool left_out = small && (&h - rows) % 2; /* every path, grids and parts remain */
        if (!left_out && (h.path != DPG_PATH_FAST || device.major >= 8)) judge_heads(h, small);
    }
    printf("ranks that exchange heads have the bits of one rank\n");
}

/* ---- what the kernels refuse ----------------------------------------------------------------- */

static void refusals() {
    static const struct {
        Way w;
        int dh_only, HV, grid;
        const char *says;
    } rows[] = {
        {{DP_EXCHANGE_ALLGATHER, DP_PAYLOAD_LOW_RANK}, 0, 1, 0, "payload svd-1e-4: the kernels"},
        {{DP_EXCHANGE_SCAN, DP_PAYLOAD_LOWER_RANK}, 0, 1, 0, "payload svd-1e-2: the kernels"},
        {{DP_EXCHANGE_SCAN, DP_PAYLOAD_FULL}, 1, 1, 0, "exchange scan: sends no pair of which"},
        {{DP_EXCHANGE_HEADS, DP_PAYLOAD_FULL}, 0, 1, 0, "heads: more ranks than value heads"},
        {{DP_EXCHANGE_HEADS, DP_PAYLOAD_FULL}, 0, 3, 0, "heads: the value heads do not divide"},
        {{DP_EXCHANGE_HEADS, DP_PAYLOAD_FULL}, 0, 2, 1, "exchange heads: of a grid, the query"},
        {{DP_EXCHANGE_RING, DP_PAYLOAD_FULL}, 1, 1, 0, "exchange ring: sends no pair of which"}};
    const std::vector<int64_t> cu = {0, 128}, cut = {0, 64, 128};
    const std::vector<int> owner = {0, 1};
    for (auto &x : rows) {
        dpg_problem p = sized(cu, 1, x.HV, 32, 32, 1, 32, DPG_F32);
        if (x.grid) p.own = {2, 1, cut.data(), owner.data()};
        dpg_options o = {};
        o.base = DP_BASE_FP32;
        o.chain = DP_FP32;
        o.backward = 1;
        o.exchange = x.w.exchange;
        o.payload = x.w.payload;
        o.send_dh_only = x.dh_only;
        dpg_plan *plan;
        dp_err e = {DP_OK, ""};
        fact(dpg_plan_create(&plan, &p, &o, 0, 2, &e) == DP_EINPUT && strstr(e.msg, x.says),
             "%s: %s", x.w.name().c_str(), e.msg);
    }
}

/* ---- `hand` by itself ------------------------------------------------------------------------ */

enum { COUNT = 1000 };

/* Every rank gives to rank + by, where there is one, three times from one buffer. */
static void hand_all(dpg_comm *c, int by) {
    Memory memory;
    dp_err e = {DP_OK, ""};
    const int to = c->rank + by, from = c->rank - by;
    const bool gives = to >= 0 && to < c->N, gets = from >= 0 && from < c->N;
    float *send = (float *)memory.filled(COUNT * 4, 0), *recv = (float *)memory.room(COUNT * 4);
    for (int k = 0; k < 3; k++) {
        std::vector<float> x(COUNT, 10.f * k + c->rank);
        CUDA(cudaMemcpy(send, x.data(), COUNT * 4, cudaMemcpyHostToDevice));
        DP(e, c->hand(c, gives ? send : NULL, gets ? recv : NULL, COUNT, by, NULL, &e));
        DP(e, c->wait(c, NULL, &e));
        const Vec y = from_device(recv, gets ? COUNT : 0, DPG_F32);
        for (double v : y)
            if (v != 10 * k + from) {
                fact(false, "by %d, time %d: rank %d got %g", by, k, c->rank, v);
                break;
            }
    }
    fact(true, "by %d", by);
    memory.release();
}

/* Rank 1 is to get data that rank 0 does not send; a rank sends to one that is not there. */
static void wrong_hands(int N) {
    for (int kind = 0; kind < 3; kind++) {
        Comms comm(Comms::SHARED, N, 5);
        on_ranks(N, [&](int r) {
            Memory memory;
            dp_err e = {DP_OK, ""};
            float *x = (float *)memory.filled(COUNT * 4, 0);
            dpg_comm *c = &comm[r];
            const float *send = kind == 1 && r == N - 1 ? x : NULL;
            dp_status st =
                c->hand(c, send, kind == 0 && r == 1 ? x : NULL, COUNT, kind < 2, NULL, &e);
            if (st == DP_OK) st = c->wait(c, NULL, &e);
            const char *says = kind == 0   ? "rank 1 is to get words that rank 0 does not give"
                               : kind == 1 ? "hands over by 1, among"
                                           : "hands over to itself";
            fact(st != DP_OK && strstr(e.msg, says), "wrong %d: rank %d says '%s'", kind, r, e.msg);
            memory.release();
        });
    }
}

/* ---- all-to-alls by themselves --------------------------------------------------------------- */

/* Words that rank `from` gives rank `to`: to some none. */
static size_t length_of(int from, int to) { return (size_t)(37 * from + 11 * to) % 60; }

/* The pieces of rank `rank`, with room between them. */
static std::vector<dpg_piece> pieces_of(int rank, int N, bool gives) {
    std::vector<dpg_piece> x;
    for (int r = 0; r < N; r++)
        x.push_back({(size_t)r * 64 + 3, gives ? length_of(rank, r) : length_of(r, rank)});
    return x;
}

/* Word i of a piece, the k-th time. */
static float word_of(int k, int from, int to, size_t i) {
    return 10000.f * k + 1000 * from + 100 * to + i;
}

/* Every rank gives to every rank, three times from one buffer; what lies between stays. */
static void all_to_all(dpg_comm *c) {
    Memory memory;
    dp_err e = {DP_OK, ""};
    const int N = c->N;
    const std::vector<dpg_piece> gives = pieces_of(c->rank, N, true),
                                 gets = pieces_of(c->rank, N, false);
    float *send = (float *)memory.filled(N * 64 * 4, 0), *recv = (float *)memory.room(N * 64 * 4);
    for (int k = 0; k < 3; k++) {
        std::vector<float> x(N * 64, -1), want(N * 64, -2);
        for (int r = 0; r < N; r++) {
            for (size_t i = 0; i < gives[r].n; i++)
                x[gives[r].at + i] = word_of(k, c->rank, r, i);
            for (size_t i = 0; i < gets[r].n; i++)
                want[gets[r].at + i] = word_of(k, r, c->rank, i);
        }
        CUDA(cudaMemcpy(send, x.data(), N * 64 * 4, cudaMemcpyHostToDevice));
        std::vector<float> blank(N * 64, -2);
        CUDA(cudaMemcpy(recv, blank.data(), N * 64 * 4, cudaMemcpyHostToDevice));
        DP(e, c->all_to_all(c, send, gives.data(), recv, gets.data(), NULL, &e));
        DP(e, c->wait(c, NULL, &e));
        const Vec y = from_device(recv, N * 64, DPG_F32);
        for (int i = 0; i < N * 64; i++)
            if (y[i] != want[i]) {
                fact(false, "all to all, time %d: word %d of rank %d is %g, not %g", k, i, c->rank,
                     y[i], want[i]);
                break;
            }
    }
    fact(true, "all to all");
    memory.release();
}

/* Rank 1 is to get more words than rank 0 sends, and frees its own message as soon as it knows.
 * Rank 2 still copies so many words of rank 0 then that it reaches those of rank 1 later. */
static void wrong_lengths(int N) {
    const size_t many = 1 << 24;
    Comms comm(Comms::SHARED, N, 5);
    on_ranks(N, [&](int r) {
        Memory memory;
        dp_err e = {DP_OK, ""};
        float *x = (float *)memory.filled((2 * N * 64 + many) * 4, 0);
        std::vector<dpg_piece> gives = pieces_of(r, N, true), gets = pieces_of(r, N, false);
        gets[0].n += r == 1;
        if (r == 0) gives[2].n = many;
        if (r == 2) gets[0].n = many;
        dp_status st =
            comm[r].all_to_all(&comm[r], x, gives.data(), x + N * 64, gets.data(), NULL, &e);
        for (dpg_piece &p : gives)
            p.n = 0;
        if (st == DP_OK) st = comm[r].wait(&comm[r], NULL, &e);
        fact(st != DP_OK && strstr(e.msg, "rank 1 is to get 12 words, of which rank 0 gives 11"),
             "rank %d says '%s'", r, e.msg);
        memory.release();
    });
}

int main(int argc, char **argv) {
    const bool small = argc > 1 && !strcmp(argv[1], "small");
    const Sizes simple = {2, 32, 48, 64, DPG_PATH_SIMPLE}, wide = {1, 256, 16, 64, DPG_PATH_SIMPLE};
    setvbuf(stdout, NULL, _IOLBF, 0);
    devices("test_send");
    every_way(simple, 3);
    for (int N : {2, 4, 8})
        if (!small) every_way(simple, N);
    if (!small) every_way(wide, 3);
    micro_batches(simple);
    scan_formats();
    parts_of_ranks();
    scan_of_one_part_each();
    heads_of_ranks(small);
    refusals();
    for (int by : {1, -1, 2}) {
        Comms comm(Comms::SHARED, 4, 20);
        on_ranks(4, [&](int r) { hand_all(&comm[r], by); });
    }
    wrong_hands(3);
    {
        Comms comm(Comms::SHARED, 4, 20);
        on_ranks(4, [&](int r) { all_to_all(&comm[r]); });
    }
    wrong_lengths(3);
    return verdict();
}
