/* Where case files lie: by name, all of a folder, and what they name beside them (case.h). */
#define _GNU_SOURCE
#include "case.h"
#include "case_parts.h"
#include "ref/vocabulary/text.h"

#include <dirent.h>
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>

char *dp_case_sibling(const char *path, const char *name) {
    const char *slash = strrchr(path, '/');
    const size_t dir = slash && *name != '/' ? (size_t)(slash - path) + 1 : 0;
    char *out = dp_calloc(dir + strlen(name) + 1, 1);
    memcpy(out, path, dir);
    strcpy(out + dir, name);
    return out;
}

char *dp_case_path(const char *dir, const char *name) {
    char *p;
    struct stat st;
    if (stat(name, &st) == 0 && S_ISREG(st.st_mode)) return dp_strdup(name);
    if (asprintf(&p, "%s/%s.case", dir, name) < 0) abort();
    return p;
}

static int is_case(const struct dirent *d) {
    const size_t n = strlen(d->d_name);
    return n > 5 && !strcmp(d->d_name + n - 5, ".case");
}

static int by_bytes(const struct dirent **a, const struct dirent **b) {
    return strcmp((*a)->d_name, (*b)->d_name);
}

dp_status dp_case_find_all(const char *dir, char ***paths, int *n, dp_err *e) {
    struct dirent **d;
    *paths = NULL;
    *n = 0;
    const int found = scandir(dir, &d, is_case, by_bytes);
    if (found < 0) return dp_fail(e, DP_EIO, "%s: cannot be listed: %s", dir, strerror(errno));
    *paths = dp_calloc((size_t)found, sizeof **paths);
    for (int i = 0; i < found; i++) {
        const char *name = d[i]->d_name;
        if (dp_text_good(name, strlen(name), 0) < strlen(name))
            dp_fail(e, DP_EINPUT, "%s/%s: the name is not UTF-8 text: give the case another", dir,
                    name);
        if (asprintf(&(*paths)[i], "%s/%s", dir, name) < 0) abort();
        free(d[i]);
    }
    free(d);
    if (!found) dp_fail(e, DP_EINPUT, "%s: no *.case file here", dir);
    *n = found;
    if (!e->code) return DP_OK;
    for (; *n; --*n)
        free((*paths)[*n - 1]);
    free(*paths);
    *paths = NULL;
    return e->code;
}
