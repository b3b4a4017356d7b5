/* harness/fuzz/fuzz_judge.c - libFuzzer target: all that `judge` reads before it computes.
 *
 * Bytes: two for the length of the options and four for that of IN, little-endian; options, a line
 * each (`scale 0.5`); IN; OUT. Either a message, or a case and results that fit each other and
 * that are what the options say. */
#include "harness/run/judge.h"
#include "mutate.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define HEAD 6

typedef struct {
    size_t option, in, out; /* bytes */
} parts;

static int split(const uint8_t *b, size_t size, parts *p) {
    if (size < HEAD) return 0;
    p->option = b[0] | (size_t)b[1] << 8;
    p->in = b[2] | (size_t)b[3] << 8 | (size_t)b[4] << 16 | (size_t)b[5] << 24;
    if (p->option > size - HEAD || p->in > size - HEAD - p->option) return 0;
    p->out = size - HEAD - p->option - p->in;
    return 1;
}

static const char *const OPTIONS[] = {"gate",       "lower_bound",  "beta",   "l2norm",     "scale",
                                      "cu_seqlens", "state_layout", "tokens", "ranks",      "base",
                                      "claim",      "design",       "drop",   "gate_dtype", NULL};

/* The text is cut into its lines. */
static void take_options(char *text, dp_judge_options *o) {
    char *save;
    for (char *t = strtok_r(text, "\n", &save); t; t = strtok_r(NULL, "\n", &save)) {
        char *v = strchr(t, ' ');
        if (!v) continue;
        *v++ = 0;
        const struct {
            const char *name, **to;
        } take[] = {{"gate", &o->gate},
                    {"lower_bound", &o->lower_bound},
                    {"beta", &o->beta},
                    {"l2norm", &o->l2norm},
                    {"scale", &o->scale},
                    {"cu_seqlens", &o->cu_seqlens},
                    {"base", &o->base},
                    {"claim", &o->claim},
                    {"design", &o->design},
                    {"state_layout", &o->state_layout},
                    {"gate_dtype", &o->gate_dtype}};
        for (size_t i = 0; i < sizeof take / sizeof *take; i++)
            if (!strcmp(t, take[i].name)) *take[i].to = v;
        const int64_t n = strtoll(v, NULL, 10);
        if (!strcmp(t, "tokens") && n >= 0 && n <= 1 << 24) o->tokens = n;
        if (!strcmp(t, "ranks") && n >= 0 && n <= 4096) o->ranks = (int)n;
        if (!strcmp(t, "drop")) o->drop = dp_drop_bits(v);
    }
}

/* Its words make it again. */
static void check_design(const dp_design *d) {
    char text[DP_DESIGN_TEXT], again[DP_DESIGN_TEXT];
    dp_design x;
    dp_design_text(d, text);
    must(!dp_design_parse(text, d->base, &x, NULL), "a design whose words are refused", text);
    dp_design_text(&x, again);
    must(dp_design_same(d, &x) && !strcmp(text, again), "another design than", text);
}

/* Query heads a value head, each of them a token of the case. */
static int64_t queries(const dp_case *c) {
    int64_t n = 1;
    for (int i = 0; i < c->nwarn; i++)
        if (strstr(c->warn[i], " query heads a value head")) n = strtoll(c->warn[i], NULL, 10);
    return n;
}

static void check_case(const dp_case *c, const dp_judge_options *o, const dp_judge_loaded *l) {
    dp_err e = {0};
    int any = l->factors != NULL;
    must(l->drop >= 0 && l->drop <= DP_DROP_BITS_MOST, "drops bits out of range", "");
    if (c->op->has_factors) {
        must(l->factors && l->products && c->ch.n > 0 && c->ch.K > 0, "a chain without", "M");
        return;
    }
    must(!dp_problem_check(&c->p, 0, &e), "inconsistent problem", e.msg);
    must(c->nranks == 1 && c->p.T % c->ranks[0] == 0 && c->nbase == 1 && c->nchain == 1, "ranks",
         "");
    must(!o->scale || c->p.scale == strtod(o->scale, NULL), "another scale than", o->scale);
    must(!o->tokens || c->p.T == o->tokens * queries(c), "other tokens", "");
    for (int i = 0; i < DP_NRESULTS; i++)
        any |= l->stored.r.out[i] != NULL;
    for (int i = 0; i < DP_NSTAGE_TENSORS; i++)
        any |= l->stored.stage[i] != NULL;
    must(any, "nothing to judge", "");
    if (l->stored.design) check_design(l->stored.design);
}

int LLVMFuzzerTestOneInput(const uint8_t *bytes, size_t size) {
    parts p;
    dp_judge_options o = {.inputs = "fuzz-in", .outputs = "fuzz-out"};
    dp_tensorfile in, out;
    dp_judge_loaded l;
    dp_case c;
    dp_err e = {0};
    if (!split(bytes, size, &p)) return 0;
    const uint8_t *at = bytes + HEAD;
    char *text = strndup((const char *)at, p.option);
    take_options(text, &o);
    at += p.option;
    if (!dp_safetensors_parse(at, p.in, "fuzz-in", &in, &e)) {
        if (!dp_safetensors_parse(at + p.in, p.out, "fuzz-out", &out, &e)) {
            if (!dp_judge_load(&o, &in, &out, &c, &l, &e)) {
                check_case(&c, &o, &l);
                dp_case_free(&c);
            }
            dp_tensorfile_free(&out);
        }
        dp_tensorfile_free(&in);
    }
    must(!e.code || *e.msg, "refused without a message", "");
    free(text);
    return 0;
}

/* ---- mutation -------------------------------------------------------------------------------- */

static const char *const NAMES[] = {"q",
                                    "k",
                                    "v",
                                    "g",
                                    "beta",
                                    "A_log",
                                    "dt_bias",
                                    "initial_state",
                                    "s0",
                                    "do",
                                    "dht",
                                    "dstate",
                                    "cu_seqlens",
                                    "o",
                                    "final_state",
                                    "ht",
                                    "dq",
                                    "dk",
                                    "dv",
                                    "dg",
                                    "dbeta",
                                    "dA_log",
                                    "ddt_bias",
                                    "ds0",
                                    "dh0",
                                    "gcum",
                                    "Akk",
                                    "Aqk",
                                    "w",
                                    "u",
                                    "kg",
                                    "qg",
                                    "M",
                                    "H",
                                    "S_in",
                                    "h",
                                    "v_new",
                                    "dv_local",
                                    "dS_out",
                                    "dM",
                                    "dH",
                                    "dh",
                                    "dv_new",
                                    "factors",
                                    "__metadata__",
                                    "gate",
                                    "qk",
                                    "scale",
                                    "lower_bound",
                                    "l2norm",
                                    "state_layout",
                                    "ranks",
                                    "base",
                                    "claim",
                                    "design",
                                    "claim_drop",
                                    "gate_dtype",
                                    "dtype",
                                    "shape",
                                    "data_offsets",
                                    NULL};
static const char *const TEXTS[] = {"BF16",
                                    "F16",
                                    "F32",
                                    "F64",
                                    "I32",
                                    "I64",
                                    "log",
                                    "softplus",
                                    "lower_bound",
                                    "plain",
                                    "sigmoid",
                                    "2*sigmoid(beta)",
                                    "-exp(A_log)*softplus(g+dt_bias)",
                                    "l2norm inside kernel",
                                    "0",
                                    "1",
                                    "yes",
                                    "no",
                                    "kv",
                                    "vk",
                                    "bf16",
                                    "fp32",
                                    "fp64",
                                    "tf32",
                                    "tf32rz",
                                    "bf16st",
                                    "fp16",
                                    "recurrent",
                                    "chunk=128",
                                    "chunk=512,drop=20",
                                    "factors=fp16,out=fp16",
                                    "state=bf16,dstate=bf16,inverse=solve",
                                    "scores=gated,inverse=product,drop=1e-6",
                                    "keys=scored,decays=bf16",
                                    "chunk=16,chunks=16:512",
                                    "bfloat16",
                                    "20",
                                    "1e-6",
                                    "2",
                                    "3",
                                    "0,1,2",
                                    "0,2",
                                    "0.5",
                                    "-5",
                                    "1e400",
                                    "1e-400",
                                    "nan",
                                    "0x1p-3",
                                    "00000000000000000000000000000000.5",
                                    "",
                                    NULL};

static size_t mutate_options(uint8_t *data, size_t size, size_t most, rng *r) {
    char line[128];
    const uint32_t n = sizeof OPTIONS / sizeof *OPTIONS - 1;
    const uint32_t texts = sizeof TEXTS / sizeof *TEXTS - 1;
    const char *name = OPTIONS[below(r, n)], *text = TEXTS[below(r, texts)];
    const size_t len = (size_t)snprintf(line, sizeof line, "%s %s\n", name, text);
    if (below(r, 3) == 0) size = 0;
    if (size + len > most) return size;
    memcpy(data + size, line, len);
    return size + len;
}

size_t LLVMFuzzerCustomMutator(uint8_t *data, size_t size, size_t most, unsigned seed) {
    static const words w = {NAMES, TEXTS};
    rng r = rng_new(seed);
    parts p;
    if (!split(data, size, &p) || !below(&r, 10)) return LLVMFuzzerMutate(data, size, most);
    size_t n[3] = {p.option, p.in, p.out};
    uint8_t *part[3], *at = data + HEAD;
    const uint32_t which = below(&r, 3);
    for (int i = 0; i < 3; i++) {
        part[i] = malloc(most + 1);
        memcpy(part[i], at, n[i]);
        at += n[i];
    }
    const size_t room = most - (size - n[which]);
    size_t now = which ? mutate_safetensors(part[which], n[which], room, &r, &w)
                       : mutate_options(part[0], n[0], room < 60000 ? room : 60000, &r);
    if (which && !now) now = LLVMFuzzerMutate(part[which], n[which], room);
    n[which] = now;
    size = HEAD;
    for (int i = 0; i < 3; i++) {
        memcpy(data + size, part[i], n[i]);
        size += n[i];
        free(part[i]);
    }
    for (int i = 0; i < 2; i++)
        data[i] = (uint8_t)(n[0] >> 8 * i);
    for (int i = 0; i < 4; i++)
        data[2 + i] = (uint8_t)(n[1] >> 8 * i);
    return size;
}
