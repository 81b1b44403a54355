// The functions of integers, of truth, and of bits.
#pragma once
#include "sim/math.h"

namespace metal {
// ---- relational ----------------------------------------------------------------------------------
template <class T, __if_float<T> = 0> SIM_FN bool isnan(T x) { return __builtin_isnan(float(x)); }
template <class T, __if_float<T> = 0> SIM_FN bool isinf(T x) { return __builtin_isinf(float(x)); }
template <class T, __if_float<T> = 0> SIM_FN bool isfinite(T x) { return __builtin_isfinite(float(x)); }
// Whether it is normal as a number of its own type: most small halves are normal floats.
template <class T, __if_float<T> = 0> SIM_FN bool isnormal(T x) {
  float a = __builtin_fabsf(float(x)); return a >= float(numeric_limits<T>::min()) && a <= float(numeric_limits<T>::max()); }
template <class T, __if_float<T> = 0> SIM_FN bool signbit(T x) { return __builtin_signbit(float(x)); }
template <class T, __if_float<T> = 0> SIM_FN bool isordered(T x, T y) { return !isnan(x) && !isnan(y); }
template <class T, __if_float<T> = 0> SIM_FN bool isunordered(T x, T y) { return isnan(x) || isnan(y); }
SIM_VECTOR1(isnan, bool) SIM_VECTOR1(isinf, bool) SIM_VECTOR1(isfinite, bool) SIM_VECTOR1(isnormal, bool) SIM_VECTOR1(signbit, bool)
SIM_VECTOR2(isordered, bool) SIM_VECTOR2(isunordered, bool)
template <int N> SIM_FN bool any(__bools<N> v) { bool r = false; for (int i = 0; i < N; ++i) r |= v[i]; return r; }
template <int N> SIM_FN bool all(__bools<N> v) { bool r = true; for (int i = 0; i < N; ++i) r &= v[i]; return r; }
SIM_FN bool any(bool b) { return b; }
SIM_FN bool all(bool b) { return b; }
template <class T> SIM_FN T select(T a, T b, bool c) { return c ? b : a; }
template <class T, int N> SIM_FN vec<T, N> select(vec<T, N> a, vec<T, N> b, __bools<N> c) {
  vec<T, N> r = a; for (int i = 0; i < N; ++i) if (c[i]) r[i] = b[i]; return r; }

// ---- integer -------------------------------------------------------------------------------------
template <class T, __if_integer<T> = 0> SIM_FN T popcount(T x) { return T(__builtin_popcountll((make_unsigned_t<T>)x)); }
template <class T, __if_integer<T> = 0> SIM_FN T clz(T x) {
  return x == 0 ? T(sizeof(T) * 8) : T(__builtin_clzll((make_unsigned_t<T>)x) - (64 - int(sizeof(T)) * 8)); }
template <class T, __if_integer<T> = 0> SIM_FN T ctz(T x) { return x == 0 ? T(sizeof(T) * 8) : T(__builtin_ctzll((make_unsigned_t<T>)x)); }
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
SIM_VECTOR1(popcount, T) SIM_VECTOR1(clz, T) SIM_VECTOR1(ctz, T) SIM_VECTOR1(reverse_bits, T) SIM_VECTOR2(rotate, T)
template <class T, int N> SIM_FN vec<T, N> extract_bits(vec<T, N> x, uint offset, uint bits) {
  vec<T, N> r = {}; for (int i = 0; i < N; ++i) r[i] = extract_bits(x[i], offset, bits); return r; }
template <class T, int N> SIM_FN vec<T, N> insert_bits(vec<T, N> base, vec<T, N> insert, uint offset, uint bits) {
  vec<T, N> r = {}; for (int i = 0; i < N; ++i) r[i] = insert_bits(base[i], insert[i], offset, bits); return r; }
}  // namespace metal
