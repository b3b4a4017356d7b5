/* harness/base/home.c - finds the program's own source tree and the interpreter of its reports
 * (home.h).
 */
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

#define NOWHERE "/dev/null/deltaproof" /* no path goes on below a device */

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

static int own_file(char path[PATH_MAX]) {
    const ssize_t n = readlink("/proc/self/exe", path, PATH_MAX - 1);
    if (n <= 0 || n == PATH_MAX - 1) return 0;
    path[n] = 0;
    return 1;
}

/* The folder in which the build folder is one that the program's file lies in or below. 0: none. */
static int above_build(char tree[PATH_MAX]) {
    const char *build = "/" DP_BUILD;
    if (DP_BUILD[0] == '/' || !own_file(tree)) return 0;
    while (cut_last(tree)) {
        const size_t len = strlen(tree), tail = strlen(build);
        if (len <= tail || strcmp(tree + len - tail, build)) continue;
        tree[len - tail] = 0;
        if (is_tree(tree)) return 1;
        tree[len - tail] = '/';
    }
    return 0;
}

/* PREFIX/share/deltaproof of a program that is PREFIX/bin/deltaproof. 0: there is none. */
static int installed_beside(char tree[PATH_MAX]) {
    static const char share[] = "/share/deltaproof";
    if (!own_file(tree) || !cut_last(tree) || !cut_last(tree)) return 0;
    const size_t len = strlen(tree);
    if (len + sizeof share > PATH_MAX) return 0;
    memcpy(tree + len, share, sizeof share);
    return is_tree(tree);
}

static struct {
    char path[PATH_MAX];
    int in_source; /* 0: installed, or nothing is there */
} home;

/* The tree that the program was built in may be gone by now, and its path anybody's. */
static const char *tree(void) {
    if (*home.path) return home.path;
    home.in_source = above_build(home.path);
    if (home.in_source || installed_beside(home.path)) return home.path;
    home.in_source = is_tree(DP_TREE);
    snprintf(home.path, sizeof home.path, "%s", home.in_source ? DP_TREE : NOWHERE);
    return home.path;
}

/* Once, where something of the tree is asked for and the tree is not there. */
static void complain(void) {
    static int said;
    if (strcmp(tree(), NOWHERE) || said++) return;
    fprintf(stderr,
            "deltaproof: its cases and reports are not found: the program was moved away from "
            "%s, or others may write there\n",
            DP_TREE);
}

/* Kept to the end: options and messages hold on to them. */
const char *dp_home(const char *name) {
    static struct kept {
        struct kept *next;
        char *path;
    } * all;
    struct kept *k = dp_calloc(1, sizeof *k);
    complain();
    k->path = dp_text_new("%s/%s", tree(), name);
    k->next = all;
    all = k;
    return k->path;
}

/* A folder of the user; NULL: nobody says where. */
static char *user_cache(void) {
    const char *xdg = getenv("XDG_CACHE_HOME"), *own = getenv("HOME");
    if (xdg && *xdg == '/') return dp_text_new("%s/deltaproof", xdg);
    return own && *own == '/' ? dp_text_new("%s/.cache/deltaproof", own) : NULL;
}

const char *dp_home_include(void) {
    static char path[PATH_MAX];
    static const char folder[] = "/include", header[] = "/deltaproof_subject.h";
    if (!own_file(path) || !cut_last(path) || !cut_last(path)) return dp_home("harness");
    const size_t len = strlen(path);
    if (len + sizeof folder + sizeof header > sizeof path) return dp_home("harness");
    strcat(path, folder);
    strcat(path, header);
    const int there = !access(path, R_OK);
    path[len + strlen(folder)] = 0;
    return there ? path : dp_home("harness");
}

const char *dp_home_cache(void) {
    static char *path;
    (void)tree();
    if (home.in_source) return dp_home("build/cache");
    if (!path) path = user_cache();
    return path;
}

const char *dp_python(void) {
    static char *line;
    const char *given = getenv("DP_PYTHON");
    if (given && *given) return given;
    if (!line) {
        size_t n;
        const char *path = !strcmp(tree(), NOWHERE) ? NOWHERE
                           : !home.in_source        ? dp_home("python")
                           : DP_BUILD[0] == '/'     ? DP_BUILD "/python"
                                                    : dp_home(DP_BUILD "/python");
        if (dp_input_read(path, PATH_MAX, &line, &n, NULL)) line = dp_strdup("");
        line[strcspn(line, "\n")] = 0;
    }
    return *line == '/' && access(line, X_OK) == 0 ? line : "python3";
}
