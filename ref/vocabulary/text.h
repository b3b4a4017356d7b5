/* ref/vocabulary/text.h - text that may stand in a record, a page or on a terminal: UTF-8 without
 * control characters.
 *
 * Names and settings that are anything else are refused on entry (command line, folders, case
 * files). Texts of a library are made printable. So every text of a record is there as it was, is a
 * valid string of JSON and of XML 1.0, and moves no cursor.
 */
#pragma once
#include <stddef.h>
#include <stdint.h>
#include <string.h>

/* Bytes before the first that is not well-formed UTF-8 (RFC 3629), or is part of a control
 * character (U+0000..1F, 7F..9F) or of U+FFFE, U+FFFF. If all is well: n. With lines 1 tabs and
 * ends of lines are allowed. */
size_t dp_text_good(const char *s, size_t n, int lines);

/* Bytes of the mark (U+FEFF) that editors of some systems begin a text with; 0: none. */
static inline size_t dp_text_mark(const char *s) { return strncmp(s, "\xef\xbb\xbf", 3) ? 0 : 3; }

/* Copies s with every other byte as \xNN; cut between characters where it does not fit. */
void dp_text_printable(const char *s, char *out, size_t size);

/* Behind its last slash. */
const char *dp_base_name(const char *path);

/* Place of name in names [n], -1: it is none of them. */
int dp_find_name(const char *name, const char *const *names, int n);
/* Is name one of the words of a list that have `between` between them? */
int dp_is_listed(const char *name, const char *list, char between);
/* Names with commas or blanks between, up to a colon: copies the first to name, cut to size.
 * Returns what follows it, NULL: there is none. A list may be NULL. */
const char *dp_next_name(const char *list, char *name, size_t size);

/* Numbers that users write: the whole text is one, within a stated range.
 *
 * Decimal, or hex floats (0x1.8p-3) for reals. Blanks, "nan", "inf", and values that a double does
 * not hold are refused, never cut or rounded to another value. Such values are 1e400, or 1e-400,
 * which would become 0. */
typedef enum { DP_NUMBER_OK, DP_NUMBER_NONE, DP_NUMBER_RANGE } dp_number;

/* DP_NUMBER_NONE: no number; DP_NUMBER_RANGE: one outside of [least, most]. *x is set but for
 * DP_NUMBER_NONE. */
dp_number dp_number_int(const char *text, int64_t least, int64_t most, int64_t *x);
dp_number dp_number_real(const char *text, double least, double most, double *x);

/* The same for the number that text begins with; *end: behind it. */
dp_number dp_number_real_prefix(const char *text, double *x, const char **end);
