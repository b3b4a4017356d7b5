/* libFuzzer target: any bytes are either refused with a message, or parsed; then written and read back they are the same. */
#include "../../ref/safetensors.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

static void must(int ok, const char *what, const char *msg) {
    if (ok) return;
    fprintf(stderr, "%s: %s\n", what, msg);
    abort();
}

static void check_same(const dp_tensorfile *a, const dp_tensorfile *b) {
    must(a->ntensor == b->ntensor && a->nmeta == b->nmeta, "round trip", "other number of tensors");
    for (int i = 0; i < a->ntensor; i++) {
        const dp_tensor *x = &a->tensor[i], *y = dp_tensor_find(b, x->name);
        must(y && x->n == y->n && x->ndim == y->ndim && !strcmp(x->dtype, y->dtype), "round trip", x->name);
        for (int64_t j = 0; j < x->n; j++)
            must(x->data[j] != x->data[j] ? y->data[j] != y->data[j] : !memcmp(&x->data[j], &y->data[j], sizeof(double)), "round trip value", x->name);
    }
}

int LLVMFuzzerTestOneInput(const uint8_t *bytes, size_t size) {
    static char path[64];
    dp_tensorfile f, g;
    dp_err e = {0}, e2 = {0};
    if (!*path) sprintf(path, "/tmp/fuzz-%ld.safetensors", (long)getpid());
    if (dp_safetensors_parse(bytes, size, "fuzz", &f, &e)) {
        must(e.code == DP_EINPUT && !strncmp(e.msg, "fuzz: ", 6), "refused without a message", e.msg);
        return 0;
    }
    must(!dp_safetensors_write(path, &f, &e2), "write", e2.msg);
    must(!dp_safetensors_read(path, &g, &e2), "read back", e2.msg);
    check_same(&f, &g);
    dp_tensorfile_free(&f);
    dp_tensorfile_free(&g);
    unlink(path);
    return 0;
}
