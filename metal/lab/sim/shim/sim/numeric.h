// Limits of the scalar types.
#pragma once
#include "sim/types.h"

// The compiler predefines nothing (-undef) but what toolchain.py gives: no word of the host that runs the text.
#define __clang_major__ 17
#define __INT32_MAX__ 2147483647
#define __UINT32_MAX__ 4294967295U
#define __INT64_MAX__ 9223372036854775807L
#define __UINT64_MAX__ 18446744073709551615UL

#define CHAR_BIT 8
#define SCHAR_MAX 127
#define SCHAR_MIN (-128)
#define UCHAR_MAX 255
#define CHAR_MAX SCHAR_MAX
#define CHAR_MIN SCHAR_MIN
#define SHRT_MAX 32767
#define SHRT_MIN (-32768)
#define USHRT_MAX 65535
#define INT_MAX __INT_MAX__
#define INT_MIN (-__INT_MAX__ - 1)
#define UINT_MAX __UINT32_MAX__
#define LONG_MAX __INT64_MAX__
#define LONG_MIN (-__INT64_MAX__ - 1)
#define ULONG_MAX __UINT64_MAX__
#define FLT_DIG 6
#define FLT_MANT_DIG 24
#define FLT_MAX_EXP 128
#define FLT_MIN_EXP (-125)
#define FLT_RADIX 2
#define FLT_MAX __FLT_MAX__
#define FLT_MIN __FLT_MIN__
#define FLT_EPSILON __FLT_EPSILON__
#define HALF_DIG 3
#define HALF_MANT_DIG 11
#define HALF_MAX_EXP 16
#define HALF_MIN_EXP (-13)
#define HALF_MAX (half(65504.0f))
#define HALF_MIN (half(0x1p-14f))
#define HALF_EPSILON (half(0x1p-10f))
#define INFINITY __builtin_inff()
#define HUGE_VALF __builtin_inff()
#define HUGE_VALH (half(__builtin_inff()))
#define NAN __builtin_nanf("")
#define MAXFLOAT __FLT_MAX__
#define MAXHALF HALF_MAX
#define M_PI_F 3.14159274101257324f
#define M_PI_2_F 1.57079637050628662f
#define M_1_PI_F 0.318309873342514038f
#define M_2_PI_F 0.636619746685028076f
#define M_2_SQRTPI_F 1.12837922573089600f
#define M_SQRT2_F 1.41421353816986084f
#define M_SQRT1_2_F 0.707106769084930420f
#define M_LOG2E_F 1.44269502162933350f
#define M_LOG10E_F 0.434294492006301880f
#define M_LN2_F 0.693147182464599609f
#define M_LN10_F 2.30258512496948242f
#define M_E_F 2.71828174591064453f
#define M_PI_4_F 0.785398185253143311f
#define M_PI_H (half(M_PI_F))
#define M_PI_2_H (half(M_PI_2_F))
#define M_PI_4_H (half(M_PI_4_F))
#define M_1_PI_H (half(M_1_PI_F))
#define M_2_PI_H (half(M_2_PI_F))
#define M_2_SQRTPI_H (half(M_2_SQRTPI_F))
#define M_SQRT2_H (half(M_SQRT2_F))
#define M_SQRT1_2_H (half(M_SQRT1_2_F))
#define M_LOG2E_H (half(M_LOG2E_F))
#define M_LOG10E_H (half(M_LOG10E_F))
#define M_LN2_H (half(M_LN2_F))
#define M_LN10_H (half(M_LN10_F))
#define M_E_H (half(M_E_F))

namespace metal {
template <class T> struct numeric_limits {
  static_assert(__is_integral(T), "numeric_limits of an arithmetic type");
  static constexpr bool is_specialized = true, is_signed = !__is_unsigned(T), is_integer = true;
  static constexpr bool has_infinity = false, has_quiet_NaN = false;
  static constexpr int digits = sizeof(T) * 8 - is_signed;
  static constexpr T max() {
    if constexpr (is_same_v<T, bool>) return true;
    else if constexpr (is_signed) return T((make_unsigned_t<T>(~make_unsigned_t<T>(0))) >> 1);
    else return T(~T(0));
  }
  static constexpr T min() { return is_signed ? T(~max()) : T(0); }
  static constexpr T lowest() { return min(); }
};
template <> struct numeric_limits<bool> {
  static constexpr bool is_specialized = true, is_signed = false, is_integer = true;
  static constexpr bool has_infinity = false, has_quiet_NaN = false;
  static constexpr bool max() { return true; }
  static constexpr bool min() { return false; }
  static constexpr bool lowest() { return false; }
};
#define SIM_LIMITS(T, BITS, largest, smallest, eps, DIGITS, EXP)                                   \
  template <> struct numeric_limits<T> {                                                           \
    static constexpr bool is_specialized = true, is_signed = true, is_integer = false;             \
    static constexpr bool has_infinity = true, has_quiet_NaN = true;                               \
    static constexpr int digits = DIGITS, max_exponent = EXP;                                      \
    static constexpr T max() { return T(largest); }                                                \
    static constexpr T min() { return T(smallest); }                                               \
    static constexpr T lowest() { return T(-(largest)); }                                          \
    static constexpr T epsilon() { return T(eps); }                                                \
    static constexpr T infinity() { return T(__builtin_inff()); }                                  \
    static constexpr T quiet_NaN() { return T(__builtin_nanf("")); }                               \
    static constexpr T signaling_NaN() { return T(__builtin_nanf("")); }                           \
  };
SIM_LIMITS(float, uint, __FLT_MAX__, __FLT_MIN__, __FLT_EPSILON__, 24, 128)
SIM_LIMITS(half, ushort, 65504.0f, 6.103515625e-05f, 9.765625e-04f, 11, 16)
SIM_LIMITS(bfloat, ushort, 3.38953138925153547590e+38f, 1.17549435082228750797e-38f, 7.8125e-03f, 8, 128)
#undef SIM_LIMITS
}  // namespace metal
