/* die_at.c - preloaded: kills the process at call number $DIE_AT of those that change a folder. It
 * does so before the call when that number is uneven, after it when it is even. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <fcntl.h>
#include <signal.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/types.h>
#include <unistd.h>

static int calls;

static int due(int after) {
    const char *at = getenv("DIE_AT");
    const int n = at ? atoi(at) : 0;
    if (!after) calls++;
    return n && (n + 1) / 2 == calls && (n % 2 == 0) == after;
}

#define AROUND(type, call)          \
    do {                            \
        if (due(0)) raise(SIGKILL); \
        type result = call;         \
        if (due(1)) raise(SIGKILL); \
        return result;              \
    } while (0)
#define NEXT(name) ((__typeof__(&name))dlsym(RTLD_NEXT, #name))

int rename(const char *a, const char *b) { AROUND(int, NEXT(rename)(a, b)); }
int renameat(int d, const char *a, int f, const char *b) {
    AROUND(int, NEXT(renameat)(d, a, f, b));
}
int fsync(int fd) { AROUND(int, NEXT(fsync)(fd)); }
int mkstemp(char *t) { AROUND(int, NEXT(mkstemp)(t)); }
int unlinkat(int d, const char *a, int f) { AROUND(int, NEXT(unlinkat)(d, a, f)); }
FILE *fdopen(int fd, const char *mode) { AROUND(FILE *, NEXT(fdopen)(fd, mode)); }
int fclose(FILE *f) { AROUND(int, NEXT(fclose)(f)); }
