/* ref/files/cache.h - computed results in files named by what they follow from: the content, and
 * the arithmetic.
 *
 * File <dir>/<key as hex>.<sources>.<kind>: magic "DPCACHE2", sources (32 digits), its maker (96
 * bytes), key (16 bytes), the parts one after another. Then follows XXH3-128 of all that precedes.
 * Sizes are not stored: they follow from the content, so a file of another length is damaged. Byte
 * order of the machine. Written by output.h: a reader never sees half an entry, and a kill at any
 * time loses at most that entry.
 *
 * sources: a hash that the Makefile takes of every source that the bits of that kind can follow
 * from, of the compiler and its flags. An entry of another arithmetic is not found, and is removed
 * when this one's entry takes its place. CPU, BLAS and threads are no part of it: the bits do not
 * depend on them.
 */
#pragma once
#include "ref/vocabulary/problem.h"

typedef enum {
    DP_CACHE_TRUTH,
    DP_CACHE_AUDIT, /* from ref/ */
    DP_CACHE_CONDITION,
    DP_CACHE_BOUND,
    DP_CACHE_STAGES,
    DP_CACHE_EXPECTED, /* from ref/ and harness/ */
    DP_NCACHE_KINDS
} dp_cache_kind;
const char *dp_cache_sources(dp_cache_kind kind); /* the 32 digits */

typedef struct {
    unsigned char byte[16];
} dp_key;
typedef struct {
    void *at;
    size_t size;
} dp_part;

/* XXH3-128, in pieces; dp_hash_end frees it. */
typedef struct XXH3_state_s dp_hash;
dp_hash *dp_hash_new(void);
void dp_hash_add(dp_hash *h, const void *x, size_t n);
dp_key dp_hash_end(dp_hash *h);
void dp_key_hex(dp_key key, char hex[33]);

/* That of everything a result of p can follow from (shapes, forms, every tensor) and of `more`.
 */
dp_key dp_problem_key(const dp_problem *p, const void *more, size_t size);

/* 1: all parts were filled from a sound entry. 0: there is none; a damaged one is said so on
 * stderr, with who made it (parts then hold anything). */
int dp_cache_load(const char *dir, dp_cache_kind kind, dp_key key, const dp_part *parts, int n);
/* A failure to write costs the next run its time, not this run its result: it is reported on
 * stderr. */
void dp_cache_save(const char *dir, dp_cache_kind kind, dp_key key, const dp_part *parts, int n);
