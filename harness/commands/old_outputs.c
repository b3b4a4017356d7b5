/* Removes what an earlier command left (old_outputs.h). */
#include "old_outputs.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

enum { LONGEST_PAGE = 1 << 28 };

static void remove_file(const char *folder, const char *name) {
    char *path;
    if (asprintf(&path, "%s/%s", folder, name) < 0) abort();
    unlink(path);
    free(path);
}

/* NULL: there is none, or not of this program. */
static char *read_page(const char *folder) {
    char *path, *text = NULL;
    if (asprintf(&path, "%s/report.html", folder) < 0) abort();
    FILE *f = fopen(path, "re");
    free(path);
    if (!f) return NULL;
    if (!fseek(f, 0, SEEK_END) && ftell(f) > 0 && ftell(f) < LONGEST_PAGE) {
        const size_t n = (size_t)ftell(f);
        rewind(f);
        text = calloc(n + 1, 1);
        if (!text) abort();
        if (fread(text, 1, n, f) != n || !strstr(text, "<title>deltaproof report")) {
            free(text);
            text = NULL;
        }
    }
    fclose(f);
    return text;
}

/* The figures that the page names (reports/report.py, own_figures). */
static void remove_figures(const char *folder, char *page) {
    static const char link[] = "href=\"figures/";
    for (char *at = page; (at = strstr(at, link));) {
        char *path = at + strlen("href=\""), *name = at += sizeof link - 1, *end = strchr(at, '"');
        const size_t n = end ? (size_t)(end - name) : 0;
        if (n < 5 || n > 200 || memchr(name, '/', n)) continue;
        *end = 0;
        if (!strcmp(end - 4, ".png") || !strcmp(end - 4, ".pdf")) remove_file(folder, path);
        at = end + 1;
    }
}

static void remove_folder(const char *folder) {
    static const char *const name[] = {"results.json", "results.json.gz", "junit.xml", "summary.md",
                                       "report.html"};
    char *page = read_page(folder);
    if (page) remove_figures(folder, page);
    free(page);
    for (size_t i = 0; i < sizeof name / sizeof *name; i++)
        remove_file(folder, name[i]);
}

/* A record, or the list of a check or of differ. */
static int is_own(const char *path) {
    static const char *const begin[] = {"{\"schema\":\"deltaproof-record\"", "[\n {\n  \"case\": "};
    char got[32] = "";
    struct stat s;
    FILE *f = !stat(path, &s) && S_ISREG(s.st_mode) ? fopen(path, "re") : NULL;
    if (!f) return 0;
    const size_t n = fread(got, 1, sizeof got - 1, f);
    fclose(f);
    for (size_t i = 0; i < sizeof begin / sizeof *begin; i++)
        if (n >= strlen(begin[i]) && !strncmp(got, begin[i], strlen(begin[i]))) return 1;
    return 0;
}

void dp_old_outputs_remove(const char *folder, const char *json) {
    if (folder) remove_folder(folder);
    if (json && strcmp(json, "-") && is_own(json)) unlink(json);
}

/* ---- arguments that are refused -------------------------------------------------------------- */

static const char *expected_folder, *expected_json;

static void at_end(int status, void *arg) {
    (void)arg;
    if (status) dp_old_outputs_remove(expected_folder, expected_json);
    dp_old_outputs_forget();
}

/* The last value of an option, as --NAME=VALUE or --NAME VALUE; NULL: it is not there. */
static const char *value_of(const char *name, int argc, char **argv) {
    const size_t n = strlen(name);
    const char *value = NULL;
    for (int i = 1; i < argc && strcmp(argv[i], "--"); i++)
        if (!strncmp(argv[i], name, n) && argv[i][n] == '=')
            value = argv[i] + n + 1;
        else if (!strcmp(argv[i], name) && i + 1 < argc)
            value = argv[i + 1];
    return value;
}

void dp_old_outputs_expect(int argc, char **argv) {
    expected_folder = value_of("--out", argc, argv);
    expected_json = value_of("--json", argc, argv);
    if (expected_folder || expected_json) on_exit(at_end, NULL);
}

void dp_old_outputs_forget(void) { expected_folder = expected_json = NULL; }
