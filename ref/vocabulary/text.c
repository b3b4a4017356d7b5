/* ref/vocabulary/text.c - which bytes are text, and how others are shown (text.h). */
#include "text.h"

#include <ctype.h>
#include <errno.h>
#include <math.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* Length of the character at s, 1 to 4 bytes, and its code point; 0: not well-formed. */
static size_t decode(const unsigned char *s, size_t n, uint32_t *code) {
    static const uint32_t least[5] = {0, 0, 0x80, 0x800, 0x10000};
    const size_t len = s[0] < 0x80             ? 1
                       : (s[0] & 0xe0) == 0xc0 ? 2
                       : (s[0] & 0xf0) == 0xe0 ? 3
                       : (s[0] & 0xf8) == 0xf0 ? 4
                                               : 0;
    if (!len || len > n) return 0;
    *code = len == 1 ? s[0] : s[0] & (0x7fu >> len);
    for (size_t i = 1; i < len; i++) {
        if ((s[i] & 0xc0) != 0x80) return 0;
        *code = *code << 6 | (s[i] & 0x3f);
    }
    const int surrogate = *code >= 0xd800 && *code < 0xe000;
    return *code < least[len] || *code > 0x10ffff || surrogate ? 0 : len;
}

static int welcome(uint32_t code, int lines) {
    if (code == '\t' || code == '\n' || code == '\r') return lines;
    return code >= 0x20 && (code < 0x7f || code > 0x9f) && (code & 0xfffe) != 0xfffe;
}

size_t dp_text_good(const char *s, size_t n, int lines) {
    const unsigned char *u = (const unsigned char *)s;
    size_t i = 0;
    while (i < n) {
        uint32_t code;
        const size_t len = decode(u + i, n - i, &code);
        if (!len || !welcome(code, lines)) break;
        i += len;
    }
    return i;
}

void dp_text_printable(const char *s, char *out, size_t size) {
    const unsigned char *u = (const unsigned char *)s;
    size_t n = strlen(s), at = 0;
    for (size_t i = 0; i < n;) {
        uint32_t code;
        char hex[5];
        const size_t len = decode(u + i, n - i, &code);
        const int good = len && welcome(code, 0);
        const size_t from = good ? len : 1, to = good ? len : 4;
        if (at + to >= size) break;
        snprintf(hex, sizeof hex, "\\x%02x", u[i]);
        memcpy(out + at, good ? s + i : hex, to);
        at += to;
        i += from;
    }
    if (size) out[at] = 0;
}

const char *dp_base_name(const char *path) {
    const char *slash = strrchr(path, '/');
    return slash ? slash + 1 : path;
}

int dp_find_name(const char *name, const char *const *names, int n) {
    for (int i = 0; i < n; i++)
        if (!strcmp(name, names[i])) return i;
    return -1;
}

int dp_is_listed(const char *name, const char *list, char between) {
    const size_t n = strlen(name);
    for (const char *end; *list; list = *end ? end + 1 : end) {
        end = strchrnul(list, between);
        if ((size_t)(end - list) == n && !memcmp(list, name, n)) return 1;
    }
    return 0;
}

const char *dp_next_name(const char *list, char *name, size_t size) {
    if (!list) return NULL;
    list += strspn(list, " ,");
    const size_t n = strcspn(list, " ,:");
    snprintf(name, size, "%.*s", (int)n, list);
    return n ? list + n : NULL;
}

/* ---- numbers --------------------------------------------------------------------------------- */

dp_number dp_number_int(const char *text, int64_t least, int64_t most, int64_t *x) {
    char *end;
    if (isspace((unsigned char)*text)) return DP_NUMBER_NONE;
    errno = 0;
    const long long n = strtoll(text, &end, 10);
    if (end == text || *end) return DP_NUMBER_NONE;
    *x = n;
    return errno || n < least || n > most ? DP_NUMBER_RANGE : DP_NUMBER_OK;
}

dp_number dp_number_real_prefix(const char *text, double *x, const char **end) {
    char *after;
    if (isspace((unsigned char)*text)) return DP_NUMBER_NONE;
    errno = 0;
    *x = strtod(text, &after);
    *end = after;
    if (after == text) return DP_NUMBER_NONE;
    /* ERANGE is also said of subnormal numbers, which are fine. */
    return errno == ERANGE && (*x == 0 || isinf(*x)) ? DP_NUMBER_RANGE : DP_NUMBER_OK;
}

dp_number dp_number_real(const char *text, double least, double most, double *x) {
    const char *end;
    const dp_number n = dp_number_real_prefix(text, x, &end);
    if (n == DP_NUMBER_NONE || *end || isnan(*x)) return DP_NUMBER_NONE;
    if (n == DP_NUMBER_OK && isinf(*x)) return DP_NUMBER_NONE; /* written as inf */
    return n == DP_NUMBER_OK && *x >= least && *x <= most ? DP_NUMBER_OK : DP_NUMBER_RANGE;
}
