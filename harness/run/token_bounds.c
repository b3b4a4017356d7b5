/* Why bounds of chunks of one token hold for kernels that have no chunks (token_bounds.h). */
#include "token_bounds.h"
#include "harness/bound/store_bound.h"
#include "ref/arithmetic/norms.h"
#include "ref/vocabulary/stored.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

int dp_token_design_is_bounded(const dp_design *d) {
    int fp16 = 0;
    for (int i = 0; i < DP_NRESULTS; i++)
        fp16 |= d->out[i] == DP_FP16; /* it may leave its range */
    return !d->chunk && d->base != DP_BASE_FP64 && !d->stored_inputs && d->state == DP_FP32 &&
           d->dstate == DP_FP32 && !fp16;
}

/* Every token squares the entries of its transition into those of a state and of a product. */
double dp_token_bounds_seconds(const dp_problem *p) {
    return 4e-9 * (double)p->T * p->HV * p->K * p->K * (p->K + p->V);
}

/* A recurrent kernel is the chunk machine in fp32 with one token a chunk. There gcum = g, e the
 * keys that erase,
 *
 *     w = b e exp(g)   u = b v   X = u - w S   S <- exp(g) S + k X   o = (scale q exp(g)) S + Aqk X
 *
 * with Aqk = scale q k', and for several keys that read one after another the solve with their
 * mask. Token by token (math.md b, i) it is E = v - e (exp(g) S), X = b E, S <- exp(g) S + k X, o =
 * scale q S. Each rounding of the latter has one of the former beside it, of no smaller absolute
 * value:
 *
 *     exp(g), b, norms of q, k   the same
 *     exp(g) S                   u |exp(g) S|           w: e exp(g), and S's own term of its sum
 *     e (exp(g) S), v - ..       gamma_K |e||exp(g) S|  w S, a sum of K terms, taken from u
 *     b E                        u |b E|                b in w and u
 *     exp(g) S + k X             2 u                    a sum of n + 1 products
 *     q S, S as rounded          gamma_K |q||S|         both sums of o: |S| is at most
 *                                                       |exp(g) S| + |k||X|
 *
 * gamma_n holds for sums in any order, fused or not. DPLR reads S before its decay; there e is its
 * factor over exp(g), which adds a rounding. M is the recurrence of the identity. The bound has the
 * product of factors exp(g) - k w. Their diagonal may cancel; there the rounding of k w stands for
 * that of products. The adjoint makes the same operations backwards. The row sum of dS o exp(g) S
 * in dg is that of dS, scale q do' and e dE, in three sums there. Ranks round the sent M, H and
 * states as the payload says, and multiply, as there. Results in a shorter format are rounded once
 * more. */
dp_design dp_token_design(const dp_design *recurrent) {
    dp_design d = dp_design_of(DP_BASE_FP32);
    d.chunk = 1;
    d.sending = recurrent->sending;
    return d;
}

/* Adds the last store of each sequence's state. */
static void store_states(const dp_problem *p, dp_format f, const double *S, double *bound) {
    const int64_t n = (int64_t)p->HV * p->K * p->V;
    double *more = dp_doubles(p->HV);
    for (int i = 0; S && bound && f != DP_FP64 && i < p->Nseq; i++) {
        double *off = bound + (int64_t)i * p->HV;
        for (int h = 0; h < p->HV; h++)
            more[h] = dp_stored_error(f, p->HV, p->K, p->V, S + i * n, off, h);
        for (int h = 0; h < p->HV; h++)
            off[h] += more[h];
    }
    free(more);
}

/* x stored is off by u |x|, |x| <= |want| + bound, or by half the spacing of its subnormals.
 * Results in a longer format than `bounded` get no addition. */
void dp_bounds_store(const dp_problem *p, const dp_design *bounded, const dp_design *design,
                     const double *const want[DP_NRESULTS], dp_error_bound *b) {
    for (int i = 0; i < DP_NRESULTS; i++) {
        const dp_format f = design->out[i];
        const double u = ldexp(1, -(int)dp_formats[f].bits),
                     tiny = f == DP_BF16 ? 0x1p-134 : 0x1p-150;
        int64_t rows, width;
        dp_result_shape(p, i, &rows, &width);
        if (!dp_leaves(i) || dp_formats[f].bits >= dp_formats[bounded->out[i]].bits) continue;
        for (int64_t r = 0; b->row[i] && want[i] && r < rows; r++)
            b->row[i][r] += u * (dp_norm_fro(width, want[i] + r * width) + b->row[i][r]) +
                            sqrt((double)width) * tiny;
    }
    store_states(p, design->final_state, want[DP_RESULT_FINAL_STATE],
                 b->row[DP_RESULT_FINAL_STATE]);
}

/* Marks in first [T] with 1 every token that a chunk of `chunk` tokens begins with. */
static void mark_chunks(const dp_problem *p, int N, const unsigned char *first_of_call, int chunk,
                        unsigned char *first) {
    for (int i = 0; i < p->Nseq; i++)
        for (int64_t t = p->cu[i], n = 0; t < p->cu[i + 1]; t++, n++) {
            const int other_rank = N > 1 && t &&
                                   dp_own_part_of(p->own.kind, p->T, N, t) !=
                                       dp_own_part_of(p->own.kind, p->T, N, t - 1);
            if (other_rank || (first_of_call && first_of_call[t])) n = 0;
            first[t] = n % chunk == 0;
        }
}

void dp_bounds_keep(const dp_problem *p, int N, const unsigned char *first_of_call,
                    const dp_session *session, const dp_design *design, dp_error_bound *b) {
    const int own = design->state != dp_design_of(design->base).state, gradients = p->dout != NULL;
    unsigned char *mark[3] = {dp_calloc((size_t)p->T + 1, 1), dp_calloc((size_t)p->Nseq, 1),
                              dp_calloc((size_t)p->Nseq, 1)};
    dp_stores at[3];
    int n = 0;
    if (first_of_call) dp_session_ended(session, p->cu, p->Nseq, mark[1]);
    const dp_format of_calls[2] = {session->kept, design->final_state};
    for (int i = 0; i < 2 && first_of_call; i++)
        if (of_calls[i] != DP_FP64)
            at[n++] = (dp_stores){of_calls[i], first_of_call, mark[1], 0, 0, 0};
    if (own) {
        mark_chunks(p, N, first_of_call, design->chunk ? design->chunk : 1, mark[0]);
        memset(mark[2], 1, (size_t)p->Nseq);
        at[n++] =
            (dp_stores){design->state, mark[0], mark[2], 1, !design->chunk, design->read_kept};
    }
    if (n) dp_store_bounds(p, N, design->sending, n, at, gradients && dp_store_has_gradients(p), b);
    for (int i = 0; i < 3; i++)
        free(mark[i]);
}
