/* harness/device/device_own.h - which rank on a device owns which tokens, as a table for the
 * kernels: of dp_owners, or T / N tokens a rank. */
#ifndef DP_DEVICE_OWN_H
#define DP_DEVICE_OWN_H
#include "gpu/dp_gpu.h"
#include "ref/vocabulary/own.h"

typedef struct {
    int parts;
    int64_t *cut;
    int *owner;
    dp_owners of; /* what both are of */
} dp_own_table;

/* To be freed; of a T that N does not divide it has no part. */
dp_own_table dp_own_table_of(dp_owners o, int64_t T, int N);
void dp_own_table_free(dp_own_table *t);
/* The kernels' form of the table; borrows it. */
dpg_owners dp_own_for_kernels(const dp_own_table *t, dp_owners o);
int64_t dp_own_tokens(const dp_own_table *t, int rank);
/* Copies the rank's tokens, `each` numbers a token, from `all` to `own`, one part after the other;
 * back: from `own` to `all`. */
void dp_own_copy(const dp_own_table *t, int rank, int64_t each, double *all, double *own, int back);
#endif
