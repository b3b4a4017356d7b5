/* harness/library/command_parts.h - the parts of a program as a subject (command.h). */
#ifndef DP_COMMAND_PARTS_H
#define DP_COMMAND_PARTS_H
#include "command.h"
#include "harness/base/supervisor.h"
#include "subject_parts.h"

#define DP_COMMAND_HOST "deltaproof-command-host" /* argv[0] of the process that becomes it */
/* Descriptors of that process: its instructions, its output, and the two pipes between it and the
 * program (serve alone). */
#define DP_COMMAND_TOLD_FD DP_PROCESSES_FIRST_FD
#define DP_COMMAND_PRINTED_FD (DP_PROCESSES_FIRST_FD + 1)
#define DP_COMMAND_TALK_FD (DP_PROCESSES_FIRST_FD + 2)

/* Its instructions: this, and after it the words, each ended by a zero. */
typedef struct {
    int64_t memory;
    int serve, nword;
    char in[4096], out[4096];
} dp_command_told;

/* The last of what it printed. */
typedef struct {
    int fd; /* -1: nobody writes any more */
    size_t n;
    char text[2048];
} dp_command_printed;

struct dp_command {
    int serve, nword;
    char **word;
    int64_t memory;
    char *folder, *in, *out;
    int lock;              /* the folder, locked as long as it is used */
    int seen[DP_NRESULTS]; /* results that the first OUT held */
    int called, runs;      /* runs: the process of serve is there */
    long ncall;
    dp_processes processes; /* while it runs */
    dp_command_printed printed;
    int talk;
};

/* command_words.c */
/* Splits the text; *n words, to be freed, each and all. NULL, and none: *e says what is
 * wrong with it. */
char **dp_command_split(const char *text, int *n, dp_err *e);
/* Does the word end in IN or OUT, alone or behind `=`? */
int dp_command_names(const char *word, const char *name);
/* Is the program there: a file that may be run, named by a path or in PATH? */
int dp_command_is_there(const char *word);

/* command_folder.c */
/* A new folder for its files, with the paths of IN and OUT; those that killed programs left are
 * removed. */
dp_status dp_command_folder_make(struct dp_command *c, dp_err *e);
void dp_command_folder_remove(struct dp_command *c);
/* No file of the last call is left, and the next has names of its own. */
void dp_command_folder_clear(struct dp_command *c);

/* command_host.c */
/* A file of memory with what the process is told; -1: errno says why. */
int dp_command_tell(const struct dp_command *c);

/* command_watch.c */
/* One call, to its end or to the limit. Afterwards, without serve, none of its processes is left.
 * DP_EIO: no process could be had. */
dp_status dp_command_call(struct dp_command *c, double limit_s, dp_subject_ending *end, dp_err *e);
/* Ends the process of serve, if it is there. */
void dp_command_stop(struct dp_command *c);

/* command_files.c */
dp_status dp_command_write_inputs(const struct dp_command *c, const dp_problem *p,
                                  const dp_subject_call *call, dp_err *e);
/* The base that OUT's metadata names. DP_EINPUT: none. */
dp_status dp_command_read_base(const struct dp_command *c, dp_base *base, dp_err *e);
/* Moves what OUT holds to *out, or says in its outcome what is wrong with it. */
void dp_command_read_outputs(struct dp_command *c, const dp_subject *s, const dp_problem *p,
                             const dp_subject_call *call, dp_subject_result *out);

/* command.c */
dp_status dp_command_run(const dp_subject *s, const dp_problem *p, const dp_subject_call *call,
                         dp_subject_result *out, dp_err *e);
void dp_command_close(struct dp_command *c);

#endif
