/* Which stage made a judged run fail, from its tensors alone (blame.h). */
#include "blame.h"
#include "ref/vocabulary/text.h"

#include <stdio.h>
#include <string.h>

/* The tensors of the pipeline, in the order of execution, and their sources. The node act is q, k
 * and beta (erase o k, write o v) after their activations, which no program writes. */
typedef struct {
    const char *name;
    dp_stage stage;
    const char *from;
    int hidden;
} node;
#define OF_VALUES(ID, FIELD, ...) {"d" #FIELD, DP_STAGE_WY_BWD, "dv_new Akk act", 0},
static const node NODES[] = {
    {"act", DP_STAGE_GATE, "", 1},
    {"gcum", DP_STAGE_GATE, "", 0},
    {"Akk", DP_STAGE_SOLVE, "gcum act", 0},
    {"Aqk", DP_STAGE_INTRA, "gcum act", 0},
    {"w", DP_STAGE_WY, "Akk gcum act", 0},
    {"u", DP_STAGE_WY, "Akk act", 0},
    {"kg", DP_STAGE_WY, "gcum act", 0},
    {"qg", DP_STAGE_WY, "gcum act", 0},
    {"M", DP_STAGE_PRE_FWD, "w kg gcum", 0},
    {"H", DP_STAGE_PRE_FWD, "w kg u gcum", 0},
    {"S_in", DP_STAGE_MERGE_FWD, "M H", 0},
    {"h", DP_STAGE_STATE_FWD, "S_in w kg u gcum", 0},
    {"v_new", DP_STAGE_STATE_FWD, "h w u", 0},
    {"final_state", DP_STAGE_STATE_FWD, "h v_new kg gcum", 0},
    {"o", DP_STAGE_OUTPUT, "qg h Aqk v_new", 0},
    {"dv_local", DP_STAGE_DAV, "Aqk", 0},
    {"dM", DP_STAGE_PRE_BWD, "w kg gcum", 0},
    {"dH", DP_STAGE_PRE_BWD, "w kg qg dv_local gcum", 0},
    {"dS_out", DP_STAGE_MERGE_BWD, "dM dH", 0},
    {"dh", DP_STAGE_STATE_BWD, "dS_out w kg qg dv_local gcum", 0},
    {"dv_new", DP_STAGE_STATE_BWD, "dv_local kg dh", 0},
    {"ds0", DP_STAGE_STATE_BWD, "dh dv_new w qg gcum", 0},
    {"dv", DP_STAGE_WY_BWD, "dv_new Akk act", 0},
    DP_ROW_VALUES(OF_VALUES){"dbeta", DP_STAGE_WY_BWD, "dv_new h dh v_new Akk gcum act", 0},
    {"dq", DP_STAGE_INTRA_BWD, "h v_new Aqk gcum act", 0},
    {"dk", DP_STAGE_INTRA_BWD, "dv_new h dh v_new Akk Aqk gcum act", 0},
    {"derase", DP_STAGE_INTRA_BWD, "dv_new h dh v_new Akk Aqk gcum act", 0},
    {"dlr_a", DP_STAGE_INTRA_BWD, "dv_new h v_new Akk gcum act", 0},  /* reads: derase, scaled */
    {"dlr_b", DP_STAGE_INTRA_BWD, "dv_new dh v_new Akk gcum act", 0}, /* writes alone: dk's half */
    {"dnumber", DP_STAGE_INTRA_BWD, "dv_new h dh v_new Akk gcum act", 0},
    {"dangle", DP_STAGE_INTRA_BWD, "dv_new h dh v_new Akk Aqk gcum act", 0},
    {"dg", DP_STAGE_INTRA_BWD, "dv_new h dh v_new Akk Aqk gcum act", 0},
    {"dA_log", DP_STAGE_GATE_BWD, "dg", 0},
    {"ddt_bias", DP_STAGE_GATE_BWD, "dg", 0},
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
        if (!NODES[i].hidden && !judged(r, NODES[i].name))
            dp_text_add(b.shows, sizeof b.shows, "%s%s", *b.shows ? " " : "", NODES[i].name);
    }
    for (int i = 0; i < DP_NSTAGES; i++)
        b.nsuspect += b.suspect[i];
    if (b.nsuspect == 1) b.shows[0] = 0;
    return b;
}

const char *dp_blame_tensor(int i, dp_stage *stage) {
    i += NODES[0].hidden; /* the only one */
    if (i >= NNODES) return NULL;
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
