/* Totals and verdict of a record, and the record as JSON (record.h). */
#include "record.h"
#include "record_schema.h"
#include "ref/files/cache.h"
#include "ref/files/input.h"
#include "ref/files/output.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

void dp_record_totals(const dp_record *r, int n[DP_NVERDICTS]) {
    memset(n, 0, sizeof(int) * DP_NVERDICTS);
    for (int i = 0; i < r->runs->n; i++)
        n[r->runs->run[i].verdict]++;
}

int dp_record_pooled_failures(const dp_record *r) {
    int n = 0;
    for (int i = 0; i < r->npooled; i++)
        n += r->pooled[i].verdict == DP_FAIL;
    return n;
}

int dp_record_cases_run(const dp_record *r) {
    int n = 0;
    for (int i = 0; i < r->ncase; i++) {
        int any = 0;
        for (int k = 0; k < r->runs->n && !any; k++)
            any = r->runs->run[k].verdict != DP_SKIPPED &&
                  !strcmp(r->runs->run[k].case_name, r->cases[i]->name);
        n += any;
    }
    return n;
}

int dp_record_unjudged(const dp_record *r) {
    int n = 0;
    for (int i = 0; i < r->runs->n; i++)
        for (int k = 0; k < r->runs->run[i].ntensor; k++)
            n += r->runs->run[i].tensor[k].verdict == DP_UNJUDGED;
    return n;
}

/* Runs that are unjudged by a tensor that may not be. */
static int runs_unjudged(const dp_record *r) {
    int n = 0;
    for (int i = 0; i < r->runs->n; i++) {
        const dp_run *x = &r->runs->run[i];
        int open = x->ntensor == 0;
        for (int k = 0; k < x->ntensor; k++)
            open |= x->tensor[k].verdict == DP_UNJUDGED && !x->tensor[k].allowed;
        n += x->verdict == DP_UNJUDGED && open;
    }
    return n;
}

const char *dp_record_verdict(const dp_record *r) {
    int n[DP_NVERDICTS];
    dp_record_totals(r, n);
    if (n[DP_FAIL] || dp_record_pooled_failures(r)) return "fail";
    if (r->errors || runs_unjudged(r) || !n[DP_PASS]) return "error";
    return 2 * dp_record_cases_run(r) < r->ncase ? "error" : "pass";
}

void dp_pooled_text(const dp_pooled_row *row, char *text, size_t size) {
    const char *variant = row->variant ? dp_cuda_variant_names[row->variant] : "";
    const char *fault = row->fault ? dp_faults[row->fault].name : "";
    snprintf(text, size,
             "%s of %s%s%s, base %s%s%s%s: %.2f times what its design makes, over %d cases "
             "together (by chance: %.0e; a factor of %.2f on their errors would be at the limit)",
             row->tensor, dp_backend_names[row->backend], *variant ? " " : "", variant,
             dp_base_names[row->base], row->undeclared ? ", undeclared" : "",
             *fault ? ", fault " : "", fault, row->is.ratio, row->is.cases, row->is.chance,
             row->is.detects);
}

dp_status dp_record_write_json(const dp_record *r, const char *path, dp_err *e) {
    return dp_json_write_compact(dp_schema_write(&dp_record_schema, r), path, e);
}

/* ---- the digest ------------------------------------------------------------------------------ */

static void put(FILE *f, double x) {
    uint64_t bits;
    const double y = x == 0 ? 0 : x;
    memcpy(&bits, &y, sizeof bits);
    if (isnan(x))
        fputs(" nan", f);
    else
        fprintf(f, " %016llx", (unsigned long long)bits);
}

static void put_tensor(FILE *f, const dp_judgement *t) {
    const dp_levels_result *e = &t->expected;
    fprintf(f, "tensor %s %s %s", t->name, dp_verdict_names[t->verdict],
            t->tier && *t->tier ? t->tier : "-");
    const double x[] = {t->rel_fro, t->bound, t->ratio, t->worst_rel, e->expected, e->excess};
    for (size_t i = 0; i < sizeof x / sizeof *x; i++)
        put(f, x[i]);
    for (int l = 0; l < DP_NLEVELS && !isnan(e->excess); l++) {
        const dp_level_result *y = &e->at[l];
        const double z[] = {y->ratio, y->median, y->limit, y->freedom, y->draw};
        for (size_t i = 0; i < sizeof z / sizeof *z; i++)
            put(f, z[i]);
    }
    fputs("\nranks", f);
    for (int i = 0; i < t->N; i++)
        put(f, t->per_rank[i]);
    fputc('\n', f);
}

static void put_point(FILE *f, const dp_chain_point *p) {
    const double x[] = {p->rel, p->effect, p->bound, p->abs, p->norm};
    fprintf(f, "point %d %d", p->rank, p->chunks);
    for (size_t i = 0; i < sizeof x / sizeof *x; i++)
        put(f, x[i]);
    fputc('\n', f);
}

static void put_run(FILE *f, const dp_run *r) {
    fprintf(f, "run %s %s %s %d", r->id, dp_verdict_names[r->verdict], r->truth_kind,
            r->truth_bits);
    const double audit = r->truth_audit.columns ? r->truth_audit.worst : NAN;
    const double x[] = {r->truth_radius, audit,         r->cond.condition,
                        r->cond.inverse, r->cond.entry, r->slope};
    for (size_t i = 0; i < sizeof x / sizeof *x; i++)
        put(f, x[i]);
    fputc('\n', f);
    for (int i = 0; i < r->ntensor; i++)
        put_tensor(f, &r->tensor[i]);
    for (int i = 0; i < r->npoint; i++)
        put_point(f, &r->point[i]);
    if (!r->bits.npoint) return;
    fputs("bits", f);
    for (int m = 0; m < DP_NBITMODELS; m++)
        put(f, r->bits.bits[m]);
    put(f, r->bits.truncated);
    fputc('\n', f);
}

/* The text of one run; to be freed. */
static char *digest_text(const dp_run *r) {
    char *text = NULL;
    size_t size;
    FILE *f = open_memstream(&text, &size);
    dp_run as = *r;
    if (!f) abort();
    if (dp_backends[r->backend].peers) as.backend = DP_BACKEND_SIM; /* whose bits it must have */
    as.id = dp_run_id(&as);
    put_run(f, &as);
    free(as.id);
    fclose(f);
    return text;
}

typedef struct {
    char *text;
    int peers;
} line;

static int by_text(const void *a, const void *b) {
    const line *x = a, *y = b;
    const int order = strcmp(x->text, y->text);
    return order ? order : x->peers - y->peers;
}

/* A run without its processes is none, and has no chain. Runs that simulated ranks refuse, too,
 * count as theirs. A run in both counts once. */
static int covered(const dp_run *r) {
    const dp_backend_traits *t = &dp_backends[r->backend];
    return t->simulated && (!t->peers || r->verdict != DP_SKIPPED || r->has_chain);
}

dp_digest dp_digest_of(const dp_runs *r) {
    dp_digest d = {.runs = 0};
    DP_OWN line *lines = dp_calloc((size_t)r->n + 1, sizeof *lines);
    dp_hash *s = dp_hash_new();
    int n = 0;
    for (int i = 0; i < r->n; i++)
        if (covered(&r->run[i]))
            lines[n++] = (line){digest_text(&r->run[i]), dp_backends[r->run[i].backend].peers};
    qsort(lines, (size_t)n, sizeof *lines, by_text);
    for (int i = 0; i < n; i++) {
        if (i && lines[i].peers && !strcmp(lines[i].text, lines[i - 1].text)) continue;
        dp_hash_add(s, lines[i].text, strlen(lines[i].text));
        d.runs++;
    }
    dp_key_hex(dp_hash_end(s), d.hex);
    for (int i = 0; i < n; i++)
        free(lines[i].text);
    return d;
}

/* ---- provenance ------------------------------------------------------------------------------ */

enum { PIECE = 1 << 20 };

static void hash(FILE *f, char hex[33]) {
    dp_hash *state = dp_hash_new();
    DP_OWN char *piece = dp_calloc(PIECE, 1);
    for (size_t n; (n = fread(piece, 1, PIECE, f)) > 0;)
        dp_hash_add(state, piece, n);
    dp_key_hex(dp_hash_end(state), hex);
}

void dp_provenance_file(dp_provenance *p, const char *role, const char *path) {
    const int most = sizeof p->file / sizeof *p->file, i = p->nfile;
    int64_t bytes;
    FILE *f = path && i < most ? dp_input_open(path, dp_input_most(), &bytes, NULL) : NULL;
    if (!f) return;
    p->file[i].role = role;
    p->file[i].path = path;
    p->file[i].bytes = bytes;
    hash(f, p->file[i].xxh128);
    fclose(f);
    p->nfile++;
}

static json_t *files(const dp_provenance *p) {
    json_t *list = json_array();
    for (int i = 0; i < p->nfile; i++) {
        json_t *x = json_pack("{ss sI ss}", "role", p->file[i].role, "bytes",
                              (json_int_t)p->file[i].bytes, "xxh128", p->file[i].xxh128);
        json_object_set_new(x, "path", dp_json_text(p->file[i].path));
        json_array_append_new(list, x);
    }
    return list;
}

const char *dp_provenance_note(const dp_provenance *p, const char *key) {
    const size_t n = strlen(key);
    for (int i = 0; i < p->nnote; i++)
        if (!strncmp(p->note[i], key, n) && p->note[i][n] == '=') return p->note[i] + n + 1;
    return NULL;
}

DP_NOT_SO("-Wanalyzer-null-dereference") /* a note has a = */
static json_t *notes(const dp_provenance *p) {
    json_t *o = json_object();
    for (int i = 0; i < p->nnote; i++) {
        DP_OWN char *key = dp_strdup(p->note[i]);
        char *value = strchr(key, '=');
        *value++ = 0;
        json_object_set_new(o, key, dp_json_text(value));
    }
    return o;
}

json_t *dp_provenance_json(const dp_provenance *p) {
    if (!p || (!p->label && !p->kernel_commit && !p->nfile && !p->nnote)) return NULL;
    json_t *o = json_object();
    if (p->label) json_object_set_new(o, "label", dp_json_text(p->label));
    if (p->kernel_commit) json_object_set_new(o, "kernel_commit", dp_json_text(p->kernel_commit));
    if (p->nfile) json_object_set_new(o, "files", files(p));
    if (p->nnote) json_object_set_new(o, "notes", notes(p));
    return o;
}

/* ---- its fields ------------------------------------------------------------------------------ */

static const dp_record_field FILES[] = {
    {"role", .kind = DP_KIND_TEXT, .written = 1, .what = "inputs, outputs, subject"},
    {"path", .kind = DP_KIND_TEXT, .written = 1},
    {"bytes", .kind = DP_KIND_COUNT, .written = 1},
    {"xxh128", .kind = DP_KIND_TEXT, .written = 1, .what = "as xxh128sum prints it"}};
static const dp_object_schema FILES_OBJECT = {.name = "file", .field = FILES, .n = 4};

static const dp_record_field PROVENANCE[] = {
    {"label", .kind = DP_KIND_TEXT},
    {"kernel_commit", .kind = DP_KIND_TEXT},
    {"files", .kind = DP_KIND_OBJECTS, .of = &FILES_OBJECT, .what = "by their hashes"},
    {"notes", .kind = DP_KIND_MAP, .what = "of --note KEY=VALUE"}};
const dp_object_schema dp_provenance_schema = {.name = "provenance", .field = PROVENANCE, .n = 4};
