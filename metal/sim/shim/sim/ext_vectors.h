// Vectors as clang's extended vectors, for the static passes only: an address space or the strict bfloat cannot be told of a class
// whose functions would need a version for every space. What they compute is never run.
#pragma once
#include "sim/types.h"

namespace metal {
template <class T, int N>
using vec = T __attribute__((ext_vector_type(N)));

template <class T> struct __vec_traits { static constexpr bool is_vec = false; static constexpr int size = 1; using scalar = T; };
template <class T, int N> struct __vec_traits<T __attribute__((ext_vector_type(N)))> {
  static constexpr bool is_vec = true;
  static constexpr int size = N;
  using scalar = T;
};
template <class T> constexpr bool __is_vec = __vec_traits<__remove_cv(T)>::is_vec;
template <class> constexpr bool __has_lanes = false;
template <class T> struct vec_element : bool_constant<__is_vec<T>> { using type = typename __vec_traits<T>::scalar; };

// ---- construction: float4(a, b.xy, c), float4(int4), float4(1) ----------------------------------

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
  return __convert<To>(a);
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

}  // namespace metal

#define SIM_VECTORS(T)                                                                            \
  typedef metal::vec<T, 2> T##2; typedef metal::vec<T, 3> T##3; typedef metal::vec<T, 4> T##4;    \
  namespace metal { using ::T##2; using ::T##3; using ::T##4; }
SIM_VECTORS(char) SIM_VECTORS(uchar) SIM_VECTORS(short) SIM_VECTORS(ushort) SIM_VECTORS(int) SIM_VECTORS(uint)
SIM_VECTORS(long) SIM_VECTORS(ulong) SIM_VECTORS(half) SIM_VECTORS(float)
#ifndef SIM_STRICT_BFLOAT
SIM_VECTORS(bfloat)
#endif
#undef SIM_VECTORS

// ---- packed vectors: where they lie is all that matters here ---------------------------------------
namespace metal { template <class T, int N> using packed_vec = vec<T, N>; }
#define SIM_PACKED(T)                                                            \
  typedef metal::packed_vec<T, 2> packed_##T##2; typedef metal::packed_vec<T, 3> packed_##T##3; \
  typedef metal::packed_vec<T, 4> packed_##T##4;                                   \
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

namespace metal {
template <class T> SIM_FN T __load_hidden(const SIM_HIDDEN void* from) { return __builtin_bit_cast(T, *(const SIM_HIDDEN T*)from); }
template <class T> SIM_FN void __store_hidden(SIM_HIDDEN void*, T) {}
}  // namespace metal

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
#define static_cast metal::__static_cast
