/* harness/search/shrink.h - the smallest input that still fails for the same reason.
 *
 * The reason why a problem fails. Simulated ranks: the answer of `bisect stage` (stage, tensor, and
 * over its bound, not finite, or not the same in every run). A shared library: the outcome of its
 * run and the first failing tensor of the pipeline. Convolutions and chains of M: the failing
 * tensor. A verdict that failed at the start must still fail. With a fault, the same input must
 * pass `bisect stage` without it. So nothing is shrunk into another failure.
 *
 * First by laws: a case with drawn inputs is tried with fewer tokens, heads, channels and settings
 * of the same laws. The rest is still a few hundred bytes of text.
 *
 * Then delta debugging. Blocks of half an axis, then a quarter, down to single indices, are
 * removed. The axes are ranks, tokens (the same ones of every rank), heads, sequences, keys, K, V.
 * Optional tensors are left out. Tokens and numbers are set to zero, the others to powers of two. A
 * step is kept when the problem that remains fails for the same reason. All of it is repeated until
 * nothing more goes.
 */
#pragma once
#include "harness/record/run.h"

typedef enum {
    DP_FAILS_NOT,
    DP_FAILS_OVER,
    DP_FAILS_NOT_FINITE,
    DP_FAILS_UNSTEADY,
    DP_FAILS_UNWRITTEN,
    DP_FAILS_OUTCOME
} dp_failure_kind;

typedef struct {
    dp_failure_kind kind;
    dp_subject_outcome outcome; /* DP_FAILS_OUTCOME: the library crashed, hung, .. */
    char error[64];             /* DP_FAILS_OUTCOME of a program: which error it names; "": none */
    const char *stage;          /* "" : none */
    char tensor[24], why[200];
    int red;        /* the run's verdict fails too */
    int rank, head; /* -1: none */
    double ratio;
} dp_failure;

typedef struct {
    dp_sim_policy run;         /* its fault is of the simulated ranks */
    const dp_subject *subject; /* NULL: the simulated ranks */
    double limit_s;
    const char *cache; /* of the truth of the whole problem; NULL: none */
    int max_tries;     /* 0: no limit */
    double max_s;      /* seconds after which no further problem is tried; 0: no limit */
    void (*step)(const char *what, const dp_case *c, int ranks, int64_t numbers, int tries,
                 void *arg); /* after each change, may be NULL */
    void *arg;
} dp_shrink_options;

typedef struct {
    dp_case c; /* the smallest; its lists hold the one run that fails. Free with dp_shrink_free */
    dp_failure before, after;
    int64_t numbers_before, numbers, nonzero; /* numbers in the inputs */
    int tries;
    char *laws;          /* the smallest text whose laws still draw a case that fails; NULL: none */
    int64_t law_numbers; /* numbers that it draws */
} dp_shrunk;

/* DP_EINPUT when nothing fails. c is not changed. */
dp_status dp_shrink(const dp_case *c, const dp_shrink_options *o, dp_shrunk *out, dp_err *e);
void dp_shrink_free(dp_shrunk *s);

/* How a case fails (kind DP_FAILS_NOT: it does not); runs: of bisect stage on the same inputs; red:
 * run it, too. */
dp_status dp_failure_of(const dp_case *c, const dp_shrink_options *o, int runs, int red,
                        dp_failure *f, dp_err *e);
/* Do both fail, for the same reason? */
int dp_failure_same(const dp_failure *a, const dp_failure *b);
/* The error that a program's last line names, `ValueError` of "..: 7 | ValueError: tile of 7": up
 * to a colon or bracket, without digits. */
void dp_failure_error(const char *why, char *out, size_t size);
/* It in words, as snprintf. */
void dp_failure_text(const dp_failure *f, char *out, size_t size);

int64_t dp_case_numbers(const dp_case *c, int64_t *nonzero); /* nonzero may be NULL */
/* The result as a case file: its values where they fit its text, else its laws where it has them,
 * else as dp_case_write. */
dp_status dp_shrunk_write(const dp_shrunk *s, const char *reason, const char *source,
                          const char *path, dp_err *e);
int dp_shrunk_by_laws(const dp_shrunk *s); /* would it write laws? */
/* Writes the case with every value to path, which ends in .case. If at most 600 numbers differ from
 * the most frequent one of their tensor, the text holds all. Otherwise a .safetensors file is
 * written beside it. */
dp_status dp_case_write(const dp_case *c, const char *reason, const char *source, const char *path,
                        dp_err *e);
