/* gpu/tests/cpu/test_segments.cc - a rank whose sequence is cut in segments: M and dM are chains over all of its chunks, the same bits as uncut; the backward's
 * composition and merge over parts are those of fp64 loops.
 *
 * Only the fast path cuts, and it does not run here; but these kernels are shared by all paths (chain.cu), so a plan of the simple path is cut by hand. */
#include <math.h>
#include <stdlib.h>
#include <vector>
#include "internal.cuh"

#define NEED(expr) do { dp_status st_ = (expr); if (st_ != DP_OK) { fprintf(stderr, "%s: %s\n", #expr, e.msg); exit(2); } } while (0)

static float next(uint32_t &x) { return ((x = x * 1664525u + 1013904223u) >> 8) * 0x1p-23f - 1; }

typedef std::vector<double> Vec;
static double off_by(const float *got, int ld, const Vec &want, int K, int V)
{
    double d = 0, w = 0;
    for (int i = 0; i < K * V; i++)
        d += pow(got[i / V * ld + i % V] - want[i], 2), w += want[i] * want[i];
    return sqrt(d / w);
}

/* Rank 1 of 4 of one sequence: dS_out of the rank, what its parts start from, and its dH, from random elements. */
static int test_parts(int HV, int K, int V, int dh_only)
{
    const int64_t cu[] = {0, 4 * 256};
    const int parts = 3, rank = 1, N = 4, row = dh_only ? V : V + K;
    dpg_problem p = {};
    dpg_options o = {};
    dpg_plan *plan;
    dp_err e = {DP_OK, ""};
    p.T = cu[1], p.H = p.HV = HV, p.K = p.Kg = K, p.V = V, p.R = 1, p.Nseq = 1, p.cu = cu, p.scale = 1, p.gate = DP_GATE_LOG;
    o.base = DP_BASE_FP32, o.chain = DP_FP32, o.path = o.bwd_path = DPG_PATH_SIMPLE, o.backward = 1, o.send_dh_only = dh_only;
    NEED(dpg_plan_create(&plan, &p, &o, rank, N, &e));
    dpg_plan *b = plan->bwd;
    b->parts = b->saved_parts = parts;
    size_t kv = (size_t)HV * K * V, kk = (size_t)HV * K * K, at_seg = b->ws_bytes, at_out = at_seg + (parts * kv * 4 + 255) / 256 * 256, bytes = at_out + (parts * kv * 4 + 255) / 256 * 256;
    b->buf[B_SEG] = Buf{at_seg, parts * kv * 4, 0, PLAIN}, b->buf[B_DSOUT] = Buf{at_out, parts * kv * 4, 0, PLAIN};
    void *ws = aligned_alloc(256, bytes);
    std::vector<float> saved(b->saved_states * kv + (b->saved_ms + parts) * kk);
    uint32_t seed = 7 * K + V;
    for (float &x : saved)
        x = next(seed) * 1.5f / sqrtf((float)K);
    for (int slot : {B_DHMALL, B_SEG})
        for (size_t i = 0; i < b->buf[slot].bytes / 4; i++)
            at<float>(b, ws, slot)[i] = next(seed) * (slot == B_DHMALL && i % row >= (size_t)V ? 1.5f / sqrtf((float)K) : 1);
    dpg_tensors t = {};
    t.saved = saved.data();
    NEED(chain_compose_bwd(b, &t, ws, NULL, &e));
    NEED(chain_merge_bwd(b, &t, ws, NULL, &e));
    double worst = 0;
    for (int hv = 0; hv < HV; hv++) {
        Vec S(K * V), H(K * V);
        const float *all = at<float>(b, ws, B_DHMALL), *seg = at<float>(b, ws, B_SEG), *out = at<float>(b, ws, B_DSOUT);
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
            const float *E = all + ((size_t)j * HV + hv) * K * row, *M = dh_only ? saved_rank_m(b, &t) + ((size_t)(j < N - 1 ? j - rank - 1 : 0) * HV + hv) * K * K : E + V;
            apply(S, M, dh_only ? 1 : row, dh_only ? K : 1, E, row);         /* the farthest multiplies zeros */
        }
        for (int i = parts - 1; i >= 0; i--) {
            const float *M = saved_part_m(b, &t) + ((size_t)i * HV + hv) * K * K, *dH = seg + ((size_t)i * HV + hv) * K * V;
            worst = fmax(worst, off_by(out + ((size_t)(parts - 1 - i) * HV + hv) * K * V, V, S, K, V));
            apply(S, M, 1, K, dH, V), apply(H, M, 1, K, dH, V);
        }
        worst = fmax(worst, off_by(at<float>(b, ws, B_DHM) + (size_t)hv * K * row, row, H, K, V));
    }
    printf("parts of the backward, HV %d K %d V %d%s: %.1e from fp64\n", HV, K, V, dh_only ? ", dH alone" : "", worst);
    dpg_plan_destroy(plan);
    free(ws);
    return !(worst < 8 * K * 0x1p-24);                   /* 5 sums of K products one behind the other */
}

int main()
{
    const int64_t cu[] = {0, 3 * 500};                   /* 8 chunks a rank, the last one ragged */
    const int K = 16, row = 2 * K, nseg = 3;
    dpg_problem p = {};
    dpg_options o = {};
    dpg_plan *plan;
    dp_err e = {DP_OK, ""};
    p.T = cu[1], p.H = p.HV = 2, p.K = p.V = p.Kg = K, p.R = 1, p.Nseq = 1, p.cu = cu, p.scale = 1, p.gate = DP_GATE_LOG;
    o.base = DP_BASE_FP32, o.chain = DP_FP32, o.path = o.bwd_path = DPG_PATH_SIMPLE, o.backward = 1;
    NEED(dpg_plan_create(&plan, &p, &o, 1, 3, &e));
    int failed = 0;
    for (dpg_plan *b : {plan, plan->bwd}) {
        void *ws = aligned_alloc(256, (b->ws_bytes + 255) / 256 * 256);
        size_t words = 2 * (size_t)K * row, bytes = words * sizeof(float);
        float *m[2] = {(float *)calloc(words, sizeof(float)), (float *)calloc(words, sizeof(float))};
        uint32_t x = 1;
        for (int slot : {B_W, B_KG, B_EC})
            for (size_t i = 0; i < b->buf[slot].bytes / 4; i++)
                at<float>(b, ws, slot)[i] = (slot == B_EC ? 0.9f : -0x1p-4f) + ((x = x * 1664525u + 1013904223u) >> 8) * (slot == B_EC ? 0x1p-28f : 0x1p-27f);
        for (int cut = 0; cut < 2; cut++) {
            Seq whole = local_sequence(b, 0), part[nseg];
            for (int i = 0; i < nseg; i++)
                part[i] = whole, part[i].c0 = whole.c1 * i / nseg, part[i].c1 = whole.c1 * (i + 1) / nseg, part[i].part = i;
            Seq *keep = b->seqs_h;
            if (cut)
                b->seqs_h = part, b->nseg = nseg;
            if (b->is_bwd)
                NEED(chain_pre_dm(b, m[cut] + K, row, ws, NULL, &e));
            else {
                NEED(chain_pre_m(b, ws, NULL, &e));
                memcpy(m[cut], at<float>(b, ws, B_HM), bytes);
            }
            b->seqs_h = keep, b->nseg = 1;
        }
        double size = 0, off = 0;
        for (size_t i = 0; i < words; i++)
            if (i % row >= K)
                size += (double)m[0][i] * m[0][i], off += !(m[0][i] == m[1][i]);
        printf("%s: |M| %.3g, %g of %zu entries differ when cut in %d\n", b->is_bwd ? "dM" : "M", sqrt(size), off, words / 2, nseg);
        failed |= off > 0 || !(size > 1e-6 && size < 1e6);
        free(m[0]), free(m[1]), free(ws);
    }
    dpg_plan_destroy(plan);
    for (int dh_only : {0, 1})
        failed |= test_parts(2, 16, 16, dh_only) | test_parts(1, 128, 64, dh_only) | test_parts(1, 256, 16, dh_only) | test_parts(2, 48, 48, dh_only) | test_parts(100, 16, 32, dh_only) | test_parts(100, 32, 16, dh_only);
    return failed;
}
