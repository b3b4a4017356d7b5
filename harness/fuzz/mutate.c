/* harness/fuzz/mutate.c - changes that keep the form of what they change (mutate.h). */
#include "mutate.h"
#include "harness/case/case.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

void must(int ok, const char *what, const char *more) {
    if (ok) return;
    fprintf(stderr, "%s: %s\n", what, more);
    abort();
}

const char *scratch_folder(void) {
    const char *set = getenv("TMPDIR");
    if (set && *set) return set;
    return access("/dev/shm", W_OK) ? "/tmp" : "/dev/shm";
}

/* ---- chance ---------------------------------------------------------------------------------- */

rng rng_new(unsigned seed) { return (rng){0x9e3779b97f4a7c15u * (seed + 1ull)}; }

static uint64_t next(rng *r) {
    uint64_t x = r->state += 0x9e3779b97f4a7c15u;
    x = (x ^ x >> 30) * 0xbf58476d1ce4e5b9u;
    x = (x ^ x >> 27) * 0x94d049bb133111ebu;
    return x ^ x >> 31;
}

uint32_t below(rng *r, uint32_t n) { return n ? (uint32_t)(next(r) % n) : 0; }

static const char *word(rng *r, const char *const *list) {
    uint32_t n = 0;
    while (list[n])
        n++;
    return n ? list[below(r, n)] : "";
}

/* ---- JSON ------------------------------------------------------------------------------------ */

static const json_int_t INTEGERS[] = {0,         1,
                                      2,         3,
                                      4,         7,
                                      8,         16,
                                      63,        64,
                                      65,        128,
                                      255,       256,
                                      4095,      4096,
                                      4097,      65536,
                                      1 << 24,   INT32_MAX,
                                      1ll << 31, 1ll << 32,
                                      1ll << 40, 1ll << 48,
                                      1ll << 53, (1ll << 53) + 1,
                                      1ll << 62, INT64_MAX,
                                      -1,        -2,
                                      INT64_MIN};
static const double REALS[] = {0,    -0.0,   0.5,    1,     -1,
                               1e-3, 1e-300, 5e-324, 1e300, 1.7976931348623157e308};

static json_t *value(rng *r, const words *w, int depth) {
    json_t *x;
    switch (below(r, depth ? 9 : 7)) {
    case 0: return json_null();
    case 1: return json_boolean(below(r, 2));
    case 2:
    case 3: return json_integer(INTEGERS[below(r, sizeof INTEGERS / sizeof *INTEGERS)]);
    case 4: return json_real(REALS[below(r, sizeof REALS / sizeof *REALS)]);
    case 5: return json_string(word(r, w->texts));
    case 6: return json_string(word(r, w->names));
    case 7:
        x = json_array();
        for (uint32_t n = below(r, 4); n; n--)
            json_array_append_new(x, value(r, w, depth - 1));
        return x;
    default:
        x = json_object();
        for (uint32_t n = below(r, 3); n; n--)
            json_object_set_new(x, word(r, w->names), value(r, w, depth - 1));
        return x;
    }
}

static json_t *child(json_t *x, uint32_t i) {
    if (json_is_array(x)) return json_array_get(x, i);
    void *at = json_object_iter(x);
    while (i--)
        at = json_object_iter_next(x, at);
    return json_object_iter_value(at);
}

static uint32_t children(const json_t *x) {
    return (uint32_t)(json_is_array(x) ? json_array_size(x) : json_object_size(x));
}

static void mutate_array(json_t *x, rng *r, const words *w) {
    const uint32_t n = children(x), i = below(r, n);
    switch (below(r, 5)) {
    case 0: json_array_append_new(x, value(r, w, 2)); break;
    case 1: json_array_remove(x, i); break;
    case 2:
        if (n) json_array_append_new(x, json_deep_copy(json_array_get(x, i)));
        break;
    case 3:
        if (n) json_array_set_new(x, i, json_deep_copy(json_array_get(x, below(r, n))));
        break;
    default:
        if (n) json_array_set_new(x, i, value(r, w, 2));
    }
}

static void mutate_object(json_t *x, rng *r, const words *w) {
    const uint32_t n = children(x), i = below(r, n);
    void *at = json_object_iter(x);
    for (uint32_t k = 0; k < i; k++)
        at = json_object_iter_next(x, at);
    char *key = strdup(at ? json_object_iter_key(at) : "");
    switch (below(r, 6)) {
    case 0: json_object_set_new(x, word(r, w->names), value(r, w, 2)); break;
    case 1: json_object_del(x, key); break;
    case 2:
        if (n) json_object_set_new(x, word(r, w->names), json_deep_copy(child(x, i)));
        break;
    case 3:
        if (n) json_object_set_new(x, key, json_deep_copy(child(x, below(r, n))));
        break;
    default:
        if (n) json_object_set_new(x, key, value(r, w, 2));
    }
    free(key);
}

void mutate_json(json_t *root, rng *r, const words *w) {
    json_t *x = root;
    for (;;) {
        json_t *down = children(x) ? child(x, below(r, children(x))) : NULL;
        if (!down || !(json_is_array(down) || json_is_object(down)) || !below(r, 4)) break;
        x = down;
    }
    if (json_is_array(x))
        mutate_array(x, r, w);
    else
        mutate_object(x, r, w);
}

/* ---- safetensors ----------------------------------------------------------------------------- */

static int bytes_of(const char *dtype) {
    static const char *const two[] = {"BF16", "F16"}, *const four[] = {"F32", "I32"};
    for (int i = 0; i < 2; i++) {
        if (!strcmp(dtype, two[i])) return 2;
        if (!strcmp(dtype, four[i])) return 4;
    }
    return 8;
}

static int64_t count(const json_t *shape, int64_t most) {
    int64_t n = 1;
    for (size_t i = 0; i < json_array_size(shape); i++) {
        const json_int_t d = json_integer_value(json_array_get(shape, i));
        if (d < 0 || (d && n > most / d)) return -1;
        n *= d;
    }
    return n;
}

/* Offsets as dtype and shape ask for, one tensor behind the other; the bytes of all. */
static int64_t lay_out(json_t *header, int64_t most) {
    const char *name;
    json_t *t;
    int64_t at = 0;
    json_object_foreach(header, name, t) {
        const char *dtype = json_string_value(json_object_get(t, "dtype"));
        const int64_t n = count(json_object_get(t, "shape"), most);
        if (!strcmp(name, "__metadata__") || !dtype || n < 0) continue;
        const int64_t end = at + n * bytes_of(dtype);
        json_object_set_new(t, "data_offsets", json_pack("[I,I]", (json_int_t)at, (json_int_t)end));
        at = end;
    }
    return at;
}

/* A shape that changes often should change as a whole: an axis more, less, or of another length. */
static void mutate_shape(json_t *header, rng *r, const words *w) {
    json_t *t = children(header) ? child(header, below(r, children(header))) : NULL;
    json_t *shape = json_object_get(t, "shape");
    const uint32_t n = (uint32_t)json_array_size(shape);
    if (!n || below(r, 4) == 0)
        mutate_json(header, r, w);
    else if (below(r, 2))
        json_array_set_new(shape, below(r, n), json_integer(below(r, 6)));
    else if (below(r, 2))
        json_array_insert_new(shape, below(r, n + 1), json_integer(below(r, 4)));
    else
        json_array_remove(shape, below(r, n));
}

size_t mutate_safetensors(uint8_t *data, size_t size, size_t most, rng *r, const words *w) {
    uint64_t length = 0;
    if (size < 8) return 0;
    memcpy(&length, data, 8);
    json_t *header = length > size - 8 ? NULL : json_loadb((char *)data + 8, length, 0, NULL);
    if (!json_is_object(header)) {
        json_decref(header);
        return 0;
    }
    const size_t had = size - 8 - length;
    uint8_t *values = malloc(most + 1);
    memcpy(values, data + 8 + length, had);
    for (uint32_t n = 1 + below(r, 2); n; n--) {
        if (below(r, 2))
            mutate_json(header, r, w);
        else
            mutate_shape(header, r, w);
    }
    int64_t want = (int64_t)had;
    if (below(r, 8)) want = lay_out(header, (int64_t)most);
    length = json_dumpb(header, (char *)data + 8, most > 8 ? most - 8 : 0, JSON_COMPACT);
    json_decref(header);
    size_t out = 0;
    if (length && want >= 0 && 8 + length + (uint64_t)want <= most) {
        memcpy(data, &length, 8);
        for (int64_t i = 0; i < want; i++)
            data[8 + length + (uint64_t)i] = i < (int64_t)had ? values[i] : (uint8_t)below(r, 256);
        out = 8 + length + (size_t)want;
    }
    free(values);
    return out;
}

/* ---- case files ------------------------------------------------------------------------------ */

/* The keys with their choices, from the program's own table. */
static const char *keys_text(void) {
    static char *text;
    size_t n;
    if (text) return text;
    FILE *f = open_memstream(&text, &n);
    dp_case_print_keys(f);
    fclose(f);
    return text;
}

static void random_value(rng *r, const char *line, char *out, size_t size) {
    static const char *const values[] = {"0",
                                         "1",
                                         "2",
                                         "3",
                                         "4",
                                         "8",
                                         "16",
                                         "64",
                                         "-1",
                                         "0.5",
                                         "1e3",
                                         "-5",
                                         "0x1p-3",
                                         "1e-300",
                                         "nan",
                                         "inf",
                                         "yes",
                                         "no",
                                         "1,2",
                                         "0,4",
                                         "0,2,4",
                                         "q",
                                         "q,k",
                                         "v[*,*,*,*] 0",
                                         "k[0,0,0,0] nan",
                                         "x",
                                         "fp64",
                                         "d.safetensors",
                                         "d.safetensors"};
    const char *choices = strstr(line, "one of ") ? strstr(line, "one of ") + 7 : NULL;
    if (!choices && strstr(line, "list of ")) choices = strstr(line, "list of ") + 8;
    const char *end = choices ? strchr(choices, ';') : NULL;
    if (!end || !below(r, 6)) {
        snprintf(out, size, "%s", values[below(r, sizeof values / sizeof *values)]);
        return;
    }
    uint32_t n = 1;
    for (const char *c = choices; c < end; c++)
        n += *c == '|';
    for (uint32_t i = below(r, n); i; i--)
        choices = strchr(choices, '|') + 1;
    snprintf(out, size, "%.*s", (int)strcspn(choices, "|;"), choices);
}

/* `key = value` with a key of the table. */
static size_t random_line(rng *r, char *out, size_t size) {
    const char *text = keys_text(), *at = text;
    uint32_t n = 0;
    char value_text[64];
    for (const char *p = text; *p; p = strchr(p, '\n') + 1)
        n += *p != ' ';
    for (uint32_t i = below(r, n);; at = strchr(at, '\n') + 1)
        if (*at != ' ' && !i--) break;
    random_value(r, at, value_text, sizeof value_text);
    return (size_t)snprintf(out, size, "%.*s = %s\n", (int)strcspn(at, " "), at, value_text);
}

static size_t line_begin(const uint8_t *data, size_t size, rng *r) {
    size_t at = below(r, (uint32_t)size + 1);
    while (at && data[at - 1] != '\n')
        at--;
    return at;
}

size_t mutate_case(uint8_t *data, size_t size, size_t most, rng *r) {
    char line[256];
    const size_t at = line_begin(data, size, r);
    size_t end = at;
    while (end < size && data[end++] != '\n')
        continue;
    const int replace = below(r, 2), remove = below(r, 5) == 0;
    const size_t gone = replace || remove ? end - at : 0;
    const size_t n = remove ? 0 : random_line(r, line, sizeof line);
    if (size - gone + n > most) return 0;
    memmove(data + at + n, data + at + gone, size - at - gone);
    memcpy(data + at, line, n);
    return size - gone + n;
}
