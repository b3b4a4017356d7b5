/* ref/chunk/condition.h - how ill-conditioned the triangular systems of a problem are, by
 * themselves: A = I + B L of every chunk and head (math.md e), in fp64.
 *
 * inverse: largest 1-norm of A^(-1); entry: largest entry of any inverse; condition: largest |A|_1
 * |A^(-1)|_1. They are computed from the inverse of the fp64 reference, whose own relative error is
 * at most about condition * 2^-53. Beyond 1e16 the numbers are no more than sizes. A solve in
 * arithmetic of unit roundoff u loses about log10(condition) digits, whatever the kernel does; the
 * bounds know that (ref/bound/bound.c). A problem is called ill-conditioned where half of the
 * digits are gone: condition >= u^(-1/2). That word changes no verdict. */
#pragma once
#include "chunk.h"

typedef struct {
    double inverse, entry, condition;
    int rank, head;
    int64_t token;
} dp_condition; /* place: chunk with the largest condition, its first token */

/* The condition of one chunk of the fp64 reference, without its place. */
dp_condition dp_chunk_condition(const dp_chunk *ch);
