/* gpu/conv/conv.cu - causal depthwise conv1d under context parallelism (math.md h): one pass over
 * memory in each direction.
 *
 * A thread owns VEC channels of a strip of 64 tokens and slides over them with the last W - 1 rows
 * of x in registers. One bit per token says where a sequence starts. The backward slides likewise,
 * W - 1 tokens past its strip, with the sums of W unfinished rows of dx in registers. The tokens of
 * a rank are one range, or several (dpg_owners). Rows before a range come from the gathered tails
 * of x, gradients of pre after it from the gathered heads of dpre. A table has the place of each.
 * Sums of dw over a strip, 8 strips of a block, blocks, ranks (or parts): each in a fixed order.
 *
 * k_conv_fwd, k_conv_head, k_conv_tail and k_conv_ranks have one phase and no shared memory.
 * k_conv_bwd: the strip, then W - 1 tokens after it, in registers. Then W + 1 times sum_strips, the
 * strips' sums in shared memory between two barriers. k_conv_sum: 8 runs of blocks in shared
 * memory, then their sum. */
#include "dp_conv.h"
#include "fault.cuh"
#include "plan/paths.cuh"
#include "plan/values.cuh"
#include <stdlib.h>
#include <vector>

#include "conv/sigmoid.cuh"

#define STRIP 64
#define STRIPS 8 /* strips of a block; 32 groups of channels beside each other */

/* at: its first channel among those of all parts */
struct Part {
    dpg_conv_tensors t;
    int D, at;
};

#define MOST_ROWS 7 /* W - 1 */

/* Consecutive tokens of the rank, from its row `at` on. Its sequences include m rows of the halo
 * before it and `next` rows of dpre after it. */
struct Range {
    int64_t at, L, starts; /* starts: its first word of ConvArgs.starts */
    int m, next;
    /* elements of the halo where the row l + 1 tokens before it begins, of dhalo where that of the
     * i-th token behind it does */
    int64_t back[MOST_ROWS], ahead[MOST_ROWS];
};
/* Tokens t0 .. of a range, 64 or those that are left; range -1: none. */
struct Strip {
    int64_t t0;
    int range;
};
/* Blocks of strips whose dw is summed by itself. */
struct Blocks {
    int64_t from, to;
};

struct ConvArgs {
    Part part[DPG_CONV_PARTS];
    int parts, D, silu, h, ranges; /* D: of all parts; h rows of a range in a message */
    int wtype;
    const Range *range;
    const Strip *strip;     /* 8 a block */
    const uint64_t *starts; /* bit t of a range's words: a sequence starts at its token t */
    const void *halo;       /* [N] messages: [ranges][h] tails of x, [D] each, whole words */
    const float *dhalo;     /* [N][slots][h][D] heads of dpre */
    void *send;
    float *dsend, *partial; /* partial [blocks of strips][W+1][D]; row W is dbias */
};

struct dpg_conv {
    ConvArgs a;
    dpg_conv_problem p;
    int N, slots, all, sums_of, blocks; /* slots: most ranges of a rank; all: of all ranks */
    int sms;                            /* multiprocessors of the device */
    int64_t L;
    const Blocks *runs; /* [sums_of] */
    const int *place;   /* by_part: where the sums of a part lie among those of all */
    void *tables;
    size_t send, halo, dsend, dhalo, partial, sums, sums_all, ws_bytes;
};

/* ---- one thread's channels ------------------------------------------------------------------- */

template <int VEC> struct Vec { float x[VEC]; };
template <class T, int VEC> struct Raw { T x[VEC]; };

template <class T, int VEC> __device__ __forceinline__ Vec<VEC> load(const void *p, int64_t i) {
    Vec<VEC> v;
    if constexpr (VEC == 4 && sizeof(T) == 2) {
        uint2 r = *(const uint2 *)((const T *)p + i);
        v.x[0] = __uint_as_float(r.x << 16);
        v.x[1] = __uint_as_float(r.x & 0xffff0000u);
        v.x[2] = __uint_as_float(r.y << 16);
        v.x[3] = __uint_as_float(r.y & 0xffff0000u);
    } else if constexpr (VEC == 4) {
        *(float4 *)v.x = *(const float4 *)((const T *)p + i);
    } else
        v.x[0] = (float)((const T *)p)[i];
    return v;
}

template <class T, int VEC> __device__ __forceinline__ void store(void *p, int64_t i, Vec<VEC> v) {
    if constexpr (VEC == 4 && sizeof(T) == 2) {
        __nv_bfloat162 a = __floats2bfloat162_rn(v.x[0], v.x[1]),
                       b = __floats2bfloat162_rn(v.x[2], v.x[3]);
        *(uint2 *)((T *)p + i) = make_uint2(*(uint32_t *)&a, *(uint32_t *)&b);
    } else if constexpr (VEC == 4) {
        *(float4 *)((T *)p + i) = *(float4 *)v.x;
    } else
        ((T *)p)[i] = (T)v.x[0];
}

template <int VEC> __device__ __forceinline__ Vec<VEC> zero() {
    Vec<VEC> v;
#pragma unroll
    for (int c = 0; c < VEC; c++)
        v.x[c] = 0.f;
    return v;
}

/* Row t of x of a range, t >= -m: one of its own, or of the halo. */
template <class T, int VEC>
__device__ __forceinline__ Vec<VEC> row_of_x(const ConvArgs &a, const Range &r, const Part &p,
                                             int ch, int64_t t) {
    if (t >= 0 || (FAULT(HALO_RANGE) && r.at + t >= 0))
        return load<T, VEC>(p.t.x, (r.at + t) * p.D + ch);
    return load<T, VEC>(a.halo, r.back[-1 - t] + p.at + ch);
}

/* Word w of a range's starts. */
__device__ __forceinline__ uint64_t starts_of(const ConvArgs &a, const Range &r, int64_t w) {
    return a.starts[r.starts + w];
}
__device__ __forceinline__ bool starts_at(const ConvArgs &a, const Range &r, int64_t t) {
    return t >= 0 && (starts_of(a, r, t / 64) >> (t & 63) & 1);
}

/* Tokens before t, at most W - 1, of t's own sequence that the range can see. */
template <int W>
__device__ __forceinline__ int age_of(const ConvArgs &a, const Range &r, int64_t t) {
    int age = 0;
    while (age < W - 1 && t - age > -r.m && !starts_at(a, r, t - age))
        age++;
    return age;
}

/* The sliding window: x[l] is the row l + 1 tokens before. */
template <class T, int W, int VEC> struct Window {
    Vec<VEC> w[W], bias, x[W - 1];
    int age;
    __device__ __forceinline__ void open(const ConvArgs &a, const Range &r, const Part &p, int ch,
                                         int64_t t) {
        uint32_t words[VEC][W], word[VEC];
#pragma unroll
        for (int c = 0; c < VEC; c++) {
#pragma unroll
            for (int j = 0; j < W; j++)
                words[c][j] = param_word(p.t.w, (ch + c) * W + j, a.wtype);
            word[c] = param_word(p.t.bias, ch + c, a.wtype);
        }
        age = age_of<W>(a, r, t);
#pragma unroll
        for (int l = 0; l < W - 1; l++)
            x[l] = l < age ? row_of_x<T, VEC>(a, r, p, ch, t - l - 1) : zero<VEC>();
#pragma unroll
        for (int c = 0; c < VEC; c++) {
#pragma unroll
            for (int j = 0; j < W; j++)
                w[j].x[c] = param_value(words[c][j], a.wtype);
            bias.x[c] = param_value(word[c], a.wtype);
        }
    }
    __device__ __forceinline__ void start() {
        age = 0;
#pragma unroll
        for (int l = 0; l < W - 1; l++)
            x[l] = zero<VEC>();
    }
    __device__ __forceinline__ Vec<VEC> pre(const Vec<VEC> &now) const {
        Vec<VEC> p = bias;
#pragma unroll
        for (int j = 0; j < W; j++)
#pragma unroll
            for (int c = 0; c < VEC; c++)
                p.x[c] = fmaf(w[j].x[c], j == W - 1 ? now.x[c] : x[W - 2 - j].x[c], p.x[c]);
        return p;
    }
    __device__ __forceinline__ Vec<VEC> dpre(const Vec<VEC> &now, Vec<VEC> dy, int silu) const {
        if (!silu) return dy;
        Vec<VEC> p = pre(now);
#pragma unroll
        for (int c = 0; c < VEC; c++) {
            float s = sigmoid_f32(p.x[c]);
            dy.x[c] = __fmul_rn(dy.x[c], __fmul_rn(s, fmaf(p.x[c], __fsub_rn(1.f, s), 1.f)));
        }
        return dy;
    }
    __device__ __forceinline__ void push(const Vec<VEC> &now) {
#pragma unroll
        for (int l = W - 2; l > 0; l--)
            x[l] = x[l - 1];
        x[0] = now;
        age = age < W - 1 ? age + 1 : W - 1;
    }
};

/* The part and channel of group g of VEC channels; false past the last. */
template <int VEC>
__device__ __forceinline__ bool find_part(const ConvArgs &a, int g, int &part, int &ch) {
    ch = g * VEC;
    for (part = 0; part < a.parts; part++) {
        if (ch < a.part[part].D) return true;
        ch -= a.part[part].D;
    }
    return false;
}

#define BLOCK_OF_STRIPS(a, VEC)                                                               \
    int groups = ((a).D / (VEC) + 31) / 32, part, ch;                                         \
    int64_t sb = blockIdx.x / groups;                                                         \
    Strip strip = (a).strip[sb * STRIPS + threadIdx.y];                                       \
    bool mine = find_part<VEC>(a, (int)(blockIdx.x % groups) * 32 + threadIdx.x, part, ch) && \
                strip.range >= 0;                                                             \
    const Range &r = (a).range[mine ? strip.range : 0];                                       \
    int64_t t0 = strip.t0, L = r.L

#define AT_ONCE 8 /* rows loaded before the first is used */
/* A block of the grid's second dimension takes a piece of each strip, 64, 32, 16 or 8 tokens. */
template <class T, int W, int VEC> __global__ void __launch_bounds__(256) k_conv_fwd(ConvArgs a) {
    BLOCK_OF_STRIPS(a, VEC);
    if (!mine) return;
    const Part &p = a.part[part];
    const int piece = STRIP / gridDim.y, first = blockIdx.y * piece;
    uint64_t starts = starts_of(a, r, t0 / 64) >> first;
    t0 += first;
    if (t0 >= L) return;
    Window<T, W, VEC> win;
    win.open(a, r, p, ch, t0);
    int n = (int)(L - t0 < piece ? L - t0 : piece);
    t0 += r.at;
    for (int s0 = 0; s0 < n; s0 += AT_ONCE) {
        Vec<VEC> x[AT_ONCE];
#pragma unroll
        for (int i = 0; i < AT_ONCE; i++)
            x[i] = load<T, VEC>(p.t.x, (t0 + (s0 + i < n ? s0 + i : n - 1)) * p.D + ch);
#pragma unroll
        for (int i = 0; i < AT_ONCE; i++) {
            if (starts >> (s0 + i) & 1 && !FAULT(HALO_LEAK)) win.start();
            Vec<VEC> y = win.pre(x[i]);
            if (a.silu)
#pragma unroll
                for (int c = 0; c < VEC; c++)
                    y.x[c] *= sigmoid_f32(y.x[c]);
            if (s0 + i < n) store<T, VEC>(p.t.y, (t0 + s0 + i) * p.D + ch, y);
            win.push(x[i]);
        }
    }
}

/* Gradient of pre of the first h tokens of each range. */
template <class T, int W, int VEC> __global__ void k_conv_head(ConvArgs a) {
    int part, ch, t = blockIdx.y;
    const Range &r = a.range[blockIdx.z];
    if (!find_part<VEC>(a, blockIdx.x * blockDim.x + threadIdx.x, part, ch) || t >= r.L) return;
    const Part &p = a.part[part];
    int64_t at = (r.at + t) * p.D + ch;
    Window<T, W, VEC> win;
    win.open(a, r, p, ch, t);
    Vec<VEC> d = win.dpre(load<T, VEC>(p.t.x, at), load<T, VEC>(p.t.dy, at), a.silu);
    store<float, VEC>(a.dsend, ((int64_t)blockIdx.z * a.h + t) * a.D + p.at + ch, d);
}

template <class T, int W, int VEC> struct Backward {
    Window<T, W, VEC> win;
    Vec<VEC> dx[W], dw[W], db; /* dx[l]: of the token l before, as far as it is summed */
    /* dpre of the present token: dx of it and the `age` tokens before, and dw if it is the strip's
     * own. Returns dx of the token W - 1 before. */
    __device__ __forceinline__ Vec<VEC> add(const Vec<VEC> &d, const Vec<VEC> &now, int age,
                                            bool own) {
#pragma unroll
        for (int l = W - 1; l > 0; l--)
            dx[l] = dx[l - 1];
        dx[0] = zero<VEC>();
#pragma unroll
        for (int l = 0; l < W; l++)
            if (l <= age)
#pragma unroll
                for (int c = 0; c < VEC; c++) {
                    dx[l].x[c] = fmaf(win.w[W - 1 - l].x[c], d.x[c], dx[l].x[c]);
                    if (own)
                        dw[W - 1 - l].x[c] = fmaf(d.x[c], l ? win.x[l ? l - 1 : 0].x[c] : now.x[c],
                                                  dw[W - 1 - l].x[c]);
                }
#pragma unroll
        for (int c = 0; c < VEC; c++)
            if (own) db.x[c] += d.x[c];
        return dx[W - 1];
    }
};

/* Sums of the block's strips, in their order, for one of W + 1 rows. */
template <int VEC>
__device__ __forceinline__ void sum_strips(float *to, Vec<VEC> v, bool write,
                                           Vec<VEC> stage[STRIPS][32]) {
    stage[threadIdx.y][threadIdx.x] = v;
    __syncthreads();
    if (threadIdx.y == 0 && write) {
        for (int i = 1; i < STRIPS; i++)
#pragma unroll
            for (int c = 0; c < VEC; c++)
                v.x[c] += stage[i][threadIdx.x].x[c];
#pragma unroll
        for (int c = 0; c < VEC; c++)
            to[c] = v.x[c];
    }
    __syncthreads();
}

#define AT_ONCE_BWD 4
template <class T, int W, int VEC> __global__ void __launch_bounds__(256) k_conv_bwd(ConvArgs a) {
    __shared__ Vec<VEC> stage[STRIPS][32];
    BLOCK_OF_STRIPS(a, VEC);
    Backward<T, W, VEC> b;
#pragma unroll
    for (int j = 0; j < W; j++)
        b.dx[j] = b.dw[j] = zero<VEC>();
    b.db = zero<VEC>();
    const Part &p = a.part[mine ? part : 0];
    if (mine) {
        b.win.open(a, r, p, ch, t0);
        int n = (int)(L - t0 < STRIP ? L - t0 : STRIP),
            last = (int)(L - t0 < n + W - 1 ? L - t0 : n + W - 1);
        uint64_t starts = starts_of(a, r, t0 / 64),
                 behind = last > STRIP ? starts_of(a, r, t0 / 64 + 1) : 0;
        int64_t row0 = r.at + t0;
        for (int s0 = 0; s0 < last; s0 += AT_ONCE_BWD) {
            Vec<VEC> x[AT_ONCE_BWD], dy[AT_ONCE_BWD];
#pragma unroll
            for (int i = 0; i < AT_ONCE_BWD; i++) {
                int64_t at = (row0 + (s0 + i < last ? s0 + i : last - 1)) * p.D + ch;
                x[i] = load<T, VEC>(p.t.x, at);
                dy[i] = load<T, VEC>(p.t.dy, at);
            }
#pragma unroll
            for (int i = 0; i < AT_ONCE_BWD; i++) {
                int s = s0 + i;
                if (s >= last) break;
                if ((s < STRIP ? starts >> s : behind >> (s - STRIP)) & 1)
                    /* age 0: from here on nothing flows back into earlier rows */
                    b.win.start();
                Vec<VEC> d = b.win.dpre(x[i], dy[i], a.silu),
                         done = b.add(d, x[i], b.win.age, s < n);
                if (s >= W - 1) store<T, VEC>(p.t.dx, (row0 + s - (W - 1)) * p.D + ch, done);
                b.win.push(x[i]);
            }
        }
        /* past the range: dpre of what follows it, or nothing */
        for (int s = last; s < n + W - 1; s++) {
            int64_t i = t0 + s - L;
            Vec<VEC> d = i < r.next && !FAULT(DHALO)
                             ? load<float, VEC>(a.dhalo, r.ahead[i] + p.at + ch)
                             : zero<VEC>(),
                     done = b.add(d, d, b.win.age, false);
            if (s >= W - 1) store<T, VEC>(p.t.dx, (row0 + s - (W - 1)) * p.D + ch, done);
            b.win.push(d);
        }
    }
#pragma unroll
    for (int j = 0; j <= W; j++)
        sum_strips<VEC>(a.partial + (sb * (W + 1) + j) * a.D + p.at + ch,
                        j < W ? b.dw[j < W ? j : 0] : b.db, mine, stage);
}

/* The last h rows of x of each range, of all parts one after the other: the message. */
template <class T> __global__ void k_conv_tail(ConvArgs a) {
    int c = blockIdx.x * blockDim.x + threadIdx.x, row = blockIdx.y, part, ch;
    const Range &r = a.range[blockIdx.z];
    int64_t t = r.L - a.h + row;
    if (find_part<1>(a, c, part, ch))
        ((T *)a.send)[((int64_t)blockIdx.z * a.h + row) * a.D + c] =
            t < 0 ? (T)0.f : ((const T *)a.part[part].t.x)[(r.at + t) * a.part[part].D + ch];
}

/* sums[x] = partial[0][x] + partial[1][x] + ... of a run of blocks: in 8 parts, then those 8. */
__global__ void k_conv_sum(const float *partial, float *sums, const Blocks *runs, int width) {
    __shared__ float stage[8][32];
    int x = blockIdx.x * 32 + threadIdx.x;
    int64_t first = runs[blockIdx.y].from, blocks = runs[blockIdx.y].to - first;
    int64_t from = first + blocks * threadIdx.y / 8, to = first + blocks * (threadIdx.y + 1) / 8;
    float s = 0.f;
    sums += (int64_t)blockIdx.y * width;
#pragma unroll 8
    for (int64_t i = from; x < width && i < to; i++)
        s += partial[i * width + x];
    stage[threadIdx.y][threadIdx.x] = s;
    __syncthreads();
    if (threadIdx.y || x >= width) return;
    for (int i = 1; i < 8; i++)
        s += stage[i][threadIdx.x];
    sums[x] = s;
}

/* dw and dbias: n sums [W+1][D] added in the order of the ranks, or (place) of the parts. */
__global__ void k_conv_ranks(ConvArgs a, const float *all, int n, const int *place, int W) {
    int c = blockIdx.x * blockDim.x + threadIdx.x, j = blockIdx.y, part, ch;
    if (!find_part<1>(a, c, part, ch)) return;
    float s = 0.f;
    for (int r = 0; r < n; r++)
        s += all[((int64_t)(place ? place[r] : r) * (W + 1) + j) * a.D + c];
    const dpg_conv_tensors &t = a.part[part].t;
    if (j < W)
        put_param(t.dw, ch * W + j, a.wtype, s);
    else if (t.dbias)
        put_param(t.dbias, ch, a.wtype, s);
}

/* ---- host ------------------------------------------------------------------------------------ */

#define NEED(cond, ...)                                                       \
    do {                                                                      \
        if (!(cond)) return dpg_fail(e, DP_EINPUT, "dpg_conv: " __VA_ARGS__); \
    } while (0)

static dp_status check(const dpg_conv_problem *p, int rank, int N, dp_err *e) {
    NEED(N >= 1 && rank >= 0 && rank < N, "rank %d of %d", rank, N);
    TRY(check_owners(&p->own, p->T, N, e));
    NEED(p->W >= 2 && p->W <= 8, "W = %d is not in 2 .. 8", p->W);
    NEED(p->dtype != DPG_F16, "fp16 is a type of weights alone");
    NEED(p->parts >= 1 && p->parts <= DPG_CONV_PARTS, "%d parts, not 1 .. %d", p->parts,
         DPG_CONV_PARTS);
    for (int i = 0; i < p->parts; i++)
        NEED(p->D[i] >= 1, "D[%d] = %d", i, p->D[i]);
    NEED(p->Nseq >= 1 && p->cu && p->cu[0] == 0 && p->cu[p->Nseq] == p->T,
         "cu does not run from 0 to T");
    for (int i = 0; i < p->Nseq; i++)
        NEED(p->cu[i] <= p->cu[i + 1], "cu[%d] > cu[%d]", i, i + 1);
    return DP_OK;
}

static size_t place(dpg_conv *c, size_t bytes) {
    size_t at = c->ws_bytes;
    c->ws_bytes += (bytes + 255) / 256 * 256;
    return at;
}
/* Elements of a message, whole words: bf16 rows of uneven width end in half a word. */
static int64_t message(const dpg_conv *c) {
    int64_t n = (int64_t)c->slots * c->a.h * c->a.D;
    return c->p.dtype == DPG_BF16 ? (n + 1) / 2 * 2 : n;
}
static size_t message_words(const dpg_conv *c) {
    return (size_t)message(c) / (c->p.dtype == DPG_BF16 ? 2 : 1);
}

/* ---- who has which rows ---------------------------------------------------------------------- */

/* The tables of a plan, on the host. */
struct Tables {
    std::vector<int64_t> cut;    /* of all parts */
    std::vector<int> owner, nth; /* a part's rank, and which of that rank's it is */
    std::vector<Range> range;
    std::vector<Strip> strip;
    std::vector<Blocks> runs;
    std::vector<uint64_t> starts;
    std::vector<int> place;
};

static Tables list_parts(dpg_conv *c) {
    const dpg_owners &o = c->p.own;
    Tables t;
    c->all = o.parts ? o.parts : c->N;
    std::vector<int> has(c->N, 0);
    for (int i = 0; i <= c->all; i++)
        t.cut.push_back(o.parts ? o.cut[i] : c->p.T / c->N * i);
    for (int i = 0; i < c->all; i++) {
        t.owner.push_back(o.parts ? o.owner[i] : i);
        t.nth.push_back(has[t.owner[i]]++);
    }
    for (int n : has)
        c->slots = n > c->slots ? n : c->slots;
    for (int i = 0; i < c->all; i++)
        t.place.push_back(t.owner[i] * c->slots + t.nth[i]);
    return t;
}

static int part_at(const Tables &t, int64_t token) {
    int lo = 0, hi = (int)t.owner.size() - 1;
    while (lo < hi) {
        int mid = (lo + hi) / 2;
        if (t.cut[mid + 1] > token)
            hi = mid;
        else
            lo = mid + 1;
    }
    return lo;
}

/* Part i as a range behind the rank's rows so far. */
static Range range_of(const dpg_conv *c, const Tables &t, int i) {
    const dpg_conv_problem &p = c->p;
    int64_t a = t.cut[i], b = t.cut[i + 1], most = p.W - 1, before = 0, after = 0;
    int h = c->a.h, D = c->a.D;
    Range r = {};
    r.at = c->L;
    r.L = b - a;
    r.starts = (int64_t)t.starts.size();
    for (int q = 0; q < p.Nseq; q++) {
        if (p.cu[q] < a && p.cu[q + 1] > a) before = a - p.cu[q];
        if (p.cu[q] < b && p.cu[q + 1] > b) after = p.cu[q + 1] - b;
    }
    r.m = (int)(before < most ? before : most);
    r.next = (int)(after < most ? after : most);
    for (int l = 0; l < r.m; l++) {
        int64_t g = a - 1 - l;
        int from = part_at(t, g);
        int64_t row = h - (t.cut[from + 1] - g);
        row += FAULT(HALO_ROW) && row < h - 1;
        r.back[l] = t.owner[from] * message(c) + ((int64_t)t.nth[from] * h + row) * D;
    }
    for (int k = 0; k < r.next; k++) {
        int from = part_at(t, b + k);
        r.ahead[k] = ((int64_t)t.place[from] * h + b + k - t.cut[from]) * D;
    }
    return r;
}

/* Its strips and starts; by_part: in blocks of its own. */
static void add_range(dpg_conv *c, Tables &t, int i) {
    Range r = range_of(c, t, i);
    const dpg_conv_problem &p = c->p;
    int k = (int)t.range.size();
    t.starts.resize(t.starts.size() + r.L / 64 + 1, 0);
    for (int q = 0; q < p.Nseq; q++) {
        int64_t s = p.cu[q] - t.cut[i];
        if (s >= 0 && s < r.L) t.starts[r.starts + s / 64] |= (uint64_t)1 << (s & 63);
    }
    int64_t first = (int64_t)t.strip.size() / STRIPS;
    for (int64_t s = 0; s < r.L; s += STRIP)
        t.strip.push_back({s, k});
    while (p.own.by_part && t.strip.size() % STRIPS)
        t.strip.push_back({0, -1});
    if (p.own.by_part) t.runs.push_back({first, (int64_t)t.strip.size() / STRIPS});
    t.range.push_back(r);
    c->L += r.L;
}

static dp_status upload(dpg_conv *c, const Tables &t, dp_err *e) {
    const struct {
        const void *from;
        size_t bytes;
        const void **to;
    } all[] = {{t.range.data(), t.range.size() * sizeof(Range), (const void **)&c->a.range},
               {t.strip.data(), t.strip.size() * sizeof(Strip), (const void **)&c->a.strip},
               {t.starts.data(), t.starts.size() * sizeof(uint64_t), (const void **)&c->a.starts},
               {t.runs.data(), t.runs.size() * sizeof(Blocks), (const void **)&c->runs},
               {t.place.data(), t.place.size() * sizeof(int), (const void **)&c->place}};
    size_t bytes = 8;
    for (auto &x : all)
        bytes += x.bytes;
    CK(e, cudaMalloc(&c->tables, bytes));
    char *to = (char *)c->tables;
    for (auto &x : all) {
        if (x.bytes) CK(e, cudaMemcpy(to, x.from, x.bytes, cudaMemcpyHostToDevice));
        *x.to = to;
        to += x.bytes;
    }
    return DP_OK;
}

static dp_status make_tables(dpg_conv *c, int rank, dp_err *e) {
    Tables t = list_parts(c);
    int64_t longest = 0;
    for (int i = 0; i < c->all; i++)
        longest = t.cut[i + 1] - t.cut[i] > longest ? t.cut[i + 1] - t.cut[i] : longest;
    c->a.h = (int)(longest < c->p.W - 1 ? longest : c->p.W - 1);
    for (int i = 0; i < c->all; i++)
        if (t.owner[i] == rank) add_range(c, t, i);
    while (t.strip.size() % STRIPS)
        t.strip.push_back({0, -1});
    c->blocks = (int)(t.strip.size() / STRIPS);
    if (!c->p.own.by_part) t.runs.push_back({0, c->blocks});
    c->sums_of = (int)t.runs.size();
    c->a.ranges = (int)t.range.size();
    return upload(c, t, e);
}

dp_status dpg_conv_create(dpg_conv **out, const dpg_conv_problem *p, int rank, int N, dp_err *e) {
    *out = NULL;
    TRY(check(p, rank, N, e));
    Device dev = {};
    TRY(ask_device(&dev, e));
    dpg_conv *c = (dpg_conv *)calloc(1, sizeof *c);
    if (!c) return dpg_fail(e, DP_ENOMEM, "%s:%d: plan", __FILE__, __LINE__);
    c->p = *p;
    c->N = N;
    c->sms = dev.sms;
    ConvArgs &a = c->a;
    a.parts = p->parts;
    a.silu = p->silu;
    a.wtype = p->wdtype;
    for (int i = 0; i < p->parts; i++) {
        a.part[i].D = p->D[i];
        a.part[i].at = a.D;
        a.D += p->D[i];
    }
    dp_status st = make_tables(c, rank, e);
    size_t words = message_words(c), rows = (size_t)c->slots * a.h * a.D,
           sums = (size_t)(p->W + 1) * a.D * (p->own.by_part ? c->slots : 1);
    c->send = place(c, words * 4);
    c->halo = place(c, N * words * 4);
    c->dsend = place(c, rows * 4);
    c->dhalo = place(c, N * rows * 4);
    c->partial = place(c, (size_t)c->blocks * (p->W + 1) * a.D * 4);
    c->sums = place(c, sums * 4);
    c->sums_all = place(c, N * sums * 4);
    if (st != DP_OK)
        dpg_conv_destroy(c);
    else
        *out = c;
    return st;
}

void dpg_conv_destroy(dpg_conv *c) {
    if (!c) return;
    cudaFree(c->tables);
    free(c);
}

int64_t dpg_conv_tokens(const dpg_conv *c) { return c->L; }
size_t dpg_conv_workspace_bytes(const dpg_conv *c) { return c->ws_bytes; }

static ConvArgs args(const dpg_conv *c, const dpg_conv_tensors *t, void *ws) {
    ConvArgs a = c->a;
    char *w = (char *)ws;
    for (int i = 0; i < a.parts; i++)
        a.part[i].t = t[i];
    a.send = w + c->send;
    a.halo = w + (c->N > 1 ? c->halo : c->send);
    a.dsend = (float *)(w + c->dsend);
    a.dhalo = (float *)(w + (c->N > 1 ? c->dhalo : c->dsend));
    a.partial = (float *)(w + c->partial);
    return a;
}

/* Four channels at a time if every row of every part starts at a multiple of them. */
static int fours(const ConvArgs &a, size_t size) {
    uintptr_t low = 0;
    int odd = 0;
    for (int i = 0; i < a.parts; i++) {
        const dpg_conv_tensors &t = a.part[i].t;
        low |= (uintptr_t)t.x | (uintptr_t)t.y | (uintptr_t)t.dy | (uintptr_t)t.dx;
        odd |= a.part[i].D % 4;
    }
    return !odd && low % (4 * size) == 0;
}

typedef void (*Kernel)(ConvArgs);
struct Kernels {
    Kernel fwd, head, bwd;
};
template <class T, int VEC> static Kernels kernels_of(int W) {
    switch (W) {
#define CASE(W) \
    case W: return Kernels{k_conv_fwd<T, W, VEC>, k_conv_head<T, W, VEC>, k_conv_bwd<T, W, VEC>}
        CASE(2);
        CASE(3);
        CASE(4);
        CASE(5);
        CASE(6);
        CASE(7);
    default: CASE(8);
    }
}
static Kernels kernels(const dpg_conv *c, const ConvArgs &a, int *vec) {
    int b = c->p.dtype == DPG_BF16;
    *vec = fours(a, b ? 2 : 4) ? 4 : 1;
    return *vec == 4 ? b ? kernels_of<bf16, 4>(c->p.W) : kernels_of<float, 4>(c->p.W)
           : b ? kernels_of<bf16, 1>(c->p.W)
                     : kernels_of<float, 1>(c->p.W);
}
static unsigned strip_grid(const dpg_conv *c, int vec) {
    return (unsigned)(c->blocks * ((c->a.D / vec + 31) / 32));
}

dp_status dpg_conv_forward(dpg_conv *c, const dpg_conv_tensors *t, void *ws, dpg_comm *comm,
                           void *stream, dp_err *e) {
    cudaStream_t s = (cudaStream_t)stream;
    ConvArgs a = args(c, t, ws);
    int vec;
    Kernels k = kernels(c, a, &vec);
    if (c->N > 1 && !comm)
        return dpg_fail(e, DP_EINPUT, "dpg_conv_forward: %d ranks and no communicator", c->N);
    if (c->all > 1 && a.ranges) {
        dim3 grid((a.D + 127) / 128, a.h, a.ranges);
        (c->p.dtype == DPG_BF16 ? k_conv_tail<bf16> : k_conv_tail<float>)<<<grid, 128, 0, s>>>(a);
        CK_LAUNCH(e, "k_conv_tail");
    }
    if (c->N > 1)
        TRY(comm->all_gather(comm, (const float *)a.send, (float *)a.halo, message_words(c), stream,
                             e));
    if (!a.ranges) return DP_OK;
    dim3 grid(strip_grid(c, vec), 1);
    while (grid.y < STRIP / AT_ONCE && grid.x * grid.y < 4u * c->sms)
        grid.y *= 2; /* short sequences fill the device */
    k.fwd<<<grid, dim3(32, STRIPS), 0, s>>>(a);
    CK_LAUNCH(e, "k_conv_fwd");
    return DP_OK;
}

dp_status dpg_conv_backward(dpg_conv *c, const dpg_conv_tensors *t, void *ws, dpg_comm *comm,
                            void *stream, dp_err *e) {
    cudaStream_t s = (cudaStream_t)stream;
    ConvArgs a = args(c, t, ws);
    int vec, W = c->p.W, sums = (W + 1) * a.D;
    Kernels k = kernels(c, a, &vec);
    float *mine = (float *)((char *)ws + c->sums),
          *all = c->N > 1 ? (float *)((char *)ws + c->sums_all) : mine;
    if (c->N > 1 && !comm)
        return dpg_fail(e, DP_EINPUT, "dpg_conv_backward: %d ranks and no communicator", c->N);
    if (c->all > 1 && a.ranges) {
        k.head<<<dim3((a.D / vec + 127) / 128, a.h, a.ranges), 128, 0, s>>>(a);
        CK_LAUNCH(e, "k_conv_head");
    }
    if (c->N > 1)
        TRY(comm->all_gather(comm, a.dsend, (float *)a.dhalo, (size_t)c->slots * a.h * a.D, stream,
                             e));
    if (a.ranges) {
        k.bwd<<<strip_grid(c, vec), dim3(32, STRIPS), 0, s>>>(a);
        CK_LAUNCH(e, "k_conv_bwd");
    }
    if (c->sums_of) {
        k_conv_sum<<<dim3((sums + 31) / 32, c->sums_of), dim3(32, 8), 0, s>>>(a.partial, mine,
                                                                              c->runs, sums);
        CK_LAUNCH(e, "k_conv_sum");
    }
    int by_part = c->p.own.by_part;
    if (c->N > 1)
        TRY(comm->all_gather(comm, mine, all, (size_t)sums * (by_part ? c->slots : 1), stream, e));
    k_conv_ranks<<<dim3((a.D + 127) / 128, W + 1), 128, 0, s>>>(a, all, by_part ? c->all : c->N,
                                                                by_part ? c->place : NULL, W);
    CK_LAUNCH(e, "k_conv_ranks");
    return DP_OK;
}
