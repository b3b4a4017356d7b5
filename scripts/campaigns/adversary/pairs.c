/* Sums over pairs of tokens of a chunk (math.md e, e.1, f). The decay of every pair is formed by
 * itself, or as a product of two gated operands with an anchor between them. */
#include "adversary.h"
#include <math.h>
#include <stdlib.h>

enum { TILE = 16 }; /* tokens that share an anchor */

/* Readers of tokens s0 .. s1-1, writers of tokens i0 .. i1-1; anchor [K]: NULL: pair by pair. */
typedef struct {
    int s0, s1, i0, i1;
    const float *anchor;
} block;

static const float *decay_of(const pair_set *p, int s, int i) {
    return p->decay + ((int64_t)s * (s + 1) / 2 + i) * p->K;
}

void pair_decays(pair_set *p) {
    p->decay = floats((int64_t)p->c * (p->c + 1) / 2 * p->K);
    float *to = p->decay;
    for (int s = 0; s < p->c; s++)
        for (int i = 0; i <= s; i++)
            for (int x = 0; x < p->K; x++)
                *to++ = power_of(p->d, p->gam[s * p->K + x] - p->gam[i * p->K + x]);
}

/* Readers are [q of c tokens][R keys of c tokens]: row j of token s, j = 0: its q. */
static int reader_row(const pair_set *p, int s, int j) {
    return j == 0 ? s : p->c + s * p->R + j - 1;
}

/* Rows of x that are the readers of tokens s0 .. s1-1, token by token. */
static float *gather(const pair_set *p, const block *b, const float *x, int width) {
    const int per = p->R + 1;
    float *to = floats((int64_t)(b->s1 - b->s0) * per * width);
    for (int s = b->s0; s < b->s1; s++)
        for (int j = 0; j < per; j++)
            memcpy(to + ((int64_t)(s - b->s0) * per + j) * width,
                   x + (int64_t)reader_row(p, s, j) * width, sizeof *to * (size_t)width);
    return to;
}

/* Writers of tokens i0 .. i1-1 as token s sees them: exp(gam_s - gam_i) o k_i. */
static void seen_from(const pair_set *p, int s, int i0, int i1, float *to) {
    for (int w = i0 * p->R; w < i1 * p->R; w++) {
        const float *decay = decay_of(p, s, w / p->R);
        for (int x = 0; x < p->K; x++)
            *to++ = decay[x] * p->writers[(int64_t)w * p->K + x];
    }
}

static void put_scores(const pair_set *p, const block *b, int s, const float *from, float *score) {
    const int width = (b->i1 - b->i0) * p->R;
    for (int j = 0; j <= p->R; j++)
        for (int w = 0; w < width; w++) {
            const int i = b->i0 + w / p->R;
            const int allowed = i < s || (i == s && j == 0);
            float *to = score + (int64_t)reader_row(p, s, j) * p->n + b->i0 * p->R + w;
            *to = allowed ? from[j * width + w] : 0;
        }
}

static void scores_by_pairs(const pair_set *p, const block *b, float *score) {
    const int per = p->R + 1;
    float *seen = floats((int64_t)(b->i1 - b->i0) * p->R * p->K);
    float *readers = gather(p, b, p->readers, p->K);
    float *out = floats((int64_t)per * (b->i1 - b->i0) * p->R);
    for (int s = b->s0; s < b->s1; s++) {
        block mine = *b;
        mine.i1 = s + 1 < b->i1 ? s + 1 : b->i1;
        const int width = (mine.i1 - mine.i0) * p->R;
        const float *at = readers + (int64_t)(s - b->s0) * per * p->K;
        seen_from(p, s, mine.i0, mine.i1, seen);
        product(p->d->sums, per, width, p->K, by_rows(at, p->K, FP32), transposed(seen, p->K, FP32),
                out);
        put_scores(p, &mine, s, out, score);
    }
    free(seen);
    free(readers);
    free(out);
}

/* Coefficients of token s for writers of earlier tokens. */
static void earlier(const pair_set *p, const block *b, int s, const float *coef, float *to) {
    const int width = (b->i1 - b->i0) * p->R;
    for (int j = 0; j <= p->R; j++)
        for (int w = 0; w < width; w++)
            *to++ = b->i0 + w / p->R < s
                        ? coef[(int64_t)reader_row(p, s, j) * p->n + b->i0 * p->R + w]
                        : 0;
}

static void add_readers(const pair_set *p, int s, const float *from, float *to) {
    for (int j = 0; j <= p->R; j++)
        for (int x = 0; x < p->K; x++)
            to[(int64_t)reader_row(p, s, j) * p->K + x] += from[j * p->K + x];
}

static void gradients_of_token(const pair_set *p, const block *b, int s, const float *readers,
                               const float *coef, float *dreaders, float *dwriters) {
    const int per = p->R + 1, K = p->K;
    const int end = s < b->i1 ? s : b->i1;
    const block mine = {.i0 = b->i0, .i1 = end};
    const int width = (end - b->i0) * p->R;
    if (width <= 0) return;
    float *seen = floats((int64_t)width * K + per * K + (int64_t)width * per);
    float *mixed = seen + (int64_t)width * K;
    float *weight = mixed + per * K;
    earlier(p, &mine, s, coef, weight);
    seen_from(p, s, b->i0, end, seen);
    product(p->d->sums, per, K, width, by_rows(weight, width, FP32), by_rows(seen, K, FP32), mixed);
    add_readers(p, s, mixed, dreaders);
    product(p->d->sums, width, K, per, transposed(weight, width, FP32), by_rows(readers, K, FP32),
            seen);
    for (int w = 0; w < width; w++) {
        const float *decay = decay_of(p, s, b->i0 + w / p->R);
        float *to = dwriters + ((int64_t)b->i0 * p->R + w) * K;
        for (int x = 0; x < K; x++)
            to[x] += decay[x] * seen[(int64_t)w * K + x];
    }
    free(seen);
}

static void gradients_by_pairs(const pair_set *p, const block *b, const float *coef,
                               float *dreaders, float *dwriters) {
    float *readers = gather(p, b, p->readers, p->K);
    const int count = b->s1 - b->s0;
    for (int step = 0; step < count; step++) {
        const int t = p->d->sums == REVERSED ? count - 1 - step : step;
        gradients_of_token(p, b, b->s0 + t, readers + (int64_t)t * (p->R + 1) * p->K, coef,
                           dreaders, dwriters);
    }
    free(readers);
}

/* exp(gam - anchor) of readers, exp(anchor - gam) of writers, and both times their rows. */
typedef struct {
    int rows, cols;
    float *reader_decay, *writer_decay, *readers, *writers;
} gated;

static gated gate_block(const pair_set *p, const block *b) {
    const int K = p->K, per = p->R + 1;
    gated g = {.rows = (b->s1 - b->s0) * per, .cols = (b->i1 - b->i0) * p->R};
    g.readers = gather(p, b, p->readers, K);
    g.reader_decay = floats((int64_t)g.rows * K);
    g.writer_decay = floats((int64_t)g.cols * K);
    g.writers = floats((int64_t)g.cols * K);
    for (int r = 0; r < g.rows; r++)
        for (int x = 0; x < K; x++) {
            const float e = decay_by(p->d, p->gam[(b->s0 + r / per) * K + x] - b->anchor[x]);
            g.reader_decay[r * K + x] = e;
            g.readers[r * K + x] = round_to(p->d->scores, e * g.readers[r * K + x]);
        }
    for (int w = 0; w < g.cols; w++)
        for (int x = 0; x < K; x++) {
            const float e = decay_by(p->d, b->anchor[x] - p->gam[(b->i0 + w / p->R) * K + x]);
            const float k = p->writers[((int64_t)b->i0 * p->R + w) * K + x];
            g.writer_decay[w * K + x] = e;
            g.writers[w * K + x] = round_to(p->d->scores, e * k);
        }
    return g;
}

static void gated_free(gated *g) {
    free(g->readers);
    free(g->reader_decay);
    free(g->writer_decay);
    free(g->writers);
}

static void scores_by_anchor(const pair_set *p, const block *b, float *score) {
    gated g = gate_block(p, b);
    float *out = floats((int64_t)g.rows * g.cols);
    product(p->d->sums, g.rows, g.cols, p->K, by_rows(g.readers, p->K, p->d->scores),
            transposed(g.writers, p->K, p->d->scores), out);
    for (int s = b->s0; s < b->s1; s++)
        put_scores(p, b, s, out + (int64_t)(s - b->s0) * (p->R + 1) * g.cols, score);
    free(out);
    gated_free(&g);
}

static void gradients_by_anchor(const pair_set *p, const block *b, const float *coef,
                                float *dreaders, float *dwriters) {
    const format f = p->d->scores;
    const int K = p->K, per = p->R + 1;
    gated g = gate_block(p, b);
    float *weight = floats((int64_t)g.rows * g.cols);
    float *out = floats((int64_t)(g.rows > g.cols ? g.rows : g.cols) * K);
    for (int s = b->s0; s < b->s1; s++)
        earlier(p, b, s, coef, weight + (int64_t)(s - b->s0) * per * g.cols);
    product(p->d->sums, g.rows, K, g.cols, by_rows(weight, g.cols, f), by_rows(g.writers, K, f),
            out);
    for (int i = 0; i < g.rows * K; i++)
        out[i] *= g.reader_decay[i];
    for (int s = b->s0; s < b->s1; s++)
        add_readers(p, s, out + (int64_t)(s - b->s0) * per * K, dreaders);
    product(p->d->sums, g.cols, K, g.rows, transposed(weight, g.cols, f), by_rows(g.readers, K, f),
            out);
    float *to = dwriters + (int64_t)b->i0 * p->R * K;
    for (int i = 0; i < g.cols * K; i++)
        to[i] += g.writer_decay[i] * out[i];
    free(weight);
    free(out);
    gated_free(&g);
}

/* Exponents that an anchor in the middle of a tile makes stay in the format's range. */
static int anchor_fits(const pair_set *p, const block *b) {
    const float most = p->d->scores == FP16 ? 8 : 60;
    for (int x = 0; x < p->K; x++) {
        const float first = p->gam[b->i0 * p->K + x];
        const float last = p->gam[(b->i1 - 1) * p->K + x];
        if (first - b->anchor[x] > most || b->anchor[x] - last > most) return 0;
    }
    return 1;
}

typedef void visit(const pair_set *p, const block *b, const float *coef, float *one, float *two);

/* All blocks of the chunk: one where decays are formed pair by pair. Else tiles, those on the
 * diagonal pair by pair where their anchor would overflow. */
static void visit_blocks(const pair_set *p, visit *by_pairs, visit *by_anchor, const float *coef,
                         float *one, float *two) {
    const block whole = {.s1 = p->c, .i1 = p->c};
    if (p->d->scores == FP32) {
        by_pairs(p, &whole, coef, one, two);
        return;
    }
    for (int s = 0; s < p->c; s += TILE)
        for (int i = 0; i <= s; i += TILE) {
            block b = {s, s + TILE < p->c ? s + TILE : p->c, i, 0, NULL};
            b.i1 = i == s ? b.s1 : i + TILE;
            const int middle = i == s ? s + (b.s1 - s) / 2 : s;
            b.anchor = p->gam + (int64_t)middle * p->K;
            if (i < s || anchor_fits(p, &b))
                by_anchor(p, &b, coef, one, two);
            else
                by_pairs(p, &b, coef, one, two);
        }
}

static void visit_scores_by_pairs(const pair_set *p, const block *b, const float *coef, float *one,
                                  float *two) {
    (void)coef;
    (void)two;
    scores_by_pairs(p, b, one);
}

static void visit_scores_by_anchor(const pair_set *p, const block *b, const float *coef, float *one,
                                   float *two) {
    (void)coef;
    (void)two;
    scores_by_anchor(p, b, one);
}

void pair_scores(const pair_set *p, float *score) {
    memset(score, 0, sizeof *score * (size_t)p->m * (size_t)p->n);
    visit_blocks(p, visit_scores_by_pairs, visit_scores_by_anchor, NULL, score, NULL);
}

void pair_gradients(const pair_set *p, const float *coef, float *dreaders, float *dwriters) {
    memset(dreaders, 0, sizeof *dreaders * (size_t)p->m * (size_t)p->K);
    memset(dwriters, 0, sizeof *dwriters * (size_t)p->n * (size_t)p->K);
    visit_blocks(p, gradients_by_pairs, gradients_by_anchor, coef, dreaders, dwriters);
}
