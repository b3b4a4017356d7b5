/* harness/base/terminal.h - texts for a person. A terminal shows colour, and a line that says how
 * far the work has come. Colour is never the only sign of anything. */
#pragma once
#include "ref/vocabulary/problem.h"
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

/* "Did you mean": the known name that a mistyped word is nearest to. Edits that make b of a, in any
 * case: letters changed, left out, put in, or exchanged with their neighbour. 64 where a word has
 * more than 63. */
int dp_word_distance(const char *a, const char *b);

/* The nearest name, at a distance of at most a third of the word's letters. Else the first that
 * begins with the word; NULL: none is near. */
const char *dp_suggest(const char *word, const char *const *names, int n);

/* Everything that is wrong with an input, gathered into one message, so that it need not be learned
 * attempt by attempt. */
typedef struct {
    int n;
    char text[sizeof((dp_err *)0)->msg]; /* one a line */
} dp_complaints;

/* Adds a printf message; control characters in it are made printable. */
void dp_complain(dp_complaints *all, const char *fmt, ...) __attribute__((format(printf, 2, 3)));

/* DP_OK without complaints; else DP_EINPUT: one complaint is the message, several are its lines. */
dp_status dp_complaints_end(const dp_complaints *all, dp_err *e);
