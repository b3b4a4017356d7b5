/* ref/files/output.c - writes files whole or not at all (output.h). */
#include "output.h"
#include "ref/vocabulary/text.h"

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <math.h>
#include <pthread.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <sys/random.h>
#include <sys/stat.h>
#include <unistd.h>

#define PREFIX ".deltaproof-"
#define SUFFIX ".tmp"

static dp_status io_error(const char *path, dp_err *e) {
    return dp_fail(e, DP_EIO, "%s: cannot be written: %s", path, strerror(errno));
}

/* ---- files that are being written ------------------------------------------------------------ */

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static dp_output *open_list;
static int at_exit;

/* By whoever has the lock. */
static void remember(dp_output *o) {
    if (!at_exit) at_exit = !atexit(dp_output_abandon);
    o->next = open_list;
    open_list = o;
}

static void forget(dp_output *o) {
    pthread_mutex_lock(&lock);
    for (dp_output **p = &open_list; *p; p = &(*p)->next)
        if (*p == o) {
            *p = o->next;
            break;
        }
    pthread_mutex_unlock(&lock);
}

void dp_output_end(void) {
    pthread_mutex_lock(&lock);
    for (dp_output *o = open_list; o; o = o->next)
        if (o->temp[0]) unlinkat(o->folder, o->temp, 0);
    open_list = NULL;
}

void dp_output_abandon(void) {
    dp_output_end();
    pthread_mutex_unlock(&lock);
}

/* ---- files that killed programs left --------------------------------------------------------- */

static int is_temp(const char *name) {
    const size_t n = strlen(name), suffix = sizeof SUFFIX - 1;
    return !strncmp(name, PREFIX, sizeof PREFIX - 1) && n > suffix &&
           !strcmp(name + n - suffix, SUFFIX);
}

/* Nobody writes it any more: ours, a file, and its lock can be had. */
static void remove_left(int folder, const char *name) {
    struct stat st;
    const int fd = openat(folder, name, O_RDONLY | O_NONBLOCK | O_NOFOLLOW | O_CLOEXEC);
    if (fd < 0) return;
    const int ours = !fstat(fd, &st) && S_ISREG(st.st_mode) && st.st_uid == geteuid();
    if (ours && !flock(fd, LOCK_EX | LOCK_NB)) unlinkat(folder, name, 0);
    close(fd);
}

/* Once a folder and program: a cache has thousands of entries. */
static int swept(int folder) {
    static struct {
        dev_t dev;
        ino_t ino;
    } seen[64];
    static int n;
    struct stat st;
    int found = fstat(folder, &st) != 0;
    pthread_mutex_lock(&lock);
    for (int i = 0; i < n && i < 64; i++)
        found |= seen[i].dev == st.st_dev && seen[i].ino == st.st_ino;
    if (!found) {
        seen[n % 64].dev = st.st_dev;
        seen[n++ % 64].ino = st.st_ino;
    }
    pthread_mutex_unlock(&lock);
    return found;
}

static void sweep(int folder) {
    if (swept(folder)) return;
    const int copy = openat(folder, ".", O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    DIR *d = copy < 0 ? NULL : fdopendir(copy);
    if (!d) {
        if (copy >= 0) close(copy);
        return;
    }
    for (struct dirent *x = readdir(d); x; x = readdir(d))
        if (is_temp(x->d_name)) remove_left(folder, x->d_name);
    closedir(d);
}

/* ---- one file -------------------------------------------------------------------------------- */

/* /dev/stdout, /dev/fd/3, /proc/self/fd/3: what this process has open already. -1: none of these.
 */
static int descriptor(const char *path) {
    static const char *const folder[] = {"/dev/fd/", "/proc/self/fd/"};
    int64_t n;
    if (!strcmp(path, "/dev/stdout")) return 1;
    if (!strcmp(path, "/dev/stderr")) return 2;
    for (int i = 0; i < 2; i++) {
        const size_t len = strlen(folder[i]);
        if (!strncmp(path, folder[i], len) && !dp_number_int(path + len, 0, 1 << 20, &n))
            return (int)n;
    }
    return -1;
}

static int is_special(const char *path) {
    struct stat s;
    if (descriptor(path) >= 0 || !strncmp(path, "/proc/", 6)) return 1;
    return !stat(path, &s) && !S_ISREG(s.st_mode) && !S_ISDIR(s.st_mode);
}

static int open_folder(const char *path) {
    DP_OWN char *dir = dp_strdup(path);
    char *slash = strrchr(dir, '/');
    if (slash) slash[slash == dir] = 0;
    return open(slash ? dir : ".", O_RDONLY | O_DIRECTORY | O_CLOEXEC);
}

static void new_name(char *name, size_t size) {
    static const char letters[] = "abcdefghijklmnopqrstuvwxyz0123456789";
    unsigned char random[6];
    if (getrandom(random, sizeof random, 0) != (ssize_t)sizeof random) abort();
    char text[7] = "";
    for (int i = 0; i < 6; i++)
        text[i] = letters[random[i] % 36];
    snprintf(name, size, PREFIX "%s" SUFFIX, text);
}

/* A new file, locked before anybody who sweeps can take it for one that was left. */
static int create(dp_output *o) {
    for (int i = 0; i < 100; i++) {
        struct stat st;
        new_name(o->temp, sizeof o->temp);
        const int flags = O_WRONLY | O_CREAT | O_EXCL | O_NOFOLLOW | O_CLOEXEC;
        const int fd = openat(o->folder, o->temp, flags, 0666);
        if (fd < 0 && errno == EEXIST) continue;
        if (fd < 0) return -1;
        const int locked = !flock(fd, LOCK_EX | LOCK_NB) || errno != EWOULDBLOCK;
        if (locked && !fstat(fd, &st) && st.st_nlink) return fd;
        close(fd); /* somebody swept in between: another name */
    }
    errno = EEXIST;
    return -1;
}

static dp_status open_temp(dp_output *o, dp_err *e) {
    struct stat st;
    const char *name = dp_base_name(o->path);
    const int is_name = *name && strcmp(name, ".") && strcmp(name, "..");
    o->folder = open_folder(o->path);
    int fd = -1;
    if (o->folder >= 0 && strlen(name) > 255)
        errno = ENAMETOOLONG;
    else if (o->folder >= 0 &&
             (!is_name || (!fstatat(o->folder, name, &st, 0) && S_ISDIR(st.st_mode))))
        errno = EISDIR;
    else if (o->folder >= 0) {
        sweep(o->folder);
        pthread_mutex_lock(&lock); /* a program that ends here knows the file, or there is none */
        fd = create(o);
        if (fd >= 0 && (o->f = fdopen(fd, "wb"))) remember(o);
        pthread_mutex_unlock(&lock);
    }
    if (o->f) return DP_OK;
    const dp_status s = io_error(o->path, e);
    if (fd >= 0) {
        close(fd);
        unlinkat(o->folder, o->temp, 0);
    }
    if (o->folder >= 0) close(o->folder);
    return s;
}

static dp_status open_special(dp_output *o, dp_err *e) {
    const int have = descriptor(o->path);
    const int fd = have >= 0 ? fcntl(have, F_DUPFD_CLOEXEC, 0)
                             : open(o->path, O_WRONLY | O_NOCTTY | O_CLOEXEC);
    o->f = fd < 0 ? NULL : fdopen(fd, "wb");
    if (o->f) return DP_OK;
    const dp_status s = io_error(o->path, e);
    if (fd >= 0) close(fd);
    return s;
}

static dp_status open_path(dp_output *o, const char *path, int special, dp_err *e) {
    *o = (dp_output){.path = dp_strdup(path), .folder = -1};
    const dp_status s = special ? open_special(o, e) : open_temp(o, e);
    if (s) {
        free(o->path);
        o->path = NULL;
    }
    return s;
}

dp_status dp_output_replace(dp_output *o, const char *path, dp_err *e) {
    return open_path(o, path, 0, e);
}

dp_status dp_output_open(dp_output *o, const char *path, dp_err *e) {
    struct stat st;
    if (stat(path, &st) && errno == ELOOP) return io_error(path, e);
    if (strcmp(path, "-")) return open_path(o, path, is_special(path), e);
    *o = (dp_output){.path = dp_strdup(path), .folder = -1, .f = stdout};
    return DP_OK;
}

dp_status dp_output_close(dp_output *o, int bad, dp_err *e) {
    const char *name = dp_base_name(o->path);
    const int temp = o->temp[0] != 0;
    int why = 0;
    if (fflush(o->f) || ferror(o->f) || (temp && fsync(fileno(o->f)))) {
        why = errno;
        bad = 1;
    }
    /* Renamed while its lock is held: nobody can sweep it away. */
    if (temp && !bad && renameat(o->folder, o->temp, o->folder, name)) {
        why = errno;
        bad = 1;
    }
    if (temp && bad) unlinkat(o->folder, o->temp, 0);
    if (temp) forget(o);
    if (o->f != stdout && fclose(o->f)) {
        why = why ? why : errno;
        bad = 1;
    }
    if (temp && !bad) fsync(o->folder); /* the rename itself must last too */
    if (temp) close(o->folder);
    errno = why ? why : EIO;
    const dp_status s = bad ? io_error(o->path, e) : DP_OK;
    free(o->path);
    o->path = NULL;
    return s;
}

json_t *dp_json_text(const char *s) {
    const size_t n = strlen(s);
    if (dp_text_good(s, n, 1) == n) return json_stringn_nocheck(s, n);
    DP_OWN char *shown = dp_calloc(4 * n + 1, 1);
    dp_text_printable(s, shown, 4 * n + 1);
    return json_string_nocheck(shown);
}

json_t *dp_json_number(double x) {
    return isnan(x)   ? json_string("nan")
           : isinf(x) ? json_string(x > 0 ? "inf" : "-inf")
                      : json_real(x);
}

static dp_status write_json(json_t *o, const char *path, size_t flags, dp_err *e) {
    dp_output f;
    dp_status s = !path ? DP_OK
                  : o   ? dp_output_open(&f, path, e)
                        : dp_fail(e, DP_EINPUT, "%s: a text in it is not valid UTF-8", path);
    if (!s && path) {
        /* NOLINTNEXTLINE(*CallAndMessage): open where s is DP_OK */
        const int bad = json_dumpf(o, f.f, flags) || fputc('\n', f.f) == EOF;
        s = dp_output_close(&f, bad, e);
    }
    json_decref(o);
    return s;
}

dp_status dp_json_write(json_t *o, const char *path, int digits, dp_err *e) {
    return write_json(o, path, JSON_INDENT(1) | JSON_REAL_PRECISION((size_t)digits), e);
}

dp_status dp_json_write_compact(json_t *o, const char *path, dp_err *e) {
    return write_json(o, path, JSON_COMPACT | JSON_REAL_PRECISION(9), e);
}

dp_status dp_output_check(const char *path, dp_err *e) {
    dp_output o;
    if (!path || !strcmp(path, "-")) return DP_OK;
    if (is_special(path)) return access(path, W_OK) ? io_error(path, e) : DP_OK;
    const dp_status s = dp_output_open(&o, path, e);
    if (s) return s;
    /* NOLINTNEXTLINE(*CallAndMessage): open where s is DP_OK */
    unlinkat(o.folder, o.temp, 0);
    forget(&o);
    fclose(o.f);
    close(o.folder);
    free(o.path);
    return DP_OK;
}

int dp_make_dirs(const char *path) {
    DP_OWN char *b = dp_strdup(path);
    int bad = 0;
    for (char *p = b; *p && !bad; p++)
        if (*p == '/' && p > b) {
            *p = 0;
            bad = mkdir(b, 0777) && errno != EEXIST;
            *p = '/';
        }
    bad = bad || (mkdir(b, 0777) && errno != EEXIST);
    struct stat st;
    if (!bad && stat(path, &st))
        bad = 1;
    else if (!bad && !S_ISDIR(st.st_mode)) {
        errno = ENOTDIR;
        bad = 1;
    }
    return bad ? -1 : 0;
}
