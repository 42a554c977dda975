"""Functions of one number in C whose bits are the same with every compiler, option and width.

The functions of a system's ``libm`` differ between libraries, and between CPUs of one library. These
use additions, products, quotients, ``sqrt`` and roundings only, which IEEE 754 defines to the last
bit. They have no branch and no table, so compilers vectorize the loops that call them. Compile them
without contraction (``-ffp-contract=off``).

Errors in units in the last place: in float32 exp, log, tanh, erf, log1p, softplus, sin, cos and pow at
most 2, sigmoid 3, expm1 4; in float64 exp, log and tanh at most 2, sigmoid, sin and cos (up to 1e5) 3,
pow 2 + 2 |y log x|.
The polynomials are those of Cephes (expf, tanhf, tanh), of fdlibm (logf, exp, log, sin,
cos) and of N. Juffa (erff).
"""

from __future__ import annotations

import re
from collections.abc import Iterable

_SOURCE = r"""
static inline uint32_t f32_bits(float x) { uint32_t u; memcpy(&u, &x, sizeof u); return u; }
static inline float f32_of(uint32_t u) { float x; memcpy(&x, &u, sizeof x); return x; }

static inline uint64_t f64_bits(double x) { uint64_t u; memcpy(&u, &x, sizeof u); return u; }
static inline double f64_of(uint64_t u) { double x; memcpy(&x, &u, sizeof x); return x; }

/* (exp(r) - 1 - r) / r^2 for |r| <= log(2) / 2 */
static inline float f32_exp_part(float r) {
    float p = 1.9875691500e-4f;
    p = p * r + 1.3981999507e-3f;
    p = p * r + 8.3334519073e-3f;
    p = p * r + 4.1665795894e-2f;
    p = p * r + 1.6666665459e-1f;
    return p * r + 5.0000001201e-1f;
}

static inline float f32_exp(float x) {
    x = x > 89.0f ? 89.0f : x;
    x = x < -104.0f ? -104.0f : x;
    /* the nearest whole number of logarithms of 2, in the last bits of t */
    float t = x * 0x1.715476p+0f + 12582912.0f, n = t - 12582912.0f;
    float r = x - n * 0.693359375f;
    r = r - n * -2.12194440e-4f;
    float p = r * r * f32_exp_part(r) + r + 1.0f;
    /* two factors, because 2^128 and 2^-150 are no normal numbers */
    uint32_t k = f32_bits(t) - 0x4b400000u + 512u, half = k >> 1;
    return p * f32_of((half - 129u) << 23) * f32_of((k - half - 129u) << 23);
}

static inline float f32_expm1(float x) {
    float small = x * x * f32_exp_part(x) + x;
    return f32_bits(x) << 1 < 0x7d600000u ? small : f32_exp(x) - 1.0f;
}

static inline float f32_log(float x) {
    float y = x < 0x1p-126f ? x * 0x1p+25f : x;
    float k = x < 0x1p-126f ? -25.0f : 0.0f;
    uint32_t u = f32_bits(y) - 0x3f3504f3u, e = u & 0xff800000u;
    float f = f32_of(f32_bits(y) - e) - 1.0f;
    k += (float)((int32_t)e / 8388608);
    float s = f / (2.0f + f), z = s * s, w = z * z, h = 0.5f * f * f;
    float a = w * (0xccce13p-25f + w * 0xf89e26p-26f);
    float b = z * (0xaaaaaap-24f + w * 0x91e9eep-25f);
    float r = s * (h + (a + b)) + k * 9.0580006145e-6f - h + f + k * 6.9313812256e-1f;
    r = x > 0.0f ? r : f32_of(0x7fc00000u);
    r = x == 0.0f ? f32_of(0xff800000u) : r;
    r = x == f32_of(0x7f800000u) ? x : r;
    return x != x ? x : r;
}

static inline float f32_log1p(float x) {
    float y = 1.0f + x, lost = x - (y - 1.0f);
    float more = lost / y;
    more = y > 0.0f ? more : 0.0f;
    more = y < 0x1p+60f ? more : 0.0f;
    float r = f32_log(y) + more;
    return f32_bits(x) << 1 < 0x66000000u ? x : r;
}

static inline float f32_tanh(float x) {
    float a = fabsf(x), z = x * x, p = -5.70498872745e-3f;
    p = p * z + 2.06390887954e-2f;
    p = p * z - 5.37397155531e-2f;
    p = p * z + 1.33314422036e-1f;
    p = p * z - 3.33332819422e-1f;
    float small = p * z * x + x;
    float large = copysignf(1.0f - 2.0f / (f32_exp(2.0f * a) + 1.0f), x);
    return a < 0.625f ? small : large;
}

static inline float f32_erf(float x) {
    float a = fabsf(x), t = a > 4.0f ? 4.0f : a, s = x * x, q = t * t;
    float r = -1.72853470e-5f * t + 3.83197126e-4f;
    float u = -3.88396438e-3f * t + 2.42546219e-2f;
    r = r * q + u;
    r = r * t - 1.06777877e-1f;
    r = r * t - 6.34846687e-1f;
    r = r * t - 1.28717512e-1f;
    r = r * t - t;
    float large = copysignf(1.0f - f32_exp(r), x);
    float p = -5.96761703e-4f;
    p = p * s + 4.99119423e-3f;
    p = p * s - 2.67681349e-2f;
    p = p * s + 1.12819925e-1f;
    p = p * s - 3.76125336e-1f;
    p = p * s + 1.28379166e-1f;
    float small = p * x + x;
    return a > 0.927734375f ? large : small;
}

static inline float f32_sigmoid(float x) {
    float e = f32_exp(-fabsf(x)), s = 1.0f / (1.0f + e);
    return x < 0.0f ? e * s : s;
}

static inline float f32_softplus(float x) {
    float r = f32_log1p(f32_exp(-fabsf(x)));
    return x > 0.0f ? x + r : x != x ? x : r;
}

static inline double f64_exp(double x) {
    x = x > 710.0 ? 710.0 : x;
    x = x < -746.0 ? -746.0 : x;
    double t = x * 1.44269504088896338700e+00 + 6755399441055744.0, n = t - 6755399441055744.0;
    double hi = x - n * 6.93147180369123816490e-01, lo = n * 1.90821492927058770002e-10;
    double r = hi - lo, z = r * r, p = 4.13813679705723846039e-08;
    p = p * z - 1.65339022054652515390e-06;
    p = p * z + 6.61375632143793436117e-05;
    p = p * z - 2.77777777770155933842e-03;
    p = p * z + 1.66666666666666019037e-01;
    double c = r - z * p, y = 1.0 + (r * c / (2.0 - c) - lo + hi);
    uint64_t k = f64_bits(t) - 0x4338000000000000u + 4096u, half = k >> 1;
    return y * f64_of((half - 1025u) << 52) * f64_of((k - half - 1025u) << 52);
}

static inline double f64_log(double x) {
    double y = x < 0x1p-1022 ? x * 0x1p+54 : x;
    double k = x < 0x1p-1022 ? -54.0 : 0.0;
    uint64_t u = f64_bits(y) - 0x3fe6a09e667f3bcdu, e = u & 0xfff0000000000000u;
    double f = f64_of(f64_bits(y) - e) - 1.0;
    k += (double)((int32_t)(uint32_t)(e >> 32) / 1048576);
    double s = f / (2.0 + f), z = s * s, w = z * z, h = 0.5 * f * f;
    double a = w * (3.999999999940941908e-01
        + w * (2.222219843214978396e-01 + w * 1.531383769920937332e-01));
    double b = z * (6.666666666666735130e-01 + w * (2.857142874366239149e-01
        + w * (1.818357216161805012e-01 + w * 1.479819860511658591e-01)));
    double low = s * (h + (a + b)) + k * 1.90821492927058770002e-10;
    double r = k * 6.93147180369123816490e-01 - ((h - low) - f);
    r = x > 0.0 ? r : f64_of(0x7ff8000000000000u);
    r = x == 0.0 ? f64_of(0xfff0000000000000u) : r;
    r = x == f64_of(0x7ff0000000000000u) ? x : r;
    return x != x ? x : r;
}

static inline double f64_tanh(double x) {
    double a = fabs(x), z = x * x;
    double p = (-9.64399179425052238628e-1 * z - 9.92877231001918586564e1) * z - 1.61468768441708447952e3;
    double q = (z + 1.12811678491632931402e2) * z + 2.23548839060100448583e3;
    q = q * z + 4.84406305325125486048e3;
    double small = x + x * z * (p / q);
    double large = copysign(1.0 - 2.0 / (f64_exp(2.0 * a) + 1.0), x);
    return a < 0.625 ? small : large;
}

static inline double f64_sigmoid(double x) {
    double e = f64_exp(-fabs(x)), s = 1.0 / (1.0 + e);
    return x < 0.0 ? e * s : s;
}

/* sin(x + quarter * pi / 2) */
static inline double f64_wave(double x, uint64_t quarter) {
    double t = x * 6.36619772367581382433e-01 + 6755399441055744.0, n = t - 6755399441055744.0;
    double r = x - n * 1.57079632673412561417e+00;
    r = r - n * 6.07710050630396597660e-11;
    r = r - n * 2.02226624879595063154e-21;
    double z = r * r, s = 1.58969099521155010221e-10, c = -1.13596475577881948265e-11;
    s = s * z - 2.50507602534068634195e-08;
    s = s * z + 2.75573137070700676789e-06;
    s = s * z - 1.98412698298579493134e-04;
    s = s * z + 8.33333333332248946124e-03;
    s = s * z - 1.66666666666666324348e-01;
    s = r + r * z * s;
    c = c * z + 2.08757232129817482790e-09;
    c = c * z - 2.75573143513906633035e-07;
    c = c * z + 2.48015872894767294178e-05;
    c = c * z - 1.38888888888741095749e-03;
    c = c * z + 4.16666666666666019037e-02;
    c = 1.0 - (0.5 * z - z * z * c);
    uint64_t k = f64_bits(t) + quarter;
    double y = k & 1u ? c : s;
    return k & 2u ? -y : y;
}

static inline double f64_sin(double x) { return f64_wave(x, 0); }

static inline double f64_cos(double x) { return f64_wave(x, 1); }

static inline float f32_sin(float x) { return (float)f64_wave(x, 0); }

static inline float f32_cos(float x) { return (float)f64_wave(x, 1); }

/* exp(y log|x|), then the sign and the cases of C99 */
static inline double f64_pow(double x, double y) {
    double a = fabs(x), r = f64_exp(y * f64_log(a)), half = 0.5 * y, whole = floor(y);
    int odd = whole == y && floor(half) != half;
    r = x < 0.0 && whole != y && a < (double)INFINITY ? (double)NAN : r;
    r = f64_bits(x) >> 63 && odd ? -r : r;
    r = a == 1.0 && (y == INFINITY || y == -INFINITY) ? 1.0 : r;
    r = x != x || y != y ? (double)NAN : r;
    return x == 1.0 || y == 0.0 ? 1.0 : r;
}

/* exp(y log|x|) in float64, then the sign and the cases of C99 */
static inline float f32_pow(float x, float y) {
    double a = fabs((double)x), r = f64_exp((double)y * f64_log(a));
    float half = 0.5f * y, whole = floorf(y);
    int odd = whole == y && floorf(half) != half;
    r = x < 0.0f && whole != y && a < (double)INFINITY ? (double)NAN : r;
    r = f32_bits(x) >> 31 && odd ? -r : r;
    r = a == 1.0 && (y == INFINITY || y == -INFINITY) ? 1.0 : r;
    r = x != x || y != y ? (double)NAN : r;
    return x == 1.0f || y == 0.0f ? 1.0f : (float)r;
}
"""

_NAME = re.compile(r"^static inline \w+ (\w+)\(", re.MULTILINE)
FUNCTIONS: dict[str, str] = {
    _NAME.findall(text)[0]: f"{text}\n" for text in _SOURCE.strip("\n").split("\n\n")
}
"""The functions by their names in C; each calls functions that come before it."""


def definitions(names: Iterable[str]) -> str:
    """The text of functions and of those that they call, in an order that C accepts.

    Example:
        >>> text = definitions(["f32_tanh"])
        >>> text.index("float f32_exp(") < text.index("float f32_tanh(")
        True
    """
    needed = set(names)
    for name, text in reversed(FUNCTIONS.items()):
        if name in needed:
            needed |= called_in(text)
    return "\n".join(text for name, text in FUNCTIONS.items() if name in needed)


def called_in(text: str) -> frozenset[str]:
    """The functions that an expression or a function calls."""
    return frozenset(name for name in FUNCTIONS if f"{name}(" in text)
