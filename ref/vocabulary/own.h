/* ref/vocabulary/own.h - which rank owns which tokens. Tokens are cut into parts, in their order,
 * each of which one rank owns; a rank may own several parts, or none. States are handed from part
 * to part, so a part is to the recurrence what a rank is where every rank owns T / N tokens.
 *
 *   even      N parts of T / N tokens; T % N == 0
 *   balanced  N parts that differ by at most one token, for any T >= N
 *   uneven    N parts, part i of some 2 (i + 1) / (N (N + 1)) of T
 *   empty     parts of every second rank; the others own nothing
 *   zigzag    2 N parts, of which rank i owns part i and part 2 N - 1 - i
 *   cyclic    parts of 64 tokens, dealt out in turn
 *   grid      parts of 128 tokens whatever the number of ranks, which own runs of them. What is
 *             computed, and in which order it is summed, is the same for any number: so are the
 *             bits
 */
#pragma once
#include "linkage.h"
#include <stddef.h>
#include <stdint.h>
DP_C_BEGIN

typedef enum {
    DP_OWN_EVEN,
    DP_OWN_BALANCED,
    DP_OWN_UNEVEN,
    DP_OWN_EMPTY,
    DP_OWN_ZIGZAG,
    DP_OWN_CYCLIC,
    DP_OWN_GRID,
    DP_NOWNS
} dp_own;
#define DP_OWN_WORDS \
    "even|balanced|uneven|empty|zigzag|cyclic|grid" /* their names, in their order */
extern const char *const dp_own_names[DP_NOWNS];

/* Who owns the parts; zeros: even, a part a rank. */
typedef struct {
    dp_own kind;
    int ranks;
} dp_owners;

/* Parts of T tokens over so many ranks; 0: T does not divide, or a part would have no token. */
int dp_own_parts(dp_own kind, int64_t T, int ranks);
int64_t dp_own_cut(dp_own kind, int64_t T, int parts, int i); /* first token of part i; T behind */
int dp_own_part_of(dp_own kind, int64_t T, int parts, int64_t t); /* the part of token t */
/* The owner of part i. */
int dp_own_rank(dp_owners o, int parts, int i);
/* The sum over tokens that part i is added to, before the sums are added in order: its owner's, on
 * a grid its own. */
int dp_own_sum(dp_owners o, int parts, int i);
/* Tokens of a rank, in all of its parts. */
int64_t dp_own_count(dp_owners o, int64_t T, int parts, int rank);
/* Copies the rank's tokens, `each` numbers a token, between a tensor of all tokens and one of the
 * rank, part behind part. Forward from `all` to `own`; back: from `own` to `all`. */
void dp_own_move(dp_owners o, int64_t T, int parts, int rank, int64_t each, double *all,
                 double *own, int back);

/* Messages of numbers between ranks that are processes. If a message cannot be delivered, the
 * transport (harness/mpi/) ends the program. */

typedef struct {
    int rank, N; /* of this process, of all */
    void *who;
    /* Sends n numbers. Returns before they are received; x may then be changed. */
    void (*send)(void *who, int to, const double *x, int64_t n);
    /* Waits for n numbers of rank `from`, in the order in which it sent them. An error message
     * calls them `what`. */
    void (*receive)(void *who, int from, double *x, int64_t n, const char *what);
} dp_peers;

/* The process that has part i of `parts`, and whether this process has it. p NULL: all parts are
 * here. */
static inline int dp_peers_owner(const dp_peers *p, dp_owners o, int parts, int i) {
    return p ? dp_own_rank(o, parts, i) : 0;
}
static inline int dp_peers_have(const dp_peers *p, dp_owners o, int parts, int i) {
    return !p || dp_own_rank(o, parts, i) == p->rank;
}

/* Gathers `all`, a block of n numbers for every part. The blocks of this rank are set on entry, all
 * blocks on return. */
void dp_peers_gather(const dp_peers *p, dp_owners o, int parts, double *all, int64_t n,
                     const char *what);

DP_C_END
