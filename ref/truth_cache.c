/* ref/truth_cache.c - the truth of a problem in a file, <dir>/<hash>.truth.
 *
 *   header    "DPTRUTH\n", TRUTH_VERSION (8 bytes), XXH3-128 of problem and request (16 bytes)
 *   payload   every array of dp_truth in the order of visit(): hi, lo, rad of each ball, then marks
 *   trailer   XXH3-128 of all that precedes it (16 bytes)
 * Shapes are not stored: they follow from problem and request, so a file of another length is damaged. Byte order of the machine.
 */
#include "truth_impl.h"

#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>
#include <xxhash.h>

#define TRUTH_VERSION 1          /* raise it whenever dp_truth_run may return other bits for the same request */
#define MAGIC "DPTRUTH\n"

typedef struct { char magic[8]; uint64_t version; XXH128_canonical_t key; } header;

static void hash_doubles(XXH3_state_t *s, const double *x, int64_t n) {
    const uint64_t present = x ? (uint64_t)n + 1 : 0;
    XXH3_128bits_update(s, &present, sizeof present);
    if (x) XXH3_128bits_update(s, x, sizeof *x * (size_t)n);
}

static XXH128_canonical_t content_key(const dp_problem *p, const dp_truth_request *rq) {
    const int64_t T = p->T, KV = (int64_t)p->K * p->V;
    const int64_t ints[] = {TRUTH_VERSION, p->model, T, p->H, p->HV, p->K, p->V, p->R, p->Nseq, p->gate, p->beta_form, p->l2norm,
                            rq->bits, rq->backward, rq->ncut, rq->want_M};
    const double reals[] = {p->scale, p->gate == DP_GATE_LOWER_BOUND ? p->lower_bound : 0, DP_L2_EPS};
    XXH3_state_t *s = XXH3_createState();
    XXH3_128bits_reset(s);
    XXH3_128bits_update(s, ints, sizeof ints);
    XXH3_128bits_update(s, reals, sizeof reals);
    XXH3_128bits_update(s, p->cu, sizeof *p->cu * (size_t)(p->Nseq + 1));
    if (rq->ncut) XXH3_128bits_update(s, rq->cut, sizeof *rq->cut * (size_t)rq->ncut);
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
    XXH128_canonical_t key;
    XXH128_canonicalFromHash(&key, XXH3_128bits_digest(s));
    XXH3_freeState(s);
    return key;
}

/* Calls f on every array of *t, as bytes, in file order; stops at the first failure. */
static int visit(dp_truth *t, int (*f)(void *user, void *bytes, size_t n), void *user) {
    dp_ball *ball[13];
    int n = 0;
    for (int i = 0; i < dp_result_nfields; i++) ball[n++] = &t->field[i];
    ball[n++] = &t->S_cut;
    ball[n++] = &t->dS_cut;
    ball[n++] = &t->M_seg;
    for (int i = 0; i < n; i++) {
        const size_t rows = (size_t)ball[i]->rows, size = rows * (size_t)ball[i]->width * sizeof(double);
        if (rows && (f(user, ball[i]->hi, size) || f(user, ball[i]->lo, size) || f(user, ball[i]->rad, rows * sizeof(double)))) return 1;
    }
    return f(user, t->mark, sizeof *t->mark * (size_t)t->nmark);
}

typedef struct { FILE *f; XXH3_state_t *sum; } stream;

static int write_bytes(void *user, void *bytes, size_t n) {
    stream *s = user;
    XXH3_128bits_update(s->sum, bytes, n);
    return fwrite(bytes, 1, n, s->f) != n;
}

static int read_bytes(void *user, void *bytes, size_t n) {
    stream *s = user;
    if (fread(bytes, 1, n, s->f) != n) return 1;
    XXH3_128bits_update(s->sum, bytes, n);
    return 0;
}

static stream stream_on(FILE *f) {
    stream s = {f, XXH3_createState()};
    XXH3_128bits_reset(s.sum);
    return s;
}

static XXH128_canonical_t stream_sum(stream *s) {
    XXH128_canonical_t sum;
    XXH128_canonicalFromHash(&sum, XXH3_128bits_digest(s->sum));
    return sum;
}

/* NULL: loaded into *t, else why not. */
static const char *load(FILE *f, const header *want, dp_truth *t) {
    stream s = stream_on(f);
    header h;
    XXH128_canonical_t sum, got;
    const char *why = NULL;
    if (read_bytes(&s, &h, sizeof h)) why = "shorter than its header";
    else if (memcmp(&h, want, sizeof h)) why = "header of another entry";
    else if (visit(t, read_bytes, &s)) why = "truncated";
    sum = stream_sum(&s);
    XXH3_freeState(s.sum);
    if (why) return why;
    if (fread(&got, sizeof got, 1, f) != 1) return "truncated";
    if (fgetc(f) != EOF) return "longer than its content";
    return memcmp(&got, &sum, sizeof sum) ? "checksum does not match" : NULL;
}

static int save_stream(FILE *f, const header *h, dp_truth *t) {
    stream s = stream_on(f);
    header copy = *h;
    int bad = write_bytes(&s, &copy, sizeof copy) || visit(t, write_bytes, &s);
    const XXH128_canonical_t sum = stream_sum(&s);
    XXH3_freeState(s.sum);
    bad = bad || fwrite(&sum, sizeof sum, 1, f) != 1 || fflush(f) || fsync(fileno(f));
    return bad;
}

static void make_dirs(const char *dir) {
    char path[4096];
    snprintf(path, sizeof path, "%s", dir);
    for (char *s = path + 1; *s; s++)
        if (*s == '/') {
            *s = 0;
            mkdir(path, 0777);
            *s = '/';
        }
    mkdir(path, 0777);
}

/* A failure to write costs the next run its time, not this run its truth: it is reported and the run goes on. */
static void save(const char *dir, const char *path, const header *h, dp_truth *t) {
    char tmp[4200];
    make_dirs(dir);
    snprintf(tmp, sizeof tmp, "%s.XXXXXX", path);
    const int fd = mkstemp(tmp);
    FILE *f = fd < 0 ? NULL : fdopen(fd, "wb");
    int bad = !f || fchmod(fd, 0644) || save_stream(f, h, t);
    if (f) bad |= fclose(f) != 0;
    bad = bad || rename(tmp, path);
    if (!bad) {
        const int d = open(dir, O_RDONLY | O_DIRECTORY);
        if (d >= 0) {
            fsync(d);
            close(d);
        }
        return;
    }
    fprintf(stderr, "truth cache: cannot write %s: %s\n", path, strerror(errno));
    if (fd >= 0) unlink(tmp);
}

dp_status dp_truth_cached(const dp_problem *p, const dp_truth_request *rq, const char *dir, dp_truth *t, int *cached, dp_err *e) {
    if (cached) *cached = 0;
    if (!dir) return dp_truth_run(p, rq, t, e);
    const dp_status s = tr_truth_alloc(p, rq, t, e);
    if (s) return s;
    header h = {.version = TRUTH_VERSION, .key = content_key(p, rq)};
    memcpy(h.magic, MAGIC, sizeof h.magic);
    char path[4096], hex[2 * sizeof h.key.digest + 1];
    for (size_t i = 0; i < sizeof h.key.digest; i++) snprintf(hex + 2 * i, 3, "%02x", h.key.digest[i]);
    if (snprintf(path, sizeof path, "%s/%s.truth", dir, hex) >= (int)sizeof path - 16) {
        dp_truth_free(t);
        return dp_fail(e, DP_EINPUT, "cache folder: name longer than %zu bytes", sizeof path);
    }
    FILE *f = fopen(path, "rb");
    const char *why = f ? load(f, &h, t) : NULL;
    if (f) fclose(f);
    if (f && !why) {
        if (cached) *cached = 1;
        return DP_OK;
    }
    if (why) fprintf(stderr, "truth cache: %s: %s; computing it again\n", path, why);
    dp_truth_free(t);
    const dp_status run = dp_truth_run(p, rq, t, e);
    if (!run) save(dir, path, &h, t);
    return run;
}
