/* harness/library/command.h - any program as a subject: it reads the inputs of a call from one
 * safetensors file and writes its outputs to another.
 *
 * IN.safetensors is what `deltaproof inputs` writes and `judge --inputs` reads. Its metadata have
 * base, claim (the format of the M chain) and ranks. They have chunk where `check` asks for a
 * length of chunks that the design names (`chunks=`). OUT.safetensors is what `judge --outputs`
 * reads: its names and aliases, layouts and metadata state_layout (harness/run/judge.h).
 *
 * Two forms.
 *   --run COMMAND    one process a call. The words IN and OUT of the command, also at the end of a
 *                    word behind `=`, stand for the two paths; a command that names neither gets
 *                    both appended. DELTAPROOF_IN and DELTAPROOF_OUT hold them, too. Exit status 0:
 *                    OUT holds the outputs; 77: it does not take this problem (the last line that
 *                    it printed says why), the run is skipped; any other: it failed.
 *   --serve COMMAND  one process for all calls. For every call it reads a line `IN OUT`, two paths
 *                    with a blank between, from its standard input, and answers with one line on
 *                    its standard output: `ok`, `unsupported WHY` or `failed WHY`. It ends when its
 *                    input does. A call that fails in another way ends it, and the next starts it
 *                    again.
 *
 * No shell. The text is split at blanks; '..' and ".." keep words together. A backslash outside of
 * '..' takes the next character as it is; nothing is expanded. The first word is looked up in PATH.
 * For a pipeline: --run 'sh -c "a $0 | b $1"'.
 *
 * A call that takes longer than its limit fails, and each process may have so much private memory.
 * All processes that a command started end with its call (--serve: with the program). OUT is read
 * afterwards: a regular file, no symlink. Its prints (--serve: on standard error) are kept,
 * and the last lines are shown where it fails. The two files lie in a new folder below $TMPDIR
 * (/tmp), which is removed at the end. If this program was killed, the next one removes it.
 */
#pragma once
#include "subject.h"

#define DP_COMMAND_UNSUPPORTED 77 /* exit status: it does not take this problem */

/* The command and its claims. Every OUT must hold the tensors in `writes` (names with blanks or
 * commas between; NULL: o), if its problem has them. All later OUTs must hold the tensors of the
 * first. */
typedef struct {
    const char *text;
    int serve, ranks; /* ranks: the most that a call may ask for */
    dp_base base;     /* DP_NBASES: as its first OUT says (metadata base), to a small problem */
    dp_format chain;
    const char *writes, *design; /* design NULL: not declared */
    int64_t memory;              /* 0: that of this machine */
    double limit_s;              /* of the call that asks for the base; 0: DP_SUBJECT_LIMIT_S */
} dp_command_claim;

/* DP_EINPUT: the text is no command or names no program that is there, a name of `writes` is not
 * known, a design is none. DP_EIO: no folder for its files. The program is not started before the
 * first call, except to ask for its base. DP_EINPUT then tells the result of that call, where it
 * did not say. The subject is run and closed as any other (subject.h). */
dp_status dp_command_open(const dp_command_claim *q, dp_subject *s, dp_err *e);
