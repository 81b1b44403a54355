// Atomics (MSL 2.6, 6.15): of int, uint, bool, float and ulong, in device or threadgroup memory, in relaxed order only.
// Float adds and subtracts, and ulong is raised or lowered, in device memory alone.
#pragma once
#include "legal/vectors.h"

namespace metal {
enum memory_order { memory_order_relaxed = 0 };
template <class T> struct _atomic;
#define LEGAL_ATOMIC(T) template <> struct _atomic<T> { _atomic() = default; T __value; private: _atomic& operator=(const _atomic&); };
LEGAL_ATOMIC(int) LEGAL_ATOMIC(uint) LEGAL_ATOMIC(bool) LEGAL_ATOMIC(float) LEGAL_ATOMIC(ulong)
#undef LEGAL_ATOMIC
template <class T> using atomic = _atomic<T>;
typedef atomic<int> atomic_int; typedef atomic<uint> atomic_uint; typedef atomic<bool> atomic_bool;
typedef atomic<float> atomic_float; typedef atomic<ulong> atomic_ulong;

#define LEGAL_CELLS(space, T)                                                                      \
  void atomic_store_explicit(volatile space _atomic<T>*, T, memory_order);                         \
  T atomic_load_explicit(const volatile space _atomic<T>*, memory_order);                          \
  T atomic_exchange_explicit(volatile space _atomic<T>*, T, memory_order);                         \
  bool atomic_compare_exchange_weak_explicit(volatile space _atomic<T>*, thread T*, T, memory_order, memory_order);
#define LEGAL_UPDATES(space, T)                                                                    \
  T atomic_fetch_add_explicit(volatile space _atomic<T>*, T, memory_order);                        \
  T atomic_fetch_sub_explicit(volatile space _atomic<T>*, T, memory_order);
#define LEGAL_BITS(space, T)                                                                       \
  T atomic_fetch_and_explicit(volatile space _atomic<T>*, T, memory_order);                        \
  T atomic_fetch_or_explicit(volatile space _atomic<T>*, T, memory_order);                         \
  T atomic_fetch_xor_explicit(volatile space _atomic<T>*, T, memory_order);                        \
  T atomic_fetch_max_explicit(volatile space _atomic<T>*, T, memory_order);                        \
  T atomic_fetch_min_explicit(volatile space _atomic<T>*, T, memory_order);
#define LEGAL_IN(space)                                                                            \
  LEGAL_CELLS(space, int) LEGAL_CELLS(space, uint) LEGAL_CELLS(space, bool) LEGAL_CELLS(space, float) \
  LEGAL_UPDATES(space, int) LEGAL_UPDATES(space, uint) LEGAL_BITS(space, int) LEGAL_BITS(space, uint)
LEGAL_IN(device) LEGAL_IN(threadgroup)
LEGAL_UPDATES(device, float)
void atomic_max_explicit(volatile device _atomic<ulong>*, ulong, memory_order);
void atomic_min_explicit(volatile device _atomic<ulong>*, ulong, memory_order);
#undef LEGAL_IN
#undef LEGAL_BITS
#undef LEGAL_UPDATES
#undef LEGAL_CELLS

#ifdef LEGAL_METAL4
// The orders and scopes that came with Metal 3.2 are for fences.
enum __fence_order { memory_order_acquire = 2, memory_order_release = 3, memory_order_acq_rel = 4, memory_order_seq_cst = 5 };
enum thread_scope { thread_scope_thread, thread_scope_simdgroup, thread_scope_threadgroup, thread_scope_device };
enum class mem_flags;
void atomic_thread_fence(mem_flags, memory_order, thread_scope = thread_scope_device);
void atomic_thread_fence(mem_flags, __fence_order, thread_scope = thread_scope_device);
#endif
}  // namespace metal
