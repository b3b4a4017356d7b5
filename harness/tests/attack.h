/* harness/tests/attack.h - shared by the tests `attacks*`: fresh folders and files. It runs the
 * program under a limit of time, from a folder that is not the source tree.
 *
 * Everything runs the program as a user does. So the same tests can be run against an older one
 * (DP_PROGRAM), where each of them must fail.
 */
#pragma once
#include "gt.h"

#define AT_HUNG 124 /* the status of what had to be ended */

/* A new empty folder of this name in the test run's own; the text is kept in a ring of 8. */
const char *at_dir(const char *name);
/* The same ring: a formatted text. */
const char *at_text(const char *fmt, ...) __attribute__((format(printf, 1, 2)));
void at_write(const char *path, const char *text);
/* The whole file, NUL at its end, to be freed; "" where there is none. */
char *at_read(const char *path);
int at_exists(const char *path); /* also for a symlink without a target */

/* A shell command in `dir`, with the program as $P and the cases as $C; what it printed in at_out.
 * An idle machine takes fewer than so many seconds; ten times as many end all that it started. */
extern char at_out[1 << 16];
int at_sh(const char *dir, int seconds, const char *fmt, ...) __attribute__((format(printf, 3, 4)));

/* Number of processes still alive, of those that wrote their numbers into dir/name, a line each
 * (*noted of them). They are ended, and the file is removed. */
int at_survivors(const char *dir, const char *name, int *noted);
/* Shell: gives them a minute to end, where a process ends them whose own end was not waited for. */
#define AT_WAIT_FOR(name) \
    "for k in $(seq 600); do kill -0 $(cat " name ") 2>/dev/null || break; sleep 0.1; done"

/* A library of tests/data, built; its path. */
const char *at_library(const char *source, const char *flags);

/* A record of one run, of which a page has one figure, chain-k8. */
#define AT_RECORD                                                                           \
    "{\"schema\": \"deltaproof-record\", \"schema_version\": 1, \"totals\": {\"pass\": 1, " \
    "\"fail\": 0, "                                                                         \
    "\"skipped\": 0, \"unjudged\": 0}, \"verdict\": \"pass\", \"created\": \"CREATED\", "   \
    "\"program\": "                                                                         \
    "{\"commit\": \"COMMIT\", \"compiler\": \"COMPILER\", \"blas\": \"BLAS\"}, \"cases\": " \
    "[{\"name\": "                                                                          \
    "\"CASE\", \"op\": \"chain\", \"K\": 8, \"reason\": \"REASON\"}], \"runs\": [{\"id\": " \
    "\"CASE:chain=fp32\", "                                                                 \
    "\"case\": \"CASE\", \"op\": \"chain\", \"backend\": \"sim\", \"policy\": {\"chain\": " \
    "\"POLICY\"}, "                                                                         \
    "\"tensors\": [{\"name\": \"TENSOR\", \"rel_fro\": 0.5, \"bound\": 1, \"ratio\": 0.5, " \
    "\"verdict\": "                                                                         \
    "\"pass\"}], \"chain\": [{\"rank\": 0, \"chunks\": 2, \"rel\": 0.1, \"bound\": 0.2}, "  \
    "{\"rank\": 0, "                                                                        \
    "\"chunks\": 4, \"rel\": 0.2, \"bound\": 0.4}], \"verdict\": \"pass\", \"why\": \"WHY\"}]}"

/* Says what happened unless the status is this one and each text (NULL ends them) was printed. */
int at_expect(const char *file, int line, const char *what, int got, int want, ...);
#define EXPECT(got, want, ...) \
    at_expect(__FILE__, __LINE__, #got, got, want, ##__VA_ARGS__, (const char *)0)
