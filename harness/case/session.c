/* The schedule of a session, read and walked (session.h). */
#include "session.h"
#include "case.h"
#include "ref/vocabulary/context.h"
#include "ref/vocabulary/text.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define MOST_TOKENS (1 << 24) /* as the key T */

const dp_session *dp_case_session(const dp_case *c) { return c->session.text ? &c->session : NULL; }

/* ---- reading --------------------------------------------------------------------------------- */

static dp_status number(const char *word, const char *part, int64_t least, int64_t most, int64_t *x,
                        dp_err *e) {
    return dp_number_int(part, least, most, x) == DP_NUMBER_OK
               ? DP_OK
               : dp_fail(e, DP_EINPUT,
                         "'%.40s' is no call: N, KxN or N-n, with N and K from 1 on, n below N",
                         word);
}

/* N, KxN, N-n or KxN-n. */
static dp_status read_call(const char *word, int64_t *times, dp_session_call *c, dp_err *e) {
    char copy[64], *tokens = copy;
    if (strlen(word) >= sizeof copy) return number(word, "", 1, 1, times, e);
    strcpy(copy, word);
    char *x = strchr(copy, 'x'), *minus = strchr(copy, '-');
    dp_status s = DP_OK;
    *times = 1;
    if (x) {
        *x = 0;
        tokens = x + 1;
        s = number(word, copy, 1, DP_SESSION_MOST_CALLS, times, e);
    }
    if (minus) *minus = 0;
    if (!s) s = number(word, tokens, 1, MOST_TOKENS, &c->drafted, e);
    /* NOLINTNEXTLINE(*uninitialized.Assign): nobody reads it where s is no DP_OK */
    c->accepted = c->drafted;
    if (!s && minus) s = number(word, minus + 1, 0, c->drafted - 1, &c->accepted, e);
    if (!s && minus && c->drafted > DP_SESSION_MOST_DRAFTED)
        s = dp_fail(e, DP_EINPUT, "'%.40s': a window has at most %d tokens", word,
                    DP_SESSION_MOST_DRAFTED);
    return s;
}

static dp_status add(dp_session *s, int64_t times, dp_session_call c, dp_err *e) {
    if (s->n + times > DP_SESSION_MOST_CALLS)
        return dp_fail(e, DP_EINPUT, "more than %d calls", DP_SESSION_MOST_CALLS);
    s->call = dp_realloc(s->call, sizeof *s->call * (size_t)(s->n + times));
    for (int64_t i = 0; i < times; i++)
        s->call[s->n++] = c;
    s->rolls_back |= times && c.accepted < c.drafted;
    return DP_OK;
}

static char *trim(char *s) {
    s += strspn(s, " \t");
    for (char *end = s + strlen(s); end > s && strchr(" \t", end[-1]);)
        *--end = 0;
    return s;
}

dp_status dp_session_parse(const char *text, dp_session *s, dp_err *e) {
    DP_OWN char *copy = dp_strdup(text);
    dp_status st = DP_OK;
    *s = (dp_session){.text = dp_strdup(text), .kept = DP_FP64};
    for (char *p = copy, *next; p && !st; p = next) {
        dp_session_call c = {0};
        int64_t times;
        next = strchr(p, ',');
        if (next) *next++ = 0;
        st = read_call(trim(p), &times, &c, e);
        if (!st) st = add(s, times, c, e);
    }
    if (st) dp_session_free(s);
    return st;
}

void dp_session_free(dp_session *s) {
    free(s->text);
    free(s->call);
    *s = (dp_session){0};
}

const char *dp_session_kept(const dp_session *s) {
    return s->kept == DP_FP64 ? "returned" : dp_formats[s->kept].name;
}

/* ---- walking --------------------------------------------------------------------------------- */

dp_status dp_session_fits(const dp_session *s, const int64_t *cu, int Nseq, dp_err *e) {
    const int64_t longest = dp_longest_sequence(cu, Nseq);
    int64_t done = 0;
    for (int i = 0; i < s->n; i++) {
        if (done >= longest)
            return dp_fail(e, DP_EINPUT,
                           "no token is left for call %d of %d: the longest sequence has %lld",
                           i + 1, s->n, (long long)longest);
        done += s->call[i].accepted;
    }
    if (done < longest && !s->call[s->n - 1].accepted)
        return dp_fail(e, DP_EINPUT,
                       "%lld of %lld tokens are left, and the last call, which is repeated until "
                       "none is, accepts none",
                       (long long)(longest - done), (long long)longest);
    return DP_OK;
}

dp_session_call dp_session_at(const dp_session *s, int64_t i) {
    return s->call[i < s->n ? i : s->n - 1];
}

dp_status dp_session_prefix_fits(const dp_session *s, const int64_t *cu, int Nseq, dp_err *e) {
    int64_t done = 0;
    if (!s->prefix) return DP_OK;
    if (Nseq < 2) return dp_fail(e, DP_EINPUT, "one sequence shares it with none");
    for (int i = 0; i < Nseq; i++)
        if (cu[i + 1] - cu[i] <= s->prefix)
            return dp_fail(e, DP_EINPUT, "sequence %d has %lld tokens, and must go on behind it", i,
                           (long long)(cu[i + 1] - cu[i]));
    for (int64_t i = 0; done < s->prefix; i++)
        done += dp_session_at(s, i).accepted;
    return done == s->prefix
               ? DP_OK
               : dp_fail(e, DP_EINPUT, "no call ends behind token %lld", (long long)s->prefix);
}

dp_status dp_session_slots_fit(const dp_session *s, int Nseq, dp_err *e) {
    if (!s->slots || s->slots > Nseq) return DP_OK;
    return dp_fail(e, DP_EINPUT,
                   "%d sequence%s must have at least %d slots: one that no sequence owns", Nseq,
                   Nseq > 1 ? "s" : "", Nseq + 1);
}

int64_t dp_session_drafts(const dp_session *s, int Nseq, char *why, size_t size) {
    int64_t most = 1, none = 0;
    for (int i = 0; i < s->n; i++) {
        const dp_session_call *c = &s->call[i];
        if (c->accepted < c->drafted && c->drafted > most) most = c->drafted;
        none |= !c->accepted;
    }
    if (!s->slots)
        snprintf(why, size, "no pool");
    else if (s->prefix)
        snprintf(why, size, "slots of drafted tokens beside those of a prefix");
    else if (none)
        snprintf(why, size,
                 "a window of which no token is accepted: the state before it has no "
                 "slot of a token");
    else if (s->slots <= most * Nseq)
        snprintf(why, size,
                 "%lld slots do not hold %lld drafted tokens of %d sequences and one "
                 "that nobody owns",
                 (long long)s->slots, (long long)most, Nseq);
    else
        return most;
    return 0;
}

int64_t dp_session_call_of(const dp_session *s, int64_t token, dp_session_call *c) {
    int64_t i = 0;
    for (int64_t done = dp_session_at(s, 0).accepted; done <= token;)
        done += dp_session_at(s, ++i).accepted;
    if (c) *c = dp_session_at(s, i);
    return i;
}

void dp_session_firsts(const dp_session *s, const int64_t *cu, int Nseq, unsigned char *first) {
    memset(first, 0, (size_t)cu[Nseq]);
    for (int i = 0; i < Nseq; i++)
        for (int64_t c = 0, t = cu[i]; t < cu[i + 1]; t += dp_session_at(s, c++).accepted)
            first[t] = 1;
}

static int64_t last_call(const dp_session *s, const int64_t *cu, int i) {
    return cu[i + 1] > cu[i] ? i * s->stagger + dp_session_call_of(s, cu[i + 1] - cu[i] - 1, NULL)
                             : 0;
}

void dp_session_ended(const dp_session *s, const int64_t *cu, int Nseq, unsigned char *ended) {
    int64_t last = -1;
    for (int i = 0; i < Nseq; i++) {
        const int64_t own = last_call(s, cu, i);
        if (own > last) last = own;
    }
    for (int i = 0; i < Nseq; i++)
        ended[i] = last_call(s, cu, i) < last;
}
