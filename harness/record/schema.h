/* harness/record/schema.h - a JSON object as a table of fields. The table writes it, and describes
 * it as JSON Schema, by which reports/read reads it.
 *
 * Non-finite numbers are the strings "nan", "inf", "-inf". A reader ignores fields that it does not
 * know. A member that may have none, or an entry of a list of numbers, is null where it has none.
 */
#pragma once
#include "ref/vocabulary/problem.h"
#include <jansson.h>

typedef enum {
    DP_KIND_TEXT, /* without control characters */
    DP_KIND_WORD, /* one of words [nwords]; a reader may take others, too */
    DP_KIND_HEX,  /* a number as text in hexadecimal, "0x1.8p-3" */
    DP_KIND_NUMBER,
    DP_KIND_INTEGER,
    DP_KIND_COUNT, /* an integer from 0 on */
    DP_KIND_BOOLEAN,
    DP_KIND_OBJECT,  /* `of` */
    DP_KIND_OBJECTS, /* a list of them */
    DP_KIND_NUMBERS, /* a list; null: there is none */
    DP_KIND_ROWS,    /* a list of such lists */
    DP_KIND_TEXTS,   /* a list */
    DP_KIND_MAP      /* an object of texts, by names of the caller */
} dp_field_kind;

typedef struct dp_object_schema dp_object_schema;
typedef struct {
    const char *name;
    dp_field_kind kind;
    int written; /* 1: every record of this program has it */
    const char *what;
    const char *const *words;
    int nwords;
    const dp_object_schema *of;
    int64_t least, most; /* of an integer; most: entries of a list, too; most 0: no limit */
    int none;            /* 1: null where there is none: NAN, NULL, or an index below 0 */
    int digits;          /* that a number is written to; 0: 6 */
    int above_1;         /* 1: digits of the number less 1 */
    /* Its source: a member of the struct at `offset`, of `size` bytes, or the function get, which
     * returns NULL if there is none. A member of kind text is a pointer, or an array of `text`
     * bytes; one of kind word is an index of words. */
    size_t offset, size, text;
    json_t *(*get)(const void *x);
    int64_t (*count)(const void *x); /* of a list's entries, at a pointer */
    int (*when)(const void *x);      /* NULL: always */
    size_t if_offset, if_size;       /* it is there if that member is not 0; size 0: always */
} dp_record_field;

struct dp_object_schema {
    const char *name; /* in JSON Schema's $defs */
    const dp_record_field *field;
    int n;
    size_t size; /* of the struct, where lists hold it */
    /* further fields: objects of the kind `each` by these names */
    const dp_object_schema *each;
    const char *const *each_name;
    int neach;
    const void *(*each_at)(const void *x, int i); /* NULL: it has none */
};

/* x as JSON, without the members that it has not; the caller owns it. */
json_t *dp_schema_write(const dp_object_schema *s, const void *x);
/* JSON Schema, draft 2020-12, with s at its root. */
json_t *dp_schema_describe(const dp_object_schema *s);

/* Numbers as records have them; NAN, which means that there is none, as null. */
json_t *dp_schema_numbers(const double *x, int n);
/* x to so many significant digits. */
double dp_schema_rounded(double x, int digits);
