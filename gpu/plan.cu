/* gpu/plan.cu - a rank's share of a problem (math.md g.2), its workspace, and the order of the stages. */
#include <math.h>
#include <stdlib.h>
#include "internal.cuh"

dp_status dpg_fail(dp_err *e, dp_status code, const char *fmt, ...)
{
    if (e && e->code == DP_OK) {
        va_list ap;
        va_start(ap, fmt);
        vsnprintf(e->msg, sizeof e->msg, fmt, ap);
        va_end(ap);
        e->code = code;
    }
    return code;
}

static const BwdOps *bwd_ops(dpg_path path) { return path == DPG_PATH_FAST ? &fast_bwd : &simple_bwd; }

static dpg_path bwd_path_of(const dpg_problem *p, const dpg_options *o)
{
    return o->bwd_path != DPG_PATH_AUTO ? o->bwd_path : fast_bwd_supports(p, o) ? DPG_PATH_FAST : DPG_PATH_SIMPLE;
}

static dpg_path path_of(const dpg_problem *p, const dpg_options *o)
{
    if (o->path == DPG_PATH_AUTO && o->backward && o->save == DPG_SAVE_ALL)
        return bwd_path_of(p, o);                        /* save all takes one path */
    return o->path != DPG_PATH_AUTO ? o->path : fast_supports(p, o) ? DPG_PATH_FAST : DPG_PATH_SIMPLE;
}

#define NEED(cond, ...) do { if (!(cond)) return dpg_fail(e, DP_EINPUT, "dpg_plan: " __VA_ARGS__); } while (0)

static dp_status check(const dpg_problem *p, const dpg_options *o, int rank, int N, dp_err *e)
{
    NEED(N >= 1 && rank >= 0 && rank < N, "rank %d of %d", rank, N);
    NEED(p->T >= N && p->T % N == 0, "T = %lld is not a multiple of %d ranks", (long long)p->T, N);
    NEED(p->K >= 16 && p->K <= 256 && p->K % 16 == 0, "K = %d is not a multiple of 16 up to 256", p->K);
    NEED(p->V >= 16 && p->V <= 256 && p->V % 16 == 0, "V = %d is not a multiple of 16 up to 256", p->V);
    NEED(p->R == 1 || p->R == 2 || p->R == 4, "R = %d is not 1, 2 or 4", p->R);
    NEED(p->H >= 1 && p->HV >= p->H && p->HV % p->H == 0, "HV = %d is not a multiple of H = %d", p->HV, p->H);
    NEED(p->Kg == 1 || p->Kg == p->K, "Kg = %d is neither 1 nor K", p->Kg);
    NEED(p->gate != DP_GATE_LOWER_BOUND || p->lower_bound < 0, "lower_bound = %g is not negative", p->lower_bound);
    NEED(p->Nseq >= 1 && p->cu && p->cu[0] == 0 && p->cu[p->Nseq] == p->T, "cu does not run from 0 to T");
    for (int i = 0; i < p->Nseq; i++)
        NEED(p->cu[i] <= p->cu[i + 1], "cu[%d] > cu[%d]", i, i + 1);
    NEED(o->base == DP_BASE_FP32 || o->base == DP_BASE_BF16, "base policy is neither fp32 nor bf16");
    NEED(o->chain == DP_FP32 || o->chain == DP_TF32X3 || o->chain == DP_TF32 || o->chain == DP_TF32RZ || o->chain == DP_BF16,
         "no such chain format on the device");
    NEED(o->path != DPG_PATH_FAST || fast_supports(p, o), "the fast path does not take this problem");
    if (o->backward) {
        NEED(o->bwd_path != DPG_PATH_FAST || fast_bwd_supports(p, o), "the fast backward does not take this problem");
        NEED(o->save == DPG_SAVE_STATE || path_of(p, o) == bwd_path_of(p, o), "save all needs forward and backward on the same path");
        NEED(!o->pair_dg || bwd_path_of(p, o) == DPG_PATH_SIMPLE, "pair_dg needs the simple backward");
    }
    return DP_OK;
}

/* math.md g.2. Local sub-sequences are the global ones cut to [a, b); empty ones vanish. */
static void split(dpg_plan *pl, const dpg_problem *p)
{
    int64_t L = p->T / pl->N, a = pl->rank * L, b = a + L;
    int f = 0, l = p->Nseq - 1, nseq = 0, nt = 0;
    while (p->cu[f + 1] <= a)
        f++;
    while (p->cu[l] >= b || p->cu[l] == p->cu[l + 1])
        l--;
    pl->pre = (int)(pl->rank - p->cu[f] / L);
    pl->post = (int)((p->cu[l + 1] - 1) / L - pl->rank);
    pl->is_first = pl->pre == 0;
    pl->is_last = pl->post == 0;
    int tok = pl->d.tok;
    pl->seqs_h = (Seq *)calloc(l - f + 1 + L / tok + 1, sizeof(Seq));
    pl->chunks_h = (Chunk *)calloc(L / tok + (l - f + 1) + 1, sizeof(Chunk));
    for (int s = f; s <= l; s++) {
        int64_t lo = p->cu[s] > a ? p->cu[s] : a, hi = p->cu[s + 1] < b ? p->cu[s + 1] : b;
        if (lo >= hi)
            continue;
        pl->seqs_h[nseq].c0 = nt;
        for (int64_t t = lo; t < hi; t += tok, nt++) {
            pl->chunks_h[nt].t0 = t - a;
            pl->chunks_h[nt].len = (int)(hi - t < tok ? hi - t : tok);
            pl->chunks_h[nt].seq = nseq;
        }
        pl->seqs_h[nseq].c1 = nt;
        pl->seqs_h[nseq].gseq = s;
        pl->seqs_h[nseq].starts = p->cu[s] >= a;
        pl->seqs_h[nseq].ends = p->cu[s + 1] <= b;
        nseq++;
    }
    pl->d.L = L;
    pl->d.NT = nt;
    pl->d.nseq = nseq;
    pl->needs_m = nseq == 1 && !pl->is_first && !pl->is_last;
    pl->whole = pl->seqs_h[nseq - 1].starts;
}

/* Segments side by side keep a card of 132 multiprocessors busy where a chain of chunks per head would not: M takes one block a segment
 * and head. Fewer than 4 chunks a segment, or more than 16 segments, and composing them costs more than it saves. One rank alone, whose (M, H) nobody asks for, gains where
 * few heads leave most of the card idle for long: T 131,072 HV 8, forward 2.93 -> 2.28 ms, backward 9.5 -> 8.0. */
static int segments(const dpg_plan *pl, const dpg_options *o)
{
    Seq q = pl->seqs_h[pl->d.nseq - 1];
    int chunks = q.c1 - q.c0, n = 128 / pl->d.HV;
    if (o->path != DPG_PATH_FAST || o->chain_how != DPG_CHAIN_AUGMENTED)
        return 1;
    if (o->segments)
        return o->segments < chunks ? o->segments : chunks;
    if (pl->N == 1 && (pl->d.nseq > 1 || pl->d.HV > 8 || chunks < 512))
        return 1;
    n = n < chunks / 4 ? n : chunks / 4;
    return n < 1 ? 1 : n < 16 ? n : 16;
}

/* Replaces the last local sub-sequence by its segments. */
static void cut(dpg_plan *pl)
{
    int last = pl->d.nseq - 1, n = pl->nseg;
    Seq whole = pl->seqs_h[last];
    for (int i = 0; i < n; i++) {
        Seq *q = &pl->seqs_h[last + i];
        *q = whole;
        q->c0 = whole.c0 + (int)((int64_t)(whole.c1 - whole.c0) * i / n);
        q->c1 = whole.c0 + (int)((int64_t)(whole.c1 - whole.c0) * (i + 1) / n);
        q->starts = whole.starts && i == 0;
        q->ends = whole.ends && i == n - 1;
        q->part = i;
    }
}

static void add(dpg_plan *pl, int slot, int64_t words, int is_bf16, int layout = PLAIN)
{
    pl->buf[slot].layout = layout;
    pl->buf[slot].off = pl->ws_bytes;
    pl->buf[slot].bytes = (size_t)words * (is_bf16 ? 2 : 4);
    pl->buf[slot].is_bf16 = is_bf16;
    pl->ws_bytes += (pl->buf[slot].bytes + 255) / 256 * 256;
}

static void layout(dpg_plan *pl)
{
    const Dims &d = pl->d;
    int64_t C = DP_CHUNK, tiles = (int64_t)d.NT * d.HV, hm = (int64_t)d.HV * d.K * (d.V + d.K);
    int fast = pl->opt.path == DPG_PATH_FAST, keep = !fast || pl->opt.keep || (pl->opt.backward && pl->opt.save == DPG_SAVE_ALL);
    if (fast && pl->is_bwd) {
        add(pl, B_GCUM, tiles * C * d.K, 0);
        add(pl, B_AKK, tiles * C * C, 1);
        add(pl, B_L, tiles * C * C, 1);
        add(pl, B_H, tiles * d.K * d.V, 1, SLICES);
        add(pl, B_VNEW, tiles * C * d.V, 1, SLICES);
    } else if (keep) {
        add(pl, B_GCUM, tiles * C * d.Kg, 0);
        add(pl, B_AKK, tiles * d.n * d.n, fast);
        add(pl, B_H, tiles * d.K * d.V, fast);
        add(pl, B_VNEW, tiles * d.n * d.V, fast);
    }
    if (!fast) {
        add(pl, B_BETA, tiles * d.n, 0);
        add(pl, B_QN, tiles * C * d.K, 0);
        add(pl, B_KN, tiles * d.n * d.K, 0);
        if (pl->opt.backward)
            add(pl, B_L, tiles * d.n * d.n, 0);
    }
    add(pl, B_AQK, tiles * C * d.n, fast, fast ? ROWS : PLAIN);
    add(pl, B_W, tiles * d.n * d.K, fast, fast ? ROWS : PLAIN);
    add(pl, B_U, tiles * d.n * d.V, fast, fast ? SLICES : PLAIN);
    add(pl, B_KG, tiles * d.n * d.K, fast, fast ? ROWS : PLAIN);
    add(pl, B_QG, tiles * C * d.K, fast, fast ? ROWS : PLAIN);
    add(pl, B_EC, tiles * d.K, 0);
    add(pl, B_SIN, (int64_t)d.HV * d.K * d.V * pl->nseg, 0);
    if (pl->nseg > 1)
        add(pl, B_SEG, (pl->is_bwd ? (int64_t)d.HV * d.K * d.V : hm) * pl->nseg, 0);
    if (pl->nseg > 1 && !pl->is_bwd)
        add(pl, B_PREFIX, hm * pl->nseg, 0);
    if (pl->N == 1)
        return;
    if (!pl->is_bwd || pl->opt.save == DPG_SAVE_ALL) {
        add(pl, B_HM, hm, 0);
        add(pl, B_HMALL, hm * pl->N, 0);
    }
    if (pl->needs_m && (pl->is_bwd ? !pl->opt.send_dh_only : pl->opt.chain_how == DPG_CHAIN_DENSE)) {
        int64_t batch = ((int64_t)256 << 20) / ((int64_t)d.HV * d.K * d.K * 4);
        pl->mc_batch = batch < 1 ? 1 : batch > d.NT ? d.NT : (int)batch;
        add(pl, B_MC, (int64_t)pl->mc_batch * d.HV * d.K * d.K, 0);
    }
}

static void layout_fast_bwd(dpg_plan *pl)
{
    const Dims &d = pl->d;
    int64_t C = DP_CHUNK, tiles = (int64_t)d.NT * d.HV;
    for (int slot : {B_DVL, B_DO, B_DX, B_E})
        add(pl, slot, tiles * C * d.V, 1, SLICES);
    add(pl, B_DH, tiles * d.K * d.V, 1, SLICES);
    add(pl, B_DP, tiles * C * C, 1);
    add(pl, B_DL, tiles * C * C, 1);
    add(pl, B_DBETA, tiles * C, 0);                      /* the diagonal of dP, in fp32 */
    add(pl, B_NORM, tiles * 2 * C, 0);
    add(pl, B_DQ, tiles * C * d.K, 0);
    add(pl, B_DKR, tiles * C * d.K, 0);
    add(pl, B_DG, (int64_t)d.HV * d.K, 0);               /* terms of dA_log by channel */
    if (d.Kg == 1)
        add(pl, B_DZ, tiles * C * (d.K / 64), 0);        /* dg summed over 64 channels */
}

static void layout_simple_bwd(dpg_plan *pl)
{
    const Dims &d = pl->d;
    int64_t C = DP_CHUNK, tiles = (int64_t)d.NT * d.HV;
    add(pl, B_DVL, tiles * d.n * d.V, 0);
    add(pl, B_DX, tiles * d.n * d.V, 0);
    add(pl, B_DH, tiles * d.K * d.V, 0);
    add(pl, B_DZ, tiles * d.n * d.V, 0);
    add(pl, B_E, tiles * d.n * d.V, 0);
    add(pl, B_DP, tiles * C * d.n, 0);
    add(pl, B_DL, tiles * d.n * d.n, 0);
    add(pl, B_DQ, tiles * C * d.K, 0);
    add(pl, B_DKR, tiles * d.n * d.K, 0);
    add(pl, B_DKW, tiles * d.n * d.K, 0);
    add(pl, B_DG, tiles * C * d.K, 0);
    add(pl, B_DBETA, tiles * d.n, 0);
}

/* Behind the forward's buffers, which the backward recomputes or, under DPG_SAVE_ALL, finds. */
static void layout_bwd(dpg_plan *pl)
{
    const Dims &d = pl->d;
    int64_t tiles = (int64_t)d.NT * d.HV, hk = (int64_t)d.HV * d.K;
    if (pl->opt.path == DPG_PATH_FAST)
        layout_fast_bwd(pl);
    else
        layout_simple_bwd(pl);
    add(pl, B_PART, tiles * 2 * d.Kg, 0);
    add(pl, B_GSUM, (int64_t)d.HV * (1 + d.Kg), 0);
    add(pl, B_DSOUT, hk * d.V * pl->nseg, 0);          /* of the rank, then of its parts from the last but one on */
    if (pl->N == 1)
        return;
    add(pl, B_GALL, (int64_t)d.HV * (1 + d.Kg) * pl->N, 0);
    add(pl, B_DHM, hk * dh_row(pl), 0);
    add(pl, B_DHMALL, hk * dh_row(pl) * pl->N, 0);
}

static dp_status upload(dpg_plan *pl, dp_err *e)
{
    size_t nc = pl->d.NT * sizeof(Chunk), ns = (pl->d.nseq - 1 + pl->nseg) * sizeof(Seq);
    CK(e, cudaGetDevice(&pl->device));
    CK(e, cudaMalloc(&pl->tables, nc + ns));
    CK(e, cudaMemcpy(pl->tables, pl->chunks_h, nc, cudaMemcpyHostToDevice));
    CK(e, cudaMemcpy((char *)pl->tables + nc, pl->seqs_h, ns, cudaMemcpyHostToDevice));
    pl->d.chunk = (const Chunk *)pl->tables;
    pl->d.seq = (const Seq *)((char *)pl->tables + nc);
    return DP_OK;
}

/* Its kernels, few and waited for by other ranks, go before those of the caller's stream. */
static dp_status side_stream(dpg_plan *pl, dp_err *e)
{
    int least, greatest;
    CK(e, cudaDeviceGetStreamPriorityRange(&least, &greatest));
    CK(e, cudaStreamCreateWithPriority(&pl->side, cudaStreamNonBlocking, greatest));
    CK(e, cudaEventCreateWithFlags(&pl->forked, cudaEventDisableTiming));
    CK(e, cudaEventCreateWithFlags(&pl->joined, cudaEventDisableTiming));
    return DP_OK;
}

static dp_status plan_new(dpg_plan **out, const dpg_problem *p, const dpg_options *opt, int rank, int N, int is_bwd, dp_err *e)
{
    dpg_plan *pl = (dpg_plan *)calloc(1, sizeof *pl);
    if (!pl)
        return dpg_fail(e, DP_ENOMEM, "%s:%d: plan", __FILE__, __LINE__);
    pl->opt = *opt;
    pl->rank = rank;
    pl->N = N;
    pl->is_bwd = is_bwd;
    pl->opt.path = is_bwd ? bwd_path_of(p, opt) : path_of(p, opt);
    if (pl->opt.path == DPG_PATH_SIMPLE)
        pl->opt.chain_how = DPG_CHAIN_DENSE;
    Dims &d = pl->d;
    d.H = p->H, d.HV = p->HV, d.G = p->HV / p->H, d.K = p->K, d.V = p->V, d.R = p->R, d.Kg = p->Kg, d.lr = p->R / 2;
    d.tok = pl->opt.path == DPG_PATH_FAST ? DP_CHUNK / p->R : DP_CHUNK, d.n = d.tok * p->R;
    d.scale = (float)p->scale, d.lower_bound = (float)p->lower_bound;
    d.gate = p->gate, d.beta_form = p->beta_form, d.l2norm = p->l2norm;
    d.in_bf16 = p->dtype == DPG_BF16, d.g_bf16 = p->gdtype == DPG_BF16, d.o_bf16 = p->odtype == DPG_BF16;
    d.d_bf16 = p->ddtype == DPG_BF16, d.dg_bf16 = p->dgdtype == DPG_BF16;
    d.rb = opt->base == DP_BASE_BF16;
    split(pl, p);
    pl->nseg = is_bwd && path_of(p, opt) != pl->opt.path ? 1 : segments(pl, &pl->opt);     /* the forward leaves the states of its own segments */
    cut(pl);
    layout(pl);
    if (is_bwd)
        layout_bwd(pl);
    pl->parts = 1;
    dp_status st = upload(pl, e);
    if (st == DP_OK && is_bwd && N > 1)
        st = side_stream(pl, e);
    if (st != DP_OK)
        dpg_plan_destroy(pl);
    else
        *out = pl;
    return st;
}

dp_status dpg_plan_create(dpg_plan **out, const dpg_problem *p, const dpg_options *opt, int rank, int N, dp_err *e)
{
    *out = NULL;
    TRY(check(p, opt, rank, N, e));
    TRY(plan_new(out, p, opt, rank, N, 0, e));
    if (!opt->backward)
        return DP_OK;
    dpg_plan *pl = *out;
    dp_status st = plan_new(&pl->bwd, p, opt, rank, N, 1, e);
    if (st != DP_OK) {
        dpg_plan_destroy(pl);
        *out = NULL;
        return st;
    }
    dpg_plan *b = pl->bwd;
    /* States that the forward hands over: S_in; those of all segments where the backward cuts like the forward. */
    b->saved_states = pl->saved_states = b->nseg > 1 && b->nseg == pl->nseg ? b->nseg : pl->is_first ? 0 : 1;
    b->saved_ms = pl->saved_ms = opt->send_dh_only && pl->post > 1 ? pl->post - 1 : 0;
    if (b->nseg > 1 && b->nseg == pl->nseg && b->d.nseq == 1 && !opt->whole_bwd) {
        b->parts = b->nseg;
        b->m_part = pl->whole;                           /* what the forward's merge multiplies by, the backward's does */
        b->saved_parts = pl->saved_parts = b->nseg - b->is_last - b->m_part;
    }
    return DP_OK;
}

void dpg_plan_destroy(dpg_plan *pl)
{
    if (!pl)
        return;
    dpg_plan_destroy(pl->bwd);
    cudaFree(pl->tables);
    if (!pl->marks.stop || !*pl->marks.stop) {           /* else kernels of other ranks may still store into it */
        cudaFree(pl->window_memory);
        cudaFree(pl->window.peer);
    }
    if (pl->side)
        cudaStreamDestroy(pl->side);
    for (cudaEvent_t x : {pl->forked, pl->joined})
        if (x)
            cudaEventDestroy(x);
    free(pl->chunks_h);
    free(pl->seqs_h);
    free(pl);
}

int64_t dpg_plan_tokens(const dpg_plan *pl) { return pl->d.L; }
dpg_path dpg_plan_path(const dpg_plan *pl) { return pl->opt.path; }
int dpg_plan_segments(const dpg_plan *pl) { return pl->nseg; }
dpg_path dpg_plan_bwd_path(const dpg_plan *pl) { return pl->bwd ? pl->bwd->opt.path : DPG_PATH_AUTO; }
size_t dpg_workspace_bytes(const dpg_plan *pl) { return pl->bwd && pl->bwd->ws_bytes > pl->ws_bytes ? pl->bwd->ws_bytes : pl->ws_bytes; }

size_t dpg_saved_bytes(const dpg_plan *pl)
{
    return 4 * (size_t)pl->d.HV * pl->d.K * (pl->saved_states * pl->d.V + (pl->saved_ms + pl->saved_parts) * pl->d.K);
}

size_t dpg_kept_bytes(const dpg_plan *pl)
{
    static const int kept[] = {B_GCUM, B_BETA, B_QN, B_KN, B_L, B_AKK, B_AQK, B_W, B_KG, B_QG, B_EC, B_H, B_VNEW};
    size_t sum = dpg_saved_bytes(pl);
    for (size_t i = 0; pl->bwd && pl->opt.save == DPG_SAVE_ALL && i < sizeof kept / sizeof *kept; i++)
        sum += pl->buf[kept[i]].bytes;
    return sum;
}

/* (M, H) of the last local sub-sequence as the uniform element of math.md g.3: (0, 0) if no later rank continues it, M = 0 where
 * the state that leaves the rank does not depend on the one that enters. With segments also (M, H) of each of them, as far as the
 * states that they start from need it. */
static dp_status pre_process(dpg_plan *pl, const dpg_tensors *t, void *ws, cudaStream_t s, dp_err *e)
{
    if (pl->N > 1 && !pl->needs_m && !pl->window.mine)   /* else every word of it that anybody reads is made */
        CK(e, cudaMemsetAsync(at<float>(pl, ws, B_HM), 0, pl->buf[B_HM].bytes, s));
    if (pl->is_last && pl->nseg == 1)
        return DP_OK;
    if (pl->opt.path == DPG_PATH_FAST)
        TRY(fast_pre(pl, t, ws, s, e));
    else
        TRY(simple_pre_h(pl, t, ws, s, e));
    return pl->needs_m && pl->opt.chain_how == DPG_CHAIN_DENSE ? chain_pre_m(pl, ws, s, e) : DP_OK;
}

/* What the backward cannot recompute without the other ranks: S_in, and the M of the ranks that its merge multiplies by (through windows they come later). */
static dp_status save(dpg_plan *pl, const dpg_tensors *t, void *ws, cudaStream_t s, dp_err *e)
{
    const Dims &d = pl->d;
    size_t states = 4 * (size_t)pl->saved_states * d.HV * d.K * d.V, row = 4 * (size_t)(d.V + d.K);
    if (!dpg_saved_bytes(pl))
        return DP_OK;
    if (!t->saved)
        return dpg_fail(e, DP_EINPUT, "dpg_forward: options.backward needs dpg_tensors.saved");
    CK(e, cudaMemcpyAsync(t->saved, at<float>(pl, ws, B_SIN), states, cudaMemcpyDeviceToDevice, s));
    if (pl->saved_ms && !pl->window.mine)
        CK(e, cudaMemcpy2DAsync((char *)t->saved + states, 4 * (size_t)d.K, at<float>(pl, ws, B_HMALL) + (size_t)(pl->rank + 1) * d.HV * d.K * (d.V + d.K) + d.V, row,
                                4 * (size_t)d.K, (size_t)pl->saved_ms * d.HV * d.K, cudaMemcpyDeviceToDevice, s));
    return DP_OK;
}

dp_status dpg_forward_steps(dpg_plan *pl, const dpg_tensors *t, void *ws, dpg_comm *comm, void *stream, int steps, dp_err *e)
{
    cudaStream_t s = (cudaStream_t)stream;
    int fast = pl->opt.path == DPG_PATH_FAST;
    if (pl->N > 1 && !comm)
        return dpg_fail(e, DP_EINPUT, "dpg_forward: %d ranks and no communicator", pl->N);
    if (steps & DPG_STEP_CHUNKS)
        TRY(fast ? fast_chunks(pl, t, ws, s, e) : simple_chunks(pl, t, ws, s, e));
    if (pl->N > 1 || pl->nseg > 1) {
        if (steps & DPG_STEP_PRE)
            TRY(pre_process(pl, t, ws, s, e));
        if (steps & (DPG_STEP_PRE | DPG_STEP_COMPOSE) && (pl->nseg > 1 || pl->window.mine))
            TRY(chain_compose(pl, ws, s, e));
        if (pl->window.mine && steps & DPG_STEP_GATHER)
            TRY(window_enter(pl, comm, e));
        else if (pl->N > 1 && steps & DPG_STEP_GATHER)
            TRY(comm->all_gather(comm, at<float>(pl, ws, B_HM), at<float>(pl, ws, B_HMALL), pl->buf[B_HM].bytes / 4, stream, e));
        if (steps & DPG_STEP_MERGE) {
            TRY(chain_merge(pl, ws, s, e));
            TRY(save(pl, t, ws, s, e));
        }
    }
    if (steps & DPG_STEP_STATE)
        TRY(fast ? fast_state(pl, t, ws, s, e) : simple_state(pl, t, ws, s, e));
    return pl->window.mine && steps & DPG_STEP_STATE ? window_keep(pl, t, s, e) : DP_OK;
}

dp_status dpg_forward(dpg_plan *pl, const dpg_tensors *t, void *ws, dpg_comm *comm, void *stream, dp_err *e)
{
    return dpg_forward_steps(pl, t, ws, comm, stream, DPG_STEP_ALL, e);
}

/* ---- backward -------------------------------------------------------------------------------------------------------------------- */

static dp_status restore(dpg_plan *b, const dpg_tensors *t, void *ws, cudaStream_t s, dp_err *e)
{
    size_t states = 4 * (size_t)b->saved_states * b->d.HV * b->d.K * b->d.V;
    if (dpg_saved_bytes(b) && !t->saved)
        return dpg_fail(e, DP_EINPUT, "dpg_backward: no dpg_tensors.saved");
    if (states)
        CK(e, cudaMemcpyAsync(at<float>(b, ws, B_SIN), t->saved, states, cudaMemcpyDeviceToDevice, s));
    return DP_OK;
}

/* (dM, dH) of the first local sub-sequence, the uniform element of math.md g.3: zeros if no earlier rank asks for it, dM = 0 where the gradient that
 * leaves the rank does not depend on the one that enters. With parts also dH of each of them, as far as the gradients that they start from need it. */
static dp_status pre_process_bwd(dpg_plan *b, const BwdOps *ops, const dpg_tensors *t, const dpg_grads *g, void *ws, cudaStream_t s, dp_err *e)
{
    float *dhm = at<float>(b, ws, B_DHM);
    if (b->N > 1)
        CK(e, cudaMemsetAsync(dhm, 0, b->buf[B_DHM].bytes, s));
    if (b->is_first && b->parts == 1)
        return DP_OK;
    TRY(ops->pre(b, t, g, ws, s, e));
    if (b->parts > 1 && !b->is_first)
        TRY(chain_compose_bwd(b, t, ws, s, e));
    return b->needs_m && !b->opt.send_dh_only ? chain_pre_dm(b, dhm + b->d.V, dh_row(b), ws, s, e) : DP_OK;
}

/* The side stream goes on behind what the caller's has by now; the caller's behind what the side stream has by now. One rank has the caller's alone. */
static dp_status fork(dpg_plan *b, cudaStream_t s, dp_err *e)
{
    if (b->N == 1)
        return DP_OK;
    CK(e, cudaEventRecord(b->forked, s));
    CK(e, cudaStreamWaitEvent(b->side, b->forked, 0));
    return DP_OK;
}
static dp_status join(dpg_plan *b, cudaStream_t s, dp_err *e)
{
    if (b->N == 1)
        return DP_OK;
    CK(e, cudaEventRecord(b->joined, b->side));
    CK(e, cudaStreamWaitEvent(s, b->joined, 0));
    return DP_OK;
}

/* dq and dk beside the sums over ranks. */
static dp_status finish(dpg_plan *b, const BwdOps *ops, const dpg_tensors *t, const dpg_grads *g, void *ws, dpg_comm *comm, cudaStream_t s, dp_err *e)
{
    cudaStream_t side = b->N > 1 ? b->side : s;
    TRY(ops->sums(b, t, g, ws, s, e));
    TRY(fork(b, s, e));
    TRY(ops->norm(b, t, g, ws, s, e));
    if (!g->dA_log && !g->ddt_bias)
        return DP_OK;
    if (b->N > 1)
        TRY(comm->all_gather(comm, at<float>(b, ws, B_GSUM), at<float>(b, ws, B_GALL), b->buf[B_GSUM].bytes / 4, side, e));
    TRY(bwd_reduce(b, g, ws, side, e));
    return join(b, s, e);
}

dp_status dpg_backward_steps(dpg_plan *pl, const dpg_tensors *t, const dpg_grads *g, void *ws, dpg_comm *comm, void *stream, int steps, dp_err *e)
{
    cudaStream_t s = (cudaStream_t)stream;
    dpg_plan *b = pl->bwd;
    if (!b)
        return dpg_fail(e, DP_EINPUT, "dpg_backward: the plan was made without options.backward");
    if (b->N > 1 && !comm)
        return dpg_fail(e, DP_EINPUT, "dpg_backward: %d ranks and no communicator", b->N);
    const BwdOps *ops = bwd_ops(b->opt.path);
    int recompute = steps & DPG_BWD_RECOMPUTE && b->opt.save == DPG_SAVE_STATE;
    cudaStream_t side = b->N > 1 ? b->side : s;
    if (recompute) {
        TRY(restore(b, t, ws, s, e));
        TRY(ops->chunks(b, t, g, ws, s, e));
    }
    if (steps & DPG_BWD_DAV)
        TRY(ops->dAv(b, t, g, ws, s, e));
    if (steps & DPG_BWD_PRE && (b->N > 1 || b->parts > 1))
        TRY(pre_process_bwd(b, ops, t, g, ws, s, e));
    TRY(fork(b, s, e));
    if (recompute)                                       /* enqueued before a gather, at which host threads meet */
        TRY(ops->states(b, t, g, ws, s, e));
    if (steps & DPG_BWD_GATHER && b->N > 1)
        TRY(comm->all_gather(comm, at<float>(b, ws, B_DHM), at<float>(b, ws, B_DHMALL), b->buf[B_DHM].bytes / 4, side, e));
    if (steps & DPG_BWD_MERGE && (!b->is_last || b->parts > 1))
        TRY(chain_merge_bwd(b, t, ws, side, e));
    TRY(join(b, s, e));
    if (steps & DPG_BWD_STATE)
        TRY(ops->state(b, t, g, ws, s, e));
    if (steps & DPG_BWD_INTRA)
        TRY(ops->intra(b, t, g, ws, s, e));
    return steps & DPG_BWD_GATE ? finish(b, ops, t, g, ws, comm, s, e) : DP_OK;
}

dp_status dpg_backward(dpg_plan *pl, const dpg_tensors *t, const dpg_grads *g, void *ws, dpg_comm *comm, void *stream, dp_err *e)
{
    return dpg_backward_steps(pl, t, g, ws, comm, stream, DPG_BWD_ALL, e);
}

/* ---- staged outputs ------------------------------------------------------------------------------------------------------------ */

/* Per tile: `tok` rows of `width` words for each token (tok = R or 1). kind 0: tile buffers in token order; 1: per chunk; 2: HM; 3: S_in; 4: o */
struct Stage { const char *name; int slot, kind; };
static const Stage stages[] = {
    {"gcum", B_GCUM, 0}, {"Akk", B_AKK, 0}, {"Aqk", B_AQK, 0}, {"w", B_W, 0}, {"u", B_U, 0}, {"kg", B_KG, 0}, {"qg", B_QG, 0},
    {"M", B_HM, 2}, {"H", B_HM, 2}, {"S_in", B_SIN, 3}, {"h", B_H, 1}, {"v_new", B_VNEW, 0}, {"o", -1, 4},
    {"dvl", B_DVL, 0}, {"dX", B_DX, 0}, {"dh", B_DH, 1}, {"dM", B_DHM, 2}, {"dH", B_DHM, 2}, {"dS_out", B_DSOUT, 3}};
const char *const dpg_stage_names[] = {"gcum", "Akk", "Aqk", "w", "u", "kg", "qg", "M", "H", "S_in", "h", "v_new", "o", "dvl", "dX", "dh", "dM", "dH", "dS_out", NULL};

static int is_m(const char *name) { return name[strlen(name) - 1] == 'M'; }
static const dpg_plan *owner(const dpg_plan *pl, const Stage *st) { return st->slot >= B_DVL ? pl->bwd : pl; }

static dp_status find(const dpg_plan *pl, const char *name, const Stage **out, dp_err *e)
{
    for (size_t i = 0; i < sizeof stages / sizeof *stages; i++) {
        if (strcmp(stages[i].name, name))
            continue;
        int absent_hm = stages[i].kind == 2 && pl->N == 1;
        const dpg_plan *o = owner(pl, &stages[i]);
        if (!o || (!strcmp(name, "dM") && o->opt.send_dh_only))
            return dpg_fail(e, DP_EINPUT, "stage %s: the plan makes none", name);
        if (o->d.tok != DP_CHUNK && stages[i].slot >= 0 && stages[i].kind < 2)
            return dpg_fail(e, DP_EINPUT, "stage %s: chunks hold %d tokens on this path, not %d", name, o->d.tok, DP_CHUNK);
        if (stages[i].slot >= 0 && !o->buf[stages[i].slot].bytes && !absent_hm)
            return dpg_fail(e, DP_EINPUT, "stage %s is not kept on this path (options.keep)", name);
        *out = &stages[i];
        return DP_OK;
    }
    return dpg_fail(e, DP_EINPUT, "no stage named %s", name);
}

static void widths(const dpg_plan *pl, const Stage *st, int *rows, int *width)
{
    const Dims &d = pl->d;
    int s = st->slot, keyed = s == B_AKK || s == B_W || s == B_U || s == B_KG || s == B_VNEW || s == B_DVL || s == B_DX;
    *rows = keyed ? d.R : 1;
    *width = s == B_GCUM ? d.Kg : s == B_AKK || s == B_AQK ? d.n : s == B_U || s == B_VNEW || s == B_DVL || s == B_DX || s < 0 ? d.V : d.K;
}

dp_status dpg_stage_shape(const dpg_plan *pl, const char *name, int64_t dims[5], int *ndim, dp_err *e)
{
    const Stage *st = NULL;
    const Dims &d = pl->d;
    TRY(find(pl, name, &st, e));
    int rows, width;
    widths(pl, st, &rows, &width);
    int64_t last = is_m(name) ? d.K : d.V;
    if (st->kind == 1) {
        int64_t x[4] = {d.NT, d.HV, d.K, d.V};
        memcpy(dims, x, sizeof x);
        *ndim = 4;
    } else if (st->kind == 2 || st->kind == 3) {
        int64_t x[3] = {d.HV, d.K, last};
        memcpy(dims, x, sizeof x);
        *ndim = 3;
    } else {
        int64_t x[4] = {d.L, d.HV, rows, width};
        *ndim = rows > 1 ? 4 : 3;
        if (rows == 1)
            x[2] = width;
        memcpy(dims, x, *ndim * sizeof *x);
    }
    return DP_OK;
}

static double word(const void *x, int is_bf16, int64_t i)
{
    if (!is_bf16)
        return ((const float *)x)[i];
    uint32_t b = (uint32_t)((const uint16_t *)x)[i] << 16;
    float f;
    memcpy(&f, &b, 4);
    return f;
}

/* Tile rows (chunk, hv, token, row) to token order. The fast path keeps gcum in log2 units. */
static void untile(const dpg_plan *pl, const Stage *st, const void *raw, double *host)
{
    const Dims &d = pl->d;
    int rows, width, b = pl->buf[st->slot].is_bf16, layout = pl->buf[st->slot].layout;
    widths(pl, st, &rows, &width);
    double unit = st->slot == B_GCUM && pl->opt.path == DPG_PATH_FAST ? 0.69314718055994530942 : 1;
    for (int c = 0; c < d.NT; c++)
        for (int hv = 0; hv < d.HV; hv++)
            for (int s = 0; s < pl->chunks_h[c].len; s++) {
                int64_t from = ((int64_t)c * d.HV + hv) * DP_CHUNK * rows * width;
                int64_t to = ((pl->chunks_h[c].t0 + s) * d.HV + hv) * rows * width;
                for (int i = 0; i < rows * width; i++)
                    host[to + i] = unit * word(raw, b, from + tile_at(layout, s, i, rows * width));
            }
}

dp_status dpg_stage_read(const dpg_plan *pl, const dpg_tensors *t, const void *ws, const char *name, double *host, dp_err *e)
{
    const Stage *st = NULL;
    TRY(find(pl, name, &st, e));
    pl = owner(pl, st);
    const Dims &d = pl->d;
    int64_t hkv = (int64_t)d.HV * d.K * d.V, no = d.L * d.HV * d.V;
    int none = pl->N == 1 || (st->slot == B_HM && (is_m(name) ? !pl->needs_m : pl->is_last));      /* nobody asks for it */
    if ((st->kind == 2 || st->kind == 3) && none) {
        memset(host, 0, sizeof *host * d.HV * d.K * (is_m(name) ? d.K : d.V));
        return DP_OK;
    }
    const void *src = st->kind == 4 ? t->o : (const char *)ws + pl->buf[st->slot].off;
    int is_bf16 = st->kind == 4 ? d.o_bf16 : pl->buf[st->slot].is_bf16;
    size_t bytes = st->kind == 4 ? (size_t)no * (is_bf16 ? 2 : 4) : pl->buf[st->slot].bytes;
    void *raw = malloc(bytes);
    if (!raw)
        return dpg_fail(e, DP_ENOMEM, "%s:%d: %zu bytes for stage %s", __FILE__, __LINE__, bytes, name);
    cudaError_t err = cudaMemcpy(raw, src, bytes, cudaMemcpyDeviceToHost);
    if (err == cudaSuccess) {
        int row = st->slot == B_DHM ? dh_row(pl) : d.V + d.K, from = is_m(name) ? d.V : 0, to = is_m(name) ? d.V + d.K : d.V;
        if (st->kind == 0)
            untile(pl, st, raw, host);
        else if (st->kind == 2)
            for (int64_t r = 0; r < (int64_t)d.HV * d.K; r++)
                for (int i = from; i < to; i++)
                    host[r * (to - from) + i - from] = word(raw, 0, r * row + i);
        else {
            int64_t n = st->kind == 4 ? no : st->kind == 3 ? hkv : hkv * d.NT;
            int64_t kv = (int64_t)d.K * d.V;
            int sliced = st->kind == 1 && pl->buf[st->slot].layout == SLICES;
            for (int64_t i = 0; i < n; i++)
                host[i] = word(raw, is_bf16, sliced ? i / kv * kv + slice_at(d.K, (int)(i % kv / d.V), (int)(i % d.V)) : i);
        }
    }
    free(raw);
    return err == cudaSuccess ? DP_OK : dpg_fail(e, DP_EDEVICE, "%s:%d: copy of stage %s: %s", __FILE__, __LINE__, name, cudaGetErrorString(err));
}
