/* Inputs of a case that no data brings: drawn by their laws (case_parts.h). */
#include "case_parts.h"

static int wanted(const dp_casefile *f, const dp_case_input *s) {
    switch (s->field->role) {
    case DP_ROLE_REQUIRED: return 1;
    case DP_ROLE_GATE: return f->gate != DP_GATE_LOG && f->gate_params;
    case DP_ROLE_BIAS: return f->bias != 0;
    case DP_ROLE_STATE: return f->s0_scale > 0;
    default: return 0; /* gradients come after, with those that data did not bring */
    }
}

void dp_case_generate(const dp_casefile *f, dp_case *c) {
    dp_case_input s[DP_CASE_MAX_INPUTS];
    const int n = dp_case_inputs(c, s);
    for (int i = 0; i < n; i++)
        if (wanted(f, &s[i]) && !*s[i].where) *s[i].where = dp_doubles(dp_case_input_count(&s[i]));
    if (c->op == DP_OP_CONV)
        dp_inputs_fill_conv(&c->conv, &c->spec);
    else
        dp_inputs_fill(&c->p, &c->spec);
}

/* Gradients of the outputs: those that data did not bring. */
void dp_case_generate_gradients(const dp_casefile *f, dp_case *c) {
    if (!c->backward) return;
    if (c->op == DP_OP_CONV) {
        if (c->conv.dy) return;
        c->conv.dy = dp_doubles(c->conv.T * c->conv.D);
        dp_inputs_fill_conv_dy(&c->conv, &c->spec);
        return;
    }
    dp_problem made = c->p;
    made.dout = c->p.dout ? NULL : dp_doubles(dp_input_count(&c->p, DP_INPUT_DO));
    made.dstate =
        c->p.dstate || !f->dstate ? NULL : dp_doubles(dp_input_count(&c->p, DP_INPUT_DSTATE));
    dp_inputs_fill_gradients(&made, &c->spec);
    if (made.dout) c->p.dout = made.dout;
    if (made.dstate) c->p.dstate = made.dstate;
}
