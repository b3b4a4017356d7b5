/* harness/search/shrink_work.h - what the files of shrink share: a case as tensors over axes.
 */
#ifndef DP_SHRINK_WORK_H
#define DP_SHRINK_WORK_H
#include "harness/case/case_inputs.h"
#include "shrink.h"

enum {
    DP_SHRINK_TOK,
    DP_SHRINK_SEQ,
    DP_SHRINK_HEAD,
    DP_SHRINK_GROUP,
    DP_SHRINK_KEY,
    DP_SHRINK_CHAN,
    DP_SHRINK_COL,
    DP_SHRINK_DIM,
    DP_SHRINK_TAP,
    DP_SHRINK_NAXES,
    DP_SHRINK_RANK,
    DP_SHRINK_LOCAL,
    DP_SHRINK_NONE = -1
}; /* value head = HEAD * G + GROUP; RANK and LOCAL are cuts of TOK */

#define DP_SHRINK_MAX_AXES 5
typedef struct {
    const dp_tensor_field *field;
    double **x;
    int nax, ax[DP_SHRINK_MAX_AXES];
} dp_shrink_tensor;

/* shrink_axes.c */
/* The inputs of a case as tensors over axes, t [DP_CASE_MAX_INPUTS]; returns their number. */
int dp_shrink_tensors(dp_case *c, dp_shrink_tensor *t);
/* Length of an axis. */
int64_t dp_shrink_length(const dp_case *c, int ax);
/* Entries of a tensor. */
int64_t dp_shrink_count(const dp_case *c, const dp_shrink_tensor *t);
/* A copy of a case with arrays and cu of its own, names the original's. */
dp_case dp_shrink_copy(const dp_case *from);
/* Frees such a copy. */
void dp_shrink_copy_free(dp_case *c);
/* Takes indices [at, at + len) of an axis away. */
void dp_shrink_drop(dp_case *c, int ax, int64_t at, int64_t len);

/* shrink_write.c */
/* Do its values fit a case file's text, each that differs from its tensor's most frequent one? */
int dp_shrink_fits_text(const dp_case *c);

#endif
