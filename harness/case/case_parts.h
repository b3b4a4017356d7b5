/* harness/case/case_parts.h - the steps from the settings of a case file to a case, in the order in
 * which case.c takes them.
 *
 * Each that can refuse returns DP_EINPUT with file, line, key and value.
 */
#pragma once
#include "case.h"
#include "case_inputs.h"
#include "casefile.h"

/* case.c: shapes, from the file's keys and from the data. They must agree, and fit into memory. */
#define DP_CONV_MAX_WIDTH 64 /* of a convolution, as the key W */
/* For all tensors of a case together: 1M tokens of a head of K = V = 128 with its gradients are
 * 6.7e8. */
#define DP_CASE_MAX_NUMBERS (1ll << 30)
/* A dimension as the case states it against that of the data; 0: not stated. dflt: neither states
 * it. */
dp_status dp_case_agree(const dp_casefile *f, const char *key, int64_t stated, int64_t found,
                        int64_t dflt, int64_t *out, dp_err *e);
/* The key T, at most the tokens that the data has; all of them where it does not say. */
dp_status dp_case_set_tokens(const dp_casefile *f, int64_t found, int64_t *T, dp_err *e);
/* Length of an axis counted from the last, 1 on; 0: t is NULL or has none. */
int64_t dp_case_dim_from_end(const dp_tensor *t, int i);

/* case.c: a file of tensors while it is loaded. */
typedef struct {
    const dp_casefile *f;
    const char *key; /* that names the file: data or conv_data */
    const dp_tensorfile *d;
    int64_t tokens;
    dp_format widest; /* dtype of what was loaded, parameters aside; DP_BF16 at first */
} dp_case_data;
/* Every tensor is one of the inputs s [n], once. */
dp_status dp_case_check_names(const dp_case_data *x, const dp_case_input *s, int n, dp_err *e);
/* Into *s->where, the first tokens that the case has. */
dp_status dp_case_load_input(dp_case_data *x, dp_case_input *s, dp_err *e);

/* case.c: name, relative to the folder of path; to be freed. */
char *dp_case_sibling(const char *path, const char *name);
