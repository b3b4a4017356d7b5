/* Inputs of a case that no data brings: drawn by their laws (case_parts.h). */
#include "case_parts.h"
#include "operations.h"

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
    dp_op_of(c)->fill(c);
}

/* Gradients of the outputs: those that data did not bring. */
void dp_case_generate_gradients(const dp_casefile *f, dp_case *c) {
    if (c->backward) dp_op_of(c)->fill_gradients(f, c);
}
