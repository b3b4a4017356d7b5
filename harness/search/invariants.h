/* harness/search/invariants.h - properties between runs of one subject, which need no truth: checks
 * for sizes where no truth is affordable.
 *
 * Each check runs the subject on the problem and on a changed one, and compares results. Equality
 * is exact (as numbers: -0 = 0) unless stated otherwise. A kernel in a shared library must be
 * exactly equal only if it claims so (`bitwise`). Otherwise differing rows must be within the sum
 * of both runs' bounds (error_bound.h, of the declared design); `why` has the largest share. If a
 * library refuses a changed problem, the check is skipped; if it crashes, the check fails. A
 * failing check of a library is repeated, with all its runs. If it does not fail each time, the
 * check is skipped, and `repeat` fails with "not repeatable, n of m".
 *
 * A process of a library makes one call. The first repetition of `repeat`, and factors and signs,
 * come second, at the same addresses: the process was called with the problem itself before.
 *
 *   repeat        a repeated run has equal bits
 *   causality     inputs of one token change: o and dq of earlier chunks, and everything of other
 *                 sequences, must not
 *   causality-chunk
 *                 likewise inside one chunk of 64 tokens, for every seventh token: o and dq of
 *                 earlier tokens must not change, as a masked product adds exact zeros. Kernels
 *                 fail that anchor decays inside the chunk behind a row (fla#1242), or that choose
 *                 an order of summation by later tokens
 *   anticausality do of one token changes: dk dv dg dbeta of later tokens, dq of all others, and
 *                 everything of other sequences, must not
 *   heads         all inputs of the first value head, of the last, or of all but the first change
 *                 (q and k if no other head reads them): o, states and all gradients of other heads
 *                 must not, dA_log and ddt_bias included (dq and dk: of groups without a changed
 *                 head)
 *   head-order    the last key head and its value heads (of one key head: the last value head) come
 *                 first: results of each head must not change. So it is where they are alone, but
 *                 within bounds for kernels of others, as the number of heads may decide how they
 *                 compute. Kernels that do not take another number hold without it. Those on a
 *                 device are not asked for it
 *   packed        results of a packed sequence equal its results alone, on one rank, if chunks are
 *                 cut alike (without dA_log and ddt_bias, sums over all sequences)
 *   sequence-order
 *                 the last sequence is packed before all others, on one rank: results of each
 *                 sequence must not change (without sums over all sequences). Skipped for kernels
 *                 that cut the last sequence in segments
 *   prefix        a run from the state after a prefix of whole chunks equals one run over all, and
 *                 so does the gradient of that state. (cuda, nccl: o and states only, since the
 *                 backward recomputes the states of the prefix in another path than the forward.)
 *                 If kernels cut a sequence in segments by its length, prefix is skipped, and
 *                 packed leaves that sequence out
 *   no-state      no initial state and one of zeros have equal bits
 *   scale-v       v and s0 times 2^3: o, states, dq dk dg dbeta times 2^3, dv and ds0 unchanged.
 *                 Powers of two commute with rounding. Entries with an underflow may differ by
 *                 `small`, 2^-100 (fp64: 2^-960; cuda, nccl: 2^-36, as anchors multiply by up to
 *                 2^110 afterwards)
 *   scale-do      do and dstate times 2^3: all gradients times 2^3
 *   sign-q        q negated: o and (without dstate) the gradients but dq change sign, states and dq
 *                 do not change
 *   sign-kv       k and v negated: dk and dv change sign, all else does not. For a user's own rows
 *                 further inputs are negated if necessary (scale-v likewise), or the check is
 *                 skipped
 *   chunk-size    chunks of another length: each row within the sum of the two bounds, of the
 *                 design with that length. Simulated ranks use 16 and 128, a user's kernel the
 *                 lengths of its design (chunks=16:32, ref/vocabulary/design.h); skipped without
 *                 such lengths
 *   ranks         N ranks equal one rank, on inputs where nothing rounds
 *                 (ref/inputs/inputs_exact.c) in the problem's own shape and packing
 *   exact-cp      N ranks that own runs of a fixed grid of parts (ref/vocabulary/own.h) equal one
 *                 rank in every bit of results and gradients, on the problem's own inputs. For
 *                 simulated ranks and the CUDA kernels; other subjects have no owners: skipped
 *   transpose     dM = M' on the inputs of the check ranks (math.md g.1)
 *   ranks-bound   N ranks against one rank on the problem's own inputs: each row within the sum of
 *                 the two probable bounds (error_bound.h; math.md j.4); skipped if the fp64
 *                 reference of the bounds would take longer than a minute
 *   reference     the first 128 tokens of the longest sequence, on one rank, against their fp64
 *                 reference. Rows must be within twice their bounds. A constant factor, or another
 *                 recurrence, keeps all other properties
 */
#pragma once
#include "harness/device/device_run.h"
#include "harness/library/subject.h"
#include "harness/simulated/ranks.h"
#include "harness/verdict/compare.h"

typedef struct {
    dp_backend backend;
    dp_sim_policy run;       /* N and backward: those of the call; a fault: simulated ranks only */
    dp_format input_dtype;   /* cuda, nccl, subject */
    dp_cuda_variant variant; /* cuda, nccl */
    const dp_subject *library; /* subject: judged by the design that it declares */
    double limit_s;            /* subject: a run of it */
    int bitwise;               /* subject: 1: it claims equal bits, 0: results within its bounds */
    int chunk;                 /* requested tokens a chunk; 0: the subject's own */
    int shows;                 /* 1: its stages are kept, too */
    double *const *like;       /* keep only stages of simulated ranks that are here; NULL: all */
    int progress;              /* a line on stderr when a check has ended */
    const dp_problem *before;  /* a library's process is called with it first; NULL: not */
} dp_check_subject;

typedef struct {
    const char *name, *promise;
    dp_verdict verdict; /* skipped: why says so */
    int64_t compared;   /* entries */
    int within_bounds;  /* passed, but not bit by bit */
    char why[480];      /* first difference: tensor, rank, head, token, entry, both values */
    double seconds;
} dp_check;

/* Every check, in the order in which they run: its name, its promise, its function
 * (invariants.c). */
#define DP_CHECKS(X)                                   \
    X("repeat", BITS, check_repeat)                    \
    X("causality", BITS, causality)                    \
    X("causality-chunk", BITS, check_chunk)            \
    X("anticausality", BITS, anticausality)            \
    X("heads", BITS, check_heads)                      \
    X("head-order", BITS, dp_check_head_order)         \
    X("packed", BITS, dp_check_packed)                 \
    X("sequence-order", BITS, dp_check_sequence_order) \
    X("prefix", BITS, dp_check_prefix)                 \
    X("no-state", BITS, check_no_state)                \
    X("scale-v", BITS_BUT_UNDERFLOW, scale_v)          \
    X("scale-do", BITS_BUT_UNDERFLOW, scale_do)        \
    X("sign-q", BITS, sign_q)                          \
    X("sign-kv", BITS, sign_kv)                        \
    X("chunk-size", BOUNDS, dp_check_chunk_size)       \
    X("ranks", BITS_EXACT, ranks)                      \
    X("exact-cp", BITS, dp_check_exact_cp)             \
    X("transpose", BITS_EXACT, transpose)              \
    X("ranks-bound", BOUNDS, dp_check_ranks_bound)     \
    X("reference", BOUNDS, dp_check_reference)
#define DP_CHECK_COUNT(name, promise, run) +1
#define DP_CHECK_WORD(name, promise, run) " " name
enum { DP_NCHECKS = 0 DP_CHECKS(DP_CHECK_COUNT) };
#define DP_CHECK_WORDS DP_CHECKS(DP_CHECK_WORD) /* a blank before each */
extern const char *const dp_check_names[DP_NCHECKS];

typedef struct {
    int n;
    dp_check c[DP_NCHECKS];
} dp_checks;

/* Runs the checks, on N ranks unless stated otherwise above.
 *   backward   1: gradients too; needs p->dout
 *   only       names of checks separated by commas; NULL: all */
dp_status dp_checks_run(const dp_problem *p, const dp_check_subject *s, int N, int backward,
                        const char *only, dp_checks *out, dp_err *e);
