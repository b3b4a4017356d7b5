/* gpu/tests/test_arrays.cu - arrays of doubles on a device (dp_arrays.h) against the host, bit for
 * bit. Compared are inputs of every law, exact ones, formats, factors, edits, some entries, and
 * first differences.
 * Exit status 0, 1, or 2 (no device). */
#include "../dp_arrays.h"
#include "device.h"
#include "ref/inputs/inputs_exact.h"
#include "ref/inputs/inputs_large.h"

enum { ROWS = 1001, WIDTH = 24, COUNT = ROWS * WIDTH };
typedef std::vector<double> Doubles;

static void *room(size_t bytes) {
    void *x;
    CUDA(cudaMalloc(&x, bytes));
    return x;
}
static double *sent(const Doubles &x) {
    double *d = (double *)room(x.size() * sizeof(double));
    CUDA(cudaMemcpy(d, x.data(), x.size() * sizeof(double), cudaMemcpyHostToDevice));
    return d;
}
static Doubles fetched(const double *d, size_t n) {
    Doubles x(n);
    CUDA(cudaMemcpy(x.data(), d, n * sizeof(double), cudaMemcpyDeviceToHost));
    return x;
}
static void same(const char *what, const Doubles &got, const Doubles &want) {
    size_t i = 0;
    while (i < want.size() && !memcmp(&got[i], &want[i], sizeof(double)))
        i++;
    fact(i == want.size(), "%s: entry %zu is %a, want %a", what, i, i < want.size() ? got[i] : 0,
         i < want.size() ? want[i] : 0);
}

static void laws() {
    static const dp_large_kind kind[] = {DP_LARGE_NORMAL, DP_LARGE_UNIFORM, DP_LARGE_UNIT};
    dp_err e = {};
    double *d = (double *)room(COUNT * sizeof(double));
    for (int i = 0; i < 6; i++) {
        const dp_large_law law = {kind[i / 2], 1000 + (uint64_t)i, WIDTH, -0.3, 1.7, i % 2};
        Doubles want(COUNT);
        for (int r = 0; r < ROWS; r++)
            dp_large_row(&law, r, &want[(size_t)r * WIDTH]);
        DP(e, dpg_array_fill(d, &law, ROWS, &e));
        same(text("law %d", i).c_str(), fetched(d, COUNT), want);
        for (int x = 0; x < COUNT && i % 2; x++)
            fact(want[x] == dp_bf16d(want[x]), "law %d: %a is no number of bf16", i, want[x]);
    }
    for (uint64_t i = 0; i < 100000; i++) {
        const double x = dp_large_normal(7, i) * ldexp(1, (int)(i % 200) - 100);
        fact(dp_large_rounded(x, 1) == dp_bf16d(x), "%a in bf16: %a, want %a", x,
             dp_large_rounded(x, 1), dp_bf16d(x));
        fact(dp_large_rounded(x, 0) == dp_fp32(x), "%a in fp32", x);
    }
    CUDA(cudaFree(d));
}

/* Tokens of any generator, behind any others. erase: erase and write in place of beta. */
static void exact_inputs(int erase) {
    enum { T = 300, H = 2, HV = 4, K = 32, V = 24, R = 2 };
    std::vector<dp_exact_token> token(T);
    std::vector<uint16_t> old(T * HV);
    for (uint64_t t = 0; t < T; t++) {
        token[t] = {
            {{dp_large_mix(t), dp_large_mix(t + T), t, 1}}, (int64_t)(t % 77), (int64_t)t % 3};
        for (uint64_t i = 0; i < HV; i++)
            old[t * HV + i] = (uint16_t)(dp_large_mix(t * HV + i) & 7);
    }
    dp_exact x = {T, H, HV, K, V, R, K, token.data(), old.data()}, y = x;
    typedef double *(dp_exact::*Array);
    struct {
        size_t n;
        Array at;
        Doubles want;
    } of[] = {{T * H * K, &dp_exact::q},         {T * H * R * K, &dp_exact::k},
              {T * HV * R * V, &dp_exact::v},    {T * HV * K, &dp_exact::g},
              {T * HV * R, &dp_exact::beta},     {T * HV * R * K, &dp_exact::erase},
              {T * HV * R * V, &dp_exact::write}};
    for (auto &f : of) {
        f.want.assign(f.n, 0);
        if (!erase && f.at == &dp_exact::erase) break;
        x.*f.at = f.want.data();
        y.*f.at = sent(f.want);
    }
    dp_err e = {};
    y.token = (dp_exact_token *)room(T * sizeof token[0]);
    y.old = (uint16_t *)room(T * HV * 2);
    CUDA(cudaMemcpy((void *)y.token, token.data(), T * sizeof token[0], cudaMemcpyHostToDevice));
    CUDA(cudaMemcpy((void *)y.old, old.data(), T * HV * 2, cudaMemcpyHostToDevice));
    for (int t = 0; t < T; t++)
        dp_exact_make(&x, t);
    DP(e, dpg_array_exact(&y, &e));
    for (auto &f : of)
        if (y.*f.at) {
            same(text("exact, input %zu", &f - of).c_str(), fetched(y.*f.at, f.n), f.want);
            CUDA(cudaFree(y.*f.at));
        }
    CUDA(cudaFree((void *)y.token));
    CUDA(cudaFree((void *)y.old));
}

static void entries() {
    Doubles want(COUNT, 0), value = {1.5, -2, 3};
    const int64_t at[] = {7, 0, COUNT - 1};
    dp_err e = {};
    double *d = sent(want), *v = sent(value);
    int64_t *places = (int64_t *)room(sizeof at);
    CUDA(cudaMemcpy(places, at, sizeof at, cudaMemcpyHostToDevice));
    for (int i = 0; i < 3; i++)
        want[at[i]] = value[i];
    DP(e, dpg_array_put(d, places, v, 3, &e));
    same("some entries", fetched(d, COUNT), want);
    CUDA(cudaFree(d));
    CUDA(cudaFree(v));
    CUDA(cudaFree(places));
}

static Doubles numbers(int count, uint64_t seed) {
    Doubles x((size_t)count);
    for (int i = 0; i < count; i++)
        x[i] = (float)dp_large_normal(seed, (uint64_t)i);
    return x;
}

static void formats() {
    const Doubles x = numbers(COUNT, 3);
    dp_err e = {};
    double *d = sent(x), *back = sent(Doubles(COUNT, 0));
    void *in = room(COUNT * 4);
    for (int bf16 = 0; bf16 < 2; bf16++) {
        const dpg_dtype t = bf16 ? DPG_BF16 : DPG_F32;
        Doubles want = x;
        for (double &y : want)
            y = bf16 ? dp_bf16((float)y) : (float)y;
        DP(e, dpg_array_narrow(d, COUNT, t, in, &e));
        DP(e, dpg_array_widen(in, COUNT, t, back, &e));
        same(bf16 ? "bf16" : "fp32", fetched(back, COUNT), want);
    }
    DP(e, dpg_array_times(d, COUNT, -8, &e));
    Doubles want = x;
    for (double &y : want)
        y *= -8;
    same("times -8", fetched(d, COUNT), want);
    DP(e, dpg_array_set(d, COUNT, 0.25, &e));
    same("set", fetched(d, COUNT), Doubles(COUNT, 0.25));
    CUDA(cudaFree(d));
    CUDA(cudaFree(back));
    CUDA(cudaFree(in));
}

static void edits() {
    Doubles x = numbers(COUNT, 4);
    x[5] = 0;
    dp_err e = {};
    for (int i = 0; i < 4; i++) {
        double *of = sent(x), *into = sent(x);
        const dp_memory_edit edit = {into, of, ROWS, WIDTH, 4, 9, (dp_edit)i};
        Doubles want = x;
        for (int r = 0; r < ROWS; r++)
            for (int c = 4; c < 9; c++)
                want[r * WIDTH + c] =
                    dp_edited((dp_edit)i, x[r * WIDTH + c], x[(ROWS - 1 - r) * WIDTH + c]);
        DP(e, dpg_array_edit(&edit, &e));
        same(text("edit %d", i).c_str(), fetched(into, COUNT), want);
        CUDA(cudaFree(of));
        CUDA(cudaFree(into));
    }
}

/* The first entry of b that is not a's times factor, in rows that are kept (NULL: all). */
static int64_t first(const Doubles &a, const Doubles &b, const uint8_t *kept, double factor,
                     double small) {
    dp_err e = {};
    double *x = sent(a), *y = sent(b);
    unsigned long long *one = (unsigned long long *)room(sizeof *one);
    uint8_t *rows = kept ? (uint8_t *)room(ROWS) : NULL;
    if (kept) CUDA(cudaMemcpy(rows, kept, ROWS, cudaMemcpyHostToDevice));
    const dp_memory_pair pair = {x, y, rows, ROWS, WIDTH, factor, small};
    int64_t entry = -2;
    DP(e, dpg_array_first(&pair, one, &entry, &e));
    CUDA(cudaFree(x));
    CUDA(cudaFree(y));
    CUDA(cudaFree(one));
    if (rows) CUDA(cudaFree(rows));
    return entry;
}

static void differences() {
    const Doubles a = numbers(COUNT, 5);
    Doubles b = a;
    uint8_t kept[ROWS];
    memset(kept, 1, sizeof kept);
    fact(first(a, b, NULL, 1, 0) == -1, "equal arrays");
    b[COUNT - 1] = nextafter(b[COUNT - 1], 9);
    fact(first(a, b, NULL, 1, 0) == COUNT - 1, "the last entry");
    b[7777] = NAN;
    fact(first(a, b, NULL, 1, 0) == 7777, "the first of two, a NaN");
    kept[7777 / WIDTH] = 0;
    fact(first(a, b, kept, 1, 0) == COUNT - 1, "a row that is not kept");
    kept[ROWS - 1] = 0;
    fact(first(a, b, kept, 1, 0) == -1, "both rows that are not kept");
    Doubles c = b;
    c[7777] = NAN;
    fact(first(b, c, NULL, 1, 0) == -1, "two NaN");
    c = a;
    for (double &y : c)
        y *= -0.125;
    fact(first(a, c, NULL, -8, 0) == -1, "a factor");
    c[3] += 0x1p-40;
    fact(first(a, c, NULL, -8, 0) == 3, "a factor, not of one entry");
    fact(first(a, c, NULL, -8, 0x1p-36) == -1, "a small difference");
    c[3] = 0, c[2] = -0.;
    Doubles zero = c;
    zero[2] = 0;
    fact(first(zero, c, NULL, 1, 0) == -1, "-0 and 0");
}

int main() {
    devices("test_arrays");
    laws();
    exact_inputs(0);
    exact_inputs(1);
    entries();
    formats();
    edits();
    differences();
    printf("%d checks, %d failed\n", checks, failures);
    return failures ? 1 : 0;
}
