/* gpu/token/halo.cu - the halo of a part of a rank's tokens, of the token before its first. It has
 * the inputs to which rows look back, in fp32, and the sum of angles so far. Each part gives those
 * of its last token, and the sum of angles of its last sequence. It gets the sums of parts that
 * share its first sequence, added in their order. */
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
    a->halo = at<float>(c, B_HALOIN);
    a->dhalo = pl->is_bwd ? gathered(c, B_DHALO, B_DHALOALL) : NULL;
    a->link = pl->links;
    a->place = pl->folds.place;
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
    Seq seq = d.seq[a.link[blockIdx.y].last];
    Chunk last = d.chunk[seq.c1 - 1];
    int64_t width = (int64_t)d.HV * width_of(d, a.pairs, input), end = last.t0 + last.len;
    float sum = 0.f;
    for (int64_t t = input == DP_INPUT_ANGLE ? d.chunk[seq.c0].t0 : end - 1; t < end; t++)
        sum += ldx(a.in[input], t * width + x, is_long ? d.in_bf16 : d.g_bf16);
    to[(int64_t)blockIdx.y * a.halo_words + word] = sum;
}

__global__ void k_halo_take(Token a, const float *all, float *to) {
    int word = blockIdx.x * THREADS + threadIdx.x, x;
    Link l = a.link[blockIdx.y];
    if (word >= a.halo_words || !l.pre) return;
    float sum = 0.f;
    for (int i = input_of(a, word, &x) == DP_INPUT_ANGLE ? l.part - l.pre : l.part - 1; i < l.part;
         i++)
        sum += all[(int64_t)a.place[i] * a.halo_words + word];
    to[(int64_t)blockIdx.y * a.halo_words + word] = sum;
}

/* Blocks that have a word of a part each. */
static dim3 blocks_of_words(const Call &c) {
    return dim3((c.p->halo + THREADS - 1) / THREADS, c.p->nlink);
}

dp_status halo_give(const Call &c) {
    if (!c.p->nlink) return DP_OK;
    k_halo_give<<<blocks_of_words(c), THREADS, 0, c.s>>>(c.p->d, token_of(c), at<float>(c, B_HALO));
    CK_LAUNCH(c.e, "k_halo_give");
    return DP_OK;
}

dp_status halo_take(const Call &c) {
    if (c.p->is_first || !c.p->nlink) return DP_OK;
    k_halo_take<<<blocks_of_words(c), THREADS, 0, c.s>>>(
        token_of(c), gathered(c, B_HALO, B_HALOALL), at<float>(c, B_HALOIN));
    CK_LAUNCH(c.e, "k_halo_take");
    return DP_OK;
}
