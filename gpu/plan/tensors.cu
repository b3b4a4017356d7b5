/* gpu/plan/tensors.cu - the table of tensors (tensors.cuh). */
#include "plan/paths.cuh"
#include "plan/tensors.cuh"
#include <assert.h>
#include <stddef.h>

#define BOTH(name) #name, "d" #name, offsetof(dpg_tensors, name), offsetof(dpg_grads, d##name)
#define INPUT(ID, name) DP_INPUT_##ID, DP_RESULT_D##ID, BOTH(name)
#define OF_ROWS(ID, name, ...) {INPUT(ID, name)},
const Input inputs_of_tokens[] = {{INPUT(Q, q)},       {INPUT(K, k)},
                                  {INPUT(V, v)},       {INPUT(G, g)},
                                  {INPUT(BETA, beta)}, DP_ALL_ROW_INPUTS(OF_ROWS){(dp_input_id)-1}};

const dp_recurrence *rows_of(const dpg_problem *p) {
    return p->rows ? p->rows : &dp_recurrences[p->model];
}

/* Numbers of a head's token; 0: the rows have no such input. */
static int width_of(const dpg_problem *p, dp_input_id id) {
    if (id == DP_INPUT_G) return p->Kg;
    if (id != DP_INPUT_Q && !dp_recurrence_uses(rows_of(p), id)) return 0;
    const int one = is_in(KEYS, id)        ? p->K
                    : is_in(VALUES, id)    ? p->V
                    : id == DP_INPUT_ANGLE ? p->pairs
                                           : 1;
    return is_in(BY_KEY, id) ? p->R * one : one;
}

std::vector<Tensor> tensors_of(const dpg_problem *p) {
    const int V = p->V, state = p->K * V;
    const dpg_dtype f = DPG_F32;
#define GIVEN(name, ID) name, DP_INPUT_##ID, FORWARD_IN
#define MADE(name, ID) name, DP_RESULT_##ID, BACKWARD_OUT
#define IN_FORWARD(name) offsetof(dpg_tensors, name)
#define IN_BACKWARD(name) offsetof(dpg_grads, name)
    std::vector<Tensor> all = {
        {GIVEN("A_log", A_LOG), ONE_ROW, 0, 1, p->A_dtype, IN_FORWARD(A_log)},
        {GIVEN("dt_bias", DT_BIAS), ONE_ROW, 0, p->Kg, p->bias_dtype, IN_FORWARD(dt_bias)},
        {GIVEN("s0", S0), STARTS, 0, state, f, IN_FORWARD(s0)},
        {"do", DP_INPUT_DO, BACKWARD_IN, TOKENS, 0, V, p->ddtype, IN_BACKWARD(dout)},
        {"dfinal_state", DP_INPUT_DSTATE, BACKWARD_IN, ENDS, 0, state, f,
         IN_BACKWARD(dfinal_state)},
        {"o", DP_RESULT_O, FORWARD_OUT, TOKENS, 0, V, p->odtype, IN_FORWARD(o)},
        {"final_state", DP_RESULT_FINAL_STATE, FORWARD_OUT, ENDS, 0, state, f,
         IN_FORWARD(final_state)},
        {MADE("dA_log", DA_LOG), ONE_ROW, 0, 1, p->dA_dtype, IN_BACKWARD(dA_log)},
        {MADE("ddt_bias", DDT_BIAS), ONE_ROW, 0, p->Kg, p->dbias_dtype, IN_BACKWARD(ddt_bias)},
        {MADE("ds0", DS0), STARTS, 0, state, f, IN_BACKWARD(ds0)}};
    std::vector<Tensor> given;
    for (const Input *x = inputs_of_tokens; x->id >= 0; x++) {
        const int by_query = is_in(BY_QUERY, x->id), width = width_of(p, x->id),
                  is_long = is_in(KEYS | VALUES, x->id);
        given.push_back({x->name, x->id, FORWARD_IN, TOKENS, by_query, width,
                         is_long ? p->dtype : p->gdtype, x->slot});
        all.push_back({x->gradient, x->result, BACKWARD_OUT, TOKENS, by_query, width,
                       is_long ? p->ddtype : p->dgdtype, x->grad_slot});
    }
    all.insert(all.begin(), given.begin(), given.end());
    return all;
}

int dpg_tensors_of(const dpg_problem *p, dpg_tensor list[DPG_MOST_TENSORS]) {
    int n = 0;
    for (const Tensor &x : tensors_of(p)) {
        if (!x.width) continue;
        assert(n < DPG_MOST_TENSORS);
        list[n++] = {x.name, x.id,  of_backward(x.when), !is_input(x.when), x.rows == TOKENS,
                     x.type, x.slot};
    }
    return n;
}
