/* Runs as bytes (run_pack.h). One walk over all pointers writes them, and the same walk reads. */
#include "run_pack.h"

#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

typedef struct {
    FILE *to;         /* NULL: it reads */
    const char *from; /* what is left to be read */
    size_t left;
    int bad; /* less is left than must follow */
} stream;

/* The same text at one place for ever. */
static const char *lasting(const char *x, size_t n) {
    static struct word {
        struct word *next;
        char text[];
    } * words;
    static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
    pthread_mutex_lock(&lock);
    struct word *w = words;
    while (w && (strlen(w->text) != n || memcmp(w->text, x, n) != 0))
        w = w->next;
    if (!w) {
        w = dp_calloc(1, sizeof *w + n + 1);
        memcpy(w->text, x, n);
        w->next = words;
        words = w;
    }
    pthread_mutex_unlock(&lock);
    return w->text;
}

/* NULL: so many bytes are not there. */
static const char *take(stream *s, int64_t n) {
    s->bad |= n < 0 || (size_t)n > s->left;
    if (s->bad) return NULL;
    s->from += n;
    s->left -= (size_t)n;
    return s->from - n;
}

static void plain(stream *s, void *x, size_t n) {
    const char *from = s->to ? NULL : take(s, (int64_t)n);
    if (s->to)
        fwrite(x, 1, n, s->to);
    else if (from)
        memcpy(x, from, n);
}

/* *x: n elements of `each` bytes, or NULL. */
static void array(stream *s, void *x, int64_t n, size_t each) {
    char *at;
    memcpy(&at, x, sizeof at);
    const int there = at != NULL; /* as the struct says, which is read already */
    if (s->to) {
        if (there) fwrite(at, each, (size_t)n, s->to);
        return;
    }
    const char *from = there && n >= 0 && n <= INT32_MAX ? take(s, n * (int64_t)each) : NULL;
    s->bad |= there && !from;
    at = from ? dp_calloc((size_t)n + 1, each) : NULL;
    if (from && n) memcpy(at, from, each * (size_t)n);
    memcpy(x, &at, sizeof at);
}

/* A text, or NULL; `own`: the run frees it. */
static void text(stream *s, const char **x, int own) {
    int64_t n = s->to && *x ? (int64_t)strlen(*x) : -1;
    plain(s, &n, sizeof n);
    if (s->to) {
        if (n > 0) fwrite(*x, 1, (size_t)n, s->to);
        return;
    }
    const char *from = !s->bad && n >= 0 ? take(s, n) : NULL;
    *x = !from ? NULL : own ? strndup(from, (size_t)n) : lasting(from, (size_t)n);
}

static void tensor(stream *s, dp_judgement *t) {
    array(s, &t->per_rank, t->N, sizeof(double));
    array(s, &t->per_head, (int64_t)t->N * t->heads, sizeof(double));
    array(s, &t->per_rank_ratio, t->N, sizeof(double));
    array(s, &t->window, t->nwindow, sizeof(double));
    text(s, &t->tier, 0);
}

/* All that the pointers of the run lead to. */
static void pointers(stream *s, dp_run *r) {
    const char **const words[] = {&r->op,           &r->path,         &r->outcome,
                                  &r->rollback,     &r->truth_kind,   &r->truth_device,
                                  &r->may_unjudged, &r->let_unjudged, &r->tier};
    text(s, (const char **)&r->id, 1);
    text(s, (const char **)&r->case_name, 1);
    for (size_t i = 0; i < sizeof words / sizeof *words; i++)
        text(s, words[i], 0);
    array(s, &r->hit, r->nhit, 1);
    array(s, &r->point, r->npoint, sizeof *r->point);
    array(s, &r->tensor, r->ntensor, sizeof *r->tensor);
    for (int i = 0; r->tensor && i < r->ntensor; i++)
        tensor(s, &r->tensor[i]);
    if (!r->tensor) r->ntensor = 0; /* for dp_runs_free, where reading ended before it */
}

char *dp_runs_pack(const dp_runs *r, size_t *bytes) {
    char *packed = NULL;
    stream s = {.to = open_memstream(&packed, bytes)};
    if (!s.to) abort();
    for (int i = 0; i < r->n; i++) {
        plain(&s, &r->run[i], sizeof r->run[i]);
        pointers(&s, &r->run[i]);
    }
    if (fclose(s.to)) abort();
    return packed;
}

dp_status dp_runs_unpack(const char *from, size_t bytes, const char *case_name, dp_runs *r,
                         dp_err *e) {
    DP_FREED(dp_runs_free) dp_runs got = {0};
    stream s = {.from = from, .left = bytes};
    while (s.left && !s.bad) {
        dp_run x = {0};
        plain(&s, &x, sizeof x);
        if (!s.bad) pointers(&s, &x);
        got.run = dp_realloc(got.run, sizeof *got.run * (size_t)(got.n + 1));
        got.run[got.n++] = x;
        got.cap = got.n;
        s.bad |= !x.id || !x.case_name || strcmp(x.case_name, case_name) != 0;
    }
    if (s.bad) return dp_fail(e, DP_EINPUT, "run %d is damaged, or of another case", got.n);
    dp_runs_move(r, &got);
    return DP_OK;
}
