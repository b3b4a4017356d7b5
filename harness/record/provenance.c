/* Hashes of files, and the object that a record has of them (provenance.h). */
#include "provenance.h"
#include "ref/files/input.h"
#include "ref/files/output.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <xxhash.h>

enum { PIECE = 1 << 20 };

static void hash(FILE *f, char hex[33]) {
    XXH3_state_t *state = XXH3_createState();
    char *piece = dp_calloc(PIECE, 1);
    if (!state) abort();
    XXH3_128bits_reset(state);
    for (size_t n; (n = fread(piece, 1, PIECE, f)) > 0;)
        XXH3_128bits_update(state, piece, n);
    XXH128_canonical_t bytes;
    XXH128_canonicalFromHash(&bytes, XXH3_128bits_digest(state));
    for (int i = 0; i < 16; i++)
        snprintf(hex + 2 * i, 3, "%02x", bytes.digest[i]);
    XXH3_freeState(state);
    free(piece);
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
        char *key = dp_strdup(p->note[i]), *value = strchr(key, '=');
        *value++ = 0;
        json_object_set_new(o, key, dp_json_text(value));
        free(key);
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
    {"role", .kind = DP_KIND_TEXT, .need = DP_FIELD_WRITTEN, .what = "inputs, outputs, subject"},
    {"path", .kind = DP_KIND_TEXT, .need = DP_FIELD_WRITTEN},
    {"bytes", .kind = DP_KIND_COUNT, .need = DP_FIELD_WRITTEN},
    {"xxh128", .kind = DP_KIND_TEXT, .need = DP_FIELD_WRITTEN, .what = "as xxh128sum prints it"}};
static const dp_object_schema FILES_OBJECT = {.name = "file", .field = FILES, .n = 4};

static const dp_record_field PROVENANCE[] = {
    {"label", .kind = DP_KIND_TEXT},
    {"kernel_commit", .kind = DP_KIND_TEXT},
    {"files", .kind = DP_KIND_OBJECTS, .of = &FILES_OBJECT, .what = "by their hashes"},
    {"notes", .kind = DP_KIND_MAP, .what = "of --note KEY=VALUE"}};
const dp_object_schema dp_provenance_schema = {.name = "provenance", .field = PROVENANCE, .n = 4};
