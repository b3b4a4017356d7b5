/* gpu/tests/case_rank.h - a case of ref64.h as a problem of the library, its inputs on a device. */
#ifndef DPG_TESTS_CASE_RANK_H
#define DPG_TESTS_CASE_RANK_H
#include "cases.h"
#include "rank.h"

/* results: type of o. Gradients, read and made, are fp32. */
static inline dpg_problem problem_of(const Case &c, const Inputs &x, dpg_dtype results) {
    dpg_problem p = sized(c.cu, c.H, c.HV, c.K, c.V, c.R, c.Kg(), c.dtype);
    p.model = c.model;
    p.scale = x.scale;
    p.gate = c.gate;
    p.lower_bound = x.lb;
    p.beta_form = c.beta;
    p.l2norm = c.l2norm;
    p.odtype = results;
    p.ddtype = p.dgdtype = DPG_F32;
    return p;
}

/* The rank's share of an input, or NULL where the case has none. */
static inline void *copy_share(Memory &m, const Vec &x, const Share &s) {
    return x.empty() ? NULL : m.copy(x, s.from, s.n, s.type);
}
static inline const Vec *input_of(const Inputs &x, const char *name) {
    const struct {
        const char *name;
        const Vec *x;
    } all[] = {{"q", &x.q},         {"k", &x.k},         {"v", &x.v},       {"g", &x.g},
               {"beta", &x.beta},   {"A_log", &x.A_log}, {"s0", &x.s0},     {"dt_bias", &x.dt_bias},
               {"erase", &x.erase}, {"write", &x.write}, {"lr_a", &x.lr_a}, {"lr_b", &x.lr_b}};
    for (auto &y : all)
        if (!strcmp(y.name, name)) return y.x;
    return NULL;
}
#endif
