/* harness/fuzz/fuzz_record.c - libFuzzer target: records as `compare` reads them. Bytes up to the
 * first NUL are OLD, the rest NEW (none: OLD again). Each is refused with a message that names the
 * file, or read. A record is never worse than itself, and the text about two has a form. */
#include "harness/record/record_diff.h"
#include "mutate.h"

#include <stdlib.h>
#include <string.h>

static FILE *nowhere(void) {
    static FILE *f;
    if (!f) f = fopen("/dev/null", "w");
    return f;
}

static int read_record(const char *bytes, size_t n, dp_old_record *r) {
    dp_err e = {0};
    if (!dp_old_record_parse(bytes, n, "fuzz", r, &e)) return 1;
    must(e.code == DP_EINPUT && !strncmp(e.msg, "fuzz:", 5), "refused without a message", e.msg);
    return 0;
}

static dp_diff diff(const dp_old_record *a, const dp_old_record *b, int nagain) {
    const dp_diff_request q = {
        .old = a, .new = b, .again = b, .nagain = nagain, .worse = 1.25, .verbose = nagain};
    json_t *j = NULL;
    const dp_diff d = dp_record_diff(&q, nowhere(), &j);
    must(json_is_object(j) && json_is_array(json_object_get(j, "tensors")), "no JSON", "");
    must(json_is_true(json_object_get(j, "worse")) == (d == DP_DIFF_WORSE) ||
             d == DP_DIFF_NOTHING_IN_COMMON,
         "status and JSON disagree", "");
    json_decref(j);
    return d;
}

int LLVMFuzzerTestOneInput(const uint8_t *bytes, size_t size) {
    const uint8_t *nul = memchr(bytes, 0, size);
    const size_t first = nul ? (size_t)(nul - bytes) : size, second = nul ? size - first - 1 : 0;
    dp_old_record a, b;
    if (!read_record((const char *)bytes, first, &a)) return 0;
    must(diff(&a, &a, 0) != DP_DIFF_WORSE, "a record is worse than itself", "");
    if (second && read_record((const char *)nul + 1, second, &b)) {
        diff(&a, &b, 0);
        diff(&b, &a, 1);
        dp_old_record_free(&b);
    }
    dp_old_record_free(&a);
    return 0;
}

static const char *const NAMES[] = {"schema",  "schema_version",
                                    "program", "commit",
                                    "created", "totals",
                                    "errors",  "verdict",
                                    "cases",   "runs",
                                    "id",      "case",
                                    "op",      "ranks",
                                    "backend", "policy",
                                    "tensors", "name",
                                    "rel_fro", "per_rank",
                                    "bound",   "ratio",
                                    "why",     "tier",
                                    "o",       "dq",
                                    "S_in",    "t1:ranks=1,base=fp32",
                                    NULL};
static const char *const TEXTS[] = {"deltaproof-record",
                                    "pass",
                                    "fail",
                                    "skipped",
                                    "unjudged",
                                    "error",
                                    "nan",
                                    "inf",
                                    "-inf",
                                    "o",
                                    "dq",
                                    "dk",
                                    "S_in",
                                    "sim",
                                    "cuda",
                                    "file",
                                    "subject",
                                    "kda",
                                    "",
                                    "a\nb",
                                    NULL};

size_t LLVMFuzzerCustomMutator(uint8_t *data, size_t size, size_t most, unsigned seed) {
    static const words w = {NAMES, TEXTS};
    rng r = rng_new(seed);
    uint8_t *nul = memchr(data, 0, size);
    if (!below(&r, 8)) return LLVMFuzzerMutate(data, size, most);
    if (!nul && size * 2 + 1 <= most && !below(&r, 4)) { /* a second record: the first again */
        data[size] = 0;
        memcpy(data + size + 1, data, size);
        nul = data + size;
        size = 2 * size + 1;
    }
    if (!nul) {
        const size_t n = mutate_json_text(data, size, most, &r, &w);
        return n ? n : LLVMFuzzerMutate(data, size, most);
    }
    uint8_t *buffer = malloc(most);
    const size_t first = (size_t)(nul - data), second = size - first - 1;
    const int which = (int)below(&r, 2);
    memcpy(buffer, which ? nul + 1 : data, which ? second : first);
    const size_t room = most - 1 - (which ? first : second);
    const size_t n = mutate_json_text(buffer, which ? second : first, room, &r, &w);
    if (n && which) {
        memcpy(nul + 1, buffer, n);
        size = first + 1 + n;
    } else if (n) {
        memmove(data + n + 1, nul + 1, second);
        memcpy(data, buffer, n);
        data[n] = 0;
        size = n + 1 + second;
    }
    free(buffer);
    return n ? size : LLVMFuzzerMutate(data, size, most);
}
