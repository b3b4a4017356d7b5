/* Counts what is finished, under one lock (progress.h). */
#include "progress.h"
#include "harness/base/terminal.h"
#include "print_run.h"

#include <pthread.h>
#include <stdio.h>

static struct {
    pthread_mutex_t lock;
    dp_tally *running;
    int n[DP_NVERDICTS];         /* runs of all cases so far */
    const char *loading;         /* the case that is read or made; NULL: none */
    int read, cases;             /* cases that were read before it, of those asked for */
    int run, to_run;             /* cases that are finished, of those that are run */
    double cost, of_cost, began; /* of those finished, of all; when they began */
} so_far = {.lock = PTHREAD_MUTEX_INITIALIZER};

static void duration(double s, char *out, size_t size) {
    if (s < 90)
        snprintf(out, size, "%.0f s", s);
    else
        snprintf(out, size, "%.0f min", s / 60);
}

static void show(void) {
    char text[120], spent[20], left[20];
    if (so_far.to_run < 2 || so_far.run == so_far.to_run) return;
    const double s = dp_now() - so_far.began, share = so_far.cost / so_far.of_cost;
    duration(s, spent, sizeof spent);
    duration(share > 0 ? s * (1 - share) / share : 0, left, sizeof left);
    snprintf(text, sizeof text, "%d of %d cases, %s%s%s%s", so_far.run, so_far.to_run, spent,
             so_far.run ? ", about " : "", so_far.run ? left : "", so_far.run ? " left" : "");
    dp_status_line(text);
}

void dp_progress_lock(void) {
    pthread_mutex_lock(&so_far.lock);
    dp_status_line("");
}

void dp_progress_unlock(void) {
    show();
    pthread_mutex_unlock(&so_far.lock);
}

void dp_progress_expect(int cases, double cost) {
    dp_progress_lock();
    so_far.to_run = cases;
    so_far.of_cost = cost;
    so_far.began = dp_now();
    dp_progress_unlock();
}

void dp_progress_finished(double cost) {
    dp_progress_lock();
    so_far.run++;
    so_far.cost += cost;
    dp_progress_unlock();
}

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
    /* the others stand among the failures at the end */
    if (t->verbose || (r->verdict == DP_FAIL && t->n[DP_FAIL] <= 3)) dp_print_run(r, t->table);
    dp_progress_unlock();
}
