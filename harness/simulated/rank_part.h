/* harness/simulated/rank_part.h - what a rank that is a process of its own is given, and what it
 * gives back.
 */
#ifndef DP_RANK_PART_H
#define DP_RANK_PART_H
#include "ranks.h"
#ifdef __cplusplus
extern "C" {
#endif

/* Rank `rank` of N: its tokens of p, of several parts one behind the other, with the cu, states and
 * parameters of all; to be freed. */
dp_problem dp_rank_part(const dp_problem *p, int N, int rank);

/* What a rank has in the results of all: rows of its tokens, final states of the sequences that end
 * in them and, backward, ds0 of those that begin. */
typedef void dp_rank_list_fn(double *x, int64_t n, void *arg);
void dp_rank_each_result(const dp_problem *p, dp_result *out, const dp_context *c, int backward,
                         dp_rank_list_fn *f, void *arg);

/* The lists of numbers that a rank gives back, one after another, in the same order in its own
 * process (dp_sim_new_rank) and in the frame of all ranks (dp_sim_new_frame), after dp_sim_begin of
 * both with the same backward. What a frame has no room for yet is made. */
void dp_rank_each_list(dp_sim *s, int rank, int backward, dp_rank_list_fn *f, void *arg);

/* All of them in a row: how many numbers; to or from `all`. */
int64_t dp_rank_size(dp_sim *s, int rank, int backward);
void dp_rank_pack(dp_sim *s, int rank, int backward, double *all);
void dp_rank_unpack(dp_sim *s, int rank, int backward, const double *all);

#ifdef __cplusplus
}
#endif
#endif
