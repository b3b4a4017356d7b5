/* Scores and their gradients from gated operands: see chunk_gated.h for the arithmetic. */
#include "chunk_gated.h"
#include "ref/arithmetic/elementary.h"
#include "ref/vocabulary/design.h"

#include <math.h>

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

/* What the two rows of a pair of tokens put into channel x of their score: left and right operands,
 * and what their adjoints are multiplied with beyond the other operand. */
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

static float score(const dp_chunk *ch, int s, int i, const double *left, const double *right) {
    const int a = anchor(ch, s, i);
    float sum = 0;
    for (int x = 0; x < ch->K; x++) {
        const factors f = at_channel(ch, s, a, i, x, left[x], right[x]);
        sum += f.left * f.right;
    }
    return sum;
}

void dp_gated_forward(dp_chunk *ch) {
    for (int s = 0; s < ch->c; s++)
        for (int im = 0; im < (s + 1) * ch->R; im++) {
            const int i = im / ch->R;
            const double *q = ch->q + (int64_t)s * ch->K;
            ch->Aqk[(int64_t)s * ch->n + im] = (float)ch->scale * score(ch, s, i, q, key(ch, im));
            const int first = dp_chunk_reader(ch, s, i, im % ch->R);
            for (int sj = s * ch->R + first; sj < (s + 1) * ch->R; sj++)
                ch->L[(int64_t)sj * ch->n + im] = score(ch, s, i, erasing(ch, sj), key(ch, im));
        }
}

/* One pair of rows with the adjoint of its score: left (token s) and right (token i) operands. */
typedef struct {
    const dp_chunk *ch;
    int s, i, a;
} pair;

static void through_pair(const pair *p, double score, const double *left, const double *right,
                         double *dleft, double *dright, double *dgam) {
    const float d = operand(p->ch, score);
    const int paired = p->ch->design.gated == DP_SCORES_PAIRED;
    double *at_s = dgam + (int64_t)p->s * p->ch->K, *at_i = dgam + (int64_t)p->i * p->ch->K;
    for (int x = 0; x < p->ch->K; x++) {
        const factors f = at_channel(p->ch, p->s, p->a, p->i, x, left[x], right[x]);
        const float to_left = d * f.right;
        const float to_right = d * f.left;
        dleft[x] = (float)dleft[x] + to_left * f.dleft;
        dright[x] = (float)dright[x] + to_right * f.dright;
        at_s[x] = (float)at_s[x] + to_left * (paired ? f.left : (float)left[x] * f.dleft);
        at_i[x] = (float)at_i[x] - to_right * (paired ? f.right : (float)right[x] * f.dright);
    }
}

void dp_gated_backward(const dp_chunk *ch, const dp_gated_gradients *g) {
    const int64_t K = ch->K;
    for (int s = 0; s < ch->c; s++)
        for (int i = 0; i <= s; i++) {
            const pair p = {ch, s, i, anchor(ch, s, i)};
            for (int m = 0; m < ch->R; m++) {
                const int64_t im = i * ch->R + m;
                through_pair(&p, g->dP[s * ch->n + im], ch->q + s * K, key(ch, (int)im),
                             g->dq + s * K, g->dk_write + im * K, g->dgam);
                for (int j = dp_chunk_reader(ch, s, i, m); j < ch->R; j++) {
                    const int64_t sj = s * ch->R + j;
                    through_pair(&p, g->dL[sj * ch->n + im], erasing(ch, (int)sj), key(ch, (int)im),
                                 g->dk_read + sj * K, g->dk_write + im * K, g->dgam);
                }
            }
        }
}
