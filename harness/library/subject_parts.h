/* harness/library/subject_parts.h - the parts of a library as a subject, on the side of the program
 * (subject.h). */
#pragma once
#include "subject_shared.h"

#define DP_SUBJECT_CANARY 0xA5
/* No results, a session's need: the state after every token, and states in slots. */
#define DP_SUBJECT_STATES "states"
#define DP_SUBJECT_POOL "pool"
#define DP_SUBJECT_DRAFTS "drafts"
#define DP_SUBJECT_TREES "trees"
#define DP_SUBJECT_RING "ring"

/* c is this program's own copy. The two files are `inputs` and `made` with their sizes; map is
 * `made`.
 */
typedef struct {
    dp_subject_control *c;
    int given, made;
    int64_t given_size, made_size;
    char *map;
    const dp_state_pool *pool; /* of the call; NULL: none */
    int call;                  /* whose outputs are looked at, where there are several */
} dp_subject_memory;

typedef struct {
    const char *name;
    const double *x;
    int per_token, ndim;
    int64_t shape[5];
} dp_subject_array; /* shape of the whole problem; per_token: axis 0 is T */

/* How a group of processes ended. */
typedef struct {
    dp_subject_outcome outcome;
    int call; /* that did not return; from 0 */
    char why[512];
} dp_subject_ending;

/* subject.c */
/* Names with blanks or commas between as what the subject writes; changes the text. DP_EINPUT: one
 * is no output and no stage; the message begins with path. */
dp_status dp_subject_read_writes(const char *path, char *writes, dp_subject *s, dp_err *e);

/* A remark on a signal beside its name, in brackets, or "". */
const char *dp_subject_signal_hint(int sig);

/* command.c: a program, and what closes it */
dp_status dp_command_run(const dp_subject *s, const dp_problem *p, const dp_subject_call *call,
                         dp_subject_result *out, dp_err *e);
void dp_command_close(struct dp_command *c);
