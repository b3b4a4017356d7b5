/* Matrix products in a stated order (ref/arithmetic/product.h). Column panels of B, two vectors
 * wide and packed one at a time, meet tiles of rows that stay in registers for the whole sum. */
#include "product.h"
#include "isa.h"

/* Arguments of product_body.inc; alpha is not read when set. */
typedef struct {
    dp_shape s;
    int set;
    double alpha;
} job;

#define DP_ISA_BODY "ref/arithmetic/product_body.inc"
#include "isa_each.inc"

typedef void product_f64(const job *w, const double *A, const double *B, double *C);
typedef void product_f32(const job *w, const float *A, const float *B, float *C);
static product_f64 *const of_f64[DP_NISAS] = DP_ISA_TABLE(multiply_f64);
static product_f32 *const of_f32[DP_NISAS] = DP_ISA_TABLE(multiply_f32);

void dp_mul_f64(dp_shape s, const double *A, const double *B, double *C) {
    of_f64[dp_isa_chosen()](&(job){s, 1, 1}, A, B, C);
}

void dp_add_mul_f64(dp_shape s, double alpha, const double *A, const double *B, double *C) {
    of_f64[dp_isa_chosen()](&(job){s, 0, alpha}, A, B, C);
}

void dp_mul_f32(dp_shape s, const float *A, const float *B, float *C) {
    of_f32[dp_isa_chosen()](&(job){s, 1, 1}, A, B, C);
}

void dp_add_mul_f32(dp_shape s, float alpha, const float *A, const float *B, float *C) {
    of_f32[dp_isa_chosen()](&(job){s, 0, alpha}, A, B, C);
}
