/* Scores and their gradients from gated operands: see chunk_gated.h for the arithmetic. */
#include "chunk_gated.h"
#include "ref/arithmetic/elementary.h"
#include "ref/vocabulary/design.h"

#include <math.h>
#include <stdlib.h>

#define BLOCK 16

/* In quarters of a diagonal block, by ch->design.anchor. */
static const int ANCHOR[DP_ANCHORS] = {2, 0, 1, 3};

static int anchor(const dp_chunk *ch, int s, int i) {
    const int block = s / BLOCK * BLOCK;
    const int rows = block + BLOCK < ch->c ? BLOCK : ch->c - block;
    return i < block ? block : block + rows * ANCHOR[ch->design.anchor] / 4;
}

/* An operand, or an adjoint, as the products take it. */
static float operand(const dp_chunk *ch, double x) {
    return (float)dp_store(ch->design.gated == DP_SCORES_TF32 ? DP_TF32 : ch->design.factors, x);
}

static float decay_over(const dp_chunk *ch, float g) {
    return (float)dp_store(ch->design.decays, dp_expf(g));
}

/* One channel of the score of two tokens: both operands, and the decays (dleft, dright) that
 * multiply their adjoints. */
typedef struct {
    float left, right, dleft, dright;
} factors;

/* Where an operand would leave the range that bf16 holds, kernels form the pair by itself. */
#define FAR 76 /* exp(76) = 2^110 */

static factors at_channel(const dp_chunk *ch, int s, int a, int i, int x, double left,
                          double right) {
    const float to_s = (float)ch->gcum[s * ch->K + x] - (float)ch->gcum[a * ch->K + x];
    const float to_a = (float)ch->gcum[a * ch->K + x] - (float)ch->gcum[i * ch->K + x];
    if (fabsf(to_s) > FAR || fabsf(to_a) > FAR) {
        const float e = dp_expf((float)ch->gcum[s * ch->K + x] - (float)ch->gcum[i * ch->K + x]);
        return (factors){(float)left * e, (float)right, e, 1};
    }
    const float es = decay_over(ch, to_s);
    const float ea = decay_over(ch, to_a);
    const float l = operand(ch, (float)left * es);
    const float r = operand(ch, (float)right * ea);
    return (factors){l, r, es, ea};
}

double dp_gated_key(const dp_chunk *ch, int t, int x, double k, double *left) {
    const float g = (float)ch->gcum[t * ch->K + x];
    const float at = (float)ch->gcum[anchor(ch, t, t) * ch->K + x];
    const float end = (float)ch->gcum[(ch->c - 1) * ch->K + x];
    if (fabsf(at - g) > FAR) return k;
    *left = decay_over(ch, end - at);
    return operand(ch, (float)k * decay_over(ch, at - g));
}

static const double *key(const dp_chunk *ch, int row) { return ch->k + (int64_t)row * ch->K; }
static const double *erasing(const dp_chunk *ch, int row) {
    return dp_chunk_erasing(ch) + (int64_t)row * ch->K;
}

/* ---- what a row puts into all of its scores -------------------------------------------------- */

/* A row at an anchor, [K] each: its decay to or from there, its operand; far: some channel is. */
typedef struct {
    float *e, *operand;
    int far;
} side;

/* The operands of a block's scores.
 *   left    rows of the block, each at two anchors: for earlier blocks, and for its own block
 *   right   keys of the block and of all tokens before it */
typedef struct {
    const dp_chunk *ch;
    int block;
    float *room;
    side *left, *right; /* [row of the block][anchor][q, erasing of R]; [token][R] */
} sides;

static side *left_at(const sides *x, int s, int i, int which) {
    return x->left + ((s - x->block) * 2 + (i >= x->block)) * (1 + x->ch->R) + which;
}

static sides sides_new(const dp_chunk *ch) {
    const int nleft = BLOCK * 2 * (1 + ch->R), n = nleft + ch->c * ch->R;
    sides x = {.ch = ch, .room = dp_alloc(2 * (size_t)(n * ch->K), sizeof(float))};
    x.left = dp_calloc((size_t)n, sizeof *x.left);
    x.right = x.left + nleft;
    for (int k = 0; k < n; k++)
        x.left[k] =
            (side){x.room + 2 * (int64_t)k * ch->K, x.room + (2 * (int64_t)k + 1) * ch->K, 0};
    return x;
}

static void sides_free(sides *x) {
    free(x->left);
    free(x->room);
}

/* The decay is that from token `from` to token `to`. */
static void fill(const dp_chunk *ch, int from, int to, const double *row, side *y) {
    y->far = 0;
    for (int x = 0; x < ch->K; x++) {
        const float g = (float)ch->gcum[from * ch->K + x] - (float)ch->gcum[to * ch->K + x];
        y->far |= fabsf(g) > FAR;
        y->e[x] = decay_over(ch, g);
        y->operand[x] = operand(ch, (float)row[x] * y->e[x]);
    }
}

/* For the rows from s on, the first of a block. */
static void sides_of_block(sides *x, int s) {
    const dp_chunk *ch = x->ch;
    const int R = ch->R, end = s + BLOCK < ch->c ? s + BLOCK : ch->c;
    x->block = s;
    for (int t = s; t < end; t++)
        for (int own = s == 0; own < 2; own++) {
            const int i = own ? s : 0,
                      a = anchor(ch, t, i); /* a token before the block, one of it */
            fill(ch, t, a, ch->q + (int64_t)t * ch->K, left_at(x, t, i, 0));
            for (int j = 0; j < R; j++)
                fill(ch, t, a, erasing(ch, t * R + j), left_at(x, t, i, 1 + j));
        }
    for (int im = 0; im < end * R; im++)
        fill(ch, anchor(ch, s, im / R), im / R, key(ch, im), &x->right[im]);
}

/* The score of row `which` of token s with key im. */
static float score(const sides *y, int s, int im, int which) {
    const dp_chunk *ch = y->ch;
    const int i = im / ch->R, a = anchor(ch, s, i);
    const side *l = left_at(y, s, i, which), *r = &y->right[im];
    const double *left = which ? erasing(ch, s * ch->R + which - 1) : ch->q + (int64_t)s * ch->K;
    float sum = 0;
    if (l->far || r->far)
        for (int x = 0; x < ch->K; x++) {
            const factors f = at_channel(ch, s, a, i, x, left[x], key(ch, im)[x]);
            sum += f.left * f.right;
        }
    else
        for (int x = 0; x < ch->K; x++)
            sum += l->operand[x] * r->operand[x];
    return sum;
}

void dp_gated_forward(dp_chunk *ch) {
    DP_FREED(sides_free) sides y = sides_new(ch);
    for (int s = 0; s < ch->c; s++) {
        if (s % BLOCK == 0) sides_of_block(&y, s);
        for (int im = 0; im < (s + 1) * ch->R; im++) {
            ch->Aqk[(int64_t)s * ch->n + im] = (float)ch->scale * score(&y, s, im, 0);
            for (int j = dp_chunk_reader(ch, s, im / ch->R, im % ch->R); j < ch->R; j++)
                ch->L[((int64_t)s * ch->R + j) * ch->n + im] = score(&y, s, im, 1 + j);
        }
    }
}

/* One pair of rows with the adjoint of its score: left (token s) and right (token i) operands. */
typedef struct {
    const dp_chunk *ch;
    int s, i, a;
    const side *l, *r;
} pair;

static factors in_pair(const pair *p, int x, const double *left, const double *right) {
    if (p->l->far || p->r->far) return at_channel(p->ch, p->s, p->a, p->i, x, left[x], right[x]);
    return (factors){p->l->operand[x], p->r->operand[x], p->l->e[x], p->r->e[x]};
}

static void through_pair(const pair *p, double score, const double *left, const double *right,
                         double *dleft, double *dright, double *dgam) {
    const float d = operand(p->ch, score);
    const int paired = p->ch->design.gated == DP_SCORES_PAIRED;
    double *at_s = dgam + (int64_t)p->s * p->ch->K, *at_i = dgam + (int64_t)p->i * p->ch->K;
    for (int x = 0; x < p->ch->K; x++) {
        const factors f = in_pair(p, x, left, right);
        const float to_left = d * f.right;
        const float to_right = d * f.left;
        dleft[x] = (float)dleft[x] + to_left * f.dleft;
        dright[x] = (float)dright[x] + to_right * f.dright;
        at_s[x] = (float)at_s[x] + to_left * (paired ? f.left : (float)left[x] * f.dleft);
        at_i[x] = (float)at_i[x] - to_right * (paired ? f.right : (float)right[x] * f.dright);
    }
}

/* Token s through key m of token i. */
static void through_key(const sides *y, int s, int i, int m, const dp_gated_gradients *g) {
    const dp_chunk *ch = y->ch;
    const int64_t K = ch->K, im = (int64_t)i * ch->R + m;
    pair p = {ch, s, i, anchor(ch, s, i), left_at(y, s, i, 0), &y->right[im]};
    through_pair(&p, g->dP[s * ch->n + im], ch->q + s * K, key(ch, (int)im), g->dq + s * K,
                 g->dk_write + im * K, g->dgam);
    for (int j = dp_chunk_reader(ch, s, i, m); j < ch->R; j++) {
        const int64_t sj = (int64_t)s * ch->R + j;
        p.l = left_at(y, s, i, 1 + j);
        through_pair(&p, g->dL[sj * ch->n + im], erasing(ch, (int)sj), key(ch, (int)im),
                     g->dk_read + sj * K, g->dk_write + im * K, g->dgam);
    }
}

void dp_gated_backward(const dp_chunk *ch, const dp_gated_gradients *g) {
    DP_FREED(sides_free) sides y = sides_new(ch);
    for (int s = 0; s < ch->c; s++) {
        if (s % BLOCK == 0) sides_of_block(&y, s);
        for (int im = 0; im < (s + 1) * ch->R; im++)
            through_key(&y, s, im / ch->R, im % ch->R, g);
    }
}
