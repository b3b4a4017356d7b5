/* harness/search/invariants.h - what must hold between runs of one subject, whatever the truth is:
 * checks for sizes where no truth is affordable.
 *
 * Each check runs the subject on the problem and on a changed one and compares results. Equality is
 * exact (as numbers: -0 = 0) unless said otherwise. A kernel in a shared library must be equal only
 * where it claims it (`bitwise`). Else rows with other bits must be within the sum of both runs'
 * bounds (error_bound.h, of the declared design); `why` says how near. A library that refuses a
 * changed problem skips that check; one that dies on it fails it. A library's failing check is made
 * again, with all its runs. If it does not fail each time, `repeat` fails, "not repeatable, n of
 * m", and the check is skipped.
 *
 *   repeat        the same run again gives the same bits
 *   causality     inputs of one token changed: o and dq of the chunks before its own, and
 *                 everything of other sequences, stays
 *   causality-chunk
 *                 the same inside one chunk of 64 tokens, every seventh of them changed in turn: o
 *                 and dq of the tokens before it stay, as a masked product adds exact zeros.
 *                 Kernels that anchor decays inside the chunk behind a row (fla#1242), or choose a
 *                 way of summing by what comes later, do not have that
 *   anticausality do of one token changed: dk dv dg dbeta of the tokens behind it, dq of all
 *                 others, and everything of other sequences, stays
 *   heads         every input of the first value head, of the last, of all but the first changed (q
 *                 and k where no other head reads them): everything of other heads stays, o, states
 *                 and all gradients, dA_log and ddt_bias too (dq and dk: of groups without a
 *                 changed head)
 *   packed        a sequence among others gives what it gives alone, on one rank, where chunks are
 *                 cut alike (dA_log and ddt_bias, sums over all, are left out)
 *   sequence-order
 *                 the last sequence packed before all others, so that each has another place and
 *                 other tokens before it, on one rank: each gives what it gave (sums over all left
 *                 out, as above); kernels that cut the sequence that stands last in segments:
 *                 skipped
 *   prefix        running on from the state of a prefix of whole chunks gives what one run gives;
 *                 the gradient of that state likewise (cuda, nccl: o and states only; the backward
 *                 recomputes the states of the prefix in another path than the forward that gave
 *                 the state). Where kernels cut a sequence in segments by its length, and so its
 *                 parts elsewhere, prefix is skipped and packed leaves it out
 *   no-state      no initial state and one of zeros give the same bits
 *   scale-v       v and s0 times 2^3: o and states times 2^3, dq dk dg dbeta times 2^3, dv and ds0
 *                 as before. Powers of two commute with rounding; entries that underflow on the way
 *                 may differ by 2^-100 (fp64: 2^-960; cuda, nccl: 2^-36, as anchors multiply by up
 *                 to 2^110 afterwards), which is what `small` stands for
 *   scale-do      do and dstate times 2^3: all gradients times 2^3
 *   sign-q        q negated: o and (without dstate) the gradients but dq change sign, states and dq
 *                 stay
 *   sign-kv       k and v negated: dk and dv change sign, all else stays. Own rows: further inputs
 *                 too, where they need them (scale-v likewise), or skipped
 *   chunk-size    the subject asked for chunks of another length: each row within the sum of the
 *                 two bounds, of the design with that length. Simulated ranks take 16 and 128; a
 *                 kernel of yours takes what its design names (chunks=16:32,
 *                 ref/vocabulary/design.h), and is skipped where it names none
 *   ranks         N ranks give what one rank gives, on inputs where nothing rounds
 *                 (ref/inputs/inputs_exact.c) in the problem's own shape and packing
 *   exact-cp      N ranks that own runs of a fixed grid of parts (ref/vocabulary/own.h) against
 *                 one: every bit of results and gradients, on the problem's own inputs, of
 *                 simulated ranks and of the CUDA kernels; other subjects are not told who owns
 *                 what: skipped
 *   transpose     dM = M' on those inputs (math.md g.1)
 *   ranks-bound   N ranks against one rank on the problem's own inputs: each row within the sum of
 *                 the two probable bounds (error_bound.h; math.md j.4); skipped where the fp64
 *                 reference that bounds are taken from would take longer than a minute
 */
#ifndef DP_INVARIANTS_H
#define DP_INVARIANTS_H
#include "harness/device/device_run.h"
#include "harness/library/subject.h"
#include "harness/simulated/ranks.h"
#include "harness/verdict/compare.h"
#ifdef __cplusplus
extern "C" {
#endif

typedef struct {
    dp_backend backend;
    dp_base base;
    dp_format chain;
    dp_exchange merge;
    dp_payload payload;
    dp_fault fault;            /* simulated ranks only */
    dp_format input_dtype;     /* cuda, nccl, subject */
    dp_cuda_variant variant;   /* cuda, nccl */
    const dp_subject *library; /* subject: judged by the design that it declares */
    double limit_s;            /* subject: a run of it */
    int bitwise;               /* subject: 1: it claims the same bits, 0: to be within its bounds */
    int chunk;                 /* tokens a chunk that it is asked for; 0: its own */
    int shows;                 /* stages that it makes are kept, too */
    double *const *like;       /* of the simulated ranks those alone that this holds; NULL: all */
    int progress;              /* a line on stderr when a check has ended */
} dp_check_subject;

typedef struct {
    const char *name, *promise;
    dp_verdict verdict; /* skipped: why says so */
    int64_t compared;   /* entries */
    int within_bounds;  /* passed, but not bit by bit */
    char why[480];      /* first difference: tensor, rank, head, token, entry, both values */
    double seconds;
} dp_check;

/* Every check, in the order in which they run: its name, what is promised, what runs it
 * (invariants.c). */
#define DP_CHECKS(X)                                   \
    X("repeat", BITS, dp_check_repeat)                 \
    X("causality", BITS, causality)                    \
    X("causality-chunk", BITS, dp_check_chunk)         \
    X("anticausality", BITS, anticausality)            \
    X("heads", BITS, dp_check_heads)                   \
    X("packed", BITS, dp_check_packed)                 \
    X("sequence-order", BITS, dp_check_sequence_order) \
    X("prefix", BITS, dp_check_prefix)                 \
    X("no-state", BITS, dp_check_no_state)             \
    X("scale-v", BITS_BUT_UNDERFLOW, scale_v)          \
    X("scale-do", BITS_BUT_UNDERFLOW, scale_do)        \
    X("sign-q", BITS, sign_q)                          \
    X("sign-kv", BITS, sign_kv)                        \
    X("chunk-size", BOUNDS, dp_check_chunk_size)       \
    X("ranks", BITS_EXACT, ranks)                      \
    X("exact-cp", BITS, dp_check_exact_cp)             \
    X("transpose", BITS_EXACT, transpose)              \
    X("ranks-bound", BOUNDS, dp_check_ranks_bound)
#define DP_CHECK_COUNT(name, promise, run) +1
#define DP_CHECK_WORD(name, promise, run) " " name
enum { DP_NCHECKS = 0 DP_CHECKS(DP_CHECK_COUNT) };
#define DP_CHECK_WORDS DP_CHECKS(DP_CHECK_WORD) /* a blank before each */
extern const char *const dp_check_names[DP_NCHECKS];

typedef struct {
    int n;
    dp_check c[DP_NCHECKS];
} dp_checks;

/* Everything on N ranks unless stated otherwise above. seed: of the exact inputs. only: NULL, or
 * names of checks separated by commas. backward needs p->dout. */
dp_status dp_checks_run(const dp_problem *p, const dp_check_subject *s, int N, int backward,
                        const char *only, dp_checks *out, dp_err *e);

#ifdef __cplusplus
}
#endif
#endif
