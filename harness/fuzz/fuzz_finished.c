/* harness/fuzz/fuzz_finished.c - libFuzzer target: runs of a finished case as `run --resume` reads
 * them. An input is edits of a whole run. An edit is two bytes that number a value, then the JSON
 * that replaces it, up to a NUL. The first edit's lowest bit selects the run. The runs are refused
 * with a message that names the file, or read. Runs that are read are written and read again, and
 * every text about them is made. */
#include "harness/commands/print_run.h"
#include "harness/record/record.h"
#include "harness/record/record_schema.h"
#include "harness/record/run_json.h"
#include "mutate.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static double *numbers(int n) {
    double *x = dp_doubles(n);
    for (int i = 0; i < n; i++)
        x[i] = 1e-3 * (i + 1);
    return x;
}

static dp_judgement tensor(const char *name, int N, int heads) {
    dp_judgement t = {.N = N,
                      .heads = heads,
                      .per_rank = numbers(N),
                      .per_head = numbers(N * heads),
                      .per_rank_ratio = numbers(N),
                      .nwindow = 2,
                      .window = numbers(2),
                      .bound = 0.5,
                      .tier = "bound"};
    snprintf(t.name, sizeof t.name, "%s", name);
    t.failed.at.rank = -1;
    return t;
}

static void add_run(dp_runs *all, dp_run r, int tensors, int N, int heads) {
    r.case_name = strdup("c");
    r.truth_kind = "mpfr";
    r.id = dp_run_id(&r);
    r.ntensor = tensors;
    r.tensor = dp_calloc((size_t)tensors, sizeof *r.tensor);
    for (int i = 0; i < tensors; i++)
        r.tensor[i] = tensor(i ? "dq" : "o", N, heads);
    r.speaks = -1;
    all->run[all->n++] = r;
}

/* 0: a run of two ranks with a fault; 1: one of a chain with readings. */
static json_t *whole(int which) {
    dp_runs all = {.run = dp_calloc(1, sizeof *all.run), .cap = 1};
    dp_run r = {.op = which ? "chain" : "kda", .ranks = 2 - which, .has_chain = 1, .slope = NAN};
    if (which) {
        r.npoint = 1;
        r.point = dp_calloc(1, sizeof *r.point);
        r.bits.npoint = DP_BITS_POINTS;
    } else {
        r.has_base = r.has_merge = r.fault = 1;
        r.nhit = 4;
        r.hit = dp_calloc(4, 1);
        r.design = dp_design_of(DP_BASE_FP64);
    }
    add_run(&all, r, 2 - which, 2 - which, 2);
    json_t *list = dp_runs_json(&all);
    dp_runs_free(&all);
    return list;
}

/* The value of number *left below x, in the order in which JSON has them, becomes `by`. */
static void replace(json_t *x, int *left, json_t *by) {
    const char *key;
    json_t *v;
    size_t i;
    void *next;
    json_object_foreach_safe(x, next, key, v) {
        if ((*left)-- == 0)
            json_object_set(x, key, by);
        else if (*left >= 0)
            replace(v, left, by);
    }
    json_array_foreach(x, i, v) {
        if ((*left)-- == 0)
            json_array_set(x, i, by);
        else if (*left >= 0)
            replace(v, left, by);
    }
}

static void edit(json_t *list, const uint8_t *bytes, size_t size) {
    while (size > 2) {
        const uint8_t *text = bytes + 2, *nul = memchr(text, 0, size - 2);
        const size_t n = nul ? (size_t)(nul - text) : size - 2;
        int left = bytes[0] + 256 * bytes[1];
        json_t *by = json_loadb((const char *)text, n, JSON_DECODE_ANY, NULL);
        if (by) replace(list, &left, by);
        json_decref(by);
        size -= n + 2 < size ? n + 3 : size;
        bytes = text + n + 1;
    }
}

static void say(const dp_runs *r) {
    static FILE *nowhere;
    if (!nowhere) nowhere = fopen("/dev/null", "w");
    for (int i = 0; i < r->n; i++) {
        json_t *o = dp_schema_write(&dp_record_run_schema, &r->run[i]);
        must(o != NULL, "no record of a run", "");
        json_decref(o);
        free(dp_digest_text(&r->run[i]));
        dp_print_run(&r->run[i], nowhere);
    }
}

int LLVMFuzzerTestOneInput(const uint8_t *bytes, size_t size) {
    static json_t *base[2];
    for (int i = 0; i < 2; i++)
        if (!base[i]) base[i] = whole(i);
    json_t *list = json_deep_copy(base[size ? bytes[0] & 1 : 0]);
    dp_runs r = {0}, again = {0};
    dp_err e = {0};
    edit(list, bytes, size);
    if (dp_runs_from_json(list, "fuzz", "c", &r, &e)) {
        must(size > 0, "what was written is refused", e.msg);
        must(e.code == DP_EINPUT && !strncmp(e.msg, "fuzz: ", 6), "refused without a file", e.msg);
        must(r.n == 0, "refused, and there", e.msg);
    } else {
        size_t n, m;
        char *one = dp_runs_pack(&r, &n);
        must(!dp_runs_unpack(one, n, "fuzz", "c", &again, &e), "is not read again", e.msg);
        char *two = dp_runs_pack(&again, &m);
        must(n == m && !memcmp(one, two, n), "read again it is another", two);
        say(&r);
        free(one);
        free(two);
    }
    dp_runs_free(&r);
    dp_runs_free(&again);
    json_decref(list);
    return 0;
}

/* A number moved, a value chosen from those that mean something, an edit more. */
size_t LLVMFuzzerCustomMutator(uint8_t *data, size_t size, size_t most, unsigned seed) {
    static const char *const values[] = {"null",
                                         "0",
                                         "1",
                                         "-1",
                                         "2",
                                         "4096",
                                         "4097",
                                         "2147483648",
                                         "9223372036854775807",
                                         "1.5",
                                         "\"\"",
                                         "\"nan\"",
                                         "\"-inf\"",
                                         "\"0x1p+9\"",
                                         "\"0101\"",
                                         "\"c:chain=fp64\"",
                                         "\"fail\"",
                                         "[]",
                                         "[\"0x1p-3\"]",
                                         "[1, 1, 1, 1, 1]",
                                         "{}",
                                         "true"};
    rng r = rng_new(seed);
    const char *v = values[below(&r, sizeof values / sizeof *values)];
    const size_t n = strlen(v), number = below(&r, 600);
    if (!below(&r, 3) || n + 3 > most) return LLVMFuzzerMutate(data, size, most);
    const size_t at =
        below(&r, 2) && size + n + 3 <= most ? size : 0; /* behind the others, or alone */
    data[at] = (uint8_t)number;
    data[at + 1] = (uint8_t)(number >> 8);
    memcpy(data + at + 2, v, n + 1);
    return at + n + 3;
}
