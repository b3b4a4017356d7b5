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

/* command.c */
dp_status dp_command_run(const dp_subject *s, const dp_problem *p, const dp_subject_call *call,
                         dp_subject_result *out, dp_err *e);
void dp_command_close(struct dp_command *c);

#endif
