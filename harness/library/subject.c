/* harness/library/subject.c - a kernel in a shared library as a subject: lays out what it is given,
 * starts the processes that load it, and takes its results (subject.h). What runs in those
 * processes is in subject_host.c, what both share in subject_shared.h. */
#define _GNU_SOURCE
#include "subject.h"
#include "ref/vocabulary/context.h"
#include "ref/vocabulary/text.h"
#include "subject_shared.h"

#include <errno.h>
#include <fcntl.h>
#include <math.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

const char *const dp_subject_outcomes[DP_SUBJECT_NOUTCOMES] = {
    "returned", "unsupported", "failed", "crashed", "hung", "out of bounds", "exited"};

#define CANARY 0xA5
static const uint64_t UNWRITTEN = 0x7ff8deadbeef0b5eULL;

/* ---- shared memory --------------------------------------------------------------------------- */

/* c is this program's own copy; given and made are the two files with their sizes, map is `made`.
 */
typedef struct {
    dp_subject_control *c;
    int given, made;
    int64_t given_size, made_size;
    char *map;
} shared;

static dp_status memory_error(dp_err *e) {
    return dp_fail(e, DP_EIO, "shared memory for a subject: %s", strerror(errno));
}

static void shared_new(shared *s, const dp_subject *lib, int ranks, int processes) {
    *s = (shared){.c = dp_calloc(1, sizeof *s->c), .given = -1, .made = -1};
    snprintf(s->c->lib, sizeof s->c->lib, "%s", lib->path);
    s->c->ranks = ranks;
    s->c->processes = processes;
    s->c->memory = lib->memory;
    s->given_size = dp_subject_pages(sizeof *s->c);
    s->made_size = dp_subject_pages(sizeof(dp_subject_said)) + processes * DP_SUBJECT_PIECE;
}

static void shared_free(shared *s) {
    if (s->map) munmap(s->map, (size_t)s->made_size);
    if (s->given >= 0) close(s->given);
    if (s->made >= 0) close(s->made);
    free(s->c);
}

/* A file of memory of a fixed size, mapped; NULL: errno says why. */
static char *new_file(int *fd, int64_t size) {
    *fd = memfd_create("deltaproof-subject", MFD_CLOEXEC | MFD_ALLOW_SEALING);
    if (*fd < 0 || ftruncate(*fd, size)) return NULL;
    char *map = mmap(NULL, (size_t)size, PROT_READ | PROT_WRITE, MAP_SHARED, *fd, 0);
    return map == MAP_FAILED ? NULL : map;
}

static dp_subject_region *add(shared *s, int process, const char *name, int input, int ndim,
                              const int64_t *shape) {
    int *n = &s->c->nregion, i = 0;
    while (i < *n && s->c->region[process][i].name[0])
        i++;
    if (i == *n) ++*n;
    dp_subject_region *r = &s->c->region[process][i];
    int64_t *size = input ? &s->given_size : &s->made_size;
    snprintf(r->name, sizeof r->name, "%s", name);
    r->input = input;
    r->ndim = ndim;
    r->n = 1;
    for (int a = 0; a < ndim; a++)
        r->n *= r->shape[a] = shape[a];
    r->span = dp_subject_pages((r->n * 8 + 63) / 64 * 64 +
                               64); /* at least 64 bytes of pattern before it */
    r->offset = *size;
    *size += r->span;
    return r;
}

static char *bytes_of(const shared *s, const dp_subject_region *r) { return s->map + r->offset; }
static double *data_of(const shared *s, const dp_subject_region *r) {
    return (double *)(bytes_of(s, r) + dp_subject_begin(r));
}

static const dp_subject_region *find(const shared *s, int process, const char *name) {
    for (int i = 0; i < s->c->nregion; i++)
        if (!s->c->region[process][i].input && !strcmp(s->c->region[process][i].name, name))
            return &s->c->region[process][i];
    return NULL;
}

typedef struct {
    const char *name;
    const double *x;
    int per_token, ndim;
    int64_t shape[5];
} array; /* shape of the whole problem; per_token: axis 0 is T */

static void fill_inputs(const shared *s, const dp_problem *p, const array *a, int n, char *map) {
    for (int r = 0; r < s->c->processes; r++)
        for (int i = 0; i < s->c->nregion; i++) {
            const dp_subject_region *x = &s->c->region[r][i];
            double *data = (double *)(map + x->offset + dp_subject_begin(x));
            if (!x->input) continue;
            memset(map + x->offset, CANARY, (size_t)x->span);
            if (!strcmp(x->name, "cu")) memcpy(data, p->cu, sizeof(int64_t) * (size_t)x->n);
            for (int j = 0; j < n; j++)
                if (!strcmp(a[j].name, x->name))
                    memcpy(data, a[j].x + (a[j].per_token ? r * x->n : 0),
                           sizeof(double) * (size_t)x->n);
        }
}

static void fill_outputs(const shared *s) {
    for (int r = 0; r < s->c->processes; r++)
        for (int i = 0; i < s->c->nregion; i++) {
            const dp_subject_region *x = &s->c->region[r][i];
            if (x->input) continue;
            memset(bytes_of(s, x), CANARY, (size_t)x->span);
            for (int64_t z = 0; z < x->n; z++)
                memcpy(&data_of(s, x)[z], &UNWRITTEN, 8);
        }
}

/* Both files as the processes find them. After its seal no process, this one neither, can change
 * `given`. */
static dp_status shared_make(shared *s, const dp_problem *p, const array *a, int n, dp_err *e) {
    pthread_barrierattr_t shared_barrier;
    char *given = new_file(&s->given, s->given_size);
    if (!given) return memory_error(e);
    memcpy(given, s->c, sizeof *s->c);
    fill_inputs(s, p, a, n, given);
    munmap(given, (size_t)s->given_size);
    if (fcntl(s->given, F_ADD_SEALS, F_SEAL_WRITE | F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL))
        return memory_error(e);
    s->map = new_file(&s->made, s->made_size);
    if (!s->map || fcntl(s->made, F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL))
        return memory_error(e);
    pthread_barrierattr_init(&shared_barrier);
    pthread_barrierattr_setpshared(&shared_barrier, PTHREAD_PROCESS_SHARED);
    pthread_barrier_init(&((dp_subject_said *)s->map)->barrier, &shared_barrier,
                         (unsigned)s->c->processes);
    fill_outputs(s);
    return DP_OK;
}

/* ---- what the processes say of themselves ---------------------------------------------------- */

/* One look, after which it cannot change; numbers outside of what they may be are no statement. */
static dp_subject_state look(const shared *s, int r) {
    char why[sizeof((dp_subject_state *)0)->why];
    dp_subject_state st;
    memcpy(&st, &((const dp_subject_said *)s->map)->state[r], sizeof st);
    st.why[sizeof st.why - 1] = 0;
    dp_text_printable(st.why, why, sizeof why);
    memcpy(st.why, why, sizeof why);
    if ((int)st.at < DP_PHASE_IDLE || st.at > DP_PHASE_REFUSED) st.at = DP_PHASE_RUNNING;
    if (st.region < 0 || st.region >= s->c->nregion) st.region = -1;
    return st;
}

static void text_of(char *text, size_t size) {
    char shown[512];
    text[size - 1] = 0;
    dp_text_printable(text, shown, size < sizeof shown ? size : sizeof shown);
    memcpy(text, shown, size < sizeof shown ? size : sizeof shown);
}

static dp_subject_about look_about(const shared *s) {
    dp_subject_about a;
    memcpy(&a, &((const dp_subject_said *)s->map)->about, sizeof a);
    text_of(a.name, sizeof a.name);
    text_of(a.base, sizeof a.base);
    text_of(a.chain, sizeof a.chain);
    text_of(a.writes, sizeof a.writes);
    text_of(a.design, sizeof a.design);
    return a;
}

static const char *signal_name(int sig) {
    const char *n = sigabbrev_np(sig);
    return n ? n : "?";
}

static const char *base_name(const char *path) {
    return strrchr(path, '/') ? strrchr(path, '/') + 1 : path;
}

static void on_rank(const shared *s, int r, char *text, size_t size) {
    if (s->c->processes > 1)
        snprintf(text, size, "rank %d ", r);
    else
        *text = 0;
}

/* ---- processes ------------------------------------------------------------------------------- */

static double now(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

/* How a group of processes ended. */
typedef struct {
    dp_subject_outcome outcome;
    char why[512];
} ending;

static void say_signal(const shared *s, int r, int sig, ending *end) {
    const dp_subject_state st = look(s, r);
    const size_t size = sizeof end->why;
    char who[24], at[288] = "";
    on_rank(s, r, who, sizeof who);
    if (st.have_fault && st.pc && st.pc < 1u << 30)
        snprintf(at, sizeof at, ", at %.255s+0x%llx", base_name(s->c->lib),
                 (unsigned long long)st.pc);
    end->outcome = DP_SUBJECT_CRASHED;
    if (!st.have_fault)
        snprintf(end->why, size, "%scrashed: SIG%s%s", who, signal_name(sig), at);
    else if (st.region < 0)
        snprintf(end->why, size, "%scrashed: SIG%s at address 0x%llx%s", who, signal_name(sig),
                 (unsigned long long)st.address, at);
    else {
        const dp_subject_region *x = &s->c->region[r][st.region];
        end->outcome = DP_SUBJECT_OUT_OF_BOUNDS;
        if (x->input && !st.before && st.wrote && st.off < x->n * 8 && st.address)
            snprintf(end->why, size, "%swrote to the input %s%s", who, x->name, at);
        else
            snprintf(end->why, size, "%s%s %lld bytes %s of %s%s", who, st.wrote ? "wrote" : "read",
                     (long long)st.off, st.before ? "before the beginning" : "past the end",
                     x->name, at);
    }
}

/* One process of the group has ended. 1: that decides. */
static int ended(const shared *s, int r, int status, ending *end) {
    const dp_subject_state st = look(s, r);
    const size_t size = sizeof end->why;
    char who[24];
    on_rank(s, r, who, sizeof who);
    if (WIFSIGNALED(status))
        say_signal(s, r, WTERMSIG(status), end);
    else if (st.at == DP_PHASE_REFUSED) {
        end->outcome = DP_SUBJECT_REFUSED;
        snprintf(end->why, size, "%s%.400s", who, st.why);
    } else if (st.at != DP_PHASE_DONE) {
        end->outcome = DP_SUBJECT_EXITED;
        snprintf(end->why, size, "%sended its process with exit status %d before it returned", who,
                 WEXITSTATUS(status));
    } else if (st.ret == DP_SUBJECT_UNSUPPORTED) {
        end->outcome = DP_SUBJECT_REFUSED;
        snprintf(end->why, size, "%.400s", st.why[0] ? st.why : "does not take this problem");
    } else if (st.ret) {
        end->outcome = DP_SUBJECT_SAYS_FAILED;
        snprintf(end->why, size, "%sfailed: returned %d%s%.400s", who, st.ret,
                 st.why[0] ? ": " : "", st.why);
    } else
        return 0;
    return 1;
}

/* A rank that has returned leaves the others waiting for ever in a collective that it did not
 * enter. */
static int deserted(const shared *s, const char *alive, ending *end) {
    int waiting = 0, top = 0, gone = -1;
    for (int r = 0; r < s->c->processes; r++) {
        const dp_subject_state st = look(s, r);
        if (!alive[r] || st.at != DP_PHASE_GATHERING) continue;
        waiting++;
        if (st.gathers > top) top = st.gathers;
    }
    for (int r = 0; r < s->c->processes; r++)
        if (!alive[r] && look(s, r).gathers < top) gone = r;
    if (!waiting || gone < 0) return 0;
    const int calls = look(s, gone).gathers;
    end->outcome = DP_SUBJECT_HUNG;
    snprintf(
        end->why, sizeof end->why,
        "would wait for ever: rank %d returned after %d calls of all_gather, others are in call %d",
        gone, calls, calls + 1);
    return 1;
}

static void say_hung(const shared *s, const char *alive, double limit, ending *end) {
    int n = snprintf(end->why, sizeof end->why, "did not return within %g s", limit);
    const int size = (int)sizeof end->why;
    end->outcome = DP_SUBJECT_HUNG;
    for (int r = 0; r < s->c->processes && s->c->processes > 1; r++) {
        const dp_subject_state st = look(s, r);
        const char *what = !alive[r]                     ? "returned"
                           : st.at == DP_PHASE_GATHERING ? "waits in all_gather"
                           : st.at == DP_PHASE_LOADING   ? "is being loaded"
                                                         : "computes";
        if (n < size)
            n +=
                snprintf(end->why + n, (size_t)(size - n), "%s rank %d %s", r ? "," : ":", r, what);
        if (n < size && st.at == DP_PHASE_GATHERING && alive[r])
            n += snprintf(end->why + n, (size_t)(size - n), " number %d", st.gathers);
    }
}

static void say_unwatched(int status, ending *end) {
    end->outcome = DP_SUBJECT_EXITED;
    if (WIFSIGNALED(status))
        snprintf(end->why, sizeof end->why, "ended the process that watches it: SIG%s",
                 signal_name(WTERMSIG(status)));
    else
        snprintf(end->why, sizeof end->why, "the process that watches it ended with exit status %d",
                 WEXITSTATUS(status));
}

/* Starts all processes and waits for them, or for the limit, or for the first that fails; then ends
 * whatever is left, with all that they started. */
static dp_status run_processes(const shared *s, double limit, ending *end, dp_err *e) {
    const int n = s->c->processes, fd[] = {s->given, s->made};
    const double t0 = now();
    char alive[DP_SUBJECT_MAX_RANKS];
    dp_processes group;
    int left = n, stop = 0, r, status;
    *end = (ending){.outcome = DP_SUBJECT_RETURNED};
    const dp_status st = dp_processes_start(&group, DP_SUBJECT_HOST, n, fd, 2, e);
    if (st) return st;
    memset(alive, 1, sizeof alive);
    while (left && !stop) {
        const double rest = limit - (now() - t0);
        const int came = dp_processes_wait(&group, rest < 0.02 ? rest : 0.02, &r, &status);
        if (came < 0) {
            say_unwatched(status, end);
            stop = 1;
        } else if (came && r >= 0 && r < n && alive[r]) {
            alive[r] = 0;
            left--;
            stop = ended(s, r, status, end);
        } else if (rest <= 0) {
            say_hung(s, alive, limit, end);
            stop = 1;
        }
        if (left && !stop) stop = deserted(s, alive, end);
    }
    dp_processes_end(&group);
    return DP_OK;
}

/* ---- about ----------------------------------------------------------------------------------- */

static dp_status read_writes(const char *path, char *writes, dp_subject *s, dp_err *e) {
    char *save;
    int any = 0;
    for (char *t = strtok_r(writes, " ", &save); t; t = strtok_r(NULL, " ", &save)) {
        int f = -1;
        for (int i = 0; i < DP_NRESULTS; i++)
            if (!strcmp(t, dp_result_fields[i].name)) f = i;
        const int g = f < 0 ? dp_stage_tensor_find(t) : -1;
        if (f < 0 && (g < 0 || strcmp(t, dp_stage_tensors[g].name)))
            return dp_fail(
                e, DP_EINPUT,
                "%s: writes '%s', which is no output and no stage of deltaproof_subject.h", path,
                t);
        if (f >= 0)
            s->writes[f] = 1;
        else
            s->writes_stage[g] = 1;
        any = 1;
    }
    return any ? DP_OK : dp_fail(e, DP_EINPUT, "%s: says that it writes nothing", path);
}

static dp_status read_about(dp_subject_about a, const char *path, dp_subject *s, dp_err *e) {
    if (a.abi != DP_SUBJECT_ABI)
        return dp_fail(
            e, DP_EINPUT,
            "%s: has version %d of deltaproof_subject.h, this program has %d: build it again", path,
            a.abi, DP_SUBJECT_ABI);
    int base = -1;
    for (int i = 0; i < DP_NBASES; i++)
        if (!strcmp(a.base, dp_base_names[i])) base = i;
    if (base < 0)
        return dp_fail(e, DP_EINPUT, "%s: claims base '%s'; known: fp64 fp32 bf16", path, a.base);
    if (dp_format_find(a.chain) < 0)
        return dp_fail(e, DP_EINPUT,
                       "%s: claims chain '%s'; known: fp64 fp32 tf32x3 tf32 tf32rz bf16 bf16st",
                       path, a.chain);
    if (a.kind != DP_SUBJECT_WHOLE && a.kind != DP_SUBJECT_PER_RANK)
        return dp_fail(e, DP_EINPUT,
                       "%s: kind %d is neither DP_SUBJECT_WHOLE nor DP_SUBJECT_PER_RANK", path,
                       a.kind);
    if (a.max_ranks < 1 || a.max_ranks > DP_SUBJECT_MAX_RANKS)
        return dp_fail(e, DP_EINPUT, "%s: max_ranks %d is not within 1 to %d", path, a.max_ranks,
                       DP_SUBJECT_MAX_RANKS);
    if (a.declared) {
        dp_design d;
        dp_err why = {0};
        if (dp_design_parse(a.design, (dp_base)base, &d, &why))
            return dp_fail(e, DP_EINPUT, "%s: %s", path, why.msg);
        s->design = strdup(a.design);
    }
    s->base = base;
    s->chain = dp_format_find(a.chain);
    s->per_rank = a.kind;
    s->max_ranks = a.max_ranks;
    dp_text_printable(a.name[0] ? a.name : base_name(path), s->name, sizeof s->name);
    return read_writes(path, a.writes, s, e);
}

static dp_status check_file(const char *path, dp_err *e) {
    struct stat st;
    if (stat(path, &st)) return dp_fail(e, DP_EINPUT, "%s: %s", path, strerror(errno));
    return S_ISREG(st.st_mode) ? DP_OK : dp_fail(e, DP_EINPUT, "%s: not a regular file", path);
}

dp_status dp_subject_open(const char *path, double limit_s, int64_t memory, dp_subject *s,
                          dp_err *e) {
    shared m;
    ending end;
    *s = (dp_subject){.memory = memory > 0 ? memory : dp_memory_bytes()};
    dp_status st = check_file(path, e);
    if (st) return st;
    s->path = realpath(path, NULL);
    const int why = !s->path ? errno : strlen(s->path) >= sizeof m.c->lib ? ENAMETOOLONG : 0;
    if (why) {
        dp_subject_close(s);
        return dp_fail(e, DP_EINPUT, "%s: %s", path, strerror(why));
    }
    shared_new(&m, s, 1, 1);
    m.c->about = 1;
    st = shared_make(&m, NULL, NULL, 0, e);
    if (!st) st = run_processes(&m, limit_s > 0 ? limit_s : DP_SUBJECT_LIMIT_S, &end, e);
    if (!st && end.outcome != DP_SUBJECT_RETURNED)
        st = dp_fail(e, DP_EINPUT, "%s: %s", path, end.why);
    if (!st) st = read_about(look_about(&m), path, s, e);
    shared_free(&m);
    if (st) dp_subject_close(s);
    return st;
}

void dp_subject_close(dp_subject *s) {
    free(s->path);
    free(s->design);
    *s = (dp_subject){0};
}

/* ---- one run --------------------------------------------------------------------------------- */

static int input_arrays(const dp_problem *p, int backward, array *a) {
    const int64_t T = p->T, H = p->H, HV = p->HV, K = p->K, V = p->V, R = p->R, Kg = dp_Kg(p),
                  N = p->Nseq;
    const array all[] = {{"q", p->q, 1, 3, {T, H, K}},
                         {"k", p->k, 1, 4, {T, H, R, K}},
                         {"v", p->v, 1, 4, {T, HV, R, V}},
                         {"g", p->g, 1, 3, {T, HV, Kg}},
                         {"beta", p->beta, 1, 3, {T, HV, R}},
                         {"A_log", p->A_log, 0, 1, {HV}},
                         {"dt_bias", p->dt_bias, 0, 2, {HV, Kg}},
                         {"initial_state", p->s0, 0, 4, {N, HV, K, V}},
                         {"do", backward ? p->dout : NULL, 1, 3, {T, HV, V}},
                         {"dfinal_state", backward ? p->dstate : NULL, 0, 4, {N, HV, K, V}}};
    int n = 0;
    for (size_t i = 0; i < sizeof all / sizeof *all; i++)
        if (all[i].x) a[n++] = all[i];
    return n;
}

static int field_array(const dp_problem *p, int field, array *a) {
    const dp_result_field *f = &dp_result_fields[field];
    *a = (array){.name = f->name, .per_token = f->kind == DP_OF_TOKENS};
    a->ndim = dp_result_axes(p, field, a->shape);
    return dp_result_exists(p, field);
}

static const int64_t *local_shape(const array *a, int processes, int64_t *s) {
    memcpy(s, a->shape, sizeof a->shape);
    if (a->per_token) s[0] /= processes;
    return s;
}

/* Shape of a stage in one call: axes R kept, the axis of ranks left out where a rank is a process.
 */
static int stage_shape(const dp_problem *p, const dp_subject *s, int N, int process, int stage,
                       int64_t *out) {
    int64_t w[5];
    const int ndim = dp_stage_tensor_shape(p, N, stage, w), kind = dp_stage_tensors[stage].kind,
              split = s->per_rank && N > 1;
    int n = 0;
    if (kind == DP_PER_RANK && split) {
        memcpy(out, w + 1, sizeof *w * 3);
        return 3;
    }
    if (kind == DP_PER_CHUNK) w[0] = dp_stage_tensor_chunks(p, N, split ? process : -1);
    if (kind == DP_PER_TOKEN && split) w[0] /= N;
    const int keyed = stage == DP_AKK || stage == DP_W || stage == DP_KG || stage == DP_U ||
                      stage == DP_V_NEW || stage == DP_DV_LOCAL || stage == DP_DV_NEW;
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
        for (int i = 0; i < n; i++)
            add(m, r, a[i].name, 1, a[i].ndim, local_shape(&a[i], np, shape));
        add(m, r, "cu", 1, 1, &ncu);
        for (int i = 0; i < DP_NRESULTS; i++) {
            array f;
            if (s->writes[i] && (backward || !dp_result_fields[i].backward) &&
                field_array(p, i, &f))
                add(m, r, f.name, 0, f.ndim, local_shape(&f, np, shape));
        }
        for (int i = 0; i < DP_NSTAGE_TENSORS; i++) {
            if (!s->writes_stage[i] || (dp_stage_tensors[i].backward && !backward)) continue;
            const int ndim = stage_shape(p, s, N, r, i, shape);
            add(m, r, dp_stage_tensors[i].name, 0, ndim, shape);
        }
    }
}

static void describe(dp_subject_control *c, const dp_problem *p, const char *input_format, int N,
                     dp_base base, dp_format chain, int backward) {
    c->p = (deltaproof_subject_problem){.abi = DP_SUBJECT_ABI,
                                        .size = sizeof c->p,
                                        .H = p->H,
                                        .HV = p->HV,
                                        .K = p->K,
                                        .V = p->V,
                                        .R = p->R,
                                        .Kg = dp_Kg(p),
                                        .Nseq = p->Nseq,
                                        .gate_form = p->gate,
                                        .beta_form = p->beta_form,
                                        .l2norm = p->l2norm,
                                        .backward = backward,
                                        .ranks = N,
                                        .T = p->T,
                                        .tokens = p->T,
                                        .scale = p->scale,
                                        .lower_bound = p->lower_bound};
    snprintf(c->input_format, sizeof c->input_format, "%s", input_format);
    snprintf(c->base, sizeof c->base, "%s", dp_base_names[base]);
    snprintf(c->chain, sizeof c->chain, "%s", dp_formats[chain].name);
}

/* What is left of the pages around each output must be as it was (inputs cannot be written at all).
 */
static void check_patterns(const shared *m, dp_subject_result *out) {
    for (int r = 0; r < m->c->processes; r++)
        for (int i = 0; i < m->c->nregion; i++) {
            const dp_subject_region *x = &m->c->region[r][i];
            if (x->input) continue;
            const unsigned char *b = (const unsigned char *)bytes_of(m, x);
            const int64_t from = dp_subject_begin(x), to = from + x->n * 8;
            int64_t before = 0, after = 0;
            for (int64_t z = 0; z < from; z++)
                before += b[z] != CANARY;
            for (int64_t z = to; z < x->span; z++)
                after += b[z] != CANARY;
            if (!before && !after) continue;
            char who[24];
            on_rank(m, r, who, sizeof who);
            out->outcome = DP_SUBJECT_OUT_OF_BOUNDS;
            snprintf(out->why, sizeof out->why, "%swrote %s of %s: %lld bytes there are changed",
                     who, after ? "past the end" : "before the beginning", x->name,
                     (long long)(after ? after : before));
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
        const int r =
            m->c->processes == 1
                ? 0
                : owner(p, m->c->processes, i,
                        field ==
                            DP_RESULT_FINAL_STATE); /* one process owns all, empty sequences too */
        const double *own =
            field == DP_RESULT_FINAL_STATE ? p->s0 : p->dstate; /* empty: what enters leaves */
        if (r >= 0)
            memcpy(x + i * n, data_of(m, find(m, r, dp_result_fields[field].name)) + i * n,
                   sizeof *x * (size_t)n);
        else
            for (int64_t z = 0; z < n; z++)
                x[i * n + z] = own ? own[i * n + z] : 0;
    }
}

static void collect(const shared *m, const dp_problem *p, int N, dp_subject_result *out) {
    for (int i = 0; i < DP_NRESULTS; i++) {
        int64_t rows, width;
        dp_result_shape(p, i, &rows, &width);
        if (!find(m, 0, dp_result_fields[i].name)) continue;
        double *x = *dp_result_at(&out->r, i) = dp_doubles(rows * width);
        if (dp_result_fields[i].kind == DP_OF_SEQUENCES)
            collect_states(m, p, i, x);
        else
            for (int r = 0; r < (dp_result_fields[i].kind == DP_OF_HEADS ? 1 : m->c->processes);
                 r++) {
                const dp_subject_region *g = find(m, r, dp_result_fields[i].name);
                memcpy(x + r * g->n, data_of(m, g), sizeof *x * (size_t)g->n);
            }
    }
    for (int i = 0; i < DP_NSTAGE_TENSORS; i++) {
        if (!find(m, 0, dp_stage_tensors[i].name)) continue;
        double *x = out->stage[i] = dp_doubles(dp_stage_tensor_size(p, N, i));
        for (int r = 0; r < m->c->processes; r++) {
            const dp_subject_region *g = find(m, r, dp_stage_tensors[i].name);
            memcpy(x, data_of(m, g), sizeof *x * (size_t)g->n);
            x += g->n;
        }
    }
}

dp_status dp_subject_run(const dp_subject *s, const dp_problem *p, const char *input_format, int N,
                         dp_base base, dp_format chain, int backward, double limit_s,
                         dp_subject_result *out, dp_err *e) {
    shared m;
    array a[10];
    ending end;
    *out = (dp_subject_result){0};
    if (N < 1 || N > DP_SUBJECT_MAX_RANKS || p->T % N)
        return dp_fail(e, DP_EINPUT, "%lld tokens over %d ranks: not for a subject",
                       (long long)p->T, N);
    const int n = input_arrays(p, backward, a);
    const double t0 = now();
    shared_new(&m, s, N, s->per_rank ? N : 1);
    describe(m.c, p, input_format, N, base, chain, backward);
    lay_out(&m, s, p, N, backward);
    dp_status st = shared_make(&m, p, a, n, e);
    if (!st) st = run_processes(&m, limit_s, &end, e);
    if (!st) {
        out->outcome = end.outcome;
        memcpy(out->why, end.why, sizeof out->why);
        out->seconds = now() - t0;
        if (out->outcome == DP_SUBJECT_RETURNED) check_patterns(&m, out);
        collect(&m, p, N, out);
    }
    shared_free(&m);
    return st;
}

void dp_subject_result_free(dp_subject_result *r) {
    dp_result_free(&r->r);
    for (int i = 0; i < DP_NSTAGE_TENSORS; i++)
        free(r->stage[i]);
    *r = (dp_subject_result){0};
}

int dp_subject_unwritten(double x) { return !memcmp(&x, &UNWRITTEN, sizeof x); }

int64_t dp_subject_flaws(const double *x, int64_t n, char *text, size_t size) {
    int64_t unwritten = 0, wild = 0, first = -1, odd = -1;
    *text = 0;
    for (int64_t i = 0; i < n; i++) {
        if (dp_subject_unwritten(x[i]))
            first = unwritten++ ? first : i;
        else if (!isfinite(x[i]))
            odd = wild++ ? odd : i;
    }
    if (unwritten == n)
        snprintf(text, size, "was never written");
    else if (unwritten)
        snprintf(text, size, "%lld of %lld entries were never written, the first is entry %lld",
                 (long long)unwritten, (long long)n, (long long)first);
    else if (wild)
        snprintf(text, size, "%lld of %lld entries are NaN or Inf, the first is entry %lld",
                 (long long)wild, (long long)n, (long long)odd);
    return unwritten;
}
