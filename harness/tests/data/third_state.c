/* harness/subject/example_subject.c, whose state after the third token of a call is 1% too large
 * where all states are shown. A window that accepts two tokens, one, or none never reads it. */
#define deltaproof_subject_run good_run
#include "../../subject/example_subject.c"
#undef deltaproof_subject_run

int deltaproof_subject_run(const deltaproof_subject_problem *p, const deltaproof_subject_call *c) {
    double *states = deltaproof_subject_find(c, "states");
    const int64_t n = (int64_t)p->HV * p->K * p->V;
    const int rc = good_run(p, c);
    for (int i = 0; states && i < p->Nseq; i++)
        for (int64_t z = 0; p->cu[i + 1] - p->cu[i] > 3 && z < n; z++)
            states[(p->cu[i] + 2) * n + z] *= 1.01;
    return rc;
}
