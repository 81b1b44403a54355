// metal::array and metal::uniform.
#pragma once
#include "sim/types.h"

namespace metal {
template <class T, size_t N> struct array {
  T __elements[N];
  SIM_FN constexpr T& operator[](size_t i) { return __elements[i]; }
  SIM_FN constexpr const T& operator[](size_t i) const { return __elements[i]; }
  SIM_FN constexpr T& front() { return __elements[0]; }
  SIM_FN constexpr const T& front() const { return __elements[0]; }
  SIM_FN constexpr T& back() { return __elements[N - 1]; }
  SIM_FN constexpr const T& back() const { return __elements[N - 1]; }
  SIM_FN constexpr T* data() { return __elements; }
  SIM_FN constexpr const T* data() const { return __elements; }
  SIM_FN constexpr T* begin() { return __elements; }
  SIM_FN constexpr const T* begin() const { return __elements; }
  SIM_FN constexpr T* end() { return __elements + N; }
  SIM_FN constexpr const T* end() const { return __elements + N; }
  SIM_FN constexpr void fill(const T& value) { for (size_t i = 0; i < N; ++i) __elements[i] = value; }
  static constexpr size_t size() { return N; }
  static constexpr size_t max_size() { return N; }
  static constexpr bool empty() { return N == 0; }
};

// A value that all threads promise to share; arithmetic of two is one, with anything else it is not. That they do share it is not checked.
template <class T> struct uniform {
  T __value;
  uniform() = default;
  SIM_FN constexpr uniform(T v) : __value(v) {}
  SIM_FN constexpr operator T() const { return __value; }
#define SIM_OP(op)                                                                                                       \
  template <class U> friend SIM_FN constexpr auto operator op(uniform a, uniform<U> b) {                                 \
    return uniform<decltype(a.__value op b.__value)>(a.__value op b.__value); }                                          \
  template <class S, class = enable_if_t<is_arithmetic_v<S>>> friend SIM_FN constexpr auto operator op(uniform a, S b) { return a.__value op b; } \
  template <class S, class = enable_if_t<is_arithmetic_v<S>>> friend SIM_FN constexpr auto operator op(S a, uniform b) { return a op b.__value; }
  SIM_OP(+) SIM_OP(-) SIM_OP(*) SIM_OP(/) SIM_OP(%) SIM_OP(&) SIM_OP(|) SIM_OP(^) SIM_OP(<<) SIM_OP(>>)
  SIM_OP(==) SIM_OP(!=) SIM_OP(<) SIM_OP(>) SIM_OP(<=) SIM_OP(>=)
#undef SIM_OP
};
template <class T> SIM_FN constexpr uniform<T> make_uniform(T v) { return uniform<T>(v); }
template <class T> struct is_uniform : false_type {};
template <class T> struct is_uniform<uniform<T>> : true_type {};
}  // namespace metal
