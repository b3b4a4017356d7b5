/* The same bits on every machine: whatever kernels the BLAS and the libm choose, whatever vectors
 * inner loops use, with any number of threads. Also the same record whatever the cache held. */
#include "gt.h"
#include "ref/arithmetic/isa.h"
#include "ref/files/cache.h"
#include "sanitized.h"

#include <jansson.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>

/* Small cases of every operation, a head gate (GDN), sums that are one number (dA_log), bases fp64
 * to bf16, a truncated chain. */
#if GT_SANITIZED
#define RUN \
    "run smoke-gdn smoke-chain smoke-conv --ranks 2,3 --chain fp32 --merge allgather --truth dd"
#else
#define RUN                                                                                       \
    "run smoke-kda smoke-gdn smoke-mkda2 smoke-chain smoke-conv smoke-step denormal --ranks 2,3 " \
    "--chain fp32 --merge allgather --truth dd"
#endif

static json_t *record_of(const char *env, const char *args, char *out, int size) {
    char cmd[2048], file[256];
    json_error_t e;
    snprintf(file, sizeof file, "%s/machine.json", gt_tmpdir());
    snprintf(cmd, sizeof cmd, "env OMP_WAIT_POLICY=passive %s '%s' %s --cases '%s' --json '%s'",
             env, gt_program(), args, gt_cases(), file);
    const int rc = gt_run(cmd, out, size);
    json_t *r = rc ? NULL : json_load_file(file, 0, &e);
    CHECK(r, "%s: status %d: %s", cmd, rc, out);
    return r;
}

/* The record of two threads that find no cache, by what this CPU and its BLAS choose; made once. */
static json_t *chosen(void) {
    static json_t *r;
    char out[8192];
    if (!r) r = record_of("OMP_NUM_THREADS=2", RUN " --cache none", out, sizeof out);
    return r;
}

static const char *digest_of(const json_t *r) {
    const char *s = json_string_value(json_object_get(json_object_get(r, "digest"), "value"));
    return s ? s : "";
}

/* The BLAS kernels that the run's backend lapack saw. */
static const char *kernels_of(const json_t *r) {
    size_t i;
    json_t *run;
    json_array_foreach(json_object_get(r, "runs"), i, run) {
        const char *backend = json_string_value(json_object_get(run, "backend"));
        if (!strcmp(backend, "lapack")) return json_string_value(json_object_get(run, "path"));
    }
    return "";
}

static int here(const char *feature) {
#if defined(__x86_64__)
    if (!strcmp(feature, "sse4.2")) return __builtin_cpu_supports("sse4.2");
    if (!strcmp(feature, "avx")) return __builtin_cpu_supports("avx");
    if (!strcmp(feature, "avx2"))
        return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
    if (!strcmp(feature, "avx512"))
        return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512dq") &&
               __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vl");
    if (!strcmp(feature, "avx512bf16"))
        return here("avx512") && __builtin_cpu_supports("avx512bf16");
#endif
    (void)feature;
    return 0;
}

/* Choices of OpenBLAS on old and new CPUs. */
DP_TEST(machine, the_digest_is_the_same_under_every_blas_kernel) {
    static const struct {
        const char *core, *needs;
        int threads;
    } k[] = {{"Prescott", "", 1},
             {"Haswell", "avx2", 1}, /* Zen has these, too */
             {"SkylakeX", "avx512", 1},
             {"Cooperlake", "avx512bf16", 2}};
    char env[256], out[8192];
    const char *const want = digest_of(chosen()), *const own = kernels_of(chosen());
    int compared = 0;
    for (size_t i = 0; i < sizeof k / sizeof *k; i++) {
        snprintf(env, sizeof env, "OPENBLAS_CORETYPE=%s OMP_NUM_THREADS=%d", k[i].core,
                 k[i].threads);
        json_t *r = (*k[i].needs && !here(k[i].needs)) || !strcasecmp(k[i].core, own)
                        ? NULL
                        : record_of(env, RUN " --cache none", out, sizeof out);
        if (!r) continue;
        if (strcasecmp(kernels_of(r), k[i].core))
            printf("    %s: this OpenBLAS has no such kernels, it took %s\n", k[i].core,
                   kernels_of(r));
        CHECK(*want && !strcmp(digest_of(r), want), "%s: digest %s, not %s", env, digest_of(r),
              want);
        CHECK(strstr(out, want), "the digest is printed: %s", out);
        compared++;
        json_decref(r);
    }
    CHECK(compared, "nothing to compare");
}

/* libm's versions, those of our own loops, and both at once, against whatever this CPU chooses. */
DP_TEST(machine, the_digest_is_the_same_whatever_the_cpu_seems_to_have) {
    static const char off[] = "GLIBC_TUNABLES=glibc.cpu.hwcaps=-AVX2,-AVX2_Usable,-FMA,-FMA_Usable,"
                              "-FMA4_Usable,-AVX512F,-AVX512F_Usable,-AVX512VL";
    static const char exps[] = "python3 -c \"import math; print(hash(tuple(math.exp(i * 1.37e-3) "
                               "for i in range(200000))))\"";
    const char *const env[] = {"DP_ISA=avx2", off};
    char cmd[1024], out[8192], a[256], b[256];
    const char *const want = digest_of(chosen());
    for (size_t i = 0; i < sizeof env / sizeof *env; i++) {
        if (!strcmp(env[i], "DP_ISA=avx2") && !dp_isa_here(DP_ISA_AVX2)) continue;
        char both[512];
        snprintf(both, sizeof both, "OMP_NUM_THREADS=1 %s%s", env[i],
                 env[i] == off ? " DP_ISA=plain" : "");
        json_t *r = record_of(both, RUN " --cache none", out, sizeof out);
        CHECK(r && !strcmp(digest_of(r), want), "%s: digest %s, not %s", both,
              r ? digest_of(r) : "", want);
        json_decref(r);
    }
    snprintf(cmd, sizeof cmd, "%s", exps);
    gt_run(cmd, a, sizeof a);
    snprintf(cmd, sizeof cmd, "env '%s' %s", off, exps);
    gt_run(cmd, b, sizeof b);
    if (!here("avx2"))
        printf("    this CPU has nothing to take away from libm\n");
    else
        CHECK(strcmp(a, b), "the tunable changes nothing in libm: %s", a);
}

DP_TEST(machine, an_instruction_set_that_is_not_here_is_refused) {
    char cmd[512], out[2048];
    snprintf(cmd, sizeof cmd, "DP_ISA=mmx '%s' run t1 --cases '%s'", gt_program(), gt_cases());
    CHECK(gt_run(cmd, out, sizeof out) == 2 && strstr(out, "DP_ISA = mmx"), "%s", out);
}

/* Functions that round, which a CPU or a library version can change. Functions like fma, fmin,
 * ldexp are exact or correctly rounded everywhere. */
DP_TEST(machine, the_program_takes_nothing_from_libm_that_rounds) {
    char cmd[1024], out[2048];
    snprintf(cmd, sizeof cmd,
             "nm -D --undefined-only '%s' | sed 's/.* U //; s/@.*//' | grep -xE "
             "'(a?(sin|cos|tan)h?|sincos|atan2|exp(2|10|m1)?|log(2|10|1p)?|pow|cbrt|hypot|erfc?|["
             "jlt]?gamma)[fl]?'",
             gt_program());
    CHECK(gt_run(cmd, out, sizeof out) == 1 && !*out, "%s", out);
}

/* ---- caches -------------------------------------------------------------------------------------
 */

/* Without what says when, by which command, and whether from the cache. */
static char *contents(json_t *r) {
    size_t i;
    json_t *run;
    json_object_del(r, "created");
    json_object_del(r, "seconds");
    json_object_del(json_object_get(r, "program"), "command");
    json_array_foreach(json_object_get(r, "runs"), i, run) {
        json_object_del(run, "seconds");
        json_object_del(json_object_get(run, "truth"), "cached");
    }
    return json_dumps(r, JSON_SORT_KEYS | JSON_INDENT(1));
}

/* First line in which two texts differ. */
static void differ(const char *what, const char *a, const char *b) {
    const char *line = a;
    while (*a && *a == *b) {
        if (*a == '\n') line = a + 1;
        a++;
        b++;
    }
    CHECK(!*a && !*b, "%s: differs at %.*s", what, (int)strcspn(line, "\n"), line);
}

DP_TEST(machine, no_cache_a_cold_one_and_a_warm_one_give_the_same_record) {
    char args[600], out[8192];
    REQUIRE(chosen(), "no record");
    char *text[3] = {contents(chosen())};
    for (int i = 1; i < 3; i++) {
        snprintf(args, sizeof args, RUN " --cache '%s/three'", gt_tmpdir());
        json_t *r = record_of("OMP_NUM_THREADS=2", args, out, sizeof out);
        REQUIRE(r, "%s: no record", i == 1 ? "cold" : "warm");
        text[i] = contents(r);
        json_decref(r);
    }
    snprintf(args, sizeof args, "ls '%s/three' | sed 's/.*[.]//' | sort -u | tr '\\n' ' '",
             gt_tmpdir());
    gt_run(args, out, sizeof out);
    CHECK(!strcmp(out, "audit bound condition expected stages truth "), "kinds of entries: %s",
          out);
    differ("a cold cache", text[0], text[1]);
    differ("a warm cache", text[0], text[2]);
    for (int i = 0; i < 3; i++)
        free(text[i]);
}

static int count(const char *dir) {
    char cmd[600], out[64];
    snprintf(cmd, sizeof cmd, "ls '%s' | wc -l", dir);
    gt_run(cmd, out, sizeof out);
    return atoi(out);
}

/* Entry of the key 0..: 1 and the number in it, or 0. */
static int loaded(const char *dir, double *x) {
    const dp_key key = {{1, 2, 3}};
    const dp_part part = {x, sizeof *x};
    *x = 0;
    return dp_cache_load(dir, DP_CACHE_BOUND, key, &part, 1);
}

static void saved(const char *dir, double x) {
    const dp_key key = {{1, 2, 3}};
    const dp_part part = {&x, sizeof x};
    dp_cache_save(dir, DP_CACHE_BOUND, key, &part, 1);
}

/* The file is moved to where another arithmetic's entry stands, then back with a header that names
 * another arithmetic. */
DP_TEST(machine, an_entry_of_another_arithmetic_is_not_used) {
    char dir[300], cmd[1400], out[1024];
    double x;
    snprintf(dir, sizeof dir, "%s/others", gt_tmpdir());
    saved(dir, 42);
    CHECK(loaded(dir, &x) && x == 42, "our own");
    snprintf(cmd, sizeof cmd,
             "cd '%s' && f=$(ls) && g=$(echo $f | sed "
             "'s/[.]................[.]/.0123456789abcdef./') && test $f != $g && mv $f $g",
             dir);
    CHECK(gt_run(cmd, out, sizeof out) == 0 && !loaded(dir, &x), "%s", out);
    saved(gt_tmpdir(), 1); /* the list of others is of the folder that was saved to last */
    saved(dir, 43);
    CHECK(loaded(dir, &x) && x == 43 && count(dir) == 1, "takes the other's place: %d files",
          count(dir));
    snprintf(
        cmd, sizeof cmd,
        "cd '%s' && printf '0123456789abcdef' | dd of=$(ls) bs=1 seek=24 conv=notrunc 2>/dev/null",
        dir);
    CHECK(gt_run(cmd, out, sizeof out) == 0 && !loaded(dir, &x),
          "an entry that says that it is of another arithmetic: %s", out);
}

DP_TEST(machine, a_damaged_entry_is_named_with_who_made_it) {
    char args[700], cmd[700], out[8192];
    json_t *r;
    snprintf(args, sizeof args,
             "run t1 --ranks 1 --base fp32 --chain fp32 --backend sim --cache '%s/hurt'",
             gt_tmpdir());
    r = record_of("A=1", args, out, sizeof out);
    json_decref(r);
    snprintf(
        cmd, sizeof cmd,
        "cd '%s/hurt' && printf 'x' | dd of=$(ls *.bound) bs=1 seek=200 conv=notrunc 2>/dev/null",
        gt_tmpdir());
    gt_run(cmd, out, sizeof out);
    r = record_of("A=1", args, out, sizeof out);
    CHECK(strstr(out, ".bound is damaged (checksum does not match; made by commit ") &&
              strstr(out, ", compiler "),
          "%s", out);
    json_decref(r);
}

/* The hash of the sources, in a copy of them: every source of ref/ and harness/, the flags, and
 * nothing else. */
DP_TEST(machine, entries_are_named_by_sources_compiler_and_flags) {
    static const struct {
        const char *change, *make;
        int ref, all; /* which of the two hashes must change */
    } c[] = {{"true", "", 0, 0},
             {"echo '/* */' >>README.md", "", 0, 0},
             {"echo '/* */' >>harness/verdict/levels.c", "", 0, 1},
             {"echo '/* */' >>harness/simulated/ranks.h", "", 0, 1},
             {"echo '/* */' >>ref/arithmetic/mm.c", "", 1, 1},
             {"echo '/* */' >>ref/arithmetic/product_real.inc", "", 1, 1},
             {"true", "CFLAGS=-O2", 1, 1},
             {"true", "CC='gcc -O3'", 1, 1}};
    char cmd[1200], out[2][2048], dir[300];
    snprintf(dir, sizeof dir, "%s/sources", gt_tmpdir());
    snprintf(cmd, sizeof cmd,
             "mkdir -p '%s' && cd '%s/..' && cp -r Makefile README.md ref harness scripts '%s'",
             dir, gt_cases(), dir);
    REQUIRE(gt_run(cmd, out[0], sizeof out[0]) == 0, "%s", out[0]);
    for (size_t i = 0; i < sizeof c / sizeof *c; i++) {
        char hash[2][2][40] = {{""}};
        for (int after = 0; after < 2; after++) {
            snprintf(cmd, sizeof cmd,
                     "cd '%s' && %s && env -u MAKEFLAGS make -s GPU=0 SAN=0 BUILD=b %s b/sources.h "
                     ">&2; cat b/sources.h",
                     dir, after ? c[i].change : "true", after ? c[i].make : "");
            gt_run(cmd, out[after], sizeof out[after]);
            const char *at = strstr(out[after], "DP_SOURCES_REF");
            CHECK(at && sscanf(
                            at,
                            "DP_SOURCES_REF \"%39[0-9a-f]\" #define DP_SOURCES_ALL \"%39[0-9a-f]\"",
                            hash[after][0], hash[after][1]) == 2,
                  "%s", out[after]);
        }
        for (int all = 0; all < 2; all++) {
            const int changed = strcmp(hash[0][all], hash[1][all]) != 0;
            CHECK(changed == (all ? c[i].all : c[i].ref), "%s %s: %s -> %s", c[i].change, c[i].make,
                  hash[0][all], hash[1][all]);
        }
    }
}

/* ---- compare ------------------------------------------------------------------------------------
 */

DP_TEST(machine, compare_says_whether_digests_agree) {
    char cmd[1600], out[4096];
    const char *tmp = gt_tmpdir(), *p = gt_program(), *cases = gt_cases();
    snprintf(cmd, sizeof cmd,
             "cd '%s' && r() { '%s' run t1 --cases '%s' --cache none --backend sim --base $1 "
             "--json $2.json >/dev/null; }; r fp32 a; r fp32 b; r fp64 c; "
             "sed 's/\"digest\"/\"d\"/' a.json >d.json; for x in b c d; do '%s' compare a.json "
             "$x.json; done; true",
             tmp, p, cases, p);
    gt_run(cmd, out, sizeof out);
    const char *same = strstr(out, "digest: the same, "),
               *other = strstr(out, "results of simulated ranks differ"),
               *none = strstr(out, "digest: NEW has none");
    CHECK(same && other && none && same < other && other < none, "%s", out);
}
