/* gpu/dp_arrays.h - arrays of doubles on a device, C11-callable: for `deltaproof check` of large
 * problems (ref/vocabulary/memory.h). Pointers are device memory unless stated otherwise. Work goes
 * to the default stream. */
#ifndef DP_ARRAYS_H
#define DP_ARRAYS_H
#include "dp_gpu.h"
#include "ref/vocabulary/memory.h"
#ifdef __cplusplus
extern "C" {
#endif

dp_status dpg_array_set(double *x, int64_t n, double value, dp_err *e);
dp_status dpg_array_times(double *x, int64_t n, double c, dp_err *e);
/* To and from a format of the kernels. */
dp_status dpg_array_narrow(const double *x, int64_t n, dpg_dtype t, void *to, dp_err *e);
dp_status dpg_array_widen(const void *x, int64_t n, dpg_dtype t, double *to, dp_err *e);
/* The law is any but DP_LARGE_LOG. */
dp_status dpg_array_fill(double *x, const dp_large_law *law, int64_t rows, dp_err *e);
/* Token and old are device memory, too. */
dp_status dpg_array_exact(const dp_exact *x, dp_err *e);
/* x[at[i]] = value[i] of n entries. */
dp_status dpg_array_put(double *x, const int64_t *at, const double *value, int64_t n, dp_err *e);
dp_status dpg_array_edit(const dp_memory_edit *edit, dp_err *e);
/* The first entry that differs goes to *entry; -1: none does. kept is device memory, too. The call
 * uses one number of device memory, `first`. */
dp_status dpg_array_first(const dp_memory_pair *x, unsigned long long *first, int64_t *entry,
                          dp_err *e);

#ifdef __cplusplus
}
#endif
#endif
