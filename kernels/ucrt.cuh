// expf, cosf and sinf as the Universal C Runtime of Windows computes them on its FMA path (contract section 11), from
// the algorithm and bit patterns published in the project's first source: double arithmetic, explicit fma, one final
// rounding to f32. The UCRT's SSE2-only path and its other versions may differ. Beyond the UCRT's fast reduction (cosf
// |x| >= 3373259426, sinf |x| >= 16779436) the reduction is our own exact one, deterministic and not claimed equal.
#pragma once

#include "contract.cuh"

// 2^(j/64), j = 0..63, correctly rounded doubles.
KESTREL_CONST unsigned long long EXPF_UCRT_TABLE[64] = {
    0x3ff0000000000000ull, 0x3ff02c9a3e778061ull, 0x3ff059b0d3158574ull, 0x3ff0874518759bc8ull,
    0x3ff0b5586cf9890full, 0x3ff0e3ec32d3d1a2ull, 0x3ff11301d0125b51ull, 0x3ff1429aaea92de0ull,
    0x3ff172b83c7d517bull, 0x3ff1a35beb6fcb75ull, 0x3ff1d4873168b9aaull, 0x3ff2063b88628cd6ull,
    0x3ff2387a6e756238ull, 0x3ff26b4565e27cddull, 0x3ff29e9df51fdee1ull, 0x3ff2d285a6e4030bull,
    0x3ff306fe0a31b715ull, 0x3ff33c08b26416ffull, 0x3ff371a7373aa9cbull, 0x3ff3a7db34e59ff7ull,
    0x3ff3dea64c123422ull, 0x3ff4160a21f72e2aull, 0x3ff44e086061892dull, 0x3ff486a2b5c13cd0ull,
    0x3ff4bfdad5362a27ull, 0x3ff4f9b2769d2ca7ull, 0x3ff5342b569d4f82ull, 0x3ff56f4736b527daull,
    0x3ff5ab07dd485429ull, 0x3ff5e76f15ad2148ull, 0x3ff6247eb03a5585ull, 0x3ff6623882552225ull,
    0x3ff6a09e667f3bcdull, 0x3ff6dfb23c651a2full, 0x3ff71f75e8ec5f74ull, 0x3ff75feb564267c9ull,
    0x3ff7a11473eb0187ull, 0x3ff7e2f336cf4e62ull, 0x3ff82589994cce13ull, 0x3ff868d99b4492edull,
    0x3ff8ace5422aa0dbull, 0x3ff8f1ae99157736ull, 0x3ff93737b0cdc5e5ull, 0x3ff97d829fde4e50ull,
    0x3ff9c49182a3f090ull, 0x3ffa0c667b5de565ull, 0x3ffa5503b23e255dull, 0x3ffa9e6b5579fdbfull,
    0x3ffae89f995ad3adull, 0x3ffb33a2b84f15fbull, 0x3ffb7f76f2fb5e47ull, 0x3ffbcc1e904bc1d2ull,
    0x3ffc199bdd85529cull, 0x3ffc67f12e57d14bull, 0x3ffcb720dcef9069ull, 0x3ffd072d4a07897cull,
    0x3ffd5818dcfba487ull, 0x3ffda9e603db3285ull, 0x3ffdfc97337b9b5full, 0x3ffe502ee78b3ff6ull,
    0x3ffea4afa2a490daull, 0x3ffefa1bee615a27ull, 0x3fff50765b6e4540ull, 0x3fffa7c1819e90d8ull,
};

// expf_ucrt of x from -104 to 88.7228394, and some NaN of a NaN. table: EXPF_UCRT_TABLE or a copy.
KESTREL_FN float expf_ucrt_within(float x, const unsigned long long *table) {
    const double xd = (double)x;
    // x = n * ln2/64 + r, |r| <= ln2/128; n is rounded by pushing the fraction out of the significand, whose low bits
    // are n then. Conversions would take longer, and so would branches around the values outside of the range.
    const double shifted = xd * f64_from_bits(0x40571547652b82feull) + 0x1.8p52;  // 64/ln2
    const int n = (int)f64_low_bits(shifted);
    const double r = fma_f64(-(shifted - 0x1.8p52), f64_from_bits(0x3f862e42fefa39efull), xd);  // ln2/64
    const double z = r * r;
    // exp(r) - 1 = r + z/2 + z*r/6
    const double p = fma_f64(fma_f64(r, f64_from_bits(0x3fc5555555555555ull), 0.5), z, r);
    // 2^floor(n/64) goes into the exponent of t: a factor that rounds nothing.
    const double t = f64_from_bits(table[n & 63] + ((unsigned long long)(unsigned)(n >> 6) << 52));
    return (float)fma_f64(t, p, t);
}

KESTREL_FN float expf_ucrt(float x) {
    float y = expf_ucrt_within(x, EXPF_UCRT_TABLE);
    y = x > 88.7228394f ? f32_from_bits(KESTREL_INF_BITS) : y;
    y = x < -104.0f ? 0.0f : y;
    return x != x ? f32_from_bits(KESTREL_NAN_BITS) : y;
}

// Odd and even Taylor polynomials, |r| <= pi/4 and a little.
KESTREL_FN double sin_poly_ucrt(double r) {
    const double z = r * r;
    double p = fma_f64(z, f64_from_bits(0x3ec71de3a556c734ull), f64_from_bits(0xbf2a01a01a01a01aull));
    p = fma_f64(p, z, f64_from_bits(0x3f81111111111111ull));
    p = fma_f64(p, z, f64_from_bits(0xbfc5555555555555ull));
    return fma_f64(p, r * z, r);
}

KESTREL_FN double cos_poly_ucrt(double r) {
    const double z = r * r;
    double p = fma_f64(z, f64_from_bits(0xbe927e4fb7789f5cull), f64_from_bits(0x3efa01a01a01a019ull));
    p = fma_f64(p, z, f64_from_bits(0xbf56c16c16c16c16ull));
    p = fma_f64(p, z, f64_from_bits(0x3fa5555555555555ull));
    return fma_f64(p, z * z, 1.0 - 0.5 * z);
}

// |x| = n * pi/2 + r, two-part pi/2; n < 2^31.
KESTREL_FN double reduce_ucrt(double ax, int *n) {
    *n = (int)fma_f64(ax, f64_from_bits(0x3fe45f306dc9c883ull), 0.5);  // truncates
    const double dn = (double)*n;
    return fma_f64(-dn, f64_from_bits(0x3ff921fb54400000ull), ax) - dn * f64_from_bits(0x3dd0b4611a626331ull);
}

// 2/pi as a fixed-point number: word w holds the bits of weight 2^(31-32w) down to 2^(-32w).
KESTREL_CONST unsigned TWO_OVER_PI[9] = {
    0x00000000u, 0xa2f9836eu, 0x4e441529u, 0xfc2757d1u, 0xf534ddc0u,
    0xdb629599u, 0x3c439041u, 0xfe5163abu, 0xdebbc561u,
};

// Payne-Hanek for floats of at least 2^24: |x| = m * 2^e with a 24-bit integer m. Integer arithmetic only, up to the
// conversion of the remainder to double.
KESTREL_FN double reduce_exact(unsigned x_bits, int *n) {
    const int e = (int)(x_bits >> 23) - 150;  // 1..104
    const unsigned m = (x_bits & 0x7fffffu) | 0x800000u;
    // 96 bits of 2/pi * 2^e from weight 2^1 down; higher ones only add multiples of 4 quadrants.
    const int first = 30 + e;  // index of the bit of weight 2^(1-e) in TWO_OVER_PI
    const int word = first >> 5, shift = first & 31;
    unsigned w[3];
    for (int i = 0; i < 3; i++) {
        const unsigned long long pair =
            ((unsigned long long)TWO_OVER_PI[word + i] << 32) | TWO_OVER_PI[word + i + 1];
        w[i] = (unsigned)((pair << shift) >> 32);
    }
    // m times the window mod 4, as a 2.62 fixed-point number.
    const unsigned long long product = ((unsigned long long)m * w[0] << 32) + (unsigned long long)m * w[1] +
                                       (((unsigned long long)m * w[2]) >> 32);
    const unsigned long long quadrant = (product + 0x2000000000000000ull) >> 62;  // nearest, mod 4
    *n = (int)quadrant;
    const long long rest = (long long)(product - (quadrant << 62));
    return (double)rest * f64_from_bits(0x3c1921fb54442d18ull);  // pi/2 * 2^-62
}

KESTREL_FN float cosf_ucrt(float x) {
    const unsigned ax = f32_bits(x) & 0x7fffffffu;
    if (ax >= KESTREL_INF_BITS) return f32_from_bits(KESTREL_NAN_BITS);
    const double xd = (double)x;
    if (ax <= 0x3f490fdbu) {              // pi/4
        if (ax < 0x39000000u) return 1.0f;  // 2^-13
        if (ax < 0x3c000000u) return (float)fma_f64(-(xd * 0.5), xd, 1.0);  // 2^-7
        return (float)cos_poly_ucrt(xd);
    }
    int n;
    const double r = ax < 0x4f490fdbu ? reduce_ucrt((double)f32_from_bits(ax), &n) : reduce_exact(ax, &n);
    const double y = n & 1 ? sin_poly_ucrt(r) : cos_poly_ucrt(r);
    return (float)(((n & 3) + 1) & 2 ? -y : y);
}

KESTREL_FN float sinf_ucrt(float x) {
    const unsigned ax = f32_bits(x) & 0x7fffffffu;
    if (ax >= KESTREL_INF_BITS) return f32_from_bits(KESTREL_NAN_BITS);
    const double xd = (double)x;
    if (ax <= 0x3f490fdbu) {            // pi/4
        if (ax < 0x39000000u) return x;  // 2^-13
        if (ax < 0x3c000000u)            // 2^-7
            return (float)fma_f64(-(xd * xd * xd), f64_from_bits(0x3fc5555555555555ull), xd);
        return (float)sin_poly_ucrt(xd);
    }
    int n;
    const double r = ax < 0x4b800456u ? reduce_ucrt((double)f32_from_bits(ax), &n) : reduce_exact(ax, &n);
    const double y = n & 1 ? cos_poly_ucrt(r) : sin_poly_ucrt(r);
    return (float)((n & 2) != (int)(f32_bits(x) >> 30 & 2u) ? -y : y);
}

// cosf_ucrt(x), or sinf_ucrt(x), with the same bits by one text: for threads of which some want the one and some the other.
// Neither needs a case below 2^-13 of its own, because what is made of such an x rounds to 1 and to x.
KESTREL_FN float cos_or_sin_ucrt(float x, bool cosine) {
    const unsigned ax = f32_bits(x) & 0x7fffffffu;
    if (ax >= KESTREL_INF_BITS) return f32_from_bits(KESTREL_NAN_BITS);
    const double xd = (double)f32_from_bits(ax);
    int n = 0;
    double r = xd;
    if (ax > 0x3f490fdbu)  // pi/4
        r = ax < (cosine ? 0x4f490fdbu : 0x4b800456u) ? reduce_ucrt(xd, &n) : reduce_exact(ax, &n);
    double y = ((n & 1) != 0) != cosine ? cos_poly_ucrt(r) : sin_poly_ucrt(r);
    if (ax < 0x3c000000u)  // 2^-7
        y = fma_f64(-(xd * (cosine ? 0.5 : xd * xd)), cosine ? xd : f64_from_bits(0x3fc5555555555555ull), cosine ? 1.0 : xd);
    const bool minus = cosine ? (((n & 3) + 1) & 2) != 0 : (n & 2) != (int)(f32_bits(x) >> 30 & 2u);
    return (float)(minus ? -y : y);
}
