/* harness/tests/attack.c - what the tests `attacks*` share (attack.h). */
#include "attack.h"

#include <signal.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>

char at_out[1 << 16];

const char *at_text(const char *fmt, ...) {
    static char ring[8][8192];
    static int n;
    char *text = ring[n++ % 8];
    va_list ap;
    va_start(ap, fmt);
    vsnprintf(text, sizeof ring[0], fmt, ap);
    va_end(ap);
    return text;
}

const char *at_dir(const char *name) {
    const char *path = at_text("%s/%s", gt_tmpdir(), name);
    gt_run(at_text("rm -rf '%s' && mkdir -p '%s'", path, path), NULL, 0);
    return path;
}

void at_write(const char *path, const char *text) {
    FILE *f = fopen(path, "w");
    if (!f || fputs(text, f) < 0 || fclose(f)) gt_fail(__FILE__, __LINE__, path, "not written");
}

char *at_read(const char *path) {
    FILE *f = fopen(path, "rb");
    if (!f) return strdup("");
    fseek(f, 0, SEEK_END);
    const long n = ftell(f);
    rewind(f);
    char *text = malloc((size_t)n + 1);
    text[fread(text, 1, (size_t)n, f)] = 0;
    fclose(f);
    return text;
}

int at_exists(const char *path) {
    struct stat st;
    return !lstat(path, &st);
}

int at_sh(const char *dir, int seconds, const char *fmt, ...) {
    char command[16384], *all;
    va_list ap;
    va_start(ap, fmt);
    vsnprintf(command, sizeof command, fmt, ap);
    va_end(ap);
    at_write(at_text("%s/attack.sh", gt_tmpdir()), command);
    /* Into a file: what outlives the program would keep a pipe open. */
    if (asprintf(&all,
                 "cd '%s' && P='%s' C='%s' timeout -k 2 %d0 bash '%s/attack.sh' </dev/null "
                 ">'%s/attack.out' 2>&1",
                 dir, gt_program(), gt_cases(), seconds, gt_tmpdir(), gt_tmpdir()) < 0)
        abort();
    const int status = gt_run(all, NULL, 0);
    char *said = at_read(at_text("%s/attack.out", gt_tmpdir()));
    snprintf(at_out, sizeof at_out, "%s", said);
    free(said);
    free(all);
    return status == 137 ? AT_HUNG : status;
}

int at_survivors(const char *dir, const char *name, int *noted) {
    const char *path = at_text("%s/%s", dir, name);
    char *text = at_read(path);
    int alive = 0;
    *noted = 0;
    for (char *save, *t = strtok_r(text, "\n", &save); t; t = strtok_r(NULL, "\n", &save)) {
        ++*noted;
        if (kill(atoi(t), 0)) continue;
        alive++;
        kill(atoi(t), SIGKILL);
    }
    free(text);
    remove(path);
    return alive;
}

const char *at_library(const char *source, const char *flags) {
    const char *path = at_text("%s/%s.so", gt_tmpdir(), source);
    char out[4096];
    if (at_exists(path)) return path;
    const char *command = at_text("cc -O1 -fPIC -shared %s -I'%s/../harness' "
                                  "'%s/../harness/tests/data/%s.c' -o '%s' -lm -ldl",
                                  flags, gt_cases(), gt_cases(), source, path);
    if (gt_run(command, out, sizeof out)) gt_fail(__FILE__, __LINE__, source, "%s", out);
    return path;
}

int at_expect(const char *file, int line, const char *what, int got, int want, ...) {
    va_list ap;
    int ok = got == want;
    const char *text, *missing = NULL;
    va_start(ap, want);
    while ((text = va_arg(ap, const char *)))
        if (!strstr(at_out, text) && !missing) missing = text;
    va_end(ap);
    ok = ok && !missing;
    if (!ok)
        gt_fail(file, line, what, "status %d, expected %d%s%s%s: %.1500s", got, want,
                missing ? "; not said: '" : "", missing ? missing : "", missing ? "'" : "", at_out);
    return ok;
}
