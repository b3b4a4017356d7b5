/* harness/commands/parse.h - the options of a command by argp. It adds -h, examples at the end of
 * --help, and the nearest name of an unknown option. */
#ifndef DP_PARSE_H
#define DP_PARSE_H
#include <argp.h>

/* Lines of the form "  deltaproof ..", printed at the end of --help by the next dp_parse. */
void dp_parse_examples(const char *lines);

/* The examples; "" before any were set. */
const char *dp_examples(void);

/* argp_parse(a, argc, argv, 0, NULL, input); a usage that is wrong ends the program with status
 * 2. */
void dp_parse(const struct argp *a, int argc, char **argv, void *input);

#endif
