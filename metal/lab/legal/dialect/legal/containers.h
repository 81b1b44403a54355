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
#define LEGAL_READ(space)                                                                           \
  const space T& front() const space; const space T& back() const space; const space T* data() const space; \
  const space T* begin() const space; const space T* end() const space;
#define LEGAL_WRITE(space)                                                                          \
  space T& front() space; space T& back() space; space T* data() space;                             \
  space T* begin() space; space T* end() space; void fill(T) space;
  LEGAL_READ(thread) LEGAL_READ(device) LEGAL_READ(threadgroup) LEGAL_READ(constant)
  LEGAL_WRITE(thread) LEGAL_WRITE(device) LEGAL_WRITE(threadgroup)
#undef LEGAL_READ
#undef LEGAL_WRITE
  static constexpr size_t size() { return N; }
  static constexpr size_t max_size() { return N; }
  static constexpr bool empty() { return N == 0; }
};
// Arithmetic of two uniform values is uniform; with anything else it is not.
template <class T> struct uniform {
  T __value;
  uniform() = default;
  constexpr uniform(T v) : __value(v) {}
  constexpr operator T() const { return __value; }
  constexpr operator T() const constant { return __value; }
};
template <class T> constexpr uniform<T> make_uniform(T v) { return uniform<T>(v); }
template <class T> struct is_uniform : false_type {};
template <class T> struct is_uniform<uniform<T>> : true_type {};
#define LEGAL_UNIFORM(op)                                                                                             \
  template <class T, class U> constexpr auto operator op(uniform<T> a, uniform<U> b) {                                \
    return make_uniform(a.__value op b.__value); }                                                                    \
  template <class T, class U, class = enable_if_t<is_arithmetic<U>::value>> constexpr auto operator op(uniform<T> a, U b) { \
    return a.__value op b; }                                                                                          \
  template <class T, class U, class = enable_if_t<is_arithmetic<U>::value>> constexpr auto operator op(U a, uniform<T> b) { \
    return a op b.__value; }
LEGAL_UNIFORM(+) LEGAL_UNIFORM(-) LEGAL_UNIFORM(*) LEGAL_UNIFORM(/) LEGAL_UNIFORM(%)
LEGAL_UNIFORM(&) LEGAL_UNIFORM(|) LEGAL_UNIFORM(^) LEGAL_UNIFORM(<<) LEGAL_UNIFORM(>>)
LEGAL_UNIFORM(==) LEGAL_UNIFORM(!=) LEGAL_UNIFORM(<) LEGAL_UNIFORM(>) LEGAL_UNIFORM(<=) LEGAL_UNIFORM(>=)
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
