/* harness/base/home.c - finds the program's own source tree and the interpreter of its reports
 * (home.h).
 */
#define _GNU_SOURCE
#include "home.h"
#include "ref/files/input.h"

#include <limits.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

/* Set by the Makefile: the tree, and the build folder as seen from there (absolute: elsewhere). */
#ifndef DP_TREE
#define DP_TREE "."
#define DP_BUILD "build"
#endif

static int open_to_all(const char *dir) {
    struct stat st;
    return stat(dir, &st) || !S_ISDIR(st.st_mode) || (st.st_mode & S_IWOTH);
}

static int is_tree(const char *dir) {
    static const char *const part[] = {"", "/cases", "/reports"};
    char path[PATH_MAX + 16];
    for (size_t i = 0; i < sizeof part / sizeof *part; i++) {
        snprintf(path, sizeof path, "%s%s", dir, part[i]);
        if (open_to_all(path)) return 0;
    }
    return 1;
}

static int cut_last(char *path) {
    char *slash = strrchr(path, '/');
    if (!slash) return 0;
    *slash = 0;
    return 1;
}

/* The folder in which the build folder is one that the program's file lies in or below. 0: none. */
static int above_build(char tree[PATH_MAX]) {
    const char *build = "/" DP_BUILD;
    const ssize_t n = readlink("/proc/self/exe", tree, PATH_MAX - 1);
    if (n <= 0 || n == PATH_MAX - 1 || DP_BUILD[0] == '/') return 0;
    tree[n] = 0;
    while (cut_last(tree)) {
        const size_t len = strlen(tree), tail = strlen(build);
        if (len <= tail || strcmp(tree + len - tail, build)) continue;
        tree[len - tail] = 0;
        if (is_tree(tree)) return 1;
        tree[len - tail] = '/';
    }
    return 0;
}

static const char *tree(void) {
    static char found[PATH_MAX];
    if (!*found && !above_build(found)) snprintf(found, sizeof found, "%s", DP_TREE);
    return found;
}

/* Kept to the end: options and messages hold on to them. */
const char *dp_home(const char *name) {
    static struct kept {
        struct kept *next;
        char *path;
    } * all;
    struct kept *k = dp_calloc(1, sizeof *k);
    if (asprintf(&k->path, "%s/%s", tree(), name) < 0) abort();
    k->next = all;
    all = k;
    return k->path;
}

const char *dp_python(void) {
    static char *line;
    const char *given = getenv("DP_PYTHON");
    if (given && *given) return given;
    if (!line) {
        size_t n;
        const char *path = DP_BUILD[0] == '/' ? DP_BUILD "/python" : dp_home(DP_BUILD "/python");
        if (dp_input_read(path, PATH_MAX, &line, &n, NULL)) line = strdup("");
        line[strcspn(line, "\n")] = 0;
    }
    return *line == '/' && access(line, X_OK) == 0 ? line : "python3";
}
