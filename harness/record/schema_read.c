/* Fills a struct with what a table of its members wrote (schema.h). */
#include "ref/vocabulary/text.h"
#include "schema.h"

#include <assert.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

typedef struct {
    const char *path, *where;
    dp_err *e;
} place;

static dp_status refuse(const place *p, const dp_record_field *f, const char *why) {
    return dp_fail(p->e, DP_EINPUT, "%s: %s%s: %s", p->path, p->where, f->name, why);
}

/* ---- what JSON it must be -------------------------------------------------------------------- */

static dp_status check_text(const place *p, const dp_record_field *f, const json_t *v) {
    if (!json_is_string(v)) return refuse(p, f, "must be a text");
    const size_t n = json_string_length(v);
    return dp_text_good(json_string_value(v), n, 0) < n ? refuse(p, f, "a control character")
                                                        : DP_OK;
}

static dp_status check_integer(const place *p, const dp_record_field *f, const json_t *v) {
    if (!json_is_integer(v)) return refuse(p, f, "must be an integer");
    return f->kind == DP_KIND_COUNT && json_integer_value(v) < 0
               ? refuse(p, f, "must be a number from 0 on")
               : DP_OK;
}

/* ---- members --------------------------------------------------------------------------------- */

/* The same text at one place for ever. */
static const char *lasting(const char *x) {
    static struct word {
        struct word *next;
        char text[];
    } * words;
    static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
    pthread_mutex_lock(&lock);
    struct word *w = words;
    while (w && strcmp(w->text, x))
        w = w->next;
    if (!w) {
        w = dp_alloc(1, sizeof *w + strlen(x) + 1);
        strcpy(w->text, x);
        w->next = words;
        words = w;
    }
    pthread_mutex_unlock(&lock);
    return w->text;
}

/* One of the row's words, at its place. */
static dp_status read_word(const place *p, const dp_record_field *f, const char *text, char *at) {
    for (int i = 0; i < f->nwords; i++)
        if (!strcmp(text, f->words[i])) {
            memcpy(at, &f->words[i], sizeof f->words[i]);
            return DP_OK;
        }
    return refuse(p, f, "is no word that stands there");
}

static dp_status read_text(const place *p, const dp_record_field *f, const json_t *v, char *at) {
    const char *text = json_string_value(v);
    if (check_text(p, f, v)) return p->e->code;
    if (f->text) {
        if (json_string_length(v) >= f->text) return refuse(p, f, "is too long");
        strcpy(at, text);
        return DP_OK;
    }
    if (f->words) return read_word(p, f, text, at);
    if (json_string_length(v) > 200) return refuse(p, f, "is too long");
    text = f->own ? dp_strdup(text) : lasting(text);
    memcpy(at, &text, sizeof text);
    return DP_OK;
}

/* "0x1.8p-3", "nan", "inf", "-inf". */
static dp_status read_hex(const place *p, const dp_record_field *f, const json_t *v, void *at) {
    const char *text = json_string_value(v);
    char *end;
    if (check_text(p, f, v)) return p->e->code;
    const int plain = !strcmp(text, "nan") || !strcmp(text, "inf") || !strcmp(text, "-inf") ||
                      !strncmp(text + (*text == '-'), "0x", 2);
    const double x = strtod(text, &end);
    if (!plain || *end) return refuse(p, f, "is no number in hexadecimal");
    memcpy(at, &x, sizeof x);
    return DP_OK;
}

/* The widest that a member of 4 bytes holds counts as a limit. */
static dp_status read_integer(const place *p, const dp_record_field *f, const json_t *v, char *at,
                              size_t size) {
    const json_int_t x = json_integer_value(v);
    const int narrow = (int)x;
    char why[100];
    if (check_integer(p, f, v)) return p->e->code;
    assert(size == sizeof narrow || size == sizeof x);
    if ((f->most && (x < f->least || x > f->most)) || (size == sizeof narrow && x != narrow)) {
        snprintf(why, sizeof why, "%lld: must be %lld .. %lld", (long long)x, (long long)f->least,
                 (long long)f->most);
        return refuse(p, f, why);
    }
    memcpy(at, size == sizeof narrow ? (const void *)&narrow : (const void *)&x, size);
    return DP_OK;
}

static size_t entry_size(const dp_record_field *f) {
    if (f->kind == DP_KIND_OBJECTS) return f->of->size;
    return f->kind == DP_KIND_INTEGERS ? sizeof(int) : sizeof(double);
}

static dp_status read_object(const dp_object_schema *s, const json_t *o, char *x, const place *p);

static dp_status read_entry(const place *p, const dp_record_field *f, const json_t *v, char *at,
                            size_t i) {
    char where[160];
    if (f->kind == DP_KIND_HEXES) return read_hex(p, f, v, at);
    if (f->kind == DP_KIND_INTEGERS) return read_integer(p, f, v, at, sizeof(int));
    snprintf(where, sizeof where, "%s%s[%zu].", p->where, f->name, i);
    return read_object(f->of, v, at, &(place){p->path, where, p->e});
}

static dp_status read_list(const place *p, const dp_record_field *f, const json_t *v, const void *x,
                           char *at) {
    const size_t n = json_array_size(v), size = entry_size(f);
    const int64_t want = f->count ? f->count(x) : f->fixed;
    char why[80], *to = at;
    dp_status st = DP_OK;
    if (!json_is_array(v)) return refuse(p, f, "must be a list");
    if ((int64_t)n != want) {
        snprintf(why, sizeof why, "%zu entries: must be %lld", n, (long long)want);
        return refuse(p, f, why);
    }
    if (f->count) {
        to = n ? dp_calloc(n, size) : NULL;
        memcpy(at, &to, sizeof to);
    }
    for (size_t i = 0; i < n && !st; i++)
        st = read_entry(p, f, json_array_get(v, i), to + i * size, i);
    return st;
}

/* As many as the text has; `count` is of what was read. */
static dp_status read_flags(const place *p, const dp_record_field *f, const json_t *v,
                            const void *x, char *at) {
    const size_t n = json_string_length(v);
    const char *text = json_string_value(v);
    if (check_text(p, f, v)) return p->e->code;
    if (strspn(text, "01") != n) return refuse(p, f, "holds more than 0 and 1");
    unsigned char *to = dp_calloc(n + 1, 1);
    memcpy(at, &to, sizeof to);
    for (size_t i = 0; i < n; i++)
        to[i] = text[i] == '1';
    return (int64_t)n == f->count(x) ? DP_OK : refuse(p, f, "is of another length");
}

static dp_status read_member(const place *p, const dp_record_field *f, const json_t *v, char *x) {
    char *const at = x + f->offset, where[160];
    switch (f->kind) {
    case DP_KIND_TEXT: return read_text(p, f, v, at);
    case DP_KIND_HEX: return read_hex(p, f, v, at);
    case DP_KIND_INTEGER:
    case DP_KIND_COUNT: return read_integer(p, f, v, at, f->size);
    case DP_KIND_FLAGS: return read_flags(p, f, v, x, at);
    case DP_KIND_OBJECT:
        snprintf(where, sizeof where, "%s%s.", p->where, f->name);
        return read_object(f->of, v, at, &(place){p->path, where, p->e});
    default: return read_list(p, f, v, x, at);
    }
}

static int may_be_null(const dp_record_field *f) { return f->none || f->kind == DP_KIND_FLAGS; }

static dp_status read_object(const dp_object_schema *s, const json_t *o, char *x, const place *p) {
    const size_t n = strlen(p->where); /* its name, and a dot */
    dp_status st = DP_OK;
    if (!json_is_object(o))
        return dp_fail(p->e, DP_EINPUT, "%s%s%.*s: must be an object", p->path, n ? ": " : "",
                       n ? (int)n - 1 : 0, p->where);
    for (int i = 0; i < s->n && !st; i++) {
        const dp_record_field *f = &s->field[i];
        const json_t *v = json_object_get(o, f->name);
        if ((!v || json_is_null(v)) && f->need == DP_FIELD_REQUIRED)
            st = refuse(p, f, "missing");
        else if (v && !(json_is_null(v) && may_be_null(f)))
            st = read_member(p, f, v, x);
    }
    return st;
}

dp_status dp_schema_read(const dp_object_schema *s, const json_t *o, void *x, const char *path,
                         const char *where, dp_err *e) {
    dp_err own = {0};
    return read_object(s, o, x, &(place){path, where, e ? e : &own});
}
