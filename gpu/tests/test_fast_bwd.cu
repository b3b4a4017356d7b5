/* gpu/tests/test_fast_bwd.cu - the fast backward beside the simple one: what the judgement of the
 * harness cannot show.
 *
 *   show      relative difference of both paths, stage by stage and gradient by gradient, on 1, 2,
 *             3 and 4 ranks: a table to read, no verdict (`deltaproof run --backend cuda` judges)
 *   [small]   bitwise: 100 runs alike (small: 2), over whole sequences and over segments; what runs
 *             beside a gather has the bits of the steps one after the other; head 0 keeps its bits
 *             when the inputs of head 1 change (every input, both directions)
 *   kept      of these: with nothing recomputed the same bits, on small cases
 *   forgets   of these: over segments whose states are forgotten within them, and are not read from
 *             there on, results are those over the whole sequence, and NaN goes as far
 *   batches   of these: sequences of a batch that are cut in segments, several at once, have the
 *             bits that each has alone, and nothing of one reaches another
 *   beside    of these: tiles whose gradients start beside the pass over states
 *   packed    sequences of chunks that are not whole, none cut: each has the bits that it has
 *             alone, also where the next one begins with NaN
 *   wide      of these: values wider than the kernels have the bits of as many narrower heads
 *   once      one run of every kind of case, for compute-sanitizer
 *   batch     of these: of a batch alone
 *
 * Exit status 0, 1, or 2 (no device). */
#include "rank.h"
#include "ref/inputs/inputs.h"
#include <map>

struct Case {
    const char *name;
    std::vector<int64_t> cu;
    int H, HV, K, V;
    dp_gate gate;
    float glo, ghi; /* raw gate uniform in [glo, ghi] */
    int R = 1, gdn = 0;
    int Kg() const { return gdn ? 1 : K; }
    int T() const { return (int)cu.back(); }
};
typedef std::map<std::string, Vec> Tensors;

/* Inputs by the names of rank.h, uniform; values that bf16 holds. */
static Tensors make(const Case &c, uint64_t seed) {
    const int64_t T = c.T(), S = (int64_t)(c.cu.size() - 1) * c.HV * c.K * c.V;
    const struct {
        const char *name;
        int64_t n;
        float lo, hi;
    } rows[] = {{"q", T * c.H * c.K, -1, 1},
                {"k", T * c.H * c.R * c.K, -1, 1.2f},
                {"v", T * c.HV * c.R * c.V, -1, 1},
                {"g", T * c.HV * c.Kg(), c.glo, c.ghi},
                {"beta", T * c.HV * c.R, -2, c.R > 2 ? 0.f : 2.f},
                {"do", T * c.HV * c.V, -1, 1},
                {"A_log", c.HV, -0.5f, 0.5f},
                {"dt_bias", (int64_t)c.HV * c.Kg(), -0.5f, 0.5f},
                {"s0", S, -0.2f, 0.2f},
                {"dfinal_state", S, -0.2f, 0.2f}};
    dp_rng g;
    dp_rng_seed(&g, seed, 0);
    Tensors x;
    for (auto &r : rows) {
        Vec &y = x[r.name];
        y.resize(r.n);
        for (double &z : y)
            z = dp_bf16((float)(r.lo + (r.hi - r.lo) * dp_rng_uniform(&g)));
    }
    return x;
}

/* times: again with the same memory. */
struct How {
    dpg_path bwd;
    dpg_chain_how chain;
    int dh_only, whole = 0, one_by_one = 0, times = 1, segments = 0, segment_chunks = 0;
    dp_format m = DP_FP32;
    dpg_save save = DPG_SAVE_STATE;
};

static dpg_problem problem_of(const Case &c) {
    dpg_problem p = sized(c.cu, c.H, c.HV, c.K, c.V, c.R, c.Kg(), DPG_BF16);
    p.gate = c.gate;
    p.lower_bound = -5;
    return p;
}

static dpg_options options_of(const How &how) {
    dpg_options o = {};
    o.base = DP_BASE_BF16;
    o.chain = how.m;
    o.path = DPG_PATH_FAST;
    o.chain_how = how.chain;
    o.backward = 1;
    o.bwd_path = how.bwd;
    o.send_dh_only = how.dh_only;
    o.whole_bwd = how.whole;
    o.segments = how.segments;
    o.segment_chunks = how.segment_chunks;
    o.save = how.save;
    return o;
}

struct BwdRank : Rank {
    Tensors grads, stages;
    int others = 0; /* runs whose gradients have other bits than the first's */
    bool keeps = false;

    static bool is_grad(const Share &s) { return s.is_output && s.name[0] == 'd'; }
    void once(dpg_comm *comm, bool one_by_one) {
        clear_outputs();
        if (forward(comm) == DP_OK) wait(comm);
        if (!keeps) clear_workspace();
        if (!one_by_one && st == DP_OK) backward(comm);
        for (int step = 1; one_by_one && step <= DPG_BWD_ALL && st == DP_OK; step *= 2)
            backward(comm, step);
        if (st == DP_OK) wait(comm);
        if (st != DP_OK && comm) comm->abort(comm, err.msg);
        CUDA(cudaStreamSynchronize(stream));
    }
    void read_grads(Tensors &to) {
        for (const Share &s : shares)
            if (is_grad(s)) to[s.name] = read(s);
    }
    void run(const Case &c, const Tensors &x, const How &how, int rank, int N, dpg_comm *comm) {
        open(problem_of(c), options_of(how), rank, N,
             [&](const Share &s) { return memory.copy(x.at(s.name), s.from, s.n, s.type); });
        keeps = how.save == DPG_SAVE_ALL;
        for (int i = 0; i < how.times && st == DP_OK; i++) {
            Tensors again;
            once(comm, how.one_by_one);
            if (st != DP_OK) break;
            read_grads(i ? again : grads);
            for (auto &y : again)
                if (!same_bits(y.second, grads[y.first])) {
                    others++;
                    break;
                }
        }
        for (const char *name : {"dv_local", "dv_new", "dh", "dS_out"}) {
            Vec y = st == DP_OK ? stage(name) : Vec();
            if (!y.empty()) stages[name] = y;
        }
        close();
    }
};

/* Gradients of the whole problem, stages of a rank as NAME.RANK. */
struct Out {
    Tensors x;
    int others = 0;
};

static Out run(const Case &c, const Tensors &x, const How &how, int N) {
    std::vector<BwdRank> ranks(N);
    Out all;
    if (N == 1) {
        ranks[0].run(c, x, how, 0, 1, NULL);
    } else {
        Comms comm(Comms::SHARED, N, 20);
        on_ranks(N, [&](int r) { ranks[r].run(c, x, how, r, N, &comm[r]); });
    }
    for (int r = 0; r < N; r++) {
        fact(ranks[r].st == DP_OK, "%s rank %d of %d: %s", c.name, r, N, ranks[r].err.msg);
        all.others += ranks[r].others;
        for (const Share &s : ranks[r].shares) {
            if (!BwdRank::is_grad(s)) continue;
            Vec &to = all.x[s.name], &from = ranks[r].grads[s.name];
            if (s.per_token)
                to.insert(to.end(), from.begin(), from.end());
            else if (strcmp(s.name, "ds0") || N == 1) /* of ds0 each rank has its own */
                to = from;
        }
        for (auto &y : ranks[r].stages)
            all.x[N > 1 ? y.first + "." + std::to_string(r) : y.first] = y.second;
    }
    return all;
}

static const Case cases[] = {
    {"one chunk", {0, 64}, 1, 1, 128, 128, DP_GATE_LOG, -0.05f, 0},
    {"two chunks", {0, 128}, 1, 2, 64, 64, DP_GATE_LOG, -0.05f, 0},
    {"ragged, softplus, group of 2", {0, 300}, 1, 2, 128, 128, DP_GATE_SOFTPLUS, -5, -2},
    {"packed, lower bound", {0, 1, 70, 70, 200, 384}, 2, 2, 64, 64, DP_GATE_LOWER_BOUND, -6, -3},
    {"strong gates", {0, 192}, 1, 1, 128, 128, DP_GATE_LOG, -12, 0},
    {"slow, 24 chunks, 12 heads", {0, 1536}, 12, 12, 128, 128, DP_GATE_LOG, -0.002f, 0},
    {"many heads", {0, 768}, 56, 56, 128, 128, DP_GATE_LOWER_BOUND, -6, -3},
    {"slow, 48 chunks", {0, 3072}, 1, 3, 128, 128, DP_GATE_LOG, -0.0005f, 0},
    {"2 keys, group of 2", {0, 5, 300}, 1, 2, 128, 128, DP_GATE_SOFTPLUS, -5, -2, 2},
    {"4 keys", {0, 1, 70, 70, 200, 384}, 2, 2, 64, 64, DP_GATE_LOWER_BOUND, -6, -3, 4},
    {"2 keys, strong gates", {0, 192}, 1, 1, 64, 64, DP_GATE_LOG, -12, 0, 2},
    {"4 keys, slow, 48 chunks", {0, 768}, 1, 3, 128, 128, DP_GATE_LOG, -0.002f, 0, 4},
    {"K twice V", {0, 300}, 1, 2, 128, 64, DP_GATE_SOFTPLUS, -5, -2},
    {"V twice K, packed, 2 keys",
     {0, 1, 70, 70, 200, 384},
     2,
     2,
     64,
     128,
     DP_GATE_LOWER_BOUND,
     -6,
     -3,
     2},
    {"one gate, group of 2", {0, 5, 300}, 1, 2, 128, 128, DP_GATE_SOFTPLUS, -5, -2, 1, 1},
    {"one gate, 2 keys", {0, 1, 70, 70, 200, 384}, 2, 2, 64, 64, DP_GATE_LOWER_BOUND, -6, -3, 2, 1},
    {"one gate, slow, 48 chunks", {0, 3072}, 1, 3, 128, 128, DP_GATE_LOG, -0.0005f, 0, 1, 1},
    {"V of 256, group of 2", {0, 5, 300}, 1, 2, 128, 256, DP_GATE_SOFTPLUS, -5, -2},
    {"V of 192, one gate, 2 keys",
     {0, 1, 70, 70, 200, 384},
     2,
     2,
     64,
     192,
     DP_GATE_LOWER_BOUND,
     -6,
     -3,
     2,
     1}};

static void show_one(const Case &c, const Tensors &x, const How &fast, int N) {
    Out a = run(c, x, fast, N), b = run(c, x, How{DPG_PATH_SIMPLE, fast.chain, fast.dh_only}, N);
    printf("%-30s K %d V %d ranks %d %s%s:", c.name, c.K, c.V, N,
           fast.chain ? "augmented" : "dense", fast.dh_only ? ", dH only" : "");
    for (auto &y : b.x)
        if (a.x.count(y.first) && !y.second.empty())
            printf("  %s %.1e", y.first.c_str(), rel_fro(a.x[y.first], y.second));
    printf("\n");
}

static void show() {
    for (const Case &c : cases) {
        Tensors x = make(c, 7);
        for (int N : {1, 2, 3, 4}) {
            if (c.T() % N || (N > 1 && c.T() / N < 60)) continue;
            show_one(c, x, How{DPG_PATH_FAST, DPG_CHAIN_DENSE, 0}, N);
            for (int dh_only : {1, 0})
                if (N > 1) show_one(c, x, How{DPG_PATH_FAST, DPG_CHAIN_AUGMENTED, dh_only}, N);
        }
    }
}

/* The first tensor that differs, "" where none does. */
static std::string differs(const Tensors &a, const Tensors &b) {
    for (auto &y : a)
        if (!b.count(y.first) || !same_bits(y.second, b.at(y.first))) return y.first;
    return "";
}

/* Where nothing is recomputed: which case, on how many ranks, its last local sub-sequence in how
 * many segments, dH alone sent. */
struct Kept {
    int i, N, segments, dh_only;
};
static const Kept kept_ways[] = {{2, 1, 2, 0}, {8, 1, 1, 0}, {14, 1, 1, 0}, {17, 2, 2, 1},
                                 {2, 2, 2, 1}, {2, 2, 2, 0}, {2, 2, 1, 1},  {3, 1, 2, 0},
                                 {3, 2, 1, 0}, {8, 2, 2, 1}, {12, 1, 1, 0}, {14, 2, 2, 1},
                                 {18, 1, 1, 0}};
static const int SMALL_KEPT_WAYS = 5;

/* Does this device's fast path take the case. */
static bool taken(const Case &c, const How &how) {
    dpg_plan *plan = NULL;
    dpg_problem p = problem_of(c);
    dpg_options o = options_of(how);
    dp_err e = {DP_OK, ""};
    bool yes = dpg_plan_create(&plan, &p, &o, 0, 1, &e) == DP_OK;
    dpg_plan_destroy(plan);
    return yes;
}

/* Over so many segments of the last sequence, or of at most so many chunks each of all. */
static How over(int segments, int chunks = 0) {
    How how = {DPG_PATH_FAST, DPG_CHAIN_AUGMENTED, 1};
    how.segments = segments;
    how.segment_chunks = chunks;
    return how;
}

/* Parts that one rank's sequences are cut in on this device. */
static int segments_of(const Case &c, const How &how) {
    dpg_plan *plan = NULL;
    dpg_problem p = problem_of(c);
    dpg_options o = options_of(how);
    dp_err e = {DP_OK, ""};
    int made = dpg_plan_create(&plan, &p, &o, 0, 1, &e) == DP_OK ? dpg_plan_segments(plan) : 0;
    fact(made > 0, "a plan of %s: %s", c.name, e.msg);
    dpg_plan_destroy(plan);
    return made;
}

/* With nothing recomputed every gradient has the bits of what is recomputed. */
static void nothing_recomputed(const Kept &way) {
    const Case &c = cases[way.i];
    Tensors x = make(c, 7);
    How again = {DPG_PATH_FAST, DPG_CHAIN_AUGMENTED, way.dh_only}, kept;
    again.segments = way.segments;
    if (!taken(c, again)) {
        printf("skipped: %s, %d segments: not taken by this device's fast path\n", c.name,
               way.segments);
        return;
    }
    kept = again;
    kept.save = DPG_SAVE_ALL;
    std::string which = differs(run(c, x, again, way.N).x, run(c, x, kept, way.N).x);
    fact(which == "", "%s, %d ranks, %d segments: %s has other bits with nothing recomputed",
         c.name, way.N, way.segments, which.c_str());
}

/* A backward that finds no forward's workspace says so: none ran, or in another place. */
static void nothing_to_find() {
    const Case &c = cases[0];
    Tensors x = make(c, 7);
    How kept = {DPG_PATH_FAST, DPG_CHAIN_DENSE, 0};
    kept.save = DPG_SAVE_ALL;
    Rank r;
    r.open(problem_of(c), options_of(kept), 0, 1,
           [&](const Share &s) { return r.memory.copy(x.at(s.name), s.from, s.n, s.type); });
    for (int forwards : {0, 1}) {
        r.err = {DP_OK, ""};
        if (forwards) fact(r.forward(NULL) == DP_OK, "forward: %s", r.err.msg);
        void *own = r.ws;
        if (forwards) r.ws = r.memory.filled(dpg_workspace_bytes(r.plan), 0xff);
        fact(r.backward(NULL) == DP_EINPUT && strstr(r.err.msg, "no forward of this plan"),
             "backward behind %d forwards elsewhere: %s", forwards, r.err.msg);
        r.ws = own;
    }
    fact(r.backward(NULL) == DP_OK, "backward behind its forward: %s", r.err.msg);
    r.close();
}

static void kept(int ways) {
    for (int i = 0; i < ways; i++)
        nothing_recomputed(kept_ways[i]);
    nothing_to_find();
}

/* 1 + `runs` runs, by themselves and in the same memory, have the bits of the first. */
static void repeats(const Case &c, int runs) {
    How fast = {DPG_PATH_FAST, DPG_CHAIN_DENSE, 1}, more = fast;
    more.times = runs + 1;
    Tensors x = make(c, 7);
    int N = 3 - c.T() % 3;
    Out first = run(c, x, fast, N), again = run(c, x, more, N);
    std::string which = differs(first.x, again.x);
    fact(!again.others, "%s: %d of %d runs have other bits", c.name, again.others, runs);
    fact(which == "", "%s: another run differs in %s", c.name, which.c_str());
    printf("%s: %d times\n", c.name, runs);
}

/* Segments and whole sequences round operands to bf16 at other places. Entries of either are one or
 * two roundings of 2^-9 from the other's. */
static const double WHOLE_AND_CUT = 0x1p-7;

/* How far gradients over segments are from those over whole sequences; 0: nothing was cut. */
static double moved(const char *what, const Tensors &whole, const Tensors &cut) {
    double sum = 0;
    for (auto &y : whole) {
        double off = rel_fro(cut.at(y.first), y.second);
        fact(off < WHOLE_AND_CUT, "%s: %s is %.1e from that over the whole sequence", what,
             y.first.c_str(), off);
        sum += off;
    }
    return sum;
}

/* 3 segments on each of 2 and 4 ranks, 5 on one. They run side by side, beside the gather, one step
 * after the other, over the whole sequence, with dM sent. */
static void over_segments(int N, int runs) {
    const Case &c = cases[7];
    Tensors x = make(c, 7);
    How parts = {DPG_PATH_FAST, DPG_CHAIN_AUGMENTED, 1}, whole = parts;
    parts.segments = N == 1 ? 5 : 0;
    How steps = parts, gathered = parts, more = parts, rounded = parts;
    steps.one_by_one = 1;
    whole.whole = 1;
    gathered.dh_only = 0;
    rounded.m = DP_BF16;
    more.times = runs + 1;
    Out first = run(c, x, parts, N), b = run(c, x, whole, N);
    std::string which = differs(first.x, run(c, x, steps, N).x), name = text("ranks %d", N);
    fact(which == "", "ranks %d: %s differs when the steps run one after the other", N,
         which.c_str());
    int others = run(c, x, more, N).others;
    fact(!others, "ranks %d, segments: %d of %d runs have other bits", N, others, runs);
    /* nothing follows the last rank: never written over a whole sequence */
    b.x.erase("dS_out." + std::to_string(N - 1));
    fact(moved(name.c_str(), b.x, first.x) > 0, "ranks %d: nothing was cut", N);
    moved((name + ", dM sent").c_str(), b.x, run(c, x, gathered, N).x);
    moved((name + ", M in bf16").c_str(), b.x, run(c, x, rounded, N).x);
    printf("segments on %d ranks: %d times\n", N, runs);
}

/* One rank cuts a long sequence of few heads by itself. */
static void cut_by_itself() {
    Case c = {"long", {0, 65536}, 1, 1, 64, 64, DP_GATE_LOG, -0.002f, 0};
    Tensors x = make(c, 7);
    How cut = {DPG_PATH_FAST, DPG_CHAIN_AUGMENTED, 1}, whole = cut;
    whole.segments = 1;
    Out a = run(c, x, cut, 1), b = run(c, x, whole, 1);
    fact(moved(c.name, b.x, a.x) > 0, "%s: nothing was cut", c.name);
}

/* Every output of one rank. */
static Tensors outputs(const Case &c, const Tensors &x, const How &how) {
    Tensors all;
    Rank r;
    r.open(problem_of(c), options_of(how), 0, 1,
           [&](const Share &s) { return r.memory.copy(x.at(s.name), s.from, s.n, s.type); });
    fact(r.forward(NULL) == DP_OK && r.backward(NULL) == DP_OK, "%s: %s", c.name, r.err.msg);
    CUDA(cudaStreamSynchronize(r.stream));
    for (const Share &s : r.shares)
        if (s.is_output) all[s.name] = r.read(s);
    r.close();
    return all;
}

/* Outputs of a run whose input `name` holds a NaN have NaN where those of one rank over whole
 * sequences do, and somewhere. */
static void spreads(const Case &c, const char *name, const char *how, const Tensors &cut,
                    const Tensors &whole, std::initializer_list<const char *> reached) {
    for (const char *to : reached) {
        const Vec &a = cut.at(to), &b = whole.at(to);
        size_t here = 0, others = 0;
        for (size_t i = 0; i < b.size(); i++) {
            here += std::isnan(b[i]);
            others += std::isnan(a[i]) != std::isnan(b[i]);
        }
        fact(here && !others, "%s: NaN in %s: %s has NaN in %zu places, %s elsewhere in %zu",
             c.name, name, to, here, how, others);
    }
}
/* Entry `at` of input `name` is NaN, over segments. */
static void spreads_in_segments(const Case &c, Tensors x, const How &how, const char *name,
                                int64_t at, std::initializer_list<const char *> reached) {
    x[name][at] = NAN;
    spreads(c, name, "over segments", outputs(c, x, how), outputs(c, x, over(1)), reached);
}
/* On ranks, a segment each: to the states of later ones, and to what they give. */
static void spreads_on_ranks(const Case &c, Tensors x, const char *name, int64_t at) {
    x[name][at] = NAN;
    spreads(c, name, "on 3 ranks", run(c, x, over(1), 3).x, run(c, x, over(1), 1).x, {"dq"});
}

/* A segment's 5 chunks forget everything within 2, which is seen behind 4. */
static void forgets() {
    for (int gdn : {0, 1}) {
        Case c = {gdn ? "forgets, one gate" : "forgets",
                  {0, 15 * DP_CHUNK - 6},
                  1,
                  1,
                  64,
                  64,
                  DP_GATE_LOG,
                  -1.2f,
                  -0.8f,
                  1,
                  gdn};
        Tensors x = make(c, 7);
        if (segments_of(c, over(3)) < 3) {
            printf("skipped: %s: segments need the warpgroup products of 9.0\n", c.name);
            return;
        }
        moved(c.name, outputs(c, x, over(1)), outputs(c, x, over(3)));
        for (const char *name : {"v", "g", "s0"})
            spreads_in_segments(c, x, over(3), name, 3, {"o", "final_state"});
        for (const char *name : {"v", "g"})
            spreads_on_ranks(c, x, name, 3);
        for (const char *name : {"q", "do", "dfinal_state"})
            if (!gdn || is_one_of(name, {"do"}))
                spreads_in_segments(c, x, over(3), name, x[name].size() - 3,
                                    {"dk", "dv", "dg", "dbeta", "ds0"});
    }
}

/* ---- batches --------------------------------------------------------------------------------- */

/* Sequence s of a batch by itself. */
static Case alone(const Case &c, int s) {
    Case one = c;
    one.cu = {0, c.cu[s + 1] - c.cu[s]};
    return one;
}
/* Words of a tensor that are sequence s's, of `tokens` or a state of each; else all. */
static Vec words_of(const Case &c, const char *name, const Vec &x, int s) {
    if (is_one_of(name, {"A_log", "dt_bias", "dA_log", "ddt_bias"})) return x;
    int64_t states = (int64_t)c.cu.size() - 1, tokens = c.T();
    bool state = is_one_of(name, {"s0", "dfinal_state", "final_state", "ds0"});
    int64_t each = (int64_t)x.size() / (state ? states : tokens);
    int64_t a = state ? s : c.cu[s], b = state ? s + 1 : c.cu[s + 1];
    return Vec(x.begin() + a * each, x.begin() + b * each);
}

/* Each sequence has the bits that it has alone, but for the sums over all. */
static void as_alone(const Case &c, const Tensors &x, const How &how) {
    Tensors batch = outputs(c, x, how);
    for (int s = 0; s + 1 < (int)c.cu.size(); s++) {
        if (c.cu[s] == c.cu[s + 1]) continue;
        Tensors in;
        for (auto &y : x)
            in[y.first] = words_of(c, y.first.c_str(), y.second, s);
        Tensors own = outputs(alone(c, s), in, how);
        for (auto &y : own)
            if (!is_one_of(y.first.c_str(), {"dA_log", "ddt_bias"}))
                fact(same_bits(words_of(c, y.first.c_str(), batch[y.first], s), y.second),
                     "%s: %s of sequence %d is not what it is alone", c.name, y.first.c_str(), s);
    }
}

/* Every variant has the bits of one, and is near to whole sequences. */
static void in_every_way(const Case &c, const Tensors &x, const How &how, int runs) {
    How more = how, steps = how, all = how, whole = how;
    more.times = runs + 1;
    steps.one_by_one = 1;
    all.save = DPG_SAVE_ALL;
    whole.whole = 1;
    Out first = run(c, x, how, 1), again = run(c, x, more, 1);
    fact(!again.others, "%s: %d of %d runs have other bits", c.name, again.others, runs);
    std::string which = differs(first.x, run(c, x, steps, 1).x);
    fact(which == "", "%s: %s differs when the steps run one after the other", c.name,
         which.c_str());
    which = differs(first.x, run(c, x, all, 1).x);
    fact(which == "", "%s: %s has other bits with nothing recomputed", c.name, which.c_str());
    for (const How &other : {over(1), whole})
        moved(c.name, outputs(c, x, other), outputs(c, x, how));
}

/* Sequences of 2, 7, 1, 5 and 1 chunks in segments of at most 2. Sequences of 13, 1, 10 and 6
 * chunks, which forget within 2 chunks, in segments of at most 5. The last segments of two of these
 * have no M to look at. Heads are so few that teams take all passes, alone and in the batch. */
static void batches(int runs) {
    const Case rows[] = {
        {"batch", {0, 70, 500, 510, 830, 840}, 1, 1, 64, 128, DP_GATE_LOG, -0.002f, 0},
        {"one gate", {0, 70, 500, 510, 830, 840}, 1, 2, 128, 64, DP_GATE_LOG, -0.002f, 0, 1, 1},
        {"batch, forgets", {0, 800, 810, 1440, 1820}, 1, 1, 64, 64, DP_GATE_LOG, -1.2f, -0.8f}};
    for (Case c : rows) {
        bool forgets = c.ghi < 0;
        if (runs == 1) c.K = c.V = 64; /* on a CPU: cuts know no widths */
        How how = over(0, forgets ? 5 : 2);
        if (segments_of(c, how) < 3) {
            printf("skipped: %s: segments need the warpgroup products of 9.0\n", c.name);
            return;
        }
        Tensors x = make(c, 7);
        in_every_way(c, x, how, runs);
        as_alone(c, x, how);
        int64_t k = (int64_t)c.H * c.K, v = (int64_t)c.HV * c.V, at = c.cu[forgets ? 2 : 1] + 70;
        spreads_in_segments(c, x, how, "v", at * v + 3, {"o", "final_state", "dk", "dg"});
        spreads_in_segments(c, x, how, "do", at * v + 3, {"dq", "dk", "dv", "dg", "dbeta", "ds0"});
        if (forgets)
            spreads_in_segments(c, x, how, "k", at * k + 3, {"o", "final_state", "dk", "ds0"});
        printf("%s: %d times\n", c.name, runs);
    }
}

/* Gradients of the last chunks start beside a pass that leaves multiprocessors free. */
static void beside(int runs) {
    int sms;
    CUDA(cudaDeviceGetAttribute(&sms, cudaDevAttrMultiProcessorCount, 0));
    const int wide = runs > 1 ? 128 : 64, HV = sms / (wide / 16) + 1,
              T = 64 * (runs > 1 ? 64 : 19) + 5;
    for (int gdn : {0, 1}) {
        Case c = {"beside", {0, T}, 1, HV, wide, wide, DP_GATE_LOG, -0.02f, 0, 1, gdn};
        How how = {DPG_PATH_FAST, DPG_CHAIN_AUGMENTED, 1};
        how.whole = how.segments = 1;
        in_every_way(c, make(c, 7), how, runs);
        printf("beside %d heads: %d times\n", HV, runs);
    }
}

/* A value that is not finite in a sequence's first token of v stays out of the sequence before,
 * whose last chunk ends before it. */
static void apart(const Case &c, const Tensors &x, const How &how) {
    Tensors clean = outputs(c, x, how);
    for (int s = 1; s + 1 < (int)c.cu.size(); s++) {
        Tensors odd = x;
        odd["v"][c.cu[s] * c.HV * c.V + 3] = NAN;
        for (auto &y : outputs(c, odd, how))
            if (!is_one_of(y.first.c_str(), {"dA_log", "ddt_bias"}))
                fact(same_bits(words_of(c, y.first.c_str(), clean[y.first], s - 1),
                               words_of(c, y.first.c_str(), y.second, s - 1)),
                     "%s: %s of sequence %d has other bits where the next one begins with NaN",
                     c.name, y.first.c_str(), s - 1);
    }
}
static void packed() {
    for (int gdn : {0, 1}) {
        Case c = {gdn ? "packed, one gate" : "packed",
                  {0, 70, 75, 203, 210},
                  1,
                  2,
                  64,
                  128,
                  DP_GATE_LOG,
                  -0.01f,
                  0,
                  1,
                  gdn};
        Tensors x = make(c, 7);
        as_alone(c, x, over(1));
        apart(c, x, over(1));
    }
}

/* Heads do not read each other: everything of head 1 changed, head 0 keeps its bits. */
static void heads_apart() {
    Case c = {"two heads", {0, 50, 240}, 2, 2, 128, 128, DP_GATE_LOG, -0.05f, 0};
    How fast = {DPG_PATH_FAST, DPG_CHAIN_DENSE, 1};
    Tensors x = make(c, 7), y = make(c, 8);
    Tensors one = run(c, x, fast, 2).x;
    for (const char *name : {"q", "k", "v", "g", "beta", "do"})
        for (size_t i = 0, w = strcmp(name, "beta") ? 128 : 1; i < x[name].size(); i++)
            if (i / w % 2) x[name][i] = y[name][i];
    Tensors two = run(c, x, fast, 2).x;
    for (const char *name : {"dq", "dk", "dv", "dg", "dbeta"}) {
        size_t w = strcmp(name, "dbeta") ? 128 : 1, wrong = 0, changed = 0;
        for (size_t i = 0; i < one[name].size(); i++)
            (i / w % 2 ? changed : wrong) += one[name][i] != two[name][i];
        fact(!wrong, "%s of head 0 reads head 1 (%zu entries)", name, wrong);
        fact(changed, "%s of head 1 did not change", name);
    }
}

/* Each head's rows of `each` words twice, or [runs][2][each] of it as [2][runs][each]. */
static Vec twice(const Vec &x, size_t each) {
    Vec y;
    for (size_t i = 0; i < x.size(); i += each)
        for (int k = 0; k < 2; k++)
            y.insert(y.end(), x.begin() + i, x.begin() + i + each);
    return y;
}
static Vec turned(const Vec &x, size_t outer, size_t inner, size_t each) {
    Vec y(x.size());
    for (size_t i = 0; i < x.size(); i++) {
        const size_t a = i / each / inner % outer, b = i / each % inner,
                     head = outer * inner * each;
        y[i / head * head + (b * outer + a) * each + i % each] = x[i];
    }
    return y;
}

/* 256 columns, beside two heads of 128 that share keys, gates and beta. Their shared gradients are
 * added up in fp32 and rounded once, where the narrower heads round each. */
static void columns_apart(int i, int gdn, int N) {
    Case wide = cases[i];
    wide.gdn = gdn;
    Case narrow = wide;
    narrow.HV *= 2;
    narrow.V /= 2;
    How how = {DPG_PATH_FAST, DPG_CHAIN_AUGMENTED, 1};
    const size_t Kg = wide.Kg(), K = wide.K, V = narrow.V;
    const Tensors x = make(wide, 7);
    Tensors y = x;
    for (const char *name : {"beta", "A_log"})
        y[name] = twice(x.at(name), 1);
    for (const char *name : {"g", "dt_bias"})
        y[name] = twice(x.at(name), Kg);
    for (const char *name : {"s0", "dfinal_state"})
        y[name] = turned(x.at(name), K, 2, V);
    Tensors a = run(wide, x, how, N).x, b = run(narrow, y, how, N).x;
    if (N == 1) a["ds0"] = turned(a["ds0"], K, 2, V);
    for (const char *name : {"dq", "dk", "dv", "ds0"})
        fact(same_bits(a[name], b[name]), "%s, %d ranks, one gate %d: %s has other bits", wide.name,
             N, gdn, name);
    for (const char *name : {"dg", "dbeta", "dA_log", "ddt_bias"}) {
        const size_t each = strstr(name, "bias") || !strcmp(name, "dg") ? Kg : 1;
        Vec sum(a[name].size());
        for (size_t k = 0; k < sum.size(); k++)
            sum[k] = b[name][k / each * 2 * each + k % each] +
                     b[name][(k / each * 2 + 1) * each + k % each];
        const double off = rel_fro(a[name], sum);
        fact(off < (name[1] == 'A' || name[1] == 'd' ? 1e-6 : 5e-3),
             "%s, %d ranks, one gate %d: %s is %.1e from the sum", wide.name, N, gdn, name, off);
    }
}

static void wide() {
    columns_apart(17, 0, 1);
    columns_apart(17, 1, 2);
}

static void bitwise(int runs) {
    for (int i : {2, 3, 6, 8, 9, 12, 13, 14})
        if (runs >= 10 || cases[i].HV <= 10) repeats(cases[i], runs);
    if (segments_of(cases[7], over(5)) > 1) {
        for (int N : {1, 2, 4})
            over_segments(N, runs);
        cut_by_itself();
    } else
        printf("skipped: segments (their M needs the warpgroup products of 9.0)\n");
    kept(sizeof kept_ways / sizeof *kept_ways);
    forgets();
    batches(runs);
    beside(runs);
    packed();
    wide();
    printf("bitwise: %d checks so far\n", checks);
    heads_apart();
}

/* Two of its sequences in segments, one of 2. */
static void batch_once() {
    Case c = {"batch", {0, 500, 510, 800}, 1, 1, 64, 64, DP_GATE_LOG, -1.2f, -0.8f};
    outputs(c, make(c, 7), over(0, 3));
    c.gdn = 1;
    outputs(c, make(c, 7), over(0, 3));
}

static void once() {
    for (int i : {2, 7, 8, 9, 14, 17, 18}) {
        How how = {DPG_PATH_FAST, DPG_CHAIN_AUGMENTED, i % 2};
        how.m = i % 2 ? DP_BF16 : DP_FP32;
        run(cases[i], make(cases[i], 7), how, i == 7 ? 4 : 3 - cases[i].T() % 3);
        how.save = DPG_SAVE_ALL;
        if (i != 7) run(cases[i], make(cases[i], 7), how, 1);
    }
    batch_once();
}

int main(int argc, char **argv) {
    std::string mode = argc > 1 ? argv[1] : "all";
    setvbuf(stdout, NULL, _IOLBF, 0);
    devices("test_fast_bwd");
    if (mode == "show")
        show();
    else if (mode == "kept")
        kept(SMALL_KEPT_WAYS);
    else if (mode == "forgets")
        forgets();
    else if (mode == "batches")
        batches(1);
    else if (mode == "beside")
        beside(1);
    else if (mode == "packed")
        packed();
    else if (mode == "wide")
        wide();
    else if (mode == "once")
        once();
    else if (mode == "batch")
        batch_once();
    else
        bitwise(mode == "small" ? 1 : 100);
    return verdict();
}
