/* harness/fuzz/faults.c - does the bulk build see what it says it sees? A libFuzzer target that
 * commits the fault that its input names by one letter; harness/fuzz/bulk begins with all of them.
 * Built and linked as the targets are. */
#include <limits.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

int LLVMFuzzerTestOneInput(const uint8_t *bytes, size_t size);

static void *volatile kept;
static volatile int index_of = 8, most = INT_MAX;

static void after_free(int i, char *volatile p) {
    free(p);
    p[i] = 1;
    for (int k = 0; k < 100; k++) /* until the ring uses it again */
        free(kept = malloc(10));
}

static void stack(int n) {
    volatile char row[8];
    for (int i = 0; i < n; i++)
        ((volatile char *)row)[i] = 1;
}

int LLVMFuzzerTestOneInput(const uint8_t *bytes, size_t size) {
    char *volatile p = malloc(24);
    volatile int table[8] = {0};
    if (!p) return 0;
    p[0] = 0;
    switch (size ? bytes[0] : 0) {
    case 'w': p[24] = 1; break;
    case 'b': p[-1] = 1; break;
    case 'c':
        p = realloc(p, 40);
        p[40] = 1;
        break;
    case 'u': after_free(3, p); return 0;
    case 'd': free(p); break;
    case 'l': kept = malloc(7); break;
    case 's': stack(64 * index_of); break;
    case 'i': table[index_of] = 1; break;
    case 'o': table[0] = most + 1; break;
    case 'h': table[0] = 1 << (index_of * 4); break;
    case 'n': *(volatile int *)(intptr_t)table[0] = 1; break;
    case 'x': abort();
    case 't':
        while (index_of)
            continue;
    }
    free(p);
    return 0;
}
