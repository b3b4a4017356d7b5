/* gpu/fast/path.cu - the fast path: tensor cores, bf16 storage; what it takes, and its steps. */
#include "fast/fast.cuh"
#include "plan/paths.cuh"
#include "plan/wide.cuh"
#include "ref/vocabulary/segments.h"
#include <algorithm>
#include <math.h>

static int takes_width(int n) { return n == 64 || n == 128; }

const char *fast_refuses(const dpg_problem *p, const dpg_options *o, const Device *dev,
                         int backward) {
    const int forward = !backward && !o->backward && !o->keep;
    if (token_alone(p) && !(forward && token_adds(p))) return "has no such recurrence";
    if (p->gate > DP_GATE_LOWER_BOUND) return "has no such gate";
    if (dev->major < 8) return "needs compute capability 8.0, for bf16 tensor cores";
    if (o->base != DP_BASE_BF16) return "takes base bf16";
    const int V = fast_columns_of(p->V);
    if (!takes_width(p->K) || !V) return "takes K of 64 and 128, V a multiple of 64";
    if (!backward) return NULL;
    if (o->pair_dg) return "its backward has no pair sums of dg";
    size_t bytes = p->Kg == 1 ? fast_grad_one_bytes(p->K, V) : fast_grad_bytes(p->K, V);
    if (bytes > dev->shared) return "its backward needs more shared memory than a block has here";
    return NULL;
}

static int takes_rows(const dpg_plan *pl) {
    const Dims &d = pl->d;
    int takes = d.R == 1 && d.in_bf16 && (d.erases || d.Kg == 1);
    return pl->opt.path == DPG_PATH_FAST && takes && !pl->opt.keep && fast_augments(&pl->device) &&
           !pl->owned && !pl->by_part &&
           (pl->N == 1 || pl->opt.chain_how == DPG_CHAIN_AUGMENTED); /* factors need w */
}
int fast_may_be_bare(const dpg_plan *pl) { return takes_rows(pl) && !saves_all(pl); }

/* Passes that keep states (state_kept.cu) go by warpgroups. pre.cu reads T B, so a forward that
 * saves all is of whole sequences of one rank. Factors of dM need w. */
static int keeps_bare(const dpg_plan *pl) {
    const Dims &d = pl->d;
    const int teams = dp_segments_by_teams((int64_t)pl->nrow * pl->all_heads, d.V, pl->device.sms);
    const bool divides = fabsf(d.scale) > 0x1p-20f && fabsf(d.scale) < 0x1p20f;
    const bool alone =
        saves_all(pl) ? pl->N == 1 && pl->nseg == 1 : pl->N == 1 || pl->opt.send_dh_only;
    return takes_rows(pl) && d.d_bf16 && divides && alone && !teams;
}

int fast_is_bare(const dpg_plan *pl) {
    if (pl->is_bwd || saves_all(pl)) return keeps_bare(pl);
    const int64_t blocks = (int64_t)pl->nrow * pl->all_heads * (pl->d.V / 64);
    return fast_may_be_bare(pl) && dp_segments_fill_bare(blocks, pl->device.sms);
}

/* As many as leave three blocks to a multiprocessor. */
int fast_heads_of_block(const dpg_plan *pl) {
    const int64_t tiles = (int64_t)pl->d.NT * pl->d.HV;
    for (int heads = HEADS_OF_BLOCK; heads > 1 && pl->d.Kg == 1; heads--)
        if (pl->d.G % heads == 0 && tiles >= (int64_t)3 * pl->device.sms * heads) return heads;
    return 1;
}

/* A pass over few heads leaves multiprocessors to the chunk kernel. */
int fast_spans(const dpg_plan *pl) {
    const int64_t blocks = (int64_t)pl->d.HV * (pl->d.V / 64);
    const int takes = pl->bare && !pl->single && pl->nrow == 1 && !saves_all(pl) && !pl->is_bwd;
    const int has_pre = pl->N > 1 && !pl->leads && !pl->is_last;
    return takes && !has_pre && dp_segments_in_spans(pl->d.NT, blocks, pl->device.sms) ? SPANS : 0;
}

/* Steps of 32 tokens that the longest sequence takes. */
static int most_steps(const dpg_plan *pl) {
    int most = 0;
    for (int i = 0; i < pl->nrow; i++) {
        const Seq &s = pl->seqs_h[i];
        most = std::max(most, 2 * (s.c1 - s.c0) - (pl->chunks_h[s.c1 - 1].len <= DP_CHUNK / 2));
    }
    return most;
}

/* The longest head's steps follow one another: 1.6 us each, 1.0 in blocks of 64 columns, 3.4 with a
 * gate a channel. Two kernels take 0.0415 us a tile on 132 multiprocessors, or 0.06, and 10 besides
 * with one gate a head (reports/device/speed.txt). With a gate a channel neither is faster between
 * 60 and 80. */
int fast_is_single(const dpg_plan *pl) {
    const Dims &d = pl->d;
    if (!pl->bare || pl->is_bwd || saves_all(pl) || !d.o_bf16 || pl->N > 1 || pl->nseg > 1)
        return 0;
    const int64_t heads = (int64_t)pl->nrow * pl->all_heads;
    const int one = d.Kg == 1, halves = one && d.V == 128 && 2 * heads <= pl->device.sms;
    const int64_t tiles = (int64_t)d.NT * pl->all_heads * 132 / pl->device.sms;
    if (tiles + (one ? 250 : 0) < (halves ? 24 : one ? 39 : 80) * (int64_t)most_steps(pl)) return 0;
    return halves ? 2 : 1;
}

static dp_status chunks(const Call &c) {
    if (c.p->single) return DP_OK;
    return c.p->d.Kg == 1 ? fast_chunks_one(c) : fast_chunks_channels(c);
}
static dp_status grad(const Call &c) {
    return c.p->d.Kg == 1 ? fast_grad_one(c) : fast_grad_channels(c);
}

static dp_status state(const Call &c) {
    if (!c.p->bare || saves_all(c.p)) return fast_state(c);
    if (c.p->single) return c.p->d.Kg == 1 ? fast_forward_one(c) : fast_forward_gated(c);
    dp_status st = fast_state_bare(c);
    return st || !at<int>(c, B_SPOILT) ? st : fast_spoil(c);
}

extern const Path fast_path = {"fast",          chunks,       fast_pre,     state,          chunks,
                               fast_bwd_states, fast_columns, fast_bwd_pre, fast_bwd_state, grad,
                               fast_sums,       fast_norm};
