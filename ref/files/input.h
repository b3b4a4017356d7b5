/* ref/files/input.h - files that are read: regular files alone, up to a stated size.
 *
 * A pipe, a socket, a device or a folder is refused at once. Opening never waits for another
 * program, and nothing is read from an endless source. So is a file of /proc or /sys that has the
 * size 0 and holds something (/proc/self/pagemap).
 */
#pragma once
#include "ref/vocabulary/problem.h"
#include <stdio.h>

/* Half of the memory of this machine: more than that of one file could not be worked on here. */
int64_t dp_input_most(void);

/* A stream that the caller closes, and its size. NULL: DP_EIO (cannot be opened), DP_EINPUT (no
 * regular file, or more than `most` bytes); the message names the path. */
FILE *dp_input_open(const char *path, int64_t most, int64_t *size, dp_err *e);

/* The whole file, with a NUL behind its last byte; the caller frees *bytes. */
dp_status dp_input_read(const char *path, int64_t most, char **bytes, size_t *n, dp_err *e);
