/* ref/chunk/state.h - one step's work on a state S [K][V] in fp64 (math.md b): decay, read,
 * write. */
#pragma once
#include "ref/vocabulary/problem.h"

/* S <- diag(exp g) S; g: the Kg log gates of a token and head. */
void dp_state_decay(const dp_problem *p, const double *g, double *S);
/* y [V] = S' k */
void dp_state_read(const dp_problem *p, const double *S, const double *k, double *y);
/* S += a k y' */
void dp_state_write(const dp_problem *p, double a, const double *k, const double *y, double *S);
