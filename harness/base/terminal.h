/* harness/base/terminal.h - what is different where a person watches: colour and a line that says
 * how far the work has come. Colour is never the only sign of anything. */
#ifndef DP_TERMINAL_H
#define DP_TERMINAL_H
#include <stdio.h>

typedef enum { DP_PLAIN, DP_GOOD, DP_BAD, DP_DOUBTFUL } dp_paint;

/* Prints `text` in a field of `width` columns (0: as it is); coloured on a terminal where NO_COLOR
 * is not set. */
void dp_put(FILE *f, dp_paint paint, const char *text, int width);

/* Prints the words of `text` after `indent` columns that are written already. Further lines begin
 * there, and have at most 80 columns unless a word is longer. */
void dp_put_words(FILE *f, int indent, const char *text);
/* The same on a terminal, where `text` does not fit; else `text` in one line, for programs. */
void dp_put_line(FILE *f, int indent, const char *text);

/* Replaces the status line on standard error; "": takes it away. Nothing where that is no terminal.
 */
void dp_status_line(const char *text);
#endif
