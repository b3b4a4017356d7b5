/* The ID of a run, written and read by one table of its keys (run_id.h). Lists of runs. The verdict
 * of a run, from its tensors (run.h). */
#include "ref/vocabulary/stored.h"
#include "ref/vocabulary/text.h"
#include "run_id.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define FOREIGN "judge:" /* before the name: computed by another program */

int dp_find_ranks(const char *text) {
    int64_t n;
    return dp_number_int(text, 1, DP_MAX_RANKS, &n) == DP_NUMBER_OK ? (int)n : -1;
}

/* ---- the keys -------------------------------------------------------------------------------- */

static int find_chain(const char *s) { return dp_format_find(s); }
static int find_fault(const char *s) { return dp_fault_find(s); }
static const char *chain_text(int v) { return dp_formats[v].name; }
static const char *fault_text(int v) { return dp_faults[v].name; }

static const struct {
    const char *name;
    const char *const *words; /* of its values; or */
    int nwords;
    int (*find)(const char *text);  /* -1: not known */
    const char *(*text)(int value); /* NULL: the number itself */
} KEYS[DP_NID_KEYS] = {
    [DP_ID_BACKEND] = {"backend", dp_backend_names, DP_NCHOSEN_BACKENDS},
    [DP_ID_RANKS] = {"ranks", .find = dp_find_ranks},
    [DP_ID_BASE] = {"base", dp_base_names, DP_NBASES},
    [DP_ID_CHAIN] = {"chain", .find = find_chain, .text = chain_text},
    [DP_ID_MERGE] = {"merge", dp_exchange_names, DP_NRUN_EXCHANGES},
    [DP_ID_PAYLOAD] = {"payload", dp_payload_names, DP_NRUN_PAYLOADS},
    [DP_ID_OWN] = {"own", dp_own_names, DP_NOWNS},
    [DP_ID_VARIANT] = {"way", dp_cuda_variant_names, DP_NCUDA_VARIANTS},
    [DP_ID_FAULT] = {"fault", .find = find_fault, .text = fault_text},
};

static int find(int k, const char *text) {
    return KEYS[k].words ? dp_find_name(text, KEYS[k].words, KEYS[k].nwords) : KEYS[k].find(text);
}

/* ---- writing --------------------------------------------------------------------------------- */

static dp_id id_of(const dp_run *r) {
    return (dp_id){
        .case_name = r->case_name,
        .value = {[DP_ID_BACKEND] = dp_backends[r->backend].unsaid ? -1 : (int)r->backend,
                  [DP_ID_RANKS] = r->has_base ? r->ranks : -1,
                  [DP_ID_BASE] = r->has_base ? (int)r->base : -1,
                  [DP_ID_CHAIN] = r->has_chain ? (int)r->chain : -1,
                  [DP_ID_MERGE] = r->has_merge ? (int)r->merge : -1,
                  [DP_ID_PAYLOAD] = r->payload ? (int)r->payload : -1,
                  [DP_ID_OWN] = r->own ? (int)r->own : -1,
                  [DP_ID_VARIANT] = r->variant ? (int)r->variant : -1,
                  [DP_ID_FAULT] = r->fault ? (int)r->fault : -1}};
}

char *dp_run_id(const dp_run *r) {
    char *text;
    size_t size;
    const char *between = "";
    const dp_id id = id_of(r);
    FILE *f = open_memstream(&text, &size);
    if (!f) abort();
    fprintf(f, "%s%s:", r->backend == DP_BACKEND_FILE ? FOREIGN : "", id.case_name);
    for (int k = 0; k < DP_NID_KEYS; k++) {
        const int v = id.value[k];
        if (v < 0) continue;
        fprintf(f, "%s%s=", between, KEYS[k].name);
        if (KEYS[k].words || KEYS[k].text)
            fputs(KEYS[k].words ? KEYS[k].words[v] : KEYS[k].text(v), f);
        else
            fprintf(f, "%d", v);
        between = ",";
    }
    if (fclose(f)) abort();
    return text;
}

/* ---- reading --------------------------------------------------------------------------------- */

/* One `key=value`; 0: not known. */
static int parse_item(const char *key, const char *value, int subject, dp_id *out) {
    for (int k = 0; k < DP_NID_KEYS; k++) {
        if (strcmp(key, KEYS[k].name)) continue;
        const int of_subject =
            k == DP_ID_BACKEND && subject && !strcmp(value, dp_backend_names[DP_BACKEND_SUBJECT]);
        const int v = of_subject ? (int)DP_BACKEND_SUBJECT : find(k, value);
        if (v < 0) return 0;
        out->value[k] = v;
        return 1;
    }
    return 0;
}

dp_status dp_id_parse(const char *id, int subject, dp_id *out, dp_err *e) {
    char *save, *rest;
    for (int k = 0; k < DP_NID_KEYS; k++)
        out->value[k] = -1;
    out->case_name = dp_strdup(id);
    rest = strrchr(out->case_name, ':'); /* a name may have one, a key never */
    if (!strncmp(id, FOREIGN, strlen(FOREIGN)))
        return dp_fail(e, DP_EINPUT,
                       "--id %s: tensors of another program are judged again by `deltaproof judge`",
                       id);
    if (!rest) return dp_fail(e, DP_EINPUT, "--id %s: must read NAME:key=value,...", id);
    *rest++ = 0;
    for (char *t = strtok_r(rest, ",", &save); t; t = strtok_r(NULL, ",", &save)) {
        char *v = strchr(t, '=');
        if (v) *v++ = 0;
        if (!v || !parse_item(t, v, subject, out))
            return dp_fail(e, DP_EINPUT, "--id %s: '%s%s%s' is not known", id, t, v ? "=" : "",
                           v ? v : "");
    }
    return DP_OK;
}

/* ---- runs ------------------------------------------------------------------------------------ */

int dp_case_is_exact(const dp_case *c) {
    return c->op->is_recurrence && c->spec.keys == DP_KEYS_EXACT && !c->data;
}

dp_run *dp_runs_add(dp_runs *r, const dp_case *c) {
    if (r->n == r->cap) {
        r->cap = r->cap ? 2 * r->cap : 16;
        r->run = dp_realloc(r->run, sizeof *r->run * (size_t)r->cap);
    }
    dp_run *x = &r->run[r->n++];
    *x = (dp_run){.case_name = dp_strdup(c->name),
                  .op = c->op_name,
                  .backend = DP_BACKEND_SIM,
                  .ranks = 1,
                  .truth_kind = "mpfr",
                  .truth_radius = NAN,
                  .slope = NAN,
                  .speaks = -1,
                  .may_unjudged = c->unjudged};
    x->exact = dp_case_is_exact(c);
    if (c->op->is_recurrence)
        x->sized = (dp_exchange_size){.HV = c->p.HV, .K = c->p.K, .V = c->p.V, .L = c->p.T};
    return x;
}

void dp_runs_move(dp_runs *to, dp_runs *from) {
    if (to->n + from->n > to->cap) {
        to->cap = 2 * (to->n + from->n);
        to->run = dp_realloc(to->run, sizeof *to->run * (size_t)to->cap);
    }
    if (from->n) memcpy(to->run + to->n, from->run, sizeof *to->run * (size_t)from->n);
    to->n += from->n;
    free(from->run);
    *from = (dp_runs){0};
}

void dp_runs_free(dp_runs *r) {
    for (int i = 0; i < r->n; i++) {
        dp_run *x = &r->run[i];
        for (int j = 0; j < x->ntensor; j++)
            dp_judgement_free(&x->tensor[j]);
        DP_FREE(x->hit, x->tensor, x->point, x->id, x->case_name);
    }
    free(r->run);
    *r = (dp_runs){0};
}

/* Inputs on which nothing rounds: bounds play no part, an error of 0 passes and any other fails. */
static void judge_exactly(dp_judgement *t) {
    t->verdict = t->rel_fro == 0 ? DP_PASS : DP_FAIL;
    t->tier = "exact";
    t->failed = t->worst;
    t->why[0] = 0;
    if (t->verdict == DP_FAIL)
        snprintf(t->why, sizeof t->why,
                 "nothing rounds in this case, but the error is %.3g: got %g, want %g%s%s",
                 t->rel_fro, t->worst.got, t->worst.want, *t->source ? "; " : "", t->source);
}

/* A scale a row, head or tensor rounds numbers that are exact in bf16. */
static int is_exact(const dp_run *r, const dp_judgement *t) {
    return r->exact &&
           !(dp_stored_has_scale(r->design.final_state) && !strcmp(t->name, "final_state"));
}

/* The failing tensor that says whose data it holds, the earliest in the pipeline; NULL: none does.
 */
static const dp_judgement *with_source(const dp_run *r) {
    static const char *const order[] = {"H", "M", "S_in", "dH", "dM", "dS_out", "final_state", "o"};
    const dp_judgement *any = NULL;
    for (size_t k = 0; k < sizeof order / sizeof *order; k++)
        for (int i = 0; i < r->ntensor; i++) {
            const dp_judgement *t = &r->tensor[i];
            if (t->verdict != DP_FAIL || !*t->source) continue;
            if (!strcmp(t->name, order[k])) return t;
            if (!any) any = t;
        }
    return any;
}

static int is_listed(const char *list, const char *name) {
    char one[64];
    while ((list = dp_next_name(list, one, sizeof one)))
        if (!strcmp(one, name)) return 1;
    return 0;
}

/* ---- its end --------------------------------------------------------------------------------- */

int dp_ill_conditioned(const dp_condition *c, dp_base b) {
    return c->condition >= (b == DP_BASE_FP64 ? 0x1p26 : 0x1p12);
}

/* That the problem is ill-conditioned, or that this explains no failure, nor any entry that was
 * never written. */
static void say_condition(const dp_judgement *bad, dp_run *r) {
    const dp_condition *c = &r->cond;
    const char *sep = *r->why ? "; " : "";
    if (r->exact || (r->verdict != DP_PASS && r->verdict != DP_FAIL)) return;
    if (bad && bad->flaw != DP_FLAW_NONE) return;
    if (bad && bad->nblank)
        dp_text_add(r->why, sizeof r->why, "; rows of 0, as if never written: %lld",
                    (long long)bad->nblank);
    else if (c->condition > 0 && dp_ill_conditioned(c, r->base))
        dp_text_add(
            r->why, sizeof r->why,
            "%sthe problem's condition number is %.2g (inverse up to %.2g; rank %d, head %d, "
            "chunk at token %lld): the error is %s",
            sep, c->condition, c->entry, c->rank, c->head, (long long)c->token,
            r->verdict == DP_FAIL ? "more than it explains" : "within what it explains");
    else if (c->condition > 0 && r->verdict == DP_FAIL)
        dp_text_add(r->why, sizeof r->why,
                    "%sthe inputs are well-conditioned (condition number %.2g)", sep, c->condition);
}

int dp_judgement_says_more(const dp_judgement *a, const dp_judgement *b) {
    if (!a) return 1;
    if (!a->flaw != !b->flaw) return !a->flaw;
    const int x = !strcmp(a->tier, "expected");
    const int y = !strcmp(b->tier, "expected");
    return x == y ? b->times > a->times : x;
}

void dp_run_close(dp_run *r) {
    int n[DP_NVERDICTS] = {0};
    const dp_judgement *bad = NULL, *un = NULL;
    int open = 0; /* unjudged, and may not be */
    for (int i = 0; i < r->ntensor; i++) {
        dp_judgement *t = &r->tensor[i];
        if (is_exact(r, t)) judge_exactly(t);
        n[t->verdict]++;
        if (t->verdict == DP_FAIL && dp_judgement_says_more(bad, t)) bad = t;
        if (t->verdict != DP_UNJUDGED) continue;
        t->allowed = is_listed(r->may_unjudged, t->name) || is_listed(r->let_unjudged, t->name);
        open += !t->allowed;
        if (!un || un->allowed > t->allowed) un = t;
    }
    r->verdict = n[DP_FAIL]       ? DP_FAIL
                 : open           ? DP_UNJUDGED
                 : n[DP_PASS]     ? DP_PASS
                 : n[DP_UNJUDGED] ? DP_UNJUDGED
                                  : DP_SKIPPED;
    const dp_judgement *source = r->exact ? with_source(r) : NULL;
    if (source) bad = source;
    const dp_place *at = bad ? &dp_judgement_row(bad)->at : NULL;
    r->tier = bad ? bad->tier : "";
    r->speaks = bad ? (int)(bad - r->tensor) : -1;
    char sequence[32] = "", token[32] = "";
    if (bad && at->sequence >= 0)
        snprintf(sequence, sizeof sequence, "sequence %d, ", at->sequence);
    if (bad && at->token >= 0) snprintf(token, sizeof token, "token %lld, ", (long long)at->token);
    if (source)
        snprintf(r->why, sizeof r->why, "%s: %s", bad->name, bad->why); /* names the place itself */
    else if (bad)
        snprintf(r->why, sizeof r->why, "%s: %s (rank %d, %s%shead %d)", bad->name, bad->why,
                 at->rank, sequence, token, at->head);
    else if (un)
        snprintf(r->why, sizeof r->why, "%d tensor%s unjudged%s, %s: %s", n[DP_UNJUDGED],
                 n[DP_UNJUDGED] > 1 ? "s" : "", un->allowed ? ", as may be" : "", un->name,
                 un->why);
    say_condition(bad, r);
}
