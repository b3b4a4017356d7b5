/* The ID of a run, written and read by one table of its keys (run_id.h). */
#include "run_id.h"
#include "ref/vocabulary/text.h"

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

void dp_id_cut(char *id, dp_id_key key, const char *value) {
    char item[64];
    snprintf(item, sizeof item, ",%s=%s", KEYS[key].name, value);
    char *at = strstr(id, item);
    if (at) *at = 0;
}
