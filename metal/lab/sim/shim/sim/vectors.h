// vec<T, N> by the rules of Metal: it converts values, never bits; one scalar fills it; a comparison gives vec<bool, N>.
//
// Inside lies one of clang's extended vectors, so that a load, a store or an operation of the whole is one of the machine's, and
// the access hooks see it as one. Copies are written out for the same reason: the compiler would take a default one apart.
#pragma once

// No lines of this file in the debug information: what is inlined has the line of the kernel text that called it.
#define SIM_VEC __attribute__((always_inline, nodebug)) constexpr
#include "sim/swizzles.h"

namespace metal {
template <class T, int N> struct vec;

// What a component is stored as: a bool takes a byte, as everywhere else; clang's vectors of bool are bits.
template <class T> struct __stored { using type = T; };
template <> struct __stored<bool> { using type = uchar; };
template <> struct __stored<bfloat> { using type = __bf16; };
template <class T, int N> using __lanes = typename __stored<T>::type __attribute__((ext_vector_type(N), may_alias));

template <int N> using __bools = vec<bool, N>;
template <class V> struct __vec_traits { static constexpr bool is_vec = false; static constexpr int size = 1; using scalar = V; };
template <class T, int N> struct __vec_traits<vec<T, N>> {
  static constexpr bool is_vec = true; static constexpr int size = N; using scalar = T; };
template <class V> constexpr bool __is_vec = __vec_traits<__remove_cv(V)>::is_vec;
template <class V> constexpr bool __has_lanes = __is_vec<V>;

// The components in memory, under the names of the swizzles.
#define SIM_COMPONENTS                                                                \
  __lanes<T, N> __data;                                                               \
  SIM_VEC __lanes<T, N> __whole() const { return __data; }                            \
  SIM_VEC void __set(__lanes<T, N> lanes) { __data = lanes; }                         \
  SIM_VEC T& __element(long i) { return (*(T(*)[N])&__data)[i]; }
template <class T, int N> struct __swizzled;
template <class T> struct __swizzled<T, 2> { static constexpr int N = 2; SIM_COMPONENTS SIM_SWIZZLES2 };
template <class T> struct __swizzled<T, 3> { static constexpr int N = 3; SIM_COMPONENTS SIM_SWIZZLES3 };
template <class T> struct __swizzled<T, 4> { static constexpr int N = 4; SIM_COMPONENTS SIM_SWIZZLES4 };
#undef SIM_COMPONENTS

// The components of the arguments, one after the other, each converted.
template <class T, int N> struct __gathered {
  typename __stored<T>::type at[4] = {};
  int count = 0;
  template <class A> SIM_VEC void add(const A& a) {
    if constexpr (__vec_traits<A>::size == 1) at[count++] = T(a);
    else for (int i = 0; i < __vec_traits<A>::size; ++i) at[count++] = T(a[i]);
  }
  template <class... A> SIM_VEC __gathered(const A&... a) { (add(a), ...); }
  SIM_VEC operator __lanes<T, N>() const {
    if constexpr (N == 2) return __lanes<T, N>{at[0], at[1]};
    else if constexpr (N == 3) return __lanes<T, N>{at[0], at[1], at[2]};
    else return __lanes<T, N>{at[0], at[1], at[2], at[3]};
  }
};

template <class T, int N> struct vec : __swizzled<T, N> {
  using __base = __swizzled<T, N>;
  using __lanes = metal::__lanes<T, N>;
  using __base::__data;

  vec() = default;
  SIM_VEC vec(const vec& v) : __base{v.__data} {}
  SIM_VEC vec& operator=(const vec& v) { __data = v.__data; return *this; }
  template <class S, class = enable_if_t<__is_convertible(S, T)>> SIM_VEC vec(S s) : __base{(__lanes)(typename __stored<T>::type)(T(s))} {}
  template <class U> SIM_VEC explicit vec(const vec<U, N>& v) : __base{__converted(v)} {}
  template <class A, class B, class... R> SIM_VEC vec(A a, B b, R... rest) : __base{__gathered<T, N>(a, b, rest...)} {
    static_assert(__vec_traits<A>::size + __vec_traits<B>::size + (0 + ... + __vec_traits<R>::size) == N,
                  "wrong number of components for this vector");
  }
  SIM_VEC static vec __of(__lanes lanes) { return vec(__bits{}, lanes); }

  SIM_VEC T& operator[](long i) { return this->__element(i); }
  SIM_VEC T operator[](long i) const {
    if (__builtin_is_constant_evaluated()) return T(__data[i]);
    return (*(const T(*)[N])&__data)[i];
  }

#define SIM_OP(op)                                                                                                      \
  friend SIM_VEC vec operator op(vec a, vec b) { return __of(__number(a) op __number(b)); }                             \
  friend SIM_VEC vec& operator op##=(vec& a, vec b) { a.__data = __number(a) op __number(b); return a; }
  SIM_OP(+) SIM_OP(-) SIM_OP(*) SIM_OP(/) SIM_OP(%)
#undef SIM_OP
#define SIM_OP(op)                                                                                                      \
  friend SIM_VEC vec operator op(vec a, vec b) { return __of(a.__data op b.__data); }                                   \
  friend SIM_VEC vec& operator op##=(vec& a, vec b) { a.__data = a.__data op b.__data; return a; }
  SIM_OP(&) SIM_OP(|) SIM_OP(^)
#undef SIM_OP
// A shift counts with the low bits of its right side: 32-bit numbers, modulo 32.
#define SIM_OP(op)                                                                                                      \
  template <class U> friend SIM_VEC vec operator op(vec a, vec<U, N> b) { return __of(__number(a) op vec(b & U(sizeof(T) * 8 - 1)).__data); } \
  template <class U, class = enable_if_t<__is_integral(U)>> friend SIM_VEC vec operator op(vec a, U b) { return a op vec<U, N>(b); } \
  template <class U> friend SIM_VEC vec& operator op##=(vec& a, U b) { return a = a op b; }
  SIM_OP(<<) SIM_OP(>>)
#undef SIM_OP
#define SIM_OP(op)                                                                                                      \
  friend SIM_VEC __bools<N> operator op(vec a, vec b) { return __truth(a.__data op b.__data); }
  SIM_OP(==) SIM_OP(!=) SIM_OP(<) SIM_OP(>) SIM_OP(<=) SIM_OP(>=)
#undef SIM_OP
  friend SIM_VEC __bools<N> operator&&(vec a, vec b) { return __bools<N>(a) & __bools<N>(b); }
  friend SIM_VEC __bools<N> operator||(vec a, vec b) { return __bools<N>(a) | __bools<N>(b); }
  friend SIM_VEC __bools<N> operator!(vec a) { return __truth(a.__data == __lanes{}); }
  friend SIM_VEC vec operator-(vec a) { return __of(-__number(a)); }
  friend SIM_VEC vec operator+(vec a) { return a; }
  friend SIM_VEC vec operator~(vec a) { return __of(~__number(a)); }
  friend SIM_VEC vec& operator++(vec& a) { return a += T(1); }
  friend SIM_VEC vec& operator--(vec& a) { return a -= T(1); }
  friend SIM_VEC vec operator++(vec& a, int) { vec old = a; ++a; return old; }
  friend SIM_VEC vec operator--(vec& a, int) { vec old = a; --a; return old; }

 private:
  struct __bits {};
  SIM_VEC vec(__bits, __lanes lanes) : __base{lanes} {}
  SIM_VEC static __lanes __number(const vec& v) {
    static_assert(!is_same_v<T, bool>, "vectors of bools have no arithmetic");
    return v.__data;
  }
  template <class I> SIM_VEC static __bools<N> __truth(I lanes) {
    return __bools<N>::__of(__builtin_convertvector(lanes, typename __bools<N>::__lanes) & uchar(1));
  }
  template <class U> SIM_VEC static __lanes __converted(const vec<U, N>& v) {
    constexpr bool through_float = (is_same_v<T, half> && is_same_v<U, bfloat>) || (is_same_v<T, bfloat> && is_same_v<U, half>);
    if constexpr (is_same_v<T, bool>) return __builtin_convertvector(v.__data != typename vec<U, N>::__lanes{}, __lanes) & uchar(1);
    else if constexpr (through_float) return vec(vec<float, N>(v)).__data;
    else if constexpr (__is_integral(T) && !__is_integral(U)) {  // one by one: the compiler watches scalars alone
      __lanes r{};
      for (int i = 0; i < N; ++i) r[i] = T(v.__data[i]);
      return r;
    }
    else return __builtin_convertvector(v.__data, __lanes);
  }
};

// Values in the simulator's own memory, where a class cannot be read or written by its own functions.
template <class T> SIM_FN T __load_hidden(const SIM_HIDDEN void* from) {
  if constexpr (__is_vec<T>) return T::__of(*(const SIM_HIDDEN typename T::__lanes*)from);
  else if constexpr (is_same_v<T, bfloat>) return bfloat(*(const SIM_HIDDEN __bf16*)from);
  else if constexpr (is_arithmetic_v<T>) return *(const SIM_HIDDEN T*)from;
  else {
    T value;
    for (size_t i = 0; i < sizeof(T); ++i) ((uchar*)&value)[i] = ((const SIM_HIDDEN uchar*)from)[i];
    return value;
  }
}
template <class T> SIM_FN void __store_hidden(SIM_HIDDEN void* to, const T& value) {
  if constexpr (__is_vec<T>) *(SIM_HIDDEN typename T::__lanes*)to = value.__data;
  else if constexpr (is_same_v<T, bfloat>) *(SIM_HIDDEN __bf16*)to = value.__value;
  else if constexpr (is_arithmetic_v<T>) *(SIM_HIDDEN T*)to = value;
  else for (size_t i = 0; i < sizeof(T); ++i) ((SIM_HIDDEN uchar*)to)[i] = ((const uchar*)&value)[i];
}
}  // namespace metal
