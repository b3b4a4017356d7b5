/* gpu/simple/activations.cu - gradients through the L2 norm, the gate and beta (math.md c), and
 * their sums over tokens. One phase each and no shared memory, but k_gate_sum: dA_log by channel in
 * shared memory, behind a barrier one thread adds them. */
#include "fault.cuh"
#include "plan/values.cuh"
#include "simple/simple.cuh"

/* dq and dk of one chunk and query head: the group's value heads summed in order, then dx = (dy - y
 * <y, dy>) / norm. One warp a row. */
__global__ void k_norm_bwd(Dims d, dpg_tensors t, dpg_grads g, BwdArgs a) {
    int ch = blockIdx.x / d.H, hq = blockIdx.x % d.H, warp = threadIdx.x / 32,
        lane = threadIdx.x % 32;
    int64_t tile0 = (int64_t)ch * d.HV + hq * d.G;
    Chunk c = d.chunk[ch];
    for (int row = warp; row < c.len * (1 + d.R); row += THREADS / 32) {
        int isq = row < c.len, r = isq ? row : row - c.len, rows = isq ? DP_CHUNK : d.n,
            s = isq ? r : r / d.R;
        int64_t to =
            isq ? ((c.t0 + s) * d.H + hq) * d.K : (((c.t0 + s) * d.H + hq) * d.R + r % d.R) * d.K;
        const void *x = isq ? t.q : t.k;
        const float *y = (isq ? a.qn : a.kn) + (tile0 * rows + r) * d.K,
                    *dy = (isq ? a.dq : a.dk) + (tile0 * rows + r) * d.K;
        float sum[8], ss = 0.f, dot = 0.f; /* K <= 256: 8 entries a lane */
#pragma unroll
        for (int i = 0; i < 8; i++) {
            int k = lane + 32 * i;
            sum[i] = 0.f;
            if (k >= d.K) continue;
            for (int m = 0; m < d.G - FAULT(GROUP); m++)
                sum[i] += dy[(int64_t)m * rows * d.K + k];
            ss = fmaf(ldx(x, to + k, d.in_bf16), ldx(x, to + k, d.in_bf16), ss);
            dot = fmaf(y[k], sum[i], dot);
        }
        ss = warp_sum(ss);
        dot = warp_sum(dot);
        float norm = sqrtf(ss + (float)DP_L2_EPS);
#pragma unroll
        for (int i = 0; i < 8; i++)
            if (lane + 32 * i < d.K)
                stx(isq ? g.dq : g.dk, to + lane + 32 * i, d.qk_bf16,
                    d.l2norm ? (sum[i] - y[lane + 32 * i] * dot) / norm : sum[i]);
    }
}

/* Raw gate and beta of a tile. */
__global__ void k_gate_bwd(Dims d, dpg_tensors t, dpg_grads g, BwdArgs a) {
    int64_t tile = blockIdx.x;
    int hv = tile % d.HV;
    Chunk c = d.chunk[tile / d.HV];
    gate_grads_of_tile(d, t, g, tile, a.part,
                       [&](int s, int k) { return a.dg[(tile * DP_CHUNK + s) * d.K + k]; });
    for (int row = threadIdx.x; row < c.len * d.R; row += blockDim.x) {
        int64_t at = ((c.t0 + row / d.R) * d.HV + hv) * d.R + row % d.R;
        float slope = beta_slope(d, ldx(t.beta, at, d.g_bf16));
        stx(g.dbeta, at, d.dg_bf16, a.dbeta[tile * d.n + row] * slope);
    }
}

dp_status simple_norm(const Call &c) {
    const Dims &d = c.p->d;
    unsigned blocks = (unsigned)((int64_t)d.NT * d.H);
    k_norm_bwd<<<blocks, THREADS, 0, c.s>>>(d, *c.t, *c.g, bwd_args(c));
    CK_LAUNCH(c.e, "k_norm_bwd");
    return DP_OK;
}

dp_status simple_sums(const Call &c) {
    const Dims &d = c.p->d;
    BwdArgs a = bwd_args(c);
    k_gate_bwd<<<tile_count(c.p), THREADS, 0, c.s>>>(d, *c.t, *c.g, a);
    CK_LAUNCH(c.e, "k_gate_bwd");
    return sum_over_chunks(c);
}
