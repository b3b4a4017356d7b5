/* gpu/bench/bench_split.cu - sequences of a batch cut in segments inside one card. Is the rule's
 * cut (ref/vocabulary/segments.h) ever slower than whole sequences, and how much of the possible
 * gain does it get? One run alternates whole sequences twice (noise), the rule, and every number of
 * segments of the longest sequence, forward alone and forward with backward. CUDA events, medians;
 * K = V = 128 and some of other widths. Nothing is forgotten, the slowest case; some problems
 * forget.
 *
 *   [runs]         a row a layout, heads, recurrence and direction; all in one last
 *   times [runs]   also the time of every number of segments, from which the constants of the rule
 *                  come
 *   few [runs]     of these: KDA of 4 and 8 heads, K = V = 128, that forgets nothing
 *   steps [runs] [widths]   the steps of some; of other widths than K = V = 128 alone */
#include "bench.h"

typedef std::vector<int64_t> Lengths;
struct Layout {
    const char *name;
    Lengths length;
};

static Lengths equal(int n, int64_t tokens) { return Lengths(n, tokens); }
static Lengths operator+(Lengths a, const Lengths &b) {
    a.insert(a.end(), b.begin(), b.end());
    return a;
}

#define KT 1024 /* tokens */
static const Layout layouts[] = {
    {"8k", {8 * KT}},
    {"16k", {16 * KT}},
    {"32k", {32 * KT}},
    {"64k", {64 * KT}},
    {"128k", {128 * KT}},
    {"256k", {256 * KT}},
    {"2x32k", equal(2, 32 * KT)},
    {"4x16k", equal(4, 16 * KT)},
    {"8x8k", equal(8, 8 * KT)},
    {"64k,64x1k", Lengths{64 * KT} + equal(64, KT)},
    {"32x1k,64k", equal(32, KT) + Lengths{64 * KT}},
    {"16x1k,64k,16x1k", equal(16, KT) + Lengths{64 * KT} + equal(16, KT)},
    {"64k,32k,..,1k", {64 * KT, 32 * KT, 16 * KT, 8 * KT, 4 * KT, 2 * KT, KT}},
    {"96k,32k", {96 * KT, 32 * KT}},
    {"24k,8k", {24 * KT, 8 * KT}}, /* from here on rows of cuLA's table */
    {"28k,4k", {28 * KT, 4 * KT}},
    {"40k,1k,8k", {40 * KT, KT, 8 * KT}},
    {"128k,1k", {128 * KT, KT}},
};
static const Layout small[] = {
    {"2k", {2 * KT}},         {"4k", {4 * KT}},           {"4x1k", equal(4, KT)},
    {"64x1k", equal(64, KT)}, {"16x256", equal(16, 256)}, {"16x4k", equal(16, 4 * KT)},
};

struct Row {
    const Layout *layout;
    int HV;
    bool one_gate;
    float bias;
    int K = 128, V = 128;
};

/* Plans of one problem that share its tensors: whole, whole again, by the rule, then by candidates.
 */
struct Batch {
    BenchRank rank;
    std::vector<int> chunks; /* most of a segment; 0: whole, -1: the rule */
    std::vector<dpg_plan *> plan;
    bool both;

    static std::vector<int64_t> offsets(const Lengths &length) {
        std::vector<int64_t> cu = {0};
        for (int64_t n : length)
            cu.push_back(cu.back() + n);
        return cu;
    }
    static Shape shape(const Row &r) {
        Shape s = {offsets(r.layout->length).back(), r.HV, r.bias, 1, r.K, r.V};
        s.one_gate = r.one_gate;
        return s;
    }
    static dpg_options options(bool backward, int chunks) {
        dpg_options o = {};
        o.base = DP_BASE_BF16;
        o.chain = DP_FP32;
        o.path = DPG_PATH_FAST;
        o.chain_how = DPG_CHAIN_AUGMENTED;
        o.backward = backward;
        o.bwd_path = DPG_PATH_FAST;
        o.segment_chunks = std::max(chunks, 0);
        o.segments = chunks == 0;
        return o;
    }
    Batch(const Row &r, bool both)
        : rank(shape(r), 0, 1, options(true, 0), {}, offsets(r.layout->length)), both(both) {
        const Lengths &length = r.layout->length;
        int64_t most = (*std::max_element(length.begin(), length.end()) + 63) / 64;
        chunks = {0, 0, -1};
        for (int n : {2, 3, 4, 6, 8, 12, 16, 24, 32, 48})
            if (most / n >= 4) chunks.push_back((int)((most + n - 1) / n));
        const std::vector<int64_t> cu = offsets(length);
        dpg_problem p = problem_of(shape(r), cu);
        size_t ws = 0, saved = 0;
        for (int most : chunks) {
            dpg_options o = options(both, most);
            plan.push_back(NULL);
            DP(rank.err, dpg_plan_create(&plan.back(), &p, &o, 0, 1, &rank.err));
            ws = std::max(ws, dpg_workspace_bytes(plan.back()));
            saved = std::max(saved, dpg_saved_bytes(plan.back()));
        }
        if (ws > dpg_workspace_bytes(rank.plan)) rank.ws = rank.memory.filled(ws, 0);
        rank.t.saved = rank.memory.filled(saved + 256, 0);
        CUDA(cudaDeviceSynchronize());
    }
    Batch(const Batch &) = delete;
    ~Batch() {
        cudaStreamSynchronize(rank.stream);
        for (dpg_plan *p : plan)
            dpg_plan_destroy(p);
    }
    void go(dpg_plan *p) {
        DP(rank.err, dpg_forward(p, &rank.t, rank.ws, NULL, rank.stream, &rank.err));
        if (both)
            DP(rank.err, dpg_backward(p, &rank.t, &rank.g, rank.ws, NULL, rank.stream, &rank.err));
    }
    /* Medians of all plans, which alternate: of two calls behind a third, so that no launch is
     * waited for. */
    std::vector<double> times(int runs) {
        std::vector<std::vector<float>> ms(plan.size());
        std::vector<double> all;
        for (int i = -2; i < runs; i++)
            for (size_t j = 0; j < plan.size(); j++) {
                cudaEvent_t *e = events;
                go(plan[j]);
                CUDA(cudaEventRecord(e[0], rank.stream));
                go(plan[j]);
                go(plan[j]);
                CUDA(cudaEventRecord(e[1], rank.stream));
                CUDA(cudaEventSynchronize(e[1]));
                float x;
                CUDA(cudaEventElapsedTime(&x, e[0], e[1]));
                if (i >= 0) ms[j].push_back(x / 2);
            }
        for (auto &x : ms)
            all.push_back(median(x));
        return all;
    }
    static cudaEvent_t events[2];
};
cudaEvent_t Batch::events[2];

/* ---- the claim ------------------------------------------------------------------------------- */

/* Over rows: the rule against whole sequences, where it cuts and where it is the same plan. */
struct Sum {
    double cut = 0, uncut = 0, again = 0, gain = 0, possible = 0;
    int rows = 0, rows_cut = 0;
    bool tells; /* all times */
    std::string where;
};

static void compare(const Row &r, bool both, int runs, Sum &sum) {
    Batch b(r, both);
    std::vector<double> ms = b.times(runs);
    double whole = std::min(ms[0], ms[1]), noise = std::max(ms[0], ms[1]) / whole,
           rule = ms[2] / whole;
    size_t best = std::min_element(ms.begin(), ms.end()) - ms.begin();
    std::string name =
        text("%s %-15s HV %-2d K %-3d V %-3d %s %s", r.one_gate ? "gdn" : "kda", r.layout->name,
             r.HV, r.K, r.V, r.bias == SLOW ? "slow" : "fast", both ? "both   " : "forward");
    printf("%s  whole %8.3f ms (again %+.1f%%)  rule %3d parts %8.3f ms (%.3f)  best %3d parts "
           "%8.3f ms (%.3f)\n",
           name.c_str(), whole, 100 * (noise - 1), dpg_plan_segments(b.plan[2]), ms[2], rule,
           dpg_plan_segments(b.plan[best]), ms[best], ms[best] / whole);
    if (sum.tells) {
        printf("times, chunks of a segment:segments:ms");
        for (size_t j = 0; j < ms.size(); j++)
            printf(" %d:%d:%.5f", b.chunks[j], dpg_plan_segments(b.plan[j]), ms[j]);
        printf("\n");
    }
    bool cuts = dpg_plan_segments(b.plan[2]) > 1;
    if (cuts && rule > sum.cut) {
        sum.cut = rule;
        sum.where = name;
    }
    if (!cuts) sum.uncut = std::max(sum.uncut, rule);
    sum.again = std::max(sum.again, noise);
    sum.rows_cut += cuts;
    sum.rows++;
    /* of what each row could be faster by */
    sum.gain += log(1 / rule);
    sum.possible += log(whole / ms[best]);
}

/* all, or as many as tell the steps. */
static std::vector<Row> rows(bool all) {
    std::vector<Row> r;
    const int some[] = {1, 3, 6, 8, 9, 12};
    for (bool one_gate : {false, true}) {
        for (const Layout &l : layouts)
            for (int HV : {4, 8})
                if (all || !one_gate) r.push_back({&l, HV, one_gate, SLOW});
        for (int i : some)
            for (int HV : {2, 8, 16, 32})
                if (all ? HV != 8 : HV >= 16 || (one_gate && HV == 8))
                    r.push_back({&layouts[i], HV, one_gate, SLOW});
    }
    for (bool one_gate : {false, true})
        for (const Layout &l : small)
            for (int HV : {2, 4, 8, 16})
                if (all) r.push_back({&l, HV, one_gate, SLOW});
    for (int i : some)
        if (all) r.push_back({&layouts[i], 8, false, FAST});
    for (bool one_gate : {false, true})
        for (int i : {0, 1, 2}) /* single sequences of many heads */
            for (int HV : {12, 16, 20, 24, 28, 32, 40})
                if (all && (HV % 16 || i == 0)) r.push_back({&layouts[i], HV, one_gate, SLOW});
    for (int i : {1, 3, 9})
        for (int K : {64, 128})
            for (int V : {64, 128})
                if (K + V < 256) r.push_back({&layouts[i], 8, false, SLOW, K, V});
    return r;
}

static bool is_of_few(const Row &r) {
    return !r.one_gate && (r.HV == 4 || r.HV == 8) && r.K + r.V == 256 && r.bias == SLOW;
}

static void claim(bool few, bool tells, int runs) {
    Sum sum;
    sum.tells = tells;
    for (const Row &r : rows(true))
        for (bool both : {false, true})
            if (!few || is_of_few(r)) compare(r, both, runs, sum);
    printf("%d rows. %d that the rule cuts take at most %.3f of whole sequences (%s). %d that it "
           "leaves "
           "whole: at most %.3f, and whole again at most %.3f, which is noise. Mean gain %.1f%%, "
           "of the "
           "fastest in each row %.1f%%\n",
           sum.rows, sum.rows_cut, sum.cut, sum.where.c_str(), sum.rows - sum.rows_cut, sum.uncut,
           sum.again, 100 * (1 - exp(-sum.gain / sum.rows)),
           100 * (1 - exp(-sum.possible / sum.rows)));
}

/* ---- steps ----------------------------------------------------------------------------------- */

static void steps_of(const Row &r, bool both, int runs) {
    Batch b(r, both);
    std::vector<double> ms = b.times(runs);
    for (size_t j = 1; j < b.plan.size(); j++) {
        if (j == 2) continue;
        dpg_plan *p = b.plan[j];
        printf("steps %d %s %d %s %d %d K %d V %d all %.4f :", both, r.one_gate ? "gdn" : "kda",
               r.HV, r.layout->name, b.chunks[j], dpg_plan_segments(p), r.K, r.V, ms[j]);
        BenchRank &k = b.rank;
        for (int step :
             {DPG_STEP_CHUNKS, DPG_STEP_PRE, DPG_STEP_COMPOSE, DPG_STEP_MERGE, DPG_STEP_STATE})
            printf(" %.4f", time_of(k.stream, 3, [&] {
                       DP(k.err, dpg_forward_steps(p, &k.t, k.ws, NULL, k.stream, step, &k.err));
                   }));
        for (int step : {DPG_BWD_RECOMPUTE, DPG_BWD_DAV, DPG_BWD_PRE, DPG_BWD_MERGE, DPG_BWD_STATE,
                         DPG_BWD_INTRA, DPG_BWD_GATE})
            if (both)
                printf(" %.4f", time_of(k.stream, 3, [&] {
                           DP(k.err, dpg_backward_steps(p, &k.t, &k.g, k.ws, NULL, k.stream, step,
                                                        &k.err));
                       }));
        printf("\n");
    }
}

int main(int argc, char **argv) {
    const std::string mode = argc > 1 ? argv[1] : "";
    const bool steps = mode == "steps", few = mode == "few", times = mode == "times";
    int at = steps || few || times ? 2 : 1, runs = argc > at ? atoi(argv[at]) : 11;
    setvbuf(stdout, NULL, _IOLBF, 0);
    devices("bench_split");
    for (cudaEvent_t &e : Batch::events)
        CUDA(cudaEventCreate(&e));
    if (!steps) {
        claim(few, times, runs);
        return 0;
    }
    for (const Row &r : rows(false))
        for (bool both : {false, true})
            if (argc < 4 || r.K + r.V < 256) steps_of(r, both, runs);
    return 0;
}
