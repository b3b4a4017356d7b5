/* ref/vocabulary/memory.h - where arrays of a problem and of its results lie, if not in memory of
 * this process: a device's. Their addresses are for the calls below alone. Sums of an address and
 * an index are such addresses, too.
 *
 * A call that fails ends the program with a message and exit status 2, like dp_calloc. */
#pragma once
#include "linkage.h"
#include <stdint.h>
#include <string.h>
DP_C_BEGIN

/* Rows [rows][width] of two arrays: got = factor * want, or they differ by at most small. */
typedef struct {
    const double *got, *want;
    const uint8_t *kept; /* memory of this process, a byte a row: 1 if compared; NULL: all */
    int64_t rows, width;
    double factor, small;
} dp_memory_pair;

/* How an entry is edited; all are exact in every format. */
typedef enum { DP_EDIT_SIGN, DP_EDIT_GATE, DP_EDIT_WEAKER_GATE, DP_EDIT_MIRRORED } dp_edit;
/* Columns [from, to) of rows [rows][width]: `into` gets edited entries of `of`. */
typedef struct {
    double *into;
    const double *of;
    int64_t rows, width, from, to;
    dp_edit edit;
} dp_memory_edit;

/* A law of inputs by number: entry i of a tensor follows from seed and i alone
 * (ref/inputs/inputs_large.h). */
typedef struct dp_large_law dp_large_law;
/* Inputs on which nothing rounds, token by token (ref/inputs/inputs_exact.h). */
typedef struct dp_exact dp_exact;

typedef struct dp_memory {
    double *(*make)(int64_t n, double value);
    /* NULL for NULL. Both may be one array: `own` comes before a change. */
    double *(*copy)(const double *x, int64_t n);
    void (*free)(double *x);
    double *(*own)(double *x, int64_t n); /* x, or a copy that is x's alone, x freed */
    void (*put)(double *to, const double *host, int64_t n);
    void (*get)(double *host, const double *from, int64_t n);
    void (*move)(double *to, const double *from, int64_t n);
    void (*times)(double *x, int64_t n, double c);
    void (*edit)(const dp_memory_edit *e);
    int64_t (*first)(const dp_memory_pair *x); /* entry of the first difference; -1: none */
    int (*fill)(double *x, const dp_large_law *law, int64_t rows); /* 0: not this law */
    void (*exact)(const dp_exact *x); /* its plan is memory of this process */
    void (*set)(double *x, const int64_t *at, const double *value, int64_t n); /* some entries */
} dp_memory;

/* The numbers of an array wherever it lies: to this process and back, and from one to another. */
#define DP_MEMORY_MOVES(NAME)                                                               \
    static inline void dp_memory_##NAME(const dp_memory *s, double *to, const double *from, \
                                        int64_t n) {                                        \
        if (s)                                                                              \
            s->NAME(to, from, n);                                                           \
        else                                                                                \
            memcpy(to, from, sizeof *to *(size_t)n);                                        \
    }
DP_MEMORY_MOVES(get)
DP_MEMORY_MOVES(put)
DP_MEMORY_MOVES(move)

DP_C_END
