/* A recurrence with the key session: the same case, computed in calls (operations.h, session.h). */
#include "case_parts.h"
#include "ref/vocabulary/recurrence.h"

#include <string.h>

/* Calls run forward on one device; the state after each call is judged. */
static dp_status check_keys(const dp_casefile *f, dp_err *e) {
    if (f->ranks.n != 1 || f->ranks.v[0] != 1)
        return dp_casefile_refuse(f, "ranks", e, "the calls of a session run on one rank");
    if (f->merge.n != 1)
        return dp_casefile_refuse(f, "merge", e, "one rank merges nothing: name one order");
    if (f->backward && dp_casefile_has(f, "backward"))
        return dp_casefile_refuse(f, "backward", e, "a session has no gradients");
    if (f->dstate) return dp_casefile_refuse(f, "dstate", e, "a session has no gradients");
    return DP_OK;
}

dp_status dp_session_shape(const dp_casefile *f, const dp_tensorfile *d, dp_case *c,
                           int64_t *tokens, dp_err *e) {
    static const dp_format kept[] = {DP_FP64, DP_FP32, DP_BF16}; /* of session_state */
    dp_err why = {0};
    dp_status s = check_keys(f, e);
    if (!s) s = dp_recurrence_shape(f, d, c, tokens, e);
    if (s) return s;
    if (dp_session_parse(f->session, &c->session, &why))
        return dp_casefile_refuse(f, "session", e, "%s", why.msg);
    if (dp_has_halo(&c->p) && dp_session_rolls_back(&c->session))
        return dp_casefile_refuse(f, "session", e,
                                  "drafted tokens of %s need more of the calls before than a state",
                                  dp_models[c->p.model].name);
    c->session.kept =
        f->session_state < 3 ? kept[f->session_state] : (dp_format)(DP_FP16 + f->session_state - 3);
    c->session.prefix = f->session_prefix;
    c->session.slots = f->session_slots;
    c->session.stagger = f->session_stagger;
    c->session.ring = f->session_ring;
    c->backward = 0;
    return DP_OK;
}

/* Copies the first tokens and the initial state of the first sequence to all sequences. */
static void share_prefix(dp_problem *p, int64_t tokens) {
    for (int i = 0; i < DP_NINPUTS; i++) {
        const dp_row_kind kind = dp_input_fields[i].kind;
        double *x = *dp_input_at(p, i);
        const int64_t n = kind == DP_OF_TOKENS      ? dp_input_width(p, i)
                          : kind == DP_OF_SEQUENCES ? dp_input_count(p, i) / p->Nseq
                                                    : 0,
                      rows = kind == DP_OF_TOKENS ? tokens : 1;
        for (int s = 1; x && n && s < p->Nseq; s++)
            memcpy(x + (kind == DP_OF_TOKENS ? p->cu[s] : s) * n,
                   x + (kind == DP_OF_TOKENS ? p->cu[0] : 0) * n,
                   sizeof(double) * (size_t)(rows * n));
    }
}

static dp_status check_pool(const dp_casefile *f, const dp_case *c, dp_err *e) {
    dp_err why = {0};
    const double state = (double)c->p.HV * c->p.K * c->p.V;
    if (dp_session_slots_fit(&c->session, c->p.Nseq, &why))
        return dp_casefile_refuse(f, "session_slots", e, "%s", why.msg);
    if ((double)c->session.slots * state > (double)DP_CASE_MAX_NUMBERS)
        return dp_casefile_refuse(f, "session_slots", e,
                                  "the pool would hold %.3g numbers, at most %lld fit",
                                  (double)c->session.slots * state, DP_CASE_MAX_NUMBERS);
    return DP_OK;
}

static dp_status check_ring(const dp_casefile *f, const dp_case *c, dp_err *e) {
    const dp_session *s = &c->session;
    if (s->ring && !s->slots)
        return dp_casefile_refuse(f, "session_ring", e,
                                  "session_slots is missing: rings lie there");
    if (s->ring && dp_session_rolls_back(s))
        return dp_casefile_refuse(f, "session_ring", e, "beside drafted tokens");
    return DP_OK;
}

dp_status dp_session_finish(const dp_casefile *f, dp_case *c, dp_err *e) {
    dp_err why = {0};
    if (check_ring(f, c, e) || dp_recurrence_finish(f, c, e)) return DP_EINPUT;
    if (dp_session_fits(&c->session, c->p.cu, c->p.Nseq, &why))
        return dp_casefile_refuse(f, "session", e, "%s", why.msg);
    if (dp_session_prefix_fits(&c->session, c->p.cu, c->p.Nseq, &why))
        return dp_casefile_refuse(f, "session_prefix", e, "%s", why.msg);
    if (c->session.stagger && c->session.prefix)
        return dp_casefile_refuse(f, "session_stagger", e, "beside session_prefix: all wait there");
    const dp_status st = check_pool(f, c, e);
    if (!st && c->session.prefix) share_prefix(&c->p, c->session.prefix);
    return st;
}

dp_status dp_step_session_finish(const dp_casefile *f, dp_case *c, dp_err *e) {
    const dp_status st = dp_session_finish(f, c, e);
    return st ? st : dp_step_finish(f, c, e);
}

void dp_session_describe(const dp_case *c, int ranks, char *out, size_t size) {
    dp_recurrence_describe(c, ranks, out, size);
    char prefix[48] = "", slots[48] = "", stagger[48] = "";
    const size_t n = strlen(out);
    if (c->session.prefix)
        snprintf(prefix, sizeof prefix, ", prefix of %lld shared", (long long)c->session.prefix);
    if (c->session.stagger)
        snprintf(stagger, sizeof stagger, ", staggered by %lld", (long long)c->session.stagger);
    if (c->session.slots)
        snprintf(slots, sizeof slots, ", pool of %lld slots", (long long)c->session.slots);
    if (c->session.ring) {
        const size_t k = strlen(slots);
        snprintf(slots + k, sizeof slots - k, ", rings of %lld", (long long)c->session.ring);
    }
    snprintf(out + n, size - n, ", session %s%s%s%s", c->session.text, prefix, stagger, slots);
}

void dp_session_write(const dp_case *c, FILE *f) {
    dp_recurrence_write(c, f);
    fprintf(f, "session = %s\n", c->session.text);
    if (c->session.kept != DP_FP64)
        fprintf(f, "session_state = %s\n", dp_session_kept(&c->session));
    if (c->session.prefix) fprintf(f, "session_prefix = %lld\n", (long long)c->session.prefix);
    if (c->session.stagger) fprintf(f, "session_stagger = %lld\n", (long long)c->session.stagger);
    if (c->session.slots) fprintf(f, "session_slots = %lld\n", (long long)c->session.slots);
    if (c->session.ring) fprintf(f, "session_ring = %lld\n", (long long)c->session.ring);
}
