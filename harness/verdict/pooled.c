/* Fisher's sum over cases (pooled.h). */
#include "pooled.h"
#include "quantile.h"
#include "ref/arithmetic/elementary.h"

#include <math.h>

dp_share dp_share_of_runs(int n, const dp_share *run) {
    dp_share s = {0, INFINITY, INFINITY};
    for (int i = 0; i < n; i++) {
        s.square += run[i].square / n;
        s.top = fmin(s.top, run[i].top);
        s.bottom = fmin(s.bottom, run[i].bottom);
    }
    return s;
}

/* The chance of as much, were every error `grown` times as large. */
static double chance(int n, const dp_share *of_case, const double *factor, double grown) {
    double sum = 0;
    for (int c = 0; c < n; c++) {
        const double x = of_case[c].square * (grown / factor[c]) * (grown / factor[c]);
        const double p = dp_f_tail(x, of_case[c].top, of_case[c].bottom);
        sum -= 2 * dp_log(fmax(p, DP_POOLED_LEAST));
    }
    return dp_f_tail(sum / (2 * n), 2 * n, INFINITY);
}

static double detects(int n, const dp_share *of_case, const double *factor) {
    double low = 1.0 / 64;
    double high = 64;
    if (chance(n, of_case, factor, high) > DP_ALARM) return INFINITY;
    for (int i = 0; i < 40; i++) {
        const double middle = sqrt(low * high);
        if (chance(n, of_case, factor, middle) > DP_ALARM)
            low = middle;
        else
            high = middle;
    }
    return high;
}

dp_pooled dp_pool(int n, const dp_share *of_case, const double *factor) {
    dp_pooled r = {.cases = n};
    for (int c = 0; c < n; c++) {
        r.freedom += of_case[c].top;
        r.ratio += of_case[c].top * of_case[c].square;
    }
    r.ratio = sqrt(r.ratio / r.freedom);
    r.chance = chance(n, of_case, factor, 1);
    r.detects = detects(n, of_case, factor);
    return r;
}
