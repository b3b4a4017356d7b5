/* harness/commands/command_line.h - the command line as a record keeps it. */
#ifndef DP_COMMAND_LINE_H
#define DP_COMMAND_LINE_H

/* argv[0] as it is and the arguments as a shell takes them; before argp changes their order. To be
 * freed. */
char *dp_command_line(int argc, char *const *argv);

#endif
