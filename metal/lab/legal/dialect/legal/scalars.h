// Scalar types, their traits and their limits (MSL 2.1, 6.3).
#pragma once
#include "legal/keywords.h"

typedef unsigned char uchar;
typedef unsigned short ushort;
typedef unsigned int uint;
typedef unsigned long ulong;
typedef signed char int8_t;
typedef short int16_t;
typedef int int32_t;
typedef long int64_t;
typedef uchar uint8_t;
typedef ushort uint16_t;
typedef uint uint32_t;
typedef ulong uint64_t;
typedef ulong size_t;
typedef long ptrdiff_t;
typedef long intptr_t;
typedef ulong uintptr_t;
typedef __bf16 bfloat;

namespace metal {
using ::uchar; using ::ushort; using ::uint; using ::ulong; using ::bfloat; using ::size_t; using ::ptrdiff_t;
using ::int8_t; using ::int16_t; using ::int32_t; using ::int64_t;
using ::uint8_t; using ::uint16_t; using ::uint32_t; using ::uint64_t;

template <class T, T v> struct integral_constant {
  static constexpr constant T value = v;
  typedef T value_type;
  typedef integral_constant type;
  constexpr operator T() const { return v; }
  constexpr T operator()() const { return v; }
  constexpr operator T() const constant { return v; }
};
template <bool b> using bool_constant = integral_constant<bool, b>;
using true_type = bool_constant<true>;
using false_type = bool_constant<false>;
template <bool b, class T = void> struct enable_if {};
template <class T> struct enable_if<true, T> { typedef T type; };
template <bool b, class T = void> using enable_if_t = typename enable_if<b, T>::type;
template <bool b, class T, class F> struct conditional { typedef T type; };
template <class T, class F> struct conditional<false, T, F> { typedef F type; };
template <bool b, class T, class F> using conditional_t = typename conditional<b, T, F>::type;
template <class A, class B> struct is_same : false_type {};
template <class A> struct is_same<A, A> : true_type {};
template <class A, class B> constexpr constant bool is_same_v = is_same<A, B>::value;

// A name of thread memory deduced from a variable says `__private`: the same type in Metal.
template <class T> struct remove_addrspace { typedef T type; };
template <class T> struct remove_addrspace<__private T> { typedef T type; };
template <class T> struct remove_addrspace<device T> { typedef T type; };
template <class T> struct remove_addrspace<threadgroup T> { typedef T type; };
template <class T> struct remove_addrspace<constant T> { typedef T type; };
template <class T> struct remove_addrspace<const device T> { typedef const T type; };
template <class T> struct remove_addrspace<const constant T> { typedef const T type; };
template <class T> struct remove_addrspace<const threadgroup T> { typedef const T type; };
template <class T> using remove_addrspace_t = typename remove_addrspace<T>::type;
template <class T> struct __not_private { typedef T type; };
template <class T> struct __not_private<__private T> { typedef T type; };
template <class T> struct remove_cv { typedef typename __not_private<__remove_cv(T)>::type type; };
template <class T> using remove_cv_t = typename remove_cv<T>::type;
template <class T> struct remove_const { typedef __remove_const(T) type; };
template <class T> using remove_const_t = __remove_const(T);
template <class T> struct remove_volatile { typedef __remove_volatile(T) type; };
template <class T> using remove_volatile_t = __remove_volatile(T);
template <class T> struct remove_reference { typedef __remove_reference_t(T) type; };
template <class T> using remove_reference_t = __remove_reference_t(T);
template <class T> using remove_cvref_t = remove_cv_t<__remove_reference_t(T)>;
template <class T> struct remove_pointer { typedef __remove_pointer(T) type; };
template <class T> using remove_pointer_t = __remove_pointer(T);
template <class T> struct add_const { typedef const T type; };
template <class T> using add_const_t = const T;
template <class T> struct decay { typedef remove_cv_t<__remove_reference_t(T)> type; };
template <class T> using decay_t = typename decay<T>::type;
template <class T> struct underlying_type { typedef __underlying_type(T) type; };
template <class T> using underlying_type_t = __underlying_type(T);
template <class T> __add_rvalue_reference(T) declval();
template <class T> constexpr __remove_reference_t(T)&& move(T&& t) { return static_cast<__remove_reference_t(T)&&>(t); }
template <class T> constexpr T&& forward(__remove_reference_t(T)& t) { return static_cast<T&&>(t); }

template <class T> constexpr constant bool __is_float =
    is_same<__remove_cv(T), float>::value || is_same<__remove_cv(T), half>::value || is_same<__remove_cv(T), bfloat>::value;
#define LEGAL_TRAIT(name, ...)                                   \
  template <class T> struct name : bool_constant<__VA_ARGS__> {}; \
  template <class T> constexpr constant bool name##_v = name<T>::value;
#define LEGAL_TRAIT2(name, ...)                                           \
  template <class A, class B> struct name : bool_constant<__VA_ARGS__> {}; \
  template <class A, class B> constexpr constant bool name##_v = name<A, B>::value;
LEGAL_TRAIT(is_floating_point, __is_float<T>)
LEGAL_TRAIT(is_integral, __is_integral(T))
LEGAL_TRAIT(is_arithmetic, __is_integral(T) || __is_float<T>)
LEGAL_TRAIT(is_scalar, __is_integral(T) || __is_float<T> || __is_pointer(T) || __is_enum(T))
LEGAL_TRAIT(is_signed, __is_float<T> || (__is_integral(T) && !__is_unsigned(T)))
LEGAL_TRAIT(is_unsigned, __is_unsigned(T))
LEGAL_TRAIT(is_pointer, __is_pointer(T))
LEGAL_TRAIT(is_reference, __is_reference(T))
LEGAL_TRAIT(is_enum, __is_enum(T))
LEGAL_TRAIT(is_class, __is_class(T))
LEGAL_TRAIT(is_union, __is_union(T))
LEGAL_TRAIT(is_array, __is_array(T))
LEGAL_TRAIT(is_const, __is_const(T))
LEGAL_TRAIT(is_void, __is_void(T))
LEGAL_TRAIT(is_function, __is_function(T))
LEGAL_TRAIT(is_trivial, __is_trivial(T))
LEGAL_TRAIT(is_trivially_copyable, __is_trivially_copyable(T))
LEGAL_TRAIT(is_standard_layout, __is_standard_layout(T))
LEGAL_TRAIT2(is_base_of, __is_base_of(A, B))
LEGAL_TRAIT2(is_convertible, __is_convertible(A, B) && !(is_same<B, bfloat>::value && (is_same<A, float>::value || is_same<A, half>::value)) &&
    !(is_same<A, bfloat>::value && is_same<B, half>::value))
#undef LEGAL_TRAIT
#undef LEGAL_TRAIT2
template <class T, class... A> struct is_constructible : bool_constant<__is_constructible(T, A...)> {};
template <class T, class... A> constexpr constant bool is_constructible_v = __is_constructible(T, A...);
template <class...> struct conjunction : true_type {};
template <class A, class... R> struct conjunction<A, R...> : conditional_t<A::value, conjunction<R...>, false_type> {};
template <class... A> constexpr constant bool conjunction_v = conjunction<A...>::value;
template <class...> struct disjunction : false_type {};
template <class A, class... R> struct disjunction<A, R...> : conditional_t<A::value, true_type, disjunction<R...>> {};
template <class... A> constexpr constant bool disjunction_v = disjunction<A...>::value;
template <class... A> using _disjunction = disjunction<A...>;
template <class... A> using _conjunction = conjunction<A...>;
template <class A> struct negation : bool_constant<!A::value> {};
template <class A> constexpr constant bool negation_v = !A::value;
template <class T> struct make_unsigned { typedef __make_unsigned(T) type; };
template <class T> using make_unsigned_t = __make_unsigned(T);
template <class T> struct make_signed { typedef __make_signed(T) type; };
template <class T> using make_signed_t = __make_signed(T);

// text.py writes calls of it where a member is returned.
template <class T> thread T& __thread_memory(__generic T&);
template <class T> thread T& __thread_memory(thread T&);
template <class T> thread T& __thread_memory(thread T&&);

template <class T> struct numeric_limits;
#define LEGAL_INTEGER(T, low, high)                                                                    \
  template <> struct numeric_limits<T> {                                                               \
    static constexpr constant bool is_specialized = true, is_signed = T(-1) < T(0), is_integer = true; \
    static constexpr constant bool has_infinity = false, has_quiet_NaN = false, is_exact = true;       \
    static constexpr constant int digits = sizeof(T) * 8 - (T(-1) < T(0)), radix = 2;                  \
    static constexpr T max() { return high; }                                                          \
    static constexpr T min() { return low; }                                                           \
    static constexpr T lowest() { return low; }                                                        \
  };
LEGAL_INTEGER(bool, false, true)
LEGAL_INTEGER(char, char(-128), char(127)) LEGAL_INTEGER(int8_t, int8_t(-128), int8_t(127)) LEGAL_INTEGER(uchar, 0, 255)
LEGAL_INTEGER(short, -32768, 32767) LEGAL_INTEGER(ushort, 0, 65535)
LEGAL_INTEGER(int, -2147483647 - 1, 2147483647) LEGAL_INTEGER(uint, 0, 4294967295u)
LEGAL_INTEGER(long, -9223372036854775807l - 1, 9223372036854775807l) LEGAL_INTEGER(ulong, 0, 18446744073709551615ul)
#undef LEGAL_INTEGER
#define LEGAL_FLOATING(T, DIGITS, EXP)                                                                  \
  template <> struct numeric_limits<T> {                                                               \
    static constexpr constant bool is_specialized = true, is_signed = true, is_integer = false;        \
    static constexpr constant bool has_infinity = true, has_quiet_NaN = true, is_exact = false;        \
    static constexpr constant int digits = DIGITS, radix = 2, max_exponent = EXP, min_exponent = 3 - EXP; \
    static constexpr T max() { return T(1); }                                                          \
    static constexpr T min() { return T(1); }                                                          \
    static constexpr T lowest() { return T(-1); }                                                      \
    static constexpr T epsilon() { return T(1); }                                                      \
    static constexpr T infinity() { return T(1); }                                                     \
    static constexpr T quiet_NaN() { return T(1); }                                                    \
    static constexpr T signaling_NaN() { return T(1); }                                                \
    static constexpr T denorm_min() { return T(1); }                                                   \
    static constexpr T round_error() { return T(1); }                                                  \
  };
LEGAL_FLOATING(float, 24, 128) LEGAL_FLOATING(half, 11, 16) LEGAL_FLOATING(bfloat, 8, 128)
#undef LEGAL_FLOATING
}  // namespace metal

using metal::__thread_memory;

#define INFINITY (__builtin_huge_valf())
#define NAN (__builtin_nanf(""))
#define HUGE_VALF (__builtin_huge_valf())
#define HUGE_VALH ((half)__builtin_huge_valf())
#define MAXFLOAT 3.402823466e+38f
#define MAXHALF 65504.0h
#define FLT_MAX 3.402823466e+38f
#define FLT_MIN 1.175494351e-38f
#define FLT_EPSILON 1.1920928955e-07f
#define FLT_DIG 6
#define FLT_MANT_DIG 24
#define FLT_MAX_EXP 128
#define FLT_MIN_EXP (-125)
#define FLT_RADIX 2
#define HALF_DIG 3
#define HALF_MANT_DIG 11
#define HALF_MAX_EXP 16
#define HALF_MIN_EXP (-13)
#define HALF_MAX 65504.0h
#define HALF_MIN 6.103515625e-05h
#define HALF_EPSILON 9.765625e-04h
#define CHAR_BIT 8
#define CHAR_MAX 127
#define CHAR_MIN (-128)
#define SCHAR_MAX 127
#define SCHAR_MIN (-128)
#define UCHAR_MAX 255
#define SHRT_MAX 32767
#define SHRT_MIN (-32768)
#define USHRT_MAX 65535
#define INT_MAX 2147483647
#define INT_MIN (-2147483647 - 1)
#define UINT_MAX 4294967295u
#define LONG_MAX 9223372036854775807l
#define LONG_MIN (-9223372036854775807l - 1)
#define ULONG_MAX 18446744073709551615ul
#define M_E_F 2.71828174591064453f
#define M_LOG2E_F 1.44269502162933350f
#define M_LOG10E_F 0.434294492006301880f
#define M_LN2_F 0.693147182464599609f
#define M_LN10_F 2.30258512496948242f
#define M_PI_F 3.14159274101257324f
#define M_PI_2_F 1.57079637050628662f
#define M_PI_4_F 0.785398185253143311f
#define M_1_PI_F 0.318309873342514038f
#define M_2_PI_F 0.636619746685028076f
#define M_2_SQRTPI_F 1.12837922573089600f
#define M_SQRT2_F 1.41421353816986084f
#define M_SQRT1_2_F 0.707106769084930420f
#define M_E_H 2.71828174591064453h
#define M_LOG10E_H 0.434294492006301880h
#define M_LN10_H 2.30258512496948242h
#define M_PI_H 3.14159274101257324h
#define M_PI_2_H 1.57079637050628662h
#define M_PI_4_H 0.785398185253143311h
#define M_1_PI_H 0.318309873342514038h
#define M_2_PI_H 0.636619746685028076h
#define M_2_SQRTPI_H 1.12837922573089600h
#define M_LN2_H 0.693147182464599609h
#define M_LOG2E_H 1.44269502162933350h
#define M_SQRT2_H 1.41421353816986084h
#define M_SQRT1_2_H 0.707106769084930420h
