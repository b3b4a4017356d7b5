/* Unit lower triangular systems I + N: substitution, and three methods for the inverse. */
#include "adversary.h"
#include <math.h>
#include <stdlib.h>

void substitute(int n, int m, const float *N, int transpose, float *x) {
    for (int step = 0; step < n; step++) {
        const int i = transpose ? n - 1 - step : step;
        const int from = transpose ? i + 1 : 0;
        const int to = transpose ? n : i;
        for (int j = from; j < to; j++) {
            const float a = transpose ? N[j * n + i] : N[i * n + j];
            for (int l = 0; a != 0 && l < m; l++)
                x[i * m + l] -= a * x[j * m + l];
        }
    }
}

static void identity(int n, float *x) {
    memset(x, 0, sizeof *x * (size_t)n * (size_t)n);
    for (int i = 0; i < n; i++)
        x[i * n + i] = 1;
}

static float largest(int n, const float *x) {
    float most = 0;
    for (int i = 0; i < n * n; i++)
        most = fmaxf(most, fabsf(x[i]));
    return most;
}

float powers_grown;

/* (I + N)^(-1) = (I - N) (I + N^2) (I + N^4) .., as N^n = 0. */
static void neumann(sum_order order, int n, const float *N, float *inv) {
    float *power = floats(3 * (int64_t)n * n);
    float *square = power + n * n;
    float *next = square + n * n;
    identity(n, inv);
    for (int i = 0; i < n * n; i++) {
        inv[i] -= N[i];
        power[i] = N[i];
    }
    float most = 0;
    for (int e = 2; e < n; e *= 2) {
        const float kept = 2 * e < n ? 1 : 1 - knob.cut_series;
        product(order, n, n, n, by_rows(power, n, FP32), by_rows(power, n, FP32), square);
        product(order, n, n, n, by_rows(inv, n, FP32), by_rows(square, n, FP32), next);
        for (int i = 0; i < n * n; i++) {
            inv[i] += kept * next[i];
            power[i] = square[i];
        }
        most = fmaxf(most, largest(n, power));
    }
    powers_grown = fmaxf(powers_grown, most / largest(n, inv));
    free(power);
}

/* inv = [[A, 0], [-B C A, B]] of known diagonal blocks A, B of `size`, doubled each time; operands
 * of the products in format f. */
static void doubling(sum_order order, format f, int size, int n, const float *N, float *inv) {
    float *left = floats(2 * (int64_t)n * n);
    float *low = left + n * n;
    for (; size < n; size *= 2)
        for (int at = 0; at + size < n; at += 2 * size) {
            const int mid = at + size;
            const int rest = n - mid < size ? n - mid : size;
            const operand B = by_rows(inv + mid * n + mid, n, f);
            const operand C = by_rows(N + mid * n + at, n, f);
            const operand A = by_rows(inv + at * n + at, n, f);
            product(order, rest, size, rest, B, C, left);
            product(order, rest, size, size, by_rows(left, size, f), A, low);
            for (int i = 0; i < rest; i++)
                for (int j = 0; j < size; j++)
                    inv[(mid + i) * n + at + j] = -low[i * size + j];
        }
    free(left);
}

/* Blocks of 16 rows by substitution, then merged. */
static void merged(sum_order order, format f, int n, const float *N, float *inv) {
    enum { BLOCK = 16 };
    float *own = floats(2 * BLOCK * BLOCK), *solved = own + BLOCK * BLOCK;
    memset(inv, 0, sizeof *inv * (size_t)n * (size_t)n);
    for (int at = 0; at < n; at += BLOCK) {
        const int size = n - at < BLOCK ? n - at : BLOCK;
        for (int i = 0; i < size * size; i++)
            own[i] = N[(at + i / size) * n + at + i % size];
        identity(size, solved);
        substitute(size, size, own, 0, solved);
        for (int i = 0; i < size * size; i++)
            inv[(at + i / size) * n + at + i % size] = solved[i];
    }
    doubling(order, f, BLOCK, n, N, inv);
    free(own);
}

void inverse_of(const design *d, int n, const float *N, float *inv) {
    if (d->inverse == NEUMANN) {
        neumann(d->sums, n, N, inv);
    } else if (d->inverse == DOUBLING) {
        identity(n, inv);
        doubling(d->sums, FP32, 1, n, N, inv);
    } else if (d->inverse == MERGED) {
        merged(d->sums, d->factors ? d->factors : BF16, n, N, inv);
    } else {
        identity(n, inv);
        substitute(n, n, N, 0, inv);
    }
}
