/* ref/bound/carried.h - a state that is kept in a short format between the calls of a session:
 * how its error grows over steps.
 *
 * The recurrence (math.md b) runs in fp64, one token a step, over the tokens of a problem, again
 * from the first after the last. Beside the state runs one copy for each format, rounded to that
 * format after every `every` steps and otherwise treated alike. Its distance from the state is the
 * effect of the format alone.
 *
 * Bounds. A step is S' = (I - sum_j beta_j k_j k_j') D S + ..., D = diag(exp g). It maps an error E
 * to one of at most a |E|, a = max_x exp(g_x) max(1, sum_j beta_j |k_j|^2 - 1), in the Frobenius
 * norm. Storing adds at most d:
 *     floats       u |S| + sqrt(n) t/2       u the unit roundoff (twice that where it truncates or
 *                                            draws), t the spacing of subnormals
 *     tile scales  the same by tile, t and the largest number scaled by the tile's largest entry
 *     feedback     what a store leaves out, r, is added before the next: E + r moves by (I - A) r,
 *                  of at most (1 - min_x exp(g_x) + sum_j beta_j |k_j|^2) |r|, and |E| by |r| more
 * Rows that read other keys than they write, or one after another: dp_step_norms.
 * sound:    b' = a b + d, whatever the errors are.
 * probable: v' = a^2 v + d^2, DP_LAMBDA sqrt(v): errors that do not know of each other. Rounding to
 *           nearest is like that only where the state moves by more than its spacing: a state that
 *           hardly moves is rounded the same way again and again, and its error is at the sound
 *           bound's slope, not at the probable one's.
 */
#pragma once
#include "ref/chunk/gate.h"
#include "ref/vocabulary/formats.h"
#include "ref/vocabulary/problem.h"
DP_C_BEGIN

typedef struct {
    const char *name, *words;
    double bytes; /* of an entry, scales and what is fed back included, for tiles of 128 */
} dp_carried_format;
enum { DP_NCARRIED = 8 };
extern const dp_carried_format dp_carried_formats[DP_NCARRIED];

enum { DP_CARRIED_POINTS = 96 };

/* One head in one format. Errors are relative to the state's norm, of o to the rms of its rows so
 * far. */
typedef struct {
    int format, head, n;
    int64_t step[DP_CARRIED_POINTS]; /* 8 a decade, and the last */
    double error[DP_CARRIED_POINTS]; /* of the state */
    double sound[DP_CARRIED_POINTS], probable[DP_CARRIED_POINTS];
    double largest_o; /* error of a row of o */
    int64_t exceeded; /* first step at which a row of o is further off than `need`; 0: none */
    double of_sound, of_probable; /* largest error / bound over all steps */
    double slope;                 /* of log error by log step over the last two decades */
    double bias;                  /* cosine between error and state at the end */
} dp_carried;

typedef struct {
    int64_t steps;
    int every;
    double need;
} dp_carried_options;

/* Runs head hv of sequence 0. DP_EINPUT: the sequence is empty. The same bits on every machine. */
dp_status dp_carried_run(const dp_problem *p, int hv, int format, const dp_carried_options *o,
                         dp_carried *out, dp_err *e);

/* A step without its decay. The norm of an error grows by at most `grows`, 1 or more. An error that
 * stands still moves by at most `moves` of itself. e = beta erase o k.
 *   I - k'e, e another key   largest singular value, as truth_bound.c derives it; |k||e|
 *   I - beta k'k             max(1, beta |k|^2 - 1), or 1 - beta |k|^2 of beta < 0; |beta| |k|^2
 *   rows one after another   their product; the sum, each after the growth of those before it
 *   rows that read at once   of the sum; with other keys or a beta < 0: 1 + the sum; the sum */
typedef struct {
    double grows, moves;
} dp_step_norms;
dp_step_norms dp_step_norms_of(const dp_problem *p, const dp_activated *in, int64_t t, int hv);

/* One head of the tokens first .. first + n - 1 of a problem. */
typedef struct {
    const dp_problem *p;
    dp_activated in;
    int hv;
    int64_t first, n;
} dp_carried_head;
/* Token t of a head in fp64 (math.md b): S [K][V] becomes the next state, o [V] the output. write
 * [rows][V] is scratch. */
void dp_carried_advance(const dp_carried_head *s, int64_t t, double *S, double *o, double *write);
/* How much that lengthens the error of a state at most: a of the bounds above. */
double dp_carried_grows(const dp_carried_head *s, int64_t t);
/* Two reasons why a state grows. Strength: the largest sum over a token's keys of strength times
 * |k| |erasing key|; a step contracts up to 2. Gates: a head's sum of its largest log decays above
 * 0. */
typedef struct {
    double strength, gates;
    int64_t token;
    int head;
} dp_growth;
dp_growth dp_growth_of(const dp_problem *p);

/* Stores a row of n numbers, rounded to nearest, and replaces x by the numbers that a reader gets.
 * With feedback left [n] holds the remainder, before and after; else it is unchanged. */
void dp_carried_store_row(int format, int n, double *x, double *left);

DP_C_END
