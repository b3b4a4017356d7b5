/* The command line, quoted for a shell (command_line.h). */
#include "command_line.h"
#include "ref/vocabulary/problem.h"

#include <stdio.h>
#include <string.h>

#define PLAIN "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789_./:=,+-@%"

/* Appends one argument; returns the end of the text. */
static char *append(char *at, const char *arg) {
    const int plain = *arg && !arg[strspn(arg, PLAIN)];
    at += sprintf(at, plain ? " " : " '");
    for (const char *c = arg; *c; c++)
        at += *c == '\'' ? sprintf(at, "'\\''") : sprintf(at, "%c", *c);
    if (!plain) at += sprintf(at, "'");
    return at;
}

char *dp_command_line(int argc, char *const *argv) {
    size_t size = strlen(argv[0]) + 1;
    for (int i = 1; i < argc; i++)
        size += 4 * strlen(argv[i]) + 3;
    char *text = dp_calloc(size, 1);
    char *at = text + sprintf(text, "%s", argv[0]);
    for (int i = 1; i < argc; i++)
        at = append(at, argv[i]);
    return text;
}
