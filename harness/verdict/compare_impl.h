/* harness/verdict/compare_impl.h - what the files of a comparison share (compare.h):
 *   compare.c         rows, the bound tier, the expected tier, what no limit covers;
 *   subject_errors.c  the subject's errors in the shape of the draws. */
#ifndef DP_COMPARE_IMPL_H
#define DP_COMPARE_IMPL_H
#include "compare.h"
#include "ref/vocabulary/problem.h"

typedef enum {
    ROW_OPEN,          /* measured; no bound, or none that is finite */
    ROW_BOUND,         /* held against its bound; rows up to here are looked at */
    ROW_WITHOUT_TRUTH, /* neither is finite */
    ROW_BESIDE,        /* no value, in a chunk whose truth is not finite */
    ROW_WRONG_CLASS    /* finite where the truth is not */
} dp_row_kind_of;

typedef struct {
    dp_row_kind_of kind;
    dp_place at;
    double err2, want2, bound, radius, limit; /* limit: bound and radius */
    double raw2;                              /* err2 before what the row may lose was taken off */
    double err, size, raw;      /* norms: roots of err2, want2, raw2, also where those leave fp64 */
    int64_t known, wrong, lost; /* entries: truth finite; result finite where truth is not; the
                                 * reverse */
    int worst;                  /* entry */
    double worst_err;
} dp_measured;

typedef struct {
    const dp_compare_in *in;
    double *err;      /* [rows][width] got - want */
    dp_measured *row; /* [rows] */
    double *rms;      /* [heads] root mean square of |truth| of a head's rows */
    double scale;     /* a power of two that makes squares of the truth numbers of fp64; mostly 1 */
    dp_judgement *j;
} dp_comparison;

/* Below it squares lose digits; norms below it are made of those, and bounds of such norms. */
#define DP_SQUARE_LEAST 0x1p-900
#define DP_NORM_LEAST 0x1p-400

typedef struct {
    dp_row_map map;
    int32_t *window, *window_of_part, *unit, *position, *column_head;
    double *err2, *want2, *floor2, *along, *length2;
    double *terms2; /* [draws->rows] the part of floor2 that is of terms that cancel */
    double *column2, *want_column2, *floor_column2, *column_rows;
    double stored[DP_NDIRECTIONS];
} dp_subject_errors;

/* The errors of a comparison that has draws, to be freed. */
dp_subject_errors dp_subject_errors_of(const dp_comparison *c);
/* Frees what it holds. */
void dp_subject_errors_free(dp_subject_errors *x);
#endif
