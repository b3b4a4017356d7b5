/* The faults of gpu/fault.cuh, switched on one by one in the kernels on the CPU, and judged like a
 * device. Or in the kernels of a device. */
#include "gpu/fault.cuh"
#include "harness/run/blame.h"
#include "invariants.h"
#include "museum.h"
#include "ref/files/output.h"
#include "ref/vocabulary/text.h"

#include <errno.h>
#include <math.h>
#include <omp.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

#ifndef DP_COMMIT
#define DP_COMMIT "unknown"
#endif

/* Smallest first. Last come problems for faults that only packed sequences, several keys, grouped
 * heads or ranks with several parts can show. Faults of sent data have an exchange of their own. */
typedef struct {
    const char *name;
    int ranks, segments;
    dp_own own;
    dp_exchange exchange;
    dp_payload payload;
} problem;
#define ON(NAME, RANKS, ...) \
    { .name = NAME, .ranks = RANKS, ##__VA_ARGS__ }
#define ZIGZAG DP_OWN_ZIGZAG
static const problem FAST[] = {ON("strong-wide", 1), ON("strong-keys", 1), ON("gdn-wide", 1),
                               ON("mkda2-wide", 1), ON("mkda4-wide", 1), ON("k64-v128", 2),
                               ON("k128-v64", 3), ON("wide-values-gdn", 1),
                               ON("segments", 3, .segments = 1),
                               /* enough heads for plans without w and u (`gpu/fast/bare.cuh`) */
                               ON("many-heads-wide", 3, .segments = 1),
                               ON("many-heads-gdn", 3, .segments = 1)},
                     PROBLEM[] = {ON("smoke-kda", 1),
                                  ON("smoke-gdn", 1),
                                  ON("smoke-mkda2", 1),
                                  ON("smoke-kda", 2),
                                  ON("smoke-kda", 4),
                                  ON("exact-packed", 2),
                                  ON("exact-kda", 2, .own = ZIGZAG),
                                  ON("smoke-kda", 2, .own = ZIGZAG)},
                     SENT[] = {ON("smoke-kda", 4, .payload = DP_PAYLOAD_LESS_I),
                               ON("smoke-kda", 4, .exchange = DP_EXCHANGE_RING),
                               ON("smoke-kda", 4, .exchange = DP_EXCHANGE_SCAN),
                               ON("smoke-kda", 4, .exchange = DP_EXCHANGE_SERIAL),
                               ON("smoke-kda", 2, .own = ZIGZAG, .exchange = DP_EXCHANGE_RING),
                               ON("smoke-kda", 2, .own = ZIGZAG, .exchange = DP_EXCHANGE_SCAN),
                               ON("smoke-kda", 2, .exchange = DP_EXCHANGE_HEADS),
                               /* value heads of one query head on both ranks */
                               ON("initial-state", 2, .exchange = DP_EXCHANGE_HEADS)},
                     CONV[] = {ON("smoke-conv", 1), ON("smoke-conv", 3),
                               ON("smoke-conv", 2, .own = ZIGZAG)},
                     SLOTS[] = {ON("session-slots", 1)},
                     TOKENS[] = {ON("smoke-gdn2", 1), ON("smoke-dplr", 1),
                                 ON("smoke-deltaproduct", 1), ON("smoke-gla", 4)};
/* causality-chunk on one rank; results in fp32 and many heads show what bf16 rounds away */
static const char *const BITS[] = {"strong-wide",    "strong-keys", "k64-v128",
                                   "mkda2-wide",     "k64-fp32",    "exchange-heads-wide",
                                   "many-heads-wide"};
#define COUNT(a) ((int)(sizeof(a) / sizeof *(a)))

_Static_assert(DPG_NFAULTS <= DP_MOST_KERNEL_FAULTS, "a row for each fault of the kernels");

static int first_fault(void) { return dpg_faults_fast ? DPG_FIRST_FAST_FAULT : 1; }
static int end_fault(void) { return dpg_faults_fast ? DPG_NFAULTS : DPG_FIRST_FAST_FAULT; }
static int chosen(int f, const char *only) {
    return (!only || dp_is_listed(dpg_faults[f].name, only, ',')) &&
           strcmp(dpg_faults[f].shows, "-");
}
static dp_status all_known(const char *only, dp_err *e) {
    char name[64];
    while ((only = dp_next_name(only, name, sizeof name))) {
        int some = 0;
        for (int f = first_fault(); f < end_fault(); f++)
            some += chosen(f, name);
        if (!some)
            return dp_fail(e, DP_EINPUT, "--fault %s: the kernels have none of that name", name);
    }
    return DP_OK;
}
/* The kinds of problems for the kernels on the CPU. */
typedef enum { OF_RECURRENCE, OF_CONV, OF_SLOTS, OF_TOKENS, OF_SENT, KINDS } problem_kind;
static problem_kind kind_of(int f) {
    const char *shows = dpg_faults[f].shows;
    return dp_is_listed("pool", shows, ' ')              ? OF_SLOTS
           : !strncmp(dpg_faults[f].name, "token-", 6)   ? OF_TOKENS
           : !strncmp(dpg_faults[f].name, "sent-", 5)    ? OF_SENT
           : !strcmp(shows, "y") || !strcmp(shows, "dx") ? OF_CONV
                                                         : OF_RECURRENCE;
}

/* Is a fault of this kind asked for. */
static int wanted(problem_kind kind, const char *only) {
    int any = 0;
    for (int f = first_fault(); f < end_fault(); f++)
        any |= chosen(f, only) && kind_of(f) == kind;
    return any;
}

static void note(dp_kernel_row *row, const dp_case *c, const dp_run *r) {
    const char *stage;
    const dp_judgement *t = dp_first_failing(r, &stage);
    const dp_place *at = t ? &dp_judgement_row(t)->at : NULL;
    row->red++;
    if (row->id[0]) return;
    row->T = dp_case_tokens(c);
    row->ranks = r->ranks;
    snprintf(row->id, sizeof row->id, "%s", r->id);
    snprintf(row->tensor, sizeof row->tensor, "%.23s", t ? t->name : "");
    snprintf(row->tier, sizeof row->tier, "%s", r->exact ? "exact" : "bound");
    snprintf(row->says, sizeof row->says, "%.399s", t ? t->why : r->why);
    row->rank = at ? at->rank : -1;
    row->head = at ? at->head : -1;
    row->right = t && dp_is_listed(t->name, dpg_faults[row->fault].shows, ' ');
    for (int i = 0; i < r->ntensor; i++)
        row->fla |= dp_fla_sees(r->tensor[i].name, r->tensor[i].rel_fro);
}

/* The place whose data the exact case of four ranks holds, when it says so. */
static void ask_exact(const char *dir, const char *cache, dp_kernel_row *row) {
    static const int ranks[] = {4, 2};
    const dp_base base[] = {DP_BASE_FP32};
    const dp_format chain[] = {DP_FP32};
    const dp_backend cuda[] = {DP_BACKEND_CUDA};
    for (int i = 0; i < 2 && !row->source[0]; i++) {
        char path[1024];
        dp_case c;
        dp_runs r = {0};
        snprintf(path, sizeof path, "%s/%s.case", dir, i ? "exact-packed" : "exact-kda");
        if (dp_case_load(path, &c, NULL)) return;
        const dp_run_options o = {.nranks = 1,
                                  .ranks = &ranks[i],
                                  .nbase = 1,
                                  .base = base,
                                  .nchain = 1,
                                  .chain = chain,
                                  .nbackend = 1,
                                  .backend = cuda,
                                  .cache = cache};
        const int ran = !dp_case_run(&c, &o, &r, NULL) && r.n && r.run[0].speaks >= 0;
        const char *source = ran ? r.run[0].tensor[r.run[0].speaks].source : "";
        if (*source) snprintf(row->source, sizeof row->source, "%s", source);
        dp_runs_free(&r);
        dp_case_free(&c);
    }
}

/* Later data must not be seen: no verdict of a tensor, a check between two runs. */
static dp_status one_check(const char *dir, const char *name, dp_kernel_row *row, dp_err *e) {
    char path[1024];
    DP_FREED(dp_case_free) dp_case c;
    dp_checks r;
    snprintf(path, sizeof path, "%s/%s.case", dir, name);
    dp_status st = dp_case_load(path, &c, e);
    if (st) return st;
    const dp_check_subject s = {.backend = DP_BACKEND_CUDA,
                                .base = DP_BASE_BF16,
                                .chain = DP_FP32,
                                .input_dtype = c.input_dtype};
    st = dp_checks_run(&c.p, &s, 1, 1, "causality-chunk", &r, e);
    if (!st && r.c[0].verdict == DP_SKIPPED)
        st = dp_fail(e, DP_EINPUT, "%s: causality-chunk: %s", name, r.c[0].why);
    row->runs += !st;
    if (!st && r.c[0].verdict == DP_FAIL) {
        row->red++;
        row->T = c.p.T;
        row->ranks = row->right = 1;
        row->rank = row->head = -1;
        snprintf(row->id, sizeof row->id, "check %s --only causality-chunk", name);
        snprintf(row->tier, sizeof row->tier, "bits");
        snprintf(row->says, sizeof row->says, "%.399s", r.c[0].why);
    }
    return st;
}

/* One problem, on the kernels as they are now. */
static dp_status one_problem(const char *dir, const char *cache, const problem *p, int conv,
                             dp_kernel_row *row, dp_err *e) {
    const dp_base base[] = {dpg_faults_fast ? DP_BASE_BF16 : DP_BASE_FP32};
    const dp_format chain[] = {DP_FP32};
    const dp_backend cuda[] = {DP_BACKEND_CUDA};
    const dp_cuda_variant variant[] = {p->segments ? DP_CUDA_SEGMENTS : DP_CUDA_PLAIN};
    char path[1024];
    DP_FREED(dp_case_free) dp_case c;
    DP_FREED(dp_runs_free) dp_runs r = {0};
    snprintf(path, sizeof path, "%s/%s.case", dir, p->name);
    dp_status st = dp_case_load(path, &c, e);
    if (st) return st;
    const dp_run_options o = {.nranks = 1,
                              .ranks = &p->ranks,
                              .nbase = conv ? 0 : 1,
                              .base = base,
                              .nchain = conv ? 0 : 1,
                              .chain = chain,
                              .nbackend = 1,
                              .backend = cuda,
                              .nvariant = 1,
                              .variant = variant,
                              .nown = 1,
                              .own = &p->own,
                              .nmerge = 1,
                              .merge = &p->exchange,
                              .npayload = 1,
                              .payload = &p->payload,
                              .cache = cache};
    st = dp_case_run(&c, &o, &r, e);
    if (!st && !r.n) st = dp_fail(e, DP_EINPUT, "%s: %d ranks: nothing ran", c.name, p->ranks);
    for (int k = 0; k < r.n && !st; k++) {
        row->runs++;
        if (r.run[k].verdict == DP_FAIL) note(row, &c, &r.run[k]);
    }
    return st;
}

/* One fault, in this process. It stops at the first red problem. Without a fault it runs all
 * problems that the selected faults may run. */
static dp_status one_fault(const char *dir, const char *cache, int f, const char *only,
                           dp_kernel_row *row, dp_err *e) {
    static const struct {
        int fast;
        problem_kind kind;
        const problem *p;
        int n;
    } SETS[] = {{1, OF_RECURRENCE, FAST, COUNT(FAST)}, {0, OF_RECURRENCE, PROBLEM, COUNT(PROBLEM)},
                {0, OF_CONV, CONV, COUNT(CONV)},       {0, OF_SLOTS, SLOTS, COUNT(SLOTS)},
                {0, OF_TOKENS, TOKENS, COUNT(TOKENS)}, {0, OF_SENT, SENT, COUNT(SENT)}};
    const int fast = dpg_faults_fast, shown = !f || dpg_faults[f].shows[0];
    dp_status st = DP_OK;
    dpg_fault = f;
    row->fault = f;
    for (int i = 0; i < COUNT(BITS) && fast && !st && (!f || (!shown && !row->red)); i++)
        st = one_check(dir, BITS[i], row, e);
    for (int k = 0; k < COUNT(SETS) && shown; k++)
        for (int i = 0; i < SETS[k].n && SETS[k].fast == fast && !st; i++)
            if (f ? kind_of(f) == SETS[k].kind && !row->red : wanted(SETS[k].kind, only))
                st = one_problem(dir, cache, &SETS[k].p[i], SETS[k].kind == OF_CONV, row, e);
    if (!st && row->red && f && !fast && kind_of(f) == OF_RECURRENCE) ask_exact(dir, cache, row);
    return st;
}

/* A faulty kernel may read anywhere: each fault has a process. The row comes back through a pipe;
 * what it could not run is said on stderr. */
static pid_t start(const char *dir, const char *cache, int f, const char *only, int *from) {
    int p[2];
    if (pipe(p)) return -1;
    const pid_t pid = fork();
    if (pid) {
        close(p[1]);
        if (pid < 0) close(p[0]);
        *from = p[0];
        return pid;
    }
    dp_kernel_row row = {0};
    dp_err e = {0};
    close(p[0]);
    if (f) omp_set_num_threads(1); /* without a fault it runs alone */
    const dp_status st = one_fault(dir, cache, f, only, &row, &e);
    if (st) fprintf(stderr, "deltaproof: museum: %s: %s\n", dpg_faults[f].name, e.msg);
    const int bad = write(p[1], &row, sizeof row) != (ssize_t)sizeof row || (st && !row.red);
    _exit(bad ? 3 : 0);
}

static dp_status finish(pid_t pid, int from, int f, dp_kernel_row *row, dp_err *e) {
    int status = 0;
    dp_kernel_row got;
    const ssize_t n = read(from, &got, sizeof got);
    close(from);
    if (waitpid(pid, &status, 0) < 0) return dp_fail(e, DP_EIO, "waitpid: %s", strerror(errno));
    if (n == (ssize_t)sizeof got) *row = got;
    row->fault = f;
    if (WIFSIGNALED(
            status)) { /* no verdict, but not unseen: the program that runs a subject reports it */
        row->died = WTERMSIG(status);
        row->red++;
        row->rank = row->head = -1;
        snprintf(row->tier, sizeof row->tier, "crash");
        snprintf(row->says, sizeof row->says, "%s", strsignal(row->died));
        return DP_OK;
    }
    return WEXITSTATUS(status) ? dp_fail(e, DP_EIO, "%s: could not be run (exit status %d)",
                                         dpg_faults[f].name, WEXITSTATUS(status))
                               : DP_OK;
}

dp_status dp_kernel_museum_run(const char *dir, const char *cache, const char *only,
                               dp_kernel_museum *m, dp_err *e) {
    const double t0 = omp_get_wtime();
    enum { MAX = 16 };
    pid_t pid[DP_MOST_KERNEL_FAULTS];
    int from[DP_MOST_KERNEL_FAULTS];
    *m = (dp_kernel_museum){0};
    if (!&dpg_fault)
        return dp_fail(e, DP_EINPUT,
                       "the kernels of this build have no faults to switch on (`make museum` "
                       "builds those that have)");
    dp_status st = all_known(only, e);
    if (st) return st;
    int cores = omp_get_max_threads() < MAX ? omp_get_max_threads() : MAX, started = 0;
    m->n = DPG_NFAULTS;
    fflush(NULL);
    for (int f = 0; f < DPG_NFAULTS + cores;
         f++) { /* `cores` at a time; no fault first, so that truths are in the cache */
        const int end = f - (f ? cores : 0);
        if (f < DPG_NFAULTS) {
            pid[f] = 0;
            if (!st && (!f || (f >= first_fault() && f < end_fault() && chosen(f, only)))) {
                pid[f] = start(dir, cache, f, only, &from[f]);
                started++;
            }
            if (pid[f] < 0) {
                st = dp_fail(e, DP_EIO, "fork: %s", strerror(errno));
                pid[f] = 0;
            }
        }
        if (end >= (f ? 1 : 0) && end < DPG_NFAULTS && pid[end]) {
            const dp_status s = finish(pid[end], from[end], end, &m->row[end], e);
            if (s) st = s;
        }
    }
    m->seconds = omp_get_wtime() - t0;
    return st;
}

int dp_kernel_museum_unseen(const dp_kernel_museum *m) {
    int n = m->row[0].red;
    for (int f = 1; f < m->n; f++)
        n += m->row[f].fault == f && !m->row[f].red;
    return n;
}

void dp_kernel_museum_print(const dp_kernel_museum *m, FILE *f) {
    int shown = 0, red = 0, right = 0;
    fprintf(f, "%-20s %3s  %-58s %-12s %-6s %-16s %-5s %-4s %s\n", "fault of the kernels", "bug",
            "smallest problem that shows it", "first wrong", "tier", "worst at", "right", "FLA",
            "whose data the exact cases find, or why");
    for (int i = 1; i < m->n; i++) {
        const dp_kernel_row *r = &m->row[i];
        char at[40] = "", bug[8] = "";
        if (r->fault != i) continue;
        shown++;
        red += r->red > 0;
        right += r->right;
        if (r->red && r->rank >= 0) snprintf(at, sizeof at, "rank %d, head %d", r->rank, r->head);
        if (dpg_faults[i].bug) snprintf(bug, sizeof bug, "%d", dpg_faults[i].bug);
        fprintf(f, "%-20s %3s  %-58s %-12s %-6s %-16s %-5s %-4s %.150s\n", dpg_faults[i].name, bug,
                r->red ? r->id : "NOT SEEN", r->tensor, r->tier, at, r->right ? "yes" : "no",
                r->fla ? "yes" : "no", r->source[0] ? r->source : r->says);
    }
    fprintf(f, "right: the first wrong tensor is one that can show this fault first; FLA: above "
               "the thresholds of FLA's tests on the same data\n");
    fprintf(f,
            "MUSEUM OF KERNELS: %d of %d faults seen, %d at the right tensor; without a fault %d "
            "of %d runs red (%.0f s)\n",
            red, shown, right, m->row[0].red, m->row[0].runs, m->seconds);
}

dp_status dp_kernel_museum_write(const dp_kernel_museum *m, const char *path, dp_err *e) {
    json_t *o = json_pack("{ss si ss sf s{si si}}", "schema", "deltaproof-museum-kernels",
                          "schema_version", 1, "commit", DP_COMMIT, "seconds", m->seconds, "clean",
                          "runs", m->row[0].runs, "red", m->row[0].red),
           *list = json_array();
    for (int i = 1; i < m->n; i++) {
        const dp_kernel_row *r = &m->row[i];
        if (r->fault != i) continue;
        json_t *x =
            json_pack("{ss si ss ss si si sb sb}", "name", dpg_faults[i].name, "bug",
                      dpg_faults[i].bug, "what", dpg_faults[i].what, "shows", dpg_faults[i].shows,
                      "runs", r->runs, "red", r->red, "right", r->right, "fla", r->fla);
        json_object_set_new(
            x, "seen",
            !r->red ? json_null()
                    : json_pack("{so sI si ss ss si si so so}", "id", dp_json_text(r->id), "T",
                                (json_int_t)r->T, "ranks", r->ranks, "tensor", r->tensor, "tier",
                                r->tier, "rank", r->rank, "head", r->head, "says",
                                dp_json_text(r->says), "source", dp_json_text(r->source)));
        json_array_append_new(list, x);
    }
    json_object_set_new(o, "faults", list);
    return dp_json_write(o, path, 17, e);
}
