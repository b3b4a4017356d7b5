/* gpu/plan/layout.cu - the workspace of a plan: which buffers a path keeps, and where they lie. */
#include "plan/paths.cuh"
#include "plan/sending.cuh"

static void add(dpg_plan *pl, int slot, int64_t words, int is_bf16, int layout = PLAIN) {
    pl->buf[slot].layout = layout;
    pl->buf[slot].off = pl->ws_bytes;
    pl->buf[slot].bytes = (size_t)words * (is_bf16 ? 2 : 4);
    pl->buf[slot].is_bf16 = is_bf16;
    pl->ws_bytes += (pl->buf[slot].bytes + 255) / 256 * 256;
}

/* Marks of values that are not finite, where an element (M, H) may leave chunks out. */
static void layout_marks(dpg_plan *pl) {
    int64_t tiles = (int64_t)pl->d.NT * pl->d.HV;
    if (pl->N > 1 || pl->nseg > 1 || pl->owned) add(pl, B_ODD, tiles * 3, 0);
}

/* A plan without w and u has no stages to read and no backward in it. */
static void layout_bare(dpg_plan *pl) {
    int64_t C = DP_CHUNK, K = pl->d.K, tiles = (int64_t)pl->d.NT * pl->d.HV;
    add(pl, B_AQK, tiles * C * C, 1, ROWS);
    add(pl, B_TB, tiles * C * C, 1, ROWS);
    if (!pl->is_bwd) layout_marks(pl);
    if (!pl->is_bwd && pl->N == 1 && pl->nseg > 1)
        add(pl, B_SPOILT, (int64_t)pl->nrow * pl->d.HV * pl->d.V, 0);
    const int keeps = pl->is_bwd || saves_all(pl);
    if (keeps) {
        if (pl->d.Kg == 1) add(pl, B_L, tiles * C * C, 1, ROWS);
        add(pl, B_H, tiles * K * pl->d.V, 1, SLICES);
        add(pl, B_VNEW, tiles * C * pl->d.V, 1, SLICES);
    }
    if (pl->d.Kg == 1) return add(pl, B_FACTORS, tiles * (4 * C + 4), 0);
    if (keeps) add(pl, B_FACTORS, tiles * C, 0);
    for (int slot : {B_KGAM, B_KG, B_QG})
        add(pl, slot, tiles * C * K, 1, ROWS);
    add(pl, B_EC, tiles * K, 0);
}

/* Buffers of chunk paths. Under DPG_SAVE_ALL both directions have the same buffers in the same
 * places. */
static void layout_chunks(dpg_plan *pl) {
    const Dims &d = pl->d;
    int64_t C = DP_CHUNK, tiles = (int64_t)d.NT * d.HV;
    int fast = pl->opt.path == DPG_PATH_FAST, all = saves_all(pl);
    int rows = fast ? ROWS : PLAIN, slices = fast ? SLICES : PLAIN;
    if (!fast || (pl->opt.keep && (all || !pl->is_bwd))) add(pl, B_GCUM, tiles * C * d.Kg, 0);
    if (!fast || pl->opt.keep || all || pl->is_bwd) {
        add(pl, B_AKK, tiles * d.n * d.n, fast, rows);
        add(pl, B_H, tiles * d.K * d.V, fast, slices);
        add(pl, B_VNEW, tiles * d.n * d.V, fast, slices);
    }
    if (fast && (all || pl->is_bwd)) add(pl, B_L, tiles * C * C, 1, ROWS);
    if (!fast) {
        add(pl, B_BETA, tiles * d.n, 0);
        add(pl, B_QN, tiles * C * d.K, 0);
        add(pl, B_KN, tiles * d.n * d.K, 0);
        if (pl->opt.backward) add(pl, B_L, tiles * d.n * d.n, 0);
    }
    add(pl, B_AQK, tiles * C * d.n, fast, rows);
    add(pl, B_W, tiles * d.n * d.K, fast, rows);
    add(pl, B_U, tiles * d.n * d.V, fast, slices);
    add(pl, B_KG, tiles * d.n * d.K, fast, rows);
    add(pl, B_QG, tiles * C * d.K, fast, rows);
    add(pl, B_EC, tiles * d.K, 0);
    if (fast) layout_marks(pl);
}

/* Words of the halos of a rank's parts; gathered: of all ranks, if there are several. */
static int64_t halo_words(const dpg_plan *pl, int gathered) {
    return (int64_t)pl->halo * pl->slots * (!gathered ? 1 : pl->N > 1 ? pl->N : 0);
}

/* Buffers of the token path, likewise. */
static void layout_tokens(dpg_plan *pl) {
    const Dims &d = pl->d;
    int64_t keys = d.L * (d.n / d.tok), tiles = (int64_t)d.NT * d.HV;
    add(pl, B_QN, d.L * d.H * d.K, 0);
    add(pl, B_KN, keys * d.H * d.K, 0);
    if (d.erases) add(pl, B_ERASE, keys * d.HV * d.K, 0);
    add(pl, B_VALUE, keys * d.HV * d.V, 0);
    add(pl, B_BETA, keys * d.HV, 0);
    add(pl, B_DECAY, d.L * d.HV * d.Kg, 0);
    if (pl->pairs) add(pl, B_COS_SIN, d.L * d.HV * pl->pairs * 2, 0);
    if (pl->halo)
        for (int slot : {B_HALO, B_HALOIN, B_HALOALL})
            add(pl, slot, halo_words(pl, slot == B_HALOALL), 0);
    if (pl->is_bwd || saves_all(pl) || pl->opt.keep) add(pl, B_H, tiles * d.K * d.V, 0);
}

/* The rank's `numbers`, and its sent and received messages: those of all ranks, or a state. A scan
 * also has a received pair, and two that it makes alternately; or as many for each part, whose
 * pairs go in one message. */
static void layout_message(dpg_plan *pl, int own, int all, int64_t numbers) {
    int hands = hands_on(&pl->opt, pl->sends), levels = exchanges[pl->opt.exchange].levels;
    int64_t state = (int64_t)pl->d.HV * pl->d.K * pl->d.V,
            sent = hands && !levels ? state : numbers, words = packed_words(pl->opt.payload, sent);
    const int listed = hands && levels && pl->owned;
    add(pl, own, numbers, 0);
    if (!pl->sends) return;
    if (hands) add(pl, B_HAND, state, 0);
    if (hands ? levels : pl->N > 1 || words) add(pl, all, numbers * (hands ? 3 : pl->N), 0);
    if (words || listed) add(pl, B_PACK, words ? words : sent, 0);
    if (!words) return;
    add(pl, B_PACKALL, hands ? words : words * pl->N, 0);
}

static void layout_forward(dpg_plan *pl) {
    const Dims &d = pl->d;
    int64_t hm = (int64_t)d.HV * d.K * (d.V + d.K);
    if (pl->opt.path == DPG_PATH_TOKEN)
        layout_tokens(pl);
    else if (pl->single)
        ; /* nothing lies between kernels */
    else if (pl->bare)
        layout_bare(pl);
    else
        layout_chunks(pl);
    add(pl, B_SIN, (int64_t)d.HV * d.K * d.V * state_parts(pl), 0);
    if (pl->nseg > 1) add(pl, B_SEG, (pl->is_bwd ? (int64_t)d.HV * d.K * d.V : hm) * pl->nseg, 0);
    if (pl->nseg > 1 && !pl->is_bwd && pl->N > 1) add(pl, B_PREFIX, hm * pl->nseg, 0);
    if (pl->nseg > 1 && pl->opt.path == DPG_PATH_FAST)
        add(pl, B_REACH, (int64_t)d.HV * pl->nseg * HALVES_OF_M, 0);
    if (pl->N == 1 && !pl->owned) return;
    if (!pl->is_bwd || pl->opt.save == DPG_SAVE_ALL)
        layout_message(pl, B_HM, B_HMALL, hm * message_parts(pl));
    if (pl->needs_m && !pl->path->makes_m &&
        (pl->is_bwd ? !pl->opt.send_dh_only : pl->opt.chain_how == DPG_CHAIN_DENSE)) {
        int64_t batch = ((int64_t)256 << 20) / ((int64_t)d.HV * d.K * d.K * 4);
        pl->mc_batch = batch < 1 ? 1 : batch > d.NT ? d.NT : (int)batch;
        add(pl, B_MC, (int64_t)pl->mc_batch * d.HV * d.K * d.K, 0);
    }
}

static void layout_fast_bwd(dpg_plan *pl) {
    const Dims &d = pl->d;
    int64_t C = DP_CHUNK, tiles = (int64_t)d.NT * d.HV;
    bool whole = pl->reads_do;
    for (int i = 0; i < d.NT; i++)
        whole &= pl->chunks_h[i].len == C;
    if (!whole) add(pl, B_DO, tiles * C * d.V, 1, SLICES);
    if (!whole || !pl->bare || d.Kg == 1) add(pl, B_DV_NEW, tiles * C * d.V, 1, SLICES);
    add(pl, B_DH, tiles * d.K * d.V, 1, SLICES);
    if (d.nseq == 1) add(pl, B_READY, d.NT, 0);
    add(pl, B_DG, (int64_t)d.HV * d.Kg * pl->nrun, 0); /* terms of dA_log by channel */
    if (grads_are_whole(d)) return;
    /* summed over groups and keys behind the tiles */
    add(pl, B_NORM, tiles * 2 * C, 0);
    add(pl, B_DQ, tiles * C * d.K, 0);
    add(pl, B_DKR, tiles * C * d.K, 0);
}

static void layout_simple_bwd(dpg_plan *pl) {
    const Dims &d = pl->d;
    int64_t C = DP_CHUNK, tiles = (int64_t)d.NT * d.HV;
    add(pl, B_DV_LOCAL, tiles * d.n * d.V, 0);
    add(pl, B_DV_NEW, tiles * d.n * d.V, 0);
    add(pl, B_DH, tiles * d.K * d.V, 0);
    add(pl, B_DZ, tiles * d.n * d.V, 0);
    add(pl, B_DE, tiles * d.n * d.V, 0);
    add(pl, B_DP, tiles * C * d.n, 0);
    add(pl, B_DL, tiles * d.n * d.n, 0);
    add(pl, B_DQ, tiles * C * d.K, 0);
    add(pl, B_DKR, tiles * d.n * d.K, 0);
    add(pl, B_DKW, tiles * d.n * d.K, 0);
    add(pl, B_DG, tiles * C * d.K, 0);
    add(pl, B_DBETA, tiles * d.n, 0);
}

static void layout_token_bwd(dpg_plan *pl) {
    const Dims &d = pl->d;
    int64_t heads = d.L * d.HV, keys = heads * (d.n / d.tok);
    add(pl, B_DV_NEW, keys * d.V, 0);
    add(pl, B_DH, (int64_t)d.NT * d.HV * d.K * d.V, 0);
    add(pl, B_DQ, heads * d.K, 0);
    if (d.erases) add(pl, B_DKR, keys * d.K, 0);
    add(pl, B_DKW, keys * d.K, 0);
    add(pl, B_DG, heads * d.Kg, 0);
    if (pl->pairs) add(pl, B_DANGLE, heads * pl->pairs, 0);
    if (pl->halo)
        for (int slot : {B_DHALO, B_DHALOALL})
            add(pl, slot, halo_words(pl, slot == B_DHALOALL), 0);
    add(pl, B_DBETA, keys, 0);
}

/* Behind the forward's buffers, which the backward recomputes or, under DPG_SAVE_ALL, finds. */
static void layout_bwd(dpg_plan *pl) {
    const Dims &d = pl->d;
    int64_t tiles = (int64_t)d.NT * d.HV, hk = (int64_t)d.HV * d.K;
    int64_t sums = (int64_t)d.HV * (1 + d.Kg) * (pl->by_part ? pl->slots : 1);
    if (pl->opt.path == DPG_PATH_FAST)
        layout_fast_bwd(pl);
    else if (pl->opt.path == DPG_PATH_TOKEN)
        layout_token_bwd(pl);
    else
        layout_simple_bwd(pl);
    add(pl, B_PART, tiles * 2 * d.Kg, 0);
    add(pl, B_GSUM, sums, 0);
    /* of the rank, then of its parts from the last but one on */
    add(pl, B_DSOUT, hk * d.V * state_parts(pl), 0);
    if (pl->N > 1 || pl->owned)
        layout_message(pl, B_DHM, B_DHMALL, hk * dh_row(pl) * message_parts(pl));
    if (pl->N > 1) add(pl, B_GALL, sums * pl->N, 0);
}

void layout_workspace(dpg_plan *pl) {
    layout_forward(pl);
    if (pl->is_bwd) layout_bwd(pl);
}
