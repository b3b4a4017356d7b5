/* gpu/plan/stages.cu - staged outputs by name, from the workspace to fp64 arrays in token order. */
#include "plan/paths.cuh"
#include "plan/wide.cuh"
#include "ref/chunk/stages.h"
#include <stdlib.h>

/* The rows of stages.inc, and how they lie in the workspace:
 *   BY_TOKEN  tiles of `rows` rows a token, [L][HV](rows)[width]
 *   BY_CHUNK  [chunks][HV][K][V]
 *   BY_RANK   [HV][K][V], or an element (H, M), rows of V + K words, [HV][K][V or K]
 *   OUTPUT    o as the caller gave it, [L][HV][V] */
enum Kind { BY_TOKEN, BY_CHUNK, BY_RANK, OUTPUT };
struct Stage {
    const char *name;
    int slot;
    Kind kind;
    int keyed; /* a row for each key of a token */
    dp_axis last;
};
/* Slots in the order of stages.inc. */
static constexpr int slots[] = {B_GCUM,     B_AKK, B_AQK, B_W,     B_U,  B_KG,
                                B_QG,       B_HM,  B_HM,  B_SIN,   B_H,  B_VNEW,
                                B_DV_LOCAL, B_DHM, B_DHM, B_DSOUT, B_DH, B_DV_NEW};
static_assert(sizeof slots / sizeof *slots == DP_NSTAGE_TENSORS, "one for each tensor");

#define TOKENS(LAST) BY_TOKEN, 0, DP_AXIS_##LAST
#define KEYED(LAST) BY_TOKEN, 1, DP_AXIS_##LAST
#define CHUNKS BY_CHUNK, 0, DP_AXIS_V
#define RANKS(LAST) BY_RANK, 0, DP_AXIS_##LAST
static const Stage stages[] = {
#define TENSOR(ID, NAME, STAGE, FROM, AXES, ...) {NAME, slots[DP_##ID], AXES},
#include "ref/chunk/stages.inc"
    {"o", -1, OUTPUT, 0, DP_AXIS_V}};
const char *const dpg_stage_names[] = {
#define TENSOR(ID, NAME, ...) NAME,
#include "ref/chunk/stages.inc"
    "o", NULL};

static int is_element(const Stage *st) { return st->slot == B_HM || st->slot == B_DHM; }
static int is_m(const Stage *st) { return is_element(st) && st->last == DP_AXIS_K; }
static const dpg_plan *owner(const dpg_plan *pl, const Stage *st) {
    return st->slot >= B_DV_LOCAL ? pl->bwd : pl;
}

static dp_status find(const dpg_plan *pl, const char *name, const Stage **out, dp_err *e) {
    const Stage *st = NULL;
    for (size_t i = 0; i < sizeof stages / sizeof *stages && !st; i++)
        if (!strcmp(stages[i].name, name)) st = &stages[i];
    if (!st) return dpg_fail(e, DP_EINPUT, "no stage named %s", name);
    if (pl->heads)
        return dpg_fail(e, DP_EINPUT, "stage %s: ranks that exchange heads show none", name);
    const dpg_plan *o = owner(pl, st);
    if (!o || (st->slot == B_DHM && is_m(st) && o->opt.send_dh_only))
        return dpg_fail(e, DP_EINPUT, "stage %s: the plan makes none", name);
    if (o->d.tok != DP_CHUNK && (st->kind == BY_TOKEN || st->kind == BY_CHUNK))
        return dpg_fail(e, DP_EINPUT, "stage %s: chunks hold %d tokens on this path, not %d", name,
                        o->d.tok, DP_CHUNK);
    int nobody = is_element(st) && pl->N == 1 && !pl->owned;
    if (st->slot >= 0 && !o->buf[st->slot].bytes && !nobody)
        return dpg_fail(e, DP_EINPUT, "stage %s is not kept on this path (options.keep)", name);
    *out = st;
    return DP_OK;
}

/* Does it hold columns of values, which wide ones have in parts. */
static int of_values(const Stage *st) { return st->last == DP_AXIS_V; }

static int rows_of(const dpg_plan *pl, const Stage *st) { return st->keyed ? pl->d.R : 1; }
static int width_of(const dpg_plan *pl, const Stage *st) {
    const Dims &d = pl->d;
    switch (st->last) {
    case DP_AXIS_V: return d.V;
    case DP_AXIS_KG: return d.Kg;
    case DP_AXIS_KEYS: return d.n;
    default: return d.K;
    }
}

/* That of the narrower problem, whose heads stand in the first or second place. */
static dp_status wide_shape(const dpg_plan *pl, const char *name, int64_t dims[5], int *ndim,
                            dp_err *e) {
    const Stage *st = NULL;
    const dpg_plan *one = pl->wide->one;
    TRY(find(one, name, &st, e));
    TRY(dpg_stage_shape(one, name, dims, ndim, e));
    dims[st->kind == BY_RANK && !one->owned ? 0 : 1] = pl->d.HV;
    if (of_values(st)) dims[*ndim - 1] = pl->d.V;
    return DP_OK;
}

dp_status dpg_stage_shape(const dpg_plan *pl, const char *name, int64_t dims[5], int *ndim,
                          dp_err *e) {
    const Stage *st = NULL;
    const Dims &d = pl->d;
    if (pl->wide) return wide_shape(pl, name, dims, ndim, e);
    TRY(find(pl, name, &st, e));
    int rows = rows_of(pl, st), width = width_of(pl, st);
    int64_t chunk[] = {d.NT, d.HV, d.K, d.V}, state[] = {d.HV, d.K, width};
    int64_t token[] = {d.L, d.HV, rows, width}, plain[] = {d.L, d.HV, width};
    int64_t links[] = {pl->nlink, d.HV, d.K, width};
    int chunks = st->kind == BY_CHUNK, states = st->kind == BY_RANK, linked = states && pl->owned;
    const int64_t *shape = linked     ? links
                           : chunks   ? chunk
                           : states   ? state
                           : rows > 1 ? token
                                      : plain;
    *ndim = linked || chunks || (!states && rows > 1) ? 4 : 3;
    memcpy(dims, shape, *ndim * sizeof *dims);
    return DP_OK;
}

static double word(const void *x, int is_bf16, int64_t i) {
    if (!is_bf16) return ((const float *)x)[i];
    uint32_t b = (uint32_t)((const uint16_t *)x)[i] << 16;
    float f;
    memcpy(&f, &b, 4);
    return f;
}

/* Tile rows (chunk, head, token, row) to token order. The fast path keeps gcum in log2 units. */
static void untile(const dpg_plan *pl, const Stage *st, const void *raw, double *host) {
    const Dims &d = pl->d;
    const Buf &b = pl->buf[st->slot];
    int words = rows_of(pl, st) * width_of(pl, st);
    int log2 = st->slot == B_GCUM && pl->opt.path == DPG_PATH_FAST;
    double unit = log2 ? 0.69314718055994530942 : 1;
    for (int c = 0; c < d.NT; c++)
        for (int hv = 0; hv < d.HV; hv++)
            for (int s = 0; s < pl->chunks_h[c].len; s++) {
                int64_t from = ((int64_t)c * d.HV + hv) * DP_CHUNK * words;
                double *to = host + ((pl->chunks_h[c].t0 + s) * d.HV + hv) * words;
                for (int i = 0; i < words; i++)
                    to[i] = unit * word(raw, b.is_bf16, from + tile_at(b.layout, s, i, words));
            }
}

/* States by chunk, whose layout may be SLICES. */
static void unslice(const dpg_plan *pl, const Buf &b, const void *raw, double *host) {
    const Dims &d = pl->d;
    int64_t kv = (int64_t)d.K * d.V;
    for (int64_t i = 0; i < kv * d.HV * d.NT; i++) {
        int at = (int)(i % kv), sliced = slice_at(d.K, at / d.V, at % d.V);
        host[i] = word(raw, b.is_bf16, b.layout == SLICES ? i - at + sliced : i);
    }
}

/* States or elements of the rank: its own, or one of each part. */
static int64_t entries(const dpg_plan *pl) { return pl->owned ? pl->nlink : 1; }

/* H or M of elements (H, M). */
static void part_of_element(const dpg_plan *pl, const Stage *st, const void *raw, double *host) {
    const Dims &d = pl->d;
    int row = st->slot == B_DHM ? dh_row(pl) : d.V + d.K;
    int from = is_m(st) ? d.V : 0, width = width_of(pl, st);
    for (int64_t r = 0; r < entries(pl) * d.HV * d.K; r++)
        for (int i = 0; i < width; i++)
            host[r * width + i] = word(raw, 0, r * row + from + i);
}

static void convert(const dpg_plan *pl, const Stage *st, const void *raw, double *host) {
    const Dims &d = pl->d;
    int64_t state = (int64_t)d.HV * d.K * d.V,
            n = st->kind == OUTPUT ? d.L * d.HV * d.V : entries(pl) * state;
    /* the backward keeps its parts' states from the last on */
    int turned = pl->owned && st->slot == B_DSOUT;
    if (st->kind == BY_TOKEN)
        untile(pl, st, raw, host);
    else if (st->kind == BY_CHUNK)
        unslice(pl, pl->buf[st->slot], raw, host);
    else if (is_element(st))
        part_of_element(pl, st, raw, host);
    else
        for (int64_t i = 0; i < n; i++)
            host[i] = word(raw, st->kind == OUTPUT && d.o_bf16,
                           turned ? (pl->nlink - 1 - i / state) * state + i % state : i);
}

static dp_status wide_read(const dpg_plan *pl, const dpg_tensors *t, const void *ws,
                           const char *name, double *host, dp_err *e) {
    const Stage *st = NULL;
    const dpg_plan *one = pl->wide->one;
    int64_t dims[5], lead = 1, runs = 1;
    int ndim;
    TRY(find(one, name, &st, e));
    TRY(dpg_stage_shape(pl, name, dims, &ndim, e));
    const int heads = st->kind == BY_RANK && !one->owned ? 0 : 1;
    for (int i = 0; i + 1 < ndim; i++)
        *(i <= heads ? &lead : &runs) *= dims[i];
    const int64_t each = of_values(st) ? one->d.V : dims[ndim - 1];
    std::vector<double> narrow(lead * pl->wide->cols * runs * each);
    TRY(dpg_stage_read(one, t, ws, name, narrow.data(), e));
    wide_join(pl->wide, lead, runs, each, !of_values(st), narrow.data(), host);
    return DP_OK;
}

dp_status dpg_stage_read(const dpg_plan *pl, const dpg_tensors *t, const void *ws, const char *name,
                         double *host, dp_err *e) {
    const Stage *st = NULL;
    if (pl->wide) return wide_read(pl, t, ws, name, host, e);
    TRY(find(pl, name, &st, e));
    pl = owner(pl, st);
    const Dims &d = pl->d;
    /* zeros where nobody asks for it */
    int none = pl->owned
                   ? !pl->nlink
                   : pl->N == 1 || (st->slot == B_HM && (is_m(st) ? !pl->needs_m : pl->is_last));
    if (st->kind == BY_RANK && none) {
        memset(host, 0, sizeof *host * entries(pl) * d.HV * d.K * width_of(pl, st));
        return DP_OK;
    }
    int output = st->kind == OUTPUT;
    const void *src = output ? t->o : (const char *)ws + pl->buf[st->slot].off;
    size_t words = (size_t)d.L * d.HV * d.V;
    size_t bytes = output ? words * (d.o_bf16 ? 2 : 4) : pl->buf[st->slot].bytes;
    void *raw = malloc(bytes);
    if (!raw)
        return dpg_fail(e, DP_ENOMEM, "%s:%d: %zu bytes for stage %s", __FILE__, __LINE__, bytes,
                        name);
    cudaError_t err = cudaMemcpy(raw, src, bytes, cudaMemcpyDeviceToHost);
    if (err == cudaSuccess) convert(pl, st, raw, host);
    free(raw);
    return err == cudaSuccess ? DP_OK
                              : dpg_fail(e, DP_EDEVICE, "%s:%d: copy of stage %s: %s", __FILE__,
                                         __LINE__, name, cudaGetErrorString(err));
}
