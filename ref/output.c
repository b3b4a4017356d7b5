#define _GNU_SOURCE
#include "output.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

static dp_status io_error(const char *path, dp_err *e) { return dp_fail(e, DP_EIO, "%s: cannot be written: %s", path, strerror(errno)); }

static int is_special(const char *path) {
    struct stat s;
    return !stat(path, &s) && !S_ISREG(s.st_mode);
}

dp_status dp_output_open(dp_output *o, const char *path, dp_err *e) {
    *o = (dp_output){.path = strdup(path)};
    if (!strcmp(path, "-")) o->f = stdout;
    else if (is_special(path)) o->f = fopen(path, "wb");
    else if (asprintf(&o->temp, "%s.%ld.tmp", path, (long)getpid()) < 0) abort();
    else o->f = fopen(o->temp, "wb");
    if (o->f) return DP_OK;
    const dp_status s = io_error(path, e);
    free(o->path), free(o->temp);
    return s;
}

dp_status dp_output_close(dp_output *o, int bad, dp_err *e) {
    bad |= fflush(o->f) || ferror(o->f) || (o->temp && fsync(fileno(o->f)));
    if (o->f != stdout && fclose(o->f)) bad = 1;
    if (o->temp && !bad && rename(o->temp, o->path)) bad = 1;
    const dp_status s = bad ? io_error(o->path, e) : DP_OK;
    if (o->temp && bad) unlink(o->temp);
    free(o->path), free(o->temp);
    return s;
}

dp_status dp_json_write(json_t *o, const char *path, int digits, dp_err *e) {
    dp_output f;
    dp_status s = dp_output_open(&f, path, e);
    if (!s) {
        const int bad = json_dumpf(o, f.f, JSON_INDENT(1) | JSON_REAL_PRECISION(digits)) || fputc('\n', f.f) == EOF;
        s = dp_output_close(&f, bad, e);
    }
    json_decref(o);
    return s;
}

dp_status dp_output_check(const char *path, dp_err *e) {
    struct stat s;
    if (!path || !strcmp(path, "-")) return DP_OK;
    const int there = !stat(path, &s);
    if (there && S_ISDIR(s.st_mode)) return errno = EISDIR, io_error(path, e);
    if (there && !S_ISREG(s.st_mode)) return access(path, W_OK) ? io_error(path, e) : DP_OK;
    char *dir = strdup(path), *slash = strrchr(dir, '/');       /* a regular file is replaced: its folder counts */
    if (slash) slash[slash == dir] = 0;
    const dp_status st = access(slash ? dir : ".", W_OK) ? io_error(path, e) : DP_OK;
    free(dir);
    return st;
}
