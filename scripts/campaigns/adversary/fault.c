/* The faults: a row each. Knobs change what the arithmetic reads; the others change one tensor
 * before, while or after it is rounded to the format of the result. */
#include "adversary.h"
#include <errno.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>

static const knobs NEUTRAL = {.beta_gain = 1,
                              .gate_gain = 1,
                              .bias_gain = 1,
                              .scale_gain = 1,
                              .s0_gain = 1,
                              .dstate_gain = 1,
                              .carry_gain = 1,
                              .dcarry_gain = 1,
                              .boundary_gain = 1,
                              .tail_gain = 1,
                              .last_head_gain = 1,
                              .l2_eps = 1e-6f};
knobs knob;

/* The unit of a size, and the sizes that scripts/campaigns/adversary/run tries. */
typedef enum { TIMES, RELATIVE, SHARE, ULPS, COUNT, SCALES } scale;
static const char *const scale_names[SCALES] = {"times", "relative", "share", "ulps", "count"};

/* The change of a knob: 1 + size, 1 - size, size, its neutral value times size. */
typedef enum { PLUS, MINUS, SET, MULTIPLY } change;

typedef struct {
    const fault *f;
    const problem *p;
    format ulps; /* whose ulps a bias is counted in */
    const double *ref;
    double unit; /* expected error of the tensor, relative to it */
    tensor *t;
} target;

typedef void act(const target *a);
static act scale_all, scale_head, scale_chunk, scale_row, scale_rank_first, scale_half;
static act swap_tokens, lose_entries, scale_empty, add_bias, add_noise, grow_error, noisy_row;

typedef struct {
    const char *name;
    scale is;
    act *on;     /* a finished tensor; NULL: none */
    size_t knob; /* where there is no tensor */
    change how;
    const char *tensors; /* those that scripts/campaigns/adversary/run tries */
    int ranks;           /* that it needs */
    const char *what;
} fault_row;

#define KNOB(field, change) .knob = offsetof(knobs, field), .how = change
#define TOKENS "o dq dk dv dg dbeta"

static const fault_row FAULTS[] = {
    {"scale", TIMES, scale_all, .tensors = TOKENS " dA_log ddt_bias final_state ds0",
     .what = "the whole tensor times 1 + size x its expected error"},
    {"head", TIMES, scale_head, .tensors = "o dg", .what = "the same in one head"},
    {"chunk", TIMES, scale_chunk, .tensors = "o dg",
     .what = "the same in one chunk of 64 tokens of one head"},
    {"row", TIMES, scale_row, .tensors = "o dk dg",
     .what = "the same in one token's row of one head"},
    {"rank-first", TIMES, scale_rank_first, .tensors = "o", .ranks = 2,
     .what = "the same in the first token of a rank but the first, of one head"},
    {"half", TIMES, scale_half, .tensors = "o",
     .what = "upper half of the columns times 1 - size x the expected error"},
    {"swap-tokens", SHARE, swap_tokens, .tensors = "o",
     .what = "two neighbouring tokens of one head mixed by that share"},
    {"lost", COUNT, lose_entries, .tensors = "o", .what = "that many entries are zero"},
    {"empty", RELATIVE, scale_empty, .tensors = "final_state ds0",
     .what = "states of empty sequences times 1 + size"},
    {"bias", ULPS, add_bias, .tensors = "o dk dg final_state",
     .what = "toward zero by that many ulps of the design's output, before rounding"},
    {"ulp", ULPS, NULL, .tensors = "o",
     .what = "plus that many ulps of the design's output, after rounding"},
    {"truncate", SHARE, NULL, .tensors = "o dk dv dg",
     .what = "that share of the entries truncated to the design's output, not rounded"},
    {"grow", TIMES, grow_error, .tensors = TOKENS " dA_log ddt_bias final_state ds0",
     .what = "the tensor's own error, made that many times the expected one"},
    {"noise", TIMES, add_noise, .tensors = "o dg dA_log final_state",
     .what = "noise of that many times the expected error, in proportion to each row"},
    {"row-noise", TIMES, noisy_row, .tensors = "o dq dk dv dg",
     .what = "the same in one token's row of one head"},
    {"skip-tokens", COUNT, NULL, .tensors = "dA_log ddt_bias",
     .what = "sum over tokens without that many"},
    {"skip-chunks", COUNT, NULL, .tensors = "dA_log ddt_bias",
     .what = "sum over tokens without that many chunks of 64"},
    {"beta", RELATIVE, KNOB(beta_gain, PLUS), .what = "beta times 1 + size"},
    {"gate", RELATIVE, KNOB(gate_gain, PLUS), .what = "log gate times 1 + size"},
    {"dt-bias", RELATIVE, KNOB(bias_gain, MINUS), .what = "dt_bias times 1 - size"},
    {"scale-factor", RELATIVE, KNOB(scale_gain, PLUS), .what = "scale times 1 + size"},
    {"initial-state", RELATIVE, KNOB(s0_gain, MINUS), .what = "initial state times 1 - size"},
    {"dstate", RELATIVE, KNOB(dstate_gain, MINUS),
     .what = "gradient of the final state times 1 - size"},
    {"carry", RELATIVE, KNOB(carry_gain, MINUS),
     .what = "state times 1 - size at one boundary of chunks"},
    {"dcarry", RELATIVE, KNOB(dcarry_gain, MINUS),
     .what = "gradient of the state times 1 - size at one boundary of chunks"},
    {"dg-boundary", SHARE, KNOB(boundary_gain, MINUS),
     .what = "rowsum(dS o S) at ends of chunks missing in dg (chunks only)"},
    {"state-boundary", SHARE, KNOB(state_boundary, SET),
     .what = "the same term from the states, whose rounding does not cancel (chunks only)"},
    {"end-decay", SHARE, KNOB(end_decay, SET),
     .what = "decay to the chunk's end taken from the token before it (chunks only)"},
    {"decayed-first", SHARE, KNOB(decayed_first, SET),
     .what = "u - w S reads the state decayed to the chunk's end (chunks only)"},
    {"ragged-tail", SHARE, KNOB(tail_gain, MINUS),
     .what = "last token of a ragged chunk does not write"},
    {"gva-sum", SHARE, KNOB(last_head_gain, MINUS),
     .what = "dq and dk without the last value head of each group"},
    {"l2-eps", TIMES, KNOB(l2_eps, MULTIPLY), .what = "eps of the norm 1e-6 times size"},
    {"l2-eps-less", SHARE, KNOB(l2_eps, MINUS), .what = "eps of the norm 1e-6 (1 - size)"},
    {"softplus", SHARE, KNOB(naive_softplus, SET), .what = "softplus as log(1 + exp x)"},
    {"neighbour-gate", SHARE, KNOB(neighbour_gate, SET), .what = "gate of the token before"},
    {"rounded-gate", SHARE, KNOB(rounded_gate, SET), .what = "log gate rounded to bf16"},
    {"rounded-decay", SHARE, KNOB(rounded_decay, SET), .what = "exp(gate) rounded to bf16"},
    {"rounded-A_log", SHARE, KNOB(rounded_A_log, SET), .what = "A_log rounded to bf16"},
    {"rounded-cumsum", SHARE, KNOB(rounded_cumsum, SET),
     .what = "running sum of gates rounded to bf16 (chunks only)"},
    {"rounded-state", SHARE, KNOB(rounded_state, SET),
     .what = "state rounded to bf16 after every chunk"},
    {"rounded-E", SHARE, KNOB(rounded_E, SET), .what = "dbeta from a residual in bf16"},
    {"rounded-norm", SHARE, KNOB(rounded_y, SET),
     .what = "gradient of the norm from its result in bf16"},
    {"rounded-dq", SHARE, KNOB(rounded_dq, SET), .what = "dg from dq and dk in bf16 (chunks)"},
    {"undecayed", SHARE, KNOB(undecayed, SET), .what = "residual reads the state before its decay"},
    {"swapped-heads", SHARE, KNOB(swapped_heads, SET),
     .what = "value head hv reads key head hv % H"},
    {"leak", SHARE, KNOB(leak, SET), .what = "state of the sequence before enters the next"},
    {"micro-steps", SHARE, KNOB(micro_steps, SET),
     .what = "keys of a token see each other (chunks, R > 1)"},
    {"plain-dv", SHARE, KNOB(plain_dv, SET), .what = "dv without beta"},
    {"plain-dbeta", SHARE, KNOB(plain_dbeta, SET),
     .what = "dbeta without the derivative of the sigmoid"},
    {"cut-series", SHARE, KNOB(cut_series, SET),
     .what = "last factor of the Neumann product missing (designs that have one)"},
    {"transposed-state", SHARE, KNOB(transposed_state, SET),
     .what = "initial state read [V][K] (K = V)"},
};
enum { NFAULTS = sizeof FAULTS / sizeof *FAULTS };

const char *const tensor_names[TENSORS] = {"o",      "final_state", "dq",     "dk",       "dv",
                                           "dg",     "dbeta",       "dA_log", "ddt_bias", "ds0",
                                           "derase", "dwrite",      "dlr_a",  "dlr_b"};

static int is(const fault *f, const char *name) {
    return f->row >= 0 && !strcmp(FAULTS[f->row].name, name);
}

static int tensor_find(const char *name) {
    for (int i = 0; i < TENSORS; i++)
        if (!strcmp(tensor_names[i], name)) return i;
    return -1;
}

/* ---- from the environment ---- */

static int parse_number(const char *text, double *x) {
    char *end;
    errno = 0;
    *x = strtod(text, &end);
    return *text && !*end && !errno && isfinite(*x) ? 0 : -1;
}

static int parse_units(const char *text, fault *f, char why[256]) {
    char copy[1024], *save;
    snprintf(copy, sizeof copy, "%s", text);
    for (char *key = strtok_r(copy, ",", &save); key; key = strtok_r(NULL, ",", &save)) {
        char *value = strchr(key, '=');
        if (value) *value++ = 0;
        const int at = tensor_find(key);
        if (at < 0 || !value || parse_number(value, &f->unit[at])) {
            snprintf(why, 256, "ADVERSARY_EXPECTED: '%.60s' is no tensor=number", key);
            return -1;
        }
    }
    return 0;
}

static int acts_on_tensor(const fault_row *r) { return r->tensors != NULL; }

/* NAME[.TENSOR]:SIZE */
static int parse_fault(const char *text, fault *f, char why[256]) {
    char copy[128];
    snprintf(copy, sizeof copy, "%s", text);
    char *size = strrchr(copy, ':');
    if (size) *size++ = 0;
    char *name = strchr(copy, '.');
    if (name) *name++ = 0;
    f->row = -1;
    for (int i = 0; i < NFAULTS; i++)
        if (!strcmp(FAULTS[i].name, copy)) f->row = i;
    f->tensor = name ? tensor_find(name) : -1;
    const char *wrong = NULL;
    if (f->row < 0)
        wrong = "no such fault";
    else if (name && f->tensor < 0)
        wrong = "no such tensor";
    else if (acts_on_tensor(&FAULTS[f->row]) != !!name)
        wrong = "with or without .TENSOR";
    else if (!size || parse_number(size, &f->size))
        wrong = "no :SIZE";
    if (wrong) snprintf(why, 256, "ADVERSARY_FAULT='%.60s': %s", text, wrong);
    return wrong ? -1 : 0;
}

int fault_from_environment(fault *f, char why[256]) {
    const char *text = getenv("ADVERSARY_FAULT");
    const char *units = getenv("ADVERSARY_EXPECTED");
    const char *seed = getenv("ADVERSARY_SEED");
    *f = (fault){.row = -1, .tensor = -1};
    f->seed = seed ? strtoull(seed, NULL, 10) : 1;
    if (units && parse_units(units, f, why)) return -1;
    return text && *text ? parse_fault(text, f, why) : 0;
}

void knobs_set(const fault *f) {
    knob = NEUTRAL;
    if (f->row < 0 || acts_on_tensor(&FAULTS[f->row])) return;
    const fault_row *r = &FAULTS[f->row];
    float *x = (float *)((char *)&knob + r->knob);
    const float neutral = *x, size = (float)f->size;
    if (r->how == PLUS) *x = 1 + size;
    if (r->how == MINUS) *x = neutral * (1 - size);
    if (r->how == SET) *x = size;
    if (r->how == MULTIPLY) *x = neutral * size;
}

int fault_needs_reference(const fault *f) {
    if (f->row < 0 || f->tensor < 0 || FAULTS[f->row].is != TIMES) return 0;
    return is(f, "grow") || f->unit[f->tensor] == 0;
}

int fault_skips_token(const fault *f, int which, int64_t T, int64_t t) {
    if (f->row < 0 || f->tensor != which) return 0;
    const int chunks = is(f, "skip-chunks");
    if (!chunks && !is(f, "skip-tokens")) return 0;
    const int64_t width = chunks ? 64 : 1;
    const int64_t count = (T + width - 1) / width;
    const int64_t first = (int64_t)(uniform01(f->seed, 7) * (double)count);
    return (t / width - first + count) % count < (int64_t)f->size;
}

/* ---- places ---- */

static double row_norm(const tensor *t, int64_t r) {
    double s = 0;
    for (int64_t i = r * t->width; i < (r + 1) * t->width; i++)
        s += (double)t->x[i] * (double)t->x[i];
    return sqrt(s);
}

/* A row of at least half the typical norm of the tensor's rows. */
static int64_t choose_row(const target *a) {
    double squares = 0;
    for (int64_t r = 0; r < a->t->rows; r++)
        squares += pow(row_norm(a->t, r), 2);
    const double typical = sqrt(squares / (double)a->t->rows);
    int64_t row = 0;
    for (uint64_t i = 0; i < 1000; i++) {
        row = (int64_t)(uniform01(a->f->seed, i) * (double)a->t->rows);
        if (row_norm(a->t, row) >= typical / 2) break;
    }
    return row;
}

/* Tokens of one head that the fault is in; states and parameters have none. */
static void tell_place(const target *a, int64_t row, int64_t tokens) {
    const int has = a->t->kind == OF_TOKENS;
    fprintf(stderr, "adversary: place tensor=%s token=%lld tokens=%lld head=%d\n",
            tensor_names[a->t->which], (long long)(has ? row / a->t->heads : -1),
            (long long)(has ? tokens : 0), (int)(row % a->t->heads));
}

static void scale_one(tensor *t, int64_t row, double by) {
    for (int64_t i = row * t->width; i < (row + 1) * t->width; i++)
        t->x[i] = (float)((double)t->x[i] * by);
}

/* ---- changes of a tensor ---- */

static void scale_all(const target *a) {
    for (int64_t r = 0; r < a->t->rows; r++)
        scale_one(a->t, r, 1 + a->f->size * a->unit);
}

static void scale_head(const target *a) {
    const int64_t row = choose_row(a);
    tell_place(a, row % a->t->heads, a->t->rows / a->t->heads);
    for (int64_t r = row % a->t->heads; r < a->t->rows; r += a->t->heads)
        scale_one(a->t, r, 1 + a->f->size * a->unit);
}

static void scale_chunk(const target *a) {
    const int64_t row = choose_row(a);
    const int64_t token = row / a->t->heads;
    int seq = 0;
    while (token >= a->p->cu[seq + 1])
        seq++;
    const int64_t from = a->p->cu[seq] + (token - a->p->cu[seq]) / 64 * 64;
    const int64_t to = from + 64 < a->p->cu[seq + 1] ? from + 64 : a->p->cu[seq + 1];
    tell_place(a, from * a->t->heads + row % a->t->heads, to - from);
    for (int64_t t = from; t < to; t++)
        scale_one(a->t, t * a->t->heads + row % a->t->heads, 1 + a->f->size * a->unit);
}

static void scale_row(const target *a) {
    const int64_t row = choose_row(a);
    tell_place(a, row, 1);
    scale_one(a->t, row, 1 + a->f->size * a->unit);
}

static void scale_rank_first(const target *a) {
    const int ranks = a->p->ranks;
    if (ranks < 2) return;
    const int64_t rank = 1 + (int64_t)(uniform01(a->f->seed, 0) * (ranks - 1));
    const int64_t row =
        rank * (a->p->T / ranks) * a->t->heads + (int64_t)(uniform01(a->f->seed, 1) * a->t->heads);
    tell_place(a, row, 1);
    scale_one(a->t, row, 1 + a->f->size * a->unit);
}

static void scale_half(const target *a) {
    for (int64_t r = 0; r < a->t->rows; r++)
        for (int64_t i = a->t->width / 2; i < a->t->width; i++)
            a->t->x[r * a->t->width + i] *= (float)(1 - a->f->size * a->unit);
}

static void swap_tokens(const target *a) {
    const int64_t heads = a->t->heads, width = a->t->width;
    int64_t row = choose_row(a);
    if (a->t->rows <= heads) return;
    if (row + heads >= a->t->rows) row -= heads;
    tell_place(a, row, 2);
    for (int64_t i = row * width; i < (row + 1) * width; i++) {
        float *x = &a->t->x[i], *y = &a->t->x[i + heads * width];
        const float move = (float)a->f->size * (*y - *x);
        *x += move;
        *y -= move;
    }
}

static void lose_entries(const target *a) {
    const int64_t n = a->t->rows * a->t->width;
    for (uint64_t i = 0; i < (uint64_t)a->f->size; i++)
        a->t->x[(int64_t)(uniform01(a->f->seed, i) * (double)n)] = 0;
}

static void scale_empty(const target *a) {
    for (int64_t r = 0; r < a->t->rows; r++) {
        const int64_t seq = r / a->t->heads;
        if (a->p->cu[seq] != a->p->cu[seq + 1]) continue;
        for (int64_t i = r * a->t->width; i < (r + 1) * a->t->width; i++)
            a->t->x[i] += (float)a->f->size * (a->t->x[i] != 0 ? a->t->x[i] : 1);
    }
}

static void add_bias(const target *a) {
    for (int64_t i = 0; i < a->t->rows * a->t->width; i++) {
        const float x = a->t->x[i];
        a->t->x[i] = x - (float)a->f->size * copysignf(ulp_of(a->ulps, x), x);
    }
}

static void noisy(const target *a, int64_t row) {
    const double size = a->f->size * a->unit * row_norm(a->t, row) / sqrt((double)a->t->width);
    for (int64_t i = row * a->t->width; i < (row + 1) * a->t->width; i++)
        a->t->x[i] += (float)(size * gaussian(a->f->seed, (uint64_t)i));
}

static void add_noise(const target *a) {
    for (int64_t r = 0; r < a->t->rows; r++)
        noisy(a, r);
}

static void noisy_row(const target *a) {
    const int64_t row = choose_row(a);
    tell_place(a, row, 1);
    noisy(a, row);
}

/* Error and reference of the whole tensor, in the Frobenius norm. */
static void norms_of(const target *a, double *error, double *size) {
    double e = 0, s = 0;
    for (int64_t i = 0; i < a->t->rows * a->t->width; i++) {
        const double d = (double)a->t->x[i] - a->ref[i];
        e += d * d;
        s += a->ref[i] * a->ref[i];
    }
    *error = sqrt(e);
    *size = sqrt(s);
}

static void grow_error(const target *a) {
    double error, size;
    norms_of(a, &error, &size);
    if (error == 0) return;
    const double by = a->f->size * a->unit * size / error;
    for (int64_t i = 0; i < a->t->rows * a->t->width; i++)
        a->t->x[i] = (float)(a->ref[i] + by * ((double)a->t->x[i] - a->ref[i]));
}

static double unit_of(const target *a) {
    double error = 0, size = 1;
    if (a->f->unit[a->t->which] > 0 || !a->ref) return a->f->unit[a->t->which];
    norms_of(a, &error, &size);
    return size > 0 ? error / size : 0;
}

void fault_before_rounding(const fault *f, const problem *p, format ulps, const double *ref,
                           tensor *t) {
    if (f->row < 0 || f->tensor != t->which || !FAULTS[f->row].on || t->rows == 0) return;
    if (t->kind != OF_TOKENS && FAULTS[f->row].on == scale_chunk) return;
    target a = {f, p, ulps, ref, 0, t};
    a.unit = unit_of(&a);
    FAULTS[f->row].on(&a);
}

void fault_round(const fault *f, format to, format ulps, tensor *t) {
    const int mine = f->tensor == t->which;
    const double truncated = mine && is(f, "truncate") ? f->size : 0;
    const float more = mine && is(f, "ulp") ? (float)f->size : 0;
    for (int64_t i = 0; i < t->rows * t->width; i++) {
        const int cut = truncated > 0 && uniform01(f->seed, (uint64_t)i) < truncated;
        const float x = cut ? truncate_to(ulps, t->x[i]) : round_to(to, t->x[i]);
        t->x[i] = x + more * ulp_of(ulps, x);
    }
}

const char *adversary_faults(void) {
    static char text[16384];
    size_t at = 0;
    for (int i = 0; i < NFAULTS; i++) {
        const fault_row *r = &FAULTS[i];
        at += (size_t)snprintf(text + at, sizeof text - at, "%s\t%s\t%s\t%d\t%s\n", r->name,
                               r->tensors ? r->tensors : "", scale_names[r->is],
                               r->ranks ? r->ranks : 1, r->what);
    }
    return text;
}
