/* Matrix products in a stated order (ref/arithmetic/product.h). Column panels of B, two vectors
 * wide and packed one at a time, meet tiles of rows that stay in registers for the whole sum. */
#include "product.h"
#include "isa.h"

/* Arguments of product_real.inc; alpha is not read when set. */
typedef struct {
    dp_shape s;
    int set;
    double alpha;
} job;

#define DP_ISA_BODY "ref/arithmetic/isa_real.inc"
#define DP_ISA_REAL "ref/arithmetic/product_real.inc"
#include "isa_each.inc"

void dp_mul_f64(dp_shape s, const double *A, const double *B, double *C) {
    DP_ISA_OF(multiply_f64)(&(job){s, 1, 1}, A, B, C);
}

void dp_add_mul_f64(dp_shape s, double alpha, const double *A, const double *B, double *C) {
    DP_ISA_OF(multiply_f64)(&(job){s, 0, alpha}, A, B, C);
}

void dp_mul_f32(dp_shape s, const float *A, const float *B, float *C) {
    DP_ISA_OF(multiply_f32)(&(job){s, 1, 1}, A, B, C);
}

void dp_add_mul_f32(dp_shape s, float alpha, const float *A, const float *B, float *C) {
    DP_ISA_OF(multiply_f32)(&(job){s, 0, alpha}, A, B, C);
}
