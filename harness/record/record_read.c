/* Reads records, checked by the table of their fields (record_read.h). */
#include "record_read.h"
#include "record_schema.h"
#include "ref/files/input.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>

#define BY_NAME "tensors by name" /* what dp_old_tensors returns, kept in the run */

const char *dp_old_text(const json_t *object, const char *key) {
    const char *s = json_string_value(json_object_get(object, key));
    return s ? s : "";
}

/* ---- checks ---------------------------------------------------------------------------------- */

/* Its tensors by name, kept in the run. */
static dp_status index_tensors(const char *path, size_t run, json_t *r, dp_err *e) {
    const json_t *list = json_object_get(r, "tensors");
    json_t *by_name = json_object();
    json_object_set_new(r, BY_NAME, by_name);
    for (size_t i = 0; i < json_array_size(list); i++) {
        json_t *t = json_array_get(list, i);
        const char *name = dp_old_text(t, "name");
        if (json_object_get(by_name, name))
            return dp_fail(e, DP_EINPUT, "%s: runs[%zu].tensors[%zu].name: is there twice", path,
                           run, i);
        json_object_set(by_name, name, t);
    }
    return DP_OK;
}

static dp_status check_version(const json_t *o, const char *path, dp_err *e) {
    const json_t *version = json_object_get(o, "schema_version");
    const char *schema = dp_old_text(o, "schema");
    if (*schema && strcmp(schema, DP_RECORD_SCHEMA))
        return dp_fail(e, DP_EINPUT, "%s: schema is '%.60s', not " DP_RECORD_SCHEMA, path, schema);
    if (*schema && (!json_is_integer(version) || json_integer_value(version) != DP_RECORD_VERSION))
        return dp_fail(e, DP_EINPUT, "%s: schema_version %lld, this program reads %d", path,
                       (long long)json_integer_value(version), DP_RECORD_VERSION);
    return dp_schema_check(&dp_record_schema, o, path, "", e);
}

static void read_top(dp_old_record *r) {
    const json_t *o = r->root;
    r->verdict = dp_old_text(o, "verdict");
    r->errors = json_integer_value(json_object_get(o, "errors"));
    r->commit = dp_old_text(json_object_get(o, "program"), "commit");
    r->digest = dp_old_text(json_object_get(o, "digest"), "value");
}

/* ---- reading --------------------------------------------------------------------------------- */

/* Repeated runs get a number. The count of each ID is kept, not searched for. */
static void index_run(dp_old_record *r, json_t *count, json_t *run) {
    const char *id = dp_old_text(run, "id");
    const json_int_t n = json_integer_value(json_object_get(count, id)) + 1;
    DP_OWN char *key;
    json_object_set_new(count, id, json_integer(n));
    if (n == 1)
        key = dp_strdup(id);
    else if (asprintf(&key, "%s#%lld", id, (long long)n) < 0)
        abort();
    json_object_set(r->runs, key, run);
}

dp_status dp_old_record_parse(const char *bytes, size_t n, const char *path, dp_old_record *r,
                              dp_err *e) {
    json_error_t je;
    *r = (dp_old_record){.root = json_loadb(bytes, n, JSON_REJECT_DUPLICATES, &je)};
    if (!r->root) return dp_fail(e, DP_EINPUT, "%s:%d: not JSON: %s", path, je.line, je.text);
    dp_status s = check_version(r->root, path, e);
    if (!s) read_top(r);
    json_t *count = json_object(), *list = json_object_get(r->root, "runs");
    r->runs = json_object();
    for (size_t i = 0; !s && i < json_array_size(list); i++) {
        s = index_tensors(path, i, json_array_get(list, i), e);
        if (!s) index_run(r, count, json_array_get(list, i));
    }
    json_decref(count);
    if (s) dp_old_record_free(r);
    return s;
}

dp_status dp_old_record_read(const char *path, dp_old_record *r, dp_err *e) {
    struct stat st;
    DP_OWN char *file = NULL, *bytes = NULL;
    size_t n;
    const int folder = stat(path, &st) == 0 && S_ISDIR(st.st_mode);
    if (asprintf(&file, "%s%s", path, folder ? "/results.json" : "") < 0) abort();
    const dp_status s = dp_input_read(file, dp_input_most(), &bytes, &n, e);
    return s ? s : dp_old_record_parse(bytes, n, file, r, e);
}

void dp_old_record_free(dp_old_record *r) {
    json_decref(r->runs);
    json_decref(r->root);
    *r = (dp_old_record){0};
}

/* ---- what stands in it ----------------------------------------------------------------------- */

json_t *dp_old_tensors(const json_t *run) { return json_object_get(run, BY_NAME); }

const json_t *dp_old_tensor(const json_t *run, const char *name) {
    return json_object_get(dp_old_tensors(run), name);
}

int dp_old_ranks(const json_t *tensor) {
    return (int)json_array_size(json_object_get(tensor, "per_rank"));
}

double dp_old_error(const json_t *tensor, int rank) {
    const json_t *x = rank < 0 ? json_object_get(tensor, "rel_fro")
                               : json_array_get(json_object_get(tensor, "per_rank"), (size_t)rank);
    const char *s = json_string_value(x);
    if (json_is_number(x)) return json_number_value(x);
    if (!s || !strcmp(s, "nan")) return NAN;
    return *s == '-' ? -INFINITY : INFINITY;
}
