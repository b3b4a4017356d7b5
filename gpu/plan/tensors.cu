/* gpu/plan/tensors.cu - the table of tensors (tensors.cuh). */
#include "plan/paths.cuh"
#include "plan/tensors.cuh"
#include <assert.h>
#include <stddef.h>

#define IN_FORWARD(name) offsetof(dpg_tensors, name)
#define IN_BACKWARD(name) offsetof(dpg_grads, name)

std::vector<Tensor> tensors_of(const dpg_problem *p) {
    const int K = p->K, V = p->V, gates = p->model == DP_GDN2, factors = p->model == DP_DPLR;
    const int beta = gates || factors || !token_erases(p->model) ? 0 : p->R;
    const int keys = p->R * K, values = p->R * V, state = K * V;
    const dpg_dtype in = p->dtype, g = p->gdtype, dd = p->ddtype, dg = p->dgdtype, f = DPG_F32;
    return {{"q", FORWARD_IN, TOKENS, 1, K, in, IN_FORWARD(q)},
            {"k", FORWARD_IN, TOKENS, 1, keys, in, IN_FORWARD(k)},
            {"v", FORWARD_IN, TOKENS, 0, values, in, IN_FORWARD(v)},
            {"g", FORWARD_IN, TOKENS, 0, p->Kg, g, IN_FORWARD(g)},
            {"beta", FORWARD_IN, TOKENS, 0, beta, g, IN_FORWARD(beta)},
            {"erase", FORWARD_IN, TOKENS, 0, gates ? K : 0, in, IN_FORWARD(erase)},
            {"write", FORWARD_IN, TOKENS, 0, gates ? V : 0, in, IN_FORWARD(write)},
            {"lr_a", FORWARD_IN, TOKENS, 0, factors ? K : 0, in, IN_FORWARD(lr_a)},
            {"lr_b", FORWARD_IN, TOKENS, 1, factors ? K : 0, in, IN_FORWARD(lr_b)},
            {"A_log", FORWARD_IN, ONE_ROW, 0, 1, p->A_dtype, IN_FORWARD(A_log)},
            {"dt_bias", FORWARD_IN, ONE_ROW, 0, p->Kg, p->bias_dtype, IN_FORWARD(dt_bias)},
            {"s0", FORWARD_IN, STARTS, 0, state, f, IN_FORWARD(s0)},
            {"do", BACKWARD_IN, TOKENS, 0, V, dd, IN_BACKWARD(dout)},
            {"dfinal_state", BACKWARD_IN, ENDS, 0, state, f, IN_BACKWARD(dfinal_state)},
            {"o", FORWARD_OUT, TOKENS, 0, V, p->odtype, IN_FORWARD(o)},
            {"final_state", FORWARD_OUT, ENDS, 0, state, f, IN_FORWARD(final_state)},
            {"dq", BACKWARD_OUT, TOKENS, 1, K, dd, IN_BACKWARD(dq)},
            {"dk", BACKWARD_OUT, TOKENS, 1, keys, dd, IN_BACKWARD(dk)},
            {"dv", BACKWARD_OUT, TOKENS, 0, values, dd, IN_BACKWARD(dv)},
            {"dg", BACKWARD_OUT, TOKENS, 0, p->Kg, dg, IN_BACKWARD(dg)},
            {"dbeta", BACKWARD_OUT, TOKENS, 0, beta, dg, IN_BACKWARD(dbeta)},
            {"derase", BACKWARD_OUT, TOKENS, 0, gates ? K : 0, dd, IN_BACKWARD(derase)},
            {"dwrite", BACKWARD_OUT, TOKENS, 0, gates ? V : 0, dd, IN_BACKWARD(dwrite)},
            {"dlr_a", BACKWARD_OUT, TOKENS, 0, factors ? K : 0, dd, IN_BACKWARD(dlr_a)},
            {"dlr_b", BACKWARD_OUT, TOKENS, 1, factors ? K : 0, dd, IN_BACKWARD(dlr_b)},
            {"dA_log", BACKWARD_OUT, ONE_ROW, 0, 1, p->dA_dtype, IN_BACKWARD(dA_log)},
            {"ddt_bias", BACKWARD_OUT, ONE_ROW, 0, p->Kg, p->dbias_dtype, IN_BACKWARD(ddt_bias)},
            {"ds0", BACKWARD_OUT, STARTS, 0, state, f, IN_BACKWARD(ds0)}};
}

int dpg_tensors_of(const dpg_problem *p, dpg_tensor list[DPG_MOST_TENSORS]) {
    int n = 0;
    for (const Tensor &x : tensors_of(p)) {
        if (!x.width) continue;
        assert(n < DPG_MOST_TENSORS);
        list[n++] = {x.name, of_backward(x.when), !is_input(x.when), x.rows == TOKENS, x.type,
                     x.slot};
    }
    return n;
}
