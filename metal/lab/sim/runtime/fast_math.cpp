// The errors that Metal's specification allows single precision with fast math (table 8.2 of version 4), for what metal::fast::
// computes. An error depends on the function and the bits of its argument alone, so what is computed twice is the same twice. It is
// between half of what is allowed and all of it. Without `fast_errors` every result is as exact as precise::.
#include <math.h>
#include <stdint.h>
#include <string.h>

#include "state.h"

namespace {

uint32_t float_bits(float x) {
  uint32_t u;
  memcpy(&u, &x, sizeof u);
  return u;
}

// Between 1/2 and 1, or between -1 and -1/2.
double share(uint64_t key) {
  uint64_t z = key * 0x9e3779b97f4a7c15ull + 0xbf58476d1ce4e5b9ull;
  z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9ull;
  z = (z ^ (z >> 27)) * 0x94d049bb133111ebull;
  z ^= z >> 31;
  const double size = 0.5 + (double)(z >> 32) * 0x1p-33;
  return z & 1 ? size : -size;
}

// The distance to the nearest other float.
double unit(double x) {
  int exponent;
  const bool power = frexp(fabs(x), &exponent) == 0.5;
  return ldexp(1.0, exponent - 24 - power);
}

// Fast math may flush subnormal numbers.
float flushed(double x) {
  const float y = (float)x;
  return fabsf(y) < 0x1p-126f ? copysignf(0.0f, y) : y;
}

// The error that is allowed: so many units in the last place, or an absolute one.
struct Allowed { double units, absolute; };

Allowed allowed(unsigned function, double x) {
  const bool by_one = x >= 0.5 && x <= 2.0;
  switch (function) {
    case SIM_FAST_exp: case SIM_FAST_exp2: return {3 + floor(fabs(2 * x)), 0};
    case SIM_FAST_exp10: return {4 + floor(fabs(3 * 3.3219280948873623 * x)), 0};  // exp2(x * log2(10)), its argument rounded
    case SIM_FAST_log: return by_one ? Allowed{0, 0x1p-21} : Allowed{3, 0};
    case SIM_FAST_log2: return by_one ? Allowed{0, 0x1p-22} : Allowed{2, 0};
    case SIM_FAST_log10: return by_one ? Allowed{0, 0x1p-22 * 0.30102999566398120} : Allowed{3, 0};  // log2(x) * log10(2)
    case SIM_FAST_sin: case SIM_FAST_cos: return {0, 0x1p-13 * fmax(1.0, fabs(x) / M_PI)};  // beyond pi "larger"
    case SIM_FAST_sinpi: case SIM_FAST_cospi: return {0, 0x1p-13 * fmax(1.0, fabs(x))};
    case SIM_FAST_sqrt: return {3, 0};  // x * rsqrt(x)
    case SIM_FAST_rsqrt: return {2, 0};
    default: return {5, 0};  // acos, asin, atan
  }
}

}  // namespace

// `exact` is within a unit of the function of x.
extern "C" float sim_fast(unsigned function, float exact, float x) {
  if (!S.launch->fast_errors) return exact;
  const bool logarithm = function == SIM_FAST_log || function == SIM_FAST_log2 || function == SIM_FAST_log10;
  if (logarithm && x <= 0.0f) return NAN;  // undefined
  if (function == SIM_FAST_rsqrt) exact = (float)(1.0 / sqrt((double)x));  // in floats it is two roundings off
  const Allowed a = allowed(function, x);
  if (!isfinite(exact) || (exact == 0.0f && a.units > 0)) return exact;
  const double error = a.units > 0 ? (a.units - 1) * unit(exact) : a.absolute - unit(exact);
  return flushed(exact + share((uint64_t)function << 32 | float_bits(x)) * fmax(error, 0.0));
}

// A divisor below the range of the table counts as zero, and the inverse of one above it does.
extern "C" float sim_fast_divide(float x, float y) {
  if (!S.launch->fast_errors) return x / y;
  const float size = fabsf(y);
  if (size < 0x1p-126f) return x / copysignf(0.0f, y);
  if (size > 0x1p126f && isfinite(y)) return x * copysignf(0.0f, y);
  const double exact = (double)x / (double)y;
  if (!isfinite(exact) || exact == 0.0) return (float)exact;
  const double units = x == 1.0f ? 0.5 : 2.0;  // and half a unit to round
  return flushed(exact + share((uint64_t)float_bits(x) << 32 | float_bits(y)) * units * unit(exact));
}
