/* harness/library/subject_shared.h - what the program and the processes that load a library share;
 * the library is not trusted with any of it.
 *
 * Two memory files, whose sizes are sealed (F_SEAL_SHRINK, F_SEAL_GROW), so that no one can take
 * pages away from under another:
 *   given   what the processes are told (control) and the inputs; sealed against writing too
 *   made    what they say of themselves (state), the all-gather, and the outputs
 * The program works from its own copy of `given` and from one look at each state, and believes no
 * number in it without a check.
 */
#pragma once
#include "harness/base/supervisor.h"
#include "harness/deltaproof_subject.h"
#include "subject.h"
#include <pthread.h>

#define DP_SUBJECT_HOST "deltaproof-subject-host" /* argv[0] of the process that loads it */
#define DP_SUBJECT_GIVEN_FD DP_PROCESSES_FIRST_FD
#define DP_SUBJECT_MADE_FD (DP_PROCESSES_FIRST_FD + 1)
#define DP_SUBJECT_GUARD (16L << 20) /* untouchable bytes between arrays */
#define DP_SUBJECT_PIECE (1L << 20)  /* of the all-gather, a rank */
#define DP_SUBJECT_MAX_REGIONS 48    /* arrays of a rank */

/* One array: n doubles at the end of span bytes (whole pages) at offset in its file, rounded up to
 * 64 bytes. The rest of the span before it holds a pattern. */
typedef struct {
    char name[24];
    int input, ndim;
    int64_t shape[6], n, offset, span;
} dp_subject_region;

/* At the beginning of `given`. */
typedef struct {
    char lib[4096];
    int about, ranks, processes;
    int nregion;                         /* of one process */
    int64_t memory;                      /* bytes that a process may have */
    int calls;                           /* that each process makes, one after another */
    int given_of[DP_SUBJECT_MOST_CALLS]; /* which inputs each gets: 0, or others */
    int64_t given_step, made_step;       /* bytes from the arrays of one to those of the next */
    deltaproof_subject_problem p;        /* its pointers are filled in by the process */
    char input_format[8], base[8], chain[8], recurrence[32];
    dp_subject_region region[DP_SUBJECT_MAX_RANKS][DP_SUBJECT_MAX_REGIONS];
} dp_subject_control;

typedef enum {
    DP_PHASE_IDLE,
    DP_PHASE_LOADING,
    DP_PHASE_RUNNING,
    DP_PHASE_GATHERING,
    DP_PHASE_DONE,
    DP_PHASE_REFUSED /* the library cannot be used; why says it */
} dp_subject_phase;

/* A process's report on itself. */
typedef struct {
    dp_subject_phase at;
    int call, gathers, ret;                /* call: which of its calls it is in, from 0 */
    int have_fault, region, before, wrote; /* where an access went wrong */
    int64_t bytes, off;                    /* of the present all-gather; from the array's end */
    uint64_t address, pc;                  /* pc relative to the library */
    char why[512];
} dp_subject_state;

typedef struct {
    int abi, kind, max_ranks;
    char name[64], base[16], chain[16], writes[512], design[DP_DESIGN_TEXT];
    int declared;         /* it says how it computes: design */
    char recurrences[64]; /* "": it does not say which */
} dp_subject_about;

/* At the beginning of `made`. */
typedef struct {
    pthread_barrier_t barrier;
    dp_subject_about about;
    dp_subject_state state[DP_SUBJECT_MAX_RANKS];
} dp_subject_said;

/* Input i of the table (ref/vocabulary/tensors.h): its name in regions and messages, and where
 * deltaproof_subject_problem points to it. */
typedef struct {
    const char *name, *previous; /* of the token before a call; NULL: none */
    size_t offset;
} dp_subject_input;
extern const dp_subject_input dp_subject_inputs[DP_NINPUTS];

int64_t dp_subject_pages(int64_t bytes); /* rounded up to whole pages */
/* Sanitizers keep shadow memory, which is private and can be written. */
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
#define SHADOW_MEMORY 1
#elif defined(__has_feature)
#define SHADOW_MEMORY __has_feature(thread_sanitizer)
#else
#define SHADOW_MEMORY 0
#endif

/* Limits this process and its later program: bytes of private memory (0: any), no core file, first
 * to be killed where the machine runs out. */
void dp_subject_limit_memory(int64_t memory);

/* Where the array begins within its span. */
static inline int64_t dp_subject_begin(const dp_subject_region *r) {
    return r->span - (r->n * 8 + 63) / 64 * 64;
}
