/* Which stage made a judged run fail, from its tensors alone (blame.h). */
#include "blame.h"
#include "ref/vocabulary/text.h"

#include <stdio.h>
#include <string.h>

/* The tensors of the pipeline, in the order of execution, and their sources. */
typedef struct {
    const char *name;
    dp_stage stage;
    const char *from;
} node;
static const node NODES[] = {
    {"act", DP_STAGE_GATE, ""}, /* hidden */
#define RESULT(NAME, STAGE, FROM) {NAME, DP_STAGE_##STAGE, FROM},
#define TENSOR(ID, NAME, STAGE, FROM, ...) RESULT(NAME, STAGE, FROM)
#include "ref/chunk/stages.inc"
};
#define NNODES ((int)(sizeof NODES / sizeof *NODES))

static int made_from(int i, int j) { return dp_is_listed(NODES[j].name, NODES[i].from, ' '); }

static const dp_judgement *judged(const dp_run *r, const char *name) {
    for (int t = 0; t < r->ntensor; t++)
        if (!strcmp(r->tensor[t].name, name)) return &r->tensor[t];
    return NULL;
}

/* Does that stage run? On one rank nothing is sent. */
static int runs(const dp_run *r, dp_stage s) { return r->ranks > 1 || !dp_stage_sends[s]; }

/* Marks what node i is made of, up to what is shown. */
static void ancestors(const dp_run *r, int i, unsigned char *mark) {
    for (int j = 0; j < i; j++)
        if (made_from(i, j) && !mark[j] && runs(r, NODES[j].stage)) {
            mark[j] = 1;
            if (!judged(r, NODES[j].name)) ancestors(r, j, mark);
        }
}

dp_blame dp_blame_run(const dp_run *r) {
    dp_blame b = {0};
    unsigned char clear[NNODES] = {0}, made[NNODES] = {0};
    int bad = -1;
    for (int i = 0; i < NNODES; i++) {
        const dp_judgement *t = judged(r, NODES[i].name);
        if (t && t->verdict == DP_FAIL && bad < 0) {
            bad = i;
            b.tensor = t;
        } else if (t && t->verdict == DP_PASS) {
            clear[i] = 1;
            ancestors(r, i, clear);
        }
    }
    if (bad < 0) return b;
    b.stage = NODES[bad].stage;
    b.backward = dp_stage_is_backward(b.stage);
    b.suspect[b.stage] = 1;
    ancestors(r, bad, made);
    for (int i = 0; i < bad; i++) {
        if (!made[i] || clear[i]) continue;
        b.suspect[NODES[i].stage] = 1;
        if (!strcmp(NODES[i].name, "Akk")) b.suspect[DP_STAGE_INTRA] = 1;
        if (i && !judged(r, NODES[i].name))
            dp_text_add(b.shows, sizeof b.shows, "%s%s", *b.shows ? " " : "", NODES[i].name);
    }
    for (int i = 0; i < DP_NSTAGES; i++)
        b.nsuspect += b.suspect[i];
    if (b.nsuspect == 1) b.shows[0] = 0;
    return b;
}

const char *dp_blame_tensor(int i, dp_stage *stage) {
    if (++i >= NNODES) return NULL; /* after the hidden one */
    *stage = NODES[i].stage;
    return NODES[i].name;
}

void dp_blame_order(const dp_run *r, void (*f)(const dp_judgement *t, dp_stage stage)) {
    for (int i = 0; i < NNODES; i++) {
        const dp_judgement *t = judged(r, NODES[i].name);
        if (t) f(t, NODES[i].stage);
    }
}

const dp_judgement *dp_first_failing(const dp_run *r, const char **stage) {
    const dp_blame b = dp_blame_run(r);
    *stage = b.tensor ? dp_stage_names[b.stage] : "";
    if (b.tensor) return b.tensor;
    for (int t = 0; t < r->ntensor; t++)
        if (r->tensor[t].verdict == DP_FAIL) return &r->tensor[t];
    return NULL;
}
