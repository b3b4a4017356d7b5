/* harness/verdict/expectations.h - the draws of one problem, made once and kept.
 *
 * Sets of draws are numbered: set 0 judges; set 1 decides where set 0 left a verdict marginal.
 * Missing draws are read from the cache or drawn, all policies and numbers of ranks together.
 */
#ifndef DP_EXPECTATIONS_H
#define DP_EXPECTATIONS_H
#include "expected.h"

/* How a subject computes, or may. */
typedef struct {
    int N; /* ranks */
    dp_design design;
    dp_format chain;
    int stages; /* 1: intermediates are wanted, too */
} dp_claim;

typedef struct {
    dp_claim claim;
    int set;
    dp_expected x;
} dp_expectation;

typedef struct {
    dp_expected_request
        request;       /* its set and stages are not used; what it points to is borrowed */
    const char *cache; /* a folder; NULL: none */
    int n;
    dp_expectation *known;
} dp_expectations;

/* Draws what is not known yet of n claims. */
void dp_expectations_want(dp_expectations *e, int set, int n, const dp_claim *claim);

/* NULL: not wanted before. */
const dp_expected *dp_expectations_find(const dp_expectations *e, const dp_claim *claim, int set);

void dp_expectations_free(dp_expectations *e);
#endif
