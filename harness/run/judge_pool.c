/* Slots of a session's pool that were not to be written (harness/simulated/slots.h): they must have
 * the bits that they had before the call. */
#include "outputs.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

typedef struct {
    const dp_pool_seen *seen;
    int heads;
} pool_rows; /* a row: a head of a slot */

static void place(const void *ctx, int64_t row, dp_place *at) {
    const pool_rows *x = ctx;
    const int first = x->seen->slot == row / x->heads, owner = x->seen->owner;
    *at = (dp_place){0, (int)(row % x->heads), first && owner >= 0 ? owner : -1, -1, -1};
}

static const char *whose(int owner, char text[64]) {
    if (owner == DP_SLOT_FREE) return "which no sequence owns";
    if (owner == DP_SLOT_OF_PREFIX) return "which holds the shared prefix";
    snprintf(text, 64, "which sequence %d owns", owner);
    return text;
}

/* Of the first slot that was overwritten, its first entry that is another. */
static void say(const pool_rows *x, dp_judgement *t) {
    const dp_pool_seen *s = x->seen;
    const int64_t from = s->slot * x->heads * s->width;
    int64_t z = 0;
    char owner[64];
    while (!memcmp(s->was + from + z, s->is + from + z, sizeof *s->was))
        z++;
    const double was = s->was[from + z], is = s->is[from + z];
    t->failed = (dp_row){.index = (int)(z % s->width),
                         .got = is,
                         .want = was,
                         .err = fabs(is - was),
                         .size = fabs(was)};
    place(x, s->slot * x->heads + z / s->width, &t->failed.at);
    snprintf(t->why, sizeof t->why,
             "slot %lld, %s, was overwritten in call %lld: entry %d of head %d was %g (%a), is %g "
             "(%a)%s",
             (long long)s->slot, whose(s->owner, owner), (long long)s->call + 1, t->failed.index,
             t->failed.at.head, was, was, is, is,
             s->overwritten > 1 ? "; it is not the only one" : "");
}

void dp_judge_pool(const dp_sharding *sp, const dp_pool_seen *seen, dp_run *r) {
    const pool_rows x = {seen, sp->c->p.HV};
    if (!seen->was) return;
    r->tensor = realloc(r->tensor, sizeof *r->tensor * (size_t)(r->ntensor + 1));
    if (!r->tensor) abort();
    dp_judgement *t = &r->tensor[r->ntensor++];
    const dp_compare_in in = {.name = "pool",
                              .N = 1,
                              .heads = x.heads,
                              .rows = seen->slots * x.heads,
                              .width = seen->width,
                              .got = seen->is,
                              .want = seen->was,
                              .place = place,
                              .ctx = &x};
    dp_compare(&in, t);
    t->verdict = seen->overwritten ? DP_FAIL : DP_PASS;
    t->tier = "exact";
    t->why[0] = 0;
    if (!seen->overwritten) return;
    t->times = INFINITY;
    say(&x, t);
    dp_judge_speak(r->ntensor - 1, r);
}
