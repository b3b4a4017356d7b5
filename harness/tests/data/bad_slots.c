/* harness/subject/example_subject.c, which goes wrong with the slots of a pool as $BAD says:
 *   free      a slot that the call does not name gets another number
 *   read      the state goes to the slot that was read, too
 *   padding   the last slot is written where a sequence is padding
 *   batch     sequence i is in slot i, whatever the call says
 */
#define deltaproof_subject_run good_run
#include "../../subject/example_subject.c"
#undef deltaproof_subject_run

static int bad(const char *how) { return getenv("BAD") && !strcmp(getenv("BAD"), how); }

static int named(const deltaproof_subject_problem *p, int64_t slot) {
    int any = 0;
    for (int i = 0; i < p->Nseq; i++)
        any |= p->read_slot[i] == slot || p->write_slot[i] == slot;
    return any;
}

static int pads(const deltaproof_subject_problem *p) {
    int any = 0;
    for (int i = 0; i < p->Nseq; i++)
        any |= p->read_slot[i] < 0;
    return any;
}

static int by_batch(const deltaproof_subject_problem *p, const deltaproof_subject_call *c) {
    deltaproof_subject_problem mine = *p;
    int64_t slot[64];
    for (int i = 0; i < p->Nseq; i++)
        slot[i] = p->read_slot[i] < 0 ? -1 : i;
    mine.read_slot = mine.write_slot = slot;
    return good_run(&mine, c);
}

int deltaproof_subject_run(const deltaproof_subject_problem *p, const deltaproof_subject_call *c) {
    double *pool = deltaproof_subject_find(c, "pool");
    const int64_t n = (int64_t)p->HV * p->K * p->V;
    if (pool && bad("batch")) return by_batch(p, c);
    const int rc = good_run(p, c);
    for (int i = 0; pool && bad("free") && i < p->nslot; i++)
        if (!named(p, i)) pool[i * n + n - 1] = 1;
    for (int i = 0; pool && bad("read") && i < p->Nseq; i++)
        if (p->read_slot[i] >= 0)
            memcpy(pool + p->read_slot[i] * n, pool + p->write_slot[i] * n, sizeof *pool * n);
    if (pool && bad("padding") && pads(p)) pool[(p->nslot - 1) * n] += 1;
    return rc;
}
