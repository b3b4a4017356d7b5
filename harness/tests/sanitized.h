/* harness/tests/sanitized.h - tests under the address sanitizer (make test SAN=1), where numerics
 * take ten times as long and what is looked for is wrong memory, not wrong numbers.
 *
 * Tests take smaller problems where GT_SANITIZED is 1. What only repeats numerics on whole cases is
 * left out by a table (sanitized.c), and counted as skipped with its reason. DP_SANITIZE_ALL=1 in
 * the environment leaves nothing out (the weekly job).
 */
#ifndef DP_TESTS_SANITIZED_H
#define DP_TESTS_SANITIZED_H
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
#endif
