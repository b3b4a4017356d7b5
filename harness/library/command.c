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
    c->word = realloc(c->word, sizeof *c->word * (size_t)(c->nword + 2));
    if (!c->word) abort();
    c->word[c->nword++] = strdup(c->in);
    c->word[c->nword++] = strdup(c->out);
}

/* Its words without folders and paths of a call: what records and messages call it. */
static void name_it(const struct dp_command *c, dp_subject *s) {
    char text[1024] = "";
    size_t n = 0;
    for (int i = 0; i < c->nword && n < sizeof text; i++)
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
    if (dp_command_is_there(c->word[0])) return DP_OK;
    return dp_fail(e, DP_EINPUT, "%s: %.200s: no program of that name %s",
                   c->serve ? "--serve" : "--run", c->word[0],
                   strchr(c->word[0], '/') ? "is there" : "in PATH");
}

/* ---- what it claims -------------------------------------------------------------------------- */

static dp_status read_claim(const dp_command_claim *q, dp_subject *s, dp_err *e) {
    char *writes = strdup(q->writes ? q->writes : "o");
    dp_design design;
    s->memory = q->memory > 0 ? q->memory : dp_memory_bytes();
    s->base = q->base;
    s->chain = q->chain;
    s->max_ranks = q->ranks;
    s->path = strdup(q->text);
    s->design = q->design ? strdup(q->design) : NULL;
    dp_status st = dp_subject_read_writes("--writes", writes, s, e);
    if (!st && s->writes_states)
        st = dp_fail(e, DP_EINPUT,
                     "--writes: states of every token are taken from a library alone; a session "
                     "runs the accepted tokens of a program again");
    if (!st && q->design) st = dp_design_parse(q->design, q->base, &design, e);
    free(writes);
    return st;
}

dp_status dp_command_open(const dp_command_claim *q, dp_subject *s, dp_err *e) {
    struct dp_command *c = dp_calloc(1, sizeof *c);
    dp_err why = {0};
    int appended = 0;
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
    if (st)
        dp_subject_close(s);
    else
        put_paths(c, appended);
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
