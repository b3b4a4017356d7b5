/* gpu/tests/cpu/test_segments.cc - M and dM of a rank whose sequence is cut in segments: chains over all of its chunks, the same bits as uncut.
 *
 * Only the fast path cuts, and it does not run here; but both chains are shared by all paths (chain.cu), so a plan of the simple path is cut by hand. */
#include <math.h>
#include <stdlib.h>
#include "internal.cuh"

#define NEED(expr) do { dp_status st_ = (expr); if (st_ != DP_OK) { fprintf(stderr, "%s: %s\n", #expr, e.msg); exit(2); } } while (0)

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
    return failed;
}
