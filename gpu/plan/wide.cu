/* gpu/plan/wide.cu - plans of values wider than the kernels (wide.cuh): which tensors move, where
 * they lie, and the kernel that moves them. */
#include "fault.cuh"
#include "plan/paths.cuh"
#include "plan/values.cuh"
#include "plan/wide.cuh"
#include <stdlib.h>

#define THREADS 256
#define MOST 8 /* tensors of a direction */

/* ---- the kernel ------------------------------------------------------------------------------ */

enum How {
    SPLIT, /* [row][head][runs][cols][run] to [row][head][cols][runs][run] */
    JOIN,  /* back */
    COPY,  /* [row][head][run] to [row][head][cols][run] */
    SUM    /* [row][head][cols][run], fp32, to their sums [row][head][run] */
};

/* One tensor. run: in words of `word` bytes. */
struct Move {
    How how;
    int word, type, run;
    unsigned rows, lines, heads, runs,
        cols;       /* lines: runs of the longer side, all heads of a row */
    const Seq *seq; /* rows are sequences: of these the ones that start or end here; or NULL */
    int starts;
    const void *from;
    void *to;
};
struct Moves {
    int n;
    Move m[MOST];
};

/* The row of a tensor, -1: not this rank's. */
__device__ __forceinline__ int64_t row_of(const Move &m, unsigned row) {
    if (!m.seq) return row;
    const Seq s = m.seq[row];
    return (m.starts ? s.starts : s.ends) ? s.gseq : -1;
}

/* Line [head][col][run] of a row on the longer side, and where the other side has it. */
template <class W>
__device__ __forceinline__ void move_line(const Move &m, int64_t row, unsigned line, unsigned x) {
    const unsigned run = line % m.runs, col = line / m.runs % m.cols, head = line / m.runs / m.cols;
    const int64_t one = (row * m.lines + line) * m.run + x;
    const unsigned there = m.how == COPY ? head : (head * m.runs + run) * m.cols + col;
    const int64_t other = (row * (m.how == COPY ? m.heads : m.lines) + there) * m.run + x;
    if (m.how == JOIN)
        ((W *)m.to)[other] = ((const W *)m.from)[one];
    else
        ((W *)m.to)[one] = ((const W *)m.from)[other];
}

/* Columns in their order, in fp32 and rounded once. */
__device__ __forceinline__ void add_line(const Move &m, int64_t row, unsigned head, unsigned x) {
    const int64_t to = row * m.heads + head;
    const float *from = (const float *)m.from + to * m.cols * m.run + x;
    const int cols = (int)m.cols - FAULT(WIDE_SHORT);
    float sum = from[0];
    for (int i = 1; i < cols; i++)
        sum += from[i * m.run];
    put_param(m.to, to * m.run + x, m.type, sum);
}

/* blockIdx.y: a tensor. A warp, or a part of one, takes a line. */
__global__ void __launch_bounds__(THREADS) k_wide(const __grid_constant__ Moves all) {
    const Move &m = all.m[blockIdx.y];
    unsigned across = 1;
    while (across < (unsigned)m.run && across < 32)
        across *= 2;
    const unsigned per_row = m.how == SUM ? m.heads : m.lines;
    const unsigned first = (blockIdx.x * THREADS + threadIdx.x) / across;
    for (unsigned i = first; i < m.rows * per_row; i += gridDim.x * THREADS / across) {
        const int64_t row = row_of(m, i / per_row);
        if (row < 0) continue;
        for (unsigned x = threadIdx.x % across; x < (unsigned)m.run; x += across)
            if (m.how == SUM)
                add_line(m, row, i % per_row, x);
            else if (m.word == 16)
                move_line<uint4>(m, row, i % per_row, x);
            else if (m.word == 4)
                move_line<uint32_t>(m, row, i % per_row, x);
            else
                move_line<uint16_t>(m, row, i % per_row, x);
    }
}

/* ---- what moves ------------------------------------------------------------------------------ */

/* Rows of a tensor that the rank moves. */
static unsigned rows_of(const dpg_plan *one, const Tensor &x) {
    return x.rows == ONE_ROW ? 1 : x.rows == TOKENS ? (unsigned)one->d.L : (unsigned)one->d.nseq;
}

static Move move_of(const Call &c, const WideTensor &x) {
    const Wide *w = c.p->wide;
    const dpg_plan *one = w->one;
    const int out = !is_input(x.when), each = x.runs ? x.width / x.runs : x.width;
    const int bytes = each * bytes_of(x.type);
    Move m = {!x.runs ? (out ? SUM : COPY) : out ? JOIN : SPLIT};
    m.word = m.how == SUM ? 4 : bytes % 16 == 0 ? 16 : bytes % 4 == 0 ? 4 : 2;
    m.run = bytes / m.word;
    m.type = x.theirs;
    m.cols = w->cols;
    m.runs = x.runs ? x.runs : 1;
    m.heads = one->d.HV / w->cols;
    m.lines = m.heads * m.cols * m.runs;
    m.rows = rows_of(one, x);
    m.starts = x.rows == STARTS;
    if (x.rows == STARTS || x.rows == ENDS) m.seq = one->d.seq + one->whole0;
    void *theirs = *slot_of(x, c.t, c.g), *mine = (char *)c.ws + x.at;
    m.from = out ? mine : theirs;
    m.to = out ? theirs : mine;
    return m;
}

/* All tensors of a direction that are there. */
static dp_status move_all(const Call &c, When when) {
    Moves all = {};
    unsigned blocks = 1;
    FAULT_TO_DEVICE(c.e, c.s);
    for (const WideTensor &x : c.p->wide->tensor) {
        if (x.when != when || !*slot_of(x, c.t, c.g) || !rows_of(c.p->wide->one, x)) continue;
        const Move m = move_of(c, x);
        const int64_t words = (int64_t)m.rows * m.lines * m.run, most = c.p->device.sms * 8;
        const unsigned full = (unsigned)(words / THREADS < most ? words / THREADS + 1 : most);
        blocks = full > blocks ? full : blocks;
        all.m[all.n++] = m;
    }
    if (!all.n) return DP_OK;
    k_wide<<<dim3(blocks, all.n), THREADS, 0, c.s>>>(all);
    CK_LAUNCH(c.e, "k_wide");
    return DP_OK;
}

/* The tensors of the narrower problem. */
struct Narrow {
    dpg_tensors t;
    dpg_grads g;
};
static Narrow narrow_of(const Call &c) {
    Narrow n = {*c.t, c.g ? *c.g : dpg_grads{}};
    for (const WideTensor &x : c.p->wide->tensor) {
        void **mine = slot_of(x, &n.t, &n.g);
        if ((!of_backward(x.when) || c.g) && *mine) *mine = (char *)c.ws + x.at;
    }
    return n;
}

/* ---- steps ----------------------------------------------------------------------------------- */

dp_status wide_forward(const Call &c, dpg_comm *comm, int steps) {
    const Narrow n = narrow_of(c);
    if (steps & DPG_STEP_CHUNKS) TRY(move_all(c, FORWARD_IN));
    TRY(dpg_forward_steps(c.p->wide->one, &n.t, c.ws, comm, c.s, steps, c.e));
    return steps & DPG_STEP_STATE ? move_all(c, FORWARD_OUT) : DP_OK;
}

/* The inputs of the forward again, since the workspace may hold anything by then. */
dp_status wide_backward(const Call &c, dpg_comm *comm, int steps) {
    const Narrow n = narrow_of(c);
    if (steps & DPG_BWD_RECOMPUTE) {
        TRY(move_all(c, FORWARD_IN));
        TRY(move_all(c, BACKWARD_IN));
    }
    TRY(dpg_backward_steps(c.p->wide->one, &n.t, &n.g, c.ws, comm, c.s, steps, c.e));
    return steps & DPG_BWD_GATE ? move_all(c, BACKWARD_OUT) : DP_OK;
}

/* ---- the plan -------------------------------------------------------------------------------- */

/* Rows of V columns lie as those of narrower heads where a head has one of them. */
static void list_tensors(Wide *w, const dpg_problem *p, int backward) {
    const dpg_problem n = narrower(p);
    const std::vector<Tensor> wide = tensors_of(p), narrow = tensors_of(&n);
    for (size_t i = 0; i < wide.size(); i++) {
        const Tensor &x = narrow[i];
        const int is_shared = x.width == wide[i].width, runs = is_shared ? 0 : x.width / n.V;
        if (x.by_query || !x.width || runs == 1 || (of_backward(x.when) && !backward)) continue;
        const int64_t rows = x.rows == ONE_ROW ? 1 : x.rows == TOKENS ? w->one->d.L : p->Nseq;
        w->tensor.push_back({x, runs, wide[i].type, w->bytes});
        w->bytes += (size_t)(rows * n.HV * x.width * bytes_of(x.type) + 255) / 256 * 256;
    }
}

/* Takes `one` over. */
dp_status wide_create(dpg_plan **out, dpg_plan *one, const dpg_problem *p, dp_err *e) {
    dpg_plan *pl = (dpg_plan *)calloc(1, sizeof *pl);
    if (!pl) {
        dpg_plan_destroy(one);
        return dpg_fail(e, DP_ENOMEM, "%s:%d: plan", __FILE__, __LINE__);
    }
    pl->wide = new Wide{one, one->d.HV / p->HV, {}, dpg_workspace_bytes(one)};
    pl->opt = one->opt;
    pl->device = one->device;
    pl->rank = one->rank;
    pl->N = one->N;
    pl->d = one->d;
    pl->d.HV = p->HV;
    pl->d.G = p->HV / p->H;
    pl->d.V = p->V;
    pl->d.dg_bf16 = p->dgdtype == DPG_BF16;
    list_tensors(pl->wide, p, pl->opt.backward);
    *out = pl;
    return DP_OK;
}

void wide_destroy(Wide *w) {
    if (!w) return;
    dpg_plan_destroy(w->one);
    delete w;
}

/* From a stage of the narrower problem, [lead][heads][cols][runs][each], to that of the caller's,
 * [lead][heads][runs][cols][each]; is_shared: the first of `cols`. */
void wide_join(const Wide *w, int64_t lead, int64_t runs, int64_t each, int is_shared,
               const double *narrow, double *host) {
    const int64_t line = runs * each;
    const int cols = w->cols;
    for (int64_t i = 0; i < lead * cols; i++)
        for (int64_t x = 0; x < line; x++) {
            const int64_t head = i / cols, col = i % cols, run = x / each;
            if (!is_shared)
                host[((head * runs + run) * cols + col) * each + x % each] = narrow[i * line + x];
            else if (!col)
                host[head * line + x] = narrow[i * line + x];
        }
}
