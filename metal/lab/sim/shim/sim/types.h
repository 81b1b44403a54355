// The scalar types of the Metal language and the traits of types; then its vectors.
#pragma once

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
typedef unsigned long size_t;
typedef long ptrdiff_t;
typedef long intptr_t;
typedef ulong uintptr_t;
typedef _Float16 half;
#include "sim/bfloat.h"
static_assert(sizeof(long) == 8 && sizeof(void*) == 8, "Metal has a 64-bit long");

// Memory of the simulator itself: an address space that the access hooks do not see.
#define SIM_HIDDEN __attribute__((address_space(1)))
#define METAL_FUNC inline __attribute__((always_inline))
// The library itself has no lines: what is inlined stands in the line of kernel text that calls it.
#define SIM_FN inline __attribute__((always_inline, nodebug))

namespace metal {
using ::int8_t; using ::int16_t; using ::int32_t; using ::int64_t;
using ::uint8_t; using ::uint16_t; using ::uint32_t; using ::uint64_t;
using ::size_t; using ::ptrdiff_t;

// ---- traits -------------------------------------------------------------------------------------
template <class T, T v> struct integral_constant {
  static constexpr T value = v;
  using value_type = T;
  using type = integral_constant;
  constexpr operator T() const { return v; }
  constexpr T operator()() const { return v; }
};
template <bool b> using bool_constant = integral_constant<bool, b>;
using true_type = bool_constant<true>;
using false_type = bool_constant<false>;
template <bool b, class T = void> struct enable_if {};
template <class T> struct enable_if<true, T> { using type = T; };
template <bool b, class T = void> using enable_if_t = typename enable_if<b, T>::type;
template <bool b, class T, class F> struct conditional { using type = T; };
template <class T, class F> struct conditional<false, T, F> { using type = F; };
template <bool b, class T, class F> using conditional_t = typename conditional<b, T, F>::type;
template <class A, class B> struct is_same : false_type {};
template <class A> struct is_same<A, A> : true_type {};
template <class A, class B> constexpr bool is_same_v = is_same<A, B>::value;
template <class T> struct remove_reference { using type = __remove_reference_t(T); };
template <class T> using remove_reference_t = __remove_reference_t(T);
template <class T> struct remove_cv { using type = __remove_cv(T); };
template <class T> using remove_cv_t = __remove_cv(T);
template <class T> using remove_cvref_t = __remove_cvref(T);
template <class T> struct remove_pointer { using type = __remove_pointer(T); };
template <class T> using remove_pointer_t = __remove_pointer(T);
template <class A, class B> struct is_convertible : bool_constant<__is_convertible(A, B)> {};
template <class A, class B> constexpr bool is_convertible_v = __is_convertible(A, B);
template <class A, class B> struct is_base_of : bool_constant<__is_base_of(A, B)> {};
template <class A, class B> constexpr bool is_base_of_v = __is_base_of(A, B);
template <class T> using remove_addrspace_t = T;
template <class T> __add_rvalue_reference(T) declval();

template <class T> struct is_floating_point
    : bool_constant<is_same_v<__remove_cv(T), float> || is_same_v<__remove_cv(T), half> ||
                    is_same_v<__remove_cv(T), bfloat>> {};
template <class T> constexpr bool is_floating_point_v = is_floating_point<T>::value;
template <class T> struct is_integral : bool_constant<__is_integral(T)> {};
template <class T> constexpr bool is_integral_v = __is_integral(T);
template <class T> struct is_arithmetic : bool_constant<is_integral_v<T> || is_floating_point_v<T>> {};
template <class T> constexpr bool is_arithmetic_v = is_arithmetic<T>::value;
template <class T> struct is_unsigned : bool_constant<__is_unsigned(T)> {};
template <class T> constexpr bool is_unsigned_v = __is_unsigned(T);
template <class T> struct is_signed : bool_constant<is_arithmetic_v<T> && !__is_unsigned(T)> {};
template <class T> constexpr bool is_signed_v = is_signed<T>::value;
template <class T> struct is_pointer : bool_constant<__is_pointer(T)> {};
template <class T> constexpr bool is_pointer_v = __is_pointer(T);
template <class T> struct is_enum : bool_constant<__is_enum(T)> {};
template <class T> constexpr bool is_enum_v = __is_enum(T);
template <class T> struct is_trivially_copyable : bool_constant<__is_trivially_copyable(T)> {};
template <class...> struct conjunction : true_type {};
template <class A, class... R> struct conjunction<A, R...> : bool_constant<A::value && conjunction<R...>::value> {};
template <class... A> constexpr bool conjunction_v = conjunction<A...>::value;
template <class...> struct disjunction : false_type {};
template <class A, class... R> struct disjunction<A, R...> : bool_constant<A::value || disjunction<R...>::value> {};
template <class... A> constexpr bool disjunction_v = disjunction<A...>::value;
template <class A> struct negation : bool_constant<!A::value> {};
template <class T> struct make_unsigned { using type = __make_unsigned(T); };
template <class T> using make_unsigned_t = __make_unsigned(T);
template <class T> struct make_signed { using type = __make_signed(T); };
template <class T> using make_signed_t = __make_signed(T);
template <class... A> using _conjunction = conjunction<A...>;
template <class... A> using _disjunction = disjunction<A...>;
template <class A> using _negation = negation<A>;
template <class A> constexpr bool negation_v = !A::value;
template <class...> using void_t = void;
template <class T> struct type_identity { using type = T; };
template <class T> using decay_t = __decay(T);
template <class T> struct decay { using type = __decay(T); };
template <class T, class U> struct is_constructible : bool_constant<__is_constructible(T, U)> {};
#define SIM_TRAITS(X)                                                                                                   \
  X(is_void) X(is_const) X(is_volatile) X(is_class) X(is_union) X(is_array) X(is_reference) X(is_lvalue_reference)      \
  X(is_rvalue_reference) X(is_function) X(is_scalar) X(is_fundamental) X(is_empty) X(is_trivial) X(is_standard_layout)
#define SIM_TRAIT(name)                                              \
  template <class T> struct name : bool_constant<__##name(T)> {};    \
  template <class T> constexpr bool name##_v = __##name(T);
SIM_TRAITS(SIM_TRAIT)
#undef SIM_TRAIT
#undef SIM_TRAITS
template <class T> using add_const_t = const T;
template <class T> struct remove_const { using type = __remove_const(T); };
template <class T> using remove_const_t = __remove_const(T);
template <class T> struct remove_extent { using type = __remove_extent(T); };
template <class T> using remove_extent_t = __remove_extent(T);
template <class T> using underlying_type_t = __underlying_type(T);
template <class A, class B> using common_type_t = decltype(true ? declval<A>() : declval<B>());

template <class T> SIM_FN void __copy_into(T& to, const T& from) { to = from; }
template <class T, size_t N> SIM_FN void __copy_into(T (&to)[N], const T (&from)[N]) { for (size_t i = 0; i < N; ++i) __copy_into(to[i], from[i]); }
using ::uchar; using ::ushort; using ::uint; using ::ulong; using ::half; using ::bfloat;
}  // namespace metal

#include "sim/vectors.h"
#define SIM_VECTORS(T)                                                                         \
  typedef metal::vec<T, 2> T##2; typedef metal::vec<T, 3> T##3; typedef metal::vec<T, 4> T##4; \
  namespace metal { using ::T##2; using ::T##3; using ::T##4; }
SIM_VECTORS(bool) SIM_VECTORS(char) SIM_VECTORS(uchar) SIM_VECTORS(short) SIM_VECTORS(ushort) SIM_VECTORS(int)
SIM_VECTORS(uint) SIM_VECTORS(long) SIM_VECTORS(ulong) SIM_VECTORS(half) SIM_VECTORS(bfloat) SIM_VECTORS(float)
#undef SIM_VECTORS

template <class To, class From> SIM_FN constexpr To as_type(From from) {
  static_assert(sizeof(To) == sizeof(From), "as_type needs types of the same size");
  if constexpr (metal::__has_lanes<From>) return as_type<To>(from.__whole());
  else if constexpr (metal::__has_lanes<To>) return To::__of(__builtin_bit_cast(typename To::__lanes, from));
  else return __builtin_bit_cast(To, from);
}
namespace metal { using ::as_type; }
