/* deltaproof COMMAND ...: the table of the commands and what they ask of the process. Exit status 0
 * pass, 1 a verdict failed, 2 could not judge (bad input, bad usage, no report). */
#define _GNU_SOURCE
#include "commands.h"
#include "harness/base/startup.h"
#include "ref/arithmetic/isa.h"

#include <argp.h>
#include <malloc.h>
#include <omp.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#ifndef DP_COMMIT
#define DP_COMMIT "unknown"
#endif
extern void openblas_set_num_threads(int);

const char *argp_program_version = "deltaproof " DP_VERSION " (" DP_COMMIT ")";
error_t argp_err_exit_status = 2;

/* In the order of the usage. */
static const struct {
    const char *name, *what;
    int (*run)(int argc, char **argv);
} COMMANDS[] = {
    {"list", "the cases, the keys of a case file, the deliberate faults", dp_cmd_list},
    {"run", "run cases and judge them", dp_cmd_run},
    {"judge", "judge tensors that another program computed", dp_cmd_judge},
    {"check", "check what must hold between runs, without a truth", dp_cmd_check},
    {"museum", "switch every deliberate fault on and see which verdict goes red", dp_cmd_museum},
    {"bisect", "find the stage that is wrong, or the stages that need a wider format",
     dp_cmd_bisect},
    {"shrink", "the smallest input that still fails for the same reason", dp_cmd_shrink},
    {"compare", "what moved between two records", dp_cmd_compare},
    {"inputs", "write the inputs of a case as safetensors", dp_cmd_inputs},
    {"truth", "write the MPFR truth of a case as safetensors", dp_cmd_truth},
    {"report", "make the report of a record", dp_cmd_report},
};
#define NCOMMANDS (sizeof COMMANDS / sizeof *COMMANDS)

static int usage(FILE *f, int rc) {
    fprintf(f, "Usage: deltaproof COMMAND [OPTION...]\n\n"
               "Proves delta-rule linear-attention kernels under context parallelism: truth in "
               "MPFR, derived bounds, verdicts.\n\n");
    for (size_t i = 0; i < NCOMMANDS; i++)
        fprintf(f, "  %-8s %s\n", COMMANDS[i].name, COMMANDS[i].what);
    fprintf(f, "\ndeltaproof COMMAND --help describes each; deltaproof --version prints the "
               "version.\n");
    return rc;
}

static int command_of(int argc, char **argv) {
    if (argc < 2) return usage(stderr, 2);
    if (!strcmp(argv[1], "--help") || !strcmp(argv[1], "-h")) return usage(stdout, 0);
    if (!strcmp(argv[1], "--version") || !strcmp(argv[1], "-V"))
        return printf("%s\n", argp_program_version) < 0;
    for (size_t i = 0; i < NCOMMANDS; i++) {
        char name[32];
        if (strcmp(argv[1], COMMANDS[i].name)) continue;
        snprintf(name, sizeof name, "deltaproof %s", COMMANDS[i].name);
        argv[1] = name; /* what messages begin with */
        return COMMANDS[i].run(argc - 1, argv + 1);
    }
    fprintf(stderr, "deltaproof: '%s' is not a command\n", argv[1]);
    return usage(stderr, 2);
}

int main(int argc, char **argv) {
    if (dp_startup(argc, argv)) return dp_ending(2);
    dp_err e = {0};
    openblas_set_num_threads(1);        /* we call BLAS from our own threads */
    omp_set_max_active_levels(3);       /* cases, draws, chunks */
    mallopt(M_MMAP_THRESHOLD, 1 << 30); /* matrices come and go all the time: their pages stay */
    mallopt(M_TRIM_THRESHOLD, 1 << 30);
    if (dp_isa_choose(getenv("DP_ISA"), &e)) return dp_ending(dp_refuse(&e));
    return dp_ending(command_of(argc, argv));
}
