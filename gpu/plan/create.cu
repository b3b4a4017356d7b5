/* gpu/plan/create.cu - plans: what a problem and its options must be, which path takes it and why,
 * and what the plan owns. */
#include "plan/heads.cuh"
#include "plan/paths.cuh"
#include "plan/sending.cuh"
#include "plan/tensors.cuh"
#include "plan/wide.cuh"
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>

dp_status dpg_fail(dp_err *e, dp_status code, const char *fmt, ...) {
    if (e && e->code == DP_OK) {
        va_list ap;
        va_start(ap, fmt);
        vsnprintf(e->msg, sizeof e->msg, fmt, ap);
        va_end(ap);
        e->code = code;
    }
    return code;
}

/* ---- paths ----------------------------------------------------------------------------------- */

/* The path of the backward or the forward, and in `why` what chose it. DPG_SAVE_ALL takes one path
 * for both. */
static dpg_path choose_path(const dpg_problem *p, const dpg_options *o, const Device *dev,
                            int is_bwd, char why[160]) {
    int both = o->path == DPG_PATH_AUTO && o->backward && o->save == DPG_SAVE_ALL;
    dpg_path asked = is_bwd || both ? o->bwd_path : o->path;
    const char *no = fast_refuses(p, o, dev, is_bwd || both);
    if (asked != DPG_PATH_AUTO)
        snprintf(why, 160, "asked for");
    else
        snprintf(why, 160, "%s", no ? no : "takes this problem on this device");
    dpg_path slow = token_alone(p) ? DPG_PATH_TOKEN : DPG_PATH_SIMPLE;
    return asked != DPG_PATH_AUTO ? asked : no ? slow : DPG_PATH_FAST;
}

#define NEED(cond, ...)                                                       \
    do {                                                                      \
        if (!(cond)) return dpg_fail(e, DP_EINPUT, "dpg_plan: " __VA_ARGS__); \
    } while (0)

dp_status check_owners(const dpg_owners *o, int64_t T, int N, dp_err *e) {
    if (!o->parts) {
        NEED(T >= N && T % N == 0, "T = %lld is not a multiple of %d ranks", (long long)T, N);
        return DP_OK;
    }
    NEED(o->parts > 0 && o->cut && o->owner && o->cut[0] == 0 && o->cut[o->parts] == T,
         "%d parts that do not run from 0 to T", o->parts);
    for (int i = 0; i < o->parts; i++) {
        NEED(o->cut[i] < o->cut[i + 1], "part %d of %d has no token", i, o->parts);
        NEED(o->owner[i] >= 0 && o->owner[i] < N, "part %d belongs to rank %d of %d", i,
             o->owner[i], N);
    }
    return DP_OK;
}

static dp_status check_rows(const dpg_problem *p, dp_err *e) {
    const dp_recurrence *r = p->rows;
    if (!r) return DP_OK;
    NEED(r->n >= 1 && r->n <= DP_MAX_ROWS, "%d rows of a token are not 1 to %d", r->n, DP_MAX_ROWS);
    NEED(p->R == 1 && p->H == p->HV, "rows of one's own: R = %d and H = %d are not 1 and HV = %d",
         p->R, p->H, p->HV);
    NEED(!r->rotated || (p->pairs >= 1 && 2 * p->pairs <= p->K), "%d pairs are not 1 to K / 2",
         p->pairs);
    return DP_OK;
}

static dp_status check_problem(const dpg_problem *p, int rank, int N, dp_err *e) {
    NEED(p->rows || (p->model >= 0 && p->model < DP_NMODELS), "recurrence %d", p->model);
    TRY(check_rows(p, e));
    int alone = token_alone(p), v = alone ? 8 : 16;
    NEED(N >= 1 && rank >= 0 && rank < N, "rank %d of %d", rank, N);
    TRY(check_owners(&p->own, p->T, N, e));
    NEED(p->K >= 16 && p->K <= 256 && p->K % 16 == 0, "K = %d is not a multiple of 16 up to 256",
         p->K);
    NEED(p->V >= v && p->V <= 256 && p->V % v == 0, "V = %d is not a multiple of %d up to 256",
         p->V, v);
    NEED(alone || p->R == 1 || p->R == 2 || p->R == 4, "R = %d is not 1, 2 or 4", p->R);
    NEED(p->R >= 1 && p->R <= 8, "R = %d is not 1 to 8", p->R);
    NEED(p->H >= 1 && p->HV >= p->H && p->HV % p->H == 0, "HV = %d is not a multiple of H = %d",
         p->HV, p->H);
    NEED(p->Kg == 1 || p->Kg == p->K, "Kg = %d is neither 1 nor K", p->Kg);
    NEED(!dp_gate_has_inside(p->gate) || p->lower_bound < 0, "lower_bound = %g is not negative",
         p->lower_bound);
    NEED(p->Nseq >= 1 && p->cu && p->cu[0] == 0 && p->cu[p->Nseq] == p->T,
         "cu does not run from 0 to T");
    for (int i = 0; i < p->Nseq; i++)
        NEED(p->cu[i] <= p->cu[i + 1], "cu[%d] > cu[%d]", i, i + 1);
    for (dpg_dtype type : {p->dtype, p->gdtype, p->odtype, p->ddtype, p->dgdtype})
        NEED(type != DPG_F16, "fp16 is a type of parameters alone");
    return DP_OK;
}

static dp_status check_options(const dpg_problem *p, const dpg_options *o, const Device *dev, int N,
                               dp_err *e) {
    char why[160];
    const char *no = fast_refuses(p, o, dev, 0);
    NEED(o->base == DP_BASE_FP32 || o->base == DP_BASE_BF16,
         "base policy is neither fp32 nor bf16");
    NEED(o->chain == DP_FP32 || o->chain == DP_TF32X3 || o->chain == DP_TF32 ||
             o->chain == DP_TF32RZ || o->chain == DP_BF16,
         "no such chain format on the device");
    NEED(o->path != DPG_PATH_FAST || !no, "the fast path does not take this problem: %s", no);
    NEED((o->path != DPG_PATH_SIMPLE && o->bwd_path != DPG_PATH_SIMPLE) || !token_alone(p),
         "the simple path has no such recurrence");
    NEED(o->segment_chunks >= 0, "segments of %d chunks", o->segment_chunks);
    NEED(o->chain == DP_FP32 || rounds_as_pass(o) ||
             choose_path(p, o, dev, 0, why) != DPG_PATH_TOKEN,
         "the token path forms M in fp32");
    NEED(o->exchange >= 0 && o->exchange < DP_NRUN_EXCHANGES, "exchange %d", o->exchange);
    no = exchanges_heads(o, N) ? heads_refuse(p, o, N) : NULL;
    NEED(!no, "exchange %s: %s", dp_exchange_names[o->exchange], no);
    NEED(o->payload >= 0 && o->payload < DP_NPAYLOADS, "payload %d", o->payload);
    dp_payload sent = sent_as(o, sends(p, N));
    no = payloads[sent].refuses;
    NEED(!no, "payload %s: %s", dp_payload_names[o->payload], no);
    int hops = exchanges[o->exchange].hops;
    NEED(!exchanges[o->exchange].passes || o->chain_how == DPG_CHAIN_DENSE,
         "exchange %s: a pass is not cut in segments", dp_exchange_names[o->exchange]);
    NEED(!o->send_dh_only || !(hops || exchanges[o->exchange].heads),
         "exchange %s: sends no pair of which M could stay behind", dp_exchange_names[o->exchange]);
    if (!o->backward) return DP_OK;
    dpg_path bwd = choose_path(p, o, dev, 1, why);
    no = fast_refuses(p, o, dev, 1);
    NEED(o->bwd_path != DPG_PATH_FAST || !no, "the fast backward does not take this problem: %s",
         no);
    NEED(o->save == DPG_SAVE_STATE || choose_path(p, o, dev, 0, why) == bwd,
         "save all needs forward and backward on the same path");
    NEED(!o->pair_dg || bwd == DPG_PATH_SIMPLE, "pair_dg needs the simple backward");
    return DP_OK;
}

/* ---- what a plan owns ------------------------------------------------------------------------ */

/* Its kernels, few and waited for by other ranks, go before those of the caller's stream. */
static dp_status side_stream(dpg_plan *pl, dp_err *e) {
    int least, greatest;
    CK(e, cudaDeviceGetStreamPriorityRange(&least, &greatest));
    CK(e, cudaStreamCreateWithPriority(&pl->side, cudaStreamNonBlocking, greatest));
    CK(e, cudaEventCreateWithFlags(&pl->forked, cudaEventDisableTiming));
    CK(e, cudaEventCreateWithFlags(&pl->joined, cudaEventDisableTiming));
    return DP_OK;
}

/* A plan to be: the arguments of dpg_plan_create and what the device is. */
struct Wanted {
    const dpg_problem *p;
    const dpg_options *opt;
    int rank, N;
    int all_heads;      /* value heads of all ranks that exchange heads */
    int qk_are_partial; /* dq and dk are parts of sums over ranks: in fp32, whatever dv is */
    Device device;
};

static Dims dims_of(const Wanted &w, dpg_path path) {
    const dpg_problem *p = w.p;
    const dpg_options *o = w.opt;
    Dims d = {};
    d.H = p->H;
    d.HV = p->HV;
    d.G = p->HV / p->H;
    d.K = p->K;
    d.V = p->V;
    d.R = p->R;
    d.Kg = p->Kg;
    d.lr = p->R / 2;
    d.tok = path == DPG_PATH_FAST    ? DP_CHUNK / p->R
            : path == DPG_PATH_TOKEN ? TOKEN_PATH_CHUNK
                                     : DP_CHUNK;
    d.n = d.tok * (path == DPG_PATH_TOKEN ? token_rows(p) : p->R);
    d.scale = (float)p->scale;
    d.lower_bound = (float)p->lower_bound;
    d.gate = p->gate;
    d.beta_form = p->beta_form;
    d.l2norm = p->l2norm;
    d.in_bf16 = p->dtype == DPG_BF16;
    d.g_bf16 = p->gdtype == DPG_BF16;
    d.o_bf16 = p->odtype == DPG_BF16;
    d.d_bf16 = p->ddtype == DPG_BF16;
    d.qk_bf16 = d.d_bf16 && !w.qk_are_partial;
    d.dg_bf16 = p->dgdtype == DPG_BF16;
    d.A_type = p->A_dtype;
    d.bias_type = p->bias_dtype;
    d.dA_type = p->dA_dtype;
    d.dbias_type = p->dbias_dtype;
    d.rb = o->base == DP_BASE_BF16;
    return d;
}

static void set_rows(dpg_plan *pl, const dpg_problem *p) {
    pl->rows = *rows_of(p);
    pl->pairs = pl->rows.rotated ? p->pairs : 0;
    if (!p->rows) pl->rows.normed = BY_QUERY;
    if (!p->l2norm) pl->rows.normed = 0;
    if (!(pl->rows.eps > 0)) pl->rows.eps = DP_L2_EPS;
    for (int i = 0; i < pl->rows.n; i++)
        pl->d.erases |= pl->rows.row[i].read.sign != 0;
    pl->halo = pl->N > 1 || p->own.parts > 1 ? token_halo(pl) : 0;
}

/* Does the rank send what its pass ends with: the first one of a sequence, where the caller wants
 * no segments. No token is read twice, and later ranks wait for the pass. */
static int leads(const dpg_plan *pl) {
    const int first = pl->is_first && !pl->is_last && !pl->owned && !pl->is_bwd;
    return first && pl->N > 1 && pl->opt.segments == 1 &&
           pl->opt.chain_how == DPG_CHAIN_AUGMENTED && !hands_on(&pl->opt, pl->sends);
}

static dp_status plan_new(dpg_plan **out, const Wanted &w, int is_bwd, dp_err *e) {
    char why[160];
    dpg_plan *pl = (dpg_plan *)calloc(1, sizeof *pl);
    if (!pl) return dpg_fail(e, DP_ENOMEM, "%s:%d: plan", __FILE__, __LINE__);
    pl->opt = *w.opt;
    pl->sends = sends(w.p, w.N);
    pl->opt.payload = sent_as(w.opt, pl->sends);
    pl->device = w.device;
    pl->rank = w.rank;
    pl->N = w.N;
    pl->all_heads = w.all_heads;
    pl->is_bwd = is_bwd;
    pl->opt.path = choose_path(w.p, w.opt, &w.device, is_bwd, pl->why);
    pl->path = pl->opt.path == DPG_PATH_FAST    ? &fast_path
               : pl->opt.path == DPG_PATH_TOKEN ? &token_path
                                                : &simple_path;
    if (pl->opt.path != DPG_PATH_FAST || !fast_augments(&w.device)) {
        if (rounds_as_pass(&pl->opt)) pl->opt.chain = DP_FP32; /* no factor is rounded once more */
        pl->opt.chain_how = DPG_CHAIN_DENSE;
    }
    pl->d = dims_of(w, pl->opt.path);
    set_rows(pl, w.p);
    pl->by_part = w.p->own.by_part;
    dp_status st = split_tokens(pl, w.p, e);
    if (st != DP_OK) {
        dpg_plan_destroy(pl);
        return st;
    }
    if (passes_on(&pl->opt, pl->sends)) pl->needs_m = 0;
    /* the forward leaves the states of its own segments */
    int other_path = is_bwd && choose_path(w.p, w.opt, &w.device, 0, why) != pl->opt.path;
    cut_segments(pl, other_path);
    pl->bare = fast_is_bare(pl);
    pl->single = fast_is_single(pl);
    pl->reads_do = fast_reads_do(pl);
    pl->parts = 1;
    pl->leads = leads(pl);
    list_rows(pl);
    layout_workspace(pl);
    st = upload_tables(pl, w.p, e);
    if (st == DP_OK && ((is_bwd && w.N > 1) || pl->spans)) st = side_stream(pl, e);
    if (st != DP_OK)
        dpg_plan_destroy(pl);
    else
        *out = pl;
    return st;
}

/* Buffers from the forward: S_in, or the states of all segments where the backward cuts like it;
 * the M of later ranks. Also the M of its segments, which the backward's merge multiplies by. */
static void share(dpg_plan *pl, dpg_plan *b) {
    int alike = b->nseg > 1 && b->nseg == pl->nseg;
    pl->saved_states = pl->owned ? pl->nlink : alike ? b->nseg : !pl->is_first;
    pl->saved_ms = pl->owned ? pl->slots * pl->N : pl->post > 1 ? pl->post - 1 : 0;
    if (!pl->opt.send_dh_only) pl->saved_ms = 0;
    if (alike && (b->d.nseq == 1 || pl->N == 1) && !pl->opt.whole_bwd) {
        b->parts = b->nseg;
        b->m_part = pl->whole;
        pl->saved_parts = b->nseg - b->is_last - b->m_part;
    }
    b->saved_states = pl->saved_states;
    b->saved_ms = pl->saved_ms;
    b->saved_parts = pl->saved_parts;
}

/* Do forward or backward take the fast path, whose kernels have fewer columns than V. */
static int is_wide(const Wanted &w) {
    char why[160];
    const dpg_problem *p = w.p;
    const int part = fast_columns_of(p->V);
    if (!part || part == p->V) return 0;
    return choose_path(p, w.opt, &w.device, 0, why) == DPG_PATH_FAST ||
           (w.opt->backward && choose_path(p, w.opt, &w.device, 1, why) == DPG_PATH_FAST);
}

static dp_status create(dpg_plan **out, Wanted w, dp_err *e);
static dp_status create_wide(dpg_plan **out, Wanted w, dp_err *e) {
    const dpg_problem *wide = w.p, narrow = narrower(wide);
    w.p = &narrow;
    w.all_heads *= wide->V / narrow.V;
    dpg_plan *one = NULL;
    TRY(create(&one, w, e));
    return wide_create(out, one, wide, e);
}

static dp_status create(dpg_plan **out, Wanted w, dp_err *e) {
    *out = NULL;
    TRY(ask_device(&w.device, e));
    TRY(check_problem(w.p, w.rank, w.N, e));
    TRY(check_options(w.p, w.opt, &w.device, w.N, e));
    if (exchanges_heads(w.opt, w.N)) return heads_create(out, w.p, w.opt, w.rank, w.N, e);
    OneRank alone(w.p); /* whose heads nobody else has: the bits of those that exchange them */
    if (exchanges[w.opt->exchange].heads) w.p = &alone.p;
    if (is_wide(w)) return create_wide(out, w, e);
    TRY(plan_new(out, w, 0, e));
    if (!w.opt->backward) return DP_OK;
    dpg_plan *pl = *out;
    dp_status st = plan_new(&pl->bwd, w, 1, e);
    if (st != DP_OK) {
        dpg_plan_destroy(pl);
        *out = NULL;
        return st;
    }
    share(pl, pl->bwd);
    return DP_OK;
}

dp_status dpg_plan_create(dpg_plan **out, const dpg_problem *p, const dpg_options *opt, int rank,
                          int N, dp_err *e) {
    return create(out, {p, opt, rank, N, p->HV, 0}, e);
}

dp_status create_alone(dpg_plan **out, const dpg_problem *p, const dpg_options *opt, int all_heads,
                       int qk_are_partial, dp_err *e) {
    return create(out, {p, opt, 0, 1, all_heads, qk_are_partial}, e);
}

void dpg_plan_destroy(dpg_plan *pl) {
    if (!pl) return;
    dpg_plan_destroy(pl->bwd);
    heads_destroy(pl->heads);
    wide_destroy(pl->wide);
    maps_destroy(pl->maps);
    cudaFree(pl->tables);
    window_destroy(pl);
    if (pl->side) cudaStreamDestroy(pl->side);
    for (cudaEvent_t x : {pl->forked, pl->joined})
        if (x) cudaEventDestroy(x);
    free(pl->chunks_h);
    free(pl->seqs_h);
    free(pl->cuts_h);
    free(pl->links_h);
    free(pl->hops_h);
    free(pl->pairs_h);
    free(pl);
}

/* The plan whose kernels run. */
static const dpg_plan *worker(const dpg_plan *pl) {
    return pl->heads ? worker(pl->heads->one) : pl->wide ? pl->wide->one : pl;
}

dpg_path dpg_plan_path(const dpg_plan *pl) { return worker(pl)->opt.path; }
const char *dpg_plan_why(const dpg_plan *pl) { return worker(pl)->why; }
int dpg_plan_segments(const dpg_plan *pl) { return worker(pl)->nseg; }
int dpg_plan_chunk(const dpg_plan *pl) {
    const dpg_plan *one = worker(pl);
    return one->single ? DP_CHUNK / 2 : DP_CHUNK / one->d.R;
}
int dpg_plan_pair_rows(const dpg_plan *pl) {
    const dpg_plan *one = worker(pl);
    return one->opt.path == DPG_PATH_FAST && (one->N > 1 || one->owned) && pre_is_rounded(one);
}
dpg_path dpg_plan_bwd_path(const dpg_plan *pl) {
    const dpg_plan *b = worker(pl)->bwd;
    return b ? b->opt.path : DPG_PATH_AUTO;
}
size_t dpg_workspace_bytes(const dpg_plan *pl) {
    if (pl->heads) return pl->heads->bytes;
    if (pl->wide) return pl->wide->bytes;
    return pl->bwd && pl->bwd->ws_bytes > pl->ws_bytes ? pl->bwd->ws_bytes : pl->ws_bytes;
}

size_t dpg_saved_bytes(const dpg_plan *pl) {
    pl = worker(pl);
    return 4 * (size_t)pl->d.HV * pl->d.K *
           (pl->saved_states * pl->d.V + (pl->saved_ms + pl->saved_parts) * pl->d.K);
}

size_t dpg_kept_bytes(const dpg_plan *pl) {
    static const int kept[] = {B_BETA,    B_QN,   B_KN,    B_L,     B_AKK,   B_AQK,    B_W,
                               B_KG,      B_QG,   B_EC,    B_ODD,   B_H,     B_VNEW,   B_TB,
                               B_FACTORS, B_KGAM, B_DECAY, B_ERASE, B_VALUE, B_COS_SIN};
    if (pl->heads) return heads_kept_bytes(pl->heads);
    if (pl->wide) return dpg_kept_bytes(pl->wide->one);
    size_t sum = dpg_saved_bytes(pl);
    if (!saves_all(pl)) return sum;
    for (int slot : kept)
        sum += pl->buf[slot].bytes;
    return sum + (pl->opt.path == DPG_PATH_SIMPLE ? pl->buf[B_GCUM].bytes : 0);
}
