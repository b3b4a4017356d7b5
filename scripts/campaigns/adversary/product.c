/* Products of matrices whose operands are rounded first, with fp32 sums in a stated order. */
#include "adversary.h"
#include <stdio.h>
#include <stdlib.h>

static void *memory(int64_t bytes) {
    void *x = malloc((size_t)(bytes > 0 ? bytes : 1));
    if (x) return x;
    fprintf(stderr, "adversary: out of memory\n");
    exit(1);
}

float *floats(int64_t n) {
    float *x = memory(n * (int64_t)sizeof *x);
    memset(x, 0, (size_t)n * sizeof *x);
    return x;
}

double *doubles_of(int64_t n) {
    double *x = memory(n * (int64_t)sizeof *x);
    memset(x, 0, (size_t)n * sizeof *x);
    return x;
}

static void copy_rounded(operand a, int m, int n, float *to) {
    for (int i = 0; i < m; i++)
        for (int j = 0; j < n; j++)
            to[(int64_t)i * n + j] = a.x[i * a.row + j * a.col];
    round_all(a.f, to, (int64_t)m * n);
}

/* c [n] += a [k] b [k][n], rows of b from first to last or from last to first. */
static void add_row(int reversed, int n, int k, const float *a, const float *b, float *c) {
    for (int step = 0; step < k; step++) {
        const int l = reversed ? k - 1 - step : step;
        const float *row = b + (int64_t)l * n;
        const float x = a[l];
        for (int j = 0; j < n; j++)
            c[j] += x * row[j];
    }
}

enum { LEAF = 4 };

/* c [n] = a [k] b [k][n]: halves added to each other; work holds n numbers for every level. */
static void pairwise_row(int n, int k, const float *a, const float *b, float *c, float *work) {
    memset(c, 0, (size_t)n * sizeof *c);
    if (k <= LEAF) {
        add_row(0, n, k, a, b, c);
        return;
    }
    const int half = k / 2;
    pairwise_row(n, half, a, b, c, work + n);
    pairwise_row(n, k - half, a + half, b + (int64_t)half * n, work, work + n);
    for (int j = 0; j < n; j++)
        c[j] += work[j];
}

void product(sum_order order, int m, int n, int k, operand a, operand b, float *c) {
    float *left = memory((int64_t)(m * k + k * n + 32 * n + 1) * (int64_t)sizeof *left);
    float *right = left + m * k;
    float *work = right + k * n;
    copy_rounded(a, m, k, left);
    copy_rounded(b, k, n, right);
    for (int i = 0; i < m; i++) {
        float *row = c + (int64_t)i * n;
        if (order == PAIRWISE) {
            pairwise_row(n, k, left + i * k, right, row, work);
        } else {
            memset(row, 0, (size_t)n * sizeof *row);
            add_row(order == REVERSED, n, k, left + i * k, right, row);
        }
    }
    free(left);
}

float sum_of(sum_order order, int64_t n, const float *x) {
    float s = 0;
    if (order == PAIRWISE && n > LEAF)
        return sum_of(order, n / 2, x) + sum_of(order, n - n / 2, x + n / 2);
    for (int64_t i = 0; i < n; i++)
        s += x[order == REVERSED ? n - 1 - i : i];
    return s;
}
