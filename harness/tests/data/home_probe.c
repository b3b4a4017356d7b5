/* harness/base/home.c as a program of its own, built in the tree that the compiler gets. It prints
 * where its cases are or, with an argument, its cache alone. */
#include "harness/base/home.h"
#include "ref/files/input.h"

#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

char *dp_strdup(const char *s) { return strdup(s); }

char *dp_text_new(const char *fmt, ...) {
    char text[4096];
    va_list ap;
    va_start(ap, fmt);
    vsnprintf(text, sizeof text, fmt, ap);
    va_end(ap);
    return strdup(text);
}

void *dp_calloc(size_t n, size_t size) { return calloc(n, size); }

dp_status dp_input_read(const char *path, int64_t most, char **text, size_t *n, dp_err *e) {
    (void)path, (void)most, (void)text, (void)n, (void)e;
    return DP_EIO;
}

int main(int argc, char **argv) {
    (void)argv;
    if (argc == 1)
        printf("cases: %s\n", dp_home("cases"));
    else
        printf("cache: %s\n", dp_home_cache());
    return 0;
}
