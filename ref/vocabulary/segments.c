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
static const pass_by STATE = {{7300000, 1720000, 961000, 4700}, {7760000, 9420000, 1690000, 23500}},
                     RECOMPUTED = {{13700000, 1140000, 577000, 4700},
                                   {21900000, 5880000, 1130000, 18300}},
                     GRADIENTS = {{17700000, 4960000, 1040000, 4700},
                                  {16500000, 3940000, 1670000, 26500}},
                     FROM_ZERO = {{5460000, 1600000, 1940000, 11300},
                                  {18200000, 2870000, 1390000, 7200}};
#define PAIRS_TILE 14500 /* of a plan with w and u */

typedef struct {
    ps launch, step, work;
} products;
static const products BACKWARD = {3670000, 6350000, 509000};
/* By gates: chunks of a plan with w and u and without. Without: the pass (scan), (M, H) of 64 rows
 * a block and of all, products, percent of the chunks beside the pass. A tile of the backward, and
 * what it takes less where passes solve (fast/state_kept.cu). */
typedef struct {
    ps chunks_stored, chunks;
    pass states, half, pairs;
    products forward;
    ps beside, back, solved;
} gates;
static const gates GATED = {40400,
                            42600,
                            {4330000, 7340000, 1040000, 21500},
                            {1210000, 2850000, 600000, 14100},
                            {5000000, 3700000, 1330000, 16900},
                            {5340000, 1520000, 55900},
                            23,
                            193000,
                            17000},
                   ONE = {35300,
                          21100,
                          {7000000, 3950000, 1240000, 19100},
                          {1530000, 2320000, 761000, 13100},
                          {1060000, 3790000, 1030000, 9860},
                          {2180000, 1310000, 116000},
                          21,
                          144000,
                          20000};
static const gates *gates_of(const dp_segments_case *c) { return c->one_gate ? &ONE : &GATED; }

static ps most_of(ps a, ps b) { return a > b ? a : b; }

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
static int takes_teams(const dp_segments_case *c, int64_t n) {
    return dp_segments_by_teams(n * c->HV, c->V, c->sms);
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
    const gates *g = gates_of(c);
    pass pairs = halves ? g->half : g->pairs;
    pairs.chunk = pairs.chunk * c->K / 128;
    pairs.tile = bytes_here(c, bare ? pairs.tile : PAIRS_TILE);
    return time_of_pass(c, &b->first, halves ? 2 * c->HV : c->HV, pairs) +
           time_of_products(c, &g->forward, b->most - 1, b->segments - b->cuts);
}

/* The passes of a backward. Whole sequences have both side by side where there is room; else one
 * sequence has gradients of its last chunks beside the second (fast/state_bwd.cu). */
static ps time_of_backward(const dp_segments_case *c, const rows *all, int cut) {
    const int team = takes_teams(c, all->n),
              blocks = all->n * c->HV * (team ? c->V / 16 : c->V / 64);
    const ps states = time_by(c, all, &RECOMPUTED), gradients = time_by(c, all, &GRADIENTS);
    if (!cut && !c->save_all && 2 * blocks <= c->sms) return most_of(states, gradients);
    const ps both = gradients + (c->save_all ? 0 : states);
    const int beside = !cut && all->n == 1 && !team && blocks < c->sms;
    return beside ? both - gradients * (c->sms - blocks) / c->sms : both;
}

/* The part that depends on how a batch is cut. */
static ps time_of(const dp_segments_case *c, const batch *b, int64_t tiles) {
    const int cut = b->segments > 0, bare = takes_bare(c, b->all.n);
    const gates *g = gates_of(c);
    ps t = bare ? time_of_pass(c, &b->all, c->HV * (c->V / 64), here(c, g->states))
                : time_by(c, &b->all, &STATE);
    if (!bare) t += bytes_here(c, g->chunks_stored - g->chunks) * tiles;
    if (c->backward) t += time_of_backward(c, &b->all, cut);
    if (c->backward && c->bare && !c->save_all && !takes_teams(c, b->all.n))
        t -= bytes_here(c, g->solved) * tiles;
    if (bare && b->all.n == 1 && dp_segments_in_spans(b->all.at[0], c->HV * (c->V / 64), c->sms))
        t -= bytes_here(c, g->chunks) * tiles * g->beside / 100;
    if (!cut) return t;
    t += time_of_starts(c, b, bare);
    if (c->backward)
        t += time_by(c, &b->later, &FROM_ZERO) +
             time_of_products(c, &BACKWARD, b->most - 1, b->segments - b->cuts);
    return t;
}

/* The part that does not. */
static ps rest_of(const dp_segments_case *c, int64_t tiles) {
    const gates *g = gates_of(c);
    return bytes_here(c, g->chunks + (c->backward ? g->back : 0)) * tiles;
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

/* The part that depends on the cut, where nothing is cut; whole: the same with a whole forward. A
 * recomputing backward needs no segments of its forward, which may then be cut alone. */
static ps uncut(const dp_segments_case *c, const int *chunks, int n, ps whole) {
    if (!c->backward || c->save_all) return whole;
    dp_segments_case f = *c;
    f.backward = 0;
    const int most = dp_segments_most(&f, chunks, n);
    if (!most) return whole;
    return whole - dp_segments_time_of(&f, chunks, n, 0).cut +
           dp_segments_time_of(&f, chunks, n, most).cut;
}

int dp_segments_most(const dp_segments_case *c, const int *chunks, int n) {
    static const int PARTS[] = {3, 4, 5, 6, 7, 8, 10, 12, 14, 16, 18, 20, 24, 28, 32, 40, 48, 64};
    int longest = 0, best = 0;
    for (int i = 0; i < n; i++)
        longest = chunks[i] > longest ? chunks[i] : longest;
    if ((int64_t)n * c->HV * (c->V / 64) > (int64_t)MANY * c->sms) return 0;
    const dp_segments_time all = dp_segments_time_of(c, chunks, n, 0);
    const ps whole = uncut(c, chunks, n, all.cut);
    ps least = whole - most_of(DP_SEGMENTS_SURE, (whole + all.rest) * DP_SEGMENTS_MARGIN / 100);
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
