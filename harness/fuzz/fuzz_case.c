/* libFuzzer target: any text is either refused with a message that names the file, or a case whose settings are consistent; small ones
 * without a data file are generated too. */
#include "../case.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static void must(int ok, const char *what) {
    if (ok) return;
    fprintf(stderr, "%s\n", what);
    abort();
}

static void check_refusal(const dp_err *e) { must(e->code != DP_OK && !strncmp(e->msg, "fuzz.case", 9), e->msg); }

static int small(const dp_case *c) {
    if (c->data || c->op == DP_OP_CHAIN) return 0;
    if (c->op == DP_OP_CONV) return c->conv.T * c->conv.D < 1 << 14;
    return (c->p.T * c->p.R + (int64_t)c->p.Nseq * c->p.K) * c->p.HV * (c->p.K + c->p.V) < 1 << 14;
}

int LLVMFuzzerTestOneInput(const uint8_t *bytes, size_t size) {
    dp_case c;
    dp_err e = {0};
    if (dp_case_parse((const char *)bytes, size, "fuzz.case", 0, &c, &e)) {
        check_refusal(&e);
        return 0;
    }
    must(c.reason && c.source && c.nranks >= 1 && c.nranks <= 16 && c.nbase >= 1 && c.nchain >= 1 && c.nmerge >= 1, "incomplete settings");
    const int generate = small(&c);
    dp_case_free(&c);
    if (!generate) return 0;
    if (dp_case_parse((const char *)bytes, size, "fuzz.case", 1, &c, &e)) {
        check_refusal(&e);
        return 0;
    }
    if (c.op == DP_OP_RECURRENCE) must(!dp_problem_check(&c.p, c.allow_nonfinite, &e), e.msg);
    dp_case_free(&c);
    return 0;
}
