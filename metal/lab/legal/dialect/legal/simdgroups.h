// Operations among the lanes of a simdgroup or a quad, barriers and simdgroup matrices (MSL 6.7 to 6.9).
// Data may be a scalar or vector of 8 to 32 bits: no bool, no 64-bit integer, no bfloat but what MLX adds.
#pragma once
#include "legal/functions.h"

namespace metal {
template <class T> constexpr constant bool __sent = is_same<T, char>::value || is_same<T, signed char>::value ||
    is_same<T, uchar>::value || is_same<T, short>::value || is_same<T, ushort>::value || is_same<T, int>::value ||
    is_same<T, uint>::value || is_same<T, half>::value || is_same<T, float>::value;
template <class T> using __data = enable_if_t<__sent<typename __shape<T>::scalar>, T>;
template <class T> using __bits = enable_if_t<__sent<typename __shape<T>::scalar> && __is_integral(typename __shape<T>::scalar), T>;
// Other scalars and vectors would find a bool's or long's way into another overload: they are refused by name.
template <class T> using __no_data = enable_if_t<(is_arithmetic<T>::value || __shape<T>::is_vec) && !__sent<typename __shape<T>::scalar>, T>;
#define LEGAL_REFUSED(name) \
  template <class T> __no_data<T> name(T) = delete; template <class T> __no_data<T> name(T, ushort) = delete;   \
  template <class T> __no_data<T> name(T, T, ushort) = delete; template <class T> __no_data<T> name(T, T, ushort, ushort) = delete;

#define LEGAL_GROUP(g)                                                                                                  \
  template <class T> __data<T> g##_sum(T); template <class T> __data<T> g##_product(T); template <class T> __data<T> g##_max(T); \
  template <class T> __data<T> g##_min(T); template <class T> __bits<T> g##_and(T); template <class T> __bits<T> g##_or(T);       \
  template <class T> __bits<T> g##_xor(T);                                                                              \
  template <class T> __data<T> g##_prefix_inclusive_sum(T); template <class T> __data<T> g##_prefix_exclusive_sum(T);   \
  template <class T> __data<T> g##_prefix_inclusive_product(T); template <class T> __data<T> g##_prefix_exclusive_product(T); \
  template <class T> __data<T> g##_broadcast(T, ushort); template <class T> __data<T> g##_broadcast_first(T);           \
  template <class T> __data<T> g##_shuffle(T, ushort); template <class T> __data<T> g##_shuffle_xor(T, ushort);         \
  template <class T> __data<T> g##_shuffle_up(T, ushort); template <class T> __data<T> g##_shuffle_down(T, ushort);     \
  template <class T> __data<T> g##_shuffle_rotate_up(T, ushort); template <class T> __data<T> g##_shuffle_rotate_down(T, ushort); \
  template <class T> __data<T> g##_shuffle_and_fill_up(T, T, ushort); template <class T> __data<T> g##_shuffle_and_fill_up(T, T, ushort, ushort); \
  template <class T> __data<T> g##_shuffle_and_fill_down(T, T, ushort); template <class T> __data<T> g##_shuffle_and_fill_down(T, T, ushort, ushort); \
  LEGAL_REFUSED(g##_sum) LEGAL_REFUSED(g##_product) LEGAL_REFUSED(g##_max) LEGAL_REFUSED(g##_min) LEGAL_REFUSED(g##_and)  \
  LEGAL_REFUSED(g##_or) LEGAL_REFUSED(g##_xor) LEGAL_REFUSED(g##_prefix_inclusive_sum) LEGAL_REFUSED(g##_prefix_exclusive_sum) \
  LEGAL_REFUSED(g##_prefix_inclusive_product) LEGAL_REFUSED(g##_prefix_exclusive_product) LEGAL_REFUSED(g##_broadcast)   \
  LEGAL_REFUSED(g##_broadcast_first) LEGAL_REFUSED(g##_shuffle) LEGAL_REFUSED(g##_shuffle_xor) LEGAL_REFUSED(g##_shuffle_up) \
  LEGAL_REFUSED(g##_shuffle_down) LEGAL_REFUSED(g##_shuffle_rotate_up) LEGAL_REFUSED(g##_shuffle_rotate_down)           \
  LEGAL_REFUSED(g##_shuffle_and_fill_up) LEGAL_REFUSED(g##_shuffle_and_fill_down)                                       \
  bool g##_any(bool); bool g##_all(bool); bool g##_is_first(); bool g##_is_helper_thread();
LEGAL_GROUP(simd) LEGAL_GROUP(quad)
#undef LEGAL_GROUP
#undef LEGAL_REFUSED

struct simd_vote {
  typedef ulong vote_t;
  constexpr explicit simd_vote(vote_t = 0) {}
  explicit operator vote_t() const;
  bool any() const; bool all() const;
};
struct quad_vote {
  typedef uint vote_t;
  constexpr explicit quad_vote(vote_t = 0) {}
  explicit operator vote_t() const;
  bool any() const; bool all() const;
};
simd_vote simd_ballot(bool); simd_vote simd_active_threads_mask();
quad_vote quad_ballot(bool); quad_vote quad_active_threads_mask();

enum class mem_flags { mem_none = 0, mem_device = 1, mem_threadgroup = 2, mem_texture = 4, mem_threadgroup_imageblock = 8, mem_object_data = 16 };
constexpr mem_flags operator|(mem_flags a, mem_flags b) { return mem_flags(int(a) | int(b)); }
constexpr mem_flags operator&(mem_flags a, mem_flags b) { return mem_flags(int(a) & int(b)); }
void threadgroup_barrier(mem_flags); void simdgroup_barrier(mem_flags);

template <class T> struct __is_matrix_element : bool_constant<__is_float<T>> {};
template <class T, int Columns = 8, int Rows = 8> struct simdgroup_matrix {
  static_assert(Columns == 8 && Rows == 8 && __is_matrix_element<T>::value, "simdgroup matrices are 8 x 8, of half, bfloat or float");
  typedef vec<T, 2> storage_type;
  simdgroup_matrix() = default;
  explicit simdgroup_matrix(T);
  thread storage_type& thread_elements(); const thread storage_type& thread_elements() const;
 private:
  storage_type __elements;
};
template <class T, int C = 8, int R = 8> simdgroup_matrix<T, C, R> make_filled_simdgroup_matrix(T);
#define LEGAL_TRANSFER(space)                                                                                             \
  template <class T> void simdgroup_load(thread simdgroup_matrix<T, 8, 8>&, const space T*, ulong = 8, ulong2 = 0, bool = false); \
  template <class T> void simdgroup_store(simdgroup_matrix<T, 8, 8>, space T*, ulong = 8, ulong2 = 0, bool = false);
LEGAL_TRANSFER(device) LEGAL_TRANSFER(threadgroup)
#undef LEGAL_TRANSFER
// A compiler may refuse a product of halves and bfloats.
template <class A, class B> using __product = enable_if_t<is_same<A, B>::value || is_same<A, float>::value || is_same<B, float>::value>;
template <class D, class A, class B>
__product<A, B> simdgroup_multiply(thread simdgroup_matrix<D, 8, 8>&, simdgroup_matrix<A, 8, 8>, simdgroup_matrix<B, 8, 8>);
template <class D, class A, class B, class C>
__product<A, B> simdgroup_multiply_accumulate(thread simdgroup_matrix<D, 8, 8>&, simdgroup_matrix<A, 8, 8>, simdgroup_matrix<B, 8, 8>, simdgroup_matrix<C, 8, 8>);
template <class T> simdgroup_matrix<T, 8, 8> operator*(simdgroup_matrix<T, 8, 8>, simdgroup_matrix<T, 8, 8>);
typedef simdgroup_matrix<float, 8, 8> simdgroup_float8x8;
typedef simdgroup_matrix<half, 8, 8> simdgroup_half8x8;
typedef simdgroup_matrix<bfloat, 8, 8> simdgroup_bfloat8x8;
}  // namespace metal

#define LEGAL_INNER(name) template <class T, class... A> T __metal_simd_##name(T, A...);
LEGAL_INNER(broadcast) LEGAL_INNER(shuffle) LEGAL_INNER(shuffle_and_fill_down) LEGAL_INNER(shuffle_and_fill_up) LEGAL_INNER(shuffle_down)
LEGAL_INNER(shuffle_up) LEGAL_INNER(shuffle_rotate_down) LEGAL_INNER(shuffle_rotate_up) LEGAL_INNER(shuffle_xor) LEGAL_INNER(max)
LEGAL_INNER(min) LEGAL_INNER(sum) LEGAL_INNER(product) LEGAL_INNER(xor) LEGAL_INNER(prefix_exclusive_sum)
LEGAL_INNER(prefix_inclusive_sum) LEGAL_INNER(prefix_exclusive_product) LEGAL_INNER(prefix_inclusive_product)
#undef LEGAL_INNER
ushort __metal_get_simdgroup_size(ushort); uint __metal_get_simdgroup_size(uint);
ushort __metal_get_thread_index_in_simdgroup(ushort); uint __metal_get_thread_index_in_simdgroup(uint);
