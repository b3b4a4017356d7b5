/* Writes and describes JSON objects by their tables of fields (schema.h). */
#include "schema.h"
#include "ref/files/output.h"

#include <assert.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* ---- writing --------------------------------------------------------------------------------- */

double dp_schema_rounded(double x, int digits) {
    char text[40];
    snprintf(text, sizeof text, "%.*g", digits, x);
    return strtod(text, NULL);
}

static json_t *number_or_null(double x) { return isnan(x) ? json_null() : dp_json_number(x); }

json_t *dp_schema_numbers(const double *x, int n) {
    json_t *a = json_array();
    for (int i = 0; i < n; i++)
        json_array_append_new(a, number_or_null(x[i]));
    return a;
}

static json_t *hex(double x) {
    char b[40];
    if (isfinite(x))
        snprintf(b, sizeof b, "%a", x);
    else
        snprintf(b, sizeof b, "%s", isnan(x) ? "nan" : x > 0 ? "inf" : "-inf");
    return json_string(b);
}

static json_int_t integer_at(const char *at, size_t size) {
    int64_t wide;
    int narrow;
    memcpy(size == sizeof wide ? (void *)&wide : (void *)&narrow, at, size);
    return size == sizeof wide ? wide : narrow;
}

static json_t *word(const dp_record_field *f, json_int_t i) {
    if (f->none && i < 0) return json_null();
    assert(i >= 0 && i < f->nwords);
    return json_string(f->words[i]);
}

static json_t *list(const dp_record_field *f, const void *x, const char *at) {
    const int64_t n = f->count(x);
    json_t *a = json_array();
    const char *from;
    memcpy(&from, at, sizeof from);
    for (int64_t i = 0; i < n; i++)
        json_array_append_new(a, dp_schema_write(f->of, from + (size_t)i * f->of->size));
    return a;
}

/* A member of the struct x. */
static json_t *member(const dp_record_field *f, const void *x) {
    const char *const at = (const char *)x + f->offset;
    double number;
    const char *text;
    switch (f->kind) {
    case DP_KIND_TEXT:
        if (f->text) return dp_json_text(at);
        memcpy(&text, at, sizeof text);
        if (!text && f->none) return json_null();
        return dp_json_text(text ? text : "");
    case DP_KIND_WORD: return word(f, integer_at(at, f->size));
    case DP_KIND_NUMBER:
        memcpy(&number, at, sizeof number);
        number = f->above_1 + dp_schema_rounded(number - f->above_1, f->digits ? f->digits : 6);
        return f->none ? number_or_null(number) : dp_json_number(number);
    case DP_KIND_HEX: memcpy(&number, at, sizeof number); return hex(number);
    case DP_KIND_INTEGER:
    case DP_KIND_COUNT: return json_integer(integer_at(at, f->size));
    case DP_KIND_BOOLEAN: return json_boolean(integer_at(at, f->size));
    case DP_KIND_OBJECT: return dp_schema_write(f->of, at);
    default: assert(f->count); return list(f, x, at);
    }
}

static int is_set(const void *x, const dp_record_field *f) {
    static const char zeros[8];
    return !f->if_size || memcmp((const char *)x + f->if_offset, zeros, f->if_size) != 0;
}

json_t *dp_schema_write(const dp_object_schema *s, const void *x) {
    json_t *o = json_object();
    for (int i = 0; i < s->n; i++) {
        const dp_record_field *f = &s->field[i];
        if ((f->when && !f->when(x)) || !is_set(x, f)) continue;
        json_t *v = f->get ? f->get(x) : member(f, x);
        if (v) json_object_set_new(o, f->name, v);
    }
    for (int i = 0; i < s->neach; i++) {
        const void *one = s->each_at(x, i);
        if (one) json_object_set_new(o, s->each_name[i], dp_schema_write(s->each, one));
    }
    return o;
}

/* ---- describing ------------------------------------------------------------------------------ */

static json_t *type(const char *name) { return json_pack("{ss}", "type", name); }
static json_t *number_type(int none) {
    json_t *of = json_pack("[{ss},{s[sss]}]", "type", "number", "enum", "nan", "inf", "-inf");
    if (none) json_array_append_new(of, type("null"));
    return json_pack("{so}", "anyOf", of);
}
/* of which there are at most so many; 0: no limit */
static json_t *list_of(json_t *item, int64_t most) {
    json_t *a = json_pack("{ssso}", "type", "array", "items", item);
    if (most) json_object_set_new(a, "maxItems", json_integer(most));
    return a;
}
static json_t *integer_type(const dp_record_field *f) {
    json_t *x = type("integer");
    if (f->kind == DP_KIND_COUNT || f->most)
        json_object_set_new(x, "minimum", json_integer(f->least));
    if (f->most) json_object_set_new(x, "maximum", json_integer(f->most));
    return x;
}

static json_t *reference(const dp_object_schema *s, json_t *defs);

static json_t *value_type(const dp_record_field *f, json_t *defs) {
    json_t *words;
    switch (f->kind) {
    case DP_KIND_WORD:
        words = json_array();
        for (int i = 0; i < f->nwords; i++)
            json_array_append_new(words, json_string(f->words[i]));
        if (f->none) json_array_append_new(words, json_null());
        return json_pack("{so}", "enum", words);
    case DP_KIND_NUMBER: return number_type(f->none);
    case DP_KIND_INTEGER:
    case DP_KIND_COUNT: return integer_type(f);
    case DP_KIND_BOOLEAN: return type("boolean");
    case DP_KIND_OBJECT: return reference(f->of, defs);
    case DP_KIND_OBJECTS: return list_of(reference(f->of, defs), f->most);
    case DP_KIND_NUMBERS: return list_of(number_type(1), f->most);
    case DP_KIND_ROWS: return list_of(list_of(number_type(1), 0), f->most);
    case DP_KIND_TEXTS: return list_of(type("string"), f->most);
    case DP_KIND_MAP:
        return json_pack("{ssso}", "type", "object", "additionalProperties", type("string"));
    default: return f->none ? json_pack("{s[ss]}", "type", "string", "null") : type("string");
    }
}

static json_t *object_type(const dp_object_schema *s, json_t *defs) {
    json_t *properties = json_object(), *required = json_array();
    for (int i = 0; i < s->n; i++) {
        const dp_record_field *f = &s->field[i];
        json_t *v = value_type(f, defs);
        if (f->what) json_object_set_new(v, "description", json_string(f->what));
        json_object_set_new(properties, f->name, v);
        if (f->written) json_array_append_new(required, json_string(f->name));
    }
    for (int i = 0; i < s->neach; i++)
        json_object_set_new(properties, s->each_name[i], reference(s->each, defs));
    return json_pack("{sssososb}", "type", "object", "properties", properties, "required", required,
                     "additionalProperties", 0);
}

/* {"$ref": ..}, its definition among defs. */
static json_t *reference(const dp_object_schema *s, json_t *defs) {
    char at[80];
    if (!json_object_get(defs, s->name)) {
        json_object_set_new(defs, s->name, json_null()); /* keeps the order of first use */
        json_object_set_new(defs, s->name, object_type(s, defs));
    }
    snprintf(at, sizeof at, "#/$defs/%s", s->name);
    return json_pack("{ss}", "$ref", at);
}

json_t *dp_schema_describe(const dp_object_schema *s) {
    json_t *defs = json_object(), *o = json_object(), *root = object_type(s, defs);
    json_object_set_new(o, "$schema", json_string("https://json-schema.org/draft/2020-12/schema"));
    json_object_set_new(o, "title", json_string(s->name));
    json_object_update(o, root);
    json_decref(root);
    json_object_set_new(o, "$defs", defs);
    return o;
}
