/* Attacks through what is read: numbers, names and shapes of tensors, settings, records. */
#include "attack.h"
#include "ref/files/safetensors.h"
#include "sanitized.h"

#include <jansson.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define HEAD "reason = r\nsource = s\n"

/* ---- item 3 ---------------------------------------------------------------------------------- */

/* A convolution whose output is zero is known exactly: there was no error to carry on, and no array
 * to carry it in. */
DP_TEST(attacks_input, a_training_step_with_a_convolution_of_zeros_is_judged) {
    static const char *const which[] = {"k", "v"};
    const char *dir = strdup(at_dir("zeros"));
    for (int i = 0; i < 2; i++) {
        at_write(at_text("%s/z.case", dir),
                 at_text(HEAD "op = step\nT = 8\nK = 6\nV = 6\nW = 2\nconv = %s\nactivation = "
                              "none\noverride = %s[*,*,*,*] 0\n",
                         which[i], which[i]));
        EXPECT(at_sh(dir, 20, "$P run z.case --cache none"), 0, "VERDICT: PASS (1 passed");
        EXPECT(at_sh(dir, 20, "$P run z.case --cache c && $P run z.case --cache c"), 0,
               "VERDICT: PASS (1 passed");
    }
    free((char *)dir);
}

typedef struct {
    const char *name, *dtype;
    int ndim;
    int64_t shape[4];
    double value; /* every entry */
} fill;

static void write_filled(const char *path, const fill *t, int n) {
    dp_tensorfile f = {0};
    dp_err e = {0};
    for (int i = 0; i < n; i++) {
        int64_t count = 1;
        for (int d = 0; d < t[i].ndim; d++)
            count *= t[i].shape[d];
        double *x = dp_doubles(count);
        for (int64_t j = 0; j < count; j++)
            x[j] = t[i].value;
        dp_tensorfile_add(&f, t[i].name, t[i].dtype, t[i].ndim, t[i].shape, x);
        free(x);
    }
    if (dp_safetensors_write(path, &f, &e)) gt_fail(__FILE__, __LINE__, path, "%s", e.msg);
    dp_tensorfile_free(&f);
}

DP_TEST(attacks_input, recorded_inputs_of_a_convolution_may_be_zeros_but_not_wider_than_64) {
    const char *dir = strdup(at_dir("conv-data"));
    const char *text = HEAD
        "op = step\nT = 8\nK = 6\nV = 6\nconv = k\nactivation = none\nconv_data = d.safetensors\n";
    at_write(at_text("%s/d.case", dir), text);
    for (int i = 0; i < 2; i++) {
        const fill t[] = {{"x", "F32", 2, {8, 6}, i}, {"w", "F32", 2, {6, 2}, 1 - i}};
        write_filled(at_text("%s/d.safetensors", dir), t, 2);
        EXPECT(at_sh(dir, 20, "$P run d.case --cache none"), 0, "VERDICT: PASS (1 passed");
    }
    const fill wide[] = {{"x", "F32", 2, {8, 6}, 1}, {"w", "F32", 2, {6, 65}, 1}};
    write_filled(at_text("%s/d.safetensors", dir), wide, 2);
    EXPECT(at_sh(dir, 20, "$P run d.case --cache none"), 2,
           "d.case:9: conv_data = d.safetensors: tensor w: width 65, at most 64");
    free((char *)dir);
}

/* ---- items 4 and 9 --------------------------------------------------------------------------- */

static const char *judge_files(const char *name, double o) {
    const char *dir = strdup(at_dir(name));
    const fill in[] = {{"q", "F32", 3, {2, 1, 2}, 1},
                       {"k", "F32", 3, {2, 1, 2}, 0.5},
                       {"v", "F32", 3, {2, 1, 2}, 1},
                       {"g", "F32", 3, {2, 1, 2}, -0.5},
                       {"beta", "F32", 2, {2, 1}, 0.5}};
    const fill out[] = {{"o", "F32", 3, {2, 1, 2}, o}};
    write_filled(at_text("%s/in.safetensors", dir), in, 5);
    write_filled(at_text("%s/out.safetensors", dir), out, 1);
    return dir;
}

#define JUDGE_AS                                                                                 \
    "$P judge --cache none --inputs in.safetensors --outputs out.safetensors --gate log --beta " \
    "plain --l2norm 0 --base fp32 --design"
#define JUDGE JUDGE_AS " ''"

/* o is zero everywhere: right for the scale 0 that was read once the digits behind the 60th were
 * cut off. */
DP_TEST(attacks_input, no_number_of_judge_is_cut) {
    const char *dir = judge_files("scale", 0);
    EXPECT(at_sh(dir, 20, JUDGE " --scale 0"), 0, "VERDICT: PASS");
    EXPECT(at_sh(dir, 20, JUDGE " --scale $(printf '0%%.0s' $(seq 62)).5"), 1, "VERDICT: FAIL");
    EXPECT(at_sh(dir, 20, JUDGE " --scale 0.5"), 1, "VERDICT: FAIL");
    free((char *)dir);
}

/* 503 characters, then `chunk=1289`: the words were once cut at 511 of them, and chunk=12 is a
 * design. */
DP_TEST(attacks_input, no_design_is_cut) {
    const char *dir = judge_files("design", 0);
    const char *words = "$(printf 'recurrent,%.0s' $(seq 49))out=fp32,factors=fp32,chunk=";
    EXPECT(at_sh(dir, 20, JUDGE_AS " %s%d", words, 12), 1, "VERDICT: FAIL");
    EXPECT(at_sh(dir, 20, JUDGE_AS " %s%d", words, 1289), 2, "chunk=1289: chunk is 8 to 512");
    free((char *)dir);
}

DP_TEST(attacks_input, numbers_that_are_none_are_refused_with_option_and_value) {
    static const struct {
        const char *args, *says;
    } bad[] = {{"--scale 1e-400", "'1e-400' is out of range"},
               {"--scale 1e400", "'1e400' is out of range"},
               {"--scale ' 1'", "' 1' is not a finite number"},
               {"--scale 1.5x", "'1.5x' is not a finite number"},
               {"--scale nan", "'nan' is not a finite number"},
               {"--tokens 2.5", "--tokens 2.5"},
               {"--tokens ' 2'", "--tokens  2"},
               {"--tokens 99999999999999999999", "--tokens 99999999999999999999"},
               {"--ranks 1e0", "'1e0' is not a number"},
               {"--cu-seqlens 0,1e0,2", "is no list of tokens"}};
    const char *dir = judge_files("numbers", 0);
    for (size_t i = 0; i < sizeof bad / sizeof *bad; i++)
        EXPECT(at_sh(dir, 20, JUDGE " %s", bad[i].args), 2, bad[i].says);
    static const struct {
        const char *line, *says;
    } line[] = {{"scale = 1e-400", "scale = 1e-400: 1e-400 is out of range"},
                {"scale = 1e400", "1e400 is out of range"},
                {"T = 99999999999999999999", "out of range"},
                {"seed = 0x10", "'0x10' is not an integer"},
                {"override = v[0,0,0,0] 1e400", "not a number that fp64 holds"},
                {"g_scale = 1e-330", "out of range"}};
    for (size_t i = 0; i < sizeof line / sizeof *line; i++) {
        at_write(at_text("%s/n.case", dir),
                 at_text(HEAD "op = kda\n%sK = 2\n%s\n",
                         strstr(line[i].line, "T =") ? "" : "T = 2\n", line[i].line));
        EXPECT(at_sh(dir, 20, "$P run n.case --cache none"), 2, line[i].says);
    }
    EXPECT(at_sh(dir, 20, "$P run t1 --cases $C --limit 1e-400"), 2, "--limit 1e-400");
    EXPECT(at_sh(dir, 20, "$P bisect precision smoke-kda --cases $C --need o=1e-3,o=1"), 2,
           "o is given twice");
    free((char *)dir);
}

DP_TEST(attacks_input, tensors_that_a_case_does_not_know_are_refused) {
    const char *dir = strdup(at_dir("typos"));
    const fill t[] = {
        {"q", "F32", 3, {2, 1, 2}, 1},     {"k", "F32", 3, {2, 1, 2}, 0.5},
        {"v", "F32", 3, {2, 1, 2}, 1},     {"g", "F32", 3, {2, 1, 2}, -0.5},
        {"beta", "F32", 2, {2, 1}, 0.5},   {"inital_state", "F32", 4, {1, 1, 2, 2}, 1},
        {"s0", "F32", 4, {1, 1, 2, 2}, 1}, {"initial_state", "F32", 4, {1, 1, 2, 2}, 1}};
    at_write(at_text("%s/d.case", dir), HEAD "op = kda\ndata = d.safetensors\nbackward = no\n");
    write_filled(at_text("%s/d.safetensors", dir), t, 6);
    EXPECT(at_sh(dir, 20, "$P run d.case --cache none"), 2,
           "d.case:4: data = d.safetensors: tensor inital_state is no input of op = kda; known: q "
           "k v g beta A_log dt_bias s0 (or initial_state)");
    fill both[7];
    memcpy(both, t, 5 * sizeof *t);
    both[5] = t[6];
    both[6] = t[7];
    write_filled(at_text("%s/d.safetensors", dir), both, 7);
    EXPECT(at_sh(dir, 20, "$P run d.case --cache none"), 2,
           "holds the same tensor under two names, s0 and initial_state");
    free((char *)dir);
}

/* ---- item 11: shapes, museum.json ------------------------------------------------------------ */

DP_TEST(attacks_input, an_axis_of_zero_hides_no_overflow) {
    static const char *const shape[] = {"[0,2,4611686018427387904]", "[0,4611686018427387904,2]",
                                        "[4611686018427387904,0]", "[0,3037000500,3037000500]"};
    const char *dir = judge_files("overflow", 0);
    for (int i = 0; i < 4; i++) {
        char header[512];
        const int n = sprintf(header,
                              "{\"q\":{\"dtype\":\"F32\",\"shape\":%s,\"data_offsets\":[0,0]},"
                              "\"k\":{\"dtype\":\"F32\",\"shape\":%s,\"data_offsets\":[0,0]},"
                              "\"v\":{\"dtype\":\"F32\",\"shape\":%s,\"data_offsets\":[0,0]},\"g\":"
                              "{\"dtype\":\"F32\",\"shape\":[0],\"data_offsets\":[0,0]},"
                              "\"beta\":{\"dtype\":\"F32\",\"shape\":[0],\"data_offsets\":[0,0]}}",
                              shape[i], shape[i], shape[i]);
        FILE *f = fopen(at_text("%s/in.safetensors", dir), "wb");
        const uint64_t length = (uint64_t)n;
        REQUIRE(f && fwrite(&length, 8, 1, f) == 1 &&
                    fwrite(header, 1, (size_t)n, f) == (size_t)n && !fclose(f),
                "not written");
        EXPECT(at_sh(dir, 20, JUDGE), 2, "in.safetensors: tensor ",
               "the axes multiply to more than");
    }
    free((char *)dir);
}

/* Once 24 bytes were taken for each batch: 103 GB for a file of 400. */
DP_TEST(attacks_input, a_batch_of_nothing_takes_no_memory) {
    const char *dir = judge_files("batch", 0);
    const fill in[] = {{"q", "BF16", 4, {1ll << 32, 2, 1, 0}, 1},
                       {"k", "BF16", 4, {1ll << 32, 2, 1, 0}, 1},
                       {"v", "BF16", 4, {1ll << 32, 2, 1, 0}, 1},
                       {"g", "BF16", 4, {1ll << 32, 2, 1, 0}, -0.5},
                       {"beta", "BF16", 4, {1ll << 32, 2, 1, 0}, 0.5}};
    write_filled(at_text("%s/in.safetensors", dir), in, 5);
    EXPECT(at_sh(dir, 20, JUDGE), 2,
           "in.safetensors: tensor q: [4294967296,2,1,0] holds no number");
    free((char *)dir);
}

/* A file of so many tensors of one number each; more than a header may hold, or than are read. */
static void write_many(const char *path, int tensors, int name) {
    FILE *f = fopen(path, "wb");
    uint64_t length = 0;
    fwrite(&length, 1, sizeof length, f);
    for (int i = 0; i < tensors; i++)
        length += (uint64_t)fprintf(
            f, "%c\"%0*d\":{\"dtype\":\"BF16\",\"shape\":[1],\"data_offsets\":[%d,%d]}",
            i ? ',' : '{', name, i, 2 * i, 2 * i + 2);
    length += (uint64_t)fprintf(f, "}");
    for (int i = 0; i < tensors; i++)
        fwrite("\0", 1, 2, f);
    rewind(f);
    fwrite(&length, 1, sizeof length, f);
    fclose(f);
}

DP_TEST(attacks_input, what_has_no_end_or_a_million_tensors_is_refused_at_once) {
    const char *dir = strdup(at_dir("endless"));
    const char *const judge = "$P judge --inputs %s --outputs %s --base bf16";
    const char *const end = "/proc/self/pagemap: its size is 0, and it is not empty";
    const char *const many = "many.safetensors";
    EXPECT(at_sh(dir, 5, judge, "/proc/self/pagemap", "/proc/self/pagemap"), 2, end);
    EXPECT(at_sh(dir, 5, "$P run /proc/self/pagemap"), 2, end);
    EXPECT(at_sh(dir, 5, "ln -s /proc/self/pagemap results.json; $P report ."), 2,
           "results.json: its size is 0, and it is not empty");
    write_many(at_text("%s/%s", dir, many), 4097, 4);
    EXPECT(at_sh(dir, 5, judge, many, many), 2, "header: 4097 tensors, at most 4096 are read");
    write_many(at_text("%s/%s", dir, many), 1000000, 7);
    EXPECT(at_sh(dir, 5, judge, many, many), 2, "header length = ", "above the limit of 16777216");
    free((char *)dir);
}

DP_TEST(attacks_input, a_malformed_museum_is_refused_by_file_and_field) {
    static const struct {
        const char *name, *text, *says;
    } bad[] = {{"museum",
                "{\"schema\": \"deltaproof-museum\", \"schema_version\": 1, \"cases\": 1, "
                "\"clean\": {}, \"bugs\": [], \"faults\": []}",
                "museum.json: clean.runs: missing"},
               {"museum",
                "{\"schema\": \"deltaproof-museum\", \"schema_version\": 1, \"cases\": 1, "
                "\"clean\": {\"runs\": 1, \"red\": 0}, \"bugs\": [], \"faults\": [{\"name\": "
                "\"f\", \"bug\": 1, \"stage\": \"s\", \"what\": \"w\","
                "\"source\": \"s\", \"runs\": 1, \"acted\": 1, \"red\": 1, \"seen\": {\"id\": 7}, "
                "\"ranks\": 2, \"located\": {\"x\": 1}, \"locations\": {}, \"fla\": {}}]}",
                "museum.json: faults[0].seen."},
               {"museum",
                "{\"schema\": \"deltaproof-museum\", \"schema_version\": 1, \"cases\": 1, "
                "\"clean\": [1], \"bugs\": {}, \"faults\": 3}",
                "museum.json: clean: expected an object"},
               {"kernels",
                "{\"schema\": \"deltaproof-museum-kernels\", \"schema_version\": 1, \"clean\": "
                "{\"runs\": 0, \"red\": 0}, \"faults\": [{\"name\": \"f\", \"bug\": 0, \"what\": "
                "\"w\", \"red\": 1, \"right\": true, \"fla\": true,"
                "\"seen\": {\"id\": \"x\"}}]}",
                "kernels.json: faults[0].seen."}};
    const char *dir = strdup(at_dir("museum-bad"));
    at_write(at_text("%s/results.json", dir), AT_RECORD);
    for (size_t i = 0; i < sizeof bad / sizeof *bad; i++) {
        at_write(at_text("%s/%s.json", dir, bad[i].name), bad[i].text);
        EXPECT(at_sh(dir, 30, "$P report ."), 2, bad[i].says);
        CHECK(!strstr(at_out, "Traceback"), "%s", at_out);
        remove(at_text("%s/%s.json", dir, bad[i].name));
    }
    free((char *)dir);
}

/* ---- items 8 and 11: records that the report reads ------------------------------------------- */

DP_TEST(attacks_input, records_that_no_run_wrote_are_refused_by_field_and_at_once) {
    static const struct {
        const char *from, *to, *says;
    } bad[] = {
        {"\"chain\": \"POLICY\"}", "\"chain\": \"POLICY\"}, \"ranks\": 1000000000",
         "runs[0].ranks: expected an integer up to 4096"},
        {"CREATED", "\\u0000", "results.json: "},
        {"TENSOR", "o\\u0007", "runs[0].tensors[0].name: has the character U+0007"},
        {"COMMIT", "\\ud800", "program.commit: has the character U+D800"},
        {"\"rel_fro\": 0.5", "\"rel_fro\": 1e400", "runs[0].tensors[0].rel_fro: "},
        {"\"rel_fro\": 0.5", "\"rel_fro\": 1e9999999999", "runs[0].tensors[0].rel_fro: "},
        {"\"K\": 8", "\"K\": 99999999999999999999999", "cases[0].K: expected an integer up to"},
        {"\"ratio\": 0.5", "\"tier\": \"expected\"",
         "runs[0].tensors[0].expected: missing, but tier is expected"},
        {"\"rank\": 0, \"chunks\": 4", "\"rank\": 5000, \"chunks\": 4",
         "runs[0].chain[1].rank: expected an integer up to 4096"},
        {"\"schema_version\": 1", "\"schema_version\": 1, \"schema_version\": 1",
         "an object has a name twice"}};
    const char *dir = strdup(at_dir("record-bad"));
    for (size_t i = 0; i < sizeof bad / sizeof *bad; i++) {
        const char *at = strstr(AT_RECORD, bad[i].from);
        REQUIRE(at, "%s is not in the record", bad[i].from);
        at_write(at_text("%s/results.json", dir),
                 at_text("%.*s%s%s", (int)(at - AT_RECORD), AT_RECORD, bad[i].to,
                         at + strlen(bad[i].from)));
        EXPECT(at_sh(dir, 20, "$P report ."), 2, bad[i].says);
        CHECK(!strstr(at_out, "Traceback") && !strstr(at_out, "a fault of the report"), "%s",
              at_out);
    }
    free((char *)dir);
}

/* ---- item 12 --------------------------------------------------------------------------------- */

/* Inputs that fuzzers began with and those of their findings, through the same targets. */
DP_TEST(attacks_input, what_fuzzers_found_is_read_again) {
    static const char *const target[] = {"safetensors", "case", "judge", "meeting"};
    const char *dir = strdup(at_dir("replay"));
    for (size_t i = 0; i < sizeof target / sizeof *target; i++)
        EXPECT(at_sh(dir, 30, "${P%%/*}/fuzz-replay %s $C/../harness/fuzz/corpus/%s/*", target[i],
                     target[i]),
               0, at_text("%s: ", target[i]), " inputs read");
    free((char *)dir);
}
