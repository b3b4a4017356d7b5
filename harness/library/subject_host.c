/* harness/library/subject_host.c - the process that loads a library and calls it: arrays between
 * guards, faults caught and placed, the all-gather. It takes over before main in the program's own
 * file when that is started under its name (subject_shared.h). */
#include "subject_shared.h"

#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <ucontext.h>
#include <unistd.h>

typedef const deltaproof_subject_info *(*about_function)(void);
typedef const char *(*design_function)(void);
typedef int (*run_function)(const deltaproof_subject_problem *, const deltaproof_subject_call *);

static struct {
    const dp_subject_control *c;
    dp_subject_said *said;
    dp_subject_state *me;
    int rank;
    char *gathered, *start[DP_SUBJECT_MAX_REGIONS]; /* where each span is mapped */
    uint64_t base;                                  /* of the library */
} host;

int64_t dp_subject_pages(int64_t bytes) {
    const int64_t page = sysconf(_SC_PAGESIZE);
    return (bytes + page - 1) / page * page;
}

static void leave(const char *fmt, const char *a, const char *b) {
    snprintf(host.me->why, sizeof host.me->why, fmt, a, b);
    host.me->at = DP_PHASE_REFUSED;
    _exit(0);
}

/* ---- faults ---------------------------------------------------------------------------------- */

/* Is the address in or around this span? Then where, seen from the array. */
static int place_fault(const char *address, int i) {
    const dp_subject_region *r = &host.c->region[host.rank][i];
    const char *s = host.start[i], *e = s + r->span, *array = s + dp_subject_begin(r);
    dp_subject_state *st = host.me;
    if (address < s - DP_SUBJECT_GUARD / 2 || address >= e + DP_SUBJECT_GUARD / 2) return 0;
    st->region = i;
    st->before = address < s;
    if (address < s)
        st->off = array - address;
    else if (address < e)
        st->off = address - array;
    else
        st->off = address - (array + r->n * 8);
    if (address >= s && address < e) st->wrote = 1; /* an input, mapped for reading */
    return 1;
}

static void on_fault(int sig, siginfo_t *info, DP_UNUSED void *context) {
    dp_subject_state *st = host.me;
    st->region = -1;
    st->address = (uint64_t)(uintptr_t)info->si_addr;
    st->have_fault = 1;
    for (int i = 0; i < host.c->nregion && host.start[i]; i++)
        if (place_fault(info->si_addr, i)) break;
#ifdef __x86_64__
    const ucontext_t *u = context;
    st->pc = (uint64_t)u->uc_mcontext.gregs[REG_RIP] - host.base;
    st->wrote |= (u->uc_mcontext.gregs[REG_ERR] & 2) != 0;
#endif
    signal(sig, SIG_DFL); /* the access is made again and ends the process */
}

static void catch_faults(void) {
    static char stack[1 << 16];
    const stack_t s = {.ss_sp = stack, .ss_size = sizeof stack};
    struct sigaction a = {.sa_sigaction = on_fault, .sa_flags = SA_SIGINFO | SA_ONSTACK};
    sigaltstack(&s, NULL);
    sigaction(SIGSEGV, &a, NULL);
    sigaction(SIGBUS, &a, NULL);
}

/* ---- the all-gather -------------------------------------------------------------------------- */

static void check_sizes(const deltaproof_subject_comm *comm, int64_t bytes) {
    for (int r = 0; r < comm->ranks; r++) {
        const int64_t other = host.said->state[r].bytes;
        if (other == bytes) continue;
        snprintf(host.me->why, sizeof host.me->why,
                 "all_gather number %d of different sizes: %lld bytes on rank %d, %lld on rank %d",
                 host.me->gathers, (long long)bytes, comm->rank, (long long)other, r);
        host.me->ret = 1;
        host.me->at = DP_PHASE_DONE;
        _exit(0);
    }
}

static void all_gather(deltaproof_subject_comm *comm, const void *send, void *recv, int64_t bytes) {
    pthread_barrier_t *barrier = &host.said->barrier;
    host.me->bytes = bytes;
    host.me->gathers++;
    host.me->at = DP_PHASE_GATHERING;
    pthread_barrier_wait(barrier);
    check_sizes(comm, bytes);
    for (int64_t x = 0; x < bytes; x += DP_SUBJECT_PIECE) {
        const int64_t left = bytes - x;
        const size_t n = (size_t)(left < DP_SUBJECT_PIECE ? left : DP_SUBJECT_PIECE);
        memcpy(host.gathered + comm->rank * DP_SUBJECT_PIECE, (const char *)send + x, n);
        pthread_barrier_wait(barrier);
        for (int r = 0; r < comm->ranks; r++)
            memcpy((char *)recv + r * bytes + x, host.gathered + r * DP_SUBJECT_PIECE, n);
        pthread_barrier_wait(barrier);
    }
    host.me->at = DP_PHASE_RUNNING;
}

/* ---- arrays ---------------------------------------------------------------------------------- */

/* Spans of this process's arrays, each between guards. */
static void map_regions(void) {
    const dp_subject_control *c = host.c;
    const dp_subject_region *r = c->region[host.rank];
    int64_t total = DP_SUBJECT_GUARD, at = DP_SUBJECT_GUARD;
    for (int i = 0; i < c->nregion; i++)
        total += r[i].span + DP_SUBJECT_GUARD;
    const int none = MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE;
    char *all = mmap(NULL, (size_t)total, PROT_NONE, none, -1, 0);
    if (all == MAP_FAILED) leave("no address space for its arrays: %s%s", strerror(errno), "");
    for (int i = 0; i < c->nregion; i++) {
        const int fd = r[i].input ? DP_SUBJECT_GIVEN_FD : DP_SUBJECT_MADE_FD;
        const int access = r[i].input ? PROT_READ : PROT_READ | PROT_WRITE;
        const int flags = MAP_SHARED | MAP_FIXED;
        if (mmap(all + at, (size_t)r[i].span, access, flags, fd, r[i].offset) == MAP_FAILED)
            leave("%s cannot be mapped: %s", r[i].name, strerror(errno));
        host.start[i] = all + at;
        at += r[i].span + DP_SUBJECT_GUARD;
    }
}

/* The arrays of call i take the places of those of the call before. */
static void map_call(int i) {
    const dp_subject_control *c = host.c;
    for (int a = 0; a < c->nregion; a++) {
        const dp_subject_region *r = &c->region[host.rank][a];
        const int64_t at =
            r->offset + (r->input ? c->given_of[i] * c->given_step : i * c->made_step);
        if (mmap(host.start[a], (size_t)r->span, r->input ? PROT_READ : PROT_READ | PROT_WRITE,
                 MAP_SHARED | MAP_FIXED, r->input ? DP_SUBJECT_GIVEN_FD : DP_SUBJECT_MADE_FD,
                 at) == MAP_FAILED)
            leave("%s cannot be mapped again: %s", r->name, strerror(errno));
    }
}

static const void *input(const char *name) {
    for (int i = 0; i < host.c->nregion; i++) {
        const dp_subject_region *r = &host.c->region[host.rank][i];
        if (r->input && !strcmp(r->name, name)) return host.start[i] + dp_subject_begin(r);
    }
    return NULL;
}

#define POINTER(NAME, FIELD) \
    { NAME, NULL, offsetof(deltaproof_subject_problem, FIELD) }
#define SAME_NAME(FIELD) POINTER(#FIELD, FIELD)
#define OF_ROWS(FIELD) \
    { #FIELD, "previous_" #FIELD, offsetof(deltaproof_subject_problem, FIELD) }

#define ROW_OF(ID, FIELD, ...) [DP_INPUT_##ID] = OF_ROWS(FIELD),

const dp_subject_input dp_subject_inputs[DP_NINPUTS] = {
    [DP_INPUT_Q] = SAME_NAME(q),
    [DP_INPUT_K] = OF_ROWS(k),
    [DP_INPUT_V] = OF_ROWS(v),
    [DP_INPUT_G] = SAME_NAME(g),
    [DP_INPUT_BETA] = OF_ROWS(beta),
    DP_ALL_ROW_INPUTS(ROW_OF)[DP_INPUT_A_LOG] = SAME_NAME(A_log),
    [DP_INPUT_DT_BIAS] = SAME_NAME(dt_bias),
    [DP_INPUT_S0] = SAME_NAME(initial_state),
    [DP_INPUT_DO] = POINTER("do", dout),
    [DP_INPUT_DSTATE] = SAME_NAME(dfinal_state),
};

/* NULL: the call has none. */
static const deltaproof_subject_problem *previous(void) {
    static deltaproof_subject_problem p;
    int any = 0;
    p = host.c->p;
    for (int i = 0; i < DP_NINPUTS; i++) {
        const dp_subject_input *x = &dp_subject_inputs[i];
        const void *data = x->previous ? input(x->previous) : NULL;
        *(const double **)((char *)&p + x->offset) = data;
        any |= data != NULL;
    }
    p.T = p.tokens = p.Nseq;
    return any ? &p : NULL;
}

static deltaproof_subject_problem problem(void) {
    const dp_subject_control *c = host.c;
    deltaproof_subject_problem p = c->p;
    for (int i = 0; i < DP_NINPUTS; i++) {
        const dp_subject_input *x = &dp_subject_inputs[i];
        *(const double **)((char *)&p + x->offset) = input(x->name);
    }
    p.cu = input("cu");
    p.read_slot = input("read_slot");
    p.write_slot = input("write_slot");
    p.draft_slot = input("draft_slot");
    p.accepted = input("accepted");
    p.parent = input("parent");
    p.ring_slot = input("ring_slot");
    p.ring_tokens = input("ring_tokens");
    p.previous = previous();
    p.input_format = c->input_format;
    p.base = c->base;
    p.chain = c->chain;
    p.recurrence = c->recurrence;
    p.rank = host.rank;
    if (c->processes > 1) {
        p.tokens = p.T / c->processes;
        p.first = host.rank * p.tokens;
    }
    return p;
}

/* ---- calls ----------------------------------------------------------------------------------- */

static void call_once(run_function run) {
    const dp_subject_control *c = host.c;
    const deltaproof_subject_problem p = problem();
    deltaproof_subject_tensor t[DP_SUBJECT_MAX_REGIONS];
    deltaproof_subject_comm comm = {host.rank, c->processes, all_gather};
    deltaproof_subject_call call = {
        .tensor = t, .comm = c->processes > 1 ? &comm : NULL, .why = host.me->why};
    for (int i = 0; i < c->nregion; i++) {
        const dp_subject_region *r = &c->region[host.rank][i];
        if (r->input) continue;
        deltaproof_subject_tensor *x = &t[call.count++];
        double *data = (double *)(host.start[i] + dp_subject_begin(r));
        *x = (deltaproof_subject_tensor){.name = r->name, .ndim = r->ndim, .data = data};
        memcpy(x->shape, r->shape, sizeof x->shape);
    }
    host.me->at = DP_PHASE_RUNNING;
    host.me->ret = run(&p, &call);
}

/* All calls, to the first that does not succeed. */
static void call_run(run_function run) {
    for (int i = 0; i < host.c->calls && !host.me->ret; i++) {
        host.me->call = i;
        if (i) map_call(i);
        if (i && i + 1 == host.c->calls) {
            close(DP_SUBJECT_GIVEN_FD);
            close(DP_SUBJECT_MADE_FD);
        }
        call_once(run);
    }
    host.me->at = DP_PHASE_DONE;
}

/* A list that were cut could say something else. */
static void copy_text(char *to, size_t size, const char *from, const char *what) {
    const int n = snprintf(to, size, "%s", from ? from : "");
    if (n >= (int)size) leave("%s is too long: %.100s", what, from);
}

/* A library may leave out two functions: then it declares nothing of how it computes, and has the
 * recurrences with a beta. */
static void call_about(about_function about, design_function design, design_function recurrences) {
    const deltaproof_subject_info *i = about();
    dp_subject_about *to = &host.said->about;
    if (!i) leave("deltaproof_subject_about returned NULL%s%s", "", "");
    to->abi = i->abi;
    if (i->abi == DP_SUBJECT_ABI) { /* else nothing more of it is known */
        to->kind = i->kind;
        to->max_ranks = i->max_ranks;
        copy_text(to->name, sizeof to->name, i->name, "its name");
        copy_text(to->base, sizeof to->base, i->base, "its base");
        copy_text(to->chain, sizeof to->chain, i->chain, "its chain");
        copy_text(to->writes, sizeof to->writes, i->writes, "the list of what it writes");
        const char *text = design ? design() : NULL;
        to->declared = text != NULL;
        copy_text(to->design, sizeof to->design, text, "deltaproof_subject_design");
        copy_text(to->recurrences, sizeof to->recurrences, recurrences ? recurrences() : NULL,
                  "deltaproof_subject_recurrences");
    }
    host.me->at = DP_PHASE_DONE;
}

static void load_and_call(void) {
    void *lib = dlopen(host.c->lib, RTLD_NOW | RTLD_LOCAL);
    if (!lib) leave("cannot be loaded: %s%s", dlerror(), "");
    const about_function about = (about_function)dlsym(lib, "deltaproof_subject_about");
    const run_function run = (run_function)dlsym(lib, "deltaproof_subject_run");
    if (!about || !run)
        leave("does not export %s%s",
              !about ? "deltaproof_subject_about" : "deltaproof_subject_run", "");
    Dl_info where;
    if (dladdr((void *)run, &where)) host.base = (uint64_t)(uintptr_t)where.dli_fbase;
    if (host.c->about)
        call_about(about, (design_function)dlsym(lib, "deltaproof_subject_design"),
                   (design_function)dlsym(lib, "deltaproof_subject_recurrences"));
    else
        call_run(run);
}

/* ---- the process ----------------------------------------------------------------------------- */

/* The limit is on private, writable memory (RLIMIT_DATA). Address space that is only reserved, as
 * CUDA and the address sanitizer do in terabytes, is not counted. Where the machine runs out all
 * the same, this process goes before any other. */
void dp_subject_limit_memory(int64_t memory) {
    const struct rlimit none = {0, 0}, data = {(rlim_t)memory, (rlim_t)memory};
    setrlimit(RLIMIT_CORE, &none);
    if (memory > 0) setrlimit(RLIMIT_DATA, &data);
    const int fd = open("/proc/self/oom_score_adj", O_WRONLY | O_CLOEXEC);
    if (fd < 0) return;
    /* NOLINTNEXTLINE(bugprone-branch-clone): glibc wants the result of write looked at */
    if (write(fd, "1000", 4) != 4)
        close(fd);
    else
        close(fd);
}

static void *map_file(int fd, int64_t bytes, int access) {
    void *at = mmap(NULL, (size_t)bytes, access, MAP_SHARED, fd, 0);
    if (at == MAP_FAILED) _exit(125);
    return at;
}

__attribute__((constructor)) static void host_main(int argc, char **argv) {
    if (argc != DP_PROCESSES_ARGC || strcmp(argv[0], DP_SUBJECT_HOST)) return;
    /* NOLINTNEXTLINE(cert-err34-c): a word that this program wrote */
    host.rank = atoi(argv[1]);
    host.c = map_file(DP_SUBJECT_GIVEN_FD, sizeof *host.c, PROT_READ);
    const int64_t said = dp_subject_pages(sizeof *host.said);
    const int64_t made = said + host.c->processes * DP_SUBJECT_PIECE;
    host.said = map_file(DP_SUBJECT_MADE_FD, made, PROT_READ | PROT_WRITE);
    host.gathered = (char *)host.said + said;
    host.me = &host.said->state[host.rank];
    host.me->at = DP_PHASE_LOADING;
    map_regions();
    if (host.c->about || host.c->calls < 2) {
        close(DP_SUBJECT_GIVEN_FD);
        close(DP_SUBJECT_MADE_FD);
    }
    catch_faults();
    dp_subject_limit_memory(SHADOW_MEMORY ? 0 : host.c->memory);
    load_and_call();
    _exit(0);
}
