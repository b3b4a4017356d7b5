/* deltaproof: list | run | judge | truth | report. Exit status 0 pass, 1 a verdict failed, 2 could
 * not judge (bad input, bad usage, no report). */
#define _GNU_SOURCE
#include "commands.h"
#include "harness/base/home.h"
#include "harness/base/startup.h"
#include "harness/case/case.h"
#include "harness/device/device_procs.h"
#include "harness/record/digest.h"
#include "harness/record/record.h"
#include "harness/run/judge.h"
#include "harness/search/museum.h"
#include "options.h"
#include "ref/arithmetic/isa.h"
#include "ref/files/cache.h"
#include "ref/files/output.h"
#include "ref/files/safetensors.h"
#include "ref/truth/truth.h"

#include <argp.h>
#include <errno.h>
#include <malloc.h>
#include <math.h>
#include <omp.h>
#include <pthread.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#ifndef DP_COMMIT
#define DP_COMMIT "unknown"
#endif
extern void openblas_set_num_threads(int);

const char *argp_program_version = "deltaproof " DP_VERSION " (" DP_COMMIT ")";
error_t argp_err_exit_status = 2;

/* ---- options of all commands ----------------------------------------------------------------- */

typedef struct {
    dp_options of; /* those shared with other commands */
    const char *out_dir, *json, *id, *output;
    int all, smoke, keys, faults, verbose, bits;
    int nway;
    dp_cuda_way way[DP_NCUDA_WAYS];
    dp_judge_options judge;
    dp_subject subject;
    char *command; /* the whole line */
    dp_truth_pick truth;
    int has_truth;
} options;

enum {
    OPT_OUT = 256,
    OPT_JSON,
    OPT_ID,
    OPT_ALL,
    OPT_SMOKE,
    OPT_KEYS,
    OPT_FAULTS,
    OPT_BITS,
    OPT_WAY,
    OPT_INPUTS,
    OPT_OUTPUTS,
    OPT_CLAIM,
    OPT_GATE,
    OPT_LOWER_BOUND,
    OPT_BETA,
    OPT_L2NORM,
    OPT_SCALE,
    OPT_CU_SEQLENS,
    OPT_STATE_LAYOUT,
    OPT_TOKENS,
    OPT_TRUTH,
    OPT_DESIGN
};

static error_t parse(int key, char *arg, struct argp_state *st) {
    options *o = st->input;
    switch (key) {
    case OPT_WAY:
        dp_option_list(st, "way", arg, dp_cuda_way_names, DP_NCUDA_WAYS, (int *)o->way, &o->nway);
        break;
    case OPT_BITS: o->bits = (int)dp_option_number(st, "bits", arg, 64, 4096); break;
    case OPT_TRUTH:
        o->truth =
            (dp_truth_pick)dp_option_name(st, "truth", arg, dp_truth_pick_names, DP_NTRUTH_PICKS);
        o->has_truth = 1;
        break;
    case OPT_OUT: o->out_dir = arg; break;
    case OPT_JSON: o->json = arg; break;
    case OPT_ID: o->id = arg; break;
    case OPT_ALL: o->all = 1; break;
    case OPT_SMOKE: o->smoke = 1; break;
    case OPT_KEYS: o->keys = 1; break;
    case OPT_FAULTS: o->faults = 1; break;
    case OPT_INPUTS: o->judge.inputs = arg; break;
    case OPT_OUTPUTS: o->judge.outputs = arg; break;
    case OPT_CLAIM: o->judge.claim = arg; break;
    case OPT_GATE: o->judge.gate = arg; break;
    case OPT_LOWER_BOUND: o->judge.lower_bound = arg; break;
    case OPT_BETA: o->judge.beta = arg; break;
    case OPT_L2NORM: o->judge.l2norm = arg; break;
    case OPT_SCALE: o->judge.scale = arg; break;
    case OPT_CU_SEQLENS: o->judge.cu_seqlens = arg; break;
    case OPT_STATE_LAYOUT: o->judge.state_layout = arg; break;
    case OPT_DESIGN: o->judge.design = arg; break;
    case OPT_TOKENS: o->judge.tokens = dp_option_number(st, "tokens", arg, 1, 1 << 24); break;
    case 'o': o->output = arg; break;
    case 'v': o->verbose = 1; break;
    default: return dp_option(key, arg, st, &o->of);
    }
    return 0;
}

#define ROW_TRUTH                                                                                  \
    {                                                                                              \
        "truth", OPT_TRUTH, "KIND", 0,                                                             \
            "arithmetic of the truth: mpfr; dd: double-double, audited by MPFR; auto: MPFR where " \
            "that is cheap (default: the case's)",                                                 \
            0                                                                                      \
    }
#define ROW_OUT \
    { "out", OPT_OUT, "DIR", 0, "write results.json, junit.xml and report.html there", 0 }
#define ROW_JSON \
    { "json", OPT_JSON, "FILE", 0, "write the record there; - for standard output", 0 }
#define ROW_DESIGN                                                                       \
    {                                                                                    \
        "design", OPT_DESIGN, "WORDS", 0,                                                \
            "how the kernel computes, where it is not the default of its base "          \
            "(ref/vocabulary/design.h): recurrent, chunk=N, factors=F, state=F, out=F, " \
            "scores=gated, inverse=product",                                             \
            0                                                                            \
    }
static const struct argp_option RUN_OPTIONS[] = {
    DP_ROW_CASES,
    {"all", OPT_ALL, 0, 0, "run every case", 0},
    {"smoke", OPT_SMOKE, 0, 0, "run the smoke cases", 0},
    {"id", OPT_ID, "ID", 0, "reproduce one run of a record, bit for bit", 0},
    {"ranks", DP_OPT_RANKS, "LIST", 0, "only these rank counts, e.g. 1,2,4", 0},
    {"chain", DP_OPT_CHAIN, "LIST", 0,
     "only these formats of the M chain: fp64 fp32 tf32x3 tf32 tf32rz bf16 bf16st", 0},
    {"base", DP_OPT_BASE, "LIST", 0, "only these base policies: fp64 fp32 bf16", 0},
    {"merge", DP_OPT_MERGE, "LIST", 0, "only these merge orders: allgather ring", 0},
    {"backend", DP_OPT_BACKEND, "LIST", 0,
     "sim: simulated ranks; lapack: the same over CBLAS and LAPACKE, in bases fp64 and fp32; cuda: "
     "the CUDA kernels, ranks sharing one device; nccl: one device a rank, or processes that share "
     "the devices there are (default: sim, lapack, and cuda where it can run)",
     0},
    {"subject", DP_OPT_SUBJECT, "LIB", 0,
     "judge a kernel in a shared library (harness/deltaproof_subject.h) instead of the simulated "
     "ranks; beside them with --backend sim",
     0},
    ROW_DESIGN,
    DP_ROW_LIMIT,
    DP_ROW_MEMORY,
    {"way", OPT_WAY, "LIST", 0,
     "how the CUDA kernels make gradients: plain, dh-only (M of the forward reused), pair-dg (dg "
     "without cancellation), save-all (nothing recomputed), segments (M as benchmarked: by the "
     "state pass, a rank's sequence cut in parts), segments-dh-only, windows and windows-dh-only "
     "(the same, ranks storing states into each other's memory)",
     0},
    DP_ROW_FAULT,
    ROW_OUT,
    ROW_JSON,
    ROW_TRUTH,
    DP_ROW_CACHE,
    {"verbose", 'v', 0, 0, "print every run", 0},
    {0}};
static const struct argp_option LIST_OPTIONS[] = {
    DP_ROW_CASES,
    {"keys", OPT_KEYS, 0, 0, "print the keys of a case file", 0},
    {"faults", OPT_FAULTS, 0, 0, "print the deliberate faults", 0},
    {0}};
static const struct argp_option INPUTS_OPTIONS[] = {
    DP_ROW_CASES, {"output", 'o', "FILE", 0, "safetensors file to write", 0}, {0}};
static const struct argp_option TRUTH_OPTIONS[] = {
    DP_ROW_CASES,
    {"output", 'o', "FILE", 0, "safetensors file to write", 0},
    {"bits", OPT_BITS, "N", 0, "MPFR precision (default: the case's)", 0},
    ROW_TRUTH,
    DP_ROW_CACHE,
    {0}};
static const struct argp_option JUDGE_OPTIONS[] = {
    {"inputs", OPT_INPUTS, "IN", 0,
     "safetensors file: q k v g beta, and where there are any A_log dt_bias initial_state do dht "
     "cu_seqlens",
     0},
    {"outputs", OPT_OUTPUTS, "OUT", 0,
     "safetensors file: any of o final_state dq dk dv dg dbeta dA_log ddt_bias ds0, and stages: "
     "gcum Akk Aqk w u kg qg M H S_in h v_new dv_local dS_out dM dH dh dv_new",
     0},
    {"ranks", DP_OPT_RANKS, "N", 0,
     "ranks that computed OUT (default: metadata `ranks` of OUT, else 1)", 0},
    {"base", DP_OPT_BASE, "NAME", 0,
     "formats that the kernel claims for everything but the M chain: fp64 fp32 bf16", 0},
    {"claim", OPT_CLAIM, "FORMAT", 0,
     "format that it claims for the M chain: fp32 tf32x3 tf32 tf32rz bf16 bf16st; needed from 3 "
     "ranks on",
     0},
    ROW_DESIGN,
    {"gate", OPT_GATE, "FORM", 0,
     "log: g is the log decay; softplus: -exp(A_log) softplus(g + dt_bias); lower_bound: X "
     "sigmoid(exp(A_log) (g + dt_bias))",
     0},
    {"lower-bound", OPT_LOWER_BOUND, "X", 0, "of gate lower_bound", 0},
    {"beta", OPT_BETA, "FORM", 0, "plain; sigmoid: sigmoid(beta); sigmoid2: 2 sigmoid(beta)", 0},
    {"l2norm", OPT_L2NORM, "0|1", 0, "1: the kernel normalises q and k itself", 0},
    {"scale", OPT_SCALE, "X", 0, "factor of q in the output (default: K^-1/2)", 0},
    {"cu-seqlens", OPT_CU_SEQLENS, "LIST", 0,
     "where packed sequences begin, then T (default: tensor or metadata of IN, else one sequence)",
     0},
    {"state-layout", OPT_STATE_LAYOUT, "kv|vk", 0,
     "last axes of states in both files (default: metadata, else kv)", 0},
    {"tokens", OPT_TOKENS, "T", 0, "judge OUT as the result of the first T tokens of IN", 0},
    ROW_OUT,
    ROW_JSON,
    ROW_TRUTH,
    DP_ROW_CACHE,
    {0}};
static const struct argp_option NO_OPTIONS[] = {{0}};

/* ---- cases ----------------------------------------------------------------------------------- */

/* The command line, as a shell takes it. */
static char *command_line(int argc, char *const *argv) {
    size_t size = 16;
    for (int i = 1; i < argc; i++)
        size += 4 * strlen(argv[i]) + 3;
    char *text = dp_calloc(size, 1), *at = text + sprintf(text, "deltaproof");
    for (int i = 1; i < argc; i++) {
        const int plain =
            *argv[i] &&
            !argv[i][strspn(
                argv[i],
                "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789_./:=,+-@%")];
        at += sprintf(at, plain ? " " : " '");
        for (const char *c = argv[i]; *c; c++)
            at += *c == '\'' ? sprintf(at, "'\\''") : sprintf(at, "%c", *c);
        if (!plain) at += sprintf(at, "'");
    }
    return text;
}

static int refuse(const dp_err *e) {
    fprintf(stderr, "deltaproof: %s\n", e->msg);
    return 2;
}

/* ---- run ------------------------------------------------------------------------------------- */

static void print_run(const dp_run *r, FILE *f) {
    double top = -1;
    const dp_judgement *worst = NULL;
    for (int i = 0; i < r->ntensor; i++)
        if (r->tensor[i].ratio > top) {
            top = r->tensor[i].ratio;
            worst = &r->tensor[i];
        }

    const dp_judgement *o = r->ntensor ? &r->tensor[0] : NULL;
    fprintf(f, "%-8s %s", dp_verdict_names[r->verdict], r->id);
    if (o) fprintf(f, "  %s %.3g", o->name, o->rel_fro);
    if (worst) fprintf(f, "  closest to its bound: %s at %.2g", worst->name, worst->ratio);
    if (r->why[0]) fprintf(f, "  (%s)", r->why);
    if (r->fault && r->hit && !memchr(r->hit, 1, (size_t)r->nhit))
        fprintf(f, "  (the fault acts nowhere here)");
    fputc('\n', f);
}

/* What is counted of a case while it runs. */
typedef struct tally {
    const options *o;
    const char *case_name;
    int n[DP_NVERDICTS], runs;
    struct tally *next; /* of those that run beside it */
} tally;

/* What a signal that ends the program finds finished. Whoever prints of a run holds its lock. */
static struct {
    pthread_mutex_t lock;
    tally *running;
    int n[DP_NVERDICTS]; /* runs of all cases so far */
    const char *loading; /* the case that is read or made; NULL: none */
    int read, cases;     /* cases that were read before it, of those asked for */
} done_so_far = {.lock = PTHREAD_MUTEX_INITIALIZER};

static void say_done(void *file) {
    const int *n = done_so_far.n;
    pthread_mutex_lock(&done_so_far.lock);
    if (done_so_far.loading)
        fprintf(file, "%s: interrupted while the case was loaded: %d of %d loaded, none run\n",
                done_so_far.loading, done_so_far.read, done_so_far.cases);
    for (const tally *t = done_so_far.running; t; t = t->next)
        fprintf(file, "%-24s interrupted after %d runs\n", t->case_name, t->runs);
    fprintf(file, "VERDICT: INTERRUPTED (%d passed, %d failed, %d skipped, %d unjudged so far)\n",
            n[DP_PASS], n[DP_FAIL], n[DP_SKIPPED], n[DP_UNJUDGED]);
    fflush(file);
    pthread_mutex_unlock(&done_so_far.lock);
}

/* After `read` of `cases` the case at this path is loaded; NULL: none any more. */
static void begin_loading(const char *path, int read, int cases) {
    pthread_mutex_lock(&done_so_far.lock);
    done_so_far.loading = path;
    done_so_far.read = read;
    done_so_far.cases = cases;
    pthread_mutex_unlock(&done_so_far.lock);
}

static void begin_case(tally *t) {
    pthread_mutex_lock(&done_so_far.lock);
    t->next = done_so_far.running;
    done_so_far.running = t;
    pthread_mutex_unlock(&done_so_far.lock);
}

static void end_case(tally *t) {
    pthread_mutex_lock(&done_so_far.lock);
    for (tally **p = &done_so_far.running; *p; p = &(*p)->next)
        if (*p == t) {
            *p = t->next;
            break;
        }
    pthread_mutex_unlock(&done_so_far.lock);
}

static void on_run(const dp_run *r, void *arg) {
    tally *t = arg;
    t->n[r->verdict]++;
    pthread_mutex_lock(&done_so_far.lock);
    t->runs++;
    done_so_far.n[r->verdict]++;
    if (t->o->verbose || r->verdict == DP_FAIL)
        print_run(r, t->o->json && !strcmp(t->o->json, "-") ? stderr : stdout);
    pthread_mutex_unlock(&done_so_far.lock);
}

static int report(const char *folder) {
    const char *py = dp_python(), *own = getenv("DP_REPORT"),
               *script = own && *own ? own : dp_home("reports/report.py");
    char *dir = realpath(folder, NULL);
    if (!dir) {
        fprintf(stderr, "deltaproof: %s: %s\n", folder, strerror(errno));
        return 2;
    }

    fflush(stdout);
    const pid_t pid = fork();
    if (pid == 0) {
        prctl(PR_SET_PDEATHSIG, SIGTERM);
        execlp(py, py, DP_PYTHON_ISOLATED, script, dir, (char *)NULL);
        fprintf(stderr, "deltaproof: cannot start %s: %s\n", py, strerror(errno));
        _exit(2);
    }
    int st = 0;
    free(dir);
    if (pid < 0 || waitpid(pid, &st, 0) < 0) return 2;
    return WIFEXITED(st) ? WEXITSTATUS(st) : 2;
}

/* NAME:key=value,... -> the case's name and the selection. */
static char *parse_id(options *o, dp_err *e) {
    char *name = strdup(o->id), *rest = strrchr(name, ':'),
         *save; /* a name may have one, a key never */
    o->of.backend[0] = DP_BACKEND_SIM;
    o->of.nbackend = 1;
    if (!strncmp(o->id, "judge:", 6)) {
        dp_fail(e, DP_EINPUT,
                "--id %s: tensors of another program are judged again by `deltaproof judge`",
                o->id);
        return name;
    }
    if (!rest) {
        dp_fail(e, DP_EINPUT, "--id %s: must read NAME:key=value,...", o->id);
        return name;
    }
    *rest++ = 0;
    for (char *t = strtok_r(rest, ",", &save); t; t = strtok_r(NULL, ",", &save)) {
        char *v = strchr(t, '=');
        if (v) *v++ = 0;
        int x = -1;
        if (v && !strcmp(t, "ranks") && (x = dp_find_ranks(v)) >= 0) {
            o->of.ranks[0] = x;
            o->of.nranks = 1;
        }

        else if (v && !strcmp(t, "base") && (x = dp_find_base(v)) >= 0) {
            o->of.base[0] = x;
            o->of.nbase = 1;
        }

        else if (v && !strcmp(t, "chain") && (x = dp_format_find(v)) >= 0) {
            o->of.chain[0] = x;
            o->of.nchain = 1;
        }

        else if (v && !strcmp(t, "merge") && (x = dp_find_merge(v)) >= 0) {
            o->of.merge[0] = x;
            o->of.nmerge = 1;
        }

        else if (v && !strcmp(t, "fault") && (x = dp_fault_find(v)) >= 0)
            o->of.fault = x;
        else if (v && !strcmp(t, "backend") && !strcmp(v, "subject") && o->of.subject) {
            o->of.backend[0] = DP_BACKEND_SUBJECT;
            o->of.nbackend = 1;
        }

        else if (v && !strcmp(t, "way") &&
                 (x = dp_find_name(v, dp_cuda_way_names, DP_NCUDA_WAYS)) >= 0) {
            o->way[0] = x;
            o->nway = 1;
        }

        else if (v && !strcmp(t, "backend") && (x = dp_find_backend(v)) >= 0) {
            o->of.backend[0] = x;
            o->of.nbackend = 1;
        }

        else
            dp_fail(e, DP_EINPUT, "--id %s: '%s%s%s' is not known", o->id, t, v ? "=" : "",
                    v ? v : "");
    }
    return name;
}

static int keep_case(const options *o, const dp_case *c) {
    return o->all || (o->smoke && c->smoke) || o->of.nname;
}

/* What a case offers, where the options left nothing of it. */
static int say_no_run(const dp_case *c) {
    pthread_mutex_lock(&done_so_far.lock);
    fprintf(stderr, "deltaproof: %s: offers no run with these options; it lists", c->path);
    for (int i = 0; i < c->nranks; i++)
        fprintf(stderr, "%s%d", i ? "," : " ranks = ", c->ranks[i]);
    for (int i = 0; i < c->nbase; i++)
        fprintf(stderr, "%s%s", i ? "," : "; base = ", dp_base_names[c->base[i]]);
    for (int i = 0; i < c->nchain; i++)
        fprintf(stderr, "%s%s", i ? "," : "; chain = ", dp_formats[c->chain[i]].name);
    for (int i = 0; i < c->nmerge; i++)
        fprintf(stderr, "%s%s", i ? "," : "; merge = ", dp_merge_names[c->merge[i]]);
    fputc('\n', stderr);
    pthread_mutex_unlock(&done_so_far.lock);
    return 2;
}

static void print_case(const options *o, const dp_case *c, const tally *t, double seconds) {
    FILE *table = o->json && !strcmp(o->json, "-")
                      ? stderr
                      : stdout; /* the record alone goes to standard output */
    pthread_mutex_lock(&done_so_far.lock);
    fprintf(table, "%-24s %3d passed, %d failed, %d skipped, %d unjudged  (%.1f s)\n", c->name,
            t->n[DP_PASS], t->n[DP_FAIL], t->n[DP_SKIPPED], t->n[DP_UNJUDGED], seconds);
    fflush(table);
    pthread_mutex_unlock(&done_so_far.lock);
}

static int run_one_case(const options *o, dp_case *c, dp_runs *runs) {
    dp_err e = {0};
    tally t = {.o = o, .case_name = c->name};
    const double t0 = dp_now();
    const dp_run_options ro = {.nranks = o->of.nranks,
                               .ranks = o->of.ranks,
                               .nbase = o->of.nbase,
                               .base = o->of.base,
                               .nchain = o->of.nchain,
                               .chain = o->of.chain,
                               .nmerge = o->of.nmerge,
                               .merge = o->of.merge,
                               .nbackend = o->of.nbackend,
                               .backend = o->of.backend,
                               .nway = o->nway,
                               .way = o->way,
                               .fault = o->of.fault,
                               .subject = o->of.subject ? &o->subject : NULL,
                               .design = o->judge.design,
                               .limit_s = o->of.limit_s,
                               .cache = o->of.cache,
                               .truth = o->has_truth ? &o->truth : NULL,
                               .progress = isatty(2),
                               .done = on_run,
                               .arg = &t};
    for (int i = 0; i < c->nwarn; i++)
        fprintf(stderr, "deltaproof: warning: %s\n", c->warn[i]);
    if (o->of.fault && !dp_fault_concerns(o->of.fault, c->op))
        fprintf(stderr, "deltaproof: warning: %s: the fault %s cannot show in op = %s\n", c->path,
                dp_faults[o->of.fault].name, c->op_name);
    const int before = runs->n;
    begin_case(&t);
    const dp_status st = dp_case_run(c, &ro, runs, &e);
    end_case(&t);
    if (st) return refuse(&e);
    if (runs->n == before && !o->all && !o->smoke) return say_no_run(c);
    print_case(o, c, &t, dp_now() - t0);
    return 0;
}

/* ---- all cases ------------------------------------------------------------------------------- */

/* How long a case takes, in units of its own: what states cost, once for every run. */
static double cost_of(const dp_case *c) {
    const dp_problem *p = &c->p;
    const double state = (double)p->T * p->HV * p->R * p->R * (p->K + p->V + 64.) * (p->K + 64.);
    return state * c->nranks * c->nbase * (1 + c->nchain);
}

typedef struct {
    dp_case *c;
    dp_runs runs;
    int error;
} job;

static int by_cost(const void *a, const void *b) {
    const double x = cost_of((*(job *const *)a)->c), y = cost_of((*(job *const *)b)->c);
    return (x < y) - (x > y);
}

/* Simulated ranks alone run many cases side by side; devices and foreign code are asked one thing
 * at a time. */
static int side_by_side(const options *o) {
    int foreign = o->of.subject != NULL;
    for (int i = 0; i < o->of.nbackend; i++)
        foreign |= o->of.backend[i] != DP_BACKEND_SIM && o->of.backend[i] != DP_BACKEND_LAPACK;
    if (foreign || (!o->of.nbackend && !dp_cuda_unavailable(DP_BACKEND_CUDA, 1))) return 1;
    return (int)ceil(sqrt(omp_get_max_threads())); /* the other threads work inside each case */
}

/* The longest case first; runs keep the order of cases. Returns how many cases could not be judged.
 */
static int run_cases(const options *o, int n, dp_case *const *cases, dp_runs *runs) {
    job *jobs = dp_calloc((size_t)n + 1, sizeof *jobs),
        **order = dp_calloc((size_t)n + 1, sizeof *order);
    const int outer = side_by_side(o), inner = omp_get_max_threads() / outer;
    int errors = 0;
    for (int i = 0; i < n; i++) {
        jobs[i].c = cases[i];
        order[i] = &jobs[i];
    }
    if (outer > 1) qsort(order, (size_t)n, sizeof *order, by_cost);
#pragma omp parallel num_threads(outer)
    {
        omp_set_num_threads(inner > 0 ? inner : 1);
#pragma omp for schedule(dynamic, 1)
        for (int i = 0; i < n; i++)
            order[i]->error = run_one_case(o, order[i]->c, &order[i]->runs);
    }
    for (int i = 0; i < n; i++) {
        errors += jobs[i].error != 0;
        dp_runs_move(runs, &jobs[i].runs);
    }
    free(jobs);
    free(order);
    return errors;
}

/* ---- what a run writes ----------------------------------------------------------------------- */

static char *in_folder(const char *dir, const char *name) {
    char *path;
    if (asprintf(&path, "%s/%s", dir, name) < 0) abort();
    return path;
}

/* Can everything that the run will write be written? Asked before it. */
static int check_outputs(const options *o) {
    static const char *const files[] = {"results.json", "junit.xml", "report.html",
                                        "figures/any.png"};
    dp_err e = {0};
    if (dp_output_check(o->json, &e)) return refuse(&e);
    if (!o->out_dir) return 0;
    char *figures = in_folder(o->out_dir, "figures");
    if (dp_make_dirs(o->out_dir))
        dp_fail(&e, DP_EIO, "--out %s: %s", o->out_dir, strerror(errno));
    else if (dp_make_dirs(figures))
        dp_fail(&e, DP_EIO, "--out %s: %s: %s", o->out_dir, figures, strerror(errno));
    free(figures);
    for (size_t i = 0; i < sizeof files / sizeof *files && !e.code; i++) {
        char *path = in_folder(o->out_dir, files[i]);
        dp_output_check(path, &e);
        free(path);
    }
    return e.code ? refuse(&e) : 0;
}

static int finish(const options *o, const dp_record *rec) {
    dp_err e = {0};
    int n[DP_NVERDICTS], rc = 0;
    FILE *table = o->json && !strcmp(o->json, "-") ? stderr : stdout;
    if (o->json && dp_record_write_json(rec, o->json, &e)) rc = refuse(&e);
    if (o->out_dir) {
        char *json = in_folder(o->out_dir, "results.json"),
             *junit = in_folder(o->out_dir, "junit.xml");
        if (!rc && dp_record_write_json(rec, json, &e)) rc = refuse(&e);
        if (!rc && dp_record_write_junit(rec, junit, &e)) rc = refuse(&e);
        free(json);
        free(junit);
        if (!rc && report(o->out_dir)) {
            rc = 2;
            fprintf(stderr,
                    "deltaproof: %s/report.html could not be made; the record is complete\n",
                    o->out_dir);
        }

        if (!rc) printf("report: %s/report.html\n", o->out_dir);
    }
    dp_record_totals(rec, n);
    const dp_digest d = dp_digest_of(rec->runs);
    if (d.runs) fprintf(table, "digest: %s (%d runs of simulated ranks)\n", d.hex, d.runs);
    const char *v = dp_record_verdict(rec);
    fprintf(table, "VERDICT: %s (%d passed, %d failed, %d skipped, %d unjudged)\n",
            !strcmp(v, "pass")   ? "PASS"
            : !strcmp(v, "fail") ? "FAIL"
                                 : "COULD NOT JUDGE",
            n[DP_PASS], n[DP_FAIL], n[DP_SKIPPED], n[DP_UNJUDGED]);
    if (n[DP_FAIL]) return 1;
    return rc || rec->errors || !strcmp(v, "error") ? 2 : 0;
}

/* NULL: not wanted, or, counted in *errors, it cannot be loaded. */
static dp_case *load_case(const options *o, const char *path, int *errors) {
    dp_case *c = dp_calloc(1, sizeof *c);
    dp_err e = {0};
    int skip = 0;
    if (o->smoke && !dp_case_open(path, 0, c, &e)) {
        skip = !keep_case(o, c);
        dp_case_free(c);
    }
    if (!skip && !e.code && !dp_case_load(path, c, &e)) return c;
    if (e.code) {
        ++*errors;
        refuse(&e);
    }
    free(c);
    return NULL;
}

static int command_run(options *o) {
    dp_err e = {0};
    if (check_outputs(o)) return 2;
    char **paths = NULL, *id_case = NULL;
    int np = 0;
    const double t0 = dp_now();
    if (!o->all && !o->smoke && !o->of.nname && !o->id) {
        fprintf(stderr, "deltaproof: run: name a case, or --all, --smoke or --id ID\n");
        return 2;
    }
    if (o->id) {
        id_case = parse_id(o, &e);
        if (e.code) {
            free(id_case);
            return refuse(&e);
        }
        o->of.name[0] = id_case;
        o->of.nname = 1;
    }
    for (int i = 0; i < o->of.nbackend; i++)
        if (o->of.backend[i] == DP_BACKEND_NCCL) dp_procs_start();
    dp_on_interrupt(say_done, o->json && !strcmp(o->json, "-") ? stderr : stdout);
    if (o->of.subject) {
        if (o->of.fault) {
            fprintf(stderr,
                    "deltaproof: --fault goes with the simulated ranks, not with --subject\n");
            return 2;
        }

        if (dp_subject_open(o->of.subject, o->of.limit_s, o->of.memory, &o->subject, &e))
            return refuse(&e);
        if (!o->of.nbackend) {
            o->of.backend[0] = DP_BACKEND_SUBJECT;
            o->of.nbackend = 1;
        }
    }
    if (o->of.nname) {
        paths = dp_calloc((size_t)o->of.nname, sizeof *paths);
        for (; np < o->of.nname; np++)
            paths[np] = dp_case_path(o->of.cases_dir, o->of.name[np]);
        o->verbose = 1;
    } else if (dp_case_find_all(o->of.cases_dir, &paths, &np, &e))
        return refuse(&e);

    dp_runs runs = {0};
    dp_case **cases = dp_calloc((size_t)np, sizeof *cases);
    dp_record rec = {.runs = &runs, .cases = cases, .command = o->command};
    for (int i = 0; i < np; i++) {
        begin_loading(paths[i], i, np);
        dp_case *c = load_case(o, paths[i], &rec.errors);
        if (c) cases[rec.ncase++] = c;
    }
    begin_loading(NULL, np, np);
    rec.errors += run_cases(o, rec.ncase, cases, &runs);
    rec.seconds = dp_now() - t0;
    const int rc = finish(o, &rec);
    for (int i = 0; i < rec.ncase; i++) {
        dp_case_free(cases[i]);
        free(cases[i]);
    }

    for (int i = 0; i < np; i++)
        free(paths[i]);
    free(paths);
    free(cases);
    free(id_case);
    dp_runs_free(&runs);
    dp_subject_close(&o->subject);
    return rc;
}

/* ---- judge ----------------------------------------------------------------------------------- */

static void print_tensor(const dp_judgement *t, FILE *f) {
    fprintf(f, "%-8s %-11s %.3e", dp_verdict_names[t->verdict], t->name, t->rel_fro);
    if (!isnan(t->bound)) fprintf(f, "  %.2g of its bound", t->ratio);
    if (!isnan(t->expected.excess))
        fprintf(f, ", %.2f times expected", t->expected.at[DP_LEVEL_TENSOR].ratio);
    if (t->N > 1) {
        fprintf(f, "  ranks");
        for (int r = 0; r < t->N; r++)
            isnan(t->per_rank[r]) ? fprintf(f, " -") : fprintf(f, " %.2e", t->per_rank[r]);
    }
    const dp_row *r = dp_judgement_row(t);
    if (r->at.rank >= 0) {
        fprintf(f, "  %s: rank %d, head %d", r == &t->worst ? "worst" : "wrong", r->at.rank,
                r->at.head);
        if (r->at.sequence >= 0) fprintf(f, ", sequence %d", r->at.sequence);
        if (r->at.token >= 0) fprintf(f, ", token %lld", (long long)r->at.token);
        fprintf(f, ", entry %d: %.9g, truth %.9g; row |error| %.2g, |truth| %.2g", r->index, r->got,
                r->want, r->err, r->size);
    }
    if (t->why[0]) fprintf(f, "  (%s)", t->why);
    fputc('\n', f);
}

static int check_judge_usage(options *o) {
    const char *what = !o->judge.inputs    ? "give --inputs IN.safetensors"
                       : !o->judge.outputs ? "give --outputs OUT.safetensors"
                                           : NULL;
    if (what) {
        fprintf(stderr, "deltaproof: judge: %s\n", what);
        return 2;
    }

    return check_outputs(o);
}

static int command_judge(options *o) {
    dp_err e = {0};
    dp_runs runs = {0};
    dp_case c, *cases[1] = {&c};
    dp_record rec = {.runs = &runs, .cases = cases, .command = o->command};
    FILE *table = o->json && !strcmp(o->json, "-") ? stderr : stdout;
    const double t0 = dp_now();
    if (check_judge_usage(o)) return 2;
    o->judge.ranks = o->of.nranks ? o->of.ranks[0] : 0;
    o->judge.base = o->of.nbase ? dp_base_names[o->of.base[0]] : NULL;
    o->judge.cache = o->of.cache;
    o->judge.truth = o->has_truth ? &o->truth : NULL;
    o->judge.progress = isatty(2);
    if (dp_judge(&o->judge, &c, &runs, &e)) {
        rec.errors++;
        refuse(&e);
    }

    else {
        rec.ncase = 1;
        for (int i = 0; i < c.nwarn; i++)
            fprintf(stderr, "deltaproof: warning: %s\n", c.warn[i]);
        for (int i = 0; i < runs.run[0].ntensor; i++)
            print_tensor(&runs.run[0].tensor[i], table);
        print_run(&runs.run[0], table);
        if (runs.run[0].bits.npoint) fprintf(table, "bits: %s\n", runs.run[0].bits.says);
    }
    rec.seconds = dp_now() - t0;
    const int rc = finish(o, &rec);
    if (rec.ncase) dp_case_free(&c);
    dp_runs_free(&runs);
    return rc;
}

/* ---- list, truth, report --------------------------------------------------------------------- */

static int command_list(options *o) {
    dp_err e = {0};
    char **paths;
    int n, rc = 0;
    if (o->keys) {
        dp_case_print_keys(stdout);
        return 0;
    }
    if (o->faults) {
        for (int i = 1; i < DP_NFAULTS; i++)
            printf("%-20s %-16s %s [%s]\n", dp_faults[i].name, dp_faults[i].stage,
                   dp_faults[i].what, dp_faults[i].source);
        return 0;
    }
    if (dp_case_find_all(o->of.cases_dir, &paths, &n, &e)) return refuse(&e);
    for (int i = 0; i < n; i++) {
        dp_case c;
        dp_err ce = {0};
        if (dp_case_open(paths[i], 0, &c, &ce))
            rc = refuse(&ce);
        else {
            printf("%-24s %-6s %s\n", c.name, c.op_name, c.reason);
            dp_case_free(&c);
        }

        free(paths[i]);
    }
    free(paths);
    return rc;
}

static void add_ball(dp_tensorfile *f, const char *name, const dp_ball *b) {
    char n[64];
    const int64_t shape[2] = {b->rows, b->width};
    if (!b->rows) return;
    dp_tensorfile_add(f, name, "F64", 2, shape, b->hi);
    snprintf(n, sizeof n, "%s.lo", name);
    dp_tensorfile_add(f, n, "F64", 2, shape, b->lo);
    snprintf(n, sizeof n, "%s.radius", name);
    dp_tensorfile_add(f, n, "F64", 1, shape, b->rad);
}

static dp_status write_truth(const options *o, const dp_case *c, dp_err *e) {
    dp_truth t;
    dp_tensorfile f = {0};
    dp_truth_note note;
    int ncut;
    char bits[16];
    int64_t *cut = dp_case_cuts(c, &ncut);
    const dp_truth_request rq = {.bits = o->bits ? o->bits : c->bits,
                                 .backward = c->backward,
                                 .ncut = ncut,
                                 .cut = cut,
                                 .want_M = ncut > 0,
                                 .progress = isatty(2)};
    dp_status st =
        dp_case_truth(c, rq, o->has_truth ? o->truth : c->truth, o->of.cache, &t, &note, e);
    free(cut);
    if (st) return st;
    printf("truth: %s, %d bits%s%s", dp_truth_kind_names[t.kind], t.bits,
           note.device   ? ", on "
           : note.cached ? ", from the cache"
                         : "",
           note.device ? note.device : "");
    if (note.audit.columns)
        printf("; audited by MPFR: %d columns, %lld tokens, largest difference %.2g of both radii",
               note.audit.columns, (long long)note.audit.tokens, note.audit.worst);
    printf("\n");
    for (int i = 0; i < DP_NRESULTS; i++)
        add_ball(&f, dp_result_fields[i].name, &t.field[i]);
    snprintf(bits, sizeof bits, "%d", t.bits);
    dp_tensorfile_add_meta(&f, "producer", argp_program_version);
    dp_tensorfile_add_meta(&f, "case", c->name);
    dp_tensorfile_add_meta(&f, "truth", dp_truth_kind_names[t.kind]);
    dp_tensorfile_add_meta(&f, "bits", bits);
    dp_tensorfile_add_meta(&f, "value",
                           "name + name.lo, within name.radius in the 2-norm of each row");
    st = dp_safetensors_write(o->output, &f, e);
    dp_tensorfile_free(&f);
    dp_truth_free(&t);
    return st;
}

/* What a chain of M multiplies, for a kernel that does so elsewhere. */
static dp_status write_factors(const options *o, const dp_case *c, dp_err *e) {
    const int64_t shape[3] = {c->ch.n, c->ch.K, c->ch.K}, n = shape[0] * shape[1] * shape[2];
    dp_tensorfile f = {0};
    float *m = dp_calloc((size_t)n, sizeof *m);
    double *x = dp_doubles(n), *mu = dp_doubles(c->ch.n);
    dp_inputs_chain(c->ch.regime, c->ch.n, c->ch.K, c->spec.seed, m, mu);
    for (int64_t i = 0; i < n; i++)
        x[i] = m[i];
    dp_tensorfile_add(&f, "factors", "F32", 3, shape, x);
    dp_tensorfile_add_meta(&f, "case", c->name);
    const dp_status st = dp_safetensors_write(o->output, &f, e);
    dp_tensorfile_free(&f);
    free(m);
    free(x);
    free(mu);
    return st;
}

static int command_truth(options *o) {
    dp_err e = {0};
    dp_case c;
    if (o->of.nname != 1 || !o->output) {
        fprintf(stderr,
                "deltaproof: truth: name one case and an output file (-o FILE.safetensors)\n");
        return 2;
    }
    if (dp_output_check(o->output, &e)) return refuse(&e);
    char *path = dp_case_path(o->of.cases_dir, o->of.name[0]);
    dp_status st = dp_case_load(path, &c, &e);
    if (st) {
        free(path);
        return refuse(&e);
    }
    if (c.op == DP_OP_CHAIN)
        st = write_factors(o, &c, &e);
    else if (c.op != DP_OP_RECURRENCE)
        st = dp_fail(&e, DP_EINPUT, "truth: %s: op = %s has no recurrence", path, c.op_name);
    else
        st = write_truth(o, &c, &e);
    dp_case_free(&c);
    free(path);
    return st ? refuse(&e) : 0;
}

static int command_inputs(options *o) {
    dp_err e = {0};
    dp_case c;
    if (o->output && dp_output_check(o->output, &e)) return refuse(&e);
    if (o->of.nname != 1 || !o->output) {
        fprintf(stderr,
                "deltaproof: inputs: name one case and an output file (-o FILE.safetensors)\n");
        return 2;
    }

    char *path = dp_case_path(o->of.cases_dir, o->of.name[0]);
    if (!dp_case_load(path, &c, &e)) {
        if (c.op == DP_OP_CHAIN)
            write_factors(o, &c, &e);
        else if (c.op != DP_OP_RECURRENCE)
            dp_fail(&e, DP_EINPUT, "inputs: %s: op = %s has no recurrence", path, c.op_name);
        else
            dp_judge_write_inputs(&c, o->output, &e);
        dp_case_free(&c);
    }
    free(path);
    return e.code ? refuse(&e) : 0;
}

static int command_report(options *o) {
    if (o->of.nname != 1) {
        fprintf(stderr, "deltaproof: report: name the folder of one record\n");
        return 2;
    }
    const int rc = report(o->of.name[0]);
    if (!rc) printf("report: %s/report.html\n", o->of.name[0]);
    return rc ? 2 : 0;
}

/* ---- main ------------------------------------------------------------------------------------ */

static const struct {
    const char *name;
    int (*run)(options *);
    int one, most;
    const struct argp_option *opt;
    const char *args, *doc;
} COMMANDS[] = {
    {"list", command_list, 0, 0, LIST_OPTIONS, "",
     "List the cases with their reasons.\vExit status 2 when a case file is refused."},
    {"run", command_run, 0, 256, RUN_OPTIONS, "[CASE...]",
     "Run cases on simulated ranks and judge them against the truth.\vExit status 0 pass, 1 a "
     "verdict failed, 2 could not judge."},
    {"judge", command_judge, 1, 0, JUDGE_OPTIONS, "--inputs IN --outputs OUT",
     "Judge tensors that another program computed; both files in safetensors, FLA's layouts.\v"
     "Settings that no option gives come from the files' metadata. Exit status 0 pass, 1 a verdict "
     "failed, 2 could not judge."},
    {"inputs", command_inputs, 1, 1, INPUTS_OPTIONS, "CASE -o FILE",
     "Write the inputs of a case as `judge --inputs` reads them, for a program that computes "
     "elsewhere. Op chain: its factors, fp32."},
    {"truth", command_truth, 1, 1, TRUTH_OPTIONS, "CASE -o FILE",
     "Write the truth of a case: every tensor as NAME (fp64), NAME.lo and NAME.radius. Op chain: "
     "its factors, fp32."},
    {"report", command_report, 1, 1, NO_OPTIONS, "DIR",
     "Make DIR/report.html and figures from DIR/results.json."},
};

/* Commands that parse their own options, argv[0] being their name. */
static const struct {
    const char *name;
    int (*run)(int argc, char **argv);
} OWN[] = {
    {"museum", dp_cmd_museum}, {"bisect", dp_cmd_bisect},   {"shrink", dp_cmd_shrink},
    {"check", dp_cmd_check},   {"compare", dp_cmd_compare},
};

static int usage(FILE *f, int rc) {
    fprintf(f,
            "Usage: deltaproof COMMAND [OPTION...]\n\n"
            "Proves delta-rule linear-attention kernels under context parallelism: truth in MPFR, "
            "derived bounds, verdicts.\n\n"
            "  list     the cases, the keys of a case file, the deliberate faults\n  run      run "
            "cases and judge them\n"
            "  judge    judge tensors that another program computed\n"
            "  check    check what must hold between runs, without a truth\n"
            "  museum   switch every deliberate fault on and see which verdict goes red\n"
            "  bisect   find the stage that is wrong, or the stages that need a wider format\n"
            "  shrink   the smallest input that still fails for the same reason\n"
            "  compare  what moved between two records\n"
            "  inputs   write the inputs of a case as safetensors\n"
            "  truth    write the MPFR truth of a case as safetensors\n  report   make the report "
            "of a record\n\n"
            "deltaproof COMMAND --help describes each; deltaproof --version prints the version.\n");
    return rc;
}

static int command_of(int argc, char **argv) {
    if (argc < 2) return usage(stderr, 2);
    if (!strcmp(argv[1], "--help") || !strcmp(argv[1], "-h")) return usage(stdout, 0);
    if (!strcmp(argv[1], "--version") || !strcmp(argv[1], "-V"))
        return printf("%s\n", argp_program_version) < 0;
    char name[32], *const command = argv[1], *line = command_line(argc, argv);
    snprintf(name, sizeof name, "deltaproof %.20s", command);
    argv[1] = name; /* what messages begin with */
    for (size_t i = 0; i < sizeof OWN / sizeof *OWN; i++)
        if (!strcmp(command, OWN[i].name)) {
            free(line);
            return OWN[i].run(argc - 1, argv + 1);
        }

    for (size_t i = 0; i < sizeof COMMANDS / sizeof *COMMANDS; i++) {
        if (strcmp(command, COMMANDS[i].name)) continue;
        options o = {.of = dp_options_new(COMMANDS[i].one, COMMANDS[i].most), .command = line};
        const struct argp a = {.options = COMMANDS[i].opt,
                               .parser = parse,
                               .args_doc = COMMANDS[i].args,
                               .doc = COMMANDS[i].doc};
        argp_parse(&a, argc - 1, argv + 1, 0, NULL, &o);
        const int rc = COMMANDS[i].run(&o);
        {
            free(line);
            return rc;
        }
    }
    free(line);
    fprintf(stderr, "deltaproof: '%s' is not a command\n", command);
    return usage(stderr, 2);
}

int main(int argc, char **argv) {
    if (dp_startup(argc, argv)) return dp_ending(2);
    dp_err e = {0};
    openblas_set_num_threads(1);        /* we call BLAS from our own threads */
    omp_set_max_active_levels(3);       /* cases, draws, chunks */
    mallopt(M_MMAP_THRESHOLD, 1 << 30); /* matrices come and go all the time: their pages stay */
    mallopt(M_TRIM_THRESHOLD, 1 << 30);
    if (dp_isa_choose(getenv("DP_ISA"), &e)) return dp_ending(refuse(&e));
    return dp_ending(command_of(argc, argv));
}
