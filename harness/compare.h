/* harness/compare.h - errors of one tensor against the truth, row by row, and the verdict on them.
 *
 * A tensor is [rows][width]; each row belongs to a rank, a head and (where there is one) a token. A row passes when
 *     |got - want|_2 <= bound + radius of the truth
 * and the tensor passes when every judged row does. There is no typed tolerance anywhere: a tensor without bounds is `unjudged`, and so is
 * one whose bound, taken over the whole tensor, is not below the tensor itself: staying within it proves nothing (exceeding it still fails).
 * Non-finite values: where the truth is not finite the row must not be finite either. A finite truth with a non-finite result
 * fails, except in the same chunk and head as a non-finite truth (dense tiles multiply masked zeros by NaN): such rows are
 * left unjudged and counted in `why`, and so are rows whose bound is not finite.
 * Then the expected tier (excess.h), where there are draws: it fails what is within its bound but more than the formats make of these inputs, and
 * passes what the bound leaves unjudged.
 */
#ifndef DP_COMPARE_H
#define DP_COMPARE_H
#include "excess.h"
#include <stdint.h>
#ifdef __cplusplus
extern "C" {
#endif

typedef enum { DP_PASS, DP_FAIL, DP_SKIPPED, DP_UNJUDGED, DP_NVERDICTS } dp_verdict;
extern const char *const dp_verdict_names[DP_NVERDICTS];

typedef struct { int rank, head, sequence, chunk; int64_t token; } dp_place;   /* chunk, sequence, token: -1 when there is none */
typedef void dp_place_fn(const void *ctx, int64_t row, dp_place *at);

typedef struct {
    const char *name;
    int N, heads;
    int64_t rows, width;
    const double *got, *want, *want_lo;   /* want_lo may be NULL */
    const double *rad;                    /* [rows], may be NULL (exact) */
    const double *bound;                  /* [rows], NULL: unjudged */
    dp_place_fn *place;
    const void *ctx;
    int64_t tokens;                       /* > 0: also windows of 64 tokens */
    const char *why_unjudged;
    int ndraw;                            /* > 0: also the expected tier, from draws (expected.h) */
    int64_t ncell;
    const double *e2;                     /* [ndraw][ncell], cells as dp_cell numbers them */
    double safety;                        /* factor of its limits (excess.h) */
    double unit, tiny;                    /* one rounding of the result itself: relative, and of an entry */
} dp_compare_in;

typedef struct { dp_place at; int index; double got, want, err, bound; } dp_row;   /* index: the entry with the largest error; err, bound: of the row */

typedef struct {
    char name[24];
    int N, heads;
    double rel_fro, bound, ratio;         /* bound relative to |want|_F; NAN when unjudged */
    double *per_rank, *per_head, *per_rank_ratio;   /* [N], [N*heads], [N]; NAN: none */
    dp_place worst;                      /* row with the largest worst_rel */
    dp_place over;                       /* row with the largest error for its bound; rank -1: none was judged */
    int worst_index;
    double worst_got, worst_want, worst_rel;        /* worst_rel: |err|_2 over the rms row norm of its head */
    int64_t nover;                       /* rows over their bound, or not finite where the truth is (or the other way round) */
    dp_row first, last;                  /* of those, in the order of the tensor; nover = 0: none */
    int nwindow;
    double *window;
    dp_excess expected;                  /* excess NAN: no draws */
    const char *tier;                    /* what decided: "exact", "bound", "expected"; "" when unjudged */
    dp_verdict verdict;
    char why[512];
    char source[320];            /* exact cases: whose data stands there (source.h); "": not found */
} dp_judgement;

void dp_compare(const dp_compare_in *in, dp_judgement *out);
void dp_judgement_free(dp_judgement *j);
/* Of two failed tensors: does b say more than a? What broke its bound comes before what is too large for its formats. a may be NULL. */
int dp_judgement_says_more(const dp_judgement *a, const dp_judgement *b);
double dp_judgement_times(const dp_judgement *j);              /* error over its bound, or over its limit where the expected tier decided */
const dp_place *dp_judgement_place(const dp_judgement *j);     /* where it failed, or the row with the largest error */
/* fail beats unjudged beats skipped beats pass */
dp_verdict dp_verdict_worse(dp_verdict a, dp_verdict b);

#ifdef __cplusplus
}
#endif
#endif
