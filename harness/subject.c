#define _GNU_SOURCE
#include "subject.h"
#include "deltaproof_subject.h"
#include "../ref/context.h"

#include <dlfcn.h>
#include <errno.h>
#include <math.h>
#include <pthread.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <time.h>
#include <ucontext.h>
#include <unistd.h>

const char *const dp_subject_outcomes[DP_SUBJECT_NOUTCOMES] = {"returned", "unsupported", "failed", "crashed", "hung", "out of bounds", "exited"};

#define HOST "deltaproof-subject-host"   /* argv[0] of the process that loads the library */
#define GUARD (16L << 20)                /* untouchable bytes between arrays */
#define PIECE (1L << 20)                 /* of the all-gather, a rank */
#define MAX_REGIONS 48                   /* arrays of a rank */
#define CANARY 0xA5
static const uint64_t UNWRITTEN = 0x7ff8deadbeef0b5eULL;

typedef struct {
    char name[24];
    int input, ndim;
    int64_t shape[6], n, offset, span;   /* n doubles at the end of span bytes (whole pages) at offset in the file, rounded up to 64 bytes */
} region;

typedef enum { IDLE, LOADING, RUNNING, GATHERING, DONE, REFUSED } phase;     /* REFUSED: the library cannot be used; why says it */
typedef struct {
    phase at;
    int gathers, ret, region, before, wrote, have_fault;
    int64_t bytes, off;                  /* of the present all-gather; of a fault from the array's end or beginning */
    uint64_t address, pc;                /* pc relative to the library */
    char why[512];
} rank_state;

typedef struct {                         /* at the beginning of the shared file */
    char lib[4096];
    int about, ranks, processes;
    deltaproof_subject_problem p;        /* its pointers are filled in by the process that uses it */
    char input_format[8], base[8], chain[8];
    int nregion;                         /* of one process */
    pthread_barrier_t barrier;
    struct { int abi, kind, max_ranks; char name[64], base[16], chain[16], writes[512], design[128]; int declared; } info;
    rank_state rank[DP_SUBJECT_MAX_RANKS];
    region region[DP_SUBJECT_MAX_RANKS][MAX_REGIONS];
} control;

static int64_t pages(int64_t n) {
    const int64_t p = sysconf(_SC_PAGESIZE);
    return (n + p - 1) / p * p;
}
static int64_t comm_offset(void) { return pages(sizeof(control)); }
static int64_t data_begin(const region *r) { return r->span - (r->n * 8 + 63) / 64 * 64; }     /* within the span */

/* ---- in the process that loads the library ----------------------------------------------------------------------------------------- */

static struct {
    control *c;
    int me;
    char *gathered, *start[MAX_REGIONS]; /* where each span is mapped */
    uint64_t base;
    rank_state *st;
} host;

static void on_fault(int sig, siginfo_t *info, void *context) {
    rank_state *st = host.st;
    const char *a = info->si_addr;
    st->region = -1, st->address = (uint64_t)(uintptr_t)a, st->have_fault = 1;
    for (int i = 0; i < host.c->nregion && host.start[i]; i++) {
        const region *r = &host.c->region[host.me][i];
        const char *s = host.start[i], *e = s + r->span;
        if (a < s - GUARD / 2 || a >= e + GUARD / 2) continue;
        st->region = i, st->before = a < s, st->off = a < s ? (s + data_begin(r)) - a : a < e ? a - (s + data_begin(r)) : a - (s + data_begin(r) + r->n * 8);
        if (a >= s && a < e) st->wrote = 1;                      /* an input, mapped for reading */
    }
    (void)context;
#ifdef __x86_64__
    const ucontext_t *u = context;
    st->pc = (uint64_t)u->uc_mcontext.gregs[REG_RIP] - host.base;
    st->wrote |= (u->uc_mcontext.gregs[REG_ERR] & 2) != 0;
#endif
    signal(sig, SIG_DFL);                                        /* the access is made again and ends the process */
}

static void catch_faults(void) {
    static char stack[1 << 16];
    const stack_t s = {.ss_sp = stack, .ss_size = sizeof stack};
    struct sigaction a = {.sa_sigaction = on_fault, .sa_flags = SA_SIGINFO | SA_ONSTACK};
    sigaltstack(&s, NULL);
    sigaction(SIGSEGV, &a, NULL), sigaction(SIGBUS, &a, NULL);
}

static void leave(phase at, const char *fmt, const char *a, const char *b) {
    snprintf(host.st->why, sizeof host.st->why, fmt, a, b);
    host.st->at = at;
    _exit(0);
}

static void all_gather(deltaproof_subject_comm *comm, const void *send, void *recv, int64_t bytes) {
    control *c = host.c;
    rank_state *st = host.st;
    st->bytes = bytes, st->gathers++;
    st->at = GATHERING;
    pthread_barrier_wait(&c->barrier);
    for (int r = 0; r < comm->ranks; r++)
        if (c->rank[r].bytes != bytes) {
            snprintf(st->why, sizeof st->why, "all_gather number %d of different sizes: %lld bytes on rank %d, %lld on rank %d", st->gathers, (long long)bytes, comm->rank, (long long)c->rank[r].bytes, r);
            st->ret = 1, st->at = DONE;
            _exit(0);
        }
    for (int64_t x = 0; x < bytes; x += PIECE) {
        const size_t n = (size_t)(bytes - x < PIECE ? bytes - x : PIECE);
        memcpy(host.gathered + comm->rank * PIECE, (const char *)send + x, n);
        pthread_barrier_wait(&c->barrier);
        for (int r = 0; r < comm->ranks; r++) memcpy((char *)recv + r * bytes + x, host.gathered + r * PIECE, n);
        pthread_barrier_wait(&c->barrier);
    }
    st->at = RUNNING;
}

/* Spans of this process's arrays, each between guards. */
static void map_regions(int fd) {
    const control *c = host.c;
    int64_t total = GUARD, at = GUARD;
    for (int i = 0; i < c->nregion; i++) total += c->region[host.me][i].span + GUARD;
    char *all = mmap(NULL, (size_t)total, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (all == MAP_FAILED) leave(REFUSED, "no address space for its arrays: %s%s", strerror(errno), "");
    for (int i = 0; i < c->nregion; i++) {
        const region *r = &c->region[host.me][i];
        if (mmap(all + at, (size_t)r->span, r->input ? PROT_READ : PROT_READ | PROT_WRITE, MAP_SHARED | MAP_FIXED, fd, r->offset) == MAP_FAILED)
            leave(REFUSED, "%s cannot be mapped: %s", r->name, strerror(errno));
        host.start[i] = all + at;
        at += r->span + GUARD;
    }
}

static const void *input(const char *name) {
    for (int i = 0; i < host.c->nregion; i++) {
        const region *r = &host.c->region[host.me][i];
        if (r->input && !strcmp(r->name, name)) return host.start[i] + data_begin(r);
    }
    return NULL;
}

static void host_run(int (*run)(const deltaproof_subject_problem *, const deltaproof_subject_call *), int fd) {
    control *c = host.c;
    deltaproof_subject_problem p = c->p;
    deltaproof_subject_tensor t[MAX_REGIONS];
    deltaproof_subject_comm comm = {host.me, c->processes, all_gather};
    deltaproof_subject_call call = {.tensor = t, .comm = c->processes > 1 ? &comm : NULL, .why = host.st->why};
    map_regions(fd);
    const struct { const char *name; const double **to; } in[] = {{"q", &p.q}, {"k", &p.k}, {"v", &p.v}, {"g", &p.g}, {"beta", &p.beta}, {"A_log", &p.A_log}, {"dt_bias", &p.dt_bias},
        {"initial_state", &p.initial_state}, {"do", &p.dout}, {"dfinal_state", &p.dfinal_state}};
    for (size_t i = 0; i < sizeof in / sizeof *in; i++) *in[i].to = input(in[i].name);
    p.cu = input("cu");
    p.input_format = c->input_format, p.base = c->base, p.chain = c->chain;
    p.rank = host.me;
    if (c->processes > 1) p.tokens = p.T / c->processes, p.first = host.me * p.tokens;
    for (int i = 0; i < c->nregion; i++) {
        const region *r = &c->region[host.me][i];
        if (r->input) continue;
        deltaproof_subject_tensor *x = &t[call.count++];
        *x = (deltaproof_subject_tensor){.name = r->name, .ndim = r->ndim, .data = (double *)(host.start[i] + data_begin(r))};
        memcpy(x->shape, r->shape, sizeof x->shape);
    }
    host.st->at = RUNNING;
    host.st->ret = run(&p, &call);
    host.st->at = DONE;
}

static void take_info(const deltaproof_subject_info *i) {
    control *c = host.c;
    if (!i) leave(REFUSED, "deltaproof_subject_about returned NULL%s%s", "", "");
    c->info.abi = i->abi;
    if (i->abi != DP_SUBJECT_ABI) return;                        /* nothing else of it is known */
    c->info.kind = i->kind, c->info.max_ranks = i->max_ranks;
    snprintf(c->info.name, sizeof c->info.name, "%s", i->name ? i->name : ""), snprintf(c->info.base, sizeof c->info.base, "%s", i->base ? i->base : "");
    snprintf(c->info.chain, sizeof c->info.chain, "%s", i->chain ? i->chain : ""), snprintf(c->info.writes, sizeof c->info.writes, "%s", i->writes ? i->writes : "");
}

/* A function that a library may leave out: then it declares nothing of how it computes. */
static void take_design(const char *(*design)(void)) {
    const char *text = design ? design() : NULL;
    host.c->info.declared = text != NULL;
    snprintf(host.c->info.design, sizeof host.c->info.design, "%s", text ? text : "");
}

/* Runs before main in the process that the parent starts under this name, and never in any other. */
__attribute__((constructor)) static void host_main(int argc, char **argv) {
    if (argc != 3 || strcmp(argv[0], HOST)) return;
    const int fd = atoi(argv[1]);
    const struct rlimit none = {0, 0};
    prctl(PR_SET_PDEATHSIG, SIGKILL);
    setrlimit(RLIMIT_CORE, &none);
    dup2(2, 1);                                                  /* standard output is the record's */
    host.me = atoi(argv[2]);
    host.c = mmap(NULL, sizeof(control), PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    if (host.c == MAP_FAILED) _exit(125);
    host.st = &host.c->rank[host.me];
    host.gathered = mmap(NULL, (size_t)(host.c->processes * PIECE), PROT_READ | PROT_WRITE, MAP_SHARED, fd, comm_offset());
    if (host.gathered == MAP_FAILED) leave(REFUSED, "shared memory cannot be mapped: %s%s", strerror(errno), "");
    host.st->at = LOADING;
    catch_faults();
    void *lib = dlopen(host.c->lib, RTLD_NOW | RTLD_LOCAL);
    if (!lib) leave(REFUSED, "cannot be loaded: %s%s", dlerror(), "");
    const deltaproof_subject_info *(*about)(void) = (const deltaproof_subject_info *(*)(void))dlsym(lib, "deltaproof_subject_about");
    int (*run)(const deltaproof_subject_problem *, const deltaproof_subject_call *) = (int (*)(const deltaproof_subject_problem *, const deltaproof_subject_call *))dlsym(lib, "deltaproof_subject_run");
    if (!about || !run) leave(REFUSED, "does not export %s%s", !about ? "deltaproof_subject_about" : "deltaproof_subject_run", "");
    Dl_info where;
    if (dladdr((void *)run, &where)) host.base = (uint64_t)(uintptr_t)where.dli_fbase;
    if (host.c->about) {
        take_info(about());
        take_design((const char *(*)(void))dlsym(lib, "deltaproof_subject_design"));
        host.st->at = DONE;
    }
    else host_run(run, fd);
    _exit(0);
}

/* ---- in this program: shared memory -------------------------------------------------------------------------------------------------- */

typedef struct { int fd; int64_t size; control *c; char *map; } shared;

static dp_status shared_new(shared *s, const char *lib, int ranks, int processes, dp_err *e) {
    *s = (shared){.fd = memfd_create("deltaproof-subject", 0)};
    s->size = comm_offset() + processes * PIECE;
    if (s->fd < 0 || ftruncate(s->fd, s->size)) return dp_fail(e, DP_EIO, "shared memory for a subject: %s", strerror(errno));
    s->c = mmap(NULL, sizeof(control), PROT_READ | PROT_WRITE, MAP_SHARED, s->fd, 0);
    if (s->c == MAP_FAILED) return dp_fail(e, DP_EIO, "shared memory for a subject: %s", strerror(errno));
    pthread_barrierattr_t a;
    pthread_barrierattr_init(&a);
    pthread_barrierattr_setpshared(&a, PTHREAD_PROCESS_SHARED);
    pthread_barrier_init(&s->c->barrier, &a, (unsigned)processes);
    snprintf(s->c->lib, sizeof s->c->lib, "%s", lib);
    s->c->ranks = ranks, s->c->processes = processes;
    return DP_OK;
}

static void shared_free(shared *s) {
    if (s->map) munmap(s->map, (size_t)s->size);
    if (s->c && s->c != MAP_FAILED) munmap(s->c, sizeof(control));
    if (s->fd >= 0) close(s->fd);
}

static region *add(shared *s, int process, const char *name, int input, int ndim, const int64_t *shape) {
    int *n = &s->c->nregion, i = 0;
    while (i < *n && s->c->region[process][i].name[0]) i++;
    if (i == *n) ++*n;
    region *r = &s->c->region[process][i];
    snprintf(r->name, sizeof r->name, "%s", name);
    r->input = input, r->ndim = ndim, r->n = 1;
    for (int a = 0; a < ndim; a++) r->n *= r->shape[a] = shape[a];
    r->span = pages((r->n * 8 + 63) / 64 * 64 + 64);             /* at least 64 bytes of pattern before it */
    r->offset = s->size;
    s->size += r->span;
    return r;
}

static char *bytes_of(const shared *s, const region *r) { return s->map + r->offset; }
static double *data_of(const shared *s, const region *r) { return (double *)(bytes_of(s, r) + data_begin(r)); }

static const region *find(const shared *s, int process, const char *name) {
    for (int i = 0; i < s->c->nregion; i++)
        if (!s->c->region[process][i].input && !strcmp(s->c->region[process][i].name, name)) return &s->c->region[process][i];
    return NULL;
}

/* ---- processes ----------------------------------------------------------------------------------------------------------------------- */

static double now(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

static pid_t start(const shared *s, int rank) {
    char fd[16], me[16];
    snprintf(fd, sizeof fd, "%d", s->fd), snprintf(me, sizeof me, "%d", rank);
    char *const argv[] = {HOST, fd, me, NULL};
    const pid_t pid = vfork();
    if (pid == 0) {
        setpgid(0, 0);
        execv("/proc/self/exe", argv);
        _exit(125);
    }
    return pid;
}

static const char *signal_name(int sig) {
    const char *n = sigabbrev_np(sig);
    return n ? n : "?";
}

static const char *base_name(const char *path) { return strrchr(path, '/') ? strrchr(path, '/') + 1 : path; }

static void on_rank(const shared *s, int r, char *text, size_t size) {
    if (s->c->processes > 1) snprintf(text, size, "rank %d ", r);
    else *text = 0;
}

static void say_signal(const shared *s, int r, int sig, dp_subject_outcome *outcome, char *why, size_t size) {
    const rank_state *st = &s->c->rank[r];
    char who[24], at[256] = "";
    on_rank(s, r, who, sizeof who);
    if (st->have_fault && st->pc && st->pc < 1u << 30) snprintf(at, sizeof at, ", at %.200s+0x%llx", base_name(s->c->lib), (unsigned long long)st->pc);
    *outcome = DP_SUBJECT_CRASHED;
    if (!st->have_fault) snprintf(why, size, "%scrashed: SIG%s%s", who, signal_name(sig), at);
    else if (st->region < 0) snprintf(why, size, "%scrashed: SIG%s at address 0x%llx%s", who, signal_name(sig), (unsigned long long)st->address, at);
    else {
        const region *x = &s->c->region[r][st->region];
        *outcome = DP_SUBJECT_OUT_OF_BOUNDS;
        if (x->input && !st->before && st->wrote && st->off < x->n * 8 && st->address) snprintf(why, size, "%swrote to the input %s%s", who, x->name, at);
        else snprintf(why, size, "%s%s %lld bytes %s of %s%s", who, st->wrote ? "wrote" : "read", (long long)st->off, st->before ? "before the beginning" : "past the end", x->name, at);
    }
}

typedef struct { pid_t pid; int alive; } process;

/* A rank that has returned leaves the others waiting for ever in a collective that it did not enter. */
static int deserted(const shared *s, const process *p, int *gone) {
    int waiting = 0, top = 0;
    *gone = -1;
    for (int r = 0; r < s->c->processes; r++)
        if (p[r].alive && s->c->rank[r].at == GATHERING) waiting++, top = s->c->rank[r].gathers > top ? s->c->rank[r].gathers : top;
    for (int r = 0; r < s->c->processes; r++)
        if (!p[r].alive && s->c->rank[r].gathers < top) *gone = r;
    return waiting && *gone >= 0;
}

static void say_hung(const shared *s, const process *p, double limit, char *why, size_t size) {
    int n = snprintf(why, size, "did not return within %g s", limit);
    for (int r = 0; r < s->c->processes && s->c->processes > 1; r++) {
        const rank_state *st = &s->c->rank[r];
        const char *what = !p[r].alive ? "returned" : st->at == GATHERING ? "waits in all_gather" : st->at == LOADING ? "is being loaded" : "computes";
        if (n < (int)size) n += snprintf(why + n, size - (size_t)n, "%s rank %d %s", r ? "," : ":", r, what);
        if (n < (int)size && st->at == GATHERING && p[r].alive) n += snprintf(why + n, size - (size_t)n, " number %d", st->gathers);
    }
}

/* Starts all processes and waits for them, or for the limit, or for the first that fails; then ends the others. */
static dp_status run_processes(shared *s, double limit, dp_subject_outcome *outcome, char *why, size_t size, dp_err *e) {
    const int n = s->c->processes;
    process p[DP_SUBJECT_MAX_RANKS] = {{0}};
    const double t0 = now();
    int left = 0, stop = 0, gone, code;
    dp_status st = DP_OK;
    *outcome = DP_SUBJECT_RETURNED;
    for (int r = 0; r < n && !st; r++) {
        p[r].pid = start(s, r);
        if (p[r].pid < 0) st = dp_fail(e, DP_EIO, "a process for a subject: %s", strerror(errno)), stop = 1;
        else p[r].alive = 1, left++;
    }
    for (long nap = 200000; left && !stop; nap = nap < 5000000 ? nap + nap / 4 : nap) {
        for (int r = 0; r < n && !stop; r++) {
            if (!p[r].alive || waitpid(p[r].pid, &code, WNOHANG) != p[r].pid) continue;
            const rank_state *x = &s->c->rank[r];
            char who[24];
            on_rank(s, r, who, sizeof who);
            p[r].alive = 0, left--;
            if (WIFSIGNALED(code)) say_signal(s, r, WTERMSIG(code), outcome, why, size), stop = 1;
            else if (x->at == REFUSED) *outcome = DP_SUBJECT_REFUSED, snprintf(why, size, "%s%.400s", who, x->why), stop = 1;
            else if (x->at != DONE) *outcome = DP_SUBJECT_EXITED, snprintf(why, size, "%sended its process with exit status %d before it returned", who, WEXITSTATUS(code)), stop = 1;
            else if (x->ret == DP_SUBJECT_UNSUPPORTED) *outcome = DP_SUBJECT_REFUSED, snprintf(why, size, "%.400s", x->why[0] ? x->why : "does not take this problem"), stop = 1;
            else if (x->ret) *outcome = DP_SUBJECT_SAYS_FAILED, snprintf(why, size, "%sfailed: returned %d%s%.400s", who, x->ret, x->why[0] ? ": " : "", x->why), stop = 1;
        }
        if (left && !stop && deserted(s, p, &gone)) {
            *outcome = DP_SUBJECT_HUNG, stop = 1;
            snprintf(why, size, "would wait for ever: rank %d returned after %d calls of all_gather, others are in call %d", gone, s->c->rank[gone].gathers, s->c->rank[gone].gathers + 1);
        }
        if (left && !stop && now() - t0 > limit) *outcome = DP_SUBJECT_HUNG, say_hung(s, p, limit, why, size), stop = 1;
        if (left && !stop) nanosleep(&(struct timespec){.tv_nsec = nap}, NULL);
    }
    for (int r = 0; r < n; r++)
        if (p[r].alive) kill(-p[r].pid, SIGKILL), kill(p[r].pid, SIGKILL), waitpid(p[r].pid, &code, 0);
    return st;
}

/* ---- about --------------------------------------------------------------------------------------------------------------------------- */

static dp_status read_info(const control *c, const char *path, dp_subject *s, dp_err *e) {
    char copy[512], *save;
    if (c->info.abi != DP_SUBJECT_ABI) return dp_fail(e, DP_EINPUT, "%s: has version %d of deltaproof_subject.h, this program has %d: build it again", path, c->info.abi, DP_SUBJECT_ABI);
    int base = -1;
    for (int i = 0; i < DP_NBASES; i++) if (!strcmp(c->info.base, dp_base_names[i])) base = i;
    if (base < 0) return dp_fail(e, DP_EINPUT, "%s: claims base '%s'; known: fp64 fp32 bf16", path, c->info.base);
    if (dp_format_find(c->info.chain) < 0) return dp_fail(e, DP_EINPUT, "%s: claims chain '%s'; known: fp64 fp32 tf32x3 tf32 tf32rz bf16 bf16st", path, c->info.chain);
    if (c->info.kind != DP_SUBJECT_WHOLE && c->info.kind != DP_SUBJECT_PER_RANK) return dp_fail(e, DP_EINPUT, "%s: kind %d is neither DP_SUBJECT_WHOLE nor DP_SUBJECT_PER_RANK", path, c->info.kind);
    if (c->info.max_ranks < 1 || c->info.max_ranks > DP_SUBJECT_MAX_RANKS) return dp_fail(e, DP_EINPUT, "%s: max_ranks %d is not within 1 to %d", path, c->info.max_ranks, DP_SUBJECT_MAX_RANKS);
    if (c->info.declared) {
        dp_design d;
        dp_err why = {0};
        if (dp_design_parse(c->info.design, (dp_base)base, &d, &why)) return dp_fail(e, DP_EINPUT, "%s: %s", path, why.msg);
        s->design = strdup(c->info.design);
    }
    s->base = base, s->chain = dp_format_find(c->info.chain), s->per_rank = c->info.kind, s->max_ranks = c->info.max_ranks;
    snprintf(s->name, sizeof s->name, "%s", c->info.name[0] ? c->info.name : base_name(path));
    snprintf(copy, sizeof copy, "%s", c->info.writes);
    int any = 0;
    for (char *t = strtok_r(copy, " ", &save); t; t = strtok_r(NULL, " ", &save)) {
        int f = -1;
        for (int i = 0; i < dp_result_nfields; i++) if (!strcmp(t, dp_result_fields[i].name)) f = i;
        const int g = f < 0 ? dp_tap_find(t) : -1;
        if (f < 0 && (g < 0 || strcmp(t, dp_taps[g].name))) return dp_fail(e, DP_EINPUT, "%s: writes '%s', which is no output and no stage of deltaproof_subject.h", path, t);
        if (f >= 0) s->writes[f] = 1;
        else s->writes_stage[g] = 1;
        any = 1;
    }
    return any ? DP_OK : dp_fail(e, DP_EINPUT, "%s: says that it writes nothing", path);
}

dp_status dp_subject_open(const char *path, dp_subject *s, dp_err *e) {
    shared m = {.fd = -1};
    dp_subject_outcome outcome;
    char why[512] = "", *full = realpath(path, NULL);
    *s = (dp_subject){0};
    if (!full) return dp_fail(e, DP_EINPUT, "%s: %s", path, strerror(errno));
    dp_status st = shared_new(&m, full, 1, 1, e);
    if (!st) m.c->about = 1, st = run_processes(&m, DP_SUBJECT_LIMIT_S, &outcome, why, sizeof why, e);
    if (!st && outcome != DP_SUBJECT_RETURNED) st = dp_fail(e, DP_EINPUT, "%s: %s", path, why);
    if (!st) st = read_info(m.c, path, s, e);
    shared_free(&m);
    if (st) free(full);
    else s->path = full;
    return st;
}

void dp_subject_close(dp_subject *s) {
    free(s->path);
    free(s->design);
    *s = (dp_subject){0};
}

/* ---- one run -------------------------------------------------------------------------------------------------------------------------- */

typedef struct { const char *name; const double *x; int per_token, ndim; int64_t shape[5]; } array;      /* shape of the whole problem; per_token: axis 0 is T */

static int input_arrays(const dp_problem *p, int backward, array *a) {
    const int64_t T = p->T, H = p->H, HV = p->HV, K = p->K, V = p->V, R = p->R, Kg = dp_Kg(p), N = p->Nseq;
    const array all[] = {{"q", p->q, 1, 3, {T, H, K}}, {"k", p->k, 1, 4, {T, H, R, K}}, {"v", p->v, 1, 4, {T, HV, R, V}}, {"g", p->g, 1, 3, {T, HV, Kg}}, {"beta", p->beta, 1, 3, {T, HV, R}},
        {"A_log", p->A_log, 0, 1, {HV}}, {"dt_bias", p->dt_bias, 0, 2, {HV, Kg}}, {"initial_state", p->s0, 0, 4, {N, HV, K, V}}, {"do", backward ? p->dout : NULL, 1, 3, {T, HV, V}},
        {"dfinal_state", backward ? p->dstate : NULL, 0, 4, {N, HV, K, V}}};
    int n = 0;
    for (size_t i = 0; i < sizeof all / sizeof *all; i++) if (all[i].x) a[n++] = all[i];
    return n;
}

static int field_array(const dp_problem *p, int field, array *a) {
    const int64_t T = p->T, H = p->H, HV = p->HV, K = p->K, V = p->V, R = p->R, Kg = dp_Kg(p), N = p->Nseq;
    const array all[10] = {{"", NULL, 1, 3, {T, HV, V}}, {"", NULL, 0, 4, {N, HV, K, V}}, {"", NULL, 1, 3, {T, H, K}}, {"", NULL, 1, 4, {T, H, R, K}}, {"", NULL, 1, 4, {T, HV, R, V}}, {"", NULL, 1, 3, {T, HV, Kg}},
        {"", NULL, 1, 3, {T, HV, R}}, {"", NULL, 0, 1, {HV}}, {"", NULL, 0, 2, {HV, Kg}}, {"", NULL, 0, 4, {N, HV, K, V}}};
    int64_t rows, width;
    dp_result_shape(p, field, &rows, &width);
    *a = all[field];
    a->name = dp_result_fields[field].name;
    return rows > 0;
}

static const int64_t *local_shape(const array *a, int processes, int64_t *s) {
    memcpy(s, a->shape, sizeof a->shape);
    if (a->per_token) s[0] /= processes;
    return s;
}

/* Shape of a stage in one call: axes R kept, the axis of ranks left out where a rank is a process. */
static int stage_shape(const dp_problem *p, const dp_subject *s, int N, int process, int stage, int64_t *out) {
    int64_t w[5];
    const int ndim = dp_tap_shape(p, N, stage, w), kind = dp_taps[stage].kind, split = s->per_rank && N > 1;
    int n = 0;
    if (kind == DP_PER_RANK && split) {
        memcpy(out, w + 1, sizeof *w * 3);
        return 3;
    }
    if (kind == DP_PER_CHUNK) w[0] = dp_tap_chunks(p, N, split ? process : -1);
    if (kind == DP_PER_TOKEN && split) w[0] /= N;
    const int keyed = stage == DP_AKK || stage == DP_W || stage == DP_KG || stage == DP_U || stage == DP_V_NEW || stage == DP_DV_LOCAL || stage == DP_DV_NEW;
    for (int i = 0; i < ndim; i++) {
        if (i == 2 && keyed && ndim == 3) out[n++] = 1;
        out[n++] = w[i];
    }
    return n;
}

static void lay_out(shared *m, const dp_subject *s, const dp_problem *p, int N, int backward) {
    array a[10];
    int64_t shape[6] = {0};
    const int np = m->c->processes, n = input_arrays(p, backward, a);
    const int64_t ncu = p->Nseq + 1;
    for (int r = 0; r < np; r++) {
        for (int i = 0; i < n; i++) add(m, r, a[i].name, 1, a[i].ndim, local_shape(&a[i], np, shape));
        add(m, r, "cu", 1, 1, &ncu);
        for (int i = 0; i < dp_result_nfields; i++) {
            array f;
            if (s->writes[i] && (backward || !dp_result_fields[i].backward) && field_array(p, i, &f)) add(m, r, f.name, 0, f.ndim, local_shape(&f, np, shape));
        }
        for (int i = 0; i < DP_NTAPS; i++) {
            if (!s->writes_stage[i] || (dp_taps[i].backward && !backward)) continue;
            const int ndim = stage_shape(p, s, N, r, i, shape);
            add(m, r, dp_taps[i].name, 0, ndim, shape);
        }
    }
}

static void fill(const shared *m, const dp_problem *p, int backward) {
    array a[10];
    const int n = input_arrays(p, backward, a);
    for (int r = 0; r < m->c->processes; r++)
        for (int i = 0; i < m->c->nregion; i++) {
            const region *x = &m->c->region[r][i];
            memset(bytes_of(m, x), CANARY, (size_t)x->span);
            if (!x->input) for (int64_t z = 0; z < x->n; z++) memcpy(&data_of(m, x)[z], &UNWRITTEN, 8);
            else if (!strcmp(x->name, "cu")) memcpy(data_of(m, x), p->cu, sizeof(int64_t) * (size_t)x->n);
            for (int j = 0; x->input && j < n; j++)
                if (!strcmp(a[j].name, x->name)) memcpy(data_of(m, x), a[j].x + (a[j].per_token ? r * x->n : 0), sizeof(double) * (size_t)x->n);
        }
}

static void describe(control *c, const dp_problem *p, const char *input_format, int N, dp_base base, dp_format chain, int backward) {
    c->p = (deltaproof_subject_problem){.abi = DP_SUBJECT_ABI, .size = sizeof c->p, .H = p->H, .HV = p->HV, .K = p->K, .V = p->V, .R = p->R, .Kg = dp_Kg(p), .Nseq = p->Nseq, .gate_form = p->gate,
        .beta_form = p->beta_form, .l2norm = p->l2norm, .backward = backward, .ranks = N, .T = p->T, .tokens = p->T, .scale = p->scale, .lower_bound = p->lower_bound};
    snprintf(c->input_format, sizeof c->input_format, "%s", input_format);
    snprintf(c->base, sizeof c->base, "%s", dp_base_names[base]);
    snprintf(c->chain, sizeof c->chain, "%s", dp_formats[chain].name);
}

/* What is left of the pages around each array must be as it was. */
static void check_patterns(const shared *m, dp_subject_result *out) {
    for (int r = 0; r < m->c->processes; r++)
        for (int i = 0; i < m->c->nregion; i++) {
            const region *x = &m->c->region[r][i];
            const unsigned char *b = (const unsigned char *)bytes_of(m, x);
            const int64_t from = data_begin(x), to = from + x->n * 8;
            int64_t before = 0, after = 0;
            for (int64_t z = 0; z < x->span; z++)
                if (z < from) before += b[z] != CANARY;
                else if (z >= to) after += b[z] != CANARY;
            if (!before && !after) continue;
            char who[24];
            on_rank(m, r, who, sizeof who);
            out->outcome = DP_SUBJECT_OUT_OF_BOUNDS;
            snprintf(out->why, sizeof out->why, "%swrote %s of %s: %lld bytes there are changed", who, after ? "past the end" : "before the beginning", x->name, (long long)(after ? after : before));
            return;
        }
}

/* The rank whose final_state (or ds0) of sequence i counts: -1 for an empty one. */
static int owner(const dp_problem *p, int np, int i, int at_end) {
    const int64_t L = p->T / np;
    return p->cu[i + 1] == p->cu[i] ? -1 : (int)((at_end ? p->cu[i + 1] - 1 : p->cu[i]) / L);
}

static void collect_states(const shared *m, const dp_problem *p, int field, double *x) {
    const int64_t n = (int64_t)p->HV * p->K * p->V;
    for (int i = 0; i < p->Nseq; i++) {
        const int r = m->c->processes == 1 ? 0 : owner(p, m->c->processes, i, field == 1);   /* one process owns all, empty sequences too */
        const double *own = field == 1 ? p->s0 : p->dstate;      /* empty: what enters leaves */
        if (r >= 0) memcpy(x + i * n, data_of(m, find(m, r, dp_result_fields[field].name)) + i * n, sizeof *x * (size_t)n);
        else for (int64_t z = 0; z < n; z++) x[i * n + z] = own ? own[i * n + z] : 0;
    }
}

static void collect(const shared *m, const dp_problem *p, int N, dp_subject_result *out) {
    for (int i = 0; i < dp_result_nfields; i++) {
        int64_t rows, width;
        dp_result_shape(p, i, &rows, &width);
        if (!find(m, 0, dp_result_fields[i].name)) continue;
        double *x = *dp_result_at(&out->r, i) = dp_doubles(rows * width);
        if (i == 1 || i == 9) collect_states(m, p, i, x);
        else for (int r = 0; r < (i == 7 || i == 8 ? 1 : m->c->processes); r++) {
            const region *g = find(m, r, dp_result_fields[i].name);
            memcpy(x + r * g->n, data_of(m, g), sizeof *x * (size_t)g->n);
        }
    }
    for (int i = 0; i < DP_NTAPS; i++) {
        if (!find(m, 0, dp_taps[i].name)) continue;
        double *x = out->stage[i] = dp_doubles(dp_tap_size(p, N, i));
        for (int r = 0; r < m->c->processes; r++) {
            const region *g = find(m, r, dp_taps[i].name);
            memcpy(x, data_of(m, g), sizeof *x * (size_t)g->n);
            x += g->n;
        }
    }
}

dp_status dp_subject_run(const dp_subject *s, const dp_problem *p, const char *input_format, int N, dp_base base, dp_format chain, int backward, double limit_s, dp_subject_result *out, dp_err *e) {
    shared m = {.fd = -1};
    *out = (dp_subject_result){0};
    if (N < 1 || N > DP_SUBJECT_MAX_RANKS || p->T % N) return dp_fail(e, DP_EINPUT, "%lld tokens over %d ranks: not for a subject", (long long)p->T, N);
    dp_status st = shared_new(&m, s->path, N, s->per_rank ? N : 1, e);
    if (!st) {
        describe(m.c, p, input_format, N, base, chain, backward);
        lay_out(&m, s, p, N, backward);
        if (ftruncate(m.fd, m.size)) st = dp_fail(e, DP_EIO, "shared memory for a subject: %s", strerror(errno));
    }
    if (!st) {
        m.map = mmap(NULL, (size_t)m.size, PROT_READ | PROT_WRITE, MAP_SHARED, m.fd, 0);
        if (m.map == MAP_FAILED) m.map = NULL, st = dp_fail(e, DP_EIO, "shared memory for a subject: %s", strerror(errno));
    }
    if (!st) {
        const double t0 = now();
        fill(&m, p, backward);
        st = run_processes(&m, limit_s, &out->outcome, out->why, sizeof out->why, e);
        out->seconds = now() - t0;
    }
    if (!st) {
        if (out->outcome == DP_SUBJECT_RETURNED) check_patterns(&m, out);
        collect(&m, p, N, out);
    }
    shared_free(&m);
    return st;
}

void dp_subject_result_free(dp_subject_result *r) {
    dp_result_free(&r->r);
    for (int i = 0; i < DP_NTAPS; i++) free(r->stage[i]);
    *r = (dp_subject_result){0};
}

int dp_subject_unwritten(double x) { return !memcmp(&x, &UNWRITTEN, sizeof x); }

void dp_subject_flaws(const double *x, int64_t n, char *text, size_t size) {
    int64_t unwritten = 0, wild = 0, first = -1, odd = -1;
    *text = 0;
    for (int64_t i = 0; i < n; i++) {
        if (dp_subject_unwritten(x[i])) first = unwritten++ ? first : i;
        else if (!isfinite(x[i])) odd = wild++ ? odd : i;
    }
    if (unwritten == n) snprintf(text, size, "was never written");
    else if (unwritten) snprintf(text, size, "%lld of %lld entries were never written, the first is entry %lld", (long long)unwritten, (long long)n, (long long)first);
    else if (wild) snprintf(text, size, "%lld of %lld entries are NaN or Inf, the first is entry %lld", (long long)wild, (long long)n, (long long)odd);
}
