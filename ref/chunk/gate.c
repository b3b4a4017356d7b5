/* Gate, beta and L2 norm in fp64 and, from the same text, in fp32 (gate.h). */
#include "gate.h"
#include "ref/arithmetic/elementary.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

/* Operations of activations.h. */
#define DP_SIGMOID(x) F(unary_at)(x).sigmoid
#define DP_DSIGMOID(x) F(unary_at)(x).dsigmoid
#define DP_SOFTPLUS(x) F(unary_at)(x).softplus
#define REAL double
#define F(name) name
#define EXP dp_exp
#define EXP_ROW dp_exp_row
#define LOG1P dp_log1p
#define SQRT sqrt
#include "gate_fp.inc"
#undef REAL
#undef F
#undef EXP
#undef EXP_ROW
#undef LOG1P
#undef SQRT

double dp_curve_left(dp_curve curve, double x, double y) {
    const double left = dp_curve_ratio(curve, y);
    return left < 0 || left > 0x1p-30 ? left : dp_curve_slope(curve, x) / y;
}

double dp_factor_at(const dp_problem *p, int of, int64_t at, int x) {
    return factor_at(p, of, at, x);
}

double dp_entry_beside(const dp_problem *p, dp_entry e, int of, int64_t at, int x) {
    int but = 0;
    while (but < e.n && e.of[but] != of)
        but++;
    return times_entry(p, e, but, at, x, 1);
}

double dp_beta_slope(const dp_problem *p, double raw) {
    const dp_beta_info *form = &dp_betas[p->beta_form];
    const double y = dp_curve_at(form->curve, raw), left = dp_curve_left(form->curve, raw, y);
    return form->times * (left < 0 ? dp_curve_slope(form->curve, raw) : y * left);
}

double dp_fast_decay_error(double g) {
    const float x = (float)g;
    uint32_t bits;
    memcpy(&bits, &x, sizeof bits);
    uint64_t mixed = (bits + 1ull) * 0x9e3779b97f4a7c15u;
    mixed = (mixed ^ mixed >> 29) * 0xbf58476d1ce4e5b9u;
    const double u = (double)(mixed >> 11) * 0x1p-52 - 1.2; /* in -1.2 .. 0.8 */
    return x == 0 ? 1 : 1 + u * 0x1p-23;
}

void dp_gate_slopes(const dp_problem *p, double *dg_dx, double *dg_dA) {
    const int Kg = dp_Kg(p);
    for (int64_t i = 0; i < p->T * p->HV * Kg; i++) {
        const gate_value v = gate_at(p, p->g[i], (int)(i / Kg % p->HV), (int)(i % Kg));
        dg_dx[i] = v.dg_dx;
        dg_dA[i] = v.dg_dA;
    }
}

int64_t dp_gates_above_0(const dp_problem *p) {
    int64_t n = 0;
    for (int64_t i = 0; p->gate == DP_GATE_LOG && i < dp_input_count(p, DP_INPUT_G); i++)
        n += p->g[i] > 0;
    return n;
}

double dp_largest_gate(const dp_problem *p, const double *g) {
    double most = -INFINITY;
    for (int x = 0; x < dp_Kg(p); x++)
        if (g[x] > most) most = g[x];
    return most;
}

double dp_gate_ratio(const dp_problem *p, int64_t at) {
    const int Kg = dp_Kg(p);
    const int hv = (int)(at / Kg % p->HV);
    const double x = p->g[at] + (p->dt_bias ? p->dt_bias[(int64_t)hv * Kg + at % Kg] : 0);
    if (dp_gate_inside(p)) return x;
    if (dp_gates[p->gate].curve != DP_SOFT)
        return dp_curve_at(dp_gates[p->gate].curve, x) / dp_curve_slope(dp_gates[p->gate].curve, x);
    const unary f = unary_at(x);
    const double e = dp_exp(-fabs(x));
    return x >= 0 ? f.softplus / f.sigmoid : (e < 0x1p-53 ? 1 : dp_log1p(e) / e) * (1 + e);
}

static void expf_row(int n, const double *x, double *y) {
    for (int i = 0; i < n; i++)
        y[i] = dp_expf((float)x[i]);
}

#define REAL float
#define F(name) name##_f32
#define EXP dp_expf
#define EXP_ROW expf_row
#define LOG1P dp_log1pf
#define SQRT sqrtf
#include "gate_fp.inc"

void dp_writes_new(const dp_problem *p, double **erasing, double **values) {
    const int64_t rows = p->T * p->HV * dp_rows(p);
    *erasing = dp_has_beta(p) ? NULL : dp_doubles(rows * p->K);
    *values = dp_by_gates(p) || dp_by_rows(p) ? dp_doubles(rows * p->V) : NULL;
}

void dp_units_free(dp_units *u) {
    for (int i = 0; i < DP_NINPUTS; i++) {
        if (u->rstd[i]) free(u->p.in[i]);
        free(u->rstd[i]);
        u->rstd[i] = NULL;
    }
}

dp_activated dp_activated_new(const dp_problem *p) {
    dp_units u = dp_units_new(p);
    dp_activated a = {.q = dp_doubles(p->T * p->H * p->K),
                      .k = dp_doubles(p->T * p->H * dp_rows(p) * p->K),
                      .g = dp_doubles(p->T * p->HV * dp_Kg(p)),
                      .beta = dp_doubles(p->T * p->HV * dp_rows(p)),
                      .rstd_q = dp_doubles(p->T * p->H),
                      .rstd_k = dp_doubles(p->T * p->H * dp_rows(p))};
    dp_activate(&u.p, 0, p->T, a.q, a.k, a.g, a.beta, a.rstd_q, a.rstd_k);
    dp_writes_new(p, &a.erasing, &a.values);
    dp_activate_writes(&u.p, 0, p->T, a.k, a.erasing, a.values);
    if (u.rstd[DP_INPUT_Q])
        memcpy(a.rstd_q, u.rstd[DP_INPUT_Q], sizeof *a.rstd_q * (size_t)(p->T * p->H));
    a.units = u;
    return a;
}

void dp_activated_free(dp_activated *a) {
    double *all[] = {a->q, a->k, a->g, a->beta, a->rstd_q, a->rstd_k, a->erasing, a->values};
    dp_units_free(&a->units);
    for (size_t i = 0; i < sizeof all / sizeof *all; i++)
        free(all[i]);
}
