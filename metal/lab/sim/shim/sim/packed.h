// Packed vectors: the size and alignment of their components; they become a vec by themselves, and a vec becomes one.
#pragma once
#include "sim/vectors.h"

namespace metal {
#define SIM_COMPONENTS                                                                                \
  T __at[N];                                                                                          \
  SIM_VEC __lanes<T, N> __whole() const {                                                             \
    if constexpr (N == 2) return vec<T, N>(__at[0], __at[1]).__data;                                  \
    else if constexpr (N == 3) return vec<T, N>(__at[0], __at[1], __at[2]).__data;                    \
    else return vec<T, N>(__at[0], __at[1], __at[2], __at[3]).__data;                                 \
  }                                                                                                   \
  SIM_VEC void __set(__lanes<T, N> lanes) { for (int i = 0; i < N; ++i) __at[i] = T(lanes[i]); }      \
  SIM_VEC T& __element(long i) { return __at[i]; }
template <class T, int N> struct __packed;
template <class T> struct __packed<T, 2> { static constexpr int N = 2; SIM_COMPONENTS SIM_SWIZZLES2 };
template <class T> struct __packed<T, 3> { static constexpr int N = 3; SIM_COMPONENTS SIM_SWIZZLES3 };
template <class T> struct __packed<T, 4> { static constexpr int N = 4; SIM_COMPONENTS SIM_SWIZZLES4 };
#undef SIM_COMPONENTS

template <class T, int N> struct packed_vec : __packed<T, N> {
  using __packed<T, N>::__at;
  using __vec = vec<T, N>;
  packed_vec() = default;
  SIM_VEC packed_vec(const __vec& v) : __packed<T, N>{} { this->__set(v.__data); }
  template <class S, class = enable_if_t<__is_convertible(S, T)>> SIM_VEC packed_vec(S s) : packed_vec(__vec(s)) {}
  template <class U> SIM_VEC explicit packed_vec(const vec<U, N>& v) : packed_vec(__vec(v)) {}
  template <class U> SIM_VEC explicit packed_vec(const packed_vec<U, N>& v) : packed_vec(__vec(vec<U, N>(v))) {}
  template <class A, class B, class... R> SIM_VEC packed_vec(A a, B b, R... rest) : packed_vec(__vec(a, b, rest...)) {}
  SIM_VEC operator __vec() const { return __vec::__of(this->__whole()); }
  template <class U> SIM_VEC explicit operator vec<U, N>() const { return vec<U, N>(__vec(*this)); }
  SIM_VEC T& operator[](long i) { return __at[i]; }
  SIM_VEC T operator[](long i) const { return __at[i]; }

  // With a scalar or a vec on the other side, and with another packed vector, it is arithmetic of vecs.
#define SIM_OP(op)                                                                                              \
  friend SIM_VEC auto operator op(const packed_vec& a, const packed_vec& b) { return __vec(a) op __vec(b); }    \
  friend SIM_VEC auto operator op(const packed_vec& a, const __vec& b) { return __vec(a) op b; }                \
  friend SIM_VEC auto operator op(const __vec& a, const packed_vec& b) { return a op __vec(b); }                \
  friend SIM_VEC auto operator op(const packed_vec& a, T b) { return __vec(a) op b; }                           \
  friend SIM_VEC auto operator op(T a, const packed_vec& b) { return a op __vec(b); }
  SIM_OP(+) SIM_OP(-) SIM_OP(*) SIM_OP(/) SIM_OP(%) SIM_OP(&) SIM_OP(|) SIM_OP(^)
  SIM_OP(==) SIM_OP(!=) SIM_OP(<) SIM_OP(>) SIM_OP(<=) SIM_OP(>=)
#undef SIM_OP
#define SIM_OP(op) friend SIM_VEC packed_vec& operator op##=(packed_vec& a, const __vec& b) { return a = a op b; }
  SIM_OP(+) SIM_OP(-) SIM_OP(*) SIM_OP(/) SIM_OP(%) SIM_OP(&) SIM_OP(|) SIM_OP(^)
#undef SIM_OP
  friend SIM_VEC __vec operator-(const packed_vec& a) { return -__vec(a); }
};
}  // namespace metal
