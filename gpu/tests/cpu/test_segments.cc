/* gpu/tests/cpu/test_segments.cc - a rank whose sequence is cut in segments: M and dM are chains
 * over all of its chunks, the same bits as uncut; its (M, H) from those of its segments, the states
 * that they start from, and the backward's composition and merge over parts are those of fp64
 * loops. Elements through windows are those of a gather by hand, forward after forward, whoever is
 * late.
 *
 * Only the fast path cuts; but these kernels are shared by all paths (chain/), so a plan of the
 * simple path is cut by hand. */
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

/* Rank 1 of 4 of one sequence: dS_out of the rank, what its parts start from, and its dH, from
 * random elements. */
static int test_parts(int HV, int K, int V, int dh_only) {
    const int parts = 3, rank = 1, N = 4, row = dh_only ? V : V + K;
    dp_err e = {DP_OK, ""};
    dpg_plan *plan = plan_of(N * 256, HV, K, V, rank, N, dh_only);
    dpg_plan *b = plan->bwd;
    b->parts = b->saved_parts = parts;
    size_t kv = (size_t)HV * K * V, kk = (size_t)HV * K * K, at_seg = b->ws_bytes,
           at_out = at_seg + (parts * kv * 4 + 255) / 256 * 256,
           bytes = at_out + (parts * kv * 4 + 255) / 256 * 256;
    b->buf[B_SEG] = Buf{at_seg, parts * kv * 4, 0, PLAIN};
    b->buf[B_DSOUT] = Buf{at_out, parts * kv * 4, 0, PLAIN};
    void *ws = aligned_alloc(256, bytes);
    std::vector<float> saved(b->saved_states * kv + (b->saved_ms + parts) * kk);
    uint32_t seed = 7 * K + V;
    for (float &x : saved)
        x = next(seed) * 1.5f / sqrtf((float)K);
    for (int slot : {B_DHMALL, B_SEG})
        for (size_t i = 0; i < b->buf[slot].bytes / 4; i++)
            at<float>(b, ws, slot)[i] =
                next(seed) *
                (slot == B_DHMALL && i % row >= (size_t)V ? 1.5f / sqrtf((float)K) : 1);
    dpg_tensors t = {};
    t.saved = saved.data();
    Call c = {b, &t, NULL, ws, NULL, &e};
    NEED(chain_compose_bwd(c));
    NEED(chain_merge_bwd(c));
    double worst = 0;
    for (int hv = 0; hv < HV; hv++) {
        Vec S(K * V), H(K * V);
        const float *all = at<float>(b, ws, B_DHMALL), *seg = at<float>(b, ws, B_SEG),
                    *out = at<float>(b, ws, B_DSOUT);
        auto apply = [&](Vec &P, const float *m, int sr, int sk, const float *add, int lda) {
            Vec Q(K * V);
            for (int r = 0; r < K; r++)
                for (int c = 0; c < V; c++) {
                    double sum = add[r * lda + c];
                    for (int k = 0; k < K; k++)
                        sum += (double)m[r * sr + k * sk] * P[k * V + c];
                    Q[r * V + c] = sum;
                }
            P = Q;
        };
        for (int j = N - 1; j > rank; j--) {
            const float *E = all + ((size_t)j * HV + hv) * K * row,
                        *M = dh_only
                                 ? saved_rank_m(b, &t) +
                                       ((size_t)(j < N - 1 ? j - rank - 1 : 0) * HV + hv) * K * K
                                 : E + V;
            /* the farthest multiplies zeros */
            apply(S, M, dh_only ? 1 : row, dh_only ? K : 1, E, row);
        }
        for (int i = parts - 1; i >= 0; i--) {
            const float *M = saved_part_m(b, &t) + ((size_t)i * HV + hv) * K * K,
                        *dH = seg + ((size_t)i * HV + hv) * K * V;
            worst =
                fmax(worst, off_by(out + ((size_t)(parts - 1 - i) * HV + hv) * K * V, V, S, K, V));
            apply(S, M, 1, K, dH, V);
            apply(H, M, 1, K, dH, V);
        }
        worst = fmax(worst, off_by(at<float>(b, ws, B_DHM) + (size_t)hv * K * row, row, H, K, V));
    }
    printf("parts of the backward, HV %d K %d V %d%s: %.1e from fp64\n", HV, K, V,
           dh_only ? ", dH alone" : "", worst);
    dpg_plan_destroy(plan);
    free(ws);
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

/* Rank `rank` of 4 of a problem of 2 heads, its sequence cut in 5, behind `pre` ranks: worst
 * relative error of its element and initial states. */
static double elements(int K, int V, int rank, int pre, int whole) {
    const int N = 4, HV = 2, nseg = 5, row = V + K, is_last = rank == N - 1;
    size_t E = (size_t)K * row, words = 0;
    dpg_plan p = {};
    dp_err e = {DP_OK, ""};
    p.d.K = K;
    p.d.V = V;
    p.d.HV = HV;
    p.nseg = nseg;
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
    Call call(const dpg_tensors *t, dp_err *err) { return Call{&p, t, NULL, ws.data(), NULL, err}; }
    float *slot(int s) { return at<float>(&p, ws.data(), s); }
    void draw(int forward) {
        uint32_t x = 100 * forward + p.rank + 1;
        float *seg = slot(p.nseg > 1 ? B_SEG : B_HM);
        for (size_t i = 0; i < p.nseg * p.buf[B_HM].bytes / 4; i++)
            seg[i] = next(x) * 1.7f / sqrtf((float)p.d.K);
    }
};

/* States that ranks start from and M that they keep for the backward, forward after forward: those
 * of elements copied by hand, whoever is late. slow: the rank that sleeps, before it sends or
 * before it reads. */
static int test_windows(int K, int V, int slow, int when) {
    const int N = 4, forwards = 6, nseg[N] = {3, 1, 2, 2};
    std::vector<std::vector<std::vector<float>>> want(forwards);
    std::vector<std::thread> th;
    std::vector<dpg_comm> comm(N);
    dp_err e = {DP_OK, ""};
    for (int f = 0; f < forwards; f++) {
        std::vector<Member> m;
        for (int r = 0; r < N; r++) {
            m.emplace_back(K, V, r, nseg[r]);
            m[r].draw(f);
            NEED(chain_compose(m[r].call(NULL, &e)));
        }
        for (int r = 0; r < N; r++) {
            for (int j = 0; j < N; j++)
                memcpy(m[r].slot(B_HMALL) + j * m[j].p.buf[B_HM].bytes / 4, m[j].slot(B_HM),
                       m[j].p.buf[B_HM].bytes);
            NEED(chain_merge(m[r].call(NULL, &e)));
            want[f].emplace_back(m[r].slot(B_SIN), m[r].slot(B_SIN) + (size_t)K * V * nseg[r]);
            for (int j = r + 1; j <= r + m[r].p.saved_ms; j++)
                for (int i = 0; i < K * K; i++)
                    want[f][r].push_back(m[j].slot(B_HM)[i / K * (V + K) + V + i % K]);
        }
    }
    const int devices[N] = {0, 1, 2, 3};
    NEED(dpg_comm_devices(comm.data(), N, devices, 5, &e));
    std::vector<int> failed(N);
    for (int r = 0; r < N; r++)
        th.emplace_back([&, r] {
            Member m(K, V, r, nseg[r]);
            dpg_tensors t = {};
            std::vector<float> saved((size_t)m.p.saved_ms * K * K + 1, NAN);
            t.saved = saved.data();
            dp_status st = dpg_plan_connect(&m.p, &comm[r], &m.e);
            if (st == DP_OK && !m.p.window.mine) st = dpg_fail(&m.e, DP_EDEVICE, "no windows");
            for (int f = 0; f < forwards && st == DP_OK; f++) {
                m.draw(f);
                if (r == slow && when == 0) usleep(3000);
                st = chain_compose(m.call(&t, &m.e));
                if (st == DP_OK) st = window_enter(&m.p, &comm[r], &m.e);
                if (r == slow && when == 1) usleep(3000);
                if (st == DP_OK) st = chain_merge(m.call(&t, &m.e));
                if (st == DP_OK) st = window_keep(m.call(&t, &m.e));
                size_t states = (size_t)K * V * nseg[r], ms = m.p.saved_ms * K * K;
                if (st == DP_OK && ms && memcmp(saved.data(), want[f][r].data() + states, ms * 4))
                    st = dpg_fail(&m.e, DP_EDEVICE, "forward %d: other M", f);
                if (st == DP_OK && memcmp(m.slot(B_SIN), want[f][r].data(), states * 4))
                    st = dpg_fail(&m.e, DP_EDEVICE, "forward %d: other states", f);
            }
            dp_err last = {DP_OK, ""};
            dp_status end = comm[r].wait(&comm[r], NULL, &last);
            if (st != DP_OK || end != DP_OK)
                printf("windows, K %d V %d, rank %d slow %s: rank %d: %s %s\n", K, V, slow,
                       when ? "to read" : "to send", r, m.e.msg, last.msg),
                    failed[r] = 1;
            free(m.p.window_memory), free(m.p.window.peer);
        });
    for (auto &t : th)
        t.join();
    for (auto &c : comm)
        c.destroy(&c);
    int sum = 0;
    for (int f : failed)
        sum += f;
    printf("windows, K %d V %d, rank %d slow %s: %d forwards, %d ranks failed\n", K, V, slow,
           when ? "to read" : "to send", forwards, sum);
    return sum;
}

int main() {
    const int K = 16, row = 2 * K, nseg = 3;
    dp_err e = {DP_OK, ""};
    dpg_plan *plan = plan_of(3 * 500, 2, K, K, 1, 3, 0); /* 8 chunks a rank, the last one ragged */
    int failed = 0;
    for (dpg_plan *b : {plan, plan->bwd}) {
        void *ws = aligned_alloc(256, (b->ws_bytes + 255) / 256 * 256);
        size_t words = 2 * (size_t)K * row, bytes = words * sizeof(float);
        float *m[2] = {(float *)calloc(words, sizeof(float)),
                       (float *)calloc(words, sizeof(float))};
        uint32_t x = 1;
        for (int slot : {B_W, B_KG, B_EC})
            for (size_t i = 0; i < b->buf[slot].bytes / 4; i++)
                at<float>(b, ws, slot)[i] =
                    (slot == B_EC ? 0.9f : -0x1p-4f) +
                    ((x = x * 1664525u + 1013904223u) >> 8) * (slot == B_EC ? 0x1p-28f : 0x1p-27f);
        for (int cut = 0; cut < 2; cut++) {
            Seq whole = local_sequence(b, 0), part[nseg];
            for (int i = 0; i < nseg; i++) {
                part[i] = whole;
                part[i].c0 = whole.c1 * i / nseg;
                part[i].c1 = whole.c1 * (i + 1) / nseg;
                part[i].part = i;
            }
            Seq *keep = b->seqs_h;
            if (cut) {
                b->seqs_h = part;
                b->nseg = nseg;
            }
            if (b->is_bwd)
                NEED(chain_pre_dm(Call{b, NULL, NULL, ws, NULL, &e}, m[cut] + K, row));
            else {
                NEED(chain_pre_m(Call{b, NULL, NULL, ws, NULL, &e}));
                memcpy(m[cut], at<float>(b, ws, B_HM), bytes);
            }
            b->seqs_h = keep;
            b->nseg = 1;
        }
        double size = 0, off = 0;
        for (size_t i = 0; i < words; i++)
            if (i % row >= K) {
                size += (double)m[0][i] * m[0][i];
                off += !(m[0][i] == m[1][i]);
            }
        printf("%s: |M| %.3g, %g of %zu entries differ when cut in %d\n", b->is_bwd ? "dM" : "M",
               sqrt(size), off, words / 2, nseg);
        failed |= off > 0 || !(size > 1e-6 && size < 1e6);
        free(m[0]);
        free(m[1]);
        free(ws);
    }
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
    for (int slow = 0; slow < 4; slow++)
        failed |= test_windows(64, slow ? 64 : 128, slow, slow % 2) > 0;
    return failed;
}
