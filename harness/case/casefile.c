/* The table of keys of a case file, and the parser that fills it (casefile.h). */
#include "casefile.h"
#include "harness/base/terminal.h"
#include "operations.h"
#include "ref/vocabulary/formats.h"
#include "ref/vocabulary/recurrence_text.h"
#include "ref/vocabulary/text.h"

#include <ctype.h>
#include <math.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>

/* ---- the table of keys ----------------------------------------------------------------------- */

typedef enum { TEXT, INT, REAL, CHOICE, INTS, CHOICES } type;
enum {
    REC = DP_CF_REC,
    CHAIN = DP_CF_CHAIN,
    CONV = DP_CF_CONV,
    STEP = DP_CF_STEP,
    SESSION = DP_CF_SESSION,
    ALL = DP_CF_ALL,
    GEN = 8
}; /* GEN: describes generated inputs, not with data */

/* dflt: NULL required; "(..)" computed or absent, said in words; else parsed like a value of the
 * file. lo, hi: range of numbers. */
typedef struct {
    const char *name;
    type type;
    int ops;
    size_t at;
    const char *dflt;
    double lo, hi;
    const char *choices, *meaning;
} key;

#define AT(field) offsetof(dp_casefile, field)
#define MAX_SEED 9.2e18
#define MAX_LIST 16 /* entries of any list but cu_seqlens */
static const key KEYS[] = {
    {"reason", TEXT, ALL, AT(reason), NULL, 0, 0, NULL, "why this case exists"},
    {"source", TEXT, ALL, AT(source), NULL, 0, 0, NULL,
     "which fault, section or recording it comes from"},
    {"unjudged", TEXT, ALL, AT(unjudged), "(none)", 0, 0, NULL,
     "NAMES: REASON: tensors, with commas between, that may be unjudged, and why"},
    {"op", CHOICE, ALL, AT(op), NULL, 0, 0, DP_OPERATION_WORDS,
     "recurrence, with the key session in calls that hand the state on; product of M factors "
     "alone, "
     "causal convolution, or a training step: convolutions, then KDA"},
    {"smoke", CHOICE, ALL, AT(smoke), "no", 0, 0, "no|yes", "part of the smoke set"},
    {"seed", INT, ALL, AT(seed), "1", 0, MAX_SEED, NULL, "seed of everything that is generated"},
    {"bits", INT, ALL, AT(bits), "192", 64, 4096, NULL, "precision of the truth"},
    {"truth", CHOICE, REC, AT(truth), "auto", 0, 0, "auto|mpfr|dd",
     "arithmetic of the truth; dd: double-double, audited by MPFR; auto: MPFR where that is cheap"},
    {"T", INT, REC | CONV, AT(T), "(all tokens of data)", 1, 1 << 24, NULL,
     "tokens; with data a prefix of that many"},
    {"H", INT, REC, AT(H), "(1, or as in data)", 1, 4096, NULL, "query/key heads"},
    {"HV", INT, REC, AT(HV), "(H, or as in data)", 1, 4096, NULL, "value heads, a multiple of H"},
    {"K", INT, REC | CHAIN, AT(K), "(required, or as in data)", 1, 4096, NULL, "key width"},
    {"V", INT, REC, AT(V), "(K, or as in data)", 1, 4096, NULL, "value width"},
    {"R", INT, REC, AT(R), "1", 1, 64, NULL, "keys per token (mkda, gated-deltaproduct)"},
    {"recurrence", TEXT, REC, AT(recurrence), "(none)", 0, 0, NULL,
     "rows of a token in place of the op's: a file beside the case, or a name that the program "
     "has"},
    {"cu_seqlens", INTS, REC | CONV, AT(cu_seqlens), "(0,T)", 0, 1 << 24, NULL,
     "where packed sequences begin, then T; equal neighbours are an empty sequence"},
    {"scale", REAL, REC, AT(scale), "(K^-1/2)", -1e300, 1e300, NULL, "factor of q in the output"},
    {"gate", CHOICE, REC, AT(gate), "log", 0, 0, DP_GATE_WORDS,
     "form of g: log decay itself, or raw (math c)"},
    {"lower_bound", REAL, REC, AT(lower_bound), "(required with gate = lower_bound)", -1e3, -1e-3,
     NULL, "gate = lower_bound * sigmoid(exp(A_log) (g + dt_bias))"},
    {"gate_params", CHOICE, REC | GEN, AT(gate_params), "yes", 0, 0, "no|yes|rates",
     "raw gates: generate A_log and dt_bias (no: neither, rates: A_log alone)"},
    {"beta", CHOICE, REC, AT(beta), "plain", 0, 0, DP_BETA_WORDS,
     "form of beta: itself, sigmoid(b), 2 sigmoid(b)"},
    {"l2norm", CHOICE, REC, AT(l2norm), "no", 0, 0, "no|yes",
     "q and keys are divided by sqrt(sum x^2 + 1e-6)"},
    {"dtype", CHOICE, REC | CONV, AT(dtype), "(bf16, or as in data)", 0, 0, "fp64|fp32|bf16",
     "format of the input tensors; parameters and states are fp32 (fp64 with fp64)"},
    {"data", TEXT, REC | CONV, AT(data), "(generated)", 0, 0, NULL,
     "safetensors file with the inputs, relative to the case file"},
    {"keys", CHOICE, REC | GEN, AT(keys), "random", 0, 0, "random|correlated|subspace|exact|moved",
     "law of the keys; correlated: nearly equal; subspace: K/2 dimensions; exact: all inputs such "
     "that nothing rounds; moved: half of the channels killed in turn, the state always in the "
     "other (sets q, k, g)"},
    {"g_scale", REAL, REC | GEN, AT(g_scale), "(0.1, raw gates 1)", 0, 1e3, NULL,
     "g = -g_scale * exponential; raw: g_mean + g_scale * normal"},
    {"g_mean", REAL, REC | GEN, AT(g_mean), "0", -1e3, 1e3, NULL, "mean of a raw gate"},
    {"g_least", REAL, REC | GEN, AT(g_least), "0", -20, 1e3, NULL,
     "every log gate is stronger by this; below 0: weaker, so that some are above 0 and grow"},
    {"g_uniform", REAL, REC | GEN, AT(g_uniform), "0", 0, 1e3, NULL,
     "above 0: g uniform in (-g_uniform, 0]"},
    {"g_head_spread", REAL, REC | GEN, AT(g_head_spread), "1", 1e-3, 1e3, NULL,
     "head h decays spread^h times as fast as head 0"},
    {"g_channel_spread", REAL, REC | GEN, AT(g_channel_spread), "0", 0, 12, NULL,
     "decades over which the channels' rates are spread"},
    {"beta_lo", REAL, REC | GEN, AT(beta_lo), "(0.2, raw 0)", -1e3, 1e3, NULL,
     "plain: beta uniform in [lo, hi), gdn2: erase and write; raw: lo + hi * normal"},
    {"beta_hi", REAL, REC | GEN, AT(beta_hi), "(0.9, raw 1)", -1e3, 1e3, NULL, "see beta_lo"},
    {"s0_scale", REAL, REC | GEN, AT(s0_scale), "0", 0, 1e3, NULL,
     "above 0: initial state normal * s0_scale, one a sequence"},
    {"qk_decades", REAL, REC | GEN, AT(qk_decades), "0", 0, 12, NULL,
     "rows of q and k are multiplied by 10^-u, u uniform up to this"},
    {"k_scale", REAL, REC | GEN, AT(k_scale), "0", 0, 1e3, NULL,
     "above 0: rows of k are multiplied by u, uniform up to this"},
    {"v_scale", REAL, REC | GEN, AT(v_scale), "0", 0, 1e9, NULL,
     "above 0: v, s0, do and dstate are multiplied by this"},
    {"beta_decades", REAL, REC | GEN, AT(beta_decades), "0", 0, 30, NULL, "plain betas likewise"},
    {"v_from_k", REAL, REC | GEN, AT(v_from_k), "0", 0, 1e3, NULL,
     "above 0: v = key + this * v, which makes states nearly symmetric where K = V"},
    {"g_hold", INT, REC | GEN, AT(g_hold), "1", 1, 1 << 20, NULL,
     "a token's gates are those of the first of so many tokens"},
    {"repeat", INT, REC | GEN, AT(repeat), "1", 1, 1 << 20, NULL,
     "a token's k and v are those of the first of so many tokens"},
    {"v_ties", CHOICE, REC | GEN, AT(v_ties), "no", 0, 0, "no|yes",
     "every v lies midway between two numbers of bf16 (dtype fp32 or fp64)"},
    {"A_log", REAL, REC | GEN, AT(A_log), "(generated)", -100, 100, NULL,
     "raw gates: A_log of every head"},
    {"dstate", CHOICE, REC, AT(dstate), "no", 0, 0, "no|yes",
     "backward: also a gradient of the final state (generated)"},
    {"backward", CHOICE, REC | CONV, AT(backward), "yes", 0, 0, "no|yes", "gradients too"},
    {"ranks", INTS, REC | CONV, AT(ranks), "1", 1, 4096, NULL,
     "numbers of ranks, at most 16 of them; own = even: each divides T"},
    {"base", CHOICES, REC | CONV, AT(base), "fp32", 0, 0, DP_BASE_WORDS,
     "formats of every stage except the M chain"},
    {"chain", CHOICES, REC | CHAIN, AT(chain), "fp32", 0, 0, DP_FORMAT_WORDS,
     "formats of the M chain"},
    {"chain_ranks", INTS, REC, AT(chain_ranks), "(all of ranks)", 1, 4096, NULL,
     "which of ranks run every format of the chain; the others run its first"},
    {"pair", CHOICE, REC, AT(pair), "chain", 0, 0, "chain|rows",
     "how simulated ranks make M and H (ref/vocabulary/design.h)"},
    {"merge", CHOICES, REC, AT(merge), "allgather", 0, 0, DP_EXCHANGE_WORDS,
     "how states get from rank to rank (ref/vocabulary/exchange.h)"},
    {"payload", CHOICES, REC, AT(payload), "full", 0, 0, DP_PAYLOAD_WORDS,
     "what pairs and states are sent as; heads sends neither"},
    {"own", CHOICES, REC | CONV, AT(own), "even", 0, 0, DP_OWN_WORDS,
     "which rank owns which tokens (ref/vocabulary/own.h)"},
    {"nonfinite", CHOICE, REC | CONV, AT(nonfinite), "refuse", 0, 0, "refuse|allow",
     "NaN and Inf among the inputs"},
    {"override", TEXT, REC | CONV, AT(override), "(none)", 0, 0, NULL,
     "values put into inputs: v[5,0,0,3] nan, beta[*,0,0] 0, k[3,0,0,1] 0x1p-140"},
    {"session", TEXT, REC, AT(session), "(all tokens in one call)", 0, 0, NULL,
     "calls with commas between, one rank, forward: N tokens, KxN: K calls of N; N-n: N drafted "
     "tokens, the first n accepted; the last is repeated to the end"},
    {"session_state", CHOICE, SESSION, AT(session_state), "returned", 0, 0,
     "returned|fp32|bf16|fp16|" DP_STATE_WORDS,
     "format in which the state is kept between calls (ref/vocabulary/stored.h); returned: as it "
     "came"},
    {"session_prefix", INT, SESSION, AT(session_prefix), "0", 0, 1 << 24, NULL,
     "first tokens that all sequences share, with the first one's initial state: computed once, "
     "each goes on from its state"},
    {"session_stagger", INT, SESSION, AT(session_stagger), "0", 0, 1024, NULL,
     "calls by which each sequence begins its schedule after the one before: prompts and single "
     "tokens in one call"},
    {"session_slots", INT, SESSION, AT(session_slots), "0", 0, 1 << 20, NULL,
     "slots of the pool that the states lie in, more than sequences: calls are told which each "
     "reads and writes, -1 for padding; 0: no pool"},
    {"session_ring", INT, SESSION, AT(session_ring), "0", 0, 1 << 16, NULL,
     "tokens that a sequence's ring holds, of a kernel that writes states in some calls alone and "
     "replays the tokens since; needs session_slots; 0: no ring"},
    {"regime", CHOICE, CHAIN, AT(regime), NULL, 0, 0,
     "subspace|reflect|slow|mixed|corr|mild|strong", "law of the factors (math j.5)"},
    {"chunks", INT, CHAIN, AT(chunks), NULL, 2, 65536, NULL, "number of factors"},
    {"D", INT, CONV, AT(D), "(required, or as in data)", 1, 65536, NULL, "channels"},
    {"W", INT, CONV | STEP, AT(W), "(required, or as in data)", 1, 64, NULL, "width of the kernel"},
    {"activation", CHOICE, CONV | STEP, AT(activation), "silu", 0, 0, "none|silu",
     "after the convolution"},
    {"bias", CHOICE, CONV | STEP | GEN, AT(bias), "no", 0, 0, "no|yes", "generate a bias"},
    {"conv", CHOICES, STEP, AT(conv), "q,k,v", 0, 0, "q|k|v",
     "which of q, k, v come out of a convolution: their tensors are what goes into it"},
    {"conv_data", TEXT, STEP, AT(conv_data), "(generated)", 0, 0, NULL,
     "safetensors file with x and w of the one convolution"},
};
#define NKEYS ((int)(sizeof KEYS / sizeof *KEYS))
_Static_assert(NKEYS <= DP_CASEFILE_MAX_KEYS, "text and line have a slot for every key");

static int find(const char *name) {
    for (int i = 0; i < NKEYS; i++)
        if (!strcmp(name, KEYS[i].name)) return i;
    return -1;
}

void dp_case_print_keys(FILE *out) {
    static const char *const types[] = {"text",   "integer",  "number",
                                        "one of", "integers", "list of"};
    for (int i = 0; i < NKEYS; i++) {
        const key *k = &KEYS[i];
        fprintf(out, "%-17s %s%s%s; default: %s\n%-17s %s", k->name, types[k->type],
                k->choices ? " " : "", k->choices ? k->choices : "",
                k->dflt ? k->dflt : "none, required", "", k->meaning);
        int n = 0;
        for (int op = 0; op < DP_NOPS; op++)
            if (k->ops & dp_operations[op].bit)
                fprintf(out, "%s%s", n++ ? " " : " [", dp_operations[op].name);
        fprintf(out, "%s]\n", k->ops & GEN ? "; not with data" : "");
    }
}

/* ---- messages -------------------------------------------------------------------------------- */

dp_status dp_casefile_refuse(const dp_casefile *f, const char *name, dp_err *e, const char *fmt,
                             ...) {
    char why[640];
    va_list ap;
    va_start(ap, fmt);
    vsnprintf(why, sizeof why, fmt, ap);
    va_end(ap);
    const int i = find(name);
    if (i < 0 || !f->text[i]) return dp_fail(e, DP_EINPUT, "%s: %s: %s", f->path, name, why);
    if (!f->line[i])
        return dp_fail(e, DP_EINPUT, "%s: %s = %.100s: %s", f->path, name, f->text[i], why);
    return dp_fail(e, DP_EINPUT, "%s:%d: %s = %.100s: %s", f->path, f->line[i], name, f->text[i],
                   why);
}

static dp_status unknown_key(const dp_casefile *f, int line, const char *written, const char *value,
                             dp_err *e) {
    char name[41];
    int best = 0;
    snprintf(name, sizeof name, "%s", written);
    for (int i = 1; i < NKEYS; i++)
        if (dp_word_distance(name, KEYS[i].name) < dp_word_distance(name, KEYS[best].name))
            best = i;
    return dp_fail(e, DP_EINPUT, "%s:%d: %s = %.100s: unknown key; the nearest is %s", f->path,
                   line, name, value, KEYS[best].name);
}

/* ---- values ---------------------------------------------------------------------------------- */

static dp_status one_int(const dp_casefile *f, const key *k, const char *s, int64_t *x, dp_err *e) {
    const dp_number n = dp_number_int(s, (int64_t)k->lo, (int64_t)k->hi, x);
    if (n == DP_NUMBER_NONE)
        return dp_casefile_refuse(f, k->name, e, "'%.60s' is not an integer", s);
    if (n == DP_NUMBER_RANGE)
        return dp_casefile_refuse(f, k->name, e, "%.60s is out of range, must be %.0f to %.0f", s,
                                  k->lo, k->hi);
    return DP_OK;
}

static dp_status one_real(const dp_casefile *f, const key *k, const char *s, double *x, dp_err *e) {
    const dp_number n = dp_number_real(s, k->lo, k->hi, x);
    if (n == DP_NUMBER_NONE)
        return dp_casefile_refuse(f, k->name, e, "'%.60s' is not a finite number", s);
    if (n == DP_NUMBER_RANGE)
        return dp_casefile_refuse(f, k->name, e, "%.60s is out of range, must be %g to %g", s,
                                  k->lo, k->hi);
    return DP_OK;
}

static dp_status one_choice(const dp_casefile *f, const key *k, const char *s, int64_t *x,
                            dp_err *e) {
    const size_t n = strcspn(s, "|");
    const dp_user_recurrence *own = dp_user_recurrence_installed();
    *x = own && k->at == AT(op) && !strcmp(s, own->name) ? DP_DPLR : 0; /* as shrink writes it */
    if (*x) return DP_OK;
    for (const char *c = k->choices; c; c = strchr(c, '|') ? strchr(c, '|') + 1 : NULL, ++*x)
        if (n && !s[n] && !strncmp(c, s, n) && (c[n] == '|' || !c[n])) return DP_OK;
    return dp_casefile_refuse(f, k->name, e, "'%.60s' is not one of %s", s, k->choices);
}

static char *trim(char *s) {
    while (isspace((unsigned char)*s))
        s++;
    char *end = s + strlen(s);
    while (end > s && isspace((unsigned char)end[-1]))
        *--end = 0;
    return s;
}

static dp_status list(const dp_casefile *f, const key *k, const char *s, dp_ints *out, dp_err *e) {
    DP_OWN char *copy = dp_strdup(s);
    dp_status st = DP_OK;
    free(out->v);
    *out = (dp_ints){0, dp_calloc(strlen(s) + 1, sizeof(int64_t))};
    for (char *p = copy, *next; p && !st; p = next) {
        next = strchr(p, ',');
        if (next) *next++ = 0;
        if (k->at != AT(cu_seqlens) && out->n == MAX_LIST) {
            st = dp_casefile_refuse(f, k->name, e, "more than %d entries", MAX_LIST);
            break;
        }
        int64_t *x = &out->v[out->n++];
        st = k->type == INTS ? one_int(f, k, trim(p), x, e) : one_choice(f, k, trim(p), x, e);
        for (int i = 0; !st && k->at != AT(cu_seqlens) && i < out->n - 1; i++)
            /* NOLINTNEXTLINE(clang-analyzer-unix.Malloc): out->v is new since it was freed */
            if (out->v[i] == *x)
                st = dp_casefile_refuse(f, k->name, e, "'%s' is given twice", trim(p));
    }
    return st;
}

static dp_status assign(dp_casefile *f, const key *k, const char *s, dp_err *e) {
    void *at = (char *)f + k->at;
    switch (k->type) {
    case TEXT:
        free(*(char **)at);
        *(char **)at = dp_strdup(s);
        return DP_OK;
    case INT: return one_int(f, k, s, at, e);
    case REAL: return one_real(f, k, s, at, e);
    case CHOICE: return one_choice(f, k, s, at, e);
    default: return list(f, k, s, at, e);
    }
}

/* ---- lines ----------------------------------------------------------------------------------- */

/* '#' starts a comment at the start of a line or after white space, so that `fla#1115` may stand in
 * a source. */
static void cut_comment(char *s) {
    for (char *p = s; *p; p++)
        if (*p == '#' && (p == s || isspace((unsigned char)p[-1]))) {
            *p = 0;
            return;
        }
}

static dp_status take_line(dp_casefile *f, int line, char *s, dp_err *e) {
    cut_comment(s);
    s = trim(s);
    if (!*s) return DP_OK;
    if (*s == '[')
        return dp_fail(e, DP_EINPUT, "%s:%d: %.60s: case files have no sections", f->path, line, s);
    char *eq = strchr(s, '=');
    if (!eq) return dp_fail(e, DP_EINPUT, "%s:%d: %.60s: expected `key = value`", f->path, line, s);
    *eq = 0;
    const char *name = trim(s), *value = trim(eq + 1);
    const int i = find(name);
    if (i < 0) return unknown_key(f, line, name, value, e);
    if (f->text[i])
        return dp_fail(e, DP_EINPUT, "%s:%d: %s = %.100s: given before, on line %d", f->path, line,
                       name, value, f->line[i]);
    if (!*value)
        return dp_fail(e, DP_EINPUT, "%s:%d: %s = : the value is missing", f->path, line, name);
    f->text[i] = dp_strdup(value);
    f->line[i] = line;
    return assign(f, &KEYS[i], value, e);
}

static dp_status not_text(const dp_casefile *f, const char *text, size_t at, dp_err *e) {
    int line = 1;
    for (size_t i = 0; i < at; i++)
        line += text[i] == '\n';
    return dp_fail(e, DP_EINPUT, "%s:%d: byte 0x%02x: not UTF-8 text, or a control character",
                   f->path, line, (unsigned char)text[at]);
}

static dp_status take_text(dp_casefile *f, const char *text, size_t len, dp_err *e) {
    if (len > DP_CASEFILE_MAX_BYTES)
        return dp_fail(e, DP_EINPUT, "%s: %zu bytes: a case file has at most %d", f->path, len,
                       DP_CASEFILE_MAX_BYTES);
    if (memchr(text, 0, len))
        return dp_fail(e, DP_EINPUT, "%s: byte %zu is zero: not a text file", f->path,
                       (size_t)((const char *)memchr(text, 0, len) - text));
    const size_t good = dp_text_good(text, len, 1);
    if (good < len) return not_text(f, text, good, e);
    DP_OWN char *copy = dp_calloc(len + 1, 1);
    memcpy(copy, text, len);
    dp_status s = DP_OK;
    int line = 1;
    for (char *p = copy + dp_text_mark(copy), *next; p && !s; p = next, line++) {
        next = strchr(p, '\n');
        if (next) *next++ = 0;
        s = take_line(f, line, p, e);
    }
    return s;
}

/* Keys that this op, or inputs from a file, leave without meaning are refused rather than ignored.
 */
static dp_status check_use(const dp_casefile *f, dp_err *e) {
    const int op = find("op");
    if (!f->text[op])
        return dp_fail(e, DP_EINPUT, "%s: op: missing; one of %s", f->path, KEYS[op].choices);
    for (int i = 0; i < NKEYS; i++) {
        const key *k = &KEYS[i];
        const int used = k->ops & dp_operations[dp_casefile_op(f)].keys;
        if (f->text[i] && !used)
            return dp_casefile_refuse(f, k->name, e, "op = %s has no such setting",
                                      dp_casefile_op_name(f));
        if (f->text[i] && (k->ops & GEN) && f->data)
            return dp_casefile_refuse(f, k->name, e,
                                      "says how inputs are generated, but data = %.200s gives them",
                                      f->data);
        if (!f->text[i] && used && !k->dflt)
            return dp_fail(e, DP_EINPUT, "%s: %s: missing; %s", f->path, k->name, k->meaning);
    }
    return DP_OK;
}

/* A setting that rounds is refused in a case where nothing may round
 * (ref/inputs/inputs_exact.c). */
static dp_status check_exact(const dp_casefile *f, dp_err *e) {
    if (f->keys != 3) return DP_OK;
    if (f->gate) return dp_casefile_refuse(f, "gate", e, "keys = exact goes with gate = log");
    if (f->beta) return dp_casefile_refuse(f, "beta", e, "keys = exact goes with beta = plain");
    if (f->l2norm) return dp_casefile_refuse(f, "l2norm", e, "keys = exact goes with l2norm = no");
    if (f->K % f->R)
        return dp_casefile_refuse(f, "K", e, "keys = exact needs a multiple of R = %lld",
                                  (long long)f->R);
    static const char *const unused[] = {
        "g_scale",  "g_mean",  "g_least",    "g_uniform", "g_head_spread", "g_channel_spread",
        "beta_lo",  "beta_hi", "qk_decades", "k_scale",   "v_scale",       "beta_decades",
        "v_from_k", "g_hold",  "repeat",     "v_ties"};
    for (size_t i = 0; i < sizeof unused / sizeof *unused; i++)
        if (dp_casefile_has(f, unused[i]))
            return dp_casefile_refuse(f, unused[i], e,
                                      "keys = exact gives every tensor its own law");
    return DP_OK;
}

dp_status dp_casefile_parse(const char *text, size_t len, const char *path, dp_casefile *f,
                            dp_err *e) {
    *f = (dp_casefile){.path = dp_strdup(path)};
    dp_status s = DP_OK;
    for (int i = 0; i < NKEYS && !s; i++)
        if (KEYS[i].dflt && KEYS[i].dflt[0] != '(') s = assign(f, &KEYS[i], KEYS[i].dflt, e);
    if (!s) s = take_text(f, text, len, e);
    if (!s) s = check_use(f, e);
    if (!s) s = check_exact(f, e);
    if (s) dp_casefile_free(f);
    return s;
}

void dp_casefile_free(dp_casefile *f) {
    for (int i = 0; i < NKEYS; i++) {
        void *at = (char *)f + KEYS[i].at;
        if (KEYS[i].type == TEXT) free(*(char **)at);
        if (KEYS[i].type == INTS || KEYS[i].type == CHOICES) free(((dp_ints *)at)->v);
        free(f->text[i]);
    }
    free(f->path);
    memset(f, 0, sizeof *f);
}

int dp_casefile_has(const dp_casefile *f, const char *name) {
    return find(name) >= 0 && f->text[find(name)];
}

/* The key op names models of the first operation, then the others. */
static dp_op at_once(const dp_casefile *f) {
    return f->op < DP_NMODELS ? DP_OP_RECURRENCE : (dp_op)(f->op - DP_NMODELS + 1);
}

dp_op dp_casefile_op(const dp_casefile *f) {
    const dp_op op = at_once(f);
    if (f->session && op == DP_OP_RECURRENCE) return DP_OP_SESSION;
    return f->session && op == DP_OP_STEP ? DP_OP_STEP_SESSION : op;
}

const char *dp_casefile_op_name(const dp_casefile *f) {
    if (dp_user_recurrence_installed()) return dp_models[DP_USER].name;
    return f->op < DP_NMODELS ? dp_models[f->op].name : dp_operations[at_once(f)].name;
}
