/* Memory that the program and the processes of a library share (subject_parts.h). */
#define _GNU_SOURCE
#include "subject_parts.h"

#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

/* ---- shared memory --------------------------------------------------------------------------- */

static dp_status memory_error(dp_err *e) {
    return dp_fail(e, DP_EIO, "shared memory for a subject: %s", strerror(errno));
}

/* Where arrays begin in `made`. */
static int64_t first_output(const dp_subject_memory *s) {
    return dp_subject_pages(sizeof(dp_subject_said)) + s->c->processes * DP_SUBJECT_PIECE;
}

void dp_subject_shared_new(dp_subject_memory *s, const dp_subject *lib, int ranks, int processes) {
    *s = (dp_subject_memory){.c = dp_calloc(1, sizeof *s->c), .given = -1, .made = -1};
    snprintf(s->c->lib, sizeof s->c->lib, "%s", lib->path);
    s->c->ranks = ranks;
    s->c->processes = processes;
    s->c->calls = 1;
    s->c->memory = lib->memory;
    s->given_size = dp_subject_pages(sizeof *s->c);
    s->made_size = first_output(s);
}

void dp_subject_shared_free(dp_subject_memory *s) {
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

dp_subject_region *dp_subject_add_array(dp_subject_memory *s, int process, const char *name,
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

void dp_subject_shared_calls(dp_subject_memory *s, int n, const dp_problem *const *p) {
    int others = 0;
    s->c->calls = n;
    s->c->given_step = s->given_size - dp_subject_pages(sizeof *s->c);
    s->c->made_step = s->made_size - first_output(s);
    for (int i = 0; i < n; i++)
        others |= s->c->given_of[i] = p[i] != p[0];
    s->given_size += others * s->c->given_step;
    s->made_size += (n - 1) * s->c->made_step;
}

char *dp_subject_bytes_of(const dp_subject_memory *s, const dp_subject_region *r) {
    return s->map + r->offset + s->call * s->c->made_step;
}
double *dp_subject_data_of(const dp_subject_memory *s, const dp_subject_region *r) {
    return (double *)(dp_subject_bytes_of(s, r) + dp_subject_begin(r));
}

const dp_subject_region *dp_subject_find_array(const dp_subject_memory *s, int process,
                                               const char *name) {
    for (int i = 0; i < s->c->nregion; i++)
        if (!s->c->region[process][i].input && !strcmp(s->c->region[process][i].name, name))
            return &s->c->region[process][i];
    return NULL;
}

/* The input of that name that is no tensor of doubles; NULL: it is one. */
static const int64_t *integers_of(const dp_subject_memory *s, const dp_problem *p,
                                  const char *name) {
    if (!strcmp(name, "cu")) return p->cu;
    if (!strcmp(name, "read_slot")) return s->pool->read;
    if (!strcmp(name, "draft_slot")) return s->pool->draft;
    if (!strcmp(name, "accepted")) return s->pool->accepted;
    if (!strcmp(name, "parent")) return s->pool->parent;
    if (!strcmp(name, "ring_slot")) return s->pool->ring;
    if (!strcmp(name, "ring_tokens")) return s->pool->held;
    return strcmp(name, "write_slot") ? NULL : s->pool->write;
}

static void fill_inputs(const dp_subject_memory *s, const dp_problem *p, int backward, char *map) {
    dp_subject_array a[DP_NINPUTS];
    const int n = dp_subject_input_arrays(p, backward, a);
    for (int r = 0; r < s->c->processes; r++)
        for (int i = 0; i < s->c->nregion; i++) {
            const dp_subject_region *x = &s->c->region[r][i];
            double *data = (double *)(map + x->offset + dp_subject_begin(x));
            if (!x->input) continue;
            memset(map + x->offset, DP_SUBJECT_CANARY, (size_t)x->span);
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
            memset(dp_subject_bytes_of(s, x), DP_SUBJECT_CANARY, (size_t)x->span);
            if (!strcmp(x->name, DP_SUBJECT_POOL)) {
                memcpy(dp_subject_data_of(s, x), s->pool->state, sizeof(double) * (size_t)x->n);
                continue;
            }
            for (int64_t z = 0; z < x->n; z++)
                memcpy(&dp_subject_data_of(s, x)[z], &DP_SUBJECT_UNWRITTEN, 8);
        }
}

/* Both files as the processes find them. After its seal no process, this one neither, can change
 * `given`. */
dp_status dp_subject_shared_make(dp_subject_memory *s, const dp_problem *const *p, int backward,
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
