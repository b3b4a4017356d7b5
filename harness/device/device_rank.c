/* One rank on a device: inputs up, forward, backward, results and stages down (device_job.h). */
#ifdef DP_HAVE_CUDA
#include "device_job.h"
#include "ref/vocabulary/context.h"

#include <stdlib.h>
#include <unistd.h>

/* States [Nseq][HV][K][V] of the sequences that end (or start) on this rank. */
static dp_status download_states(dp_rank_job *j, const dp_context *c, const float *dev, int starts,
                                 double *to) {
    const dp_problem *p = j->p;
    const int64_t n = (int64_t)p->HV * p->K * p->V;
    dp_status st = DP_OK;
    for (int sub = 0; sub < c->nlocal && !st; sub++) {
        const int64_t seq = c->local_seq[sub];
        if (starts ? sub == 0 && !c->is_first : sub == c->nlocal - 1 && !c->is_last) continue;
        st = dp_device_download(&j->rank.dev, dev + seq * n, n, DPG_F32, to + seq * n);
    }
    return st;
}

static dp_status read_stage(dp_rank_job *j, const dpg_tensors *t, const void *ws, int which) {
    const int HV = j->p->HV;
    const int64_t each = dp_rank_width(j->p, which);
    double **slot = j->out->rank[which];
    double *x = dp_doubles(each * HV);
    const dp_status st = dpg_stage_read(j->plan, t, ws, dp_rank_name(which), x, &j->rank.dev.err);
    for (int hv = 0; hv < HV && !st; hv++)
        slot[j->rank.dev.rank * HV + hv] =
            (j->shared ? dp_procs_copy : dp_copy)(x + hv * each, each);
    free(x);
    return st;
}

static dp_status read_forward(dp_rank_job *j, const dp_context *c, const dpg_tensors *t,
                              const void *ws) {
    const dp_problem *p = j->p;
    dp_status st = DP_OK;
    if (j->N > 1 && c->nlocal == 1 && !c->is_first && !c->is_last)
        st = read_stage(j, t, ws, DP_RANK_M);
    if (!st && !c->is_last && !p->s0) st = read_stage(j, t, ws, DP_RANK_H);
    if (!st && !c->is_first) st = read_stage(j, t, ws, DP_RANK_S_IN);
    return st;
}

static dp_status read_backward(dp_rank_job *j, const dp_context *c, const dpg_tensors *t,
                               const void *ws) {
    const dp_problem *p = j->p;
    dp_status st = DP_OK;
    if (j->N > 1 && c->nlocal == 1 && !c->is_first && !c->is_last && !j->opt.send_dh_only)
        st = read_stage(j, t, ws, DP_RANK_DM);
    if (!st && !c->is_first && !p->dstate) st = read_stage(j, t, ws, DP_RANK_DH);
    if (!st && !c->is_last) st = read_stage(j, t, ws, DP_RANK_DS_OUT);
    return st;
}

static dp_status finish(dp_rank_job *j, cudaStream_t stream) {
    const dp_status st =
        j->rank.comm ? j->rank.comm->wait(j->rank.comm, stream, &j->rank.dev.err) : DP_OK;
    if (!st) DP_CUDA(&j->rank.dev, cudaStreamSynchronize(stream));
    return st;
}

/* A forward whose states go through windows: enqueued behind those of the ranks before. */
static dp_status forward_in_turn(dp_rank_job *j, const dpg_tensors *t, void *ws) {
    struct dp_in_order *o = j->order;
    if (!o)
        return dp_fail(&j->rank.dev.err, DP_EINPUT, "windows: ranks that are processes have none");
    cudaStream_t *stream = &o->stream[j->rank.comm->device];
    int there = 0;
    DP_CUDA(&j->rank.dev, cudaGetDeviceCount(&there));
    j->rank.comm->in_order = there < j->N;
    dp_status st = dpg_plan_connect(j->plan, j->rank.comm, &j->rank.dev.err);
    if (!st && !dpg_plan_connected(j->plan))
        st = dp_fail(&j->rank.dev.err, DP_EINPUT,
                     j->rank.comm->in_order && j->opt.send_dh_only
                         ? "windows: ranks that share a device cannot keep M of later ranks"
                         : "windows: the ranks' devices do not reach each other's memory");
    while (!st && o->turn < j->rank.dev.rank && !o->failed)
        usleep(20);
    if (!st && !*stream) DP_CUDA(&j->rank.dev, cudaStreamCreate(stream));
    if (!st) st = dpg_forward(j->plan, t, ws, j->rank.comm, *stream, &j->rank.dev.err);
    if (st) o->failed = 1;
    o->turn++;
    return st ? st : finish(j, *stream);
}

/* A result of one row a token: this rank's part on the device. */
typedef struct {
    dp_result_id id;
    dpg_dtype d;
    void **dev;
} token_result;

static dp_status make_blank(dp_rank_job *j, const dp_context *c, const token_result *t, int n) {
    dp_status st = DP_OK;
    for (int i = 0; i < n && !st; i++) {
        int64_t rows, width;
        dp_result_shape(j->p, t[i].id, &rows, &width);
        st = dp_device_blank(&j->rank.dev, rows / j->p->T * width * c->L, t[i].d, t[i].dev);
    }
    return st;
}

static dp_status fetch(dp_rank_job *j, const dp_context *c, const token_result *t, int n) {
    dp_status st = DP_OK;
    for (int i = 0; i < n && !st; i++) {
        int64_t rows, width;
        dp_result_shape(j->p, t[i].id, &rows, &width);
        const int64_t each = rows / j->p->T * width;
        st = dp_device_download(&j->rank.dev, *t[i].dev, each * c->L, t[i].d,
                                *dp_result_at(&j->out->out, t[i].id) + c->a * each);
    }
    return st;
}

/* An input: this rank's tokens of it, or all of it. */
static dp_status send(dp_rank_job *j, const dp_context *c, dp_input_id id, dpg_dtype d,
                      const void **dev) {
    const int tokens = dp_input_fields[id].kind == DP_OF_TOKENS;
    const int64_t each = dp_input_width(j->p, id);
    const double *x = dp_input_of(j->p, id);
    return dp_device_upload(&j->rank.dev, x && tokens ? x + c->a * each : x,
                            tokens ? c->L * each : dp_input_count(j->p, id), d, dev);
}

#define COUNT(LIST) ((int)(sizeof(LIST) / sizeof *(LIST)))

/* dA_log, ddt_bias as this rank got them. */
static dp_status fetch_gate(dp_rank_job *j, const float *gate) {
    const size_t bytes = sizeof *gate * (size_t)j->p->HV * (size_t)(1 + dp_Kg(j->p));
    j->gate = j->shared ? dp_procs_alloc(bytes) : dp_calloc(bytes, 1);
    DP_CUDA(&j->rank.dev, cudaMemcpy(j->gate, gate, bytes, cudaMemcpyDeviceToHost));
    return DP_OK;
}

/* Everything that the kernels do not claim to keep is overwritten. */
static dp_status forget(dp_rank_job *j, const dp_context *c, const dpg_tensors *t, void *ws) {
    const int64_t o = c->L * j->p->HV * j->p->V;
    if (j->opt.save == DPG_SAVE_STATE)
        DP_CUDA(&j->rank.dev, cudaMemset(ws, 0xff, dpg_workspace_bytes(j->plan)));
    DP_CUDA(&j->rank.dev, cudaMemset(t->o, 0xff, dp_device_bytes(o, j->g.odtype)));
    DP_CUDA(&j->rank.dev, cudaDeviceSynchronize());
    return DP_OK;
}

static dp_status backward(dp_rank_job *j, const dp_context *c, const dpg_tensors *t, void *ws) {
    const dp_problem *p = j->p;
    const int64_t HV = p->HV, states = dp_input_count(p, DP_INPUT_DSTATE);
    const dpg_dtype dd = j->g.ddtype, dgd = j->g.dgdtype;
    dpg_grads g = {0};
    void *ds0, *gate;
    const token_result to[] = {{DP_RESULT_DQ, dd, &g.dq},
                               {DP_RESULT_DK, dd, &g.dk},
                               {DP_RESULT_DV, dd, &g.dv},
                               {DP_RESULT_DG, dgd, &g.dg},
                               {DP_RESULT_DBETA, dgd, &g.dbeta}};
    dp_status st = send(j, c, DP_INPUT_DO, dd, &g.dout);
    if (!st) st = send(j, c, DP_INPUT_DSTATE, DPG_F32, (const void **)&g.dfinal_state);
    if (!st) st = make_blank(j, c, to, COUNT(to));
    if (!st) st = dp_device_blank(&j->rank.dev, states, DPG_F32, &ds0);
    if (!st) st = dp_device_blank(&j->rank.dev, HV * (1 + dp_Kg(p)), DPG_F32, &gate);
    if (!st) st = forget(j, c, t, ws);
    if (st) return st;
    g.ds0 = ds0;
    if (p->A_log) g.dA_log = gate;
    if (p->dt_bias) g.ddt_bias = (float *)gate + HV;
    st = dpg_backward(j->plan, t, &g, ws, j->rank.comm, j->rank.dev.stream, &j->rank.dev.err);
    if (!st) st = finish(j, j->rank.dev.stream);
    if (!st) st = fetch(j, c, to, COUNT(to));
    if (!st) st = download_states(j, c, ds0, 1, j->out->out.ds0);
    if (!st) st = fetch_gate(j, gate);
    if (!st) st = read_backward(j, c, t, ws);
    return st;
}

static dp_status send_inputs(dp_rank_job *j, const dp_context *c, dpg_tensors *t) {
    const struct {
        dp_input_id id;
        dpg_dtype d;
        const void **to;
    } in[] = {{DP_INPUT_Q, j->g.dtype, &t->q},
              {DP_INPUT_K, j->g.dtype, &t->k},
              {DP_INPUT_V, j->g.dtype, &t->v},
              {DP_INPUT_G, j->g.gdtype, &t->g},
              {DP_INPUT_BETA, j->g.gdtype, &t->beta},
              {DP_INPUT_A_LOG, DPG_F32, (const void **)&t->A_log},
              {DP_INPUT_DT_BIAS, DPG_F32, (const void **)&t->dt_bias},
              {DP_INPUT_S0, DPG_F32, (const void **)&t->s0},
              {DP_INPUT_ERASE, j->g.dtype, &t->erase},
              {DP_INPUT_WRITE, j->g.dtype, &t->write},
              {DP_INPUT_LR_A, j->g.dtype, &t->lr_a},
              {DP_INPUT_LR_B, j->g.dtype, &t->lr_b}};
    dp_status st = DP_OK;
    for (int i = 0; i < COUNT(in) && !st; i++)
        st = send(j, c, in[i].id, in[i].d, in[i].to);
    return st;
}

static dp_status forward(dp_rank_job *j, const dp_context *c, dpg_tensors *t, void *ws) {
    dp_status st;
    if (j->by_windows)
        st = forward_in_turn(j, t, ws);
    else {
        st = dpg_forward(j->plan, t, ws, j->rank.comm, j->rank.dev.stream, &j->rank.dev.err);
        if (!st) st = finish(j, j->rank.dev.stream);
    }
    const token_result o = {DP_RESULT_O, j->g.odtype, &t->o};
    if (!st) st = fetch(j, c, &o, 1);
    if (!st) st = download_states(j, c, t->final_state, 0, j->out->out.final_state);
    if (!st) st = read_forward(j, c, t, ws);
    return st;
}

static dp_status rank_body(dp_rank_job *j, const dp_context *c) {
    dpg_tensors t = {0};
    void *ws, *final_state;
    DP_CUDA(&j->rank.dev, cudaSetDevice(j->rank.comm ? j->rank.comm->device : 0));
    DP_CUDA(&j->rank.dev, cudaStreamCreate(&j->rank.dev.stream));
    dp_status st =
        dpg_plan_create(&j->plan, &j->g, &j->opt, j->rank.dev.rank, j->N, &j->rank.dev.err);
    const token_result o = {DP_RESULT_O, j->g.odtype, &t.o};
    if (!st) st = send_inputs(j, c, &t);
    if (!st) st = make_blank(j, c, &o, 1);
    if (!st)
        st =
            dp_device_blank(&j->rank.dev, dp_input_count(j->p, DP_INPUT_S0), DPG_F32, &final_state);
    if (!st)
        st = dp_device_blank(&j->rank.dev, (int64_t)dpg_workspace_bytes(j->plan) / 4, DPG_F32, &ws);
    if (!st)
        st =
            dp_device_blank(&j->rank.dev, (int64_t)dpg_saved_bytes(j->plan) / 4, DPG_F32, &t.saved);
    if (!st) DP_CUDA(&j->rank.dev, cudaDeviceSynchronize());
    t.final_state = st ? NULL : final_state;
    if (!st) st = forward(j, c, &t, ws);
    if (!st && j->opt.backward) st = backward(j, c, &t, ws);
    return st;
}

static void note_paths(dp_rank_job *j) {
    static const char *const names[][4] = {
        [DPG_PATH_SIMPLE] = {"simple", "simple/simple", "simple/fast", "simple/token"},
        [DPG_PATH_FAST] = {"fast", "fast/simple", "fast/fast", "fast/token"},
        [DPG_PATH_TOKEN] = {"token", "token/simple", "token/fast", "token/token"}};
    const dpg_path f = dpg_plan_path(j->plan), b = dpg_plan_bwd_path(j->plan);
    j->fast = f == DPG_PATH_FAST || b == DPG_PATH_FAST;
    j->tokens = f == DPG_PATH_TOKEN || b == DPG_PATH_TOKEN;
    j->path = names[f][b]; /* without a backward DPG_PATH_AUTO, which is 0 */
}

dp_status dp_rank_job_run(void *job) {
    dp_rank_job *j = job;
    dp_context c;
    dp_status st =
        dp_context_build(j->p->cu, j->p->Nseq, j->N, j->rank.dev.rank, &c, &j->rank.dev.err);
    if (!st) {
        st = rank_body(j, &c);
        dp_context_free(&c);
    }
    if (j->plan) {
        j->saved = dpg_saved_bytes(j->plan);
        j->kept = dpg_kept_bytes(j->plan);
        j->segments = dpg_plan_segments(j->plan);
        note_paths(j);
    }
    if (st && j->order) j->order->failed = 1;
    return st;
}

void dp_rank_job_end(void *job) {
    dp_rank_job *j = job;
    if (j->plan) dpg_plan_destroy(j->plan);
}
#endif
