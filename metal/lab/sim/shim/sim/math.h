// The math and common functions of floating-point numbers. Computed in float (half and bfloat are rounded once, at the end), with
// the host's correctly behaved libm. What Metal says metal::fast:: computes in steps does so here, and overflows as they do. What it
// allows errors has them if the launch asks for them (runtime/fast_math.cpp). Each is a set of overloads, as in Metal, so that an
// argument of another type converts where Metal converts it, and is ambiguous where it is ambiguous there.
#pragma once
#include "sim/abi.h"
#include "sim/numeric.h"

extern "C" {
#define SIM_LIBM1(name) float name##f(float) __attribute__((const));
SIM_LIBM1(acosh) SIM_LIBM1(asinh) SIM_LIBM1(atanh) SIM_LIBM1(cosh) SIM_LIBM1(sinh) SIM_LIBM1(tanh)
SIM_LIBM1(acos) SIM_LIBM1(asin) SIM_LIBM1(atan) SIM_LIBM1(cos) SIM_LIBM1(sin) SIM_LIBM1(tan)
SIM_LIBM1(exp) SIM_LIBM1(exp2) SIM_LIBM1(log) SIM_LIBM1(log2) SIM_LIBM1(log10)
#undef SIM_LIBM1
float atan2f(float, float) __attribute__((const));
float powf(float, float) __attribute__((const));
float fmodf(float, float) __attribute__((const));
float nextafterf(float, float) __attribute__((const));
int ilogbf(float) __attribute__((const));
float ldexpf(float, int) __attribute__((const));
float frexpf(float, int*);
}

// Of these metal::fast:: has its own.
#define SIM_ROUGH_UNARY(X)                                                                                  \
  X(acos, acosf(x)) X(asin, asinf(x)) X(atan, atanf(x)) X(cos, cosf(x)) X(cospi, __sim_cospi(x))            \
  X(exp, expf(x)) X(exp2, exp2f(x)) X(exp10, powf(10.0f, x)) X(log, logf(x)) X(log2, log2f(x))              \
  X(log10, log10f(x)) X(rsqrt, 1.0f / __builtin_sqrtf(x)) X(sin, sinf(x)) X(sinpi, __sim_sinpi(x))          \
  X(sqrt, __builtin_sqrtf(x))
#define SIM_STEPPED_UNARY(X) X(cosh, coshf(x)) X(sinh, sinhf(x)) X(tan, tanf(x)) X(tanh, tanhf(x))
#define SIM_STEPPED_BINARY(X) X(pow, powf(x, y)) X(powr, powf(x, y)) X(divide, x / y)
#define SIM_COMMON_UNARY(X) SIM_PLAIN_UNARY(X) SIM_ROUGH_UNARY(X) SIM_STEPPED_UNARY(X)
#define SIM_COMMON_BINARY(X) SIM_PLAIN_BINARY(X) SIM_STEPPED_BINARY(X)
#define SIM_PLAIN_UNARY(X)                                                                                  \
  X(acosh, acoshf(x)) X(asinh, asinhf(x)) X(atanh, atanhf(x)) X(ceil, __builtin_ceilf(x))                   \
  X(fabs, __builtin_fabsf(x)) X(floor, __builtin_floorf(x)) X(fract, __sim_fract(x))                        \
  X(rint, __builtin_rintf(x)) X(round, __builtin_roundf(x)) X(trunc, __builtin_truncf(x)) X(tanpi, __sim_sinpi(x) / __sim_cospi(x)) X(saturate, __sim_clamp01(x))
#define SIM_PLAIN_BINARY(X)                                                                                 \
  X(atan2, atan2f(x, y)) X(copysign, __builtin_copysignf(x, y)) X(fdim, __sim_fdim(x, y))  \
  X(fmax, __builtin_fmaxf(x, y)) X(fmin, __builtin_fminf(x, y)) X(fmod, fmodf(x, y))     \
  X(step, y < x ? 0.0f : 1.0f)
#define SIM_COMMON_TERNARY(X)                                                                               \
  X(fma, __builtin_fmaf(x, y, z)) X(mix, x + (y - x) * z) X(smoothstep, __sim_smoothstep(x, y, z))          \
  X(fmax3, __builtin_fmaxf(__builtin_fmaxf(x, y), z)) X(fmin3, __builtin_fminf(__builtin_fminf(x, y), z))   \
  X(fmedian3, __builtin_fmaxf(__builtin_fminf(x, y), __builtin_fminf(__builtin_fmaxf(x, y), z)))

namespace metal {
SIM_FN float __sim_fract(float x) { float f = x - __builtin_floorf(x); return f < 1.0f ? f : 0x1.fffffep-1f; }
// Reduced to a quarter of a turn, where the sine of what is left has no more than its own error.
SIM_FN float __sim_turn(float x) { return x - 2.0f * __builtin_rintf(x * 0.5f); }
SIM_FN float __sim_sinpi(float x) {
  float r = __sim_turn(x), a = __builtin_fabsf(r);
  return __builtin_copysignf(sinf(3.14159274101257324f * (a > 0.5f ? 1.0f - a : a)), r); }
SIM_FN float __sim_cospi(float x) {
  float a = __builtin_fabsf(__sim_turn(x));
  return a <= 0.25f ? cosf(3.14159274101257324f * a) : sinf(3.14159274101257324f * (0.5f - a)); }
SIM_FN float __sim_fdim(float x, float y) { return x != x || y != y ? __builtin_nanf("") : (x > y ? x - y : 0.0f); }
SIM_FN float __sim_clamp01(float x) { return __builtin_fminf(__builtin_fmaxf(x, 0.0f), 1.0f); }
SIM_FN float __sim_smoothstep(float a, float b, float x) { float t = __sim_clamp01((x - a) / (b - a)); return t * t * (3.0f - 2.0f * t); }

template <class T> using __if_float = enable_if_t<is_floating_point_v<T>, int>;
template <class T> using __if_number = enable_if_t<is_arithmetic_v<T>, int>;
template <class V> struct __identity { using type = V; };
template <class V> using __same = typename __identity<V>::type;  // a parameter that does not say what T is: a scalar fills it

// The components one by one. A scalar beside a vec fills one.
#define SIM_VECTOR1(name, result)                                                                                                  \
  template <class T, int N> SIM_FN vec<result, N> name(vec<T, N> a) {                                                              \
    vec<result, N> r = {}; for (int i = 0; i < N; ++i) r[i] = name(a[i]); return r; }
#define SIM_VECTOR2(name, result)                                                                                                  \
  template <class T, int N> SIM_FN vec<result, N> name(vec<T, N> a, __same<vec<T, N>> b) {                                         \
    vec<result, N> r = {}; for (int i = 0; i < N; ++i) r[i] = name(a[i], b[i]); return r; }                                        \
  template <class S, class T, int N, __if_number<S> = 0> SIM_FN vec<result, N> name(S a, vec<T, N> b) { return name(vec<T, N>(T(a)), b); }
#define SIM_VECTOR3(name)                                                                                                          \
  template <class T, int N> SIM_FN vec<T, N> name(vec<T, N> a, __same<vec<T, N>> b, __same<vec<T, N>> c) {                         \
    vec<T, N> r = {}; for (int i = 0; i < N; ++i) r[i] = name(a[i], b[i], c[i]); return r; }
#define SIM_UNARY(name, expr)                                                        \
  SIM_FN float name(float x) { return expr; }                                        \
  SIM_FN half name(half v) { float x = v; return half(expr); }                       \
  SIM_FN bfloat name(bfloat v) { float x = v; return bfloat(expr); }                 \
  SIM_VECTOR1(name, T)
#define SIM_BINARY(name, expr)                                                       \
  SIM_FN float name(float x, float y) { return expr; }                               \
  SIM_FN half name(half a, half b) { float x = a, y = b; return half(expr); }        \
  SIM_FN bfloat name(bfloat a, bfloat b) { float x = a, y = b; return bfloat(expr); } \
  SIM_VECTOR2(name, T)
#define SIM_TERNARY(name, expr)                                                      \
  SIM_FN float name(float x, float y, float z) { return expr; }                      \
  SIM_FN half name(half a, half b, half c) { float x = a, y = b, z = c; return half(expr); } \
  SIM_FN bfloat name(bfloat a, bfloat b, bfloat c) { float x = a, y = b, z = c; return bfloat(expr); } \
  SIM_VECTOR3(name)

SIM_COMMON_UNARY(SIM_UNARY)
SIM_COMMON_BINARY(SIM_BINARY)
SIM_COMMON_TERNARY(SIM_TERNARY)
template <class S, class T, int N, __if_number<S> = 0> SIM_FN vec<T, N> smoothstep(S a, S b, vec<T, N> x) {
  return smoothstep(vec<T, N>(T(a)), vec<T, N>(T(b)), x); }

// The next number of the type itself: one step of its bits towards y.
template <class T, class I> SIM_FN T __next(T x, T y) {
  if (float(x) != float(x) || float(y) != float(y)) return x != x ? x : y;
  if (float(x) == float(y)) return y;
  if (float(x) == 0.0f) return as_type<T>(I(float(y) > 0.0f ? 1 : make_unsigned_t<I>(1) << (sizeof(I) * 8 - 1) | 1));
  return as_type<T>(I(as_type<I>(x) + ((float(x) < float(y)) == (float(x) > 0.0f) ? 1 : -1)));
}
SIM_FN float nextafter(float x, float y) { return nextafterf(x, y); }
SIM_FN half nextafter(half x, half y) { return __next<half, short>(x, y); }
SIM_FN bfloat nextafter(bfloat x, bfloat y) { return __next<bfloat, short>(x, y); }
SIM_VECTOR2(nextafter, T)

// ---- min, max, clamp, abs, sign: of numbers of one type ---------------------------------------------
template <class T> using __if_integer = enable_if_t<is_integral_v<T>, int>;
template <class T, __if_float<T> = 0> SIM_FN T max(T a, T b) { return T(__builtin_fmaxf(float(a), float(b))); }
template <class T, __if_float<T> = 0> SIM_FN T min(T a, T b) { return T(__builtin_fminf(float(a), float(b))); }
template <class T, __if_integer<T> = 0> SIM_FN constexpr T max(T a, T b) { return a > b ? a : b; }
template <class T, __if_integer<T> = 0> SIM_FN constexpr T min(T a, T b) { return a < b ? a : b; }
template <class T, __if_number<T> = 0> SIM_FN T max3(T a, T b, T c) { return max(max(a, b), c); }
template <class T, __if_number<T> = 0> SIM_FN T min3(T a, T b, T c) { return min(min(a, b), c); }
template <class T, __if_number<T> = 0> SIM_FN T median3(T a, T b, T c) { return max(min(a, b), min(max(a, b), c)); }
template <class T, __if_number<T> = 0> SIM_FN T clamp(T v, T low, T high) { return min(max(v, low), high); }
template <class T, __if_float<T> = 0> SIM_FN T abs(T x) { return T(__builtin_fabsf(float(x))); }
template <class T, __if_integer<T> = 0> SIM_FN T abs(T x) { return x < T(0) ? T(-x) : x; }
template <class T, __if_float<T> = 0> SIM_FN T sign(T x) {
  float f = float(x); return f > 0 ? T(1.0f) : f < 0 ? T(-1.0f) : f == f ? x : T(0.0f); }
SIM_VECTOR1(abs, T) SIM_VECTOR1(sign, T) SIM_VECTOR2(max, T) SIM_VECTOR2(min, T)
SIM_VECTOR3(max3) SIM_VECTOR3(min3) SIM_VECTOR3(median3) SIM_VECTOR3(clamp)

// ---- exponent and fraction ------------------------------------------------------------------------
template <class T, __if_float<T> = 0> SIM_FN T ldexp(T x, int e) { return T(ldexpf(float(x), e)); }
template <class T, __if_float<T> = 0> SIM_FN T frexp(T x, int& e) { return T(frexpf(float(x), &e)); }
template <class T, __if_float<T> = 0> SIM_FN int ilogb(T x) { return ilogbf(float(x)); }
template <class T, __if_float<T> = 0> SIM_FN T modf(T x, T& whole) {
  whole = trunc(x); return T(__builtin_isinf(float(x)) ? 0.0f : __builtin_copysignf(float(x) - float(whole), float(x))); }
template <class T, __if_float<T> = 0> SIM_FN T sincos(T x, T& c) { c = cos(x); return sin(x); }
template <class T, int N> SIM_FN vec<T, N> ldexp(vec<T, N> x, vec<int, N> e) {
  vec<T, N> r = {}; for (int i = 0; i < N; ++i) r[i] = ldexp(x[i], e[i]); return r; }
template <class T, int N> SIM_FN vec<T, N> frexp(vec<T, N> x, vec<int, N>& e) {
  vec<T, N> r = {}; for (int i = 0; i < N; ++i) { int k; r[i] = frexp(x[i], k); e[i] = k; } return r; }
SIM_VECTOR1(ilogb, int)
#define SIM_VECTOR_OUT(name)                                                                             \
  template <class T, int N> SIM_FN vec<T, N> name(vec<T, N> x, vec<T, N>& second) {                      \
    vec<T, N> r = {}; for (int i = 0; i < N; ++i) { T other; r[i] = name(x[i], other); second[i] = other; } return r; }
SIM_VECTOR_OUT(modf) SIM_VECTOR_OUT(sincos)

// ---- geometric ------------------------------------------------------------------------------------
template <class T, int N> SIM_FN T dot(vec<T, N> a, vec<T, N> b) { T s = a[0] * b[0]; for (int i = 1; i < N; ++i) s += a[i] * b[i]; return s; }
template <class T, int N> SIM_FN T length_squared(vec<T, N> a) { return dot(a, a); }
template <class T, int N> SIM_FN T length(vec<T, N> a) { return sqrt(dot(a, a)); }
template <class T, int N> SIM_FN T distance(vec<T, N> a, vec<T, N> b) { return length(a - b); }
template <class T, int N> SIM_FN T distance_squared(vec<T, N> a, vec<T, N> b) { return length_squared(a - b); }
template <class T, int N> SIM_FN vec<T, N> normalize(vec<T, N> a) { return a * rsqrt(dot(a, a)); }
template <class T> SIM_FN vec<T, 3> cross(vec<T, 3> a, vec<T, 3> b) { return a.yzx * b.zxy - a.zxy * b.yzx; }
template <class T, int N> SIM_FN vec<T, N> faceforward(vec<T, N> n, vec<T, N> i, vec<T, N> ref) { return dot(ref, i) < T(0.0f) ? n : -n; }
template <class T, int N> SIM_FN vec<T, N> reflect(vec<T, N> i, vec<T, N> n) { return i - n * (T(2.0f) * dot(n, i)); }
template <class T, int N> SIM_FN vec<T, N> refract(vec<T, N> i, vec<T, N> n, __same<T> eta) {
  T d = dot(n, i), k = T(1.0f) - eta * eta * (T(1.0f) - d * d);
  return k < T(0.0f) ? vec<T, N>(T(0.0f)) : i * eta - n * (eta * d + sqrt(k)); }

#define SIM_ALIAS1(name, expr) using metal::name;
#define SIM_VARIANTS                                                                                               \
  SIM_PLAIN_UNARY(SIM_ALIAS1) SIM_PLAIN_BINARY(SIM_ALIAS1) SIM_COMMON_TERNARY(SIM_ALIAS1)                        \
  using metal::abs; using metal::max; using metal::min; using metal::clamp; using metal::sign; using metal::dot;   \
  using metal::length; using metal::normalize; using metal::distance; using metal::ldexp; using metal::frexp;      \
  using metal::max3; using metal::min3; using metal::median3; using metal::modf;                                   \
  using metal::nextafter; using metal::ilogb; using metal::length_squared; using metal::distance_squared;          \
  using metal::cross; using metal::faceforward; using metal::reflect; using metal::refract;
namespace fast {
SIM_VARIANTS
#define SIM_ROUGH1(name, expr) SIM_UNARY(name, sim_fast(SIM_FAST_##name, expr, x))
SIM_ROUGH_UNARY(SIM_ROUGH1)
#undef SIM_ROUGH1
SIM_BINARY(divide, sim_fast_divide(x, y))
template <class T, __if_float<T> = 0> SIM_FN T sincos(T x, T& c) { c = fast::cos(x); return fast::sin(x); }
SIM_VECTOR_OUT(sincos)
SIM_FN float __tanh_of(float t) { return fast::divide(t - 1.0f, t + 1.0f); }
SIM_FN float __pow_of(float x, float y) { return fast::exp2(y * (x == 0.0f ? -INFINITY : fast::log2(x))); }
SIM_UNARY(cosh, 0.5f * (fast::exp(x) + fast::exp(-x)))
SIM_UNARY(sinh, 0.5f * (fast::exp(x) - fast::exp(-x)))
SIM_UNARY(tan, fast::sin(x) * fast::divide(1.0f, fast::cos(x)))
SIM_UNARY(tanh, __tanh_of(fast::exp(2.0f * x)))
SIM_BINARY(pow, __pow_of(x, y))
SIM_BINARY(powr, __pow_of(x, y))
}
#undef SIM_VECTOR_OUT
namespace precise { SIM_VARIANTS using metal::sincos; SIM_ROUGH_UNARY(SIM_ALIAS1) SIM_STEPPED_UNARY(SIM_ALIAS1) SIM_STEPPED_BINARY(SIM_ALIAS1) }
#undef SIM_VARIANTS
}  // namespace metal

// The spelling of the same functions inside Metal's own headers, which MLX's bfloat header calls.
#define SIM_INNER1(name, expr) SIM_FN float __metal_##name(float x, bool) { return metal::name(x); }
#define SIM_INNER2(name, expr) SIM_FN float __metal_##name(float x, float y, bool) { return metal::name(x, y); }
#define SIM_INNER3(name, expr) SIM_FN float __metal_##name(float x, float y, float z, bool) { return metal::name(x, y, z); }
SIM_COMMON_UNARY(SIM_INNER1) SIM_COMMON_BINARY(SIM_INNER2) SIM_COMMON_TERNARY(SIM_INNER3)
SIM_FN float __metal_fma(float x, float y, float z) { return __builtin_fmaf(x, y, z); }
SIM_FN float __metal_nextafter(float x, float y) { return nextafterf(x, y); }
SIM_FN float __metal_ldexp(float x, int e, bool) { return ldexpf(x, e); }
SIM_FN float __metal_frexp(float x, int* e, bool) { return frexpf(x, e); }
#define __METAL_MAYBE_FAST_MATH__ false
#undef SIM_INNER1
#undef SIM_INNER2
#undef SIM_INNER3
#undef SIM_ALIAS1
