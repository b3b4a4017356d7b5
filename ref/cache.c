#include "cache.h"

#include <errno.h>
#include <fcntl.h>
#include <stdlib.h>
#include <stdio.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>
#include <xxhash.h>

#define MAGIC "DPCACHE\n"
typedef struct { char magic[8]; uint64_t version; dp_key key; } header;
_Static_assert(sizeof(XXH128_canonical_t) == sizeof(dp_key), "key size");

static dp_key digest(XXH3_state_t *s) {
    XXH128_canonical_t c;
    dp_key k;
    XXH128_canonicalFromHash(&c, XXH3_128bits_digest(s));
    XXH3_freeState(s);
    memcpy(k.byte, c.digest, sizeof k.byte);
    return k;
}

static XXH3_state_t *new_state(void) {
    XXH3_state_t *s = XXH3_createState();
    XXH3_128bits_reset(s);
    return s;
}

static void hash_doubles(XXH3_state_t *s, const double *x, int64_t n) {
    const uint64_t present = x ? (uint64_t)n + 1 : 0;
    XXH3_128bits_update(s, &present, sizeof present);
    if (x) XXH3_128bits_update(s, x, sizeof *x * (size_t)n);
}

dp_key dp_problem_key(const dp_problem *p, const void *more, size_t size) {
    const int64_t T = p->T, KV = (int64_t)p->K * p->V;
    const int64_t ints[] = {p->model, T, p->H, p->HV, p->K, p->V, p->R, p->Nseq, p->gate, p->beta_form, p->l2norm, (int64_t)size};
    const double reals[] = {p->scale, p->gate == DP_GATE_LOWER_BOUND ? p->lower_bound : 0, DP_L2_EPS};
    XXH3_state_t *s = new_state();
    XXH3_128bits_update(s, ints, sizeof ints);
    XXH3_128bits_update(s, reals, sizeof reals);
    XXH3_128bits_update(s, p->cu, sizeof *p->cu * (size_t)(p->Nseq + 1));
    XXH3_128bits_update(s, more, size);
    if (p->input_error) hash_doubles(s, &p->input_error, 1);
    hash_doubles(s, p->q, T * p->H * p->K);
    hash_doubles(s, p->k, T * p->H * p->R * p->K);
    hash_doubles(s, p->v, T * p->HV * p->R * p->V);
    hash_doubles(s, p->g, T * p->HV * dp_Kg(p));
    hash_doubles(s, p->beta, T * p->HV * p->R);
    hash_doubles(s, p->A_log, p->HV);
    hash_doubles(s, p->dt_bias, (int64_t)p->HV * dp_Kg(p));
    hash_doubles(s, p->s0, p->Nseq * p->HV * KV);
    hash_doubles(s, p->dout, T * p->HV * p->V);
    hash_doubles(s, p->dstate, p->Nseq * p->HV * KV);
    return digest(s);
}

static void entry_path(char *out, size_t size, const char *dir, const char *kind, uint64_t version, dp_key key) {
    char hex[33];
    for (int i = 0; i < 16; i++) snprintf(hex + 2 * i, 3, "%02x", key.byte[i]);
    snprintf(out, size, "%s/%s.%llu.%s", dir, hex, (unsigned long long)version, kind);
}

/* NULL: loaded, else why not. */
static const char *load(FILE *f, const header *want, const dp_part *part, int n) {
    header h;
    dp_key got;
    if (fread(&h, sizeof h, 1, f) != 1) return "shorter than its header";
    if (memcmp(&h, want, sizeof h)) return "header of another entry";
    XXH3_state_t *s = new_state();
    XXH3_128bits_update(s, &h, sizeof h);
    int bad = 0;
    for (int i = 0; i < n && !bad; i++) {
        bad = part[i].size && fread(part[i].at, part[i].size, 1, f) != 1;
        if (!bad) XXH3_128bits_update(s, part[i].at, part[i].size);
    }
    const dp_key sum = digest(s);
    if (bad || fread(&got, sizeof got, 1, f) != 1) return "truncated";
    if (fgetc(f) != EOF) return "longer than its content";
    return memcmp(&got, &sum, sizeof sum) ? "checksum does not match" : NULL;
}

static header header_of(uint64_t version, dp_key key) {
    header h = {.version = version, .key = key};
    memcpy(h.magic, MAGIC, sizeof h.magic);
    return h;
}

int dp_cache_load(const char *dir, const char *kind, uint64_t version, dp_key key, const dp_part *part, int n) {
    char path[4096];
    entry_path(path, sizeof path, dir, kind, version, key);
    FILE *f = fopen(path, "rb");
    if (!f) return 0;
    const header h = header_of(version, key);
    const char *why = load(f, &h, part, n);
    fclose(f);
    if (why) fprintf(stderr, "cache: %s is damaged (%s): computing it again\n", path, why);
    return !why;
}

static int write_entry(FILE *f, const header *h, const dp_part *part, int n) {
    XXH3_state_t *s = new_state();
    XXH3_128bits_update(s, h, sizeof *h);
    int bad = fwrite(h, sizeof *h, 1, f) != 1;
    for (int i = 0; i < n && !bad; i++) {
        XXH3_128bits_update(s, part[i].at, part[i].size);
        bad = part[i].size && fwrite(part[i].at, part[i].size, 1, f) != 1;
    }
    const dp_key sum = digest(s);
    return bad || fwrite(&sum, sizeof sum, 1, f) != 1 || fflush(f) || fsync(fileno(f));
}

int dp_make_dirs(const char *path) {
    char b[4096];
    snprintf(b, sizeof b, "%s", path);
    for (char *p = b + 1; *p; p++)
        if (*p == '/') {
            *p = 0;
            if (mkdir(b, 0777) && errno != EEXIST) return -1;
            *p = '/';
        }
    return mkdir(b, 0777) && errno != EEXIST ? -1 : 0;
}

void dp_cache_save(const char *dir, const char *kind, uint64_t version, dp_key key, const dp_part *part, int n) {
    char path[4096], tmp[4200];
    const header h = header_of(version, key);
    dp_make_dirs(dir);                                           /* if that fails, so does mkstemp, with its reason */
    entry_path(path, sizeof path, dir, kind, version, key);
    snprintf(tmp, sizeof tmp, "%s.XXXXXX", path);
    const int fd = mkstemp(tmp);
    FILE *f = fd < 0 ? NULL : fdopen(fd, "wb");
    int bad = !f || fchmod(fd, 0644) || write_entry(f, &h, part, n);
    if (f) bad |= fclose(f) != 0;
    if (bad || rename(tmp, path)) {
        fprintf(stderr, "cache: cannot write %s: %s\n", path, strerror(errno));
        if (fd >= 0) unlink(tmp);
        return;
    }
    const int d = open(dir, O_RDONLY | O_DIRECTORY);             /* the rename itself must last too */
    if (d >= 0) fsync(d), close(d);
}
