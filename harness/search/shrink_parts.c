/* The parts that a case may do without, among its arrays and in its text (shrink_work.h). */
#include "shrink_work.h"

#include <stdlib.h>

static void release(double **x) { free(*x), *x = NULL; }

static int packed(const dp_case *c) { return dp_case_packing((dp_case *)c).Nseq[0] > 1; }

static int has_dstate(const dp_case *c) { return c->p.dstate != NULL; }
static void no_dstate(dp_case *c) { release(&c->p.dstate); }

static int has_backward(const dp_case *c) { return c->backward; }
static void no_backward(dp_case *c) {
    c->backward = 0;
    release(&c->p.dout);
    release(&c->p.dstate);
    release(&c->conv.dy);
}

static int has_s0(const dp_case *c) { return c->p.s0 != NULL; }
static void no_s0(dp_case *c) { release(&c->p.s0); }

static int has_norm(const dp_case *c) { return c->p.l2norm; }
static void no_norm(dp_case *c) { c->p.l2norm = 0; }

static int has_params(const dp_case *c) { return c->p.A_log || c->p.dt_bias; }
static void no_params(dp_case *c) { release(&c->p.A_log), release(&c->p.dt_bias); }

static int has_scale(const dp_case *c) { return dp_op_of(c)->has_problem && c->p.scale != 1; }
static void unit_scale(dp_case *c) { c->p.scale = 1; }

static int has_bias(const dp_case *c) { return c->conv.bias != NULL; }
static void no_bias(dp_case *c) { release(&c->conv.bias); }

/* The first are removed first: without its gradients a case still says `dstate`. */
const dp_shrink_part dp_shrink_parts[DP_SHRINK_NPARTS] = {
    {packed, NULL, "cu_seqlens", NULL, "one sequence"},
    {has_dstate, no_dstate, "dstate", NULL, "no gradient of the final state"},
    {has_backward, no_backward, "backward", "no", "forward alone"},
    {has_s0, no_s0, "s0_scale", NULL, "no initial state"},
    {has_norm, no_norm, "l2norm", NULL, "no L2 norm"},
    {has_params, no_params, "gate_params", "no", "no A_log, dt_bias"},
    {has_scale, unit_scale, "scale", "1", "scale = 1"},
    {has_bias, no_bias, "bias", NULL, "no bias"},
};
