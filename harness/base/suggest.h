/* harness/base/suggest.h - "did you mean": the known name that a mistyped word is nearest to. */
#ifndef DP_SUGGEST_H
#define DP_SUGGEST_H
#ifdef __cplusplus
extern "C" {
#endif

/* The name with the fewest letters changed, left out, put in or exchanged with their neighbour, at
 * most a third of the word's; else the first that begins with the word; NULL: none is near. */
const char *dp_suggest(const char *word, const char *const *names, int n);

#ifdef __cplusplus
}
#endif
#endif
