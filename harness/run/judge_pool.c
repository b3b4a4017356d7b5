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

/* The first entry that is another of the first slot that was overwritten; -1: none was. */
static int64_t first_wrong(const dp_pool_seen *s, int heads) {
    int64_t z = s->slot * heads * s->width;
    if (!s->overwritten) return -1;
    while (!memcmp(s->was + z, s->is + z, sizeof *s->was))
        z++;
    return z;
}

static void say(const dp_pool_seen *s, dp_judgement *t) {
    const double was = t->failed.want, is = t->failed.got;
    char owner[64];
    snprintf(t->why, sizeof t->why,
             "slot %lld, %s, was overwritten in call %lld: entry %d of head %d was %g (%a), is %g "
             "(%a)%s",
             (long long)s->slot, whose(s->owner, owner), (long long)s->call + 1, t->failed.index,
             t->failed.at.head, was, was, is, is,
             s->overwritten > 1 ? "; it is not the only one" : "");
}

/* Of results that are NaN, where the inputs are not. */
static void say_unowned(const dp_sharding *sp, dp_run *r) {
    const size_t n = strlen(r->why);
    if (r->speaks < 0 || r->tensor[r->speaks].flaw != DP_FLAW_NOT_FINITE) return;
    if (sp->c->allow_nonfinite) return;
    snprintf(r->why + n, sizeof r->why - n,
             "; a slot that no sequence owns is NaN before a call: one was read");
}

/* Entries, 0 where a slot that nobody owns has kept its NaN. */
static double *without_nan(const dp_pool_seen *s, const double *x, int heads) {
    double *y = dp_copy(x, s->slots * heads * s->width);
    for (int64_t z = 0; z < s->slots * heads * s->width; z++)
        if (isnan(y[z]) && !memcmp(s->was + z, s->is + z, sizeof *y)) y[z] = 0;
    return y;
}

void dp_judge_pool(const dp_sharding *sp, const dp_pool_seen *seen, dp_run *r) {
    const pool_rows x = {seen, sp->c->p.HV};
    if (!seen->was) return;
    double *was = without_nan(seen, seen->was, x.heads), *is = without_nan(seen, seen->is, x.heads);
    const dp_compare_in in = {.name = "pool",
                              .N = 1,
                              .heads = x.heads,
                              .rows = seen->slots * x.heads,
                              .width = seen->width,
                              .got = is,
                              .want = was,
                              .place = place,
                              .ctx = &x};
    dp_judgement *t = dp_judge_bits(&in, first_wrong(seen, x.heads), r);
    free(was);
    free(is);
    if (t->verdict != DP_FAIL) {
        say_unowned(sp, r);
        return;
    }
    say(seen, t);
    dp_judge_speak(r->ntensor - 1, r);
}
