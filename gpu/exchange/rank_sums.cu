/* gpu/exchange/rank_sums.cu - dA_log and ddt_bias: the sums of all ranks in rank order, or of all
 * parts in theirs (dpg_owners), added up in fp64, the same bits on every rank. */
#include "plan/paths.cuh"

#define THREADS 256

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

dp_status sum_over_ranks(const Call &c) {
    const Dims &d = c.p->d;
    int words = d.HV * (1 + d.Kg), n = c.p->by_part ? c.p->all : c.p->N;
    const int *place = c.p->by_part ? c.p->folds.place : NULL;
    k_rank_sum<<<(words + THREADS - 1) / THREADS, THREADS, 0, c.s>>>(
        d.HV, d.Kg, n, place, gathered(c, B_GSUM, B_GALL), c.g->dA_log, c.g->ddt_bias);
    CK_LAUNCH(c.e, "k_rank_sum");
    return DP_OK;
}
