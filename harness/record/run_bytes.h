/* harness/record/run_bytes.h - runs as bytes that the same program reads again, whole: for another
 * process of it, and for a later one (harness/commands/finished.h).
 */
#ifndef DP_RUN_BYTES_H
#define DP_RUN_BYTES_H
#include "run.h"
#ifdef __cplusplus
extern "C" {
#endif

/* To be freed. */
char *dp_runs_pack(const dp_runs *r, size_t *bytes);
/* Appends them; 0: they are not whole, and nothing was appended. Words of a run that outlive it
 * outlive this, too. */
int dp_runs_unpack(const char *from, size_t bytes, dp_runs *r);

#ifdef __cplusplus
}
#endif
#endif
