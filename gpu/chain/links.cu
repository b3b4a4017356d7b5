/* `gpu/chain/links.cu` - states over the parts of a table of owners (dpg_owners), from the gathered
 * elements of all of them, fp32 FMA. A merge goes over the parts of one sequence in their order,
 * wherever each lies, and leaves the state before each part of this rank. A sum over fewer parts is
 * the beginning of one over more, so nothing is computed twice. The bits are those of a merge for
 * each.
 *
 * Phases of `k_fold` and the contents of shared memory are as in chain/merge.cu. */
#include "chain/columns.cuh"
#include "plan/paths.cuh"
#include "plan/shared.cuh"

struct FoldArgs {
    Folds w;
    const float *all; /* elements, rows of `row` words */
    const float *m;   /* M of all parts, whose transposes are dM; NULL: M in columns V .. of all */
    float *out;       /* [parts][HV][K][V]; turned: from the last on */
    int row, dir, last; /* dir: 1, or -1 backward; last: part */
};

/* S = H of the merge's first part. For each later part S is its initial state, then S <- M S + H.
 * Block: a merge, one head, MV columns. */
template <int MV, int KMAX>
__global__ void __launch_bounds__(THREADS, MV == 32 && KMAX == 128 ? 2 : 1)
    k_fold(int HV, int K, int V, FoldArgs a) {
    extern __shared__ float smem[];
    int blocks = V / MV, hv = blockIdx.x / blocks % HV, v0 = blockIdx.x % blocks * MV;
    Fold w = a.w.fold[blockIdx.x / blocks / HV];
    Columns<MV, KMAX> c(smem, K, a.row);
    auto place = [&](int j) {
        return (int64_t)(FAULT(LINKS_BY_RANK) ? j : a.w.place[j]) * HV + hv;
    };
    auto element = [&](int j) { return a.all + place(j) * K * a.row; };
    auto matrix = [&](int j) {
        if (j == w.to) return Matrix{NULL, 0, 0};
        int i = FAULT(LINK_M) ? j - a.dir : j;
        return a.m ? Matrix{a.m + place(i) * K * K, K, 1} : Matrix{element(i) + V, a.row, 0};
    };
    c.from(element(w.from) + v0);
    int j = w.from + a.dir;
    if (j != w.to) c.fetch(matrix(j), 0);
    for (;; j += a.dir) {
        int e = a.w.link[j];
        if (e >= 0) {
            int64_t at = a.dir > 0 ? e : a.last - e;
            c.to(a.out + (at * HV + hv) * K * V + v0, V);
        }
        if (j == w.to) break;
        c.apply(matrix(j), element(j) + v0, a.row, matrix(j + a.dir));
    }
}

template <int MV, int KMAX> static dp_status fold(const Call &c, FoldArgs a) {
    const Dims &d = c.p->d;
    int bytes = Columns<MV, KMAX>::BYTES;
    auto kernel = k_fold<MV, KMAX>;
    CK(c.e, allow_shared(kernel, bytes));
    kernel<<<(unsigned)a.w.n * d.HV *(d.V / MV), THREADS, bytes, c.s>>>(d.HV, d.K, d.V, a);
    CK_LAUNCH(c.e, "k_fold");
    return DP_OK;
}

/* Merges are long: as many blocks as there are columns for. */
static dp_status fold_by(const Call &c, const FoldArgs &a) {
    if (!a.w.n) return DP_OK;
    return c.p->d.K <= 128 ? fold<8, 128>(c, a) : fold<8, 256>(c, a);
}

dp_status chain_fold(const Call &c) {
    const dpg_plan *p = c.p;
    FoldArgs a = {};
    a.w = p->folds;
    a.all = gathered(c, B_HM, B_HMALL);
    a.out = at<float>(c, B_SIN);
    a.row = p->d.V + p->d.K;
    a.dir = 1;
    return fold_by(c, a);
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
    return fold_by(c, a);
}
