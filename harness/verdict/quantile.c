/* F quantiles through the incomplete beta function: P(F > x) = I_y(bottom / 2, top / 2) with y =
 * bottom / (bottom + top x) (Abramowitz and Stegun 26.6.2). Lentz's continued fraction computes it.
 */
#include "quantile.h"
#include "ref/arithmetic/elementary.h"

#include <math.h>

#define MOST_DF 1e6 /* beyond it a distribution is its limit to six digits */
#define HALF_LOG_2PI 0.91893853320467274178

/* log Gamma(x), x > 0: Stirling's series above 12, where its first omitted term is below 1e-14. */
static double log_gamma(double x) {
    double shift = 1;
    while (x < 12) {
        shift *= x;
        x += 1;
    }
    const double z = 1 / (x * x);
    const double series =
        (1.0 / 12 - z * (1.0 / 360 - z * (1.0 / 1260 - z * (1.0 / 1680 - z * (1.0 / 1188))))) / x;
    return (x - 0.5) * dp_log(x) - x + HALF_LOG_2PI + series - dp_log(shift);
}

/* One step of Lentz's method, with the next numerator d of the continued fraction. */
typedef struct {
    double value, c, d;
} fraction;

static double away_from_zero(double x) { return fabs(x) < 1e-300 ? 1e-300 : x; }

static double advance(fraction *f, double numerator) {
    f->d = 1 / away_from_zero(1 + numerator * f->d);
    f->c = away_from_zero(1 + numerator / f->c);
    f->value *= f->c * f->d;
    return f->c * f->d;
}

/* The continued fraction of I_y(a, b), which converges fast for y < (a + 1) / (a + b + 2). */
static double beta_fraction(double y, double a, double b) {
    fraction f = {.value = 1, .c = 1, .d = 1 / away_from_zero(1 - (a + b) * y / (a + 1))};
    f.value = f.d;
    for (int m = 1; m < 100000; m++) {
        advance(&f, m * (b - m) * y / ((a + 2 * m - 1) * (a + 2 * m)));
        const double last =
            advance(&f, -(a + m) * (a + b + m) * y / ((a + 2 * m) * (a + 2 * m + 1)));
        if (fabs(last - 1) < 1e-15) break;
    }
    return f.value;
}

/* I_y(a, b); rest = 1 - y, a separate argument because it may be tiny. */
static double incomplete_beta(double y, double rest, double a, double b) {
    if (y <= 0) return 0;
    if (rest <= 0) return 1;
    const double scale = log_gamma(a + b) - log_gamma(a) - log_gamma(b);
    const double front = dp_exp(scale + a * dp_log(y) + b * dp_log(rest));
    if (y < (a + 1) / (a + b + 2)) return front * beta_fraction(y, a, b) / a;
    return 1 - front * beta_fraction(rest, b, a) / b;
}

double dp_f_tail(double x, double top, double bottom) {
    const double t = fmin(top, MOST_DF);
    const double b = fmin(bottom, MOST_DF);
    if (!(x > 0)) return 1;
    return incomplete_beta(b / (b + t * x), t * x / (b + t * x), b / 2, t / 2);
}

double dp_f_quantile(double p, double top, double bottom) {
    double low = 0;
    double high = 1;
    while (dp_f_tail(high, top, bottom) > p) {
        low = high;
        high *= 2;
        if (high > 1e30) return INFINITY;
    }
    for (int i = 0; i < 60 && high - low > 1e-10 * high; i++) {
        const double middle = (low + high) / 2;
        if (dp_f_tail(middle, top, bottom) > p)
            low = middle;
        else
            high = middle;
    }
    return high;
}
