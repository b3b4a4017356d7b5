/* The project's own products and solves as a table (ref/arithmetic/linear.h). */
#include "linear.h"
#include "triangle.h"

const dp_linear dp_linear_own = {"own",        dp_mul_f64,   dp_mul_f32,    dp_add_mul_f32,
                                 dp_solve_f64, dp_solve_f32, dp_invert_f64, dp_invert_f32};
