/* deltaproof run CASE...: cases on simulated ranks, kernels and libraries, judged against the
 * truth. Exit status 0 pass, 1 a verdict failed, 2 could not judge. */
#include "commands.h"
#include "harness/base/startup.h"
#include "harness/device/device_run.h"
#include "harness/mpi/mpi_ranks.h"
#include "harness/record/record.h"
#include "harness/record/run_id.h"
#include "harness/run/subjects.h"
#include "options.h"
#include "print_failures.h"
#include "ref/files/output.h"
#include "run_cases.h"
#include "write_record.h"

#include <argp.h>
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

typedef struct {
    dp_options of;
    const char *id, *resume, *limits;
    int all, smoke, verbose;
    int *again; /* runs of a subject still to be called again: of one sequence, of packed ones */
    int nvariant;
    dp_cuda_variant variant[DP_NCUDA_VARIANTS];
    dp_subject subject; /* open where of.subject names one */
} options;

enum { OPT_VARIANT = 256, OPT_AGAIN };

static const struct argp_option OPTIONS[] = {
    DP_ROW_CASES,
    DP_FLAG("all", all, "run every case"),
    DP_FLAG("smoke", smoke, "run the smoke cases"),
    DP_TEXT("id", id, "ID", "reproduce one run of a record, bit for bit"),
    DP_TEXT("limits", limits, "FILE",
            "write results, truth and limits of the last run as safetensors "
            "(harness/verdict/compare.h)"),
    DP_ROW("ranks", DP_OPT_RANKS, "LIST", "only these rank counts, e.g. 1,2,4"),
    DP_ROW("chain", DP_OPT_CHAIN, "LIST", "only these formats of the M chain: " DP_FORMAT_WORDS),
    DP_ROW("base", DP_OPT_BASE, "LIST", "only these base policies: " DP_BASE_WORDS),
    DP_ROW("exchange", DP_OPT_MERGE, "LIST",
           "exchange of states between ranks, in place of the case's: " DP_EXCHANGE_WORDS
           " (ref/vocabulary/exchange.h)"),
    {"merge", 0, 0, OPTION_ALIAS, 0, 0},
    DP_ROW("payload", DP_OPT_PAYLOAD, "LIST",
           "format in which pairs and states are sent, in place of the case's: " DP_PAYLOAD_WORDS),
    DP_ROW("own", DP_OPT_OWN, "LIST",
           "which rank owns which tokens, in place of the case's: " DP_OWN_WORDS),
    DP_ROW("exact-cp", DP_OPT_EXACT_CP, 0,
           "--own grid: the bits do not depend on the number of ranks"),
    DP_ROW(
        "backend", DP_OPT_BACKEND, "LIST",
        "sim: simulated ranks; lapack: the same over CBLAS and LAPACKE, in bases fp64 and fp32, "
        "also "
        "with --design scores=factored or chunk=N; cuda: the CUDA kernels, ranks sharing one "
        "device; "
        "nccl: a device a rank, processes that share devices, or processes of torchrun or mpirun "
        "on "
        "any hosts; mpi: simulated ranks, processes of `mpirun -np N deltaproof run ..` (default: "
        "sim, lapack, and cuda where it can run)"),
    DP_ROW_SUBJECT("judge " DP_LIBRARY
                   " instead of the simulated ranks; beside them with --backend "
                   "sim"),
    DP_ROWS_PROGRAM_OF(
        "judge any program, started for each call: the words IN and OUT (appended if missing) are "
        "the safetensors files that it reads and writes; no shell; needs --base, unless its OUT "
        "states one (harness/library/command.h)",
        "the same, started once: for each call it reads a line `IN OUT` on standard input and "
        "answers `ok`, `unsupported WHY` or `failed WHY` on standard output"),
    DP_ROW_DESIGN_OF(DP_DESIGN),
    DP_ROW_CLAIM_DROP,
    DP_ROW_UNJUDGED,
    DP_ROW_LIMIT,
    DP_ROW_MEMORY,
    DP_ROW("variant", OPT_VARIANT, "LIST",
           "how the CUDA kernels make gradients: plain, dh-only (M of the forward reused), pair-dg "
           "(dg "
           "without cancellation), save-all (nothing recomputed), segments (M by the state pass, a "
           "rank's sequence cut in parts), windows (the same, ranks store states into each other's "
           "memory); both also with -dh-only or -save-all"),
    {"way", 0, 0, OPTION_ALIAS, 0, 0},
    DP_ROW_FAULT,
    DP_ROW_OUT,
    DP_ROW_JSON,
    DP_ROW(
        "again", OPT_AGAIN, "N",
        "for --subject, --run, --serve: call the first N runs (default 2) again, and N of packed "
        "sequences, with the same inputs and with other values at the same addresses; failing "
        "runs, "
        "too; 0: none"),
    DP_TEXT("resume", resume, "DIR", "keep finished cases there; the same command then skips them"),
    DP_ROW_TRUTH,
    DP_ROW_CACHE,
    DP_ROWS_PROVENANCE,
    DP_ROW("verbose", 'v', 0, "print every run"),
    {0}};

/* It takes designs, too (run/subject_lapack.c). */
static int solver_alone(const dp_options *o) {
    return o->nbackend == 1 && o->backend[0] == DP_BACKEND_LAPACK;
}

static error_t parse(int key, char *arg, struct argp_state *st) {
    options *o = st->input;
    switch (key) {
    case OPT_VARIANT:
        dp_option_list(st, "variant", arg, dp_cuda_variant_names, DP_NCUDA_VARIANTS,
                       (int *)o->variant, &o->nvariant);
        break;
    case OPT_AGAIN:
        o->again[0] = o->again[1] = (int)dp_option_number(st, "again", arg, 0, 1 << 20);
        break;
    case 'v': o->verbose = 1; break;
    case ARGP_KEY_END:
        if (dp_options_idle_design(&o->of) && !solver_alone(&o->of)) argp_error(st, DP_IDLE_DESIGN);
        break;
    default: return dp_option(key, arg, st, &o->of);
    }
    return 0;
}

/* ---- what to run ----------------------------------------------------------------------------- */

/* The ID's values replace the options. */
static void select_by_id(options *o, const dp_id *id) {
    const int *v = id->value;
    dp_options *of = &o->of;
    of->name[0] = id->case_name;
    of->backend[0] = v[DP_ID_BACKEND] < 0 ? DP_BACKEND_SIM : (dp_backend)v[DP_ID_BACKEND];
    of->nname = of->nbackend = 1;
    const struct {
        int *list, *n;
    } to[DP_NID_KEYS] = {[DP_ID_RANKS] = {of->ranks, &of->nranks},
                         [DP_ID_BASE] = {(int *)of->base, &of->nbase},
                         [DP_ID_CHAIN] = {(int *)of->chain, &of->nchain},
                         [DP_ID_MERGE] = {(int *)of->merge, &of->nmerge},
                         [DP_ID_PAYLOAD] = {(int *)of->payload, &of->npayload},
                         [DP_ID_OWN] = {(int *)of->own, &of->nown},
                         [DP_ID_VARIANT] = {(int *)o->variant, &o->nvariant}};
    for (int k = 0; k < DP_NID_KEYS; k++)
        if (to[k].list && v[k] >= 0) {
            to[k].list[0] = v[k];
            *to[k].n = 1;
        }
    if (v[DP_ID_PAYLOAD] < 0) { /* unsaid: full, whatever else the case lists */
        of->payload[0] = DP_PAYLOAD_FULL;
        of->npayload = 1;
    }
    if (v[DP_ID_MERGE] < 0 && dp_backends[of->backend[0]].on_device) { /* unsaid: an all-gather */
        of->merge[0] = DP_EXCHANGE_ALLGATHER;
        of->nmerge = 1;
    }
    if (v[DP_ID_FAULT] >= 0) of->fault = (dp_fault)v[DP_ID_FAULT];
}

static int open_subject(options *o) {
    dp_err e = {0};
    if (!dp_options_foreign(&o->of)) return 0;
    if (o->of.fault) {
        fprintf(stderr, "deltaproof: --fault goes with the simulated ranks, not with --subject, "
                        "--run and --serve\n");
        return 2;
    }
    if (dp_options_open(&o->of, &o->subject, &e)) return dp_refuse(&e);
    if (!o->of.nbackend) {
        o->of.backend[0] = DP_BACKEND_SUBJECT;
        o->of.nbackend = 1;
    }
    return 0;
}

/* Do the processes of one mpirun share the cases? Not where they are its ranks. */
static int is_shared(const options *o) {
    int ranks = dp_mpi_size() == 1;
    for (int i = 0; i < o->of.nbackend; i++)
        ranks |= dp_backends[o->of.backend[i]].peers || dp_backends[o->of.backend[i]].processes;
    return !ranks;
}

static dp_batch batch_of(const options *o) {
    const dp_options *of = &o->of;
    return (dp_batch){.run = {.nranks = of->nranks,
                              .ranks = of->ranks,
                              .nbase = of->nbase,
                              .base = of->base,
                              .nchain = of->nchain,
                              .chain = of->chain,
                              .nmerge = of->nmerge,
                              .merge = of->merge,
                              .npayload = of->npayload,
                              .payload = of->payload,
                              .nown = of->nown,
                              .own = of->own,
                              .nbackend = of->nbackend,
                              .backend = of->backend,
                              .nvariant = o->nvariant,
                              .variant = o->variant,
                              .fault = of->fault,
                              .subject = dp_options_foreign(of) ? &o->subject : NULL,
                              .design = of->design,
                              .drop = of->drop,
                              .unjudged = of->unjudged,
                              .limit_s = of->limit_s,
                              .again = *o->again ? o->again : NULL,
                              .cache = of->cache,
                              .truth = dp_options_truth(of),
                              .progress = isatty(2)},
                      .named = !o->all && !o->smoke,
                      .verbose = o->verbose || of->nname,
                      .table = dp_options_table(of),
                      .resume = o->resume,
                      .kernel_commit = of->provenance.kernel_commit,
                      .shared = is_shared(o)};
}

/* ---- running --------------------------------------------------------------------------------- */

/* NULL: not wanted, or, counted in *errors, it cannot be loaded. */
static dp_case *load_case(const options *o, const char *path, int *errors) {
    dp_case *c = dp_calloc(1, sizeof *c);
    dp_err e = {0};
    int skip = 0;
    if (o->smoke && !dp_case_open(path, 0, c, &e)) {
        skip = !c->smoke && !o->all && !o->of.nname;
        dp_case_free(c);
    }
    if (!skip && !e.code && !dp_case_load(path, c, &e)) return c;
    if (e.code) {
        ++*errors;
        if (!dp_mpi_rank()) dp_refuse(&e); /* which says it once */
    }
    free(c);
    return NULL;
}

static void free_cases(dp_case **cases, int n) {
    for (int i = 0; i < n; i++) {
        dp_case_free(cases[i]);
        free(cases[i]);
    }
    free(cases);
}

/* The other processes load the same cases (dp_run_shared). */
typedef struct {
    int what, n;
} sweep;
_Static_assert(sizeof(sweep) == DP_SWEEP_BYTES, "commands.h says how long it is");
static void call_others(int n) {
    const sweep s = {DP_MPI_SWEEP, n};
    for (int r = 1; r < dp_mpi_size(); r++)
        dp_mpi_send(r, DP_MPI_JOB, &s, sizeof s);
}

/* Few runs say the rest in their own lines; the first failed one is explained. */
static void print_begins(const options *o, const dp_runs *runs, FILE *table) {
    char *record = dp_options_record(&o->of);
    int explained = 0;
    for (int i = 0; i < runs->n; i++) {
        const dp_run *r = &runs->run[i];
        if (r->ntensor && r->speaks >= 0) dp_print_begins(&r->tensor[r->speaks], 4, table);
        if (r->verdict != DP_FAIL || !r->ntensor || explained++) continue;
        char *again = dp_options_again_text(&o->of, r->backend == DP_BACKEND_SUBJECT);
        fputs("    ", table);
        dp_print_explain(r->id, record, again, table);
        free(again);
    }
    free(record);
}

static void print_failures(const options *o, const dp_runs *runs, FILE *table) {
    char *own = dp_options_again_text(&o->of, 0), *subject = dp_options_again_text(&o->of, 1);
    char *record = dp_options_record(&o->of);
    const dp_again again = {own, subject, record, dp_provenance_note(&o->of.provenance, "again")};
    dp_print_failures(runs, &again, table);
    free(own);
    free(subject);
    free(record);
}

/* Loads, runs and judges the cases of these files, and writes the record. */
static int run_files(const options *o, char *const *paths, int n, dp_record *rec, double t0) {
    const dp_batch batch = batch_of(o);
    dp_runs runs = {0};
    dp_case **cases = dp_calloc((size_t)n, sizeof *cases);
    rec->runs = &runs;
    rec->cases = cases;
    for (int i = 0; i < n; i++) {
        dp_progress_loading(paths[i], i, n);
        dp_case *c = load_case(o, paths[i], &rec->errors);
        if (c) cases[rec->ncase++] = c;
    }
    dp_progress_loading(NULL, n, n);
    if (batch.shared) call_others(rec->ncase);
    rec->errors += dp_run_cases(&batch, rec->ncase, cases, &runs);
    rec->seconds = dp_now() - t0;
    dp_over_cases(rec);
    if (n > 1 || runs.n > 5)
        print_failures(o, &runs, batch.table);
    else
        print_begins(o, &runs, batch.table);
    dp_print_pooled(rec, batch.table);
    const int rc = dp_record_finish(&o->of, rec);
    dp_over_cases_free(rec);
    free_cases(cases, rec->ncase);
    dp_runs_free(&runs);
    return rc;
}

/* The state that a signal finds which ends the program, also because a rank has ended. */
typedef struct {
    FILE *table;
    const char *resume;
} interrupted;
static void say_interrupted(void *arg) {
    const interrupted *x = arg;
    dp_mpi_say_gone();
    dp_progress_say(x->table);
    if (x->resume)
        fprintf(x->table, "finished cases are in %s: the same command goes on\n", x->resume);
}

/* From options that are complete. */
static int run(options *o, const char *command, double t0) {
    dp_err e = {0};
    dp_record rec = {.command = command, .provenance = &o->of.provenance};
    char **paths = NULL;
    int n = 0;
    for (int i = 0; i < o->of.nbackend; i++)
        if (dp_backends[o->of.backend[i]].processes) dp_procs_start();
    static interrupted at;
    at = (interrupted){dp_options_table(&o->of), o->resume};
    dp_on_interrupt(say_interrupted, &at);
    if (o->of.limit_s > 0) dp_mpi_limit(o->of.limit_s);
    if (open_subject(o)) return 2;
    dp_provenance_file(&o->of.provenance, "subject", o->of.subject);
    const int rc =
        dp_options_cases(&o->of, &paths, &n, &e) ? dp_refuse(&e) : run_files(o, paths, n, &rec, t0);
    dp_free_list(paths, n);
    dp_subject_close(&o->subject);
    return rc;
}

static int run_options(options *o, const char *command) {
    dp_err e = {0};
    dp_id id = {0};
    if (dp_outputs_check(&o->of)) return 2;
    if (o->resume && dp_make_dirs(o->resume)) {
        fprintf(stderr, "deltaproof: --resume %s: %s\n", o->resume, strerror(errno));
        return 2;
    }
    const double t0 = dp_now();
    if (!o->all && !o->smoke && !o->of.nname && !o->id) {
        fprintf(stderr, "deltaproof: run: name a case, or --all, --smoke or --id ID\n");
        return 2;
    }
    if (o->id && !dp_id_parse(o->id, dp_options_foreign(&o->of), &id, &e)) select_by_id(o, &id);
    if (o->limits) dp_limits_keep(1);
    const int rc = e.code ? dp_refuse(&e) : run(o, command, t0);
    free(id.case_name);
    return !e.code && o->limits && dp_limits_write(o->limits, &e) ? dp_refuse(&e) : rc;
}

static const struct argp ARGP = {
    .options = OPTIONS,
    .parser = parse,
    .args_doc = "[CASE...]",
    .doc = "Run cases on simulated ranks and judge them against the truth."
           "\vExit status 0 pass, 1 a verdict failed, 2 could not judge."};

int dp_cmd_run(int argc, char **argv) {
    int again[2] = {DP_RUNS_CALLED_AGAIN, DP_RUNS_CALLED_AGAIN};
    options o = {.of = dp_options_new(0, 256), .again = again};
    char *command = dp_command_line(argc, argv);
    dp_old_outputs_expect(argc, argv);
    dp_parse(&ARGP, argc, argv, &o);
    dp_old_outputs_forget();
    const int rc = run_options(&o, command);
    free(command);
    return rc;
}

/* ---- in another process than the first ------------------------------------------------------- */

/* The first has understood the same arguments; cases that it could not load are left out here. */
void dp_run_shared(int argc, char **argv, const void *message) {
    int again[2] = {DP_RUNS_CALLED_AGAIN, DP_RUNS_CALLED_AGAIN};
    options o = {.of = dp_options_new(0, 256), .again = again};
    dp_err e = {0};
    dp_id id = {0};
    char **paths = NULL;
    int n = 0, ncase = 0, errors = 0;
    sweep s;
    memcpy(&s, message, sizeof s);
    dp_parse(&ARGP, argc, argv, &o);
    if (o.id && !dp_id_parse(o.id, dp_options_foreign(&o.of), &id, &e)) select_by_id(&o, &id);
    if (open_subject(&o) || dp_options_cases(&o.of, &paths, &n, &e)) exit(dp_refuse(&e));
    dp_case **cases = dp_calloc((size_t)n, sizeof *cases);
    for (int i = 0; i < n; i++) {
        dp_case *c = load_case(&o, paths[i], &errors);
        if (c) cases[ncase++] = c;
        free(paths[i]);
    }
    if (ncase != s.n) {
        fprintf(stderr, "deltaproof: rank %d loads %d cases, rank 0 %d: not the same files\n",
                dp_mpi_rank(), ncase, s.n);
        exit(2);
    }
    dp_batch b = batch_of(&o);
    b.table = fopen("/dev/null", "w");
    b.run.progress = 0;
    dp_run_given_cases(&b, ncase, cases);
    fclose(b.table);
    free_cases(cases, ncase);
    free(paths);
    free(id.case_name);
    dp_subject_close(&o.subject);
}
