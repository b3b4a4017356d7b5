/* safetensors: round trips bit for bit, and every refusal by its message. */
#include "gt.h"
#include "ref/files/safetensors.h"
#include "ref/vocabulary/formats.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

static char *temp_path(char *out, const char *name) {
    sprintf(out, "%s/%s", gt_tmpdir(), name);
    return out;
}

/* length prefix (that of the header when < 0) + header + ndata bytes 0, 1, 2, ... */
static size_t build(unsigned char *out, long long length, const char *header, int ndata) {
    const size_t n = strlen(header);
    const unsigned long long claim = length < 0 ? n : (unsigned long long)length;
    for (int i = 0; i < 8; i++)
        out[i] = (unsigned char)(claim >> 8 * i);
    memcpy(out + 8, header, n);
    for (int i = 0; i < ndata; i++)
        out[8 + n + i] = (unsigned char)i;
    return 8 + n + ndata;
}

static void refuse(int line, long long length, const char *header, int ndata,
                   const char *const *words) {
    unsigned char *b = dp_calloc(strlen(header) + 64 + (size_t)ndata, 1);
    dp_tensorfile f;
    dp_err e = {0};
    const dp_status s =
        dp_safetensors_parse(b, build(b, length, header, ndata), "x.safetensors", &f, &e);
    CHECK(s == DP_EINPUT && e.code == DP_EINPUT, "line %d: status %d", line, s);
    CHECK(strstr(e.msg, "x.safetensors"), "line %d: file not named: %s", line, e.msg);
    for (; *words; words++)
        CHECK(strstr(e.msg, *words), "line %d: '%s' not in: %s", line, *words, e.msg);
    CHECK(f.ntensor == 0 && !f.tensor && !f.path, "line %d: something of a refused file is left",
          line);
    free(b);
}
#define REFUSE(length, header, ndata, ...) \
    refuse(__LINE__, length, header, ndata, (const char *const[]){__VA_ARGS__, NULL})
#define TENSOR(dtype, shape, offsets) \
    "{\"a\":{\"dtype\":\"" dtype "\",\"shape\":" shape ",\"data_offsets\":" offsets "}}"
#define TWO(o1, o2)                                                \
    "{\"a\":{\"dtype\":\"F32\",\"shape\":[2],\"data_offsets\":" o1 \
    "},\"b\":{\"dtype\":\"F32\",\"shape\":[2],\"data_offsets\":" o2 "}}"

DP_TEST(safetensors, refuses_broken_framing) {
    dp_tensorfile f;
    dp_err e = {0};
    CHECK(dp_safetensors_parse("abc", 3, "x.safetensors", &f, &e) == DP_EINPUT &&
              strstr(e.msg, "truncated: 3 bytes"),
          "%s", e.msg);
    REFUSE(1000, "{}", 0, "truncated", "1000", "2 bytes follow");
    REFUSE(3, "{}", 0, "truncated", "header length = 3", "2 bytes follow");
    REFUSE(100000001, "{}", 0, "100000001", "limit");
    REFUSE(0x7fffffffffffffff, "{}", 0, "9223372036854775807", "limit");
    REFUSE(0, "", 0, "header", "'{'");
    REFUSE(-1, " {}", 0, "'{'");
    REFUSE(-1, "{\"a\":", 0, "header: byte");
    REFUSE(-1, "{} x", 0, "header: byte", "end of file expected");
    REFUSE(-1, "{\"a\":1e999}", 0, "real number overflow");
    REFUSE(-1, "{}", 4, "4 data bytes", "ends at 0");
}

DP_TEST(safetensors, refuses_broken_descriptions) {
    REFUSE(-1, "{\"a\":3}", 0, "tensor a", "object");
    REFUSE(-1, "{\"a\":{\"shape\":[1],\"data_offsets\":[0,4]}}", 4, "tensor a", "dtype", "missing");
    REFUSE(-1, "{\"a\":{\"dtype\":\"F32\",\"data_offsets\":[0,4]}}", 4, "tensor a", "shape",
           "missing");
    REFUSE(-1, "{\"a\":{\"dtype\":\"F32\",\"shape\":[1]}}", 4, "tensor a", "data_offsets",
           "two integers");
    REFUSE(-1, "{\"a\":{\"dtype\":\"F32\",\"shape\":[1],\"data_offsets\":[0,4],\"extra\":1}}", 4,
           "tensor a", "unknown field extra");
    REFUSE(-1, TENSOR("F8_E4M3", "[4]", "[0,4]"), 4, "tensor a", "dtype = F8_E4M3", "BF16");
    REFUSE(-1, TENSOR("F32", "[\"x\"]", "[0,4]"), 4, "tensor a", "shape[0]", "not an integer");
    REFUSE(-1, TENSOR("F32", "[2.0]", "[0,8]"), 8, "shape[0]", "not an integer");
    REFUSE(-1, TENSOR("F32", "[1,-2]", "[0,8]"), 8, "tensor a", "shape[1] = -2", "negative");
    REFUSE(-1, TENSOR("F32", "[4294967296,4294967296]", "[0,4]"), 4, "tensor a",
           "shape[1] = 4294967296", "multiply to more than");
    REFUSE(-1, TENSOR("F64", "[2305843009213693952]", "[0,0]"), 0, "tensor a",
           "shape[0] = 2305843009213693952", "multiply to more than");
    REFUSE(-1, TENSOR("F32", "[99999999999999999999]", "[0,4]"), 4, "header: byte",
           "too big integer");
    REFUSE(-1, TENSOR("F32", "[1,1,1,1,1,1,1,1,1]", "[0,4]"), 4, "tensor a", "9 dimensions");
    REFUSE(-1, "{\"__metadata__\":{\"k\":1}}", 0, "__metadata__", "k", "string");
    REFUSE(-1, "{\"__metadata__\":[]}", 0, "__metadata__", "object");
    REFUSE(-1,
           "{\"abc\":{\"dtype\":\"F32\",\"shape\":[1],\"data_offsets\":[0,4]},\"abc\":{\"dtype\":"
           "\"F32\",\"shape\":[1],\"data_offsets\":[4,8]}}",
           8, "duplicate", "abc");
}

DP_TEST(safetensors, refuses_broken_offsets) {
    REFUSE(-1, TENSOR("F32", "[2]", "[0,8]"), 7, "tensor a", "data_offsets = [0, 8]",
           "7 data bytes", "truncated");
    REFUSE(-1, TENSOR("F32", "[2]", "[-8,0]"), 8, "tensor a", "data_offsets = [-8, 0]", "outside");
    REFUSE(-1, TENSOR("F32", "[2]", "[8,0]"), 8, "tensor a", "[8, 0]", "outside");
    REFUSE(-1, TENSOR("F32", "[2]", "[0,9223372036854775807]"), 8, "9223372036854775807",
           "outside");
    REFUSE(-1, TENSOR("F32", "[2]", "[0,4]"), 8, "tensor a", "[0, 4]", "4 bytes", "F32",
           "2 elements");
    REFUSE(-1, TENSOR("BF16", "[2]", "[0,8]"), 8, "tensor a", "8 bytes", "BF16");
    REFUSE(-1, TENSOR("F32", "[2]", "[0,\"8\"]"), 8, "data_offsets", "two integers");
    REFUSE(-1, TENSOR("F32", "[2]", "[0,8,8]"), 8, "data_offsets", "two integers");
    REFUSE(-1, TWO("[0,8]", "[4,12]"), 12, "tensor b", "[4, 12]", "overlaps a", "ends at 8");
    REFUSE(-1, TWO("[0,8]", "[0,8]"), 8, "tensor b", "overlaps a");
    REFUSE(-1, TWO("[0,8]", "[12,20]"), 20, "tensor b", "[12, 20]", "hole after a", "8");
    REFUSE(-1, TWO("[4,12]", "[12,20]"), 20, "tensor a", "hole after the header");
    REFUSE(-1, TWO("[0,8]", "[8,16]"), 20, "20 data bytes", "(b)", "ends at 16");
}

DP_TEST(safetensors, refuses_integers_that_doubles_cannot_hold) {
    unsigned char b[256];
    size_t n = build(b, -1, TENSOR("I64", "[2]", "[0,16]"), 16);
    memset(b + n - 16, 0, 16);
    dp_tensorfile f;
    dp_err e = {0};
    b[n - 2] = 0x20;
    CHECK(dp_safetensors_parse(b, n, "x.safetensors", &f, &e) == DP_OK &&
              f.tensor[0].data[1] == 9007199254740992.0,
          "2^53 is exact: %s", e.msg);
    dp_tensorfile_free(&f);
    b[n - 8] = 1;
    CHECK(dp_safetensors_parse(b, n, "x.safetensors", &f, &e) == DP_EINPUT &&
              strstr(e.msg, "a[1] = 9007199254740993"),
          "2^53 + 1 is not: %s", e.msg);
    const double half = 0.5;
    const int64_t one = 1;
    char path[512];
    dp_tensorfile w = {0};
    dp_err e2 = {0};
    dp_tensorfile_add(&w, "cu", "I64", 1, &one, &half);
    CHECK(dp_safetensors_write(temp_path(path, "half.safetensors"), &w, &e2) == DP_EINPUT &&
              strstr(e2.msg, "cu[0] = 0.5") && access(path, F_OK),
          "%s", e2.msg);
    dp_tensorfile_free(&w);
}

DP_TEST(safetensors, accepts_what_the_format_allows) {
    unsigned char b[1024];
    dp_tensorfile f;
    dp_err e = {0};
    const char *h = "{\"b\":{\"dtype\":\"BF16\",\"shape\":[2,1],\"data_offsets\":[8,12]},\"empty\":"
                    "{\"dtype\":\"F64\",\"shape\":[0,3],\"data_offsets\":[8,8]},"
                    "\"a\":{\"dtype\":\"F64\",\"shape\":[],\"data_offsets\":[0,8]},\"__metadata__"
                    "\":{\"k\":\"v\"}}   \n";
    REQUIRE(dp_safetensors_parse(b, build(b, -1, h, 12), "x", &f, &e) == DP_OK, "%s", e.msg);
    const dp_tensor *a = dp_tensor_find(&f, "a"), *c = dp_tensor_find(&f, "empty"),
                    *t = dp_tensor_find(&f, "b");
    double want;
    memcpy(&want, b + 8 + strlen(h), 8);
    CHECK(a && a->ndim == 0 && a->n == 1 && a->data[0] == want, "scalar");
    CHECK(c && c->n == 0 && c->shape[1] == 3, "empty tensor");
    CHECK(t && t->n == 2 && t->data[1] == dp_bf16_from_bits(0x0b0a), "bf16 %a", t ? t->data[1] : 0);
    CHECK(!dp_tensor_find(&f, "zz") && !strcmp(dp_tensorfile_meta(&f, "k"), "v") &&
              !dp_tensorfile_meta(&f, "q"),
          "lookups");
    dp_tensorfile_free(&f);
}

static void round_trip(const char *dtype, int n, const double *x) {
    char path[512];
    dp_tensorfile w = {0}, r;
    dp_err e = {0};
    const int64_t shape[2] = {n / 2, 2};
    dp_tensorfile_add(&w, "pad", "BF16", 1, (const int64_t[]){1}, x);
    dp_tensorfile_add(&w, "x", dtype, 2, shape, x);
    dp_tensorfile_add_meta(&w, "quote\"key", "line\nbreak");
    REQUIRE(dp_safetensors_write(temp_path(path, "rt.safetensors"), &w, &e) == DP_OK, "%s", e.msg);
    REQUIRE(dp_safetensors_read(path, &r, &e) == DP_OK, "%s", e.msg);
    const dp_tensor *t = dp_tensor_find(&r, "x");
    REQUIRE(t && t->ndim == 2 && t->shape[0] == n / 2 && !strcmp(t->dtype, dtype), "%s: shape",
            dtype);
    for (int i = 0; i < n; i++)
        CHECK(isnan(x[i]) ? isnan(t->data[i]) : !memcmp(&t->data[i], &x[i], 8),
              "%s[%d]: wrote %a, read %a", dtype, i, x[i], t->data[i]);
    CHECK(!strcmp(dp_tensorfile_meta(&r, "quote\"key"), "line\nbreak"), "metadata");
    dp_tensorfile_free(&w);
    dp_tensorfile_free(&r);
}

/* Old code gave a file of 3, 5, 6 or 7 tensors no room for one more. */
DP_TEST(safetensors, a_file_that_was_read_takes_more_tensors) {
    const int64_t shape[1] = {1};
    const double x = 3;
    for (int n = 1; n < 9; n++) {
        dp_tensorfile w = {0}, f;
        dp_err e = {0};
        char path[600], name[12];
        for (int i = 0; i < n; i++) {
            snprintf(name, sizeof name, "a%d", i);
            dp_tensorfile_add(&w, name, "F32", 1, shape, &x);
        }
        REQUIRE(!dp_safetensors_write(temp_path(path, "more"), &w, &e), "%s", e.msg);
        REQUIRE(!dp_safetensors_read(path, &f, &e), "%s", e.msg);
        for (int i = n; i < 2 * n + 3; i++) {
            snprintf(name, sizeof name, "a%d", i);
            dp_tensorfile_add(&f, name, "F32", 1, shape, &x);
        }
        CHECK(f.ntensor == 2 * n + 3 && f.tensor[n].data[0] == 3, "%d tensors", n);
        dp_tensorfile_free(&w);
        dp_tensorfile_free(&f);
    }
}

DP_TEST(safetensors, round_trips_every_16_bit_number) {
    double *b = dp_doubles(65536), *h = dp_doubles(65536);
    for (int i = 0; i < 65536; i++) {
        b[i] = dp_bf16_from_bits((uint16_t)i);
        h[i] = dp_fp16_from_bits((uint16_t)i);
    }
    round_trip("BF16", 65536, b);
    round_trip("F16", 65536, h);
    round_trip("F32", 65536, b);
    round_trip("F64", 65536, h);
    free(b);
    free(h);
}

DP_TEST(safetensors, round_trips_special_and_integer_values) {
    const double f[] = {0.0, -0.0,     INFINITY,        -INFINITY,
                        NAN, 0x1p-149, -0x1.fffffep127, 1.0 / 3 - 1.0 / 3};
    const double d[] = {0x1p-1074, 0x1.fffffffffffffp1023, -0.1, 1.0 / 3, NAN, -INFINITY, -0.0, 3};
    const double i[] = {0, -1, 2147483647, -2147483648.0},
                 l[] = {0, -1, 9007199254740992.0, -9007199254740992.0};
    round_trip("F32", 8, f);
    round_trip("F64", 8, d);
    round_trip("I32", 4, i);
    round_trip("I64", 4, l);
}

DP_TEST(safetensors, writes_round_once) {
    const double x[] = {1 + 0x1p-8 + 0x1p-40,
                        1 + 0x1p-11 + 0x1p-40}; /* fp32 first would make a tie, then round to 1 */
    const int64_t one = 1;
    char path[512];
    dp_tensorfile w = {0}, r;
    dp_err e = {0};
    dp_tensorfile_add(&w, "b", "BF16", 1, &one, x);
    dp_tensorfile_add(&w, "h", "F16", 1, &one, x + 1);
    REQUIRE(!dp_safetensors_write(temp_path(path, "once.safetensors"), &w, &e) &&
                !dp_safetensors_read(path, &r, &e),
            "%s", e.msg);
    CHECK(dp_tensor_find(&r, "b")->data[0] == 1 + 0x1p-7 &&
              dp_tensor_find(&r, "h")->data[0] == 1 + 0x1p-10,
          "%a %a", r.tensor[0].data[0], r.tensor[1].data[0]);
    dp_tensorfile_free(&w);
    dp_tensorfile_free(&r);
}

DP_TEST(safetensors, write_is_all_or_nothing) {
    char path[512], dir[512], cmd[1200], out[1024];
    dp_tensorfile w = {0};
    dp_err e = {0}, e2 = {0}, e3 = {0};
    const double x = 1;
    const int64_t one = 1;
    dp_tensorfile_add(&w, "a", "F32", 1, &one, &x);
    CHECK(dp_safetensors_write(temp_path(path, "no/such/folder.safetensors"), &w, &e) == DP_EIO &&
              strstr(e.msg, "no/such"),
          "%s", e.msg);
    sprintf(dir, "%s/isdir.safetensors", gt_tmpdir());
    sprintf(cmd, "mkdir %s && touch %s/x", dir, dir);
    gt_run(cmd, out, sizeof out);
    CHECK(dp_safetensors_write(dir, &w, &e2) == DP_EIO && strstr(e2.msg, "isdir"), "%s", e2.msg);
    sprintf(cmd, "ls %s/*.tmp", gt_tmpdir());
    CHECK(gt_run(cmd, out, sizeof out) != 0, "temporary file left behind: %s", out);
    dp_tensorfile_add(&w, "a", "F32", 1, &one, &x);
    CHECK(dp_safetensors_write(temp_path(path, "twice.safetensors"), &w, &e3) == DP_EINPUT &&
              strstr(e3.msg, "tensor a") && access(path, F_OK),
          "%s", e3.msg);
    dp_tensorfile_free(&w);
}

DP_TEST(safetensors, read_names_what_it_cannot_open) {
    dp_tensorfile f;
    dp_err e = {0}, e2 = {0};
    CHECK(dp_safetensors_read("/no/such.safetensors", &f, &e) == DP_EIO &&
              strstr(e.msg, "/no/such.safetensors"),
          "%s", e.msg);
    CHECK(dp_safetensors_read("/dev/zero", &f, &e2) == DP_EINPUT &&
              strstr(e2.msg, "/dev/zero: not a regular file"),
          "%s", e2.msg);
}
