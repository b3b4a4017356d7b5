/* harness/commands/old_outputs.h - outputs of an earlier command in the same place. They are
 * removed before anything is computed, so that a program which ends early leaves no older
 * verdict. */
#ifndef DP_OLD_OUTPUTS_H
#define DP_OLD_OUTPUTS_H

/* Record, junit.xml, summary.md, page, and the figures that the page shows, of the folder (NULL:
 * none). Nothing else in it is this program's. */
void dp_old_outputs_remove(const char *folder);

/* The same at the program's end, if that is a failure before _forget. The folder is the one that
 * the arguments name as --out, which may be wrong. */
void dp_old_outputs_expect(int argc, char **argv);
void dp_old_outputs_forget(void);

#endif
