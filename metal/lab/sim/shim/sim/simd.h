// Operations among the lanes of a simdgroup or a quad. Every one is a rendezvous of the active lanes.
#pragma once
#include "sim/abi.h"
#include "sim/integer.h"
#include "sim/paths.h"

namespace metal {
typedef const SIM_HIDDEN SimExchange* __exchange;

// `at` is where the kernel's text calls the operation: the default argument of every operation.
template <class T> SIM_FN __exchange __meet(__site at, T value, uint op, uint argument = 0, uint scope = SIM_SCOPE_SIMDGROUP) {
  static_assert(sizeof(T) <= SIM_SLOT, "type too large for a simdgroup operation");
  return (__exchange)sim_exchange(&value, sizeof(T), op, scope, argument, at.key);
}
#define SIM_AT __site at = __site::here()
template <class T> SIM_FN T __slot(__exchange e, uint lane) { return __load_hidden<T>(e->slots[lane]); }
SIM_FN uint __lane() { return ((const SIM_HIDDEN SimThread*)sim_thread())->lane; }

// The value that an active lane brought; a lane that is not there has no value to give.
template <class T> SIM_FN T __from_lane(__exchange e, uint lane, T own) {
  if (lane >= SIM_LANES || !((e->active >> lane) & 1)) { sim_inactive_lane(lane); return own; }
  return __slot<T>(e, lane);
}

// ---- reductions: neighbours first, then pairs of pairs; lanes that are not active take no part ---------
template <class T, class Op> SIM_FN T __reduce_lanes(__exchange e, uint first, uint count, T identity, Op op) {
  T values[SIM_LANES];
  for (uint i = 0; i < count; ++i) values[i] = ((e->active >> (first + i)) & 1) ? __slot<T>(e, first + i) : identity;
  for (uint step = 1; step < count; step *= 2)
    for (uint i = 0; i + step < count; i += 2 * step) values[i] = op(values[i], values[i + step]);
  return values[0];
}
template <class T, class Op> SIM_FN T __simd_reduce(__site at, T value, T identity, Op op) {
  __exchange e = __meet(at, value, SIM_OP_REDUCE);
  SIM_HIDDEN SimExchange* shared = (SIM_HIDDEN SimExchange*)e;
  if (!shared->done) {
    __store_hidden(shared->result, __reduce_lanes(e, 0, SIM_LANES, identity, op));
    shared->done = 1;
  }
  return __load_hidden<T>(e->result);
}
template <class T, class Op> SIM_FN T __quad_reduce(__site at, T value, T identity, Op op) {
  return __reduce_lanes(__meet(at, value, SIM_OP_REDUCE, 0, SIM_SCOPE_QUAD), __lane() & ~3u, 4, identity, op);
}
template <class T, class Op> SIM_FN T __prefix(__site at, T value, T identity, bool inclusive, Op op) {
  __exchange e = __meet(at, value, SIM_OP_PREFIX);
  T r = identity;
  const uint lane = __lane();
  for (uint i = 0; i < lane + inclusive; ++i) if ((e->active >> i) & 1) r = op(r, __slot<T>(e, i));
  return r;
}
template <class T> struct __bounds {
  static constexpr T lowest() { if constexpr (is_floating_point_v<T>) return -numeric_limits<T>::infinity(); else return numeric_limits<T>::lowest(); }
  static constexpr T highest() { if constexpr (is_floating_point_v<T>) return numeric_limits<T>::infinity(); else return numeric_limits<T>::max(); }
};
template <class T, int N> struct __bounds<vec<T, N>> {
  static constexpr vec<T, N> lowest() { return vec<T, N>(__bounds<T>::lowest()); }
  static constexpr vec<T, N> highest() { return vec<T, N>(__bounds<T>::highest()); }
};

#define SIM_REDUCTIONS(group, impl)                                                                          \
  template <class T> SIM_FN T group##_sum(T v, SIM_AT) { return impl(at, v, T(0), [](T a, T b) SIM_INLINE { return T(a + b); }); }          \
  template <class T> SIM_FN T group##_product(T v, SIM_AT) { return impl(at, v, T(1), [](T a, T b) SIM_INLINE { return T(a * b); }); }      \
  template <class T> SIM_FN T group##_max(T v, SIM_AT) { return impl(at, v, __bounds<T>::lowest(), [](T a, T b) SIM_INLINE { return max(a, b); }); }  \
  template <class T> SIM_FN T group##_min(T v, SIM_AT) { return impl(at, v, __bounds<T>::highest(), [](T a, T b) SIM_INLINE { return min(a, b); }); } \
  template <class T> SIM_FN T group##_and(T v, SIM_AT) { return impl(at, v, T(~T(0)), [](T a, T b) SIM_INLINE { return T(a & b); }); }      \
  template <class T> SIM_FN T group##_or(T v, SIM_AT) { return impl(at, v, T(0), [](T a, T b) SIM_INLINE { return T(a | b); }); }           \
  template <class T> SIM_FN T group##_xor(T v, SIM_AT) { return impl(at, v, T(0), [](T a, T b) SIM_INLINE { return T(a ^ b); }); }
#define SIM_INLINE __attribute__((always_inline, nodebug))
SIM_REDUCTIONS(simd, __simd_reduce)
SIM_REDUCTIONS(quad, __quad_reduce)
#undef SIM_REDUCTIONS

template <class T> SIM_FN T simd_prefix_inclusive_sum(T v, SIM_AT) { return __prefix(at, v, T(0), true, [](T a, T b) SIM_INLINE { return T(a + b); }); }
template <class T> SIM_FN T simd_prefix_exclusive_sum(T v, SIM_AT) { return __prefix(at, v, T(0), false, [](T a, T b) SIM_INLINE { return T(a + b); }); }
template <class T> SIM_FN T simd_prefix_inclusive_product(T v, SIM_AT) { return __prefix(at, v, T(1), true, [](T a, T b) SIM_INLINE { return T(a * b); }); }
template <class T> SIM_FN T simd_prefix_exclusive_product(T v, SIM_AT) { return __prefix(at, v, T(1), false, [](T a, T b) SIM_INLINE { return T(a * b); }); }

// ---- shuffles: all but simd_shuffle and quad_shuffle need the same lane, mask or delta in every lane ------
template <class T> SIM_FN T simd_shuffle(T v, ushort lane, SIM_AT) { return __from_lane(__meet(at, v, SIM_OP_SHUFFLE_INDEXED, lane), lane, v); }
template <class T> SIM_FN T simd_broadcast(T v, ushort lane, SIM_AT) { return __from_lane(__meet(at, v, SIM_OP_BROADCAST, lane), lane, v); }
template <class T> SIM_FN T simd_broadcast_first(T v, SIM_AT) {
  __exchange e = __meet(at, v, SIM_OP_BROADCAST_FIRST); return __slot<T>(e, __builtin_ctz(e->active)); }
template <class T> SIM_FN T simd_shuffle_xor(T v, ushort mask, SIM_AT) {
  __exchange e = __meet(at, v, SIM_OP_SHUFFLE_XOR, mask); return __from_lane(e, __lane() ^ mask, v); }
template <class T> SIM_FN T simd_shuffle_up(T v, ushort delta, SIM_AT) {
  __exchange e = __meet(at, v, SIM_OP_SHUFFLE_SHIFT, delta); uint l = __lane(); return l < delta ? v : __from_lane(e, l - delta, v); }
template <class T> SIM_FN T simd_shuffle_down(T v, ushort delta, SIM_AT) {
  __exchange e = __meet(at, v, SIM_OP_SHUFFLE_SHIFT, delta); uint l = __lane(); return l + delta >= SIM_LANES ? v : __from_lane(e, l + delta, v); }
template <class T> SIM_FN T simd_shuffle_rotate_up(T v, ushort delta, SIM_AT) {
  __exchange e = __meet(at, v, SIM_OP_SHUFFLE_SHIFT, delta); return __from_lane(e, (__lane() - delta) % SIM_LANES, v); }
template <class T> SIM_FN T simd_shuffle_rotate_down(T v, ushort delta, SIM_AT) {
  __exchange e = __meet(at, v, SIM_OP_SHUFFLE_SHIFT, delta); return __from_lane(e, (__lane() + delta) % SIM_LANES, v); }
template <class T> SIM_FN T simd_shuffle_and_fill_up(T v, T fill, ushort delta, ushort modulo = SIM_LANES, SIM_AT) {
  struct Pair { T value, fill; };
  __exchange e = __meet(at, Pair{v, fill}, SIM_OP_SHUFFLE_SHIFT, delta | uint(modulo) << 16);
  uint l = __lane(), base = l / modulo * modulo, i = l % modulo;
  return i >= delta ? __from_lane(e, l - delta, Pair{v, fill}).value : __from_lane(e, base + modulo - delta + i, Pair{v, fill}).fill;
}
template <class T> SIM_FN T simd_shuffle_and_fill_down(T v, T fill, ushort delta, ushort modulo = SIM_LANES, SIM_AT) {
  struct Pair { T value, fill; };
  __exchange e = __meet(at, Pair{v, fill}, SIM_OP_SHUFFLE_SHIFT, delta | uint(modulo) << 16);
  uint l = __lane(), base = l / modulo * modulo, i = l % modulo;
  return i + delta < modulo ? __from_lane(e, l + delta, Pair{v, fill}).value : __from_lane(e, base + i + delta - modulo, Pair{v, fill}).fill;
}
template <class T> SIM_FN __exchange __meet_quad(__site at, T v, uint op, uint argument) { return __meet(at, v, op, argument, SIM_SCOPE_QUAD); }
template <class T> SIM_FN T quad_shuffle(T v, ushort lane, SIM_AT) {
  return __from_lane(__meet_quad(at, v, SIM_OP_SHUFFLE_INDEXED, lane), (__lane() & ~3u) + lane, v); }
template <class T> SIM_FN T quad_broadcast(T v, ushort lane, SIM_AT) {
  return __from_lane(__meet_quad(at, v, SIM_OP_BROADCAST, lane), (__lane() & ~3u) + lane, v); }
template <class T> SIM_FN T quad_shuffle_xor(T v, ushort mask, SIM_AT) {
  __exchange e = __meet_quad(at, v, SIM_OP_SHUFFLE_XOR, mask); return __from_lane(e, __lane() ^ (mask & 3u), v); }
template <class T> SIM_FN T quad_shuffle_up(T v, ushort delta, SIM_AT) {
  __exchange e = __meet_quad(at, v, SIM_OP_SHUFFLE_SHIFT, delta); uint l = __lane(); return (l & 3) < delta ? v : __from_lane(e, l - delta, v); }
template <class T> SIM_FN T quad_shuffle_down(T v, ushort delta, SIM_AT) {
  __exchange e = __meet_quad(at, v, SIM_OP_SHUFFLE_SHIFT, delta); uint l = __lane(); return (l & 3) + delta > 3 ? v : __from_lane(e, l + delta, v); }
template <class T> SIM_FN T quad_shuffle_rotate_up(T v, ushort delta, SIM_AT) {
  __exchange e = __meet_quad(at, v, SIM_OP_SHUFFLE_SHIFT, delta); uint l = __lane(); return __from_lane(e, (l & ~3u) + ((l - delta) & 3), v); }
template <class T> SIM_FN T quad_shuffle_rotate_down(T v, ushort delta, SIM_AT) {
  __exchange e = __meet_quad(at, v, SIM_OP_SHUFFLE_SHIFT, delta); uint l = __lane(); return __from_lane(e, (l & ~3u) + ((l + delta) & 3), v); }

// ---- votes --------------------------------------------------------------------------------------------
class simd_vote {
 public:
  typedef ulong vote_t;
  SIM_FN explicit constexpr simd_vote(vote_t v = 0) : bits(v) {}
  SIM_FN explicit constexpr operator vote_t() const { return bits; }
  SIM_FN bool all() const { return bits == 0xffffffffu; }
  SIM_FN bool any() const { return bits != 0; }
 private:
  vote_t bits;
};
SIM_FN uint __votes(__exchange e) { uint r = 0; for (uint i = 0; i < SIM_LANES; ++i) if (((e->active >> i) & 1) && __slot<bool>(e, i)) r |= 1u << i; return r; }
SIM_FN simd_vote simd_ballot(bool b, SIM_AT) { return simd_vote(__votes(__meet(at, b, SIM_OP_VOTE))); }
SIM_FN bool simd_any(bool b, SIM_AT) { return __votes(__meet(at, b, SIM_OP_VOTE)) != 0; }
SIM_FN bool simd_all(bool b, SIM_AT) { __exchange e = __meet(at, b, SIM_OP_VOTE); return __votes(e) == e->active; }
SIM_FN simd_vote simd_active_threads_mask(SIM_AT) { return simd_vote(__meet(at, true, SIM_OP_ACTIVE)->active); }
SIM_FN bool simd_is_first(SIM_AT) { return __lane() == uint(__builtin_ctz(__meet(at, true, SIM_OP_ACTIVE)->active)); }
SIM_FN bool quad_any(bool b, SIM_AT) { uint q = __lane() & ~3u; return (__votes(__meet_quad(at, b, SIM_OP_VOTE, 0)) >> q) & 15u; }
SIM_FN bool quad_all(bool b, SIM_AT) {
  uint q = __lane() & ~3u; __exchange e = __meet_quad(at, b, SIM_OP_VOTE, 0); return ((__votes(e) ^ e->active) >> q & 15u) == 0; }

// ---- barriers -----------------------------------------------------------------------------------------
namespace __flags {  // for its operators: see sim/bfloat.h
enum class mem_flags : uint { mem_none = 0, mem_device = 1, mem_threadgroup = 2, mem_texture = 4, mem_threadgroup_imageblock = 8 };
SIM_FN constexpr mem_flags operator|(mem_flags a, mem_flags b) { return mem_flags(uint(a) | uint(b)); }
SIM_FN constexpr mem_flags operator&(mem_flags a, mem_flags b) { return mem_flags(uint(a) & uint(b)); }
}  // namespace __flags
using __flags::mem_flags;
SIM_FN void threadgroup_barrier(mem_flags flags, SIM_AT) { sim_barrier(uint(flags), at.key); }
SIM_FN void simdgroup_barrier(mem_flags flags, SIM_AT) { sim_simdgroup_barrier(uint(flags), at.key); }
}  // namespace metal

SIM_FN ushort __metal_get_thread_index_in_simdgroup(ushort) { return ushort(metal::__lane()); }
SIM_FN uint __metal_get_thread_index_in_simdgroup() { return metal::__lane(); }
SIM_FN ushort __metal_get_simdgroup_size(ushort) { return SIM_LANES; }
