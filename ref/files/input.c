/* ref/files/input.c - opens and reads regular files (input.h). */
#include "input.h"

#include <errno.h>
#include <fcntl.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

int64_t dp_input_most(void) { return dp_memory_bytes() / 2; }

static const char *kind_of(mode_t mode) {
    if (S_ISDIR(mode)) return "a folder";
    if (S_ISFIFO(mode)) return "a pipe";
    if (S_ISSOCK(mode)) return "a socket";
    return "a device";
}

/* A file of /proc or /sys: its size says nothing of its content, which may be endless. */
static int has_more(int fd, const struct stat *st) {
    char byte;
    return !st->st_size && pread(fd, &byte, 1, 0) != 0;
}

FILE *dp_input_open(const char *path, int64_t most, int64_t *size, dp_err *e) {
    struct stat st;
    FILE *f = NULL;
    /* O_NONBLOCK: a pipe that nobody writes to, or a terminal, is opened without waiting. */
    const int fd = open(path, O_RDONLY | O_NONBLOCK | O_NOCTTY | O_CLOEXEC);
    if (fd < 0) {
        const int sock = errno == ENXIO;
        if (sock)
            dp_fail(e, DP_EINPUT, "%s: not a regular file", path);
        else
            dp_fail(e, DP_EIO, "%s: cannot be opened: %s", path, strerror(errno));
        return NULL;
    }
    if (fstat(fd, &st))
        dp_fail(e, DP_EIO, "%s: cannot be read: %s", path, strerror(errno));
    else if (!S_ISREG(st.st_mode))
        dp_fail(e, DP_EINPUT, "%s: not a regular file but %s", path, kind_of(st.st_mode));
    else if (has_more(fd, &st))
        dp_fail(e, DP_EINPUT, "%s: its size is 0, and it is not empty: a file of the system", path);
    else if (st.st_size > most)
        dp_fail(e, DP_EINPUT, "%s: %lld bytes: at most %lld are read", path, (long long)st.st_size,
                (long long)most);
    else if (!(f = fdopen(fd, "rb")))
        dp_fail(e, DP_EIO, "%s: cannot be opened: %s", path, strerror(errno));
    if (!f)
        close(fd);
    else
        *size = st.st_size;
    return f;
}

dp_status dp_input_read(const char *path, int64_t most, char **bytes, size_t *n, dp_err *e) {
    int64_t size = 0;
    FILE *f = dp_input_open(path, most, &size, e);
    dp_status s = DP_OK;
    *bytes = NULL;
    if (!f) return e ? e->code : DP_EIO;
    *n = (size_t)size;
    *bytes = dp_calloc(*n + 1, 1);
    if (fread(*bytes, 1, *n, f) != *n)
        s = dp_fail(e, DP_EIO, "%s: cannot be read: %s", path,
                    ferror(f) ? strerror(errno) : "it became shorter");
    fclose(f);
    if (s) {
        free(*bytes);
        *bytes = NULL;
    }
    return s;
}
