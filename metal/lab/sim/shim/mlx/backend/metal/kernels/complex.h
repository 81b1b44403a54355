// MLX's complex number, without the overloads by address space that C++ cannot tell apart.
#pragma once
#include <metal_stdlib>

using namespace metal;

template <class T> struct complex_t {
  using value_type = T;
  T real, imag;
  constexpr complex_t() : real(0), imag(0) {}
  constexpr complex_t(T r, T i) : real(r), imag(i) {}
  template <class U, class = metal::enable_if_t<metal::is_arithmetic_v<U>>>
  constexpr complex_t(U x) : real(T(x)), imag(0) {}
  constexpr complex_t(vec<T, 2> v) : real(v.x), imag(v.y) {}
  constexpr operator vec<T, 2>() const { return vec<T, 2>{real, imag}; }
  template <class U, class = metal::enable_if_t<metal::is_arithmetic_v<U>>>
  constexpr operator U() const { return U(real); }
  constexpr complex_t operator-() const { return {-real, -imag}; }
  friend constexpr complex_t operator+(complex_t a, complex_t b) { return {a.real + b.real, a.imag + b.imag}; }
  friend constexpr complex_t operator-(complex_t a, complex_t b) { return {a.real - b.real, a.imag - b.imag}; }
  friend constexpr complex_t operator*(complex_t a, complex_t b) {
    return {a.real * b.real - a.imag * b.imag, a.real * b.imag + a.imag * b.real};
  }
  friend constexpr complex_t operator/(complex_t a, complex_t b) {
    T d = b.real * b.real + b.imag * b.imag;
    return {(a.real * b.real + a.imag * b.imag) / d, (a.imag * b.real - a.real * b.imag) / d};
  }
  // A number on one side is a complex one: it could as well be the other side that loses its imaginary part.
#define SIM_WITH_NUMBER(op)                                                                                          \
  template <class U, class = metal::enable_if_t<metal::is_arithmetic_v<U>>>                                         \
  friend constexpr complex_t operator op(U a, complex_t b) { return complex_t(a) op b; }                             \
  template <class U, class = metal::enable_if_t<metal::is_arithmetic_v<U>>>                                         \
  friend constexpr complex_t operator op(complex_t a, U b) { return a op complex_t(b); }
  SIM_WITH_NUMBER(+) SIM_WITH_NUMBER(-) SIM_WITH_NUMBER(*) SIM_WITH_NUMBER(/)
#undef SIM_WITH_NUMBER
  // The remainder of each part, with the divisor's sign.
  friend constexpr complex_t operator%(complex_t a, complex_t b) { return {floored(a.real, b.real), floored(a.imag, b.imag)}; }
  static constexpr T floored(T a, T b) {
    const T r = a - b * T(long(a / b));
    return r != 0 && (r < 0) != (b < 0) ? r + b : r;
  }
  friend constexpr bool operator==(complex_t a, complex_t b) { return a.real == b.real && a.imag == b.imag; }
  friend constexpr bool operator!=(complex_t a, complex_t b) { return !(a == b); }
  friend constexpr bool operator<(complex_t a, complex_t b) { return a.real < b.real || (a.real == b.real && a.imag < b.imag); }
  friend constexpr bool operator>(complex_t a, complex_t b) { return b < a; }
  friend constexpr bool operator<=(complex_t a, complex_t b) { return !(b < a); }
  friend constexpr bool operator>=(complex_t a, complex_t b) { return !(a < b); }
};
using complex64_t = complex_t<float>;
