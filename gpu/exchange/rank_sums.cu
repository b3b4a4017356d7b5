/* gpu/exchange/rank_sums.cu - dA_log and ddt_bias: the sums of all ranks in rank order, or of all
 * parts in theirs (dpg_owners). They are added in fp64, the same bits on every rank. */
#include "plan/paths.cuh"
#include "plan/values.cuh"

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

__global__ void k_rank_sum(Dims d, int n, const int *place, const float *all, dpg_grads g) {
    int i = blockIdx.x * blockDim.x + threadIdx.x, words = d.HV * (1 + d.Kg);
    if (i >= words) return;
    const int of_A = i < d.HV;
    void *to = of_A ? g.dA_log : g.ddt_bias;
    if (!to) return;
    double sum = 0;
    for (int r = 0; r < n; r++)
        sum += all[(int64_t)(place ? place[r] : r) * words + i];
    put_param(to, of_A ? i : i - d.HV, of_A ? d.dA_type : d.dbias_type, (float)sum);
}

dp_status add_sums(const Call &c, const Dims &d, int n, const int *place, const float *all) {
    const unsigned words = d.HV * (1 + d.Kg);
    k_rank_sum<<<(words + THREADS - 1) / THREADS, THREADS, 0, c.s>>>(d, n, place, all, *c.g);
    CK_LAUNCH(c.e, "k_rank_sum");
    return DP_OK;
}

dp_status sum_over_chunks(const Call &c) {
    const Dims &d = c.p->d;
    k_gate_sum<<<dim3((unsigned)d.HV, (unsigned)c.p->nrun), THREADS, 0, c.s>>>(
        d, c.p->run0, at<float>(c, B_PART), at<float>(c, B_GSUM));
    CK_LAUNCH(c.e, "k_gate_sum");
    return DP_OK;
}

dp_status sum_over_ranks(const Call &c) {
    const int n = c.p->by_part ? c.p->all : c.p->N;
    return add_sums(c, c.p->d, n, c.p->by_part ? c.p->folds.place : NULL,
                    gathered(c, B_GSUM, B_GALL));
}
