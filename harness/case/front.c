/* The convolutions before a recurrence, and their true outputs (`front.h`). */
#include "front.h"

#include <math.h>
#include <string.h>

double dp_row_norm(const double *x, int64_t n) {
    double s = 0;
    for (int64_t i = 0; i < n; i++)
        s += x[i] * x[i];
    return sqrt(s) * (1 + (double)(n + 4) * 0x1p-52);
}

double *dp_row_norms(const double *x, int64_t rows, int width) {
    double *n = dp_doubles(rows);
    for (int64_t r = 0; r < rows; r++)
        n[r] = dp_row_norm(x + r * width, width);
    return n;
}

/* ---- truth of the outputs -------------------------------------------------------------------- */

dp_status dp_step_build(dp_case *c, dp_err *e) {
    dp_problem *p = &c->p;
    double worst = 0;
    for (int i = 0; i < DP_NQKV; i++) {
        dp_conv *v = &c->step.conv[i];
        if (!c->step.on[i]) continue;
        const int width = dp_qkv_width(p, i);
        dp_conv_result y;
        v->x = *dp_qkv_at(p, i);
        v->T = p->T;
        v->D = dp_qkv_heads(p, i) * width;
        v->Nseq = p->Nseq;
        v->cu = dp_calloc((size_t)p->Nseq + 1, sizeof *v->cu);
        memcpy(v->cu, p->cu, sizeof *p->cu * ((size_t)p->Nseq + 1));
        dp_conv_result_alloc(&y, v);
        dp_conv_result_alloc(&c->step.rad[i], v);
        dp_conv_truth(v, c->bits, &y, &c->step.rad[i]);
        *dp_qkv_at(p, i) = y.y;
        for (int64_t r = 0; r < p->T * dp_qkv_heads(p, i); r++) {
            const double n = dp_row_norm(y.y + r * width, width),
                         off = dp_row_norm(c->step.rad[i].y + r * width, width);
            if (!(off <= 0x1p-40 * n))
                return dp_fail(e, DP_EINPUT,
                               "%s: the convolution's %s of token %lld, head %lld has no radius, "
                               "or one that is large: %g of %g",
                               c->path, dp_qkv_name(i), (long long)(r / dp_qkv_heads(p, i)),
                               (long long)(r % dp_qkv_heads(p, i)), off, n);
            if (n > 0)
                worst = fmax(worst, off / n); /* a row of zeros (off <= 0 too) is known exactly */
        }
    }
    p->input_error = worst * (1 + 0x1p-30);
    return DP_OK;
}

void dp_step_free(dp_case *c) {
    for (int i = 0; i < DP_NQKV; i++) {
        dp_conv_free(&c->step.conv[i]);
        dp_conv_result_free(&c->step.rad[i]);
    }
}
