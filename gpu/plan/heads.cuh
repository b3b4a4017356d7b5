/* gpu/plan/heads.cuh - the exchange of heads: a rank has all tokens of HV / N value heads, and is
 * one rank to them. The fields of such a plan (plan/heads.cu), and the moved data
 * (exchange/heads.cu). */
#ifndef DPG_HEADS_CUH
#define DPG_HEADS_CUH
#include "plan/plan.cuh"
#include "plan/tensors.cuh"

/* A tensor that moves: of as many rows as there are tokens, or sequences. */
struct HeadTensor : Tensor {
    size_t at; /* into the workspace: its rows of this rank's heads */
};

/* The rows of a kind, rank after rank as they are sent. */
struct HeadRows {
    std::vector<int> from; /* [N + 1] those of rank r are from[r] .. from[r + 1] - 1 */
    int in_order;          /* they are the rows of a tensor in their order */
    const int *row;        /* device, [from[N]]: its row among all. -1: none; an uneven number of
                            * tokens gets one, so that bf16 fill whole words */
};

struct Heads {
    dpg_plan *one; /* of this rank's heads alone: all tokens, one rank */
    int N, rank;
    int copies; /* heads of `one` for one query head of all: of each rank as many as keep the value
                 * heads of one of them together (plan/heads.cu) */
    std::vector<HeadTensor> tensor;
    HeadRows rows[ROW_KINDS];
    int own_tokens;
    size_t sums, all_sums, send, recv, bytes; /* workspace: behind that of `one` dA_log and ddt_bias
                                               * of the heads, of all heads; messages; all of it */
    void *tables;                             /* device memory behind rows[].row */
};

/* The problem of a rank that has all tokens. On a grid it is one part, which chooses no kernel by a
 * rank's own tokens and forms no M. A problem of one rank alone is the same, so both have the same
 * bits. */
struct OneRank {
    dpg_problem p;
    int64_t cut[2];
    int owner = 0;
    explicit OneRank(const dpg_problem *all) : p(*all), cut{0, all->T} {
        p.own = all->own.by_part ? dpg_owners{1, 1, cut, &owner} : dpg_owners{};
    }
    OneRank(const OneRank &) = delete; /* p points into it */
};

static inline int heads_of(const Heads *h, const HeadTensor &x) {
    return x.by_query ? h->one->d.H : h->one->d.HV;
}
/* Bytes of this rank's heads of one row. */
static inline int64_t run_bytes(const Heads *h, const HeadTensor &x) {
    return (int64_t)heads_of(h, x) * x.width * bytes_of(x.type);
}
#endif
