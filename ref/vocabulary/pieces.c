/* The published guards of a split inside one card (pieces.h). */
#include "pieces.h"

const char *const dp_pieces_words[DP_NPIECES_WHYS] = {"cut", "full", "short", "many", "excess"};

static int64_t up(int64_t a, int64_t b) { return (a + b - 1) / b; }

/* The power of two nearest to n >= 1 in its logarithm: up from sqrt(2) times the one below. */
static int64_t power_of_two(int64_t n) {
    int64_t below = 1;
    while (2 * below <= n)
        below *= 2;
    return n * n > 2 * below * below ? 2 * below : below;
}

int64_t dp_pieces_of_sequence(int64_t chunks, int64_t piece) {
    return chunks >= DP_PIECES_SPLIT * piece ? up(chunks, piece) : 1;
}

dp_pieces dp_pieces_of(const int64_t *length, int n, int H, int sms, int chunk) {
    const int64_t side = (int64_t)DP_PIECES_VBLOCKS * H; /* blocks that one sequence runs as */
    int64_t all = 0, most = 0;
    dp_pieces p = {0};
    for (int i = 0; i < n; i++) {
        const int64_t chunks = up(length[i], chunk);
        all += chunks;
        if (chunks > most) most = chunks;
    }
    if (side * n >= sms) return (dp_pieces){.why = DP_PIECES_FULL};
    if (most < DP_PIECES_LONG) return (dp_pieces){.why = DP_PIECES_SHORT};
    if (all * H > DP_PIECES_BATCH * most) return (dp_pieces){.why = DP_PIECES_MANY};
    p.chunks = up(most, sms / side); /* side < sms here */
    if (p.chunks < DP_PIECES_LEAST) p.chunks = DP_PIECES_LEAST;
    p.chunks = power_of_two(p.chunks);
    for (int i = 0; i < n; i++)
        p.total += dp_pieces_of_sequence(up(length[i], chunk), p.chunks);
    if (side * p.total > sms) p.why = DP_PIECES_EXCESS;
    return p;
}
