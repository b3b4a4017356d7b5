/* harness/search/bisect.h - which stage of the pipeline is wrong: every stage is run on true inputs
 * and its own output is judged.
 *
 * True inputs: the fp64 reference values, each rounded once to the format that the base keeps it
 * in. Truth of a stage's output: the same stage in fp64, without faults, on the same inputs.
 * Bound: the rounding errors of that stage alone (ref/bound/bound.h p = 2, DP_LAMBDA standard
 * deviations; activations: worst case), row by row, from reference values. So a stage is blamed for
 * what it does itself, whatever reaches it, and the first stage over its bound is where a fault
 * lives. Every stage is run several times on the same inputs: a stage whose results differ from the
 * first run's is wrong too, whatever its bound. A row is a token's vector, a row of a [K][V] or
 * [K][K] matrix, or of a chunk's matrix.
 */
#pragma once
#include "harness/case/case.h"
#include "harness/simulated/ranks.h"
#include "harness/verdict/compare.h"

/* An entry that is off: row in a matrix (-1: none), index in that row. Error and bound are the
 * row's. */
typedef struct {
    dp_place at;
    int row, index;
    double got, want, err, limit;
} dp_bisect_entry;

typedef struct {
    char tensor[16]; /* "" : no tensor of this stage was there to judge */
    int fails,
        unsteady; /* rows over bound, or not the same as in the first run; rows not the same */
    int expected; /* 1: fails counts no rows, all are within bound; ratio is the error over what
                     the formats make of nearby inputs, bound the largest of theirs */
    int run;      /* fails > 0: in which run first, from 0 */
    int64_t judged,
        skipped;  /* rows; skipped: the truth, or an input of the row's chunk, is not finite */
    double ratio; /* largest error / bound of a row */
    /* fails > 0: the largest error in the first failing row in the order of execution, of the
     * stage's first failing tensor. Its chunk is counted over all */
    dp_bisect_entry first;
    int nrank, nhead;
    unsigned char *rank, *head; /* [N], [HV]: 1 where this tensor fails */
} dp_bisect_row;

typedef struct {
    int first; /* dp_stage, -1: every stage keeps to its bound */
    int N, HV;
    dp_bisect_row stage[DP_NSTAGES];
    dp_bisect_row conv[2]; /* op step (step.h): conv_fwd, before all stages, and conv_bwd, after
                              them; else nothing to judge */
} dp_bisect;
extern const char *const dp_bisect_conv_names[2];
/* The first wrong stage in the order of execution and its name, conv_fwd and conv_bwd among them;
 * NULL: none. */
const dp_bisect_row *dp_bisect_first(const dp_bisect *b, const char **name);

/* The problem with this kind of owners of its tokens, for dp_bisect_sim and dp_sim_new; it borrows
 * all arrays. The number of parts goes to *parts, 0 if the tokens cannot be cut so. */
dp_problem dp_bisect_owned(const dp_problem *p, dp_own kind, int ranks, int *parts);

#define DP_BISECT_RUNS 3
/* The simulated ranks with a fault, runs >= 1 times; all: also the stages behind the first wrong
 * one. backward needs p->dout. Free *out with dp_bisect_free. */
dp_status dp_bisect_sim(const dp_problem *p, const dp_sim_policy *how, int runs, int all,
                        dp_bisect *out, dp_err *e);
void dp_bisect_free(dp_bisect *b);
/* If no stage is over its bound: each stage's own error against its draws on nearby problems
 * (verdict/expected.h, levels.h; single stages on true inputs). The first that makes more than its
 * formats explain becomes out->first. dtype: format of the inputs. Not for base fp64. */
dp_status dp_bisect_expected(const dp_problem *p, const dp_sim_policy *how, dp_format dtype,
                             dp_bisect *out, dp_err *e);

/* step_bisect.c: as dp_bisect_sim, of recurrences and steps. The convolutions of a step are stages,
 * too, with x and the true gradients of their outputs. */
dp_status dp_step_bisect(const dp_case *c, const dp_sim_policy *how, int runs, int all,
                         dp_bisect *out, dp_err *e);

/* repeat.c: a run compared bit for bit with the run before. Races and orders that change show
 * nowhere else. */
typedef struct {
    int runs, differ; /* differ: runs unlike the first */
    dp_stage stage;   /* the first such place in the order of stages */
    int rank, head;
    unsigned char *hit; /* [N*HV]: where a fault acted (ranks.h); free it */
} dp_repeat;
/* The same run `runs` times; *out says where bits differ first. out->hit is to be freed. */
dp_status dp_repeat_sim(const dp_problem *p, const dp_sim_policy *how, int runs, dp_repeat *out,
                        dp_err *e);
