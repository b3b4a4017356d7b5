/* harness/record/digest.h - one number for all results that are the same on every machine.
 *
 * The digest covers runs of simulated ranks: recurrences, chains, convolutions, training steps.
 * They run in one process (backend sim) or each in one of its own (backend mpi, written as backend
 * sim: the same bits). Kernels, libraries, files and the chunk solver over LAPACKE have the bits of
 * their machine, and are left out. The digest is XXH3-128 of one text a run, sorted:
 *
 *     run ID VERDICT TRUTH BITS radius audit condition inverse entry slope
 *     tensor NAME VERDICT TIER error bound ratio worst expected excess, then ratio median limit
 *         freedom draw of each level of verdict/levels.h
 *     ranks error of each rank
 *     point rank chunks error effect bound abs norm
 *     bits store operand accumulate truncated
 *
 * Numbers are the 16 digits of their encoding as a double, -0 as 0, every NaN as `nan`. So it does
 * not depend on the order of execution, threads, time, or the cache.
 */
#ifndef DP_DIGEST_H
#define DP_DIGEST_H
#include "run.h"

typedef struct {
    char hex[33];
    int runs; /* covered; 0: there is no digest */
} dp_digest;
/* The digest of those runs that are covered. */
dp_digest dp_digest_of(const dp_runs *r);
/* The text of one run; to be freed. */
char *dp_digest_text(const dp_run *r);
#endif
