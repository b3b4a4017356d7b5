/* harness/record/run_id.h - the ID of a run: one text for everything that chooses the run. It is
 * enough to repeat the run bit for bit. Only run.c knows its syntax.
 *
 * The form is
 * `NAME:ranks=4,base=bf16,chain=tf32,merge=allgather[,payload=bf16][,own=zigzag][,fault=F]`. Op
 * chain: `NAME:chain=tf32`; op conv: `NAME:ranks=4,base=bf16`. The chunk solver over LAPACKE:
 * `NAME:backend=lapack,ranks=4,base=fp32,chain=fp32`. The CUDA kernels:
 * `NAME:backend=cuda,ranks=4,base=bf16,chain=tf32[,way=dh-only]`. A shared library:
 * `NAME:backend=subject,..`, with the same --subject. Tensors of another program:
 * `judge:NAME:ranks=4,..`, which cannot be repeated.
 */
#pragma once
#include "run.h"

#define DP_MAX_RANKS 4096

/* An ID's values by key: a number of ranks or an enum's value; -1: the ID has no such key. */
typedef struct {
    char *case_name; /* to be freed, also after a failure */
    int value[DP_NID_KEYS];
} dp_id;

/* subject: there is a shared library, so that `backend=subject` is known. DP_EINPUT names the ID
 * and the first part of it that is not understood. */
dp_status dp_id_parse(const char *id, int subject, dp_id *out, dp_err *e);

/* A number of ranks, 1 .. DP_MAX_RANKS; -1: it is none. */
int dp_find_ranks(const char *text);
