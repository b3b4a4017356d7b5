/* Reads a truth pack of deltaproof, version 1 (NAME.pack), and checks results against it. To copy
 * into other projects: C99 on a little-endian machine; needs -lm.
 *   dp_pack p; char why[200];
 *   if (dp_pack_read(&p, "case.pack") == 0 && dp_pack_check(&p, "o", o, n, why, sizeof why)) red */
#ifndef DELTAPROOF_PACK_H
#define DELTAPROOF_PACK_H
#include <math.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
typedef struct {
    unsigned char *data;
    int64_t size;
} dp_pack;
/* 0: read; to be freed by free(p->data). */
static int dp_pack_read(dp_pack *p, const char *path) {
    FILE *f = fopen(path, "rb");
    if (!f || fseek(f, 0, SEEK_END) || (p->size = ftell(f)) < 16) return 1;
    rewind(f);
    p->data = malloc((size_t)p->size);
    const int bad = !p->data || fread(p->data, 1, (size_t)p->size, f) != (size_t)p->size ||
                    memcmp(p->data, "DPPACK01", 8) != 0;
    return fclose(f), bad;
}
/* The array KIND.TENSOR SUFFIX; *n: its doubles; NULL: none. */
static const double *dp_pack_array(const dp_pack *p, const char *kind, const char *tensor,
                                   const char *suffix, int64_t *n) {
    char name[64];
    int64_t count, v[7] = {snprintf(name, sizeof name, "%s.%s%s", kind, tensor, suffix)};
    memcpy(&count, p->data + 8, 8);
    for (int64_t i = 0; i < count; i++) {
        const unsigned char *entry = p->data + 16 + 104 * i;
        if (strncmp((const char *)entry, name, 48) != 0) continue;
        memcpy(v, entry + 48, sizeof v);
        *n = v[1] * v[2] * v[3] * v[4] * v[5];
        return (const double *)(p->data + v[6]);
    }
    return *n = 0, NULL;
}
/* Sums squares of err[n] in `of` equal pieces, or by which[i] where that is not NULL, into
 * most's m units; 1 if one is over. */
static int dp_pack_over(const double *err, int64_t n, int64_t of, const double *which,
                        const double *most, int64_t m, const char *level, char *why, size_t size) {
    double *sum = calloc((size_t)(m > 0 ? m : 1), sizeof *sum);
    int red = 0;
    for (int64_t i = 0; i < n && of > 0 && m > 0; i++) {
        const int64_t part = i / (n / of), unit = !which ? part : m == 1 ? 0 : (int64_t)which[part];
        if (!which || which[part] >= 0) sum[unit] += err[i] * err[i];
    }
    for (int64_t u = 0; u < m && !red; u++) {
        if ((red = !(sqrt(sum[u]) <= most[u])))
            snprintf(why, size, "%s %lld: %.3g times its limit", level, (long long)u,
                     sqrt(sum[u]) / most[u]);
    }
    return free(sum), red;
}
/* 0: within every limit of the pack; else *why says which level, and where. */
static int dp_pack_check(const dp_pack *p, const char *t, const double *got, int64_t n, char *why,
                         size_t size) {
    const char *MOST[] = {".bound", ".row", ".window_most", ".unit_most", ".tensor_most"};
    const char *WHICH[] = {"", "", ".window", ".unit", ".window"};
    int64_t have, low, parts, m, k;
    const double *hi = dp_pack_array(p, "truth", t, "", &have);
    const double *lo = dp_pack_array(p, "truth", t, ".lo", &low);
    snprintf(why, size, "%s has %lld numbers, must have %lld", t, (long long)n, (long long)have);
    if (!hi || !lo || have != n) return 1;
    double *err = malloc((size_t)n * sizeof *err);
    int red = !err;
    for (int64_t i = 0; i < n && err; i++)
        err[i] = (got[i] - hi[i]) - lo[i];
    dp_pack_array(p, "limit", t, ".row", &parts);
    for (int l = 0; l < 5 && !red; l++) {
        const double *most = dp_pack_array(p, "limit", t, MOST[l], &m);
        const double *which = l > 1 ? dp_pack_array(p, "limit", t, WHICH[l], &k) : NULL;
        red = dp_pack_over(err, n, l ? parts : m, which, most, m, MOST[l] + 1, why, size);
    }
    return free(err), red;
}
#endif
