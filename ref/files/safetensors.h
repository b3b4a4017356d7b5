/* ref/files/safetensors.h - tensors in and out of safetensors files.
 *
 * Layout: 8-byte little-endian header length, JSON header, data. Dtypes read: BF16, F16, F32, F64
 * (values are widened to double exactly) and I64, I32 (for cu_seqlens; values must be exact in
 * double). The same dtypes are written. Refused with DP_EINPUT and a message that names file,
 * tensor, field and value. Causes: a truncated file, a header longer than the file or than 100 MB,
 * invalid JSON. Likewise duplicate names, an unknown dtype, a negative or overflowing shape.
 * Likewise data_offsets out of range, overlapping, leaving holes, or not matching dtype and shape.
 * Nothing of a refused file is used.
 */
#pragma once
#include "ref/vocabulary/formats.h"
#include "ref/vocabulary/problem.h"

typedef struct {
    char *name;
    char dtype[8];
    int ndim;
    int64_t shape[8];
    int64_t n;    /* product of shape */
    double *data; /* [n] */
} dp_tensor;

typedef struct {
    char *path;
    int ntensor;
    dp_tensor *tensor;
    int nmeta;
    char **meta_key, **meta_value; /* __metadata__, string to string */
} dp_tensorfile;

/* The whole file; *f is to be freed where DP_OK. */
dp_status dp_safetensors_read(const char *path, dp_tensorfile *f, dp_err *e);
/* The same from bytes in memory, which are not needed afterwards. */
dp_status dp_safetensors_parse(const void *bytes, size_t len, const char *path_for_messages,
                               dp_tensorfile *f, dp_err *e);
dp_status dp_safetensors_write(const char *path, const dp_tensorfile *f,
                               dp_err *e); /* by rename: never half a file */
void dp_tensorfile_free(dp_tensorfile *f);

const dp_tensor *dp_tensor_find(const dp_tensorfile *f, const char *name); /* NULL: absent */
const char *dp_tensorfile_meta(const dp_tensorfile *f, const char *key);   /* NULL: absent */
/* Appends a tensor (data is copied). dtype must hold every value exactly or by its one rounding
 * (BF16, F16, F32). */
void dp_tensorfile_add(dp_tensorfile *f, const char *name, const char *dtype, int ndim,
                       const int64_t *shape, const double *data);
/* The same in a format of ours: fp32 that of everything but bf16 and fp64. */
void dp_tensorfile_add_format(dp_tensorfile *f, const char *name, dp_format format, int ndim,
                              const int64_t *shape, const double *data);
/* Frees tensor i, whose place the last one takes. */
void dp_tensorfile_drop(dp_tensorfile *f, int i);
/* Appends a pair of metadata; both are copied. */
void dp_tensorfile_add_meta(dp_tensorfile *f, const char *key, const char *value);
