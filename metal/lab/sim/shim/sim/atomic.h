// Atomics with relaxed order, the only order that Metal has for them.
#pragma once
#include "sim/abi.h"
#include "sim/simd.h"

namespace metal {
enum memory_order { memory_order_relaxed = 0, memory_order_acquire = 2, memory_order_release = 3, memory_order_acq_rel = 4, memory_order_seq_cst = 5 };
enum thread_scope { thread_scope_thread, thread_scope_simdgroup, thread_scope_threadgroup, thread_scope_device };

template <class T> struct _atomic { T __value; };
template <class T> using atomic = _atomic<T>;
typedef atomic<int> atomic_int; typedef atomic<uint> atomic_uint; typedef atomic<bool> atomic_bool;
typedef atomic<float> atomic_float; typedef atomic<ulong> atomic_ulong;

// Threads never run at the same time here, so a plain access is indivisible; the runtime is told that it is atomic.
template <class T> T __cell_value(const SIM_HIDDEN T*);
template <class P> using __cell_type = decltype(__cell_value(declval<P>()));
template <class A> SIM_FN auto __cell(A* a, uint access) {
  using T = remove_cv_t<decltype(a->__value)>;
  sim_atomic_access((const void*)a, sizeof(T), access);
  return (SIM_HIDDEN T*)(void*)a;
}
#define SIM_ATOMIC_RMW(name, access, update)                                                                         \
  template <class A, class V> SIM_FN auto atomic_##name##_explicit(A* a, V value, memory_order) { \
    auto cell = __cell(a, access); using T = __cell_type<decltype(cell)>;                          \
    T old = *cell, v = T(value); *cell = T(update); return old; }
SIM_ATOMIC_RMW(fetch_add, SIM_ATOMIC_UPDATE, old + v) SIM_ATOMIC_RMW(fetch_sub, SIM_ATOMIC_UPDATE, old - v) SIM_ATOMIC_RMW(fetch_and, SIM_ATOMIC_UPDATE, old & v)
SIM_ATOMIC_RMW(fetch_or, SIM_ATOMIC_UPDATE, old | v) SIM_ATOMIC_RMW(fetch_xor, SIM_ATOMIC_UPDATE, old ^ v) SIM_ATOMIC_RMW(fetch_max, SIM_ATOMIC_UPDATE, old > v ? old : v)
SIM_ATOMIC_RMW(fetch_min, SIM_ATOMIC_UPDATE, old < v ? old : v) SIM_ATOMIC_RMW(exchange, SIM_ATOMIC_STORE, v)
#undef SIM_ATOMIC_RMW
template <class A, class V> SIM_FN void atomic_store_explicit(A* a, V value, memory_order) {
  auto cell = __cell(a, SIM_ATOMIC_STORE); *cell = __cell_type<decltype(cell)>(value); }
template <class A> SIM_FN auto atomic_load_explicit(A* a, memory_order) { auto cell = __cell(a, SIM_ATOMIC_LOAD); __cell_type<decltype(cell)> v = *cell; return v; }
template <class A, class E, class V> SIM_FN bool atomic_compare_exchange_weak_explicit(A* a, E* expected, V desired, memory_order, memory_order) {
  auto cell = __cell(a, SIM_ATOMIC_UPDATE); using T = __cell_type<decltype(cell)>;
  if (__builtin_memcmp((const void*)a, expected, sizeof(T)) == 0) { *cell = T(desired); return true; }
  *expected = *cell;
  return false;
}
// Of 64 bits there are a minimum and a maximum, which return nothing.
template <class A, class V> SIM_FN void atomic_max_explicit(A* a, V value, memory_order order) { atomic_fetch_max_explicit(a, value, order); }
template <class A, class V> SIM_FN void atomic_min_explicit(A* a, V value, memory_order order) { atomic_fetch_min_explicit(a, value, order); }
// Memory is always up to date here. To the race detector a fence orders nothing: what it publishes must be read atomically.
SIM_FN void atomic_thread_fence(mem_flags, memory_order, thread_scope = thread_scope_device) {}
}  // namespace metal
