/* Finished cases in files (finished.h). */
#define _GNU_SOURCE
#include "finished.h"
#include "harness/record/run_bytes.h"
#include "ref/files/input.h"
#include "ref/files/output.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>
#include <xxhash.h>

/* ---- what the runs of a case follow from ----------------------------------------------------- */

static void add(XXH3_state_t *s, const void *x, size_t n) { XXH3_128bits_update(s, x, n); }
static void add_text(XXH3_state_t *s, const char *x) { add(s, x ? x : "", x ? strlen(x) + 1 : 1); }
static void add_list(XXH3_state_t *s, int n, const void *x, size_t each) {
    add(s, &n, sizeof n);
    if (n) add(s, x, each * (size_t)n);
}

static void add_file(XXH3_state_t *s, const char *path) {
    char *bytes;
    size_t n;
    dp_err e;
    add_text(s, path);
    if (!path || dp_input_read(path, dp_input_most(), &bytes, &n, &e)) return;
    add(s, bytes, n);
    free(bytes);
}

static void add_conv(XXH3_state_t *s, dp_conv *c) {
    for (int i = 0; i < DP_CONV_NINPUTS; i++) {
        const double *x = *dp_conv_input_at(c, i);
        const int64_t n = dp_conv_count(c, &dp_conv_input_fields[i], c->T);
        if (x) add(s, x, sizeof *x * (size_t)n);
    }
}

static void add_case(XXH3_state_t *s, const dp_case *c) {
    dp_case *x = (dp_case *)c;
    add_text(s, c->name);
    add_file(s, c->path);
    if (dp_op_of(c)->has_problem) {
        const dp_key key = dp_problem_key(&c->p, NULL, 0);
        add(s, &key, sizeof key);
    }
    if (dp_op_of(c)->has_conv) add_conv(s, &x->conv);
    for (int i = 0; dp_op_of(c)->has_front && i < DP_NQKV; i++)
        if (c->step.on[i]) add_conv(s, &x->step.conv[i]);
}

static void add_options(XXH3_state_t *s, const dp_run_options *o) {
    add_list(s, o->nranks, o->ranks, sizeof *o->ranks);
    add_list(s, o->nbase, o->base, sizeof *o->base);
    add_list(s, o->nchain, o->chain, sizeof *o->chain);
    add_list(s, o->nmerge, o->merge, sizeof *o->merge);
    add_list(s, o->npayload, o->payload, sizeof *o->payload);
    add_list(s, o->nown, o->own, sizeof *o->own);
    add_list(s, o->nbackend, o->backend, sizeof *o->backend);
    add_list(s, o->nvariant, o->variant, sizeof *o->variant);
    add_list(s, o->truth != NULL, o->truth, sizeof *o->truth);
    add(s, &o->fault, sizeof o->fault);
    add(s, &o->drop, sizeof o->drop);
    add(s, &o->limit_s, sizeof o->limit_s);
    add_text(s, o->design);
    add_text(s, dp_unavailable(DP_BACKEND_CUDA, 1));
    if (!o->subject) return;
    add_file(s, o->subject->path); /* of a program its command, which is no file */
    add(s, &o->subject->base, sizeof o->subject->base);
    add(s, &o->subject->chain, sizeof o->subject->chain);
}

dp_key dp_finished_key(const dp_case *c, const dp_run_options *o) {
    dp_key key;
    XXH128_canonical_t as;
    XXH3_state_t *s = XXH3_createState();
    XXH3_128bits_reset(s);
    add_text(s, dp_cache_sources(DP_CACHE_EXPECTED));
    add_case(s, c);
    add_options(s, o);
    XXH128_canonicalFromHash(&as, XXH3_128bits_digest(s));
    memcpy(key.byte, as.digest, sizeof key.byte);
    XXH3_freeState(s);
    return key;
}

/* ---- files ----------------------------------------------------------------------------------- */

static char *path_of(const char *dir, dp_key key) {
    char *path, hex[33];
    for (size_t i = 0; i < sizeof key.byte; i++)
        snprintf(hex + 2 * i, 3, "%02x", key.byte[i]);
    if (asprintf(&path, "%s/%s.runs", dir, hex) < 0) abort();
    return path;
}

int dp_finished_load(const char *dir, dp_key key, dp_runs *runs) {
    char *path = path_of(dir, key), *all;
    size_t n;
    dp_err e = {0};
    int got = 0;
    if (!access(path, F_OK) && !dp_input_read(path, dp_input_most(), &all, &n, &e)) {
        XXH128_canonical_t is;
        const size_t size = n > sizeof is ? n - sizeof is : 0;
        XXH128_canonicalFromHash(&is, XXH3_128bits(all, size));
        got = size && !memcmp(&is, all + size, sizeof is) && dp_runs_unpack(all, size, runs);
        free(all);
        if (!got) fprintf(stderr, "deltaproof: %s: damaged, its case is run again\n", path);
    }
    free(path);
    return got;
}

void dp_finished_save(const char *dir, dp_key key, const dp_runs *runs) {
    char *path = path_of(dir, key);
    size_t n;
    char *all = dp_runs_pack(runs, &n);
    dp_output out;
    dp_err e = {0};
    XXH128_canonical_t is;
    XXH128_canonicalFromHash(&is, XXH3_128bits(all, n));
    if (!dp_output_replace(&out, path, &e)) {
        const int bad =
            fwrite(all, 1, n, out.f) != n || fwrite(&is, 1, sizeof is, out.f) != sizeof is;
        dp_output_close(&out, bad, &e);
    }
    if (e.code) fprintf(stderr, "deltaproof: --resume: %s\n", e.msg);
    free(all);
    free(path);
}
