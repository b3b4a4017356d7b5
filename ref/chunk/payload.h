/* ref/chunk/payload.h - what arrives of a state or an M that is sent as a payload says
 * (ref/vocabulary/exchange.h). Sender and receiver compute in the arithmetic of a base.
 */
#pragma once
#include "ref/vocabulary/exchange.h"
#include "ref/vocabulary/formats.h"
#include "ref/vocabulary/problem.h"
#include <stdint.h>
DP_C_BEGIN

/* The format in which the chain of M is multiplied where `chain` is asked for. It is that one,
 * unless nothing is erased. Then M is a diagonal of K numbers, which are multiplied in the
 * accumulator of the base. */
dp_format dp_chain_format(const dp_problem *p, dp_base base, dp_format chain);

/* n numbers of states, in place. */
void dp_payload_state(dp_payload p, int64_t n, double *x);
/* M [K][K], in place; returns how many singular values were sent, where not all are, else K. */
int dp_payload_M(dp_payload p, dp_base b, int K, double *M);

DP_C_END
