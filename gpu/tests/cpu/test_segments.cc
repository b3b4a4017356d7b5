/* gpu/tests/cpu/test_segments.cc - a rank whose sequence is cut in segments. M and dM are chains
 * over all of its chunks, the same bits as uncut. Its (M, H) from those of its segments, their
 * initial states, and the backward's composition and merge over parts equal fp64 loops. Elements
 * through windows equal those of a gather by the test itself, forward after forward, whichever rank
 * is late, enqueued or replayed as graphs.
 *
 * Only the fast path cuts. But these kernels are shared by all paths (chain/), so the test cuts a
 * plan of the simple path itself. */
#include "plan/paths.cuh"
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <thread>
#include <unistd.h>
#include <vector>

#define NEED(expr)                                     \
    do {                                               \
        dp_status st_ = (expr);                        \
        if (st_ != DP_OK) {                            \
            fprintf(stderr, "%s: %s\n", #expr, e.msg); \
            exit(2);                                   \
        }                                              \
    } while (0)

static float next(uint32_t &x) { return ((x = x * 1664525u + 1013904223u) >> 8) * 0x1p-23f - 1; }

typedef std::vector<double> Vec;
static double off_by(const float *got, int ld, const Vec &want, int K, int V) {
    double d = 0, w = 0;
    for (int i = 0; i < K * V; i++) {
        d += pow(got[i / V * ld + i % V] - want[i], 2);
        w += want[i] * want[i];
    }
    return sqrt(d / w);
}

/* A rank of one sequence of T tokens, forward and backward on the simple path in fp32. */
static dpg_plan *plan_of(int64_t T, int HV, int K, int V, int rank, int N, int dh_only) {
    const int64_t cu[] = {0, T};
    dpg_problem p = {};
    dpg_options o = {};
    dpg_plan *plan;
    dp_err e = {DP_OK, ""};
    p.T = T;
    p.H = p.HV = HV;
    p.K = p.Kg = K;
    p.V = V;
    p.R = 1;
    p.Nseq = 1;
    p.cu = cu;
    p.scale = 1;
    p.gate = DP_GATE_LOG;
    o.base = DP_BASE_FP32;
    o.chain = DP_FP32;
    o.path = o.bwd_path = DPG_PATH_SIMPLE;
    o.backward = 1;
    o.send_dh_only = dh_only;
    NEED(dpg_plan_create(&plan, &p, &o, rank, N, &e));
    return plan;
}

/* The backward of rank 1 of 4 of one sequence in 3 parts, from random elements. */
struct Parts {
    enum { parts = 3, rank = 1, N = 4 };
    const int HV, K, V, dh_only, row;
    dpg_plan *plan, *b;
    void *ws;
    std::vector<float> saved;
    dpg_tensors t = {};

    Parts(int HV, int K, int V, int dh_only)
        : HV(HV), K(K), V(V), dh_only(dh_only), row(dh_only ? V : V + K),
          plan(plan_of(N * 256, HV, K, V, rank, N, dh_only)), b(plan->bwd) {
        size_t kv = (size_t)HV * K * V, kk = (size_t)HV * K * K, at_seg = b->ws_bytes,
               at_out = at_seg + (parts * kv * 4 + 255) / 256 * 256,
               bytes = at_out + (parts * kv * 4 + 255) / 256 * 256;
        b->parts = b->saved_parts = b->cuts_h[0].n = parts;
        b->cuts = b->cuts_h;
        b->buf[B_SEG] = Buf{at_seg, parts * kv * 4, 0, PLAIN};
        b->buf[B_DSOUT] = Buf{at_out, parts * kv * 4, 0, PLAIN};
        ws = aligned_alloc(256, bytes);
        saved.resize(b->saved_states * kv + (b->saved_ms + parts) * kk);
        t.saved = saved.data();
        draw();
    }
    ~Parts() {
        dpg_plan_destroy(plan);
        free(ws);
    }
    void draw() {
        uint32_t seed = 7 * K + V;
        for (float &x : saved)
            x = next(seed) * 1.5f / sqrtf((float)K);
        for (int slot : {B_DHMALL, B_SEG})
            for (size_t i = 0; i < b->buf[slot].bytes / 4; i++)
                at<float>(b, ws, slot)[i] =
                    next(seed) *
                    (slot == B_DHMALL && i % row >= (size_t)V ? 1.5f / sqrtf((float)K) : 1);
    }
    /* P <- M P + add, [K][V]; entry (r, k) of M at r sr + k sk. */
    void apply(Vec &P, const float *m, int sr, int sk, const float *add, int lda) const {
        Vec Q(K * V);
        for (int r = 0; r < K; r++)
            for (int c = 0; c < V; c++) {
                double sum = add[r * lda + c];
                for (int k = 0; k < K; k++)
                    sum += (double)m[r * sr + k * sk] * P[k * V + c];
                Q[r * V + c] = sum;
            }
        P = Q;
    }
    /* dS_out of the rank in fp64, from the elements of the ranks behind it. */
    Vec from_ranks(int hv) {
        const float *all = at<float>(b, ws, B_DHMALL);
        Vec S(K * V);
        for (int j = N - 1; j > rank; j--) {
            const float *E = all + ((size_t)j * HV + hv) * K * row,
                        *M = dh_only
                                 ? saved_rank_m(b, &t) +
                                       ((size_t)(j < N - 1 ? j - rank - 1 : 0) * HV + hv) * K * K
                                 : E + V;
            /* the farthest multiplies zeros */
            apply(S, M, dh_only ? 1 : row, dh_only ? K : 1, E, row);
        }
        return S;
    }
    /* Worst relative error of a head: what its parts start from, and its dH. */
    double off_of(int hv) {
        const float *seg = at<float>(b, ws, B_SEG), *out = at<float>(b, ws, B_DSOUT);
        Vec S = from_ranks(hv), H(K * V);
        double worst = 0;
        for (int i = parts - 1; i >= 0; i--) {
            const float *M = saved_part_m(b, &t) + ((size_t)i * HV + hv) * K * K,
                        *dH = seg + ((size_t)i * HV + hv) * K * V,
                        *got = out + ((size_t)(parts - 1 - i) * HV + hv) * K * V;
            worst = fmax(worst, off_by(got, V, S, K, V));
            apply(S, M, 1, K, dH, V);
            apply(H, M, 1, K, dH, V);
        }
        const float *dHM = at<float>(b, ws, B_DHM) + (size_t)hv * K * row;
        return fmax(worst, off_by(dHM, row, H, K, V));
    }
};

static int test_parts(int HV, int K, int V, int dh_only) {
    dp_err e = {DP_OK, ""};
    Parts x(HV, K, V, dh_only);
    Call c = {x.b, &x.t, NULL, x.ws, NULL, &e};
    NEED(chain_compose_bwd(c));
    NEED(chain_merge_bwd(c));
    double worst = 0;
    for (int hv = 0; hv < HV; hv++)
        worst = fmax(worst, x.off_of(hv));
    printf("parts of the backward, HV %d K %d V %d%s: %.1e from fp64\n", HV, K, V,
           dh_only ? ", dH alone" : "", worst);
    return !(worst < 8 * K * 0x1p-24); /* 5 sums of K products one behind the other */
}

/* X <- M X + H of one element [K][V+K] = (H, M); X a state or an element itself: (H, M) <- (M H' +
 * H, M M'). */
static void apply(Vec &x, const float *E, int K, int V) {
    int w = (int)x.size() / K;
    Vec y(x.size());
    for (int r = 0; r < K; r++)
        for (int c = 0; c < w; c++) {
            double sum = c < V ? E[r * (V + K) + c] : 0;
            for (int k = 0; k < K; k++)
                sum += (double)E[r * (V + K) + V + k] * x[k * w + c];
            y[r * w + c] = sum;
        }
    x = y;
}

static double off(const float *x, const Vec &want, int ld, int width, int K) {
    double d = 0, s = 0;
    for (int r = 0; r < K; r++)
        for (int c = 0; c < width; c++) {
            double w = want[(size_t)r * (want.size() / K) + c], e = x[r * ld + c] - w;
            d += e * e;
            s += w * w;
        }
    return s > 0 ? sqrt(d / s) : d;
}

/* Its last local sub-sequence is the one that is cut. */
static void cut_in_one(dpg_plan &p, Cut *cut) {
    p.ncut = 1;
    p.cuts = p.cuts_h = cut;
}

/* Worst relative error of the element and the initial states of one of 4 ranks. The problem has 2
 * heads; the rank's sequence is cut in 5 and begins `pre` ranks before it. */
static double elements(int K, int V, int rank, int pre, int whole) {
    const int N = 4, HV = 2, nseg = 5, row = V + K, is_last = rank == N - 1;
    size_t E = (size_t)K * row, words = 0;
    dpg_plan p = {};
    dp_err e = {DP_OK, ""};
    p.d.K = K;
    p.d.V = V;
    p.d.HV = HV;
    p.nseg = nseg;
    Cut cut = {0, nseg};
    cut_in_one(p, &cut);
    p.N = N;
    p.rank = rank;
    p.pre = pre;
    p.is_last = is_last;
    p.whole = whole;
    p.opt.chain_how = DPG_CHAIN_AUGMENTED;
    for (int slot : {B_HM, B_HMALL, B_SEG, B_PREFIX, B_SIN}) {
        size_t n = HV * E * (slot == B_HM ? 1 : slot == B_HMALL ? N : nseg);
        p.buf[slot].off = words * 4;
        p.buf[slot].bytes = n * 4;
        words += n;
    }
    float *ws = (float *)aligned_alloc(256, (words * 4 + 255) / 256 * 256),
          *all = at<float>(&p, ws, B_HMALL), *seg = at<float>(&p, ws, B_SEG),
          *own = at<float>(&p, ws, B_HM);
    uint32_t x = 7;
    memset(ws, 0xff, words * 4);
    for (size_t i = 0; i < N * HV * E; i++)
        all[i] = next(x) * 1.7f / sqrtf((float)K);
    for (size_t i = 0; i < nseg * HV * E; i++)
        seg[i] = next(x) * 1.7f / sqrtf((float)K);
    Call c = {&p, NULL, NULL, ws, NULL, &e};
    NEED(chain_compose(c));
    NEED(chain_merge(c));
    double worst = 0;
    for (int hv = 0; hv < HV; hv++) {
        Vec S((size_t)K * V, 0), all_parts(seg + hv * E, seg + (hv + 1) * E);
        for (int r = rank - pre; r < rank; r++)
            apply(S, all + (r * HV + hv) * E, K, V);
        for (int i = 0; i < nseg; i++) {
            worst = fmax(worst,
                         off(at<float>(&p, ws, B_SIN) + (size_t)(i * HV + hv) * K * V, S, V, V, K));
            if (i == 0 && whole) S.assign(S.size(), 0);
            apply(S, seg + (i * HV + hv) * E, K, V);
            if (i) apply(all_parts, seg + (i * HV + hv) * E, K, V);
        }
        if (!is_last) worst = fmax(worst, off(own + hv * E, all_parts, row, whole ? V : row, K));
    }
    free(ws);
    printf("segments, K %d V %d, rank %d of 4 behind %d, %s: element and states %.1e from fp64\n",
           K, V, rank, pre, whole ? "starts" : "continues", worst);
    return worst;
}

/* One of 4 ranks of a sequence of one head whose elements go through windows, nseg segments. */
struct Member {
    dpg_plan p = {};
    Cut cut;
    std::vector<float> ws;
    dp_err e = {DP_OK, ""};
    int failed = 0;

    Member(int K, int V, int rank, int nseg) {
        const int HV = 1, N = 4;
        size_t words = 0, E = (size_t)HV * K * (V + K);
        p.d.K = K;
        p.d.V = V;
        p.d.HV = HV;
        p.nseg = nseg;
        cut = {0, nseg};
        p.N = N;
        p.rank = rank;
        p.pre = rank;
        p.post = N - 1 - rank;
        p.is_last = rank == N - 1;
        p.is_first = p.whole = rank == 0;
        p.needs_m = rank && !p.is_last;
        p.opt.backward = p.opt.send_dh_only = 1;
        p.saved_ms = p.post > 1 ? p.post - 1 : 0;
        p.opt.chain_how = DPG_CHAIN_AUGMENTED;
        p.opt.path = DPG_PATH_FAST;
        for (int slot : {B_HM, B_HMALL, B_SEG, B_PREFIX, B_SIN}) {
            size_t n = E * (slot == B_HM ? 1 : slot == B_HMALL ? N : nseg);
            p.buf[slot].off = words * 4;
            p.buf[slot].bytes = n * 4;
            words += n;
        }
        ws.assign(words, NAN);
    }
    /* Behind an error a window stays: kernels of other ranks may still store into it. */
    ~Member() { window_destroy(&p); }
    Call call(const dpg_tensors *t, dp_err *err) {
        cut_in_one(p, &cut);
        return Call{&p, t, NULL, ws.data(), NULL, err};
    }
    float *slot(int s) { return at<float>(&p, ws.data(), s); }
    void draw(int forward) {
        uint32_t x = 100 * forward + p.rank + 1;
        float *seg = slot(p.nseg > 1 ? B_SEG : B_HM);
        for (size_t i = 0; i < p.nseg * p.buf[B_HM].bytes / 4; i++)
            seg[i] = next(x) * 1.7f / sqrtf((float)p.d.K);
    }
};

static const int RANKS = 4, FORWARDS = 6, NSEG[RANKS] = {3, 1, 2, 2};

/* One forward, a rank each: its initial states, then the M that it keeps for the backward, of
 * elements that the test copied. */
static std::vector<std::vector<float>> by_hand(int K, int V, int forward) {
    std::vector<std::vector<float>> want;
    std::vector<Member> m;
    dp_err e = {DP_OK, ""};
    for (int r = 0; r < RANKS; r++) {
        m.emplace_back(K, V, r, NSEG[r]);
        m[r].draw(forward);
        NEED(chain_compose(m[r].call(NULL, &e)));
    }
    for (int r = 0; r < RANKS; r++) {
        for (int j = 0; j < RANKS; j++)
            memcpy(m[r].slot(B_HMALL) + j * m[j].p.buf[B_HM].bytes / 4, m[j].slot(B_HM),
                   m[j].p.buf[B_HM].bytes);
        NEED(chain_merge(m[r].call(NULL, &e)));
        want.emplace_back(m[r].slot(B_SIN), m[r].slot(B_SIN) + (size_t)K * V * NSEG[r]);
        for (int j = r + 1; j <= r + m[r].p.saved_ms; j++)
            for (int i = 0; i < K * K; i++)
                want[r].push_back(m[j].slot(B_HM)[i / K * (V + K) + V + i % K]);
    }
    return want;
}

/* The rank that sleeps, before it sends (0) or before it reads (1). */
struct Late {
    int rank, when;
};

/* Enqueues what a forward does with its windows. */
static dp_status enqueue(Member &m, dpg_comm *comm, const dpg_tensors &t, int sleeps) {
    dp_status st = chain_compose(m.call(&t, &m.e));
    if (st == DP_OK) st = comm->enter(comm, NULL, &m.e);
    if (sleeps == 1) usleep(3000);
    if (st == DP_OK) st = chain_merge(m.call(&t, &m.e));
    return st == DP_OK ? window_keep(m.call(&t, &m.e)) : st;
}

/* The same in a graph. */
static dp_status capture(Member &m, dpg_comm *comm, const dpg_tensors &t, cudaGraph_t *graph) {
    cudaStreamBeginCapture(NULL, cudaStreamCaptureModeThreadLocal);
    dp_status st = enqueue(m, comm, t, -1);
    cudaStreamEndCapture(NULL, graph);
    return st;
}

/* One forward of a rank through its windows, by a graph if there is one: are states and kept M
 * those of `want`? */
static dp_status forward_of(Member &m, dpg_comm *comm, const dpg_tensors &t, int f, int sleeps,
                            cudaGraph_t graph, const std::vector<float> &want) {
    size_t states = (size_t)m.p.d.K * m.p.d.V * m.p.nseg,
           ms = (size_t)m.p.saved_ms * m.p.d.K * m.p.d.K;
    m.draw(f);
    if (sleeps == 0) usleep(3000);
    dp_status st = DP_OK;
    if (graph)
        cudaGraphLaunch((cudaGraphExec_t)graph, NULL);
    else
        st = enqueue(m, comm, t, sleeps);
    if (st == DP_OK && ms && memcmp(t.saved, want.data() + states, ms * 4))
        st = dpg_fail(&m.e, DP_EDEVICE, "forward %d: other M", f);
    if (st == DP_OK && memcmp(m.slot(B_SIN), want.data(), states * 4))
        st = dpg_fail(&m.e, DP_EDEVICE, "forward %d: other states", f);
    return st;
}

/* replays: the first and the last forward are enqueued, those between are one graph. 1: it failed,
 * and has said why. */
static int run_rank(int K, int V, int r, dpg_comm *comm, Late late, int replays,
                    const std::vector<std::vector<std::vector<float>>> &want) {
    Member m(K, V, r, NSEG[r]);
    dpg_tensors t = {};
    std::vector<float> saved((size_t)m.p.saved_ms * K * K + 1, NAN);
    t.saved = saved.data();
    dp_status st = dpg_plan_connect(&m.p, comm, &m.e);
    if (st == DP_OK && !m.p.window.mine) st = dpg_fail(&m.e, DP_EDEVICE, "no windows");
    cudaGraph_t graph = NULL;
    if (st == DP_OK && replays) st = capture(m, comm, t, &graph);
    for (int f = 0; f < FORWARDS && st == DP_OK; f++)
        st = forward_of(m, comm, t, f, r == late.rank ? late.when : -1,
                        f && f < FORWARDS - 1 ? graph : NULL, want[f][r]);
    if (graph) cudaGraphDestroy(graph);
    dp_err last = {DP_OK, ""};
    dp_status end = comm->wait(comm, NULL, &last);
    int failed = st != DP_OK || end != DP_OK;
    if (failed)
        printf("windows, K %d V %d, rank %d slow %s: rank %d: %s %s\n", K, V, late.rank,
               late.when ? "to read" : "to send", r, m.e.msg, last.msg);
    return failed;
}

/* Initial states of ranks and M that they keep for the backward, forward after forward. They equal
 * those of elements that the test copied, whichever rank is late. */
static int test_windows(int K, int V, Late late, int replays) {
    std::vector<std::vector<std::vector<float>>> want;
    std::vector<std::thread> th;
    std::vector<dpg_comm> comm(RANKS);
    std::vector<int> failed(RANKS);
    dp_err e = {DP_OK, ""};
    for (int f = 0; f < FORWARDS; f++)
        want.push_back(by_hand(K, V, f));
    const int devices[RANKS] = {0, 1, 2, 3};
    NEED(dpg_comm_devices(comm.data(), RANKS, devices, 5, &e));
    for (int r = 0; r < RANKS; r++)
        th.emplace_back([&, r] { failed[r] = run_rank(K, V, r, &comm[r], late, replays, want); });
    for (auto &t : th)
        t.join();
    for (auto &c : comm)
        c.destroy(&c);
    int sum = 0;
    for (int f : failed)
        sum += f;
    printf("windows, K %d V %d, rank %d slow %s: %d forwards%s, %d ranks failed\n", K, V, late.rank,
           late.when ? "to read" : "to send", FORWARDS, replays ? ", replayed" : "", sum);
    return sum;
}

/* Rank 1 never comes to its second replay: what the others are told. */
static int test_dead_replay() {
    std::vector<std::thread> th;
    std::vector<dpg_comm> comm(RANKS);
    const int devices[RANKS] = {0, 1, 2, 3}, dead = 1;
    int unnamed = 0;
    dp_err e = {DP_OK, ""};
    NEED(dpg_comm_devices(comm.data(), RANKS, devices, 1, &e));
    for (int r = 0; r < RANKS; r++)
        th.emplace_back([&, r] {
            Member m(64, 64, r, NSEG[r]);
            dpg_tensors t = {};
            std::vector<float> saved((size_t)m.p.saved_ms * 64 * 64 + 1);
            cudaGraph_t graph;
            t.saved = saved.data();
            dp_status st = dpg_plan_connect(&m.p, &comm[r], &m.e);
            m.draw(0);
            if (st == DP_OK) st = capture(m, &comm[r], t, &graph);
            for (int f = 0; f < (r == dead ? 1 : FORWARDS) && st == DP_OK; f++)
                cudaGraphLaunch((cudaGraphExec_t)graph, NULL);
            if (r == dead) usleep(2000000); /* a wait has the limit of a call */
            if (st == DP_OK) st = comm[r].wait(&comm[r], NULL, &m.e);
            printf("rank %d never comes to a replay: rank %d: %s\n", dead, r, m.e.msg);
            unnamed += !strstr(m.e.msg, "rank 1 did not reach call of a graph 2 within 1.0 s");
        });
    for (auto &x : th)
        x.join();
    for (auto &c : comm)
        c.destroy(&c);
    return unnamed;
}

/* M or dM of rank 1 of 3 in [K][row], its 8 chunks (the last one ragged) as they are or cut. */
static void chain_of(dpg_plan *b, void *ws, int nseg, float *m, int K, int row) {
    dp_err e = {DP_OK, ""};
    Seq whole = local_sequence(b, 0), *keep = b->seqs_h;
    std::vector<Seq> part(nseg + 1, whole);
    for (int i = 0; i < nseg; i++) {
        part[i].c0 = whole.c1 * i / nseg;
        part[i].c1 = whole.c1 * (i + 1) / nseg;
        part[i].part = i;
    }
    if (nseg > 1) {
        b->seqs_h = part.data();
        b->nseg = b->whole0 = nseg;
    }
    if (b->is_bwd)
        NEED(chain_pre_dm(Call{b, NULL, NULL, ws, NULL, &e}, m + K, row));
    else {
        NEED(chain_pre_m(Call{b, NULL, NULL, ws, NULL, &e}));
        memcpy(m, at<float>(b, ws, B_HM), 2 * (size_t)K * row * sizeof(float));
    }
    b->seqs_h = keep;
    b->nseg = 1;
    b->whole0 = 0;
}

/* The same bits cut in 3 as uncut. */
static int test_chain(dpg_plan *b, int K) {
    const int row = 2 * K, nseg = 3;
    const size_t words = 2 * (size_t)K * row;
    void *ws = aligned_alloc(256, (b->ws_bytes + 255) / 256 * 256);
    std::vector<float> m[2] = {std::vector<float>(words), std::vector<float>(words)};
    uint32_t x = 1;
    for (int slot : {B_W, B_KG, B_EC})
        for (size_t i = 0; i < b->buf[slot].bytes / 4; i++)
            at<float>(b, ws, slot)[i] =
                (slot == B_EC ? 0.9f : -0x1p-4f) +
                ((x = x * 1664525u + 1013904223u) >> 8) * (slot == B_EC ? 0x1p-28f : 0x1p-27f);
    chain_of(b, ws, 1, m[0].data(), K, row);
    chain_of(b, ws, nseg, m[1].data(), K, row);
    double size = 0, off = 0;
    for (size_t i = 0; i < words; i++)
        if (i % row >= (size_t)K) {
            size += (double)m[0][i] * m[0][i];
            off += !(m[0][i] == m[1][i]);
        }
    printf("%s: |M| %.3g, %g of %zu entries differ when cut in %d\n", b->is_bwd ? "dM" : "M",
           sqrt(size), off, words / 2, nseg);
    free(ws);
    return off > 0 || !(size > 1e-6 && size < 1e6);
}

/* The driver is told once how much shared memory a kernel takes, not at every launch. */
static int test_shared_memory() {
    elements(128, 64, 2, 2, 0);
    const int once = cpu::attributes_set();
    elements(128, 64, 2, 2, 0);
    const int twice = cpu::attributes_set();
    printf("told of shared memory %d times, after further launches %d times\n", once, twice);
    return !once || twice != once;
}

int main() {
    const int K = 16;
    dpg_plan *plan = plan_of(3 * 500, 2, K, K, 1, 3, 0);
    int failed = test_chain(plan, K) | test_chain(plan->bwd, K);
    dpg_plan_destroy(plan);
    for (int dh_only : {0, 1})
        failed |= test_parts(2, 16, 16, dh_only) | test_parts(1, 128, 64, dh_only) |
                  test_parts(1, 256, 16, dh_only) | test_parts(2, 48, 48, dh_only) |
                  test_parts(100, 16, 32, dh_only) | test_parts(100, 32, 16, dh_only);
    const struct {
        int K, V, rank, pre, whole;
    } rank[] = {{64, 64, 2, 2, 0}, {64, 64, 3, 3, 0},  {64, 64, 0, 0, 1}, {64, 64, 2, 1, 1},
                {64, 64, 3, 3, 1}, {64, 128, 2, 2, 0}, {128, 64, 2, 2, 0}};
    for (auto &r : rank)
        failed |= !(elements(r.K, r.V, r.rank, r.pre, r.whole) < 5e-7);
    for (int replays : {0, 1})
        for (int slow = 0; slow < RANKS; slow++)
            failed |= test_windows(64, slow ? 64 : 128, {slow, slow % 2}, replays) > 0;
    failed |= test_dead_replay() > 0;
    return failed | test_shared_memory();
}
