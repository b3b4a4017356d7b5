/* Self-check. The fp64 reference is compared with derivatives by the complex step of a recurrence
 * of its own. Each design is compared with the reference, on random problems of every form of gate,
 * beta and keys.
 *
 *     check [DESIGN..]      exit status 0: all right, 1: something is wrong
 *
 * Limits: the error of a tensor, |got - reference|_F over |reference|_F, is at most 40 u of fp32
 * plus 4 u of the design's shortest format. It is five times as much in the sums dA_log and
 * ddt_bias, which cancel. The derivatives agree with the complex step to 1e-10. */
#include "adversary.h"
#include <complex.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>

/* A problem with its arrays, which can be moved by a complex number. */
typedef struct {
    problem p;
    int64_t cu[8];
    int64_t n[12];
    double *in[12]; /* in the order below */
    double *dout, *dfinal;
    int moved;  /* array .. */
    int64_t at; /* .. entry that has an imaginary part; -1: none */
} trial;

enum { Q, KEY, VAL, GATE, BETA, ALOG, BIAS, S0, ERASE, WRITE, LR_A, LR_B, INPUTS };
static const int gradient_of[INPUTS] = {T_DQ,    T_DK,  T_DV,     T_DG,     T_DBETA, T_DA,
                                        T_DBIAS, T_DS0, T_DERASE, T_DWRITE, T_DLR_A, T_DLR_B};
static const double STEP = 1e-60;

/* ---- the recurrence in complex numbers ---- */

static double complex input(const trial *t, int which, int64_t i) {
    const double x = t->in[which][i];
    return t->moved == which && t->at == i ? CMPLX(x, STEP) : x;
}

static double complex gate(const trial *a, int64_t t, int hv, int c) {
    const problem *p = &a->p;
    const double complex raw = input(a, GATE, (t * p->HV + hv) * p->Kg + c);
    if (p->gate_form == DP_SUBJECT_GATE_LOG) return raw;
    const double complex x = raw + input(a, BIAS, hv * p->Kg + c);
    const double complex A = cexp(input(a, ALOG, hv));
    if (p->gate_form == DP_SUBJECT_GATE_SOFTPLUS) return -A * clog(1 + cexp(x));
    return p->lower_bound / (1 + cexp(-A * x));
}

static double complex beta_of(const trial *a, int64_t i) {
    const double complex b = input(a, BETA, i);
    if (a->p.beta_form == DP_SUBJECT_BETA_PLAIN) return b;
    return (a->p.beta_form == DP_SUBJECT_BETA_SIGMOID2 ? 2 : 1) / (1 + cexp(-b));
}

static void vector(const trial *a, int which, int64_t row, double complex *x) {
    double complex s = 1e-6;
    for (int i = 0; i < a->p.K; i++) {
        x[i] = input(a, which, row * a->p.K + i);
        s += x[i] * x[i];
    }
    for (int i = 0; a->p.l2norm && i < a->p.K; i++)
        x[i] /= csqrt(s);
}

/* A key reads S along e, the state before or after the decay, and adds along k. */
static void key_step(const trial *a, int64_t row, const double complex *k,
                     const double complex *read, double complex *S) {
    const problem *p = &a->p;
    const int K = p->K, V = p->V;
    for (int i = 0; i < V; i++) {
        double complex E = input(a, VAL, row * V + i);
        if (p->write) E *= input(a, WRITE, row * V + i);
        for (int x = 0; (p->beta || p->erase) && x < K; x++)
            E -= (p->erase ? input(a, ERASE, row * K + x) : 1) * k[x] * read[x * V + i];
        for (int x = 0; x < K; x++)
            S[x * V + i] += k[x] * (p->beta ? beta_of(a, row) : 1) * E;
    }
}

/* One token: the new state, and the token's part of <o, dout>. */
static double complex step(const trial *a, int64_t t, int hv, double complex *S) {
    const problem *p = &a->p;
    const int K = p->K, V = p->V, R = p->R, h = hv / (p->HV / p->H);
    const int64_t row = t * p->HV + hv;
    double complex k[32], q[32], read[32 * 32], loss = 0;
    vector(a, Q, t * p->H + h, q);
    memcpy(read, S, sizeof *S * (size_t)(K * V));
    for (int x = 0; x < K; x++)
        for (int i = 0; i < V; i++)
            S[x * V + i] *= cexp(gate(a, t, hv, p->Kg == 1 ? 0 : x));
    for (int i = 0; p->lr_a && i < V; i++) {
        double complex seen = 0;
        for (int x = 0; x < K; x++)
            seen += input(a, LR_A, row * K + x) * read[x * V + i];
        for (int x = 0; x < K; x++)
            S[x * V + i] += input(a, LR_B, row * K + x) * seen;
    }
    for (int j = 0; j < R; j++) {
        if (j == 0 || p->in_turn) memcpy(read, S, sizeof *S * (size_t)(K * V));
        vector(a, KEY, (t * p->H + h) * R + j, k);
        key_step(a, row * R + j, k, read, S);
    }
    for (int x = 0; x < K; x++)
        for (int i = 0; i < V; i++)
            loss += a->dout[row * V + i] * p->scale * q[x] * S[x * V + i];
    return loss;
}

/* <o, dout> + <final_state, dfinal_state>. */
static double complex loss_of(const trial *a) {
    const problem *p = &a->p;
    const int64_t KV = (int64_t)p->K * p->V;
    double complex S[32 * 32], loss = 0;
    for (int n = 0; n < p->Nseq; n++)
        for (int hv = 0; hv < p->HV; hv++) {
            const int64_t at = ((int64_t)n * p->HV + hv) * KV;
            for (int64_t i = 0; i < KV; i++)
                S[i] = input(a, S0, at + i);
            for (int64_t t = p->cu[n]; t < p->cu[n + 1]; t++)
                loss += step(a, t, hv, S);
            for (int64_t i = 0; i < KV; i++)
                loss += a->dfinal[at + i] * S[i];
        }
    return loss;
}

/* ---- problems ---- */

typedef struct {
    const char *name;
    int H, HV, K, V, R, Kg, gate, beta, l2norm;
    double g_mean, g_scale, beta_low, beta_high;
    int64_t cu[5];
    enum { BY_BETA, IN_TURN, BY_GATES, BY_NOTHING, BY_FACTORS } by;
} form;

static const form FORMS[] = {
    {"log gates, grouped heads, packed",
     2,
     4,
     16,
     8,
     1,
     16,
     DP_SUBJECT_GATE_LOG,
     DP_SUBJECT_BETA_PLAIN,
     0,
     -0.05,
     0.03,
     0.1,
     0.9,
     {0, 70, 70, 77, 150}},
    {"softplus gates, norm, sigmoid",
     1,
     2,
     8,
     16,
     1,
     8,
     DP_SUBJECT_GATE_SOFTPLUS,
     DP_SUBJECT_BETA_SIGMOID,
     1,
     -4,
     1,
     -1,
     1,
     {0, 0, 100, 140, 140}},
    {"lower bound, norm, 2 sigmoid",
     2,
     2,
     16,
     16,
     1,
     16,
     DP_SUBJECT_GATE_LOWER_BOUND,
     DP_SUBJECT_BETA_SIGMOID2,
     1,
     -3,
     1,
     -1,
     1,
     {0, 40, 41, 100, 130}},
    {"one gate a head",
     1,
     2,
     16,
     8,
     1,
     1,
     DP_SUBJECT_GATE_SOFTPLUS,
     DP_SUBJECT_BETA_SIGMOID,
     1,
     -4,
     1,
     -1,
     1,
     {0, 130, 130, 200, 200}},
    {"two keys",
     1,
     2,
     16,
     8,
     2,
     16,
     DP_SUBJECT_GATE_LOG,
     DP_SUBJECT_BETA_PLAIN,
     1,
     -0.05,
     0.03,
     0.1,
     0.9,
     {0, 33, 33, 100, 140}},
    {"four keys",
     1,
     1,
     8,
     8,
     4,
     8,
     DP_SUBJECT_GATE_LOG,
     DP_SUBJECT_BETA_PLAIN,
     1,
     -0.05,
     0.03,
     0,
     0.5,
     {0, 33, 33, 70, 90}},
    {"three keys in turn",
     1,
     2,
     16,
     8,
     3,
     1,
     DP_SUBJECT_GATE_LOG,
     DP_SUBJECT_BETA_SIGMOID,
     1,
     -0.05,
     0.03,
     -1,
     1,
     {0, 33, 33, 70, 90},
     IN_TURN},
    {"erase and write",
     1,
     2,
     16,
     8,
     1,
     16,
     DP_SUBJECT_GATE_SOFTPLUS,
     DP_SUBJECT_BETA_PLAIN,
     1,
     -4,
     1,
     0.1,
     0.9,
     {0, 33, 33, 100, 140},
     BY_GATES},
    {"nothing erased",
     1,
     2,
     16,
     8,
     1,
     16,
     DP_SUBJECT_GATE_SOFTPLUS,
     DP_SUBJECT_BETA_PLAIN,
     0,
     -4,
     1,
     0,
     0,
     {0, 33, 33, 100, 140},
     BY_NOTHING},
    {"nothing erased, one gate",
     2,
     4,
     16,
     8,
     1,
     1,
     DP_SUBJECT_GATE_LOG,
     DP_SUBJECT_BETA_PLAIN,
     0,
     -0.05,
     0.03,
     0,
     0,
     {0, 33, 33, 100, 140},
     BY_NOTHING},
    {"factors",
     2,
     2,
     16,
     8,
     1,
     16,
     DP_SUBJECT_GATE_SOFTPLUS,
     DP_SUBJECT_BETA_PLAIN,
     0,
     -2,
     1,
     0,
     0,
     {0, 33, 33, 100, 140},
     BY_FACTORS},
};
enum { NFORMS = sizeof FORMS / sizeof *FORMS };

static double *random_array(int64_t n, uint64_t seed, double mean, double size) {
    double *x = doubles_of(n);
    for (int64_t i = 0; i < n; i++)
        x[i] = round_to(BF16, (float)(mean + size * gaussian(seed, (uint64_t)i)));
    return x;
}

static double *uniform_array(int64_t n, uint64_t seed, double low, double high) {
    double *x = doubles_of(n);
    for (int64_t i = 0; i < n; i++)
        x[i] = round_to(BF16, (float)(low + (high - low) * uniform01(seed, (uint64_t)i)));
    return x;
}

static trial *trial_new(const form *f, uint64_t seed) {
    trial *a = calloc(1, sizeof *a);
    problem *p = &a->p;
    memcpy(a->cu, f->cu, sizeof f->cu);
    *p = (problem){.abi = DP_SUBJECT_ABI,
                   .size = sizeof *p,
                   .H = f->H,
                   .HV = f->HV,
                   .K = f->K,
                   .V = f->V,
                   .R = f->R,
                   .Kg = f->Kg,
                   .Nseq = 4,
                   .gate_form = f->gate,
                   .beta_form = f->beta,
                   .l2norm = f->l2norm,
                   .backward = 1,
                   .ranks = 1,
                   .T = f->cu[4],
                   .tokens = f->cu[4],
                   .scale = 1 / sqrt(f->K),
                   .lower_bound = -5,
                   .input_format = "fp32",
                   .base = "fp32",
                   .chain = "fp32",
                   .cu = a->cu};
    const int64_t T = p->T, n[INPUTS] = {T * f->H * f->K,         T * f->H * f->R * f->K,
                                         T * f->HV * f->R * f->V, T * f->HV * f->Kg,
                                         T * f->HV * f->R,        f->HV,
                                         f->HV * f->Kg,           (int64_t)4 * f->HV * f->K * f->V,
                                         T * f->HV * f->K,        T * f->HV * f->V,
                                         T * f->HV * f->K,        T * f->HV * f->K};
    memcpy(a->n, n, sizeof n);
    const double unit = f->l2norm ? 1 : 1 / sqrt(f->K);
    a->in[Q] = random_array(n[Q], seed, 0, unit);
    a->in[KEY] = random_array(n[KEY], seed + 1, 0, unit);
    a->in[VAL] = random_array(n[VAL], seed + 2, 0, 1);
    a->in[GATE] = random_array(n[GATE], seed + 3, f->g_mean, f->g_scale);
    for (int64_t i = 0; f->gate == DP_SUBJECT_GATE_LOG && i < n[GATE]; i++)
        a->in[GATE][i] = -fabs(a->in[GATE][i]);
    a->in[BETA] = uniform_array(n[BETA], seed + 4, f->beta_low, f->beta_high);
    a->in[ALOG] = random_array(n[ALOG], seed + 5, 0, 0.3);
    a->in[BIAS] = random_array(n[BIAS], seed + 6, 0, 0.3);
    a->in[S0] = random_array(n[S0], seed + 7, 0, 0.5);
    a->dout = random_array(n[VAL] / f->R, seed + 8, 0, 1);
    a->dfinal = random_array(n[S0], seed + 9, 0, 0.3);
    p->q = a->in[Q];
    p->k = a->in[KEY];
    p->v = a->in[VAL];
    p->g = a->in[GATE];
    a->in[ERASE] = uniform_array(n[ERASE], seed + 10, 0.1, 0.9);
    a->in[WRITE] = uniform_array(n[WRITE], seed + 11, 0.1, 0.9);
    a->in[LR_A] = random_array(n[LR_A], seed + 12, 0, -0.7 * unit);
    a->in[LR_B] = random_array(n[LR_B], seed + 13, 0, 0.7 * unit);
    if (f->by == BY_BETA || f->by == IN_TURN) p->beta = a->in[BETA];
    p->in_turn = f->by == IN_TURN;
    if (f->by == BY_GATES) p->erase = a->in[ERASE], p->write = a->in[WRITE];
    if (f->by == BY_FACTORS) p->lr_a = a->in[LR_A], p->lr_b = a->in[LR_B];
    p->initial_state = a->in[S0];
    p->dout = a->dout;
    p->dfinal_state = a->dfinal;
    if (f->gate != DP_SUBJECT_GATE_LOG) p->A_log = a->in[ALOG];
    if (f->gate != DP_SUBJECT_GATE_LOG) p->dt_bias = a->in[BIAS];
    a->at = -1;
    return a;
}

static void trial_free(trial *a) {
    for (int i = 0; i < INPUTS; i++)
        free(a->in[i]);
    free(a->dout);
    free(a->dfinal);
    free(a);
}

/* ---- the two comparisons ---- */

/* Does the problem have the input that this is the gradient of? */
static int has_gradient(const problem *p, int tensor) {
    const void *of[TENSORS] = {[T_O] = p,
                               [T_FINAL] = p,
                               [T_DQ] = p,
                               [T_DK] = p,
                               [T_DV] = p,
                               [T_DG] = p,
                               [T_DS0] = p,
                               [T_DBETA] = p->beta,
                               [T_DA] = p->A_log,
                               [T_DBIAS] = p->A_log,
                               [T_DERASE] = p->erase,
                               [T_DWRITE] = p->write,
                               [T_DLR_A] = p->lr_a,
                               [T_DLR_B] = p->lr_b};
    return of[tensor] != NULL;
}

static int64_t size_of(const trial *a, int tensor) {
    if (tensor == T_O) return a->n[VAL] / a->p.R;
    if (tensor == T_FINAL) return a->n[S0];
    for (int i = 0; i < INPUTS; i++)
        if (gradient_of[i] == tensor) return a->n[i];
    return 0;
}

/* Derivatives of 6 entries of each input; 1: one is wrong. */
static int check_reference(trial *a, const char *name, const reference *ref) {
    double worst = 0;
    for (int i = 0; i < INPUTS; i++) {
        const double *want = ref->x[gradient_of[i]];
        double largest = 0;
        if (!has_gradient(&a->p, gradient_of[i])) continue;
        for (int64_t z = 0; z < a->n[i]; z++)
            largest = fmax(largest, fabs(want[z]));
        for (uint64_t s = 0; s < 6; s++) {
            a->moved = i;
            a->at = (int64_t)(uniform01((uint64_t)i, s) * (double)a->n[i]);
            const double got = cimag(loss_of(a)) / STEP;
            worst = fmax(worst, fabs(got - want[a->at]) / largest);
        }
        a->at = -1;
    }
    printf("%-36s reference against complex step %.1e\n", name, worst);
    return !(worst < 1e-10);
}

static double relative_error(int64_t n, const double *got, const double *want) {
    double e = 0, s = 0;
    for (int64_t i = 0; i < n; i++) {
        e += (got[i] - want[i]) * (got[i] - want[i]);
        s += want[i] * want[i];
    }
    return s > 0 ? sqrt(e / s) : sqrt(e);
}

static int is_sum(int which) { return which == T_DA || which == T_DBIAS; }

static double limit_of(const design *d, int which) {
    const double u = design_roundoff(d), fp32 = unit_roundoff(FP32);
    return (is_sum(which) ? 5 : 1) * (40 * fp32 + (u > fp32 ? 4 * u : 0));
}

/* Compares what a design wrote with the reference; 1: a tensor is off. */
static int compare(const trial *a, const design *d, const deltaproof_subject_call *c,
                   const reference *ref) {
    int wrong = 0;
    for (int which = 0; which < TENSORS; which++) {
        const double *got = deltaproof_subject_find(c, tensor_names[which]);
        if (!got) continue;
        const double e = relative_error(size_of(a, which), got, ref->x[which]);
        const int bad = !(e < limit_of(d, which));
        printf(" %s%s %.1e", bad ? "WRONG " : "", tensor_names[which], e);
        wrong |= bad;
    }
    return wrong;
}

static int check_design(const trial *a, const char *text, const reference *ref) {
    deltaproof_subject_tensor t[TENSORS];
    char why[256] = "";
    deltaproof_subject_call call = {.tensor = t, .why = why};
    design d;
    setenv("ADVERSARY_DESIGN", text, 1);
    for (int i = 0; i < TENSORS; i++)
        if (has_gradient(&a->p, i))
            t[call.count++] = (deltaproof_subject_tensor){.name = tensor_names[i],
                                                          .data = doubles_of(size_of(a, i))};
    printf("  %-26s", text);
    const int failed = design_parse(text, &d, why) || deltaproof_subject_run(&a->p, &call);
    const int wrong = failed || compare(a, &d, &call, ref);
    printf(" %s\n", why);
    for (int i = 0; i < call.count; i++)
        free(t[i].data);
    return wrong;
}

int main(int argc, char **argv) {
    int wrong = 0;
    for (int i = 0; i < NFORMS; i++) {
        trial *a = trial_new(&FORMS[i], 100 * (uint64_t)i + 1);
        reference ref;
        for (int j = 0; j < TENSORS; j++)
            ref.x[j] = doubles_of(size_of(a, j));
        reference_run(&a->p, &ref);
        wrong |= check_reference(a, FORMS[i].name, &ref);
        for (int j = 0; j < (argc > 1 ? argc - 1 : ndesign); j++)
            wrong |= check_design(a, argc > 1 ? argv[j + 1] : designs[j].name, &ref);
        for (int j = 0; j < TENSORS; j++)
            free(ref.x[j]);
        trial_free(a);
    }
    printf("self-check: %s\n", wrong ? "WRONG" : "all right");
    return wrong;
}
