/* ref/output.h - files that are written whole or not at all: under another name in the same folder, synced, then renamed.
 * A path that is there and is no regular file (a device, a pipe) is written to as it is; "-" is standard output.
 */
#ifndef DP_OUTPUT_H
#define DP_OUTPUT_H
#include "problem.h"
#include <jansson.h>
#include <stdio.h>
#ifdef __cplusplus
extern "C" {
#endif

typedef struct { FILE *f; char *path, *temp; } dp_output;    /* temp NULL: f is the path itself */

dp_status dp_output_open(dp_output *o, const char *path, dp_err *e);
/* bad: what was written is not complete; nothing of it then stays. DP_EIO names the path. */
dp_status dp_output_close(dp_output *o, int bad, dp_err *e);

/* Consumes o. digits: of real numbers. */
dp_status dp_json_write(json_t *o, const char *path, int digits, dp_err *e);

/* Could a file be written there? To be asked before the work whose result it holds.; NULL: yes. */
dp_status dp_output_check(const char *path, dp_err *e);

#ifdef __cplusplus
}
#endif
#endif
