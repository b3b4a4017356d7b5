/* harness/case/operations.h - the operations of a case, a row each. The rest of the program reads
 * fields of the row, and never asks for an operation's name.
 *
 * To add an operation, add its word (casefile.h), its row and its functions (operations.c), and its
 * subjects (harness/run/driver.c). A recurrence is no
 * operation but a row of dp_models (ref/vocabulary/problem.c).
 */
#pragma once
#include "case.h"
#include "harness/base/backends.h"

/* Kinds of deliberate faults (harness/simulated/fault.h), as bits. */
enum {
    DP_FAULTS_OF_STAGES = 1,  /* a stage of the recurrence */
    DP_FAULTS_OF_CHAIN = 2,   /* the format of the M chain, which is a stage too */
    DP_FAULTS_OF_CONV = 4,    /* a convolution */
    DP_FAULTS_OF_REPEATS = 8, /* differences between two runs with equal inputs */
    DP_FAULTS_OF_CALLS = 16,  /* data that the calls of a session pass on */
};

typedef struct dp_operation {
    const char *name; /* the word of the key op, where models are not; in `list --keys` */
    const char *what; /* as the key op explains it (list --keys) */
    int bit, keys;    /* of DP_CF_*: its own, and all keys that it takes */
    dp_model model;   /* of its recurrence, where the key op names none */

    unsigned backends;    /* that compute it: 1 << dp_backend, each */
    const char *why_none; /* message of a run on another backend; NULL: LAPACK's message */
    unsigned faults;      /* kinds that apply to it */

    unsigned is_recurrence : 1; /* one recurrence and nothing else: what a library, files and LAPACK
                                   compute, what carries a state and has invariants */
    unsigned has_problem : 1;   /* dp_case.p is complete */
    unsigned has_conv : 1;      /* dp_case.conv is complete */
    unsigned has_factors : 1;   /* dp_case.ch: drawn where they are used, no tensors of a case */
    unsigned has_front : 1;     /* dp_case.step: convolutions before p */
    unsigned has_ranks : 1;     /* ranks share its tokens; else its axis is DP_AXIS_CHUNKS */
    unsigned has_stages : 1;    /* `bisect stage` says which one is wrong */
    unsigned shrinks : 1;       /* can be shrunk; else what fails in it can */

    /* Its inputs: rows of the table of tensors. */
    const dp_tensor_field *inputs;
    int ninputs;
    size_t T, Nseq, cu;                /* offsets in dp_case; without ranks they are 0 */
    dp_dims (*dims)(const dp_case *c); /* 0: an axis that it does not have */
    /* Its shape from the file's keys and the data d (NULL: none); *tokens: those of d. */
    dp_status (*shape)(const dp_casefile *f, const dp_tensorfile *d, dp_case *c, int64_t *tokens,
                       dp_err *e);
    void (*fill)(dp_case *c); /* by their laws those that are there; NULL: without inputs */
    /* The gradients of its outputs that data did not bring. */
    void (*fill_gradients)(const dp_casefile *f, dp_case *c);
    /* The last step of a case whose inputs are complete and checked; may be NULL. */
    dp_status (*finish)(const dp_casefile *f, dp_case *c, dp_err *e);
    /* Its shape in words, on that many ranks, as snprintf. */
    void (*describe)(const dp_case *c, int ranks, char *out, size_t size);
    void (*write)(const dp_case *c, FILE *f); /* keys that only it has, as lines of a case file */
} dp_operation;
extern const dp_operation dp_operations[DP_NOPS];

/* Where a case has its tokens and packed sequences; NULL: without ranks it has none. */
typedef struct {
    int64_t *T, **cu;
    int *Nseq;
} dp_packing;
/* Pointers into *c, valid as long as it is. */
dp_packing dp_case_packing(dp_case *c);
/* Tokens; of factors, those that they stand for. */
int64_t dp_case_tokens(const dp_case *c);
