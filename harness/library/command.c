/* Any program as a subject: what is called, and one call (command.h). */
#define _GNU_SOURCE
#include "command_parts.h"
#include "ref/vocabulary/text.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* ---- what is called -------------------------------------------------------------------------- */

/* A word with the path where it says IN or OUT; consumes the word. */
static char *with_paths(const struct dp_command *c, char *word) {
    const int in = dp_command_names(word, "IN"), out = dp_command_names(word, "OUT");
    char *text;
    if (!in && !out) return word;
    const int before = (int)(strlen(word) - strlen(in ? "IN" : "OUT"));
    if (asprintf(&text, "%.*s%s", before, word, in ? c->in : c->out) < 0) abort();
    free(word);
    return text;
}

static void put_paths(struct dp_command *c, int appended) {
    for (int i = 0; i < c->nword; i++)
        c->word[i] = with_paths(c, c->word[i]);
    if (!appended) return;
    c->word = dp_realloc(c->word, sizeof *c->word * (size_t)(c->nword + 2));
    c->word[c->nword++] = dp_strdup(c->in);
    c->word[c->nword++] = dp_strdup(c->out);
}

/* Its words without folders and paths of a call: what records and messages call it. */
static void name_it(const struct dp_command *c, dp_subject *s) {
    char text[1024] = "";
    size_t n = 0;
    for (int i = 0; i < c->nword && n < sizeof text; i++)
        /* NOLINTNEXTLINE(*NullDereference): nword words, one at least */
        if (!dp_command_names(c->word[i], "IN") && !dp_command_names(c->word[i], "OUT"))
            n += (size_t)snprintf(text + n, sizeof text - n, "%s%s", n ? " " : "",
                                  dp_subject_base_name(c->word[i]));
    dp_text_printable(text, s->name, sizeof s->name);
}

/* Which of the words IN and OUT it has: both, none, or, for serve, none. */
static dp_status check_words(const struct dp_command *c, int *appended, dp_err *e) {
    int in = 0, out = 0;
    for (int i = 0; i < c->nword; i++) {
        in |= dp_command_names(c->word[i], "IN");
        out |= dp_command_names(c->word[i], "OUT");
    }
    *appended = !c->serve && !in;
    if (c->serve && (in || out))
        return dp_fail(e, DP_EINPUT,
                       "--serve: the program is told IN and OUT on its standard input, a line for "
                       "each call: leave the words out");
    if (in != out)
        return dp_fail(e, DP_EINPUT, "--run: has the word %s, but not %s", in ? "IN" : "OUT",
                       in ? "OUT" : "IN");
    /* NOLINTNEXTLINE(*NullDereference): nword words, one at least */
    if (dp_command_is_there(c->word[0])) return DP_OK;
    return dp_fail(e, DP_EINPUT, "%s: %.200s: no program of that name %s",
                   c->serve ? "--serve" : "--run", c->word[0],
                   strchr(c->word[0], '/') ? "is there" : "in PATH");
}

/* ---- what it claims -------------------------------------------------------------------------- */

static dp_status read_claim(const dp_command_claim *q, dp_subject *s, dp_err *e) {
    char *writes = dp_strdup(q->writes ? q->writes : "o");
    s->memory = q->memory > 0 ? q->memory : dp_memory_bytes();
    s->base = q->base;
    s->chain = q->chain;
    s->max_ranks = q->ranks;
    s->path = dp_strdup(q->text);
    s->design = q->design ? dp_strdup(q->design) : NULL;
    dp_status st = dp_subject_read_writes("--writes", writes, s, e);
    if (!st && s->writes_states)
        st = dp_fail(e, DP_EINPUT,
                     "--writes: states of every token are taken from a library alone; a session "
                     "runs the accepted tokens of a program again");
    free(writes);
    return st;
}

/* ---- what it says that it claims ------------------------------------------------------------- */

enum { ASKED_T = 16, ASKED_K = 32 }; /* of a problem that most kernels take */

static dp_problem small_problem(void) {
    dp_problem p = {.T = ASKED_T,
                    .H = 1,
                    .HV = 1,
                    .K = ASKED_K,
                    .V = ASKED_K,
                    .R = 1,
                    .Nseq = 1,
                    .model = DP_KDA,
                    .gate = DP_GATE_LOG,
                    .scale = 0.125};
    p.cu = dp_calloc(2, sizeof *p.cu);
    p.cu[1] = ASKED_T;
    for (int i = DP_INPUT_Q; i <= DP_INPUT_BETA; i++) {
        const int64_t n = dp_input_count(&p, i);
        double *x = *dp_input_at(&p, i) = dp_doubles(n);
        for (int64_t z = 0; z < n; z++)
            x[z] = i == DP_INPUT_G      ? -0.125
                   : i == DP_INPUT_BETA ? 0.5
                                        : (double)(z * (i + 3) % 7 - 3) / 16;
    }
    return p;
}

/* s->base, from OUT's metadata of one call on a small problem, whose IN names no base. Its process
 * ends: the first call that is judged is a process's first, too. */
static dp_status ask_base(struct dp_command *c, double limit_s, dp_subject *s, dp_err *e) {
    dp_problem p = small_problem();
    dp_err why = {0};
    dp_subject_ending end = {.outcome = DP_SUBJECT_RETURNED};
    const dp_subject_call call = {
        .input_format = "fp32", .N = 1, .base = DP_NBASES, .chain = s->chain};
    dp_status st = dp_command_write_inputs(c, &p, &call, e);
    dp_problem_free(&p);
    if (!st) st = dp_command_call(c, limit_s > 0 ? limit_s : DP_SUBJECT_LIMIT_S, &end, e);
    if (st) return st;
    if (end.outcome == DP_SUBJECT_RETURNED) st = dp_command_read_base(c, &s->base, &why);
    dp_command_folder_clear(c);
    dp_command_stop(c);
    if (end.outcome == DP_SUBJECT_RETURNED && !st) return DP_OK;
    return dp_fail(e, DP_EINPUT,
                   "--%s: give --base, the formats that the program claims (" DP_BASE_WORDS
                   "); asked for it with a small problem: %.600s",
                   c->serve ? "serve" : "run", st ? why.msg : end.why);
}

dp_status dp_command_open(const dp_command_claim *q, dp_subject *s, dp_err *e) {
    struct dp_command *c = dp_calloc(1, sizeof *c);
    dp_err why = {0};
    int appended = 0;
    dp_design design;
    *s = (dp_subject){.command = c};
    c->serve = q->serve;
    c->printed.fd = c->talk = c->lock = -1;
    dp_status st = read_claim(q, s, e);
    c->memory = s->memory;
    if (!st && !(c->word = dp_command_split(q->text, &c->nword, &why)))
        st = dp_fail(e, DP_EINPUT, "%s: %s", q->serve ? "--serve" : "--run", why.msg);
    name_it(c, s);
    if (!st) st = check_words(c, &appended, e);
    if (!st) st = dp_command_folder_make(c, e);
    if (!st) put_paths(c, appended);
    if (!st && q->base == DP_NBASES) st = ask_base(c, q->limit_s, s, e);
    if (!st && q->design) st = dp_design_parse(q->design, s->base, &design, e);
    if (st) dp_subject_close(s);
    return st;
}

void dp_command_close(struct dp_command *c) {
    dp_command_stop(c);
    dp_command_folder_remove(c);
    for (int i = 0; i < c->nword; i++)
        free(c->word[i]);
    free(c->word);
    free(c);
}

/* ---- one call -------------------------------------------------------------------------------- */

dp_status dp_command_run(const dp_subject *s, const dp_problem *p, const dp_subject_call *call,
                         dp_subject_result *out, dp_err *e) {
    struct dp_command *c = s->command;
    dp_subject_ending end;
    const double t0 = dp_subject_now();
    dp_status st = dp_command_write_inputs(c, p, call, e);
    if (!st) st = dp_command_call(c, call->limit_s, &end, e);
    if (st) return st;
    out->outcome = end.outcome;
    memcpy(out->why, end.why, sizeof out->why);
    if (end.outcome == DP_SUBJECT_RETURNED) dp_command_read_outputs(c, s, p, call, out);
    dp_command_folder_clear(c);
    out->seconds = dp_subject_now() - t0;
    return DP_OK;
}
