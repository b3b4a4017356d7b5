/* harness/simulated/rank_part.h - inputs and results of a rank that is a process of its own.
 */
#pragma once
#include "ranks.h"

/* Rank `rank` of N: its tokens of p, parts one behind the other, with the cu, states and parameters
 * of all; to be freed. */
dp_problem dp_rank_part(const dp_problem *p, int N, int rank);

/* The results of a rank: rows of its tokens, final states of the sequences that end in them and,
 * backward, ds0 of those that begin. */
typedef void dp_rank_list_fn(double *x, int64_t n, void *arg);
void dp_rank_each_result(const dp_problem *p, dp_result *out, const dp_context *c, int backward,
                         dp_rank_list_fn *f, void *arg);

/* All of them in a row: how many numbers; to or from `all`. */
int64_t dp_rank_size(dp_sim *s, int rank, int backward);
void dp_rank_pack(dp_sim *s, int rank, int backward, double *all);
void dp_rank_unpack(dp_sim *s, int rank, int backward, const double *all);
