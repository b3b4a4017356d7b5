/* harness/record/record.h - the record of a run: JSON, and JUnit XML for CI systems. Versioned
 * schema, written by record.c only.
 *
 * Readers must ignore fields they do not know; a field never changes its meaning within one
 * schema_version.
 * Non-finite numbers are the strings "nan", "inf", "-inf". Errors are relative to the truth's norm
 * unless said otherwise.
 *
 * {
 *   "schema": "deltaproof-record", "schema_version": 1,
 *   "program": {"version", "commit", "compiler", "blas", "mpfr", "cores", "device", "command"},
 *           command: what made the record, for a shell
 *   "created": "2026-11-20T19:00:00Z", "seconds": 61.2,
 *   "totals": {"pass": 0, "fail": 0, "skipped": 0, "unjudged": 0},      over runs
 *   "digest": {"value": "32 hexadecimal digits", "runs": 1797},
 *           of all results of simulated ranks (harness/record/digest.h), the same on every machine;
 *           absent: none ran
 *   "errors": 0,                  cases that could not be judged at all
 *   "verdict": "pass" | "fail" | "error",
 *   "cases": [{"name", "op", "reason", "source", "T","H","HV","K","V","R","Nseq", "regime",
 *              "warnings": [..]}],   op-dependent fields
 *   "runs": [{
 *     "id": "kda-long:ranks=4,base=bf16,chain=tf32,merge=allgather",
 *             `deltaproof run --id` reproduces it bit for bit
 *     "case": "kda-long", "op": "gdn"|"kda"|"mkda"|"chain"|"conv", "ranks": 4,
 *     "backend": "sim"|"lapack"|"cuda"|"nccl"|"file"|"subject",
 *             lapack: the simulated ranks over CBLAS and LAPACKE; file: tensors that
 *             `deltaproof judge` read; subject: a shared library
 *     "path": "simple"|"fast",
 *             cuda, nccl: which kernels ran; lapack: the BLAS's kernels; subject: the library's
 *             name
 *     "outcome": "returned"|"unsupported"|"failed"|"crashed"|"hung"|"out of bounds"|"exited",
 *             subject: what its process did; all but the first two fail the run
 *     "policy": {"base": "bf16", "chain": "tf32", "merge": "allgather", "design": "chunk=128"},
 *             design: ref/vocabulary/design.h, where it is not the base's default; "undeclared"
 *     "truth": {"kind": "mpfr"|"double-double"|"fp64", "bits": 192, "radius": 1e-55,
 *               "cached": true},  radius: largest, relative to its tensor
 *               "device": "..",   that computed it, absent: the CPU, or it came from the cache
 *               "audit": {"columns", "tokens", "seed", "worst"},
 *                       double-double: random columns of the state again in MPFR; tokens of all
 *                       together; seed: a string of decimal digits; worst: largest difference over
 *                       the sum of both radii (above 1 there is no run, but exit status 2)
 *     "tensors": [{
 *       "name": "o",                       o final_state S_in M H dq dk dv dg dbeta dA_log ddt_bias
 *                                          ds0 dS_out dM dH, stages
 *       "rel_fro": 3.9e-3,                 |got - want|_F / |want|_F
 *       "per_rank": [..],                  the same, rank by rank (null: the rank has none)
 *       "per_head": [[..], ..],            [rank][head]
 *       "worst_token": {"rank", "sequence", "token", "head", "index",
 *                       "got": "0x1.8p-3", "want": "0x1.8p-3", "rel"},
 *               row with the largest |err|_2 / rms row norm of its head; index: entry in it
 *       "windows": {"size": 64, "rel": [..]},
 *               per window of tokens: |err|_F / |want|_F, head with the largest (o, gradients)
 *       "bound": 2.1e-2,                   bound / |want|_F; absent when unjudged
 *       "ratio": 0.19,                     largest err / bound over (rank, head) and rows
 *       "per_rank_ratio": [..],
 *       "expected": {"rel": 4e-3,          what the design makes of these inputs
 *                                          (verdict/expected.h), over |want|_F
 *                    "excess": 0.7,        largest ratio / limit over the levels: above 1 fails
 *                    "level": "window",    where: a name of verdict/levels.h,
 *                                          and for each level that the tensor has:
 *                    "window": {"ratio", "median", "limit", "units", "freedom", "draw"}, ..},
 *               ratio: error / expected, draw: that of a draw
 *       "first_draws": {..},      the same of the first set of draws, where a second one decided
 *       "failed": {"rank", "sequence", "token", "head", "index", "got", "want", "error", "bound",
 *                  "size", "scale", "times", "marginal"},
 *               the row that carries the failure: |err|, bound and |want| of it, rms |want| of its
 *               head's rows, error over its limit, and whether that is within 1.3
 *       "tier": "exact"|"bound"|"expected"|"sum",     what decided; absent when unjudged
 *       "verdict": "pass"|"fail"|"skipped"|"unjudged", "why": "..."
 *               why: for all but pass; cases with keys = exact: pass is rel_fro = 0, and why says
 *               whose data a wrong row holds (harness/verdict/source.h)
 *     }],
 *     "chain": [{"rank": 1, "chunks": 16, "rel": 1e-3, "effect": 9e-4, "bound": 8e-3, "abs": ..,
 *                "norm": ..}],
 *             M after that many chunks: |dM|_F / |M|_F; effect |dM S_in|_F / |S_in|_F (null without
 *             S_in); bound / |M|_F
 *     "slope": 0.51,
 *             op chain: d log rel / d log chunks over 16..256: 0.5 unbiased rounding, 1 biased
 *     "bits": {"store", "operand", "accumulate",
 *                      op chain, regime reflect: effective bits by model of rounding
 *                      (harness/verdict/bits.h)
 *              "truncated",
 *                      bits of truncated operands with the same shrinkage, null: the error is not
 *                      along M
 *              "model": "store"|"operand"|"accumulate", "effective": 24.0, "slope": 0.51,
 *              "biased": false,
 *              "like": "fp32" | null,     chain format with that law
 *              "wrong": false,
 *                      true: fewer bits than the policy claims, or biased against it; the run fails
 *                      whatever its tensors say
 *              "says": "behaves like fp32: 24.0 bits"},
 *     "condition": {"condition", "inverse", "entry", "rank", "head", "token", "ill": false},
 *             of the chunks' triangular systems by themselves (harness/verdict/condition.h):
 *             largest |A|_1 |A^-1|_1 and where, largest |A^-1|_1, largest entry of an inverse; ill:
 *             costs half of the digits of the base's arithmetic
 *     "settled": true,            present where a second set of draws decided
 *     "tier": "exact"|"bound"|"expected"|"sum",
 *             of a failed run: what decided on its worst tensor
 *     "verdict": "pass"|"fail"|"skipped"|"unjudged", "why": "...", "seconds": 1.2
 *   }]
 * }
 */
#ifndef DP_RECORD_H
#define DP_RECORD_H
#include "run.h"
#ifdef __cplusplus
extern "C" {
#endif

typedef struct {
    const dp_runs *runs;
    int ncase;
    dp_case *const *cases;
    double seconds;
    int errors;          /* cases that could not be judged at all */
    const char *command; /* what made it; NULL: not said */
} dp_record;

void dp_record_totals(const dp_record *r, int n[DP_NVERDICTS]);
/* "pass", "fail", or "error" when a case could not be judged. */
const char *dp_record_verdict(const dp_record *r);
/* "-": stdout; else by rename */
dp_status dp_record_write_json(const dp_record *r, const char *path, dp_err *e);
dp_status dp_record_write_junit(const dp_record *r, const char *path, dp_err *e);

#ifdef __cplusplus
}
#endif
#endif
