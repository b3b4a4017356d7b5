/* The states of convolutions that the calls of a session hand on: the bits of the inputs
 * (harness/simulated/conv_states.h). */
#include "outputs.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static void place(const void *ctx, int64_t row, dp_place *at) {
    const int each = *(const int *)ctx; /* rows of a sequence */
    *at = (dp_place){0, 0, (int)(row / each), -1, -1};
}

/* Its first entry that is another. */
static void say(const dp_conv_calls *c, int i, dp_judgement *t) {
    const dp_conv *v = c->conv[i];
    const double *got = c->got.of[i], *want = c->want.of[i];
    const int each = v->W - 1;
    int64_t z = 0;
    while (!memcmp(got + z, want + z, sizeof *got))
        z++;
    const int row = (int)(z / v->D % each);
    t->failed = (dp_row){.index = (int)(z % v->D),
                         .got = got[z],
                         .want = want[z],
                         .err = fabs(got[z] - want[z]),
                         .size = fabs(want[z])};
    place(&each, z / v->D, &t->failed.at);
    snprintf(t->why, sizeof t->why,
             "call %lld hands on another input than that of the token %d before its next one: "
             "channel %d is %g (%a), was %g (%a)",
             (long long)c->call + 1, each - row, t->failed.index, got[z], got[z], want[z], want[z]);
}

static void judge(const dp_conv_calls *c, int i, dp_judgement *t) {
    const dp_conv *v = c->conv[i];
    const int64_t n = v->Nseq * dp_conv_state_size(v);
    const int each = v->W - 1;
    const int wrong = memcmp(c->got.of[i], c->want.of[i], sizeof(double) * (size_t)n) != 0;
    char name[24];
    snprintf(name, sizeof name, "conv_state_%s", dp_qkv_name(i));
    const dp_compare_in in = {.name = name,
                              .N = 1,
                              .heads = 1,
                              .rows = (int64_t)v->Nseq * each,
                              .width = v->D,
                              .got = c->got.of[i],
                              .want = c->want.of[i],
                              .place = place,
                              .ctx = &each};
    dp_compare(&in, t);
    t->verdict = wrong ? DP_FAIL : DP_PASS;
    t->tier = "exact";
    t->why[0] = 0;
    if (!wrong) return;
    t->times = INFINITY;
    say(c, i, t);
}

void dp_judge_conv_states(const dp_conv_calls *c, dp_run *r) {
    r->tensor = realloc(r->tensor, sizeof *r->tensor * (size_t)(r->ntensor + DP_NQKV));
    if (!r->tensor) abort();
    for (int i = DP_NQKV - 1; i >= 0; i--) {
        if (!c->conv[i] || !dp_conv_state_size(c->conv[i]) || !c->got.of[i]) continue;
        judge(c, i, &r->tensor[r->ntensor++]);
        if (r->tensor[r->ntensor - 1].verdict == DP_FAIL) dp_judge_speak(r->ntensor - 1, r);
    }
}
