/* gpu/tests/test_gpu_bwd.cu - the backward on the device: fp64 adjoint of the step recurrence
 * (math.md d), and what must hold bit for bit.
 *
 *   all [TIMES]    gradients of every case on 1, 2, 3, 4, 8 ranks of one GPU, every way; untouched
 *                  heads; TIMES repeats (100); graph
 *   small [CASE]   few small cases of every kernel, for compute-sanitizer
 *   cases PATTERN  the cases of `all` whose names match (fast*x*), alone
 *   token [TIMES]  recurrences that go token by token alone: all ranks, untouched heads, graph,
 *                  TIMES repeats (100)
 *   segments       three ranks and more whose sequences are cut in segments
 *   forms          both forms of dg alone
 *   graph          forward and backward of one rank in a CUDA graph
 *   nccl N [TIMES] N GPUs: the bits of N ranks on one GPU; TIMES repeats (100) of the fast path; a
 *                  rank that dies before the backward
 *   replay N [TIMES] N GPUs: forward and backward of each rank a graph, states through windows,
 *                  gathers of NCCL; TIMES replays (10) with the bits of the plain run
 *   time [N]       milliseconds of every step; N > 1: on N GPUs, dM and dH exchanged against dH
 *                  alone
 *
 * Exit status 0, 1, or 2 (no device). */
#include "adjoint64.h"
#include "case_rank.h"
#include "graph.h"
#include <array>
#include <fnmatch.h>
#include <pthread.h>

static std::map<std::string, double> worst; /* "policy tensor" -> worst relative error */
static bool token_alone;                    /* the recurrences of the token path alone */

static std::vector<Case> chosen(bool small) {
    std::vector<Case> taken;
    for (const Case &c : cases('b', small))
        if (!token_alone || c.alone()) taken.push_back(c);
    return taken;
}

struct Policy {
    dp_base base;
    dp_format chain;
    dpg_path path, bwd;
    int dh_only, pair_dg;
    dpg_save save;
    dpg_chain_how how = DPG_CHAIN_DENSE;
};

static std::string name_of(const Policy &p) {
    return std::string(p.base == DP_BASE_FP32 ? "fp32" : "bf16") +
           (p.path == DPG_PATH_FAST    ? "/fast"
            : p.path == DPG_PATH_TOKEN ? "/token"
                                       : "/simple") +
           (p.bwd == DPG_PATH_SIMPLE ? "/simple" : "/auto") + (p.dh_only ? "/dh-only" : "") +
           (p.pair_dg ? "/pair-dg" : "") + (p.save == DPG_SAVE_ALL ? "/save-all" : "") +
           (p.how == DPG_CHAIN_AUGMENTED ? "/segments" : "");
}

/* The first policy is the one that the others are compared with. */
static std::vector<Policy> policies(const Case &c) {
    const dpg_path S = DPG_PATH_SIMPLE, A = DPG_PATH_AUTO, F = DPG_PATH_FAST;
    const dpg_path K = DPG_PATH_TOKEN;
    if (c.alone())
        return {{DP_BASE_FP32, DP_FP32, K, K, 0, 0, DPG_SAVE_STATE},
                {DP_BASE_FP32, DP_FP32, K, K, 0, 0, DPG_SAVE_ALL},
                {DP_BASE_FP32, DP_FP32, K, K, 1, 0, DPG_SAVE_STATE}};
    std::vector<Policy> p = {{DP_BASE_FP32, DP_FP32, S, S, 0, 0, DPG_SAVE_STATE},
                             {DP_BASE_FP32, DP_FP32, S, S, 0, 0, DPG_SAVE_ALL},
                             {DP_BASE_FP32, DP_FP32, S, S, 1, 0, DPG_SAVE_STATE},
                             {DP_BASE_FP32, DP_FP32, S, S, 0, 1, DPG_SAVE_STATE},
                             {DP_BASE_BF16, DP_TF32X3, S, S, 1, 1, DPG_SAVE_ALL}};
    if (fast_widths(c))
        for (dpg_chain_how how : {DPG_CHAIN_AUGMENTED, DPG_CHAIN_DENSE})
            for (int dh_only : {0, 1})
                p.push_back({DP_BASE_BF16, DP_FP32, F, A, dh_only, 0, DPG_SAVE_STATE, how});
    return p;
}
/* dH alone over segments, where the case takes the fast path. */
static Policy over_segments(const Case &c) { return policies(c)[6]; }

/* ---- on the device --------------------------------------------------------------------------- */

struct GradRank : Rank {
    Grads out;
    Vec M, dM; /* of a rank in the middle of its only sequence */
    int segments = 0, other = 0;

    void setup(const Case &c, const Inputs &x, const Upstream &up, const Policy &p, int rank,
               int N) {
        dpg_options o = {p.base, p.chain, p.path, p.how,     0,        0,
                         1,      p.bwd,   p.save, p.dh_only, p.pair_dg};
        open(problem_of(c, x, DPG_F32), o, rank, N, [&](const Share &s) {
            const Vec *y = !strcmp(s.name, "do")             ? &up.dout
                           : !strcmp(s.name, "dfinal_state") ? &up.dstate
                                                             : input_of(x, s.name);
            return copy_share(memory, *y, s);
        });
    }
    void collect() {
        for (const Share &s : shares)
            if (s.is_output) out[s.name] = read(s);
    }
};

static bool same_bits(const Grads &a, const Grads &b) {
    for (auto &y : a)
        if (!same_bits(y.second, b.at(y.first))) return false;
    return true;
}

/* Options of a run:
 *   comm    of N ranks; NULL: shared on device 0
 *   die     this rank runs its forward but never reaches the backward's gather; -1: none
 *   times   runs in the same memory; Rank.other counts runs whose bits differ from the first */
struct How {
    dpg_comm *comm = NULL;
    int die = -1, times = 1;
};

/* Shared by the ranks of a run. */
struct Run {
    const Case &c;
    const Inputs &x;
    const Upstream &up;
    const Policy &p;
    int N;
    How how;
    std::vector<GradRank> ranks;

    bool in_the_middle(int r) const { return c.cu.size() == 2 && r > 0 && r < N - 1; }
    /* Forward and backward, the workspace overwritten in between unless it is to be kept. */
    void once(int r) {
        GradRank &k = ranks[r];
        dpg_comm *comm = &how.comm[r];
        if (k.forward(comm) != DP_OK || k.wait(comm) != DP_OK || r == how.die) return;
        k.segments = dpg_plan_segments(k.plan);
        if (in_the_middle(r)) k.M = k.stage("M");
        if (p.save == DPG_SAVE_STATE) k.clear_workspace();
        if (k.backward(comm) != DP_OK || k.wait(comm) != DP_OK) return;
        if (in_the_middle(r) && !p.dh_only) k.dM = k.stage("dM");
        k.collect();
    }
    void rank(int r) {
        GradRank &k = ranks[r];
        Grads first;
        CUDA(cudaSetDevice(how.comm[r].device));
        k.setup(c, x, up, p, r, N);
        for (int i = 0; i < how.times && k.st == DP_OK; i++) {
            once(r);
            if (k.st != DP_OK || r == how.die) return;
            if (!i) first = k.out;
            k.other += !same_bits(first, k.out);
        }
    }
};

static std::vector<GradRank> run(const Case &c, const Inputs &x, const Upstream &up,
                                 const Policy &p, int N, How how = How()) {
    if (!how.comm) {
        Comms own(Comms::SHARED, N, how.die < 0 ? 30 : 3);
        how.comm = own.data();
        return run(c, x, up, p, N, how);
    }
    Run all = {c, x, up, p, N, how, std::vector<GradRank>(N)};
    on_ranks(N, [&](int r) { all.rank(r); });
    for (int r = 0; r < N; r++) {
        CUDA(cudaSetDevice(how.comm[r].device));
        all.ranks[r].close();
    }
    return std::move(all.ranks);
}

/* States of every sequence from the rank where it ends (starts: ds0). */
static void join_states(const Case &c, const std::vector<GradRank> &ranks, const char *name,
                        Vec &to) {
    int64_t L = c.T() / (int64_t)ranks.size(), kv = (int64_t)c.HV * c.K * c.V;
    bool starts = !strcmp(name, "ds0");
    for (size_t s = 0; s + 1 < c.cu.size(); s++) {
        if (c.cu[s] == c.cu[s + 1]) continue;
        const Vec &from = ranks[(starts ? c.cu[s] : c.cu[s + 1] - 1) / L].out.at(name);
        std::copy_n(from.begin() + s * kv, kv, to.begin() + s * kv);
    }
}

/* The whole tensors: tokens joined, sums from rank 0. */
static Grads join(const Case &c, const std::vector<GradRank> &ranks) {
    Grads g;
    for (const GradRank &r : ranks)
        if (r.st != DP_OK) {
            printf("rank %d: %s\n", (int)(&r - ranks.data()), r.err.msg);
            exit(1);
        }
    for (const Share &s : ranks[0].shares) {
        if (!s.is_output) continue;
        Vec &to = g[s.name];
        if (s.per_token)
            for (const GradRank &r : ranks)
                to.insert(to.end(), r.out.at(s.name).begin(), r.out.at(s.name).end());
        else if (is_one_of(s.name, {"dA_log", "ddt_bias"}))
            to = ranks[0].out.at(s.name);
        else {
            to.assign(s.n, 0);
            join_states(c, ranks, s.name, to);
        }
    }
    return g;
}

/* ---- against fp64 ---------------------------------------------------------------------------- */

/* Coarse first-order bounds of relative Frobenius errors for these well-conditioned cases; the
 * harness judges row by row with derived ones.
 *   fp32   about a dozen sums over K, V, C R terms follow each other; exponents add 2^-24 |gcum|
 *          (<= 320). Cancellation in dg and its sums amplifies errors by at most 8 here
 *   bf16   a gradient has at most sixteen roundings of 2^-8 */
static double bound_of(const Case &c, const Policy &p, const std::string &tensor) {
    double u = 0x1p-24, b = (12.0 * (c.K + c.V + DP_CHUNK * c.R) + 320) * u,
           cancel = tensor == "dg" || tensor == "dA_log" || tensor == "ddt_bias" ? 8 : 1;
    return cancel * (b + (p.base == DP_BASE_BF16 ? 16 * 0x1p-8 / 2 : 0));
}

static void compare(const Case &c, const Policy &p, int N, const Grads &want, const Grads &got) {
    for (auto &y : want) {
        std::string key = name_of(p) + " " + y.first;
        double err = rel_fro(got.at(y.first), y.second), bound = bound_of(c, p, y.first);
        worst[key] = std::max(worst[key], std::isfinite(err) ? err : INFINITY);
        fact(err <= bound, "%s ranks=%d %s: %.3e > %.3e", c.name, N, key.c_str(), err, bound);
    }
}

/* Results that must have the same bits as in the first policy. */
static void compare_bits(const Case &c, const Policy &p, int N, const Grads &plain,
                         const Grads &got) {
    if (p.base != DP_BASE_FP32) return;
    if (p.save == DPG_SAVE_ALL)
        fact(same_bits(plain, got), "%s: nothing recomputed, the same bits", c.name);
    else if (p.pair_dg)
        for (const char *y : {"dq", "dk", "dv", "dbeta", "ds0"})
            fact(plain.at(y) == got.at(y), "%s: pair sums leave %s alone", c.name, y);
    else if (p.dh_only && N <= 2)
        fact(same_bits(plain, got), "%s: dH alone on two ranks, the same bits", c.name);
}

static void test_cases(bool small, const char *only) {
    for (const Case &c : chosen(small)) {
        if (only && fnmatch(only, c.name, 0)) continue;
        Inputs x = make_inputs(c);
        Upstream up = make_upstream(c);
        Grads want = gradients64(c, x, up);
        for (int N : small ? std::vector<int>{1, 3} : std::vector<int>{1, 2, 3, 4, 8}) {
            if (c.T() % N) continue;
            Grads plain;
            for (const Policy &p : policies(c)) {
                Grads got = join(c, run(c, x, up, p, N));
                compare(c, p, N, want, got);
                if (plain.empty())
                    plain = got;
                else
                    compare_bits(c, p, N, plain, got);
            }
        }
    }
}

/* ---- segments -------------------------------------------------------------------------------- */

/* dM of a rank and M' of its forward are products of the same factors, each fp32-grade: within 1e-5
 * of fp64 (test_gpu augmented). Where |M|^2 had vanished nothing would be compared. */
static const double DM_IS_M = 2 * 1e-5, M_MATTERS = 1e-4;

static void compare_dm(const Case &c, const GradRank &rank, const std::string &where) {
    Vec want = rank.M;
    const int K = c.K;
    for (int h = 0; h < c.HV; h++)
        for (int i = 0; i < K; i++)
            for (int j = 0; j < K; j++)
                want[(h * K + i) * K + j] = rank.M[(h * K + j) * K + i];
    Distance d(rank.dM, want);
    printf("%s: |M| %.2f, dM - M' %.1e\n", where.c_str(), d.size, d.off / d.size);
    fact(d.size * d.size > M_MATTERS, "%s: M has vanished", where.c_str());
    fact(d.off < DM_IS_M * d.size, "%s: dM is not M'", where.c_str());
}

/* One case on N ranks. Returns whether its sequence was cut. */
static bool segments_of_case(const Case &c, int N) {
    Inputs x = make_inputs(c);
    Upstream up = make_upstream(c);
    Policy whole = {DP_BASE_BF16, DP_FP32, DPG_PATH_FAST, DPG_PATH_AUTO, 0, 0, DPG_SAVE_STATE};
    Policy segments = whole;
    segments.how = DPG_CHAIN_AUGMENTED;
    Policy dh_only = segments;
    dh_only.dh_only = 1;
    std::vector<GradRank> ranks = run(c, x, up, segments, N);
    Grads want = join(c, run(c, x, up, whole, N)), full = join(c, ranks),
          half = join(c, run(c, x, up, dh_only, N));
    std::string where = text("%s ranks=%d segments=%d", c.name, N, ranks[1].segments);
    for (int r = 1; r < N - 1; r++)
        compare_dm(c, ranks[r], where + " rank " + std::to_string(r));
    for (auto &y : want) {
        double a = rel_fro(full.at(y.first), y.second), b = rel_fro(half.at(y.first), y.second);
        double most = 2 * bound_of(c, segments, y.first); /* each within its own of the truth */
        printf("%s %s: full exchange %.1e, dH only %.1e from the dense chain\n", where.c_str(),
               y.first.c_str(), a, b);
        fact(a <= most && b <= most, "%s %s differs from the dense chain's", where.c_str(),
             y.first.c_str());
    }
    return ranks[1].segments > 1;
}

/* Segments: the forward cuts a rank's sequence in parts, and dM is a chain over all of its chunks.
 * If M of a rank matters, as for every middle rank, dM is M' of the forward. The gradients are
 * those of the whole chain. */
static void test_segments() {
    for (const Case &c : chosen(false)) {
        if (!strstr(c.name, "segments")) continue;
        int cut = 0;
        for (int N : {3, 4, 6})
            cut += segments_of_case(c, N);
        fact(cut > 0, "%s: nothing was cut", c.name);
    }
}

/* ---- what must not reach each other ---------------------------------------------------------- */

/* Entries of heads >= 1 of a tensor whose rows of `per` words belong to `heads` heads
 * cyclically. */
static void change_other_heads(Vec &y, int64_t heads, int64_t per, double shift) {
    for (size_t z = 0; z < y.size(); z++)
        if (z / per % heads) y[z] = as_dtype(y[z] * 0.75 - shift, DPG_BF16);
}

/* Entries of head 0 that differ; any that do at all set `moved`. */
static int64_t changed_of_head0(const Vec &a, const Vec &b, int64_t heads, int64_t per,
                                bool *moved) {
    int64_t bad = 0;
    for (size_t z = 0; z < a.size(); z++) {
        bool differs = memcmp(&a[z], &b[z], sizeof(double));
        *moved |= differs;
        bad += differs && !(z / per % heads);
    }
    return bad;
}

/* Every input of heads >= 1 changed, one after another: results of head 0 keep their bits, in both
 * directions. They do not if a gate of head 0 is read for all heads, or a head offset is missing.
 * With more value heads than query heads dq and dk of head 0 are sums over the group and are left
 * out. */
static void heads_of_case(const Case &c, const Policy &p) {
    const int64_t KV = (int64_t)c.K * c.V;
    Inputs x = make_inputs(c);
    Upstream up = make_upstream(c);
    Grads before = join(c, run(c, x, up, p, 3));
    const struct {
        const char *name;
        Vec &y;
        int64_t heads, per;
        double shift;
    } inputs[] = {{"q", x.q, c.H, c.K, 0.1},
                  {"k", x.k, c.H, c.R * c.K, 0.1},
                  {"v", x.v, c.HV, c.R * c.V, 0.1},
                  {"g", x.g, c.HV, c.Kg(), 0},
                  {"beta", x.beta, c.HV, c.R, 0},
                  {"erase", x.erase, c.HV, c.K, 0},
                  {"write", x.write, c.HV, c.V, 0.1},
                  {"lr_a", x.lr_a, c.HV, c.K, 0},
                  {"lr_b", x.lr_b, c.H, c.K, 0.1},
                  {"A_log", x.A_log, c.HV, 1, 0.1},
                  {"dt_bias", x.dt_bias, c.HV, c.Kg(), 0.1},
                  {"s0", x.s0, c.HV, KV, 0.1},
                  {"do", up.dout, c.HV, c.V, 0.1},
                  {"dstate", up.dstate, c.HV, KV, 0.1}};
    const struct {
        const char *name;
        int64_t heads, per;
    } outputs[] = {{"o", c.HV, c.V},        {"dq", c.H, c.K},          {"dk", c.H, c.R * c.K},
                   {"dv", c.HV, c.R * c.V}, {"dg", c.HV, c.Kg()},      {"dbeta", c.HV, c.R},
                   {"derase", c.HV, c.K},   {"dwrite", c.HV, c.V},     {"dlr_a", c.HV, c.K},
                   {"dlr_b", c.H, c.K},     {"final_state", c.HV, KV}, {"ds0", c.HV, KV},
                   {"dA_log", c.HV, 1},     {"ddt_bias", c.HV, c.Kg()}};
    for (auto &i : inputs) {
        if (i.y.empty() || i.heads < 2) continue;
        Vec keep = i.y;
        bool moved = false;
        change_other_heads(i.y, i.heads, i.per, i.shift);
        Grads after = join(c, run(c, x, up, p, 3));
        i.y = keep;
        for (auto &o : outputs) {
            if (!before.count(o.name)) continue;
            int64_t bad =
                changed_of_head0(before.at(o.name), after.at(o.name), o.heads, o.per, &moved);
            if (o.heads == c.HV)
                fact(!bad, "%s %s: %s of heads >= 1 changes %s of head 0", c.name,
                     name_of(p).c_str(), i.name, o.name);
        }
        bool unread = c.gate == DP_GATE_LOG && is_one_of(i.name, {"A_log", "dt_bias"});
        fact(moved || unread, "%s: %s changed and nothing moved", c.name, i.name);
    }
}

static void test_heads() {
    for (const Case &c : chosen(false))
        if (c.HV >= 2 && c.T() % 3 == 0)
            for (const Policy &p : {policies(c)[0], policies(c).back()})
                heads_of_case(c, p);
}

/* ---- both forms of dg ------------------------------------------------------------------------ */

/* Pair sums: 99% of the entries within 1e-4 of themselves, less than bound_of allows a whole tensor
 * in which nothing cancels (1.6e-4 here). The reverse cumulative sum leaves u of the largest entry
 * in all of them: 1.0 where pair sums leave 5.9e-5. */
static const double PAIR_SUMS_99 = 1e-4, PAIR_SUMS_GAIN = 100;

/* Relative error of dg, entry by entry, sorted. */
static Vec dg_errors(const Case &c, const Inputs &x, const Upstream &up, const Vec &want,
                     int pair_dg) {
    Policy p = {DP_BASE_FP32, DP_FP32,       DPG_PATH_SIMPLE, DPG_PATH_SIMPLE, 0,
                pair_dg,      DPG_SAVE_STATE};
    Vec got = join(c, run(c, x, up, p, 1)).at("dg"), rel;
    for (size_t i = 0; i < want.size(); i++)
        rel.push_back(want[i] == 0 ? got[i] != 0 : fabs(got[i] - want[i]) / fabs(want[i]));
    std::sort(rel.begin(), rel.end());
    printf("dg by %s: whole tensor %.1e, entry by entry median %.1e, 99%% %.1e\n",
           pair_dg ? "pair sums" : "reverse cumsum", rel_fro(got, want), rel[rel.size() / 2],
           rel[rel.size() * 99 / 100]);
    return rel;
}

/* Both forms of dg (math.md f) where decay is strong: entries that are small beside their
 * neighbours keep their digits in the pair sums alone. */
static void test_dg_forms() {
    Case c = {"kda_strong",  1, 2, 64,      64, 1, 0, {0, 192}, DP_GATE_LOG, 3,
              DP_BETA_PLAIN, 1, 0, DPG_F32, 0,  51};
    Inputs x = make_inputs(c);
    Upstream up = make_upstream(c);
    Vec want = gradients64(c, x, up).at("dg");
    size_t at = want.size() * 99 / 100;
    double sums = dg_errors(c, x, up, want, 0)[at], pairs = dg_errors(c, x, up, want, 1)[at];
    fact(pairs < PAIR_SUMS_99, "pair sums keep small entries of dg: 99%% below 1e-4");
    fact(pairs < sums / PAIR_SUMS_GAIN, "pair sums gain a factor 100 at 99%%");
}

/* ---- repeats, graphs, a rank that dies ------------------------------------------------------- */

/* Runs of `times` on N ranks that have other bits than the first. */
static int others(const Case &c, const Policy &p, int N, dpg_comm *comm, int times) {
    How how;
    how.comm = comm;
    how.times = times;
    int n = 0;
    for (const GradRank &r : run(c, make_inputs(c), make_upstream(c), p, N, how)) {
        fact(r.st == DP_OK, "%s %s: %s", c.name, name_of(p).c_str(), r.err.msg);
        n = std::max(n, r.other);
    }
    return n;
}

static void test_repeat(int times) {
    for (const Case &c : chosen(true))
        for (const Policy &p : {policies(c)[0], policies(c).back()}) {
            int bad = others(c, p, 4, NULL, times);
            fact(!bad, "%s %s: %d of %d runs have other bits", c.name, name_of(p).c_str(), bad,
                 times);
        }
    printf("repeated %d times\n", times);
}

/* Forward and backward of one rank captured in one graph; its replay gives the bits of the plain
 * run. */
static void test_graph() {
    for (const Case &c : chosen(true)) {
        Inputs x = make_inputs(c);
        Upstream up = make_upstream(c);
        Policy p = policies(c).back();
        std::vector<GradRank> plain = run(c, x, up, p, 1);
        GradRank r;
        r.setup(c, x, up, p, 0, 1);
        run_as_graph(r, [&] {
            if (r.forward(NULL) == DP_OK) r.backward(NULL);
        });
        fact(r.st == DP_OK, "graph capture: %s %s", c.name, r.err.msg);
        r.collect();
        fact(same_bits(r.out, plain[0].out), "graph replay equals the plain run: %s", c.name);
        r.close();
    }
}

static void test_dead_rank(dpg_comm *comm, int N, const char *say) {
    Case c = chosen(true)[0];
    How how;
    how.comm = comm;
    how.die = 1;
    double t0 = seconds();
    std::vector<GradRank> r = run(c, make_inputs(c), make_upstream(c), policies(c)[0], N, how);
    double dt = seconds() - t0;
    for (int i = 0; i < N; i++)
        if (i != how.die)
            fact(r[i].st == DP_EDEVICE && strstr(r[i].err.msg, say),
                 "a rank dead before the backward: rank %d says '%s'", i, r[i].err.msg);
    fact(dt < 10, "a dead rank ends all within 10 s");
    printf("dead before the backward: ended after %.1f s: %s\n", dt, r[0].err.msg);
}

/* Replays of a rank that have other bits than what it does once before, enqueued. */
static int others_replayed(GradRank &k, dpg_comm *comm, int times) {
    Graph graph;
    auto enqueue = [&] {
        if (k.forward(comm) == DP_OK) k.backward(comm);
    };
    enqueue();
    if (k.st != DP_OK || k.wait(comm) != DP_OK) return times;
    k.collect();
    Grads first = k.out;
    graph.capture(k.stream, enqueue);
    for (int i = 0; i < times && k.st == DP_OK; i++) {
        k.clear_outputs();
        graph.launch(k.stream);
        if (k.wait(comm) != DP_OK) break;
        k.collect();
        k.other += !same_bits(first, k.out);
    }
    graph.close();
    return k.other;
}

/* Forward and backward of N ranks on as many devices through windows, replayed. */
static void replay_ranks(const Case &c, const Policy &p, Comms &comm, int N, int times) {
    Inputs x = make_inputs(c);
    Upstream up = make_upstream(c);
    std::vector<GradRank> ranks(N);
    on_ranks(N, [&](int r) {
        GradRank &k = ranks[r];
        CUDA(cudaSetDevice(comm[r].device));
        k.setup(c, x, up, p, r, N);
        DP(k.err, dpg_plan_connect(k.plan, &comm[r], &k.err));
        k.other = others_replayed(k, &comm[r], times);
        k.wait(&comm[r]);
    });
    for (int r = 0; r < N; r++) {
        GradRank &k = ranks[r];
        fact(k.st == DP_OK, "replays: %s %s: %s", c.name, name_of(p).c_str(), k.err.msg);
        fact(dpg_plan_connected(k.plan) == (p.how == DPG_CHAIN_AUGMENTED), "windows: %s %s", c.name,
             name_of(p).c_str());
        fact(!k.other, "rank %d of %s %s: %d of %d replays have other bits", r, c.name,
             name_of(p).c_str(), k.other, times);
        CUDA(cudaSetDevice(comm[r].device));
        k.close();
    }
}

static void test_replay(int N, int times) {
    Comms comm(Comms::NCCL, N, 10);
    for (const Case &c : chosen(false)) {
        if (c.T() % N || !fast_widths(c)) continue;
        Policy segments = over_segments(c), dh_only = segments;
        dh_only.dh_only = !segments.dh_only;
        for (const Policy &p : {segments, dh_only, policies(c).back()})
            replay_ranks(c, p, comm, N, times);
    }
    printf("%d replays on %d devices\n", times, N);
}

/* N ranks on N devices against as many that share one. */
static void nccl_against_shared(const Case &c, Comms &comm, int N) {
    Inputs x = make_inputs(c);
    Upstream up = make_upstream(c);
    How how;
    how.comm = comm.data();
    for (const Policy &p : policies(c)) {
        std::vector<GradRank> a = run(c, x, up, p, N, how), b = run(c, x, up, p, N);
        fact(same_bits(join(c, a), join(c, b)),
             "NCCL ranks equal ranks on one GPU bit for bit: %s %s", c.name, name_of(p).c_str());
        for (int r = 1; r < N; r++)
            for (const char *sum : {"dA_log", "ddt_bias"})
                fact(a[r].out.at(sum) == a[0].out.at(sum), "%s is the same bits on all ranks: %s",
                     sum, c.name);
    }
}

static void test_nccl(int N, int times) {
    double t0 = seconds();
    Comms comm(Comms::NCCL, N, 5);
    printf("%5.1f s  communicator of %d devices\n", seconds() - t0, N);
    for (const Case &c : chosen(false)) {
        if (c.T() % N) continue;
        nccl_against_shared(c, comm, N);
        printf("%5.1f s  %s\n", seconds() - t0, c.name);
    }
    for (const Case &c : chosen(false)) {
        if (c.T() % N || !fast_widths(c)) continue;
        for (const Policy &p : {over_segments(c), policies(c).back()}) {
            int bad = others(c, p, N, comm.data(), times);
            fact(!bad, "NCCL %s %s: %d of %d runs have other bits", c.name, name_of(p).c_str(), bad,
                 times);
        }
        printf("%5.1f s  %s repeated\n", seconds() - t0, c.name);
    }
    printf("repeated %d times over NCCL\n", times);
    test_dead_rank(comm.data(), N, "ncclAllGather");
}

/* ---- time ------------------------------------------------------------------------------------ */

enum { NSTEPS = 8, ROUNDS = 5 };
static const struct {
    const char *name;
    int bit;
} steps[NSTEPS] = {
    {"recompute", DPG_BWD_RECOMPUTE}, {"dAv", DPG_BWD_DAV},     {"pre", DPG_BWD_PRE},
    {"gather", DPG_BWD_GATHER},       {"merge", DPG_BWD_MERGE}, {"state", DPG_BWD_STATE},
    {"intra", DPG_BWD_INTRA},         {"gate", DPG_BWD_GATE}};
typedef std::array<double, NSTEPS> StepTimes;

/* Arrives with the others, so that a step starts on all ranks at once. */
struct Meeting {
    pthread_barrier_t b;
    explicit Meeting(int n) { pthread_barrier_init(&b, NULL, n); }
    ~Meeting() { pthread_barrier_destroy(&b); }
    void operator()() { pthread_barrier_wait(&b); }
};

/* Medians over ROUNDS after one. */
static StepTimes time_rank(GradRank &r, dpg_comm *comm, Meeting &meet) {
    std::array<std::vector<double>, NSTEPS> all;
    StepTimes ms;
    r.forward(comm);
    for (int i = 0; i <= ROUNDS; i++)
        for (int j = 0; j < NSTEPS; j++) {
            CUDA(cudaStreamSynchronize(r.stream));
            meet();
            double t0 = seconds();
            if (r.st == DP_OK) r.backward(comm, steps[j].bit);
            CUDA(cudaStreamSynchronize(r.stream));
            if (i) all[j].push_back(1e3 * (seconds() - t0));
        }
    for (int j = 0; j < NSTEPS; j++) {
        std::sort(all[j].begin(), all[j].end());
        ms[j] = all[j][ROUNDS / 2];
    }
    return ms;
}

/* Every step, the slowest rank's; comm NULL: one rank. */
static void time_steps(int64_t T, int HV, int N, dpg_comm *comm, const Policy &p) {
    Case c = {"time",          HV, HV, 128,      128, 1, 0, {0, T}, DP_GATE_SOFTPLUS, 0.001,
              DP_BETA_SIGMOID, 1,  0,  DPG_BF16, 0,   1};
    Inputs x = make_inputs(c);
    Upstream up = make_upstream(c);
    std::vector<StepTimes> ms(N);
    Meeting meet(N);
    on_ranks(N, [&](int rank) {
        GradRank r;
        CUDA(cudaSetDevice(comm ? comm[rank].device : 0));
        r.setup(c, x, up, p, rank, N);
        ms[rank] = time_rank(r, comm ? &comm[rank] : NULL, meet);
        meet();
        if (rank == N / 2) {
            fact(r.st == DP_OK, "time: %s", r.err.msg);
            printf("T = %lld HV = %d K = V = 128 ranks %d %s (%s): workspace %.2f GB, kept %.2f "
                   "MB\n",
                   (long long)T, HV, N, name_of(p).c_str(),
                   dpg_plan_bwd_path(r.plan) == DPG_PATH_FAST ? "fast" : "simple",
                   dpg_workspace_bytes(r.plan) / 1e9, dpg_kept_bytes(r.plan) / 1e6);
        }
        r.close();
    });
    for (int j = 0; j < NSTEPS; j++) {
        double top = 0;
        for (const StepTimes &rank : ms)
            top = std::max(top, rank[j]);
        if (N > 1 || !(steps[j].bit & (DPG_BWD_PRE | DPG_BWD_GATHER | DPG_BWD_MERGE)))
            printf("  %s %.3f", steps[j].name, top);
    }
    printf(" ms\n");
}

static void test_time(int N) {
    const dpg_path S = DPG_PATH_SIMPLE, A = DPG_PATH_AUTO;
    if (N > 1) {
        Comms comm(Comms::NCCL, N, 30);
        for (int only : {0, 1})
            time_steps(8192, 32, N, comm.data(),
                       {DP_BASE_BF16, DP_FP32, A, A, only, 0, DPG_SAVE_STATE});
        return;
    }
    for (const Policy &p : {Policy{DP_BASE_BF16, DP_FP32, S, S, 0, 0, DPG_SAVE_STATE},
                            Policy{DP_BASE_BF16, DP_FP32, S, S, 0, 1, DPG_SAVE_STATE},
                            Policy{DP_BASE_BF16, DP_FP32, S, S, 0, 0, DPG_SAVE_ALL},
                            Policy{DP_BASE_BF16, DP_FP32, A, A, 0, 0, DPG_SAVE_STATE}})
        time_steps(8192, 8, 1, NULL, p);
}

/* Modes all, small, cases; number: that follows the mode. */
static void test_all(const std::string &mode, const char *word, int number) {
    bool small = mode == "small", some = small || mode == "cases";
    test_cases(small, some ? word : NULL);
    if (some) return;
    test_heads();
    test_segments();
    test_dg_forms();
    test_graph();
    test_dead_rank(NULL, 3, "rank 1 did not reach all_gather");
    test_repeat(number);
}

int main(int argc, char **argv) {
    std::string mode = argc > 1 ? argv[1] : "all";
    auto number = [&](int i, int otherwise) { return argc > i ? atoi(argv[i]) : otherwise; };
    setvbuf(stdout, NULL, _IOLBF, 0);
    int ndev = devices("test_gpu_bwd");
    token_alone = mode == "token";
    if (mode == "nccl")
        test_nccl(number(2, ndev), number(3, 100));
    else if (mode == "replay")
        test_replay(number(2, ndev), number(3, 10));
    else if (mode == "forms")
        test_dg_forms();
    else if (mode == "graph")
        test_graph();
    else if (mode == "token") {
        test_cases(false, NULL);
        test_heads();
        test_graph();
        test_repeat(number(2, 100));
    } else if (mode == "segments")
        test_segments();
    else if (mode == "time")
        test_time(number(2, 1));
    else
        test_all(mode, argc > 2 ? argv[2] : NULL, number(2, 100));
    for (auto &w : worst)
        printf("%-44s %10.2e\n", w.first.c_str(), w.second);
    return verdict();
}
