// metal::array, uniform values, function constants, assertions and logs (MSL 2.12, 2.13, 6.20).
#pragma once
#include "legal/vectors.h"

namespace metal {
template <class T, size_t N> struct array {
  T __elements[N];
  thread T& operator[](size_t)&; const thread T& operator[](size_t) const&; T operator[](size_t) const&&;
  device T& operator[](size_t) device&; const device T& operator[](size_t) const device&;
  threadgroup T& operator[](size_t) threadgroup&; const threadgroup T& operator[](size_t) const threadgroup&;
  const constant T& operator[](size_t) const constant&;
  static constexpr size_t size() { return N; }
};
template <class T> struct uniform {
  uniform() = default;
  constexpr uniform(T) {}
  operator T() const; operator T() const constant;
};
template <class T> uniform<T> make_uniform(T v) { return uniform<T>(v); }
#define LEGAL_UNIFORM(op)                                              \
  template <class T> uniform<T> operator op(uniform<T>, uniform<T>);   \
  template <class T, class U, class = enable_if_t<is_arithmetic<U>::value>> uniform<T> operator op(uniform<T>, U); \
  template <class T, class U, class = enable_if_t<is_arithmetic<U>::value>> uniform<T> operator op(U, uniform<T>);
LEGAL_UNIFORM(+) LEGAL_UNIFORM(-) LEGAL_UNIFORM(*) LEGAL_UNIFORM(/) LEGAL_UNIFORM(%)
#undef LEGAL_UNIFORM
template <class T, class... R> constexpr bool is_function_constant_defined(T) { return true; }
#ifdef LEGAL_METAL4
struct os_log {
  constexpr os_log(const constant char*, const constant char*) constant {}
  template <class... A> void log(const constant char*, A...) const constant;
  template <class... A> void log_debug(const constant char*, A...) const constant;
  template <class... A> void log_info(const constant char*, A...) const constant;
  template <class... A> void log_error(const constant char*, A...) const constant;
  template <class... A> void log_fault(const constant char*, A...) const constant;
};
#endif
}  // namespace metal
#define assert(condition) ((void)(condition))
