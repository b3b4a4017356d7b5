/* harness/verdict/compare.h - errors of one tensor against the truth, row by row, and the verdict.
 *
 * A tensor is [rows][width]; each row belongs to a rank, a head and (where there is one) a token.
 * Two tiers look at it; no tolerance is typed anywhere.
 *
 * bound     A row passes when |got - want|_2 <= bound + radius of the truth. A tensor whose bounds
 *           together are not below the tensor itself is unjudged by them: staying within proves
 *           nothing (exceeding still fails).
 * expected  Where there are draws (draws.h): fails what is more than the declared design makes of
 *           these inputs, within its bound or not, and judges what the bound leaves open
 *           (levels.h). Where no bound is derived for the design, this tier alone decides.
 *
 * A tensor passes when every entry that it has a value for lies under at least one limit. A head of
 * zeros must not pass. Else it is unjudged, and `why` says what is missing.
 *
 * Values that are not finite, entry by entry: where the truth is not finite, the result must not be
 * either. A finite truth with a result that is not finite fails. An exception is the chunk and head
 * of a truth that is not finite, since dense tiles multiply masked zeros by NaN. Such entries hold
 * no value, and rows of them are counted in `why`.
 */
#ifndef DP_COMPARE_H
#define DP_COMPARE_H
#include "levels.h"
#ifdef __cplusplus
extern "C" {
#endif

typedef enum { DP_PASS, DP_FAIL, DP_SKIPPED, DP_UNJUDGED, DP_NVERDICTS } dp_verdict;
extern const char *const dp_verdict_names[DP_NVERDICTS];

/* chunk, sequence, token: -1 where there is none. chunk numbers the windows of 64 tokens. */
typedef struct {
    int rank, head, sequence, chunk;
    int64_t token;
} dp_place;
typedef void dp_place_fn(const void *ctx, int64_t row, dp_place *at);

typedef struct {
    const char *name;
    int N, heads;
    int64_t rows, width;
    const double *got, *want;
    const double *want_lo; /* what rounding the truth to double left; NULL: nothing */
    const double *rad;     /* [rows] radius of the truth; NULL: exact */
    const double *bound;   /* [rows]; NULL: none is derived */
    /* [rows] the loss that the subject's claim allows a row (ref/bound/drop.h). It is subtracted
     * from its error, in its own direction, before any comparison; NULL: nothing */
    const double *lost;
    int bound_shown; /* 1: of another design: shown, but the draws decide */
    dp_place_fn *place;
    const void *ctx;
    int64_t tokens; /* > 0: rows are tokens' */
    const char *why_unjudged;
    int subrows;           /* as the draws' rows are (dp_row_map); 0: as 1 */
    const dp_draws *draws; /* NULL: no expected tier */
    const double *freedom; /* [rows] of errors at most (row_map.h); NULL: no limit */
    dp_allowance allowance;
    /* One rounding of the result.
     *   unit        in the arithmetic that makes it, relative also to its head's rows, with which
     *               it is summed
     *   store       in the format that it is kept in, relative to the number alone
     *   tiny        of an entry near zero
     *   file_unit   unit roundoff of a coarser file, else 0 */
    double unit, store, tiny, file_unit;
    /* One rounding of an operand, for rows whose truth is 0, or 2^-126 of their head's, as terms
     * cancel. 0 where a result has none. */
    double cancelled;
    double seen_most; /* this factor of the tensor is seen, else it is unjudged; 0: any */
    int may_vanish;   /* 1: below tiny in every head, zeros are right */
    int of_heads; /* rows are sums of one head over all tokens: a power is of the whole tensor */
    double
        rounding; /* of what the result is made of, relative: what no row's draws fall short of */
} dp_compare_in;

/* A row and its entry with the largest error. err, bound, size: |error|, bound and |truth| of the
 * row. */
typedef struct {
    dp_place at;
    int index;
    double got, want, err, bound, size;
} dp_row;

/* The reason why a tensor cannot be compared. */
typedef enum { DP_FLAW_NONE, DP_FLAW_UNWRITTEN, DP_FLAW_NOT_FINITE } dp_flaw;

typedef struct {
    char name[24];
    int N, heads;
    double rel_fro; /* |error|_F over |truth|_F of the tensor */
    double bound,
        ratio; /* bound relative to |want|_F; largest error / bound of a row; NAN: unjudged */
    double *per_rank, *per_head, *per_rank_ratio; /* [N], [N*heads], [N]; NAN: none */
    double scale; /* rms over its rows of |truth|, of the head of the row that `at` names */
    dp_row worst; /* the largest error for the rms row of its head: worst_rel */
    double worst_rel;
    dp_row over;   /* the largest error for its bound; at.rank -1: none was judged */
    int64_t nover; /* rows over their bound, or finite where the truth is not, or not where it is */
    dp_row first, last; /* of those, in the order of the tensor; nover = 0: none */
    int64_t nblank;     /* rows of zeros where the truth is not small */
    dp_row failed;      /* the row that carries the failure; at.rank -1: none */
    int nwindow;
    double *window;            /* [nwindow] largest over heads of |error| / |truth| in 64 tokens */
    dp_levels_result expected; /* excess NAN: no draws */
    dp_levels_result before;   /* of the first draws, where a second set decided; else excess NAN */
    const char *tier;          /* what decided: "exact", "bound", "expected"; "" when unjudged */
    double times;              /* error over the limit of the tier that decided; NAN: none */
    dp_verdict verdict;
    dp_flaw flaw;     /* what `why` says of its entries */
    double seen;      /* power: a tensor multiplied by this or more had failed; INFINITY: none */
    double seen_head; /* the same of one head, of the head of which it is largest */
    int blind_head;   /* that head; -1: none */
    int allowed;      /* unjudged, and the case or the caller says that it may be */
    char why[512];
    char source[320]; /* exact cases: whose data stands there (source.h); "": not found */
} dp_judgement;

/* Fills *out, which dp_judgement_free frees; nothing of *in is kept. */
void dp_compare(const dp_compare_in *in, dp_judgement *out);
/* Frees what it holds; the struct is the caller's. */
void dp_judgement_free(dp_judgement *j);

/* Within this of a limit, on either side, a verdict is marginal: another set of draws may decide.
 */
#define DP_MARGIN 1.3
int dp_judgement_marginal(const dp_judgement *j);

/* Does failed tensor b say more than failed tensor a? Entries that are unfit come first, then what
 * broke its bound, then what is too large for its formats. a may be NULL. */
int dp_judgement_says_more(const dp_judgement *a, const dp_judgement *b);

/* Where it failed, or the row with the largest error. */
const dp_row *dp_judgement_row(const dp_judgement *j);

/* x rounded to nearest at roundoff u, a power of 2, less x; u 0: 0. */
double dp_rounding_error(double x, double u);

#ifdef __cplusplus
}
#endif
#endif
