/* Counts what is finished, under one lock (progress.h). */
#include "progress.h"
#include "print_run.h"

#include <pthread.h>
#include <stdio.h>

static struct {
    pthread_mutex_t lock;
    dp_tally *running;
    int n[DP_NVERDICTS]; /* runs of all cases so far */
    const char *loading; /* the case that is read or made; NULL: none */
    int read, cases;     /* cases that were read before it, of those asked for */
} so_far = {.lock = PTHREAD_MUTEX_INITIALIZER};

void dp_progress_lock(void) { pthread_mutex_lock(&so_far.lock); }
void dp_progress_unlock(void) { pthread_mutex_unlock(&so_far.lock); }

void dp_progress_say(void *file) {
    const int *n = so_far.n;
    dp_progress_lock();
    if (so_far.loading)
        fprintf(file, "%s: interrupted while the case was loaded: %d of %d loaded, none run\n",
                so_far.loading, so_far.read, so_far.cases);
    for (const dp_tally *t = so_far.running; t; t = t->next)
        fprintf(file, "%-24s interrupted after %d runs\n", t->case_name, t->runs);
    fprintf(file, "VERDICT: INTERRUPTED (%d passed, %d failed, %d skipped, %d unjudged so far)\n",
            n[DP_PASS], n[DP_FAIL], n[DP_SKIPPED], n[DP_UNJUDGED]);
    fflush(file);
    dp_progress_unlock();
}

void dp_progress_loading(const char *path, int read, int cases) {
    dp_progress_lock();
    so_far.loading = path;
    so_far.read = read;
    so_far.cases = cases;
    dp_progress_unlock();
}

void dp_progress_begin(dp_tally *t) {
    dp_progress_lock();
    t->next = so_far.running;
    so_far.running = t;
    dp_progress_unlock();
}

void dp_progress_end(dp_tally *t) {
    dp_progress_lock();
    for (dp_tally **p = &so_far.running; *p; p = &(*p)->next)
        if (*p == t) {
            *p = t->next;
            break;
        }
    dp_progress_unlock();
}

void dp_progress_run(const dp_run *r, void *arg) {
    dp_tally *t = arg;
    t->n[r->verdict]++;
    dp_progress_lock();
    t->runs++;
    so_far.n[r->verdict]++;
    if (t->verbose || r->verdict == DP_FAIL) dp_print_run(r, t->table);
    dp_progress_unlock();
}
