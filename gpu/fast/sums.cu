/* gpu/fast/sums.cu - sums after the tiles, in fixed orders, without atomics. Sums of dq and dk are
 * over the value heads of a group and the keys of a token. Sums of dA_log and ddt_bias are over a
 * rank's chunks. One phase each. In k_sums warp 0 adds the sums of 8 warps from shared memory. */
#include "fast/fast.cuh"
#include "fast/grad.cuh"

namespace {

/* dq and dk of one chunk and query head from [tile][C][K] by value head. The group's value heads
 * are summed in order, then dx = (dy - y <y, dy>) / |x|. 16 (K = 128) or 8 lanes a row. */
template <int K>
__global__ void __launch_bounds__(256) k_norm(Dims d, dpg_tensors t, dpg_grads g, GradArgs a) {
    const int P = K / 8;
    await_grid();
    int ch = blockIdx.x / d.H, hq = blockIdx.x % d.H, lr = d.lr;
    int64_t tile0 = (int64_t)ch * d.HV + hq * d.G;
    Chunk c = d.chunk[ch];
    for (int x = threadIdx.x; x < 2 * C * P; x += 256) {
        int isq = x / (C * P), r = x / P % C, p = x % P;
        bool live = r < c.len << lr && (!isq || (r >> lr << lr) == r);
        int row = live ? (isq ? r >> lr : r) : 0;
        int64_t at = row_at(c.t0, d.H, hq, row, isq ? 0 : lr) * K + p * 8;
        float norm = a.norm[tile0 * 2 * C + (isq ? C : 0) + r], dy[8] = {}, y[8], dot = 0.f;
        load_values<4>(y, isq ? t.q : t.k, at, d.in_bf16);
        load_values<4>(y + 4, isq ? t.q : t.k, at + 4, d.in_bf16);
        /* of a query's rows of every value head, or of a key's */
        int terms = d.G << (isq ? lr : 0), skip = isq && FAULT(DQ_KEY) ? 1 << lr : 1;
        for (int m = 0; m < terms; m += skip) {
            int head = isq ? m >> lr : m, key = isq && live ? m & ((1 << lr) - 1) : 0;
            const float *from = (isq ? a.dq : a.dk) + ((tile0 + head) * C + r + key) * K + p * 8;
            float4 lo = *(const float4 *)from, hi = *(const float4 *)(from + 4);
            const float add[8] = {lo.x, lo.y, lo.z, lo.w, hi.x, hi.y, hi.z, hi.w};
#pragma unroll
            for (int j = 0; j < 8; j++)
                dy[j] += add[j];
        }
#pragma unroll
        for (int j = 0; j < 8; j++) {
            y[j] *= norm;
            dot = fmaf(y[j], dy[j], dot);
        }
#pragma unroll
        for (int m = P / 2; m; m /= 2)
            dot += __shfl_xor_sync(~0u, dot, m);
        if (!live) continue;
#pragma unroll
        for (int j = 0; d.l2norm && j < 8; j++)
            dy[j] = (dy[j] - y[j] * dot) * norm;
        void *to = isq ? g.dq : g.dk;
        if (d.qk_bf16) {
            *(uint4 *)((bf16 *)to + at) = make_uint4(pack2(dy[0], dy[1]), pack2(dy[2], dy[3]),
                                                     pack2(dy[4], dy[5]), pack2(dy[6], dy[7]));
        } else {
            *(float4 *)((float *)to + at) = *(float4 *)dy;
            *(float4 *)((float *)to + at + 4) = *(float4 *)(dy + 4);
        }
    }
}

/* Sums of part [chunk][HV][2][Kg] over a run of chunks: 8 warps take every eighth chunk, in fp64,
 * then theirs in order. Block: a run, a value head, 32 channels; over the channels of dA_log
 * k_log_sum adds up. */
__global__ void k_sums(Dims d, int run0, const float *part, float *gsum, float *by_channel) {
    __shared__ double sum[2][8][32];
    await_grid();
    Seq run = d.seq[run0 + blockIdx.y];
    gsum += (int64_t)blockIdx.y * d.HV * (1 + d.Kg);
    by_channel += (int64_t)blockIdx.y * d.HV * d.Kg;
    int groups = (d.Kg + 31) / 32, hv = blockIdx.x / groups, lane = threadIdx.x % 32;
    int k = blockIdx.x % groups * 32 + lane, w = threadIdx.x / 32;
    double sa = 0, sb = 0;
#pragma unroll 4
    for (int c = run.c0 + w; c < run.c1 && k < d.Kg; c += 8) {
        const float *p = part + ((int64_t)c * d.HV + hv) * 2 * d.Kg + k;
        sa += p[0];
        sb += p[d.Kg];
    }
    sum[0][w][lane] = sa;
    sum[1][w][lane] = sb;
    __syncthreads();
    if (w || k >= d.Kg) return;
    for (int i = 1; i < 8; i++) {
        sa += sum[0][i][lane];
        sb += sum[1][i][lane];
    }
    by_channel[hv * d.Kg + k] = (float)sa;
    gsum[d.HV + hv * d.Kg + k] = (float)sb;
}
__global__ void k_log_sum(Dims d, const float *by_channel, float *gsum) {
    __shared__ float term[128];
    await_grid();
    const int64_t head = (int64_t)blockIdx.y * d.HV + blockIdx.x;
    if ((int)threadIdx.x < d.Kg) term[threadIdx.x] = by_channel[head * d.Kg + threadIdx.x];
    __syncthreads();
    if (threadIdx.x) return;
    double s = 0;
    for (int k = 0; k < d.Kg; k++)
        s += term[k];
    gsum[head + (int64_t)blockIdx.y * d.HV * d.Kg] = (float)s;
}

} // namespace

dp_status fast_sums(const Call &c) {
    const Dims &d = c.p->d;
    float *gsum = at<float>(c, B_GSUM), *channel = at<float>(c, B_DG), *part = at<float>(c, B_PART);
    unsigned runs = (unsigned)c.p->nrun;
    TRY(launch(queue_of(c), "k_sums", k_sums, dim3((unsigned)d.HV * ((d.Kg + 31) / 32), runs), 256,
               0, d, c.p->run0, part, gsum, channel));
    return launch(queue_of(c), "k_log_sum", k_log_sum, dim3((unsigned)d.HV, runs), 128, 0, d,
                  channel, gsum);
}

dp_status fast_norm(const Call &c) {
    const Dims &d = c.p->d;
    FAULT_TO_DEVICE(c.e, c.s);
    if (grads_are_whole(d)) return DP_OK;
    auto kernel = d.K == 64 ? k_norm<64> : k_norm<128>;
    return launch(queue_of(c), "k_norm", kernel, (unsigned)((int64_t)d.NT * d.H), 256, 0, d, *c.t,
                  *c.g, grad_args(c));
}
