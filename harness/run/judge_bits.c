/* Tensors that are right to the bit: what a call must leave alone or hand on (outputs.h). */
#include "outputs.h"

#include <math.h>
#include <stdlib.h>

dp_judgement *dp_judge_bits(const dp_compare_in *in, int64_t first, dp_run *r) {
    r->tensor = realloc(r->tensor, sizeof *r->tensor * (size_t)(r->ntensor + 1));
    if (!r->tensor) abort();
    dp_judgement *t = &r->tensor[r->ntensor++];
    dp_compare(in, t);
    t->verdict = first < 0 ? DP_PASS : DP_FAIL;
    t->tier = "exact";
    t->why[0] = 0;
    if (first < 0) return t;
    const double got = in->got[first], want = in->want[first];
    t->times = INFINITY;
    t->failed = (dp_row){.index = (int)(first % in->width),
                         .got = got,
                         .want = want,
                         .err = fabs(got - want),
                         .size = fabs(want)};
    in->place(in->ctx, first / in->width, &t->failed.at);
    return t;
}
