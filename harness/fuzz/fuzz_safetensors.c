/* harness/fuzz/fuzz_safetensors.c - libFuzzer target: any bytes are either refused with a message,
 * or parsed; then written and read back they are the same. */
#include "mutate.h"
#include "ref/files/safetensors.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

static void check_same(const dp_tensorfile *a, const dp_tensorfile *b) {
    must(a->ntensor == b->ntensor && a->nmeta == b->nmeta, "round trip", "other tensors");
    for (int i = 0; i < a->ntensor; i++) {
        const dp_tensor *x = &a->tensor[i], *y = dp_tensor_find(b, x->name);
        const int same = y && x->n == y->n && x->ndim == y->ndim && !strcmp(x->dtype, y->dtype);
        must(same, "round trip", x->name);
        for (int64_t j = 0; j < x->n; j++) {
            const int nan = x->data[j] != x->data[j];
            must(nan ? y->data[j] != y->data[j] : !memcmp(&x->data[j], &y->data[j], 8), "value",
                 x->name);
        }
    }
    for (int i = 0; i < a->nmeta; i++) {
        const char *y = dp_tensorfile_meta(b, a->meta_key[i]);
        must(y && !strcmp(y, a->meta_value[i]), "metadata", a->meta_key[i]);
    }
}

/* Written at every input that can be parsed. */
static const char *scratch(void) {
    static char path[128];
    if (!*path) {
        const char *dir = scratch_folder();
        snprintf(path, sizeof path, "%s/fuzz-%ld.safetensors", dir, (long)getpid());
    }
    return path;
}

int LLVMFuzzerTestOneInput(const uint8_t *bytes, size_t size) {
    dp_tensorfile f, g;
    dp_err e = {0}, e2 = {0};
    if (dp_safetensors_parse(bytes, size, "fuzz", &f, &e)) {
        must(e.code == DP_EINPUT && !strncmp(e.msg, "fuzz: ", 6), "refused without", e.msg);
        return 0;
    }
    must(!dp_safetensors_write(scratch(), &f, &e2), "write", e2.msg);
    must(!dp_safetensors_read(scratch(), &g, &e2), "read back", e2.msg);
    check_same(&f, &g);
    dp_tensorfile_free(&f);
    dp_tensorfile_free(&g);
    unlink(scratch());
    return 0;
}

static const char *const NAMES[] = {
    "q",    "k", "v", "weight", "a", "dtype", "shape", "data_offsets", "__metadata__",
    "gate", "x", NULL};
static const char *const TEXTS[] = {"BF16", "F16", "F32", "F64",  "I32", "I64", "F8_E4M3",
                                    "U8",   "log", "",    "a\nb", "0",   NULL};

size_t LLVMFuzzerCustomMutator(uint8_t *data, size_t size, size_t most, unsigned seed) {
    static const words w = {NAMES, TEXTS};
    rng r = rng_new(seed);
    const size_t n = below(&r, 6) ? mutate_safetensors(data, size, most, &r, &w) : 0;
    return n ? n : LLVMFuzzerMutate(data, size, most);
}
