/* harness/verdict/compare.h - errors of one tensor against the truth, row by row, and the verdict.
 *
 * A tensor is [rows][width]; each row belongs to a rank, a head and, in most tensors, a token. Two
 * tiers judge the tensor. No tolerance is a chosen constant.
 *
 * bound     A row passes when |got - want|_2 <= bound + radius of the truth. If the bounds of a
 *           tensor together are not below the tensor itself, they do not judge it: errors within
 *           them prove nothing (errors above them still fail).
 * expected  Needs draws (draws.h). An error fails if it exceeds the errors that the declared design
 *           makes on these inputs (levels.h), even within its bound. This tier also judges tensors
 *           that the bound leaves unjudged. Designs without a derived bound have this tier alone.
 *
 * A tensor passes when each of its finite entries is below at least one limit. Zeros must not pass
 * in a head, nor in rows of a quarter of its norm. Otherwise it is unjudged, and `why` names
 * the missing limit.
 *
 * Values that are not finite are judged by entry. If the truth is not finite, the result must not
 * be finite either. If the truth is finite, a result that is not finite fails. The exception is the
 * chunk and head of a truth that is not finite, since dense tiles multiply masked zeros by NaN.
 * Such entries have no value, and `why` counts their rows. If inputs are finite, such a truth
 * leaves fp64 and is not judged.
 */
#pragma once
#include "levels.h"
#include "ref/vocabulary/problem.h"

typedef enum { DP_PASS, DP_FAIL, DP_SKIPPED, DP_UNJUDGED, DP_NVERDICTS } dp_verdict;
extern const char *const dp_verdict_names[DP_NVERDICTS];

/* The place of a row; chunk, sequence, token are -1 if the row has none. A chunk is the number of a
 * window of 64 tokens. */
typedef struct {
    int rank, head, sequence, chunk;
    int64_t token;
} dp_place;
/* It has no chunk and no token. */
dp_place dp_place_of(int rank, int head, int sequence);
typedef void dp_place_fn(const void *ctx, int64_t row, dp_place *at);

/* One tensor to judge. Pointers are borrowed. */
typedef struct {
    const char *name;
    int N, heads;
    int64_t rows, width;
    const double *got, *want;
    const double *want_lo; /* truth minus want, which is rounded to double; NULL: zeros */
    const double *rad;     /* [rows] radius of the truth; NULL: exact */
    const double *bound;   /* [rows]; NULL: none is derived */
    /* [rows] the loss that the subject's claim allows a row (ref/bound/drop.h). It is subtracted
     * from its error, in its own direction, before any comparison; NULL: nothing */
    const double *lost;
    int bound_shown; /* 1: the bound is of another design; it is shown, and the draws decide */
    dp_place_fn *place;
    const void *ctx;
    int64_t tokens; /* > 0: rows are tokens' */
    const char *why_unjudged;
    int subrows;           /* of the draws' rows (dp_row_map); 0 counts as 1 */
    const dp_draws *draws; /* NULL: no expected tier */
    const double *freedom; /* [rows] of errors at most (draws.h); NULL: no limit */
    dp_allowance allowance;
    /* One rounding of the result.
     *   unit        in the arithmetic that makes it, relative also to its head's rows, with which
     *               it is summed
     *   store       in the format that it is kept in, relative to the number alone
     *   tiny        of an entry near zero
     *   file_unit   unit roundoff of a coarser file, else 0
     *   most        the least number that becomes Inf; 0: none does */
    double unit, store, tiny, file_unit, most;
    /* One rounding of an operand, for rows whose truth is 0, or 2^-126 of their head's, as terms
     * cancel. 0 where a result has none. */
    double cancelled;
    double terms;     /* one rounding of a row's terms over its bound; 0: they do not cancel */
    double seen_most; /* unjudged unless the tensor times this factor would fail; 0: any factor */
    int finite;       /* inputs are */
    int may_vanish;   /* 1: below tiny in every head, zeros are right */
    int of_heads;    /* rows are sums of one head over all tokens: a power is of the whole tensor */
    double rounding; /* relative rounding of the result's terms, the least error of a row's draws */
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
    dp_row over;        /* the largest error for its bound; at.rank -1: none was judged */
    int64_t nover;      /* rows over their bound, or finite if the truth is not, or vice versa */
    dp_row first, last; /* of the nover rows, in the order of the tensor; nover = 0: none */
    int64_t nblank;     /* rows of zeros where the truth is not small */
    int64_t nbeyond;    /* rows not judged: a number of the truth leaves the format's range */
    dp_row failed;      /* the row that carries the failure; at.rank -1: none */
    int nwindow;
    double *window;            /* [nwindow] largest over heads of |error| / |truth| in 64 tokens */
    dp_levels_result expected; /* excess NAN: no draws */
    dp_levels_result before;   /* of the first draws, if a second set decided; else excess NAN */
    const char *tier;          /* the tier that decided: "exact", "bound", "expected"; "": none */
    double times;              /* error over the limit of the tier that decided; NAN: none */
    dp_verdict verdict;
    dp_flaw flaw;     /* the flaw of its entries that `why` names */
    double seen;      /* power: least factor on the tensor that would fail; INFINITY: none */
    double seen_head; /* likewise on a single head; the largest over heads */
    int blind_head;   /* the head with that factor; -1: none */
    int wide;         /* heads are seen, but not a quarter of the norm: zeros would pass */
    int allowed;      /* unjudged, and the case or the caller allows this */
    char why[512];
    char source[320]; /* exact cases: the origin of the wrong data (source.h); "": not found */
} dp_judgement;

/* Fills *out, which dp_judgement_free frees; nothing of *in is kept. */
void dp_compare(const dp_compare_in *in, dp_judgement *out);
void dp_judgement_free(dp_judgement *j);

/* A verdict is marginal if the error is within this factor of a limit, on either side. Another set
 * of draws may then decide. */
#define DP_MARGIN 1.3
int dp_judgement_marginal(const dp_judgement *j);

/* The row that failed, or the row with the largest error. */
const dp_row *dp_judgement_row(const dp_judgement *j);

/* x rounded to nearest at roundoff u, a power of 2, less x; u 0: 0. */
double dp_rounding_error(double x, double u);

/* ---- limits as numbers for others ------------------------------------------------------------ */

/* An error can be held against these: for truth packs (python/deltaproof/packs.py).
 *
 * Limits of a tensor: rows, their bound and radius together, [rows]; and the parts that draws see,
 * subrows of a row each. For these it has the largest |error|_2 that passes: of each part, each
 * window of parts, each head on a rank, and the whole tensor. Infinity: no limit. Limits of other
 * levels (levels.h) are along directions or over places, and are left out.
 */

/* From here on dp_compare keeps limits, the last ones of each tensor by name. With results it
 * keeps also what it compared, NAME.result, .truth and .truth_lo, in the order of the rows. One
 * thread. */
void dp_limits_keep(int results);
/* Writes and frees them: NAME.bound, .row, .window, .window_most, .unit, .unit_most, .tensor_most,
 * all F64. */
dp_status dp_limits_write(const char *path, dp_err *e);

/* ---- dA_log and ddt_bias as sums ------------------------------------------------------------- */

/* Are dA_log and ddt_bias the sums of the dg beside them?
 *
 * With x = dg of the raw gate, as the subject returned it (math.md c):
 *     ddt_bias[h,c] = sum_t x[t,h,c]          dA_log[h] = sum_(t,c) x[t,h,c] r[t,h,c]
 * r = (dg/dA_log) / (dg/dx) of the gate, from the inputs in fp64; r = 1 for ddt_bias. Earlier
 * errors of dg are in the sum, too, so only the roundings of the last stage count:
 *
 *     limit = lambda sqrt(sum ((u + 8 a) y)^2 + sum (a P)^2) + 16 a |sum y| + sum tiny |r| + tiny'
 *
 *   y       the terms: x, or x r
 *   P       the running sums
 *   u       unit roundoff of the narrowest format that holds every x
 *   a       unit roundoff of the arithmetic
 *   tiny    least number that dg's format holds in full (fp16: half its last place), which each
 *           term may lose by underflow or flush to zero; at least the loss in dg's file
 *   tiny'   the loss in the sum's own file
 *
 * Terms one by one: dg was rounded when it was stored, and its slopes err by 8 a each,
 * mean-independent (Azuma; DP_LAMBDA = 6 standard deviations). Additions follow. An error of
 * exp(A_log) is common to all terms. So one number a head is judged as sharply as thousands of
 * terms allow.
 */

/* Judgements of tensors `dA_log`, `ddt_bias` and `dg` of a subject; NULL: was not judged. If dg
 * passes, the other two fail (tier "sum") for wrong sums. A tensor that is otherwise unjudged
 * passes as sums of the judged dg, unless rounding explains half of it or more. The arithmetic has
 * unit roundoff `arithmetic`. */
typedef struct {
    const dp_problem *p;
    const dp_result *got;
    double arithmetic;
    double tiny_dg, tiny_dA_log, tiny_ddt_bias; /* what their files may take of a number */
    dp_judgement *dg, *dA_log, *ddt_bias;
} dp_sums_in;
/* Changes dA_log and ddt_bias alone. */
void dp_sums_judge(const dp_sums_in *in);
