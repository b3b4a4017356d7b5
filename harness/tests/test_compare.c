/* `deltaproof compare`: two records, the second edited: each change is named, measured, held
 * against noise, and decides the exit status. */
#include "gt.h"

#include <jansson.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define RECORD "harness/tests/data/record-small.json"
static char out[1 << 16];

static char *path_of(const char *name) {
    static char b[4][600];
    static int n;
    char *p = b[n++ % 4];
    snprintf(p, sizeof b[0], "%s/%s.json", gt_tmpdir(), name);
    return p;
}

static json_t *fresh(void) {
    json_error_t e;
    json_t *j = json_load_file(RECORD, 0, &e);
    if (!j) {
        gt_fail(__FILE__, __LINE__, RECORD, "%s", e.text);
        abort();
    }
    return j;
}

static void save(json_t *j, const char *name) {
    if (json_dump_file(j, path_of(name), 0)) gt_fail(__FILE__, __LINE__, name, "cannot be written");
    json_decref(j);
}

static json_t *run_at(json_t *j, size_t i) { return json_array_get(json_object_get(j, "runs"), i); }
static json_t *tensor_at(json_t *j, size_t run, size_t t) {
    return json_array_get(json_object_get(run_at(j, run), "tensors"), t);
}

/* The run with several ranks whose first tensor has an error on every rank. */
static size_t ranked(json_t *j) {
    for (size_t i = 0; i < json_array_size(json_object_get(j, "runs")); i++) {
        json_t *p = json_object_get(tensor_at(j, i, 0), "per_rank");
        if (json_array_size(p) > 1 && json_is_real(json_array_get(p, 1)) &&
            json_is_real(json_object_get(tensor_at(j, i, 0), "rel_fro")))
            return i;
    }
    gt_fail(__FILE__, __LINE__, RECORD, "has no such run");
    abort();
}

static void scale(json_t *t, double by) {
    json_object_set_new(t, "rel_fro",
                        json_real(json_number_value(json_object_get(t, "rel_fro")) * by));
}

static int compare(const char *old, const char *new, const char *more) {
    char cmd[4096];
    snprintf(cmd, sizeof cmd, "'%s' compare '%s' '%s' %s", gt_program(), path_of(old), path_of(new),
             more);
    return gt_run(cmd, out, sizeof out);
}

DP_TEST(compare, the_same_record_twice_is_the_same) {
    save(fresh(), "a");
    CHECK(compare("a", "a", "") == 0 && strstr(out, "COMPARE: SAME") &&
              strstr(out, "0 appeared, 0 vanished"),
          "%s", out);
}

static void rename_member(json_t *o, const char *key, const char *to) {
    json_object_set_new(o, key, json_string(to));
}

/* Parts beside the runs: each change of a copy, its line, the last line, the status. */
DP_TEST(compare, a_case_and_what_is_pooled_are_missed_when_they_are_gone) {
    static const char row[] = "[{\"tensor\": \"o\", \"backend\": \"sim\", \"base\": \"fp32\", "
                              "\"cases\": 9, \"ratio\": 1, "
                              "\"verdict\": \"pass\"}]";
    enum {
        CASE_GONE,
        CASE_CHANGED,
        POOLED_GONE,
        POOLED_FAILS,
        POOLED_MOVED,
        DIGEST,
        VERDICT,
        TOTALS,
        NCHANGES
    };
    static const struct {
        const char *line, *last;
        int status;
    } rows[NCHANGES] = {
        [CASE_GONE] = {"gone    case ", "COMPARE: GONE", 1},
        [CASE_CHANGED] = {"changed case ", "COMPARE: NOT WORSE", 0},
        [POOLED_GONE] = {"gone    all cases of o sim fp32 (pass)\n", "COMPARE: GONE", 1},
        [POOLED_FAILS] = {"worse   all cases of o sim fp32: pass -> fail", "COMPARE: WORSE", 1},
        [POOLED_MOVED] = {"changed all cases of o sim fp32\n", "COMPARE: NOT WORSE", 0},
        [DIGEST] = {"digest: NEW has none", "COMPARE: NOT WORSE", 0},
        [VERDICT] = {"worse   the record: pass -> fail", "COMPARE: WORSE", 1},
        [TOTALS] = {"changed the record: runs that fail: 0 -> 7", "COMPARE: NOT WORSE", 0}};
    for (int i = 0; i < NCHANGES; i++) {
        json_t *a = fresh(), *b = fresh();
        json_t *cases = json_object_get(b, "cases"), *pooled = json_loads(row, 0, NULL);
        json_object_set_new(a, "digest", json_pack("{ss}", "value", "0123456789abcdef"));
        json_object_set(b, "digest", json_object_get(a, "digest"));
        json_object_set_new(a, "pooled", json_loads(row, 0, NULL));
        if (i != POOLED_GONE) json_object_set(b, "pooled", pooled);
        if (i == CASE_GONE) json_array_remove(cases, 0);
        if (i == CASE_CHANGED) rename_member(json_array_get(cases, 0), "op", "gdn2");
        if (i == POOLED_FAILS) rename_member(json_array_get(pooled, 0), "verdict", "fail");
        if (i == POOLED_MOVED)
            json_object_set_new(json_array_get(pooled, 0), "ratio", json_real(1.5));
        if (i == DIGEST) json_object_del(b, "digest");
        rename_member(a, "verdict", "pass");
        rename_member(b, "verdict", i == VERDICT ? "fail" : "pass");
        json_object_set_new(json_object_get(a, "totals"), "fail", json_integer(0));
        json_object_set_new(json_object_get(b, "totals"), "fail", json_integer(7 * (i == TOTALS)));
        json_decref(pooled);
        save(a, "a");
        save(b, "b");
        CHECK(compare("a", "b", "") == rows[i].status && strstr(out, rows[i].line) &&
                  strstr(out, rows[i].last),
              "%d: %s", i, out);
        CHECK(compare("a", "a", "") == 0 && strstr(out, "COMPARE: SAME"), "%d: %s", i, out);
    }
}

DP_TEST(compare, growth_is_measured_against_noise_and_the_factor) {
    json_t *a = fresh(), *b = fresh(), *again = fresh();
    const size_t i = ranked(a);
    char id[300];
    snprintf(id, sizeof id, "%s", json_string_value(json_object_get(run_at(a, i), "id")));
    scale(tensor_at(b, i, 0), 1.4);
    scale(tensor_at(again, i, 0), 1.25);
    save(a, "a");
    save(b, "b");
    save(again, "again");
    CHECK(compare("a", "b", "") == 1 && strstr(out, "worse ") && strstr(out, id) &&
              strstr(out, "+40% (noise 0)") &&
              strstr(out, "1 moved up, 1 by more than 1.25, 0 down"),
          "%s", out);
    CHECK(compare("a", "b", "--worse 1.5") == 0 && strstr(out, "up ") && strstr(out, "NOT WORSE"),
          "%s", out);
    CHECK(compare("b", "a", "") == 0 && strstr(out, "down ") && strstr(out, "-28.6%"), "%s", out);
    char more[700];
    snprintf(more, sizeof more, "--again '%s'", path_of("again"));
    CHECK(compare("a", "b", more) == 0 && strstr(out, "COMPARE: SAME") &&
              strstr(out, "measured between OLD and 1 further record"),
          "%s", out); /* 40% is within twice 25% */
}

DP_TEST(compare, one_rank_that_grew_is_not_averaged_away) {
    json_t *a = fresh(), *b = fresh();
    const size_t i = ranked(a);
    json_t *p = json_object_get(tensor_at(b, i, 0), "per_rank");
    json_array_set_new(p, 1, json_real(json_number_value(json_array_get(p, 1)) * 3));
    save(a, "a");
    save(b, "b");
    CHECK(compare("a", "b", "") == 1 && strstr(out, ", rank 1: ") && strstr(out, "+200%"), "%s",
          out);
}

DP_TEST(compare, verdicts_runs_and_tensors_that_change_or_vanish_decide_the_status) {
    json_t *a = fresh(), *b = fresh(), *c = fresh(), *d = fresh(), *z = fresh();
    size_t pass = 0;
    while (strcmp(json_string_value(json_object_get(run_at(b, pass), "verdict")), "pass"))
        pass++;
    char id[300];
    snprintf(id, sizeof id, "%s", json_string_value(json_object_get(run_at(b, pass), "id")));
    json_object_set_new(run_at(b, pass), "verdict", json_string("fail"));
    json_object_set_new(run_at(b, pass), "why", json_string("o: too far off"));
    json_array_remove(json_object_get(c, "runs"), pass);
    json_array_remove(json_object_get(run_at(d, ranked(d)), "tensors"), 0);
    const size_t i = ranked(z);
    json_object_set_new(tensor_at(z, i, 0), "rel_fro", json_string("nan"));
    save(a, "a");
    save(b, "b");
    save(c, "c");
    save(d, "d");
    save(z, "z");
    CHECK(compare("a", "b", "") == 1 && strstr(out, id) &&
              strstr(out, "pass -> fail (o: too far off)") &&
              strstr(out, "1 changed, 1 for the worse"),
          "%s", out);
    CHECK(compare("b", "a", "") == 0 && strstr(out, "better ") && strstr(out, "fail -> pass"), "%s",
          out);
    CHECK(compare("a", "c", "") == 1 && strstr(out, "gone ") &&
              strstr(out, "0 appeared, 1 vanished"),
          "%s", out);
    CHECK(compare("c", "a", "") == 0 && strstr(out, "new ") &&
              strstr(out, "1 appeared, 0 vanished"),
          "%s", out);
    CHECK(compare("a", "d", "") == 1 && strstr(out, "gone    ") && !strstr(out, "worse   ") &&
              strstr(out, "is not judged any more") && strstr(out, "COMPARE: GONE: "),
          "%s", out);
    json_t *few = fresh();
    while (json_array_size(json_object_get(few, "runs")) > pass + 1)
        json_array_remove(json_object_get(few, "runs"), pass + 1);
    save(few, "few");
    CHECK(compare("a", "few", "") == 1 && strstr(out, " runs\n") && strstr(out, "COMPARE: GONE: "),
          "a line a case: %s", out);
    CHECK(compare("a", "few", "--verbose") == 1 && !strstr(out, " runs\n"), "%s", out);
    CHECK(compare("a", "z", "") == 1 && strstr(out, "-> nan, from 0 or to no number"), "%s", out);
    CHECK(compare("a", "b", "--json - 2>/dev/null") == 1 && out[0] == '{' &&
              strstr(out, "\"schema\": \"deltaproof-comparison\"") &&
              strstr(out, "\"worse\": true"),
          "%s", out);
}

DP_TEST(compare, what_cannot_be_compared_exits_2_and_says_why) {
    json_t *a = fresh(), *none = fresh(), *other = fresh(), *later = fresh();
    json_array_clear(json_object_get(none, "runs"));
    json_object_set_new(other, "schema", json_string("something"));
    json_object_set_new(later, "schema_version", json_integer(2));
    save(a, "a");
    save(none, "none");
    save(other, "other");
    save(later, "later");
    CHECK(compare("a", "none", "") == 2 && strstr(out, "no run in common"), "%s", out);
    CHECK(compare("a", "other", "") == 2 && strstr(out, "schema is 'something'"), "%s", out);
    CHECK(compare("later", "a", "") == 2 && strstr(out, "schema_version 2"), "%s", out);
    CHECK(compare("a", "nowhere", "") == 2 && strstr(out, "nowhere.json"), "%s", out);
    CHECK(compare("a", "a", "more") == 2 && strstr(out, "name two records"), "%s", out);
    CHECK(compare("a", "a", "--worse 0.5") == 2 && strstr(out, "--worse 0.5"), "%s", out);
}

DP_TEST(compare, history_draws_what_moved_over_the_records_of_a_folder) {
    const char *py = getenv("DP_PYTHON");
    char cmd[6000], html[600];
    snprintf(cmd, sizeof cmd, "%s -I -c 'import matplotlib, numpy, jinja2'",
             py && *py ? py : "python3");
    if (gt_run(cmd, out, sizeof out)) SKIP("no matplotlib: %s", out);
    json_t *a = fresh(), *b = fresh();
    json_object_set_new(b, "created", json_string("2099-01-01T00:00:00Z"));
    json_object_set_new(json_object_get(b, "program"), "commit", json_string("feedbeef"));
    scale(tensor_at(b, ranked(b), 0), 1.4);
    save(a, "a");
    save(b, "b");
    snprintf(html, sizeof html, "%s/history.html", gt_tmpdir());
    snprintf(cmd, sizeof cmd,
             "'%s' compare --history '%s' '%s' '%s' && grep -c '<svg' '%s' && grep -c 'of [0-9]* "
             "errors moved' '%s' && grep -o ': 1 of' '%s' && grep -c feedbeef '%s'",
             gt_program(), html, path_of("b"), path_of("a"), html, html, html, html);
    CHECK(gt_run(cmd, out, sizeof out) == 0 && strstr(out, "2 records"), "%s", out);
    snprintf(cmd, sizeof cmd, "'%s' compare --history '%s/no/such/h.html' '%s' '%s'", gt_program(),
             gt_tmpdir(), path_of("a"), path_of("b"));
    CHECK(gt_run(cmd, out, sizeof out) == 2 && strstr(out, "/no/such/h.html: No such file") &&
              !strstr(out, "Traceback"),
          "%s", out);
    snprintf(cmd, sizeof cmd, "'%s/../scripts/power' %s/no/such", gt_cases(), gt_tmpdir());
    CHECK(gt_run(cmd, out, sizeof out) == 2 && strstr(out, "/no/such: No such file") &&
              !strstr(out, "Traceback"),
          "%s", out);
    snprintf(cmd, sizeof cmd, "'%s' compare --history '%s' '%s'", gt_program(), html, path_of("a"));
    CHECK(gt_run(cmd, out, sizeof out) == 2 && strstr(out, "two are needed"), "%s", out);
}
