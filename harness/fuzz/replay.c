/* harness/fuzz/replay.c - `fuzz-replay TARGET FILE...`: inputs through a fuzzer's target without
 * libFuzzer, so that make test reads again what stays in harness/fuzz/corpus, with gcc, and under
 * its sanitizers. The targets are compiled with names of their own (fuzz.mk). */
#include "mutate.h"
#include "ref/files/input.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define TARGETS(X) X(safetensors) X(case) X(judge) X(meeting)
#define DECLARE(name) int fuzz_##name(const uint8_t *bytes, size_t size);
#define ROW(name) {#name, fuzz_##name},
TARGETS(DECLARE)

static const struct {
    const char *name;
    int (*one)(const uint8_t *bytes, size_t size);
} ROWS[] = {TARGETS(ROW)};
#define NROWS ((int)(sizeof ROWS / sizeof *ROWS))

/* The mutators of the targets are linked and never called. */
size_t LLVMFuzzerMutate(DP_UNUSED uint8_t *data, DP_UNUSED size_t size, DP_UNUSED size_t most) {
    abort();
}

int main(int argc, char **argv) {
    int row = 0;
    while (row < NROWS && (argc < 3 || strcmp(argv[1], ROWS[row].name)))
        row++;
    if (row == NROWS) {
        fprintf(stderr, "usage: fuzz-replay safetensors|case|judge|meeting FILE...\n");
        return 2;
    }
    for (int i = 2; i < argc; i++) {
        char *bytes;
        size_t n;
        dp_err e = {0};
        if (dp_input_read(argv[i], 1 << 24, &bytes, &n, &e)) {
            fprintf(stderr, "%s\n", e.msg);
            return 2;
        }
        uint8_t *exact = malloc(n + !n); /* nothing behind the last byte */
        must(exact != NULL, "no memory for", argv[i]);
        memcpy(exact, bytes, n);
        free(bytes);
        ROWS[row].one(exact, n);
        free(exact);
    }
    printf("%s: %d inputs read\n", argv[1], argc - 2);
    return 0;
}
