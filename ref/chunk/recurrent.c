/* The step recurrence in fp32, and the choice of its type (recurrent.h). */
#define REAL float
#define OWN DP_FP32
#define EXP dp_expf
#define F(name) name##_f32
#define RUN dp_recurrent_run_f32
#include "recurrent_fp.inc"

void dp_leave_states(const dp_problem *p, const dp_design *design, double *S) {
    const int64_t n = (int64_t)p->HV * p->K * p->V;
    for (int i = 0; i < p->Nseq; i++)
        dp_store_state(design->final_state, p->HV, p->K, p->V, S + i * n);
}

void dp_recurrent_run(const dp_problem *p, const dp_design *design, int backward,
                      const dp_recurrent_keep *keep, dp_result *out) {
    (design->base == DP_BASE_FP64 ? dp_recurrent_run_f64
                                  : dp_recurrent_run_f32)(p, design, backward, keep, out);
}
