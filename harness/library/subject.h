/* harness/library/subject.h - a kernel in a shared library as a subject (its side of the interface:
 * deltaproof_subject.h).
 *
 * Every run is a process of its own (one a rank for DP_SUBJECT_PER_RANK). It is started from this
 * program's file, so that threads, OpenMP and CUDA work in it. Tensors are shared memory of fixed
 * size. Each array lies between two guard pages, and ends at the second. Inputs are read-only. The
 * rest of an output's first page holds a pattern that is checked afterwards. Outputs are filled
 * with one NaN that no arithmetic makes. When a run or this program ends, for any reason, all
 * processes of the library end (supervisor.h). A run's limits of time and memory also hold for
 * loading, constructors and `about`.
 */
#pragma once
#include "harness/simulated/calls.h"
#include "ref/chunk/stages.h"
#include "ref/vocabulary/design.h"

#define DP_SUBJECT_MAX_RANKS 64
#define DP_SUBJECT_LIMIT_S 60.0
#define DP_SUBJECT_MOST_CALLS 3 /* of one process */

struct dp_command; /* command.c */

typedef struct {
    struct dp_command
        *command;   /* a program that is called with files (command.h); NULL: a library */
    char *path;     /* absolute */
    int64_t memory; /* bytes of private memory that a process of it may have */
    char name[64];
    int per_rank, max_ranks;
    dp_base base; /* its claims */
    dp_format chain;
    char *design; /* the declared design (ref/vocabulary/design.h); NULL: not declared */
    int writes[DP_NRESULTS], writes_stage[DP_NSTAGE_TENSORS]; /* dp_result_fields; stages */
    int writes_states;                                        /* of every token */
    int writes_pool;                                          /* supports states in slots */
    int writes_drafts, takes_trees; /* has a slot a drafted token, and rolls back itself */
    int writes_ring;                /* replays tokens from a ring instead of a state */
    int has[DP_NMODELS + 1];        /* recurrences, DP_USER: any of a user's own; a program: all */
} dp_subject;
/* Loads the library in a process of its own and calls its `about` functions. limit_s 0:
 * DP_SUBJECT_LIMIT_S; memory 0: this machine's. Returns DP_EINPUT if the file or a function is
 * missing, for another version, an unknown claim or name, and if the library dies while loaded. */
dp_status dp_subject_open(const char *path, double limit_s, int64_t memory, dp_subject *s,
                          dp_err *e);
/* Frees what dp_subject_open made. */
void dp_subject_close(dp_subject *s);

typedef enum {
    DP_SUBJECT_RETURNED,
    DP_SUBJECT_REFUSED,
    DP_SUBJECT_SAYS_FAILED,
    DP_SUBJECT_CRASHED,
    DP_SUBJECT_HUNG,
    DP_SUBJECT_OUT_OF_BOUNDS,
    DP_SUBJECT_EXITED,
    DP_SUBJECT_BAD_OUTPUT,
    DP_SUBJECT_NOUTCOMES
} dp_subject_outcome;
extern const char *const
    dp_subject_outcomes[DP_SUBJECT_NOUTCOMES]; /* "returned", "unsupported", "failed", "crashed",
                                                  "hung", "out of bounds", "exited",
                                                  "bad output": what a program wrote is refused */

typedef struct {
    dp_subject_outcome outcome;
    char why[512]; /* all but DP_SUBJECT_RETURNED: the event and its rank */
    dp_result r;   /* NULL: not written by this library; also set, incomplete, when it died */
    double *stage[DP_NSTAGE_TENSORS]; /* whole, dp_stage_tensor_shape */
    double *states; /* [T][HV][K][V] after every token; NULL: not wanted, or not written */
    double *pool;   /* [slots][HV][K][V] after the call; NULL: there is none */
    /* of convolutions before the recurrence: their outputs [T][D], and the states that they pass
     * on */
    double *y[DP_NQKV];
    dp_conv_states conv;
    double seconds;
} dp_subject_result;
typedef struct {
    const char *input_format;
    int N;
    dp_base base;
    dp_format chain;
    int backward;
    int states; /* 1: states of every token are wanted, too; one rank */
    /* the pool of states of a subject with writes_pool; one rank. NULL: initial and final states */
    const dp_state_pool *pool;
    /* convolutions before q, k and v, for programs; NULL: none */
    const dp_conv_front *front;
    int chunk; /* requested tokens a chunk; 0: the subject's own */
    double limit_s;
} dp_subject_call;

/* One run over N ranks. Failures of the library are outcomes; DP_EIO means that this machine had no
 * process or memory for it. */
dp_status dp_subject_run(const dp_subject *s, const dp_problem *p, const dp_subject_call *call,
                         dp_subject_result *out, dp_err *e);
/* n <= DP_SUBJECT_MOST_CALLS calls without a pool, of problems of one shape: p[0], or one other. A
 * library or a program of --serve computes them in one process. Each array has one address in all
 * calls. The number of calls that ended goes to *made; at most the last of these failed. */
dp_status dp_subject_run_calls(const dp_subject *s, int n, const dp_problem *const *p,
                               const dp_subject_call *call, dp_subject_result *out, int *made,
                               dp_err *e);
void dp_subject_result_free(dp_subject_result *r);

/* Bits of an output before anybody writes it: a NaN that no arithmetic makes. */
static const uint64_t DP_SUBJECT_UNWRITTEN = UINT64_C(0x7ff8deadbeef0b5e);
