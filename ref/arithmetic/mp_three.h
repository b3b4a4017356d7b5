/* ref/arithmetic/mp_three.h - products and sums of MPFR numbers of 192 bits by code of their own.
 *
 * MPFR's fast code ends one bit below three limbs, and the truth has all 192 in them. Every result
 * is that of MPFR_RNDN, bit for bit (test elementary.three_limbs_are_mpfr): no error bound knows
 * which made it. Other precisions, zeros, infinities, NaN, exponents beyond 2^40 and sums that
 * cancel 64 bits go to MPFR. Flags are not kept.
 */
#pragma once
#include <mpfr.h>
#include <stdint.h>
#ifdef __x86_64__
#include <x86intrin.h>
#endif

#define MP_THREE_BITS 192
#define MP_THREE_MOST ((int64_t)1 << 40) /* zero, infinity and NaN have exponents below -2^62 */
typedef unsigned __int128 mp_wide;

/* (-1)^negative m 2^(e - 192); m: low limb first, its highest bit set */
typedef struct {
    uint64_t m[3];
    int64_t e;
    int negative;
} mp_three;

/* *sum = a + b + carry; the new carry */
static inline unsigned char mp_carry(unsigned char carry, uint64_t a, uint64_t b, uint64_t *sum) {
#ifdef __x86_64__
    unsigned long long s;
    carry = _addcarry_u64(carry, a, b, &s);
    *sum = s;
    return carry;
#else
    const mp_wide s = (mp_wide)a + b + carry;
    *sum = (uint64_t)s;
    return (unsigned char)(s >> 64);
#endif
}

/* 0: x is no such number. */
static inline int mp_three_get(mpfr_srcptr x, mp_three *r) {
    const mp_limb_t *m = mpfr_custom_get_significand(x);
    r->e = mpfr_custom_get_exp(x);
    if (mpfr_get_prec(x) != MP_THREE_BITS || r->e < -MP_THREE_MOST || r->e > MP_THREE_MOST)
        return 0;
    for (int i = 0; i < 3; i++)
        r->m[i] = m[i];
    r->negative = mpfr_signbit(x);
    return 1;
}

static inline void mp_three_set(mpfr_ptr to, mp_three x) {
    mp_limb_t *m = mpfr_custom_get_significand(to);
    for (int i = 0; i < 3; i++)
        m[i] = x.m[i];
    mpfr_custom_init_set(to, x.negative ? -MPFR_REGULAR_KIND : MPFR_REGULAR_KIND, x.e,
                         MP_THREE_BITS, m);
}

/* m, its highest bit set, rounded half to even by what follows it: `low`, and `rest` behind that */
static inline mp_three mp_three_round(const uint64_t m[3], uint64_t low, uint64_t rest, int64_t e,
                                      int negative) {
    const uint64_t up = (low >> 63) & (((low << 1 | rest) != 0) | (m[0] & 1));
    mp_three r = {.e = e, .negative = negative};
    unsigned char c = mp_carry(0, m[0], up, &r.m[0]);
    c = mp_carry(c, m[1], 0, &r.m[1]);
    if (mp_carry(c, m[2], 0, &r.m[2])) {
        r.m[2] = (uint64_t)1 << 63;
        r.e++;
    }
    return r;
}

static inline mp_three mp_three_product(const mp_three *a, const mp_three *b) {
    /* by rows: low words and high words of a row apart */
    uint64_t x[6];
    mp_wide p = (mp_wide)a->m[0] * b->m[0], q = (mp_wide)a->m[0] * b->m[1],
            r = (mp_wide)a->m[0] * b->m[2];
    x[0] = (uint64_t)p;
    unsigned char c = mp_carry(0, (uint64_t)q, (uint64_t)(p >> 64), &x[1]);
    c = mp_carry(c, (uint64_t)r, (uint64_t)(q >> 64), &x[2]);
    mp_carry(c, (uint64_t)(r >> 64), 0, &x[3]);
#pragma GCC unroll 2
    for (int i = 1; i < 3; i++) {
        p = (mp_wide)a->m[i] * b->m[0];
        q = (mp_wide)a->m[i] * b->m[1];
        r = (mp_wide)a->m[i] * b->m[2];
        c = mp_carry(0, x[i], (uint64_t)p, &x[i]);
        c = mp_carry(c, x[i + 1], (uint64_t)q, &x[i + 1]);
        c = mp_carry(c, x[i + 2], (uint64_t)r, &x[i + 2]);
        mp_carry(c, (uint64_t)(r >> 64), 0, &x[i + 3]);
        c = mp_carry(0, x[i + 1], (uint64_t)(p >> 64), &x[i + 1]);
        c = mp_carry(c, x[i + 2], (uint64_t)(q >> 64), &x[i + 2]);
        mp_carry(c, x[i + 3], 0, &x[i + 3]);
    }
    const uint64_t up = !(x[5] >> 63); /* by one bit, of a product below 2 */
#pragma GCC unroll 5
    for (int i = 5; i > 0; i--)
        x[i] = x[i] << up | (x[i - 1] >> 63 & up);
    return mp_three_round(x + 3, x[2], x[1] | x[0], a->e + b->e - (int64_t)up,
                          a->negative ^ b->negative);
}

/* a + b where a->e - b->e is 0 to 63: both a bit lower in four limbs, so that nothing is lost. 0:
 * b was larger, or 64 bits or more cancelled. */
static inline int mp_three_near(const mp_three *a, const mp_three *b, int by, mp_three *r) {
    const uint64_t turn = (uint64_t) - (a->negative ^ b->negative);
    const uint64_t A[4] = {a->m[0] << 63, a->m[1] << 63 | a->m[0] >> 1,
                           a->m[2] << 63 | a->m[1] >> 1, a->m[2] >> 1};
    const uint64_t B[4] = {b->m[0] << (63 - by), b->m[1] << (63 - by) | b->m[0] >> 1 >> by,
                           b->m[2] << (63 - by) | b->m[1] >> 1 >> by, b->m[2] >> 1 >> by};
    uint64_t x[4];
    unsigned char c = mp_carry(turn & 1, A[0], B[0] ^ turn, &x[0]);
    c = mp_carry(c, A[1], B[1] ^ turn, &x[1]);
    c = mp_carry(c, A[2], B[2] ^ turn, &x[2]);
    c = mp_carry(c, A[3], B[3] ^ turn, &x[3]);
    if (!x[3] || c != (turn & 1)) return 0;
    const int up = __builtin_clzll(x[3]);
#pragma GCC unroll 3
    for (int i = 3; i > 0; i--)
        x[i] = x[i] << up | x[i - 1] >> 1 >> (63 - up);
    *r = mp_three_round(x + 1, x[0] << up, 0, a->e + 1 - up, a->negative);
    return 1;
}

/* a + b; 0: for MPFR. Exchanged without a branch: which is larger is nobody's guess. */
static inline int mp_three_sum(mp_three a, mp_three b, mp_three *r) {
    const uint64_t turn = (uint64_t) - (a.e < b.e);
    for (int i = 0; i < 3; i++) {
        const uint64_t x = (a.m[i] ^ b.m[i]) & turn;
        a.m[i] ^= x;
        b.m[i] ^= x;
    }
    const int64_t e = (a.e ^ b.e) & (int64_t)turn, by = (a.e ^ e) - (b.e ^ e);
    const int n = (a.negative ^ b.negative) & (int)turn;
    a.e ^= e;
    a.negative ^= n;
    b.negative ^= n;
    if (by < 64) return mp_three_near(&a, &b, (int)by, r);
    if (by < 194) return 0;
    *r = a; /* b is less than a fourth of a's last bit: nothing, next to a power of 2 too */
    return 1;
}

/* to = a b */
static inline void mp_mul(mpfr_ptr to, mpfr_srcptr a, mpfr_srcptr b) {
    mp_three x, y;
    if (mpfr_get_prec(to) == MP_THREE_BITS && mp_three_get(a, &x) && mp_three_get(b, &y))
        mp_three_set(to, mp_three_product(&x, &y));
    else
        mpfr_mul(to, a, b, MPFR_RNDN);
}

/* to = to + a b, or to - a b, rounded twice; tmp: anything */
static inline void mp_three_add(mpfr_ptr to, int minus, mpfr_srcptr a, mpfr_srcptr b,
                                mpfr_ptr tmp) {
    mp_three s, x, y;
    if (mp_three_get(to, &s) && mp_three_get(a, &x) && mp_three_get(b, &y)) {
        mp_three p = mp_three_product(&x, &y);
        p.negative ^= minus;
        if (mp_three_sum(s, p, &s)) {
            mp_three_set(to, s);
            return;
        }
    }
    mpfr_mul(tmp, a, b, MPFR_RNDN);
    (minus ? mpfr_sub : mpfr_add)(to, to, tmp, MPFR_RNDN);
}
static inline void mp_add_product(mpfr_ptr to, mpfr_srcptr a, mpfr_srcptr b, mpfr_ptr tmp) {
    mp_three_add(to, 0, a, b, tmp);
}
static inline void mp_sub_product(mpfr_ptr to, mpfr_srcptr a, mpfr_srcptr b, mpfr_ptr tmp) {
    mp_three_add(to, 1, a, b, tmp);
}
