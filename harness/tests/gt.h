/* harness/tests/gt.h - GoogleTest from C. A test file is C:
 *
 *     DP_TEST(affine, compose_is_associative) { CHECK(err <= 1e-15, "err %g", err); }
 *
 * CHECK goes on after a failure, REQUIRE leaves the test, SKIP ends it as skipped with its reason
 * (skips are counted).
 */
#pragma once
#ifdef __cplusplus
extern "C" {
#endif
void gt_register(const char *suite, const char *name, const char *file, int line,
                 void (*body)(void));
void gt_fail(const char *file, int line, const char *expr, const char *fmt, ...)
    __attribute__((format(printf, 4, 5)));
void gt_skip(const char *file, int line, const char *fmt, ...)
    __attribute__((format(printf, 3, 4)));
const char *gt_tmpdir(void); /* a folder of this test run's own, removed at its end */
/* For truths, bounds and draws: below XDG_CACHE_HOME, where programs have theirs, else below
 * gt_tmpdir(). scripts/shards sets one for all suites. */
const char *gt_cache(void);
int gt_run(const char *command, char *out,
           int out_size);     /* shell command; its stdout+stderr in out; returns the exit status */
int gt_port(void);            /* a free port whose next one is free too, another each time */
const char *gt_program(void); /* path of the deltaproof program under test */
const char *gt_cases(void);   /* path of the cases folder */
#ifdef __cplusplus
}
#endif
#define DP_TEST(suite, name)                                                \
    static void suite##__##name(void);                                      \
    __attribute__((constructor)) static void suite##__##name##__reg(void) { \
        gt_register(#suite, #name, __FILE__, __LINE__, suite##__##name);    \
    }                                                                       \
    static void suite##__##name(void)
#define CHECK(cond, ...)                                              \
    do {                                                              \
        if (!(cond)) gt_fail(__FILE__, __LINE__, #cond, __VA_ARGS__); \
    } while (0)
#define REQUIRE(cond, ...)                                   \
    do {                                                     \
        if (!(cond)) {                                       \
            gt_fail(__FILE__, __LINE__, #cond, __VA_ARGS__); \
            return;                                          \
        }                                                    \
    } while (0)
#define SKIP(...)                                 \
    do {                                          \
        gt_skip(__FILE__, __LINE__, __VA_ARGS__); \
        return;                                   \
    } while (0)
