// Scalar and vector types of the Metal language, on clang's extended vectors.
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
#ifdef SIM_STRICT_BFLOAT
#include "sim/strict_bfloat.h"
#else
typedef __bf16 bfloat;
#endif
static_assert(sizeof(long) == 8 && sizeof(void*) == 8, "Metal has a 64-bit long");

// Memory of the simulator itself: an address space that the access hooks do not see.
#define SIM_HIDDEN __attribute__((address_space(1)))
#define METAL_FUNC inline __attribute__((always_inline))
#define SIM_FN inline __attribute__((always_inline))

namespace metal {
using ::int8_t; using ::int16_t; using ::int32_t; using ::int64_t;
using ::uint8_t; using ::uint16_t; using ::uint32_t; using ::uint64_t;
using ::size_t; using ::ptrdiff_t;

template <class T, int N>
using vec = T __attribute__((ext_vector_type(N)));

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

template <class T> struct __vec_traits { static constexpr bool is_vec = false; static constexpr int size = 1; using scalar = T; };
template <class T, int N> struct __vec_traits<T __attribute__((ext_vector_type(N)))> {
  static constexpr bool is_vec = true;
  static constexpr int size = N;
  using scalar = T;
};
template <class T> constexpr bool __is_vec = __vec_traits<__remove_cv(T)>::is_vec;
template <class T> struct vec_element : bool_constant<__is_vec<T>> { using type = typename __vec_traits<T>::scalar; };

// ---- construction: float4(a, b.xy, c), float4(int4), float4(1) ----------------------------------
template <class T> struct __packed_traits { static constexpr int size = 0; };

template <class To, class From> SIM_FN constexpr To __convert(From from) {
  if constexpr (is_same_v<To, From>) return from;
  else if constexpr (__is_vec<To> && __is_vec<From>) return __builtin_convertvector(from, To);
  else if constexpr (__is_vec<To>) return To(typename __vec_traits<To>::scalar(from));
  else return To(from);
}

template <class V, int at> SIM_FN constexpr void __fill(V&) {}
template <class V, int at, class A, class... R> SIM_FN constexpr void __fill(V& v, A a, R... rest) {
  using S = typename __vec_traits<V>::scalar;
  if constexpr (__is_vec<A>) {
    constexpr int n = __vec_traits<A>::size;
    static_assert(at + n <= __vec_traits<V>::size, "too many components for this vector");
    for (int i = 0; i < n; ++i) v[at + i] = S(a[i]);
    __fill<V, at + n>(v, rest...);
  } else {
    static_assert(at + 1 <= __vec_traits<V>::size, "too many components for this vector");
    v[at] = S(a);
    __fill<V, at + 1>(v, rest...);
  }
}
template <class... A> constexpr int __count = (0 + ... + __vec_traits<A>::size);

template <class To> SIM_FN constexpr To __make() { return To{}; }
template <class To, class A> SIM_FN constexpr To __make(A a) {
  if constexpr (__packed_traits<A>::size > 0) return __convert<To>(a.unpacked());
  else return __convert<To>(a);
}
template <class To, class A, class B, class... R> SIM_FN constexpr To __make(A a, B b, R... rest) {
  if constexpr (__is_vec<To>) {
    static_assert(__count<A, B, R...> == __vec_traits<To>::size, "wrong number of components for this vector");
    To v = {};
    __fill<To, 0>(v, a, b, rest...);
    return v;
  } else {
    return To(a, b, rest...);
  }
}

// (float4)x, for which clang would reinterpret bits where Metal converts values.
template <class To> struct __c_cast {
  template <class A> friend SIM_FN constexpr To operator->*(__c_cast, A a) { return __make<To>(a); }
};
// half and bfloat convert into each other when asked; clang wants a float in between.
template <class To, class From> constexpr bool __through_float =
    (is_same_v<To, half> && is_same_v<From, bfloat>) || (is_same_v<To, bfloat> && is_same_v<From, half>);
template <class To> SIM_FN constexpr To __scalar() { return To(0); }
template <class To, class From> SIM_FN constexpr To __scalar(From from) {
  if constexpr (__through_float<To, From>) return To(float(from));
  else return To(from);
}
template <class To, class A> SIM_FN constexpr To __static_cast(A&& a) {
  if constexpr (__through_float<To, remove_cvref_t<A>>) return To(float(a));
  else if constexpr (__is_vec<remove_cvref_t<To>>) return __make<remove_cvref_t<To>>(remove_cvref_t<A>(a));
  else return static_cast<To>(static_cast<A&&>(a));
}

template <class To, class From> SIM_FN constexpr To __as_type(From from) {
  static_assert(sizeof(To) == sizeof(From), "as_type needs types of the same size");
  return __builtin_bit_cast(To, from);
}
}  // namespace metal
template <class To, class From> SIM_FN constexpr To as_type(From from) { return metal::__as_type<To>(from); }
namespace metal { using ::as_type; }
constexpr half operator"" h(long double v) { return half(v); }
constexpr bfloat operator"" bf(long double v) { return bfloat(float(v)); }

#define SIM_VECTORS(T)                                                                            \
  typedef metal::vec<T, 2> T##2; typedef metal::vec<T, 3> T##3; typedef metal::vec<T, 4> T##4;    \
  namespace metal { using ::T##2; using ::T##3; using ::T##4; }
SIM_VECTORS(char) SIM_VECTORS(uchar) SIM_VECTORS(short) SIM_VECTORS(ushort) SIM_VECTORS(int) SIM_VECTORS(uint)
SIM_VECTORS(long) SIM_VECTORS(ulong) SIM_VECTORS(half) SIM_VECTORS(float)
#ifndef SIM_STRICT_BFLOAT
SIM_VECTORS(bfloat)
#endif
#undef SIM_VECTORS
namespace metal { using ::uchar; using ::ushort; using ::uint; using ::ulong; using ::half; using ::bfloat; }

// ---- packed vectors: the size and alignment of their elements -----------------------------------
namespace metal {
template <class T, int N> struct __packed {
  T data[N];
  constexpr __packed() = default;
  SIM_FN constexpr __packed(vec<T, N> v) { for (int i = 0; i < N; ++i) data[i] = v[i]; }
  template <class... A, class = enable_if_t<(sizeof...(A) == N && N > 1)>>
  SIM_FN constexpr __packed(A... a) : data{T(a)...} {}
  SIM_FN constexpr vec<T, N> unpacked() const { vec<T, N> v = {}; for (int i = 0; i < N; ++i) v[i] = data[i]; return v; }
  SIM_FN constexpr operator vec<T, N>() const { return unpacked(); }
  SIM_FN constexpr T& operator[](int i) { return data[i]; }
  SIM_FN constexpr const T& operator[](int i) const { return data[i]; }
  __declspec(property(get = get_x, put = put_x)) T x;
  __declspec(property(get = get_y, put = put_y)) T y;
  __declspec(property(get = get_z, put = put_z)) T z;
  __declspec(property(get = get_w, put = put_w)) T w;
  SIM_FN T get_x() const { return data[0]; }
  SIM_FN T get_y() const { return data[1]; }
  SIM_FN T get_z() const { return data[2]; }
  SIM_FN T get_w() const { return data[3]; }
  SIM_FN void put_x(T v) { data[0] = v; }
  SIM_FN void put_y(T v) { data[1] = v; }
  SIM_FN void put_z(T v) { data[2] = v; }
  SIM_FN void put_w(T v) { data[3] = v; }
};
template <class T, int N> struct __packed_traits<__packed<T, N>> { static constexpr int size = N; };
#define SIM_PACKED_OP(op)                                                                                          \
  template <class T, int N> SIM_FN vec<T, N> operator op(__packed<T, N> a, __packed<T, N> b) { return a.unpacked() op b.unpacked(); } \
  template <class T, int N> SIM_FN vec<T, N> operator op(__packed<T, N> a, vec<T, N> b) { return a.unpacked() op b; } \
  template <class T, int N> SIM_FN vec<T, N> operator op(vec<T, N> a, __packed<T, N> b) { return a op b.unpacked(); } \
  template <class T, int N> SIM_FN vec<T, N> operator op(__packed<T, N> a, T b) { return a.unpacked() op b; }       \
  template <class T, int N> SIM_FN vec<T, N> operator op(T a, __packed<T, N> b) { return a op b.unpacked(); }
SIM_PACKED_OP(+) SIM_PACKED_OP(-) SIM_PACKED_OP(*) SIM_PACKED_OP(/)
#undef SIM_PACKED_OP
template <class T, int N> using packed_vec = __packed<T, N>;
}  // namespace metal
#define SIM_PACKED(T)                                                            \
  typedef metal::__packed<T, 2> packed_##T##2; typedef metal::__packed<T, 3> packed_##T##3; \
  typedef metal::__packed<T, 4> packed_##T##4;                                   \
  namespace metal { using ::packed_##T##2; using ::packed_##T##3; using ::packed_##T##4; }
SIM_PACKED(char) SIM_PACKED(uchar) SIM_PACKED(short) SIM_PACKED(ushort) SIM_PACKED(int) SIM_PACKED(uint)
SIM_PACKED(half) SIM_PACKED(float) SIM_PACKED(long)
#ifndef SIM_STRICT_BFLOAT
SIM_PACKED(bfloat)
#endif
#undef SIM_PACKED

// ---- bool2/3/4: one byte each, made from any comparison of vectors --------------------------------
namespace metal {
template <int N> struct __bools {
  bool data[N == 3 ? 4 : N];
  constexpr __bools() = default;
  SIM_FN constexpr __bools(bool b) { for (int i = 0; i < N; ++i) data[i] = b; }
  template <class I> SIM_FN constexpr __bools(I __attribute__((ext_vector_type(N))) v) { for (int i = 0; i < N; ++i) data[i] = v[i] != 0; }
  template <class... A, class = enable_if_t<(sizeof...(A) == N)>>
  SIM_FN constexpr __bools(A... a) : data{bool(a)...} {}
  SIM_FN constexpr bool& operator[](int i) { return data[i]; }
  SIM_FN constexpr bool operator[](int i) const { return data[i]; }
#define SIM_BOOL_OP(op)                                                                \
  friend SIM_FN constexpr __bools operator op(__bools a, __bools b) {                  \
    __bools r{}; for (int i = 0; i < N; ++i) r.data[i] = a.data[i] op b.data[i]; return r; }
  SIM_BOOL_OP(&&) SIM_BOOL_OP(||) SIM_BOOL_OP(&) SIM_BOOL_OP(|) SIM_BOOL_OP(^) SIM_BOOL_OP(==) SIM_BOOL_OP(!=)
#undef SIM_BOOL_OP
  friend SIM_FN constexpr __bools operator!(__bools a) { __bools r{}; for (int i = 0; i < N; ++i) r.data[i] = !a.data[i]; return r; }
};
}  // namespace metal
namespace metal {
template <class T, int N> struct __vec_choice { using type = vec<T, N>; };
template <int N> struct __vec_choice<bool, N> { using type = __bools<N>; };
template <class T, int N> using __vec_for = typename __vec_choice<T, N>::type;
}  // namespace metal
typedef metal::__bools<2> bool2; typedef metal::__bools<3> bool3; typedef metal::__bools<4> bool4;
namespace metal { using ::bool2; using ::bool3; using ::bool4; }

#define half(...) metal::__scalar<half>(__VA_ARGS__)
#define bfloat(...) metal::__scalar<bfloat>(__VA_ARGS__)
#define char2(...) metal::__make<char2>(__VA_ARGS__)
#define char3(...) metal::__make<char3>(__VA_ARGS__)
#define char4(...) metal::__make<char4>(__VA_ARGS__)
#define uchar2(...) metal::__make<uchar2>(__VA_ARGS__)
#define uchar3(...) metal::__make<uchar3>(__VA_ARGS__)
#define uchar4(...) metal::__make<uchar4>(__VA_ARGS__)
#define short2(...) metal::__make<short2>(__VA_ARGS__)
#define short3(...) metal::__make<short3>(__VA_ARGS__)
#define short4(...) metal::__make<short4>(__VA_ARGS__)
#define ushort2(...) metal::__make<ushort2>(__VA_ARGS__)
#define ushort3(...) metal::__make<ushort3>(__VA_ARGS__)
#define ushort4(...) metal::__make<ushort4>(__VA_ARGS__)
#define int2(...) metal::__make<int2>(__VA_ARGS__)
#define int3(...) metal::__make<int3>(__VA_ARGS__)
#define int4(...) metal::__make<int4>(__VA_ARGS__)
#define uint2(...) metal::__make<uint2>(__VA_ARGS__)
#define uint3(...) metal::__make<uint3>(__VA_ARGS__)
#define uint4(...) metal::__make<uint4>(__VA_ARGS__)
#define long2(...) metal::__make<long2>(__VA_ARGS__)
#define long3(...) metal::__make<long3>(__VA_ARGS__)
#define long4(...) metal::__make<long4>(__VA_ARGS__)
#define ulong2(...) metal::__make<ulong2>(__VA_ARGS__)
#define ulong3(...) metal::__make<ulong3>(__VA_ARGS__)
#define ulong4(...) metal::__make<ulong4>(__VA_ARGS__)
#define half2(...) metal::__make<half2>(__VA_ARGS__)
#define half3(...) metal::__make<half3>(__VA_ARGS__)
#define half4(...) metal::__make<half4>(__VA_ARGS__)
#define bfloat2(...) metal::__make<bfloat2>(__VA_ARGS__)
#define bfloat3(...) metal::__make<bfloat3>(__VA_ARGS__)
#define bfloat4(...) metal::__make<bfloat4>(__VA_ARGS__)
#define float2(...) metal::__make<float2>(__VA_ARGS__)
#define float3(...) metal::__make<float3>(__VA_ARGS__)
#define float4(...) metal::__make<float4>(__VA_ARGS__)
