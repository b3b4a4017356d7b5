/* The step recurrence in fp64 (recurrent.h). */
#define REAL double
#define OWN DP_FP64
#define EXP dp_exp
#define F(name) name
#define RUN dp_recurrent_run_f64
#include "recurrent_fp.inc"
