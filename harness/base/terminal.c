/* Escape sequences, in one place (terminal.h). */
#include "terminal.h"
#include "ref/vocabulary/text.h"
#include "startup.h"

#include <ctype.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

/* Is it a terminal that moves its cursor (TERM is not dumb)? The terminals of mpirun's processes do
 * not count: nobody watches them. */
static int is_terminal(FILE *f) {
    const char *term = getenv("TERM");
    return isatty(fileno(f)) && !dp_under_mpirun() && term && *term && strcmp(term, "dumb") != 0;
}

static int coloured(FILE *f) {
    const char *no = getenv("NO_COLOR");
    return !(no && *no) && is_terminal(f);
}

void dp_put(FILE *f, dp_paint paint, const char *text, int width) {
    static const char *const colour[] = {[DP_PLAIN] = "",
                                         [DP_GOOD] = "\033[32m",
                                         [DP_BAD] = "\033[1;31m",
                                         [DP_DOUBTFUL] = "\033[33m"};
    const int paints = paint != DP_PLAIN && coloured(f);
    fprintf(f, "%s%-*s%s", paints ? colour[paint] : "", width, text, paints ? "\033[0m" : "");
}

void dp_put_line(FILE *f, int indent, const char *text) {
    if (is_terminal(f) && indent + strlen(text) > 80)
        dp_put_words(f, indent, text);
    else
        fprintf(f, "%s\n", text);
}

void dp_put_words(FILE *f, int indent, const char *text) {
    int at = indent;
    for (int first = 1; *text; first = 0) {
        const int word = (int)strcspn(text, " ");
        const int fits = first || at + 1 + word <= 80;
        if (!fits)
            at = fprintf(f, "\n%*s", indent, "") - 1;
        else if (!first)
            at += fprintf(f, " ");
        at += fprintf(f, "%.*s", word, text);
        text += word + strspn(text + word, " ");
    }
    fputc('\n', f);
}

void dp_status_line(const char *text) {
    static int shown;
    if (!is_terminal(stderr) || (!*text && !shown)) return;
    fprintf(stderr, "\r\033[K%.79s", text);
    fflush(stderr);
    shown = *text != 0;
}

/* ---- the nearest name ------------------------------------------------------------------------ */

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

/* ---- several complaints ---------------------------------------------------------------------- */

void dp_complain(dp_complaints *all, const char *fmt, ...) {
    char text[sizeof all->text], plain[sizeof all->text];
    va_list ap;
    va_start(ap, fmt);
    vsnprintf(text, sizeof text, fmt, ap);
    va_end(ap);
    dp_text_printable(text, plain, sizeof plain);
    dp_text_add(all->text, sizeof all->text, "%s%s", all->n ? "\n  " : "", plain);
    all->n++;
}

dp_status dp_complaints_end(const dp_complaints *all, dp_err *e) {
    if (!all->n) return DP_OK;
    if (all->n == 1) return dp_fail(e, DP_EINPUT, "%s", all->text);
    dp_fail(e, DP_EINPUT, "%d things are missing or wrong:", all->n);
    if (e) dp_text_add(e->msg, sizeof e->msg, "\n  %s", all->text); /* its lines stay lines */
    return DP_EINPUT;
}
