/* harness/commands/commands.h - commands of the program that live in files of their own. argv[0] is
 * the command's name; each returns the exit status. */
#ifndef DP_COMMANDS_H
#define DP_COMMANDS_H
int dp_cmd_museum(int argc, char **argv);  /* cmd_museum.c */
int dp_cmd_bisect(int argc, char **argv);  /* cmd_bisect.c */
int dp_cmd_check(int argc, char **argv);   /* cmd_check.c */
int dp_cmd_shrink(int argc, char **argv);  /* cmd_shrink.c */
int dp_cmd_compare(int argc, char **argv); /* cmd_compare.c */
#endif
