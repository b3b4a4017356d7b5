/* Records and the schema that the program prints of them (harness/record/record_schema.c). */
#include "attack.h"
#include "gt.h"
#include "harness/record/record_schema.h"

#include <stdlib.h>
#include <string.h>

/* One of each op, of a fault, of a step's convolutions, of what is not finite. */
static const char *const RUNS[] = {"smoke-mkda2 --backend sim,lapack --base fp32",
                                   "smoke-chain",
                                   "smoke-conv",
                                   "smoke-step --base bf16",
                                   "inf",
                                   "smoke-kda --fault half-chunk --ranks 2 --base fp64,fp32"};
enum { NRUNS = sizeof RUNS / sizeof *RUNS };

static const char *record(const char *dir, int i) {
    const int rc = at_sh(dir, 120, "$P run --cases $C %s --cache none --json %d.json", RUNS[i], i);
    CHECK(rc == 0 || rc == 1, "%s: status %d: %s", RUNS[i], rc, at_out);
    return at_text("%s/%d.json", dir, i);
}

DP_TEST(schema, every_record_that_is_written_fits_the_schema_that_is_printed) {
    const char *dir = strdup(at_dir("schema"));
    for (int i = 0; i < NRUNS; i++)
        record(dir, i);
    EXPECT(at_sh(dir, 20, "$P list --schema >schema.json"), 0);
    const int rc = at_sh(
        dir, 60, "python3 '%s/../harness/tests/data/validate.py' schema.json ?.json", gt_cases());
    if (rc == 77)
        SKIP("%s", at_out);
    else
        CHECK(rc == 0, "%s", at_out);
    free((char *)dir);
}

/* The report checks a record by the printed schema. */
DP_TEST(schema, the_report_reads_by_the_schema_that_is_printed) {
    const char *dir = strdup(at_dir("printed"));
    EXPECT(at_sh(dir, 20, "$P list --schema >schema.json"), 0);
    char *printed = at_read(at_text("%s/schema.json", dir));
    char *kept = at_read(at_text("%s/../reports/read/record.schema.json", gt_cases()));
    CHECK(!strcmp(kept, printed), "deltaproof list --schema >reports/read/record.schema.json");
    free(kept);
    free(printed);
    free((char *)dir);
}

/* Objects of the schema that have two fields of one name, or a row without kind of writing. */
static void check_fields(const dp_object_schema *s, int depth) {
    for (int i = 0; i < s->n; i++) {
        for (int j = 0; j < i; j++)
            CHECK(strcmp(s->field[i].name, s->field[j].name), "%s.%s twice", s->name,
                  s->field[i].name);
        if (s->field[i].of && depth < 8) check_fields(s->field[i].of, depth + 1);
    }
}

DP_TEST(schema, no_object_has_a_field_twice) { check_fields(&dp_record_schema, 0); }

DP_TEST(schema, a_field_of_another_kind_is_refused_by_its_place) {
    static const struct {
        const char *field, *why;
    } rows[] = {
        {"\"tensors\": [], \"seconds\": \"soon\"",
         "r.json: runs[0].seconds: must be a number, found \"soon\""},
        {"\"tensors\": [], \"kept_bytes\": -1",
         "r.json: runs[0].kept_bytes: must be a number from 0 on, found -1"},
        {"\"tensors\": [], \"policy\": {\"base\": 3}",
         "r.json: runs[0].policy.base: must be a text, found 3"},
        {"\"tensors\": [], \"chain\": [{\"rank\": 0.5}]",
         "r.json: runs[0].chain[0].rank: must be an integer, found 0.5"},
        {"\"tensors\": [], \"truth\": {\"cached\": 1}",
         "r.json: runs[0].truth.cached: must be true or false, found 1"},
        {"\"tensors\": [{\"name\": \"o\", \"verdict\": \"pass\", \"expected\": {\"row\": {\"limit\""
         ": \"much\"}}}]",
         "r.json: runs[0].tensors[0].expected.row.limit: must be a number, found \"much\""},
        {"\"tensors\": [{\"name\": \"o\", \"verdict\": \"pass\", \"per_head\": [[0, \"x\"]]}]",
         "r.json: runs[0].tensors[0].per_head: must hold numbers, found [0,\"x\"]"},
        {"\"tensors\": null", "r.json: runs[0].tensors: missing, found null"},
        {"\"seconds\": 1", "r.json: runs[0].tensors: missing\n"},
        {"\"tensors\": [null]", "r.json: runs[0].tensors[0]: must be an object, found null"},
        {"\"tensors\": [], \"chain\": null", "r.json: runs[0].chain: must be a list, found null"},
        {"\"tensors\": [], \"truth\": null",
         "r.json: runs[0].truth: must be an object, found null"},
        {"\"tensors\": [], \"op\": null", "r.json: runs[0].op: must be a text, found null"},
        {"\"tensors\": [], \"ranks\": null",
         "r.json: runs[0].ranks: must be a number from 0 on, found null"},
        {"\"tensors\": [{\"name\": \"o\", \"verdict\": \"pass\", \"rel_fro\": null}]",
         "r.json: runs[0].tensors[0].rel_fro: must be a number, found null"},
        {"\"tensors\": [], \"seconds\": null",
         "r.json: runs[0].seconds: must be a number, found null"},
        {"\"tensors\": [], \"seconds\": NaN", "r.json:1: not JSON"}};
    const char *dir = strdup(at_dir("kinds"));
    for (size_t i = 0; i < sizeof rows / sizeof *rows; i++) {
        at_write(at_text("%s/r.json", dir),
                 at_text("{\"schema\": \"deltaproof-record\", \"schema_version\": 1, \"verdict\": "
                         "\"pass\", \"runs\": [{\"id\": \"a\", \"verdict\": \"pass\", %s}]}",
                         rows[i].field));
        EXPECT(at_sh(dir, 20, "$P compare r.json r.json"), 2, rows[i].why);
        EXPECT(at_sh(dir, 20, "$P explain --record r.json a"), 2, rows[i].why);
    }
    free((char *)dir);
}

/* `make verify` writes less than 20 MB for 3,600 runs; these two are among its shorter cases. */
DP_TEST(schema, a_run_that_passes_takes_below_4_kilobytes) {
    const char *dir = strdup(at_dir("short"));
    EXPECT(at_sh(dir, 120, "$P run smoke-gdn exact-kda --cases $C --cache none --json r.json"), 0);
    char *text = at_read(at_text("%s/r.json", dir));
    json_t *record = json_loads(text, 0, NULL);
    const size_t runs = json_array_size(json_object_get(record, "runs"));
    CHECK(runs > 200, "%zu runs", runs);
    CHECK(strlen(text) < 4000 * runs, "%zu bytes of %zu runs", strlen(text), runs);
    json_decref(record);
    free(text);
    free((char *)dir);
}
