/* ref/arithmetic/mp.h - flat arrays of MPFR numbers: header and limbs of one number side by side,
 * one allocation, nothing allocated in loops.
 *
 * One entry takes 32 bytes + limbs (56 bytes at 192 bits). Entries start as +0. A mp_array may be a
 * view into another one.
 */
#pragma once
#include "ref/vocabulary/problem.h"
#include <mpfr.h>
#include <stdlib.h>

typedef struct {
    char *mem;
    size_t stride;
} mp_array;

/* Entry i, to be read and written; no bounds are checked. */
static inline mpfr_ptr mp_at(mp_array a, int64_t i) {
    return (mpfr_ptr)(a.mem + (size_t)i * a.stride);
}
/* A view that begins at entry i; not to be freed. */
static inline mp_array mp_from(mp_array a, int64_t i) {
    return (mp_array){a.mem + (size_t)i * a.stride, a.stride};
}

/* n entries of +0 with prec bits, in one allocation that mp_free gives back. */
static inline mp_array mp_alloc(int64_t n, mpfr_prec_t prec) {
    mp_array a = {.stride = sizeof(__mpfr_struct) + mpfr_custom_get_size(prec)};
    a.mem = dp_calloc((size_t)n, a.stride);
    for (int64_t i = 0; i < n; i++)
        mpfr_custom_init_set(mp_at(a, i), MPFR_ZERO_KIND, 0, prec, mp_at(a, i) + 1);
    return a;
}
/* Frees an array of mp_alloc, once; views of it are void then. */
static inline void mp_free(mp_array *a) {
    free(a->mem);
    a->mem = NULL;
}
/* n entries become +0. */
static inline void mp_zero(mp_array a, int64_t n) {
    for (int64_t i = 0; i < n; i++)
        mpfr_set_zero(mp_at(a, i), 1);
}
/* n entries; exact where dst has as many bits as src, else rounded to nearest. */
static inline void mp_copy(mp_array dst, mp_array src, int64_t n) {
    for (int64_t i = 0; i < n; i++)
        mpfr_set(mp_at(dst, i), mp_at(src, i), MPFR_RNDN);
}
/* NULL: zeros. Exact, as every precision here is at least 64 bits. */
static inline void mp_set_doubles(mp_array dst, const double *src, int64_t n) {
    for (int64_t i = 0; i < n; i++)
        mpfr_set_d(mp_at(dst, i), src ? src[i] : 0, MPFR_RNDN);
}
