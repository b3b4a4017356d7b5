/* Results in files named by what they follow from (cache.h). */
#include "cache.h"
#include "input.h"
#include "output.h"
#include "ref/vocabulary/recurrence.h"
#include "ref/vocabulary/text.h"

#include <dirent.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>
#include <xxhash.h>

/* The Makefile gives these; a build without it keeps no entry apart from another such build's. */
#ifndef DP_SOURCES_REF
#define DP_SOURCES_REF "00000000000000000000000000000000"
#define DP_SOURCES_ALL DP_SOURCES_REF
#endif
#ifndef DP_COMMIT
#define DP_COMMIT "unknown"
#endif
#define MADE_BY "commit " DP_COMMIT ", compiler " __VERSION__

#define MAGIC "DPCACHE2"
#define DIGITS 32 /* of sources; a file's name has the first 16 */
typedef struct {
    char magic[8], sources[DIGITS], made_by[96];
    dp_key key;
} header;
_Static_assert(sizeof(XXH128_canonical_t) == sizeof(dp_key) && sizeof(header) == 152, "no padding");
_Static_assert(sizeof DP_SOURCES_REF == DIGITS + 1 && sizeof DP_SOURCES_ALL == DIGITS + 1,
               "a hash of 32 digits");

static const struct {
    const char *name, *sources;
} kinds[DP_NCACHE_KINDS] = {
    [DP_CACHE_TRUTH] = {"truth", DP_SOURCES_REF},
    [DP_CACHE_AUDIT] = {"audit", DP_SOURCES_REF},
    [DP_CACHE_CONDITION] = {"condition", DP_SOURCES_ALL},
    [DP_CACHE_BOUND] = {"bound", DP_SOURCES_ALL},
    [DP_CACHE_STAGES] = {"stages", DP_SOURCES_ALL},
    [DP_CACHE_EXPECTED] = {"expected", DP_SOURCES_ALL},
};

const char *dp_cache_sources(dp_cache_kind kind) { return kinds[kind].sources; }

dp_hash *dp_hash_new(void) {
    dp_hash *h = XXH3_createState();
    if (!h) abort();
    XXH3_128bits_reset(h);
    return h;
}

void dp_hash_add(dp_hash *h, const void *x, size_t n) { XXH3_128bits_update(h, x, n); }

dp_key dp_hash_end(dp_hash *h) {
    XXH128_canonical_t c;
    dp_key k;
    XXH128_canonicalFromHash(&c, XXH3_128bits_digest(h));
    XXH3_freeState(h);
    memcpy(k.byte, c.digest, sizeof k.byte);
    return k;
}

void dp_key_hex(dp_key key, char hex[33]) {
    for (int i = 0; i < 16; i++)
        snprintf(hex + 2 * i, 3, "%02x", key.byte[i]);
}

static void hash_doubles(dp_hash *s, const double *x, int64_t n) {
    const uint64_t present = x ? (uint64_t)n + 1 : 0;
    dp_hash_add(s, &present, sizeof present);
    if (x) dp_hash_add(s, x, sizeof *x * (size_t)n);
}

dp_key dp_problem_key(const dp_problem *p, const void *more, size_t size) {
    const int64_t ints[] = {p->model, p->T,    p->H,    p->HV,        p->K,      p->V,
                            p->R,     p->Nseq, p->gate, p->beta_form, p->l2norm, (int64_t)size};
    const double reals[] = {p->scale, p->gate == DP_GATE_LOWER_BOUND ? p->lower_bound : 0,
                            DP_L2_EPS};
    dp_hash *s = dp_hash_new();
    dp_hash_add(s, ints, sizeof ints);
    dp_hash_add(s, reals, sizeof reals);
    dp_hash_add(s, p->cu, sizeof *p->cu * (size_t)(p->Nseq + 1));
    dp_hash_add(s, more, size);
    if (p->input_error) hash_doubles(s, &p->input_error, 1);
    if (p->model == DP_USER) {
        const int64_t turn[] = {dp_Kg(p), dp_in_turn(p), dp_pairs(p), dp_lag(p)};
        dp_hash_add(s, dp_recurrence_of(p), sizeof(dp_recurrence));
        dp_hash_add(s, turn, sizeof turn);
    }
    if (p->own.kind) dp_hash_add(s, &p->own, sizeof p->own);
    for (int i = 0; i < DP_NINPUTS; i++)
        if (dp_input_belongs(p, i)) hash_doubles(s, dp_input_of(p, i), dp_input_count(p, i));
    return dp_hash_end(s);
}

typedef struct {
    char hex[33], *path;
} entry;

static entry entry_of(const char *dir, dp_cache_kind kind, dp_key key) {
    entry e;
    dp_key_hex(key, e.hex);
    e.path = dp_text_new("%s/%s.%.16s.%s", dir, e.hex, kinds[kind].sources, kinds[kind].name);
    return e;
}

/* NULL: loaded, else why not; *h: the header, as far as it could be read. */
static const char *load(FILE *f, const header *want, const dp_part *part, int n, header *h) {
    dp_key got;
    if (fread(h, sizeof *h, 1, f) != 1) return "shorter than its header";
    if (memcmp(h->magic, want->magic, sizeof h->magic) ||
        memcmp(&h->key, &want->key, sizeof h->key))
        return "header of another entry";
    if (memcmp(h->sources, want->sources, sizeof h->sources)) return "made by another arithmetic";
    dp_hash *s = dp_hash_new();
    dp_hash_add(s, h, sizeof *h);
    int bad = 0;
    for (int i = 0; i < n && !bad; i++) {
        bad = part[i].size && fread(part[i].at, part[i].size, 1, f) != 1;
        if (!bad) dp_hash_add(s, part[i].at, part[i].size);
    }
    const dp_key sum = dp_hash_end(s);
    if (bad || fread(&got, sizeof got, 1, f) != 1) return "truncated";
    if (fgetc(f) != EOF) return "longer than its content";
    return memcmp(&got, &sum, sizeof sum) ? "checksum does not match" : NULL;
}

static header header_of(dp_cache_kind kind, dp_key key) {
    header h = {.key = key};
    memcpy(h.magic, MAGIC, sizeof h.magic);
    memcpy(h.sources, kinds[kind].sources, sizeof h.sources);
    snprintf(h.made_by, sizeof h.made_by, "%s", MADE_BY);
    return h;
}

static void say_damaged(const char *path, const char *why, const header *h) {
    char by[4 * sizeof h->made_by + 1] = "";
    const int named = !memcmp(h->magic, MAGIC, sizeof h->magic) && h->made_by[0] &&
                      memchr(h->made_by, 0, sizeof h->made_by);
    if (named) dp_text_printable(h->made_by, by, sizeof by);
    fprintf(stderr, "cache: %s is damaged (%s%s%s): computing it again\n", path, why,
            named ? "; made by " : "", by);
}

int dp_cache_load(const char *dir, dp_cache_kind kind, dp_key key, const dp_part *part, int n) {
    entry own = entry_of(dir, kind, key);
    const header want = header_of(kind, key);
    header h = {.key = key};
    const char *why = NULL;
    dp_err e = {0};
    int64_t size;
    FILE *f = dp_input_open(own.path, INT64_MAX, &size, &e);
    if (f) {
        why = load(f, &want, part, n, &h);
        fclose(f);
    } else if (e.code == DP_EINPUT)
        why = "not a regular file";
    if (why) say_damaged(own.path, why, &h);
    free(own.path);
    return f && !why;
}

static int write_entry(FILE *f, const header *h, const dp_part *part, int n) {
    dp_hash *s = dp_hash_new();
    dp_hash_add(s, h, sizeof *h);
    int bad = fwrite(h, sizeof *h, 1, f) != 1;
    for (int i = 0; i < n && !bad; i++) {
        dp_hash_add(s, part[i].at, part[i].size);
        bad = part[i].size && fwrite(part[i].at, part[i].size, 1, f) != 1;
    }
    const dp_key sum = dp_hash_end(s);
    return bad || fwrite(&sum, sizeof sum, 1, f) != 1;
}

/* Entries of other arithmetics in the folder where this process saved last, as they were at its
 * first save there. A listing for every save took minutes in a large folder. */
static struct {
    pthread_mutex_t lock;
    char *dir, **name;
    int n, room;
} others = {.lock = PTHREAD_MUTEX_INITIALIZER};

/* Is it an entry of another arithmetic? */
static int is_other(const char *name) {
    const char *dot = strrchr(name, '.');
    for (int k = 0; dot && strspn(name, "0123456789abcdef") == 32 && k < DP_NCACHE_KINDS; k++)
        if (!strcmp(dot + 1, kinds[k].name))
            return dot - name == 49 && strncmp(name + 33, kinds[k].sources, 16) != 0;
    return 0;
}

static void list_others(const char *dir) {
    for (int i = 0; i < others.n; i++)
        free(others.name[i]);
    others.n = 0;
    free(others.dir);
    others.dir = dp_strdup(dir);
    DIR *d = opendir(dir);
    for (struct dirent *x; d && (x = readdir(d));) {
        if (!is_other(x->d_name)) continue;
        if (others.n == others.room) {
            others.room = others.room ? 2 * others.room : 64;
            others.name = dp_realloc(others.name, sizeof *others.name * (size_t)others.room);
        }
        others.name[others.n++] = dp_strdup(x->d_name);
    }
    if (d) closedir(d);
}

/* Removes the entries of this content and kind: a folder does not grow by them with every build. */
static void remove_others(const char *dir, const entry *own, dp_cache_kind kind) {
    const char *ending = kinds[kind].name;
    pthread_mutex_lock(&others.lock);
    if (!others.dir || strcmp(others.dir, dir)) list_others(dir);
    for (int i = 0; i < others.n; i++) {
        char *name = others.name[i];
        if (strncmp(name, own->hex, 32) || strcmp(strrchr(name, '.') + 1, ending)) continue;
        DP_OWN char *path = dp_text_new("%s/%s", dir, name);
        unlink(path);
        free(name);
        others.name[i--] = others.name[--others.n];
    }
    pthread_mutex_unlock(&others.lock);
}

void dp_cache_save(const char *dir, dp_cache_kind kind, dp_key key, const dp_part *part, int n) {
    const header h = header_of(kind, key);
    entry own = entry_of(dir, kind, key);
    dp_output out;
    dp_err e = {0};
    dp_make_dirs(dir); /* if that fails, so does the opening, with its reason */
    if (!dp_output_replace(&out, own.path, &e))
        dp_output_close(&out, write_entry(out.f, &h, part, n), &e);
    if (e.code)
        fprintf(stderr, "cache: %s\n", e.msg);
    else
        remove_others(dir, &own, kind);
    free(own.path);
}
