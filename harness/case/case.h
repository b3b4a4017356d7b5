/* harness/case/case.h - a case: what to run, on which inputs, over which ranks and policies, read
 * from a *.case file.
 *
 * File format: `key = value`, one a line. A '#' at the start of a line or after a space starts a
 * comment. Numbers are decimal or hex floats (0x1.8p-3); commas separate lists. Required: reason,
 * source, op. Paths are relative to the case file's folder. The table of keys (name, type, default,
 * meaning) is in casefile.c; dp_case_print_keys prints it. Every refusal names file, line, key and
 * value (DP_EINPUT).
 */
#pragma once
#include "casefile.h"
#include "ref/chunk/conv.h"
#include "ref/files/safetensors.h"
#include "ref/inputs/inputs.h"
#include "ref/vocabulary/exchange.h"
#include "ref/vocabulary/formats.h"
#include "ref/vocabulary/recurrence_text.h"
#include "session.h"
#include <stdio.h>

/* Arithmetic of the truth. auto: MPFR up to 1e8 steps (entries of states that it computes),
 * double-double above. MPFR serves whatever double-double refuses, and base fp64 where its radii
 * are not far below fp64's roundings. */
typedef enum { DP_PICK_AUTO, DP_PICK_MPFR, DP_PICK_DD, DP_NTRUTH_PICKS } dp_truth_pick;
extern const char *const dp_truth_pick_names[DP_NTRUTH_PICKS];

typedef struct {
    char *name; /* the file's name without .case */
    char *path;
    char *text; /* of its file; NULL: the caller set its tensors */
    char *reason, *source;
    char *unjudged;                /* "NAMES: REASON" of tensors that may be; NULL: none */
    const struct dp_operation *op; /* its row: case/operations.h */
    const char *op_name;
    dp_user_recurrence *rows; /* of the key recurrence, or NULL */
    int smoke;                /* 1: part of the smoke set */
    int nranks;
    int ranks[16]; /* lists that the op has no use for hold their one default */
    int nbase;
    dp_base base[DP_NBASES];
    int nchain;
    dp_format chain[DP_NFORMATS];
    unsigned char all_chains[16]; /* by ranks: 1: every format of the chain, 0: the first alone */
    int pair_rows;                /* design of simulated ranks */
    int nmerge;
    dp_exchange merge[DP_NRUN_EXCHANGES];
    int npayload;
    dp_payload payload[DP_NRUN_PAYLOADS];
    int nown;
    dp_own own[DP_NOWNS];
    int backward; /* 0: forward only */
    int bits;     /* precision of the truth, 192 */
    dp_truth_pick truth;
    int allow_nonfinite; /* inputs contain NaN or Inf on purpose */
    dp_inputs_spec spec;
    char *data;            /* safetensors file, NULL for generated inputs */
    dp_format input_dtype; /* widest dtype of the inputs (parameters and states aside): DP_BF16,
                              DP_FP32 or DP_FP64 */

    /* Which of the next four are there: has_problem, has_conv, has_front, has_factors of its row
     * (operations.h). Existing ones are complete and checked. */
    dp_problem p;
    dp_conv conv;
    /* The convolutions before q, k and v, without dy, and the radius of their outputs. The
     * recurrence p reads the true outputs (step.h) */
    struct {
        int on[3];
        dp_conv conv[3];
        dp_conv_result rad[3];
    } step;
    struct {
        dp_regime regime;
        int n, K;
    } ch;               /* n factors; the seed is spec.seed */
    dp_session session; /* its calls; without a text there is none */
    int nwarn;
    char **warn; /* e.g. R >= 3 with sum beta |k|^2 > 2 (math.md b) */
} dp_case;

/* Its session; NULL: all tokens are one call. */
const dp_session *dp_case_session(const dp_case *c); /* session.c */
/* Reads and checks the file, generates or loads the inputs. */
dp_status dp_case_load(const char *path, dp_case *c, dp_err *e);
/* A file of a recurrence of a user's own (ref/vocabulary/recurrence_text.h), or its name in folder
 * dir (NULL: none) or among the program's cases. From then on every case of a recurrence is of that
 * one, whatever its op. */
dp_status dp_case_recurrence(const char *name, const char *dir, dp_err *e);
/* Opens a case file. With `load_inputs` = 0 it reads settings only, no tensors and no data file
 * (for `list`). Then p and conv have the shapes that the case file states, 0 for all others. */
dp_status dp_case_open(const char *path, int load_inputs, dp_case *c, dp_err *e);
/* The same from the text of a file; path serves messages, the name, and the folder that `data` is
 * relative to. */
dp_status dp_case_parse(const char *text, size_t len, const char *path, int load_inputs, dp_case *c,
                        dp_err *e);
/* The same from settings as in a case file (no `data`) and tensors that have been read: everything
 * comes from d. */
dp_status dp_case_from_tensors(const char *text, const dp_tensorfile *d, dp_case *c, dp_err *e);
/* Does t have this shape? Axes of length 1 may be left out or added (a batch axis, one head); flat:
 * one axis for all will do. */
int dp_case_same_shape(const dp_tensor *t, int ndim, const int64_t *want, int flat);
void dp_case_shape_text(const dp_tensor *t, char *out, size_t size); /* "[8192,1,128]" */
/* Appends a warning, which the record has. */
void dp_case_warn(dp_case *c, const char *fmt, ...) __attribute__((format(printf, 2, 3)));
void dp_case_free(dp_case *c);
void dp_case_print_keys(FILE *out); /* name, type, default, meaning, ops of every key */
/* The file of `name`: name itself where it is a file, else DIR/name.case. To be freed. */
char *dp_case_path(const char *dir, const char *name);
/* Its largest number of ranks of at most `most`, 1 where none is. */
int dp_case_most_ranks(const dp_case *c, int most);
/* All *.case files of a folder, sorted by name; *n paths that the caller frees one by one.
 * DP_EINPUT when there are none. */
dp_status dp_case_find_all(const char *dir, char ***paths, int *n, dp_err *e);
