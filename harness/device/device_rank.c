/* One rank on a device: inputs up, forward, backward, results and stages down (device_job.h). */
#ifdef DP_HAVE_CUDA
#include "device_job.h"
#include "device_ranks.h"
#include "ref/vocabulary/context.h"

#include <stdlib.h>
#include <string.h>
#include <unistd.h>

/* The parts that this rank owns. */
typedef struct {
    int n;
    int64_t L; /* tokens of all */
    dp_context *part;
    dp_own_table table;
} dp_rank_tokens;

/* States [Nseq][HV][K][V] of the sequences that end (or start) in a part of this rank. */
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
static dp_status states_down(dp_rank_job *j, const dp_rank_tokens *x, const float *dev, int starts,
                             double *to) {
    dp_status st = DP_OK;
    for (int i = 0; i < x->n && !st; i++)
        st = download_states(j, &x->part[i], dev, starts, to);
    return st;
}

/* The tensors of a part that ranks exchange. */
static int has_m(const dp_context *c) {
    return c->N > 1 && c->nlocal == 1 && !c->is_first && !c->is_last;
}
static int before(const dp_context *c) { return !c->is_first; }
static int behind(const dp_context *c) { return !c->is_last; }

/* One of them, of the parts that have it, if ranks that exchange so make it. */
static dp_status read_stage(dp_rank_job *j, const dp_rank_tokens *x, const dpg_tensors *t,
                            const void *ws, int which, int has(const dp_context *)) {
    const int HV = j->p->HV;
    const int64_t each = dp_rank_width(j->p, which);
    int any = 0;
    for (int i = 0; i < x->n && !j->results_only && dp_exchange_makes(j->opt.exchange, which); i++)
        any |= has(&x->part[i]);
    if (!any) return DP_OK;
    double **slot = j->out->rank[which], *all = dp_doubles(x->n * each * HV);
    const dp_status st = dpg_stage_read(j->plan, t, ws, dp_rank_name(which), all, &j->rank.dev.err);
    for (int i = 0; i < x->n * HV && !st; i++)
        if (has(&x->part[i / HV]))
            slot[x->part[i / HV].rank * HV + i % HV] =
                (j->shared ? dp_procs_copy : dp_copy)(all + i * each, each);
    free(all);
    return st;
}

static dp_status read_backward(dp_rank_job *j, const dp_rank_tokens *x, const dpg_tensors *t,
                               const void *ws) {
    const int dm = !j->opt.send_dh_only;
    dp_status st = dm ? read_stage(j, x, t, ws, DP_RANK_DM, has_m) : DP_OK;
    if (!st && !j->p->dstate) st = read_stage(j, x, t, ws, DP_RANK_DH, before);
    return st ? st : read_stage(j, x, t, ws, DP_RANK_DS_OUT, behind);
}

static dp_status finish(dp_rank_job *j, cudaStream_t stream) {
    const dp_status st =
        j->rank.comm ? j->rank.comm->wait(j->rank.comm, stream, &j->rank.dev.err) : DP_OK;
    if (!st) DP_CUDA(&j->rank.dev, cudaStreamSynchronize(stream));
    return st;
}

static const char *no_windows(const dp_rank_job *j) {
    if (j->p->own.kind) return "windows: of ranks that own T / N tokens each";
    if (!j->order)
        return "windows: processes need the fast path and a device each, of one host, whose memory "
               "all may open";
    return j->rank.comm->in_order && j->opt.send_dh_only
               ? "windows: ranks that share a device cannot keep M of later ranks"
               : "windows: the ranks' devices do not reach each other's memory";
}

/* A forward whose states go through windows: of ranks that share a device enqueued behind those of
 * the ranks before. A rank with a device of its own does not wait for another's host. That host may
 * return from its forward only when M of later ranks has arrived. */
static dp_status forward_in_turn(dp_rank_job *j, const dpg_tensors *t, void *ws) {
    struct dp_in_order *o = j->order;
    cudaStream_t *stream = o ? &o->stream[j->rank.comm->device] : &j->rank.dev.stream;
    int there = 0;
    DP_CUDA(&j->rank.dev, cudaGetDeviceCount(&there));
    j->rank.comm->in_order = o && there < j->N;
    dp_status st = dpg_plan_connect(j->plan, j->rank.comm, &j->rank.dev.err);
    if (!st && !dpg_plan_connected(j->plan))
        st = dp_fail(&j->rank.dev.err, DP_EINPUT, "%s", no_windows(j));
    while (!st && j->rank.comm->in_order && o->turn < j->rank.dev.rank && !o->failed)
        usleep(20);
    if (!st && !*stream) DP_CUDA(&j->rank.dev, cudaStreamCreate(stream));
    if (!st) st = dpg_forward(j->plan, t, ws, j->rank.comm, *stream, &j->rank.dev.err);
    if (st && o) o->failed = 1;
    if (j->rank.comm->in_order) o->turn++;
    return st ? st : finish(j, *stream);
}

/* The tensors of a rank on the device. */
typedef struct {
    dpg_tensors t;
    dpg_grads g;
} dp_rank_tensors;

/* Tensors of the kernels' table: those that the forward, or the backward, reads or writes. */
typedef struct {
    int n;
    dpg_tensor x[DPG_MOST_TENSORS];
} tensor_list;
static tensor_list list_of(const dp_rank_job *j, int backward, int output) {
    dpg_tensor all[DPG_MOST_TENSORS];
    tensor_list l = {0};
    const int n = dpg_tensors_of(&j->g, all);
    for (int i = 0; i < n; i++)
        if (all[i].of_backward == backward && all[i].is_output == output) l.x[l.n++] = all[i];
    return l;
}
static void **pointer_of(dp_rank_tensors *d, const dpg_tensor *x) {
    return (void **)((x->of_backward ? (char *)&d->g : (char *)&d->t) + x->slot);
}

/* Is it a result of one row a token: which; -1: it is not, or not of this run. */
static int token_result(const dp_rank_job *j, const dpg_tensor *x) {
    const int id = x->of_tokens ? x->id : -1;
    return id >= 0 && j->out->out.out[id] ? id : -1;
}
static int64_t words_of_token(const dp_rank_job *j, int id) {
    return dp_result_count(j->p, id) / j->p->T;
}

static dp_status make_blank(dp_rank_job *j, const dp_rank_tokens *x, dp_rank_tensors *d,
                            int backward) {
    const tensor_list l = list_of(j, backward, 1);
    dp_status st = DP_OK;
    for (int i = 0; i < l.n && !st; i++) {
        const int id = token_result(j, &l.x[i]);
        if (id >= 0)
            st = dp_device_blank(&j->rank.dev, words_of_token(j, id) * x->L, l.x[i].type,
                                 pointer_of(d, &l.x[i]));
    }
    return st;
}

/* Tokens of this rank that lie one behind the other. */
typedef struct {
    int next; /* part; 0 before the first run */
    int64_t first, n;
} run;
/* The next run, in numbers of which a token has `each`; 0: there is none. */
static int next_run(const dp_rank_tokens *x, int rank, int64_t each, run *r) {
    const dp_own_table *t = &x->table;
    while (r->next < t->parts && t->owner[r->next] != rank)
        r->next++;
    if (r->next == t->parts) return 0;
    r->first = t->cut[r->next] * each;
    while (r->next < t->parts && t->owner[r->next] == rank)
        r->next++;
    r->n = t->cut[r->next] * each - r->first;
    return 1;
}

/* A tensor of this rank, part after part, to its place in the whole one. */
static dp_status fetch_tokens(dp_rank_job *j, const dp_rank_tokens *x, int64_t each, dpg_dtype t,
                              const char *dev, double *all) {
    dp_status st = DP_OK;
    for (run r = {0}; !st && next_run(x, j->rank.dev.rank, each, &r);) {
        st = dp_device_download(&j->rank.dev, dev, r.n, t, all + r.first);
        dev += dp_device_bytes(r.n, t);
    }
    return st;
}

static dp_status fetch(dp_rank_job *j, const dp_rank_tokens *x, dp_rank_tensors *d, int backward) {
    const tensor_list l = list_of(j, backward, 1);
    dp_status st = DP_OK;
    for (int i = 0; i < l.n && !st; i++) {
        const int id = token_result(j, &l.x[i]);
        if (id < 0) continue;
        const int64_t each = words_of_token(j, id);
        st = fetch_tokens(j, x, each, l.x[i].type, *pointer_of(d, &l.x[i]), j->out->out.out[id]);
    }
    return st;
}

/* An input: this rank's tokens of it, part after part, or all of it. */
static dp_status send(dp_rank_job *j, const dp_rank_tokens *x, dp_input_id id, dpg_dtype d,
                      const void **dev) {
    const int64_t each = dp_input_width(j->p, id);
    double *all = j->p->in[id];
    if (!all || dp_input_fields[id].kind != DP_OF_TOKENS)
        return dp_device_upload(&j->rank.dev, all, dp_input_count(j->p, id), d, dev);
    void *own = NULL;
    dp_status st = dp_device_room(&j->rank.dev, each * x->L, d, &own);
    *dev = own;
    for (run r = {0}; !st && next_run(x, j->rank.dev.rank, each, &r);) {
        st = dp_device_send(&j->rank.dev, all + r.first, r.n, d, own);
        own = (char *)own + dp_device_bytes(r.n, d);
    }
    return st;
}

static dp_status send_inputs(dp_rank_job *j, const dp_rank_tokens *x, dp_rank_tensors *d,
                             int backward) {
    const tensor_list l = list_of(j, backward, 0);
    dp_status st = DP_OK;
    for (int i = 0; i < l.n && !st; i++) {
        const dp_input_id id = (dp_input_id)l.x[i].id;
        st = send(j, x, id, l.x[i].type, (const void **)pointer_of(d, &l.x[i]));
    }
    return st;
}

/* dA_log, ddt_bias as this rank got them. */
static dp_status fetch_gate(dp_rank_job *j, const float *gate) {
    const size_t bytes = sizeof *gate * (size_t)j->p->HV * (size_t)(1 + dp_Kg(j->p));
    j->gate = j->shared ? dp_procs_alloc(bytes) : dp_calloc(bytes, 1);
    DP_CUDA(&j->rank.dev, cudaMemcpy(j->gate, gate, bytes, cudaMemcpyDeviceToHost));
    return DP_OK;
}

/* Everything that the kernels do not claim to keep is overwritten. */
static dp_status forget(dp_rank_job *j, const dp_rank_tokens *x, const dpg_tensors *t, void *ws) {
    const int64_t o = x->L * j->p->HV * j->p->V;
    if (j->opt.save == DPG_SAVE_STATE)
        DP_CUDA(&j->rank.dev, cudaMemset(ws, 0xff, dpg_workspace_bytes(j->plan)));
    DP_CUDA(&j->rank.dev, cudaMemset(t->o, 0xff, dp_device_bytes(o, j->g.odtype)));
    DP_CUDA(&j->rank.dev, cudaDeviceSynchronize());
    return DP_OK;
}

static dp_status backward(dp_rank_job *j, const dp_rank_tokens *x, dp_rank_tensors *d, void *ws) {
    const dp_problem *p = j->p;
    const int64_t HV = p->HV, states = dp_input_count(p, DP_INPUT_DSTATE);
    void *ds0, *gate;
    dp_status st = send_inputs(j, x, d, 1);
    if (!st) st = make_blank(j, x, d, 1);
    if (!st) st = dp_device_blank(&j->rank.dev, states, DPG_F32, &ds0);
    if (!st) st = dp_device_blank(&j->rank.dev, HV * (1 + dp_Kg(p)), DPG_F32, &gate);
    if (!st) st = forget(j, x, &d->t, ws);
    if (st) return st;
    d->g.ds0 = ds0;
    if (p->A_log) d->g.dA_log = gate;
    if (p->dt_bias) d->g.ddt_bias = (float *)gate + HV;
    st =
        dpg_backward(j->plan, &d->t, &d->g, ws, j->rank.comm, j->rank.dev.stream, &j->rank.dev.err);
    if (!st) st = finish(j, j->rank.dev.stream);
    if (!st) st = fetch(j, x, d, 1);
    if (!st) st = states_down(j, x, ds0, 1, j->out->out.ds0);
    if (!st) st = fetch_gate(j, gate);
    if (!st) st = read_backward(j, x, &d->t, ws);
    return st;
}

static dp_status forward(dp_rank_job *j, const dp_rank_tokens *x, dp_rank_tensors *d, void *ws) {
    dp_status st;
    if (j->by_windows)
        st = forward_in_turn(j, &d->t, ws);
    else {
        st = dpg_forward(j->plan, &d->t, ws, j->rank.comm, j->rank.dev.stream, &j->rank.dev.err);
        if (!st) st = finish(j, j->rank.dev.stream);
    }
    if (!st) st = fetch(j, x, d, 0);
    if (!st) st = states_down(j, x, d->t.final_state, 0, j->out->out.final_state);
    if (!st) st = read_stage(j, x, &d->t, ws, DP_RANK_M, has_m);
    if (!st && !j->p->s0) st = read_stage(j, x, &d->t, ws, DP_RANK_H, behind);
    return st ? st : read_stage(j, x, &d->t, ws, DP_RANK_S_IN, before);
}

/* Memory that a plan works in. */
static dp_status make_room(dp_rank_job *j, dp_rank_tensors *d, void **ws) {
    const int64_t words = (int64_t)dpg_workspace_bytes(j->plan) / 4,
                  saved = (int64_t)dpg_saved_bytes(j->plan) / 4;
    const dp_status st = dp_device_blank(&j->rank.dev, words, DPG_F32, ws);
    return st ? st : dp_device_blank(&j->rank.dev, saved, DPG_F32, &d->t.saved);
}

static dp_status rank_body(dp_rank_job *j, const dp_rank_tokens *x) {
    dp_rank_tensors d = {0};
    void *ws, *final_state = NULL;
    const int64_t states = dp_input_count(j->p, DP_INPUT_S0);
    DP_CUDA(&j->rank.dev, cudaSetDevice(j->rank.comm ? j->rank.comm->device : 0));
    DP_CUDA(&j->rank.dev, cudaStreamCreate(&j->rank.dev.stream));
    dp_status st = dp_rank_job_plan(j, j->rank.dev.rank, &j->plan, &j->rank.dev.err);
    if (!st) st = send_inputs(j, x, &d, 0);
    if (!st) st = make_blank(j, x, &d, 0);
    if (!st) st = dp_device_blank(&j->rank.dev, states, DPG_F32, &final_state);
    if (!st) st = make_room(j, &d, &ws);
    if (!st) DP_CUDA(&j->rank.dev, cudaDeviceSynchronize());
    d.t.final_state = final_state;
    if (!st) st = forward(j, x, &d, ws);
    if (!st && j->opt.backward) st = backward(j, x, &d, ws);
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

dp_status dp_rank_job_plan(const dp_rank_job *j, int rank, dpg_plan **plan, dp_err *e) {
    DP_FREED(dp_own_table_free) dp_own_table table = dp_own_table_of(j->p->own, j->p->T, j->N);
    dpg_problem g = j->g;
    g.own = dp_own_for_kernels(&table, j->p->own);
    return dpg_plan_create(plan, &g, &j->opt, rank, j->N, e);
}

/* The parts of a rank. */
static dp_status find_tokens(const dp_rank_job *j, int rank, dp_rank_tokens *x, dp_err *e) {
    dp_status st = DP_OK;
    *x = (dp_rank_tokens){.table = dp_own_table_of(j->p->own, j->p->T, j->N)};
    const int parts = x->table.parts;
    x->part = dp_calloc((size_t)parts + 1, sizeof *x->part);
    for (int i = 0; i < parts && !st; i++) {
        if (x->table.owner[i] != rank) continue;
        st = dp_context_of(j->p, parts, i, &x->part[x->n], e);
        if (!st) x->L += x->part[x->n++].L;
    }
    return st;
}
static void free_tokens(dp_rank_tokens *x) {
    for (int i = 0; i < x->n; i++)
        dp_context_free(&x->part[i]);
    free(x->part);
    dp_own_table_free(&x->table);
}

dp_status dp_rank_job_run(void *job) {
    dp_rank_job *j = job;
    dp_rank_tokens x;
    dp_status st = find_tokens(j, j->rank.dev.rank, &x, &j->rank.dev.err);
    if (!st) st = rank_body(j, &x);
    free_tokens(&x);
    if (j->plan) {
        j->saved = dpg_saved_bytes(j->plan);
        j->kept = dpg_kept_bytes(j->plan);
        j->segments = dpg_plan_segments(j->plan);
        j->chunk = dpg_plan_chunk(j->plan);
        j->pair_rows = dpg_plan_pair_rows(j->plan);
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
