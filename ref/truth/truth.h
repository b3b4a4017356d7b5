/* ref/truth/truth.h - the ground truth: the step recurrence and its adjoint, one token at a time
 * (math.md b, c, d). It is computed in MPFR, or in double-double (truth_dd.h) audited by MPFR.
 *
 * Every result carries an error radius that a running bound proves, evaluated with upward rounding:
 * |hi + lo - exact|_2 <= rad over each row. The sum hi + lo is an unevaluated double-double, |lo|
 * <= ulp(hi)/2, so hi alone is the correctly rounded double up to the radius. Here "exact" is the
 * real-number result for exactly these input bits.
 */
#pragma once
#include "ref/vocabulary/context.h"
#include "ref/vocabulary/problem.h"

/* A tensor with its error radii. A row is the innermost vector; of states and maps a row is one
 * [K][V] or [K][K] matrix. */
typedef struct {
    int64_t rows, width;
    double *hi, *lo; /* [rows][width] */
    /* [rows] bound on the 2-norm (Frobenius norm) of the row's error; inf when nothing is proven */
    double *rad;
} dp_ball;

/* Which arithmetic: MPFR, or double-double on vectors (some 2^-98 an operation; about a hundred
 * times faster). Both come with proven radii. */
typedef enum { DP_TRUTH_MPFR, DP_TRUTH_DD, DP_NTRUTHS } dp_truth_kind;
extern const char *const dp_truth_kind_names[DP_NTRUTHS]; /* "mpfr", "double-double" */
/* Why double-double cannot judge this problem (numbers above 2^30 or not finite, K > 1024), or
 * NULL. */
const char *dp_truth_dd_refuses(const dp_problem *p);

/* The entries of K channels that a token's rows read and write along (recurrence.h), each once a
 * key. */
int dp_truth_entries(const dp_problem *p);

/* A device that runs the forward recurrence of the double-double truth, with the same bits
 * (gpu/dp_truth_gpu.h). */
struct tr_dd_rows;
struct tr_dd_cols;
typedef struct {
    dp_status (*open)(void **s, int64_t Kp, int rows, int entries, int64_t W, int64_t len,
                      dp_err *e);
    void (*close)(void *s);
    dp_status (*set)(void *s, const double *S, dp_err *e);
    dp_status (*get)(void *s, double *S, dp_err *e);
    dp_status (*forward)(void *s, const struct tr_dd_rows *b, const struct tr_dd_cols *c,
                         dp_err *e);
    const char *(*name)(void); /* for the record */
} dp_truth_device;

typedef struct {
    dp_truth_kind kind;
    const dp_truth_device *device; /* double-double, forward only; NULL: the CPU */
    int bits; /* MPFR precision, 64..65536; 192 is what the cases use. Double-double: not used */
    int backward; /* needs p->dout, else forward only */
    /* tokens at which states are wanted, strictly increasing, each in 1..T-1 (rank boundaries) */
    int ncut;
    const int64_t *cut;
    /* also M of every segment between marks; costs one more forward pass on K columns */
    int want_M;
    /* 0: all cores (fewer for tiny problems); the result does not depend on it, bit for bit */
    int threads;
    int progress; /* 1: a progress line on stderr when it is a terminal */
} dp_truth_request;

typedef struct {
    dp_truth_kind kind;
    int bits, backward;         /* bits: an operation's relative error is 2^-bits */
    dp_ball field[DP_NRESULTS]; /* indexed as dp_result_fields; rows = 0 when absent */
    int nmark;     /* marks: cuts and sequence boundaries, 0 and T included, strictly increasing */
    int64_t *mark; /* [nmark] */
    /* rows ncut*HV, [K][V]: state entering token cut[i] (s0 if a sequence starts there) */
    dp_ball S_cut;
    /* the same for the adjoint: gradient with respect to that state; rows = 0 forward only */
    dp_ball dS_cut;
    /* rows (nmark-1)*HV, [K][K]: M over tokens mark[i]..mark[i+1]-1; rows = 0 unless want_M */
    dp_ball M_seg;
    int ncut;
    int64_t *cut;
} dp_truth;

/* Non-finite inputs propagate (a row that depends on one has rad = inf). */
dp_status dp_truth_run(const dp_problem *p, const dp_truth_request *rq, dp_truth *t, dp_err *e);
void dp_truth_free(dp_truth *t);

/* The audit of a truth: random columns of the state are computed again in MPFR (128 bits). A column
 * belongs to one head and one sequence. Its o is compared with t; at the end of the sequence, so
 * are dv, final_state and ds0. On the column's own problem every tensor of both arithmetics is
 * compared. */
typedef struct {
    int columns;    /* 0: no audit */
    int64_t tokens; /* of all columns together */
    uint64_t seed;
    double worst; /* largest difference / (sum of both radii) */
} dp_truth_audit;
/* Audits `columns` columns, chosen by seed, each of at most the first `tokens` tokens of its
 * sequence. The columns and tokens audited, and the worst difference, go to *a. Returns DP_EIO if a
 * row differs by more than both radii; the message names the row. */
dp_status dp_truth_audit_columns(const dp_problem *p, const dp_truth *t, uint64_t seed, int columns,
                                 int64_t tokens, dp_truth_audit *a, dp_err *e);

/* States and maps that rank c must see, by DP_RANK_S_IN and so on (math.md g.2). They are composed
 * from the snapshots in binary128 with the radius carried along: [K][V] or [K][K] doubles.
 *   S_in: state entering the rank (is_first: absent).
 *   M, H: of the LAST local sub-sequence, when not is_last.
 *   dS_out: gradient of the state leaving the rank (is_last: absent).
 *   dM = M', dH: of the FIRST one, when not is_first.
 * Every rank boundary of c must be among the cuts. Without want_M there is no M, H, dM, dH; without
 * a backward truth no dS_out, dM, dH. */
typedef struct {
    double *x, rad; /* a Frobenius bound */
    /* 0: the rank has none, or it is an H behind (before) a state that is not finite, for H = S_out
     * - M S_in */
    int there;
} dp_truth_rank_tensor;
typedef struct {
    dp_truth_rank_tensor of[DP_RANK_TENSORS];
} dp_truth_rank;
/* Allocates the arrays of *out that rank c has, for value head hv. */
void dp_truth_at_rank(const dp_truth *t, const dp_problem *p, const dp_context *c, int hv,
                      dp_truth_rank *out);
void dp_truth_rank_free(dp_truth_rank *r);

/* dp_truth_run with a cache: a file under dir, named by the content hash (XXH3-128) of problem and
 * request, and by the sources of ref/ (ref/files/cache.h). The file is written by atomic rename,
 * with a checksum. A damaged or truncated entry is recomputed, with a message on stderr.
 *   dir      NULL: no cache
 *   cached   NULL, or *cached becomes 1 if t was read from the cache, else 0 */
dp_status dp_truth_cached(const dp_problem *p, const dp_truth_request *rq, const char *dir,
                          dp_truth *t, int *cached, dp_err *e);
