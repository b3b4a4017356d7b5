/* harness/search/repeat.h - a run compared bit for bit with the run before: races and orders that
 * change show nowhere else. */
#ifndef DP_REPEAT_H
#define DP_REPEAT_H
#include "harness/simulated/ranks.h"

typedef struct {
    int runs, differ; /* differ: runs unlike the first */
    dp_stage stage;   /* the first such place in the order of stages */
    int rank, head;
    unsigned char *hit; /* [N*HV]: where a fault acted (ranks.h); free it */
} dp_repeat;
/* The same run `runs` times; *out says where bits differ first. out->hit is to be freed. */
dp_status dp_repeat_sim(const dp_problem *p, const dp_sim_policy *how, int runs, dp_repeat *out,
                        dp_err *e);
#endif
