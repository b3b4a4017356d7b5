/* harness/commands/list_recurrences.h - `deltaproof list --recurrences`. */
#ifndef DP_LIST_RECURRENCES_H
#define DP_LIST_RECURRENCES_H
#include <stdio.h>

/* Prints each recurrence: name, title, the formula of one token, its inputs with their shapes. */
void dp_list_recurrences(FILE *f);
#endif
