/* Runs as bytes: one walk over all that a run holds, to write and to read (run_bytes.h). */
#include "run_bytes.h"

#include <pthread.h>
#include <stdlib.h>
#include <string.h>

typedef struct {
    int reading, bad;
    char *at;
    size_t used, size; /* written so far and room; read so far and all there is */
} stream;

static void bytes(stream *s, void *x, size_t n) {
    if (s->reading) {
        if (n > s->size - s->used) s->bad = 1;
        if (s->bad)
            memset(x, 0, n);
        else
            memcpy(x, s->at + s->used, n);
        if (!s->bad) s->used += n;
        return;
    }
    if (s->used + n > s->size) {
        s->size = 2 * (s->used + n);
        s->at = realloc(s->at, s->size);
        if (!s->at) abort();
    }
    memcpy(s->at + s->used, x, n);
    s->used += n;
}

/* n bytes at *x, NULL where it is; read into memory of its own. */
static void array(stream *s, void **x, size_t n) {
    uint64_t size = *x && n ? n : 0;
    bytes(s, &size, sizeof size);
    if (!s->reading) {
        if (size) bytes(s, *x, size);
        return;
    }
    if (size > s->size - s->used) s->bad = 1;
    *x = size && !s->bad ? dp_alloc(size, 1) : NULL;
    if (*x) bytes(s, *x, size);
}

static void text(stream *s, char **x) {
    array(s, (void **)x, *x && !s->reading ? strlen(*x) + 1 : 0);
}

/* The same text at one place for ever. */
static const char *lasting(const char *x) {
    static struct word {
        struct word *next;
        char text[];
    } * words;
    static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
    pthread_mutex_lock(&lock);
    struct word *w = words;
    while (w && strcmp(w->text, x))
        w = w->next;
    if (!w) {
        w = dp_alloc(1, sizeof *w + strlen(x) + 1);
        strcpy(w->text, x);
        w->next = words;
        words = w;
    }
    pthread_mutex_unlock(&lock);
    return w->text;
}

static void word(stream *s, const char **x) {
    char *own = (char *)*x;
    text(s, &own);
    if (!s->reading) return;
    *x = own ? lasting(own) : NULL;
    free(own);
}

/* ---- what a run holds ------------------------------------------------------------------------ */

static void judgement(stream *s, dp_judgement *j) {
    bytes(s, j, sizeof *j);
    const size_t n = sizeof(double);
    array(s, (void **)&j->per_rank, n * (size_t)j->N);
    array(s, (void **)&j->per_head, n * (size_t)j->N * (size_t)j->heads);
    array(s, (void **)&j->per_rank_ratio, n * (size_t)j->N);
    array(s, (void **)&j->window, n * (size_t)j->nwindow);
    word(s, &j->tier);
}

static void run(stream *s, dp_run *r) {
    bytes(s, r, sizeof *r);
    text(s, &r->id);
    text(s, &r->case_name);
    const char **const words[] = {&r->op,         &r->path,         &r->outcome, &r->rollback,
                                  &r->truth_kind, &r->truth_device, &r->tier};
    for (size_t i = 0; i < sizeof words / sizeof *words; i++)
        word(s, words[i]);
    array(s, (void **)&r->hit, (size_t)r->nhit);
    array(s, (void **)&r->point, sizeof *r->point * (size_t)r->npoint);
    if (s->reading) r->tensor = s->bad ? NULL : dp_calloc((size_t)r->ntensor, sizeof *r->tensor);
    if (s->bad) r->ntensor = 0;
    for (int i = 0; i < r->ntensor; i++)
        judgement(s, &r->tensor[i]);
}

char *dp_runs_pack(const dp_runs *r, size_t *n) {
    stream s = {0};
    int count = r->n;
    bytes(&s, &count, sizeof count);
    for (int i = 0; i < r->n; i++)
        run(&s, &r->run[i]); /* which writing leaves as it is */
    *n = s.used;
    return s.at;
}

int dp_runs_unpack(const char *from, size_t n, dp_runs *r) {
    stream s = {.reading = 1, .at = (char *)from, .size = n};
    dp_runs got = {0};
    int count;
    bytes(&s, &count, sizeof count);
    got.run = dp_calloc((size_t)(s.bad ? 0 : count) + 1, sizeof *got.run);
    while (!s.bad && got.n < count)
        run(&s, &got.run[got.n++]);
    got.cap = got.n;
    const int whole = !s.bad && s.used == s.size;
    if (whole)
        dp_runs_move(r, &got);
    else
        dp_runs_free(&got);
    return whole;
}
