/* gpu/exchange/heads.cu - the exchange of heads. A rank's tokens of all heads become all tokens of
 * its heads, one rank's kernels run on them, and the results return (plan/heads.cuh). A call of the
 * communicator for each tensor. It is packed by ranks unless all rows of a rank's heads lie
 * together; then it is sent or received in place. */
#include "fault.cuh"
#include "plan/heads.cuh"
#include "plan/paths.cuh"
#include "plan/values.cuh"
#include <algorithm>

#define THREADS 256

/* Rows of a tensor, and the place of each rank's runs in a message, [ranks][rows][runs][run]. A run
 * is a head that several have, or all heads of a rank. Words are those of the kernel. */
struct Moved {
    int rows, given; /* of each rank; where no table says which, the first so many of a tensor */
    const int *row;  /* which of the tensor, -1: none */
    int runs;        /* of a rank in a row */
    int copies;      /* of each run of a tensor, one after the other in the message */
    int64_t run, stride; /* words of a run; of a row of the tensor */
    int to_tensor;       /* else to the message */

    /* Row i of a rank, -1: none. */
    __device__ __forceinline__ int row_of(int i) const { return row ? row[i] : i < given ? i : -1; }
    /* Where the message has run x of all ranks' in row i. */
    __device__ __forceinline__ int64_t at(unsigned x, int i) const {
        return (((int64_t)(x / runs) * rows + i) * runs + x % runs) * run;
    }
};

/* blockIdx.y: a run of all ranks'. */
template <class W> __global__ void k_rows(Moved m, W *tensor, W *message) {
    const int i = blockIdx.x * blockDim.y + threadIdx.y;
    if (i >= m.rows) return;
    const int row = m.row_of(i);
    if (row < 0) return;
    unsigned run = blockIdx.y;
    if (FAULT(HEADS_NEXT) && !m.to_tensor) run = (run + m.runs) % gridDim.y;
    W *at = tensor + row * m.stride + run / m.copies * m.run;
    message += m.at(blockIdx.y, i);
    for (int64_t x = threadIdx.x; x < m.run; x += blockDim.x)
        if (m.to_tensor)
            at[x] = message[x];
        else
            message[x] = at[x];
}

/* blockIdx.y: a run of the tensor, the sum of its copies in the order of value heads, in fp32 and
 * rounded once. */
__global__ void k_add_rows(Moved m, int is_bf16, void *tensor, const float *message) {
    const int i = blockIdx.x * blockDim.y + threadIdx.y;
    if (i >= m.rows) return;
    const int row = m.row_of(i);
    if (row < 0) return;
    const unsigned first = blockIdx.y * m.copies;
    const int copies = m.copies - FAULT(HEADS_SHORT);
    for (int64_t x = threadIdx.x; x < m.run; x += blockDim.x) {
        float sum = message[m.at(first, i) + x];
        for (int j = 1; j < copies; j++)
            sum += message[m.at(first + j, i) + x];
        stx(tensor, row * m.stride + blockIdx.y * m.run + x, is_bf16, sum);
    }
}

/* A block: whole rows of a run, or a part of one. */
static dim3 threads_of(const Moved &m) {
    unsigned across = 1;
    while (across < m.run && across < THREADS)
        across *= 2;
    return dim3(across, THREADS / across);
}
static dim3 blocks_of(const Moved &m, const dim3 &threads, int runs) {
    return dim3((m.rows + threads.y - 1) / threads.y, (unsigned)runs);
}

template <class W>
static dp_status move_words(const Call &c, Moved m, int ranks, void *tensor, void *message) {
    m.run /= sizeof(W);
    m.stride /= sizeof(W);
    const dim3 threads = threads_of(m), blocks = blocks_of(m, threads, ranks * m.runs);
    auto kernel = k_rows<W>;
    kernel<<<blocks, threads, 0, c.s>>>(m, (W *)tensor, (W *)message);
    CK_LAUNCH(c.e, "k_rows");
    return DP_OK;
}

static dp_status add_copies(const Call &c, Moved m, int ranks, void *tensor, float *message) {
    m.run /= sizeof(float);
    m.stride /= sizeof(float);
    const dim3 threads = threads_of(m), blocks = blocks_of(m, threads, ranks * m.runs / m.copies);
    k_add_rows<<<blocks, threads, 0, c.s>>>(m, c.p->heads->one->d.d_bf16, tensor, message);
    CK_LAUNCH(c.e, "k_add_rows");
    return DP_OK;
}

/* ---- one tensor ------------------------------------------------------------------------------ */

/* The rows that a rank sends or receives in a call. Their tensor has the rank's tokens and all
 * heads, or all tokens and the rank's heads. */
struct Side {
    void *tensor;
    Moved moved; /* bytes */
    int ranks;   /* whose runs lie in a row of it */
    int in_place;
    std::vector<dpg_piece> pieces;
};

static Side own_tokens(const Heads *h, const HeadTensor &x, void *tensor) {
    const HeadRows &rows = h->rows[x.rows];
    const int first = rows.from[h->rank], n = rows.from[h->rank + 1] - first;
    const int64_t all = run_bytes(h, x);
    const int copies = x.by_query ? h->copies : 1, runs = copies > 1 ? h->one->d.H : 1;
    const int *row = x.rows == TOKENS ? NULL : rows.row + first;
    Side s = {
        tensor, {n, h->own_tokens, row, runs, copies, all / runs, all * h->N / copies}, h->N, 0};
    for (int r = 0; r < h->N; r++)
        s.pieces.push_back({(size_t)(r * n * all / 4), (size_t)(n * all / 4)});
    return s;
}

static Side own_heads(const Heads *h, const HeadTensor &x, void *tensor) {
    const HeadRows &rows = h->rows[x.rows];
    const int64_t run = run_bytes(h, x);
    Side s = {tensor, {rows.from[h->N], 0, rows.row, 1, 1, run, run}, 1, rows.in_order};
    for (int r = 0; r < h->N; r++) {
        const int64_t n = rows.from[r + 1] - rows.from[r];
        s.pieces.push_back({(size_t)(rows.from[r] * run / 4), (size_t)(n * run / 4)});
    }
    return s;
}

static dp_status move_rows(const Call &c, Side s, int to_tensor, float *message) {
    const int64_t run = s.moved.run;
    s.moved.to_tensor = to_tensor;
    if (s.in_place || !s.moved.rows) return DP_OK;
    if (to_tensor && s.moved.copies > 1) return add_copies(c, s.moved, s.ranks, s.tensor, message);
    if (run % 16 == 0) return move_words<uint4>(c, s.moved, s.ranks, s.tensor, message);
    if (run % 4 == 0) return move_words<uint32_t>(c, s.moved, s.ranks, s.tensor, message);
    return move_words<uint16_t>(c, s.moved, s.ranks, s.tensor, message);
}

static dp_status move_tensor(const Call &c, dpg_comm *comm, const Side &from, const Side &to) {
    const Heads *h = c.p->heads;
    float *send = (float *)((char *)c.ws + h->send), *recv = (float *)((char *)c.ws + h->recv);
    TRY(move_rows(c, from, 0, send));
    TRY(comm->all_to_all(comm, from.in_place ? (float *)from.tensor : send, from.pieces.data(),
                         to.in_place ? (float *)to.tensor : recv, to.pieces.data(), c.s, c.e));
    return move_rows(c, to, 1, recv);
}

/* ---- all of them ----------------------------------------------------------------------------- */

/* Is it one that moves: of a rank without tokens theirs are there, too. */
static int moves(const HeadTensor &x, const void *given) {
    return x.width && (given || x.rows == TOKENS);
}

static dp_status move_tensors(const Call &c, dpg_comm *comm, When when) {
    const Heads *h = c.p->heads;
    FAULT_TO_DEVICE(c.e, c.s);
    for (const HeadTensor &x : h->tensor) {
        if (x.when != when) continue;
        void *given = *slot_of(x, c.t, c.g);
        if (!moves(x, given)) continue;
        Side tokens = own_tokens(h, x, given), heads = own_heads(h, x, (char *)c.ws + x.at);
        if (is_input(when) && FAULT(HEADS_TURNED))
            std::reverse(heads.pieces.begin(), heads.pieces.end());
        TRY(is_input(when) ? move_tensor(c, comm, tokens, heads)
                           : move_tensor(c, comm, heads, tokens));
    }
    return DP_OK;
}

/* The tensors of this rank's heads. */
struct Mine {
    dpg_tensors t;
    dpg_grads g;
};

static const void *from_head(const void *p, int64_t first, int type) {
    return p ? (const char *)p + first * bytes_of((dpg_dtype)type) : NULL;
}
static Mine mine_of(const Call &c) {
    const Heads *h = c.p->heads;
    const int first = FAULT(HEADS_FIRST) ? 0 : h->rank * h->one->d.HV;
    Mine m = {*c.t, c.g ? *c.g : dpg_grads{}};
    for (const HeadTensor &x : h->tensor)
        if (!of_backward(x.when) || c.g) {
            void **mine = slot_of(x, &m.t, &m.g);
            if (moves(x, *mine)) *mine = (char *)c.ws + x.at;
        }
    const Dims &d = h->one->d;
    m.t.A_log = from_head(m.t.A_log, first, d.A_type);
    m.t.dt_bias = from_head(m.t.dt_bias, (int64_t)first * d.Kg, d.bias_type);
    float *sums = (float *)((char *)c.ws + h->sums);
    if (m.g.dA_log) m.g.dA_log = sums;
    if (m.g.ddt_bias) m.g.ddt_bias = sums + d.HV;
    return m;
}

/* dA_log and ddt_bias of all heads. */
static dp_status gather_sums(const Call &c, dpg_comm *comm, const dpg_grads &mine) {
    const Heads *h = c.p->heads;
    Dims d = c.p->d; /* of this rank's heads, but for the types of gradients */
    const size_t heads = d.HV;
    float *all = (float *)((char *)c.ws + h->all_sums);
    d.HV *= h->N;
    if (mine.dA_log) TRY(comm->all_gather(comm, (float *)mine.dA_log, all, heads, c.s, c.e));
    if (mine.ddt_bias)
        TRY(comm->all_gather(comm, (float *)mine.ddt_bias, all + d.HV, heads * d.Kg, c.s, c.e));
    return mine.dA_log || mine.ddt_bias ? add_sums(c, d, 1, NULL, all) : DP_OK;
}

dp_status heads_forward(const Call &c, dpg_comm *comm, int steps) {
    Mine m = mine_of(c);
    /* segments are merged where states are passed on */
    int own = steps & ~(DPG_STEP_GATHER | DPG_STEP_MERGE);
    if (own & DPG_STEP_STATE) own |= DPG_STEP_MERGE;
    if (steps & DPG_STEP_GATHER) TRY(move_tensors(c, comm, FORWARD_IN));
    if (own) TRY(dpg_forward_steps(c.p->heads->one, &m.t, c.ws, NULL, c.s, own, c.e));
    return steps & DPG_STEP_MERGE ? move_tensors(c, comm, FORWARD_OUT) : DP_OK;
}

dp_status heads_backward(const Call &c, dpg_comm *comm, int steps) {
    Mine m = mine_of(c);
    int own = steps & ~(DPG_BWD_GATHER | DPG_BWD_MERGE);
    if (own & DPG_BWD_STATE) own |= DPG_BWD_MERGE;
    if (steps & DPG_BWD_GATHER) {
        if (!saves_all(c.p)) TRY(move_tensors(c, comm, FORWARD_IN));
        TRY(move_tensors(c, comm, BACKWARD_IN));
    }
    if (own) TRY(dpg_backward_steps(c.p->heads->one, &m.t, &m.g, c.ws, NULL, c.s, own, c.e));
    if (!(steps & DPG_BWD_MERGE)) return DP_OK;
    TRY(move_tensors(c, comm, BACKWARD_OUT));
    return gather_sums(c, comm, m.g);
}
