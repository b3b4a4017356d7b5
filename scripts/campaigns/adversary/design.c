/* The designs: a row each, and the text by which a row or its changes are chosen. */
#include "adversary.h"
#include <math.h>
#include <stdio.h>
#include <stdlib.h>

#define PLAIN .inverse = SUBSTITUTION, .output = FP32
#define ROUNDED(f, how, out) .factors = f, .values = f, .stored = 1, .inverse = how, .output = out
#define FLA ROUNDED(BF16, EXPLICIT, BF16)
#define ALL_TF32(f) .factors = f, .values = f, .scores = f, .inverse = EXPLICIT

const design designs[] = {
    {.name = "recurrent", .base = "fp32", PLAIN},
    {.name = "recurrent-pairwise", .base = "fp32", .sums = PAIRWISE, PLAIN},
    {.name = "chunk16", .base = "fp32", .chunk = 16, PLAIN},
    {.name = "chunk32", .base = "fp32", .chunk = 32, PLAIN},
    {.name = "chunk64", .base = "fp32", .chunk = 64, PLAIN},
    {.name = "chunk128", .base = "fp32", .chunk = 128, PLAIN},
    {.name = "chunk64-reversed", .base = "fp32", .chunk = 64, .sums = REVERSED, PLAIN},
    {.name = "chunk64-pairwise", .base = "fp32", .chunk = 64, .sums = PAIRWISE, PLAIN},
    {.name = "chunk16-neumann", .base = "fp32", .chunk = 16, .inverse = NEUMANN},
    {.name = "chunk64-doubling", .base = "fp32", .chunk = 64, .inverse = DOUBLING},
    {.name = "recurrent-bf16", .base = "bf16", .inverse = SUBSTITUTION, .output = BF16},
    {.name = "recurrent-fp16", .base = "bf16", .inverse = SUBSTITUTION, .output = FP16},
    {.name = "recurrent-state-bf16",
     .base = "bf16",
     .state = BF16,
     .state_every = 1,
     .inverse = SUBSTITUTION,
     .output = BF16},
    {.name = "recurrent-states-bf16",
     .base = "bf16",
     .state = BF16,
     .state_every = 1,
     .both_states = 1,
     .inverse = SUBSTITUTION,
     .output = BF16},
    {.name = "recurrent-state-bf16-64",
     .base = "bf16",
     .state = BF16,
     .state_every = 64,
     .inverse = SUBSTITUTION,
     .output = BF16},
    {.name = "recurrent-state-sr",
     .base = "bf16",
     .state = BF16,
     .state_every = 1,
     .stochastic = 1,
     .inverse = SUBSTITUTION,
     .output = BF16},
    {.name = "chunk64-bf16", .base = "bf16", .chunk = 64, FLA},
    {.name = "chunk64-bf16-out-fp32", .base = "bf16", .chunk = 64, ROUNDED(BF16, EXPLICIT, FP32)},
    {.name = "chunk64-bf16-reversed", .base = "bf16", .chunk = 64, .sums = REVERSED, FLA},
    {.name = "chunk64-bf16-state-bf16",
     .base = "bf16",
     .chunk = 64,
     .state = BF16,
     .state_every = 64,
     FLA},
    {.name = "chunk64-bf16-states-bf16",
     .base = "bf16",
     .chunk = 64,
     .state = BF16,
     .state_every = 64,
     .both_states = 1,
     FLA},
    {.name = "chunk64-bf16-state-sr",
     .base = "bf16",
     .chunk = 64,
     .state = BF16,
     .state_every = 64,
     .stochastic = 1,
     FLA},
    {.name = "chunk16-gated-bf16", .base = "bf16", .chunk = 16, .scores = BF16, FLA},
    {.name = "chunk32-gated-bf16", .base = "bf16", .chunk = 32, .scores = BF16, FLA},
    {.name = "chunk16-scored-bf16", .base = "bf16", .chunk = 16, .scores = BF16, .scored = 1, FLA},
    {.name = "chunk16-decays-bf16",
     .base = "bf16",
     .chunk = 16,
     .scores = BF16,
     .scored = 1,
     .decays = BF16,
     FLA},
    {.name = "chunk64-folded-bf16", .base = "bf16", .chunk = 64, .folded = 1, FLA},
    {.name = "chunk64-inputs-bf16", .base = "bf16", .chunk = 64, .inputs = BF16, FLA},
    {.name = "chunk16-neumann-bf16", .base = "bf16", .chunk = 16, ROUNDED(BF16, NEUMANN, BF16)},
    {.name = "chunk64-doubling-bf16", .base = "bf16", .chunk = 64, ROUNDED(BF16, DOUBLING, BF16)},
    {.name = "chunk64-fp16", .base = "bf16", .chunk = 64, ROUNDED(FP16, EXPLICIT, BF16)},
    {.name = "chunk64-fp16-out-fp16", .base = "bf16", .chunk = 64, ROUNDED(FP16, EXPLICIT, FP16)},
    {.name = "chunk64-fp16-factors",
     .base = "bf16",
     .chunk = 64,
     .factors = FP16,
     .values = BF16,
     .stored = 1,
     .inverse = EXPLICIT,
     .output = BF16},
    {.name = "chunk64-tf32", .base = "bf16", .chunk = 64, ALL_TF32(TF32), .output = BF16},
    {.name = "chunk64-tf32rz", .base = "bf16", .chunk = 64, ALL_TF32(TF32RZ), .output = BF16},
    {.name = "chunk64-tf32-out-fp32", .base = "fp32", .chunk = 64, ALL_TF32(TF32)},
    {.name = "chunk64-tf32rz-out-fp32", .base = "fp32", .chunk = 64, ALL_TF32(TF32RZ)},
};
const int ndesign = sizeof designs / sizeof *designs;

static const char *const inverse_names[INVERSES] = {"substitution", "explicit", "neumann",
                                                    "doubling", "merged"};
static const char *const order_names[ORDERS] = {"in-order", "reversed", "pairwise"};

static int find(const char *const *names, int n, const char *name) {
    for (int i = 0; i < n; i++)
        if (!strcmp(names[i], name)) return i;
    return -1;
}

typedef struct {
    const char *key;
    size_t at; /* an int of struct design */
    const char *const *names;
    int n; /* 0: a number */
} design_key;

/* The enumerations have the size of an int (checked below). */
static const design_key KEYS[] = {
    {"chunk", offsetof(design, chunk), NULL, 0},
    {"factors", offsetof(design, factors), format_names, FORMATS},
    {"values", offsetof(design, values), format_names, FORMATS},
    {"stored", offsetof(design, stored), NULL, 0},
    {"scores", offsetof(design, scores), format_names, FORMATS},
    {"decays", offsetof(design, decays), format_names, FORMATS},
    {"scored", offsetof(design, scored), NULL, 0},
    {"inverse", offsetof(design, inverse), inverse_names, INVERSES},
    {"folded", offsetof(design, folded), NULL, 0},
    {"inputs", offsetof(design, inputs), format_names, FORMATS},
    {"sums", offsetof(design, sums), order_names, ORDERS},
    {"state", offsetof(design, state), format_names, FORMATS},
    {"every", offsetof(design, state_every), NULL, 0},
    {"stochastic", offsetof(design, stochastic), NULL, 0},
    {"both", offsetof(design, both_states), NULL, 0},
    {"output", offsetof(design, output), format_names, FORMATS},
    {"fast", offsetof(design, fast), NULL, 0},
};
_Static_assert(sizeof(format) == sizeof(int), "keys are set as ints");

static int set_key(design *d, const char *key, const char *value, char why[256]) {
    for (size_t i = 0; i < sizeof KEYS / sizeof *KEYS; i++) {
        const design_key *k = &KEYS[i];
        if (strcmp(k->key, key)) continue;
        char *end;
        const long number = strtol(value, &end, 10);
        const int x = k->n ? find(k->names, k->n, value) : *end ? -1 : (int)number;
        if (x < 0) {
            snprintf(why, 256, "ADVERSARY_DESIGN: %s = '%.60s' is not known", key, value);
            return -1;
        }
        memcpy((char *)d + k->at, &x, sizeof x);
        return 0;
    }
    snprintf(why, 256, "ADVERSARY_DESIGN: no key '%.60s'", key);
    return -1;
}

/* Combinations that the two methods to compute a head cannot have. */
static int check(const design *d, char why[256]) {
    const char *wrong = NULL;
    if (d->chunk > 256) wrong = "chunk is at most 256";
    if (!d->chunk && (d->scores || d->scored || d->decays)) wrong = "scores belong to chunks";
    if (d->chunk && d->state && d->state_every != 64 && d->state_every != d->chunk)
        wrong = "in chunks the state is rounded every 64 tokens or every chunk";
    if (d->stored && (d->factors == TF32RZ || d->values == TF32RZ))
        wrong = "tf32rz is a format of operands, not of storage";
    if (wrong) snprintf(why, 256, "ADVERSARY_DESIGN: %s", wrong);
    return wrong ? -1 : 0;
}

int design_parse(const char *text, design *d, char why[256]) {
    char copy[256], *save;
    snprintf(copy, sizeof copy, "%s", text && *text ? text : "chunk64");
    const char *name = strtok_r(copy, ",", &save);
    int at = 0;
    while (at < ndesign && strcmp(designs[at].name, name))
        at++;
    if (at == ndesign) {
        snprintf(why, 256, "ADVERSARY_DESIGN: no design '%.60s'", name);
        return -1;
    }
    *d = designs[at];
    for (char *key = strtok_r(NULL, ",", &save); key; key = strtok_r(NULL, ",", &save)) {
        char *value = strchr(key, '=');
        if (value) *value++ = 0;
        if (set_key(d, key, value ? value : "", why)) return -1;
    }
    return check(d, why);
}

/* Is this how words of ref/vocabulary/design.h mean it? They know no state that is kept for several
 * tokens and no random rounding. They have one format for all operands of a chunk, which tf32 is
 * not stored in. */
static int has_words(const design *d) {
    if (d->stochastic) return 0;
    if (!d->chunk) return !d->factors && !d->values && (!d->state || d->state_every == 1);
    if (d->state && d->chunk != d->state_every) return 0;
    if (d->chunk < 8 || d->factors != d->values) return 0;
    const int tf32 = d->factors == TF32 || d->factors == TF32RZ;
    if ((d->factors && !tf32) != d->stored) return 0;
    return !d->scores || d->scores == d->factors;
}

int design_declares(const design *d, char *text, size_t size) {
    const int bf16 = !strcmp(d->base, "bf16");
    char chunk[16];
    const char *word[12];
    int n = 0;
    if (!has_words(d)) return 0;
    snprintf(chunk, sizeof chunk, "chunk=%d", d->chunk);
    if (d->chunk != 64) word[n++] = d->chunk ? chunk : "recurrent";
    if (d->chunk && bf16 && d->factors == FP32) word[n++] = "factors=fp32";
    if (d->factors == FP16) word[n++] = "factors=fp16";
    if (d->factors == TF32) word[n++] = "factors=tf32";
    if (d->factors == TF32RZ) word[n++] = "factors=tf32rz";
    if (d->chunk && !bf16 && d->factors == BF16) word[n++] = "factors=bf16";
    if (d->state) word[n++] = d->state == FP16 ? "state=fp16" : "state=bf16";
    if (d->both_states) word[n++] = d->state == FP16 ? "dstate=fp16" : "dstate=bf16";
    if (bf16 && d->output == FP32) word[n++] = "out=fp32";
    if (d->output == FP16) word[n++] = "out=fp16";
    if (d->fast) word[n++] = "exp=fast";
    if (d->decays) word[n++] = d->decays == FP16 ? "decays=fp16" : "decays=bf16";
    if (d->inputs) word[n++] = "inputs=stored";
    if (d->scores) word[n++] = "scores=gated";
    if (d->chunk && bf16 && d->inverse == MERGED) word[n++] = "inverse=merged";
    if (d->scored) word[n++] = "keys=scored";
    if (d->chunk && !bf16 && d->inverse != SUBSTITUTION) word[n++] = "inverse=product";
    if (d->chunk && bf16 && d->inverse == SUBSTITUTION) word[n++] = "inverse=solve";
    if (d->folded) word[n++] = "beta=inverse";
    *text = 0;
    for (int i = 0; i < n; i++) {
        const size_t at = strlen(text);
        snprintf(text + at, size - at, "%s%s", i ? "," : "", word[i]);
    }
    return 1;
}

float units_of(const design *d, float g) { return d->fast ? g * 1.44269504f : g; }

float power_of(const design *d, float g) {
    if (!d->fast || g == 0) return expf(g);
    uint32_t bits;
    memcpy(&bits, &g, sizeof bits);
    return exp2f(g) * (float)(1 + (2 * uniform01(7, bits) - 1) * 0x1p-23);
}

float decay_by(const design *d, float g) { return round_to(d->decays, power_of(d, g)); }

double design_roundoff(const design *d) {
    const format used[] = {d->factors, d->values, d->scores, d->state, d->output};
    double u = 0;
    for (size_t i = 0; i < sizeof used / sizeof *used; i++) {
        const double v = unit_roundoff(used[i]);
        u = v > u ? v : u;
    }
    return u;
}

/* The declaration of NAME[,key=value..], "-": no words; and the base that it claims. */
const char *adversary_says(const char *text) {
    static char says[256];
    char why[256], words[160];
    design d;
    if (design_parse(text, &d, why)) return "";
    if (!design_declares(&d, words, sizeof words)) strcpy(words, "-");
    snprintf(says, sizeof says, "%s\t%s\t%s", d.base, words, d.state ? "state" : "");
    return says;
}

const char *adversary_designs(void) {
    static char text[8192];
    size_t at = 0;
    for (int i = 0; i < ndesign; i++) {
        char declares[128];
        if (!design_declares(&designs[i], declares, sizeof declares)) strcpy(declares, "-");
        at += (size_t)snprintf(text + at, sizeof text - at, "%s\t%s\t%s\t%s\n", designs[i].name,
                               designs[i].base, declares, designs[i].state ? "state" : "");
    }
    return text;
}
