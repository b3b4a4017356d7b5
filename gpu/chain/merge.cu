/* gpu/chain/merge.cu - gradients over ranks from gathered elements (math.md g.1), fp32 FMA. They
 * come from the farthest later rank and the last part down. Also over one rank, which sends its
 * result from the received state.
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
            const Matrix M = {element + V, a.row, 0};
            c.fetch(M, 0);
            c.apply(M, v0 < V ? element + v0 : NULL, a.row, {NULL, 0, 0});
        }
    } else
        c.from(element + v0);
    c.to(a.out + at, a.ld);
}

/* Columns that no block has of both H and M. */
static dp_status hand(const Call &c, const HandArgs &a) {
    static const ByColumns<HandArgs> kernels = BY_COLUMNS(k_hand);
    const Dims &d = c.p->d;
    int mv = a.width > d.V ? 8 : block_columns(d.HV, d.K, a.width);
    return over_columns(c, "k_hand", kernels, d.HV, a.width, mv, a);
}

static int row_of(const dpg_plan *p) { return p->is_bwd ? dh_row(p) : p->d.V + p->d.K; }

dp_status chain_hand(const Call &c, const float *element, int applies, const float *S, float *to) {
    int V = c.p->d.V;
    return hand(c, {S, element, row_of(c.p), V, V, applies, to});
}

/* M by M in the format of the chain: with fp32, the columns of M are more of H. */
dp_status chain_compose_pair(const Call &c, const float *later, const float *earlier, float *to) {
    int row = row_of(c.p);
    const dp_format f = FAULT(PAIR_SHORT_CHAIN) ? DP_BF16 : c.p->opt.chain;
    TRY(hand(c, {earlier, later, row, row, f == DP_FP32 ? row : c.p->d.V, 1, to}));
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

static dp_status over_parts(const Call &c, int sum, float *out) {
    static const ByColumns<MergeBwdArgs> kernels = BY_COLUMNS(k_merge_bwd);
    const dpg_plan *p = c.p;
    const Dims &d = p->d;
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
    a.seq = d.seq + p->nwhole;
    a.cut = p->parts > 1 ? p->cuts : NULL;
    a.sum = sum;
    a.out = out;
    const int chains = d.HV * (a.cut ? p->ncut : 1);
    return over_columns(c, "k_merge_bwd", kernels, chains, d.V, block_columns(chains, d.K, d.V), a);
}

dp_status chain_compose_bwd(const Call &c) { return over_parts(c, 1, at<float>(c, B_DHM)); }
dp_status chain_merge_bwd(const Call &c) { return over_parts(c, 0, at<float>(c, B_DSOUT)); }
