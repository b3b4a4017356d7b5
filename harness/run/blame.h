/* harness/run/blame.h - the stage that made a judged run fail, from the tensors that it has. It
 * serves shared libraries and files of other programs, whose stages cannot be run one by one.
 *
 * Every tensor was judged against what exact arithmetic makes of the inputs, by the bound of all
 * stages up to it (stages.h, compare.h). The first failing tensor in the order of the
 * pipeline is blamed on its own stage and on earlier stages that nothing clears. A tensor that
 * passes clears its sources. So the more stages a program shows, the fewer are suspects.
 */
#pragma once
#include "harness/record/run.h"
#include "harness/simulated/ranks.h"

typedef struct {
    const dp_judgement *tensor; /* NULL: none fails */
    int backward;               /* its rows are made from the last to the first */
    dp_stage stage;             /* its own */
    int nsuspect;               /* stages, its own among them */
    unsigned char suspect[DP_NSTAGES];
    char shows[128]; /* tensors that would tell the suspects apart, "" if it is one alone */
} dp_blame;
/* Points into the run, which must outlive it. */
dp_blame dp_blame_run(const dp_run *r);
/* The i-th tensor that the pipeline makes, in its order, and its stage; NULL: there are no more. */
const char *dp_blame_tensor(int i, dp_stage *stage);
/* Tensors of a run in the order of the pipeline: calls f for each. */
void dp_blame_order(const dp_run *r, void (*f)(const dp_judgement *t, dp_stage stage));

/* The tensor alone; *stage: its stage's name ("" if it has none: a convolution's), NULL when none
 * fails. */
const dp_judgement *dp_first_failing(const dp_run *r, const char **stage);
