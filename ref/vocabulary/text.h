/* ref/vocabulary/text.h - text that may stand in a record, a page or on a terminal: UTF-8 without
 * control characters.
 *
 * Names and settings that are anything else are refused on entry (command line, folders, case
 * files). Texts of a library are made printable. So every text of a record is there as it was, is a
 * valid string of JSON and of XML 1.0, and moves no cursor.
 */
#ifndef DP_TEXT_H
#define DP_TEXT_H
#include <stddef.h>

/* Bytes before the first that is not well-formed UTF-8 (RFC 3629), or is part of a control
 * character (U+0000..1F, 7F..9F) or of U+FFFE, U+FFFF. If all is well: n. With lines 1 tabs and
 * ends of lines are allowed. */
size_t dp_text_good(const char *s, size_t n, int lines);

/* Copies s with every other byte as \xNN; cut between characters where it does not fit. */
void dp_text_printable(const char *s, char *out, size_t size);

/* Place of name in names [n], -1: it is none of them. */
int dp_find_name(const char *name, const char *const *names, int n);
/* Is name one of the words of a list that have `between` between them? */
int dp_is_listed(const char *name, const char *list, char between);
/* Names with commas or blanks between, up to a colon: copies the first to name, cut to size.
 * Returns what follows it, NULL: there is none. A list may be NULL. */
const char *dp_next_name(const char *list, char *name, size_t size);
#endif
