/* gpu/tests/cpu/test_split.cc - the rule that cuts the sequences of a batch on one rank
 * (ref/vocabulary/segments.h): what it decides, its limits, and that plans follow it. A pass beside
 * the chunk kernel has the bits of one behind it.
 * Exit status 0: all held. */
#include "device.h"
#include "plan/paths.cuh"
#include "rank.h"
#include "ref/vocabulary/segments.h"

typedef std::vector<int> Chunks;
enum { K1 = 16 }; /* chunks of 1,024 tokens */

static Chunks several(int n, int chunks) { return Chunks(n, chunks); }
static Chunks operator+(Chunks a, const Chunks &b) {
    a.insert(a.end(), b.begin(), b.end());
    return a;
}

/* The most chunks of a segment on 132 multiprocessors, by channel: forward of 4 and 8 heads, with
 * backward of 4 and 8. */
static const struct {
    const char *name;
    Chunks chunks;
    int most[4];
} BATCHES[] = {
    {"8k", {8 * K1}, {13, 16, 0, 0}},
    {"16k", {16 * K1}, {16, 37, 22, 32}},
    {"32k", {32 * K1}, {37, 74, 32, 64}},
    {"64k", {64 * K1}, {74, 147, 64, 128}},
    {"128k", {128 * K1}, {147, 293, 128, 256}},
    {"256k", {256 * K1}, {293, 586, 256, 512}},
    {"2x32k", several(2, 32 * K1), {74, 128, 64, 128}},
    {"4x16k", several(4, 16 * K1), {64, 0, 64, 0}},
    {"8x8k", several(8, 8 * K1), {0, 0, 0, 0}},
    {"64k and 64x1k", Chunks{64 * K1} + several(64, K1), {64, 147, 64, 128}},
    {"32x1k and 64k", several(32, K1) + Chunks{64 * K1}, {74, 147, 64, 128}},
    {"64k,32k,..,1k",
     {64 * K1, 32 * K1, 16 * K1, 8 * K1, 4 * K1, 2 * K1, K1},
     {128, 256, 147, 256}},
    {"28k,4k", {28 * K1, 4 * K1}, {38, 64, 32, 64}},
    {"40k,1k,8k", {40 * K1, K1, 8 * K1}, {54, 107, 54, 107}},
    {"128k,1k", {128 * K1, K1}, {147, 293, 128, 256}},
};

static dp_segments_case case_of(int HV, bool backward, int sms = 132) {
    return {HV, 128, 128, 0, 1, backward, 0, sms};
}
static int split_piece(const dp_segments_case &c, const Chunks &chunks) {
    return dp_segments_most(&c, chunks.data(), (int)chunks.size());
}

/* The same answer for the same numbers, on every machine. */
static void decides() {
    for (auto &r : BATCHES)
        for (int i = 0; i < 4; i++) {
            int most = split_piece(case_of(i % 2 ? 8 : 4, i > 1), r.chunks);
            fact(most == r.most[i], "%s, %d heads%s: segments of %d chunks, expected %d", r.name,
                 i % 2 ? 8 : 4, i > 1 ? ", backward" : "", most, r.most[i]);
        }
}

static dp_segments_time takes(const dp_segments_case &c, const Chunks &chunks, int most) {
    return dp_segments_time_of(&c, chunks.data(), (int)chunks.size(), most);
}

/* Batches of all kinds: every cut is expected to gain the margin, no segment has fewer chunks than
 * allowed, none more than the rule says. */
static void keeps_to_its_limits() {
    uint32_t x = 1;
    auto draw = [&](int n) { return (int)((x = x * 1664525u + 1013904223u) >> 8) % n; };
    int cut = 0, whole = 0;
    for (int i = 0; i < 400; i++) {
        dp_segments_case c = case_of(1 << draw(6), draw(2), i % 5 ? 132 : 16 + draw(200));
        c.K = 64 << draw(2);
        c.V = 64 << draw(2);
        c.one_gate = draw(2);
        c.bare = draw(2);
        c.save_all = draw(4) == 0;
        Chunks chunks;
        for (int n = 1 + draw(i % 3 ? 4 : 40); n; n--)
            chunks.push_back(1 + draw(draw(4) ? 64 : 2048));
        int most = split_piece(c, chunks);
        most ? cut++ : whole++;
        fact(most == split_piece(c, chunks), "batch %d: another answer", i);
        if (!most) continue;
        const dp_segments_time whole = takes(c, chunks, 0);
        int64_t gain = whole.cut - takes(c, chunks, most).cut, all = whole.cut + whole.rest;
        fact(gain > DP_SEGMENTS_SURE && gain > all / 100 * DP_SEGMENTS_MARGIN,
             "batch %d: %lld of %lld ps gained", i, (long long)gain, (long long)all);
        for (int n : chunks) { /* segments alike to a chunk */
            int parts = dp_segments_of(n, most), least = n / parts;
            fact(least + (n % parts > 0) <= most, "batch %d: a segment of more than %d", i, most);
            fact(parts == 1 || least >= DP_SEGMENT_LEAST / 2, "batch %d: one of %d", i, least);
        }
    }
    fact(cut > 50 && whole > 50, "%d batches cut, %d whole", cut, whole);
}

/* One sequence: a longer one is cut where a shorter one is, and on a card of more multiprocessors
 * where on one of fewer. (1 and 2 heads: more may take another kernel there.) Sequences that fill
 * the card are not cut. */
static void is_monotone() {
    for (int HV : {1, 2, 4, 8})
        for (bool backward : {false, true}) {
            for (int sms : {132, 264}) {
                int was = 0;
                for (int n = 16; n <= 8192; n = n * 5 / 4) {
                    int most = split_piece(case_of(HV, backward, sms), {n});
                    fact(most || !was, "%d heads, %d multiprocessors: %d chunks are whole", HV, sms,
                         n);
                    was = most;
                }
                fact(was > 0, "%d heads, %d multiprocessors: never cut", HV, sms);
            }
            for (int n = 16; n <= 8192 && HV <= 2; n *= 2)
                for (int sms = 33; sms < 264; sms *= 2)
                    fact(!split_piece(case_of(HV, backward, sms), {n}) ||
                             split_piece(case_of(HV, backward, 2 * sms), {n}),
                         "%d heads, %d chunks: cut on %d multiprocessors, not on %d", HV, n, sms,
                         2 * sms);
            fact(!split_piece(case_of(HV, backward), several(264 / HV, 1024)),
                 "%d heads: a full card is cut", HV);
        }
}

/* Segments that a plan makes of sequences of so many chunks. */
static int planned(const Chunks &chunks, int HV, bool backward, int segment_chunks) {
    std::vector<int64_t> cu = {0};
    for (int n : chunks)
        cu.push_back(cu.back() + n * 64);
    dpg_problem p = sized(cu, HV, HV, 128, 128, 1, 128, DPG_BF16);
    dpg_options o = {};
    o.base = DP_BASE_BF16;
    o.chain = DP_FP32;
    o.path = DPG_PATH_FAST;
    o.chain_how = DPG_CHAIN_AUGMENTED;
    o.backward = backward;
    o.segment_chunks = segment_chunks;
    dpg_plan *plan = NULL;
    dp_err e = {DP_OK, ""};
    fact(dpg_plan_create(&plan, &p, &o, 0, 1, &e) == DP_OK, "plan: %s", e.msg);
    int made = plan ? dpg_plan_segments(plan) : 0;
    dpg_plan_destroy(plan);
    return made;
}

/* A plan cuts every sequence that the rule cuts, wherever it lies. Where a backward is whole, its
 * forward is cut as if it were alone. */
static void is_followed() {
    for (auto &r : BATCHES)
        for (bool backward : {false, true}) {
            int most = split_piece(case_of(4, backward), r.chunks), want = 0;
            if (!most) most = split_piece(case_of(4, false), r.chunks);
            for (int n : r.chunks)
                want += dp_segments_of(n, most) > 1 ? dp_segments_of(n, most) : 0;
            int made = planned(r.chunks, 4, backward, 0);
            fact(made == (want ? want : 1), "%s: %d segments, the rule says %d", r.name, made,
                 want);
        }
    fact(planned({8, 20, 3, 9}, 2, true, 8) == 3 + 2, "20 and 9 chunks in segments of 8");
}

/* o, then the last states, of a forward in one call or by steps. */
static Vec results(Rank &r, bool by_step) {
    Vec all;
    r.clear_outputs();
    r.clear_workspace();
    for (int step = 1; by_step && step < DPG_STEP_ALL; step *= 2)
        DP(r.err, dpg_forward_steps(r.plan, &r.t, r.ws, NULL, r.stream, step, &r.err));
    if (!by_step) DP(r.err, r.forward(NULL));
    for (const Share &x : r.shares)
        if (x.is_output) {
            const Vec y = r.read(x);
            all.insert(all.end(), y.begin(), y.end());
        }
    return all;
}

/* Two heads of 193 chunks, the last of 12 tokens; the pass has 2 of 6 multiprocessors. */
static void runs_in_spans() {
    setenv("DP_CPU_MULTIPROCESSORS", "6", 1);
    for (int Kg : {1, 64}) {
        const std::vector<int64_t> cu = {0, 192 * 64 + 12};
        dpg_problem p = sized(cu, 1, 2, 64, 64, 1, Kg, DPG_BF16);
        dpg_options o = {};
        uint32_t seed = 7;
        Rank r;
        p.gate = DP_GATE_LOWER_BOUND;
        p.lower_bound = -0.01;
        o.base = DP_BASE_BF16;
        o.chain = DP_FP32;
        o.path = DPG_PATH_FAST;
        o.chain_how = DPG_CHAIN_AUGMENTED;
        o.segments = 1;
        r.open(p, o, 0, 1, [&](const Share &x) {
            char *at = (char *)r.memory.room(x.bytes());
            for (int64_t i = 0; i < x.n; i++) {
                const float z = ((seed = seed * 1664525u + 1013904223u) >> 8) * 0x1p-23f - 1;
                if (x.type == DPG_F32)
                    ((float *)at)[i] = z;
                else
                    memcpy(at + 2 * i, (const char *)&z + 2, 2);
            }
            return at;
        });
        fact(r.plan->spans == SPANS, "%d gates: %d spans", Kg, r.plan->spans);
        fact(same_bits(results(r, false), results(r, true)), "%d gates: other bits in spans", Kg);
        r.close();
    }
}

int main() {
    setenv("DP_CPU_CAPABILITY", "90", 1);
    setenv("DP_CPU_MULTIPROCESSORS", "132", 1);
    decides();
    keeps_to_its_limits();
    is_monotone();
    is_followed();
    runs_in_spans();
    return verdict();
}
