/* Reader and writer of safetensors files (safetensors.h). */
#include "safetensors.h"
#include "input.h"
#include "output.h"
#include "ref/vocabulary/formats.h"
#include "ref/vocabulary/text.h"

#include <assert.h>
#include <jansson.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define MAX_HEADER \
    (16u << 20) /* a call's tensors take thousands of bytes; JSON of 16 MiB, seconds */
#define MAX_TENSORS 4096
#define MAX_DIMS 8
#define MAX_ELEMENTS \
    (1ll << 40) /* more is no file of this world; products of axes stay far within int64_t */
#define TWO53 9007199254740992.0

static uint64_t load(const unsigned char *p, int size) { /* little-endian */
    uint64_t x = 0;
    for (int i = size; i-- > 0;)
        x = x << 8 | p[i];
    return x;
}

static void store(unsigned char *p, int size, uint64_t x) {
    for (int i = 0; i < size; i++, x >>= 8)
        p[i] = (unsigned char)x;
}

/* ---- element types: name, size, widening read, narrowing write ------------------------------- */

static double get_bf16(const unsigned char *p) { return dp_bf16_from_bits((uint16_t)load(p, 2)); }
static double get_f16(const unsigned char *p) { return dp_fp16_from_bits((uint16_t)load(p, 2)); }
static double get_i32(const unsigned char *p) { return (int32_t)load(p, 4); }
static double get_i64(const unsigned char *p) { return (double)(int64_t)load(p, 8); }
static double get_f32(const unsigned char *p) {
    const uint32_t b = (uint32_t)load(p, 4);
    float x;
    memcpy(&x, &b, sizeof x);
    return x;
}
static double get_f64(const unsigned char *p) {
    const uint64_t b = load(p, 8);
    double x;
    memcpy(&x, &b, sizeof x);
    return x;
}

static void put_bf16(unsigned char *p, double x) { store(p, 2, dp_bf16_bits((float)dp_bf16d(x))); }
static void put_f16(unsigned char *p, double x) { store(p, 2, dp_fp16_bits(x)); }
static void put_i32(unsigned char *p, double x) { store(p, 4, (uint32_t)(int32_t)x); }
static void put_i64(unsigned char *p, double x) { store(p, 8, (uint64_t)(int64_t)x); }
static void put_f32(unsigned char *p, double x) {
    const float f = dp_fp32(x);
    uint32_t b;
    memcpy(&b, &f, sizeof b);
    store(p, 4, b);
}
static void put_f64(unsigned char *p, double x) {
    uint64_t b;
    memcpy(&b, &x, sizeof b);
    store(p, 8, b);
}

/* lo, hi: integers of that type are exact in double, and fit the type, within these; both 0 for the
 * floating types. */
typedef struct {
    const char *name;
    int size;
    double lo, hi;
    double (*get)(const unsigned char *);
    void (*put)(unsigned char *, double);
} dtype;
static const dtype DTYPES[] = {
    {"F64", 8, 0, 0, get_f64, put_f64},    {"I64", 8, -TWO53, TWO53, get_i64, put_i64},
    {"F32", 4, 0, 0, get_f32, put_f32},    {"I32", 4, -2147483648.0, 2147483647, get_i32, put_i32},
    {"BF16", 2, 0, 0, get_bf16, put_bf16}, {"F16", 2, 0, 0, get_f16, put_f16}};
#define NDTYPES ((int)(sizeof DTYPES / sizeof *DTYPES))

static const dtype *find_dtype(const char *name) {
    for (int i = 0; i < NDTYPES; i++)
        if (!strcmp(name, DTYPES[i].name)) return &DTYPES[i];
    return NULL;
}

/* ---- reading --------------------------------------------------------------------------------- */

typedef struct {
    int64_t begin, end;
    int index;
} extent;
typedef struct {
    const char *path;
    const unsigned char *data;
    int64_t size;
    dp_tensorfile *f;
    extent *at;
    dp_err *e;
} reader;

static dp_status parse_metadata(reader *r, json_t *meta) {
    if (!json_is_object(meta))
        return dp_fail(r->e, DP_EINPUT, "%s: __metadata__: must be an object of strings", r->path);
    const char *key;
    json_t *value;
    json_object_foreach(meta, key, value) {
        if (!json_is_string(value))
            return dp_fail(r->e, DP_EINPUT, "%s: __metadata__: %s: the value must be a string",
                           r->path, key);
        dp_tensorfile_add_meta(r->f, key, json_string_value(value));
    }
    return DP_OK;
}

static dp_status parse_shape(reader *r, dp_tensor *t, json_t *shape) {
    if (!json_is_array(shape))
        return dp_fail(r->e, DP_EINPUT, "%s: tensor %s: shape: missing or not an array", r->path,
                       t->name);
    if (json_array_size(shape) > MAX_DIMS)
        return dp_fail(r->e, DP_EINPUT, "%s: tensor %s: shape: %zu dimensions, at most %d are read",
                       r->path, t->name, json_array_size(shape), MAX_DIMS);
    int64_t most = 1;
    t->ndim = (int)json_array_size(shape);
    t->n = 1;
    for (int i = 0; i < t->ndim; i++) {
        json_t *d = json_array_get(shape, (size_t)i);
        if (!json_is_integer(d))
            return dp_fail(r->e, DP_EINPUT, "%s: tensor %s: shape[%d]: not an integer", r->path,
                           t->name, i);
        t->shape[i] = json_integer_value(d);
        if (t->shape[i] < 0)
            return dp_fail(r->e, DP_EINPUT, "%s: tensor %s: shape[%d] = %lld: negative", r->path,
                           t->name, i, (long long)t->shape[i]);
        /* An axis of 0 must not hide the size of the others: products of some of them are formed
         * later. */
        if (__builtin_mul_overflow(most, t->shape[i] ? t->shape[i] : 1, &most) ||
            most > MAX_ELEMENTS)
            return dp_fail(r->e, DP_EINPUT,
                           "%s: tensor %s: shape[%d] = %lld: the axes multiply to more than %lld",
                           r->path, t->name, i, (long long)t->shape[i], MAX_ELEMENTS);
        t->n *= t->shape[i];
    }
    return DP_OK;
}

static dp_status parse_offsets(reader *r, const dp_tensor *t, const dtype *d, json_t *offsets,
                               extent *x) {
    if (!json_is_array(offsets) || json_array_size(offsets) != 2 ||
        !json_is_integer(json_array_get(offsets, 0)) ||
        !json_is_integer(json_array_get(offsets, 1)))
        return dp_fail(r->e, DP_EINPUT, "%s: tensor %s: data_offsets: must be two integers",
                       r->path, t->name);
    x->begin = json_integer_value(json_array_get(offsets, 0));
    x->end = json_integer_value(json_array_get(offsets, 1));
    if (x->begin < 0 || x->end < x->begin || x->end > r->size)
        return dp_fail(r->e, DP_EINPUT,
                       "%s: tensor %s: data_offsets = [%lld, %lld]: outside of the %lld data bytes "
                       "(truncated file?)",
                       r->path, t->name, (long long)x->begin, (long long)x->end,
                       (long long)r->size);
    int64_t bytes;
    if (__builtin_mul_overflow(t->n, (int64_t)d->size, &bytes) || bytes != x->end - x->begin)
        return dp_fail(r->e, DP_EINPUT,
                       "%s: tensor %s: data_offsets = [%lld, %lld]: %lld bytes, but dtype %s and "
                       "shape have %lld elements of %d bytes",
                       r->path, t->name, (long long)x->begin, (long long)x->end,
                       (long long)(x->end - x->begin), d->name, (long long)t->n, d->size);
    return DP_OK;
}

static dp_status parse_tensor(reader *r, const char *name, json_t *desc, int index) {
    dp_tensor *t = &r->f->tensor[index];
    t->name = dp_strdup(name);
    r->f->ntensor = index + 1;
    if (dp_text_good(name, strlen(name), 0) < strlen(name))
        return dp_fail(r->e, DP_EINPUT, "%s: tensor '%s': a control character in its name", r->path,
                       name);
    if (!json_is_object(desc))
        return dp_fail(r->e, DP_EINPUT, "%s: tensor %s: must be an object", r->path, name);
    const char *key, *type = json_string_value(json_object_get(desc, "dtype"));
    json_t *value;
    json_object_foreach(
        desc, key,
        value) if (strcmp(key, "dtype") && strcmp(key, "shape") &&
                   strcmp(key, "data_offsets")) return dp_fail(r->e, DP_EINPUT,
                                                               "%s: tensor %s: unknown field %s",
                                                               r->path, name, key);
    if (!type)
        return dp_fail(r->e, DP_EINPUT, "%s: tensor %s: dtype: missing or not a string", r->path,
                       name);
    const dtype *d = find_dtype(type);
    if (!d)
        return dp_fail(r->e, DP_EINPUT,
                       "%s: tensor %s: dtype = %s: must be one of BF16, F16, F32, F64, I32, I64",
                       r->path, name, type);
    snprintf(t->dtype, sizeof t->dtype, "%s", d->name);
    r->at[index].index = index;
    dp_status s = parse_shape(r, t, json_object_get(desc, "shape"));
    return s ? s : parse_offsets(r, t, d, json_object_get(desc, "data_offsets"), &r->at[index]);
}

static int by_offset(const void *a, const void *b) {
    const extent *x = a, *y = b;
    if (x->begin != y->begin) return x->begin < y->begin ? -1 : 1;
    if (x->end != y->end) return x->end < y->end ? -1 : 1;
    return x->index - y->index;
}

/* Every data byte belongs to exactly one tensor. */
static dp_status check_extents(reader *r) {
    int64_t end = 0;
    const char *last = "the header";
    qsort(r->at, (size_t)r->f->ntensor, sizeof *r->at, by_offset);
    for (int i = 0; i < r->f->ntensor; i++) {
        const extent *x = &r->at[i];
        const char *name = r->f->tensor[x->index].name;
        if (x->begin != end)
            return dp_fail(r->e, DP_EINPUT,
                           "%s: tensor %s: data_offsets = [%lld, %lld]: %s %s, which ends at %lld",
                           r->path, name, (long long)x->begin, (long long)x->end,
                           x->begin < end ? "overlaps" : "leaves a hole after", last,
                           (long long)end);
        end = x->end;
        last = name;
    }
    if (end != r->size)
        return dp_fail(r->e, DP_EINPUT,
                       "%s: %lld data bytes, but the last tensor (%s) ends at %lld", r->path,
                       (long long)r->size, last, (long long)end);
    return DP_OK;
}

DP_NOT_SO("-Wanalyzer-null-dereference") /* dtypes were checked */
static dp_status read_values(reader *r, const extent *x) {
    dp_tensor *t = &r->f->tensor[x->index];
    const dtype *d = find_dtype(t->dtype);
    const unsigned char *p = r->data + x->begin;
    t->data = dp_doubles(t->n);
    for (int64_t i = 0; i < t->n; i++) {
        t->data[i] = d->get(p + i * d->size);
        const int64_t integer = d->hi == TWO53 ? (int64_t)load(p + i * 8, 8) : 0;
        if (integer > (int64_t)TWO53 || integer < -(int64_t)TWO53)
            return dp_fail(r->e, DP_EINPUT, "%s: tensor %s[%lld] = %lld: not exact in double",
                           r->path, t->name, (long long)i, (long long)integer);
    }
    return DP_OK;
}

static dp_status parse_header(reader *r, json_t *header) {
    int index = 0;
    const char *name;
    json_t *desc;
    json_object_foreach(header, name, desc) {
        dp_status s = strcmp(name, "__metadata__") ? parse_tensor(r, name, desc, index++)
                                                   : parse_metadata(r, desc);
        if (s) return s;
    }
    dp_status s = check_extents(r);
    for (int i = 0; !s && i < r->f->ntensor; i++)
        s = read_values(r, &r->at[i]);
    return s;
}

/* Elements that `grown` takes an array of n to have: the next power of two. */
static size_t room(size_t n) {
    size_t m = 1;
    while (m < n)
        m *= 2;
    return m;
}

dp_status dp_safetensors_parse(const void *bytes, size_t len, const char *path, dp_tensorfile *f,
                               dp_err *e) {
    *f = (dp_tensorfile){.path = dp_strdup(path)};
    const unsigned char *b = bytes;
    dp_status s = DP_OK;
    const uint64_t n = len < 8 ? 0 : load(b, 8);
    if (len < 8)
        s = dp_fail(e, DP_EINPUT, "%s: truncated: %zu bytes, the header length alone takes 8", path,
                    len);
    else if (n > MAX_HEADER)
        s = dp_fail(
            e, DP_EINPUT,
            "%s: header length = %llu: above the limit of %u bytes (not a safetensors file?)", path,
            (unsigned long long)n, MAX_HEADER);
    else if (n > len - 8)
        s = dp_fail(e, DP_EINPUT, "%s: truncated: header length = %llu, but %zu bytes follow", path,
                    (unsigned long long)n, len - 8);
    else if (n == 0 || b[8] != '{')
        s = dp_fail(e, DP_EINPUT, "%s: header: must begin with '{'", path);
    if (s) goto done;
    json_error_t je;
    json_t *header = json_loadb((const char *)b + 8, (size_t)n, JSON_REJECT_DUPLICATES, &je);
    if (!header) {
        s = dp_fail(e, DP_EINPUT, "%s: header: byte %d: %s", path, je.position, je.text);
        goto done;
    }
    if (json_object_size(header) > MAX_TENSORS) {
        s = dp_fail(e, DP_EINPUT, "%s: header: %zu tensors, at most %d are read", path,
                    json_object_size(header), MAX_TENSORS);
        json_decref(header);
        goto done;
    }
    reader r = {path, b + 8 + n, (int64_t)(len - 8 - n), f, NULL, e};
    r.at = dp_calloc(json_object_size(header), sizeof *r.at);
    f->tensor = dp_calloc(room(json_object_size(header)), sizeof *f->tensor);
    s = parse_header(&r, header);
    free(r.at);
    json_decref(header);
done:
    if (s) dp_tensorfile_free(f);
    return s;
}

dp_status dp_safetensors_read(const char *path, dp_tensorfile *f, dp_err *e) {
    DP_OWN char *bytes = NULL;
    size_t n;
    memset(f, 0, sizeof *f);
    const dp_status s = dp_input_read(path, dp_input_most(), &bytes, &n, e);
    if (s) return s;
    return dp_safetensors_parse(bytes, n, path, f, e);
}

/* ---- writing --------------------------------------------------------------------------------- */

static dp_status check_integers(const char *path, const dp_tensor *t, const dtype *d, dp_err *e) {
    for (int64_t i = 0; d->hi > 0 && i < t->n; i++)
        if (!(t->data[i] >= d->lo && t->data[i] <= d->hi) || t->data[i] != floor(t->data[i]))
            return dp_fail(e, DP_EINPUT, "%s: tensor %s[%lld] = %.17g: does not fit %s", path,
                           t->name, (long long)i, t->data[i], d->name);
    return DP_OK;
}

/* Tensors lie in the order of DTYPES, widest first, so that every one is aligned to its element
 * size. */
static json_t *describe(const dp_tensorfile *f) {
    json_t *header = json_object(), *meta = json_object();
    for (int i = 0; i < f->nmeta; i++)
        json_object_set_new(meta, f->meta_key[i], json_string(f->meta_value[i]));
    if (f->nmeta) json_object_set(header, "__metadata__", meta);
    json_decref(meta);
    int64_t at = 0;
    for (int k = 0; k < NDTYPES; k++)
        for (int i = 0; i < f->ntensor; i++) {
            const dp_tensor *t = &f->tensor[i];
            if (strcmp(t->dtype, DTYPES[k].name)) continue;
            json_t *shape = json_array();
            for (int d = 0; d < t->ndim; d++)
                json_array_append_new(shape, json_integer(t->shape[d]));
            const int64_t end = at + t->n * DTYPES[k].size;
            json_object_set_new(header, t->name,
                                json_pack("{s:s,s:o,s:[I,I]}", "dtype", t->dtype, "shape", shape,
                                          "data_offsets", (json_int_t)at, (json_int_t)end));
            at = end;
        }
    return header;
}

static void write_values(FILE *out, const dp_tensorfile *f) {
    unsigned char buffer[8 * 1024];
    for (int k = 0; k < NDTYPES; k++)
        for (int i = 0; i < f->ntensor; i++) {
            const dp_tensor *t = &f->tensor[i];
            const int size = DTYPES[k].size;
            if (strcmp(t->dtype, DTYPES[k].name)) continue;
            for (int64_t j = 0; j < t->n;) {
                int m = 0;
                for (; m < 1024 && j < t->n; m++, j++)
                    DTYPES[k].put(buffer + m * size, t->data[j]);
                fwrite(buffer, (size_t)size, (size_t)m, out);
            }
        }
}

static void write_file(FILE *out, const char *header, const dp_tensorfile *f) {
    const size_t n = strlen(header), padded = (n + 7) & ~(size_t)7;
    unsigned char length[8];
    store(length, 8, padded);
    fwrite(length, 1, 8, out);
    fprintf(out, "%-*s", (int)padded, header);
    write_values(out, f);
}

dp_status dp_safetensors_write(const char *path, const dp_tensorfile *f, dp_err *e) {
    for (int i = 0; i < f->ntensor; i++) {
        const dp_tensor *t = &f->tensor[i];
        for (int j = 0; j < i; j++)
            if (!strcmp(t->name, f->tensor[j].name))
                return dp_fail(e, DP_EINPUT, "%s: tensor %s: added twice", path, t->name);
        dp_status s = check_integers(path, t, find_dtype(t->dtype), e);
        if (s) return s;
    }
    json_auto_t *j = describe(f);
    DP_OWN char *header = json_dumps(j, JSON_COMPACT);
    const int complete = (int)json_object_size(j) == f->ntensor + (f->nmeta > 0);
    dp_output out;
    dp_status s = header && complete
                      ? dp_output_open(&out, path, e)
                      : dp_fail(e, DP_EINPUT, "%s: a tensor's name is not valid UTF-8", path);
    if (!s) {
        write_file(out.f, header, f);
        s = dp_output_close(&out, 0, e);
    }
    return s;
}

/* ---- the container --------------------------------------------------------------------------- */

void dp_tensorfile_drop(dp_tensorfile *f, int i) {
    free(f->tensor[i].name);
    free(f->tensor[i].data);
    f->tensor[i] = f->tensor[--f->ntensor];
}

void dp_tensorfile_free(dp_tensorfile *f) {
    for (int i = 0; i < f->ntensor; i++) {
        free(f->tensor[i].name);
        free(f->tensor[i].data);
    }
    for (int i = 0; i < f->nmeta; i++) {
        free(f->meta_key[i]);
        free(f->meta_value[i]);
    }
    DP_FREE(f->tensor, f->meta_key, f->meta_value, f->path);
    memset(f, 0, sizeof *f);
}

const dp_tensor *dp_tensor_find(const dp_tensorfile *f, const char *name) {
    for (int i = 0; i < f->ntensor; i++)
        if (!strcmp(f->tensor[i].name, name)) return &f->tensor[i];
    return NULL;
}

const char *dp_tensorfile_meta(const dp_tensorfile *f, const char *key) {
    for (int i = 0; i < f->nmeta; i++)
        if (!strcmp(f->meta_key[i], key)) return f->meta_value[i];
    return NULL;
}

/* Room for one more than n elements of an array of room(n). */
static void *grown(void *x, size_t n, size_t size) {
    if (n & (n - 1)) return x;
    void *y = dp_calloc(n ? 2 * n : 1, size);
    if (n) memcpy(y, x, n * size);
    free(x);
    return y;
}

void dp_tensorfile_add(dp_tensorfile *f, const char *name, const char *type, int ndim,
                       const int64_t *shape, const double *data) {
    assert(find_dtype(type) && ndim >= 0 && ndim <= MAX_DIMS);
    dp_tensor new = {.name = dp_strdup(name)}; /* name and type may be of a tensor of f */
    snprintf(new.dtype, sizeof new.dtype, "%s", type);
    f->tensor = grown(f->tensor, (size_t)f->ntensor, sizeof *f->tensor);
    dp_tensor *t = &f->tensor[f->ntensor++];
    *t = new;
    t->ndim = ndim;
    t->n = 1;
    for (int i = 0; i < ndim; i++)
        t->n *= t->shape[i] = shape[i];
    t->data = dp_doubles(t->n);
    memcpy(t->data, data, (size_t)t->n * sizeof *data);
}

void dp_tensorfile_add_format(dp_tensorfile *f, const char *name, dp_format format, int ndim,
                              const int64_t *shape, const double *data) {
    dp_tensorfile_add(f, name,
                      format == DP_BF16   ? "BF16"
                      : format == DP_FP64 ? "F64"
                                          : "F32",
                      ndim, shape, data);
}

void dp_tensorfile_add_meta(dp_tensorfile *f, const char *key, const char *value) {
    const size_t n = (size_t)f->nmeta;
    f->meta_key = grown(f->meta_key, n, sizeof *f->meta_key);
    f->meta_value = grown(f->meta_value, n, sizeof *f->meta_value);
    f->meta_key[f->nmeta] = dp_strdup(key);
    f->meta_value[f->nmeta++] = dp_strdup(value);
}
