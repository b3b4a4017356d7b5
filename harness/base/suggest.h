/* harness/base/suggest.h - "did you mean": the known name that a mistyped word is nearest to. */
#ifndef DP_SUGGEST_H
#define DP_SUGGEST_H

/* Edits that make b of a, in any case: letters changed, left out, put in, or exchanged with their
 * neighbour. 64 where a word has more than 63. */
int dp_word_distance(const char *a, const char *b);

/* The nearest name, at a distance of at most a third of the word's letters. Else the first that
 * begins with the word; NULL: none is near. */
const char *dp_suggest(const char *word, const char *const *names, int n);
#endif
