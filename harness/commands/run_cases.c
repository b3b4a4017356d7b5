/* Runs cases, the longest first, on threads of their own (run_cases.h). */
#include "run_cases.h"
#include "commands.h"
#include "harness/search/museum.h"
#include "progress.h"

#include <math.h>
#include <omp.h>
#include <stdio.h>
#include <stdlib.h>

/* ---- one case -------------------------------------------------------------------------------- */

/* What a case offers, where the options left nothing of it. */
static int say_no_run(const dp_case *c) {
    dp_progress_lock();
    fprintf(stderr, "deltaproof: %s: offers no run with these options; it lists", c->path);
    for (int i = 0; i < c->nranks; i++)
        fprintf(stderr, "%s%d", i ? "," : " ranks = ", c->ranks[i]);
    for (int i = 0; i < c->nbase; i++)
        fprintf(stderr, "%s%s", i ? "," : "; base = ", dp_base_names[c->base[i]]);
    for (int i = 0; i < c->nchain; i++)
        fprintf(stderr, "%s%s", i ? "," : "; chain = ", dp_formats[c->chain[i]].name);
    for (int i = 0; i < c->nmerge; i++)
        fprintf(stderr, "%s%s", i ? "," : "; merge = ", dp_merge_names[c->merge[i]]);
    fputc('\n', stderr);
    dp_progress_unlock();
    return 2;
}

static void print_case(const dp_case *c, const dp_tally *t, double seconds) {
    dp_progress_lock();
    fprintf(t->table, "%-24s %3d passed, %d failed, %d skipped, %d unjudged  (%.1f s)\n", c->name,
            t->n[DP_PASS], t->n[DP_FAIL], t->n[DP_SKIPPED], t->n[DP_UNJUDGED], seconds);
    fflush(t->table);
    dp_progress_unlock();
}

static void print_warnings(const dp_case *c, dp_fault fault) {
    for (int i = 0; i < c->nwarn; i++)
        fprintf(stderr, "deltaproof: warning: %s\n", c->warn[i]);
    if (fault && !dp_fault_shows(fault, dp_op_of(c)->faults))
        fprintf(stderr, "deltaproof: warning: %s: the fault %s cannot show in op = %s\n", c->path,
                dp_faults[fault].name, c->op_name);
}

/* 0: run and printed, else 2. */
static int run_case(const dp_batch *b, const dp_case *c, dp_runs *runs) {
    dp_err e = {0};
    dp_tally t = {.case_name = c->name, .table = b->table, .verbose = b->verbose};
    dp_run_options o = b->run;
    const double t0 = dp_now();
    const int before = runs->n;
    o.done = dp_progress_run;
    o.arg = &t;
    print_warnings(c, o.fault);
    dp_progress_begin(&t);
    const dp_status st = dp_case_run(c, &o, runs, &e);
    dp_progress_end(&t);
    if (st) return dp_refuse(&e);
    if (runs->n == before && b->named) return say_no_run(c);
    print_case(c, &t, dp_now() - t0);
    return 0;
}

/* ---- all cases ------------------------------------------------------------------------------- */

/* How long a case takes, in units of its own: what states cost, once for every run. */
static double cost_of(const dp_case *c) {
    const dp_problem *p = &c->p;
    const double state = (double)p->T * p->HV * p->R * p->R * (p->K + p->V + 64.) * (p->K + 64.);
    return state * c->nranks * c->nbase * (1 + c->nchain);
}

typedef struct {
    const dp_case *c;
    dp_runs runs;
    int error;
} job;

static int by_cost(const void *a, const void *b) {
    const double x = cost_of((*(job *const *)a)->c), y = cost_of((*(job *const *)b)->c);
    return (x < y) - (x > y);
}

/* Simulated ranks alone run many cases side by side; devices and foreign code are asked one thing
 * at a time. */
static int side_by_side(const dp_run_options *o) {
    int foreign = o->subject != NULL;
    for (int i = 0; i < o->nbackend; i++)
        foreign |= !dp_backends[o->backend[i]].on_cpu;
    if (foreign || (!o->nbackend && !dp_cuda_unavailable(DP_BACKEND_CUDA, 1))) return 1;
    return (int)ceil(sqrt(omp_get_max_threads())); /* the other threads work inside each case */
}

int dp_run_cases(const dp_batch *b, int n, dp_case *const *cases, dp_runs *runs) {
    job *jobs = dp_calloc((size_t)n + 1, sizeof *jobs);
    job **order = dp_calloc((size_t)n + 1, sizeof *order);
    const int outer = side_by_side(&b->run), inner = omp_get_max_threads() / outer;
    int errors = 0;
    for (int i = 0; i < n; i++) {
        jobs[i].c = cases[i];
        order[i] = &jobs[i];
    }
    double cost = 0;
    for (int i = 0; i < n; i++)
        cost += cost_of(cases[i]);
    dp_progress_expect(n, cost);
    if (outer > 1) qsort(order, (size_t)n, sizeof *order, by_cost);
#pragma omp parallel num_threads(outer)
    {
        omp_set_num_threads(inner > 0 ? inner : 1);
#pragma omp for schedule(dynamic, 1)
        for (int i = 0; i < n; i++) {
            order[i]->error = run_case(b, order[i]->c, &order[i]->runs);
            dp_progress_finished(cost_of(order[i]->c));
        }
    }
    for (int i = 0; i < n; i++) {
        errors += jobs[i].error != 0;
        dp_runs_move(runs, &jobs[i].runs);
    }
    free(jobs);
    free(order);
    return errors;
}
