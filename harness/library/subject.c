/* A kernel in a shared library as a subject: what it says of itself, and one run (subject.h). Its
 * processes run the code of subject_host.c. */
#define _GNU_SOURCE
#include "command_parts.h"
#include "ref/vocabulary/text.h"

#include <sys/stat.h>

#include <errno.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

const char *const dp_subject_outcomes[DP_SUBJECT_NOUTCOMES] = {
    "returned", "unsupported",   "failed", "crashed",
    "hung",     "out of bounds", "exited", "bad output"};

/* ---- about ----------------------------------------------------------------------------------- */

dp_status dp_subject_read_writes(const char *path, char *writes, dp_subject *s, dp_err *e) {
    char *save;
    int any = 0;
    for (char *t = strtok_r(writes, " ,", &save); t; t = strtok_r(NULL, " ,", &save)) {
        int f = -1;
        for (int i = 0; i < DP_NRESULTS; i++)
            if (!strcmp(t, dp_result_fields[i].name)) f = i;
        const int g = f < 0 ? dp_stage_tensor_find(t) : -1;
        int *const need = !strcmp(t, DP_SUBJECT_STATES)   ? &s->writes_states
                          : !strcmp(t, DP_SUBJECT_POOL)   ? &s->writes_pool
                          : !strcmp(t, DP_SUBJECT_DRAFTS) ? &s->writes_drafts
                          : !strcmp(t, DP_SUBJECT_TREES)  ? &s->takes_trees
                          : !strcmp(t, DP_SUBJECT_RING)   ? &s->writes_ring
                                                          : NULL;
        if (need) {
            *need = any = 1;
            continue;
        }
        if (f < 0 && (g < 0 || strcmp(t, dp_stage_tensors[g].name)))
            return dp_fail(
                e, DP_EINPUT,
                "%s: writes '%s', which is no output and no stage of deltaproof_subject.h", path,
                t);
        if (f >= 0)
            s->writes[f] = 1;
        else
            s->writes_stage[g] = 1;
        any = 1;
    }
    return any ? DP_OK : dp_fail(e, DP_EINPUT, "%s: says that it writes nothing", path);
}

/* Words of the list; an empty one: those with a beta whose keys all read one state. */
static dp_status read_recurrences(const char *path, char *words, dp_subject *s, dp_err *e) {
    char *save;
    s->has[DP_USER] = 0;
    for (int i = 0; i < DP_NMODELS; i++)
        s->has[i] = !*words && dp_models[i].strength == DP_BY_BETA && !dp_models[i].in_turn;
    for (char *t = strtok_r(words, " ,", &save); t; t = strtok_r(NULL, " ,", &save)) {
        int m = 0;
        while (m < DP_NMODELS && strcmp(t, dp_models[m].name))
            m++;
        if (m == DP_USER && strcmp(t, "own"))
            return dp_fail(e, DP_EINPUT, "%s: computes '%s'; known: " DP_MODEL_WORDS "|own", path,
                           t);
        s->has[m] = 1;
    }
    return DP_OK;
}

static dp_status read_about(dp_subject_about a, const char *path, dp_subject *s, dp_err *e) {
    if (a.abi != DP_SUBJECT_ABI)
        return dp_fail(
            e, DP_EINPUT,
            "%s: has version %d of deltaproof_subject.h, this program has %d: build it again", path,
            a.abi, DP_SUBJECT_ABI);
    int base = -1;
    for (int i = 0; i < DP_NBASES; i++)
        if (!strcmp(a.base, dp_base_names[i])) base = i;
    if (base < 0)
        return dp_fail(e, DP_EINPUT, "%s: claims base '%s'; known: " DP_BASE_WORDS, path, a.base);
    if (dp_format_find(a.chain) < 0)
        return dp_fail(e, DP_EINPUT, "%s: claims chain '%s'; known: " DP_FORMAT_WORDS, path,
                       a.chain);
    if (a.kind != DP_SUBJECT_WHOLE && a.kind != DP_SUBJECT_PER_RANK)
        return dp_fail(e, DP_EINPUT,
                       "%s: kind %d is neither DP_SUBJECT_WHOLE nor DP_SUBJECT_PER_RANK", path,
                       a.kind);
    if (a.max_ranks < 1 || a.max_ranks > DP_SUBJECT_MAX_RANKS)
        return dp_fail(e, DP_EINPUT, "%s: max_ranks %d is not within 1 to %d", path, a.max_ranks,
                       DP_SUBJECT_MAX_RANKS);
    if (a.declared) {
        dp_design d;
        dp_err why = {0};
        if (dp_design_parse(a.design, (dp_base)base, &d, &why))
            return dp_fail(e, DP_EINPUT, "%s: %s", path, why.msg);
        s->design = dp_strdup(a.design);
    }
    s->base = base;
    s->chain = dp_format_find(a.chain);
    s->per_rank = a.kind;
    s->max_ranks = a.max_ranks;
    const dp_status st = read_recurrences(path, a.recurrences, s, e);
    if (st) return st;
    dp_text_printable(a.name[0] ? a.name : dp_subject_base_name(path), s->name, sizeof s->name);
    return dp_subject_read_writes(path, a.writes, s, e);
}

static dp_status check_file(const char *path, dp_err *e) {
    struct stat st;
    if (stat(path, &st)) return dp_fail(e, DP_EINPUT, "%s: %s", path, strerror(errno));
    return S_ISREG(st.st_mode) ? DP_OK : dp_fail(e, DP_EINPUT, "%s: not a regular file", path);
}

dp_status dp_subject_open(const char *path, double limit_s, int64_t memory, dp_subject *s,
                          dp_err *e) {
    dp_subject_memory m;
    dp_subject_ending end;
    *s = (dp_subject){.memory = memory > 0 ? memory : dp_memory_bytes()};
    dp_status st = check_file(path, e);
    if (st) return st;
    s->path = realpath(path, NULL);
    const int why = !s->path ? errno : strlen(s->path) >= sizeof m.c->lib ? ENAMETOOLONG : 0;
    if (why) {
        dp_subject_close(s);
        return dp_fail(e, DP_EINPUT, "%s: %s", path, strerror(why));
    }
    dp_subject_shared_new(&m, s, 1, 1);
    m.c->about = 1;
    st = dp_subject_shared_make(&m, NULL, 0, e);
    if (!st) st = dp_subject_run_processes(&m, limit_s > 0 ? limit_s : DP_SUBJECT_LIMIT_S, &end, e);
    if (!st && end.outcome != DP_SUBJECT_RETURNED)
        st = dp_fail(e, DP_EINPUT, "%s: %s", path, end.why);
    if (!st) st = read_about(dp_subject_look_about(&m), path, s, e);
    dp_subject_shared_free(&m);
    if (st) dp_subject_close(s);
    return st;
}

void dp_subject_close(dp_subject *s) {
    if (s->command) dp_command_close(s->command);
    free(s->path);
    free(s->design);
    *s = (dp_subject){0};
}

/* The outcome of call m->call. */
static void look_at_call(const dp_subject_memory *m, const dp_problem *p,
                         const dp_subject_ending *end, dp_subject_result *out) {
    if (end->outcome != DP_SUBJECT_RETURNED && m->call == end->call) {
        out->outcome = end->outcome;
        memcpy(out->why, end->why, sizeof out->why);
    }
    if (out->outcome == DP_SUBJECT_RETURNED) dp_subject_check_patterns(m, out);
    dp_subject_collect(m, p, m->c->ranks, out);
}

static dp_status run_library(const dp_subject *s, int n, const dp_problem *const *p,
                             const dp_subject_call *call, dp_subject_result *out, int *made,
                             dp_err *e) {
    const int N = call->N;
    dp_subject_memory m;
    dp_subject_ending end;
    const double t0 = dp_subject_now();
    dp_subject_shared_new(&m, s, N, s->per_rank ? N : 1);
    m.pool = call->pool;
    dp_subject_describe(m.c, p[0], call);
    dp_subject_lay_out(&m, s, p[0], call);
    dp_subject_shared_calls(&m, n, p);
    dp_status st = dp_subject_shared_make(&m, p, call->backward, e);
    if (!st) st = dp_subject_run_processes(&m, n * call->limit_s, &end, e);
    const int returned = !st && end.outcome == DP_SUBJECT_RETURNED ? n - 1 : st ? -1 : end.call;
    for (m.call = 0; m.call <= returned; m.call++) {
        look_at_call(&m, p[m.call], &end, &out[m.call]);
        out[m.call].seconds = (dp_subject_now() - t0) / (returned + 1);
        ++*made;
        if (out[m.call].outcome != DP_SUBJECT_RETURNED) break;
    }
    dp_subject_shared_free(&m);
    return st;
}

static dp_status run_command(const dp_subject *s, int n, const dp_problem *const *p,
                             const dp_subject_call *call, dp_subject_result *out, int *made,
                             dp_err *e) {
    dp_status st = DP_OK;
    while (*made < n && !st && (!*made || out[*made - 1].outcome == DP_SUBJECT_RETURNED)) {
        st = dp_command_run(s, p[*made], call, &out[*made], e);
        ++*made;
    }
    return st;
}

dp_status dp_subject_run_calls(const dp_subject *s, int n, const dp_problem *const *p,
                               const dp_subject_call *call, dp_subject_result *out, int *made,
                               dp_err *e) {
    const int N = call->N;
    *made = 0;
    for (int i = 0; i < n; i++)
        out[i] = (dp_subject_result){0};
    if (N < 1 || N > DP_SUBJECT_MAX_RANKS || p[0]->T % N)
        return dp_fail(e, DP_EINPUT, "%lld tokens over %d ranks: not for a subject",
                       (long long)p[0]->T, N);
    if (!s->command && !s->has[p[0]->model]) {
        *made = 1;
        out->outcome = DP_SUBJECT_REFUSED;
        snprintf(out->why, sizeof out->why,
                 "it does not say that it computes %s (deltaproof_subject_recurrences)",
                 dp_models[p[0]->model].name);
        return DP_OK;
    }
    return (s->command ? run_command : run_library)(s, n, p, call, out, made, e);
}

dp_status dp_subject_run(const dp_subject *s, const dp_problem *p, const dp_subject_call *call,
                         dp_subject_result *out, dp_err *e) {
    int made;
    return dp_subject_run_calls(s, 1, &p, call, out, &made, e);
}

void dp_subject_result_free(dp_subject_result *r) {
    dp_result_free(&r->r);
    for (int i = 0; i < DP_NSTAGE_TENSORS; i++)
        free(r->stage[i]);
    free(r->states);
    free(r->pool);
    for (int i = 0; i < DP_NQKV; i++)
        free(r->y[i]);
    dp_conv_states_free(&r->conv);
    *r = (dp_subject_result){0};
}

int dp_subject_unwritten(double x) { return !memcmp(&x, &DP_SUBJECT_UNWRITTEN, sizeof x); }

int64_t dp_subject_flaws(const double *x, int64_t n, char *text, size_t size) {
    int64_t unwritten = 0, wild = 0, first = -1, odd = -1;
    *text = 0;
    for (int64_t i = 0; i < n; i++) {
        if (dp_subject_unwritten(x[i]))
            first = unwritten++ ? first : i;
        else if (!isfinite(x[i]))
            odd = wild++ ? odd : i;
    }
    if (unwritten == n)
        snprintf(text, size, "was never written");
    else if (unwritten)
        snprintf(text, size, "%lld of %lld entries were never written, the first is entry %lld",
                 (long long)unwritten, (long long)n, (long long)first);
    else if (wild)
        snprintf(text, size, "%lld of %lld entries are NaN or Inf, the first is entry %lld",
                 (long long)wild, (long long)n, (long long)odd);
    return unwritten;
}
