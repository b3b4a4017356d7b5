/* The time of a batch, whole and cut in segments (segments.h). */
#include "segments.h"

#include <stdlib.h>

typedef int64_t ps;

#define CARD 132 /* multiprocessors of the card that was measured */
#define MANY 64  /* blocks a multiprocessor from which on nothing is looked at: it is full */

typedef struct {
    ps launch, block, chunk, tile;
} pass;
/* Few blocks: 4 warps have 16 columns (teams); many: a warp (scan). */
typedef struct {
    pass team, scan;
} pass_by;
static const pass_by STATE = {{7000000, 1700000, 793000, 4700}, {7200000, 8600000, 1335000, 23500}},
                     RECOMPUTED = {{10000000, 1100000, 650000, 4700},
                                   {10000000, 7200000, 1022000, 23800}},
                     GRADIENTS = {{7000000, 2000000, 920000, 4700},
                                  {10000000, 5100000, 1774000, 34200}},
                     FROM_ZERO = {{11200000, 2300000, 846000, 11300},
                                  {10000000, 5800000, 1276000, 20600}};
static const pass BARE = {1000000, 5300000, 1115000, 23500}; /* scan, without w and u */
/* (M, H): of 64 rows a block, of all of them; tiles with w and u, and without by gates. */
static const pass PAIRS_HALF = {2000000, 9000000, 860000, 14500},
                  PAIRS = {2000000, 9000000, 1300000, 14500};
#define PAIRS_GATED 17000
#define PAIRS_ONE 12400

typedef struct {
    ps launch, step, work;
} products;
static const products FORWARD = {2400000, 1000000, 40000}, BACKWARD = {1900000, 3800000, 116000};
/* A tile: chunks (plans without w and u; from bench_bwd forward); backward in all. */
#define CHUNKS 45000
#define CHUNKS_GATED 37400
#define CHUNKS_ONE 37000
#define CHUNKS_BARE 19700
#define BACK 214000
#define BACK_ONE 148000

static ps most_of(ps a, ps b) { return a > b ? a : b; }

static ps chunks_of(const dp_segments_case *c, int bare) {
    if (c->one_gate) return bare ? CHUNKS_BARE : CHUNKS_ONE;
    return bare ? CHUNKS_GATED : CHUNKS;
}

/* Times measured at K = V = 128 on CARD multiprocessors, here. */
static ps bytes_here(const dp_segments_case *c, ps x) {
    return x * (c->K + c->V + 32) / 288 * CARD / c->sms;
}
static pass here(const dp_segments_case *c, pass p) {
    return (pass){p.launch, p.block, p.chunk * (c->K + 128) / 256, bytes_here(c, p.tile)};
}

/* Chunks of the segments of a pass, in the order of their blocks; 0: left out. */
typedef struct {
    int *at, n;
} rows;

/* Puts x where the root of a heap of n was. */
static void sift(ps *heap, int n, ps x) {
    int i = 0;
    for (int k = 1; k < n; k = 2 * i + 1) {
        if (k + 1 < n && heap[k + 1] < heap[k]) k++;
        if (heap[k] >= x) break;
        heap[i] = heap[k];
        i = k;
    }
    heap[i] = x;
}

/* When the last of the blocks ends, `blocks` a segment, each on the first multiprocessor that is
 * free. */
static ps last_end(const dp_segments_case *c, const rows *r, int blocks, const pass *p) {
    ps *free_at = calloc((size_t)c->sms, sizeof *free_at), end = 0;
    if (!free_at) abort();
    for (int j = 0; j < r->n; j++)
        for (int i = 0; i < blocks && r->at[j]; i++) {
            const ps to = free_at[0] + p->block + r->at[j] * p->chunk;
            sift(free_at, c->sms, to);
            end = most_of(end, to);
        }
    free(free_at);
    return end;
}
static ps time_of_pass(const dp_segments_case *c, const rows *r, int blocks, pass p) {
    int64_t chunks = 0;
    for (int j = 0; j < r->n; j++)
        chunks += r->at[j];
    return p.launch + most_of(last_end(c, r, blocks, &p), p.tile * chunks * c->HV);
}
static int takes_teams(const dp_segments_case *c, int64_t n) { /* fast/state.cuh: by_teams */
    return n * c->HV * (c->V / 64) < 100 * c->sms / 132;
}
static int takes_bare(const dp_segments_case *c, int64_t n) { /* fast/path.cu: is_bare */
    return c->bare && dp_segments_fill_bare(n * c->HV * (c->V / 64), c->sms);
}
static ps time_by(const dp_segments_case *c, const rows *r, const pass_by *by) {
    const int team = takes_teams(c, r->n);
    return time_of_pass(c, r, c->HV * (team ? c->V / 16 : c->V / 64),
                        here(c, team ? by->team : by->scan));
}

/* A batch cut so: segments of passes over all, of (M, H), of gradients from zero. */
typedef struct {
    rows all, first, later;
    int most, segments, cuts; /* most: segments of a sequence */
} batch;

static void put(rows *r, int chunks) { r->at[r->n++] = chunks; }

static batch batch_of(const int *chunks, int n, int most) {
    batch b = {.most = 1};
    size_t room = 1;
    for (int i = 0; i < n; i++)
        room += (size_t)dp_segments_of(chunks[i], most);
    b.all.at = calloc(3 * room, sizeof *b.all.at);
    if (!b.all.at) abort();
    b.first.at = b.all.at + room;
    b.later.at = b.first.at + room;
    for (int i = 0; i < n; i++)
        if (dp_segments_of(chunks[i], most) == 1) put(&b.all, chunks[i]);
    for (int i = 0; i < n; i++) {
        const int parts = dp_segments_of(chunks[i], most);
        if (parts == 1) continue;
        for (int j = 0; j < parts; j++) {
            const int64_t all = chunks[i];
            const int part = (int)(all * (j + 1) / parts - all * j / parts);
            put(&b.all, part);
            put(&b.first, j < parts - 1 ? part : 0);
            put(&b.later, j ? part : 0);
        }
        b.most = parts > b.most ? parts : b.most;
        b.segments += parts;
        b.cuts++;
    }
    return b;
}

static ps time_of_products(const dp_segments_case *c, const products *p, int in_a_row,
                           int64_t all) {
    const ps step = p->step * in_a_row, work = p->work * c->HV * all * CARD / c->sms;
    return in_a_row ? p->launch + (step + work) * c->K / 128 : 0;
}

/* (M, H) and what segments start from (fast/pre_own.cu). */
static ps time_of_starts(const dp_segments_case *c, const batch *b, int bare) {
    const int halves = c->K > 64 && 2 * (b->segments - 1) * c->HV <= c->sms;
    pass pairs = halves ? PAIRS_HALF : PAIRS;
    if (bare) pairs.tile = c->one_gate ? PAIRS_ONE : PAIRS_GATED;
    pairs.chunk = pairs.chunk * c->K / 128;
    pairs.tile = bytes_here(c, pairs.tile);
    return time_of_pass(c, &b->first, halves ? 2 * c->HV : c->HV, pairs) +
           time_of_products(c, &FORWARD, b->most - 1, b->segments - b->cuts);
}

/* The part that depends on how a batch is cut. */
static ps time_of(const dp_segments_case *c, const batch *b, int64_t tiles) {
    const int cut = b->segments > 0, bare = takes_bare(c, b->all.n);
    ps t = bare ? time_of_pass(c, &b->all, c->HV * (c->V / 64), here(c, BARE))
                : time_by(c, &b->all, &STATE);
    if (!bare) t += bytes_here(c, chunks_of(c, 0) - chunks_of(c, 1)) * tiles;
    if (c->backward)
        t += (c->save_all ? 0 : time_by(c, &b->all, &RECOMPUTED)) + time_by(c, &b->all, &GRADIENTS);
    const int beside =
        b->all.n == 1 && b->all.at[0] >= 192 && 3 * c->HV * (c->V / 64) <= 2 * c->sms;
    if (bare && beside) /* fast/path.cu: fast_spans */
        t -= bytes_here(c, chunks_of(c, 1)) * tiles / (c->one_gate ? 3 : 6);
    if (!cut) return t;
    t += time_of_starts(c, b, bare);
    if (c->backward)
        t += time_by(c, &b->later, &FROM_ZERO) +
             time_of_products(c, &BACKWARD, b->most - 1, b->segments - b->cuts);
    return t;
}

/* The part that does not. */
static ps rest_of(const dp_segments_case *c, int64_t tiles) {
    ps tile = chunks_of(c, 1);
    if (c->backward) tile += c->one_gate ? BACK_ONE : BACK;
    return bytes_here(c, tile) * tiles;
}

dp_segments_time dp_segments_time_of(const dp_segments_case *c, const int *chunks, int n,
                                     int most) {
    int64_t tiles = 0;
    for (int i = 0; i < n; i++)
        tiles += (int64_t)chunks[i] * c->HV;
    const batch b = batch_of(chunks, n, most);
    const dp_segments_time t = {time_of(c, &b, tiles), rest_of(c, tiles)};
    free(b.all.at);
    return t;
}

int dp_segments_most(const dp_segments_case *c, const int *chunks, int n) {
    static const int PARTS[] = {3, 4, 5, 6, 7, 8, 10, 12, 14, 16, 18, 20, 24, 28, 32, 40, 48, 64};
    int longest = 0, best = 0;
    for (int i = 0; i < n; i++)
        longest = chunks[i] > longest ? chunks[i] : longest;
    if ((int64_t)n * c->HV * (c->V / 64) > (int64_t)MANY * c->sms) return 0;
    const dp_segments_time whole = dp_segments_time_of(c, chunks, n, 0);
    const ps margin =
        most_of(DP_SEGMENTS_SURE, (whole.cut + whole.rest) * DP_SEGMENTS_MARGIN / 100);
    ps least = whole.cut - margin;
    for (size_t i = 0; i < sizeof PARTS / sizeof *PARTS; i++) {
        const int most = (longest + PARTS[i] - 1) / PARTS[i];
        if (most < DP_SEGMENT_LEAST) break;
        const ps t = dp_segments_time_of(c, chunks, n, most).cut;
        if (t >= least) continue;
        least = t;
        best = most;
    }
    return best;
}
