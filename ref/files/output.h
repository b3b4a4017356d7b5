/* ref/files/output.h - files that are written whole or not at all, by everything that writes one.
 *
 * A file is written as `.deltaproof-XXXXXX.tmp` in the folder of its path, synced, and renamed to
 * the path. No other file has that name, and it is no symlink (O_EXCL). A symlink
 * planted at either name is replaced, never written through. A reader sees the old file or the new
 * one. An unfinished file is removed when writing fails, when the program ends, and on a signal
 * (dp_output_abandon). After kill -9 the next program that writes into that folder removes it. A
 * writer holds a lock (flock), which tells a file being written from an abandoned one.
 *
 * A symlink is replaced; the file behind it stays unchanged. A symlink that names
 * itself is refused.
 *
 * A path of a device or a pipe, or of an open file (/dev/stdout, /dev/fd/3, /proc/..), is written
 * to directly; "-" is standard output.
 */
#pragma once
#include "ref/vocabulary/problem.h"
#include <jansson.h>
#include <stdio.h>

typedef struct dp_output {
    FILE *f;
    char *path;
    char temp[32];          /* name in the folder; "": f is the path itself */
    int folder;             /* descriptor; -1: f is the path itself */
    struct dp_output *next; /* of those that are being written */
} dp_output;

/* o stays at its address until it is closed. DP_EIO names the path. */
dp_status dp_output_open(dp_output *o, const char *path, dp_err *e);
/* The same for a path that is this program's own to replace, whatever is there. */
dp_status dp_output_replace(dp_output *o, const char *path, dp_err *e);
/* bad: what was written is not complete; nothing of it then stays. DP_EIO names the path. */
dp_status dp_output_close(dp_output *o, int bad, dp_err *e);

/* Removes incomplete files; to be called before an exit. */
void dp_output_abandon(void);
/* The same, and who opens one afterwards waits for ever: to be called before a signal ends all. */
void dp_output_end(void);

/* A text of a record: as it is, or with what is no text as \xNN (text.h). Never NULL. */
json_t *dp_json_text(const char *s);
/* Numbers that JSON lacks are text: nan, inf, -inf. */
json_t *dp_json_number(double x);

/* Consumes o, also where path is NULL and nothing is written. digits: of real numbers. DP_EINPUT: a
 * text or number that JSON does not have. */
dp_status dp_json_write(json_t *o, const char *path, int digits, dp_err *e);
/* The same in one line, real numbers with 9 digits: for what programs read. */
dp_status dp_json_write_compact(json_t *o, const char *path, dp_err *e);

/* Could a file be written there? To be asked before the work whose result it holds; it is tried.
 * NULL: yes. */
dp_status dp_output_check(const char *path, dp_err *e);

/* Makes a folder and those above it. 0, or -1 with errno (an existing folder is no failure). */
int dp_make_dirs(const char *path);
