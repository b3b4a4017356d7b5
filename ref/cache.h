/* ref/cache.h - computed results in files named by the content that they follow from.
 *
 * <dir>/<key as hex>.<version>.<kind>:  magic "DPCACHE\n", version (8 bytes), key (16 bytes), the parts one after another, XXH3-128 of all that precedes.
 * Sizes are not stored: they follow from the content, so a file of another length is damaged. Byte order of the machine. Written to a
 * temporary file, synced, then renamed: a reader never sees half an entry, and a kill at any time loses at most that entry.
 */
#ifndef DP_CACHE_H
#define DP_CACHE_H
#include "problem.h"
#ifdef __cplusplus
extern "C" {
#endif

/* Makes a folder and those above it. 0, or -1 with errno (an existing folder is no failure). */
int dp_make_dirs(const char *path);

typedef struct { unsigned char byte[16]; } dp_key;
typedef struct { void *at; size_t size; } dp_part;

/* XXH3-128 of everything a result of p can follow from (shapes, forms, every tensor) and of `more`. */
dp_key dp_problem_key(const dp_problem *p, const void *more, size_t size);

/* 1: all parts were filled from a sound entry. 0: there is none; a damaged one is said so on stderr (parts then hold anything). */
int dp_cache_load(const char *dir, const char *kind, uint64_t version, dp_key key, const dp_part *parts, int n);
/* A failure to write costs the next run its time, not this run its result: it is reported on stderr. */
void dp_cache_save(const char *dir, const char *kind, uint64_t version, dp_key key, const dp_part *parts, int n);

#ifdef __cplusplus
}
#endif
#endif
