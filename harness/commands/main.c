/* deltaproof COMMAND ...: the table of the commands and what they ask of the process. Exit status 0
 * pass, 1 a verdict failed, 2 could not judge (bad input, bad usage, no report). */
#include "commands.h"
#include "harness/base/home.h"
#include "harness/base/startup.h"
#include "harness/base/terminal.h"
#include "harness/device/device_apart.h"
#include "harness/mpi/mpi_ranks.h"
#include "options.h"
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
    const char *examples;
} COMMANDS[] = {
    {"list", "the cases, the keys of a case file, the deliberate faults", dp_cmd_list,
     "  deltaproof list\n  deltaproof list --keys\n"},
    {"run", "run cases and judge them", dp_cmd_run,
     "  deltaproof run smoke-kda --subject ./libmine.so\n"
     "  deltaproof run smoke-kda --base bf16 --run 'python3 mine.py IN OUT'\n"
     "  deltaproof run --all --out build/verify\n"
     "  deltaproof run kda-long --ranks 8 --base bf16 --chain fp32,tf32rz\n"},
    {"judge", "judge tensors that another program computed", dp_cmd_judge,
     "  deltaproof judge --inputs in.safetensors --outputs out.safetensors \\\n"
     "      --base bf16 --gate log --beta plain --l2norm 0\n"
     "  deltaproof judge --inputs in.safetensors --outputs out.safetensors \\\n"
     "      --base bf16 --ranks 4 --claim tf32 --out report\n"},
    {"explain", "what was compared in a run, which limit decided, how it was derived",
     dp_cmd_explain,
     "  deltaproof explain 'smoke-kda:ranks=4,base=bf16,chain=tf32,merge=allgather'\n"
     "  deltaproof explain --record build/verify/results.json \\\n"
     "      'smoke-kda:ranks=4,base=bf16,chain=tf32,merge=allgather'\n"},
    {"check", "check what must hold between runs; needs no truth", dp_cmd_check,
     "  deltaproof check weak-heads\n  deltaproof check model-head --tokens 65536 --heads 4\n"
     "  deltaproof check weak-heads --base bf16 --serve 'python3 mine.py'\n"},
    {"differ", "where two kernels differ, and whether by more than both bounds allow",
     dp_cmd_differ,
     "  deltaproof differ weak-heads --run 'python3 prefill.py' --base bf16 \\\n"
     "      --run 'python3 decode.py' --base bf16 --design recurrent\n"
     "  deltaproof differ in.safetensors --subject ./libmine.so \\\n"
     "      --backend sim --base fp32\n"},
    {"carry", "how long a session may keep its state in a short format", dp_cmd_carry,
     "  deltaproof carry kda-typical --steps 100000 --need 0.01\n"},
    {"museum", "switch every deliberate fault on and see which verdict goes red", dp_cmd_museum,
     "  deltaproof museum --out build/museum\n"},
    {"bisect", "find the stage that is wrong, or the stages that need a wider format",
     dp_cmd_bisect,
     "  deltaproof bisect stage weak-heads --ranks 4 --fault merge-scaled\n"
     "  deltaproof bisect precision weak-heads --from bf16 --to fp32 --need o=1e-3\n"},
    {"shrink", "the smallest input that still fails for the same reason", dp_cmd_shrink,
     "  deltaproof shrink weak-heads --subject ./libmine.so\n"
     "  deltaproof shrink weak-heads --base bf16 --run 'python3 mine.py IN OUT'\n"},
    {"compare", "what moved between two records", dp_cmd_compare,
     "  deltaproof compare before/results.json after/results.json\n"
     "  deltaproof compare --history history.html records\n"},
    {"inputs", "write the inputs of a case as safetensors", dp_cmd_inputs,
     "  deltaproof inputs smoke-kda -o in.safetensors\n"},
    {"truth", "write the MPFR truth of a case as safetensors", dp_cmd_truth,
     "  deltaproof truth smoke-kda -o truth.safetensors\n"},
    {"report", "make the report of a record", dp_cmd_report, "  deltaproof report build/verify\n"},
    {"index", "a page over all records below a folder", dp_cmd_index,
     "  deltaproof index records\n"},
};
#define NCOMMANDS (sizeof COMMANDS / sizeof *COMMANDS)

static int usage(FILE *f, int rc) {
    fprintf(
        f, "Usage: deltaproof COMMAND [OPTION...]\n\n"
           "Checks delta-rule and gated linear-attention kernels, alone or split over ranks,\n"
           "against a high-precision reference (MPFR), by limits derived from number formats.\n\n");
    for (size_t i = 0; i < NCOMMANDS; i++)
        fprintf(f, "  %-8s %s\n", COMMANDS[i].name, COMMANDS[i].what);
    fprintf(f,
            "\ndeltaproof help COMMAND (or COMMAND --help) describes each, with examples;\n"
            "deltaproof --version prints the version, --include-dir the folder of\n"
            "deltaproof_subject.h, for a compiler's -I. Exit status: 0 pass, 1 a verdict failed,\n"
            "2 could not judge.\n");
    return rc;
}

static int unknown(const char *word) {
    const char *names[NCOMMANDS + 1];
    for (size_t i = 0; i < NCOMMANDS; i++)
        names[i] = COMMANDS[i].name;
    names[NCOMMANDS] = "help";
    const char *near = dp_suggest(word, names, NCOMMANDS + 1);
    fprintf(stderr, "deltaproof: '%s' is not a command", word);
    if (near) fprintf(stderr, ": did you mean '%s'?", near);
    fputc('\n', stderr);
    return usage(stderr, 2);
}

static int is(const char *word, const char *a, const char *b) {
    return !strcmp(word, a) || !strcmp(word, b);
}

static int command_of(int argc, char **argv) {
    static char help[] = "--help";
    char name[32];
    if (argc < 2) return usage(stderr, 2);
    if (is(argv[1], "--help", "-h") || (argc == 2 && !strcmp(argv[1], "help")))
        return usage(stdout, 0);
    if (is(argv[1], "--version", "-V")) {
        printf("%s\n", argp_program_version); /* what cannot be written is seen at the end */
        return 0;
    }
    if (argc == 2 && !strcmp(argv[1], "--include-dir")) {
        printf("%s\n", dp_home_include());
        return 0;
    }
    if (!strcmp(argv[1], "help")) { /* help COMMAND: COMMAND --help */
        argv[1] = argv[2];
        argv[2] = help;
        argc = 3;
    }
    for (size_t i = 0; i < NCOMMANDS; i++) {
        if (strcmp(argv[1], COMMANDS[i].name)) continue;
        snprintf(name, sizeof name, "deltaproof %s", COMMANDS[i].name);
        argv[1] = name; /* what messages begin with */
        dp_parse_examples(COMMANDS[i].examples);
        return COMMANDS[i].run(argc - 1, argv + 1);
    }
    return unknown(argv[1]);
}

/* In another process of mpirun than the first: what that asks for. */
static struct {
    int argc;
    char **argv;
} arguments;

static void work_sweep(const void *message, DP_UNUSED size_t bytes) {
    dp_run_shared(arguments.argc - 1, arguments.argv + 1, message);
}

static int be_worker(int argc, char **argv) {
    enum { OWN = 3 };
    dp_mpi_worker w[OWN + DP_MPI_NRANK_WORKERS] = {
        {DP_MPI_SWEEP, DP_SWEEP_BYTES, work_sweep}, dp_apart_worker, dp_apart_conv_worker};
    memcpy(w + OWN, dp_mpi_rank_workers, sizeof dp_mpi_rank_workers);
    arguments.argc = argc;
    arguments.argv = argv;
    dp_mpi_serve(w, OWN + DP_MPI_NRANK_WORKERS);
    return 0;
}

int main(int argc, char **argv) {
    if (dp_startup(argc, argv)) return dp_ending(2);
    dp_err e = {0};
    setvbuf(stdout, NULL, _IOLBF, 0);   /* a log shows each line when it is said */
    openblas_set_num_threads(1);        /* we call BLAS from our own threads */
    omp_set_max_active_levels(3);       /* cases, draws, chunks */
    mallopt(M_MMAP_THRESHOLD, 1 << 30); /* matrices come and go all the time: their pages stay */
    mallopt(M_TRIM_THRESHOLD, 1 << 30);
    if (dp_isa_choose(getenv("DP_ISA"), &e)) return dp_ending(dp_refuse(&e));
    dp_mpi_start(argc, argv);
    return dp_ending(dp_mpi_rank() ? be_worker(argc, argv) : command_of(argc, argv));
}
