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

/* `make verify` writes less than 20 MB for 3,600 runs; these two are among its shorter cases. */
DP_TEST(schema, a_run_that_passes_takes_below_4_kilobytes) {
    const char *dir = strdup(at_dir("short"));
    EXPECT(at_sh(dir, 120, "$P run smoke-gdn exact-kda --cases $C --json r.json"), 0);
    char *text = at_read(at_text("%s/r.json", dir));
    json_t *record = json_loads(text, 0, NULL);
    const size_t runs = json_array_size(json_object_get(record, "runs"));
    CHECK(runs > 200, "%zu runs", runs);
    CHECK(strlen(text) < 4000 * runs, "%zu bytes of %zu runs", strlen(text), runs);
    json_decref(record);
    free(text);
    free((char *)dir);
}
