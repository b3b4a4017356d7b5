/* ref/vocabulary/pieces.h - into how many pieces the sequences of a batch are cut inside one card
 * (math.md g.4). Pieces let a few long sequences fill its multiprocessors. It has the published
 * guards of cuLA, as a function of lengths alone.
 */
#pragma once
#include <stdint.h>

#define DP_PIECES_LEAST 16 /* chunks a piece */
#define DP_PIECES_LONG 256 /* chunks of the longest sequence below which nothing is cut */
#define DP_PIECES_BATCH \
    10                      /* sequences that are as long as the longest, times heads, above which
                                nothing is cut */
#define DP_PIECES_VBLOCKS 2 /* blocks of V that a state pass runs side by side */
#define DP_PIECES_SPLIT 3   /* a sequence of fewer pieces is not cut */

/* Why nothing is cut; DP_PIECES_CUT: it is. */
typedef enum {
    DP_PIECES_CUT,
    DP_PIECES_FULL,   /* the sequences alone fill the card */
    DP_PIECES_SHORT,  /* the longest one is too short */
    DP_PIECES_MANY,   /* so many long ones that a second pass would cost more than it gains */
    DP_PIECES_EXCESS, /* the pieces would not run side by side */
    DP_NPIECES_WHYS
} dp_pieces_why;
extern const char *const dp_pieces_words[DP_NPIECES_WHYS];

typedef struct {
    dp_pieces_why why;
    int64_t chunks; /* of a piece, a power of two; 0: the guards before it decided */
    int64_t total;  /* pieces of all sequences */
} dp_pieces;

/* Sequences of length[0 .. n-1] > 0 tokens in chunks of `chunk`, H value heads, a card of `sms`
 * multiprocessors. Where it is not cut, total is what it would have been, or 0. */
dp_pieces dp_pieces_of(const int64_t *length, int n, int H, int sms, int chunk);
/* Pieces of one sequence, of so many chunks each. */
int64_t dp_pieces_of_sequence(int64_t chunks, int64_t piece);
