/* gpu/tests/rank.h - one rank of a problem on a device: its plan, and all of its tensors from one
 * table. */
#ifndef DPG_TESTS_RANK_H
#define DPG_TESTS_RANK_H
#include "device.h"

/* Sizes of a problem over the tokens of `cu`, which must outlive it; sigmoid beta, L2 norm,
 * everything of one type but what is always fp32. */
static inline dpg_problem sized(const std::vector<int64_t> &cu, int H, int HV, int K, int V, int R,
                                int Kg, dpg_dtype type) {
    dpg_problem p = {};
    p.T = cu.back();
    p.H = H;
    p.HV = HV;
    p.K = K;
    p.V = V;
    p.R = R;
    p.Kg = Kg;
    p.Nseq = (int)cu.size() - 1;
    p.cu = cu.data();
    p.scale = 1 / sqrt((double)K);
    p.beta_form = DP_BETA_SIGMOID;
    p.l2norm = 1;
    p.dtype = p.gdtype = p.odtype = p.ddtype = p.dgdtype = type;
    return p;
}

/* What a rank holds of a tensor: words [from, from + n) of the whole. */
struct Share {
    const char *name;
    bool is_output;
    int64_t per_token; /* words of a token; 0: the whole tensor on every rank */
    int64_t from, n;
    dpg_dtype type;
    void **at; /* in dpg_tensors or dpg_grads */

    size_t bytes() const { return n * word_bytes(type); }
};

/* Tokens of a rank. */
static inline int64_t tokens_of(const dpg_problem &p, int rank, int N) {
    int64_t n = p.own.parts ? 0 : p.T / N;
    for (int i = 0; i < p.own.parts; i++)
        if (p.own.owner[i] == rank) n += p.own.cut[i + 1] - p.own.cut[i];
    return n;
}

/* The tensors of rank `rank` of N, inputs first; at: in t and g. from: where each rank has T / N
 * tokens. Calls no CUDA. */
static inline std::vector<Share> shares_of(const dpg_problem &p, bool backward, int rank, int N,
                                           dpg_tensors *t, dpg_grads *g) {
    const int64_t L = tokens_of(p, rank, N), states = (int64_t)p.Nseq * p.HV * p.K * p.V;
    const int64_t q = (int64_t)p.H * p.K, k = q * p.R, o = (int64_t)p.HV * p.V, v = o * p.R;
    const int64_t gates = (int64_t)p.HV * p.Kg, betas = (int64_t)p.HV * p.R;
    const bool by_gates = p.model == DP_GDN2, by_factors = p.model == DP_DPLR;
    const int64_t beta = p.model <= DP_MKDA || p.model == DP_DELTAPRODUCT ? betas : 0;
    const int64_t erase = by_gates ? (int64_t)p.HV * p.K : 0, write = by_gates ? o : 0;
    const int64_t lr_a = by_factors ? (int64_t)p.HV * p.K : 0, lr_b = by_factors ? q : 0;
    const struct {
        const char *name;
        bool is_output, of_backward;
        int64_t per_token, all;
        dpg_dtype type;
        const void *at;
    } rows[] = {{"q", false, false, q, 0, p.dtype, &t->q},
                {"k", false, false, k, 0, p.dtype, &t->k},
                {"v", false, false, v, 0, p.dtype, &t->v},
                {"g", false, false, gates, 0, p.gdtype, &t->g},
                {"beta", false, false, beta, 0, p.gdtype, &t->beta},
                {"erase", false, false, erase, 0, p.dtype, &t->erase},
                {"write", false, false, write, 0, p.dtype, &t->write},
                {"lr_a", false, false, lr_a, 0, p.dtype, &t->lr_a},
                {"lr_b", false, false, lr_b, 0, p.dtype, &t->lr_b},
                {"A_log", false, false, 0, p.HV, DPG_F32, &t->A_log},
                {"dt_bias", false, false, 0, gates, DPG_F32, &t->dt_bias},
                {"s0", false, false, 0, states, DPG_F32, &t->s0},
                {"do", false, true, o, 0, p.ddtype, &g->dout},
                {"dfinal_state", false, true, 0, states, DPG_F32, &g->dfinal_state},
                {"o", true, false, o, 0, p.odtype, &t->o},
                {"final_state", true, false, 0, states, DPG_F32, &t->final_state},
                {"dq", true, true, q, 0, p.ddtype, &g->dq},
                {"dk", true, true, k, 0, p.ddtype, &g->dk},
                {"dv", true, true, v, 0, p.ddtype, &g->dv},
                {"dg", true, true, gates, 0, p.dgdtype, &g->dg},
                {"dbeta", true, true, beta, 0, p.dgdtype, &g->dbeta},
                {"derase", true, true, erase, 0, p.ddtype, &g->derase},
                {"dwrite", true, true, write, 0, p.ddtype, &g->dwrite},
                {"dlr_a", true, true, lr_a, 0, p.ddtype, &g->dlr_a},
                {"dlr_b", true, true, lr_b, 0, p.ddtype, &g->dlr_b},
                {"dA_log", true, true, 0, p.HV, DPG_F32, &g->dA_log},
                {"ddt_bias", true, true, 0, gates, DPG_F32, &g->ddt_bias},
                {"ds0", true, true, 0, states, DPG_F32, &g->ds0}};
    std::vector<Share> all;
    for (auto &r : rows)
        if ((backward || !r.of_backward) && (r.per_token || r.all))
            all.push_back({r.name, r.is_output, r.per_token, rank * L * r.per_token,
                           r.per_token ? L * r.per_token : r.all, r.type, (void **)r.at});
    return all;
}

/* open() on the rank's device, close() there too. */
struct Rank {
    dpg_plan *plan = NULL;
    dpg_tensors t = {};
    dpg_grads g = {};
    void *ws = NULL;
    cudaStream_t stream = NULL;
    dp_status st = DP_OK;
    dp_err err = {DP_OK, ""};
    Memory memory;
    std::vector<Share> shares;

    /* input(share): device memory that holds it, or NULL. Outputs and workspace hold NaN. Nothing
     * is left on its way. */
    template <class F>
    void open(const dpg_problem &p, const dpg_options &o, int rank, int N, F input) {
        DP(err, dpg_plan_create(&plan, &p, &o, rank, N, &err));
        shares = shares_of(p, o.backward, rank, N, &t, &g);
        for (const Share &x : shares)
            *x.at = x.is_output ? memory.filled(x.bytes(), 0xff) : input(x);
        if (o.backward) t.saved = memory.filled(dpg_saved_bytes(plan), 0xff);
        ws = memory.filled(dpg_workspace_bytes(plan), 0xff);
        CUDA(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
        CUDA(cudaDeviceSynchronize());
    }
    void close() {
        cudaStreamSynchronize(stream);
        memory.release();
        cudaStreamDestroy(stream);
        dpg_plan_destroy(plan);
        plan = NULL;
    }
    /* NaN again in what the kernels write. */
    void clear_outputs() {
        for (const Share &x : shares)
            if (x.is_output) CUDA(cudaMemset(*x.at, 0xff, x.bytes()));
    }
    void clear_workspace() { CUDA(cudaMemsetAsync(ws, 0xff, dpg_workspace_bytes(plan), stream)); }
    Vec read(const Share &x) const { return from_device(*x.at, x.n, x.type); }
    /* Stage `name`, empty where the rank has none. */
    Vec stage(const char *name) {
        int64_t dims[5], n = 1;
        int ndim;
        dp_err e = {DP_OK, ""};
        if (dpg_stage_shape(plan, name, dims, &ndim, &e) != DP_OK) return Vec();
        for (int i = 0; i < ndim; i++)
            n *= dims[i];
        Vec x(n);
        return dpg_stage_read(plan, &t, ws, name, x.data(), &e) == DP_OK ? x : Vec();
    }
    dp_status forward(dpg_comm *c) {
        st = dpg_forward(plan, &t, ws, c, stream, &err);
        return st;
    }
    dp_status backward(dpg_comm *c, int steps = DPG_BWD_ALL) {
        st = steps == DPG_BWD_ALL ? dpg_backward(plan, &t, &g, ws, c, stream, &err)
                                  : dpg_backward_steps(plan, &t, &g, ws, c, stream, steps, &err);
        return st;
    }
    dp_status wait(dpg_comm *c) {
        if (c) st = c->wait(c, stream, &err);
        return st;
    }
};

/* Do any of these names equal x. */
static inline bool is_one_of(const char *x, std::initializer_list<const char *> names) {
    for (const char *name : names)
        if (!strcmp(x, name)) return true;
    return false;
}
#endif
