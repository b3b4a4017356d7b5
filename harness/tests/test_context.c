/* ref/context against the printed example of math.md g.2 and against ownership counted token by
 * token. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "gt.h"
#include "ref/inputs/inputs.h"
#include "ref/vocabulary/context.h"

typedef struct {
    int nlocal;
    int64_t cu[4];
    int seq[3];
    int pre, post, first, last;
    int64_t conv;
} row;

DP_TEST(context, example_of_the_specification) {
    const int64_t cu[] = {0, 5, 6, 30, 48};
    const row want[] = {{3, {0, 5, 6, 12}, {0, 1, 2}, 0, 2, 1, 0, 0},
                        {1, {0, 12}, {2}, 1, 1, 0, 0, 6},
                        {2, {0, 6, 12}, {2, 3}, 2, 1, 0, 0, 18},
                        {1, {0, 12}, {3}, 1, 0, 0, 1, 6}};
    for (int r = 0; r < 4; r++) {
        dp_context c;
        REQUIRE(dp_context_build(cu, 4, 4, r, &c, NULL) == DP_OK, "rank %d", r);
        const row *w = &want[r];
        CHECK(c.L == 12 && c.a == 12 * r && c.b == 12 * r + 12 && c.rank == r && c.N == 4,
              "rank %d", r);
        CHECK(c.nlocal == w->nlocal, "rank %d: nlocal %d, want %d", r, c.nlocal, w->nlocal);
        CHECK(!memcmp(c.local_cu, w->cu, (size_t)(w->nlocal + 1) * sizeof *w->cu),
              "rank %d: local_cu", r);
        CHECK(!memcmp(c.local_seq, w->seq, (size_t)w->nlocal * sizeof *w->seq),
              "rank %d: local_seq", r);
        CHECK(c.pre_num_ranks == w->pre && c.post_num_ranks == w->post, "rank %d: pre %d post %d",
              r, c.pre_num_ranks, c.post_num_ranks);
        CHECK(c.is_first == w->first && c.is_last == w->last, "rank %d: first %d last %d", r,
              c.is_first, c.is_last);
        CHECK(c.pre_num_conv_tokens == w->conv, "rank %d: conv %lld", r,
              (long long)c.pre_num_conv_tokens);
        CHECK(dp_context_runs_pre_fwd(&c) == (r != 3) && dp_context_runs_pre_bwd(&c) == (r != 0),
              "rank %d", r);
        CHECK(dp_context_passes(&c) == (r == 1), "rank %d", r);
        dp_context_free(&c);
    }
}

/* Paints the owner sequence of every token, then asks of each token what the definition says. No
 * clamp, no division by L of cu. */
static int agrees_with_painting(const int64_t *cu, int Nseq, int N, char *why) {
    const int64_t T = cu[Nseq], L = T / N;
    int *owner = dp_calloc((size_t)T, sizeof *owner);
    for (int i = 0; i < Nseq; i++)
        for (int64_t t = cu[i]; t < cu[i + 1]; t++)
            owner[t] = i;
    int ok = 1;
    for (int r = 0; r < N && ok; r++) {
        const int64_t a = r * L, b = a + L;
        dp_context c;
        if (dp_context_build(cu, Nseq, N, r, &c, NULL)) {
            ok = 0;
            break;
        }
        int n = 0;
        for (int64_t t = a; t < b; t++) { /* local sub-sequences: runs of one owner */
            if (t == a || owner[t] != owner[t - 1]) {
                ok = ok && n < c.nlocal && c.local_seq[n] == owner[t] && c.local_cu[n] == t - a;
                n++;
            }
        }
        ok = ok && n == c.nlocal && c.local_cu[n] == L;
        int64_t before = 0, lo = a, hi = b;
        while (lo > 0 && owner[lo - 1] == owner[a]) {
            lo--;
            before++;
        }
        while (hi < T && owner[hi] == owner[b - 1])
            hi++;
        int pre = 0, post = 0; /* earlier, later ranks that own a token of the same sequence */
        for (int j = 0; j < r; j++)
            pre += (j + 1) * L > lo;
        for (int j = r + 1; j < N; j++)
            post += j * L < hi;
        ok = ok && c.pre_num_ranks == pre && c.post_num_ranks == post &&
             c.pre_num_conv_tokens == before;
        ok = ok && c.is_first == (lo == a) && c.is_last == (hi == b);
        /* a state passes through iff the tokens just before a and just at b belong to one sequence
         */
        const int passes = a > 0 && b < T && owner[a - 1] == owner[b];
        ok = ok && dp_context_passes(&c) == passes;
        ok = ok && dp_context_runs_pre_bwd(&c) == (a > 0 && owner[a - 1] == owner[a]) &&
             dp_context_runs_pre_fwd(&c) == (b < T && owner[b - 1] == owner[b]);
        if (!ok) sprintf(why, "rank %d of %d", r, N);
        dp_context_free(&c);
    }
    free(owner);
    return ok;
}

static int64_t pick(dp_rng *g, int64_t n) { return (int64_t)(dp_rng_uniform(g) * (double)n); }

/* Random layouts of T tokens. Cut points are drawn with repetition (0 and T included). So empty
 * sequences occur at the start, in the middle, at the end and in runs. Some are snapped to rank
 * boundaries. */
static int random_cu(dp_rng *g, int64_t T, int64_t *cu) {
    const int n = 1 + (int)pick(g, 9);
    const int64_t snap = pick(g, 3) == 0 ? 4 : 1;
    cu[0] = 0;
    cu[n] = T;
    for (int i = 1; i < n; i++)
        cu[i] = pick(g, 4) == 0 ? (i > 1 ? cu[i - 1] : 0) : pick(g, T + 1) / snap * snap;
    for (int i = 1; i < n; i++)
        for (int j = i; j > 1 && cu[j] < cu[j - 1]; j--) {
            const int64_t x = cu[j];
            cu[j] = cu[j - 1];
            cu[j - 1] = x;
        }
    return n;
}

DP_TEST(context, random_layouts_with_empty_sequences) {
    dp_rng g;
    dp_rng_seed(&g, 11, 0);
    int checked = 0, empty = 0;
    for (int k = 0; k < 4000; k++) {
        int64_t cu[16], T = 1 + pick(&g, 60);
        const int n = random_cu(&g, T, cu);
        for (int i = 0; i < n; i++)
            empty += cu[i] == cu[i + 1];
        for (int N = 1; N <= T; N++) {
            if (T % N) continue;
            char why[64] = "", layout[256] = "";
            const int ok = agrees_with_painting(cu, n, N, why);
            for (int i = 0, at = 0; i <= n; i++)
                at += sprintf(layout + at, " %lld", (long long)cu[i]);
            REQUIRE(ok, "cu%s: %s", layout, why);
            checked++;
        }
    }
    CHECK(checked > 10000 && empty > 4000,
          "%d layouts, %d empty sequences: the generator went dull", checked, empty);
}

/* Smallest worlds, all of them: T <= 6, every non-decreasing cu with up to 4 sequences, every N. */
DP_TEST(context, every_small_layout) {
    for (int64_t T = 1; T <= 6; T++)
        for (int64_t x = 0; x <= T; x++)
            for (int64_t y = x; y <= T; y++)
                for (int64_t z = y; z <= T; z++) {
                    const int64_t cu[] = {0, x, y, z, T};
                    char why[64] = "";
                    for (int N = 1; N <= T; N++)
                        if (T % N == 0)
                            CHECK(agrees_with_painting(cu, 4, N, why), "0 %lld %lld %lld %lld: %s",
                                  (long long)x, (long long)y, (long long)z, (long long)T, why);
                }
}

DP_TEST(context, refuses_uneven_splits) {
    const int64_t cu[] = {0, 6};
    const struct {
        int N;
        const char *text;
    } bad[] = {{4, "multiple of ranks = 4"},
               {7, "fewer tokens than ranks = 7"},
               {0, "ranks = 0"},
               {-2, "ranks = -2"}};
    for (int i = 0; i < 4; i++) {
        dp_context c;
        dp_err e = {0};
        CHECK(dp_context_build(cu, 1, bad[i].N, 0, &c, &e) == DP_EINPUT, "N = %d", bad[i].N);
        CHECK(strstr(e.msg, bad[i].text), "N = %d: message '%s'", bad[i].N, e.msg);
        dp_context_free(&c);
    }
}
