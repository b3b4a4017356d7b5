/* harness/library/subject_parts.h - the parts of a library as a subject, on the side of the program
 * (subject.h). */
#ifndef DP_SUBJECT_PARTS_H
#define DP_SUBJECT_PARTS_H
#include "subject_shared.h"

#define DP_SUBJECT_CANARY 0xA5
/* No results, a session's need: the state after every token, and states in slots. */
#define DP_SUBJECT_STATES "states"
#define DP_SUBJECT_POOL "pool"
#define DP_SUBJECT_DRAFTS "drafts"
#define DP_SUBJECT_TREES "trees"
#define DP_SUBJECT_RING "ring"
/* Bits of an output before anybody writes it: a NaN that no arithmetic makes. */
static const uint64_t DP_SUBJECT_UNWRITTEN = UINT64_C(0x7ff8deadbeef0b5e);

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

/* subject_memory.c */
/* Begins the description of a group of processes that run the library. */
void dp_subject_shared_new(dp_subject_memory *s, const dp_subject *lib, int ranks, int processes);
/* Unmaps and closes both files. */
void dp_subject_shared_free(dp_subject_memory *s);
/* Adds an array of a process, with its shape; returns its region. */
dp_subject_region *dp_subject_add_array(dp_subject_memory *s, int process, const char *name,
                                        int input, int ndim, const int64_t *shape);
/* A region of the outputs, with the guarded bytes before its data. */
char *dp_subject_bytes_of(const dp_subject_memory *s, const dp_subject_region *r);
/* The data of a region of the outputs. */
double *dp_subject_data_of(const dp_subject_memory *s, const dp_subject_region *r);
/* The output of that name; NULL: the process has none. */
const dp_subject_region *dp_subject_find_array(const dp_subject_memory *s, int process,
                                               const char *name);
/* The processes make n calls of these problems, p[0] or one other; asked before files are made. */
void dp_subject_shared_calls(dp_subject_memory *s, int n, const dp_problem *const *p);
/* Makes both files as the processes find them; the inputs are sealed. p: NULL, or problems of the
 * calls. */
dp_status dp_subject_shared_make(dp_subject_memory *s, const dp_problem *const *p, int backward,
                                 dp_err *e);

/* subject.c */
/* Names with blanks or commas between as what the subject writes; changes the text. DP_EINPUT: one
 * is no output and no stage; the message begins with path. */
dp_status dp_subject_read_writes(const char *path, char *writes, dp_subject *s, dp_err *e);

/* subject_watch.c */
/* The library's answer to `about`, its texts ended and printable. */
dp_subject_about dp_subject_look_about(const dp_subject_memory *s);
/* A remark on a signal beside its name, in brackets, or "". */
const char *dp_subject_signal_hint(int sig);
/* The file's name without its folders. */
const char *dp_subject_base_name(const char *path);
/* Writes "rank r " where there are several processes, else nothing. */
void dp_subject_on_rank(const dp_subject_memory *s, int r, char *text, size_t size);
/* Seconds of a clock that never goes back. */
double dp_subject_now(void);
/* Runs all processes to their end, to the limit in seconds, or to the first that fails. */
dp_status dp_subject_run_processes(const dp_subject_memory *s, double limit, dp_subject_ending *end,
                                   dp_err *e);

/* subject_arrays.c */
/* The inputs of a problem as arrays, a [DP_NINPUTS]; returns their number. */
int dp_subject_input_arrays(const dp_problem *p, int backward, dp_subject_array *a);
/* Adds the inputs and outputs of every process. */
void dp_subject_lay_out(dp_subject_memory *m, const dp_subject *s, const dp_problem *p,
                        const dp_subject_call *call);
/* Fills in the problem and the call for the processes. */
void dp_subject_describe(dp_subject_control *c, const dp_problem *p, const dp_subject_call *call);
/* Finds outputs that were written around, or never. */
void dp_subject_check_patterns(const dp_subject_memory *m, dp_subject_result *out);
/* Copies what the processes computed into the results. */
void dp_subject_collect(const dp_subject_memory *m, const dp_problem *p, int N,
                        dp_subject_result *out);

#endif
