/* gpu/chain/merge.cu - states over ranks from gathered elements (math.md g.1), fp32 FMA. The dense
 * chain forward; gradients from the farthest later rank and the last part down. Also over one rank,
 * which sends its result from the received state.
 *
 * All kernels: phases of a product P <- M P + add, and what shared memory holds (Columns):
 *
 *   panel     32 or 64 columns of M to one of two panels; the next in registers     P, panels
 *   product   sums of all rows, after a barrier a panel                             P, panels
 *   replace   P, between two barriers                                               P */
#include "chain/chain.cuh"
#include "chain/columns.cuh"
#include "plan/paths.cuh"
#include "plan/sending.cuh"
#include "plan/shared.cuh"

struct MergeArgs {
    const float *hm; /* elements of the ranks */
    int from, to;    /* ranks [from, to) precede */
    float *sin;      /* [HV][K][V] */
};

/* S = 0; for ranks from .. to-1, farthest first: S <- M_j S + H_j; S is S_in. Block: one head, MV
 * columns; fp32 FMA whatever the chain. The first product, of zero, is left out. */
template <int MV, int KMAX>
__global__ void __launch_bounds__(THREADS, MV == 32 && KMAX == 128 ? 2 : 1)
    k_merge(int HV, int K, int V, MergeArgs a) {
    extern __shared__ float smem[];
    int hv = blockIdx.x / (V / MV), v0 = blockIdx.x % (V / MV) * MV, row = V + K,
        ranks = a.to - a.from;
    Columns<MV, KMAX> c(smem, K, row);
    auto element = [&](int j) {
        return a.hm +
               ((int64_t)(FAULT(MERGE_NEAREST) ? a.to - 1 - j : a.from + j) * HV + hv) * K * row;
    };
    auto matrix = [&](int j) { return j < ranks ? element(j) + V : NULL; };
    c.rows([](int, int, float4 &q) { q = make_float4(0.f, 0.f, 0.f, 0.f); });
    if (ranks > 0) c.from(element(0) + v0);
    if (ranks > 1) c.fetch(matrix(1), 0);
    for (int j = 1; j < ranks; j++)
        c.apply(element(j) + V, element(j) + v0, matrix(j + 1));
    if (!(FAULT(MERGE_HALF) && v0 + c.col >= V / 2)) c.to(a.sin + (int64_t)hv * K * V + v0, V);
}

/* Columns per block: the most for which every multiprocessor still gets a block, because a block
 * reads M once for all of its columns. K > 128 has at most 16: 32 columns need more than 64 KB. */
static int columns(int HV, int K, int width) {
    return width % 32 == 0 && K <= 128 && HV * (width / 32) >= 100 ? 32
           : width % 16 == 0 && HV * (width / 16) >= 100           ? 16
                                                                   : 8;
}

template <int MV, int KMAX> static dp_status merge(const Call &c) {
    const Dims &d = c.p->d;
    int rank = c.p->rank, bytes = Columns<MV, KMAX>::BYTES;
    /* where states are handed over, only ranks to which none comes are here */
    MergeArgs a = {at<float>(c, B_HMALL), rank - c.p->pre, rank, at<float>(c, B_SIN)};
    auto kernel = k_merge<MV, KMAX>;
    CK(c.e, allow_shared(kernel, bytes));
    kernel<<<(unsigned)d.HV *(d.V / MV), THREADS, bytes, c.s>>>(d.HV, d.K, d.V, a);
    CK_LAUNCH(c.e, "k_merge");
    return DP_OK;
}

template <int KMAX> static dp_status merge_by(const Call &c) {
    int mv = columns(c.p->d.HV, c.p->d.K, c.p->d.V);
    return mv == 32 ? merge<32, 128>(c) : mv == 16 ? merge<16, KMAX>(c) : merge<8, KMAX>(c);
}

dp_status merge_elements(const Call &c) {
    return c.p->d.K <= 128 ? merge_by<128>(c) : merge_by<256>(c);
}

/* ---- states from rank to rank ---------------------------------------------------------------- */

struct HandArgs {
    /* received S, or an earlier element; this one, rows of `row` words */
    const float *earlier, *element;
    int row, ld, width; /* words in a row of earlier and out; columns of them */
    int applies;        /* does the received state matter to the sent one */
    float *out;
};

/* M S + H, or H alone; of an earlier element for S, where its width says so, its M is multiplied,
 * too. Block: one head, MV columns; fp32 FMA, the products of a merge. */
template <int MV, int KMAX>
__global__ void __launch_bounds__(THREADS, MV == 32 && KMAX == 128 ? 2 : 1)
    k_hand(int HV, int K, int V, HandArgs a) {
    extern __shared__ float smem[];
    int blocks = a.width / MV, hv = blockIdx.x / blocks, v0 = blockIdx.x % blocks * MV;
    int64_t at = (int64_t)hv * K * a.ld + v0;
    const float *element = a.element + (int64_t)hv * K * a.row;
    Columns<MV, KMAX> c(smem, K, a.row);
    if (a.applies) {
        c.from(a.earlier + at, a.ld);
        if (!FAULT(RING_PASSES_ON)) {
            c.fetch(element + V, 0);
            c.apply(element + V, v0 < V ? element + v0 : NULL, NULL);
        }
    } else
        c.from(element + v0);
    c.to(a.out + at, a.ld);
}

template <int MV, int KMAX> static dp_status hand(const Call &c, HandArgs a) {
    const Dims &d = c.p->d;
    int bytes = Columns<MV, KMAX>::BYTES;
    auto kernel = k_hand<MV, KMAX>;
    CK(c.e, allow_shared(kernel, bytes));
    kernel<<<(unsigned)d.HV *(a.width / MV), THREADS, bytes, c.s>>>(d.HV, d.K, d.V, a);
    CK_LAUNCH(c.e, "k_hand");
    return DP_OK;
}

/* Columns that no block has of both H and M. */
template <int KMAX> static dp_status hand_by(const Call &c, HandArgs a) {
    int mv = a.width > c.p->d.V ? 8 : columns(c.p->d.HV, c.p->d.K, a.width);
    return mv == 32 ? hand<32, 128>(c, a) : mv == 16 ? hand<16, KMAX>(c, a) : hand<8, KMAX>(c, a);
}

static dp_status hand_any(const Call &c, const HandArgs &a) {
    return c.p->d.K <= 128 ? hand_by<128>(c, a) : hand_by<256>(c, a);
}

static int row_of(const dpg_plan *p) { return p->is_bwd ? dh_row(p) : p->d.V + p->d.K; }

dp_status chain_hand(const Call &c, const float *element, int applies, const float *S, float *to) {
    int V = c.p->d.V;
    return hand_any(c, {S, element, row_of(c.p), V, V, applies, to});
}

/* M by M in the format of the chain: with fp32, the columns of M are more of H. */
dp_status chain_compose_pair(const Call &c, const float *later, const float *earlier, float *to) {
    int row = row_of(c.p);
    const dp_format f = FAULT(PAIR_SHORT_CHAIN) ? DP_BF16 : c.p->opt.chain;
    TRY(hand_any(c, {earlier, later, row, row, f == DP_FP32 ? row : c.p->d.V, 1, to}));
    return f == DP_FP32 ? DP_OK : chain_product(c, f, later, earlier, to, row);
}

/* ---- gradients ------------------------------------------------------------------------------- */

struct MergeBwdArgs {
    /* gathered elements; M of ranks rank + 1 .. of the forward, dM = M', or NULL: dM lies in
     * columns V .. of `all` */
    const float *all, *m;
    const float *came; /* the gradient of the state that leaves the rank; NULL: merged of `all` */
    /* of this rank's parts: dH [parts][HV][K][V]; M from part m_part on */
    const float *dh, *part_m;
    const int *reach;
    const Seq *seq; /* of all parts */
    const Cut *cut; /* NULL: one sub-sequence, whole */
    /* words in a row of `all`; ranks far .. rank + 1 follow; sum: their element alone is wanted */
    int row, rank, far, parts, m_part, sum;
    /* [parts][HV][K][V], the last part first; sum: dH in rows of `row` words */
    float *out;
};

/* dS = 0; for ranks far .. rank+1: dS <- dM_j dS + dH_j; then over the parts of a cut: each one's
 * gradient at its end. Block: a cut, one head, MV columns; fp32 FMA. The first product of a sum
 * that starts from zero is left out. Where nothing follows the rank, dH of its last part starts
 * from the final state's gradient. */
template <int MV, int KMAX>
__global__ void __launch_bounds__(THREADS, MV == 32 && KMAX == 128 ? 2 : 1)
    k_merge_bwd(int HV, int K, int V, MergeBwdArgs a) {
    extern __shared__ float smem[];
    int hv = blockIdx.x / (V / MV) % HV, v0 = blockIdx.x % (V / MV) * MV, ranks = a.far - a.rank;
    Cut cut = a.cut ? a.cut[blockIdx.x / (V / MV) / HV] : Cut{0, 1};
    int last = ranks + cut.n - 1 + a.sum, end = cut.first + cut.n - 1;
    Columns<MV, KMAX> c(smem, K, a.row);
    auto rank = [&](int j) { return FAULT(MERGE_BWD_NEAREST) ? a.rank + 1 + j : a.far - j; };
    auto part = [&](int j) { return end - (j - ranks); };
    auto stride = [&](int j) { return j < ranks ? a.row : V; };
    auto dh = [&](int j) {
        return (j < ranks ? a.all + ((int64_t)rank(j) * HV + hv) * K * a.row
                          : a.dh + ((int64_t)part(j) * HV + hv) * K * V) +
               v0;
    };
    auto matrix = [&](int j) {
        if (j >= last) return Matrix{NULL, 0, 0};
        if (j >= ranks)
            return Matrix{a.part_m + ((int64_t)(part(j) - a.m_part) * HV + hv) * K * K, K, 1};
        return a.m ? Matrix{a.m + ((int64_t)(rank(j) - a.rank - 1) * HV + hv) * K * K, K, 1}
                   : Matrix{dh(j) - v0 + V, a.row, 0};
    };
    c.rows([](int, int, float4 &q) { q = make_float4(0.f, 0.f, 0.f, 0.f); });
    if (a.came) {
        c.from(a.came + (int64_t)hv * K * V + v0, V);
        if (matrix(0).p) c.fetch(matrix(0), 0);
    }
    for (int j = 0; j <= last; j++) {
        if (j >= ranks && !a.sum)
            c.to(a.out + ((int64_t)(a.parts - 1 - part(j)) * HV + hv) * K * V + v0, V);
        if (j == last) break;
        int starts = !j && !a.came, in = part(j); /* from zero */
        if (j >= ranks && !starts && is_gone(a.reach, 1, in, HV, hv, a.seq[in]) && c.is_finite()) {
            c.from(dh(j), stride(j));
            if (matrix(j + 1).p) c.fetch(matrix(j + 1), 0);
        } else if (!starts) {
            c.apply(matrix(j), dh(j), stride(j), matrix(j + 1));
        } else {
            c.from(dh(0), stride(0));
            if (matrix(1).p) c.fetch(matrix(1), 0);
        }
    }
    if (a.sum) c.to(a.out + (int64_t)hv * K * a.row + v0, a.row);
}

template <int MV, int KMAX> static dp_status merge_bwd(const Call &c, MergeBwdArgs a) {
    const Dims &d = c.p->d;
    int bytes = Columns<MV, KMAX>::BYTES;
    auto kernel = k_merge_bwd<MV, KMAX>;
    CK(c.e, allow_shared(kernel, bytes));
    unsigned blocks = (unsigned)(a.cut ? c.p->ncut : 1) * d.HV * (d.V / MV);
    kernel<<<blocks, THREADS, bytes, c.s>>>(d.HV, d.K, d.V, a);
    CK_LAUNCH(c.e, "k_merge_bwd");
    return DP_OK;
}

template <int KMAX> static dp_status merge_bwd_by(const Call &c, MergeBwdArgs a) {
    int mv = columns(c.p->d.HV * (a.cut ? c.p->ncut : 1), c.p->d.K, c.p->d.V);
    return mv == 32   ? merge_bwd<32, 128>(c, a)
           : mv == 16 ? merge_bwd<16, KMAX>(c, a)
                      : merge_bwd<8, KMAX>(c, a);
}

static dp_status over_parts(const Call &c, int sum, float *out) {
    const dpg_plan *p = c.p;
    MergeBwdArgs a = {};
    a.all = at<float>(c, B_DHMALL);
    a.m = p->opt.send_dh_only ? saved_rank_m(p, c.t) : NULL;
    a.dh = at<float>(c, B_SEG);
    a.part_m = saved_part_m(p, c.t);
    a.row = dh_row(p);
    a.rank = p->rank;
    int hands = hands_on(&p->opt, p->sends);
    a.far = sum || hands ? p->rank : p->rank + p->post;
    if (hands && !sum && !p->is_last) a.came = at<float>(c, B_DSOUT);
    a.parts = p->parts;
    a.m_part = p->m_part;
    a.reach = reaches(p, c.ws);
    a.seq = p->d.seq + p->nwhole;
    a.cut = p->parts > 1 ? p->cuts : NULL;
    a.sum = sum;
    a.out = out;
    return p->d.K <= 128 ? merge_bwd_by<128>(c, a) : merge_bwd_by<256>(c, a);
}

dp_status chain_compose_bwd(const Call &c) { return over_parts(c, 1, at<float>(c, B_DHM)); }
dp_status chain_merge_bwd(const Call &c) { return over_parts(c, 0, at<float>(c, B_DSOUT)); }
