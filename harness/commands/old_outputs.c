/* Removes what an earlier command left (old_outputs.h). */
#include "old_outputs.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
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

void dp_old_outputs_remove(const char *folder) {
    static const char *const name[] = {"results.json", "results.json.gz", "junit.xml", "summary.md",
                                       "report.html"};
    if (!folder) return;
    char *page = read_page(folder);
    if (page) remove_figures(folder, page);
    free(page);
    for (size_t i = 0; i < sizeof name / sizeof *name; i++)
        remove_file(folder, name[i]);
}

/* ---- arguments that are refused -------------------------------------------------------------- */

static const char *expected;

static void at_end(int status, void *arg) {
    (void)arg;
    if (status) dp_old_outputs_remove(expected);
    expected = NULL;
}

void dp_old_outputs_expect(int argc, char **argv) {
    for (int i = 1; i < argc && strcmp(argv[i], "--"); i++)
        if (!strncmp(argv[i], "--out=", 6))
            expected = argv[i] + 6;
        else if (!strcmp(argv[i], "--out") && i + 1 < argc)
            expected = argv[i + 1];
    if (expected) on_exit(at_end, NULL);
}

void dp_old_outputs_forget(void) { expected = NULL; }
