/* gpu/token/halo.cu - a rank's halo, of the token before its first. It has the inputs to which rows
 * look back, in fp32, and the sum of angles so far. Each rank gives those of its last token, and
 * the sum of angles of its last sequence. A rank adds the sums of ranks that share its first
 * sequence, in their order. */
#include "token/rows.cuh"

static __host__ __device__ int width_of(const Dims &d, int pairs, int id) {
    return is_in(KEYS, id) ? d.K : is_in(VALUES, id) ? d.V : id == DP_INPUT_ANGLE ? pairs : 1;
}
static int is_needed(const dpg_plan *pl, int id) {
    return dp_recurrence_has(&pl->rows, id | DP_PREVIOUS) || (id == DP_INPUT_ANGLE && pl->pairs);
}

int token_halo(const dpg_plan *pl) {
    int words = 0;
    for (int i = 0; i < DP_NINPUTS; i++)
        words += is_needed(pl, i) ? pl->d.HV * width_of(pl->d, pl->pairs, i) : 0;
    return words;
}

void set_halo(const Call &c, Token *a) {
    const dpg_plan *pl = c.p;
    for (int i = 0; i < DP_NINPUTS; i++) {
        a->halo_at[i] = is_needed(pl, i) ? a->halo_words : -1;
        a->halo_words += is_needed(pl, i) ? pl->d.HV * width_of(pl->d, pl->pairs, i) : 0;
    }
    a->halo = pl->is_first ? NULL : at<float>(c, B_HALOIN);
    a->dhalo = at<float>(c, B_DHALOALL);
    a->next = pl->rank + 1;
    a->end = a->next + pl->post;
}

/* The input of a word, and which of its numbers the word is. */
__device__ __forceinline__ int input_of(const Token &a, int word, int *x) {
    int input = 0;
    for (int i = 0; i < DP_NINPUTS; i++)
        if (a.halo_at[i] >= 0 && a.halo_at[i] <= word) input = i;
    *x = word - a.halo_at[input];
    return input;
}

__global__ void k_halo_give(Dims d, Token a, float *to) {
    int word = blockIdx.x * THREADS + threadIdx.x, x;
    if (word >= a.halo_words) return;
    int input = input_of(a, word, &x), is_long = is_in(KEYS | VALUES, input);
    int64_t width = (int64_t)d.HV * width_of(d, a.pairs, input), t = d.L - 1;
    if (input == DP_INPUT_ANGLE) t = d.chunk[d.seq[d.chunk[d.NT - 1].seq].c0].t0;
    float sum = 0.f;
    for (; t < d.L; t++)
        sum += ldx(a.in[input], t * width + x, is_long ? d.in_bf16 : d.g_bf16);
    to[word] = sum;
}

__global__ void k_halo_take(Token a, int rank, int pre, const float *all, float *to) {
    int word = blockIdx.x * THREADS + threadIdx.x, x;
    if (word >= a.halo_words) return;
    float sum = 0.f;
    for (int r = input_of(a, word, &x) == DP_INPUT_ANGLE ? rank - pre : rank - 1; r < rank; r++)
        sum += all[(int64_t)r * a.halo_words + word];
    to[word] = sum;
}

static unsigned blocks_of_words(const Call &c) {
    return (unsigned)((c.p->halo + THREADS - 1) / THREADS);
}

dp_status halo_give(const Call &c) {
    k_halo_give<<<blocks_of_words(c), THREADS, 0, c.s>>>(c.p->d, token_of(c), at<float>(c, B_HALO));
    CK_LAUNCH(c.e, "k_halo_give");
    return DP_OK;
}

dp_status halo_take(const Call &c) {
    if (c.p->is_first) return DP_OK;
    k_halo_take<<<blocks_of_words(c), THREADS, 0, c.s>>>(
        token_of(c), c.p->rank, c.p->pre, at<float>(c, B_HALOALL), at<float>(c, B_HALOIN));
    CK_LAUNCH(c.e, "k_halo_take");
    return DP_OK;
}
