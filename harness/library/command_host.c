/* harness/library/command_host.c - the process that becomes the command: what it is told, limits,
 * descriptors, and its words. It takes over before main in the program's own file when that is
 * started under its name (command_parts.h). */
#define _GNU_SOURCE
#include "command_parts.h"

#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

int dp_command_tell(const struct dp_command *c) {
    dp_command_told t = {.memory = c->memory, .serve = c->serve, .nword = c->nword};
    snprintf(t.in, sizeof t.in, "%s", c->in);
    snprintf(t.out, sizeof t.out, "%s", c->out);
    const int fd = memfd_create("deltaproof-command", MFD_CLOEXEC);
    int bad = fd < 0 || write(fd, &t, sizeof t) != sizeof t;
    for (int i = 0; i < c->nword && !bad; i++) {
        const size_t n = strlen(c->word[i]) + 1;
        bad = write(fd, c->word[i], n) != (ssize_t)n;
    }
    if (!bad) return fd;
    if (fd >= 0) close(fd);
    return -1;
}

/* Standard streams. Without serve both outputs go into one pipe. With it, input and output are the
 * pipes to the program. */
static void place_streams(int serve) {
    dup2(DP_COMMAND_PRINTED_FD, 2);
    dup2(serve ? DP_COMMAND_TALK_FD : DP_COMMAND_PRINTED_FD, 1);
    if (serve) dup2(DP_COMMAND_TALK_FD, 0);
    close(DP_COMMAND_TOLD_FD);
    close(DP_COMMAND_PRINTED_FD);
    if (serve) close(DP_COMMAND_TALK_FD);
}

static const dp_command_told *read_told(void) {
    struct stat st;
    if (fstat(DP_COMMAND_TOLD_FD, &st)) _exit(125);
    void *at = mmap(NULL, (size_t)st.st_size, PROT_READ, MAP_PRIVATE, DP_COMMAND_TOLD_FD, 0);
    if (at == MAP_FAILED) _exit(125);
    return at;
}

/* Under a sanitizer the limit would count its shadow too. A thread that OpenBLAS is still starting
 * ends the process if it gets no memory. There prlimit sets the limit, after the shadow. */
enum { LIMITER_WORDS = 2 };
static int put_limiter(char **word, int64_t memory) {
    static char limit[40];
    if (memory <= 0) return 0;
    snprintf(limit, sizeof limit, "--data=%lld", (long long)memory);
    word[0] = "prlimit";
    word[1] = limit;
    return LIMITER_WORDS;
}

__attribute__((constructor)) static void command_main(int argc, char **argv) {
    if (argc != 2 || strcmp(argv[0], DP_COMMAND_HOST)) return;
    const dp_command_told *t = read_told();
    char **word = calloc((size_t)t->nword + 1 + LIMITER_WORDS, sizeof *word);
    char *at = (char *)(t + 1);
    if (!word) _exit(125);
    int n = SHADOW_MEMORY ? put_limiter(word, t->memory) : 0;
    for (int i = 0; i < t->nword; at += strlen(at) + 1, i++)
        word[n++] = at;
    if (!t->serve) {
        setenv("DELTAPROOF_IN", t->in, 1);
        setenv("DELTAPROOF_OUT", t->out, 1);
    }
    place_streams(t->serve);
    dp_subject_limit_memory(SHADOW_MEMORY ? 0 : t->memory);
    /* NOLINTNEXTLINE(*NonNullParamChecker): one word at least */
    execvp(word[0], word);
    dprintf(2, "%s: %s\n", word[0], strerror(errno));
    _exit(127);
}
