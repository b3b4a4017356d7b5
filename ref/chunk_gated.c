/* Scores and their gradients from gated operands: see chunk_gated.h for the arithmetic. */
#include "chunk_gated.h"
#include "design.h"
#include "elementary.h"

#include <stdlib.h>

#define BLOCK 16

static int anchor(const dp_chunk *ch, int s, int i) {
    const int block = s / BLOCK * BLOCK;
    const int end = block + BLOCK < ch->c ? block + BLOCK : ch->c;
    return i < block ? block : (block + end) / 2;
}

static float decay(const dp_chunk *ch, int from, int to, int x) {
    return dp_expf((float)ch->gcum[from * ch->K + x] - (float)ch->gcum[to * ch->K + x]);
}

/* row o exp(gcum_from - gcum_to), rounded to the format of factors */
static void gate_row(const dp_chunk *ch, const double *row, int from, int to, float *out) {
    for (int x = 0; x < ch->K; x++)
        out[x] = (float)dp_store(ch->factors, (float)row[x] * decay(ch, from, to, x));
}

static float dot(const float *a, const float *b, int n) {
    float s = 0;
    for (int x = 0; x < n; x++)
        s += a[x] * b[x];
    return s;
}

static const double *key(const dp_chunk *ch, int row) { return ch->k + (int64_t)row * ch->K; }

/* Scores of token s: its query and keys against the keys of token i. */
static void scores(dp_chunk *ch, int s, int i, float *own, float *other) {
    const int a = anchor(ch, s, i);
    for (int m = 0; m < ch->R; m++) {
        const int im = i * ch->R + m;
        gate_row(ch, key(ch, im), a, i, other);
        gate_row(ch, ch->q + (int64_t)s * ch->K, s, a, own);
        ch->Aqk[(int64_t)s * ch->n + im] = (float)ch->scale * dot(own, other, ch->K);
        for (int j = 0; i < s && j < ch->R; j++) {
            gate_row(ch, key(ch, s * ch->R + j), s, a, own);
            ch->L[(int64_t)(s * ch->R + j) * ch->n + im] = dot(own, other, ch->K);
        }
    }
}

void dp_gated_forward(dp_chunk *ch) {
    float *room = dp_calloc((size_t)(2 * ch->K), sizeof *room);
    for (int s = 0; s < ch->c; s++)
        for (int i = 0; i <= s; i++)
            scores(ch, s, i, room, room + ch->K);
    free(room);
}

/* One pair of rows with the adjoint of its score: left (token s) and right (token i) operands. */
typedef struct {
    const dp_chunk *ch;
    int s, i, a;
    float *room; /* [2 K] */
} pair;

static void through_pair(const pair *p, double score, const double *left, const double *right,
                         double *dleft, double *dright) {
    const int K = p->ch->K;
    const float d = (float)dp_store(p->ch->factors, score);
    float *l = p->room;
    float *r = p->room + K;
    gate_row(p->ch, left, p->s, p->a, l);
    gate_row(p->ch, right, p->a, p->i, r);
    for (int x = 0; x < K; x++) {
        const float to_left = d * r[x] * decay(p->ch, p->s, p->a, x);
        const float to_right = d * l[x] * decay(p->ch, p->a, p->i, x);
        dleft[x] = (float)dleft[x] + to_left;
        dright[x] = (float)dright[x] + to_right;
    }
}

void dp_gated_backward(const dp_chunk *ch, const dp_gated_gradients *g) {
    const int64_t K = ch->K;
    float *room = dp_calloc((size_t)(2 * K), sizeof *room);
    for (int s = 0; s < ch->c; s++)
        for (int i = 0; i <= s; i++) {
            const pair p = {ch, s, i, anchor(ch, s, i), room};
            for (int m = 0; m < ch->R; m++) {
                const int64_t im = i * ch->R + m;
                through_pair(&p, g->dP[s * ch->n + im], ch->q + s * K, key(ch, (int)im),
                             g->dq + s * K, g->dk_write + im * K);
                for (int j = 0; i < s && j < ch->R; j++) {
                    const int64_t sj = s * ch->R + j;
                    through_pair(&p, g->dL[sj * ch->n + im], key(ch, (int)sj), key(ch, (int)im),
                                 g->dk_read + sj * K, g->dk_write + im * K);
                }
            }
        }
    free(room);
}
