/* The words of a command, without a shell (command.h). */
#define _GNU_SOURCE
#include "command_parts.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

/* Copies one word to `to` and returns where it ends; NULL: a quote or a backslash has no end. */
static const char *copy_word(const char *s, char *to) {
    char quote = 0;
    for (; *s && (quote || !strchr(" \t\n", *s)); s++) {
        if (*s == quote)
            quote = 0;
        else if (!quote && (*s == '\'' || *s == '"'))
            quote = *s;
        else if (*s != '\\' || quote == '\'')
            *to++ = *s;
        else if (!(*to++ = *++s))
            return NULL;
    }
    *to = 0;
    return quote ? NULL : s;
}

static void free_words(char **word, int n) {
    for (int i = 0; i < n; i++)
        free(word[i]);
    free(word);
}

char **dp_command_split(const char *text, int *n, dp_err *e) {
    char **word = dp_calloc(strlen(text) / 2 + 2, sizeof *word);
    *n = 0;
    for (const char *s = text + strspn(text, " \t\n"); *s; s += strspn(s, " \t\n")) {
        word[*n] = dp_calloc(strlen(s) + 1, 1);
        s = copy_word(s, word[(*n)++]);
        if (s) continue;
        free_words(word, *n);
        *n = 0;
        dp_fail(e, DP_EINPUT, "%.200s: a quote or a backslash has no end", text);
        return NULL;
    }
    if (*n && **word) return word;
    free_words(word, *n);
    *n = 0;
    dp_fail(e, DP_EINPUT, "names no program");
    return NULL;
}

int dp_command_names(const char *word, const char *name) {
    const size_t n = strlen(word), m = strlen(name);
    return n >= m && !strcmp(word + n - m, name) && (n == m || word[n - m - 1] == '=');
}

static int may_run(const char *path) {
    struct stat st;
    return !stat(path, &st) && S_ISREG(st.st_mode) && !access(path, X_OK);
}

int dp_command_is_there(const char *word) {
    const char *path = getenv("PATH");
    if (strchr(word, '/')) return may_run(word);
    char *list = dp_strdup(path ? path : "/bin:/usr/bin"), *rest = list, *file;
    int found = 0;
    for (const char *dir; !found && (dir = strsep(&rest, ":"));) {
        if (asprintf(&file, "%s/%s", *dir ? dir : ".", word) < 0) abort();
        found = may_run(file);
        free(file);
    }
    free(list);
    return found;
}
