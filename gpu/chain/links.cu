/* `gpu/chain/links.cu` - states over ranks (dense chain forward), or over the parts of a table of
 * owners (dpg_owners), from gathered elements, fp32 FMA. A merge goes over the parts of one
 * sequence in their order, wherever each lies. It leaves the state before each part of
 * this rank. A sum over fewer parts is the beginning of one over more, so nothing is computed
 * twice. The bits are those of a merge for each.
 *
 * Phases of `k_fold` and the contents of shared memory are as in chain/merge.cu. */
#include "chain/columns.cuh"
#include "plan/paths.cuh"

struct FoldArgs {
    Folds w;          /* no table: the one merge `only`, of ranks */
    Fold only;        /* from = to: of none */
    const float *all; /* elements, rows of `row` words */
    const float *m;   /* M of all parts, whose transposes are dM; NULL: M in columns V .. of all */
    float *out;       /* [parts][HV][K][V]; turned: from the last on */
    int row, dir, last; /* dir: 1, or -1 backward; last: part */
};

/* S = H of the merge's first part. For each later part S is its initial state, then S <- M S + H.
 * Block: a merge, one head, MV columns; fp32 FMA whatever the chain. */
template <int MV, int KMAX>
__global__ void __launch_bounds__(THREADS, MV == 32 && KMAX == 128 ? 2 : 1)
    k_fold(int HV, int K, int V, FoldArgs a) {
    extern __shared__ float smem[];
    int blocks = V / MV, hv = blockIdx.x / blocks % HV, v0 = blockIdx.x % blocks * MV;
    Fold w = a.w.n ? a.w.fold[blockIdx.x / blocks / HV] : a.only;
    Columns<MV, KMAX> c(smem, K, a.row);
    auto place = [&](int j) {
        if (!a.w.n) return (int64_t)(FAULT(MERGE_NEAREST) ? w.from + w.to - 1 - j : j) * HV + hv;
        return (int64_t)(FAULT(LINKS_BY_RANK) ? j : a.w.place[j]) * HV + hv;
    };
    auto element = [&](int j) { return a.all + place(j) * K * a.row; };
    auto matrix = [&](int j) {
        if (j == w.to) return Matrix{NULL, 0, 0};
        int i = FAULT(LINK_M) && a.w.n ? j - a.dir : j;
        return a.m ? Matrix{a.m + place(i) * K * K, K, 1} : Matrix{element(i) + V, a.row, 0};
    };
    int j = w.from;
    if (j == w.to)
        c.rows([](int, int, float4 &q) { q = make_float4(0.f, 0.f, 0.f, 0.f); });
    else {
        c.from(element(j) + v0);
        j += a.dir;
        if (j != w.to) c.fetch(matrix(j), 0);
    }
    for (;; j += a.dir) {
        int e = a.w.n ? a.w.link[j] : j == w.to ? 0 : -1;
        if (e >= 0 && !(FAULT(MERGE_HALF) && a.dir > 0 && v0 + c.col >= V / 2)) {
            int64_t at = a.dir > 0 ? e : a.last - e;
            c.to(a.out + (at * HV + hv) * K * V + v0, V);
        }
        if (j == w.to) break;
        c.apply(matrix(j), element(j) + v0, a.row, matrix(j + a.dir));
    }
}

static dp_status fold(const Call &c, int merges, int mv, const FoldArgs &a) {
    static const ByColumns<FoldArgs> kernels = BY_COLUMNS(k_fold);
    const Dims &d = c.p->d;
    return merges ? over_columns(c, "k_fold", kernels, merges * d.HV, d.V, mv, a) : DP_OK;
}
static FoldArgs to_states(const Call &c) {
    FoldArgs a = {};
    a.out = at<float>(c, B_SIN);
    a.row = c.p->d.V + c.p->d.K;
    a.dir = 1;
    return a;
}

/* Where states are handed over, only ranks to which none comes are here. */
dp_status merge_elements(const Call &c) {
    const dpg_plan *p = c.p;
    FoldArgs a = to_states(c);
    a.only = {p->rank - p->pre, p->rank};
    a.all = at<float>(c, B_HMALL);
    return fold(c, 1, block_columns(p->d.HV, p->d.K, p->d.V), a);
}

/* Merges of parts are long: as many blocks as there are columns for. */
dp_status chain_fold(const Call &c) {
    FoldArgs a = to_states(c);
    a.w = c.p->folds;
    a.all = gathered(c, B_HM, B_HMALL);
    return fold(c, a.w.n, 8, a);
}

dp_status chain_fold_bwd(const Call &c) {
    const dpg_plan *p = c.p;
    FoldArgs a = {};
    a.w = p->folds_bwd;
    a.all = gathered(c, B_DHM, B_DHMALL);
    a.m = p->opt.send_dh_only ? saved_rank_m(p, c.t) : NULL;
    a.out = at<float>(c, B_DSOUT);
    a.row = dh_row(p);
    a.dir = -1;
    a.last = p->nlink - 1;
    return fold(c, a.w.n, 8, a);
}
