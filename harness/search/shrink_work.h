/* harness/search/shrink_work.h - the parts of shrink: a case as tensors over axes, why it fails,
 * what is tried. */
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

typedef struct {
    const dp_shrink_options *o;
    dp_shrink_options small; /* without the cache: every candidate is another problem */
    dp_case *c;
    const dp_failure *want;
    int runs, tries;
    double start; /* dp_now */
    char *laws;   /* text of a case file that makes c, as it was before its values were touched;
                     NULL: there is none */
    dp_err *e;
    dp_status st;
} dp_shrink_work;

/* A part that a case may do without. */
typedef struct {
    int (*has)(const dp_case *c);
    void (*leave_out)(dp_case *c); /* of its arrays; NULL: its axis is shortened instead */
    const char *key, *value;       /* of its text: the setting without; value NULL: the default */
    const char *what;              /* is said to have been done */
} dp_shrink_part;
#define DP_SHRINK_NPARTS 8

/* shrink_parts.c */
extern const dp_shrink_part dp_shrink_parts[DP_SHRINK_NPARTS];

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

/* shrink_laws.c */
/* Fewer tokens, heads, channels, settings of the case's text, whose laws draw the inputs anew, for
 * as long as it fails alike. Returns whether any was removed. */
int dp_shrink_by_laws(dp_shrink_work *w);
/* Writes such a text as a case file with a reason and a source of its own. */
dp_status dp_shrink_write_laws(const char *laws, const char *reason, const char *source,
                               const char *path, dp_err *e);

/* shrink_write.c */
/* Do its values fit a case file's text, each that differs from its tensor's most frequent one? */
int dp_shrink_fits_text(const dp_case *c);

/* shrink_shape.c */
/* Shortens axes for as long as the case fails alike; returns whether any became shorter. */
int dp_shrink_shape(dp_shrink_work *w);

/* shrink_values.c */
/* Makes values simpler for as long as the case fails alike; returns whether any did. */
int dp_shrink_simplify_all(dp_shrink_work *w);

/* shrink.c */
/* Is there an error, or no try left? */
int dp_shrink_spent(const dp_shrink_work *w);
/* Tells the caller what was taken, as printf. */
void dp_shrink_report(const dp_shrink_work *w, const char *fmt, ...)
    __attribute__((format(printf, 2, 3)));
/* Takes the candidate in place of the case where it fails alike, else frees it; returns which. */
int dp_shrink_offer(dp_shrink_work *w, dp_case *cand);

#endif
