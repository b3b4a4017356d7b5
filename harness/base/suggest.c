/* Distances between words (suggest.h). */
#include "suggest.h"

#include <ctype.h>
#include <string.h>

enum { LONGEST = 63 };

static int min(int a, int b) { return a < b ? a : b; }

static int differ(char a, char b) { return tolower((unsigned char)a) != tolower((unsigned char)b); }

/* Optimal string alignment: no letter is touched twice. */
int dp_word_distance(const char *a, const char *b) {
    static const int far = LONGEST + 1;
    const int m = (int)strlen(a), n = (int)strlen(b);
    int d[LONGEST + 1][LONGEST + 1];
    if (m > LONGEST || n > LONGEST) return far;
    for (int i = 0; i <= m; i++)
        d[i][0] = i;
    for (int j = 0; j <= n; j++)
        d[0][j] = j;
    for (int i = 1; i <= m; i++)
        for (int j = 1; j <= n; j++) {
            const int other = differ(a[i - 1], b[j - 1]);
            d[i][j] = min(min(d[i - 1][j], d[i][j - 1]) + 1, d[i - 1][j - 1] + other);
            if (i > 1 && j > 1 && !differ(a[i - 1], b[j - 2]) && !differ(a[i - 2], b[j - 1]))
                d[i][j] = min(d[i][j], d[i - 2][j - 2] + 1);
        }
    return d[m][n];
}

const char *dp_suggest(const char *word, const char *const *names, int n) {
    const size_t len = strlen(word);
    const char *best = NULL;
    int least = (int)len / 3 + 1 + (len < 3);
    for (int i = 0; i < n; i++) {
        const int d = dp_word_distance(word, names[i]);
        if (d >= least) continue;
        least = d;
        best = names[i];
    }
    for (int i = 0; i < n && !best; i++)
        /* NOLINTNEXTLINE(*NonNullParamChecker): there are n names */
        if (len >= 2 && !strncmp(word, names[i], len)) best = names[i];
    return best;
}
