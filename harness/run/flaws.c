/* Entries of results and stages that were never written, or are NaN, named in the verdict. */
#include "outputs.h"

#include <stdio.h>

/* The content of one tensor; partial: entries of it need not be written. x NULL: neither a result
 * nor a stage. */
typedef struct {
    const double *x;
    int64_t n;
    int partial;
} content;

static content content_of(const dp_judging *j, const char *name) {
    const dp_problem *p = &j->sp->c->p;
    const int field = dp_result_find(name);
    if (field >= 0) {
        int64_t rows, width;
        dp_result_shape(p, field, &rows, &width);
        return (content){*dp_result_at((dp_result *)j->out->results, field), rows * width, 0};
    }
    const int stage = dp_stage_tensor_find(name);
    if (stage < 0) return (content){0};
    return (content){j->out->stage[stage], dp_stage_tensor_size(p, j->sp->N, stage),
                     stage == DP_AKK || stage == DP_AQK ||
                         dp_stage_tensors[stage].kind == DP_PER_RANK};
}

void dp_name_flaws(const dp_judging *j, dp_run *run) {
    for (int i = 0; i < run->ntensor; i++) {
        dp_judgement *t = &run->tensor[i];
        const content c = content_of(j, t->name);
        char text[sizeof t->why];
        if (!c.x) continue;
        const int64_t unwritten = dp_subject_flaws(c.x, c.n, text, sizeof text);
        if (!*text) continue;
        if (t->verdict != DP_FAIL && (c.partial || !unwritten)) continue;
        t->verdict = DP_FAIL;
        t->flaw = unwritten ? DP_FLAW_UNWRITTEN : DP_FLAW_NOT_FINITE;
        snprintf(t->why, sizeof t->why, "%s", text);
    }
}
