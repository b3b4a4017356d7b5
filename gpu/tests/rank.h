/* gpu/tests/rank.h - one rank of a problem on a device: its plan, and all of its tensors from one
 * table. */
#ifndef DPG_TESTS_RANK_H
#define DPG_TESTS_RANK_H
#include "device.h"
#include "plan/tensors.cuh"

/* Sizes of a problem over the tokens of `cu`, which must outlive it. Sigmoid beta, L2 norm,
 * everything of one type but tensors that are always fp32. */
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

/* A rank's share of a tensor: words [from, from + n) of the whole. */
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
    const int64_t L = tokens_of(p, rank, N);
    std::vector<Share> all;
    for (const Tensor &x : tensors_of(&p)) {
        if ((of_backward(x.when) && !backward) || !x.width) continue;
        const int64_t row = (int64_t)(x.by_query ? p.H : p.HV) * x.width;
        const int64_t per_token = x.rows == TOKENS ? row : 0;
        const int64_t n = per_token * L, whole = x.rows == ONE_ROW ? row : p.Nseq * row;
        all.push_back({x.name, !is_input(x.when), per_token, rank * n, per_token ? n : whole,
                       x.type, slot_of(x, t, g)});
    }
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

    /* input(share): device memory that holds it, or NULL. Outputs and workspace hold NaN. All work
     * has finished on return. */
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
