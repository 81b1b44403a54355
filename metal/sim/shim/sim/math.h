// The math, common, integer, relational and geometric functions. Computed in float (half and bfloat are
// rounded once, at the end), with the host's correctly behaved libm: metal::fast:: is as exact as precise::.
#pragma once
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
float ldexpf(float, int) __attribute__((const));
float frexpf(float, int*);
}

#define SIM_COMMON_UNARY(X)                                                                                 \
  X(acos, acosf(x)) X(acosh, acoshf(x)) X(asin, asinf(x)) X(asinh, asinhf(x)) X(atan, atanf(x))            \
  X(atanh, atanhf(x)) X(ceil, __builtin_ceilf(x)) X(cos, cosf(x)) X(cosh, coshf(x))                         \
  X(exp, expf(x)) X(exp2, exp2f(x)) X(exp10, powf(10.0f, x)) X(fabs, __builtin_fabsf(x))                    \
  X(floor, __builtin_floorf(x)) X(fract, __sim_fract(x)) X(log, logf(x)) X(log2, log2f(x))                  \
  X(log10, log10f(x)) X(rint, __builtin_rintf(x)) X(round, __builtin_roundf(x))                             \
  X(rsqrt, 1.0f / __builtin_sqrtf(x)) X(sin, sinf(x)) X(sinh, sinhf(x)) X(sqrt, __builtin_sqrtf(x))         \
  X(tan, tanf(x)) X(tanh, tanhf(x)) X(trunc, __builtin_truncf(x)) X(sinpi, __sim_sinpi(x))                  \
  X(cospi, __sim_cospi(x)) X(tanpi, __sim_sinpi(x) / __sim_cospi(x)) X(saturate, __sim_clamp01(x))
#define SIM_COMMON_BINARY(X)                                                                                \
  X(atan2, atan2f(x, y)) X(copysign, __builtin_copysignf(x, y)) X(divide, x / y) X(fdim, __sim_fdim(x, y))  \
  X(fmax, __builtin_fmaxf(x, y)) X(fmin, __builtin_fminf(x, y)) X(fmod, fmodf(x, y)) X(pow, powf(x, y))     \
  X(powr, powf(x, y)) X(nextafter, nextafterf(x, y)) X(step, y < x ? 0.0f : 1.0f)
#define SIM_COMMON_TERNARY(X)                                                                               \
  X(fma, __builtin_fmaf(x, y, z)) X(mix, x + (y - x) * z) X(smoothstep, __sim_smoothstep(x, y, z))          \
  X(fmax3, __builtin_fmaxf(__builtin_fmaxf(x, y), z)) X(fmin3, __builtin_fminf(__builtin_fminf(x, y), z))   \
  X(fmedian3, __builtin_fmaxf(__builtin_fminf(x, y), __builtin_fminf(__builtin_fmaxf(x, y), z)))

namespace metal {
SIM_FN float __sim_fract(float x) { float f = x - __builtin_floorf(x); return f < 1.0f ? f : 0x1.fffffep-1f; }
SIM_FN float __sim_sinpi(float x) { float r = x - 2.0f * __builtin_roundf(x * 0.5f); return sinf(3.14159274101257324f * r); }
SIM_FN float __sim_cospi(float x) { float r = x - 2.0f * __builtin_roundf(x * 0.5f); return cosf(3.14159274101257324f * r); }
SIM_FN float __sim_fdim(float x, float y) { return x != x || y != y ? __builtin_nanf("") : (x > y ? x - y : 0.0f); }
SIM_FN float __sim_clamp01(float x) { return __builtin_fminf(__builtin_fmaxf(x, 0.0f), 1.0f); }
SIM_FN float __sim_smoothstep(float a, float b, float x) { float t = __sim_clamp01((x - a) / (b - a)); return t * t * (3.0f - 2.0f * t); }

template <class T> using __if_float = enable_if_t<is_floating_point_v<T>, int>;
template <class T> using __if_integer = enable_if_t<is_integral_v<T>, int>;
template <class V> using __if_vec = enable_if_t<__is_vec<V>, int>;
template <class V> using __scalar_of = typename __vec_traits<V>::scalar;

#define SIM_UNARY(name, expr)                                                                    \
  template <class T, __if_float<T> = 0> SIM_FN T name(T v) { float x = float(v); return T(expr); } \
  template <class V, __if_vec<V> = 0> SIM_FN V name(V v) {                                        \
    V r = {}; for (int i = 0; i < __vec_traits<V>::size; ++i) r[i] = name(__scalar_of<V>(v[i])); return r; }
#define SIM_BINARY(name, expr)                                                                              \
  template <class T, __if_float<T> = 0> SIM_FN T name(T a, T b) { float x = float(a), y = float(b); return T(expr); } \
  template <class V, __if_vec<V> = 0> SIM_FN V name(V a, V b) {                                             \
    V r = {}; for (int i = 0; i < __vec_traits<V>::size; ++i) r[i] = name(__scalar_of<V>(a[i]), __scalar_of<V>(b[i])); return r; }
#define SIM_TERNARY(name, expr)                                                                             \
  template <class T, __if_float<T> = 0> SIM_FN T name(T a, T b, T c) {                                      \
    float x = float(a), y = float(b), z = float(c); return T(expr); }                                      \
  template <class V, __if_vec<V> = 0> SIM_FN V name(V a, V b, V c) {                                        \
    V r = {}; for (int i = 0; i < __vec_traits<V>::size; ++i)                                               \
      r[i] = name(__scalar_of<V>(a[i]), __scalar_of<V>(b[i]), __scalar_of<V>(c[i])); return r; }

SIM_COMMON_UNARY(SIM_UNARY)
SIM_COMMON_BINARY(SIM_BINARY)
SIM_COMMON_TERNARY(SIM_TERNARY)
// Mixed vector and scalar operands that Metal accepts.
template <class T, int N> SIM_FN vec<T, N> mix(vec<T, N> a, vec<T, N> b, T t) { return mix(a, b, vec<T, N>(t)); }
template <class T, int N> SIM_FN vec<T, N> step(T edge, vec<T, N> v) { return step(vec<T, N>(edge), v); }

// ---- min, max, clamp, abs, sign ------------------------------------------------------------------
template <class T, __if_float<T> = 0> SIM_FN T max(T a, T b) { return T(__builtin_fmaxf(float(a), float(b))); }
template <class T, __if_float<T> = 0> SIM_FN T min(T a, T b) { return T(__builtin_fminf(float(a), float(b))); }
template <class T, __if_integer<T> = 0> SIM_FN constexpr T max(T a, T b) { return a > b ? a : b; }
template <class T, __if_integer<T> = 0> SIM_FN constexpr T min(T a, T b) { return a < b ? a : b; }
template <class V, __if_vec<V> = 0> SIM_FN V max(V a, V b) {
  V r = {}; for (int i = 0; i < __vec_traits<V>::size; ++i) r[i] = max(__scalar_of<V>(a[i]), __scalar_of<V>(b[i])); return r; }
template <class V, __if_vec<V> = 0> SIM_FN V min(V a, V b) {
  V r = {}; for (int i = 0; i < __vec_traits<V>::size; ++i) r[i] = min(__scalar_of<V>(a[i]), __scalar_of<V>(b[i])); return r; }
template <class T, int N> SIM_FN vec<T, N> max(vec<T, N> a, T b) { return max(a, vec<T, N>(b)); }
template <class T, int N> SIM_FN vec<T, N> min(vec<T, N> a, T b) { return min(a, vec<T, N>(b)); }
template <class T> SIM_FN T max3(T a, T b, T c) { return max(max(a, b), c); }
template <class T> SIM_FN T min3(T a, T b, T c) { return min(min(a, b), c); }
template <class T> SIM_FN T median3(T a, T b, T c) { return max(min(a, b), min(max(a, b), c)); }
template <class T> SIM_FN T clamp(T v, T low, T high) { return min(max(v, low), high); }
template <class T, int N> SIM_FN vec<T, N> clamp(vec<T, N> v, T low, T high) { return clamp(v, vec<T, N>(low), vec<T, N>(high)); }
template <class T, __if_float<T> = 0> SIM_FN T abs(T x) { return T(__builtin_fabsf(float(x))); }
template <class T, __if_integer<T> = 0> SIM_FN T abs(T x) { return x < T(0) ? T(-x) : x; }
template <class V, __if_vec<V> = 0> SIM_FN V abs(V a) {
  V r = {}; for (int i = 0; i < __vec_traits<V>::size; ++i) r[i] = abs(__scalar_of<V>(a[i])); return r; }
template <class T, __if_float<T> = 0> SIM_FN T sign(T x) { return x > T(0) ? T(1) : (x < T(0) ? T(-1) : (x == x ? x : T(0))); }
template <class V, __if_vec<V> = 0> SIM_FN V sign(V a) {
  V r = {}; for (int i = 0; i < __vec_traits<V>::size; ++i) r[i] = sign(__scalar_of<V>(a[i])); return r; }

// ---- relational ----------------------------------------------------------------------------------
template <class T, __if_float<T> = 0> SIM_FN bool isnan(T x) { return __builtin_isnan(float(x)); }
template <class T, __if_float<T> = 0> SIM_FN bool isinf(T x) { return __builtin_isinf(float(x)); }
template <class T, __if_float<T> = 0> SIM_FN bool isfinite(T x) { return __builtin_isfinite(float(x)); }
template <class T, __if_float<T> = 0> SIM_FN bool isnormal(T x) { return __builtin_isnormal(float(x)); }
template <class T, __if_float<T> = 0> SIM_FN bool signbit(T x) { return __builtin_signbit(float(x)); }
#define SIM_RELATIONAL(name)                                                                                \
  template <class V, __if_vec<V> = 0> SIM_FN __bools<__vec_traits<V>::size> name(V v) {                     \
    __bools<__vec_traits<V>::size> r{}; for (int i = 0; i < __vec_traits<V>::size; ++i) r[i] = name(__scalar_of<V>(v[i])); return r; }
SIM_RELATIONAL(isnan) SIM_RELATIONAL(isinf) SIM_RELATIONAL(isfinite) SIM_RELATIONAL(isnormal) SIM_RELATIONAL(signbit)
#undef SIM_RELATIONAL
template <int N> SIM_FN bool any(__bools<N> v) { bool r = false; for (int i = 0; i < N; ++i) r |= v[i]; return r; }
template <int N> SIM_FN bool all(__bools<N> v) { bool r = true; for (int i = 0; i < N; ++i) r &= v[i]; return r; }
template <class V, __if_vec<V> = 0> SIM_FN bool any(V v) { return any(__bools<__vec_traits<V>::size>(v)); }
template <class V, __if_vec<V> = 0> SIM_FN bool all(V v) { return all(__bools<__vec_traits<V>::size>(v)); }
SIM_FN bool any(bool b) { return b; }
SIM_FN bool all(bool b) { return b; }
template <class T> SIM_FN T select(T a, T b, bool c) { return c ? b : a; }
template <class T, int N> SIM_FN vec<T, N> select(vec<T, N> a, vec<T, N> b, __bools<N> c) {
  vec<T, N> r = a; for (int i = 0; i < N; ++i) if (c[i]) r[i] = b[i]; return r; }
template <class T, int N, class I> SIM_FN vec<T, N> select(vec<T, N> a, vec<T, N> b, vec<I, N> c) {
  return select(a, b, __bools<N>(c)); }

// ---- integer -------------------------------------------------------------------------------------
template <class T, __if_integer<T> = 0> SIM_FN T popcount(T x) { return T(__builtin_popcountll((make_unsigned_t<T>)x)); }
template <class T, __if_integer<T> = 0> SIM_FN T clz(T x) {
  return x == 0 ? T(sizeof(T) * 8) : T(__builtin_clzll((make_unsigned_t<T>)x) - (64 - int(sizeof(T)) * 8)); }
template <class T, __if_integer<T> = 0> SIM_FN T ctz(T x) { return x == 0 ? T(sizeof(T) * 8) : T(__builtin_ctzll((make_unsigned_t<T>)x)); }
template <class T, __if_integer<T> = 0> SIM_FN T mulhi(T a, T b) {
  if constexpr (sizeof(T) == 8) return T((__is_unsigned(T) ? (__int128)((unsigned __int128)a * b >> 64) : ((__int128)a * b >> 64)));
  else return T(((long)a * (long)b) >> (sizeof(T) * 8)); }
template <> SIM_FN uint mulhi<uint, 0>(uint a, uint b) { return uint(((ulong)a * b) >> 32); }
template <class T, __if_integer<T> = 0> SIM_FN T mul24(T a, T b) { return a * b; }
template <class T, __if_integer<T> = 0> SIM_FN T mad24(T a, T b, T c) { return a * b + c; }
template <class T, __if_integer<T> = 0> SIM_FN T madhi(T a, T b, T c) { return mulhi(a, b) + c; }
template <class T, __if_integer<T> = 0> SIM_FN make_unsigned_t<T> absdiff(T a, T b) { return a > b ? make_unsigned_t<T>(a) - b : make_unsigned_t<T>(b) - a; }
template <class T, __if_integer<T> = 0> SIM_FN T rotate(T x, T n) {
  using U = make_unsigned_t<T>; constexpr uint bits = sizeof(T) * 8; uint k = uint(n) % bits;
  return k == 0 ? x : T((U(x) << k) | (U(x) >> (bits - k))); }
template <class T, __if_integer<T> = 0> SIM_FN T reverse_bits(T x) {
  using U = make_unsigned_t<T>; U u = U(x), r = 0; for (uint i = 0; i < sizeof(T) * 8; ++i) r = U((r << 1) | ((u >> i) & 1)); return T(r); }
template <class T, __if_integer<T> = 0> SIM_FN T extract_bits(T x, uint offset, uint bits) {
  if (bits == 0) return T(0);
  constexpr uint width = sizeof(T) * 8; using U = make_unsigned_t<T>;
  return T(T(U(x) << (width - offset - bits)) >> (width - bits)); }
template <class T, __if_integer<T> = 0> SIM_FN T insert_bits(T base, T insert, uint offset, uint bits) {
  using U = make_unsigned_t<T>; constexpr uint width = sizeof(T) * 8;
  U mask = bits >= width ? U(~U(0)) : U(((U(1) << bits) - 1) << offset); return T((U(base) & ~mask) | ((U(insert) << offset) & mask)); }
template <class T, __if_integer<T> = 0> SIM_FN T addsat(T a, T b) { T r; if (!__builtin_add_overflow(a, b, &r)) return r;
  return (__is_unsigned(T) || b > 0) ? numeric_limits<T>::max() : numeric_limits<T>::min(); }
template <class T, __if_integer<T> = 0> SIM_FN T subsat(T a, T b) { T r; if (!__builtin_sub_overflow(a, b, &r)) return r;
  return (__is_unsigned(T) || b > 0) ? numeric_limits<T>::min() : numeric_limits<T>::max(); }
template <class T, __if_integer<T> = 0> SIM_FN T hadd(T a, T b) { return T((__int128(a) + b) >> 1); }
template <class T, __if_integer<T> = 0> SIM_FN T rhadd(T a, T b) { return T((__int128(a) + b + 1) >> 1); }

// ---- exponent and fraction ------------------------------------------------------------------------
template <class T, __if_float<T> = 0> SIM_FN T ldexp(T x, int e) { return T(ldexpf(float(x), e)); }
template <class T, __if_float<T> = 0> SIM_FN T frexp(T x, int& e) { return T(frexpf(float(x), &e)); }
template <class T, __if_float<T> = 0> SIM_FN int ilogb(T x) { int e; frexpf(float(x), &e); return e - 1; }
template <class T, __if_float<T> = 0> SIM_FN T modf(T x, T& whole) { whole = trunc(x); return T(x - whole); }
template <class T, __if_float<T> = 0> SIM_FN T sincos(T x, T& c) { c = cos(x); return sin(x); }

// ---- geometric ------------------------------------------------------------------------------------
template <class T, int N> SIM_FN T dot(vec<T, N> a, vec<T, N> b) { T s = a[0] * b[0]; for (int i = 1; i < N; ++i) s += a[i] * b[i]; return s; }
template <class T, int N> SIM_FN T length_squared(vec<T, N> a) { return dot(a, a); }
template <class T, int N> SIM_FN T length(vec<T, N> a) { return sqrt(dot(a, a)); }
template <class T, int N> SIM_FN T distance(vec<T, N> a, vec<T, N> b) { return length(vec<T, N>(a - b)); }
template <class T, int N> SIM_FN T distance_squared(vec<T, N> a, vec<T, N> b) { return length_squared(vec<T, N>(a - b)); }
template <class T, int N> SIM_FN vec<T, N> normalize(vec<T, N> a) { return a * rsqrt(dot(a, a)); }
template <class T> SIM_FN vec<T, 3> cross(vec<T, 3> a, vec<T, 3> b) { return a.yzx * b.zxy - a.zxy * b.yzx; }

namespace fast {
#define SIM_ALIAS1(name, expr) using metal::name;
SIM_COMMON_UNARY(SIM_ALIAS1) SIM_COMMON_BINARY(SIM_ALIAS1) SIM_COMMON_TERNARY(SIM_ALIAS1)
using metal::abs; using metal::max; using metal::min; using metal::clamp; using metal::sign; using metal::dot;
using metal::length; using metal::normalize; using metal::distance; using metal::ldexp; using metal::frexp;
using metal::max3; using metal::min3; using metal::median3; using metal::modf; using metal::sincos;
}  // namespace fast
namespace precise {
SIM_COMMON_UNARY(SIM_ALIAS1) SIM_COMMON_BINARY(SIM_ALIAS1) SIM_COMMON_TERNARY(SIM_ALIAS1)
using metal::abs; using metal::max; using metal::min; using metal::clamp; using metal::sign; using metal::dot;
using metal::length; using metal::normalize; using metal::distance; using metal::ldexp; using metal::frexp;
using metal::max3; using metal::min3; using metal::median3; using metal::modf; using metal::sincos;
}  // namespace precise

// ---- packing --------------------------------------------------------------------------------------
SIM_FN uint pack_half_to_unorm2x16(half2 v) {
  return uint(__builtin_rintf(saturate(float(v.x)) * 65535.0f)) | (uint(__builtin_rintf(saturate(float(v.y)) * 65535.0f)) << 16); }
SIM_FN float4 unpack_unorm4x8_to_float(uint p) {
  float4 r = {}; for (int i = 0; i < 4; ++i) r[i] = float((p >> (8 * i)) & 0xff) / 255.0f; return r; }
SIM_FN float2 unpack_snorm2x16_to_float(uint p) {
  float2 r = {}; for (int i = 0; i < 2; ++i) r[i] = max(-1.0f, float(short(p >> (16 * i))) / 32767.0f); return r; }
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
