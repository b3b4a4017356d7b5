/* harness/commands/write_case.h - one case written as one safetensors file: what the commands
 * inputs and truth have in common. */
#ifndef DP_WRITE_CASE_H
#define DP_WRITE_CASE_H
#include "options.h"

/* Are one case and a file to write named? 0, or 2 after a message. command: its name. */
int dp_write_case_usage(const char *command, const dp_options *o);

/* Loads the case and has it written. Op chain: the factors, fp32, for a kernel that multiplies them
 * elsewhere; a recurrence by `write`; other ops are refused. The exit status. */
int dp_write_case(const char *command, const dp_options *o,
                  dp_status (*write)(const dp_case *c, void *arg, dp_err *e), void *arg);

#endif
