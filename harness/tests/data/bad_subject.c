/* harness/subject/example_ranks.c and what can go wrong with it, chosen by the environment variable
 * BAD. */
#define deltaproof_subject_run good_run
#define deltaproof_subject_about good_about
#include "../../subject/example_ranks.c"
#undef deltaproof_subject_run
#undef deltaproof_subject_about
#include <stdio.h>
#include <unistd.h>

static const char *bad(void) { return getenv("BAD") ? getenv("BAD") : ""; }
static int is(const char *name) { return !strcmp(bad(), name); }

const deltaproof_subject_info *deltaproof_subject_about(void) {
    static deltaproof_subject_info x;
    x = ABOUT;
    if (is("abi")) x.abi = 7;
    if (is("claim")) x.chain = "fp17";
    if (is("writes")) x.writes = "o dx";
    if (is("ranks")) x.max_ranks = 0;
    if (is("dies-at-once")) abort();
    return is("null") ? NULL : &x;
}
/* v as it was when a call first saw this address. */
static int remembering(const deltaproof_subject_problem *p, const deltaproof_subject_call *c) {
    static const double *at, *seen;
    deltaproof_subject_problem x = *p;
    const double **of = is("remembers-gates") ? &x.g : is("remembers") ? &x.v : NULL;
    const size_t n =
        sizeof *p->v * (size_t)(p->tokens * p->HV * (of == &x.g ? p->Kg : p->R * p->V));
    if (of && at != *of) {
        at = *of;
        seen = memcpy(malloc(n), at, n);
    }
    if (of) *of = seen;
    return good_run(&x, c);
}

int deltaproof_subject_run(const deltaproof_subject_problem *p, const deltaproof_subject_call *c) {
    volatile double *o = deltaproof_subject_find(c, "o"), *q = (volatile double *)p->q,
                    *H = deltaproof_subject_find(c, "H");
    const int64_t n = p->tokens * p->HV * p->V;
    volatile int *null = NULL;
    static int call;
    const int last = p->rank == p->ranks - 1;
    if (is("desert") && p->rank == 0) return 0;
    if (is("refuses-packed") && p->Nseq > 1) return DP_SUBJECT_UNSUPPORTED;
    if (is("sizes") && c->comm) {
        char x[64], y[512];
        c->comm->all_gather(c->comm, x, y, p->rank == 1 ? 32 : 64);
    }
    const int rc = remembering(p, c);
    if (is("second-call") && call++) o[5] *= 1.5;
    if (is("second-dies") && call++) abort();
    if (is("second-bit") && call++) o[5] *= 1 + 1e-15;
    if (is("crash") && last) *null = 1;
    if (is("abort") && last) abort();
    if (is("hang") && last)
        for (;;)
            sleep(1);
    if (is("exit") && last) _exit(3);
    if (is("nan")) o[7] = NAN;
    for (int i = 0; is("blank") && i < p->V; i++)
        o[p->V + i] = 0;
    if (is("past-by-one")) o[n] = 1;
    if (is("past-by-many")) o[n + 5000] = 1;
    if (is("before")) o[-1] = 1;
    if (is("before-by-many")) o[-5000] = 1;
    if (is("read-past")) o[0] += o[n + 1024];
    if (is("read-before")) o[0] += p->q[-1];
    if (is("input")) *(double *)(p->q + 3) = 1;
    if (is("fails")) {
        snprintf(c->why, 256, "no luck on rank %d", p->rank);
        return 5;
    }
    if (is("unwritten")) {
        memset((void *)(o + 8), 0xff, 0);
        ((uint64_t *)o)[9] = 0x7ff8deadbeef0b5eULL;
    }
    /* as if it had been left out */
    if (is("wrong-head") && p->rank == 1) o[5 * p->HV * p->V + p->V] *= 1.5;
    if (is("wrong-stage") && p->rank == 1) H[3] += 1;
    if (is("unsteady")) o[0] *= 1 + 1e-15 * (double)getpid();
    /* a token's output takes in the query of the token behind it */
    for (int64_t i = 0; is("leak") && i < n - p->HV * p->V; i++)
        o[i] += 1e-3 * q[i / (p->HV * p->V) * p->H * p->K + p->H * p->K];
    /* chunks of 32 tokens forget the head of their second half */
    for (int64_t i = 16 * p->HV * p->V; is("chunk") && p->chunk == 32 && i < n; i++)
        o[i] *= 1.01;
    /* the second sequence, wherever it stands */
    for (int64_t i = 0; is("second") && p->Nseq > 1 && i < p->V; i++)
        o[p->cu[1] * p->HV * p->V + i] *= 1.01;
    for (int i = 0; is("stateless") && !p->initial_state && i < p->V; i++)
        o[i] += 1e-2;
    for (int64_t i = 0; is("doubles") && i < n; i++)
        o[i] *= 2;
    if (is("talks")) {
        printf("{\"not\": \"the record\"}\n");
        fflush(stdout);
    }
    (void)q;
    return rc;
}