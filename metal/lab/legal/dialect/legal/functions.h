// The functions of Metal's library with exactly its overloads (MSL 6): floating functions for half and float, none for
// integers; integer functions for integers. What no overload takes is ambiguous or has no match, as on a Mac.
#pragma once
#include "legal/vectors.h"

#define LEGAL_SHAPES(X, T) X(T) X(T##2) X(T##3) X(T##4)
#define LEGAL_FLOATS(X) LEGAL_SHAPES(X, half) LEGAL_SHAPES(X, float)
#define LEGAL_WHOLE(X)                                                                                            \
  LEGAL_SHAPES(X, char) LEGAL_SHAPES(X, uchar) LEGAL_SHAPES(X, short) LEGAL_SHAPES(X, ushort) LEGAL_SHAPES(X, int) \
  LEGAL_SHAPES(X, uint) LEGAL_SHAPES(X, long) LEGAL_SHAPES(X, ulong)

#define LEGAL_MATH(T)                                                                                                     \
  T acos(T); T acosh(T); T asin(T); T asinh(T); T atan(T); T atanh(T); T ceil(T); T cos(T); T cosh(T); T cospi(T); T exp(T); \
  T exp10(T); T exp2(T); T fabs(T); T floor(T); T fract(T); T log(T); T log10(T); T log2(T); T rint(T); T round(T);       \
  T rsqrt(T); T sin(T); T sinh(T); T sinpi(T); T sqrt(T); T tan(T); T tanh(T); T tanpi(T); T trunc(T); T saturate(T);     \
  T sign(T); T abs(T);                                                                                                    \
  T atan2(T, T); T copysign(T, T); T divide(T, T); T fdim(T, T); T fmax(T, T); T fmin(T, T); T fmod(T, T); T pow(T, T);   \
  T powr(T, T); T step(T, T); T max(T, T); T min(T, T); T remainder(T, T);                                                \
  T fma(T, T, T); T mix(T, T, T); T smoothstep(T, T, T); T clamp(T, T, T); T fmax3(T, T, T); T fmin3(T, T, T);            \
  T fmedian3(T, T, T); T max3(T, T, T); T min3(T, T, T); T median3(T, T, T);                                              \
  T sincos(T, thread T&); T modf(T, thread T&);
#define LEGAL_EXPONENTS(T, I) T ldexp(T, I); T frexp(T, thread I&); I ilogb(T);
#define LEGAL_EXPONENTS_OF(T) LEGAL_EXPONENTS(T, int) LEGAL_EXPONENTS(T##2, int2) LEGAL_EXPONENTS(T##3, int3) LEGAL_EXPONENTS(T##4, int4)
#define LEGAL_GEOMETRY_OF(T, V) \
  T dot(V, V); T length(V); T length_squared(V); T distance(V, V); T distance_squared(V, V); V normalize(V);  \
  V faceforward(V, V, V); V reflect(V, V); V refract(V, V, T);
#define LEGAL_GEOMETRY(T) LEGAL_GEOMETRY_OF(T, T##2) LEGAL_GEOMETRY_OF(T, T##3) LEGAL_GEOMETRY_OF(T, T##4) T##3 cross(T##3, T##3);
#define LEGAL_RELATIONAL_OF(T, B) B isnan(T); B isinf(T); B isfinite(T); B isnormal(T); B signbit(T); B isordered(T, T); B isunordered(T, T);
#define LEGAL_RELATIONAL(T) \
  LEGAL_RELATIONAL_OF(T, bool) LEGAL_RELATIONAL_OF(T##2, bool2) LEGAL_RELATIONAL_OF(T##3, bool3) LEGAL_RELATIONAL_OF(T##4, bool4)
#define LEGAL_BFLOAT_VECTORS(X) X(bfloat2) X(bfloat3) X(bfloat4)
#define LEGAL_ALL                                                                                        \
  LEGAL_FLOATS(LEGAL_MATH) LEGAL_BFLOAT_VECTORS(LEGAL_MATH) LEGAL_EXPONENTS_OF(half) LEGAL_EXPONENTS_OF(float) LEGAL_GEOMETRY(half) \
  LEGAL_GEOMETRY(float) LEGAL_RELATIONAL(half) LEGAL_RELATIONAL(float)

#define LEGAL_INTEGER_OF(T)                                                                                        \
  T abs(T); T max(T, T); T min(T, T); T clamp(T, T, T); T max3(T, T, T); T min3(T, T, T); T median3(T, T, T);     \
  T clz(T); T ctz(T); T popcount(T); T reverse_bits(T); T rotate(T, T);                                            \
  T extract_bits(T, uint, uint); T insert_bits(T, T, uint, uint);

#define LEGAL_SELECT(T, B) T select(T, T, B);
#define LEGAL_SELECTS(T) \
  LEGAL_SELECT(T, bool) LEGAL_SELECT(T##2, bool2) LEGAL_SELECT(T##3, bool3) LEGAL_SELECT(T##4, bool4)

namespace metal {
LEGAL_ALL
LEGAL_WHOLE(LEGAL_INTEGER_OF)
LEGAL_SELECTS(bool) LEGAL_SELECTS(char) LEGAL_SELECTS(uchar) LEGAL_SELECTS(short) LEGAL_SELECTS(ushort) LEGAL_SELECTS(int)
LEGAL_SELECTS(uint) LEGAL_SELECTS(long) LEGAL_SELECTS(ulong) LEGAL_SELECTS(half) LEGAL_SELECTS(float) LEGAL_SELECTS(bfloat)
bool any(bool2); bool any(bool3); bool any(bool4); bool any(bool);
bool all(bool2); bool all(bool3); bool all(bool4); bool all(bool);
#define LEGAL_NEXT(T) T nextafter(T, T);
LEGAL_FLOATS(LEGAL_NEXT)
#undef LEGAL_NEXT
// A bfloat becomes a float by itself where its neighbour is one.
#define LEGAL_MIXED(name)                                                                                                \
  template <class A, class B, class = enable_if_t<(is_same<A, bfloat>::value && is_same<B, float>::value) ||             \
                                                  (is_same<A, float>::value && is_same<B, bfloat>::value)>> float name(A, B);
LEGAL_MIXED(max) LEGAL_MIXED(min) LEGAL_MIXED(fmax) LEGAL_MIXED(fmin) LEGAL_MIXED(pow) LEGAL_MIXED(fmod) LEGAL_MIXED(atan2)
#undef LEGAL_MIXED
namespace fast { LEGAL_ALL }
namespace precise { LEGAL_ALL }
}  // namespace metal

// The names by which Metal's own headers call the hardware: MLX's overloads for bfloat use them.
#define LEGAL_INNER1(n) float __metal_##n(float, bool);
LEGAL_INNER1(acos) LEGAL_INNER1(acosh) LEGAL_INNER1(asin) LEGAL_INNER1(asinh) LEGAL_INNER1(atan) LEGAL_INNER1(atanh)
LEGAL_INNER1(ceil) LEGAL_INNER1(cos) LEGAL_INNER1(cosh) LEGAL_INNER1(cospi) LEGAL_INNER1(exp) LEGAL_INNER1(exp10)
LEGAL_INNER1(exp2) LEGAL_INNER1(fabs) LEGAL_INNER1(floor) LEGAL_INNER1(fract) LEGAL_INNER1(log) LEGAL_INNER1(log10)
LEGAL_INNER1(log2) LEGAL_INNER1(rint) LEGAL_INNER1(round) LEGAL_INNER1(rsqrt) LEGAL_INNER1(sin) LEGAL_INNER1(sinh)
LEGAL_INNER1(sinpi) LEGAL_INNER1(sqrt) LEGAL_INNER1(tan) LEGAL_INNER1(tanh) LEGAL_INNER1(tanpi) LEGAL_INNER1(trunc)
#undef LEGAL_INNER1
#define LEGAL_INNER2(n) float __metal_##n(float, float, bool);
LEGAL_INNER2(atan2) LEGAL_INNER2(divide) LEGAL_INNER2(fmax) LEGAL_INNER2(fmin) LEGAL_INNER2(fmod) LEGAL_INNER2(pow) LEGAL_INNER2(powr)
#undef LEGAL_INNER2
#define LEGAL_INNER3(n) float __metal_##n(float, float, float, bool);
LEGAL_INNER3(fmax3) LEGAL_INNER3(fmin3) LEGAL_INNER3(fmedian3) LEGAL_INNER3(max3) LEGAL_INNER3(min3) LEGAL_INNER3(median3)
#undef LEGAL_INNER3
float __metal_fma(float, float, float); float __metal_nextafter(float, float); float __metal_ldexp(float, int, bool);
float __metal_frexp(float, thread int*); float __metal_modf(float, thread float*); int __metal_ilogb(float, bool);
float __metal_sincos(float, thread float*, bool);
float __metal_copysign(float, float); float __metal_fdim(float, float);
#define __METAL_MAYBE_FAST_MATH__ true
#define __METAL_FAST_MATH__ true
#define __METAL_PRECISE_MATH__ false
