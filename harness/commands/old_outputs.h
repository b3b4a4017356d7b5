/* harness/commands/old_outputs.h - outputs of an earlier command in the same place. They are
 * removed before anything is computed, so that a program which ends early leaves no older
 * verdict. */
#ifndef DP_OLD_OUTPUTS_H
#define DP_OLD_OUTPUTS_H

/* Record, junit.xml, summary.md, page, and the figures that the page shows, of the folder (NULL:
 * none). Nothing else in it is this program's. json: a file that the command writes, or NULL. It
 * stays if it is no record, and no list of `check` or `differ`. */
void dp_old_outputs_remove(const char *folder, const char *json);

/* The same at the program's end, if that is a failure before _forget. The arguments, which may be
 * wrong, name the folder as --out and the file as --json. */
void dp_old_outputs_expect(int argc, char **argv);
void dp_old_outputs_forget(void);

#endif
