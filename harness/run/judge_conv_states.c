/* The states of convolutions that the calls of a session hand on: the bits of the inputs
 * (harness/simulated/conv_states.h). */
#include "outputs.h"

#include <stdio.h>
#include <string.h>

static void place(const void *ctx, int64_t row, dp_place *at) {
    const int each = *(const int *)ctx; /* rows of a sequence */
    *at = (dp_place){0, 0, (int)(row / each), -1, -1};
}

/* The first entry that is another; -1: none. */
static int64_t first_wrong(const dp_conv_calls *c, int i) {
    const int64_t n = c->conv[i]->Nseq * dp_conv_state_size(c->conv[i]);
    for (int64_t z = 0; z < n; z++)
        if (memcmp(c->got.of[i] + z, c->want.of[i] + z, sizeof(double))) return z;
    return -1;
}

static void judge(const dp_conv_calls *c, int i, dp_run *r) {
    const dp_conv *v = c->conv[i];
    const int each = v->W - 1;
    const int64_t wrong = first_wrong(c, i);
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
    dp_judgement *t = dp_judge_bits(&in, wrong, r);
    if (t->verdict != DP_FAIL) return;
    const dp_row *f = &t->failed;
    snprintf(t->why, sizeof t->why,
             "call %lld hands on another input than that of the token %d before its next one: "
             "channel %d is %g (%a), was %g (%a)",
             (long long)c->call + 1, each - (int)(wrong / v->D % each), f->index, f->got, f->got,
             f->want, f->want);
    dp_judge_speak(r->ntensor - 1, r);
}

void dp_judge_conv_states(const dp_conv_calls *c, dp_run *r) {
    for (int i = DP_NQKV - 1; i >= 0; i--)
        if (c->conv[i] && dp_conv_state_size(c->conv[i]) && c->got.of[i]) judge(c, i, r);
}
