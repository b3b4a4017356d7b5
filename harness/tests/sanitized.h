/* harness/tests/sanitized.h - tests under the address sanitizer (make test SAN=1). There numerics
 * take ten times as long, and memory errors are looked for, not wrong numbers.
 *
 * Tests take smaller problems where GT_SANITIZED is 1. A table (sanitized.c) leaves out tests that
 * only repeat numerics on whole cases. They count as skipped, with the reason. DP_SANITIZE_ALL=1 in
 * the environment leaves nothing out (the weekly job).
 */
#pragma once
#ifdef __cplusplus
extern "C" {
#endif

#ifdef __SANITIZE_ADDRESS__
#define GT_SANITIZED 1
#else
#define GT_SANITIZED 0
#endif

/* Why this test is left out; NULL: it is run. */
const char *gt_left_out(const char *suite, const char *name);

#ifdef __cplusplus
}
#endif
