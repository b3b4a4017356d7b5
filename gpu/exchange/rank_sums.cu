/* gpu/exchange/rank_sums.cu - dA_log and ddt_bias: the sums of all ranks in rank order, or of all
 * parts in theirs (dpg_owners). They are added in fp64, the same bits on every rank. */
#include "plan/paths.cuh"

#define THREADS 256

/* Sums over a run of chunks in order, dA_log over the channels too: gsum [HV], [HV][Kg]. One block
 * a run and value head. */
__global__ void k_gate_sum(Dims d, int run0, const float *part, float *gsum) {
    __shared__ double sum[256];
    int hv = blockIdx.x;
    Seq run = d.seq[run0 + blockIdx.y];
    gsum += (int64_t)blockIdx.y * d.HV * (1 + d.Kg);
    for (int k = threadIdx.x; k < d.Kg; k += blockDim.x) {
        double b = 0;
        sum[k] = 0;
        for (int c = run.c0; c < run.c1; c++) {
            const float *p = part + ((int64_t)c * d.HV + hv) * 2 * d.Kg + k;
            sum[k] += p[0];
            b += p[d.Kg];
        }
        gsum[d.HV + hv * d.Kg + k] = (float)b;
    }
    __syncthreads();
    if (threadIdx.x) return;
    double all = 0;
    for (int k = 0; k < d.Kg; k++)
        all += sum[k];
    gsum[hv] = (float)all;
}

__global__ void k_rank_sum(int HV, int Kg, int n, const int *place, const float *all, float *dA_log,
                           float *ddt_bias) {
    int i = blockIdx.x * blockDim.x + threadIdx.x, words = HV * (1 + Kg);
    double sum = 0;
    if (i >= words) return;
    for (int r = 0; r < n; r++)
        sum += all[(int64_t)(place ? place[r] : r) * words + i];
    float *to = i < HV ? dA_log : ddt_bias;
    if (to) to[i < HV ? i : i - HV] = (float)sum;
}

dp_status sum_over_chunks(const Call &c) {
    const Dims &d = c.p->d;
    k_gate_sum<<<dim3((unsigned)d.HV, (unsigned)c.p->nrun), THREADS, 0, c.s>>>(
        d, c.p->run0, at<float>(c, B_PART), at<float>(c, B_GSUM));
    CK_LAUNCH(c.e, "k_gate_sum");
    return DP_OK;
}

dp_status sum_over_ranks(const Call &c) {
    const Dims &d = c.p->d;
    int words = d.HV * (1 + d.Kg), n = c.p->by_part ? c.p->all : c.p->N;
    const int *place = c.p->by_part ? c.p->folds.place : NULL;
    k_rank_sum<<<(words + THREADS - 1) / THREADS, THREADS, 0, c.s>>>(
        d.HV, d.Kg, n, place, gathered(c, B_GSUM, B_GALL), c.g->dA_log, c.g->ddt_bias);
    CK_LAUNCH(c.e, "k_rank_sum");
    return DP_OK;
}
