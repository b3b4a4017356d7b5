/* A kernel in a shared library as a subject: what it says of itself, and one run (subject.h). Its
 * processes run the code of subject_host.c. */
#include "ref/vocabulary/recurrence.h"
#include "ref/vocabulary/text.h"
#include "subject_parts.h"

#include <errno.h>
#include <fcntl.h>
#include <omp.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

/* Writes "rank r " where there are several processes, else nothing. */
static void subject_on_rank(const dp_subject_memory *s, int r, char *text, size_t size) {
    if (s->c->processes > 1)
        snprintf(text, size, "rank %d ", r);
    else
        *text = 0;
}

/* ---- shared memory --------------------------------------------------------------------------- */

static dp_status memory_error(dp_err *e) {
    return dp_fail(e, DP_EIO, "shared memory for a subject: %s", strerror(errno));
}

/* Where arrays begin in `made`. */
static int64_t first_output(const dp_subject_memory *s) {
    return dp_subject_pages(sizeof(dp_subject_said)) + s->c->processes * DP_SUBJECT_PIECE;
}

/* Begins the description of a group of processes that run the library. */
static void subject_shared_new(dp_subject_memory *s, const dp_subject *lib, int ranks,
                               int processes) {
    *s = (dp_subject_memory){.c = dp_calloc(1, sizeof *s->c), .given = -1, .made = -1};
    snprintf(s->c->lib, sizeof s->c->lib, "%s", lib->path);
    s->c->ranks = ranks;
    s->c->processes = processes;
    s->c->calls = 1;
    s->c->memory = lib->memory;
    s->given_size = dp_subject_pages(sizeof *s->c);
    s->made_size = first_output(s);
}

/* Unmaps and closes both files. */
static void subject_shared_free(dp_subject_memory *s) {
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

/* Adds an array of a process, with its shape; returns its region. */
static dp_subject_region *subject_add_array(dp_subject_memory *s, int process, const char *name,
                                            int input, int ndim, const int64_t *shape) {
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

/* The processes make n calls of these problems, p[0] or one other; asked before files are made. */
static void subject_shared_calls(dp_subject_memory *s, int n, const dp_problem *const *p) {
    int others = 0;
    s->c->calls = n;
    s->c->given_step = s->given_size - dp_subject_pages(sizeof *s->c);
    s->c->made_step = s->made_size - first_output(s);
    for (int i = 0; i < n; i++)
        others |= s->c->given_of[i] = p[i] != p[0];
    s->given_size += others * s->c->given_step;
    s->made_size += (n - 1) * s->c->made_step;
}

/* A region of the outputs, with the guarded bytes before its data. */
static char *subject_bytes_of(const dp_subject_memory *s, const dp_subject_region *r) {
    return s->map + r->offset + s->call * s->c->made_step;
}
/* The data of a region of the outputs. */
static double *subject_data_of(const dp_subject_memory *s, const dp_subject_region *r) {
    return (double *)(subject_bytes_of(s, r) + dp_subject_begin(r));
}

/* The output of that name; NULL: the process has none. */
static const dp_subject_region *subject_find_array(const dp_subject_memory *s, int process,
                                                   const char *name) {
    for (int i = 0; i < s->c->nregion; i++)
        if (!s->c->region[process][i].input && !strcmp(s->c->region[process][i].name, name))
            return &s->c->region[process][i];
    return NULL;
}

static dp_subject_array array_of(const dp_problem *p, const dp_tensor_field *f, const char *name) {
    const dp_dims d = dp_problem_dims(p);
    dp_subject_array a = {.name = name, .per_token = f->kind == DP_OF_TOKENS};
    a.ndim = dp_field_axes(f, &d, a.shape);
    return a;
}

/* The inputs of a problem as arrays, those of the token before a call too, a [2 * DP_NINPUTS].
 * Returns their number. */
static int subject_input_arrays(const dp_problem *p, int backward, dp_subject_array *a) {
    int n = 0;
    for (int i = 0; i < DP_NINPUTS; i++) {
        const dp_tensor_field *f = &dp_input_fields[i];
        if (!dp_input_of(p, i) || (f->backward && !backward)) continue;
        a[n] = array_of(p, f, dp_subject_inputs[i].name);
        a[n++].x = dp_input_of(p, i);
    }
    for (int i = 0; i < DP_NINPUTS; i++) {
        if (!dp_halo_of(p, i)) continue;
        a[n] = array_of(p->before, &dp_input_fields[i], dp_subject_inputs[i].previous);
        a[n].per_token = 0;
        a[n++].x = dp_halo_of(p, i);
    }
    return n;
}

/* The input of that name that is no tensor of doubles; NULL: it is one. */
static const int64_t *integers_of(const dp_subject_memory *s, const dp_problem *p,
                                  const char *name) {
    dp_pool_list list[DP_POOL_LISTS];
    const int n = s->pool ? dp_pool_lists(s->pool, p, list) : 0;
    for (int i = 0; i < n; i++)
        if (!strcmp(name, list[i].name)) return list[i].x;
    return strcmp(name, "cu") ? NULL : p->cu;
}

static void fill_inputs(const dp_subject_memory *s, const dp_problem *p, int backward, char *map) {
    dp_subject_array a[2 * DP_NINPUTS];
    const int n = subject_input_arrays(p, backward, a);
    for (int r = 0; r < s->c->processes; r++)
        for (int i = 0; i < s->c->nregion; i++) {
            const dp_subject_region *x = &s->c->region[r][i];
            double *data = (double *)(map + x->offset + dp_subject_begin(x));
            if (!x->input) continue;
            memset(map + x->offset, 0xff, (size_t)x->span); /* NaN beside the array */
            const int64_t *const integers = integers_of(s, p, x->name);
            if (integers) memcpy(data, integers, sizeof *integers * (size_t)x->n);
            for (int j = 0; j < n; j++)
                if (!strcmp(a[j].name, x->name))
                    memcpy(data, a[j].x + (a[j].per_token ? r * x->n : 0),
                           sizeof(double) * (size_t)x->n);
        }
}

static void fill_outputs(const dp_subject_memory *s) {
    for (int r = 0; r < s->c->processes; r++)
        for (int i = 0; i < s->c->nregion; i++) {
            const dp_subject_region *x = &s->c->region[r][i];
            if (x->input) continue;
            memset(subject_bytes_of(s, x), DP_SUBJECT_CANARY, (size_t)x->span);
            if (!strcmp(x->name, DP_SUBJECT_POOL)) {
                memcpy(subject_data_of(s, x), s->pool->state, sizeof(double) * (size_t)x->n);
                continue;
            }
            for (int64_t z = 0; z < x->n; z++)
                memcpy(&subject_data_of(s, x)[z], &DP_SUBJECT_UNWRITTEN, 8);
        }
}

/* Both files as the processes find them. After its seal no process, this one neither, can change
 * `given`. */
static dp_status subject_shared_make(dp_subject_memory *s, const dp_problem *const *p, int backward,
                                     dp_err *e) {
    pthread_barrierattr_t shared_barrier;
    char *given = new_file(&s->given, s->given_size);
    if (!given) return memory_error(e);
    memcpy(given, s->c, sizeof *s->c);
    for (int i = 0; p && i < s->c->calls; i++)
        fill_inputs(s, p[i], backward, given + s->c->given_of[i] * s->c->given_step);
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
    for (s->call = 0; s->call < s->c->calls; s->call++)
        fill_outputs(s);
    s->call = 0;
    return DP_OK;
}

/* ---- one run --------------------------------------------------------------------------------- */

static const int64_t *local_shape(const dp_subject_array *a, int processes, int64_t *s) {
    memcpy(s, a->shape, sizeof a->shape);
    if (a->per_token) s[0] /= processes;
    return s;
}

/* Shape of a stage in one call: axes R kept, the axis of ranks left out where a rank is a process.
 */
static int stage_shape(const dp_problem *p, const dp_subject *s, int N, int process, int stage,
                       int64_t *out) {
    int64_t w[DP_MAX_AXES];
    const int ndim = dp_stage_tensor_shape(p, N, stage, w), kind = dp_stage_tensors[stage].kind,
              split = s->per_rank && N > 1;
    int n = 0;
    if (kind == DP_PER_RANK && split) {
        memcpy(out, w + 1, sizeof *w * 3);
        return 3;
    }
    if (kind == DP_PER_CHUNK) w[0] = dp_stage_tensor_chunks(p, N, split ? process : -1);
    if (kind == DP_PER_TOKEN && split) w[0] /= N;
    for (int i = 0; i < ndim; i++) {
        if (i == 2 && dp_stage_tensor_keyed(stage) && ndim == 3) out[n++] = 1;
        out[n++] = w[i];
    }
    return n;
}

/* Where the call's states lie in a pool. */
static void lay_out_pool(dp_subject_memory *m, const dp_problem *p) {
    const int64_t all[] = {m->pool->slots, p->HV, p->K, p->V};
    dp_pool_list list[DP_POOL_LISTS];
    const int n = dp_pool_lists(m->pool, p, list);
    for (int i = 0; i < n; i++)
        subject_add_array(m, 0, list[i].name, 1, list[i].shape[1] ? 2 : 1, list[i].shape);
    subject_add_array(m, 0, DP_SUBJECT_POOL, 0, 4, all);
}

/* Adds the inputs and outputs of every process. */
static void subject_lay_out(dp_subject_memory *m, const dp_subject *s, const dp_problem *p,
                            const dp_subject_call *call) {
    const int N = call->N, backward = call->backward;
    dp_subject_array a[2 * DP_NINPUTS] = {0};
    int64_t shape[6] = {0};
    const int64_t states[] = {p->T, p->HV, p->K, p->V};
    const int np = m->c->processes, n = subject_input_arrays(p, backward, a);
    const int64_t ncu = p->Nseq + 1;
    for (int r = 0; r < np; r++) {
        for (int i = 0; i < n; i++)
            if (!m->pool || a[i].x != p->s0)
                subject_add_array(m, r, a[i].name, 1, a[i].ndim, local_shape(&a[i], np, shape));
        subject_add_array(m, r, "cu", 1, 1, &ncu);
        for (int i = 0; i < DP_NRESULTS; i++) {
            const dp_tensor_field *f = &dp_result_fields[i];
            const dp_subject_array x = array_of(p, f, f->name);
            if (m->pool && i == DP_RESULT_FINAL_STATE) continue;
            if (s->writes[i] && (backward || !f->backward) && dp_result_exists(p, i))
                subject_add_array(m, r, f->name, 0, x.ndim, local_shape(&x, np, shape));
        }
        for (int i = 0; i < DP_NSTAGE_TENSORS; i++) {
            if (!s->writes_stage[i] || (dp_stage_tensors[i].backward && !backward)) continue;
            const int ndim = stage_shape(p, s, N, r, i, shape);
            subject_add_array(m, r, dp_stage_tensors[i].name, 0, ndim, shape);
        }
        if (s->writes_states && call->states)
            subject_add_array(m, r, DP_SUBJECT_STATES, 0, 4, states);
    }
    if (m->pool) lay_out_pool(m, p);
}

/* Fills in the problem and the call for the processes. */
static void subject_describe(dp_subject_control *c, const dp_problem *p,
                             const dp_subject_call *call) {
    c->p = (deltaproof_subject_problem){.abi = DP_SUBJECT_ABI,
                                        .size = sizeof c->p,
                                        .H = p->H,
                                        .HV = p->HV,
                                        .K = p->K,
                                        .V = p->V,
                                        .R = p->R,
                                        .Kg = dp_Kg(p),
                                        .P = dp_pairs(p),
                                        .in_turn = dp_in_turn(p),
                                        .Nseq = p->Nseq,
                                        .gate_form = p->gate,
                                        .beta_form = p->beta_form,
                                        .l2norm = p->l2norm,
                                        .backward = call->backward,
                                        .ranks = call->N,
                                        .T = p->T,
                                        .tokens = p->T,
                                        .scale = p->scale,
                                        .lower_bound = p->lower_bound,
                                        .chunk = call->chunk,
                                        .nslot = call->pool ? (int32_t)call->pool->slots : 0,
                                        .drafts = call->pool ? (int32_t)call->pool->drafts : 0};
    snprintf(c->input_format, sizeof c->input_format, "%s", call->input_format);
    snprintf(c->base, sizeof c->base, "%s", dp_base_names[call->base]);
    snprintf(c->chain, sizeof c->chain, "%s", dp_formats[call->chain].name);
    snprintf(c->recurrence, sizeof c->recurrence, "%s", dp_model_of(p)->name);
}

/* The rest of the pages around each output must be unchanged (inputs cannot be written at all).
 */
static void subject_check_patterns(const dp_subject_memory *m, dp_subject_result *out) {
    for (int r = 0; r < m->c->processes; r++)
        for (int i = 0; i < m->c->nregion; i++) {
            const dp_subject_region *x = &m->c->region[r][i];
            if (x->input) continue;
            const unsigned char *b = (const unsigned char *)subject_bytes_of(m, x);
            const int64_t from = dp_subject_begin(x), to = from + x->n * 8;
            int64_t before = 0, after = 0;
            for (int64_t z = 0; z < from; z++)
                before += b[z] != DP_SUBJECT_CANARY;
            for (int64_t z = to; z < x->span; z++)
                after += b[z] != DP_SUBJECT_CANARY;
            if (!before && !after) continue;
            char who[24];
            subject_on_rank(m, r, who, sizeof who);
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

static void collect_states(const dp_subject_memory *m, const dp_problem *p, int field, double *x) {
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
            memcpy(x + i * n,
                   subject_data_of(m, subject_find_array(m, r, dp_result_fields[field].name)) +
                       i * n,
                   sizeof *x * (size_t)n);
        else
            for (int64_t z = 0; z < n; z++)
                x[i * n + z] = own ? own[i * n + z] : 0;
    }
}

/* The gradient of a state that the call does not have: may be left as it is, by all processes. */
static int left_out(const dp_subject_memory *m, const dp_problem *p, int field) {
    if (field != DP_RESULT_DS0 || p->s0) return 0;
    for (int r = 0; r < m->c->processes; r++) {
        const dp_subject_region *g = subject_find_array(m, r, dp_result_fields[field].name);
        for (int64_t z = 0; z < g->n; z++)
            if (memcmp(&subject_data_of(m, g)[z], &DP_SUBJECT_UNWRITTEN, 8)) return 0;
    }
    return 1;
}

/* Copies what the processes computed into the results. */
static void subject_collect(const dp_subject_memory *m, const dp_problem *p, int N,
                            dp_subject_result *out) {
    for (int i = 0; i < DP_NRESULTS; i++) {
        if (!subject_find_array(m, 0, dp_result_fields[i].name) || left_out(m, p, i)) continue;
        double *x = out->r.out[i] = dp_doubles(dp_result_count(p, i));
        if (dp_result_fields[i].kind == DP_OF_SEQUENCES)
            collect_states(m, p, i, x);
        else
            for (int r = 0; r < (dp_result_fields[i].kind == DP_OF_HEADS ? 1 : m->c->processes);
                 r++) {
                const dp_subject_region *g = subject_find_array(m, r, dp_result_fields[i].name);
                memcpy(x + r * g->n, subject_data_of(m, g), sizeof *x * (size_t)g->n);
            }
    }
    for (int i = 0; i < DP_NSTAGE_TENSORS; i++) {
        if (!subject_find_array(m, 0, dp_stage_tensors[i].name)) continue;
        double *x = out->stage[i] = dp_doubles(dp_stage_tensor_size(p, N, i));
        for (int r = 0; r < m->c->processes; r++) {
            const dp_subject_region *g = subject_find_array(m, r, dp_stage_tensors[i].name);
            memcpy(x, subject_data_of(m, g), sizeof *x * (size_t)g->n);
            x += g->n;
        }
    }
    const dp_subject_region *states = subject_find_array(m, 0, DP_SUBJECT_STATES);
    if (states) out->states = dp_copy(subject_data_of(m, states), states->n);
    const dp_subject_region *pool = m->pool ? subject_find_array(m, 0, DP_SUBJECT_POOL) : NULL;
    if (pool) out->pool = dp_copy(subject_data_of(m, pool), pool->n);
}

/* ---- what the processes say of themselves ---------------------------------------------------- */

/* One look, after which it cannot change; numbers outside of what they may be are no statement. */
static dp_subject_state look(const dp_subject_memory *s, int r) {
    char why[sizeof((dp_subject_state *)0)->why];
    dp_subject_state st;
    memcpy(&st, &((const dp_subject_said *)s->map)->state[r], sizeof st);
    st.why[sizeof st.why - 1] = 0;
    dp_text_printable(st.why, why, sizeof why);
    memcpy(st.why, why, sizeof why);
    if ((int)st.at < DP_PHASE_IDLE || st.at > DP_PHASE_REFUSED) st.at = DP_PHASE_RUNNING;
    if (st.region < 0 || st.region >= s->c->nregion) st.region = -1;
    if (st.call < 0 || st.call >= s->c->calls) st.call = 0;
    return st;
}

static void text_of(char *text, size_t size) {
    char shown[512];
    text[size - 1] = 0;
    dp_text_printable(text, shown, size < sizeof shown ? size : sizeof shown);
    memcpy(text, shown, size < sizeof shown ? size : sizeof shown);
}

/* The library's answer to `about`, its texts ended and printable. */
static dp_subject_about subject_look_about(const dp_subject_memory *s) {
    dp_subject_about a;
    memcpy(&a, &((const dp_subject_said *)s->map)->about, sizeof a);
    text_of(a.name, sizeof a.name);
    text_of(a.base, sizeof a.base);
    text_of(a.chain, sizeof a.chain);
    text_of(a.writes, sizeof a.writes);
    text_of(a.design, sizeof a.design);
    return a;
}

const char *dp_subject_signal_hint(int sig) {
    return sig == SIGKILL ? " (from outside: the machine may have run out of memory)" : "";
}

static const char *signal_name(int sig) {
    const char *n = sigabbrev_np(sig);
    return n ? n : "?";
}

/* ---- processes ------------------------------------------------------------------------------- */

static void say_signal(const dp_subject_memory *s, int r, int sig, dp_subject_ending *end) {
    const dp_subject_state st = look(s, r);
    const size_t size = sizeof end->why;
    char who[24], at[288] = "";
    subject_on_rank(s, r, who, sizeof who);
    if (st.have_fault && st.pc && st.pc < 1u << 30)
        snprintf(at, sizeof at, ", at %.255s+0x%llx", dp_base_name(s->c->lib),
                 (unsigned long long)st.pc);
    end->outcome = DP_SUBJECT_CRASHED;
    if (!st.have_fault)
        snprintf(end->why, size, "%scrashed: SIG%s%s%s", who, signal_name(sig), at,
                 dp_subject_signal_hint(sig));
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
static int ended(const dp_subject_memory *s, int r, int status, dp_subject_ending *end) {
    const dp_subject_state st = look(s, r);
    const size_t size = sizeof end->why;
    char who[24];
    subject_on_rank(s, r, who, sizeof who);
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
    end->call = st.call;
    return 1;
}

/* A rank that has returned leaves the others waiting for ever in a collective that it did not
 * enter. */
static int deserted(const dp_subject_memory *s, const char *alive, dp_subject_ending *end) {
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
    end->call = look(s, gone).call;
    snprintf(
        end->why, sizeof end->why,
        "would wait for ever: rank %d returned after %d calls of all_gather, others are in call %d",
        gone, calls, calls + 1);
    return 1;
}

static void say_hung(const dp_subject_memory *s, const char *alive, double limit,
                     dp_subject_ending *end) {
    snprintf(end->why, sizeof end->why, "did not return within %g s", limit);
    end->outcome = DP_SUBJECT_HUNG;
    end->call = look(s, 0).call;
    for (int r = 0; r < s->c->processes && s->c->processes > 1; r++) {
        const dp_subject_state st = look(s, r);
        if (alive[r]) end->call = st.call;
        const char *what = !alive[r]                     ? "returned"
                           : st.at == DP_PHASE_GATHERING ? "waits in all_gather"
                           : st.at == DP_PHASE_LOADING   ? "is being loaded"
                                                         : "computes";
        dp_text_add(end->why, sizeof end->why, "%s rank %d %s", r ? "," : ":", r, what);
        if (st.at == DP_PHASE_GATHERING && alive[r])
            dp_text_add(end->why, sizeof end->why, " number %d", st.gathers);
    }
}

static void say_unwatched(int status, dp_subject_ending *end) {
    end->outcome = DP_SUBJECT_EXITED;
    if (WIFSIGNALED(status))
        snprintf(end->why, sizeof end->why, "ended the process that watches it: SIG%s",
                 signal_name(WTERMSIG(status)));
    else
        snprintf(end->why, sizeof end->why, "the process that watches it ended with exit status %d",
                 WEXITSTATUS(status));
}

/* The call that the foremost process is in. */
static int call_of(const dp_subject_memory *s) {
    int call = 0;
    for (int r = 0; r < s->c->processes; r++)
        if (look(s, r).call > call) call = look(s, r).call;
    return call;
}

/* Starts all processes and waits for them, for the limit of a call, or for the first that fails.
 * Then it ends the others, with all processes that they started. */
static dp_status subject_run_processes(const dp_subject_memory *s, double limit,
                                       dp_subject_ending *end, dp_err *e) {
    const int n = s->c->processes, fd[] = {s->given, s->made};
    double t0 = omp_get_wtime();
    char alive[DP_SUBJECT_MAX_RANKS];
    dp_processes group;
    int left = n, stop = 0, call = 0, r, status;
    *end = (dp_subject_ending){.outcome = DP_SUBJECT_RETURNED};
    const dp_status st = dp_processes_start(&group, DP_SUBJECT_HOST, n, fd, 2, e);
    if (st) return st;
    memset(alive, 1, sizeof alive);
    while (left && !stop) {
        if (call < call_of(s)) {
            call = call_of(s);
            t0 = omp_get_wtime();
        }
        const double rest = limit - (omp_get_wtime() - t0);
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

/* ---- a library as a subject ------------------------------------------------------------------ */

const char *const dp_subject_outcomes[DP_SUBJECT_NOUTCOMES] = {
    "returned", "unsupported",   "failed", "crashed",
    "hung",     "out of bounds", "exited", "bad output"};

/* ---- about ----------------------------------------------------------------------------------- */

dp_status dp_subject_read_writes(const char *path, char *writes, dp_subject *s, dp_err *e) {
    char *save;
    int any = 0;
    for (char *t = strtok_r(writes, " ,", &save); t; t = strtok_r(NULL, " ,", &save)) {
        int f = -1;
        for (int i = 0; i < DP_NRESULTS; i++)
            if (!strcmp(t, dp_result_fields[i].name)) f = i;
        const int g = f < 0 ? dp_stage_tensor_find(t) : -1;
        int *const need = !strcmp(t, DP_SUBJECT_STATES)   ? &s->writes_states
                          : !strcmp(t, DP_SUBJECT_POOL)   ? &s->writes_pool
                          : !strcmp(t, DP_SUBJECT_DRAFTS) ? &s->writes_drafts
                          : !strcmp(t, DP_SUBJECT_TREES)  ? &s->takes_trees
                          : !strcmp(t, DP_SUBJECT_RING)   ? &s->writes_ring
                                                          : NULL;
        if (need) {
            *need = any = 1;
            continue;
        }
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

/* Words of the list; an empty one: those with a beta whose keys all read one state. */
static dp_status read_recurrences(const char *path, char *words, dp_subject *s, dp_err *e) {
    char *save;
    s->has[DP_USER] = 0;
    for (int i = 0; i < DP_NMODELS; i++)
        s->has[i] = !*words && dp_models[i].strength == DP_BY_BETA && !dp_recurrences[i].in_turn;
    for (char *t = strtok_r(words, " ,", &save); t; t = strtok_r(NULL, " ,", &save)) {
        int m = 0;
        while (m < DP_NMODELS && strcmp(t, dp_models[m].name))
            m++;
        if (m == DP_USER && strcmp(t, "own"))
            return dp_fail(e, DP_EINPUT, "%s: computes '%s'; known: " DP_MODEL_WORDS "|own", path,
                           t);
        s->has[m] = 1;
    }
    return DP_OK;
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
        return dp_fail(e, DP_EINPUT, "%s: claims base '%s'; known: " DP_BASE_WORDS, path, a.base);
    if (dp_format_find(a.chain) < 0)
        return dp_fail(e, DP_EINPUT, "%s: claims chain '%s'; known: " DP_FORMAT_WORDS, path,
                       a.chain);
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
        s->design = dp_strdup(a.design);
    }
    s->base = base;
    s->chain = dp_format_find(a.chain);
    s->per_rank = a.kind;
    s->max_ranks = a.max_ranks;
    const dp_status st = read_recurrences(path, a.recurrences, s, e);
    if (st) return st;
    dp_text_printable(a.name[0] ? a.name : dp_base_name(path), s->name, sizeof s->name);
    return dp_subject_read_writes(path, a.writes, s, e);
}

static dp_status check_file(const char *path, dp_err *e) {
    struct stat st;
    if (stat(path, &st)) return dp_fail(e, DP_EINPUT, "%s: %s", path, strerror(errno));
    return S_ISREG(st.st_mode) ? DP_OK : dp_fail(e, DP_EINPUT, "%s: not a regular file", path);
}

dp_status dp_subject_open(const char *path, double limit_s, int64_t memory, dp_subject *s,
                          dp_err *e) {
    dp_subject_memory m;
    dp_subject_ending end;
    *s = (dp_subject){.memory = memory > 0 ? memory : dp_memory_bytes()};
    dp_status st = check_file(path, e);
    if (st) return st;
    s->path = realpath(path, NULL);
    const int why = !s->path ? errno : strlen(s->path) >= sizeof m.c->lib ? ENAMETOOLONG : 0;
    if (why) {
        dp_subject_close(s);
        return dp_fail(e, DP_EINPUT, "%s: %s", path, strerror(why));
    }
    subject_shared_new(&m, s, 1, 1);
    m.c->about = 1;
    st = subject_shared_make(&m, NULL, 0, e);
    if (!st) st = subject_run_processes(&m, limit_s > 0 ? limit_s : DP_SUBJECT_LIMIT_S, &end, e);
    if (!st && end.outcome != DP_SUBJECT_RETURNED)
        st = dp_fail(e, DP_EINPUT, "%s: %s", path, end.why);
    if (!st) st = read_about(subject_look_about(&m), path, s, e);
    subject_shared_free(&m);
    if (st) dp_subject_close(s);
    return st;
}

void dp_subject_close(dp_subject *s) {
    if (s->command) dp_command_close(s->command);
    free(s->path);
    free(s->design);
    *s = (dp_subject){0};
}

/* The outcome of call m->call. */
static void look_at_call(const dp_subject_memory *m, const dp_problem *p,
                         const dp_subject_ending *end, dp_subject_result *out) {
    if (end->outcome != DP_SUBJECT_RETURNED && m->call == end->call) {
        out->outcome = end->outcome;
        memcpy(out->why, end->why, sizeof out->why);
    }
    if (out->outcome == DP_SUBJECT_RETURNED) subject_check_patterns(m, out);
    subject_collect(m, p, m->c->ranks, out);
}

static dp_status run_library(const dp_subject *s, int n, const dp_problem *const *p,
                             const dp_subject_call *call, dp_subject_result *out, int *made,
                             dp_err *e) {
    const int N = call->N;
    DP_FREED(subject_shared_free) dp_subject_memory m;
    dp_subject_ending end;
    const double t0 = omp_get_wtime();
    subject_shared_new(&m, s, N, s->per_rank ? N : 1);
    m.pool = call->pool;
    subject_describe(m.c, p[0], call);
    subject_lay_out(&m, s, p[0], call);
    subject_shared_calls(&m, n, p);
    dp_status st = subject_shared_make(&m, p, call->backward, e);
    if (!st) st = subject_run_processes(&m, call->limit_s, &end, e);
    const int returned = !st && end.outcome == DP_SUBJECT_RETURNED ? n - 1 : st ? -1 : end.call;
    for (m.call = 0; m.call <= returned; m.call++) {
        look_at_call(&m, p[m.call], &end, &out[m.call]);
        out[m.call].seconds = (omp_get_wtime() - t0) / (returned + 1);
        ++*made;
        if (out[m.call].outcome != DP_SUBJECT_RETURNED) break;
    }
    return st;
}

static dp_status run_command(const dp_subject *s, int n, const dp_problem *const *p,
                             const dp_subject_call *call, dp_subject_result *out, int *made,
                             dp_err *e) {
    dp_status st = DP_OK;
    while (*made < n && !st && (!*made || out[*made - 1].outcome == DP_SUBJECT_RETURNED)) {
        st = dp_command_run(s, p[*made], call, &out[*made], e);
        ++*made;
    }
    return st;
}

dp_status dp_subject_run_calls(const dp_subject *s, int n, const dp_problem *const *p,
                               const dp_subject_call *call, dp_subject_result *out, int *made,
                               dp_err *e) {
    const int N = call->N;
    *made = 0;
    for (int i = 0; i < n; i++)
        out[i] = (dp_subject_result){0};
    if (N < 1 || N > DP_SUBJECT_MAX_RANKS || p[0]->T % N)
        return dp_fail(e, DP_EINPUT, "%lld tokens over %d ranks: not for a subject",
                       (long long)p[0]->T, N);
    if (!s->command && !s->has[p[0]->model]) {
        *made = 1;
        out->outcome = DP_SUBJECT_REFUSED;
        snprintf(out->why, sizeof out->why,
                 "it does not say that it computes %s (deltaproof_subject_recurrences)",
                 dp_models[p[0]->model].name);
        return DP_OK;
    }
    return (s->command ? run_command : run_library)(s, n, p, call, out, made, e);
}

dp_status dp_subject_run(const dp_subject *s, const dp_problem *p, const dp_subject_call *call,
                         dp_subject_result *out, dp_err *e) {
    int made;
    return dp_subject_run_calls(s, 1, &p, call, out, &made, e);
}

void dp_subject_result_free(dp_subject_result *r) {
    dp_result_free(&r->r);
    for (int i = 0; i < DP_NSTAGE_TENSORS; i++)
        free(r->stage[i]);
    free(r->states);
    free(r->pool);
    for (int i = 0; i < DP_NQKV; i++)
        free(r->y[i]);
    dp_conv_states_free(&r->conv);
    *r = (dp_subject_result){0};
}
