/* Scores of two factors, each with its decay from the chunk's start (chunk_factored.h). */
#include "chunk_factored.h"
#include "ref/arithmetic/elementary.h"
#include "ref/arithmetic/mm.h"

/* exp(sign gcum) o x of rows x [c per][K]; to be freed. */
static double *decayed(const dp_chunk *ch, const double *x, int per, int sign) {
    const int K = ch->K;
    double *y = dp_doubles((int64_t)ch->c * per * K);
    for (int i = 0; i < ch->c * per; i++)
        for (int k = 0; k < K; k++) {
            const double e =
                dp_round_arith(ch->base, dp_exp(sign * ch->gcum[(int64_t)(i / per) * K + k]));
            y[(int64_t)i * K + k] =
                dp_round_arith(ch->base, dp_store(ch->design.decays, e) * x[(int64_t)i * K + k]);
        }
    return y;
}

double *dp_factored_minus(const dp_chunk *ch) { return decayed(ch, ch->k, ch->R, -1); }

static void product(const dp_chunk *ch, dp_shape s, const double *A, const double *B, double *C) {
    dp_mm_by(ch->linear ? ch->linear : &dp_linear_own, ch->design.factors, s, A, B, C);
}

/* Is score [s][im] of a query one that counts? */
static int sees(const dp_chunk *ch, int s, int im) { return im / ch->R <= s; }

void dp_factored_forward(dp_chunk *ch) {
    const int c = ch->c, n = ch->n, K = ch->K;
    DP_OWN double *minus = dp_factored_minus(ch), *query = decayed(ch, ch->q, 1, 1),
                  *plus = decayed(ch, dp_chunk_erasing(ch), ch->R, 1),
                  *of_query = dp_doubles((int64_t)c * n), *of_keys = dp_doubles((int64_t)n * n);
    product(ch, (dp_shape){0, 1, c, n, K}, query, minus, of_query);
    product(ch, (dp_shape){0, 1, n, n, K}, plus, minus, of_keys);
    for (int s = 0; s < c; s++)
        for (int i = 0; i < n; i++)
            if (sees(ch, s, i))
                ch->Aqk[(int64_t)s * n + i] = dp_round_arith(
                    ch->base, dp_round_arith(ch->base, ch->scale) * of_query[(int64_t)s * n + i]);
    for (int s = 0; s < n; s++)
        for (int i = 0; i < n; i++)
            if (dp_chunk_reads(ch, s, i)) ch->L[(int64_t)s * n + i] = of_keys[(int64_t)s * n + i];
}

/* to [rows per][K] += exp(sign gcum) o x */
static void add_decayed(const dp_chunk *ch, const double *x, int per, int sign, double *to) {
    DP_OWN double *y = decayed(ch, x, per, sign);
    for (int64_t i = 0; i < (int64_t)ch->c * per * ch->K; i++)
        to[i] = dp_round_arith(ch->base, to[i] + y[i]);
}

void dp_factored_backward(const dp_chunk *ch, const dp_pair_adjoint *a) {
    const int c = ch->c, n = ch->n, K = ch->K, R = ch->R;
    DP_OWN double *minus = dp_factored_minus(ch), *query = decayed(ch, ch->q, 1, 1),
                  *plus = decayed(ch, dp_chunk_erasing(ch), R, 1),
                  *dP = dp_copy(a->dP, (int64_t)c * n), *dL = dp_copy(a->dL, (int64_t)n * n),
                  *x = dp_doubles((int64_t)n * K);
    for (int s = 0; s < c; s++)
        for (int i = 0; i < n; i++)
            if (!sees(ch, s, i)) dP[(int64_t)s * n + i] = 0;
    for (int s = 0; s < n; s++)
        for (int i = 0; i < n; i++)
            if (!dp_chunk_reads(ch, s, i)) dL[(int64_t)s * n + i] = 0;
    product(ch, (dp_shape){0, 0, c, K, n}, dP, minus, x);
    add_decayed(ch, x, 1, 1, a->dq);
    product(ch, (dp_shape){0, 0, n, K, n}, dL, minus, x);
    add_decayed(ch, x, R, 1, a->dkr);
    product(ch, (dp_shape){1, 0, n, K, c}, dP, query, x);
    add_decayed(ch, x, R, -1, a->dkw);
    product(ch, (dp_shape){1, 0, n, K, n}, dL, plus, x);
    add_decayed(ch, x, R, -1, a->dkw);
}
