/* run --resume: what a killed command has finished is not run again, and nothing else is taken for
 * it. */
#include "gt.h"
#include "harness/record/run_json.h"

#include <jansson.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <xxhash.h>

static int run(const char *before, const char *args, char *out, int size) {
    char cmd[4096];
    snprintf(cmd, sizeof cmd,
             "cd '%s' && %s '%s' run --cases '%s' %s --chain fp32 --backend sim --cache none "
             "--resume again",
             gt_tmpdir(), before, gt_program(), gt_cases(), args);
    return gt_run(cmd, out, size);
}

static const char *after(const char *out, const char *word) {
    const char *at = strstr(out, word);
    return at ? at : "";
}

/* The lines from the digest on. */
static void same_end(const char *a, const char *b) {
    CHECK(*after(a, "digest: ") && !strcmp(after(a, "digest: "), after(b, "digest: ")),
          "%.2000s\nand then\n%.2000s", a, b);
}

/* The case took no time: it was not run. */
static int kept_case(const char *out, const char *name) {
    const char *line = after(out, name);
    const char *end = strchr(line, '\n');
    return end && end - line > 7 && !strncmp(end - 7, "(0.0 s)", 7);
}
static int kept(const char *out) { return kept_case(out, "smoke-mkda2 "); }

/* A record without what differs from one time to the next. */
static json_t *record_of(const char *name) {
    char path[600];
    json_error_t e;
    snprintf(path, sizeof path, "%s/%s", gt_tmpdir(), name);
    json_t *j = json_load_file(path, 0, &e), *r;
    size_t i;
    json_object_del(json_object_get(j, "program"), "command");
    json_object_del(j, "created");
    json_object_del(j, "seconds");
    json_array_foreach(json_object_get(j, "runs"), i, r) json_object_del(r, "seconds");
    return j;
}

static json_t *runs_of(const char *name) {
    json_t *j = record_of(name), *runs = json_incref(json_object_get(j, "runs"));
    json_decref(j);
    return runs;
}

/* A kept run has every field of the one that was made. */
DP_TEST(resume, kept_runs_have_every_field) {
    char out[1 << 14];
    const char *const args = "initial-state session-verify chain-reflect-k32 exact-kda --base bf16 "
                             "--ranks 1,2 --fault state-late --json ";
    for (int i = 0; i < 2; i++) {
        char with[400];
        snprintf(with, sizeof with, "%s%s", args, i ? "kept.json" : "made.json");
        const int rc = run(i ? "" : "rm -rf again;", with, out, sizeof out);
        REQUIRE(rc == 1 || rc == 0, "%.4000s", out);
    }
    json_t *made = runs_of("made.json"), *kept_runs = runs_of("kept.json");
    CHECK(json_array_size(made) > 3, "%zu runs", json_array_size(made));
    for (size_t i = 0; i < json_array_size(made); i++)
        CHECK(json_equal(json_array_get(made, i), json_array_get(kept_runs, i)), "run %zu: %.300s",
              i, json_string_value(json_object_get(json_array_get(made, i), "id")));
    json_decref(made);
    json_decref(kept_runs);
}

DP_TEST(resume, finished_cases_are_not_run_again) {
    char first[1 << 14], out[1 << 14];
    const char *const both = "smoke-mkda2 packed-across --base fp32 --ranks 1";
    REQUIRE(run("", both, first, sizeof first) == 0 && !kept(first), "%.4000s", first);
    REQUIRE(run("", both, out, sizeof out) == 0 && kept(out), "%.4000s", out);
    same_end(first, out);
    /* Half a file, another byte: each is run again, and kept again. */
    REQUIRE(run("for f in again/*.json; do truncate -s 1000 $f; done;", both, out, sizeof out) == 0,
            "%.4000s", out);
    CHECK(!kept(out) && strstr(out, "its case is run again"), "%.4000s", out);
    same_end(first, out);
    REQUIRE(run("for f in again/*.json; do printf x | dd of=$f bs=1 seek=200 conv=notrunc "
                "2>/dev/null; done;",
                both, out, sizeof out) == 0,
            "%.4000s", out);
    CHECK(!kept(out) && strstr(out, "its case is run again"), "%.4000s", out);
    REQUIRE(run("", both, out, sizeof out) == 0 && kept(out), "%.4000s", out);
}

/* Runs that no backend made are kept like others. */
DP_TEST(resume, a_case_with_skipped_runs_is_not_run_again) {
    char cmd[4096], out[1 << 14];
    snprintf(cmd, sizeof cmd,
             "cd '%s' && '%s' run --cases '%s' smoke-kda --base fp32 --chain fp32 --ranks 1 "
             "--backend sim,cuda --cache none --resume skipped",
             gt_tmpdir(), gt_program(), gt_cases());
    for (int i = 0; i < 2; i++) {
        const int rc = gt_run(cmd, out, sizeof out);
        CHECK(rc == 0 && kept_case(out, "smoke-kda ") == i && !strstr(out, "is run again"),
              "%d: %.4000s", rc, out);
    }
}

DP_TEST(resume, other_options_and_other_inputs_are_run) {
    char out[1 << 14], cmd[2048];
    REQUIRE(run("rm -rf again;", "smoke-mkda2 --base fp32 --ranks 1", out, sizeof out) == 0 &&
                !kept(out),
            "%.4000s", out);
    REQUIRE(run("", "smoke-mkda2 --base fp32 --ranks 1", out, sizeof out) == 0 && kept(out),
            "%.4000s", out);
    CHECK(run("", "smoke-mkda2 --base fp32 --ranks 3", out, sizeof out) == 0 && !kept(out),
          "%.4000s", out);
    CHECK(run("", "smoke-mkda2 --base fp64 --ranks 1", out, sizeof out) == 0 && !kept(out),
          "%.4000s", out);
    snprintf(cmd, sizeof cmd, "sed '$a seed = 4711' '%s/smoke-mkda2.case' >'%s/smoke-mkda2.case'",
             gt_cases(), gt_tmpdir());
    REQUIRE(gt_run(cmd, out, sizeof out) == 0, "%s", out);
    CHECK(run("", "smoke-mkda2 --cases . --base fp32 --ranks 1", out, sizeof out) == 0 &&
              !kept(out),
          "%.4000s", out);
}

/* A program whose code another file has: its name says nothing of that. */
DP_TEST(resume, a_program_is_run_again_but_where_its_commit_is_named) {
    char out[1 << 14];
    static const struct {
        const char *before, *with;
        int status, kept;
    } row[] = {
        {"cp $E prog.py; rm -rf again;", "", 0, 0},
        {"sed -i 's/^def forward(.*/&\\n    x = {**x, \"v\": 2 * x[\"v\"]}/' prog.py;", "", 1, 0},
        {"cp $E prog.py;", "--kernel-commit a", 0, 0},
        {"", "--kernel-commit a", 0, 1},
        {"", "--kernel-commit a --again 0", 0, 0},
        {"", "--kernel-commit b", 0, 0}};
    if (!getenv("DP_PYTHON")) setenv("DP_PYTHON", "python3", 1);
    if (gt_run("\"$DP_PYTHON\" -c 'import numpy'", out, sizeof out)) SKIP("numpy is not installed");
    for (size_t i = 0; i < sizeof row / sizeof *row; i++) {
        char cmd[4096];
        snprintf(cmd, sizeof cmd,
                 "cd '%s' && E='%s/../harness/subject/example_program.py' && %s echo 'import prog; "
                 "prog.serve()' >kernel.py && '%s' run --cases '%s' smoke-kda --base fp32 "
                 "--cache none --resume again --serve \"$DP_PYTHON kernel.py\" %s",
                 gt_tmpdir(), gt_cases(), row[i].before, gt_program(), gt_cases(), row[i].with);
        const int rc = gt_run(cmd, out, sizeof out);
        CHECK(rc == row[i].status && kept_case(out, "smoke-kda  ") == row[i].kept,
              "%zu: %d: %.3000s", i, rc, out);
        CHECK(!!strstr(out, "may have changed") == !*row[i].with, "%zu: %.3000s", i, out);
    }
}

/* Killed after the first of three: that one is there. */
DP_TEST(resume, a_killed_command_goes_on) {
    char cmd[4096], out[1 << 14], whole[1 << 14];
    const char *const args = "smoke-mkda2 packed-across smoke-step --base fp32 --ranks 1";
    snprintf(cmd, sizeof cmd,
             "cd '%s' && rm -rf again; '%s' run %s --cases '%s' --chain fp32 --backend sim --cache "
             "none --resume again >said 2>&1 & p=$!\n"
             "cd '%s'; for i in $(seq 2400); do ls again/*.json >/dev/null 2>&1 && break; sleep "
             "0.02; done; kill -KILL $p; wait $p 2>/dev/null; ls again/*.json",
             gt_tmpdir(), gt_program(), args, gt_cases(), gt_tmpdir());
    REQUIRE(gt_run(cmd, out, sizeof out) == 0, "%.4000s", out);
    snprintf(cmd, sizeof cmd, "%s --json went-on.json", args);
    REQUIRE(run("", cmd, out, sizeof out) == 0 && strstr(out, "(0.0 s)"), "%.4000s", out);
    snprintf(cmd, sizeof cmd, "%s --json whole.json", args);
    REQUIRE(run("rm -rf again;", cmd, whole, sizeof whole) == 0, "%.4000s", whole);
    same_end(whole, out);
    json_t *a = record_of("went-on.json"), *b = record_of("whole.json");
    CHECK(json_object_get(b, "pooled") && json_equal(a, b), "the records differ");
    json_decref(a);
    json_decref(b);
}

/* ---- the table of members -------------------------------------------------------------------- */

static size_t size_of(const dp_record_field *f) { return f->text ? f->text : f->size; }

/* Where a member begins that no row names: behind a row lie at most the bytes that align the next
 * one. size: all is named. */
static size_t unnamed(const dp_object_schema *s) {
    size_t at = 0;
    while (at < s->size) {
        const dp_record_field *next = NULL;
        for (int i = 0; i < s->n; i++)
            if (s->field[i].offset >= at && (!next || s->field[i].offset < next->offset))
                next = &s->field[i];
        const size_t to = next ? next->offset : s->size, gap = to - at;
        if (gap >= 8 || (gap && (at % 8 == 0 || to % 8))) return at;
        at = next ? to + size_of(next) : s->size;
    }
    return at;
}

static void check_members(const dp_object_schema *s) {
    CHECK(unnamed(s) == s->size, "%s: a member at byte %zu has no row", s->name, unnamed(s));
    for (int i = 0; i < s->n; i++)
        if (s->field[i].of) check_members(s->field[i].of);
}

DP_TEST(resume, every_member_of_a_run_has_a_row) { check_members(&dp_run_members); }

static const dp_record_field *row_of(const dp_object_schema *s, const char *name) {
    for (int i = 0; i < s->n; i++)
        if (!strcmp(s->field[i].name, name)) return &s->field[i];
    return NULL;
}

/* The last word of each choice: a kept run that has it must be read again. */
DP_TEST(resume, every_word_of_a_design_is_in_the_range_of_its_row) {
    static const char *const member[][2] = {{"state", "recurrent,state=int8-block"},
                                            {"read_kept", "recurrent,read=kept"},
                                            {"final_state", "final_state=int8-block"},
                                            {"gated", "scores=paired"},
                                            {"product", "inverse=merged"},
                                            {"factors", "factors=fp16"},
                                            {"decays", "decays=fp16"}};
    const dp_record_field *of = row_of(&dp_run_members, "design");
    REQUIRE(of && of->of, "no row of a design");
    for (size_t i = 0; i < sizeof member / sizeof *member; i++) {
        const dp_record_field *f = row_of(of->of, member[i][0]);
        dp_design d;
        dp_err e = {0};
        REQUIRE(f && !dp_design_parse(member[i][1], DP_BASE_BF16, &d, &e), "%s: %s", member[i][1],
                e.msg);
        const int value = *(const int *)(const void *)((const char *)&d + f->offset);
        CHECK(value > 0 && value <= f->most, "%s: %d, most %d", member[i][1], value, (int)f->most);
    }
}

/* ---- files that were changed, with their check made anew ------------------------------------- */

static const char *const ONE = "t1 --base fp32 --ranks 1";

static char *kept_file(void) {
    static char path[700];
    char cmd[600];
    snprintf(cmd, sizeof cmd, "printf %%s '%s'/again/*.json", gt_tmpdir());
    gt_run(cmd, path, sizeof path);
    return path;
}

static void save_checked(json_t *all, const char *path) {
    char hex[33], *text = json_dumps(json_object_get(all, "runs"), JSON_COMPACT);
    XXH128_canonical_t as;
    XXH128_canonicalFromHash(&as, XXH3_128bits(text ? text : "", text ? strlen(text) : 0));
    for (int i = 0; i < 16; i++)
        snprintf(hex + 2 * i, 3, "%02x", as.digest[i]);
    free(text);
    if (json_string_length(json_object_get(all, "check")) == 32)
        json_object_set_new(all, "check", json_string(hex));
    REQUIRE(!json_dump_file(all, path, JSON_INDENT(1)), "%s", path);
}

/* "runs/0/tensor/0/N": the value there, and its place. */
static json_t *walk(json_t *x, const char *to, json_t **in, char last[64]) {
    char part[64];
    for (int used; sscanf(to, "%63[^/]%n", part, &used) == 1; to += used + (to[used] == '/')) {
        *in = x;
        strcpy(last, part);
        x = json_is_array(x) ? json_array_get(x, (size_t)atoi(part)) : json_object_get(x, part);
    }
    return x;
}

static void put(json_t *in, const char *last, json_t *value) {
    if (json_is_array(in))
        json_array_set_new(in, (size_t)atoi(last), value);
    else if (value)
        json_object_set_new(in, last, value);
    else
        json_object_del(in, last);
}

DP_TEST(resume, a_changed_file_is_refused_by_its_field) {
    static const struct {
        const char *at, *value, *says; /* value NULL: it is gone */
    } rows[] = {
        {"schema", "\"deltaproof-record\"", "schema: is 'deltaproof-record', must be"},
        {"schema_version", "2", "schema_version 2, this program reads 1"},
        {"key", "\"00\"", "key: is '00', must be"},
        {"case", "\"kda\"", "case: is 'kda', must be 't1'"},
        {"sources", NULL, "sources: missing"},
        {"check", "\"0\"", "check: is '0', must be"},
        {"runs", NULL, "runs: must be a list"},
        {"runs", "[]", "runs: there is none"},
        {"runs/0/id", NULL, "runs[0].id: missing"},
        {"runs/0/id", "\"t1:ranks=2\"", "runs[0].id: says another run"},
        {"runs/0/case_name", "\"kda\"", "runs[0].case_name: of another case"},
        {"runs/0/backend", "99", "runs[0].backend: 99: must be 0 .. "},
        {"runs/0/base", "-1", "runs[0].base: must be a number from 0 on"},
        {"runs/0/ranks", "4294967297", "runs[0].ranks: 4294967297: must be 0 .. 4096"},
        {"runs/0/ntensor", "1000000", "runs[0].ntensor: 1000000: must be 0 .. 1024"},
        {"runs/0/ntensor", "1000", "runs[0].tensor: "},
        {"runs/0/speaks", "500", "runs[0].speaks: there is no such tensor"},
        {"runs/0/truth_kind", "null", "runs[0].truth_kind: missing"},
        {"runs/0/tensor/0/N", "4000", "runs[0].tensor[0].per_rank: 1 entries: must be 4000"},
        {"runs/0/tensor/0/heads", "1048576", "runs[0].tensor[0].per_head: "},
        {"runs/0/tensor/0/rel_fro", "\"1e3\"", "runs[0].tensor[0].rel_fro: is no number in hex"},
        {"runs/0/tensor/0/worst/at/rank", "7", "runs[0].tensor[0].a row of a rank"},
        {"runs/0/tensor/0/name", "\"a name of more than twenty-three\"", ".name: is too long"},
        {"runs/0/tensor/0/verdict", "1", "runs[0].verdict: a tensor failed"},
        {"runs/0/tensor/0/expected/excess", "\"0x1p+9\"", "verdict: pass, with an error beyond"},
        {"runs/0/bits/chunks", "[1]", "runs[0].bits.chunks: 1 entries: must be 5"},
    };
    char first[1 << 14], out[1 << 14];
    REQUIRE(run("rm -rf again;", ONE, first, sizeof first) == 0, "%.4000s", first);
    const char *path = kept_file();
    json_error_t je;
    json_t *good = json_load_file(path, 0, &je);
    REQUIRE(good, "%s: %s", path, je.text);
    for (size_t i = 0; i < sizeof rows / sizeof *rows; i++) {
        json_t *all = json_deep_copy(good), *in = NULL;
        char last[64];
        REQUIRE(walk(all, rows[i].at, &in, last), "%s", rows[i].at);
        put(in, last, rows[i].value ? json_loads(rows[i].value, JSON_DECODE_ANY, NULL) : NULL);
        save_checked(all, path);
        json_decref(all);
        const int rc = run("", ONE, out, sizeof out);
        CHECK(rc == 0 && strstr(out, rows[i].says) && strstr(out, "; its case is run again"),
              "%s = %s: status %d: %.3000s", rows[i].at, rows[i].value, rc, out);
        same_end(first, out);
    }
    json_decref(good);
}

/* Every value below x, numbered; the one of number *left is replaced. */
static void replace(json_t *x, int *left, const json_t *by) {
    const char *key;
    json_t *v;
    size_t i;
    void *next;
    json_object_foreach_safe(x, next, key, v) {
        if ((*left)-- == 0)
            json_object_set_new(x, key, json_deep_copy(by));
        else
            replace(v, left, by);
    }
    json_array_foreach(x, i, v) {
        if ((*left)-- == 0)
            json_array_set_new(x, i, json_deep_copy(by));
        else
            replace(v, left, by);
    }
}

/* Whatever stands anywhere in it: an end in time, of one's own will, and a verdict. */
DP_TEST(resume, no_value_of_a_changed_file_ends_the_program) {
    static const char *const by[] = {"null", "true", "-1",      "2147483647", "9223372036854775807",
                                     "0.5",  "\"\"", "\"nan\"", "\"0\"",      "\"0x\"",
                                     "{}",   "[]",   "[[[]]]",  "[null]",     "{\"a\": {}}"};
    char out[1 << 14];
    int all_of_it = 1 << 20;
    REQUIRE(run("rm -rf again;", ONE, out, sizeof out) == 0, "%.4000s", out);
    const char *path = kept_file();
    json_error_t je;
    json_t *good = json_load_file(path, 0, &je);
    REQUIRE(good, "%s: %s", path, je.text);
    replace(good, &all_of_it, good);
    const int values = (1 << 20) - all_of_it;
    for (int i = 0; i < 30; i++) {
        json_t *all = json_deep_copy(good), *value = json_loads(by[i % 15], JSON_DECODE_ANY, NULL);
        int left = (int)((unsigned)i * 2654435761u % (unsigned)values);
        replace(all, &left, value);
        save_checked(all, path);
        json_decref(value);
        json_decref(all);
        const int rc = run("", ONE, out, sizeof out);
        CHECK(rc == 0 || rc == 1, "%d, %s: status %d: %.3000s", i, by[i % 15], rc, out);
        CHECK(strstr(out, "VERDICT: "), "%d: %.3000s", i, out);
    }
    json_decref(good);
}
