/* The folder of a command's files (command.h). */
#define _GNU_SOURCE
#include "command_parts.h"

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <ftw.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

#define PREFIX "deltaproof-run-"
#define LEFT_S 60 /* a folder that is younger may not be locked yet */

static int remove_entry(const char *path, const struct stat *st, int kind, struct FTW *at) {
    (void)st, (void)kind, (void)at;
    return remove(path), 0; /* what cannot be removed stays, and so does its folder */
}

static void remove_all(const char *path) { nftw(path, remove_entry, 16, FTW_DEPTH | FTW_PHYS); }

/* Ours, and locked by nobody: the program that made it is gone. */
static void remove_if_left(const char *path) {
    struct stat st;
    const int fd = open(path, O_RDONLY | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC);
    if (fd < 0) return;
    if (!fstat(fd, &st) && st.st_uid == geteuid() && time(NULL) - st.st_mtime > LEFT_S &&
        !flock(fd, LOCK_EX | LOCK_NB))
        remove_all(path);
    close(fd);
}

static void remove_left(const char *top) {
    char *path;
    DIR *d = opendir(top);
    for (struct dirent *x = d ? readdir(d) : NULL; x; x = readdir(d)) {
        if (strncmp(x->d_name, PREFIX, strlen(PREFIX))) continue;
        if (asprintf(&path, "%s/%s", top, x->d_name) < 0) abort();
        remove_if_left(path);
        free(path);
    }
    if (d) closedir(d);
}

/* With serve every call has other names: a late file is no file of the next call. */
static void name_files(struct dp_command *c) {
    char number[24] = "";
    if (c->serve) snprintf(number, sizeof number, "-%ld", c->ncall);
    free(c->in);
    free(c->out);
    if (asprintf(&c->in, "%s/in%s.safetensors", c->folder, number) < 0 ||
        asprintf(&c->out, "%s/out%s.safetensors", c->folder, number) < 0)
        abort();
}

dp_status dp_command_folder_make(struct dp_command *c, dp_err *e) {
    const char *set = getenv("TMPDIR"), *top = set && *set ? set : "/tmp";
    char *folder;
    if (c->serve && strpbrk(top, " \t"))
        return dp_fail(e, DP_EINPUT, "TMPDIR = %s: has a blank, which ends a path of --serve", top);
    remove_left(top);
    if (asprintf(&folder, "%s/" PREFIX "XXXXXX", top) < 0) abort();
    if (!mkdtemp(folder)) {
        dp_fail(e, DP_EIO, "%s: a folder for files of a subject cannot be made: %s", top,
                strerror(errno));
        free(folder);
        return DP_EIO;
    }
    c->folder = folder;
    c->lock = open(folder, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    if (c->lock >= 0) flock(c->lock, LOCK_EX | LOCK_NB);
    name_files(c);
    if (strlen(c->out) < sizeof((dp_command_told *)0)->out) return DP_OK;
    return dp_fail(e, DP_EINPUT, "TMPDIR: a path of %zu bytes is too long", strlen(c->out));
}

void dp_command_folder_clear(struct dp_command *c) {
    remove_all(c->in);
    remove_all(c->out);
    c->ncall++;
    name_files(c);
}

void dp_command_folder_remove(struct dp_command *c) {
    if (c->folder) remove_all(c->folder);
    if (c->lock >= 0) close(c->lock);
    free(c->folder);
    free(c->in);
    free(c->out);
}
