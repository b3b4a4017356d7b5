/* Escape sequences, in one place (terminal.h). */
#include "terminal.h"
#include "startup.h"

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
