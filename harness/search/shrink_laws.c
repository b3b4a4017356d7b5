/* Shrinking a case as its text: fewer tokens, heads, channels of the same laws (shrink_work.h). The
 * result is a case file of a few hundred bytes, whatever the number of its inputs. */
#define _GNU_SOURCE
#include "ref/files/output.h"
#include "shrink_work.h"

#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* ---- a text with other settings -------------------------------------------------------------- */

/* Does the line set the key? */
static int sets(const char *line, const char *key) {
    while (*line == ' ' || *line == '\t')
        line++;
    const size_t n = strlen(key);
    if (strncmp(line, key, n)) return 0;
    line += n;
    while (*line == ' ' || *line == '\t')
        line++;
    return *line == '=';
}

static char *with(const char *text, const char *key, const char *value) {
    char *out;
    size_t size;
    FILE *f = open_memstream(&out, &size);
    if (!f) abort();
    for (const char *at = text; *at;) {
        const size_t len = strcspn(at, "\n");
        if (!sets(at, key)) fprintf(f, "%.*s\n", (int)len, at);
        at += len + (at[len] == '\n');
    }
    if (value) fprintf(f, "%s = %s\n", key, value);
    fclose(f);
    return out;
}

static void set(char **text, const char *key, const char *value) {
    char *was = *text;
    *text = with(was, key, value);
    free(was);
}

static void set_number(char **text, const char *key, int64_t value) {
    char b[24];
    snprintf(b, sizeof b, "%" PRId64, value);
    set(text, key, b);
}

/* The settings of the one run that fails, in place of the case's lists. */
static void set_run(char **text, const dp_case *c) {
    set_number(text, "ranks", c->ranks[0]);
    set(text, "base", dp_base_names[c->base[0]]);
    if (dp_op_of(c)->has_problem) {
        set(text, "chain", dp_formats[c->chain[0]].name);
        set(text, "merge", dp_exchange_names[c->merge[0]]);
        set(text, "payload", c->payload[0] ? dp_payload_names[c->payload[0]] : NULL);
        set(text, "chain_ranks", NULL);
        set(text, "own", NULL);
    }
    set(text, "smoke", NULL);
}

/* ---- trying ---------------------------------------------------------------------------------- */

/* The case of a text with the names and lists of another; 0: the text is refused. */
static int case_of(const dp_case *like, const char *text, dp_case *out) {
    dp_case full;
    if (dp_case_parse(text, strlen(text), like->path, 1, &full, NULL)) return 0;
    dp_case c = *like;
    c.p = full.p;
    c.conv = full.conv;
    c.backward = full.backward;
    c.ranks[0] = full.ranks[0];
    *out = dp_shrink_copy(&c);
    dp_case_free(&full);
    return 1;
}

/* Takes the text in place of the laws where its case fails alike, else frees it. */
static int offer(dp_shrink_work *w, char *text) {
    dp_case cand;
    const int yes = !dp_shrink_spent(w) && case_of(w->c, text, &cand) && dp_shrink_offer(w, &cand);
    char *loser = yes ? w->laws : text;
    free(loser);
    if (yes) w->laws = text;
    return yes;
}

/* ---- what is tried --------------------------------------------------------------------------- */

static int plainer(dp_shrink_work *w) {
    int n = 0;
    for (int i = 0; i < DP_SHRINK_NPARTS && !dp_shrink_spent(w); i++) {
        const dp_shrink_part *part = &dp_shrink_parts[i];
        if (!part->has(w->c) || !offer(w, with(w->laws, part->key, part->value))) continue;
        dp_shrink_report(w, "%s", part->what);
        n++;
    }
    return n;
}

/* The text with so many tokens; sequences that begin behind them go. */
static char *with_tokens(const dp_shrink_work *w, int64_t T) {
    const int64_t *cu = *dp_case_packing(w->c).cu;
    char *text = dp_strdup(w->laws);
    set_number(&text, "T", T);
    if (dp_shrink_length(w->c, DP_SHRINK_SEQ) == 1) return text;
    char *list;
    size_t size;
    FILE *f = open_memstream(&list, &size);
    if (!f) abort();
    for (int64_t s = 0; cu[s] < T; s++)
        fprintf(f, "%" PRId64 ",", cu[s]);
    fprintf(f, "%" PRId64, T);
    fclose(f);
    set(&text, "cu_seqlens", list);
    free(list);
    return text;
}

static char *with_length(const dp_shrink_work *w, const char *key, int ax, int64_t n) {
    if (ax == DP_SHRINK_TOK) return with_tokens(w, n);
    char *text = dp_strdup(w->laws);
    set_number(&text, key, n);
    return text;
}

/* An axis shortened by half of itself, a quarter, .., down to `unit` at a time. */
static int shorter(dp_shrink_work *w, const char *key, int ax, int64_t unit) {
    const int64_t before = dp_shrink_length(w->c, ax);
    for (int64_t step = before / 2 / unit * unit; step >= unit && !dp_shrink_spent(w);) {
        const int64_t n = dp_shrink_length(w->c, ax) - step;
        if (n < 1 || !offer(w, with_length(w, key, ax, n))) step = step / 2 / unit * unit;
    }
    const int64_t now = dp_shrink_length(w->c, ax);
    if (now < before)
        dp_shrink_report(w, "%s %" PRId64 " -> %" PRId64 ", by its laws", key, before, now);
    return now < before;
}

/* One key head, or as many as there are value heads: then heads go together. */
static int fewer_heads(dp_shrink_work *w) {
    const int before = w->c->p.HV;
    for (int64_t hv = 1; hv < before && w->c->p.HV == before && !dp_shrink_spent(w); hv *= 2) {
        char *text = dp_strdup(w->laws);
        set_number(&text, "H", 1);
        set_number(&text, "HV", hv);
        offer(w, text);
    }
    if (w->c->p.HV < before) dp_shrink_report(w, "HV %d -> %d, by its laws", before, w->c->p.HV);
    return w->c->p.HV < before;
}

int dp_shrink_by_laws(dp_shrink_work *w) {
    if (!w->laws) return 0;
    set_run(&w->laws, w->c);
    dp_case same;
    if (!case_of(w->c, w->laws, &same)) { /* its ranks do not divide its tokens, say */
        free(w->laws);
        w->laws = NULL;
        return 0;
    }
    dp_shrink_copy_free(&same);
    int changed = 0;
    for (int more = 1; more && !dp_shrink_spent(w); changed |= more) {
        more = shorter(w, "T", DP_SHRINK_TOK, w->c->ranks[0]);
        if (!dp_op_of(w->c)->has_problem) {
            more |= shorter(w, "D", DP_SHRINK_DIM, 1);
            continue;
        }
        more |= fewer_heads(w) | plainer(w);
        more |= shorter(w, "V", DP_SHRINK_COL, 1) | shorter(w, "K", DP_SHRINK_CHAN, 1) |
                shorter(w, "R", DP_SHRINK_KEY, 1);
    }
    return changed;
}

dp_status dp_shrink_write_laws(const char *laws, const char *reason, const char *source,
                               const char *path, dp_err *e) {
    dp_output out;
    dp_status st = dp_output_open(&out, path, e);
    if (st) return st;
    fprintf(out.f, "reason = %s\nsource = %s\n", reason, source);
    for (const char *at = laws; *at;) {
        const size_t len = strcspn(at, "\n");
        if (len && *at != '#' && !sets(at, "reason") && !sets(at, "source"))
            fprintf(out.f, "%.*s\n", (int)len, at);
        at += len + (at[len] == '\n');
    }
    return dp_output_close(&out, 0, e);
}
