/* harness/fuzz/fuzz_case.c - libFuzzer target: case files with the tensors that they name.
 *
 * Bytes up to the first NUL are a case file, what follows is the file d.safetensors beside it. Any
 * text is either refused with a message that names a file, or a case with consistent settings.
 * Small ones are loaded or generated too. */
#include "harness/case/operations.h"
#include "mutate.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#define DATA "d.safetensors"

static void remove_folder(void);

/* A folder of this process. */
static const char *folder(void) {
    static char path[128];
    if (*path) return path;
    snprintf(path, sizeof path, "%s/fuzz-%ld", scratch_folder(), (long)getpid());
    must(!mkdir(path, 0700) && !atexit(remove_folder), "cannot be made", path);
    return path;
}

static void remove_folder(void) {
    char path[192];
    snprintf(path, sizeof path, "%s/%s", folder(), DATA);
    unlink(path);
    rmdir(folder());
}

static void write_data(const uint8_t *bytes, size_t size) {
    char path[192];
    snprintf(path, sizeof path, "%s/%s", folder(), DATA);
    FILE *f = fopen(path, "wb");
    must(f && fwrite(bytes, 1, size, f) == size && !fclose(f), "cannot be written", path);
}

/* The message begins with a file of the folder, or with one that the case itself names. */
static void check_refusal(const dp_err *e, const uint8_t *bytes, size_t n) {
    const char *dir = folder();
    const size_t named = strcspn(e->msg, ":");
    const int ours = !strncmp(e->msg, dir, strlen(dir));
    must(e->code == DP_EIO || e->code == DP_EINPUT, "refused without a code", e->msg);
    must(e->code == DP_EIO || ours || (named && memmem(bytes, n, e->msg, named)),
         "refused without a file", e->msg);
}

static int small(const dp_case *c) {
    const dp_operation *op = c->op;
    if (op->has_factors) return 0;
    if (c->data) return 1; /* the tensors are those of a small file */
    if (op->has_conv) return c->conv.T * c->conv.D < 1 << 11;
    const int64_t state = (c->p.T * c->p.R + (int64_t)c->p.Nseq * c->p.K) * c->p.HV;
    const int64_t n = state * (c->p.K + c->p.V);
    return n < (op->has_front ? 256 : 1 << 11); /* MPFR computes the convolutions of a step */
}

int LLVMFuzzerTestOneInput(const uint8_t *bytes, size_t size) {
    const uint8_t *nul = memchr(bytes, 0, size);
    const size_t n = nul ? (size_t)(nul - bytes) : size;
    char path[192];
    dp_case c;
    dp_err e = {0};
    snprintf(path, sizeof path, "%s/fuzz.case", folder());
    if (dp_case_parse((const char *)bytes, n, path, 0, &c, &e)) {
        check_refusal(&e, bytes, n);
        return 0;
    }
    const int lists = c.nranks >= 1 && c.nranks <= 16 && c.nbase >= 1 && c.nchain >= 1;
    must(c.reason && c.source && lists && c.nmerge >= 1, "incomplete settings", path);
    const int load = small(&c), has_data = memmem(bytes, n, DATA, sizeof DATA - 1) != NULL;
    dp_case_free(&c);
    if (!load) return 0;
    if (has_data) write_data(nul ? nul + 1 : bytes, nul ? size - n - 1 : 0);
    if (dp_case_parse((const char *)bytes, n, path, 1, &c, &e)) {
        check_refusal(&e, bytes, n);
        return 0;
    }
    if (c.op->has_problem)
        must(!dp_problem_check(&c.p, c.allow_nonfinite, &e), "inconsistent problem", e.msg);
    dp_case_free(&c);
    return 0;
}

static const char *const NAMES[] = {
    "q",   "k", "v", "g",      "beta", "A_log", "dt_bias", "s0", "initial_state", "do", "dstate",
    "dht", "x", "w", "weight", "bias", "dy",    "y",       "o",  "cu_seqlens",    NULL};
static const char *const TEXTS[] = {"BF16", "F16", "F32", "F64", "I32", "I64", "", "log", NULL};

/* The part behind the NUL. 0: unchanged. */
static size_t mutate_data(uint8_t *data, size_t first, size_t size, size_t most, rng *r) {
    static const words w = {NAMES, TEXTS};
    uint8_t *buffer = malloc(most + 1);
    memcpy(buffer, data + first + 1, size - first - 1);
    size_t n = mutate_safetensors(buffer, size - first - 1, most - first - 1, r, &w);
    if (!n) n = LLVMFuzzerMutate(buffer, size - first - 1, most - first - 1);
    memcpy(data + first + 1, buffer, n);
    free(buffer);
    return first + 1 + n;
}

size_t LLVMFuzzerCustomMutator(uint8_t *data, size_t size, size_t most, unsigned seed) {
    rng r = rng_new(seed);
    const uint8_t *nul = memchr(data, 0, size);
    const size_t first = nul ? (size_t)(nul - data) : size, rest = size - first;
    if (!below(&r, 4)) return LLVMFuzzerMutate(data, size, most);
    if (nul && below(&r, 2)) return mutate_data(data, first, size, most, &r);
    uint8_t *text = malloc(most + 1);
    memcpy(text, data, first);
    const size_t n = mutate_case(text, first, most - rest, &r);
    if (n) {
        memmove(data + n, data + first, rest);
        memcpy(data, text, n);
    }
    free(text);
    return n ? n + rest : LLVMFuzzerMutate(data, size, most);
}
