/* Entries of inputs that a case file overrides, the key override: `name[i,j,..] value, ..`
 * (case_parts.h). */
#define _GNU_SOURCE
#include "case_parts.h"
#include "ref/vocabulary/number.h"

#include <errno.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

/* A block of an input: lo <= index < hi on every axis. */
typedef struct {
    const dp_case_input *s;
    int64_t lo[4], hi[4];
} block;

/* One index or * for all of them; *p moves past it. */
static dp_status parse_axis(const dp_casefile *f, const char **p, const char *begin, block *b,
                            int d, dp_err *e) {
    const dp_case_input *s = b->s;
    char *end;
    errno = 0;
    while (**p == ' ')
        ++*p;
    const int all = **p == '*';
    b->lo[d] = strtoll(*p, &end, 10);
    if (all) {
        b->lo[d] = 0;
        end = (char *)*p + 1;
    }
    if (end == *p || errno || b->lo[d] < 0 || b->lo[d] >= s->shape[d])
        return dp_casefile_refuse(f, "override", e, "index %d of %s at '%.40s' is not in 0..%lld",
                                  d, s->field->name, begin, (long long)s->shape[d] - 1);
    b->hi[d] = all ? s->shape[d] : b->lo[d] + 1;
    *p = end;
    return DP_OK;
}

/* `[i,j,..]`; *p moves past it. */
static dp_status parse_block(const dp_casefile *f, const char **p, block *b, dp_err *e) {
    const char *begin = *p;
    int d = 0;
    for (++*p; d < b->s->ndim; d++) {
        const dp_status st = parse_axis(f, p, begin, b, d, e);
        if (st) return st;
        if (d + 1 == b->s->ndim) continue;
        if (**p != ',') break;
        ++*p;
    }
    if (d != b->s->ndim || **p != ']')
        return dp_casefile_refuse(f, "override", e, "%s takes %d indices, at '%.40s'",
                                  b->s->field->name, b->s->ndim, begin);
    ++*p;
    return DP_OK;
}

static int representable(double x, dp_format f) {
    const double y = f == DP_BF16 ? dp_bf16d(x) : f == DP_FP32 ? dp_fp32(x) : x;
    return isnan(x) ? 1 : y == x;
}

/* A number that the input's format holds; *p moves past it. begin: of the whole item. */
static dp_status parse_value(const dp_casefile *f, const char **p, const char *begin, dp_format fmt,
                             double *x, dp_err *e) {
    const char *end;
    const dp_number read = dp_number_real_prefix(*p + strspn(*p, " \t"), x, &end);
    if (read == DP_NUMBER_NONE)
        return dp_casefile_refuse(f, "override", e, "no value after the index at '%.40s'", begin);
    if (read == DP_NUMBER_RANGE)
        return dp_casefile_refuse(f, "override", e,
                                  "the value at '%.40s' is not a number that fp64 holds", begin);
    if (!representable(*x, fmt))
        return dp_casefile_refuse(f, "override", e, "%a at '%.40s' is not a number of %s", *x,
                                  begin, dp_formats[fmt].name);
    *p = end;
    return DP_OK;
}

static void set_block(const block *b, double x) {
    const dp_case_input *s = b->s;
    int64_t i[4] = {0}, n = 1;
    for (int d = 0; d < s->ndim; d++)
        n *= b->hi[d] - b->lo[d];
    for (int64_t k = 0; k < n; k++) {
        int64_t rest = k, at = 0;
        for (int d = s->ndim; d-- > 0; rest /= b->hi[d] - b->lo[d])
            i[d] = b->lo[d] + rest % (b->hi[d] - b->lo[d]);
        for (int d = 0; d < s->ndim; d++)
            at = at * s->shape[d] + i[d];
        (*s->where)[at] = x;
    }
}

/* One `name[i,j,..] value`; *p moves past it. */
static dp_status override_one(const dp_casefile *f, dp_case *c, const char **p, dp_err *e) {
    dp_case_input s[DP_CASE_MAX_INPUTS];
    block b = {0};
    double x;
    const char *begin = *p;
    const size_t len = strcspn(*p, "[ ,");
    const int n = dp_case_inputs(c, s);
    for (int i = 0; i < n; i++)
        if (strlen(s[i].field->name) == len && !strncmp(s[i].field->name, begin, len)) b.s = &s[i];
    if (!b.s || !*b.s->where)
        return dp_casefile_refuse(f, "override", e, "no tensor of this case at '%.40s'", begin);
    *p += len;
    if (**p != '[')
        return dp_casefile_refuse(f, "override", e, "expected name[index] value at '%.40s'", begin);
    dp_status st = parse_block(f, p, &b, e);
    if (!st) st = parse_value(f, p, begin, dp_case_input_format(b.s->field, c->input_dtype), &x, e);
    if (st) return st;
    while (**p == ' ')
        ++*p;
    if (**p && **p != ',') return dp_casefile_refuse(f, "override", e, "trailing '%.40s'", *p);
    set_block(&b, x);
    return DP_OK;
}

dp_status dp_case_override(const dp_casefile *f, dp_case *c, dp_err *e) {
    dp_status s = DP_OK;
    for (const char *p = f->override; !s && p && *p;) {
        while (*p == ' ' || *p == '\t')
            p++;
        s = override_one(f, c, &p, e);
        if (!s && *p == ',' && !*++p) s = dp_casefile_refuse(f, "override", e, "ends with a comma");
    }
    return s;
}
