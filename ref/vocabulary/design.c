/* Designs as text, by one table of words. */
#include "design.h"
#include "formats_core.h"
#include "stored.h"
#include "text.h"

#include <math.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static const dp_format FORMATS[] = {DP_FP64, DP_FP32, DP_BF16, DP_FP16, DP_TF32, DP_TF32RZ};
#define NSTORED 4 /* the first of them are stored, the others are of operands alone */
static const char *const SCORES[] = {"pairwise", "gated", "tf32", "paired", "factored"};
static const char *const KEYS[] = {"raw", "scored"};
static const char *const PAIRS[] = {"chain", "rows"};
static const char *const BEGINS[] = {"pair", "state"};
static const char *const READS[] = {"computed", "kept"};
static const char *const EXPS[] = {"exact", "fast"};
static const char *const INPUTS[] = {"given", "stored"};
static const char *const BETAS[] = {"rows", "inverse"};
static const char *const INVERSES[] = {"solve", "product", "merged"};

/* A setting: a number in a range, one of the stored formats, one of all formats, one of some words,
 * bits, or lengths. The last two do not change what is rounded. */
typedef enum {
    A_NUMBER,
    A_FORMAT,
    A_STATE,
    ALL_THAT_LEAVES,
    AN_OPERAND,
    A_CHOICE,
    A_DROP,
    A_LENGTHS
} kind;
typedef struct {
    const char *key, *what;
    kind kind;
    size_t at;                 /* in dp_design */
    const char *const *choice; /* [nchoice] */
    int nchoice;
} setting;
#define STATES "fp64, fp32, bf16, fp16 or one of " DP_STATE_WORDS
static const setting SETTINGS[] = {
    {"chunk", "8 to 512", A_NUMBER, offsetof(dp_design, chunk), NULL, 0},
    {"chunk_backward", "8 to 512", A_NUMBER, offsetof(dp_design, chunk_backward), NULL, 0},
    {"factors", "fp64, fp32, bf16, fp16, tf32 or tf32rz", AN_OPERAND, offsetof(dp_design, factors),
     NULL, 0},
    {"state", STATES, A_STATE, offsetof(dp_design, state), NULL, 0},
    {"read", "computed or kept", A_CHOICE, offsetof(dp_design, read_kept), READS, 2},
    {"dstate", "fp64, fp32, bf16 or fp16", A_FORMAT, offsetof(dp_design, dstate), NULL, 0},
    {"final_state", STATES, A_STATE, offsetof(dp_design, final_state), NULL, 0},
    {"out", "fp64, fp32, bf16 or fp16", ALL_THAT_LEAVES, offsetof(dp_design, out), NULL, 0},
    {"decays", "fp64, fp32, bf16 or fp16", A_FORMAT, offsetof(dp_design, decays), NULL, 0},
    {"exp", "exact or fast", A_CHOICE, offsetof(dp_design, fast_decays), EXPS, 2},
    {"inputs", "given or stored", A_CHOICE, offsetof(dp_design, stored_inputs), INPUTS, 2},
    {"scores", "pairwise, gated, tf32, paired or factored", A_CHOICE, offsetof(dp_design, gated),
     SCORES, DP_NSCORES},
    {"keys", "raw or scored", A_CHOICE, offsetof(dp_design, scored), KEYS, 2},
    {"inverse", "solve, product or merged", A_CHOICE, offsetof(dp_design, product), INVERSES, 3},
    {"beta", "rows or inverse", A_CHOICE, offsetof(dp_design, fold_beta), BETAS, 2},
    {"exchange", DP_EXCHANGE_WORDS, A_CHOICE, offsetof(dp_design, sending.exchange),
     dp_exchange_names, DP_NRUN_EXCHANGES},
    {"payload", DP_PAYLOAD_WORDS, A_CHOICE, offsetof(dp_design, sending.payload), dp_payload_names,
     DP_NRUN_PAYLOADS},
    {"pair", "chain or rows", A_CHOICE, offsetof(dp_design, pair_rows), PAIRS, 2},
    {"begins", "pair or state", A_CHOICE, offsetof(dp_design, sending.begins), BEGINS, 2},
    {"drop", "a number below 1, or bits from 1 to 1000", A_DROP, offsetof(dp_design, drop), NULL,
     0},
    {"chunks", "powers of two from 8 to 512 with colons between", A_LENGTHS,
     offsetof(dp_design, chunks), NULL, 0},
};
#define NSETTINGS ((int)(sizeof SETTINGS / sizeof *SETTINGS))
#define RECURRENT "recurrent"
#define UNDECLARED "undeclared"

static void leave_in(dp_design *d, dp_format f) {
    for (int i = 0; i < DP_NRESULTS; i++)
        d->out[i] = f;
}

/* Does all that leaves do so in one format? */
static int leaves_alike(const dp_design *d) {
    int alike = 1;
    for (int i = 0; i < DP_NRESULTS; i++)
        alike &= !dp_leaves(i) || d->out[i] == d->out[DP_RESULT_O];
    return alike;
}

dp_design dp_design_of(dp_base base) {
    dp_design d = {.base = base, .chunk = DP_CHUNK};
    d.factors = d.state = d.dstate = d.decays = base == DP_BASE_FP64 ? DP_FP64 : DP_FP32;
    leave_in(&d, d.factors);
    if (base == DP_BASE_BF16) {
        d.factors = DP_BF16;
        leave_in(&d, DP_BF16);
        d.product = 1;
    }
    return d;
}

dp_design dp_design_formats(const dp_design *of) {
    dp_design d = dp_design_of(of->base);
    memcpy(d.out, of->out, sizeof d.out);
    d.factors = of->factors;
    d.final_state = of->final_state;
    d.undeclared = of->undeclared;
    return d;
}

int dp_design_common(const dp_design *undeclared, dp_design d[DP_COMMON_DESIGNS]) {
    static const struct {
        int chunk, fast, gated, product, bf16_alone, short_decays;
    } of[DP_COMMON_DESIGNS] = {{DP_CHUNK, 0, 0, 0, 0, 0},
                               {DP_CHUNK, 1, DP_SCORES_TF32, 0, 0, 0},
                               {DP_CHUNK, 1, DP_SCORES_GATED, 0, 1, 0},
                               {0, 0, 0, 0, 0, 0},
                               {0, 1, 0, 0, 0, 0},
                               {16, 0, 0, 0, 0, 0},
                               {16, 1, DP_SCORES_GATED, 0, 0, 0},
                               {32, 0, 0, 0, 0, 0},
                               {32, 1, DP_SCORES_GATED, 0, 0, 0},
                               {128, 0, 0, 0, 0, 0},
                               {128, 1, DP_SCORES_GATED, 0, 0, 0},
                               {256, 0, 0, 0, 0, 0},
                               {256, 1, DP_SCORES_GATED, 0, 0, 0},
                               {DP_CHUNK, 1, 0, DP_INVERSE_MERGED, 1, 0},
                               {128, 1, 0, DP_INVERSE_MERGED, 1, 0},
                               {16, 1, DP_SCORES_GATED, 0, 1, 1}};
    const int short_formats = undeclared->base == DP_BASE_BF16;
    int n = 0;
    for (size_t i = 0; i < sizeof of / sizeof *of; i++) {
        if (of[i].bf16_alone && !short_formats) continue;
        if (of[i].short_decays && undeclared->factors != DP_BF16) continue; /* coarser than fp16 */
        dp_design *x = &d[n++];
        *x = dp_design_formats(undeclared);
        x->undeclared = 0;
        x->chunk = of[i].chunk;
        x->fast_decays = of[i].fast;
        x->gated = short_formats ? of[i].gated : DP_SCORES_PAIRWISE;
        x->stored_inputs = x->gated != DP_SCORES_PAIRWISE;
        if (of[i].product) x->product = of[i].product;
        if (!of[i].short_decays) continue;
        x->decays = DP_BF16;
        x->scored = 1;
    }
    return n;
}

/* Formats and numbers alike, as bytes: to clang an enum is none of the types that an int may stand
 * for. */
_Static_assert(sizeof(dp_format) == sizeof(int), "settings are read as int");
static int value_at(const dp_design *d, const setting *s) {
    int x;
    memcpy(&x, (const char *)d + s->at, sizeof x);
    return x;
}

static void put_at(dp_design *d, const setting *s, int x) {
    memcpy((char *)d + s->at, &x, sizeof x);
}

int dp_drop_bits(const char *text) {
    double x;
    if (dp_number_real(text, 0x1p-1000, DP_DROP_BITS_MOST, &x) != DP_NUMBER_OK) return 0;
    if (x >= 1) return (int)x;
    int e;
    const double m = frexp(x, &e); /* x = m 2^e, m from 0.5 to below 1: -log2 x is 1 - e or less */
    return x < 0.5 ? m == 0.5 ? 1 - e : -e : 1;
}

/* "16:32" as their sum; 0: not understood. */
static int sum_of_lengths(const char *text) {
    int sum = 0;
    while (text) {
        char *end;
        const long n = strtol(text, &end, 10);
        if (end == text || (*end && *end != ':') || n < 8 || n > DP_CHUNK_MOST || (n & (n - 1)))
            return 0;
        sum |= (int)n;
        text = *end ? end + 1 : NULL;
    }
    return sum;
}

/* The first n of FORMATS; -1: none of them. */
static int format_of(const char *value, size_t n) {
    for (size_t i = 0; i < n; i++)
        if (!strcmp(value, dp_formats[FORMATS[i]].name)) return (int)FORMATS[i];
    return -1;
}

/* The format of a state, which goes a head at a time but where it leaves. */
static int state_format(const char *value, int leaves) {
    for (int f = DP_FP16SR; f < DP_NSTORED; f++)
        if (!strcmp(value, dp_formats[f].name) && (leaves || !dp_stored_by_tensor((dp_format)f)))
            return f;
    return format_of(value, NSTORED);
}

/* 1: value was understood and stored. */
static int set_value(dp_design *d, const setting *s, const char *value) {
    const int stored = s->kind == A_FORMAT || s->kind == ALL_THAT_LEAVES;
    if (s->kind == A_NUMBER) {
        int64_t n;
        if (dp_number_int(value, 8, DP_CHUNK_MOST, &n)) return 0;
        put_at(d, s, (int)n);
        return 1;
    }
    if (stored || s->kind == AN_OPERAND) {
        const int f = format_of(value, stored ? NSTORED : sizeof FORMATS / sizeof *FORMATS);
        if (f >= 0 && s->kind == ALL_THAT_LEAVES)
            leave_in(d, (dp_format)f);
        else if (f >= 0)
            put_at(d, s, f);
        return f >= 0;
    }
    if (s->kind == A_STATE) {
        const int f = state_format(value, s->at == offsetof(dp_design, final_state));
        if (f >= 0) put_at(d, s, f);
        return f >= 0;
    }
    if (s->kind == A_DROP) {
        put_at(d, s, dp_drop_bits(value));
        return value_at(d, s) != 0;
    }
    if (s->kind == A_LENGTHS) {
        put_at(d, s, sum_of_lengths(value));
        return value_at(d, s) != 0;
    }
    for (int i = 0; i < s->nchoice; i++) {
        if (strcmp(value, s->choice[i])) continue;
        put_at(d, s, i);
        return 1;
    }
    return 0;
}

/* The words of a text: " chunk=N" of every setting. */
static void known_words(char *out, size_t size) {
    static const char *const value[] = {
        [A_NUMBER] = "N",   [A_FORMAT] = "F", [A_STATE] = "F",    [ALL_THAT_LEAVES] = "F",
        [AN_OPERAND] = "F", [A_DROP] = "E",   [A_LENGTHS] = "N:N"};
    snprintf(out, size, RECURRENT);
    for (int i = 0; i < NSETTINGS; i++) {
        const setting *s = &SETTINGS[i];
        dp_text_add(out, size, " %s=%s", s->key,
                    s->kind == A_CHOICE ? s->choice[0] : value[s->kind]);
        for (int c = 1; c < s->nchoice; c++)
            dp_text_add(out, size, "|%s", s->choice[c]);
    }
    dp_text_add(out, size, " TENSOR=F " UNDECLARED);
}

/* One tensor's format. -1: it is no tensor that leaves. */
static int set_leaving(dp_design *d, const char *name, const char *value, dp_err *e) {
    for (int i = 0; i < DP_NRESULTS; i++) {
        if (!dp_leaves(i) || strcmp(name, dp_result_fields[i].name)) continue;
        const int f = format_of(value, NSTORED);
        if (f < 0)
            return dp_fail(e, DP_EINPUT, "design: %s=%s: %s is fp64, fp32, bf16 or fp16", name,
                           value, name);
        d->out[i] = (dp_format)f;
        return DP_OK;
    }
    return -1;
}

static dp_status set_word(dp_design *d, char *word, dp_err *e) {
    if (!strcmp(word, RECURRENT)) {
        d->chunk = 0;
        return DP_OK;
    }
    if (!strcmp(word, UNDECLARED)) {
        d->undeclared = 1;
        return DP_OK;
    }
    char *value = strchr(word, '=');
    if (value) *value++ = 0;
    for (int i = 0; value && i < NSETTINGS; i++) {
        const setting *s = &SETTINGS[i];
        if (strcmp(word, s->key)) continue;
        if (set_value(d, s, value)) return DP_OK;
        return dp_fail(e, DP_EINPUT, "design: %s=%s: %s is %s", s->key, value, s->key, s->what);
    }
    const int leaving = value ? set_leaving(d, word, value, e) : -1;
    if (leaving >= 0) return (dp_status)leaving;
    char known[512];
    known_words(known, sizeof known);
    return dp_fail(e, DP_EINPUT, "design: %s%s%s: not one of %s", word, value ? "=" : "",
                   value ? value : "", known);
}

static void lengths_word(int sum, const char *key, char *out, size_t size) {
    snprintf(out, size, "%s", key);
    for (int length = 8, any = 0; length <= DP_CHUNK_MOST; length *= 2)
        if (sum & length) dp_text_add(out, size, "%c%d", any++ ? ':' : '=', length);
}

static void word_of(const dp_design *d, const setting *s, char *out, size_t size) {
    const int x = value_at(d, s);
    if (s->kind == A_NUMBER || s->kind == A_DROP)
        snprintf(out, size, "%s=%d", s->key, x);
    else if (s->kind == A_LENGTHS)
        lengths_word(x, s->key, out, size);
    else if (s->kind != A_CHOICE)
        snprintf(out, size, "%s=%s", s->key, dp_formats[x].name);
    else
        snprintf(out, size, "%s=%s", s->key, s->choice[x]);
}

void dp_design_text(const dp_design *d, char text[DP_DESIGN_TEXT]) {
    dp_design plain = dp_design_of(d->base);
    strcpy(text, d->undeclared ? UNDECLARED : "");
    for (int i = 0; i < NSETTINGS; i++) {
        const setting *s = &SETTINGS[i];
        char word[32];
        if (s->kind == ALL_THAT_LEAVES && !leaves_alike(d)) continue;
        if (value_at(d, s) == value_at(&plain, s)) continue;
        if (s->at == offsetof(dp_design, chunk) && !d->chunk)
            snprintf(word, sizeof word, RECURRENT);
        else
            word_of(d, s, word, sizeof word);
        dp_text_add(text, DP_DESIGN_TEXT, "%s%s", *text ? "," : "", word);
    }
    for (int i = 0; i < DP_NRESULTS && !leaves_alike(d); i++)
        if (dp_leaves(i) && d->out[i] != plain.out[i])
            dp_text_add(text, DP_DESIGN_TEXT, "%s%s=%s", *text ? "," : "", dp_result_fields[i].name,
                        dp_formats[d->out[i]].name);
}

/* Are factors and out all that it says? */
static int says_formats_alone(const dp_design *d) {
    const dp_design formats = dp_design_formats(d);
    char text[DP_DESIGN_TEXT], alone[DP_DESIGN_TEXT];
    dp_design_text(d, text);
    dp_design_text(&formats, alone);
    return !strcmp(text, alone);
}

dp_status dp_design_parse(const char *text, dp_base base, dp_design *d, dp_err *e) {
    DP_OWN char *words = dp_strdup(text);
    dp_status st = DP_OK;
    *d = dp_design_of(base);
    for (char *w = words, *next; w && *w && !st; w = next) {
        next = strchr(w, ',');
        if (next) *next++ = 0;
        st = set_word(d, w, e);
    }
    const int begins = d->sending.begins;
    d->sending = dp_sending_of(d->sending.exchange, d->sending.payload, DP_SENDERS);
    d->sending.begins = begins && d->sending.exchange == DP_EXCHANGE_ALLGATHER;
    if (!st && d->undeclared && !says_formats_alone(d))
        return dp_fail(e, DP_EINPUT,
                       "design: undeclared: only factors, out, final_state and names of tensors "
                       "may stand beside "
                       "it");
    if (!st && d->chunk_backward && (!d->chunk || d->chunks))
        return dp_fail(e, DP_EINPUT, "design: chunk_backward=%d: does not go with %s",
                       d->chunk_backward, d->chunk ? "chunks=N:N" : RECURRENT);
    if (d->chunk_backward == d->chunk) d->chunk_backward = 0;
    if (!st && d->read_kept && d->chunk)
        return dp_fail(e, DP_EINPUT, "design: read=kept: goes with " RECURRENT);
    if (!st && d->fold_beta && !(d->product && d->chunk))
        return dp_fail(e, DP_EINPUT,
                       "design: beta=inverse: no inverse is formed (%s); inverse=product says that "
                       "one is",
                       d->chunk ? "inverse=solve" : RECURRENT);
    return st;
}

dp_design dp_design_of_pass(const dp_design *d, int backward) {
    dp_design x = *d;
    if (backward && d->chunk_backward) x.chunk = d->chunk_backward;
    x.chunk_backward = 0;
    return x;
}

int dp_design_same(const dp_design *a, const dp_design *b) {
    for (int i = 0; i < NSETTINGS; i++)
        if (SETTINGS[i].kind < A_DROP && SETTINGS[i].kind != ALL_THAT_LEAVES &&
            value_at(a, &SETTINGS[i]) != value_at(b, &SETTINGS[i]))
            return 0;
    for (int i = 0; i < DP_NRESULTS; i++)
        if (dp_leaves(i) && a->out[i] != b->out[i]) return 0;
    return a->base == b->base;
}

dp_format dp_design_kept(const dp_design *d) {
    for (int i = 0; i < NSTORED; i++)
        if (FORMATS[i] == d->factors) return d->factors;
    return DP_FP32;
}

double dp_store(dp_format f, double x) {
    if (f == DP_FP64) return x;
    if (f == DP_BF16) return dp_bf16d(x);
    if (f == DP_FP16) return dp_fp16_from_bits(dp_fp16_bits(x));
    if (f == DP_TF32) return dp_tf32_core((float)x);
    if (f == DP_TF32RZ) return dp_tf32rz_core((float)x);
    return dp_fp32(x);
}

void dp_store_all(dp_format f, double *x, int64_t n) {
    for (int64_t i = 0; x && f != DP_FP64 && i < n; i++)
        x[i] = dp_store(f, x[i]);
}
